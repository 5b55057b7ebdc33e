"""What one small real model is: how it is built, fed and called."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

with suppress(ModuleNotFoundError):  # machines with a GPU may not have it
    import diffusers  # noqa: F401 - while tests are collected, for what comes is frozen

SEED = 20


def _with_keywords(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One small model with random weights, the same at every build.

    Neither `build` nor `inputs` touches torch's global random state.
    """

    name: str
    """What the model is called in test names; unique."""

    build: Callable[[], nn.Module]
    """Makes the model on the CPU, in float32 and in eval mode."""

    inputs: Callable[[], dict[str, Any]]
    """Makes one batch of inputs on the CPU."""

    block_pattern: str
    """Matches the names of the repeated blocks; none lies inside another."""

    call: Callable[[nn.Module, dict[str, Any]], Any] = _with_keywords
    """Runs one forward pass; `flatten` lists the tensors of what it returns."""

    def __str__(self) -> str:
        return self.name


def transformers_model(class_name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a build of a `transformers` class from its own configuration class."""

    def make() -> nn.Module:
        model_class: Any = getattr(transformers, class_name)
        # Copied, because the model keeps and may change what it is given.
        model: nn.Module = model_class(model_class.config_class(**deepcopy(config)))
        return model

    return _seeded(make)


def diffusers_model(class_name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a build of a `diffusers` class; it skips the test where there is none."""

    def make() -> nn.Module:
        diffusers = pytest.importorskip("diffusers")
        model: nn.Module = getattr(diffusers, class_name)(**deepcopy(config))
        return model

    return _seeded(make)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed(): that would seed the accelerators too.
            torch.default_generator.manual_seed(SEED)
            model = make().eval()
            _break_constants(model)
        return model

    return build


@torch.no_grad()
def _break_constants(model: nn.Module) -> None:
    # Biases start at zero and norms at one: a test could not tell one block's from
    # another's, nor see one that was never loaded.
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    for name, buffer in model.named_buffers():
        if name.endswith(".running_mean"):
            buffer.normal_(std=0.1)
        elif name.endswith(".running_var"):
            buffer.uniform_(0.5, 1.5)


def normal(*shape: int) -> torch.Tensor:
    """Draw a float32 tensor, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def integers(high: int, *shape: int, low: int = 3) -> torch.Tensor:
    """Draw token ids in [low, high), the same for the same arguments.

    The low ids are left out by default: padding and other special tokens have them.
    """
    return torch.randint(
        low, high, shape, generator=torch.Generator().manual_seed(SEED)
    )
