"""What a runtime does where passes begin and end; a part of `Runtime`."""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from stagehand.core.clock import Phase
from stagehand.core.turn import HERE
from stagehand.differentiation import refuse_lost
from stagehand.errors import (
    ClosedError,
    ConfigError,
    StagehandOOMError,
)
from stagehand.torch_private import (
    func_transform,
    function_modes,
    graph_task,
    has_more_hooks,
    in_function,
    sequence_number,
    take_off,
    unwatched,
)
from stagehand.weights.edges import PassListener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.autograd.graph import Node

    from stagehand.additions import Additions
    from stagehand.assembly import Parts, Settings
    from stagehand.autocast import Casts
    from stagehand.compact import CompactFiles
    from stagehand.core.device import Device
    from stagehand.core.steps import Steps
    from stagehand.data_parallel import Averaging
    from stagehand.gradients.gradients import Gradients
    from stagehand.graph import SavedTensors
    from stagehand.host_memory import HostMemory
    from stagehand.kept_views import KeptViews
    from stagehand.measure import Measure
    from stagehand.residency.blocks import Block, Reader
    from stagehand.stores.files import FileSet
    from stagehand.tenancy import Tenancy
    from stagehand.weights.edges import Edges
    from stagehand.weights.rows import RowGather
    from stagehand.weights.sites import SiteHooks
    from stagehand.weights.strays import Strays
    from stagehand.wires import Wires

__all__ = ["Passing", "gone"]

_requires_grad = attrgetter("requires_grad")


class Passing(PassListener):
    """Forward and backward passes of one runtime, from edge to edge."""

    _parts: Parts
    _settings: Settings
    _device: Device
    _measure: Measure
    _tenancy: Tenancy
    _additions: weakref.ref[Additions]
    _edges: Edges
    _saved: SavedTensors
    _kept: KeptViews
    _casts: Casts
    _gradients: Gradients | None
    _averaging: Averaging
    _hooks: SiteHooks
    _wires: Wires
    _host_memory: HostMemory
    _files: FileSet | None
    _compact_files: CompactFiles
    _model_ref: weakref.ref[nn.Module]
    _owners: dict[int, Block]
    _readers: Sequence[Reader]
    _marked_bytes: int
    _leaves: int
    _manual: bool
    _closed: bool
    _ready: bool
    _hands_over: bool
    _took_gradients: bool
    _steps: Steps
    _rows: RowGather
    _strays: Strays
    _handled: BaseException | None
    _failed: bool

    def _next_step(self, step: int | None) -> None:
        raise NotImplementedError

    def _limit_to(self, nbytes: int) -> None:
        raise NotImplementedError

    def _clear_device(self) -> None:
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """Whether the runtime was not shut down, and its model lives."""
        return not self._closed and self._model_ref() is not None

    def check(self) -> None:
        """See `PassListener.check`."""
        self._device.refuse_capture("a pass of a streamed model")
        exports = torch.compiler.is_exporting()
        if exports or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ConfigError(
                f"torch.{'export' if exports else 'jit.trace'} cannot record a streamed"
                f" model, {self._parts.weights.name}, whose weights come and go:"
                " expected the plain model; call the runtime's shutdown() first"
            )
        transform = func_transform()
        if transform is not None:
            raise ConfigError(
                f"torch.func ({transform.lower()}) does not go through a streamed"
                f" model, {self._parts.weights.name}: it lets nobody save weights as"
                " handles; use torch.autograd.grad() or stagehand.grad(), or the plain"
                " model after the runtime's shutdown()"
            )

    def check_hooks(self) -> None:
        """See `PassListener.check_hooks`."""
        if self._failed:
            self._hooks.check()
            self._failed = False

    def begin_pass(
        self, module: nn.Module, kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """See `PassListener.begin_pass`."""
        self._handled = sys.exc_info()[1]
        self._casts.forget()
        if not self._manual and self._hooks.is_model(module):
            self._next_step(None)
        self._tell(Phase.FORWARD)
        self._measure.begin_pass()
        takes_gradients = self._takes_gradients()
        self._parts.scheduler.expect_changes(follow=not takes_gradients)
        watches = takes_gradients or (not self._ready and self._has_gradients())
        self._begin_tenancy()
        self._take_additions()
        self._note_changes()
        if self._gradients is not None:
            self._gradients.begin_pass()
        if watches:
            self._watch()
        if takes_gradients and self._gradients is not None:
            self._averaging.check(self._gradients.expected, self._leaves)
        self._took_gradients = takes_gradients
        parts = self._parts
        parts.trains = parts.trains or takes_gradients
        self._begin_uses()
        self._hooks.drop_edges(module)
        return self._pass_context(module, kwargs)

    def _note_changes(self) -> None:
        """Mark blocks as changed that may have been, since the latest pass, unseen.

        Fused optimizers move no version counter. If one has stepped, any block that
        trains may be changed. So it may after a pass without gradients: users swap
        averages of the weights in for such passes, and in bfloat16 these differ in so
        few elements that a sample does not show it. Where the model computes on the
        host, gradients are not followed, and nothing tells which blocks were stepped.
        """
        stepped = self._steps.came()
        if self._gradients is not None:
            self._gradients.note_steps()
        if stepped or self._gradients is None or not self._took_gradients:
            self._note_trained()

    def _note_inside(self, stepped: list[torch.Tensor]) -> None:
        """Mark blocks as changed that an optimizer steps in a backward, in a hook.

        They are bound there, and may leave before the next pass begins.
        """
        if self._gradients is not None:
            self._gradients.check_step(stepped)
        for parameter in stepped:
            block = self._owners.get(id(parameter))
            if block is not None and block.bound:
                block.mark_changed()

    def _note_trained(self) -> None:
        """Mark blocks as changed that train, or did at the last such call.

        And those that were stepped although they are frozen.
        """
        frozen = self._steps.take_frozen()
        if not self._parts.trains:
            return
        for block in self._parts.streamed:
            trains = any(map(_requires_grad, block.tensors))
            trains = trains or not frozen.isdisjoint(map(id, block.tensors))
            if trains or block.trained:
                block.mark_changed()
            block.trained = trains

    def _begin_tenancy(self, *, may_drop: bool = True) -> None:
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

    def _look_again(self) -> None:
        """Look in the next pass for what has joined: a buffer was replaced, say."""
        additions = self._additions()
        if additions is not None:
            additions.look_again()

    def _take_additions(self) -> None:
        """Bring tensors that have joined the model to the device, if there are any."""
        additions = self._additions()
        if additions is None:
            return
        additions.bring_buffers()
        if self._parts.scheduler.in_use:
            self._hooks.check()  # these are by hand, or nothing was left to end them
            return
        if not additions.may_have_joined():
            return
        for reader in self._readers:
            reader.forget()
        self._strays.look_again()
        if self._device.is_host:
            additions.look()
            return
        self._take_in()  # before room is made: it refuses what no budget makes possible
        weights = self._parts.weights
        share, marked = weights.limit_bytes, self._marked_bytes
        taken = False
        try:
            taken = self._take_in_additions(additions)
        finally:
            if not taken:
                self._marked_bytes = marked
                weights.set_limit(share)
        if taken:
            if self._edges.is_busy:
                self._hands_over = self._tenancy.begin()
                self._make_room()  # others were promised what it does not leave
                self._parts.steering.steer()
            self._place_rest()
            self._measure.know(self._parts.scheduler.blocks)

    def _take_in_additions(self, additions: Additions) -> bool:
        """Call `Additions.take_in` with as much of the budget as it needs."""
        weights = self._parts.weights
        while True:
            weights.set_limit(self._marked_bytes)
            try:
                return additions.take_in()
            except StagehandOOMError as error:
                if self._marked_bytes >= self._parts.budget_bytes:
                    raise
                # Watermarks leave what cannot be done without, within the budget.
                self._marked_bytes = min(error.needed_bytes, self._parts.budget_bytes)

    def _turn_back(self) -> None:
        """Begin a backward pass, for autograd unpacks what this model has saved.

        Inside of one, a function may ask for gradients of what it has saved itself.
        """
        if self._saved.backward is not None:
            refuse_lost(self._owners)
        elif self.is_open:
            self._edges.enter_backward()

    def begin_backward(self, *, by_module: bool) -> None:
        """See `PassListener.begin_backward`."""
        self._saved.backward = graph_task()
        self._tell(Phase.BACKWARD)
        self._parts.scheduler.expect_changes(follow=True)
        self._begin_tenancy(may_drop=by_module)
        if by_module:  # no forward may have looked since users changed the model
            self._take_additions()
            self._note_changes()
        if by_module or not self._took_gradients:  # all of it may be in a checkpoint
            self._watch()
        self._begin_uses()
        # Autograd goes on in streams that need not wait for the one of this node.
        self._parts.scheduler.await_fixed()

    def _has_gradients(self) -> bool:
        """See `Gradients.are_left`."""
        gradients = self._gradients
        return gradients is not None and gradients.are_left(self._parts.streamed)

    def _watch(self) -> None:
        """Expect gradients of all that requires them; refuse quantized weights."""
        self._wires.check_frozen()
        if self._gradients is not None:
            self._gradients.watch(self._parts.streamed)

    def _lend(self, blocks: Sequence[Block]) -> None:
        """Bring blocks, at the same time, for code that is no site of them."""
        if self._took_gradients and self._gradients is not None:
            self._gradients.watch([block for block in blocks if block.hosted])
        self._parts.scheduler.before_all(blocks)

    def go_on_here(self, move: Callable[[], bool]) -> None:
        """See `PassListener.go_on_here`."""
        self._tenancy.go_on_here(move)

    def end_backward(self, *, failed: bool) -> None:
        """See `PassListener.end_backward`."""
        self._saved.backward = None
        if not self.is_open:
            return
        try:
            self._end_backward(failed=failed)
        except BaseException as error:
            # For one, a thread or a listener has raised, or a weight was cast. After an
            # interrupt, whoever enters the model next ends the backward.
            if isinstance(error, Exception):
                failed = True
                self._end_backward(failed=True)
            raise
        finally:
            self._tenancy.end(failed=failed)

    def end_inner_backward(self, *, failed: bool, last: bool) -> None:
        """See `PassListener.end_inner_backward`."""
        if self.is_open:
            if last:  # whatever has raised in it, and was caught there
                self._casts.release_fetched()
                self._kept.give_up()
            self._end_gradients(failed=failed)

    def _end_gradients(self, *, failed: bool) -> None:
        if self._gradients is None:
            return
        if failed:
            self._gradients.give_up()
        else:
            self._gradients.settle()

    def _end_backward(self, *, failed: bool) -> None:
        scheduler, gradients = self._parts.scheduler, self._gradients
        scheduler.release_fetched()
        self._casts.release_fetched()
        self._kept.give_up()
        if failed:
            self._measure.stopwatch.forget()
            scheduler.recover()
        elif gradients is not None:
            gradients.pass_on()
        scheduler.end_pass()
        self._end_gradients(failed=failed)
        self._await_reads()

    def _await_reads(self) -> None:
        """Wait until no copy reads weights on the host, if some train: users step them,
        or swap averages in, when the pass is over."""
        if self._gradients is not None and self._gradients.are_expected:
            self._parts.loader.await_reads()

    def _fetch(self, block: Block) -> None:
        """Bring a block to the device for autograd."""
        if self._closed or self._model_ref() is None:
            gone(block)
        if self._edges.thread is not HERE.thread:
            self._edges.enter_backward()
        scheduler, gradients = self._parts.scheduler, self._gradients
        left = scheduler.fetched
        if not (left is block or block.stays) or not scheduler.is_at_hand(block):
            if left is not None and left.trains and gradients is not None:
                scheduler.release_fetched()
                if gradients.has_listeners:
                    scheduler.send_home(left)
                gradients.pass_on()
            scheduler.fetch(block)
        if block.casts:
            self._casts.fetch(block)

    def _track(self, block: Block, reader: Reader) -> object:
        """Begin a site's call, with gradients or under autocast.

        Returns:
            See `SavedTensors.push_hooks`.
        """
        if block.casts or torch.is_autocast_enabled(self._edges.device_type):
            self._casts.begin(block, reader)
        if not torch.is_grad_enabled():
            return None
        if reader.looked != block.abandoned and self._is_last(block):
            self._kept.begin(reader)
        follows = self._gradients is not None and block.trains
        if follows and self._makes_graph(hooked=block.hooked):
            reader.begin(block)
        if block.unseen:
            self._saved.site = block
            self._saved.latest = -1
            reader.began = sequence_number()
        return self._saved.push_hooks()

    def _untrack(self, block: Block, reader: Reader, output: Any) -> None:
        """End what `_track` began."""
        self._saved.site = None
        if block.unseen and torch.is_grad_enabled():
            self._saved.follow(block, output, reader.began)
        if reader.first >= 0 and self._is_last(block):
            self._kept.end(block, reader, output)
        if block.casts or torch.is_autocast_enabled(self._edges.device_type):
            self._casts.end(block, reader, output, last=self._is_last(block))
        if reader.since is not None and self._gradients is not None:
            self._gradients.end_use(reader, output)

    def _is_last(self, block: Block) -> bool:
        """Whether no other site reads a block while this one does."""
        return block.uses - (self._parts.scheduler.fetched is block) <= 1

    def _follow(self, table: torch.Tensor, node: Node, joins: bool) -> None:
        """See `Gradients.follow`; `joins` if sites may read it in the same binding."""
        hooked = has_more_hooks(table)
        if self._gradients is None or not (joins or hooked):
            return
        if self._makes_graph(hooked=hooked):
            self._gradients.follow(table, node)

    def _follow_cast(self, weight: torch.Tensor, node: Node) -> None:
        """See `Gradients.follow_cast`."""
        if self._gradients is not None:
            follows = self._makes_graph(hooked=has_more_hooks(weight))
            self._gradients.follow_cast(weight, node, notes=follows)

    def _makes_graph(self, *, hooked: bool) -> bool:
        """Whether terms of a weight that is read now are to be noted.

        In backward a recompute has a graph of its own. If autograd goes back through
        that as well, as for a reentrant checkpoint, hooks of users see its sum once.
        """
        return self._saved.backward is None or (hooked and in_function())

    def _takes_gradients(self) -> bool:
        return torch.is_grad_enabled() and not self._settings.inference_mode

    def _tell(self, phase: Phase) -> None:
        """Move the clock on, unless the user tells it the phases of the step."""
        if self._measure.in_step and not self._manual:
            self._measure.clock.enter(phase)

    def _begin_uses(self) -> None:
        """Make all ready for the uses of a pass: room, pinned memory, files, plan."""
        parts, measure = self._parts, self._measure
        goes_back = self._saved.backward is not None
        if self._took_gradients and self._wires.must_leave() is not None:
            self._clear_device()
        self._make_room()
        if not self._ready:
            if not parts.scheduler.in_use:  # so that only what has room is placed
                parts.steering.steer()
            self._prepare()
        if parts.loader.pin_on is not None:
            self._pin_on()
        self._compact_files.check()
        if self._files is not None:
            self._files.check()
            self._account(trains=goes_back and self._took_gradients)
        if measure.stopwatch.is_over():
            parts.steering.note(*measure.collect())
            parts.steering.learns = parts.loader.pin_on is None
        parts.scheduler.begin_pass(goes_back=goes_back, hands_over=self._hands_over)
        if not parts.scheduler.in_use and parts.steering.steer():
            if parts.weights.overdraft_bytes:
                parts.device_arena.trim()  # what was kept for reuse under the old limit
            self._place_rest()
            self._keep_from_disk()
            measure.know(parts.scheduler.blocks)
        came_back = parts.scheduler.recall()
        if parts.place_odd() or came_back:
            parts.take_gradients_along()
        watch = measure.timed or parts.steering.wants_times(measure.stopwatch.uses)
        parts.scheduler.stopwatch = measure.stopwatch if watch else None
        parts.engine.stopwatch = parts.scheduler.stopwatch

    def _pass_context(self, module: nn.Module, kwargs: Mapping[str, Any]) -> ExitStack:
        """Return the modes and hooks that are active in a forward pass, entered."""
        with ExitStack() as stack:  # an interrupt leaves none of them entered
            if self._settings.inference_mode:
                stack.enter_context(torch.no_grad())
            if function_modes() and self._strays.may_fuse():
                stack.enter_context(unwatched())  # by models around this one
            stack.callback(take_off, self._rows.mode)
            watch = self._strays.begin(module, kwargs)
            again = self._strays.begin_again
            self._saved.watch = None if watch is None else weakref.WeakMethod(again)
            for _ in range(2):  # again what an interrupt has left
                stack.callback(self._saved.leave_hooks)
            if torch.is_grad_enabled() and not self._hooks.is_extra(module):
                self._saved.begin_pass()
            if watch is not None:
                stack.enter_context(watch)
            return stack.pop_all()

    def end_pass(self) -> None:
        """See `PassListener.end_pass`."""
        failed = self._has_failed()
        self._failed = self._failed or failed
        self._parts.scheduler.release_fetched()  # by a backward inside of a forward
        try:
            self._parts.scheduler.end_pass()
            if self._gradients is not None:
                self._gradients.end_pass()
        except BaseException:
            self._parts.scheduler.recover()
            raise
        finally:
            self._tenancy.end(failed=self._has_failed())
            self._handled = None
        self._measure.end_pass()
        self._strays.end(failed=failed)
        if not self._took_gradients:
            self._await_reads()

    def _has_failed(self) -> bool:
        """Whether something was raised since the pass began, and is on its way."""
        return sys.exc_info()[1] not in (None, self._handled)

    def abort_pass(self) -> None:
        """See `PassListener.abort_pass`."""
        self._handled = None
        self._failed = True
        self._saved.site = None
        self._measure.stopwatch.forget()
        self._parts.scheduler.recover()
        self._strays.end(failed=True)

    def put_back(self, pushed: object) -> None:
        """See `PassListener.put_back`."""
        self._saved.put_back(pushed)

    def in_use(self) -> bool:
        """See `PassListener.in_use`."""
        return bool(self._parts.scheduler.in_use)

    def _prepare(self) -> None:
        """Pin what is streamed, as far as the pool allows, and place what stays."""
        parts = self._parts
        empty = next((b for b in parts.blocks if b.store is None), None)
        if empty is not None:
            raise ConfigError(
                f"block {empty.name!r} has no values: it is on the meta device; call"
                " convert_registry_to_file_backed_sharded() before the first pass, or"
                " open the model with stagehand.load()"
            )
        if not self._device.is_host:
            self._take_in()
            parts.loader.set_slabs(0, 0)  # of a pass that failed in what follows
            self._wires.prepare(trains=self._took_gradients)
            staged = parts.masters.pin_all(parts.streamed, self._settings.lookahead)
            parts.loader.set_slabs(*staged)
            if parts.masters.pinning_bytes:
                parts.loader.pin_on = parts.masters.pin_on
            self._wires.open()
            self._keep_from_disk()
        self._ready = True
        self._place_rest()

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
        self._take_in()
        parts.loader.set_slabs(*parts.masters.pin_late())
        parts.loader.pin_on = None  # not if something failed: then again

    def _account(self, *, trains: bool) -> None:
        """Count weights in host memory that are not those of their files any more."""
        if self._files is None or self._parts.scheduler.in_use:
            return
        if self._host_memory.account(
            self._files.overlay_bytes,
            trains=trains,
            gradient_bytes=self._missing_for_gradients(),
        ):
            self._make_room()
            self._keep_from_disk()

    def _keep_from_disk(self) -> None:
        self._host_memory.keep(self._missing_for_gradients())

    def _missing_for_gradients(self) -> int:
        return 0 if self._gradients is None else self._gradients.missing_bytes

    def _place_between_passes(self) -> None:
        """Call `_place_rest` between passes, where users may edit the weights next."""
        self._place_rest()
        self._parts.scheduler.rest()

    def _place_rest(self) -> None:
        """Bring what stays to the device, as far as it has values.

        Before the first pass that is the small rest only, which is never pinned. What
        trains comes with its first use, as in each step.
        """
        parts = self._parts
        staying = parts.scheduler.staying() if self._ready else parts.blocks[:1]
        parts.scheduler.place(
            block
            for block in staying
            if block.store is not None
            and block.tensors
            and (block.index in parts.scheduler.fixed or not block.trains)
        )
        parts.place_odd()
        parts.take_gradients_along()

    def _take_in(self) -> None:
        """Take in what was assigned to the `.data` of tensors, wherever they are."""
        for block in self._parts.blocks:
            self._parts.scheduler.take_in(block)

    def _make_room(self) -> None:
        """Set the limit for weights: the least of what watermarks, other models on the
        device and changed weights in host memory leave of the budget."""
        marks, parts = self._settings.watermarks, self._parts
        allocated = self._device.allocated_bytes()
        if marks is not None and allocated is not None:
            held = parts.weights.held_bytes
            target = marks.target(self._marked_bytes, held, allocated)
            self._marked_bytes = max(
                min(target, parts.budget_bytes),
                parts.steering.smallest_budget() + parts.apart_bytes,
            )
        target = self._least_limit()
        if target != parts.weights.limit_bytes:
            self._limit_to(target)

    def _widen(self, nbytes: int) -> None:
        """Let weights have so much in this pass: watermarks leave what cannot be done
        without, within the budget."""
        if self._marked_bytes < nbytes <= self._parts.budget_bytes:
            self._marked_bytes = nbytes
            self._parts.weights.set_limit(self._least_limit())

    def _least_limit(self) -> int:
        return min(
            self._tenancy.limit_bytes,
            self._marked_bytes,
            self._host_memory.slots_bytes,
        )


def gone(block: Block) -> NoReturn:
    """Refuse what a graph asks for that has outlived its model.

    Raises:
        ClosedError: Always.
    """
    raise ClosedError(
        f"a graph needs weights of block {block.name!r}, but the runtime that knows"
        " where they are was shut down, or its model is gone; run the forward again"
    )
