"""Which block is used next: learned from what happened, followed by a cursor,
relearned.

Uses come in *passes*; a pass begins when the model is entered from outside. What a pass
used, in order, is its *route*. Where the latest passes took a few routes over and over,
the next of these is expected: two forwards and a backward are one route twice and then
another. Else it is the route that followed the last one last time; at first, the order
in which the model defines its blocks. After a use that is not the expected one, a known
route that begins like this pass is, or else the cursor moves to where the use stands.
When it stands nowhere, or this happens twice in a row, the order is *lost* until an
expected use or the next pass: nothing is predicted meanwhile, and everything is served
on demand.

What is planned for are the routes that *repeat*, whichever comes next: some drafts of a
few layers and then all of them, however many drafts there are. A route that has come
back does so again, unless it has been away for twice as long as ever before, or has
come many times in a row and gave way to one that does not use the same blocks. Routes
that come far more often than others count several times: so what a decoder uses for
each token stays, and its encoder streams.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stagehand.errors import StagehandInternalError

__all__ = ["Order", "Route"]

_ROUTES_KEPT = 8
_CYCLE_ROUTES = 4
_RECENT = 2 * _CYCLE_ROUTES
_MOST = 0.75  # of the latest passes
_LONGEST_AWAY = 64  # passes; a rarer route is not worth the room of its blocks
_PHASE = 8  # passes in a row
_OFTEN = 4  # more often than the rarest makes no difference to what should stay

Route = tuple[int, ...]


@dataclass(slots=True)
class _Habit:
    """When a route was taken.

    Attributes:
        route: Which.
        latest: The number of the latest pass that took it.
        away: The most passes of other routes from one to the next; None if it has not
            come back soon.
        is_rare: Whether it has come back, but never soon.
        run: How many of the latest passes that took it came in a row.
        goes_back: Whether the latest of them was autograd's.
    """

    route: Route
    latest: int
    away: int | None = None
    is_rare: bool = False
    run: int = 1
    goes_back: bool = False

    def note(self, number: int) -> None:
        """Note that a pass takes it again."""
        others = number - self.latest - 1
        if others <= _LONGEST_AWAY:
            self.away = max(self.away or 0, others)
        self.run = 1 if others else self.run + 1
        self.latest = number
        self.is_rare = self.away is None

    def lasts(self, number: int) -> bool:
        """Whether it is expected to come back, after so many passes of any route."""
        return self.away is not None and number - self.latest <= 2 * self.away


class Order:
    """The learned order of block uses.

    Positions count uses from the beginning of the present pass and run on into the pass
    that is expected after it.

    Args:
        guess: The expected order before anything is learned.
    """

    def __init__(self, guess: Sequence[int]) -> None:
        # Which route came after which, newest last.
        self._follower: dict[Route, Route] = {}
        self._route: Route = tuple(guess)
        self._places: dict[int, list[int]] = {}  # the positions of each block in it
        self._next: Route = self._route
        self._recent: list[Route] = []  # of the latest passes, newest last
        self._recent_ends: list[bool] = []  # whether weights could change behind them
        self._repeated: tuple[Route, ...] = ()  # what they repeat, this one first
        self._habits: dict[Route, _Habit] = {}  # in the order in which they began
        self._log: list[int] = []  # the uses of this pass, once one was not expected
        self._misses = 0
        self._goes_back, self._ends = False, True  # this pass
        self.followed = True
        """Whether all uses of this pass were expected. Who sees that the next one is,
        too, may move the cursor instead of calling `use`."""
        self.cursor = -1
        """Position of the latest use; -1 at the beginning of a pass."""
        self.version = 0
        """Counts changes of `line`."""
        self.passes = 0
        """Passes that are over."""
        self.learned = 0
        """Passes that are over and took another route than expected."""

    def __repr__(self) -> str:
        return f"Order({len(self._route)} uses, at {self.cursor}, lost={self.lost})"

    @property
    def lost(self) -> bool:
        """Whether nothing can be predicted now."""
        return self._misses > 1

    @property
    def length(self) -> int:
        """Number of uses that the present pass is expected to have."""
        return len(self._route)

    @property
    def line(self) -> Route:
        """The expected uses of the present pass and of the one after it."""
        return self._route + self._next

    def use(self, block: int) -> bool:
        """Note a use; return whether it was the expected one."""
        position = self.cursor + 1
        route = self._route
        expected = position < len(route) and route[position] == block
        if not self.followed:
            self._log.append(block)
        elif not expected:
            self._log = [*route[:position], block]
            self.followed = False
        if expected:
            self.cursor = position
            self._misses = 0
            return True
        self._misses += 1
        self._resync(block)
        return False

    def _resync(self, block: int) -> None:
        if self._misses == 1:  # once: while it is lost, this would be slow
            for route in reversed(self._follower):
                if self._goes_on(route, block):
                    self._expect(route)
                    self.cursor = len(self._log) - 1
                    return
        places = self._find(block)
        ahead = bisect_right(places, self.cursor)
        if ahead < len(places):
            self.cursor = places[ahead]
            return
        for route in reversed(self._follower):
            if route[0] == block:
                self._expect(route)
                self.cursor = 0
                return
        if places:
            self.cursor = places[0]
        else:
            self._misses += 1  # nowhere: lost at once

    def _goes_on(self, route: Route, block: int) -> bool:
        """Whether a route begins like this pass, whose latest use is `block`."""
        uses = len(self._log)
        return (
            uses <= len(route)
            and route[uses - 1] == block
            and route[:uses] == tuple(self._log)
        )

    def _find(self, block: int) -> Sequence[int]:
        if not self._places:
            for position, other in enumerate(self._route):
                self._places.setdefault(other, []).append(position)
        return self._places.get(block, ())

    def place(self, block: int) -> int:
        """Return the last position of a block in the present route; -1 if it has
        none."""
        return max(self._find(block), default=-1)

    def turn(self, *, goes_back: bool = False, changes_follow: bool = True) -> bool:
        """Begin a pass; return whether positions after the last one's end stay valid.

        If so, a position `p` of the last pass is `p - length` now, `length` being the
        one before the call; but after a pass without uses they are what they were.

        Args:
            goes_back: Whether it is autograd that begins.
            changes_follow: Whether weights that train may change after this pass.
        """
        done = self._route[: self.cursor + 1] if self.followed else tuple(self._log)
        went_back, self._goes_back = self._goes_back, goes_back
        ended, self._ends = self._ends, changes_follow
        if not done:
            return True
        self.followed = True
        self.passes += 1
        if done != self._route:
            self.learned += 1
        if self._recent:
            self._follow(self._recent[-1], done)
        done = self._note_habit(done, went_back)
        self._recent = [*self._recent[-_RECENT + 1 :], done]
        self._recent_ends = [*self._recent_ends[-_RECENT + 1 :], ended]
        repeated = self._find_repeated()
        expected = repeated[0] if repeated else self._follower.get(done, done)
        kept = done == self._route and expected == self._next
        self._expect(expected, repeated)
        self.cursor = -1
        self._misses = 0
        return kept

    def _find_repeated(self) -> tuple[Route, ...]:
        """Return the routes that the latest passes repeat, the next one first; or none.

        One or two routes are those that follow each other anyway.
        """
        recent = self._recent
        if len(recent) == _RECENT:
            for count in range(1, _CYCLE_ROUTES + 1):
                if recent[count:] == recent[:-count]:
                    return tuple(recent[-count:])
        return ()

    def _expect(self, route: Route, repeated: tuple[Route, ...] = ()) -> None:
        self._repeated = repeated
        if repeated:
            following = repeated[1 % len(repeated)]
        else:
            following = self._follower.get(route, route)
        if route != self._route or following != self._next:
            self._route = route
            self._places = {}
            self._next = following
            self.version += 1

    def _follow(self, before: Route, done: Route) -> None:
        self._follower.pop(before, None)
        self._follower[before] = done
        if len(self._follower) > _ROUTES_KEPT:
            del self._follower[next(iter(self._follower))]

    def _note_habit(self, done: Route, went_back: bool) -> Route:
        """Note that a pass took a route; return the tuple that stands for all alike."""
        habit = self._habits.get(done)
        if habit is not None:
            habit.note(self.passes)
            habit.goes_back = went_back
            return habit.route
        self._habits[done] = _Habit(done, self.passes, goes_back=went_back)
        if len(self._habits) > _ROUTES_KEPT:
            oldest = min(self._habits.values(), key=lambda habit: habit.latest)
            del self._habits[oldest.route]
        return done

    def repeating(self) -> tuple[Route, ...]:
        """Return the routes of the passes that are expected to repeat for ever.

        They are the same wherever among them the present pass is, and begin where
        autograd has been back, if it does go back.
        """
        lasting = self._lasting()
        routes = list(self._repeated)
        if not routes or not all(route in routes for route in lasting):
            routes = self._following()
            more = len(routes) > len(set(lasting)) and all(r in routes for r in lasting)
            if lasting and (not more or any(map(self._is_rare, routes))):
                routes = lasting
        turned = (routes[first:] + routes[:first] for first in range(len(routes)))
        first = min(turned, key=lambda found: (self._cuts_step(found), found))
        return tuple(first)

    def _cuts_step(self, routes: Sequence[Route]) -> bool:
        """Whether what they begin with belongs to what they end with."""
        return self.goes_back(routes[0]) or not self.goes_back(routes[-1])

    def ends(self, routes: Sequence[Route]) -> list[bool]:
        """Whether weights that train may change behind each pass of such a sequence.

        They may if they could the last time that it came; behind forwards it depends on
        whether these build a graph, which no route tells. Where it never came, they may
        but where a pass follows that goes back.
        """
        count, recent = len(routes), self._recent
        for first in range(len(recent) - count, -1, -1):
            if recent[first : first + count] == list(routes):
                return self._recent_ends[first : first + count]
        backs = [*map(self.goes_back, routes), False]
        return [back or not after for back, after in pairwise(backs)]

    def goes_back(self, route: Route) -> bool:
        """Whether passes that take a route are autograd's."""
        habit = self._habits.get(route)
        return habit is not None and habit.goes_back

    def _lasting(self) -> list[Route]:
        """Return the few routes that come back, if most of the latest passes took one.

        In rounds in the order in which they began, each in as many as it counts.
        """
        habits = [h for h in self._habits.values() if self._lasts(h)]
        lasting = [habit.route for habit in habits]
        taken = sum(route in lasting for route in self._recent)
        if len(habits) > _CYCLE_ROUTES or taken < _MOST * len(self._recent):
            return []
        gaps = [1 + (habit.away or 0) for habit in habits]
        counts = [min(_OFTEN, max(gaps) // gap) for gap in gaps]
        each = list(zip(lasting, counts, strict=True))
        return [r for n in range(_OFTEN) for r, count in each if count > n]

    def _lasts(self, habit: _Habit) -> bool:
        """Whether a route comes back soon, and has no phase of its own that is over."""
        if not habit.lasts(self.passes):
            return False
        if habit.run < _PHASE or habit.latest == self.passes:
            return True
        return set(habit.route) <= set(self._recent[-1])

    def _is_rare(self, route: Route) -> bool:
        habit = self._habits.get(route)
        return habit is not None and habit.is_rare

    def _following(self) -> list[Route]:
        """Return the routes that have followed each other in a ring, or only this."""
        routes: list[Route] = []
        route = self._route
        while route not in routes:
            if len(routes) == _CYCLE_ROUTES:
                return [self._route]
            routes.append(route)
            route = self._follower.get(route, route)
        return routes[routes.index(route) :]

    def check(self) -> None:
        """Raise if an invariant is broken.

        Raises:
            StagehandInternalError: Naming it.
        """
        if not -1 <= self.cursor < max(len(self._route), 1):
            raise StagehandInternalError(
                f"the order's cursor is at {self.cursor} of {len(self._route)} uses"
            )
