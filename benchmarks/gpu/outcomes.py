"""Outcomes that can be the same bits, whether they are, and how far they are apart."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils import deterministic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["difference", "equal", "repeatable"]


@contextmanager
def repeatable() -> Iterator[None]:
    """Let each sum be added in one order, which fused attention's gradients are not.

    Steps that are timed do without. CUDA's matrix library wants to be asked for it by
    CUBLAS_WORKSPACE_CONFIG in the environment as well.
    """
    fills = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills


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
