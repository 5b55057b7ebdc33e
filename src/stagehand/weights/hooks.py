"""A hook of the library's on a module, which stays out of copies of the module."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from stagehand.torch_private import global_forward_hooks, untraced

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = [
    "Hook",
    "call_untraced",
    "get_nothing",
    "has_other_hooks",
    "is_hooked",
    "module_frame",
    "nothing",
]


def nothing(*_: Any) -> None:
    """Stand where a hook was in a copy of the model: the copy is a plain model."""


@untraced(
    "a streamed model's weights come and go, and no single graph can have them: compile"
    " without fullgraph=True; torch.export takes the plain model, after the runtime's"
    " shutdown()"
)
def call_untraced(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook of a compiled module: it belongs to no graph."""
    return hook(*args)


def module_frame() -> FrameType:
    """The frame in which a module runs, together with the hooks that it calls."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:
        frame = frame.f_back
    return frame


_MODULE_FILE = nn.modules.module.__file__


class Hook:
    """A hook that does not follow its module into copies and pickles."""

    __slots__ = ()

    @property
    def is_gone(self) -> bool:
        """Whether it is in such a copy nevertheless; then it does nothing."""
        return False

    @property
    def __name__(self) -> str:
        """Has none: whoever asks wants to compile it, as `torch.jit.script` does."""
        raise AttributeError(
            "torch.jit.script cannot compile a streamed model or a part of one, whose"
            " weights come and go: expected the plain model; call the runtime's"
            " shutdown() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return get_nothing, ()


def get_nothing() -> Callable[..., None]:
    return nothing


def has_other_hooks(module: nn.Module) -> bool:
    """Whether calls of a module run forward hooks that are not the library's."""
    own = module._forward_pre_hooks, module._forward_hooks
    hooks = chain(*(place.values() for place in (global_forward_hooks, *own)))
    return not all(isinstance(getattr(h, "__self__", h), Hook) for h in hooks)


def is_hooked(module: nn.Module) -> bool:
    """Whether some runtime has hooks on a module."""
    hooks = (getattr(h, "__self__", h) for h in module._forward_pre_hooks.values())
    return any(isinstance(hook, Hook) and not hook.is_gone for hook in hooks)
