"""A checkpoint of a stack, a file for each block, as models are published."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

__all__ = ["write_checkpoint"]


def write_checkpoint(model: nn.Module, folder: Path) -> list[Path]:
    """Write it, and return the files."""
    places, files = {}, []
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        path = folder / f"model-{number:05}.safetensors"
        state = {f"blocks.{number}.{n}": t for n, t in block.state_dict().items()}
        save_file(state, path)
        places.update(dict.fromkeys(state, path.name))
        files.append(path)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return files
