"""Calibrate the link, then measure models in the memory of smaller cards.

A cell is named kind/shape/memory/way: what is done, with which model's blocks, in how
much memory, and by whom: this library in the ways it is used, other libraries, and what
people write themselves. Each runs in a process of its own, first resident, then with
weights (or saved tensors) elsewhere, beside a process that holds the rest of the card.
This library's outcome has to be the resident one bit for bit.

The line of each is added to a file with the device's name in `benchmarks/results/`.
What has a line there is not measured again, so a run goes on where one stopped: with
`--short --minutes 9`, say, as often as there is time.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.card import SimulatedCard
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.suite import SHORT, all_cells, dry, pick
from benchmarks.gpu.tasks.making import KINDS
from benchmarks.gpu.ways.every import WAYS
from benchmarks.gpu.worker import apart, attempt, left_out, measure_link
from benchmarks.simulated import ROOT
from stagehand.units import format_bytes

_DRY_BLOCKS = 4
_DRY_DIVIDE = 64
_FEWEST_SECONDS = 60.0  # in which no cell of a true size is done


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cells = _cells(options)
    except ValueError as error:
        parser.error(str(error))
    if not cells:
        parser.error("no cell is all that is asked for; --list prints names")
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if not options.dry and not torch.cuda.is_available():
        print("there is no CUDA device; --dry rehearses on a simulated one")
        return 2
    card = SimulatedCard() if options.dry else None
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    folder = options.out
    if folder is None and not options.dry:
        folder = ROOT / "benchmarks" / "results"
    ends = time.monotonic() + 60 * options.minutes
    # A rehearsal is done here: it measures nothing that others would spoil.
    known = None if options.again else folder
    if card:
        link = measure_link(card, options.scratch, known)
    else:
        link = _apart(None, options, ends, known)
    lines = Lines(link["device"], folder)
    if link != lines.link:
        lines.write(link)
    left = [cell for cell in cells if options.again or cell not in lines]
    left.sort(key=lines.tried)  # what failed before takes no other cell's time
    failed = 0
    for number, cell in enumerate(left):
        if ends - time.monotonic() < _FEWEST_SECONDS:
            print(f"{len(left) - number} cells are left: run the command again")
            break
        began = time.monotonic()
        line = (
            attempt(cell, card, options.scratch) if card else _one(cell, options, ends)
        )
        if number and "failed" in line and time.monotonic() >= ends:
            print(f"{len(left) - number} cells are left, one of them half done")
            break
        lines.write(line)
        took = time.monotonic() - began
        print(f"{cell.name}: {_sentence(line)} ({took:.0f} s)", flush=True)
        failed += cell.ours and "failed" in line
    return 1 if failed else 0


def _cells(options: argparse.Namespace) -> list[Cell]:
    names = list(SHORT) if options.short else options.cells
    found = pick(all_cells(), names=names, kinds=options.kinds, ways=options.ways)
    if options.dry:
        return dry(found, blocks=options.blocks or _DRY_BLOCKS, divide=_DRY_DIVIDE)
    return [cell.scaled(options.blocks, options.steps) for cell in found]


def _one(cell: Cell, options: argparse.Namespace, ends: float) -> dict[str, Any]:
    """Spend no process on a library that is not there."""
    return left_out(cell) or _apart(cell, options, ends)


def _apart(
    cell: Cell | None,
    options: argparse.Namespace,
    ends: float,
    results: Path | None = None,
) -> dict[str, Any]:
    seconds = min(options.seconds, ends - time.monotonic())
    return apart(
        cell, dry=False, folder=options.scratch, seconds=seconds, results=results
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dry", action="store_true", help="tiny, and simulated")
    add("--list", action="store_true", help="print the cells' names and do nothing")
    headlines = ", ".join(SHORT).replace("%", "%%")
    named = parser.add_mutually_exclusive_group().add_argument
    named("--short", action="store_true", help="a few cells: " + headlines)
    named("--cells", nargs="+", default=[], help='patterns of names, such as "lora/*"')
    add("--kinds", nargs="+", choices=KINDS, default=[], help="what is done")
    add("--ways", nargs="+", choices=WAYS, default=[], help="by whom")
    add("--blocks", type=int, help="fewer blocks of the true shape")
    add("--steps", type=int, default=10, help="timed steps of a cell")
    add("--minutes", type=float, default=math.inf, help="in which to come to an end")
    add("--again", action="store_true", help="measure anew what has a line")
    add("--seconds", type=float, default=900, help="after which a cell is given up")
    add("--scratch", type=Path, help="folder for checkpoints, on the disk under test")
    add("--out", type=Path, help="folder for the results")
    return parser


def _sentence(line: dict[str, Any]) -> str:
    if "left_out" in line:
        return f"left out: {line['left_out']}"
    if "failed" in line:
        return f"failed: {line['failed']}"
    unseen = "; the profiler saw none of its copies: it wants rights to use CUPTI"
    return (
        f"{line['step']['median'] * 1e3:.3f} ms a step,"
        f" {line['over_bound']:.3f} of the bound, {line['over_resident']:.3f} of"
        f" resident, {format_bytes(line['device_bytes'])} on the device"
        + (unseen if line["h2d_copies"] is None else "")
    )


if __name__ == "__main__":
    sys.exit(main())
