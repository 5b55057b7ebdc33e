"""Steps during backward give the bits of steps after it, or say why they cannot."""

import gc
import threading
import weakref

import pytest
import torch

from equality import all_equal
from stagehand.errors import ConfigError, OptimizerError, StagehandWarning
from stagehand.optim import GradScaler, OffloadedAdamW
from stepping import assert_same, give_gradients, parameters, train

ROUNDED = {"state_dtype": torch.bfloat16}


class Home:
    """A source whose gradients come home when the test says so."""

    def __init__(self):
        self.listeners = []

    def when_home(self, listener):
        self.listeners.append(listener)
        return lambda: listener in self.listeners and self.listeners.remove(listener)

    def bring(self, *parameters):
        """Call the listeners from another thread, and raise what they raise."""
        raised = []

        def call():
            try:
                for listener in self.listeners:
                    listener(list(parameters))
            except OptimizerError as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]


class Streamed(torch.nn.Module):
    """As much of a streamed model as an optimizer sees."""

    def __init__(self, runtime):
        super().__init__()
        self._stagehand_layer_runtime = runtime


@pytest.fixture
def home():
    return Home()


def overlapped(home, shapes=((4,), (2, 3)), **options):
    params = parameters(shapes=shapes)
    return params, OffloadedAdamW(params, overlap=home, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, ROUNDED, {"pin_states": True}]
)
def test_overlapped_run_is_the_plain_run_bit_for_bit(home, options, dtype):
    pairs = []
    for source in (home, None):
        params = parameters(dtype)
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}]
        optimizer = OffloadedAdamW(groups, overlap=source, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(8):
            give_gradients(params, step)
            if source is not None:
                # From the last to the first as in backward, and some not at all.
                home.bring(*reversed(params[1:3]))
                home.bring(params[0])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        pairs.append((params, optimizer))
    assert_same(*pairs)


def test_parameters_are_stepped_during_a_real_backward(home):
    pairs = []
    for source in (home, None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        optimizer = OffloadedAdamW(model.parameters(), overlap=source)
        seen = []

        def come(parameter, seen=seen):
            before = parameter.detach().clone()
            home.bring(parameter)
            seen.append(not torch.equal(before, parameter))

        # As with streamed weights, backward no longer reads a parameter that is home.
        for layer in model if source is not None else ():
            layer.bias.register_post_accumulate_grad_hook(come)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(5, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert seen == [True] * 12 or source is None
        pairs.append((list(model.parameters()), optimizer))
    assert_same(*pairs)


def test_gradients_are_used_in_place_and_stay_until_zero_grad(home):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    gradients = [p.grad for p in params]
    values = [g.clone() for g in gradients]
    home.bring(*params)
    for _ in ("before step", "after it"):
        assert all(p.grad is g for p, g in zip(params, gradients, strict=True))
        assert all_equal(gradients, values)
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_after_step_in_either_way(home, set_to_none):
    params, optimizer = overlapped(home)
    for step in range(3):
        give_gradients(params, step)
        home.bring(*params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert [s["step"].item() for s in optimizer.state.values()] == [3.0, 3.0]


def clip(params):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def accumulate(params):
    params[0].grad += 1


@pytest.mark.parametrize("change", [clip, accumulate])
def test_changed_gradient_is_refused_and_nothing_more_is_stepped(home, change):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(params[0])
    change(params)
    before = [p.detach().clone() for p in params]
    message = r"grad of parameter 0 of shape \[4\] was changed in place.*overlap=None"
    for _ in range(2):  # it does not go away by trying again
        with pytest.raises(OptimizerError, match=message):
            optimizer.step()
    assert all_equal(params, before)


@pytest.mark.parametrize("grad", [None, torch.ones(4)])
def test_replaced_gradient_is_refused(home, grad):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(*params)
    params[0].grad = grad
    with pytest.raises(OptimizerError, match="replaced or removed after backward"):
        optimizer.step()


def decay(params, optimizer):
    with torch.no_grad():
        params[0].mul_(0.9)


def schedule(params, optimizer):
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


def unbias(params, optimizer):
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (decay, r"parameter 0 of shape \[4\] was changed after"),
        (schedule, r"lr=0.001 to 0.0005: changed after .* parameter 0"),
        (unbias, r"beta2=0.999 to 0.99: changed after"),
    ],
)
def test_what_a_step_used_must_not_change_before_it_is_told_of(home, change, message):
    """The parameters that were not stepped yet would take the new ones."""
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(params[0])
    change(params, optimizer)
    before = [p.detach().clone() for p in params]
    with pytest.raises(OptimizerError, match=message):
        optimizer.step()
    assert all_equal(params, before)
    optimizer.param_groups[0].update(lr=1e-3, betas=(0.9, 0.999))
    if change is not decay:
        optimizer.step()


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
def test_options_may_change_between_steps(home, lr):
    params, optimizer = overlapped(home, lr=lr)
    for _ in range(3):
        give_gradients(params, 0)
        home.bring(params[0])
        optimizer.step()
        if isinstance(lr, float):
            optimizer.param_groups[0]["lr"] *= 0.5
        else:
            lr.mul_(0.5)


def test_second_backward_without_a_step_is_refused_before_it_steps(home):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(params[0])
    before = [p.detach().clone() for p in params]
    with pytest.raises(OptimizerError, match=r"parameter 0 .* got a gradient again"):
        home.bring(params[1], params[0])
    assert all_equal(params, before)
    assert params[1] not in optimizer.state


def test_several_wrong_gradients_are_counted_and_the_first_is_named(home):
    params = parameters(shapes=[(4,), (2,), (3,)])
    named = zip(("a", "b", "c"), params, strict=True)
    optimizer = OffloadedAdamW(named, overlap=home)
    give_gradients(params, 0)
    home.bring(*params)
    with pytest.raises(OptimizerError, match=r"'b' of shape \[2\] and 1 more"):
        home.bring(*params[1:])
    assert len(optimizer.state) == 3


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
def test_grad_scaler_is_refused(home, kind):
    params, optimizer = overlapped(home)
    scaler = kind("cpu")
    scaler.scale(torch.ones(()))
    give_gradients(params, 0)
    with pytest.raises(OptimizerError, match=r"GradScaler.*overlap=None"):
        scaler.step(optimizer)


def test_disabled_grad_scaler_is_none(home):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(*params)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert optimizer.state[params[0]]["step"] == 1


def test_closure_is_refused_before_it_is_called(home):
    _, optimizer = overlapped(home)
    with pytest.raises(OptimizerError, match="closure"):
        optimizer.step(pytest.fail)


def test_failed_backward_then_step_is_the_plain_step(home):
    pairs = []
    for source in (home, None):
        params = parameters()
        optimizer = OffloadedAdamW(params, overlap=source)
        give_gradients(params, 0)
        params[2].grad = None  # backward raised before it came here
        if source is not None:
            home.bring(params[4], params[3])
        optimizer.step()
        optimizer.zero_grad()
        train(optimizer, params, range(1, 3))
        pairs.append((params, optimizer))
    assert_same(*pairs)


def test_failed_backward_then_zero_grad_keeps_early_steps_and_warns(home):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    home.bring(params[1])
    with pytest.warns(StagehandWarning, match="1 of 2 parameters were stepped"):
        optimizer.zero_grad()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])
    give_gradients(params, 1)
    home.bring(*params)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 2.0]


def test_saving_between_backward_and_step_warns(home):
    params, optimizer = overlapped(home)
    optimizer.state_dict()
    give_gradients(params, 0)
    home.bring(params[1])
    with pytest.warns(StagehandWarning, match="1 of 2 .* a step ahead"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


def test_loading_forgets_early_steps(home):
    params, optimizer = overlapped(home)
    saved = optimizer.state_dict()
    give_gradients(params, 0)
    home.bring(*params)
    optimizer.load_state_dict(saved)
    home.bring(*params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1


def test_other_peoples_parameters_and_those_without_gradient_are_left_alone(home):
    params, optimizer = overlapped(home)
    [other] = parameters(shapes=[(5,)])
    give_gradients([other], 0)
    before = [p.detach().clone() for p in (*params, other)]
    home.bring(*params, other)
    assert all_equal((*params, other), before)
    assert not optimizer.state


def test_parameters_on_the_device_wait_for_step(sim, home):
    params = parameters(device="hpu")
    optimizer = OffloadedAdamW(params, overlap=home)
    give_gradients(params, 0)
    home.bring(*params)
    assert not optimizer.state
    optimizer.step()
    assert len(optimizer.state) == len(params)


def test_parameters_of_a_group_added_later_are_stepped_early(home):
    params, optimizer = overlapped(home)
    later = parameters(shapes=[(5,)])
    optimizer.add_param_group({"params": later})
    give_gradients(later, 0)
    home.bring(*later)
    assert optimizer.state[later[0]]["step"] == 1
    optimizer.step()
    assert optimizer.state[later[0]]["step"] == 1
    assert params[0] not in optimizer.state


def test_parameters_of_a_refused_group_are_left_alone(home):
    params, optimizer = overlapped(home, state_dtype=torch.float32)
    [refused] = parameters(torch.float64, shapes=[(4,)])
    with pytest.raises(ConfigError, match="is torch"):
        optimizer.add_param_group({"params": [refused]})
    give_gradients([refused, *params], 0)
    home.bring(refused, *params)
    optimizer.step()
    assert set(optimizer.state) == set(params)


def test_close_ends_the_overlap_once_and_what_was_stepped_counts(home):
    params, optimizer = overlapped(home)
    give_gradients(params, 0)
    home.bring(params[0])
    assert optimizer.overlaps
    optimizer.close()
    optimizer.close()
    assert not optimizer.overlaps
    assert not home.listeners
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [1.0, 1.0]


def test_dropped_optimizer_is_freed_and_unsubscribed(home):
    params, optimizer = overlapped(home)
    listener = home.listeners[0]
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not home.listeners
    give_gradients(params, 0)
    before = params[0].detach().clone()
    listener(params)  # one that was on its way
    assert torch.equal(params[0], before)


class Source(torch.nn.Module):
    """Is streamed by somebody else, who tells of gradients as our runtimes do."""

    def __init__(self, home):
        super().__init__()
        self.when_home = home.when_home


@pytest.mark.parametrize("model", [Streamed, Source])
def test_streamed_model_is_its_runtime_and_a_source_may_be_a_module(home, model):
    [weight] = parameters(shapes=[(4,)])
    optimizer = OffloadedAdamW([weight], overlap=model(home))
    give_gradients([weight], 0)
    home.bring(weight)
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize(
    ("overlap", "message"),
    [
        (torch.nn.Linear(2, 2), "Linear that is not streamed"),
        (Streamed(object()), "object, which has no when_home"),
        (True, "bool, which has no when_home"),
    ],
)
def test_overlap_with_what_is_no_source_is_refused(overlap, message):
    with pytest.raises(ConfigError, match=message):
        OffloadedAdamW(parameters(), overlap=overlap)
