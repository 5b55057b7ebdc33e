"""Whatever a script of training does under autocast, in any order, is done streamed."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_training_any_order import LR, MAKERS, RECOMPUTING, AnyOrder, learn, numbers
from test_training_autocast import of_graphs

from exploring import running
from stagehand.optim import GradScaler
from streamed import GRAD_MODES
from training import Net, Recomputing, Run, built

TYPES = st.sampled_from([torch.bfloat16, torch.float16])


class Casting(Net):
    """A model whose forward is a region of autocast."""

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return super().forward(x)


class CastingEach(Recomputing):
    """A region of autocast around each block that is recomputed, and none behind it."""

    def around(self, block, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = super().around(block, x)
            with torch.autocast(x.device.type, enabled=False):
                return torch.tanh(x.float())


@dataclass(kw_only=True)
class CastingRun(Run):
    """A run whose losses are made under autocast, or not."""

    casts: torch.dtype | None = None

    def region(self):
        """What is around forwards that have a backward behind the region."""
        return torch.autocast(self.place, self.casts, enabled=self.casts is not None)

    def loss(self, number=0):
        with self.region():
            return super().loss(number)


def _look(mode):
    def look(run, number):
        with GRAD_MODES[mode]():
            return run.model(run.batch(number)).detach()

    return look


def _learn_twice(run, number):
    loss = run.loss(number) + run.loss(number + 1)
    loss.backward()
    return loss.detach()


def _learn_later(run, number):
    losses = [run.loss(number), run.loss(number + 1)]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def _learn_without(run, number):
    with torch.autocast(run.place, enabled=False):
        return learn(run, number)


def _learn_from_the_input(run, number):
    x = run.batch(number).requires_grad_()
    run.model(x).float().square().mean().backward()
    return x.grad


IN_ONE_REGION = {
    "learn": learn,
    "learn twice": _learn_twice,
    "learn later": _learn_later,
    "learn without": _learn_without,
    "learn from the input": _learn_from_the_input,
    **{mode: _look(mode) for mode in GRAD_MODES},
}


class AnyOrderCasting(AnyOrder):
    """A script whose passes are cast, each by itself or several in one region."""

    kind_of_run = CastingRun
    makers: ClassVar = {
        **MAKERS,
        "casting": built(Casting),
        "casting each": built(CastingEach),
    }
    recomputing = (*RECOMPUTING, "casting each")

    @rule(dtype=st.none() | TYPES)
    def cast(self, dtype):
        for run in self.runs:
            run.casts = dtype

    @rule(
        dtype=TYPES,
        number=numbers,
        acts=st.lists(st.sampled_from(list(IN_ONE_REGION)), min_size=1, max_size=4),
    )
    def do_in_one_region(self, dtype, number, acts):
        if self.runs[0].handles:  # see docs/training.md
            acts = [name for name in acts if name != "learn twice"]

        def act(run):
            run.casts, before = dtype, run.casts
            with torch.autocast(run.place, dtype=dtype):
                given = [IN_ONE_REGION[name](run, number) for name in acts]
            run.casts = before
            return given

        self.both(act)

    @rule(dtype=TYPES, number=numbers, overflows=st.booleans())
    def step_scaled(self, dtype, number, overflows):
        self.drop_losses()

        def act(run):
            scaler = GradScaler(run.place, init_scale=1024.0, growth_interval=1)
            optimizer = torch.optim.SGD(run.model.parameters(), lr=LR)
            with torch.autocast(run.place, dtype=dtype):
                loss = run.loss(number)
            scaler.scale(loss * torch.inf if overflows else loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach(), torch.tensor(scaler.get_scale())

        self.both(act)


AnyOrderCasting.TestCase.settings = running(9, 25)
# Else the resident model has no gradients of what it has cast without them.
TestAnyOrderCasting = of_graphs(AnyOrderCasting.TestCase)
