"""Tensors that a model needs otherwise than its checkpoint has them: written once.

They could be computed at every load, or kept in memory. The first would cost each pass
what one pass costs here, the second is what streaming from files is to avoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.errors import CheckpointError
from stagehand.stores.checkpoint import Checkpoint, like_of
from stagehand.stores.files import FileSet
from stagehand.stores.safetensors import read_tensor
from stagehand.stores.writing import check_room, safetensors_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from stagehand.pretrained.naming import Made

__all__ = ["PREFIX", "shapes_of", "write"]

PREFIX = "made from the checkpoint: "
"""Stands before a model's name, which may be another tensor's name in the files."""


def shapes_of(made: Made, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return what would be computed, on `meta`."""
    entries = {key: checkpoint[key] for key in made.sources}
    sources = {key: like_of(e.shape, e.dtype) for key, e in entries.items()}
    return dict(made.compute(sources))


def write(
    all_made: Sequence[Made], checkpoint: Checkpoint, folder: Path, nbytes: int
) -> Checkpoint:
    """Compute tensors, one `Made` at a time, and write a file for each.

    Memory: what one of them reads and makes.

    Args:
        all_made: What to compute.
        checkpoint: Where from.
        folder: Where to; empty.
        nbytes: What all of them take.

    Raises:
        CheckpointError: If there is no room, or a file cannot be read or written.
    """
    check_room(folder, nbytes, "give a scratch_dir on a larger disk")
    files = FileSet(checkpoint.files)
    try:
        for number, made in enumerate(all_made):
            sources = {k: read_tensor(files, checkpoint[k]) for k in made.sources}
            computed = made.compute(sources)
            tensors = {PREFIX + name: tensor for name, tensor in computed.items()}
            path = folder / f"{number:06}.safetensors"
            try:
                with safetensors_file(path.open("wb"), tensors) as body:
                    for name in sorted(tensors, key=lambda n: -tensors[n].itemsize):
                        body.add(name, tensors[name])
            except OSError as error:
                raise CheckpointError(f"{path} cannot be written: {error}") from error
    finally:
        files.close()
    return Checkpoint.open(folder)
