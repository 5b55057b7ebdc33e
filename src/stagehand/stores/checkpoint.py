"""Which tensor lies where in a safetensors checkpoint of one or several files.

Everything is read and checked before the first byte of a tensor is: a file that does
not hold what its header says, or a model that needs what no file has, is refused here.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import torch

from stagehand.errors import (
    CheckpointError,
    ConfigError,
    IndexMismatchError,
    MissingTensorError,
    ReadError,
    TensorMismatchError,
)
from stagehand.names import listing, nearest
from stagehand.stores.headers import FileStamp, Header, Span, load_json, read_header

__all__ = ["Checkpoint", "Extent", "KeyMap", "key_of", "like_of", "read_index"]

KeyMap = Callable[[str], str] | Mapping[str, str] | None

_INDEX_SUFFIX = ".safetensors.index.json"
# Whatever else is in a folder, the first of these is its model: the names and the order
# of transformers, then of diffusers.
_MODEL_NAMES = (
    "model.safetensors",
    f"model{_INDEX_SUFFIX}",
    f"diffusion_pytorch_model{_INDEX_SUFFIX}",
    "diffusion_pytorch_model.safetensors",
)
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.gguf", "*.msgpack")
_LISTED = 5


def like_of(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a shape and an element type, without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def key_of(name: str, key_map: KeyMap) -> str:
    """Return the files' name of what the model calls `name`.

    Args:
        name: A parameter's or a buffer's.
        key_map: As a function or a mapping; a name that a mapping lacks stays as it is.

    Raises:
        ConfigError: If it is neither, or gives what is no name.
    """
    if key_map is None:
        return name
    found: object
    if isinstance(key_map, Mapping):
        found = key_map.get(name, name)
    elif callable(key_map):
        found = key_map(name)
    else:
        raise ConfigError(f"key_map is {key_map!r}: expected a mapping or a function")
    if not isinstance(found, str):
        raise ConfigError(
            f"key_map gives {found!r} for {name!r}: expected the tensor's name in the"
            " files; names that a mapping lacks stay as they are"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One tensor's bytes in a file."""

    name: str
    """The tensor's name there."""
    path: Path
    """The file."""
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    """Length in bytes."""
    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Sizes; the elements lie in row-major order."""

    def between(self, start: int, end: int) -> "Extent":
        """Return where its bytes from `start` to `end` lie, as a tensor of uint8."""
        start, end = (min(at, self.nbytes) for at in (start, end))
        nbytes = end - start
        return Extent(
            name=self.name,
            path=self.path,
            offset=self.offset + start,
            nbytes=nbytes,
            dtype=torch.uint8,
            shape=(nbytes,),
        )


class Checkpoint(Mapping[str, Extent]):
    """The tensors of one safetensors file, or of a directory of them, by name.

    Holds no tensor and keeps no file open. A tensor whose element type or sizes torch
    does not have is listed, and raises only when it is asked for.

    Example:
        checkpoint = Checkpoint.open("path/to/model")
        extents = checkpoint.match({"norm.weight": (torch.float32, (384,))})
    """

    def __init__(
        self,
        root: Path,
        places: Mapping[str, tuple[Header, Span]],
        files: Mapping[Path, FileStamp],
    ) -> None:
        self._root = root
        self._places = places
        self._files = files

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Read and check every header of a checkpoint.

        Args:
            path: A safetensors file, an index file, or a directory. In a directory the
                file or index is taken that `transformers` or `diffusers` would take;
                else the only `*.safetensors.index.json`, else all `*.safetensors`.

        Raises:
            ReadError: If a file cannot be read.
            HeaderError: If a header is not what the format says.
            OffsetError: If byte ranges overlap, or leave bytes that belong to none.
            SizeMismatchError: If a byte range does not fit its shape and dtype.
            TruncatedShardError: If a file is shorter than its header says.
            IndexMismatchError: If the index names a file or a tensor that is not there,
                or two files hold one name.
            CheckpointError: If the directory holds no safetensors file.
        """
        given = Path(path).expanduser().absolute()
        try:
            root = _chosen(given)
            listed, paths = _find_files(root)
        except OSError as error:
            raise ReadError(f"{given} cannot be read: {error}") from error
        headers = [read_header(shard) for shard in paths]
        files = {header.path: header.stamp for header in headers}
        return cls(root, _merge(root, headers, listed), files)

    def joined(self, other: "Checkpoint") -> "Checkpoint":
        """Return both in one; of a name that both have, the other's counts."""
        return Checkpoint(
            self._root,
            {**self._places, **other._places},
            {**self._files, **other._files},
        )

    def without(self, names: Collection[str]) -> "Checkpoint":
        """Return the same without some tensors."""
        places = {name: at for name, at in self._places.items() if name not in names}
        return Checkpoint(self._root, places, self._files)

    @property
    def root(self) -> Path:
        """The file or index that it is, or the folder of which it is all files."""
        return self._root

    @property
    def files(self) -> Mapping[Path, FileStamp]:
        """The files, and what they were when their headers were read."""
        return self._files

    def __getitem__(self, name: str) -> Extent:
        """Return where a tensor lies.

        Raises:
            KeyError: If no file has it.
            TensorMismatchError: If torch has no such element type, or no such sizes.
        """
        header, span = self._places[name]
        if span.dtype is None:
            raise TensorMismatchError(
                f"tensor {name!r} in {header.path} is {_found(span)}: expected an "
                f"element type and sizes that torch {torch.__version__} has; convert it"
            )
        return Extent(
            name=name,
            path=header.path,
            offset=header.data_offset + span.start,
            nbytes=span.end - span.start,
            dtype=span.dtype,
            shape=span.shape,
        )

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._root)!r}, {len(self)} tensors{self._where()})"

    def match(
        self,
        names: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        key_map: KeyMap = None,
    ) -> dict[str, Extent]:
        """Return the extent of every parameter, under the parameter's name.

        Names must be equal: nothing is guessed, no prefix tried, no dtype converted.
        Tensors that no parameter asks for are left alone.

        Args:
            names: Dtype and shape of each parameter.
            key_map: The checkpoint's name of a parameter, as a function or a mapping;
                a name that the mapping lacks stays as it is.

        Raises:
            MissingTensorError: If the checkpoint lacks a name.
            TensorMismatchError: If a tensor has another dtype or shape.
            ConfigError: If `key_map` gives no name.
        """
        keys = {name: key_of(name, key_map) for name in names}
        missing = [name for name, key in keys.items() if key not in self]
        if missing:
            listing = "; ".join(
                self._describe_missing(name, keys[name], *names[name])
                for name in missing[:_LISTED]
            )
            more = "; ..." if len(missing) > _LISTED else ""
            raise MissingTensorError(
                f"{len(missing)} of {len(names)} parameters have no tensor in"
                f" {self._root}{self._where()}: {listing}{more}; give key_map if the"
                " checkpoint has them under other names"
            )
        return {
            name: self._matching(name, keys[name], dtype, tuple(shape))
            for name, (dtype, shape) in names.items()
        }

    def _matching(
        self, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Extent:
        header, span = self._places[key]
        if (span.dtype, span.shape) != (dtype, shape):
            raise TensorMismatchError(
                f"tensor {key!r} in {header.path} does not fit parameter {name!r}: "
                f"expected {dtype} {list(shape)}, found {_found(span)}; build the "
                f"model with the checkpoint's dtype and sizes"
            )
        return self[key]

    def _describe_missing(
        self, name: str, key: str, dtype: torch.dtype, shape: Sequence[int]
    ) -> str:
        wanted = f"{name!r}" if key == name else f"{name!r} (as {key!r})"
        near = nearest(key, self)
        return f"{wanted} expected {dtype} {list(shape)}, found none{near}"

    def _where(self) -> str:
        """The files' names, unless it is one file."""
        if self._root in self._files:
            return ""
        return f" ({listing([path.name for path in self._files])})"


def _found(span: Span) -> str:
    return f"{span.dtype or span.code} {list(span.shape)}"


def _mode(path: Path) -> int:
    """Return what kind of file is there, or 0.

    Raises:
        OSError: If the system refuses to say; from Python 3.14 on, `is_file()` says no.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def _chosen(given: Path) -> Path:
    """Return which file or index of a folder is the model, or the folder: all are."""
    if not S_ISDIR(_mode(given)):
        return given
    for name in _MODEL_NAMES:
        if S_ISREG(_mode(given / name)):
            return given / name
    found = sorted(given.glob(f"*{_INDEX_SUFFIX}"))
    if len(found) > 1:
        raise IndexMismatchError(
            f"{given} holds {len(found)} indexes, expected one: give the path of one of"
            f" {listing([path.name for path in found])}"
        )
    return found[0] if found else given


def _find_files(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """Return which file the index says holds which tensor, and all files."""
    if S_ISDIR(_mode(root)):
        paths = sorted(root.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(_no_weights(root))
        return {}, paths
    if root.name.endswith(_INDEX_SUFFIX):
        listed = read_index(root)
        return listed, sorted(set(listed.values()))
    return {}, [root]


def _no_weights(folder: Path) -> str:
    others = sorted(f.name for kind in _OTHER_FORMATS for f in folder.glob(kind))
    found = f"found {others[0]}, which is not read" if others else "found none"
    return (
        f"'{folder}' holds no weights: expected *.safetensors files, {found}; save the"
        " model with save_pretrained() or safetensors, or give `stagehand convert` a"
        " file of torch.save"
    )


def read_index(path: Path) -> dict[str, Path]:
    """Return which file holds which tensor.

    Raises:
        ReadError: If the index cannot be read.
        IndexMismatchError: If it is not valid, or names a file that is not there.
    """
    try:
        document = load_json(path.read_bytes())
    except OSError as error:
        raise ReadError(f"index {path} cannot be read: {error}") from error
    except ValueError as error:
        raise IndexMismatchError(f"index {path} is not valid: {error}") from error
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not all(
        isinstance(shard, str) for shard in listed.values()
    ):
        raise IndexMismatchError(
            f"index {path} is not valid: expected a 'weight_map' of tensor names to "
            f"file names"
        )
    files = {name: path.parent / shard for name, shard in listed.items()}
    paths = sorted(set(files.values()))
    try:
        absent = [shard.name for shard in paths if not S_ISREG(_mode(shard))]
    except OSError as error:
        raise ReadError(f"a file of index {path} cannot be read: {error}") from error
    if absent:
        raise IndexMismatchError(
            f"index {path} names {len(paths)} files, of which {len(absent)} are not "
            f"there: {listing(absent)}"
        )
    return files


def _merge(
    root: Path, headers: Sequence[Header], listed: Mapping[str, Path]
) -> dict[str, tuple[Header, Span]]:
    """Return every tensor's place: where the index says, else where it is found."""
    places: dict[str, tuple[Header, Span]] = {}
    twice: list[str] = []
    for header in headers:
        for span in header.spans:
            if listed.get(span.name, header.path) != header.path:
                continue
            if span.name in places:
                first = places[span.name][0].path.name
                twice.append(f"{span.name!r} in {first} and {header.path.name}")
            places[span.name] = (header, span)
    if twice:
        raise IndexMismatchError(
            f"{root} holds {len(twice)} tensors more than once: {listing(twice)}; "
            f"give the path of one file, or add an index that says which counts"
        )
    absent = [
        f"{name!r} in {path.name}"
        for name, path in listed.items()
        if name not in places
    ]
    if absent:
        raise IndexMismatchError(
            f"index {root} lists {len(listed)} tensors, of which {len(absent)} "
            f"are not in their files: {listing(absent)}"
        )
    return places
