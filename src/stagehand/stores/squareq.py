"""Opens weights that SquareQ quantized to INT8: `.fpk` and `.slab` (v1), and v2."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stagehand.errors import ManifestError
from stagehand.names import nearest
from stagehand.stores.checkpoint import Checkpoint, Extent
from stagehand.stores.files import FileSet
from stagehand.stores.pickled import Pickled
from stagehand.stores.safetensors import read_tensor
from stagehand.stores.squareq_layout import Rows
from stagehand.stores.squareq_manifest import (
    LayerSpec,
    Manifest,
    read_manifest,
    refuse,
)

__all__ = [
    "MANIFEST_SUFFIX",
    "QuantizedWeight",
    "SquareQ",
    "has_manifest",
    "manifest_of",
]

MANIFEST_SUFFIX = ".manifest.json"
_V1_SUFFIXES = (".fpk", ".slab")
_V1_VERSIONS = ("squareq_bp8_v1", "bp8")
_V1_LAYOUTS = ("rowwise_sym_int8", "rowwise")
_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """One quantized layer of an open checkpoint."""

    name: str
    """The module's path in the model."""
    rows: Rows
    """The sizes of its weight."""
    codes: Extent
    """INT8, rows by padded columns."""
    scales: torch.Tensor
    """float32, one a row."""
    zeros: torch.Tensor
    """float32, one a row."""
    bias: torch.Tensor | None
    """float32, one a row."""
    dtype: torch.dtype
    """What the weight was before, as far as is known."""

    def codes_of(self, files: FileSet) -> torch.Tensor:
        """Return the codes as a matrix, in memory.

        Raises:
            CheckpointError: If the file changed or cannot be read.
        """
        return read_tensor(files, self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareQ:
    """An open checkpoint of quantized weights. All values but the codes are checked."""

    path: Path
    """The file that holds them."""
    layers: Mapping[str, QuantizedWeight]
    """By name."""
    files: FileSet
    """The files that are open."""
    manifest: Manifest | None
    """None for v1, which has it inside."""

    @property
    def stored_names(self) -> set[str]:
        """The names of all tensors in the file that are quantized weights."""
        layers = () if self.manifest is None else self.manifest.layers
        found = {n for la in layers for n in (la.codes, la.scales, la.zeros)}
        return found | {layer.bias for layer in layers if layer.bias is not None}

    @classmethod
    def open(cls, path: str | Path, manifest: str | Path | None = None) -> "SquareQ":
        """Open and check quantized weights.

        Args:
            path: A `.fpk` or `.slab` file; a `.safetensors` file; or a folder that
                holds one manifest.
            manifest: The manifest of a `.safetensors` file; by default
                `NAME.manifest.json` beside it.

        Raises:
            CheckpointError: If a file cannot be read or is not sound.
            ManifestError: If the manifest does not fit its file or this library.
        """
        file = Path(path).expanduser().absolute()
        if file.suffix in _V1_SUFFIXES:
            return _open_v1(file)
        if manifest is None and os.path.isdir(file):
            found = _find_manifest(file)
            if found is None:
                raise ManifestError(
                    f"{file}: expected one *{MANIFEST_SUFFIX} beside a .safetensors"
                    " file, found none; give the path of a quantized checkpoint, or"
                    " make one with `stagehand convert`"
                )
            file = found.with_name(
                found.name.removesuffix(MANIFEST_SUFFIX) + ".safetensors"
            )
        beside = manifest_of(file) if manifest is None else Path(manifest)
        return _open_v2(file, beside.expanduser().absolute())


def manifest_of(file: Path) -> Path:
    """Return where the manifest of a `.safetensors` file is."""
    return file.with_name(file.name.removesuffix(".safetensors") + MANIFEST_SUFFIX)


def has_manifest(file: Path) -> bool:
    """Return whether there is a manifest beside a `.safetensors` file."""
    return os.path.exists(manifest_of(file))  # its longer name may be none


def _find_manifest(folder: Path) -> Path | None:
    """Return the manifest in a folder, or None.

    Raises:
        ManifestError: If there are several.
    """
    found = sorted(folder.glob(f"*{MANIFEST_SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:_LISTED])
        raise ManifestError(
            f"{folder}: expected one *{MANIFEST_SUFFIX}, found {len(found)} ({names});"
            " give the path of the .safetensors file"
        )
    return found[0] if found else None


# Version 2


def _open_v2(file: Path, manifest_path: Path) -> SquareQ:
    manifest = read_manifest(manifest_path)
    checkpoint = Checkpoint.open(file)
    files = FileSet(checkpoint.files)
    try:
        layers = {
            layer.name: _layer(manifest_path, layer, checkpoint, files)
            for layer in manifest.layers
        }
    except BaseException:
        files.close()
        raise
    return SquareQ(path=file, layers=layers, files=files, manifest=manifest)


def _layer(
    manifest: Path, layer: LayerSpec, checkpoint: Checkpoint, files: FileSet
) -> QuantizedWeight:
    rows = layer.rows

    def find(key: str, dtype: torch.dtype, *shape: int) -> Extent:
        what = f"tensor {key!r} of layer {layer.name!r} in the file"
        expected = f"{dtype} {list(shape)}"
        if key not in checkpoint:
            refuse(manifest, what, expected, f"none{nearest(key, checkpoint)}")
        extent = checkpoint[key]
        if (extent.dtype, extent.shape) != (dtype, shape):
            refuse(manifest, what, expected, f"{extent.dtype} {list(extent.shape)}")
        return extent

    codes = find(layer.codes, torch.int8, rows.count, rows.padded)
    # In memory, for they are sent with every load.
    scales = read_tensor(files, find(layer.scales, torch.float32, rows.count))
    zeros = read_tensor(files, find(layer.zeros, torch.float32, rows.count))
    bias = None
    if layer.bias is not None:
        bias = read_tensor(files, find(layer.bias, torch.float32, rows.count))
    _check_values(codes.path, layer.name, scales, zeros)
    return QuantizedWeight(
        name=layer.name,
        rows=rows,
        codes=codes,
        scales=scales,
        zeros=zeros,
        bias=bias,
        dtype=layer.dtype,
    )


def _check_values(
    path: Path, name: str, scales: torch.Tensor, zeros: torch.Tensor
) -> None:
    """Refuse numbers that no quantizer writes, and that would make no weights."""
    for what, values, good, expected in (
        ("scales", scales, scales.isfinite() & (scales > 0), "numbers above 0"),
        ("zero points", zeros, zeros.isfinite(), "finite numbers"),
    ):
        bad = int((~good).nonzero()[0]) if not bool(good.all()) else -1
        if bad >= 0:
            found = f"{values[bad].item()} in row {bad}"
            refuse(path, f"{what} of layer {name!r}", expected, found)


# Version 1


def _open_v1(path: Path) -> SquareQ:
    file = Pickled(path)
    try:
        layers = _layers_v1(file)
    except BaseException:
        file.files.close()
        raise
    return SquareQ(path=path, layers=layers, files=file.files, manifest=None)


def _layers_v1(file: Pickled) -> dict[str, QuantizedWeight]:
    path, payload = file.path, file.content
    if not isinstance(payload, dict):
        refuse(path, "the file", "a dictionary", type(payload).__name__)
    manifest = _part(path, payload, "manifest", dict, "the file")
    version = manifest.get("quant_version")
    if version not in _V1_VERSIONS:
        expected = " or ".join(map(repr, _V1_VERSIONS))
        refuse(path, "quant_version of the manifest", expected, repr(version))
    layout = manifest.get("layout")
    if layout not in _V1_LAYOUTS:
        expected = " or ".join(map(repr, _V1_LAYOUTS))
        refuse(path, "layout of the manifest", expected, repr(layout))
    listed = _part(path, manifest, "layers", list, "the manifest")
    tensors = _part(path, payload, "layers", dict, "the file")
    layers = [_layer_v1(file, fields, tensors) for fields in listed]
    named = {layer.name: layer for layer in layers}
    if len(named) != len(listed) or set(named) != set(tensors):
        odd = sorted(set(tensors) ^ set(named))[:_LISTED]
        what = "layers of the manifest"
        more = f"without or besides {odd}" if odd else "one of them twice"
        found = f"{len(listed)}, {more}"
        refuse(path, what, f"the {len(tensors)} that the file holds", found)
    return named


def _layer_v1(
    file: Pickled, fields: Any, tensors: Mapping[str, Any]
) -> QuantizedWeight:
    path = file.path
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        refuse(path, "a layer of the manifest", "a dictionary with a name", fields)
    name = fields["name"]
    where = f"layer {name!r}"
    sizes: list[Any] = [fields.get(key) for key in ("out", "inp", "padded_in")]
    if any(type(size) is not int or size < 1 for size in sizes):
        refuse(path, f"out, inp, padded_in of {where}", "numbers above 0", sizes)
    rows = Rows(count=sizes[0], columns=sizes[1], padded=sizes[2])
    if rows.padded < rows.columns:
        refuse(path, f"padded_in of {where}", f"{rows.columns} or more", rows.padded)
    held = _part(path, tensors, name, dict, "the layers of the file")
    zero = "zero_point" if "zero_point" in held else "zero"
    wanted: dict[str, tuple[torch.dtype, Sequence[int]]] = {
        "qweight": (torch.int8, (rows.count, rows.padded)),
        "scale": (torch.float32, (rows.count,)),
        zero: (torch.float32, (rows.count,)),
    }
    if fields.get("has_bias"):
        wanted["bias"] = (torch.float32, (rows.count,))
    for key, (dtype, shape) in wanted.items():
        tensor = _part(path, held, key, torch.Tensor, where)
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            refuse(path, f"{key} of {where}", f"{dtype} {list(shape)}", found)
    scales, zeros = (file.read(f"{name}.{key}", held[key]) for key in ("scale", zero))
    _check_values(path, name, scales, zeros)
    return QuantizedWeight(
        name=name,
        rows=rows,
        codes=file.extent(f"{name}.qweight", held["qweight"]),
        scales=scales,
        zeros=zeros,
        bias=file.read(f"{name}.bias", held["bias"]) if "bias" in wanted else None,
        dtype=torch.bfloat16,
    )


def _part(
    path: Path, fields: Mapping[str, Any], key: str, kind: type, where: str
) -> Any:
    value = fields.get(key)
    if not isinstance(value, kind):
        found = "none" if key not in fields else type(value).__name__
        refuse(path, f"{key!r} of {where}", f"a {kind.__name__}", found)
    return value
