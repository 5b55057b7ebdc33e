"""How long a plan takes for very many blocks."""

from collections.abc import Iterator

from benchmarks.results import Result
from benchmarks.timing import take_turns
from stagehand.residency.plan import Plan, Workload, plan

__all__ = ["measure"]

_BLOCK_BYTES = 16 << 20
_LINK = 25e9
_TARGET_SECONDS = 1.0


def measure(blocks: int = 10_000, rounds: int = 3) -> Iterator[Result]:
    """Yield the time of one plan, for a loop and for forward and backward."""
    ring = tuple(range(blocks))
    for name, order in (("in a ring", ring), ("there and back", ring + ring[::-1])):

        def run(order: tuple[int, ...] = order) -> Plan:
            return _plan(blocks, order)

        times = take_turns({"plan": run}, rounds=rounds)["plan"]
        yield Result.of(
            f"plan of {blocks:,} blocks, {len(order):,} uses {name}",
            times,
            "s",
            target=_TARGET_SECONDS,
        )


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
