"""Whatever a script of training does, in any order: it does the same when streamed.

The same is done with a model that is all on the device, and outputs, gradients and
weights are compared bit by bit.
"""

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import deepcopy
from typing import ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from keeping import flush
from torch import nn

from architectures.trees import assert_bitwise_equal, flatten
from exploring import running
from simulated import sim_device
from stagehand.core.arena import live_leases
from stagehand.errors import StagehandOOMError
from streamed import GRAD_MODES
from training import WIDTH, Net, Recomputing, Reentering, Run, Setting, built

LR = 0.125
JOINING = 4096  # bytes of a layer that joins, with gradient and rounding

# Who edits weights while they are loaded ahead has them loaded again.
_EDITED = "host buffer rewritten before its copy ran"


class Interrupted(Exception):
    """A hook of the script fails."""


class Turning(Net):
    """Uses its blocks forwards and then backwards."""

    def forward(self, x):
        x = super().forward(x)
        for block in reversed(self.blocks):
            x = self.around(block, x)
        return x


@built
def tied():
    """One weight in two modules."""
    model = Net()
    model.head.weight = model.entry.weight
    return model


@built
def counting():
    """Buffers that each pass of training changes."""
    model = Net()
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH)
    return model


MAKERS = {
    "plain": built(Net),
    "dropping": built(lambda: Net(dropout=0.25)),
    "recomputing": built(Recomputing),
    "reentering": built(Reentering),
    "turning": built(Turning),
    "tied": tied,
    "counting": counting,
}
SEVERAL = ("turning", "tied")  # a graph uses a weight several times
RECOMPUTING = ("recomputing", "reentering")
SETTINGS = st.tuples(
    st.sampled_from(["layers", "blocks"]),
    st.sampled_from(["smallest", "smallest", "third", "most", "all"]),
)
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.5),
    "one by one": lambda params: torch.optim.SGD(params, lr=LR, foreach=False),
    "adam": lambda params: torch.optim.AdamW(params, lr=LR / 64, foreach=False),
}


def _held_bytes():
    """Of the device's memory, and of pinned memory."""
    return sim_device.allocated_bytes(), sim_device.pinned_bytes()


def _assign(tensor, other):
    tensor.data = other.clone()


def _halve_sum(weight):
    weight.grad.mul_(0.5)


EDITS = {
    "in place": lambda tensor: tensor.mul_(0.5),
    "behind its counter": lambda tensor: tensor.data.mul_(0.5),
    "copied into": lambda tensor: tensor.copy_(tensor.detach().clone() * 2),
    "assigned": lambda tensor: _assign(tensor, tensor.data * 0.5),
    "one element": lambda tensor: tensor.view(-1)[:1].add_(1),
}
COPIES = {
    "deep": deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}
kinds = st.runner().flatmap(  # most that goes wrong does where there are several uses
    lambda self: st.sampled_from([*self.makers, *self.several])
)
places = st.sampled_from(["hpu", "hpu", "cpu"])
numbers = st.integers(0, 5)
weights = st.integers(0, 30)


def parts_of(model):
    return [model.entry, *model.blocks, model.head]


def learn(run, number):
    loss = run.loss(number)
    loss.backward()
    return loss.detach()


def penalize(run, number, around=nullcontext):
    """Learn from a loss and its input's gradient; the forward is inside of `around`."""
    x = run.batch(number).requires_grad_()
    with around():
        y = run.model(x).square().mean()
    [grad] = torch.autograd.grad(y, x, create_graph=True)
    (y + grad.square().sum()).backward()
    return grad.detach()


class AnyOrder(RuleBasedStateMachine):
    """A script that trains, looks, edits, fails, and streams anew."""

    kind_of_run = Run
    makers: ClassVar = MAKERS
    several = SEVERAL
    recomputing = RECOMPUTING
    reading: ClassVar = ()  # weights of other modules: passes of the model find them

    def __init__(self):
        super().__init__()
        sim_device.reset()
        # Of other tests, which may have failed.
        self.held_bytes, self.leases = _held_bytes(), live_leases()
        self.seed = 0
        self.optimizes = False
        self.held = 0  # losses that wait for backward
        self.left = False  # whether what stays left the device meanwhile
        self.joined = 0  # layers that were not there at first
        self.edits = False

    @initialize(kind=kinds, place=places, setting=SETTINGS)
    def begin(self, kind, place, setting):
        self.kind, self.place, self.build = kind, place, self.makers[kind]
        plain = self.kind_of_run(model=self.build().to(place), place=place)
        self.runs = [plain, self.kind_of_run(model=self.build(), place=place)]
        for run in self.runs:
            run.losses = []
        self.stream(setting)

    def stream(self, setting):
        run = self.runs[1]
        run.budget, setting = self.budget(setting), Setting(self.place, *setting)
        try:
            run.runtime = setting.stream(run.model, run.budget)
        except StagehandOOMError as error:  # what was frozen since is laid out apart
            run.budget = error.needed_bytes
            run.runtime = setting.stream(run.model, run.budget)
        self.most = run.budget

    def shut_down(self):
        runtime = self.runs[1].runtime
        runtime.shutdown()
        report = runtime.report()
        assert report.peak_device_bytes <= self.most
        assert report.abandoned_slots == 0

    def budget(self, setting):
        least = Setting(self.place, *setting).bytes_for(self.build)
        return least + self.joined * JOINING

    def both(self, act):
        """Do the same with both models, and compare what that gives."""
        self.seed += 1
        given = []
        for run in self.runs:
            torch.default_generator.manual_seed(self.seed)
            given.append(act(run))
        assert_bitwise_equal(given[1], given[0], "what it gives")

    def of_all(self, act):
        """Do the same with all parameters of both models."""
        for run in self.runs:
            for parameter in run.model.parameters():
                act(parameter)

    def one(self, run, which):
        parameters = list(run.model.parameters())
        return parameters[which % len(parameters)]

    # Passes

    @rule(number=numbers, mode=st.sampled_from(list(GRAD_MODES)))
    def look(self, number, mode):
        def act(run):
            with GRAD_MODES[mode]():
                return run.model(run.batch(number)).detach()

        self.both(act)

    @rule(number=numbers, more=st.booleans())
    def learn(self, number, more):
        more = more and not self.runs[0].handles  # see docs/training.md

        def act(run):
            loss = run.loss(number)
            if more:
                loss = loss + run.loss(number + 1)
            loss.backward()
            return loss.detach()

        self.both(act)

    @precondition(lambda self: self.kind not in self.reading)
    @rule(which=st.integers(0, 6), number=numbers)
    def learn_from_a_part(self, which, number):
        if self.joined:  # a block by itself does not look for what has joined
            self.runs[1].model.to(self.place)

        def act(run):
            output = flatten(parts_of(run.model)[which](run.batch(number)))[0]
            if output.requires_grad:
                output.square().mean().backward()
            return output.detach()

        self.both(act)

    @rule(number=numbers)
    def learn_in_a_thread(self, number):
        def act(run):
            with ThreadPoolExecutor(1) as threads:
                return threads.submit(learn, run, number).result()

        self.both(act)

    @precondition(lambda self: self.kind not in (*self.several, *self.reading))
    @rule(number=numbers)
    def learn_in_a_hook(self, number):
        """Of a graph that is not the model's."""

        def act(run):
            given = []

            def look(_):
                with torch.enable_grad():
                    given.append(learn(run, number))

            other = run.batch(number).requires_grad_() * 2
            other.register_hook(look)
            other.sum().backward()
            return given

        self.both(act)

    @precondition(lambda self: self.kind not in self.several)
    @rule(number=numbers)
    def learn_in_a_forward(self, number):
        """Of the same model, and look at all gradients there."""

        def act(run):
            given = []

            def look(*_):
                handle.remove()
                with torch.enable_grad():
                    given.append(learn(run, number))
                grads = [p.grad for p in run.model.parameters()]
                given.append([None if g is None else g.cpu().clone() for g in grads])

            handle = run.model.register_forward_pre_hook(look)
            return learn(run, number + 1), given

        self.both(act)

    @rule(number=numbers)
    def learn_twice_from_one_graph(self, number):
        def act(run):
            loss = run.loss(number)
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.detach()

        self.both(act)

    @rule(number=numbers)
    def learn_from_the_input(self, number):
        def act(run):
            x = run.batch(number).requires_grad_()
            run.model(x).square().mean().backward()
            return x.grad

        self.both(act)

    @precondition(lambda self: self.held < 2)
    @rule(number=numbers)
    def hold(self, number):
        self.left = self.left and self.held > 0
        self.both(lambda run: run.losses.append(run.loss(number)))
        self.held += 1

    @precondition(lambda self: self.held and not self.left)
    @rule(number=numbers)
    def let_go_together(self, number):
        def act(run):
            loss = sum(run.losses) + run.loss(number)
            loss.backward()
            return loss.detach()

        if not self.runs[0].handles:  # see docs/training.md
            self.both(act)
            self.drop_losses()

    @precondition(lambda self: self.held)
    @rule(first=st.booleans())
    def let_go(self, first):
        def act(run):
            loss = run.losses.pop(0 if first else -1)
            loss.backward()
            return loss.detach()

        self.both(act)
        self.held -= 1

    @rule(which=st.integers(0, 6), number=numbers, backward=st.booleans())
    def fail(self, which, number, backward):
        def stop(*_):
            raise Interrupted

        def stop_later(_module, _inputs, outputs):
            for output in flatten(outputs):
                if output.requires_grad:
                    output.register_hook(stop)

        def act(run):
            hook = stop_later if backward else stop
            handle = parts_of(run.model)[which].register_forward_hook(hook)
            with suppress(Interrupted):
                run.loss(number).backward()
            handle.remove()
            # Autograd's thread may be behind: the next pass begins when it is done.
            run.model(run.batch(number).requires_grad_()).sum().backward()
            run.model.zero_grad()

        for run in self.runs:
            run.model.zero_grad()
        self.both(act)

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 6),
        number=numbers,
        gradients=st.booleans(),
        first=st.booleans(),
    )
    def interrupt(self, which, number, gradients, first):
        """Ctrl-C in a forward runs no hooks; then a graph from before goes back."""

        def stop(*_):
            raise KeyboardInterrupt

        def act(run):
            handle = parts_of(run.model)[which].register_forward_hook(stop)
            with suppress(KeyboardInterrupt), torch.set_grad_enabled(gradients):
                run.loss(number)
            handle.remove()
            loss = run.losses.pop(0 if first else -1)
            loss.backward()
            return loss.detach()

        self.both(act)
        self.held -= 1

    # What is between them

    def drop_losses(self):
        """Weights are about to change: backward could not run any more."""
        self.held = 0
        for run in self.runs:
            run.losses.clear()

    @rule(kind=st.sampled_from(list(OPTIMIZERS)))
    def take_optimizer(self, kind):
        for run in self.runs:
            run.steps = OPTIMIZERS[kind](run.model.parameters())
        self.optimizes = True

    @precondition(lambda self: self.optimizes)
    @rule(clear=st.sampled_from(["no", "to none", "to zero"]))
    def step(self, clear):
        self.drop_losses()
        for run in self.runs:
            run.steps.step()
            if clear != "no":
                run.steps.zero_grad(set_to_none=clear == "to none")

    @rule(to_none=st.booleans())
    def clear(self, to_none):
        for run in self.runs:
            run.model.zero_grad(set_to_none=to_none)

    @rule(which=weights)
    def clear_one(self, which):
        for run in self.runs:
            self.one(run, which).grad = None

    @rule()
    def scale_gradients(self):
        self.of_all(lambda p: None if p.grad is None else p.grad.mul_(0.5))

    @rule(which=weights, way=st.sampled_from(list(EDITS)))
    def edit(self, which, way):
        self.drop_losses()
        self.edits = True
        with torch.no_grad():
            for run in self.runs:
                EDITS[way](self.one(run, which))

    @rule(which=weights, trains=st.booleans())
    def freeze(self, which, trains):
        if self.kind in self.recomputing:  # what is saved for backward changes
            self.drop_losses()
        for run in self.runs:
            self.one(run, which).requires_grad_(trains)

    @rule()
    def load_state(self):
        self.drop_losses()
        for run in self.runs:
            state = run.model.state_dict()
            run.model.load_state_dict({k: v.clone() for k, v in state.items()})

    def can_be_pickled(self):
        return True

    @rule(way=st.sampled_from(list(COPIES)))
    def copy(self, way):
        self.left = True
        way = way if self.can_be_pickled() else "deep"
        plain, mine = (run.model.state_dict() for run in self.runs)
        found = COPIES[way](self.runs[1].model).state_dict()
        assert_bitwise_equal(found, plain, "a copy")
        assert_bitwise_equal(mine, plain, "the original")

    @rule(trains=st.booleans())
    def set_mode(self, trains):
        for run in self.runs:
            run.model.train(trains)

    @precondition(lambda self: self.kind not in self.several)
    @rule(which=weights)
    def hook_gradient(self, which):
        for run in self.runs:
            weight = self.one(run, which)
            if weight.requires_grad:
                run.handles.append(weight.register_hook(lambda grad: grad * 0.5))

    @precondition(lambda self: self.kind not in self.several)
    @rule(which=weights)
    def hook_sum(self, which):
        for run in self.runs:
            weight = self.one(run, which)
            if weight.requires_grad:
                hook = weight.register_post_accumulate_grad_hook
                run.handles.append(hook(_halve_sum))

    @rule()
    def remove_hooks(self):
        for run in self.runs:
            while run.handles:
                run.handles.pop().remove()

    # The streamed one

    @rule(setting=SETTINGS)
    def set_budget(self, setting):
        run, budget = self.runs[1], self.budget(setting)
        run.runtime.place()  # what has joined counts
        with suppress(StagehandOOMError):  # it was cut for a larger one
            run.runtime.set_budget(budget)
            run.budget = budget
            self.most = max(self.most, budget)

    @precondition(lambda self: self.joined < 4)
    @rule(which=st.integers(0, 4), trains=st.booleans())
    def adapt(self, which, trains):
        if self.kind in self.recomputing:  # what is saved for backward changes
            self.drop_losses()
        self.joined += 1
        run = self.runs[1]
        run.budget += JOINING
        run.runtime.set_budget(run.budget)
        self.most = max(self.most, run.budget)
        generator = torch.Generator().manual_seed(which)
        values = torch.randn(WIDTH, WIDTH, generator=generator) / 8
        for run in self.runs:
            block = run.model.blocks[which]
            dtype = next(block.norm.parameters()).dtype
            block.norm = nn.Sequential(block.norm, nn.Linear(WIDTH, WIDTH))
            block.norm[1].weight = nn.Parameter(values.to(dtype, copy=True))
            block.norm[1].bias = None
            block.norm[1].requires_grad_(trains)
        self.runs[0].model.to(self.place)
        self.forget_weights()

    def forget_weights(self):
        """What was made for the weights that there were does not know all of them."""
        self.optimizes = False

    @rule(which=st.integers(0, 2))
    def swap(self, which):
        for run in self.runs:
            blocks = run.model.blocks
            blocks[which], blocks[which + 2] = blocks[which + 2], blocks[which]

    @rule()
    def park(self):
        self.left = True
        self.runs[1].runtime.park()

    @rule(home=st.booleans())
    def move(self, home):
        self.left = self.left or home
        self.runs[1].model.to("cpu" if home else self.place)

    @rule(setting=SETTINGS)
    def stream_anew(self, setting):
        self.drop_losses()
        self.shut_down()
        self.stream(setting)
        self.optimizes = False  # its state lies where parameters have been

    @rule()
    def compare(self):
        plain, mine = self.runs
        for (name, expected), found in zip(
            plain.model.named_parameters(), mine.model.parameters(), strict=True
        ):
            assert_bitwise_equal(found.grad, expected.grad, f"gradient of {name}")
        self.both(lambda run: run.model.state_dict())

    def leave(self):
        """Close what else there is."""

    def teardown(self):
        if not hasattr(self, "runs"):
            return
        try:
            self.compare()
        finally:
            self.drop_losses()
            self.remove_hooks()
            self.shut_down()
        self.compare()
        self.leave()
        self.runs.clear()
        flush()
        torch.accelerator.synchronize()
        held = zip(_held_bytes(), self.held_bytes, strict=True)
        assert all(now <= before for now, before in held)
        assert live_leases() <= self.leases  # gradients that users keep have some
        races = sim_device.races()
        assert [r for r in races if not (self.edits and _EDITED in r)] == []


AnyOrder.TestCase.settings = running(30, 25)
TestAnyOrder = AnyOrder.TestCase
