"""Training steps of published workloads, scaled down, in virtual time.

A step has two phases, and each uses every block. Only what the budget holds can be
there when a phase starts, so the rest of the bytes crosses the link in it, however
loads are ordered. That gives the bounds below; the compute in them is measured on the
resident model, with adapters, losses and everything.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from simulated.workloads import wait
from stagehand.runtime import Runtime

WIDTH = 16
PRODUCTS = 4  # matrix products of a block
SMALL = 2048  # bytes: adapters are small, toy blocks are not
SETTLING = 6


@dataclass(frozen=True)
class Case:
    """The seconds that a block computes in forward and loads, and how many may stay."""

    compute: float
    load: float
    kept: int
    checkpoints: str | None = "inside"
    depth: int = 48
    block: int = 1 << 16
    """Bytes of a block."""
    rows: int = 4
    """Of a batch: what a block leaves for backward has 64 bytes for each."""
    region: int = 1
    """Blocks that are computed again together, where there are checkpoints."""

    @property
    def passing(self):
        """Blocks that have to cross the link in a phase."""
        return self.depth - self.kept

    @property
    def rate(self):
        """Bytes that the link moves in a second."""
        return self.block / self.load


class Unit(nn.Module):
    """A block of many bytes and some matrix products; all of it has a gradient."""

    def __init__(self, nbytes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).uniform_(-0.3, 0.3))
        rest = nbytes // 4 - WIDTH * WIDTH
        self.rest = nn.Parameter(torch.empty(rest).uniform_(-0.01, 0.01))

    def forward(self, x):
        x = x + self.rest.view(-1, WIDTH).sum(0)
        for _ in range(PRODUCTS):
            x = nn.functional.linear(x, self.weight)
        return x


class Adapted(nn.Module):
    """A frozen unit beside a trained product of rank one."""

    small_bytes = 2 * 256  # each of its tensors rounded up

    def __init__(self, nbytes):
        super().__init__()
        self.base = Unit(nbytes).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Chain(nn.Module):
    """Blocks in a row, some in each checkpoint, or none."""

    def __init__(self, kind, case):
        super().__init__()
        self.blocks = nn.ModuleList(kind(case.block) for _ in range(case.depth))
        self.checkpoints = case.checkpoints
        self.region = case.region
        self.cut = 0
        """The number of blocks before which backward ends."""

    def forward(self, x):
        for number in range(0, len(self.blocks), self.region):
            run = partial(self.run, number, number + self.region)
            if self.cut and number == self.cut:
                x = x.detach()
            if self.checkpoints is None:
                x = run(x)
            else:
                reentrant = self.checkpoints == "reentrant"
                x = checkpoint(run, x, use_reentrant=reentrant)
        return x

    def run(self, start, stop, x):
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


@dataclass(frozen=True)
class Phases:
    """Seconds of one step's parts."""

    forward: float
    backward: float

    @property
    def whole(self):
        return self.forward + self.backward


def lora_bound(case, resident, *, away=0):
    """`max(C_f, (W - V) / B, A / B) + max(C_b, (W - V + A) / B)`.

    With checkpoints C_b is twice C_f: recompute, and gradients of activations; frozen
    weights have none. Both use a block one after the other, so one load serves them.
    A is the bytes that leave for the time between, over the other lane.
    """
    crossing, out = case.passing * case.load, away / case.rate
    return max(resident.forward, crossing, out) + max(resident.backward, crossing + out)


def full_bound(case, resident):
    """`max(C_f, W / B) + max(C_b, (W - V) / B, G / B)`.

    The optimizer has changed all W bytes on the host, so none are there when forward
    starts. In backward G = W bytes of gradients cross the other way. C_b is 3 C_f with
    checkpoints and 2 C_f without.
    """
    every = case.depth * case.load
    return max(resident.forward, every) + max(resident.backward, every)


@dataclass
class Loop:
    """A model in training."""

    sim: ModuleType
    case: Case
    model: nn.Module
    runtime: Runtime | None = None
    saving: AbstractContextManager = field(default_factory=nullcontext)
    """Entered around each forward."""

    def __post_init__(self):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-3)

    def batch(self):
        return torch.ones(self.case.rows, WIDTH, device="hpu", requires_grad=True)

    def forward(self):
        with self.saving:
            return self.model(self.batch())

    def phases(self):
        """One step's phases, the host waiting for each; then the optimizer's step."""
        wait()
        start = self.sim.host_seconds()
        output = self.forward()
        wait()
        turn = self.sim.host_seconds()
        output.sum().backward()
        wait()
        end = self.sim.host_seconds()
        self.update()
        return Phases(turn - start, end - turn)

    def steps(self, count, *, waits=True):
        for _ in range(count):
            self.forward().sum().backward()
            self.update()
            if waits:
                wait()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, *, waits, steps=4):
        """The mean time of a step."""
        wait()
        start = self.sim.host_seconds()
        self.steps(steps, waits=waits)
        wait()
        return (self.sim.host_seconds() - start) / steps

    @property
    def plan(self):
        return self.runtime._parts.steering.plan


def train(sim, kind, case, *, streams=True, **options):
    """Return a loop; streamed, until its plan is made for measured times."""
    sim.configure(
        h2d_gbps=case.rate / 1e9,
        d2h_gbps=case.rate / 1e9,
        tflops=2 * case.rows * WIDTH**2 * PRODUCTS / case.compute / 1e12,
        hbm_gbps=1e12,
        launch_us=0,
        host_launch_us=0,
    )
    torch.manual_seed(1)
    model = Chain(kind, case)
    if not streams:
        return Loop(sim, case, model.to("hpu"))
    rest = case.depth * getattr(kind, "small_bytes", 0)
    stagehand.layer(model, vram_budget=case.kept * case.block + rest, **options)
    return Loop(sim, case, model, model._stagehand_layer_runtime)


def resident_phases(sim, kind, case):
    """The phases of a case whose weights are all on the device."""
    loop = train(sim, kind, case, streams=False)
    loop.phases()
    return loop.phases()
