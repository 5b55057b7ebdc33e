"""Which modules of a model others may call, and which of these take hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stagehand.residency.finding import is_called

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["entrances", "has_own", "takes_hooks", "wrapped"]


def takes_hooks(module: nn.Module) -> bool:
    """Whether it has a forward that takes hooks: those of scripted modules do not."""
    return is_called(module) and not isinstance(module, torch.jit.ScriptModule)


def has_own(module: nn.Module) -> bool:
    """Whether it has tensors of its own, and is not scripted: those take no hooks."""
    has_any = bool(module._parameters or module._buffers)
    return has_any and not isinstance(module, torch.jit.ScriptModule)


def wrapped(model: nn.Module) -> list[nn.Module]:
    """Return the model itself, what it wraps, what that wraps, and so on.

    A wrapper has one part and calls it. A sequence of parts is no model that others
    enter: to hook all of its parts would cost time.
    """
    found = [model]
    while True:
        parts = [*found[-1].children()]
        if len(parts) != 1 or parts[0] in found or not takes_hooks(parts[0]):
            return found
        if isinstance(parts[0], nn.Sequential):
            return found
        found += parts


def entrances(
    models: Sequence[nn.Module],
    sites: Container[nn.Module],
    tables: Iterable[nn.Module],
) -> list[nn.Module]:
    """Return what others may call: a model, its parts, inner parts with sites, tables.

    Of a list or a sequence of parts none is called past it: to hook all of them would
    cost time. A site is entered by itself, and other parts are left alone.

    Args:
        models: The model in all of its wrappings, the outermost first.
        sites: Modules that are told of, each in its own way.
        tables: Modules that look rows up on the host.
    """
    model = models[-1]
    found = dict.fromkeys((*models, *model.children(), *tables))
    around = [*model.children()]
    for module in around:
        if takes_hooks(module) and not isinstance(module, nn.Sequential):
            for part in module.children():
                if part not in found and takes_hooks(part) and _has_any(part, sites):
                    found[part] = None
                    around.append(part)
    return [module for module in found if takes_hooks(module)]


def _has_any(module: nn.Module, sites: Container[nn.Module]) -> bool:
    """Whether a module is no site itself but has sites in it."""
    return module not in sites and any(part in sites for part in module.modules())
