"""Training steps: of adapters, of all weights, and with much saved for backward."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.tasks.base import Room, Task, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.gpu.blocks import State
    from benchmarks.gpu.rates import Rates

__all__ = ["Checkpointed", "FineTuning", "Lora", "Saved", "adapt", "loss_of", "stepped"]

_RATE = 1e-4
_FLYING = 3  # blocks: one in backward, one that leaves, one to spare
_PASSES = 7  # AdamW reads 4 numbers for each parameter, and writes 3


class _Adapter(nn.Module):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, base: nn.Linear, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        out: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


def adapt(module: nn.Module, rank: int, generator: torch.Generator) -> None:
    """Put an adapter around every linear layer.

    Args:
        module: Whose.
        rank: Of the products.
        generator: Of their values, on the host: so they are the same everywhere.
    """
    for name, child in list(module.named_children()):
        if not isinstance(child, nn.Linear):
            adapt(child, rank, generator)
            continue
        rows, columns = child.weight.shape
        parts = [
            torch.randn(size, generator=generator).mul_(size[-1] ** -0.5 / rank)
            for size in ((rank, columns), (rows, rank))
        ]
        setattr(module, name, _Adapter(child, *(p.to(child.weight) for p in parts)))


class Checkpointed(nn.Module):
    """A stack that computes each block again in backward."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.blocks = stack.blocks

    def forward(self, *state: torch.Tensor) -> State:
        """Apply all blocks."""
        for block in self.blocks:  # type: ignore[union-attr]
            state = checkpoint(block, *state, use_reentrant=False)
        return state


class _Training(Task):
    """Forward, backward, and the optimizer's step."""

    trains = True
    checkpoints = True
    overlaps = False
    """Whether the optimizer runs beside backward, and has to end what it began."""

    def __init__(self, models: list[nn.Module], states: Sequence[State]) -> None:
        if self.checkpoints:
            models = [Checkpointed(model) for model in models]
        super().__init__(models, states)
        self.loss: torch.Tensor | None = None

    @property
    def trained(self) -> list[nn.Parameter]:
        """See `Task`."""
        return [p for m in self.models for p in m.parameters() if p.requires_grad]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return what steps them. A way may put its own in this place."""
        return torch.optim.AdamW(self.trained, lr=_RATE, fused=True)

    def begin(self) -> None:
        """See `Task`."""
        self.optimizer = self.make_optimizer()

    def outcome(self) -> list[torch.Tensor]:
        """See `Task`. The loss, and all gradients; weights stay as they are."""
        self.forward()
        assert self.loss is not None
        found = [self.loss.detach().cpu()]
        self.came = time.perf_counter()
        self.backward()
        found += [_whole(p.grad) for p in self.trained if p.grad is not None]
        if self.overlaps:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def phases(self) -> Sequence[Callable[[], object]]:
        """See `Task`."""
        return self.forward, self.backward, self._update

    def forward(self) -> None:
        """Compute the loss. A way may put its own in this place, and in the next's."""
        with self.saving:
            outputs = [
                out
                for model, state in zip(self.models, self.states, strict=True)
                for out in model(*state)[:2]
            ]
            self.loss = loss_of(outputs)

    def backward(self) -> None:
        """Let all that is trained have a gradient."""
        assert self.loss is not None
        self.loss.backward()  # type: ignore[no-untyped-call]
        self.loss = None

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is made smaller: the outputs, all alike."""
    squares = [out.float().square().mean() for out in outputs]
    return torch.stack(squares).sum()


def stepped(
    weight: torch.Tensor, gradient: torch.Tensor, place: torch.device
) -> torch.Tensor:
    """Return what the first step of PyTorch's AdamW makes of a weight that lies there.

    Last bits depend on the place: the host's kernel and a device's round differently.
    """
    copy = weight.to(place, copy=True)
    copy.grad = gradient.to(place)
    torch.optim.AdamW([copy], lr=_RATE, fused=True).step()
    return copy.cpu()


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """On the host, and plain: what is sharded over one process lies in it."""
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return local.to("cpu", copy=True)


class Lora(_Training):
    """Adapters on frozen weights, with checkpoints."""

    def streamed_weights(self) -> Iterable[torch.Tensor]:
        """See `Task`. The frozen ones."""
        return [w for w in super().streamed_weights() if not w.requires_grad]

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. max(C_f, (W - V) / B) + max(C_b, (W - V + A) / B) + optimizer.

        For at most V of the weights W can be there when a phase starts, and what is
        computed again uses weights that backward needs as well. A is what was spilled
        in forward, over the other lane. Of W - V the disk reads what no host memory
        has, in both.
        """
        forward, backward, update = seconds
        crossing, spilled = room.crossing_bytes, room.spilled_bytes
        disk = room.read_bytes / rates.disk if rates.disk else 0.0
        forward = max(forward, crossing / rates.h2d, spilled / rates.d2h, disk)
        backward = max(backward, (crossing + spilled) / rates.h2d, disk)
        return forward + backward + update


class FineTuning(_Training):
    """All weights, with checkpoints."""

    copies_home = 4

    def flying_bytes(self) -> int:
        """See `Task`. Gradients of some blocks, the largest ones."""
        blocks = [b for m in self.models for b in m.blocks]  # type: ignore[union-attr]
        return _FLYING * max(nbytes_of(b.parameters()) for b in blocks)

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. All gradients go home, and the host steps what streams."""
        forward, backward, _ = seconds
        crossing = room.crossing_bytes
        home = room.whole_bytes / rates.d2h_both
        host = _PASSES * room.whole_bytes / (2 * rates.host)  # a copy reads and writes
        back = max(backward, crossing / rates.h2d_both, home)
        return max(forward, crossing / rates.h2d) + (
            max(back, host) if self.overlaps else back + host
        )


class Saved(_Training):
    """Adapters on weights that stay, without checkpoints: backward needs much."""

    checkpoints = False
    at_home = False

    def streamed_weights(self) -> Iterable[torch.Tensor]:
        """See `Task`. None."""
        return []

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. What is over the budget leaves in forward, returns in backward.

        A way that keeps it all needs no more than compute.
        """
        forward, backward, update = seconds
        over = room.crossing_bytes
        return max(forward, over / rates.d2h) + max(backward, over / rates.h2d) + update
