"""Hooks around `state_dict()` and `load_state_dict()` of a streamed model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stagehand.core.belongings import places_of_belongings
from stagehand.core.layout import same_bits
from stagehand.weights.hooks import Hook, module_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from stagehand.weights.edges import Edges

__all__ = ["PartLoading", "StateAsked", "StateGiven", "StateLoaded", "StateLoading"]


class StateAsked(Hook):
    """Runs before `state_dict()`: brings every tensor to the host.

    So what is saved is on one device, and has whole storages. The tensors stay there
    until all are read, whatever other threads run. In the middle of a pass they are
    left where they are; only blocks that are there by rows are completed.

    Attributes:
        keeps: Whether the parameters themselves were asked for (`keep_vars`): then they
            are left on the host afterwards.
        leaves: Whether some are left on the device, so that copies are to be given.
    """

    __slots__ = ("_complete", "_edges", "_hand_out", "keeps", "leaves")

    def __init__(
        self, edges: Edges, hand_out: Callable[[], bool], complete: Callable[[], None]
    ) -> None:
        self._edges = edges
        self._hand_out = hand_out
        self._complete = complete
        self.keeps = False
        self.leaves = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._edges.running():
            self.leaves = False  # not before: another thread may be reading
            self._complete()
        else:
            self._edges.begin_reading(module_frame(), self._bring)
            self.keeps = keep_vars

    def _bring(self) -> None:
        self.leaves = self._hand_out()


class StateGiven(Hook):
    """Runs after `state_dict()`: lets passes go on, and what stays come back.

    PyTorch sets `_from_public_api`.
    """

    __slots__ = ("_asked", "_edges", "_from_public_api", "_resume")

    def __init__(
        self, asked: StateAsked, edges: Edges, resume: Callable[[], None]
    ) -> None:
        self._asked = asked
        self._edges = edges
        self._resume = resume

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:
        try:
            if not self._asked.keeps:
                if self._asked.leaves:
                    _bring_copies(state, prefix)
                self._resume()
        finally:
            self._edges.end_reading(module_frame())


def _bring_copies(state: dict[str, Any], prefix: str) -> None:
    """Put copies on the host in place of tensors on the device, one for each tensor."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, given in state.items():
        if not (name.startswith(prefix) and isinstance(given, torch.Tensor)):
            continue
        if given.device.type in ("cpu", "meta"):
            continue
        key = given.data_ptr(), given.dtype, given.shape, given.stride()
        if key not in copies:
            copies[key] = given.cpu()
        state[name] = copies[key].detach()


class PartLoading(Hook):
    """Runs before a module loads its own tensors, whichever `load_state_dict()` asks.

    It waits for copies to the device that may still read what is about to be written.
    """

    __slots__ = ("_await_copies",)

    def __init__(self, await_copies: Callable[[], None]) -> None:
        self._await_copies = await_copies

    def __call__(self, *_: Any) -> None:
        self._await_copies()


class StateLoading(Hook):
    """Runs before `load_state_dict()`: notes in which modules the tensors are."""

    __slots__ = ("_known", "belonged", "places")

    def __init__(self, model: nn.Module) -> None:
        self._known = {
            id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
        }
        self.places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.belonged: dict[str, torch.Tensor] = {}

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.places = [
            (part, name, tensor)
            for part in module.modules()
            for place in (part._parameters, part._buffers)
            for name, tensor in place.items()
            if tensor is not None
        ]
        self.belonged = {p.name: p.tensor for p in places_of_belongings(module)}

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the model had the tensor when it was streamed."""
        return id(tensor) in self._known


class StateLoaded(Hook):
    """Runs after `load_state_dict()`: undoes what `assign=True` does.

    That replaces the model's tensors. Here they return to their places, and get the
    values and gradients of those that were assigned.

    A tensor that was in several places, which have different values now, stays in the
    first of them; what was assigned to the others joins the model. So does what was
    assigned in place of what had joined, or of what belonged to a weight.
    """

    __slots__ = ("_loading", "_look_again")

    def __init__(self, loading: StateLoading, look_again: Callable[[], None]) -> None:
        self._loading = loading
        self._look_again = look_again

    def __call__(self, module: nn.Module, *_: Any) -> None:
        places, self._loading.places = self._loading.places, []
        belonged, self._loading.belonged = self._loading.belonged, {}
        for place in [*places_of_belongings(module)]:
            known, loaded = belonged.get(place.name), place.tensor
            if known is loaded:
                continue
            if known is None or not _is_alike(known, loaded):
                self._look_again()
                continue
            known.data = loaded.data
            place.put(known)
        found = [(*place, getattr(place[0], place[1], None)) for place in places]
        taken = {id(tensor): tensor for *_, tensor, given in found if given is tensor}
        for part, name, tensor, given in found:
            if isinstance(given, torch.Tensor) and given is not tensor:
                if not self._loading.is_known(tensor):
                    self._look_again()
                    continue
                first = taken.setdefault(id(tensor), given)
                if first is not given and not _is_equal(first, given):
                    continue
                tensor.grad = None
                tensor.data = given.data
                if given.is_leaf:
                    tensor.grad = given.grad
                setattr(part, name, tensor)  # modules may define `__setattr__`


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not _is_alike(one, other):
        return False
    return same_bits(one.detach().cpu(), other.detach().cpu())


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
