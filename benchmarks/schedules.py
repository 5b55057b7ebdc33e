"""Plans, acted out by an independent model of link and compute, over their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.results import Result
from benchmarks.simulated import reach_tests
from stagehand.residency.plan import Workload, plan

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure"]

_TARGET = 1.02
_PIECE = 1 << 20
_RATE = 50e9


def measure(*, blocks: int = 48, pieces: int = 8) -> Iterator[Result]:
    """Yield the worst ratio over a grid of budgets and of compute over load.

    Args:
        blocks: Blocks of each workload.
        pieces: How many pieces a block is cut into.
    """
    for name, backward in (("ring", None), ("forward and backward", 2.0)):
        worst = max(
            _over_bound(blocks * pieces, ratio, share, backward)
            for ratio in (0.3, 0.6, 0.9, 1.1, 1.5, 3.0)
            for share in (1 / 6, 1 / 3, 1 / 2, 3 / 4)
        )
        what = f"worst plan over its bound, {name}, blocks in {pieces} pieces"
        yield Result(name=what, value=worst, median=worst, unit="x", target=_TARGET)


def _over_bound(
    count: int, load_over_compute: float, share: float, backward: float | None
) -> float:
    """Return the time of a planned step over the least that it can take.

    `max(C, (W - V) / B)` for each phase: only what the budget holds can be there when a
    phase starts.
    """
    reach_tests()
    from schedules import execute

    load = _PIECE / _RATE
    seconds = [load / load_over_compute] * count
    order = list(range(count))
    crossing = (1 - share) * count * load
    bound = max(sum(seconds), crossing)
    if backward is not None:
        seconds += [backward * seconds[0]] * count
        order += order[::-1]
        bound += max(sum(seconds[count:]), crossing)
    workload = Workload(
        order=tuple(order),
        nbytes=(_PIECE,) * count,
        seconds=tuple(seconds),
        link_bytes_per_second=_RATE,
    )
    made = plan(workload, budget_bytes=int(share * count) * _PIECE, max_lookahead=32)
    return execute(workload, made) / bound
