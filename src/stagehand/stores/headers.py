"""Reads the header of a safetensors file and refuses a file that does not match it.

A file is 8 bytes of little-endian length, a JSON object of that length, and the data:
every tensor's bytes, one after the other, without gaps.
"""

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from stagehand.errors import (
    CheckpointError,
    HeaderError,
    OffsetError,
    ReadError,
    SizeMismatchError,
    TruncatedShardError,
)

__all__ = [
    "FileStamp",
    "Header",
    "Span",
    "check_name",
    "code_of",
    "load_json",
    "read_header",
    "sizes_of",
]

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000
_TOO_MANY = 1 << 64
_TOO_MANY_FOR_TORCH = 1 << 63

# Element types of the format: bits, and the name of torch's type where it has one.
_DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """What tells a file from one that replaced it."""

    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change of content, in nanoseconds."""
    inode: int
    """The file system's number for the file."""

    @classmethod
    def of(cls, file: Path | int) -> "FileStamp":
        """Return the stamp of a path or an open descriptor.

        Raises:
            OSError: If the system cannot say.
        """
        stat = os.stat(file)
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One tensor as the header describes it."""

    name: str
    """The tensor's name."""
    code: str
    """The format's name of its element type, such as `"BF16"`."""
    sizes: tuple[int, ...]
    """Its shape, in elements of the format."""
    start: int
    """First byte, counted from the end of the header."""
    end: int
    """Where its bytes end."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The element type in torch, None where this torch has no such tensor."""
        if self.code == "F4" and not self._is_paired:
            return None
        # It multiplies the steps from row to row, also of a tensor without elements.
        if math.prod(max(size, 1) for size in self.sizes) >= _TOO_MANY_FOR_TORCH:
            return None
        dtype: torch.dtype | None = getattr(torch, _DTYPES[self.code][1] or "", None)
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in torch, whose 4-bit type holds two elements in one."""
        if self.code == "F4" and self._is_paired:
            return (*self.sizes[:-1], self.sizes[-1] // 2)
        return self.sizes

    @property
    def _is_paired(self) -> bool:
        return bool(self.sizes) and self.sizes[-1] % 2 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One file's checked header."""

    path: Path
    """The file."""
    stamp: FileStamp
    """What the file was when its header was read."""
    data_offset: int
    """Where the data begins, in bytes from the start of the file."""
    spans: tuple[Span, ...]
    """The tensors, in the order of their bytes."""


def read_header(path: Path) -> Header:
    """Read and check the header of one file.

    Raises:
        ReadError: If the file cannot be read.
        HeaderError: If the header is not what the format says.
        OffsetError: If byte ranges overlap, or leave bytes that belong to no tensor.
        SizeMismatchError: If a byte range does not fit its shape and dtype.
        TruncatedShardError: If the file is shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            stamp = FileStamp.of(file.fileno())
            text = _read_text(path, file, stamp.size)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # such as a NUL in its name
        raise ReadError(f"{path} cannot be read: {error}") from error
    data_offset = _LENGTH_BYTES + len(text)
    spans = _parse(path, text)
    _check_spans(path, spans)
    _check_end(path, spans, stamp.size - data_offset)
    return Header(path=path, stamp=stamp, data_offset=data_offset, spans=tuple(spans))


def check_name(name: str) -> None:
    """Do nothing if a header can hold a tensor of that name.

    Raises:
        HeaderError: If it is that of the metadata, or no text.
    """
    # Half of a surrogate pair is written without a word, and read by nobody.
    if name == _METADATA or name.encode(errors="replace").decode() != name:
        raise HeaderError(
            f"a safetensors file cannot hold the name {name!r}: rename it"
        )


def code_of(dtype: torch.dtype) -> str:
    """Return the format's name of an element type.

    Raises:
        HeaderError: If it has none.
    """
    name = str(dtype).removeprefix("torch.")
    for code, (_, torch_name) in _DTYPES.items():
        if torch_name == name:
            return code
    raise HeaderError(f"a safetensors file cannot hold {dtype}: convert the tensor")


def sizes_of(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's shape in elements of the format: see `Span.shape`."""
    *outer, last = tensor.shape or (1,)
    pairs = code_of(tensor.dtype) == "F4"
    return [*outer, 2 * last] if pairs else list(tensor.shape)


def load_json(text: bytes) -> Any:
    """Return a JSON document as other languages' readers understand it.

    Raises:
        ValueError: If it is not valid, or an object has one name twice.
    """
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} occurs twice")
        result[name] = value
    # Python's reader lets half of a surrogate pair through: no other text holds one.
    "".join(result).encode()
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _read_text(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(_LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES:
        raise HeaderError(
            f"{path} is no safetensors file: expected at least {_LENGTH_BYTES} bytes, "
            f"found {size}"
        )
    (length,) = struct.unpack("<Q", prefix)
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise HeaderError(
            f"{path} is cut off or no safetensors file: its first bytes announce a "
            f"header of {length} bytes, expected at most {_MAX_HEADER_BYTES} and the "
            f"{size - _LENGTH_BYTES} that follow"
        )
    text = file.read(length)
    if len(text) != length:
        raise TruncatedShardError(
            f"{path} shrank while its header was read: expected {length} bytes, found "
            f"{len(text)}"
        )
    return text


def _parse(path: Path, text: bytes) -> list[Span]:
    """Return the tensors of a header, ordered by their bytes."""
    try:
        document = load_json(text)
    except ValueError as error:
        raise HeaderError(f"the header of {path} is not valid: {error}") from error
    if not isinstance(document, dict):
        raise HeaderError(
            f"the header of {path} is not valid: expected a JSON object, found "
            f"{type(document).__name__}"
        )
    metadata = document.pop(_METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict)
        and all(isinstance(value, str) for value in metadata.values())
    ):
        raise HeaderError(
            f"the header of {path} is not valid: expected '__metadata__' to map texts "
            f"to texts"
        )
    spans = [_parse_span(path, name, fields) for name, fields in document.items()]
    return sorted(spans, key=lambda span: (span.start, span.end))


def _parse_span(path: Path, name: str, fields: Any) -> Span:
    fields = fields if isinstance(fields, dict) else {}
    code = fields.get("dtype")
    if not isinstance(code, str) or code not in _DTYPES:
        raise HeaderError(
            f"tensor {name!r} in {path} has dtype {code!r}: expected one of "
            f"{', '.join(_DTYPES)}"
        )
    sizes = _whole_numbers(fields.get("shape"))
    if sizes is None or any(size < 0 for size in sizes):
        raise HeaderError(
            f"tensor {name!r} in {path} has shape {fields.get('shape')!r}: expected a "
            f"list of whole numbers"
        )
    offsets = _whole_numbers(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2:
        raise HeaderError(
            f"tensor {name!r} in {path} has data_offsets "
            f"{fields.get('data_offsets')!r}: expected a list of two whole numbers"
        )
    return Span(
        name=name, code=code, sizes=tuple(sizes), start=offsets[0], end=offsets[1]
    )


def _whole_numbers(value: Any) -> list[int] | None:
    # bool is a subclass of int, and `true` is no number in JSON.
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    return None


def _check_spans(path: Path, spans: Sequence[Span]) -> None:
    """Refuse ranges that do not follow each other or do not fit their tensor."""
    expected = 0
    for span in spans:
        if span.start != expected or span.end < span.start:
            raise OffsetError(
                f"tensor {span.name!r} in {path} lies at bytes [{span.start}, "
                f"{span.end}) of the data: expected it to start at {expected}, where "
                f"the one before it ends"
            )
        expected = span.end
        bits = _bits(path, span)
        if bits != 8 * (span.end - span.start):
            raise SizeMismatchError(
                f"tensor {span.name!r} in {path} is {span.code} {list(span.sizes)}: "
                f"expected {bits / 8:.16g} bytes, found {span.end - span.start}"
            )


def _bits(path: Path, span: Span) -> int:
    count = 1
    for size in span.sizes:
        count *= size
        # Also where a later size is zero: readers in other languages multiply in 64
        # bits from left to right.
        if max(count, size) >= _TOO_MANY:
            raise HeaderError(
                f"tensor {span.name!r} in {path} has shape {list(span.sizes)}: "
                f"expected fewer than 2**64 elements"
            )
    return count * _DTYPES[span.code][0]


def _check_end(path: Path, spans: Sequence[Span], found: int) -> None:
    expected = spans[-1].end if spans else 0
    if found < expected:
        cut = next(span.name for span in spans if span.end > found)
        raise TruncatedShardError(
            f"{path} is truncated: expected {expected} bytes of data, found {found}, "
            f"{expected - found} are missing from tensor {cut!r} on; get it again"
        )
    if found > expected:
        raise OffsetError(
            f"{path} has bytes that belong to no tensor: expected {expected} bytes of "
            f"data, found {found}"
        )
