"""Views of weights that functions keep by themselves.

A `torch.autograd.Function` saves tensors for its backward by `save_for_backward()`, of
which hooks are told. Some assign them to attributes of their context instead, as the
4-bit layers of bitsandbytes do with a view of their weight. Such a view would keep the
memory of a slot until the graph is gone. So when a site ends, the nodes that it has
added to the graph are looked through: a view that lies in a slot has its memory taken
from it, as weights have between their uses. It lies in its block again, wherever that
is then, while its node runs. It stays the object that it was: the same for all nodes
that keep it, with its class, its attributes and its place in the graph.

Who else holds it would find it empty. So it is left as it is where it is held, or its
container is, by others than the nodes; and after a run, where that has handed it, or
the context, to somebody.

Most sites have no such functions. They are looked through in their first call that a
backward can follow, and later only when the memory of their block's slot had to be left
to somebody.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from stagehand.core.saved import emptied
from stagehand.core.terms import nodes_of
from stagehand.torch_private import sequence_number, skipped, tensor_use_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.autograd.graph import Node

    from stagehand.graph import SavedTensors
    from stagehand.residency.blocks import Block, Reader
    from stagehand.residency.handles import WeightHandle

__all__ = ["KeptViews"]


def _own_references() -> int:
    item = object()
    return getrefcount(item)


# To what a local variable has, its own and that to count. What a function of Python is
# called with may be held once more, or not: it depends on who compiles.
_OWN = _own_references()

_CONTAINERS = (dict, list, tuple)


class KeptViews:
    """Takes the memory of slots from views that nodes keep.

    Args:
        saved: Makes handles of views, and views of handles.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        # Whose nodes run: one, or some inside of each other.
        self._shown: dict[_Hidden, None] = {}

    def begin(self, reader: Reader) -> None:
        """A site begins that is to be looked through; not one inside of itself."""
        reader.first = sequence_number()

    def end(self, block: Block, reader: Reader, output: Any) -> None:
        """Look through the nodes that a site has added, back from its output."""
        # A recompute's graph goes on into the forward's, which another thread may have
        # made: its numbers are any.
        nodes = [*nodes_of(output, reader.first, sequence_number())]
        reader.first = -1
        found = self._found(n for n in nodes if isinstance(n, BackwardCFunction))
        for node, views in found.items():
            hidden = _Hidden(node, views, self._saved.unpacking(), self._shown)
            node.register_prehook(hidden.show)
            node.register_hook(hidden.hide)
        for view in {view for views in found.values() for view in views}:
            view.empty()
        if nodes and not found:
            reader.looked = block.abandoned

    def give_up(self) -> None:
        """Take memory from the views of nodes that have raised as they ran.

        What they have raised may hold the views, too, in frames that run no more.
        """
        while self._shown:
            hidden, _ = self._shown.popitem()
            hidden.empty()

    def _found(self, nodes: Iterable[Node]) -> dict[Node, list[_View]]:
        """Return the nodes that keep views which nobody else holds, and these."""
        keepers: dict[int, list[Node]] = {}
        handles: dict[int, tuple[torch.Tensor, WeightHandle]] = {}
        for node in nodes:
            for tensor in _tensors_of(node):
                key = id(tensor)
                if key not in keepers and (handle := self._saved.handle_of(tensor)):
                    keepers[key] = []
                    handles[key] = tensor, handle
                if key in keepers:
                    keepers[key].append(node)
        found: dict[Node, list[_View]] = {}
        while handles:
            key, (tensor, handle) = handles.popitem()
            held = getrefcount(tensor) - _OWN + tensor_use_count(tensor)
            if held == len(keepers[key]) + 1:
                view = _View(tensor, handle)
                for node in dict.fromkeys(keepers[key]):
                    found.setdefault(node, []).append(view)
        return found


class _View:
    """A view that nodes keep.

    It is held weakly: a function lets go of it as it would have without this.
    """

    __slots__ = ("_handle", "_tensor")

    def __init__(self, tensor: torch.Tensor, handle: WeightHandle) -> None:
        self._tensor = ref(tensor)
        self._handle = handle

    def fill(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        """Let it lie where its block does."""
        tensor = self._tensor()
        if tensor is not None:
            tensor.data = unpack(self._handle)

    def held(self) -> int:
        """How often it is held, for comparisons."""
        tensor = self._tensor()
        if tensor is None:
            return 0
        return getrefcount(tensor) + tensor_use_count(tensor)

    def empty(self) -> None:
        """Take its memory from it."""
        tensor = self._tensor()
        if tensor is not None:
            emptied(tensor)


class _Hidden:
    """The views of a node, which have memory while it runs.

    Args:
        node: Keeps them, and holds this by its hooks.
        views: They may be other nodes' as well.
        unpack: Brings a handle's block, and returns the view.
        shown: Those of nodes that run.
    """

    __slots__ = (
        *("_depth", "_held", "_node", "_node_held"),
        *("_shown", "_unpack", "_views"),
    )

    def __init__(
        self,
        node: Node,
        views: list[_View],
        unpack: Callable[[Any], torch.Tensor],
        shown: dict[_Hidden, None],
    ) -> None:
        self._node = ref(node)
        self._views = views
        self._unpack = unpack
        self._shown = shown
        self._depth = 0  # of runs inside of each other, by a backward in one
        self._node_held = 0
        self._held: list[int] = []

    @skipped
    def show(self, *_: Any) -> None:
        """Give the views memory, for their node runs next."""
        self._shown[self] = None
        self._depth += 1
        for view in self._views:
            view.fill(self._unpack)
        if self._depth == 1:
            self._held = [view.held() for view in self._views]
            self._node_held = self._count()

    @skipped
    def hide(self, *_: Any) -> None:
        """Take it from them, unless somebody has got hold of them meanwhile.

        The graph may be gone through once more.
        """
        self._depth -= 1
        if self._depth:
            return
        self._shown.pop(self, None)
        if self._count() > self._node_held:
            return
        running = {view for hidden in self._shown for view in hidden._views}
        for view, held in zip(self._views, self._held, strict=True):
            if view not in running and view.held() <= held:
                view.empty()

    def empty(self) -> None:
        """Take it from all of them, whoever holds them."""
        self._depth = 0
        for view in self._views:
            view.empty()

    def _count(self) -> int:
        node = self._node()
        return 0 if node is None else getrefcount(node)


def _tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """Yield the tensors in a node's attributes and its own containers of any depth."""
    waiting = [*vars(node).values()]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, _CONTAINERS) and getrefcount(item) == _OWN + 1:
            waiting += item.values() if isinstance(item, dict) else item
