"""LTX-2: video and audio tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.blocks.attention import Attention, feed_forward

if TYPE_CHECKING:
    from benchmarks.gpu.blocks import State

__all__ = ["LtxBlock"]


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
            Attention(w, w, heads=heads, head=h, normed=w)
            for w, h in ((video, large), (audio, small))
        )
        self.text = nn.ModuleList(
            Attention(w, w, heads=heads, head=h, normed=w)
            for w, h in ((video, large), (audio, small))
        )
        self.crossed = nn.ModuleList(
            Attention(w, source, heads=heads, head=small, normed=audio)
            for w, source in ((video, audio), (audio, video))
        )
        self.feed_forward = nn.ModuleList(feed_forward(w) for w in (video, audio))

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
