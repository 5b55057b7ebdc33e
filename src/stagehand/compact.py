"""Checkpoints that hold weights in a smaller form: packed, or quantized to INT8.

What parameters are on the host then, `decoding` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stagehand.decoding import BIAS, WEIGHT, bytes_of, decode, value_of
from stagehand.errors import ConfigError
from stagehand.files import names_in
from stagehand.stores.checkpoint import key_of, like_of
from stagehand.stores.compact_wires import packed_wire, quantized_wire
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import PackedWeight, packed_name, packed_weights
from stagehand.stores.squareq import QuantizedWeight, SquareQ, has_manifest
from stagehand.stores.wired import WiredStore, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from stagehand.assembly import Parts
    from stagehand.residency.blocks import Block
    from stagehand.stores.checkpoint import Checkpoint, KeyMap
    from stagehand.wires import Wires

    Weight = PackedWeight | QuantizedWeight

__all__ = [
    "Compact",
    "expand",
    "refuse_quantized",
    "wire_blocks",
    "wired_store",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A checkpoint of which some weights are stored in a smaller form."""

    plain: Checkpoint
    """All weights as they are meant, decoded ones included."""
    weights: Mapping[str, Weight]
    """What is stored smaller, by the weight's name."""
    files: FileSet
    """The open files that hold it."""


def expand(checkpoint: Checkpoint, folder_for: Callable[[int], Path]) -> Compact | None:
    """Open what a checkpoint holds in a smaller form, and decode it once.

    Args:
        checkpoint: Of any form.
        folder_for: Returns an empty folder for so many bytes.

    Returns:
        None if nothing is stored smaller.

    Raises:
        CheckpointError: If something is not sound, or there is no room to decode to.
    """
    file = _quantized_file(checkpoint)
    if file is not None:
        return _expand_quantized(checkpoint, file, folder_for)
    files = FileSet(checkpoint.files)
    try:
        weights = packed_weights(checkpoint, files)
        if not weights:
            files.close()
            return None
        folder = folder_for(sum(2 * w.header.numel for w in weights.values()))
        likes = {n: like_of(w.shape, torch.bfloat16) for n, w in weights.items()}
        decoded = decode(folder, likes, lambda name: weights[name].decoded(files))
    except BaseException:
        files.close()
        raise
    stored = {packed_name(w.name, w.shape) for w in weights.values()}
    plain = checkpoint.without(stored).joined(decoded)
    return Compact(plain=plain, weights=weights, files=files)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Do nothing unless a checkpoint holds other values than it was made from.

    Raises:
        ConfigError: If it does.
    """
    file = _quantized_file(checkpoint)
    if file is not None:
        raise ConfigError(
            f"{file} holds quantized weights, of which only those of blocks would"
            " become the model's: expected a plain or packed checkpoint; call"
            " convert_registry_to_squareq_backed() instead"
        )


def _quantized_file(checkpoint: Checkpoint) -> Path | None:
    file = next(iter(checkpoint.files), None)
    if file is not None and len(checkpoint.files) == 1 and has_manifest(file):
        return file
    return None


def _expand_quantized(
    checkpoint: Checkpoint, file: Path, folder_for: Callable[[int], Path]
) -> Compact:
    slab = SquareQ.open(file)
    try:
        if slab.manifest is not None:
            slab.manifest.check_signature()
        layers = slab.layers
        likes: dict[str, torch.Tensor] = {}
        for layer in layers.values():
            rows = layer.rows
            likes[layer.name + WEIGHT] = like_of(
                (rows.count, rows.columns), layer.dtype
            )
            if layer.bias is not None:
                likes[layer.name + BIAS] = like_of((rows.count,), layer.dtype)
        folder = folder_for(bytes_of(likes))
        decoded = decode(folder, likes, lambda name: value_of(slab, name, likes[name]))
    except BaseException:
        slab.files.close()
        raise
    weights = {name + WEIGHT: layer for name, layer in layers.items()}
    plain = checkpoint.without(slab.stored_names).joined(decoded)
    return Compact(plain=plain, weights=weights, files=slab.files)


def wire_blocks(
    parts: Parts,
    wires: Wires,
    compact: Compact,
    model: nn.Module,
    key_map: KeyMap,
) -> None:
    """Let blocks that files back cross the link as they are stored.

    Args:
        parts: Of the runtime; all is at home.
        wires: Of the runtime.
        compact: The open checkpoint.
        model: The model.
        key_map: From its names to the checkpoint's.

    Raises:
        StagehandOOMError: If the budget has no room to decode a block.
    """
    names = names_in(model, compact.plain, key_map)
    keyed = {
        key: tensor
        for block in parts.blocks
        for tensor in block.tensors
        if isinstance(
            compact.weights.get(key := key_of(names[id(tensor)], key_map)),
            QuantizedWeight,
        )
    }
    for tensor in keyed.values():
        tensor.requires_grad_(False)
    wires.freeze(keyed)
    if parts.device.is_host:  # nothing crosses a link
        return
    made: list[tuple[Block, WiredStore]] = []
    for block in parts.streamed:
        if block.store is None:
            continue
        keys = [key_of(names[id(tensor)], key_map) for tensor in block.tensors]
        weights = [compact.weights.get(key) for key in keys]
        store = wired_store(parts, block, block.store.hosts, weights, compact.files)
        if store.wire is not None:
            made.append((block, store))
    wires.check(store.wire for _, store in made)
    for block, store in made:
        parts.masters.hand_over(block, store)
    wires.reserve()


def wired_store(
    parts: Parts,
    block: Block,
    hosts: list[torch.Tensor],
    weights: Sequence[Weight | None],
    files: FileSet,
) -> WiredStore:
    """Return a block's store: with a wire, if that is smaller.

    Args:
        parts: Of the runtime.
        block: The block.
        hosts: Its host tensors.
        weights: For each what a file holds of it in a smaller form.
        files: The open files of those.
    """
    kind = parts.device.torch_device.type
    packed = [w if isinstance(w, PackedWeight) else None for w in weights]
    before, layout = origin_of(block.store), block.layout
    wire = packed_wire(layout, hosts, packed, files, kind, before=before)
    if wire is None:
        quantized = [w if isinstance(w, QuantizedWeight) else None for w in weights]
        wire = quantized_wire(layout, hosts, quantized, files, kind, before=before)
    return WiredStore(layout, hosts, wire, before)
