"""The runtime of one model: wires the parts, and is what users hold."""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.additions import Additions
from stagehand.assembly import Settings, assemble, twice
from stagehand.attribute import HANDLE
from stagehand.conducted import Conduct
from stagehand.core.clock import Phase
from stagehand.core.limits import Bounds
from stagehand.core.telemetry import Telemetry
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    OrphanedParameterError,
)
from stagehand.files import WeightFiles
from stagehand.guards import Guards
from stagehand.host_memory import HostMemory
from stagehand.measure import Measure
from stagehand.moves import Moves
from stagehand.passing import Passing
from stagehand.report import Report, advise
from stagehand.residency.blocks import Block, tensor_bytes
from stagehand.settings import check_value
from stagehand.sharing import Sharing
from stagehand.storing import Storing
from stagehand.torch_private import take_off_dead
from stagehand.units import parse_bytes
from stagehand.weak_refs import ModelRef, weakly
from stagehand.wires import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stagehand.assembly import Parts
    from stagehand.core.arena import Arena
    from stagehand.graph import SavedTensors
    from stagehand.residency.finding import Finding

__all__ = ["Runtime"]


class Runtime(Sharing, Storing, Conduct):
    """Streams one model's weights until `shutdown()`.

    Make one with `stagehand.layer()` or `StagehandRuntime`. While it is active the
    model keeps one attribute more, `model._stagehand_layer_runtime`, and its `to()` and
    the like are answered by the runtime.

    Args:
        model: Is changed in place.
        finding: How it is divided.
        settings: Budgets and the like.
    """

    def __init__(self, model: nn.Module, finding: Finding, settings: Settings) -> None:
        self._model = ModelRef(model)
        self._settings = settings
        self._device = settings.device
        telemetry = Telemetry(
            path=settings.telemetry_file,
            interval_steps=settings.log_interval,
            checks_nonfinite=settings.checks.nan_inf_check,
            checks_promotions=settings.checks.counts_promotions,
            times_uses=settings.timed or settings.traced,
        )
        self._measure = Measure(
            settings.device, telemetry, timed=settings.timed, traced=settings.traced
        )
        self._weight_bytes = sum(
            tensor_bytes(t) for t in (*model.parameters(), *model.buffers())
        )
        self._gathered_bytes = sum(
            {id(g): g.nbytes for _, g in finding.gathered}.values()
        )
        guards = Guards(settings.checks, telemetry.counters)
        guards.check_parameters(
            (*finding.streamed, *(group for _, group in finding.gathered))
        )
        self._link_need = None
        self._parts, sites = assemble(finding, settings, telemetry.counters)
        parts = self._parts
        self._bounds = Bounds(parts.scheduler.obey)
        self._files = WeightFiles()
        self._startup_seconds = 0.0
        self._last_report: Report | None = None
        self._at_shutdown: list[Callable[[nn.Module], None]] = []
        self._home = next(
            (t.device for t in model.parameters() if not t.is_meta), torch.device("cpu")
        )
        self._wires = Wires(parts, settings)
        self._host_memory = HostMemory(parts, settings.pinned_bytes)
        additions = Additions(model, parts, self._wires, self._home)
        self._additions = weakref.ref(additions)  # see `Moves`
        self._passing = Passing(
            self._model,
            sites,
            [table for table, _ in finding.gathered],
            parts,
            settings,
            additions=self._additions,
            wires=self._wires,
            files=self._files,
            host_memory=self._host_memory,
            measure=self._measure,
            guards=guards,
        )
        self._edges = self._passing.edges
        self._uses = self._passing.uses
        self._placing = self._passing.placing
        self._tenancy = self._passing.tenancy
        # Not of this object, which may go sooner: who has the model need not have it.
        ends = weakly(self._passing.let_go)
        self._finalizer = _when_gone(
            model, _end, self._uses.saved, parts, telemetry, ends
        )
        self._begin(model, partial(self._hook, model, finding, sites, additions))

    def _begin(self, model: nn.Module, hook: Callable[[], None]) -> None:
        """Stream the model, which is unchanged before this, or undo what was done."""
        parts = self._parts
        try:
            # Until it is whole, or undone, no other model may have it make room.
            self._edges.lock.acquire()
            for block in parts.blocks:
                parts.masters.adopt(block)
            self._tenancy.join()
            hook()
            parts.steering.steer()
            self._measure.know(parts.scheduler.blocks)
            self._placing.place_rest()
            self._startup_seconds = time.perf_counter() - self._settings.began
            self._edges.lock.release()
        except BaseException:
            self._undo(model)
            raise

    def _hook(
        self,
        model: nn.Module,
        finding: Finding,
        sites: Sequence[tuple[nn.Module, Block]],
        additions: Additions,
    ) -> None:
        self._passing.install(finding, sites)
        # The handle comes first, so that a copy of the model begins with it.
        own = {k: v for k, v in model.__dict__.items() if k != HANDLE}
        all_of_it = {HANDLE: self, **own, "_apply": Moves(self._placing, additions)}
        try:
            model.__dict__.clear()
            model.__dict__.update(all_of_it)
        except BaseException:  # an interrupt; without them it would be no module
            model.__dict__.update(all_of_it)
            raise

    def _undo(self, model: nn.Module) -> None:
        """Give the plain model back after streaming it has failed half way."""
        parts = self._parts
        parts.keep_pool = self._settings.pool is not None
        with ExitStack() as rest:  # in reverse; all of it, whatever fails
            rest.callback(self._measure.telemetry.close)
            rest.callback(parts.close)
            twice(rest, self._give_back, model)
            self.park()

    @property
    def model(self) -> nn.Module:
        """The streamed model.

        Raises:
            ClosedError: If it was given back, or is gone.
        """
        return self._model.check()

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return self._device.torch_device

    def __repr__(self) -> str:
        if self._model.closed:
            return "Runtime(shut down)"
        weights, parts = self._parts.weights, self._parts
        return (
            f"Runtime({len(parts.blocks)} blocks, {weights.held_bytes} of"
            f" {weights.limit_bytes} bytes on {self._device.torch_device},"
            f" {self._tenancy.why})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Give a copy of the model no runtime, and bring what it copies to the host."""
        self._placing.begin_copy()

    def __reduce__(self) -> Any:
        """Give a pickle of the model no runtime, either."""
        self._placing.bring_home()
        return type(None), ()

    # Steps

    def begin_step(self, step: int | None = None) -> None:
        """Begin a step by hand; from then on the runtime does not begin any by itself.

        Args:
            step: Its number; the next one by default.

        Raises:
            ClosedError: After `shutdown()`, as all methods of a runtime do.
        """
        self._model.check()
        with self._turn():
            self._passing.steps_by_hand = True
            self._passing.begin_step(step)

    def end_step(self) -> None:
        """End the open step and record it. Without one, nothing happens."""
        self._model.check()
        with self._turn():
            self._passing.end_step()

    @contextmanager
    def managed_forward(self) -> Iterator[None]:
        """Mark a forward phase; begins a step if none is open."""
        self._enter_phase(Phase.FORWARD)
        yield

    @contextmanager
    def managed_backward(self) -> Iterator[None]:
        """Mark a backward phase; begins a step if none is open."""
        self._enter_phase(Phase.BACKWARD)
        yield

    def _enter_phase(self, phase: Phase) -> None:
        self._model.check()
        if not self._measure.in_step:
            self.begin_step()
        self._passing.steps_by_hand = True
        self._measure.clock.enter(phase)

    # Blocks

    def before_block(self, block_id: str) -> None:
        """Make a block usable for code that does not call its module, until
        `after_block`.

        Args:
            block_id: The block's name, as in `block_ids`.

        Raises:
            ConfigError: If there is no such block.
            StagehandOOMError: If blocks in use leave no room for it.
            CheckpointError: If its file cannot be read.
        """
        block, scheduler = self._block(block_id), self._parts.scheduler
        self._edges.take_lock()
        begun = block.by_hand
        try:
            if not self._placing.ready:
                self._placing.prepare()
            scheduler.before_by_hand(block)
            self._uses.casts.fill(block)
        except BaseException:
            if block.by_hand > begun:
                scheduler.after_by_hand(block)
            self._edges.lock.release()
            raise

    def after_block(self, block_id: str) -> None:
        """End what `before_block` began, in the same thread.

        Outside of passes its weights are on the host again, as after a pass.

        Args:
            block_id: The block's name, as in `block_ids`.

        Raises:
            ConfigError: If there is no such block, or it is not in use.
        """
        block = self._block(block_id)
        if not block.by_hand:
            raise ConfigError(
                f"block {block_id!r} is not in use: call before_block() first, once"
                " for each after_block()"
            )
        begun = block.by_hand
        try:
            self._parts.scheduler.after_by_hand(block)
            if not self._edges.is_busy:
                self._parts.scheduler.rest()
        finally:
            if block.by_hand < begun:  # or an interrupt lets it go on
                self._edges.lock.release()

    @property
    def block_ids(self) -> tuple[str, ...]:
        """The names of all streamed blocks, in the order of the model's definition."""
        return tuple(block.name for block in self._parts.streamed)

    @property
    def streamed_tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameters and buffers of all blocks and of tables on the host."""
        return tuple(t for block in self._parts.away for t in block.tensors)

    def _block(self, block_id: str) -> Block:
        self._model.check()
        check_value("block_id", block_id, str)
        for block in self._parts.streamed:
            if block.name == block_id:
                return block
        raise ConfigError(
            f"there is no block {block_id!r}; the first of {len(self.block_ids)} are"
            f" {', '.join(map(repr, self.block_ids[:3]))}"
        )

    # Gradients

    def when_home(
        self, listener: Callable[[Sequence[nn.Parameter]], None]
    ) -> Callable[[], None]:
        """Call `listener(parameters)` in backward as their gradients come home.

        It is called in one worker thread, with streamed parameters that are on the host
        and whose gradients are complete beside them. Where the model computes on the
        host, gradients are there at once and it is never called.

        Args:
            listener: May change the parameters and their gradients. It must not run a
                streamed model: that may wait for the backward, which waits for it.

        Returns:
            A function that ends the subscription.

        Raises:
            ConfigError: If `listener` cannot be called.
            ClosedError: After `shutdown()`.
        """
        self._model.check()
        if not callable(listener):
            raise ConfigError(
                f"listener is {listener!r}: expected a function that takes parameters"
            )
        if self._uses.gradients is None:
            return lambda: None
        return self._uses.gradients.when_home(listener)

    # Memory

    def set_budget(self, vram_budget: int | str) -> None:
        """Change the device bytes for weights.

        What is there beyond them leaves at once, and so does what other models have
        beyond the largest budget; in the middle of a pass, when the next one begins. Of
        block mode on an accelerator, the high watermark stays the most.

        Args:
            vram_budget: As in `stagehand.layer`. A share, such as "80%", is one of what
                is free and of what streamed weights hold now.

        Raises:
            ConfigError: If it is no size.
            StagehandOOMError: If it cannot work; it names the smallest that can.
        """
        self._model.check()
        held = self._tenancy.shared.ledger.device.held_bytes
        free = self._device.free_bytes() + held
        nbytes = parse_bytes(vram_budget, name="vram_budget", of=free)
        with self._turn():
            self._placing.limit_to(nbytes)
            self._parts.budget_bytes = self._placing.marked_bytes = nbytes
            self._tenancy.renew()
            if not self._edges.is_busy:
                self._tenancy.give_up(nbytes)
                self._tenancy.keep_to_cap()

    def park(self) -> None:
        """Bring every tensor home to the host and free all device memory.

        The next pass brings them back.

        Raises:
            ConfigError: If the model runs, or a block is in use.
        """
        self._placing.park()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the model's lock; this thread may be in a pass of it."""
        self._edges.await_failure()
        with self._edges.lock:
            yield

    def place(self) -> None:
        """Bring what always stays to the device, as the next pass would.

        In the middle of a pass nothing happens: it is there.

        Raises:
            StagehandOOMError: If there is no room for what has joined the model.
        """
        self._placing.place()

    # Telling

    @property
    def telemetry(self) -> Telemetry:
        """The records of the latest steps and their statistics."""
        return self._measure.telemetry

    def report(self) -> Report:
        """Return budget, plan, bytes moved, what limits, and what would help."""
        if self._model.closed and self._last_report is not None:
            return self._last_report
        parts, measure, plan = self._parts, self._measure, self._parts.steering.plan
        additions = self._additions()
        totals = measure.telemetry.totals()
        startup, first = self._startup_seconds, measure.first_seconds
        limit, marks = plan.limit, self._settings.watermarks
        if limit in ("link", "budget"):  # loads may have waited for files
            read = any(record.disk_bytes for record in measure.telemetry.records[-1:])
            limit = "disk" if read else limit
        return Report(
            budget_bytes=parts.weights.limit_bytes,
            given_bytes=parts.budget_bytes,
            shared_bytes=self._tenancy.shared.ledger.device.limit_bytes,
            holdings=self._tenancy.holdings(),
            peak_device_bytes=parts.weights.peak_bytes,
            weight_bytes=self._weight_bytes + (additions.nbytes if additions else 0),
            resident_bytes=sum(b.nbytes for b in parts.scheduler.staying()),
            gathered_bytes=self._gathered_bytes,
            pinned_bytes=parts.pinned_arena.leased_bytes - parts.masters.reserved_bytes,
            pinning_bytes=parts.masters.pinning_bytes,
            startup_seconds=startup,
            first_output_seconds=None if first is None else startup + first,
            blocks=len(parts.scheduler.blocks),
            slots=len(plan.slots),
            lookahead=plan.lookahead,
            streamed_bytes=int(totals["h2d_bytes"] or 0),
            saved_bytes=int(totals["d2h_bytes"] or 0),
            disk_bytes=int(totals["disk_bytes"] or 0),
            passes=measure.passes,
            seconds_per_pass=measure.seconds_per_pass,
            stall_ms=measure.telemetry.mean_stall_ms() if measure.timed else None,
            hit_rate=measure.telemetry.hit_rate(),
            link_bytes_per_second=parts.steering.link_bytes_per_second,
            abandoned_slots=int(totals["abandoned_slots"] or 0),
            compact_blocks=sum(b.wire is not None for b in parts.blocks),
            compact_bytes=sum(b.nbytes for b in parts.blocks if b.wire),
            compact_link_bytes=sum(b.link_nbytes for b in parts.blocks if b.wire),
            decoder_bytes=parts.wire_bytes,
            limit=limit,
            advice=advise(
                limit,
                budget="vram_high_watermark_mb" if marks else "vram_budget",
                trains=any(b.trains for b in parts.streamed),
                lacking_bytes=parts.budget_bytes - parts.weights.limit_bytes,
                taker=self._placing.taker,
            ),
        )

    def export_trace(self, path: str | Path) -> None:
        """Write copies, compute and stalls as a Chrome/Perfetto trace.

        Args:
            path: The file of JSON, which is replaced.

        Raises:
            OSError: If it cannot be written.
            ConfigError: If the runtime was not made with `trace=True`.
        """
        with self._turn():  # a pass of another thread is measured whole
            if not self._model.closed:
                self._parts.steering.note(*self._measure.collect())
            written = self._measure.write_trace(path)
        if not written:
            raise ConfigError(
                "there is no trace: pass trace=True when making the runtime"
            )

    # The end

    def shutdown(self) -> None:
        """Give back the plain model: no hooks, all tensors where they came from.

        Idempotent, and nothing is left to do where the model is gone. What is on the
        device is given back even where its file was removed or cut short.

        Raises:
            ConfigError: At once, if the model runs or a block is in use.
            CheckpointError: At the end, once, if a file changed in place: it names the
                tensors that are still views of it.
            OrphanedParameterError: At the end, if tensors were cast while they were
                streamed, say: they have their old values.
        """
        self._end(keep_pool=False)

    def shutdown_keep_pool(self) -> Arena:
        """Like `shutdown`, but keep the pinned memory for `layer(..., pool=)`.

        Returns:
            The pool. `close()` frees its memory if no other model takes it.
        """
        self._end(keep_pool=True)
        return self._parts.pinned_arena

    def at_shutdown(self, call: Callable[[nn.Module], None]) -> None:
        """Call something with the plain model at the end of the shutdown.

        Args:
            call: Called once, with the model. Several are called in the order in which
                they were given.

        Raises:
            ConfigError: If it cannot be called.
        """
        self._model.check()
        if not callable(call):
            raise ConfigError(
                f"call is {call!r}: expected a function that takes the model"
            )
        self._at_shutdown.append(call)

    def _end(self, *, keep_pool: bool) -> None:
        if self._model.closed:
            return
        model, parts = self._model(), self._parts
        if model is None:  # its finalizer has closed the parts
            self._model.closed = True
            with ExitStack() as rest:
                self._close_files(rest)
            return
        refused = None
        with self._placing.at_rest():
            try:
                self._placing.take_in()
            except OrphanedParameterError as error:
                refused = error
            for block, image in parts.scheduler.bring_home():
                parts.masters.rescue(block, image)
            self.park()
            lost = self._lost_tensors() or refused
            rest = ExitStack()  # in reverse; all of it, whatever fails
            for call in reversed(self._at_shutdown):
                rest.callback(call, model)
            self._close_files(rest)
            rest.callback(self._tenancy.keep_to_cap)  # it may have had the largest one
            rest.callback(parts.close)
            if (additions := self._additions()) is not None:
                rest.callback(additions.take_home_unseen, self._home)
            twice(rest, self._give_back, model)
            rest.callback(self._sum_up)
            if self._uses.gradients is not None:
                twice(rest, self._uses.gradients.close)
            rest.callback(self._host_memory.close)
            with rest:
                parts.keep_pool = keep_pool
        if lost is not None:
            raise lost

    def _sum_up(self) -> None:
        self._passing.end_step()
        self._last_report = self.report()

    def _close_files(self, rest: ExitStack) -> None:
        rest.callback(self._measure.telemetry.close)
        rest.callback(self._files.close)

    def _give_back(self, model: nn.Module) -> None:
        parts, self._model.closed = self._parts, True
        self._passing.hooks.remove()
        for name in (HANDLE, "_apply"):
            model.__dict__.pop(name, None)
        for block in parts.blocks:
            parts.masters.give_back(block)
        parts.give_back_odd()
        self._finalizer.detach()
        # Who keeps the runtime keeps the model's tensors no longer than the model.
        self._finalizer = _when_gone(model, weakly(self._passing.let_go))

    def _lost_tensors(self) -> CheckpointError | None:
        """Return an error that names the tensors that are views of changed files."""
        found = [(block, _complaint(block)) for block in self._parts.blocks]
        lost = [(block, error) for block, error in found if error is not None]
        if not lost:
            return None
        names = [entry.name for block, _ in lost for entry in block.layout.entries]
        return CheckpointError(
            f"the model was shut down, but {len(names)} of its tensors,"
            f" {', '.join(map(repr, names[:3]))} first, are views of a file that is not"
            " what it was, and to read what it has lost ends the process: put it back,"
            f" or do not use them ({lost[0][1]})"
        )


def _when_gone(
    model: nn.Module, call: Callable[..., None], *args: object
) -> weakref.finalize[..., nn.Module]:
    finalizer = weakref.finalize(model, call, *args)
    # Not at exit: other exit functions may use the model; the system frees memory.
    finalizer.atexit = False
    return finalizer


def _end(
    saved: SavedTensors, parts: Parts, telemetry: Telemetry, ends: Callable[[], None]
) -> None:
    """Free what a collected model had, even if somebody keeps its runtime."""
    saved.leave_hooks()
    take_off_dead()
    telemetry.close()
    parts.close()
    ends()


def _complaint(block: Block) -> CheckpointError | None:
    """Return why a block's host tensors are not what they were, if they are not."""
    try:
        if block.store is not None:
            block.store.check_hosts()
    except CheckpointError as error:
        return error
    return None
