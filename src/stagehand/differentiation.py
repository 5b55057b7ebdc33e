"""Gradients of chosen weights, where these were moved after the forward.

PyTorch finds a weight in a graph through the weight, and forgets the way when the
weight is given memory on another device, as streaming does. The graph still knows its
weights, so they are looked up there. A weight that came to the device several times is
in the graph as often; its gradient is the sum, in the order in which autograd would
have added the parts.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from stagehand.errors import ConfigError
from stagehand.frames import arguments_of
from stagehand.torch_private import backward_call

__all__ = ["grad", "gradient_edges", "refuse_lost"]

_Tensors = torch.Tensor | Sequence[torch.Tensor]


def grad(
    outputs: _Tensors, inputs: _Tensors, *args: Any, **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """Do what `torch.autograd.grad` does, also for weights that are streamed.

    Args:
        outputs: What is differentiated, as there.
        inputs: What gradients are wanted of: weights, streamed or not, any other
            tensors of the graph, and its edges.
        args: As there: `grad_outputs` and what follows it.
        options: As there.

    Returns:
        One gradient for each input, of its shape and element type, on the device where
        it was made. No `.grad` is touched.

    Raises:
        ConfigError: If one of them is no tensor.
        RuntimeError: As `torch.autograd.grad`, for one if an input was not used.

    Example:
        >>> loss = model(batch).square().mean()
        >>> (found,) = stagehand.grad(loss, model.head.weight)
    """
    made = _listed("outputs", outputs)
    wanted = _listed("inputs", inputs, GradientEdge)
    nodes = _weights_of(made)
    edges: list[Any] = []
    counts = []
    for tensor in wanted:
        known = nodes.get(id(tensor), [])
        edges += [GradientEdge(node, 0) for node in known] or [tensor]
        counts.append(max(1, len(known)))
    parts = iter(torch.autograd.grad(made, edges, *args, **options))
    return tuple(_summed([next(parts) for _ in range(n)]) for n in counts)


def gradient_edges(outputs: _Tensors, inputs: _Tensors) -> list[GradientEdge]:
    """Return what to give `backward(inputs=...)` for weights that are streamed.

    Args:
        outputs: What `backward` is called for.
        inputs: The tensors that gradients are to be accumulated into, and no others.

    Returns:
        At least one edge for each input; a weight that came to the device several times
        has several.

    Raises:
        ConfigError: If an input is not part of the outputs' graph, or no tensor.

    Example:
        >>> some = list(model.blocks[3].parameters())
        >>> loss.backward(inputs=stagehand.gradient_edges(loss, some))
    """
    nodes = _weights_of(_listed("outputs", outputs))
    edges = []
    for number, tensor in enumerate(_listed("inputs", inputs)):
        if id(tensor) in nodes:
            edges += [GradientEdge(node, 0) for node in nodes[id(tensor)]]
        elif tensor.grad_fn is not None:
            edges.append(get_gradient_edge(tensor))
        else:
            raise ConfigError(
                f"input {number}, a tensor of shape {list(tensor.shape)}, was not used"
                " to compute the outputs: leave it out, or require its gradient before"
                " the forward"
            )
    return edges


def refuse_lost(streamed: Container[int]) -> None:
    """Refuse the call of autograd that runs here, if it cannot find what it asks for.

    A function of autograd computes again in its backward, and asks for gradients of
    what it has saved. Its graph has a weight at another node by then, if that was away
    since. Where it allows that something was not used, it would go on with zeros.

    Args:
        streamed: The ids of the parameters that stream.

    Raises:
        ConfigError: If the graph has one of them at another node than what was given.
    """
    call = backward_call()
    if call is None:
        return
    outputs, _, _, _, inputs, *_ = arguments_of(call)
    if not inputs:
        return  # mostly: a checkpoint, which asks for all there is
    asked: list[Any] = [
        get_gradient_edge(tensor).node
        for tensor in _tensors(inputs)
        if tensor.is_leaf and tensor.requires_grad
    ]
    asked = [node for node in asked if id(node.variable) in streamed]
    nodes = _weights_of(_tensors(outputs)) if asked else {}
    for node in asked:
        weight = node.variable
        if any(other is not node for other in nodes.get(id(weight), ())):
            raise ConfigError(
                "a function asks autograd, in its backward, for the gradient of a"
                f" weight of shape {list(weight.shape)} that has left the device since"
                " its forward, and PyTorch would take it for unused; expected a module"
                " that does not train, or that is a part of no streamed model"
            )


def _tensors(given: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in given if isinstance(each, torch.Tensor)]


def _listed(name: str, given: Any, *kinds: type) -> tuple[torch.Tensor, ...]:
    """Return tensors as a tuple.

    Raises:
        ConfigError: If one is neither a tensor nor of `kinds`, or there is none.
    """
    if isinstance(given, (torch.Tensor, *kinds)):  # an edge is a tuple, too
        given = [given]
    listed = tuple(given) if isinstance(given, Iterable) else ()
    if not listed:
        raise ConfigError(f"{name} is {given!r}: expected a tensor, or several")
    for number, each in enumerate(listed):
        if not isinstance(each, (torch.Tensor, *kinds)):
            raise ConfigError(f"{name}[{number}] is {each!r}: expected a tensor")
    return listed


def _weights_of(outputs: Sequence[torch.Tensor]) -> dict[int, list[Node]]:
    """Return the nodes at which a graph ends, by the id of the tensor they stand for.

    Those of one tensor are in the order in which autograd comes to them: what was used
    last comes first.
    """
    latest: dict[Node, int] = {}
    seen = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        made: Callable[[], int] = node._sequence_nr
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                latest[following] = max(latest.get(following, -1), made())
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    found: dict[int, list[Node]] = {}
    for node in sorted(latest, key=latest.__getitem__, reverse=True):
        found.setdefault(id(node.variable), []).append(node)  # type: ignore[attr-defined]
    return found


def _summed(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [part for part in parts if part is not None]
    total = there[0] if there else None
    for part in there[1:]:
        total = part if total is None else total + part
    return total
