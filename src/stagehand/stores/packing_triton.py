"""The device's decoder of packed bfloat16: two kernel launches a block, in Triton.

Import it only where Triton is: `unpacking` does. Like every kernel, these run on the
stream that is current for the device that is current.
"""

import subprocess
import warnings
from functools import cache

import torch
import triton
import triton.language as tl

from stagehand.errors import StagehandWarning
from stagehand.stores.packed_stream import HEAD_NBYTES, PAIRS_OFFSET, ROW_LENGTH, TILE

__all__ = ["EXACT", "decode", "runs_on"]

EXACT = {"enable_fp_fusion": False}
"""Options of every launch: each operation rounds by itself, none are fused."""

_REFUSALS = (
    *(RuntimeError, AssertionError, ImportError, OSError),
    subprocess.SubprocessError,
)
_TABLE = tl.constexpr(HEAD_NBYTES - PAIRS_OFFSET)
_ROW = tl.constexpr(ROW_LENGTH)


@cache
def runs_on(device_type: str) -> bool:
    """Return whether Triton's kernels take memory of this kind of device.

    Triton builds its driver with the machine's C compiler and Python's headers: where
    these are not, a GPU is left to torch's operators, with a warning.
    """
    try:
        active = triton.runtime.driver.active.get_active_torch_device()
    except _REFUSALS as error:
        if any(known.driver.is_active() for known in triton.backends.backends.values()):
            warnings.warn(
                f"Triton cannot run on this machine's {device_type} device ({error}):"
                " weights are decoded with torch's operators, which takes it longer;"
                " install a C compiler and Python's headers",
                StagehandWarning,
                stacklevel=2,
            )
        return False
    return bool(active.type == device_type)


def decode(
    wire: torch.Tensor,
    image: torch.Tensor,
    directory: torch.Tensor,
    *,
    tiles: int,
    escape_tiles: int,
) -> None:
    """Write the tensors that a directory lists into an image.

    Args:
        wire: 1-D uint8 that holds their streams.
        image: 1-D uint8.
        directory: int64, `ROW_LENGTH` for each tensor.
        tiles: Programs for all pairs.
        escape_tiles: Programs for all escapes.
    """
    rows = directory.numel() // ROW_LENGTH
    width = triton.next_power_of_2(rows)
    if tiles:
        _decode_pairs[(tiles,)](
            wire, image, directory, rows, width, TILE, num_warps=8, **EXACT
        )
    # On the same stream: the escapes replace what the first launch wrote for them.
    if escape_tiles:
        _write_escapes[(escape_tiles,)](
            wire, image, directory, rows, width, TILE, **EXACT
        )


# Not `tl.sum`: that is a kernel function too, and whether Triton's interpreter can run
# it was decided when Triton was imported.
@triton.jit
def _plus(one, other):
    return one + other


@triton.jit
def _row_of(directory, column, rows, width: tl.constexpr):
    """Return the row whose tiles this program is among, and the tile's number in it."""
    program = tl.program_id(0)
    index = tl.arange(0, width)
    first = directory + index * _ROW + column
    first = tl.load(first, mask=index < rows, other=program + 1)
    # Rows without a tile begin where the next one does: of those, the last counts.
    row = tl.reduce((first <= program).to(tl.int32), 0, _plus) - 1
    row = directory + row * _ROW
    return row, program - tl.load(row + column)


@triton.jit(do_not_specialize=["rows"])
def _decode_pairs(
    wire, image, directory, rows, width: tl.constexpr, tile: tl.constexpr
):
    row, number = _row_of(directory, 0, rows, width)
    low = wire + tl.multiple_of(tl.load(row + 2), 256)
    codes = wire + tl.multiple_of(tl.load(row + 3), 256)
    target = image + tl.multiple_of(tl.load(row + 5), 16)
    target = target.to(tl.pointer_type(tl.int16), bitcast=True)
    half = tl.multiple_of(tl.load(row + 6), 16)
    pairs = (low - _TABLE).to(tl.pointer_type(tl.int16), bitcast=True)
    index = number * tile + tl.arange(0, tile)
    inside = index < half
    code = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
    pair = tl.load(pairs + code).to(tl.int32)
    for which in tl.static_range(2):
        at = which * half + index
        byte = tl.load(low + at, mask=inside, other=0).to(tl.int32)
        exponent = (pair >> (8 * which)) & 0xFF
        weight = (byte & 0x80) << 8 | exponent << 7 | (byte & 0x7F)
        tl.store(target + at, weight.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _write_escapes(
    wire, image, directory, rows, width: tl.constexpr, tile: tl.constexpr
):
    row, number = _row_of(directory, 1, rows, width)
    escapes = wire + tl.multiple_of(tl.load(row + 4), 256)
    escapes = escapes.to(tl.pointer_type(tl.int64), bitcast=True)
    target = image + tl.multiple_of(tl.load(row + 5), 16)
    target = target.to(tl.pointer_type(tl.int16), bitcast=True)
    index = number * tile + tl.arange(0, tile)
    inside = index < tl.load(row + 7)
    escape = tl.load(escapes + index, mask=inside, other=0)
    tl.store(target + (escape >> 16), escape.to(tl.int16), mask=inside)
