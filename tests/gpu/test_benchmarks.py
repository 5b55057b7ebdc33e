"""The host's benchmarks run to their end, and the page is made of what they write."""

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def root_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_host_benchmark_prints_a_line_for_each_figure(capsys):
    from benchmarks.__main__ import main

    assert main(["--quick", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len({line["name"] for line in lines})
    assert {"value", "median", "target", "ok"} <= lines[0].keys()


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_host_benchmark_fails_on_a_miss_only_if_it_is_asked_to(
    monkeypatch, capsys, value, status
):
    from benchmarks import __main__ as command
    from benchmarks.results import Result

    found = Result(name="one", value=value, median=value, unit="us", target=2.0)
    monkeypatch.setattr(command, "_measure", lambda *_, **__: iter([found]))
    assert command.main([]) == 0
    assert command.main(["--check"]) == status
    assert ("miss" if status else "ok") in capsys.readouterr().out
    assert torch.get_num_threads() == 1


REVISIONS = {
    "slower": (2.0, 2.4, 2.0, 1),
    "slower, but has no target": (2.0, 2.4, None, 0),
    "hardly slower": (2.0, 2.2, 2.0, 0),
    "new": (None, 2.4, 2.0, 0),
}


@pytest.mark.parametrize("name", REVISIONS)
def test_two_revisions_are_measured_in_turns_and_a_worse_one_fails(
    monkeypatch, tmp_path, name
):
    from benchmarks import compare

    before, now, target, status = REVISIONS[name]
    order = []

    def measured(tree, _):
        order.append(tree == tmp_path)
        value = before if tree == tmp_path else now
        if value is not None:
            yield {"name": "one", "value": value, "target": target}

    monkeypatch.setattr(compare, "_checked_out", lambda _: nullcontext(tmp_path))
    monkeypatch.setattr(compare, "_measured", measured)
    assert compare.main(["other", "--rounds", "2"]) == status
    assert order == [True, False, False, True]


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
        "bound": seconds / over_bound,
        "resident_phases": [0.1, 0.2, 0.0],
        "resident_difference": 0.0,
        "over_bound": over_bound,
        "over_resident": 3.0,
        "equal": True,
        "device_bytes": device_bytes,
        **{f"{name}_bytes": 10**9 for name in sizes},
        "h2d_copies": 5,
        "d2h_copies": 0,
        "stall_ms": None,
        "startup": 2.0,
        "rates": {"h2d": 50e9},
        "h2d_rate_after": 50e9,
        **options,
    }


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
    "failed": ([{**_cell("stagehand"), "failed": "why"}], "failed (why)"),
    "bits": ([_cell("stagehand", equal=False)], "not the resident outcome"),
    "drift": ([_cell("stagehand", h2d_rate_after=45e9)], "not valid: the link's rate"),
    "faster": (
        [_cell("stagehand"), _cell("naive-pinned", seconds=0.9)],
        "naive-pinned: faster: 900.00 ms against 1000.00 ms of ours",
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
    assert len(_lost(_cell("stagehand"), other, {**less, "failed": "why"})) == 2
    late = _cell("stagehand", seconds=2.0)
    assert "faster" in _lost(_cell("stagehand"), other, less, late)[0]


def test_way_without_a_result_is_on_the_page_with_its_reason():
    from benchmarks.devices import device_section

    lines = [_cell("stagehand"), {**_cell("mmgp"), "failed": "not installed"}]
    text = "\n".join(device_section("card", lines))
    assert "| mmgp | left out: not installed |" in text
    assert _lost(*lines) == ["None."]


def test_page_is_made_from_results_alone(tmp_path):
    from benchmarks.page import main

    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    figure = {"median": 2.0, "unit": "us", "ok": True, "target": None}
    host = [
        {"name": "overhead a block, ours, 10 blocks", "value": 2.0, **figure},
        {"name": "overhead a block, ours, 1,000 blocks", "value": 1.5, **figure},
        {"name": "late", "value": 9.0, **figure, "target": 8.0, "ok": False},
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
    assert "ours" not in missed
    assert "### Some-GPU" in page
    assert "lora/ltx-2/24GiB/stagehand: 1.200 of the bound" in page
    for name in ("overhead", "timeline", "predictions", "Some-GPU"):
        assert f"pictures/{name}.svg" in page
        assert (docs / "pictures" / f"{name}.svg").stat().st_size > 1000
