"""`load()`: opens a model that is never whole in memory."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagehand.attribute import HANDLE
from stagehand.compact import Compact, expand
from stagehand.decoding import removal_of, scratch_folder
from stagehand.errors import StagehandOOMError, StagehandWarning
from stagehand.files import check_key_map
from stagehand.modes import check_dtype, check_model, layer
from stagehand.pretrained.deferred import Built, empty_tensor
from stagehand.pretrained.matching import match, untie
from stagehand.pretrained.naming import Naming
from stagehand.pretrained.scratch import write
from stagehand.pretrained.sources import (
    find_source,
    main_dtype,
    naming_of,
)
from stagehand.settings import check_value
from stagehand.stores.checkpoint import Checkpoint, key_of
from stagehand.units import format_at_least, format_limit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stagehand.pretrained.matching import Matched
    from stagehand.runtime import Runtime
    from stagehand.stores.checkpoint import KeyMap

__all__ = ["load"]


def load(
    model: nn.Module | Callable[[], nn.Module] | str | Path | Any,
    checkpoint_dir: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    key_map: KeyMap = None,
    scratch_dir: str | Path | None = None,
    **options: Any,
) -> nn.Module:
    """Open a model and stream it from its files, without ever holding it in memory.

    The constructor runs without making weights; what it computes (tables, masks, other
    buffers) is real. Then the model is streamed as by `layer()`, from the files: exact,
    within `vram_budget` and `ram_budget`, with or without an accelerator.

    What `stagehand convert` wrote is opened as what it was made from: packed weights
    are the same to the bit, quantized ones are dequantized and frozen.

    Models of `transformers` and `diffusers` read their checkpoints as
    `from_pretrained()` does: in evaluation mode, with their own names and tied weights.
    Where their class needs tensors otherwise than they are stored (experts in one
    tensor, some layers in float32, `dtype`), these are computed once, one after
    another, into files that are deleted at `shutdown()`.

    Args:
        model: A directory with `config.json` and safetensors files; a module class of
            `transformers` or `diffusers`; a configuration of `transformers`; any
            function without arguments that returns a module, such as a class or a
            `functools.partial`; or a module, on `meta` or not, whose weights are given
            up.
        checkpoint_dir: The directory of the files, or one file. Not needed if `model`
            is a directory.
        dtype: Load floating-point weights as this; None keeps the files' types.
        key_map: From the model's names to the files', as a mapping or a function.
            Stands for the class's own mapping.
        scratch_dir: Where to write what is computed or decoded: a directory with room
            for it, not in memory; by default the system's one for temporary files.
        **options: Those of `layer()`: `vram_budget`, `ram_budget`, `device` and so on.

    Returns:
        The model, streamed. `model._stagehand_layer_runtime.shutdown()` leaves it with
        tensors that are read from their files when they are touched.

    Raises:
        ConfigError: If an argument cannot work, or the model cannot be built this way.
        CheckpointError: If the files are not sound, or lack values of the model; it
            lists them.
        StagehandOOMError: If the budget is too small; it names the smallest that works.

    Example:
        >>> model = stagehand.load("path/to/model", vram_budget="8GB")
        >>> model = stagehand.load(functools.partial(Net, width=8), "net.safetensors")
    """
    try:
        inspect.signature(layer).bind(model, **options)
    except TypeError as error:  # an option that is unknown, before anything is built
        raise TypeError(f"load() {error}") from None
    check_dtype(dtype)
    check_value("scratch_dir", scratch_dir, str | Path | None)
    source = find_source(model, checkpoint_dir)
    checkpoint = Checkpoint.open(source.path)
    folders: list[Path] = []
    remove = removal_of(folders)

    def folder_for(nbytes: int) -> Path:
        folders.append(scratch_folder(nbytes, scratch_dir))
        return folders[-1]

    compact: Compact | None = None
    try:
        compact = expand(checkpoint, folder_for)
        if compact is not None:
            checkpoint = compact.plain
        main = dtype or main_dtype(checkpoint)
        built = source.build(main)
        check_model(built.model, None)
        naming = _naming(built, checkpoint, main, key_map)
        untie(built.model, checkpoint, naming)
        matched = match(built, checkpoint, naming, dtype)
        if matched.made:
            folder = folder_for(matched.made_bytes)
            written = write(matched.made, checkpoint, folder, matched.made_bytes)
            checkpoint = checkpoint.joined(written)
        if compact is not None:
            compact = replace(compact, plain=checkpoint)
        streamed = _stream(built.model, compact or checkpoint, matched, options)
    except BaseException:
        if compact is not None:
            compact.files.close()
        remove()
        raise
    at_end = weakref.finalize(built.model, remove)
    getattr(streamed, HANDLE).at_shutdown(lambda _: at_end())
    return streamed


def _naming(
    built: Built,
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    key_map: KeyMap,
) -> Naming:
    if key_map is None:
        return naming_of(built, checkpoint, dtype)
    model = built.model
    if isinstance(key_map, Mapping):
        check_key_map(model, key_map)
        return Naming(keys={name: key_of(name, key_map) for name in key_map})
    return Naming(keys={name: key_of(name, key_map) for name in model.state_dict()})


def _stream(
    model: nn.Module,
    checkpoint: Checkpoint | Compact,
    matched: Matched,
    options: Mapping[str, Any],
) -> nn.Module:
    for tensor, dtype in matched.tensors:
        empty_tensor(tensor, dtype)
    try:
        return _layer(model, checkpoint, matched, options)
    except StagehandOOMError as error:
        if not isinstance(checkpoint, Compact):
            raise
        needed = _needed(model, checkpoint, matched, options, error.needed_bytes)
        if needed == error.needed_bytes:
            raise
        raise StagehandOOMError(
            f"the budget is {format_limit(error.limit_bytes, needed)}, but"
            f" {format_at_least(needed)} must be on the device at once, with what"
            f" blocks are decoded in as they come from {checkpoint.plain.root}; raise"
            f" it to at least {format_at_least(needed)}",
            needed_bytes=needed,
            limit_bytes=error.limit_bytes,
        ) from None


def _needed(
    model: nn.Module,
    compact: Compact,
    matched: Matched,
    options: Mapping[str, Any],
    nbytes: int,
) -> int:
    """Return the smallest budget, where a plain model would need `nbytes`."""
    alone = {"vram_budget": nbytes, "shared": False, "pool": None}  # takes of nobody
    try:
        with warnings.catch_warnings():  # of a budget that nobody has named
            warnings.simplefilter("ignore", StagehandWarning)
            streamed = _layer(model, compact, matched, {**options, **alone})
    except StagehandOOMError as error:  # of this budget, or of another one
        return error.needed_bytes if error.limit_bytes == nbytes else nbytes
    getattr(streamed, HANDLE).shutdown()
    return nbytes


def _layer(
    model: nn.Module,
    checkpoint: Checkpoint | Compact,
    matched: Matched,
    options: Mapping[str, Any],
) -> nn.Module:
    streamed = layer(model, **options)
    runtime: Runtime = getattr(streamed, HANDLE)
    try:
        runtime.convert_registry_to_file_backed_sharded(
            checkpoint, key_map=matched.keys
        )
    except BaseException:
        if options.get("pool") is None:
            runtime.shutdown()
        else:  # it is the caller's, who may try again
            runtime.shutdown_keep_pool()
        raise
    return streamed
