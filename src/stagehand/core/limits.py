"""How much look-ahead and traffic is allowed: a value that one part publishes.

Whoever arbitrates replaces the value; every consumer takes the smaller of its own
configuration and the limit. Nobody writes into another object's fields.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from stagehand.errors import ConfigError

__all__ = ["NO_LIMITS", "Bounds", "Limits", "Priority", "effective", "tightest"]


class Priority(IntEnum):
    """How urgent work is. The first two are never denied a copy."""

    CRITICAL = 0
    """Compute waits for it now."""
    REQUIRED = 1
    """It must happen, as when a block that stays comes back. The default of grants."""
    SPECULATIVE = 2
    """A prefetch: useful if there is room."""
    BACKGROUND = 3
    """Whenever the lane is idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Upper bounds on speculative work and traffic; `None` is no limit.

    Raises:
        ConfigError: If a number would stop demand work for ever.
    """

    lookahead_blocks: int | None = None
    """Blocks that may be loaded ahead of use. Zero: each is loaded when it is used."""
    inflight_h2d: int | None = None
    """Copies to the device that may be under way at once; at least one."""
    inflight_d2h: int | None = None
    """Copies from the device that may be under way at once; at least one."""
    suppress_speculative: bool = False
    """Whether only demand work may start."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _check("lookahead_blocks", self.lookahead_blocks, smallest=0)
        _check("inflight_h2d", self.inflight_h2d, smallest=1)
        _check("inflight_d2h", self.inflight_d2h, smallest=1)


def _check(name: str, value: int | None, *, smallest: int) -> None:
    if value is not None and value < smallest:
        raise ConfigError(
            f"limit {name} is {value}: expected at least {smallest}, or None for no "
            "limit"
        )


def effective(config_value: int, limit: int | None) -> int:
    """Return what a consumer may use: the smaller of its configuration and the limit.

    Args:
        config_value: The consumer's own setting.
        limit: A field of `Limits`; `None` is no limit.
    """
    return config_value if limit is None else min(config_value, limit)


NO_LIMITS = Limits()
"""What limits nothing."""


def tightest(one: Limits, other: Limits) -> Limits:
    """Return the limits that allow only what both allow."""
    if one is NO_LIMITS or one is other:
        return other
    if other is NO_LIMITS:
        return one
    return Limits(
        lookahead_blocks=_smaller(one.lookahead_blocks, other.lookahead_blocks),
        inflight_h2d=_smaller(one.inflight_h2d, other.inflight_h2d),
        inflight_d2h=_smaller(one.inflight_d2h, other.inflight_d2h),
        suppress_speculative=one.suppress_speculative or other.suppress_speculative,
    )


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


class Bounds:
    """The limits that hold for one consumer: the tightest of all that are posted.

    The consumer owns it and reads `current`; whoever arbitrates posts and withdraws.

    Args:
        changed: Called with `current` whenever it has changed.

    Attributes:
        current: What holds now; limits nothing while nothing is posted.
    """

    def __init__(self, changed: Callable[[Limits], None] | None = None) -> None:
        self.current = NO_LIMITS
        self._changed = changed
        self._posted: dict[object, Limits] = {}

    def __repr__(self) -> str:
        """Show what holds."""
        return f"Bounds({self.current} by {len(self._posted)})"

    def post(self, who: object, limits: Limits) -> None:
        """Set or replace what one party asks for."""
        self._posted[who] = limits
        self._renew()

    def withdraw(self, who: object) -> None:
        """Lift what one party asked for; without any, nothing happens."""
        if self._posted.pop(who, None) is not None:
            self._renew()

    def _renew(self) -> None:
        limits = NO_LIMITS
        for each in tuple(self._posted.values()):
            limits = tightest(limits, each)
        if limits != self.current:
            self.current = limits
            if self._changed is not None:
                self._changed(limits)
