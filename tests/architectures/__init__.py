"""Small real models with random weights, for bit-equality tests of streaming."""

from architectures.audio import AUDIO
from architectures.base import Architecture
from architectures.diffusion import DIFFUSION
from architectures.generators import GENERATORS
from architectures.language import LANGUAGE
from architectures.text import HEADS, TEXT
from architectures.trees import assert_bitwise_equal, flatten, to_device
from architectures.vision import VISION

ARCHITECTURES = (*LANGUAGE, *TEXT, *AUDIO, *VISION, *DIFFUSION, *HEADS)

__all__ = [
    "ARCHITECTURES",
    "GENERATORS",
    "Architecture",
    "assert_bitwise_equal",
    "flatten",
    "to_device",
]
