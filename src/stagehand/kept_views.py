"""Views of weights that functions keep by themselves.

A `torch.autograd.Function` saves tensors for its backward by `save_for_backward()`, of
which hooks are told. Some assign them to attributes of their context instead, as the
4-bit layers of bitsandbytes do with a view of their weight. Such a view would keep the
memory of a slot until the graph is gone. So when a site ends, the nodes that it has
added to the graph are looked through: where a view lies in a slot, its node has a
handle from then on. It gets a view of the block where that lies then just before it
runs, and the handle again after that.

Most sites have no such functions. They are looked through in their first call that a
backward can follow, and later only when the memory of their block's slot had to be left
to somebody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.autograd.function import BackwardCFunction

from stagehand.core.terms import nodes_of
from stagehand.graph import WeightHandle
from stagehand.torch_private import sequence_number, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.autograd.graph import Node

    from stagehand.graph import SavedTensors
    from stagehand.residency.blocks import Block, Reader

__all__ = ["KeptViews"]


class KeptViews:
    """Takes views of weights out of what a site adds to the graph.

    Args:
        saved: Makes handles of views, and views of handles.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def begin(self, reader: Reader) -> None:
        """A site begins that is to be looked through."""
        reader.first = sequence_number()

    def end(self, block: Block, reader: Reader, output: Any) -> None:
        """Look through the nodes that a site has added, back from its output."""
        nodes = [*nodes_of(output, reader.first)]
        found = [self._hide(n) for n in nodes if isinstance(n, BackwardCFunction)]
        if nodes and not any(found):
            reader.looked = block.abandoned

    def _hide(self, node: Node) -> bool:
        """Let a node have handles instead of views; return whether it had any."""
        attributes = vars(node)
        packed = {
            name: handles
            for name, value in attributes.items()
            if (handles := _mapped(value, self._saved.handle_of)) is not value
        }
        if not packed:
            return False
        hidden = _Hidden(node, packed, self._saved.unpacking())
        attributes.update(packed)
        node.register_prehook(hidden.show)
        node.register_hook(hidden.hide)
        return True


class _Hidden:
    """What a node has instead of views.

    Args:
        node: Has it, and holds this by its hooks.
        packed: Its attributes, with handles in them.
        unpack: Brings a handle's block, and returns the view.
    """

    __slots__ = ("_node", "_packed", "_unpack")

    def __init__(
        self,
        node: Node,
        packed: dict[str, Any],
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        self._node = ref(node)
        self._packed = packed
        self._unpack = unpack

    @skipped
    def show(self, *_: Any) -> None:
        """Give the node views, for it runs next."""
        self._put({k: _mapped(v, self._unpacked) for k, v in self._packed.items()})

    @skipped
    def hide(self, *_: Any) -> None:
        """Take them from it again: the graph may be gone through once more."""
        self._put(self._packed)

    def _put(self, attributes: dict[str, Any]) -> None:
        node = self._node()
        if node is not None:
            vars(node).update(attributes)

    def _unpacked(self, item: Any) -> Any:
        return self._unpack(item) if type(item) is WeightHandle else item


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value, or lists, tuples and dicts of values, with each changed.

    What has nothing to change is returned itself.
    """
    if type(value) is dict:
        changed = {key: _mapped(item, change) for key, item in value.items()}
        return changed if any(changed[k] is not value[k] for k in value) else value
    if type(value) is list or type(value) is tuple:
        items = [_mapped(item, change) for item in value]
        is_new = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if is_new else value
    return change(value)
