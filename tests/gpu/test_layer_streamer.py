"""`LayerStreamer` on a real device: exact, within its depths, whole after a failure."""

import pytest
import torch

from architectures import assert_bitwise_equal
from layered import LAYER_BYTES, inputs, layer_fn, make_weights, passes, resident, save
from stagehand import LayerStreamer
from stagehand.stores.converting import convert_to_packed

DEPTHS = {
    "straight": {"n_gpu": 2, "n_cpu_pinned": 2},
    "nothing ahead": {"n_gpu": 0, "n_cpu_pinned": 1},
    "all stages, batches": {
        "n_gpu": 2,
        "n_cpu_pinned": 2,
        "n_cpu": 2,
        "batch_gpu": 2,
        "batch_cpu_pinned": 3,
        "batch_cpu": 2,
    },
    "ordinary memory": {"n_gpu": 1, "n_cpu_pinned": None, "n_cpu": 2},
}
# torch's allocator may hand out up to this much more than was asked for.
ROUNDING = 512


@pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS.keys())
def test_passes_are_exact_within_the_depths_and_after_a_failure(
    place, tmp_path, depths
):
    weights = make_weights()
    expected = resident(weights, inputs(place.name)).cpu()
    place.synchronize()
    held = place.allocated_bytes()
    folder = save(tmp_path, weights)
    with LayerStreamer.from_pretrained(folder, device=place.name, **depths) as streamer:
        for _ in range(3):
            for number, found in enumerate(passes(streamer, place.name, 5)):
                assert_bitwise_equal(found, expected, f"pass {number}")
            slots = depths["n_gpu"] + 1
            assert place.allocated_bytes() - held <= slots * (LAYER_BYTES + ROUNDING)
            for error in (ValueError, KeyboardInterrupt):
                with pytest.raises(error), torch.no_grad():
                    streamer.run_pass(inputs(place.name), failing(error))
    assert place.allocated_bytes() == held


def failing(error):
    """A function that computes three layers and raises then."""

    def fail(x, weights, layer):
        if layer == 3:
            weights.clear()  # the traceback keeps what is in it
            raise error("boom")
        return layer_fn(x, weights, layer)

    return fail


def test_packed_layers_are_decoded_to_the_bits_of_the_host(place, tmp_path):
    generator = torch.Generator().manual_seed(0)
    width = 4 * place.width
    weights = {
        f"layers.{n}.w": torch.randn(width, width, generator=generator).bfloat16()
        for n in range(5)
    }
    convert_to_packed(save(tmp_path / "plain", weights), tmp_path / "packed")
    with LayerStreamer.from_pretrained(
        tmp_path / "packed", device=place.name, n_gpu=1, n_cpu_pinned=1
    ) as streamer:
        for _ in range(2):
            found = streamer.run_pass(
                (), lambda x, weights, layer: (*x, weights["w"].cpu())
            )
            for layer, weight in enumerate(found):
                name = f"layers.{layer}.w"
                assert_bitwise_equal(weight, weights[name], name)


def test_static_tensors_and_casts_are_those_of_the_host(place, tmp_path):
    weights = make_weights()
    folder = save(tmp_path, weights)
    with LayerStreamer.from_pretrained(
        folder, device=place.name, dtype=torch.bfloat16
    ) as streamer:
        found = streamer.run_pass(
            (), lambda x, found, layer: (*x, found["mlp.weight"].clone())
        )
        static = streamer.load_static("model.embed.weight")
    for layer, weight in enumerate(found):
        name = f"model.layers.{layer}.mlp.weight"
        assert_bitwise_equal(weight.cpu(), weights[name].bfloat16(), name)
    assert_bitwise_equal(
        static.cpu(), weights["model.embed.weight"].bfloat16(), "static"
    )
