"""The parts of one streamer: the scheduler of streamed models, without hooks.

Every layer is a block without tensors of its own: whoever runs it asks for views of the
slot that it lies in. Slots are used in turn, so which slot a layer gets next depends on
how many uses lie between, and the last layers of a pass never stand in the way of the
first ones of the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.core.arena import Arena
from stagehand.core.device import host_memory
from stagehand.core.layout import BlockLayout
from stagehand.core.ledger import Account
from stagehand.core.transfer import TransferEngine
from stagehand.core.workers import WorkerGroup
from stagehand.errors import ClosedError
from stagehand.residency.blocks import Block
from stagehand.residency.host_loader import HostLoader
from stagehand.residency.order import Order
from stagehand.residency.plan import Plan
from stagehand.residency.scheduler import Scheduler
from stagehand.residency.shared import shared_device
from stagehand.streamer.depths import READERS
from stagehand.streamer.handover import LayerLoader
from stagehand.streamer.images import footprint_of
from stagehand.streamer.stages import (
    DecodingSource,
    FileSource,
    LayerStore,
    LayerWire,
    ReadAhead,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from stagehand.core.device import Device
    from stagehand.core.telemetry import Counters
    from stagehand.core.transfer import Slot
    from stagehand.residency.loader import Loader
    from stagehand.stores.files import FileSet
    from stagehand.streamer.depths import Depths
    from stagehand.streamer.images import LayerImage
    from stagehand.streamer.stages import Source

__all__ = ["Pipeline"]


class Pipeline:
    """Brings layers to the device in their order, over and over.

    Copies queue in the lanes that all models on the device share.

    Memory, with `B` the bytes of the largest layer: at most `(n_gpu + 1) * B` on the
    device, and what a layer needs in another element type; `(n_cpu_pinned + 1) * B` of
    pinned memory; `(n_cpu + 1) * B` of ordinary memory. Where files are read past the
    page cache, each layer that they fill takes a page more (4096 bytes). Layers that
    are packed take their packed bytes on the host; the device has room for two of these
    more, and for the decoder's work. Where the host is the device, each thread that
    loads has room for one. Without the pinned stage layers wait in ordinary memory for
    the device.

    Where somebody keeps tensors of a layer, the layer's memory is left to them, and its
    slot gets new memory.

    Args:
        device: Where the layers are used.
        images: One for each layer.
        files: The open files.
        depths: How many layers each stage holds.
        counters: Where bytes are counted.
    """

    def __init__(
        self,
        device: Device,
        images: Sequence[LayerImage],
        files: FileSet,
        depths: Depths,
        counters: Counters,
    ) -> None:
        self._device = device
        self._images = images
        self._files = files
        self._depths = depths
        self._counters = counters
        self._closed = False
        self._bytes = footprint_of(images, files, device)
        self._pieces = depths.pieces(len(images), on_host=device.is_host)
        self._shared = shared_device(device)  # kept: its lanes go with it
        self._engine = TransferEngine(device, counters, streams=self._shared.streams())
        # What is packed is decoded on the device, or on the host by who loads it.
        self._decodes = bool(self._bytes.unpacked_from)
        self._make_arenas()
        self._parts: _Parts | None = None
        self._torn = False  # whether an interrupt may have left the books wrong

    def _make_arenas(self) -> None:
        pieces, each = self._pieces, self._bytes
        slabs = pieces.slabs * each.waiting
        self.device_account = Account(
            "device memory for layers", each.device_bytes(pieces)
        )
        # Tensors in another type are made anew for each use, one layer at a time.
        self.device_account.grant(each.cast, "tensors in another type")
        self.pinned_account = Account(
            "pinned memory for layers", slabs if pieces.is_pinned else 0
        )
        self.host_account = Account(
            "ordinary memory for layers",
            pieces.buffers * each.waiting + (0 if pieces.is_pinned else slabs),
        )
        self._device_arena = Arena(
            "device memory",
            self._engine.allocate,
            self.device_account,
            taken=self._device.taken_bytes,
        )
        self._pinned_arena = Arena(
            "pinned memory", self._device.pinned, self.pinned_account
        )
        self._host_arena = Arena("ordinary memory", host_memory, self.host_account)

    def __repr__(self) -> str:
        pieces = self._pieces
        return (
            f"Pipeline({pieces.slots} slots, {pieces.slabs} slabs,"
            f" {pieces.buffers} buffers of {self._bytes.slot} bytes)"
        )

    # Passes

    def begin_pass(self) -> None:
        """Begin to use all layers, in order.

        Raises:
            ShardChangedError: If a file changed since its header was read.
            ClosedError: After `close()`.
        """
        if self._closed:
            raise ClosedError("the streamer is closed; make a new one")
        self._files.check()
        if self._parts is None:
            self.reset(orderly=True)  # an earlier one may have been interrupted itself
            try:
                self._start()
            except BaseException:
                # What was half made may have memory of which nobody else knows.
                self.reset(orderly=False)
                raise
        self._running().scheduler.begin_pass()

    def batch_at(self, layer: int) -> range:
        """Return the layers that are handed to compute together, from `layer` on."""
        return range(
            layer, min(layer + (self._depths.batch_gpu or 1), len(self._images))
        )

    def before(self, layers: range) -> None:
        """Make layers usable on the current stream, each until `after` it."""
        parts = self._running()
        for layer in layers:
            parts.scheduler.before(parts.blocks[layer])

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer that is in use.

        Raises:
            ClosedError: If it is not on the device.
        """
        block = self._running().blocks[layer]
        if block.slot is None or block.target is None:
            raise ClosedError(f"layer {layer} is not on the device")
        return self._images[layer].tensors(block.target)

    def after(self, layer: int) -> None:
        """End the use of a layer, and load into its slot what comes next."""
        parts = self._running()
        block = parts.blocks[layer]
        parts.scheduler.after(block)
        if block.slot is not None:
            turn = block.slot.index + len(parts.blocks)  # when its next use comes
            block.home = parts.homes[turn % len(parts.homes)]
        parts.scheduler.look_ahead()

    def end_pass(self) -> None:
        """End a pass; the first layers of the next one go on loading.

        Who waits for the result of a pass starts no copy meanwhile. So that the link
        does not stand still, the first one waits here for its bytes: at most as long as
        one batch is read.
        """
        parts = self._running()
        if isinstance(parts.loader, LayerLoader):
            parts.loader.await_staged(parts.blocks[0])
        parts.scheduler.end_pass()

    def settle(self) -> None:
        """Wait until every stage is as full as it gets before the next pass."""
        parts, copies = self._parts, -1
        try:
            while parts is not None and copies < self._counters.h2d_copies:
                copies = self._counters.h2d_copies
                parts.workers.wait_idle()
                parts.ahead_workers.wait_idle()
                parts.scheduler.look_ahead()
            self._device.synchronize()
        except BaseException as error:
            self.reset(orderly=isinstance(error, Exception))
            raise

    def _running(self) -> _Parts:
        if self._parts is None:
            raise ClosedError("no pass is under way")
        return self._parts

    # Parts

    def _start(self) -> None:
        # At once, so that `reset` closes what there is by then.
        parts = self._parts = _Parts(self._device)
        source: Source = FileSource(self._images, self._files)
        pieces, each = self._pieces, self._bytes
        if pieces.buffers:
            source = parts.ahead = ReadAhead(
                source,
                layers=len(self._images),
                buffers=pieces.buffers,
                batch=self._depths.batch_cpu or 1,
                nbytes=each.waiting,
                arena=self._host_arena,
                workers=parts.ahead_workers,
            )
        if self._decodes:
            source = DecodingSource(source, self._images)
        for layer, image in enumerate(self._images):
            bare = BlockLayout(entries=(), nbytes=image.nbytes)
            block = Block(layer, image.name, bare, ())
            block.set_store(LayerStore(layer, source, self._wire(layer, source)))
            if self._device.is_host and not pieces.buffers:  # files fill its slots
                block.begin_at(image.skew_in_use(self._files))
            parts.blocks.append(block)
        if each.wire:
            self._engine.open_wires(
                self._device_arena,
                count=pieces.wires,
                nbytes=each.wire,
                scratch_nbytes=each.scratch,
            )
        parts.loader = self._loader(parts)
        kept = parts.blocks if pieces.slabs == len(parts.blocks) else []
        parts.loader.set_slabs(pieces.slabs - len(kept), each.waiting)
        parts.loader.keep(kept)  # read once
        parts.scheduler = Scheduler(
            device=self._device,
            engine=self._engine,
            loader=parts.loader,
            arena=self._device_arena,
            blocks=parts.blocks,
            order=Order(range(len(parts.blocks))),
            counters=self._counters,
        )
        parts.scheduler.follow(self._plan())
        parts.homes = [block.home for block in parts.blocks[: pieces.slots]]

    def _wire(self, layer: int, source: Source) -> LayerWire | None:
        image = self._images[layer]
        if image.form is None or self._decodes:
            return None
        return LayerWire(layer, image, source, self._device.torch_device.type)

    def _loader(self, parts: _Parts) -> Loader:
        engine, workers, counters = self._engine, parts.workers, self._counters
        if self._device.is_host:
            return HostLoader(engine, workers, counters)
        depths, is_pinned = self._depths, self._pieces.is_pinned
        arena = self._pinned_arena if is_pinned else self._host_arena
        batch = depths.batch_cpu_pinned if is_pinned else depths.batch_cpu
        if not (depths.n_cpu_pinned or depths.n_cpu):
            batch = None
        return LayerLoader(
            engine, arena, workers, counters, blocks=parts.blocks, batch=batch or 1
        )

    def _plan(self) -> Plan:
        """All slots in turn; with one for each layer, all stay."""
        count, slots = len(self._images), self._pieces.slots
        stays = slots == count
        return Plan(
            slots=(self._bytes.slot,) * slots,
            home=tuple(layer % slots for layer in range(count)),
            resident=frozenset(range(count)) if stays else frozenset(),
            lookahead=slots,
            step_seconds=0.0,
            bound_seconds=0.0,
            streamed_bytes=0,
            loads=0,
            limit="unknown",
        )

    def reset(self, *, orderly: bool) -> None:
        """Forget all that is loaded or under way; the next pass begins anew.

        Args:
            orderly: Whether the parts can be trusted, so that memory is kept. After an
                interrupt, which may come anywhere, they cannot: it is made anew.
        """
        torn, self._torn = self._torn or not orderly, True
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.stop()
            if not torn:
                parts.release()
                self._engine.close_wires()
            else:
                self._device.synchronize()  # whoever reads or writes its memory
                parts.forget()
                self._engine.wires = None
        if torn:
            self._close_arenas()
            self._make_arenas()
        self._torn = False

    @property
    def _arenas(self) -> tuple[Arena, Arena, Arena]:
        return self._device_arena, self._pinned_arena, self._host_arena

    def _close_arenas(self) -> None:
        for arena in self._arenas:
            arena.close()

    def close(self) -> None:
        """Stop the threads and free the memory. Idempotent."""
        self._closed = True
        self.reset(orderly=True)
        self._close_arenas()
        self._files.close()


class _Parts:
    """What one undisturbed run of passes uses."""

    def __init__(self, device: Device) -> None:
        self.blocks: list[Block] = []
        self.homes: list[Slot | None] = []
        self.ahead: ReadAhead | None = None
        self.ahead_workers = WorkerGroup("ahead", READERS)
        self.workers = WorkerGroup("reader", READERS, device.claim_thread)
        self.loader: Loader
        self.scheduler: Scheduler

    def stop(self) -> None:
        """End the threads, those first that wait for others."""
        if self.ahead is not None:
            self.ahead.stop()
        self.workers.close()
        self.ahead_workers.close()

    def forget(self) -> None:
        """Let go of the device's memory without the books, which may be wrong."""
        for slot in self.homes:
            if slot is not None:
                slot.lease = slot.storage = slot.occupant = None
                slot.views.clear()
        for block in self.blocks:
            block.slot = block.home = None
            block.set_views(None)

    def release(self) -> None:
        """Release all memory, in order; no thread may be at work."""
        for part in (getattr(self, "loader", None), self.ahead):
            if part is not None:
                part.close()
        if hasattr(self, "scheduler"):
            self.scheduler.drop()
