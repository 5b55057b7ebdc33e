"""Saved tensors stay under a budget, and gradients are those without one."""

import gc
import threading
import weakref
from copy import deepcopy

import pytest
import torch
from keeping import (
    BUDGET,
    ROW_BYTES,
    ROWS,
    WIDTH,
    assert_same,
    emptied,
    gradients,
    inputs,
    plain,
    spill_of,
    stack,
)
from small import runtime_of
from torch import nn

import stagehand
from stagehand.activations.carrier import Carrier
from stagehand.activations.pieces import Piece
from stagehand.activations.spill import Spill
from stagehand.core.limits import Limits


@pytest.fixture
def saved(sim):
    """A context with a budget; at the end nothing of it is left."""
    with emptied(stagehand.activations(BUDGET)) as context:
        yield context


@pytest.fixture
def pieces(monkeypatch):
    """All pieces that forwards save, weakly, in the order in which they do."""
    found = []
    make = Spill.packer

    def packer(*args):
        pack = make(*args)

        def noted(saved):
            handle = pack(saved)
            if type(handle) is Piece:
                found.append(weakref.ref(handle))
            return handle

        return noted

    monkeypatch.setattr(Spill, "packer", packer)
    return found


def away(pieces):
    """Which of the pieces are on the host only."""
    return [(p := ref()) is not None and p.alias is None for ref in pieces]


@pytest.fixture
def watched(saved, monkeypatch):
    """The most bytes held after any decision, since `clear()`."""
    spill = spill_of(saved)
    seen = []

    def look(name):
        method = getattr(Spill, name)

        def looking(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            seen.append(self.held_bytes)
            return result

        monkeypatch.setattr(Spill, name, looking)

    for name in ("_note", "_look_ahead", "_fetch", "_make_room", "restore"):
        look(name)
    assert spill.held_bytes == 0
    return seen


# The budget


def test_saved_bytes_never_exceed_the_budget_after_the_first_step(saved, watched):
    model = stack().to("hpu")
    gradients(model, plain, saved)
    watched.clear()
    for _ in range(3):
        gradients(model, plain, saved)
    assert len(watched) > 50
    assert BUDGET / 2 < max(watched) <= BUDGET
    assert spill_of(saved).tally.over_count == 0


def test_backward_that_ends_early_does_not_hold_what_it_brought(saved, watched):
    """One of a bundle was asked for: the others came with it, and nobody wants them."""
    x = torch.linspace(-1, 1, 2048, device="hpu", requires_grad=True)

    def forward():
        y = x
        for number in range(100):
            y = y.sigmoid()
            if number == 9:
                early = y
        return early, y.sum()

    spill = spill_of(saved)
    for _ in range(3):
        with saved:
            early, loss = forward()
        loss.backward()
    expected, x.grad = x.grad / 3, None
    with saved:
        early, loss = forward()
    torch.autograd.grad(loss, early, retain_graph=True)
    assert any(bundle.due > 0 for ref in spill._used if (bundle := ref()) is not None)
    watched.clear()
    spill.tally.reset()
    spill.budget_bytes = 20_000  # less than what was brought
    with saved:
        other = forward()[1]
    assert max(watched) <= 20_000
    assert spill.tally.over_count == 0
    spill.budget_bytes = BUDGET
    loss.backward()
    assert torch.equal(x.grad, expected)
    del early, loss, other


def test_no_more_leaves_than_must_in_a_step_that_is_not_known(saved):
    y = x = torch.linspace(-1, 1, 2048, device="hpu", requires_grad=True)
    with saved:
        for _ in range(80):
            y = y.sigmoid()
    over = 80 * y.nbytes - BUDGET
    assert over <= spill_of(saved).tally.spilled_bytes < over + y.nbytes
    y.sum().backward()
    del x, y


def test_what_can_never_fit_is_counted_in_the_record(sim):
    model = stack().to("hpu")
    config = stagehand.ActivationStagehandConfig(budget=ROW_BYTES)
    runtime = stagehand.ActivationRuntime(config)
    for _ in range(3):
        runtime.step_begin()
        gradients(model, plain, runtime.managed_forward())
        record = runtime.step_end()
        assert record.over_count > 0
        assert f'"over_count": {record.over_count}' in record.to_json()
    gc.collect()
    runtime.shutdown()


def test_each_tensor_that_can_never_fit_is_counted_once(saved):
    for count in (1, 2):
        with saved:
            x = torch.ones(BUDGET // 4 + 1, device="hpu", requires_grad=True)
            loss = x.sigmoid().sum()
        assert spill_of(saved).tally.over_count == count
        loss.backward()
        del x, loss


def test_device_memory_falls_by_what_exceeds_the_budget(saved, sim):
    model = stack().to("hpu")

    def peak(context):
        gc.collect()
        sim.reset_peak()
        before = sim.allocated_bytes()
        gradients(model, plain, context)
        return sim.peak_bytes() - before

    alone = peak(None)
    saved_bytes = 6 * 9 * ROW_BYTES  # two of 256 wide, one of 64, in each layer
    peak(saved)
    for _ in range(3):
        assert peak(saved) <= alone - (saved_bytes - BUDGET) + 5 * ROW_BYTES


def test_peak_is_never_above_that_without_spilling(sim):
    model = stack().to("hpu")
    for budget in (ROW_BYTES, BUDGET, 10 * BUDGET):
        gc.collect()
        sim.reset_peak()
        gradients(model, plain)
        alone = sim.peak_bytes()
        with emptied(stagehand.activations(budget)) as saved:
            for _ in range(3):
                sim.reset_peak()
                gradients(model, plain, saved)
                assert sim.peak_bytes() <= alone


def test_what_leaves_is_a_prefix_of_what_could(saved, pieces):
    model = stack().to("hpu")
    for _ in range(3):
        x = inputs()
        pieces.clear()
        with saved:
            loss = plain(model, x)
        torch.accelerator.synchronize()
        with saved:  # looks at what has left
            pass
        # The input is kept by the test: it is the one that cannot leave.
        gone = away(pieces)[1:]
        count = sum(gone)
        assert 0 < count < len(gone)
        assert gone == [True] * count + [False] * (len(gone) - count)
        loss.backward()
        del loss


def test_prefix_is_the_smallest_that_fits(saved, pieces):
    model = stack().to("hpu")
    gradients(model, plain, saved)
    gradients(model, plain, saved)
    lesson = spill_of(saved).lessons.latest
    kept = [save.nbytes for save in lesson.saves if save.free]
    count = lesson.prefix.count - len(lesson.prefix.skipped)
    assert sum(kept[count:]) <= BUDGET < sum(kept[count - 1 :])


def test_nearly_all_bytes_that_are_copied_are_freed(saved):
    model = stack().to("hpu")
    gradients(model, plain, saved)
    tally = spill_of(saved).tally
    tally.reset()
    for _ in range(4):
        gradients(model, plain, saved)
    assert tally.spilled_bytes > 4 * BUDGET
    assert tally.freed_bytes >= 0.95 * tally.spilled_bytes


def test_small_tensors_leave_and_return_in_bundles(saved, sim):
    x = torch.linspace(-1, 1, 2048, device="hpu", requires_grad=True)
    for _ in range(3):
        spill_of(saved).tally.reset()
        copies = sim.h2d_copies()
        y = x
        with saved:
            for _ in range(150):
                y = y.sigmoid()
        y.sum().backward()
        del y
    restored = spill_of(saved).tally.restored_count
    assert restored > 50
    assert sim.h2d_copies() - copies <= restored / 4


def test_host_memory_is_there_from_the_third_step_on(saved):
    model = stack().to("hpu")
    for _ in range(2):
        gradients(model, plain, saved)
    pool = saved._parts.pool
    pool.hits = pool.misses = 0
    for _ in range(3):
        gradients(model, plain, saved)
    assert pool.hits > 0
    assert pool.misses == 0


def test_settled_steps_never_let_the_host_wait(saved, sim):
    model = stack().to("hpu")
    for _ in range(3):
        gradients(model, plain, saved)
    torch.accelerator.synchronize()
    before, pinned = sim.syncs(), sim.pinned_bytes()
    x = inputs()
    with saved:
        loss = plain(model, x)
    loss.backward()
    # One for the batch.
    assert sim.syncs() - before <= 1
    assert sim.pinned_bytes() == pinned


def test_everything_stays_where_it_fits(sim):
    model = stack().to("hpu")
    with emptied(stagehand.activations(100 * BUDGET)) as saved:
        for _ in range(3):
            gradients(model, plain, saved)
        assert spill_of(saved).tally.spilled_bytes == 0
        assert "all of it stays" in saved.report()


# What a known forward keeps without asking


def test_it_counts_at_the_peak_and_what_is_dead_of_it_not_at_the_end(sim):
    with emptied(stagehand.activations(BUDGET)) as saved:
        for _ in range(3):
            with saved:
                living, dead = inputs().exp(), inputs().exp()
        assert spill_of(saved)._given
        assert spill_of(saved).peak_bytes >= 2 * ROW_BYTES
        del dead
        saved.close()
        assert spill_of(saved).held_bytes == ROW_BYTES
        del living


def test_it_leaves_when_another_forward_needs_room(sim, pieces):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    with emptied(stagehand.activations(4 * BUDGET)) as saved:
        for _ in range(3):
            assert_same(gradients(model, plain, saved), expected)
        spill = spill_of(saved)
        assert spill.tally.spilled_count == 0
        model.zero_grad()
        first, second, third = inputs(), inputs(), inputs()
        with saved:
            one = plain(model, first)
        assert spill._given
        with saved:
            two = plain(model, second)
        pieces.clear()
        with saved:
            plain(model, third)
        assert spill.held_bytes <= 4 * BUDGET
        assert spill.tally.over_count == 0
        assert spill.tally.spilled_count > 0
        two.backward()
        one.backward()
        assert torch.equal(first.grad.cpu(), expected[-1])
        assert torch.equal(second.grad.cpu(), expected[-1])
        del one, two
        pieces.clear()


def test_storages_that_it_saved_twice_count_once(sim):
    model = stack().to("hpu")
    peaks = []
    with emptied(stagehand.activations(4 * BUDGET)) as saved:
        for _ in range(4):
            spill = spill_of(saved)
            spill.peak_bytes = 0
            gradients(model, doubled, saved)
            peaks.append(spill.peak_bytes)
    assert len(set(peaks)) == 1


def doubled(model, x):
    """Saves some storages several times."""
    for layer in model:
        y = layer(x).sigmoid()
        x = y * y + y.exp() * y
    return x.square().sum()


def test_another_thread_may_take_it(sim):
    """As autograd's does, which makes room while a forward is still open."""
    model = stack().to("hpu")
    expected = gradients(model, plain)[-1]
    with emptied(stagehand.activations(4 * BUDGET)) as saved:
        for _ in range(3):
            gradients(model, plain, saved)
        spill = spill_of(saved)
        x = inputs()
        with saved:
            half = model[:3](x)
            held = spill.held_bytes

            def take():
                with spill._lock:
                    spill._make_room(4 * BUDGET - ROW_BYTES)

            other = threading.Thread(target=take)
            other.start()
            other.join()
            assert ROW_BYTES >= spill.held_bytes < held
            loss = model[3:](half).square().sum()
            del half
        loss.backward()
        assert torch.equal(x.grad.cpu(), expected)
        del loss


# Coming back


def test_settled_backward_finds_all_of_it_on_its_way(saved):
    model = stack().to("hpu")
    for _ in range(2):
        gradients(model, plain, saved)
    tally = spill_of(saved).tally
    tally.reset()
    gradients(model, plain, saved)
    assert tally.restored_count > 5
    assert tally.demanded_count == 0


def test_suppressed_speculation_brings_back_on_demand_only(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    gradients(model, plain, saved)
    spill = spill_of(saved)
    spill.bounds.post("test", Limits(suppress_speculative=True))
    spill.tally.reset()
    assert_same(gradients(model, plain, saved), expected)
    assert spill.tally.demanded_count > 2
    spill.bounds.withdraw("test")
    spill.tally.reset()
    assert_same(gradients(model, plain, saved), expected)
    assert spill.tally.demanded_count == 0


def test_full_device_lets_nothing_return_early(saved, monkeypatch):
    """What is ahead of its use is not worth a failure; what is needed now comes."""
    model = stack().to("hpu")
    expected = gradients(model, plain)
    ahead = []
    look, fetch = Spill._look_ahead, Carrier.fetch

    def looking(*args):
        ahead.append(True)
        look(*args)
        ahead.pop()

    def fetching(*args):
        if ahead:
            raise torch.OutOfMemoryError
        fetch(*args)

    monkeypatch.setattr(Spill, "_look_ahead", looking)
    monkeypatch.setattr(Carrier, "fetch", fetching)
    for _ in range(3):
        assert_same(gradients(model, plain, saved), expected)
    tally = spill_of(saved).tally
    assert tally.demanded_count > 0
    assert tally.restored_count == tally.spilled_count


def test_limit_on_copies_home_holds_and_keeps_the_budget(saved, watched, monkeypatch):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    for _ in range(2):
        gradients(model, plain, saved)
    spill = spill_of(saved)
    spill.bounds.post("test", Limits(inflight_d2h=1))
    watched.clear()
    most = []
    may = Spill._may_send

    def noted(self):
        allowed = may(self)
        most.append(len(self._leaving) if allowed else 0)
        return allowed

    monkeypatch.setattr(Spill, "_may_send", noted)
    assert_same(gradients(model, plain, saved), expected)
    assert most
    assert max(most) == 0
    assert max(watched) <= BUDGET


@pytest.mark.parametrize("most", [None, 1])
def test_limit_on_copies_back_holds(saved, monkeypatch, most):
    """Of those that are ahead of their use; without one several are under way."""
    model = stack().to("hpu")
    expected = gradients(model, plain)
    for _ in range(2):
        gradients(model, plain, saved)
    spill_of(saved).bounds.post("test", Limits(inflight_h2d=most))
    coming, look = [], Spill._look_ahead

    def looking(self, *args):
        look(self, *args)
        coming.append(sum(1 for _ in self._coming()))

    monkeypatch.setattr(Spill, "_look_ahead", looking)
    assert_same(gradients(model, plain, saved), expected)
    assert max(coming) == 1 if most else max(coming) > 1


def test_what_came_back_early_gives_way_to_another_forward(saved, watched):
    """Half of a backward, then a forward that needs the room."""
    model = stack().to("hpu")
    expected = gradients(model, plain)[-1]
    for _ in range(2):
        gradients(model, plain, saved)
    x, y = inputs(), inputs()
    with saved:
        middle = model[:3](x)
        loss = plain(model[3:], middle)
    watched.clear()
    [partial] = torch.autograd.grad(loss, middle, retain_graph=True)
    with saved:
        other = plain(model, y)
    assert spill_of(saved).tally.cancelled_count > 0
    assert max(watched) <= BUDGET
    other.backward()
    middle.backward(partial)
    assert torch.equal(y.grad.cpu(), expected)
    assert torch.equal(x.grad.cpu(), expected)


def test_changed_shapes_are_planned_again(saved):
    model = stack().to("hpu")
    for parts in (1, 2, 1, 4, 2):
        rows = torch.ones(ROWS // parts, WIDTH, device="hpu", requires_grad=True)
        plain(model, rows).backward()
        expected, rows.grad = rows.grad.clone(), None
        for _ in range(2):
            with saved:
                loss = plain(model, rows)
            loss.backward()
            assert torch.equal(rows.grad, expected)
            rows.grad = None
    assert spill_of(saved).tally.over_count == 0
    assert len(spill_of(saved).lessons._known) == 3


def test_one_that_begins_alike_and_goes_on_otherwise_is_observed_again(saved):
    model = stack(12).to("hpu")
    for _ in range(3):
        gradients(model[:4], plain, saved)
    expected = gradients(model, plain)
    for _ in range(3):
        assert_same(gradients(model, plain, saved), expected)
    lesson = spill_of(saved).lessons.latest
    assert lesson.count == 3 * 12 + 1
    assert spill_of(saved).tally.over_count == 0


# When it cannot help


class Swollen(nn.Module):
    """Its backward begins small and ends with a peak that has nothing to do with it."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(_SwollenBackward.apply(x))


class _SwollenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.empty(64 * BUDGET, dtype=torch.uint8, device="hpu")
        return grad


def test_it_switches_itself_off_and_says_so_where_the_peak_is_elsewhere(saved):
    model = Swollen(stack()).to("hpu")
    expected = gradients(deepcopy(model.layers), plain)
    gradients(model, plain, saved)
    with pytest.warns(stagehand.StagehandWarning, match="the peak of its memory comes"):
        gradients(model, plain, saved)
    spill_of(saved).tally.reset()
    assert_same(gradients(model, plain, saved), expected)
    assert spill_of(saved).tally.spilled_bytes == 0
    assert "switched off" in saved.report()


def test_it_stays_on_where_the_peak_is_its_own(saved):
    model = stack().to("hpu")
    for _ in range(4):
        gradients(model, plain, saved)
    assert not spill_of(saved).lessons.latest.useless


# What it leaves


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failure_leaves_nothing_and_the_next_step_is_exact(saved, where):
    model = stack().to("hpu")
    expected = gradients(model, plain)

    def failing(model, x):
        y = model(x)
        if where == "forward":
            raise ValueError("in forward")
        y.register_hook(lambda grad: 1 / 0)
        return y.sum()

    for _ in range(2):
        with pytest.raises((ValueError, ZeroDivisionError)):
            gradients(model, failing, saved)
    assert_same(gradients(model, plain, saved), expected)


def test_nothing_is_timed_after_a_first_forward_that_failed(saved):
    """A forward of another kind raises and never comes again: its observation ends."""
    model = stack().to("hpu")
    for _ in range(4):
        gradients(model, plain, saved)
    carrier = spill_of(saved).lessons._carrier

    def failing(model, x):
        model(torch.cat([x, x]))
        raise ValueError("in forward")

    with pytest.raises(ValueError, match="in forward"):
        gradients(model, failing, saved)
    for _ in range(3):
        gradients(model, plain, saved)
    assert (carrier.engine.stopwatch, carrier.marks) == (None, None)


def test_failure_in_the_middle_of_backward_leaves_nothing(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)

    def failing(model, x):
        middle = model[:2](x)
        middle.register_hook(lambda grad: 1 / 0)
        return plain(model[2:], middle)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            gradients(model, failing, saved)
    assert_same(gradients(model, plain, saved), expected)


def test_dropped_graphs_leave_nothing(saved):
    model = stack().to("hpu")
    for _ in range(3):
        with saved:
            plain(model, inputs())


def test_context_is_reusable_and_reentrant(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)

    def nested(model, x):
        y = model[:3](x)
        with saved:
            y = model[3:](y)
        return y.square().sum()

    for _ in range(3):
        assert_same(gradients(model, nested, saved), expected)
    assert spill_of(saved).tally.spilled_count > 0


# Together with streamed weights


def test_who_leaves_without_having_entered_is_told(saved):
    """And nothing else happens: who has entered still can leave."""
    with pytest.raises(stagehand.ConfigError, match="'MainThread', in which they are"):
        saved.__exit__(None, None, None)
    told = []

    def leave():
        with pytest.raises(stagehand.ConfigError, match="left in thread 'other'"):
            saved.__exit__(None, None, None)
        told.append(True)

    with saved:
        other = threading.Thread(target=leave, name="other")
        other.start()
        other.join()
    assert told


def test_with_streamed_weights_each_keeps_its_own_budget(saved, sim):
    model = stack()
    expected = gradients(deepcopy(model).to("hpu"), plain)
    stagehand.layer(model, vram_budget=150_000)
    for _ in range(3):
        assert_same(gradients(model, plain, saved), expected)
    assert spill_of(saved).tally.spilled_count > 0
    runtime = runtime_of(model)
    assert runtime.report().abandoned_slots == 0
    assert runtime.report().peak_device_bytes <= 150_000
    runtime.shutdown()


def test_lanes_are_those_of_the_streamed_weights(saved):
    model = stack()
    stagehand.layer(model, vram_budget=150_000)
    runtime = runtime_of(model)
    mine, theirs = saved._parts.engine, runtime._parts.engine
    assert mine.h2d.stream == theirs.h2d.stream
    assert mine.d2h.stream == theirs.d2h.stream
    assert saved._parts.arena.account.whole is runtime._parts.shared.ledger.pinned
    runtime.shutdown()
