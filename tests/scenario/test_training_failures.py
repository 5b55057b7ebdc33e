"""Whatever goes wrong in training: nothing is lost, and the next step is exact."""

import gc
import pickle
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at, interrupted_at_call
from scenario.small import runtime_of
from stagehand import torch_private
from stagehand.core.arena import live_leases
from stagehand.core.turn import Turn, _waits
from stagehand.errors import (
    ClosedError,
    DeadlockError,
    OrphanedParameterError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.frames import awaits_thread
from stagehand.gradients.gradients import Gradients
from stagehand.gradients.home import HOMES
from stagehand.graph import SavedTensors, _owner
from stagehand.passing import Passing
from stagehand.residency.shared import SharedDevice
from stagehand.torch_private import top_saved_hooks, waits_for_backward
from stagehand.weights.edges import Edges, _Backward
from training import (
    ALL,
    FEW,
    SOME,
    TIGHT,
    WIDTH,
    Net,
    Run,
    Setting,
    assert_at_rest,
    assert_same_notes,
    assert_trains_equally,
    built,
    copied,
    end,
    net,
    over,
    run_resident,
    sgd,
    start,
    train,
)


class Stop(Exception):
    pass


KINDS = pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])


def once(kind, calls=1):
    """A hook that raises at one of its calls."""
    left = [calls]

    def fail(*_):
        left[0] -= 1
        if left[0] == 0:
            raise kind

    return fail


def assert_clean(run, interrupted=False):
    """After a failure: parameters are whole on the host, gradients there or None."""
    if interrupted:
        run.model.state_dict()
    assert_at_rest(run)
    expected = net().state_dict()
    for name, tensor in run.model.state_dict().items():
        assert tensor.device.type == "cpu", name
        assert_bitwise_equal(tensor, expected[name], name)
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.device == parameter.device, name


def finish(run):
    """Train after the failure, and compare with training that knew no failure."""
    run.model.zero_grad()
    expected = run_resident(net, train, run.place)
    train(run)
    run.finish()
    assert_same_notes(run, expected)
    end(run, abandoned=True)  # a traceback may have held memory


# Exceptions


@over(FEW)
@KINDS
@pytest.mark.parametrize("name", ["entry", "blocks.0.up", "blocks.3", "head"])
@pytest.mark.parametrize("before", [0, 2])
def test_after_an_exception_in_a_forward_training_is_exact(
    sim, setting, kind, name, before
):
    run = start(net, setting)
    for _ in range(before):
        run.loss().backward()
    handle = run.model.get_submodule(name).register_forward_hook(once(kind))
    with pytest.raises(kind):
        run.loss()
    handle.remove()
    assert_clean(run, interrupted=kind is KeyboardInterrupt)
    finish(run)


def interrupt(run, around=None, gradients=True):
    """Ctrl-C in a site: nothing is told of the end of the forward."""
    handle = run.model.blocks[1].up.register_forward_pre_hook(once(KeyboardInterrupt))
    with (
        pytest.raises(KeyboardInterrupt),
        torch.set_grad_enabled(gradients),
        around or nullcontext(),
    ):
        run.loss()
    handle.remove()


def noting(seen):
    """Hooks of a user's that note what they see."""

    def note(tensor):
        seen.append(tensor.shape)
        return tensor

    return saved_tensors_hooks(note, lambda tensor: tensor)


@over(SOME)
@pytest.mark.parametrize("name", ["entry", "blocks.0.up", "blocks.3", "head"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_after_an_interrupt_in_a_forward_an_earlier_graph_goes_back(
    sim, setting, name, gradients, before
):
    """First of all: no forward comes between that would close what was left open."""

    def go_back(run):
        loss = run.loss()
        module = run.model.get_submodule(name)
        register = module.register_forward_hook
        if before:
            register = module.register_forward_pre_hook
        handle = register(once(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(gradients):
            run.loss(1)
        handle.remove()
        run.backward(loss)
        run.model.zero_grad()
        train(run)

    hooks = top_saved_hooks()
    assert_trains_equally(net, go_back, setting)
    assert top_saved_hooks() is hooks


@over(SOME)
def test_what_is_saved_after_an_interrupt_outlives_the_runtime(sim, setting):
    """Hooks are left on the thread; what they see of others is no site's."""
    run = start(net, setting)
    loss, other = run.loss(), nn.Linear(WIDTH, WIDTH)
    interrupt(run)
    loss.backward()
    result = other(torch.ones(2, WIDTH)).sum()
    run.runtime.shutdown()
    assert top_saved_hooks() is None
    result.backward()
    assert_bitwise_equal(other.weight.grad, torch.full((WIDTH, WIDTH), 2.0), "gradient")


@over(SOME)
def test_an_interrupt_leaves_no_hooks_of_users_around_the_pass(sim, setting):
    """Theirs ended with the `with` in which the interrupt came."""
    run = start(net, setting)
    seen = []
    interrupt(run, noting(seen))
    noted = len(seen)
    nn.Linear(WIDTH, WIDTH)(torch.ones(2, WIDTH)).sum()
    assert len(seen) == noted
    assert_clean(run, interrupted=True)
    finish(run)


class Holding(nn.Module):
    """A region of its own has another model in it, between its layers."""

    def __init__(self, other, region):
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other, self.region = [other], region

    def within(self, x):
        return self.behind(self.other[0](self.before(x)))

    def forward(self, x):
        return self.region(self.within, x)


def recomputed(call, x):
    return checkpoint(call, x, use_reentrant=False)


def seen_by_users(call, x):
    with noting([]):
        return call(x)


@pytest.mark.parametrize("region", [recomputed, seen_by_users])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_an_interrupt_in_a_model_inside_of_anothers_region_leaves_no_hooks_of_it(
    sim, place, region
):
    """Those of the region are popped by it, and all others belong to the models."""
    inner = net()
    outer = Holding(inner, region)
    for model in inner, outer:
        stagehand.layer(model, vram_budget="1MB", device=place)
    x, resident = torch.ones(2, WIDTH, device=place), net().to(place)

    def gradients():
        recomputed(resident, x).sum().backward()
        found = [parameter.grad for parameter in resident.parameters()]
        resident.zero_grad()
        return found

    expected = gradients()
    handle = inner.head.register_forward_pre_hook(once(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        outer(x)
    handle.remove()
    assert_bitwise_equal(gradients(), expected, "gradients of a resident model")
    with noting(seen := []):
        inner(x)
        noted = len(seen)
        nn.Linear(WIDTH, WIDTH)(torch.ones(2, WIDTH)).sum()
        assert len(seen) > noted > 0
    outer(x)
    assert top_saved_hooks() is None
    for model in inner, outer:
        runtime_of(model).shutdown()


class Reading(nn.Module):
    """Its table is looked up by rows, in a region."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        return self.head(recomputed(self.words, rows))


def test_an_interrupt_in_a_lookup_of_rows_leaves_no_region(sim):
    model, rows = Reading(), torch.arange(4)
    stagehand.layer(model, vram_budget="3KB", device="hpu")
    model(rows).sum().backward()
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        try:
            with interrupted_at_call(number, "stagehand.weights.rows"):
                model(rows)
        except KeyboardInterrupt:
            interrupted = True
        top = top_saved_hooks()
        assert top is None or type(_owner(top)) is SavedTensors, number
        model(rows)
        assert top_saved_hooks() is None, number
    assert number > 10
    runtime_of(model).shutdown()


_HOOKING = [
    SavedTensors.push_hooks,
    SavedTensors.leave_hooks,
    torch_private.replace_saved_hooks,
    torch_private.take_off_hooks,
    torch_private._at_once,
    torch_private._put_on,
]


def test_an_interrupt_where_hooks_are_taken_off_leaves_none_at_shutdown(sim):
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        run = start(net, TIGHT)
        try:
            with interrupted_at(number, SavedTensors.leave_hooks, *_HOOKING[3:4]):
                run.loss()
        except KeyboardInterrupt:
            interrupted = True
        run.runtime.shutdown()
        assert top_saved_hooks() is None, number
    assert number > 5


@over(FEW)
def test_an_interrupt_where_hooks_are_put_on_or_taken_off_loses_no_hooks_of_users(
    sim, setting
):
    """Also where others are taken off from below them, of an interrupt before."""
    run = start(net, setting)
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        interrupt(run)
        with noting(seen := []):
            try:
                with interrupted_at(number, *_HOOKING):
                    run.loss()
            except KeyboardInterrupt:
                interrupted = True
            seen.clear()
            nn.Linear(WIDTH, WIDTH)(torch.ones(2, WIDTH)).sum()
            assert seen, number
        nn.Linear(WIDTH, WIDTH)(torch.ones(2, WIDTH)).sum()
        assert len(seen) == 1, number
        run.loss()
        assert top_saved_hooks() is None, number
    assert number > 50
    assert_clean(run)
    finish(run)


@over(SOME)
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_users_around_the_pass_after_an_interrupt_stay(sim, setting, inside):
    """What that has left lies below them, and is taken off from there. It is the hooks
    around the interrupted pass, if there were any: these popped those of the pass."""
    run = start(net, setting)
    around = saved_tensors_hooks(torch.clone, torch.clone)
    interrupt(run, around if inside else None)
    seen = []
    with (hooks := noting(seen)):
        loss = run.loss()
        assert top_saved_hooks()[0] is hooks.pack_hook
    assert seen
    assert top_saved_hooks() is None
    loss.backward()
    run.model.zero_grad()
    assert_clean(run, interrupted=True)
    finish(run)


def net_that_turns_gradients_on():
    """A network whose sites are called with gradients, also where it is not."""
    model = net()
    model.blocks[1].forward = torch.enable_grad()(model.blocks[1].forward)
    return model


@over(FEW)
@pytest.mark.parametrize("gradients", [True, False])
def test_an_interrupted_thread_leaves_the_hooks_of_another_alone(
    sim, setting, gradients
):
    """Each thread has its own hooks for saved tensors, and pops no others."""
    run = start(net_that_turns_gradients_on, setting)
    interrupt(run, gradients=gradients)
    seen = []

    def go_on():
        with (hooks := noting(seen)):
            loss = run.loss()
            assert top_saved_hooks()[0] is hooks.pack_hook
        loss.backward()

    in_thread(go_on)
    assert seen
    run.model.zero_grad()
    assert_clean(run, interrupted=True)
    assert top_saved_hooks() is None
    finish(run)


def fail_at_a_gradient(run, kind):
    return run.model.blocks[2].up.weight.register_hook(once(kind))


def fail_after_a_gradient(run, kind):
    place = run.model.blocks[2].up.weight
    return place.register_post_accumulate_grad_hook(once(kind))


def fail_at_an_activation(run, kind, block=2):
    def hook(module, args, output):
        if output.requires_grad:
            output.register_hook(once(kind))

    return run.model.blocks[block].up.register_forward_hook(hook)


PLACES = [fail_at_a_gradient, fail_after_a_gradient, fail_at_an_activation]


@over(FEW)
@KINDS
@pytest.mark.parametrize("arm", PLACES)
@pytest.mark.parametrize("before", [0, 2])
def test_after_an_exception_in_a_backward_training_is_exact(
    sim, setting, kind, arm, before
):
    run = start(net, setting)
    for _ in range(before):
        run.loss().backward()
    handle = arm(run, kind)
    with pytest.raises(kind):
        run.loss().backward()
    handle.remove()
    assert_clean(run)
    finish(run)


@over(FEW)
def test_a_cast_in_a_backward_that_fails_is_refused_by_the_next_forward(sim, setting):
    """Nobody heard what the end of the failed one raised, which was then half an end:
    the next gradients were added to those that it had brought."""
    run = start(net, setting)
    run.loss().backward()
    weight = run.model.blocks[2].up.weight

    def fail(_):
        weight.data = weight.data.half()
        raise Stop

    handle = weight.register_hook(fail)
    with pytest.raises(Stop):
        run.loss().backward()
    handle.remove()
    with pytest.raises(OrphanedParameterError, match="float16"):
        run.loss()
    assert_clean(run)
    finish(run)


@over(FEW)
def test_losing_gradients_of_earlier_calls_warns_unless_all_are_cleared(sim, setting):
    run = start(net, setting)
    for clears in (True, False):
        run.loss().backward()
        handle = fail_at_a_gradient(run, Stop)
        with pytest.raises(Stop):
            run.loss().backward()
        handle.remove()
        assert run.model.blocks[0].up.weight.grad is not None
        if clears:
            run.model.zero_grad()
    with pytest.warns(StagehandWarning, match="parameters that had gradients"):
        run.loss().backward()
    finish(run)


class Breaking(torch.autograd.Function):
    """Hands on what it gets, and a gradient of a form that no kernel takes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.mm(grad, grad)  # 4 by 16


class Hungry(torch.autograd.Function):
    """Needs more memory on its way back than there is."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(2**42)


@over(FEW)
@pytest.mark.parametrize(
    ("function", "error"),
    [(Breaking, "mat1 and mat2"), (Hungry, "out of memory")],
)
def test_after_an_operator_failed_in_backward_training_is_exact(
    sim, setting, function, error
):
    run = start(net, setting)
    place = run.model.blocks[2]
    handle = place.register_forward_hook(lambda _, args, out: function.apply(out))
    with pytest.raises(RuntimeError, match=error):
        run.loss().backward()
    handle.remove()
    assert_clean(run)
    finish(run)


@over(FEW)
@KINDS
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["norm", "up"])
def test_after_an_exception_in_a_recomputation_training_is_exact(
    sim, setting, kind, reentrant, name
):
    run = start(net, setting)
    run.model.around = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    place = run.model.blocks[2].get_submodule(name)
    handle = place.register_forward_hook(once(kind, calls=2))
    with pytest.raises(kind):
        run.loss().backward()
    handle.remove()
    del run.model.around
    assert_clean(run, interrupted=kind is KeyboardInterrupt)
    finish(run)


@over(FEW)
@KINDS
def test_exceptions_in_every_backward_do_not_add_up(sim, setting, kind):
    run = start(net, setting)
    most = []
    for _ in range(6):
        handle = run.model.blocks[1].up.weight.register_hook(once(kind))
        with pytest.raises(kind):
            run.loss().backward()
        handle.remove()
        run.model.zero_grad()
        run.loss().backward()  # autograd's thread drops what it held of the last one
        run.model.zero_grad()
        most.append((sim.allocated_bytes(), sim.pinned_bytes(), live_leases()))
    assert all(now <= then for now, then in zip(most[-1], most[2], strict=True))
    finish(run)


@over([FEW[0], Setting("cpu", "layers", "smallest")])
def test_an_interrupt_where_a_failed_backward_ends_stops_nobody(
    sim, setting, monkeypatch
):
    """Python drops one that comes where a finalizer runs: the turn was never free."""
    run, dropped = start(net, setting), []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: dropped.append(it.exc_type))
    plain = run_resident(net, lambda plain: plain.backward(plain.loss()), run.place)
    expected = {what: it for what, it in plain.notes if "gradient" in what}
    for number in range(1, 41):
        handle = run.model.blocks[1].up.weight.register_hook(once(Stop))
        loss, kinds = run.loss(), (Stop, KeyboardInterrupt)
        with pytest.raises(kinds), interrupted_at(number, *_ENDING):
            loss.backward()
        handle.remove()
        run.model.zero_grad()
        if number % 2:
            run.backward(run.loss())
        else:
            in_thread(lambda: run.backward(run.loss()))
        assert_bitwise_equal(dict(run.notes), expected, f"line {number}")
        run.notes.clear()
        run.model.zero_grad()
    assert set(dropped) <= {KeyboardInterrupt}
    if setting.place == "cpu":  # elsewhere autograd's thread may be the last to hold it
        assert len(dropped) > 20
    finish(run)


def test_an_interrupt_that_comes_while_autograds_thread_works_is_raised(
    sim, monkeypatch
):
    """Python dropped it where autograd let go of what tells the end."""
    run, dropped, raised = start(net, FEW[0]), [], 0
    monkeypatch.setattr(sys, "unraisablehook", lambda it: dropped.append(it.object))
    # Who runs in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(6):
        weight = run.model.blocks[1].up.weight
        handle = weight.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
        try:
            run.loss().backward()
        except KeyboardInterrupt:
            raised += 1
        handle.remove()
        run.model.zero_grad()
    signal.signal(signal.SIGINT, before)
    finish(run)
    assert raised  # a finalizer of somebody else's may be the first to run
    assert _Backward.__del__ not in dropped


def test_an_interrupt_where_a_failed_inner_backward_ends_stops_nobody(sim, monkeypatch):
    """Python drops it there: the forward waited for that backward for ever."""
    run, dropped = start(net, FEW[0]), []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: dropped.append(it.exc_type))
    losses = []

    def go_back(number, *_):
        if losses:
            kinds = Stop, KeyboardInterrupt
            with pytest.raises(kinds), interrupted_at(number, *_ENDING_INSIDE):
                losses.pop().backward()

    for number in range(1, 13):
        x = run.batch(1).cpu().requires_grad_()
        x.register_hook(once(Stop))  # in the caller's thread
        losses.append(run.model(x.to("hpu")).square().mean())
        inside = run.model.blocks[2]
        handle = inside.register_forward_pre_hook(partial(go_back, number))
        with torch.no_grad():
            run.model(run.batch())
        handle.remove()
        assert not run.runtime._edges._inner_ends
    assert set(dropped) <= {KeyboardInterrupt}
    run.model.zero_grad()
    finish(run)


def _parts(*names):
    return [
        part
        for kind in (Edges, _Backward)
        for name, part in vars(kind).items()
        if name in names
    ]


_ENDING = [
    *_parts("__del__", "_leave_backward", "_end_backward", "_forget_backward"),
    *(Passing.end_backward, Passing._end_backward, Gradients.give_up),
]
_ENDING_INSIDE = [*_parts("__del__", "_leave_inner", "_end_inner"), Turn.dismiss]


# Calls in between


def read_state(run):
    state = run.model.state_dict()
    run.note("state", [tensor.clone() for tensor in state.values()])


def read_weights(run):
    run.note("weights", [p.detach().clone() for p in run.model.parameters()])


def copy_model(run):
    copy = copied(run.model)
    run.note("copy", list(copy.state_dict().values()))
    if run.runtime is not None:
        run.note("what the copy does", copy(run.batch().cpu()))
    else:
        run.note("what the copy does", copied(run.model).to("cpu")(run.batch().cpu()))


def move_home(run):
    if run.runtime is not None:
        run.model.to("cpu")


def lower_the_budget(run):
    if run.runtime is not None:
        run.runtime.set_budget(run.runtime._parts.steering.smallest_budget())


def raise_the_budget(run):
    if run.runtime is not None:
        run.budget *= 2
        run.runtime.set_budget(run.budget)


def pickle_model(run):
    model = run.model if run.runtime is not None else copied(run.model).to("cpu")
    run.note("pickled", list(pickle.loads(pickle.dumps(model)).state_dict().values()))


CALLS = [
    read_state,
    read_weights,
    copy_model,
    pickle_model,
    move_home,
    lower_the_budget,
    raise_the_budget,
]


@over(FEW)
@pytest.mark.parametrize("call", CALLS)
def test_calls_between_forward_backward_and_step_change_nothing(sim, setting, call):
    # As without streaming, an optimizer's state does not follow a model to the host.
    kind = torch.optim.SGD if call is move_home else torch.optim.AdamW

    def script(run):
        optimizer = run.optimizer(kind, lr=0.1)
        for number in range(4):
            calls = number in (1, 3)  # the optimizer has state by then
            loss = run.loss(number)
            if calls:
                call(run)
            run.backward(loss)
            if calls:
                call(run)
            run.look()
            run.backward(run.loss(number + 50))
            if calls:
                call(run)
            optimizer.step()
            if calls:
                call(run)
            optimizer.zero_grad()

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_a_graph_that_outlives_the_runtime_says_so(sim, setting):
    run = start(net, setting)
    loss = run.loss()
    run.runtime.shutdown()
    with pytest.raises(ClosedError, match="shut down"):
        loss.backward()
    run.model.to(run.place)
    train(run)


@over(FEW)
def test_a_second_runtime_goes_on_where_the_first_ended(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(4):
            run.backward(run.loss(number))
            if run.runtime is not None and number in (1, 2):
                run.runtime.shutdown()
                run.runtime = setting.stream(run.model, run.budget)
            run.backward(run.loss(number + 50))
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(net, script, setting)


def assign(run):
    train(run)
    entry = run.model.entry.weight
    entry.data = torch.full_like(entry, 3)


def step_fused(run):
    optimizer = torch.optim.AdamW(run.model.parameters(), fused=True)
    run.loss().backward()
    optimizer.step()
    run.model.zero_grad()


@over(SOME)
@pytest.mark.parametrize("change", [train, assign, step_fused])
def test_parameters_that_outlive_their_model_have_what_was_trained(
    sim, setting, change
):
    """Also those that an optimizer has stepped on the device, where they stay."""
    run = start(net, setting)
    change(run)
    kept = dict(run.model.named_parameters())
    staying = kept["entry.weight"].device.type == "hpu"
    assert staying == (setting is FEW[1])
    expected = {name: p.detach().cpu().clone() for name, p in kept.items()}
    known = weakref.ref(run.model)
    del run
    gc.collect()
    assert known() is None
    for name, parameter in kept.items():
        assert_bitwise_equal(parameter.detach().cpu(), expected[name], name)


@over(FEW)
@pytest.mark.parametrize("graph", [False, True])
def test_a_model_that_is_dropped_in_training_leaves_nothing(sim, setting, graph):
    """The fixture finds leases, threads and bytes that are left."""
    run = start(net, setting)
    train(run)
    model = weakref.ref(run.model)
    loss = run.loss() if graph else None
    run.loss().backward()
    run.optimizers.clear()
    del run
    gc.collect()
    if loss is not None:
        with pytest.raises(ClosedError, match="is gone"):
            loss.backward()
        del loss
        gc.collect()
    assert model() is None


def test_an_interrupt_in_a_recompute_leaves_the_next_one_its_inputs(sim):
    """They are on the host; inside of what is recomputed nothing is moved."""
    run = start(net, TIGHT)
    x, stopping = torch.randn(3, WIDTH), []

    def stop(*_):
        if stopping and torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt

    hook = run.model.blocks[2].down.register_forward_pre_hook(stop)

    def learn():
        checkpoint(run.model, x, use_reentrant=False).sum().backward()
        return [p.grad.clone() for p in run.model.parameters()]

    expected = learn()
    run.model.zero_grad()
    stopping.append(True)
    with pytest.raises(KeyboardInterrupt):
        learn()
    stopping.clear()
    run.model.zero_grad()
    assert_bitwise_equal(learn(), expected, "gradients")
    hook.remove()
    run.model.zero_grad()
    end(run)


def test_what_a_runtime_has_left_behind_keeps_no_other_from_training(sim):
    """A traceback, say, keeps what was noted of its gradients, or ends it once more."""
    run = start(net, TIGHT)
    run.loss().backward()
    run.model.zero_grad()
    left = [*HOMES.values()]
    assert len(left) > 10
    end(run)
    for home in left:
        home.dismiss()
    run.runtime = TIGHT.stream(run.model, run.budget)
    run.loss().backward()
    run.model.zero_grad()
    end(run)


@pytest.mark.parametrize("block", range(5))
def test_gradients_that_arrive_when_a_backward_fails_leave_no_memory(sim, block):
    """They are added to earlier ones, by way of memory that is given back."""
    run = start(net, Setting("hpu", "layers", "third"))
    run.loss().backward()
    leased = run.runtime._parts.pinned_arena.leased_bytes
    for _ in range(3):
        handle = fail_at_an_activation(run, Stop, block)
        with pytest.raises(Stop):
            run.loss().backward()
        handle.remove()
        run.model.zero_grad()
        run.loss().backward()
    assert run.runtime._parts.pinned_arena.leased_bytes == leased
    run.model.zero_grad()
    end(run, abandoned=True)


# Threads


def in_thread(call):
    failed = []

    def body():
        try:
            call()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not failed, failed


@over(ALL)
def test_a_state_dict_is_on_the_host_and_has_whole_storages_beside_a_graph(
    sim, setting
):
    """Also of what stays, whose gradients that graph waits for."""
    run = start(net, setting)
    loss = run.loss()
    for tensor in run.model.state_dict().values():
        assert tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    run.backward(loss)
    run.model.zero_grad()
    del loss
    end(run)


@over(FEW)
def test_another_thread_may_run_the_backward(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            loss = run.loss(number)
            in_thread(loss.backward)
            run.look()
            in_thread(lambda number=number: run.loss(number + 50).backward())
            run.look()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_two_threads_train_two_models(sim, setting):
    expected = run_resident(net, train, setting.place)
    runs = [start(net, setting) for _ in range(2)]
    for run in runs:  # they share: autograd's one thread goes back through both at once
        run.budget *= 2
        run.runtime.set_budget(run.budget)
    threads = [threading.Thread(target=train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        run.finish()
        assert_same_notes(run, expected)
        end(run)


@over(FEW)
def test_one_thread_goes_back_while_another_goes_forward(sim, setting):
    """They take turns; each gets what it would get alone."""
    run = start(net, setting)
    losses = [run.loss(number) for number in range(6)]
    found = []

    def validate():
        with torch.no_grad():
            found.extend(run.loss(99).item() for _ in range(12))

    thread = threading.Thread(target=validate)
    thread.start()
    for loss in losses:
        loss.backward()
    thread.join()
    run.look()
    plain = net().to(run.place)
    for number in range(6):
        plain(run.batch(number)).square().mean().backward()
    with torch.no_grad():
        assert set(found) == {plain(run.batch(99)).square().mean().item()}
    for mine, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        assert_bitwise_equal(mine.grad, theirs.grad, "gradient")
    end(run)


def raising_nothing(call):
    with suppress(Stop):
        call()


def resume_after_a_site(model, pause, go_on):
    first, second = model.blocks[1].up, model.blocks[1].down
    first.register_forward_hook(lambda *_: pause())
    second.register_forward_pre_hook(lambda *_: go_on())


def resume_in_a_site(model, pause, go_on):
    site = model.blocks[1].down
    site.register_forward_pre_hook(lambda *_: pause())
    site.register_forward_hook(lambda *_: go_on())


def resume_at_the_end(model, pause, go_on):
    model.at_the_end = pause
    model.register_forward_hook(lambda *_: go_on())


@pytest.mark.parametrize(
    ("resume", "fails"),
    [
        (resume_after_a_site, False),
        (resume_after_a_site, True),
        (resume_in_a_site, False),
        (resume_at_the_end, False),
    ],
)
def test_a_forward_waits_for_a_backward_that_was_let_in(
    sim, monkeypatch, resume, fails
):
    """Autograd's one thread goes back for two: for a forward, which waits for it, and
    for another thread. The forward may go on just after autograd has looked whether it
    waits: it does so once the other thread's backward is over. Who comes meanwhile is
    let in, too, and may fail.
    """

    class Ending(Net):
        at_the_end = staticmethod(lambda: None)

        def forward(self, x):
            y = super().forward(x)
            self.at_the_end()
            return y

    let_in, decided, went_on = (threading.Event() for _ in range(3))
    paused, await_inner_calls = [], Turn.await_inner_calls
    is_really_waited_for = Turn._is_waited_for

    def is_waited_for(turn, me):
        late = not let_in.is_set()
        let_in.set()
        return late or is_really_waited_for(turn, me)

    def waits(turn):
        decided.set()
        await_inner_calls(turn)

    def pause():
        if not paused:
            paused.append(True)
            second.start()
            assert let_in.wait(timeout=120)

    def go_on():
        went_on.set()
        decided.set()

    build = built(Ending)
    run = start(build, Setting("hpu", "layers", "third"))
    hidden, seen = run.model.blocks[4](run.batch(0)), []

    def wait(_):
        assert decided.wait(timeout=120)
        seen.append(went_on.is_set())
        third.start()
        while not waits_for_backward(third.ident):
            threading.Event().wait(0.001)

    hidden.register_hook(wait)
    second = threading.Thread(target=run.model.head(hidden).sum().backward)
    if fails:
        run.handles.append(fail_at_an_activation(run, Stop, block=3))
    late = run.model.blocks[3](run.batch(2)).sum()
    third = threading.Thread(target=raising_nothing, args=(late.backward,))
    resume(run.model, pause, go_on)
    monkeypatch.setattr(Turn, "_is_waited_for", is_waited_for)
    monkeypatch.setattr(Turn, "await_inner_calls", waits)
    with torch.no_grad():
        output = run.model(run.batch(1))
    second.join()
    third.join()
    assert seen == [False]
    run.look()
    plain = Run(model=build().to(run.place), place=run.place)
    if fails:
        fail_at_an_activation(plain, Stop, block=3)
    plain.model.head(plain.model.blocks[4](run.batch(0))).sum().backward()
    raising_nothing(plain.model.blocks[3](run.batch(2)).sum().backward)
    with torch.no_grad():
        assert_bitwise_equal(output, plain.model(run.batch(1)), "output")
    plain.look()
    assert_same_notes(run, plain)
    run.model.at_the_end = None
    end(run)


def _park(run):
    run.runtime.park()


def _forward(run):
    run.loss()


def _block(run):
    run.model.blocks[1](run.batch())


def _by_hand(run):
    block = run.runtime.block_ids[0]
    run.runtime.before_block(block)
    run.runtime.after_block(block)


def _set_budget(run):
    run.runtime.set_budget(run.budget)


def fail_with_a_node_left(run, at_the_end=lambda: None):
    """Let a backward fail in this thread while autograd's own is in one of its nodes.

    This thread has a gradient of the host, and so the pass.

    Returns:
        An event that lets the node go on to its end.
    """
    weight = run.model.head.weight
    begun, goes_on = threading.Event(), threading.Event()

    def linger(_):
        begun.set()
        goes_on.wait(10)
        at_the_end()

    def fail(_):
        begun.wait(10)
        raise Stop

    run.loss()
    inputs = run.batch().requires_grad_()
    run.handles.append(inputs.register_hook(linger))
    handle = weight.register_post_accumulate_grad_hook(fail)
    loss = inputs.square().sum() + weight.square().sum().to(run.place)
    with pytest.raises(Stop):
        loss.backward()
    handle.remove()
    assert run.runtime._edges.is_busy
    return goes_on


def result_of_a_thread(run):
    """Wait for what another thread gets from a run's model."""

    def predict():
        with torch.no_grad():
            return run.model(run.batch())

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(predict).result()


def finish_without_hooks(run):
    while run.handles:
        run.handles.pop().remove()
    finish(run)


@pytest.mark.parametrize("call", [_park, _forward, _block, _by_hand, _set_budget])
def test_a_backward_that_failed_is_over_before_its_thread_goes_on(call, sim):
    run = start(net, FEW[0])
    goes_on = fail_with_a_node_left(run)
    timer = threading.Timer(0.1, goes_on.set)
    timer.start()
    call(run)
    assert goes_on.is_set()
    timer.join()
    run.model.zero_grad()
    finish_without_hooks(run)


def test_who_waits_for_a_backward_that_failed_is_told_of_no_deadlock(sim, monkeypatch):
    """The thread that has the turn waits for it; but autograd's own ends it."""
    run = start(net, FEW[0])
    goes_on = fail_with_a_node_left(run)
    owner, note_wait = run.runtime._edges.lock.owner, Turn._note_wait

    def look(turn, me, *, in_backward):
        is_waited_for = awaits_thread(owner, me)
        note_wait(turn, me, in_backward=in_backward)
        if is_waited_for:
            goes_on.set()

    monkeypatch.setattr(Turn, "_note_wait", look)
    output = result_of_a_thread(run)
    assert goes_on.is_set()
    assert_bitwise_equal(output, net().to("hpu")(run.batch()), "output")
    finish_without_hooks(run)


def test_who_waits_for_room_until_a_failed_backward_is_over_gets_it(sim, monkeypatch):
    """The thread that began that waits for it; but autograd's own ends it."""
    run, other = start(net, FEW[0]), start(net, FEW[0])
    goes_on = fail_with_a_node_left(run)
    owner, are_stuck = run.runtime._edges.lock.owner, SharedDevice._are_stuck

    def look(device, threads):
        is_waited_for = awaits_thread(owner, threading.current_thread())
        stuck = are_stuck(device, threads)
        if is_waited_for:
            goes_on.set()
        return stuck

    monkeypatch.setattr(SharedDevice, "_are_stuck", look)
    output = result_of_a_thread(other)
    assert goes_on.is_set()
    assert_bitwise_equal(output, net().to("hpu")(run.batch()), "output")
    finish_without_hooks(run)
    end(other)


@pytest.mark.parametrize("when", ["at its beginning", "on its way"])
def test_a_model_gets_the_room_of_a_backward_that_failed_in_its_thread(
    sim, monkeypatch, when
):
    """It was refused, or had the other model's blocks moved in two threads at once."""
    run, other = start(net, FEW[0]), start(net, FEW[0])
    events, are_stuck = [], SharedDevice._are_stuck

    def fail(*_):
        handle.remove()
        with torch.enable_grad():
            events.append(fail_with_a_node_left(run))

    def look(device, threads):
        stuck = are_stuck(device, threads)
        for event in events:
            event.set()
        return stuck

    handle = other.model.blocks[1].register_forward_pre_hook(fail)
    if when == "at its beginning":
        fail()
    monkeypatch.setattr(SharedDevice, "_are_stuck", look)
    with torch.no_grad():
        output = other.model(other.batch())
    assert events[0].is_set()
    assert_bitwise_equal(output, net().to("hpu")(other.batch()), "output")
    finish_without_hooks(run)
    end(other)


def _run_another(other):
    with pytest.raises(StagehandOOMError), torch.no_grad():
        other.model(other.batch())


def _go_back(run):
    run.losses.pop().backward()


@pytest.mark.parametrize("call", [_run_another, _go_back])
def test_the_last_node_of_a_backward_that_failed_waits_for_nothing_of_it(sim, call):
    """Room, or the turn: it waited for its own end."""
    run = start(net, FEW[0])
    asks = start(net, FEW[0]) if call is _run_another else run
    asks.losses, over, errors = [asks.loss(1)], threading.Event(), []

    def ask():
        try:
            call(asks)
        except BaseException as error:  # autograd would drop it
            errors.append(error)
            raise
        finally:
            over.set()

    fail_with_a_node_left(run, ask).set()
    assert over.wait(60)
    assert errors == []
    del asks.losses
    if asks is not run:
        end(asks)
    finish_without_hooks(run)


def _inside_of_another(call):
    other = torch.ones((), requires_grad=True)
    other.register_hook(lambda _: call())
    (2 * other).backward()


@pytest.mark.parametrize("nests", [False, True])
def test_a_backward_that_failed_is_over_before_the_next_one_of_its_thread(sim, nests):
    """Its gradients were taken for the failed one's, and dropped with them."""
    run = start(net, FEW[0])
    weight = run.model.head.weight
    run.loss()
    loss = 3 * weight.sum()
    goes_on = fail_with_a_node_left(run)
    run.model.zero_grad()
    timer = threading.Timer(0.1, goes_on.set)
    timer.start()
    _inside_of_another(loss.backward) if nests else loss.backward()
    assert goes_on.is_set()
    assert_bitwise_equal(weight.grad, torch.full_like(weight, 3), "gradient")
    timer.join()
    finish_without_hooks(run)


def test_the_thread_that_ends_a_failed_backward_touches_no_gradient(sim, monkeypatch):
    """Its caller may be in `zero_grad()`, and was: that ended the process."""
    run = start(net, FEW[0])
    goes_on = fail_with_a_node_left(run)
    there, touched = torch._C.TensorBase.grad, []

    def noted(access):
        def note(tensor, *value):
            touched.append(threading.current_thread())
            return access(tensor, *value)

        return note

    with monkeypatch.context() as patched:
        grad = property(noted(there.__get__), noted(there.__set__))
        patched.setattr(torch.Tensor, "grad", grad)
        goes_on.set()
        assert run.runtime._edges.await_failure()
        assert touched == []
        assert run.model.head.weight.grad is not None
        assert touched == [threading.current_thread()]
    finish_without_hooks(run)


@pytest.mark.parametrize("call", ["forward", "without", "backward", "shutdown"])
def test_what_a_failed_backward_left_on_the_device_is_added_to_nothing(sim, call):
    """A hook of the user keeps it beside its weight when another thread fails."""
    run = start(net, FEW[0])
    weight = run.model.head.weight
    run.handles.append(weight.register_post_accumulate_grad_hook(lambda _: None))
    begun, goes_on, fails = *(threading.Event() for _ in range(2)), torch.ones(())

    def linger(_):
        begun.set()
        goes_on.wait(10)

    def fail(_):
        begun.wait(10)
        raise Stop

    def follow(_, inputs):
        run.handles.append(inputs[0].register_hook(linger))

    fails.requires_grad_().register_hook(fail)
    later = run.loss(1)
    handle = run.model.head.register_forward_pre_hook(follow)
    with pytest.raises(Stop):
        (run.loss() + fails.to(run.place)).backward()
    handle.remove()
    assert weight.grad.device.type == run.place
    goes_on.set()
    if call == "shutdown":
        run.runtime.shutdown()
        assert weight.grad is None
        return
    if call in ("forward", "without"):
        with torch.set_grad_enabled(call == "forward"):
            run.loss(1)
        assert weight.grad is None
    later.backward()
    expected = Run(model=net().to(run.place), place=run.place)
    expected.loss(1).backward()
    assert_bitwise_equal(weight.grad, expected.model.head.weight.grad.cpu(), "gradient")
    del later
    finish_without_hooks(run)


def test_a_backward_in_a_node_of_one_that_fails_does_not_wait_for_it(sim):
    """That node is the last: it would wait for itself."""
    run = start(net, FEW[0])
    weight, bias = run.model.head.weight, run.model.head.bias
    run.loss()
    failed, nested = threading.Event(), 2 * bias.sum()

    def fail(_):
        failed.set()
        raise Stop

    def go_back(_):
        assert failed.wait(60)
        nested.backward()

    inputs = run.batch().requires_grad_()
    run.handles.append(inputs.register_hook(fail))
    handle = weight.register_hook(go_back)
    loss = inputs.square().sum() + weight.square().sum().to(run.place)
    with pytest.raises(Stop):
        loss.backward()
    del loss
    handle.remove()
    finish_without_hooks(run)


def test_who_waits_for_a_backward_that_fails_has_the_next_turn(sim):
    """It held what tells of the end, and waited as long as the first thread lived."""
    run = start(net, Setting("cpu", "layers", "smallest"))
    losses = [run.loss(1), run.loss(2)]
    begun, goes_on, over = (threading.Event() for _ in range(3))

    def fail(_):
        begun.set()
        assert goes_on.wait(60)
        raise Stop

    def first():
        raising_nothing(losses.pop(0).backward)
        over.wait(60)

    handle = run.model.blocks[2].up.weight.register_hook(fail)
    failing = threading.Thread(target=first)
    failing.start()
    assert begun.wait(60)
    waiting = threading.Thread(target=losses[-1].backward)
    waiting.start()
    while not any(turn is run.runtime._edges.lock for turn in _waits.values()):
        time.sleep(0.01)
    handle.remove()
    goes_on.set()
    waiting.join(60)
    assert not waiting.is_alive()
    over.set()
    failing.join()
    assert run.runtime._edges.lock.owner is None
    finish(run)


def test_a_caller_that_awaits_a_failed_backward_lets_its_nodes_in(sim):
    """One of them runs another model, in whose forward the caller is."""
    run, outer = start(net, FEW[0]), start(net, Setting("hpu", "layers", "all"))
    weight, done = run.model.head.weight, []
    begun, goes_on = threading.Event(), threading.Event()

    def linger(_):
        begun.set()
        goes_on.wait(10)
        with torch.no_grad():
            done.append(outer.model(outer.batch()))

    def fail(_):
        begun.wait(10)
        raise Stop

    def go_back(module, args):
        handle.remove()
        with torch.enable_grad():
            run.loss()
            inputs = run.batch().requires_grad_()
            inputs.register_hook(linger)
            loss = inputs.square().sum() + weight.square().sum().to(run.place)
            failing = weight.register_post_accumulate_grad_hook(fail)
            with pytest.raises(Stop):
                loss.backward()
            del loss
            failing.remove()
        threading.Timer(0.1, goes_on.set).start()
        with torch.no_grad():
            done.append(run.model(run.batch()))

    handle = outer.model.blocks[1].register_forward_pre_hook(go_back)
    with torch.no_grad():
        done.append(outer.model(outer.batch()))
        expected = net().to("hpu")(outer.batch())
    assert len(done) == 3
    for number, output in enumerate(done):
        assert_bitwise_equal(output, expected, f"output {number}")
    for one in (run, outer):
        one.model.zero_grad()
        finish(one)


@over(FEW)
def test_a_backward_beside_another_threads_is_refused_on_an_accelerator(sim, setting):
    """Autograd runs both in one thread: its gradients went to the other's pass."""
    run = start(net, setting)
    losses, told = [run.loss(1), run.loss(2)], []
    begun = threading.Event()

    def linger(_):
        begun.set()
        while not (told or waits_for_backward(other.ident)):
            time.sleep(0.01)
        time.sleep(0.1)  # its nodes come next

    def second():
        begun.wait(60)
        with pytest.raises(DeadlockError, match="run them one after another"):
            losses[1].backward()
        told.append(True)

    handle = run.model.head.weight.register_hook(linger)
    other = threading.Thread(target=second)
    other.start()
    losses[0].backward()
    other.join(60)
    assert told
    handle.remove()
    losses.clear()
    finish(run)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_that_ends_in_another_thread_keeps_its_turn_till_then(
    sim, fails, monkeypatch
):
    """Who waited for the model took it over while gradients were on their way home."""
    run = start(net, FEW[0])
    x = run.batch(1).cpu().requires_grad_()  # the last node is the caller's
    loss, outputs, looks = run.model(x.to("hpu")).square().mean(), [], []
    looked = threading.Event()
    is_left, end_gradients = Edges._is_left, Passing._end_gradients

    def look(edges):
        looks.append(is_left(edges))
        looked.set()
        return looks[-1]

    def come_home(passing, *, failed):
        monkeypatch.setattr(passing.edges.lock, "_left", lambda: look(passing.edges))
        other.start()
        assert looked.wait(60)
        end_gradients(passing, failed=failed)

    def predict():
        with torch.no_grad():
            outputs.append(run.model(run.batch(2)))

    def fail(_):
        raise Stop

    monkeypatch.setattr(Passing, "_end_gradients", come_home)
    other = threading.Thread(target=predict)
    if fails:
        x.register_hook(fail)
    with pytest.raises(Stop) if fails else nullcontext():
        loss.backward()
    del loss
    assert looked.wait(60)  # autograd's own thread may be the last to hold what tells
    other.join(60)
    assert not other.is_alive()
    assert not any(looks)
    monkeypatch.undo()
    assert_bitwise_equal(outputs[0], net().to("hpu")(run.batch(2)), "output")
    finish(run)
