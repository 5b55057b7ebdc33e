"""Saved tensors under a budget: step time and peak, beside `save_on_cpu` and none.

Adapters are trained on a frozen stack of true shape, and the peak is to be lower by so
many bytes. The three use the same weights and inputs, one after the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.gpu.clock import Spread, time_steps
from benchmarks.gpu.link import copy_rate
from benchmarks.gpu.shapes import build, inputs
from benchmarks.gpu.training import adapt
from stagehand import ActivationRuntime, ActivationStagehandConfig
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from benchmarks.gpu.cells import Scale
    from benchmarks.gpu.shapes import Shape, State
    from stagehand.activations.record import ActivationStep
    from stagehand.core.device import Device

__all__ = ["ActivationCell", "run"]

_RANK = 32
_SETTLING = 4
_LOWER_BYTES = 2_500_000_000
_TIMED_COPY = 64 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCell:
    """What was found for one shape. Times are seconds."""

    shape: str
    blocks: int
    dtype: str
    saved_bytes: int
    """What a step saves that could leave."""
    budget_bytes: int
    none: Spread
    ours: Spread
    save_on_cpu: Spread
    none_peak_bytes: int
    our_peak_bytes: int
    save_on_cpu_peak_bytes: int
    spilled: int
    spill_bytes: int
    freed_bytes: int
    pool_hit_rate: float | None
    stall_ms: float | None
    link_rate: float
    loss_equal: bool

    def line(self) -> dict[str, Any]:
        """Return what is written to the results."""
        return {
            "kind": "activations",
            **asdict(self),
            "over_none": self.ours.median / self.none.median,
            "save_on_cpu_over_none": self.save_on_cpu.median / self.none.median,
            "lower_bytes": self.none_peak_bytes - self.our_peak_bytes,
        }


def run(
    device: Device, name: str, shape: Shape, scale: Scale
) -> Iterator[ActivationCell]:
    """Yield one cell.

    Args:
        device: An accelerator that holds the stack and all that a step saves.
        name: The shape's name.
        shape: Which.
        scale: How large.

    Raises:
        AssertionError: If the loss under a budget is not the one without.
    """
    place = device.torch_device
    stack = build(
        shape, device=place, dtype=scale.dtype, blocks=scale.blocks, divide=scale.divide
    )
    torch.manual_seed(2)
    adapt(stack, max(1, _RANK // scale.divide))
    state = inputs(shape, device=place, dtype=scale.dtype, divide=scale.divide)
    steps = _Steps(device, stack, state, scale.steps)
    none, none_peak, loss = steps.measure(nullcontext)
    saved_bytes = steps.saved_bytes()
    lower = min(_LOWER_BYTES, saved_bytes // 2)
    budget = saved_bytes - lower
    runtime = ActivationRuntime(ActivationStagehandConfig(budget=budget))
    ours, our_peak, our_loss = steps.measure(runtime.managed_forward, runtime)
    record = steps.record
    assert record is not None
    runtime.shutdown()
    assert torch.equal(our_loss, loss), f"{name}: the loss under a budget differs"
    theirs, their_peak, _ = steps.measure(lambda: save_on_cpu(pin_memory=True))
    yield ActivationCell(
        shape=name,
        blocks=len(stack.blocks),
        dtype=str(scale.dtype),
        saved_bytes=saved_bytes,
        budget_bytes=budget,
        none=none,
        ours=ours,
        save_on_cpu=theirs,
        none_peak_bytes=none_peak,
        our_peak_bytes=our_peak,
        save_on_cpu_peak_bytes=their_peak,
        spilled=record.activations_spilled,
        spill_bytes=record.spill_bytes,
        freed_bytes=record.freed_bytes,
        pool_hit_rate=record.pool_hit_rate,
        stall_ms=record.stall_time_ms,
        link_rate=copy_rate(device, min(_TIMED_COPY, saved_bytes)),
        loss_equal=True,
    )


class _Steps:
    """Forward and backward of one model, without an optimizer."""

    def __init__(
        self, device: Device, model: nn.Module, state: State, steps: int
    ) -> None:
        self.record: ActivationStep | None = None
        self._device, self._model, self._state = device, model, state
        self._steps = steps

    def _forward(self) -> torch.Tensor:
        outputs = self._model(*self._state)
        return torch.stack([out.float().square().mean() for out in outputs[:2]]).sum()

    def measure(
        self,
        context: Callable[[], AbstractContextManager[Any]],
        runtime: ActivationRuntime | None = None,
    ) -> tuple[Spread, int, torch.Tensor]:
        """Return times, the peak of device memory and the loss."""

        def step() -> torch.Tensor:
            if runtime is not None:
                runtime.step_begin()
            with context():
                loss = self._forward()
            loss.backward()  # type: ignore[no-untyped-call]
            self._model.zero_grad()
            if runtime is not None:
                self.record = runtime.step_end()
            return loss.detach()

        for _ in range(_SETTLING):
            loss = step()
            self._device.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        times = time_steps(self._device, step, self._steps)
        return times, torch.accelerator.max_memory_allocated(), loss.cpu()

    def saved_bytes(self) -> int:
        """What a step saves that could leave."""
        runtime = ActivationRuntime(ActivationStagehandConfig(budget="100%"))
        with runtime.managed_forward():
            self._forward()
        held = int(runtime.snapshot()["held_bytes"])
        runtime.shutdown()
        return held
