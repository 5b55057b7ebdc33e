"""Models that were built inside `torch.inference_mode()` stream in every mode."""

import pytest
import torch
from safetensors.torch import save_file
from small import batch, run_resident, runtime_of, stack

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
