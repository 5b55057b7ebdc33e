"""Looks rows of large tables up on the host, so that they cross and not their table."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.core.saved import Kept
from stagehand.torch_private import (
    SavedHooks,
    WeakMode,
    looked_through,
    push_saved_hooks,
    take_off_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.autograd.graph import Node

    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block
    from stagehand.residency.scheduler import Scheduler
    from stagehand.weights.edges import Edges

__all__ = ["RowGather"]


class RowGather:
    """Looks rows up on the host, so that they cross the link and not their table.

    Active inside the forward of embeddings whose table stays on the host. Waits for the
    indices: they decide which rows cross.

    Args:
        model: Whose tables they are.
        counters: Where lookups are counted.
        tables: The block of each table, by the table's id.
        edges: The model's; rows go where it computes.
        scheduler: Told of lookups that read a table on the device.
        follow: Called with a table and the node that goes back through a lookup, and
            whether others may have read the table before it in the same place.
    """

    def __init__(
        self,
        model: nn.Module,
        counters: Counters,
        tables: Mapping[int, Block],
        edges: Edges,
        scheduler: Scheduler,
        follow: Callable[[torch.Tensor, Node, bool], None],
    ) -> None:
        self.mode = WeakMode(self, weakref.ref(model))
        self.busy = False
        """Whether rows are looked up at this moment."""
        self._counters = counters
        self._tables = tables
        self._edges = edges
        self._scheduler = scheduler
        self._follow = follow

    def see(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Replace a lookup in a table on the host; pass everything else on."""
        if func is not nn.functional.embedding or self._edges.is_torn():
            return func(*args, **kwargs)
        self.busy = True
        try:
            with _out_of_checkpoints():
                return self._lookup(*args, **kwargs)
        finally:
            self.busy = False

    def _lookup(
        self,
        input: torch.Tensor,  # noqa: A002 - the name in torch's own signature
        weight: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        block = self._tables.get(id(weight))
        if block is not None and (block.bound or _is_tied_and_trains(block, weight)):
            joins = block.bound
            (self._scheduler.join if joins else self._scheduler.before)(block)
            try:
                rows = nn.functional.embedding(input, weight, *args, **kwargs)
                if rows.grad_fn is not None:
                    self._follow(weight, rows.grad_fn, joins)
                return rows
            finally:
                self._scheduler.after(block)
        if block is not None:
            # Somebody may have pointed the table elsewhere.
            self._scheduler.take_in(block)
        if weight.device == input.device == self._edges.device:
            return nn.functional.embedding(input, weight, *args, **kwargs)
        self._counters.gathers += 1
        rows = nn.functional.embedding(input.to(weight.device), weight, *args, **kwargs)
        self._counters.h2d_bytes += rows.numel() * rows.element_size()
        return rows.to(self._edges.device)


@contextmanager
def _out_of_checkpoints() -> Iterator[None]:
    """Let a lookup keep what it saves, its indices, in spite of a checkpoint around it.

    A node on the host runs in another thread than those on the device, beside them: to
    unpack what a checkpoint has saved it would recompute the region there, while the
    other thread brings blocks. And a checkpoint expects the same of a region each time,
    wherever the table is.
    """
    if not torch.is_grad_enabled():
        yield
        return
    try:
        push_saved_hooks(_keep, Kept.get)
        yield
    finally:
        try:
            take_off_hooks(_before_kept)
        finally:
            take_off_hooks(_before_kept)  # what an interrupt has left


def _before_kept(pair: SavedHooks) -> tuple[()] | None:
    return () if pair[0] is _keep else None


@looked_through
def _keep(saved: torch.Tensor) -> Kept:
    return Kept(saved)


def _is_tied_and_trains(block: Block, table: torch.Tensor) -> bool:
    """Whether a table's gradient has parts that are made on the device.

    Then all are, so that they are added in the order in which autograd meets them.
    """
    read_there = block.read_elsewhere or not block.hosted
    return read_there and table.requires_grad and torch.is_grad_enabled()
