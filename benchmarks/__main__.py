"""Run the benchmarks that need no GPU: `python -m benchmarks [--only SUITE ...]`."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import (
    activations,
    conductor,
    handles,
    memory,
    overhead,
    packing,
    peers,
    planning,
    reading,
    schedules,
    startup,
    streamer,
    threads,
    training,
    virtual,
)
from benchmarks.results import Result, as_lines, as_table

_HEADING = """\
Costs on the host, each measured in turns with what it is compared to, on one thread.
The smallest of many repetitions counts; a median far above it tells of a busy machine.
A block is a linear layer of 16 x 16: two parameters. Copies and streams cost
nothing here, so what is left is the library's own work.
"""

Suite = Callable[[], Iterator[Result]]

SUITES: dict[str, tuple[Suite, Suite]] = {
    "overhead": (
        overhead.measure,
        lambda: overhead.measure((10, 30, 100), blocks_timed=100),
    ),
    "training": (
        training.measure,
        lambda: training.measure((10, 20, 30), blocks_timed=100),
    ),
    "peers": (peers.measure, lambda: peers.measure((10,), blocks_timed=100)),
    "planning": (
        planning.measure,
        lambda: planning.measure(blocks=1_000, rounds=1),
    ),
    "schedules": (
        schedules.measure,
        lambda: schedules.measure(blocks=12, pieces=4, models=1),
    ),
    "virtual": (virtual.measure, lambda: virtual.measure(cells=1)),
    "memory": (memory.measure, lambda: memory.measure(rounds=1)),
    # Apart from "reading": a disk that has read much may be slow for a while.
    "streamer": (
        streamer.measure,
        lambda: streamer.measure(rounds=1, layers=6, layer_bytes=4 << 20),
    ),
    "startup": (
        startup.measure,
        lambda: startup.measure(layers=6, width=512, rounds=1),
    ),
    "threads": (threads.measure, lambda: threads.measure(rounds=1)),
    "handles": (handles.measure, lambda: handles.measure(rounds=1)),
    "packing": (packing.measure, lambda: packing.measure(rounds=1, weights=1 << 20)),
    "reading": (
        reading.measure,
        lambda: reading.measure(rounds=1, blocks=6, block_bytes=4 << 20),
    ),
    "conductor": (conductor.measure, lambda: conductor.measure(rounds=1)),
    "activations": (activations.measure, lambda: activations.measure(rounds=1)),
}
"""What there is to measure: in full, and short, to see that it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    results = list(_measure(options.only or list(SUITES), quick=options.quick))
    if options.json:
        print(as_lines(results))
    else:
        print(_HEADING)
        print(as_table(results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(as_lines(results) + "\n", encoding="utf-8")
    missed = any(not (result.ok or result.why) for result in results)
    return 1 if options.check and missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--out", type=Path, help="a file for the JSON lines, too")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail on what misses its target unexplained",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer blocks: to see that it runs"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES)
    )
    return parser


def _measure(names: Sequence[str], *, quick: bool) -> Iterator[Result]:
    for name in names:
        full, short = SUITES[name]
        yield from (short if quick else full)()


if __name__ == "__main__":
    sys.exit(main())
