"""What the benchmarks stream: stacks of tiny blocks on a device that costs nothing."""

import torch
from torch import nn

from stagehand.assembly import Settings
from stagehand.core.device import HostDevice
from stagehand.residency.blocks import Block, find_blocks
from stagehand.runtime import Runtime

__all__ = ["FreeDevice", "PairBlock", "Stack", "make_runtime", "streamed_blocks"]

LOOKAHEAD = 3
_PLENTY = 10**10  # bytes, where a budget shall not matter


class FreeDevice(HostDevice):
    """A device apart from the host whose copies move nothing and whose streams are
    idle.

    What is left is the library's own work on the host. Outputs are meaningless.
    """

    is_host = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy nothing."""


class PairBlock(nn.Module):
    """Two linear layers of 16 x 16: four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply one after the other."""
        return self.second(self.first(x))


class Stack(nn.Module):
    """`depth` blocks, one after the other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def make_runtime(model: Stack, *, budget_bytes: int = _PLENTY) -> Runtime:
    """Stream a stack block by block on a free device."""
    settings = Settings(
        device=FreeDevice(),
        budget_bytes=budget_bytes,
        pinned_bytes=_PLENTY,
        lookahead=LOOKAHEAD,
    )
    return Runtime(model, find_blocks(model, r"^blocks\.\d+$"), settings)


def streamed_blocks(runtime: Runtime) -> list[Block]:
    """Return the blocks of a runtime, in order."""
    return runtime._parts.streamed
