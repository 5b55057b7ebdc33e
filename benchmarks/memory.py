"""What a lease of kept memory costs, beside making and touching the memory anew."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from benchmarks.results import Result, until_met
from benchmarks.timing import Times, in_turns, timed
from stagehand.core.arena import Arena
from stagehand.core.device import HostDevice
from stagehand.core.ledger import Account

__all__ = ["measure"]

_NBYTES = 64 << 20
_TARGET = 1e-4


def measure(rounds: int = 9) -> Iterator[Result]:
    """Yield the ratio, and both times."""
    account = Account("host memory", 2 * _NBYTES)
    arena = Arena("host memory", HostDevice().pinned, account)

    def lease() -> None:
        arena.acquire(_NBYTES, "benchmark").release()

    def make() -> None:
        torch.empty(_NBYTES, dtype=torch.uint8).fill_(1)

    def over(times: Mapping[str, Times]) -> Iterator[Result]:
        yield Result.of(
            "acquire and release over allocate and touch",
            times["lease"].part_of(times["make"]),
            "x",
            target=_TARGET,
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
