"""Text generation with a key-value cache is exact while the model streams."""

from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from architectures import (
    GENERATORS,
    Architecture,
    assert_bitwise_equal,
    flatten,
    to_device,
)
from streamed import Shape, original, resident, smallest_budget, stream, weight_bytes


def generate(generator: Architecture, model: nn.Module, device: str) -> Any:
    """Write eight tokens from a prompt on a device; return them, logits and cache."""
    return generator.call(model, to_device(generator.inputs(), device))


@pytest.mark.parametrize("prompt", ["prompt_on_device", "prompt_on_cpu"])
@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("generator", GENERATORS, ids=str)
def test_tokens_logits_and_cache_are_bitwise_those_of_the_resident_model(
    generator: Architecture, mode: str, device: str, prompt: str, sim: ModuleType
) -> None:
    expected = resident(generator, device, sim).outputs["no_grad"]
    least = smallest_budget(generator, mode, device)
    room = weight_bytes(original(generator)) - least
    for budget in (least, least + room // 2):
        model = deepcopy(original(generator))
        before, held = Shape.of(model), sim.allocated_bytes()
        runtime = stream(model, generator, mode, device, budget)
        for number in range(2):
            written = flatten(
                generate(
                    generator, model, "cpu" if prompt == "prompt_on_cpu" else device
                )
            )
            assert_bitwise_equal(written, expected, f"generate() number {number}")
            assert sim.races() == []
            del written
        report = runtime.report()
        assert report.peak_device_bytes <= budget
        assert report.abandoned_slots == 0
        assert report.passes >= 2 * 8
        runtime.shutdown()
        assert Shape.of(model) == before
        weights = original(generator).state_dict()
        assert_bitwise_equal(model.state_dict(), weights, "state_dict()")
        assert sim.allocated_bytes() == held
