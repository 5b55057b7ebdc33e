"""Stacks with the block shapes of real models, and random weights.

Each tensor of a block has the shape that it has in the model of that name; how blocks
are wired is simplified where that changes neither bytes nor the large products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    State = tuple[torch.Tensor, ...]

__all__ = ["SHAPES", "Shape", "Stack", "build", "inputs"]


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
        normed: bool = True,
    ) -> None:
        super().__init__()
        inner, shared = heads * head, (groups or heads) * head
        self.head, self.grouped = head, groups is not None
        self.query = nn.Linear(width, inner, bias=bias)
        self.key = nn.Linear(source, shared, bias=bias)
        self.value = nn.Linear(source, shared, bias=bias)
        self.out = nn.Linear(inner, width, bias=bias)
        self.norms = nn.ModuleList(nn.RMSNorm(inner) for _ in range(2 * normed))

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return what the tokens of `x` take from those of `source`."""
        query, key, value = self.query(x), self.key(source), self.value(source)
        if len(self.norms):
            query, key = self.norms[0](query), self.norms[1](key)
        split = [
            t.unflatten(-1, (-1, self.head)).transpose(-3, -2)
            for t in (query, key, value)
        ]
        mixed = functional.scaled_dot_product_attention(*split, enable_gqa=self.grouped)
        taken: torch.Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return taken


def _feed_forward(width: int, factor: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width)
    )


class LlamaBlock(nn.Module):
    """Grouped attention and a gated feed-forward: 9 tensors."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        head = width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(
            width,
            width,
            heads=heads,
            head=head,
            groups=groups,
            bias=False,
            normed=False,
        )
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> State:
        """Apply the block to one stream of tokens."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        normed = self.norms[1](x)
        return (x + self.down(functional.silu(self.gate(normed)) * self.up(normed)),)


class _Half(nn.Module):
    """One stream's part of a FLUX.1 double block: 16 tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.attention = _HeadNormed(width, heads)
        self.out = nn.Linear(width, width)
        self.feed_forward = _feed_forward(width)


class _HeadNormed(nn.Module):
    """Queries, keys and values, with a norm over each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(self.head) for _ in range(2))

    def forward(self, x: torch.Tensor) -> State:
        """Return them, heads first."""
        query, key, value = (p(x).unflatten(-1, (-1, self.head)) for p in self.parts)
        found = self.norms[0](query), self.norms[1](key), value
        return tuple(t.transpose(-3, -2) for t in found)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(-3, -2).flatten(-2)


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
        mixed = _attend(*(torch.cat(pair, -2) for pair in zip(*parts, strict=True)))
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
        self.attention = _HeadNormed(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(5 * width, width)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, vec: torch.Tensor
    ) -> State:
        """Apply the block to both streams as one."""
        x = torch.cat((text, image), -2)
        scale, shift, gate = self.modulation(functional.silu(vec)).chunk(3, -1)
        normed = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        mixed = _attend(*self.attention(normed))
        both = torch.cat((mixed, functional.gelu(self.up(normed))), -1)
        x = x + gate * self.out(both)
        text, image = x.split([text.shape[-2], image.shape[-2]], -2)
        return image, text, vec


class LtxBlock(nn.Module):
    """Video and audio tokens, text, and each to the other: 72 tensors."""

    def __init__(self, video: int, audio: int, heads: int) -> None:
        super().__init__()
        large, small = video // heads, audio // heads
        self.tables = nn.ParameterList(
            torch.empty(rows, width)
            for rows, width in ((6, video), (6, audio), (5, video), (5, audio))
        )
        self.own = nn.ModuleList(
            Attention(w, w, heads=heads, head=h)
            for w, h in ((video, large), (audio, small))
        )
        self.text = nn.ModuleList(
            Attention(w, w, heads=heads, head=h)
            for w, h in ((video, large), (audio, small))
        )
        self.crossed = nn.ModuleList(
            Attention(w, source, heads=heads, head=small)
            for w, source in ((video, audio), (audio, video))
        )
        self.feed_forward = nn.ModuleList(_feed_forward(w) for w in (video, audio))

    def forward(self, *state: torch.Tensor) -> State:
        """Apply the block to video, audio, and the text for each."""
        streams, texts = list(state[:2]), state[2:]
        for number, text in enumerate(texts):
            table = self.tables[number] + self.tables[number + 2].sum(0)
            normed = _normed(streams[number]) * (1 + table[0]) + table[1]
            streams[number] = streams[number] + table[2] * self.own[number](
                normed, normed
            )
            streams[number] = streams[number] + self.text[number](streams[number], text)
        video, audio = map(_normed, streams)
        streams[0] = streams[0] + self.crossed[0](video, audio)
        streams[1] = streams[1] + self.crossed[1](audio, video)
        for number in range(2):
            table = self.tables[number]
            normed = _normed(streams[number]) * (1 + table[3]) + table[4]
            grown = self.feed_forward[number](normed)
            streams[number] = streams[number] + table[5] * grown
        return (*streams, *texts)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *state: torch.Tensor) -> State:
        """Apply all blocks."""
        for block in self.blocks:
            state = block(*state)
        return state


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A real model's blocks, and the inputs of one step."""

    blocks: tuple[tuple[int, Callable[[int], nn.Module]], ...]
    """How many of each kind, and how one is made, with its sizes divided."""
    inputs: tuple[tuple[int, int], ...]
    """Rows and columns of each input."""

    @property
    def count(self) -> int:
        """Number of blocks of the whole model."""
        return sum(count for count, _ in self.blocks)


SHAPES = {
    "ltx-2": Shape(
        blocks=((48, lambda by: LtxBlock(4096 // by, 2048 // by, 32)),),
        inputs=((768, 4096), (18, 2048), (1024, 4096), (1024, 2048)),
    ),
    "ltx-2-long": Shape(
        blocks=((48, lambda by: LtxBlock(4096 // by, 2048 // by, 32)),),
        inputs=((6144, 4096), (126, 2048), (1024, 4096), (1024, 2048)),
    ),
    "flux.1": Shape(
        blocks=(
            (19, lambda by: FluxDouble(3072 // by, 24)),
            (38, lambda by: FluxSingle(3072 // by, 24)),
        ),
        inputs=((4096, 3072), (512, 3072), (1, 3072)),
    ),
    "llama-3-8b": Shape(
        blocks=((32, lambda by: LlamaBlock(4096 // by, 14336 // by, 32, 8)),),
        inputs=((2048, 4096),),
    ),
}


def _makers(shape: Shape, blocks: int | None) -> Iterator[Callable[[int], nn.Module]]:
    """Each block's maker, in order; fewer blocks keep their proportions."""
    part = 1.0 if blocks is None else min(1.0, blocks / shape.count)
    for count, make in shape.blocks:
        for _ in range(max(1, round(part * count))):
            yield make


def build(
    shape: Shape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    blocks: int | None = None,
    divide: int = 1,
) -> Stack:
    """Return a stack on the device, with the same random weights at every call.

    Args:
        shape: Which.
        device: Where it is built, block by block.
        dtype: Of all weights.
        blocks: About how many blocks; None for all.
        divide: By how much all widths are divided.
    """
    generator = torch.Generator(device if device.type == "cuda" else "cpu")
    generator.manual_seed(0)
    made = []
    for make in _makers(shape, blocks):
        with torch.device("meta"):
            block = make(divide).to(dtype)
        made.append(_filled(block.to_empty(device=device), generator))
    return Stack(made).requires_grad_(False)


def _filled(block: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in block.parameters():
        bound = parameter.shape[-1] ** -0.5
        values = torch.empty(
            parameter.shape, dtype=parameter.dtype, device=generator.device
        )
        parameter.data.copy_(values.uniform_(-bound, bound, generator=generator))
    return block


def inputs(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, divide: int = 1
) -> State:
    """Return one step's inputs on the device, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(max(1, rows // divide), width // divide, generator=generator).to(
            device, dtype
        )
        for rows, width in shape.inputs
    )
