"""A layer's bytes: where its tensors lie in one image, and how files fill it.

Where weights are packed in the files, these fill the layer's wire: the bytes that cross
the link, from which the image is decoded on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stagehand.core.layout import can_cast, layout_of
from stagehand.errors import (
    CheckpointError,
    StagehandInternalError,
    TensorMismatchError,
)
from stagehand.stores.headers import FileStamp
from stagehand.stores.packed_files import PackedWeight
from stagehand.stores.packed_layout import in_runs, packed_layout_of
from stagehand.stores.reading import Part, writable
from stagehand.stores.unpacking import scratch_nbytes, unpack_image
from stagehand.streamer.depths import Footprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from stagehand.core.device import Device
    from stagehand.core.layout import BlockLayout
    from stagehand.stores.base import Skew
    from stagehand.stores.checkpoint import Extent
    from stagehand.stores.files import FileSet
    from stagehand.stores.packed_layout import PackedLayout
    from stagehand.streamer.layers import Stored

__all__ = ["LayerImage", "footprint_of", "wanted_dtype"]

_HOST_ALIGNMENT = 64  # bytes: torch's own, for tensors in host memory
_VIEW_ALIGNMENT = 8  # a tensor that begins so can be viewed as any type up to int64

_Named = tuple[str, "Extent"]


class LayerImage:
    """Where the tensors of one layer lie in its image, and the reads that fill it.

    In the image they have the order that they have in their files, so that a layer that
    lies together there is one read.

    Args:
        name: The layer's name, for errors.
        tensors: Where they lie.
        dtype: What floating-point tensors are handed out as; None leaves them.

    Raises:
        TensorMismatchError: If a tensor cannot be handed out as `dtype`.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, Stored], dtype: torch.dtype | None
    ) -> None:
        self.name = name
        extents = {key: _extent_of(stored) for key, stored in tensors.items()}
        self._in_files: list[_Named] = sorted(
            extents.items(), key=lambda item: (item[1].path, item[1].offset)
        )
        self._layout = layout_of(
            [
                (
                    key,
                    torch.empty(
                        tensors[key].shape, dtype=tensors[key].dtype, device="meta"
                    ),
                )
                for key, _ in self._in_files
            ]
        )
        self._dtypes = {
            key: wanted_dtype(f"{name}.{key}", stored.dtype, dtype)
            for key, stored in tensors.items()
        }
        self.form = _find_form(self._layout, tensors)
        """What lies where on the wire; None if the image itself crosses the link."""
        self._parts = _find_parts(_places(self._layout, self.form), self._in_files)
        self.nbytes = self._layout.nbytes
        """Bytes of the image, on the device as on the host."""
        self.link_nbytes = self.nbytes if self.form is None else self.form.nbytes
        """Bytes that files fill, and that cross the link."""
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

    def read(self, files: FileSet, memory: torch.Tensor) -> int:
        """Fill host memory with what crosses the link; return the bytes read.

        Raises:
            CheckpointError: If a file cannot be read, is shorter than it was, or was
                replaced; it names the layer.
        """
        if not self.read_bytes:
            return 0
        if self.form is not None:
            self.form.directory_in(memory).copy_(self.form.directory().flatten())
        try:
            return files.fill(self._parts, writable(memory))
        except CheckpointError as error:
            cut = self._first_cut()
            what = f"layer {self.name!r}" + (f", tensor {cut!r}" if cut else "")
            raise type(error)(f"{what}: {error}") from error

    def skew(self, files: FileSet) -> Skew | None:
        """Return where the image begins if the most bytes are to be read in place.

        A wire may begin anywhere.

        Raises:
            CheckpointError: If a file changed or cannot be opened.
        """
        if self.form is not None:
            return None
        widest = max((p.dtype.itemsize for p in self._layout.entries), default=1)
        return files.skew(self._parts, widest)

    def skew_in_use(self, files: FileSet) -> Skew | None:
        """Return the same for memory in which the tensors are used: the host's.

        Note "Bits and addresses". The processor's libraries add up the products of a
        matrix and a vector of float32 or wider in an order that depends on where these
        begin: results are the same bit for bit at multiples of 64 bytes, which is where
        torch puts tensors. Of narrower types they are the same wherever a tensor
        begins. So an image with wider ones, that are not cast, begins at such a
        multiple, or it is copied there.

        Raises:
            CheckpointError: If a file changed or cannot be opened.
        """
        skew = self.skew(files)
        return None if skew is None or skew.past % self._alignment else skew

    @property
    def _alignment(self) -> int:
        is_wide = any(
            (place.dtype.is_floating_point or place.dtype.is_complex)
            and place.dtype.itemsize > 2
            and self._dtypes[place.name] == place.dtype  # a cast has its own memory
            for place in self._layout.entries
        )
        return _HOST_ALIGNMENT if is_wide else _VIEW_ALIGNMENT

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

    def decode(
        self, wire: torch.Tensor, image: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        """Fill an image from its wire, see `Wire.decode`."""
        if self.form is None:
            raise StagehandInternalError(f"layer {self.name!r} has no wire")
        unpack_image(wire, self.form, image, scratch=scratch)

    def scratch_nbytes(self, device_type: str) -> int:
        """Return the device memory that `decode` works in on a kind of device."""
        return 0 if self.form is None else scratch_nbytes(self.form, device_type)

    def tensors(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the layer's tensors on an image, on whatever device it is."""
        places = self._layout.entries
        views = {
            place.name: view
            for place, view in zip(places, self._layout.views(image), strict=True)
        }
        return {key: views[key].to(dtype) for key, dtype in self._dtypes.items()}


def footprint_of(
    images: Sequence[LayerImage], files: FileSet, device: Device
) -> Footprint:
    """Return what the layers take where a device streams them.

    Raises:
        CheckpointError: If a file changed or cannot be opened.
    """
    taken, on_host = device.taken_bytes, device.is_host
    waiting = [_with_skew(image.link_nbytes, image.skew(files)) for image in images]
    used = [image.nbytes for image in images]
    if on_host:
        used = [_with_skew(image.nbytes, image.skew_in_use(files)) for image in images]
    packed = [image for image in images if image.form is not None]
    wire = max((image.link_nbytes for image in packed), default=0)
    kind = device.torch_device.type
    scratch = max((image.scratch_nbytes(kind) for image in packed), default=0)
    return Footprint(
        slot=taken(max(used)),
        waiting=max(waiting),
        cast=max(image.cast_bytes for image in images),
        wire=0 if on_host else taken(wire),
        scratch=0 if on_host else taken(scratch),
        unpacked_from=wire if on_host else 0,
    )


def _with_skew(nbytes: int, skew: Skew | None) -> int:
    return nbytes + (skew.of if skew else 0)


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


def _extent_of(stored: Stored) -> Extent:
    return stored.extent if isinstance(stored, PackedWeight) else stored


def _find_form(
    layout: BlockLayout, tensors: Mapping[str, Stored]
) -> PackedLayout | None:
    """Return the wire's layout if a tensor is packed."""
    found = [tensors[place.name] for place in layout.entries]
    headers = [s.header if isinstance(s, PackedWeight) else None for s in found]
    return packed_layout_of(layout, headers) if any(headers) else None


def _places(layout: BlockLayout, form: PackedLayout | None) -> list[int]:
    """Return where each entry's bytes go, in the image or on the wire."""
    if form is None:
        return [entry.offset for entry in layout.entries]
    streams = {place.offset: place.source for place in form.packed}
    return [
        # An empty one goes nowhere.
        streams.get(entry.offset, in_runs(form.raw, entry.offset) or 0)
        for entry in layout.entries
    ]


def _find_parts(
    places: Sequence[int], in_files: Sequence[_Named]
) -> dict[Path, list[Part]]:
    found: dict[Path, list[Part]] = {}
    for place, (_, extent) in zip(places, in_files, strict=True):
        if not extent.nbytes:
            continue
        parts = found.setdefault(extent.path, [])
        part = Part(extent.offset, place, extent.nbytes)
        if parts and parts[-1].reaches(part):
            parts[-1] = parts[-1].joined(part)
        else:
            parts.append(part)
    return found
