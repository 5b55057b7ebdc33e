"""The wire of a block whose weights lie in files in a smaller form.

The block's host tensors are the same weights decoded, in memory or in files; what does
not shrink crosses as it is, from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from stagehand.core.copies import copy_values
from stagehand.core.layout import BlockLayout, placed, plain_tensors
from stagehand.stores.base import Store
from stagehand.stores.checkpoint import Extent
from stagehand.stores.files import FileSet, naming
from stagehand.stores.packed_layout import RawRun, in_runs
from stagehand.stores.pages import was_written
from stagehand.stores.reading import Part, writable
from stagehand.stores.wired import value_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FileWire", "Form", "Piece"]


class Form(Protocol):
    """What lies where on a wire, and how it is decoded."""

    @property
    def nbytes(self) -> int:
        """Size of the wire."""

    @property
    def raw(self) -> tuple[RawRun, ...]:
        """What crosses as it is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Bytes of a wire that do not come from host tensors."""

    source: Extent | torch.Tensor
    """A range of a file, or memory."""
    target: int
    """Byte of the wire where they begin."""


class FileWire:
    """Reads a block's wire from files whenever it is needed.

    Args:
        layout: The block's.
        hosts: Its host tensors; views of files for what is not raw.
        form: What lies where on the wire.
        pieces: What is read from files, or copied from memory, to which place.
        before: The store that some host tensors come from; None if there was none.
        streams: Which entries of the layout are not raw.
        files: The open files of the pieces.
        decode: Fills an image: wire, form, image, and scratch memory by name.
        scratch_nbytes: Scratch memory that it needs.
    """

    def __init__(
        self,
        layout: BlockLayout,
        hosts: Sequence[torch.Tensor],
        form: Form,
        pieces: Sequence[Piece],
        *,
        before: Store | None,
        streams: Sequence[int],
        files: FileSet,
        decode: Callable[..., None],
        scratch_nbytes: int,
    ) -> None:
        self._layout = layout
        self._hosts = list(hosts)
        self._form = form
        self._before = before
        self._files = files
        self._decode = decode
        self._scratch_nbytes = scratch_nbytes
        self._streams = frozenset(streams)
        self._is_old = False
        self._copies = [p for p in pieces if isinstance(p.source, torch.Tensor)]
        self._parts: dict[Path, list[Part]] = {}
        self._extents: list[Extent] = []
        for piece in pieces:
            source = piece.source
            if isinstance(source, Extent):
                part = Part(source.offset, piece.target, source.nbytes)
                self._parts.setdefault(source.path, []).append(part)
                self._extents.append(source)
        self._raw = [
            (index, target)
            for index in range(len(layout.entries))
            if index not in self._streams
            and (target := in_runs(form.raw, layout.entries[index].offset)) is not None
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link."""
        return self._form.nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes to decode in."""
        return self._scratch_nbytes

    @property
    def pinned(self) -> None:
        """None: it is read when it is needed."""
        return None

    def edited(self, index: int) -> None:
        """Say that a host tensor was changed; raw ones are read at each load anyway."""
        if index in self._streams:
            self._is_old = True

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """Say that a host tensor lies elsewhere from now on."""
        self._hosts[index] = host

    def is_current(self) -> bool:
        """See `Wire.is_current`."""
        return not self._is_old

    def renew(self) -> bool:
        """Return False: files are not written."""
        return False

    def read_into(self, memory: torch.Tensor) -> int | None:
        """See `Wire.read_into`.

        Raises:
            CheckpointError: If a file changed or cannot be read.
        """
        # An edit through `.data` moves no version counter.
        if self._is_old or any(was_written(self._hosts[i]) for i in self._streams):
            self._is_old = True
            return None
        with naming(self._extents):
            nbytes = self._files.fill(self._parts, writable(memory))
        with plain_tensors():
            for piece in self._copies:
                _copy_bytes(piece, memory)
            for index, target in self._raw:
                entry = self._layout.entries[index]
                where = (memory.storage_offset() + target) // entry.dtype.itemsize
                view = placed(
                    memory.untyped_storage(),
                    entry.dtype,
                    where,
                    entry.shape,
                    entry.stride,
                )
                copy_values(view, value_of(index, self._hosts, self._before))
        return nbytes

    def decode(
        self, wire: torch.Tensor, image: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        """See `Wire.decode`."""
        self._decode(wire, self._form, image, scratch=scratch)


def _copy_bytes(piece: Piece, memory: torch.Tensor) -> None:
    if isinstance(piece.source, torch.Tensor):
        flat = piece.source.reshape(-1).view(torch.uint8)
        memory[piece.target :][: flat.numel()].copy_(flat)
