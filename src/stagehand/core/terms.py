"""Which nodes of a graph make the terms of a weight's gradient."""

from typing import Any

from torch.autograd.graph import Node

from stagehand.core.trees import tensors_in

__all__ = ["terms_of"]


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
    waiting = [t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for number, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            if hasattr(following, "variable"):
                found.setdefault(following, []).append((node, number))
            elif following not in seen and following._sequence_nr() >= since:
                seen.add(following)
                waiting.append(following)
    return found
