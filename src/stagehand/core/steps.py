"""Whether an optimizer has stepped: fused ones move no version counter."""

from functools import cache
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Steps"]


class Steps:
    """Tells of the steps of all optimizers of torch's kind, in any thread.

    Example:
        >>> steps = Steps()
        >>> steps.came()
        False
    """

    _begun = 0

    def __init__(self) -> None:
        _watch()
        self._seen = Steps._begun

    def came(self) -> bool:
        """Return whether one has begun since this was asked last."""
        seen, self._seen = self._seen, Steps._begun
        return seen != self._seen


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_note)


def _note(*_: Any) -> None:
    if not is_dynamo_compiling():  # it would compile a step anew each time
        Steps._begun += 1
