"""The slots of a device's link, for copies that are not the library's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stagehand.core.limits import Priority
from stagehand.settings import check_member, check_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagehand.core.traffic import Denied, Slots, Traffic

__all__ = ["LinkSlots", "Token"]

Way = Literal["h2d", "d2h"]


class Token:
    """One slot, until `release()`."""

    __slots__ = ("_slots", "_traffic")

    def __init__(self, traffic: Traffic, slots: Slots) -> None:
        self._traffic = traffic
        self._slots: Slots | None = slots
        traffic.hold_slot(slots)

    def __repr__(self) -> str:
        return f"Token({'released' if self._slots is None else 'held'})"

    def release(self) -> None:
        """Say that the copy is done. Idempotent."""
        slots, self._slots = self._slots, None
        if slots is not None:
            self._traffic.hold_slot(slots, release=True)


class LinkSlots:
    """Slots to the device and from it, that the library's own copies take, too.

    Args:
        traffic: What is under way.
        trace: Is told of requests.
    """

    def __init__(self, traffic: Traffic, trace: Callable[..., None]) -> None:
        self._traffic = traffic
        self._trace = trace

    def __repr__(self) -> str:
        return f"LinkSlots({self._traffic!r})"

    def acquire(
        self, way: Way, priority: Priority = Priority.SPECULATIVE
    ) -> Token | Denied:
        """Return a token for one copy, or why there is none. Demand always gets one.

        Args:
            way: "h2d" to the device, "d2h" from it.
            priority: CRITICAL and REQUIRED are demand.

        Raises:
            ConfigError: If there is no such way, or no such priority.
        """
        slots, traffic = self._slots_of(way), self._traffic
        check_member("priority", priority, Priority)
        ask = traffic.deny_load if slots is traffic.h2d else traffic.deny_home
        denied = ask(priority)
        answer = "granted" if denied is None else denied.name
        self._trace("slot", way=way, priority=priority.name, answer=answer)
        if denied is not None:
            return denied
        return Token(traffic, slots)

    def in_flight(self, way: Way) -> int:
        """Return how many copies are under way or have a token.

        Args:
            way: "h2d" to the device, "d2h" from it.

        Raises:
            ConfigError: If there is no such way.
        """
        return self._slots_of(way).in_flight

    def _slots_of(self, way: Way) -> Slots:
        check_value("way", way, Way)
        return self._traffic.h2d if way == "h2d" else self._traffic.d2h

    @property
    def denied_count(self) -> int:
        """Requests that were denied, for whatever reason."""
        traffic = self._traffic
        denied = traffic.h2d.denied_count + traffic.d2h.denied_count
        return denied + traffic.suppressed_count
