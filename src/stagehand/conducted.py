"""What a conductor sees of a runtime; a part of `Runtime`.

The protocol is `stagehand.conductor.adapters.Conducted`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.conductor.adapters import LinkNeed

if TYPE_CHECKING:
    from stagehand.assembly import Parts, Settings
    from stagehand.core.clock import PhaseClock
    from stagehand.core.ledger import Account
    from stagehand.core.limits import Bounds
    from stagehand.core.transfer import TransferEngine
    from stagehand.measure import Measure
    from stagehand.residency.plan import Plan
    from stagehand.weak_refs import ModelRef

__all__ = ["Conduct"]


class Conduct:
    """Limits, lanes, phases and numbers of one runtime."""

    _parts: Parts
    _settings: Settings
    _measure: Measure
    _bounds: Bounds
    _link_need: tuple[Plan, LinkNeed | None] | None
    _model: ModelRef

    @property
    def is_open(self) -> bool:
        """Whether the runtime was not shut down, and its model lives."""
        return self._model.is_open

    @property
    def bounds(self) -> Bounds:
        """Where limits are posted that hold beside the runtime's own settings."""
        return self._bounds

    @property
    def engine(self) -> TransferEngine:
        """What copies its weights and gradients."""
        return self._parts.engine

    @property
    def clock(self) -> PhaseClock:
        """Its steps and phases."""
        return self._measure.clock

    @property
    def kind(self) -> str:
        """What it is called in a conductor's records."""
        return "stagehand"

    @property
    def window(self) -> int:
        """The most blocks that it loads ahead: of small ones more than configured."""
        return max(self._settings.lookahead, self._parts.steering.plan.lookahead)

    @property
    def device_account(self) -> Account:
        """The account of its device memory, or the whole that it shares with others."""
        return self._parts.weights.whole

    def snapshot(self) -> dict[str, int | None]:
        """Return what a conductor's record says of it."""
        parts = self._parts
        return {
            "max_inflight": parts.engine.h2d.capacity,
            "prefetch_window": parts.scheduler.lookahead,
            "device_bytes": parts.weights.held_bytes,
            "pinned_bytes": parts.pinned_arena.leased_bytes,
        }

    def link_need(self) -> LinkNeed | None:
        """Return what one cycle asks of the link, once compute times are measured."""
        steering = self._parts.steering
        if self._link_need is None or self._link_need[0] is not steering.plan:
            seconds, need = steering.compute_seconds, None
            if seconds is not None:
                need = LinkNeed(compute_seconds=seconds, loads=steering.plan.loads)
            self._link_need = steering.plan, need
        return self._link_need[1]
