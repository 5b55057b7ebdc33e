"""Run small real models resident and streamed, and say what must be the same."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

import stagehand
from architectures import Architecture, flatten, to_device
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
    return total_bytes([*model.parameters(), *model.buffers()])


def total_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Resident


def aligned(model: nn.Module) -> nn.Module:
    """Let each tensor of a model begin where an allocator lets it.

    What is mapped from a file begins anywhere, and then some kernels for CPUs without
    AVX-512 add in another order.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model


@dataclass(frozen=True, kw_only=True)
class Resident:
    """What a model does when all of its weights are on the device."""

    outputs: dict[str, list[torch.Tensor]]
    """What it returns in each mode of `GRAD_MODES`, on the CPU."""
    tracked: dict[str, list[bool]]
    """Which of that autograd would differentiate."""
    activation_bytes: dict[str, int]
    """The most that the device held besides weights and inputs, if it is simulated."""
    modules: dict[str, tuple[list[str], list[int]]]
    """See `Shape.modules`; some models keep something from one pass to the next."""


@functools.cache
def resident(architecture: Architecture, device: str, sim: ModuleType) -> Resident:
    """Run the resident model once in each mode."""
    model = deepcopy(original(architecture)).to(device)
    inputs = to_device(architecture.inputs(), device)
    held = sim.allocated_bytes()
    outputs, tracked, activations = {}, {}, {}
    for mode, entered in GRAD_MODES.items():
        sim.reset_peak()
        with entered():
            found = flatten(architecture.call(model, inputs))
        outputs[mode] = [tensor.detach().cpu() for tensor in found]
        tracked[mode] = [tensor.requires_grad for tensor in found]
        activations[mode] = sim.peak_bytes() - held
        del found
    return Resident(
        outputs=outputs,
        tracked=tracked,
        activation_bytes=activations,
        modules=Shape.of(model).modules,
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


@functools.cache
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
        """Take down a model's shape."""
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
