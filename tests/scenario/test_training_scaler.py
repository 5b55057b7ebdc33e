"""Loss scaling divides gradients by the scale, wherever they lie."""

from copy import deepcopy

import pytest
import torch
from small import LAYER_BYTES, WIDTH, batch, runtime_of, stack
from torch import nn

import stagehand
from equality import all_equal
from stagehand.optim import GradScaler, OffloadedAdamW

FUSED = "_step_supports_amp_scaling"
OPTIMIZERS = {
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "offloaded": OffloadedAdamW,
}


def model_with_rest():
    """Streamed linear layers and a small rest that stays on the device."""
    return nn.Sequential(stack(4), nn.LayerNorm(WIDTH))


def train(model, make, scaler, *, steps=6, worst=None):
    optimizer = make(model.parameters())
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch().to("hpu")).square().sum()
        scaler.scale(loss * (torch.inf if step == worst else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    # A scaler of torch's own would find the optimizer as it was.
    plain = make([nn.Parameter(torch.zeros(1))])
    assert vars(optimizer).get(FUSED) == vars(plain).get(FUSED)
    return [p.detach().cpu().clone() for p in model.parameters()], scales


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_scaled_training_is_that_of_the_resident_model(sim, make):
    model = model_with_rest()
    options = {"init_scale": 1024.0, "growth_interval": 2}
    expected = train(
        deepcopy(model).to("hpu"),
        OPTIMIZERS["loop"],
        GradScaler("hpu", **options),
        worst=3,
    )
    plain = train(
        deepcopy(model).to("hpu"), make, GradScaler("hpu", **options), worst=3
    )
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES + 512)
    streamed = train(model, make, GradScaler("hpu", **options), worst=3)
    assert streamed[1] == plain[1] == expected[1]
    assert streamed[1][3] == streamed[1][2] / 2
    assert all_equal(streamed[0], plain[0])
    runtime_of(model).shutdown()
