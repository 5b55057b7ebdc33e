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
        self,
        block: Block,
        number: int,
        dtype: torch.dtype,
        shape: torch.Size,
        stride: tuple[int, ...],
        offset: int,
        version: int,
    ) -> None:
        self.block = block
        self.number = number
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.version = version

    def view(self) -> torch.Tensor:
        """Return the view in the slot that holds the block now.

        Raises:
            RuntimeError: If the parameter was changed in place since it was saved, as
                autograd itself raises.
        """
        block = self.block
        if block.slot is None or block.target is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        tensor = block.tensors[self.number]
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified"
                f" by an inplace operation: a weight of block {block.name!r} of"
                f" shape {list(tensor.shape)} is at version {tensor._version};"
                f" expected version {self.version} instead"
            )
        # A view of its own: who keeps it holds the memory, and the slot can tell.
        base = block.views[self.number]
        if base.dtype is not self.dtype:
            base = block.target.view(self.dtype)
        return base.as_strided(self.shape, self.stride, self.offset)


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
        # Which tensor of a block begins or lies at an offset, noted once.
        self._numbers: dict[tuple[int, int, torch.dtype], int] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context inside which weights are saved as handles."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: torch.Tensor) -> "WeightHandle | _Kept":
        kind = type(saved)
        if kind is not torch.Tensor and type(saved.data) is not torch.Tensor:
            return _Kept(saved)  # a wrapper around other tensors
        try:
            address = saved.untyped_storage().data_ptr()
        except NotImplementedError:  # sparse, or otherwise without a storage
            return _Kept(saved)
        slot = self._slots.get(address)
        if slot is None or slot.occupant is None or saved.is_nested:
            return _Kept(saved)
        if saved.is_conj() or saved.is_neg():  # a handle knows bytes, not their meaning
            return _Kept(saved)
        block: Block = slot.occupant
        offset = int(saved.storage_offset())
        dtype = saved.dtype
        place = block.index, offset, dtype
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = _number_at(block, offset * dtype.itemsize)
        return WeightHandle(
            block,
            number,
            dtype,
            saved.shape,
            saved.stride(),
            offset,
            block.tensors[number]._version,
        )

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
