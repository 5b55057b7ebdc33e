"""What a runtime does where passes begin and end."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.core.clock import Phase
from stagehand.core.steps import Steps
from stagehand.data_parallel import Averaging
from stagehand.errors import ConfigError
from stagehand.placing import Placing
from stagehand.residency.blocks import readers_of
from stagehand.tenancy import Tenancy
from stagehand.torch_private import (
    func_transform,
    function_modes,
    graph_task,
    is_fx_tracing,
    take_off,
    unwatched,
)
from stagehand.uses import Uses
from stagehand.weak_refs import weakly
from stagehand.weights.edges import Edges, PassListener
from stagehand.weights.experts import Experts
from stagehand.weights.rows import RowGather
from stagehand.weights.sites import SiteHooks
from stagehand.weights.strays import Strays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stagehand.additions import Additions
    from stagehand.assembly import Parts, Settings
    from stagehand.files import WeightFiles
    from stagehand.guards import Guards
    from stagehand.host_memory import HostMemory
    from stagehand.measure import Measure
    from stagehand.residency.blocks import Block
    from stagehand.residency.finding import Finding
    from stagehand.weak_refs import ModelRef
    from stagehand.wires import Wires

__all__ = ["Passing"]

_requires_grad = attrgetter("requires_grad")


class Passing(PassListener):
    """Forward and backward passes of one model, from edge to edge.

    Args:
        model: The streamed model.
        sites: The modules that read streamed blocks.
        tables: The modules that look rows up on the host.
        parts: Of the runtime.
        settings: Of the runtime.
        additions: Knows what joins the model.
        wires: What blocks cross the link in.
        files: Where weights come from.
        host_memory: What these leave in host memory.
        measure: Told of passes and phases.
        guards: Look at what modules are given and return.

    Attributes:
        edges: Where the model is entered and left.
        uses: What happens at sites, and in autograd.
        hooks: On the model.
        tenancy: The place on the device.
        placing: What is on the device around uses.
        steps_by_hand: Whether the user says where steps begin.
    """

    def __init__(
        self,
        model: ModelRef,
        sites: Sequence[tuple[nn.Module, Block]],
        tables: Sequence[nn.Module],
        parts: Parts,
        settings: Settings,
        *,
        additions: weakref.ref[Additions],
        wires: Wires,
        files: WeightFiles,
        host_memory: HostMemory,
        measure: Measure,
        guards: Guards,
    ) -> None:
        self._model = model
        self._parts = parts
        self._settings = settings
        self._wires = wires
        self._host_memory = host_memory
        self._measure = measure
        self._guards = guards
        whole, scheduler, device = model.check(), parts.scheduler, parts.device
        self.edges = edges = Edges(self, device.torch_device, parts.weights.name)
        self.uses = uses = Uses(model, parts, edges)
        self._saved = uses.saved
        self.hooks = SiteHooks(edges, scheduler, uses)
        self._rows = RowGather(
            whole,
            measure.telemetry.counters,
            uses.owners,
            edges,
            scheduler,
            uses.follow,
        )
        self._strays = Strays(
            whole,
            [site for site, _ in sites],
            uses.owners,
            self._rows,
            edges,
            scheduler,
            spare=self.hooks.spare,
            bring=uses.lend,
            fill=uses.casts.fill,
            note_read=uses.saved.come_into_region,
            keep=parts.keep,
        )
        self._readers = readers_of(sites, tables)
        self.tenancy = Tenancy(parts, edges, model)
        self.placing = Placing(
            model,
            parts,
            settings,
            edges=edges,
            tenancy=self.tenancy,
            uses=uses,
            hooks=self.hooks,
            strays=self._strays,
            readers=self._readers,
            additions=additions,
            wires=wires,
            files=files,
            host_memory=host_memory,
            measure=measure,
        )
        self.steps_by_hand = False
        self._step_waits = False  # was begun for a forward that was refused then
        self._steps = Steps(parts.loader.await_reads, weakly(self._note_inside))
        self._averaging = Averaging()
        self._leaves = 0  # how often what stays may have left the device
        self._handled: BaseException | None = None
        """The exception that was being handled as the pass began."""
        self._failed = False  # a forward, since hooks were looked for that are gone
        scheduler.widen_by(weakly(self.placing.widen))
        if not device.is_host:  # there it is read where it is
            scheduler.tell_of_leave(weakly(self._note_leave))

    def install(
        self, finding: Finding, sites: Sequence[tuple[nn.Module, Block]]
    ) -> None:
        """Hook the model, so that its passes are heard of."""
        model, tables = self._model.check(), [table for table, _ in finding.gathered]
        self.hooks.add_model(model, {site for site, _ in sites}, tables, self.placing)
        experts = Experts(
            self._parts.scheduler, self.edges.device, self._settings.experts
        )
        count = Counter(block for _, block in sites)
        for (site, block), reader in zip(sites, self._readers, strict=True):
            pick = experts.begin_of(site, block) if count[block] == 1 else None
            self.hooks.add_site(site, block, reader, pick)
            block.unseen = block.unseen or _is_read_unseen(site)
            self._add_look(site, block.name)
        for table, group in finding.gathered:
            self.hooks.add_gather(table, self._rows.mode)
            self._add_look(table, group.name)

    def _add_look(self, module: nn.Module, block: str) -> None:
        look = self._guards.look(block)
        if look is not None:
            self.hooks.add_look(module, look)

    def let_go(self) -> None:
        """The model was collected: leave its memory to whoever has tensors there."""
        if self.uses.gradients is not None:
            self.uses.gradients.close()
        self._host_memory.close()
        self._readers.clear()
        self._parts.masters.let_go(self._parts.blocks)
        self._parts.let_go_odd()

    def _note_leave(self) -> None:
        """Let modules that read what stays begin a pass, too, for it is away now."""
        self._leaves += 1
        model = self._model()
        if model is not None:
            self.hooks.add_edges(model, self.placing)

    # Steps

    def begin_step(self, step: int | None = None) -> None:
        """End the open step, and begin one; the next one by default."""
        self.end_step()
        self._measure.begin_step(step)

    def end_step(self) -> None:
        """Record the open step, if there is one."""
        self._step_waits = False
        parts = self._parts
        if self._measure.timed:
            parts.steering.note(*self._measure.collect())
        self._guards.collect()
        self._measure.end_step(
            parts.weights, parts.pinned_arena, parts.masters.pinning_bytes
        )

    def _tell(self, phase: Phase) -> None:
        """Move the clock on, unless the user tells it the phases of the step."""
        if self._measure.in_step and not self.steps_by_hand:
            self._measure.clock.enter(phase)

    # Passes

    def check(self) -> None:
        """See `PassListener.check`."""
        self._model.check()  # a part of it may be left, which goes on with its hooks
        self._parts.device.refuse_capture("a pass of a streamed model")
        recorder = _recorder()
        if recorder is not None:
            raise ConfigError(
                f"{recorder} cannot record a streamed model,"
                f" {self._parts.weights.name}, whose weights come and go: expected the"
                " plain model; call the runtime's shutdown() first"
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
            self.hooks.check()
            self._failed = False

    def begin_pass(
        self, module: nn.Module, kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """See `PassListener.begin_pass`."""
        self._handled = sys.exc_info()[1]
        self.placing.begin_tenancy(may_drop=True)
        self.uses.casts.forget()
        is_step = not self.steps_by_hand and self.hooks.is_model(module)
        if is_step and not self._step_waits:
            self.begin_step()
        self._step_waits = is_step
        self._tell(Phase.FORWARD)
        self._measure.begin_pass()
        takes_gradients = self._takes_gradients()
        self._parts.scheduler.expect_changes(follow=not takes_gradients)
        watches = takes_gradients or (not self.placing.ready and self._has_gradients())
        self.placing.take_additions()
        self._note_changes()
        if self.uses.gradients is not None:
            self.uses.gradients.begin_pass()
        if watches:
            self._watch()
        if takes_gradients and self.uses.gradients is not None:
            self._averaging.check(self.uses.gradients.expected, self._leaves)
        self.uses.took_gradients = takes_gradients
        parts = self._parts
        parts.trains = parts.trains or takes_gradients
        self.placing.begin_uses()
        self.hooks.drop_edges(module)
        context = self._pass_context(module, kwargs)
        self._step_waits = False
        return context

    def _note_changes(self) -> None:
        """Mark blocks as changed that may have been, since the latest pass, unseen.

        Fused optimizers move no version counter. If one has stepped, any block that
        trains may be changed. So it may after a pass without gradients: users swap
        averages of the weights in for such passes, and in bfloat16 these differ in so
        few elements that a sample does not show it. Where the model computes on the
        host, gradients are not followed, and nothing tells which blocks were stepped.
        """
        stepped = self._steps.came()
        if self.uses.gradients is not None:
            self.uses.gradients.note_steps()
        if stepped or self.uses.gradients is None or not self.uses.took_gradients:
            self._note_trained()

    def _note_inside(self, stepped: list[torch.Tensor]) -> None:
        """Mark blocks as changed that an optimizer steps in a backward, in a hook.

        They are bound there, and may leave before the next pass begins.
        """
        if self.uses.gradients is not None:
            self.uses.gradients.check_step(stepped)
        for parameter in stepped:
            block = self.uses.owners.get(id(parameter))
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

    def begin_backward(self, *, by_module: bool) -> None:
        """See `PassListener.begin_backward`."""
        self._saved.backward = graph_task()
        self._tell(Phase.BACKWARD)
        self._parts.scheduler.expect_changes(follow=True)
        self.placing.begin_tenancy(may_drop=by_module)
        if by_module:  # no forward may have looked since users changed the model
            self.placing.take_additions()
            self._note_changes()
        if by_module or not self.uses.took_gradients:
            self._watch()  # all of the forward may have been in a checkpoint
        self.placing.begin_uses()
        # Autograd goes on in streams that need not wait for the one of this node.
        self._parts.scheduler.await_fixed()

    def _has_gradients(self) -> bool:
        """See `Gradients.are_left`."""
        gradients = self.uses.gradients
        return gradients is not None and gradients.are_left(self._parts.streamed)

    def _watch(self) -> None:
        """Expect gradients of all that requires them; refuse quantized weights."""
        self._wires.check_frozen()
        if self.uses.gradients is not None:
            self.uses.gradients.watch(self._parts.streamed)

    def go_on_here(self, move: Callable[[], bool]) -> None:
        """See `PassListener.go_on_here`."""
        self.tenancy.go_on_here(move)

    def end_backward(self, *, failed: bool) -> None:
        """See `PassListener.end_backward`."""
        self._saved.backward = None
        if not self._model.is_open:
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
            self.tenancy.end(failed=failed)

    def end_inner_backward(self, *, failed: bool, last: bool) -> None:
        """See `PassListener.end_inner_backward`."""
        if self._model.is_open:
            if last:  # whatever has raised in it, and was caught there
                self.uses.release()
            self._end_gradients(failed=failed)

    def _end_gradients(self, *, failed: bool) -> None:
        if self.uses.gradients is None:
            return
        if failed:
            self.uses.gradients.give_up()
        else:
            self.uses.gradients.settle()

    def _end_backward(self, *, failed: bool) -> None:
        scheduler, gradients = self._parts.scheduler, self.uses.gradients
        scheduler.release_fetched()
        self.uses.release()
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
        if self.uses.gradients is not None and self.uses.gradients.are_expected:
            self._parts.loader.await_reads()

    def _takes_gradients(self) -> bool:
        return torch.is_grad_enabled() and not self._settings.inference_mode

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
            if torch.is_grad_enabled() and not self.hooks.is_extra(module):
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
            if self.uses.gradients is not None:
                self.uses.gradients.end_pass()
        except BaseException:
            self._parts.scheduler.recover()
            raise
        finally:
            self.tenancy.end(failed=self._has_failed())
            self._handled = None
        self._measure.end_pass()
        self._strays.end(failed=failed)
        if not self.uses.took_gradients:
            self._await_reads()

    def _has_failed(self) -> bool:
        """Whether something was raised since the pass began, and is on its way."""
        return sys.exc_info()[1] not in (None, self._handled)

    def abort_pass(self) -> None:
        """See `PassListener.abort_pass`."""
        self._handled = None
        self._failed = True
        self._saved.site = None
        self._measure.forget_pass()
        self._parts.scheduler.recover()
        self._strays.end(failed=True)

    def put_back(self, pushed: object) -> None:
        """See `PassListener.put_back`."""
        self._saved.put_back(pushed)

    def in_use(self) -> bool:
        """See `PassListener.in_use`."""
        return bool(self._parts.scheduler.in_use)

    def uses_by_hand(self) -> int:
        """See `PassListener.uses_by_hand`."""
        return self._parts.scheduler.uses_by_hand

    def end_by_hand(self) -> None:
        """See `PassListener.end_by_hand`."""
        self._parts.scheduler.end_by_hand()


def _recorder() -> str | None:
    """Return what records here what a model computes, if something does."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    return "torch.fx" if is_fx_tracing() else None


def _is_read_unseen(site: nn.Module) -> bool:
    """Whether backward through a site may read weights without unpacking a handle.

    Parts that are checkpointed by themselves do, and functions that keep the parameter
    itself. PyTorch's own modules without parts do not.
    """
    return not type(site).__module__.startswith("torch.nn.") or any(
        tensor is not None
        for part in site.modules()
        if part is not site
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )
