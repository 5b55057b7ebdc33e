"""The UNet of SDXL: uneven blocks, most of their bytes near the middle.

The state is an image of channels, the embedded time, the text, and what the way down
left for the way up, last first out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.blocks.attention import Attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.blocks import State

__all__ = ["Down", "Middle", "Up"]

_GROUPS = 32


class _Convolved(nn.Module):
    """Two convolutions with the time between, and a third where channels change."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(c) for c in (channels, out))
        self.convs = nn.ModuleList(
            nn.Conv2d(c, out, 3, padding=1) for c in (channels, out)
        )
        self.time = nn.Linear(time, out)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return the image with `out` channels."""
        inner = self.convs[0](functional.silu(self.norms[0](x)))
        inner = inner + self.time(functional.silu(time))[..., None, None]
        inner = self.convs[1](functional.silu(self.norms[1](inner)))
        kept: torch.Tensor = x if self.short is None else self.short(x)
        return kept + inner


class _Layer(nn.Module):
    """Attention to the image, to the text, and a gated feed-forward: 20 tensors."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attentions = nn.ModuleList(
            Attention(width, source, heads=heads, head=width // heads, bias=False)
            for source in (width, text)
        )
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        normed = self.norms[0](x)
        x = x + self.attentions[0](normed, normed)
        x = x + self.attentions[1](self.norms[1](x), text)
        up, gate = self.up(self.norms[2](x)).chunk(2, -1)
        down: torch.Tensor = self.down(up * functional.gelu(gate))
        return x + down


class _Attended(nn.Module):
    """Layers over the image's points as tokens."""

    def __init__(self, channels: int, heads: int, text: int, layers: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.before = nn.Linear(channels, channels)
        self.layers = nn.ModuleList(
            _Layer(channels, heads, text) for _ in range(layers)
        )
        self.after = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the image."""
        tokens = self.before(self.norm(x).flatten(-2).transpose(-2, -1))
        for layer in self.layers:
            tokens = layer(tokens, text)
        return x + self.after(tokens).transpose(-2, -1).unflatten(-1, x.shape[-2:])


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(_GROUPS, channels // 2), channels)


def _pairs(
    widths: Sequence[int], out: int, sizes: tuple[int, int, int], layers: int
) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Convolutions from each of some widths, and attention after each, if any."""
    time, heads, text = sizes
    convolved = nn.ModuleList(_Convolved(width, out, time) for width in widths)
    count = len(widths) if layers else 0
    attended = nn.ModuleList(_Attended(out, heads, text, layers) for _ in range(count))
    return convolved, attended


class _Level(nn.Module):
    """What the three kinds of blocks have in common."""

    def __init__(
        self,
        widths: Sequence[int],
        out: int,
        sizes: tuple[int, int, int],
        layers: int,
    ) -> None:
        """Make it.

        Args:
            widths: Channels that each convolution gets.
            out: Channels that it returns.
            sizes: Widths of time, heads (their number) and text.
            layers: Of each attention.
        """
        super().__init__()
        self.convolved, self.attended = _pairs(widths, out, sizes, layers)

    def apply_pair(
        self, number: int, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """Apply a convolution, and the attention after it."""
        x = self.convolved[number](x, time)
        if number < len(self.attended):
            x = self.attended[number](x, text)
        return x


class Down(_Level):
    """Two pairs, and half the size unless it is the last; leaves what it made."""

    def __init__(
        self,
        channels: int,
        out: int,
        sizes: tuple[int, int, int],
        *,
        layers: int = 0,
        last: bool = False,
    ) -> None:
        super().__init__((channels, out), out, sizes, layers)
        self.smaller = None if last else nn.Conv2d(out, out, 3, stride=2, padding=1)

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        text: torch.Tensor,
        *left: torch.Tensor,
    ) -> State:
        """Apply the block. The first one leaves what it gets, too."""
        made = list(left) or [x]
        for number in range(len(self.convolved)):
            x = self.apply_pair(number, x, time, text)
            made.append(x)
        if self.smaller is not None:
            x = self.smaller(x)
            made.append(x)
        return x, time, text, *made


class Middle(_Level):
    """A convolution, attention, a convolution."""

    def __init__(
        self, channels: int, sizes: tuple[int, int, int], *, layers: int
    ) -> None:
        super().__init__((channels, channels), channels, sizes, layers)
        del self.attended[1]

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        text: torch.Tensor,
        *left: torch.Tensor,
    ) -> State:
        """Apply the block."""
        for number in range(2):
            x = self.apply_pair(number, x, time, text)
        return x, time, text, *left


class Up(_Level):
    """Three pairs that take what was left, and twice the size unless it is the last."""

    def __init__(
        self,
        widths: Sequence[int],
        out: int,
        sizes: tuple[int, int, int],
        *,
        layers: int = 0,
        last: bool = False,
    ) -> None:
        super().__init__(widths, out, sizes, layers)
        self.larger = None if last else nn.Conv2d(out, out, 3, padding=1)

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        text: torch.Tensor,
        *left: torch.Tensor,
    ) -> State:
        """Apply the block."""
        for number in range(len(self.convolved)):
            *left, newest = left
            x = self.apply_pair(number, torch.cat((x, newest), -3), time, text)
        if self.larger is not None:
            x = self.larger(functional.interpolate(x, scale_factor=2.0))
        return x, time, text, *left
