"""Checks of what blocks compute, on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stagehand.core.telemetry import Counters

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Counts NaN and infinite values in the outputs of blocks.

    Counting is queued on the device; the host waits for the numbers once a step.

    Cost: one pass over each output and two numbers a block until the step ends.

    Args:
        counters: Where `collect` adds what was found.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._found: list[torch.Tensor] = []

    def look_at(self, output: Any) -> None:
        """Queue the count for every floating-point tensor of a module's output."""
        if isinstance(output, torch.Tensor):
            if output.is_floating_point() or output.is_complex():
                with torch.no_grad():
                    counts = (torch.isnan(output).sum(), torch.isinf(output).sum())
                    self._found.append(torch.stack(counts))
        elif isinstance(output, dict):
            self.look_at(list(output.values()))
        elif isinstance(output, list | tuple):
            for item in output:
                self.look_at(item)

    def collect(self) -> None:
        """Add what was found since the last call to the counters."""
        found, self._found = self._found, []
        for counts in found:
            nans, infs = counts.tolist()
            self._counters.nan_count += nans
            self._counters.inf_count += infs
