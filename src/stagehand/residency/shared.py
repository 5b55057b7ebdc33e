"""One device and all runtimes that share it: one ledger, one pair of lanes, one cap.

Everything here is about who may have how much; memory is moved by the tenants.

Note "Locks". A runtime's own lock comes first, then the device's lock here, then, by
trying only, the locks of other runtimes, and last the accounts'. Nobody waits for a
runtime's lock while holding the device's. Waiting for room lets go of the device's lock
but not of the own runtime's, so before that everything is given up that others could
want, and a circle of such waits is an error, not a standstill. The garbage collector
ends a dropped model's tenant in the middle of anything, accounts' locks held: it waits
for nothing, and who is in the middle of something here sees to it later.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from stagehand.core.ledger import Ledger
from stagehand.errors import StagehandOOMError
from stagehand.residency.holds import Holds, Reservation, ResidentPriority
from stagehand.residency.shares import Claim, Share, divide
from stagehand.residency.turns import Turns
from stagehand.torch_private import waits_for_backward
from stagehand.units import format_at_least, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from stagehand.core.device import Device, Stream
    from stagehand.core.ledger import SubAccount

__all__ = [
    "Holding",
    "SharedDevice",
    "Tenant",
    "Turn",
    "shared_bytes",
    "shared_device",
]

_Thread = Any  # the house lets only the worker group name its type
_NO_CAP = 1 << 62
_LOOK_SECONDS = 0.05


class Tenant(Protocol):
    """What the device needs of a runtime."""

    name: str
    account: SubAccount

    def claim(self) -> Claim:
        """Say what it could use; the same object as long as nothing has changed."""

    def give_up(self, keep_bytes: int) -> bool:
        """Free device memory down to so many bytes, but for what is in use.

        Returns:
            False, at once, if another thread runs it.
        """

    def warm(self) -> None:
        """Begin to load what its next pass begins with, unless it runs."""

    def owner(self) -> _Thread | None:
        """Return the thread that has its lock, if one has."""

    def is_awaited_by(self, thread: _Thread) -> bool:
        """Whether a thread waits for its lock."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a tenant gets for a pass."""

    limit: int
    """Bytes that it may hold."""
    hands_over: bool
    """Whether another one is expected next: loading ahead for itself is in vain."""


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


class _Seat:
    """One tenant's place at the device."""

    __slots__ = (
        *("claim", "leaves", "limit", "number", "running", "tenant", "thread"),
        "waits",
    )

    def __init__(self, number: int, tenant: Tenant) -> None:
        self.number = number
        self.tenant = tenant
        self.claim = tenant.claim()
        self.limit = 0
        self.running = False
        self.waits = False
        self.leaves = False  # at the end of its pass: it was a guest
        self.thread: _Thread | None = None  # in whose pass it is

    @property
    def held(self) -> int:
        return self.tenant.account.held_bytes

    def runs_elsewhere(self) -> bool:
        """Whether another thread is in a pass of it, or waits to begin one."""
        return self.thread is not None and self.thread is not _me()

    def taken_by(self) -> _Thread | None:
        """Return whose pass it is in, or who has its lock for anything else."""
        return self.thread or self.tenant.owner()

    def takes(self, share: Share) -> int:
        """Return the bytes that a pass of another tenant must leave it."""
        if not self.runs_elsewhere():
            return share.kept
        return self.held if self.waits else max(self.limit, self.held)


def _me() -> _Thread:
    return threading.current_thread()


def _is_autograds(thread: _Thread) -> bool:
    """Whether it is a thread of autograd's own.

    Python calls threads that it has not started by this name.
    """
    name: str = thread.name
    return name.startswith("Dummy-")


class SharedDevice:
    """What all runtimes on one device have in common; see `shared_device()`.

    The cap, the limit of `ledger.device`, is the largest budget that any of the present
    tenants was given: a second runtime adds nothing to it. Each tenant's account is a
    part of it. Pinned memory has no cap of its own here: images stay for good, they do
    not take turns, so each runtime's own limit counts.

    A part that copies takes its pair of `streams()` for a `TransferEngine` of its own:
    then its copies queue in the same two lanes as all others'.

    Args:
        device: Which one.
        priority: Of the lanes' streams; lower runs first.
    """

    def __init__(self, device: Device, *, priority: int = -1) -> None:
        self.device = device
        self.ledger = Ledger(0, _NO_CAP)
        self._streams = device.new_stream(priority), device.new_stream(priority)
        # Reentrant: a tenant that gives up memory may find that its pass was left.
        self._changed = threading.Condition(threading.RLock())
        self._seats: dict[int, _Seat] = {}
        self._gone: deque[int] = deque()  # tenants that are to be forgotten
        self._latest = -1
        self._holds = Holds()
        self._turns = Turns()
        self._apart = False  # some run at once
        self._refused = False  # a tenant was asked while another thread had its lock
        self._shares: dict[int, Share] | None = None

    def __repr__(self) -> str:
        holdings = "; ".join(map(str, self.holdings()))
        return f"SharedDevice({self.ledger.device!r}: {holdings})"

    def streams(self) -> tuple[Stream, Stream]:
        """Return the copy streams to the device and from it, as objects of the caller's
        own: two threads must not enter one object at a time.
        """
        to_device, from_device = self._streams
        same = self.device.same_stream
        return same(to_device), same(from_device)

    # Who is here

    def name_for(self, name: str) -> str:
        """Return the name, with a number if it is taken."""
        with self._changed:
            taken = {seat.tenant.name for seat in self._seats.values()}
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} {number}"
        return free

    def join(self, tenant: Tenant) -> int:
        """Take in a tenant; return its number.

        Raises:
            StagehandOOMError: If reservations leave it less than it needs to run.
        """
        with self._changed:
            self._let_go()
            self._latest += 1
            if not self._seats:
                self.ledger.device.reset_peak()
            seat = _Seat(self._latest, tenant)
            self._seats[seat.number] = seat
            self._renew()
            firm = self._reserved_bytes(but=seat.number, firm=True)
            missing = seat.claim.floor + firm - self.ledger.device.limit_bytes
            if firm and missing > 0:
                error = self._refusal(seat, missing, self._reservations())
                self._gone.append(seat.number)
                self._let_go()
                raise error
            seat.limit = self._divided()[seat.number].limit
            return seat.number

    def leave(self, number: int) -> None:
        """Forget a tenant, and all that was held for it. Idempotent.

        Waits for nobody: if this or another thread is in the middle of something here,
        that is done at the next occasion.
        """
        self._gone.append(number)
        inside = self._changed._is_owned()  # type: ignore[attr-defined]
        if not inside and self._changed.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._changed.release()

    def _let_go(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            seat = self._seats.pop(number, None)
            if seat is not None:
                seat.tenant.account.detach()
                self._holds.forget(number)
                self._turns.forget(number)
                self._apart = False
                self._renew()
                self._changed.notify_all()

    def renew(self) -> None:
        """A tenant's budget has changed."""
        with self._changed:
            self._renew()

    def _renew(self) -> None:
        for seat in self._seats.values():
            seat.claim = seat.tenant.claim()
        cap = max((seat.claim.budget for seat in self._seats.values()), default=0)
        self.ledger.device.set_limit(cap)
        self._shares = None

    # Passes

    def begin(self, number: int) -> Turn:
        """A tenant's pass begins: make room for it.

        The caller holds the tenant's lock. Until `end`, what the tenant may hold by the
        answer is not taken from it. May wait for other threads' passes.

        Raises:
            StagehandOOMError: If what others hold, and need not give up, leaves less
                than the tenant needs to run; it names them.
        """
        with self._changed:
            if self._gone:
                self._let_go()
            seat = self._seats[number]
            if len(self._seats) == 1:
                limit = min(seat.claim.budget, self.ledger.device.limit_bytes)
            else:
                self._note_turn(seat)
                limit = self._find_room(seat)
            seat.limit, seat.running, seat.thread = limit, True, _me()
            return Turn(limit, self._next(seat) is not None)

    def _note_turn(self, seat: _Seat) -> None:
        claim = seat.tenant.claim()
        if self._turns.begin(seat.number) or claim is not seat.claim:
            seat.claim, self._shares = claim, None

    def end(self, number: int, *, failed: bool) -> None:
        """A tenant's pass is over; idempotent."""
        with self._changed:
            seat = self._seats.get(number)
            if seat is None or not seat.running:
                return
            seat.running, seat.thread = False, None
            if seat.leaves:
                seat.leaves = not seat.tenant.give_up(0)
            elif len(self._seats) > 1 and not failed:
                self._hand_over(seat)
            self._changed.notify_all()

    def _hand_over(self, seat: _Seat) -> None:
        """Give up the ring to who is expected next, and let it begin to load."""
        coming = self._next(seat)
        if coming is None or coming.runs_elsewhere():
            return
        seat.tenant.give_up(self._divided()[seat.number].kept)
        coming.tenant.warm()

    def _next(self, seat: _Seat) -> _Seat | None:
        """Return which other tenant takes its turn after this pass, if one will."""
        number = self._turns.coming()
        if self._apart or number is None or number == seat.number:
            return None
        return self._seats.get(number)

    def _find_room(self, seat: _Seat) -> int:
        others = self._others(seat)
        if any(other.thread is not None for other in others) and not self._apart:
            self._apart, self._shares = True, None
        try:
            while True:
                self._let_go()
                self._refused = False
                limit = self._limit_now(seat)
                if limit >= seat.claim.floor and self._clear(seat, limit):
                    return limit
                self._wait(seat)
        finally:
            seat.waits, seat.thread = False, None

    def _limit_now(self, seat: _Seat) -> int:
        """Return what the tenant may hold beside those who run, and those who stay."""
        shares = self._divided()
        others = self._others(seat)
        cap = self.ledger.device.limit_bytes
        taken = sum(other.takes(shares[other.number]) for other in others)
        limit = min(shares[seat.number].limit, cap - taken)
        if limit >= seat.claim.floor:
            return limit
        return min(seat.claim.floor, cap - sum(self._hard(seat).values()))

    def _hard(self, seat: _Seat) -> dict[int, int]:
        """What nobody can make the others give up, by tenant."""
        shares, stay = self._divided(), self._staying(seat)
        hard = {}
        for other in self._others(seat):
            hard[other.number] = other.claim.bound
            if other.number in stay or other.runs_elsewhere():
                hard[other.number] = other.takes(shares[other.number])
        return {number: nbytes for number, nbytes in hard.items() if nbytes}

    def _staying(self, seat: _Seat) -> frozenset[int]:
        """Tenants of which this one may take nothing."""
        stay = self._holds.held
        if seat.number in self._holds.guests:
            stay |= self._holds.reserved.keys()
        return stay - {seat.number}

    def _clear(self, seat: _Seat, limit: int) -> bool:
        """Let others give up until a limit is really there."""
        shares = self._divided()
        for other in self._others(seat):
            kept = shares[other.number].kept
            if other.held > kept and not other.runs_elsewhere():
                self._ask(other, kept)
        return self._free(seat, limit - seat.held)

    def make_room(self, number: int, nbytes: int) -> bool:
        """A tenant needs bytes now that its account should grant but the device lacks.

        Returns:
            Whether they are free.
        """
        with self._changed:
            seat = self._seats.get(number)
            if seat is None or seat.tenant.account.limit_bytes < seat.held + nbytes:
                return False
            return self._free(seat, nbytes)

    def are_others_busy(self, number: int) -> bool:
        """Whether another thread is in any other tenant than this one."""
        with self._changed:
            seats = [s for s in self._seats.values() if s.number != number]
            return bool(self._threads_in(seats, but=_me()))

    def _free(self, seat: _Seat, nbytes: int) -> bool:
        whole = self.ledger.device
        for other in self._givers(seat):
            missing = seat.held + nbytes - (whole.limit_bytes - self._held_by(seat))
            if missing <= 0:
                return True
            self._ask(other, max(0, other.held - missing))
        return seat.held + nbytes <= whole.limit_bytes - self._held_by(seat)

    def _ask(self, seat: _Seat, keep_bytes: int) -> None:
        if not seat.tenant.give_up(keep_bytes):
            self._refused = True

    def _held_by(self, seat: _Seat) -> int:
        """Bytes that are held by all but one tenant."""
        return self.ledger.device.held_bytes - seat.held

    def _givers(self, seat: _Seat) -> Iterator[_Seat]:
        """Those who can give, in the order in which they are asked."""
        shares, stay = self._divided(), self._staying(seat)
        reserved = self._holds.reserved
        yield from sorted(
            (
                other
                for other in self._others(seat)
                if other.number not in stay and not other.runs_elsewhere()
            ),
            key=lambda other: (
                other.number in reserved,
                other.held <= shares[other.number].kept,
                -other.held,
            ),
        )

    def _others(self, seat: _Seat) -> list[_Seat]:
        return [other for other in self._seats.values() if other is not seat]

    def _wait(self, seat: _Seat) -> None:
        """Wait until another thread's pass ends, or it is done with a tenant's lock.

        Raises:
            StagehandOOMError: If none runs, or all of them wait for this thread.
        """
        others = self._others(seat)
        busy = [other for other in others if other.runs_elsewhere()]
        for other in busy:
            other.tenant.give_up(other.held)  # ends a pass that an interrupt has left
        if not all(other.runs_elsewhere() for other in busy):
            return
        threads = self._threads_in(others, but=_me())
        if not threads and self._refused:
            return  # who refused is done with it
        if all(self._is_stuck(thread, {_me()}) for thread in threads):
            if seat.waits and seat.held > seat.claim.bound:
                # Others may wait for that, as this one does for what they have.
                seat.tenant.give_up(0)
                self._changed.notify_all()
            else:
                raise self._no_room(seat)
        seat.thread, seat.waits = _me(), True
        seat.tenant.give_up(seat.claim.fixed)
        self._changed.wait(_LOOK_SECONDS)

    def _no_room(self, seat: _Seat) -> StagehandOOMError:
        hard = self._hard(seat)
        missing = seat.claim.floor + sum(hard.values())
        missing -= self.ledger.device.limit_bytes
        text = "; ".join(
            str(self._holding(other))
            for other in self._others(seat)
            if other.number in hard or other.running or other.taken_by()
        )
        return self._refusal(seat, max(1, missing), text)

    def _is_stuck(self, thread: _Thread, stuck: set[_Thread]) -> bool:
        """Whether a thread waits for one of those that are stuck, if they are."""
        if thread in stuck:
            return True
        if _is_autograds(_me()) and waits_for_backward(thread.ident or 0):
            return True  # for this one
        seats = list(self._seats.values())
        for seat in seats:
            if seat.tenant.is_awaited_by(thread):
                owners = self._threads_in([seat], but=thread)
                waits = bool(owners)  # else it is free, and the thread about to have it
                return waits and all(
                    self._is_stuck(t, stuck | {thread}) for t in owners
                )
        if not any(seat.waits and seat.thread is thread for seat in seats):
            return False
        others = self._threads_in(seats, but=thread)
        return all(self._is_stuck(t, stuck | {thread}) for t in others)

    def _threads_in(self, seats: list[_Seat], *, but: _Thread) -> list[_Thread]:
        """Return the threads that are in some tenants, except one."""
        threads = [seat.taken_by() for seat in seats]
        return [thread for thread in threads if thread not in (None, but)]

    def _divided(self) -> dict[int, Share]:
        if self._shares is None:
            claims = {
                number: replace(seat.claim, passes=self._turns.passes(number))
                for number, seat in self._seats.items()
            }
            self._shares = divide(
                self.ledger.device.limit_bytes,
                claims,
                fixed=self._fixed_bytes(claims),
                guests=self._holds.guests,
                apart=self._apart,
            )
        return self._shares

    def _fixed_bytes(self, claims: dict[int, Claim]) -> dict[int, int]:
        """What reserved and kept tenants have for themselves.

        Who is kept without a reservation leaves the others what they need to run.
        """
        reserved = self._holds.reserved
        fixed = {
            number: min(held.nbytes, claims[number].budget)
            for number, held in reserved.items()
        }
        kept = sorted(self._holds.kept - fixed.keys())
        others = claims.keys() - fixed.keys() - set(kept)
        room = self.ledger.device.limit_bytes - sum(fixed.values())
        room -= max((claims[number].floor for number in others), default=0)
        for place, number in enumerate(kept):
            later = sum(claims[other].floor for other in kept[place + 1 :])
            claim = claims[number]
            fixed[number] = max(claim.floor, min(claim.most, room - later))
            room -= fixed[number]
        return fixed

    # Holds

    def keep(self, number: int) -> None:
        """Take nothing of a tenant until `end_keep`."""
        with self._changed:
            self._holds.keep(number)
            self._shares = None

    def end_keep(self, number: int) -> None:
        """End what `keep` began."""
        with self._changed:
            self._holds.end_keep(number)
            self._shares = None

    def reserve(
        self, number: int, priority: ResidentPriority, *, asked_for: bool = True
    ) -> int:
        """Have device memory for one tenant alone, until it is released.

        What fits a tenant's budget as a whole is reserved as a whole. What streams gets
        what the other tenants do not need to run.

        Args:
            number: Which tenant.
            priority: How firmly.
            asked_for: Whether the user did; what was not is ended by `begin_guest`.

        Returns:
            How many bytes are reserved.

        Raises:
            StagehandOOMError: If they are not there; it names the missing bytes and who
                holds them.
            ConfigError: If the tenant is a guest.
        """
        with self._changed:
            self._let_go()
            seat = self._seats[number]
            seat.claim = claim = seat.tenant.claim()
            cap = self.ledger.device.limit_bytes
            reserved = self._reserved_bytes(but=number)
            others = [
                other.claim.floor
                for other in self._others(seat)
                if other.number not in self._holds.reserved
            ]
            floor = max(others, default=0)
            whole = claim.weights <= claim.budget
            wanted = claim.weights
            if not whole:
                wanted = max(claim.floor, min(claim.budget, cap - reserved - floor))
            firm = priority is ResidentPriority.PRIMARY
            missing = wanted + reserved + (floor if firm else 0) - cap
            if missing > 0:
                text = self._reservations(but=number)
                if firm and floor:
                    needs = f"{format_at_least(floor)} that another model needs to run"
                    text = f"{text}; {needs}" if text else needs
                raise self._refusal(seat, missing, text, wanted)
            reservation = Reservation(
                nbytes=wanted, priority=priority, asked_for=asked_for
            )
            self._holds.reserve(number, reservation)
            self._shares = None
            return wanted

    def release(self, number: int) -> None:
        """End a reservation; without one nothing happens."""
        with self._changed:
            self._holds.release(number)
            self._shares = None

    def begin_guest(self, number: int) -> None:
        """Let a tenant use only what is not reserved, until `end_guest`.

        Raises:
            StagehandOOMError: If that is less than it needs to run.
            ConfigError: If it has a reservation.
        """
        with self._changed:
            self._let_go()
            seat = self._seats[number]
            seat.claim = seat.tenant.claim()
            stay = self._holds.reserved.keys() | self._holds.held
            shares = self._divided()
            taken = sum(shares[n].kept for n in stay if n in shares and n != number)
            missing = seat.claim.floor + taken - self.ledger.device.limit_bytes
            self._holds.begin_guest(number)
            self._shares = None
            if missing > 0:
                self.end_guest(number)
                raise self._refusal(seat, missing, self._reservations())

    def end_guest(self, number: int) -> None:
        """End what `begin_guest` began; who is no guest any more leaves the device."""
        with self._changed:
            over = self._holds.end_guest(number)
            seat = self._seats.get(number)
            self._shares = None
            if over and seat is not None:  # who runs in another thread leaves later
                seat.leaves = not seat.tenant.give_up(0)

    def _reserved_bytes(self, *, but: int, firm: bool = False) -> int:
        return sum(
            held.nbytes
            for number, held in self._holds.reserved.items()
            if number != but and (held.is_firm or not firm)
        )

    # Telling

    def holdings(self) -> list[Holding]:
        """Return what each tenant holds, and why."""
        with self._changed:
            self._let_go()
            return [self._holding(seat) for seat in self._seats.values()]

    def why(self, number: int) -> str:
        """Return why a tenant's blocks stay."""
        with self._changed:
            return self._holds.why(number)

    def _holding(self, seat: _Seat) -> Holding:
        share = self._divided()[seat.number]
        return Holding(
            name=seat.tenant.name,
            held_bytes=seat.held,
            limit_bytes=share.limit,
            kept_bytes=share.kept,
            why=self._holds.why(seat.number),
        )

    def _reservations(self, but: int = -1) -> str:
        return "; ".join(
            f"{format_bytes(held.nbytes)} reserved for"
            f" {self._seats[number].tenant.name}, {held.priority.name}"
            for number, held in self._holds.reserved.items()
            if number != but
        )

    def _refusal(
        self, seat: _Seat, missing: int, holders: str, wanted: int | None = None
    ) -> StagehandOOMError:
        cap = self.ledger.device.limit_bytes
        needed = seat.claim.floor if wanted is None else wanted
        return StagehandOOMError(
            f"{seat.tenant.name} needs {format_at_least(needed)} of the"
            f" {format_bytes(cap)} that models on {self.device.torch_device} share, and"
            f" {format_at_least(missing)} are missing: {holders or 'too few in all'};"
            " release a reservation, shut a model down, or raise a vram_budget",
            needed_bytes=cap + missing,
            limit_bytes=cap,
        )


_devices: weakref.WeakValueDictionary[torch.device, SharedDevice] = (
    weakref.WeakValueDictionary()
)
_devices_lock = threading.Lock()


def shared_bytes(device: Device) -> int:
    """Return the bytes that runtimes which share a device hold there."""
    with _devices_lock:
        shared = _devices.get(device.torch_device)
    return 0 if shared is None else shared.ledger.device.held_bytes


def shared_device(device: Device, *, priority: int = -1) -> SharedDevice:
    """Return what all runtimes on a device share, made when the first asks for it.

    Args:
        device: Which one.
        priority: Of the lanes' streams, if they are made now.
    """
    with _devices_lock:
        shared = _devices.get(device.torch_device)
        if shared is None:
            shared = SharedDevice(device, priority=priority)
            _devices[device.torch_device] = shared
        return shared
