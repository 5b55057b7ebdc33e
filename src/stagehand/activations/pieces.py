"""The books of saved tensors: handles for the graph, pieces for the memory.

Autograd saves tensors; several can lie in one storage (the slices of a chunked
projection, a tensor that two operators save). What can be freed is a storage, so a
*piece* stands for one, and each saved tensor is a *handle* that belongs to a piece. The
graph owns handles, handles own their piece: when a graph is freed, by whatever way, its
pieces go, and what they hold goes with them.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stagehand.core.layout import placed
from stagehand.core.saved import modified
from stagehand.torch_private import WRAPPERS, use_count_of

if TYPE_CHECKING:
    from collections import deque

    from stagehand.core.arena import Lease
    from stagehand.core.device import Event

__all__ = ["Left", "Piece", "Place", "SavedHandle"]


class Place(IntEnum):
    """Who holds a piece's bytes."""

    DEVICE = 0
    """The storage itself, through the handles' aliases."""
    LEAVING = 1
    """The storage, and pinned memory to which they are on their way."""
    HOST = 2
    """Pinned memory only."""
    RETURNING = 3
    """Pinned memory, and device memory to which they are on their way or have come."""


class Left(NamedTuple):
    """What a piece that nobody needs any more leaves behind."""

    place: Place
    nbytes: int
    lease: Lease | None
    busy: tuple[Event, ...]
    """Copies that may still read or write the lease."""


class SavedHandle:
    """What the graph keeps instead of a tensor."""

    __slots__ = (
        *("__weakref__", "alias", "dtype", "offset", "piece", "shape", "stride"),
        "version",
    )

    def __init__(self, saved: torch.Tensor, piece: Piece) -> None:
        self.alias: torch.Tensor | None = saved.detach()
        self.piece = piece
        self.dtype = saved.dtype
        self.shape = saved.shape
        self.stride = saved.stride()
        self.offset = int(saved.storage_offset())
        self.version = saved._version
        piece.handles.append(weakref.ref(self))

    def check(self) -> None:
        """Do nothing unless the tensor was changed since it was saved.

        Raises:
            RuntimeError: As autograd itself raises; hooks switch its own check off.
        """
        alias = self.alias
        if alias is not None and alias._version != self.version:
            what = f"a {self.dtype} tensor of shape {list(self.shape)}"
            raise modified(what, alias._version, self.version)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the bytes of its piece, wherever they lie."""
        storage = memory.untyped_storage()
        return placed(storage, self.dtype, self.offset, self.shape, self.stride)


class Piece:
    """One storage that autograd saved.

    Attributes:
        number: Its place in the order in which pieces were first saved.
        place: Where its bytes are.
        handles: Of the tensors in it, weakly.
        lease: Pinned memory, from the first copy on.
        left: Event behind the copy to the host.
        back: Device memory that the bytes came back to, and the event behind the copy.
        due: How many handles are to be unpacked before `back` is let go.
    """

    __slots__ = (
        *("__weakref__", "_dead", "back", "cdata", "due", "handles", "lease", "left"),
        *("nbytes", "number", "place", "scope"),
    )

    def __init__(
        self, saved: torch.Tensor, number: int, scope: Any, dead: deque[Left]
    ) -> None:
        storage = saved.untyped_storage()
        self.cdata = storage._cdata
        self.nbytes = storage.nbytes()
        self.number = number
        self.scope = scope
        self.place = Place.DEVICE
        self.handles: list[weakref.ref[SavedHandle]] = []
        self.lease: Lease | None = None
        self.left: Event | None = None
        self.back: tuple[torch.Tensor, Event] | None = None
        self.due = 0
        self._dead = dead

    def __del__(self) -> None:
        busy: tuple[Event, ...] = () if self.left is None else (self.left,)
        if self.back is not None:
            busy += (self.back[1],)
        self._dead.append(Left(self.place, self.nbytes, self.lease, busy))

    def living(self) -> list[SavedHandle]:
        """Return the handles that the graph still has."""
        return [handle for ref in self.handles if (handle := ref()) is not None]

    def flat(self) -> torch.Tensor:
        """Return the storage's bytes. It must be on the device."""
        alias = next(h.alias for h in self.living() if h.alias is not None)
        storage = alias.untyped_storage()
        return placed(storage, torch.uint8, 0, (self.nbytes,), (1,))

    def can_go(self, *, others: int = 0) -> bool:
        """Whether letting the aliases go would free the storage, unchanged.

        Args:
            others: How many tensors of the library's own are in the storage, too.
        """
        living = self.living()
        for handle in living:
            alias = handle.alias
            if alias is None or alias._version != handle.version:
                return False
        return use_count_of(self.cdata) == len(living) + others + WRAPPERS

    def let_go(self) -> None:
        """Free the storage."""
        for handle in self.living():
            handle.alias = None
        self.place = Place.HOST
