"""Models whose weights lie in files in a smaller form: packed, or quantized to INT8.

Note "What parameters are on the host". A parameter has to be real wherever it is: it
can be saved, read, merged. So the smaller form is decoded once, weight by weight, into
a file of its own, that goes when the runtime does; host tensors are private views of
it, read when they are touched. What the disk gives and what crosses the link for each
load is the smaller form.
"""

from __future__ import annotations

import difflib
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from stagehand.core.layout import plain_tensors
from stagehand.errors import (
    ConfigError,
    ManifestError,
    StagehandWarning,
    TensorMismatchError,
)
from stagehand.files import key_of, make_real, names_in
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.compact_wires import packed_wire, quantized_wire
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import PackedWeight, packed_name, packed_weights
from stagehand.stores.safetensors import host_tensor
from stagehand.stores.squareq import QuantizedWeight, SquareQ, manifest_of
from stagehand.stores.squareq_layout import dequantized
from stagehand.stores.wired import WiredStore
from stagehand.stores.writing import check_room, safetensors_file
from stagehand.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from stagehand.assembly import Parts
    from stagehand.files import KeyMap
    from stagehand.residency.blocks import Block
    from stagehand.wires import Wires

    Weight = PackedWeight | QuantizedWeight

__all__ = [
    "Compact",
    "CompactFiles",
    "expand",
    "quantized_model",
    "refuse_quantized",
    "scratch_folder",
    "wire_blocks",
]

_WEIGHT = ".weight"
_BIAS = ".bias"
_LISTED = 5
_FILE = "decoded.safetensors"
_QUIET_BYTES = 64 * MIB  # may go to the system's temporary directory without a word


class CompactFiles:
    """The open files of one runtime that hold weights in a smaller form."""

    def __init__(self) -> None:
        self._sets: list[FileSet] = []

    def add(self, *sets: FileSet) -> None:
        """Have files be checked and closed from now on."""
        self._sets += sets

    def check(self) -> None:
        """Do nothing if every file is what it was.

        Raises:
            ShardChangedError: Otherwise.
        """
        for files in self._sets:
            files.check()

    def close(self) -> None:
        """Let go of the files; host tensors stay valid. Idempotent."""
        for files in self._sets:
            files.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A checkpoint of which some weights are stored in a smaller form."""

    plain: Checkpoint
    """All weights as they are meant, decoded ones included."""
    weights: Mapping[str, Weight]
    """What is stored smaller, by the weight's name."""
    files: FileSet
    """The open files that hold it."""


def scratch_folder(nbytes: int, scratch_dir: str | Path | None) -> Path:
    """Make a folder for what is computed; who asks for it removes it.

    Args:
        nbytes: How much will be there.
        scratch_dir: Where; None for the system's directory for temporary files.

    Raises:
        ConfigError: If the directory cannot be written to.
    """
    if scratch_dir is None and nbytes > _QUIET_BYTES:
        warnings.warn(
            f"{format_bytes(nbytes)} of the model are not stored as it needs them:"
            f" they are computed once, into {tempfile.gettempdir()}; name a directory"
            " in scratch_dir, on a fast disk",
            StagehandWarning,
            stacklevel=4,
        )
    try:
        return Path(tempfile.mkdtemp(prefix="stagehand-", dir=scratch_dir))
    except OSError as error:
        raise ConfigError(
            f"scratch_dir is '{scratch_dir}': expected a directory that can be written"
            f" to ({error})"
        ) from error


# A whole checkpoint


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
        likes = {n: _like(w.shape, torch.bfloat16) for n, w in weights.items()}
        decoded = _decode(folder, likes, lambda name: weights[name].decoded(files))
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
    if file is not None and len(checkpoint.files) == 1 and manifest_of(file).exists():
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
            likes[layer.name + _WEIGHT] = _like((rows.count, rows.columns), layer.dtype)
            if layer.bias is not None:
                likes[layer.name + _BIAS] = _like((rows.count,), layer.dtype)
        folder = folder_for(_bytes_of(likes))
        decoded = _decode(folder, likes, lambda name: _value(slab, name, likes[name]))
    except BaseException:
        slab.files.close()
        raise
    weights = {name + _WEIGHT: layer for name, layer in layers.items()}
    plain = checkpoint.without(slab.stored_names).joined(decoded)
    return Compact(plain=plain, weights=weights, files=slab.files)


def _bytes_of(likes: Mapping[str, torch.Tensor]) -> int:
    return sum(like.numel() * like.element_size() for like in likes.values())


def _like(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _value(slab: SquareQ, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a weight or a bias as the model has it, in host memory."""
    layer = slab.layers[name.removesuffix(_WEIGHT).removesuffix(_BIAS)]
    if name.endswith(_BIAS) and layer.bias is not None:
        return layer.bias.to(like.dtype)
    weight = dequantized(
        layer.codes_of(slab.files),
        layer.scales,
        layer.zeros,
        columns=layer.rows.columns,
        dtype=like.dtype,
    )
    return weight.view(like.shape)


def _decode(
    folder: Path,
    likes: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
) -> Checkpoint:
    """Write weights, one after the other, and return the file as a checkpoint."""
    check_room(folder, _bytes_of(likes))
    path = folder / _FILE
    names = sorted(likes, key=lambda name: -likes[name].element_size())
    fillers = [f"{name}.filler" for name in names]
    with safetensors_file(path, [*names, *fillers]) as body, plain_tensors():
        for name, filler in zip(names, fillers, strict=True):
            body.add(name, value(name))
            # Which pages of a mapping were written tells which tensors were: so none
            # is shared by two.
            body.fill_page(filler)
    return Checkpoint.open(path)


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
        store = _wired(parts, block, block.store.hosts, weights, compact.files)
        if store.wire is not None:
            made.append((block, store))
    wires.check(store.wire for _, store in made)
    for block, store in made:
        parts.masters.hand_over(block, store)
    wires.reserve()


def _wired(
    parts: Parts,
    block: Block,
    hosts: list[torch.Tensor],
    weights: list[Weight | None],
    files: FileSet,
) -> WiredStore:
    kind = parts.device.torch_device.type
    packed = [w if isinstance(w, PackedWeight) else None for w in weights]
    wire = packed_wire(block.layout, hosts, packed, files, kind)
    if wire is None:
        quantized = [w if isinstance(w, QuantizedWeight) else None for w in weights]
        wire = quantized_wire(block.layout, hosts, quantized, files, kind)
    return WiredStore(block.layout, hosts, wire)


# A model, and quantized weights for some of its layers


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
    folder = folder_for(_bytes_of(likes))
    decoded = _decode(folder, likes, lambda key: _value(slab, key, likes[key]))
    files = FileSet(decoded.files)
    try:
        made = _quantized_stores(parts, slab, names, decoded, files)
        wires.check(store.wire for _, store in made)
    except BaseException:
        files.close()
        raise
    wires.freeze({key: t for t, key in names.values() if key.endswith(_WEIGHT)})
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
        layers = [key.removesuffix(_WEIGHT) for key in keys]
        weights: list[Weight | None] = [
            slab.layers.get(layer) if layer != key else None
            for layer, key in zip(layers, keys, strict=True)
        ]
        store = WiredStore(block.layout, hosts, None)
        if not parts.device.is_host and block in parts.streamed:
            store = _wired(parts, block, hosts, weights, slab.files)
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
            key_of(name + _WEIGHT).removesuffix(_WEIGHT),
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
        for suffix in (_WEIGHT, _BIAS):
            layer = slab.layers.get(key.removesuffix(suffix))
            if not key.endswith(suffix) or layer is None:
                continue
            if suffix == _WEIGHT:
                _check_weight(slab, name, tensor, layer)
            elif layer.bias is None:
                continue
            found[id(tensor)] = tensor, key
            seen.add(key)
    wanted = {name + _WEIGHT for name in slab.layers}
    wanted |= {n + _BIAS for n, layer in slab.layers.items() if layer.bias is not None}
    missing = sorted(wanted - seen)
    if missing:
        known = [key_of(name) for name, _ in model.named_parameters()]
        listing = "; ".join(
            f"{key!r}, nearest {difflib.get_close_matches(key, known, n=2)}"
            for key in missing[:_LISTED]
        )
        raise ManifestError(
            f"{slab.path}: {len(missing)} of {len(wanted)} quantized tensors are not in"
            f" {type(model).__name__}: expected parameters of these names, found none:"
            f" {listing}; build the model that was quantized, or give key_map"
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
