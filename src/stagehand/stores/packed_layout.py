"""What lies where in the packed form of a block, which crosses the link as one copy.

A block's *wire* holds the streams of its packed tensors, then its other tensors as they
are, then a directory that lets one kernel launch decode all streams.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from stagehand.core.layout import BlockLayout, Place
from stagehand.errors import StagehandInternalError, TensorMismatchError
from stagehand.stores.packed_stream import (
    ROW_LENGTH,
    ROW_OFFSET,
    PackedHeader,
    aligned,
)

__all__ = [
    "PackedLayout",
    "PackedPlace",
    "RawRun",
    "check_ends",
    "in_runs",
    "packable",
    "packed_layout_of",
    "raw_runs",
    "stands_alone",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlace:
    """A tensor of a block that crosses the link as a stream."""

    name: str
    """The tensor's name, for errors."""
    offset: int
    """Bytes from the start of the image to its first weight."""
    source: int
    """Bytes from the start of the wire to its stream."""
    header: PackedHeader
    """The stream's header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRun:
    """Bytes of an image that cross the link as they are."""

    offset: int
    """Bytes from the start of the image."""
    source: int
    """Bytes from the start of the wire."""
    nbytes: int
    """How many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """What lies where on the wire, and where it belongs in the block's image.

    Padding between the tensors of the image need not cross.
    """

    image_nbytes: int
    """Size of the image."""
    nbytes: int
    """Size of the wire, a multiple of 256."""
    packed: tuple[PackedPlace, ...]
    """What is packed, in the order of the layout and of the wire."""
    raw: tuple[RawRun, ...]
    """The other tensors. On the wire they follow the streams."""
    directory_offset: int
    """Byte of the wire where the directory begins: behind all else."""

    @classmethod
    def of_stream(cls, header: PackedHeader) -> "PackedLayout":
        """Return the layout of a stream by itself: its directory is in its head."""
        entry = PackedPlace(name="", offset=0, source=0, header=header)
        return cls(
            image_nbytes=2 * header.numel,
            nbytes=header.nbytes,
            packed=(entry,),
            raw=(),
            directory_offset=ROW_OFFSET,
        )

    @property
    def tiles(self) -> int:
        """Programs that decode all pairs on a device."""
        return sum(entry.header.tiles for entry in self.packed)

    @property
    def escape_tiles(self) -> int:
        """Programs that write all escapes on a device."""
        return sum(entry.header.escape_tiles for entry in self.packed)

    def directory(self) -> torch.Tensor:
        """Return what the end of the wire holds: int64, a row for each packed tensor.

        A decoder on the device reads it there, for telling it would be another copy.
        """
        rows = []
        tiles = escape_tiles = 0
        for entry in self.packed:
            header = entry.header
            rows.append(header.row(entry.source, entry.offset, tiles, escape_tiles))
            tiles += header.tiles
            escape_tiles += header.escape_tiles
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, ROW_LENGTH)

    def fill(self, wire: torch.Tensor, image: torch.Tensor) -> None:
        """Write all but the streams: what is raw, from the image, and the directory.

        Raises:
            StagehandInternalError: If wire or image is too short.
        """
        self.check_ends(wire, image)
        for run in self.raw:
            wire[run.source : run.source + run.nbytes].copy_(
                image[run.offset : run.offset + run.nbytes]
            )
        self.directory_in(wire).copy_(self.directory().flatten())

    def directory_in(self, wire: torch.Tensor) -> torch.Tensor:
        """Return the directory that a wire holds."""
        nbytes = 8 * ROW_LENGTH * len(self.packed)
        return wire[self.directory_offset :][:nbytes].view(torch.int64)

    def check_ends(self, wire: torch.Tensor, image: torch.Tensor) -> None:
        """Do nothing if this wire can be decoded into this image.

        Raises:
            StagehandInternalError: Otherwise.
        """
        check_ends((wire, self.nbytes), (image, self.image_nbytes))


def check_ends(*ends: tuple[torch.Tensor, int]) -> None:
    """Do nothing if wire and image are memory of one device, of so many bytes or more.

    Raises:
        StagehandInternalError: Otherwise.
    """
    device = ends[-1][0].device
    for memory, nbytes in ends:
        if (
            memory.dtype != torch.uint8
            or memory.dim() != 1
            or memory.numel() < nbytes
            or not memory.is_contiguous()
            or memory.storage_offset() % 16
            or memory.device != device
        ):
            raise StagehandInternalError(
                f"{memory.dtype} {list(memory.shape)} on {memory.device} at byte "
                f"{memory.storage_offset()} of its storage: expected one dimension of "
                f"at least {nbytes} contiguous uint8 at a multiple of 16 on {device}"
            )


def packable(layout: BlockLayout) -> tuple[bool, ...]:
    """Return for each entry whether it may be packed: a bfloat16 tensor by itself."""
    return tuple(
        alone and entry.dtype == torch.bfloat16
        for entry, alone in zip(layout.entries, stands_alone(layout), strict=True)
    )


def stands_alone(layout: BlockLayout) -> tuple[bool, ...]:
    """Return for each entry whether it may cross the link by itself.

    Tied tensors lie at one place: of these only the first may. An empty tensor may not,
    nor one that overlaps another in part.
    """
    return tuple(
        entry.nbytes > 0
        and not any(_hinders(other, entry) for other in layout.entries[:index])
        and not any(
            _hinders(other, entry) and _bytes_of(other) != _bytes_of(entry)
            for other in layout.entries[index + 1 :]
        )
        for index, entry in enumerate(layout.entries)
    )


def packed_layout_of(
    layout: BlockLayout, headers: Sequence[PackedHeader | None]
) -> PackedLayout:
    """Return the layout of a block's wire: streams, raw bytes, directory.

    Args:
        layout: The block's layout, as it shall lie on the device.
        headers: For each entry that of its stream, or None if it crosses as it is.

    Raises:
        TensorMismatchError: If a header is that of a tensor of another size.
        StagehandInternalError: If an entry with a header is not `packable`.
    """
    packed: list[PackedPlace] = []
    source = 0
    allowed = packable(layout)
    for place, header, may in zip(layout.entries, headers, allowed, strict=True):
        if header is None:
            continue
        if not may:
            raise StagehandInternalError(f"tensor {place.name!r} cannot be packed")
        if 2 * header.numel != place.nbytes:
            raise TensorMismatchError(
                f"tensor {place.name!r} has {place.nbytes // 2} weights: its packed "
                f"stream has {header.numel}"
            )
        packed.append(
            PackedPlace(
                name=place.name, offset=place.offset, source=source, header=header
            )
        )
        source += header.nbytes
    raw = raw_runs(layout, {entry.offset for entry in packed}, source)
    directory_offset = source + sum(aligned(run.nbytes) for run in raw)
    return PackedLayout(
        image_nbytes=layout.nbytes,
        nbytes=directory_offset + aligned(8 * ROW_LENGTH * len(packed)),
        packed=tuple(packed),
        raw=raw,
        directory_offset=directory_offset,
    )


def raw_runs(
    layout: BlockLayout, streams: Collection[int], source: int
) -> tuple[RawRun, ...]:
    """Return where the tensors lie that cross as they are, neighbours together.

    Args:
        layout: The block's layout.
        streams: The offsets of those that do not.
        source: The byte of the wire where they begin.
    """
    rest = [e for e in layout.entries if e.nbytes and e.offset not in streams]
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(map(_bytes_of, rest)):
        if ranges and start <= aligned(ranges[-1][1]):
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    runs = []
    for start, end in ranges:
        runs.append(RawRun(offset=start, source=source, nbytes=end - start))
        source += aligned(end - start)
    return tuple(runs)


def in_runs(runs: Sequence[RawRun], offset: int) -> int | None:
    """Return the byte of a wire that is a byte of the image; None if none is."""
    for run in runs:
        if run.offset <= offset < run.offset + run.nbytes:
            return run.source + offset - run.offset
    return None


def _bytes_of(place: Place) -> tuple[int, int]:
    return place.offset, place.offset + place.nbytes


def _hinders(one: Place, other: Place) -> bool:
    return (
        one.offset < other.offset + other.nbytes
        and other.offset < one.offset + one.nbytes
    )
