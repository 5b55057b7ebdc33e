"""Hooks of users on trained weights see what they see on a resident model."""

import pytest
import torch
from torch import nn

from stagehand.errors import ConfigError
from stepping import step_in_backward
from training import (
    FEW,
    SOME,
    TIGHT,
    WIDTH,
    Net,
    Reentering,
    Setting,
    assert_at_rest,
    assert_trains_equally,
    built,
    end,
    net,
    over,
    start,
    train,
)


def hook_everything(model, kind, runs):
    """Let the latest run note what hooks are given."""
    handles = []
    for name, parameter in model.named_parameters():
        if kind == "tensor":

            def before(grad, name=name):
                runs[-1].note(f"{name} gets", grad)

            handles.append(parameter.register_hook(before))
        else:

            def after(parameter, name=name):
                note_pair(runs[-1], name, parameter)

            handles.append(parameter.register_post_accumulate_grad_hook(after))
    return handles


def note_pair(run, name, parameter):
    assert parameter.grad.device.type == parameter.device.type == run.place, name
    run.note(f"{name} has", [parameter, parameter.grad])


def triple(parameter):
    parameter.grad.mul_(3)


def by_name(notes):
    """Hooks of different weights may run in another order."""
    return sorted((what.partition(", ")[2], repr(kept)) for what, kept in notes)


@over(SOME)
@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_hooks_registered_on_the_streamed_model_see_the_sum_beside_the_weight(
    sim, setting, kind
):
    def script(run):
        run.handles = hook_everything(run.model, kind, [run])
        train(run)

    assert_trains_equally(net, script, setting)


@over(SOME)
@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_hooks_registered_between_passes_see_the_sum_beside_the_weight(
    sim, setting, kind
):
    """The library's own are there first, and autograd goes by that order."""

    def script(run):
        train(run, steps=1)
        run.handles = hook_everything(run.model, kind, [run])
        train(run)
        run.handles += hook_everything(run.model, kind, [run])
        train(run)

    assert_trains_equally(net, script, setting)


@over(SOME)
@pytest.mark.parametrize("kind", ["tensor", "post"])
def test_hooks_registered_before_streaming_see_the_sum_beside_the_weight(
    sim, setting, kind
):
    """They stay with the model, and run before those of the library."""
    runs, handles = [], []

    def build():
        model = net()
        handles.extend(hook_everything(model, kind, runs))
        return model

    def script(run):
        runs.append(run)
        train(run)
        run.handles = handles

    assert_trains_equally(build, script, setting)
    runs.clear()


@over(FEW)
def test_hooks_see_the_sum_of_gradients_of_another_type(sim, setting):
    def script(run):
        for parameter in run.model.parameters():
            parameter.grad_dtype = torch.float64
        run.handles = hook_everything(run.model, "post", [run])
        for number in range(3):
            run.backward(run.loss(number))

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_a_hook_that_changes_the_gradient_changes_what_is_accumulated(sim, setting):
    def script(run):
        for parameter in run.model.parameters():
            parameter.register_hook(lambda grad: grad * 0.5)
            parameter.register_post_accumulate_grad_hook(triple)
        train(run)

    assert_trains_equally(net, script, setting)


class DataSGD(torch.optim.Optimizer):
    """Steps through `.data`, which moves no version counter."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW([p], lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW([p], lr=0.01, fused=True),
    "SGD through .data": lambda p: DataSGD([p]),
}


def fused(make, fuse, before):
    """Return what builds a model and what begins a script; the one fuses, or the other.

    Args:
        make: Makes the plain model.
        fuse: Gives a model's weights hooks that step them.
        before: Whether that is done before the model streams.
    """

    def build():
        model = make()
        if before:
            fuse(model)
        return model

    return build, (lambda model: None) if before else fuse


@over(SOME)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_fused_into_backward_loses_no_step(sim, setting, kind, before):
    def fuse(model):
        optimizers = {p: OPTIMIZERS[kind](p) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        model.handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
        model.optimizers = list(optimizers.values())

    build, begin = fused(net, fuse, before)

    def script(run):
        begin(run.model)
        for step in range(6):
            run.backward(run.loss(step))
            for name, parameter in run.model.named_parameters():
                assert parameter.grad is None, name
                run.note(name, parameter)
        for optimizer in run.model.optimizers:
            run.note("state", optimizer.state_dict()["state"])
        run.handles = run.model.handles

    assert_trains_equally(build, script, setting)


TOGETHER = {
    "SGD": lambda group: torch.optim.SGD(group, lr=0.1, momentum=0.9, foreach=True),
    "fused AdamW": lambda group: torch.optim.AdamW(group, lr=0.01, fused=True),
    "SGD through .data": DataSGD,
}


@over(SOME)
@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("recomputed", [True, False])
def test_an_optimizer_that_steps_a_layer_when_its_last_gradient_came_skips_none(
    sim, setting, kind, before, recomputed
):
    def fuse(model):
        modules = (m for m in model.modules() if not isinstance(m, nn.ModuleList))
        groups = (list(module.parameters(recurse=False)) for module in modules)
        model.handles = step_in_backward(TOGETHER[kind], groups)

    build, begin = fused(built(Reentering if recomputed else Net), fuse, before)

    def script(run):
        begin(run.model)
        for number in range(4):
            run.backward(run.loss(number))
            for name, parameter in run.model.named_parameters():
                run.note(name, parameter)
        run.handles = run.model.handles

    assert_trains_equally(build, script, setting)


@pytest.mark.parametrize("hooked", [True, False])
def test_a_step_in_a_hook_that_would_skip_a_weight_is_refused(sim, hooked):
    """Its gradient has left with its block, or at once where it has no hook."""
    run = start(net, TIGHT)
    group = [*run.model.blocks[0].up.parameters(), run.model.entry.weight]
    if hooked:
        run.model.handles = step_in_backward(TOGETHER["SGD"], [group])
    else:
        optimizer = torch.optim.SGD(group, lr=0.1)
        hook = run.model.entry.weight.register_post_accumulate_grad_hook
        run.model.handles = [hook(lambda _: optimizer.step())]
    with pytest.raises(ConfigError, match=r"would skip a weight of block"):
        run.loss().backward()
    while run.model.handles:
        run.model.handles.pop().remove()
    run.model.zero_grad()
    train(run, steps=1)
    end(run)


@over(FEW)
def test_a_hook_that_steps_weights_through_data_loses_no_step(sim, setting):
    def step(parameter):
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad.zero_()

    def script(run):
        hook = "register_post_accumulate_grad_hook"
        run.handles = [getattr(p, hook)(step) for p in run.model.parameters()]
        for number in range(4):
            run.backward(run.loss(number))
            for name, parameter in run.model.named_parameters():
                run.note(name, parameter)

    assert_trains_equally(net, script, setting)


@over(FEW)
@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_fused_into_backward_uses_up_what_accumulated_before(
    sim, setting, before
):
    """It begins to step later: until then its hook leaves gradients alone."""
    steps = []

    def fuse(model):
        def step(parameter):
            if steps:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

        return [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]

    def build():
        model = net()
        if before:
            model.handles = fuse(model)
        return model

    def script(run):
        run.handles = run.model.handles if before else fuse(run.model)
        for number in range(6):
            steps[:] = [number] * (number % 3 > 1)
            run.backward(run.loss(number))

    assert_trains_equally(build, script, setting)


@over(FEW)
@pytest.mark.filterwarnings("ignore:the latest backward failed")
def test_gradients_assigned_after_a_hook_failed_are_added_to(sim, setting):
    """The failed backward had gradients of earlier calls in its sums."""
    fails = []

    def fail(parameter):
        if fails:
            raise LookupError

    def build():
        model = net()
        weight = model.blocks[2].up.weight
        model.handles = [weight.register_post_accumulate_grad_hook(fail)]
        return model

    def script(run):
        run.backward(run.loss(0))
        fails.append(1)
        with pytest.raises(LookupError):
            run.loss(1).backward()
        if run.runtime is not None:
            assert_at_rest(run)
        fails.clear()
        run.model.handles.pop().remove()
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.backward(run.loss(2))

    assert_trains_equally(build, script, setting)


@over(FEW)
def test_gradients_that_hooks_exchange_through_buckets_are_exact(sim, setting):
    """They copy into a bucket beside the weight and back, as data parallelism does."""

    def script(run):
        for parameter in run.model.parameters():
            bucket = torch.zeros(parameter.shape, device=run.place)

            def reduce(parameter, bucket=bucket):
                bucket.copy_(parameter.grad).div_(2)
                parameter.grad.copy_(bucket)

            parameter.register_post_accumulate_grad_hook(reduce)
        train(run)

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_module_backward_hooks_see_the_same_gradients(sim, setting):
    def script(run):
        for name, module in run.model.named_modules():
            module.register_full_backward_hook(
                lambda m, into, out, name=name: run.note(name, [into, out])
            )
        for number in range(3):
            inputs = run.batch(number).requires_grad_()
            run.backward(run.model(inputs).square().mean())
            run.note("gradient of the inputs", inputs.grad)

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_a_hook_that_was_removed_no_longer_holds_anything_up(sim, setting):
    def script(run):
        handles = [
            p.register_post_accumulate_grad_hook(triple) for p in run.model.parameters()
        ]
        run.backward(run.loss())
        for handle in handles:
            handle.remove()
        train(run)

    assert_trains_equally(net, script, setting)


def join(run):
    """A layer joins."""
    block = run.model.blocks[1]
    block.norm = nn.Sequential(block.norm, built(lambda: nn.Linear(WIDTH, WIDTH))())
    if run.runtime is None:
        run.model.to(run.place)


def step_unseen(run):
    """An optimizer changes one element, after passes, and no version counter moves."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5, fused=True)
    run.loss().backward()
    grad = run.model.blocks[1].up.weight.grad
    run.model.zero_grad(set_to_none=False)
    grad[3, 5] = 1
    for _ in range(2):
        optimizer.step()
        run.model(run.batch(1))
    optimizer.step()


def thaw(run):
    """A weight trains that was frozen until now."""
    run.model.requires_grad_(False)
    run.model(run.batch())
    run.model.blocks[2].requires_grad_(True)


@pytest.mark.parametrize("change", [join, step_unseen, thaw])
@over(
    [
        Setting("hpu", "layers", "third"),
        Setting("hpu", "layers", "all"),
        Setting("cpu", "layers", "all"),
    ]
)
def test_a_model_that_runs_in_a_hook_of_another_graph_sees_what_was_done_to_it(
    sim, setting, change
):
    def script(run):
        def look(_):
            with torch.enable_grad():
                run.loss(2).backward()
            with torch.no_grad():
                run.note("in the hook", run.model(run.batch(3)))

        run.model(run.batch())
        change(run)
        y = run.batch().requires_grad_() * 2
        y.register_hook(look)
        y.sum().backward()
        run.look()

    assert_trains_equally(net, script, setting)
