"""Answers `model.to()` and the like while the model is streamed."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.errors import ConfigError

if TYPE_CHECKING:
    from stagehand.placing import Placing

__all__ = ["Moves"]


class Moves:
    """Answers `model.to()`, `half()` and the like while the model is streamed.

    Moving to the device brings what always stays there, with adapters that were added
    since, and nothing else; moving to the CPU brings everything home until the next
    pass; casting is refused, and so is another memory format.

    Args:
        placing: Moves the model.
        additions: Is kept here, by the model, and by nobody else: it knows all modules,
            and where one of them knows the whole, the model would never be dropped.
    """

    def __init__(self, placing: Placing, additions: object) -> None:
        self._placing = placing
        self._additions = additions

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        placing = self._placing
        model = placing.model
        place = placing.torch_device
        kinds = set()
        for dtype, shape, form in dict.fromkeys(map(_kind, model.parameters())):
            probe = torch.empty(shape, dtype=dtype, device="cpu", memory_format=form)
            result = fn(probe)
            if not result.is_contiguous(memory_format=form):
                raise ConfigError(
                    f"{type(model).__name__} is streamed and its weights cannot have"
                    f" another memory format than {form}; call the runtime's"
                    " shutdown(), change it, and stream the model again"
                )
            if result.dtype != dtype:
                raise ConfigError(
                    f"{type(model).__name__} is streamed and cannot be cast from"
                    f" {dtype} to {result.dtype}; call the runtime's shutdown(), cast,"
                    " and stream it again, or pass dtype= when streaming; what a"
                    " pipeline casts while it runs, as the decoder of SDXL, has to be"
                    " whole on the device: shutdown(), and model.to(device)"
                )
            if result.device != place and result.device.type != "cpu":
                raise ConfigError(
                    f"{type(model).__name__} is streamed to {place} and cannot be moved"
                    f" to {result.device}; call the runtime's shutdown() first"
                )
            kinds.add(result.device.type)
        stays = place.type == "cpu" and placing.runs  # to where it computes now
        if "cpu" in kinds and not stays:
            placing.park()
        elif kinds:
            placing.place()
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give the copy the ordinary method. It is copied last."""
        self._placing.end_copy()
        copied = memo[id(self._placing.model)]
        return MethodType(type(copied)._apply, copied)

    def __reduce__(self) -> Any:
        """Give the pickled model the ordinary method. It is pickled last."""
        self._placing.resume()
        return getattr, (self._placing.model, "_apply")


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], Any]:
    """Return what a move makes a difference by, with the smallest such shape."""
    form = _CHANNELS_LAST.get(tensor.dim())
    if form is None:
        return tensor.dtype, (0,), torch.contiguous_format
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=form):
        form = torch.contiguous_format
    return tensor.dtype, tuple(min(size, 2) for size in tensor.shape), form
