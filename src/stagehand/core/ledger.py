"""Who holds how many bytes of device and pinned memory, and how many more may be held.

An account moves no bytes: memory is allocated under a grant, and the grant is released
when the memory is given back.
"""

import threading
from dataclasses import dataclass

from stagehand.errors import ClosedError, ConfigError, StagehandInternalError

__all__ = ["Account", "Grant", "Ledger", "Watermarks"]


class Grant:
    """Some bytes of an account, until `release()`. Only `Account.grant` makes one.

    Attributes:
        nbytes: The number of bytes.
        holder: Who holds them, for reports and errors.
    """

    __slots__ = ("_account", "holder", "nbytes")

    def __init__(self, account: "Account", nbytes: int, holder: str) -> None:
        self._account = account
        self.nbytes = nbytes
        self.holder = holder

    def __repr__(self) -> str:
        """Show whose bytes these are."""
        account = self._account.name
        return f"Grant({self.nbytes} {account} bytes, holder {self.holder!r})"

    def release(self) -> None:
        """Give the bytes back; exactly once.

        Raises:
            StagehandInternalError: If the grant was released before.
        """
        self._account._take_back(self)


class Account:
    """The bytes of one kind of memory: at most `limit_bytes` are held.

    Invariants, under one lock: `held_bytes` is the sum of all unreleased grants, and no
    grant leaves it above the limit. Only a lowered limit can (see `set_limit`).

    Attributes:
        name: The kind of memory, for reports and errors.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name = name
        # Reentrant: the garbage collector may run a finalizer that releases a grant in
        # the middle of any method here, on the same thread.
        self._lock = threading.RLock()
        self._limit = self._checked(limit_bytes, "a limit")
        self._held = 0
        self._peak = 0
        self._grants: set[Grant] = set()
        self._closed = False

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
    def held_bytes(self) -> int:
        """How many bytes are held now."""
        return self._held

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were ever held at once."""
        return self._peak

    @property
    def free_bytes(self) -> int:
        """How many more bytes would be granted now."""
        with self._lock:
            return max(0, self._limit - self._held)

    @property
    def overdraft_bytes(self) -> int:
        """How many bytes must be released before the limit holds again."""
        with self._lock:
            return max(0, self._held - self._limit)

    def grant(self, nbytes: int, holder: str) -> Grant | None:
        """Return a grant, or `None` if the bytes do not fit now.

        Args:
            nbytes: How many bytes, zero or more. While more is held than the limit
                allows, zero bytes do not fit either.
            holder: Who will hold them; several grants may have the same holder.

        Raises:
            StagehandInternalError: If `nbytes` is negative.
            ClosedError: If the account is closed.
        """
        grant = Grant(self, self._checked(nbytes, f"a grant for {holder!r}"), holder)
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"the {self.name} account is closed: {holder!r} asked it for "
                    f"{nbytes} bytes; make a new runtime"
                )
            if self._held + nbytes > self._limit:
                return None
            self._held += nbytes
            self._peak = max(self._peak, self._held)
            self._grants.add(grant)
        return grant

    def set_limit(self, nbytes: int) -> None:
        """Change the limit, for later grants.

        It may be less than what is held: nothing is taken away, but nothing more is
        granted before `overdraft_bytes` have been released.

        Raises:
            StagehandInternalError: If `nbytes` is negative.
        """
        self._checked(nbytes, "a limit")
        with self._lock:
            self._limit = nbytes

    def holders(self) -> dict[str, int]:
        """Return the bytes that each holder holds now. Costs O(grants)."""
        with self._lock:
            grants = self._grants.copy()
        held: dict[str, int] = {}
        for grant in grants:
            held[grant.holder] = held.get(grant.holder, 0) + grant.nbytes
        return held

    def close(self) -> None:
        """Grant nothing more; idempotent.

        What is held stays accounted for and can still be released, so that parts may
        close in any order; `holders()` then names who forgot to.
        """
        with self._lock:
            self._closed = True

    def _take_back(self, grant: Grant) -> None:
        with self._lock:
            if grant not in self._grants:
                raise StagehandInternalError(
                    f"a grant of {grant.nbytes} {self.name} bytes to {grant.holder!r} "
                    "was released twice"
                )
            self._grants.remove(grant)
            self._held -= grant.nbytes

    def _checked(self, nbytes: int, what: str) -> int:
        if nbytes < 0:
            raise StagehandInternalError(
                f"{what} in the {self.name} account is {nbytes} bytes: expected zero "
                "or more"
            )
        return nbytes


class Ledger:
    """The two accounts that every part shares.

    Attributes:
        device: The bytes that the library holds on the device.
        pinned: The page-locked host bytes that it holds.
    """

    def __init__(self, device_bytes: int, pinned_bytes: int) -> None:
        self.device = Account("device", device_bytes)
        self.pinned = Account("pinned", pinned_bytes)

    def __repr__(self) -> str:
        """Show both accounts."""
        return f"Ledger({self.device!r}, {self.pinned!r})"

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
                f"the low watermark is {self.low_bytes} bytes and the high one "
                f"{self.high_bytes} bytes: expected 0 < low < high"
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
