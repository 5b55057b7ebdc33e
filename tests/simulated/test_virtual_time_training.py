"""How long training steps take in virtual time, against the least that they can take.

A step has two phases, and each uses every block. Only what the budget holds can be
there when a phase starts, so the rest of the bytes crosses the link in it, however
loads are ordered. That gives the bounds below; the compute in them is measured on the
resident model, with adapters, losses and everything.
"""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand.core.layout import same_bits
from stagehand.core.transfer import Priority, TransferEngine
from stagehand.residency import blocks
from stagehand.runtime import Runtime

WIDTH, BATCH, DEPTH = 16, 4, 48
PRODUCTS = 4  # matrix products of a block
FLOP = 2 * BATCH * WIDTH * WIDTH  # of each
BLOCK = 1 << 16
ADAPTER = 2 * 256  # bytes, each of its tensors rounded up
SETTLING = 6


class Unit(nn.Module):
    """A block of many bytes and some matrix products; all of it has a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).uniform_(-0.3, 0.3))
        rest = BLOCK // 4 - WIDTH * WIDTH
        self.rest = nn.Parameter(torch.empty(rest).uniform_(-0.01, 0.01))

    def forward(self, x):
        x = x + self.rest.view(-1, WIDTH).sum(0)
        for _ in range(PRODUCTS):
            x = nn.functional.linear(x, self.weight)
        return x


class Adapted(nn.Module):
    """A frozen unit beside a trained product of rank one."""

    def __init__(self):
        super().__init__()
        self.base = Unit().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 1, bias=False)
        self.up = nn.Linear(1, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Chain(nn.Module):
    """Blocks in a row, each in a checkpoint of its own or none."""

    def __init__(self, kind, *, checkpoints):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(DEPTH))
        self.checkpoints = checkpoints
        self.cut = 0
        """The number of blocks before which backward ends."""

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if self.cut and number == self.cut:
                x = x.detach()
            if self.checkpoints is None:
                x = block(x)
            else:
                reentrant = self.checkpoints == "reentrant"
                x = checkpoint(block, x, use_reentrant=reentrant)
        return x


@dataclass(frozen=True)
class Case:
    """The seconds that a block computes in forward and loads, and how many may stay."""

    compute: float
    load: float
    kept: int
    checkpoints: str | None = "inside"

    @property
    def passing(self):
        """Blocks that have to cross the link in a phase."""
        return DEPTH - self.kept


@dataclass(frozen=True)
class Phases:
    """Seconds of one step's parts."""

    forward: float
    backward: float

    @property
    def whole(self):
        return self.forward + self.backward


def lora_bound(case, resident):
    """`max(C_f, (W - V) / B) + max(C_b, (W - V) / B)`.

    With checkpoints C_b is twice C_f: recompute, and gradients of activations; frozen
    weights have none. Both use a block one after the other, so one load serves them.
    """
    crossing = case.passing * case.load
    return max(resident.forward, crossing) + max(resident.backward, crossing)


def full_bound(case, resident):
    """`max(C_f, W / B) + max(C_b, (W - V) / B, G / B)`.

    The optimizer has changed all W bytes on the host, so none are there when forward
    starts. In backward G = W bytes of gradients cross the other way. C_b is 3 C_f with
    checkpoints and 2 C_f without.
    """
    every = DEPTH * case.load
    return max(resident.forward, every) + max(resident.backward, every)


def wait():
    torch.accelerator.current_stream().synchronize()


@dataclass
class Loop:
    """A model in training."""

    sim: ModuleType
    model: nn.Module
    optimizer: torch.optim.Optimizer
    runtime: Runtime | None = None

    def batch(self):
        return torch.ones(BATCH, WIDTH, device="hpu", requires_grad=True)

    def phases(self):
        """One step's phases, the host waiting for each; then the optimizer's step."""
        wait()
        start = self.sim.host_seconds()
        output = self.model(self.batch())
        wait()
        turn = self.sim.host_seconds()
        output.sum().backward()
        wait()
        end = self.sim.host_seconds()
        self.update()
        return Phases(turn - start, end - turn)

    def steps(self, count, *, waits=True):
        for _ in range(count):
            self.model(self.batch()).sum().backward()
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


@pytest.fixture
def start(sim, monkeypatch):
    """Trains a case resident, or streamed until its plan is made for measured times."""
    monkeypatch.setattr(blocks, "_SMALL_BYTES", 2048)  # adapters are, toy blocks not
    loops = []

    def start(kind, case, *, streams=True):
        sim.configure(
            h2d_gbps=BLOCK / case.load / 1e9,
            d2h_gbps=BLOCK / case.load / 1e9,
            tflops=PRODUCTS * FLOP / case.compute / 1e12,
            hbm_gbps=1e12,
            launch_us=0,
            host_launch_us=0,
        )
        torch.manual_seed(1)
        model = Chain(kind, checkpoints=case.checkpoints)
        if not streams:
            model.to("hpu")
        trained = [p for p in model.parameters() if p.requires_grad]
        loop = Loop(sim, model, torch.optim.SGD(trained, lr=1e-3))
        if streams:
            rest = DEPTH * ADAPTER if kind is Adapted else 0
            budget = case.kept * BLOCK + rest
            stagehand.layer(model, vram_budget=budget)
            loop.runtime = model._stagehand_layer_runtime
            loops.append(loop)
            loop.steps(SETTLING)
            assert loop.plan.limit != "unknown"
        return loop

    yield start
    for loop in loops:
        loop.runtime.shutdown()


@pytest.fixture
def resident(start):
    """The phases of a case whose weights are all on the device."""

    def resident(kind, case):
        loop = start(kind, case, streams=False)
        loop.phases()
        return loop.phases()

    return resident


# LTX-2 by its video tokens and the device, and ratios around one.
CASES = {
    "LTX-2 768 H100": Case(1.05e-3, 14.04e-3, 16),
    "LTX-2 768 H100, 24 of 48": Case(1.05e-3, 14.04e-3, 24),
    "LTX-2 6144 H100": Case(8.28e-3, 14.04e-3, 16),
    "LTX-2 768 3090": Case(10.48e-3, 30.89e-3, 16),
    "t = 3 c, 4 of 48": Case(1e-3, 3e-3, 4),
    "t = 2.25 c": Case(1e-3, 2.25e-3, 18),
    "t = 1.5 c": Case(1e-3, 1.5e-3, 18),
    "t = c, 8 of 48": Case(1e-3, 1e-3, 8),
    "t = 0.9 c, 3 of 48": Case(1e-3, 0.9e-3, 3),
}
every_case = pytest.mark.parametrize("name", CASES)
most_cases = pytest.mark.parametrize("name", [*CASES][::2])
some_cases = pytest.mark.parametrize("name", ["LTX-2 768 H100", "t = 1.5 c"])
both_kinds = pytest.mark.parametrize("checkpoints", ["inside", "reentrant"])


def without_checkpoints(case):
    return Case(case.compute, case.load, case.kept, None)


# A frozen base


@every_case
def test_lora_with_checkpoints_is_within_five_percent_of_two_phases(
    start, resident, name
):
    case = CASES[name]
    alone = resident(Adapted, case)
    assert alone.backward == pytest.approx(2 * alone.forward, rel=0.05)
    loop = start(Adapted, case)
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.05 * lora_bound(case, alone)


@most_cases
def test_lora_without_checkpoints_is_within_five_percent_of_two_phases(
    start, resident, name
):
    case = without_checkpoints(CASES[name])
    alone = resident(Adapted, case)
    loop = start(Adapted, case)
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.05 * lora_bound(case, alone)
    # Adapters stay on the device: reading them is no use of its own.
    assert len(loop.runtime._parts.steering.workload().order) == 2 * DEPTH


@both_kinds
@some_cases
def test_recompute_and_backward_of_a_block_share_one_load(start, name, checkpoints):
    """And the turn uses what is there: no phase loads what the budget can hold."""
    case = Case(CASES[name].compute, CASES[name].load, CASES[name].kept, checkpoints)
    loop = start(Adapted, case)
    loaded = loop.sim.h2d_bytes()
    loop.steps(3)
    assert loop.sim.h2d_bytes() - loaded == 3 * 2 * case.passing * BLOCK
    assert loop.plan.streamed_bytes == 2 * case.passing * BLOCK


@pytest.mark.parametrize("checkpoints", [None, "inside", "reentrant"])
def test_frozen_weights_never_cross_the_link_to_the_host(start, checkpoints):
    """Only where a new plan lets a resident leave is it compared with its master."""
    loop = start(Adapted, Case(1e-3, 1.5e-3, 18, checkpoints))
    sent = loop.sim.d2h_copies()
    loop.steps(3)
    assert loop.sim.d2h_copies() == sent


# A trained base


def stepped(start, name, *, checkpoints="inside"):
    case = CASES[name]
    case = Case(case.compute, case.load, case.kept, checkpoints)
    return case, start(Unit, case)


@pytest.mark.parametrize("checkpoints", [None, "inside"])
@most_cases
def test_full_training_is_within_ten_percent_of_its_bound(
    start, resident, name, checkpoints
):
    """Gradients go home beside backward; what the optimizer takes comes on top."""
    case, loop = stepped(start, name, checkpoints=checkpoints)
    bound = full_bound(case, resident(Unit, case))
    found = loop.phases()
    assert found.whole <= 1.1 * bound
    assert loop.phases().whole == pytest.approx(found.whole)


@some_cases
def test_every_gradient_crosses_once_while_backward_goes_on(start, resident, name):
    case, loop = stepped(start, name)
    sent = loop.sim.d2h_bytes()
    found = loop.phases()
    assert loop.sim.d2h_bytes() - sent == DEPTH * BLOCK
    alone = resident(Unit, case)
    # The gradient of the block that comes last has nothing left to hide behind.
    longest = max(alone.backward, DEPTH * case.load)
    assert found.backward <= 1.03 * (longest + case.load)


@some_cases
def test_a_step_loads_all_that_changed_and_what_the_turn_has_not_left(start, name):
    case, loop = stepped(start, name)
    for _ in range(2):
        loaded = loop.sim.h2d_bytes()
        loop.model(loop.batch()).sum().backward()
        assert loop.sim.h2d_bytes() - loaded == (DEPTH + case.passing) * BLOCK
        loop.update()


@some_cases
def test_nothing_of_trained_blocks_is_loaded_before_the_optimizer_steps(start, name):
    """Blocks that a backward pass does not come to are not there when it ends."""
    _, loop = stepped(start, name)
    loop.model.cut = 8
    loop.steps(4)
    loop.model(loop.batch()).sum().backward()
    first = [b for b in loop.runtime._parts.streamed[:8] if not b.stays]
    assert first
    assert [block.name for block in first if block.slot] == []
    loop.update()
    loop.steps(1)


@some_cases
def test_changed_residents_are_loaded_in_order_ahead_of_their_use(
    start, monkeypatch, name
):
    """Only the first load of a step is one that its use demands."""
    _, loop = stepped(start, name)
    assert loop.plan.resident
    demanded = []
    load = TransferEngine.load

    def counted(engine, slot, target, source, priority):
        if priority is Priority.CRITICAL:
            demanded.append(slot.occupant.index)
        return load(engine, slot, target, source, priority)

    monkeypatch.setattr(TransferEngine, "load", counted)
    loop.steps(2)
    assert demanded == [loop.runtime._parts.streamed[0].index] * 2


@some_cases
def test_batches_that_accumulate_are_within_ten_percent_of_as_many_steps(
    start, resident, name
):
    """An optimizer may step without a word, so each forward loads all again."""
    case, loop = stepped(start, name)
    bound = 2 * full_bound(case, resident(Unit, case))
    for _ in range(3):
        wait()
        began, sent = loop.sim.host_seconds(), loop.sim.d2h_bytes()
        for _ in range(2):
            loop.model(loop.batch()).sum().backward()
        wait()
        assert loop.sim.host_seconds() - began <= 1.1 * bound
        assert loop.sim.d2h_bytes() - sent == 2 * DEPTH * BLOCK
        loop.update()


@some_cases
def test_streamed_training_in_virtual_time_has_the_resident_result(start, name):
    case = CASES[name]
    for kind in (Adapted, Unit):
        loop = start(kind, case)
        loop.runtime.shutdown()
        other = start(kind, case, streams=False)
        other.steps(SETTLING)
        for one, two in zip(
            loop.model.parameters(), other.model.parameters(), strict=True
        ):
            assert same_bits(one.detach(), two.detach().cpu())
