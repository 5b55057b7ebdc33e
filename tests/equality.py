"""Lists of tensors that must be equal, and equally long."""

from collections.abc import Callable, Iterable

import torch

__all__ = ["all_equal"]


def all_equal(
    found: Iterable[torch.Tensor],
    expected: Iterable[torch.Tensor],
    equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
) -> bool:
    """Whether each tensor is the expected one; as many must have been found."""
    return all(equal(*pair) for pair in zip(found, expected, strict=True))
