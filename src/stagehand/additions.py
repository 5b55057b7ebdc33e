"""Tensors that join or leave a model while it streams: adapters, a new head.

Nobody tells of them, so each pass looks whether all modules hold what they held. What
has joined stays on the device until it leaves, and counts against the budget. What is
on `meta` has not joined yet: adapters may be put there until their values are loaded.

Cost of a pass in which nothing changed: 0.1 ms for 1,000 modules of two parameters.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from stagehand.core.belongings import own_belongings
from stagehand.core.hidden_gradients import take_along
from stagehand.core.layout import moved, relocate
from stagehand.errors import ConfigError, StagehandOOMError
from stagehand.foreign import (
    TAKE_OFF,
    hook_of,
    hooked_tensors,
    refuse_batched,
    refuse_sharded,
    refuse_unmovable,
)
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.finding import how_to_raise, named_tensors
from stagehand.units import format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, ValuesView

    import torch

    from stagehand.assembly import Parts
    from stagehand.wires import Wires

__all__ = ["Additions"]

_END = (object(),)  # no module and no tensor: lists of these differ if one is longer
_children = itemgetter("_modules")


class Additions:
    """What joined one runtime's model since it streams.

    Not thread-safe: callers hold the runtime's lock.

    Args:
        model: As it was divided.
        parts: What it was divided into; what joins becomes one of its odd tensors.
        wires: What its blocks cross the link in, which takes a part of the budget.
        home: Where the model came from.
    """

    def __init__(
        self, model: nn.Module, parts: Parts, wires: Wires, home: torch.device
    ) -> None:
        self._model = weakref.ref(model)
        self._parts = parts
        self._wires = wires
        self._home = home
        self._joined: dict[int, torch.Tensor] = {}  # by id
        # The modules' dicts of children and parameters, and what these held at the last
        # look. A view of a dict's values is made once and stays current.
        self._tables: list[ValuesView[Any]] = []
        self._held: list[Any] = []
        # Attributes of sequences and lists: `del` gives these other dicts of children.
        self._lists: list[dict[str, Any]] = []
        # Those that held nothing, buffers included; and dicts of buffers with lengths.
        self._empty: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        self._counts: list[int] = []
        self._hooks = WeakSet(filter(None, map(hook_of, model.modules())))
        self._at_home: list[tuple[nn.Module, str]] = []  # buffers that were moved home
        self._note(model)

    def __repr__(self) -> str:
        return f"Additions({len(self._joined)} tensors)"

    @property
    def nbytes(self) -> int:
        """Bytes of all that joined and has not left."""
        return sum(map(tensor_bytes, self._joined.values()))

    def take_in(self) -> bool:
        """Bring what has joined to the device, and home what has left.

        Call between passes, when nothing is in use and something may have joined.

        Returns:
            Whether there was something; the plan is another one then.

        Raises:
            ConfigError: If autograd would expect its gradient elsewhere, or if hooks of
                `accelerate` have put it in place of what streamed.
            StagehandOOMError: If the budget is too small for it.
        """
        model = self._model()
        if model is None:
            return False
        unknown = self._unknown(model)
        self._refuse_taken_over(model, unknown)
        new = [tensor for tensor in unknown if not tensor.is_meta]
        self._refuse_computed(new)
        self._note(model)
        if len(new) < len(unknown):
            self.look_again()  # each time: values may come in place, unseen
        gone = self._gone(model)
        if not new and not gone:
            return False
        for tensor in gone:
            self._leave(tensor)
        for tensor in new:
            self._joined[id(tensor)] = tensor
            self._parts.odd.append(tensor)
        self._make_place(new)
        return True

    def refuse_new(self, used: str) -> None:
        """Refuse to begin a pass with tensors that cannot be brought to the device now.

        Args:
            used: A block that is in use.

        Raises:
            ConfigError: If there are any.
        """
        model, device = self._model(), self._parts.device
        if model is None or device.is_host or not self.may_have_joined():
            return
        new = self._unknown(model)
        self._refuse_taken_over(model, new)
        new = [t for t in new if not (t.is_meta or t.device == device.torch_device)]
        if new:
            raise ConfigError(
                f"{len(new)} tensors have joined {self._parts.weights.name} since it"
                f" streams, while block {used!r} is in use: they are brought to the"
                " device when none is; call after_block() before the next pass"
            )

    def drop_gone(self) -> bool:
        """Bring home what has left, where there is no room to begin a pass.

        Call between passes, when nothing is in use.

        Returns:
            Whether there was something: then less room is needed.
        """
        model = self._model()
        gone = [] if model is None else self._gone(model)
        for tensor in gone:
            self._leave(tensor)
        if gone:
            self._parts.grant_odd()
            self._wires.plan_within(self._parts.weights.limit_bytes)
        return bool(gone)

    def look(self) -> None:
        """Note what has joined, where the device is the host and nothing is moved.

        Raises:
            ConfigError: If hooks of `accelerate` keep what streamed.
        """
        model = self._model()
        if model is not None:
            self._refuse_taken_over(model, self._unknown(model))
            self._note(model)

    def look_again(self) -> None:
        """Let `may_have_joined` be true until the next look."""
        self._held = [*_END]

    def may_have_joined(self) -> bool:
        """Whether modules or tensors of the model are others than at the last look."""
        return (
            any(self._empty)
            or not all(map(is_, self._holding(), self._held))
            or list(map(len, self._buffers)) != self._counts
        )

    def _holding(self) -> Iterator[Any]:
        """Return what modules hold now, by identity, in the order of the last look."""
        tables = chain.from_iterable(self._tables)
        return chain(tables, map(_children, self._lists), _END)

    def take_home_unseen(self, home: torch.device) -> None:
        """Move what nobody has taken in: buffers that a forward has made, parameters
        that were computed from others, as where a parametrization was taken off."""
        model = self._model()
        known = self._known()
        for tensor in () if model is None else model.parameters():
            if id(tensor) in known or tensor.is_meta or not tensor.is_leaf:
                continue
            if tensor.device != home:
                relocate(tensor, home)
                take_along(tensor)
        for module in () if model is None else model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in known or buffer.is_meta:
                    continue
                if buffer.device != home:
                    module._buffers[name] = moved(buffer, home)
                    self._at_home.append((module, name))

    def bring_buffers(self) -> None:
        """Undo `take_home_unseen`, which moves parameters for good: they join."""
        place = self._parts.device.torch_device
        while self._at_home:
            module, name = self._at_home[-1]
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = moved(buffer, place)
            self._at_home.pop()

    def _note(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables = [t for m in modules for t in (m._modules, m._parameters)]
        buffers = [m._buffers for m in modules]
        self._tables = [table.values() for table in tables if table]
        self._empty = [table for table in (*tables, *buffers) if not table]
        lists = [m for m in modules if isinstance(m, nn.Sequential | nn.ModuleList)]
        self._lists = [module.__dict__ for module in lists]
        self._held = [*self._holding()]
        # Some models make buffers anew in each pass: only their number counts.
        self._buffers = [table for table in buffers if table]
        self._counts = list(map(len, self._buffers))

    def _unknown(self, model: nn.Module) -> list[torch.Tensor]:
        known = self._known()
        place = self._parts.device.torch_device
        own_belongings(p for p in model.parameters() if id(p) not in known)
        # A buffer that is on the device already was made there by a forward.
        known |= {id(b) for b in model.buffers() if b.device == place}
        tensors = {id(t): t for _, t in named_tensors(model)}
        return [t for key, t in tensors.items() if key not in known]

    def _gone(self, model: nn.Module) -> list[torch.Tensor]:
        """Return what had joined and is in the model no more."""
        present = {id(tensor) for _, tensor in named_tensors(model)}
        return [t for key, t in self._joined.items() if key not in present]

    def _known(self) -> set[int]:
        parts = self._parts
        blocks = {id(tensor) for block in parts.blocks for tensor in block.tensors}
        return blocks.union(map(id, parts.odd))

    def _refuse_computed(self, new: list[torch.Tensor]) -> None:
        """Refuse what autograd expects a gradient for where it was computed."""
        place = self._parts.device.torch_device
        for tensor in new:
            if tensor.grad_fn is not None and tensor.device != place:
                raise ConfigError(
                    f"a tensor of shape {list(tensor.shape)} that autograd computed on"
                    f" {tensor.device} has joined {self._parts.weights.name} since it"
                    f" streams: expected it on {place}; move it there first, where"
                    " autograd sees it"
                )

    def _refuse_taken_over(self, model: nn.Module, unknown: list[torch.Tensor]) -> None:
        if unknown:
            refuse_batched(self._parts.weights.name, unknown)
            refuse_sharded(model)
            refuse_unmovable(model)
            self._refuse_hooked(model, unknown)

    def _refuse_hooked(self, model: nn.Module, unknown: list[torch.Tensor]) -> None:
        """Refuse what hooks that are new have made of tensors that streamed.

        `accelerate` sets them, and its own tensors in their place: on the device, or on
        meta as long as they are not used.
        """
        new = set(map(id, unknown))
        for hook, place, is_own, tensor in hooked_tensors(model):
            if hook in self._hooks or id(tensor) not in new:
                continue
            if tensor.is_meta or is_own:
                raise ConfigError(
                    f"hooks of accelerate have put {place!r} of"
                    f" {self._parts.weights.name} on {tensor.device} while the"
                    " model streams, as cpu_offload(), dispatch_model() or"
                    " enable_sequential_cpu_offload() of a pipeline does; call"
                    f" runtime.shutdown(), take them off, with {TAKE_OFF}, and stream"
                    " the model again"
                )

    def _leave(self, tensor: torch.Tensor) -> None:
        parts = self._parts
        number = next(i for i, other in enumerate(parts.odd) if other is tensor)
        if number < parts.odd_placed:
            relocate(tensor, parts.odd_origin[number])
            take_along(tensor)
            parts.odd_placed -= 1
        del parts.odd[number], parts.odd_origin[number : number + 1]
        del self._joined[id(tensor)]

    def _make_place(self, new: list[torch.Tensor]) -> None:
        """Plan with what is left of the budget, and move what has joined."""
        parts = self._parts
        limit = parts.weights.limit_bytes
        try:
            self._wires.plan_within(limit)
        except StagehandOOMError as error:
            raise self._refusal(new, error.needed_bytes) from None
        parts.steering.steer()
        parts.device_arena.trim()  # what is kept for reuse counts, too
        if not parts.grant_odd():
            needed = parts.steering.smallest_budget() + parts.apart_bytes
            raise self._refusal(new, needed)
        parts.place_odd()
        for number, tensor in enumerate(parts.odd):
            if id(tensor) in self._joined:  # whose maker may have put it on the device
                parts.odd_origin[number] = self._home

    def _refusal(self, new: list[torch.Tensor], needed: int) -> StagehandOOMError:
        """Return the error, and forget what has joined: the next pass tries again."""
        parts = self._parts
        limit = parts.weights.limit_bytes
        for tensor in new:
            self._leave(tensor)
        parts.grant_odd()
        self._wires.plan_within(limit)
        self.look_again()
        needed = parts.scheduler.budget_for(needed)
        return StagehandOOMError(
            f"{len(new)} tensors, {format_bytes(sum(map(tensor_bytes, new)))} together,"
            f" have joined {parts.weights.name} since it streams, and the budget of"
            f" {format_limit(limit, needed)} has no room for them;"
            f" {how_to_raise(needed)}",
            needed_bytes=needed,
            limit_bytes=limit,
        )
