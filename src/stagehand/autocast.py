"""Lets autocast keep its casts of streamed weights, but not their memory.

Autocast caches its casts of trained float32 weights until its region ends: half of a
model's bytes. To switch the cache off would change gradients. With it, a weight that is
used several times is cast once, and the uses' gradients are added up in the low
precision before they are cast back. Without it each use has a cast of its own, and they
are added up after being cast back, which rounds differently. So the cache is left on,
and its casts of streamed weights have memory only while their block is in use: they are
emptied when a site ends, and made again when the block is used again. What autograd
saves of them are handles already (see `graph`).

A cast is found through the graph, when an operator saves it for backward. If none does,
because the operator's other input needs no gradient, an operator that computes nothing
is run on the weight to find the cast.

Without gradients none is kept. Those that PyTorch keeps then require gradients, in 2.13
and not in 2.10, which lets it multiply inputs that are not contiguous in another way.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from stagehand.core.casts import cast_of, is_cast, note_cast
from stagehand.core.terms import terms_of
from stagehand.errors import StagehandWarning
from stagehand.torch_private import (
    inference_mode,
    sequence_number,
    storage_use_count,
    tensor_use_count,
    without_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagehand.core.device import Device
    from stagehand.residency.blocks import Block, Reader

__all__ = ["Casts"]

# Reference counts of a tensor that only autocast's cache refers to, and of its memory;
# whoever asks is counted, too.
_CACHED, _ALONE = 2, 2


class Casts:
    """Autocast's casts of the streamed weights of one runtime.

    Args:
        device: Where the model computes.
        note_write: Called with a block when this stream has written casts of it, for
            which other streams have to wait as for its values.
    """

    def __init__(self, device: Device, note_write: Callable[[Block], None]) -> None:
        self._device, self._place = device, device.torch_device
        self._note_write = note_write
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        # Sites that run, each with the sequence number of autograd's next node when it
        # began, to learn what it casts; or with None, if the cache is off during it.
        self._sites: list[tuple[Reader, int | None]] = []
        self._has_warned = False

    def forget(self) -> None:
        """Begin a pass: forget sites that an interrupt has left."""
        if any(since is None for _, since in self._sites):
            torch.set_autocast_cache_enabled(True)
        self._sites.clear()

    def _are_kept(self) -> bool:
        """Whether autocast keeps what it casts now."""
        return torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(
            self._place.type
        )

    def begin(self, block: Block, reader: Reader) -> None:
        """Begin the call of a site, whose block is in use."""
        if block.casts:
            self.fill(block)
        if not self._are_kept():
            return
        if torch.is_grad_enabled():
            if reader.cast is None:
                self._sites.append((reader, sequence_number()))
        elif any(map(_may_be_cached, reader.own.values())):
            self._sites.append((reader, None))
            torch.set_autocast_cache_enabled(False)

    def end(self, block: Block, reader: Reader, output: Any, *, last: bool) -> None:
        """End the call of a site.

        Args:
            block: Its block, which is still in use.
            reader: What of it the site reads.
            output: What the site returns.
            last: Whether no other site uses the block now.
        """
        if self._sites and self._sites[-1][0] is reader:
            _, since = self._sites.pop()
            if since is None:
                torch.set_autocast_cache_enabled(True)
            else:
                reader.cast = _cast_in(block, output, since)
        if reader.cast and torch.is_grad_enabled() and self._are_kept():
            for weight in reader.cast:
                known = block.casts.get(id(weight))
                if known is None or known.cast() is None:
                    self._ask_for(block, weight)
        if last and block.casts:
            self.empty(block)

    def fill(self, block: Block) -> None:
        """Give the casts of a block that is in use their memory back.

        This stream has waited for all that was written to the block.
        """
        stream, writes = self._device.current_stream(), False
        for key, known in [*block.casts.items()]:
            cast, weight = known.cast(), known.weight
            if cast is None:  # the region is over
                del block.casts[key]
                continue
            if known.version != weight._version:
                known.version = weight._version
                self._warn(block)
            elif cast.numel() == weight.numel():
                if not self._device.is_host:
                    with without_modes():
                        cast.record_stream(stream)  # type: ignore[arg-type]
                continue
            with without_modes():
                cast.data = weight.data.to(cast.dtype)
            writes = True
        if writes:
            self._note_write(block)

    def _warn(self, block: Block) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a weight of block {block.name!r} has changed since autocast has cast"
                " it: its cast is made again, while without streaming the old one would"
                " be used, as others are; end autocast before the optimizer steps",
                StagehandWarning,
                stacklevel=2,
            )

    def empty(self, block: Block) -> None:
        """Take the memory of a block's casts, of those that only autocast refers to."""
        if block.read_elsewhere:
            return
        for known in block.casts.values():
            cast = known.cast()
            if (
                cast is not None
                and tensor_use_count(cast) == _CACHED
                and storage_use_count(cast.untyped_storage()) == _ALONE
            ):
                cast.data = self._empty_one(cast.dtype)

    def _empty_one(self, dtype: torch.dtype) -> torch.Tensor:
        found = self._nothing.get(dtype)
        if found is None:
            with inference_mode(False), without_modes():
                found = torch.empty(0, dtype=dtype, device=self._place)
            self._nothing[dtype] = found
        return found

    def _ask_for(self, block: Block, weight: torch.Tensor) -> None:
        """Find the cast of a weight that no operator has saved, and note it."""
        saved: list[torch.Tensor] = []
        dtype = torch.get_autocast_dtype(self._place.type)
        with without_modes(), saved_tensors_hooks(saved.append, _never):
            rows = torch.empty(0, weight.shape[-2], dtype=dtype, device=self._place)
            torch.matmul(rows.requires_grad_(), weight)
        for tensor in saved:
            found = cast_of(tensor)
            if found is not None and found[1] is weight:
                note_cast(block.casts, *found)


def _cast_in(block: Block, output: Any, since: int) -> tuple[torch.Tensor, ...] | None:
    """Return the matrices that a site's call has cast; None if that is unknown.

    Vectors are too small to matter. Of weights that the site shares with others, and
    that are no part of its block, the casts stay, as they do.
    """
    terms = terms_of(output, since)
    if not terms:
        return None
    cast = {
        id(node.variable)  # type: ignore[attr-defined]
        for node, makers in terms.items()
        if any(is_cast(maker) for maker, _ in makers)
    }
    return tuple(t for t in block.tensors if id(t) in cast and t.dim() > 1)


def _may_be_cached(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32


def _never(_: object) -> torch.Tensor:
    raise NotImplementedError  # nobody goes back through it
