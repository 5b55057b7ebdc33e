"""Spreads blocks: residents along the order, streamed blocks over a ring of slots.

In a run of residents the link fills the ring and then waits, so what streams is spread:
in whole blocks as near as can be to an even rate of bytes over compute time. And a load
waits while the block before it in its slot computes, so neighbours use other slots.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stagehand.residency.timeline import Workload

__all__ = ["Walk", "deal"]

_ROUNDINGS = 4


class Walk:
    """The blocks that may move, in the order of their first uses.

    Lists are indexed by block, but for the ones that hold blocks.

    Args:
        workload: What runs. Its compute times are not read.
        seconds: The compute seconds of each use.
        stays: How often a block comes in one period if it streams; None for as often as
            it is used.

    Attributes:
        blocks: The blocks of the order that may move, by first use.
        movable: All blocks that may move, those first whose place saves most.
    """

    def __init__(
        self,
        workload: Workload,
        seconds: Sequence[float],
        stays: Mapping[int, int] | None = None,
    ) -> None:
        self._nbytes = nbytes = workload.nbytes
        uses = Counter(workload.order)
        self._saved = _savings(workload, uses if stays is None else stays)
        self._moves = [block not in workload.must_stay for block in range(len(nbytes))]
        self.blocks = [b for b in dict.fromkeys(workload.order) if self._moves[b]]
        self.movable = sorted(
            (block for block, moves in enumerate(self._moves) if moves),
            key=lambda block: (-self._saved[block], -nbytes[block]),
        )
        self._small_first = sorted(
            self.movable, key=lambda block: (-self._saved[block], nbytes[block])
        )
        self._classes = sorted({self._saved[b] for b in self.blocks}, reverse=True)
        total = [0.0] * len(nbytes)
        for block, second in zip(workload.order, seconds, strict=True):
            total[block] += second
        # Blocks without compute hide no load, so they stream last: never zero.
        least = 1e-6 * max(total, default=0.0) or 1.0
        self._compute = [
            max(second / max(1, uses[block]), least)
            for block, second in enumerate(total)
        ]
        # First those that are cheapest to stream: least bytes per second of compute.
        self._by_rate = sorted(self.blocks, key=lambda b: nbytes[b] / self._compute[b])

    @property
    def varied(self) -> bool:
        """Whether keeping some blocks saves more than keeping others."""
        return len(self._classes) > 1

    def streaming(
        self, *, largest: int, room: int, held: int, often_first: bool
    ) -> list[bool]:
        """Choose who stays; says for every block whether it streams.

        Args:
            largest: The bytes of the largest slot: what is larger has to stay.
            room: The bytes that residents may take.
            held: How many of them to give out only after the rest is spread, and to
                small blocks first: another count or mix may suit the ring better.
            often_first: Whether blocks that cross often, and whole, come first, not
                only with the share that their compute deserves: a byte saves more.
        """
        streams = list(self._moves)
        too_large = [b for b in self.movable if self._nbytes[b] > largest]
        room -= self._keep(too_large, streams)
        if often_first:
            room -= self._keep_often_used(streams, room)
        room -= self._keep_evenly(streams, room - min(held, room), self.blocks)
        for block in self._small_first if held else self.movable:
            if streams[block] and self._nbytes[block] <= room:
                room -= self._keep([block], streams)
        return streams

    def _keep(self, blocks: list[int], streams: list[bool]) -> int:
        for block in blocks:
            streams[block] = False
        return sum(self._nbytes[block] for block in blocks)

    def _keep_often_used(self, streams: list[bool], room: int) -> int:
        """Keep classes of blocks that save as much, of the last what fits.

        Returns:
            Their bytes.
        """
        kept = 0
        for saved in self._classes:
            alike = [b for b in self.blocks if streams[b] and self._saved[b] == saved]
            if kept + sum(self._nbytes[block] for block in alike) > room:
                return kept + self._keep_evenly(streams, room - kept, alike)
            kept += self._keep(alike, streams)
        return kept

    def _keep_evenly(self, streams: list[bool], room: int, among: Sequence[int]) -> int:
        """Keep what fits so that the rest streams evenly; returns the bytes kept."""
        walk = [block for block in among if streams[block]]
        sizes = {self._nbytes[block] for block in walk}
        if len(sizes) == 1:
            # Bytes that no whole block comes to would only blur where residents are.
            room -= room % max(1, *sizes)
        crossing = sum(self._nbytes[block] for block in walk) - room
        kept: list[int] = []
        over = 0
        for _ in range(_ROUNDINGS):
            crossing += over
            kept = self._diffused(walk, self._water_level(walk, crossing))
            over = sum(self._nbytes[block] for block in kept) - room
            if over <= 0:
                break
        while over > 0:
            over -= self._nbytes[kept.pop()]
        return self._keep(kept, streams)

    def _water_level(self, walk: Sequence[int], crossing: int) -> float:
        """The rate r, in bytes per second of compute, at which `crossing` bytes stream.

        Block i streams min(nbytes[i], r * compute[i]) bytes: those with few bytes for
        their compute stream whole, the others share evenly what is left.
        """
        left = float(crossing)
        moves = set(walk)
        open_seconds = sum(self._compute[b] for b in self._by_rate if b in moves)
        for block in self._by_rate:
            if block in moves:
                seconds = self._compute[block]
                level = left / max(open_seconds, seconds)
                if self._nbytes[block] > level * seconds:
                    return max(0.0, level)
                left -= self._nbytes[block]
                open_seconds -= seconds
        return math.inf

    def _diffused(self, walk: list[int], level: float) -> list[int]:
        """Round shares to whole blocks, carrying the error along; says who stays."""
        nbytes, compute = self._nbytes, self._compute
        kept, carry = [], 0.0
        for block in walk:
            size = nbytes[block]
            carry += min(size, level * compute[block])
            if carry + carry >= size:
                carry -= size
            else:
                kept.append(block)
        return kept


def _savings(workload: Workload, comes: Mapping[int, int]) -> list[float]:
    """How often each block's bytes cross in one period, which keeping them saves.

    Not those that come because an optimizer has changed them. Where rows come by
    themselves, a block crosses in part. A wire makes less difference than a block's
    place in the order does, and is not counted.
    """
    renewed = Counter(workload.order[use] for use in workload.renewals())
    pairs = zip(workload.nbytes, workload.crossing, strict=True)
    return [
        (comes[block] - renewed[block])
        * (crosses / nbytes if 2 * crosses < nbytes else 1.0)
        for block, (nbytes, crosses) in enumerate(pairs)
    ]


def deal(
    workload: Workload,
    starts: Sequence[float],
    *,
    ring: Sequence[int],
    streams: Sequence[bool],
) -> list[int]:
    """Deal the streamed blocks to slots that the uses around them do not need.

    Args:
        workload: What runs.
        starts: When each use starts if none stalls, and when the last one ends.
        ring: The bytes of the slots, largest first.
        streams: Whether the block streams, for every block.

    Returns:
        For every block its slot, or -1 if it does not stream or is not in the order.
    """
    order, nbytes, depth = workload.order, workload.nbytes, len(ring)
    uses = [use for use, block in enumerate(order) if streams[block]]
    seam = _seam(workload, starts, uses)
    turn = [order[use] for use in uses[seam:] + uses[:seam]]
    home = [-1] * len(nbytes)
    second = ring[1] if depth > 1 else 0
    used_at, left = [-depth] * depth, len(set(turn))
    for now, block in enumerate(turn):
        if home[block] < 0:
            soon = [depth] * depth  # how many uses ahead each slot is needed
            for ahead in range(depth - 1, 0, -1):
                coming = turn[(now + ahead) % len(turn)]
                if home[coming] >= 0:
                    soon[home[coming]] = ahead
                elif nbytes[coming] > second:
                    soon[0] = ahead
            size = nbytes[block]
            home[block] = max(
                (min(now - used_at[slot], soon[slot]), now - used_at[slot], slot)
                for slot in range(depth)
                if ring[slot] >= size
            )[-1]
            left -= 1
            if not left:
                break
        used_at[home[block]] = now
    return home


def _seam(workload: Workload, starts: Sequence[float], uses: list[int]) -> int:
    """Where to start dealing: the neighbours there may have to share a slot.

    Best is a turn, where both are one block, else where most compute lies between.
    """
    order, nbytes = workload.order, workload.crossing
    best, seam = math.inf, 0
    for index, use in enumerate(uses):
        before = uses[index - 1]
        if order[before] == order[use]:
            return index
        computes = starts[before + 1] - starts[before]
        gap = starts[use] - starts[before + 1] + (starts[-1] if index == 0 else 0.0)
        load = nbytes[order[use]] / workload.link_bytes_per_second
        if computes + load - gap < best:
            best, seam = computes + load - gap, index
    return seam
