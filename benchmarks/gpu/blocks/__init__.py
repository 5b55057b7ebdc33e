"""Blocks of real models: every tensor has the shape that it has there.

How blocks are wired is simplified where that changes neither bytes nor the large
products. A block is called with the state of its model and returns the next one.
"""

from typing import TypeAlias

import torch

State: TypeAlias = tuple[torch.Tensor, ...]
