"""What a lease of kept memory costs, beside making and touching the memory anew."""

from collections.abc import Iterator

import torch

from benchmarks.results import Result
from benchmarks.timing import take_turns
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

    leased = take_turns({"lease": lease}, rounds=rounds, calls=1_000)["lease"]
    made = take_turns({"make": make}, rounds=rounds)["make"]
    arena.close()
    yield Result.of("acquire and release 64 MiB of an arena", leased, "us", scale=1e6)
    yield Result.of("allocate and touch 64 MiB", made, "us", scale=1e6)
    yield Result.of(
        "acquire and release over allocate and touch",
        leased.part_of(made),
        "x",
        target=_TARGET,
    )
