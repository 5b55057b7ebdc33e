"""How late a reader thread begins a job while the thread that runs the model computes.

Copies to the device are queued by that thread itself and wait for nobody. Only reads
from disk and copies of pageable memory are given to threads.

Of each batch of jobs the median counts: the smallest of many delays says little of the
others. Of the batches the smallest is judged: while something else has the processor
that shall wake, for tenths of a second at a time, all delays of a batch are that long.
"""

import time
from collections.abc import Iterator, Mapping
from statistics import median

import torch

from benchmarks.results import Result, until_met
from benchmarks.timing import Times, in_turns
from stagehand.core.workers import WorkerGroup

__all__ = ["measure"]

_TARGET_US = 100.0
_BATCH = 30
_NAME = "delay of a reader thread while operators run"


def measure(*, rounds: int = 20) -> Iterator[Result]:
    """Yield the time from giving a thread a job to its beginning."""
    workers = WorkerGroup("benchmark", 1)
    try:
        times = in_turns(
            {_NAME: lambda: [median(_delays(workers))]},
            rounds=rounds,
            until=until_met(_rows),
        )
    finally:
        workers.close()
    yield from _rows(times)


def _rows(times: Mapping[str, Times]) -> Iterator[Result]:
    yield Result.of(_NAME, times[_NAME], "us", scale=1e6, target=_TARGET_US)


def _delays(workers: WorkerGroup) -> Iterator[float]:
    x = torch.randn(256, 256)
    for _ in range(_BATCH):
        given = time.perf_counter()
        begun = workers.submit(time.perf_counter)
        for _ in range(8):
            x = torch.tanh(x @ x)
        yield begun.result() - given
