"""The uses of a weight in a graph, each of which makes a term of its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from stagehand.torch_private import graph_task, node_that_runs, will_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node

__all__ = ["Use", "Uses"]


class Use:
    """A hook of the node that makes a term. It lives as long as its graph.

    Args:
        sums: The `AccumulateGrad` node that the term goes to.
        feed: Called with the node's gradients; returns others, or None.
    """

    __slots__ = ("__weakref__", "_feed", "ran", "sums")

    def __init__(self, sums: Node, feed: Callable[[tuple[Any, ...]], Any]) -> None:
        self.sums = sums
        self._feed = feed
        self.ran = -1
        """The latest call of autograd that has run `sums`."""

    def __call__(self, grads: tuple[Any, ...], _: object) -> Any:
        return self._feed(grads)


class Uses:
    """All known uses of a weight that a backward may come to."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: WeakSet[Use] = WeakSet()

    def add(self, use: Use) -> None:
        """Add a use whose graph has just been made."""
        self._all.add(use)

    def more_come(self) -> bool:
        """Note that an `AccumulateGrad` node runs; say whether others will.

        In this call of autograd, which adds the terms of all to one gradient where the
        weight is resident.
        """
        task, runs, more = graph_task(), node_that_runs(), False
        for use in self._all:
            if use.sums is runs:
                use.ran = task
            elif use.ran != task and will_run(use.sums):
                more = True
        return more
