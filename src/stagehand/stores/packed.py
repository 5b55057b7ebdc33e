"""Packed bfloat16 as the wire of a block whose tensors stay in host memory."""

import math
from collections.abc import Sequence

import torch

from stagehand.core.layout import BlockLayout, Place, placed, plain_tensors
from stagehand.errors import StagehandInternalError
from stagehand.stores.packed_layout import PackedLayout, packable
from stagehand.stores.packed_stream import aligned
from stagehand.stores.packing import pack_image
from stagehand.stores.unpacking import (
    most_scratch_nbytes,
    scratch_nbytes,
    unpack_image,
)

__all__ = ["WORTH", "PackedWire", "most_bytes", "room_for"]

WORTH = 0.95
"""A block crosses the link packed if its wire is at most this part of its image."""

_PROBED = 64  # words of each tensor that are compared
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}


def most_bytes(layout: BlockLayout, device_type: str) -> tuple[int, int]:
    """Return the most that a block takes on a device beside its image, packed: the
    bytes of its wire, and those that it is decoded in.
    """
    if not any(packable(layout)):
        return 0, 0
    scratch = most_scratch_nbytes(layout.nbytes, device_type)
    return int(WORTH * layout.nbytes), scratch


def room_for(form: PackedLayout) -> int:
    """Return the pinned bytes to give a wire, so that it can be packed again."""
    return aligned(form.nbytes + form.nbytes // 100)


class PackedWire:
    """Packed bytes in pinned memory, of host tensors that may be edited.

    Memory: 0.75 of the block's bytes and a hundredth, beside the host tensors. An edit
    through `.data`, which nobody tells of, is seen by a sample of the host tensors.

    Args:
        layout: The block's.
        hosts: Its host tensors.
        form: What lies where in the wire.
        memory: 1-D uint8 pinned memory that begins with the wire.
        device_type: What decodes it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        hosts: Sequence[torch.Tensor],
        form: PackedLayout,
        memory: torch.Tensor,
        device_type: str,
    ) -> None:
        self._layout = layout
        self._hosts = list(hosts)
        self._form = form
        self._memory = memory
        self._scratch_nbytes = scratch_nbytes(form, device_type)
        self._is_old = False
        self._probes = [*map(_probe, hosts, layout.entries)]
        self._seen = self._look()

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link, at most: there is room to pack it again."""
        return self._memory.numel()

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes that torch operators decode in; none with kernels."""
        return self._scratch_nbytes

    @property
    def pinned(self) -> torch.Tensor:
        """The packed bytes."""
        return self._memory[: self._form.nbytes]

    def edited(self, index: int) -> None:
        """Say that a host tensor was changed."""
        self._is_old = True

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """Say that a host tensor lies elsewhere from now on."""
        self._hosts[index] = host
        self._probes[index] = _probe(host, self._layout.entries[index])

    def is_current(self) -> bool:
        """See `Wire.is_current`."""
        return not self._is_old and torch.equal(self._look(), self._seen)

    def renew(self) -> bool:
        """Pack the host tensors again, into the same memory; False if they need more.

        Memory: an image and its packed form, while it packs.
        """
        with plain_tensors():
            size = 2, self._layout.nbytes
            image, packed = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._seen = self._look()
        self._layout.pack(self._hosts, image)
        form, wire = pack_image(image, self._layout, wire=packed)
        if not form.packed or form.nbytes > self._memory.numel():
            return False
        self._memory[: form.nbytes].copy_(wire)
        self._form = form
        self._is_old = False
        return True

    def read_into(self, memory: torch.Tensor) -> int:
        """Do not call it: the bytes are in pinned memory."""
        raise StagehandInternalError("a wire in pinned memory was read")

    def decode(
        self, wire: torch.Tensor, image: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        """See `Wire.decode`."""
        unpack_image(wire, self._form, image, scratch=scratch)

    def _look(self) -> torch.Tensor:
        probes = [probe.flatten() for probe in self._probes]
        return torch.cat(probes) if probes else torch.empty(0, device="cpu")


def _probe(host: torch.Tensor, entry: Place) -> torch.Tensor:
    """Return a view of a few words of a tensor, spread over it."""
    words, shape, stride = _WORDS[host.dtype.itemsize], host.shape, host.stride()
    with plain_tensors():
        # Without the mark of one that is conjugated, which has no other words.
        start = int(host.storage_offset())
        host = placed(host.untyped_storage(), host.dtype, start, shape, stride)
        if tuple(stride) == entry.stride:  # it fills its memory
            flat = host.as_strided((host.numel(),), (1,), start)
            return flat.view(words)[:: host.numel() // _PROBED | 1]
        if host.is_complex():
            host = torch.view_as_real(host)
            words = _WORDS[host.dtype.itemsize]
        each = math.ceil(_PROBED ** (1 / max(host.dim(), 1)))  # of each dimension
        steps = (slice(None, None, max(1, size // each)) for size in host.shape)
        return host.view(words)[tuple(steps)]
