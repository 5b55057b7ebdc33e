"""Graphs of every form go back through streamed weights as through resident ones."""

import itertools
import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal
from equality import all_equal
from scenario.small import LAYER_BYTES, batch, runtime_of, smallest_budget, stack
from stagehand.core.arena import live_leases
from stagehand.core.turn import Turn
from stagehand.errors import ConfigError
from stagehand.torch_private import top_saved_hooks
from training import (
    ALL,
    FEW,
    SOME,
    TIGHT,
    WIDTH,
    Net,
    Recomputing,
    Reentering,
    Residual,
    Setting,
    assert_trains_equally,
    built,
    end,
    net,
    over,
    sgd,
    start,
    step,
    train,
)

# Order


@over(SOME)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_forwards_go_back_in_any_order(sim, setting, order):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            losses = [run.loss(10 * number + each) for each in range(3)]
            for each in order:
                run.backward(losses[each])
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_several_forwards_share_one_backward(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            run.backward(run.loss(number) * run.loss(number + 50) + run.loss(99))
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_one_graph_goes_back_several_times(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            loss = run.loss(number)
            run.backward(loss, retain_graph=True)
            run.backward(loss, retain_graph=True)
            run.backward(run.loss(number + 50))
            run.backward(loss)
            step(optimizer)
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()

    assert_trains_equally(net, script, setting)


# Higher derivatives


ON_HOST = Setting("cpu", "layers", "smallest")


@pytest.mark.parametrize(
    ("setting", "of"),
    [*((setting, "inputs") for setting in SOME), (ON_HOST, "weights")],
    ids=str,
)
def test_a_penalty_on_gradients_is_differentiated(sim, setting, of):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            inputs = run.batch(number).requires_grad_()
            loss = run.model(inputs).square().mean()
            wanted = [inputs] if of == "inputs" else list(run.model.parameters())
            found = torch.autograd.grad(loss, wanted, create_graph=True)
            run.note("first", found)
            run.backward(loss + sum(each.square().sum() for each in found))
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_a_backward_that_makes_a_graph_accumulates_gradients_with_one(sim, setting):
    second = []

    def script(run):
        for number in range(2):
            inputs = run.batch(number).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.model(inputs).square().mean().backward(create_graph=True)
            run.look()
            inputs.grad = None  # what its graph leads back to is never collected
        grads = [p.grad for p in run.model.parameters()]
        total = sum(grad.square().sum().to(run.place) for grad in grads)
        second.append(torch.autograd.grad(total, inputs)[0].cpu())
        run.model.zero_grad()

    assert_trains_equally(net, script, setting)
    # Through the host, autograd adds up terms of the second derivative in other orders.
    torch.testing.assert_close(*second, rtol=1e-5, atol=1e-7)


class Reentered(Reentering):
    """Calls each block twice, the second time in a reentrant checkpoint."""

    def around(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().around(block, block(x))


@over(FEW)
def test_gradients_with_a_graph_are_added_to_those_that_are_on_their_way(sim, setting):
    """What a reentrant checkpoint brings has no graph, in a backward that makes one."""

    def script(run):
        for number in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.loss(number).backward(create_graph=True)
            run.look()
            run.model.zero_grad()

    assert_trains_equally(built(Reentered), script, setting)


# Parts of a graph


class Branching(Net):
    """Has outputs that need not be used."""

    def forward(self, x):
        x = self.entry(x)
        first = self.blocks[0](x)
        second = self.blocks[1](x)
        third = self.blocks[2](second)
        return {"first": first, "second": [second, third], "all": self.head(first)}


@built
def branching_net():
    return Branching()


@over(SOME)
def test_branches_that_are_not_used_get_no_gradient(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number, used in enumerate(["first", "all", "second", "all", "first"]):
            outputs = run.model(run.batch(number))[used]
            loss = sum(each.square().mean() for each in outputs)
            run.backward(loss)
            step(optimizer)

    assert_trains_equally(branching_net, script, setting)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_gradients_of_a_few_weights_leave_earlier_ones_alone(sim, number):
    def script(run):
        optimizer = sgd(run)
        some = list(run.model.blocks[number].parameters())
        for each in range(3):
            run.backward(run.loss(each))
            found = torch.autograd.grad(run.loss(each + 50), some)
            run.note("found", found)
            run.look()
            run.backward(run.loss(each + 70), inputs=some)
            run.backward(run.loss(each + 90))
            step(optimizer)

    assert_trains_equally(net, script, ON_HOST)


def test_pytorch_refuses_to_name_a_weight_that_moved_as_what_to_differentiate(sim):
    """It forgets a tensor's place in all graphs when the tensor changes its device."""
    run = start(net, TIGHT)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(run.loss(), run.model.blocks[1].up.weight)
    end(run)


class Again(torch.autograd.Function):
    """Computes a part of a model again in backward, and asks for its gradients."""

    @staticmethod
    def forward(ctx, part, x, *weights):
        ctx.part = part
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            wanted = [each for each in [x, *weights] if each.requires_grad]
            y = ctx.part(x)
        found = iter(torch.autograd.grad(y, wanted, grad, allow_unused=True))
        return (
            *(None, next(found)),
            *(next(found) if each.requires_grad else None for each in weights),
        )


class Accumulating(Again):
    """Asks that gradients are accumulated, for some inputs."""

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.part(x)
        wanted = [each for each in [x, *weights] if each.requires_grad]
        torch.autograd.backward(y, grad, inputs=wanted)
        return (None, x.grad, *(None for _ in weights))


class ComputesAgain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner = Residual()
        self.function = function

    def forward(self, x):
        return self.function.apply(self.inner, x, *self.inner.parameters())


def computing_again(function):
    @built
    def make():
        model = Net()
        model.blocks[1], model.blocks[3] = (ComputesAgain(function) for _ in "12")
        return model

    return make


@over([setting for setting in ALL if setting.budget != "smallest"])
@pytest.mark.parametrize("function", [Again, Accumulating])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_function_gets_no_zeros_for_gradients_of_weights_that_moved(
    sim, setting, frozen, function
):
    """It was given none, as of what was not used, and the weights did not train."""

    def script(run):
        for block in run.model.blocks[1], run.model.blocks[3]:
            block.requires_grad_(not frozen)
        train(run)

    options = {"opaque": [ComputesAgain]} if setting.mode == "layers" else {}
    build = computing_again(function)
    if frozen or setting.place == "cpu":
        assert_trains_equally(build, script, setting, **options)
        return
    run = start(build, setting, **options)
    with pytest.raises(ConfigError, match=r"a function asks autograd.* \[16\]"):
        train(run)
    with torch.no_grad():
        run.model(run.batch())
    end(run, abandoned=True)  # the function had the weights when it was refused


def some_of(model):
    parts = model.head, model.blocks[0], model.blocks[1]
    return [weight for part in parts for weight in part.parameters()]


@over(SOME)
@pytest.mark.parametrize("kind", ["plain", "looping", "tied"])
def test_gradients_of_a_few_streamed_weights_are_exact(sim, setting, kind):
    def script(run):
        optimizer = sgd(run)
        some = some_of(run.model)
        for each in range(3):
            run.backward(run.loss(each))
            inputs = run.batch(each + 50).requires_grad_()
            loss = run.model(inputs).square().mean()
            run.note("found", stagehand.grad(loss, [inputs, *some]))
            run.look()
            run.backward(run.loss(each + 90))
            step(optimizer)

    assert_trains_equally(KINDS[kind], script, setting, abandoned=True)


@over(SOME)
@pytest.mark.parametrize("kind", ["plain", "looping", "tied"])
def test_backward_into_a_few_streamed_weights_leaves_others_alone(sim, setting, kind):
    def script(run):
        optimizer = sgd(run)
        for each in range(3):
            run.backward(run.loss(each))
            loss = run.loss(each + 50)
            edges = stagehand.gradient_edges(loss, some_of(run.model))
            run.backward(loss, inputs=edges)
            step(optimizer)

    assert_trains_equally(KINDS[kind], script, setting)


@over(FEW)
def test_backward_into_a_hidden_tensor_and_a_streamed_weight_finds_both(sim, setting):
    def script(run):
        hidden = run.model.blocks[0](run.batch())
        hidden.retain_grad()
        loss = run.model.blocks[1](hidden).square().mean()
        inputs = [hidden, run.model.blocks[1].up.weight]
        run.backward(loss, inputs=stagehand.gradient_edges(loss, inputs))
        run.note("hidden", [hidden.grad])

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_a_penalty_on_gradients_of_streamed_weights_is_differentiated(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for each in range(3):
            loss = run.loss(each)
            found = stagehand.grad(loss, some_of(run.model), create_graph=True)
            run.backward(loss + sum(part.square().sum() for part in found))
            step(optimizer)

    assert_trains_equally(net, script, setting, abandoned=True)


@over(FEW)
def test_a_weight_that_was_not_used_is_refused(sim, setting):
    run = start(net, setting)
    loss = run.model.blocks[0](run.batch()).sum()
    with pytest.raises(ConfigError, match=r"input 1, .* \[16\], was not used"):
        stagehand.gradient_edges(
            loss, [run.model.blocks[0].up.bias, run.model.head.bias]
        )
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        stagehand.grad(loss, run.model.head.bias)
    assert stagehand.grad(loss, run.model.head.bias, allow_unused=True) == (None,)
    end(run)


@pytest.mark.parametrize("find", [stagehand.grad, stagehand.gradient_edges])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, " is None: expected a tensor, or several"),
        (3, " is 3: expected a tensor, or several"),
        ([], r" is \[\]: expected a tensor, or several"),
        ("x", r"\[0\] is 'x': expected a tensor"),
        ([torch.ones(1), None], r"\[1\] is None: expected a tensor"),
    ],
)
def test_what_is_no_tensor_is_named(find, given, problem):
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(ConfigError, match=f"^outputs{problem}"):
        find(given, weight)
    with pytest.raises(ConfigError, match=f"^inputs{problem}"):
        find(weight * 2, given)


@pytest.mark.parametrize("several", [False, True])
def test_an_edge_of_the_graph_may_be_an_input(several):
    """One that was given alone, a tuple itself, was taken for several inputs."""
    weight = torch.ones(1, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(weight)
    (found,) = stagehand.grad(weight * 2, [edge] if several else edge)
    assert found == 2


@over(SOME)
def test_a_gradient_of_the_inputs_alone_leaves_weights_without(sim, setting):
    def script(run):
        for number in range(3):
            inputs = run.batch(number).requires_grad_()
            loss = run.model(inputs).square().mean()
            run.note("of inputs", torch.autograd.grad(loss, inputs))
            run.look()

    assert_trains_equally(net, script, setting)


# Weights used more than once


class Looping(Net):
    """Uses its blocks twice, one after the other and each by itself."""

    def forward(self, x):
        for block in [*self.blocks, *self.blocks, self.blocks[0], self.blocks[0]]:
            x = block(x)
        return self.head(x)


class Reading(Net):
    """Reads a weight of one module in another place, too."""

    def forward(self, x):
        return super().forward(x) @ self.entry.weight + self.entry.bias


@built
def looping_net():
    return Looping()


@built
def reading_net():
    return Reading()


@built
def tied_net():
    model = Net()
    model.blocks[3].up.weight = model.blocks[1].up.weight
    model.head.weight = model.entry.weight
    return model


KINDS = {"plain": net, "looping": looping_net, "tied": tied_net}


@over(SOME)
@pytest.mark.parametrize("build", [looping_net, tied_net])
def test_weights_that_are_used_several_times_get_the_sum(sim, setting, build):
    assert_trains_equally(build, partial(train, steps=4), setting)


@over([Setting("hpu", "layers", "third"), Setting("cpu", "layers", "third")])
def test_weights_that_other_modules_read_get_the_sum(sim, setting):
    assert_trains_equally(reading_net, partial(train, steps=4), setting)


class Talking(nn.Module):
    """A table, blocks, and a head that may share the table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(600, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 600, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.say(self.table(tokens))

    def say(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@built
def talking_net():
    return Talking(tied=False)


@built
def tied_talking_net():
    return Talking(tied=True)


class Embedded(Talking):
    """Takes what somebody else has looked up in its table, which a part of it has."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied)
        self.words = nn.ModuleDict({"table": self.table})
        del self.table

    def forward(self, x):
        return self.say(x)


@built
def embedded_net():
    return Embedded(tied=False)


@built
def tied_embedded_net():
    return Embedded(tied=True)


class ReadingTables(nn.Module):
    """Reads its tables as a whole, too: one by a slice, one as its head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(150, WIDTH)
        self.places = nn.Embedding(60, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))

    def forward(self, tokens):
        x = self.table(tokens) + self.places.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.linear(x, self.table.weight)


@built
def table_reading_net():
    return ReadingTables()


IN_LAYERS = [Setting("hpu", "layers", budget) for budget in ("third", "most", "all")]


@over([*IN_LAYERS, Setting("cpu", "layers", "third")])
@pytest.mark.parametrize("first", ["a forward", "a training step"])
@pytest.mark.filterwarnings("ignore:.*every call is watched:stagehand.StagehandWarning")
def test_tables_that_are_read_as_a_whole_train_exactly(sim, setting, first):
    """What a table on the host is read for is found in the first pass."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for number in range(6):
            tokens = torch.randint(150, (2, 7), generator=generator).to(run.place)
            with torch.set_grad_enabled(number > 0 or first == "a training step"):
                logits = run.model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens.flatten())
            if loss.requires_grad:
                run.backward(loss)
            if number % 2:
                step(optimizer)

    assert_trains_equally(table_reading_net, script, setting)


@over([*SOME, Setting("hpu", "layers", "all")])
@pytest.mark.parametrize("build", [talking_net, tied_talking_net])
def test_a_table_that_is_read_by_rows_trains_exactly(sim, setting, build):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for _ in range(2):
                tokens = torch.randint(600, (2, 7), generator=generator).to(run.place)
                logits = run.model(tokens).flatten(0, 1)
                run.backward(nn.functional.cross_entropy(logits, tokens.flatten()))
            step(optimizer)

    assert_trains_equally(build, script, setting)


@over([*SOME, Setting("hpu", "layers", "all")])
@pytest.mark.parametrize("build", [embedded_net, tied_embedded_net])
def test_a_table_that_is_called_by_itself_trains_exactly(sim, setting, build):
    """As who tunes prompts does: `model.get_input_embeddings()(tokens)`."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        generator = torch.Generator().manual_seed(1)
        for number in range(4):
            for _ in range(2):
                tokens = torch.randint(600, (2, 7), generator=generator).to(run.place)
                with torch.set_grad_enabled(number != 1):
                    rows = run.model.words["table"](tokens)
                logits = run.model(rows * 0.5).flatten(0, 1)
                run.backward(nn.functional.cross_entropy(logits, tokens.flatten()))
            step(optimizer)

    assert_trains_equally(build, script, setting)


@over([*FEW, Setting("hpu", "layers", "third")])
def test_a_gradient_that_the_host_makes_between_those_of_the_device_is_added(
    sim, setting
):
    """As that of a penalty on weights does, which are on the host between passes."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            on_host = run.model(run.batch(number)).cpu() * 1.0  # goes back the last
            penalty = sum((p * 2).cpu().sum() for p in run.model.parameters())
            again = run.model((on_host + penalty / 1000).to(run.place))
            run.backward(again.square().mean())
            step(optimizer)

    assert_trains_equally(net, script, setting)


def test_a_gradient_that_the_host_makes_waits_for_that_on_its_way(sim):
    """What the host added to was not there yet: the link is slow."""
    sim.configure(d2h_gbps=0.0005)
    model = nn.Linear(64, 64, bias=False)
    plain = deepcopy(model)
    stagehand.layer(model, device="hpu", vram_budget=2 * 64 * 64 * 4)

    def gradient(model, place):
        on_host = model(torch.ones(2, 64, device=place)).cpu() * 1.0
        penalty = (model.weight * 2).cpu().sum()
        model((on_host + penalty / 1000).to(place)).sum().backward()
        return model.weight.grad.clone()

    expected = gradient(plain.to("hpu"), "hpu").cpu()
    assert_bitwise_equal(gradient(model, "hpu"), expected, "the gradient")
    runtime_of(model).shutdown()


# What must raise


CHANGED = "modified by an inplace operation"


@over(SOME)
def test_an_optimizer_step_between_forward_and_backward_raises(sim, setting):
    """The GAN case: an earlier loss goes back through weights that have changed."""

    def script(run):
        optimizer = sgd(run)
        late = run.loss(50)
        run.backward(run.loss(0))
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            late.backward()
        del late
        optimizer.zero_grad()
        run.backward(run.loss(1))
        optimizer.step()

    assert_trains_equally(net, script, setting)


@over(SOME)
@pytest.mark.parametrize("what", ["weight", "activation"])
def test_a_change_in_place_between_forward_and_backward_raises(sim, setting, what):
    def script(run):
        kept = []
        place = run.model.blocks[2].down
        handle = place.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        loss = run.loss()
        handle.remove()
        with torch.no_grad():
            (place.weight if what == "weight" else kept[0]).add_(1)
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()
        run.model.zero_grad()
        run.backward(run.loss(1))

    assert_trains_equally(net, script, setting)


# Graphs that are dropped


@over(FEW)
@pytest.mark.parametrize("when", ["never", "half", "retained"])
def test_a_graph_that_is_dropped_leaves_nothing(sim, setting, when):
    run = start(net, setting)
    held = []
    for number in range(8):
        inputs = run.batch(number).requires_grad_()
        hidden = run.model.entry(inputs)
        loss = run.model.blocks[1](hidden).sum()
        if when == "half":
            torch.autograd.grad(loss, hidden)
        elif when == "retained":
            loss.backward(retain_graph=True)
            run.model.zero_grad()
        del inputs, hidden, loss
        run.loss(number).backward()  # autograd's thread drops what it held of the last
        run.model.zero_grad()
        held.append((sim.allocated_bytes(), sim.pinned_bytes(), live_leases()))
    assert all(now <= then for now, then in zip(held[-1], held[3], strict=True))
    end(run)


@over(FEW)
@pytest.mark.parametrize("late", [False, True])
def test_an_inner_differentiation_in_a_forward_is_exact(
    sim, setting, monkeypatch, late
):
    """A module's forward differentiates a part of the model, or of itself. It may begin
    to wait for autograd just after autograd's thread has looked whether it does.
    """
    looks, is_waited_for = itertools.count(0 if late else 1), Turn._is_waited_for
    monkeypatch.setattr(
        Turn,
        "_is_waited_for",
        lambda turn, me: next(looks) > 0 and is_waited_for(turn, me),
    )

    class Forces(Net):
        def forward(self, x):
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                energy = super().forward(place).sum()
                (forces,) = torch.autograd.grad(energy, place, create_graph=True)
            return forces + self.head(x)

    @built
    def forces_net():
        return Forces()

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            run.backward(run.loss(number))
            with torch.no_grad():
                run.note("validation", run.loss(number))
            step(optimizer)

    assert_trains_equally(forces_net, script, setting)


def adapting(waiting, learn, base=Net):
    """A model that learns in the middle of a forward, where there is what from."""

    class Adapting(base):
        def forward(self, x):
            if not waiting:
                return super().forward(x)
            y = self.entry(x)
            learn(self)
            return y + super().forward(x)

    return built(Adapting)


@over(SOME)
@pytest.mark.parametrize(
    ("clears", "base"),
    [
        ("no", Net),
        ("to none", Net),
        ("to zero", Net),
        ("no", Reentering),
        ("no", Recomputing),
    ],
)
def test_gradients_of_a_backward_inside_of_a_forward_are_there_when_it_ends(
    sim, setting, clears, base
):
    """As where a model takes a step for each input; also of graphs from before."""
    held, given = [], []

    def learn(model):
        for _ in range(2):
            held.pop().backward()
            grads = [p.grad for p in model.parameters()]
            given.append([None if g is None else g.cpu().clone() for g in grads])
        if clears != "no":
            model.zero_grad(set_to_none=clears == "to none")

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            held[:] = [run.loss(10 * number + each) for each in range(2)]
            run.backward(run.loss(10 * number + 2))
            run.note("inside", given)
            given.clear()
            step(optimizer)

    assert_trains_equally(adapting(held, learn, base), script, setting)


@over(FEW)
def test_a_backward_inside_of_a_forward_may_be_in_that_of_something_else(sim, setting):
    """A function of another graph goes back through the model: its gradients are there,
    and none if that has failed."""
    held, given = [], []

    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            failing, loss, model = held.pop()
            with pytest.raises(Stop):
                failing.backward()
            model.zero_grad()
            loss.backward()
            return grad

    def learn(model):
        other = torch.ones(1, device=held[0][0].device, requires_grad=True)
        Foreign.apply(other).backward()
        given.extend(p.grad.cpu().clone() for p in model.parameters())

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            hidden = run.model.entry(run.batch(number))
            hidden.register_hook(stop)
            failing = run.model.head(hidden).sum()
            held.append((failing, run.loss(10 * number), run.model))
            del hidden, failing
            run.backward(run.loss(10 * number + 1))
            run.note("inside", given)
            given.clear()
            step(optimizer)

    assert_trains_equally(adapting(held, learn, Net), script, setting)


@over(FEW)
@pytest.mark.parametrize("goes_on", ["with another one", "with none"])
def test_a_backward_that_fails_inside_of_a_forward_leaves_no_gradients(
    sim, setting, goes_on
):
    """None of what it has brought comes with that of the next one."""
    held, given = [], []

    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    def learn(model):
        failing, loss = held.pop()
        with pytest.raises(Stop):
            failing.backward()
        model.zero_grad()
        if goes_on == "with another one":
            loss.backward()
            given.extend(p.grad.cpu().clone() for p in model.parameters())

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            hidden = run.model.entry(run.batch(number))
            hidden = run.model.blocks[0](hidden)
            hidden.register_hook(stop)
            failing = run.model.head(run.model.blocks[1](hidden)).sum()
            held.append((failing, run.loss(10 * number)))
            run.backward(run.loss(10 * number + 1))
            run.note("inside", given)
            given.clear()
            step(optimizer)

    assert_trains_equally(adapting(held, learn), script, setting)


@over(FEW)
def test_nobody_changes_weights_while_a_forward_goes_on(sim, setting):
    """Not for gradients of a backward inside of it, either."""
    run, told = start(net, setting), []
    run.runtime.when_home(told.extend)
    loss = run.loss()

    def learn(*_):
        loss.backward()
        assert all(p.grad is not None for p in run.model.parameters())

    hook = run.model.register_forward_pre_hook(learn)
    with torch.no_grad():
        run.loss(1)
    hook.remove()
    assert told == []
    run.loss(2).backward()
    assert told
    told.clear()
    run.model.zero_grad()
    end(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_another_type_are_there_at_the_end_of_a_backward_in_a_forward(
    sim, dtype
):
    torch.default_generator.manual_seed(0)
    model = Net().to(torch.bfloat16)
    plain, given = deepcopy(model).to("hpu"), []
    stagehand.layer(model, vram_budget=9000, device="hpu")
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.grad_dtype = dtype
        loss = each(batch(4, WIDTH).to("hpu", torch.bfloat16)).float().square().mean()

        def learn(module, args, loss=loss):
            loss.backward()
            grads = [p.grad for p in module.parameters()]
            assert {g.dtype for g in grads} == {dtype}
            given.append([g.cpu().clone() for g in grads])

        hook = each.register_forward_pre_hook(learn)
        each(batch(4, WIDTH).to("hpu", torch.bfloat16))
        hook.remove()
        given[-1] += [p.grad for p in each.parameters()]
    assert_bitwise_equal(*given, "gradients")
    runtime_of(model).shutdown()
    model.zero_grad()


def test_gradients_that_accumulate_take_no_device_memory(sim):
    run = start(net, TIGHT)
    run.loss().backward()
    held = sim.allocated_bytes()
    for number in range(5):
        run.loss(number).backward()
        assert sim.allocated_bytes() == held
    run.model.zero_grad()
    end(run)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev"])
def test_a_transform_that_cannot_go_through_is_refused_and_leaves_nothing(
    sim, transform, mode
):
    """It failed somewhere inside, and the model could not be used any more."""
    model = stack(4)
    x = batch()[0].to("hpu")
    expected = deepcopy(model).to("hpu")(x).detach()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    transformed = {
        "grad": torch.func.grad(lambda x: model(x).sum()),
        "vjp": lambda x: torch.func.vjp(model, x),
        "jvp": lambda x: torch.func.jvp(model, (x,), (x,)),
        "jacrev": torch.func.jacrev(model),
    }[transform]
    for _ in range(2):
        with mode(), pytest.raises(ConfigError, match=r"torch\.func"):
            transformed(x)
        assert torch.equal(model(x).detach(), expected)
    with mode():
        assert torch.equal(torch.vmap(model)(x[None])[0], expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize("passes", [0, 1])
def test_weights_of_several_models_are_refused_and_leave_nothing(sim, passes, place):
    """PyTorch told of `data`, which is not read under `vmap`."""
    model = stack(4)
    x = batch().to(place)
    weights, _ = torch.func.stack_module_state([deepcopy(model).to(place)] * 2)
    expected = deepcopy(model).to(place)(x)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)
    for _ in range(passes):
        model(x)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"vmap .* \[32, 32\] .*shutdown\(\)"):
            torch.vmap(lambda weights: functional_call(model, weights, x))(weights)
        assert torch.equal(model(x), expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize(
    ("record", "name"),
    [
        (torch.export.export, r"torch\.export"),
        (torch.jit.trace, r"torch\.jit\.trace"),
        (lambda model, args: make_fx(model)(*args), r"torch\.fx"),
    ],
)
def test_what_records_a_model_is_refused_and_takes_it_after_the_shutdown(
    sim, record, name, passes, place
):
    """Exporting was told of tensors that had joined, or failed somewhere inside.

    What `make_fx` had recorded read weights where they were later.
    """
    model = stack(4)
    x = batch()[0]
    with torch.no_grad():
        expected = model(x)
        stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)
        for _ in range(passes):
            model(x)
        with pytest.raises(ConfigError, match=f"{name} .*shutdown"):
            record(model, (x,))
        assert model(x).device.type == place
        runtime_of(model).shutdown()
        recorded = record(model, (x,))
        module = recorded.module() if record is torch.export.export else recorded
        assert_bitwise_equal(module(x), expected, "recorded")


def test_what_compiles_a_model_from_its_source_says_why_it_cannot(sim):
    """It said that an object of the library's has no name."""
    model = stack(4)
    expected = model(batch()).detach()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="cpu")
    for module in (model, model[0]):
        with pytest.raises(AttributeError, match=r"streamed model .* shutdown\(\)"):
            torch.jit.script(module)
    runtime_of(model).shutdown()
    assert torch.equal(torch.jit.script(model)(batch()), expected)


@pytest.mark.parametrize(
    "one_graph",
    [
        partial(torch.export.export, args=(batch(),), strict=True),
        lambda model: torch.compile(model, backend="eager", fullgraph=True)(batch()),
    ],
    ids=["export", "compile"],
)
def test_the_compiler_says_why_a_streamed_model_is_no_single_graph(sim, one_graph):
    """It named a function of the library's, and advised to report that to PyTorch."""
    torch.compiler.reset()
    model = stack(4)
    with torch.no_grad():
        expected = model(batch())
        stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
        reason = r"streamed model's weights.*shutdown\(\)"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
            one_graph(model)
        assert_bitwise_equal(model(batch()), expected, "streamed")
        runtime_of(model).shutdown()
        one_graph(model)
    torch.compiler.reset()


@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_weights_given_for_one_call_are_differentiated_or_refused(sim, place):
    model = stack(4)
    resident = deepcopy(model).to("hpu")
    x = batch().to("hpu")
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    name = "2.0.weight"
    leaves = [
        resident.get_parameter(name).detach().to(where).requires_grad_()
        for where in (place, "hpu")
    ]
    for one, leaf in zip((model, resident), leaves, strict=True):
        functional_call(one, {name: leaf}, (x,)).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)

    computed = leaves[1].detach().to(place).requires_grad_() * 3
    if place == "hpu":
        functional_call(model, {name: computed}, (x,)).sum().backward()
    else:  # its gradient would be made on the device
        for _ in range(2):
            with pytest.raises(ConfigError, match="autograd computed on cpu"):
                functional_call(model, {name: computed}, (x,))
    assert torch.equal(model(x).detach(), resident(x).detach())
    del leaf, leaves, computed
    runtime_of(model).shutdown()


# Several models


class Site(nn.Module):
    """Reads weights before and behind a layer of another model."""

    def __init__(self):
        super().__init__()
        self.before = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.behind = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x, layer):
        return layer(x @ self.before) @ self.behind


class Outer(nn.Module):
    """Another model's pass lies within its own, and that one's layers in its sites."""

    def __init__(self):
        super().__init__()
        self.sites = nn.ModuleList(Site() for _ in range(4))

    def forward(self, x, inner):
        return inner(x, self.sites)


class Inner(nn.Module):
    """The other model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.deepest = 0

    def forward(self, x, sites):
        for turn in range(40):
            x = sites[turn % 4](torch.tanh(x), self.layers[turn % 4])
            self.deepest = max(self.deepest, depth_of_hooks())
        return x


def depth_of_hooks():
    """How many pairs of hooks pass on to each other."""
    top, depth = top_saved_hooks(), 0
    unpack = None if top is None else top[1]
    while unpack is not None:
        depth += 1
        unpack = getattr(getattr(unpack, "__self__", None), "below", None)
    return depth


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_models_within_each_others_sites_are_kept_apart(sim, place, recomputes):
    def run(outer, inner):
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(place)
        if recomputes:
            y = checkpoint(outer, x, inner, use_reentrant=False)
        else:
            y = outer(x, inner)
        y.square().mean().backward()
        return [p.grad.cpu() for m in (outer, inner) for p in m.parameters()]

    models = Outer(), Inner()
    expected = run(*(deepcopy(model).to(place) for model in models))
    for model in models:
        needed = smallest_budget(deepcopy(model), place)
        stagehand.layer(model, vram_budget=4 * needed, device=place)
    assert all_equal(run(*models), expected)
    assert models[1].deepest <= 3
    for model in models:
        runtime_of(model).shutdown()


class RecomputedInside(Residual):
    """A block that recomputes all of itself."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Crossing(Residual):
    """A block that recomputes all of itself, and goes back to what it was given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x, side):
        return checkpoint(partial(self.mix, side=side), x, use_reentrant=True)

    def mix(self, x, side):
        return x + self.scale * self.norm(x) * self.up(side)[:, :WIDTH]


class Crossed(Net):
    """As in models of images and text: what a checkpoint is not told of has a graph."""

    def __init__(self):
        super().__init__(depth=0)
        self.blocks = nn.ModuleList([Residual(), Residual(), Crossing()])

    def forward(self, x):
        one, two, crossing = self.blocks
        side = two(one(x.detach()))
        return self.head(crossing(self.entry(x), side))


@over([Setting("hpu", mode, "smallest") for mode in ("layers", "blocks")])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_recompute_goes_back_to_other_blocks_in_between(sim, setting, frozen):
    """Its nodes have low numbers, for they are autograd's thread's: these come last."""

    @built
    def build():
        model = Crossed()
        if frozen:
            model.blocks.requires_grad_(False)
        return model

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            x = run.batch(number).requires_grad_()
            run.backward(run.model(x).square().mean())
            step(optimizer)

    assert_trains_equally(build, script, setting)
    assert sim.races() == []


@over([Setting("hpu", mode, "smallest") for mode in ("layers", "blocks")])
def test_what_the_graph_of_a_gradient_has_read_of_a_slot_is_read_before_it_is_refilled(
    sim, setting
):
    """It holds views of weights that were recomputed, reads them when no block is in
    use yet, and lets go of them before the slot is given up.
    """

    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList([RecomputedInside(), Residual()])
        return model

    def script(run):
        for number in range(2):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            run.backward(grad.square().sum())
            run.model.zero_grad()

    assert_trains_equally(build, script, setting, abandoned=True)
    assert sim.races() == []


class TwoConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Conv1d(1, 4, 3), nn.Conv1d(4, 1, 3)])

    def forward(self, x):
        x = torch.tanh(self.entry(x)).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return x


@over(SOME)
def test_a_weight_that_has_no_gradient_in_a_backward_keeps_the_earlier_one(
    sim, setting
):
    """The penalty of a critic's gradients does not depend on its last bias."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            run.backward(run.model(run.batch(number)).mean())
            x = run.batch(10 + number).requires_grad_()
            loss = run.model(x).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            run.backward((grad.norm(2, 1) - 1).square().mean())
            step(optimizer)

    assert_trains_equally(built(TwoConvolutions), script, setting)
