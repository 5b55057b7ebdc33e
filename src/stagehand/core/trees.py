"""Which tensors lie in containers of any depth."""

from collections import UserDict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(
    tree: Any, name: str = "", above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in containers of any depth, and how it is reached.

    Args:
        tree: Tensors, and dicts, lists, tuples and dataclasses of them. Of any other
            object the tensors are found that are attributes of it; what they hold in
            turn, as a cache or a configuration does, is passed over.
        name: What the tree itself is called.
        above: The dataclasses that hold it, which may hold each other.
    """
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | UserDict):  # as the batches of tokenizers are
        for key, item in tree.items():
            yield from tensors_in(item, f"{name}[{key!r}]", above)
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from tensors_in(item, f"{name}[{number}]", above)
    elif isinstance(tree, type):
        return
    elif is_dataclass(tree):
        if not any(each is tree for each in above):
            for field in fields(tree):
                item = getattr(tree, field.name, None)
                yield from tensors_in(item, f"{name}.{field.name}", (*above, tree))
    else:
        for key, item in getattr(tree, "__dict__", {}).items():
            if isinstance(item, torch.Tensor):
                yield f"{name}.{key}", item
