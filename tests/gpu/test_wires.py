"""What crosses the link small is decoded on the device to the host's bits."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from gpu.models import passes, resident, settle
from gpu.places import ON_GPU, Place
from stagehand.core.layout import same_bits
from stagehand.residency import finding
from stagehand.stores.converting import convert_to_packed, convert_to_squareq
from stagehand.stores.dequantizing import decoder_of, dequantize_image, scratch_nbytes
from stagehand.stores.squareq import SquareQ
from stagehand.stores.squareq_layout import dequantized
from unit.test_squareq import TYPES, block

DEPTH = 8


@pytest.fixture(autouse=True)
def _toy_blocks(monkeypatch):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 4096)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)


def width_of(place: Place) -> int:
    return 4 * max(place.width, 64)


def net(place: Place, depth: int = DEPTH) -> nn.Module:
    """Linear layers of bfloat16, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        width = width_of(place)
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)
        ]
        return nn.Sequential(*layers).bfloat16().requires_grad_(False)


def batch(place: Place) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, width_of(place), generator=generator).bfloat16()


def block_bytes(place: Place) -> int:
    return 2 * width_of(place) * (width_of(place) + 1) + 512


@pytest.mark.parametrize("seed", range(4))
def test_quantized_block_is_decoded_to_the_bits_of_the_host(place, seed):
    sizes = [(100, 65), (3, 5000), (64, 128), (1, 1)]
    dtypes = [TYPES[(seed + i) % 4] for i in range(4)]
    form, wire, expected = block(dtypes, sizes, seed)
    nbytes = scratch_nbytes(form, place.name)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=place.name)
    image = torch.zeros_like(expected, device=place.name)
    dequantize_image(wire.to(place.name), form, image, scratch=scratch)
    assert same_bits(image.cpu(), expected)


@pytest.mark.parametrize("place", [ON_GPU], indirect=True)
def test_gpu_decodes_quantized_weights_with_kernels(place):
    assert decoder_of(place.name) is not None


def test_packed_transport_is_exact(place):
    model, x = net(place), batch(place).to(place.name)
    expected = passes(resident(model, place), x)()
    stagehand.layer(
        model, vram_budget=5 * block_bytes(place), device=place.name, transport="packed"
    )
    for number in range(6):
        assert_bitwise_equal(passes(model, x)(), expected, f"pass {number}")
    runtime = model._stagehand_layer_runtime
    before = runtime.report().streamed_bytes
    passes(model, x)()
    crossed = runtime.report().streamed_bytes - before
    assert 0 < crossed <= 0.77 * DEPTH * block_bytes(place)
    runtime.shutdown()


def test_settled_packed_pass_neither_waits_nor_allocates(place):
    model, x = net(place), batch(place).to(place.name)
    stagehand.layer(
        model, vram_budget=5 * block_bytes(place), device=place.name, transport="packed"
    )
    settle(model, x, place)
    run = passes(model, x)
    assert place.forbidden_calls(run) == []
    model._stagehand_layer_runtime.shutdown()


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_models_from_smaller_files_are_exact(place, form, tmp_path):
    reference, x = net(place), batch(place).to(place.name)
    source = tmp_path / "model.safetensors"
    save_file(reference.state_dict(), source)
    if form == "packed":
        convert_to_packed(source, tmp_path / form)
    else:
        convert_to_squareq(source, tmp_path / form)
        multiply_out(reference, tmp_path / form)
    expected = passes(resident(reference, place), x)()
    model = stagehand.load(
        lambda: net(place),
        tmp_path / form,
        vram_budget=5 * block_bytes(place),
        device=place.name,
        scratch_dir=tmp_path,
    )
    for number in range(4):
        assert_bitwise_equal(passes(model, x)(), expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


def multiply_out(model: nn.Module, folder: object) -> None:
    slab = SquareQ.open(str(folder))
    for name, layer in slab.layers.items():
        codes = layer.codes_of(slab.files)
        columns = layer.rows.columns
        weight = dequantized(
            codes, layer.scales, layer.zeros, columns=columns, dtype=torch.bfloat16
        )
        model.get_submodule(name).weight.copy_(weight)
    slab.files.close()


@pytest.mark.parametrize("place", [ON_GPU], indirect=True)
def test_packed_pass_is_faster_where_the_link_is_the_limit(place):
    """With few tokens nothing hides the copies; a quarter of them is saved.

    Of many blocks: memory to decode from takes one from those that stay.
    """
    times = {}
    for transport in ("plain", "packed"):
        model, x = net(place, 3 * DEPTH), batch(place).to(place.name)
        stagehand.layer(
            model,
            vram_budget=4 * block_bytes(place),
            device=place.name,
            transport=transport,
        )
        settle(model, x, place)
        times[transport] = place.seconds(passes(model, x), rounds=9)
        model._stagehand_layer_runtime.shutdown()
    assert times["packed"] < times["plain"]
