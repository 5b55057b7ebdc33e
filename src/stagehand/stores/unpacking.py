"""Decodes packed bfloat16 on whatever device it is on: in Triton, or torch operators.

Neither waits for the device, and no shape depends on what was decoded: a header says
how many escapes there are.
"""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from stagehand.core.layout import plain_tensors
from stagehand.errors import StagehandInternalError
from stagehand.stores.packed_layout import PackedLayout
from stagehand.stores.packed_stream import HEAD_NBYTES, PAIRS_OFFSET, PackedHeader
from stagehand.torch_private import inference_mode

__all__ = [
    "SCRATCH_BYTES_PER_PAIR",
    "decoder_of",
    "has_kernels",
    "most_scratch_nbytes",
    "scratch_nbytes",
    "unpack_image",
    "unpack_into",
]

SCRATCH_BYTES_PER_PAIR = 8
"""Bytes of scratch memory for two weights that the torch operators decode at once."""

_HOST_PAIRS = 1 << 17
"""For each thread: scratch, codes and weights stay in a core's own cache."""

_DEVICE_PAIRS = 1 << 21
"""A dozen launches for so many are a small part of the time that the link needs."""

_SIGN_AND_MANTISSA = 0x807F - (1 << 16)


def has_kernels(device_type: str) -> bool:
    """Return whether Triton is installed and its kernels run on a kind of device.

    Args:
        device_type: What `torch.device.type` says.
    """
    if device_type == "cpu" or importlib.util.find_spec("triton") is None:
        return False
    from stagehand.stores import packing_triton

    return packing_triton.runs_on(device_type)


@cache
def decoder_of(device_type: str) -> Callable[..., None] | None:
    """Return Triton's decoder; None where its kernels do not run."""
    if not has_kernels(device_type):
        return None
    from stagehand.stores import packing_triton

    return packing_triton.decode


def scratch_nbytes(packed: PackedLayout, device_type: str) -> int:
    """Return the scratch memory with which a kind of device decodes a block well.

    0 where Triton's kernels run; else a quarter of the largest tensor, up to 16 MiB.
    """
    if decoder_of(device_type) is not None:
        return 0
    half = max((entry.header.half for entry in packed.packed), default=0)
    return most_scratch_nbytes(4 * half, device_type)


def most_scratch_nbytes(nbytes: int, device_type: str) -> int:
    """Return the most that `scratch_nbytes` says of any block of so many bytes."""
    if decoder_of(device_type) is not None:
        return 0
    pairs = nbytes // 4 // 8
    return SCRATCH_BYTES_PER_PAIR * min(_DEVICE_PAIRS, max(pairs, 512))


def unpack_into(
    stream: torch.Tensor, header: PackedHeader, target: torch.Tensor
) -> None:
    """Decode one tensor, bit for bit.

    Args:
        stream: 1-D uint8, as `packing.pack` wrote it, on any device.
        header: The stream's.
        target: bfloat16, contiguous, of the header's size, on the same device.

    Raises:
        StagehandInternalError: If the two do not fit the header or each other.
    """
    image = target.detach().view(-1).view(torch.uint8)
    unpack_image(stream, PackedLayout.of_stream(header), image)


def unpack_image(
    wire: torch.Tensor,
    packed: PackedLayout,
    image: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
) -> None:
    """Fill a block's image from what crossed the link, bit for bit.

    Runs on the device's current stream, and the host does not wait for it. The wire
    must not be overwritten, nor the image be read, before that stream has come there.

    Args:
        wire: 1-D uint8 that holds `packed.nbytes`, starting at a multiple of 16 bytes.
        packed: The wire's layout.
        image: 1-D uint8 for `packed.image_nbytes`, on the wire's device.
        scratch: 1-D uint8 on that device for torch operators to work in; Triton needs
            none. More makes fewer launches, at `SCRATCH_BYTES_PER_PAIR` for two weights
            at once. By default the host takes 1 MiB a thread and a device 16 MiB.

    Raises:
        StagehandInternalError: If wire or image cannot hold the layout, or the scratch
            memory not one pair.
    """
    packed.check_ends(wire, image)
    if scratch is not None and scratch.nbytes < SCRATCH_BYTES_PER_PAIR:
        raise StagehandInternalError(
            f"{scratch.nbytes} bytes of scratch memory to decode packed weights in: "
            f"expected at least {SCRATCH_BYTES_PER_PAIR}"
        )
    # Memory that was allocated in inference mode may only be written in it.
    with plain_tensors(), inference_mode(image.is_inference()):
        for run in packed.raw:
            image[run.offset :][: run.nbytes].copy_(wire[run.source :][: run.nbytes])
        decode = decoder_of(image.device.type)
        if decode is None:
            _unpack_with_torch(wire, packed, image, scratch)
        elif packed.packed:
            decode(
                wire,
                image,
                packed.directory_in(wire),
                tiles=packed.tiles,
                escape_tiles=packed.escape_tiles,
            )


def _unpack_with_torch(
    wire: torch.Tensor,
    packed: PackedLayout,
    image: torch.Tensor,
    scratch: torch.Tensor | None,
) -> None:
    if scratch is None:
        on_host = image.device.type == "cpu"
        pairs = _HOST_PAIRS * torch.get_num_threads() if on_host else _DEVICE_PAIRS
        largest = max((entry.header.half for entry in packed.packed), default=0)
        nbytes = SCRATCH_BYTES_PER_PAIR * min(pairs, largest)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=image.device)
    for entry in packed.packed:
        header = entry.header
        stream = wire[entry.source :][: header.nbytes]
        weights = image[entry.offset :][: 2 * header.numel].view(torch.int16)
        _decode_pairs(stream, header, weights, scratch)
        for escapes in torch.split(header.escapes_in(stream), scratch.numel() // 8):
            positions = escapes >> 16
            weights.scatter_(0, positions, escapes.view(torch.int16)[::4])


def _decode_pairs(
    stream: torch.Tensor,
    header: PackedHeader,
    weights: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Write all weights but the escapes, as many pairs at once as the scratch holds."""
    half = header.half
    step = scratch.numel() // SCRATCH_BYTES_PER_PAIR
    index = scratch[: 4 * step].view(torch.int32)
    pair = scratch[4 * step :][: 2 * step].view(torch.int16)
    exponent = scratch[6 * step :][: 2 * step].view(torch.int16)
    pairs = stream[PAIRS_OFFSET:HEAD_NBYTES].view(torch.int16)
    low = stream[HEAD_NBYTES:][: 2 * half].view(torch.int8)
    codes = stream[header.codes_offset :][:half]
    for at in range(0, half, step):
        end = min(at + step, half)
        index, pair, exponent = (part[: end - at] for part in (index, pair, exponent))
        index.copy_(codes[at:end])
        torch.index_select(pairs, 0, index, out=pair)
        for which in range(2):
            mine = weights[which * half + at : which * half + end]
            # Widened with its sign, a byte has it where bfloat16 wants it.
            mine.copy_(low[which * half + at : which * half + end])
            mine.bitwise_and_(_SIGN_AND_MANTISSA)
            # The exponents of the first half are the low bytes, those of the second
            # the high ones; both go to bits 7 to 14.
            if which == 0:
                torch.bitwise_left_shift(pair, 7, out=exponent)
            else:
                torch.bitwise_right_shift(pair, 1, out=exponent)
            mine.bitwise_or_(exponent.bitwise_and_(0x7F80))
