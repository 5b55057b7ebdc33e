"""One runtime's place on the device that it shares with others."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from stagehand.errors import CheckpointError, StagehandOOMError
from stagehand.residency.shares import Claim
from stagehand.residency.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from stagehand.assembly import Parts
    from stagehand.residency.seats import Holding
    from stagehand.weak_refs import ModelRef
    from stagehand.weights.edges import Edges

__all__ = ["Tenancy"]

_logger = logging.getLogger("stagehand")

# Where all loads hide, the division with the fewest of them is the best.
_SLIGHT = 1e-3
_RING = 2  # blocks: one computes while the next one is loaded


class Tenancy:
    """Answers for one runtime when the device's memory is divided.

    Holds no reference to the runtime, so that a dropped model is collected.

    Args:
        parts: Of the runtime.
        edges: Its lock, and whether it runs.
        model: Is not dropped while others have it give up or load something.
    """

    def __init__(self, parts: Parts, edges: Edges, model: ModelRef) -> None:
        self.account = parts.weights
        self.name = parts.weights.name
        self.shared = parts.shared
        self.limit_bytes = parts.budget_bytes
        """What the present pass may take."""
        self._parts = parts
        self._edges = weakref.ref(edges)
        self._model = model
        self._left = False
        self._begins = False  # a pass that has used nothing yet
        self._claim: Claim  # of this basis
        self._basis: tuple[object, ...] = ()
        self.number = self.shared.new_number()
        """By which the device knows it."""

    def __repr__(self) -> str:
        return f"Tenancy({self.name!r} of {self.shared!r})"

    def join(self) -> None:
        """Take the place. From now on others may ask this one to make room.

        Raises:
            StagehandOOMError: If reservations of others leave too little.
        """
        self._parts.leave = self.leave  # first: an interrupt may come before the end
        self.shared.join(self.number, self)
        self._parts.scheduler.meet(self)

    def leave(self) -> None:
        """Give up the place, and what is held for it. Idempotent."""
        self._left = True
        self.shared.leave(self.number)

    def renew(self) -> None:
        """The budget has changed."""
        self.shared.renew()

    def keep_to_cap(self) -> None:
        """See `SharedDevice.keep_to_cap`."""
        self.shared.keep_to_cap()

    def begin(self) -> bool:
        """A pass begins: others make room for it.

        Returns:
            Whether another runtime's pass is expected after it.

        Raises:
            StagehandOOMError: If they need not give up what it needs to run.
        """
        self._begins = True
        try:
            self.limit_bytes, hands_over = self.shared.begin(self.number)
        finally:
            self._begins = False
        return hands_over

    def widen(self, nbytes: int) -> None:
        """See `SharedDevice.widen`."""
        self.limit_bytes = self.shared.widen(self.number, self.limit_bytes, nbytes)

    def go_on_here(self, move: Callable[[], bool]) -> None:
        """See `SharedDevice.go_on_here`."""
        self.shared.go_on_here(self.number, move)

    def end(self, *, failed: bool = False) -> None:
        """It is over. Idempotent."""
        self.shared.end(self.number, failed=failed)

    # What the device asks

    def claim(self) -> Claim:
        """See `Tenant.claim`."""
        parts = self._parts
        planned = parts.steering.basis
        basis = (parts.budget_bytes, parts.apart_bytes, parts.trains, *planned)
        if basis == self._basis:
            return self._claim
        self._basis, self._claim = basis, self._made_claim()
        return self._claim

    def _made_claim(self) -> Claim:
        parts, apart = self._parts, self._parts.apart_bytes
        workload, stay = parts.steering.workload(), parts.steering.must_stay
        seconds = workload.seconds or [0.0] * len(workload.order)
        timeline = Timeline(workload, seconds)
        fixed = apart + sum(workload.nbytes[index] for index in stay)
        used = sum(workload.nbytes[index] for index in set(workload.order))
        rate = workload.link_bytes_per_second

        def pass_seconds(kept: int) -> float:
            left = max(0, kept - fixed)
            loads = max(0, used - left) / rate
            return timeline.bound_seconds(left) + _SLIGHT * loads

        largest = max((block.slot_nbytes for block in parts.streamed), default=0)
        weights = apart + sum(workload.nbytes)
        floor = parts.steering.smallest_budget() + apart
        return Claim(
            budget=parts.budget_bytes,
            weights=weights,
            floor=floor,
            ring=min(_RING * largest, weights - fixed),
            seconds=pass_seconds,
            fixed=fixed,
            bound=fixed if self._trains_what_stays() else parts.odd_bytes,
        )

    def _trains_what_stays(self) -> bool:
        """Whether an optimizer may have its state beside what is always there."""
        parts = self._parts
        return parts.trains and any(
            tensor.requires_grad
            for index in parts.steering.must_stay
            for tensor in parts.blocks[index].tensors
        )

    def give_up(self, keep_bytes: int, *, leaves: bool = False) -> bool:
        """See `Tenant.give_up`."""
        edges, model = self._edges(), self._model()
        if edges is None or model is None:
            return True  # the model was dropped: what it has is free in a moment
        if not edges.try_lock():
            return False
        try:
            if self._left:
                return True
            scheduler = self._parts.scheduler
            passes = edges.is_busy and not self._begins
            running = passes or bool(scheduler.in_use)
            all_of_it = not running and (leaves or not self._trains_what_stays())
            scheduler.give_up(keep_bytes, all_of_it=all_of_it)
            if not running and self._parts.weights.held_bytes > keep_bytes:
                self._parts.engine.rest_wires()  # the next load has it again
                self._parts.device_arena.trim()
            if leaves and not running:
                self._parts.take_home_odd()
            if all_of_it:
                self._parts.take_gradients_along()
        finally:
            edges.lock.release()
        return True

    def warm(self) -> None:
        """See `Tenant.warm`. What fails here is left to the next pass."""
        edges, model = self._edges(), self._model()
        if edges is None or model is None or not edges.try_lock():
            return
        try:
            parts = self._parts
            if self._left or edges.is_busy or parts.scheduler.in_use:
                return
            if parts.scheduler.warm():
                parts.take_gradients_along()
        except (StagehandOOMError, CheckpointError) as error:
            # Another model's pass ends here; this one's next says it if it still holds.
            _logger.debug("%s was not loaded ahead: %s", self.name, error)
        finally:
            edges.lock.release()

    def owner(self) -> Any:
        """See `Tenant.owner`."""
        edges = self._edges()
        return None if edges is None else edges.lock.owner

    def ends_alone(self) -> bool:
        """See `Tenant.ends_alone`."""
        edges = self._edges()
        return edges is not None and edges.lock.ends_alone()

    def may_stand_back(self) -> bool:
        """See `Tenant.may_stand_back`."""
        edges = self._edges()
        return edges is not None and edges.may_stand_back()

    # What the scheduler asks

    def make_room(self, nbytes: int, *, by_ends: bool = False) -> bool:
        """See `Neighbours.make_room`."""
        return self.shared.make_room(self.number, nbytes, by_ends=by_ends)

    def beside_passes(self, nbytes: int) -> AbstractContextManager[bool]:
        """See `Neighbours.beside_passes`."""
        return self.shared.beside_passes(self.number, nbytes)

    def budget_for(self, nbytes: int, *, at_once: bool = False) -> int:
        """See `Neighbours.budget_for`."""
        return self.shared.budget_for(self.number, nbytes, at_once=at_once)

    def are_there(self) -> bool:
        """See `Neighbours.are_there`."""
        return self.shared.has_several()

    def are_busy(self) -> bool:
        """See `Neighbours.are_busy`."""
        return self.shared.are_others_busy(self.number)

    def name_them(self) -> str:
        """See `Neighbours.name_them`."""
        others = [h for h in self.shared.holdings() if h.name != self.name]
        return "".join(f"; {holding}" for holding in others)

    # Telling

    def holdings(self) -> tuple[Holding, ...]:
        """Return what everybody on the device holds, and why."""
        return tuple(self.shared.holdings())

    @property
    def why(self) -> str:
        """Why its blocks stay."""
        return self.shared.why(self.number)
