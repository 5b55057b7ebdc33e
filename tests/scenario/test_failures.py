"""Whatever goes wrong: the error says what, nothing is lost, the next pass works."""

import contextlib
import gc
import inspect
import itertools
import json
import os
import sys
import threading
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import stagehand
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at, interrupted_at_call
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    blocks_of,
    device_of,
    run_resident,
    runtime_of,
    smallest_budget,
    stack,
    values,
)
from simulated import sim_device
from stagehand.core.arena import live_leases
from stagehand.core.states import BlockState
from stagehand.core.transfer import TransferEngine
from stagehand.errors import ConfigError
from stagehand.residency import blocks
from stagehand.residency.blocks import Block
from stagehand.residency.mover import Mover
from stagehand.residency.scheduler import Scheduler
from stagehand.residency.slots import SlotMemory
from stagehand.stores.checkpoint import Checkpoint
from stagehand.torch_private import (
    DispatchMode,
    storage_use_count,
    top_saved_hooks,
)
from streamed import Shape
from threadless import without_threads

BUDGET = 4 * LAYER_BYTES


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


def streamed_stack(place, **options):
    options.setdefault("vram_budget", BUDGET)
    return stagehand.layer(stack(), device=place, **options)


def always_read(place):
    """Options with which no block from disk is kept in memory."""
    return {"ram_budget": LAYER_BYTES} if place == "hpu" else {}


def assert_whole(model, place):
    """No block in use, every tensor readable and right, and passes are exact."""
    for block in blocks_of(model):
        assert block.uses == 0
        if not block.stays:
            assert not block.bound
    assert_bitwise_equal(values(model), values(stack()), "the weights")
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())


class Operators(DispatchMode):
    """What a checkpointed region counts, in forward and when it is recomputed."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Sanitizer(DispatchMode):
    """What torch's sanitizer looks at: operators that name device memory."""

    __module__ = "torch.cuda._sanitizer"

    def __init__(self):
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and not args[0].is_cpu:
            self.seen.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_sanitizer_sees_copies_and_takes_no_view_of_a_slot_for_a_write(sim):
    """`set_` makes a view, and is said to write: no stream waits for that."""
    model = streamed_stack("hpu")
    with Sanitizer() as mode:
        with torch.no_grad():
            model(batch())
        assert torch.ops.aten.copy_ in mode.seen
        for _ in range(2):
            model(batch()).sum().backward()
    assert torch.ops.aten.set_ not in mode.seen
    model.zero_grad()
    end(model)


def test_capture_in_a_graph_is_refused_before_anything_is_queued(sim, monkeypatch):
    """Events of a capture can be waited for by no stream outside of it."""
    model = streamed_stack("hpu")
    assert_whole(model, "hpu")
    saved = stagehand.activations("1MB")
    began, queued = sim.now_seconds(), sim.h2d_copies()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for device in (device_of(model), saved._parts.device):
            patched.setattr(device, "_is_cuda", True)
        for use in (lambda: model(batch()), saved.__enter__):
            with pytest.raises(ConfigError, match="cannot be captured in a CUDA graph"):
                use()
    assert (sim.now_seconds(), sim.h2d_copies()) == (began, queued)
    assert_whole(model, "hpu")
    saved.close()
    end(model)


def end(model):
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


# Exceptions in forward


class Stop(Exception):
    pass


class Halt(BaseException):
    """Like KeyboardInterrupt: PyTorch runs no hook of a module that it leaves."""


def raising_at(module, kind, where):
    """Let a module raise once, in one of the places where users' code runs."""

    def fail(*_):
        if armed:
            raise armed.pop()

    armed = [kind()]
    if where == "before":
        module.register_forward_pre_hook(fail)
    elif where == "after":
        module.register_forward_hook(fail)
    else:
        inner = module.forward

        def forward(*args):
            output = inner(*args)
            fail()
            return output

        module.forward = forward


MODULES = ["", "0", "0.0", "2", "2.0", "2.1", "5.0", "5"]


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("passes", [0, 2])
def test_after_an_exception_at_any_depth_the_next_pass_is_exact(
    place, name, kind, where, passes
):
    model = streamed_stack(place)
    with torch.no_grad():
        for _ in range(passes):
            model(batch())
        raising_at(model.get_submodule(name), kind, where)
        with pytest.raises(kind):
            model(batch())
        output = model(batch())
    assert_bitwise_equal(output, run_resident(stack(), place, batch()), "next pass")
    assert_whole(model, place)
    model.__dict__.pop("forward", None)
    end(model)


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_after_an_exception_shutdown_gives_back_a_whole_model(place, kind):
    model = streamed_stack(place)
    raising_at(model[2][0], kind, "inside")
    with torch.no_grad(), pytest.raises(kind):
        model(batch())
    end(model)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), stack()(batch()), "plain")


def test_an_exception_ends_the_pass_at_once(place):
    model = streamed_stack(place, inference_mode=True)
    model(batch())
    raising_at(model[2][0], Stop, "inside")
    with pytest.raises(Stop):
        model(batch())
    assert torch.is_grad_enabled()
    assert not runtime_of(model)._edges.inside()
    for block in blocks_of(model):
        assert block.uses == 0
        assert block.stays or not block.bound
    end(model)


class Going(nn.Module):
    """Goes on where one of its parts cannot be called."""

    def __init__(self):
        super().__init__()
        self.parts, self.part = stack(4), stack(2)

    def forward(self, x):
        with contextlib.suppress(Stop):
            x = self.part(self.parts(x))
        return self.parts(x)


def test_a_block_whose_end_fails_is_in_use_no_more(place, monkeypatch):
    """PyTorch drops what hooks raise where the module has raised, and goes on."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    uses = runtime_of(model)._uses

    def fail(*_, **__):
        raise RuntimeError("the end")

    def run():
        with torch.autocast(place, torch.bfloat16):
            model(batch())

    monkeypatch.setattr(uses.casts, "end", fail)
    with pytest.raises(RuntimeError, match="the end"):
        run()
    monkeypatch.undo()
    assert runtime_of(model)._parts.scheduler.in_use == []
    run()
    runtime_of(model).shutdown()


def test_a_part_that_a_hook_keeps_from_beginning_ends_no_pass_around_it(place):
    def stop(*_):
        raise Stop

    model = Going()
    expected = run_resident(stack(4), place, batch())
    stagehand.layer(model, device=place, vram_budget=BUDGET)
    model.part.register_forward_pre_hook(stop, prepend=True)
    for _ in range(3):
        assert_bitwise_equal(model(batch()).cpu(), expected.cpu(), "the output")
    assert runtime_of(model).report().passes == 3
    runtime_of(model).shutdown()


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_after_an_exception_the_model_can_be_copied_and_saved(place, kind):
    model = streamed_stack(place)
    raising_at(model[2][0], kind, "inside")
    with torch.no_grad(), pytest.raises(kind):
        model(batch())
    assert_bitwise_equal(values(deepcopy(model)), values(stack()), "the copy")
    assert_bitwise_equal(values(model), values(stack()), "the model")
    assert_whole(model, place)
    end(model)


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("name", ["0", "2"])
def test_an_interrupt_leaves_no_look_at_what_others_compute(sim, name, passes):
    """Lookups of other tables go on on the host, and reads of weights are no uses."""
    model = nn.Sequential(nn.Embedding(8 * WIDTH, WIDTH), *stack(4))
    plain, ids = deepcopy(model).to("hpu"), torch.arange(8)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu")
    with torch.no_grad():
        expected = plain(ids.to("hpu"))
        for _ in range(passes):
            model(ids)
        raising_at(model.get_submodule(name), KeyboardInterrupt, "inside")
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        assert nn.Embedding(8, 4)(ids).device == torch.device("cpu")
        assert (model[0].weight + 1).device == torch.device("cpu")
        with torch.device("cpu"):  # a mode above what was left
            assert_bitwise_equal(model(ids), expected, "next pass")
        assert_bitwise_equal(model(ids), expected, "the one after")
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(block.read_elsewhere for block in blocks_of(model))
    model[int(name)].__dict__.pop("forward")
    runtime_of(model).shutdown()


class Seeing(TorchFunctionMode):
    """A mode of the user's that counts calls."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_an_interrupt_where_a_mode_is_taken_off_from_below_others_loses_none(sim):
    model = streamed_stack("hpu")
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        raising_at(model[2][0], KeyboardInterrupt, "before")
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(batch())
        with Seeing() as mode, torch.no_grad():
            try:
                with interrupted_at_call(number, "stagehand.torch_private"):
                    model(batch())
            except KeyboardInterrupt:
                interrupted = True
            seen = mode.calls
            torch.ones(2).add(1)
            assert mode.calls > seen, number
        with torch.no_grad():  # a mode around what was interrupted is still there
            model(batch())
        assert torch.overrides._get_current_function_mode_stack() == [], number
    assert number > 20
    end(model)


def test_a_lookup_that_fails_before_it_begins_leaves_modes_of_the_users_active(sim):
    """The end of the table's forward took off what its begin had not put on."""
    model = nn.Sequential(nn.Embedding(8 * WIDTH, WIDTH), *stack(4))

    fails = []

    def maybe_fail(*_):
        if fails:
            raise LookupError

    model[0].register_forward_pre_hook(maybe_fail)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu")
    with torch.no_grad():
        model(torch.arange(8))
        fails.append(True)
        with torch.device("meta"):
            with pytest.raises(LookupError):
                model(torch.arange(8, device="cpu"))
            assert torch.empty(1).is_meta
    runtime_of(model).shutdown()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("name", ["0", "2"])
def test_a_model_that_is_dropped_after_an_interrupt_leaves_nothing(
    sim, name, passes, trains
):
    """Nobody enters it again, so what the interrupt left open is never closed."""
    held = sim.allocated_bytes(), sim.pinned_bytes(), live_leases()
    model = nn.Sequential(nn.Embedding(8 * WIDTH, WIDTH), *stack(4))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu")
    with torch.set_grad_enabled(trains):
        for _ in range(passes):
            model(torch.arange(8))
        raising_at(model.get_submodule(name), KeyboardInterrupt, "inside")
        with pytest.raises(KeyboardInterrupt):
            model(torch.arange(8))
    del model
    gc.collect()
    assert torch.overrides._get_current_function_mode_stack() == []
    torch.accelerator.synchronize()
    gc.collect()  # of what the model's end has let go
    assert (sim.allocated_bytes(), sim.pinned_bytes(), live_leases()) == held


def test_exceptions_in_every_pass_do_not_add_up(sim):
    model = streamed_stack("hpu")
    expected = run_resident(stack(), "hpu", batch())
    held = set()
    for number in range(18):
        module = model[number % 6][0]
        kind = (Stop, KeyboardInterrupt)[number % 2]
        handle = module.register_forward_pre_hook(lambda *_, kind=kind: _raise(kind()))
        with torch.no_grad(), pytest.raises(kind):
            model(batch())
        handle.remove()
        del kind, module
        if number > 12:
            gc.collect()  # tracebacks keep activations in cycles
            held.add((live_leases(), sim.allocated_bytes() // LAYER_BYTES))
    assert len(held) == 1
    assert sim.peak_bytes() <= BUDGET + 64 * 1024
    assert_passes_equal(model, expected, batch())
    assert len(runtime_of(model)._edges._stack) == 0
    end(model)


def _raise(error):
    raise error


@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "the model"])
def test_a_layer_that_is_called_by_itself_ends_a_pass_that_was_interrupted(
    sim, place, whole
):
    """It went on in that pass, which did not end: weights stayed on the device, and
    blocks in use, until none was left for others."""
    model, resident = streamed_stack(place), stack().to(place)
    for number in range(6):
        handle = model[number][0].register_forward_pre_hook(
            lambda *_: _raise(KeyboardInterrupt())
        )
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            (model if whole else model[number][0])(batch())
        handle.remove()
        other = (number + 1) % 6
        x, seen = batch().to(place), Operators()
        with torch.no_grad():
            with seen:
                found = model[other][0](x)
            expected = resident[other][0](x)
        assert seen.names == ["t", "addmm"]
        assert_bitwise_equal(found, expected, f"{other} after {number}")
        assert not runtime_of(model)._edges.is_busy
        assert not any(block.uses for block in blocks_of(model))
    assert_whole(model, place)
    end(model)


def test_a_change_made_before_an_exception_is_kept(place):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x, fail):
            with torch.no_grad():
                self.weight.add_(0.125)
            if fail == "raise":
                raise Stop
            if fail == "interrupt":
                raise KeyboardInterrupt
            return x @ self.weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Fragile() for _ in range(6)])

        def forward(self, x, at, fail):
            for number, layer in enumerate(self.layers):
                x = layer(x, fail if number == at else None)
            return x

    model = Model()
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device=place)
    for at, fail in itertools.product((5, 0, 3), ("raise", "interrupt")):
        for run, x in ((model, batch()), (plain, batch().to(place))):
            with torch.no_grad(), pytest.raises((Stop, KeyboardInterrupt)):
                run(x, at, fail)
        expected = plain(batch().to(place), 0, None)
        with torch.no_grad():
            assert_bitwise_equal(model(batch(), 0, None), expected, f"{fail} at {at}")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


def test_an_interrupt_while_slots_get_their_memory_loses_nothing(sim, place):
    memory = [SlotMemory.settle_in, SlotMemory._furnish, TransferEngine.adopt]
    memory.append(Block.set_views)
    expected = run_resident(stack(), place, batch())
    held = sim.allocated_bytes()
    for number in itertools.count(1):
        model = streamed_stack(place)
        interrupted = False
        try:
            with torch.no_grad(), interrupted_at(number, *memory):
                model(batch())
        except KeyboardInterrupt:
            interrupted = True
        assert_passes_equal(model, expected, batch())
        for slot in runtime_of(model)._parts.scheduler._memory.slots:
            if slot.lease is not None:  # else what others hold would not be seen
                assert slot.alone <= storage_use_count(slot.storage), number
        assert_whole(model, place)
        runtime_of(model).park()
        assert runtime_of(model).report().abandoned_slots == 0, number
        end(model)
        if not interrupted:
            break
    assert number > 100
    gc.collect()
    assert live_leases() == 0
    assert sim.allocated_bytes() == held
    assert_whole(another := streamed_stack(place), place)
    end(another)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_interrupt_where_modes_are_switched_leaves_gradients_as_they_were(
    sim, place, way
):
    """When the traceback went, they were as in backward, or in the user's context."""
    model = stagehand.layer(stack(12), vram_budget=3 * LAYER_BYTES, device=place)

    def run(number):
        with interrupted_at(number, "torch.autograd.grad_mode"):
            model(batch())

    def go_back(number):
        loss = model(batch()).sum()
        with interrupted_at(number, "torch.autograd.grad_mode"):
            loss.backward()

    for number in range(1, 40):
        kept = None
        try:
            go_back(number) if way == "backward" else torch.inference_mode(run)(number)
        except KeyboardInterrupt as error:
            kept = error
        del kept
        assert torch.is_grad_enabled(), number
        assert not torch.is_inference_mode_enabled(), number
    runtime_of(model).shutdown()


@pytest.mark.parametrize("leaves", ["park", "state_dict", "to"])
def test_an_interrupt_while_all_is_brought_home_leaves_a_model_that_runs(
    sim, place, leaves
):
    """What stays had left, and was not brought back: each pass found it on the host."""
    plain = nn.Sequential(nn.LayerNorm(WIDTH), *stack())
    expected = run_resident(plain, place, batch())
    model = stagehand.layer(plain, vram_budget=3 * LAYER_BYTES, device=place)
    runtime = runtime_of(model)
    leave = {
        "park": runtime.park,
        "state_dict": model.state_dict,
        "to": lambda: model.to("cpu"),
    }[leaves]
    moves = [Scheduler.park.__wrapped__, Mover.evict, SlotMemory.free]
    for number in itertools.count(1):
        assert_passes_equal(model, expected, batch(), passes=1)
        interrupted = False
        try:
            with interrupted_at(number, *moves):
                leave()
        except KeyboardInterrupt:
            interrupted = True
        assert_passes_equal(model, expected, batch(), passes=1)
        if not interrupted:
            break
    assert number > 20
    runtime.shutdown()


def test_what_is_broken_does_not_keep_the_rest_from_being_freed(sim, place):
    model = streamed_stack(place)
    with torch.no_grad():
        model(batch())
    parts = runtime_of(model)._parts
    left = []
    parts.leave, leave = lambda: (left.append(True), leave()), parts.leave
    parts.scheduler.drop = lambda: _raise(Stop())
    with pytest.raises(Stop):
        parts.close()
    assert left
    del parts.scheduler.drop
    end(model)


def test_wrong_inputs_raise_what_the_plain_model_raises(place):
    model = streamed_stack(place)
    with torch.no_grad():
        for wrong in (batch(4, WIDTH + 1), None):
            with pytest.raises((RuntimeError, TypeError, AttributeError)):
                model(wrong)
    with pytest.raises(TypeError):
        model(batch(), surprise=1)
    assert_whole(model, place)
    end(model)


# Budgets


def two_sizes():
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.LayerNorm(4 * WIDTH),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
    ).eval()


MODELS = {
    "equal": stack,
    "unequal": two_sizes,
    "embedding": lambda: nn.Sequential(
        nn.Embedding(300, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 300)
    ),
    "norms": lambda: nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(9))),
    "one": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH).eval(),
}


def inputs_of(name):
    if name == "embedding":
        return (torch.arange(6),)
    return (batch(), batch()) if name == "attention" else (batch(),)


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_budget_that_an_error_names_really_works(place, name):
    model = MODELS[name]()
    before = values(model)
    with pytest.raises(stagehand.StagehandOOMError, match="raise it to at") as error:
        stagehand.layer(model, vram_budget=1, device=place)
    assert error.value.limit_bytes == 1
    budget = error.value.needed_bytes
    stagehand.layer(model, vram_budget=budget, device=place)
    assert runtime_of(model).report().budget_bytes == budget
    with torch.no_grad():
        model(*inputs_of(name))
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), before, "after shutdown")


@pytest.mark.parametrize("name", MODELS)
def test_at_the_smallest_budget_passes_are_exact_and_one_byte_less_is_refused(
    sim, name
):
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = run_resident(model, "hpu", *inputs_of(name))
    budget = smallest_budget(model, "hpu")
    with pytest.raises(stagehand.StagehandOOMError):
        stagehand.layer(model, vram_budget=budget - 1)
    stagehand.layer(model, vram_budget=budget)
    assert_passes_equal(model, expected, *inputs_of(name))
    assert runtime_of(model).report().peak_device_bytes <= budget
    runtime_of(model).shutdown()


def test_a_budget_that_cannot_work_leaves_the_model_as_it_was(place):
    model = stack()
    state = {id(m): dict(m.__dict__) for m in model.modules()}
    with pytest.raises(stagehand.StagehandOOMError, match="raise it to at"):
        stagehand.layer(model, vram_budget=100, device=place)
    assert {id(m): m.__dict__ for m in model.modules()} == state
    assert not any(m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), stack()(batch()), "plain")


class Marked(torch.Tensor):
    """Is in no block."""

    def __deepcopy__(self, memo):
        return self.clone()


class Mixed(nn.Module):
    """A table whose rows are looked up, layers, what stays, and what is in no block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.body = stack()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("odd", torch.full((WIDTH,), 2.0).as_subclass(Marked))

    def forward(self, ids):
        return (self.body(self.embed(ids)) * self.mean * self.odd).as_subclass(
            torch.Tensor
        )


class Injected(Exception):
    """Stands for whatever a step may raise."""


@contextlib.contextmanager
def failing_at(step, modules):
    """Raise instead of one of the calls that the code of some modules makes."""
    left = step
    # What they raise nobody hears. Hypothesis has one, once a test of its has run.
    collectors = {getattr(each, "__code__", None) for each in gc.callbacks}

    def watch(frame, event, _):
        nonlocal left
        if event != "call" or frame.f_back.f_globals["__name__"] not in modules:
            return
        if frame.f_code in collectors:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # Python itself may call it, to close
        if frame.f_globals["__name__"] in ("_weakrefset", "weakref"):
            return  # the collector calls it: what it raises nobody hears
        left -= 1
        if not left:  # Python takes off who raises here
            raise Injected

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


_WEIGHTS = [f"weights.{name}" for name in ("sites", "entrances", "state_dicts")]
_MAKING = {f"stagehand.{name}" for name in ("runtime", "passing", *_WEIGHTS)}


def holdings(shared):
    """Memory, leases, places on the device and threads that somebody has."""
    return (
        sim_device.allocated_bytes(),
        sim_device.pinned_bytes(),
        live_leases(),
        [(each.name, each.nbytes) for each in shared.holdings()],
        {t.name for t in threading.enumerate() if t.name.startswith("stagehand")},
    )


def test_a_runtime_that_fails_anywhere_while_it_is_made_leaves_a_plain_model(place):
    """Its hooks stayed; nothing ran any more, and it was said to be streamed."""
    model, ids = Mixed(), torch.arange(8)
    model.body.to(place)  # it came from there, and is there again
    first = streamed_stack(place)
    shared = runtime_of(first)._tenancy.shared
    options = {
        "vram_budget": 3 * BUDGET,
        "nan_inf_check": True,
        "pool": runtime_of(first).shutdown_keep_pool(),
        "device": place,
    }
    expected, output = values(model), run_resident(model, place, ids)
    shape, held = Shape.of(model), holdings(shared)
    for step in itertools.count(1):
        try:
            with failing_at(step, _MAKING):
                stagehand.layer(model, **options)
            break
        except Injected:
            assert Shape.of(model) == shape, step
            assert_bitwise_equal(values(model), expected, f"after step {step}")
            assert holdings(shared) == held, step
    assert step > 100
    assert_passes_equal(model, output, ids)
    runtime_of(model).shutdown()
    assert Shape.of(model) == shape


_HOOKING = (
    *(f"stagehand.{name}" for name in ("runtime", *_WEIGHTS, "gradients.home")),
    "torch.utils.hooks",
    *(value for name, value in vars(nn.Module).items() if "register_" in name),
)


def test_an_interrupt_while_blocks_get_their_stores_is_not_another_error(place):
    """What undid the rest found blocks that had a store, and not its tensors yet."""
    model = stack()
    expected = values(model)
    for number in itertools.count(1):
        interrupted = False
        try:
            with interrupted_at(number, Block.set_store, blocks._fitting):
                stagehand.layer(model, vram_budget=BUDGET, device=place)
        except KeyboardInterrupt:
            interrupted = True
        if not interrupted:
            break
        assert "_stagehand_layer_runtime" not in vars(model)
        assert_bitwise_equal(values(model), expected, f"after line {number}")
    assert number > 50
    end(model)


@pytest.mark.parametrize("when", ["made", "shut down"])
def test_an_interrupt_while_a_runtime_is_made_or_ends_leaves_no_hook(place, when):
    """What was registered had no handle yet, and of those of which one was being taken
    off all others stayed, on a model that could neither run nor be shut down.
    """
    model = Mixed()
    shape, expected = Shape.of(model), values(model)
    for number in itertools.count(1, 5):
        interrupted = False
        try:
            with interrupted_at(number, *(_HOOKING if when == "made" else ())):
                stagehand.layer(model, vram_budget=3 * BUDGET, device=place)
            if when == "shut down":
                runtime = runtime_of(model)
                model.body(torch.ones(2, WIDTH)).sum().backward()
                with interrupted_at(number, *_HOOKING):
                    runtime.shutdown()
        except KeyboardInterrupt:
            interrupted = True
        if when == "shut down":
            runtime.shutdown()  # which may have been left early
        elif not interrupted:
            runtime_of(model).shutdown()
        model.zero_grad()
        assert Shape.of(model) == shape, number
        assert_bitwise_equal(values(model), expected, f"after line {number}")
        assert not any(t._backward_hooks for t in model.parameters())
        assert not any(t._post_accumulate_grad_hooks for t in model.parameters())
        if not interrupted:
            break
    assert number > 300


def test_the_smallest_watermark_that_block_mode_names_works(place):
    model = stack()
    low = stagehand.StagehandConfig(
        vram_high_watermark_mb=0.001, vram_low_watermark_mb=0.0005
    )
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.StagehandRuntime(model, low, r"^\d$", device=place)
    enough = stagehand.StagehandConfig(
        vram_high_watermark_mb=error.value.needed_bytes / 2**20,
        vram_low_watermark_mb=0.0005,
    )
    runtime = stagehand.StagehandRuntime(model, enough, r"^\d$", device=place)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime.shutdown()


def test_a_block_larger_than_a_slab_is_refused_with_both_sizes(place):
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(2)))
    config = stagehand.StagehandConfig(pinned_slab_mb=1, pinned_pool_mb=8)
    with pytest.raises(stagehand.StagehandOOMError, match=r"1\.45 MB.*1\.05 MB"):
        stagehand.StagehandRuntime(model, config, r"^\d$", device=place)
    config = stagehand.StagehandConfig(pinned_slab_mb=2, pinned_pool_mb=8)
    stagehand.StagehandRuntime(model, config, r"^\d$", device=place).shutdown()


def test_pinned_memory_that_holds_no_block_is_refused_with_the_least_that_works(sim):
    model = streamed_stack("hpu", ram_budget=LAYER_BYTES - 1)
    with torch.no_grad(), pytest.raises(stagehand.StagehandOOMError) as error:
        model(batch())
    assert "ram_budget" in str(error.value)
    runtime_of(model).shutdown()
    model = streamed_stack("hpu", ram_budget=error.value.needed_bytes)
    for _ in range(2):  # each looks at the state dict first, which brings all home
        assert_whole(model, "hpu")
    assert sim.peak_pinned_bytes() <= error.value.needed_bytes
    end(model)


# Files


def save(model, folder):
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_file_that_is_truncated_while_in_use_is_named_and_whole_again_works(
    place, tmp_path
):
    model = streamed_stack(place, **always_read(place))
    path = save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    expected = run_resident(stack(), place, batch())
    assert_passes_equal(model, expected, batch())
    content = path.read_bytes()
    stamp = path.stat()
    with path.open("r+b") as file:
        file.truncate(len(content) // 2)
    with torch.no_grad(), pytest.raises(stagehand.CheckpointError) as error:
        model(batch())
    assert str(path) in str(error.value)
    with path.open("r+b") as file:
        file.write(content)
    with torch.no_grad(), pytest.raises(stagehand.CheckpointError, match="load the"):
        model(batch())  # a file that was written to is not trusted
    _restore(path, stamp)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    assert_passes_equal(model, expected, batch())
    end(model)


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def rewrite(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("change", [cut, rewrite, Path.unlink])
def test_shutdown_gives_back_what_a_file_that_changed_does_not_hold_any_more(
    place, tmp_path, change
):
    """What is on the device, edited or not; the rest is named, for it may be lost."""
    model = streamed_stack(place, **always_read(place))
    plain, path = stack(), save(stack(), tmp_path)
    runtime = runtime_of(model)
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    assert_passes_equal(model, run_resident(plain, place, batch()), batch())
    edited = next(b for b in blocks_of(model) if b.stays).layout.entries[0].name
    with torch.no_grad():
        for each in (plain, model):
            each.get_parameter(edited).mul_(2)
    other = streamed_stack(place)  # not before: then the host's weights were edited
    here = {b for b in blocks_of(model) if b.state is BlockState.GPU_READY}
    away = [b for b in blocks_of(model) if b not in here]
    change(path)
    if change is Path.unlink:
        runtime.shutdown()
        assert_bitwise_equal(values(model), values(plain), "after shutdown")
    else:
        with pytest.raises(stagehand.CheckpointError) as error:
            runtime.shutdown()
        first = away[0].layout.entries[0].name
        lost = sum(len(block.tensors) for block in away)
        assert f"{lost} of its tensors, {first!r}" in str(error.value)
        assert str(path) in str(error.value)
        for block in here:
            for entry in block.layout.entries:
                mine, expected = (m.get_parameter(entry.name) for m in (model, plain))
                assert_bitwise_equal(mine.data, expected.data, entry.name)
    runtime.shutdown()  # nothing is left to do
    assert Shape.of(model).modules == Shape.of(plain).modules
    assert_passes_equal(other, run_resident(stack(), place, batch()), batch())
    end(other)


def with_angles():
    """A stack that ends in a norm, and in a buffer that is in no file."""
    norm = nn.LayerNorm(WIDTH)
    norm.register_buffer("angles", torch.arange(WIDTH), persistent=False)
    return stack().append(norm)


def test_shutdown_outlives_a_file_cut_short_that_lacks_some_of_what_stays(
    place, tmp_path
):
    """Buffers that are computed stay beside norms, which are no views of the file."""
    plain = with_angles()
    path = save(plain, tmp_path)
    model = stagehand.load(with_angles, tmp_path, vram_budget=BUDGET, device=place)
    assert_passes_equal(model, run_resident(plain, place, batch()), batch())
    cut(path)
    with pytest.raises(stagehand.CheckpointError, match="was shut down, but"):
        runtime_of(model).shutdown()
    assert_bitwise_equal(values(model[-1]), values(plain[-1]), "what stays")


def test_a_model_that_cannot_be_given_back_whole_keeps_no_other_one_of_its_pipeline(
    place, tmp_path
):
    models = {"first": stack(), "second": stack()}
    path = save(stack(), tmp_path)
    pipe = stagehand.pipeline(models, vram_budget=BUDGET, device=place)
    pipe.runtimes["first"].convert_registry_to_file_backed_sharded(tmp_path)
    cut(path)
    with pytest.raises(stagehand.CheckpointError, match="was shut down, but"), pipe:
        pass
    assert_bitwise_equal(values(models["second"]), values(stack()), "after shutdown")
    for model in models.values():
        assert Shape.of(model).modules == Shape.of(stack()).modules


def test_a_shutdown_that_fails_on_the_way_goes_on_to_the_end(place, monkeypatch):
    model = streamed_stack(place)
    runtime, error = runtime_of(model), OSError("no space left on device")
    with torch.no_grad():
        model(batch())

    def fail(*_):
        raise error

    monkeypatch.setattr(runtime._measure, "end_step", fail)
    with pytest.raises(OSError, match="no space left"):
        runtime.shutdown()
    runtime.shutdown()
    assert Shape.of(model).modules == Shape.of(stack()).modules
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


def _restore(path, stamp):
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize("passes", [0, 2])
def test_a_reader_that_fails_raises_where_the_block_is_needed_and_then_recovers(
    place, tmp_path, monkeypatch, passes
):
    model = streamed_stack(place, **always_read(place))
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    expected = run_resident(stack(), place, batch())
    files = runtime_of(model)._files.plain
    with torch.no_grad():
        for _ in range(passes):
            model(batch())
    fill = files.fill
    failing = stagehand.CheckpointError("model.safetensors cannot be read at byte 7")

    def fail(*_, **__):
        raise failing

    def two_passes():
        with torch.no_grad():
            model(batch())  # what it needs may be there already
            model(batch())

    for attempt in range(3):
        monkeypatch.setattr(files, "fill", fail)
        with pytest.raises(stagehand.CheckpointError) as error:
            two_passes()
        assert error.value is failing, attempt
        monkeypatch.setattr(files, "fill", fill)
        assert_passes_equal(model, expected, batch())
        for _ in range(attempt):
            assert_whole(model, place)  # brings all home first
    end(model)


def test_a_failed_read_ahead_is_not_raised_in_a_pass_that_does_not_need_it(
    place, tmp_path, monkeypatch
):
    model = streamed_stack(place, **always_read(place))
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    files = runtime_of(model)._files.plain
    with torch.no_grad():
        model(batch())
    fill = files.fill
    monkeypatch.setattr(
        files, "fill", lambda *_, **__: _raise(stagehand.ClosedError("no"))
    )
    with torch.no_grad(), pytest.raises(stagehand.ClosedError):
        model(batch())
    monkeypatch.setattr(files, "fill", fill)
    with torch.no_grad():
        model[3](batch())  # the first blocks were read ahead, and failed
    assert_whole(model, place)
    end(model)


def broken_files(state):
    """Folders that cannot back `stack()`, with what the error has to say."""
    name = "2.0.weight"
    without = {k: v for k, v in state.items() if k != name}
    yield "missing", without, [name]
    yield "shape", {**state, name: torch.zeros(3, 5)}, [name, "[3, 5]", "[32, 32]"]
    half = state[name].half()
    yield "dtype", {**state, name: half}, [name, "float32", "float16"]


@pytest.mark.parametrize("case", ["missing", "shape", "dtype"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(place, tmp_path, case):
    model = streamed_stack(place)
    expected = run_resident(stack(), place, batch())
    assert_passes_equal(model, expected, batch(), passes=1)
    cases = {name: rest for name, *rest in broken_files(stack().state_dict())}
    state, words = cases[case]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    stores = [b.store for b in blocks_of(model)]
    with pytest.raises(stagehand.CheckpointError) as error:
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    for word in (*words, "model.safetensors" if case != "missing" else str(tmp_path)):
        assert word in str(error.value)
    assert [b.store for b in blocks_of(model)] == stores
    assert runtime_of(model)._files.plain is None
    assert_passes_equal(model, expected, batch())
    end(model)


def test_a_truncated_checkpoint_is_refused_at_conversion(place, tmp_path):
    model = streamed_stack(place)
    path = save(stack(), tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(stagehand.CheckpointError, match="truncated"):
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    assert_whole(model, place)
    end(model)


def test_an_index_that_names_a_missing_shard_is_refused_at_conversion(place, tmp_path):
    model = streamed_stack(place)
    save(stack(), tmp_path).rename(tmp_path / "one.safetensors")
    names = dict.fromkeys(stack().state_dict(), "one.safetensors")
    names["2.0.bias"] = "gone.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(stagehand.CheckpointError, match=r"gone\.safetensors"):
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    assert_whole(model, place)
    end(model)


@pytest.mark.parametrize("backed", [False, True], ids=["in memory", "in other files"])
def test_a_shard_that_goes_while_its_tensors_are_mapped_changes_nothing(
    place, tmp_path, backed
):
    """Blocks before it had the values of files that were closed by then."""
    model = streamed_stack(place, **always_read(place))
    runtime, tensors = runtime_of(model), stack().state_dict()
    if backed:
        (tmp_path / "first").mkdir()
        save(stack(), tmp_path / "first")
        runtime.convert_registry_to_file_backed_sharded(tmp_path / "first")
    for first in range(2):
        half = list(tensors.items())[6 * first :][:6]
        part = {name: tensor + 1 for name, tensor in half}
        safetensors.torch.save_file(part, tmp_path / f"{first}.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "1.safetensors").unlink()
    stores, files = [b.store for b in blocks_of(model)], runtime._files.plain
    with pytest.raises(stagehand.CheckpointError, match=r"1\.safetensors cannot be op"):
        runtime.convert_registry_to_file_backed_sharded(checkpoint)
    assert [b.store for b in blocks_of(model)] == stores
    assert runtime._files.plain is files
    assert_whole(model, place)
    end(model)


def test_a_second_checkpoint_that_does_not_fit_leaves_the_first_in_use(place, tmp_path):
    model = streamed_stack(place)
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    save(stack(), tmp_path / "good")
    save(stack(3), tmp_path / "bad")
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path / "good")
    assert_whole(model, place)
    with pytest.raises(stagehand.CheckpointError):
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path / "bad")
    assert_whole(model, place)
    end(model)


# The device


def test_after_activations_run_out_of_device_memory_a_smaller_batch_works(sim):
    model = streamed_stack("hpu")
    expected = run_resident(stack(), "hpu", batch())
    with torch.no_grad():
        model(batch())
    sim.configure(capacity_bytes=sim.allocated_bytes() + 200_000)
    for rows in (4000, 1500, 900):
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            model(batch(rows, WIDTH))
        assert_passes_equal(model, expected, batch(), passes=2)
    sim.configure()
    assert_whole(model, "hpu")
    end(model)


def test_when_the_device_has_no_room_for_a_slot_the_next_pass_works_once_it_has(sim):
    model = streamed_stack("hpu")
    expected = run_resident(stack(), "hpu", batch())
    sim.configure(capacity_bytes=sim.allocated_bytes() + LAYER_BYTES + 5000)
    found = r"(?s)device out of memory: .* hpu:0 has none: lower that budget"
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=found):
        model(batch())
    sim.configure()
    assert_passes_equal(model, expected, batch())
    end(model)


# Threads


def in_threads(count, work):
    """Run `work(number)` in threads, and return what they raised."""
    errors = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_without_another_thread_passes_are_exact_and_warn_once(place):
    """A container may let a process have no more threads, for a time."""
    model = streamed_stack(place, **always_read(place))
    expected = run_resident(stack(), place, batch())
    with without_threads(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_passes_equal(model, expected, batch())
    told = [str(each.message) for each in caught if "no thread" in str(each.message)]
    assert len(told) == len(set(told)) > 0
    assert_whole(model, place)
    end(model)


def test_four_threads_call_one_runtime_and_all_get_exact_results(place):
    model = streamed_stack(place)
    inputs = [batch(n + 1, WIDTH) for n in range(4)]
    expected = [run_resident(stack(), place, x) for x in inputs]

    def work(number):
        with torch.no_grad():
            for _ in range(15):
                output = model(inputs[number])
                assert_bitwise_equal(output, expected[number], f"thread {number}")

    assert in_threads(4, work) == []
    assert_whole(model, place)
    end(model)


def test_exceptions_in_one_thread_do_not_disturb_the_others(place):
    model = streamed_stack(place)
    failing = threading.local()
    expected = run_resident(stack(), place, batch())

    def maybe(*_):
        kind = getattr(failing, "kind", None)
        if kind is not None:
            raise kind

    model[3][0].register_forward_pre_hook(maybe)

    def work(number):
        with torch.no_grad():
            for _ in range(10):
                if number % 2:
                    failing.kind = (Stop, KeyboardInterrupt)[number // 2]
                    with pytest.raises(failing.kind):
                        model(batch())
                else:
                    assert_bitwise_equal(model(batch()), expected, "quiet thread")

    assert in_threads(4, work) == []
    assert_whole(model, place)
    end(model)


def test_a_thread_that_was_interrupted_and_is_gone_holds_nobody_up(place):
    model = streamed_stack(place)

    def interrupted(_):
        handle = model[2].register_forward_pre_hook(lambda *_: _raise(Halt()))
        try:
            model(batch())
        finally:
            handle.remove()

    errors = in_threads(1, interrupted)
    assert [type(error) for error in errors] == [Halt]
    errors.clear()
    expected = run_resident(stack(), place, batch())
    assert in_threads(1, lambda _: assert_passes_equal(model, expected, batch())) == []
    assert_whole(model, place)
    end(model)


def test_a_thread_that_was_interrupted_and_lives_on_holds_nobody_up(place):
    model = streamed_stack(place, inference_mode=True)
    expected = run_resident(stack(), place, batch())
    left, done = threading.Event(), threading.Event()

    def work(number):
        if number == 1:
            left.wait(120)
            assert_passes_equal(model, expected, batch())
            done.set()
            return
        handle = model[2].register_forward_pre_hook(lambda *_: _raise(Halt()))
        with pytest.raises(Halt):
            model(batch())
        handle.remove()
        left.set()
        done.wait(120)
        assert_bitwise_equal(model(batch()), expected, "the first thread")
        assert torch.is_grad_enabled()

    assert in_threads(2, work) == []
    assert_whole(model, place)
    end(model)


def test_a_long_pass_in_one_thread_is_never_taken_for_a_forgotten_one(place):
    model = streamed_stack(place)
    expected = run_resident(stack(), place, batch())
    inside = threading.Event()

    def pause(*_):
        inside.set()
        _wait_for(lambda: len(waiting) == 3)
        for _ in range(20):
            threading.Event().wait(0.01)

    waiting = []

    def work(number):
        if number:
            inside.wait(120)
            waiting.append(number)
        with torch.no_grad():
            assert_bitwise_equal(model(batch()), expected, f"thread {number}")

    handle = model[3].register_forward_pre_hook(pause)
    assert in_threads(4, work) == []
    handle.remove()
    assert_whole(model, place)
    end(model)


def _wait_for(condition):
    for _ in range(12_000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def test_shutdown_while_another_thread_runs_waits_for_its_pass(place):
    model = streamed_stack(place)
    inside, go_on = threading.Event(), threading.Event()
    outputs = []

    def pause(*_):
        inside.set()
        go_on.wait(120)

    handle = model[3].register_forward_pre_hook(pause)

    def work(number):
        if number == 0:
            with torch.no_grad():
                outputs.append(model(batch()))
        else:
            inside.wait(120)
            threading.Timer(0.05, go_on.set).start()
            runtime_of(model).shutdown()

    assert in_threads(2, work) == []
    handle.remove()
    assert_bitwise_equal(outputs[0], run_resident(stack(), place, batch()), "output")
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


def test_shutdown_inside_a_pass_is_refused(place):
    model = streamed_stack(place)
    handle = model[3].register_forward_pre_hook(lambda *_: runtime_of(model).shutdown())
    refusal = "given back while it runs"
    with torch.no_grad(), pytest.raises(stagehand.ConfigError, match=refusal):
        model(batch())
    handle.remove()
    assert_whole(model, place)
    end(model)


def test_no_block_is_in_a_state_that_it_cannot_leave_after_a_failure(place):
    model = streamed_stack(place)
    for name in MODULES:
        raising_at(model.get_submodule(name), Stop, "before")
    for _ in MODULES:
        with torch.no_grad(), pytest.raises(Stop):
            model(batch())
        for block in blocks_of(model):
            assert (block.state is BlockState.UNLOADED) == (block.slot is None)
    assert_whole(model, place)
    end(model)


class Inner(nn.Module):
    """A part with sites in it, between sites."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.inner(self.into(x)))


def take_off(model, names, *tables):
    """Do as a tool does that removes all hooks, and not only its own."""
    for name in names:
        for table in tables:
            getattr(model.get_submodule(name), table).clear()


LOST = {
    "all": ["", "into", "inner", "inner.first", "inner.second", "out"],
    "the model": [""],
    "parts": ["into", "inner", "out"],
    "an inner edge": ["inner"],
    "nested sites": ["inner.first", "inner.second"],
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("room", ["for one layer", "for three of four"])
@pytest.mark.parametrize("names", LOST.values(), ids=LOST)
def test_a_model_that_lost_the_ends_of_its_calls_is_refused_by_what_it_lost(
    sim, names, room, grads
):
    torch.manual_seed(0)
    model = Outer()
    expected = run_resident(model, "hpu", batch())
    budget = smallest_budget(model, "hpu")
    more = 2 * LAYER_BYTES if room == "for three of four" else 0
    stagehand.layer(model, vram_budget=budget + more)
    runtime = runtime_of(model)
    assert_passes_equal(model, expected, batch())
    take_off(model, names, "_forward_hooks")
    with torch.set_grad_enabled(grads):
        with contextlib.suppress(stagehand.StagehandError):  # or it is not noticed yet
            model(batch())
        for _ in range(2):
            with pytest.raises(stagehand.StagehandError, match="has lost hooks") as of:
                model(batch())
            assert not isinstance(of.value, stagehand.StagehandOOMError)
            assert repr(names[0] or "Outer") in str(of.value)
            assert f"on {len(names)} of its modules" in str(of.value)
    runtime.shutdown()
    assert top_saved_hooks() is None
    stagehand.layer(model, vram_budget=budget)
    assert_passes_equal(model, expected, batch())
    runtime_of(model).shutdown()


@pytest.mark.parametrize("grads", [False, True])
def test_uses_that_no_hook_was_left_to_end_do_not_seem_to_lack_room(sim, grads):
    model = Outer()
    stagehand.layer(model, vram_budget=smallest_budget(model, "hpu"))
    take_off(model, LOST["nested sites"], "_forward_hooks")
    refused = pytest.raises(stagehand.StagehandError, match=r"'inner\.first' first")
    with torch.set_grad_enabled(grads), refused:
        model(batch())
    assert top_saved_hooks() is None
    runtime_of(model).shutdown()


def test_a_model_that_lost_what_begins_uses_is_refused_after_the_pass_that_failed(sim):
    model = Outer()
    expected = run_resident(model, "hpu", batch())
    stagehand.layer(model, vram_budget=smallest_budget(model, "hpu"))
    assert_passes_equal(model, expected, batch())
    take_off(model, LOST["nested sites"], "_forward_pre_hooks", "_forward_hooks")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="on the same device"):
            model(batch())
        for _ in range(2):
            with pytest.raises(stagehand.StagehandError, match="has lost hooks"):
                model(batch())
    runtime_of(model).shutdown()


@pytest.mark.parametrize("grads", [False, True])
def test_a_model_that_lost_the_ends_of_its_calls_can_be_given_back(sim, grads):
    torch.manual_seed(0)
    model = Outer()
    before = values(model)
    budget = smallest_budget(model, "hpu") + 2 * LAYER_BYTES
    stagehand.layer(model, vram_budget=budget)
    take_off(model, LOST["nested sites"], "_forward_hooks")
    with torch.set_grad_enabled(grads):
        model(batch())
    assert top_saved_hooks() is None
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), before, "after shutdown")


def test_a_failed_pass_does_not_make_a_model_seem_to_have_lost_hooks(place):
    model = streamed_stack(place)
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()
    expected = run_resident(stack(), place, batch())
    assert_passes_equal(model, expected, batch())
