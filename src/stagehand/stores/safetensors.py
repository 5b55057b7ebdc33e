"""A block whose truth is in safetensors files, read straight into the image.

Note: the overlay. A host tensor of this store is a view of a private, copy-on-write
mapping of its file. Nobody pays for what nobody touches, a read pages the file in, and
a write (an optimizer on the host, a merge, `write_back`) stays in this process's memory
and never reaches the file. The pages that were written are the overlay: once an entry
is marked as edited its truth is the host tensor, and the file is not read for it again.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from stagehand.core.copies import copy_values
from stagehand.core.layout import (
    BlockLayout,
    Place,
    Runs,
    copy_rows,
    plain_tensors,
    same_bits,
)
from stagehand.errors import (
    StagehandInternalError,
    StagehandWarning,
    TensorMismatchError,
)
from stagehand.stores.base import Skew
from stagehand.stores.checkpoint import Extent
from stagehand.stores.files import FileSet, naming
from stagehand.stores.pages import was_written
from stagehand.stores.reading import Part, writable

__all__ = ["SafetensorsStore", "host_tensor", "read_tensor"]

_COMPARED_BYTES = 4 << 20


class SafetensorsStore:
    """Keeps a block in safetensors files.

    A load reads the files straight into the image, without a copy between. Host memory
    is used only for entries that were changed, for tensors that their file has at an
    odd address, and for the page cache, which the system takes back at will.
    """

    def __init__(
        self, layout: BlockLayout, extents: Sequence[Extent], files: FileSet
    ) -> None:
        """Open and map the files; read only tensors that cannot be viewed in place.

        Args:
            layout: The block's layout.
            extents: Where each entry lies, of the entry's dtype and shape.
            files: The open files that the extents are in.

        Raises:
            CheckpointError: If a file changed or cannot be read.
            StagehandInternalError: If extents and layout do not fit.
        """
        _check_fit(layout, extents)
        self._layout = layout
        self._extents = list(extents)
        self._files = files
        self._edited: set[int] = set()
        self._hosts = _host_tensors(layout, self._extents, files)
        self._parts = self._find_parts()
        widest = max((entry.dtype.itemsize for entry in layout.entries), default=1)
        self._skew = files.skew(self._parts, widest)

    @property
    def files(self) -> FileSet:
        """What it reads."""
        return self._files

    @property
    def skew(self) -> Skew | None:
        """Where an image begins if the most bytes are to be read in place."""
        return self._skew

    @property
    def hosts(self) -> list[torch.Tensor]:
        """One host tensor per layout entry: a view of its file, private to us."""
        return self._hosts

    def value(self, index: int) -> torch.Tensor:
        """Return the values of an entry: from its file, unless they were changed.

        Raises:
            CheckpointError: If the file changed or cannot be read.
        """
        if index in self._edited or was_written(self._hosts[index]):
            self._files.check_file(self._extents[index].path)
            return self._hosts[index]
        return read_tensor(self._files, self._extents[index])

    @property
    def pinned(self) -> None:
        """None: the truth is in files."""
        return None

    @property
    def wire(self) -> None:
        """None: the image itself crosses the link."""
        return None

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` from the files and the overlay; return bytes read from files.

        Raises:
            ReadError: If the system cannot read.
            TruncatedShardError: If a file became shorter.
            ShardChangedError: If a file changed under the overlay.
            ClosedError: If the files are closed and not all is in the overlay.
        """
        self._find_edits()
        views = self._layout.views(image)
        read = self._fill(self._parts, image)
        for index, entry in enumerate(self._layout.entries):
            if index not in self._edited and not entry.is_contiguous:
                tensor = read_tensor(self._files, self._extents[index])
                copy_values(views[index], tensor)
                read += entry.nbytes
        # Last: an entry that another thread marks as edited meanwhile comes from both,
        # never from nowhere, and a tensor of two entries is new if either was edited.
        for index in sorted(self._edited):
            self._files.check_file(self._extents[index].path)
            copy_values(views[index], self._hosts[index])
        return read

    def read_rows_into(self, image: torch.Tensor, runs: Runs) -> int:
        """Fill some rows from the files and the overlay; see `read_into`."""
        self._find_edits()
        found: dict[Path, list[Part]] = {}
        for index, (entry, extent) in enumerate(
            zip(self._layout.entries, self._extents, strict=True)
        ):
            if index not in self._edited:
                found.setdefault(extent.path, []).extend(
                    Part(extent.offset + first - entry.offset, first, end - first)
                    for first, end in entry.parts_of(runs)
                )
        read = self._fill(found, image)
        views = self._layout.views(image)
        for index in sorted(self._edited):  # last, as all of them do
            self._files.check_file(self._extents[index].path)
            copy_rows(views[index], self._hosts[index], runs)
        return read

    def _fill(self, parts: Mapping[Path, Sequence[Part]], image: torch.Tensor) -> int:
        with naming(self._extents):
            return self._files.fill(parts, writable(image))

    def write_back(self, image: torch.Tensor) -> None:
        """Copy what changed in `image` into the host tensors: the overlay.

        Entries that are bit for bit what the host has stay backed by their file, so
        one trained tensor does not pull its frozen neighbours into memory.

        Raises:
            CheckpointError: If a file changed: its private pages may be gone.
        """
        self.check_hosts()
        views = self._layout.views(image)
        for index, (host, view) in enumerate(zip(self._hosts, views, strict=True)):
            if not self._is_in(index, view):
                copy_values(host, view)
                self._mark(index)
        self._parts = self._find_parts()

    def holds(self, image: torch.Tensor) -> bool:
        """Return whether files and overlay are bit for bit what is in `image`.

        Raises:
            CheckpointError: If a file cannot be read, or changed under an edit.
        """
        views = self._layout.views(image)
        return all(self._is_in(index, view) for index, view in enumerate(views))

    def _is_in(self, index: int, view: torch.Tensor) -> bool:
        """Whether an entry's values are these; its mapping is not paged in for that."""
        host, extent = self._hosts[index], self._extents[index]
        if index in self._edited or was_written(host) or not view.is_contiguous():
            self._files.check_mapped(extent.path)
            return same_bits(view, host)
        mine = view.detach().reshape(-1).view(torch.uint8)
        nbytes = min(_COMPARED_BYTES, extent.nbytes)
        with plain_tensors():
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for start in range(0, extent.nbytes, _COMPARED_BYTES):
            piece = mine[start : start + _COMPARED_BYTES]
            theirs = buffer[: len(piece)]
            part = Part(extent.offset + start, 0, len(piece))
            self._files.fill({extent.path: [part]}, writable(theirs), compare=False)
            if not torch.equal(piece, theirs):
                return False
        return True

    def _find_edits(self) -> None:
        """Mark what was written through `.data`, which moves no version counter."""
        for index, host in enumerate(self._hosts):
            if index not in self._edited and was_written(host):
                self.edited(index)

    def edited(self, index: int) -> None:
        """Say that a host tensor was changed, so that the file no longer counts."""
        self._mark(index)
        self._parts = self._find_parts()

    def _mark(self, index: int) -> None:
        if index not in self._edited:
            self._edited.add(index)
            self._files.overlay_bytes += self._extents[index].nbytes

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """See `Store.rehost`."""
        self._hosts[index] = host
        self.edited(index)

    def check_hosts(self) -> None:
        """See `Store.check_hosts`."""
        for path in {extent.path for extent in self._extents}:
            self._files.check_mapped(path)

    def _find_parts(self) -> dict[Path, list[Part]]:
        """Return what fills all contiguous entries that are not edited."""
        found: dict[Path, list[Part]] = {}
        seen: set[tuple[Path, Part]] = set()
        for index, (entry, extent) in enumerate(
            zip(self._layout.entries, self._extents, strict=True)
        ):
            if index in self._edited or entry.nbytes == 0 or not entry.is_contiguous:
                continue
            parts = found.setdefault(extent.path, [])
            part = Part(extent.offset, entry.offset, extent.nbytes)
            if parts and parts[-1].reaches(part):
                parts[-1] = parts[-1].joined(part)
            elif (extent.path, part) not in seen:
                parts.append(part)
            seen.add((extent.path, part))
        return found


def _check_fit(layout: BlockLayout, extents: Sequence[Extent]) -> None:
    if len(extents) != len(layout.entries):
        raise StagehandInternalError(
            f"{len(extents)} extents for {len(layout.entries)} layout entries"
        )
    reach = 0
    before: tuple[Place, Extent] | None = None
    for entry, extent in sorted(
        zip(layout.entries, extents, strict=True), key=lambda pair: pair[0].offset
    ):
        if (entry.dtype, entry.shape) != (extent.dtype, extent.shape):
            raise StagehandInternalError(
                f"entry {entry.name!r} is {entry.dtype} {list(entry.shape)}, its "
                f"extent {extent.dtype} {list(extent.shape)}"
            )
        if entry.nbytes == 0:
            continue
        if before and entry.offset < reach and not _are_one(*before, entry, extent):
            raise TensorMismatchError(
                f"parameters {before[0].name!r} and {entry.name!r} share memory: "
                f"expected one tensor for both, found two, in {before[1].path} at byte "
                f"{before[1].offset} and in {extent.path} at byte {extent.offset}; map "
                f"both to one with key_map, or keep their block in host memory"
            )
        reach = max(reach, entry.offset + entry.nbytes)
        before = entry, extent


def _are_one(entry: Place, extent: Extent, other: Place, its_extent: Extent) -> bool:
    return (entry.offset, entry.stride, extent) == (
        other.offset,
        other.stride,
        its_extent,
    )


def _host_tensors(
    layout: BlockLayout, extents: Sequence[Extent], files: FileSet
) -> list[torch.Tensor]:
    """Return host memory for each entry; the same for entries that are one tensor."""
    hosts: dict[tuple[int, Extent], torch.Tensor] = {}
    keys = [
        (entry.offset, extent)
        for entry, extent in zip(layout.entries, extents, strict=True)
    ]
    for key in dict.fromkeys(keys):
        hosts[key] = host_tensor(files, key[1])
    return [hosts[key] for key in keys]


def host_tensor(files: FileSet, extent: Extent) -> torch.Tensor:
    """Return a tensor that a file holds: a view of the file, private to the caller.

    A tensor at an odd address is copied to memory, with a warning.

    Raises:
        CheckpointError: If the file changed or cannot be read.
    """
    if extent.offset % extent.dtype.itemsize == 0:
        return files.map_tensor(extent)
    warnings.warn(
        f"{extent.path} has tensors at addresses that are no multiple of their "
        f"element size: they are copied to host memory; save the file again with "
        f"the safetensors library to spare it",
        StagehandWarning,
        stacklevel=3,
    )
    return read_tensor(files, extent)


def read_tensor(files: FileSet, extent: Extent) -> torch.Tensor:
    """Return a tensor that a file holds, in memory of its own.

    Raises:
        CheckpointError: If the file changed or cannot be read.
    """
    with plain_tensors():
        buffer = torch.empty(extent.nbytes, dtype=torch.uint8, device="cpu")
        with naming([extent]):
            files.read(extent.path, extent.offset, writable(buffer))
        return buffer.view(extent.dtype).view(extent.shape)
