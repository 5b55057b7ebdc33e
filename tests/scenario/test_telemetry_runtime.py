"""What a runtime says that it did, held against what the simulated device saw."""

import gc
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from torch import nn

import stagehand
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    batch,
    blocks_of,
    device_of,
    runtime_of,
    stack,
)
from stagehand.core.turn import awaited_by

BUDGET = 4 * LAYER_BYTES


def layered(depth=8, **options):
    options.setdefault("telemetry", True)
    return stagehand.layer(stack(depth), vram_budget=BUDGET, device="hpu", **options)


def blocked(model, **options):
    mib = BUDGET / 2**20
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=mib, vram_low_watermark_mb=mib * 0.75, **options
    )
    return stagehand.StagehandRuntime(model, config, r"^\d+$", device="hpu")


def run(model, passes=1, x=None):
    x = batch().to("hpu") if x is None else x
    with torch.no_grad():
        for _ in range(passes):
            model(x)
            torch.accelerator.synchronize()


def records_of(model):
    """All records, once the open step is ended."""
    runtime_of(model).end_step()
    return runtime_of(model).telemetry.records


def test_bytes_and_copies_of_every_step_are_those_that_the_device_saw(sim):
    model = layered()
    x = batch().to("hpu")
    seen = []
    before = (sim.h2d_bytes(), sim.h2d_copies(), sim.d2h_bytes(), sim.d2h_copies())
    for number in range(6):
        if number % 2:
            with torch.no_grad():
                model[number][0].weight.mul_(0.5)  # a resident one has to be saved
        run(model, x=x)
        runtime_of(model).end_step()
        now = (sim.h2d_bytes(), sim.h2d_copies(), sim.d2h_bytes(), sim.d2h_copies())
        seen.append(tuple(b - a for a, b in zip(before, now, strict=True)))
        before = now
    found = [
        (r.h2d_bytes, r.h2d_copies, r.d2h_bytes, r.d2h_copies)
        for r in records_of(model)
    ]
    assert found == seen
    assert sum(step[0] for step in seen) > 0
    runtime_of(model).shutdown()
    sim.clear_races()  # edits of weights while a copy of them was under way


def test_a_weight_changed_in_a_pass_is_seen_in_the_bytes_that_come_back(sim):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x):
            self.weight.add_(0.125)
            return x @ self.weight

    model = nn.Sequential(*(Changing() for _ in range(6)))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu", telemetry=True)
    before = sim.d2h_bytes()
    run(model, passes=4)
    records = records_of(model)
    assert sum(r.d2h_bytes for r in records) == sim.d2h_bytes() - before > 0
    assert sum(r.d2h_copies for r in records) > 0
    runtime_of(model).shutdown()


def test_every_load_ends_in_an_eviction_or_is_still_there(sim):
    model = layered()
    run(model, passes=5)
    records = records_of(model)
    there = sum(b.slot is not None for b in blocks_of(model))
    assert sum(r.h2d_copies - r.evictions for r in records) == there
    assert records[-1].evictions > 0
    runtime_of(model).shutdown()


@pytest.mark.parametrize("keeps", [False, True])
def test_disk_bytes_are_those_of_the_files(sim, tmp_path, keeps):
    safetensors.torch.save_file(stack(8).state_dict(), tmp_path / "m.safetensors")
    model = layered(ram_budget="1GB" if keeps else LAYER_BYTES)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    run(model, passes=4)
    records = records_of(model)
    layer = WIDTH * WIDTH * 4 + WIDTH * 4
    assert all(r.disk_bytes % layer == 0 for r in records)
    assert sum(r.disk_bytes for r in records) >= 8 * layer
    assert (records[-1].disk_bytes == 0) is keeps
    runtime_of(model).shutdown()


def test_uses_of_streamed_blocks_are_hits_or_misses_and_of_others_neither(sim):
    model = layered()
    run(model, passes=6)
    for record in records_of(model)[2:]:
        staying = sum(b.stays for b in blocks_of(model))
        assert record.resident_uses == staying
        assert record.prefetch_hits + record.prefetch_misses == 8 - staying
    runtime_of(model).shutdown()


def slow_link(sim):
    """Copies take a hundred times as long as compute."""
    sim.configure(h2d_gbps=0.01)


def slow_compute(sim):
    """Compute takes a hundred times as long as copies."""
    sim.configure(hbm_gbps=0.001)


def test_blocks_that_arrive_before_they_are_needed_are_hits_and_nothing_stalls(sim):
    slow_compute(sim)
    model = layered()
    run(model, passes=8)
    for record in records_of(model)[-3:]:
        assert record.prefetch_hits > 0
        assert record.prefetch_misses == record.stall_count == 0
        assert record.stall_time_ms == 0.0
    assert runtime_of(model).report().hit_rate > 0.5
    runtime_of(model).shutdown()


def test_blocks_that_arrive_late_are_misses_and_the_stall_is_the_time_they_were_late(
    sim,
):
    slow_link(sim)
    model = layered()
    run(model, passes=8)
    runtime_of(model).end_step()
    start = sim.now_seconds()
    run(model)
    elapsed_ms = (sim.now_seconds() - start) * 1e3
    record = records_of(model)[-1]
    assert record.prefetch_misses == record.stall_count > 0
    assert record.stall_time_ms + record.compute_time_ms == pytest.approx(
        elapsed_ms, rel=0.25
    )
    assert record.stall_time_ms > 0.5 * elapsed_ms
    runtime_of(model).shutdown()


def test_copy_and_compute_times_are_those_of_the_device(sim):
    sim.configure(h2d_gbps=0.01, launch_us=10.0)
    model = layered()
    run(model, passes=6)
    records = records_of(model)
    copies = sum(r.h2d_copies for r in records[1:])
    expected = copies * (LAYER_BYTES / 0.01e9 * 1e3 + 0.01)
    measured = sum(r.copy_time_ms for r in records[1:])
    assert measured == pytest.approx(expected, rel=0.3)
    assert all(r.compute_time_ms > 8 * 2 * 0.01 for r in records[1:])
    runtime_of(model).shutdown()


def test_gauges_are_what_the_device_says_at_the_end_of_the_step(sim):
    model = layered()
    for _ in range(4):
        run(model)
        runtime_of(model).end_step()
        record = runtime_of(model).telemetry.records[-1]
        assert record.device_allocated_bytes == sim.allocated_bytes()
        assert record.device_used_bytes <= record.device_peak_bytes <= BUDGET
        assert record.device_used_bytes <= record.device_allocated_bytes
        assert record.device_reserved_bytes >= record.device_allocated_bytes
        assert record.pool_used_bytes == sim.pinned_bytes() > 0
        assert record.pool_free_bytes > 0
        assert record.pool_wait_count == 0
        assert record.duration_ms > 0
    runtime_of(model).shutdown()


def test_nan_and_infinite_values_are_counted_on_request(sim):
    model = stack()
    with torch.no_grad():
        model[2][0].bias[3] = float("nan")
    runtime = blocked(model, nan_inf_check=True)
    run(model)
    runtime.end_step()
    record = runtime.telemetry.records[-1]
    assert record.nan_count == 4 + 3 * 4 * WIDTH  # one column, then everywhere
    assert record.inf_count == 0
    runtime.shutdown()


def test_there_is_one_record_for_each_pass_through_the_root(sim):
    model = layered()
    run(model, passes=3)
    run(model[0])  # a part alone is no step
    run(model[1])
    run(model, passes=2)
    assert [r.step for r in records_of(model)] == [1, 2, 3, 4, 5]
    runtime_of(model).shutdown()


def test_steps_told_by_hand_are_as_long_as_one_says(sim):
    model = layered()
    runtime = runtime_of(model)
    for step in (10, 11):
        runtime.begin_step(step)
        run(model, passes=3)
        runtime.end_step()
    runtime.end_step()
    run(model, passes=2)  # outside of any step
    runtime.begin_step()
    with runtime.managed_forward():
        run(model)
    runtime.shutdown()
    assert [r.step for r in runtime.telemetry.records] == [10, 11, 12]
    uses = [
        r.resident_uses + r.prefetch_hits + r.prefetch_misses
        for r in runtime.telemetry.records
    ]
    assert uses[:2] == [24, 24]


def test_every_line_of_the_file_is_the_record_with_the_names_that_readers_know(
    sim, tmp_path
):
    path = tmp_path / "steps.jsonl"
    model = layered(telemetry=path)
    run(model, passes=3)
    runtime = runtime_of(model)
    runtime.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3  # the last one too
    for line, record in zip(lines, runtime.telemetry.records, strict=True):
        assert line["step"] == record.step
        assert line["h2d_bytes"] == record.h2d_bytes
        assert line["vram_used_mb"] == record.device_allocated_bytes / 2**20
        assert line["host_pool_in_use"] == record.pool_used_bytes
        unmeasured = {name for name, value in line.items() if value is None}
        assert unmeasured <= {"nan_count", "inf_count", "dtype_promotions"}


def test_the_file_is_closed_with_a_model_that_is_dropped(sim, tmp_path):
    """Not by the interpreter, which warns of a file that nobody has closed."""
    before = set(os.listdir("/proc/self/fd"))
    model = stagehand.layer(
        stack(), vram_budget=BUDGET, telemetry=tmp_path / "steps.jsonl"
    )
    runtime = runtime_of(model)
    for _ in range(2):
        run(model)
    del model
    gc.collect()
    assert runtime.telemetry.records
    assert set(os.listdir("/proc/self/fd")) <= before  # others may close theirs


def test_no_file_is_written_unless_a_path_is_given(sim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for telemetry in (True, False):
        model = layered(telemetry=telemetry)
        run(model, passes=3)
        runtime_of(model).shutdown()
    model = stack()
    runtime = blocked(model)
    runtime.begin_step()
    runtime.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_the_trace_shows_every_copy_and_use_where_they_happened(sim, tmp_path):
    slow_link(sim)
    model = layered(trace=True)
    before = sim.h2d_copies()
    x = batch().to("hpu")
    inputs = sim.h2d_copies() - before
    run(model, passes=4, x=x)
    path = tmp_path / "trace.json"
    runtime_of(model).export_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    copies = [e for e in spans if lanes[e["tid"]] == "H2D"]
    # Prefetches for the next pass may be under way still.
    assert 0 <= sim.h2d_copies() - before - inputs - len(copies) <= 3
    assert {e["args"]["nbytes"] for e in copies} <= {LAYER_BYTES, 0}
    names = {e["name"] for e in spans}
    assert names >= set(runtime_of(model).block_ids)
    assert {"compute", "stall", "H2D"} <= set(lanes.values())
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    copies.sort(key=lambda e: e["ts"])
    for one, other in itertools.pairwise(copies):
        assert one["ts"] + one["dur"] <= other["ts"] + 1e-3  # one link
    runtime_of(model).shutdown()
    runtime_of_closed = json.loads(path.read_text())
    assert runtime_of_closed["traceEvents"]


@pytest.mark.parametrize("way", ["trace", "end_step", "begin_step"])
def test_what_another_thread_asks_to_measure_in_a_pass_waits_for_its_end(
    sim, tmp_path, way
):
    """It would read times of uses that are not over, beside the thread that notes."""
    model = layered(trace=True)
    runtime = runtime_of(model)
    ways = {
        "trace": lambda: runtime.export_trace(tmp_path / "trace.json"),
        "end_step": runtime.end_step,
        "begin_step": runtime.begin_step,
    }
    with ThreadPoolExecutor(1) as pool:
        asked = []

        def ask(*_):
            hook.remove()
            asked.append(pool.submit(ways[way]))
            while not (asked[0].done() or awaited_by(*pool._threads)):
                pass
            assert not asked[0].done()

        hook = model[3].register_forward_pre_hook(ask)
        run(model)
        asked[0].result()


def test_a_trace_that_was_not_asked_for_is_an_error(sim, tmp_path):
    model = layered()
    with pytest.raises(stagehand.ConfigError, match="trace=True"):
        runtime_of(model).export_trace(tmp_path / "trace.json")
    runtime_of(model).shutdown()


def test_the_report_names_budget_plan_bytes_and_what_limits(sim):
    slow_link(sim)
    model = layered()
    run(model, passes=6)
    report = runtime_of(model).report()
    assert report.streamed_bytes == sum(r.h2d_bytes for r in records_of(model))
    size = sum(p.nbytes for p in model.parameters())
    assert size <= report.weight_bytes <= 8 * LAYER_BYTES
    assert report.passes == 6
    assert report.limit == "link"
    text = str(report)
    for word in ("weights", "budget", "17.4", "moved", "6,", "link", "vram_budget"):
        assert word in text
    runtime = runtime_of(model)
    runtime.shutdown()
    assert runtime.report().streamed_bytes == report.streamed_bytes


def test_the_report_says_who_has_what_is_missing_of_a_budget(sim):
    """Block mode knows another setting, and other tensors count for it."""
    slow_link(sim)
    model = stack()
    runtime = blocked(model)
    other = torch.zeros(LAYER_BYTES, dtype=torch.uint8, device="hpu")
    run(model, passes=6)
    advice = runtime.report().advice
    assert "a larger vram_high_watermark_mb keeps" in advice
    assert advice.endswith("of this one are left to other tensors on the device")
    del other
    runtime.shutdown()


def test_the_report_says_compute_where_compute_is_slow(sim):
    slow_compute(sim)
    model = layered()
    run(model, passes=6)
    assert runtime_of(model).report().limit == "compute"
    runtime_of(model).shutdown()


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_the_report_names_a_limit_after_steps_of_several_forwards(sim, forwards):
    """A forward that is followed by another one or by the backward has two followers:
    the uses that repeat are those of the whole step."""
    model = layered()
    x, steps = batch().to("hpu"), []
    for _ in range(8):
        sum(model(x).sum() for _ in range(forwards)).backward()
        steps.append(runtime_of(model).report().limit)
    runtime_of(model).shutdown()
    assert "unknown" not in steps[5:]


def test_without_telemetry_nothing_is_timed_once_the_plan_is_made(sim, monkeypatch):
    model = layered(telemetry=False)
    run(model, passes=6)
    made = []
    monkeypatch.setattr(
        type(device_of(model)), "new_event", lambda *_, **options: made.append(options)
    )
    watch = type(runtime_of(model)._measure.stopwatch)
    for mark in ("mark", "mark_copy"):
        monkeypatch.setattr(watch, mark, lambda *_: made.append("mark"))
    launches = sim.kernel_launches()
    run(model, passes=3)
    assert made == []
    assert sim.kernel_launches() - launches == 3 * 8 * 2
    runtime_of(model).shutdown()


def test_without_telemetry_what_was_not_measured_is_none(sim):
    model = layered(telemetry=False)
    run(model, passes=4)
    record = records_of(model)[-1]
    assert record.h2d_bytes > 0
    for name in ("stall_time_ms", "stall_count", "prefetch_hits", "prefetch_misses"):
        assert getattr(record, name) is None
    assert record.copy_time_ms is record.compute_time_ms is None
    report = runtime_of(model).report()
    assert report.hit_rate is report.stall_ms is None
    runtime_of(model).shutdown()


def test_the_window_of_records_is_a_hundred_steps(sim):
    model = stagehand.layer(stack(1), vram_budget=BUDGET, device="hpu", telemetry=True)
    run(model, passes=103)
    assert [r.step for r in records_of(model)] == list(range(4, 104))
    assert runtime_of(model).report().passes == 103
    runtime_of(model).shutdown()
