"""Models that were built inside `torch.inference_mode()` stream in every mode."""

import pytest
import torch
from safetensors.torch import save_file
from small import WIDTH, batch, run_resident, runtime_of, stack
from torch import nn

import stagehand
from architectures import assert_bitwise_equal


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_parameters_made_in_inference_mode_stream_in_every_mode(
    sim, place, mode, tmp_path
):
    with torch.inference_mode():
        model = stack()
    save_file(
        {k: v.clone() for k, v in model.state_dict().items()},
        tmp_path / "a.safetensors",
    )
    expected = run_resident(model, place, batch())
    stagehand.layer(model, vram_budget=20_000, device=place)
    runtime = runtime_of(model)
    with mode():
        for _ in range(3):
            assert_bitwise_equal(model(batch()), expected, "from memory")
        runtime.convert_registry_to_file_backed_sharded(tmp_path)
        for _ in range(3):
            assert_bitwise_equal(model(batch()), expected, "from files")
    runtime.shutdown()
    assert all(parameter.is_inference() for parameter in model.parameters())


class Counting(nn.Module):
    """Makes its buffer anew while it is not trained, and else adds to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        if torch.is_grad_enabled():
            self.seen += 1
        else:
            self.seen = self.seen + 1
        return x * self.seen


@pytest.mark.parametrize("origin", ["cpu", "hpu"])
def test_a_model_that_is_shut_down_in_inference_mode_can_be_trained(sim, origin):
    """What moves back then is no inference tensor: weights, buffers, what joined."""

    def built():
        torch.manual_seed(0)
        return nn.Sequential(stack(3), Counting(), stack(2)).to(origin)

    model, plain = built(), built()
    stagehand.layer(model, vram_budget=20_000, device="hpu")
    for one in (model, plain):
        torch.manual_seed(1)
        one.append(nn.Linear(WIDTH, 4).to(origin))
    with torch.no_grad():
        model(batch())
        plain(batch().to(origin))
    with torch.inference_mode():
        runtime_of(model).shutdown()
    for one in (model, plain):
        one(batch().to(origin)).square().sum().backward()
    assert_bitwise_equal(model.state_dict(), plain.state_dict(), "state")
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bitwise_equal(mine.grad, theirs.grad, "gradient")
