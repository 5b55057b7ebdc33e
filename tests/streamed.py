"""Run small models resident and streamed, and compare: outputs, memory, what is left."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from architectures import Architecture, assert_bitwise_equal, flatten, to_device
from torch import nn

import stagehand
from stagehand.runtime import Runtime
from stagehand.units import MIB

GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


@functools.cache
def original(architecture: Architecture) -> nn.Module:
    """Return the model on the CPU, built once: copy it before anything else."""
    return architecture.build()


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, each counted once."""
    return sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())
    )


# Streamed


def stream(
    model: nn.Module, architecture: Architecture, mode: str, device: str, budget: int
) -> Runtime:
    """Stream a model in place, in layer mode or in block mode."""
    if mode == "layers":
        stagehand.layer(model, vram_budget=budget, device=device)
        runtime: Runtime = model._stagehand_layer_runtime
        return runtime
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=budget / MIB, vram_low_watermark_mb=0.9 * budget / MIB
    )
    return stagehand.StagehandRuntime(
        model, config, architecture.block_pattern, device=device
    )


def smallest_budget(architecture: Architecture, mode: str, device: str) -> int:
    """Ask for a KiB and take what the refusal says would work."""
    model = deepcopy(original(architecture))
    try:
        stream(model, architecture, mode, device, 1024)
    except stagehand.StagehandOOMError as error:
        return error.needed_bytes
    raise AssertionError(f"{architecture} was streamed in one KiB")


# What is left of a model


@dataclass(frozen=True)
class Shape:
    """What must be the same before streaming a model and after."""

    tensors: dict[str, int]
    """The identity of every parameter and buffer, by name."""
    devices: dict[str, torch.device]
    gradients: dict[str, bool]
    modules: dict[str, tuple[list[str], list[int]]]
    """The attributes of every module, and how many hooks of each kind it has."""

    @classmethod
    def of(cls, model: nn.Module) -> "Shape":
        named = dict(model.named_parameters(remove_duplicate=False))
        named.update(model.named_buffers(remove_duplicate=False))
        return cls(
            {name: id(tensor) for name, tensor in named.items()},
            {name: tensor.device for name, tensor in named.items()},
            {name: tensor.requires_grad for name, tensor in named.items()},
            {
                name: (sorted(vars(module)), _hook_counts(module))
                for name, module in model.named_modules()
            },
        )


def _hook_counts(module: nn.Module) -> list[int]:
    return [
        len(hooks)
        for kind, hooks in sorted(vars(module).items())
        if "hooks" in kind and hooks is not None
    ]
