"""Tensors that belong to a weight or a layer, and are none of its model's by name.

Quantized weights of other libraries keep scales and codes as attributes, where no
`named_parameters()` finds them. A class that does so has a `to()` of its own, which
takes them along: that tells it from one whose attributes stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.attribute import HANDLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Belonging",
    "belongings",
    "moves_itself",
    "own_belongings",
    "places_of_belongings",
]


@dataclass(frozen=True, slots=True)
class Belonging:
    """A tensor that belongs to a weight or a module, in its place."""

    table: Any
    """A dict or a list: attributes, or a container in one."""
    key: Any
    name: str
    """How it is reached from the model."""

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = self.table[self.key]
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in its place."""
        self.table[self.key] = tensor


_DEPTH = 6  # of objects and containers: a nested state of a weight has 3
_MODULE = frozenset(vars(nn.Module())) | {HANDLE, "_apply"}


def moves_itself(thing: torch.Tensor | nn.Module) -> bool:
    """Whether moving something takes more than moving its elements, or its tensors.

    Not of modules with parts: these have a `to()` of their own for the whole of them.
    Nor of tensors that say which others they are made of.
    """
    if isinstance(thing, torch.Tensor):
        flat = hasattr(thing, "__tensor_flatten__")
        return type(thing).to is not torch.Tensor.to and not flat
    own: Any = type(thing).to
    return own is not nn.Module.to and not thing._modules


def belongings(name: str, thing: torch.Tensor | nn.Module) -> Iterator[Belonging]:
    """Yield the tensors in attributes of what moves itself, in their places.

    Args:
        name: What the weight or the module is called.
        thing: One of both; if it does not move itself, it has none.
    """
    if not moves_itself(thing):
        return
    if isinstance(thing, nn.Module):
        inside = vars(thing)
        for key in [key for key in inside if key not in _MODULE]:
            place = f"{name}.{key}".removeprefix(".")
            yield from _within(inside, key, place, {id(thing)})
    else:
        yield from _all_within(thing, name, {id(thing)})


def places_of_belongings(model: nn.Module) -> Iterator[Belonging]:
    """Yield what belongs to weights of a model, and to modules that have weights.

    What belongs to several comes as often.
    """
    for name, weight in model.named_parameters():
        yield from belongings(name, weight)
    for name, module in model.named_modules():
        if module._parameters:
            yield from belongings(name, module)


def own_belongings(things: Iterable[torch.Tensor | nn.Module]) -> None:
    """Let what belongs to weights and modules be nobody else's, in the same memory.

    A library may give one table of codes to the weights of all models, and use it
    itself: who points that elsewhere would do so for all.
    """
    for thing in things:
        for place in [*belongings("", thing)]:
            if not place.tensor.requires_grad:
                place.put(place.tensor.detach())


def _within(table: Any, key: Any, name: str, seen: set[int]) -> Iterator[Belonging]:
    """Yield where tensors are in one value of a table, or the value itself."""
    value = table[key]
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_meta:
            yield Belonging(table, key, name)
    elif id(value) not in seen and len(seen) < _DEPTH:
        yield from _all_within(value, name, seen | {id(value)})


def _all_within(value: Any, name: str, seen: set[int]) -> Iterator[Belonging]:
    if isinstance(value, dict):
        for key in list(value):
            yield from _within(value, key, f"{name}[{key!r}]", seen)
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from _within(value, number, f"{name}[{number}]", seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        inside = vars(value)
        for key in list(inside):
            yield from _within(inside, key, f"{name}.{key}", seen)
