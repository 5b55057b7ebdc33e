"""Gradients on the host of parameters on the device: the compiler does not see them.

In a pass a parameter is on the device, and what its `.grad` holds is on the host.
PyTorch's compiler makes a fake of both, and cannot. So while it looks at a frame in the
middle of a pass, such a parameter has no `.grad`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from stagehand.core.turn import HERE
from stagehand.torch_private import around_compiling, inference_mode, without_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stagehand.core.turn import Turn

__all__ = ["HiddenGradients", "assign_gradient", "take_along"]


class HiddenGradients:
    """Hides the gradients of one runtime's parameters from the compiler.

    Args:
        turn: The runtime's lock. While a thread has it, what compiles in that thread
            belongs to its pass.
        tensors: Returns the parameters that are on the device now and at home on the
            host.
    """

    def __init__(
        self, turn: Turn, tensors: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self._turn = turn
        self._tensors = tensors
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        _LIVE[id(self)] = self

    def __repr__(self) -> str:
        return f"HiddenGradients({len(self._hidden)})"

    def begin(self) -> None:
        """Hide gradients whenever the compiler works from now on, if it is loaded."""
        around_compiling(_hide, _show)

    def is_here(self) -> bool:
        """Whether this thread runs the model."""
        return self._turn.owner is HERE.thread

    def hide(self) -> None:
        """Take gradients on the host from parameters that are on the device."""
        for tensor in self._tensors():
            grad = tensor.grad if tensor.is_leaf else None
            if grad is None or grad.device == tensor.device:
                continue
            if grad.layout is torch.strided:  # else it could not be given back
                self._hidden.append((tensor, grad))
                tensor.grad = None

    def show(self) -> None:
        """Give back what `hide` took away. Idempotent."""
        while self._hidden:
            tensor, grad = self._hidden.pop()
            if tensor.grad is None:
                assign_gradient(tensor, grad)


# Callbacks of the compiler, one pair for all: they cannot be taken back safely while
# other threads compile.
_LIVE: weakref.WeakValueDictionary[int, HiddenGradients] = weakref.WeakValueDictionary()


def _of_this_thread() -> Iterator[HiddenGradients]:
    for reference in _LIVE.valuerefs():
        one = reference()
        if one is not None and one.is_here():
            yield one


def _hide(_: object) -> None:
    for one in _of_this_thread():
        one.hide()


def _show(_: object) -> None:
    for one in _of_this_thread():
        one.show()


def take_along(tensor: torch.Tensor) -> None:
    """Let the gradient of a leaf lie where the leaf lies now."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None and grad.device != tensor.device:
        with inference_mode(False):  # more is added to it later
            tensor.grad = grad.to(tensor.device)


def assign_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Set a parameter's gradient to one on another device, which PyTorch refuses.

    The parameter itself is left as it is, for autograd would take it for a new one.

    Args:
        parameter: A leaf; it may be an inference tensor.
        grad: Its gradient, of its shape, wherever that lies. One that is not strided is
            copied to the parameter's device.
    """
    if grad.layout is not torch.strided:
        parameter.grad = grad.to(parameter.device)
        return
    with without_modes():
        place, there = grad.data, parameter.data
        if grad.dtype is not there.dtype:
            there = there.new_empty((), dtype=grad.dtype).expand(there.shape)
        grad.data = there
        parameter.grad = grad
        grad.data = place
