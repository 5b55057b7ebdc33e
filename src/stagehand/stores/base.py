"""What the rest of the library may ask of the place where a block's truth lives."""

from typing import Protocol

import torch

__all__ = ["Store"]


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

    @property
    def pinned(self) -> torch.Tensor | None:
        """The truth itself, where it already lies in pinned memory in this layout."""

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` with the block's bytes.

        May run on a worker thread, one call per image at a time.

        Args:
            image: 1-D uint8 host tensor, at least as long as the layout.

        Returns:
            Bytes read from disk; 0 when the truth is in memory.
        """

    def write_back(self, image: torch.Tensor) -> None:
        """Make the values in `image` the truth.

        Args:
            image: 1-D uint8 host tensor, at least as long as the layout.
        """

    def edited(self, index: int) -> None:
        """Say that the host tensor of one entry was changed, and is the truth now."""

    def can_drop(self) -> bool:
        """Return whether an unchanged copy elsewhere may be forgotten."""
