"""The runtime of one model: wires the parts, and is what users hold."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import nn

from stagehand.additions import Additions
from stagehand.assembly import Settings, assemble
from stagehand.attribute import HANDLE
from stagehand.autocast import Casts
from stagehand.compact import CompactFiles
from stagehand.conducted import Conduct
from stagehand.core.clock import Phase
from stagehand.core.limits import Bounds
from stagehand.core.steps import Steps
from stagehand.core.telemetry import Telemetry
from stagehand.data_parallel import Averaging
from stagehand.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    OrphanedParameterError,
    StagehandOOMError,
)
from stagehand.frames import frame_of_copy
from stagehand.gradients.gradients import Gradients
from stagehand.graph import SavedTensors
from stagehand.guards import Guards
from stagehand.host_memory import HostMemory
from stagehand.kept_views import KeptViews
from stagehand.measure import Measure
from stagehand.moves import Moves
from stagehand.passing import Passing, gone
from stagehand.report import Report, advise
from stagehand.residency.blocks import Block, readers_of, tensor_bytes
from stagehand.settings import check_value
from stagehand.sharing import Sharing
from stagehand.storing import Storing
from stagehand.tenancy import Tenancy
from stagehand.torch_private import take_off_dead, tensor_use_count
from stagehand.units import parse_bytes
from stagehand.weights.edges import Edges
from stagehand.weights.experts import Experts
from stagehand.weights.rows import RowGather
from stagehand.weights.sites import SiteHooks
from stagehand.weights.strays import Strays
from stagehand.wires import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stagehand.assembly import Parts
    from stagehand.core.arena import Arena
    from stagehand.residency.finding import Finding
    from stagehand.stores.files import FileSet

__all__ = ["Runtime"]

_P = ParamSpec("_P")


class Runtime(Passing, Sharing, Storing, Conduct):
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
        self._model_ref = weakref.ref(model)
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
        self._counters = telemetry.counters
        self._weight_bytes = sum(
            tensor_bytes(t) for t in (*model.parameters(), *model.buffers())
        )
        self._gathered_bytes = sum(
            {id(g): g.nbytes for _, g in finding.gathered}.values()
        )
        self._guards = Guards(settings.checks, self._counters)
        self._guards.check_parameters(
            (*finding.streamed, *(group for _, group in finding.gathered))
        )
        self._link_need = None
        self._parts, sites = assemble(finding, settings, self._counters)
        self._bounds = Bounds(self._parts.scheduler.obey)
        self._files: FileSet | None = None
        self._compact_files = CompactFiles()
        self._manual = False
        self._took_gradients = False  # the latest forward
        self._handled = None  # the exception that was being handled as the pass began
        self._failed = False  # a forward, since hooks were looked for that are gone
        self._ready = False  # `_prepare` was done since the device was last cleared
        self._closed = False
        self._hands_over = False  # another model is expected to run next
        self._startup_seconds = 0.0
        self._resumes = False  # what stays was here before all was brought home
        self._last_report: Report | None = None
        self._at_shutdown: list[Callable[[nn.Module], None]] = []
        self._home = next(
            (t.device for t in model.parameters() if not t.is_meta), torch.device("cpu")
        )
        parts = self._parts
        self._steps = Steps(parts.loader.await_reads, _weakly(self._note_inside))
        self._wires = Wires(parts, settings)
        self._host_memory = HostMemory(parts, settings.pinned_bytes)
        self._owners = {
            id(tensor): block for block in parts.away for tensor in block.tensors
        }
        self._edges = Edges(self, settings.device.torch_device, parts.weights.name)
        self._marked_bytes = settings.budget_bytes  # by watermarks
        self._leaves = 0  # how often what stays may have left the device
        self._saved = SavedTensors(
            parts.scheduler,
            self._owners,
            _weakly(self._fetch, gone),
            _weakly(self._turn_back),
            settings.device,
        )
        self._kept = KeptViews(self._saved)
        self._casts = Casts(
            settings.device, parts.scheduler, _weakly(self._follow_cast)
        )
        self._gradients = self._make_gradients()
        self._averaging = Averaging()
        if self._gradients is not None:
            parts.scheduler.await_steps_with(_weakly(self._gradients.await_steps))
        self._hooks = self._make_hooks()
        parts.scheduler.widen_by(_weakly(self._widen))
        if not self._device.is_host:  # there it is read where it is
            parts.scheduler.tell_of_leave(_weakly(self._note_leave))
        self._readers = readers_of(sites, [table for table, _ in finding.gathered])
        self._rows = self._make_rows(model)
        self._strays = self._make_strays(model, [site for site, _ in sites])
        additions = Additions(model, parts, self._wires, self._home)
        self._additions = weakref.ref(additions)  # see `Moves`
        ends = _weakly(self._let_go)
        self._finalizer = weakref.finalize(
            model, _end, self._saved, parts, telemetry, ends
        )
        # Not at exit: other exit functions may use the model; the system frees memory.
        self._finalizer.atexit = False
        self._begin(model, partial(self._hook, model, finding, sites, additions))

    def _begin(self, model: nn.Module, hook: Callable[[], None]) -> None:
        """Stream the model, which is unchanged before this, or undo what was done."""
        parts = self._parts
        try:
            # Until it is whole, or undone, no other model may have it make room.
            self._edges.lock.acquire()
            for block in parts.blocks:
                parts.masters.adopt(block)
            self._tenancy = Tenancy(parts, self._edges, model)
            hook()
            parts.steering.steer()
            self._measure.know(parts.scheduler.blocks)
            self._place_rest()
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
        tables = [table for table, _ in finding.gathered]
        self._hooks.add_model(model, {site for site, _ in sites}, tables)
        experts = Experts(
            self._parts.scheduler, self._device.torch_device, self._settings.experts
        )
        readers = Counter(block for _, block in sites)
        for (site, block), reader in zip(sites, self._readers, strict=True):
            pick = experts.begin_of(site, block) if readers[block] == 1 else None
            self._hooks.add_site(site, block, reader, pick)
            block.unseen = block.unseen or _is_read_unseen(site)
            self._add_look(site, block.name)
        for table, group in finding.gathered:
            self._hooks.add_gather(table, self._rows.mode)
            self._add_look(table, group.name)
        # The handle comes first, so that a copy of the model begins with it.
        own = {k: v for k, v in model.__dict__.items() if k != HANDLE}
        all_of_it = {HANDLE: self, **own, "_apply": Moves(self, additions)}
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
            _twice(rest, self._give_back, model)
            self.park()

    def _make_gradients(self) -> Gradients | None:
        """Return what brings gradients to the host; None if they are made there."""
        parts = self._parts
        if self._device.is_host:
            return None
        return Gradients(
            parts.device,
            parts.engine,
            parts.pinned_arena,
            parts.adders,
            turn=self._edges.lock,
            blocks=lambda: parts.away,
            enter=self._edges.enter_backward,
            fetch=self._fetch,
            begin=parts.scheduler.begin_training,
        )

    def _make_hooks(self) -> SiteHooks:
        scheduler = self._parts.scheduler
        return SiteHooks(
            self._edges,
            before=scheduler.before,
            push_hooks=self._saved.push_hooks,
            track=self._track,
            untrack=self._untrack,
            drop_rows=scheduler.drop_rows,
            recover=scheduler.recover,
            complete_rows=scheduler.complete_rows,
            bring_home=self._bring_home,
            hand_out=self._hand_out,
            resume=self.resume,
            await_copies=self._parts.loader.await_copies,
            look_again=self._look_again,
        )

    def _make_rows(self, model: nn.Module) -> RowGather:
        scheduler = self._parts.scheduler
        return RowGather(
            model,
            self._device.torch_device,
            self._counters,
            self._owners,
            join=scheduler.join,
            bring=scheduler.before,
            leave=scheduler.after,
            take_in=scheduler.take_in,
            is_torn=self._edges.is_torn,
            follow=self._follow,
        )

    def _make_strays(self, model: nn.Module, sites: list[nn.Module]) -> Strays:
        scheduler = self._parts.scheduler
        return Strays(
            model,
            sites,
            self._owners,
            self._rows,
            device=self._device.torch_device,
            spare=self._hooks.spare,
            bring=self._lend,
            is_latest=scheduler.is_latest,
            fill=self._casts.fill,
            note_read=self._saved.come_into_region,
            versions_under=scheduler.versions_under,
            note_edits=scheduler.note_edits,
            let_go=scheduler.after,
            is_torn=self._edges.is_torn,
            keep=self._parts.keep,
        )

    def _note_leave(self) -> None:
        """Let modules that read what stays begin a pass, too, for it is away now."""
        self._leaves += 1
        model = self._model_ref()
        if model is not None:
            self._hooks.add_edges(model)

    def _add_look(self, module: nn.Module, block: str) -> None:
        look = self._guards.look(block)
        if look is not None:
            self._hooks.add_look(module, look)

    @property
    def model(self) -> nn.Module:
        """The streamed model.

        Raises:
            ClosedError: If it was given back, or is gone.
        """
        return self._check_open()

    @property
    def runs(self) -> bool:
        """Whether this thread is in a pass of the model."""
        return self._edges.running()

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return self._device.torch_device

    def __repr__(self) -> str:
        if self._closed:
            return "Runtime(shut down)"
        weights, parts = self._parts.weights, self._parts
        return (
            f"Runtime({len(parts.blocks)} blocks, {weights.held_bytes} of"
            f" {weights.limit_bytes} bytes on {self._device.torch_device},"
            f" {self._tenancy.why})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Give a copy of the model no runtime, and bring what it copies to the host."""
        if (frame := frame_of_copy()) is not None and self.is_open:
            self._edges.begin_reading(frame, self._bring_home)
        else:
            self._bring_home()

    def __reduce__(self) -> Any:
        """Give a pickle of the model no runtime, either."""
        self._bring_home()
        return type(None), ()

    def _bring_home(self) -> None:
        """Bring every tensor home, for a copy, a pickle or a state dict of the model.

        `resume` brings back what stays.
        """
        if self.is_open:
            rest = self._parts.blocks[0]  # which is placed before the first pass
            resumes = self._resumes or self._ready or rest.bound
            self.park()
            self._resumes = resumes

    def _hand_out(self) -> bool:
        """Bring tensors home for a state dict: all, but what stays if others wait for
        its gradients, as `DistributedDataParallel` does.

        They hold its `AccumulateGrad` nodes, of which there would be others when it is
        back from another device.

        Returns:
            Whether anything was left on the device.
        """
        staying = (self._parts.blocks[index] for index in self._parts.scheduler.fixed)
        changes_devices = self.is_open and not self._device.is_host
        if not changes_devices or not any(
            tensor.requires_grad and tensor_use_count(tensor) > 1
            for tensor in (*(t for b in staying for t in b.tensors), *self._parts.odd)
        ):
            self._bring_home()
            return False
        with self._at_rest():
            self._parts.scheduler.give_up(0, all_of_it=False)
            self._take_in()
        return True

    def end_copy(self) -> None:
        """End what `__deepcopy__` began: the rest of the model is copied, too."""
        try:
            self.resume()
        finally:
            if (frame := frame_of_copy()) is not None:
                self._edges.end_reading(frame)

    def resume(self) -> None:
        """Bring back what stays, if `_bring_home` took it away from the device.

        If there is no room for what has joined, it is not brought, and the next pass
        says so: who saves a model or copies it gets what there is.
        """
        if self._resumes and not self._closed:
            with suppress(StagehandOOMError):
                self.place()

    # Steps

    def begin_step(self, step: int | None = None) -> None:
        """Begin a step by hand; from then on the runtime does not begin any by itself.

        Args:
            step: Its number; the next one by default.

        Raises:
            ClosedError: After `shutdown()`, as all methods of a runtime do.
        """
        self._check_open()
        with self._turn():
            self._manual = True
            self._next_step(step)

    def end_step(self) -> None:
        """End the open step and record it. Without one, nothing happens."""
        self._check_open()
        with self._turn():
            self._close_step()

    def _next_step(self, step: int | None) -> None:
        self._close_step()
        self._measure.begin_step(step)

    def _close_step(self) -> None:
        if self._measure.timed:
            self._parts.steering.note(*self._measure.collect())
        self._guards.collect()
        parts = self._parts
        self._measure.end_step(
            parts.weights, parts.pinned_arena, parts.masters.pinning_bytes
        )

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
        self._check_open()
        if not self._measure.in_step:
            self.begin_step()
        self._manual = True
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
        block = self._block(block_id)
        self._edges.take_lock()
        try:
            if not self._ready:
                self._prepare()
            self._parts.scheduler.before(block)
            self._casts.fill(block)
        except BaseException:
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
        if not block.uses:
            raise ConfigError(
                f"block {block_id!r} is not in use: call before_block() first, once"
                " for each after_block()"
            )
        try:
            self._parts.scheduler.after(block)
            if not self._edges.is_busy:
                self._parts.scheduler.rest()
        finally:
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
        self._check_open()
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
        self._check_open()
        if not callable(listener):
            raise ConfigError(
                f"listener is {listener!r}: expected a function that takes parameters"
            )
        if self._gradients is None:
            return lambda: None
        return self._gradients.when_home(listener)

    # Memory

    def set_budget(self, vram_budget: int | str) -> None:
        """Change the device bytes for weights.

        What is there beyond them leaves at once; in the middle of a pass, when the next
        one begins. Of block mode on an accelerator, the high watermark stays the most.

        Args:
            vram_budget: As in `stagehand.layer`. A share, such as "80%", is one of what
                is free and of what streamed weights hold now.

        Raises:
            ConfigError: If it is no size.
            StagehandOOMError: If it cannot work; it names the smallest that can.
        """
        self._check_open()
        held = self._tenancy.shared.ledger.device.held_bytes
        free = self._device.free_bytes() + held
        nbytes = parse_bytes(vram_budget, name="vram_budget", of=free)
        with self._turn():
            self._limit_to(nbytes)
            self._parts.budget_bytes = self._marked_bytes = nbytes
            self._tenancy.renew()
            if not self._edges.is_busy:
                self._tenancy.give_up(nbytes)

    def _limit_to(self, nbytes: int) -> None:
        self._wires.plan_within(nbytes)
        self._parts.weights.set_limit(nbytes)
        self._parts.device_arena.trim()  # what is kept for reuse counts, too

    def park(self) -> None:
        """Bring every tensor home to the host and free all device memory.

        The next pass brings them back.

        Raises:
            ConfigError: If the model runs, or a block is in use.
        """
        with self._at_rest():
            self._clear_device()
            self._take_in()
            self._parts.take_home_odd()
            if (additions := self._additions()) is not None:
                additions.take_home_unseen(torch.device("cpu"))
            self._parts.take_gradients_along()
            self._parts.device_arena.trim()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the model's lock; this thread may be in a pass of it."""
        self._edges.await_failure()
        with self._edges.lock:
            yield

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Hold the model's lock; refuse if it runs or one of its blocks is in use."""
        self._check_open()
        if self._edges.running():
            raise ConfigError(
                "the model cannot be moved, copied or given back while it runs: do"
                " that when its pass is over"
            )
        with self._edges.lock:
            self._parts.scheduler.release_fetched()
            if used := self._parts.scheduler.in_use:
                if not self._hooks.find_lost():
                    raise ConfigError(
                        f"block {used[0]!r} is in use: call after_block() before the"
                        " model is moved, copied or given back"
                    )
                self._parts.scheduler.recover()  # no hook was left to end these uses
            yield

    def _clear_device(self) -> None:
        """Bring all blocks home; the next pass pins and places them anew."""
        self._ready = self._resumes = False  # first: an interrupt may leave some there
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
        self._check_open()
        if not self._edges.running():
            with self._edges.lock:
                self._take_additions()
                self._place_between_passes()
                self._resumes = False

    # Telling

    @property
    def telemetry(self) -> Telemetry:
        """The records of the latest steps and their statistics."""
        return self._measure.telemetry

    def report(self) -> Report:
        """Return budget, plan, bytes moved, what limits, and what would help."""
        if self._closed and self._last_report is not None:
            return self._last_report
        parts, measure, plan = self._parts, self._measure, self._parts.steering.plan
        additions = self._additions()
        totals = measure.telemetry.totals()
        startup, first = self._startup_seconds, measure.first_seconds
        limit = plan.limit
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
            advice=advise(limit, trains=any(b.trains for b in parts.streamed)),
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
            if not self._closed:
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
        self._check_open()
        if not callable(call):
            raise ConfigError(
                f"call is {call!r}: expected a function that takes the model"
            )
        self._at_shutdown.append(call)

    def _end(self, *, keep_pool: bool) -> None:
        if self._closed:
            return
        model, parts = self._model_ref(), self._parts
        if model is None:  # its finalizer has closed the parts
            self._closed = True
            with ExitStack() as rest:
                self._close_files(rest)
            return
        refused = None
        with self._at_rest():
            try:
                self._take_in()
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
            rest.callback(parts.close)
            if (additions := self._additions()) is not None:
                rest.callback(additions.take_home_unseen, self._home)
            _twice(rest, self._give_back, model)
            rest.callback(self._sum_up)
            if self._gradients is not None:
                _twice(rest, self._gradients.close)
            rest.callback(self._host_memory.close)
            with rest:
                parts.keep_pool = keep_pool
        if lost is not None:
            raise lost

    def _let_go(self) -> None:
        """The model was collected: leave its memory to whoever has tensors there."""
        if self._gradients is not None:
            self._gradients.close()
        self._host_memory.close()
        self._readers = []
        self._parts.masters.let_go(self._parts.blocks)

    def _sum_up(self) -> None:
        self._close_step()
        self._last_report = self.report()

    def _close_files(self, rest: ExitStack) -> None:
        rest.callback(self._measure.telemetry.close)
        if self._files is not None:
            rest.callback(self._files.close)
        rest.callback(self._compact_files.close)

    def _give_back(self, model: nn.Module) -> None:
        parts, self._closed = self._parts, True
        self._hooks.remove()
        for name in (HANDLE, "_apply"):
            model.__dict__.pop(name, None)
        for block in parts.blocks:
            parts.masters.give_back(block)
        parts.give_back_odd()
        self._finalizer.detach()

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

    def _check_open(self) -> nn.Module:
        model = self._model_ref()
        if self._closed or model is None:
            raise ClosedError(
                "the runtime was shut down or its model is gone; make a new one with"
                " stagehand.layer()"
            )
        return model


def _twice(rest: ExitStack, call: Callable[..., object], *args: object) -> None:
    """Call something idempotent at the end, twice: an interrupt may cut one short."""
    for _ in range(2):
        rest.callback(call, *args)


def _end(
    saved: SavedTensors, parts: Parts, telemetry: Telemetry, ends: Callable[[], None]
) -> None:
    """Free what a collected model had, even if somebody keeps its runtime."""
    saved.leave_hooks()
    take_off_dead()
    telemetry.close()
    parts.close()
    ends()


def _weakly(
    call: Callable[_P, None], otherwise: Callable[_P, None] | None = None
) -> Callable[_P, None]:
    """Return a function that calls a method as long as its object lives.

    After that it calls `otherwise`, or does nothing.
    """
    known = weakref.WeakMethod(call)

    def called(*args: _P.args, **kwargs: _P.kwargs) -> None:
        call = known() or otherwise
        if call is not None:
            call(*args, **kwargs)

    return called


def _complaint(block: Block) -> CheckpointError | None:
    """Return why a block's host tensors are not what they were, if they are not."""
    try:
        if block.store is not None:
            block.store.check_hosts()
    except CheckpointError as error:
        return error
    return None


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
