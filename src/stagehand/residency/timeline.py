"""How long a period of block uses takes when homes and residents are given.

Note "Loads are static". Every block has one home slot and loads are queued in the
order of their uses, so which uses load does not depend on time: a use loads if and
only if the use before it in its slot was another block's. Its load starts when the
link is free and that other block's compute is over, and its bytes are home if they
were changed: that way the link is taken to be as fast, and free. The host is taken to
run ahead of the device, so how far ahead a load is queued changes no time. What is left
is a recurrence over the loads of a period, a few additions each.

An optimizer changes blocks on the host between steps: the first use in a step of a
block that trains loads it wherever it is, and not before the step begins. Gradients go
home as backward leaves their blocks, and the step is over when all are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from stagehand.errors import StagehandInternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Steady", "Timeline", "Workload"]

_MAX_PERIODS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What runs, over and over, and what it costs.

    Attributes:
        order: The block of each use in one period, which repeats for ever. A block
            may occur several times (forward and backward, shared modules) or never.
        nbytes: The bytes of every block, also of those that `order` lacks.
        seconds: The compute seconds of each use, or None when they are not known.
        link_bytes_per_second: What one host-to-device copy after another achieves.
        must_stay: The blocks that have to be on the device all the time.
        link_nbytes: The bytes of every block that cross the link, where they are not
            `nbytes`; None if they are everywhere.
        changing: The blocks that are changed where they are used.
        steps: How many uses there are from each time when an optimizer may change
            blocks to the next one; None if the period is one step.
        gradient_nbytes: The bytes of gradients that each block sends home in a step
            that goes back, zero where nothing of it trains; None if nothing does.
    """

    order: tuple[int, ...]
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...] | None
    link_bytes_per_second: float
    must_stay: frozenset[int] = frozenset()
    link_nbytes: tuple[int, ...] | None = None
    changing: frozenset[int] = frozenset()
    steps: tuple[int, ...] | None = None
    gradient_nbytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot describe a model."""
        count = len(self.nbytes)
        for name, blocks in (("order", self.order), ("must_stay", self.must_stay)):
            if blocks and not 0 <= min(blocks) <= max(blocks) < count:
                raise StagehandInternalError(
                    f"workload {name} names blocks {min(blocks)} to {max(blocks)}, "
                    f"but the blocks are 0 to {count - 1}: number them by `nbytes`"
                )
        for what, sizes in (
            ("what crosses the link", self.link_nbytes),
            ("the bytes of gradients", self.gradient_nbytes),
        ):
            if sizes is not None and len(sizes) != count:
                raise StagehandInternalError(
                    f"workload says {what} for {len(sizes)} blocks: expected {count}"
                )
        if self.steps is not None and sum(self.steps) != len(self.order):
            raise StagehandInternalError(
                f"workload has {sum(self.steps)} uses in its steps: expected "
                f"{len(self.order)}, those of its order"
            )
        if min(self.nbytes, default=0) < 0:
            raise StagehandInternalError(
                f"workload block has {min(self.nbytes)} bytes: expected 0 or more"
            )
        if not 0 < self.link_bytes_per_second < math.inf:
            raise StagehandInternalError(
                f"workload link rate is {self.link_bytes_per_second} bytes/s: "
                "expected a positive number"
            )
        if self.seconds is None:
            return
        if len(self.seconds) != len(self.order):
            raise StagehandInternalError(
                f"workload has {len(self.seconds)} compute times for "
                f"{len(self.order)} uses: expected one for each use"
            )
        if not all(0 <= second < math.inf for second in self.seconds):
            raise StagehandInternalError(
                "workload has a compute time that is negative or not finite: "
                "expected seconds"
            )

    @property
    def crossing(self) -> tuple[int, ...]:
        """The bytes of every block that cross the link for one load."""
        return self.nbytes if self.link_nbytes is None else self.link_nbytes

    def spans(self) -> list[tuple[int, int]]:
        """Return the first use of each step, and the use behind its last one."""
        lengths = self.steps or (len(self.order),)
        return list(pairwise(accumulate(lengths, initial=0)))

    def renewals(self) -> dict[int, int]:
        """Return the uses that load what has changed, and the first of their step."""
        return {
            use: start
            for start, stop in self.spans()
            for use in self._of_trained(reversed(range(start, stop)))
        }

    def sends(self) -> dict[int, int]:
        """Return the uses after which gradients go home, and the end of their step.

        A step goes back if it uses a block again.
        """
        return {
            use: stop
            for start, stop in self.spans()
            if len(set(self.order[start:stop])) < stop - start
            for use in self._of_trained(range(start, stop))
        }

    def _of_trained(self, uses: Iterable[int]) -> Iterable[int]:
        """The last one of each block that trains."""
        gradients = self.gradient_nbytes
        if gradients is None:
            return ()
        return {b: use for use in uses if gradients[b := self.order[use]]}.values()


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """What a period costs once the first ones are over.

    Attributes:
        step_seconds: The time from one period's end to the next one's.
        streamed_bytes: The bytes that cross the link in that time.
        loads: In how many copies.
    """

    step_seconds: float
    streamed_bytes: int
    loads: int


@dataclass(slots=True)
class _Step:
    """The loads of one step, in queue order, all times within the period.

    `needed`: when its use would start without any stall. `free`: when the slot's
    occupant would be done, negative if that was in the period before. `lag`: how many
    loads ago the stalls that delayed that occupant were complete. `sends`: when the
    uses after which gradients go home would be over, how many loads come before that,
    and how long each copy takes. `stop`: when the last use would be.
    """

    stop: float
    needed: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    lag: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sends: list[tuple[float, int, float]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def delays(self) -> int:
        """How many delays it has: one for each load, and one for all gradients."""
        return len(self.lag) + bool(self.sends)


class Timeline:
    """Predicts the steady step of a workload for any choice of homes.

    Not a simulator of single steps, of the first step or of a host that falls behind.

    Args:
        workload: What runs. Its compute times are not read.
        seconds: The compute seconds of each use.
    """

    def __init__(self, workload: Workload, seconds: Sequence[float]) -> None:
        self._order = workload.order
        self._nbytes = workload.nbytes
        self._crossing = workload.crossing
        self._rate = workload.link_bytes_per_second
        self._homeward = {b: self._nbytes[b] / self._rate for b in workload.changing}
        # When each use starts in a period without stall, and when the last one ends.
        self.starts = list(accumulate(seconds, initial=0.0))
        # The loads of one period when every use needs one.
        self.link_seconds = sum(self._crossing[b] for b in workload.order) / self._rate
        self._ways_to_cut = [_phases(workload.order), _covers(workload.order)]
        if workload.gradient_nbytes is not None:
            self._ways_to_cut.append(_turns(workload))
        self._spans, self._gradients = workload.spans(), workload.gradient_nbytes or ()
        self._renewals, self._sends = workload.renewals(), workload.sends()

    @property
    def compute_seconds(self) -> float:
        """The compute of one period, with no stall."""
        return self.starts[-1]

    def bound_seconds(self, kept_bytes: int) -> float:
        """The least time a period can take, whatever the policy.

        In any stretch of uses, all its blocks' bytes but the `kept_bytes` that can be
        there when it starts must cross the link. Stretches are those without repetition
        (there, and back) or those that use every block (there, and back by regions that
        are computed again). Where blocks train, a step's bytes all cross in its first
        stretch, and its gradients in the last one.
        """
        return max(
            sum(self._stretch_seconds(start, stop, kept_bytes) for start, stop in way)
            for way in self._ways_to_cut
        )

    def _stretch_seconds(self, start: int, stop: int, kept_bytes: int) -> float:
        uses, blocks = range(start, stop), set(self._order[start:stop])
        # Whatever is kept, these come after their step has begun.
        renewed = {self._order[u] for u in uses if self._renewals.get(u, -1) >= start}
        # And these are home when it is over.
        sent = sum(
            self._gradients[self._order[use]]
            for use in uses
            if use in self._sends and self._sends[use] <= stop
        )
        return max(
            self.starts[stop] - self.starts[start],
            self._crossing_seconds(renewed, 0)
            + self._crossing_seconds(blocks - renewed, kept_bytes),
            sent / self._rate,
        )

    def _crossing_seconds(self, blocks: Iterable[int], kept_bytes: int) -> float:
        if self._crossing is self._nbytes:
            used = sum(self._nbytes[block] for block in blocks)
            return max(0, used - kept_bytes) / self._rate
        # Kept first is what costs the link most for a byte of memory.
        crossing = 0.0
        for share, nbytes in sorted(map(self._cost, blocks), reverse=True):
            kept = min(kept_bytes, nbytes)
            kept_bytes -= kept
            crossing += share * (nbytes - kept)
        return crossing / self._rate

    def _cost(self, block: int) -> tuple[float, int]:
        """Bytes on the link for each byte of a block, and its bytes."""
        nbytes = self._nbytes[block]
        return self._crossing[block] / max(1, nbytes), nbytes

    def steady(self, home: Sequence[int], streams: Sequence[bool]) -> Steady:
        """Predict the steady period.

        Args:
            home: The slot of every block that streams and occurs in the order.
            streams: Whether the block shares its slot, for every block.
        """
        steps = self._steps(home, streams)
        compute, count = self.compute_seconds, sum(each.delays for each in steps)
        if not count:
            return Steady(step_seconds=compute, streamed_bytes=0, loads=0)
        delays = [0.0] * (2 * count + 1)  # no lag reaches further back
        link, before, last = 0.0, -1.0, -2.0
        for _ in range(_MAX_PERIODS):
            delay = delays[-1]
            for each in steps:
                link = _run_step(each, delays, link)
            link -= compute
            before, last = last, delays[-1] - delay
            if math.isclose(before, last, rel_tol=1e-6, abs_tol=1e-9 * compute):
                break
        return Steady(
            # Should periods still differ, they take turns: the mean of two of them.
            step_seconds=compute + (before + last) / 2,
            streamed_bytes=sum(each.nbytes for each in steps),
            loads=sum(len(each.lag) for each in steps),
        )

    def _steps(self, home: Sequence[int], streams: Sequence[bool]) -> list[_Step]:
        order, nbytes = self._order, self._crossing
        rate, starts, homeward = self._rate, self.starts, self._homeward
        last = self._last_uses(home, streams)
        uses = len(order)
        # slot -> (block, its last use, delays up to that use)
        occupants = {slot: (order[use], use - uses, 0) for slot, use in last.items()}
        steps: list[_Step] = []
        borrowed: list[tuple[_Step, int, int, int]] = []
        count = 0  # delays so far
        for begin, end in self._spans:
            loads, begun = _Step(starts[end]), count
            steps.append(loads)
            for use, block in enumerate(order[begin:end], begin):
                comes = renews = use in self._renewals
                slot = home[block]
                if streams[block]:
                    occupant, freed, issued = occupants[slot]
                    comes = renews or occupant != block
                    renews = renews and freed < begin
                if comes:
                    if renews:
                        free, issued = starts[begin], begun
                    elif freed < 0:
                        borrowed.append((loads, len(loads.lag), count, slot))
                        free = freed
                    else:
                        free = starts[freed + 1] + homeward.get(occupant, 0.0)
                    loads.needed.append(starts[use])
                    loads.free.append(free)
                    loads.lag.append(count - issued + 1)
                    loads.seconds.append(nbytes[block] / rate)
                    loads.nbytes += nbytes[block]
                    count += 1
                if streams[block]:
                    occupants[slot] = (block, use, count)
                if use in self._sends:
                    seconds = self._gradients[block] / rate
                    loads.sends.append((starts[use + 1], count, seconds))
            if loads.sends:
                loads.sends = [(f, count - c + 1, s) for f, c, s in loads.sends]
                count += 1
        for loads, index, before, slot in borrowed:
            occupant, freed, issued = occupants[slot]
            free = starts[freed + 1] + homeward.get(occupant, 0.0)
            loads.free[index] = free - starts[-1]
            loads.lag[index] = before + count - issued + 1
        return steps

    def _last_uses(
        self, home: Sequence[int], streams: Sequence[bool]
    ) -> dict[int, int]:
        """The last use in a period of each slot that is shared."""
        last: dict[int, int] = {}
        for use, block in enumerate(self._order):
            if streams[block]:
                last[home[block]] = use
        return last


def _run_step(loads: _Step, delays: list[float], link: float) -> float:
    """Append the stall so far after each load, and at the end if gradients go home.

    Returns:
        When the link is free.
    """
    delay = delays[-1]
    needed, free, lag, seconds = loads.needed, loads.free, loads.lag, loads.seconds
    for index, ago in enumerate(lag):
        start = free[index] + delays[-ago]
        link = (start if start > link else link) + seconds[index]
        late = link - needed[index]
        if late > delay:
            delay = late
        delays.append(delay)
    if loads.sends:
        home = 0.0
        for left, ago, taken in loads.sends:
            home = max(home, left + delays[-ago]) + taken
        delays.append(max(delay, home - loads.stop))
    return link


def _phases(order: Sequence[int]) -> list[tuple[int, int]]:
    """Cut the order before each block that its phase has already used."""
    cuts = [0]
    seen: set[int] = set()
    for use, block in enumerate(order):
        if block in seen:
            cuts.append(use)
            seen.clear()
        seen.add(block)
    return list(zip(cuts, [*cuts[1:], len(order)], strict=True))


def _covers(order: Sequence[int]) -> list[tuple[int, int]]:
    """Cut the order behind each use that is the first of the last block that lacked."""
    every = len(set(order))
    cuts = [0]
    seen: set[int] = set()
    for use, block in enumerate(order):
        seen.add(block)
        if len(seen) == every:
            cuts.append(use + 1)
            seen.clear()
    return [(a, b) for a, b in pairwise([*cuts, len(order)]) if a < b]


def _turns(workload: Workload) -> list[tuple[int, int]]:
    """Cut each step once, where it has used all its blocks."""
    cuts = []
    for start, stop in workload.spans():
        for _, turn in _covers(workload.order[start:stop])[:1]:
            cuts += [(start, start + turn), (start + turn, stop)]
    return [(a, b) for a, b in cuts if a < b]
