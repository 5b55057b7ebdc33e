"""LoRA on a frozen streamed stack: steps against their bound, and resident ones."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.clock import Spread, time_steps
from benchmarks.gpu.link import copy_rate
from benchmarks.gpu.shapes import Shape, Stack, build, inputs
from stagehand.assembly import Settings
from stagehand.residency.blocks import find_layers
from stagehand.runtime import Runtime
from stagehand.units import MIB, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.gpu.cells import Scale
    from benchmarks.gpu.shapes import State
    from stagehand.core.device import Device

__all__ = ["TrainingCell", "adapt", "run"]

_RANK = 32
_RATE = 1e-4
_LOOKAHEAD = 3
_SETTLING = 8
_TIMED_COPY = 64 * MIB


class _Adapter(nn.Module):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **like))
        self.up = nn.Parameter(torch.empty(base.out_features, rank, **like))
        for part in (self.down, self.up):
            nn.init.normal_(part, std=part.shape[-1] ** -0.5 / rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        out: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


class _Checkpointed(nn.Module):
    """A stack that computes each block again in backward."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.blocks = stack.blocks

    def forward(self, *state: torch.Tensor) -> State:
        """Apply all blocks."""
        for block in self.blocks:
            state = checkpoint(block, *state, use_reentrant=False)
        return state


def adapt(module: nn.Module, rank: int) -> None:
    """Put an adapter around every linear layer."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, _Adapter(child, rank))
        else:
            adapt(child, rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCell:
    """What was found for one shape in one budget. Times are seconds."""

    shape: str
    blocks: int
    dtype: str
    rank: int
    weight_bytes: int
    adapter_bytes: int
    budget_bytes: int
    cap_bytes: int | None
    """Of all that torch's allocator may take while the model streams."""
    step: Spread
    resident: Spread
    resident_forward: float
    resident_backward: float
    bound: float
    """max(C_f, (W - V) / B) + max(C_b, (W - V) / B), and the optimizer's step: at most
    the budget V of the weights W can be there when a phase starts. Compute and link
    rate are those measured in the same process."""
    h2d_rate: float
    h2d_rate_after: float
    h2d_bytes: float
    """Of one step."""
    d2h_bytes: float
    """Of one step: frozen weights never go back."""
    peak_weight_bytes: int
    peak_device_bytes: int
    pinned_bytes: int
    startup: float
    loss_equal: bool
    gradient_difference: float
    """The largest, from the resident step."""
    resident_difference: float
    """The same between two resident steps: kernels may add in any order."""

    def line(self) -> dict[str, Any]:
        """Return what is written to the results."""
        ratios = {
            "over_bound": self.step.median / self.bound,
            "over_resident": self.step.median / self.resident.median,
        }
        return {"kind": "training", **asdict(self), **ratios}


def run(
    device: Device,
    name: str,
    shape: Shape,
    budgets: Sequence[int | str],
    scale: Scale,
    *,
    cap_bytes: int | None,
) -> Iterator[TrainingCell]:
    """Yield a cell for each budget.

    Args:
        device: An accelerator that can hold the whole stack once.
        name: The shape's name.
        shape: Which.
        budgets: As in `cells.run`.
        scale: How large.
        cap_bytes: What torch's allocator may take while the model streams.

    Raises:
        AssertionError: If the streamed loss is not the resident one, or gradients
            differ where those of two resident steps do not.
    """
    place = device.torch_device
    stack = build(
        shape, device=place, dtype=scale.dtype, blocks=scale.blocks, divide=scale.divide
    )
    torch.manual_seed(2)
    adapt(stack, max(1, _RANK // scale.divide))
    state = inputs(shape, device=place, dtype=scale.dtype, divide=scale.divide)
    model = _Checkpointed(stack)
    resident = _Resident(device, model, state, scale.steps)
    for budget in budgets:
        resident.take_off()
        yield _cell(resident, name, budget, scale, cap_bytes)


class _Loop:
    """A model in training: its adapters, an optimizer for them, and one batch."""

    def __init__(self, model: nn.Module, state: State) -> None:
        self.model, self._state = model, state
        self.adapters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=_RATE)

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        outputs = self.model(*self._state)
        return torch.stack([out.float().square().mean() for out in outputs[:2]]).sum()

    def update(self) -> None:
        """Change the adapters."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Do all of it."""
        self.forward().backward()  # type: ignore[no-untyped-call]
        self.update()

    def gradients(self) -> list[torch.Tensor]:
        """Return a loss and the gradients, on the host, and change nothing."""
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        found = [loss.detach().cpu()]
        found += [p.grad.cpu() for p in self.adapters if p.grad is not None]
        self.optimizer.zero_grad()
        return found


class _Resident:
    """The run that everything is held against."""

    def __init__(
        self, device: Device, model: nn.Module, state: State, steps: int
    ) -> None:
        self.device, self.model, self.state = device, model, state
        self._first = [p.detach().cpu() for p in model.parameters() if p.requires_grad]
        loop = _Loop(model, state)
        self.found = loop.gradients()
        self.difference = _difference(self.found, loop.gradients())
        loop.step()
        self.step = time_steps(device, loop.step, steps)
        self.forward, self.backward, self.update = _phases(device, loop, steps)

    def take_off(self) -> None:
        """Give the device's memory back, and the adapters their first values."""
        self.model.cpu()
        adapters = [p for p in self.model.parameters() if p.requires_grad]
        with torch.no_grad():
            for adapter, first in zip(adapters, self._first, strict=True):
                adapter.copy_(first)
        torch.accelerator.empty_cache()


def _phases(device: Device, loop: _Loop, steps: int) -> tuple[float, float, float]:
    """The median seconds of forward, backward and the optimizer's step."""
    stream = device.current_stream()
    rows = [[device.new_event(timing=True) for _ in range(4)] for _ in range(steps)]
    for row in rows:
        row[0].record(stream)
        loss = loop.forward()
        row[1].record(stream)
        loss.backward()  # type: ignore[no-untyped-call]
        row[2].record(stream)
        loop.update()
        row[3].record(stream)
    device.synchronize()
    forward, backward, update = (
        Spread.of([row[i].elapsed_time(row[i + 1]) / 1e3 for row in rows]).median
        for i in range(3)
    )
    return forward, backward, update


def _cell(
    resident: _Resident,
    name: str,
    budget: int | str,
    scale: Scale,
    cap_bytes: int | None,
) -> TrainingCell:
    device, model = resident.device, resident.model
    frozen = _bytes_of(p for p in model.parameters() if not p.requires_grad)
    nbytes = parse_bytes(budget, name="--training-budgets", of=frozen)
    copied = min(_TIMED_COPY, frozen)
    rate = copy_rate(device, copied)
    _cap(device, cap_bytes)
    torch.accelerator.reset_peak_memory_stats()
    began = time.perf_counter()
    runtime = _stream(device, model, nbytes)
    try:
        loop = _Loop(model, resident.state)
        found = loop.gradients()
        startup = time.perf_counter() - began
        difference = _difference(found, resident.found)
        equal = torch.equal(found[0], resident.found[0])
        assert equal, f"{name}: the streamed loss is not the resident one"
        exact = not difference or resident.difference
        assert exact, f"{name}: streamed gradients are not the resident ones"
        for _ in range(_SETTLING):
            loop.step()
            device.synchronize()
        before = runtime.report()
        step = time_steps(device, loop.step, scale.steps)
        after = runtime.report()
    finally:
        runtime.shutdown()
        _cap(device, None)
    crossing = max(0, frozen - nbytes) / rate
    phases = (resident.forward, resident.backward)
    return TrainingCell(
        shape=name,
        blocks=len(model.blocks),  # type: ignore[arg-type]
        dtype=str(scale.dtype),
        rank=min(loop.adapters[0].shape),
        weight_bytes=frozen,
        adapter_bytes=_bytes_of(loop.adapters),
        budget_bytes=nbytes,
        cap_bytes=cap_bytes,
        step=step,
        resident=resident.step,
        resident_forward=resident.forward,
        resident_backward=resident.backward,
        bound=sum(max(phase, crossing) for phase in phases) + resident.update,
        h2d_rate=rate,
        h2d_rate_after=copy_rate(device, copied),
        h2d_bytes=(after.streamed_bytes - before.streamed_bytes) / scale.steps,
        d2h_bytes=(after.saved_bytes - before.saved_bytes) / scale.steps,
        peak_weight_bytes=after.peak_device_bytes,
        peak_device_bytes=torch.accelerator.max_memory_allocated(),
        pinned_bytes=after.pinned_bytes,
        startup=startup,
        loss_equal=equal,
        gradient_difference=difference,
        resident_difference=resident.difference,
    )


def _stream(device: Device, model: nn.Module, nbytes: int) -> Runtime:
    settings = Settings(
        device=device,
        budget_bytes=nbytes,
        pinned_bytes=2 * _bytes_of(model.parameters()),
        lookahead=_LOOKAHEAD,
        timed=True,
    )
    return Runtime(model, find_layers(model, budget_bytes=nbytes), settings)


def _cap(device: Device, cap_bytes: int | None) -> None:
    """Let torch's allocator take so many bytes at most; None for all."""
    place = device.torch_device
    if place.type != "cuda":
        return
    total = torch.cuda.get_device_properties(place).total_memory
    part = 1.0 if cap_bytes is None else min(1.0, cap_bytes / total)
    torch.cuda.set_per_process_memory_fraction(part, place)


def _bytes_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _difference(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest of gradients; the loss comes first and is not one."""
    return max(
        (a.float() - b.float()).abs().max().item()
        for a, b in zip(some[1:], others[1:], strict=True)
    )
