"""What PyTorch's users write themselves, and what PyTorch itself offers."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.gpu.ways.base import Pins, Way, needs_cuda

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    from benchmarks.gpu.ways.base import Setting

__all__ = ["PLAIN", "pin_in_place", "place_trained"]


def place_trained(model: nn.Module, place: torch.device) -> None:
    """Put what is trained on the device for good, as adapters are."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(place)


def pin_in_place(model: nn.Module) -> None:
    """Let frozen weights lie in page-locked memory."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.pin_memory()


def _naive(at: Setting, *, pinned: bool) -> None:
    """Each block comes before it computes, in the place of the one before."""
    for model in at.task.models:
        place_trained(model, at.place)
        if pinned:
            pin_in_place(model)
        homes = {
            block: [(p, p.data) for p in block.parameters() if not p.requires_grad]
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


def _fsdp(at: Setting, *, ahead: bool = False) -> None:
    """FSDP2 in a group of one process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    needs_cuda(at)
    if not distributed.is_initialized():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl", store=distributed.HashStore(), rank=0, world_size=1
        )
        at.ends.callback(distributed.destroy_process_group)
    options = {
        "mesh": init_device_mesh(at.place.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "reshard_after_forward": True,
    }
    if ahead:
        at.ends.enter_context(copies_ahead(at.place))
    for model in at.task.models:
        blocks = list(model.blocks)  # type: ignore[arg-type]
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])


@contextlib.contextmanager
def copies_ahead(place: torch.device) -> Iterator[Sized]:
    """Let FSDP2 in a group of one copy a block when it is asked to prefetch it.

    PyTorch copies it when it is needed, on the stream that computes, so nothing
    overlaps: `unshard` only notes an event there.

    Yields:
        What came ahead and was not used yet.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    streams = place.type != "cpu"
    lane = torch.Stream(device=place) if streams else None
    plain, unshard = FSDPParam.all_gather_inputs, FSDPParamGroup.unshard
    there: dict[FSDPParam, tuple[list[torch.Tensor], torch.Event | None]] = {}

    def bring(group: FSDPParamGroup, *args: Any, **options: Any) -> Any:
        asked = group._all_gather_result is None
        result = unshard(group, *args, **options)
        if asked and group._all_gather_result is not None:
            with lane or contextlib.nullcontext():
                for parameter in group.fsdp_params:
                    there[parameter] = plain.fget(parameter), _mark(lane)
        return result

    def take(parameter: FSDPParam) -> list[torch.Tensor]:
        if parameter not in there:
            return plain.fget(parameter)
        tensors, mark = there.pop(parameter)
        if mark is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(mark)
            for tensor in tensors:
                tensor.record_stream(stream)
        return tensors

    FSDPParamGroup.unshard, FSDPParam.all_gather_inputs = bring, property(take)
    try:
        yield there
    finally:
        FSDPParamGroup.unshard, FSDPParam.all_gather_inputs = unshard, plain


def _mark(lane: torch.Stream | None) -> torch.Event | None:
    if lane is None:
        return None
    mark = torch.Event(device=lane.device)
    mark.record(lane)
    return mark


def _save_on_cpu(at: Setting) -> None:
    at.task.saving = torch.autograd.graph.save_on_cpu(
        pin_memory=True, device_type=at.place.type
    )


def _nothing(at: Setting) -> None:
    """All stays on the device."""


_STREAMED = frozenset({"inference", "lora", "pair"})
_SHARDED = frozenset({"inference", "lora", "full"})

PLAIN = {
    "naive-pinned": Way(
        kinds=_STREAMED,
        prepare=functools.partial(_naive, pinned=True),
        pins=Pins.IN_PLACE,
    ),
    "naive-pageable": Way(
        kinds=_STREAMED, prepare=functools.partial(_naive, pinned=False)
    ),
    "fsdp2": Way(kinds=_SHARDED, prepare=_fsdp, pins=Pins.IN_PLACE),
    "fsdp2-patched": Way(
        kinds=_SHARDED,
        prepare=functools.partial(_fsdp, ahead=True),
        pins=Pins.IN_PLACE,
    ),
    "save_on_cpu": Way(kinds=frozenset({"activations"}), prepare=_save_on_cpu),
    "none": Way(kinds=frozenset({"activations"}), prepare=_nothing),
}
"""By their names."""
