"""ReadAhead: layers in ordinary memory, in batches, in their order, or kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stagehand.core.arena import Arena, live_leases
from stagehand.core.ledger import Account
from stagehand.core.workers import WorkerGroup
from stagehand.errors import ReadError, StagehandInternalError
from stagehand.streamer.stages import LayerStore, ReadAhead

LAYERS, NBYTES = 5, 64
PATIENCE = 120  # seconds until a test gives up


class Files:
    """Layers of equal bytes; each read can be held up, or fail."""

    def __init__(self):
        self.order = []
        self.done = threading.Semaphore(0)
        self.fails = set()
        self.gate = threading.Event()
        self.gate.set()

    def take(self, layer, image):
        assert self.gate.wait(PATIENCE)
        self.order.append(layer)
        self.done.release()
        if layer in self.fails:
            self.fails.remove(layer)
            raise ReadError(f"layer {layer} is broken")
        image.fill_(layer + 1)
        return NBYTES

    def skew(self, layer):
        return None

    def wait_for(self, count):
        for _ in range(count):
            assert self.done.acquire(timeout=PATIENCE)


@pytest.fixture
def files():
    return Files()


@pytest.fixture
def ahead(files):
    """Makes stages, and closes them."""
    made = []

    def ahead(buffers, batch=1):
        account = Account("ordinary memory", buffers * NBYTES)
        workers = WorkerGroup("ahead", 1)
        stage = ReadAhead(
            files,
            layers=LAYERS,
            buffers=buffers,
            batch=batch,
            nbytes=NBYTES,
            arena=Arena("ordinary memory", torch.zeros, account),
            workers=workers,
        )
        made.append((stage, workers))
        return stage

    before = live_leases()
    yield ahead
    for stage, workers in made:
        files.gate.set()
        stage.stop()
        workers.close()
        stage.close()
    assert live_leases() == before


def taken(stage, layer):
    image = torch.zeros(NBYTES)
    read = stage.take(layer, image)
    assert image.tolist() == [layer + 1] * NBYTES
    return read


def test_layers_are_read_in_order_as_far_as_there_is_memory(files, ahead):
    stage = ahead(buffers=3)
    files.wait_for(3)
    assert files.order == [0, 1, 2]
    assert taken(stage, 0) == NBYTES
    files.wait_for(1)
    assert files.order == [0, 1, 2, 3]


def test_end_of_a_pass_is_followed_by_the_beginning_of_the_next(files, ahead):
    stage = ahead(buffers=2)
    for _ in range(3):
        for layer in range(LAYERS):
            assert taken(stage, layer) == NBYTES
    files.wait_for(3 * LAYERS + 2)
    assert files.order == [*range(LAYERS)] * 3 + [0, 1]


def test_batch_is_handed_on_when_all_of_it_is_read(files, ahead):
    files.gate.clear()
    stage = ahead(buffers=4, batch=2)
    assert len(stage._jobs) == 4
    assert stage._jobs[0] is stage._jobs[1]
    assert stage._jobs[1] is not stage._jobs[2]
    files.gate.set()
    taken(stage, 0)
    assert files.order[:2] == [0, 1]
    taken(stage, 1)
    for layer in (2, 3):
        taken(stage, layer)
    files.wait_for(5)
    assert files.order[:5] == [0, 1, 2, 3, 4]  # the last batch is smaller


def test_next_batch_waits_for_memory_for_all_of_it(files, ahead):
    stage = ahead(buffers=3, batch=2)
    files.wait_for(2)
    taken(stage, 0)
    assert stage._next == 4  # two buffers were free: the second batch is under way
    assert sorted(stage._held) == [1, 2, 3]


def test_with_memory_for_all_layers_each_is_read_once(files, ahead):
    stage = ahead(buffers=LAYERS)
    read = [taken(stage, layer) for _ in range(3) for layer in range(LAYERS)]
    assert read == [NBYTES] * LAYERS + [0] * 2 * LAYERS
    assert files.order == [*range(LAYERS)]


@pytest.mark.parametrize("buffers", [3, LAYERS])
def test_layer_that_could_not_be_read_ahead_is_read_when_it_is_taken(
    files, ahead, buffers
):
    files.fails.add(1)
    stage = ahead(buffers=buffers)
    for _ in range(2):
        for layer in range(LAYERS):
            assert taken(stage, layer) in (0, NBYTES)


def test_layer_that_cannot_be_read_at_all_raises_when_it_is_taken(files, ahead):
    stage = ahead(buffers=2)
    files.wait_for(2)
    taken(stage, 0)
    taken(stage, 1)
    files.wait_for(2)
    files.fails.add(4)
    taken(stage, 2)  # lets 4 be read
    files.wait_for(1)
    files.fails.add(4)
    taken(stage, 3)
    with pytest.raises(ReadError, match="layer 4 is broken"):
        stage.take(4, torch.zeros(NBYTES))
    taken(stage, 4)


def in_thread(call, *args):
    """Start a call in a thread of its own, and return its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *args)
    pool.shutdown(wait=False)
    return future


class HeldUp(torch.Tensor):
    """An image into which nothing is copied before it may be."""

    def copy_(self, source):
        self.entered.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().copy_(source)


def test_who_comes_too_soon_waits_for_the_memory_of_those_before(
    files, ahead, monkeypatch
):
    stage = ahead(buffers=2, batch=2)
    waits = threading.Event()
    wait = stage._changed.wait
    monkeypatch.setattr(stage._changed, "wait", lambda: (waits.set(), wait()))
    image = torch.zeros(NBYTES).as_subclass(HeldUp)
    image.entered, image.may_go_on = threading.Event(), threading.Event()
    taken(stage, 0)
    before = in_thread(stage.take, 1, image)
    assert image.entered.wait(PATIENCE)
    too_soon = in_thread(taken, stage, 2)
    assert waits.wait(PATIENCE)
    image.may_go_on.set()
    assert before.result(PATIENCE) == too_soon.result(PATIENCE) == NBYTES
    files.wait_for(LAYERS)
    assert files.order == [0, 1, 2, 3, 4]
    assert sorted(stage._held) == [3, 4]


def test_layer_that_was_not_waited_for_takes_no_memory_until_the_next_pass(
    files, ahead
):
    stage = ahead(buffers=2, batch=2)
    for layer in (0, 2, 1, 3, 4):  # threads may overtake each other
        taken(stage, layer)
    assert sorted(stage._held) == [0, 1]
    files.wait_for(LAYERS + 2)
    assert sorted(files.order) == [0, 0, 1, 1, 2, 3, 4]


def test_stop_gets_through_while_the_same_thread_asks_for_layers(ahead, monkeypatch):
    """The garbage collector may end a forgotten streamer in the middle of anything."""
    stage = ahead(buffers=2)
    submit = stage._workers.submit

    def collect(*args):
        stage.stop()
        return submit(*args)

    monkeypatch.setattr(stage._workers, "submit", collect)
    assert in_thread(taken, stage, 0).result(PATIENCE) == NBYTES


def test_store_of_a_layer_is_read_only():
    store = LayerStore(3, Files())
    assert (store.hosts, store.pinned, store.wire) == ([], None, None)
    with pytest.raises(StagehandInternalError, match="layer 3 cannot be written back"):
        store.write_back(torch.zeros(1))
    with pytest.raises(StagehandInternalError, match="layer 3 has no tensor 0"):
        store.edited(0)
