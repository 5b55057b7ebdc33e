"""Counters, step records, their file, and traces."""

import dataclasses
import io
import json
import logging
import threading
from pathlib import Path

import pytest

from stagehand.core.telemetry import Counters, StepRecord, Telemetry, Trace
from stagehand.errors import ClosedError, ConfigError, StagehandWarning
from stagehand.units import MIB

COUNTERS = {field.name for field in dataclasses.fields(Counters)}
FULL_DISK = Path("/dev/full")
OLD_NAMES = {
    "step",
    "h2d_bytes",
    "d2h_bytes",
    "copy_time_ms",
    "compute_time_ms",
    "stall_time_ms",
    "stall_count",
    "evictions",
    "prefetch_hits",
    "prefetch_misses",
    "vram_used_mb",
    "vram_reserved_mb",
    "host_pool_free",
    "host_pool_in_use",
    "dtype_promotions",
    "nan_count",
    "inf_count",
}


def end_steps(telemetry, name, values):
    """End one step for each value of one counter or gauge."""
    for step, value in enumerate(values, start=1):
        if name in COUNTERS:
            setattr(telemetry.counters, name, value)
            telemetry.end_step(step=step)
        else:
            telemetry.end_step(step=step, **{name: value})


def test_reset_counters_equal_new_ones():
    counters = Counters()
    for name in COUNTERS:
        setattr(counters, name, 3)
    counters.reset()
    assert counters == Counters()


def test_misspelt_counter_is_refused():
    with pytest.raises(AttributeError):
        Counters().h2d_byte = 1


def test_record_has_what_was_counted_and_the_next_step_starts_anew():
    telemetry = Telemetry(checks_nonfinite=True, checks_promotions=True)
    for value, name in enumerate(sorted(COUNTERS), start=1):
        setattr(telemetry.counters, name, value)
    record = telemetry.end_step(step=4, duration_ms=2.5)
    assert (record.step, record.duration_ms) == (4, 2.5)
    for value, name in enumerate(sorted(COUNTERS), start=1):
        assert getattr(record, name) == value
    following = telemetry.end_step(step=5)
    assert {getattr(following, name) for name in COUNTERS} == {0}


def test_what_nobody_measured_is_none_and_null():
    record = Telemetry().end_step(step=1)
    unmeasured = {
        field.name
        for field in dataclasses.fields(StepRecord)
        if getattr(record, field.name) is None
    }
    gauges = {field.name for field in dataclasses.fields(StepRecord)} - COUNTERS
    checked = {"nan_count", "inf_count", "dtype_promotions"}
    assert unmeasured == gauges - {"step"} | checked
    line = json.loads(record.to_json())
    assert line["vram_used_mb"] is None
    assert {name for name in unmeasured if line[name] is None} == unmeasured


def test_unknown_gauge_is_refused():
    with pytest.raises(TypeError, match="device_used_mb"):
        Telemetry().end_step(step=1, device_used_mb=3)


def test_json_line_has_the_older_names_beside_every_field():
    record = Telemetry().end_step(
        step=3,
        device_allocated_bytes=3 * MIB // 2,
        device_reserved_bytes=2 * MIB,
        pool_used_bytes=100,
        pool_free_bytes=28,
    )
    line = json.loads(record.to_json())
    assert set(line) >= OLD_NAMES
    assert (line["vram_used_mb"], line["vram_reserved_mb"]) == (1.5, 2)
    assert (line["host_pool_in_use"], line["host_pool_free"]) == (100, 28)
    assert {name: line[name] for name in dataclasses.asdict(record)} == (
        dataclasses.asdict(record)
    )


def test_every_step_is_one_line_as_soon_as_it_ends(tmp_path):
    path = tmp_path / "steps.jsonl"
    telemetry = Telemetry(path=str(path), interval_steps=10)
    assert not path.exists()
    for step in (1, 2, 3):
        telemetry.end_step(step=step)
        lines = path.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    telemetry.close()


def test_lines_are_added_to_an_older_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    for step in (1, 2):
        telemetry = Telemetry(path=path)
        telemetry.end_step(step=step)
        telemetry.close()
    assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == [1, 2]


def test_a_relative_path_stays_where_it_was_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    telemetry = Telemetry(path="steps.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    telemetry.end_step(step=1)
    telemetry.close()
    assert (tmp_path / "steps.jsonl").exists()
    assert list(Path().iterdir()) == []


def test_no_file_appears_without_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    telemetry = Telemetry()
    telemetry.end_step(step=1)
    telemetry.close()
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_refused_at_once(tmp_path):
    path = tmp_path / "logs" / "steps.jsonl"
    with pytest.raises(
        ConfigError, match=r"steps\.jsonl.*does not exist; make it first"
    ):
        Telemetry(path=path)


def test_directory_as_a_file_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="is a directory: expected a file's path"):
        Telemetry(path=tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_path_that_no_system_takes_is_refused_at_once(tmp_path, name):
    """It ended the run at its first record, after all that was computed."""
    with pytest.raises(ConfigError, match="expected a path that the system takes"):
        Telemetry(path=tmp_path / name)


@pytest.mark.parametrize("name", ["interval_steps", "window_steps"])
def test_number_of_steps_below_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0: expected at least one step"):
        Telemetry(**{name: 0})


def test_vanished_directory_warns_once_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    telemetry = Telemetry(path=folder / "steps.jsonl")
    folder.rmdir()
    with pytest.warns(StagehandWarning, match=r"steps\.jsonl.*No such file") as warned:
        telemetry.end_step(step=1)
    assert warned[0].filename == __file__
    folder.mkdir()
    telemetry.end_step(step=2)
    assert [record.step for record in telemetry.records] == [1, 2]
    assert list(folder.iterdir()) == []
    telemetry.close()


@pytest.mark.skipif(not FULL_DISK.exists(), reason="this system has no /dev/full")
def test_full_disk_warns_once_and_closing_is_silent(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.symlink_to(FULL_DISK)
    telemetry = Telemetry(path=path)
    with pytest.warns(StagehandWarning, match="No space left"):
        telemetry.end_step(step=1)
    telemetry.end_step(step=2)
    telemetry.close()
    assert len(telemetry.records) == 2


def test_line_that_is_written_in_parts_is_whole(tmp_path, monkeypatch):
    """A nearly full disk or a signal may take only the first bytes of a write."""

    class FewBytes(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    monkeypatch.setattr("stagehand.core.telemetry.FileIO", FewBytes)
    path = tmp_path / "steps.jsonl"
    telemetry = Telemetry(path=path)
    record = telemetry.end_step(step=1)
    telemetry.close()
    assert path.read_text() == f"{record.to_json()}\n"


def test_close_twice_keeps_the_statistics_and_takes_no_more_steps(
    tmp_path, monkeypatch
):
    opened = []

    class Recorded(io.FileIO):
        def __init__(self, *args):
            super().__init__(*args)
            opened.append(self)

    monkeypatch.setattr("stagehand.core.telemetry.FileIO", Recorded)
    telemetry = Telemetry(path=tmp_path / "steps.jsonl")
    end_steps(telemetry, "h2d_bytes", [5])
    telemetry.close()
    telemetry.close()
    assert [file.closed for file in opened] == [True]
    with pytest.raises(ClosedError, match=r"step 2 ended after close\(\)"):
        telemetry.end_step(step=2)
    assert telemetry.totals()["h2d_bytes"] == 5


def test_window_keeps_the_last_steps_only():
    telemetry = Telemetry(window_steps=2)
    end_steps(telemetry, "h2d_bytes", [1, 2, 3])
    assert [record.step for record in telemetry.records] == [2, 3]


def test_statistics_may_be_asked_for_while_steps_end():
    telemetry = Telemetry(window_steps=1000)
    over = threading.Event()

    def end():
        end_steps(telemetry, "h2d_bytes", range(20_000))
        over.set()

    thread = threading.Thread(target=end)
    thread.start()
    while not over.is_set():
        telemetry.hit_rate()
        telemetry.mean_stall_ms()
        telemetry.vram_trend()
    thread.join()
    assert len(telemetry.records) == 1000


def test_totals_outlive_the_window_and_include_the_open_step():
    telemetry = Telemetry(window_steps=2)
    end_steps(telemetry, "h2d_bytes", [1, 2, 3])
    telemetry.counters.h2d_bytes += 10
    assert telemetry.totals()["h2d_bytes"] == 16
    assert set(telemetry.totals()) == COUNTERS


@pytest.mark.parametrize(("checks", "total"), [(True, 2), (False, None)])
def test_nan_counts_are_numbers_only_where_somebody_checks(checks, total):
    telemetry = Telemetry(checks_nonfinite=checks)
    end_steps(telemetry, "nan_count", [2])
    assert telemetry.records[0].nan_count == total
    assert telemetry.totals()["nan_count"] == total


@pytest.mark.parametrize(("checks", "total"), [(True, 3), (False, None)])
def test_promotions_are_numbers_only_where_somebody_checks(checks, total):
    telemetry = Telemetry(checks_promotions=checks)
    end_steps(telemetry, "dtype_promotions", [1, 2])
    assert telemetry.totals()["dtype_promotions"] == total


def test_hit_rate_counts_streamed_uses_of_the_window_only():
    telemetry = Telemetry(window_steps=2)
    assert telemetry.hit_rate() is None
    for hits, misses in ((0, 9), (3, 1), (6, 2)):
        telemetry.counters.prefetch_hits += hits
        telemetry.counters.prefetch_misses += misses
        telemetry.counters.resident_uses += 50
        telemetry.end_step(step=1)
    assert telemetry.hit_rate() == 9 / 12


def test_hit_rate_without_streamed_uses_is_none():
    telemetry = Telemetry()
    end_steps(telemetry, "resident_uses", [5, 5])
    assert telemetry.hit_rate() is None


def test_stall_statistics_cover_the_window():
    telemetry = Telemetry(window_steps=3)
    assert (telemetry.mean_stall_ms(), telemetry.max_stall_ms()) == (None, None)
    end_steps(telemetry, "stall_time_ms", [100.0, 1.0, 2.0, 6.0])
    assert (telemetry.mean_stall_ms(), telemetry.max_stall_ms()) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("mib", "trend"),
    [
        ([], None),
        ([0, 0, 900], None),
        ([0, 0, 51, 51], "growing"),
        ([51, 51, 0, 0], "shrinking"),
        ([0, 0, 50, 50], "stable"),
        ([0, 0, 900, 50, 50], "stable"),
        ([0, 102, 51, 51], "stable"),
        ([None, None, 900, 900], None),
        ([None, 0, 0, 60, 60], "growing"),
    ],
)
def test_memory_trend_compares_the_halves_of_the_window(mib, trend):
    telemetry = Telemetry()
    used = [None if value is None else value * MIB for value in mib]
    end_steps(telemetry, "device_allocated_bytes", used)
    assert telemetry.vram_trend() == trend


def test_log_has_a_line_each_interval(caplog):
    telemetry = Telemetry(interval_steps=2)
    with caplog.at_level(logging.INFO, logger="stagehand"):
        for step in (1, 2, 3, 4):
            telemetry.counters.prefetch_hits += 3
            telemetry.counters.prefetch_misses += 1
            telemetry.counters.h2d_bytes += 5_000_000
            telemetry.end_step(step=step, device_used_bytes=2_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"step {step}: 75% hits, stalled 0.0 ms, 0 evictions, 5.00 MB to the device, "
        "2.00 MB of weights on it"
        for step in (2, 4)
    ]


def test_log_says_what_is_unknown(caplog):
    with caplog.at_level(logging.INFO, logger="stagehand"):
        Telemetry().end_step(step=1)
    message = caplog.records[0].getMessage()
    assert "no hits" in message
    assert "an unknown size of weights" in message


def test_trace_file_has_one_named_thread_per_lane_and_microseconds(tmp_path):
    trace = Trace()
    trace.add("h2d", "blocks.0", 1.5, 0.25, nbytes=4096)
    trace.add("compute", "blocks.0", 1.75, 2.0)
    trace.add("h2d", "blocks.1", 1.75, 0.25)
    trace.write(tmp_path / "trace.json")
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(lanes.values()) == ["h2d", "compute"]
    assert all(e["name"] == "thread_name" for e in events if e["ph"] == "M")
    spans = [e for e in events if e["ph"] == "X"]
    assert [(lanes[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("h2d", "blocks.0", 1500, 250),
        ("compute", "blocks.0", 1750, 2000),
        ("h2d", "blocks.1", 1750, 250),
    ]
    assert [e["args"] for e in spans] == [{"nbytes": 4096}, {}, {}]
    assert {e["pid"] for e in events} == {0}


def test_repr_shows_live_counts():
    telemetry, trace = Telemetry(window_steps=2), Trace()
    end_steps(telemetry, "h2d_bytes", [1, 2, 3])
    trace.add("h2d", "blocks.0", 0.0, 1.0)
    assert repr(telemetry) == "Telemetry(3 steps, 2 kept)"
    assert repr(trace) == "Trace(1 spans)"
