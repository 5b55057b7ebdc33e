"""Who may have how much of a device's memory: a front over the ledger's accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stagehand.core.clock import Phase
from stagehand.core.ledger import Grant, Ledger, Mode
from stagehand.core.limits import Priority
from stagehand.errors import ConfigError, StagehandOOMError
from stagehand.settings import check_member, check_value
from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagehand.core.device import Device
    from stagehand.core.ledger import Account

__all__ = ["Budget"]

Kind = Literal["device", "pinned"]


class Budget:
    """Reservations of device and of pinned memory.

    It allocates nothing: a grant says that the bytes may be taken, until it ends.

    Args:
        device: Whose memory pressure is read.
        ledger: The accounts.
        trace: Is told of requests.
    """

    def __init__(
        self, device: Device, ledger: Ledger, trace: Callable[..., None]
    ) -> None:
        self._device = device
        self._trace = trace
        self.ledger = ledger

    def __repr__(self) -> str:
        return f"Budget({self.ledger!r})"

    def reserve(
        self,
        nbytes: int,
        holder: str,
        *,
        kind: Kind = "device",
        mode: Mode = Mode.HARD,
        priority: Priority = Priority.REQUIRED,
        until: Phase | None = None,
        recall: Callable[[Grant], None] | None = None,
    ) -> Grant | None:
        """Return a grant, or None; see `stagehand.core.ledger.Account.grant`.

        Args:
            nbytes: How many bytes.
            holder: Who will hold them.
            kind: "device" or "pinned" memory.
            mode: How the request is answered.
            priority: How urgent it is.
            until: The phase whose end ends the grant; so does the end of the step, or
                of the next one where none is open. None keeps it until it is released.
            recall: Called when somebody more urgent needs the bytes.

        Raises:
            ConfigError: If a value is of another type, or `nbytes` is negative.
        """
        check_value("nbytes", nbytes, int)
        check_value("holder", holder, str)
        if nbytes < 0:
            raise ConfigError(f"nbytes is {nbytes}: expected a whole number, 0 or more")
        check_member("mode", mode, Mode)
        check_member("priority", priority, Priority)
        if until is not None:
            check_member("until", until, Phase)
        grant = self._account(kind).grant(
            nbytes, holder, mode=mode, priority=priority, until=until, recall=recall
        )
        self._trace(
            "reservation",
            holder=holder,
            kind=kind,
            mode=mode.name,
            asked_bytes=nbytes,
            granted_bytes=None if grant is None else grant.nbytes,
        )
        return grant

    def reserve_or_raise(self, nbytes: int, holder: str) -> Grant:
        """Return a grant of device memory, up to the hard cap.

        Raises:
            StagehandOOMError: If it does not fit; it names who holds what.
        """
        account = self.ledger.device
        grant = self.reserve(nbytes, holder, mode=Mode.BURST)
        if grant is not None:
            return grant
        raise StagehandOOMError(
            f"{holder!r} needs {format_bytes(nbytes)} of device memory, but of"
            f" {format_bytes(account.limit_bytes)} only"
            f" {format_bytes(account.room_for(holder, Mode.BURST))} are free; held by"
            f" {_holders(account)}; raise the conductor's cap or lower a budget",
            needed_bytes=account.promised_bytes + nbytes,
            limit_bytes=account.limit_bytes,
        )

    def check_pinned(self, account: Account, name: str) -> None:
        """Refuse what is to be attached where more is page-locked than allowed.

        Raises:
            StagehandOOMError: It names who holds what.
        """
        if account.overdraft_bytes:
            raise StagehandOOMError(
                f"{name!r} cannot be attached: {format_bytes(account.held_bytes)} of"
                f" pinned memory are held, but {format_bytes(account.limit_bytes)} are"
                f" allowed; held by {_holders(account)}; raise pinned_cap_mb or lower a"
                " ram_budget",
                needed_bytes=account.held_bytes,
                limit_bytes=account.limit_bytes,
            )

    def _account(self, kind: Kind) -> Account:
        check_value("kind", kind, Kind)
        return self.ledger.device if kind == "device" else self.ledger.pinned

    def allocated_bytes(self) -> int | None:
        """Return the device bytes that the process has allocated, if it is known."""
        return self._device.allocated_bytes()

    def pressure(self) -> float | None:
        """Return the allocated part of the hard cap, or None if it is not known."""
        allocated, cap = self._device.allocated_bytes(), self.ledger.device.limit_bytes
        return None if allocated is None or not cap else allocated / cap

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests that got all, a part, and nothing, in both accounts."""
        device, pinned = self.ledger.device, self.ledger.pinned
        return (
            device.grant_count + pinned.grant_count,
            device.partial_count + pinned.partial_count,
            device.deny_count + pinned.deny_count,
        )


def _holders(account: Account) -> str:
    held = [f"{who!r} {format_bytes(n)}" for who, n in account.holders().items()]
    return ", ".join(held) or "nobody"
