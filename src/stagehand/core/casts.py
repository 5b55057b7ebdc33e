"""Which tensor is a cast of a leaf: the graph tells.

Autocast's casts are told from others by who refers to them, not here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import Node

__all__ = ["KnownCast", "cast_of", "is_cast", "note_cast"]

_CAST = "ToCopyBackward0"


class KnownCast:
    """A cast that somebody refers to, or has referred to.

    Attributes:
        weight: What was cast.
        cast: A weak reference to the cast.
        version: The weight's version when it was cast.
        unseen: Whether a call without gradients has made it, and none with gradients
            may have used it.
    """

    __slots__ = ("cast", "unseen", "version", "weight")

    def __init__(self, weight: torch.Tensor, cast: torch.Tensor) -> None:
        self.weight = weight
        self.cast = weakref.ref(cast)
        self.version: int = weight._version
        self.unseen = False

    def __repr__(self) -> str:
        return f"KnownCast({list(self.weight.shape)})"


def is_cast(made: Node) -> bool:
    """Whether a node of a graph made a copy of another type, or on another device."""
    return made.name() == _CAST


def cast_of(saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the cast that a tensor is or is a view of, and what was cast.

    None if it is neither, or what was cast is no leaf.
    """
    cast = saved if saved._base is None else saved._base
    made = cast.grad_fn
    if made is None or not is_cast(made):
        return None
    leaf = getattr(made.next_functions[0][0], "variable", None)
    return None if leaf is None else (cast, leaf)


def note_cast(
    casts: dict[int, KnownCast], cast: torch.Tensor, weight: torch.Tensor
) -> None:
    """Remember a weight's latest cast, by the weight's id."""
    known = casts.get(id(weight))
    if known is None or known.cast() is not cast:
        casts[id(weight)] = KnownCast(weight, cast)
