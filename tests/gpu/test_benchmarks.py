"""The benchmarks run to their end: a first run on a real device shall find no slip."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# Parameters of a block in millions, as the models' own classes have them.
COUNTED = {
    "ltx-2": [(386.07, 72)],
    "flux.1": [(339.83, 32), (141.59, 14)],
    "llama-3-8b": [(218.11, 9)],
}


@pytest.fixture(autouse=True)
def root_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_gpu_benchmark_rehearses_every_cell(sim, tmp_path, capsys):
    from benchmarks.gpu.__main__ import SHAPES, main

    scale = ["--blocks", "6", "--budgets", "60%"]
    assert main(["--dry", "--out", str(tmp_path), *scale]) == 0
    lines = (tmp_path / "simulated.jsonl").read_text().splitlines()
    link, *cells, trained, saving = map(json.loads, lines)
    kinds = [line["kind"] for line in (link, trained, saving)]
    assert kinds == ["link", "training", "activations"]
    assert [cell["shape"] for cell in cells] == list(SHAPES)
    for cell in cells:
        assert cell["bit_equal"]
        assert cell["over_bound"] > 0.999
        assert cell["peak_weight_bytes"] <= cell["budget_bytes"]
        assert cell["pinned_bytes"] == cell["weight_bytes"]
    assert trained["loss_equal"]
    assert trained["gradient_difference"] == trained["resident_difference"] == 0
    assert trained["over_bound"] > 0.999
    assert trained["peak_weight_bytes"] <= trained["budget_bytes"]
    assert trained["h2d_bytes"] > 0
    assert trained["d2h_bytes"] == 0
    assert saving["loss_equal"]
    assert saving["pool_hit_rate"] == 1.0
    assert saving["freed_bytes"] >= 0.95 * saving["spill_bytes"] > 0
    assert saving["lower_bytes"] > 0
    assert "of the bound" in capsys.readouterr().out


@pytest.mark.parametrize("name", COUNTED)
def test_block_shapes_are_those_of_the_models(name):
    from benchmarks.gpu.shapes import SHAPES

    found = []
    for _, make in SHAPES[name].blocks:
        with torch.device("meta"):
            sizes = [p.numel() for p in make(1).parameters()]
        found.append((round(sum(sizes) / 1e6, 2), len(sizes)))
    assert found == COUNTED[name]


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
    cell = {
        "kind": "cell",
        "shape": "ltx-2",
        "blocks": 48,
        "weight_bytes": 10**10,
        "budget_bytes": 10**9,
        "step": {"median": 0.5},
        "over_bound": 1.2,
        "over_resident": 1.4,
    }
    files = {
        "host": host,
        "timeline": spans,
        "predictions": predictions,
        "Some-GPU": [cell],
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
    assert "over the bound: ltx-2 (1.20)" in page
    for name in ("overhead", "timeline", "predictions"):
        assert f"pictures/{name}.svg" in page
        assert (docs / "pictures" / f"{name}.svg").stat().st_size > 1000
