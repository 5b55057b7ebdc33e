"""Stacks with the block shapes of real models, and random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.gpu.blocks.flux import Flux2Double, Flux2Single, FluxDouble, FluxSingle
from benchmarks.gpu.blocks.ltx import LtxBlock
from benchmarks.gpu.blocks.text import (
    ExpertBlock,
    GemmaBlock,
    Head,
    LlamaBlock,
    Words,
)
from benchmarks.gpu.blocks.unet import Down, Middle, Up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.blocks import State

    Make = Callable[[int], nn.Module]
    Sizes = tuple[tuple[int, ...], ...]

__all__ = ["SHAPES", "Shape", "Stack", "build", "inputs", "skeleton"]


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

    blocks: tuple[tuple[int, Make], ...]
    """How many of each kind, and how one is made, with its sizes divided."""
    inputs: Callable[[int], Sizes]
    """The size of each input, from that by which sizes are divided."""
    words: int = 0
    """How many words its inputs are of; 0 for numbers."""

    @property
    def count(self) -> int:
        """Number of blocks of the whole model."""
        return sum(count for count, _ in self.blocks)


def _tokens(*sizes: tuple[int, int]) -> Callable[[int], Sizes]:
    """Rows and widths, both divided: rows by more, for they cost more."""
    return lambda by: tuple(
        (max(1, int(rows / by**1.5)), width // by) for rows, width in sizes
    )


def _ltx(*rows: int) -> Shape:
    """Of video, audio, and the text for each."""
    return Shape(
        blocks=((48, lambda by: LtxBlock(4096 // by, 2048 // by, 32)),),
        inputs=_tokens(*zip(rows, (4096, 2048, 4096, 2048), strict=True)),
    )


def _flux(image: int) -> Shape:
    return Shape(
        blocks=(
            (19, lambda by: FluxDouble(3072 // by, 24)),
            (38, lambda by: FluxSingle(3072 // by, 24)),
        ),
        inputs=_tokens((image, 3072), (512, 3072), (1, 3072)),
    )


def _flux2(image: int) -> Shape:
    tokens = _tokens((image, 6144), (512, 6144))
    return Shape(
        blocks=(
            (8, lambda by: Flux2Double(6144 // by, 48)),
            (48, lambda by: Flux2Single(6144 // by, 48)),
        ),
        inputs=lambda by: (*tokens(by), (15, 6144 // by)),
    )


def _qwen(rows: int) -> Shape:
    return Shape(
        blocks=(
            (28, lambda by: LlamaBlock(3584 // by, 18944 // by, 28, 4, bias=True)),
        ),
        inputs=_tokens((rows, 3584)),
    )


def _qwen_whole(rows: int, *, parts: int = 1) -> Shape:
    """From words to scores of words; some of it in parts."""
    words, width = 152064, 3584
    (body,) = _qwen(rows).blocks
    return Shape(
        blocks=(
            (1, lambda by: Words(words // by, width // by)),
            body,
            (1, lambda by: Head(words // by, width // by, parts=parts)),
        ),
        inputs=lambda by: ((max(1, int(rows / by**1.5)),),),
        words=words,
    )


def _gemma(rows: int) -> Shape:
    def make(by: int) -> nn.Module:
        return GemmaBlock(
            3840 // by, 15360 // by, heads=16, groups=8, head=max(2, 256 // by)
        )

    return Shape(blocks=((48, make),), inputs=_tokens((rows, 3840)))


def _qwen_experts(rows: int) -> Shape:
    def make(by: int) -> nn.Module:
        return ExpertBlock(
            2048 // by,
            768 // by,
            max(16, 128 // by),
            heads=32,
            groups=4,
            head=max(2, 128 // by),
        )

    return Shape(blocks=((48, make),), inputs=_tokens((rows, 2048)))


def _sdxl(image: int) -> Shape:
    """Of so many points in a row of the image; its narrowest level has 32 channels."""

    def width(by: int) -> int:
        return 32 * max(1, 10 // by)

    def block(kind: type[nn.Module], *widths: object, **options: object) -> Make:
        def make(by: int) -> nn.Module:
            c = width(by)
            head = max(8, 64 // by)
            *before, out = (_times(w, c) for w in widths)
            sizes = (4 * c, out // head, 2048 // by)
            layers = options.get("layers", 0)
            given = {**options, "layers": -(-layers // by)}
            return kind(*before, out, sizes, **given)

        return make

    made = (
        block(Down, 1, 1),
        block(Down, 1, 2, layers=2),
        block(Down, 2, 4, layers=10, last=True),
        block(Middle, 4, layers=10),
        block(Up, (8, 8, 6), 4, layers=10),
        block(Up, (6, 4, 3), 2, layers=2),
        block(Up, (3, 2, 2), 1, last=True),
    )
    return Shape(
        blocks=tuple((1, make) for make in made),
        inputs=lambda by: (
            (1, width(by), *2 * (max(8, image // by),)),
            (1, 4 * width(by)),
            (1, max(1, 77 // by), 2048 // by),
        ),
    )


def _times(widths: object, by: int) -> object:
    return tuple(w * by for w in widths) if isinstance(widths, tuple) else widths * by


SHAPES = {
    "ltx-2": _ltx(768, 18, 1024, 1024),
    "ltx-2-long": _ltx(6144, 126, 1024, 1024),
    "flux.1": _flux(4096),
    "flux.1-large": _flux(16384),
    "flux.2": _flux2(4096),
    "llama-3-8b": Shape(
        blocks=((32, lambda by: LlamaBlock(4096 // by, 14336 // by, 32, 8)),),
        inputs=_tokens((2048, 4096)),
    ),
    "qwen2.5-7b": _qwen(1),
    "qwen2.5-7b-prefill": _qwen(2048),
    "qwen2.5-7b-whole": _qwen_whole(1),
    "qwen2.5-7b-whole-prefill": _qwen_whole(2048),
    "qwen2.5-7b-parted": _qwen_whole(1, parts=8),
    "qwen3-30b-a3b": _qwen_experts(1),
    "qwen3-30b-a3b-prefill": _qwen_experts(2048),
    "gemma-3-12b": _gemma(512),
    "sdxl": _sdxl(128),
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
    home: torch.device | None = None,
    blocks: int | None = None,
    divide: int = 1,
) -> Stack:
    """Return a stack, with the same random weights at every call.

    Args:
        shape: Which.
        device: Where its values are made, block by block: no host is as fast.
        dtype: Of all weights.
        home: Where each block is brought then; None leaves it.
        blocks: About how many blocks; None for all.
        divide: By how much all widths are divided.
    """
    generator = torch.Generator(device if device.type == "cuda" else "cpu")
    generator.manual_seed(0)
    made = []
    for make in _makers(shape, blocks):
        with torch.device("meta"):
            block = make(divide).to(dtype)
        block = _filled(block.to_empty(device=device), generator)
        made.append(block if home is None else _brought(block, home))
    return Stack(made).requires_grad_(False)


def _brought(block: nn.Module, home: torch.device) -> nn.Module:
    """To the host: into memory that all threads touched, which one alone is slow at."""
    for parameter in block.parameters():
        there = torch.empty_like(parameter, device=home).zero_()
        parameter.data = there.copy_(parameter.detach())
    return block


def skeleton(shape: Shape, *, blocks: int | None = None, divide: int = 1) -> Stack:
    """Return a stack whose weights are not set."""
    return Stack([make(divide) for make in _makers(shape, blocks)])


def _filled(block: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in block.parameters():
        shape = parameter.shape
        window = shape[1:] if len(shape) == 4 else shape[-1:]  # what an output sums up
        bound = window.numel() ** -0.5
        values = torch.empty(shape, dtype=parameter.dtype, device=generator.device)
        parameter.data.copy_(values.uniform_(-bound, bound, generator=generator))
    return block


def inputs(
    shape: Shape, *, device: torch.device, dtype: torch.dtype, divide: int = 1
) -> State:
    """Return one step's inputs on the device, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    if shape.words:
        words = shape.words // divide
        return tuple(
            torch.randint(words, size, generator=generator).to(device)
            for size in shape.inputs(divide)
        )
    return tuple(
        torch.randn(size, generator=generator).to(device, dtype)
        for size in shape.inputs(divide)
    )
