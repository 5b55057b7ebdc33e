"""What reads all of a model finds it whole, whatever other threads do with it."""

import gc
import threading
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import LAYER_BYTES, batch, run_resident, runtime_of, stack, values
from stagehand.core.turn import awaited_by
from training import FEW, end, net, start

BUDGET = 10 * LAYER_BYTES  # all of it is on the device between passes


class Others:
    """Other threads that run a model, and what it gave them."""

    def __init__(self, model):
        self.model = model
        self.expected = run_resident(stack(), "hpu", batch())
        self.given = []
        self.taken = []
        self.threads = []

    def begin(self):
        """Begin in one of them; return when it waits for its turn, or is over."""
        thread = threading.Thread(target=self.run, daemon=True)
        self.threads.append(thread)
        thread.start()
        while thread.is_alive() and awaited_by(thread) is None:
            threading.Event().wait(0.001)

    def look(self):
        """See in one of them whether it can have the turn at once."""
        edges = runtime_of(self.model)._edges
        thread = threading.Thread(target=lambda: self.taken.append(edges.try_lock()))
        thread.start()
        thread.join()

    def run(self):
        with torch.no_grad():
            self.given.append(self.model(batch()))

    def end(self, *, passes):
        """Wait for all of them, and compare what so many passes gave."""
        for thread in self.threads:
            thread.join(timeout=120)
        assert len(self.given) == passes
        for number, given in enumerate(self.given):
            assert_bitwise_equal(given, self.expected, f"pass {number}")


class Copied:
    """A hook that does nothing, but is told when it is copied."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *_):
        return None

    def __deepcopy__(self, memo):
        self.call(memo)
        return self


class Unwell(Exception):
    """Raised in the middle."""


def by_state_dict(model, call):
    """Read all of a model, and call something in the middle."""
    hook = model[2].register_state_dict_pre_hook(lambda *_: call())
    try:
        return model.state_dict()
    finally:
        hook.remove()


def by_deepcopy(model, call):
    """Read all of a model, and call something in the middle."""
    hook = model[2].register_forward_pre_hook(Copied(lambda _: call()))
    try:
        return deepcopy(model).state_dict()
    finally:
        hook.remove()


@pytest.fixture(params=[by_state_dict, by_deepcopy])
def read(request):
    return request.param


@pytest.fixture
def streamed(sim):
    """A streamed model that has passed."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    with torch.no_grad():
        for _ in range(3):
            model(batch())
    yield model
    runtime_of(model).shutdown()


def test_what_is_read_of_a_model_is_at_home_beside_another_threads_pass(streamed, read):
    """That pass waits: else the second half is where it brought it, or is leaving."""
    others = Others(streamed)

    def disturb():
        others.begin()
        others.look()

    state = read(streamed, disturb)
    assert others.taken == [False]
    others.end(passes=1)
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    assert_bitwise_equal(dict(state), values(stack()), "read")


def test_a_model_whose_reading_fails_is_everybodys_again(streamed, read):
    """Nobody tells the runtime of that end: whoever comes next sees to it."""
    others = Others(streamed)

    def fail():
        raise Unwell

    def disturb():
        others.begin()
        fail()

    with pytest.raises(Unwell):
        read(streamed, disturb)
    others.end(passes=1)  # another thread has come
    for come in (others.run, streamed.state_dict):  # the same one
        with pytest.raises(Unwell):
            read(streamed, fail)
        come()
        assert runtime_of(streamed)._edges.lock.owner is None
    others.end(passes=2)
    assert_bitwise_equal(dict(streamed.state_dict()), values(stack()), "state")


def test_a_model_whose_reading_cannot_begin_is_everybodys_again(streamed, read):
    runtime = runtime_of(streamed)
    runtime.before_block(runtime.block_ids[0])
    with pytest.raises(stagehand.ConfigError, match="is in use"):
        read(streamed, Others(streamed).begin)
    runtime.after_block(runtime.block_ids[0])
    assert runtime._edges.lock.owner is None


def test_what_a_failed_copy_has_copied_is_not_kept(streamed):
    copies = []

    def fail(memo):
        copies.extend(weakref.ref(t) for t in memo.values() if torch.is_tensor(t))
        raise Unwell

    streamed[2].register_forward_pre_hook(Copied(fail))
    with pytest.raises(Unwell):
        deepcopy(streamed)
    gc.collect()
    assert copies
    assert [copy() for copy in copies if copy() is not None] == []


def test_a_model_that_runs_while_it_is_read_stays_its_threads(streamed, read):
    """A hook of a user's runs it: the pass of another thread waits for both."""
    others, owners = Others(streamed), []
    lock = runtime_of(streamed)._edges.lock

    def run():
        others.run()
        others.begin()
        owners.append(lock.owner)

    read(streamed, run)
    assert owners == [threading.current_thread()]
    others.end(passes=2)
    assert lock.owner is None


def test_a_runtime_that_is_copied_by_itself_keeps_nobody_from_its_model(streamed):
    """No model is copied with it, and no end of that is to come."""
    for kept in (runtime_of(streamed), [runtime_of(streamed)]):
        deepcopy(kept)
        others = Others(streamed)
        others.begin()
        others.end(passes=1)


def test_threads_that_read_a_model_at_once_get_copies_of_what_stays_for_a_graph(sim):
    """One waits while the other reads, and changes nothing of what that was told."""
    run = start(net, FEW[1])
    held, states, threads = run.loss(), [], []

    def read():
        states.append(run.model.state_dict())

    def begin(*_):
        if not threads:
            threads.append(threading.Thread(target=read))
            threads[0].start()
            while threads[0].is_alive() and awaited_by(threads[0]) is None:
                threading.Event().wait(0.001)

    handle = run.model.head.register_state_dict_post_hook(begin)
    read()
    handle.remove()
    threads[0].join()
    assert run.model.entry.weight.device.type == "hpu"
    for state in states:
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        for name, parameter in run.model.named_parameters():
            assert_bitwise_equal(state[name], parameter.detach().cpu(), name)
    del held
    end(run)


def test_copies_of_what_stays_for_a_graph_are_one_for_each_tensor(sim):
    """What others have put into the same state dict is left as it is."""

    def make():
        model = net()
        model.head.weight = model.entry.weight
        return model

    run = start(make, FEW[1])
    held = run.loss()
    other = nn.Linear(2, 2, device="hpu")
    state = nn.ModuleDict({"other": other, "model": run.model}).state_dict()
    assert state["other.weight"].device.type == "hpu"
    one, tied = state["model.entry.weight"], state["model.head.weight"]
    assert one.device.type == "cpu"
    assert one.data_ptr() == tied.data_ptr()
    del held
    end(run)
