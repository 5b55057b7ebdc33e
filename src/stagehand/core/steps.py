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
        self.frozen: set[int] = set()
        """Ids of what was stepped though it is frozen: it had a gradient left."""
        self._seen = Steps._begun
        self._prepare = prepare
        _known.add(self)

    def came(self) -> bool:
        """Return whether one has begun since this was asked last."""
        seen, self._seen = self._seen, Steps._begun
        return seen != self._seen


_known: weakref.WeakSet[Steps] = weakref.WeakSet()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_note)


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not is_dynamo_compiling():  # it would compile a step anew each time
        Steps._begun += 1
        params = (p for group in optimizer.param_groups for p in group["params"])
        frozen = [id(p) for p in params if not p.requires_grad and p.grad is not None]
        for steps in tuple(_known):
            steps.frozen.update(frozen)
        if not in_backward():
            for steps in tuple(_known):
                steps._prepare()
