"""Tells who listens that an optimizer steps: fused ones move no version counter."""

import weakref
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stagehand.torch_private import in_backward, untraced

__all__ = ["Steps", "hear_steps"]


def _ignore(_: list[torch.Tensor]) -> None:
    pass


class Steps:
    """Tells of the steps of all optimizers of torch's kind, in any thread.

    Args:
        prepare: Called before each, but for those that are taken inside of a backward.
        inside: Called before each of those, with its parameters.

    Example:
        >>> steps = Steps(lambda: None)
        >>> steps.came()
        False
    """

    def __init__(
        self,
        prepare: Callable[[], None],
        inside: Callable[[list[torch.Tensor]], None] = _ignore,
    ) -> None:
        self._frozen: set[int] = set()
        self._begun = self._seen = 0
        self._prepare = prepare
        self._inside = inside
        hear_steps(self._note)

    def came(self) -> bool:
        """Return whether a step has begun since the last call of this."""
        seen, self._seen = self._seen, self._begun
        return seen != self._seen

    def take_frozen(self) -> set[int]:
        """Return the ids of frozen parameters that were stepped since the last call.

        Optimizers step those that still have a gradient from before.
        """
        frozen, self._frozen = self._frozen, set()
        return frozen

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self._begun += 1
        params = [p for group in optimizer.param_groups for p in group["params"]]
        frozen = [id(p) for p in params if not p.requires_grad and p.grad is not None]
        self._frozen.update(frozen)
        if in_backward():
            self._inside(params)
        else:
            self._prepare()


def hear_steps(
    listener: Callable[[torch.optim.Optimizer], None], *, compiled: bool = False
) -> Callable[[], None]:
    """Call a method before each step of an optimizer of torch's kind, in any thread.

    Torch has one hook for all, which stays: who comes and goes would change torch's own
    list of hooks in the middle of another thread's step.

    Args:
        listener: A method. Its object is not kept.
        compiled: Whether to tell of compiled steps, too, whose graph breaks there.

    Returns:
        A function that ends this; it takes no lock.
    """
    _watch()
    number = next(_numbers)

    def end() -> None:
        _heard.pop(number, None)
        _in_compiled.discard(number)

    _heard[number] = weakref.WeakMethod(listener, lambda _: end())
    if compiled:
        _in_compiled.add(number)
    return end


_numbers = count()
_heard: dict[int, "weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]"] = {}
"""Listeners by number. Any thread may add or remove one: loops go over a copy."""
_in_compiled: set[int] = set()
"""The numbers of those that listen in compiled code, too."""


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_tell)


def _tell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not is_dynamo_compiling():
        _tell_all(optimizer)
    elif _in_compiled:  # else: to look at who listens would compile a step anew
        _tell_untraced(optimizer)


def _tell_all(optimizer: torch.optim.Optimizer) -> None:
    for known in _heard.copy().values():
        listener = known()
        if listener is not None:
            listener(optimizer)


@untraced("a conductor follows the steps of optimizers: compile without fullgraph=True")
def _tell_untraced(optimizer: torch.optim.Optimizer) -> None:
    _tell_all(optimizer)
