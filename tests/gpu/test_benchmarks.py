"""The host's benchmarks run to their end, and the page is made of what they write."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


ROWS = (
    "host overhead a block, 30 blocks, none resident",
    "overhead at 100 over 10 blocks, all resident",
    "training overhead a block, 10 frozen blocks, all resident",
    "training overhead a block, 10 trained blocks, none resident",
    "overhead a block, naive moves, 10 blocks",
    "overhead over the best other library's, 10 blocks",
    "plan of 1,000 blocks, 1,000 uses in a ring",
    "worst plan over its bound, ring, blocks in 4 pieces",
    "pass over its bound, ltx-2, a third on the device, layers",
    "virtual time over the bound, LTX-2, 768 tokens, PCIe 5, in pieces",
    "virtual time over the bound, B1, LTX-2 LoRA, PCIe 5, 19 GB kept",
    "acquire and release over allocate and touch, medians",
    "first output, pinned meanwhile over before",
    "delay of a reader thread while operators run",
    "pack and unpack a weight, over identity hooks",
    "packed bfloat16 of normal weights",
    "blocks over the best raw read, cold",
    "layers by streamed over the raw read, cold",
    "a conductor's cost for a queued copy",
    "a saved tensor over identity hooks, everything stays",
)


def test_host_benchmark_prints_a_line_for_each_figure(capsys):
    from benchmarks.__main__ import main

    assert main(["--quick", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = {line["name"] for line in lines}
    assert len(lines) == len(names)
    assert {"value", "median", "target", "ok"} <= lines[0].keys()
    assert [row for row in ROWS if row not in names] == []


def _figure(name, value=1.0):
    from benchmarks.results import Result

    return Result(name=name, value=value, median=value, unit="us", target=2.0)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "lines"])
def test_each_figure_is_printed_and_in_the_file_before_the_next_is_measured(
    monkeypatch, capsys, tmp_path, options
):
    from benchmarks import __main__ as command

    out, seen = tmp_path / "new" / "out.jsonl", []

    def suite():
        for name in ("first", "second", "third"):
            seen.append((capsys.readouterr().out, out.read_text()))
            yield _figure(name)

    monkeypatch.setattr(command, "SUITES", {"one": (suite, suite)})
    assert command.main(["--out", str(out), *options]) == 0
    for number, before in ((1, ["first"]), (2, ["first", "second"])):
        printed, written = seen[number]
        assert before[-1] in printed
        assert [json.loads(line)["name"] for line in written.splitlines()] == before


@pytest.mark.parametrize("options", [["--check"], ["--json"]], ids=["table", "lines"])
def test_what_was_found_before_an_interrupt_is_kept(
    monkeypatch, capsys, tmp_path, options
):
    """Somebody presses Ctrl-C while the third figure is measured: the second missed."""
    from benchmarks import __main__ as command

    out = tmp_path / "out.jsonl"

    def suite():
        yield _figure("first")
        yield _figure("late", 3.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "SUITES", {"one": (suite, suite)})
    assert command.main(["--out", str(out), *options]) == 130
    names = [json.loads(line)["name"] for line in out.read_text().splitlines()]
    assert names == ["first", "late"]
    printed = capsys.readouterr().out
    if options == ["--json"]:
        assert [json.loads(line)["name"] for line in printed.splitlines()] == names
    else:
        assert printed.count("late") == 2  # where it was found, and at the end
        assert "1 miss" in printed


def test_figures_in_virtual_time_come_while_the_other_process_goes_on(
    monkeypatch, tmp_path
):
    from benchmarks import virtual
    from benchmarks.results import as_line

    fifo = tmp_path / "go on"
    os.mkfifo(fifo)
    child = f"print({as_line(_figure('first'))!r}, flush=True); open({str(fifo)!r})"
    monkeypatch.setattr(virtual, "_COMMAND", [sys.executable, "-c", child])
    found = virtual.measure()
    assert next(found).name == "first"
    fifo.write_text("")  # only now can it end
    assert list(found) == []


def test_failure_of_the_process_of_virtual_time_is_one_here(monkeypatch):
    from benchmarks import virtual

    monkeypatch.setattr(virtual, "_COMMAND", [sys.executable, "-c", "exit(3)"])
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        list(virtual.measure())


def test_smallest_time_of_a_long_call_is_that_of_each_part_on_its_own():
    from benchmarks.timing import Times

    times = Times.of_parts([[1.0, 4.0], [3.0, 2.0], [3.0, 3.0]])
    assert (times.smallest, times.median) == (1.0 + 2.0, 3.0 + 3.0)


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("uses", [1, 2])
def test_as_many_uses_of_blocks_are_timed_as_one_at_each_depth(
    monkeypatch, depth, uses
):
    """A clock that only blocks move: 4 uses a part, there and back."""
    from benchmarks import depths, models

    now, calls = [0], []

    class Block(nn.Module):
        def forward(self, x):
            self.move()
            x = x * 1
            if x.requires_grad:
                x.register_hook(self.move)
            return x * 1

        def move(self, _=None):
            now[0] += 1

    def run():
        calls.append(depth)
        if uses == 1:
            model(torch.ones(1))
        else:
            model(torch.ones(1, requires_grad=True)).backward()

    for module in (depths, models):
        monkeypatch.setattr(module.time, "thread_time", lambda: now[0])
    model = models.Stack(depth)
    model.blocks = nn.ModuleList(Block() for _ in range(depth))
    pair = depths.Pair(model, model, None, lambda _: run, uses)
    parts = depths._timed(pair, model, part=4)()
    if depth == 2:
        # After a step that is not counted, 4 uses each time; they count as one step.
        assert parts == [depth * uses / 3] * 3
        assert len(calls) == 1 + 3 * 4 // (depth * uses)
    else:
        assert [part for part in parts if part] == [4] * 2 * uses
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("bare", "own", "is_met", "is_explained"),
    [(5.0, 5.0, True, True), (6.0, 7.1, False, True), (6.0, 7.3, False, False)],
)
def test_growth_of_what_is_on_top_is_explained_by_as_much_growth_of_bare_blocks(
    bare, own, is_met, is_explained
):
    """Per block of a model of a hundred 5 bare and 5 on top, in one of a thousand."""
    from benchmarks import depths
    from benchmarks.timing import Times

    costs = {}
    for depth, alone, on_top in ((100, 5.0, 5.0), (1_000, bare, own)):
        pair = depths.Pair(nn.Module(), nn.Module(), None, None)
        pair.model.blocks = range(depth)
        times = {"bare": alone * depth, "streamed": (alone + on_top) * depth}
        times = {f"{k} {depth}": Times(t, t) for k, t in times.items()}
        costs[depth] = pair.cost(times)
    row = depths.growth("growth", costs, 100, 1_000)
    assert row.value == pytest.approx(own / 5.0)
    assert (row.ok, bool(row.why)) == (is_met, is_explained)


@pytest.mark.parametrize(
    ("copy_us", "own_us", "is_met", "is_explained"),
    [(210, 20, True, True), (80, 20, False, True), (80, 22, False, False)],
)
def test_what_a_saved_tensor_costs_is_explained_where_caches_copy_it(
    copy_us, own_us, is_met, is_explained
):
    """A tenth of a copy of a MiB there and back is 21 us where memory is slower."""
    from benchmarks import activations
    from benchmarks.timing import Times

    seconds = {"no hooks": 0, "copies": copy_us, "leaves": copy_us + own_us}
    times = {name: Times(30e-6 * each, 30e-6 * each) for name, each in seconds.items()}
    (row,) = activations._row(times)
    assert row.value == pytest.approx((copy_us + own_us) / copy_us)
    assert (row.ok, bool(row.why)) == (is_met, is_explained)


@pytest.mark.parametrize(("own", "is_explained"), [(50.0, True), (61.0, False)])
def test_what_gradients_cost_is_explained_by_as_much_as_it_was_seen_to_be(
    own, is_explained
):
    """A regression of trained blocks is no known miss: 61 us over bare ones of 30."""
    from benchmarks import depths, training
    from benchmarks.timing import Times

    cost = depths.Cost(Times(own, own), Times(30.0, 30.0))
    assert bool(training._why(cost)) == is_explained


@pytest.mark.parametrize(("loads", "is_explained"), [(2.9, True), (3.1, False)])
def test_pass_is_explained_by_a_few_loads_of_its_largest_layer_and_no_more(
    monkeypatch, loads, is_explained
):
    """A planner that got worse is no known miss, whatever the largest layer has."""
    from benchmarks import schedules

    largest = 108 << 20
    lost = loads * largest / schedules._RATE
    monkeypatch.setattr(schedules, "_pass", lambda *_: (0.1 + lost, 0.1))
    rows = {row.name: row for row in schedules._as_cut("flux.1")}
    row = rows["pass over its bound, flux.1, a third on the device, layers"]
    assert not row.ok
    assert bool(row.why) == is_explained
    if is_explained:
        assert "the largest has 108 MiB" in row.why


@pytest.mark.parametrize(
    ("met_after", "rounds"), [(1, 4), (6, 6), (None, 12)], ids=["met", "late", "never"]
)
def test_what_misses_its_target_is_measured_for_longer_but_not_for_ever(
    monkeypatch, met_after, rounds
):
    """Each call takes a second; four rounds do, or as many again, and a little more."""
    from benchmarks import timing

    now = [0.0]

    def call():
        now[0] += 1.0
        return [now[0]]

    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(timing, "_PATIENCE", 2.0)
    found = []

    def enough(times):
        found.append(times)
        return met_after is not None and now[0] >= met_after

    times = timing.in_turns({"one": call}, rounds=4, until=enough)
    assert (now[0], times) == (rounds, found[-1])


@pytest.mark.parametrize(("box", "rounds"), [(9.0, 9), (4.5, 5), (0.5, 2)])
def test_rounds_of_a_slow_machine_are_fewer_but_never_one(monkeypatch, box, rounds):
    from benchmarks import timing

    now = [0.0]

    def call():
        now[0] += 1.0
        return [1.0]

    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(timing, "_BOX_SECONDS", box)
    timing.in_turns({"one": call}, rounds=9)
    assert now[0] == rounds


@pytest.mark.parametrize(("is_met", "turns"), [(True, 1 + 4), (False, 1 + 7)])
def test_rest_of_the_turns_at_a_disk_is_left_out_once_targets_are_met(is_met, turns):
    from benchmarks.timing import by_the_wall

    called = {"one": [], "other": []}
    ways = {name: numbers.append for name, numbers in called.items()}
    seconds = by_the_wall(ways, list(range(8)), until=lambda _: is_met)
    assert called == {name: list(range(turns)) for name in ways}
    assert {len(found) for found in seconds.values()} == {turns - 1}


@pytest.mark.parametrize(
    ("value", "why", "status", "said"),
    [(1.0, "", 0, "ok"), (3.0, "", 1, "miss"), (3.0, "too wide", 0, "one: too wide")],
)
def test_host_benchmark_fails_on_an_unexplained_miss_only_if_it_is_asked_to(
    monkeypatch, capsys, value, why, status, said
):
    from benchmarks import __main__ as command
    from benchmarks.results import Result

    found = Result(
        name="one", value=value, median=value, unit="us", target=2.0, why=why
    )
    monkeypatch.setattr(command, "_measure", lambda *_, **__: iter([found]))
    assert command.main([]) == 0
    assert command.main(["--check"]) == status
    assert said in capsys.readouterr().out
    assert torch.get_num_threads() == 1


REVISIONS = {
    "slower": (2.0, 2.4, 2.0, 1),
    "slower, but has no target": (2.0, 2.4, None, 0),
    "hardly slower": (2.0, 2.2, 2.0, 0),
    "new": (None, 2.4, 2.0, 0),
    "nothing, as before": (0.0, 0.0, 0.0, 0),
    "not nothing any more": (0.0, 1.0, 0.0, 1),
    "less than nothing": (-0.1, 0.1, 2.0, 0),
}


@pytest.mark.parametrize("name", REVISIONS)
def test_two_revisions_are_measured_in_turns_and_a_worse_one_fails(
    monkeypatch, capsys, tmp_path, name
):
    from benchmarks import compare

    before, now, target, status = REVISIONS[name]
    order, told = [], []

    def measured(tree, _):
        told.append(capsys.readouterr().err)  # of the turns before
        order.append(tree == tmp_path)
        value = before if tree == tmp_path else now
        if value is not None:
            yield {"name": "one", "value": value, "target": target, "unit": "us"}
            yield {"name": "left out", "value": 0.0, "target": None, "unit": ""}

    monkeypatch.setattr(compare, "_checked_out", lambda _: nullcontext(tmp_path))
    monkeypatch.setattr(compare, "_measured", measured)
    assert compare.main(["other", "--rounds", "2"]) == status
    assert order == [True, False, False, True]
    assert f"round 1 of 2, here: {now:9.3g}" in told[2]
    table = capsys.readouterr().out
    assert "left out" not in table
    assert ("new" in table) == (before is None)


def test_a_revision_is_checked_out_measured_and_gone_again(
    monkeypatch, tmp_path, capsys
):
    from benchmarks import compare

    def git(*arguments):
        command = ["git", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    if git("clone", "--shared", ROOT, tmp_path / "clone") is None:
        pytest.skip("these are not the files of a git checkout")
    monkeypatch.setattr(compare, "ROOT", tmp_path / "clone")
    options = ["--quick", "--rounds", "1", "--only", "conductor"]
    assert compare.main(["HEAD", *options, "--tolerance", "1000"]) == 0
    assert "a step's five phases" in capsys.readouterr().out
    trees = git("-C", tmp_path / "clone", "worktree", "list")
    assert len(trees.splitlines()) == 1


def test_committed_page_is_that_of_the_committed_results(tmp_path):
    from benchmarks.page import main

    assert main(["--docs", str(tmp_path)]) == 0
    name = "performance.md"
    assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def test_results_stay_where_measuring_them_anew_fails(tmp_path, monkeypatch):
    from benchmarks import page

    sources = {"host.jsonl": ["no_such_module"]}
    monkeypatch.setattr(page, "_SOURCES", sources)
    host = tmp_path / "host.jsonl"
    host.write_text("what was measured", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        page.main(["--measure", "--results", str(tmp_path), "--docs", str(tmp_path)])
    assert host.read_text(encoding="utf-8") == "what was measured"


def test_peer_that_fails_in_a_step_is_ended():
    """It may hold threads and pinned memory, and the next one is measured after it."""
    from benchmarks import peers

    ended = []

    def make(model):
        def step():
            raise RuntimeError("no such device")

        return step, lambda: ended.append(model)

    bare = peers.make_stack(2, 1)
    found = peers._overhead("some", "torch", make, bare, lambda: None, 2)
    assert "no such device" in found
    assert len(ended) == 1


def test_committed_predictions_are_those_of_the_planner():
    from benchmarks.schedules import predictions

    path = ROOT / "benchmarks" / "results" / "predictions.jsonl"
    committed = [json.loads(line) for line in path.read_text().splitlines()]
    assert committed == [
        {
            **line,
            "seconds": pytest.approx(line["seconds"], rel=1e-6),
            "resident_seconds": pytest.approx(line["resident_seconds"], rel=1e-6),
        }
        for line in predictions()
    ]


def _cell(way, over_bound=1.0, *, seconds=1.0, device_bytes=10**9, **options):
    about = {"kind": "lora", "shape": "ltx-2", "way": way, "cap": "24GiB"}
    about |= {"budget": None, "ram": None, "blocks": None, "divide": 1}
    about |= {name: options.pop(name) for name in ("cap", "shape") if name in options}
    times = {"median": seconds, "p10": seconds, "p90": seconds}
    sizes = ("allocated", "reserved", "pinned", "host")
    return {
        "kind": "cell",
        "cell": about,
        "step": times,
        "timed_steps": 10,
        "phases": [0.25 * seconds, 0.75 * seconds],
        "freed_share": None,
        "bound": seconds / over_bound,
        "resident_phases": [0.1, 0.2, 0.0],
        "resident_difference": 0.0,
        "over_bound": over_bound,
        "over_resident": 3.0,
        "equal": True,
        "difference": 0.0,
        "device_bytes": device_bytes,
        **{f"{name}_bytes": 10**9 for name in sizes},
        "h2d_copies": 5,
        "d2h_copies": 0,
        "stall_ms": None,
        "first_output": 2.0,
        "rates": {"h2d": 50e9},
        "h2d_rate_after": 50e9,
        **options,
    }


def _host(*, resident, streamed, seconds=0.3):
    """A cell where compute is the bound, of up to 0.3 s."""
    return _cell(
        "stagehand",
        seconds=seconds,
        resident_operator_seconds=resident,
        operator_seconds=streamed,
    )


def _lost(*lines):
    from benchmarks.devices import device_section

    text = "\n".join(device_section("card", lines))
    listed = text.split("#### Cells lost")[1].split("####")[0]
    return [line[2:] for line in listed.splitlines() if line.startswith("- ")]


LOST = {
    "nothing": ([_cell("stagehand"), _cell("naive-pinned", seconds=2.0)], "None."),
    "bound": ([_cell("stagehand", 1.051)], "1.051 of the bound, 1.05 allowed"),
    "compute": (
        [_cell("stagehand", 1.03, resident_phases=[0.5, 0.5])],
        "1.030 of the bound, 1.02 allowed",
    ),
    "spills": (
        [_cell("stagehand-spilling", 1.021)],
        "1.021 of the bound, 1.02 allowed",
    ),
    "failed": (
        [{"kind": "cell", "cell": _cell("stagehand")["cell"], "failed": "why"}],
        "failed (why)",
    ),
    "bits": ([_cell("stagehand", equal=False)], "not the resident outcome"),
    "differs": (
        [_cell("stagehand", equal=False, resident_difference=0.1)],
        "resident run differs from itself",
    ),
    "freed": (
        [_cell("stagehand-spilling", freed_share=0.94)],
        "0.940 of what left was let go, 0.95 wanted",
    ),
    "spilling": (
        [_cell("stagehand"), _cell("stagehand-spilling", seconds=1.011)],
        "stagehand-spilling: 1.011 of what stagehand takes, 1.01 allowed",
    ),
    "guest": (
        [
            _cell("stagehand-alone", phases=[2.0, 1.0]),
            _cell("stagehand-reserved", phases=[1.0, 1.06]),
        ],
        "stagehand-reserved: 1.060 of what stagehand-alone takes, 1.05 allowed",
    ),
    "drift": ([_cell("stagehand", h2d_rate_after=45e9)], "not valid: the link's rate"),
    "slower host": (
        [_host(resident=[5e-6, 6e-6], streamed=[7e-6, 8e-6])],
        "not valid: the host queued an operator in 6.0 us at most beside the resident"
        " steps, in 7.0 at least",
    ),
    "uneven host": ([_host(resident=[5e-6, 7e-6], streamed=[7e-6, 8e-6])], "None."),
    "slower host that nothing waits for": (
        [_host(resident=[5e-6, 6e-6], streamed=[7e-6, 8e-6], seconds=2.0)],
        "None.",
    ),
    "faster": (
        [_cell("stagehand"), _cell("naive-pinned", seconds=0.9)],
        "naive-pinned: faster: 900.00 ms against 1000.00 ms of ours",
    ),
    "faster, with other sums": (
        [
            _cell("stagehand"),
            _cell("save_on_cpu", seconds=0.9, equal=False, difference=0.125),
        ],
        "save_on_cpu: faster: 900.00 ms against 1000.00 ms of ours; other bits, off by"
        " 0.125",
    ),
    "smaller": (
        [_cell("stagehand"), _cell("ramtorch", seconds=1.1, device_bytes=10**8)],
        "ramtorch: smaller: 100.00 MB, in which ours is not as fast",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_page_lists_a_cell_that_is_lost_with_its_reason(name):
    lines, reason = LOST[name]
    (found,) = _lost(*lines)
    assert reason in found


def test_other_way_is_beaten_by_ours_in_less_memory_and_by_the_newest_line():
    other = _cell("ramtorch", seconds=1.1, device_bytes=10**8)
    less = _cell("stagehand", seconds=1.05, device_bytes=10**8, cap="6GiB")
    assert _lost(_cell("stagehand"), other, less) == ["None."]
    failed = {"kind": "cell", "cell": less["cell"], "failed": "why"}
    assert len(_lost(_cell("stagehand"), other, failed)) == 2
    late = _cell("stagehand", seconds=2.0)
    assert "faster" in _lost(_cell("stagehand"), other, less, late)[0]


def test_line_of_more_steps_takes_the_place_of_an_older_one():
    """Five steps of a short run were lost; ten of a later revision are not."""
    lines = [_cell("stagehand", over) for over in (1.4, 1.0)]
    for line, steps in zip(lines, (5, 10), strict=True):
        line["cell"]["steps"] = steps
    assert _lost(*lines) == ["None."]


def test_way_without_a_result_is_on_the_page_with_its_reason():
    from benchmarks.devices import device_section

    about = _cell("mmgp")["cell"]
    lines = [
        _cell("stagehand"),
        {"kind": "cell", "cell": about, "left_out": "not installed"},
        {"kind": "cell", "cell": {**about, "way": "fsdp2"}, "failed": "TypeError"},
    ]
    text = "\n".join(device_section("card", lines))
    assert "| mmgp | left out: not installed |" in text
    assert "| fsdp2 | failed: TypeError |" in text
    assert _lost(*lines) == ["None."]


def test_page_says_which_part_of_a_naive_step_is_saved_of_what_can_be():
    """A naive step takes 3 s where 1 s must be; ours takes 1.5, another one 3.5."""
    from benchmarks.devices import device_section

    seconds = {"stagehand": 1.5, "naive-pinned": 3.0, "ramtorch": 3.5}
    lines = [_cell(way, each, seconds=each) for way, each in seconds.items()]
    rows = [line.split(" | ") for line in device_section("card", lines)]
    found = {row[0]: row[4] for row in rows if len(row) == 14}
    assert found == {
        "| way": "overlap",
        "| stagehand": "75.0%",
        "| naive-pinned": "0.0%",
        "| ramtorch": "-25.0%",
    }
    alone = "\n".join(device_section("card", lines[:1]))
    assert "%" not in alone.split("| stagehand |")[1]


def test_page_is_made_from_results_alone(tmp_path):
    from benchmarks.page import main

    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    figure = {"median": 2.0, "unit": "us", "ok": True, "target": None}
    host = [
        {"name": "overhead a block, ours, 10 blocks", "value": 2.0, **figure},
        {"name": "overhead a block, ours, 1,000 blocks", "value": 1.5, **figure},
        {"name": "late", "value": 9.0, **figure, "target": 8.0, "ok": False},
        {
            "name": "wide",
            "value": 9.0,
            **figure,
            "target": 8.0,
            "ok": False,
            "why": "?",
        },
    ]
    spans = [
        {"kind": "span", "lane": lane, "start_ms": 0.0, "ms": 1.0}
        for lane in ("H2D", "compute", "stall")
    ]
    seen = {"model": "one", "budget_bytes": 10**9, "resident_seconds": 1.0}
    predictions = [{"kind": "prediction", "seconds": 1.5, **seen}]
    files = {
        "host": host,
        "timeline": spans,
        "predictions": predictions,
        "Some-GPU": [
            _cell("stagehand", 1.2, budget_bytes=10**10),
            _cell("stagehand", cap="8GiB", budget_bytes=10**9),
        ],
    }
    for name, lines in files.items():
        text = "\n".join(map(json.dumps, lines))
        (results / f"{name}.jsonl").write_text(text, encoding="utf-8")
    assert main(["--results", str(results), "--docs", str(docs)]) == 0
    page = (docs / "performance.md").read_text(encoding="utf-8")
    missed = page.split("## What misses its target")[1].split("## On the host")[0]
    assert "| late | 9 | 2 us | 8 | miss |" in missed
    assert "| miss: ? |" in missed
    assert "ours" not in missed
    assert "### Some-GPU" in page
    assert "lora/ltx-2/24GiB/stagehand: 1.200 of the bound" in page
    for name in ("overhead", "timeline", "predictions", "Some-GPU"):
        assert f"pictures/{name}.svg" in page
        assert (docs / "pictures" / f"{name}.svg").stat().st_size > 1000
