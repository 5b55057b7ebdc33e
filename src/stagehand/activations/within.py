"""A context inside which saved tensors are kept under a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.parts import Parts, report_of, state_of
from stagehand.core.device import find_device
from stagehand.units import parse_bytes

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["Activations"]


class Activations:
    """Keeps what autograd saves inside it under a budget; one object for all steps.

    Enter it around the forward pass, or around forward and backward; outside of any
    checkpointed region. It can be entered again while graphs of earlier entries live.

    Args:
        budget: Device bytes of saved tensors: an int, "2GB", or "20%" of what is free.
        ram_budget: Page-locked host bytes for what leaves; None for no limit of its
            own. Beyond it, pageable memory is used, with a warning.
        device: Where the model computes: the accelerator by default. On the host there
            is nowhere to spill to: everything stays, with a warning.

    Raises:
        ConfigError: If a budget is not a size.

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
        parse_bytes(budget, name="budget", of=1 << 62)  # None would be watermarks
        config = ActivationStagehandConfig(budget=budget, ram_budget=ram_budget)
        self._parts = Parts(find_device(device), config)

    def __repr__(self) -> str:
        return f"Activations({state_of(self._parts.spill)})"

    def __enter__(self) -> None:
        """Begin a forward."""
        self._parts.saving.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; what was saved stays under the budget.

        Raises:
            ConfigError: If this thread has not entered it.
        """
        self._parts.saving.leave(failed=kind is not None)
        self._parts.pool.grow()

    def paused(self) -> Any:
        """Return a context in which autograd saves as usual.

        For what refuses hooks for saved tensors, as `torch.func.grad` does.
        """
        return self._parts.saving.paused()

    def report(self) -> str:
        """Return what is done with forwards like the last one, and what it costs."""
        return report_of(self._parts)

    def close(self) -> None:
        """Give back the page-locked memory of graphs that are gone. Idempotent."""
        self._parts.spill.close()
