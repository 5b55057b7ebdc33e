"""How long a plan takes for very many blocks."""

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.results import Result
from benchmarks.timing import take_turns
from stagehand.residency.plan import Plan, Workload, plan

__all__ = ["and_back", "measure"]

_BLOCK_BYTES = 16 << 20
_LINK = 25e9
_TARGET_SECONDS = 1.0
_REGION = 20  # blocks
_FEWER = 10  # this part of the blocks; then time grows by no more than their number


def measure(blocks: int = 10_000, rounds: int = 3) -> Iterator[Result]:
    """Yield the time of one plan, for a loop and for forward and backward.

    A plan knows bytes and uses of blocks: how many tensors they have is all the same.
    """
    few = blocks // _FEWER
    for name, order in (
        ("in a ring", _ring),
        ("there and back", _there_and_back),
        ("and back by regions", _by_regions),
    ):
        runs = {n: partial(_plan, n, order(n)) for n in (blocks, few)}
        times = take_turns({str(n): run for n, run in runs.items()}, rounds=rounds)
        yield Result.of(
            f"plan of {blocks:,} blocks, {len(order(blocks)):,} uses {name}",
            times[str(blocks)],
            "s",
            target=_TARGET_SECONDS,
        )
        yield Result.of(
            f"plan of {blocks:,} blocks over one of {few:,}, {name}",
            times[str(blocks)].part_of(times[str(few)]),
            "x",
            target=_FEWER,
        )


def _ring(blocks: int) -> tuple[int, ...]:
    return tuple(range(blocks))


def _there_and_back(blocks: int) -> tuple[int, ...]:
    return _ring(blocks) + _ring(blocks)[::-1]


def _by_regions(blocks: int) -> tuple[int, ...]:
    regions = [range(first, first + _REGION) for first in range(0, blocks, _REGION)]
    return (*_ring(blocks), *and_back(regions))


def and_back(regions: Sequence[Sequence[int]]) -> list[int]:
    """Return the uses of backward: each region is computed again, then gone through."""
    return [use for one in reversed(regions) for use in (*one, *reversed(one))]


def _plan(blocks: int, order: tuple[int, ...]) -> Plan:
    """Three sizes of blocks, a third of the bytes on the device."""
    nbytes = tuple(_BLOCK_BYTES * (1 + block % 3) for block in range(blocks))
    workload = Workload(
        order=order,
        nbytes=nbytes,
        seconds=tuple(1e-3 * (1 + block % 2) for block in order),
        link_bytes_per_second=_LINK,
    )
    return plan(workload, budget_bytes=sum(nbytes) // 3, max_lookahead=3)
