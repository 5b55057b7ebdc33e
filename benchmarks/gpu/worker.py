"""One cell in a process of its own.

Other libraries change what all of a process shares, and peaks and start-up count from a
fresh one. Who starts the processes must not use the device: all that is gone from its
memory, but for the ballast, counts as the cell's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.card import Card, SimulatedCard
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.link import calibrate
from benchmarks.gpu.measure import measure
from benchmarks.gpu.stages import Stages
from benchmarks.gpu.ways.base import LeftOutError
from benchmarks.gpu.ways.every import WAYS
from benchmarks.simulated import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["apart", "attempt", "left_out", "main", "measure_link", "why"]

_SIZES = tuple(2**power for power in range(16, 31, 2))
_DRY_SIZES = (1 << 10, 1 << 13, 1 << 16)
_STAGES = "stages.txt"
_TOLD = 2000  # characters of what a process that failed has said


def attempt(
    cell: Cell, card: Card, folder: Path | None = None, stages: Stages | None = None
) -> dict[str, Any]:
    """Return a cell's line; where another library cannot do it, the reason.

    Args:
        cell: What is measured.
        card: Where.
        folder: See `measure`.
        stages: See `measure`.

    Raises:
        Exception: All else: a mistake, of the cell or of the library.
    """
    if line := left_out(cell):
        return line
    try:
        return measure(cell, card, folder, stages)
    except LeftOutError as error:
        return _left_out(cell, str(error))
    except torch.OutOfMemoryError as error:
        if cell.ours:
            raise
        return _left_out(cell, f"OutOfMemoryError: {error}".splitlines()[0])


def left_out(cell: Cell) -> dict[str, Any] | None:
    """Return the line of a cell whose library is not there; else None."""
    way = WAYS[cell.way]
    return _left_out(cell, f"{way.package} is not installed") if way.missing else None


def _left_out(cell: Cell, reason: str) -> dict[str, Any]:
    return {"kind": "cell", "cell": cell.line(), "left_out": reason}


def apart(
    cell: Cell | None,
    *,
    dry: bool,
    folder: Path | None,
    seconds: float,
    results: Path | None = None,
) -> dict[str, Any]:
    """Return a cell's line, or how its process ended.

    Args:
        cell: What is measured; None for the link.
        dry: On the simulated device.
        folder: Where files are written for a while; None for the system's place.
        seconds: After which it is given up.
        results: Where a line of the link may be that will do.
    """
    # What a process that is killed leaves behind goes with the folder.
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as there:
        result = Path(there) / "line.json"
        command = [sys.executable, "-m", "benchmarks.gpu.worker"]
        command += [json.dumps(cell and cell.line()), str(result)]
        command += ["dry" if dry else "real", str(results or ""), there]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"it took more than {seconds:.0f} seconds"
            stages = Path(there) / _STAGES
            if stages.exists():
                reason += f": {stages.read_text(encoding='utf-8')}"
            return _failed(cell, reason)
        if result.exists():
            line: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return line
        print(done.stderr[-_TOLD:], file=sys.stderr)
        return _failed(cell, why(done.stderr) or f"it ended with {done.returncode}")


def why(stderr: str) -> str:
    """Return the line of a process's last words that says what went wrong.

    The one that names the exception: what CUDA refuses is told in more lines, of which
    the last says how to compile torch.
    """
    _, raised, rest = stderr.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in rest.splitlines() if line and not line.startswith(" ")]
    if not lines:
        return ""
    return lines[0] if raised else lines[-1]


def _failed(cell: Cell | None, reason: str) -> dict[str, Any]:
    if cell is None:
        raise RuntimeError(f"the link could not be measured: {reason}")
    return {"kind": "cell", "cell": cell.line(), "failed": reason}


def measure_link(
    card: Card, folder: Path | None = None, results: Path | None = None
) -> dict[str, Any]:
    """Return the line of the link, with the card's name: the one that is there."""
    if (known := Lines(card.name, results).link) is not None:
        return known
    sizes = _DRY_SIZES if card.dry else _SIZES
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as files:
        found = calibrate(card.device, sizes, Path(files))
    card.empty_cache()
    return {**found.line(), "device": card.name}


def main(arguments: Sequence[str]) -> int:
    """Measure, write the line, and return the exit status."""
    about, result, where, results, folder = arguments
    card = SimulatedCard() if where == "dry" else Card()
    cell, there = json.loads(about), Path(folder) if folder else None
    if cell is None:
        line = measure_link(card, there, Path(results) if results else None)
    else:
        stages = Stages(Path(result).with_name(_STAGES))
        line = attempt(Cell(**cell), card, there, stages)
    Path(result).write_text(json.dumps(line), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
