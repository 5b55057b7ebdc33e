"""The seeds' headlines in virtual time: training, saved tensors, INT8, models in turns.

What a cell says of compute, load and bytes is that of the model and the device that it
names; blocks are toys. Passes of one model are in `virtual`, which runs these, too.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

import stagehand
from benchmarks.results import Result, ratio
from stagehand.residency import finding
from stagehand.stores.converting import convert_to_squareq

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["measure", "small_blocks"]

_SETTLING = 6
_PASSES = 4
_LAYERS = 6  # that a block and its checkpoint have, where it is cut
_WIDTH = 128
_ROWS = 256
_SAVED = 64 * _ROWS  # bytes that a checkpoint keeps; LTX-2's blocks are 94 times that


@contextmanager
def small_blocks(nbytes: int) -> Iterator[None]:
    """Let toy blocks stand for large ones, down to so many bytes."""
    before = finding._SMALL_BYTES
    finding._SMALL_BYTES = nbytes
    try:
        yield
    finally:
        finding._SMALL_BYTES = before


def measure(sim: Any, *, part: int = 1) -> Iterator[Result]:
    """Yield what each headline takes over what link and device allow.

    Args:
        sim: The simulated device.
        part: By how much the numbers of blocks are divided.
    """
    from simulated import steps

    with small_blocks(steps.SMALL):
        yield from _steps(sim, steps, part)
        yield from _saved(sim, steps, part)
    with small_blocks(0):
        yield from _quantized(sim, part)
        yield from _guest(sim, part)


def _steps(sim: Any, steps: Any, part: int) -> Iterator[Result]:
    worst = 1.0
    for cells in (_adapters, _trained):
        for result, over_plan in cells(sim, steps, part):
            worst = max(worst, over_plan, 1 / over_plan)
            yield result
    what = "worst of these steps over the plan's prediction, or under"
    yield ratio(what, worst, 1.03)


def _adapters(sim: Any, steps: Any, part: int) -> Iterator[tuple[Result, float]]:
    """B1 and B4: a step with adapters and checkpoints, over the bound of its phases.

    Each with its time over its plan's.
    """
    for name, compute, load, count, kept, target in (
        ("B1, LTX-2 LoRA, PCIe 5, 19 GB kept", 1.05e-3, 14.04e-3, 48, 24, 1.05),
        # 1.38 s where all bytes that cross take 1.35.
        ("B1, LTX-2 LoRA, PCIe 5, nothing kept", 1.05e-3, 14.04e-3, 48, 2, 1.022),
        ("B4, FLUX.1 2048^2 LoRA, PCIe 5", 14.7e-3, 7.5e-3, 57, 10, 1.03),
    ):
        kept, count = max(2, kept // part), count // part
        for what, layers in (("", 1), (", blocks in layers", _LAYERS)):
            case = steps.Case(
                compute / layers,
                load / layers,
                kept * layers,
                depth=count * layers,
                region=layers,
            )
            alone = steps.resident_phases(sim, steps.Adapted, case)
            loop = steps.train(sim, steps.Adapted, case)
            loop.steps(_SETTLING)
            seconds = loop.seconds(waits=True)
            planned = loop.plan.step_seconds
            loop.runtime.shutdown()
            over = seconds / steps.lora_bound(case, alone)
            title = f"virtual time over the bound, {name}{what}"
            yield ratio(title, over, target), seconds / planned


def _trained(sim: Any, steps: Any, part: int) -> Iterator[tuple[Result, float]]:
    """Full fine-tuning with checkpoints, over the bound of its phases.

    All weights cross in forward, for an optimizer has changed them, and all gradients
    go home in backward. What the optimizer takes is left out. Each with its time over
    its plan's.
    """
    for name, compute, load, count, kept in (
        ("Llama-3-8B, 2048 tokens, PCIe 5, 8 kept", 1.9e-3, 7.9e-3, 32, 8),
        ("LTX-2, 6144 tokens, PCIe 5, 16 kept", 8.28e-3, 14.04e-3, 48, 16),
    ):
        case = steps.Case(compute, load, max(2, kept // part), depth=count // part)
        alone = steps.resident_phases(sim, steps.Unit, case)
        loop = steps.train(sim, steps.Unit, case)
        loop.steps(_SETTLING)
        seconds, planned = loop.phases().whole, loop.plan.step_seconds
        loop.runtime.shutdown()
        over = seconds / steps.full_bound(case, alone)
        title = f"virtual time over the bound, full training, {name}"
        yield ratio(title, over, 1.05), seconds / planned


def _saved(sim: Any, steps: Any, part: int) -> Iterator[Result]:
    """B2 and B7: inputs of checkpoints leave the device while weights stream.

    B2 is held against the same step in which they stay, B7 against the least that all
    takes that crosses in each direction.
    """
    for link, compute, load in (
        ("PCIe 5", 1.05e-3, 14.04e-3),
        ("PCIe 4", 10.48e-3, 30.89e-3),
    ):
        case = steps.Case(
            compute,
            load,
            kept=24 // part,
            depth=48 // part,
            rows=_ROWS,
            block=94 * _SAVED,
        )
        alone = steps.resident_phases(sim, steps.Adapted, case)
        loop = steps.train(sim, steps.Adapted, case)
        loop.steps(_SETTLING)
        stays, peak = loop.seconds(waits=True), _peak(sim, loop)
        loop.saving = saving = stagehand.activations(case.depth * _SAVED // 4)
        loop.steps(_SETTLING)
        tally, pool = saving._parts.spill.tally, saving._parts.pool
        spilled, made = tally.spilled_bytes, pool.misses
        freed = peak - _peak(sim, loop)
        spilled = tally.spilled_bytes - spilled
        leaves = loop.seconds(waits=True)
        made = pool.misses - made
        loop.runtime.shutdown()
        saving.close()
        bound = steps.lora_bound(case, alone, away=spilled)
        what = f"three quarters of LTX-2's checkpoints leave, {link}"
        yield ratio(
            f"B2, time over that of a step where all stay, {what}", leaves / stays, 1.01
        )
        yield ratio(
            f"B2, bytes that leave over those less at the peak, {what}",
            spilled / freed,
            1 / 0.95,
        )
        yield ratio(f"B2, slabs made in settled steps, {what}", made, 0, "slabs")
        yield ratio(f"virtual time over the bound, B7, {what}", leaves / bound, 1.02)


def _peak(sim: Any, loop: Any) -> int:
    sim.reset_peak()
    loop.steps(1)
    return int(sim.peak_bytes())


class _Layer(nn.Module):
    """One matrix of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        out: torch.Tensor = self.linear(x)
        return out


def _quantized(sim: Any, part: int) -> Iterator[Result]:
    """B5: INT8 crosses the link and is made bfloat16 on the device.

    Half blocks, an eighth of them on the device; the memory to decode is a part of it.
    """
    count, rows = 2 * 56 // part, 8
    nbytes, load = 2 * _WIDTH**2, 10.2e-3  # of half a block in bfloat16
    budget = max(6, count // 8) * nbytes

    def build() -> nn.Module:
        return nn.Sequential(*(_Layer() for _ in range(count)))

    x = torch.ones(rows, _WIDTH, device="hpu", dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "model.safetensors", Path(folder) / "int8"
        save_file(build().state_dict(), plain)
        convert_to_squareq(plain, small)
        for tokens, compute in (("1024^2", 5.05e-3), ("few tokens", 0.5e-3)):
            sim.configure(
                h2d_gbps=nbytes / load / 1e9,
                tflops=2 * rows * _WIDTH**2 / compute / 1e12,
                hbm_gbps=1e12,
                launch_us=0,
                host_launch_us=0,
            )
            model = stagehand.load(
                build, small, vram_budget=budget, inference_mode=True
            )
            runtime = model._stagehand_layer_runtime

            seconds = _settled(sim, model, x)
            parts = runtime._parts
            wires = sum(block.link_nbytes for block in parts.streamed)
            crossing = wires * (1 - (budget - parts.wire_bytes) / (count * nbytes))
            bound = max(count * compute, crossing / nbytes * load)
            what = f"virtual time over the bound, B5, FLUX.2 in INT8, PCIe 5, {tokens}"
            yield ratio(what, seconds / bound, 1.05)
            runtime.shutdown()


def _settled(sim: Any, model: nn.Module, x: torch.Tensor) -> float:
    """The mean seconds of passes that follow those in which plans are made."""
    from simulated.workloads import wait

    for number in range(_SETTLING + _PASSES):
        if number == _SETTLING:
            began = sim.host_seconds()
        with torch.no_grad():
            model(x)
        wait()
    return float(sim.host_seconds() - began) / _PASSES


def _guest(sim: Any, part: int) -> Iterator[Result]:
    """B6: LTX-2 passes in the room that a reserved Gemma leaves it, in turns."""
    from simulated import workloads

    case = workloads.equal(48 // part, 1.05e-3, 14.04e-3)
    gemma = workloads.equal(28 // part, 0.46e-3, 14.04e-3)  # 21.5 GB in such blocks
    room = 3 * workloads.BLOCK
    workloads.configure(sim, case)
    alone = workloads.stream(sim, case, room)
    alone.run(_SETTLING, waits=True)
    expected = alone.seconds(waits=True)
    alone.runtime.shutdown()
    budget = sum(gemma.nbytes) + room
    primary, guest = (workloads.stream(sim, c, budget) for c in (gemma, case))
    primary.runtime.reserve_for_resident()
    seconds, loaded = 0.0, 0
    for number in range(_SETTLING + _PASSES):
        if number == _SETTLING:
            seconds, loaded = 0.0, primary.runtime.report().streamed_bytes
        primary.run(1, waits=True)
        began = sim.host_seconds()
        guest.run(1, waits=True)
        seconds += sim.host_seconds() - began
    loaded = primary.runtime.report().streamed_bytes - loaded
    primary.runtime.shutdown()
    guest.runtime.shutdown()
    what = "B6, LTX-2 as the guest of a reserved Gemma"
    over = seconds / _PASSES / expected
    yield ratio(f"{what}, time over that alone in its room", over, 1.05)
    yield ratio(f"{what}, bytes of the reserved one loaded again", loaded, 0, "bytes")
