"""Decides when to plan again: another route, another budget, first measurements."""

from collections.abc import Iterable, Sequence

from stagehand.core.stopwatch import CopyTime, UseTime
from stagehand.residency.blocks import Block
from stagehand.residency.order import Route
from stagehand.residency.plan import Plan, Workload, plan, smallest_budget
from stagehand.residency.scheduler import Scheduler

__all__ = ["Steering"]

_LINK_GUESS = 25e9  # bytes a second, until a copy has been timed
_TIMED_BYTES = 1 << 20  # shorter ones tell of overhead more than of the link
_TIMED_ROUNDS = 2  # the first run of a kernel can take long
_TIMED_ROUTES = 8  # at once
_AGAIN = 128  # passes after which compute times are measured again
_ALIKE = 1.25  # compute that takes no more of what it took is no reason for a plan
_TRIES = 8  # passes that are timed for their copies alone, if there are none in them
_SETTLED = 1  # more passes after which the same routes are expected to repeat
_SETTLED_LIKE = 15  # the same, if those that are planned for only come in other numbers


class _Rate:
    """Bytes and seconds of copies."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._seconds = 0.0

    def add(self, copy: CopyTime) -> None:
        self._nbytes += copy.nbytes
        self._seconds += copy.duration_ms / 1e3

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if it is not known."""
        return self._nbytes / self._seconds if self._seconds > 0 else 0.0


class _Lasting:
    """For how many passes something has been as it is."""

    def __init__(self, found: object) -> None:
        self._found = found
        self._since = 0

    def passes(self, found: object, number: int) -> int:
        """Return how many, of what it is now and the number of passes so far."""
        if found != self._found:
            self._found, self._since = found, number
        return number - self._since


class Steering:
    """Keeps the scheduler's plan fit for what the model does.

    A plan is made for the routes that are expected to repeat. It is made again

    - when a pass took another route, or began or ceased to read rows of experts: twice
      alike, so that a single other pass does not cost a plan;
    - when other blocks train, and go on to do so;
    - when the budget changes;
    - when the routes' compute times are known, and when they have become others: they
      are measured again now and then.

    Args:
        scheduler: Follows the plans.
        blocks: All blocks, by index.
        must_stay: Blocks that have to be on the device all the time.
        budget_bytes: What all slots may hold together.
        max_lookahead: Streamed blocks to load ahead at most.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: Sequence[Block],
        *,
        must_stay: Iterable[int],
        budget_bytes: int,
        max_lookahead: int,
    ) -> None:
        self.max_lookahead = max_lookahead
        self.learns = True
        """Whether uses take as long as they always will, not longer."""
        self._scheduler = scheduler
        self._blocks = blocks
        self._must_stay = frozenset(must_stay)
        self._budget_bytes = budget_bytes
        self._link = _LINK_GUESS
        self._planned_link = _LINK_GUESS
        self._tries = _TRIES  # left to time a copy; none once that was done
        self._planned = scheduler.order.repeating()
        self._trained: frozenset[int] = frozenset()  # the blocks that train
        self._trained_lasts, self._routes_last = _Lasting(self._trained), _Lasting(())
        self._seconds: tuple[float, ...] | None = None
        self._known: dict[Route, tuple[float, ...]] = {}  # the same by routes
        self._measured_at = 0  # so many passes
        # What is being measured: of each pass by a route, the seconds of each use. Also
        # of routes that may be planned for soon.
        self._times: dict[Route, list[list[float]]] = {}
        self._pass: list[UseTime] = []
        # Of short and of long copies; also beside others, as they come in a step.
        self._rates = _Rate(), _Rate()
        self._picked = self._picks_seen = False  # what plan and latest pass have of it
        self._due = True
        self.plan = self._make()

    def __repr__(self) -> str:
        return f"Steering({self._uses()} uses, {self.plan.limit})"

    def _uses(self) -> int:
        """How many the planned routes have."""
        return sum(map(len, self._planned))

    def wants_times(self, under_way: int) -> bool:
        """Whether the next pass should be timed.

        Args:
            under_way: Uses that are timed but whose times are not known yet. A host
                that runs ahead of the device would time pass after pass.
        """
        if not (self.learns and self._scheduler.order.passes):
            return False
        if self._measures():
            # Of several routes, one may come many times before another does.
            return under_way < _TIMED_ROUNDS * len(self._planned) * self._uses()
        # A model that fitted at first had no copies then.
        return bool(self._tries and self.plan.loads) and not under_way

    def _measures(self) -> bool:
        """Whether compute times are being measured, for the first time or again."""
        since = self._scheduler.order.passes - self._measured_at
        return self._seconds is None or since >= _AGAIN

    @property
    def link_bytes_per_second(self) -> float:
        """The measured rate of the link, or a guess before the first timed copy."""
        return self._link

    @property
    def compute_seconds(self) -> float | None:
        """What all that is planned for computes, once it is measured."""
        return None if self._seconds is None else sum(self._seconds)

    @property
    def basis(self) -> tuple[object, ...]:
        """What plans are made from: each stays equal until it changes."""
        return (
            self._planned,
            self._seconds,
            self._must_stay,
            self._planned_link,
            self._trained,
        )

    @property
    def must_stay(self) -> frozenset[int]:
        """Blocks that have to be on the device all the time."""
        return self._must_stay

    def workload(self) -> Workload:
        """Return what is planned for."""
        slots = tuple(0 if b.hosted else b.slot_nbytes for b in self._blocks)
        share = self._picked_share()
        crossing = tuple(
            0 if b.hosted else int(b.link_nbytes * (share if b.picks else 1))
            for b in self._blocks
        )
        return Workload(
            order=sum(self._planned, ()),
            nbytes=slots,
            seconds=self._seconds,
            link_bytes_per_second=self._link,
            must_stay=self._must_stay,
            link_nbytes=None if crossing == slots else crossing,
            changing=frozenset(b.index for b in self._blocks if b.changes),
            steps=self._steps(),
            gradient_nbytes=self._gradient_nbytes(),
        )

    def _steps(self) -> tuple[int, ...]:
        """How many uses there are from each change of weights to the next one."""
        steps = [0]
        ends = self._scheduler.order.ends(self._planned)
        for route, last in zip(self._planned, ends, strict=True):
            steps[-1] += len(route)
            if last:
                steps.append(0)
        return tuple(filter(None, steps))

    def _gradient_nbytes(self) -> tuple[int, ...] | None:
        """What of each block goes home after backward; None if nothing does."""
        if not self._trained:
            return None
        nbytes = [0] * len(self._blocks)
        for index in self._trained:
            tensors = self._blocks[index].tensors
            nbytes[index] = sum(t.nbytes for t in tensors if t.requires_grad)
        return tuple(nbytes)

    def _picked_share(self) -> float:
        """Which part of blocks whose rows come by themselves crosses in a use."""
        if not self._scheduler.picks:
            return 1.0
        shares = [b.runs_nbytes / b.nbytes for b in self._blocks if b.runs_nbytes]
        return sum(shares) / len(shares) if shares else 1.0

    def smallest_budget(self) -> int:
        """Return the least device bytes that can work."""
        return smallest_budget(self.workload())

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; it takes effect at the next pass.

        Raises:
            StagehandOOMError: If it cannot work; the old one stays.
        """
        old, self._budget_bytes = self._budget_bytes, budget_bytes
        try:
            self._make()
        except BaseException:
            self._budget_bytes = old
            raise
        self._due = True

    def keep(self, blocks: Sequence[Block]) -> None:
        """Let more blocks stay on the device, from the next pass on.

        Raises:
            StagehandOOMError: If the budget is too small for that; nothing changes.
        """
        old, hosted = self._must_stay, [block for block in blocks if block.hosted]
        self._must_stay = old | frozenset(block.index for block in blocks)
        for block in hosted:
            block.hosted = False
        try:
            self._make()
        except BaseException:
            self._must_stay = old
            for block in hosted:
                block.hosted = True
            raise
        self._due = True

    def note(self, uses: Sequence[UseTime], copies: Sequence[CopyTime]) -> None:
        """Take in the times of finished passes."""
        loads = [copy for copy in copies if copy.lane == "H2D" and copy.nbytes]
        for copy in loads:
            self._rates[copy.nbytes >= _TIMED_BYTES].add(copy)
        if loads:
            self._due = self._due or bool(self._tries and self._seconds is not None)
            self._tries = 0
            short, long = self._rates
            self._link = long.rate or short.rate or self._link
        elif uses and self._seconds is not None:
            self._tries = max(0, self._tries - 1)
        if not (self.learns and self._measures()):
            return
        for use in uses:
            self._pass.append(use)
            if use.last:
                self._note_pass(self._pass)
                self._pass = []
        self._take_times()

    def _note_pass(self, uses: Sequence[UseTime]) -> None:
        route = tuple(use.block for use in uses)
        if route not in self._times and len(self._times) == _TIMED_ROUTES:
            del self._times[next(iter(self._times))]
        rounds = self._times.setdefault(route, [])
        if len(rounds) < _TIMED_ROUNDS:
            rounds.append([use.compute_ms / 1e3 for use in uses])

    def _take_times(self) -> None:
        """Plan with the shortest time of each use, once each route is known."""
        known = self._known if self._seconds is None else {}
        known = known | {
            route: tuple(map(min, *rounds))
            for route, rounds in self._times.items()
            if len(rounds) == _TIMED_ROUNDS
        }
        if not all(route in known for route in self._planned):
            return
        self._known = {route: known[route] for route in self._planned}
        for route in self._planned:
            self._times.pop(route, None)
        self._measured_at = self._scheduler.order.passes
        seconds = sum((known[route] for route in self._planned), ())
        if self._seconds is None or _differ(sum(seconds), sum(self._seconds)):
            self._seconds = seconds
            self._due = True

    def steer(self) -> bool:
        """Plan again if it is due; return whether it was.

        Call between passes, when nothing is in use.
        """
        order = self._scheduler.order
        routes = order.repeating()
        lasting = self._routes_last.passes(routes, order.passes)
        if routes != self._planned and (
            lasting >= self._enough(routes) or order.passes <= 1
        ):
            self._due = True  # first: what follows may be interrupted
            self._plan_for(routes)
        trained = frozenset(block.index for block in self._blocks if block.trains)
        lasting = self._trained_lasts.passes(trained, order.passes)
        if trained != self._trained and lasting >= _SETTLED_LIKE:
            self._due = True
            self._known.clear()  # it computes otherwise now
            self._times.clear()
            self._plan_for(self._planned)
        picks = self._scheduler.picks
        if picks != self._picked and picks == self._picks_seen:
            self._due = True
        self._picks_seen = picks
        if not self._due:
            if self._scheduler.strained:
                self._scheduler.follow(self.plan, fixed=self._must_stay)
                return True
            return False
        self._trained = trained
        self.plan = self._make()
        self._picked, self._planned_link = picks, self._link
        self._scheduler.follow(self.plan, fixed=self._must_stay)
        self._due = False  # not before: what fails or is interrupted is half laid out
        return True

    def _enough(self, routes: tuple[Route, ...]) -> int:
        """How many more passes have to see the same routes before a plan is made.

        That a few routes in any order look regular for a while is no reason to plan.
        """
        return _SETTLED_LIKE if set(routes) == set(self._planned) else _SETTLED

    def _plan_for(self, routes: tuple[Route, ...]) -> None:
        """Plan for other routes, with the times of those that are known."""
        self._planned, self._seconds = routes, None
        self._take_times()

    def _make(self) -> Plan:
        return plan(
            self.workload(),
            budget_bytes=self._budget_bytes,
            max_lookahead=self.max_lookahead,
        )


def _differ(seconds: float, others: float) -> bool:
    return max(seconds, others) > _ALIKE * min(seconds, others)
