"""Handles: what a graph keeps of a block's weights, instead of their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.core.saved import modified
from stagehand.errors import StagehandInternalError
from stagehand.torch_private import negated

if TYPE_CHECKING:
    import torch

    from stagehand.residency.blocks import Block

__all__ = ["CastHandle", "ViewPlace", "WeightHandle", "handle_at", "number_at"]

# Bounds of caches: a model may cut its weights in other ways in each pass. Views of one
# slot, handles of one block.
_VIEWS_KEPT = 1_000
_HANDLES_KEPT = 10_000
_ALIKE_KEPT = 8  # handles of views that begin at one byte


class ViewPlace:
    """Where a view lies in an image, and what it is like; one object for all alike.

    Attributes:
        number: Which parameter or buffer of the block the view was made from.
        offset: Where it starts, in elements from the start of the image.
        start: The same in bytes.
        is_complex: Whether such a view can be the conjugate of its bytes.
        is_part: Whether it can be the negative of its bytes: it has every other element
            of a row at most, as the imaginary parts of conjugates do.
        is_conj: Whether it is the conjugate.
        is_neg: Whether it is the negative.
    """

    __slots__ = (
        "dtype",
        "is_complex",
        "is_conj",
        "is_neg",
        "is_part",
        "number",
        "offset",
        "shape",
        "start",
        "stride",
    )

    def __init__(
        self,
        number: int,
        offset: int,
        dtype: torch.dtype,
        shape: torch.Size,
        stride: tuple[int, ...],
        is_conj: bool,
        is_neg: bool,
    ) -> None:
        self.number = number
        self.offset = offset
        self.start = offset * dtype.itemsize
        self.dtype = dtype
        self.is_complex = dtype.is_complex
        steps = zip(shape, stride, strict=True)
        parts = all(step % 2 == 0 for size, step in steps if size > 1)
        self.is_part = parts or is_neg
        self.is_conj = is_conj
        self.is_neg = is_neg
        self.shape = shape
        self.stride = stride

    def view_of(self, block: Block) -> torch.Tensor:
        """Return the view in the slot that holds the block now."""
        base = block.views[self.number]
        if base.dtype is not self.dtype and block.target is not None:
            base = block.target.view(self.dtype)
        # A view of the slot alone: it would keep its base, which nobody else counts.
        return self.cut_from(base, self.offset).data

    def cut_from(self, base: torch.Tensor, first: int) -> torch.Tensor:
        """Return such a view of a tensor of its type, from an element of its memory."""
        view = base.as_strided(self.shape, self.stride, first)
        view = view.conj() if self.is_conj else view
        return negated(view) if self.is_neg else view


class WeightHandle:
    """A view of a block's image, without its memory.

    Attributes:
        block: Whose bytes they are.
        place: Where in the image.
        tensor: The parameter.
        version: The parameter's version when it was saved.
    """

    __slots__ = ("block", "place", "tensor", "version")

    def __init__(self, block: Block, place: ViewPlace) -> None:
        self.block = block
        self.place = place
        self.tensor = block.tensors[place.number]
        self.version: int = self.tensor._version

    def view(self) -> torch.Tensor:
        """Return the view in the slot that holds the block now.

        Raises:
            RuntimeError: If the parameter was changed in place since it was saved, as
                autograd itself raises.
        """
        block, place = self.block, self.place
        slot = block.slot
        if slot is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        if self.tensor._version != self.version:
            raise _changed(block, self.tensor, self.version)
        view: torch.Tensor | None = slot.views.get(place)
        if view is None:
            view = place.view_of(block)
            if len(slot.views) < _VIEWS_KEPT:
                slot.views[place] = view
                slot.alone += 1
        # A tensor of its own: if somebody keeps it, the memory's reference count tells.
        return view.data  # like `detach()`, but faster

    def where_it_lies(self) -> torch.Tensor:
        """Return the view on the device or on the host, wherever the block is."""
        block, place = self.block, self.place
        if block.bound or block.store is None:
            return self.view()
        host = block.store.hosts[place.number]
        start = place.start - block.layout.entries[place.number].offset
        flat = host.as_strided((host.numel(),), (1,)).view(place.dtype)
        first = int(flat.storage_offset()) + start // place.dtype.itemsize
        return place.cut_from(flat, first)


def number_at(block: Block, offset: int) -> int:
    """Return which tensor's bytes include an offset of the image."""
    found = 0
    for number, entry in enumerate(block.layout.entries):
        if entry.offset <= offset:
            found = number
            if offset < entry.offset + entry.nbytes:
                break
    return found


def handle_at(block: Block, place: ViewPlace) -> WeightHandle:
    """Return the handle of a view as it is now, and know it when it is saved again."""
    known, others = block.handles, []
    there: tuple[WeightHandle, ...] = known.get(place.start, ())
    for handle in there:
        if handle.place is not place:
            others.append(handle)
        elif handle.version == handle.tensor._version:
            return handle
    if len(known) >= _HANDLES_KEPT:
        known.clear()
    handle = WeightHandle(block, place)
    known[place.start] = (handle, *others[: _ALIKE_KEPT - 1])
    return handle


class CastHandle:
    """A view of a weight's copy in another element type, made again when asked for.

    Attributes:
        block: Whose weight it is.
        weight: The parameter.
        version: The parameter's version when the cast was saved.
        dtype: Of the cast.
        shape: Of the view, as its `stride` and its `offset` in elements of the cast.
    """

    __slots__ = ("block", "dtype", "offset", "shape", "stride", "version", "weight")

    def __init__(
        self,
        block: Block,
        weight: torch.Tensor,
        dtype: torch.dtype,
        saved: torch.Tensor,
    ) -> None:
        self.block = block
        self.weight = weight
        self.dtype = dtype
        self.shape = saved.shape
        self.stride = saved.stride()
        self.offset = int(saved.storage_offset())
        self.version = weight._version

    def view(self) -> torch.Tensor:
        """Return the view, of a cast that is made now; see `WeightHandle.view`."""
        if self.weight._version != self.version:
            raise _changed(self.block, self.weight, self.version)
        cast = self.weight.data.to(self.dtype)
        return cast.as_strided(self.shape, self.stride, self.offset)

    where_it_lies = view


def _changed(block: Block, tensor: torch.Tensor, version: int) -> RuntimeError:
    what = f"a weight of block {block.name!r} of shape {list(tensor.shape)}"
    return modified(what, tensor._version, version)
