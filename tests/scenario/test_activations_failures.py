"""After a failure at any point where memory, events or copies are asked for."""

import gc
import itertools
import warnings
from collections import Counter

import pytest
import torch
from keeping import (
    ROW_BYTES,
    assert_same,
    emptied,
    flush,
    gradients,
    inputs,
    plain,
    spill_of,
    stack,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

import stagehand
from interrupts import interrupted_at, interrupted_at_call
from stagehand import torch_private
from stagehand.activations.advice import BlockWatch
from stagehand.activations.carrier import Carrier, Leaving
from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.pieces import Bundle, Piece
from stagehand.activations.pool import SlabPool
from stagehand.activations.runtime import ActivationRuntime
from stagehand.activations.saving import Saving
from stagehand.activations.spill import Spill
from stagehand.core.arena import Arena
from stagehand.core.device import AcceleratorDevice
from stagehand.core.traffic import Traffic
from stagehand.core.transfer import TransferEngine
from stagehand.torch_private import add_hook, top_saved_hooks

COPIES = (
    (TransferEngine, "send_group"),
    (TransferEngine, "bring_group"),
    (Carrier, "send"),
    (Carrier, "fetch"),
)
POINTS = (
    *COPIES,
    (SlabPool, "make"),
    (Arena, "acquire_nowait"),
    (AcceleratorDevice, "empty"),
    (AcceleratorDevice, "new_event"),
)
BUDGET = 150_000
MOST_BYTES = 163_840  # what two operators save that come one after the other


class Injected(Exception):
    """Stands for whatever memory, events and copies may raise."""


class Injection:
    """Raises at one call of many; or after it, where copies are under way then."""

    def __init__(self, patch, after):
        self.calls = self.at = 0
        for owner, name in COPIES if after else POINTS:
            patch.setattr(owner, name, self.around(getattr(owner, name), after))

    def around(self, method, after):
        def called(*args, **kwargs):
            self.calls += 1
            if self.calls != self.at:
                return method(*args, **kwargs)
            if after:
                method(*args, **kwargs)
            raise Injected

        return called

    def run(self, at, step):
        """Run a step that fails at a call; False if there are fewer calls."""
        self.calls, self.at = 0, at
        try:
            step()
        except Injected:
            return True
        finally:
            self.at = 0
        return False


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "settled"])
def test_books_are_right_after_a_failure_at_any_point(sim, monkeypatch, steps, after):
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    injection = Injection(monkeypatch, after=after)
    at, failed = 1, True
    while failed:
        with emptied(stagehand.activations(BUDGET)) as saved:
            for _ in range(steps):
                gradients(model, plain, saved)
            failed = injection.run(
                at, lambda saved=saved: gradients(model, plain, saved)
            )
            flush()
            for _ in range(2):
                assert_same(gradients(model, plain, saved), expected)
            assert saved._parts.saving.scope is None
        at += 2  # of many alike
    assert at > 4


SENDING = (
    *(Leaving.take, Carrier.send, TransferEngine.send_group),
    *(TransferEngine._put_aside, Traffic.put_aside),
)


def is_survived(at, model, saved, expected):
    """Whether a step is interrupted; the two after it have to be right."""
    interrupted = False
    try:
        with at:
            gradients(model, plain, saved)
    except KeyboardInterrupt:
        interrupted = True
    flush()
    for _ in range(2):
        assert_same(gradients(model, plain, saved), expected)
    return interrupted


@pytest.mark.parametrize("aside", [False, True], ids=["at once", "put aside"])
def test_interrupt_while_tensors_leave_frees_nothing_that_is_being_copied(sim, aside):
    """Copies were queued that nobody knew of: their sources were freed, and what was
    put aside was copied into a slab of others."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    traffic = Traffic(h2d_slots=8, d2h_slots=8)
    if aside:
        traffic.yield_home(1 << 20)
    for number in itertools.count(1, 3):
        with emptied(stagehand.activations(BUDGET)) as saved:
            saved._parts.engine.join(traffic)
            at = interrupted_at(number, *SENDING)
            interrupted = is_survived(at, model, saved, expected)
        if not interrupted:
            break
    assert number > 200


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupt_while_a_failure_is_handled_leaves_no_copy_without_its_end(
    sim, monkeypatch, after
):
    """Each later step asked whether a copy was done that had never been queued."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    send, lacking = Carrier.send, []

    def sent(*args):
        if after or not lacking:
            send(*args)
        if lacking:
            raise MemoryError

    monkeypatch.setattr(Carrier, "send", sent)
    for number in itertools.count(1):
        with emptied(stagehand.activations(BUDGET)) as saved:
            lacking.append(True)
            interrupted = True
            try:
                with interrupted_at(number, Spill._send, send):
                    gradients(model, plain, saved)
            except MemoryError:
                interrupted = False
            except KeyboardInterrupt:
                pass
            lacking.clear()
            flush()
            for _ in range(2):
                assert_same(gradients(model, plain, saved), expected)
        if not interrupted:
            break
    assert number > 5


BOOKS = [
    f"stagehand.activations.{name}"
    for name in ("carrier", "learning", "pieces", "pool", "returning", "room", "spill")
]


@pytest.mark.parametrize("budget", [BUDGET, 400_000], ids=["tight", "roomy"])
@pytest.mark.parametrize("steps", [0, 3], ids=["first", "settled"])
def test_books_are_right_after_an_interrupt_at_any_call(sim, steps, budget):
    """What had left one of the books, and was not in another yet, counted for good: as
    bytes on the device, or as a slab that nobody had."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    for number in itertools.count(1, 17):
        with (
            emptied(stagehand.activations(budget)) as saved,
            torch.autograd.set_multithreading_enabled(False),  # signals come here only
        ):
            for _ in range(steps):
                gradients(model, plain, saved)
            at = interrupted_at_call(number, *BOOKS)
            interrupted = is_survived(at, model, saved, expected)
            assert saved._parts.spill.peak_bytes <= max(budget, MOST_BYTES)
        if not interrupted:
            break
    assert number > 300


@pytest.mark.parametrize(
    ("budget", "bundle_bytes", "inflight", "changes"),
    [
        (BUDGET, 9375, 1, False),
        (400_000, 25_000, 1, False),
        (BUDGET, 200_000, 1, False),
        (400_000, 25_000, 0, False),
        (BUDGET, 25_000, 1, True),
    ],
    ids=["tight", "roomy", "bundled", "waiting", "changed"],
)
def test_what_lives_on_after_an_interrupt_is_in_one_of_the_books(
    sim, budget, bundle_bytes, inflight, changes
):
    """What is in none could not leave any more, and what is in two counted twice."""
    model = stack(2).to("hpu")
    for number in itertools.count(1, 13):
        with emptied(stagehand.activations(budget)) as saved:
            for _ in range(3):
                gradients(model, plain, saved)
                spill = spill_of(saved)
                spill._bundle_bytes, spill._inflight_d2h = bundle_bytes, inflight
            flush()
            before, x, interrupted = None, inputs(), False
            try:
                with interrupted_at_call(number, *BOOKS), saved:
                    for layer in (*model, *model):
                        before, x = x, layer[0](x)
                        if changes and not before.is_leaf:
                            torch.accelerator.synchronize()  # its copy has left
                            before.add_(1)
                        x = layer[1:](x)
            except KeyboardInterrupt:
                interrupted = True
            spill._begin_change()
            spill._look()  # as whatever needs room does first
            numbers = [ref().number for ref, _ in spill._kept if ref() is not None]
            assert numbers == sorted(numbers)
            assert spill._stuck_bytes == sum(nbytes for _, nbytes in spill._stuck)
            in_books = [
                *(ref for ref, _ in (*spill._kept, *spill._stuck)),
                *(ref for leaving in spill._leaving for ref in leaving.pieces),
                *(ref for scope in spill._open for ref in scope.open.members),
                *(ref for _, bundle in spill._waiting for ref in bundle.members),
            ]
            booked = Counter(id(ref()) for ref in in_books if ref() is not None)
            living = [piece for piece in gc.get_objects() if type(piece) is Piece]
            lying = {id(piece) for piece in living if piece.alias is not None}
            assert {key: booked[key] for key in lying} == dict.fromkeys(lying, 1)
            spill._is_torn, spill._inflight_d2h = False, 1
            del before, x, living
            flush()
        if not interrupted:
            break
    assert number > 200


@pytest.mark.parametrize("budget", [BUDGET, 250_000], ids=["tight", "roomy"])
def test_what_came_back_before_an_interrupt_counts_as_long_as_it_is_there(sim, budget):
    """It was free to the books, and backward held more than the budget."""
    model = stack(2).to("hpu")
    for number in itertools.count(1, 7):
        with (
            emptied(stagehand.activations(budget)) as saved,
            torch.autograd.set_multithreading_enabled(False),  # signals come here only
        ):
            for _ in range(3):
                gradients(model, plain, saved)
            spill, interrupted = spill_of(saved), False
            with saved:
                loss = plain(model, inputs())
            try:
                with interrupted_at_call(number, *BOOKS):
                    loss.backward(retain_graph=True)
            except KeyboardInterrupt:
                interrupted = True
            flush()
            spill._begin_change()
            spill._look()  # as whatever needs room does first
            aside = {id(ref()) for ref, _ in spill._stuck}
            living = [item for item in gc.get_objects() if type(item) is Piece]
            back = [item for item in gc.get_objects() if type(item) is Bundle]
            there = [p for p in living if p.alias is not None and id(p) not in aside]
            assert spill._held == (
                sum(piece.nbytes for piece in there)
                + sum(bundle.nbytes for bundle in back if bundle.back is not None)
                + spill._carrier.gone_bytes
            )
            spill._is_torn = False
            del loss, living, back, there
        if not interrupted:
            break
    assert number > 100


def test_a_forward_whose_end_was_not_told_is_forgotten(sim, monkeypatch):
    """An interrupt came first. It was observed for good, and with it all others."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)

    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    with emptied(stagehand.activations(BUDGET)) as saved:
        with monkeypatch.context() as patch:
            patch.setattr(Spill, "end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                gradients(model, plain, saved)
        flush()
        for _ in range(4):
            assert_same(gradients(model, plain, saved), expected)
        assert "link:" in saved.report()
        assert saved._parts.carrier.marks is None


def test_what_others_have_changed_a_part_of_and_let_go_counts_after_an_interrupt(sim):
    """A younger part had its place in the books."""
    with emptied(stagehand.activations(50_000)) as saved:
        spill = spill_of(saved)
        spill._bundle_bytes = 120_000

        def forward(*, changes):
            parts = torch.unsafe_chunk(inputs().repeat(1, 3), 3, dim=1)
            losses = [part.square() for part in parts[:2]]
            if changes:
                parts[1].detach().add_(1)
            return parts, [*losses, (inputs() * 2).square()]

        for _ in range(3):
            with saved:
                losses = forward(changes=False)[1]
            sum(losses).sum().backward()
            del losses
        flush()
        with saved:
            parts, losses = forward(changes=True)
            losses.append(parts[2].square())
        assert spill._stuck_bytes == 3 * ROW_BYTES
        spill.budget_bytes = BUDGET
        del parts, losses[1:]
        flush()
        for _ in range(2):
            with saved:
                assert spill.held_bytes == 3 * ROW_BYTES
            with (
                pytest.raises(KeyboardInterrupt),
                interrupted_at(1, Spill._tidy),
                saved,
            ):
                pass
        losses.clear()


def lacking(*_, **__):
    raise MemoryError


def test_what_could_not_leave_leaves_later(sim, monkeypatch):
    """A graph that lives on is under the budget once there is host memory again."""
    model = stack().to("hpu")
    make, lacking = SlabPool.make, []

    def made(pool, nbytes):
        if lacking:
            raise MemoryError
        return make(pool, nbytes)

    monkeypatch.setattr(SlabPool, "make", made)
    with emptied(stagehand.activations(BUDGET)) as saved:
        x = inputs()
        with saved:
            first = model[:1](x)
        lacking.append(True)
        with pytest.raises(MemoryError), saved:
            plain(model, x)
        lacking.clear()
        flush()
        with saved:
            loss = plain(model, x)
        spill = saved._parts.spill
        assert spill.held_bytes + spill._stuck_bytes <= BUDGET
        loss.backward()
        first.sum().backward()
        del loss, first


def test_what_could_not_leave_gives_host_memory_back_while_its_error_is_kept(
    sim, monkeypatch
):
    model = stack().to("hpu")
    with emptied(stagehand.activations(BUDGET)) as saved:
        with monkeypatch.context() as patch:
            patch.setattr(TransferEngine, "send_group", lacking)
            with pytest.raises(MemoryError) as error, saved:
                model(inputs())
        assert saved._parts.pool.misses == 1
        assert saved._parts.pool.out == 0
        del error


def test_what_could_not_leave_together_comes_back_apart(sim, monkeypatch):
    """Backward asked for the bundle that was never sent, and found it nowhere."""
    model = stack().to("hpu")
    with emptied(stagehand.activations(2_000_000)) as saved:
        spill = spill_of(saved)
        spill._bundle_bytes = 1_000_000
        with saved:
            first = model[:3](inputs()).sum()
        spill.budget_bytes = 0
        with monkeypatch.context() as patch:
            patch.setattr(SlabPool, "make", lacking)
            with pytest.raises(MemoryError), saved:
                model(inputs())
        flush()
        spill._bundle_bytes = 1
        spill.budget_bytes = spill.held_bytes // 2
        with saved:
            second = model[:1](inputs()).sum()
        assert spill.tally.spilled_count > 0
        spill.budget_bytes = 2_000_000
        first.backward()
        second.backward()
        del first, second


def test_warning_of_pageable_memory_may_be_an_error(sim):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    with emptied(stagehand.activations(BUDGET, ram_budget=100_000)) as saved:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(stagehand.StagehandWarning, match="pageable"):
                gradients(model, plain, saved)
        flush()
        assert saved._parts.pool.out == saved._parts.pool.pageable == 0
        for _ in range(3):
            assert_same(gradients(model, plain, saved), expected)
        x = inputs()
        with saved:
            loss = plain(model, x)
        assert saved._parts.spill.held_bytes <= BUDGET
        del loss


def hooks_on(model):
    """How many hooks its modules have."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )


PUTTING_ON_AND_OFF = Saving.enter, Saving._take_off, Saving.paused.__wrapped__


def forward(saved, model):
    with saved:
        return plain(model, inputs())


def paused(saved, model):
    with saved, saved.paused():
        return plain(model, inputs())


def nested(saved, model):
    with saved, saved:
        return plain(model, inputs())


@pytest.mark.parametrize("step", [forward, paused, nested])
def test_interrupt_where_a_forward_begins_or_ends_leaves_no_hook_on_the_thread(
    sim, step
):
    """All that later forwards saved went to a forward that was over."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    for number in itertools.count(1):
        interrupted = False
        with emptied(stagehand.activations(BUDGET)) as saved:
            try:
                with interrupted_at(number, *PUTTING_ON_AND_OFF):
                    step(saved, model)
            except KeyboardInterrupt:
                interrupted = True
            assert top_saved_hooks() is None, number
            assert saved._parts.saving.scope is None
            assert_same(gradients(model, plain, saved), expected)
        if not interrupted:
            break
    assert number > 10


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sanitized", [False, True])
def test_interrupt_where_modes_are_put_aside_leaves_them_on_the_thread(
    sanitized, monkeypatch
):
    """Those of a region's were lost. Where its `with` ended it raised another error,
    which kept a block in use for good."""
    if sanitized:
        monkeypatch.setattr(torch_private, "_SANITIZER", __name__)
    modes = [Plain(), Plain()]
    for number in itertools.count(1):
        interrupted = False
        with modes[0], modes[1]:
            try:
                with interrupted_at(number, torch_private.__name__):
                    torch_private.call_unseen(torch.zeros, 1)
            except KeyboardInterrupt:
                interrupted = True
            depth = torch_private.dispatch_modes()
            there = [torch._C._get_dispatch_stack_at(n) for n in range(depth)]
            assert there == modes, number
        if not interrupted:
            break
    assert number > 10


WATCHING = (
    *(BlockWatch.__enter__, add_hook, torch_private._remove_hooks),
    *(nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook),
    *(RemovableHandle.__init__, RemovableHandle.remove),
)


def test_interrupt_while_blocks_are_watched_leaves_no_hook_on_them(sim):
    model = stack(2).to("hpu")
    runtime = ActivationRuntime(ActivationStagehandConfig(budget=BUDGET))
    for number in itertools.count(1):
        watch = runtime.watch_blocks(model.named_children())
        try:
            with interrupted_at(number, *WATCHING), watch:
                pass
        except KeyboardInterrupt:
            assert hooks_on(model) == 0, number
        else:
            break
    assert number > 50
    runtime.shutdown()
