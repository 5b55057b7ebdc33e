"""What one forward teaches for the next that begins alike.

The first two forwards of a kind are observed: sizes, who keeps what, times and link
rates, and whether the peak of device memory is one that spilling lowers. A forward is
recognized by its first saved tensor; one that then turns out different is observed
again.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stagehand.activations.prefix import Rates, Save, best_prefix, plan_prefix
from stagehand.activations.relief import Relief
from stagehand.activations.timing import Marks, spans
from stagehand.core.stopwatch import Stopwatch
from stagehand.errors import StagehandWarning
from stagehand.torch_private import at_end_of_backward
from stagehand.units import format_bytes

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from stagehand.activations.carrier import Carrier
    from stagehand.activations.pieces import Piece, Scope
    from stagehand.activations.prefix import Forecast, Prefix
    from stagehand.core.device import Device
    from stagehand.core.stopwatch import CopyTime

__all__ = ["Lesson", "Lessons"]

_OBSERVED = 2
_KINDS = 64


@dataclass(slots=True)
class Lesson:
    """What is known of forwards of one kind."""

    saves: list[Save] = field(default_factory=list)
    """What the latest observed one has saved, in its order."""
    count: int = 0
    """Pieces of memory that this one has saved."""
    tensors: int = 0
    """Tensors that it has saved; several can be in one piece."""
    budget_bytes: int = -1
    """The budget for which the prefix was planned."""
    prefix: Prefix | None = None
    """What leaves the device as soon as it is saved."""
    forecast: Forecast | None = None
    """What that costs, once times and rates are measured."""
    observed: int = 0
    """How many forwards were observed since this was last found to be wrong."""
    useless: bool = False
    """Whether spilling is switched off, because the peak of memory is elsewhere."""


_Noted = list["tuple[weakref.ref[Piece], int, int]"]


class _Observation:
    """One forward while it is observed, until its backward is over."""

    def __init__(self, noted: _Noted, lesson: Lesson, device: Device) -> None:
        self.lesson = lesson
        self.marks = Marks(device)
        self.relief: Relief | None = None
        self.is_read = False  # to the end of its backward
        self.sequences: list[int] = []
        self.saves: list[Save] = []
        self.is_turned = False  # those of `saves` are as backward has found them
        self.noted = noted
        self.scope: Scope | None = None
        """Set when the forward has ended; one that nobody ended dies as it goes."""


class Lessons:
    """The lessons of all kinds of forwards.

    Not thread-safe: callers hold a lock.

    Args:
        device: Where the tensors are.
        carrier: Moves bundles; it is timed while a forward is observed.
        lock: The callers'.
    """

    def __init__(
        self,
        device: Device,
        carrier: Carrier,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._lock = lock
        self.latest: Lesson | None = None
        """The lesson of the last forward that ended."""
        self.rates: Rates | None = None
        """The link's rates, once they are measured."""
        self._device = device
        self._carrier = carrier
        self._engine = carrier.engine
        self._known: dict[Any, Lesson] = {}
        self._open: WeakKeyDictionary[Scope, _Observation] = WeakKeyDictionary()
        self._moved: dict[str, list[float]] = {"D2H": [0, 0.0], "H2D": [0, 0.0]}
        self._watch: Stopwatch | None = None

    def forget(self) -> None:
        """Observe all kinds anew."""
        for lesson in self._known.values():
            lesson.observed = 0

    # While a forward runs

    def recognize(self, scope: Scope, form: Any) -> None:
        """Give a forward its prefix, or begin to observe it."""
        scope.form = form
        lesson = self._known.get(form)
        if lesson is None:
            if len(self._known) >= _KINDS:
                self._known.clear()
            lesson = self._known[form] = Lesson()
        elif lesson.saves and not (lesson.observed or lesson.useless):
            self._plan(lesson, lesson.budget_bytes)
        scope.off = lesson.useless
        scope.prefix, scope.saves = lesson.prefix, lesson.saves
        scope.twins = lesson.tensors > lesson.count
        if lesson.observed < _OBSERVED and not lesson.useless:
            noted: _Noted = []
            scope.noted = noted
            observation = _Observation(noted, lesson, self._device)
            self._open[scope] = observation
            self._carrier.marks = observation.marks
            if self._engine.stopwatch is None:
                self._watch = self._engine.stopwatch = Stopwatch(self._device)

    def saved(self, scope: Scope, sequence: int) -> None:
        """Note that an operator of an observed forward saves a tensor."""
        self._open[scope].marks.saved(sequence, self._device.current_stream())

    def learn(self, scope: Scope, budget_bytes: int, *, failed: bool) -> None:
        """Note the end of a forward."""
        observation = self._open.get(scope)
        lesson = self._known.get(scope.form)
        if failed or lesson is None:
            self._open.pop(scope, None)
            return
        self.latest = lesson
        if observation is None:
            if scope.tensors != lesson.tensors:  # it was another one
                lesson.observed = 0
            elif budget_bytes != lesson.budget_bytes and not lesson.useless:
                self._plan(lesson, budget_bytes)
            return
        lesson.count, lesson.tensors = scope.count, scope.tensors
        lesson.observed += 1
        observation.sequences = [sequence for _, _, sequence in observation.noted]
        self._see(observation, budget_bytes)
        away = sum(
            nbytes
            for ref, nbytes, _ in observation.noted
            if (piece := ref()) is not None and piece.is_away
        )
        self._look_at_memory(observation, away)
        observation.scope = scope  # last: settled in the end, if all is there

    def _see(self, observation: _Observation, budget_bytes: int) -> None:
        """See what of a forward could leave now, and plan with it."""
        lesson = observation.lesson
        before = observation.saves if observation.is_turned else []
        saves = [
            _save(ref(), before[number] if number < len(before) else Save(nbytes))
            for number, (ref, nbytes, _) in enumerate(observation.noted)
        ]
        lesson.saves = observation.saves = saves
        lesson.budget_bytes = budget_bytes
        lesson.prefix, lesson.forecast = plan_prefix(saves, budget_bytes), None

    def turn(self, scope: Scope, budget_bytes: int) -> None:
        """Note that backward comes to a forward: what users hold now, they keep.

        What they have let go of since the forward could have left.
        """
        observation = self._open.get(scope)
        if observation is not None:
            self._see(observation, budget_bytes)
            observation.is_turned = True

    def correct(self, piece: Piece, *, free: bool) -> None:
        """Note that users hold other tensors than they did, and observe anew."""
        scope, number = piece.scope, piece.position
        lesson = self._known.get(scope.form)
        if lesson is None or scope.noted is not None:
            return
        lesson.observed = 0
        if number < len(lesson.saves):
            lesson.saves[number] = replace(lesson.saves[number], free=free)

    def _look_at_memory(self, observation: _Observation, away: int) -> None:
        allocated = self._device.allocated_bytes()
        peak = self._device.peak_allocated_bytes()
        if away and allocated is not None and peak is not None:
            observation.relief = Relief(away, allocated, peak)

    # While its backward runs

    def needed(self, scope: Scope, sequence: int) -> None:
        """Note that an operator of an observed forward goes backward."""
        observation = self._open.get(scope)
        if observation is None:
            return
        marks, relief = observation.marks, observation.relief
        if relief is not None and not marks.is_begun:
            at_end_of_backward(partial(self._read_last, observation, relief))
        marks.needed(sequence, self._device.current_stream())
        if relief is None:
            return
        away = sum(b.nbytes for ref in scope.coming if (b := ref()) is not None)
        if relief.is_due(away):
            self._read(relief, away)

    def _read_last(self, observation: _Observation, relief: Relief) -> None:
        with self._lock:
            self._read(relief, 0)
            observation.is_read = True

    def _read(self, relief: Relief, away: int) -> None:
        allocated = self._device.allocated_bytes() or 0
        relief.read(away, allocated, self._device.peak_allocated_bytes() or 0)

    # Afterwards

    def settle(self, budget_bytes: int) -> None:
        """Draw conclusions from forwards whose backward is over.

        When none is observed any more, nothing is timed any more; one that has failed
        is observed no longer than until here.
        """
        for scope, observation in tuple(self._open.items()):
            over = all(ref() is None for ref, _, _ in observation.noted)
            if not over or not observation.sequences:
                continue
            self._judge(observation)
            if observation.marks.is_begun and not observation.marks.is_over:
                continue  # the host is ahead: later
            del self._open[scope]
            if observation.marks.is_begun:
                self._time(observation)
                self._plan(observation.lesson, budget_bytes)
        if self._open:
            return
        self._carrier.marks = None
        if self._watch is not None:
            self._note_rates(self._watch.resolve()[1])
            if self._engine.stopwatch is self._watch:
                self._engine.stopwatch = None
            self._watch = None

    def _judge(self, observation: _Observation) -> None:
        relief, observation.relief = observation.relief, None
        lesson = observation.lesson
        if relief is None or not observation.is_read:
            return
        if not relief.is_useless() or lesson.useless:
            return
        lesson.useless = True
        warnings.warn(
            f"{format_bytes(relief.most_bytes)} of saved tensors were away from the"
            " device when backward began, but the peak of its memory comes while none"
            " of them is away: spilling is switched off for forwards like this one."
            " What takes the memory then may be a recompute, or a large loss:"
            " checkpoint or cut that instead",
            StagehandWarning,
            stacklevel=5,
        )

    def _time(self, observation: _Observation) -> None:
        forward, backward = observation.marks.seconds()
        lesson = observation.lesson
        numbers = observation.sequences
        if numbers != sorted(numbers) or not numbers:
            return
        ahead = spans(forward, numbers)
        # Backward goes down: time runs from the last number to the first.
        mirrored = [(-number, at) for number, at in backward]
        back = spans(mirrored, [-number for number in reversed(numbers)])[::-1]
        lesson.saves = [
            Save(save.nbytes, f, b, free=save.free)
            for save, f, b in zip(observation.saves, ahead, back, strict=True)
        ]

    def _note_rates(self, copies: Sequence[CopyTime]) -> None:
        for copy in copies:
            moved = self._moved[copy.lane]
            moved[0] += copy.nbytes
            moved[1] += copy.duration_ms / 1e3
        (out, out_s), (back, back_s) = self._moved["D2H"], self._moved["H2D"]
        if out_s and back_s:
            self.rates = Rates(out / out_s, back / back_s)

    def _plan(self, lesson: Lesson, budget_bytes: int) -> None:
        lesson.budget_bytes = budget_bytes
        timed = any(save.forward for save in lesson.saves)
        if self.rates is None or not timed:
            lesson.prefix = plan_prefix(lesson.saves, budget_bytes)
            return
        lesson.prefix, lesson.forecast = best_prefix(
            lesson.saves, budget_bytes, self.rates
        )


def _save(piece: Piece | None, before: Save) -> Save:
    if piece is None:  # backward is through with it, or does not come to it
        return before
    nbytes = before.nbytes
    if piece.alias is None:
        return Save(nbytes, free=piece.is_away)
    if not piece.is_plain():
        return Save(nbytes, free=False)
    # On its way, the copy's source is one of its tensors, too.
    free = piece.can_go() or (piece.bundle is not None and piece.can_go(others=1))
    return Save(nbytes, free=free)
