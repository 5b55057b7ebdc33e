"""The nodes of a part of a graph, and which of them make terms of gradients."""

import math
from collections.abc import Iterator
from typing import Any

from torch.autograd.graph import Node

from stagehand.core.trees import tensors_in

__all__ = ["nodes_of", "terms_of"]


def terms_of(output: Any, since: int) -> dict[Node, list[tuple[Node, int]]]:
    """Return the terms of which autograd adds up the gradients of leaves.

    Args:
        output: What a part of a graph has computed: tensors in containers.
        since: The sequence number of the first node that belongs to the part.

    Returns:
        For each leaf's `AccumulateGrad` node: the nodes that make its terms, each with
        the number of the gradient among those that the node makes.
    """
    found: dict[Node, list[tuple[Node, int]]] = {}
    for node in nodes_of(output, since):
        for number, (following, _) in enumerate(node.next_functions):
            if following is not None and _is_leaf(following):
                found.setdefault(following, []).append((node, number))
    return found


def nodes_of(output: Any, since: int, until: float = math.inf) -> Iterator[Node]:
    """Yield the nodes of a part of a graph, back from what it has computed.

    Args:
        output: As in `terms_of`; the nodes that made it come first.
        since: As in `terms_of`.
        until: The sequence number of the first node after the part.
    """
    waiting = [t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if (
                following is not None
                and following not in seen
                and since <= following._sequence_nr() < until
                and not _is_leaf(following)
            ):
                seen.add(following)
                waiting.append(following)


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")
