"""Leases of one kind of memory, by exact size.

Making pinned or device memory is slow and can synchronize the device, so an arena keeps
what comes back and hands it out again. One class serves device slots, pinned images and
staging slabs; they differ in the function that makes a buffer and in the account that
pays for it.
"""

import threading
import time
import warnings
import weakref
from collections.abc import Callable

import torch

from stagehand.core.ledger import Account, Grant
from stagehand.errors import (
    ClosedError,
    StagehandInternalError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.torch_private import storage_use_count
from stagehand.units import format_bytes

__all__ = ["Arena", "Lease", "live_leases"]

_WARN_AFTER_SECONDS = 0.1

_arenas: "weakref.WeakSet[Arena]" = weakref.WeakSet()


def live_leases() -> int:
    """Return how many leases of all arenas of this process are not released."""
    return sum(arena._out for arena in _arenas)


class Lease:
    """A holding of one buffer; ended exactly once, by `release()` or `abandon()`."""

    __slots__ = ("_arena", "_buffer", "_grant", "nbytes")

    def __init__(
        self, arena: "Arena", buffer: torch.Tensor | None, grant: Grant
    ) -> None:
        self.nbytes = grant.nbytes
        """Size of the buffer; can be a little more than was asked for."""
        self._arena = arena
        self._buffer = buffer
        self._grant: Grant | None = grant

    def __repr__(self) -> str:
        state = "released" if self._grant is None else self._grant.holder
        return f"Lease({format_bytes(self.nbytes)}, {state})"

    @property
    def buffer(self) -> torch.Tensor:
        """The memory, one-dimensional bytes."""
        if self._buffer is None:
            state = "over" if self._grant is None else "reserved, and not made yet"
            raise StagehandInternalError(f"{self!r} is {state}: it has no memory")
        return self._buffer

    @property
    def is_made(self) -> bool:
        """Whether there is memory: what is reserved only has none yet."""
        return self._buffer is not None

    @property
    def is_over(self) -> bool:
        """Whether it has ended: an interrupt may have come just after that."""
        return self._grant is None

    def make(self, by: Callable[[int], torch.Tensor] | None = None) -> None:
        """Make the memory if it was only reserved. In any thread; takes no lock.

        Args:
            by: What makes it in place of the arena's own function.
        """
        if self._buffer is None:
            self._buffer = (by or self._arena._make)(self.nbytes)

    def _end(self) -> tuple[torch.Tensor | None, Grant]:
        """End the lease. It lets go of its buffer: who still has it keeps no memory."""
        grant, self._grant = self._grant, None
        if grant is None:
            raise StagehandInternalError(
                f"a lease of {self.nbytes} bytes of {self._arena.name} was released"
                " twice"
            )
        buffer, self._buffer = self._buffer, None
        return buffer, grant

    def release(self) -> None:
        """Give the buffer back for reuse.

        Nothing may read or write it any more, or whoever takes it next must be told
        what to wait for.

        Raises:
            StagehandInternalError: At the second call.
        """
        self._arena._take_back(self, keeps=True)

    def let_go(self, alone: int) -> None:
        """Release the buffer, or abandon it to whoever else refers to its storage.

        Args:
            alone: The storage's reference count when nobody else does.
        """
        if storage_use_count(self.buffer.untyped_storage()) > alone:
            self.abandon()
        else:
            self.release()

    def abandon(self) -> None:
        """Leave the buffer to whoever else still holds it; it is not reused."""
        self._arena._take_back(self, keeps=False)


class Arena:
    """Leases of one kind of memory under one account.

    Memory: at most the account's limit, kept buffers included.

    Args:
        name: What it is, for errors: "device memory", "pinned memory".
        make: Returns a one-dimensional byte tensor of a size.
        account: Grants the bytes.
        spare: A kept buffer serves a request if it is at most this many times larger.
        taken: Returns what a buffer of some size takes of the memory: so many bytes are
            made and paid for, whoever asks.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], torch.Tensor],
        account: Account,
        *,
        spare: float = 1.0,
        taken: Callable[[int], int] = int,
    ) -> None:
        self.name = name
        self.account = account
        self.wait_count = 0
        self.wait_ms = 0.0
        self._make = make
        self._spare = spare
        self._taken = taken
        self._kept: list[tuple[torch.Tensor, Grant]] = []
        self._kept_holder = f"kept {name}"
        # Reentrant: the garbage collector may run a finalizer that releases a lease.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._leased = 0
        self._out = 0  # leases that are not ended
        _arenas.add(self)

    def __repr__(self) -> str:
        return (
            f"Arena({self.name}: {format_bytes(self.leased_bytes)} leased,"
            f" {format_bytes(self.kept_bytes)} kept,"
            f" limit {format_bytes(self.account.limit_bytes)})"
        )

    def check_open(self) -> None:
        """Do nothing before `close()`.

        Raises:
            ClosedError: After it.
        """
        if self._closed:
            raise ClosedError(
                f"the arena of {self.name} was closed, by close() or the shutdown of"
                " its last user; end that one with shutdown_keep_pool() to go on with"
                " its memory"
            )

    @property
    def leased_bytes(self) -> int:
        """Bytes in leases that are not released."""
        return self._leased

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait here to be leased again."""
        return sum(buffer.numel() for buffer, _ in self._kept)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be leased: what the account has free, and what is kept."""
        return self.account.free_bytes + self.kept_bytes

    def acquire_nowait(self, nbytes: int, holder: str) -> Lease | None:
        """Return a lease, or None while the account cannot pay for one.

        A kept buffer of the size or a little more is preferred; kept buffers of other
        sizes are freed when the account needs their bytes.

        Args:
            nbytes: How many bytes the buffer has at least.
            holder: What it is for, in the account's books and in errors.

        Raises:
            ClosedError: After `close()`.
        """
        lease = self.reserve_nowait(nbytes, holder)
        if lease is not None and not lease.is_made:
            _make(lease)
        return lease

    def reserve_nowait(self, nbytes: int, holder: str) -> Lease | None:
        """Like `acquire_nowait`, but leave it to `Lease.make` to make what is not kept.

        Args:
            nbytes: As for `acquire_nowait`.
            holder: As for `acquire_nowait`.

        Raises:
            ClosedError: After `close()`.
        """
        with self._lock:
            return self._acquire(self._taken(nbytes), holder)

    def acquire(self, nbytes: int, holder: str) -> Lease:
        """Return a lease, waiting until others release enough.

        Args:
            nbytes: As for `acquire_nowait`.
            holder: As for `acquire_nowait`.

        Raises:
            ClosedError: After `close()`, for waiters too.
            StagehandOOMError: If waiting is useless: it is more than the account's
                limit, or nobody holds anything that could come back.
        """
        nbytes = self._taken(nbytes)
        with self._lock:
            lease = self._acquire(nbytes, holder)
            if lease is None:
                lease = self._wait(nbytes, holder)
        if not lease.is_made:
            _make(lease)
        return lease

    def _wait(self, nbytes: int, holder: str) -> Lease:
        self.wait_count += 1
        start = time.perf_counter()
        warned = False
        while True:
            if nbytes > self.account.limit_bytes or not self._leased:
                raise StagehandOOMError(
                    f"{holder} needs {format_bytes(nbytes)} of {self.name}, but the"
                    f" limit is {format_bytes(self.account.limit_bytes)} and"
                    f" {format_bytes(self.account.held_bytes)} are held; raise the"
                    " budget",
                    needed_bytes=nbytes,
                    limit_bytes=self.account.limit_bytes,
                )
            self._changed.wait(_WARN_AFTER_SECONDS)
            lease = self._acquire(nbytes, holder)
            waited = time.perf_counter() - start
            if lease is not None:
                self.wait_ms += waited * 1e3
                return lease
            if not warned and waited >= _WARN_AFTER_SECONDS:
                warned = True
                warnings.warn(
                    f"{holder} has waited {waited * 1e3:.0f} ms for"
                    f" {format_bytes(nbytes)} of {self.name}, of which"
                    f" {format_bytes(self._leased)} are in use; a larger pool would not"
                    " make it wait",
                    StagehandWarning,
                    stacklevel=3,
                )

    def _acquire(self, nbytes: int, holder: str) -> Lease | None:
        if self._closed:
            raise ClosedError(
                f"the arena of {self.name} is closed; {holder} came too late"
            )
        buffer, grant = self._take_kept(nbytes, holder)
        if grant is None:
            grant = self._grant_new(nbytes, holder)
        if grant is None:
            return None
        self._leased += grant.nbytes
        self._out += 1
        return Lease(self, buffer, grant)

    def _grant_new(self, nbytes: int, holder: str) -> Grant | None:
        if nbytes > self.account.room_for(holder) + self.kept_bytes:
            return None  # freeing what is kept would not help
        grant = self.account.grant(nbytes, holder)
        while grant is None and self._kept:
            self._free_one()
            grant = self.account.grant(nbytes, holder)
        return grant

    def _take_kept(
        self, nbytes: int, holder: str
    ) -> tuple[torch.Tensor | None, Grant | None]:
        best = -1
        smallest = nbytes * self._spare
        for i, size in enumerate(grant.nbytes for _, grant in self._kept):
            if nbytes <= size <= smallest and (best < 0 or size < smallest):
                best, smallest = i, size
        if best < 0:
            return None, None
        if self.account.overdraft_bytes:  # the limit was lowered
            self._free_one(best)
            return None, None
        buffer, grant = self._kept.pop(best)
        grant.holder = holder
        return buffer, grant

    def _free_one(self, number: int = 0) -> None:
        buffer, grant = self._kept.pop(number)
        del buffer  # before others are granted its bytes
        grant.release()

    def _take_back(self, lease: Lease, *, keeps: bool) -> None:
        with self._lock:
            buffer, grant = lease._end()
            self._leased -= grant.nbytes
            self._out -= 1
            keeps = keeps and not (self._closed or self.account.overdraft_bytes)
            if keeps and buffer is not None:
                grant.holder = self._kept_holder
                self._kept.append((buffer, grant))
            else:
                del buffer  # before others are granted its bytes
                grant.release()
            self._changed.notify_all()

    def trim(self) -> None:
        """Free all kept buffers."""
        with self._lock:
            while self._kept:
                self._free_one()

    def close(self) -> None:
        """Free kept buffers and refuse new leases; wakes all waiters. Idempotent.

        Leases that are out stay valid; their memory is freed as they come back.
        """
        with self._lock:
            self._closed = True
            while self._kept:
                self._free_one()
            self._changed.notify_all()


def _make(lease: Lease) -> None:
    """Make a lease's memory outside of the arena's lock: others need not wait."""
    try:
        lease.make()
    except BaseException:
        lease.release()
        raise
