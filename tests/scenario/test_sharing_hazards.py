"""What may go wrong between models that share a device: edits, threads, dead passes."""

import gc
import itertools
import threading
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy

import pytest
import torch
from small import (
    LAYER_BYTES,
    WIDTH,
    batch,
    blocks_of,
    run_resident,
    runtime_of,
    stack,
)
from test_sharing import crowd, guarded, in_threads, places, varied, wide_model
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at, interrupted_at_call
from stagehand.core import turn
from stagehand.core.turn import awaited_by
from stagehand.errors import DeadlockError
from stagehand.passing import Passing
from stagehand.residency import shared
from stagehand.residency.mover import Mover
from stagehand.residency.shared import SharedDevice
from stagehand.torch_private import is_autograds
from stagehand.weights import edges
from tracing import traced

__all__ = ["crowd"]

ONE = LAYER_BYTES  # room for one block: a model runs only if the other gives up all
SMALL = 2 * 256  # an nn.LayerNorm(WIDTH), with both of its tensors rounded up


@contextmanager
def elsewhere(begin, end=lambda: None):
    """Do something in another thread, and its end only after a second one waits."""
    began, over, errors = threading.Event(), threading.Event(), []

    def run():
        begin()
        began.set()
        over.wait(timeout=120)
        end()

    # Python does not wait for it at exit, where it waits for ever.
    thread = threading.Thread(target=guarded(run, errors), daemon=True)
    thread.start()
    assert began.wait(timeout=120)
    try:
        yield over
    finally:
        over.set()
        thread.join(timeout=120)
    assert errors == []
    assert not thread.is_alive()


def let_go_when_asked(runtime, over, monkeypatch):
    """End what the other thread does once it is asked for its memory, in vain."""
    give_up = runtime._tenancy.give_up

    def asked(keep_bytes, **leaves):
        given = give_up(keep_bytes, **leaves)
        if not given:
            over.set()
        return given

    monkeypatch.setattr(runtime._tenancy, "give_up", asked)


def interrupt(*_, **__):
    raise KeyboardInterrupt


def runner_of(models, place):
    """What runs models that are about to be streamed, and checks their outputs."""
    expected = [run_resident(model, place, batch()) for model in models]

    def run(*numbers):
        for number in numbers:
            with torch.no_grad():
                output = models[number](batch())
            assert_bitwise_equal(output, expected[number], f"model {number}")

    return run


def wait_until(happens):
    """For what another thread does next, and tells nobody."""
    while not happens():
        threading.Event().wait(0.001)


# Edits


@pytest.mark.parametrize("when", ["before the first pass", "after it was warmed"])
def test_an_edit_of_what_always_stays_is_not_lost_to_another_model(sim, when):
    """Its tensors are on the device outside of passes, where `.data` moves no version
    counter: whether a pass has ended since they came does not matter.
    """
    plain = nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, 0))
    model = stagehand.layer(
        nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, 0)),
        vram_budget=4 * LAYER_BYTES,
        device="hpu",
    )
    tenancy = runtime_of(model)._tenancy
    if when != "before the first pass":
        with torch.no_grad():
            model(batch())
        tenancy.give_up(0)
        tenancy.warm()
    assert model[0].weight.device.type == "hpu"
    model[0].weight.data.mul_(2)
    plain[0].weight.data.mul_(2)
    tenancy.give_up(0)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), run_resident(plain, "hpu", batch()), "out")
    runtime_of(model).shutdown()


class Halves(nn.Module):
    """Each pass goes through one half of its layers, or through the other."""

    def __init__(self):
        super().__init__()
        self.halves = nn.ModuleList((stack(4), stack(4)))

    def forward(self, x, number):
        return self.halves[number](x)


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize("layers", range(4, 9))
def test_an_edit_of_what_comes_ahead_of_its_next_pass_to_stay_is_not_lost(
    sim, layers, place
):
    """It had left for another model, which is gone. It is loaded at the end of a pass
    that does not use it, and is not bound before the pass that does.
    """
    plain = Halves()
    model = stagehand.layer(
        deepcopy(plain), vram_budget=layers * LAYER_BYTES, device=place
    )
    with torch.no_grad():
        for number in (0, 1) * 8:
            model(batch(), number)
        runtime_of(model)._tenancy.give_up(0)
        for number in (0, 1, 0):
            output = model(batch(), number)
            expected = run_resident(plain, place, batch(), number)
            assert_bitwise_equal(output, expected, f"half {number}")
            torch.accelerator.synchronize()
            for parameter in (*plain.parameters(), *model.parameters()):
                parameter.data.mul_(2)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize("latest", ["a pass", "a block by hand"])
def test_an_edit_that_goes_on_while_another_model_takes_the_room_is_not_lost(
    sim, latest, place
):
    """As an optimizer's step is beside another thread's pass: it has read where the
    weights are, and writes there after the other model's pass has begun.
    """
    plain = stack(4)
    model, other = stack(4), stack(4)
    for each in (model, other):
        stagehand.layer(each, vram_budget=6 * LAYER_BYTES, device=place)
    with torch.no_grad():
        model(batch())
        if latest != "a pass":
            runtime_of(model).before_block("2.0")
            runtime_of(model).after_block("2.0")
        where = [parameter.data for parameter in model.parameters()]
        in_threads(lambda: other(batch()))
        for tensor in (*where, *(p.data for p in plain.parameters())):
            tensor.mul_(2)
        output = model(batch())
    assert_bitwise_equal(output, run_resident(plain, place, batch()), "out")
    for each in (model, other):
        runtime_of(each).shutdown()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize(
    "then", ["a block by hand", "one around a pass", "a load ahead", "a move"]
)
def test_edits_of_a_model_that_was_alone_come_home_when_another_one_has_joined(
    sim, then, place
):
    """Until then what stays is on the device between passes, where `.data` moves no
    version counter; whatever comes next sends it home.
    """
    plain, model, other = stack(4), stack(4), stack(4)
    stagehand.layer(model, vram_budget=6 * LAYER_BYTES, device=place)
    runtime = runtime_of(model)
    with torch.no_grad():
        model(batch())
        for parameter in (*plain.parameters(), *model.parameters()):
            parameter.data.mul_(2)
        stagehand.layer(other, vram_budget=12 * LAYER_BYTES, device=place)
        if then == "a load ahead":
            runtime._tenancy.warm()
        elif then == "a move":
            model.to(place)
        else:
            runtime.before_block("2.0")
            if then == "one around a pass":
                model(batch())
            runtime.after_block("2.0")
        runtime._tenancy.give_up(0)
        output = model(batch())
    assert_bitwise_equal(output, run_resident(plain, place, batch()), "out")
    for each in (model, other):
        runtime_of(each).shutdown()


def test_memory_is_not_freed_under_who_has_read_a_weight_while_it_was_asked_for(
    sim, monkeypatch
):
    """A thread between two passes may do so until the weight points to the host."""
    models = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, 0)) for _ in range(2)]
    for model in models:
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    first = models[0][0].weight
    vacate, read = Mover.vacate, []

    def vacated(self, block, slot):
        if any(t is first for t in block.tensors):
            in_threads(lambda: read.append(first.data.clone()))
        vacate(self, block, slot)

    monkeypatch.setattr(Mover, "vacate", vacated)
    with torch.no_grad():
        models[0](batch())
        runtime_of(models[0])._tenancy.give_up(0)
    assert read[0].device.type == "hpu"
    assert first.device.type == "cpu"
    for model in models:
        runtime_of(model).shutdown()


# Threads


def test_a_model_that_another_thread_moves_is_waited_for(crowd, monkeypatch):
    """Whoever saves or moves a model has its lock without being in a pass."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0)
    first = some.runtimes[0]
    lock = first._edges.lock
    with elsewhere(lock.acquire, lock.release) as over:
        let_go_when_asked(first, over, monkeypatch)
        some.run(1)


def test_a_block_that_another_thread_uses_by_hand_is_waited_for(crowd, monkeypatch):
    some = crowd("hpu", [6, 7], ONE)
    some.run(0)
    first = some.runtimes[0]
    block = first.block_ids[2]
    with elsewhere(
        lambda: first.before_block(block), lambda: first.after_block(block)
    ) as over:
        let_go_when_asked(first, over, monkeypatch)
        some.run(1)


@pytest.mark.parametrize("how", ["PRIMARY", "SECONDARY", "kept"])
def test_what_is_held_stays_while_its_own_model_waits_for_more_room(
    crowd, monkeypatch, how
):
    """Its hold is newer than what the other one has, whose lock is taken."""
    some = crowd("hpu", [4, 9], 6 * LAYER_BYTES)
    some.run(0, 1, 0, 1, 1)
    mine, other = some.runtimes
    here = mine._parts.weights.held_bytes
    assert 0 < here < 4 * LAYER_BYTES
    assert other._parts.weights.held_bytes > 2 * LAYER_BYTES
    lock, withs = other._edges.lock, ExitStack()
    if how == "kept":
        withs.enter_context(mine.keep_resident())
    else:
        mine.reserve_for_resident(priority=stagehand.ResidentPriority[how])
    with withs, elsewhere(lock.acquire, lock.release) as over:
        let_go_when_asked(other, over, monkeypatch)
        loaded = some.loads(0, lambda: some.run(0))
    assert loaded == 4 * LAYER_BYTES - here


def test_room_that_is_missing_in_the_middle_of_a_pass_is_waited_for(crowd, monkeypatch):
    """Another thread has taken it by hand since the pass began."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0)
    first = some.runtimes[0]
    block = first.block_ids[2]
    withs = ExitStack()

    def take(*_):
        over = withs.enter_context(
            elsewhere(
                lambda: first.before_block(block), lambda: first.after_block(block)
            )
        )
        let_go_when_asked(first, over, monkeypatch)

    hook = some.models[1][0].register_forward_pre_hook(take)
    with withs:
        some.run(1)
    hook.remove()
    some.run(0, 1)


@pytest.mark.parametrize("where", ["on the same device", "elsewhere"])
def test_room_that_nobody_can_give_in_the_middle_of_a_pass_is_not_waited_for(
    crowd, where
):
    """Who has it waits for a model of the thread that needs it."""
    some, apart = crowd("hpu", [6, 7], ONE), crowd("cpu", [4])
    some.run(0)
    first = some.runtimes[0]
    lock = (apart if where == "elsewhere" else some).runtimes[-1]._edges.lock
    withs = ExitStack()

    def begin():
        first.before_block(first.block_ids[2])
        thread = threading.current_thread()
        waits.append(lambda: awaited_by(thread) is lock)

    def end():
        with lock:
            first.after_block(first.block_ids[2])

    def take(*_):
        over = withs.enter_context(elsewhere(begin, end))
        over.set()
        wait_until(waits[0])

    waits = []
    hook = some.models[1][0].register_forward_pre_hook(take)
    with withs, lock, torch.no_grad(), pytest.raises(stagehand.StagehandOOMError):
        some.models[1](batch())
    hook.remove()
    some.run(0, 1)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_that_need_each_others_room_in_the_middle_of_passes_do_not_stand_still(
    crowd, count
):
    """Each uses a block, by which all is taken, and then one more."""
    some = crowd("hpu", [6] * count, count * ONE)
    entering, inside = threading.Lock(), threading.Barrier(count, timeout=120)
    refused = []

    def use(runtime):
        first, second, *_ = runtime.block_ids
        with entering:
            runtime.before_block(first)
            runtime._tenancy.give_up(0)  # what came ahead
        inside.wait()
        try:
            runtime.before_block(second)
            runtime.after_block(second)
        except stagehand.StagehandOOMError as error:
            refused.append(str(error))
        runtime.after_block(first)

    in_threads(*(lambda runtime=runtime: use(runtime) for runtime in some.runtimes))
    assert len(refused) == 1
    assert refused[0].count("holds 4.35 KB") >= count - 1
    some.run(*range(count))


def test_who_is_done_with_a_model_it_refused_is_asked_again(crowd, monkeypatch):
    """All others wait for the thread that asks, so that none of them will give more."""
    some = crowd("hpu", [6, 7, 8], ONE)
    holder, block = some.runtimes[2], "2.0"
    waiting, wait = threading.Event(), SharedDevice._wait
    waiter = threading.Thread(target=some.run, args=(1,))

    def noted(device, seat):
        if threading.current_thread() is waiter:
            waiting.set()
        elif not over.is_set():
            over.set()
            wait_until(lambda: holder._edges.lock.owner is None)
        wait(device, seat)

    monkeypatch.setattr(SharedDevice, "_wait", noted)
    with elsewhere(
        lambda: holder.before_block(block), lambda: holder.after_block(block)
    ) as over:
        waiter.start()
        assert waiting.wait(timeout=120)
        some.run(0)
    waiter.join(timeout=120)
    assert not waiter.is_alive()


def test_room_that_is_promised_to_who_runs_is_promised_to_nobody_else(
    crowd, monkeypatch
):
    """A pass has begun and loaded nothing yet; another one begins beside it."""
    some = crowd("hpu", [6, 7, 8], 3 * ONE)
    holder, second, third = some.runtimes
    looked, begun, wait = threading.Event(), [], SharedDevice._wait
    thread = threading.Thread(target=some.run, args=(1,))

    def hold():
        holder.before_block("2.0")
        holder._tenancy.give_up(2 * ONE)
        assert holder._parts.weights.held_bytes == 2 * ONE

    def noted(device, seat):
        looked.set()
        wait(device, seat)

    def begin(*_):
        begun.append(second)
        looked.set()

    def look(*_):
        assert third._tenancy.limit_bytes == ONE
        assert third._parts.weights.held_bytes == 0
        thread.start()
        assert looked.wait(timeout=120)
        assert begun == []

    monkeypatch.setattr(SharedDevice, "_wait", noted)
    hooks = [
        some.models[1][0].register_forward_pre_hook(begin),
        some.models[2][0].register_forward_pre_hook(look),
    ]
    with elsewhere(hold, lambda: holder.after_block("2.0")):
        some.device._seats.run_at_once()
        some.run(2)
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert begun == [second]
    for hook in hooks:
        hook.remove()
    some.run(0, 1, 2)


def test_threads_whose_guests_the_other_one_uses_do_not_stand_still(crowd):
    """Each waits for the other to be done with a model that is to leave the device."""
    some = crowd("hpu", [6, 7], 14 * LAYER_BYTES)
    inside = threading.Barrier(2, timeout=120)

    def use(mine, other):
        block = mine.block_ids[0]
        with mine.as_guest(other):
            mine.before_block(block)
            inside.wait()
        mine.after_block(block)

    first, second = some.runtimes
    in_threads(lambda: use(first, second), lambda: use(second, first))
    some.run(0, 1)


def test_a_wait_for_a_thread_that_waits_for_autograd_ends_if_that_waits_too(
    crowd, monkeypatch
):
    """Autograd's own thread waits for the lock of the model that waits for room, which
    lets it go first: it is refused then, for the block is in use in its caller."""
    some = crowd("hpu", [6, 7], ONE)
    first = some.runtimes[0]
    loss = some.models[1](batch().to("hpu")).sum()
    waiting, errors, wait = threading.Event(), [], SharedDevice._wait

    def noted(device, seat):
        waiting.set()
        wait(device, seat)

    monkeypatch.setattr(SharedDevice, "_wait", noted)
    thread = threading.Thread(target=guarded(lambda: some.run(1), errors))
    first.before_block(first.block_ids[2])
    thread.start()
    assert waiting.wait(timeout=120)
    with pytest.raises(stagehand.StagehandOOMError):
        loss.backward()
    first.after_block(first.block_ids[2])
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert errors == []
    some.models[1].zero_grad()
    some.run(0, 1)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_threads_that_run_models_inside_of_each_other_in_a_circle_are_told(
    crowd, place, count
):
    """Each is in one model and waits for the next: one fails, the others go on."""
    some = crowd(place, range(4, 4 + count), 40 * LAYER_BYTES)
    inside, errors, ran = threading.Barrier(count, timeout=120), [], []

    def nested(number):
        following = (number + 1) % count

        def call(*_):
            hook.remove()
            inside.wait()
            some.run(following)

        hook = some.models[number][0].register_forward_pre_hook(call)
        try:
            some.run(number)
            ran.append(number)
        except DeadlockError as error:
            errors.append(str(error))

    in_threads(*(lambda number=number: nested(number) for number in range(count)))
    assert len(ran) == count - 1
    [error] = errors
    assert "for ever" in error
    assert "in the same order in every thread" in error
    for runtime in some.runtimes:
        assert runtime._tenancy.name in error
    some.run(*range(count))


@pytest.mark.parametrize("closes", ["autograd", "forward"])
def test_a_circle_through_autograds_own_thread_is_told(crowd, closes):
    """A thread in one model waits for a backward through another one, in which a second
    thread waits for the first model: autograd's thread waits on behalf of the first.
    """
    some = crowd("hpu", [4, 5], 40 * LAYER_BYTES)
    loss = some.models[1](batch().to("hpu")).sum()
    first, second = some.runtimes
    goes_back, outcomes = threading.Event(), {}

    def autograd_waits():
        """Autograd's thread and this one have a lock each, and want the other's."""
        return any(
            is_autograds(thread) and awaited_by(thread) is second._edges.lock
            for thread in threading.enumerate()
        )

    def other():
        with second._edges.lock:
            goes_back.set()
            if closes == "forward":
                wait_until(autograd_waits)
            try:
                some.run(0)
            except DeadlockError as error:
                outcomes["forward"] = str(error)

    thread = threading.Thread(target=other)
    first.before_block(first.block_ids[0])
    thread.start()
    assert goes_back.wait(timeout=120)
    if closes == "autograd":
        wait_until(lambda: awaited_by(thread) is first._edges.lock)
    try:
        loss.backward()
    except DeadlockError as error:
        outcomes["autograd"] = str(error)
    first.after_block(first.block_ids[0])
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert [*outcomes] == [closes]
    assert "waits for autograd" in outcomes[closes]
    some.models[1].zero_grad()
    some.run(0, 1)


@places
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("fails", ["a forward that begins", "a forward", "a backward"])
def test_a_block_that_is_used_by_hand_stays_so_when_a_pass_inside_of_it_fails(
    crowd, place, fails, waits, monkeypatch
):
    """And its end gives the lock back; that another thread waits for it is no reason
    to wait for that."""
    some = crowd(place, [4], 40 * LAYER_BYTES)
    model, (runtime,) = some.models[0], some.runtimes
    output = model(batch()).sum()
    refusal = stagehand.StagehandOOMError("no room", needed_bytes=1, limit_bytes=1)

    def refuse(*_):
        raise refusal

    def call():
        if fails == "a backward":
            output.backward()
        else:
            some.run(0)

    runtime.before_block("2.0")
    errors = []
    other = threading.Thread(target=guarded(lambda: some.run(0), errors), daemon=True)
    if waits:
        other.start()
        wait_until(lambda: runtime._edges.lock.waiting())
    with ExitStack() as hooks:
        if fails == "a forward that begins":
            monkeypatch.setattr(runtime._tenancy, "begin", refuse)
            hooks.callback(monkeypatch.undo)
        elif fails == "a forward":
            hooks.enter_context(model[3].register_forward_pre_hook(refuse))
        else:
            hooks.enter_context(next(model[3].parameters()).register_hook(refuse))
        with pytest.raises(stagehand.StagehandOOMError, match="no room"):
            call()
    block = next(b for b in blocks_of(model) if b.name == "2.0")
    assert block.uses == 1
    assert block.bound
    with pytest.raises(stagehand.ConfigError, match=r"'3\.0' is not in use"):
        runtime.after_block("3.0")
    with pytest.raises(stagehand.ConfigError, match=r"'2\.0' is in use"):
        runtime.park()
    runtime.after_block("2.0")
    if waits:
        other.join(60)
        assert not other.is_alive()
    assert errors == []
    assert runtime._edges.lock.owner is None
    runtime.park()
    some.run(0)


def test_a_block_by_hand_goes_on_when_a_pass_inside_of_it_was_interrupted(crowd):
    """The next pass closes what that has left, and no more."""
    some = crowd("hpu", [4], 40 * LAYER_BYTES)
    (runtime,) = some.runtimes

    runtime.before_block("2.0")
    with (
        some.models[0][3][0].register_forward_pre_hook(interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        some.run(0)
    some.run(0)
    assert runtime._edges.lock.owner is threading.current_thread()
    runtime.after_block("2.0")
    assert runtime._edges.lock.owner is None
    runtime.park()
    some.run(0)


@pytest.mark.parametrize("asks", ["backward", "thread"])
def test_a_block_by_hand_goes_on_when_another_thread_finds_an_interrupted_pass(
    crowd, asks
):
    """That ended the use as well: `after_block()` was refused."""
    some = crowd("hpu", [5, 5], 7 * LAYER_BYTES)
    runtime = some.runtimes[0]
    some.run(0)
    runtime.before_block("0.0")
    with (
        some.models[0][3][0].register_forward_pre_hook(interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        some.run(0)
    if asks == "backward":  # which another thread runs
        some.models[1](batch()).sum().backward()
        some.models[1].zero_grad()
    else:
        in_threads(lambda: runtime._edges.try_lock())
        assert runtime._edges.lock.owner is threading.current_thread()
    (block,) = (b for b in blocks_of(some.models[0]) if b.name == "0.0")
    assert block.by_hand == 1
    runtime.after_block("0.0")
    in_threads(lambda: some.run(0, 1))


@places
def test_a_block_by_hand_goes_on_where_its_module_was_not_even_entered(crowd, place):
    """The module's end, which is told nevertheless, ended the use by hand."""
    some = crowd(place, [4], 3 * LAYER_BYTES)
    (runtime,) = some.runtimes

    def fail(*_):
        raise RuntimeError("as a user's hook may")

    some.run(0, 0)
    runtime.before_block("2.0")
    hook = some.models[0][2][0].register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(RuntimeError, match="as a user's hook may"):
        some.run(0)
    hook.remove()
    assert runtime._parts.scheduler.in_use == ["2.0"]
    some.run(0)
    runtime.after_block("2.0")
    assert runtime._parts.scheduler.in_use == []
    some.run(0)


def test_a_block_by_hand_is_in_use_as_long_as_its_thread_has_the_lock(crowd):
    """An interrupt where the use began left it without, for good; and one where it
    ended gave the lock back, and let it go on."""
    some = crowd("hpu", [4], 3 * LAYER_BYTES)
    (runtime,) = some.runtimes
    some.run(0, 0)
    for number in itertools.count(1):
        interrupted = False
        try:
            with interrupted_at_call(number, *_USING_BY_HAND):
                runtime.before_block("2.0")
                runtime.after_block("2.0")
        except KeyboardInterrupt:
            interrupted = True
        if blocks_of(some.models[0])[2].by_hand:
            assert runtime._edges.lock.owner is threading.current_thread()
            runtime.after_block("2.0")
        some.run(0)
        assert runtime._edges.lock.owner is None, number
        runtime.park()
        some.run(0)
        if not interrupted:
            break
    assert number > 40


_USING_BY_HAND = {
    *("stagehand.runtime", "stagehand.core.turn", "stagehand.weights.edges"),
    *(f"stagehand.residency.{name}" for name in ("scheduler", "lookahead", "mover")),
}


def test_a_block_by_hand_of_a_thread_that_died_in_a_pass_is_in_use_no_more(crowd):
    some = crowd("hpu", [4], 40 * LAYER_BYTES)
    (runtime,) = some.runtimes

    def die():
        runtime.before_block("2.0")
        hook = some.models[0][3][0].register_forward_pre_hook(interrupt)
        try:
            with suppress(KeyboardInterrupt):
                some.models[0](batch())
        finally:
            hook.remove()

    in_threads(die)
    some.run(0)
    assert runtime._edges.lock.owner is None
    runtime.park()
    some.run(0)


def test_a_block_by_hand_that_cannot_be_filled_is_not_in_use(crowd, monkeypatch):
    some = crowd("hpu", [4])
    (runtime,) = some.runtimes

    def fail(_):
        raise RuntimeError("as a cast may")

    monkeypatch.setattr(runtime._uses.casts, "fill", fail)
    with pytest.raises(RuntimeError, match="as a cast may"):
        runtime.before_block("2.0")
    monkeypatch.undo()
    assert runtime._edges.lock.owner is None
    runtime.park()
    some.run(0)


def test_a_model_that_was_left_by_an_interrupt_closes_no_circle(crowd):
    """Who waits for it takes it over."""
    some = crowd("hpu", [4, 5], 40 * LAYER_BYTES)
    first, second = some.runtimes

    hook = some.models[0][2][0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        some.run(0)
    hook.remove()
    assert first._edges.lock.owner is threading.current_thread()
    inside = threading.Event()

    def other():
        with second._edges.lock:
            inside.set()
            some.run(0)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(timeout=120)
    some.run(1)
    thread.join(timeout=120)
    assert not thread.is_alive()
    some.run(0, 1)


def test_a_block_that_is_used_by_hand_is_named_where_nobody_can_end_it(crowd):
    """The thread that uses it waits for the model that needs its memory."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0, 1)
    first = some.runtimes[0]
    first.before_block(first.block_ids[2])
    with torch.no_grad(), pytest.raises(stagehand.StagehandOOMError) as caught:
        some.models[1](batch())
    assert "Sequential holds 4.35 KB" in str(caught.value)
    first.after_block(first.block_ids[2])
    some.run(1, 0)


@pytest.mark.parametrize("first", ["the model", "a part"])
def test_a_model_may_join_while_a_pass_of_another_one_has_all_the_room(crowd, first):
    """What always stays on the device comes with the first pass then."""
    some = crowd("hpu", [9], 3 * LAYER_BYTES)
    some.run(0, 0)
    inside, goes_on = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        goes_on.wait(timeout=120)

    hook = some.models[0][8][0].register_forward_pre_hook(stop)
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH)), *varied(6, 0))
    called = model if first == "the model" else model[0][0]
    expected = run_resident(called, "hpu", batch())
    thread = threading.Thread(target=some.run, args=(0,))
    thread.start()
    assert inside.wait(timeout=120)
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device="hpu")
    if first == "the model":
        values = model.state_dict()  # parks the model, and brings it back
        assert values["0.0.weight"].device.type == "cpu"
    goes_on.set()
    thread.join(timeout=120)
    hook.remove()
    with torch.no_grad():
        assert_bitwise_equal(called(batch()), expected, "output")
    some.run(0)
    runtime_of(model).shutdown()


def test_nobody_makes_room_by_a_model_that_is_being_made(crowd):
    """Others know it before it is whole: a block was taken from the device in the
    middle of being placed there.
    """
    some = crowd("hpu", [6], 4 * LAYER_BYTES)
    some.run(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, 1))
    expected = run_resident(model, "hpu", batch())
    lines, gave = itertools.count(1), []

    def ask():
        tenant = some.device._seats.all()[-1].tenant
        gave.append(tenant.give_up(0, leaves=True))
        tenant.warm()

    def trace(frame, event, _):
        name = frame.f_globals.get("__name__", "")  # those hold no locks of others
        if name not in _MAKING:
            return None
        if event != "line":  # when its constructor returns it is whole
            return trace
        if len(some.device._seats) == 2 and not next(lines) % 11:
            in_threads(ask)
        return trace

    with traced(trace):
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    assert len(gave) > 10
    assert not any(gave)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    in_threads(ask)
    assert gave[-1]
    runtime_of(model).shutdown()
    some.run(0)


def test_an_interrupt_while_a_model_joins_leaves_no_place_of_it(crowd):
    """It was there for good, and its budget was everybody's."""
    some = crowd("hpu", [6], 4 * LAYER_BYTES)
    model = wide_model()
    for number in itertools.count(1, 3):
        try:
            with interrupted_at(number, *_JOINING):
                stagehand.layer(model, vram_budget=40 * LAYER_BYTES, device="hpu")
            break
        except KeyboardInterrupt:
            assert len(some.device.holdings()) == 1, number
            assert some.device.ledger.device.limit_bytes == 4 * LAYER_BYTES
    assert number > 50
    runtime_of(model).shutdown()
    some.run(0)


_MAKING = {
    *("stagehand.runtime", "stagehand.passing", "stagehand.placing"),
    "stagehand.residency.mover",
}
_JOINING = {
    *("stagehand.tenancy", "stagehand.residency.shared", "stagehand.residency.seats"),
}


def test_an_interrupt_where_locks_are_taken_and_given_back_leaves_none_taken(crowd):
    """A condition gives its lock back in Python: backward, in another thread, hung."""
    some = crowd("hpu", [6], 4 * LAYER_BYTES)
    for number in range(1, 30):
        with suppress(KeyboardInterrupt), interrupted_at(number, "threading"):
            some.run(0)
        assert is_free(some.device), number
    some.run(0)


def is_free(device):
    """Whether another thread can have the device's lock."""
    free = []

    def ask():
        free.append(device._lock.acquire(blocking=False))
        if free[-1]:
            device._lock.release()

    in_threads(ask)
    return free[0]


def test_an_interrupt_while_a_model_leaves_keeps_neither_its_place_nor_the_lock(crowd):
    """All other threads hung; or its budget was everybody's for good."""
    some = crowd("hpu", [6], 4 * LAYER_BYTES)
    for number in itertools.count(1):
        interrupted = False
        model = stagehand.layer(stack(2), vram_budget=6 * LAYER_BYTES, device="hpu")
        runtime = runtime_of(model)
        try:
            with interrupted_at_call(number, *_LEAVING):
                runtime.shutdown()
        except KeyboardInterrupt:
            interrupted = True
        assert is_free(some.device), number
        runtime.shutdown()
        assert len(some.device.holdings()) == 1, number
        assert some.device.ledger.device.limit_bytes == 4 * LAYER_BYTES, number
        if not interrupted:
            break
    assert number > 40
    some.run(0)


_LEAVING = {"stagehand.residency.shared", "stagehand.residency.seats"}


@pytest.mark.parametrize("hold", ["keep_resident", "as_guest"])
def test_an_interrupt_where_a_hold_begins_or_ends_leaves_no_hold(crowd, hold):
    """It was there for good, and a guest did not leave."""
    some = crowd("hpu", [6, 6], 6 * LAYER_BYTES)
    host, other = map(runtime_of, some.models)
    code = {*_LEAVING, "stagehand.sharing", "stagehand.residency.holds"}
    for number in itertools.count(1):
        interrupted, began = False, []
        some.run(1)
        try:
            with interrupted_at_call(number, *code), getattr(host, hold)(other):
                began.append(number)
        except KeyboardInterrupt:
            interrupted = True
        assert is_free(some.device), number
        theirs = some.device.holdings()[1]
        assert theirs.why == "not held", number
        assert theirs.held_bytes > 0 or hold == "as_guest", number
        assert theirs.held_bytes == 0 or hold == "keep_resident" or not began, number
        if not interrupted:
            break
    assert number > 20
    some.run(0)


class Topped(nn.Sequential):
    """A stack with a parameter of its own, which always stays on the device."""

    def __init__(self):
        super().__init__(*varied(4, 0))
        self.top = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1), requires_grad=False)

    def forward(self, x):
        return super().forward(x @ self.top)


@pytest.mark.parametrize("held", ["not", "SECONDARY", "kept"])
def test_who_waits_for_room_gives_what_is_not_held_to_who_cannot_go_on_without(
    sim, monkeypatch, held
):
    """A thread waits for a pass that needs, for a model inside of it, what it has. What
    is kept leaves each other model what it needs, too.
    """
    topped, other, wide = Topped(), varied(6, 1), wide_model()
    models = {topped: 0, other: 0, wide: 0}
    expected = {model: run_resident(model, "hpu", batch()) for model in models}
    for model in models:
        stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device="hpu")

    def run(model):
        with torch.no_grad():
            assert_bitwise_equal(model(batch()), expected[model], "output")

    for model in (wide, other, topped):
        run(model)
    runtime, withs = runtime_of(topped), ExitStack()
    waiting, wait = threading.Event(), SharedDevice._wait

    def noted(device, seat):
        waiting.set()
        wait(device, seat)

    def cross(*_):
        hook.remove()
        runtime.place()
        if held == "kept":
            withs.enter_context(runtime.keep_resident())
        elif held != "not":
            runtime.reserve_for_resident(priority=stagehand.ResidentPriority[held])
        thread.start()
        assert waiting.wait(timeout=120)
        assert runtime._parts.weights.held_bytes == LAYER_BYTES - 256
        run(wide)

    monkeypatch.setattr(SharedDevice, "_wait", noted)
    hook = other[3].register_forward_pre_hook(cross)
    thread = threading.Thread(target=run, args=(topped,))
    with withs:
        run(other)
        thread.join(timeout=120)
        assert not thread.is_alive()
    for model in models:
        run(model)
    for model in models:
        runtime_of(model).shutdown()


def test_a_pass_that_died_with_its_thread_is_not_waited_for(crowd):
    """`SystemExit` and the like skip the hooks that would have ended the pass."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0, 1)

    def die(*_):
        raise SystemExit

    hook = some.models[0][3][0].register_forward_pre_hook(die)
    with pytest.raises(SystemExit):
        in_threads(lambda: some.run(0))
    hook.remove()
    some.run(1, 0, 1)


def test_a_model_may_be_dropped_while_another_thread_holds_the_device(crowd):
    """The garbage collector drops it in the middle of anything, accounts' locks held:
    to wait for the device there would be a standstill.
    """
    some = crowd("hpu", [3, 4])
    some.run(0, 1)
    changed = some.device._changed
    with elsewhere(changed.acquire, changed.release):
        del some.models[1], some.plain[1]
        assert not changed.acquire(blocking=False), "the drop has waited"
    assert [h.name for h in some.device.holdings()] == ["Sequential"]
    some.run(0)
    some.look()


def test_a_model_may_be_dropped_in_the_middle_of_a_division(crowd):
    some = crowd("hpu", [3, 4])
    some.run(0, 1)
    with some.device._changed:
        seats = iter(some.device._seats._seats.values())
        next(seats)
        del some.models[1], some.plain[1]
        next(seats)  # still the same dictionary
    some.run(0)
    assert [h.name for h in some.device.holdings()] == ["Sequential"]


@pytest.mark.parametrize("asked", ["warm", "give_up"])
@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_a_model_that_is_dropped_while_it_is_asked_for_something_fails_no_other(
    crowd, monkeypatch, place, asked
):
    """Another thread, or the garbage collector, lets go of it in the middle."""
    some = crowd(place, [6, 7], 4 * LAYER_BYTES)
    some.run(*[0, 1] * (3 if asked == "warm" else 1))  # then it knows who is next
    scheduler = some.runtimes[1]._parts.scheduler
    does, dropped = getattr(scheduler, asked), []

    def drop_first(*args, **kwargs):
        if not dropped:
            dropped.append(in_threads(some.models.pop))
            some.plain.pop()
        return does(*args, **kwargs)

    monkeypatch.setattr(scheduler, asked, drop_first)
    some.run(0)
    assert dropped
    assert [h.name for h in some.device.holdings()] == ["Sequential"]
    some.run(0)


def test_a_model_that_is_shut_down_by_another_thread_loads_nothing_any_more(
    crowd, monkeypatch
):
    some = crowd("hpu", [6, 7], 4 * LAYER_BYTES)
    some.run(*[0, 1] * 3)
    second = some.runtimes[1]
    closing, over, errors = threading.Event(), threading.Event(), []
    give_back = second._give_back

    def wait(model):
        closing.set()
        over.wait(timeout=120)
        give_back(model)

    monkeypatch.setattr(second, "_give_back", wait)
    thread = threading.Thread(target=guarded(second.shutdown, errors))
    thread.start()
    assert closing.wait(timeout=120)
    some.run(0)
    assert second._parts.weights.held_bytes == 0
    over.set()
    thread.join(timeout=120)
    assert errors == []
    some.run(0)


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_a_dropped_model_that_is_not_forgotten_yet_is_not_waited_for(crowd, place):
    """While another thread had the device, nobody could forget it."""
    some = crowd(place, [6, 7, 8], ONE)
    first, third = some.runtimes[0], some.runtimes[2]
    some.run(0, 1, 2)
    third.before_block("2.0")  # all the room, by hand
    changed = some.device._changed
    with elsewhere(changed.acquire, changed.release):
        del some.models[1], some.plain[1]
        gc.collect()
    gc.collect()
    assert some.device._gone
    with pytest.raises(stagehand.StagehandOOMError, match="Sequential 3 holds"):
        first.before_block("2.0")
    third.after_block("2.0")
    some.expected.pop(1)
    some.run(0, 1)


def test_a_guest_whose_lock_another_thread_has_is_waited_for_on_exit(
    crowd, monkeypatch
):
    some = crowd("hpu", [4, 9])
    host, guest = some.runtimes
    withs, lock = ExitStack(), guest._edges.lock
    withs.enter_context(host.as_guest(guest))
    some.run(1)
    with elsewhere(lock.acquire, lock.release) as over:
        let_go_when_asked(guest, over, monkeypatch)
        withs.close()
    assert guest._parts.weights.held_bytes == 0


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_a_guest_that_still_runs_on_exit_is_gone_at_the_end_of_its_pass(crowd, where):
    some = crowd("hpu", [4, 9])
    host, guest = some.runtimes
    withs, held = ExitStack(), []
    withs.enter_context(host.as_guest(guest))

    def leave(*_):
        if where == "here":
            withs.close()
        else:
            in_threads(withs.close)
        held.append(guest._parts.weights.held_bytes)

    hook = some.models[1][3][0].register_forward_pre_hook(leave)
    some.run(1)
    hook.remove()
    assert held[0] > 0
    assert guest._parts.weights.held_bytes == 0
    some.run(1)
    assert guest._parts.weights.held_bytes > 0


# Locks that are looked at from outside while their owners go on


def test_an_owner_that_goes_on_while_it_is_looked_at_keeps_its_turn(crowd, monkeypatch):
    """It had come back to its model, and is outside of the library when it is seen."""
    some = crowd("hpu", [6], 40 * ONE)
    some.run(0)
    lock = some.runtimes[0]._edges.lock
    back, looked, runs, ends = (threading.Event() for _ in range(4))
    looks, sort = turn.runs_library, turn.Turn.sorted

    def look(owner):
        if owner is runner:
            looked.set()
            assert runs.wait(timeout=120)
        return looks(owner)

    def sorted_(self):
        if self is lock and self._count > 1 and not back.is_set():
            back.set()
            assert looked.wait(timeout=120)
        sort(self)

    def run(*_):
        runs.set()
        assert ends.wait(timeout=120)
        assert lock.owner is runner

    hook = some.models[0][0][0].register_forward_pre_hook(run)
    monkeypatch.setattr(turn.Turn, "sorted", sorted_)
    monkeypatch.setattr(turn, "runs_library", look)
    failed = []
    runner = threading.Thread(target=guarded(lambda: some.run(0), failed))
    runner.start()
    assert back.wait(timeout=120)
    assert not lock.try_acquire()
    ends.set()
    runner.join(timeout=120)
    hook.remove()
    assert failed == []


def test_an_owner_that_ends_its_use_while_it_is_looked_at_gives_its_turn_back_itself(
    crowd, monkeypatch
):
    some = crowd("hpu", [6], 40 * ONE)
    some.run(0)
    runtime = some.runtimes[0]
    lock, in_use = runtime._edges.lock, Passing.in_use
    asked, failed = threading.Event(), []

    def ask(self):
        """The other thread ends its use before the answer, and is not done then."""
        looks = threading.current_thread() is not hand
        if looks and not asked.is_set():
            asked.set()
            wait_until(lambda: not in_use(self))
        return in_use(self)

    def by_hand():
        runtime.before_block("2.0")
        begun.set()
        assert asked.wait(timeout=120)
        runtime.after_block("2.0")

    begun, looks = threading.Event(), edges.runs_library

    def look(owner):
        """Or before the question."""
        given = looks(owner)
        if not asked.is_set():
            asked.set()
            wait_until(lambda: not in_use(runtime._passing))
        return given

    monkeypatch.setattr(Passing, "in_use", ask)
    monkeypatch.setattr(edges, "runs_library", look)
    hand = threading.Thread(target=guarded(by_hand, failed))
    hand.start()
    assert begun.wait(timeout=120)
    assert not lock.try_acquire()
    hand.join(timeout=120)
    assert failed == []
    assert lock.owner is None
    assert lock._count == 0


@pytest.mark.parametrize("needs", ["room", "the model"])
def test_a_thread_in_a_backward_of_its_own_is_not_taken_for_one_that_waits(
    crowd, monkeypatch, needs
):
    """Autograd's thread waits for it: it computes on the host, and does go on."""
    some = crowd("hpu", [6, 7], ONE if needs == "room" else 40 * ONE)
    some.run(0, 1)
    runtime = some.runtimes[needs == "the model"]
    inside, goes_on, failed = threading.Event(), threading.Event(), []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            inside.set()
            assert goes_on.wait(timeout=120)
            return grad * 2

    def other():
        runtime.before_block("2.0")
        Slow.apply(torch.ones(3, requires_grad=True)).sum().backward()
        assert runtime._edges.lock.owner is threading.current_thread()
        runtime.after_block("2.0")

    def look(*args, **kwargs):
        goes_on.set()
        return wait(*args, **kwargs)

    wait = turn.Turn._note_wait if needs == "the model" else SharedDevice._wait
    owner = turn.Turn if needs == "the model" else SharedDevice
    loss = some.models[1](batch().to("hpu")).sum()
    thread = threading.Thread(target=guarded(other, failed))
    thread.start()
    assert inside.wait(timeout=120)
    monkeypatch.setattr(owner, wait.__name__, look)
    loss.backward()
    thread.join(timeout=120)
    assert failed == []
    assert not thread.is_alive()
    some.models[1].zero_grad()


# Room


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("cap", [2, 3, 4, 6, 12])
def test_a_model_runs_in_what_is_free_beside_a_block_in_use(crowd, place, cap):
    """Its floor is there, though not all that it would have by itself."""
    some = crowd(place, [6, 7], cap * ONE)
    some.run(0, 1, 0)
    first = some.runtimes[0]
    first.before_block("2.0")
    some.run(1)
    first.after_block("2.0")
    some.run(0, 1)


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("cap", [2, 3])
def test_a_model_runs_inside_of_another_one_in_what_is_free_beside_it(
    crowd, count, cap
):
    some = crowd("hpu", range(6, 6 + count), cap * ONE)
    some.run(*range(count), *range(count))
    hook = some.models[0][2][0].register_forward_pre_hook(
        lambda *_: some.run(count - 1)
    )
    some.run(0, 0)
    hook.remove()


def test_room_that_another_thread_takes_first_is_made_anew(crowd, monkeypatch):
    """Between the moment when it was freed and that when it is had."""
    some = crowd("hpu", [6, 7, 8], 2 * ONE)
    first, second, _ = some.runtimes
    some.run(0, 1, 2)
    for runtime in (first, second):
        runtime._tenancy.give_up(0)
    make, withs, taken = SharedDevice.make_room, ExitStack(), []

    def made(device, number, nbytes, **how):
        there = make(device, number, nbytes, **how)
        if number == first._tenancy.number and not taken:
            taken.append(there)
            take = elsewhere(
                lambda: second.before_block("1.0"), lambda: second.after_block("1.0")
            )
            withs.enter_context(take)
        return there

    monkeypatch.setattr(SharedDevice, "make_room", made)
    with withs:
        first.before_block("1.0")
        first.after_block("1.0")
    assert taken == [True]
    some.run(0, 1, 2)


def test_passes_keep_the_room_they_were_promised_when_the_largest_budget_leaves(crowd):
    """The cap sinks when they have ended."""
    some = crowd("hpu", [6, 7, 8], [2 * ONE, 2 * ONE, 6 * ONE])
    some.run(0, 1, 2)
    account = some.device.ledger.device
    some.device._seats.run_at_once()
    for runtime in some.runtimes:
        runtime._tenancy.give_up(0)
    inside = threading.Barrier(3, timeout=120)
    left, over = threading.Event(), threading.Event()

    def stop(number):
        def call(*_):
            hooks[number].remove()
            inside.wait()
            assert left.wait(timeout=120)
            if number:
                assert over.wait(timeout=120)

        return call

    def run(number):
        with torch.no_grad():
            output = some.models[number](batch())
        assert_bitwise_equal(output, some.expected[number], f"model {number}")
        over.set()

    def leave():
        inside.wait()
        runtime_of(some.models[2]).shutdown()
        assert account.limit_bytes == 4 * ONE
        left.set()

    hooks = [
        some.models[0][0].register_forward_pre_hook(stop(0)),
        some.models[1][4].register_forward_pre_hook(stop(1)),
    ]
    in_threads(lambda: run(0), lambda: run(1), leave)
    assert account.limit_bytes == 2 * ONE
    some.run(0, 1)


def test_a_pass_in_which_tensors_join_takes_nothing_that_was_promised(crowd):
    """The model is planned anew with them, for what others leave of its budget."""
    some = crowd("hpu", [6, 7], [3 * ONE, 5 * ONE])
    some.run(0, 1)
    some.device._seats.run_at_once()
    for runtime in some.runtimes:
        runtime._tenancy.give_up(0)
    inside, over = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        assert over.wait(timeout=120)

    def look(*_):
        tenancy = some.runtimes[1]._tenancy
        assert tenancy.account.peak_bytes <= tenancy.limit_bytes < 5 * ONE

    def join():
        assert inside.wait(timeout=120)
        some.models[1][0].register_parameter("scale", nn.Parameter(torch.ones(8)))
        some.runtimes[1]._parts.weights.reset_peak()
        try:
            some.run(1)
        finally:
            over.set()

    hooks = [
        some.models[0][0].register_forward_pre_hook(stop),
        some.models[1][0].register_forward_pre_hook(look),
    ]
    in_threads(lambda: some.run(0), join)
    for hook in hooks:
        hook.remove()
    some.run(0, 1)
    del some.models[1][0].scale  # which is on the device


@pytest.mark.parametrize("ends", ["its budget is lowered", "it leaves"])
def test_a_pass_keeps_its_room_beside_what_an_idle_model_trains(sim, ends):
    """Norms that train stay there, beside their optimizer's state. The cap that sinks
    in mid-pass, with the largest budget, leaves room for both until the pass is over.
    """
    trains = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH // 2))
    model, largest = nn.Sequential(*varied(4, 1)), nn.Sequential(*varied(4, 2))
    expected = run_resident(model, "hpu", batch())
    for one, budget in ((trains, ONE), (model, ONE), (largest, 6 * ONE)):
        stagehand.layer(one, vram_budget=budget, device="hpu")
    trains(batch()).sum().backward()
    account = runtime_of(model)._tenancy.shared.ledger.device

    def sink(*_):
        if ends == "it leaves":
            runtime_of(largest).shutdown()
        else:
            runtime_of(largest).set_budget(ONE)

    hook = model[0].register_forward_pre_hook(sink)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    hook.remove()
    assert account.limit_bytes == ONE
    for one in (trains, model, *([largest] if ends != "it leaves" else [])):
        runtime_of(one).shutdown()
    trains.zero_grad()  # its gradients lie in pinned memory


@pytest.mark.parametrize("asks", ["a pass", "a block"])
def test_a_pass_whose_end_was_interrupted_is_waited_for_by_nobody(
    crowd, monkeypatch, asks
):
    """Its thread lives, and may never run that model again."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0, 1, 0)
    first = some.runtimes[0]

    with monkeypatch.context() as patch:
        patch.setattr(SharedDevice, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            some.run(1)

    def use():
        first.before_block("2.0")
        first.after_block("2.0")

    if asks == "a pass":
        in_threads(lambda: some.run(0))
    else:
        in_threads(use)
    some.run(1, 0)


def test_an_interrupt_before_a_turn_is_given_back_takes_no_room_from_others(crowd):
    """The next backward was taken for a part of the pass that was over, and its block
    for one in use as long as that model did not run."""
    some = crowd("hpu", [6, 7], ONE)
    some.run(0, 1)
    first = some.models[0]
    for number in itertools.count(1):
        interrupted = False
        try:
            with interrupted_at(number, *_TURNING):
                some.run(0)
        except KeyboardInterrupt:
            interrupted = True
        first(batch().to("hpu").requires_grad_()).sum().backward()
        first.zero_grad()
        some.run(1)
        if not interrupted:
            break
    assert number > 100


_TURNING = {
    method
    for kind in (turn.Turn, edges.Edges)
    for method in vars(kind).values()
    if callable(method)
}


def test_an_interrupt_where_a_turn_is_taken_over_leaves_one_thread_in_the_model(
    crowd, monkeypatch
):
    """The next pass gave it back for all that the first thread had entered, and went
    on without; or nobody closed what that had left."""
    monkeypatch.setattr(turn, "_LOOK_SECONDS", 0.005)
    some = crowd("hpu", [6, 7], ONE)
    some.run(0, 1)
    first, turn_of = some.models[0], some.runtimes[0]._edges.lock
    owners = []

    def leave():
        handle = first[2][0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            some.run(0)
        handle.remove()

    for number in itertools.count(1):
        interrupted = False
        with elsewhere(leave, lambda: some.run(1, 0, 1)):
            try:
                with interrupted_at(number, *_TAKING_OVER):
                    some.run(0)
            except KeyboardInterrupt:
                interrupted = True
            handle = first[3].register_forward_pre_hook(
                lambda *_: owners.append(turn_of.owner)
            )
            if number % 2:  # which comes next
                in_threads(lambda: some.run(0, 1))
                owners.clear()
            some.run(0)
            handle.remove()
            assert owners == [threading.current_thread()], number
            owners.clear()
            some.run(1)
        if not interrupted:
            break
    assert number > 10


_TAKING_OVER = {
    turn.Turn._take_over_if_forgotten,
    edges.Edges._bury,
    edges.Edges._abort,
    Passing.abort_pass,
    Passing.end_pass,
}


def test_who_waits_for_what_is_free_again_is_not_taken_for_one_that_waits(
    crowd, monkeypatch
):
    """It looks at it in a moment, and goes on: whoever needs its room can wait."""
    some = crowd("hpu", [6] * 3, 3 * ONE)
    mine, its, third = some.runtimes
    pair = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    expected = run_resident(pair, "hpu", batch())
    stagehand.layer(pair, vram_budget=2 * ONE, device="hpu")
    assert ONE < runtime_of(pair)._tenancy.claim().floor <= 2 * ONE
    some.run(0, 1, 2)
    monkeypatch.setattr(shared, "_LOOK_SECONDS", 1.0)  # the moment
    asks, failed = threading.Event(), []

    def hold(runtime):
        runtime.before_block("1.0")
        runtime._tenancy.give_up(0)

    def wait():
        hold(its)
        held.set()
        assert asks.wait(timeout=120)
        its.before_block("2.0")
        its.after_block("2.0")
        its.after_block("1.0")

    held = threading.Event()
    waiter = threading.Thread(target=guarded(wait, failed))
    waiter.start()
    assert held.wait(timeout=120)
    hold(mine)
    with elsewhere(lambda: hold(third), lambda: third.after_block("1.0")):
        asks.set()
        wait_until(lambda: some.device._awaited)
    with torch.no_grad():
        assert_bitwise_equal(pair(batch()), expected, "output")
    mine.after_block("1.0")
    waiter.join(timeout=120)
    assert failed == []
    runtime_of(pair).shutdown()


def test_a_wait_that_was_interrupted_is_no_wait_any_more(crowd, monkeypatch):
    """Nobody is refused room because of it."""
    some = crowd("hpu", [6, 7], 2 * ONE)
    first, second = some.runtimes
    some.run(0, 1)

    def hold():
        second.before_block("1.0")
        second._tenancy.give_up(0)

    with elsewhere(hold, lambda: second.after_block("1.0")):
        first.before_block("1.0")
        first._tenancy.give_up(0)
        with monkeypatch.context() as patch:
            patch.setattr(some.device._changed, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                first.before_block("2.0")
        assert some.device._awaited == {}
        first.after_block("1.0")
    some.run(0, 1)


# Failures


@pytest.mark.parametrize("error", [stagehand.CheckpointError, None])
def test_what_always_stays_comes_with_the_next_pass_where_it_did_not_come_with_one(
    sim, monkeypatch, error
):
    model = nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, 0))
    expected = run_resident(model, "hpu", batch())
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    runtime_of(model).park()
    kind = stagehand.StagehandOOMError if error is None else error

    def place_blocks(blocks):
        raise kind("on purpose", **({} if error else sizes))

    sizes = {"needed_bytes": 2, "limit_bytes": 1}
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(runtime_of(model)._parts.scheduler, "_place", place_blocks)
        with pytest.raises(kind):
            model(batch())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_a_model_that_was_parked_comes_back_with_its_own_pass_only(sim, place):
    """Another one's pass that ended brought it back, also under who edits it all."""
    models = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, seed)) for seed in range(2)]
    run = runner_of(models, place)
    for model in models:
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    tenants = [runtime_of(model)._tenancy for model in models]

    run(*[0, 1] * 3)
    runtime_of(models[1]).park()
    run(0)
    assert tenants[1].account.held_bytes == 0
    assert models[1][0].weight.device.type == "cpu"
    run(1)
    tenants[1].give_up(0)
    run(0)
    assert tenants[1].account.held_bytes > 0
    for model in models:
        runtime_of(model).shutdown()


@pytest.mark.parametrize("lacks", ["once", "for good"])
def test_what_is_placed_as_another_pass_ends_is_not_refused_for_that_passes_room(
    sim, monkeypatch, lacks
):
    """There was none for it, and then nobody who had any."""
    models = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, seed)) for seed in range(2)]
    for model in models:
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    runtime, refused = runtime_of(models[0]), []
    runtime.park()
    load = Mover.load

    def refuse(*given):
        if not refused or lacks == "for good":
            refused.append(given)
            raise stagehand.StagehandOOMError("full", needed_bytes=2, limit_bytes=1)
        return load(*given)

    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(Mover, "load", refuse)
        if lacks == "for good":
            stack.enter_context(pytest.raises(stagehand.StagehandOOMError))
        runtime.place()
    assert models[0][0].weight.device.type == ("hpu" if lacks == "once" else "cpu")
    for model in models:
        with torch.no_grad():
            model(batch())
        runtime_of(model).shutdown()


@pytest.mark.parametrize("error", [stagehand.CheckpointError, None])
def test_a_model_that_cannot_be_warmed_fails_no_other_models_pass(
    sim, monkeypatch, error
):
    """The next one is loaded where the present one's pass ends."""
    models = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, seed)) for seed in range(2)]
    run = runner_of(models, "hpu")
    for model in models:
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")

    run(*[0, 1] * 3)
    scheduler = runtime_of(models[1])._parts.scheduler
    failed = []

    def place_blocks(blocks):
        failed.append(len(list(blocks)))
        if error is None:
            raise stagehand.StagehandOOMError("full", needed_bytes=2, limit_bytes=1)
        raise error("gone")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_place", place_blocks)
        scheduler._gave_way = True
        run(0)
    assert failed
    run(1, 0, 1)
    for model in models:
        runtime_of(model).shutdown()


def test_a_pass_that_failed_loads_nothing_for_the_model_that_comes_next(crowd):
    """Whoever catches the error may take the pass again."""
    some = crowd("hpu", [6, 6], 4 * LAYER_BYTES)
    some.run(*[0, 1] * 4)

    def fail():
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            some.models[0](torch.ones(1, WIDTH + 1))

    assert some.loads(1, fail) == 0
    assert some.loads(1, lambda: some.run(0)) > 0


@pytest.mark.parametrize("leaves", [False, True])
def test_what_is_always_there_stays_in_a_pass_in_which_another_model_runs(sim, leaves):
    """Or in which it ceases to be a guest: all of that leaves when the pass is over."""
    models = [
        nn.Sequential(*varied(6, seed), nn.BatchNorm1d(WIDTH)).eval()
        for seed in range(2)
    ]
    expected = [run_resident(m, "hpu", batch()) for m in models]
    for model in models:
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="hpu")
    guests = ExitStack()

    def run(number):
        with torch.no_grad():
            output = models[number](batch())
        assert_bitwise_equal(output, expected[number], f"model {number}")

    def between(module, args, output):
        guests.close() if leaves else run(1)

    models[0][2].register_forward_hook(between)
    for _ in range(4):
        if leaves:
            guests.enter_context(runtime_of(models[1]).as_guest(models[0]))
        run(0)
    for model in models:
        runtime_of(model).shutdown()


PLACINGS = {
    "move": lambda model: model.to("hpu"),
    "state_dict": lambda model: model.state_dict(),
    "copy": deepcopy,
}


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("place", PLACINGS.values(), ids=PLACINGS)
def test_what_is_placed_beside_another_models_pass_takes_no_room_of_it(
    sim, place, trains, monkeypatch
):
    """That pass has begun, but has loaded nothing yet. Who waits behind it gives up
    no more than it must."""
    models = [nn.Sequential(nn.LayerNorm(WIDTH), *varied(6, seed)) for seed in range(2)]
    models[1].requires_grad_(False)[0].requires_grad_(trains)
    expected = [run_resident(model, "hpu", batch()) for model in models]
    for model in models:
        stagehand.layer(model, vram_budget=ONE + SMALL, device="hpu")
    runtimes = [runtime_of(model) for model in models]
    waits, errors, threads = threading.Event(), [], []
    give = SharedDevice._give_while_waiting

    def given(device, seat):
        give(device, seat)
        waits.set()

    monkeypatch.setattr(SharedDevice, "_give_while_waiting", given)

    def run(number):
        with torch.no_grad():
            output = models[number](batch())
        assert_bitwise_equal(output, expected[number], f"model {number}")

    def aside(call):
        thread = threading.Thread(target=guarded(call, errors), daemon=True)
        threads.append(thread)
        thread.start()

    def between(*_):
        hook.remove()
        placed = threading.Event()
        aside(lambda: (place(models[1]), placed.set()))
        assert placed.wait(timeout=120)
        aside(lambda: run(1))
        assert waits.wait(timeout=120)

    for number in (1, 0, 1, 0):
        run(number)
    runtimes[0]._tenancy.give_up(0)
    hook = models[0].register_forward_pre_hook(between)
    run(0)
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert errors == []
    run(1)
    assert sim.races() == []
    for runtime in runtimes:
        runtime.shutdown()
