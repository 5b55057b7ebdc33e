"""Streamed models give bit for bit what resident ones give."""

import warnings
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

import streamed as S
from architectures import ARCHITECTURES, assert_bitwise_equal, to_device
from architectures.base import transformers_model
from gpu.models import batch, block_bytes, passes, resident, stack, streamed

NAMES = ("llama", "mixtral", "mamba", "t5", "whisper", "vit", "unet_2d", "flux", "wan")
REAL = [a for a in ARCHITECTURES if a.name in NAMES]


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("architecture", REAL, ids=str)
def test_real_models_are_exact_in_half_of_their_bytes(place, architecture, mode):
    model = deepcopy(S.original(architecture))
    inputs = to_device(architecture.inputs(), place.name)
    smallest = S.smallest_budget(architecture, mode, place.name)
    budget = max(smallest, S.weight_bytes(model) // 2)
    with torch.no_grad():
        expected = architecture.call(resident(model, place), inputs)
        runtime = S.stream(model, architecture, mode, place.name, budget)
        for number in range(4):
            found = architecture.call(model, inputs)
            assert_bitwise_equal(found, expected, f"pass {number}")
    runtime.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("blocks", [2, 5])
def test_larger_random_models_are_exact(place, mode, dtype, blocks):
    model, x = stack(place, dtype), batch(place, dtype)
    expected = passes(resident(model, place), x)()
    runtime = streamed(model, mode, blocks * block_bytes(model), place)
    for number in range(6):
        assert_bitwise_equal(passes(model, x)(), expected, f"pass {number}")
    assert runtime.report().streamed_bytes > 0
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_weights_from_files_are_exact(place, mode, tmp_path):
    model, x = stack(place), batch(place)
    expected = passes(resident(model, place), x)()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    runtime = streamed(model, mode, 3 * block_bytes(model), place)
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    for number in range(4):
        assert_bitwise_equal(passes(model, x)(), expected, f"pass {number}")
    assert runtime.report().disk_bytes > 0
    runtime.shutdown()


@contextmanager
def filled_memory():
    """Let new memory begin as what is no number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what has no deterministic way
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_rows_of_experts_that_were_not_chosen_may_be_anything(place, how):
    """Memory begins as what is no number; only a few rows of a layer are brought."""
    build = transformers_model(
        "Qwen3MoeForCausalLM",
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=2,
    )
    model = build().bfloat16()
    model.set_experts_implementation(how)
    inputs = [torch.tensor([[number]], device=place.name) for number in range(4)]
    whole = resident(model, place)
    with torch.no_grad():
        expected = [whole(each).logits for each in inputs]
        del whole
        runtime = streamed(model, "layers", S.weight_bytes(model) // 3, place)
        with filled_memory():
            model(inputs[0])  # slots have memory from their first load on
        for each, logits in zip(inputs, expected, strict=True):
            assert_bitwise_equal(model(each).logits, logits, f"token {each.item()}")
    assert any(block.runs_nbytes for block in runtime._parts.streamed)
    runtime.shutdown()
