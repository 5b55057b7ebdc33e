"""Models of `diffusers`: their classes, and their own mapping of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.errors import ConfigError
from stagehand.pretrained.naming import Naming

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["build_model", "class_for", "name_tensors"]


def class_for(name: str) -> Any:
    """Return the class that a directory names.

    Raises:
        ConfigError: If the library has no such class.
    """
    import diffusers

    found = getattr(diffusers, name, None)
    if found is None:
        raise ConfigError(
            f"the configuration names the class {name!r}, which diffusers"
            f" {diffusers.__version__} does not have; pass the model's class"
        )
    return found


def build_model(model_class: Any, directory: Path) -> nn.Module:
    """Construct a model as `from_pretrained` does, but for its weights.

    Raises:
        ConfigError: If the configuration is not usable, or the checkpoint quantized.
    """
    try:
        config = model_class.load_config(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration in '{directory}' is not usable: {error}"
        ) from error
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"the checkpoint in '{directory}' is quantized, which load() does not read:"
            " open it with diffusers and pass the model to stagehand.layer()"
        )
    model: nn.Module = model_class.from_config(config)
    return model.eval()


def name_tensors(model: Any, keys: Iterable[str], dtype: torch.dtype | None) -> Naming:
    """Return how a model's class reads a checkpoint: renamed and cast."""
    # It renames the keys of a dictionary and does not look at the values.
    renamed: dict[str, str] = {key: key for key in keys}
    model._fix_state_dict_keys_on_load(renamed)
    kept = model._keep_in_fp32_modules or ()
    kept = {kept} if isinstance(kept, str) else set(kept)
    narrow = dtype in (torch.float16, torch.bfloat16)
    return Naming(
        keys=renamed,
        dtypes={
            name: torch.float32
            for name in renamed
            if narrow and not kept.isdisjoint(name.split("."))
        },
    )
