"""Quantized weights for some layers of a model that is there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from stagehand.compact import wired_store
from stagehand.core.layout import plain_tensors
from stagehand.decoding import BIAS, WEIGHT, bytes_of, decode, value_of
from stagehand.errors import ManifestError, TensorMismatchError
from stagehand.files import make_real
from stagehand.names import nearest
from stagehand.stores.files import FileSet
from stagehand.stores.safetensors import host_tensor
from stagehand.stores.wired import WiredStore, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from stagehand.assembly import Parts
    from stagehand.residency.blocks import Block
    from stagehand.stores.checkpoint import Checkpoint
    from stagehand.stores.squareq import QuantizedWeight, SquareQ
    from stagehand.wires import Wires

__all__ = ["quantized_model"]

_LISTED = 5


def quantized_model(
    parts: Parts,
    wires: Wires,
    model: nn.Module,
    slab: SquareQ,
    key_of: Callable[[str], str],
    folder_for: Callable[[int], Path],
) -> tuple[FileSet, int]:
    """Let quantized weights be the truth of the layers that they are for.

    All or nothing: all is matched and decoded before anything changes.

    Args:
        parts: Of the runtime; all is at home.
        wires: Of the runtime.
        model: The model.
        slab: The open weights.
        key_of: From the model's names to the slab's.
        folder_for: Returns an empty folder for so many bytes.

    Returns:
        The file of what was decoded, and the number of blocks that have quantized
        weights now.

    Raises:
        ManifestError: If layers and model do not fit each other.
        StagehandOOMError: If the budget has no room to decode a block.
    """
    if slab.manifest is not None:
        slab.manifest.check_signature(_linears(model, key_of))
    names = _matched(model, slab, key_of)
    likes = {key: tensor for tensor, key in names.values()}
    folder = folder_for(bytes_of(likes))
    decoded = decode(folder, likes, lambda key: value_of(slab, key, likes[key]))
    files = FileSet(decoded.files)
    try:
        made = _quantized_stores(parts, slab, names, decoded, files)
        wires.check(store.wire for _, store in made)
    except BaseException:
        files.close()
        raise
    wires.freeze({key: t for t, key in names.values() if key.endswith(WEIGHT)})
    for block, store in made:
        make_real(block.tensors, store.hosts)
        parts.masters.hand_over(block, store)
    wires.reserve()
    return files, len(made)


def _quantized_stores(
    parts: Parts,
    slab: SquareQ,
    names: Mapping[int, tuple[torch.Tensor, str]],
    decoded: Checkpoint,
    files: FileSet,
) -> list[tuple[Block, WiredStore]]:
    """Return each block that gets new values, with the store that has them."""
    odd = next((names[id(t)][1] for t in parts.odd if id(t) in names), None)
    if odd is not None:
        raise ManifestError(
            f"{slab.path}: {odd!r} is for a parameter that is no plain tensor: expected"
            " one whose memory can be replaced; leave it out with --exclude"
        )
    made: list[tuple[Block, WiredStore]] = []
    for block in parts.blocks:
        keys = [names[id(t)][1] if id(t) in names else "" for t in block.tensors]
        if not any(keys):
            continue
        hosts = [
            host_tensor(files, decoded[key]) if key else _kept(block, number)
            for number, key in enumerate(keys)
        ]
        layers = [key.removesuffix(WEIGHT) for key in keys]
        weights = [
            slab.layers.get(layer) if layer != key else None
            for layer, key in zip(layers, keys, strict=True)
        ]
        store = WiredStore(block.layout, hosts, None, origin_of(block.store))
        if not parts.device.is_host and block in parts.streamed:
            store = wired_store(parts, block, hosts, weights, slab.files)
        made.append((block, store))
    return made


def _kept(block: Block, number: int) -> torch.Tensor:
    """Return a tensor's values, in memory that stays when its block's image goes."""
    if block.store is None:
        tensor = block.tensors[number]
        if tensor.is_meta:
            name = block.layout.entries[number].name
            raise ManifestError(
                f"tensor {name!r} of block {block.name!r} is on the meta device:"
                " expected values, found none, and none in the quantized weights; load"
                " the model from its own files first"
            )
        return tensor.detach()
    host = block.store.hosts[number]
    with plain_tensors():
        return host.clone() if block.image is not None else host


def _linears(
    model: nn.Module, key_of: Callable[[str], str]
) -> list[tuple[str, int, int, bool]]:
    return [
        (
            key_of(name + WEIGHT).removesuffix(WEIGHT),
            module.in_features,
            module.out_features,
            module.bias is not None,
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]


def _matched(
    model: nn.Module, slab: SquareQ, key_of: Callable[[str], str]
) -> dict[int, tuple[torch.Tensor, str]]:
    """Return each tensor that gets new values, with its name in the slab, by id."""
    found: dict[int, tuple[torch.Tensor, str]] = {}
    seen: set[str] = set()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        key = key_of(name)
        for suffix in (WEIGHT, BIAS):
            layer = slab.layers.get(key.removesuffix(suffix))
            if not key.endswith(suffix) or layer is None:
                continue
            if suffix == WEIGHT:
                _check_weight(slab, name, tensor, layer)
            elif layer.bias is None:
                continue
            found[id(tensor)] = tensor, key
            seen.add(key)
    wanted = {name + WEIGHT for name in slab.layers}
    wanted |= {n + BIAS for n, layer in slab.layers.items() if layer.bias is not None}
    missing = sorted(wanted - seen)
    if missing:
        known = [key_of(name) for name, _ in model.named_parameters()]
        shown = "; ".join(f"{key!r}{nearest(key, known)}" for key in missing[:_LISTED])
        raise ManifestError(
            f"{slab.path}: {len(missing)} of {len(wanted)} quantized tensors are not in"
            f" {type(model).__name__}: expected parameters of these names, found none:"
            f" {shown}; build the model that was quantized, or give key_map"
        )
    return found


def _check_weight(
    slab: SquareQ, name: str, tensor: torch.Tensor, layer: QuantizedWeight
) -> None:
    rows = layer.rows
    fits = tensor.dim() >= 2 and tensor.shape[0] == rows.count
    if not fits or tensor.numel() != rows.count * rows.columns:
        raise TensorMismatchError(
            f"{slab.path}: layer {layer.name!r} does not fit parameter {name!r}:"
            f" expected {[rows.count, rows.columns]}, found {list(tensor.shape)}; build"
            " the model that was quantized"
        )
    if not tensor.is_floating_point():
        raise TensorMismatchError(
            f"{slab.path}: layer {layer.name!r} does not fit parameter {name!r}:"
            f" expected a floating-point type, found {tensor.dtype}"
        )
