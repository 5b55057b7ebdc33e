"""Run all benchmarks that need no GPU: `python -m benchmarks [--json] [--check]`."""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks import handles, memory, overhead, packing, planning, training
from benchmarks.results import Result, as_lines, as_table

_HEADING = """\
Costs on the host, each measured in turns with what it is compared to, on one thread.
The smallest of many repetitions counts; a median far above it tells of a busy machine.
A block is a linear layer of 16 x 16: two parameters. Copies and streams cost
nothing here, so what is left is the library's own work.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    results = list(_measure(quick=options.quick))
    if options.json:
        print(as_lines(results))
    else:
        print(_HEADING)
        print(as_table(results))
    missed = any(not result.ok for result in results)
    return 1 if options.check and missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--check", action="store_true", help="fail on a missed target")
    parser.add_argument(
        "--quick", action="store_true", help="fewer blocks: to see that it runs"
    )
    return parser


def _measure(*, quick: bool) -> Iterator[Result]:
    if quick:
        yield from overhead.measure((10, 30, 100), blocks_timed=100)
        yield from planning.measure(blocks=100, rounds=1)
        yield from memory.measure(rounds=1)
        yield from handles.measure(rounds=1)
        yield from packing.measure(rounds=1, weights=1 << 20)
        yield from training.measure((10, 30), blocks_timed=100)
        return
    yield from overhead.measure()
    yield from planning.measure()
    yield from memory.measure()
    yield from handles.measure()
    yield from packing.measure()
    yield from training.measure()


if __name__ == "__main__":
    sys.exit(main())
