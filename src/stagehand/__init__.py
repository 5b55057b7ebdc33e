"""Run and train PyTorch models that do not fit the accelerator, at full precision."""

from stagehand.activations.saving import Activations as activations
from stagehand.config import StagehandConfig
from stagehand.core.arena import Arena as PinnedPool
from stagehand.differentiation import grad, gradient_edges
from stagehand.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    InvalidStateTransitionError,
    StagehandError,
    StagehandInternalError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.loading import load
from stagehand.modes import StagehandRuntime, layer
from stagehand.report import Report

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "InvalidStateTransitionError",
    "PinnedPool",
    "Report",
    "StagehandConfig",
    "StagehandError",
    "StagehandInternalError",
    "StagehandOOMError",
    "StagehandRuntime",
    "StagehandWarning",
    "__version__",
    "activations",
    "grad",
    "gradient_edges",
    "layer",
    "load",
]
