"""What a user gives to load a model from, and the files that go with it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.errors import ConfigError, StagehandError, TensorMismatchError
from stagehand.pretrained import diffusers_models, transformers_models
from stagehand.pretrained.deferred import Built, build
from stagehand.pretrained.naming import Naming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stagehand.stores.checkpoint import Checkpoint

__all__ = ["UNUSABLE", "Source", "find_source", "main_dtype", "naming_of"]

_CONFIG = "config.json"
# What constructors come up with where a configuration says what they do not expect.
UNUSABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
_MAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How to build a model, and where its files are."""

    build: Callable[[torch.dtype | None], Built]
    """Builds it without its weights, for a checkpoint of an element type."""
    path: Path
    """A directory of safetensors files, or one file."""


def find_source(given: Any, checkpoint_dir: str | Path | None) -> Source:
    """Return what a user means.

    Raises:
        ConfigError: If it is nothing that a model can be built from, or no place of its
            files is given.
    """
    if not isinstance(checkpoint_dir, str | Path | None):
        raise ConfigError(
            f"checkpoint_dir is {_described(checkpoint_dir)}: expected the path of the"
            " safetensors files; the model, or what builds it, comes first"
        )
    if isinstance(given, str | Path):
        directory = Path(given).expanduser()
        return _from_directory(directory, checkpoint_dir or directory)
    if checkpoint_dir is None:
        raise ConfigError(
            "load() needs checkpoint_dir, the place of the safetensors files, unless"
            f" the model is given as a directory; it was given {_described(given)}"
        )
    path = Path(checkpoint_dir).expanduser()
    if isinstance(given, nn.Module):
        return Source(build=lambda dtype: _as_built(given), path=path)
    if _is_from("transformers", "PreTrainedConfig", given):
        return _from_transformers(given, transformers_models.class_for(given), path)
    if _is_from("transformers", "PreTrainedModel", given) or hasattr(
        given, "_model_mapping"
    ):
        config = transformers_models.read_config(path, given)
        return _from_transformers(
            config, transformers_models.class_for(config, given), path
        )
    if _is_from("diffusers", "ModelMixin", given):
        return _from_diffusers(given, path, path)
    if callable(given):
        return Source(build=lambda dtype: build(given), path=path)
    raise ConfigError(
        f"load() was given {_described(given)}: expected a directory, a module, its"
        " class, a function that returns one, or a configuration of transformers"
    )


def _described(given: Any) -> str:
    return given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"


def _is_from(library: str, name: str, given: Any) -> bool:
    """Whether something is of a class of a library, or such a class.

    A library that nobody has imported has made nothing.
    """
    base = getattr(sys.modules.get(library), name, None)
    if base is None:
        return False
    return issubclass(given if isinstance(given, type) else type(given), base)


def _from_directory(directory: Path, checkpoint_dir: str | Path) -> Source:
    file = directory / _CONFIG
    config = _read_config(file)
    path = Path(checkpoint_dir).expanduser()
    if config.get("_class_name") is not None:
        model_class = diffusers_models.class_for(config["_class_name"])
        return _from_diffusers(model_class, directory, path)
    if "model_type" in config or "architectures" in config:
        settings = transformers_models.read_config(directory)
        chosen = transformers_models.class_for(settings)
        return _from_transformers(settings, chosen, path)
    raise ConfigError(
        f"'{file}' does not say what the model is: expected '_class_name' (diffusers)"
        " or 'model_type' (transformers); pass the model's class or a function that"
        " builds it, and this directory as checkpoint_dir"
    )


def _read_config(file: Path) -> dict[str, Any]:
    directory = file.parent
    try:
        # Not strictly: there are configurations with infinite numbers.
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        hint = ""
        if not os.path.exists(directory):  # unlike Path.exists, it never raises
            hint = ", it does not exist, and nothing is downloaded"
        elif directory.is_file():
            hint = ": to stream a file, pass what builds the model first"
        elif (directory / "model_index.json").is_file():
            hint = ": this is a pipeline, load its models from their own directories"
        elif not file.exists() and any(directory.glob("*.safetensors")):
            hint = ": pass what builds the model first, and this as checkpoint_dir"
        raise ConfigError(
            f"'{directory}' is no model directory{hint}: expected a {_CONFIG}, found"
            f" none that can be read ({error})"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"'{file}' is not valid: expected a JSON object, found {_described(config)}"
        )
    for name in ("_class_name", "model_type"):
        if not isinstance(config.get(name), str | None):
            raise _not_valid(file, name, "a text", config[name])
    named = config.get("architectures")
    if named is not None and not (
        isinstance(named, list) and all(isinstance(each, str) for each in named)
    ):
        raise _not_valid(file, "architectures", "a list of texts", named)
    return config


def _not_valid(file: Path, name: str, expected: str, found: Any) -> ConfigError:
    return ConfigError(
        f"'{file}' is not valid: expected {name!r} to be {expected}, found {found!r}"
    )


def _from_transformers(config: Any, model_class: Any, path: Path) -> Source:
    def make(dtype: torch.dtype | None) -> Built:
        with _naming_configuration(path):
            return build(
                lambda: transformers_models.build_model(
                    model_class, config, dtype, path
                ),
                dtype,
            )

    return Source(build=make, path=path)


def _from_diffusers(model_class: Any, directory: Path, path: Path) -> Source:
    def make(dtype: torch.dtype | None) -> Built:
        with _naming_configuration(directory):
            return build(
                lambda: diffusers_models.build_model(model_class, directory), dtype
            )

    return Source(build=make, path=path)


@contextmanager
def _naming_configuration(directory: Path) -> Iterator[None]:
    """Say of which configuration a class has tried to make a model."""
    try:
        yield
    except StagehandError:
        raise
    except UNUSABLE as error:
        raise ConfigError(
            f"no model can be built from the configuration in '{directory}':"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _as_built(model: nn.Module) -> Built:
    unknown = tuple(name for name, t in model.named_buffers() if t.is_meta)
    return Built(
        model=model, unknown=unknown, value_of=lambda t: None if t.is_meta else t
    )


def naming_of(built: Built, keys: Iterable[str], dtype: torch.dtype | None) -> Naming:
    """Return how a model's class finds its tensors among a checkpoint's."""
    model = built.model
    if _is_from("transformers", "PreTrainedModel", model):
        return transformers_models.name_tensors(
            model, keys, dtype, is_typed=built.is_typed
        )
    if _is_from("diffusers", "ModelMixin", model):
        return diffusers_models.name_tensors(model, keys, dtype)
    return Naming()


def main_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the floating-point type of most of a checkpoint's bytes."""
    nbytes = dict.fromkeys(_MAIN, 0)
    for name in checkpoint:
        try:
            extent = checkpoint[name]
        except TensorMismatchError:  # a type that torch lacks
            continue
        if extent.dtype in nbytes:
            nbytes[extent.dtype] += extent.nbytes
    most = max(_MAIN, key=nbytes.__getitem__)
    return most if nbytes[most] else None
