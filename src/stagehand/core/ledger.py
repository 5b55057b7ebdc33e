"""Who holds how many bytes of device and pinned memory, and how many more may be held.

An account moves no bytes: memory is allocated under a grant, and the grant is released
when the memory is given back. How a grant is asked for says how it is answered:

| mode | answer | up to |
|---|---|---|
| HARD | all or nothing | the soft limit |
| SOFT | what is there | the soft limit |
| BURST | all or nothing | the limit |
| FLOOR | all or nothing: holds nothing, keeps bytes for its holder | the limit |
| CEILING | the most that its holder gets, while it lasts | |

A holder's grants draw on its floor first, so with `held` and `floor` by holder, what is
promised is the sum of `max(held, floor)`, and that is what limits are held against.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from stagehand.core.clock import Phase
from stagehand.core.limits import Priority
from stagehand.errors import ClosedError, ConfigError, StagehandInternalError
from stagehand.units import MIB

__all__ = ["NO_LIMIT", "Account", "Grant", "Ledger", "Mode", "SubAccount", "Watermarks"]


NO_LIMIT = 1 << 62
"""A limit in bytes that no memory reaches."""


class Mode(Enum):
    """How a grant is answered; see the head of this file."""

    HARD = "hard"
    SOFT = "soft"
    BURST = "burst"
    FLOOR = "floor"
    CEILING = "ceiling"


_HARD, _SOFT, _REQUIRED = Mode.HARD, Mode.SOFT, Priority.REQUIRED
_BELOW_SOFT = frozenset({Mode.HARD, Mode.SOFT})


class Grant:
    """Some bytes of an account, until `release()`. Only `Account.grant` makes one.

    Attributes:
        nbytes: The number of bytes; of a SOFT grant it can be less than was asked for.
        holder: Who holds them, for reports and errors. Floors and ceilings go by the
            holder that asked.
        mode: How it was asked for.
        priority: How urgently.
        until: The phase with whose end it ends by itself, or None.
        recall: Called with the grant when somebody more urgent needs its bytes.
    """

    __slots__ = (
        *("_account", "_expired", "_party", "holder", "mode", "nbytes", "priority"),
        *("recall", "until"),
    )

    def __init__(
        self,
        account: "Account",
        nbytes: int,
        holder: str,
        mode: Mode,
        priority: Priority,
        until: Phase | None,
        recall: "Callable[[Grant], None] | None",
    ) -> None:
        self._account = account
        self._expired = False
        self._party = holder
        self.nbytes = nbytes
        self.holder = holder
        self.mode = mode
        self.priority = priority
        self.until = until
        self.recall = recall

    def __repr__(self) -> str:
        """Show whose bytes these are."""
        account = self._account.name
        return f"Grant({self.nbytes} {account} bytes, holder {self.holder!r})"

    def release(self) -> None:
        """Give the bytes back; exactly once. A grant that its phase ended is gone.

        Raises:
            StagehandInternalError: If the grant was released before.
        """
        self._account._take_back(self)


class _Party:
    """What the account knows of one holder, while it has a grant."""

    __slots__ = ("ceilings", "floor", "grants", "held")

    def __init__(self) -> None:
        self.grants = 0
        self.held = 0
        self.floor = 0
        self.ceilings: list[int] = []

    @property
    def promised(self) -> int:
        return max(self.held, self.floor)

    @property
    def left(self) -> int | None:
        """Bytes below the lowest ceiling; None without one."""
        return max(0, min(self.ceilings) - self.held) if self.ceilings else None


class Account:
    """The bytes of one kind of memory: at most `limit_bytes` are held.

    Invariants, under one lock: `held_bytes` is the sum of all unreleased grants that
    hold memory; `promised_bytes` is the sum over holders of what they hold or have a
    floor for, whichever is more; no grant leaves that above the limit. Only a lowered
    limit can (see `set_limit`); floors from before it are kept even then.

    Attributes:
        name: The kind of memory, for reports and errors.
        grant_count: Requests that got all.
        partial_count: Requests that got less than they asked for.
        deny_count: Requests that got nothing.
    """

    def __init__(
        self, name: str, limit_bytes: int, soft_limit_bytes: int | None = None
    ) -> None:
        self.name = name
        # Reentrant: the garbage collector may run a finalizer that releases a grant in
        # the middle of any method here, on the same thread.
        self._lock = threading.RLock()
        self._limit = self._checked(limit_bytes, "a limit")
        self._soft: int | None = None
        self._held = 0
        self._promised = 0
        self._peak = 0
        self._grants: dict[Grant, None] = {}  # in the order in which they were made
        self._parties: dict[str, _Party] = {}
        self._scoped = 0  # grants that end with a phase
        self._closed = False
        self.grant_count = self.partial_count = self.deny_count = 0
        self.set_soft_limit(soft_limit_bytes)

    def __repr__(self) -> str:
        """Show live counts."""
        return (
            f"Account({self.name!r}, {self._held} of {self._limit} bytes held in "
            f"{len(self._grants)} grants, peak {self._peak})"
        )

    @property
    def limit_bytes(self) -> int:
        """How many bytes may be held."""
        return self._limit

    @property
    def soft_limit_bytes(self) -> int:
        """How many may be held by other means than BURST and FLOOR."""
        return self._limit if self._soft is None else min(self._soft, self._limit)

    @property
    def held_bytes(self) -> int:
        """How many bytes are held now."""
        return self._held

    @property
    def promised_bytes(self) -> int:
        """How many bytes are held, or kept for the holders of floors."""
        return self._promised

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever held at once."""
        return self._peak

    @property
    def free_bytes(self) -> int:
        """How many more bytes a holder without floor or ceiling would get now."""
        with self._lock:
            return max(0, self._beside(0, _HARD))

    def limit_for(self, nbytes: int) -> int:
        """Return the smallest limit with which so many bytes more could be held now."""
        return self._held + nbytes

    @property
    def overdraft_bytes(self) -> int:
        """How many bytes must be released before the limit holds again."""
        with self._lock:
            return max(0, self._held - self._limit)

    def grant(
        self,
        nbytes: int,
        holder: str,
        *,
        mode: Mode = _HARD,
        priority: Priority = _REQUIRED,
        until: Phase | None = None,
        recall: Callable[[Grant], None] | None = None,
    ) -> Grant | None:
        """Return a grant, or `None` if the bytes do not fit now.

        Where they do not fit, less urgent grants are called back first, the least
        urgent and newest of them first; not for a SOFT request, which takes what is
        there. This is done in the calling thread, without a lock.

        Args:
            nbytes: How many bytes, zero or more. While more is promised than the limit
                allows, zero bytes do not fit either, but for a floor's holder.
            holder: Who will hold them; several grants may have the same holder.
            mode: How it is answered.
            priority: Whose grants this may call back: those of lower urgency.
            until: The phase whose end ends the grant; so does the end of the step.
                None keeps it until it is released.
            recall: Asks the holder to release the grant, if it can, before returning.
                Without it the grant is never called back; nor is a floor or a ceiling.

        Raises:
            StagehandInternalError: If `nbytes` is negative.
            ClosedError: If the account is closed.
        """
        self._checked(nbytes, f"a grant for {holder!r}")
        asked: set[Grant] = set()
        while True:
            with self._lock:
                grant = self._grant(nbytes, holder, mode, priority, until, recall)
                if grant is not None:
                    if grant.nbytes < nbytes:
                        self.partial_count += 1
                    else:
                        self.grant_count += 1
                    return grant
                victim = None if mode is _SOFT else self._victim(priority, asked)
                if victim is None or victim.recall is None:
                    self.deny_count += 1
                    return None
                asked.add(victim)
            victim.recall(victim)

    def _grant(
        self,
        nbytes: int,
        holder: str,
        mode: Mode,
        priority: Priority,
        until: Phase | None,
        recall: Callable[[Grant], None] | None,
    ) -> Grant | None:
        if self._closed:
            raise ClosedError(
                f"the {self.name} account is closed: {holder!r} asked it for "
                f"{nbytes} bytes; make a new runtime"
            )
        party = self._parties.get(holder) or _Party()
        if mode is Mode.FLOOR:
            fits = self._fits_floor(party, nbytes)
        elif mode is Mode.CEILING:
            fits = nbytes >= party.floor
        else:
            room = self._room(party, mode)
            fits = nbytes <= room
            if not fits and mode is _SOFT and room > 0:
                nbytes, fits = room, True
        if not fits:
            return None
        grant = Grant(self, nbytes, holder, mode, priority, until, recall)
        self._parties[holder] = party
        self._grants[grant] = None
        self._book(party, grant, 1)
        self._peak = max(self._peak, self._held)
        return grant

    def _room(self, party: _Party, mode: Mode) -> int:
        """Return how many bytes a holder can get; -1 if not even a grant of zero."""
        room, left = self._beside(max(0, party.floor - party.held), mode), party.left
        return room if left is None else min(room, left)

    def _beside(self, own: int, mode: Mode) -> int:
        """Return how many bytes can be had beside what is promised to others.

        Args:
            own: Bytes that the holder's own floor keeps and it does not hold yet.
            mode: How it asks: that says which limit counts.

        Returns:
            The bytes; -1 if the holder has none of its own and more is promised than
            the limit: then not even a grant of zero bytes fits.
        """
        limit = self.soft_limit_bytes if mode in _BELOW_SOFT else self._limit
        spare = limit - self._promised
        return own + spare if spare >= 0 else own or -1

    def _fits_floor(self, party: _Party, nbytes: int) -> bool:
        floor = party.floor + nbytes
        if party.ceilings and floor > min(party.ceilings):
            return False
        return self._can_promise(max(party.held, floor) - party.promised)

    def _can_promise(self, more: int) -> bool:
        return self._promised + more <= self._limit

    def _keep(self, name: str, nbytes: int) -> None:
        """Keep bytes for a part, who has checked that they can be; 0 ends it."""
        with self._lock:
            party = self._parties.setdefault(name, _Party())
            before, party.floor = party.promised, nbytes
            self._promised += party.promised - before
            self._forget_idle(name, party)

    def _forget_idle(self, name: str, party: _Party) -> None:
        if not (party.grants or party.floor):
            del self._parties[name]

    def _book(self, party: _Party, grant: Grant, sign: int) -> None:
        """Enter a grant in the books, or take it out."""
        before = party.promised
        party.grants += sign
        if grant.until is not None:
            self._scoped += sign
        if grant.mode is Mode.FLOOR:
            party.floor += sign * grant.nbytes
        elif grant.mode is not Mode.CEILING:
            party.held += sign * grant.nbytes
            self._held += sign * grant.nbytes
        elif sign > 0:
            party.ceilings.append(grant.nbytes)
        else:
            party.ceilings.remove(grant.nbytes)
        self._promised += party.promised - before

    def _at_once(
        self, nbytes: int, holder: str, mode: Mode, priority: Priority
    ) -> Grant | None:
        """Return a grant for a part of this account, calling nothing back."""
        with self._lock:
            grant = self._grant(nbytes, holder, mode, priority, None, None)
            if grant is None:
                self.deny_count += 1
            else:
                self.grant_count += 1
        return grant

    def _victim(self, priority: Priority, asked: set[Grant]) -> Grant | None:
        """Return the least urgent, newest grant that may be called back."""
        found: Grant | None = None
        for grant in reversed(self._grants):
            if grant.recall is None or grant in asked or grant.priority <= priority:
                continue
            if grant.mode in (Mode.FLOOR, Mode.CEILING):
                continue
            if found is None or grant.priority > found.priority:
                found = grant
        return found

    def end_phase(self, phase: Phase) -> int:
        """End the grants that last until this phase; at STEP_END all that end with one.

        Returns:
            How many grants that were.
        """
        if not self._scoped:
            return 0
        with self._lock:
            ended = [
                grant
                for grant in self._grants
                if grant.until is not None
                and (phase is Phase.STEP_END or grant.until is phase)
            ]
            for grant in ended:
                self._remove(grant)
                grant._expired = True
        return len(ended)

    def set_limit(self, nbytes: int) -> None:
        """Change the limit, for later grants.

        It may be less than what is held: nothing is taken away, but nothing more is
        granted before `overdraft_bytes` have been released, except what floors keep.

        Raises:
            StagehandInternalError: If `nbytes` is negative.
        """
        self._checked(nbytes, "a limit")
        with self._lock:
            self._limit = nbytes

    def reset_peak(self) -> None:
        """Let the peak start again from what is held."""
        with self._lock:
            self._peak = self._held

    def set_soft_limit(self, nbytes: int | None) -> None:
        """Change the soft limit; None takes it away.

        Raises:
            StagehandInternalError: If `nbytes` is negative.
        """
        if nbytes is not None:
            self._checked(nbytes, "a soft limit")
        with self._lock:
            self._soft = nbytes

    def room_for(self, holder: str, mode: Mode = _HARD) -> int:
        """Return how many bytes a holder would get now, its floor included."""
        with self._lock:
            return max(0, self._room(self._parties.get(holder) or _Party(), mode))

    def holders(self) -> dict[str, int]:
        """Return the bytes that each holder holds now. Costs O(grants)."""
        with self._lock:
            grants = list(self._grants)
        held: dict[str, int] = {}
        for grant in grants:
            if grant.mode not in (Mode.FLOOR, Mode.CEILING):
                held[grant.holder] = held.get(grant.holder, 0) + grant.nbytes
        return held

    def floors(self) -> dict[str, int]:
        """Return the bytes that are kept for each holder of a floor."""
        with self._lock:
            return {name: p.floor for name, p in self._parties.items() if p.floor}

    def close(self) -> None:
        """Grant nothing more; idempotent.

        What is held stays accounted for and can still be released, so that parts may
        close in any order; `holders()` then names who forgot to.
        """
        with self._lock:
            self._closed = True

    def _take_back(self, grant: Grant) -> None:
        with self._lock:
            if grant._expired:
                return
            if grant not in self._grants:
                raise StagehandInternalError(
                    f"a grant of {grant.nbytes} {self.name} bytes to {grant.holder!r} "
                    "was released twice"
                )
            self._remove(grant)

    def _remove(self, grant: Grant) -> None:
        del self._grants[grant]
        party = self._parties[grant._party]
        self._book(party, grant, -1)
        self._forget_idle(grant._party, party)

    def _checked(self, nbytes: int, what: str) -> int:
        if nbytes < 0:
            raise StagehandInternalError(
                f"{what} in the {self.name} account is {nbytes} bytes: expected zero "
                "or more"
            )
        return nbytes


class SubAccount(Account):
    """A part of an account that several share: the whole must grant its bytes, too.

    What floors keep here, the whole keeps, too, in this part's name. The whole's lock
    is taken inside of this one's, never the other way round.

    Args:
        name: Who this part is: the holder of its bytes in the whole.
        limit_bytes: How many bytes this part may hold.
        whole: The shared account.
    """

    def __init__(self, name: str, limit_bytes: int, whole: Account) -> None:
        self.whole = whole
        self._above: dict[Grant, Grant] = {}
        self._floors = 0  # grants of mode FLOOR
        self._kept = 0  # what the whole keeps
        self._detached = False
        super().__init__(name, limit_bytes)

    def limit_for(self, nbytes: int) -> int:
        """See `Account.limit_for`; a limit above the whole's is one for that, too."""
        own, all_of_it = super().limit_for(nbytes), self.whole.limit_for(nbytes)
        return own if all_of_it <= self.whole.limit_bytes else max(own, all_of_it)

    @property
    def overdraft_bytes(self) -> int:
        """See `Account.overdraft_bytes`; what is freed here helps the whole, too."""
        return max(super().overdraft_bytes, self.whole.overdraft_bytes)

    def _beside(self, own: int, mode: Mode) -> int:
        return min(super()._beside(own, mode), self.whole._beside(own, mode))

    def _can_promise(self, more: int) -> bool:
        return super()._can_promise(more) and self.whole._can_promise(more)

    def _grant(
        self,
        nbytes: int,
        holder: str,
        mode: Mode,
        priority: Priority,
        until: Phase | None,
        recall: Callable[[Grant], None] | None,
    ) -> Grant | None:
        with self.whole._lock:
            peak = self._peak
            grant = super()._grant(nbytes, holder, mode, priority, until, recall)
            if grant is None or mode in (Mode.FLOOR, Mode.CEILING):
                return grant
            asked = Mode.BURST if mode is Mode.BURST else _HARD
            above = self.whole._at_once(grant.nbytes, self.name, asked, priority)
            if above is None:  # it has a ceiling for this part
                super()._remove(grant)
                self._peak = peak
                return None
            self._above[grant] = above
        return grant

    def _book(self, party: _Party, grant: Grant, sign: int) -> None:
        super()._book(party, grant, sign)
        if grant.mode is Mode.FLOOR:
            self._floors += sign
        kept = self._promised if self._floors and not self._detached else 0
        if kept != self._kept:
            self._kept = kept
            self.whole._keep(self.name, kept)

    def detach(self) -> None:
        """Grant nothing more, and let the whole forget what is held here."""
        self.close()
        with self._lock:
            self._detached = True
            above, self._above = self._above, {}
            if self._kept:
                self._kept = 0
                self.whole._keep(self.name, 0)
        for grant in above.values():
            grant.release()

    def _victim(self, priority: Priority, asked: set[Grant]) -> Grant | None:
        found = super()._victim(priority, asked)
        if found is None:
            with self.whole._lock:
                found = self.whole._victim(priority, asked)
        return found

    def _remove(self, grant: Grant) -> None:
        super()._remove(grant)
        above = self._above.pop(grant, None)
        if above is not None:
            above.release()


class Ledger:
    """The two accounts that every part shares.

    Args:
        device: The bytes that the library holds on the device.
        pinned: The page-locked host bytes that it holds.
    """

    def __init__(self, device: Account, pinned: Account) -> None:
        self.device = device
        self.pinned = pinned

    def __repr__(self) -> str:
        """Show both accounts."""
        return f"Ledger({self.device!r}, {self.pinned!r})"

    def end_phase(self, phase: Phase) -> int:
        """End what lasts until this phase in both; see `Account.end_phase`."""
        return self.device.end_phase(phase) + self.pinned.end_phase(phase)

    def close(self) -> None:
        """Close both accounts; idempotent."""
        self.device.close()
        self.pinned.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermarks:
    """When the weights give way to other device memory, and when they come back.

    Raises:
        ConfigError: If not 0 < low < high.
    """

    high_bytes: int
    """Bytes allocated on the device at which weights are evicted, and the most that
    weights alone may hold."""
    low_bytes: int
    """Bytes allocated on the device that eviction goes down to. The distance to
    `high_bytes` keeps the limit from changing on every pass."""

    def __post_init__(self) -> None:
        """Refuse marks in the wrong order."""
        if not 0 < self.low_bytes < self.high_bytes:
            raise ConfigError(
                f"vram_low_watermark_mb is {self.low_bytes / MIB:g} and"
                f" vram_high_watermark_mb {self.high_bytes / MIB:g}: expected"
                " 0 < low < high; give both"
            )

    def target(
        self,
        weight_limit_bytes: int,
        weight_held_bytes: int,
        device_allocated_bytes: int,
    ) -> int:
        """Return the weights' limit for the next pass.

        From `high_bytes` on, the limit falls to what brings the total down to
        `low_bytes`; below `low_bytes` it rises to what would bring it up there; between
        the two it stays. Both start from what is held: a limit that is not used up
        frees nothing when it shrinks. The result is between 0 and `high_bytes`.

        Args:
            weight_limit_bytes: The limit of the pass that has ended.
            weight_held_bytes: What weights held of the total.
            device_allocated_bytes: The total, weights and all else, taken at the same
                moment.
        """
        limit = weight_limit_bytes
        at_low_mark = weight_held_bytes + self.low_bytes - device_allocated_bytes
        if device_allocated_bytes >= self.high_bytes:
            limit = min(limit, at_low_mark)
        elif device_allocated_bytes < self.low_bytes:
            limit = max(limit, at_low_mark)
        return max(0, min(limit, self.high_bytes))
