"""Packs bfloat16 losslessly into about 12 bits a weight, on the host.

Of a weight's 16 bits the 8 of the exponent carry about 2.6. The 15 commonest exponents
of a tensor get a code of 4 bits; weights with another one are listed. See
`packed_stream` for what lies where, and `unpacking` for the way back.
"""

from dataclasses import dataclass, replace

import torch

from stagehand.core.layout import BlockLayout, plain_tensors
from stagehand.errors import StagehandInternalError
from stagehand.stores.packed_layout import PackedLayout, packable, packed_layout_of
from stagehand.stores.packed_stream import ESCAPE, HEAD_NBYTES, SMALLEST, PackedHeader
from stagehand.torch_private import inference_mode

__all__ = ["LARGEST_SHARE", "PackedTensor", "pack", "pack_image"]

LARGEST_SHARE = 0.875
"""A tensor is packed if its stream is at most this share of its bytes. Streams of large
trained tensors take a little more than 0.75."""

_SAMPLE = 1 << 17
"""How many weights' exponents are counted: enough to find those that one weight in 4000
has, and so few that it takes no time beside packing a large tensor."""

_PAIRS = 1 << 17
"""Pairs that each thread packs at once: so few stay in a core's own cache."""

_LOWEST_BITS = 0x1111_1111_1111_1111  # the lowest bit of each of 16 codes in an int64
_SIGN_AND_MANTISSA = 0x807F - (1 << 16)
_HIGH_BYTE = 0xFF00 - (1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """One packed tensor."""

    header: PackedHeader
    """What is needed to decode it."""
    stream: torch.Tensor
    """1-D uint8, of the header's size."""


def pack(tensor: torch.Tensor) -> PackedTensor | None:
    """Pack one tensor, or return None if its stream would exceed `LARGEST_SHARE`.

    Every bit pattern comes back, those of NaNs included. The commonest exponents are
    those of some hundred thousand weights, evenly spread: a wrong guess costs bytes,
    never bits. Tensors whose exponents are noise are given up after the counting.

    Memory: `LARGEST_SHARE` of the tensor for the stream, of which what is not written
    is not touched, and 1 MiB a thread to work in.

    Args:
        tensor: bfloat16, contiguous, in host memory.

    Raises:
        StagehandInternalError: If `tensor` is something else.
    """
    if (
        tensor.dtype != torch.bfloat16
        or tensor.device.type != "cpu"
        or not tensor.is_contiguous()
    ):
        raise StagehandInternalError(
            f"{tensor.dtype} with strides {tensor.stride()} on {tensor.device} cannot "
            f"be packed: expected contiguous bfloat16 in host memory"
        )
    with plain_tensors():
        words = tensor.detach().view(-1).view(torch.int16)
        nbytes = int(2 * words.numel() * LARGEST_SHARE)
        stream = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        header = _pack_into(words, stream)
    if header is None:
        return None
    return PackedTensor(header=header, stream=stream[: header.nbytes])


def pack_image(
    image: torch.Tensor, layout: BlockLayout, *, wire: torch.Tensor | None = None
) -> tuple[PackedLayout, torch.Tensor]:
    """Pack what shrinks of a block's image; the rest crosses as it is.

    If nothing shrinks, the layout's `packed` is empty, and packing was of no use.

    Args:
        image: 1-D uint8 host memory that holds the block.
        layout: The image's layout.
        wire: 1-D uint8 host memory to write to, at least as long as the image, starting
            at a multiple of 16 bytes; new memory by default.

    Returns:
        The wire's layout, and the part of `wire` that crosses the link.

    Raises:
        StagehandInternalError: If `image` or `wire` cannot hold the layout.
    """
    if wire is None:
        with plain_tensors():
            wire = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    layout.check_image(image)
    layout.check_image(wire)
    headers: list[PackedHeader | None] = []
    used = 0
    with plain_tensors(), inference_mode(wire.is_inference()):
        for place, may in zip(layout.entries, packable(layout), strict=True):
            header = None
            if may:
                words = image[place.offset :][: place.nbytes].view(torch.int16)
                stream = wire[used:][: int(place.nbytes * LARGEST_SHARE)]
                header = _pack_into(words, stream)
            headers.append(header)
            used += header.nbytes if header else 0
        packed = packed_layout_of(layout, headers)
        packed.fill(wire, image)
    return packed, wire[: packed.nbytes]


def _pack_into(words: torch.Tensor, stream: torch.Tensor) -> PackedHeader | None:
    """Write the stream of a tensor, or return None if it does not fit.

    Args:
        words: The tensor's bits, 1-D int16.
        stream: 1-D uint8.
    """
    numel = words.numel()
    if numel < SMALLEST:
        return None
    exponents, rare = _commonest(words)
    header = PackedHeader(
        numel=numel, exponents=exponents, escapes=max(rare, numel % SMALLEST)
    )
    if header.nbytes > stream.numel():
        return None
    room = (stream.numel() - header.escapes_offset) // 8
    groups = _write_pairs(words, header, stream, room)
    if groups is None:
        return None
    escapes = _escapes(words, header, stream, groups)
    header = replace(header, escapes=escapes.numel())
    if header.nbytes > stream.numel():
        return None
    stream[:HEAD_NBYTES] = header.head()
    header.escapes_in(stream).copy_(escapes)
    for start, end in header.gaps():
        stream[start:end].zero_()
    return header


def _commonest(words: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the commonest exponents, and about how many weights have another one."""
    # An odd stride passes over all columns of a matrix whose width is a power of two.
    sample = words[:: words.numel() // _SAMPLE | 1].to(torch.int32)
    counts = (sample >> 7 & 0xFF).bincount(minlength=256)
    chosen = counts.argsort(descending=True, stable=True)[:ESCAPE].sort().values
    others = sample.numel() - int(counts[chosen].sum())
    return tuple(chosen.tolist()), others * words.numel() // sample.numel()


def _write_pairs(
    words: torch.Tensor, header: PackedHeader, stream: torch.Tensor, room: int
) -> torch.Tensor | None:
    """Write low bytes and codes.

    Returns:
        Which groups of 8 code bytes hold an escape; None if they are more than `room`.
    """
    half = header.half
    step = min(_PAIRS * torch.get_num_threads(), half)
    one, two = torch.empty(2, step, dtype=torch.int16, device="cpu")
    index = torch.empty(step, dtype=torch.int32, device="cpu")
    spare = torch.empty(2, step // 8, dtype=torch.int64, device="cpu")
    table = _codes_of_pairs(header)
    low = stream[HEAD_NBYTES:][: 2 * half]
    codes = stream[header.codes_offset :][:half]
    found = []
    for at in range(0, half, step):
        end = min(at + step, half)
        one, two, index = (part[: end - at] for part in (one, two, index))
        for start in (at, half + at):
            mine = words[start : start + end - at]
            torch.bitwise_and(mine, _SIGN_AND_MANTISSA, out=one)
            # Moved down by a byte, the sign stands above the mantissa.
            torch.bitwise_right_shift(one, 8, out=two)
            low[start : start + end - at].copy_(one.bitwise_or_(two))
        torch.bitwise_right_shift(words[at:end], 7, out=one)
        torch.bitwise_left_shift(words[half + at : half + end], 1, out=two)
        one.bitwise_and_(0xFF).bitwise_or_(two.bitwise_and_(_HIGH_BYTE))
        index.copy_(one.view(torch.uint16))
        torch.index_select(table, 0, index, out=codes[at:end])
        spare = spare[:, : (end - at) // 8]
        found.append(_groups_with_escapes(codes[at:end], spare) + at // 8)
        room -= found[-1].numel()
        if room < 0:
            return None
    return torch.cat(found)


def _codes_of_pairs(header: PackedHeader) -> torch.Tensor:
    """Return the code byte of two exponents, at the index of one above the other."""
    codes = torch.full((256,), ESCAPE, dtype=torch.uint8, device="cpu")
    exponents = torch.tensor(header.exponents, device="cpu")
    codes[exponents] = torch.arange(ESCAPE, dtype=torch.uint8, device="cpu")
    return (codes[:, None] << 4 | codes).flatten()


def _groups_with_escapes(codes: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the groups of 16 codes of which one has all bits set."""
    groups = codes.view(torch.int64)
    found, shifted = spare[0], spare[1]
    torch.bitwise_right_shift(groups, 2, out=found)
    found.bitwise_and_(groups)
    torch.bitwise_right_shift(found, 1, out=shifted)
    found.bitwise_and_(shifted).bitwise_and_(_LOWEST_BITS)
    return found.nonzero().flatten()


def _escapes(
    words: torch.Tensor,
    header: PackedHeader,
    stream: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """Return position and bits of each weight without a code, ascending."""
    codes = stream[header.codes_offset :][: header.half].view(-1, 8)[groups]
    positions = []
    for which, mine in enumerate((codes & 0xF, codes >> 4)):
        row, column = (mine == ESCAPE).nonzero().unbind(1)
        positions.append(groups[row] * 8 + column + which * header.half)
    positions.append(torch.arange(2 * header.half, header.numel, device="cpu"))
    position = torch.cat(positions)
    return position << 16 | words[position].to(torch.int64) & 0xFFFF
