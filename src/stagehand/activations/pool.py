"""Host memory for what leaves the device: page-locked slabs in size classes.

With classes of the user's, there are so many slabs of each; what finds none goes to
pageable memory, and before the next step the pool grows by what it lacked. Without,
slabs are made when they are first needed. Either way a step that needs what the one
before it needed makes no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from stagehand.core.device import host_memory
from stagehand.core.layout import placed
from stagehand.core.ledger import NO_LIMIT
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.units import format_bytes

if TYPE_CHECKING:
    import torch

    from stagehand.core.arena import Arena, Lease

__all__ = ["Holder", "Slab", "SlabPool", "slab_counts"]

_STEP = 1 << 16  # sizes without a class: few different ones, little lost


def slab_counts(classes: Sequence[float], counts: int | Sequence[int]) -> list[int]:
    """Return how many slabs of each class there are.

    Args:
        classes: The classes' sizes.
        counts: One number for all, or one for each.

    Raises:
        ConfigError: If there are more or fewer numbers than classes, or one is
            negative.
    """
    each = list(counts) if isinstance(counts, Iterable) else [counts] * len(classes)
    if len(each) != len(classes):
        raise ConfigError(
            f"slabs_per_class has {len(each)} numbers for {len(classes)} classes:"
            " expected one for each, or one int for all"
        )
    if any(count < 0 for count in each):
        raise ConfigError(f"slabs_per_class is {counts}: expected zero or more of each")
    return each


class Slab:
    """A piece of host memory, until it is given back to its pool.

    Attributes:
        buffer: The bytes.
        size: The class it belongs to; None for memory larger than any.
        lease: The page-locked memory; None for pageable memory.
    """

    __slots__ = ("_like", "buffer", "lease", "size")

    def __init__(
        self, buffer: torch.Tensor, size: int | None, lease: Lease | None
    ) -> None:
        self.buffer = buffer
        self.size = size
        self.lease = lease
        self._like = buffer

    def like(self, source: torch.Tensor, start: int) -> torch.Tensor:
        """Return a tensor of the form of a contiguous one, from a byte on."""
        if start:
            return self._placed(source, start)
        like = self._like
        if like.dtype != source.dtype or like.shape != source.shape:
            like = self._like = self._placed(source, 0)
        return like

    def _placed(self, source: torch.Tensor, start: int) -> torch.Tensor:
        start += int(self.buffer.storage_offset())
        memory, dtype = self.buffer.untyped_storage(), source.dtype
        first = start // dtype.itemsize
        return placed(memory, dtype, first, source.shape, source.stride())

    def end(self) -> None:
        """Give page-locked memory back to where it came from."""
        if self.lease is not None:
            self.lease.release()

    def forget(self) -> None:
        """Let page-locked memory go: nobody is there to use it again."""
        if self.lease is not None:
            self.lease.abandon()


class Holder(Protocol):
    """Who has a slab, and has none when the pool has taken that back."""

    slab: Slab | None


class SlabPool:
    """Slabs of page-locked memory by size class, and pageable memory beside them.

    Not thread-safe: callers hold a lock.

    Args:
        arena: Page-locked memory, under the account that limits it.
        classes: Sizes in bytes, ascending; without any, sizes are rounded up a little.
        counts: Slabs of each class that are made now.
    """

    def __init__(
        self, arena: Arena, classes: Sequence[int] = (), counts: Sequence[int] = ()
    ) -> None:
        self.hits = 0
        """Requests for which there was a slab."""
        self.misses = 0
        """Requests for which a slab was made, or pageable memory was used."""
        self.pageable = 0
        """Requests for which pageable memory was used."""
        self._arena = arena
        self._classes = tuple(classes)
        self._free: dict[int, list[Slab]] = {size: [] for size in classes}
        self._lacking: dict[int, int] = dict.fromkeys(classes, 0)
        self._out = 0
        self._out_pageable: dict[int, int] = dict.fromkeys(classes, 0)
        self._warned = False
        for size, count in zip(classes, counts, strict=True):
            self._make(size, count)

    def __repr__(self) -> str:
        free = sum(map(len, self._free.values()))
        return f"SlabPool({self._out} slabs out, {free} free)"

    @property
    def out(self) -> int:
        """Slabs that are in use."""
        return self._out

    def sizes(self, nbytes: int) -> list[int]:
        """Return the sizes of slabs that may serve so many bytes, the best first."""
        if self._classes:
            fitting = [size for size in self._classes if size >= nbytes]
            if fitting:
                return fitting
        return [-(-nbytes // _STEP) * _STEP]

    def take(self, nbytes: int) -> Slab | None:
        """Return a slab of at least so many bytes; None if none is free."""
        for size in self.sizes(nbytes):
            if free := self._free.get(size):
                slab = free[-1]
                # No call from here on: no interrupt comes before somebody has it.
                del free[-1]
                self.hits += 1
                self._out += 1
                return slab
        return None

    def make(self, nbytes: int) -> Slab:
        """Return new memory: page-locked if there are no classes, and it is allowed."""
        fitting = next((size for size in self._classes if size >= nbytes), None)
        slab = self._exact(self.sizes(nbytes)[0]) if fitting is None else None
        if slab is None:
            self._warn(nbytes)  # which may raise: nothing is counted yet
            slab = Slab(host_memory(nbytes), fitting, None)
            self.pageable += 1
            if fitting is not None:
                self._out_pageable[fitting] += 1
                lacking = max(self._lacking[fitting], self._out_pageable[fitting])
                self._lacking[fitting] = lacking
        self.misses += 1
        self._out += 1
        return slab

    def _exact(self, size: int) -> Slab | None:
        """Return a new slab without a class; None if that is not allowed."""
        self._free.setdefault(size, [])
        slab = self._new(size)
        while slab is None and self._drop_one():
            slab = self._new(size)
        return slab

    def _new(self, size: int) -> Slab | None:
        lease = self._arena.acquire_nowait(size, "saved tensors")
        if lease is None:
            return None
        try:
            return Slab(lease.buffer, size, lease)
        except BaseException:  # an interrupt: nobody has the lease
            lease.release()
            raise

    def _drop_one(self) -> bool:
        """End a free slab without a class; False if there is none."""
        for size, free in self._free.items():
            if free and size not in self._classes:
                free.pop().end()
                return True
        return False

    def give(self, holder: Holder) -> None:
        """Take back the slab that somebody holds, if it does.

        No copy may read or write it any more.
        """
        slab = holder.slab
        if slab is None:
            return
        # No call from here on: no interrupt comes before the pool has it.
        holder.slab = None
        self._out -= 1
        if slab.size is None:
            return
        if slab.lease is None:
            self._out_pageable[slab.size] -= 1
        else:
            self._free[slab.size].append(slab)

    def grow(self) -> None:
        """Make what the last step lacked, as far as page-locked memory is allowed."""
        for size, count in self._lacking.items():
            self._lacking[size] = 0
            self._make(size, count)

    def _make(self, size: int, count: int) -> None:
        for _ in range(count):
            slab = self._new(size)
            if slab is None:
                return
            self._free[size].append(slab)

    def close(self) -> None:
        """Give the page-locked memory back. Idempotent."""
        for free in self._free.values():
            while free:
                free.pop().end()
        self._arena.trim()

    def _warn(self, nbytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        account = self._arena.account
        taken = format_bytes(account.held_bytes)
        if account.limit_bytes < NO_LIMIT:
            taken += f" of {format_bytes(account.limit_bytes)}"
        warnings.warn(
            f"a saved tensor of {format_bytes(nbytes)} went to pageable memory:"
            f" {taken} of page-locked memory for saved tensors are taken, and the pool"
            " had no free slab; such copies let the host wait. Raise ram_budget, or"
            " slabs_per_class",
            StagehandWarning,
            stacklevel=4,
        )
