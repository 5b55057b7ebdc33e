"""What a streamed pass costs over reading the same bytes as fast as the disk can.

End to end: layers from a file to where they are used, on the host. Beside it stand the
two ways that are common: `safe_open`, tensor by tensor, and three threads with queues
between them, that read, copy to what would be pinned, and copy to what would be the
device.

The smallest of each way's times is judged: a disk may be slower by a half for seconds,
more so after much reading. The file's tensors begin anywhere, as those of most do.
"""

import json
import os
import queue
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.disk import Rival, drop_cache
from benchmarks.results import Result, met
from benchmarks.timing import Times, by_the_wall
from stagehand import LayerStreamer
from stagehand.core.device import host_memory

__all__ = ["measure"]

_AHEAD = 3
_TARGET = 1 / 0.95  # times as long as the best raw read

_Way = Callable[[range], object]


def measure(
    rounds: int = 8, layers: int = 8, layer_bytes: int = 64 << 20
) -> Iterator[Result]:
    """Yield each way's time over that of the best raw read, cold and warm.

    Cold: the page cache holds none of the file, and the streamer reads past it, as it
    does with a model that would not fit there. Warm: it holds all of the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(_weights(layers, layer_bytes), path)
        os.sync()
        slabs = [host_memory(layer_bytes + 4096).zero_() for _ in range(_AHEAD)]
        rival = Rival(path, slabs, layer_bytes)
        for name in ("cold", "warm"):
            yield from _compare(path, rival, name, range(layers), rounds)
        rival.close()


def _compare(
    path: Path, rival: Rival, name: str, layers: range, rounds: int
) -> Iterator[Result]:
    is_cold = name == "cold"
    nbytes = path.stat().st_size

    def rows(seconds: dict[str, list[float]]) -> Iterator[Result]:
        best = seconds[min(raw, key=lambda way: min(seconds[way]))]
        yield Result.of(
            f"raw read of a GB, {name}", Times.of(best), "ms", scale=1e12 / nbytes
        )
        for way in ways:
            yield Result.of(
                f"layers by {way} over the raw read, {name}",
                Times.ratio(seconds[way], best),
                "x",
                target=_TARGET if way == "streamed" and is_cold else None,
            )

    with LayerStreamer.from_pretrained(
        path, device="cpu", track_progress=False, past_cache=is_cold
    ) as streamer:
        raw: dict[str, _Way] = {
            "raw": lambda some: rival.read(some, direct=False),
            "raw, past the cache": lambda some: rival.read(some, direct=True),
        }
        ways: dict[str, _Way] = {
            "streamed": lambda _: _stream(streamer),
            "three threads": _three_threads(path),
            "safe_open": _safe_open(path),
        }
        seconds = by_the_wall(
            {**raw, **ways},
            [layers] * (rounds + 1),
            (lambda: drop_cache(path)) if is_cold else (lambda: None),
            until=lambda seconds: met(rows(seconds)),
        )
    yield from rows(seconds)


def _stream(streamer: LayerStreamer) -> None:
    """Run a pass among many: from loaded ahead to loaded ahead."""
    streamer.run_pass(0, lambda x, weights, layer: x)
    streamer.settle()


def _weights(layers: int, layer_bytes: int) -> dict[str, torch.Tensor]:
    """Layers of four matrices."""
    rows = layer_bytes // 4 // 2 // 1024
    return {
        f"layers.{number}.{key}": torch.full(
            (rows, 1024), float(number), dtype=torch.bfloat16
        )
        for number in range(layers)
        for key in ("q", "k", "v", "o")
    }


def _layers(path: Path) -> list[dict[str, tuple[int, int]]]:
    """Return each layer's tensors: first byte in the file, and bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    layers: dict[int, dict[str, tuple[int, int]]] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        number = int(name.split(".")[1])
        layers.setdefault(number, {})[name] = (8 + length + start, end - start)
    return [layers[number] for number in sorted(layers)]


def _safe_open(path: Path) -> _Way:
    layers = _layers(path)
    target: dict[str, torch.Tensor] = {}

    def run(_: range) -> None:
        with safe_open(path, "pt") as file:
            for layer in layers:
                for name in layer:
                    found = file.get_tensor(name)
                    key = name.split(".")[2]
                    if key not in target:
                        target[key] = torch.zeros_like(found)
                    target[key].copy_(found)

    return run


def _three_threads(path: Path) -> _Way:
    layers = _layers(path)
    sizes = [nbytes for _, nbytes in layers[0].values()]

    def pool() -> "queue.Queue[list[torch.Tensor]]":
        slots: queue.Queue[list[torch.Tensor]] = queue.Queue()
        for _ in range(_AHEAD):
            slots.put([torch.zeros(size, dtype=torch.uint8) for size in sizes])
        return slots

    free = [pool() for _ in range(3)]

    def run(_: range) -> None:
        full: list[queue.Queue[list[torch.Tensor]]] = [queue.Queue() for _ in free]

        def read() -> None:
            for layer in layers:
                slot = free[0].get()
                for (start, _), tensor in zip(layer.values(), slot, strict=True):
                    with path.open("rb") as file:
                        file.seek(start)
                        file.readinto(tensor.numpy())
                full[0].put(slot)

        def carry(stage: int) -> None:
            for _ in layers:
                source, slot = full[stage - 1].get(), free[stage].get()
                for target, tensor in zip(slot, source, strict=True):
                    target.copy_(tensor)
                free[stage - 1].put(source)
                full[stage].put(slot)

        threads = [threading.Thread(target=read)]
        threads += [threading.Thread(target=carry, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for _ in layers:
            free[2].put(full[2].get())
        for thread in threads:
            thread.join()

    return run
