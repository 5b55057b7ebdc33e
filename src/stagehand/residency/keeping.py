"""Which of the blocks that come from disk stay in host memory: by plan, evenly.

A cache that gives up what was used longest ago gives up exactly what a loop needs next.
What is kept here is chosen as the planner chooses what stays on the device: so that
what is left for the disk is an even rate of bytes over the time that uses take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.residency.spread import Walk
from stagehand.residency.timeline import Workload

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["choose_kept"]


def choose_kept(
    workload: Workload, candidates: Collection[int], room_bytes: int
) -> frozenset[int]:
    """Choose the blocks that stay in host memory once they were read.

    Args:
        workload: What runs. Without compute times every use is taken to last equally
            long.
        candidates: The blocks that cross the link again and again, from disk.
        room_bytes: The host memory for them.
    """
    order, seconds = _disk_uses(workload, candidates)
    crossing = workload.crossing
    sizes = [
        crossing[block] if block in candidates else 0
        for block in range(len(workload.nbytes))
    ]
    walk = Walk(
        Workload(
            order=tuple(order),
            nbytes=tuple(sizes),
            seconds=tuple(seconds),
            link_bytes_per_second=workload.link_bytes_per_second,
            must_stay=frozenset(range(len(sizes))) - frozenset(order),
        ),
        seconds,
    )
    streams = walk.streaming(
        largest=max(sizes, default=0), room=max(0, room_bytes), held=0, often_first=True
    )
    return frozenset(block for block in set(order) if not streams[block])


def _disk_uses(
    workload: Workload, candidates: Collection[int]
) -> tuple[list[int], list[float]]:
    """The candidates' uses, and the seconds from each to the next one.

    The disk has the time of the uses in between, too.
    """
    uses = workload.order
    lasting = workload.seconds or (1.0,) * len(uses)
    order: list[int] = []
    seconds: list[float] = []
    before = 0.0
    for block, second in zip(uses, lasting, strict=True):
        if block in candidates:
            order.append(block)
            seconds.append(second)
        elif seconds:
            seconds[-1] += second
        else:
            before += second
    if seconds:
        seconds[-1] += before
    return order, seconds
