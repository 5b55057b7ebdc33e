"""Device and pinned memory are what the formulas say, and stay so."""

import gc
import threading

import pytest
import torch

from gpu.models import batch, block_bytes, passes, resident, settle, stack, streamed
from gpu.places import MIB, ON_GPU, Gpu
from stagehand.core import device as device_module
from stagehand.core.device import find_device

# torch's allocator may hand out up to this much more than was asked for.
ROUNDING = MIB
# Tensors below 10 MiB share a piece of memory of this size.
SHARED = 20 * MIB


def activation_bytes(place, model, x):
    """What a pass of the resident model takes besides its weights and inputs."""
    whole = resident(model, place)
    held = place.allocated_bytes()
    return place.peak_bytes(passes(whole, x)) - held


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("blocks", [2, 4])
def test_peak_is_the_budget_and_the_activations(place, mode, blocks):
    model, x = stack(place), batch(place)
    activations = activation_bytes(place, model, x)
    budget = blocks * block_bytes(model)
    held = place.allocated_bytes()
    peak = place.peak_bytes(lambda: streamed(model, mode, budget, place))
    runtime = model._stagehand_layer_runtime
    for _ in range(6):
        peak = max(peak, place.peak_bytes(passes(model, x)))
    report = runtime.report()
    assert report.peak_device_bytes <= budget
    weights = peak - held - activations
    assert weights <= report.peak_device_bytes + report.slots * ROUNDING
    runtime.shutdown()
    del runtime
    assert place.allocated_bytes() == held


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_memory_that_torch_takes_for_weights_is_within_the_budget(place, mode):
    """Not their bytes alone: what its allocator rounds up is gone for others, too."""
    model, x = stack(place), batch(place)
    torch.accelerator.empty_cache()
    before, budget = place.reserved_bytes(), 5 * block_bytes(model)
    runtime = streamed(model, mode, budget, place)
    settle(model, x, place)
    place.allocated_bytes()  # the matrix library gives back what it keeps
    torch.accelerator.empty_cache()
    assert place.reserved_bytes() - before <= budget + SHARED
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_runtimes_that_come_one_after_the_other_take_the_memory_of_one(place, mode):
    """What torch has cached is for the stream on which it was made."""
    reserved = []
    for _ in range(4):
        model, x = stack(place), batch(place)
        runtime = streamed(model, mode, 5 * block_bytes(model), place)
        settle(model, x, place)
        runtime.shutdown()
        del runtime
        gc.collect()
        reserved.append(place.reserved_bytes())
    assert reserved[-1] - reserved[0] <= block_bytes(model)


@pytest.mark.parametrize("place", [ON_GPU], indirect=True)
def test_what_is_free_is_of_the_part_that_a_process_may_have(place):
    whole = torch.accelerator.get_memory_info()[1]
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(0.25)
    free = find_device(place.name).free_bytes()
    torch.cuda.set_per_process_memory_fraction(before)
    assert 0 < free <= whole / 4


def test_pinned_memory_has_the_size_of_the_weights(place):
    place.width = place.width * 3 // 4  # rounding to a power of two would show
    model, x = stack(place), batch(place)
    before = place.pinned_bytes()
    runtime = streamed(model, "blocks", 2 * block_bytes(model), place)
    passes(model, x, count=3)()
    sizes = [block.nbytes for block in runtime._parts.streamed]
    assert all(block.image.is_pinned() for block in runtime._parts.streamed)
    assert runtime.report().pinned_bytes == sum(sizes)
    assert place.pinned_bytes() - before == sum(sizes)
    runtime.shutdown()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_torch_copies_across_two_pieces_of_locked_memory(
    place, monkeypatch, record_property, non_blocking
):
    """What users may do with parameters of blocks beyond 2 GiB: CUDA decides."""
    monkeypatch.setattr(device_module, "_REGISTER_CHUNK", 2 * MIB)
    locked = find_device(place.name).pinned(5 * MIB)
    locked.copy_(torch.arange(5 * MIB) % 251)
    across = locked[MIB : 5 * MIB - 7]
    try:
        there = across.to(place.name, non_blocking=non_blocking)
        place.synchronize()
    except RuntimeError as error:
        assert not place.exact_time
        record_property("copy across two pieces", str(error).splitlines()[0])
    else:
        record_property("copy across two pieces", "as any other")
        assert torch.equal(there.cpu(), across)
        del there


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_many_passes_grow_neither_device_nor_pinned_memory(place, mode):
    model, x = stack(place), batch(place)
    runtime = streamed(model, mode, 3 * block_bytes(model), place)
    settle(model, x, place)

    def held():
        return (
            place.allocated_bytes(),
            place.reserved_bytes(),
            place.pinned_bytes(),
            runtime.report().pinned_bytes,
        )

    before = held()
    passes(model, x, count=60)()
    place.synchronize()
    assert held() == before
    runtime.shutdown()


def test_what_the_matrix_library_keeps_for_autograds_thread_is_none_of_a_tests(
    sim, monkeypatch
):
    kept = {}

    def compute(_):
        kept[threading.get_ident()] = torch.empty(1000, device="hpu")

    def clear():
        kept.pop(threading.get_ident(), None)

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(Gpu, "name", "hpu")
    gpu, x = Gpu(), torch.ones(1, device="hpu", requires_grad=True)
    before = gpu.allocated_bytes()
    x.register_hook(compute)
    x.sum().backward()
    x.grad = None
    assert gpu.allocated_bytes() > before
    assert gpu.left_bytes(before) == 0
    assert not kept
