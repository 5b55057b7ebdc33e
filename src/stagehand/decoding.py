"""Decodes weights that are stored in a smaller form, once, into a file.

Note "What parameters are on the host". A parameter has to be real wherever it is: it
can be saved, read, merged. So the smaller form is decoded once, weight by weight, into
a file of its own, that goes when the runtime does; host tensors are private views of
it, read when they are touched. What the disk gives and what crosses the link for each
load is the smaller form.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stagehand.core.layout import plain_tensors
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.squareq_layout import dequantized
from stagehand.stores.writing import check_room, replaced, safetensors_file
from stagehand.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from stagehand.stores.squareq import SquareQ

__all__ = [
    "BIAS",
    "WEIGHT",
    "bytes_of",
    "decode",
    "removal_of",
    "scratch_folder",
    "value_of",
]

WEIGHT = ".weight"
"""How the name of a layer's weight ends."""
BIAS = ".bias"
"""How the name of a layer's bias ends."""

_FILE = "decoded.safetensors"
_QUIET_BYTES = 64 * MIB  # may go to the system's temporary directory without a word


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
        where = None if scratch_dir is None else Path(scratch_dir).absolute()
        return Path(tempfile.mkdtemp(prefix="stagehand-", dir=where))
    except (OSError, ValueError) as error:  # such as a NUL in its name
        raise ConfigError(
            f"scratch_dir is '{scratch_dir}': expected a directory that can be written"
            f" to ({error})"
        ) from error


def removal_of(folders: Iterable[Path]) -> Callable[[], None]:
    """Return what removes folders with all that is in them, where they were made.

    A forked process that ends, or shuts its copy of a model down, leaves the files to
    whose they are.
    """
    return partial(_remove, folders, os.getpid())


def _remove(folders: Iterable[Path], maker: int) -> None:
    if os.getpid() == maker:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def bytes_of(likes: Mapping[str, torch.Tensor]) -> int:
    """Return how many bytes tensors have, by their names."""
    return sum(like.numel() * like.element_size() for like in likes.values())


def value_of(slab: SquareQ, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return a weight or a bias as the model has it, in host memory."""
    layer = slab.layers[name.removesuffix(WEIGHT).removesuffix(BIAS)]
    if name.endswith(BIAS) and layer.bias is not None:
        return layer.bias.to(like.dtype)
    weight = dequantized(
        layer.codes_of(slab.files),
        layer.scales,
        layer.zeros,
        columns=layer.rows.columns,
        dtype=like.dtype,
    )
    return weight.view(like.shape)


def decode(
    folder: Path,
    likes: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
) -> Checkpoint:
    """Write weights, one after the other, and return the file as a checkpoint.

    Args:
        folder: An empty one.
        likes: What there will be, by name.
        value: Returns a weight's values.

    Raises:
        CheckpointError: If there is no room, or a weight is not sound.
    """
    check_room(folder, bytes_of(likes), "give a scratch_dir on a larger disk")
    path = folder / _FILE
    names = sorted(likes, key=lambda name: -likes[name].element_size())
    fillers = [f"{name}.filler" for name in names]
    file = safetensors_file(replaced(path), [*names, *fillers])
    with file as body, plain_tensors():
        for name, filler in zip(names, fillers, strict=True):
            body.add(name, value(name))
            # Which pages of a mapping were written tells which tensors were: so none
            # is shared by two.
            body.fill_page(filler)
    return Checkpoint.open(path)
