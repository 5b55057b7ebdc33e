"""Other libraries, in the settings that are their best for these models."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.gpu.tasks.base import nbytes_of
from benchmarks.gpu.tasks.training import FineTuning, loss_of
from benchmarks.gpu.ways.base import Pins, Way, needs_cuda
from benchmarks.gpu.ways.plain import pin_in_place
from stagehand.units import MIB

if TYPE_CHECKING:
    from benchmarks.gpu.ways.base import Setting

__all__ = ["OTHERS"]

_CPU = torch.device("cpu")
_WINDOW = 2  # blocks: one computes, one comes
_TRAINED = 5  # times the bytes of weights: gradients twice, and two states
_WITH_STREAMS = ("cuda", "xpu")  # elsewhere diffusers refuses them


def _accelerate(at: Setting) -> None:
    """Its copies start from pinned memory; else it has nothing to set."""
    from accelerate import cpu_offload

    for model in at.task.models:
        # It brings a module's own tensors when that module is called, which a list of
        # parameters never is: blocks with one are brought whole.
        listed = {
            type(block).__name__
            for block in model.blocks  # type: ignore[union-attr]
            if any(isinstance(m, nn.ParameterList) for m in block.modules())
        }
        pin_in_place(model)
        cpu_offload(
            model,
            execution_device=at.place,
            offload_buffers=False,
            state_dict=model.state_dict(),
            preload_module_classes=sorted(listed),
        )


def _diffusers(at: Setting, *, level: str) -> None:
    """A block (or a layer) ahead, on a stream of its own where it can."""
    from diffusers.hooks import apply_group_offloading

    streams = at.place.type in _WITH_STREAMS
    for model in at.task.models:
        apply_group_offloading(
            model,
            onload_device=at.place,
            offload_device=_CPU,
            offload_type=level,
            num_blocks_per_group=1 if level == "block_level" else None,
            use_stream=streams,
            record_stream=streams,
            non_blocking=True,
            low_cpu_mem_usage=False,
        )


def _ramtorch(at: Setting) -> None:
    """A window of blocks, and as many that stay as the budget holds beside it."""
    from ramtorch import OffloadModel

    needs_cuda(at)
    for model in at.task.models:
        blocks = list(model.blocks)  # type: ignore[arg-type]
        largest = max(nbytes_of(block.parameters()) for block in blocks)
        streamed = OffloadModel(
            blocks,
            device=at.place,
            window=_WINDOW,
            # One more than the window is there while the one before is given up.
            pin=max(0, at.share(model) // largest - _WINDOW - 1),
        )
        at.ends.callback(streamed.close)
        model.forward = functools.partial(_as_one, streamed)


def _as_one(streamed: nn.Module, *state: torch.Tensor) -> object:
    return streamed(state)


def _ramtorch_trained(at: Setting) -> None:
    """It runs forward and backward itself, each block computed again as by checkpoints.

    What it keeps on the device has its gradients, twice, and AdamW's states there.
    """
    from ramtorch import OffloadModel

    needs_cuda(at)
    task = at.task
    assert isinstance(task, FineTuning)
    (model,), (state,) = task.models, task.states
    blocks = list(model.blocks)  # type: ignore[arg-type]
    largest = max(nbytes_of(block.parameters()) for block in blocks)
    streamed = OffloadModel(
        blocks,
        device=at.place,
        window=_WINDOW,
        pin=max(0, (at.room.budget_bytes // largest - _WINDOW - 1) // _TRAINED),
    )
    at.ends.callback(streamed.close)

    def both() -> None:
        def loss(outputs: Any, _: Any) -> torch.Tensor:
            whole = outputs if isinstance(outputs, tuple) else (outputs,)
            return loss_of(whole[:2])

        task.loss = streamed.step(state, loss_fn=loss).loss
        model.requires_grad_(True)  # it leaves what stays on the device frozen

    task.forward = both  # type: ignore[method-assign]
    task.backward = streamed.flush_grads  # type: ignore[method-assign]


def _ramtorch_linear(at: Setting) -> None:
    """Its linear layers, which it would rather not have used any more; but its blocks
    are trained whole. Backward makes gradients of frozen weights, and sends them home.
    """
    needs_cuda(at)  # its helpers ask for one when they are imported
    from ramtorch.helpers import replace_linear_with_ramtorch

    for model in at.task.models:
        pin_in_place(model)
        replace_linear_with_ramtorch(model, device=str(at.place))
        for parameter in model.parameters():
            if getattr(parameter, "is_ramtorch", False):
                parameter.requires_grad_(False)
            else:
                parameter.data = parameter.data.to(at.place)


def _mmgp(at: Setting) -> None:
    """Half of the budget, for it takes twice what it is given."""
    needs_cuda(at)  # and its import changes other libraries
    from mmgp import offload

    for model in at.task.models:
        budget = max(1, int(at.share(model) / 2 / MIB))
        offload.all(
            {"transformer": model},
            pinnedMemory=True,
            quantizeTransformer=False,
            asyncTransfers=True,
            budgets={"transformer": budget, "*": budget},
        )


_FORWARD = frozenset({"inference"})

OTHERS = {
    "accelerate": Way(
        kinds=_FORWARD,
        prepare=_accelerate,
        package="accelerate",
        pins=Pins.IN_PLACE,
    ),
    "diffusers-block": Way(
        kinds=_FORWARD,
        prepare=functools.partial(_diffusers, level="block_level"),
        package="diffusers",
        pins=Pins.COPIES,
    ),
    "diffusers-leaf": Way(
        kinds=_FORWARD,
        prepare=functools.partial(_diffusers, level="leaf_level"),
        package="diffusers",
        pins=Pins.COPIES,
    ),
    "ramtorch": Way(
        kinds=_FORWARD, prepare=_ramtorch, package="ramtorch", pins=Pins.IN_PLACE
    ),
    "ramtorch-trained": Way(
        kinds=frozenset({"full"}),
        prepare=_ramtorch_trained,
        package="ramtorch",
        pins=Pins.IN_PLACE,
    ),
    "ramtorch-linear": Way(
        kinds=frozenset({"lora"}),
        prepare=_ramtorch_linear,
        package="ramtorch",
        pins=Pins.IN_PLACE,
    ),
    "mmgp": Way(kinds=_FORWARD, prepare=_mmgp, package="mmgp", pins=Pins.COPIES),
}
"""By their names."""
