"""Stopwatch: times on the device's own clock, read when they are over."""

import time

import pytest
import torch

from counting import calls_of
from stagehand.core.device import AcceleratorDevice, HostDevice
from stagehand.core.stopwatch import CopyTime, Stopwatch, UseTime

MB = 1_000_000


class Bench:
    """A lane, a compute stream and a stopwatch on the simulated device.

    The link takes 1 ms for a MB, a kernel over a MB takes 1 ms, launches are free.
    """

    def __init__(self, sim):
        sim.configure(h2d_gbps=1, d2h_gbps=1, hbm_gbps=1, launch_us=0, tflops=1)
        self.device = AcceleratorDevice(torch.device("hpu"))
        self.watch = Stopwatch(self.device)
        self.lane = self.device.new_stream()
        self.compute = self.device.current_stream()
        self.on_host = self.device.pinned(8 * MB).zero_()
        self.on_device = self.device.empty(8 * MB)
        self.device.synchronize()

    def copy(self, megabytes, block=0, lane="H2D"):
        size = megabytes * MB
        pair = [self.on_device[:size], self.on_host[:size]]
        start = self.watch.mark_copy(self.lane)
        with self.lane:
            to, of = pair if lane == "H2D" else pair[::-1]
            to.copy_(of, non_blocking=True)
        self.watch.copied(block, lane, size, start, self.watch.mark_copy(self.lane))

    def use(self, block, megabytes, awaited=None):
        arrived = self.watch.mark(self.compute)
        if awaited is not None:
            self.compute.wait_event(awaited)
        self.watch.used(block, arrived, self.watch.mark(self.compute))
        torch.ones(megabytes * MB, dtype=torch.uint8, device="hpu")

    def done(self):
        event = self.device.new_event()
        event.record(self.lane)
        return event


def test_unused_stopwatch_has_nothing_and_is_over(sim):
    bench = Bench(sim)
    assert bench.watch.is_over()
    assert bench.watch.resolve() == ([], [])


def test_uses_are_split_into_waiting_and_computing(sim):
    bench = Bench(sim)
    bench.copy(5)
    bench.use(0, 2, bench.done())
    bench.use(1, 3)
    bench.watch.end_pass(bench.compute)
    uses, copies = bench.watch.resolve()
    assert copies == [CopyTime(0, "H2D", 5 * MB, 0.0, pytest.approx(5))]
    assert uses == [
        UseTime(0, 0.0, pytest.approx(5), pytest.approx(2), last=False),
        UseTime(1, pytest.approx(7), 0.0, pytest.approx(3), last=True),
    ]


def test_a_wait_inside_of_a_use_is_no_compute(sim):
    bench = Bench(sim)
    bench.use(0, 1)
    bench.use(1, 2)
    bench.copy(5, lane="D2H")
    since = bench.watch.mark(bench.compute)
    bench.compute.wait_event(bench.done())
    bench.watch.waited(since, bench.watch.mark(bench.compute))
    torch.ones(MB, dtype=torch.uint8, device="hpu")
    bench.watch.end_pass(bench.compute)
    first, second = bench.watch.resolve()[0]
    assert first == UseTime(0, 0.0, 0.0, pytest.approx(1), last=False)
    assert second.start_ms == pytest.approx(1)
    assert (second.stall_ms, second.compute_ms) == (0.0, pytest.approx(3))
    assert second.home_ms == pytest.approx(2)
    assert bench.watch.resolve() == ([], [])


def test_copies_of_both_lanes_carry_their_own_times(sim):
    bench = Bench(sim)
    bench.copy(2, block=3)
    bench.copy(1, block=4, lane="D2H")
    bench.lane.synchronize()
    _, copies = bench.watch.resolve()
    assert [(c.block, c.lane, c.nbytes) for c in copies] == [
        (3, "H2D", 2 * MB),
        (4, "D2H", MB),
    ]
    assert [c.duration_ms for c in copies] == [pytest.approx(2), pytest.approx(1)]


def test_marking_never_makes_the_host_wait(sim):
    bench = Bench(sim)
    before = sim.syncs()
    for number in range(3):
        bench.copy(1)
        bench.use(number, 1)
        bench.watch.end_pass(bench.compute)
    assert sim.syncs() == before
    torch.accelerator.synchronize()


def test_copies_under_way_are_left_for_later_and_lose_no_time(sim):
    """A prefetch for the next pass is under way when this pass is read."""
    bench = Bench(sim)
    bench.copy(2, block=0)
    bench.use(0, 1, bench.done())
    bench.copy(7, block=1)
    bench.watch.end_pass(bench.compute)
    bench.compute.synchronize()
    assert bench.watch.is_over()
    uses, copies = bench.watch.resolve()
    assert [use.block for use in uses] == [0]
    assert [copy.block for copy in copies] == [0]
    bench.lane.synchronize()
    expected = CopyTime(1, "H2D", 7 * MB, pytest.approx(2), pytest.approx(7))
    assert bench.watch.resolve() == ([], [expected])
    assert bench.watch.resolve() == ([], [])


def test_it_is_over_only_when_the_uses_of_every_stream_are(sim):
    """The stream that was used last may be the first to end."""
    bench = Bench(sim)
    bench.use(0, 5)
    bench.use(1, 1)
    other = bench.device.new_stream()
    with other:
        arrived = bench.watch.mark(other)
        bench.watch.used(2, arrived, bench.watch.mark(other))
    other.synchronize()
    assert not bench.watch.is_over()
    assert bench.watch.uses == 3
    uses, _ = bench.watch.resolve()  # waits
    assert [use.block for use in uses] == [0, 1]
    assert bench.watch.uses == 0
    assert bench.watch.is_over()


def test_last_use_without_an_end_of_its_pass_is_not_made_up(sim):
    bench = Bench(sim)
    bench.use(0, 1)
    bench.use(1, 1)
    uses, _ = bench.watch.resolve()
    assert [use.block for use in uses] == [0]


def test_end_of_a_pass_without_uses_adds_nothing(sim):
    bench = Bench(sim)
    bench.watch.end_pass(bench.compute)
    bench.use(0, 1)
    bench.watch.end_pass(bench.compute)
    bench.watch.end_pass(bench.compute)
    uses, _ = bench.watch.resolve()
    assert len(uses) == 1
    assert bench.watch.resolve() == ([], [])


def test_time_between_passes_belongs_to_no_use(sim):
    bench = Bench(sim)
    bench.use(0, 1)
    bench.watch.end_pass(bench.compute)
    torch.ones(4 * MB, dtype=torch.uint8, device="hpu")
    bench.use(0, 1)
    bench.watch.end_pass(bench.compute)
    uses, _ = bench.watch.resolve()
    assert [use.compute_ms for use in uses] == [pytest.approx(1)] * 2
    assert uses[1].start_ms == pytest.approx(5)


def test_events_are_used_again_and_each_for_one_mark(sim, monkeypatch):
    bench = Bench(sim)
    made = calls_of(monkeypatch, bench.device, "new_event")
    for _ in range(5):
        for number in range(4):
            bench.copy(1)
            bench.use(number, 1)
        bench.watch.end_pass(bench.compute)
        bench.watch.end_pass(bench.compute)  # has nothing to end
        bench.device.synchronize()
        bench.watch.resolve()
    assert len(made) == 1 + 2 * 4 + 2 * 4 + 1  # zero, copies, uses, the pass's end
    marks = [bench.watch.mark(bench.compute) for _ in range(40)]
    assert len({id(mark) for mark in marks}) == len(marks)


def test_resolved_times_stay_on_one_clock(sim):
    bench = Bench(sim)
    bench.use(0, 1)
    bench.watch.end_pass(bench.compute)
    bench.watch.resolve()
    bench.use(0, 1)
    bench.watch.end_pass(bench.compute)
    uses, _ = bench.watch.resolve()
    assert uses[0].start_ms == pytest.approx(1)


def test_on_the_host_times_are_the_hosts():
    device = HostDevice()
    watch, stream = Stopwatch(device), device.current_stream()
    arrived = watch.mark(stream)
    watch.used(0, arrived, watch.mark(stream))
    start = time.perf_counter()
    while time.perf_counter() - start < 0.003:
        pass
    watch.end_pass(stream)
    assert watch.is_over()
    [use], copies = watch.resolve()
    assert use.compute_ms >= 3
    assert copies == []
