"""Whether an optimizer has stepped: fused ones move no version counter."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

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


def _note(*_: Any) -> None:
    if not is_dynamo_compiling():  # it would compile a step anew each time
        Steps._begun += 1
        if not in_backward():
            for steps in tuple(_known):
                steps._prepare()
