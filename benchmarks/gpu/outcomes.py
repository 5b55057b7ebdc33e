"""Are two outcomes the same bits, and how far are they apart?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["difference", "equal"]


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors have the same bits."""
    return all(
        torch.equal(_bits(a), _bits(b)) for a, b in zip(some, others, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def difference(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest between two numbers in the same place."""
    return max(
        (a.float() - b.float()).abs().max().item()
        for a, b in zip(some, others, strict=True)
    )
