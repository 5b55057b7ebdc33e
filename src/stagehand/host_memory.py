"""Divides `ram_budget` between what changed weights need and blocks kept from disk."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from stagehand.errors import StagehandWarning
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.keeping import choose_kept
from stagehand.units import format_at_least, format_bytes

if TYPE_CHECKING:
    from stagehand.assembly import Parts
    from stagehand.core.ledger import Grant
    from stagehand.residency.blocks import Block

__all__ = ["HostMemory"]


class HostMemory:
    """What one runtime holds in host memory of weights that come from files.

    Weights that were changed have to be there: their file has other values. They are
    counted first, and what is left keeps blocks from being read again and again. Where
    the model computes on the host, there is one memory, and the slots get what is left.

    Args:
        parts: Of the runtime.
        budget_bytes: Host memory in all.
    """

    def __init__(self, parts: Parts, budget_bytes: int) -> None:
        self.slots_bytes = sys.maxsize
        """What the slots may have of it, where these are in host memory."""
        self._parts = parts
        self._budget_bytes = budget_bytes
        self._changed = 0
        self._trains = False
        self._grant: Grant | None = None
        self._told = 0

    def account(
        self, changed_bytes: int, *, trains: bool, gradient_bytes: int = 0
    ) -> bool:
        """Count what was changed, and what is about to be; return whether that is new.

        Args:
            changed_bytes: Of tensors whose file has other values.
            trains: Whether a backward pass begins: an optimizer will change weights.
            gradient_bytes: That gradients will take of the same memory.
        """
        self._trains = self._trains or trains
        if self._trains:
            changed_bytes = max(changed_bytes, self._trained_bytes())
        if changed_bytes == self._changed:
            return False
        self._changed = changed_bytes
        if self._parts.device.is_host:
            room = self._give_slots_the_rest()
        else:
            room = self._take_from_kept(gradient_bytes)
        if changed_bytes > room and changed_bytes > self._told:
            self._told = changed_bytes
            self._warn(changed_bytes - room)
        return True

    def keep(self, gradient_bytes: int) -> None:
        """Choose which blocks from disk stay in host memory.

        Args:
            gradient_bytes: That gradients will take of the same memory.
        """
        parts = self._parts
        candidates = {block.index: block for block in self._from_disk()}
        if not candidates or parts.device.is_host:
            return
        room = parts.loader.room_to_keep() - gradient_bytes
        kept = choose_kept(parts.steering.workload(), candidates.keys(), room)
        parts.loader.keep([candidates[index] for index in kept])

    def _from_disk(self) -> list[Block]:
        """The blocks that cross the link again and again, from files."""
        parts = self._parts
        return [
            block
            for block in parts.streamed
            if block.needs_staging
            and not block.trains
            and block.index not in parts.steering.plan.resident
            and parts.masters.is_elsewhere(block)
        ]

    def _trained(self) -> list[Block]:
        masters = self._parts.masters
        return [
            block
            for block in self._parts.streamed
            if masters.is_elsewhere(block)
            and any(tensor.requires_grad for tensor in block.tensors)
        ]

    def _trained_bytes(self) -> int:
        return sum(
            tensor_bytes(tensor)
            for block in self._trained()
            for tensor in block.tensors
            if tensor.requires_grad
        )

    def close(self) -> None:
        """Count nothing any more. Idempotent."""
        if self._grant is not None:
            self._grant.release()
            self._grant = None

    def _take_from_kept(self, gradient_bytes: int) -> int:
        """Count changed weights in the account of pinned memory; return the room."""
        parts = self._parts
        self.close()
        room = max(0, parts.loader.room_to_keep() - gradient_bytes)
        if self._changed > room - parts.loader.kept_bytes:
            parts.loader.keep(())
            parts.pinned_arena.trim()
        account, wanted = parts.pinned_arena.account, min(self._changed, room)
        if wanted:
            self._grant = account.grant(wanted, "changed weights")
        return room

    def _give_slots_the_rest(self) -> int:
        """Make the slots smaller as far as they can be; return what that leaves."""
        parts = self._parts
        least = parts.steering.smallest_budget() + parts.apart_bytes
        self.slots_bytes = max(self._budget_bytes - self._changed, least)
        return self._budget_bytes - self.slots_bytes

    def _warn(self, missing: int) -> None:
        blocks = self._trained() if self._trains else self._parts.streamed
        first = f", {blocks[0].name!r} first," if blocks else ""
        warnings.warn(
            f"weights of {len(blocks)} blocks{first} are changed or about to be, and"
            f" take {format_bytes(self._changed)} of host memory beside their files:"
            f" {format_bytes(missing)} more than ram_budget (or pinned_pool_mb) leaves"
            f" for them; raise it to at least"
            f" {format_at_least(self._budget_bytes + missing)}",
            StagehandWarning,
            stacklevel=3,
        )
