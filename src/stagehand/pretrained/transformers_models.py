"""Models of `transformers`: their classes, and their own mapping of names."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.errors import ConfigError, TensorMismatchError
from stagehand.pretrained.naming import Made, Naming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = ["build_model", "class_for", "name_tensors", "read_config"]


def read_config(directory: Path, chosen: Any = None) -> Any:
    """Return the configuration in a directory.

    Args:
        directory: Of the model.
        chosen: A class, which may say of what kind its configuration is.

    Raises:
        ConfigError: If it is of no kind that the library knows.
    """
    import transformers
    from huggingface_hub import errors

    # Values of other types than the fields'; not each version of it has that.
    refused = getattr(errors, "StrictDataclassError", ValueError)
    own = getattr(chosen, "config_class", None)
    try:
        if own is not None:
            return own.from_pretrained(directory, local_files_only=True)
        # Asked nothing about code in the directory, it would ask on the terminal.
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (
        *(ArithmeticError, AttributeError, KeyError, OSError, TypeError, ValueError),
        refused,
    ) as error:
        raise ConfigError(
            f"the configuration in '{directory}' is not usable:"
            f" {' '.join(str(error).split())}"
        ) from error


def class_for(config: Any, chosen: Any = None) -> Any:
    """Return the class of a configuration's model.

    Args:
        config: A configuration of the library.
        chosen: A class, or an `AutoModel` of the library; None takes the architecture
            that the configuration names, or else the model without a head.

    Raises:
        ConfigError: If the library has no such class.
    """
    import transformers

    mapping = getattr(chosen, "_model_mapping", None)
    if chosen is not None and mapping is None:
        return chosen
    name = next(iter(config.architectures or ()), None)
    if mapping is None and name is not None:
        found = getattr(transformers, name, None)
        if found is None:
            raise ConfigError(
                f"the configuration names the architecture {name!r}, which transformers"
                f" {transformers.__version__} does not have; pass the model's class, or"
                " the AutoModel class of its kind, and this directory as checkpoint_dir"
            )
        return found
    mapping = transformers.MODEL_MAPPING if mapping is None else mapping
    if type(config) not in mapping:
        raise ConfigError(
            f"no model class is known for a {type(config).__name__}; pass the class"
        )
    found = mapping[type(config)]
    if not isinstance(found, tuple):
        return found
    return next((c for c in found if c.__name__ == name), found[0])


def build_model(
    model_class: Any, config: Any, dtype: torch.dtype | None, directory: Path
) -> nn.Module:
    """Construct a model as `from_pretrained` does, but for its weights.

    Raises:
        ConfigError: If its checkpoint is quantized.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"the checkpoint in '{directory}' is quantized, which load() does not read:"
            " open it with transformers and pass the model to stagehand.layer()"
        )
    config = deepcopy(config)
    config.name_or_path = str(directory)
    dtype = config.dtype if dtype is None else dtype
    # A model of models would set torch's default type, which all threads share.
    _set_dtype(config, None)
    model: Any = model_class(config)
    for module in model.modules():
        _set_dtype(getattr(module, "config", None), dtype)
    _read_generation_config(model, directory)
    model.eval()
    built: nn.Module = model
    return built


def _set_dtype(config: Any, dtype: torch.dtype | None) -> None:
    """Set the element type that a configuration and its parts name."""
    if hasattr(config, "sub_configs"):
        config.dtype = dtype
        for name in config.sub_configs:
            _set_dtype(getattr(config, name, None), dtype)


def _read_generation_config(model: Any, directory: Path) -> None:
    if not (directory / "generation_config.json").is_file():
        return
    if model.can_generate():
        import transformers

        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                directory, local_files_only=True
            )
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"generation_config.json in '{directory}' is not usable:"
                f" {' '.join(str(error).split())}; correct or remove it"
            ) from error


def name_tensors(
    model: Any, keys: Iterable[str], dtype: torch.dtype | None, *, is_typed: bool
) -> Naming:
    """Return how a model's class reads a checkpoint: renamed, merged, split, cast.

    Args:
        model: On `meta` or not.
        keys: The checkpoint's names.
        dtype: The element type that it is loaded as.
        is_typed: Whether it was built in that type.

    Raises:
        ConfigError: If the installed version cannot be asked.
    """
    loading, conversions = _own_mapping(model)
    renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, str] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            key, renamings, converters, prefix, state
        )
        if name not in state and key in state:
            name, pattern = loading.rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            found.setdefault(name, key)
        elif name in state:
            parts.setdefault(name, []).append((pattern, key))
    # What it would undo when it saves the model.
    model._weight_conversions = [c for c in conversions if c.was_used()]
    made = tuple(
        Made(
            sources=tuple(key for _, key in pieces),
            compute=_converting(by_pattern[pieces[0][0]], name, pieces, model),
            like=name if state[name].is_floating_point() else None,
        )
        for name, pieces in parts.items()
    )
    unsaved = [re.escape(name) for name in model._keys_to_ignore_on_save or ()]
    patterns = [*(model._keys_to_ignore_on_load_missing or ()), *unsaved]
    ignored = [re.compile(pattern) for pattern in patterns]
    return Naming(
        keys=found,
        made=made,
        dtypes=_kept_dtypes(model, state, dtype, is_typed=is_typed),
        optional=lambda name: any(p.search(name) for p in ignored),
        untie=lambda name: model.all_tied_weights_keys.pop(name, None),
    )


def _own_mapping(model: Any) -> tuple[Any, list[Any]]:
    """Return the library's loading functions, and what they would do to a model."""
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        import transformers

        raise ConfigError(
            f"transformers {transformers.__version__} cannot be asked for its mapping"
            " of names: expected 5 or newer; install that, or pass key_map"
        ) from error
    return core_model_loading, conversion_mapping.get_model_conversion_mapping(model)


def _converting(
    template: Any, name: str, pieces: list[tuple[str, str]], model: Any
) -> Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]:
    def compute(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        converter = deepcopy(template)
        for pattern, key in pieces:
            converter.add_tensor(name, key, pattern, tensors[key])
        try:
            values = converter.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise TensorMismatchError(
                f"tensor {name!r} cannot be made of {len(pieces)} tensors of the"
                f" checkpoint, {pieces[0][1]!r} first: {error}"
            ) from error
        return {
            target: value[0] if isinstance(value, list) else value
            for target, value in values.items()
        }

    return compute


def _kept_dtypes(
    model: Any,
    state: Mapping[str, Any],
    dtype: torch.dtype | None,
    *,
    is_typed: bool,
) -> dict[str, torch.dtype]:
    """What the class keeps in another type than the rest, as `from_pretrained` does.

    That is what its constructor gives a type of its own, and what it names.
    """
    kept: dict[str, torch.dtype] = {}
    if is_typed:
        kept.update(
            (name, tensor.dtype)
            for name, tensor in state.items()
            if tensor.is_floating_point() and tensor.dtype is not dtype
        )
    patterns: set[str] = set()
    if dtype is torch.float16:
        patterns.update(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns.update(model._keep_in_fp32_modules_strict or ())
    for pattern in patterns:
        expression = re.compile(pattern.replace("*", ".*"))
        kept.update((n, torch.float32) for n in state if expression.search(n))
    return kept
