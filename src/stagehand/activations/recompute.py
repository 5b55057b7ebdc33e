"""Checkpointed regions that keep, or spill, what is large, and recompute the rest.

`torch.utils.checkpoint` takes a pair of contexts, one for forward and one for the
recompute. In forward, the results of operators are noted in order: large ones are saved
as any saved tensor is, so they may leave the device; the others are only counted. The
recompute takes the large ones back in the same order instead of computing them. What
draws random numbers is always computed again: those that follow would be others.

What stands for a result is made and taken back unseen: modes below may be those of a
region around this one, which would count it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from stagehand.activations.pieces import Extra, Piece
from stagehand.core.saved import Kept
from stagehand.errors import StagehandError
from stagehand.torch_private import (
    CAST,
    DispatchMode,
    dispatching,
    sharing_versions,
    without_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from stagehand.activations.spill import Spill

    _Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

__all__ = ["contexts_for"]

# Forward and recompute call them differently often: autocast keeps casts of weights, so
# whether a region makes one depends on what ran before it.
_UNCOUNTED = frozenset({torch.ops.aten.detach.default, CAST})
# What they give is written afterwards.
_UNFILLED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


def contexts_for(spill: Spill | None, threshold: int) -> Callable[[], _Contexts]:
    """Return what makes a pair of contexts for each region.

    Args:
        spill: Takes what is large; None keeps it.
        threshold: Bytes from which on a result is large; zero: none is.
    """

    def contexts() -> _Contexts:
        region = _Region(spill, threshold)
        return _Again(region.forward), _Again(region.recompute)

    return contexts


class _Region:
    """What one run of a checkpointed region has kept."""

    def __init__(self, spill: Spill | None, threshold: int) -> None:
        self.threshold = threshold
        self.spill = spill
        self.pack: Callable[[torch.Tensor], Any] = Kept
        self.results: list[tuple[Any, Any]] = []
        """By operator called: itself, and what it gave if that is large."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what is large."""
        if not self.threshold:
            yield
            return
        scope = None
        if self.spill is not None:
            scope = self.spill.begin()
            self.pack = self.spill.packer(scope, Kept)
        failed = True
        try:
            with dispatching(_Keeps(self)):
                yield
            failed = False
        finally:
            if self.spill is not None and scope is not None:
                self.spill.end(scope, failed=failed)

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Take it back."""
        with dispatching(_Takes(self)) if self.threshold else nullcontext():
            yield

    def keep(self, function: Any, args: Any, result: Any) -> Any:
        """Return what stands for an operator's result; None if that is to be computed.

        Of several tensors all are kept if one of them is large: they come together.
        """
        if function.is_view or function._schema.is_mutable or function in _UNFILLED:
            return None
        each = result if type(result) is tuple else (result,)
        if not any(map(self._is_large, each)) or _is_random(function, args):
            return None
        with _apart():
            kept = [self._packed(item) for item in each]
        return kept if type(result) is tuple else kept[0]

    def _is_large(self, item: Any) -> bool:
        if type(item) is not torch.Tensor:
            return False
        return item.numel() * item.element_size() >= self.threshold

    def _packed(self, item: Any) -> Any:
        return self.pack(item) if isinstance(item, torch.Tensor) else item

    def is_whole(self, kept: Any) -> bool:
        """Whether what stands for a result was not changed in place since."""
        each = kept if type(kept) is list else (kept,)
        return not any(map(_is_changed, each))

    def again(self, kept: Any) -> Any:
        """Return the result that something stands for."""
        with _apart():
            if type(kept) is list:
                return tuple(map(self._unpacked, kept))
            return self._unpacked(kept)

    def let_write(self, args: Any) -> None:
        """Let what is about to be written wait for copies that read it."""
        for arg in args:
            if self.spill is not None and type(arg) is torch.Tensor:
                self.spill.let_write(arg)

    def _unpacked(self, packed: Any) -> Any:
        if isinstance(packed, Piece | Extra) and self.spill is not None:
            return self.spill.restore(packed).detach()
        return packed.get().detach() if type(packed) is Kept else packed


@contextmanager
def _apart() -> Iterator[None]:
    """Keep what is done to saved tensors from modes, and theirs from what is done.

    Other pieces may leave meanwhile: what stands for them has their versions, too.
    """
    with sharing_versions(), without_modes(but_sanitizer=True):
        yield


def _is_changed(packed: Any) -> bool:
    if type(packed) is Kept:
        return packed.tensor._version != packed.version
    return isinstance(packed, Piece | Extra) and packed.has_changed()


def _is_random(function: Any, args: Any) -> bool:
    """Whether a call draws random numbers. Attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    names = [argument.name for argument in function._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return place < len(args) and bool(args[place])


class _Again:
    """A context that can be entered again: a graph may go backward twice."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inside: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        inside = self._make()
        inside.__enter__()
        self._inside.append(inside)

    def __exit__(self, *failure: object) -> bool | None:
        return self._inside.pop().__exit__(*failure)  # type: ignore[arg-type]


class _Keeps(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators give."""

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        region = self._region
        if function._schema.is_mutable:
            region.let_write(args)
        result = function(*args, **(kwargs or {}))
        if function in _UNCOUNTED:
            return result
        region.results.append((function, region.keep(function, args, result)))
        return result


class _Takes(DispatchMode):  # type: ignore[no-untyped-call]
    """Gives again what was noted."""

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._next = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _UNCOUNTED:
            return function(*args, **(kwargs or {}))
        results = self._region.results
        if self._next >= len(results) or results[self._next][0] is not function:
            raise StagehandError(
                f"a checkpointed region called {function} when it was computed again,"
                " but not at this place in forward: make it call the same operators,"
                " or set recompute_threshold_bytes to 0"
            )
        kept = results[self._next][1]
        self._next += 1
        if kept is None or not self._region.is_whole(kept):
            return function(*args, **(kwargs or {}))
        return self._region.again(kept)
