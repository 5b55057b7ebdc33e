"""After a failure at any point where memory, events or copies are asked for."""

import contextlib
import itertools
import sys
import warnings

import pytest
from keeping import assert_same, emptied, flush, gradients, inputs, plain, stack

import stagehand
from stagehand.activations.carrier import Carrier, Leaving
from stagehand.activations.pool import SlabPool
from stagehand.core.arena import Arena
from stagehand.core.device import AcceleratorDevice
from stagehand.core.traffic import Traffic
from stagehand.core.transfer import TransferEngine

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


@contextlib.contextmanager
def interrupted_at(number, *functions):
    """Raise at the line of some functions that is reached as the `number`-th."""
    codes = {function.__code__ for function in functions}
    lines = itertools.count()

    def look(frame, event, _):
        if frame.f_code not in codes:
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(before)
            raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


SENDING = (
    *(Leaving.take, Carrier.send, TransferEngine.send_group),
    *(TransferEngine._put_aside, Traffic.put_aside),
)


@pytest.mark.parametrize("aside", [False, True], ids=["at once", "put aside"])
def test_interrupt_while_tensors_leave_frees_nothing_that_is_being_copied(sim, aside):
    """Copies were queued that nobody knew of: their sources were freed, and what was
    put aside was copied into a slab of others."""
    model = stack(2).to("hpu")
    expected = gradients(model, plain)
    traffic = Traffic(h2d_slots=8, d2h_slots=8)
    if aside:
        traffic.yield_home(1 << 20)
    for number in itertools.count(0, 3):
        interrupted = False
        with emptied(stagehand.activations(BUDGET)) as saved:
            saved._parts.engine.join(traffic)
            try:
                with interrupted_at(number, *SENDING):
                    gradients(model, plain, saved)
            except KeyboardInterrupt:
                interrupted = True
            flush()
            for _ in range(2):
                assert_same(gradients(model, plain, saved), expected)
        if not interrupted:
            break
    assert number > 200


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
