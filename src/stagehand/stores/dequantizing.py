"""Decodes INT8 weights on whatever device they are on: in Triton, or torch operators.

Neither waits for the device. Both give the bits of `squareq_layout.dequantized`.
"""

from collections.abc import Callable
from functools import cache

import torch

from stagehand.core.layout import plain_tensors
from stagehand.errors import StagehandInternalError
from stagehand.stores.squareq_layout import QuantizedLayout, QuantizedPlace
from stagehand.stores.unpacking import has_kernels
from stagehand.torch_private import inference_mode

__all__ = ["decoder_of", "dequantize_image", "scratch_nbytes"]

_MOST_SCRATCH = 16 << 20
"""A few launches for so many are a small part of the time that the link needs."""

_SCRATCH_SHARE = 8  # one part in so many of a weight, in float32, is decoded at once


@cache
def decoder_of(device_type: str) -> Callable[..., None] | None:
    """Return Triton's decoder; None where its kernels do not run."""
    if not has_kernels(device_type):
        return None
    from stagehand.stores import squareq_triton

    return squareq_triton.decode


def scratch_nbytes(form: QuantizedLayout, device_type: str) -> int:
    """Return the scratch memory with which a kind of device decodes a block.

    0 where Triton's kernels run; else an eighth of the largest weight in float32, but
    no more than 16 MiB, and no less than a row.
    """
    if decoder_of(device_type) is not None:
        return 0
    most = 0
    for place in form.quantized:
        row = 4 * place.rows.columns
        wanted = min(row * place.rows.count // _SCRATCH_SHARE, _MOST_SCRATCH)
        most = max(most, row, wanted)
    return most


def dequantize_image(
    wire: torch.Tensor,
    form: QuantizedLayout,
    image: torch.Tensor,
    *,
    scratch: torch.Tensor | None,
) -> None:
    """Fill a block's image from what crossed the link.

    Runs on the device's current stream, and the host does not wait for it.

    Args:
        wire: 1-D uint8 that holds `form.nbytes`.
        form: The wire's layout.
        image: 1-D uint8 for `form.image_nbytes`, on the wire's device.
        scratch: 1-D uint8 on that device, of `scratch_nbytes`; Triton needs none.

    Raises:
        StagehandInternalError: If wire, image or scratch memory are too small.
    """
    form.check_ends(wire, image)
    # Memory that was allocated in inference mode may only be written in it.
    with plain_tensors(), inference_mode(image.is_inference()):
        for run in form.raw:
            image[run.offset :][: run.nbytes].copy_(wire[run.source :][: run.nbytes])
        decode = decoder_of(image.device.type)
        for place in form.quantized:
            if decode is not None:
                decode(wire, place, image)
            else:
                _decode_with_torch(wire, place, image, scratch)


def _decode_with_torch(
    wire: torch.Tensor,
    place: QuantizedPlace,
    image: torch.Tensor,
    scratch: torch.Tensor | None,
) -> None:
    scales, zeros, codes = place.parts(wire)
    rows = place.rows
    nbytes = rows.count * rows.columns * place.dtype.itemsize
    target = image[place.offset :][:nbytes].view(place.dtype)
    target = target.view(rows.count, rows.columns)
    step = 0 if scratch is None else scratch.numel() // (4 * rows.columns)
    if scratch is None or not step:
        raise StagehandInternalError(
            f"no scratch memory for a row of {rows.columns} weights of {place.name!r}"
        )
    exact = scratch[: 4 * step * rows.columns].view(torch.float32)
    exact = exact.view(step, rows.columns)
    for at in range(0, rows.count, step):
        end = min(at + step, rows.count)
        some = exact[: end - at]
        torch.sub(codes[at:end, : rows.columns], zeros[at:end, None], out=some)
        target[at:end].copy_(some.mul_(scales[at:end, None]))
