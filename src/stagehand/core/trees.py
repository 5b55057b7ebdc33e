"""Which tensors lie in containers of any depth."""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in containers of any depth, and how it is reached.

    Args:
        tree: Tensors, and dicts, lists and tuples of them; all else is passed over.
        name: What the tree itself is called.
    """
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from tensors_in(item, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from tensors_in(item, f"{name}[{number}]")
