"""In a settled loop the host never waits, and copies run beside compute."""

import pytest
import torch

from architectures import assert_bitwise_equal
from gpu.models import batch, block_bytes, passes, resident, settle, stack, streamed
from gpu.places import Gpu, Place, Span, shared_time


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_settled_passes_make_no_memory_and_no_wait(place, mode):
    model, x = stack(place), batch(place)
    runtime = streamed(model, mode, 3 * block_bytes(model), place)
    settle(model, x, place)
    moved = runtime.report().streamed_bytes
    assert place.forbidden_calls(passes(model, x, count=3)) == []
    assert runtime.report().streamed_bytes > moved
    runtime.shutdown()


def three_blocks(model, place):
    """A budget for two slots and one that stays: marks count all that is allocated."""
    return 3 * block_bytes(model) + place.library_bytes


def test_copies_run_beside_compute(place):
    model, x = stack(place), batch(place)
    compute = place.seconds(passes(resident(model, place), x), rounds=3)
    runtime = streamed(model, "blocks", three_blocks(model, place), place)
    settle(model, x, place)
    assert place.overlap_seconds(passes(model, x), compute) > 0
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_host_may_run_far_ahead_of_the_device(place, mode):
    model, x = stack(place), batch(place)
    expected = passes(resident(model, place), x)()
    runtime = streamed(model, mode, 3 * block_bytes(model), place)
    settle(model, x, place)
    with place.late():
        # Few enough for the driver's queue, which would let the host wait itself.
        outputs = [passes(model, x)()]
        first = torch.Event(place.name)
        first.record()
        outputs += [passes(model, x)() for _ in range(2)]
        assert not first.query(), "the host has waited for the device"
        place.synchronize()
    for number, output in enumerate(outputs):
        assert_bitwise_equal(output, expected, f"pass {number}")
    runtime.shutdown()


def test_step_time_is_held_against_its_bound(place, record_property):
    model, x = stack(place), batch(place)
    compute = place.seconds(passes(resident(model, place), x), rounds=5)
    budget = three_blocks(model, place)
    runtime = streamed(model, "blocks", budget, place, telemetry=True)
    settle(model, x, place)
    moved = runtime.report().streamed_bytes
    step = place.seconds(passes(model, x), rounds=5)
    nbytes = (runtime.report().streamed_bytes - moved) / 5
    rate = place.link_rate(block_bytes(model))
    reported = runtime.report().link_bytes_per_second
    ratio = step / max(compute, nbytes / rate)
    record_property("step over bound", ratio)
    record_property("reported over plain link rate", reported / rate)
    assert nbytes == runtime._parts.steering.plan.streamed_bytes
    assert step > 0
    assert reported > 0
    if place.exact_time:
        assert ratio < 1.05
        assert abs(reported / rate - 1) < 0.05
    runtime.shutdown()


CALL = Span("cudaLaunchKernel", 0, 1, False)
KERNEL = Span("gemm", 2, 3, True)
OPERATOR = Span("aten::mm", 0, 1, False)
FRAME = Span("measured", 0, 3, True)


@pytest.mark.parametrize(
    ("seen", "missing"),
    [
        ([OPERATOR], "calls of the driver"),
        ([OPERATOR, KERNEL], "calls of the driver"),
        ([OPERATOR, CALL, FRAME], "work of the device"),
    ],
)
def test_check_for_which_the_profiler_saw_nothing_fails(monkeypatch, seen, missing):
    """Without rights to use CUPTI it sees operators alone, and no error is raised."""
    monkeypatch.setattr(Place, "spans", lambda place, run: seen)
    with pytest.raises(pytest.fail.Exception, match=f"no {missing} .* CUPTI"):
        Gpu().forbidden_calls(lambda: None)
    with pytest.raises(pytest.fail.Exception, match=f"no {missing} .* CUPTI"):
        Gpu().overlap_seconds(lambda: None, 0.0)


def test_check_for_which_the_profiler_saw_calls_and_kernels_counts_them(monkeypatch):
    wait = Span("cudaStreamSynchronize", 1, 2, False)
    seen = [OPERATOR, CALL, KERNEL]
    monkeypatch.setattr(Place, "spans", lambda place, run: seen)
    assert Gpu().forbidden_calls(lambda: None) == []
    seen.append(wait)
    assert Gpu().forbidden_calls(lambda: None) == [wait.name]


def test_shared_time_is_that_of_both_kinds_together():
    copies = [Span("a", 0, 10, True), Span("b", 20, 30, True)]
    kernels = [Span("c", 5, 25, True), Span("d", 40, 50, True)]
    assert shared_time(copies, kernels) == 10
