"""The open files of a checkpoint: exact reads, private mappings, change detection."""

import itertools
import mmap
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from stagehand.core.layout import contiguous_stride, own_storage, plain_tensors
from stagehand.errors import (
    ClosedError,
    ReadError,
    ShardChangedError,
    TruncatedShardError,
)
from stagehand.stores.checkpoint import Extent
from stagehand.stores.headers import FileStamp

__all__ = ["FileSet"]

_CHUNK_BYTES = 8 << 20
# Without it Linux refuses to map a file larger than its memory, though a private
# mapping costs only the pages that are written. Python names the flag since 3.13.
_MAP_NORESERVE = getattr(
    mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0
)


class FileSet:
    """The open files of a checkpoint, shared by the stores of its blocks.

    Any thread may read. Files are opened when they are first needed, again in a forked
    process (which may have closed what it inherited), and compared with what they were
    when their headers were read. A file that is closed while a thread still reads from
    it stays open until that read returns.
    """

    def __init__(self, files: Mapping[Path, FileStamp]) -> None:
        """Open nothing yet.

        Args:
            files: The files and their stamps, as `Checkpoint.files` gives them.
        """
        self._stamps = dict(files)
        self._descriptors: dict[tuple[int, Path], _Descriptor] = {}
        self._mappings: dict[tuple[Path, int], torch.Tensor] = {}
        self._requests: dict[Extent, itertools.count[int]] = {}
        self._closed = False

    def check(self) -> None:
        """Do nothing if every file is what it was; to be called once per pass.

        Raises:
            ShardChangedError: If a file was rewritten, replaced or removed.
        """
        for path in self._stamps:
            self.check_file(path)

    def check_file(self, path: Path) -> None:
        """Do nothing if one file is what it was when its header was read.

        Raises:
            ShardChangedError: Otherwise.
        """
        try:
            found = FileStamp.of(path)
        except OSError as error:
            raise ShardChangedError(
                f"{path} was there when its header was read and is not now ({error}): "
                f"put it back, or load the model again"
            ) from error
        self._compare(path, found)

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a file from `offset` on.

        Raises:
            ReadError: If the system cannot read them.
            TruncatedShardError: If the file ends before.
            ShardChangedError: If the file changed before it was first opened.
            ClosedError: If this set is closed.
        """
        descriptor = self._descriptor(path)
        done = 0
        while done < len(target):
            piece = target[done : done + _CHUNK_BYTES]
            try:
                got = os.preadv(descriptor.number, [piece], offset + done)
            except OSError as error:
                raise ReadError(
                    f"{path} cannot be read at byte {offset + done}: {error}"
                ) from error
            if got == 0:
                raise TruncatedShardError(
                    f"{path} is truncated: expected {len(target)} bytes at {offset}, "
                    f"found {done}; it was longer when its header was read"
                )
            done += got

    def map_tensor(self, extent: Extent) -> torch.Tensor:
        """Return a tensor that a file holds, as private, writable memory.

        A read pages the file in; a write stays in this process and is seen by no other
        tensor from here, not even by a second one of the same extent.

        Args:
            extent: At a multiple of its element size.

        Raises:
            ReadError: If the system cannot map the file.
            ShardChangedError: If the file changed before it was first opened.
            ClosedError: If this set is closed.
        """
        # One mapping serves a whole file as long as no extent is asked for twice. The
        # n-th request for an extent takes it from the n-th mapping.
        layer = next(self._requests.setdefault(extent, itertools.count()))
        key = (extent.path, layer)
        if key not in self._mappings:
            self._mappings.setdefault(key, self._map(extent.path))
        with plain_tensors():
            view = torch.empty(0, dtype=extent.dtype).set_(
                self._mappings[key].untyped_storage(),
                extent.offset // extent.dtype.itemsize,
                extent.shape,
                contiguous_stride(extent.shape),
            )
            return own_storage(view, extent.nbytes)

    def close(self) -> None:
        """Let go of every file. Host tensors that were handed out stay valid."""
        self._closed = True
        self._descriptors.clear()
        self._mappings.clear()

    def _map(self, path: Path) -> torch.Tensor:
        descriptor = self._descriptor(path)
        try:
            memory = mmap.mmap(
                descriptor.number,
                self._stamps[path].size,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, ValueError) as error:
            raise ReadError(f"{path} cannot be mapped: {error}") from error
        with plain_tensors():
            return torch.frombuffer(memory, dtype=torch.uint8)

    def _descriptor(self, path: Path) -> "_Descriptor":
        key = (os.getpid(), path)
        descriptor = self._descriptors.get(key)
        if descriptor is None and not self._closed:
            descriptor = self._descriptors.setdefault(key, self._open(path))
        # Looked at again: `close` may have run between the test and the insertion.
        if descriptor is None or self._closed:
            self._descriptors.clear()
            raise ClosedError(f"{path} cannot be read: its files were closed")
        return descriptor

    def _open(self, path: Path) -> "_Descriptor":
        try:
            descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            found = FileStamp.of(descriptor.number)
        except OSError as error:
            raise ReadError(f"{path} cannot be opened: {error}") from error
        self._compare(path, found)
        return descriptor

    def _compare(self, path: Path, found: FileStamp) -> None:
        expected = self._stamps[path]
        if found != expected:
            raise ShardChangedError(
                f"{path} changed since its header was read: expected {expected}, found "
                f"{found}; load the model again"
            )


class _Descriptor:
    """An open file that closes when the last reader lets go of it.

    Closing it under a reader would let the system give its number to another file,
    whose bytes would then arrive as weights.
    """

    # Bound early: an exiting interpreter may have taken the module apart.
    _close = staticmethod(os.close)
    _getpid = staticmethod(os.getpid)

    def __init__(self, number: int) -> None:
        self.number = number
        self._pid = self._getpid()

    def __del__(self) -> None:
        # A forked process may have closed everything and use the number for its own.
        if self._getpid() == self._pid:
            self._close(self.number)
