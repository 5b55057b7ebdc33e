"""Builds the parts of one runtime from a divided model, and takes them down."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagehand.budget_errors import raise_budget, raise_marks, too_small, why_they_stay
from stagehand.core.arena import Arena
from stagehand.core.device import Device
from stagehand.core.hidden_gradients import take_along
from stagehand.core.layout import BlockLayout, layout_of, relocate
from stagehand.core.ledger import Grant, SubAccount, Watermarks
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import TransferEngine
from stagehand.core.workers import WorkerGroup
from stagehand.errors import StagehandOOMError
from stagehand.guards import Checks
from stagehand.residency.blocks import Block, can_stream, tensor_bytes
from stagehand.residency.finding import Finding, Group, how_to_raise
from stagehand.residency.host_loader import HostLoader
from stagehand.residency.lane_loader import LaneLoader
from stagehand.residency.loader import Loader
from stagehand.residency.masters import Masters
from stagehand.residency.order import Order
from stagehand.residency.plan import at_once
from stagehand.residency.scheduler import Scheduler
from stagehand.residency.shared import SharedDevice, shared_device
from stagehand.residency.steering import Steering
from stagehand.stores.packed import most_bytes
from stagehand.units import MIB, format_at_least, format_bytes, format_limit

__all__ = ["Parts", "Settings", "assemble", "needed_bytes", "twice"]

_READERS = 2  # threads: more do not read faster from one disk
_NO_CHECKS = Checks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What both ways of making a runtime boil down to."""

    device: Device
    budget_bytes: int
    """Device bytes for weights."""
    pinned_bytes: int
    """Page-locked host bytes."""
    slab_bytes: int | None = None
    """The largest block that is accepted; None accepts all."""
    lookahead: int
    """Blocks to load ahead at most."""
    inflight: int | None = None
    """Copies in flight in each direction before prefetches are denied; None for any."""
    stream_priority: int = -1
    """Of the copies' streams; lower ones run first."""
    watermarks: Watermarks | None = None
    """Between which the whole process's device memory lowers the budget."""
    inference_mode: bool = False
    """No gradients will be asked for."""
    checks: Checks = _NO_CHECKS
    timed: bool = False
    """Whether every use and copy is timed, not only those that a plan needs."""
    traced: bool = False
    """Whether spans are kept for a trace."""
    log_interval: int = 10
    """Steps for each line in the log `stagehand`."""
    telemetry_file: str | Path | None = None
    """Gets a line of JSON for each step."""
    pool: Arena | None = None
    """Pinned memory of an earlier runtime."""
    shared: bool = True
    """Whether it shares the device's memory and lanes with other runtimes."""
    name: str = "model"
    """By which others who share the device, and errors, know the model."""
    began: float = field(default_factory=time.perf_counter)
    """When making the runtime began."""
    experts: Mapping[type[nn.Module], Callable[..., Any]] = field(default_factory=dict)
    """By module class: what takes a call's arguments and returns the rows it reads."""
    transport: str = "plain"
    """"packed" packs bfloat16 blocks that shrink; "plain" sends them as they are."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything that one runtime owns. `close()` gives the memory back.

    Holds no reference to the model, so that it can outlive it.
    """

    device: Device
    shared: SharedDevice
    budget_bytes: int
    """Device bytes for weights that the user allows; `weights` may be granted less."""
    weights: SubAccount
    device_arena: Arena
    pinned_arena: Arena
    engine: TransferEngine
    workers: WorkerGroup
    adders: WorkerGroup
    """One thread that adds gradients on the host."""
    pinners: WorkerGroup
    """One thread that makes page-locked memory."""
    loader: Loader
    blocks: list[Block]
    masters: Masters
    scheduler: Scheduler
    steering: Steering
    odd: list[torch.Tensor] = field(default_factory=list)
    """Tensors that are in no block; they are on the device all the time."""
    odd_origin: list[torch.device] = field(default_factory=list)
    """Where they came from, of those that have been moved."""
    odd_placed: int = 0
    """How many of them were brought to the device, the first of them."""
    odd_grant: Grant | None = None
    keep_pool: bool = False
    trains: bool = False
    """Whether gradients have been taken."""
    leave: Callable[[], None] | None = None
    """Gives up the place on the shared device."""
    wire_bytes: int = 0
    """Device bytes set aside for what is decoded there."""

    @property
    def streamed(self) -> list[Block]:
        """Blocks that may come and go: not the rest, not the tables on the host."""
        return [block for block in self.away if not block.hosted]

    @property
    def away(self) -> list[Block]:
        """All blocks but the rest."""
        return self.blocks[1:]

    @property
    def odd_bytes(self) -> int:
        """Device bytes of the tensors that are in no block."""
        return _odd_bytes(self.odd, self.device)

    @property
    def apart_bytes(self) -> int:
        """Bytes of the budget that no slot can have."""
        return self.odd_bytes + self.wire_bytes

    def plan_within(self, limit_bytes: int) -> None:
        """Plan for what slots can have of a limit, from the next pass on.

        Raises:
            StagehandOOMError: If it cannot work; it names the smallest that can.
        """
        try:
            self.steering.set_budget(limit_bytes - self.apart_bytes)
        except StagehandOOMError as error:
            raise self._too_small(limit_bytes, error, (), how_to_raise) from None

    def keep(self, blocks: Sequence[Block]) -> None:
        """Let more blocks stay on the device, from the next pass on.

        Raises:
            StagehandOOMError: If the budget is too small for that; nothing changes.
        """
        try:
            self.steering.keep(blocks)
        except StagehandOOMError as error:
            limit = self.weights.limit_bytes
            raise self._too_small(limit, error, blocks, self._how_to_raise) from None

    def _how_to_raise(self, needed_bytes: int) -> str:
        return how_to_raise(self.scheduler.budget_for(needed_bytes))

    def _too_small(
        self,
        limit_bytes: int,
        error: StagehandOOMError,
        more: Iterable[Block],
        advice: Callable[[int], str],
    ) -> StagehandOOMError:
        """Return an error of the planner for what users know as the budget."""
        must_stay = self.steering.must_stay.union(block.index for block in more)
        return too_small(
            limit_bytes,
            error.needed_bytes,
            stay=[self.blocks[index] for index in must_stay],
            away=[b for b in self.streamed if b.index not in must_stay],
            odd_bytes=self.odd_bytes,
            wire_bytes=self.wire_bytes,
            advice=advice,
        )

    def grant_odd(self) -> bool:
        """Book memory for tensors that are in no block; False if there is none.

        Others give up what they need not keep, then blocks of this model do: the next
        plan is made for what is left.
        """
        if self.odd_grant is not None:
            self.odd_grant.release()
        nbytes, weights = self.odd_bytes, self.weights
        grant = weights.grant(nbytes, "tensors in no block")
        if grant is None and self.scheduler.make_room(nbytes):
            grant = weights.grant(nbytes, "tensors in no block")
        if grant is None:
            room = weights.held_bytes + weights.free_bytes
            self.scheduler.give_up(max(0, room - nbytes), all_of_it=False)
            grant = weights.grant(nbytes, "tensors in no block")
        self.odd_grant = grant
        return grant is not None

    def place_odd(self) -> bool:
        """Move tensors that are in no block to the device.

        Where models in other threads leave no room now, the next pass does so.

        Returns:
            Whether anything was moved.

        Raises:
            StagehandOOMError: If there is no room, and no other thread that could give
                some up later.
        """
        if len(self.odd) == self.odd_placed:
            return False
        if self.odd_grant is None and not self.grant_odd():
            if self.scheduler.others_are_busy():
                return False
            raise self._no_room_for_odd(self.odd_bytes)
        self._note_origins()
        for tensor in self.odd[self.odd_placed :]:
            relocate(tensor, self.device.torch_device)
            self.odd_placed += 1
        return True

    def _note_origins(self) -> None:
        new = self.odd[len(self.odd_origin) :]
        self.odd_origin += [tensor.device for tensor in new]

    def _no_room_for_odd(self, nbytes: int) -> StagehandOOMError:
        account = self.weights
        needed = account.held_bytes + nbytes
        return StagehandOOMError(
            f"tensors in no block need {format_bytes(nbytes)} of device memory, but of"
            f" {format_limit(account.limit_bytes, needed)} only"
            f" {format_bytes(account.free_bytes)} are free; {how_to_raise(needed)}",
            needed_bytes=needed,
            limit_bytes=account.limit_bytes,
        )

    def take_gradients_along(self) -> None:
        """Move gradients of tensors that stay, and train there, to their tensors."""
        staying = [b for b in self.scheduler.staying() if not b.trains]
        for tensor in (*(t for b in staying for t in b.tensors), *self.odd):
            take_along(tensor)

    def take_home_odd(self) -> None:
        """Move tensors that are in no block to the host, wherever they came from."""
        self._note_origins()
        self.odd_placed = 0
        for tensor in self.odd:
            if not tensor.is_meta:
                relocate(tensor, torch.device("cpu"))
        if self.odd_grant is not None:
            self.odd_grant.release()
            self.odd_grant = None

    def give_back_odd(self) -> None:
        """Move tensors that are in no block to where they came from. Idempotent."""
        for tensor, origin in zip(self.odd, self.odd_origin, strict=False):
            relocate(tensor, origin)

    def let_go_odd(self) -> None:
        """Leave tensors that are in no block to whoever still has them."""
        self.odd, self.odd_origin, self.odd_placed = [], [], 0

    def close(self) -> None:
        """Stop threads and free memory without bringing anything home. Idempotent."""
        with ExitStack() as rest:  # in reverse; all of it, whatever fails
            if self.leave is not None:
                twice(rest, self.leave)
            rest.callback(self.workers.close)
            if not self.keep_pool:
                rest.callback(self.pinned_arena.close)
            rest.callback(self.device_arena.close)
            rest.callback(self.engine.close_wires)
            rest.callback(self.scheduler.drop)
            rest.callback(self.adders.close)
            rest.callback(self.loader.close)
            rest.callback(self.pinners.close)


def twice(rest: ExitStack, call: Callable[..., object], *args: object) -> None:
    """Call something idempotent at the end, twice: an interrupt may cut one short."""
    for _ in range(2):
        rest.callback(call, *args)


def assemble(
    finding: Finding, settings: Settings, counters: Counters
) -> tuple[Parts, list[tuple[nn.Module, Block]]]:
    """Return the parts, and the sites with their blocks.

    Raises:
        StagehandOOMError: If the budget or the pool cannot work; it names the smallest
            that can.
        ClosedError: If the pool of an earlier runtime is closed.
    """
    groups = [finding.rest, *finding.streamed]
    device = settings.device
    blocks = [_block(number, group, device) for number, group in enumerate(groups)]
    tables = [group for _, group in finding.gathered if not group.sites]
    unique = {id(group): group for group in tables}
    hosted = [_block(len(blocks) + i, g, device) for i, g in enumerate(unique.values())]
    for block in hosted:
        block.hosted = True
    _check_slabs(blocks[1:], settings)
    if settings.pool is not None:
        settings.pool.check_open()
    shared = _shared(settings)
    name = shared.name_for(settings.name)
    weights = SubAccount(name, settings.budget_bytes, shared.ledger.device)
    engine = TransferEngine(
        device,
        counters,
        h2d_capacity=settings.inflight,
        d2h_capacity=settings.inflight,
        priority=settings.stream_priority,
        streams=shared.streams(),
    )
    device_arena = Arena(
        "device memory", engine.allocate, weights, taken=device.taken_bytes
    )
    pinned_arena = settings.pool or Arena(
        "pinned memory",
        device.pinned,
        SubAccount(name, settings.pinned_bytes, shared.ledger.pinned),
        spare=1.25,
    )
    workers = WorkerGroup("reader", _READERS, device.claim_thread)
    loader: Loader
    if device.is_host:
        loader = HostLoader(engine, workers, counters)
    else:
        loader = LaneLoader(engine, pinned_arena, workers, counters)
    order = Order([block.index for block in blocks if block.index > 0])
    blocks += hosted
    scheduler = Scheduler(
        device=device,
        engine=engine,
        loader=loader,
        arena=device_arena,
        blocks=blocks,
        order=order,
        counters=counters,
    )
    odd = _odd(finding)
    streamed = [block for block in blocks[1:] if not block.hosted]
    wire_bytes = _most_wire_bytes((block.layout for block in streamed), settings)
    rest = finding.rest.tensors
    steering = _steering(scheduler, streamed, settings, rest, odd, wire_bytes)
    pinners = WorkerGroup("pinner", 1, device.claim_thread)
    masters = Masters(pinned_arena, pinners, device.page_locked)
    scheduler.leave_hosts_with(masters.leave)
    parts = Parts(
        device=device,
        shared=shared,
        budget_bytes=settings.budget_bytes,
        weights=weights,
        device_arena=device_arena,
        pinned_arena=pinned_arena,
        engine=engine,
        workers=workers,
        adders=WorkerGroup("adder", 1, device.claim_thread),
        pinners=pinners,
        loader=loader,
        blocks=blocks,
        masters=masters,
        scheduler=scheduler,
        steering=steering,
        odd=[*odd.values()],
        wire_bytes=wire_bytes,
    )
    sites = [
        (site, block)
        for block, group in zip(blocks, groups, strict=False)
        for site in group.sites
    ]
    return parts, sites


def _steering(
    scheduler: Scheduler,
    streamed: Sequence[Block],
    settings: Settings,
    rest: Mapping[str, torch.Tensor],
    odd: Mapping[str, torch.Tensor],
    wire_bytes: int,
) -> Steering:
    """Return what plans for the budget, with a first plan made.

    Raises:
        StagehandOOMError: If the budget cannot work; it names the smallest that can.
    """
    odd_bytes = _odd_bytes(odd.values(), settings.device)
    try:
        return Steering(
            scheduler,
            scheduler.blocks,
            must_stay=[0],
            budget_bytes=settings.budget_bytes - odd_bytes - wire_bytes,
            max_lookahead=settings.lookahead,
        )
    except StagehandOOMError as error:
        raise too_small(
            settings.budget_bytes,
            error.needed_bytes,
            stay=scheduler.blocks[:1],
            away=streamed,
            odd_bytes=odd_bytes,
            wire_bytes=wire_bytes,
            name=_name_of_budget(settings),
            advice=raise_marks if settings.watermarks else raise_budget,
            why=why_they_stay(rest, odd, odd_bytes),
        ) from None


def _shared(settings: Settings) -> SharedDevice:
    priority = settings.stream_priority
    if settings.shared:
        return shared_device(settings.device, priority=priority)
    return SharedDevice(settings.device, priority=priority)


def needed_bytes(finding: Finding, settings: Settings) -> int:
    """Return the device bytes that a division of a model needs at least.

    For what stays in it, and for one block at a time.
    """
    device = settings.device
    layouts = [_layout(group) for group in (finding.rest, *finding.streamed)]
    slots = [device.taken_bytes(layout.nbytes) for layout in layouts]
    return (
        at_once(slots, stay=[0])
        + _odd_bytes(_odd(finding).values(), device)
        + _most_wire_bytes(layouts[1:], settings)
    )


def _block(index: int, group: Group, device: Device) -> Block:
    tensors = [tensor for tensor in group.tensors.values() if can_stream(tensor)]
    block = Block(index, group.name, _layout(group), tensors)
    block.slot_nbytes = device.taken_bytes(block.nbytes)
    return block


def _layout(group: Group) -> BlockLayout:
    named = [(name, t.detach()) for name, t in group.tensors.items() if can_stream(t)]
    return layout_of(named)


def _odd(finding: Finding) -> dict[str, torch.Tensor]:
    """Return by their names the tensors that are in no block."""
    return {n: t for n, t in finding.rest.tensors.items() if not can_stream(t)}


def _check_slabs(blocks: Iterable[Block], settings: Settings) -> None:
    limit = settings.slab_bytes
    largest = max(blocks, key=lambda b: b.nbytes, default=None)
    if limit is None or largest is None or largest.nbytes <= limit:
        return
    mib = -(-largest.nbytes // MIB)
    pool = " and pinned_pool_mb" if settings.pinned_bytes < mib * MIB else ""
    raise StagehandOOMError(
        f"block {largest.name!r} has {format_at_least(largest.nbytes)} but"
        f" pinned_slab_mb allows {format_bytes(limit)}; set pinned_slab_mb{pool} to at"
        f" least {mib}, or use stagehand.layer(), which cuts finer",
        needed_bytes=largest.nbytes,
        limit_bytes=limit,
    )


def _most_wire_bytes(layouts: Iterable[BlockLayout], settings: Settings) -> int:
    """Return what has to be set aside to decode any block of these layouts."""
    if settings.transport == "plain" or settings.device.is_host:
        return 0
    device = settings.device
    kind = device.torch_device.type
    sizes = (most_bytes(layout, kind) for layout in layouts)
    return max((sum(map(device.taken_bytes, each)) for each in sizes), default=0)


def _odd_bytes(tensors: Iterable[torch.Tensor], device: Device) -> int:
    return sum(device.taken_bytes(tensor_bytes(tensor)) for tensor in tensors)


def _name_of_budget(settings: Settings) -> str:
    if settings.watermarks:
        return "budget, vram_high_watermark_mb,"
    if settings.device.is_host and settings.pinned_bytes <= settings.budget_bytes:
        return "ram_budget, which counts where there is no accelerator,"
    return "budget"
