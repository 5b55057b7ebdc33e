"""Random models of any size, the same at every call, resident or streamed."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn

import stagehand
from gpu.places import Place
from stagehand.core.device import find_device
from stagehand.runtime import Runtime
from stagehand.units import MIB

DEPTH = 10


class Block(nn.Module):
    """A residual block: a norm, and two linear layers with a nonlinearity between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(place: Place, dtype: torch.dtype = torch.float32) -> Stack:
    """A stack on the host whose size suits the device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Stack(place.width).to(dtype)


def batch(place: Place, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs for `stack`, on the device."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(place.tokens, place.width, generator=generator)
    return rows.to(place.name, dtype)


def block_bytes(model: nn.Module) -> int:
    """What a slot for one block takes: its tensors, each rounded up to 256 bytes."""
    image = sum(
        -(-p.numel() * p.element_size() // 256) * 256
        for p in model.blocks[0].parameters()
    )
    return find_device(None).taken_bytes(image)


def passes(
    model: nn.Module, x: torch.Tensor, count: int = 1
) -> Callable[[], torch.Tensor]:
    """A function that runs the model some times and returns the last output."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(count):
                output = model(x)
        return output

    return run


def settle(model: nn.Module, x: torch.Tensor, place: Place) -> None:
    """Run a streamed model until its order is learned, timed, and planned for good.

    Times are read when they are over; a host that runs ahead would not see them.
    """
    for _ in range(4):
        passes(model, x, count=2)()
        place.synchronize()


def resident(model: nn.Module, place: Place) -> nn.Module:
    """A copy with all weights on the device."""
    return deepcopy(model).to(place.name)


def streamed(
    model: nn.Module,
    mode: str,
    budget_bytes: int,
    place: Place,
    *,
    telemetry: bool = False,
) -> Runtime:
    """Stream a model in place: its "layers", or its "blocks"."""
    if mode == "layers":
        stagehand.layer(
            model, vram_budget=budget_bytes, device=place.name, telemetry=telemetry
        )
    else:
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=budget_bytes / MIB,
            vram_low_watermark_mb=0.9 * budget_bytes / MIB,
            telemetry_enabled=telemetry,
        )
        stagehand.StagehandRuntime(model, config, r"^blocks\.\d+$", device=place.name)
    runtime: Runtime = model._stagehand_layer_runtime
    place.ends.callback(runtime.shutdown)
    return runtime
