"""Streaming under a user's own default device and element type."""

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagehand
from layered import layer_fn, make_weights, save
from scenario.small import LAYER_BYTES, batch, blocks_of, runtime_of, stack, values
from stagehand import LayerStreamer
from stagehand.optim import OffloadedAdamW
from stagehand.stores.converting import convert_to_packed, convert_to_squareq

BUDGET = 4 * LAYER_BYTES


@contextlib.contextmanager
def defaults(device: str | None, dtype: torch.dtype):
    """As `torch.set_default_device` and `torch.set_default_dtype` set them."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def take_pass(model, x):
    with torch.no_grad():
        return [model(x).cpu() for _ in range(3)]


def run_layer(folder: Path, place: str, model, x):
    stagehand.layer(model, vram_budget=BUDGET, ram_budget=2 * BUDGET, device=place)
    runtime = runtime_of(model)
    found = take_pass(model, x)
    runtime.convert_registry_to_file_backed_sharded(folder / "plain")
    found += take_pass(model, x)
    runtime.convert_registry_to_squareq_backed(folder / "quantized")
    found += take_pass(model, x)
    runtime.shutdown()
    return [*found, *values(model).values()]


def run_packed(folder: Path, place: str, model, x):
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = [torch.nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(4)]
    model, x = torch.nn.Sequential(*layers), x.bfloat16().repeat(1, 4)
    stagehand.layer(model, vram_budget=120_000, device=place, transport="packed")
    found = take_pass(model, x)
    assert place == "cpu" or blocks_of(model)[0].wire is not None
    with torch.no_grad():
        model[2].weight.mul_(2)
    found += take_pass(model, x)
    runtime_of(model).shutdown()
    return found


def run_training(folder: Path, place: str, model, x):
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    optimizer = OffloadedAdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime_of(model).shutdown()
    return list(values(model).values())


def run_load(folder: Path, place: str, model, x):
    found = []
    for form in ("plain", "packed", "quantized"):
        loaded = stagehand.load(stack, folder / form, vram_budget=BUDGET, device=place)
        found += take_pass(loaded, x)
        runtime_of(loaded).shutdown()
        found += values(loaded).values()
    return found


def run_convert(folder: Path, place: str, model, x):
    found = []
    for number, source in enumerate((folder / "plain", folder / "model.pt")):
        for convert in (convert_to_packed, convert_to_squareq):
            target = folder / f"{place} {convert.__name__} {number}"
            written = convert(source, target / torch.get_default_dtype().__repr__())
            found += load_file(written.path, device="cpu").values()
    return found


def run_streamer(folder: Path, place: str, model, x):
    source = folder / "layers"
    with LayerStreamer.from_pretrained(source, n_cpu=2, device=place) as streamer:
        return [streamer.run_pass(x, layer_fn).cpu() for _ in range(3)]


RUNS = [run_layer, run_packed, run_training, run_load, run_convert, run_streamer]


@pytest.mark.filterwarnings("ignore::stagehand.StagehandWarning")
@pytest.mark.parametrize("device", ["hpu", "meta"])
@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("run", RUNS)
def test_default_device_and_element_type_change_nothing(
    sim, tmp_path, run, place, device
):
    state = stack().state_dict()
    (tmp_path / "plain").mkdir()
    save_file(state, tmp_path / "plain" / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    convert_to_packed(tmp_path / "plain", tmp_path / "packed")
    convert_to_squareq(tmp_path / "plain", tmp_path / "quantized")
    (tmp_path / "layers").mkdir()
    save(tmp_path / "layers", make_weights())
    arguments = tmp_path, place, stack(), batch().to(place)
    expected = run(*arguments)
    arguments = tmp_path, place, stack(), batch().to(place)
    with defaults(device, torch.float64):
        found = run(*arguments)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device.type) == (other.dtype, "cpu")
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
