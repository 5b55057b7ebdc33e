"""What the benchmarks stream: stacks of tiny blocks on a device that costs nothing."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagehand.assembly import Settings
from stagehand.core.device import Event, HostDevice, Stream
from stagehand.residency.blocks import Block
from stagehand.residency.finding import find_blocks
from stagehand.runtime import Runtime

__all__ = [
    "LOOKAHEAD",
    "AdaptedStack",
    "FreeDevice",
    "Stack",
    "make_runtime",
    "make_stack",
    "streamed_blocks",
]

LOOKAHEAD = 3
_REGION = 8  # layers: a transformer's block has about as many
_PLENTY = 10**10  # bytes, where a budget shall not matter


class _FreeEvent:
    """An event of a stream that is always idle."""

    def record(self, stream: Any = None) -> None:
        """Cost nothing."""

    def query(self) -> bool:
        """Say that the work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return no time: it was made without timing."""
        return 0.0


class FreeDevice(HostDevice):
    """A device apart from the host whose copies move nothing and whose streams are
    idle.

    What is left is the library's own work on the host. All weights there are zero.
    """

    is_host = False

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return zeros: numbers that are denormal would slow the blocks down."""
        return super().empty(nbytes).zero_()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Stream | None = None
    ) -> None:
        """Copy nothing."""

    def new_event(self, *, timing: bool = False) -> Event:
        """Return an event that reads no clock unless it is asked to."""
        return super().new_event(timing=True) if timing else _FreeEvent()


class _Block(nn.Module):
    """Linear layers of 16 x 16, two parameters each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply one after the other."""
        out: torch.Tensor = self.layers(x)
        return out


class Stack(nn.Module):
    """`depth` blocks, one after the other, each of `layers` linear layers."""

    def __init__(self, depth: int, layers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(layers) for _ in range(depth))
        self.part = depth
        """So many blocks are a part, at whose ends the clock is read."""
        self.marks: list[float] | None = None
        """What the thread's clock said there, forward and then backward, if asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all blocks."""
        blocks = iter(self.blocks)
        while part := list(islice(blocks, self.part)):
            for block in part:
                x = block(x)
            if self.marks is not None:
                self._mark()
                if x.requires_grad:
                    x.register_hook(self._mark)
        return x

    def _mark(self, _: torch.Tensor | None = None) -> None:
        if self.marks is not None:
            self.marks.append(time.thread_time())


class _Adapted(nn.Module):
    """A frozen linear layer beside a trained product of rank 4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(4, 16))
        self.up = nn.Parameter(torch.zeros(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        out: torch.Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return out


class AdaptedStack(Stack):
    """`depth` layers with adapters, some of them at a time in a checkpointed region."""

    def __init__(self, depth: int) -> None:
        super().__init__(0)
        self.blocks.extend(_Adapted() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers, and each region once more for backward."""
        layers = iter(self.blocks)
        while region := list(islice(layers, _REGION)):
            x = checkpoint(nn.Sequential(*region), x, use_reentrant=False)
        return x


def make_stack(depth: int, *layers: int, kind: type[Stack] = Stack) -> Stack:
    """Return a stack that lies in memory as in a process of its own.

    What earlier models have left is collected first: in the gaps between that, the
    blocks of a new one are far apart, and a use takes up to a third longer.
    """
    gc.collect()
    with _uncollected():
        return kind(depth, *layers)


def make_runtime(
    model: Stack, *, budget_bytes: int = _PLENTY, pattern: str = r"^blocks\.\d+$"
) -> Runtime:
    """Stream a stack block by block on a free device that is its own.

    So several models can take turns, and none gives way to another.

    Args:
        model: What is streamed.
        budget_bytes: For weights.
        pattern: Which modules are blocks.
    """
    settings = Settings(
        device=FreeDevice(),
        budget_bytes=budget_bytes,
        pinned_bytes=_PLENTY,
        lookahead=LOOKAHEAD,
        shared=False,
    )
    with _uncollected():
        return Runtime(model, find_blocks(model, pattern), settings)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do not look for garbage meanwhile: a third of the time, where there is none."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def streamed_blocks(runtime: Runtime) -> list[Block]:
    """Return the blocks of a runtime, in order."""
    return runtime._parts.streamed
