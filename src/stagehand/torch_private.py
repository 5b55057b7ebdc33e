"""Every private PyTorch name that the library uses, each tested at import.

- `torch._C._storage_Use_Count`: does anyone else hold a slot's memory? Without it,
  importing the library is refused.
- `torch._C._current_graph_task_id`: is this thread inside a backward pass? Without it,
  importing the library is refused.
- `torch._disable_dynamo`: leave a function out of compiled graphs without importing the
  compiler. Without it, compiled blocks warn of what they cannot trace.

Tried with torch 2.9 to 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch

from stagehand.errors import StagehandError

__all__ = ["in_backward", "storage_use_count", "untraced", "use_count_of"]


def _required(name: str) -> Callable[..., int]:
    found: Callable[..., int] | None = getattr(torch._C, name, None)
    if found is None:
        raise StagehandError(
            f"torch {torch.__version__} has no torch._C.{name}, which weight streaming"
            " needs to keep memory safe; use torch 2.9 to 2.13"
        )
    return found


use_count_of = _required("_storage_Use_Count")
"""`storage_use_count` of a storage's `_cdata`, where a call more is too slow."""
_graph_task_id = _required("_current_graph_task_id")


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and handles hold a storage, the argument included."""
    return use_count_of(storage._cdata)


def in_backward() -> bool:
    """Return whether this thread runs inside autograd's backward pass."""
    return _graph_task_id() != -1


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code calls as it is."""
    disable = getattr(torch, "_disable_dynamo", None)
    wrapped: Callable[..., Any] = function if disable is None else disable(function)
    return wrapped
