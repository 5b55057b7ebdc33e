"""What autograd keeps of streamed weights: handles, not memory.

Autograd saves views of weights for backward (`nn.Linear` saves `weight.t()`). A view of
a slot would keep the slot's memory and read another block's bytes once the slot is
reused. So a saved tensor that lies in a slot becomes a handle: the block, and the
shape, strides and offset of the view inside the block's image. Unpacking brings the
block to the device and makes the view where the block lies then.

One pair of hooks serves a whole pass. Where somebody else's hooks are on top of it, as
inside of a checkpointed region, a site puts a pair in their place that passes on to
them what is no weight: forward and recompute leave out the same tensors, so
checkpointing works, and what a recompute saves holds no slot either. The pair stays to
the end of the region, also where the model is entered inside of that.

Some read weights in backward that no handle stands for: a part of a site that is
recomputed by itself, as checkpointing inside of blocks does, or a function that keeps
the parameter itself. Both unpack first what they were given. So what such a site saves
that is no weight remembers the site's block, and brings it.

Under autocast the graph saves casts of weights. A cast of a trained weight is known by
the graph itself and becomes a handle that casts again; one of a frozen weight leaves no
trace in the graph and stays an activation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch
from torch import is_grad_enabled

from stagehand.core.casts import cast_of, note_cast
from stagehand.core.device import Device
from stagehand.core.saved import Kept, unchanged
from stagehand.core.trees import tensors_in
from stagehand.residency.blocks import Block
from stagehand.residency.handles import (
    CastHandle,
    ViewPlace,
    WeightHandle,
    handle_at,
    number_at,
)
from stagehand.residency.scheduler import Scheduler
from stagehand.torch_private import (
    SavedHooks,
    call_unseen,
    graph_task,
    in_backward,
    in_function,
    is_checkpoints,
    looked_through,
    push_saved_hooks,
    replace_saved_hooks,
    sequence_number,
    skipped,
    sparing,
    take_off_hooks,
    top_saved_hooks,
)

if TYPE_CHECKING:
    from stagehand.core.transfer import Slot

__all__ = ["SavedTensors"]

# A bound of a cache: a model may cut its weights in other ways in each pass.
_PLACES_KEPT = 100_000

_Tensor = torch.Tensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_NO_STREAM = object()

# Weak, for a graph or hooks that an interrupt has left must not keep the model alive.
_Watch = WeakMethod[Callable[[], AbstractContextManager[Any]]]

# A tensor's number, and offset, type, shape and strides of a view, and whether it is
# the conjugate or the negative of its bytes.
_Key = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...], bool, bool]


class _OfSite:
    """What a site saved that is no weight.

    Attributes:
        packed: What stands for it.
        block: The block that the site reads.
    """

    __slots__ = ("block", "packed")

    def __init__(self, packed: Any, block: Block) -> None:
        self.packed = packed
        self.block = block


class SavedTensors:
    """The pack and unpack hooks of one runtime.

    Args:
        scheduler: Knows the slots in use, by the address of their memory, and the block
            that is at hand in backward.
        owners: The streamed block of each parameter, by the parameter's id.
        fetch: Brings a block to the device for backward.
        turn_back: Called when anything is unpacked in a backward pass that is not known
            yet: what is recomputed then may read weights before any site begins. And on
            a device, in another call of autograd inside of the known one.
        device: Where the slots are.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        owners: Mapping[int, Block],
        fetch: Callable[[Block], None],
        turn_back: Callable[[], None],
        device: Device,
    ) -> None:
        self._scheduler = scheduler
        self._slots = scheduler.slots_by_memory
        self._left = scheduler.left_memory
        self._owners = owners
        blocks = dict.fromkeys(owners.values())
        types = {place.dtype for block in blocks for place in block.layout.entries}
        # What no cast of a weight has: most of what is saved is neither.
        self._uncast = types.pop() if len(types) == 1 else None
        self._fetch = fetch
        self._turn_back = turn_back
        self.before: Sequence[SavedHooks] = ()
        """What was where its own pair is, as `_Inside.before` says."""
        self._device = None if device.is_host else device.torch_device
        self._current_stream = device.current_stream
        # The host has only one stream, which need not be asked for at each unpack.
        self._only: Any = device.current_stream() if device.is_host else _NO_STREAM
        self.backward: int | None = None
        """The number of the backward pass that is known to go on."""
        self._inner = -1  # the latest call of autograd inside of it
        self.site: Block | None = None
        """The block of the site that runs now, if it may be read unseen."""
        self.latest = -1
        """The sequence number behind the node for which that site last saved something
        here; -1 if there is none."""
        self.watch: _Watch | None = None
        """Makes a context in which backward recomputes regions of this forward."""
        # By address: the slot in which a view was seen, if it still has that memory.
        self._seen: dict[int, Slot] = {}
        # What views of blocks of one form have in common.
        self._places: dict[_Key, ViewPlace] = {}

    def push_hooks(self, *, stay: bool = True) -> object:
        """Make this pair the one through which this thread saves tensors.

        It takes the place of the pair on top, if that is somebody else's: whoever
        pushed that one pops what is in its place, at an interrupt, too. There is no
        other way to leave nothing of theirs on the thread.

        Args:
            stay: Whether it may stay there until theirs ends. In the place of another
                runtime's it never may: two runtimes that take turns would wrap each
                other's pairs without end.

        Returns:
            What the caller must give to `put_back` later; None if it must do nothing.
        """
        top = top_saved_hooks()
        if top is None:
            push_saved_hooks(looked_through(partial(self.pack, Kept)), self.unpack)
            return self
        owner = _owner(top)
        if self._is_part(owner):
            return None
        inside = _Inside(self, *top)
        pack = looked_through(partial(self.pack, inside.pack), top)
        pair = pack, inside.unpack
        is_ours = isinstance(owner, SavedTensors | _Inside)
        if is_ours and owner.before == ():
            push_saved_hooks(*pair)
        else:
            inside.before = None if stay and not is_ours else (top,)
            replace_saved_hooks(pair)
        sparing(self._is_in_slot)
        return None if inside.before is None else inside

    def begin_pass(self) -> None:
        """Do as `push_hooks` for a whole pass, until `leave_hooks`."""
        # A region is recomputed in a pass that is not over before the region is.
        self.push_hooks(stay=_is_in_region())

    def put_back(self, pushed: object) -> None:
        """End what a `push_hooks` began, if an interrupt has not. Idempotent."""
        take_off_hooks(lambda pair: _before(pair) if _owner(pair) is pushed else None)

    def leave_hooks(self) -> None:
        """End what every `push_hooks` of this thread began: the pass is over, or the
        model gone. An interrupt may have left some that nobody has noted."""
        while take_off_hooks(self._before_own):
            pass

    def _before_own(self, pair: SavedHooks) -> Sequence[SavedHooks] | None:
        return _before(pair) if self._is_part(_owner(pair)) else None

    def come_into_region(self) -> None:
        """Replace a checkpointed region's pair: what is read there is no site's.

        A region without sites would be recomputed with nobody to bring that.
        """
        if is_grad_enabled() and _is_in_region():
            self.push_hooks()

    def _is_part(self, owner: Any) -> bool:
        """Whether a hook's object belongs to this runtime."""
        return owner is self or (type(owner) is _Inside and owner.saved is self)

    def _top_inside(self) -> "_Inside | None":
        """Return the pair that a site has put in a region's place, if it is on top."""
        top = top_saved_hooks()
        owner = None if top is None else _owner(top)
        return owner if type(owner) is _Inside and owner.saved is self else None

    def _is_in_slot(self, tensor: torch.Tensor) -> bool:
        """Whether a view of a tensor would keep the memory of a slot."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return False
        memory = tensor.untyped_storage().data_ptr()
        return memory in self._slots or memory in self._left

    @skipped
    def pack(
        self, otherwise: Callable[[torch.Tensor], Any], saved: torch.Tensor
    ) -> Any:
        """Return a handle of a weight, and of anything else what `otherwise` makes.

        It runs for all that is saved, so it calls little. `_seen` is only a hint where
        to look: which block is in the slot now, the slot itself knows.
        """
        site = self.site
        if site is not None:
            self.latest = sequence_number()
        if (
            type(saved) is _Tensor  # mostly
            or type(saved) in _PLAIN
            or type(saved.data) is _Tensor
        ):
            handle: WeightHandle | CastHandle | None = None
            try:
                address = saved.data_ptr()
                slot = self._seen.get(address)
                if slot is not None and (block := slot.occupant) is not None:
                    for known in block.handles.get(address - slot.address, ()):
                        place = known.place
                        if (
                            saved.stride() == place.stride
                            and saved.shape == place.shape
                            and saved.dtype is place.dtype
                            and not (place.is_part and saved.is_neg() != place.is_neg)
                            and not (
                                place.is_complex and saved.is_conj() != place.is_conj
                            )
                        ):
                            if known.version == known.tensor._version:
                                return known
                            return handle_at(block, place)
                memory = saved.untyped_storage().data_ptr()
                slot = self._slots.get(memory)
            except RuntimeError:  # sparse, or nested: without one address, or one shape
                pass
            else:
                if slot is not None and slot.occupant is not None:
                    handle = self._handle(saved, slot.occupant)
                    if handle is not None:
                        self._seen[address] = slot
                else:
                    if self._left and memory in self._left:
                        handle = self._handle_of_left(saved)
                    if (
                        handle is None
                        and saved.dtype is not self._uncast
                        and saved.grad_fn is not None
                    ):
                        handle = self._cast(saved)
            if handle is not None:
                return handle
        if site is None:
            return otherwise(saved)
        if otherwise is Kept:  # mostly: an object, and one in it, take 0.8 us more
            return saved.detach(), saved._version, site
        return _OfSite(otherwise(saved), site)

    @skipped
    def unpack(self, packed: Any) -> torch.Tensor:
        """Return what was packed.

        A view of a block that backward has brought, or that is always there, is at
        hand: that comes first, in as few calls as can be.
        """
        task = graph_task()
        if task != self.backward:
            self.come_into(task)
        elif type(packed) is WeightHandle:  # mostly
            block, scheduler = packed.block, self._scheduler
            if (
                (
                    block is scheduler.fetched
                    or (block.index in scheduler.fixed and not block.casts)
                )
                and block.bound
                and not is_grad_enabled()
            ):
                slot: Any = block.slot
                view: torch.Tensor | None = slot.views.get(packed.place)
                seen_by = slot.seen_by
                if (
                    view is not None
                    and (seen_by is self._only or seen_by == self._current_stream())
                    and packed.tensor._version == packed.version
                ):
                    return view.data  # as `WeightHandle.view` does
        if type(packed) is tuple:
            tensor, version, block = packed
            self.come_to(block)
            return unchanged(tensor, version)
        if type(packed) is Kept:
            return packed.get()
        return self.bring(packed)

    def come_into(self, task: int) -> None:
        """Note that a call of autograd, by its number, is not the one that is known.

        It is a backward pass that begins, or a call inside of the known one.
        """
        if self.backward is None:
            self.note_backward()
        elif task not in (-1, self._inner) and self._device is not None:
            self._inner = task
            self._turn_back()

    def note_backward(self) -> None:
        """Let a backward pass begin, if this is one."""
        if in_backward():
            self._turn_back()

    def follow(self, block: Block, output: Any, since: int) -> None:
        """Bring a site's block as autograd comes to what the site has returned.

        What parts of the site have saved may have gone to hooks of their own, inside of
        it, which tell of nothing. A region around the site is recomputed first, if it
        was given anything, and brings blocks in the order of the forward.

        Args:
            block: The site's.
            output: What the site has returned: tensors in containers.
            since: The sequence number of the first node that may be the site's. Of what
                it has only passed on, autograd comes to the node at another time.
        """
        owner, region = self._top_inside(), None
        if owner is not None and is_checkpoints(owner.below):
            if graph_task() != -1 and not in_function():
                # Autograd goes through nothing that a region recomputes for its hooks,
                # and what that only passes on may have numbers of another thread.
                return
            region = ref(owner)  # a graph that has run drops what it saved
        tensors = [tensor for _, tensor in tensors_in(output)]
        # A view that is changed in place gets another node, which leads to its base's.
        tensors += [each._base for each in tensors if each._base is not None]
        for node in {tensor.grad_fn for tensor in tensors}:
            number = -1 if node is None else node._sequence_nr()
            if region is None and number == self.latest - 1:
                continue  # what it has saved here brings the block, without a hook
            if node is not None and number >= since:
                node.register_prehook(partial(self._arrive, block, region))

    @skipped
    def _arrive(self, block: Block, region: "ref[_Inside] | None", _: object) -> None:
        if self.backward is None:
            self.note_backward()
        inside = None if region is None else region()
        if inside is not None:
            inside.unpack_first()
        self.come_to(block)

    def come_to(self, block: Block) -> None:
        """Bring the block of a site that autograd goes back through.

        What a function computes again, as a reentrant checkpoint inside of the site
        does, saves weights as handles, too: its own backward may need other blocks in
        between. Autograd ends with each node what began in it.
        """
        if not block.uses and graph_task() != -1:
            self._fetch(block)
        if in_function():
            self.push_hooks()

    def read_later(self, saved: torch.Tensor) -> None:
        """Note that a node reads what others' hooks have unpacked in one before it.

        These may have it back on a stream of their own, which waits for the node that
        unpacked it, and not for this one, before that memory is used again.
        """
        plain = saved.layout is torch.strided and not saved.is_nested
        if plain and saved.device == self._device:
            call_unseen(saved.record_stream, self._current_stream())

    def bring(self, packed: WeightHandle | CastHandle) -> torch.Tensor:
        """Return the view that a handle stands for."""
        if graph_task() == -1:  # somebody looks at the graph
            return packed.where_it_lies()
        self._fetch(packed.block)
        if is_grad_enabled():
            # A backward that is itself differentiated saves the weight again, in the
            # node that unpacks it. Autograd ends with each node what began in it.
            self.push_hooks()
        return packed.view()

    def handle_of(self, kept: torch.Tensor) -> WeightHandle | None:
        """Return a handle of a view of a streamed weight; None of all else.

        A weight itself follows its block, and holds no slot.
        """
        if type(kept) not in _PLAIN or id(kept) in self._owners:
            return None
        block = self._scheduler.block_under(kept)
        return None if block is None else self._handle(kept, block)

    def unpacking(self) -> Callable[[Any], torch.Tensor]:
        """Return what brings a handle's block as hooks do that save tensors now."""
        owner = self._top_inside()
        return self.unpack if owner is None else owner.unpack

    def _handle_of_left(self, saved: torch.Tensor) -> WeightHandle | None:
        """Return a handle of a view whose slot has left its memory to who holds it.

        A recompute may come by with the block still in its slot, and has to save the
        same. What else may lie at the address by now is no view of a weight.
        """
        block = self._owners.get(id(saved._base))
        return None if block is None else self._handle(saved, block)

    def _handle(self, saved: torch.Tensor, block: Block) -> WeightHandle | None:
        """Return a handle of what lies in a block's image; None if it is no view of
        weights."""
        dtype = saved.dtype
        try:
            shape, stride = saved.shape, saved.stride()
        except RuntimeError:  # nested: it has no one shape
            return None
        for table in (self._seen, self._places):
            if len(table) >= _PLACES_KEPT:
                table.clear()
        offset = int(saved.storage_offset())
        number = number_at(block, offset * dtype.itemsize)
        is_conj, is_neg = dtype.is_complex and saved.is_conj(), saved.is_neg()
        key: _Key = number, offset, dtype, shape, stride, is_conj, is_neg
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = ViewPlace(*key)
        return handle_at(block, place)

    def _cast(self, saved: torch.Tensor) -> CastHandle | None:
        found = cast_of(saved)
        if found is None:
            return None
        cast, weight = found
        block = self._owners.get(id(weight))
        if block is None or cast.device != weight.device:
            return None
        # Only where casting again gives the same: nobody has changed autocast's cast.
        if cast._version or cast.stride() != weight.stride():
            return None
        note_cast(block.casts, cast, weight)
        return CastHandle(block, weight, cast.dtype, saved)


def _is_in_region() -> bool:
    """Whether a checkpointed region's pair is on top."""
    top = top_saved_hooks()
    return top is not None and is_checkpoints(top[1])


def _before(pair: SavedHooks) -> Sequence[SavedHooks] | None:
    """Return what was where a runtime's pair is, if that is to be taken off."""
    before: Sequence[SavedHooks] | None = _owner(pair).before
    return before


def _owner(pair: SavedHooks) -> Any:
    """Return the object whose methods a pair of hooks are, or None."""
    return getattr(pair[1], "__self__", None)


class _Inside:
    """Hooks for somebody else's, or on top: weights are handles, all else is theirs.

    To unpack something, theirs may run the model again, as checkpointing does. Autograd
    unpacks all that an operator saved, one by one. If a weight came first, its view
    would keep the slot's memory while the recompute brings other blocks. So before the
    first weight of a site is unpacked, the first other tensor that the site saved is,
    which triggers the recompute; it is kept until it is asked for.
    """

    def __init__(
        self,
        saved: SavedTensors,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        self.saved = saved
        self.below = unpack
        """What unpacks what theirs has saved."""
        self.before: Sequence[SavedHooks] | None = ()
        """What was in its place: nothing, or theirs; None if it stays there until
        theirs ends."""
        self._pack = pack
        self._unpack = (
            unpack if saved.watch is None else partial(_in_watch, saved.watch, unpack)
        )
        # Then what they give was computed here, on this stream.
        self._recomputes = is_checkpoints(unpack)
        self._first: Any = None
        self._early: torch.Tensor | None = None
        self._task = -1  # the backward pass in which the first was unpacked

    def pack(self, saved: torch.Tensor) -> Any:
        """Let theirs save what is no weight."""
        packed = self._pack(saved)
        if self._first is None:
            self._first = packed
        return _Theirs(packed) if type(packed) in _OURS else packed

    @skipped
    def unpack(self, packed: Any) -> torch.Tensor:
        saved, kind, task = self.saved, type(packed), graph_task()
        if task != saved.backward:
            saved.come_into(task)
        if kind in _HANDLES:
            if task != self._task and self.unpack_first():
                return saved.bring(packed)
            return saved.unpack(packed)
        if kind is _OfSite:
            found = self.unpack(packed.packed)
            saved.come_to(packed.block)  # after theirs, which may bring other blocks
            return found
        if kind is _Theirs:
            packed = packed.packed
        if packed is self._first:
            early, self._early = self._early, None
            if early is not None and task == self._task:
                if not self._recomputes:
                    saved.read_later(early)
                return early
            self._task = task
        return self._unpack(packed)

    def unpack_first(self) -> bool:
        """Unpack what was saved first, unless this backward has; return whether so."""
        task = graph_task()
        if self._first is None or task in (-1, self._task):
            return False
        self._early = self._unpack(self._first)
        self._task = task
        return True


def _in_watch(
    watch: _Watch, unpack: Callable[[Any], torch.Tensor], packed: Any
) -> torch.Tensor:
    begin = watch()
    with nullcontext() if begin is None else begin():
        return unpack(packed)


class _Theirs:
    """What another runtime made of a tensor, below: only that one may unpack it."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed


_HANDLES = frozenset({WeightHandle, CastHandle})
_OURS = _HANDLES | {_OfSite, _Theirs}
