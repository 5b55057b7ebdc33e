"""Plans, acted out by an independent model of link and compute, over their bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.results import Result
from benchmarks.simulated import reach_tests
from stagehand.residency.plan import Workload, plan

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure", "predictions"]

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


# Seconds of compute, bytes and blocks; and the link's rate: published figures.
_MODELS = {
    "LTX-2 LoRA step, 6144 tokens": (8.28e-3, 772e6, 48, 2.0),
    "LTX-2 pass, 6144 tokens": (8.28e-3, 772e6, 48, None),
    "Qwen2.5-7B, one token": (0.2e-3, 466e6, 28, None),
}
_LINK = 55e9
_CUT = 8


def predictions() -> Iterator[dict[str, object]]:
    """Yield what the planner predicts for published shapes, by the budget."""
    for name, (compute, nbytes, blocks, backward) in _MODELS.items():
        count = blocks * _CUT
        order = list(range(count))
        seconds = [compute / _CUT] * count
        if backward is not None:
            order += order[::-1]
            seconds += [backward * compute / _CUT] * count
        piece = int(nbytes / _CUT)
        workload = Workload(
            order=tuple(order),
            nbytes=(piece,) * count,
            seconds=tuple(seconds),
            link_bytes_per_second=_LINK,
        )
        for share in range(1, 21):
            budget = max(4 * piece, share * count * piece // 20)
            made = plan(workload, budget_bytes=budget, max_lookahead=32)
            yield {
                "kind": "prediction",
                "model": name,
                "budget_bytes": budget,
                "seconds": made.step_seconds,
                "resident_seconds": sum(seconds),
            }


if __name__ == "__main__":
    for line in predictions():
        print(json.dumps(line))
