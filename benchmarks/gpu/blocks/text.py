"""Language models: dense ones, one with experts, and what is at a model's ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.blocks.attention import Attention

if TYPE_CHECKING:
    from benchmarks.gpu.blocks import State

__all__ = ["ExpertBlock", "Experts", "GemmaBlock", "Head", "LlamaBlock", "Words"]


def _attention(
    width: int,
    heads: int,
    groups: int,
    head: int,
    *,
    bias: bool = False,
    normed: int | None = None,
) -> Attention:
    """Grouped, of a stream to itself."""
    return Attention(
        width,
        width,
        heads=heads,
        head=head,
        groups=groups,
        bias=bias,
        out_bias=False,
        normed=normed,
    )


class LlamaBlock(nn.Module):
    """Grouped attention and a gated feed-forward: 9 tensors, 12 with biases."""

    def __init__(
        self, width: int, hidden: int, heads: int, groups: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = _attention(width, heads, groups, width // heads, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> State:
        """Apply the block to one stream of tokens."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        normed = self.norms[1](x)
        return (x + self.down(functional.silu(self.gate(normed)) * self.up(normed)),)


class GemmaBlock(nn.Module):
    """Grouped attention and a gated feed-forward, normed on both sides: 13 tensors."""

    def __init__(
        self, width: int, hidden: int, *, heads: int, groups: int, head: int
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.attention = _attention(width, heads, groups, head, normed=head)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> State:
        """Apply the block to one stream of tokens."""
        normed = self.norms[0](x)
        x = x + self.norms[1](self.attention(normed, normed))
        normed = self.norms[2](x)
        grown = functional.gelu(self.gate(normed), approximate="tanh") * self.up(normed)
        return (x + self.norms[3](self.down(grown)),)


class ExpertBlock(nn.Module):
    """Grouped attention, and experts in two tensors: 11 tensors.

    Each token goes to those experts that its gate likes best.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        heads: int,
        groups: int,
        head: int,
        taken: int = 8,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = _attention(width, heads, groups, head, normed=head)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, hidden, experts, taken)

    def forward(self, x: torch.Tensor) -> State:
        """Apply the block to one stream of tokens."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        normed = self.norms[1](x)
        parts, chosen = self.gate(normed).softmax(-1).topk(self.experts.taken, -1)
        parts = parts / parts.sum(-1, keepdim=True)
        return (x + (self.experts(normed, chosen) * parts.unsqueeze(-1)).sum(-2),)


class Experts(nn.Module):
    """Gated feed-forwards, all in two tensors; `taken` of them compute each token."""

    def __init__(self, width: int, hidden: int, count: int, taken: int) -> None:
        super().__init__()
        self.taken = taken
        self.up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what each token's experts make of it.

        Each computes all of its tokens at once, so the host has to know how many:
        it waits for the device, as it does in the models.
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = x[order // chosen.shape[-1]]
        counts = chosen.flatten().bincount(minlength=len(self.up)).tolist()
        outputs = torch.empty_like(tokens)
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            start += count
            if count:
                outputs[rows] = self._one(expert, tokens[rows])
        placed = torch.empty_like(outputs)
        placed[order] = outputs
        return placed.unflatten(0, chosen.shape)

    def _one(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self.up[number]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down[number])


class Words(nn.Module):
    """Looks words up: one tensor, of which a step needs a few rows."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, width)

    def forward(self, words: torch.Tensor) -> State:
        """Return a stream of tokens."""
        return (self.table(words),)


class Head(nn.Module):
    """Scores all words as the next one, at once or in parts.

    In parts no more than one of them has to be on the device.
    """

    def __init__(self, count: int, width: int, *, parts: int = 1) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        sizes = [len(part) for part in torch.arange(count).chunk(parts)]
        self.parts = nn.ModuleList(nn.Linear(width, n, bias=False) for n in sizes)

    def forward(self, x: torch.Tensor) -> State:
        """Look at the last token alone, as generation does."""
        last = self.norm(x[-1:])
        return (torch.cat([part(last) for part in self.parts], -1),)
