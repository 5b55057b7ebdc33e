"""Text generation with a key-value cache is exact while the model streams."""

from copy import deepcopy
from types import ModuleType

import pytest

from architectures import (
    GENERATORS,
    Architecture,
    assert_bitwise_equal,
    flatten,
    to_device,
)
from architectures.generators import NEW_TOKENS
from streamed import Shape, original, resident, smallest_budget, stream, weight_bytes


# It compares the prompt's device with that of the first parameter, which may be away.
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
@pytest.mark.parametrize("prompt", ["on_device", "on_cpu"], ids="prompt_{}".format)
@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("generator", GENERATORS, ids=str)
def test_tokens_logits_and_cache_are_bitwise_those_of_the_resident_model(
    generator: Architecture, mode: str, device: str, prompt: str, sim: ModuleType
) -> None:
    expected = resident(generator, device, sim).outputs["no_grad"]
    least = smallest_budget(generator, mode, device)
    room = weight_bytes(original(generator)) - least
    inputs = generator.inputs()
    if prompt == "on_device":
        inputs = to_device(inputs, device)
    for budget in (least, least + room // 2):
        model = deepcopy(original(generator))
        before = Shape.of(model)
        runtime = stream(model, generator, mode, device, budget)
        for number in range(2):
            written = flatten(generator.call(model, inputs))
            assert_bitwise_equal(written, expected, f"generate() number {number}")
            assert sim.races() == []
            del written
        report = runtime.report()
        assert report.peak_device_bytes <= budget
        assert report.abandoned_slots == 0
        assert report.passes >= 2 * NEW_TOKENS
        runtime.shutdown()
        assert Shape.of(model) == before
        weights = original(generator).state_dict()
        assert_bitwise_equal(model.state_dict(), weights, "state_dict()")
