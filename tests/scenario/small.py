"""Small models for the scenarios, and one way to run each resident and streamed."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from stagehand.core.device import AcceleratorDevice, Device
from stagehand.residency.blocks import Block
from stagehand.runtime import Runtime

WIDTH = 32
LAYER_BYTES = 4 * 1024 + 256  # one Linear(WIDTH, WIDTH): weight, and bias rounded up


def stack(depth: int = 6) -> nn.Sequential:
    """Equal linear layers with a nonlinearity after each, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))
        )


def batch(*shape: int) -> torch.Tensor:
    """Inputs for `stack`, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator)


def run_resident(model: nn.Module, place: str, *args: Any) -> Any:
    """What a copy of the model gives when all of it is on the device."""
    copy = deepcopy(model).to(place)
    with torch.no_grad():
        return copy(*(a.to(place) if isinstance(a, torch.Tensor) else a for a in args))


def smallest_budget(model: nn.Module, place: str, **options: Any) -> int:
    """The smallest budget, as the error for one that cannot work names it."""
    try:
        stagehand.layer(model, vram_budget=1, device=place, **options)
    except stagehand.StagehandOOMError as error:
        return error.needed_bytes
    raise AssertionError("a budget of one byte was accepted")


def round_up(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the device's allocator take memory in whole steps, as CUDA's does."""

    def taken(_: AcceleratorDevice, nbytes: int) -> int:
        return -(-nbytes // step) * step

    monkeypatch.setattr(AcceleratorDevice, "taken_bytes", taken)


def runtime_of(model: nn.Module) -> Runtime:
    """The handle that the documentation promises."""
    runtime = model._stagehand_layer_runtime
    assert isinstance(runtime, Runtime)
    return runtime


def blocks_of(model: nn.Module) -> list[Block]:
    """All streamed blocks, in the order of their definition."""
    return runtime_of(model)._parts.streamed


def device_of(model: nn.Module) -> Device:
    return runtime_of(model)._device


def assert_passes_equal(
    model: nn.Module, expected: Any, *args: Any, passes: int = 3
) -> None:
    """Run the model some times without gradients; each pass gives what is expected."""
    for number in range(passes):
        with torch.no_grad():
            output = model(*args)
        assert_bitwise_equal(output, expected, f"pass {number}")


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all that `state_dict` gives, on the host."""
    return {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
