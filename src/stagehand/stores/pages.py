"""Which pages of a private file mapping were written: a change no counter shows."""

from __future__ import annotations

import mmap
import os

import torch

__all__ = ["was_written"]

_PAGEMAP = "/proc/self/pagemap"  # Linux: 64 bits for each page of this process
_BITS = 8  # bytes of an entry


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
    if not raw:
        return False
    flags = torch.frombuffer(bytearray(raw), dtype=torch.int64)
    is_there = (flags >> 62) & 3 != 0  # in memory, or swapped out
    is_own = (flags >> 61) & 1 == 0  # not the file's
    return bool((is_there & is_own).any())
