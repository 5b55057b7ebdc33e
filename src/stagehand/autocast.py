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
because the operator's other input needs no gradient, or there is no graph, an operator
that computes nothing is run on the weight to find it: where no cast may be there, or
one of another type, for a site may change autocast's type inside of its call, only
until it gets one, or would make one.

Without gradients autocast's casts require gradients, too, from some version after 2.10
on: a graph of the same region may use them, and operators multiply inputs that are not
contiguous in another way. Before that, and in inference mode, they do not: nothing
tells whose they are, nor do they make a difference, so the cache is off in such calls.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from stagehand.core.casts import cast_of, is_cast, note_cast
from stagehand.core.terms import terms_of
from stagehand.errors import StagehandWarning
from stagehand.torch_private import (
    CAST,
    DispatchMode,
    dispatching,
    inference_mode,
    sequence_number,
    storage_use_count,
    tensor_use_count,
    without_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node

    from stagehand.core.device import Device
    from stagehand.residency.blocks import Block, Reader
    from stagehand.residency.scheduler import Scheduler

__all__ = ["Casts"]

# Reference counts of a tensor that only autocast's cache refers to, and of its memory;
# whoever asks is counted, too.
_CACHED, _ALONE = 2, 2


class Casts:
    """Autocast's casts of the streamed weights of one runtime.

    Args:
        device: Where the model computes.
        scheduler: Told of a block when this stream has written casts of it, for which
            other streams have to wait as for its values.
        follow: Called with a weight and the node of its cast that a graph uses, which
            a call without gradients has made.
    """

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        follow: Callable[[torch.Tensor, Node], None],
    ) -> None:
        self._device, self._place = device, device.torch_device
        self._scheduler = scheduler
        self._follow = follow
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        # Sites that run, each with the sequence number of autograd's next node when it
        # began, to learn what it casts; or with None, if the cache is off during it.
        self._sites: list[tuple[Reader, int | None]] = []
        self._has_warned = False
        # Whose casts backward has filled, which no end of a call empties.
        self._fetched: Block | None = None

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
            self._follow_unseen(block)
            if reader.cast is None:
                self._sites.append((reader, sequence_number()))
        elif not _are_found() and any(map(_may_be_cached, reader.own.values())):
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
        began = bool(self._sites) and self._sites[-1][0] is reader
        since = self._sites.pop()[1] if began else None
        if began and since is None:
            torch.set_autocast_cache_enabled(True)
        elif self._are_kept():
            if since is not None:
                reader.cast = _cast_in(block, reader, output, since)
            if torch.is_grad_enabled():
                self._find_unsaved(block, reader)
            else:
                self._find_without_graph(block, reader)
        if last and block.casts:
            self.empty(block)

    def _follow_unseen(self, block: Block) -> None:
        """Note that a graph uses casts that calls without gradients have made."""
        for known in block.casts.values():
            cast = known.cast()
            if known.unseen and cast is not None and cast.grad_fn is not None:
                known.unseen = False
                self._follow(known.weight, cast.grad_fn)

    def _find_unsaved(self, block: Block, reader: Reader) -> None:
        """Find the casts of a call with gradients that no operator has saved."""
        for weight in reader.cast or ():
            if _is_wanted(block, weight):
                self._find(block, weight, reader)

    def _find_without_graph(self, block: Block, reader: Reader) -> None:
        """Find the casts of a call without gradients, which does not tell of any."""
        for weight in block.tensors:
            key = id(weight)
            if (
                tensor_use_count(weight) > 1  # as a cast's graph refers to it, too
                and key in reader.own
                and _is_matrix(weight)
                and _may_be_cached(weight)
                and _is_wanted(block, weight)
                and self._find(block, weight, reader)
            ):
                block.casts[key].unseen = True

    def fetch(self, block: Block) -> None:
        """Fill the casts of a block that backward needs, and empty those before it."""
        if self._fetched is not block:
            self.release_fetched()
            self._fetched = block
        self.fill(block)

    def release_fetched(self) -> None:
        """Backward needs the casts no more that it needed last."""
        left, self._fetched = self._fetched, None
        if left is not None and left.uses == (self._scheduler.fetched is left):
            self.empty(left)  # no site reads it

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
            self._scheduler.note_write(block)

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

    def _find(self, block: Block, weight: torch.Tensor, reader: Reader) -> bool:
        """Note the cast of a matrix that autocast keeps; return whether it does.

        A cast to autocast's type of now is made if there is none, where the site was
        last seen to use one: this takes a quarter of the time.
        """
        dtype = torch.get_autocast_dtype(self._place.type)
        makes = reader.cast_to.get(id(weight)) is dtype and weight.dim() == 2
        find = _saved_cast if makes else _kept_cast
        with without_modes():
            cast = find(weight, _no_rows(weight, dtype, self._place))
        if cast is None:
            return False
        reader.cast_to[id(weight)] = cast.dtype
        note_cast(block.casts, cast, weight)
        return True


class _KnownError(Exception):
    """It is known whether autocast keeps a cast."""


class _Finding(DispatchMode):  # type: ignore[no-untyped-call]
    """Finds the cast of a weight that an operator gets, and lets none be made."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weight = weight
        self.cast: torch.Tensor | None = None

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                found = cast_of(tensor)
                if found is not None and found[1] is self._weight:
                    self.cast = found[0]
                    raise _KnownError
        if function is CAST:
            raise _KnownError
        return function(*args, **(kwargs or {}))


def _kept_cast(weight: torch.Tensor, no_rows: torch.Tensor) -> torch.Tensor | None:
    """Return the cast of a matrix that autocast keeps and that requires gradients."""
    finding = _Finding(weight)
    with torch.no_grad(), dispatching(finding), suppress(_KnownError):
        torch.matmul(no_rows, weight)
    return finding.cast


def _saved_cast(weight: torch.Tensor, no_rows: torch.Tensor) -> torch.Tensor | None:
    """Return the cast of a matrix of two dimensions, which autocast makes if needed.

    One of more dimensions may be saved in another shape.
    """
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> None:
        saved.append(tensor)
        if tensor.dtype is not no_rows.dtype:  # they cannot be multiplied
            raise _KnownError

    with (
        torch.enable_grad(),
        saved_tensors_hooks(save, _never),
        suppress(_KnownError),
    ):
        torch.matmul(no_rows.requires_grad_(), weight)
    found = filter(None, map(cast_of, saved))
    return next((cast for cast, leaf in found if leaf is weight), None)


def _no_rows(
    weight: torch.Tensor, dtype: torch.dtype, place: torch.device
) -> torch.Tensor:
    """Return what a matrix is multiplied with to compute nothing."""
    return torch.empty(0, weight.shape[-2], dtype=dtype, device=place)


def _cast_in(
    block: Block, reader: Reader, output: Any, since: int
) -> tuple[torch.Tensor, ...] | None:
    """Return the matrices that a site's call has cast; None if that is unknown.

    And those that it casts without gradients: a call before may have made these casts.
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
    cast |= reader.cast_to.keys()
    return tuple(
        t
        for t in block.tensors
        if id(t) in cast and _is_matrix(t) and _may_be_cached(t)
    )


def _is_wanted(block: Block, weight: torch.Tensor) -> bool:
    """Whether the latest cast of a weight that is known is gone."""
    known = block.casts.get(id(weight))
    return known is None or known.cast() is None


@cache
def _have_graphs() -> bool:
    """Whether casts that autocast keeps without gradients require gradients."""
    place = torch.device("cpu")
    weight = torch.ones(1, 1, device=place, requires_grad=True)
    with (
        without_modes(),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=True),
        torch.no_grad(),
    ):
        torch.matmul(weight, weight)
        no_rows = _no_rows(weight, torch.bfloat16, place)
        return _kept_cast(weight, no_rows) is not None


def _are_found() -> bool:
    """Whether a call without gradients lets its casts be found."""
    return not torch.is_inference_mode_enabled() and _have_graphs()


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1


def _may_be_cached(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32


def _never(_: object) -> torch.Tensor:
    raise NotImplementedError  # nobody goes back through it
