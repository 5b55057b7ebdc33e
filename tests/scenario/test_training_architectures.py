"""Real models train exactly and within any budget, with and without checkpointing.

What is compared is all that training makes: the gradient of every parameter at each
step, and the parameters after the last.
"""

import functools
import random
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType

import numpy
import pytest
import torch
import transformers
from torch import nn

from architectures import (
    ARCHITECTURES,
    Architecture,
    assert_bitwise_equal,
    flatten,
    to_device,
)
from streamed import original, smallest_budget, stream, weight_bytes

STEPS = 2
PLACE = "hpu"


# One keeps a view of a weight over other uses; its slot's memory is its own then.
VIEWS_KEPT = {"sam"}
# Its blocks share what is made outside of them: that fails without streaming, too.
NOT_REENTRANT = {"deberta_v2"}


def offers_checkpointing(architecture: Architecture, kind: str) -> bool:
    """Whether a model can recompute its blocks in backward."""
    if kind == "reentrant" and architecture.name in NOT_REENTRANT:
        return False
    model = original(architecture)
    names = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")
    return any(getattr(model, name, False) for name in names)


def enable_checkpointing(model: nn.Module, kind: str) -> None:
    """Let a model recompute its blocks in backward."""
    if kind == "none":
        return
    reentrant = kind == "reentrant"
    if isinstance(model, transformers.PreTrainedModel):
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(model, new if hasattr(model, new) else old)
        enable({"use_reentrant": reentrant})
    else:
        function = torch.utils.checkpoint.checkpoint
        model.enable_gradient_checkpointing(
            functools.partial(function, use_reentrant=reentrant)
        )
    model.train()  # in eval mode nothing is recomputed


@dataclass(frozen=True)
class Trace:
    """What a training run made, on the host."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor | None]]
    parameters: dict[str, torch.Tensor]
    other_bytes: int
    """The most that the device held besides weights."""


def train(
    model: nn.Module, architecture: Architecture, sim: ModuleType, weights: int
) -> Trace:
    """Run some steps of AdamW on one batch."""
    inputs = to_device(architecture.inputs(), PLACE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], []
    sim.reset_peak()
    for step in range(STEPS):
        torch.manual_seed(step)
        random.seed(step)
        numpy.random.seed(step)
        outputs = [
            out
            for out in flatten(architecture.call(model, inputs))
            if out.requires_grad
        ]
        loss = sum(out.float().square().mean() for out in outputs)
        del outputs
        loss.backward()
        losses.append(loss.detach().cpu())
        gradients.append(
            {
                name: None if p.grad is None else p.grad.detach().cpu().clone()
                for name, p in model.named_parameters()
            }
        )
        del loss
        optimizer.step()
        optimizer.zero_grad()
    peak = sim.peak_bytes()
    parameters = {
        name: p.detach().cpu().clone() for name, p in model.named_parameters()
    }
    return Trace(losses, gradients, parameters, peak - weights)


@functools.cache
def resident(architecture: Architecture, kind: str, sim: ModuleType) -> Trace:
    """Train a model whose weights are all on the device."""
    model = deepcopy(original(architecture))
    enable_checkpointing(model, kind)
    model.to(PLACE)
    return train(model, architecture, sim, weight_bytes(model))


def assert_same_training(found: Trace, expected: Trace) -> None:
    assert_bitwise_equal(found.losses, expected.losses, "losses")
    for step, (mine, theirs) in enumerate(
        zip(found.gradients, expected.gradients, strict=True)
    ):
        missing = {name for name in theirs if theirs[name] is None}
        assert {name for name in mine if mine[name] is None} == missing
        for name in theirs.keys() - missing:
            assert_bitwise_equal(
                mine[name], theirs[name], f"gradient of {name} in step {step}"
            )
    assert_bitwise_equal(found.parameters, expected.parameters, "parameters")


# Every model in both modes; one way of checkpointing in each, the other way round in
# every second model.
CASES = [
    pytest.param(architecture, mode, kind, id=f"{architecture}-{mode}-{kind}")
    for number, architecture in enumerate(ARCHITECTURES)
    for place, mode in enumerate(("layers", "blocks"))
    for kind in ("none", ("reentrant", "not_reentrant")[(number + place) % 2])
    if kind == "none" or offers_checkpointing(architecture, kind)
]


@pytest.mark.filterwarnings("ignore:.*every call is watched:stagehand.StagehandWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(("architecture", "mode", "kind"), CASES)
def test_model_trains_exactly_within_its_budget(
    architecture: Architecture, mode: str, kind: str, sim: ModuleType
) -> None:
    expected = resident(architecture, kind, sim)
    model = deepcopy(original(architecture))
    enable_checkpointing(model, kind)
    least = smallest_budget(architecture, mode, PLACE)
    budget = least + (weight_bytes(model) - least) // 4
    runtime = stream(model, architecture, mode, PLACE, budget)
    found = train(model, architecture, sim, budget)
    report = runtime.report()
    assert_same_training(found, expected)
    assert report.peak_device_bytes <= budget
    if architecture.name not in VIEWS_KEPT:
        assert report.abandoned_slots == 0
        assert found.other_bytes <= expected.other_bytes
    assert sim.races() == []
    runtime.shutdown()
