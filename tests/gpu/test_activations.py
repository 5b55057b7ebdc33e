"""Saved tensors leave and return beside compute, and the host never waits."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures import assert_bitwise_equal
from gpu.models import DEPTH, Block, batch, resident, stack
from stagehand import ActivationRuntime, ActivationStagehandConfig


def saved_bytes(place):
    """What one tensor as wide as the model takes; a block saves about eleven."""
    return place.tokens * place.width * 4


def blocks_bytes(place, count):
    return int(count * 11 * saved_bytes(place))


def losses(model, x):
    return (model(x).float() - x.float().roll(1, 0)).square().mean()


def step(model, x, context=None):
    model.zero_grad()
    if context is None:
        loss = losses(model, x)
    else:
        with context:
            loss = losses(model, x)
    loss.backward()
    return loss.detach()


def found(model, x, context=None):
    x = x.clone().requires_grad_()
    loss = step(model, x, context)
    return [loss, x.grad, *(p.grad for p in model.parameters())]


def test_gradients_are_those_without_a_budget(place):
    model, x = resident(stack(place), place), batch(place)
    expected = [t.clone() for t in found(model, x)]
    saved = stagehand.activations(blocks_bytes(place, 4))
    for number in range(4):
        for one, other in zip(found(model, x, saved), expected, strict=True):
            assert_bitwise_equal(one, other, f"step {number}")
    assert saved._parts.spill.tally.spilled_count > 0
    model.zero_grad()
    saved.close()


def test_settled_steps_make_no_host_memory_and_no_wait(place):
    model, x = resident(stack(place), place), batch(place)
    saved = stagehand.activations(blocks_bytes(place, 4))
    for _ in range(4):
        step(model, x, saved)
        place.synchronize()
    sent = saved._parts.spill.tally.spilled_bytes
    for _ in range(3):
        calls = place.forbidden_calls(lambda: step(model, x, saved))
        if not calls:  # torch may still lack memory: when copies end varies
            break
    assert calls == []
    assert saved._parts.spill.tally.spilled_bytes > sent
    place.synchronize()
    model.zero_grad()
    saved.close()


def test_host_may_run_far_ahead_of_the_device(place):
    model, x = resident(stack(place), place), batch(place)
    expected = step(model, x)
    saved = stagehand.activations(blocks_bytes(place, 4))
    for _ in range(3):
        step(model, x, saved)
    place.synchronize()
    with place.late():
        loss = step(model, x, saved)
        place.synchronize()
    assert_bitwise_equal(loss, expected, "loss")
    model.zero_grad()
    saved.close()


def test_peak_falls_by_nearly_what_leaves(place):
    model, x = resident(stack(place), place), batch(place)
    step(model, x)
    alone = place.peak_bytes(lambda: step(model, x))
    saved = stagehand.activations(blocks_bytes(place, 5))
    for _ in range(3):
        step(model, x, saved)
        place.synchronize()
    prefix = saved._parts.spill.lessons.latest.prefix
    peak = place.peak_bytes(lambda: step(model, x, saved))
    assert prefix.nbytes > 3 * 11 * saved_bytes(place)
    # Less than all: gradients come while what was away is on its way back.
    assert peak <= alone - 0.4 * prefix.nbytes
    model.zero_grad()
    saved.close()


def test_copies_run_beside_compute(place, record_property):
    """Where the link is fast enough, all but little of their time."""
    model, x = resident(stack(place), place), batch(place)
    alone = place.seconds(lambda: step(model, x), rounds=5)
    saved = stagehand.activations(blocks_bytes(place, 7))
    for _ in range(4):
        step(model, x, saved)
        place.synchronize()
    tally = saved._parts.spill.tally
    tally.reset()
    spilled = place.seconds(lambda: step(model, x, saved), rounds=5)
    nbytes = (tally.spilled_bytes + tally.restored_bytes) / 5
    copying = nbytes / place.link_rate(blocks_bytes(place, 1))
    hidden = 1 - max(0.0, spilled - alone) / copying
    record_property("overlap", hidden)
    record_property("step over resident", spilled / alone)
    assert nbytes > 0
    rho = copying / alone
    if rho < 0.8:
        assert hidden >= 0.95
    model.zero_grad()
    saved.close()


def test_experiment_of_the_first_release(place, record_property):
    """Half a hundred blocks under frozen weights: 2.5 GB less for 1 % of time."""
    real = place.name == "cuda"
    width, tokens, depth = (
        (4096, 4096, 48) if real else (place.width, place.tokens, DEPTH)
    )
    dtype = torch.bfloat16 if real else torch.float32
    less = 2_500_000_000 if real else blocks_bytes(place, 1)
    block = Block(width).to(dtype).requires_grad_(False)
    model = nn.Sequential(*(deepcopy(block).to(place.name) for _ in range(depth)))
    x = torch.linspace(-1, 1, tokens * width, dtype=dtype).reshape(tokens, width)
    x = x.to(place.name).requires_grad_()
    step(model, x)
    alone = place.peak_bytes(lambda: step(model, x))
    seconds = place.seconds(lambda: step(model, x), rounds=5)
    saved = stagehand.activations("80GB")
    step(model, x, saved)
    saved._parts.spill.budget_bytes = saved._parts.spill.peak_bytes - int(1.1 * less)
    for _ in range(4):
        step(model, x, saved)
        place.synchronize()
    assert saved._parts.spill.lessons.latest.prefix.nbytes >= less
    peak = place.peak_bytes(lambda: step(model, x, saved))
    spilled = place.seconds(lambda: step(model, x, saved), rounds=5)
    theirs = place.peak_bytes(lambda: step(model, x, save_on_cpu(pin_memory=True)))
    copied = place.seconds(
        lambda: step(model, x, save_on_cpu(pin_memory=True)), rounds=3
    )
    record_property("peak bytes less", alone - peak)
    record_property("step over resident", spilled / seconds)
    record_property("save_on_cpu: peak bytes less", alone - theirs)
    record_property("save_on_cpu: step over resident", copied / seconds)
    assert alone - peak >= less
    # A real clock goes up and down by as much, whoever runs.
    assert spilled <= (1.01 if place.exact_time else 1.03) * seconds
    assert spilled < copied
    x.grad = None
    saved.close()


def test_checkpointed_step_under_a_runtime_beside_save_on_cpu(place, record_property):
    """Inputs of blocks leave: the same losses, and a record of each step."""
    stacked, x = resident(stack(place), place), batch(place)

    class Checkpointed(nn.Module):
        def forward(self, x):
            for block in stacked.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed()
    expected = step(stacked, x)
    config = ActivationStagehandConfig(budget=4 * saved_bytes(place))
    runtime = ActivationRuntime(config)

    def managed():
        runtime.step_begin()
        loss = step(model, x, runtime.managed_forward())
        return loss, runtime.step_end()

    for _ in range(4):
        loss, record = managed()
        place.synchronize()
        assert_bitwise_equal(loss, expected, "loss")
    assert record.activations_spilled >= 4
    assert record.pool_hit_rate == 1.0
    assert record.freed_bytes >= 0.95 * record.spill_bytes
    mine = place.seconds(managed, rounds=5)
    theirs = place.seconds(
        lambda: step(model, x, save_on_cpu(pin_memory=True)), rounds=5
    )
    record_property("step over save_on_cpu", mine / theirs)
    stacked.zero_grad()
    runtime.shutdown()


@pytest.mark.parametrize("checks", [True])
def test_checksums_hold(place, checks):
    model, x = resident(stack(place), place), batch(place)
    config = ActivationStagehandConfig(
        budget=blocks_bytes(place, 4), debug_checksums=checks
    )
    runtime = ActivationRuntime(config)
    for _ in range(2):
        with runtime.managed_forward():
            loss = losses(model, x)
        loss.backward()
    assert torch.isfinite(loss)
    del loss
    model.zero_grad()
    runtime.shutdown()
