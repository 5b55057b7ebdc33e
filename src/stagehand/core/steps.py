"""Whether an optimizer has stepped: fused ones move no version counter."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stagehand.torch_private import in_backward

__all__ = ["Steps"]


class Steps:
    """Tells of the steps of all optimizers of torch's kind, in any thread.

    Args:
        prepare: Called before each, but for those that are taken inside of a backward.

    Example:
        >>> steps = Steps(lambda: None)
        >>> steps.came()
        False
    """

    _begun = 0

    def __init__(self, prepare: Callable[[], None]) -> None:
        _watch()
        self._frozen: set[int] = set()
        self._seen = Steps._begun
        self._prepare = prepare
        _known.add(self)

    def came(self) -> bool:
        """Return whether one has begun since this was asked last."""
        seen, self._seen = self._seen, Steps._begun
        return seen != self._seen

    def take_frozen(self) -> set[int]:
        """Return the ids of what was stepped though it is frozen, since this was asked.

        It had a gradient left.
        """
        frozen, self._frozen = self._frozen, set()
        return frozen


_known: weakref.WeakSet[Steps] = weakref.WeakSet()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_note)


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if is_dynamo_compiling():
        return  # it would compile a step anew each time
    Steps._begun += 1
    known = tuple(_known)
    if not known:
        return
    params = (p for group in optimizer.param_groups for p in group["params"])
    frozen = [id(p) for p in params if not p.requires_grad and p.grad is not None]
    in_midst = in_backward()
    for steps in known:
        steps._frozen.update(frozen)
        if not in_midst:
            steps._prepare()
