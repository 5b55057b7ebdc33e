"""Tensors in containers of any depth: which there are, and how to move them."""

from collections import UserDict, defaultdict
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["moved_to", "tensors_in"]


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


def moved_to(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on the device.

    A container in which nothing has to move is returned itself: models pass lists and
    dicts that they change, such as caches.

    Args:
        tree: Tensors, and dicts, lists and tuples of them. Other objects are left as
            they are: to copy them would make others of them.
        device: Where the tensors shall be.
    """
    if isinstance(tree, torch.Tensor):
        return tree if tree.device == device else tree.to(device)
    if isinstance(tree, PackedSequence):  # whose batch sizes stay on the host
        return tree.to(device)  # type: ignore[arg-type]
    named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if named or type(tree) in (tuple, list):
        items = [moved_to(item, device) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if named else type(tree)(items)
    if isinstance(tree, dict | UserDict):  # as the batches of tokenizers are
        moved = {key: moved_to(value, device) for key, value in tree.items()}
        if all(moved[key] is value for key, value in tree.items()):
            return tree
        if isinstance(tree, UserDict | defaultdict):  # which are more than their items
            like = copy(tree)
            like.update(moved)
            return like
        return moved if type(tree) is dict else type(tree)(moved)
    return tree
