"""Models from packed and quantized files: exact to the reference, small on the link."""

import gc
import json
import os
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import assert_passes_equal, blocks_of, runtime_of, values
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    ManifestError,
    MissingTensorError,
    ShardChangedError,
    StagehandOOMError,
    StagehandWarning,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.residency import finding
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.converting import convert_to_packed, convert_to_squareq
from stagehand.stores.files import FileSet
from stagehand.stores.squareq import SquareQ
from stagehand.stores.squareq_layout import dequantized
from stagehand.streamer.layers import describe
from stagehand.units import MIB

WIDTH = 256
BLOCK = 2 * WIDTH * WIDTH


class Layer(nn.Module):
    """Two linear layers, of which one has no bias, and a norm between."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Net().bfloat16().requires_grad_(False)


BUDGET = 6 * BLOCK
TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def _toy_blocks(monkeypatch):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 4096)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)


@pytest.fixture
def files(tmp_path):
    """The model as it is, packed and quantized, in three folders."""
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(net().state_dict(), plain / "model.safetensors")
    convert_to_packed(plain, tmp_path / "packed")
    convert_to_squareq(plain, tmp_path / "quantized")
    return tmp_path


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


@pytest.fixture
def opened(sim):
    """Shut down what a test streams."""
    models = []
    yield models.append
    for model in models:
        if hasattr(model, "_stagehand_layer_runtime"):
            runtime_of(model).shutdown()
        model.zero_grad()


def dequantized_net(folder):
    """The reference: the model with each quantized weight multiplied out."""
    model, slab = net(), SquareQ.open(folder)
    for name, layer in slab.layers.items():
        weight = dequantized(
            layer.codes_of(slab.files),
            layer.scales,
            layer.zeros,
            columns=layer.rows.columns,
            dtype=torch.bfloat16,
        )
        module = model.get_submodule(name)
        module.weight.copy_(weight)
    slab.files.close()
    return model


def reference(files, form):
    return net() if form == "packed" else dequantized_net(files / "quantized")


def run(model, place="hpu"):
    with torch.no_grad():
        return model(TOKENS.to(place)).cpu()


def expected_of(model, place):
    with torch.no_grad():
        return deepcopy(model).to(place)(TOKENS.to(place))


def load(files, form, place, budget=BUDGET, **options):
    return stagehand.load(
        net, files / form, vram_budget=budget, device=place, **options
    )


# ------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_loaded_model_gives_the_bits_of_the_reference(opened, files, place, form):
    model = load(files, form, place)
    opened(model)
    expected = expected_of(reference(files, form), place)
    assert_passes_equal(model, expected, TOKENS.to(place), passes=4)
    assert_bitwise_equal(values(model), values(reference(files, form)), "state")


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_a_weight_that_goes_home_after_an_edit_has_not_changed_again(
    opened, files, place, form
):
    """Its host tensor was written, of whose version counter it had a share."""
    model, x = load(files, form, place), []
    opened(model)
    plain = reference(files, form).to(place)
    run(model, place)
    for each in (model, plain):
        each.layers[0].norm.weight.mul_(2)
        hidden = each.embed(TOKENS.to(place)).requires_grad_()
        output = each.layers[0](hidden)
        if each is model:
            runtime_of(model).park()
        output.float().sum().backward()
        x.append(hidden.grad)
    assert_bitwise_equal(x[0], x[1], "gradient")


def test_a_saved_model_from_packed_files_fails_no_other_models_pass(opened, files):
    """It has nothing to stage with until its own, and was loaded ahead all the same."""
    models = [load(files, "packed", "hpu") for _ in range(2)]
    for model in models:
        opened(model)
    expected = expected_of(net(), "hpu")
    for model in models * 3:
        assert_passes_equal(model, expected, TOKENS.to("hpu"), passes=1)
    models[1].state_dict()
    for model in models:
        assert_passes_equal(model, expected, TOKENS.to("hpu"), passes=1)


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_packed_files_give_the_bits_of_the_model(opened, files, place, mode):
    model = net()
    opened(model)
    runtime = stream(model, place, mode)
    runtime.convert_registry_to_file_backed_sharded(files / "packed")
    expected = expected_of(net(), place)
    assert_passes_equal(model, expected, TOKENS.to(place), passes=4)
    assert runtime._parts.weights.peak_bytes <= 2 * BUDGET


def stream(model, place, mode, budget=BUDGET):
    if mode == "layers":
        stagehand.layer(model, vram_budget=budget, device=place)
    else:
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=2 * budget / MIB,
            vram_low_watermark_mb=budget / MIB,
        )
        stagehand.StagehandRuntime(model, config, r"^layers\.\d+$", device=place)
    return runtime_of(model)


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_quantized_layers_of_a_model_in_memory(opened, files, place, mode):
    model = net()
    opened(model)
    runtime = stream(model, place, mode)
    run(model, place)
    assert runtime.convert_registry_to_squareq_backed(files / "quantized") >= 4
    expected = expected_of(dequantized_net(files / "quantized"), place)
    assert_passes_equal(model, expected, TOKENS.to(place), passes=4)
    runtime.shutdown()
    state = values(dequantized_net(files / "quantized"))
    assert_bitwise_equal(values(model), state, "state")


def test_quantized_files_are_not_taken_for_the_same_values(opened, files, sim):
    """What is in no block would keep the values that it has."""
    model = net()
    opened(model)
    runtime = stream(model, "hpu", "blocks")
    with pytest.raises(ConfigError, match="convert_registry_to_squareq_backed"):
        runtime.convert_registry_to_file_backed_sharded(files / "quantized")
    assert_passes_equal(model, expected_of(net(), "hpu"), TOKENS.to("hpu"))


def test_quantized_layers_of_a_model_from_files(opened, files, place):
    """The rest of each block comes from the files that it came from before."""
    model = load(files, "plain", place)
    opened(model)
    runtime = runtime_of(model)
    runtime.convert_registry_to_squareq_backed(files / "quantized")
    expected = expected_of(dequantized_net(files / "quantized"), place)
    assert_passes_equal(model, expected, TOKENS.to(place), passes=3)


def first_version(files, suffix):
    """The same weights in a file of SquareQ v1."""
    slab = SquareQ.open(files / "quantized")
    layers, listed = {}, []
    for name, layer in slab.layers.items():
        layers[name] = {
            "qweight": layer.codes_of(slab.files).clone(),
            "scale": layer.scales.clone(),
            "zero_point": layer.zeros.clone(),
        }
        if layer.bias is not None:
            layers[name]["bias"] = layer.bias.clone()
        rows = layer.rows
        listed.append(
            {
                "name": name,
                "out": rows.count,
                "inp": rows.columns,
                "padded_in": rows.padded,
                "has_bias": layer.bias is not None,
            }
        )
    slab.files.close()
    manifest = {"quant_version": "bp8", "layout": "rowwise", "layers": listed}
    path = files / f"it{suffix}"
    torch.save({"manifest": manifest, "layers": layers}, path)
    return path


@pytest.mark.parametrize("suffix", [".fpk", ".slab"])
def test_first_version_of_quantized_layers(opened, files, place, suffix):
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    path = first_version(files, suffix)
    runtime_of(model).convert_registry_to_squareq_backed(path)
    expected = expected_of(dequantized_net(files / "quantized"), place)
    assert_passes_equal(model, expected, TOKENS.to(place), passes=3)


# ------------------------------------------------------------------------------- small


def streamed_bytes(opened, files, form):
    """Bytes on the link of a settled pass, and of one load of each block."""
    model = load(files, form, "hpu", budget=4 * BLOCK)
    opened(model)
    for _ in range(6):  # until measured times are planned for
        run(model)
    runtime = runtime_of(model)
    before = runtime.report().streamed_bytes
    for _ in range(20):
        run(model)
    crossed = (runtime.report().streamed_bytes - before) / 20
    streamed = [
        block
        for block in blocks_of(model)
        if block.name.startswith("layers") and block.wire is not None
    ]
    return crossed, {b.name: (b.link_nbytes, b.nbytes) for b in streamed}


@pytest.mark.parametrize(("form", "share"), [("packed", 0.765), ("quantized", 0.52)])
def test_share_of_the_bytes_that_crosses(opened, files, sim, form, share):
    crossed, sizes = streamed_bytes(opened, files, form)
    assert len(sizes) == 8
    assert sum(link for link, _ in sizes.values()) <= share * 8 * BLOCK
    head = 2 * 50 * WIDTH
    ahead = 2 * BLOCK / 20  # loaded for a pass before it, or for one behind it
    assert 0 < crossed <= share * (8 * BLOCK + 2 * head) + ahead + 8192


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_smallest_budget_counts_the_bytes_to_decode_and_works(files, sim, form):
    with pytest.raises(StagehandOOMError) as plain:
        load(files, "plain", "hpu", budget=1)
    with pytest.raises(StagehandOOMError, match="as it crosses the link") as caught:
        load(files, form, "hpu", budget=plain.value.needed_bytes)
    least = caught.value.needed_bytes
    assert least > plain.value.needed_bytes
    with pytest.raises(StagehandOOMError, match="what blocks are decoded in") as first:
        load(files, form, "hpu", budget=1)
    assert (first.value.needed_bytes, first.value.limit_bytes) == (least, 1)
    model = load(files, form, "hpu", budget=least)
    expected = expected_of(reference(files, form), "hpu")
    assert_passes_equal(model, expected, TOKENS.to("hpu"))
    assert runtime_of(model)._parts.weights.peak_bytes <= least
    runtime_of(model).shutdown()


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_a_budget_that_is_looked_for_takes_of_nobody(opened, files, sim, form):
    """It closed the caller's pool, warned of itself, and met others' reservations."""
    other, model = net(), net()
    stagehand.layer(model, vram_budget=100 * BLOCK)
    run(model)
    pool = runtime_of(model).shutdown_keep_pool()
    sim.configure(capacity_bytes=sim.allocated_bytes() + BLOCK // 2)
    with pytest.raises(StagehandOOMError, match="what blocks are decoded in") as alone:
        load(files, form, "hpu", budget=1, pool=pool)
    sim.configure()
    with pytest.raises(StagehandOOMError, match="as it crosses the link"):
        load(files, form, "hpu", budget=BLOCK + BLOCK // 2, pool=pool)
    stagehand.layer(other, vram_budget=8 * BLOCK)
    opened(other)
    run(other)
    runtime_of(other).reserve_for_resident()
    with pytest.raises(StagehandOOMError, match="what blocks are decoded in") as beside:
        load(files, form, "hpu", budget=1, pool=pool)
    assert str(beside.value) == str(alone.value)
    runtime_of(other).release_reservation()
    model = load(files, form, "hpu", budget=alone.value.needed_bytes, pool=pool)
    opened(model)
    run(model)


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_a_budget_that_was_lowered_has_to_hold_the_decoder_of_files(
    opened, files, sim, form
):
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=100 * BLOCK)
    runtime, expected = runtime_of(model), run(model, "hpu")
    with pytest.raises(StagehandOOMError) as plain:
        runtime.set_budget(1)
    runtime.set_budget(budget := plain.value.needed_bytes)
    convert = {
        "packed": runtime.convert_registry_to_file_backed_sharded,
        "quantized": runtime.convert_registry_to_squareq_backed,
    }[form]
    with pytest.raises(StagehandOOMError, match="as it crosses the link"):
        convert(files / form)
    for _ in range(2):
        assert_bitwise_equal(run(model, "hpu"), expected, "as before")
    assert runtime.report().budget_bytes == budget
    assert runtime._parts.weights.held_bytes <= budget


def test_pressure_from_other_tensors_leaves_room_to_decode(opened, files, sim):
    """Weights make room down to the smallest budget, which counts the decoder."""
    model = net()
    opened(model)
    expected = expected_of(dequantized_net(files / "quantized"), "hpu")
    other = torch.empty(20 * BLOCK, dtype=torch.uint8, device="hpu")
    runtime = stream(model, "hpu", "blocks")
    run(model)
    runtime.convert_registry_to_squareq_backed(files / "quantized")
    assert_passes_equal(model, expected, TOKENS.to("hpu"))
    del other


def test_decoded_files_go_with_the_runtime(files, sim, tmp_path):
    for form in ("packed", "quantized"):
        scratch = tmp_path / f"scratch {form}"
        scratch.mkdir()
        model = load(files, form, "hpu", scratch_dir=scratch)
        assert len(list(scratch.iterdir())) == 1
        runtime_of(model).shutdown()
        assert list(scratch.iterdir()) == []
        assert_bitwise_equal(values(model), values(reference(files, form)), "left")
        model = net()
        stagehand.layer(model, vram_budget=BUDGET)
        convert = runtime_of(model).convert_registry_to_squareq_backed
        if form == "packed":
            convert = runtime_of(model).convert_registry_to_file_backed_sharded
        convert(files / form, scratch_dir=scratch)
        del convert
        del model
        gc.collect()
        assert list(scratch.iterdir()) == []


# ---------------------------------------------------------------------------- training


class Adapted(nn.Module):
    """A frozen linear layer and a small trained one beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(2, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        for layer in model.layers:
            layer.up = Adapted(layer.up)
    return model


def train(model, place, steps=3):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(TOKENS.to(place)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses, [p.detach().cpu() for p in trained]


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_adapters_train_bitwise_on_quantized_layers(opened, files, place, mode):
    there = adapt(reference(files, "quantized")).to(place)
    here = adapt(net())
    opened(here)
    runtime = stream(here, place, mode)

    def to_file(name):
        return name.replace(".base.", ".")

    runtime.convert_registry_to_squareq_backed(files / "quantized", key_map=to_file)
    expected = train(there, place)
    assert_bitwise_equal(train(here, place), expected, "training")


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_adapters_train_bitwise_on_the_base(opened, files, place, form):
    there = adapt(reference(files, form)).to(place)
    here = load(files, form, place)
    opened(here)
    adapt(here)
    expected = train(there, place)
    assert_bitwise_equal(train(here, place), expected, "training")
    wires = [block.wire is not None for block in blocks_of(here) if block.nbytes > 4096]
    assert any(wires) == (place == "hpu")


def test_training_of_quantized_weights_is_refused(opened, files, place):
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    runtime = runtime_of(model)
    runtime.convert_registry_to_squareq_backed(files / "quantized")
    expected = run(model, place)
    model.layers[1].down.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'layers\.1\.down.*quantized.*adapter"):
        model(TOKENS.to(place))
    assert_bitwise_equal(run(model, place), expected, "without gradients")
    model.requires_grad_(False)
    model(TOKENS.to(place))


def test_trained_block_of_a_packed_model_crosses_as_it_is(opened, files, place):
    there = net().to(place)
    here = load(files, "packed", place)
    opened(here)
    run(here, place)
    for model in (there, here):
        model.layers[1].down.weight.requires_grad_(True)
    expected = train(there, place)
    assert_bitwise_equal(train(here, place), expected, "training")


# ------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("form", ["packed", "quantized"])
@pytest.mark.parametrize("through", ["data", "no_grad"])
def test_edit_on_the_host_is_what_crosses_from_then_on(
    opened, files, place, form, through
):
    model = load(files, form, place)
    opened(model)
    for _ in range(3):
        run(model, place)
    edited = reference(files, form)
    for each in (edited, model):
        weight = each.layers[1].down.weight
        if through == "data":
            weight.data[3, 5] += 1  # one element of them all
        else:
            with torch.no_grad():
                weight[3, 5] += 1
    expected = expected_of(edited, place)
    if place == "hpu":
        with pytest.warns(StagehandWarning, match="was changed on the host"):
            found = run(model, place)
    else:
        found = run(model, place)
    assert_bitwise_equal(found, expected.cpu(), "after the edit")
    assert_passes_equal(model, expected, TOKENS.to(place))


# --------------------------------------------------------------------------- bad input


def test_wrong_model_for_quantized_weights_is_refused(opened, files, sim):
    model = net()
    del model.layers[3]
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    before = values(model)
    with pytest.raises(ManifestError, match=r"are not in Net: .*layers\.3\.down"):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")
    assert_bitwise_equal(values(model), before, "nothing changed")
    run(model)


def test_other_sizes_than_the_model_s_are_refused(opened, files, sim):
    model = net()
    model.layers[2].down = nn.Linear(WIDTH, WIDTH // 2, bias=False).bfloat16()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    with pytest.raises(TensorMismatchError, match=r"\[256, 256\], found \[128, 256\]"):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")


def test_integers_for_quantized_weights_are_refused(opened, files, sim):
    model = net()
    weight = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
    model.layers[2].down.weight = nn.Parameter(weight, requires_grad=False)
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    with pytest.raises(
        TensorMismatchError, match=r"'layers\.2\.down.* expected a fl.* torch\.int8"
    ):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")


def test_weights_that_are_no_plain_memory_are_not_replaced(opened, files, sim):
    model = net()
    weight = model.layers[2].down.weight
    odd = TwoTensor(weight.detach(), weight.detach())
    model.layers[2].down.weight = nn.Parameter(odd, requires_grad=False)
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET, device="cpu")
    expected = run(net(), "cpu")
    with pytest.raises(
        ManifestError, match=r"'layers\.2\.down.* no plain tensor.* --exclude"
    ):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")
    assert_bitwise_equal(run(model, "cpu").a, expected, "output")


def without_values(model, names):
    """The model, with those of its parameters on the meta device."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(model.get_parameter(name).to("meta"), False)
        setattr(model.get_submodule(module), attribute, parameter)
    return model


def test_quantized_weights_are_the_first_that_a_model_has(opened, files, place):
    """Its other tensors are real, in the same blocks."""
    slab = SquareQ.open(files / "quantized")
    weights = [f"{name}.weight" for name in slab.layers]
    slab.files.close()
    model = without_values(net(), weights)
    opened(model)
    runtime = stream(model, place, "blocks")
    runtime.convert_registry_to_squareq_backed(files / "quantized")
    reference = dequantized_net(files / "quantized")
    expected = expected_of(reference, place)
    assert_passes_equal(model, expected, TOKENS.to(place))
    assert_bitwise_equal(values(model), values(reference), "state")


def test_tensor_that_quantized_weights_leave_without_values_is_named(
    opened, files, sim
):
    """All can be had from the model's own files first."""
    names = [name for name, _ in net().named_parameters()]
    model = without_values(net(), names)
    opened(model)
    runtime = stream(model, "hpu", "blocks")
    with pytest.raises(ManifestError, match=r"'embed\.weight' .* from its own files"):
        runtime.convert_registry_to_squareq_backed(files / "quantized")
    runtime.convert_registry_to_file_backed_sharded(files / "plain")
    runtime.convert_registry_to_squareq_backed(files / "quantized")
    expected = expected_of(dequantized_net(files / "quantized"), "hpu")
    assert_passes_equal(model, expected, TOKENS.to("hpu"))


def test_manifest_of_another_model_is_refused(opened, files, sim):
    path = files / "quantized" / "model.manifest.json"
    document = json.loads(path.read_text())
    document["model_signature"] = "0123456789abcdef"
    path.write_text(json.dumps(document))
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    with pytest.raises(ManifestError, match="'0123456789abcdef'"):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")
    with pytest.raises(ManifestError, match="'0123456789abcdef'"):
        load(files, "quantized", "hpu")


@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_file_that_changes_while_it_streams_is_noticed(opened, files, sim, form):
    model = load(files, form, "hpu")
    opened(model)
    run(model)
    path = files / form / "model.safetensors"
    held = load_file(path)
    save_file({k: v.clone() for k, v in held.items()}, path)
    with pytest.raises(ShardChangedError, match=r"model\.safetensors"):
        run(model)


def test_file_cut_off_while_a_wire_is_read_is_an_error_that_names_the_tensor(
    opened, files, sim, monkeypatch
):
    """What is not packed was read from a mapping once: that would end the process."""
    model = load(files, "packed", "hpu")
    opened(model)
    run(model)
    path = files / "packed" / "model.safetensors"
    name = "layers.1.up.bias"
    content, stat = path.read_bytes(), path.stat()
    end = Checkpoint.open(path)[name].offset + 10
    block = next(b for b in blocks_of(model) if b.name == "layers.1.up")
    memory = torch.empty(block.link_nbytes, dtype=torch.uint8)
    fill = FileSet.fill

    def fill_and_cut(self, *arguments):
        nbytes = fill(self, *arguments)
        monkeypatch.setattr(FileSet, "fill", fill)
        os.truncate(path, end)
        return nbytes

    monkeypatch.setattr(FileSet, "fill", fill_and_cut)
    message = f"'{name}' in {path} is truncated: expected 512 bytes, found 10;"
    with pytest.raises(TruncatedShardError, match=re.escape(message)):
        block.wire.read_into(memory)
    os.truncate(path, 4096)
    with pytest.raises(TruncatedShardError, match=r"'layers\.1\.up\.weight\.packed\."):
        block.wire.read_into(memory)
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert block.wire.read_into(memory) > 0


def test_raw_part_of_a_wire_is_what_the_host_says_once_it_was_edited(
    opened, files, sim
):
    model = load(files, "packed", "hpu")
    opened(model)
    expected = net()
    for each in (model, expected):
        run(each, next(each.parameters()).device)
        with torch.no_grad():
            each.layers[1].up.bias += 1
    expected = expected_of(expected, "hpu")
    assert_passes_equal(model, expected, TOKENS.to("hpu"), passes=2)


@pytest.mark.filterwarnings("ignore:.*cannot be made anew:stagehand.StagehandWarning")
@pytest.mark.parametrize("most", [2, 1], ids=["all", "what is stored as it is"])
@pytest.mark.parametrize("form", ["packed", "quantized"])
def test_what_was_put_aside_comes_back_and_keeps_its_values(
    opened, files, place, form, most
):
    """Averages are swapped in so, of what trains and of what does not."""
    model = load(files, form, place)
    opened(model)
    whole = reference(files, form)
    halved = deepcopy(whole)
    chosen = [
        [p for p in each.parameters() if most >= p.dim()]
        for each in (model, whole, halved)
    ]
    for parameter in chosen[2]:
        parameter.data.mul_(0.5)
    expected, averaged = (expected_of(each, place) for each in (whole, halved))
    for number in range(3):
        assert_passes_equal(model, expected, TOKENS.to(place), passes=2)
        kept = [p.data for p in chosen[0]]
        for mine, other in zip(chosen[0], chosen[2], strict=True):
            mine.data = other.data
        assert_passes_equal(model, averaged, TOKENS.to(place), passes=2)
        was = [p.detach() for p in chosen[1]]
        assert_bitwise_equal([k.cpu() for k in kept], was, f"kept {number}")
        for mine, value in zip(chosen[0], kept, strict=True):
            mine.data = value


def test_bias_that_is_not_stored_with_quantized_weights_is_the_models(opened, tmp_path):
    """Such as one that float32 cannot hold."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
    save_file({"0.weight": model[0].weight}, tmp_path / "model.safetensors")
    convert_to_squareq(tmp_path / "model.safetensors", tmp_path / "quantized")
    opened(model)
    bias = model[0].bias.clone()
    stagehand.layer(model, vram_budget="1MB", device="cpu")
    runtime_of(model).convert_registry_to_squareq_backed(tmp_path / "quantized")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model[0].bias, bias, "bias")


def test_quantized_file_that_changes_is_noticed_though_all_of_it_was_read(
    opened, files, sim
):
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=100 * BLOCK)
    runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")
    run(model)
    (files / "quantized" / "model.safetensors").touch()
    with pytest.raises(ShardChangedError, match=r"model\.safetensors"):
        run(model)


def test_refused_weights_are_not_watched_any_more(opened, files, sim):
    model = net()
    del model.layers[3]
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    with pytest.raises(ManifestError):
        runtime_of(model).convert_registry_to_squareq_backed(files / "quantized")
    (files / "quantized" / "model.safetensors").unlink()
    run(model)


def test_quantized_layers_are_replaced_by_others(opened, files, place):
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    runtime = runtime_of(model)
    for _ in range(2):
        runtime.convert_registry_to_squareq_backed(files / "quantized")
        expected = expected_of(dequantized_net(files / "quantized"), place)
        assert_passes_equal(model, expected, TOKENS.to(place), passes=2)


def damage(path, change):
    held = {k: v.clone() for k, v in load_file(path).items()}
    key = next(k for k in held if k.startswith("layers.1.down.weight.packed"))
    change(held, key)
    save_file(held, path)


def lose_magic(held, key):
    held[key][:8] = 0


def misplace_an_escape(held, key):
    held[key][-8:] = 255
    held[key][-256:] = 255


def rename(held, key):
    held[key.replace("256x256", "256x255")] = held.pop(key)


def shorten(held, key):
    held[key] = held[key][:-256].clone()


def double(held, key):
    held["layers.1.down.weight"] = torch.zeros(WIDTH, WIDTH).bfloat16()


def stand(held, key):
    held[key] = held[key].view(-1, 1)


@pytest.mark.parametrize(
    "change", [lose_magic, misplace_an_escape, rename, shorten, double, stand]
)
def test_packed_tensor_that_is_not_sound_is_refused_at_open(files, sim, change):
    """An escape out of its place would be a wild write on the device."""
    path = files / "packed" / "model.safetensors"
    damage(path, change)
    with pytest.raises(CheckpointError, match=r"layers\.1\.down\.weight") as caught:
        load(files, "packed", "hpu")
    assert str(path) in str(caught.value)


def test_explicit_streamer_does_not_take_quantized_tensors_for_weights(files):
    checkpoint = Checkpoint.open(files / "quantized")
    with pytest.raises(ConfigError, match=r"holds quantized wei.*stagehand\.load"):
        describe(checkpoint, files / "quantized")


def test_scratch_directory_without_room_is_an_error_and_left_empty(
    files, sim, tmp_path, monkeypatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    usage = shutil.disk_usage(scratch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    for form in ("packed", "quantized"):
        with pytest.raises(CheckpointError, match=r"1\.00 KB free: .*scratch_dir"):
            load(files, form, "hpu", scratch_dir=scratch)
    assert list(scratch.iterdir()) == []


def test_scratch_directory_is_empty_after_a_conversion_that_failed(
    opened, files, sim, tmp_path, monkeypatch
):
    """What had been decoded stayed on disk until the shutdown."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    model = Net(depth=5).bfloat16().requires_grad_(False)
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    runtime = runtime_of(model)
    with pytest.raises(MissingTensorError, match=r"layers\.4\."):
        runtime.convert_registry_to_file_backed_sharded(
            files / "packed", scratch_dir=scratch
        )
    assert list(scratch.iterdir()) == []
    usage = shutil.disk_usage(scratch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    model = net()
    opened(model)
    stagehand.layer(model, vram_budget=BUDGET)
    with pytest.raises(CheckpointError, match=r"1\.00 KB free: .*scratch_dir"):
        runtime_of(model).convert_registry_to_squareq_backed(
            files / "quantized", scratch_dir=scratch
        )
    assert list(scratch.iterdir()) == []


def test_nothing_of_a_loaded_model_is_whole_in_memory_twice(files, sim, tmp_path):
    """Host tensors are views of the decoded file, not copies."""
    model = load(files, "quantized", "hpu", scratch_dir=tmp_path)
    [decoded] = tmp_path.glob("stagehand-*/*.safetensors")
    maps = Path("/proc/self/maps").read_text()
    assert str(decoded) in maps
    runtime_of(model).shutdown()
