"""Who is at a device, and who may have how much of it: the books, without a lock.

Nothing here waits or moves a byte. Callers hold the device's lock; see `shared.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from stagehand.core.turn import HERE
from stagehand.errors import StagehandOOMError
from stagehand.residency.holds import Holds, Reservation, ResidentPriority
from stagehand.residency.shares import Claim, Share, divide
from stagehand.residency.turns import Turns
from stagehand.units import format_at_least, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from stagehand.core.ledger import Account, SubAccount

__all__ = ["AUTOGRAD", "AnyThread", "Holding", "Seat", "Seats", "Tenant"]

AnyThread = Any  # the house lets only the worker group name its type

AUTOGRAD: AnyThread = object()
"""Stands for the thread of autograd's own that ends a failed backward, whichever."""

_GIVES_MORE = ", and gives up more only in the thread that runs it"


class Tenant(Protocol):
    """What the device needs of a runtime."""

    name: str
    account: SubAccount

    def claim(self) -> Claim:
        """Say what memory it could use; the same object as long as nothing changed."""

    def give_up(self, keep_bytes: int, *, leaves: bool = False) -> bool:
        """Free device memory until no more than `keep_bytes` are held.

        What is in use stays, even if that is more.

        Args:
            keep_bytes: What may be kept.
            leaves: Whether trained tensors that stay on the device leave as well, away
                from their optimizer's state.

        Returns:
            False, at once, if another thread runs it.
        """

    def warm(self) -> None:
        """Begin to load what its next pass begins with, unless it runs."""

    def owner(self) -> AnyThread | None:
        """Return the thread that has its lock, if one has."""

    def ends_alone(self) -> bool:
        """Return whether its pass ends even if the thread that has its lock waits."""

    def may_stand_back(self) -> bool:
        """Return whether it lets others go first if it is refused room to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What one model holds of a device, and why."""

    name: str
    held_bytes: int
    """Device bytes that it holds now."""
    limit_bytes: int
    """The most that it may hold while it runs."""
    kept_bytes: int
    """How many of them it keeps while others run."""
    why: str
    """"not held", "reserved, PRIMARY", "reserved, SECONDARY", "small" (of a pipeline),
    "kept resident" or "a guest"."""

    def __str__(self) -> str:
        """Return a line of text."""
        return (
            f"{self.name} holds {format_bytes(self.held_bytes)}, keeps"
            f" {format_bytes(self.kept_bytes)} ({self.why})"
        )


class Seat:
    """One tenant's place at the device."""

    __slots__ = (
        *("asked", "claim", "gave", "heard", "leaves", "limit", "number", "refusing"),
        *("running", "tenant", "thread", "waits"),
    )

    def __init__(self, number: int, tenant: Tenant) -> None:
        self.number = number
        self.tenant = tenant
        self.claim = tenant.claim()
        self.limit = 0
        self.running = False
        self.leaves = False  # the device, when its pass ends: it was a guest
        self.thread: AnyThread | None = None  # that runs its pass, or waits to begin
        self.waits = False  # for room
        self.asked = False  # to give up, while it waits, all that it can
        self.gave = False  # all that, when it was asked
        self.heard = 0  # how much had changed on the device when it looked last
        self.refusing: list[Seat] = []  # that another thread had then

    @property
    def held(self) -> int:
        """Bytes that it holds now."""
        return self.tenant.account.held_bytes

    def runs_elsewhere(self) -> bool:
        """Whether another thread is in a pass of it, or waits to begin one."""
        return self.thread not in (None, HERE.thread)

    def taken_by(self) -> AnyThread | None:
        """Return the thread that runs its pass, or has its lock for anything else."""
        if self.tenant.ends_alone():
            return AUTOGRAD
        return self.thread or self.tenant.owner()

    def takes(self, share: Share) -> int:
        """Return the bytes that a pass of another tenant must leave it."""
        if not self.runs_elsewhere():
            return share.kept
        return self.held if self.waits else max(self.limit, self.held)

    def end_wait(self) -> None:
        """Note that it waits no more: it has its room, or an error."""
        self.waits = self.asked = self.gave = False
        self.thread = None
        self.refusing = []


class Seats:
    """Tenants, their holds and their turns, and what each may have.

    Args:
        account: Of the device's memory; its limit is the cap.
        place: The device, for errors.
    """

    def __init__(self, account: Account, place: torch.device) -> None:
        self.account = account
        self.holds = Holds()
        self._place = place
        self._seats: dict[int, Seat] = {}
        self._numbers = count()
        self._turns = Turns()
        self._apart = False  # some run at once
        self._sinks = False  # the cap, when passes under way have ended
        self._shares: dict[int, Share] | None = None

    def __repr__(self) -> str:
        return f"Seats({len(self)} taken of {self.account!r})"

    def __len__(self) -> int:
        """How many tenants there are."""
        return len(self._seats)

    def __getitem__(self, number: int) -> Seat:
        """Return a tenant's place."""
        return self._seats[number]

    def get(self, number: int) -> Seat | None:
        """Return a tenant's place, or None if it has left."""
        return self._seats.get(number)

    def all(self) -> list[Seat]:
        """Return all places."""
        return list(self._seats.values())

    def others(self, seat: Seat) -> list[Seat]:
        """Return all places but one."""
        return [other for other in self._seats.values() if other is not seat]

    # Who is here

    def new_number(self) -> int:
        """Return a number that nobody has had."""
        return next(self._numbers)

    def add(self, number: int, tenant: Tenant) -> Seat:
        """Give a tenant a place."""
        seat = self._seats[number] = Seat(number, tenant)
        self.renew()
        return seat

    def forget(self, number: int) -> bool:
        """Take a tenant's place, and all that was held for it; False if it had none."""
        seat = self._seats.get(number)
        if seat is not None:
            seat.tenant.account.detach()
        self.holds.forget(number)
        self._turns.forget(number)
        self._seats.pop(number, None)
        self._apart = False
        self.renew()
        return seat is not None

    def renew(self) -> None:
        """Set the cap anew, for tenants or their budgets have changed.

        It is the largest budget, but not less than what passes under way were promised,
        beside what the others do not give up for them, until these have ended.
        """
        for seat in self._seats.values():
            seat.claim = seat.tenant.claim()
        cap = max((seat.claim.budget for seat in self._seats.values()), default=0)
        promised = 0
        if any(seat.running for seat in self._seats.values()):
            promised = sum(map(self._firm_bytes, self._seats.values()))
        self._sinks = promised > cap
        self.account.set_limit(max(cap, promised))
        self._shares = None

    def _firm_bytes(self, seat: Seat) -> int:
        """Return what a tenant was promised, or has and does not give up for others."""
        if seat.running or (seat.thread is not None and not seat.waits):
            return max(seat.limit, seat.held)
        if seat.waits or seat.number in self.holds.held:
            return seat.held
        return min(seat.claim.bound, seat.held)

    def run_at_once(self) -> None:
        """Note that two tenants run at once: each needs a ring of its own."""
        if not self._apart:
            self._apart, self._shares = True, None

    def note_turn(self, seat: Seat) -> None:
        """Note that a tenant's pass begins."""
        if self._turns.begin(seat.number):
            self._shares = None
        self.note_claim(seat)

    def note_end(self, seat: Seat) -> None:
        """Note that a tenant's pass has ended."""
        seat.running, seat.thread = False, None
        self.note_claim(seat)  # who takes gradients keeps what stays
        if self._sinks:
            self.renew()

    def note_claim(self, seat: Seat) -> None:
        """Look again at what a tenant could use: its pass may have changed that."""
        claim = seat.tenant.claim()
        if claim is not seat.claim:
            seat.claim, self._shares = claim, None

    def coming(self, seat: Seat) -> Seat | None:
        """Return which other tenant takes its turn after this pass, if one will."""
        number = self._turns.coming()
        if self._apart or number is None or number == seat.number:
            return None
        return self._seats.get(number)

    # Who may have how much

    def share_of(self, seat: Seat) -> Share:
        """Return what a tenant may have, and keep while others run."""
        return self._divided()[seat.number]

    def _divided(self) -> dict[int, Share]:
        if self._shares is None:
            claims = {
                number: replace(seat.claim, passes=self._turns.passes(number))
                for number, seat in self._seats.items()
            }
            self._shares = divide(
                self.account.limit_bytes,
                claims,
                fixed=self._fixed_bytes(claims),
                guests=self.holds.guests,
                apart=self._apart,
            )
        return self._shares

    def _fixed_bytes(self, claims: dict[int, Claim]) -> dict[int, int]:
        """Return the bytes that reserved and kept tenants have for themselves.

        One that is kept leaves each other one what that needs to run, unless it was
        reserved, PRIMARY.
        """
        kept = sorted(self.holds.kept - self.holds.firm)
        held = self.holds.reserved
        alone = {who: held[who] for who in held if who not in kept}
        fixed = self._there_for(alone, claims)
        fixed.update((number, claims[number].floor) for number in kept)
        for number in kept:
            claim = claims[number]
            others = {n: other for n, other in claims.items() if n != number}
            room = self.account.limit_bytes - _needed(others, fixed)
            fixed[number] = max(claim.bound, min(claim.most, room))
        return fixed

    def _there_for(
        self, reserved: dict[int, Reservation], claims: dict[int, Claim]
    ) -> dict[int, int]:
        """Return what there is for reservations, oldest first: less than was reserved
        where the cap has sunk below their sum.

        The newest of those that give way is the first to be cut, and the oldest firm
        one the last, each to what its model needs to run.
        """
        there = {n: min(held.nbytes, claims[n].budget) for n, held in reserved.items()}
        newest_first = list(reversed(reserved))
        for number in sorted(newest_first, key=lambda n: reserved[n].is_firm):
            excess = sum(there.values()) - self.account.limit_bytes
            there[number] -= max(0, min(excess, there[number] - claims[number].floor))
        return there

    def limit_now(self, seat: Seat) -> int:
        """Return what a tenant may hold beside those who run, and those who stay."""
        cap = self.account.limit_bytes
        taken = sum(other.takes(self.share_of(other)) for other in self.others(seat))
        limit = min(self.share_of(seat).limit, cap - taken)
        if limit >= seat.claim.floor:
            return limit
        return min(seat.claim.floor, self.most(seat))

    def most(self, seat: Seat) -> int:
        """Return what a tenant could hold if others gave up all that they can."""
        return self.account.limit_bytes - sum(self._hard(seat).values())

    def promised(self, seat: Seat) -> int:
        """Return how many bytes others, who run, may still take by their limits."""
        return sum(
            other.takes(self.share_of(other)) - other.held
            for other in self.others(seat)
            if other.runs_elsewhere()
        )

    def there(self, seat: Seat) -> int:
        """Return what a tenant could hold if nobody gave up anything."""
        return seat.held - self.missing(self.promised(seat))

    def _hard(self, seat: Seat) -> dict[int, int]:
        """Return, by tenant, the bytes that the others cannot be made to give up."""
        stay = self._staying(seat)
        hard = {}
        for other in self.others(seat):
            hard[other.number] = min(other.claim.bound, other.held)
            if other.number in stay or other.runs_elsewhere():
                hard[other.number] = other.takes(self.share_of(other))
        return {number: nbytes for number, nbytes in hard.items() if nbytes}

    def budget_for(self, seat: Seat, nbytes: int, *, at_once: bool = False) -> int:
        """See `SharedDevice.budget_for`."""
        hard = self._hard(seat)
        if at_once:  # of a larger cap who is kept takes all that it can use
            for number in self.holds.kept - self.holds.firm - {seat.number}:
                most = self._seats[number].claim.most
                hard[number] = max(hard.get(number, 0), most)
        beside = nbytes + sum(hard.values())
        cap = max((other.claim.budget for other in self.others(seat)), default=0)
        return nbytes if beside <= cap else beside

    def _staying(self, seat: Seat) -> frozenset[int]:
        """Tenants of which this one may take nothing."""
        stay = self.holds.held
        if seat.number in self.holds.guests:
            stay |= self.holds.reserved.keys()
        return stay - {seat.number}

    def givers(self, seat: Seat) -> Iterator[tuple[Seat, int]]:
        """Yield tenants that can give up memory, those first that are asked first, and
        what each keeps in any case."""
        stay = self._staying(seat)
        gives_way = self.holds.reserved.keys() - stay
        idle = [other for other in self.others(seat) if not other.runs_elsewhere()]
        for other in sorted(
            idle,
            key=lambda other: (
                other.number in gives_way,
                other.number in stay,
                other.held <= self.share_of(other).kept,
                -other.held,
            ),
        ):
            least = self.share_of(other).kept if other.number in stay else 0
            if other.held > least:
                yield other, least

    def shrinking(self, seat: Seat) -> list[Seat]:
        """Return others that hold more than their pass may, which has just begun in
        another thread: they are about to give that up."""
        return [
            other
            for other in self.others(seat)
            if other.running and other.runs_elsewhere() and other.held > other.limit
        ]

    def ending(self, seat: Seat) -> list[Seat]:
        """Return others that hold something in a pass of another thread: when that has
        ended, they can be asked for it. Of those that wait to begin one, all is asked.
        """
        found = [o for o in self.others(seat) if o.runs_elsewhere() and o.held]
        for other in found:
            other.asked = other.waits
        return [other for other in found if not other.gave]

    def missing(self, nbytes: int) -> int:
        """Return how much others must give up before a tenant can have more bytes."""
        return self.account.held_bytes + nbytes - self.account.limit_bytes

    def least(self, seat: Seat) -> int:
        """Return what a tenant that waits for room gives up for nobody."""
        if seat.number in self.holds.held:
            return self.share_of(seat).kept
        return seat.claim.bound

    def at_ease(self, seat: Seat) -> int:
        """Return what it keeps as long as whoever it waits for can go on."""
        if seat.number in self.holds.reserved:
            return self.share_of(seat).kept
        return max(self.least(seat), seat.claim.fixed)

    # Holds

    def keep(self, number: int, keep: object) -> None:
        """See `SharedDevice.keep`."""
        self.holds.keep(number, keep)
        self._shares = None

    def end_keep(self, number: int, keep: object) -> None:
        """End what `keep` began. Idempotent."""
        self.holds.end_keep(number, keep)
        self._shares = None

    def reserve(
        self, seat: Seat, priority: ResidentPriority, *, asked_for: bool
    ) -> int:
        """See `SharedDevice.reserve`."""
        seat.claim = claim = seat.tenant.claim()
        cap = self.account.limit_bytes
        reserved = self._reserved_bytes(but=seat.number)
        claims = {
            other.number: other.claim
            for other in self.others(seat)
            if other.number not in self.holds.reserved
        }
        needed = _needed(claims, {})
        wanted = claim.weights
        if wanted > claim.budget:
            wanted = max(claim.floor, min(claim.budget, cap - reserved - needed))
        if priority is not ResidentPriority.PRIMARY:  # it gives way, but not to guests
            guests = {n: claims[n] for n in claims.keys() & self.holds.guests}
            needed = _needed(guests, {})
        missing = wanted + reserved + needed - cap
        if missing > 0:
            text = self._reservations(but=seat.number)
            if needed:
                needs = f"{format_at_least(needed)} that other models need to run"
                text = f"{text}; {needs}" if text else needs
            raise self._refusal(seat, missing, text, wanted)
        reservation = Reservation(nbytes=wanted, priority=priority, asked_for=asked_for)
        self.holds.reserve(seat.number, reservation)
        self._shares = None
        return wanted

    def release(self, number: int) -> None:
        """End a reservation; without one nothing happens."""
        self.holds.release(number)
        self._shares = None

    def begin_guest(self, seat: Seat, visit: object) -> None:
        """See `SharedDevice.begin_guest`."""
        seat.claim = seat.tenant.claim()
        stay = self.holds.reserved.keys() | self.holds.held
        taken = {
            other: self.share_of(other).kept
            if other.number in stay
            else min(other.claim.bound, other.held)
            for other in self.others(seat)
        }
        missing = seat.claim.floor + sum(taken.values()) - self.account.limit_bytes
        self.holds.begin_guest(seat.number, visit)
        self._shares = None
        if missing > 0:
            self.holds.end_guest(seat.number, visit)
            holders = "; ".join(str(self.holding(o)) for o, n in taken.items() if n)
            raise self._refusal(seat, missing, holders)

    def end_guest(self, seat: Seat, visit: object) -> None:
        """End what `begin_guest` began: at last, the tenant leaves. Idempotent."""
        if self.holds.is_last(seat.number, visit):
            seat.leaves = True
        self.holds.end_guest(seat.number, visit)
        self._shares = None

    def check_floor(self, seat: Seat) -> None:
        """Raise if reservations leave a tenant less than it needs to run."""
        firm = self._reserved_bytes(but=seat.number, firm=True)
        missing = seat.claim.floor + firm - self.account.limit_bytes
        if firm and missing > 0:
            raise self._refusal(seat, missing, self._reservations())

    def _reserved_bytes(self, *, but: int, firm: bool = False) -> int:
        return sum(
            held.nbytes
            for number, held in self.holds.reserved.items()
            if number != but and (held.is_firm or not firm)
        )

    # Telling

    def holding(self, seat: Seat) -> Holding:
        """Return what a tenant holds, and why."""
        share = self.share_of(seat)
        return Holding(
            name=seat.tenant.name,
            held_bytes=seat.held,
            limit_bytes=share.limit,
            kept_bytes=share.kept,
            why=self.holds.why(seat.number),
        )

    def no_room(self, seat: Seat) -> StagehandOOMError:
        """Return an error that says who leaves a tenant less than it needs to run."""
        hard = self._hard(seat)
        for other in self.others(seat):
            if other.running:  # it was asked, and is in the middle of its pass
                hard[other.number] = max(other.held, hard.get(other.number, 0))
        missing = seat.claim.floor + sum(hard.values()) - self.account.limit_bytes
        text = "; ".join(
            f"{self.holding(other)}{_GIVES_MORE if other.runs_elsewhere() else ''}"
            for other in self.others(seat)
            if other.number in hard or other.running or other.taken_by()
        )
        return self._refusal(seat, max(1, missing), text)

    def _reservations(self, but: int = -1) -> str:
        return "; ".join(
            f"{format_bytes(held.nbytes)} reserved for"
            f" {self._seats[number].tenant.name}, {held.priority.name}"
            for number, held in self.holds.reserved.items()
            if number != but
        )

    def _refusal(
        self, seat: Seat, missing: int, holders: str, wanted: int | None = None
    ) -> StagehandOOMError:
        cap = self.account.limit_bytes
        needed = seat.claim.floor if wanted is None else wanted
        return StagehandOOMError(
            f"{seat.tenant.name} needs {format_at_least(needed)} of the"
            f" {format_bytes(cap)} that models on {self._place} share, and"
            f" {format_at_least(missing)} are missing: {holders or 'too few in all'};"
            " release a reservation, shut a model down, or raise a vram_budget",
            needed_bytes=cap + missing,
            limit_bytes=cap,
        )


def _needed(claims: Mapping[int, Claim], fixed: Mapping[int, int]) -> int:
    """Return what models need so that each can run in its turn.

    Args:
        claims: By model.
        fixed: What some keep while others run; the rest keep what they cannot give up.
    """
    turn = whole = 0
    for number, claim in claims.items():
        stays = fixed.get(number, claim.bound)
        turn = max(turn, claim.floor - stays)
        whole += stays
    return turn + whole
