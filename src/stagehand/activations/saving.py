"""What users hold: a context inside which saved tensors are kept under a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagehand.activations.pieces import SavedHandle
from stagehand.activations.spill import Scope, Spill
from stagehand.core.arena import Arena
from stagehand.core.device import find_device
from stagehand.core.ledger import Account
from stagehand.core.saved import Kept
from stagehand.torch_private import pop_saved_hooks, push_saved_hooks
from stagehand.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["Activations"]

_SMALLEST_BYTES = 4096  # a copy of less costs more than it frees
_NO_PINNED_LIMIT = 1 << 62


class Activations:
    """Keeps what autograd saves inside it under a budget; one object for all steps.

    Enter it around the forward pass, or around forward and backward; outside of any
    checkpointed region. It can be entered again while graphs of earlier entries live.

    Args:
        budget: Device bytes of saved tensors: an int, "2GB", or "20%" of what is free.
        ram_budget: Page-locked host bytes for what leaves; None for no limit of its
            own.
        device: Where the model computes: the accelerator by default. On the host there
            is nowhere to spill to: everything stays.

    Example:
        >>> saved = stagehand.activations(budget="2GB")
        >>> with saved:
        ...     loss = model(batch).sum()
        >>> loss.backward()
    """

    def __init__(
        self,
        budget: int | str,
        *,
        ram_budget: int | str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        place = find_device(device)
        nbytes = parse_bytes(budget, name="budget", of=place.free_bytes())
        limit = _NO_PINNED_LIMIT
        if ram_budget is not None:
            limit = parse_bytes(ram_budget, name="ram_budget")
        account = Account("pinned memory for saved tensors", limit)
        self._arena = Arena("pinned memory", place.pinned, account, spare=1.25)
        self._spill = Spill(
            place, self._arena, budget_bytes=nbytes, smallest_bytes=_SMALLEST_BYTES
        )
        self._scopes: list[Scope] = []

    def __repr__(self) -> str:
        spill = self._spill
        return (
            f"Activations({format_bytes(spill.held_bytes)} of"
            f" {format_bytes(spill.budget_bytes)} on the device,"
            f" {spill.spilled_count} spilled)"
        )

    def __enter__(self) -> None:
        """Begin a forward."""
        scope = Scope()
        self._scopes.append(scope)

        def pack(saved: torch.Tensor) -> Any:
            return self._spill.save(saved, scope) or Kept(saved)

        push_saved_hooks(pack, self._unpack)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; what was saved stays under the budget."""
        pop_saved_hooks()
        scope = self._scopes.pop()
        if kind is None:
            self._spill.end(scope)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedHandle):
            return self._spill.restore(packed)
        kept: torch.Tensor = packed.get()
        return kept

    def close(self) -> None:
        """Give back the pinned memory of graphs that are gone. Idempotent."""
        self._spill.close()
        self._arena.trim()
