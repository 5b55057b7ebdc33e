"""What of one model is on the device around its uses, and within which limit."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from stagehand.errors import ConfigError, StagehandOOMError
from stagehand.frames import frame_of_copy
from stagehand.torch_private import tensor_use_count

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterator, Sequence

    from torch import nn

    from stagehand.additions import Additions
    from stagehand.assembly import Parts, Settings
    from stagehand.files import WeightFiles
    from stagehand.host_memory import HostMemory
    from stagehand.measure import Measure
    from stagehand.residency.blocks import Reader
    from stagehand.tenancy import Tenancy
    from stagehand.uses import Uses
    from stagehand.weak_refs import ModelRef
    from stagehand.weights.edges import Edges
    from stagehand.weights.sites import SiteHooks
    from stagehand.weights.strays import Strays
    from stagehand.wires import Wires

__all__ = ["Placing"]


class Placing:
    """Brings to the device what stays there, and home what must leave it.

    Not thread-safe: callers hold the model's lock, but for `park()`, `place()` and what
    is done for copies, which take it.

    Args:
        model: The streamed model.
        parts: Of the runtime.
        settings: Of the runtime.
        edges: The model's.
        tenancy: The place on the device.
        uses: Tells whether gradients are taken.
        hooks: On the model.
        strays: What is read by others than its module.
        readers: Of the sites.
        additions: Knows what joins the model.
        wires: What blocks cross the link in.
        files: Where weights come from.
        host_memory: What these leave in host memory.
        measure: Told of new plans.
    """

    def __init__(
        self,
        model: ModelRef,
        parts: Parts,
        settings: Settings,
        *,
        edges: Edges,
        tenancy: Tenancy,
        uses: Uses,
        hooks: SiteHooks,
        strays: Strays,
        readers: Sequence[Reader],
        additions: weakref.ref[Additions],
        wires: Wires,
        files: WeightFiles,
        host_memory: HostMemory,
        measure: Measure,
    ) -> None:
        self._model = model
        self._parts = parts
        self._settings = settings
        self._edges = edges
        self._tenancy = tenancy
        self._uses = uses
        self._hooks = hooks
        self._strays = strays
        self._readers = readers
        self._additions = additions
        self._wires = wires
        self._files = files
        self._host_memory = host_memory
        self._measure = measure
        self.ready = False
        """Whether `prepare` was done since the device was last cleared."""
        self.marked_bytes = settings.budget_bytes
        """What watermarks leave of the budget."""
        self._hands_over = False  # another model is expected to run next
        self._resumes = False  # what stays was here before all was brought home

    # Between passes

    @property
    def model(self) -> nn.Module:
        """The streamed model; an error if it is not streamed any more."""
        return self._model.check()

    @property
    def torch_device(self) -> torch.device:
        """Where it computes."""
        return self._parts.device.torch_device

    @property
    def runs(self) -> bool:
        """Whether this thread is in a pass of it."""
        return self._edges.running()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold the model's lock; refuse if it runs or one of its blocks is in use."""
        self._model.check()
        if self._edges.running():
            raise ConfigError(
                "the model cannot be moved, copied or given back while it runs: do"
                " that when its pass is over"
            )
        with self._edges.lock:
            self._parts.scheduler.release_fetched()
            scheduler = self._parts.scheduler
            if scheduler.in_use and self._hooks.find_lost():
                scheduler.recover()  # no hook was left to end these uses
            if used := scheduler.in_use:
                raise ConfigError(
                    f"block {used[0]!r} is in use: call after_block() before the"
                    " model is moved, copied or given back"
                )
            yield

    def park(self) -> None:
        """Bring every tensor home to the host and free all device memory.

        The next pass brings them back.

        Raises:
            ConfigError: If the model runs, or a block is in use.
        """
        with self.at_rest():
            self.clear_device()
            self.take_in()
            self._parts.take_home_odd()
            if (additions := self._additions()) is not None:
                additions.take_home_unseen(torch.device("cpu"))
            self._parts.take_gradients_along()
            self._parts.device_arena.trim()

    def clear_device(self) -> None:
        """Bring all blocks home; the next pass pins and places them anew."""
        self.ready = self._resumes = False  # first: an interrupt may leave some there
        self._parts.scheduler.park()
        self._parts.loader.pin_on = None
        self._parts.masters.stop_pinning()
        self._parts.loader.set_slabs(0, 0)
        self._parts.engine.close_wires()

    def place(self) -> None:
        """Bring what always stays to the device, as the next pass would.

        In the middle of a pass nothing happens: it is there.

        Raises:
            StagehandOOMError: If there is no room for what has joined the model.
        """
        self._model.check()
        if not self._edges.running():
            with self._edges.lock:
                self.take_additions()
                self.place_between_passes()
                self._resumes = False

    def place_between_passes(self) -> None:
        """Call `place_rest` between passes, where users may edit the weights next."""
        self.place_rest()
        self._parts.scheduler.rest()

    def place_rest(self) -> None:
        """Bring what stays to the device, as far as it has values.

        Before the first pass that is the small rest only, which is never pinned. What
        trains comes with its first use, as in each step.
        """
        parts = self._parts
        staying = parts.scheduler.staying() if self.ready else parts.blocks[:1]
        parts.scheduler.place(
            block
            for block in staying
            if block.store is not None
            and block.tensors
            and (block.index in parts.scheduler.fixed or not block.trains)
        )
        parts.place_odd()
        parts.take_gradients_along()

    def take_in(self) -> None:
        """Take in what was assigned to the `.data` of tensors, wherever they are."""
        for block in self._parts.blocks:
            self._parts.scheduler.take_in(block)

    # Copies, pickles and state dicts

    def bring_home(self) -> None:
        """Bring every tensor home, for a copy, a pickle or a state dict of the model.

        `resume` brings back what stays.
        """
        if self._model.is_open:
            rest = self._parts.blocks[0]  # which is placed before the first pass
            resumes = self._resumes or self.ready or rest.bound
            self.park()
            self._resumes = resumes

    def hand_out(self) -> bool:
        """Bring tensors home for a state dict: all, but what stays if others wait for
        its gradients, as `DistributedDataParallel` does.

        They hold its `AccumulateGrad` nodes, of which there would be others when it is
        back from another device.

        Returns:
            Whether anything was left on the device.
        """
        parts = self._parts
        staying = (parts.blocks[index] for index in parts.scheduler.fixed)
        changes_devices = self._model.is_open and not parts.device.is_host
        if not changes_devices or not any(
            tensor.requires_grad and tensor_use_count(tensor) > 1
            for tensor in (*(t for b in staying for t in b.tensors), *parts.odd)
        ):
            self.bring_home()
            return False
        with self.at_rest():
            parts.scheduler.give_up(0, all_of_it=False)
            self.take_in()
        return True

    def resume(self) -> None:
        """Bring back what stays, if `bring_home` took it away from the device.

        If there is no room for what has joined, it is not brought, and the next pass
        says so: who saves a model or copies it gets what there is.
        """
        if self._resumes and not self._model.closed:
            with suppress(StagehandOOMError):
                self.place()

    def begin_copy(self) -> None:
        """Bring every tensor home for `copy.deepcopy(model)`, until `end_copy`."""
        if (frame := frame_of_copy()) is not None and self._model.is_open:
            self._edges.begin_reading(frame, self.bring_home)
        else:
            self.bring_home()

    def end_copy(self) -> None:
        """End what `begin_copy` began: the rest of the model is copied, too."""
        try:
            self.resume()
        finally:
            if (frame := frame_of_copy()) is not None:
                self._edges.end_reading(frame)

    def await_copies(self) -> None:
        """Wait for copies to the device that may read what is about to be written."""
        self._parts.loader.await_copies()

    # What joins the model

    def look_again(self) -> None:
        """Look in the next pass for what has joined: a buffer was replaced, say."""
        additions = self._additions()
        if additions is not None:
            additions.look_again()

    def take_additions(self) -> None:
        """Bring tensors that have joined the model to the device, if there are any."""
        additions = self._additions()
        if additions is None:
            return
        additions.bring_buffers()
        if used := self._parts.scheduler.in_use:
            self._hooks.check()  # these are by hand, or nothing was left to end them
            additions.refuse_new(used[0])
            return
        if not additions.may_have_joined():
            return
        for reader in self._readers:
            reader.forget()
        self._strays.look_again()
        if self._parts.device.is_host:
            additions.look()
            return
        self.take_in()  # before room is made: it refuses what no budget makes possible
        weights = self._parts.weights
        share, marked = weights.limit_bytes, self.marked_bytes
        taken = False
        try:
            taken = self._take_in_additions(additions)
        finally:
            if not taken:
                self.marked_bytes = marked
                weights.set_limit(share)
        if taken:
            if self._edges.is_busy:
                self._hands_over = self._tenancy.begin()
                self.make_room()  # others were promised what it does not leave
                self._parts.steering.steer()
            self.place_rest()
            self._measure.know(self._parts.scheduler.blocks)

    def _take_in_additions(self, additions: Additions) -> bool:
        """Call `Additions.take_in` with as much of the budget as it needs."""
        weights = self._parts.weights
        while True:
            weights.set_limit(self.marked_bytes)
            try:
                return additions.take_in()
            except StagehandOOMError as error:
                if self.marked_bytes >= self._parts.budget_bytes:
                    raise
                # Watermarks leave what cannot be done without, within the budget.
                self.marked_bytes = min(error.needed_bytes, self._parts.budget_bytes)

    # As a pass begins

    def begin_tenancy(self, *, may_drop: bool) -> None:
        """Let other models make room for a pass.

        Args:
            may_drop: Whether what has left this model may leave the device for it.
        """
        try:
            self._hands_over = self._tenancy.begin()
        except StagehandOOMError:
            additions = self._additions()
            if additions is None or not may_drop or self._parts.scheduler.in_use:
                raise
            if not additions.drop_gone():
                raise
            self._hands_over = self._tenancy.begin()

    def begin_uses(self) -> None:
        """Make all ready for the uses of a pass: room, pinned memory, files, plan."""
        parts, measure = self._parts, self._measure
        goes_back = self._uses.saved.backward is not None
        trains = self._uses.took_gradients
        if trains and self._wires.must_leave() is not None:
            self.clear_device()
        self.make_room()
        if not self.ready:
            if not parts.scheduler.in_use:  # so that only what has room is placed
                parts.steering.steer()
            self.prepare()
        if parts.loader.pin_on is not None:
            self._pin_on()
        self._files.check()
        self._account(trains=goes_back and trains)
        parts.engine.wake_wires()  # before slots that no plan knows take the room
        if measure.stopwatch.is_over():
            parts.steering.note(*measure.collect())
            parts.steering.learns = parts.loader.pin_on is None
        parts.scheduler.begin_pass(goes_back=goes_back, hands_over=self._hands_over)
        if not parts.scheduler.in_use and parts.steering.steer():
            if parts.weights.overdraft_bytes:
                parts.device_arena.trim()  # what was kept for reuse under the old limit
            self.place_rest()
            self._keep_from_disk()
            measure.know(parts.scheduler.blocks)
        came_back = parts.scheduler.recall()
        if parts.place_odd() or came_back:
            parts.take_gradients_along()
        watch = measure.timed or parts.steering.wants_times(measure.stopwatch.uses)
        parts.scheduler.stopwatch = measure.stopwatch if watch else None
        parts.engine.stopwatch = parts.scheduler.stopwatch

    def prepare(self) -> None:
        """Pin what is streamed, as far as the pool allows, and place what stays."""
        parts = self._parts
        empty = next((b for b in parts.blocks if b.store is None), None)
        if empty is not None:
            raise ConfigError(
                f"block {empty.name!r} has no values: it is on the meta device; call"
                " convert_registry_to_file_backed_sharded() before the first pass, or"
                " open the model with stagehand.load()"
            )
        if not parts.device.is_host:
            self.take_in()
            parts.loader.set_slabs(0, 0)  # of a pass that failed in what follows
            self._wires.prepare(trains=self._uses.took_gradients)
            staged = parts.masters.pin_all(parts.streamed, self._settings.lookahead)
            parts.loader.set_slabs(*staged)
            if parts.masters.pinning_bytes:
                parts.loader.pin_on = parts.masters.pin_on
            self._wires.open()
            self._keep_from_disk()
        self.ready = True
        self.place_rest()

    def _pin_on(self) -> None:
        """Go on pinning; when that is done, stage only what is not pinned."""
        parts = self._parts
        parts.masters.pin_on(insist=True)
        if parts.masters.reserved_bytes:
            return
        if parts.masters.pinning_bytes or not any(
            block.needs_staging for block in parts.streamed
        ):
            parts.loader.set_slabs(0, 0)
            if self._settings.pool is None:
                parts.pinned_arena.trim()
        self.take_in()
        parts.loader.set_slabs(*parts.masters.pin_late())
        parts.loader.pin_on = None  # not if something failed: then again

    def _account(self, *, trains: bool) -> None:
        """Count weights in host memory that are not those of their files any more."""
        files = self._files.plain
        if files is None or self._parts.scheduler.in_use:
            return
        if self._host_memory.account(
            files.overlay_bytes,
            trains=trains,
            gradient_bytes=self._uses.missing_bytes,
        ):
            self.make_room()
            self._keep_from_disk()

    def _keep_from_disk(self) -> None:
        self._host_memory.keep(self._uses.missing_bytes)

    # The limit for weights

    def make_room(self) -> None:
        """Set the limit for weights: the least of what watermarks, other models on the
        device and changed weights in host memory leave of the budget."""
        marks, parts = self._settings.watermarks, self._parts
        allocated = parts.device.allocated_bytes()
        if marks is not None and allocated is not None:
            held = parts.weights.held_bytes
            target = marks.target(self.marked_bytes, held, allocated)
            self.marked_bytes = max(
                min(target, parts.budget_bytes),
                parts.steering.smallest_budget() + parts.apart_bytes,
            )
        target = self._least_limit()
        if target != parts.weights.limit_bytes:
            self.limit_to(target)

    @property
    def taker(self) -> str:
        """Who has what weights may not take of the budget."""
        return min(
            (self._tenancy.limit_bytes, "other models on the device"),
            (self.marked_bytes, "other tensors on the device"),
            (self._host_memory.slots_bytes, "changed weights in host memory"),
        )[1]

    def limit_to(self, nbytes: int) -> None:
        """Plan for so many bytes, and let weights have no more.

        Raises:
            StagehandOOMError: If it cannot work; all stays as it was then.
        """
        self._wires.plan_within(nbytes)
        self._parts.weights.set_limit(nbytes)
        self._parts.device_arena.trim()  # what is kept for reuse counts, too

    def widen(self, nbytes: int) -> None:
        """Let weights have so much in this pass, within the budget: watermarks leave
        what cannot be done without, and other models what they keep while it runs."""
        if nbytes <= self._parts.budget_bytes:
            self.marked_bytes = max(self.marked_bytes, nbytes)
            self._tenancy.widen(nbytes)
            self._parts.weights.set_limit(self._least_limit())

    def _least_limit(self) -> int:
        return min(
            self._tenancy.limit_bytes,
            self.marked_bytes,
            self._host_memory.slots_bytes,
        )
