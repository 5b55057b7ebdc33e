"""Which tensors each layer of a stack has: as a caller says, or found in files."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagehand.errors import (
    ConfigError,
    MissingTensorError,
    OffsetError,
    TensorMismatchError,
)
from stagehand.names import listing
from stagehand.settings import check_value
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.files import FileSet
from stagehand.stores.headers import read_header
from stagehand.stores.packed_files import PackedWeight, packed_weights, unpacked
from stagehand.stores.squareq import has_manifest
from stagehand.units import format_bytes

if TYPE_CHECKING:
    import os

    from stagehand.stores.checkpoint import Extent
    from stagehand.stores.headers import Header, Span

    Stored = Extent | PackedWeight

__all__ = [
    "BlockKeys",
    "BlockSizes",
    "Stack",
    "TensorInfo",
    "check_sources",
    "describe",
    "open_stack",
]

TensorInfo = Mapping[str, tuple[str, int, Sequence[int]]]
BlockKeys = Sequence[str] | Sequence[Sequence[str]]
BlockSizes = Mapping[str, int] | Sequence[Mapping[str, int]]

_LISTED = 5
_NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # str(int(...)) gives the same text again
_MAIN_SHARE = 0.75  # a stack with this share of all stacks' bytes is the one meant


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The layers of a model that a streamer runs, and where their tensors lie."""

    prefix: str
    """What a layer's number follows in the names of its tensors."""
    layers: tuple[dict[str, Stored], ...]
    """For each layer, its tensors by the rest of their names."""
    checkpoint: Checkpoint
    """All tensors that may be asked for."""
    packed: Mapping[str, PackedWeight]
    """The packed ones of these tensors, by the names of their weights."""


def open_stack(
    model_dir: str | os.PathLike[str],
    *,
    tensor_info: TensorInfo,
    shard_offsets: Mapping[str, int],
    block_keys: BlockKeys,
    block_sizes: BlockSizes | None,
    num_layers: int,
    layer_prefix: str | None,
) -> Stack:
    """Hold what a caller says of a checkpoint against the files, and find the layers.

    Raises:
        ConfigError: If arguments contradict each other.
        CheckpointError: If a file is not sound, or not what the arguments say.
    """
    check_sources(model_dir, tensor_info, shard_offsets)
    check_value("layer_prefix", layer_prefix, str | None)
    if isinstance(num_layers, bool) or not isinstance(num_layers, int):
        raise ConfigError(f"num_layers is {num_layers!r}: expected a whole number")
    if num_layers < 1:
        raise ConfigError(f"num_layers is {num_layers}: expected at least one layer")
    checkpoint = _checked_files(Path(model_dir), tensor_info, shard_offsets)
    keys = _for_each_layer(block_keys, num_layers)
    names = [unpacked(name)[0] for name in tensor_info]
    prefix = _find_prefix(names, keys, layer_prefix)
    packed = _packed_in(checkpoint)
    layers = tuple(
        {
            key: packed.get(name) or checkpoint[name]
            for key, name in ((key, f"{prefix}{number}.{key}") for key in names)
        }
        for number, names in enumerate(keys)
    )
    if block_sizes is not None:
        _check_sizes(layers, prefix, block_sizes)
    return Stack(prefix=prefix, layers=layers, checkpoint=checkpoint, packed=packed)


def check_sources(
    model_dir: object, tensor_info: object, shard_offsets: object
) -> None:
    """Refuse arguments of wrong types among those that say where tensors are.

    Raises:
        ConfigError: If one is of another type.
    """
    check_value("model_dir", model_dir, str | Path)
    check_value("tensor_info", tensor_info, Mapping)
    check_value("shard_offsets", shard_offsets, Mapping)


def _packed_in(checkpoint: Checkpoint) -> dict[str, PackedWeight]:
    files = FileSet(checkpoint.files)
    try:
        return packed_weights(checkpoint, files)
    finally:
        files.close()


def describe(
    checkpoint: Checkpoint, root: Path, layer_prefix: str | None = None
) -> dict[str, object]:
    """Return the arguments that say of a checkpoint what `open_stack` wants to know.

    Args:
        checkpoint: The files.
        root: The directory that they are in.
        layer_prefix: What a layer's number follows; None if there is one stack.

    Raises:
        ConfigError: If there is no stack of layers, or more than one could be meant, or
            the checkpoint is quantized.
        MissingTensorError: If a layer between two others has no tensors.
    """
    for path in checkpoint.files:
        if has_manifest(path):
            raise ConfigError(
                f"{path} holds quantized weights: expected plain or packed ones; give"
                " the checkpoint that it was made from, or open it with"
                " stagehand.load()"
            )
    stored = {unpacked(name)[0]: name for name in checkpoint}
    stacks = _find_stacks(stored)
    prefix = _choose(stacks, checkpoint, stored, layer_prefix)
    numbered = stacks[prefix]
    count = max(numbered) + 1
    if count > len(numbered):
        absent = (str(number) for number in range(count) if number not in numbered)
        raise MissingTensorError(
            f"the layers {prefix}0 to {prefix}{count - 1} are not complete: number"
            f" {', '.join(islice(absent, _LISTED))} has no tensor in {checkpoint}"
        )
    keys = [list(numbered[number]) for number in range(count)]
    sizes = [
        {
            key: math.prod(unpacked(name)[1] or checkpoint[name].shape)
            for key, name in ((key, stored[f"{prefix}{n}.{key}"]) for key in names)
        }
        for n, names in enumerate(keys)
    ]
    headers = {path: read_header(path) for path in checkpoint.files}
    shards = {path: path.relative_to(root).as_posix() for path in headers}
    return {
        "tensor_info": {
            span.name: (shards[path], span.start, span.shape)
            for path, header in headers.items()
            for span in header.spans
            if _is_in(checkpoint, path, header, span)
        },
        "shard_offsets": {
            shards[path]: header.data_offset for path, header in headers.items()
        },
        "block_keys": keys[0] if keys == keys[:1] * count else keys,
        "block_sizes": sizes[0] if sizes == sizes[:1] * count else sizes,
        "num_layers": count,
        "layer_prefix": prefix,
    }


def _is_in(checkpoint: Checkpoint, path: Path, header: Header, span: Span) -> bool:
    """Whether this is the tensor of that name: an index may prefer another file's."""
    if span.dtype is None:  # a type that torch lacks: who asks for it is told
        return True
    extent = checkpoint[span.name]
    return (extent.path, extent.offset) == (path, header.data_offset + span.start)


# Stacks in a checkpoint


def _find_stacks(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Return, for each prefix, the layers' numbers and the rest of their names.

    A name's first number counts: those behind it are parts of a layer, like experts.
    """
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        parts = name.split(".")
        numbers = (i for i, part in enumerate(parts[:-1]) if _NUMBER.fullmatch(part))
        place = next(numbers, None)
        if place is not None:
            prefix = ".".join([*parts[:place], ""])
            stacks[prefix][int(parts[place])].append(".".join(parts[place + 1 :]))
    return stacks


def _choose(
    stacks: Mapping[str, Mapping[int, Sequence[str]]],
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    wanted: str | None,
) -> str:
    if wanted is not None and wanted in stacks:
        return wanted
    sizes = {
        prefix: sum(
            checkpoint[stored[f"{prefix}{number}.{key}"]].nbytes
            for number, keys in numbered.items()
            for key in keys
        )
        for prefix, numbered in stacks.items()
    }
    if wanted is None and sizes:
        prefix = max(sizes, key=sizes.__getitem__)
        if sizes[prefix] >= _MAIN_SHARE * sum(sizes.values()):
            return prefix
    listing = ", ".join(
        f"{prefix!r} ({len(stacks[prefix])} layers, {format_bytes(size)})"
        for prefix, size in sorted(sizes.items(), key=lambda item: -item[1])[:_LISTED]
    )
    given = "is not given" if wanted is None else f"is {wanted!r}"
    raise ConfigError(
        f"layer_prefix {given}, and {checkpoint} has {len(stacks)} stacks of numbered"
        f" layers: {listing or 'none'}; give the one to stream"
    )


# What a caller says


def _checked_files(
    root: Path, tensor_info: TensorInfo, shard_offsets: Mapping[str, int]
) -> Checkpoint:
    """Return the tensors that are named, each found to be where it is said to be."""
    if not tensor_info:
        raise ConfigError("tensor_info is empty: expected the model's tensors")
    root = root.expanduser().absolute()
    shards = sorted({str(shard) for shard, _, _ in tensor_info.values()})
    shard_offsets = {str(shard): at for shard, at in shard_offsets.items()}
    headers = {}
    for shard in shards:
        if shard not in shard_offsets:
            raise ConfigError(
                f"shard_offsets lacks {shard!r}, which tensor_info names: expected the"
                " byte at which its data begins"
            )
        headers[shard] = header = read_header(root / shard)
        if shard_offsets[shard] != header.data_offset:
            raise OffsetError(
                f"shard_offsets says that the data of {header.path} begins at byte"
                f" {shard_offsets[shard]}: expected {header.data_offset}"
            )
    spans = {s: {span.name: span for span in h.spans} for s, h in headers.items()}
    places = {}
    for name, (shard, offset, shape) in tensor_info.items():
        header, span = headers[str(shard)], spans[str(shard)].get(name)
        if span is None:
            raise MissingTensorError(
                f"tensor_info places {name!r} in {header.path}, which has no such"
                " tensor"
            )
        _check_span(name, header, span, offset, shape)
        places[name] = (header, span)
    files = {header.path: header.stamp for header in headers.values()}
    return Checkpoint(root, places, files)


def _check_span(
    name: str, header: Header, span: Span, offset: int, shape: Sequence[int]
) -> None:
    if offset != span.start:
        raise OffsetError(
            f"tensor_info places {name!r} at byte {offset} of the data of"
            f" {header.path}: expected {span.start}"
        )
    if tuple(shape) != span.shape:
        raise TensorMismatchError(
            f"tensor_info gives {name!r} in {header.path} the shape {list(shape)}:"
            f" expected {list(span.shape)}"
        )


def _for_each_layer(block_keys: BlockKeys, num_layers: int) -> list[list[str]]:
    listed = _as_list(block_keys)
    alike = all(isinstance(key, str) for key in listed)
    for keys in [listed] if alike else listed:
        names = _as_list(keys)
        if not names or len(set(map(str, names))) < len(names):
            raise ConfigError(
                f"block_keys has {keys or block_keys!r}: expected the names of a"
                " layer's tensors, each once; one list for all layers, or one for each"
            )
    if alike:
        return [[str(key) for key in listed]] * num_layers
    if len(listed) != num_layers:
        raise ConfigError(
            f"block_keys has the names for {len(listed)} layers, num_layers is"
            f" {num_layers}: expected one list of names for each layer, or one for all"
        )
    return [list(keys) for keys in listed]


def _as_list(keys: object) -> list[Any]:
    """Return the names in a list, none where there is no list."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        return []
    return list(keys)


def _find_prefix(
    names: Iterable[str], keys: Sequence[Sequence[str]], wanted: str | None
) -> str:
    """Return the prefix of the layers' numbers with which each layer has all keys."""
    known = set(names)
    candidates = {wanted} if wanted is not None else _candidates(known, keys[0])
    missing = {
        prefix: [
            name
            for number, names in enumerate(keys)
            for name in (f"{prefix}{number}.{key}" for key in names)
            if name not in known
        ]
        for prefix in candidates
    }
    whole = sorted(prefix for prefix, absent in missing.items() if not absent)
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise ConfigError(
            f"block_keys are those of {len(whole)} stacks of layers:"
            f" {', '.join(map(repr, whole))}; give the one to stream as layer_prefix"
        )
    if not missing:
        raise MissingTensorError(
            f"no tensor in tensor_info is called '<prefix>0.{keys[0][0]}': expected the"
            " tensors of layer 0 under the names in block_keys"
        )
    absent = min(missing.values(), key=len)
    raise MissingTensorError(
        f"tensor_info lacks {len(absent)} tensors of {len(keys)} layers:"
        f" {listing([*map(repr, absent)])}"
    )


def _candidates(names: Iterable[str], keys: Sequence[str]) -> set[str]:
    tails = tuple(f"0.{key}" for key in keys)
    return {
        name.removesuffix(tail)
        for name in names
        for tail in tails
        if name == tail or name.endswith(f".{tail}")
    }


def _check_sizes(
    layers: Sequence[Mapping[str, Stored]], prefix: str, block_sizes: BlockSizes
) -> None:
    expected: object = Mapping | Collection[Mapping]  # type: ignore[type-arg]
    check_value("block_sizes", block_sizes, expected)
    alike = isinstance(block_sizes, Mapping)
    if not alike and len(block_sizes) != len(layers):
        raise ConfigError(
            f"block_sizes has the sizes of {len(block_sizes)} layers, num_layers is"
            f" {len(layers)}: expected one mapping for each layer, or one for all"
        )
    for number, layer in enumerate(layers):
        sizes = block_sizes if alike else block_sizes[number]  # type: ignore[index]
        for key, tensor in layer.items():
            found = math.prod(tensor.shape)
            said = sizes.get(key)  # type: ignore[union-attr]
            if said != found:
                raise TensorMismatchError(
                    f"block_sizes says that {prefix}{number}.{key} has {said}"
                    f" elements: found {found}, {list(tensor.shape)} in {tensor.path}"
                )
