"""One cell: a stack resident, then streamed in a budget, compared and timed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.clock import Spread, time_steps
from benchmarks.gpu.link import copy_rate
from benchmarks.gpu.shapes import Shape, Stack, build, inputs
from stagehand.assembly import Settings
from stagehand.residency.blocks import find_blocks
from stagehand.runtime import Runtime
from stagehand.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stagehand.core.device import Device
    from stagehand.report import Report

__all__ = ["Cell", "Scale", "run"]

_PATTERN = r"^blocks\.\d+$"
_LOOKAHEAD = 3
_SETTLING = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large a run is."""

    blocks: int | None = None
    """About how many blocks a stack has; None for as many as the model."""
    divide: int = 1
    """By how much widths and tokens are divided."""
    steps: int = 10
    """Timed steps of each cell."""
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What was found for one shape in one budget. Times are seconds of a step."""

    shape: str
    blocks: int
    dtype: str
    weight_bytes: int
    budget_bytes: int
    step: Spread
    resident: Spread
    bound: float
    """The larger of the resident step and what the link needs for the bytes that the
    budget cannot hold, at the rate measured beside the cell."""
    h2d_rate: float
    h2d_rate_after: float
    """Measured again at the end: where the two differ, the cell tells little."""
    h2d_bytes: float
    """Of one step."""
    stall_ms: float | None
    hit_rate: float | None
    peak_weight_bytes: int
    peak_device_bytes: int
    """Of all tensors on the device, activations included."""
    pinned_bytes: int
    startup: float
    """Seconds on the host from the plain model to the end of the first pass."""

    def line(self) -> dict[str, Any]:
        """Return what is written to the results."""
        ratios = {
            "over_bound": self.step.median / self.bound,
            "over_resident": self.step.median / self.resident.median,
        }
        return {"kind": "cell", **asdict(self), **ratios, "bit_equal": True}


def run(
    device: Device, name: str, shape: Shape, budgets: Sequence[int | str], scale: Scale
) -> Iterator[Cell]:
    """Yield a cell for each budget.

    Args:
        device: An accelerator that can hold the whole stack once.
        name: The shape's name.
        shape: Which.
        budgets: Device bytes for weights, or texts such as "12GB" and, as a part of the
            stack's bytes, "30%".
        scale: How large.

    Raises:
        AssertionError: If a streamed output differs from the resident one in any bit.
    """
    place = device.torch_device
    model = build(
        shape, device=place, dtype=scale.dtype, blocks=scale.blocks, divide=scale.divide
    )
    state = inputs(shape, device=place, dtype=scale.dtype, divide=scale.divide)
    expected = _step(model, state)
    resident = time_steps(device, lambda: _step(model, state), scale.steps)
    model.cpu()
    for budget in budgets:
        yield _Streamed(device, name, model, state, scale).cell(
            budget, expected, resident
        )


@torch.no_grad()
def _step(model: Stack, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return model(*state)


class _Streamed:
    """One streamed run."""

    def __init__(
        self,
        device: Device,
        name: str,
        model: Stack,
        state: tuple[torch.Tensor, ...],
        scale: Scale,
    ) -> None:
        self._device, self._name, self._scale = device, name, scale
        self._model, self._state = model, state

    def cell(
        self,
        budget: int | str,
        expected: tuple[torch.Tensor, ...],
        resident: Spread,
    ) -> Cell:
        device, model = self._device, self._model
        sizes = _block_bytes(model)
        nbytes = parse_bytes(budget, name="--budget", of=sum(sizes))
        rate = copy_rate(device, max(sizes))
        torch.accelerator.reset_peak_memory_stats()
        began = time.perf_counter()
        runtime = self._stream(nbytes, sizes)
        try:
            self._check(expected)
            startup = time.perf_counter() - began
            for _ in range(_SETTLING):
                self._check(expected)
            before = runtime.report()
            step = time_steps(device, self._run, self._scale.steps)
            self._check(expected)
            after = runtime.report()
        finally:
            runtime.shutdown()
        return Cell(
            shape=self._name,
            blocks=len(model.blocks),
            dtype=str(self._scale.dtype),
            weight_bytes=sum(sizes),
            budget_bytes=nbytes,
            step=step,
            resident=resident,
            bound=max(resident.median, (sum(sizes) - nbytes) / rate),
            h2d_rate=rate,
            h2d_rate_after=copy_rate(device, max(sizes)),
            h2d_bytes=_streamed_bytes(before, after, self._scale.steps + 1),
            stall_ms=after.stall_ms,
            hit_rate=after.hit_rate,
            peak_weight_bytes=after.peak_device_bytes,
            peak_device_bytes=torch.accelerator.max_memory_allocated(),
            pinned_bytes=after.pinned_bytes,
            startup=startup,
        )

    def _stream(self, nbytes: int, sizes: Sequence[int]) -> Runtime:
        settings = Settings(
            device=self._device,
            budget_bytes=nbytes,
            pinned_bytes=sum(sizes) + max(sizes),
            lookahead=_LOOKAHEAD,
            timed=True,
        )
        return Runtime(self._model, find_blocks(self._model, _PATTERN), settings)

    def _run(self) -> tuple[torch.Tensor, ...]:
        return _step(self._model, self._state)

    def _check(self, expected: tuple[torch.Tensor, ...]) -> None:
        for found, wanted in zip(self._run(), expected, strict=True):
            same = torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
            assert same, f"{self._name}: the streamed output is not the resident one"


def _block_bytes(model: Stack) -> list[int]:
    """The bytes of each block's image, in which each tensor begins at 256 bytes."""
    return [
        sum(-(-p.numel() * p.element_size() // 256) * 256 for p in block.parameters())
        for block in model.blocks
    ]


def _streamed_bytes(before: Report, after: Report, steps: int) -> float:
    return (after.streamed_bytes - before.streamed_bytes) / steps
