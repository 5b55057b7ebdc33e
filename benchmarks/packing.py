"""What smaller forms of weights cost on the host, beside a copy of them, and give.

Packed bfloat16 is lossless; INT8 (SquareQ) is not. What counts on the link is the bytes
of a block as it crosses: all of its wire, over those of the block in bfloat16.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.results import Result
from benchmarks.timing import take_turns
from stagehand.core.layout import layout_of
from stagehand.stores.converting import quantize
from stagehand.stores.dequantizing import dequantize_image
from stagehand.stores.packing import pack_image
from stagehand.stores.squareq_layout import Rows, quantized_layout_of
from stagehand.stores.unpacking import unpack_image

__all__ = ["measure"]

_TARGET_BITS = 12.1
_TARGET_PACKED = 0.755
_TARGET_QUANTIZED = 0.505
_SCRATCH = 1 << 20  # bytes: they stay in a core's own cache


def measure(rounds: int = 15, weights: int = 1 << 24) -> Iterator[Result]:
    """Yield times over that of a copy, the copy's rate, and bytes on the link."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(weights, generator=generator).mul_(0.02).bfloat16()
    yield from _packed(tensor, rounds)
    yield from _quantized(tensor.view(1024, -1), rounds)


def _packed(tensor: torch.Tensor, rounds: int) -> Iterator[Result]:
    weights = tensor.numel()
    layout = layout_of([("weight", tensor)])
    # Written to once before: fresh pages cost more than the copy.
    image, other, memory = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
    layout.pack([tensor], image)
    packed, wire = pack_image(image, layout, wire=memory)
    functions = {
        "copy": lambda: other.copy_(image),
        "encode": lambda: pack_image(image, layout, wire=memory),
        "decode": lambda: unpack_image(wire, packed, other),
    }
    times = take_turns(functions, rounds=rounds)
    for name in ("encode", "decode"):
        yield Result.of(
            f"{name} packed bfloat16 over a copy of its bytes",
            times[name].part_of(times["copy"]),
            "x",
        )
    yield Result.of(
        "copy of those bytes, a GB", times["copy"], "ms", scale=1e12 / layout.nbytes
    )
    bits = 8 * packed.nbytes / weights
    yield Result(
        name="packed bfloat16 of normal weights",
        value=bits,
        median=bits,
        unit="bits a weight",
        target=_TARGET_BITS,
    )
    yield _share("packed", packed.nbytes, image.numel(), _TARGET_PACKED)


def _quantized(matrix: torch.Tensor, rounds: int) -> Iterator[Result]:
    layout = layout_of([("weight", matrix)])
    image, other = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    layout.pack([matrix], image)
    codes, scales = quantize(matrix, "weight", Path("benchmark"))
    rows = Rows(count=codes.shape[0], columns=matrix.shape[1], padded=codes.shape[1])
    form = quantized_layout_of(layout, [rows])
    wire = torch.zeros(form.nbytes, dtype=torch.uint8)
    parts = form.quantized[0].parts(wire)
    for part, values in zip(parts, (scales, scales * 0, codes), strict=True):
        part.copy_(values)
    scratch = torch.zeros(_SCRATCH, dtype=torch.uint8)
    functions = {
        "copy": lambda: other.copy_(image),
        "quantize": lambda: quantize(matrix, "weight", Path("benchmark")),
        "dequantize": lambda: dequantize_image(wire, form, other, scratch=scratch),
    }
    times = take_turns(functions, rounds=rounds)
    for name in ("quantize", "dequantize"):
        yield Result.of(
            f"{name} INT8 over a copy of its bfloat16 bytes",
            times[name].part_of(times["copy"]),
            "x",
        )
    yield _share("INT8", form.nbytes, image.numel(), _TARGET_QUANTIZED)


def _share(form: str, crossing: int, nbytes: int, target: float) -> Result:
    share = crossing / nbytes
    return Result(
        name=f"bytes on the link, {form} over bfloat16",
        value=share,
        median=share,
        unit="x",
        target=target,
    )
