"""How much look-ahead and traffic is allowed: a value that one part publishes.

Whoever arbitrates replaces the value; every consumer takes the smaller of its own
configuration and the limit. Nobody writes into another object's fields.
"""

from dataclasses import dataclass

from stagehand.errors import ConfigError

__all__ = ["Limits", "effective"]


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
