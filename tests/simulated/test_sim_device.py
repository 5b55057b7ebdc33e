"""The simulated device keeps its promises: it computes, it counts, it catches."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from simulated import sim_device
from simulated.sim_device import device

MB = 1_000_000  # bytes: a copy or a kernel of 1 MB takes 1 ms at 1 GB/s


def floats(n_bytes=MB, value=0.0):
    return torch.full((n_bytes // 4,), float(value), device=device)


def pinned(n_bytes=MB, value=1.0):
    return torch.full((n_bytes // 4,), float(value)).pin_memory()


def stream():
    return torch.Stream(device=device)


def current():
    return torch.accelerator.current_stream()


def recorded(on, **options):
    event = torch.Event(device=device, **options)
    event.record(on)
    return event


def fill(to, source, lane):
    with lane:
        to.copy_(source, non_blocking=True)
    return recorded(lane)


def in_thread(function):
    """Run `function` in a thread of its own and return its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


# ------------------------------------------------------------------------------ memory


def test_torch_accelerator_reports_memory(sim):
    sim.configure(capacity_bytes=10 * MB)
    start = torch.accelerator.memory_allocated()
    refused = torch.accelerator.memory_stats()["num_ooms"]
    kept = floats(2 * MB)
    floats(3 * MB)
    assert torch.accelerator.memory_allocated() - start == 2 * MB
    assert torch.accelerator.max_memory_allocated() - start == 5 * MB
    assert torch.accelerator.memory_reserved() - start == 2 * MB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() - start == 2 * MB
    assert torch.accelerator.get_memory_info() == (8 * MB - start, 10 * MB)
    assert torch.accelerator.memory_stats()["num_ooms"] == refused
    torch.accelerator.empty_cache()
    if hasattr(torch.accelerator, "empty_host_cache"):  # not in 2.11
        torch.accelerator.empty_host_cache()
    del kept
    assert sim.allocated_bytes() == start


def test_unlimited_device_reports_one_tebibyte(sim):
    assert torch.accelerator.get_memory_info()[1] == 2**40


def test_allocation_beyond_capacity_is_refused_and_leaves_what_is(sim):
    sim.configure(capacity_bytes=sim.allocated_bytes() + 3 * MB)
    kept = floats(2 * MB, value=7)
    with pytest.raises(torch.OutOfMemoryError, match="2000000 bytes asked, 1000000"):
        floats(2 * MB)
    assert torch.equal(kept.cpu(), torch.full_like(kept, 7, device="cpu"))


def test_pinned_bytes_are_counted(sim):
    start = sim.pinned_bytes()
    kept = pinned(2 * MB)
    pinned(3 * MB)
    assert kept.is_pinned()
    assert not torch.zeros(1).is_pinned()
    assert sim.pinned_bytes() - start == 2 * MB
    assert sim.peak_pinned_bytes() - start == 5 * MB
    sim.reset_peak()
    assert sim.peak_pinned_bytes() - start == 2 * MB


def test_fresh_memory_is_poison(sim):
    assert torch.empty(100, device=device).isnan().all()
    assert torch.empty(100, pin_memory=True).isnan().all()


# --------------------------------------------------------------------- deferred copies


def test_copy_that_nobody_waits_for_has_not_happened(sim):
    target, lane = torch.empty(100, device=device), stream()
    fill(target, pinned(400), lane)
    with sim.expect_races(match="a kernel on stream 0 reads device memory that a copy"):
        assert target.isnan().all()
    lane.synchronize()
    assert not target.isnan().any()


def test_wait_completes_no_copy_behind_its_event(sim):
    early, late = (torch.empty(100, device=device) for _ in range(2))
    lane = stream()
    event = fill(early, pinned(400), lane)
    fill(late, pinned(400), lane)
    current().wait_event(event)
    assert not early.isnan().any()
    with sim.expect_races(match="reads"):
        assert late.isnan().all()
    lane.synchronize()


def test_wait_reaches_through_other_streams(sim):
    target, source = torch.empty(100, device=device), pinned(400)
    first, second = stream(), stream()
    second.wait_event(fill(target, source, first))
    current().wait_event(recorded(second))
    assert torch.equal(target.cpu(), source)


def test_host_that_reads_before_it_waits_sees_poison(sim):
    result = pinned(400)
    result.copy_(floats(400, value=3), non_blocking=True)
    assert result.isnan().all()
    torch.accelerator.synchronize()
    assert (result == 3).all()


def test_undeferred_copy_runs_at_once_and_still_races(sim):
    sim.configure(deferred=False)
    target = torch.empty(100, device=device)
    event = fill(target, pinned(400), stream())
    with sim.expect_races(match="reads"):
        assert not target.isnan().any()
    event.synchronize()


# -------------------------------------------------------------------------- race check


def test_memory_that_an_unordered_stream_reads_must_not_be_written(sim):
    weights, lane = floats(), stream()
    lane.wait_event(recorded(current()))
    weights.sum()
    with sim.expect_races(match="a copy on stream") as found:
        fill(weights, pinned(), lane)
    assert "writes device memory that a kernel on stream 0 read" in found[0]
    torch.accelerator.synchronize()


def test_disjoint_parts_of_one_allocation_do_not_race(sim):
    both, lane = floats(2 * MB), stream()
    lane.wait_event(recorded(current()))
    left, right = both.chunk(2)
    left.sum()
    fill(right, pinned(), lane).synchronize()


def test_memory_freed_while_another_stream_uses_it_is_a_race(sim):
    result, lane = pinned(), stream()
    weights = floats()
    lane.wait_event(recorded(current()))
    event = fill(result, weights, lane)
    with sim.expect_races(match="freed while a copy on stream"):
        del weights
    event.synchronize()


def test_memory_freed_with_a_named_stream_that_does_not_wait_is_a_race(sim):
    result, lane = pinned(), stream()
    weights = floats()
    lane.wait_event(recorded(current()))
    event = fill(result, weights, lane)
    weights.record_stream(stream())
    with sim.expect_races(match="freed while a copy on stream"):
        del weights
    event.synchronize()


@pytest.mark.parametrize("how", ["event", "record_stream", "named waits", "host"])
def test_memory_may_be_freed_once_its_stream_is_ordered(sim, how):
    result, lane = pinned(), stream()
    weights = floats(value=5)
    lane.wait_event(recorded(current()))
    event = fill(result, weights, lane)
    if how == "event":
        current().wait_event(event)
    elif how == "record_stream":
        weights.record_stream(lane)
    elif how == "named waits":
        other = stream()
        weights.record_stream(other)
        other.wait_event(event)
    else:
        event.synchronize()
    del weights
    event.synchronize()
    assert (result == 5).all()


def test_memory_of_an_earlier_owner_must_be_waited_for(sim):
    """A slot allocated on the compute stream may be what an activation just left."""
    floats().sum()
    lane, slot = stream(), torch.empty(MB // 4, device=device)
    with sim.expect_races(match="that its earlier owner on stream 0 wrote"):
        fill(slot, pinned(), lane)
    lane.wait_event(recorded(current()))
    fill(slot, pinned(), lane).synchronize()


def test_work_after_a_host_wait_is_ordered(sim):
    weights, lane = floats(), stream()
    weights.sum()
    torch.accelerator.synchronize()
    fill(weights, pinned(), lane).synchronize()
    weights.sum()


@pytest.mark.parametrize("to_host", [False, True])
def test_host_buffer_rewritten_before_its_copy_ran_is_a_race(sim, to_host):
    buffer, weights = pinned(value=1), floats(value=2)
    lane = stream()
    lane.wait_event(recorded(current()))
    event = fill(buffer, weights, lane) if to_host else fill(weights, buffer, lane)
    buffer.fill_(3)
    with sim.expect_races(match="host buffer rewritten"):
        event.synchronize()
    assert (buffer == (2 if to_host else 3)).all()


def test_host_buffer_may_be_rewritten_after_its_copy(sim):
    buffer, weights = pinned(value=1), floats()
    fill(weights, buffer, current()).synchronize()
    buffer.fill_(3)
    assert (weights.cpu() == 1).all()


def test_spilled_tensor_may_be_restored_without_a_host_wait(sim):
    """The bytes of the buffer change between the restore's launch and its run."""
    buffer, value, back = pinned(), floats(value=4), floats()
    out, home = stream(), stream()
    out.wait_event(recorded(current()))
    home.wait_event(fill(buffer, value, out))
    current().wait_event(fill(back, buffer, home))
    assert (back == 4).all().item()


def test_unordered_lanes_over_one_host_buffer_race(sim):
    buffer, value, back = pinned(), floats(value=4), floats()
    out, home = stream(), stream()
    for lane in (out, home):
        lane.wait_event(recorded(current()))
    fill(buffer, value, out)
    with sim.expect_races(match="reads pinned memory that a copy on stream"):
        fill(back, buffer, home)
        torch.accelerator.synchronize()


def test_pinned_memory_freed_under_a_borrowed_view_is_a_race(sim):
    owner = pinned(400)
    address = (ctypes.c_char * 400).from_address(owner.data_ptr())
    borrowed = torch.frombuffer(address, dtype=torch.float32)
    target = floats(400)
    target.copy_(borrowed, non_blocking=True)
    with sim.expect_races(match="pinned memory freed before a copy of it ran"):
        del owner


def test_queued_copy_keeps_its_pinned_tensor_alive(sim):
    target, lane = torch.empty(100, device=device), stream()
    event = fill(target, pinned(400, value=6), lane)
    event.synchronize()
    assert (target.cpu() == 6).all()


def test_freed_device_memory_ends_the_copies_into_it(sim):
    start, lane = sim.pinned_bytes(), stream()
    target, source = floats(400), pinned(400)
    lane.wait_event(recorded(current()))
    current().wait_event(fill(target, source, lane))
    del source
    assert sim.pinned_bytes() == start + 400
    del target
    assert sim.pinned_bytes() == start


def test_races_inside_expect_races_are_taken_off_the_record(sim):
    weights = floats()
    with sim.expect_races() as found:
        fill(weights, pinned(), stream())
    assert len(found) == 1
    assert sim.races() == []
    with pytest.raises(AssertionError, match="expected a race"), sim.expect_races():
        pass
    torch.accelerator.synchronize()


# ------------------------------------------------------------------ a streaming scheme


def stream_blocks(*, n_slots, forget=None):
    """Sum 6 blocks through a ring of slots; `forget` names a wait to leave out."""
    blocks = [pinned(MB, value=i + 1) for i in range(6)]
    slots = [torch.empty(MB // 4, device=device) for _ in range(n_slots)]
    total, lane = floats(), stream()
    drained = [recorded(current()) for _ in slots]
    for i, block in enumerate(blocks):
        slot = i % n_slots
        if forget != "drained":
            lane.wait_event(drained[slot])
        filled = fill(slots[slot], block, lane)
        if forget != "filled":
            current().wait_event(filled)
        total.add_(slots[slot])
        drained[slot] = recorded(current())
    return total.cpu()


@pytest.mark.parametrize(
    ("n_slots", "expected_ms"),
    [
        pytest.param(1, 6 * (2 + 1), id="serial"),
        pytest.param(2, 6 * 2 + 1, id="link-bound"),
    ],
)
def test_streaming_is_exact_and_takes_the_computed_time(sim, n_slots, expected_ms):
    # A copy takes 2 ms. An addition reads two tensors of 1 MB, writes one: 1 ms.
    sim.configure(h2d_gbps=0.5, d2h_gbps=1e9, hbm_gbps=3, launch_us=0)
    total = stream_blocks(n_slots=n_slots)
    assert (total == sum(range(1, 7))).all()
    # The first copy waits for the zeroing of the total, of 1/3 ms.
    assert sim.now_seconds() * 1e3 == pytest.approx(expected_ms + 1 / 3)


def test_missing_wait_for_the_filled_slot_is_caught(sim):
    with sim.expect_races(match="a kernel on stream 0 reads device memory"):
        total = stream_blocks(n_slots=2, forget="filled")
    assert total.isnan().any()
    torch.accelerator.synchronize()


def test_missing_wait_for_the_drained_slot_is_caught(sim):
    with sim.expect_races(match="writes device memory that a kernel on stream 0 read"):
        stream_blocks(n_slots=2, forget="drained")


# ------------------------------------------------------------------------ virtual time


def test_two_streams_overlap_as_computed(sim):
    sim.configure(h2d_gbps=1, hbm_gbps=1, launch_us=0)
    first, second = (torch.empty(MB // 2, device=device) for _ in range(2))
    small, lane = torch.empty(MB // 4, device=device), stream()
    events = [fill(t, pinned(2 * MB), lane) for t in (first, second)]  # 0-2, 2-4
    small.zero_()  # 0-1
    current().wait_event(events[0])
    first.zero_()  # 2-4
    current().wait_event(events[1])
    small.zero_()  # 4-5
    assert sim.now_seconds() == pytest.approx(5e-3)


def test_copies_in_one_direction_share_the_link(sim):
    sim.configure(h2d_gbps=1, d2h_gbps=1, launch_us=0)
    up = [torch.empty(MB // 4, device=device) for _ in range(2)]
    down = torch.empty(MB // 4, device=device)
    for target in up:
        fill(target, pinned(), stream())
    fill(pinned(), down, stream())
    assert sim.now_seconds() == pytest.approx(2e-3)
    torch.accelerator.synchronize()


def test_a_host_wait_covers_memory_that_was_freed_since_the_reset(sim):
    """Nothing else was launched on its stream."""
    old = torch.zeros(4, device=device)
    sim.reset()
    del old
    new, target = torch.empty(4, device=device), pinned(16)
    torch.accelerator.synchronize()
    fill(target, new, stream())
    assert sim.races() == []
    torch.accelerator.synchronize()


def test_a_half_duplex_link_carries_one_direction_after_the_other(sim):
    sim.configure(h2d_gbps=1, d2h_gbps=2, launch_us=0, half_duplex=True)
    up, down = (torch.empty(MB // 4, device=device) for _ in range(2))
    one, other = stream(), stream()
    ends = fill(up, pinned(), one), fill(pinned(), down, other)  # 0-1, 1-1.5
    ends += (fill(up, pinned(), one),)  # 1.5-2.5
    assert moments(ends) == [pytest.approx(t) for t in (1e-3, 1.5e-3, 2.5e-3)]


def test_a_half_duplex_link_is_used_before_and_after_a_copy_that_is_not_ready(sim):
    """What is launched later fills the gap, in pieces: the link is never idle."""
    sim.configure(h2d_gbps=1, d2h_gbps=1, launch_us=0, hbm_gbps=1, half_duplex=True)
    down, up = (torch.empty(n // 4, device=device) for n in (MB, 2 * MB))
    busy, late = recorded_work_of_one_ms(), stream()
    late.wait_event(busy)
    ends = [fill(pinned(), down, late), fill(up, pinned(2 * MB), stream())]
    assert moments(ends) == [pytest.approx(2e-3), pytest.approx(3e-3)]  # 1-2, 0-1 2-3
    assert moments([fill(down, pinned(), late)]) == [pytest.approx(4e-3)]


def moments(events):
    """When each of some events comes, in the order in which they are asked for."""
    found = []
    for event in events:
        event.synchronize()
        found.append(sim_device.host_seconds())
    return found


def test_matrix_product_is_charged_by_its_operations(sim):
    sim.configure(tflops=1e-3, hbm_gbps=1e9, launch_us=7)
    a = torch.empty(100, 50, device=device)
    b = torch.empty(50, 10, device=device)
    _ = a @ b
    assert sim.now_seconds() == pytest.approx(2 * 100 * 50 * 10 / 1e9 + 7e-6, rel=1e-4)


def test_thread_waits_on_its_own_clock(sim):
    sim.configure(hbm_gbps=1, launch_us=0)
    event = recorded_work_of_one_ms()

    def wait():
        event.synchronize()
        return sim.host_seconds()

    assert in_thread(wait) == pytest.approx(1e-3)
    assert sim.host_seconds() == 0


def recorded_work_of_one_ms():
    torch.empty(MB // 4, device=device).zero_()
    return recorded(current())


def test_new_thread_starts_at_the_home_threads_time(sim):
    sim.advance_host_us(40)

    def spend():
        sim.advance_host_us(2)
        return sim.host_seconds()

    assert in_thread(spend) == pytest.approx(42e-6)
    assert sim.host_seconds() == pytest.approx(40e-6)


def test_backward_runs_on_the_callers_clock(sim):
    weight = torch.ones(4, device=device, requires_grad=True)
    loss = (weight * 2).sum()
    sim.configure(host_launch_us=10)
    before, launches = sim.host_seconds(), sim.kernel_launches()
    loss.backward()
    spent = sim.host_seconds() - before
    assert sim.kernel_launches() > launches
    assert spent == pytest.approx((sim.kernel_launches() - launches) * 10e-6)


def test_launch_cost_holds_the_host_back(sim):
    sim.configure(host_launch_us=10, launch_us=0, hbm_gbps=1e9)
    values = torch.empty(10, device=device)
    for _ in range(5):
        values.zero_()
    assert sim.host_seconds() == pytest.approx(50e-6)
    assert sim.now_seconds() == pytest.approx(50e-6)


@pytest.mark.parametrize("ask", ["event", "stream"])
def test_query_is_true_only_when_virtual_time_has_come(sim, ask):
    sim.configure(h2d_gbps=100, launch_us=0)
    target, lane = torch.empty(MB // 4, device=device), stream()  # 10 us
    event = fill(target, pinned(), lane)
    polled = event if ask == "event" else lane
    polls = 0
    while not polled.query():
        polls += 1
    assert polls == 10
    assert not target.isnan().any()
    assert sim.syncs() == 1  # of reading the answer, none of the query


def test_query_of_an_event_that_was_never_recorded_is_true(sim):
    assert torch.Event(device=device).query()


def test_elapsed_time_is_virtual(sim):
    sim.configure(h2d_gbps=1, launch_us=0)
    target, lane = torch.empty(MB // 4, device=device), stream()
    sim.advance_host_us(500)  # an idle stream records an event when the host asks
    start = recorded(lane, enable_timing=True)
    with lane:
        target.copy_(pinned(), non_blocking=True)
    end = recorded(lane, enable_timing=True)
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.0)


def test_threads_that_copy_free_and_wait_do_not_block_each_other(sim):
    """Python's lock and the device's must never be taken in both orders."""

    def work():
        lane, target = stream(), floats(400)
        lane.wait_event(recorded(current()))
        for _ in range(300):
            source = pinned(400)
            source.known_to_python = True
            event = fill(target, source, lane)
            del source
            torch.zeros(1, device=device).add_(1)
        event.synchronize()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)


# ---------------------------------------------------------------------------- counters


def test_copies_kernels_and_host_waits_are_counted(sim):
    target, source, lane = torch.empty(100, device=device), pinned(400), stream()
    event = fill(target, source, lane)
    current().wait_event(event)
    target.mul_(2)
    assert (sim.h2d_copies(), sim.h2d_bytes()) == (1, 400)
    assert (sim.kernel_launches(), sim.syncs()) == (1, 0)
    event.synchronize()
    lane.synchronize()
    torch.accelerator.synchronize()
    assert sim.syncs() == 3
    target.copy_(torch.zeros(100), non_blocking=True)  # pageable: it blocks
    assert sim.syncs() == 4
    assert target[0].item() == 0
    assert (sim.syncs(), sim.d2h_copies(), sim.d2h_bytes()) == (5, 1, 4)


def test_reset_forgets_everything_but_memory(sim):
    sim.configure(capacity_bytes=4 * MB + sim.allocated_bytes(), launch_us=1e3)
    weights, lane = floats(value=1), stream()
    old = fill(weights, pinned(value=2), lane)
    sim.reset()
    assert sim.used_streams() == 0  # else each test makes those after it slower
    assert sim.races() == []
    assert (sim.h2d_copies(), sim.kernel_launches(), sim.syncs()) == (0, 0, 0)
    assert (sim.now_seconds(), sim.host_seconds()) == (0, 0)
    assert sim.peak_bytes() == sim.allocated_bytes() >= MB
    assert torch.accelerator.get_memory_info()[1] == 2**40
    current().wait_event(old)
    assert sim.now_seconds() == 0
    assert (weights.cpu() == 2).all()  # what was queued has run, in order


# ------------------------------------------------------------------- torch's own parts


@pytest.mark.parametrize(
    "mixed",
    [
        lambda a: a + torch.ones(2, 2),
        lambda a: a @ torch.ones(2, 2),
        lambda a: torch.nn.functional.linear(a, torch.ones(2, 2)),
        lambda a: torch.nn.functional.embedding(torch.tensor([1]), a),
        lambda a: torch.nn.functional.conv1d(a[None], torch.ones(1, 2, 1)),
        lambda a: torch.cat([a, torch.ones(2, 2)]),
    ],
    ids=["add", "matmul", "linear", "embedding", "conv", "cat"],
)
def test_operator_over_both_sides_is_refused(sim, mixed):
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        mixed(torch.ones(2, 2, device=device))


def test_numbers_and_indices_may_stay_on_the_host(sim):
    a = torch.ones(2, 2, device=device)
    assert ((a + torch.tensor(1.0))[torch.tensor([0])] == 2).all()


def test_lists_of_tensors_are_copied_across_the_link(sim):
    target = torch.zeros(2, device=device)
    torch._foreach_copy_([target], [torch.ones(2)])
    assert sim.h2d_copies() == 1
    assert (target.cpu() == 1).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copy_queued_in_a_grad_mode_runs_outside_it(sim, mode):
    source = torch.nn.Parameter(pinned(400, value=2))
    with mode():
        target = torch.empty(100, device=device)
        event = fill(target, source, stream())
    event.synchronize()
    assert (target.cpu() == 2).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_module_equals_the_plain_one(sim, backend):
    torch.compiler.reset()
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()).to(device)
    x = torch.randn(2, 3, device=device)
    assert torch.equal(torch.compile(module, backend=backend)(x), module(x))
    torch.compiler.reset()


def test_module_computes_the_same_bits_as_on_the_cpu(sim):
    module = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 2), torch.nn.Flatten())
    x = torch.randn(2, 3, 5)
    expected = module(x)
    expected.sum().backward()
    gradient = module[0].weight.grad.clone()
    module.zero_grad()
    result = module.to(device)(x.to(device))
    result.sum().backward()
    assert torch.equal(result.cpu(), expected)
    assert torch.equal(module[0].weight.grad.cpu(), gradient)


def test_parameter_data_may_change_sides(sim):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.data = parameter.data.to(device)
    assert parameter.device.type == device.type
    parameter.data = torch.zeros(3)
    assert parameter.device.type == "cpu"


def test_lazy_conjugation_survives_the_link(sim):
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(values.to(device).conj().cpu(), values.conj().resolve_conj())


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.view(3, 2),
        lambda a: a.reshape(-1),
        lambda a: a.t(),
        lambda a: a.unfold(1, 2, 1),
        torch.view_as_complex,
        lambda a: torch.view_as_real(torch.view_as_complex(a)),
        lambda a: a.view(torch.int32),
    ],
    ids=["view", "reshape", "t", "unfold", "complex", "real", "dtype"],
)
def test_view_shares_memory(sim, view):
    values = torch.ones(3, 2, device=device)
    seen = view(values)
    assert seen.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    values.zero_()
    assert (seen == 0).all()


def test_resize_keeps_bytes_and_views(sim):
    values = torch.ones(3, device=device)
    view = values[:2]
    values.resize_(5)
    values.zero_()
    assert (view == 0).all()


# ------------------------------------------------------------------------- the fixture

LEAKS = """
import conftest, threading, torch
from simulated.sim_device import device

conftest._PATIENCE = 0

kept = []
blocked = threading.Event()

def test_race(sim):
    torch.ones(4).sum()
    slot = torch.zeros(4, device=device)
    with torch.Stream(device=device):
        slot.add_(1)

def test_device_bytes(sim):
    kept.append(torch.zeros(4, device=device))

def test_pinned_bytes(sim):
    kept.append(torch.zeros(4).pin_memory())

def test_thread():
    threading.Thread(target=blocked.wait, name="stagehand-x", daemon=True).start()

def test_failed():
    test_thread()
    raise KeyError

def test_clean(sim):
    blocked.set()
    torch.zeros(4, device=device).sum()
"""


def test_fixture_fails_a_test_that_leaves_something_behind(tmp_path):
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-rAE", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 5 passed, 4 errors" in result.stdout, result.stdout
    for left in (
        "ERROR test_leaks.py::test_race - Failed: a kernel on stream",
        "ERROR test_leaks.py::test_device_bytes - Failed: 16 device bytes left",
        "ERROR test_leaks.py::test_pinned_bytes - Failed: 16 pinned bytes left",
        "ERROR test_leaks.py::test_thread - Failed: threads left running",
    ):
        assert left in result.stdout, result.stdout
