"""Finds weights that are read outside of their own module's forward."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from stagehand.errors import StagehandOOMError, StagehandWarning
from stagehand.torch_private import WeakMode, in_function_of, is_compiled_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stagehand.residency.blocks import Block
    from stagehand.weights.rows import RowGather

__all__ = ["StrayUses", "Strays"]


class Strays:
    """The weights of one model that others read; they stay on the device once found.

    First passes through each edge are watched, in each mode of it: with gradients or
    without, in training or not. So is the next of its kind after a pass that fails.

    Args:
        model: Any module. Its attention modules take a fused path for inference, not
            under a torch function mode, and results differ in the last bits: where they
            may, a pass is not watched. What they read themselves is one block.
        owners: As for `StrayUses`.
        rows: As well.
        device: As well.
        bring: As well.
        is_latest: As well.
        fill: Called with a block that was brought: its casts have memory from now on.
        let_go: As for `StrayUses`.
        is_torn: As for `StrayUses`.
        keep: Lets blocks stay from the next pass on. Raises `StagehandOOMError` if they
            do not fit the budget together.
    """

    def __init__(
        self,
        model: nn.Module,
        owners: Mapping[int, Block],
        rows: RowGather,
        *,
        device: torch.device,
        bring: Callable[[Block], None],
        is_latest: Callable[[Block], bool],
        fill: Callable[[Block], None],
        let_go: Callable[[Block], None],
        is_torn: Callable[[], bool],
        keep: Callable[[Sequence[Block]], None],
    ) -> None:
        found = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
        self._attention = [weakref.ref(module) for module in found]
        self._bring = bring
        self._is_latest = is_latest
        self._fill = fill
        self._keep = keep
        self._uses = StrayUses(
            owners,
            rows,
            device=device,
            bring=self._bring_stray,
            is_at_hand=self._is_at_hand,
            let_go=let_go,
            is_torn=is_torn,
        )
        self._mode = WeakMode(self._uses)
        self._known: set[tuple[int, bool, bool]] = set()  # kinds that need no watching
        self._kind = (0, False, False)  # of this pass
        self._watches = False
        self._found: list[Block] = []
        self._roomless: set[Block] = set()  # found, and there is no room to keep them
        self._has_warned = False
        self._given: set[Block] = set()  # to functions: warned of

    def __repr__(self) -> str:
        return f"Strays({len(self._known)} kinds of passes known)"

    def begin(self, edge: nn.Module) -> WeakMode | None:
        """A pass begins: return the mode that watches it, if it is to be watched."""
        self._found = []
        self._kind = kind = id(edge), torch.is_grad_enabled(), edge.training
        self._watches = kind not in self._known and not self._may_fuse()
        return self._mode if self._watches else None

    def end(self, *, failed: bool) -> None:
        """It ends. Without room for what it has found, the next ones look out again.

        Idempotent.

        Args:
            failed: Whether something was raised in it, maybe by a weight that was read
                elsewhere for the first time.
        """
        found, self._found = self._found, []
        watched, self._watches = self._watches, False
        if found:
            self._keep_found(found)
        if failed or self._roomless:
            self._known.discard(self._kind)
        elif watched:
            self._known.add(self._kind)

    def _keep_found(self, found: Sequence[Block]) -> None:
        try:
            self._keep(found)
        except StagehandOOMError as error:
            self._roomless.update(found)
            self._known.clear()
            self._warn(found, error)
        else:
            self._roomless.difference_update(found)

    def look_again(self) -> None:
        """Watch first passes anew: modules may read others' weights from now on."""
        self._known.clear()

    def _is_at_hand(self, block: Block) -> bool:
        """Whether a block needs no use: its own is the latest, and no cast was emptied.

        So it is read by a hook of its module, or by who has called that. What reads it
        with gradients may read it in backward as well, and no handle tells of that.
        """
        with_gradients = self._kind[1]
        return not with_gradients and self._is_latest(block) and not block.casts

    def _bring_stray(self, block: Block, weight: torch.Tensor) -> None:
        if self._kind[1] and not (torch.is_grad_enabled() or block.bound):
            self._look_for_function(block, weight)
        self._bring(block)
        block.read_elsewhere = True
        self._fill(block)
        if block not in self._found:
            self._found.append(block)

    def _look_for_function(self, block: Block, weight: torch.Tensor) -> None:
        """Warn of a gradient that autograd expects on the host.

        It was told of the weight where a function was given it, before anybody read it.
        """
        trains = weight.requires_grad and block not in self._given
        if trains and in_function_of(weight):
            self._given.add(block)
            warnings.warn(
                f"a weight of block {block.name!r} of shape {list(weight.shape)} is"
                " given to a torch.autograd.Function outside of its module's forward,"
                " while it is on the host: this pass's backward fails if the function"
                " has a gradient for it; what was found stays on the device from the"
                " next pass on: call the model once under torch.no_grad() before it"
                " trains, or name a module that has the weight and calls the function"
                " in opaque=",
                StagehandWarning,
                stacklevel=2,
            )

    def _may_fuse(self) -> bool:
        """Whether some attention module may fuse now. Mostly the first one tells."""
        grads = torch.is_grad_enabled()
        return any(
            not (grads and any(p.requires_grad for p in m.parameters(recurse=False)))
            for m in (known() for known in self._attention)
            if m is not None and not m.training
        )

    def _but(self) -> str:
        return ", but where attention may be fused" if self._attention else ""

    def _warn(self, found: Sequence[Block], error: StagehandOOMError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{len(found)} blocks, {found[0].name!r} first, are read by modules"
                f" that do not own them and do not fit the budget together ({error}):"
                f" every call is watched from now on{self._but()}, which is slow, and"
                " none in backward; name the modules that read them in opaque=, or"
                " raise the budget",
                StagehandWarning,
                stacklevel=2,
            )


class StrayUses:
    """Finds weights that are read outside of their own module's forward.

    Active in first passes only, because it sees every call. Some modules read their
    children's parameters themselves; no hook of the child tells of that.

    Args:
        owners: The streamed block of each parameter, by the parameter's id.
        rows: Reads of tables where it looks rows up are no strays.
        device: Where the model computes: compiled code is told of what it reads
            elsewhere, where all is that was not brought.
        bring: Called with a block that is not in use, and its tensor that a call reads.
        is_at_hand: Whether one is there even so, in each pass alike.
        let_go: Called with the block after that call.
        is_torn: Whether it is left from a pass that was interrupted.
    """

    def __init__(
        self,
        owners: Mapping[int, Block],
        rows: RowGather,
        *,
        device: torch.device,
        bring: Callable[[Block, torch.Tensor], None],
        is_at_hand: Callable[[Block], bool],
        let_go: Callable[[Block], None],
        is_torn: Callable[[], bool],
    ) -> None:
        self._owners = owners
        self._rows = rows
        self._device = device
        self._bring = bring
        self._is_at_hand = is_at_hand
        self._let_go = let_go
        self._is_torn = is_torn

    def see(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Bring what the call reads, pass it on, and let go of what was brought."""
        if self._rows.busy or _is_harmless(func):
            return func(*args, **kwargs)
        brought: list[Block] = []
        try:
            for value in (*args, *kwargs.values()):
                self._look_at(value, brought)
            return func(*args, **kwargs)
        finally:
            for block in brought:
                self._let_go(block)

    def _look_at(self, value: Any, brought: list[Block]) -> None:
        if isinstance(value, torch.Tensor):
            if is_dynamo_compiling():
                # It would compile anew for each tensor that is looked up.
                if value.device == self._device:
                    return
            elif is_compiled_for():
                return
            block = self._owners.get(id(value))
            if block is None or block.uses or self._is_at_hand(block):
                return
            if self._is_torn():
                return
            self._bring(block, value)
            brought.append(block)
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    self._look_at(item, brought)


def _is_harmless(func: Callable[..., Any]) -> bool:
    """Whether a call only asks what a tensor is like.

    `weight.T` reads the tensor, and `weight.device` is asked where to put what shall
    meet it.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__  # type: ignore[attr-defined]
        return getattr(attribute, "__name__", "") not in _READING
    return name in _HARMLESS


_READING = frozenset({"H", "T", "device", "imag", "mH", "mT", "real"})


_HARMLESS = frozenset(
    {
        "__len__",
        "__set__",
        "data_ptr",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "nelement",
        "numel",
        "requires_grad_",
        "size",
        "stride",
    }
)
