"""What a lease of kept memory costs, beside making and touching the memory anew."""

import mmap
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from benchmarks.results import Result, ratio, until_met
from benchmarks.timing import Times, in_turns, timed
from stagehand.core.arena import Arena
from stagehand.core.device import HostDevice
from stagehand.core.ledger import Account

__all__ = ["measure"]

_NBYTES = 64 << 20
_TARGET = 1e-4


def measure(rounds: int = 9) -> Iterator[Result]:
    """Yield the ratio, and both times.

    Medians are compared: in some turns the system has huge pages at hand, and touches
    new memory ten times as fast.
    """
    account = Account("host memory", 2 * _NBYTES)
    arena = Arena("host memory", HostDevice().pinned, account)

    def lease() -> None:
        arena.acquire(_NBYTES, "benchmark").release()

    def make() -> None:
        # Not by torch: its allocator may have that much left that was touched before.
        memory = mmap.mmap(-1, _NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    def over(times: Mapping[str, Times]) -> Iterator[Result]:
        yield ratio(
            "acquire and release over allocate and touch, medians",
            times["lease"].part_of(times["make"]).median,
            _TARGET,
        )

    times = in_turns(
        {"lease": partial(timed, lease, 1_000), "make": partial(timed, make)},
        rounds=rounds,
        until=until_met(over),
    )
    arena.close()
    for what, name in (
        ("acquire and release 64 MiB of an arena", "lease"),
        ("allocate and touch 64 MiB", "make"),
    ):
        yield Result.of(what, times[name], "us", scale=1e6)
    yield from over(times)
