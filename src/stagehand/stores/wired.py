"""A block that crosses the link in another form than its image."""

from collections.abc import Sequence
from typing import Protocol

import torch

from stagehand.core.layout import BlockLayout, copy_values, same_bits
from stagehand.stores.base import Wire
from stagehand.stores.module import ModuleStore

__all__ = ["WiredStore"]


class WiredStore(ModuleStore):
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
        super().__init__(layout, hosts)
        self._wire = wire

    @property
    def wire(self) -> Wire | None:
        """How the block crosses the link, if not as its image."""
        return self._wire

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


class EditableWire(Wire, Protocol):
    """A wire that is told which of the host tensors were changed."""

    def edited(self, index: int) -> None:
        """Say that the host tensor of one entry was changed."""
