"""Small checkpoints of equal layers, and what their layers compute."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stagehand.streamer.streamer import LayerStreamer

LAYERS, WIDTH = 7, 32
PREFIX = "model.layers."
KEYS = ["attn.weight", "mlp.weight", "norm.weight"]
LAYER_BYTES = 2 * 4 * WIDTH * WIDTH + 256  # two matrices, and a vector rounded up
EMBED = "model.embed.weight"


def make_weights(
    layers: int = LAYERS,
    prefix: str = PREFIX,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Tensors of equal layers, and one that is in none, the same at every call."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / WIDTH**0.5).to(dtype)

    tensors = {EMBED: values(10, WIDTH)}
    for layer in range(layers):
        for key in KEYS:
            shape = (WIDTH,) if key == "norm.weight" else (WIDTH, WIDTH)
            tensors[f"{prefix}{layer}.{key}"] = values(*shape)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Write a checkpoint in so many files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def arguments(folder: Path) -> dict[str, Any]:
    """What a script finds out by itself, with a reader of its own, in one folder."""
    info, offsets = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        offsets[path.name] = 8 + length
        for name, entry in header.items():
            if name != "__metadata__":
                start = entry["data_offsets"][0]
                info[name] = (path.name, start, tuple(entry["shape"]))
    return {
        "model_dir": str(folder),
        "tensor_info": info,
        "shard_offsets": offsets,
        "block_keys": KEYS,
        "block_sizes": {
            "attn.weight": WIDTH * WIDTH,
            "mlp.weight": WIDTH * WIDTH,
            "norm.weight": WIDTH,
        },
        "dtype": torch.float32,
        "num_layers": LAYERS,
    }


def layer_fn(
    x: torch.Tensor, weights: dict[str, torch.Tensor], layer: int
) -> torch.Tensor:
    """What a layer computes."""
    hidden = torch.tanh(x @ weights["attn.weight"]) * weights["norm.weight"]
    return x + hidden @ weights["mlp.weight"]


def resident(
    tensors: dict[str, torch.Tensor],
    x: torch.Tensor,
    *,
    prefix: str = PREFIX,
    layers: int = LAYERS,
    function: Callable[..., torch.Tensor] = layer_fn,
) -> torch.Tensor:
    """What all layers compute where their weights are on the device of `x`."""
    for layer in range(layers):
        weights = {key: tensors[f"{prefix}{layer}.{key}"].to(x.device) for key in KEYS}
        x = function(x, weights, layer)
    return x


def inputs(device: str) -> torch.Tensor:
    """A batch, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, WIDTH, generator=generator).to(device)


def passes(streamer: LayerStreamer, device: str, count: int) -> Iterator[torch.Tensor]:
    """Run some passes without gradients; yield what each returns, on the host."""
    for _ in range(count):
        with torch.no_grad():
            yield streamer.run_pass(inputs(device), layer_fn).cpu()
