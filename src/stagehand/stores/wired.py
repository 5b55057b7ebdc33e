"""A block that crosses the link in another form than its image."""

from collections.abc import Sequence
from typing import Protocol

import torch

from stagehand.core.layout import BlockLayout, copy_values, same_bits
from stagehand.errors import StagehandInternalError
from stagehand.stores.base import Wire

__all__ = ["WiredStore"]


class WiredStore:
    """Host tensors that are the truth, and a wire that says the same in fewer bytes.

    The host tensors may be memory or views of files. Who changes one makes the wire
    old: it is renewed, or the block crosses as its image from then on.
    """

    def __init__(
        self,
        layout: BlockLayout,
        hosts: Sequence[torch.Tensor],
        wire: "EditableWire | None",
    ) -> None:
        """Keep what is given; copy nothing.

        Raises:
            StagehandInternalError: If there are more or fewer hosts than entries.
        """
        if len(hosts) != len(layout.entries):
            raise StagehandInternalError(
                f"{len(hosts)} host tensors for {len(layout.entries)} layout entries"
            )
        self._layout = layout
        self._hosts = list(hosts)
        self._wire = wire

    @property
    def hosts(self) -> list[torch.Tensor]:
        """One host tensor per layout entry, where a parameter points while away."""
        return self._hosts

    @property
    def pinned(self) -> None:
        """None: what lies in pinned memory is the wire, at most."""
        return None

    @property
    def wire(self) -> Wire | None:
        """How the block crosses the link, if not as its image."""
        return self._wire

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` from the host tensors; return 0."""
        self._layout.pack(self._hosts, image)
        return 0

    @property
    def skew(self) -> None:
        """None: an image may begin anywhere."""
        return None

    def holds(self, image: torch.Tensor) -> bool:
        """Return whether the host tensors are bit for bit what is in `image`."""
        return self._layout.matches(image, self._hosts)

    def write_back(self, image: torch.Tensor) -> None:
        """Copy what changed in `image` into the host tensors, in place.

        Host tensors that are views of a file stay so, if nothing changed in them.
        """
        views = self._layout.views(image)
        for index, (host, view) in enumerate(zip(self._hosts, views, strict=True)):
            if not same_bits(view, host):
                copy_values(host, view)
                self.edited(index)

    def edited(self, index: int) -> None:
        """Say that a host tensor was changed, so that the wire may be old."""
        if self._wire is not None:
            self._wire.edited(index)

    def can_drop(self) -> bool:
        """Return True: the host tensors hold every byte."""
        return True


class EditableWire(Wire, Protocol):
    """A wire that is told which of the host tensors were changed."""

    def edited(self, index: int) -> None:
        """Say that the host tensor of one entry was changed."""
