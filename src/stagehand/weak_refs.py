"""A streamed model, and its runtime's methods, for who must not keep either."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ParamSpec

from stagehand.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["ModelRef", "weakly"]

_P = ParamSpec("_P")


class ModelRef:
    """Refers weakly to a model until it is given back, and after that.

    Attributes:
        closed: Whether it was given back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.closed = False

    def __call__(self) -> nn.Module | None:
        """Return the model, given back or not; None if it is gone."""
        return self._model()

    @property
    def is_open(self) -> bool:
        """Whether the model lives and is streamed."""
        return not self.closed and self._model() is not None

    def check(self) -> nn.Module:
        """Return the model.

        Raises:
            ClosedError: If it was given back, or is gone.
        """
        model = self._model()
        if self.closed or model is None:
            raise ClosedError(
                "the runtime was shut down or its model is gone; make a new one with"
                " stagehand.layer()"
            )
        return model


def weakly(
    call: Callable[_P, None], otherwise: Callable[_P, None] | None = None
) -> Callable[_P, None]:
    """Return a function that calls a method as long as its object lives.

    After that it calls `otherwise`, or does nothing.
    """
    method: Any = call
    owner, function = weakref.ref(method.__self__), method.__func__

    def called(*args: _P.args, **kwargs: _P.kwargs) -> None:
        living = owner()
        if living is not None:
            function(living, *args, **kwargs)
        elif otherwise is not None:
            otherwise(*args, **kwargs)

    return called
