"""Which pages of a private file mapping were written: a change no counter shows."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["some_elements", "was_written"]

_PAGEMAP = "/proc/self/pagemap"  # Linux: 64 bits for each page of this process
_BITS = 8  # bytes of an entry
_ELEMENTS = 8  # a tensor, of which a sample is taken


def was_written(tensor: torch.Tensor) -> bool:
    """Return whether a page under a host tensor is this process's own.

    A page of a private mapping belongs to its file until it is written. Neighbours on
    one page look written together. Where the system does not tell, the answer is no.

    Cost: 8 bytes to read for each page of the tensor.
    """
    if not tensor.numel():
        return False
    start = tensor.data_ptr()
    first = start // mmap.PAGESIZE
    last = (start + tensor.numel() * tensor.element_size() - 1) // mmap.PAGESIZE
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), (last - first + 1) * _BITS, first * _BITS)
    except OSError:
        return False
    # Mostly nothing of a mapping is in memory, and all is zero.
    return raw != bytes(len(raw)) and bool(_are_own(raw).any())


def some_elements(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of a few elements of each host tensor, spread over it.

    Elements that a file mapping still has from its file come as zeros: reading them
    would bring their pages, and their neighbours, in from the disk.
    """
    pieces = []
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            for tensor in tensors:
                pieces += _some(tensor, file.fileno())
    except OSError:
        pieces = [piece for tensor in tensors for piece in _some(tensor, None)]
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.cat(pieces) if pieces else nothing


def _some(tensor: torch.Tensor, pagemap: int | None) -> list[torch.Tensor]:
    if not tensor.numel():
        return []
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS)
    some = flat[::step]
    if pagemap is None:
        return [_as_bytes(some)]
    apart = step * flat.element_size()
    start = flat.data_ptr()
    pages = [(start + i * apart) // mmap.PAGESIZE for i in range(some.numel())]
    entries = {page: os.pread(pagemap, _BITS, page * _BITS) for page in set(pages)}
    own = {page: bool(raw) and bool(_are_own(raw)) for page, raw in entries.items()}
    if all(own.values()):
        return [_as_bytes(some)]
    nothing = torch.zeros(some.element_size(), dtype=torch.uint8, device="cpu")
    return [
        _as_bytes(flat[i * step : i * step + 1]) if own[page] else nothing
        for i, page in enumerate(pages)
    ]


def _as_bytes(some: torch.Tensor) -> torch.Tensor:
    """What elements say: PyTorch views no conjugate or negative as another type."""
    return some.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def _are_own(raw: bytes) -> torch.Tensor:
    """For each page's entry, whether it is this process's own."""
    flags = torch.frombuffer(bytearray(raw), dtype=torch.int64)
    is_there = (flags >> 62) & 3 != 0  # in memory, or swapped out
    return is_there & ((flags >> 61) & 1 == 0)  # and not the file's
