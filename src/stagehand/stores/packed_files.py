"""Packed bfloat16 in safetensors files: which tensor holds which weights.

A packed weight is a tensor of bytes whose name says what it was: the weight `NAME` of
shape `[768, 3072]` is stored as `NAME.packed.bfloat16.768x3072`. All else is stored as
it is, so a file needs nothing beside itself.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from stagehand.errors import TensorMismatchError
from stagehand.stores.checkpoint import Checkpoint, Extent
from stagehand.stores.files import FileSet
from stagehand.stores.packed_stream import HEAD_NBYTES, PackedHeader
from stagehand.stores.safetensors import read_tensor
from stagehand.stores.unpacking import unpack_into

__all__ = ["PackedWeight", "is_packed", "packed_name", "packed_weights", "unpacked"]

# No size has more digits; Python refuses to read numbers of thousands of them.
_SIZE = "[0-9]{1,19}"
_NAME = re.compile(rf"(.+)\.packed\.bfloat16\.({_SIZE}(?:x{_SIZE})*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A packed weight in a file."""

    name: str
    """The weight's own name."""
    shape: tuple[int, ...]
    """The weight's shape."""
    extent: Extent
    """Where the weight's stream lies."""
    header: PackedHeader
    """The stream's header."""

    @property
    def dtype(self) -> torch.dtype:
        """The weight's element type."""
        return torch.bfloat16

    @property
    def path(self) -> Path:
        """The file in which it lies."""
        return self.extent.path

    def decoded(self, files: FileSet) -> torch.Tensor:
        """Return the weight, in host memory."""
        weight = torch.empty(self.shape, dtype=torch.bfloat16, device="cpu")
        unpack_into(read_tensor(files, self.extent), self.header, weight)
        return weight


def packed_name(name: str, shape: Sequence[int]) -> str:
    """Return the name under which a weight is stored packed."""
    return f"{name}.packed.bfloat16.{'x'.join(map(str, shape))}"


def is_packed(name: str) -> bool:
    """Return whether a tensor's name says that it is packed."""
    return unpacked(name)[1] is not None


def unpacked(name: str) -> tuple[str, tuple[int, ...] | None]:
    """Return a tensor's own name, and its shape if it is packed."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name, None
    return match.group(1), tuple(map(int, match.group(2).split("x")))


def packed_weights(checkpoint: Checkpoint, files: FileSet) -> dict[str, PackedWeight]:
    """Return the packed weights of a checkpoint by their own names, all checked.

    Reads their heads and escapes: a few thousandths of their bytes, as a rule.

    Raises:
        TensorMismatchError: If one is of another type or size than its name and its
            head say, or is there as it is, too.
        CheckpointError: If one is not sound, or cannot be read.
    """
    found: dict[str, PackedWeight] = {}
    for key in checkpoint:
        name, shape = unpacked(key)
        if shape is None:
            continue
        extent = checkpoint[key]
        what = f"tensor {key!r} in {extent.path}"
        if name in checkpoint or name in found:
            raise TensorMismatchError(
                f"{what}: expected one tensor {name!r}, found another one in"
                " the checkpoint; remove one of the two"
            )
        if extent.dtype != torch.uint8 or len(extent.shape) != 1:
            raise TensorMismatchError(
                f"{what}: expected a packed stream of uint8 in one dimension, found"
                f" {extent.dtype} {list(extent.shape)}; pack it again"
            )
        head = read_tensor(files, extent.between(0, HEAD_NBYTES))
        header = PackedHeader.read(head, what)
        if header.numel != prod(shape):
            raise TensorMismatchError(
                f"{what}: expected {prod(shape)} weights for {list(shape)}, found"
                f" {header.numel}; pack it again"
            )
        header.check_nbytes(extent.nbytes, what)
        escapes = extent.between(header.escapes_offset, header.escapes_end)
        header.check_escapes(read_tensor(files, escapes).view(torch.int64), what)
        found[name] = PackedWeight(name=name, shape=shape, extent=extent, header=header)
    return found
