"""Optimizers that step parameters where they lie, with their states beside them."""

from stagehand.optim.adamw import OffloadedAdamW
from stagehand.optim.overlap import GradientSource
from stagehand.optim.scaler import GradScaler

__all__ = ["GradScaler", "GradientSource", "OffloadedAdamW"]
