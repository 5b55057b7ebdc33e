"""The device's decoder of quantized weights: a kernel launch each, in Triton.

Import it only where Triton is: `dequantizing` does.
"""

import torch
import triton
import triton.language as tl

from stagehand.stores.packing_triton import EXACT
from stagehand.stores.squareq_layout import QuantizedPlace

__all__ = ["decode"]

_TILE = 1024  # codes of a row that one program takes

_TYPES = {
    torch.bfloat16: tl.int16,  # rounded by hand, and written as bits
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def decode(wire: torch.Tensor, place: QuantizedPlace, image: torch.Tensor) -> None:
    """Write one tensor into an image."""
    scales, zeros, codes = place.parts(wire)
    rows = place.rows
    nbytes = rows.count * rows.columns * place.dtype.itemsize
    written = torch.int16 if place.dtype == torch.bfloat16 else place.dtype
    target = image[place.offset :][:nbytes].view(written)
    grid = (rows.count, triton.cdiv(rows.columns, _TILE))
    _decode_rows[grid](
        codes,
        scales,
        zeros,
        target,
        rows.columns,
        rows.padded,
        _TYPES[place.dtype],
        _TILE,
        **EXACT,
    )


@triton.jit
def _decode_rows(
    codes,
    scales,
    zeros,
    target,
    columns,
    padded,
    dtype: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = index < columns
    code = tl.load(codes + row * padded + index, mask=inside, other=0)
    weight = (code.to(tl.float32) - tl.load(zeros + row)) * tl.load(scales + row)
    if dtype == tl.int16:
        # Rounded to the nearest bfloat16, of two the even one: Triton's interpreter
        # would cut it off. Scales are finite, so no weight is NaN.
        bits = weight.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(target + row * columns + index, bits.to(tl.int16), mask=inside)
    else:
        tl.store(target + row * columns + index, weight.to(dtype), mask=inside)
