"""Who asked that whose blocks stay on a device that several runtimes share.

Only the books: nothing here moves a byte. Three reasons to stay, or to leave:

- a *keep* lasts as long as a `with`, and has a token of its own, so that any nesting
  works, and that it may be ended again where an interrupt came;
- a *reservation* lasts until it is released or its tenant leaves; a tenant has one;
- a *guest* takes only what nobody holds, and is gone when its last `with` ends; these
  have tokens, too.

A tenant is named by a number here. Not thread-safe: callers hold the device's lock.
"""

import enum
from dataclasses import dataclass

from stagehand.errors import ConfigError, StagehandInternalError

__all__ = ["Holds", "Reservation", "ResidentPriority"]


class ResidentPriority(enum.Enum):
    """How firmly a reservation holds."""

    PRIMARY = "primary"
    """Never evicted for another model."""
    SECONDARY = "secondary"
    """Evicted only when another model's load could not be met otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Device bytes that one tenant has for itself."""

    nbytes: int
    priority: ResidentPriority
    asked_for: bool = True
    """If not, a pipeline made it for a small model: it ends when the user wants
    otherwise."""

    @property
    def is_firm(self) -> bool:
        """Whether nobody may take of it."""
        return self.priority is ResidentPriority.PRIMARY


class Holds:
    """Keeps, reservations and guests of one device.

    Invariants: a guest has no reservation; no set of tokens is empty.
    """

    def __init__(self) -> None:
        self._keeps: dict[int, set[object]] = {}
        self._guests: dict[int, set[object]] = {}
        self._reserved: dict[int, Reservation] = {}

    def __repr__(self) -> str:
        return (
            f"Holds({len(self._reserved)} reserved, {len(self._keeps)} kept,"
            f" {len(self._guests)} guests)"
        )

    @property
    def reserved(self) -> dict[int, Reservation]:
        """The reservations, by tenant, oldest first."""
        return dict(self._reserved)

    @property
    def kept(self) -> frozenset[int]:
        """Tenants that somebody keeps."""
        return frozenset(self._keeps)

    @property
    def guests(self) -> frozenset[int]:
        """Tenants that are guests."""
        return frozenset(self._guests)

    @property
    def held(self) -> frozenset[int]:
        """Tenants of which nobody may take anything."""
        return self.kept | self.firm

    @property
    def firm(self) -> frozenset[int]:
        """Tenants with a reservation of which nobody may take."""
        return frozenset(who for who, held in self._reserved.items() if held.is_firm)

    def keep(self, who: int, keep: object) -> None:
        """Begin a keep.

        Args:
            who: Of which tenant.
            keep: Its token.
        """
        self._keeps.setdefault(who, set()).add(keep)

    def end_keep(self, who: int, keep: object) -> None:
        """End a keep. Idempotent; of a tenant that has left, nothing is left to end."""
        _take_out(self._keeps, who, keep)

    def reserve(self, who: int, reservation: Reservation) -> None:
        """Make a tenant's reservation, or replace it.

        Raises:
            ConfigError: If the tenant is a guest.
        """
        if who in self._guests:
            raise ConfigError(
                "a guest cannot have a reservation: it uses only what is not reserved;"
                " leave as_guest() first"
            )
        self._reserved[who] = reservation

    def release(self, who: int) -> bool:
        """End a tenant's reservation; return whether there was one."""
        return self._reserved.pop(who, None) is not None

    def begin_guest(self, who: int, visit: object) -> None:
        """Let a tenant be a guest.

        Args:
            who: Which one.
            visit: A token.

        Raises:
            ConfigError: If it has a reservation that was asked for.
        """
        reservation = self._reserved.get(who)
        if reservation is not None and reservation.asked_for:
            raise ConfigError(
                "a model with a reservation cannot be a guest: call"
                " release_reservation() first"
            )
        self._reserved.pop(who, None)
        self._guests.setdefault(who, set()).add(visit)

    def is_last(self, who: int, visit: object) -> bool:
        """Whether a tenant is a guest until this ends, and no longer."""
        return self._guests.get(who) == {visit}

    def end_guest(self, who: int, visit: object) -> None:
        """End what `begin_guest` began. Idempotent."""
        _take_out(self._guests, who, visit)

    def forget(self, who: int) -> None:
        """A tenant leaves: its reservation ends, and so does all else."""
        self._reserved.pop(who, None)
        self._keeps.pop(who, None)
        self._guests.pop(who, None)

    def why(self, who: int) -> str:
        """Return why a tenant's blocks stay, in a word or two."""
        reservation = self._reserved.get(who)
        reasons = []
        if reservation is not None and reservation.asked_for:
            reasons.append(f"reserved, {reservation.priority.name}")
        elif reservation is not None:
            reasons.append("small")
        if who in self._keeps:
            reasons.append("kept resident")
        if who in self._guests:
            reasons.append("a guest")
        return " and ".join(reasons) or "not held"

    def check(self) -> None:
        """Raise if an invariant is broken.

        Raises:
            StagehandInternalError: Naming it.
        """
        both = self._reserved.keys() & self._guests.keys()
        counts = [len(each) for each in (*self._keeps.values(), *self._guests.values())]
        if both or min(counts, default=1) < 1:
            raise StagehandInternalError(f"{self!r} has counts {counts}, both {both}")


def _take_out(tokens: dict[int, set[object]], who: int, token: object) -> None:
    left = tokens.get(who, set()) - {token}
    if left:
        tokens[who] = left
    else:
        tokens.pop(who, None)
