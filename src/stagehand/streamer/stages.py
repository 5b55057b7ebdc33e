"""Where a layer's bytes come from: its files, or ordinary memory that is filled ahead.

`LayerStore` is what the load path knows. Where a streamer has a stage in ordinary
memory, `ReadAhead` stands between the store and the files.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stagehand.core.device import host_memory
from stagehand.errors import CheckpointError, StagehandInternalError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import torch

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.layout import Runs
    from stagehand.core.workers import WorkerGroup
    from stagehand.stores.base import Skew
    from stagehand.stores.files import FileSet
    from stagehand.streamer.images import LayerImage

__all__ = [
    "DecodingSource",
    "FileSource",
    "LayerStore",
    "LayerWire",
    "ReadAhead",
    "Source",
]


class Source(Protocol):
    """Gives the bytes of layers, to any thread."""

    def take(self, layer: int, memory: torch.Tensor) -> int:
        """Fill memory with what crosses the link; return the bytes read for it."""

    def skew(self, layer: int) -> Skew | None:
        """Where in memory files fill a layer's image without a copy."""


class FileSource:
    """Layers straight from their files.

    Args:
        images: One for each layer.
        files: The open files.
    """

    def __init__(self, images: Sequence[LayerImage], files: FileSet) -> None:
        self._images = images
        self._files = files

    def take(self, layer: int, memory: torch.Tensor) -> int:
        """See `Source.take`."""
        return self._images[layer].read(self._files, memory)

    def skew(self, layer: int) -> Skew | None:
        """See `Source.skew`."""
        return self._images[layer].skew(self._files)


class DecodingSource:
    """Layers as they are used, from a source that may have them packed.

    Memory: the bytes of the largest layer's wire for each thread that takes one.

    Args:
        source: Gives what would cross the link.
        images: One for each layer.
    """

    def __init__(self, source: Source, images: Sequence[LayerImage]) -> None:
        self._source = source
        self._images = images
        self._nbytes = max(image.link_nbytes for image in images)
        self._own = threading.local()

    def take(self, layer: int, memory: torch.Tensor) -> int:
        """See `Source.take`: fills the image itself."""
        image = self._images[layer]
        if image.form is None:
            return self._source.take(layer, memory)
        if not hasattr(self._own, "wire"):
            self._own.wire = host_memory(self._nbytes)
        wire = self._own.wire[: image.link_nbytes]
        read = self._source.take(layer, wire)
        image.decode(wire, memory, None)
        return read

    def skew(self, layer: int) -> Skew | None:
        """See `Source.skew`."""
        return self._source.skew(layer)


class LayerWire:
    """What crosses the link for one layer with packed weights.

    Args:
        layer: Its number.
        image: Decodes it.
        source: Where its bytes come from.
        device_type: What decodes it.
    """

    pinned = None

    def __init__(
        self, layer: int, image: LayerImage, source: Source, device_type: str
    ) -> None:
        self._layer = layer
        self._source = source
        self.nbytes = image.link_nbytes
        self.scratch_nbytes = image.scratch_nbytes(device_type)
        self.decode = image.decode

    def is_current(self) -> bool:
        """Return True: nothing changes a layer that has no parameters."""
        return True

    def renew(self) -> bool:
        """Return False: nothing has to be renewed."""
        return False

    def read_into(self, memory: torch.Tensor) -> int:
        """See `Wire.read_into`."""
        return self._source.take(self._layer, memory)


class LayerStore:
    """The store of one layer: read only, and with no tensors on the host.

    Args:
        layer: Its number.
        source: Where its bytes come from.
        wire: How they cross the link, if not as the image.
    """

    def __init__(
        self, layer: int, source: Source, wire: LayerWire | None = None
    ) -> None:
        self._layer = layer
        self._source = source
        self._wire = wire
        self._skew = source.skew(layer)

    @property
    def hosts(self) -> list[torch.Tensor]:
        """No tensors: nothing points to the host between uses."""
        return []

    def value(self, index: int) -> torch.Tensor:
        """Refuse: there are no host tensors."""
        raise StagehandInternalError(f"layer {self._layer} has no tensor {index}")

    @property
    def pinned(self) -> None:
        """None: the truth is in files."""
        return None

    @property
    def wire(self) -> LayerWire | None:
        """See `Store.wire`."""
        return self._wire

    def read_into(self, image: torch.Tensor) -> int:
        """Fill `image` with the layer; return the bytes read from files.

        Raises:
            CheckpointError: If the files do not give them.
        """
        return self._source.take(self._layer, image)

    def read_rows_into(self, image: torch.Tensor, runs: Runs) -> int:
        """Refuse: nobody chooses rows of a layer."""
        raise StagehandInternalError(f"layer {self._layer} does not come by rows")

    @property
    def skew(self) -> Skew | None:
        """Where a disk can write the layer without a copy, if not everywhere."""
        return self._skew

    def holds(self, image: torch.Tensor) -> bool:
        """Return True: nothing changes a layer that has no parameters."""
        return True

    def write_back(self, image: torch.Tensor) -> None:
        """Refuse: nothing changes a layer that has no parameters."""
        raise StagehandInternalError(f"layer {self._layer} cannot be written back")

    def edited(self, index: int) -> None:
        """Refuse: there are no host tensors to edit."""
        raise StagehandInternalError(f"layer {self._layer} has no tensor {index}")

    def rehost(self, index: int, host: torch.Tensor) -> None:
        """Refuse: there are no host tensors."""
        raise StagehandInternalError(f"layer {self._layer} has no tensor {index}")

    def check_hosts(self) -> None:
        """Do nothing: there are none."""


class ReadAhead:
    """Layers in ordinary memory, read in batches, ahead of whoever takes them.

    Layers are taken in their order, over and over. With memory for all of them, each is
    read once and stays.

    Memory: `buffers` leases of `nbytes` bytes.

    Args:
        source: The files.
        layers: How many layers there are.
        buffers: For how many there is memory.
        batch: How many are read before the first of them is handed on.
        nbytes: Bytes of the largest layer, and of its skew.
        arena: Ordinary memory.
        workers: Threads that read.
    """

    def __init__(
        self,
        source: Source,
        *,
        layers: int,
        buffers: int,
        batch: int,
        nbytes: int,
        arena: Arena,
        workers: WorkerGroup,
    ) -> None:
        self._source = source
        self._skews = [source.skew(layer) for layer in range(layers)]
        self._layers = layers
        self._batch = batch
        self._keeps = buffers >= layers
        self._workers = workers
        # Reentrant: the garbage collector may stop this in the middle of anything.
        self._lock = threading.RLock()
        # Not entered: it does so in Python, where an interrupt leaves the lock taken.
        self._changed = threading.Condition(self._lock)
        self._takers = 0  # threads that copy a layer out: then its memory is free
        self._next = 0  # the first layer that is not asked for
        self._jobs: dict[int, Future[dict[int, int]]] = {}
        self._held: dict[int, Lease] = {}
        self._free: list[Lease] = []
        self._uncounted: set[int] = set()  # layers whose bytes no `take` returned yet
        self._stopped = False
        for _ in range(buffers):
            self._free.append(arena.acquire(nbytes, "layers read ahead"))
        with self._lock:
            self._read_on()

    def __repr__(self) -> str:
        return f"ReadAhead({len(self._held)} layers held, {len(self._free)} free)"

    def _coming(self) -> range:
        """Return the batch that is asked for next."""
        return range(self._next, min(self._next + self._batch, self._layers))

    def _read_on(self) -> None:
        """Read the coming batches that there is memory for. Needs the lock."""
        while not self._stopped:
            batch = self._coming()
            if len(self._free) < len(batch) or any(n in self._held for n in batch):
                return
            for layer in batch:
                self._held[layer] = self._free.pop()
            self._uncounted.update(batch)
            note = partial(self._note, batch)
            self._workers.hand(note, self._read, batch)
            self._next = batch.stop % self._layers

    def _note(self, batch: range, job: Future[dict[int, int]]) -> None:
        self._jobs.update(dict.fromkeys(batch, job))

    def _read(self, batch: range) -> dict[int, int]:
        """Read a batch, in a worker thread; return each layer's bytes."""
        return {layer: self._source.take(layer, self._place(layer)) for layer in batch}

    def _place(self, layer: int) -> torch.Tensor:
        """Return the memory that holds a layer, from where its image begins."""
        buffer, skew = self._held[layer].buffer, self._skews[layer]
        return buffer[skew.start_in(buffer) :] if skew else buffer

    def skew(self, layer: int) -> None:
        """See `Source.skew`. What is copied may go anywhere."""

    def take(self, layer: int, image: torch.Tensor) -> int:
        """See `Source.take`. What could not be read ahead is read now."""
        job = self._job_for(layer)
        if job is None:
            return self._source.take(layer, image)
        try:
            return self._hand_on(layer, job, image)
        finally:
            with self._lock:
                self._takers -= 1
                self._changed.notify_all()

    def _job_for(self, layer: int) -> Future[dict[int, int]] | None:
        """Return the job that reads a layer, for one more taker; None if none does."""
        with self._lock:
            # Its batch may be waiting for the memory of what others are taking now.
            while self._takers and not self._stopped and self._lies_ahead(layer):
                self._changed.wait()
            if self._lies_ahead(layer):  # and is not to be read a second time
                self._next = (layer + 1) % self._layers
                self._read_on()
            job = self._jobs.get(layer)
            self._takers += job is not None
            return job

    def _lies_ahead(self, layer: int) -> bool:
        return layer in self._coming() and layer not in self._jobs

    def _hand_on(
        self, layer: int, job: Future[dict[int, int]], image: torch.Tensor
    ) -> int:
        try:
            read = job.result()[layer]
        except CheckpointError:
            self._give_back(layer, failed=True)
            return self._source.take(layer, image)
        image.copy_(self._place(layer)[: image.numel()])
        with self._lock:
            if layer in self._uncounted:
                self._uncounted.remove(layer)
            else:
                read = 0
        self._give_back(layer, failed=False)
        return read

    def _give_back(self, layer: int, *, failed: bool) -> None:
        with self._lock:
            if (self._keeps and not failed) or layer not in self._held:
                return
            del self._jobs[layer]
            self._uncounted.discard(layer)
            self._free.append(self._held.pop(layer))
            self._read_on()

    def stop(self) -> None:
        """Read no further ahead."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Release the memory. Its workers must be closed before."""
        with self._lock:
            leases = [*self._free, *self._held.values()]
            self._free.clear()
            self._held.clear()
            self._jobs.clear()
        for lease in leases:
            lease.release()
