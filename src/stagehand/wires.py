"""Decides which blocks cross the link in another form, and has device memory for it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from stagehand.errors import ConfigError, StagehandOOMError, StagehandWarning
from stagehand.units import format_at_least, format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from stagehand.assembly import Parts, Settings
    from stagehand.residency.blocks import Block
    from stagehand.stores.base import Wire

__all__ = ["Wires"]

_MORE = 0.08  # of a larger budget, which may keep so much more of small weights


class Wires:
    """The wires of one runtime's blocks.

    Device memory: one piece of the longest wire's size, a second one where the budget
    leaves room for two more blocks, and what torch operators decode in where there are
    no kernels. It is taken off the budget for weights.

    Args:
        parts: Of the runtime.
        settings: Of the runtime; they say whether to pack what is in memory.
    """

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self._parts = parts
        self._packs = settings.transport == "packed" and not parts.device.is_host
        self._lookahead = settings.lookahead
        self._told = False
        self._frozen: dict[str, torch.Tensor] = {}
        # Of the memory to decode from:
        self._count = 0
        self._nbytes = 0
        self._scratch = 0
        if settings.transport == "packed" and parts.device.is_host:
            self._warn(
                "transport='packed' changes nothing: the model computes on the host,"
                " and nothing crosses a link"
            )

    @property
    def _device_type(self) -> str:
        return self._parts.device.torch_device.type

    def freeze(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse to take gradients for some tensors from now on, by their names."""
        self._frozen.update(tensors)

    def check_frozen(self) -> None:
        """Do nothing unless gradients would be taken for a frozen tensor.

        Raises:
            ConfigError: Otherwise.
        """
        for name, tensor in self._frozen.items():
            if tensor.requires_grad:
                raise ConfigError(
                    f"gradients are asked for parameter {name!r}, whose values are"
                    " quantized: expected requires_grad=False, found True; call"
                    " requires_grad_(False) on it and train an adapter, or run under"
                    " torch.no_grad()"
                )

    def must_leave(self) -> Block | None:
        """Return a block that trains and has a wire, which it may not keep."""
        return next((b for b in self._wired() if _trains(b)), None)

    def prepare(self, *, trains: bool) -> None:
        """Pack what shall be packed; blocks are off the device.

        Args:
            trains: Whether gradients are about to be taken.
        """
        if trains:
            for block in self._wired():
                if _trains(block):
                    self._parts.masters.unpack(block)
                    block.cross_plain()
        if not self._packs:
            return
        parts = self._parts
        wanted = [b for b in parts.streamed if not (trains and _trains(b))]
        stubborn = parts.masters.pack_all(wanted, self._device_type, self._lookahead)
        plain = [b for b in parts.streamed if b.wire is None]
        if plain and not self._told:
            self._told = True
            self._explain(plain, stubborn, len(wanted))

    def check(self, wires: Iterable[Wire | None]) -> None:
        """Do nothing if the budget has room to decode such wires.

        Raises:
            StagehandOOMError: Otherwise; it names the smallest budget that works.
        """
        longest, scratch = self._taken_by(wires)
        self._check(longest + scratch, self._parts.budget_bytes, more=_MORE)

    def reserve(self) -> None:
        """Count what the wires there are need at least, until they are opened.

        So that nobody takes it, who makes room or shares the device.
        """
        parts = self._parts
        parts.wire_bytes = sum(self._taken_by(block.wire for block in self._wired()))
        # Others may have pressed the limit down to what was the least until now.
        least = parts.steering.smallest_budget() + parts.apart_bytes
        limit = max(parts.weights.limit_bytes, least)
        parts.plan_within(limit)
        parts.weights.set_limit(limit)

    def open(self) -> None:
        """Have device memory for the wires there are, and plan for the rest.

        Raises:
            StagehandOOMError: If the budget is too small for it.
        """
        parts, limit = self._parts, self._parts.weights.limit_bytes
        wired = self._wired()
        before, self._count = parts.wire_bytes, 0
        self._nbytes, self._scratch = self._taken_by(block.wire for block in wired)
        parts.wire_bytes = 0
        if wired:
            self._check(self._nbytes + self._scratch, limit)
            self._count = self._count_in(limit)
            parts.wire_bytes = self._count * self._nbytes + self._scratch
        if wired or parts.wire_bytes != before:
            parts.plan_within(limit)
            parts.steering.steer()
        if wired:
            parts.engine.open_wires(
                parts.device_arena,
                count=self._count,
                nbytes=self._nbytes,
                scratch_nbytes=self._scratch,
            )

    def plan_within(self, limit_bytes: int) -> None:
        """Plan for a limit, with one piece of memory if it is too small for two.

        Raises:
            StagehandOOMError: If it cannot work; all stays as it was then.
        """
        parts = self._parts
        shrinks = self._count == 2 and self._count_in(limit_bytes) == 1
        if shrinks:
            self._count = 1
            parts.wire_bytes -= self._nbytes
        try:
            parts.plan_within(limit_bytes)
        except BaseException:
            if shrinks:
                self._count = 2
                parts.wire_bytes += self._nbytes
            raise
        if shrinks:
            parts.engine.resize_wires(self._count)

    def _taken_by(self, wires: Iterable[Wire | None]) -> tuple[int, int]:
        """Return the device memory of the longest wire, and of what decodes it."""
        taken = self._parts.device.taken_bytes
        found = [wire for wire in wires if wire is not None]
        longest = max((wire.nbytes for wire in found), default=0)
        scratch = max((wire.scratch_nbytes for wire in found), default=0)
        return taken(longest), taken(scratch)

    def _wired(self) -> list[Block]:
        return [block for block in self._parts.blocks if block.wire is not None]

    def _count_in(self, limit_bytes: int) -> int:
        parts = self._parts
        spare = limit_bytes - parts.odd_bytes - 2 * self._nbytes - self._scratch
        largest = max((block.slot_nbytes for block in parts.streamed), default=0)
        return 2 if spare >= parts.steering.smallest_budget() + 2 * largest else 1

    def _check(self, nbytes: int, limit: int, *, more: float = 0.0) -> None:
        """Refuse a limit that holds no `nbytes` beside what it must hold.

        The smallest budget that the error names is larger by the share `more`.
        """
        parts = self._parts
        smallest = parts.steering.smallest_budget() + parts.odd_bytes
        needed = smallest + nbytes
        if limit >= needed:
            return
        needed += int(more * needed)
        raise StagehandOOMError(
            f"the budget is {format_limit(limit, needed)}, but"
            f" {format_at_least(needed)} must be on the device at once:"
            f" {format_bytes(smallest)} of weights, and"
            f" {format_bytes(nbytes)} for a block as it crosses the link and is"
            f" decoded; raise the budget to at least {format_at_least(needed)}",
            needed_bytes=needed,
            limit_bytes=limit,
        )

    def _explain(
        self, plain: Sequence[Block], stubborn: Sequence[Block], wanted: int
    ) -> None:
        filed = sum(b.store is not None and b.needs_staging for b in plain)
        reasons = []
        if stubborn:
            reasons.append(
                f"{len(stubborn)}, {stubborn[0].name!r} first, would not shrink: only"
                " bfloat16 weights do"
            )
        trained = len(self._parts.streamed) - wanted
        if trained:
            reasons.append(f"{trained} are trained")
        others = len(plain) - len(stubborn) - trained
        if filed and others > 0:
            reasons.append(
                f"{others} come from files, which `stagehand convert --packed` packs,"
                " or exceed ram_budget"
            )
        self._warn(
            f"{len(plain)} of {len(self._parts.streamed)} blocks cross the link as they"
            f" are, in spite of transport='packed': {'; '.join(reasons)}"
        )

    def _warn(self, text: str) -> None:
        warnings.warn(text, StagehandWarning, stacklevel=4)


def _trains(block: Block) -> bool:
    return any(tensor.requires_grad for tensor in block.tensors)
