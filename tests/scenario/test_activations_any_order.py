"""Whatever a script of training does, its saved tensors may leave meanwhile."""

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from keeping import flush
from test_training_any_order import AnyOrder, numbers, penalize

import stagehand
from exploring import running
from stagehand.errors import StagehandOOMError
from training import Run

# Where the peak of memory is elsewhere, say, what leaves saves nothing: it says so.
pytestmark = pytest.mark.filterwarnings("ignore::stagehand.StagehandWarning")

ROWS = 128  # what each layer saves is large enough to leave
BUDGETS = {"smallest": 4000, "third": 60_000, "most": 200_000, "all": 800_000}


@dataclass(kw_only=True)
class SavingRun(Run):
    """A run whose forwards save under a budget."""

    saved: Any = None

    def batch(self, number=0, rows=ROWS):
        return super().batch(number, rows if number % 3 else rows // 2)

    def around(self):
        return nullcontext() if self.saved is None else self.saved.managed_forward()

    def loss(self, number=0):
        with self.around():
            return super().loss(number)


class AnyOrderSaving(AnyOrder):
    """A script that has its tensors saved elsewhere, and a conductor, now and then."""

    kind_of_run = SavingRun

    def __init__(self):
        super().__init__()
        self.conductor = None

    @precondition(lambda self: self.place == "hpu")
    @rule(
        budget=st.sampled_from(list(BUDGETS.values())),
        checks=st.booleans(),
        most=st.sampled_from([None, 1]),
    )
    def save(self, budget, checks, most):
        self.save_no_more()
        config = stagehand.ActivationStagehandConfig(
            budget=budget,
            debug_checksums=checks,
            max_inflight_d2h=most,
            max_inflight_h2d=most,
        )
        self.runs[1].saved = stagehand.ActivationRuntime(config)
        self.attach(self.runs[1].saved)

    @rule()
    def save_no_more(self):
        run = self.runs[1]
        if run.saved is None:
            return
        self.drop_losses()
        flush()
        parts = run.saved._parts
        if self.conductor is not None:
            self.conductor.detach(run.saved)
        run.saved.shutdown()
        run.saved = None
        assert parts.spill.held_bytes == parts.arena.leased_bytes == parts.pool.out == 0

    @precondition(lambda self: self.place == "hpu")
    @rule(slots=st.integers(1, 2), yields=st.sampled_from(["never", "always"]))
    def conduct(self, slots, yields):
        self.conduct_no_more()
        config = stagehand.ConductorConfig(
            h2d_slots=slots,
            d2h_slots=slots,
            link_arbitration=yields,
            yield_backlog_mb=0.01,
        )
        self.conductor = stagehand.ConductorRuntime(config)
        self.attach(self.runs[1].runtime)
        self.attach(self.runs[1].saved)

    def attach(self, what):
        if self.conductor is not None and what is not None:
            with suppress(StagehandOOMError):  # then it is not conducted
                self.conductor.attach(what)

    @rule()
    def conduct_no_more(self):
        if self.conductor is not None:
            self.conductor.shutdown()
            self.conductor = None

    def stream(self, setting):
        super().stream(setting)
        self.attach(self.runs[1].runtime)
        if self.place == "hpu" and self.runs[1].saved is None:
            self.save(BUDGETS[setting[1]], checks=False, most=None)

    @rule(number=numbers)
    def learn_inside(self, number):
        def act(run):
            with run.around():
                loss = run.loss(number)
                loss.backward(retain_graph=True)
                loss.backward()
            return loss.detach()

        self.both(act)

    @precondition(lambda self: self.kind not in (*self.several, "reentering"))
    @precondition(lambda self: not self.runs[0].handles)
    @rule(number=numbers)
    def learn_from_a_penalty(self, number):
        self.both(lambda run: penalize(run, number, run.around))

    def leave(self):
        self.save_no_more()
        self.conduct_no_more()


AnyOrderSaving.TestCase.settings = running(20, 25)
TestAnyOrderSaving = AnyOrderSaving.TestCase
