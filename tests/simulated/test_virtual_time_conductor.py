"""What the conductor does to virtual time: copies home beside loads, on both links.

A step's backward loads every block and sends home the gradients of those that train.
On a duplex link the two directions do not disturb each other. On a half-duplex one they
share the link, and who goes first decides whether compute waits.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import stagehand
from equality import all_equal
from simulated import workloads
from stagehand.conductor import link
from stagehand.core.device import find_device
from stagehand.residency import finding
from stagehand.runtime import Runtime

WIDTH, BATCH, DEPTH = 16, 4, 32
FLOP = 2 * BATCH * WIDTH * WIDTH
PRODUCTS = 4  # of a block
COMPUTE = 1e-3  # seconds of a block, in forward and in backward
LARGE, SMALL = 90 << 10, 20 << 10
RATE = LARGE / 0.9e-3  # a large block takes 0.9 ms, a small one 0.2 ms
SETTLING = 8


class Unit(nn.Module):
    """A block that computes with a frozen weight and has other bytes, maybe trained."""

    def __init__(self, nbytes, *, trains):
        super().__init__()
        weight = torch.empty(WIDTH, WIDTH).uniform_(-0.3, 0.3)
        self.weight = nn.Parameter(weight, requires_grad=False)
        rest = torch.empty(nbytes // 4 - WIDTH * WIDTH).uniform_(-0.01, 0.01)
        self.rest = nn.Parameter(rest, requires_grad=trains)

    def forward(self, x):
        x = x + self.rest.view(-1, WIDTH).sum(0)
        for _ in range(PRODUCTS):
            x = nn.functional.linear(x, self.weight)
        return x


def burst():
    """Backward begins with the large blocks that train: all gradients come at once."""
    large = [Unit(LARGE, trains=True) for _ in range(DEPTH // 4)]
    return nn.Sequential(
        *(Unit(SMALL, trains=False) for _ in range(DEPTH - len(large))), *large
    )


def all_train():
    return nn.Sequential(*(Unit(LARGE, trains=True) for _ in range(DEPTH)))


ROWS = LARGE // (4 * WIDTH)  # of an activation as large as a large block


class Saver(nn.Module):
    """A frozen block of which autograd saves as much as a large block has bytes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).uniform_(-0.3, 0.3))
        rest = LARGE * 2 // 3 // 4 - WIDTH * WIDTH
        self.rest = nn.Parameter(torch.empty(rest).uniform_(-0.01, 0.01))

    def forward(self, x):
        return nn.functional.linear(x, self.weight).add_(self.rest[:WIDTH]).sin()


class Changing(Unit):
    """A frozen block that changes its other bytes whenever it computes."""

    def forward(self, x):
        x = super().forward(x)
        with torch.no_grad():
            self.rest.mul_(1.01)
        return x


def every_fourth_changes():
    return nn.Sequential(
        *(
            (Changing if number % 4 == 1 else Unit)(LARGE, trains=False)
            for number in range(DEPTH)
        ),
    )


def all_change():
    return nn.Sequential(*(Changing(LARGE, trains=False) for _ in range(DEPTH)))


def large_ones_change():
    """Eight large blocks in a row; the others are small."""
    large = [Changing(LARGE, trains=False) for _ in range(DEPTH // 4)]
    return nn.Sequential(
        *large, *(Unit(SMALL, trains=False) for _ in range(DEPTH - len(large)))
    )


def savers():
    return nn.Sequential(*(Saver() for _ in range(DEPTH))).requires_grad_(False)


def wait():
    torch.accelerator.current_stream().synchronize()


@dataclass
class Loop:
    """A model in training, with or without a conductor."""

    sim: ModuleType
    model: nn.Module
    runtime: Runtime
    conductor: Any
    activations: Any

    def step(self, batches=1):
        """Return the seconds of one backward, its gradients at home."""
        for _ in range(batches):
            x = torch.ones(BATCH, WIDTH, device="hpu", requires_grad=True)
            loss = self.model(x).sum()
            wait()
            begin = self.sim.host_seconds()
            loss.backward()
            wait()
            end = self.sim.host_seconds()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(1e-3 * parameter.grad)
                parameter.grad = None
        return end - begin

    def forward(self):
        """Return the seconds of a forward of which a quarter leaves, and a gradient."""
        for number in range(SETTLING):
            self.activations.step_begin(number)
            x = torch.ones(ROWS, WIDTH, device="hpu", requires_grad=True)
            wait()
            begin = self.sim.host_seconds()
            with self.activations.managed_forward():
                loss = self.model(x).sum()
            wait()
            end = self.sim.host_seconds()
            loss.backward()
            wait()
            assert self.activations.step_end().activations_spilled >= DEPTH // 4
            gradient = x.grad.cpu()
        return end - begin, gradient

    def passes(self, *, waits):
        """Return the seconds of a pass without gradients, and what the last gave."""
        for number in range(SETTLING + 4):
            if number == SETTLING:
                wait()
                begin = self.sim.host_seconds()
            with torch.no_grad():
                output = self.model(torch.ones(BATCH, WIDTH, device="hpu"))
            if waits:
                wait()
        wait()
        return (self.sim.host_seconds() - begin) / 4, output.cpu()

    def backward(self, batches=1):
        for _ in range(SETTLING):
            self.step(batches)
        return sum(self.step(batches) for _ in range(3)) / 3


@pytest.fixture
def start(sim, monkeypatch):
    """Trains a model on a link, with a conductor that knows the link or without."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(link, "_PIECE_BYTES", LARGE)
    monkeypatch.setattr(link, "_known", {})
    loops = []

    def start(
        make,
        *,
        half_duplex,
        conducted,
        slots=4,
        telemetry=False,
        ram=None,
        rate=RATE,
        **options,
    ):
        flop = 2 * ROWS * WIDTH * WIDTH if make is savers else PRODUCTS * FLOP
        sim.configure(
            h2d_gbps=rate / 1e9,
            d2h_gbps=rate / 1e9,
            tflops=flop / COMPUTE / 1e12,
            hbm_gbps=1e12,
            launch_us=0,
            half_duplex=half_duplex,
        )
        torch.manual_seed(1)
        model = make()
        stagehand.layer(
            model, vram_budget=slots * LARGE, ram_budget=ram, telemetry=telemetry
        )
        runtime = model._stagehand_layer_runtime
        conductor = activations = None
        if make is savers:
            budget = DEPTH * LARGE * 3 // 4
            config = stagehand.ActivationStagehandConfig(budget=budget)
            activations = stagehand.ActivationRuntime(config)
        if conducted:
            config = stagehand.ConductorConfig(h2d_slots=64, d2h_slots=64, **options)
            conductor = stagehand.ConductorRuntime(config)
            if activations is not None:
                conductor.attach(activations)
            conductor.attach(model)
        loops.append(Loop(sim, model, runtime, conductor, activations))
        return loops[-1]

    yield start
    for loop in loops:
        if loop.conductor is not None:
            loop.conductor.shutdown()
        if loop.activations is not None:
            loop.activations.shutdown()
        loop.runtime.shutdown()


def test_the_link_is_known_for_what_it_is(start):
    for half_duplex in (False, True):
        link._known.clear()
        rates = start(burst, half_duplex=half_duplex, conducted=True).conductor.link
        assert rates.is_duplex is not half_duplex
        assert rates.h2d == pytest.approx(RATE, rel=0.01)
        busy = RATE / 2 if half_duplex else RATE
        assert rates.h2d_busy == pytest.approx(busy, rel=0.2)


def test_each_direction_of_the_link_has_a_rate_of_its_own(sim, monkeypatch):
    monkeypatch.setattr(link, "_PIECE_BYTES", LARGE)
    monkeypatch.setattr(link, "_known", {})
    sim.configure(h2d_gbps=RATE / 1e9, d2h_gbps=RATE / 4e9, launch_us=0)
    rates = link.measure_link(find_device(None))
    assert rates.h2d == pytest.approx(RATE, rel=0.01)
    assert rates.d2h == pytest.approx(RATE / 4, rel=0.01)
    assert rates.h2d_busy > 2 * rates.d2h_busy


def test_weights_and_gradients_take_no_longer_than_the_busier_lane(start):
    """On a duplex link: within 5 % of the larger of compute and the lanes' bounds."""
    for make, slots in ((all_train, 4), (burst, 4)):
        loop = start(make, half_duplex=False, conducted=True, slots=slots)
        seconds = loop.backward()
        large = sum(unit.rest.requires_grad for unit in loop.model)
        loads = (large * LARGE + (DEPTH - large) * SMALL) / RATE
        home = large * LARGE / RATE
        assert seconds <= 1.05 * max(DEPTH * COMPUTE, loads, home)


@pytest.mark.parametrize("batches", [1, 2])
def test_on_a_half_duplex_link_arbitration_beats_first_come_by_eight_percent(
    start, batches
):
    """A burst of gradients would take the link from loads that compute waits for: also
    where they are added to those of an earlier batch, on the host.
    """
    first_come = start(burst, half_duplex=True, conducted=False).backward(batches)
    link._known.clear()
    arbitrated = start(burst, half_duplex=True, conducted=True).backward(batches)
    assert arbitrated <= 0.92 * first_come
    assert arbitrated <= 1.01 * DEPTH * COMPUTE


def test_with_arbitration_compute_stalls_a_tenth_of_what_it_did(start):
    stalls = []
    for conducted in (False, True):
        link._known.clear()
        loop = start(burst, half_duplex=True, conducted=conducted, telemetry=True)
        loop.backward()
        record = loop.runtime.telemetry.records[-1]
        stalls.append(record.stall_time_ms)
    assert stalls[0] > 2
    assert stalls[1] < 0.1 * stalls[0]


def test_spills_beside_weights_take_no_longer_than_the_busier_lane(start):
    """On a duplex link: within 5 % of the larger of compute and the lanes' bounds."""
    seconds, _ = start(savers, half_duplex=False, conducted=True).forward()
    loads, spills = DEPTH * LARGE * 2 // 3, DEPTH // 4 * LARGE
    assert seconds <= 1.05 * max(DEPTH * COMPUTE, loads / RATE, spills / RATE)


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waiting"])
@pytest.mark.parametrize(
    ("make", "slots"),
    [
        *((every_fourth_changes, slots) for slots in (3, 4)),
        *((large_ones_change, slots) for slots in (3, 4)),
        (all_change, 4),
    ],
)
def test_blocks_that_change_take_no_longer_than_the_busier_lane(
    start, make, slots, waits
):
    """On a duplex link: within 5 % of the larger of compute and the lanes' bounds.

    While a block comes home, compute has the others that are here: the plan sees to it
    that there are some.
    """
    loop = start(make, half_duplex=False, conducted=False, slots=slots)
    seconds, _ = loop.passes(waits=waits)
    assert DEPTH * COMPUTE > DEPTH * LARGE / RATE
    assert seconds <= 1.05 * DEPTH * COMPUTE


@pytest.mark.parametrize(
    ("make", "slots"),
    [*((every_fourth_changes, slots) for slots in (3, 4, 8)), (all_change, 8)],
)
def test_blocks_that_change_leave_a_busy_link_its_loads(start, make, slots):
    """On a duplex link that is slower than compute; three slots are shared."""
    loop = start(make, half_duplex=False, conducted=False, slots=slots, rate=RATE / 2)
    seconds, _ = loop.passes(waits=False)
    loads = (DEPTH - (slots - 3)) * LARGE / (RATE / 2)
    assert seconds <= 1.05 * loads


@pytest.mark.parametrize("conducted", [False, True])
@pytest.mark.parametrize("slots", [3, 4])
def test_blocks_that_change_share_a_half_duplex_link_without_losing_time_on_it(
    start, slots, conducted
):
    """Within 5 % of all bytes that cross, both ways, however they are arbitrated.

    Each copy home is queued behind the loads that are needed sooner, before those that
    are needed later: the order of their deadlines, and nothing is left to yield.
    """
    loop = start(
        every_fourth_changes, half_duplex=True, conducted=conducted, slots=slots
    )
    seconds, _ = loop.passes(waits=False)
    crossing = (DEPTH + DEPTH // 4) * LARGE
    assert seconds <= 1.05 * max(DEPTH * COMPUTE, crossing / RATE)


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("make", [every_fourth_changes, all_change])
def test_blocks_that_change_are_exact_on_any_link(start, make, slots):
    """All at once in memory, and streamed on both links, beside a conductor."""
    torch.manual_seed(1)
    plain = make().to("hpu")
    for _ in range(SETTLING + 4):
        with torch.no_grad():
            expected = plain(torch.ones(BATCH, WIDTH, device="hpu")).cpu()
    for half_duplex in (False, True):
        link._known.clear()
        loop = start(make, half_duplex=half_duplex, conducted=True, slots=slots)
        _, output = loop.passes(waits=False)
        assert torch.equal(output, expected)
        loop.runtime.park()
        for mine, theirs in zip(
            loop.model.parameters(), plain.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs.cpu())


def test_spills_that_yield_to_weights_beat_first_come_by_six_percent(start):
    """The first blocks' tensors leave in the first blocks' time, unless they wait."""
    seconds, gradients = [], []
    for conducted in (False, True):
        link._known.clear()
        loop = start(savers, half_duplex=True, conducted=conducted, slots=3)
        taken, gradient = loop.forward()
        seconds.append(taken)
        gradients.append(gradient)
    assert seconds[1] <= 0.94 * seconds[0]
    assert seconds[1] <= 1.01 * DEPTH * COMPUTE
    assert torch.equal(*gradients)


def test_a_link_that_is_full_anyway_loses_nothing_by_arbitration(start):
    loop = start(all_train, half_duplex=True, conducted=False)
    first_come = loop.backward()
    loop.runtime.shutdown()  # or both would share the device
    link._known.clear()
    arbitrated = start(all_train, half_duplex=True, conducted=True).backward()
    assert arbitrated <= 1.001 * first_come


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("make", [burst, all_train])
def test_gradients_that_came_home_in_pieces_or_late_are_the_same(start, make, batches):
    """Where all blocks train, the link has no time left: they come at the very end."""

    def trained(**options):
        link._known.clear()
        loop = start(make, half_duplex=True, **options)
        for _ in range(SETTLING):
            loop.step(batches)
        loop.runtime.park()
        return [p.detach().clone() for p in loop.model.parameters()]

    plain, conducted = trained(conducted=False), trained(conducted=True)
    assert all_equal(plain, conducted)


@pytest.mark.parametrize("spare", [2, 9])
def test_gradients_that_wait_for_their_way_home_leave_half_of_the_memory_for_them(
    start, monkeypatch, spare
):
    """They are added on the host, and arrive in pinned memory beside what is there."""

    def trained(**options):
        link._known.clear()
        loop = start(burst, half_duplex=True, **options)
        gradients = loop.runtime._uses.gradients
        arena = loop.runtime._parts.pinned_arena
        acquire, arriving = arena.acquire_nowait, []

        def acquired(nbytes, holder):
            lease = acquire(nbytes, holder)
            if holder == "an arriving gradient":
                free = arena.account.free_bytes
                arriving.append((gradients._arriving_bytes, free))
            return lease

        monkeypatch.setattr(arena, "acquire_nowait", acquired)
        for _ in range(SETTLING):
            loop.step(2)
        loop.runtime.park()
        return arriving, [p.detach().clone() for p in loop.model.parameters()]

    ram = (DEPTH - 8) * (SMALL + 256) + (16 + spare) * (LARGE + 256)
    _, plain = trained(conducted=False)
    arriving, conducted = trained(conducted=True, ram=ram)
    assert all_equal(plain, conducted)
    assert max(waiting for waiting, _ in arriving) >= spare // 2 * (LARGE - 1024)
    assert all(waiting <= free + 2 * (LARGE + 256) for waiting, free in arriving)


def test_what_waits_for_its_way_home_is_no_more_than_allowed(start, monkeypatch):
    loop = start(burst, half_duplex=True, conducted=True, yield_backlog_mb=0.25)
    most = []
    traffic = loop.runtime.engine.traffic
    put_aside = traffic.put_aside

    def watch(parcel):
        put_aside(parcel)
        most.append(traffic.backlog)

    monkeypatch.setattr(traffic, "put_aside", watch)
    loop.backward()
    assert LARGE < max(most) <= 0.25 * 2**20
    assert traffic.backlog == 0


@pytest.mark.parametrize("choice", ["measure", "always", "never"])
def test_measuring_the_link_can_be_skipped_and_happens_once(start, sim, choice):
    options = {"half_duplex": True, "conducted": True, "link_arbitration": choice}
    first = start(burst, **options)
    copies = sim.h2d_copies()
    again = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration=choice)
    )
    assert sim.h2d_copies() == copies
    assert (again.link is not None) is (choice == "measure")
    assert first.runtime.engine.traffic.yields is (choice != "never")
    again.shutdown()


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waiting"])
@pytest.mark.parametrize("load", [0.9e-3, 1.5e-3, 4e-3])
def test_a_conductor_as_configured_by_default_slows_no_loop_down(
    sim, monkeypatch, load, waits
):
    """A host that is ahead finds all slots full: that alone is no contention."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(link, "_known", {})
    monkeypatch.setattr(link, "_PIECE_BYTES", workloads.BLOCK)
    case = workloads.equal(48, 1e-3, load)
    workloads.configure(sim, case, host_us=0.0)
    loop = workloads.stream(sim, case, 18 * workloads.BLOCK, mode="layers")
    loop.run(8, waits=True)
    alone = loop.seconds(waits=waits)
    conductor = stagehand.ConductorRuntime(stagehand.ConductorConfig())
    conductor.attach(loop.model)
    loop.run(8, waits=waits)
    assert loop.seconds(waits=waits) <= 1.001 * alone
    conductor.shutdown()
    loop.runtime.shutdown()
