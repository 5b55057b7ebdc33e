"""Keeps autocast from holding on to casts of streamed weights.

Autocast caches its casts of trained fp32 weights until its region ends: half of a
model's bytes. So the cache is off during a pass. A weight that is used more than once
is an exception: with the cache autograd adds its gradients before they are cast back,
without it after, which rounds differently. Such blocks are known from their second use
on, and keep their casts as if they were resident.
"""

import warnings
from collections.abc import Mapping

import torch

from stagehand.errors import StagehandWarning
from stagehand.residency.blocks import Block

__all__ = ["Casts"]


class Casts:
    """Autocast's cache during the passes of one runtime; a context for one at a time.

    Args:
        kind: The device's type, as autocast knows it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._wanted = True
        self._used: set[int] = set()  # weights, in this pass
        self._before: set[int] = set()  # in the forward that this backward recomputes
        self._reused: set[int] = set()  # blocks

    def __enter__(self) -> None:
        """A pass begins: switch the cache off."""
        self._wanted = torch.is_autocast_cache_enabled()
        self._used.clear()
        self._before.clear()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        """The pass ends: let it be as it was."""
        torch.set_autocast_cache_enabled(self._wanted)

    def turn_back(self) -> None:
        """A backward pass begins: what it recomputes are no further uses."""
        self._before |= self._used
        self._used.clear()

    def begin(self, block: Block, own: Mapping[int, torch.Tensor]) -> None:
        """A module that reads a block begins, with gradients.

        Args:
            block: The block, of which other modules may read the rest.
            own: What of it this module reads, by id.
        """
        if not self._wanted or not torch.is_autocast_enabled(self._kind):
            return
        if block.index in self._reused:
            torch.set_autocast_cache_enabled(True)
        elif self._used.isdisjoint(own):
            self._used.update(own.keys() - self._before)
        elif any(t.requires_grad and t.dtype == torch.float32 for t in own.values()):
            self._reused.add(block.index)
            warnings.warn(
                f"block {block.name!r} is used again in a pass under autocast: its"
                " gradients of this pass are added in fp32, those of later passes as"
                " without streaming",
                StagehandWarning,
                stacklevel=2,
            )

    def end(self, block: Block) -> None:
        """The module ends."""
        if block.index in self._reused:
            torch.set_autocast_cache_enabled(False)
