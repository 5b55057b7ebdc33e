"""How late a reader thread begins a job while the thread that runs the model computes.

Copies to the device are queued by that thread itself and wait for nobody. Only reads
from disk and copies of pageable memory are given to threads.
"""

import time
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.results import Result
from stagehand.core.workers import WorkerGroup

__all__ = ["measure"]

_TARGET_US = 100.0


def measure(*, rounds: int = 300) -> Iterator[Result]:
    """Yield the time from giving a thread a job to its beginning.

    The median counts: the smallest of many delays says little of the others.
    """
    x = torch.randn(256, 256)
    workers = WorkerGroup("benchmark", 1)
    delays = []
    try:
        for _ in range(rounds):
            given = time.perf_counter()
            begun = workers.submit(time.perf_counter)
            for _ in range(8):
                x = torch.tanh(x @ x)
            delays.append(begun.result() - given)
    finally:
        workers.close()
    usual = median(delays) * 1e6
    yield Result(
        name="delay of a reader thread while operators run",
        value=usual,
        median=usual,
        unit="us",
        target=_TARGET_US,
    )
