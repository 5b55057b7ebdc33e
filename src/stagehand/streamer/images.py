"""A layer's bytes: where its tensors lie in one image, and how files fill it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from stagehand.core.layout import can_cast, layout_of, plain_tensors
from stagehand.errors import (
    CheckpointError,
    StagehandInternalError,
    TensorMismatchError,
)
from stagehand.stores.headers import FileStamp
from stagehand.stores.reading import Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stagehand.core.layout import BlockLayout
    from stagehand.stores.base import Skew
    from stagehand.stores.checkpoint import Extent
    from stagehand.stores.files import FileSet

__all__ = ["LayerImage", "read_tensor", "wanted_dtype"]

_Named = tuple[str, "Extent"]


class LayerImage:
    """Where the tensors of one layer lie in its image, and the reads that fill it.

    In the image they have the order that they have in their files, so that a layer that
    lies together there is one read.

    Args:
        name: The layer's name, for errors.
        extents: Its tensors.
        dtype: What floating-point tensors are handed out as; None leaves them.

    Raises:
        TensorMismatchError: If a tensor cannot be handed out as `dtype`.
    """

    def __init__(
        self, name: str, extents: Mapping[str, Extent], dtype: torch.dtype | None
    ) -> None:
        self.name = name
        self._in_files: list[_Named] = sorted(
            extents.items(), key=lambda item: (item[1].path, item[1].offset)
        )
        self._layout = layout_of(
            [
                (key, torch.empty(extent.shape, dtype=extent.dtype, device="meta"))
                for key, extent in self._in_files
            ]
        )
        self._dtypes = {
            key: wanted_dtype(f"{name}.{key}", extent.dtype, dtype)
            for key, extent in extents.items()
        }
        self._parts = _find_parts(self._layout, self._in_files)
        self.nbytes = self._layout.nbytes
        """Bytes of the image, on the device as on the host."""
        self.read_bytes = sum(extent.nbytes for extent in extents.values())
        """Bytes that come from files."""
        self.cast_bytes = sum(
            place.nbytes // place.dtype.itemsize * self._dtypes[place.name].itemsize
            for place in self._layout.entries
            if self._dtypes[place.name] != place.dtype
        )
        """Bytes of the tensors that are handed out as another type."""

    def __repr__(self) -> str:
        return f"LayerImage({self.name!r}, {self.nbytes} bytes)"

    def read(self, files: FileSet, image: torch.Tensor) -> int:
        """Fill an image in host memory; return the bytes read.

        Raises:
            CheckpointError: If a file cannot be read, is shorter than it was, or was
                replaced; it names the layer.
        """
        if not self.read_bytes:
            return 0
        try:
            return files.fill(self._parts, _writable(image))
        except CheckpointError as error:
            cut = self._first_cut()
            what = f"layer {self.name!r}" + (f", tensor {cut!r}" if cut else "")
            raise type(error)(f"{what}: {error}") from error

    def skew(self, files: FileSet) -> Skew | None:
        """Return where the image begins if the most bytes are to be read in place.

        Raises:
            CheckpointError: If a file changed or cannot be opened.
        """
        widest = max((p.dtype.itemsize for p in self._layout.entries), default=1)
        return files.skew(self._parts, widest)

    def _first_cut(self) -> str | None:
        """Return the first tensor that goes on where its file ends now."""
        for key, extent in self._in_files:
            try:
                size = FileStamp.of(extent.path).size
            except OSError:
                return None
            if extent.offset + extent.nbytes > size:
                return key
        return None

    def tensors(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the layer's tensors on an image, on whatever device it is."""
        places = self._layout.entries
        views = {
            place.name: view
            for place, view in zip(places, self._layout.views(image), strict=True)
        }
        return {key: views[key].to(dtype) for key, dtype in self._dtypes.items()}


def wanted_dtype(
    name: str, found: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    """Return the element type to hand a tensor out as: integers stay what they are.

    Raises:
        TensorMismatchError: If floating-point values would become integers, or torch
            cannot cast them.
    """
    if wanted is None or found == wanted or not found.is_floating_point:
        return found
    if not wanted.is_floating_point or not can_cast(found, wanted):
        raise TensorMismatchError(
            f"tensor {name!r} is {found} in its file, dtype is {wanted}: expected a"
            " floating-point type that torch casts it to; dtype=None leaves every"
            " tensor as it is"
        )
    return wanted


def read_tensor(files: FileSet, extent: Extent) -> torch.Tensor:
    """Return a tensor of a file in ordinary memory."""
    with plain_tensors():
        memory = torch.empty(extent.nbytes, dtype=torch.uint8, device="cpu")
        if extent.nbytes:
            files.read(extent.path, extent.offset, _writable(memory))
        return memory.view(extent.dtype).view(extent.shape)


def _find_parts(
    layout: BlockLayout, in_files: Sequence[_Named]
) -> dict[Path, list[Part]]:
    found: dict[Path, list[Part]] = {}
    for place, (_, extent) in zip(layout.entries, in_files, strict=True):
        if not extent.nbytes:
            continue
        parts = found.setdefault(extent.path, [])
        part = Part(extent.offset, place.offset, extent.nbytes)
        if parts and parts[-1].reaches(part):
            parts[-1] = parts[-1].joined(part)
        else:
            parts.append(part)
    return found


def _writable(memory: torch.Tensor) -> memoryview:
    if memory.device.type != "cpu":
        raise StagehandInternalError(f"a file cannot be read into {memory.device}")
    array = (ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())
    return memoryview(array).cast("B")
