"""Writes checkpoints in a smaller form: packed losslessly, or quantized to INT8.

One tensor is in memory at a time. Files are written under other names and get their own
when all are complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from stagehand.core.layout import plain_tensors
from stagehand.errors import CheckpointError, ConfigError, HeaderError
from stagehand.stores.checkpoint import Checkpoint, like_of, read_index
from stagehand.stores.files import FileSet
from stagehand.stores.headers import check_name, code_of
from stagehand.stores.packed_files import is_packed, packed_name
from stagehand.stores.packing import pack
from stagehand.stores.pickled import Pickled
from stagehand.stores.safetensors import read_tensor
from stagehand.stores.squareq import (
    MANIFEST_SUFFIX,
    has_manifest,
    manifest_of,
)
from stagehand.stores.squareq_layout import Rows
from stagehand.stores.squareq_manifest import PAD, LayerSpec, Manifest
from stagehand.stores.writing import (
    SafetensorsBody,
    Together,
    check_room,
    safetensors_file,
    together,
)
from stagehand.units import parse_bytes, rounded_up

__all__ = [
    "EXCLUDED",
    "SHARD_SIZE",
    "Written",
    "convert_to_packed",
    "convert_to_squareq",
    "is_converted",
    "quantize",
]

EXCLUDED = r"embed|norm|(^|\.)wte\.|(^|\.)wpe\.|(^|\.)shared\."
"""What is not quantized by default: by names, embeddings and norms."""

SHARD_SIZE = "5GB"
"""The most bytes of tensors in a packed file by default, before they are packed."""

_INDEX = ".index.json"
_MODEL = "model.safetensors"  # what to call it where the source has no name for it
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
# Where libraries save models with torch.save, in one file or in several.
_OLD_NAMES = ("pytorch_model.bin", "diffusion_pytorch_model.bin")
_WEIGHT = ".weight"
_LEAST_SHARE = 0.75  # no packed checkpoint is smaller
_AT_ONCE = 1 << 17  # weights for each thread: they stay in a core's own cache
_LARGEST_CODE = 127
_SMALLEST_SCALE = 1e-8
# Folders beside the weights say how their outputs are used, as 1_Pooling does.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*/config.json")

Progress = Callable[[int, int], None]
"""Is called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a conversion wrote."""

    path: Path
    """The file, or the index of several."""
    smaller: int
    """Tensors in the smaller form."""
    plain: int
    """Tensors that are as they were."""
    source_bytes: int
    """Bytes of all tensors before."""
    nbytes: int
    """Bytes of the files."""


def convert_to_packed(
    source: str | Path,
    target: str | Path,
    *,
    max_shard_size: int | str = SHARD_SIZE,
    progress: Progress | None = None,
) -> Written:
    """Write a checkpoint whose bfloat16 weights are packed, where they shrink.

    `stagehand.load()` and file-backed streaming read it; every bit is kept.

    Args:
        source: A safetensors file or folder, or a file of `torch.save`, or the folder
            of a library that saved with it.
        target: A folder, made if it is not there.
        max_shard_size: The most bytes of tensors in one file, counted as they are
            before they are packed: with more of them there are several, and an index.
            A larger tensor has a file of its own.
        progress: Told after each tensor.

    Raises:
        CheckpointError: If the source is not sound, or the target cannot be written:
            nothing is left of it then.
        ConfigError: If the source is in a smaller form already, or `max_shard_size` is
            no size.
    """
    most = parse_bytes(max_shard_size, name="max_shard_size")
    with _opened(source) as tensors, _folder(target) as folder:
        path = folder / tensors.file_name
        check_room(folder, int(_LEAST_SHARE * tensors.nbytes))
        with _replacing(path, tensors) as files:
            shards = {}
            for shard, names in tensors.shards(path, most).items():
                opened = files.file(shard)
                shards[shard] = _write_packed(opened, tensors, names, progress)
            if len(shards) > 1:
                files.put_aside(path)
                path = path.with_name(path.name + _INDEX)
                _write_json(files, path, _index(shards))
            tensors.copy_beside(folder, files)
        packed = sum(is_packed(n) for body in shards.values() for n in body.header)
        return tensors.written(path, shards, packed)


def _write_packed(
    opened: AbstractContextManager[BinaryIO],
    tensors: "_Tensors",
    names: Sequence[str],
    progress: Progress | None,
) -> SafetensorsBody:
    # The names of packed tensors are longer: there must be room for either.
    longest = [packed_name(name, tensors.sizes[name].shape) for name in names]
    with safetensors_file(opened, longest, format="pt") as body:
        # Streams are multiples of 256 bytes; what is left follows by element size.
        left = []
        for name in names:
            tensor = tensors.read(name)
            stream = None
            if tensor.dtype == torch.bfloat16 and tensor.numel():
                stream = pack(tensor.contiguous())
            if stream is None:
                left.append(name)
                continue
            body.add(packed_name(name, tensor.shape), stream.stream)
            tensors.tell(name, progress)
        for name in tensors.by_width(left):
            body.add(name, tensors.read(name))
            tensors.tell(name, progress)
    return body


def _index(shards: Mapping[Path, SafetensorsBody]) -> dict[str, object]:
    weight_map = {
        name: path.name for path, body in shards.items() for name in body.header
    }
    total = sum(body.nbytes for body in shards.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_json(files: Together, path: Path, document: Mapping[str, object]) -> None:
    with files.file(path) as file:
        file.write(json.dumps(document, indent=1).encode())


def convert_to_squareq(
    source: str | Path,
    target: str | Path,
    *,
    only: str | None = None,
    exclude: str = EXCLUDED,
    progress: Progress | None = None,
) -> Written:
    """Write SquareQ v2: weights of linear layers as INT8, all else as it is.

    Each matrix named `*.weight`, of a floating-point type of more than 8 bits, is
    quantized unless it is excluded. That changes values: a row becomes whole numbers
    from -127 to 127 times a scale. The format is one file, of whatever size, and its
    manifest.

    Args:
        source: A safetensors file or folder, or a file of `torch.save`, or the folder
            of a library that saved with it.
        target: A folder, made if it is not there.
        only: A regular expression: weights in whose names it is not found stay as they
            are.
        exclude: A regular expression: so do those in whose names this one is found.
        progress: Told after each tensor.

    Raises:
        CheckpointError: If the source is not sound, holds nothing to quantize, or the
            target cannot be written: nothing is left of it then.
        ConfigError: If the source is in a smaller form already, or `only` or `exclude`
            is no regular expression.
    """
    wanted, unwanted = _expression("--only", only), _expression("--exclude", exclude)
    with _opened(source) as tensors, _folder(target) as folder:
        chosen = [
            name
            for name, like in tensors.sizes.items()
            if name.endswith(_WEIGHT) and like.dim() == 2 and like.is_floating_point()
            if like.element_size() > 1  # what has 8 bits already would not shrink
            if like.numel() and (wanted is None or wanted.search(name))
            if unwanted is None or not unwanted.search(name)
        ]
        if not chosen:
            raise CheckpointError(
                f"{tensors.path} has nothing to quantize: expected matrices of a"
                f" floating-point type named '*{_WEIGHT}', found none among"
                f" {len(tensors.sizes)} tensors that --only and --exclude let through"
            )
        path = folder / tensors.file_name
        layers = [tensors.layer(name) for name in chosen]
        saved = sum(tensors.bytes_of(name) for name in chosen)
        codes = sum(la.rows.count * (la.rows.padded + 8) for la in layers)
        check_room(folder, tensors.nbytes - saved + codes)
        with _replacing(path, tensors) as files:
            _write_squareq(files.file(path), tensors, layers, progress)
            manifest = Manifest.of(manifest_of(path), tensors.path.name, layers)
            _write_json(files, manifest.path, manifest.document())
            tensors.copy_beside(folder, files)
        return tensors.written(path, [path], len(layers))


def _write_squareq(
    opened: AbstractContextManager[BinaryIO],
    tensors: "_Tensors",
    layers: list[LayerSpec],
    progress: Progress | None,
) -> None:
    keys = [k for la in layers for k in (la.codes, la.scales, la.zeros, la.bias) if k]
    taken = {layer.name + _WEIGHT for layer in layers}
    taken |= {layer.bias for layer in layers if layer.bias is not None}
    left = [name for name in tensors.sizes if name not in taken]
    scales: dict[str, torch.Tensor] = {}
    with safetensors_file(opened, [*keys, *left], format="pt") as body:
        # Codes are multiples of 64 bytes; what is left follows by element size.
        for layer in layers:
            name = layer.name + _WEIGHT
            codes, scales[layer.name] = quantize(tensors.read(name), name, tensors.path)
            body.add(layer.codes, codes)
            tensors.tell(name, progress)
        wide = [name for name in left if tensors.sizes[name].element_size() >= 8]
        for name in tensors.by_width(wide):
            body.add(name, tensors.read(name))
            tensors.tell(name, progress)
        for layer in layers:
            body.add(layer.scales, scales[layer.name])
            body.add(layer.zeros, torch.zeros_like(scales[layer.name]))
            if layer.bias is not None:
                body.add(layer.bias, tensors.read(layer.bias).float())
                tensors.tell(layer.bias, progress)
        for name in tensors.by_width(set(left) - set(wide)):
            body.add(name, tensors.read(name))
            tensors.tell(name, progress)


def quantize(
    weight: torch.Tensor, name: str, path: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix's INT8 codes, padded, and the scale of each row.

    A row's scale is that of its largest weight over 127; no zero point is needed.

    Raises:
        CheckpointError: If a weight is not finite.
    """
    count, columns = weight.shape
    with plain_tensors():
        padded = columns + -columns % PAD
        codes = torch.zeros(count, padded, dtype=torch.int8, device="cpu")
        scales = torch.empty(count, dtype=torch.float32, device="cpu")
        step = max(1, _AT_ONCE * torch.get_num_threads() // columns)
        for at in range(0, count, step):
            exact = weight[at : at + step].to(torch.float32, copy=True)
            least, most = exact.aminmax(dim=1)
            largest = torch.maximum(least.neg_(), most)
            if not bool(largest.isfinite().all()):
                row = int((~largest.isfinite()).nonzero()[0])
                raise CheckpointError(
                    f"tensor {name!r} in {path} cannot be quantized: expected finite"
                    f" weights, found {largest[row].item()} in row {at + row}; exclude"
                    " it"
                )
            mine = (largest / _LARGEST_CODE).clamp_(min=_SMALLEST_SCALE)
            exact.div_(mine[:, None]).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
            codes[at : at + step, :columns].copy_(exact)
            scales[at : at + step] = mine
        return codes, scales


def _expression(option: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise ConfigError(
            f"{option} {text!r} is not a regular expression: {error}"
        ) from None


@contextmanager
def _replacing(path: Path, tensors: "_Tensors") -> Iterator[Together]:
    """Write the files of a model, and remove those of the one that was there before.

    Raises:
        ConfigError: If others are there, too: who reads the folder would find two
            models in it.
        CheckpointError: If one cannot be written, or not be removed.
    """
    own = re.compile(
        rf"{re.escape(path.stem)}(-\d+-of-\d+)?\.safetensors({re.escape(_INDEX)})?"
    )
    found = {p for end in ("", _INDEX) for p in path.parent.glob(f"*.safetensors{end}")}
    source = {file.resolve() for file in {tensors.path, *tensors.files}}
    written = {file.resolve() for file in {path, path.parent, *found}}
    others = sorted(p.name for p in found if not own.fullmatch(p.name))
    if others or source & written:
        raise ConfigError(
            f"{path.parent} cannot be converted to: expected an empty folder, or one"
            f" that holds {path.name} only, found"
            f" {', '.join(others[:3]) or 'the source'}; choose another one"
        )
    with together() as files:
        yield files
    for old in {*found, manifest_of(path)} - files.paths:
        _remove(old)


def _remove(old: Path) -> None:
    try:
        old.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{old}, of the model that was there before, cannot be removed ({error}):"
            " the new one is complete beside it; remove it, or who reads the folder may"
            " take it for a part"
        ) from error


# Sources and targets


class _Tensors:
    """The tensors of a source, read one by one."""

    def __init__(
        self,
        path: Path,
        file_name: str,
        files: Iterable[Path],
        sizes: Mapping[str, torch.Tensor],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self.path = path
        self.file_name = file_name
        """What to call the file that is written."""
        self.files = set(files)
        """The files that `path` stands for."""
        self.sizes = sizes
        """By name, a tensor on `meta` of the shape and type of the one in the file."""
        self.read = read
        """Returns the tensor of a name, in host memory."""
        self.nbytes = sum(t.numel() * t.element_size() for t in sizes.values())
        self._done = 0

    def layer(self, name: str) -> LayerSpec:
        """Return the linear layer that a weight belongs to."""
        layer, like = name.removesuffix(_WEIGHT), self.sizes[name]
        count, columns = like.shape
        bias = self.sizes.get(f"{layer}.bias")
        has_bias = (
            bias is not None
            and bias.shape == (count,)
            and bias.is_floating_point()
            and bias.element_size() <= 4  # it is written as float32
        )
        return LayerSpec(
            name=layer,
            rows=Rows(count=count, columns=columns, padded=rounded_up(columns, PAD)),
            codes=f"{layer}.qweight",
            scales=f"{layer}.scale",
            zeros=f"{layer}.zero_point",
            bias=f"{layer}.bias" if has_bias else None,
            dtype=like.dtype,
        )

    def shards(self, path: Path, most: int) -> dict[Path, list[str]]:
        """Return which tensors go to which file, in their order, `most` bytes in each.

        Args:
            path: The file if it is the only one.
            most: Bytes; a single larger tensor has a file of its own.
        """
        parts: list[list[str]] = [[]]
        room = most
        for name in self.sizes:
            nbytes = self.bytes_of(name)
            if nbytes > room and parts[-1]:
                parts.append([])
                room = most
            parts[-1].append(name)
            room -= nbytes
        if len(parts) == 1:
            return {path: parts[0]}
        return {
            path.with_stem(f"{path.stem}-{i:05}-of-{len(parts):05}"): names
            for i, names in enumerate(parts, start=1)
        }

    def by_width(self, names: "set[str] | list[str]") -> list[str]:
        """Return names by element size, widest first: so every address is aligned."""
        return sorted(names, key=lambda name: (-self.sizes[name].element_size(), name))

    def bytes_of(self, name: str) -> int:
        return self.sizes[name].numel() * self.sizes[name].element_size()

    def tell(self, name: str, progress: Progress | None) -> None:
        self._done += self.bytes_of(name)
        if progress is not None:
            progress(self._done, self.nbytes)

    def copy_beside(self, folder: Path, files: Together) -> None:
        """Copy configuration and tokenizer, so that the folder is a whole model.

        Raises:
            CheckpointError: If one cannot be read or written.
        """
        if not self.path.is_dir():
            return
        for pattern in _BESIDE:
            for file in self.path.glob(pattern):
                if not file.name.endswith((_INDEX, MANIFEST_SUFFIX)):
                    _copy(file, folder / file.relative_to(self.path), files)

    def written(self, path: Path, files: Iterable[Path], smaller: int) -> Written:
        return Written(
            path=path,
            smaller=smaller,
            plain=len(self.sizes) - smaller,
            source_bytes=self.nbytes,
            nbytes=sum(file.stat().st_size for file in files),
        )


def _copy(file: Path, target: Path, files: Together) -> None:
    try:
        target.parent.mkdir(exist_ok=True)
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be copied to {target}: {error}"
        ) from error
    with files.file(target) as copy:
        copy.write(content)


@contextmanager
def _opened(source: str | Path) -> Iterator[_Tensors]:
    path = Path(source).expanduser().absolute()
    pickled = _pickled_files(path)
    if pickled:
        found = _unpickled(pickled)
        sizes = {name: like_of(t.shape, t.dtype) for name, (_, t) in found.items()}
        try:
            yield _Tensors(
                path,
                _MODEL if path.is_dir() else _file_name(path),
                pickled,
                sizes,
                lambda n: found[n][0].read(n, found[n][1]),
            )
        finally:
            for file, _ in found.values():
                file.files.close()
        return
    checkpoint = Checkpoint.open(path)
    if _is_smaller(checkpoint):
        raise ConfigError(
            f"{path} is packed or quantized already: expected a plain checkpoint;"
            " convert the one that it was made from"
        )
    sizes = {name: like_of(e.shape, e.dtype) for name, e in checkpoint.items()}
    files = FileSet(checkpoint.files)
    held, root = checkpoint.files, checkpoint.root
    if root.is_dir():
        root = next(iter(held)) if len(held) == 1 else root / _MODEL
    try:
        yield _Tensors(
            path,
            _file_name(root),
            held,
            sizes,
            lambda n: read_tensor(files, checkpoint[n]),
        )
    finally:
        files.close()


def _file_name(source: Path) -> str:
    """What to call the file that is written for one, or for an index."""
    return Path(source.name.removesuffix(_INDEX)).with_suffix(".safetensors").name


def is_converted(path: str | Path) -> bool:
    """Return whether a safetensors file or folder is in a smaller form.

    Raises:
        CheckpointError: If it is not sound.
    """
    return _is_smaller(Checkpoint.open(path))


def _is_smaller(checkpoint: Checkpoint) -> bool:
    return any(map(is_packed, checkpoint)) or any(map(has_manifest, checkpoint.files))


def _pickled_files(path: Path) -> list[Path]:
    """Return the files of `torch.save` that a source is, if it has no others."""
    if os.path.isfile(path):
        return [path] if path.suffix in _PICKLED else []
    if not os.path.isdir(path) or any(path.glob("*.safetensors*")):
        return []
    for stem in _OLD_NAMES:
        if (path / (stem + _INDEX)).is_file():
            return sorted(set(read_index(path / (stem + _INDEX)).values()))
        if (path / stem).is_file():
            return [path / stem]
    return []


def _unpickled(paths: Iterable[Path]) -> dict[str, tuple[Pickled, torch.Tensor]]:
    """Return all tensors, each with the file that it is in."""
    found: dict[str, tuple[Pickled, torch.Tensor]] = {}
    for path in paths:
        file = Pickled(path)
        named = file.content
        if not isinstance(named, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in named.items()
        ):
            raise CheckpointError(
                f"{path} cannot be converted: expected a dictionary of tensors by name,"
                f" found {type(named).__name__}; save the model's state_dict()"
            )
        for name, tensor in named.items():
            _check_writable(path, name, tensor)
        for name in named.keys() & found.keys():
            raise CheckpointError(
                f"tensor {name!r} is in {found[name][0].path} and in {path}: expected"
                " it in one of them"
            )
        found.update((name, (file, tensor)) for name, tensor in named.items())
    return found


def _check_writable(path: Path, name: str, tensor: torch.Tensor) -> None:
    try:
        check_name(name)
        code_of(tensor.dtype)
    except HeaderError as error:
        raise CheckpointError(
            f"tensor {name!r} in {path} cannot be converted: {error}"
        ) from error


@contextmanager
def _folder(target: str | Path) -> Iterator[Path]:
    """Make the folder, and remove it again if it was not there and nothing came."""
    folder = Path(target).expanduser().absolute()
    is_new = not os.path.exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # such as a NUL in its name
        raise CheckpointError(
            f"{folder} cannot be written to: expected a folder ({error})"
        ) from error
    try:
        yield folder
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
