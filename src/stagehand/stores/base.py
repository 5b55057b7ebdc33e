"""What the rest of the library may ask of the place where a block's truth lives."""

from typing import NamedTuple, Protocol

import torch

from stagehand.core.layout import Runs

__all__ = ["Skew", "Store", "Wire"]


class Skew(NamedTuple):
    """Where an image had best begin: `past` bytes after a multiple of `of`."""

    past: int
    of: int

    def start_in(self, buffer: torch.Tensor) -> int:
        """Return the first byte of a buffer at which such an image can begin."""
        return (self.past - buffer.data_ptr()) % self.of


class Wire(Protocol):
    """The bytes of a block as they cross the link, where they are fewer than its image.

    They lie in pinned memory or are read when they are needed; on the device `decode`
    makes the image of them. Nothing above asks how. The image is bit for bit what the
    store's own `read_into` gives.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link."""

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes that `decode` works in, where it has no kernels."""

    @property
    def pinned(self) -> torch.Tensor | None:
        """The bytes themselves, if they lie in pinned memory; else they are read."""

    def is_current(self) -> bool:
        """Return whether the bytes are those of the host tensors, as far as is known.

        Asked at each load, by the thread that runs the model.
        """

    def renew(self) -> bool:
        """Make them those of the host tensors again, which were changed.

        No copy reads them meanwhile.

        Returns:
            False if they cannot be: the block crosses as its image from now on.
        """

    def read_into(self, memory: torch.Tensor) -> int | None:
        """Fill host memory with the bytes; on a worker thread, as `Store.read_into`.

        Returns:
            Bytes read from disk, or None if the host tensors were found changed, so
            that the block has to cross as its image.
        """

    def decode(
        self, wire: torch.Tensor, image: torch.Tensor, scratch: torch.Tensor | None
    ) -> None:
        """Fill an image on the device, in the order of its current stream.

        Args:
            wire: 1-D uint8 device memory that begins with the bytes.
            image: 1-D uint8, of the layout's size.
            scratch: 1-D uint8, of `scratch_nbytes` or more; None if that is 0.
        """


class Store(Protocol):
    """Where a block's truth lives: host memory, files, a packed or quantized form.

    Narrow on purpose. The loader moves whole images and knows neither files, formats
    nor parameters, so a store can fill an image, take one back, be told of a change on
    the host, and say whether a copy elsewhere may be forgotten; nothing above asks what
    kind of store it is. A store allocates no pinned or device memory, starts no thread
    and waits for no stream: the image is its caller's again when the call returns.
    """

    @property
    def hosts(self) -> list[torch.Tensor]:
        """One host tensor per layout entry, where a parameter points while away."""

    def value(self, index: int) -> torch.Tensor:
        """Return the values of one entry: a host tensor, or memory of its own.

        May run on a worker thread. A file is read, and not looked at through a mapping:
        there a file that has shrunk would end the process.
        """

    @property
    def pinned(self) -> torch.Tensor | None:
        """The truth itself, where it already lies in pinned memory in this layout."""

    @property
    def wire(self) -> Wire | None:
        """How the block crosses the link if not as its image."""

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` with the block's bytes.

        May run on a worker thread, one call per image at a time.

        Args:
            image: 1-D uint8 host tensor, at least as long as the layout.

        Returns:
            Bytes read from disk; 0 when the truth is in memory.
        """

    def read_rows_into(self, image: torch.Tensor, runs: Runs) -> int:
        """Fill some rows of every entry in `image`, as `read_into` would all.

        Asked only where the layout has rows.
        """

    @property
    def skew(self) -> Skew | None:
        """Where a disk can write an image without a copy, if not everywhere."""

    def holds(self, image: torch.Tensor) -> bool:
        """Return whether the truth is bit for bit what is in `image`.

        Args:
            image: 1-D uint8 host tensor, at least as long as the layout.
        """

    def write_back(self, image: torch.Tensor) -> None:
        """Make the values in `image` the truth.

        Args:
            image: 1-D uint8 host tensor, at least as long as the layout.
        """

    def edited(self, index: int) -> None:
        """Say that the host tensor of one entry was changed, and is the truth now."""

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """Let one entry lie in other host memory, where the caller writes its values.

        Not called where entries overlap, or all of them lie in pinned memory.
        """

    def check_hosts(self) -> None:
        """Do nothing if the host tensors can be read, and nobody else wrote to them.

        Raises:
            CheckpointError: If they are views of a file that changed in place.
        """
