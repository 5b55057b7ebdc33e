"""Reads files of `torch.save`: what they hold, and where in them their tensors lie.

No code of such a file is run, and none is mapped: a thread that reads a mapping of a
file that shrinks ends the process.
"""

import math
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from stagehand.core.layout import placed, spanned_bytes
from stagehand.errors import CheckpointError, ReadError
from stagehand.stores.checkpoint import Extent
from stagehand.stores.files import FileSet
from stagehand.stores.headers import FileStamp
from stagehand.stores.safetensors import read_tensor
from stagehand.torch_private import load_places, place_of

__all__ = ["Pickled"]

# Readers of pickles and archives raise almost anything at bytes that make no sense.
_MALFORMED = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
    *(RuntimeError, TypeError, ValueError, pickle.UnpicklingError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
_LOCAL_HEADER = 30  # bytes, before a record's name
_LENGTHS = 26  # byte of a local header where the lengths of name and extra field are


class Pickled:
    """An open file of `torch.save`, whose tensors are read one by one.

    Args:
        path: A zip archive as `torch.save` writes it, of tensors and plain values.

    Raises:
        ReadError: If it cannot be read.
        CheckpointError: If it is none, or has other objects in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            stamp = FileStamp.of(path)
            self._records = _records(path)
            self.content: Any = load_places(path)
            """What was saved; its tensors have sizes and no values."""
        except OSError as error:
            raise ReadError(f"{path} cannot be read: {error}") from error
        except _MALFORMED as error:
            raise CheckpointError(
                f"{path} is cut off or not what is read here: expected dense tensors"
                " and plain values, and no other objects, in a zip archive as"
                f" torch.save writes it; found {_reason(error)}"
            ) from error
        self.files = FileSet({path: stamp})

    def read(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the tensors, in memory of its own.

        Args:
            name: For errors.
            tensor: Where it is in `content`.

        Raises:
            CheckpointError: If it is no plain tensor, or the file changed.
        """
        self._check_plain(name, tensor)
        numel = spanned_bytes(tensor) // tensor.itemsize if tensor.numel() else 0
        storage = read_tensor(self.files, self._extent(name, tensor, (numel,)))
        return placed(
            storage.untyped_storage(), tensor.dtype, 0, tensor.shape, tensor.stride()
        )

    def extent(self, name: str, tensor: torch.Tensor) -> Extent:
        """Return where one of the tensors lies, whose rows follow each other.

        Raises:
            CheckpointError: If it does not lie so.
        """
        self._check_plain(name, tensor)
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"tensor {name!r} in {self.path}: expected rows that follow each other,"
                f" found {list(tensor.shape)} in steps of {list(tensor.stride())}"
            )
        return self._extent(name, tensor, tensor.shape)

    def _extent(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
    ) -> Extent:
        record = place_of(tensor) or 0
        start = int(tensor.storage_offset()) * tensor.itemsize
        nbytes = math.prod(shape) * tensor.itemsize
        size = self._records.get(record, 0)
        if nbytes and start + nbytes > size:
            raise CheckpointError(
                f"tensor {name!r} in {self.path}: expected {start + nbytes} bytes at"
                f" {record}, found a record of {size}; save it again with torch.save"
            )
        return Extent(
            name=name,
            path=self.path,
            offset=record + start,
            nbytes=nbytes,
            dtype=tensor.dtype,
            shape=tuple(shape),
        )

    def _check_plain(self, name: str, tensor: torch.Tensor) -> None:
        odd = tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg()
        if odd or place_of(tensor) is None:
            raise CheckpointError(
                f"tensor {name!r} in {self.path}: expected a dense one with values, not"
                " marked as conjugated or negated,"
                f" found {tensor.layout} of {tensor.dtype} {list(tensor.shape)}"
            )


def _records(path: Path) -> Mapping[int, int]:
    """Return how many bytes lie at which byte of a zip archive, if they lie plainly.

    Raises:
        ValueError: If they are compressed, or numbers are of another byte order.
    """
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        found = archive.infolist()
        for record in found:
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"record {record.filename!r} compressed")
            if record.filename.endswith("/byteorder"):
                order = archive.read(record).decode("ascii")
                if order != sys.byteorder:
                    raise ValueError(f"numbers in the byte order {order!r}")
        return {_start(file, record): record.file_size for record in found}


def _start(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return where the bytes of a record begin: some are filled up to an alignment."""
    file.seek(record.header_offset + _LENGTHS)
    lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))
    return record.header_offset + _LOCAL_HEADER + sum(lengths)


def _reason(error: Exception) -> str:
    """Return the one line of torch's long message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line or "error: " in line]
    return (told or lines or [type(error).__name__])[0].split(". ")[0]
