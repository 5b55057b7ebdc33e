"""A block whose truth is in host memory: the module's own tensors, or one image."""

from collections.abc import Sequence

import torch

from stagehand.core.copies import copy_all
from stagehand.core.layout import BlockLayout, Runs
from stagehand.errors import StagehandInternalError
from stagehand.stores.base import Wire

__all__ = ["ModuleStore"]


class ModuleStore:
    """Keeps a block in host RAM.

    With an image (pinned, laid out as the device wants it) the caller can copy straight
    from it: a load packs nothing. Without one the tensors stay where the module had
    them and every load packs them: no second copy of the model, at the cost of a copy
    in host memory per load.
    """

    def __init__(
        self,
        layout: BlockLayout,
        hosts: Sequence[torch.Tensor],
        image: torch.Tensor | None = None,
    ) -> None:
        """Keep what is given; copy nothing.

        Args:
            layout: The block's layout.
            hosts: One host tensor per entry. With `image`, its views.
            image: 1-D uint8 host memory that holds the truth, or None.

        Raises:
            StagehandInternalError: If there are more or fewer hosts than entries, or
                `image` cannot hold the layout.
        """
        if len(hosts) != len(layout.entries):
            raise StagehandInternalError(
                f"{len(hosts)} host tensors for {len(layout.entries)} layout entries"
            )
        if image is not None:
            layout.check_image(image)
        self._layout = layout
        self._hosts = list(hosts)
        self._image = image

    @classmethod
    def pack(
        cls, layout: BlockLayout, tensors: Sequence[torch.Tensor], image: torch.Tensor
    ) -> "ModuleStore":
        """Copy the tensors into `image` and return a store whose truth is there."""
        layout.pack(tensors, image)
        return cls(layout, layout.host_views(image), image)

    @property
    def hosts(self) -> list[torch.Tensor]:
        """One host tensor per layout entry, where a parameter points while away."""
        return self._hosts

    def value(self, index: int) -> torch.Tensor:
        """Return a host tensor."""
        return self._hosts[index]

    @property
    def pinned(self) -> torch.Tensor | None:
        """The image, if there is one."""
        return self._image

    @property
    def wire(self) -> Wire | None:
        """None: the image itself crosses the link."""
        return None

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` from host memory; return 0, for nothing comes from disk."""
        self._layout.pack(self._hosts, image)
        return 0

    def read_rows_into(self, image: torch.Tensor, runs: Runs) -> int:
        """Fill some rows from host memory; return 0."""
        self._layout.pack_rows(self._hosts, image, runs)
        return 0

    @property
    def skew(self) -> None:
        """None: an image may begin anywhere."""
        return None

    def holds(self, image: torch.Tensor) -> bool:
        """Return whether the host tensors are bit for bit what is in `image`."""
        return self._layout.matches(image, self._hosts)

    def write_back(self, image: torch.Tensor) -> None:
        """Copy the values of `image` into the host tensors, in place."""
        views = self._layout.views(image)
        copy_all(self._hosts, views)

    def edited(self, index: int) -> None:
        """Do nothing: a host tensor is the truth itself."""

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """See `Store.rehost`."""
        self._hosts[index] = host

    def check_hosts(self) -> None:
        """Do nothing: they are memory."""
