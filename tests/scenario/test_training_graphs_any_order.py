"""Whatever a script does to graphs, recomputed and hooked, is done streamed."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_training_any_order import (
    MAKERS,
    RECOMPUTING,
    AnyOrder,
    numbers,
    penalize,
    weights,
)
from torch import nn
from torch.autograd.graph import (
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import stagehand
from exploring import running
from streamed import GRAD_MODES
from training import WIDTH, Net, Run, built

pytestmark = [
    # PyTorch's own, of a module whose inputs need no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    # Where a module that reads weights of others has no room for all of them.
    pytest.mark.filterwarnings("ignore:.* are read by modules that do not"),
]

_recomputed = partial(checkpoint, use_reentrant=False)
_reentered = partial(checkpoint, use_reentrant=True)


def _keep_products(_context, operator, *_args, **_options):
    kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _to_the_end(block, x):
    with set_checkpoint_early_stop(False):
        return _recomputed(block, x)


REGIONS = {
    "plain": lambda block, x: block(x),
    "recomputed": _recomputed,
    "to the end": _to_the_end,
    "selected": partial(
        _recomputed,
        context_fn=partial(create_selective_checkpoint_contexts, _keep_products),
    ),
    "nested": lambda block, x: _recomputed(partial(_recomputed, block), x),
    "reentered": _reentered,
    "nested reentered": lambda block, x: _reentered(partial(_recomputed, block), x),
}


class Regions(Net):
    """Each block in a region of the kind that is the latest to be asked for."""

    region = "plain"

    def around(self, block, x):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return block(x)
        return REGIONS[self.region](block, x)


class Sequences(Net):
    """A region around each two blocks or so."""

    region = "plain"

    def forward(self, x):
        x = self.entry(x)
        if self.region == "plain" or not (x.requires_grad and torch.is_grad_enabled()):
            for block in self.blocks:
                x = block(x)
        else:
            reentrant = "reentered" in self.region
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=reentrant)
        return self.head(x)


class Reading(Regions):
    """Its regions call no module, but read weights of one that nobody calls."""

    region = "recomputed"

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.gate = nn.Linear(WIDTH, WIDTH)

    def around(self, block, x):
        def read(x):
            gate = nn.functional.linear(x.sin(), block.gate.weight, block.gate.bias)
            return x * gate.sigmoid()

        return super().around(read, block(x))


@dataclass(kw_only=True)
class HookedRun(Run):
    """A run with hooks on modules, too."""

    outer: list[Any] = field(default_factory=list)


# Hooks for saved tensors, and hooks on modules


def _halve(tensor):
    return tensor * 0.5 if torch.is_floating_point(tensor) else tensor


SAVED = {
    "on the host": save_on_cpu,
    "cloned": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "cloned late": lambda: saved_tensors_hooks(lambda t: t.detach(), torch.clone),
}


def _halve_all(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, _halve, tree)


def _hook_output(_module, _inputs, output):
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(_halve)


def _scale(module, _inputs, output):
    with torch.no_grad():
        scale = module.weight.detach().square().mean() + 0.5
    return output * scale


HOOKS = {
    "inputs": lambda m: m.register_forward_pre_hook(lambda _, x: _halve_all(x)),
    "outputs": lambda m: m.register_forward_hook(lambda _, x, y: _halve_all(y)),
    "gradients of inputs": lambda m: m.register_full_backward_hook(
        lambda _, inputs, outputs: _halve_all(inputs)
    ),
    "gradients of outputs": lambda m: m.register_full_backward_pre_hook(
        lambda _, outputs: _halve_all(outputs)
    ),
    "on outputs": lambda m: m.register_forward_hook(_hook_output),
    "by weights": lambda m: m.register_forward_hook(_scale),
}


class AnyOrderGraphs(AnyOrder):
    """A script that recomputes, keeps, hooks and differentiates in several ways."""

    kind_of_run = HookedRun
    makers: ClassVar = {
        **MAKERS,
        "regions": built(Regions),
        "sequences": built(Sequences),
        "reading": built(Reading),
    }
    recomputing = (*RECOMPUTING, "regions", "sequences", "reading")
    reading = ("reading",)
    region = "plain"

    @property
    def reenters(self):
        return self.kind == "reentering" or "reentered" in self.region

    # Regions

    def possible(self, region):
        """Return a region of this kind, or another: see docs/training.md."""
        cannot = self.kind in (*self.several, *self.reading)
        return "recomputed" if cannot and "reentered" in region else region

    @precondition(lambda self: self.kind in ("regions", "sequences", "reading"))
    @rule(region=st.sampled_from(list(REGIONS)))
    def recompute(self, region):
        self.drop_losses()
        region = self.possible(region)
        self.region = region
        for run in self.runs:
            run.model.region = region

    @precondition(lambda self: self.kind != "counting")  # it changes its buffers
    @rule(region=st.sampled_from(list(REGIONS)), number=numbers)
    def learn_in_one_region(self, region, number):
        region = self.possible(region)

        def act(run):
            x = run.batch(number).requires_grad_()
            REGIONS[region](run.model, x).square().mean().backward()
            return x.grad

        self.both(act)

    # Hooks

    @rule(way=st.sampled_from(list(SAVED)), number=numbers)
    def learn_from_what_is_kept(self, way, number):
        def act(run):
            with SAVED[way]():
                loss = run.loss(number)
            loss.backward()
            return loss.detach()

        self.both(act)

    @rule(which=weights, way=st.sampled_from(list(HOOKS)))
    def hook_module(self, which, way):
        self.drop_losses()
        for run in self.runs:
            modules, kind = run.model.modules(), nn.Module
            if way == "by weights":
                kind = nn.Linear
            hooked = [
                module
                for module in modules
                if isinstance(module, kind) and not isinstance(module, nn.ModuleList)
            ]
            run.outer.append(HOOKS[way](hooked[which % len(hooked)]))

    def can_be_pickled(self):
        return not self.runs[0].outer

    @rule()
    def unhook_modules(self):
        self.drop_losses()
        for run in self.runs:
            while run.outer:
                run.outer.pop().remove()

    @rule(number=numbers, first=st.booleans())
    def learn_with_a_hook_on_several(self, number, first):
        def act(run):
            given = []
            x = run.batch(number).requires_grad_()
            y = run.model(x)
            mode = "any" if first else "all"
            handle = register_multi_grad_hook((x, y), given.append, mode=mode)
            y.square().mean().backward()
            handle.remove()
            return given

        self.both(act)

    # Gradients

    def some(self, run, which):
        """Return those of some weights that train, each once."""
        chosen = {id(w): w for w in (self.one(run, each) for each in which)}
        return [weight for weight in chosen.values() if weight.requires_grad]

    @rule(
        number=numbers,
        mode=st.sampled_from(list(GRAD_MODES)),
        count=st.integers(2, 4),
    )
    def go_on(self, number, mode, count):
        def act(run):
            x = run.batch(number)
            with GRAD_MODES[mode]():
                for _ in range(count):
                    x = run.model(x)
            return x.detach()

        self.both(act)

    @precondition(lambda self: not self.reenters)
    @rule(number=numbers)
    def differentiate_by_the_input(self, number):
        def act(run):
            x = run.batch(number).requires_grad_()
            return torch.autograd.grad(run.model(x).square().mean(), x)

        self.both(act)

    @precondition(lambda self: not self.reenters)
    @precondition(lambda self: self.kind not in self.several)
    @precondition(lambda self: not self.runs[0].handles)
    @rule(number=numbers, which=st.lists(weights, min_size=1, max_size=4))
    def differentiate(self, number, which):
        def act(run):
            find = torch.autograd.grad if run.runtime is None else stagehand.grad
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            return find(loss, [x, *self.some(run, which)], allow_unused=True)

        self.both(act)

    @precondition(lambda self: not self.reenters)
    @rule(number=numbers, which=st.lists(weights, min_size=1, max_size=8))
    def learn_a_few(self, number, which):
        def act(run):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            few = [x, *self.some(run, which)]
            edges = few
            if run.runtime is not None:
                edges = stagehand.gradient_edges(loss, few)
            loss.backward(inputs=edges)
            return [weight.grad.cpu() for weight in few]

        self.both(act)

    @precondition(lambda self: self.kind not in self.several)
    @precondition(lambda self: not self.reenters)
    @precondition(lambda self: not self.runs[0].handles)
    @rule(number=numbers)
    def learn_from_a_penalty(self, number):
        self.both(lambda run: penalize(run, number))

    def leave(self):
        self.unhook_modules()


AnyOrderGraphs.TestCase.settings = running(9, 25)
TestAnyOrderGraphs = AnyOrderGraphs.TestCase
