"""A block: tensors that move together, where their truth is and where they are."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from stagehand.residency.residency import Residency
from stagehand.torch_private import (
    WRAPPERS,
    as_it_is,
    inference_mode,
    sequence_number,
    storage_key,
    use_count_of,
    without_modes,
)
from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from torch import nn

    from stagehand.core.casts import KnownCast
    from stagehand.core.layout import BlockLayout, Runs
    from stagehand.core.transfer import Slot, Ticket
    from stagehand.stores.base import Skew, Store, Wire


__all__ = [
    "Block",
    "Reader",
    "any_replaced",
    "can_stream",
    "point_to",
    "readers_of",
    "staged_bytes",
    "tensor_bytes",
    "values_of",
]

_SAMPLES = 64  # words of an image
_UNKNOWN = [-1]  # versions that no tensors have; never changed


class Block(Residency):
    """Tensors that move together, where their truth is and where they are now.

    `tensors` are the model's own parameters and buffers, in the order of the layout's
    entries. While the block is away they point to the store's host tensors; while it is
    bound, to `views` of the slot.
    """

    __slots__ = (
        "_hosts",
        "abandoned",
        "addresses",
        "begins",
        "bindings",
        "bound",
        "by_hand",
        "casts",
        "changes",
        "clean_versions",
        "edited",
        "filled_in",
        "form",
        "graded",
        "handles",
        "home",
        "hooked",
        "host_addresses",
        "hosted",
        "image",
        "layout",
        "link_nbytes",
        "nbytes",
        "needs_staging",
        "picks",
        "read_elsewhere",
        "rows",
        "runs",
        "runs_nbytes",
        "sampled",
        "seal",
        "sent",
        "slot",
        "slot_nbytes",
        "stepping",
        "store",
        "target",
        "tensors",
        "tracked",
        "trained",
        "trains",
        "unseen",
        "versions",
        "view_addresses",
        "views",
        "views_in",
        "wire",
    )

    def __init__(
        self,
        index: int,
        name: str,
        layout: BlockLayout,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(index, name)
        self.layout = layout
        self.tensors = tuple(tensors)
        tracked = tuple(t for t in self.tensors if not t.is_inference())
        # One object where it can be: what each use looks at stays in the caches.
        self.tracked = self.tensors if len(tracked) == len(tensors) else tracked
        self.nbytes = layout.nbytes
        """Bytes of the block's image, on the device as on the host."""
        self.slot_nbytes = layout.nbytes
        """Device bytes of a slot for this block alone, as the allocator rounds them."""
        self.form = _form(layout, self.tensors)
        """Blocks of equal form share the views of a slot's memory."""
        self.begins: Skew | None = None
        """Where in a slot's memory the image begins, if not at the memory's start."""
        self.store: Store | None = None
        """Where the block's truth lives; None as long as it has no values."""
        self.image: torch.Tensor | None = None
        """The store's bytes, if they lie in pinned memory."""
        self.sampled: memoryview | None = None
        """A few words of `image`, spread over all of it: see `loader.sample`."""
        self.wire: Wire | None = None
        """The smaller form in which the block crosses the link, if it has one."""
        self.link_nbytes = self.nbytes
        """Bytes that cross the link for a load: of the wire, else of the image."""
        self.needs_staging = True
        """Whether a load stages them: they do not lie in pinned memory."""
        self.trains = False
        """Whether gradients are taken for some of its tensors."""
        self.trained = False
        """Whether a tensor required gradients when `Passing` last looked for what
        optimizers may have changed."""
        self.unseen = False
        """Whether backward may read its tensors without unpacking a handle of them."""
        self.hooked = False
        """Whether users have post-accumulate hooks on weights of it that train."""
        self.graded = False
        """Whether gradients have come for it since a forward: an optimizer may step
        it."""
        self.stepping = False
        """Whether a thread may be changing its host tensors: nobody may read them."""
        self.changes = False
        """Whether uses change it on the device, as far as was seen: then the plan
        counts the way home, too."""
        self.edited = False
        """Whether a forward was seen to change it behind its version counters: it may
        each time that it is bound."""
        self.abandoned = 0
        """How often the memory of its slot was left to somebody who held it."""
        self.bindings = 0
        """How often it came to the device with a backward pass to follow. Autograd
        makes a new `AccumulateGrad` node for each of its weights each time, for the
        weights were on another device in between."""
        self.hosted = False
        """Whether it stays on the host, where its rows are looked up: it has no home
        slot then."""
        self.home: Slot | None = None
        """The slot that the plan gives to the block."""
        self.slot: Slot | None = None
        """The slot that holds the block now."""
        self.by_hand = 0
        """How many of its uses users have begun: no end of a pass ends them."""
        self.bound = False
        """Whether the tensors point into the slot."""
        self.addresses: list[int] = []
        """Where the library has pointed the tensors: one that is elsewhere was replaced
        by a user. It is `host_addresses` or `view_addresses`."""
        self.host_addresses: list[int] = []
        self._hosts: Sequence[torch.Tensor] = ()
        self.views: Sequence[torch.Tensor] = ()
        """Where the tensors lie in `views_in`; shared with blocks of the same form."""
        self.view_addresses: list[int] = []
        self.views_in: Slot | None = None
        self.target: torch.Tensor | None = None
        """The bytes of `views_in` that the block fills."""
        self.filled_in = -1
        """When the slot was filled, as `Mover.passed` counts."""
        self.clean_versions: list[int] = []
        """All tensors' versions when the store was last told of changes."""
        self.versions: list[int] = []
        """The tensors' versions when the slot's bytes last equalled the store's."""
        self.sent: tuple[Ticket, list[int]] | None = None
        """A copy of changed bytes that may still be on its way home, while the block
        stays bound, and the tensors' versions when it was queued."""
        self.handles: dict[int, tuple[Any, ...]] = {}
        """Handles of its views that autograd has saved, by the byte of the image at
        which the view begins."""
        self.casts: dict[int, KnownCast] = {}
        """Casts of its tensors that autocast may keep, by the tensors' ids."""
        self.read_elsewhere = False
        """Whether modules that are no sites of it read its tensors."""
        self.rows = 0
        """How many rows its tensors have, if a call may read some of them only."""
        self.picks = False
        """Whether its latest call was one of which the rows are known: with few tokens
        it would need some rows only."""
        self.runs: Runs = ()
        """The rows that its slot holds or is to hold; empty if that is the whole
        block."""
        self.runs_nbytes = 0
        """Bytes of the rows that its latest use by rows brought."""
        self.seal: torch.Tensor | bytes | None = None
        """A sample of the host bytes that the slot was filled from."""

    def __repr__(self) -> str:
        return f"Block({self.name!r}, {format_bytes(self.nbytes)}, {self.state.name})"

    def set_store(self, store: Store | None) -> None:
        """Say where the truth is from now on. The block must be off the device."""
        hosts = () if store is None else store.hosts
        addresses, fitted = [host.data_ptr() for host in hosts], self._fitted(hosts)
        self.addresses = self.addresses or addresses
        # In one statement without a call: no interrupt comes between its assignments.
        self.store, self.host_addresses, self._hosts = store, addresses, fitted
        pinned = None if store is None else store.pinned
        self.image = None if pinned is None else pinned[: self.nbytes]
        self.sampled = None if self.image is None else _some_of(self.image)
        self._cross_by(None if store is None else store.wire)
        self.versions = self.read_versions()

    def rehouse(self, store: Store) -> None:
        """Say where the same bytes are from now on, wherever the block is."""
        versions = self.versions
        self.set_store(store)
        if self.bound:
            self.versions = versions
            return
        self.point_to_host()
        if self.slot is not None:  # whether its copy is stale was told by `versions`
            self.mark_changed()
            self.seal = None  # it was sampled where the bytes lay before

    def _cross_by(self, wire: Wire | None) -> None:
        self.wire = wire
        self.link_nbytes = self.nbytes if wire is None else wire.nbytes
        self.needs_staging = (self.image if wire is None else wire.pinned) is None

    def cross_plain(self) -> None:
        """Send the image itself from now on, not the store's wire."""
        self._cross_by(None)

    def begin_at(self, skew: Skew | None) -> None:
        """Say where in a slot's memory the image begins. It must be off the device."""
        self.begins = skew
        self.form = skew, _form(self.layout, self.tensors)

    def set_views(self, slot: Slot | None) -> None:
        """Take the views of a slot's memory, made once for each form; or none."""
        if slot is None or slot.lease is None:
            self.target, self.views, self.view_addresses = None, (), []
            self.views_in = slot
            return
        shared = slot.views.get(self.form)
        if shared is None:
            image = self._place_in(slot.lease.buffer)
            views = self._fitted(self.layout.views(image))
            addresses = [view.data_ptr() for view in views]
            shared = slot.views[self.form] = image, views, addresses
        self.target, self.views, self.view_addresses = shared
        self.views_in = slot  # at last: an interrupt may come before

    def _place_in(self, buffer: torch.Tensor) -> torch.Tensor:
        start = 0 if self.begins is None else self.begins.start_in(buffer)
        if start + self.nbytes > buffer.numel():  # somebody else's slot
            start = 0
        return buffer[start : start + self.nbytes]

    def _fitted(self, places: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return tuple(map(_fitting, self.tensors, places))

    def pairs(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor with what it should point to now."""
        places = self.views if self.bound else self._hosts
        return tuple(zip(self.tensors, places, strict=True))

    def point_to_host(self) -> None:
        """Let the tensors point to the store's host tensors."""
        if self.store is None:
            return
        # First: what an interrupt leaves elsewhere is taken for what was assigned.
        self.addresses = self.host_addresses
        self.bound = False
        for tensor, host in zip(self.tensors, self._hosts, strict=True):
            tensor.data = host

    def leave(self) -> bool:
        """Point the tensors to the host; False, and no change, if it `is_touched`."""
        if not self._turn_to(self._hosts):
            return False
        self.addresses = self.host_addresses
        self.bound = False
        return True

    def arrive(self) -> bool:
        """Point the tensors into the slot; False, and no change, if it `is_touched`."""
        if not self._turn_to(self.views):
            return False
        self.addresses = self.view_addresses
        self.bound = True
        return True

    def _turn_to(self, places: Sequence[torch.Tensor]) -> bool:
        """Point the tensors to places; False, and no change, if it `is_touched`.

        One loop checks and points: on the hot path each look at a tensor counts.
        """
        if self.tracked is not self.tensors:
            if self.is_touched():
                return False
            for tensor, place in zip(self.tensors, places, strict=True):
                tensor.data = place
            return True
        addresses, versions, number = self.addresses, self.versions, 0
        for tensor in self.tensors:  # enumerate() takes 0.06 us, zip() more
            if tensor.data_ptr() != addresses[number]:
                break
            if tensor._version != versions[number]:
                break
            tensor.data = places[number]
            number += 1
        else:
            return True
        for tensor, place in self.pairs()[:number]:
            tensor.data = place
        return False

    def straighten(self) -> None:
        """Point all tensors to one side, where an interrupt left a few on the other.

        A tensor left in the slot would find another block's bytes there later, and be
        taken for one to which a user assigned them.
        """
        if self.store is None:
            return
        places, own, others = self._hosts, self.host_addresses, self.view_addresses
        if self.bound:
            places, own, others = self.views, others, own
        if self.addresses is others:
            self.addresses = own
        for number, address in enumerate(others):
            if self.tensors[number].data_ptr() == address:
                self.tensors[number].data = places[number]

    def is_replaced(self) -> bool:
        """Whether somebody pointed a tensor elsewhere, through `.data`."""
        return [tensor.data_ptr() for tensor in self.tensors] != self.addresses

    def held_hosts(self, numbers: Iterable[int]) -> list[int]:
        """Return those of some host tensors whose memory somebody else refers to."""
        store = self.store
        if store is None:
            return []
        hosts = (*self._hosts, *store.hosts, store.pinned, self.image)
        own = {id(tensor): tensor for tensor in hosts if tensor is not None}
        known = Counter(map(storage_key, own.values()))
        # `data`, for a read of the tensors themselves looks like a use to `StrayUses`.
        known.update(storage_key(tensor.data) for tensor in self.tensors)
        keys = {number: storage_key(self._hosts[number]) for number in numbers}
        return [n for n, k in keys.items() if use_count_of(k) > known[k] + WRAPPERS]

    def read_versions(self) -> list[int]:
        """Return the version counters of the tensors that have one."""
        return [t._version for t in self.tracked]

    def all_versions(self) -> list[int]:
        """Return the version counters of all tensors, 0 for those without."""
        return [0 if t.is_inference() else t._version for t in self.tensors]

    def tell_edits(self) -> None:
        """Tell the store which host tensors were changed, before it is read."""
        now = self.all_versions()
        if self.store is None or now == self.clean_versions:
            return
        clean = self.clean_versions
        for number, version in enumerate(now):
            if clean is _UNKNOWN or version != clean[number]:
                self.store.edited(number)
        self.clean_versions = now

    def mark_changed(self) -> None:
        """Let `is_changed` say yes, for a change that no version counter shows."""
        self.sent = None
        self.versions = self.clean_versions = _UNKNOWN

    def is_changed(self) -> bool:
        """Whether a tensor was changed in place since `versions` was noted."""
        return [t._version for t in self.tracked] != self.versions

    def is_touched(self) -> bool:
        """Whether it is replaced or changed, in two thirds of the time of both."""
        if self.tracked is not self.tensors:
            return self.is_replaced() or self.is_changed()
        addresses, versions, number = self.addresses, self.versions, 0
        for tensor in self.tensors:
            if tensor.data_ptr() != addresses[number]:
                return True
            if tensor._version != versions[number]:
                return True
            number += 1  # noqa: SIM113
        return False


class Reader:
    """A site that reads a block, and how often it reads its weights.

    A weight that is read several times while its block is bound has as many terms in
    its gradient, whose order of addition counts: Note [One by one] in `gradients`.

    Attributes:
        own: The parameters it reads, by id: others may read the rest of the block.
        binding: `Block.bindings` when the site began last.
        since: The sequence number of autograd's next node then; None if no backward is
            to come.
        again: Whether its weights may have been read before in the same binding, or all
            uses of theirs shall be known, for a weight has hooks of users.
        once: How many nodes a call adds to the graph if it reads each weight once, and
            whether under autocast, where one cast may stand for several reads; None as
            long as that is not known. A call that adds another number may read them
            more often: it has more frames, say, or more steps.
        began: The sequence number of autograd's next node when it began last, if its
            block may be read unseen.
        cast: Which of its weights autocast casts in a call; None if not known yet.
        cast_to: By id, the types that autocast was last found to have cast them to, in
            calls whose graph did not tell.
        first: The sequence number of autograd's next node when it began, from where on
            `KeptViews` is to look; -1 if it is not to.
        looked: `Block.abandoned` when `KeptViews` found nothing; -1 if it shall look.
    """

    __slots__ = (
        *("_tied", "again", "began", "binding", "cast", "cast_to"),
        *("first", "looked", "once", "own", "since"),
    )
    cast: tuple[torch.Tensor, ...] | None

    def __init__(self, own: Mapping[int, torch.Tensor], *, tied: bool) -> None:
        self.own = own
        self.began = 0
        self.binding = -1
        self.since: int | None = None
        self.again = False
        self._tied = tied
        self.first = -1
        self.forget()

    def forget(self) -> None:
        """Modules have joined or left the model: its calls may do other things now."""
        self.once: tuple[int, bool] | None = None
        self.looked = -1
        self.cast = None
        self.cast_to: dict[int, torch.dtype] = {}

    def begin(self, block: Block) -> None:
        """The site begins, for a backward pass to come."""
        self.again = self._tied or block.hooked or self.binding == block.bindings
        self.binding = block.bindings
        self.since = sequence_number()


def readers_of(
    sites: Sequence[tuple[nn.Module, Block]], tables: Iterable[nn.Module]
) -> list[Reader]:
    """Return a reader for each site.

    Args:
        sites: With their blocks.
        tables: Modules that look rows up in weights, some of which sites read as well.
    """
    read = [{id(t): t for t in site.parameters()} for site, _ in sites]
    count = Counter(key for own in read for key in own)
    count.update(id(weight) for table in tables for weight in table.parameters())
    return [Reader(own, tied=any(count[key] > 1 for key in own)) for own in read]


def _some_of(image: torch.Tensor) -> memoryview:
    # Not a tensor: torch takes several times as long to copy or compare so few words.
    if not image.numel():
        return memoryview(b"")
    memory = (ctypes.c_ubyte * image.numel()).from_address(image.data_ptr())
    words = memoryview(memory).cast("B").cast("q")
    return words[:: max(1, len(words) // _SAMPLES)]


def _form(layout: BlockLayout, tensors: Sequence[torch.Tensor]) -> Hashable:
    return layout.nbytes, tuple(
        (place.offset, place.dtype, place.shape, place.stride, tensor.is_inference())
        for place, tensor in zip(layout.entries, tensors, strict=True)
    )


def any_replaced(blocks: Sequence[Block]) -> bool:
    """Whether `is_replaced` is true of some block, in a third of the time."""
    found = [tensor.data_ptr() for block in blocks for tensor in block.tensors]
    return found != [address for block in blocks for address in block.addresses]


def point_to(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Let a tensor of any mode have the memory of another."""
    tensor.data = _fitting(tensor, place)


def _fitting(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return a place as it can be assigned to a tensor's `.data`.

    A tensor that was made in inference mode has no version counter, and would have to
    have one if it were pointed to an ordinary tensor.
    """
    if not tensor.is_inference() or place.is_inference():
        return place
    with inference_mode(True), without_modes():
        alias = torch.empty(0, dtype=place.dtype, device=place.device)
        start = place.storage_offset()
        storage = place.untyped_storage()
        return alias.set_(storage, start, place.shape, place.stride())


def staged_bytes(block: Block) -> int:
    """Return the bytes of memory in which a disk can write a block without a copy."""
    skew = None if block.store is None or block.wire else block.store.skew
    return block.link_nbytes + (skew.of if skew else 0)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, or of what a subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def can_stream(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory, which a view of other memory can replace.

    Not an empty one: where a module lets it grow, as observers of quantization do, it
    would grow over what lies behind it in an image.
    """
    values = values_of(tensor)
    return (
        type(values) is torch.Tensor
        and values.layout is torch.strided
        and not values.is_nested
        and (values.is_meta or values.numel() > 0)
    )


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, as `data` does, without what its class adds to that.

    Some classes make all that comes of them one of theirs.
    """
    with as_it_is():
        return tensor.data
