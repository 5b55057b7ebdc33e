"""FLUX.1 and FLUX.2: image and text tokens, in two streams and then in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.blocks.attention import HeadNormed, attend, feed_forward

if TYPE_CHECKING:
    from benchmarks.gpu.blocks import State

__all__ = ["Flux2Double", "Flux2Single", "FluxDouble", "FluxSingle"]


class _Half(nn.Module):
    """One stream's part of a FLUX.1 double block: 16 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = HeadNormed(width, heads)
        self.out = nn.Linear(width, width)
        self.feed_forward = feed_forward(width)


class FluxDouble(nn.Module):
    """Image and text tokens with weights of their own: 32 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(_Half(width, heads) for _ in range(2))

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor
    ) -> State:
        """Let both streams attend to both."""
        streams = (text, image)
        scales = [h.modulation(functional.silu(vec)).chunk(6, -1) for h in self.halves]
        normed = [
            functional.layer_norm(x, x.shape[-1:]) * (1 + s[0]) + s[1]
            for x, s in zip(streams, scales, strict=True)
        ]
        parts = [h.attention(x) for h, x in zip(self.halves, normed, strict=True)]
        mixed = attend(*(torch.cat(pair, -2) for pair in zip(*parts, strict=True)))
        shares = mixed.split([x.shape[-2] for x in streams], -2)
        done = []
        for half, x, s, share in zip(self.halves, streams, scales, shares, strict=True):
            x = x + s[2] * half.out(share)
            normed_x = functional.layer_norm(x, x.shape[-1:]) * (1 + s[3]) + s[4]
            done.append(x + s[5] * half.feed_forward(normed_x))
        return done[1], done[0], vec


class FluxSingle(nn.Module):
    """All tokens in one stream, attention and feed-forward at once: 14 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        self.attention = HeadNormed(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(5 * width, width)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor
    ) -> State:
        """Apply the block to both streams as one."""
        x = torch.cat((text, image), -2)
        scale, shift, gate = self.modulation(functional.silu(vec)).chunk(3, -1)
        normed = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        mixed = attend(*self.attention(normed))
        both = torch.cat((mixed, functional.gelu(self.up(normed))), -1)
        x = x + gate * self.out(both)
        text, image = x.split([text.shape[-2], image.shape[-2]], -2)
        return image, text, vec


class _Part(nn.Module):
    """One stream's part of a FLUX.2 double block: 8 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = HeadNormed(width, heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gated."""
        gate, up = self.up(x).chunk(2, -1)
        down: torch.Tensor = self.down(functional.silu(gate) * up)
        return down


class Flux2Double(nn.Module):
    """Image and text tokens, modulated by what the model computes once: 16 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Part(width, heads) for _ in range(2))

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor
    ) -> State:
        """Let both streams attend to both. `vec` has 15 rows, 12 of them for this."""
        streams, scales = (text, image), (vec[:6], vec[6:12])
        found = [
            part.attention(_modulated(x, s[0], s[1]))
            for part, x, s in zip(self.parts, streams, scales, strict=True)
        ]
        mixed = attend(*(torch.cat(pair, -2) for pair in zip(*found, strict=True)))
        shares = mixed.split([x.shape[-2] for x in streams], -2)
        done = []
        for part, x, s, share in zip(self.parts, streams, scales, shares, strict=True):
            x = x + s[2] * part.out(share)
            done.append(x + s[5] * part.feed_forward(_modulated(x, s[3], s[4])))
        return done[1], done[0], vec


class Flux2Single(nn.Module):
    """All tokens in one stream, with two large products: 4 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(self.head) for _ in range(2))
        self.all = nn.Linear(width, 9 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor
    ) -> State:
        """Apply the block to both streams as one. `vec` has 3 rows for this."""
        x, width = torch.cat((text, image), -2), image.shape[-1]
        *three, gate, up = self.all(_modulated(x, vec[12], vec[13])).split(
            [width, width, width, 3 * width, 3 * width], -1
        )
        query, key, value = (
            t.unflatten(-1, (-1, self.head)).transpose(-3, -2) for t in three
        )
        mixed = attend(self.norms[0](query), self.norms[1](key), value)
        both = torch.cat((mixed, functional.silu(gate) * up), -1)
        x = x + vec[14] * self.out(both)
        text, image = x.split([text.shape[-2], image.shape[-2]], -2)
        return image, text, vec


def _modulated(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
