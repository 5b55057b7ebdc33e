"""Stretches of the order over which a block that streams remains in its slot.

Where checkpoints compute a region again, backward uses its blocks twice, there and
back. If their slots go to others between, a block crosses the link once more a step, so
a ring may be as deep as a region: each of its blocks has a slot of its own, and the
next region's take them as backward leaves them.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from itertools import accumulate
from operator import add, neg
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stagehand.residency.timeline import Workload

__all__ = ["Stays", "soon"]

_PART = 6  # of the order: there and back, a third of the blocks come again within that
_AHEAD = 4  # streamed uses: a slot that is free so long before is free early enough
_NEVER = 1 << 60


def soon(workload: Workload, movable: Iterable[int]) -> int | None:
    """Return within how many uses most bytes that may move are used again.

    None if most of them are not used again before a good part of the order is over, or
    if nothing else is used between.
    """
    order, nbytes = workload.order, workload.nbytes
    last: dict[int, int] = {}
    gaps: dict[int, int] = {}
    for use, block in enumerate(order * 2):
        if block in last:
            gaps[block] = min(gaps.get(block, _NEVER), use - last[block])
        last[block] = use
    used = [block for block in movable if block in gaps]
    near = [block for block in used if _PART * gaps[block] < len(order)]
    if 2 * sum(nbytes[b] for b in near) <= sum(nbytes[b] for b in used):
        return None
    within = max(gaps[block] for block in near)
    return within if within > 1 else None


class Stays:
    """The stays of all blocks, if uses of one that follow each other soon are one.

    Args:
        workload: What runs. Its compute times are not read.
        within: How many uses later the next one may be.
    """

    def __init__(self, workload: Workload, within: int) -> None:
        self._order, self._nbytes = workload.order, workload.nbytes
        self._stays: dict[int, list[tuple[int, int]]] = {}  # first and last uses
        for use, block in enumerate(self._order):
            stays = self._stays.setdefault(block, [])
            if stays and use - stays[-1][1] <= within:
                stays[-1] = (stays[-1][0], use)
            else:
                stays.append((use, use))

    def counts(self) -> Counter[int]:
        """How many stays every block has in one period."""
        return Counter({block: len(stays) for block, stays in self._stays.items()})

    def ring(self, streams: Sequence[bool], levels: Sequence[int]) -> list[int]:
        """Return as many slots as there are streamed blocks at once, largest first.

        Args:
            streams: Whether the block streams, for every block.
            levels: The sizes of slots, largest first.
        """
        nbytes, uses = self._nbytes, len(self._order)
        level = {size: bisect(levels, -size, key=neg) - 1 for size in set(nbytes)}
        changes = [[0] * (uses + 1) for _ in levels]  # in what is there at each use
        for block, stays in self._stays.items():
            if streams[block]:
                for first, last in stays:
                    changes[level[nbytes[block]]][first] += 1
                    changes[level[nbytes[block]]][last + 1] -= 1
        ring: list[int] = []
        there = [0] * (uses + 1)  # of this level or above
        for slot, change in zip(levels, changes, strict=True):
            there = list(map(add, there, accumulate(change)))
            ring += [slot] * (max(there) - len(ring))
        return ring

    def deal(self, ring: Sequence[int], streams: Sequence[bool]) -> list[int]:
        """Deal the streamed blocks to slots that are free over their stays.

        Of those that are free early enough for a block's load it gets the one that is
        needed last when blocks come again: backward frees slots from behind.

        Args:
            ring: The bytes of the slots, largest first.
            streams: Whether the block streams, for every block.

        Returns:
            For every block its slot, or -1 if it does not stream or is not in the
            order.
        """
        before = list(accumulate((streams[block] for block in self._order), initial=0))
        home = [-1] * len(self._nbytes)
        # Of the last block that each slot was dealt to: when its first stay ends, and
        # when that of backward begins: of the others it is the longest.
        dealt = [(-_NEVER, _NEVER)] * len(ring)
        for block, stays in self._stays.items():
            if not streams[block]:
                continue
            first, last = (before[use] for use in stays[0])
            longest = max(stays[1:], key=_length, default=None)
            again = _NEVER if longest is None else before[longest[0]]
            size, best, slot = self._nbytes[block], (False, -_NEVER, 0, 0), 0
            for index, (over, returns) in enumerate(dealt):
                if ring[index] < size:
                    break
                gap, later = first - over, returns - last
                if gap > 0 and later > 0:
                    found = (True, min(gap, _AHEAD), -ring[index], later)
                else:
                    found = (False, min(gap, later), -ring[index], 0)
                if found > best:
                    best, slot = found, index
            home[block] = slot
            dealt[slot] = (last, again)
        return home


def _length(stay: tuple[int, int]) -> int:
    first, last = stay
    return last - first
