"""Whatever several threads ask of models that share a device, none waits for ever."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from small import LAYER_BYTES, WIDTH, batch, runtime_of, stack
from test_sharing import crowd, guarded, in_threads
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from stagehand.core.turn import awaited_by
from stagehand.errors import DeadlockError
from stagehand.residency.scheduler import Scheduler
from stagehand.residency.shared import SharedDevice
from stagehand.tenancy import Tenancy

__all__ = ["crowd"]

DEPTHS = (2, 3, 5, 8)
ONE = LAYER_BYTES
STEPS = 20
_PATIENCE = 60  # seconds until a thread gives up


class User:
    """One thread's wishes, in an order of its own; models run inside of each other."""

    def __init__(self, some, seed):
        self.some, self.random = some, random.Random(seed)
        self.inside = set()  # models whose locks are held
        self.runs = 0

    def __call__(self):
        for _ in range(STEPS):
            self.wish()

    def wish(self, depth=0):
        choices = [self.run, self.run, self.hold, self.reserve, self.release]
        choices += [] if depth > 2 else [self.nest, self.by_hand, self.save]
        wish = self.random.choice(choices)
        free = [mine for mine in range(len(DEPTHS)) if mine not in self.inside]
        mine = self.random.choice(free)
        try:
            wish(mine, self.random.randrange(len(DEPTHS)), depth + 1)
        except stagehand.StagehandOOMError:
            pass  # what several threads need at once can be too much
        except DeadlockError:
            pass  # another thread runs these models inside of each other the other way
        except stagehand.ConfigError as error:
            if "guest" not in str(error):  # that has a reservation, or is the host
                raise

    def run(self, mine, *_):
        with torch.no_grad():
            output = self.some.models[mine](batch())
        assert_bitwise_equal(output, self.some.expected[mine], f"model {mine}")
        self.runs += 1

    def hold(self, mine, other, depth):
        host = self.some.runtimes[mine]
        hold = self.random.choice([host.keep_resident, host.as_guest])
        with hold(self.some.models[other]):
            self.wish(depth)
            self.wish(depth)

    def reserve(self, mine, other, _):
        priority = self.random.choice(list(stagehand.ResidentPriority))
        reserve = self.some.runtimes[mine].reserve_for_resident
        reserve(self.some.models[other], priority=priority)

    def release(self, mine, other, _):
        self.some.runtimes[mine].release_reservation(self.some.models[other])

    def save(self, mine, *_):
        assert self.some.models[mine].state_dict()
        assert repr(self.some.runtimes[mine])
        assert str(self.some.runtimes[mine].report())

    def by_hand(self, mine, _, depth):
        runtime = self.some.runtimes[mine]
        block = self.random.choice(runtime.block_ids)
        runtime.before_block(block)
        self.wish_inside(mine, depth)
        runtime.after_block(block)

    def nest(self, mine, _, depth):
        here = threading.current_thread()

        def call(*_):
            if threading.current_thread() is here and mine not in self.inside:
                self.wish_inside(mine, depth)

        hook = self.some.models[mine][0].register_forward_pre_hook(call)
        try:
            self.run(mine)
        finally:
            hook.remove()

    def wish_inside(self, mine, depth):
        self.inside.add(mine)
        self.wish(depth)
        self.inside.remove(mine)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [2, 5])
def test_threads_may_ask_for_anything_in_any_order(crowd, seed, budget):
    some = crowd("hpu", DEPTHS, budget * LAYER_BYTES)
    users = [User(some, f"{seed} {number}") for number in range(3)]
    in_threads(*users)
    assert any(user.runs for user in users)  # how many others got, nobody can say
    for runtime in some.runtimes:
        runtime.release_reservation()
    some.run(*range(len(DEPTHS)))
    assert {holding.why for holding in some.device.holdings()} == {"not held"}


def by_join(call):
    errors = []
    thread = threading.Thread(target=guarded(call, errors), name="part")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def by_result(call):
    with ThreadPoolExecutor(1, thread_name_prefix="part") as pool:
        pool.submit(call).result()


def by_exit(call):
    with ThreadPoolExecutor(1, thread_name_prefix="part") as pool:
        future = pool.submit(call)
    future.result()


@pytest.mark.parametrize("goes", ["forward", "backward"])
@pytest.mark.parametrize("awaits", [by_join, by_result, by_exit])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_a_forward_that_waits_for_a_part_in_another_thread_is_told(
    crowd, place, awaits, goes
):
    """That thread waits for the model, which the first one runs."""
    some = crowd(place, [4, 5], 40 * LAYER_BYTES)
    model, x = some.models[0], batch().to(place)
    loss = model(x).sum()

    def call(*_):
        hook.remove()
        awaits(loss.backward if goes == "backward" else lambda: model[2](x))

    hook = model[1].register_forward_pre_hook(call)
    with pytest.raises(DeadlockError, match="in the thread that runs it") as told:
        model(x)
    assert "waits for thread 'part" in str(told.value)
    model.zero_grad()
    some.run(0, 1)


@pytest.mark.parametrize("awaits", [by_join, by_result, by_exit])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_a_forward_that_waits_for_a_model_that_has_no_room_beside_it_is_told(
    crowd, place, awaits
):
    """It has promised itself what the other one, in another thread, waits for."""
    some = crowd(place, [4, 5], 2 * LAYER_BYTES)

    def call(*_):
        hook.remove()
        awaits(lambda: some.run(1))

    hook = some.models[0][1].register_forward_pre_hook(call)
    with pytest.raises(stagehand.StagehandOOMError) as told:
        some.run(0)
    first, second = (runtime._tenancy.name for runtime in some.runtimes)
    assert str(told.value).startswith(f"{second} needs ")
    assert f": {first} holds " in str(told.value)
    assert "gives up more only in the thread that runs it" in str(told.value)
    some.run(0, 1)


def test_who_waits_for_room_behind_a_chain_of_threads_is_told(crowd):
    some = crowd("hpu", [4, 5], 2 * LAYER_BYTES)

    def call(*_):
        hook.remove()
        by_join(lambda: by_result(lambda: by_join(lambda: some.run(1))))

    hook = some.models[0][1].register_forward_pre_hook(call)
    with pytest.raises(stagehand.StagehandOOMError, match="needs"):
        some.run(0)
    some.run(0, 1)


def words():
    """A model of which only a table of words trains, which stays on the host: so the
    last node of backward runs there, in the thread that called it."""
    return nn.Sequential(nn.Embedding(256, WIDTH), *stack(4).requires_grad_(False))


def test_nothing_is_taken_of_a_model_whose_backward_ends_in_its_caller(
    sim, monkeypatch
):
    """What begins in autograd's thread is ended in another one, beside what that runs
    next: for it, too, the model is another thread's."""
    budget = 2 * LAYER_BYTES
    models = [stagehand.layer(words(), vram_budget=budget, device="hpu") for _ in "ab"]
    first, answers = runtime_of(models[0]), []
    ends, asked, is_ready = (threading.Event() for _ in range(3))
    end, give_up = Scheduler.release_fetched, Tenancy.give_up

    def release_fetched(self):
        here = threading.current_thread()
        if self is first._parts.scheduler and here.name == "caller":
            ends.set()
            assert asked.wait(_PATIENCE)
        end(self)

    def give(self, *args, **kwargs):
        gave = give_up(self, *args, **kwargs)
        if self is first._tenancy and ends.is_set() and not asked.is_set():
            answers.append(gave)
            asked.set()
        return gave

    def await_autograd(_):
        """Let its thread end what it does, or it may end the backward, too."""
        with torch.enable_grad():
            torch.ones(1, device="hpu", requires_grad=True).sum().backward()

    def begin():
        threading.current_thread().name = "caller"
        assert is_ready.wait(_PATIENCE)
        loss = models[0](torch.arange(4)).sum()
        models[0][0].weight.register_hook(await_autograd)
        monkeypatch.setattr(Scheduler, "release_fetched", release_fetched)
        monkeypatch.setattr(Tenancy, "give_up", give)
        loss.backward()

    def follow():
        loss = models[1](torch.arange(4)).sum()
        is_ready.set()
        assert ends.wait(_PATIENCE)
        loss.backward()
        asked.set()  # it may have had its room without a question

    in_threads(begin, follow)
    assert not any(answers)
    for model in models:
        runtime_of(model).shutdown()


@pytest.mark.parametrize("bystanders", [0, 1])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_a_forward_without_room_lets_a_backward_go_first_that_waits_for_its_model(
    crowd, place, bystanders, monkeypatch
):
    """Autograd's thread has the room, in the backward of another model, and goes on
    with this one's. Who else waits for room is not refused meanwhile."""
    some = crowd(place, [4, 5, 6], 2 * ONE)
    resident = [deepcopy(model).to(place) for model in some.plain[:2]]
    threads, errors, wait = [], [], SharedDevice._wait
    waits = [threading.Event() for _ in range(1 + bystanders)]

    def noted(device, seat):
        for number, thread in enumerate(threads):
            if threading.current_thread() is thread:
                waits[number].set()
        wait(device, seat)

    def begin(*_):
        for number in range(1 + bystanders):
            run = guarded(lambda number=2 * number: some.run(number), errors)
            threads.append(threading.Thread(target=run, daemon=True))
            threads[-1].start()
            assert waits[number].wait(_PATIENCE)

    def go_back(models, hook=None):
        between = models[0](batch().to(place))
        if hook is not None:
            between.register_hook(hook)
        models[1](between).sum().backward()

    go_back(resident)
    monkeypatch.setattr(SharedDevice, "_wait", noted)
    go_back(some.models[:2], begin)
    for thread in threads:
        thread.join(_PATIENCE)
        assert not thread.is_alive()
    assert errors == []
    for streamed, plain in zip(some.models, resident, strict=False):
        for one, other in zip(streamed.parameters(), plain.parameters(), strict=True):
            assert_bitwise_equal(one.grad.cpu(), other.grad.cpu(), "gradient")


@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_a_forward_that_is_refused_late_and_tried_again_is_one_step(
    crowd, place, monkeypatch
):
    """What it had begun before it let another thread's forward go first is its own."""
    some = crowd(place, [4], 2 * ONE)
    threads, errors, recall = [], [], Scheduler.recall

    def refuse(scheduler):
        if threads:
            return recall(scheduler)
        run = guarded(lambda: some.run(0), errors)
        threads.append(threading.Thread(target=run, daemon=True))
        threads[0].start()
        while awaited_by(threads[0]) is None:
            threading.Event().wait(0.001)
        raise stagehand.StagehandOOMError("no", needed_bytes=1, limit_bytes=0)

    monkeypatch.setattr(Scheduler, "recall", refuse)
    some.run(0)
    threads[0].join(_PATIENCE)
    assert not threads[0].is_alive()
    assert errors == []
    measure = some.runtimes[0]._measure
    assert (measure.clock.step, measure.passes) == (2, 2)


@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_room_that_ends_with_another_threads_pass_is_waited_for_in_mid_pass(
    crowd, place, monkeypatch
):
    """Two passes of this thread use a block each at once, and only one was left room
    for, as where autograd goes back through two models by turns."""
    some = crowd(place, [4, 5, 6], [ONE, 2 * ONE, 2 * ONE])
    inside, goes_on, errors = threading.Event(), threading.Event(), []
    wait = SharedDevice._await

    def stop(*_):
        inside.set()
        assert goes_on.wait(_PATIENCE)

    def awaits(device, seats):
        goes_on.set()
        return wait(device, seats)

    def use(*_):
        hooks.pop().remove()
        some.runtimes[1].before_block("3.0")

    def nest(*_):
        hooks.pop().remove()
        some.run(2)
        some.runtimes[1].after_block("3.0")

    hook = some.models[0][2].register_forward_pre_hook(stop)
    hooks = [
        some.models[2][3].register_forward_pre_hook(use),
        some.models[1][1].register_forward_pre_hook(nest),
    ]
    run = guarded(lambda: some.run(0), errors)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert inside.wait(_PATIENCE)
    hook.remove()
    monkeypatch.setattr(SharedDevice, "_await", awaits)
    some.run(1)
    thread.join(_PATIENCE)
    assert not thread.is_alive()
    assert errors == []
    some.run(0, 1, 2)
