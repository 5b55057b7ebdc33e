"""Writes safetensors files tensor by tensor, whole or not at all.

The header comes first in the file and is known last, so room is left for it: it is
padded with spaces, as the format allows, and the data begins at a multiple of 4096.
"""

import contextlib
import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import torch

from stagehand.core.layout import plain_tensors
from stagehand.errors import CheckpointError
from stagehand.stores.headers import code_of, sizes_of
from stagehand.units import PAGE_BYTES, format_bytes, rounded_up

__all__ = [
    "SafetensorsBody",
    "Together",
    "check_room",
    "replaced",
    "safetensors_file",
    "together",
    "unfinished_name",
]

_LENGTH_BYTES = 8
_FIELDS = 256  # bytes of a tensor's description beside its name, at most


def check_room(folder: Path, nbytes: int, advice: str = "choose a larger disk") -> None:
    """Do nothing if a file of so many bytes fits a folder's disk.

    Args:
        folder: Where the file will be.
        nbytes: Its size.
        advice: What to do where it does not fit.

    Raises:
        CheckpointError: Otherwise, or if the folder cannot be asked.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written to: {error}") from error
    if free < nbytes:
        raise CheckpointError(
            f"{folder} has {format_bytes(free)} free: expected {format_bytes(nbytes)}"
            f" for what is to be written; {advice}"
        )


def unfinished_name(path: Path) -> Path:
    """Return a name beside a file's own that no other writer of it has.

    Not the process's number: threads have the same, and so may two containers.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")


class Together:
    """Files that are written under other names, and get their own all at once."""

    def __init__(self) -> None:
        self._unfinished: dict[Path, Path] = {}
        self._aside: dict[Path, Path] = {}

    @property
    def paths(self) -> set[Path]:
        """Their own names."""
        return set(self._unfinished)

    @contextlib.contextmanager
    def file(self, path: Path) -> Iterator[BinaryIO]:
        """Write one of them.

        Raises:
            CheckpointError: If the system cannot.
        """
        unfinished = self._unfinished[path] = unfinished_name(path)
        with _or_nothing(path), unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def put_aside(self, path: Path) -> None:
        """Let a file of before, if it is there, go ahead of all: it would hide them."""
        if os.path.isfile(path):
            self._aside[path] = unfinished_name(path)

    def publish(self) -> None:
        """Give the files their names, the last one first.

        So an index, written behind what it lists, is there before it: who reads the
        folder in between, or after the system went down, is told what is missing.

        Raises:
            CheckpointError: If the system cannot.
        """
        try:
            for path, aside in self._aside.items():
                with _or_nothing(path):
                    path.replace(aside)
            for path, unfinished in reversed(self._unfinished.items()):
                with _or_nothing(path):
                    unfinished.replace(path)
        except BaseException:
            for path, unfinished in self._unfinished.items():
                if not os.path.exists(unfinished):  # it has its name
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
            for path, aside in self._aside.items():
                with contextlib.suppress(OSError):
                    aside.replace(path)
            raise

    def discard(self) -> None:
        """Remove what has no name of its own, as far as the system lets it."""
        for unfinished in (*self._unfinished.values(), *self._aside.values()):
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _or_nothing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}): nothing is left of it; expected a"
            " place with enough room that may be written to"
        ) from error


@contextlib.contextmanager
def together() -> Iterator[Together]:
    """Write files that get their names when all are complete.

    What was there before stays until then; of what fails nothing stays.

    Raises:
        CheckpointError: If the system cannot write one.
    """
    files = Together()
    try:
        yield files
        files.publish()
    finally:
        files.discard()


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write one file under another name, as `together` does.

    Raises:
        CheckpointError: If the system cannot write it.
    """
    with together() as files, files.file(path) as file:
        yield file


@contextlib.contextmanager
def safetensors_file(
    opened: AbstractContextManager[BinaryIO], names: Iterable[str], **metadata: str
) -> Iterator["SafetensorsBody"]:
    """Write a safetensors file: what is added, in that order; whole or not at all.

    Args:
        opened: `replaced(path)`, or `file(path)` of `together()`.
        names: All names that will be added.
        **metadata: For the header.

    Raises:
        CheckpointError: If the system cannot write it.
    """
    room = _LENGTH_BYTES + _FIELDS + len(json.dumps(metadata))
    room += sum(len(json.dumps(name)) + _FIELDS for name in names)
    start = rounded_up(room, PAGE_BYTES)
    with opened as file:
        file.seek(start)
        body = SafetensorsBody(file)
        yield body
        header = {"__metadata__": metadata, **body.header}
        text = json.dumps(header, separators=(",", ":")).encode()
        length = start - _LENGTH_BYTES
        file.seek(0)
        file.write(length.to_bytes(_LENGTH_BYTES, "little"))
        file.write(text.ljust(length))


class SafetensorsBody:
    """The data of a file that is being written.

    Args:
        file: Where to; it stands where the data begins.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.header: dict[str, object] = {}
        """What the file's header will say, by name."""
        self.nbytes = 0
        """Bytes of all that was added."""
        self._file = file

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes behind those of the one before.

        Raises:
            OSError: If the system cannot; `safetensors_file` makes it a better one.
        """
        with plain_tensors():
            dense = tensor.detach().contiguous()
        nbytes = dense.numel() * dense.element_size()
        if nbytes:
            memory = (ctypes.c_ubyte * nbytes).from_address(dense.data_ptr())
            self._file.write(memory)
        self.header[name] = {
            "dtype": code_of(dense.dtype),
            "shape": sizes_of(dense),
            "data_offsets": [self.nbytes, self.nbytes + nbytes],
        }
        self.nbytes += nbytes

    def fill_page(self, name: str) -> None:
        """Let what is added next begin at a multiple of 4096; `name` is the filler's.

        Raises:
            OSError: If the system cannot write.
        """
        if missing := -self.nbytes % PAGE_BYTES:
            self.add(name, torch.zeros(missing, dtype=torch.uint8, device="cpu"))
