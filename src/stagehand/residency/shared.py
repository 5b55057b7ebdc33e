"""One device and all runtimes that share it: one ledger, one pair of lanes, one cap.

Everything here is about who may have how much, and about waiting for it; the books are
kept in `seats.py`, and memory is moved by the tenants.

Note "Locks". A runtime's own lock comes first, then the device's lock here, then, by
trying only, the locks of other runtimes, and last the accounts'. Nobody waits for a
runtime's lock while holding the device's. Waiting for room lets go of the device's lock
but not of the own runtime's, so before that everything is given up that others could
want, but for what is held; and a circle of such waits is an error, not a standstill,
once all who are in it have given what nobody can hold against others. Whoever waits
here is known to, also in the middle of a pass, where two threads may need each other's
room; and who refused, and is done with its lock, is asked again before that. The
garbage collector ends a dropped model's tenant in the middle of anything, accounts'
locks held: it waits for nothing, and who is in the middle of something here sees to it
later.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stagehand.core.ledger import NO_LIMIT, Account, Ledger
from stagehand.core.turn import HERE, awaited_by, why_waits
from stagehand.errors import StagehandOOMError
from stagehand.residency.seats import AUTOGRAD, Seats
from stagehand.torch_private import is_autograds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from stagehand.core.device import Device, Stream
    from stagehand.residency.holds import ResidentPriority
    from stagehand.residency.seats import AnyThread, Holding, Seat, Tenant

__all__ = ["SharedDevice", "shared_bytes", "shared_device"]

_LOOK_SECONDS = 0.05


class SharedDevice:
    """What all runtimes on one device have in common; see `shared_device()`.

    The cap, the limit of `ledger.device`, is the largest budget that any of the present
    tenants was given: a second runtime adds nothing to it. Each tenant's account is a
    part of it. Pinned memory has a cap only where somebody sets one: images stay for
    good, they do not take turns, so each runtime's own limit counts, too.

    A part that copies takes its pair of `streams()` for a `TransferEngine` of its own:
    then its copies queue in the same two lanes as all others'.

    Args:
        device: Which one.
        priority: Of the lanes' streams; lower runs first.
        streams: To the device and from it; None makes new ones.
    """

    def __init__(
        self,
        device: Device,
        *,
        priority: int = -1,
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        self.device = device
        self.ledger = Ledger(Account("device", 0), Account("pinned", NO_LIMIT))
        self._pinned_caps: dict[object, int] = {}
        self._streams = streams or (
            device.new_stream(priority),
            device.new_stream(priority),
        )
        # Reentrant: a tenant that gives up memory may find that its pass was left.
        self._lock = threading.RLock()
        # Not entered: it does so in Python, where an interrupt leaves the lock taken.
        self._changed = threading.Condition(self._lock)
        self._seats = Seats(self.ledger.device, device.torch_device)
        self._gone: deque[int] = deque()  # numbers of tenants to be forgotten
        self._refusing: list[Seat] = []  # that gave nothing: another thread has them
        self._news = 0  # how often something has changed for those who wait
        # By thread that waits in `_await`: the tenants that it waits for.
        self._awaited: dict[AnyThread, list[Seat]] = {}

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

    def cap_pinned(self, who: object, nbytes: int | None) -> None:
        """Let nobody have more page-locked memory here; what is there already stays.

        Args:
            who: Whose cap it is; the smallest of all counts.
            nbytes: For all together. None takes the cap back.
        """
        self._pinned_caps.pop(who, None)
        if nbytes is not None:
            self._pinned_caps[who] = nbytes
        caps = tuple(self._pinned_caps.values())
        self.ledger.pinned.set_limit(min(caps, default=NO_LIMIT))

    # Who is here

    def name_for(self, name: str) -> str:
        """Return the name, with a number if it is taken."""
        with self._lock:
            taken = {seat.tenant.name for seat in self._seats.all()}
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} {number}"
        return free

    def new_number(self) -> int:
        """Return a number for one who will join, by which it can leave."""
        return self._seats.new_number()

    def join(self, number: int, tenant: Tenant) -> None:
        """Give a tenant a place on the device.

        Raises:
            StagehandOOMError: If reservations leave it less than it needs to run.
        """
        with self._lock:
            self._let_go()
            if not len(self._seats):
                self.ledger.device.reset_peak()
            seat = self._seats.add(number, tenant)
            try:
                self._seats.check_floor(seat)
            except BaseException:
                self._gone.append(seat.number)
                self._let_go()
                raise

    def leave(self, number: int) -> None:
        """Forget a tenant, and all that was held for it. Idempotent.

        It waits for nobody: if this or another thread is in the middle of something
        here, the tenant is forgotten at the next occasion.
        """
        self._gone.append(number)
        if self._is_inside():
            return
        try:  # at once: an interrupt may come as soon as the lock is taken
            if self._lock.acquire(blocking=False):
                self._let_go()
        finally:
            try:  # noqa: SIM105 - an interrupt may come where another call begins
                self._lock.release()
            except RuntimeError:
                pass  # another thread has it

    def _is_inside(self) -> bool:
        """Whether this thread has the device's lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _let_go(self) -> None:
        """Forget tenants that have left."""
        while self._gone:
            if self._seats.forget(self._gone[0]):
                self._tell()
            self._gone.popleft()  # at last: an interrupt leaves it to be done again

    def _tell(self) -> None:
        """Let those who wait look again: there may be room."""
        self._news += 1
        self._changed.notify_all()

    def renew(self) -> None:
        """Set the cap anew, for a tenant's budget has changed."""
        with self._lock:
            self._seats.renew()

    def keep_to_cap(self) -> None:
        """Let tenants that do not run give up what is above the cap: it has sunk."""
        if self._is_inside():  # this thread is in the middle of something here
            return
        with self._lock:
            self._let_go()
            seats = self._seats
            for seat in seats.all():
                excess = seats.missing(0)
                if excess > 0 and not (seat.running or seat.runs_elsewhere()):
                    self._ask(seat, max(seats.share_of(seat).kept, seat.held - excess))

    # Passes

    def begin(self, number: int) -> tuple[int, bool]:
        """Begin a tenant's pass, with room made for it.

        The caller holds the tenant's lock. Until `end`, no other tenant takes anything
        of what this returns. May wait for other threads' passes.

        Returns:
            How many bytes the tenant may hold; and whether another tenant's pass is
            expected next: then it is of no use to load ahead for its own next one.

        Raises:
            StagehandOOMError: If what others hold, and need not give up, leaves less
                than the tenant needs to run; it names them.
        """
        with self._lock:
            seats = self._seats
            seat = seats[number]
            if len(seats) == 1:
                limit = min(seat.claim.budget, self.ledger.device.limit_bytes)
            else:
                for other in seats.others(seat):
                    if other.running and other.thread is HERE.thread:
                        # Around this pass, or left by an interrupt: then it ends now,
                        # for backward, in another thread, could not end it.
                        other.tenant.give_up(other.held)
                seats.note_turn(seat)
                limit = self._find_room(seat)
            seat.limit, seat.running, seat.thread = limit, True, HERE.thread
            return limit, seats.coming(seat) is not None

    def widen(self, number: int, limit: int, nbytes: int) -> int:
        """Let a tenant hold so much in the pass that it is in, as far as that is there.

        That takes what others would keep while it runs, for nothing but what it cannot
        do without: which blocks one call reads at once is known only then.

        Args:
            number: Which tenant.
            limit: What it may hold so far.
            nbytes: What it needs to hold.

        Returns:
            The new limit, no less than the old one.
        """
        with self._lock:
            seat = self._seats.get(number)
            if seat is None:
                return limit
            seat.limit = max(limit, min(nbytes, self._seats.most(seat)))
            return seat.limit

    def go_on_here(self, number: int, move: Callable[[], bool]) -> None:
        """Let this thread end a tenant's pass that began in another one.

        Waits until that one is in no call to the tenant, but not inside of this object:
        that call may need it.

        Args:
            number: Which tenant.
            move: Moves the tenant's lock to this thread; returns False if the other one
                needs it now.
        """
        may_wait = not self._is_inside()
        with self._lock:
            while not move():
                if not may_wait:
                    return
                self._changed.wait(_LOOK_SECONDS)
            seat = self._seats.get(number)
            if seat is not None and seat.running:
                seat.thread = HERE.thread

    def end(self, number: int, *, failed: bool) -> None:
        """End a tenant's pass. Idempotent."""
        with self._lock:
            seat = self._seats.get(number)
            if seat is None or not seat.running:
                return
            self._seats.note_end(seat)
            if seat.leaves:
                self._send_off(seat)
            elif len(self._seats) > 1 and not failed:
                self._hand_over(seat)
            self._tell()

    def _send_off(self, seat: Seat) -> bool:
        """Make a former guest leave the device: now, or when its pass ends.

        Returns:
            Whether another thread has its lock, so that it could not leave now.
        """
        gone = seat.tenant.give_up(0, leaves=True)
        seat.leaves = seat.running or not gone
        return not gone

    def _hand_over(self, seat: Seat) -> None:
        """Let the tenant that is expected next have the ring, and begin to load."""
        coming = self._seats.coming(seat)
        if coming is None or coming.runs_elsewhere():
            return
        seat.tenant.give_up(self._seats.share_of(seat).kept)
        coming.tenant.warm()

    # Room

    def _find_room(self, seat: Seat) -> int:
        """Return how much a tenant may hold in its pass, when the room is free.

        Raises:
            StagehandOOMError: If others leave less than it needs to run.
        """
        seats = self._seats
        if any(other.thread is not None for other in seats.others(seat)):
            seats.run_at_once()
        try:
            while True:
                self._let_go()
                self._refusing.clear()
                limit = seats.limit_now(seat)
                if limit >= seat.claim.floor and self._clear(seat, limit):
                    return limit
                try:
                    self._wait(seat)
                except StagehandOOMError:  # others use blocks that they need not keep
                    share = max(limit, seats.share_of(seat).limit)
                    limit = min(share, seats.there(seat))
                    if limit < seat.claim.floor:
                        raise
                    return limit
        finally:
            seat.end_wait()

    def _clear(self, seat: Seat, limit: int) -> bool:
        """Let others give up until a tenant can hold `limit`; return whether it can."""
        for other in self._seats.others(seat):
            kept = self._seats.share_of(other).kept
            if other.held > kept and not other.runs_elsewhere():
                self._ask(other, kept)
        return self._free(seat, limit - seat.held + self._seats.promised(seat))

    def make_room(self, number: int, nbytes: int, *, by_ends: bool = False) -> bool:
        """Let other tenants give up so many bytes, which one needs in mid-pass.

        Its own account has room for them, but the device has not. If another thread has
        the lock of a tenant that could give some up, or begins a pass in which it may
        hold less than it does, wait for it, if that can end.

        Args:
            number: Which tenant needs them.
            nbytes: How many.
            by_ends: Whether a pass is to wait for the ends of others, too, that other
                threads run. Two passes of one thread may need more together than was
                left for the second: autograd goes back through two models by turns.

        Returns:
            Whether they are free now.
        """
        may_wait = not self._is_inside()
        with self._lock:
            seat = self._seats.get(number)
            if seat is None or seat.tenant.account.limit_bytes < seat.held + nbytes:
                return False
            while True:
                self._refusing.clear()
                if self._free(seat, nbytes):
                    return True
                if self._end_left(seat):
                    continue
                later = [*self._refusing, *self._seats.shrinking(seat)]
                if by_ends and seat.running:  # between passes nobody needs it now
                    later += self._seats.ending(seat)
                if not (may_wait and later and self._await(later)):
                    return False

    @contextmanager
    def beside_passes(self, number: int, nbytes: int) -> Iterator[bool]:
        """Let a tenant take so many bytes between its passes; in one nothing happens.

        The caller holds the tenant's lock. A pass that begins meanwhile counts them as
        taken.

        Yields:
            False if passes of others, in other threads, were promised that room.
        """
        with self._lock:
            seat = self._seats.get(number)
        if seat is None or seat.thread is not None:  # in a pass it has its room
            yield True
            return
        try:
            with self._lock:
                promised = self._seats.promised(seat)
                there = promised <= 0 or self._free(seat, promised + nbytes)
                seat.limit, seat.thread = seat.held + nbytes * there, HERE.thread
            yield there
        finally:
            with self._lock:
                seat.thread = None
                self._tell()

    def budget_for(self, number: int, nbytes: int, *, at_once: bool = False) -> int:
        """Return the smallest budget that lets a tenant have so many bytes.

        Args:
            number: Which tenant.
            nbytes: How many.
            at_once: Whether it needs them beyond what a pass of it needs at least,
                which is all that others leave it who are kept.
        """
        with self._lock:
            seat = self._seats.get(number)
            if seat is None:
                return nbytes
            return self._seats.budget_for(seat, nbytes, at_once=at_once)

    def has_several(self) -> bool:
        """Whether there is more than one tenant. It waits for nobody."""
        return len(self._seats) > 1

    def are_others_busy(self, number: int) -> bool:
        """Whether another thread is in any other tenant than this one."""
        with self._lock:
            seats = [seat for seat in self._seats.all() if seat.number != number]
            return bool(self._threads_in(seats, but=HERE.thread))

    def _free(self, seat: Seat, nbytes: int) -> bool:
        """Ask tenants, one by one, until so many bytes are free; return whether."""
        for other, least in self._seats.givers(seat):
            missing = self._seats.missing(nbytes)
            if missing <= 0:
                return True
            self._ask(other, max(least, other.held - missing))
        return self._seats.missing(nbytes) <= 0

    def _ask(self, seat: Seat, keep_bytes: int) -> None:
        """Let a tenant give up memory; note it if another thread has its lock."""
        if not seat.tenant.give_up(keep_bytes):
            self._refusing.append(seat)

    def _wait(self, seat: Seat) -> None:
        """Wait a moment for another thread to end a pass or release a tenant's lock.

        Raises:
            StagehandOOMError: If none runs, or all of them wait for this thread.
        """
        if self._end_left(seat):
            return
        others = self._seats.others(seat)
        busy = [other for other in others if other.runs_elsewhere()]
        refusing = self._threads_in(self._refusing, but=HERE.thread)
        if len(refusing) < len(self._refusing):
            return  # a lock was released meanwhile: ask again
        # Or in the middle of this: so who was seen to have one counts.
        threads = self._threads_in(others, but=HERE.thread) or refusing
        if not threads:
            raise self._seats.no_room(seat)
        if self._are_stuck(threads):
            # A circle: others may wait for what this tenant has, as it does for theirs.
            waiting = [seat, *(other for other in busy if other.waits)]
            if all(one.gave or one.held <= self._seats.least(one) for one in waiting):
                backs = [one for one in waiting if one.tenant.may_stand_back()]
                if seat in backs or not backs:
                    raise self._seats.no_room(seat)
            for one in waiting:
                one.asked = True
        seat.thread, seat.waits = HERE.thread, True
        self._give_while_waiting(seat)
        seat.heard, seat.refusing = self._news, [*self._refusing]
        self._changed.wait(_LOOK_SECONDS)

    def _end_left(self, seat: Seat) -> bool:
        """End passes of others that an interrupt has left; return whether any was."""
        ended = False
        for other in self._seats.others(seat):
            if other.runs_elsewhere() and other.tenant.give_up(other.held):
                self._seats.note_end(other)
                ended = True
        return ended

    def _await(self, seats: list[Seat]) -> bool:
        """Wait a moment for the threads that some tenants are taken by.

        Returns:
            False, at once, if these threads wait for this one.
        """
        threads = self._threads_in(seats, but=HERE.thread)
        if len(threads) < len(seats):
            return True  # one was released meanwhile
        if self._are_stuck(threads):
            return False
        try:
            self._awaited[HERE.thread] = seats
            self._changed.wait(_LOOK_SECONDS)
        finally:
            self._awaited.pop(HERE.thread, None)
        return True

    def _give_while_waiting(self, seat: Seat) -> None:
        """Let a tenant that waits give up what it can: all of it if it was asked."""
        seats, gave = self._seats, seat.gave
        keep = seats.least(seat) if seat.asked else seats.at_ease(seat)
        seat.gave = seat.asked
        if seat.held > keep and not gave:
            seat.tenant.give_up(keep)
            self._awaited.clear()  # they may have what they need now
            self._tell()

    def _are_stuck(self, threads: list[AnyThread]) -> bool:
        """Whether there are some threads, and all wait for this one."""
        stuck = all(self._is_stuck(thread, {HERE.thread}) for thread in threads)
        return bool(threads) and stuck

    def _is_stuck(self, thread: AnyThread, stuck: set[AnyThread]) -> bool:
        """Whether a thread waits for one of those that are stuck, if they are."""
        if thread in stuck:
            return True
        suffices, threads = self._waits_of(thread)
        return suffices(self._is_stuck(t, stuck | {thread}) for t in threads)

    def _waits_of(
        self, thread: AnyThread
    ) -> tuple[Callable[[Iterable[bool]], bool], Iterable[AnyThread]]:
        """Return for which threads one waits, and whether `any` or `all` of them have
        to be stuck for it to be so, too: `any` of none where it waits for nobody."""
        if thread is AUTOGRAD:  # it is not known which of autograd's threads that is
            return any, [t for t in threading.enumerate() if is_autograds(t)]
        turn = awaited_by(thread)
        if turn is not None:
            owner = turn.holder()
            waits = owner not in (None, thread)  # else it has the turn, or is about to
            return any, [owner] if waits else []
        seats = self._seats.all()
        if thread in self._awaited:
            awaited = self._awaited[thread]
            threads = self._threads_in(awaited, but=thread)
            return (all, threads) if len(threads) == len(awaited) else (any, [])
        waiting = [seat for seat in seats if seat.waits and seat.thread is thread]
        if waiting:
            if any(map(self._may_go_on, waiting)):
                return any, []
            return all, self._threads_in(seats, but=thread)
        others = (t for t in threading.enumerate() if t is not thread)
        return any, (t for t in others if why_waits(thread, t))

    def _may_go_on(self, seat: Seat) -> bool:
        """Whether there may be room by now for a tenant that waits: its thread has been
        told, or whose lock it wanted is free, and it has not looked since."""
        refusing = self._threads_in(seat.refusing, but=seat.thread)
        return seat.heard != self._news or len(refusing) < len(seat.refusing)

    def _threads_in(self, seats: Iterable[Seat], *, but: AnyThread) -> list[AnyThread]:
        """Return the threads that are in some tenants, except one."""
        threads = [seat.taken_by() for seat in seats]
        return [thread for thread in threads if thread not in (None, but)]

    # Holds

    def keep(self, number: int, keep: object) -> None:
        """Take nothing of a tenant until `end_keep`.

        Args:
            number: Which tenant.
            keep: Stands for this call where it is ended.
        """
        with self._lock:
            self._seats.keep(number, keep)

    def end_keep(self, number: int, keep: object) -> None:
        """End what `keep` began. Idempotent."""
        with self._lock:
            self._seats.end_keep(number, keep)

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
        with self._lock:
            self._let_go()
            return self._seats.reserve(
                self._seats[number], priority, asked_for=asked_for
            )

    def release(self, number: int) -> None:
        """End a reservation; without one nothing happens."""
        with self._lock:
            self._seats.release(number)

    def begin_guest(self, number: int, visit: object) -> None:
        """Let a tenant use only what is not reserved, until `end_guest`.

        Args:
            number: Which tenant.
            visit: Stands for this call where it is ended.

        Raises:
            StagehandOOMError: If that is less than it needs to run.
            ConfigError: If it has a reservation.
        """
        with self._lock:
            self._let_go()
            self._seats.begin_guest(self._seats[number], visit)

    def end_guest(self, number: int, visit: object) -> None:
        """End what `begin_guest` began, and make the tenant leave the device.

        If it runs, it leaves when its pass ends. If another thread has its lock for
        anything else, this waits. Idempotent.
        """
        with self._lock:
            seat = self._seats.get(number)
            if seat is None:
                return
            self._seats.end_guest(seat, visit)
            while seat.leaves and self._send_off(seat) and not seat.runs_elsewhere():
                if not self._await([seat]):
                    return  # it leaves after its next pass

    # Telling

    def holdings(self) -> list[Holding]:
        """Return what each tenant holds, and why."""
        with self._lock:
            self._let_go()
            return [self._seats.holding(seat) for seat in self._seats.all()]

    def why(self, number: int) -> str:
        """Return why a tenant's blocks stay."""
        with self._lock:
            return self._seats.holds.why(number)


_devices: weakref.WeakValueDictionary[torch.device, SharedDevice] = (
    weakref.WeakValueDictionary()
)
# Kept for good: torch's allocator caches memory for one stream each. If runtimes that
# come one after the other had lanes of their own, what it caches would add up.
_lanes: dict[tuple[torch.device, int], tuple[Stream, Stream]] = {}
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
            kind = device.torch_device, priority
            shared = SharedDevice(device, priority=priority, streams=_lanes.get(kind))
            _lanes[kind] = shared._streams
            _devices[device.torch_device] = shared
        return shared
