"""Write `docs/performance.md` and its pictures: `python -m benchmarks.page`.

Everything on the page comes from JSON lines in `benchmarks/results/`: `host.jsonl` of
`python -m benchmarks --out`, `predictions.jsonl` of the planner, `timeline.jsonl` of
the simulated device, and a file for each device that `python -m benchmarks.gpu` ran on.
With `--measure` the first three are made anew.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices import device_section
from benchmarks.results import Result, shown
from benchmarks.simulated import ROOT

__all__ = ["main"]

_RESULTS = ROOT / "benchmarks" / "results"
_DOCS = ROOT / "docs"
_OWN = {"host.jsonl", "predictions.jsonl", "timeline.jsonl"}
_SOURCES = {
    "host.jsonl": ["benchmarks", "--json"],
    "predictions.jsonl": ["benchmarks.schedules"],
    "timeline.jsonl": ["benchmarks.virtual", "--timeline"],
}

Line = dict[str, Any]

_HEAD = """\
# Performance

This page is made from the files in `benchmarks/results/` by `python -m
benchmarks.page`. `make bench` measures the host's part anew, `python -m benchmarks.gpu`
a device's. Ratios and differences inside one run count, absolute times depend on the
machine.
"""

_HOST = """\
A figure is the smallest of many repetitions, where its name says nothing else; of the
steps of 10,000 blocks each part's smallest is taken. What has no target explains
others. Passes and plans "over its bound", and virtual time, are calculated, not timed.
Rows "in pieces" cut blocks into eight equal ones; the pieces of real models are layers,
of up to 648 MiB in FLUX.2, and have rows of their own.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its pictures; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.measure:
        _measure(options.results)
    found = {path.name: _read(path) for path in sorted(options.results.glob("*.jsonl"))}
    options.docs.mkdir(parents=True, exist_ok=True)
    pictures = options.docs / "pictures"
    pictures.mkdir(exist_ok=True)
    text = "\n".join(_page(found, pictures))
    (options.docs / "performance.md").write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--measure", action="store_true", help="run what needs no GPU first"
    )
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--docs", type=Path, default=_DOCS)
    return parser


def _measure(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in _SOURCES.items():
        command = [sys.executable, "-m", *module]
        made = folder / f"{name}.new"  # what is there stays until all is measured
        with made.open("w", encoding="utf-8") as file:
            subprocess.run(command, cwd=ROOT, check=True, stdout=file)
        made.replace(folder / name)


def _read(path: Path) -> list[Line]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def _page(found: dict[str, list[Line]], pictures: Path) -> Iterator[str]:
    host = found.get("host.jsonl", [])
    yield _HEAD
    yield "## What misses its target\n"
    missed = [line for line in host if not line["ok"]]
    yield from _host_table(missed) if missed else ["Nothing of what is below does.\n"]
    yield "## On the host\n"
    yield _HOST
    yield from _host_table(host)
    if _draw_overhead(host, pictures / "overhead.svg"):
        yield "![overhead a block by the number of blocks](pictures/overhead.svg)\n"
    yield "## In virtual time\n"
    yield (
        "One settled pass on the simulated device, near the balance of compute and"
        " link:\nwhat computes, what is copied, and where compute waits.\n"
    )
    if _draw_timeline(found.get("timeline.jsonl", []), pictures / "timeline.svg"):
        yield "![copies and compute of one pass](pictures/timeline.svg)\n"
    yield "## Predictions\n"
    yield (
        "Not measured: what the planner predicts for published shapes at 55 GB/s, in"
        " equal pieces, eight\na block, by the budget for weights.\n"
    )
    if _draw_predictions(
        found.get("predictions.jsonl", []), pictures / "predictions.svg"
    ):
        yield "![predicted step time against the budget](pictures/predictions.svg)\n"
    yield "## On devices\n"
    devices = {name: lines for name, lines in found.items() if name not in _OWN}
    if not devices:
        yield (
            "No device was measured yet: all above is host work, virtual time and what"
            " the planner\ncalculates.\n"
        )
    else:
        yield (
            "Overlap is the part that is saved of what naive moves from pinned memory"
            " take\nbeyond the bound, where they were measured, too.\n"
        )
    for name, lines in devices.items():
        stem = Path(name).stem
        yield from device_section(stem, lines)
        if _draw_budgets(lines, pictures / f"{stem}.svg"):
            yield f"![step time against the budget](pictures/{stem}.svg)\n"


def _host_table(lines: Iterable[Line]) -> Iterator[str]:
    yield "| what | figure | median | target | |"
    yield "|---|---|---|---|---|"
    for line in lines:
        if not line["unit"]:
            yield f"| {line['name']} | | | | |"
            continue
        found = Result.of_line(line)
        target = "" if found.target is None else f"{found.target:g}"
        value, median = (shown(x, found.unit) for x in (found.value, found.median))
        cells = f"{value} | {median} {found.unit} | {target} | {found.verdict}"
        yield f"| {found.name} | {cells} |"
    yield ""


# Pictures


def _draw_overhead(lines: Sequence[Line], path: Path) -> bool:
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        match = re.fullmatch(r"overhead a block, (.+), ([\d,]+) blocks", line["name"])
        if match:
            count = int(match[2].replace(",", ""))
            points.setdefault(match[1], []).append((count, line["value"]))
    if not points:
        return False
    figure, axes = _axes("blocks", "overhead a block, microseconds")
    for name, series in points.items():
        axes.plot(*zip(*sorted(series), strict=True), marker="o", label=name)
    _by_tens(axes, "xy")
    return _save(figure, axes, path)


def _draw_predictions(lines: Sequence[Line], path: Path) -> bool:
    if not lines:
        return False
    figure, axes = _axes("budget for weights, GB", "step over the resident model's")
    for name in dict.fromkeys(line["model"] for line in lines):
        of_one = [line for line in lines if line["model"] == name]
        axes.plot(
            [line["budget_bytes"] / 1e9 for line in of_one],
            [line["seconds"] / line["resident_seconds"] for line in of_one],
            label=name,
        )
    _by_tens(axes, "y")
    return _save(figure, axes, path)


def _draw_budgets(lines: Sequence[Line], path: Path) -> bool:
    """Of what was measured with this library in several budgets, with its bound."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for line in lines:
        cell = line.get("cell", {})
        if cell.get("way") == "stagehand" and "step" in line:
            over = line["over_resident"]
            point = {line["budget_bytes"] / 1e9: (over, over / line["over_bound"])}
            found.setdefault(f"{cell['kind']}/{cell['shape']}", {}).update(point)
    curves = {name: points for name, points in found.items() if len(points) > 1}
    if not curves:
        return False
    figure, axes = _axes("budget for weights, GB", "step, and bound, over the resident")
    for number, (name, points) in enumerate(curves.items()):
        budgets = sorted(points)
        steps, bounds = zip(*(points[budget] for budget in budgets), strict=True)
        color, marker = f"C{number}", "o^"[number // 10 % 2]  # there are ten colors
        axes.plot(budgets, steps, marker=marker, color=color, label=name)
        axes.plot(budgets, bounds, linestyle=":", color=color)
    _by_tens(axes, "y")
    return _save(figure, axes, path)


def _draw_timeline(lines: Sequence[Line], path: Path) -> bool:
    if not lines:
        return False
    figure, axes = _axes("milliseconds", "")
    lanes = ["H2D", "compute", "stall"]
    for number, lane in enumerate(lanes):
        spans = [(e["start_ms"], e["ms"]) for e in lines if e["lane"] == lane]
        axes.broken_barh(
            spans, (number - 0.4, 0.8), facecolors=f"C{number}", edgecolor="white"
        )
    axes.set_yticks(range(len(lanes)), lanes)
    return _save(figure, axes, path)


def _axes(across: str, up: str) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "stagehand"  # the same numbers, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes


def _by_tens(axes: Any, names: str) -> None:
    """Scale axes by powers of ten, and write these as people do."""
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        getattr(axes, f"{name}axis").set_major_formatter("{x:,.10g}")


def _save(figure: Any, axes: Any, path: Path) -> bool:
    if axes.get_legend_handles_labels()[0]:  # beside the curves, it hides none
        figure.legend(fontsize="x-small", loc="outside right upper")
    figure.savefig(path, metadata={"Date": None})
    from matplotlib import pyplot

    pyplot.close(figure)
    return True


if __name__ == "__main__":
    sys.exit(main())
