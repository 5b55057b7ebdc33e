"""A block that crosses the link in another form than its image."""

from collections.abc import Sequence
from typing import Protocol

import torch

from stagehand.core.copies import copy_values
from stagehand.core.layout import BlockLayout, Runs, same_bits
from stagehand.stores.base import Store, Wire
from stagehand.stores.module import ModuleStore

__all__ = ["WiredStore", "origin_of", "value_of"]


def origin_of(store: Store | None) -> Store | None:
    """Return the store from which the values of unchanged host tensors are read.

    That is the one before a wired store, or a store itself; None if there is none, or
    the truth is in pinned memory.
    """
    if isinstance(store, WiredStore):
        return store.before
    return store if store is not None and store.pinned is None else None


def value_of(
    index: int, hosts: Sequence[torch.Tensor], before: Store | None
) -> torch.Tensor:
    """Return the values of one entry, from the store before if its tensor is there.

    Args:
        index: The entry's number.
        hosts: One host tensor per entry.
        before: The store that some of these tensors come from, if there was one.
    """
    if before is not None and before.hosts[index] is hosts[index]:
        return before.value(index)
    return hosts[index]


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
        before: Store | None = None,
    ) -> None:
        """Keep what is given; copy nothing.

        Args:
            layout: The block's layout.
            hosts: One host tensor per entry.
            wire: The same values in fewer bytes; None to cross as the image.
            before: The store that some host tensors come from, as views of files:
                their values are read through it.

        Raises:
            StagehandInternalError: If there are more or fewer hosts than entries.
        """
        super().__init__(layout, hosts)
        self._wire = wire
        self.before = before
        """The store that some host tensors come from."""

    @property
    def wire(self) -> Wire | None:
        """How the block crosses the link, if not as its image."""
        return self._wire

    def value(self, index: int) -> torch.Tensor:
        """Return the values of one entry.

        Raises:
            CheckpointError: If its file changed or cannot be read.
        """
        return value_of(index, self._hosts, self.before)

    def _values(self) -> list[torch.Tensor]:
        return [self.value(index) for index in range(len(self._hosts))]

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image`; return 0, as host memory does.

        Raises:
            CheckpointError: If a file changed or cannot be read.
        """
        self._layout.pack(self._values(), image)
        return 0

    def read_rows_into(self, image: torch.Tensor, runs: Runs) -> int:
        """Fill some rows; return 0, as host memory does.

        Raises:
            CheckpointError: If a file changed or cannot be read.
        """
        self._layout.pack_rows(self._values(), image, runs)
        return 0

    def holds(self, image: torch.Tensor) -> bool:
        """Return whether the truth is bit for bit what is in `image`."""
        return self._layout.matches(image, self._values())

    def write_back(self, image: torch.Tensor) -> None:
        """Copy what changed in `image` into the host tensors, in place.

        Host tensors that are views of a file stay so, if nothing changed in them.
        """
        views = self._layout.views(image)
        for index, (host, view) in enumerate(zip(self._hosts, views, strict=True)):
            if not same_bits(view, self.value(index)):
                copy_values(host, view)
                self.edited(index)

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """See `Store.rehost`."""
        self.edited(index)
        super().rehost(index, host)
        if self._wire is not None:
            self._wire.rehost(index, host)

    def check_hosts(self) -> None:
        """See `Store.check_hosts`."""
        if self.before is not None:
            self.before.check_hosts()

    def edited(self, index: int) -> None:
        """Say that a host tensor was changed, so that the wire may be old."""
        if self._wire is not None:
            self._wire.edited(index)
        before = self.before
        if before is not None and before.hosts[index] is self._hosts[index]:
            before.edited(index)


class EditableWire(Wire, Protocol):
    """A wire that is told which of the host tensors were changed."""

    def edited(self, index: int) -> None:
        """Say that the host tensor of one entry was changed."""

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """Say that it lies elsewhere from now on."""
