"""`stagehand.load` streams saved models as `from_pretrained` would hold them."""

import errno
import functools
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small import WIDTH, batch, runtime_of, stack
from torch import nn
from transformers import conversion_mapping, initialization
from transformers.core_model_loading import ConversionOps, WeightConverter

import stagehand
from architectures import (
    ARCHITECTURES,
    Architecture,
    assert_bitwise_equal,
    flatten,
    to_device,
)
from architectures.diffusion import UNETS
from architectures.language import DEEPSEEK_V3, GPT2, GROUPED, LLAMA, MIXTRAL
from architectures.text import M2M_100, T5
from architectures.vision import TOWER, images
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    IndexMismatchError,
    MissingTensorError,
    StagehandWarning,
    TensorMismatchError,
)
from stagehand.stores.converting import convert_to_packed
from stagehand.stores.writing import SafetensorsBody
from streamed import aligned, original, weight_bytes


@pytest.fixture(autouse=True)
def quiet():
    """Keep the libraries' own reports off the screen."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    diffusers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """Save a model once, in its own library's way."""

    @functools.cache
    def save(
        architecture: Architecture, dtype: torch.dtype = torch.float32, shard="5GB"
    ) -> Path:
        folder: Path = tmp_path_factory.mktemp(architecture.name)
        model = architecture.build().to(dtype)
        model.save_pretrained(folder, max_shard_size=shard)
        return folder

    return save


def opened(architecture: Architecture, folder: Path, dtype: torch.dtype) -> nn.Module:
    """What the model's own library makes of a directory."""
    model_class: Any = type(original(architecture))
    is_diffusers = issubclass(model_class, diffusers.ModelMixin)
    option = "torch_dtype" if is_diffusers else "dtype"
    model: nn.Module = model_class.from_pretrained(folder, **{option: dtype})
    return model


def inputs_of(architecture: Architecture, device: str, dtype: torch.dtype) -> Any:
    """The inputs, those with a point in them of the weights' type."""
    given = to_device(architecture.inputs(), device)
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def least(*args: Any, **options: Any) -> int:
    """The smallest budget, as the error for one that cannot work names it."""
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        stagehand.load(*args, vram_budget=1, **options)
    return caught.value.needed_bytes


CASES = [
    pytest.param(
        architecture,
        ("hpu", "cpu")[number % 2],
        (torch.float32, torch.float32, torch.bfloat16)[number % 3],
        ("5GB", "300KB")[number // 2 % 2],
        id=str(architecture),
    )
    for number, architecture in enumerate(ARCHITECTURES)
]


@pytest.mark.filterwarnings("ignore:.*every call is watched:stagehand.StagehandWarning")
@pytest.mark.parametrize(("architecture", "device", "dtype", "shard"), CASES)
def test_directory_streams_bitwise_as_from_pretrained(
    architecture, device, dtype, shard, sim, saved
):
    folder = saved(architecture, dtype, shard)
    expected = aligned(opened(architecture, folder, dtype))
    names = [name for name, _ in expected.named_parameters()]
    state, held = torch.get_rng_state(), sim.allocated_bytes()
    needed = least(folder, device=device)
    budget = needed + (weight_bytes(expected) - needed) // 2
    model = stagehand.load(folder, device=device, vram_budget=budget)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(expected)
    assert not model.training
    assert [name for name, _ in model.named_parameters()] == names
    inputs = inputs_of(architecture, device, dtype)
    with torch.no_grad():
        wanted = flatten(architecture.call(expected.to(device), inputs))
        for number in range(2):
            found = flatten(architecture.call(model, inputs))
            assert_bitwise_equal(found, wanted, f"pass {number}")
    runtime = runtime_of(model)
    assert runtime.report().disk_bytes > 0
    assert runtime.report().peak_device_bytes <= budget
    runtime.shutdown()
    expected.cpu()
    assert_bitwise_equal(model.state_dict(), expected.state_dict(), "state_dict()")
    buffers = dict(model.named_buffers())
    assert_bitwise_equal(buffers, dict(expected.named_buffers()), "buffers")
    del expected, inputs, wanted, found
    assert sim.allocated_bytes() <= held


# What may be given


class Net(nn.Module):
    """A module with one of each: tied, computed, filled, counted."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        angles = torch.arange(width) / width
        self.register_buffer("angles", angles.cos(), persistent=False)
        table = torch.empty(4, width)
        table[:2] = 1.5
        table[2:] = angles
        self.register_buffer("table", table, persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.table.to(tokens.device).sum(0)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.angles + self.scale.to(x.device)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def net() -> nn.Module:
    """A `Net` with values of its own, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        model = Net()
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 1.5)
    return model.eval()


EMBED = "embed.weight"
TOKENS = torch.tensor([1, 5, 2, 15])


@pytest.fixture
def net_file(tmp_path) -> Path:
    """A file with what a `Net` needs, without the second name of the tied weight."""
    values = {k: v for k, v in net().state_dict().items() if k != "head.weight"}
    path = tmp_path / "net.safetensors"
    save_file(values, path)
    return path


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Net()
    real = Net()
    for name in ("angles", "table"):
        model.register_buffer(name, getattr(real, name), persistent=False)
    model.scale = real.scale
    return model


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize(
    "given", [Net, functools.partial(Net, width=32), lambda: Net(), on_meta, Net()]
)
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_plain_module_streams_as_after_load_state_dict(
    given, device, is_folder, sim, net_file
):
    given = on_meta() if given is on_meta else given
    path = net_file.parent if is_folder else net_file
    model = stagehand.load(given, path, device=device, vram_budget="20KB")
    with torch.no_grad():
        expected = net().to(device)(TOKENS.to(device))
        for number in range(3):
            assert_bitwise_equal(model.eval()(TOKENS), expected, f"pass {number}")
    if isinstance(given, nn.Module):
        assert model is given
    runtime_of(model).shutdown()
    assert model.head.weight is model.embed.weight
    assert_bitwise_equal(model.state_dict(), net().state_dict(), "state_dict()")
    assert_bitwise_equal(model.table, net().table, "filled")


@pytest.mark.parametrize(
    "given",
    [
        lambda folder: transformers.LlamaForCausalLM,
        lambda folder: transformers.AutoModelForCausalLM,
        transformers.AutoConfig.from_pretrained,
        str,
    ],
    ids=["class", "auto class", "configuration", "text"],
)
def test_transformers_model_is_loaded_by_any_of_its_names(given, sim, saved):
    folder = saved(LLAMA)
    model = stagehand.load(given(folder), folder, vram_budget="400KB")
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.name_or_path == str(folder)
    runtime_of(model).shutdown()
    assert_bitwise_equal(
        model.state_dict(), original(LLAMA).state_dict(), "state_dict()"
    )


def test_generation_settings_of_the_directory_are_used(sim, tmp_path):
    saved = LLAMA.build()
    saved.generation_config.max_new_tokens = 7
    saved.save_pretrained(tmp_path)
    model = stagehand.load(tmp_path, vram_budget="400KB")
    assert model.generation_config == saved.generation_config
    runtime_of(model).shutdown()


def test_model_with_merged_experts_saves_what_it_was_loaded_from(sim, saved, tmp_path):
    folder = saved(MIXTRAL)
    model = stagehand.load(folder, vram_budget="800KB")
    runtime_of(model).shutdown()
    expected = opened(MIXTRAL, folder, torch.float32)
    assert [c.source_patterns for c in model._weight_conversions] == [
        c.source_patterns for c in expected._weight_conversions
    ]
    model.save_pretrained(tmp_path)
    name = "model.safetensors"
    found, wanted = load_file(tmp_path / name), load_file(folder / name)
    assert found.keys() == wanted.keys()
    assert_bitwise_equal([found[k] for k in wanted], list(wanted.values()), "saved")


def test_diffusers_class_is_loaded(sim, saved):
    [flux] = [a for a in ARCHITECTURES if a.name == "flux"]
    model = stagehand.load(
        diffusers.FluxTransformer2DModel, saved(flux), vram_budget="1MB"
    )
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), original(flux).state_dict(), "values")


def test_head_is_loaded_onto_a_checkpoint_of_the_model_without_it(sim, tmp_path):
    whole = original(LLAMA)
    whole.model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["lm_head.weight"] = whole.lm_head.weight.detach()
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    model = stagehand.load(transformers.LlamaForCausalLM, tmp_path, vram_budget="400KB")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), whole.state_dict(), "state_dict()")


@pytest.mark.parametrize("as_function", [True, False], ids=["function", "mapping"])
def test_key_map_says_where_tensors_are(as_function, sim, tmp_path):
    names = {name: f"old.{name}" for name in stack().state_dict()}
    values = {names[name]: t for name, t in stack().state_dict().items()}
    save_file(values, tmp_path / "old.safetensors")
    key_map = names.__getitem__ if as_function else names
    model = stagehand.load(stack, tmp_path, key_map=key_map, vram_budget="12KB")
    with torch.no_grad():
        assert_bitwise_equal(model(batch()).cpu(), stack()(batch()), "output")
    runtime_of(model).shutdown()


def test_gradients_are_those_of_the_resident_model(sim, tmp_path):
    save_file(stack().state_dict(), tmp_path / "stack.safetensors")
    model, resident = stagehand.load(stack, tmp_path, vram_budget="12KB"), stack()
    model(batch()).sum().backward()
    resident.to("hpu")(batch().to("hpu")).sum().backward()
    for (name, one), other in zip(
        model.named_parameters(), resident.parameters(), strict=True
    ):
        assert_bitwise_equal(one.grad, other.grad, name)
    runtime_of(model).shutdown()


def test_attributes_of_parameters_are_kept(sim, tmp_path):
    def marked() -> nn.Module:
        model = stack()
        for parameter in model.parameters():
            parameter.mark = "kept"
        return model

    save_file(stack().state_dict(), tmp_path / "stack.safetensors")
    model = stagehand.load(marked, tmp_path, vram_budget="12KB")
    assert {p.mark for p in model.parameters()} == {"kept"}
    runtime_of(model).shutdown()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["lstm", "gru"])
def test_layers_that_refer_to_their_weights_weakly_are_loaded(kind, sim, tmp_path):
    torch.default_generator.manual_seed(4)
    plain = kind(WIDTH, WIDTH, num_layers=2)
    x, path = torch.randn(5, WIDTH), tmp_path / "recurrent.safetensors"
    save_file(plain.state_dict(), path)
    make = functools.partial(kind, WIDTH, WIDTH, num_layers=2)
    model = stagehand.load(make, path, vram_budget="1MB", device="hpu")
    expected = deepcopy(plain).to("hpu")(x.to("hpu"))
    for number in range(2):
        assert_bitwise_equal(flatten(model(x)), flatten(expected), f"pass {number}")
    runtime_of(model).shutdown()
    expected = plain(x)
    assert_bitwise_equal(flatten(aligned(model)(x)), flatten(expected), "on the host")


# Element types and what is computed


def test_dtype_casts_as_from_pretrained_does(sim, saved, tmp_path):
    folder = saved(LLAMA)
    expected = opened(LLAMA, folder, torch.bfloat16)
    model = stagehand.load(
        folder, dtype=torch.bfloat16, scratch_dir=tmp_path, vram_budget="300KB"
    )
    [written] = tmp_path.iterdir()
    assert list(written.glob("*.safetensors"))
    with torch.no_grad():
        found = flatten(LLAMA.call(model, LLAMA.inputs()))
        inputs = to_device(LLAMA.inputs(), "hpu")
        wanted = flatten(LLAMA.call(expected.to("hpu"), inputs))
    assert_bitwise_equal(found, wanted, "output")
    runtime_of(model).shutdown()
    assert not list(tmp_path.iterdir())
    assert_bitwise_equal(model.state_dict(), expected.cpu().state_dict(), "values")


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(T5, torch.float16), (DEEPSEEK_V3, torch.float16), (DEEPSEEK_V3, torch.bfloat16)],
    ids=str,
)
def test_what_a_class_keeps_in_float32_is_cast(sim, saved, architecture, dtype):
    """Some do so for float16 alone, others for all types of 16 bits."""
    folder = saved(architecture, dtype)
    model = stagehand.load(folder, vram_budget="1MB")
    runtime_of(model).shutdown()
    expected = opened(architecture, folder, dtype)
    assert torch.float32 in {t.dtype for t in expected.state_dict().values()}
    assert_bitwise_equal(model.state_dict(), expected.state_dict(), "state_dict()")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16])
def test_weights_to_which_a_constructor_gives_a_type_keep_it(
    sim, tmp_path, saved_as, dtype
):
    """The decay of a linear attention is in float32, whatever the files have."""
    config = transformers.OlmoHybridConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
        num_attention_heads=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.OlmoHybridForCausalLM(config).to(saved_as)
    model.save_pretrained(tmp_path)
    kind = dtype or saved_as
    expected = type(model).from_pretrained(tmp_path, dtype=kind)
    decay = "model.layers.0.linear_attn.A_log"
    assert expected.state_dict()[decay].dtype is torch.float32
    assert expected.dtype is kind
    streamed = stagehand.load(tmp_path, vram_budget="1MB", dtype=dtype)
    runtime_of(streamed).shutdown()
    assert_bitwise_equal(streamed.state_dict(), expected.state_dict(), "state_dict()")


def test_most_weights_may_have_a_type_that_their_constructor_names(sim, tmp_path):
    """XLNet's are `torch.FloatTensor`s, and float32 whatever is asked for."""
    config = transformers.XLNetConfig(
        vocab_size=8, d_model=16, n_layer=2, n_head=2, d_inner=8
    )
    with torch.random.fork_rng(devices=[]):
        transformers.XLNetModel(config).save_pretrained(tmp_path)
    expected = transformers.XLNetModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = {p.dtype for p in expected.parameters()}
    assert found == {torch.bfloat16, torch.float32}
    streamed = stagehand.load(tmp_path, vram_budget="1MB", dtype=torch.bfloat16)
    runtime_of(streamed).shutdown()
    assert_bitwise_equal(streamed.state_dict(), expected.state_dict(), "state_dict()")


class Scaled(ConversionOps):
    """Codes times their scales: what is rounded first decides the last bits."""

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        codes, scales = (input_dict[pattern][0] for pattern in source_patterns)
        return {target_patterns[0]: (codes.float() * scales).to(scales.dtype)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_class_computes_its_weights_from_is_cast_before(
    sim, tmp_path, monkeypatch, dtype
):
    """As `from_pretrained` does, with codes in integers, too."""
    first = original(LLAMA)
    converter = WeightConverter(
        ["o_proj.codes", "o_proj.scales"], "o_proj.weight", [Scaled()]
    )
    mapping = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda kind: [converter] if kind == "llama" else mapping(kind),
    )
    tensors = dict(first.state_dict())
    for name in [n for n in tensors if n.endswith("o_proj.weight")]:
        weight = tensors.pop(name)
        scales = weight.abs().amax(1, keepdim=True) / 127
        stem = name.removesuffix("weight")
        tensors[stem + "codes"] = (weight / scales + 128).to(torch.uint8)
        tensors[stem + "scales"] = scales
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    first.config.save_pretrained(tmp_path)
    expected = type(first).from_pretrained(tmp_path, dtype=dtype)
    model = stagehand.load(type(first), tmp_path, vram_budget="1MB", dtype=dtype)
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), expected.state_dict(), "state_dict()")


def test_module_of_the_users_making_keeps_the_types_of_the_files(sim, saved):
    """Its constructor did not know them."""
    folder = saved(T5, torch.bfloat16)
    first = original(T5)
    with torch.device("meta"):
        model = type(first)(first.config)
    assert model.dtype is torch.float32
    stagehand.load(model, folder, vram_budget="1MB")
    runtime_of(model).shutdown()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("saved_as", [torch.float32, torch.bfloat16])
def test_table_that_a_constructor_casts_to_torchs_default_type_has_the_weights(
    sim, saved, saved_as
):
    """`from_pretrained` sets that for all threads; here it is as it was."""
    folder = saved(M2M_100, saved_as)
    model = stagehand.load(folder, vram_budget="1MB", dtype=torch.bfloat16)
    expected = opened(M2M_100, folder, torch.bfloat16)
    with torch.no_grad():
        inputs = inputs_of(M2M_100, "hpu", torch.bfloat16)
        wanted = flatten(M2M_100.call(expected.to("hpu"), inputs))
        found = flatten(M2M_100.call(model, inputs))
    assert_bitwise_equal(found, wanted, "output")
    runtime_of(model).shutdown()
    found, wanted = dict(model.named_buffers()), dict(expected.cpu().named_buffers())
    assert wanted["model.encoder.embed_positions.weights"].dtype is torch.bfloat16
    assert_bitwise_equal(found, wanted, "buffers")


def test_scratch_is_deleted_with_a_model_that_is_dropped(sim, saved, tmp_path):
    model = stagehand.load(saved(MIXTRAL), scratch_dir=tmp_path, vram_budget="800KB")
    assert list(tmp_path.iterdir())
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["drop", "shutdown"])
@pytest.mark.parametrize("made", ["computed", "decoded"])
def test_scratch_outlives_a_forked_process_that_ends_its_copy_of_the_model(
    tmp_path, made, way
):
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).bfloat16()
    (source := tmp_path / "source").mkdir()
    (scratch := tmp_path / "scratch").mkdir()
    save_file(plain.state_dict(), source / "model.safetensors")
    options = {"scratch_dir": scratch, "device": "cpu"}
    if made == "computed":
        model = stagehand.load(plain, source, dtype=torch.float32, **options)
    else:
        convert_to_packed(source, packed := tmp_path / "packed")
        model = stagehand.layer(plain, device="cpu")
        runtime_of(model).convert_registry_to_file_backed_sharded(
            packed, scratch_dir=scratch
        )
    files = sorted(scratch.rglob("*"))
    assert files
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if way == "shutdown":
                runtime_of(model).shutdown()
            del model, plain
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(scratch.rglob("*")) == files
    runtime_of(model).shutdown()
    assert not list(scratch.iterdir())


def test_scratch_in_a_relative_place_is_deleted_from_wherever_the_process_went(
    sim, saved, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = stagehand.load(saved(MIXTRAL), scratch_dir=".", vram_budget="800KB")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    runtime_of(model).shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_scratch_is_deleted_if_the_budget_is_too_small(sim, saved, tmp_path):
    least(saved(MIXTRAL), scratch_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_much_scratch_in_the_default_place_is_told(sim, saved, monkeypatch):
    monkeypatch.setattr(stagehand.decoding, "_QUIET_BYTES", 1000)
    with pytest.warns(StagehandWarning, match=r"scratch_dir.*on a fast disk"):
        model = stagehand.load(saved(MIXTRAL), vram_budget="800KB")
    runtime_of(model).shutdown()


def test_scratch_without_room_is_refused(sim, saved, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"1\.00 KB free: expected .* scratch_dir"
    ):
        stagehand.load(saved(MIXTRAL), scratch_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_tied_weights_with_two_values_are_parted_as_from_pretrained_does(
    sim, saved, tmp_path
):
    original(GPT2).save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["lm_head.weight"] = values["transformer.wte.weight"] + 1
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    expected = opened(GPT2, tmp_path, torch.float32)
    assert expected.lm_head.weight is not expected.transformer.wte.weight
    with pytest.warns(StagehandWarning, match=r"two values: they are not tied"):
        model = stagehand.load(tmp_path, vram_budget="400KB")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), expected.state_dict(), "state_dict()")


# Nothing else is touched


def test_other_threads_see_nothing_of_a_load(sim, net_file):
    seen = []

    class Watched(Net):
        def __init__(self) -> None:
            super().__init__()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    def look() -> None:
        weight = nn.Linear(4, 4).weight
        seen.append((weight.device.type, weight.dtype, torch.get_default_dtype()))

    model = stagehand.load(Watched, net_file, vram_budget="20KB")
    runtime_of(model).shutdown()
    assert seen == [("cpu", torch.float32, torch.float32)]
    assert nn.Linear(4, 4).weight.device.type == "cpu"


def test_model_of_models_is_built_without_setting_torchs_default_type(
    sim, tmp_path, monkeypatch
):
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**GROUPED),
        image_token_id=5,
    )
    with torch.random.fork_rng(devices=[]):
        llava = transformers.LlavaForConditionalGeneration(config).bfloat16()
    llava.save_pretrained(tmp_path)
    expected = type(llava).from_pretrained(tmp_path)
    monkeypatch.setattr(torch, "set_default_dtype", None)
    model = stagehand.load(tmp_path, vram_budget="400KB")
    inputs = {
        "input_ids": torch.tensor([[1] + [5] * 16 + [7, 8, 9]]),
        "pixel_values": images()["pixel_values"][:1].bfloat16(),
    }
    with torch.no_grad():
        wanted = expected.to("hpu")(**to_device(inputs, "hpu"))
        assert_bitwise_equal(model(**inputs), wanted, "output")
    runtime_of(model).shutdown()
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.model.language_model.config.dtype is torch.bfloat16


def test_failed_constructor_leaves_torch_as_it_was(net_file):
    def fail() -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stagehand.load(fail, net_file)
    assert nn.Linear(4, 4).weight.device.type == "cpu"


# Memory

_SCRIPT = """
import json, sys
import torch
from torch import nn

import stagehand

BLOCKS, WIDTH = 40, 1024  # 4 MiB a block, 160 MiB in all


def resident():
    # Anonymous memory: what the program holds, not the page cache. Page by page:
    # RssAnon is an estimate, off by megabytes where there are many cores.
    with open("/proc/self/smaps_rollup") as lines:
        [line] = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(BLOCKS):
            self.blocks.append(nn.Linear(WIDTH, WIDTH, bias=False))
            nn.init.orthogonal_(self.blocks[-1].weight)
            peaks.append(resident())

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            peaks.append(resident())
        return x


peaks = []
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
expected = x = torch.randn(2, WIDTH, generator=generator)
from safetensors.torch import save_file
for number in range(BLOCKS):  # a file for each, so that the whole is never in memory
    weight = torch.randn(WIDTH, WIDTH, generator=generator) * 0.05
    path = sys.argv[1] + f"/{number}.safetensors"
    save_file({"blocks.%d.weight" % number: weight}, path)
    with torch.no_grad():
        expected = torch.tanh(nn.functional.linear(expected, weight))
del weight
torch.empty(1, device="meta").normal_()  # brings the compiler along, before torch 2.13
before = resident()
model = stagehand.load(Stack, sys.argv[1], ram_budget="16MB", device="cpu")
with torch.no_grad():
    same = all(torch.equal(model(x), expected) for _ in range(2))
model._stagehand_layer_runtime.shutdown()
peaks.append(resident())
print(json.dumps({"same": same, "grown": max(peaks) - before}))
"""


def test_model_of_ten_times_its_memory_budget_is_never_whole_in_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SCRIPT, str(tmp_path)],
        # Else what is freed in pieces of this size does not go back to the system.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["grown"] < 16_000_000 + 8_000_000


def test_tensors_at_odd_addresses_are_read_right(sim, tmp_path):
    header: dict[str, Any] = {"odd": {"dtype": "U8", "shape": [1]}}
    header["odd"]["data_offsets"] = [0, 1]
    data = b"."
    for name, tensor in net().state_dict().items():
        raw = tensor.numpy().tobytes()
        kind = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape)}
        header[name]["data_offsets"] = offsets
        data += raw
    text = json.dumps(header).encode()
    file = tmp_path / "odd.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.warns(StagehandWarning, match="copied to host memory"):
        model = stagehand.load(Net, file, vram_budget="20KB")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), net().state_dict(), "state_dict()")


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "own"

    def __init__(self, depth=6, **options):
        super().__init__(**options)
        self.depth = depth


class Own(transformers.PreTrainedModel):
    """A user's model, of a kind that no `AutoConfig` knows."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = stack(config.depth)
        self.post_init()


class Counting(Own):
    """Has a buffer that its checkpoints may lack."""

    _keys_to_ignore_on_load_missing = ("count",)

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("count", torch.arange(4))


def test_buffer_that_a_checkpoint_may_lack_is_the_constructors(sim, tmp_path):
    saved = Counting(OwnConfig(depth=3))
    saved.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    del values["count"]
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    options = {"vram_budget": "20KB", "device": "hpu", "scratch_dir": tmp_path}
    model = stagehand.load(Counting, tmp_path, **options)
    assert not list(tmp_path.glob("stagehand-*"))  # it is not written for that
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), saved.state_dict(), "values")


class Windowed(transformers.PreTrainedModel):
    """Fills its buffer in where its library gives weights their first values."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = stack(config.depth)
        self.register_buffer("window", torch.empty(64), persistent=False)
        self.post_init()

    def _init_weights(self, module):
        if module is self:
            values = torch.hann_window(64) * torch.tensor([1 / 3])
            initialization.copy_(self.window, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffer_that_a_class_fills_in_is_computed_in_full_precision(
    sim, tmp_path, dtype
):
    """`from_pretrained()` lets it do that when the model is built."""
    Windowed(OwnConfig(depth=3)).save_pretrained(tmp_path)
    expected = Windowed.from_pretrained(tmp_path, dtype=dtype)
    assert expected.window.dtype is dtype
    model = stagehand.load(Windowed, tmp_path, vram_budget="20KB", dtype=dtype)
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.window, expected.window, "window")


def test_kind_of_several_classes_is_the_one_that_was_saved(sim, tmp_path):
    config = transformers.FunnelConfig(
        vocab_size=16, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=16
    )
    saved = transformers.FunnelBaseModel(config)
    saved.save_pretrained(tmp_path)
    model = stagehand.load(transformers.AutoModel, tmp_path, vram_budget="100KB")
    assert type(model) is transformers.FunnelBaseModel
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), saved.state_dict(), "values")


def test_class_says_of_what_kind_its_configuration_is(sim, tmp_path):
    """The library was asked, which knows its own and those that are registered."""
    plain = Own(OwnConfig(depth=3))
    plain.save_pretrained(tmp_path)
    model = stagehand.load(Own, tmp_path, vram_budget="20KB", device="hpu")
    assert len(model.layers) == 3
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), plain.state_dict(), "values")


def test_architecture_that_is_not_known_is_loaded_by_the_kind_of_its_class(
    sim, saved, tmp_path
):
    """Files of other makers name classes of their own where the library has others."""
    original(LLAMA).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["TheirsForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'TheirsForCausalLM'.*AutoModel class"):
        stagehand.load(tmp_path)
    kind = transformers.AutoModelForCausalLM
    model = stagehand.load(kind, tmp_path, vram_budget="400KB")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), original(LLAMA).state_dict(), "values")


def test_file_beside_the_models_own_is_not_read(sim, saved, tmp_path):
    original(LLAMA).save_pretrained(tmp_path)
    beside = {"model.norm.weight": torch.zeros(64)}
    save_file(beside, tmp_path / "adapter_model.safetensors")
    model = stagehand.load(tmp_path, vram_budget="400KB")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), original(LLAMA).state_dict(), "values")


# Bad input


def spoiled(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    values = load_file(folder / "net.safetensors")
    change(values)
    save_file(values, folder / "net.safetensors")


def test_missing_tensors_are_listed_with_what_is_near(net_file):
    def rename(values: dict[str, torch.Tensor]) -> None:
        values["layers.3.weights"] = values.pop("layers.3.weight")
        del values["embed.weight"]

    spoiled(net_file.parent, rename)
    with pytest.raises(MissingTensorError) as caught:
        stagehand.load(Net, net_file)
    assert "2 of " in str(caught.value)
    assert "'embed.weight' expected torch.float32 [16, 32]" in str(caught.value)
    assert "nearest 'layers.3.weights'" in str(caught.value)


def test_tensor_of_another_shape_is_named(net_file):
    spoiled(
        net_file.parent, lambda v: v.update({"layers.3.weight": torch.ones(32, 31)})
    )
    with pytest.raises(
        TensorMismatchError, match=r"'layers.3.weight'.*\[32, 32\], found.*\[32, 31\]"
    ):
        stagehand.load(Net, net_file)


def test_refused_module_keeps_its_weights(net_file):
    spoiled(net_file.parent, lambda v: v.pop("embed.weight"))
    model = net()
    with pytest.raises(MissingTensorError):
        stagehand.load(model, net_file)
    assert_bitwise_equal(model.state_dict(), net().state_dict(), "state_dict()")


class Noise(nn.Linear):
    """Has random values that no file has."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        if kind == "drawn":
            self.register_buffer("noise", torch.randn(4) * 2, persistent=False)
        elif kind == "drawn in place":
            self.register_buffer("noise", torch.zeros(4).normal_(), persistent=False)
        elif kind == "uninitialized":
            self.register_buffer("noise", torch.empty(4), persistent=False)
        else:
            self.noise = torch.zeros(4).uniform_()


@pytest.mark.parametrize(
    "kind", ["drawn", "drawn in place", "uninitialized", "attribute"]
)
def test_value_that_nobody_knows_is_refused(kind, tmp_path):
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(MissingTensorError, match=r"1 tensors without a value: 'noise'"):
        stagehand.load(functools.partial(Noise, kind), tmp_path)


def test_constructor_that_reads_its_weights_is_refused(tmp_path):
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.largest = model.weight.max().item()
        return model

    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"build cannot be built without its weights"):
        stagehand.load(build, tmp_path)


def test_tied_weights_with_two_values_are_refused_in_a_plain_module(net_file):
    spoiled(net_file.parent, lambda v: v.update({"head.weight": v["embed.weight"] + 1}))
    with pytest.raises(TensorMismatchError, match=r"one value for both, found two"):
        stagehand.load(Net, net_file)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.bfloat16(), lambda w: w[:, :-1].clone()],
    ids=["type", "shape"],
)
def test_tied_weights_of_two_forms_are_two_values(change, net_file):
    spoiled(net_file.parent, lambda v: v.update({"head.weight": change(v[EMBED])}))
    with pytest.raises(TensorMismatchError, match=r"'head.weight' are one tensor of"):
        stagehand.load(Net, net_file)


def test_tied_weights_may_both_be_mapped_to_one(sim, net_file):
    model = stagehand.load(Net, net_file, key_map={"head.weight": EMBED})
    runtime_of(model).shutdown()
    assert model.head.weight is model.embed.weight
    assert_bitwise_equal(model.state_dict(), net().state_dict(), "values")


class SelfTied(Own):
    """Has one weight under two names in the same module."""

    _tied_weights_keys = {"other": "one"}  # noqa: RUF012 - as the library wants it

    def __init__(self, config):
        super().__init__(config)
        self.one = nn.Parameter(torch.ones(4))
        self.other = self.one


def test_tied_weights_of_one_module_with_two_values_are_refused(sim, tmp_path):
    SelfTied(OwnConfig(depth=3)).save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values |= {"one": torch.ones(4), "other": torch.zeros(4)}
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TensorMismatchError, match=r"'one' and 'other' .*untie them"):
        stagehand.load(SelfTied, tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": 96}, r"that is computed .*expected \[.*\], found \["),
        ({}, r"cannot be made of .* tensors of the checkpoint, '.*experts\.0\."),
    ],
    ids=["of another size", "of two sizes"],
)
def test_experts_that_do_not_fit_are_named(sim, saved, tmp_path, changes, problem):
    original(MIXTRAL).save_pretrained(tmp_path)
    if changes:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    else:
        values = load_file(tmp_path / "model.safetensors")
        name = next(n for n in values if "experts.1.w1" in n)
        values[name] = values[name][:-1].clone()
        save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TensorMismatchError, match=problem):
        stagehand.load(tmp_path)


def test_auto_class_without_a_class_for_the_configuration_is_refused(saved):
    with pytest.raises(ConfigError, match=r"no model class is known for a LlamaConfig"):
        stagehand.load(transformers.AutoModelForSeq2SeqLM, saved(LLAMA))


def test_scratch_that_cannot_be_written_is_named_and_leaves_nothing(
    sim, saved, tmp_path, monkeypatch
):
    def add(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SafetensorsBody, "add", add)
    with pytest.raises(
        CheckpointError, match=r"000000\.safetensors cannot be written: .*No space"
    ):
        stagehand.load(saved(MIXTRAL), scratch_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_directory_of_another_format_is_refused(tmp_path):
    torch.save(net().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"found pytorch_model\.bin, which is not read"
    ):
        stagehand.load(Net, tmp_path)


def test_missing_shard_is_named(saved, tmp_path):
    original(LLAMA).save_pretrained(tmp_path, max_shard_size="300KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(IndexMismatchError, match=lost.name):
        stagehand.load(tmp_path)


def llama_directory(folder: Path, **changes: Any) -> Path:
    original(LLAMA).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["NoSuchModel"]}, r"'NoSuchModel', which transformers"),
        ({"_class_name": "NoSuchModel"}, r"'NoSuchModel', which diffusers"),
        ({"model_type": "no-such-type"}, r"is not usable: .*no-such-type"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"is quantized"),
        ({"architectures": [5]}, r"config\.json' .*'architectures' .*, found \[5\]"),
        ({"architectures": "Net"}, r"to be a list of texts, found 'Net'"),
        ({"_class_name": 5}, r"config\.json' .*'_class_name' to be a text, found 5"),
        ({"model_type": 5}, r"config\.json' .*'model_type' to be a text, found 5"),
        ({"dtype": "no-such-type"}, r"is not usable: .*no-such-type"),
        ({"num_attention_heads": 0}, r"is not usable: .*zero"),
        ({"hidden_act": "no"}, r"no model can be built from .*: KeyError: 'no'"),
        ({"architectures": ["AutoModel"]}, r"no model can be built from .*: OSError"),
    ],
)
def test_model_that_cannot_be_built_is_refused(changes, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        stagehand.load(llama_directory(tmp_path, **changes))


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_generation_settings_that_are_none_are_refused(text, tmp_path):
    folder = llama_directory(tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json in .*remove it"):
        stagehand.load(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("{", r"the configuration in .* is not usable"),
        ("[1]", r"no model can be built from .*: AttributeError"),
        ({"norm_num_groups": 3}, r"no model can be built from .*: ValueError"),
        ({"quantization_config": {"quant_method": "no"}}, r"quantized, .*diffusers"),
    ],
    ids=["broken", "list", "of no use", "quantized"],
)
def test_diffusers_model_that_cannot_be_built_is_refused(changes, problem, tmp_path):
    model = original(UNETS[0])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    if isinstance(changes, dict):
        changes = json.dumps(json.loads(file.read_text()) | changes)
    file.write_text(changes)
    with pytest.raises(ConfigError, match=problem):
        stagehand.load(type(model), tmp_path)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, r"expected a config\.json, found none"),
        ({"config.json": "{"}, r"found none that can be read"),
        ({"config.json": "[" * 100_000}, r"found none that can be read"),
        ({"config.json": "null"}, r"config\.json' .*a JSON object, found a NoneType"),
        ({"config.json": '["model_type"]'}, r"a JSON object, found a list"),
        ({"config.json": "{}"}, r"does not say what the model is"),
        (
            {"config.json": '{"model_type": "bert", "hidden_size": "wide"}'},
            r"the configuration in .* is not usable: .*'hidden_size'",
        ),
        ({"model_index.json": "{}"}, r"this is a pipeline"),
        (
            {"model.safetensors": ""},
            r"pass what builds the model .* checkpoint_dir: ex",
        ),
    ],
    ids=[
        "empty",
        "broken",
        "deep",
        "null",
        "list",
        "silent",
        "mistyped",
        "pipeline",
        "weights",
    ],
)
def test_directory_without_a_model_is_refused(files, problem, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        stagehand.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["some/model"], r"does not exist, and nothing is downloaded"),
        ([__file__], r"to stream a file, pass what builds the model first"),
        (["some/model", Net], r"checkpoint_dir is Net: expected the path"),
    ],
    ids=["a name of the hub", "a file", "swapped"],
)
def test_arguments_that_are_taken_for_another_are_refused_with_what_to_do(
    arguments, problem
):
    with pytest.raises(ConfigError, match=problem):
        stagehand.load(*arguments)


def test_model_without_a_place_of_its_files_is_refused():
    with pytest.raises(ConfigError, match=r"needs checkpoint_dir.*given Net"):
        stagehand.load(Net)


@pytest.mark.parametrize("given", [3, [Net], None])
def test_what_is_no_model_is_refused(given, net_file):
    with pytest.raises(ConfigError, match=r"expected a directory, a module"):
        stagehand.load(given, net_file)


def test_function_that_returns_no_module_is_refused(net_file):
    with pytest.raises(ConfigError, match=r"returned a dict: expected a module"):
        stagehand.load(dict, net_file)


def test_streamed_model_is_refused_and_stays_whole(net_file):
    model = stagehand.layer(net(), vram_budget="20KB", device="cpu")
    with pytest.raises(ConfigError, match="is streamed already"):
        stagehand.load(model, net_file)
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), net().state_dict(), "state_dict()")


def test_unknown_option_is_refused_before_anything_is_built(net_file):
    model = net()
    with pytest.raises(TypeError, match=r"load\(\) got an unexpected .*'vram_buget'"):
        stagehand.load(model, net_file, vram_buget="1GB")
    assert not model.embed.weight.is_meta


def test_model_with_code_in_its_directory_is_refused(tmp_path):
    folder = llama_directory(
        tmp_path,
        model_type="mine",
        auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"},
    )
    (folder / "mine.py").write_text("raise SystemExit")
    with pytest.raises(ConfigError, match="is not usable"):
        stagehand.load(folder)


def test_scratch_directory_that_is_not_there_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"scratch_dir is '.*no'"):
        stagehand.load(saved(MIXTRAL), scratch_dir=tmp_path / "no")
