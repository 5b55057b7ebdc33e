"""How long streamed passes take in virtual time, against bounds and policies."""

import random

import pytest
import torch

from schedules import evenly_spaced
from simulated.workloads import (
    BATCH,
    BLOCK,
    FLUX,
    FLUX_IN_PIECES,
    GB,
    LTX2,
    PASSES,
    RINGS,
    WIDTH,
    Case,
    Loop,
    configure,
    equal,
    pieces,
    stream,
    wait,
)
from stagehand.core.device import AcceleratorDevice
from stagehand.residency import finding

waiting = pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waiting"])


@pytest.fixture
def start(sim, monkeypatch):
    """Streams a case's model and shuts it down after the test."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)  # toy blocks stand for large ones
    loops = []

    def start(case, budget, *, mode="layers", host_us=0.0, **options):
        configure(sim, case, host_us=host_us)
        if mode == "resident":
            return Loop(sim, case.model().to("hpu"))
        loops.append(stream(sim, case, budget, mode=mode, **options))
        return loops[-1]

    yield start
    for loop in loops:
        loop.runtime.shutdown()


@pytest.fixture
def settled(start):
    """Streams as `start` does, and runs until the plan is made with measured times."""

    def settled(case, budget, **options):
        loop = start(case, budget, **options)
        loop.run(6, waits=True)
        assert loop.plan.limit != "unknown"
        return loop

    return settled


# Link-bound


@waiting
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("name", RINGS)
def test_whole_blocks_are_within_three_percent_of_the_best_policy(
    settled, name, mode, waits
):
    case, count = RINGS[name]
    residents = [evenly_spaced(48, count - slots) for slots in (2, 4)]
    loop = settled(case, count * BLOCK, mode=mode)
    best = case.best_policy(count * BLOCK, residents)
    assert loop.seconds(waits=waits) <= 1.03 * best


@pytest.mark.parametrize("name", LTX2)
def test_pieces_of_blocks_are_within_three_percent_of_the_bound(settled, name):
    case, budget = pieces(LTX2[name], 8), 16 * BLOCK
    loop = settled(case, budget)
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.03 * case.bound(budget)


@waiting
@pytest.mark.parametrize(("gigabytes", "over"), [(2, 1.03), (8, 1.03), (16, 1.07)])
def test_unequal_blocks_are_near_the_best_policy(settled, gigabytes, over, waits):
    """Near compute-bound, two sizes in fixed slots cost a little; pieces do not."""
    budget = int(gigabytes * GB)
    loop = settled(FLUX, budget)
    assert loop.seconds(waits=waits) <= over * FLUX.best_policy(budget)


def test_water_filling_hides_all_loads_of_unequal_pieces(settled):
    loop = settled(FLUX_IN_PIECES, int(16 * GB))
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.02 * FLUX.compute


@waiting
@pytest.mark.parametrize("budget_kib", [300, 375])
def test_a_huge_head_behind_mixed_layers_is_near_the_best_policy(
    settled, budget_kib, waits
):
    nbytes = [8 << 10, 8 << 10, 29 << 10, 29 << 10, 29 << 10] * 24 + [256 << 10]
    products = [size >> 10 for size in nbytes]
    case = Case(nbytes, 5.4e-6 * 4, 25e6, products)
    loop = settled(case, budget_kib << 10)
    best = case.best_policy(budget_kib << 10)
    assert loop.seconds(waits=waits) <= 1.03 * best


# Compute-bound


COMPUTE_BOUND = {
    "two slots": (equal(48, 14.04e-3, 8.28e-3), 2),
    "22 of 48": (LTX2["6144 H100"], 22),
    "47 of 48": (LTX2["6144 H100"], 47),
    "t = 1.5 c": (equal(48, 1e-3, 1.5e-3), 18),
}
compute_bound = pytest.mark.parametrize(
    ("case", "count"), COMPUTE_BOUND.values(), ids=COMPUTE_BOUND
)


@waiting
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@compute_bound
def test_a_compute_bound_loop_is_within_two_percent_of_resident(
    start, settled, case, count, mode, waits
):
    resident = start(case, 0, mode="resident")
    expected = resident.run(1, waits=True)
    seconds = resident.seconds(waits=waits)
    del resident  # its memory counts at the watermarks
    loop = settled(case, count * BLOCK, mode=mode)
    assert loop.seconds(waits=waits) <= 1.02 * seconds
    assert torch.equal(loop.run(1, waits=True), expected)


@waiting
@pytest.mark.parametrize("count", [2, 18])
def test_a_compute_bound_loop_never_stalls_and_only_hits(settled, count, waits):
    case, _ = COMPUTE_BOUND["two slots" if count == 2 else "t = 1.5 c"]
    loop = settled(case, count * BLOCK, telemetry=True)
    loop.run(4, waits=waits)
    for record in loop.runtime.telemetry.records[-3:]:
        assert record.prefetch_hits == len(loop.streamed)
        assert record.resident_uses == 48 - len(loop.streamed)
        assert record.prefetch_misses == record.stall_count == 0
        assert record.stall_time_ms == 0
        assert record.compute_time_ms == pytest.approx(1e3 * case.compute)


def test_a_pass_prefetches_the_start_of_the_next(settled):
    """Else every pass of a decoding loop would begin with a stall of a whole load."""
    case = equal(8, 1e-3, 0.9e-3)
    loop = settled(case, 3 * BLOCK)
    assert loop.seconds(waits=True) == pytest.approx(case.compute)


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_copies_go_on_while_the_host_pauses_between_passes(settled, mode):
    """A link-bound loop has no link time to give: pauses have to hide in the loads."""
    case = equal(48, 0.1e-3, 1.5e-3)
    loop = settled(case, 18 * BLOCK, mode=mode)
    loads = len(loop.streamed) * 1.5e-3
    loop.pause = 2.5e-3
    loop.run(1, waits=True)
    assert loop.seconds(waits=True) <= 1.005 * loads


@waiting
@pytest.mark.parametrize("load", [0.8e-3, 1.5e-3])
def test_a_host_that_is_slow_to_launch_still_prefetches_in_time(
    start, settled, load, waits
):
    """The host takes 0.9 of the device's time, so it is never far ahead."""
    count = 2 if load < 1e-3 else 18
    case = Case([BLOCK] * 48, 1e-3 / 20, BLOCK / load, [20] * 48)
    resident = start(case, 0, mode="resident", host_us=900 / 22)
    expected = resident.seconds(waits=waits)
    loop = settled(case, count * BLOCK, host_us=900 / 22)
    assert loop.seconds(waits=waits) <= 1.02 * expected


# What a settled pass does not do


@waiting
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("name", ["768 H100", "t = 1.5 c"])
def test_a_settled_pass_copies_each_streamed_block_once_and_nothing_else(
    settled, monkeypatch, sim, name, mode, waits
):
    case, count = RINGS[name]
    loop = settled(case, count * BLOCK, mode=mode)
    allocated = []
    for kind in ("empty", "pinned"):
        monkeypatch.setattr(AcceleratorDevice, kind, lambda *args: allocated.append(1))
    before = sim.h2d_copies(), sim.h2d_bytes(), sim.syncs()
    loop.run(PASSES, waits=waits)
    copies, nbytes, syncs = sim.h2d_copies(), sim.h2d_bytes(), sim.syncs()
    streamed = len(loop.streamed)
    assert 48 - count < streamed < 48
    assert copies - before[0] == PASSES * streamed
    assert nbytes - before[1] == PASSES * streamed * BLOCK
    assert syncs - before[2] == PASSES * waits
    assert not allocated


# Measuring


@pytest.mark.parametrize(("waits", "host_us"), [(False, 2000), (True, 0)])
def test_measured_compute_has_no_stalls_in_it(start, waits, host_us):
    case = LTX2["768 H100"]
    loop = start(case, 16 * BLOCK, host_us=host_us)
    loop.run(12, waits=waits)
    workload = loop.runtime._parts.steering.workload()
    assert workload.seconds == pytest.approx(case.seconds, rel=0.05)
    assert workload.link_bytes_per_second == pytest.approx(case.rate, rel=0.01)


@pytest.mark.parametrize("host_us", [200, 990])
def test_a_host_that_never_waits_gets_measured_times_too(start, host_us):
    """Each pass begins while the one before is not over on the device."""
    case = equal(48, 1e-3, 1.5e-3)
    loop = start(case, 18 * BLOCK, host_us=host_us)
    loop.run(20, waits=False)
    assert loop.plan.limit != "unknown"
    assert loop.runtime._measure.stopwatch.uses == 0


@pytest.mark.parametrize("name", ["768 H100", "t = 1.5 c"])
def test_telemetry_costs_no_time_on_the_device(settled, name):
    """It is read while copies for the next pass are under way."""
    case, count = RINGS[name]
    plain = settled(case, count * BLOCK).seconds(waits=True)
    timed = settled(case, count * BLOCK, telemetry=True).seconds(waits=True)
    assert timed == pytest.approx(plain, rel=1e-3)


def test_one_slow_pass_does_not_spoil_the_measured_times(start, sim):
    """The first decoding pass loads its kernels: what it takes tells nothing."""
    case = equal(48, 1e-3, 1.5e-3)
    loop = start(case, 18 * BLOCK, host_us=1)
    loop.run(1, waits=True)
    hook = loop.model.first[5].register_forward_pre_hook(
        lambda module, args: sim.advance_host_us(50_000)
    )
    loop.run(1, waits=True)
    hook.remove()
    loop.run(4, waits=True)
    seconds = loop.runtime._parts.steering.workload().seconds
    assert seconds == pytest.approx(case.seconds, rel=0.05)


@pytest.mark.parametrize("count", [20, 28])
def test_what_a_decoder_uses_for_each_token_stays(start, count):
    """Its encoder, which is used once for each sentence, streams beside it."""
    case = equal(48, 0.1e-3, 1.5e-3)
    loop = start(case, count * BLOCK)
    x = torch.ones(BATCH, WIDTH, device="hpu")
    plans = []

    def sentence():
        with torch.no_grad():
            for part in [loop.model.first] + [loop.model.second] * 20:
                part(x)
                wait()
                plans.append(loop.plan)

    for _ in range(4):
        sentence()
    made, before = len(plans), loop.sim.h2d_copies()
    for _ in range(3):
        sentence()
    assert plans[made:] == [loop.plan] * (len(plans) - made)
    each_token = max(0, 24 - count + 2)  # with two slots through which all streams
    copies = loop.sim.h2d_copies() - before
    assert copies <= 3 * (24 + 20 * each_token + 8)


def test_inputs_that_grow_later_are_planned_for(settled):
    """A first image in a low resolution: then a pass was its loads, now it computes."""
    small, large = equal(24, 0.03e-3, 1e-3), equal(24, 1e-3, 1e-3)
    budget = 5 * BLOCK
    loop = settled(small, budget)
    assert loop.plan.limit in {"link", "budget"}
    configure(loop.sim, large)
    loop.run(140, waits=True)
    assert loop.plan.limit == "compute"
    assert loop.seconds(waits=True) <= 1.02 * large.compute


def test_a_cycle_of_two_routes_is_planned_as_one(start):
    """Halves that are called by turns: each entry is a pass of its own."""
    case = equal(48, 1e-3, 1.5e-3)
    loop = start(case, 18 * BLOCK)
    x = torch.ones(BATCH, WIDTH, device="hpu")

    def step():
        began = loop.sim.host_seconds()
        for half in (loop.model.first, loop.model.second):
            with torch.no_grad():
                half(x)
            wait()
        return loop.sim.host_seconds() - began

    for _ in range(8):
        step()
    made = loop.plan
    assert made.limit == "compute"
    assert step() <= 1.02 * case.compute
    assert loop.plan is made


@waiting
@pytest.mark.parametrize("few", [1, 24])
def test_passes_of_few_blocks_and_of_all_in_any_number_are_planned_as_one(
    start, few, waits
):
    """Drafts by the first layers, or steps that a cache skips but for the first."""
    case = equal(48, 1e-3, 1.5e-3)
    loop = start(case, 34 * BLOCK)
    part = loop.model.first if few == 24 else loop.model.first[0]
    x = torch.ones(BATCH, WIDTH, device="hpu")
    pick = random.Random(0)
    plans = []

    def step():
        """Some of few blocks, and one of all; return what all compute."""
        times = pick.randint(1, 7)
        with torch.no_grad():
            for number in range(times + 1):
                (part if number < times else loop.model)(x)
                plans.append(loop.plan)
                if waits:
                    wait()
        return (times * few + 48) * 1e-3

    for _ in range(4):
        for _ in range(4):
            step()
        wait()
    made = len(plans)
    began = loop.sim.host_seconds()
    expected = sum(step() for _ in range(12))
    wait()
    assert loop.sim.host_seconds() - began <= 1.03 * expected
    assert loop.plan.limit == "compute"
    assert plans[made:] == [loop.plan] * (len(plans) - made)


def test_a_block_that_begins_and_ends_the_pass_keeps_its_plan(start):
    """Its first use follows its last: a use all the same, whether it stays or not."""
    case = equal(12, 1e-3, 1.5e-3)
    loop = start(case, 5 * BLOCK, again=1)
    plans = []
    for _ in range(12):
        loop.run(1, waits=True)
        plans.append(loop.plan)
    assert plans[-1].limit != "unknown"
    assert plans[6:] == plans[-1:] * 6
