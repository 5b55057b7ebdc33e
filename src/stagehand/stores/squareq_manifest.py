"""The manifest of a SquareQ v2 checkpoint: what it must say, and what it says.

A checkpoint `NAME.safetensors` holds, for each quantized linear layer, `LAYER.qweight`
(INT8), `LAYER.scale`, `LAYER.zero_point` and perhaps `LAYER.bias` (float32);
`NAME.manifest.json` says which, of which sizes, and for which model.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from stagehand.errors import ManifestError, ReadError
from stagehand.stores.headers import load_json
from stagehand.stores.squareq_layout import Rows

__all__ = [
    "ABI_VERSION",
    "BITS",
    "PAD",
    "LayerSpec",
    "Manifest",
    "read_manifest",
    "refuse",
    "signature_of",
]

ABI_VERSION = 1
BITS = 8
PAD = 64
_VERSION = "squareq_bp8_v2"
_RUNTIME_VERSION = (0, 1, 0)
_FIXED = {
    "quant_bits": BITS,
    "quant_scheme": "per_row_symmetric",
    "quant_axis": 0,
    "dtype_qweight": "int8",
    "dtype_scale": "float32",
    "dtype_zero_point": "float32",
}
_AGAIN = "convert the checkpoint again with `stagehand convert`"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One quantized layer as the manifest describes it."""

    name: str
    """The module's path in the model."""
    rows: Rows
    """The sizes of its weight."""
    codes: str
    """The name of its INT8 codes in the file."""
    scales: str
    """The name of its scales."""
    zeros: str
    """The name of its zero points."""
    bias: str | None
    """The name of its bias, if the file has one."""
    dtype: torch.dtype
    """What its weight was before, if the manifest says so; else bfloat16."""

    @property
    def signed(self) -> tuple[str, int, int, bool]:
        """What counts for the signature."""
        return self.name, self.rows.columns, self.rows.count, self.bias is not None

    def document(self) -> dict[str, object]:
        """Return the layer's part of a manifest."""
        rows = self.rows
        return {
            "canonical_name": self.name,
            "qweight_key": self.codes,
            "scale_key": self.scales,
            "zero_point_key": self.zeros,
            "bias_key": self.bias,
            "orig_shape": [rows.count, rows.columns],
            "packed_shape": [rows.count, rows.padded],
            "pad_k": PAD,
            **_FIXED,
            "block_id": None,
            "dtype_original": str(self.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checked manifest."""

    path: Path
    """Where it was read, or will be written."""
    architecture: str
    """Which model it is for, in words."""
    layers: tuple[LayerSpec, ...]
    """Sorted by name."""
    signature: str
    """A hash of the linear layers of the model for which it was made."""

    @classmethod
    def of(
        cls, path: Path, architecture: str, layers: Iterable[LayerSpec]
    ) -> "Manifest":
        """Return the manifest of layers that are all there are."""
        found = tuple(sorted(layers, key=lambda layer: layer.name))
        signature = signature_of(layer.signed for layer in found)
        return cls(
            path=path, architecture=architecture, layers=found, signature=signature
        )

    def check_signature(
        self, linears: Iterable[tuple[str, int, int, bool]] = ()
    ) -> None:
        """Do nothing if it was made for its own layers, or those of this model.

        Args:
            linears: Name, inputs, outputs and whether there is a bias, of all linear
                layers of a model.

        Raises:
            ManifestError: Otherwise.
        """
        own = [layer.signed for layer in self.layers]
        if self.signature not in (*_signatures(own), *_signatures(list(linears))):
            what = "model_signature of the manifest"
            expected = f"{signature_of(own)!r} for its layers"
            refuse(self.path, what, expected, repr(self.signature))

    def document(self) -> dict[str, object]:
        """Return the manifest as the object that its file holds as JSON."""
        return {
            "model_signature": self.signature,
            "architecture_id": self.architecture,
            "quant_version": _VERSION,
            "kernel_abi_version": ABI_VERSION,
            "min_runtime_version": ".".join(map(str, _RUNTIME_VERSION)),
            "layer_count": len(self.layers),
            "total_qweight_bytes": _codes_bytes(self.layers),
            "layers": [layer.document() for layer in self.layers],
        }


def signature_of(layers: Iterable[tuple[str, int, int, int]]) -> str:
    """Return the signature of linear layers: name, inputs, outputs, has a bias."""
    lines = sorted(f"{name}:{i}:{o}:{bias}" for name, i, o, bias in layers)
    return hashlib.sha256("|".join(lines).encode()).hexdigest()[:16]


def _signatures(layers: list[tuple[str, int, int, bool]]) -> list[str]:
    """Return the signature, with whether there is a bias as a word and as a number."""
    numbers = [(name, i, o, int(bias)) for name, i, o, bias in layers]
    return [signature_of(layers), signature_of(numbers)]


def refuse(
    path: Path, what: str, expected: object, found: object, advice: str = _AGAIN
) -> NoReturn:
    """Raise the error for something in a quantized checkpoint.

    Raises:
        ManifestError: Always.
    """
    raise ManifestError(f"{path}: {what}: expected {expected}, found {found}; {advice}")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest by itself.

    Raises:
        ReadError: If the file cannot be read.
        ManifestError: If it is not a manifest that this library can follow.
    """
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # such as a NUL in its name
        raise ReadError(f"manifest {path} cannot be read: {error}") from error
    try:
        document = load_json(text)
    except ValueError as error:
        refuse(path, "the manifest", "valid JSON", error)
    if not isinstance(document, dict):
        refuse(path, "the manifest", "a JSON object", type(document).__name__)
    _check_versions(path, document)
    listed = _field(path, document, "layers", list, "the manifest")
    layers = tuple(_layer(path, number, fields) for number, fields in enumerate(listed))
    _check_layers(path, document, layers)
    return Manifest(
        path=path,
        architecture=str(document.get("architecture_id", "")),
        layers=tuple(sorted(layers, key=lambda layer: layer.name)),
        signature=_field(path, document, "model_signature", str, "the manifest"),
    )


def _check_versions(path: Path, document: Mapping[str, Any]) -> None:
    newer = "get a newer release of this library"
    version = _field(path, document, "quant_version", str, "the manifest")
    if version != _VERSION:
        refuse(path, "quant_version of the manifest", repr(_VERSION), repr(version))
    abi = _field(path, document, "kernel_abi_version", int, "the manifest")
    if not 1 <= abi <= ABI_VERSION:
        what = "kernel_abi_version of the manifest"
        refuse(path, what, f"1 to {ABI_VERSION}", abi, newer)
    wanted = document.get("min_runtime_version", "0.1.0")
    parts = str(wanted).split(".")
    known = all(part.isdigit() for part in parts)
    if not known or tuple(map(int, parts)) > _RUNTIME_VERSION:
        what = "min_runtime_version of the manifest"
        expected = f"at most {'.'.join(map(str, _RUNTIME_VERSION))}"
        refuse(path, what, expected, repr(wanted), newer)


def _check_layers(
    path: Path, document: Mapping[str, Any], layers: tuple[LayerSpec, ...]
) -> None:
    if not layers:
        refuse(path, "layers of the manifest", "at least one", "none")
    count = _field(path, document, "layer_count", int, "the manifest")
    if count != len(layers):
        refuse(path, "layer_count of the manifest", len(layers), count)
    for name, times in Counter(layer.name for layer in layers).items():
        if times > 1:
            refuse(path, f"layer {name!r} of the manifest", "one of it", times)
    nbytes = _field(path, document, "total_qweight_bytes", int, "the manifest")
    if nbytes != _codes_bytes(layers):
        what = "total_qweight_bytes of the manifest"
        refuse(path, what, _codes_bytes(layers), nbytes)


def _layer(path: Path, number: int, fields: Any) -> LayerSpec:
    if not isinstance(fields, dict):
        refuse(path, f"layer {number} of the manifest", "a JSON object", repr(fields))
    name = _field(path, fields, "canonical_name", str, f"layer {number}")
    where = f"layer {name!r}"
    for key, value in _FIXED.items():
        found = _field(path, fields, key, type(value), where)
        if found != value:
            refuse(path, f"{key} of {where}", repr(value), repr(found))
    count, columns = _sizes(path, fields, "orig_shape", where)
    packed_count, padded = _sizes(path, fields, "packed_shape", where)
    pad = _field(path, fields, "pad_k", int, where)
    least = -(-columns // pad) * pad if pad > 0 else -1
    if (packed_count, padded) != (count, least):
        what = f"packed_shape of {where}"
        expected = f"{[count, least]} for {[count, columns]} padded to {pad}"
        refuse(path, what, expected, [packed_count, padded])
    bias = fields.get("bias_key")
    if bias is not None and not isinstance(bias, str):
        refuse(path, f"bias_key of {where}", "a name or null", repr(bias))
    return LayerSpec(
        name=name,
        rows=Rows(count=count, columns=columns, padded=padded),
        codes=_field(path, fields, "qweight_key", str, where),
        scales=_field(path, fields, "scale_key", str, where),
        zeros=_field(path, fields, "zero_point_key", str, where),
        bias=bias,
        dtype=_dtype(path, fields.get("dtype_original", "bfloat16"), where),
    )


def _dtype(path: Path, name: Any, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        refuse(path, f"dtype_original of {where}", "a floating-point type", repr(name))
    return dtype


def _sizes(
    path: Path, fields: Mapping[str, Any], key: str, where: str
) -> tuple[int, int]:
    value = _field(path, fields, key, list, where)
    if len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        refuse(path, f"{key} of {where}", "two numbers above 0", value)
    return value[0], value[1]


def _field(
    path: Path, fields: Mapping[str, Any], key: str, kind: type, where: str
) -> Any:
    value = fields.get(key)
    if type(value) is not kind:
        found = "none" if key not in fields else repr(value)
        refuse(path, f"{key} of {where}", f"a value of type {kind.__name__}", found)
    return value


def _codes_bytes(layers: Iterable[LayerSpec]) -> int:
    return sum(layer.rows.count * layer.rows.padded for layer in layers)
