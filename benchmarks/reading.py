"""Reading blocks from files, beside the disk's best rate, a copy, and other readers.

A block is read from a checkpoint into memory that is used over and over, as a load
does, half of the file in a turn. Cold, the page cache holds nothing of the file; warm,
it holds all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.disk import Rival, drop_cache
from benchmarks.results import Result, ratio
from benchmarks.timing import Times, by_the_wall
from stagehand.core.device import host_memory
from stagehand.core.layout import layout_of
from stagehand.core.workers import WorkerGroup
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.files import FileSet
from stagehand.stores.safetensors import SafetensorsStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    _Way = Callable[[range], object]

__all__ = ["measure"]

_SLABS = 3
_PAGE = 4096
_COLD_TARGET = 1 / 0.95
_WARM_TARGET = 1 / 0.8
_ROWS = 1024


def measure(
    rounds: int = 7, blocks: int = 12, block_bytes: int = 64 << 20
) -> Iterator[Result]:
    """Yield each reader's time over the best raw read, cold, or over a copy, warm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(_weights(blocks, block_bytes), path)
        os.sync()
        reader = _Blocks(path, blocks, block_bytes)
        rival = Rival(path, reader.slabs, block_bytes)
        ways: dict[str, _Way] = {
            "blocks": reader.read,
            "safe_open and a copy": reader.by_safe_open,
            "torch's mapping and a copy": reader.by_mapping,
        }
        raw: dict[str, _Way] = {
            "raw read": lambda some: rival.read(some, direct=False),
            "raw read past the cache": lambda some: rival.read(some, direct=True),
        }
        copy: dict[str, _Way] = {"copy by two threads": rival.copy}
        parts = [range(blocks // 2), range(blocks // 2, blocks)]
        turns, nbytes = parts * (rounds + 1), path.stat().st_size // 2

        seconds = by_the_wall(
            {**ways, **raw},
            turns,
            lambda: drop_cache(path),
            uncounted=len(parts),
        )
        yield from _rows("cold", raw, "best raw read", nbytes, _COLD_TARGET, seconds)
        seconds = by_the_wall({**ways, **raw, **copy}, turns, uncounted=len(parts))
        yield from _rows("warm", copy, next(iter(copy)), nbytes, _WARM_TARGET, seconds)
        rival.close()
        reader.close()


def _rows(
    when: str,
    best_of: Mapping[str, object],
    what: str,
    nbytes: int,
    target: float,
    seconds: dict[str, list[float]],
) -> Iterator[Result]:
    best = min(best_of, key=lambda name: min(seconds[name]))
    times = Times.of(seconds[best])
    yield Result.of(f"{what} of a GB, {when}", times, "ms", scale=1e12 / nbytes)
    for name, found in seconds.items():
        if name not in best_of:
            # Where memory or a disk decides, each way has a best turn of its own.
            usual = Times.ratio(found, seconds[best]).median
            judged = target if name == "blocks" else None
            yield ratio(f"{name} over the {what}, {when}", usual, judged)


class _Blocks:
    """A checkpoint's blocks, read one after the other into a few slabs."""

    def __init__(self, path: Path, blocks: int, block_bytes: int) -> None:
        checkpoint = Checkpoint.open(path)
        self._path = path
        self._files = FileSet(checkpoint.files, past_cache=True)
        self._names = [
            [name for name in checkpoint if name.startswith(f"layers.{number}.")]
            for number in range(blocks)
        ]
        self._stores = []
        for names in self._names:
            extents = [checkpoint[name] for name in names]
            empty = [
                torch.empty(e.shape, dtype=e.dtype, device="meta") for e in extents
            ]
            self._layout = layout_of(list(zip(names, empty, strict=True)))
            self._stores.append(SafetensorsStore(self._layout, extents, self._files))
        nbytes = self._layout.nbytes + _PAGE
        self.slabs = [host_memory(nbytes).zero_() for _ in range(_SLABS)]
        self._workers = WorkerGroup("reader", 2)

    def read(self, some: range) -> None:
        """Read as loads do: two blocks at a time, into slabs that are free again."""
        jobs: list[Future[int]] = []
        for number in some:
            if len(jobs) >= _SLABS:
                jobs[-_SLABS].result()
            jobs.append(self._workers.submit(self._fill, number))
        for job in jobs:
            job.result()

    def _fill(self, number: int) -> int:
        store, slab = self._stores[number], self.slabs[number % _SLABS]
        start = 0 if store.skew is None else store.skew.start_in(slab)
        return store.read_into(slab[start : start + self._layout.nbytes])

    def by_safe_open(self, some: range) -> None:
        """Get each tensor, and copy it to where it is wanted."""
        with safe_open(self._path, "pt") as file:
            for number in some:
                views = self._layout.views(self.slabs[number % _SLABS])
                for view, name in zip(views, self._names[number], strict=True):
                    view.copy_(file.get_tensor(name))

    def by_mapping(self, some: range) -> None:
        """Let torch map the file, and copy from there."""
        size = self._path.stat().st_size
        whole = torch.from_file(str(self._path), size=size, dtype=torch.uint8)
        start = size - len(self._names) * self._layout.nbytes
        for number in some:
            at = start + number * self._layout.nbytes
            piece = whole[at : at + self._layout.nbytes]
            self.slabs[number % _SLABS][: len(piece)].copy_(piece)

    def close(self) -> None:
        """Close the files, and end the threads."""
        self._workers.close()
        self._files.close()


def _weights(blocks: int, block_bytes: int) -> dict[str, torch.Tensor]:
    """Blocks of four matrices and two small tensors, of odd bytes in a file."""
    rows = block_bytes // 2 // 4 // _ROWS
    weights = {}
    for number in range(blocks):
        for key in "abcd":
            weight = torch.full((rows, _ROWS), float(number), dtype=torch.bfloat16)
            weights[f"layers.{number}.{key}"] = weight
        for key in ("n1", "n2"):
            weights[f"layers.{number}.{key}"] = torch.ones(1020, dtype=torch.bfloat16)
    return weights
