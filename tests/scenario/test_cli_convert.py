"""`stagehand convert`, and models of `transformers` from what it wrote."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import runtime_of
from stagehand.cli.command import app
from stagehand.stores.squareq import SquareQ
from stagehand.stores.squareq_layout import dequantized

TOKENS = torch.arange(8)[None]


@pytest.fixture
def invoke(sim, monkeypatch):
    """Run the command line in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A language model of bfloat16 weights, with its head tied to its embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    path = tmp_path_factory.mktemp("source")
    model.save_pretrained(path)
    return path


def output(model, place):
    with torch.no_grad():
        return model(TOKENS.to(place)).logits.cpu()


def resident(source, place, folder=None):
    """The model as `transformers` loads it, with quantized weights multiplied out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16
    )
    slab = None if folder is None else SquareQ.open(folder)
    for name, layer in {} if slab is None else slab.layers.items():
        weight = dequantized(
            layer.codes_of(slab.files),
            layer.scales,
            layer.zeros,
            columns=layer.rows.columns,
            dtype=torch.bfloat16,
        )
        with torch.no_grad():
            model.get_submodule(name).weight.copy_(weight)
    if slab is not None:
        slab.files.close()
    return model.to(place)


@pytest.mark.parametrize("shards", [(), ("--max-shard-size", "200KB")])
@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_packed_model_is_loaded_in_one_line_and_bitwise(
    invoke, source, tmp_path, place, shards
):
    result = invoke("--packed", *shards, source, tmp_path / "packed")
    assert result.exit_code == 0, result.output
    index = tmp_path / "packed" / "model.safetensors.index.json"
    assert index.exists() == bool(shards)
    assert "22 tensors packed" in result.output
    model = stagehand.load(tmp_path / "packed", vram_budget="500KB", device=place)
    expected = output(resident(source, place), place)
    for _ in range(3):
        assert_bitwise_equal(output(model, place), expected, "logits")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_quantized_model_is_loaded_in_one_line_and_exact(
    invoke, source, tmp_path, place
):
    target = tmp_path / "quantized"
    result = invoke(source, target)
    assert result.exit_code == 0, result.output
    assert "21 tensors quantized" in result.output
    model = stagehand.load(target, vram_budget="500KB", device=place)
    expected = output(resident(source, place, target), place)
    for _ in range(3):
        assert_bitwise_equal(output(model, place), expected, "logits")
    runtime_of(model).shutdown()


def test_quantized_model_is_frozen_and_runs_without_more_ado(invoke, source, tmp_path):
    invoke(source, tmp_path / "quantized")
    model = stagehand.load(tmp_path / "quantized", vram_budget="500KB")
    model(TOKENS.to("hpu"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not {name for name in trained if "proj" in name}
    assert "model.norm.weight" in trained
    runtime_of(model).shutdown()


def test_copy_that_is_no_smaller_is_said_to_be_none(invoke, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64, 64)}, path)
    result = invoke("--packed", path, tmp_path / "packed")
    assert result.exit_code == 0, result.output
    assert "no smaller: --packed packs weights of bfloat16" in result.stderr
    assert torch.equal(
        load_file(tmp_path / "packed" / path.name)["a"], torch.ones(64, 64)
    )


@pytest.mark.parametrize("options", [("--packed",), ()])
def test_source_that_is_none_is_refused_in_one_line(invoke, tmp_path, options):
    result = invoke(*options, tmp_path, tmp_path / "target")
    assert result.exit_code == 2
    assert result.output.strip().startswith("stagehand: ")
    assert str(tmp_path) in result.output
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_packed_shards_back_a_model_that_is_there(invoke, source, tmp_path, place):
    invoke("--packed", "--max-shard-size", "200KB", source, tmp_path / "packed")
    expected = output(resident(source, place), place)
    model = stagehand.layer(resident(source, "cpu"), vram_budget="500KB", device=place)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path / "packed")
    for _ in range(2):
        assert_bitwise_equal(output(model, place), expected, "logits")
    runtime_of(model).shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--packed", "--only", "x"), "leave out either"),
        (("--max-shard-size", "5GB"), "SquareQ v2 is one file"),
        (("--packed", "--max-shard-size", "5"), "max_shard_size is '5'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    invoke, source, tmp_path, options, words
):
    result = invoke(*options, source, tmp_path / "target")
    assert result.exit_code == 2
    assert words in result.output
    assert not (tmp_path / "target").exists()


def test_only_chooses_what_is_quantized(invoke, source, tmp_path):
    result = invoke("--only", "mlp", source, tmp_path / "target")
    assert result.exit_code == 0, result.output
    assert "9 tensors quantized" in result.output
