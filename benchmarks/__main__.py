"""Run the benchmarks that need no GPU: `python -m benchmarks [--only SUITE ...]`."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from benchmarks.results import HEAD, Result, as_line, as_row, met

_HEADING = """\
Costs on the host, each measured in turns with what it is compared to, on one thread.
The smallest of many repetitions counts; a median far above it tells of a busy machine.
A block is a linear layer of 16 x 16: two parameters. Copies and streams cost
nothing here, so what is left is the library's own work.
"""
_INTERRUPTED = 130  # as shells have it

Suite = Callable[[], Iterator[Result]]

SUITES: dict[str, tuple[Suite, Suite]] = {
    "overhead": (
        overhead.measure,
        lambda: overhead.measure((10, 30, 100), rounds=1),
    ),
    "training": (
        training.measure,
        lambda: training.measure((10, 20, 30), rounds=1),
    ),
    "peers": (
        peers.measure,
        lambda: peers.measure((10,), trained=(10,), blocks_timed=100),
    ),
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
    """Measure, print each figure as it is found, and return the exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    names = options.only or list(SUITES)
    seconds: dict[str, float] = {}
    results: list[Result] = []
    is_interrupted = False
    if not options.json:
        print(_HEADING, HEAD, sep="\n", flush=True)
    with _lines_to(options.out) as write:
        try:
            for result in _measure(names, seconds, quick=options.quick):
                results.append(result)
                line = as_line(result)
                write(line)
                print(line if options.json else as_row(result), flush=True)
        except KeyboardInterrupt:
            is_interrupted = True
    if not options.json:
        print(*_ending(results, seconds), sep="\n")
    if is_interrupted:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 1 if options.check and not met(results) else 0


@contextmanager
def _lines_to(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield what writes a line to a file, where it is at once, or nowhere."""
    if path is None:
        yield lambda _: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield lambda line: print(line, file=file, flush=True)


def _ending(results: Sequence[Result], seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield what a user looks for when all is done."""
    missed = [result for result in results if not met([result])]
    explained = sum(not result.ok and bool(result.why) for result in results)
    with_target = sum(result.target is not None for result in results)
    yield (
        f"\n{with_target} of {len(results)} figures have a target: {len(missed)} miss"
        f" it, {explained} more for the reason that is named"
    )
    yield from map(as_row, missed)
    each = ", ".join(f"{name} {took:.0f}" for name, took in seconds.items())
    yield f"\nseconds: {each}; {sum(seconds.values()):.0f} in all"


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


def _measure(
    names: Sequence[str], seconds: dict[str, float], *, quick: bool
) -> Iterator[Result]:
    """Run suites, and note how long each took."""
    for name in names:
        full, short = SUITES[name]
        start = time.monotonic()
        try:
            yield from (short if quick else full)()
        finally:
            seconds[name] = time.monotonic() - start


if __name__ == "__main__":
    sys.exit(main())
