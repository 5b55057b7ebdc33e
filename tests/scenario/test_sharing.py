"""Several models on one device: one cap for all, exact results, and who may stay."""

import gc
import re
import threading
import time
import weakref
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    blocks_of,
    run_resident,
    runtime_of,
    stack,
)
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from stagehand.residency import shared
from stagehand.residency.shared import SharedDevice, shared_device
from stagehand.units import MIB

BUDGET = 6 * LAYER_BYTES
places = pytest.mark.parametrize("place", ["cpu", "hpu"])


class Crowd:
    """Models that share a device, and what each gives when it is alone there."""

    def __init__(self, sim, place, depths, budgets=BUDGET):
        if isinstance(budgets, int):
            budgets = [budgets] * len(depths)
        self.sim, self.place = sim, place
        self.plain = [varied(depth, seed) for seed, depth in enumerate(depths)]
        self.expected = [run_resident(m, place, batch()) for m in self.plain]
        self.models = [deepcopy(model) for model in self.plain]
        for model, budget in zip(self.models, budgets, strict=True):
            stagehand.layer(model, vram_budget=budget, device=place)
        self.device = runtime_of(self.models[0])._tenancy.shared
        self.cap = max(budgets)

    def run(self, *numbers):
        for number in numbers:
            with torch.no_grad():
                output = self.models[number](batch())
            assert_bitwise_equal(output, self.expected[number], f"model {number}")
            self.look()

    def look(self):
        assert self.device.ledger.device.peak_bytes <= self.cap
        if threading.current_thread() is threading.main_thread():  # else it changes
            held = sum(r._parts.weights.held_bytes for r in self.runtimes)
            assert self.device.ledger.device.held_bytes == held
        assert self.sim.races() == []

    @property
    def runtimes(self):
        return [
            runtime_of(m)
            for m in self.models
            if "_stagehand_layer_runtime" in m.__dict__
        ]

    def loads(self, number, call):
        """Bytes that cross to the device for one model while something is done."""
        runtime = runtime_of(self.models[number])
        before = runtime.report().streamed_bytes
        call()
        return runtime.report().streamed_bytes - before

    def end(self):
        for runtime in self.runtimes:
            runtime.shutdown()
        for model, plain in zip(self.models, self.plain, strict=True):
            assert_bitwise_equal(model.state_dict(), plain.state_dict(), "weights")


def varied(depth, seed):
    model = stack(depth)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.uniform_(-0.3, 0.3, generator=generator)
    return model


@pytest.fixture
def crowd(sim):
    crowds = []

    def crowd(place, depths, budgets=BUDGET):
        crowds.append(Crowd(sim, place, depths, budgets))
        return crowds[-1]

    yield crowd
    for each in crowds:
        each.end()
    crowds.clear()


# One cap


@places
@pytest.mark.parametrize("budget", [1, 2, 3, 6, 11, 17, 40])
@pytest.mark.parametrize("count", [2, 4])
def test_models_that_alternate_under_one_cap_are_bitwise_those_that_are_resident(
    crowd, place, count, budget
):
    some = crowd(place, range(6, 6 + count), budget * LAYER_BYTES)
    for _ in range(4):
        some.run(*range(count))
    some.run(*([0] * 3), *([count - 1] * 3), *range(count))


@places
def test_a_second_model_does_not_double_the_budget(crowd, place):
    some = crowd(place, [8, 8])
    some.run(0, 1, 0, 1)
    assert some.device.ledger.device.limit_bytes == BUDGET


@places
@pytest.mark.parametrize("shared", [True, False])
def test_a_stagehand_runtime_shares_with_a_layer_or_has_its_own(crowd, place, shared):
    some = crowd(place, [8])
    whole, model = some.device.ledger.device, deepcopy(some.plain[0])
    marks = {"vram_high_watermark_mb": BUDGET / MIB, "vram_low_watermark_mb": 0.01}
    config = stagehand.StagehandConfig(**marks, shared=shared)
    runtime = stagehand.StagehandRuntime(model, config, r"^\d$", device=place)
    for each in (*some.models, model) * 3:
        with torch.no_grad():
            assert_bitwise_equal(each(batch()), some.expected[0], "output")
    assert whole.peak_bytes <= whole.limit_bytes == BUDGET
    assert (runtime.device_account is whole) is shared
    runtime.shutdown()


def test_the_cap_is_the_largest_budget_and_each_model_keeps_to_its_own(crowd):
    some = crowd("hpu", [8, 8], [3 * LAYER_BYTES, 7 * LAYER_BYTES])
    some.run(0, 1, 0, 0, 1, 1)
    small, large = some.runtimes
    assert some.device.ledger.device.limit_bytes == 7 * LAYER_BYTES
    assert small.report().peak_device_bytes <= 3 * LAYER_BYTES
    assert large.report().shared_bytes == 7 * LAYER_BYTES


def test_the_cap_falls_when_the_largest_model_leaves(crowd):
    some = crowd("hpu", [8, 8], [3 * LAYER_BYTES, 7 * LAYER_BYTES])
    some.run(0, 1)
    some.runtimes[1].shutdown()
    assert some.device.ledger.device.limit_bytes == 3 * LAYER_BYTES
    some.run(0)


def test_a_model_that_was_dropped_leaves_its_place(crowd):
    some = crowd("hpu", [8, 8])
    some.run(0, 1)
    runtime_of(some.models[0]).reserve_for_resident(some.models[1])
    del some.models[1], some.plain[1]
    assert [h.name for h in some.device.holdings()] == ["Sequential"]
    some.run(0)


@pytest.mark.parametrize("comes", ["reserve", "guest", "pass", "another"])
def test_a_model_that_goes_in_the_middle_of_something_has_left_when_the_next_comes(
    crowd, comes
):
    """The collector may end it while the device's books are in use: it is seen to."""
    some = crowd("hpu", [8, 8], 8 * LAYER_BYTES)
    first, second = some.runtimes
    third = varied(8, 2)
    if comes == "guest":
        stagehand.layer(third, vram_budget=8 * LAYER_BYTES, device="hpu")
    second.reserve_for_resident(priority=stagehand.ResidentPriority.SECONDARY)
    with some.device._changed:
        second.shutdown()
        assert some.device._gone
    if comes == "reserve":
        assert first.reserve_for_resident() == 8 * LAYER_BYTES
    elif comes == "guest":
        with runtime_of(third).as_guest(first):
            some.run(0)
    elif comes == "pass":
        some.run(0)
        assert first._parts.weights.held_bytes == 8 * LAYER_BYTES
    else:
        stagehand.layer(third, vram_budget=8 * LAYER_BYTES, device="hpu")
    assert not some.device._gone
    if "_stagehand_layer_runtime" in third.__dict__:
        runtime_of(third).shutdown()


def test_a_model_may_have_a_budget_of_its_own(crowd, sim):
    some = crowd("hpu", [8])
    some.run(0)
    apart = varied(8, 9)
    expected = run_resident(apart, "hpu", batch())
    held = some.runtimes[0]._parts.weights.held_bytes
    stagehand.layer(apart, vram_budget=4 * LAYER_BYTES, device="hpu", shared=False)
    with torch.no_grad():
        assert_bitwise_equal(apart(batch()), expected, "output")
    assert some.runtimes[0]._parts.weights.held_bytes == held
    assert some.device.ledger.device.limit_bytes == BUDGET
    with pytest.raises(stagehand.ConfigError, match="shared=False"):
        runtime_of(apart).reserve_for_resident(some.models[0])
    runtime_of(apart).shutdown()


def test_all_runtimes_of_a_device_copy_on_one_pair_of_lanes(crowd):
    some = crowd("hpu", [8, 8])
    one, other = (runtime._parts.engine for runtime in some.runtimes)
    assert one.h2d.stream == other.h2d.stream
    assert one.d2h.stream == other.d2h.stream
    assert one.h2d.stream is not other.h2d.stream  # two threads must not enter one


def test_a_device_is_forgotten_with_its_last_runtime(crowd):
    some = crowd("hpu", [8])
    shared = some.device
    assert shared_device(shared.device) is shared
    some.end()
    assert shared.holdings() == []
    assert shared.ledger.device.held_bytes == 0


def test_runtimes_that_come_one_after_the_other_copy_on_the_same_lanes(sim):
    """What torch has cached is for one stream: each runtime added its own to it."""
    lanes = set()
    for _ in range(3):
        model = stack()
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
        engine = runtime_of(model)._parts.engine
        lanes.add((engine.h2d.stream, engine.d2h.stream))
        assert_passes_equal(model, run_resident(stack(), "hpu", batch()), batch())
        runtime_of(model).shutdown()
        del model, engine
        gc.collect()
    assert len(lanes) == 1


def test_models_that_fit_together_are_loaded_once(crowd):
    some = crowd("hpu", [3, 2], 5 * LAYER_BYTES)
    some.run(0, 1, 0, 1)
    for number in (0, 1):
        assert some.loads(number, lambda: some.run(0, 1, 1, 0, 1)) == 0


@places
@pytest.mark.parametrize("turns", [1, 2])
def test_edits_of_what_stays_are_kept_where_another_model_runs_in_between(
    crowd, sim, place, turns
):
    """As an average of what another one learns: on the device, through `.data`.

    Those from before the others' turns were expected were on the device alone.
    """
    some = crowd(place, [3, 2], 5 * LAYER_BYTES)
    model, plain = some.models[0], some.plain[0]
    for number in range(6):
        some.run(*[1] * turns)
        for tensor in (*model.parameters(), *plain.parameters()):
            tensor.data.mul_(1.25)
        some.expected[0] = run_resident(plain, place, batch())
        some.run(*[0] * (1 + number % 2))


# Reservations


def loads_of(some, number, *numbers):
    return some.loads(number, lambda: some.run(*numbers))


@places
@pytest.mark.parametrize("budget", [10, 12])
def test_blocks_with_a_primary_reservation_are_loaded_once(crowd, place, budget):
    some = crowd(place, [4, 9, 9, 9], budget * LAYER_BYTES)
    some.run(1, 2)
    reserved = runtime_of(some.models[0]).reserve_for_resident()
    assert reserved == 4 * LAYER_BYTES
    some.run(0, 0)
    total = loads_of(some, 0, 1, 0, 2, 2, 2, 3, 3, 0, 1, 2, 3, 0)
    assert total == 0
    assert all(block.bound or block.slot for block in blocks_of(some.models[0]))


def test_what_streams_keeps_its_residents_under_a_primary_reservation(crowd):
    some = crowd("hpu", [12, 9, 9], 8 * LAYER_BYTES)
    runtime = runtime_of(some.models[0])
    some.run(0, 1, 2)
    reserved = runtime.reserve_for_resident()
    assert reserved == 7 * LAYER_BYTES  # each of the others needs one layer to run
    some.run(0, 0, 0, 0)  # until the plan is made with measured times
    staying = [b for b in blocks_of(some.models[0]) if b.stays]
    assert len(staying) >= 3
    alone = loads_of(some, 0, 0)
    some.run(1, 2, 2, 2, 1, 1)
    assert all(block.slot is not None for block in staying)
    assert loads_of(some, 0, 0) == alone == (12 - len(staying)) * LAYER_BYTES


def test_a_reservation_survives_new_plans(crowd):
    some = crowd("hpu", [4, 9], 8 * LAYER_BYTES)
    runtime, other = some.runtimes
    runtime.reserve_for_resident()
    some.run(0, 1, 0)
    other.set_budget(7 * LAYER_BYTES)
    runtime.set_budget(6 * LAYER_BYTES)
    other._parts.steering.set_budget(3 * LAYER_BYTES)
    some.run(1, 0, 1)
    assert loads_of(some, 0, 1, 1, 0, 1) == 0
    assert "PRIMARY" in repr(runtime)


def test_a_reservation_ends_with_its_runtime(crowd):
    some = crowd("hpu", [4, 9], 6 * LAYER_BYTES)
    runtime, other = some.runtimes
    runtime.reserve_for_resident()
    some.run(0, 1)
    runtime.shutdown()
    other.release_reservation(some.models[0])  # nothing to release, and no error
    assert [h.why for h in some.device.holdings()] == ["not held"]
    some.run(1, 1)
    assert other._parts.weights.held_bytes > 3 * LAYER_BYTES


def test_a_released_reservation_gives_the_room_back(crowd):
    some = crowd("hpu", [4, 9], 6 * LAYER_BYTES)
    some.sim.configure(h2d_gbps=0.01, launch_us=0)
    runtime, other = some.runtimes
    other.reserve_for_resident(some.models[0])
    some.run(0, 1, 1, 1, 1)
    assert other._parts.weights.limit_bytes == 2 * LAYER_BYTES
    other.release_reservation(runtime)
    other.release_reservation(runtime)
    some.run(1, 1, 1, 1)
    assert other._parts.weights.limit_bytes > 3 * LAYER_BYTES


def test_who_does_not_share_the_memory_has_no_reservation_to_release_there(
    crowd, monkeypatch
):
    """Each device counts its models by itself, so their numbers may be the same."""
    monkeypatch.setattr(shared, "_devices", weakref.WeakValueDictionary())  # as new
    some = crowd("hpu", [4, 9])
    apart = stagehand.layer(stack(), vram_budget=BUDGET, shared=False)
    runtime, other = some.runtimes
    assert runtime_of(apart)._tenancy.number == runtime._tenancy.number
    runtime.reserve_for_resident()
    other.release_reservation(apart)
    assert "reserved" in repr(runtime)
    runtime_of(apart).shutdown()


def test_a_reservation_that_does_not_fit_is_refused_with_what_is_missing(crowd):
    some = crowd("hpu", [3, 4, 9], 6 * LAYER_BYTES)
    first, second, _ = some.runtimes
    first.reserve_for_resident()
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        second.reserve_for_resident()
    message = str(caught.value)
    assert "8.71 KB are missing" in message  # 3 + 4 + 1 of 6 layers
    assert "13.06 KB reserved for Sequential, PRIMARY" in message
    assert "4.36 KB that other models need to run" in message
    assert caught.value.needed_bytes == 8 * LAYER_BYTES
    assert second._tenancy.why == "not held"
    some.run(0, 1, 2, 0, 1, 2)


def test_a_reservation_that_a_smaller_budget_leaves_alone_is_named(crowd):
    """While it was not on the device, the other model was told of a budget of zero."""
    made = crowd("hpu", [6, 4], 10 * LAYER_BYTES)
    reserving, _ = made.runtimes
    reserving.reserve_for_resident()
    for runtime in made.runtimes:
        runtime.set_budget(6 * LAYER_BYTES)
    for _ in range(2):
        with pytest.raises(stagehand.StagehandOOMError, match=r"\(reserved, PRIMARY\)"):
            made.run(1)
        made.run(0)
    reserving.release_reservation()
    made.run(1, 0, 1)


def test_a_secondary_reservation_is_evicted_only_for_a_load_that_could_not_be_met(
    crowd,
):
    some = crowd("hpu", [5, 4, 9], 6 * LAYER_BYTES)
    held, small, _ = some.runtimes
    held.reserve_for_resident(priority=stagehand.ResidentPriority.SECONDARY)
    some.run(0, 0)
    assert loads_of(some, 0, 1, 2, 1, 1, 2, 0) == 0  # one layer is enough for them
    held.release_reservation()
    small.reserve_for_resident()
    with pytest.raises(stagehand.StagehandOOMError):
        held.reserve_for_resident(priority=stagehand.ResidentPriority.SECONDARY)
    small.release_reservation()
    held.reserve_for_resident(priority=stagehand.ResidentPriority.SECONDARY)
    some.run(0)
    wide = wide_model()
    expected = run_resident(wide, "hpu", batch())
    stagehand.layer(wide, vram_budget=6 * LAYER_BYTES, device="hpu")
    with torch.no_grad():
        assert_bitwise_equal(wide(batch()), expected, "output")
    left = held._parts.weights.held_bytes
    assert left == 3 * LAYER_BYTES  # no more than had to be
    runtime_of(wide).shutdown()
    some.run(0, 1, 2)


def wide_model():
    """One layer of three times the usual size, which has to be there at once."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh())


# Keeps


@places
def test_what_is_kept_resident_is_not_evicted_for_another_model(crowd, place):
    some = crowd(place, [3, 9, 9], 6 * LAYER_BYTES)
    first, second, _ = some.runtimes
    some.run(0, 1)
    with second.keep_resident(some.models[0]):
        some.run(0)
        assert loads_of(some, 0, 1, 2, 1, 1, 1, 2, 0, 0) == 0
        assert "kept resident" in repr(first)
        assert "Sequential holds 13.06 KB, keeps 13.06 KB (kept resident)" in str(
            second.report()
        )
    assert "not held" in repr(first)


@places
def test_who_is_kept_gives_up_to_uses_by_hand_what_it_does_not_keep(crowd, place):
    """A pass of the other model got it, and between passes it was refused for good."""
    some = crowd(place, [6, 9], 6 * LAYER_BYTES)
    kept, other = some.runtimes
    some.run(0, 0)
    with kept.keep_resident():
        holding = some.device.holdings()[0]
        assert holding.held_bytes > holding.kept_bytes
        for block in other.block_ids:
            other.before_block(block)
            other.after_block(block)
        assert kept._parts.weights.held_bytes == holding.kept_bytes
    some.run(0, 1)


def test_a_keep_ends_with_an_exception_and_nests(crowd):
    some = crowd("hpu", [3, 9])
    runtime = some.runtimes[0]

    class Stop(Exception):
        pass

    with runtime.keep_resident():
        with (
            pytest.raises(Stop),
            runtime.keep_resident(),
            runtime.keep_resident(runtime),
        ):
            raise Stop
        assert runtime._tenancy.why == "kept resident"
        some.run(0)
        assert loads_of(some, 0, 1, 1, 1, 0) == 0
    assert runtime._tenancy.why == "not held"
    with pytest.raises(Stop), runtime.keep_resident():
        raise Stop
    assert runtime._tenancy.why == "not held"


def test_keeps_of_two_models_that_overlap_end_in_any_order(crowd):
    some = crowd("hpu", [2, 2, 9])
    one, other, _ = some.runtimes
    first, second = ExitStack(), ExitStack()
    first.enter_context(one.keep_resident())
    second.enter_context(one.keep_resident(other))
    second.enter_context(other.keep_resident(one))
    some.run(0, 1)
    assert loads_of(some, 0, 2, 2, 2, 0, 1) == 0
    first.close()
    assert one._tenancy.why == other._tenancy.why == "kept resident"
    assert loads_of(some, 1, 2, 2, 2, 0, 1) == 0
    second.close()
    assert one._tenancy.why == other._tenancy.why == "not held"


def test_a_kept_model_leaves_the_others_what_they_need_to_run(crowd):
    some = crowd("hpu", [9, 9, 9])
    first = some.runtimes[0]
    with first.keep_resident():
        some.run(0, 0, 1, 2, 0, 1, 2)
        assert first._parts.weights.limit_bytes == BUDGET - LAYER_BYTES


@pytest.mark.parametrize("kept", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("reserved", [False, True])
def test_kept_models_leave_the_others_room_where_not_all_can_run_beside_each_other(
    crowd, kept, reserved
):
    some = crowd("hpu", [9, 8, 7], 3 * LAYER_BYTES // 2)
    with ExitStack() as holds:
        for number in kept:
            holds.enter_context(some.runtimes[number].keep_resident())
        if reserved:
            some.runtimes[0].reserve_for_resident(
                priority=stagehand.ResidentPriority.SECONDARY
            )
        some.run(0, 1, 2, 2, 1, 0, 0, 1, 2)


@places
def test_a_smaller_budget_lets_the_other_models_give_up_what_is_above_it(crowd, place):
    some = crowd(place, [3, 3, 3], [9 * LAYER_BYTES, LAYER_BYTES, LAYER_BYTES])
    some.runtimes[1].set_budget(4 * LAYER_BYTES)
    some.run(1, 0, 1, 0)
    held = some.device.ledger.device.held_bytes
    some.runtimes[0].set_budget(4 * LAYER_BYTES)
    assert held > 4 * LAYER_BYTES >= some.device.ledger.device.held_bytes
    some.run(0, 1, 2)


@pytest.mark.parametrize(
    ("priorities", "there"),
    [
        (("PRIMARY", "PRIMARY", "PRIMARY"), (4, 1, 1)),
        (("SECONDARY", "SECONDARY", "PRIMARY"), (1, 1, 4)),
        (("SECONDARY", "PRIMARY", "PRIMARY"), (1, 4, 1)),
        (("PRIMARY", "SECONDARY", "SECONDARY"), (4, 1, 1)),
    ],
)
def test_a_smaller_budget_cuts_the_reservations_that_are_newest_and_least_firm(
    crowd, priorities, there
):
    """Until it is raised again, down to what each model needs to run."""
    some = crowd("hpu", [4, 4, 4], 13 * LAYER_BYTES)
    some.run(0, 1, 2)
    for runtime, name in zip(some.runtimes, priorities, strict=True):
        runtime.reserve_for_resident(priority=stagehand.ResidentPriority[name])
    some.run(0, 1, 2)
    ledger = some.device.ledger.device
    assert ledger.held_bytes == 12 * LAYER_BYTES
    for runtime in some.runtimes:
        runtime.set_budget(6 * LAYER_BYTES)
    held = [runtime._parts.weights.held_bytes for runtime in some.runtimes]
    assert held == [number * LAYER_BYTES for number in there]
    some.run(0, 1, 2, 2, 1, 0)
    assert ledger.held_bytes <= ledger.limit_bytes == 6 * LAYER_BYTES
    for runtime in some.runtimes:
        runtime.set_budget(13 * LAYER_BYTES)
    some.run(0, 1, 2)
    assert ledger.held_bytes == 12 * LAYER_BYTES


class Together(nn.Module):
    """Reads the weights of three layers in one call, of which two make a plan."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(stack(3))

    def forward(self, x):
        return x @ torch.cat([layer[0].weight for layer in self.layers])[: x.shape[-1]]


@pytest.fixture(params=["cpu", "hpu"])
def together(sim, request):
    """Makes such a model and another one, with calls that give the right outputs."""
    made = []

    def together(budget, others):
        plain, other = Together(), varied(9, 0)
        for each, nbytes in ((plain, budget), (other, others)):
            expected = run_resident(each, request.param, batch())
            stagehand.layer(each, vram_budget=nbytes, device=request.param)
            made.append(each)

            def call(model=each, expected=expected):
                with torch.no_grad():
                    assert_bitwise_equal(model(batch()), expected, "output")

            yield call, runtime_of(each)

    yield together
    ledger = runtime_of(made[0])._tenancy.shared.ledger.device
    assert ledger.peak_bytes <= ledger.limit_bytes
    for model in made:
        runtime_of(model).shutdown()


together_only = pytest.mark.filterwarnings(
    "ignore:.*every call is watched:stagehand.StagehandWarning"
)


@together_only
def test_what_one_call_reads_at_once_takes_what_others_would_keep(together):
    (run, _), (run_other, _) = together(3 * LAYER_BYTES, 3 * LAYER_BYTES)
    for _ in range(3):
        run_other()
        run()


@together_only
@pytest.mark.parametrize("hold", ["none", "reserved", "kept"])
def test_a_refusal_of_what_one_call_reads_at_once_names_a_budget_that_works(
    together, hold
):
    """Who is kept takes more of a larger cap: the next pass named another budget."""
    (run, runtime), (run_other, other) = together(LAYER_BYTES, 2 * LAYER_BYTES)
    run_other()
    with other.keep_resident() if hold == "kept" else nullcontext():
        if hold == "reserved":
            assert other.reserve_for_resident() == LAYER_BYTES
        beside = {"none": 0, "reserved": LAYER_BYTES, "kept": 2 * LAYER_BYTES}[hold]
        for _ in range(2):
            run_other()
            with pytest.raises(stagehand.StagehandOOMError) as caught:
                run()
            assert caught.value.needed_bytes == 3 * LAYER_BYTES + beside
        runtime.set_budget(caught.value.needed_bytes)
        run_other()
        run()


@places
def test_who_is_shut_down_leaves_the_others_within_the_largest_budget_of_theirs(
    crowd, place
):
    some = crowd(place, [3, 3, 3], [9 * LAYER_BYTES, 4 * LAYER_BYTES, 4 * LAYER_BYTES])
    some.run(0, 1, 2)
    some.runtimes[0].park()
    ledger = some.device.ledger.device
    held = ledger.held_bytes
    some.runtimes[0].shutdown()
    assert held > ledger.limit_bytes == 4 * LAYER_BYTES >= ledger.held_bytes
    some.run(1, 2)


@pytest.mark.parametrize("hold", ["keep", "PRIMARY", "SECONDARY", "guest"])
def test_who_holds_room_leaves_the_others_what_they_train_beside_who_runs(crowd, hold):
    """Norms that train stay on the device, beside their optimizer's state: then what
    two models need by turns is more than the largest of what each needs.
    """
    some = crowd("hpu", [9])
    held = some.runtimes[0]
    trained = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(3, n)) for n in (1, 2)]
    for model in trained:
        model[1:].requires_grad_(False)
    plain = [deepcopy(model).to("hpu") for model in trained]
    for model in trained:
        stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    some.models += trained

    def step(model, optimizer):
        model(batch().to("hpu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = [
        partial(step, model, torch.optim.AdamW(model[0].parameters(), foreach=False))
        for model in (*trained, *plain)
    ]
    with ExitStack() as stack:
        for number in range(3):
            for each in steps:
                each()
            some.run(0)
            if number:
                continue
            if hold == "keep":
                stack.enter_context(held.keep_resident())
            elif hold == "guest":
                host = runtime_of(trained[0])
                host.reserve_for_resident()
                stack.enter_context(host.as_guest(some.models[0]))
            else:
                held.reserve_for_resident(priority=stagehand.ResidentPriority[hold])
    del some.models[1:]
    for model, other in zip(trained, plain, strict=True):
        runtime_of(model).shutdown()
        expected = {name: value.cpu() for name, value in other.state_dict().items()}
        assert_bitwise_equal(model.state_dict(), expected, "weights")


def test_keeping_a_model_without_blocks_warns_and_does_nothing(sim, caplog):
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    with runtime_of(model).keep_resident():
        pass
    assert "no blocks" in caplog.text
    runtime_of(model).shutdown()


def test_whose_blocks_are_held_may_be_said_by_the_name_that_users_know(crowd):
    some = crowd("hpu", [3, 9])
    named = {"model_or_runtime": some.models[0]}
    first, second = some.runtimes
    with second.keep_resident(**named):
        assert first._tenancy.why == "kept resident"
    priority = stagehand.ResidentPriority.PRIMARY
    assert second.reserve_for_resident(**named, priority=priority) > 0
    second.release_reservation(**named)
    with second.as_guest(**named):
        some.run(0)
    assert first._parts.weights.held_bytes == 0


def test_a_model_may_be_shut_down_while_it_is_kept_or_a_guest(crowd):
    some = crowd("hpu", [3, 3, 9])
    one, other, third = some.runtimes
    with third.keep_resident(one), third.as_guest(other):
        some.run(0, 1, 2)
        one.shutdown()
        other.shutdown()
    some.run(2)
    assert [h.why for h in some.device.holdings()] == ["not held"]


# Guests


@places
def test_a_guest_uses_what_is_not_reserved_and_is_gone_on_exit(crowd, place):
    some = crowd(place, [4, 9])
    host, guest = some.runtimes
    host.reserve_for_resident()
    some.run(0)
    with host.as_guest(some.models[1]):
        assert loads_of(some, 0, 1, 1, 0, 1, 1, 1) == 0
        assert guest._parts.weights.peak_bytes <= 2 * LAYER_BYTES
        assert "a guest" in repr(guest)
    assert guest._parts.weights.held_bytes == 0
    assert loads_of(some, 0, 0) == 0
    some.run(1)


@pytest.mark.parametrize("priority", list(stagehand.ResidentPriority))
def test_a_guest_without_room_is_refused_and_pushes_nobody_out(crowd, priority):
    some = crowd("hpu", [6, 9], [6 * LAYER_BYTES, 6 * LAYER_BYTES])
    host, guest = some.runtimes
    reserve = host.reserve_for_resident
    if priority is stagehand.ResidentPriority.PRIMARY:
        guest.shutdown()  # else the reservation would be refused
        reserve(priority=priority)
        some.run(0)
        with pytest.raises(stagehand.StagehandOOMError, match=r"reserved.*PRIMARY"):
            stagehand.layer(some.models[1], vram_budget=BUDGET, device="hpu")
        assert "_stagehand_layer_runtime" not in some.models[1].__dict__
    else:
        reserve(priority=priority)
        some.run(0)
        refused = pytest.raises(stagehand.StagehandOOMError, match="SECONDARY")
        with refused, host.as_guest(guest):
            pytest.fail("a guest entered")
        assert guest._tenancy.why == "not held"
    assert loads_of(some, 0, 0) == 0


def test_a_guest_is_gone_after_an_exception_and_at_the_end_of_the_outermost_with(
    crowd,
):
    some = crowd("hpu", [4, 9, 9])
    host, guest, other = some.runtimes

    def fail():
        some.run(1)
        with other.as_guest(guest):
            some.run(1)
        assert guest._parts.weights.held_bytes > 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), host.as_guest(guest):
        fail()
    assert guest._parts.weights.held_bytes == 0
    assert guest._tenancy.why == "not held"


@places
@pytest.mark.parametrize("was_there", [False, True])
def test_what_joined_a_guest_is_gone_on_exit_too(sim, place, was_there):
    """As the adapters do that a library adds, wherever the model came from."""
    plain = varied(4, 1).to(place if was_there else "cpu")
    guest = stagehand.layer(plain, vram_budget=4 * LAYER_BYTES, device=place)
    host = stagehand.layer(varied(3, 0), vram_budget=4 * LAYER_BYTES, device=place)
    guest.append(nn.Linear(WIDTH, WIDTH))
    plain = deepcopy(guest)
    expected = run_resident(plain, place, batch())
    for _ in range(3):
        with runtime_of(host).as_guest(guest), torch.no_grad():
            assert_bitwise_equal(guest(batch()), expected, "output")
        assert runtime_of(guest)._parts.weights.held_bytes == 0
        assert guest[4].weight.device.type == "cpu"
        with torch.no_grad():
            host(batch())
    shared = runtime_of(host)._tenancy.shared.ledger.device
    assert shared.peak_bytes <= 4 * LAYER_BYTES
    with torch.no_grad():
        guest(batch())
        host(batch())
    assert guest[4].weight.device.type == place  # it was no guest: it stays
    runtime_of(guest).shutdown()
    runtime_of(host).shutdown()


def test_the_budget_named_for_what_joins_beside_trained_weights_works_at_once(sim):
    """What another model keeps for its optimizer was named by the next pass only."""
    first = varied(4, 0).requires_grad_(False)
    stagehand.layer(first, vram_budget=4 * LAYER_BYTES, device="hpu")
    first.append(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(first[4].parameters(), lr=0.1)
    first(batch()).sum().backward()
    optimizer.step()
    second, plain = varied(4, 1), varied(4, 1)
    stagehand.layer(second, vram_budget=3 * LAYER_BYTES, device="hpu")

    def join(layers):
        for _ in range(layers):
            plain.append(nn.Linear(WIDTH, WIDTH))
            second.append(deepcopy(plain[-1]))
        expected = run_resident(plain, "hpu", batch())
        with torch.no_grad(), pytest.raises(stagehand.StagehandOOMError) as caught:
            second(batch())
        runtime_of(second).set_budget(caught.value.needed_bytes)
        assert_passes_equal(second, expected, batch())
        return caught.value.needed_bytes

    assert join(3) > 4 * LAYER_BYTES
    runtime_of(second).set_budget(4 * LAYER_BYTES)
    runtime_of(first).set_budget(9 * LAYER_BYTES)  # which is that of both together
    assert join(1) < 6 * LAYER_BYTES
    for model in (first, second):
        runtime_of(model).shutdown()


class Reading(nn.Module):
    """Reads the weights of the first layers itself."""

    def __init__(self):
        super().__init__()
        self.layers = varied(6, 1).requires_grad_(False)

    def forward(self, x):
        for layer in self.layers[:4]:
            x = x @ layer[0].weight
        return self.layers[4:](x)


def test_the_budget_named_for_what_is_read_elsewhere_counts_what_others_keep(sim):
    """The next pass named the same one again."""
    first = varied(4, 0).requires_grad_(False)
    stagehand.layer(first, vram_budget=4 * LAYER_BYTES, device="hpu")
    first.append(nn.Linear(WIDTH, WIDTH))
    first(batch()).sum().backward()  # what stays is kept for its optimizer
    model = Reading()
    expected = run_resident(Reading(), "hpu", batch())
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    with pytest.warns(stagehand.StagehandWarning, match="do not own") as caught:
        model(batch())
    (named,) = re.findall(r"at least (\S+ KB) with", str(caught[0].message))
    runtime_of(model).set_budget(named)
    assert_passes_equal(model, expected, batch())
    assert any(block.read_elsewhere for block in blocks_of(model))
    assert runtime_of(model)._passing._strays._known
    for one in (first, model):
        runtime_of(one).shutdown()


@places
def test_a_guest_that_trains_is_gone_on_exit_with_what_stays(sim, place):
    """Its norms and their gradients go home, and are back beside their optimizer's
    state in its next pass.
    """
    plain = normed(4).to(place)
    guest = stagehand.layer(
        deepcopy(plain).cpu(), vram_budget=4 * LAYER_BYTES, device=place
    )
    host = stagehand.layer(varied(3, 0), vram_budget=4 * LAYER_BYTES, device=place)
    held = runtime_of(guest)._parts.weights
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, guest)]

    def step(model, optimizer):
        model(batch().to(place)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        with runtime_of(host).as_guest(guest):
            step(guest, optimizers[1])
            assert held.held_bytes > 0
        step(plain, optimizers[0])
        assert held.held_bytes == 0
        assert {p.device.type for p in guest.parameters()} == {"cpu"}
        assert {p.grad.device.type for p in guest.parameters()} == {"cpu"}
        run_resident(host, place, batch())
    runtime_of(guest).shutdown()
    runtime_of(host).shutdown()
    assert_bitwise_equal(guest.state_dict(), plain.cpu().state_dict(), "weights")
    guest.zero_grad()


def test_requests_that_contradict_each_other_are_refused(crowd):
    some = crowd("hpu", [4, 9])
    host, guest = some.runtimes
    with pytest.raises(stagehand.ConfigError, match="own guest"), host.as_guest(host):
        pass
    host.reserve_for_resident()
    with (
        pytest.raises(stagehand.ConfigError, match="reservation"),
        guest.as_guest(host),
    ):
        pass
    with host.as_guest(guest), pytest.raises(stagehand.ConfigError, match="guest"):
        guest.reserve_for_resident()
    for other in (nn.Linear(2, 2), 3):
        with pytest.raises(stagehand.ConfigError, match="not streamed"):
            host.reserve_for_resident(other)
    with pytest.raises(stagehand.ConfigError, match="3 is not streamed: expected a"):
        host.release_reservation(3)
    with pytest.raises(stagehand.ConfigError, match="priority is 'PRIMARY': expected"):
        host.reserve_for_resident(priority="PRIMARY")
    guest.shutdown()
    with pytest.raises(stagehand.ClosedError):
        host.reserve_for_resident(guest)


# What is at the same time


def guarded(call, errors):
    """Return a call whose exceptions are noted."""

    def run():
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            errors.append(error)

    return run


def in_threads(*calls):
    """Run the calls in threads, and raise what one of them raised."""
    errors = []
    threads = [
        threading.Thread(target=guarded(call, errors), daemon=True) for call in calls
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@places
@pytest.mark.parametrize("budget", [1, 2, 6, 9])
def test_models_in_threads_of_their_own_share_one_cap(crowd, place, budget):
    """With room for one block only they take turns, else they run at once."""
    some = crowd(place, [6, 7, 8], budget * LAYER_BYTES)
    in_threads(*(lambda n=n: some.run(*([n] * 12)) for n in range(3)))
    some.run(0, 1, 2)


@places
@pytest.mark.parametrize("budget", [2, 3, 7])
def test_a_model_may_run_inside_of_another_ones_pass(crowd, place, budget):
    some = crowd(place, [6, 7], budget * LAYER_BYTES)
    inner = []

    def call(module, args):
        with torch.no_grad():
            inner.append(some.models[1](batch()))

    some.models[0][3].register_forward_pre_hook(call)
    some.run(0, 1, 0, 0)
    for output in inner:
        assert_bitwise_equal(output, some.expected[1], "inner model")
    inner.clear()


def test_a_model_inside_of_another_one_without_room_for_both_is_refused(crowd):
    some = crowd("hpu", [6, 7], LAYER_BYTES)
    hook = some.models[0][3][0].register_forward_pre_hook(
        lambda *_: some.models[1](batch())
    )
    with (
        torch.no_grad(),
        pytest.raises(stagehand.StagehandOOMError, match="Sequential"),
    ):
        some.models[0](batch())
    hook.remove()
    some.run(0, 1, 0)


def test_a_model_inside_of_another_one_pushes_out_nothing_that_is_reserved(crowd):
    some = crowd("hpu", [4, 6, 7], 5 * LAYER_BYTES)
    runtime_of(some.models[0]).reserve_for_resident()
    some.run(0, 1, 2)
    hook = some.models[1][3][0].register_forward_pre_hook(
        lambda *_: some.models[2](batch())
    )

    def call():
        with torch.no_grad(), pytest.raises(stagehand.StagehandOOMError, match="PRIM"):
            some.models[1](batch())

    assert some.loads(0, call) == 0
    hook.remove()
    assert loads_of(some, 0, 1, 2, 0) == 0


def test_a_wait_for_room_that_nobody_can_end_is_refused(crowd, monkeypatch):
    """One thread waits for the other's pass, which needs the model it has entered, and
    lets that go first: in a pass it has no room beside the block in use."""
    some = crowd("hpu", [6, 7], LAYER_BYTES)
    waiting, errors = threading.Event(), []
    wait = SharedDevice._wait

    def noted(device, seat):
        waiting.set()
        wait(device, seat)

    monkeypatch.setattr(SharedDevice, "_wait", noted)

    def cross(*_):
        hook.remove()
        thread.start()
        assert waiting.wait(timeout=120)
        with pytest.raises(stagehand.StagehandOOMError, match=r"ial holds 4\.35"):
            some.run(1)

    thread = threading.Thread(target=guarded(lambda: some.run(1), errors))
    hook = some.models[0][3][0].register_forward_pre_hook(cross)
    in_threads(lambda: some.run(0))
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert errors == []
    some.run(0, 1)


@places
@pytest.mark.parametrize("budget", [2, 4, 9])
def test_two_models_train_in_one_graph_under_one_cap(crowd, place, budget):
    some = crowd(place, [6, 5], budget * LAYER_BYTES)
    plain = [deepcopy(model).to(place) for model in some.plain]
    x = batch().to(place)
    for _ in range(3):
        plain[1](plain[0](x)).square().mean().backward()
        some.models[1](some.models[0](batch())).square().mean().backward()
        some.look()
    for one, other in zip(plain, some.models, strict=True):
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert_bitwise_equal(theirs.grad, mine.grad, "gradient")
            theirs.grad = None
    with torch.no_grad():
        some.run(0, 1)


def test_an_edit_of_an_idle_model_is_not_lost_when_its_room_is_taken(crowd):
    """A resident's tensors point to the device between passes, where `.data` moves no
    version counter.
    """
    some = crowd("hpu", [4, 9], 6 * LAYER_BYTES)
    some.run(0, 0)
    weight = some.models[0][1][0].weight
    weight.data.mul_(2)
    some.plain[0][1][0].weight.data.mul_(2)
    some.expected[0] = run_resident(some.plain[0], "hpu", batch())
    some.run(1, 1, 1, 1, 0, 1, 0)
    weight.data.mul_(2)
    some.plain[0][1][0].weight.data.mul_(2)
    some.expected[0] = run_resident(some.plain[0], "hpu", batch())
    some.run(1, 0)


def normed(depth):
    """Streamed layers between norms, which stay on the device and are trained there."""
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(WIDTH), layer) for layer in stack(depth))
    )


@places
def test_two_models_are_trained_in_turns_with_their_optimizers_under_one_cap(
    sim, place
):
    """What stays keeps its place while the other one runs: so does its optimizer."""
    cap = 3 * LAYER_BYTES + 6 * 1024
    plain = [normed(depth).to(place) for depth in (4, 5)]
    models = [
        stagehand.layer(deepcopy(m).cpu(), vram_budget=cap, device=place) for m in plain
    ]
    everyone = [*plain, *models]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in everyone]
    for _ in range(4):
        for model, optimizer in zip(everyone, optimizers, strict=True):
            model(batch().to(place)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    shared = runtime_of(models[0])._tenancy.shared.ledger.device
    assert shared.peak_bytes <= shared.limit_bytes == cap
    for one, other in zip(plain, models, strict=True):
        runtime_of(other).shutdown()
        assert_bitwise_equal(other.state_dict(), one.cpu().state_dict(), "weights")


@places
def test_a_model_that_took_gradients_once_leaves_the_next_one_room(sim, place):
    """What stays of it, from now on, was planned to give way to the other one."""
    cap = 4 * LAYER_BYTES
    models = [normed(depth) for depth in (6, 12)]
    expected = [run_resident(model, place, batch()) for model in models]
    for model in models:
        stagehand.layer(model, vram_budget=cap, device=place)
    for _ in range(2):
        outputs = [model(batch()).detach() for model in models]
        assert_bitwise_equal(outputs, expected, "outputs")
    for model in models:
        runtime_of(model).shutdown()


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (300, 300), (1000, 0), (0, 1000)]
)
def test_an_error_in_the_middle_of_a_pass_names_a_budget_that_works(sim, first, second):
    """It named the model's own, which was enough, where others had what all share."""

    def run(*budgets):
        models = [stack(6), stack(7)]
        for model, budget in zip(models, budgets, strict=True):
            stagehand.layer(model, vram_budget=budget, device="hpu")
        holder = runtime_of(models[0])
        models[1][0].register_forward_pre_hook(lambda *_: holder.before_block("2.0"))
        with torch.no_grad():
            models[0](batch())
            try:
                models[1](batch())
            finally:
                holder.after_block("2.0")
                for model in models:
                    runtime_of(model).shutdown()

    with pytest.raises(stagehand.StagehandOOMError) as caught:
        run(LAYER_BYTES + first, LAYER_BYTES + second)
    assert caught.value.needed_bytes == 2 * LAYER_BYTES
    run(LAYER_BYTES + first, caught.value.needed_bytes)


def test_an_error_of_two_that_go_back_at_once_names_a_budget_that_works(sim):
    """One is in the middle of its pass, and gives what it can."""

    def go_back(budget):
        models = [stack(6), stack(5)]
        for model in models:
            stagehand.layer(model, vram_budget=budget, device="hpu")
        try:
            models[1](models[0](batch().to("hpu"))).sum().backward()
        finally:
            for model in models:
                runtime_of(model).shutdown()

    with pytest.raises(stagehand.StagehandOOMError) as caught:
        go_back(LAYER_BYTES + 300)
    go_back(caught.value.needed_bytes)


def test_a_weight_of_two_streamed_models_is_trained_by_one(sim):
    """Each would take its gradient home, and one of them be lost."""
    first, second = stack(4), stack(4)
    second[0][0].weight = first[0][0].weight
    x = batch().to("hpu")
    with torch.no_grad():
        expected = deepcopy(second).to("hpu")(x)
    for model in (first, second):
        stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device="hpu")
    first(x).sum().backward()
    for _ in range(2):
        with pytest.raises(stagehand.ConfigError, match="of another streamed model"):
            second(x)
    with torch.no_grad():
        assert_bitwise_equal(second(x), expected, "without gradients")
    runtime_of(first).shutdown()
    second(x).sum().backward()
    runtime_of(second).shutdown()


class Joined(nn.Module):
    """Layers, and a buffer that may join later."""

    def __init__(self):
        super().__init__()
        self.layers = stack(4)

    def forward(self, x):
        x = self.layers(x)
        return x + self.more.sum() if hasattr(self, "more") else x


def join(model, plain, numel):
    """Let a buffer join a streamed model and a resident one."""
    more = torch.arange(float(numel)) / numel
    model.register_buffer("more", more)
    plain.register_buffer("more", more.to("hpu"))


def test_what_joined_and_was_sent_home_gets_room_from_others_again(sim):
    budget, x = 8 * LAYER_BYTES, batch().to("hpu")
    pairs = [(model, deepcopy(model).to("hpu")) for model in (Joined(), stack(10))]
    for model, _ in pairs:
        stagehand.layer(model, vram_budget=budget)
    (one, plain), (other, _) = pairs
    join(one, plain, 4000)
    account = runtime_of(one)._parts.weights.whole
    with torch.no_grad():
        for number in range(3):
            for model, expected in pairs:
                assert_bitwise_equal(model(x), expected(x), f"round {number}")
            one.cpu()
            other(x)
            one.to("hpu")
            assert one.more.device.type == "hpu"
    assert account.peak_bytes <= budget
    for model, _ in pairs:
        runtime_of(model).shutdown()


@pytest.mark.parametrize("latest", [0, 1])
@pytest.mark.parametrize(("depth", "numel"), [(6, 1000), (5, 2000), (3, 6000)])
def test_what_joins_has_the_room_that_its_model_does_not_need(
    sim, latest, depth, numel
):
    """The model's other blocks took what a reservation for another one had left."""
    budget, x = 10 * LAYER_BYTES, batch().to("hpu")
    pairs = [(model, deepcopy(model).to("hpu")) for model in (Joined(), stack(depth))]
    for model, _ in pairs:
        stagehand.layer(model, vram_budget=budget)
    (one, plain), (other, _) = pairs
    runtime_of(other).reserve_for_resident()
    with torch.no_grad():
        for number in range(4):
            if number == 2:
                join(one, plain, numel)
            for model, expected in (pairs[1 - latest], pairs[latest]):
                assert_bitwise_equal(model(x), expected(x), f"round {number}")
    assert runtime_of(one)._parts.weights.whole.peak_bytes <= budget
    for model, _ in pairs:
        runtime_of(model).shutdown()


@pytest.mark.parametrize("latest", [0, 1])
@pytest.mark.parametrize(
    ("numel", "says"),
    [(3000, "needs 16.36 KB of"), (5000, "have joined Joined since")],
)
def test_what_joined_where_others_leave_no_room_can_be_taken_out_again(
    sim, latest, numel, says
):
    """Where it was on the device already, no pass began in which it would have left."""
    budget, x = 10 * LAYER_BYTES, batch().to("hpu")
    pairs = [(model, deepcopy(model).to("hpu")) for model in (Joined(), stack(7))]
    for model, _ in pairs:
        stagehand.layer(model, vram_budget=budget)
    (one, plain), (other, _) = pairs
    runtime_of(other).reserve_for_resident()
    account = runtime_of(one)._parts.weights.whole
    with torch.no_grad():
        for leaves in (True, False):
            for model, expected in (pairs[1 - latest], pairs[latest]):
                assert_bitwise_equal(model(x), expected(x), "before")
            join(one, plain, numel)
            for _ in range(2):
                with pytest.raises(stagehand.StagehandOOMError, match=says) as refused:
                    one(x)
                assert account.held_bytes <= budget
            assert refused.value.needed_bytes == 8 * LAYER_BYTES + 4 * numel
            if leaves:
                more = one.more
                del one.more, plain.more
                assert_bitwise_equal(one(x), plain(x), "taken out")
                assert more.device.type == "cpu"
        assert account.peak_bytes <= budget
        runtime_of(one).set_budget(refused.value.needed_bytes)
        assert_bitwise_equal(one(x), plain(x), "with room")
    for model, _ in pairs:
        runtime_of(model).shutdown()
