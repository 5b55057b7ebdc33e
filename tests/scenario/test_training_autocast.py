"""Under autocast neither its cache nor the graph keeps casts of streamed weights."""

from copy import deepcopy

import pytest
import torch
from small import LAYER_BYTES, batch, runtime_of, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand

WEIGHTS = 12 * 32 * 33  # elements of `stack(12)`


def half_step(model):
    """One forward and backward in bf16; return the gradients."""
    model.zero_grad()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss = model(batch(2, 32).to("hpu")).float().sum()
    loss.backward()
    return [p.grad.cpu().clone() for p in model.parameters()]


def gradients(model, steps=3):
    return [half_step(model) for _ in range(steps)]


def assert_equal_gradients(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "read only"])
def test_casts_of_streamed_weights_are_held_by_nobody(sim, trained):
    model = stack(12)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")
    held = sim.allocated_bytes()
    with torch.set_grad_enabled(trained), torch.autocast("hpu", dtype=torch.bfloat16):
        output = model(x)
        grown = sim.allocated_bytes() - held - 2 * LAYER_BYTES
        assert grown < WEIGHTS * 2 // 3, "of the bytes of all casts"
    del output
    runtime_of(model).shutdown()


class Recomputed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.layers = stack(12)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_casts_of_weights_that_are_recomputed_are_held_by_nobody_either(sim, reentrant):
    """A recompute is no second use: the block's casts were cached from then on."""
    model = Recomputed(reentrant=reentrant)
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    held = sim.allocated_bytes()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        output = model(batch(2, 32).to("hpu"))
        grown = sim.allocated_bytes() - held - 2 * LAYER_BYTES
        assert grown < WEIGHTS * 2 // 3, "of the bytes of all casts"
    del output
    runtime_of(model).shutdown()


def test_gradients_under_autocast_are_those_of_the_resident_model(sim):
    model = stack(12)
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


def test_weight_changed_after_it_was_cast_raises_in_backward(sim):
    model = stack(4)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss = model(batch(2, 32).to("hpu").requires_grad_()).float().sum()
    with torch.no_grad():
        model[2][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    runtime_of(model).shutdown()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stack(4)

    def forward(self, x):
        return self.layers(self.layers(x))


def test_weights_used_twice_keep_their_casts_from_the_second_pass_on(sim):
    model = Twice()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="used again in a pass"):
        half_step(model)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


class UpDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.down(self.up(x))


def test_layers_that_are_one_block_are_not_taken_for_one_that_is_used_again(sim):
    """Its second layer began, and the block was known already."""
    model = nn.Sequential(*(UpDown() for _ in range(20)))
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=34 * LAYER_BYTES)
    assert len(runtime_of(model).block_ids) <= 20
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


class Tied(nn.Module):
    """Two modules of one weight, in one block."""

    def __init__(self):
        super().__init__()
        self.layers = stack(4)
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, x):
        return self.layers(x)


def test_a_weight_that_two_modules_read_is_used_again(sim):
    model = Tied()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="used again in a pass"):
        half_step(model)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("wanted", [True, False])
def test_cache_is_after_a_pass_as_it_was_before(sim, wanted):
    model = Twice()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=wanted):
        with torch.no_grad():
            model(batch(2, 32).to("hpu"))
        assert torch.is_autocast_cache_enabled() is wanted
    runtime_of(model).shutdown()
