"""Attention and feed-forward, as several models have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from benchmarks.gpu.blocks import State

__all__ = ["Attention", "HeadNormed", "attend", "feed_forward"]


class Attention(nn.Module):
    """Attention of one stream to another, with norms of queries and keys."""

    def __init__(
        self,
        width: int,
        source: int,
        *,
        heads: int,
        head: int,
        groups: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        normed: int | None = None,
    ) -> None:
        """Make it.

        Args:
            width: Of a token.
            source: Width of what is attended to.
            heads: How many, of the queries.
            head: Width of one.
            groups: Heads of keys and values, where they are fewer.
            bias: Of queries, keys and values.
            out_bias: Of what leaves.
            normed: Width over which queries and keys are normed.
        """
        super().__init__()
        inner, shared = heads * head, (groups or heads) * head
        self.head, self.grouped = head, groups is not None
        self.query = nn.Linear(width, inner, bias=bias)
        self.key = nn.Linear(source, shared, bias=bias)
        self.value = nn.Linear(source, shared, bias=bias)
        self.out = nn.Linear(inner, width, bias=out_bias)
        self.norms = nn.ModuleList(
            nn.RMSNorm(normed) for _ in range(2 if normed else 0)
        )

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return what the tokens of `x` take from those of `source`."""
        query, key, value = self.query(x), self.key(source), self.value(source)
        if len(self.norms):
            query, key = _norm(self.norms[0], query), _norm(self.norms[1], key)
        split = [
            t.unflatten(-1, (-1, self.head)).transpose(-3, -2)
            for t in (query, key, value)
        ]
        taken: torch.Tensor = self.out(attend(*split, grouped=self.grouped))
        return taken


def _norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Norm each part of a token that is as wide as the norm."""
    normed: torch.Tensor = norm(x.unflatten(-1, (-1, *norm.weight.shape))).flatten(-2)
    return normed


class HeadNormed(nn.Module):
    """Queries, keys and values, with a norm over each head."""

    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.head = width // heads
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(self.head) for _ in range(2))

    def forward(self, x: torch.Tensor) -> State:
        """Return them, heads first."""
        query, key, value = (p(x).unflatten(-1, (-1, self.head)) for p in self.parts)
        found = self.norms[0](query), self.norms[1](key), value
        return tuple(t.transpose(-3, -2) for t in found)


def attend(*parts: torch.Tensor, grouped: bool = False) -> torch.Tensor:
    """Return what queries take of values; keys and values may have fewer heads."""
    lone = parts[0].dim() == 3
    if lone:  # only of a batch do fused kernels take: others write all scores out
        parts = tuple(part.unsqueeze(0) for part in parts)
    mixed = functional.scaled_dot_product_attention(*parts, enable_gqa=grouped)
    mixed = mixed.transpose(-3, -2).flatten(-2)
    return mixed.squeeze(0) if lone else mixed


def feed_forward(width: int, factor: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
    )
