"""Streamed passes in virtual time, over what the link and the device allow.

The real runtime runs on the simulated device. Blocks have the ratio of compute to load
of the model and the device that a cell names; pieces are eight equal ones of a block
(`schedules` has those of the models themselves). Virtual time has no noise: one number
is the whole truth. A process of its own runs the cells, because PyTorch knows one
accelerator a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import headlines
from benchmarks.headlines import small_blocks
from benchmarks.results import Result, as_line, ratio
from benchmarks.simulated import ROOT, load_simulated_device

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure"]

_TARGET = 1.015
_SETTLING = 6

# Seconds that a block computes and loads, blocks, and how many of them the budget
# holds: the models and devices for which limits are published.
_MODELS = {
    "LTX-2, 768 tokens, PCIe 5": (1.05e-3, 14.04e-3, 48, 16),
    "LTX-2, 6144 tokens, PCIe 5": (8.28e-3, 14.04e-3, 48, 16),
    "LTX-2, 768 tokens, PCIe 4": (10.48e-3, 30.89e-3, 48, 16),
    "Qwen2.5-7B, one token, PCIe 5": (0.2e-3, 8.5e-3, 28, 8),
    "Qwen2.5-7B, one token, two blocks kept": (0.2e-3, 8.5e-3, 28, 2),
    "Llama-3-8B, 2048 tokens, PCIe 5": (1.9e-3, 7.9e-3, 32, 8),
    "FLUX.1, 2048^2, PCIe 5": (14.7e-3, 7.5e-3, 57, 4),
}
# Of 61 GB: the link, in GB a second, and how many are kept.
_EXPERTS = (
    ("PCIe 4, 8 GB kept", 25, 8),
    ("PCIe 4, 24 GB kept", 25, 24),
    ("PCIe 5, 24 GB kept", 55, 24),
)
_EXPERTS_TARGET = (
    1.08  # the ring has a layer of all experts, a thirtieth of what crosses
)
_PIECES = 8
_COMMAND = [sys.executable, "-m", "benchmarks.virtual"]
_SHORT = 8  # this part of the blocks, to see that it runs


def measure(*, cells: int | None = None) -> Iterator[Result]:
    """Yield each cell's time over its bound, as whole blocks and in pieces.

    Args:
        cells: How many of the cells to run; None runs all.
    """
    with subprocess.Popen(
        [*_COMMAND, *([] if cells is None else [str(cells)])],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Result.of_line(json.loads(line))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def _cells(cells: int | None) -> Iterator[Result]:
    sim = load_simulated_device()
    from simulated import workloads

    predicted = 1.0
    for name, case, budget, target in _passes(workloads, cells):
        over_bound, over_plan = _times(sim, workloads, case, budget)
        predicted = max(predicted, over_plan, 1 / over_plan)
        yield ratio(f"virtual time over the bound, {name}", over_bound, target)
    what = "worst of these passes over the plan's prediction, or under"
    yield ratio(what, predicted, 1.03)
    yield from _experts(sim, part=1 if cells is None else _SHORT // 2)
    yield from headlines.measure(sim, part=1 if cells is None else _SHORT)


def _experts(sim: Any, *, part: int) -> Iterator[Result]:
    """A token of a mixture of experts, of which those cross that it goes to."""
    from simulated.experts import DEPTH, GB, Case, Decoding

    for name, rate, kept in _EXPERTS:
        case = Case(rate * GB, int(kept * GB / part), DEPTH // part)
        with small_blocks(0):
            decoding = Decoding.of(sim, case)
            decoding.run(_SETTLING)
            over_bound = decoding.seconds() / case.bound
            decoding.runtime.shutdown()
        what = f"Qwen3-30B-A3B, one token, {name}"
        yield ratio(f"virtual time over the bound, {what}", over_bound, _EXPERTS_TARGET)


def _passes(
    workloads: Any, cells: int | None
) -> Iterator[tuple[str, Any, int, float | None]]:
    """Yield what runs: its name, case, budget and target."""
    for name, (compute, load, count, kept) in list(_MODELS.items())[:cells]:
        whole = workloads.equal(count, compute, load)
        budget = max(kept, 2) * workloads.BLOCK
        yield f"{name}, whole blocks", whole, budget, None
        cut = workloads.pieces(whole, _PIECES)
        yield f"{name}, in pieces", cut, budget, _TARGET
    name = "FLUX.1, 1024^2, PCIe 5, unequal blocks in pieces"
    yield name, workloads.FLUX_IN_PIECES, int(16 * workloads.GB), 1.02


def _times(sim: Any, workloads: Any, case: Any, budget: int) -> tuple[float, float]:
    """A settled pass over what is possible, and over what its plan says."""
    workloads.configure(sim, case)
    with small_blocks(0):
        loop = workloads.stream(sim, case, budget)
        loop.run(_SETTLING, waits=True)
        seconds = loop.seconds(waits=True)
        planned = loop.plan.step_seconds
        loop.runtime.shutdown()
    return seconds / case.bound(budget), seconds / planned


def _spans() -> Iterator[dict[str, object]]:
    """Yield what copies and computes in one settled pass, from its trace."""
    sim = load_simulated_device()
    from simulated import workloads

    case = workloads.pieces(workloads.equal(12, 8.28e-3, 14.04e-3), 4)
    workloads.configure(sim, case)
    budget = 5 * workloads.BLOCK
    with small_blocks(0):
        loop = workloads.stream(sim, case, budget, telemetry=True, trace=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        loop.run(_SETTLING + 2, waits=True)
        loop.runtime.export_trace(path)
        loop.runtime.shutdown()
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    first = spans[0]["name"]
    starts = [
        e["ts"] for e in spans if e["name"] == first and lanes[e["tid"]] == "compute"
    ]
    begin, end = starts[-2], starts[-1]
    for e in spans:
        start, stop = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
        if start < stop:
            yield {
                "kind": "span",
                "lane": lanes[e["tid"]],
                "start_ms": (start - begin) / 1e3,
                "ms": (stop - start) / 1e3,
            }


if __name__ == "__main__":
    if sys.argv[1:] == ["--timeline"]:
        for span in _spans():
            print(json.dumps(span))
    else:
        chosen = int(sys.argv[1]) if len(sys.argv) > 1 else None
        for cell in _cells(chosen):
            print(as_line(cell), flush=True)
