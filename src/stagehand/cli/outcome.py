"""One task run twice over: with streamed weights, and with the plain model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stagehand
from stagehand.cli.models import FoundModel, load_model, open_model
from stagehand.cli.tasks import Task
from stagehand.core.device import find_device
from stagehand.errors import StagehandOOMError
from stagehand.units import format_bytes

__all__ = ["Outcome", "Streaming", "run_resident", "run_streamed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How to run a model, as the options of the command line say."""

    vram_budget: str | None
    """Most device bytes for weights, as text; None for the library's default."""
    ram_budget: str | None
    """Most pinned host bytes, as text; None for the library's default."""
    device: str | None
    """The device's name; None for the accelerator, or the host where there is none."""
    dtype: torch.dtype | None
    """The element type to load as; None for the checkpoint's."""
    file_backed: bool
    """Weights come from the model's files, not from host memory."""
    telemetry: Path | None
    """Where to write the record of each pass."""
    trace: Path | None
    """Where to write the trace of copies and compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a streamed run gave, and what it took."""

    results: tuple[torch.Tensor, ...]
    """The task's results, on the host."""
    seconds: float
    """Wall time of the task, opening the model not included."""
    report: stagehand.Report
    """What the runtime says of it."""
    trace_error: OSError | None = None
    """What kept the trace from being written."""


def run_streamed(
    found: FoundModel, task: Task, how: Streaming, *, advance: Callable[[], None]
) -> Outcome:
    """Run a task on a model whose weights are streamed.

    Raises:
        StagehandError: If the model, the budget and the options do not go together.
    """
    model = _stream(found, how)
    runtime: Any = model._stagehand_layer_runtime
    try:
        place = find_device(how.device).torch_device
        start = time.perf_counter()
        # Results are on the host when `run` returns: the device's work is done too.
        results = task.run(model, device=place, advance=advance)
        seconds = time.perf_counter() - start
        return Outcome(
            results=results,
            seconds=seconds,
            report=runtime.report(),
            trace_error=_write_trace(runtime, how.trace),
        )
    except torch.OutOfMemoryError as error:
        raise StagehandOOMError(
            f"the activations do not fit on the device beside the weights ({error}): "
            "lower --vram-budget, or run shorter texts"
        ) from error
    finally:
        runtime.shutdown()


def _write_trace(runtime: Any, path: Path | None) -> OSError | None:
    """Write the trace, if one is wanted; return what it failed of: the run is done."""
    if path is not None:
        try:
            runtime.export_trace(path)
        except OSError as error:
            return error
    return None


def _stream(found: FoundModel, how: Streaming) -> nn.Module:
    options: dict[str, Any] = {
        "vram_budget": how.vram_budget,
        "ram_budget": how.ram_budget,
        "device": how.device,
        "inference_mode": True,
        "telemetry": how.telemetry or False,
        "trace": how.trace is not None,
    }
    if how.file_backed or found.is_converted:
        return load_model(found, dtype=how.dtype, **options)
    return stagehand.layer(open_model(found, dtype=how.dtype), **options)


def run_resident(
    found: FoundModel, task: Task, how: Streaming, *, advance: Callable[[], None]
) -> tuple[torch.Tensor, ...]:
    """Return a task's results on the same model, opened anew, whole on the device.

    Raises:
        StagehandOOMError: If the device cannot hold the whole model.
    """
    model = open_model(found, dtype=how.dtype)
    target = find_device(how.device)
    weights = sum(each.nbytes for each in model.parameters())
    free = target.free_bytes()
    try:
        if target.is_host and weights > free:
            raise torch.OutOfMemoryError("the system would end the process")
        model.to(target.torch_device)
        if target.is_host:
            _align(model)
        return task.run(model, device=target.torch_device, advance=advance)
    except torch.OutOfMemoryError as error:
        remedy = "" if target.is_host else ", or use --device cpu"
        raise StagehandOOMError(
            f"--verify needs all {format_bytes(weights)} of weights at once on "
            f"{target.torch_device}, and the activations beside them; "
            f"{format_bytes(free)} are free: leave --verify out{remedy}",
            needed_bytes=weights,
            limit_bytes=free,
        ) from error


def _align(model: nn.Module) -> None:
    """Copy all tensors, as streaming does: those in a mapped file begin at any address.

    At odd addresses some kernels for CPUs add in another order, in their last bits.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
