"""Keeps autocast from holding on to casts of streamed weights.

Autocast caches its casts of trained fp32 weights until its region ends: half of a
model's bytes. So the cache is off while a site runs that reads such weights, and in
passes without gradients. It must be on for what is read more than once in a region:
with it autograd adds the gradients before they are cast back, without it after, which
rounds differently. That is so for a leaf that a site is given, for what no site reads,
and for a streamed weight that is used again. Such a weight is known from its second use
on; from then on its block's casts are kept as if it were resident.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from stagehand.core.terms import terms_of
from stagehand.core.trees import tensors_in
from stagehand.errors import StagehandWarning
from stagehand.torch_private import sequence_number, without_modes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from stagehand.residency.blocks import Block, Reader

__all__ = ["Casts"]

_CAST = "ToCopyBackward0"


class Casts:
    """Autocast's cache during the passes of one runtime; a context for one at a time.

    Args:
        device: Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._region = _Region(device)
        self._wanted = True
        self.sites: list[tuple[Reader, bool, int | None]] = []
        """Those that run and may cast trained weights; whether the cache was on before,
        and the number of the graph's next node then, if what is added to the graph is
        to be looked at."""
        self._used: set[int] = set()  # weights, since the latest backward
        self._before: set[int] = set()  # in the forward that this backward recomputes
        self._reused: set[int] = set()  # blocks
        self._has_warned = False

    def __enter__(self) -> None:
        """A pass begins."""
        self._wanted = torch.is_autocast_cache_enabled()
        self.sites.clear()
        grads = torch.is_grad_enabled()
        if grads:
            goes_on = self._goes_on()
            if self._before or not goes_on:
                self._used.clear()
                self._before.clear()
        torch.set_autocast_cache_enabled(self._wanted and grads)

    def __exit__(self, *_: object) -> None:
        """The pass ends: let the cache be as it was, whatever has failed."""
        torch.set_autocast_cache_enabled(self._wanted)

    def _goes_on(self) -> bool:
        """Whether this pass begins in the region of the latest one."""
        if not self._wanted or not torch.is_autocast_enabled(self._device.type):
            return False
        return self._region.goes_on()

    def turn_back(self) -> None:
        """A backward pass begins: what it recomputes are no further uses."""
        self._before |= self._used
        self._used.clear()

    def begin(self, block: Block, reader: Reader, given: Any) -> None:
        """A module that reads a block begins.

        Args:
            block: The block, of which other modules may read the rest.
            reader: What of it this module reads.
            given: What the module is called with.
        """
        was = torch.is_autocast_cache_enabled()
        wanted = self.sites[0][1] if self.sites else was
        if not wanted or not torch.is_autocast_enabled(self._device.type):
            return
        own = reader.own
        if not any(map(_may_be_kept, own.values())):
            return
        grads = torch.is_grad_enabled()
        if grads and self._used.isdisjoint(own):
            self._used.update(own.keys() - self._before)
        elif grads:
            self._keep(block)
        on = block.index in self._reused
        on = on or any(_may_be_kept(tensor) for _, tensor in tensors_in(given))
        looks = grads and not on and not reader.has_shown_casts
        self.sites.append((reader, was, sequence_number() if looks else None))
        torch.set_autocast_cache_enabled(on)

    def end(self, block: Block, reader: Reader, output: Any) -> None:
        """It ends, if it has begun.

        Args:
            block: As it was given to `begin`.
            reader: As well.
            output: What the module returns.
        """
        if self.sites[-1][0] is not reader:
            return
        _, was, since = self.sites.pop()
        torch.set_autocast_cache_enabled(was)
        terms = {} if since is None else terms_of(output, since)
        for makers in terms.values():
            reader.has_shown_casts = True
            if sum(maker.name() == _CAST for maker, _ in makers) > 1:
                self._keep(block)
                break

    def _keep(self, block: Block) -> None:
        """Let autocast keep the casts of a block from now on."""
        self._reused.add(block.index)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a weight of block {block.name!r} is used again under autocast before"
                " its gradients were made: those of this pass are added in fp32, those"
                " of later passes as without streaming, which keeps its cast until"
                " autocast ends; this is said of the first such block only",
                StagehandWarning,
                stacklevel=2,
            )


def _may_be_kept(tensor: torch.Tensor) -> bool:
    """Whether autocast caches what it casts it to."""
    return tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32


class _Region:
    """Tells autocast's regions apart: at the end of the outermost it forgets all casts.

    Args:
        device: Where autocast casts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cast: Node | None = None

    def goes_on(self) -> bool:
        """Whether it is the one of the latest call. Call with gradients, 6 us."""
        with without_modes():
            if self._operands is None:
                empty = torch.empty(0, 0, dtype=torch.float32, device=self._device)
                self._operands = empty, empty.detach().requires_grad_()
            other, leaf = self._operands
            made: Any = torch.addmm(leaf, other, other).grad_fn  # saves nothing
        cast: Node = made.next_functions[0][0]
        before, self._cast = self._cast, cast
        return cast is before and cast.name() == _CAST
