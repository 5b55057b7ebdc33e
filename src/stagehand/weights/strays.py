"""Finds weights that are read outside of their own module's forward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from stagehand.torch_private import is_compiled_for, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stagehand.residency.blocks import Block
    from stagehand.weights.rows import RowGather

__all__ = ["Fusing", "StrayUses"]


class Fusing:
    """Whether attention modules of a model may take their fused path, for inference.

    Under a torch function mode they do not, and its results differ in the last bits.
    What they read themselves is one block.
    """

    def __init__(self, model: nn.Module) -> None:
        found = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
        self._modules = [weakref.ref(module) for module in found]

    def may(self) -> bool:
        """Whether some may now. Mostly the first that is asked tells."""
        grads = torch.is_grad_enabled()
        return any(
            not (grads and any(p.requires_grad for p in m.parameters(recurse=False)))
            for m in (known() for known in self._modules)
            if m is not None and not m.training
        )


class StrayUses(TorchFunctionMode):
    """Finds weights that are read outside of their own module's forward.

    Active in first passes only, because it sees every call. Some modules read their
    children's parameters themselves; no hook of the child tells of that.

    Args:
        owners: The streamed block of each parameter, by the parameter's id.
        rows: Reads of tables where it looks rows up are no strays.
        device: Where the model computes: compiled code is told of what it reads
            elsewhere, where all is that was not brought.
        bring: Called with a block that a call reads while it is not in use.
        let_go: Called with the block after that call.
    """

    def __init__(
        self,
        owners: Mapping[int, Block],
        rows: RowGather,
        *,
        device: torch.device,
        bring: Callable[[Block], None],
        let_go: Callable[[Block], None],
    ) -> None:
        super().__init__()
        self._owners = owners
        self._rows = rows
        self._device = device
        self._bring = bring
        self._let_go = let_go

    @skipped
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring what the call reads, pass it on, and let go of what was brought."""
        kwargs = kwargs or {}
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
            if block is not None and not block.uses:
                self._bring(block)
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
