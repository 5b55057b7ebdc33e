"""Which tensors of a checkpoint make up which tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Made", "Naming", "same_tensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Tensors of a model that are computed from some of the checkpoint's."""

    sources: tuple[str, ...]
    """The checkpoint's tensors, by their names there."""
    compute: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    """Takes these by name and returns the model's by name; on `meta`, too."""
    like: str | None = None
    """The model's tensor to whose element type, where it is loaded as one, the sources
    are cast first, whatever they are. None computes with them as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """How a class of models finds its tensors in a checkpoint."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's name of a tensor; a name that is not here stays as it is."""
    made: tuple[Made, ...] = ()
    """What has to be computed."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Tensors that the class keeps in another element type than it is loaded as."""
    optional: Callable[[str], bool] = lambda name: False
    """Whether a tensor that the constructor computes may be missing."""
    untie: Callable[[str], None] | None = None
    """Called if a tied tensor, by its name, turns out to have values of its own. None
    if that cannot be."""


def same_tensors(model: nn.Module) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """Yield each tensor of a model's `state_dict()` once, with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    for number, tensor in tensors.items():
        yield tensor, names[number]
