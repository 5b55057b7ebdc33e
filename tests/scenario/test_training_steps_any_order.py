"""Whatever steps, clips and averages weights, in any order, does the same streamed."""

import random
from copy import deepcopy
from functools import partial

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_training_any_order import LR, SETTINGS, AnyOrder, learn, numbers, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from exploring import running
from stagehand.optim import OffloadedAdamW
from stepping import states_of, step_in_backward

STEPPED = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.5, foreach=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=LR, fused=True),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=LR, momentum=0.5, nesterov=True, weight_decay=0.1, maximize=True
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=LR / 64, amsgrad=True),
    "adam fused": lambda params: torch.optim.AdamW(params, lr=LR / 64, fused=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=LR / 64),
    "rms": lambda params: torch.optim.RMSprop(params, lr=LR / 64, centered=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=LR / 64),
}
IN_BACKWARD = {
    name: STEPPED[name] for name in ("sgd", "sgd fused", "adam", "adam fused")
}
AVERAGES = {
    "mean": {},
    "decaying": {"avg_fn": get_ema_avg_fn(0.5)},
    "decaying at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
}


def _swap_by_state(model, average):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average.state_dict())
    return lambda: model.load_state_dict(before)


def _swap_unseen(model, average, differing):
    """Behind the counters of weights that train, as `EMAModel` of diffusers does."""
    weights = list(model.parameters())
    before = [weight.detach().clone() for weight in weights]

    def swap(values):
        with torch.no_grad():
            for weight, value in zip(weights, values, strict=True):
                place = weight.data if weight.requires_grad else weight
                place.view(-1)[differing].copy_(value.view(-1)[differing])

    swap(average.parameters())
    return lambda: swap(before)


SWAPS = {
    "by state": _swap_by_state,
    "unseen": partial(_swap_unseen, differing=slice(None)),
    "unseen, in part": partial(_swap_unseen, differing=slice(-1, None)),
}


def _of_each_weight(model):
    return [[parameter] for parameter in model.parameters()]


def _of_each_module(model):
    return [list(module.parameters(recurse=False)) for module in model.modules()]


class AnyOrderSteps(AnyOrder):
    """A script with several optimizers, averages of weights, and what belongs to it."""

    def __init__(self):
        super().__init__()
        self.averages = False

    # Optimizers

    @rule(kind=st.sampled_from(list(STEPPED)))
    def take_another_optimizer(self, kind):
        for run in self.runs:
            run.steps = STEPPED[kind](run.model.parameters())
        self.optimizes = True

    @rule(amsgrad=st.booleans())
    def take_offloaded_optimizer(self, amsgrad):
        settings = {"lr": LR / 64, "amsgrad": amsgrad}
        plain, mine = (run.model.parameters() for run in self.runs)
        self.runs[0].steps = torch.optim.AdamW(plain, fused=True, **settings)
        self.runs[1].steps = OffloadedAdamW(mine, **settings)
        self.optimizes = True

    @rule(number=numbers, count=st.integers(1, 3))
    def learn_overlapped(self, number, count):
        self.drop_losses()

        def act(run):
            run.model.zero_grad()
            parameters = run.model.parameters()
            if run.runtime is None:
                optimizer = torch.optim.AdamW(parameters, lr=LR / 64, fused=True)
            else:
                optimizer = OffloadedAdamW(parameters, lr=LR / 64, overlap=run.model)
            for each in range(count):
                run.loss(number + each).backward()
                optimizer.step()
                optimizer.zero_grad()
            return states_of(optimizer)

        self.both(act)

    @rule(
        kind=st.sampled_from(list(IN_BACKWARD)),
        by_module=st.booleans(),
        number=numbers,
        count=st.integers(1, 3),
    )
    def learn_stepping_in_backward(self, kind, by_module, number, count):
        self.drop_losses()
        by_module = by_module and self.kind not in self.several

        def act(run):
            groups = (_of_each_module if by_module else _of_each_weight)(run.model)
            handles = step_in_backward(IN_BACKWARD[kind], groups)
            losses = []
            for each in range(count):
                losses.append(run.loss(number + each))
                losses[-1].backward()
            for handle in handles:
                handle.remove()
            return [loss.detach() for loss in losses]

        self.both(act)

    @precondition(lambda self: self.optimizes)
    @rule()
    def load_states(self):
        for run in self.runs:
            run.steps.load_state_dict(deepcopy(run.steps.state_dict()))

    @precondition(lambda self: self.optimizes)
    @rule()
    def compare_states(self):
        self.both(lambda run: states_of(run.steps))

    @rule(setting=SETTINGS)
    def stream_anew_and_go_on(self, setting):
        before, self.held = self.optimizes, 0
        self.stream_anew(setting)
        if before:  # see docs/training.md
            steps = self.runs[1].steps
            steps.load_state_dict(steps.state_dict())
            self.optimizes = True

    # Gradients

    @rule(most=st.sampled_from([0.001, 0.1]), foreach=st.sampled_from([None, False]))
    def clip_values(self, most, foreach):
        for run in self.runs:
            parameters = [p for p in run.model.parameters() if p.grad is not None]
            if parameters:  # PyTorch refuses an empty list
                nn.utils.clip_grad_value_(parameters, most, foreach=foreach)

    @rule(which=weights, foreach=st.sampled_from([None, False]))
    def clip_one_norm(self, which, foreach):
        """Of several on both sides, norms are added in another order."""
        for run in self.runs:
            nn.utils.clip_grad_norm_(self.one(run, which), 0.01, foreach=foreach)

    @precondition(lambda self: self.place == "cpu")
    @rule(foreach=st.sampled_from([None, False]))
    def clip_norm(self, foreach):
        def act(run):
            parameters = run.model.parameters()
            return nn.utils.clip_grad_norm_(parameters, 0.01, foreach=foreach)

        self.both(act)

    @rule(number=st.integers(0, 1000))
    def assign_gradients(self, number):
        for run in self.runs:
            generator = torch.Generator().manual_seed(number)
            chance = random.Random(number)
            for parameter in run.model.parameters():
                grad = torch.randn(parameter.shape, generator=generator)
                if parameter.requires_grad and chance.random() < 0.5:
                    parameter.grad = grad.to(parameter.dtype).to(parameter.device)

    # Averages

    @rule(way=st.sampled_from(list(AVERAGES)), buffers=st.booleans())
    def average(self, way, buffers):
        for run in self.runs:
            options = {**AVERAGES[way], "use_buffers": buffers}
            run.average = AveragedModel(run.model, **options)
        self.averages = True

    @precondition(lambda self: self.averages)
    @rule()
    def average_again(self):
        def act(run):
            run.average.update_parameters(run.model)
            return run.average.state_dict()

        self.both(act)

    @rule(number=numbers, way=st.sampled_from(list(SWAPS)))
    def look_with_averages(self, number, way):
        """Before, with, and after them, in training: see docs/training.md."""
        if not self.averages:
            self.average("mean", buffers=False)
        self.drop_losses()

        def act(run):
            learn(run, number)
            with torch.no_grad():
                outputs = [run.model(run.batch(number))]
                swap_back = SWAPS[way](run.model, run.average.module)
                outputs.append(run.model(run.batch(number)))
                swap_back()
                outputs.append(run.model(run.batch(number)))
            return outputs

        self.both(act)

    def forget_weights(self):
        super().forget_weights()
        self.averages = False

    @rule()
    def look_at_a_vector(self):
        self.left = True

        def act(run):
            if run.runtime is not None:
                run.runtime.park()
            return nn.utils.parameters_to_vector(run.model.parameters()).detach()

        self.both(act)


AnyOrderSteps.TestCase.settings = running(9, 25)
TestAnyOrderSteps = AnyOrderSteps.TestCase
