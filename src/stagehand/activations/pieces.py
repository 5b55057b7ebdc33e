"""The books of saved tensors: pieces of memory, handles for the graph, bundles.

Autograd saves tensors; several can lie in one storage (the slices of a chunked
projection, a tensor that two operators save). What can be freed is a storage, so a
*piece* stands for one. It is the handle of the first tensor that was saved in it, and
each further one gets a handle of its own. Pieces that leave together are a *bundle*:
one stretch of host memory, one event each way, one copy back.

The graph owns handles, handles own their piece, pieces own their bundle: when a graph
is freed, by whatever way, its pieces go, and what they hold goes with them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stagehand.core.layout import ALIGNMENT, placed
from stagehand.core.saved import emptied, ghost_of, modified, versioned
from stagehand.torch_private import (
    WRAPPERS,
    WeakStorage,
    dispatch_modes,
    negated,
    use_count_of,
)

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from stagehand.activations.pool import Slab
    from stagehand.activations.prefix import Prefix, Save
    from stagehand.core.device import Event, Stream
    from stagehand.core.traffic import Done

__all__ = [
    "NOTHING",
    "Allowance",
    "Bundle",
    "Extra",
    "Gone",
    "Handle",
    "Piece",
    "Scope",
]


class _Form(NamedTuple):
    """What a tensor is besides its bytes; offset and stride in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        """Return a tensor's."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def fits(self, back: torch.Tensor) -> bool:
        """Whether memory that came back is a tensor of this form already."""
        return (
            back.shape == self.shape
            and back.dtype == self.dtype
            and back.stride() == self.stride
            and not (self.conj or self.neg)
        )


class Gone:
    """What a bundle that nobody needs any more leaves behind.

    Attributes:
        held: Bytes that counted against the budget.
        slab: Its host memory, until somebody has that.
        back: Memory that a copy may still fill.
        last: The last copy that reads or writes the two.
    """

    __slots__ = ("back", "held", "last", "slab")

    def __init__(
        self,
        held: int,
        slab: Slab | None,
        back: torch.Tensor | None,
        last: Done | None,
    ) -> None:
        self.held = held
        self.slab = slab
        self.back = back
        self.last = last


class Handle:
    """What the graph keeps instead of a tensor.

    Attributes:
        alias: The tensor, detached, while its bytes are on the device.
        version: The tensor's version when it was saved.
        form: Set when the alias is let go; None if it is that of its bundle's `home`.
        ghost: Set with it, if others keep the tensor: a tensor without memory that
            shares its version counter, so that their changes show.
        piece: The piece of its storage; None if it is that piece itself.
        sequence: Autograd's number of the operator that saved it: backward runs
            operators in descending order.
        number: Counts what was saved: backward unpacks what one operator has saved in
            ascending order.
    """

    __slots__ = (
        *("__weakref__", "alias", "form", "ghost", "number", "piece", "sequence"),
        "version",
    )

    alias: torch.Tensor | None
    version: int
    piece: Piece | None
    sequence: int
    number: int
    form: _Form | None
    ghost: torch.Tensor | None

    def __str__(self) -> str:
        like = self.whole_form()
        return f"a saved {like.dtype} tensor of shape {list(like.shape)}"

    def check(self) -> None:
        """Do nothing unless the tensor was changed since it was saved.

        Raises:
            RuntimeError: As autograd itself raises; hooks switch its own check off.
        """
        alias = self.ghost if self.alias is None else self.alias
        if alias is not None and alias._version != self.version:
            raise modified(str(self), alias._version, self.version)

    def has_changed(self) -> bool:
        """Whether the tensor was changed since, as far as anybody could change it."""
        alias = self.ghost if self.alias is None else self.alias
        return alias is not None and alias._version != self.version

    def let_go(self, *, shared: bool = False) -> None:
        """Keep the tensor's form, not its memory.

        Args:
            shared: Others keep the memory, and may change it.
        """
        alias = self.alias
        if alias is not None:
            self.form = _Form.of(alias)
            self.ghost = ghost_of(alias) if shared else None
            self.alias = None

    def whole_form(self) -> _Form:
        """Return the form of the tensor, which may have been let go."""
        if self.alias is not None:
            return _Form.of(self.alias)
        if self.form is not None:
            return self.form
        bundle = (self.piece or self).bundle  # type: ignore[attr-defined]
        return _Form.of(bundle.home)._replace(offset=0)

    def join(self, piece: Piece) -> None:
        """Be a further handle of a piece."""
        self.piece = piece
        extras = piece.extras
        if extras is None:
            extras = piece.extras = set()
        extras.add(weakref.ref(self, extras.discard))
        if piece.alias is None:  # others keep it still
            self.let_go(shared=True)

    def view(self, memory: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Return the tensor, its piece's bytes being at `start` of some memory."""
        dtype, shape, stride, offset, conj, neg = self.whole_form()
        offset += start // dtype.itemsize
        found = placed(memory, dtype, offset, shape, stride)
        found = found.conj() if conj else found
        return negated(found) if neg else found

    def view_back(self, back: torch.Tensor, start: int) -> torch.Tensor:
        """Return the tensor in memory that its piece has come back to."""
        if (self.form is None or self.form.fits(back)) and not dispatch_modes():
            return back.detach()  # several times as fast
        return self.view(back.untyped_storage(), start)

    def view_elsewhere(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in the memory that others keep.

        A second graph that saves it learns from its version that they changed it.
        """
        found, ghost = self.view(storage, 0), self.ghost
        return found if ghost is None else versioned(ghost, found)


class Piece(Handle):
    """One storage that autograd saved, and the first tensor that was saved in it.

    Attributes:
        cdata: The storage's identity; zero as long as nobody has looked at the piece.
        nbytes: Its size when it was saved.
        position: Which of its forward's pieces it is; set when it is looked at.
        bundle: With which it leaves; None as long as it has not to.
        twin: The alias a second time, while a copy reads all of it; None if the copy
            reads its bytes. Set when it is about to leave.
        start: Where it lies in the bundle.
        extras: Handles of further tensors in the storage, as long as they live.
        elsewhere: The storage, weakly, if others kept it when it was let go.
    """

    __slots__ = (
        *("bundle", "cdata", "elsewhere", "extras", "nbytes", "position", "scope"),
        *("start", "twin"),
    )

    cdata: int
    nbytes: int
    position: int
    scope: Scope
    bundle: Bundle | None
    start: int
    twin: torch.Tensor | None
    extras: set[weakref.ref[Handle]] | None
    elsewhere: WeakStorage | None

    # No `__init__`: calling it would take a third of what a forward pays for a piece.
    def begin(
        self, alias: torch.Tensor, nbytes: int, scope: Scope, sequence: int
    ) -> None:
        """Stand for a tensor that is looked at when it is saved."""
        self.alias = alias
        self.version = alias._version
        self.nbytes = nbytes
        self.scope = scope
        self.position = scope.count
        self.sequence = sequence
        self.cdata = 0
        self.piece = self.bundle = self.extras = None

    def handles(self) -> Sequence[Handle]:
        """Return its own and those others that the graph still has."""
        if not self.extras:
            return (self,)
        refs = list(self.extras)  # any thread may let go of one meanwhile
        return [self, *(extra for ref in refs if (extra := ref()) is not None)]

    def source(self) -> torch.Tensor | None:
        """Return all of the storage; None if it is gone, or is another by now."""
        alias = self.alias
        self.twin = None
        if alias is None or not self.is_plain():
            return None
        storage, nbytes = alias.untyped_storage(), self.nbytes
        if storage.nbytes() != nbytes:  # somebody resized it
            return None
        if (
            alias.nbytes == nbytes
            and alias.is_contiguous()
            and not alias.is_conj()
            and not alias.is_neg()
            and not dispatch_modes()
        ):
            twin = self.twin = alias.detach()
            return twin  # a tensor of its bytes takes five times as long
        return placed(storage, torch.uint8, 0, (nbytes,), (1,))

    def is_plain(self) -> bool:
        """Whether its tensors are what their bytes and forms tell.

        This is asked of what is to leave, not of all that is saved: it takes time.
        """
        if not self.extras:  # mostly
            return _is_plain(self.alias)
        return all(_is_plain(handle.alias) for handle in self.handles())

    def can_go(self, *, others: int = 0) -> bool:
        """Whether letting the aliases go would free the storage, unchanged.

        Args:
            others: How many tensors of the library's own are in the storage, too.
        """
        if self.alias is None:
            return False
        count = others + 1 + len(self.extras or ())
        return use_count_of(self.cdata) == count + WRAPPERS and not self.is_changed()

    def is_changed(self) -> bool:
        """Whether the storage was changed since its tensors were saved."""
        if not self.extras:  # mostly
            return self.has_changed()
        return any(handle.has_changed() for handle in self.handles())

    def free(self, *, shared: bool) -> None:
        """Let the storage go; if others keep it, look at what they do with it."""
        alias, twin = self.alias, self.twin
        self.elsewhere = self.twin = None
        if alias is None:
            return
        if shared:
            self.elsewhere = WeakStorage(alias.untyped_storage())
        if self.extras:  # first: an interrupt may come between these
            for handle in self.handles()[1:]:
                handle.let_go(shared=shared)
        if twin is not None and self._is_like_its_home(alias):
            self.ghost = emptied(twin) if shared else None
            self.form = self.alias = None
        else:
            self.let_go(shared=shared)

    def _is_like_its_home(self, alias: torch.Tensor) -> bool:
        home = None if self.bundle is None else self.bundle.home
        return home is not None and home.stride() == alias.stride()

    def kept_elsewhere(self) -> torch.UntypedStorage | None:
        """Return the storage that was let go, as long as others keep it as it was."""
        if self.elsewhere is None:
            return None
        storage = self.elsewhere.get()
        if storage is None:
            self.elsewhere = None  # for good
        elif storage.nbytes() == self.nbytes:
            return storage
        return None

    @property
    def is_away(self) -> bool:
        """Whether its bytes are on the host only."""
        return self.alias is None and self.kept_elsewhere() is None


def _is_plain(tensor: torch.Tensor | None) -> bool:
    return (
        tensor is not None
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
    )


class Extra(Handle):
    """A further tensor in the storage of a piece."""

    __slots__ = ()

    def __init__(self, alias: torch.Tensor, piece: Piece, sequence: int) -> None:
        self.alias = alias
        self.version = alias._version
        self.sequence = sequence
        self.join(piece)


class Allowance:
    """Bytes of the budget that a known forward may fill without a look at each tensor.

    All of them count as held. What the forward has kept in them is looked at only if
    something must leave: mostly never.

    Attributes:
        scope: The forward, weakly: it dies with the last of what it has saved.
        given: All of the bytes.
        room: The bytes that are not used yet.
        pieces: What was kept in them, in order.
    """

    __slots__ = ("given", "pieces", "room", "scope")

    def __init__(self, scope: Scope | None, given: int) -> None:
        self.scope = None if scope is None else weakref.ref(scope)
        self.given = self.room = given
        self.pieces: list[weakref.ref[Piece]] = []


NOTHING = Allowance(None, -1)
"""The allowance of a forward that has none: each tensor is looked at."""


class Bundle:
    """Pieces that leave together, and come back together.

    Attributes:
        members: The pieces, weakly.
        nbytes: Bytes of all pieces, each at an aligned start.
        counted: Bytes of all pieces without what alignment adds: so many count as held.
        slab: Host memory, from the first copy on.
        home: Where a bundle's only piece lies in the slab; None if there are more.
        left: Done when the copy to the host is.
        back: Device memory that the bytes came back to.
        arrived: The event behind that copy.
        maker: The stream that asked for `back`, to which that memory belongs.
        seen: The stream that has waited for `arrived`.
        due: How many handles are to be unpacked before `back` is let go.
        sums: CRC32 of each tensor that left, if asked for, by its handle's number.
        gone: Where a bundle that dies leaves its memory, for the carrier to take back.
    """

    __slots__ = (
        *("__weakref__", "arrived", "back", "counted", "due", "gone", "home", "left"),
        *("maker", "members", "nbytes", "seen", "slab", "sums"),
    )

    def __init__(self, gone: deque[Gone]) -> None:
        self.members: list[weakref.ref[Piece]] = []
        self.nbytes = self.counted = 0
        self.slab: Slab | None = None
        self.home: torch.Tensor | None = None
        self.left: Done | None = None
        self.back: torch.Tensor | None = None
        self.arrived: Event | None = None
        self.maker: Stream | None = None
        self.seen: Stream | None = None
        self.due = 0
        self.sums: dict[int, int] = {}
        self.gone = gone

    def __del__(self) -> None:
        if not hasattr(self, "gone"):  # an interrupt came before it was made
            return
        slab, back = self.slab, self.back
        if slab is not None:
            last = self.arrived or self.left  # the former waits for the latter
            # Memory that compute has waited for is in its order already.
            waiting = back if self.seen is None else None
            held = 0 if back is None else self.nbytes
            self.gone.append(Gone(held, slab, waiting, last))

    def is_alone(self) -> bool:
        """Whether nobody uses the memory that came back any more."""
        back = self.back
        if back is None:
            return True
        return use_count_of(back.untyped_storage()._cdata) == 1 + WRAPPERS

    def add(self, piece: Piece) -> None:
        """Let a piece travel with the others."""
        piece.bundle = self
        piece.start = self.nbytes
        self.members.append(weakref.ref(piece))
        self.counted += piece.nbytes
        self.nbytes += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT

    def living(self) -> list[Piece]:
        """Return the pieces that the graph still has."""
        return [piece for ref in self.members if (piece := ref()) is not None]

    @property
    def is_away(self) -> bool:
        """Whether some of its pieces are on the host only."""
        for ref in self.members:  # asked at each unpack: mostly, the first one tells
            piece = ref()
            if piece is None or piece.alias is not None:
                continue
            if piece.elsewhere is None or piece.is_away:
                return True
        return False

    @property
    def need(self) -> tuple[int, int]:
        """How soon backward needs it: of two bundles, the one with the larger value
        first."""
        need = -1, 0
        for piece in self.living():
            for handle in piece.handles():
                need = max(need, (handle.sequence, -handle.number))
        return need


class Scope:
    """What one forward has saved.

    Attributes:
        streams: The streams on which it has saved something.
        count: How many pieces it has saved.
        tensors: How many tensors it has saved; several can be in one piece.
        allowance: What it may keep without a look.
        twins: Whether several tensors in one storage are to be expected.
        ended: Whether it has saved all.
        form: Size and type of its first tensor: by it forwards of a kind are known.
        prefix: What is to leave; None as long as no forward like it was seen.
        saves: What the one before it has saved, by position.
        off: Whether all stays, because spilling does not lower the peak of memory.
        leads: Whether the next piece may belong to the prefix.
        noted: While it is observed, all pieces: each with its bytes and sequence.
        open: The bundle that is being gathered.
        bundles: Those that were sent, oldest first.
        shared: What has left while others kept it, each with its bytes.
        is_stirred: Whether anything has left or is not counted: if not, unpacking has
            nothing to do.
        task: The backward pass that unpacked last; -1 before the first one.
        coming: In that pass, bundles that are still to be brought, the last first.
    """

    __slots__ = (
        *("__weakref__", "allowance", "bundles", "coming", "count", "ended", "form"),
        *("is_stirred", "leads", "noted", "off", "open", "prefix", "saves"),
        *("shared", "streams", "task", "tensors", "twins"),
    )

    def __init__(self, stream: Stream) -> None:
        self.streams = [stream]
        self.count = 0
        self.tensors = 0
        self.allowance = NOTHING
        self.twins = False
        self.ended = False
        self.form: Any = None
        self.prefix: Prefix | None = None
        self.saves: Sequence[Save] = ()
        self.off = False
        self.leads = False
        self.noted: list[tuple[weakref.ref[Piece], int, int]] | None = None
        self.open: Bundle | None = None
        self.bundles: list[weakref.ref[Bundle]] = []
        self.shared: list[tuple[weakref.ref[Piece], int]] = []
        self.is_stirred = False
        self.task = -1
        self.coming: list[weakref.ref[Bundle]] = []

    def turn(self, task: int) -> None:
        """Prepare to bring what was sent, in the order in which backward needs it.

        Autograd runs operators in descending order of their creation, so what was saved
        last is needed first.
        """
        self.task = task
        sent = [bundle for ref in self.bundles if (bundle := ref()) is not None]
        sent.sort(key=lambda bundle: bundle.need)
        self.coming = [weakref.ref(bundle) for bundle in sent]
