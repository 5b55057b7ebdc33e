"""Hooks on weights that a graph uses several times see the sum of the uses, once.

A streamed weight that comes to the device several times is several weights to autograd,
each with an addition of its own; of a resident one there is a single addition.
"""

import pytest
import torch
from test_training_reuse import Cut, Reusing, Tied, Twice, halve
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand.gradients.uses import Uses
from training import (
    FEW,
    SOME,
    WIDTH,
    Residual,
    Run,
    Setting,
    assert_trains_equally,
    built,
    end,
    over,
    start,
)

TIGHT_BLOCKS = Setting("hpu", "blocks", "smallest")
ROUND = [0, 1, 2, 3, 0, 1, 2, 3]


class Speaking(nn.Module):
    """Reads its words and writes with the same weight, which may be a large one."""

    def __init__(self, words=64):
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x[:, :4].abs().mul(8).long().clamp(max=63))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Ending(Reusing):
    """The use that backward comes to last has no gradient."""

    def forward(self, x):
        x = self.entry(x)
        return self.head(
            self.blocks[0](self.blocks[1](x + Cut.apply(self.blocks[0](x))))
        )


class Beginning(Reusing):
    """The use that backward comes to first has no gradient."""

    def forward(self, x):
        x = self.blocks[0](self.entry(x))
        y = self.blocks[1](x)
        return self.head(y + Cut.apply(self.blocks[0](y)))


class SpeakingInside(Speaking):
    """A region that a function runs again, with autograd behind it, uses it twice."""

    def forward(self, x):
        start = torch.zeros((), device=x.device, requires_grad=True)
        speak = super().forward
        return checkpoint(lambda x, _: speak(x), x, start, use_reentrant=True)


def reentering(block, order, uses):
    """Return a model whose first uses are calls of autograd of their own."""
    return built(lambda: Reusing(block, order, range(uses), reentrant=True))


MODELS = {
    "tied": built(Speaking),
    "large and tied": built(lambda: Speaking(4096)),
    "again": built(lambda: Reusing(Residual, ROUND)),
    "twice each": built(lambda: Reusing(Twice, ROUND)),
    "tied within": built(lambda: Reusing(Tied, ROUND, tied=True)),
    "recomputed": built(lambda: Reusing(Residual, ROUND, range(2, 6), tied=True)),
    "nested": reentering(Residual, [0, 1, 0, 1, 0], 4),
    "inside": reentering(Twice, [0, 1], 2),
    "no gradient first": built(lambda: Beginning(Residual, ROUND)),
    "no gradient last": built(lambda: Ending(Residual, ROUND)),
}

REGIONS = {
    "tied inside": built(SpeakingInside),
    "large and tied inside": built(lambda: SpeakingInside(4096)),
}  # what was there before is added too early: the last bits may differ


def hook_each(run, make):
    for name, parameter in run.model.named_parameters():
        hook = make(name, parameter)
        run.handles.append(parameter.register_post_accumulate_grad_hook(hook))


def noting(run):
    def make(name, _):
        def note(parameter):
            grad = parameter.grad
            assert parameter.device.type == run.place
            assert grad is None or grad.device == parameter.device
            run.note(f"{name} has", parameter.grad)

        return note

    hook_each(run, make)


def count_calls(weight, seen, number):
    """Register a hook that adds its number to those seen."""
    register = weight.register_post_accumulate_grad_hook
    return register(lambda _: seen.append(number))


def by_name(run):
    """Hooks of different weights may run in another order, those of one may not."""
    run.notes.sort(key=lambda note: note[0].partition(", ")[2])


def stepping(run, kind=torch.optim.AdamW, **settings):
    def make(_, parameter):
        optimizer = kind([parameter], lr=0.05, foreach=False, **settings)

        def step(_):
            optimizer.step()
            optimizer.zero_grad()

        return step

    hook_each(run, make)


@pytest.mark.parametrize("model", [*MODELS, *REGIONS])
@over([*SOME, TIGHT_BLOCKS])
def test_an_optimizer_in_a_hook_steps_once(sim, setting, model):
    def script(run):
        stepping(run)
        for number in range(3):
            run.loss(number).backward()

    assert_trains_equally((MODELS | REGIONS)[model], script, setting)


@pytest.mark.parametrize("model", MODELS)
@over([*FEW, TIGHT_BLOCKS])
def test_hooks_see_what_has_been_added_to_what_was_there(sim, setting, model):
    def script(run):
        run.loss(0).backward()
        noting(run)
        for number in range(1, 4):
            run.backward(run.loss(number))
        by_name(run)

    assert_trains_equally(MODELS[model], script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_see_the_sum_of_several_forwards(sim, setting):
    def script(run):
        noting(run)
        for number in range(2):
            run.backward(run.loss(number) + run.loss(number + 5) + run.loss(number + 9))
        by_name(run)

    assert_trains_equally(built(lambda: Reusing(Residual, [0, 1])), script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_see_the_sum_of_each_backward_through_a_graph(sim, setting):
    def script(run):
        noting(run)
        both, other = run.loss(0), run.loss(1)
        loss = both + other
        loss.backward(retain_graph=True)
        other.backward(retain_graph=True)
        loss.backward()
        run.look()
        by_name(run)

    assert_trains_equally(MODELS["again"], script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_of_weights_that_are_frozen_meanwhile_see_what_was_there(sim, setting):
    def script(run):
        run.loss(0).backward()
        noting(run)
        loss = run.loss(1)
        run.model.requires_grad_(False)
        run.backward(loss)
        run.model.requires_grad_(True)
        run.backward(run.loss(2))
        by_name(run)

    assert_trains_equally(MODELS["again"], script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_uses_that_a_backward_does_not_come_to_are_not_waited_for(sim, setting):
    """Of graphs that were dropped, that run later, and outside of what it asks for."""

    def script(run):
        stepping(run, torch.optim.SGD)
        kept, dropped = run.loss(0), run.loss(1)
        run.note("dropped", dropped)
        del dropped
        weights = [run.model.blocks[0].norm.weight]
        for grad in stagehand.grad(kept, weights, retain_graph=True):
            run.note("taken", grad)
        run.loss(2).backward()
        with torch.no_grad():
            run.note("after", run.loss(3))

    assert_trains_equally(MODELS["again"], script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_are_there_after_a_backward_that_failed_between_two_uses(sim, setting):
    class Failing(Reusing):
        fails = False

        def forward(self, x):
            x = self.blocks[1](self.blocks[0](self.entry(x)))
            if self.fails:
                x.register_hook(fail)
            return self.head(self.blocks[0](x))

    def fail(_):
        raise ValueError("on purpose")

    def script(run):
        noting(run)
        run.model.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            run.loss(0).backward()
        run.model.fails = False
        run.notes.clear()
        run.model.zero_grad()
        for number in range(2):
            run.backward(run.loss(number))
        by_name(run)

    assert_trains_equally(built(lambda: Failing(Residual, [0])), script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_are_called_in_their_order_and_only_those_that_are_left(sim, setting):
    def script(run):
        seen = []
        weight = run.model.blocks[0].up.weight
        first = count_calls(weight, seen, 1)
        run.loss(0).backward()
        run.handles += [count_calls(weight, seen, number) for number in (2, 3)]
        run.loss(1).backward()
        first.remove()
        run.loss(2).backward()
        run.note("calls", [torch.tensor(seen)])

    assert_trains_equally(MODELS["again"], script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_that_one_in_front_of_the_addition_removes_are_not_called(sim, setting):
    def script(run):
        seen = []
        weight = run.model.blocks[0].up.weight
        left = [count_calls(weight, seen, 1)]
        run.handles += [count_calls(weight, seen, 2)]
        run.loss(0).backward()

        def remove():
            while left:
                left.pop().remove()

        run.handles += [weight.register_hook(lambda _: remove())]
        for number in range(1, 3):
            run.loss(number).backward()
        run.note("calls", [torch.tensor(seen)])

    assert_trains_closely(script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_of_both_kinds_see_each_part_once(sim, setting):
    """Those in front of the addition see each use: the last bits may differ."""

    def script(run):
        run.loss(0).backward()
        for parameter in run.model.parameters():
            run.handles.append(parameter.register_hook(lambda grad: grad * 2))
        noting(run)
        for number in range(1, 3):
            run.loss(number).backward()
        by_name(run)

    assert_trains_closely(script, setting)


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_that_come_behind_the_forwards_change_each_part_once(sim, setting):
    """They are not waited for."""

    def script(run):
        losses = [run.loss(number) for number in range(2)]
        for parameter in run.model.parameters():
            register = parameter.register_post_accumulate_grad_hook
            run.handles.append(register(halve))
        sum(losses).backward()
        run.look()

    assert_trains_closely(script, setting, built(lambda: Reusing(Twice, [0, 1])))


def assert_trains_closely(script, setting, build=MODELS["again"]):
    expected = Run(model=build().to(setting.place), place=setting.place)
    run = start(build, setting)
    for each in (expected, run):
        script(each)
    assert [what for what, _ in expected.notes] == [what for what, _ in run.notes]
    for (_, theirs), (_, mine) in zip(expected.notes, run.notes, strict=True):
        torch.testing.assert_close(mine, theirs)
    for handle in expected.handles:
        handle.remove()
    run.finish()
    end(run)


@over([*FEW, TIGHT_BLOCKS])
def test_a_gradient_that_is_set_between_two_uses_is_added_to(sim, setting):
    class Between(Reusing):
        def forward(self, x):
            weight = self.blocks[0].up.weight

            def put(_):
                weight.grad = torch.ones_like(weight)

            x = self.blocks[1](self.blocks[0](self.entry(x)))
            x.register_hook(put)
            return self.head(self.blocks[0](x))

    def script(run):
        noting(run)
        for number in range(2):
            run.backward(run.loss(number))
            run.model.zero_grad()
        by_name(run)

    assert_trains_equally(built(lambda: Between(Residual, [0])), script, setting)


def test_hooks_see_the_sum_of_two_uses_with_no_other_weights_between(sim):
    """The block has left between them, but backward comes to no other block."""

    def script(run):
        run.loss(0).backward()
        noting(run)
        first = run.loss(1)
        if run.runtime is not None:
            run.runtime.park()
        run.backward(first + run.loss(2))

    layer = built(lambda: nn.Linear(WIDTH, WIDTH))
    assert_trains_equally(layer, script, Setting("hpu", "layers", "smallest"))


@over([*FEW, TIGHT_BLOCKS])
def test_hooks_are_there_after_one_in_front_of_the_addition_failed(sim, setting):
    def fail(_):
        raise ValueError("on purpose")

    def script(run):
        noting(run)
        run.loss(0).backward()
        failing = run.model.blocks[0].up.weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            run.loss(1).backward()
        failing.remove()
        run.notes.clear()
        run.model.zero_grad()
        run.backward(run.loss(2))
        by_name(run)

    assert_trains_equally(MODELS["again"], script, setting)


def test_uses_are_looked_through_while_no_other_thread_adds_some(sim, monkeypatch):
    """Backward comes to the weight before it has come to anything else streamed."""
    locked, more_come = [], Uses.more_come

    def look(uses):
        locked.append(runtime._edges.lock.owner is not None)
        return more_come(uses)

    monkeypatch.setattr(Uses, "more_come", look)
    model = MODELS["again"]()
    runtime = TIGHT_BLOCKS.stream(model, TIGHT_BLOCKS.bytes_for(MODELS["again"]))
    weight = model.blocks[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda _: None)
    model(torch.ones(2, WIDTH, device="hpu")).sum().backward()
    locked.clear()
    weight.sum().backward()
    assert locked == [True]
    runtime.shutdown()
