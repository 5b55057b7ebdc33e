"""What lies where on the wire of a block with weights quantized to INT8.

A quantized weight is a matrix of rows: INT8 codes, padded to a multiple of some number,
and for each row a scale and a zero point in float32. Its value is, in this order and
rounding in float32 after each step, `(code - zero) * scale`, then rounded to the
parameter's element type: what every decoder has to give, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stagehand.core.layout import BlockLayout
from stagehand.errors import StagehandInternalError
from stagehand.stores.packed_layout import RawRun, check_ends, raw_runs
from stagehand.stores.packed_stream import aligned

__all__ = [
    "QuantizedLayout",
    "QuantizedPlace",
    "Rows",
    "dequantized",
    "quantized_layout_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The sizes of a quantized weight."""

    count: int
    """Rows: output features."""
    columns: int
    """Weights of a row."""
    padded: int
    """Codes of a row; those behind the weights mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPlace:
    """A tensor of a block that crosses the link as codes."""

    name: str
    """The tensor's name, for errors."""
    offset: int
    """Bytes from the start of the image to its first weight."""
    dtype: torch.dtype
    """The tensor's element type in the image."""
    rows: Rows
    """The sizes of its rows."""
    source: int
    """Bytes from the start of the wire to its scales; zero points and codes follow."""

    @property
    def zeros_at(self) -> int:
        """Byte of the wire where its zero points begin."""
        return self.source + aligned(4 * self.rows.count)

    @property
    def codes_at(self) -> int:
        """Byte of the wire where its codes begin."""
        return self.zeros_at + aligned(4 * self.rows.count)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.codes_at - self.source + aligned(self.rows.count * self.rows.padded)

    def parts(self, wire: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return its scales, zero points and codes, as views of a wire."""
        count, padded = self.rows.count, self.rows.padded
        scales = wire[self.source :][: 4 * count].view(torch.float32)
        zeros = wire[self.zeros_at :][: 4 * count].view(torch.float32)
        codes = wire[self.codes_at :][: count * padded].view(torch.int8)
        return scales, zeros, codes.view(count, padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayout:
    """What lies where on the wire, and where it belongs in the block's image."""

    image_nbytes: int
    """Size of the image."""
    nbytes: int
    """Size of the wire, a multiple of 256."""
    quantized: tuple[QuantizedPlace, ...]
    """What crosses as codes, in the order of the layout and of the wire."""
    raw: tuple[RawRun, ...]
    """The other tensors. On the wire they follow."""

    def check_ends(self, wire: torch.Tensor, image: torch.Tensor) -> None:
        """Do nothing if this wire can be decoded into this image.

        Raises:
            StagehandInternalError: Otherwise.
        """
        check_ends((wire, self.nbytes), (image, self.image_nbytes))


def quantized_layout_of(
    layout: BlockLayout, sizes: Sequence[Rows | None]
) -> QuantizedLayout:
    """Return the layout of a block's wire: codes, then raw bytes.

    Args:
        layout: The block's layout, as it shall lie on the device.
        sizes: For each entry those of its codes, or None if it crosses as it is.

    Raises:
        StagehandInternalError: If an entry with sizes has others, or is not contiguous.
    """
    places: list[QuantizedPlace] = []
    source = 0
    for entry, rows in zip(layout.entries, sizes, strict=True):
        if rows is None:
            continue
        numel = entry.nbytes // entry.dtype.itemsize
        if not entry.is_contiguous or numel != rows.count * rows.columns:
            raise StagehandInternalError(f"tensor {entry.name!r} is not of {rows}")
        place = QuantizedPlace(
            name=entry.name,
            offset=entry.offset,
            dtype=entry.dtype,
            rows=rows,
            source=source,
        )
        places.append(place)
        source += place.nbytes
    raw = raw_runs(layout, {place.offset for place in places}, source)
    return QuantizedLayout(
        image_nbytes=layout.nbytes,
        nbytes=source + sum(aligned(run.nbytes) for run in raw),
        quantized=tuple(places),
        raw=raw,
    )


def dequantized(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a weight as a matrix: the reference that decoders are held to."""
    exact = codes[:, :columns].float() - zeros[:, None]
    return (exact * scales[:, None]).to(dtype)
