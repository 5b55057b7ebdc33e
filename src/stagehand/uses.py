"""What happens where a site is called, and where autograd needs a block again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from stagehand.autocast import Casts
from stagehand.core.turn import HERE
from stagehand.differentiation import refuse_lost
from stagehand.errors import ClosedError
from stagehand.gradients.gradients import Gradients
from stagehand.graph import SavedTensors
from stagehand.kept_views import KeptViews
from stagehand.torch_private import has_more_hooks, in_function, sequence_number
from stagehand.weak_refs import weakly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import Node

    from stagehand.assembly import Parts
    from stagehand.residency.blocks import Block, Reader
    from stagehand.weak_refs import ModelRef
    from stagehand.weights.edges import Edges

__all__ = ["Uses"]


class Uses:
    """Has all that follows a use into graphs: saved tensors, casts, gradients.

    Graphs outlive their model: what they keep refers to this weakly.

    Args:
        model: The streamed model.
        parts: Of the runtime.
        edges: The model's.

    Attributes:
        owners: The streamed block of each parameter, by the parameter's id.
        saved: What graphs save of weights.
        push_hooks: See `SavedTensors.push_hooks`.
        kept: Views of weights that functions keep without saving them.
        casts: Autocast's.
        gradients: Brings gradients to the host; None if they are made there.
        took_gradients: Whether the latest forward may be gone back through.
    """

    def __init__(self, model: ModelRef, parts: Parts, edges: Edges) -> None:
        self._model = model
        self._scheduler = parts.scheduler
        self._edges = edges
        self.took_gradients = False
        self.owners = {
            id(tensor): block for block in parts.away for tensor in block.tensors
        }
        self.saved = SavedTensors(
            parts.scheduler,
            self.owners,
            weakly(self._fetch, _gone),
            weakly(self._turn_back),
            parts.device,
        )
        self.push_hooks = self.saved.push_hooks
        self.kept = KeptViews(self.saved)
        self.casts = Casts(parts.device, parts.scheduler, weakly(self._follow_cast))
        self.gradients = None if parts.device.is_host else self._made_gradients(parts)
        if self.gradients is not None:
            parts.scheduler.await_steps_with(weakly(self.gradients.await_steps))

    def _made_gradients(self, parts: Parts) -> Gradients:
        return Gradients(
            parts.device,
            parts.engine,
            parts.pinned_arena,
            parts.adders,
            turn=self._edges.lock,
            blocks=lambda: parts.away,
            enter=self._edges.enter_backward,
            fetch=self._fetch,
            begin=parts.scheduler.begin_training,
        )

    # Sites

    def track(self, block: Block, reader: Reader) -> object:
        """Begin a site's call, with gradients or under autocast.

        Returns:
            See `SavedTensors.push_hooks`.
        """
        if block.casts or torch.is_autocast_enabled(self._edges.device_type):
            self.casts.begin(block, reader)
        if not torch.is_grad_enabled():
            return None
        if reader.looked != block.abandoned and self._is_last(block):
            self.kept.begin(reader)
        follows = self.gradients is not None and block.trains
        if follows and self._makes_graph(hooked=block.hooked):
            reader.begin(block)
        if block.unseen:
            self.saved.site = block
            self.saved.latest = -1
            reader.began = sequence_number()
        return self.saved.push_hooks()

    def untrack(self, block: Block, reader: Reader, output: Any) -> None:
        """End what `track` began."""
        self.saved.site = None
        if block.unseen and torch.is_grad_enabled():
            self.saved.follow(block, output, reader.began)
        if reader.first >= 0 and self._is_last(block):
            self.kept.end(block, reader, output)
        if block.casts or torch.is_autocast_enabled(self._edges.device_type):
            self.casts.end(block, reader, output, last=self._is_last(block))
        if reader.since is not None and self.gradients is not None:
            self.gradients.end_use(reader, output)

    def _is_last(self, block: Block) -> bool:
        """Whether no other site reads a block while this one does."""
        return block.uses - (self._scheduler.fetched is block) <= 1

    def lend(self, blocks: Sequence[Block]) -> None:
        """Bring blocks, at the same time, for code that is no site of them."""
        if self.took_gradients and self.gradients is not None:
            self.gradients.watch([block for block in blocks if block.hosted])
        self._scheduler.before_all(blocks)

    def follow(self, table: torch.Tensor, node: Node, joins: bool) -> None:
        """See `Gradients.follow`; `joins` if sites may read it in the same binding."""
        hooked = has_more_hooks(table)
        if self.gradients is None or not (joins or hooked):
            return
        if self._makes_graph(hooked=hooked):
            self.gradients.follow(table, node)

    def _follow_cast(self, weight: torch.Tensor, node: Node) -> None:
        """See `Gradients.follow_cast`."""
        if self.gradients is not None:
            follows = self._makes_graph(hooked=has_more_hooks(weight))
            self.gradients.follow_cast(weight, node, notes=follows)

    def _makes_graph(self, *, hooked: bool) -> bool:
        """Whether terms of a weight that is read now are to be noted.

        In backward a recompute has a graph of its own. If autograd goes back through
        that as well, as for a reentrant checkpoint, hooks of users see its sum once.
        """
        return self.saved.backward is None or (hooked and in_function())

    # Autograd

    def _turn_back(self) -> None:
        """Begin a backward pass, for autograd unpacks what this model has saved.

        Inside of one, a function may ask for gradients of what it has saved itself.
        """
        if self.saved.backward is not None:
            refuse_lost(self.owners)
        elif self._model.is_open:
            self._edges.enter_backward()

    def _fetch(self, block: Block) -> None:
        """Bring a block to the device for autograd."""
        if not self._model.is_open:
            _gone(block)
        if self._edges.thread is not HERE.thread:
            self._edges.enter_backward()
        scheduler, gradients = self._scheduler, self.gradients
        left = scheduler.fetched
        if not (left is block or block.stays) or not scheduler.is_at_hand(block):
            if left is not None and left.trains and gradients is not None:
                scheduler.release_fetched()
                if gradients.has_listeners:
                    scheduler.send_home(left)
                gradients.pass_on()
            scheduler.fetch(block)
        if block.casts:
            self.casts.fetch(block)

    def release(self) -> None:
        """Let go of casts and views that autograd was given."""
        self.casts.release_fetched()
        self.kept.give_up()

    @property
    def missing_bytes(self) -> int:
        """See `Gradients.missing_bytes`."""
        return 0 if self.gradients is None else self.gradients.missing_bytes


def _gone(block: Block) -> NoReturn:
    """Refuse what a graph asks for that has outlived its model.

    Raises:
        ClosedError: Always.
    """
    raise ClosedError(
        f"a graph needs weights of block {block.name!r}, but the runtime that knows"
        " where they are was shut down, or its model is gone; run the forward again"
    )
