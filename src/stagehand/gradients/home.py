"""Where the gradient of one streamed parameter goes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from stagehand.core.layout import placed_like
from stagehand.gradients.uses import Uses
from stagehand.torch_private import (
    graph_task,
    hide_hooks,
    keeps_graph,
    more_hooks,
    show_hooks,
    storage_key,
    tensor_key,
    tensor_use_count,
    use_count_of,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from stagehand.core.arena import Arena, Lease
    from stagehand.gradients.uses import Use
    from stagehand.residency.blocks import Block

__all__ = ["HOMES", "Home"]


class Home:
    """Where the gradient of one parameter goes.

    Between backward passes `grad` is None. In one, it is what `param.grad` will be:
    either what it was before, or the new place; None as long as nothing came.
    """

    __slots__ = (
        *("__weakref__", "block", "handles", "of", "parameter"),
        *("alone", "idle", "key", "lease", "place"),
        *("came", "cast", "earlier", "grad", "had", "more", "parts"),
        *("hidden", "spent", "task", "touched", "unseen", "uses", "whole"),
    )

    def __init__(self, parameter: torch.Tensor, block: Block) -> None:
        self.parameter = parameter
        self.of = tensor_key(parameter)  # its hooks are called for this
        self.block = block
        self.handles: list[RemovableHandle] = []
        self.lease: Lease | None = None
        self.place: torch.Tensor | None = None
        """The leased memory as what lies there."""
        self.alone = 0  # the memory's reference count when only these two hold it
        self.key = 0  # its storage's `_cdata`
        self.grad: torch.Tensor | None = None
        self.whole = False
        """Whether the device's gradient has `grad` in it already."""
        self.touched = False
        """Whether this backward pass has come to it."""
        self.had = False
        """Whether there was a gradient when this backward pass came to it."""
        self.came = False
        """Whether this backward pass has brought a gradient."""
        self.idle = False
        """Whether the node that runs now adds nothing: its gradient is None."""
        self.earlier: torch.Tensor | None = None
        """What was there before, if the sum of what comes is to be added to it."""
        self.more = False
        """Whether another part of the gradient may come in this backward pass."""
        self.parts = False
        """Whether `more` was true at any time in this backward pass: then listeners are
        not told of the gradient, for a recompute may still bring a part."""
        self.spent = block.bindings
        """How many of the `AccumulateGrad` nodes made for it cannot run any more."""
        self.cast = False
        """Whether autocast casts it: a cast's node may have been made for no graph, and
        runs again for each further graph of the same region."""
        self.task = -1
        """The call of autograd that has brought a gradient last."""
        self.uses: Uses | None = None
        """Known ones: hooks of users wait until the last has come."""
        self.unseen = -1
        """The latest call of autograd that has brought a part without these hooks."""
        self.hidden: dict[int, Any] | None = None
        """Hooks of users, while a part is added without them."""

    def count(self) -> None:
        """Note that an `AccumulateGrad` node has run, and whether another one may.

        The nodes that are left, or may run again, are at most as many as were made and
        are not spent. They are also at most as many as live; but a spent node lives on
        as long as somebody keeps what was computed. Behind casts none is ever spent.
        """
        live = tensor_use_count(self.parameter) - 1
        left = live if self.cast else self.block.bindings - self.spent
        self.parts = self.parts or left > 1
        left = max(1, min(left, live))
        self.spent = self.block.bindings - left + (not keeps_graph())
        self.more = left > 1
        self.task = graph_task()

    def end_backward(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Forget a backward; return the gradient that it has brought, and what that is
        to be added to."""
        grad, self.grad = self.grad, None
        earlier, self.earlier = self.earlier, None
        self.whole = self.touched = self.came = self.parts = False
        self.show_hooks()
        return grad, earlier

    def add_use(self, use: Use) -> None:
        """Note a use of the weight in a graph."""
        if self.uses is None:
            self.uses = Uses()
        self.uses.add(use)

    def has_unseen(self) -> bool:
        """Whether the host has a sum that users' hooks shall see with the next part.

        They have seen what this call of autograd has brought, unless it was hidden: of
        what another call has brought, the resident model has the sum in `grad`, too.
        """
        task = graph_task()
        return self.grad is not None and (self.unseen == task or self.task != task)

    def hide_hooks(self) -> None:
        """Let autograd call no hook of users behind the addition that comes next."""
        self.show_hooks()  # those of a part that did not come
        self.unseen = graph_task()
        self.hidden = more_hooks(self.parameter, but=self.handles[-1])
        hide_hooks(self.parameter, self.hidden)

    def show_hooks(self) -> None:
        """Put hooks of users back. Idempotent."""
        if self.hidden is not None:
            show_hooks(self.parameter, self.hidden)
            self.hidden = None

    def fits(self, grad: torch.Tensor) -> bool:
        """Whether a gradient can lie as its parameter does, whose shape it has."""
        return grad.dtype is self.parameter.dtype and grad.layout is torch.strided

    def laid_out(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient that comes as its weight lies, or None where it does so.

        Autograd copies one that lies otherwise to where the weight is: to the host, if
        its block has left, past the order of additions.
        """
        if self.block.bound or grad is None or is_grad_enabled():
            return None  # mostly
        parameter = self.parameter
        if grad.device == parameter.device or grad.layout is not torch.strided:
            return None
        if grad.stride() == parameter.stride():
            return None
        like = torch.empty_like(parameter, dtype=grad.dtype, device=grad.device)
        return like.copy_(grad)

    def own_place(self, arena: Arena) -> torch.Tensor | None:
        """Return pinned memory for a gradient that nobody else holds, if there is any.

        As a tensor of its own: whoever keeps it shows in the reference count.
        """
        lease, place = self.lease, self.place
        if lease is not None and place is not None:
            if use_count_of(self.key) <= self.alone:
                return place.detach()
            lease.abandon()  # somebody keeps an earlier gradient
        like = self.parameter
        nbytes = like.numel() * like.element_size()
        self.lease = lease = arena.acquire_nowait(nbytes, "a gradient")
        if lease is None:
            self.place = None
            return None
        self.place = placed_like(like, lease.buffer)
        self.key = storage_key(lease.buffer)
        self.alone = use_count_of(self.key)
        return self.place.detach()

    def dismiss(self) -> None:
        """Take the hooks off, and leave the gradient to its parameter. Idempotent."""
        for handle in self.handles:
            handle.remove()
        if HOMES.get(id(self.parameter)) is self:
            del HOMES[id(self.parameter)]  # a traceback may keep it
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.let_go(self.alone)


HOMES: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
"""Those of all runtimes, by the parameter's id."""
