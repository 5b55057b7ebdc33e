"""Puts hooks for saved tensors on a thread, where that does no harm."""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stagehand.activations.pieces import Extra, Piece
from stagehand.core.saved import Kept
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.torch_private import (
    in_backward,
    is_checkpoints,
    looked_through,
    pop_saved_hooks,
    push_saved_hooks,
    skipped,
    top_saved_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from stagehand.activations.pieces import Scope
    from stagehand.activations.spill import Spill

__all__ = ["Saving"]

# A forward, the hooks outside of all of ours, and those that were on top before.
_Entry = tuple["Scope", Any, Any]


def _unpacker(spill: Spill) -> Callable[[Any], torch.Tensor]:
    restore = spill.restore

    @skipped
    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is Piece:
            alias: torch.Tensor | None = packed.alias
            # Most are there, in forwards of which nothing is away.
            if alias is not None and not packed.scope.is_stirred:
                if alias._version != packed.version:
                    packed.check()
                return alias
            return restore(packed)
        found: torch.Tensor = restore(packed) if type(packed) is Extra else packed.get()
        return found

    return unpack


def _passing_on(outer: Any) -> Callable[[torch.Tensor], _Theirs]:
    """Return what lets the hooks outside of ours save a tensor that does not leave."""
    pack, unpack = outer
    return lambda saved: _Theirs(pack(saved), unpack)


class _Theirs:
    """What the hooks outside of ours made of a tensor that does not leave."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Any) -> None:
        self._packed = packed
        self._unpack = unpack

    def get(self) -> torch.Tensor:
        found: torch.Tensor = self._unpack(self._packed)
        return found


class Saving:
    """Puts hooks on this thread for as long as a forward runs.

    Reusable, and can be entered again inside itself, and in several threads at once.

    Args:
        spill: Decides what becomes of the tensors.
        off: Let autograd save as usual.
    """

    def __init__(self, spill: Spill, *, off: bool = False) -> None:
        self.spill = spill
        self.off = off
        self._unpack = _unpacker(spill)
        self._entered = threading.local()
        self._warned = False

    def _stack(self) -> list[_Entry | None]:
        stack: list[_Entry | None] | None = getattr(self._entered, "stack", None)
        if stack is None:
            stack = self._entered.stack = []
        return stack

    @property
    def scope(self) -> Scope | None:
        """The forward that this thread is in."""
        stack = self._stack()
        return stack[-1][0] if stack and stack[-1] is not None else None

    def enter(self) -> None:
        """Begin a forward."""
        outer, stack = top_saved_hooks(), self._stack()
        below, depth = outer, len(stack)
        if self.off:
            stack.append(None)
            return
        if in_backward() or (outer is not None and _is_checkpoint(outer)):
            # Saving here would keep what checkpointing is there to forget.
            self._warn()
            stack.append(None)
            return
        if outer is not None and outer[1] is self._unpack:  # entered again
            outer = next(entry[1] for entry in reversed(stack) if entry)
        scope = self.spill.begin()
        otherwise = Kept if outer is None else _passing_on(outer)
        pack = looked_through(self.spill.packer(scope, otherwise), outer)
        try:
            stack.append((scope, outer, below))
            push_saved_hooks(pack, self._unpack)
        except BaseException:  # an interrupt comes when they are pushed
            self._take_off(depth)
            raise

    def _take_off(self, depth: int) -> None:
        """Take the hooks of the latest entry off, and forget it. Idempotent.

        Others may have put theirs in the place of ours: those that were on top before
        tell whether they are off.
        """
        stack = self._stack()
        for entry in stack[depth:]:
            if entry is not None and not _are_same(top_saved_hooks(), entry[2]):
                pop_saved_hooks()
        del stack[depth:]

    def leave(self, *, failed: bool) -> None:
        """End it; what was saved stays under the budget.

        Raises:
            ConfigError: If this thread is in no forward.
        """
        stack = self._stack()
        if not stack:
            raise ConfigError(
                "saved activations are left in thread"
                f" {threading.current_thread().name!r}, in which they are not entered:"
                " enter them in a `with` of the same thread"
            )
        entry, depth = stack[-1], len(stack) - 1
        try:
            self._take_off(depth)
        finally:
            self._take_off(depth)  # what an interrupt has left
            if entry is not None:
                self.spill.end(entry[0], failed=failed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let autograd save as if nothing was entered, for what allows no hooks."""
        ours = []
        try:
            while (top := top_saved_hooks()) is not None and _is_ours(top):
                ours.append(top)
                pop_saved_hooks()
            yield
        finally:
            while ours:
                if not _are_same(top_saved_hooks(), ours[-1]):
                    push_saved_hooks(*ours[-1])
                ours.pop()

    def _warn(self) -> None:
        if self._warned or in_backward():
            return
        self._warned = True
        warnings.warn(
            "saved activations were entered inside of a checkpointed region, where they"
            " would keep what is to be recomputed: nothing is spilled there; enter them"
            " around the checkpoint",
            StagehandWarning,
            stacklevel=4,
        )


def _are_same(hooks: Any, others: Any) -> bool:
    """Whether two pairs of hooks, or none, are the same."""
    if hooks is None or others is None:
        return hooks is others
    return hooks[0] is others[0] and hooks[1] is others[1]


def _is_ours(hooks: Any) -> bool:
    return getattr(hooks[1], "__module__", None) == __name__


def _is_checkpoint(hooks: Any) -> bool:
    """Whether hooks are a checkpoint's, perhaps below those of streamed weights."""
    unpack = below = hooks[1]
    while below is not None:
        unpack = below
        below = getattr(getattr(unpack, "__self__", None), "below", None)
    return is_checkpoints(unpack)
