"""Run and train PyTorch models that do not fit the accelerator, at full precision."""

from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.runtime import ActivationRuntime
from stagehand.activations.within import Activations as activations
from stagehand.conductor.config import ConductorConfig
from stagehand.conductor.runtime import ConductorRuntime
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
from stagehand.pipelines import Pipeline, pipeline
from stagehand.report import Report
from stagehand.residency.holds import ResidentPriority
from stagehand.streamer.streamer import LayerStreamer
from stagehand.streamer.tuner import LayerStreamerTuner

__version__ = "0.1.0"

__all__ = [
    "ActivationRuntime",
    "ActivationStagehandConfig",
    "CheckpointError",
    "ClosedError",
    "ConductorConfig",
    "ConductorRuntime",
    "ConfigError",
    "InvalidStateTransitionError",
    "LayerStreamer",
    "LayerStreamerTuner",
    "PinnedPool",
    "Pipeline",
    "Report",
    "ResidentPriority",
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
    "pipeline",
]
