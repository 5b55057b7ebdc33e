"""Models of streaming in virtual time, written apart from the planner they judge.

`execute` acts a plan out use by use, as the scheduler does. `follow` lets a cache
policy decide at each moment, event by event, what to load and what to give up: what a
plan with fixed homes is compared with. Both have one compute stream and one
first-in-first-out link, and a block computes only when it is wholly there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stagehand.residency.plan import Plan, Workload

Policy = Literal["sync", "lru", "belady"]


def evenly_spaced(count: int, kept: int) -> frozenset[int]:
    """`kept` of `count` blocks, each in the middle of its share of the order."""
    return frozenset((2 * i + 1) * count // (2 * kept) for i in range(kept))


def execute(workload: Workload, plan: Plan, *, steps: int = 12) -> float:
    """Seconds a step of the plan takes once the first ones are over."""
    return _Execution(workload, plan).run(steps)


class _Execution:
    """The scheduler's rules: demand, then run ahead until a slot is not free."""

    def __init__(self, workload: Workload, plan: Plan) -> None:
        self.work, self.plan = workload, plan
        self.period = len(workload.order)
        self.occupant: dict[int, int] = {}
        self.occupant_done: dict[int, float] = {}
        self.filled: dict[int, float] = {}
        self.queued_for: deque[int] = deque()
        self.link_free = self.home_free = self.began = 0.0
        self.gradients = workload.gradient_nbytes or (0,) * len(workload.nbytes)
        self.starts = [0, *accumulate(workload.steps or (self.period,))]
        self.ends: list[int] = []  # of the step of each use
        self.sends: set[int] = set()  # uses after which gradients go home
        for start, stop in pairwise(self.starts):
            blocks = workload.order[start:stop]
            last = {block: use for use, block in enumerate(blocks, start)}
            self.ends += [stop] * (stop - start)
            if len(last) < len(blocks):
                self.sends.update(last.values())

    def block(self, use: int) -> int:
        return self.work.order[use % self.period]

    def streams(self, block: int) -> bool:
        return block not in self.plan.resident

    def present(self, block: int) -> bool:
        return self.occupant.get(self.plan.home[block]) == block

    def run(self, steps: int) -> float:
        seconds, ends, clock = self.work.seconds, [], 0.0
        for use in range(self.period * steps):
            if use % self.period in self.starts:
                self.begin_step(clock)
            block = self.block(use)
            if self.streams(block) or self.gradients[block]:
                if not self.present(block):
                    self.load(block, use)
                clock = max(clock, self.filled[block])
            self.run_ahead(use)
            clock += seconds[use % self.period]
            self.occupant_done[self.plan.home[block]] = clock + self.homeward(block)
            clock = self.send(use, clock)
            if (use + 1) % self.period == 0:
                ends.append(clock)
        first = steps // 2
        return (ends[-1] - ends[first]) / (steps - 1 - first)

    def begin_step(self, clock: float) -> None:
        """An optimizer has changed what trains: copies of it are stale."""
        stale = {s: b for s, b in self.occupant.items() if self.gradients[b]}
        for slot in stale:
            del self.occupant[slot]
        if any(self.gradients):
            self.queued_for.clear()
        self.began = clock

    def end_of_step(self, use: int) -> int:
        """The first use of the step after that of a use."""
        return use - use % self.period + self.ends[use % self.period]

    def send(self, use: int, clock: float) -> float:
        """Send gradients home that no later use of the step adds to; returns when the
        next use may begin."""
        if use % self.period in self.sends:
            seconds = self.gradients[self.block(use)] / self.work.link_bytes_per_second
            self.home_free = max(self.home_free, clock) + seconds
        return max(clock, self.home_free) if use + 1 == self.end_of_step(use) else clock

    def homeward(self, block: int) -> float:
        """Seconds until what the block's use has changed is home."""
        changed = self.work.nbytes[block] if block in self.work.changing else 0
        return changed / self.work.link_bytes_per_second

    def load(self, block: int, use: int) -> None:
        slot = self.plan.home[block]
        assert self.work.nbytes[block] <= self.plan.slots[slot]
        start = max(self.link_free, self.occupant_done.get(slot, 0.0))
        if self.gradients[block]:
            start = max(start, self.began)
        seconds = self.work.nbytes[block] / self.work.link_bytes_per_second
        self.link_free = self.filled[block] = start + seconds
        self.occupant[slot] = block
        if self.streams(block):
            self.queued_for.append(use)

    def run_ahead(self, now: int) -> None:
        while self.queued_for and self.queued_for[0] <= now:
            self.queued_for.popleft()
        between: set[int] = {self.block(now)}
        for use in range(now + 1, now + 1 + self.period):
            if len(self.queued_for) >= self.plan.lookahead:
                return
            block, trains = self.block(use), self.gradients[self.block(use)]
            if trains and use >= self.end_of_step(now):
                return
            if (self.streams(block) or trains) and not self.present(block):
                if self.occupant.get(self.plan.home[block]) in between:
                    return
                self.load(block, use)
            between.add(block)


def follow(
    workload: Workload,
    policy: Policy,
    *,
    capacity_bytes: int,
    pinned: Iterable[int] = (),
    steps: int = 8,
) -> float:
    """Seconds a step takes under a policy that decides while it runs.

    Args:
        workload: What runs.
        policy: "sync" loads when compute waits. The others load ahead in the order of
            the uses; "lru" gives up the least recently used block, "belady" the one
            whose next use is farthest, if it is farther than the load's own use.
        capacity_bytes: Device bytes for weights, free of fragmentation.
        pinned: Blocks that are there from the start and never given up.
        steps: How many periods to run; the second half but the last is measured.
    """
    return _Following(workload, policy, capacity_bytes, frozenset(pinned), steps).run()


@dataclass
class _Following:
    work: Workload
    policy: Policy
    capacity: int
    pinned: frozenset[int]
    steps: int
    clock: float = 0.0
    use: int = 0  # the use that computes now or waits to
    compute_ends: float = math.inf
    load_ends: float = math.inf
    loading: int = -1
    ready: set[int] = field(default_factory=set)
    last_used: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = list(self.work.order) * self.steps
        self.of: dict[int, list[int]] = {}
        for use, block in enumerate(self.uses):
            self.of.setdefault(block, []).append(use)
        sizes = self.work.nbytes
        self.room = self.capacity - sum(sizes[block] for block in self.pinned)

    def run(self) -> float:
        period, ends = len(self.work.order), []
        while self.use < len(self.uses):
            self.start_compute()
            self.start_load()
            self.clock = min(self.compute_ends, self.load_ends)
            if self.load_ends <= self.clock:
                self.ready.add(self.loading)
                self.load_ends = math.inf
            if self.compute_ends <= self.clock:
                self.compute_ends = math.inf
                self.use += 1
                if self.use % period == 0:
                    ends.append(self.clock)
        first, last = self.steps // 2 - 1, self.steps - 2
        return (ends[last] - ends[first]) / (last - first)

    def there(self, block: int) -> bool:
        return block in self.pinned or block in self.ready

    def start_compute(self) -> None:
        block = self.uses[self.use]
        if self.compute_ends == math.inf and self.there(block):
            seconds = self.work.seconds[self.use % len(self.work.order)]
            self.compute_ends = self.clock + seconds
            self.last_used[block] = self.use

    def start_load(self) -> None:
        if self.load_ends < math.inf:
            return
        use = self.next_missing()
        if use is None:
            return
        block = self.uses[use]
        needed, victims = self.work.nbytes[block], []
        candidates = self.victims(use)
        while self.room < needed:
            victim = next(candidates, None)
            if victim is None:
                break
            victims.append(victim)
            self.room += self.work.nbytes[victim]
        if self.room < needed:
            self.room -= sum(self.work.nbytes[victim] for victim in victims)
            return
        self.ready.difference_update(victims)
        self.room -= needed
        self.loading = block
        self.last_used.pop(block, None)
        self.load_ends = self.clock + needed / self.work.link_bytes_per_second

    def next_missing(self) -> int | None:
        if self.policy == "sync":
            waits = self.compute_ends == math.inf
            return self.use if waits and not self.there(self.uses[self.use]) else None
        for use in range(self.use, len(self.uses)):
            if not self.there(self.uses[use]):
                return use
        return None

    def victims(self, use: int) -> Iterator[int]:
        """Blocks to give up for a load that is needed at `use`, best first."""
        computing = self.compute_ends < math.inf
        idle = self.ready - ({self.uses[self.use]} if computing else set())
        if self.policy == "belady":
            now = self.use + computing
            next_use = {block: self.next_use(block, now) for block in idle}
            far = [block for block in idle if next_use[block] > use]
            return iter(sorted(far, key=next_use.__getitem__, reverse=True))
        used = [block for block in idle if block in self.last_used]
        return iter(sorted(used, key=self.last_used.__getitem__))

    def next_use(self, block: int, now: int) -> float:
        uses = self.of[block]
        index = bisect_left(uses, now)
        return uses[index] if index < len(uses) else math.inf
