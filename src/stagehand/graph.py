"""What autograd keeps of streamed weights: handles, not memory.

Autograd saves views of weights for backward (`nn.Linear` saves `weight.t()`). A view of
a slot would keep the slot's memory and read another block's bytes once the slot is
reused. So a saved tensor that lies in a slot becomes a handle: the block, and the
shape, strides and offset of the view inside the block's image. Unpacking brings the
block to the device and makes the view where the block lies then.

One pair of hooks serves a whole pass; it is entered outside of any checkpointed region,
so that checkpointing keeps working.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from stagehand.core.transfer import Slot
from stagehand.errors import StagehandInternalError
from stagehand.residency.blocks import Block

__all__ = ["SavedTensors", "WeightHandle"]


class WeightHandle:
    """A view of a block's image, without its memory.

    Attributes:
        block: Whose bytes they are.
        number: Which parameter or buffer of the block the view was made from.
        offset: Where it starts, in elements from the start of the image.
        version: The parameter's version when it was saved.
    """

    __slots__ = ("block", "dtype", "number", "offset", "shape", "stride", "version")

    def __init__(
        self, block: Block, number: int, saved: torch.Tensor, offset: int
    ) -> None:
        self.block = block
        self.number = number
        self.dtype = saved.dtype
        self.shape = saved.shape
        self.stride = saved.stride()
        self.offset = offset
        self.version = _version(block.tensors[number])

    def view(self) -> torch.Tensor:
        """Return the view in the slot that holds the block now.

        Raises:
            RuntimeError: If the parameter was changed in place since it was saved, as
                autograd itself raises.
        """
        block = self.block
        target = block.target
        if block.slot is None or target is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        tensor = block.tensors[self.number]
        version = _version(tensor)
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified"
                f" by an inplace operation: a weight of block {block.name!r} of"
                f" shape {list(tensor.shape)} is at version {version}; expected version"
                f" {self.version} instead"
            )
        # A view of its own: who keeps it holds the memory, and the slot can tell.
        base = block.views[self.number]
        if base.dtype is not self.dtype:
            base = target.view(self.dtype)
        return base.as_strided(self.shape, self.stride, self.offset)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _number_at(block: Block, offset: int) -> int:
    """Which tensor's bytes include an offset of the image."""
    found = 0
    for number, entry in enumerate(block.layout.entries):
        if entry.offset <= offset:
            found = number
            if offset < entry.offset + entry.nbytes:
                break
    return found


class SavedTensors:
    """The pack and unpack hooks of one runtime.

    Args:
        slots: The slots in use, by the address of their memory.
        fetch: Brings a block to the device for backward.
    """

    def __init__(
        self, slots: Mapping[int, Slot], fetch: Callable[[Block], None]
    ) -> None:
        self._slots = slots
        self._fetch = fetch
        self._numbers: dict[tuple[int, int], int] = {}  # by block and byte offset

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context inside which weights are saved as handles."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> "WeightHandle | _Kept":
        if saved.layout is torch.strided and not saved.is_nested:
            slot = self._slots.get(saved.untyped_storage().data_ptr())
            if slot is not None and slot.occupant is not None:
                return self._handle(slot.occupant, saved)
        return _Kept(saved)

    def _handle(self, block: Block, saved: torch.Tensor) -> WeightHandle:
        offset = int(saved.storage_offset())
        place = block.index, offset * saved.itemsize
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = _number_at(block, place[1])
        return WeightHandle(block, number, saved, offset)

    def _unpack(self, packed: "WeightHandle | _Kept") -> torch.Tensor:
        if isinstance(packed, _Kept):
            return packed.get()
        self._fetch(packed.block)
        return packed.view()


class _Kept:
    """A saved tensor that is kept as it is.

    Detached, because a node that holds its own output would never be freed. Hooks
    switch autograd's version check off, so it is done here.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, saved: torch.Tensor) -> None:
        self.tensor = saved.detach()
        self.version = saved._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified"
                f" by an inplace operation: a {self.tensor.dtype} tensor of shape"
                f" {list(self.tensor.shape)} is at version {self.tensor._version};"
                f" expected version {self.version} instead"
            )
        return self.tensor
