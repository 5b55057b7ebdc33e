"""Checkpointed regions that keep, or spill, what is large, and recompute the rest.

`torch.utils.checkpoint` takes a pair of contexts, one for forward and one for the
recompute. In forward, the results of operators are noted in order: large ones are saved
as any saved tensor is, so they may leave the device; the others are only counted. The
recompute takes the large ones back in the same order instead of computing them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stagehand.activations.pieces import Extra, Piece
from stagehand.core.saved import Kept
from stagehand.errors import StagehandError
from stagehand.torch_private import DispatchMode, dispatching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from stagehand.activations.spill import Spill

    _Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

__all__ = ["contexts_for"]

# Forward and recompute call it differently often.
_UNCOUNTED = frozenset({torch.ops.aten.detach.default})


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
        if not self.threshold:
            yield
            return
        with dispatching(_Takes(self)):
            yield

    def keeps(self, function: Any, result: Any) -> bool:
        """Whether a result is one of its own, and large."""
        if type(result) is not torch.Tensor or function.is_view:
            return False
        if function._schema.is_mutable:
            return False
        return result.numel() * result.element_size() >= self.threshold

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Piece | Extra) and self.spill is not None:
            return self.spill.restore(packed)
        found: torch.Tensor = packed.get()
        return found


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
        result = function(*args, **(kwargs or {}))
        if function in _UNCOUNTED:
            return result
        region = self._region
        kept = region.pack(result) if region.keeps(function, result) else None
        region.results.append((function, kept))
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
        if kept is None:
            return function(*args, **(kwargs or {}))
        return self._region.unpack(kept).detach()
