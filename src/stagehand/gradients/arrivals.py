"""Gradients that arrive in staging memory, and what a thread does with them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from stagehand.core.arena import Lease
    from stagehand.core.device import Event
    from stagehand.core.traffic import Parcel

    Listener = Callable[[Sequence[nn.Parameter]], None]

__all__ = ["Arrival", "combine", "take_in"]


class Arrival(NamedTuple):
    """A gradient in staging memory, and what it becomes part of."""

    parcel: Parcel | None
    """What it was put aside as, if it yields to loads."""
    lease: Lease
    staged: torch.Tensor
    target: torch.Tensor
    adds: bool


def combine(target: torch.Tensor, there: torch.Tensor, *, adds: bool) -> None:
    """Add a gradient to another one, or put it in its place."""
    with torch.no_grad():
        if adds:
            target.add_(there)
        else:
            target.copy_(there)


def take_in(
    done: Event,
    arrivals: Sequence[Arrival],
    complete: Sequence[nn.Parameter],
    listeners: Sequence[Listener],
) -> None:
    """A thread's part: what arrived becomes part of gradients, and is made use of."""
    done.synchronize()
    waiting = deque(arrivals)
    try:
        while waiting:
            combine(waiting[0].target, waiting[0].staged, adds=waiting[0].adds)
            waiting.popleft().lease.release()
    finally:
        for left in waiting:
            left.lease.release()
    if complete:
        for listener in listeners:
            listener(complete)
