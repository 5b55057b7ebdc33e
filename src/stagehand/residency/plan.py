"""The pure planner: which blocks stay on the device, and which slot each block uses.

Device weight memory is cut into slots of fixed sizes and every block has one home slot
for ever. A resident block owns its slot; the others share the few slots of the ring.
A candidate is a ring: the residents that fit beside it are spread along the order, the
streamed blocks are dealt to its slots, and the `Timeline` predicts the step. A ring is
no larger than what loads may run ahead, but where blocks are used again soon: there it
may hold all that is used between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import nsmallest
from itertools import (
    accumulate,
    chain,
    combinations_with_replacement,
    pairwise,
    product,
)
from typing import TYPE_CHECKING

from stagehand.errors import StagehandOOMError
from stagehand.residency.spread import Walk, deal
from stagehand.residency.stays import Stays, soon
from stagehand.residency.timeline import Steady, Timeline, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

__all__ = ["Plan", "Workload", "at_once", "plan", "smallest_budget"]

# Rings worth a candidate: each slot size is at most this part of the one above it.
_LEVEL_RATIO = 0.75
_LEVELS = 5
_MIXED = 4
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
# Predicting is linear in the uses: so many are predicted for one plan, to keep it well
# below a second, but never fewer candidates than the second number.
_USES_PREDICTED = 40_000
_FEWEST_CANDIDATES = 6
# Slots for loads beside those that blocks stay in: each one's place among the levels.
_BESIDE = (
    *((1, 1, 1, 1), (0, 1, 1, 2, 3), (0,)),
    *((0, 0, 1, 1), (1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2)),
)
_ROUNDS = 4
# To deal blocks by their stays, each looks at all slots of a ring, which may be as many
# as a good part of the blocks: so many looks are taken for one plan.
_LOOKS = 1_500_000
# The best drafts of so many rings are polished, at so many uses predicted for each.
_POLISHED = 3
_USES_POLISHED = 8_000
# Compute times vary, and a shallow ring on a busy link is the first to stall. Between
# rings that are predicted alike, this part of the loads decides for the deeper one, up
# to what a ring holds elsewhere: to be deeper still is no reason to move more bytes.
_JITTER = 0.004
# A copy takes the host's time, too, which no prediction has: with that, each one counts
# as a longer load, by this part of the mean one.
_COPY = 0.125
_NOTHING = 1e-9
_COMPUTE_LIMITED = 1.02
_LINK_LIMITED = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where every block lives and what that is predicted to cost.

    The memory it costs on the device is `sum(slots)`.

    Attributes:
        slots: The bytes of each slot.
        home: The slot of every block, also of blocks that never occur in the order.
        resident: The blocks that own their slot alone and never leave it.
        lookahead: How many streamed blocks to load ahead of the current use.
        step_seconds: The predicted steady period.
        bound_seconds: The least that any policy could take with the same budget.
        streamed_bytes: The bytes that cross the link in one period.
        loads: In how many copies.
        limit: What a shorter step lacks: "compute", "link" (more budget helps, too),
            "budget" (too little memory to keep either busy), or "unknown" as long as
            compute times are not measured.
    """

    slots: tuple[int, ...]
    home: tuple[int, ...]
    resident: frozenset[int]
    lookahead: int
    step_seconds: float
    bound_seconds: float
    streamed_bytes: int
    loads: int
    limit: str

    def ring(self) -> list[int]:
        """Return the bytes of the slots that blocks share."""
        own = {self.home[block] for block in self.resident}
        return [size for slot, size in enumerate(self.slots) if slot not in own]


def smallest_budget(workload: Workload) -> int:
    """The least device bytes that can work: one streamed block at a time."""
    return at_once(workload.nbytes, workload.must_stay)


def at_once(nbytes: Sequence[int], stay: Collection[int]) -> int:
    """Return the bytes of the blocks that stay, and of the largest other one.

    Args:
        nbytes: Of all blocks.
        stay: The numbers of those that stay.
    """
    kept = sum(nbytes[block] for block in stay)
    others = (size for block, size in enumerate(nbytes) if block not in stay)
    return kept + max(others, default=0)


def plan(workload: Workload, *, budget_bytes: int, max_lookahead: int) -> Plan:
    """Choose residents and slots for the shortest predicted step.

    Args:
        workload: What runs. Without compute times every use is taken to last equally
            long, all together as long as the link needs for what must cross.
        budget_bytes: The most that all slots together may hold.
        max_lookahead: How far to load ahead of the current use at most, in blocks as
            large as the largest: of smaller ones there may be more.

    Raises:
        StagehandOOMError: If the budget is below `smallest_budget`.
    """
    needed = smallest_budget(workload)
    if budget_bytes < needed:
        raise StagehandOOMError(
            f"the weight budget is {budget_bytes} bytes, but {needed} bytes must be on "
            f"the device at once: raise the budget to at least {needed} bytes",
            needed_bytes=needed,
            limit_bytes=budget_bytes,
        )
    return _Planner(workload, budget_bytes, max_lookahead).plan()


@dataclass(frozen=True, slots=True)
class _Draft:
    """A candidate: its ring of slots, who streams, and each one's slot in the ring."""

    ring: tuple[int, ...]
    streams: list[bool]
    home: list[int]
    steady: Steady
    stays: Stays | None
    """By what it was dealt; None if by each use alone."""


class _Sizes:
    """How many bytes are in blocks above any size."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.ascending = sorted(sizes)
        self._below = list(accumulate(self.ascending, initial=0))
        self.total = self._below[-1]

    def above(self, size: int) -> int:
        return self.total - self._below[bisect_right(self.ascending, size)]


class _Planner:
    """Works out one plan."""

    def __init__(self, workload: Workload, budget_bytes: int, lookahead: int) -> None:
        seconds: Sequence[float] = (
            _guessed_seconds(workload, budget_bytes)
            if workload.seconds is None
            else workload.seconds
        )
        self._workload = workload
        self._seconds = seconds
        self._budget = budget_bytes
        self._lookahead = lookahead
        self._nbytes = nbytes = workload.nbytes
        self._room = budget_bytes - sum(nbytes[b] for b in workload.must_stay)
        self._timeline = Timeline(workload, seconds)
        self._walk = Walk(workload, seconds)
        within = soon(workload, self._walk.movable) if lookahead else None
        self._stays = None if within is None else Stays(workload, within)
        self._looks = _LOOKS
        self._sizes = _Sizes(nbytes[block] for block in self._walk.movable)
        self._levels = _levels(self._sizes.ascending)
        self._walk_sizes = _Sizes(nbytes[block] for block in self._walk.blocks)

    def plan(self) -> Plan:
        if self._sizes.total <= self._room:
            return self._finished(self._draft((), [False] * len(self._nbytes)))
        best: dict[tuple[int, ...], _Draft] = {}
        for seconds, part in (self._seconds, 1), (self._like_bytes(), 2):
            for draft in self._drafts(seconds, part):
                other = best.get(draft.ring, draft)
                best[draft.ring] = min(other, draft, key=self._score)
            if not self._hides(min(best.values(), key=self._score)):
                break
        drafts = nsmallest(_POLISHED, best.values(), key=self._score)
        return self._finished(min(map(self._polished, drafts), key=self._score))

    def _hides(self, draft: _Draft) -> bool:
        """Whether compute hides all loads: then the fewest copies are best."""
        compute = self._timeline.compute_seconds
        return draft.steady.step_seconds <= _COMPUTE_LIMITED * compute

    def _like_bytes(self) -> list[float]:
        """Compute times for which every block streams the same part of its bytes.

        Where the host takes as long for small blocks as for large ones, small ones seem
        to stream at no cost, and are the most copies.
        """
        return [float(self._nbytes[block]) for block in self._workload.order]

    def _drafts(self, seconds: Sequence[float], part: int) -> Iterator[_Draft]:
        """Draft for residents that are spread by these seconds of each use.

        Args:
            seconds: Of compute, or what is to count as such.
            part: This part of all that are worth a candidate.
        """
        kinds = 1 if self._stays is None else 2
        uses = max(1, len(self._workload.order))
        fewest = _FEWEST_CANDIDATES // (part * kinds)
        allowed = max(fewest, _USES_PREDICTED // (part * uses))
        yield from self._usual_drafts(Walk(self._workload, seconds), allowed)
        if self._stays is not None:
            yield from self._staying_drafts(self._stays, seconds, allowed)

    def _usual_drafts(self, walk: Walk, allowed: int) -> Iterator[_Draft]:
        plain = list(
            product(self._promising_rings, (False, True) if walk.varied else (False,))
        )
        variants = [(*variant, 0) for variant in plain]
        variants += [(ring, often_first, ring[0]) for ring, often_first in plain]
        for ring, often_first, held in variants[:allowed]:
            streams = self._streaming(walk, ring, held, often_first=often_first)
            yield self._draft(ring, streams)

    def _staying_drafts(
        self, stays: Stays, seconds: Sequence[float], allowed: int
    ) -> Iterator[_Draft]:
        """Rings in which streamed blocks stay until what comes soon is over."""
        walk = Walk(self._workload, seconds, stays.counts())
        variants = list(product((False, True), (False, True), _BESIDE))
        for often_first, held, beside in variants[:allowed]:
            keep = partial(self._streaming, walk, often_first=often_first)
            ring = self._staying_ring(stays, keep, beside)
            if ring and self._can_deal(ring, stays):
                yield self._draft(ring, keep(ring, ring[0] if held else 0), stays)

    def _streaming(
        self, walk: Walk, ring: tuple[int, ...], held: int = 0, *, often_first: bool
    ) -> list[bool]:
        return walk.streaming(
            largest=ring[0],
            room=self._room - sum(ring),
            held=held,
            often_first=often_first,
        )

    def _draft(
        self, ring: tuple[int, ...], streams: list[bool], stays: Stays | None = None
    ) -> _Draft:
        if stays is None:
            starts = self._timeline.starts
            home = deal(self._workload, starts, ring=ring, streams=streams)
        else:
            home = stays.deal(ring, streams)
        return _Draft(ring, streams, home, self._timeline.steady(home, streams), stays)

    def _can_deal(self, ring: tuple[int, ...], stays: Stays | None) -> bool:
        """Whether there are looks left for a draft; takes them."""
        looks = len(self._walk.blocks) * len(ring) if stays else 0
        if looks > self._looks:
            return False
        self._looks -= looks
        return True

    def _score(self, draft: _Draft) -> float:
        steady = draft.steady
        loads = steady.streamed_bytes / self._workload.link_bytes_per_second
        mean = self._timeline.link_seconds / max(1, len(self._workload.order))
        loads += _COPY * mean * steady.loads
        deep = min(len(draft.ring), self._lookahead + 1)
        return steady.step_seconds + _JITTER * loads / max(1, deep)

    # Which rings to try

    def _rings(self) -> Iterator[tuple[int, ...]]:
        """A few slots of any sizes, largest first, and more of the smallest."""
        for depth in _DEPTHS:
            mixed = min(_MIXED, depth)
            for sizes in combinations_with_replacement(self._levels, mixed):
                ring = sizes + sizes[-1:] * (depth - len(sizes))
                if self._reaches(ring) and self._fits(ring):
                    yield ring

    def _reaches(self, ring: tuple[int, ...]) -> bool:
        """Whether loads run no further ahead in it than they may.

        Slots in which blocks stay until they are used again do not count.
        """
        if not self._lookahead:
            return len(ring) == 1
        most = (self._lookahead + 1) * self._sizes.ascending[-1]
        return self._stays is not None or sum(ring) <= most

    def _fits(self, ring: tuple[int, ...]) -> bool:
        """Whether the blocks that are too large for the ring fit beside it."""
        return sum(ring) + self._sizes.above(ring[0]) <= self._room

    def _staying_ring(
        self,
        stays: Stays,
        keep: Callable[[tuple[int, ...]], list[bool]],
        beside: tuple[int, ...],
    ) -> tuple[int, ...]:
        """A slot for all that stays at once, and some beside; empty if none fits.

        The more slots, the fewer residents, and the more has to stay in slots.
        """
        levels = self._levels
        more = [levels[min(level, len(levels) - 1)] for level in beside]
        ring: tuple[int, ...] = tuple(sorted([levels[0], *more], reverse=True))
        for _ in range(_ROUNDS):
            if not self._fits(ring):
                return ()
            found = sorted([*stays.ring(keep(ring), levels), *more], reverse=True)
            if found == list(ring) or not found:
                break
            ring = tuple(found)
        return ring if self._fits(ring) else ()

    @cached_property
    def _promising_rings(self) -> list[tuple[int, ...]]:
        """All rings, in turns from the two estimates, each one's shortest first."""
        rings = list(self._rings())
        worst, best = (
            sorted(rings, key=partial(self._estimate, spread=spread))
            for spread in (False, True)
        )
        return list(dict.fromkeys(chain.from_iterable(zip(worst, best, strict=True))))

    def _estimate(self, ring: tuple[int, ...], *, spread: bool) -> float:
        """A step as if residents were spread without remainder.

        Args:
            ring: Bytes of its slots.
            spread: Whether blocks that fit the same slots lie as far apart as they can,
                with others between, and not one behind the other.
        """
        sizes = self._walk_sizes
        crossing = max(0, sizes.total - self._room + sum(ring)) / max(1, sizes.total)
        loads = crossing * self._timeline.link_seconds
        compute = self._timeline.compute_seconds
        # A block that fits few slots waits for its like to compute, all the more the
        # fewer they are: of the smaller of both, about 1 / slots**3 is not hidden, nor
        # by what the others between them take.
        longer, shorter = max(compute, loads), min(compute, loads)
        serial, above = 0.0, 0
        for slots in range(len(ring), 0, -1):
            fitting = sizes.total - sizes.above(ring[slots - 1])
            part = (fitting - above) / max(1, sizes.total)
            between = (1 - part) * longer if spread else 0.0
            serial += max(0.0, part * shorter - between) / slots**3
            above = fitting
        return longer + serial

    # Small improvements

    def _polished(self, draft: _Draft) -> _Draft:
        """Let neighbours along the order swap, one resident, one not, while it pays."""
        allowed = _USES_POLISHED // max(1, len(self._workload.order))
        blocks = self._walk.blocks
        improved = True
        while improved:
            improved = False
            slack = self._slack(draft)
            for pair in pairwise([*blocks[-1:], *blocks]):
                streams = self._swapped(draft, pair, slack)
                if streams is None:
                    continue
                if not (allowed and self._can_deal(draft.ring, draft.stays)):
                    return draft
                allowed -= 1
                other = self._draft(draft.ring, streams, draft.stays)
                if self._score(other) < (1 - _NOTHING) * self._score(draft):
                    draft, slack, improved = other, self._slack(other), True
        return draft

    def _slack(self, draft: _Draft) -> int:
        """The bytes of the budget that neither the ring nor a resident takes."""
        movable = self._walk.movable
        kept = sum(self._nbytes[block] for block in movable if not draft.streams[block])
        return self._room - sum(draft.ring) - kept

    def _swapped(
        self, draft: _Draft, pair: tuple[int, int], slack: int
    ) -> list[bool] | None:
        """Who streams once the two have changed places; None if they cannot."""
        comes, goes = pair if draft.streams[pair[0]] else pair[::-1]
        if draft.streams[goes] or not draft.streams[comes]:
            return None
        nbytes = self._nbytes
        if nbytes[goes] > draft.ring[0] or nbytes[comes] - nbytes[goes] > slack:
            return None
        streams = list(draft.streams)
        streams[comes], streams[goes] = False, True
        return streams

    # The result

    def _finished(self, draft: _Draft) -> Plan:
        """Give every block its slot; who is alone in a slot of the ring stays there."""
        # Streamed blocks that are not in the order go to the largest slot.
        home = [
            max(0, slot) if streams else -1
            for slot, streams in zip(draft.home, draft.streams, strict=True)
        ]
        sharing = Counter(home)
        shared = [slot for slot in range(len(draft.ring)) if sharing[slot] > 1]
        slots = [draft.ring[slot] for slot in shared]
        resident = []
        for block, slot in enumerate(home):
            if slot in shared:
                home[block] = shared.index(slot)
            else:
                resident.append(block)
                home[block] = len(slots)
                slots.append(self._nbytes[block])
        bound = self._timeline.bound_seconds(self._budget)
        return Plan(
            slots=tuple(slots),
            home=tuple(home),
            resident=frozenset(resident),
            # A load waits for all that was computed before its slot was given up: that
            # is early only if all slots are looked after.
            lookahead=len(shared) if self._lookahead else 0,
            step_seconds=draft.steady.step_seconds,
            bound_seconds=bound,
            streamed_bytes=draft.steady.streamed_bytes,
            loads=draft.steady.loads,
            limit=self._limit(draft.steady, bound),
        )

    def _limit(self, steady: Steady, bound: float) -> str:
        step = steady.step_seconds
        if self._workload.seconds is None:
            return "unknown"
        if step <= _COMPUTE_LIMITED * self._timeline.compute_seconds:
            return "compute"
        busy = steady.streamed_bytes / self._workload.link_bytes_per_second
        if self._workload.gradient_nbytes:  # it is busy in both directions
            busy = max(busy, bound)
        return "link" if busy >= _LINK_LIMITED * step else "budget"


def _levels(sizes: Sequence[int]) -> list[int]:
    """The slot sizes to try, largest first: of sizes that are close, the largest."""
    levels: list[int] = []
    for size in sorted(set(sizes), reverse=True):
        if size and (not levels or size <= _LEVEL_RATIO * levels[-1]):
            levels.append(size)
    return levels[:_LEVELS]


def _guessed_seconds(workload: Workload, budget_bytes: int) -> list[float]:
    """Compute times that make compute and link matter alike: all uses as long."""
    uses = len(workload.order)
    unknown = Timeline(workload, [0.0] * uses)
    return [unknown.bound_seconds(budget_bytes) / max(1, uses)] * uses
