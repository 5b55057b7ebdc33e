"""Where the states of an optimizer lie: beside their parameter, pinned on request."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from stagehand.core.arena import Arena, Lease
from stagehand.core.copies import clear
from stagehand.core.device import Device
from stagehand.core.layout import layout_of
from stagehand.core.ledger import Account
from stagehand.errors import ConfigError

__all__ = ["MOMENTS", "StateMemory", "check_shapes"]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""What torch calls the averages that Adam keeps for each element of a parameter."""

_PINNED = "pinned memory for optimizer states"


def check_shapes(parameter: torch.Tensor, saved: dict[str, Any]) -> None:
    """Do nothing if loaded moments can be those of a parameter.

    Raises:
        ConfigError: If one has another shape.
    """
    for name in MOMENTS:
        if name in saved and saved[name].shape != parameter.shape:
            raise ConfigError(
                f"the loaded {name} has shape {list(saved[name].shape)}, but its"
                f" parameter has {list(parameter.shape)}; load the state of an"
                " optimizer with the same parameters in the same order"
            )


class StateMemory:
    """Makes the states of parameters, and moves them to where the parameters are.

    Memory: a parameter's moments have its shape, in `dtype` or in its own; pinned, they
    share one image, in which each starts at a multiple of 256 bytes.

    Args:
        dtype: Element type of all moments; None for each parameter's own.
        device: The device for whose copies moments in host memory are page-locked;
            None for ordinary memory.
    """

    def __init__(self, dtype: torch.dtype | None, device: Device | None) -> None:
        self._dtype = dtype
        self._leases: dict[torch.Tensor, Lease] = {}
        self._arena: Arena | None = None
        if device is not None:
            account = Account(_PINNED, sys.maxsize)
            self._arena = Arena(_PINNED, device.pinned, account)

    def new(
        self, parameter: torch.Tensor, names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return moments of zeros; those that the parameter had are given up."""
        self._give_up(parameter)
        likes = [(name, self._like(parameter)) for name in names]
        arena = self._arena_for(parameter)
        if arena is None:
            where = parameter.device
            return {name: torch.zeros_like(like, device=where) for name, like in likes}
        layout = layout_of(likes)
        holder = f"states of a parameter of shape {list(parameter.shape)}"
        lease = arena.acquire(layout.nbytes, holder)
        self._leases[parameter] = lease
        return dict(zip(names, layout.host_views(clear(lease.buffer)), strict=True))

    def follow(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Move a state to where its parameter is now."""
        if state["exp_avg"].device == parameter.device:
            return
        names = [name for name in MOMENTS if name in state]
        moved = {
            name: moment.copy_(state[name])
            for name, moment in self.new(parameter, names).items()
        }
        state.update(moved, step=state["step"].to(parameter.device))

    def adopt(self, parameter: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded state as one of this memory.

        Tensors that lie and look as they should are taken over, not copied.
        """
        state = dict(saved)
        names = [name for name in MOMENTS if name in saved]
        if "step" in saved:  # a number in checkpoints of old versions of torch
            state["step"] = torch.as_tensor(
                saved["step"], dtype=torch.float32, device=parameter.device
            )
        if not all(self._fits(parameter, saved[name]) for name in names):
            for name, moment in self.new(parameter, names).items():
                state[name] = moment.copy_(saved[name])
        return state

    def clear(self) -> None:
        """Give up the memory of all parameters' states."""
        for parameter in list(self._leases):
            self._give_up(parameter)

    def _arena_for(self, parameter: torch.Tensor) -> Arena | None:
        return self._arena if parameter.device.type == "cpu" else None

    def _like(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(parameter, dtype=self._dtype, device="meta")

    def _fits(self, parameter: torch.Tensor, moment: torch.Tensor) -> bool:
        like = self._like(parameter)
        return (
            self._arena_for(parameter) is None
            and moment.device == parameter.device
            and moment.dtype == like.dtype
            and moment.stride() == like.stride()
        )

    def _give_up(self, parameter: torch.Tensor) -> None:
        # To whoever still has its tensors: a `state_dict()` that is being written.
        lease = self._leases.pop(parameter, None)
        if lease is not None:
            lease.abandon()
