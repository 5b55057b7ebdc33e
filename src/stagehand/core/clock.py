"""Which step and which phase of it the model is in."""

from collections.abc import Callable
from enum import IntEnum

from stagehand.errors import ConfigError
from stagehand.settings import check_value

__all__ = ["Phase", "PhaseClock"]


class Phase(IntEnum):
    """The phases of a step, in their order. Any of the inner ones may be left out."""

    STEP_BEGIN = 0
    """The step is open and nothing has run."""
    FORWARD = 1
    """The model runs forward."""
    BACKWARD = 2
    """Gradients are computed; a recompute inside enters FORWARD again."""
    OPTIMIZER = 3
    """Weights are updated."""
    STEP_END = 4
    """No step is open."""


_INNER = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END})
# From BACKWARD back to FORWARD: the next micro batch, or a recompute.
_FOLLOWERS: dict[Phase, frozenset[Phase]] = {
    Phase.STEP_BEGIN: _INNER,
    Phase.FORWARD: _INNER,
    Phase.BACKWARD: _INNER,
    Phase.OPTIMIZER: frozenset({Phase.OPTIMIZER, Phase.STEP_END}),
    Phase.STEP_END: frozenset(),
}


class PhaseClock:
    """The step number and the phase, told by whoever detects them.

    It detects nothing itself and keeps no time. It takes no lock: one model runs under
    one lock, and that covers its clock.

    Attributes:
        step: The number of the open or the last step; 0 before the first.
        phase: The current phase; STEP_END while no step is open.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = Phase.STEP_END
        self._subscribers: dict[object, Callable[[int, Phase], None]] = {}

    def __repr__(self) -> str:
        """Show where the clock stands."""
        return f"PhaseClock(step {self.step}, {self.phase.name})"

    def begin_step(self, step: int | None = None) -> None:
        """Open a step; one that is still open is ended first.

        Args:
            step: Its number, for instance the training loop's own. The next number if
                left out.

        Raises:
            ConfigError: If `step` is no int, or negative.
        """
        if step is not None:
            check_value("step", step, int)
            if step < 0:
                raise ConfigError(f"step is {step}: expected zero or more")
        self.end_step()
        self.step = self.step + 1 if step is None else step
        self._move_to(Phase.STEP_BEGIN)

    def enter(self, phase: Phase) -> None:
        """Go on to a later phase of the open step, or repeat the current one.

        FORWARD may also follow BACKWARD. Subscribers hear of every entry, repeated ones
        too: each FORWARD is a pass.

        Raises:
            ConfigError: If `phase` cannot follow the current one.
        """
        if phase not in _FOLLOWERS[self.phase]:
            raise ConfigError(
                f"step {self.step} cannot go from {self.phase.name} to {phase.name}; "
                "call begin_step() to open the next step"
            )
        self._move_to(phase)

    def end_step(self) -> None:
        """Close the open step. Does nothing while none is open."""
        if self.phase is not Phase.STEP_END:
            self._move_to(Phase.STEP_END)

    def subscribe(self, callback: Callable[[int, Phase], None]) -> Callable[[], None]:
        """Call `callback(step, phase)` after every move, until the result is called.

        Callbacks run in the order of their subscription, in the thread that moves the
        clock. An exception in one reaches that thread, with the clock already moved.

        Returns:
            A function that ends the subscription; calling it again does nothing.
        """
        key = object()
        self._subscribers[key] = callback

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def _move_to(self, phase: Phase) -> None:
        self.phase = phase
        # A copy: a callback may end its own subscription.
        for callback in tuple(self._subscribers.values()):
            callback(self.step, phase)
