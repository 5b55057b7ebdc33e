"""What lies where in the packed form of one bfloat16 tensor.

A bfloat16 weight is a sign, 8 bits of exponent and 7 of mantissa; of a trained tensor's
exponents about 2.6 bits carry information. Packed, a tensor is a *stream* of four
parts, each at a multiple of 256 bytes:

    head     the fields of `PackedHeader`, its row of a directory, the table of pairs
    low      a byte a weight: the sign above the mantissa
    codes    a byte for two weights: 4 bits each, of one of 15 exponents, or 15
    escapes  an int64 for each other weight: its position above its 16 bits

A code byte belongs to the weights `j` (its low bits) and `j + half`: so codes, low
bytes and weights are read and written in order, in two runs each, and nothing is
interleaved. That is what vectorized loops and wide device loads want. Up to 31 weights
at the end, which do not fill a vector, are escapes.
"""

from dataclasses import dataclass

import torch

from stagehand.core.layout import ALIGNMENT
from stagehand.errors import CheckpointError, HeaderError
from stagehand.units import rounded_up

__all__ = [
    "ESCAPE",
    "HEAD_NBYTES",
    "PAIRS_OFFSET",
    "ROW_LENGTH",
    "ROW_OFFSET",
    "SMALLEST",
    "TILE",
    "PackedHeader",
    "aligned",
]

ESCAPE = 15
"""The code of an exponent that has none; also how many exponents have one."""

TILE = 4096
"""Pairs, or escapes, that one program of the device's decoder takes."""

PAIRS_OFFSET = 256
"""Byte of a stream where the table of pairs lies: for each code byte, an int16 of the
exponent of its low bits, and above it that of its high bits."""

HEAD_NBYTES = PAIRS_OFFSET + 2 * 256
"""Bytes of a stream's head."""

SMALLEST = 32
"""Weights that a stream has at least, and a multiple of which have codes: so each run
of them begins at a multiple of 32 bytes."""

ROW_LENGTH = 8
"""Numbers in a row of a directory; `PackedHeader.row` says which."""

ROW_OFFSET = 64
"""Byte of a stream where its own row lies, as if it were all of a wire."""

_MAGIC = int.from_bytes(b"STGPACK1", "little")
_EXPONENTS_OFFSET = 32
_LARGEST = 1 << 47  # weights: a position has the 47 bits above a weight's 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeader:
    """What one needs to know of a stream to decode it, without looking into it."""

    numel: int
    """Weights."""
    exponents: tuple[int, ...]
    """The 15 exponents that have a code, ascending: a code is an index of it."""
    escapes: int
    """Weights that are listed, those at the end included."""

    def __post_init__(self) -> None:
        """Refuse what no encoder writes."""
        if not SMALLEST <= self.numel < _LARGEST:
            raise HeaderError(
                f"a packed header has {self.numel} weights: expected {SMALLEST} to "
                f"{_LARGEST}"
            )
        if not self.numel - 2 * self.half <= self.escapes <= self.numel:
            raise HeaderError(
                f"a packed header has {self.escapes} escapes: expected "
                f"{self.numel - 2 * self.half} to {self.numel}"
            )
        if (
            len(self.exponents) != ESCAPE
            or sorted(set(self.exponents)) != list(self.exponents)
            or not 0 <= self.exponents[0] <= self.exponents[-1] <= 255
        ):
            raise HeaderError(
                f"a packed header has the exponents {list(self.exponents)}: expected "
                f"{ESCAPE} different ones from 0 to 255, ascending"
            )

    @property
    def half(self) -> int:
        """Pairs: weight `j` goes with weight `j + half`."""
        return self.numel // SMALLEST * SMALLEST // 2

    @property
    def codes_offset(self) -> int:
        """Byte of the stream where the codes begin; the low bytes follow the head."""
        return HEAD_NBYTES + aligned(2 * self.half)

    @property
    def escapes_offset(self) -> int:
        """Byte of the stream where the escapes begin."""
        return self.codes_offset + aligned(self.half)

    @property
    def nbytes(self) -> int:
        """Bytes of the stream, a multiple of 256."""
        return self.escapes_offset + aligned(8 * self.escapes)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the bytes of the stream, from and to, that belong to no part."""
        return [
            (HEAD_NBYTES + 2 * self.half, self.codes_offset),
            (self.codes_offset + self.half, self.escapes_offset),
            (self.escapes_end, self.nbytes),
        ]

    @property
    def tiles(self) -> int:
        """Programs that decode the pairs on a device."""
        return -(-self.half // TILE)

    @property
    def escape_tiles(self) -> int:
        """Programs that write the escapes on a device."""
        return -(-self.escapes // TILE)

    @classmethod
    def read(cls, head: torch.Tensor, what: str) -> "PackedHeader":
        """Return the header that a stream in host memory begins with.

        Args:
            head: uint8, the first `HEAD_NBYTES` of the stream, or more.
            what: Names the tensor, and the file if there is one, in errors.

        Raises:
            HeaderError: If these bytes are no head of a stream.
        """
        if head.numel() < HEAD_NBYTES:
            raise HeaderError(
                f"{what}: a packed stream's head has {head.numel()} bytes: "
                f"expected {HEAD_NBYTES}"
            )
        raw = bytes(head[:HEAD_NBYTES].tolist())
        magic, numel, escapes = (
            int.from_bytes(raw[at : at + 8], "little", signed=True)
            for at in range(0, 24, 8)
        )
        if magic != _MAGIC:
            raise HeaderError(
                f"{what}: a packed stream begins with {magic:#x}: expected {_MAGIC:#x}"
            )
        exponents = raw[_EXPONENTS_OFFSET : _EXPONENTS_OFFSET + ESCAPE]
        try:
            header = cls(numel=numel, escapes=escapes, exponents=tuple(exponents))
        except HeaderError as error:
            raise HeaderError(f"{what}: {error}") from error
        if raw != bytes(header.head().tolist()):
            raise HeaderError(
                f"{what}: the tables of a packed stream do not fit its header of "
                f"{numel} weights and {escapes} escapes: pack it again"
            )
        return header

    def head(self) -> torch.Tensor:
        """Return the bytes that a stream with this header begins with."""
        head = torch.zeros(HEAD_NBYTES, dtype=torch.uint8, device="cpu")
        words = head.view(torch.int64)
        words[:3] = torch.tensor([_MAGIC, self.numel, self.escapes], device="cpu")
        exponents = torch.tensor(self.exponents, dtype=torch.uint8, device="cpu")
        head[_EXPONENTS_OFFSET : _EXPONENTS_OFFSET + ESCAPE] = exponents
        words[ROW_OFFSET // 8 :][:ROW_LENGTH] = torch.tensor(self.row(), device="cpu")
        head[PAIRS_OFFSET:] = self._pairs().view(torch.uint8)
        return head

    def check_nbytes(self, nbytes: int, what: str) -> None:
        """Do nothing if a stream of so many bytes holds what this header says.

        Raises:
            CheckpointError: Otherwise.
        """
        if nbytes < self.nbytes:
            raise CheckpointError(
                f"{what}: a packed stream has {nbytes} bytes: expected {self.nbytes}"
            )

    def check_escapes(self, escapes: torch.Tensor, what: str) -> None:
        """Do nothing if escapes in host memory are safe to decode with this header.

        An escape beyond the tensor would be a wild write on the device.

        Raises:
            CheckpointError: If one is not in order.
        """
        positions = escapes >> 16
        edges = torch.tensor([-1, self.numel], device="cpu")
        if not (torch.cat([edges[:1], positions, edges[1:]]).diff() > 0).all():
            raise CheckpointError(
                f"{what}: the {self.escapes} escapes of a packed stream do not ascend "
                f"from 0 to {self.numel - 1}: pack it again"
            )

    @property
    def escapes_end(self) -> int:
        """Byte of the stream where the escapes end."""
        return self.escapes_offset + 8 * self.escapes

    def escapes_in(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the escapes of a stream, as int64."""
        return stream[self.escapes_offset : self.escapes_end].view(torch.int64)

    def row(
        self,
        source: int = 0,
        target: int = 0,
        first_tile: int = 0,
        first_escape_tile: int = 0,
    ) -> list[int]:
        """Return the row of a directory that says where the decoder finds what.

        Args:
            source: Byte of the wire where the stream begins.
            target: Byte of the image where the weights begin.
            first_tile: Tiles of the tensors before this one.
            first_escape_tile: The same of the escapes.
        """
        return [
            first_tile,
            first_escape_tile,
            source + HEAD_NBYTES,
            source + self.codes_offset,
            source + self.escapes_offset,
            target,
            self.half,
            self.escapes,
        ]

    def _pairs(self) -> torch.Tensor:
        exponents = torch.tensor([*self.exponents, 0], dtype=torch.int32, device="cpu")
        return (exponents[:, None] << 8 | exponents).flatten().to(torch.int16)


def aligned(nbytes: int) -> int:
    """Return the bytes that a part of so many takes."""
    return rounded_up(nbytes, ALIGNMENT)
