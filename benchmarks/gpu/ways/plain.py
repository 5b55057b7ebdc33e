"""What PyTorch's users write themselves, and what PyTorch itself offers."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.gpu.ways.base import Way

if TYPE_CHECKING:
    from benchmarks.gpu.ways.base import Setting

__all__ = ["PLAIN", "place_trained"]


def place_trained(model: nn.Module, place: torch.device) -> None:
    """Put what is trained on the device for good, as adapters are."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(place)


def _naive(at: Setting, *, pinned: bool) -> None:
    """Each block comes before it computes, in the place of the one before."""
    for model in at.task.models:
        place_trained(model, at.place)
        homes = {
            block: [
                (p, p.data.pin_memory() if pinned else p.data)
                for p in block.parameters()
                if not p.requires_grad
            ]
            for block in model.blocks  # type: ignore[union-attr]
        }
        mover = _Mover(homes, at.place)
        for block in homes:
            block.register_forward_pre_hook(mover.bring)


class _Mover:
    """The frozen weights of a model, and whose are on the device.

    A block stays until the next one comes: what computes it again for backward needs it
    after its forward, too.
    """

    def __init__(
        self,
        homes: dict[nn.Module, list[tuple[nn.Parameter, torch.Tensor]]],
        place: torch.device,
    ) -> None:
        self._homes, self._place = homes, place
        self._there: nn.Module | None = None

    def bring(self, block: nn.Module, _: Any) -> None:
        """Let a block's weights be on the device, and no other's."""
        if block is self._there:
            return
        if self._there is not None:
            for parameter, home in self._homes[self._there]:
                parameter.data = home
        for parameter, home in self._homes[block]:
            parameter.data = home.to(self._place, non_blocking=True)
        self._there = block


def _fsdp(at: Setting) -> None:
    """FSDP2 in a group of one process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if at.place.type == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=distributed.HashStore(), rank=0, world_size=1
        )
        at.ends.callback(distributed.destroy_process_group)
    options = {
        "mesh": init_device_mesh(at.place.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "reshard_after_forward": True,
    }
    for model in at.task.models:
        blocks = list(model.blocks)  # type: ignore[arg-type]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])


def _save_on_cpu(at: Setting) -> None:
    at.task.saving = torch.autograd.graph.save_on_cpu(
        pin_memory=True, device_type=at.place.type
    )


def _nothing(at: Setting) -> None:
    """All stays on the device."""


_STREAMED = frozenset({"inference", "lora", "pair"})

PLAIN = {
    "naive-pinned": Way(
        kinds=_STREAMED, prepare=functools.partial(_naive, pinned=True)
    ),
    "naive-pageable": Way(
        kinds=_STREAMED, prepare=functools.partial(_naive, pinned=False)
    ),
    "fsdp2": Way(kinds=frozenset({"inference", "lora", "full"}), prepare=_fsdp),
    "save_on_cpu": Way(kinds=frozenset({"activations"}), prepare=_save_on_cpu),
    "none": Way(kinds=frozenset({"activations"}), prepare=_nothing),
}
"""By their names."""
