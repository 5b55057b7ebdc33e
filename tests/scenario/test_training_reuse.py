"""Layers that a graph uses several times get the resident model's gradients.

A weight that comes to the device several times is several weights to autograd. What
they bring has to be added in the order in which it adds what a single one brings.
"""

import random
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand.optim import OffloadedAdamW
from training import (
    FEW,
    SOME,
    WIDTH,
    Net,
    Residual,
    Run,
    Setting,
    assert_trains_equally,
    built,
    end,
    over,
    sgd,
    start,
    step,
)

SETTINGS = [
    *(
        Setting("hpu", mode, budget)
        for mode in ("layers", "blocks")
        for budget in ("smallest", "third", "most")
    ),
    Setting("cpu", "layers", "smallest"),
]


class Twice(Residual):
    """Reads each of its weights twice."""

    def forward(self, x):
        return super().forward(super().forward(x))


class Tied(nn.Module):
    """One operator after the other reads its one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight) @ self.weight.t()


class Reusing(nn.Module):
    """Runs its blocks in some order, some of them in checkpoints."""

    def __init__(self, block, order, recomputed=(), *, tied=False, reentrant=False):
        super().__init__()
        self.order = order
        self.recomputed = recomputed
        self.reentrant = reentrant
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.entry.weight

    def forward(self, x):
        x = self.entry(x)
        for place, number in enumerate(self.order):
            block = self.blocks[number]
            if place in self.recomputed:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x)


def some_model(chance):
    """Return a function that makes the same model at every call."""
    block = chance.choice([Residual, Residual, Twice, Tied])
    blocks = chance.randint(1, 4)
    order = [chance.randrange(blocks) for _ in range(chance.randint(2, 7))]
    share = chance.choice([0, 0.5])
    recomputed = [place for place in range(len(order)) if chance.random() < share]
    tied = chance.random() < 0.4
    return built(lambda: Reusing(block, order, recomputed, tied=tied))


def some_script(seed):
    """Return a script of forwards and backwards in some order.

    Some forwards go on from the outputs of others, some backwards keep their graphs,
    some graphs are dropped, and some losses outlive their graphs.
    """

    def script(run):
        chance = random.Random(seed)
        optimizer = sgd(run)
        outputs, losses, what = [], [], ""
        for number in range(14):
            before = what
            what = chance.choice([*"ffffbbbb", "drop", "forget", "step"])
            if what == "f":
                x = run.batch(number)
                if outputs and chance.random() < 0.4:
                    x = x + chance.choice(outputs)
                outputs.append(run.model(x))
            elif what == "b" and outputs:
                chosen = chance.sample(outputs, chance.randint(1, len(outputs)))
                keeps = chance.random() < 0.4
                loss = sum(each.square().mean() for each in chosen)
                run.backward(loss, retain_graph=keeps)
                losses += [loss] if chance.random() < 0.3 else []
                outputs = outputs if keeps else []  # they may have parts in common
            elif what == "drop" and outputs:
                outputs.pop(chance.randrange(len(outputs)))
            elif what == "forget":
                losses.clear()
            elif what == "step":
                outputs = []
                if before == "b":
                    optimizer.step()
                optimizer.zero_grad()

    return script


@dataclass
class Sample:
    x: torch.Tensor


class Returning(Twice):
    """Returns what it computes inside of something."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(x=super().forward(x))


class Unpacked(Reusing):
    def forward(self, x):
        x = self.entry(x)
        for number in self.order:
            given = self.blocks[number](x)
            x = given["x"] if isinstance(given, dict | UserDict) else given.x
        return self.head(x)


@pytest.mark.parametrize("kind", [dict, UserDict, Sample, SimpleNamespace])
def test_gradients_are_exact_whatever_a_block_that_is_used_again_returns(sim, kind):
    def script(run):
        run.backward(run.model(run.batch(0)).square().mean())

    order = [0, 1, 2, 3, 0, 1, 2, 3]
    model = built(lambda: Unpacked(lambda: Returning(kind), order))
    assert_trains_equally(model, script, Setting("hpu", "blocks", "smallest"))


@pytest.mark.parametrize("seed", range(60))
def test_gradients_are_exact_however_often_layers_and_graphs_are_used(sim, seed):
    chance = random.Random(seed)
    setting = SETTINGS[seed % len(SETTINGS)]
    assert_trains_equally(some_model(chance), some_script(seed), setting)


@over(SOME)
@pytest.mark.parametrize("order", [[0, 0, 1, 0], [0, 0, 1, 1, 0, 0]], ids=str)
@pytest.mark.parametrize("block", [Residual, Twice, Tied])
def test_a_block_that_left_between_some_of_its_uses_gets_the_sum(
    sim, setting, order, block
):
    def script(run):
        for number in range(3):
            run.backward(run.loss(number))

    assert_trains_equally(built(lambda: Reusing(block, order)), script, setting)


@over(SOME)
def test_gradients_of_a_kept_graph_are_added_before_they_are_accumulated(sim, setting):
    def script(run):
        run.backward(run.loss())
        first = run.model(run.batch(1))
        run.backward(first.sum(), retain_graph=True)
        second = run.model(run.batch(2) + first)
        run.backward(second.sum())

    assert_trains_equally(built(lambda: Reusing(Residual, [0, 1])), script, setting)


def look_at_all(run):
    """Read every weight, as who saves the model does."""
    run.note("weights", run.model.state_dict())


def park(run):
    if run.runtime is not None:
        run.runtime.park()


def adapt(run):
    run.model.blocks[0].down = nn.Sequential(
        run.model.blocks[0].down, built(lambda: nn.Linear(WIDTH, WIDTH))()
    )
    if run.runtime is None:
        run.model.to(run.place)


@pytest.mark.parametrize(
    ("setting", "between"),
    [
        *((setting, each) for setting in SETTINGS for each in (look_at_all, park)),
        (Setting("hpu", "blocks", "all"), adapt),
    ],
    ids=lambda each: str(getattr(each, "__name__", each)),
)
def test_sums_of_losses_are_accumulated_whatever_was_between(sim, setting, between):
    """What a pass has to bring before it begins is a weight of its graph, too."""

    def script(run):
        for number in range(2):
            run.backward(run.loss(number) + run.loss(number + 10))
            between(run)
            run.backward(run.loss(number + 20) + run.loss(number + 30))

    assert_trains_equally(built(Net), script, setting)


@over(SETTINGS)
def test_what_streams_is_accumulated_exactly_though_parked_before_backward(
    sim, setting
):
    """Of what stays on the device the last bits may differ: see docs/training.md."""

    def script(run):
        for name, weight in run.model.named_parameters():
            weight.requires_grad_(name.startswith("blocks") and weight.dim() > 1)
        for number in range(2):
            loss = run.loss(number) + run.loss(number + 10)
            park(run)
            run.backward(loss + run.loss(number + 20) + run.loss(number + 30))

    assert_trains_equally(built(Net), script, setting)


@over([Setting("hpu", "layers", "all"), Setting("hpu", "blocks", "all")])
@pytest.mark.parametrize(("reader", "owner"), [(1, 3), (3, 1)])
def test_weights_tied_while_the_model_streams_get_their_terms_in_order(
    sim, setting, reader, owner
):
    """One of the places that read them is no site of theirs."""

    def script(run):
        for number in range(4):
            if number == 1:
                blocks = run.model.blocks
                blocks[reader].up.weight = blocks[owner].up.weight
            run.backward(run.loss(number) + run.loss(number + 10))

    assert_trains_equally(built(Net), script, setting)


class Mirrored(nn.Module):
    """What a weight is read as: in two terms."""

    def forward(self, weight):
        return weight * 0.5 + weight.abs() * 0.25


@over([*FEW, Setting("hpu", "blocks", "all")])
def test_a_weight_that_begins_to_be_used_several_times_is_accumulated_exactly(
    sim, setting
):
    def script(run):
        for number in range(4):
            if number == 2:
                for block in run.model.blocks:
                    register_parametrization(block.up, "weight", Mirrored())
            run.backward(run.loss(number) + run.loss(number + 10))
            run.backward(run.loss(number + 20) + run.loss(number + 30))

    assert_trains_equally(built(Net), script, setting)


class RowByRow(nn.Linear):
    """Reads its weight once for each row."""

    def forward(self, x):
        return x + torch.cat([super(RowByRow, self).forward(row) for row in x.split(1)])


class Recurrent(nn.LSTM):
    """Reads its weights once for each row."""

    def __init__(self, width, _):
        super().__init__(width, width)

    def forward(self, x):
        return x + super().forward(x)[0]


@over([*FEW, Setting("hpu", "layers", "third")])
@pytest.mark.parametrize("kind", [RowByRow, Recurrent])
@pytest.mark.parametrize("parts", [[1, 3, 3], [1, 1, 2, 1, 4]], ids=str)
def test_a_use_may_read_weights_more_often_than_the_first_one_did(
    sim, setting, kind, parts
):
    """As in autoencoders of videos, whose first part is a single frame."""

    class InParts(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x):
            done = []
            for part in x.split(parts):
                hidden = self.entry(part) + (done[-1][-1] if done else 0)
                for block in self.blocks:
                    hidden = block(hidden)
                done.append(hidden)
            return self.head(torch.cat(done))

    def script(run):
        optimizer = sgd(run)
        for number in range(2):
            run.backward(run.model(run.batch(number, sum(parts))).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(built(InParts), script, setting)


@over(FEW)
def test_reentrant_checkpoints_accumulate_one_by_one(sim, setting):
    def script(run):
        for number in range(3):
            run.backward(run.loss(number))

    build = built(lambda: Reusing(Residual, [0, 0, 1, 0], range(4), reentrant=True))
    assert_trains_equally(build, script, setting)


class Cut(torch.autograd.Function):
    """Gives no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@over(FEW)
@pytest.mark.parametrize("hook", [None, lambda parameter: None], ids=["", "hooked"])
def test_what_a_recompute_has_brought_stays_where_nothing_follows(sim, setting, hook):
    """A node without a gradient was taken for an optimizer that had used it up."""

    class Cutting(Reusing):
        def forward(self, x):
            x = self.entry(x)
            first = Cut.apply(self.blocks[0](x))
            return self.head(first + checkpoint(self.blocks[0], x, use_reentrant=True))

    def script(run):
        if hook is not None:
            for parameter in run.model.parameters():
                run.handles.append(parameter.register_post_accumulate_grad_hook(hook))
        for number in range(3):
            run.backward(run.loss(number))

    assert_trains_equally(built(lambda: Cutting(Residual, [0])), script, setting)


def double(grad):
    return 2 * grad


def halve(parameter):
    parameter.grad.mul_(0.5)


@over(FEW)
@pytest.mark.parametrize("kind", [double, halve])
def test_what_was_through_users_hooks_does_not_go_there_again(sim, setting, kind):
    """So it is given to no term that does: the last bits may differ here."""

    def script(run):
        for parameter in run.model.parameters():
            if kind is double:
                run.handles.append(parameter.register_hook(double))
            else:
                hook = parameter.register_post_accumulate_grad_hook(halve)
                run.handles.append(hook)
        for number in range(2):
            run.loss(number).backward()
        return [p.grad.cpu() for p in run.model.parameters()]

    build = built(lambda: Reusing(Twice, [0, 1, 2, 3, 0, 1, 2, 3]))
    expected = script(Run(model=build().to(setting.place), place=setting.place))
    run = start(build, setting)
    found = script(run)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    run.finish()
    end(run)


@over(FEW)
def test_another_graph_within_backward_is_given_none_of_its_gradients(sim, setting):
    """What has come of a weight is added to terms of the same call of autograd only."""

    def script(run):
        inner = run.loss(1)
        weight = run.model.blocks[0].weight
        model = run.model

        def found():
            return stagehand.grad(inner, [weight], retain_graph=True)[0].cpu()

        expected, seen = found(), []
        x = model.entry(run.batch())
        y = model.blocks[0](x)
        y.register_hook(lambda _: seen.append(found()))
        z = model.blocks[0](model.blocks[1](y))
        run.backward(model.head(z).square().sum())
        assert torch.equal(seen[0], expected)

    build = built(lambda: Reusing(Tied, [0, 1, 0]))
    assert_trains_equally(build, script, setting)


class Language(nn.Module):
    """Looks rows up in the weight of its head, and once more behind the head."""

    def __init__(self, once_more):
        super().__init__()
        self.once_more = once_more
        self.table = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        if self.once_more:
            scores = self.head(x)
            x = self.blocks[0](self.table(scores.argmax(-1)) * scores.mean())
        return self.head(x)


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize("forwards", [1, 2])
@over([*SETTINGS, Setting("hpu", "layers", "all")])
def test_table_that_is_the_heads_weight_is_summed_as_the_resident_one_is(
    sim, setting, forwards, once_more
):
    """Heads and lookups that find the table in one place make terms of one sum."""

    def script(run):
        optimizer = sgd(run, 0.01)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            rows = torch.randint(40, (forwards, 3, 7), generator=generator)
            losses = [run.model(row).square().mean() for row in rows.to(run.place)]
            run.backward(sum(losses))
            step(optimizer)

    assert_trains_equally(built(lambda: Language(once_more)), script, setting)


@over(FEW)
def test_layers_used_again_are_stepped_in_backward_once_their_sum_is_there(
    sim, setting
):
    def script(run):
        overlap = None if run.runtime is None else run.model
        optimizer = OffloadedAdamW(run.model.parameters(), lr=0.01, overlap=overlap)
        for number in range(4):
            run.loss(number)
            optimizer.zero_grad()
            loss = run.loss(number + 50)
            loss.backward()
            run.note("loss", loss)
            optimizer.step()
        optimizer.zero_grad()

    build = built(lambda: Reusing(Residual, [0, 1, 1, 2, 1, 3]))
    assert_trains_equally(build, script, setting)
