"""Models that share a real device, and a conductor: exact, bounded, without waits."""

import threading
from contextlib import contextmanager

import pytest
import torch

import stagehand
from architectures import assert_bitwise_equal
from gpu.models import batch, block_bytes, passes, resident, settle, stack, streamed
from stagehand.conductor import link

BLOCKS = 4  # of ten fit the device


@contextmanager
def two_models(place, blocks=BLOCKS):
    """Yield two streamed models under one cap, their runtimes and what both give."""
    models = [stack(place), stack(place)]
    with torch.no_grad():
        for tensor in models[1].parameters():
            tensor.mul_(0.5)
    x = batch(place)
    expected = [passes(resident(model, place), x)().cpu() for model in models]
    budget = blocks * block_bytes(models[0])
    runtimes = [streamed(model, "blocks", budget, place) for model in models]
    yield models, runtimes, x, expected
    for runtime in runtimes:
        runtime.shutdown()


def turns(models, x, expected, place, rounds):
    """Run the models one after the other; each output is what it is without others."""
    for number in range(rounds):
        outputs = [passes(model, x)() for model in models]
        place.synchronize()
        for found, output in zip(outputs, expected, strict=True):
            assert_bitwise_equal(found.cpu(), output, f"round {number}")


def test_models_that_alternate_are_exact_under_one_cap(place):
    with two_models(place) as (models, runtimes, x, expected):
        turns(models, x, expected, place, rounds=6)
        whole = runtimes[0]._tenancy.shared.ledger.device
        assert whole.limit_bytes == BLOCKS * block_bytes(models[0])
        assert 0 < whole.peak_bytes <= whole.limit_bytes


def test_what_the_device_holds_for_two_models_is_what_the_ledger_says(place):
    with two_models(place) as (models, runtimes, x, expected):
        turns(models, x, expected, place, rounds=3)
        held = runtimes[0]._tenancy.shared.ledger.device.held_bytes
        before = place.allocated_bytes()
        for runtime in runtimes:
            runtime.park()
        place.synchronize()
        freed = before - place.allocated_bytes()
        assert held <= freed <= held * 1.02  # torch's allocator rounds up


def test_a_reserved_model_is_loaded_once_and_a_guest_is_gone_on_exit(place):
    with two_models(place, blocks=12) as (models, runtimes, x, expected):
        host, guest = runtimes
        host.reserve_for_resident()
        turns(models, x, expected, place, rounds=3)
        moved = host.report().streamed_bytes
        with host.as_guest(guest):
            turns(models, x, expected, place, rounds=3)
        assert host.report().streamed_bytes == moved
        assert guest._parts.weights.held_bytes == 0
        turns(models, x, expected, place, rounds=1)


def test_models_in_threads_of_their_own_are_exact(place):
    with two_models(place) as (models, runtimes, x, expected):
        errors = []

        def run(number):
            try:
                stream = torch.Stream(place.name)
                stream.wait_stream(torch.accelerator.current_stream())
                with stream:
                    for _ in range(6):
                        found = passes(models[number], x)().cpu()
                        assert_bitwise_equal(found, expected[number], f"{number}")
            except BaseException as error:  # noqa: BLE001 - told to the test's thread
                errors.append(error)

        place.synchronize()
        threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        whole = runtimes[0]._tenancy.shared.ledger.device
        assert whole.peak_bytes <= whole.limit_bytes


def test_settled_turns_of_models_that_fit_wait_for_nothing(place):
    with two_models(place, blocks=22) as (models, _, x, _):

        def both():
            for model in models:
                passes(model, x)()

        for _ in range(8):
            both()
            place.synchronize()
        assert place.forbidden_calls(both) == []


@pytest.mark.parametrize("choice", ["measure", "always"])
def test_a_conducted_model_trains_exactly_and_its_passes_wait_for_nothing(
    place, choice
):
    model, x = stack(place), batch(place)
    plain = resident(model, place)
    runtime = streamed(model, "blocks", BLOCKS * block_bytes(model), place)
    config = stagehand.ConductorConfig(link_arbitration=choice)
    conductor = stagehand.ConductorRuntime(config, device=place.name)
    conductor.attach(model)
    for _ in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
    place.synchronize()
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert_bitwise_equal(theirs.grad.cpu(), mine.grad.cpu(), "gradient")
    if choice == "measure":
        rates = conductor.link
        assert min(rates.h2d, rates.d2h, rates.h2d_busy, rates.d2h_busy) > 0
    model.zero_grad()
    model.requires_grad_(False)  # else each pass ends with a wait, see the README
    settle(model, x, place)
    assert place.forbidden_calls(passes(model, x, count=2)) == []
    conductor.shutdown()
    runtime.shutdown()


def test_the_link_is_measured_both_ways_once_and_is_as_fast_as_it_is(
    place, monkeypatch
):
    monkeypatch.setattr(link, "_known", {})
    if place.exact_time:
        monkeypatch.setattr(link, "_PIECE_BYTES", 1 << 20)
    before = place.allocated_bytes()
    conductors = [stagehand.ConductorRuntime(device=place.name) for _ in range(2)]
    rates = conductors[0].link
    assert conductors[1].link is rates
    off = 1.1 if place.exact_time else 1.5
    assert rates.h2d == pytest.approx(place.link_rate(16 << 20), rel=off - 1)
    assert 0.2 * rates.h2d < rates.h2d_busy < off * rates.h2d
    assert 0.2 * rates.d2h < rates.d2h_busy < off * rates.d2h
    place.synchronize()
    assert place.allocated_bytes() == before
    for conductor in conductors:
        conductor.shutdown()


def test_gradients_that_yield_to_loads_are_added_up_exactly(place, monkeypatch):
    model, x = stack(place), batch(place)
    plain = resident(model, place)
    runtime = streamed(model, "blocks", BLOCKS * block_bytes(model), place)
    config = stagehand.ConductorConfig(link_arbitration="always")
    conductor = stagehand.ConductorRuntime(config, device=place.name)
    conductor.attach(model)
    traffic, waited = runtime.engine.traffic, []
    put_aside = traffic.put_aside

    def put(parcel):
        waited.append(parcel)
        put_aside(parcel)

    monkeypatch.setattr(traffic, "put_aside", put)
    for number in range(4):
        for each in (plain, model):
            if number % 2 == 0:
                each.zero_grad()
            each(x).square().mean().backward()
        assert traffic.backlog == 0
    place.synchronize()
    assert len(waited) > 10
    assert all(parcel.query() for parcel in waited)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert_bitwise_equal(theirs.grad.cpu(), mine.grad.cpu(), "gradient")
    conductor.shutdown()
    runtime.shutdown()


def test_a_conductor_makes_no_pass_longer(place):
    model, x = stack(place), batch(place)
    runtime = streamed(model, "blocks", BLOCKS * block_bytes(model), place)
    settle(model, x, place)
    alone = place.seconds(passes(model, x, count=4), rounds=5)
    conductor = stagehand.ConductorRuntime(device=place.name)
    conductor.attach(model)
    settle(model, x, place)
    conducted = place.seconds(passes(model, x, count=4), rounds=5)
    assert conducted <= alone * (1.001 if place.exact_time else 1.1)
    conductor.shutdown()
    runtime.shutdown()
