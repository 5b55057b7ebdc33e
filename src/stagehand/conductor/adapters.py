"""Thin fronts through which limits reach what is attached to a conductor.

Each posts limits where a runtime reads them and takes them back; none writes a field of
the runtime. So a detach restores what was, at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stagehand.core.clock import PhaseClock
    from stagehand.core.ledger import Account
    from stagehand.core.limits import Bounds, Limits
    from stagehand.core.traffic import Traffic
    from stagehand.core.transfer import TransferEngine

__all__ = ["Adapter", "Conducted", "LinkNeed", "PinnedUse", "RuntimeAdapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkNeed:
    """What one cycle of a model asks of the link, as far as it is measured."""

    compute_seconds: float
    """How long it computes, waits for copies left out."""
    loads: int
    """Copies to the device."""


@runtime_checkable
class Conducted(Protocol):
    """What a runtime must offer to be attached: no more than an adapter touches."""

    @property
    def bounds(self) -> Bounds:
        """Where it reads its limits."""

    @property
    def engine(self) -> TransferEngine:
        """What it copies with."""

    @property
    def clock(self) -> PhaseClock | None:
        """Its steps and phases, if it knows of any."""

    @property
    def kind(self) -> str:
        """What it is called in records: "stagehand", "activation_stagehand"."""

    @property
    def is_open(self) -> bool:
        """Whether it was not shut down."""

    @property
    def window(self) -> int:
        """Blocks that it is configured to load ahead; 0 if it has none."""

    @property
    def device_account(self) -> Account | None:
        """The account of its device memory, or the whole that it shares with others."""

    def snapshot(self) -> dict[str, Any]:
        """Return a few numbers for the record."""

    def link_need(self) -> LinkNeed | None:
        """Return what it asks of the link, once that is known."""


class Adapter(Protocol):
    """What the conductor needs of an adapter."""

    name: str

    def attach(self, traffic: Traffic) -> None:
        """Join what the device's users share."""

    def post(self, limits: Limits) -> None:
        """Let limits hold from now on."""

    def withdraw(self) -> None:
        """Take the limits back."""

    def detach(self) -> None:
        """Leave everything as it was. Idempotent."""

    def snapshot(self) -> dict[str, Any]:
        """Return a few numbers for the record."""

    def pinned_bytes(self) -> int:
        """Return the page-locked memory that it uses."""


class RuntimeAdapter:
    """The front of a runtime for weights or activations.

    Args:
        runtime: What is attached.
        name: Its name in records.
    """

    def __init__(self, runtime: Conducted, name: str) -> None:
        self.name = name
        self.runtime = runtime

    def __repr__(self) -> str:
        return f"RuntimeAdapter({self.name!r})"

    def attach(self, traffic: Traffic) -> None:
        """See `Adapter.attach`."""
        self.runtime.engine.join(traffic)

    def post(self, limits: Limits) -> None:
        """See `Adapter.post`."""
        self.runtime.bounds.post(self, limits)

    def withdraw(self) -> None:
        """See `Adapter.withdraw`."""
        self.runtime.bounds.withdraw(self)

    def detach(self) -> None:
        """See `Adapter.detach`."""
        self.runtime.engine.leave()
        self.withdraw()

    def snapshot(self) -> dict[str, Any]:
        """See `Adapter.snapshot`."""
        return self.runtime.snapshot()

    def pinned_bytes(self) -> int:
        """See `Adapter.pinned_bytes`."""
        return int(self.runtime.snapshot().get("pinned_bytes", 0))


class PinnedUse:
    """The front of a quantized store: it reports what it has pinned; nothing to turn.

    Args:
        name: Its name in records.
        read: Returns numbers, "pinned_bytes" among them.
    """

    def __init__(self, name: str, read: Callable[[], Mapping[str, Any]]) -> None:
        self.name = name
        self._read = read

    def __repr__(self) -> str:
        return f"PinnedUse({self.name!r})"

    def attach(self, traffic: Traffic) -> None:
        """See `Adapter.attach`."""

    def post(self, limits: Limits) -> None:
        """See `Adapter.post`."""

    def withdraw(self) -> None:
        """See `Adapter.withdraw`."""

    def detach(self) -> None:
        """See `Adapter.detach`."""

    def snapshot(self) -> dict[str, Any]:
        """See `Adapter.snapshot`."""
        return dict(self._read())

    def pinned_bytes(self) -> int:
        """See `Adapter.pinned_bytes`."""
        return int(self._read().get("pinned_bytes", 0))
