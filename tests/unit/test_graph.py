"""Saved tensors: weights become handles, all else is kept as it is."""

from copy import deepcopy

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import stagehand
from scenario.small import LAYER_BYTES, batch, runtime_of, stack
from stagehand.graph import SavedTensors


def never(block):
    raise AssertionError(f"{block} was fetched")


@pytest.mark.parametrize("kind", ["strided", "sparse", "wrapped"])
def test_tensors_that_lie_in_no_slot_are_kept_whatever_they_are(kind):
    eye = torch.eye(4)
    kinds = {
        "strided": lambda: eye.clone(),
        "sparse": eye.to_sparse,
        "wrapped": lambda: TwoTensor(eye, eye.clone()),
    }
    given = kinds[kind]().requires_grad_()
    with SavedTensors({}, {}, never).hooks():
        squares = given * given
    squares.sum().backward()
    found = given.grad.a if kind == "wrapped" else given.grad.to_dense()
    assert torch.equal(found, 2 * eye)


def test_frozen_weights_are_fetched_again_in_backward_and_hold_no_slot(sim):
    model = stack().requires_grad_(False)
    plain = deepcopy(model).to("hpu")
    gradients = []
    for each in (plain, stagehand.layer(model, vram_budget=2 * LAYER_BYTES)):
        x = batch().to("hpu").requires_grad_()
        each(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


def test_weight_changed_between_forward_and_backward_raises_as_autograd_does(sim):
    model = stack().requires_grad_(False)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    output = model(batch().to("hpu").requires_grad_())
    with torch.no_grad():
        model[2][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    del output
    runtime_of(model).shutdown()
