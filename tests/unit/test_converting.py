"""What `stagehand convert` writes others can read, and what fails leaves nothing."""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stagehand.core.layout import same_bits
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    ReadError,
    TruncatedShardError,
)
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.converting import convert_to_packed, convert_to_squareq
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import packed_name, packed_weights
from stagehand.stores.packing import pack
from stagehand.stores.writing import replaced, safetensors_file
from stagehand.units import parse_bytes

CONVERSIONS = [convert_to_packed, convert_to_squareq]


def normal(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def tensors():
    """Of all element sizes, in odd numbers."""
    return {
        "a.weight": normal(257, 130),
        "a.bias": normal(257),
        "b.weight": normal(64, 257),
        "conv.weight": normal(8, 3, 5, 5),
        "embed.weight": normal(30, 64),
        "norm.weight": normal(65, dtype=torch.float32),
        "table": torch.arange(7),
        "flags": torch.tensor([True, False, True]),
        "half": normal(33, dtype=torch.float16),
        "nothing": torch.zeros(0, 4).bfloat16(),
        "one": torch.tensor(3.0, dtype=torch.float64),
        "eight": normal(5, 5, dtype=torch.float32).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "it"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    return folder


def shards(folder):
    """The same in two files with an index."""
    made = tensors()
    names = list(made)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    weight_map = {}
    for file, mine in parts.items():
        save_file({name: made[name] for name in mine}, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    text = str({"weight_map": weight_map}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(text)


# ------------------------------------------------------------------------------ writes


def decoded(path):
    """All tensors of a packed file, under their own names."""
    checkpoint = Checkpoint.open(path)
    files = FileSet(checkpoint.files)
    weights = packed_weights(checkpoint, files)
    found = {name: weight.decoded(files) for name, weight in weights.items()}
    stored = {packed_name(w.name, w.shape) for w in weights.values()}
    files.close()
    held = load_file(path)
    found.update({name: held[name] for name in held if name not in stored})
    return found, len(weights)


def test_packed_checkpoint_holds_every_bit(source, tmp_path):
    written = convert_to_packed(source, tmp_path / "target")
    found, packed = decoded(written.path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert same_bits(found[name], tensor)
    assert written.smaller == packed == 2  # the others are too short to shrink
    assert written.plain == len(tensors()) - 2
    assert written.nbytes == written.path.stat().st_size
    assert written.source_bytes == sum(t.nbytes for t in tensors().values())


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_tensors_lie_where_they_can_be_viewed(source, tmp_path, convert):
    written = convert(source, tmp_path / "target")
    for name, extent in Checkpoint.open(written.path).items():
        assert extent.offset % extent.dtype.itemsize == 0, name


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_another_reader_takes_the_file(source, tmp_path, convert):
    written = convert(source, tmp_path / "target")
    with safe_open(written.path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert file.get_tensor(name) is not None


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_configuration_and_tokenizer_come_along(source, tmp_path, convert):
    convert(source, tmp_path / "target")
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"}
    assert not any(name.startswith(".") for name in names)
    pooling = Path("1_Pooling", "config.json")  # without it an encoder would be misread
    text = (tmp_path / "target" / pooling).read_text()
    assert text == (source / pooling).read_text()


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["it"], "it.safetensors"), (["it", "other"], "model.safetensors")],
)
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_files_of_other_names_without_an_index_become_one(
    tmp_path, convert, names, expected
):
    for number, name in enumerate(names):
        held = dict(list(tensors().items())[number :: len(names)])
        save_file(held, tmp_path / f"{name}.safetensors")
    written = convert(tmp_path, tmp_path / "target")
    assert written.path == tmp_path / "target" / expected
    assert written.smaller + written.plain == len(tensors())


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_shards_with_an_index_become_one_file(tmp_path, convert):
    folder = tmp_path / "source"
    folder.mkdir()
    shards(folder)
    written = convert(folder, tmp_path / "target")
    assert written.path.name == "model.safetensors"
    names = {path.name for path in written.path.parent.iterdir()}
    assert not any(name.endswith(".index.json") for name in names)
    if convert is convert_to_packed:
        assert decoded(written.path)[0].keys() == tensors().keys()


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth", ".ckpt"])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_file_of_torch_save_is_converted(tmp_path, convert, suffix):
    path = tmp_path / f"model{suffix}"
    torch.save(tensors(), path)
    written = convert(path, tmp_path / "target")
    assert written.path.name == "model.safetensors"
    assert written.smaller == 2


def save_old(folder, parts):
    """As libraries did before safetensors: files of `torch.save`, with an index."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save({"lr": 1}, folder / "training_args.bin")
    if len(parts) == 1:
        torch.save(parts[0], folder / "pytorch_model.bin")
        return
    weight_map = {}
    for number, part in enumerate(parts):
        torch.save(part, folder / f"pytorch_model-{number}.bin")
        weight_map.update(dict.fromkeys(part, f"pytorch_model-{number}.bin"))
    index = json.dumps({"weight_map": weight_map})
    (folder / "pytorch_model.bin.index.json").write_text(index)


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("count", [1, 3])
def test_folder_of_torch_save_is_converted_with_what_is_beside(
    tmp_path, convert, count
):
    items = list(tensors().items())
    parts = [dict(items[i::count]) for i in range(count)]
    save_old(tmp_path / "source", parts)
    written = convert(tmp_path / "source", tmp_path / "target")
    assert written.path.name == "model.safetensors"
    assert {"config.json", "model.safetensors"} <= names_in(tmp_path / "target")
    if convert is convert_to_packed:
        found, _ = decoded(written.path)
        assert found.keys() == tensors().keys()
        assert all(same_bits(found[n], tensor) for n, tensor in tensors().items())


def test_folder_of_torch_save_is_never_written_to(tmp_path):
    save_old(tmp_path / "source", [tensors()])
    before = names_in(tmp_path / "source")
    with pytest.raises(ConfigError, match="found the source"):
        convert_to_packed(tmp_path / "source", tmp_path / "source")
    assert names_in(tmp_path / "source") == before


def test_files_of_torch_save_that_do_not_fit_each_other_are_refused(tmp_path):
    one = {"a": torch.ones(3)}
    save_old(tmp_path / "twice", [{**one, "b": one["a"]}, one])
    with pytest.raises(CheckpointError, match=r"'a' is in .*-0\.bin and in .*-1\.bin"):
        convert_to_packed(tmp_path / "twice", tmp_path / "target")
    save_old(tmp_path / "short", [one, {"b": one["a"]}])
    (tmp_path / "short" / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"1 are not there: pytorch_model-1\.bin"):
        convert_to_packed(tmp_path / "short", tmp_path / "target")
    assert not (tmp_path / "target").exists()


class Evil:
    """What unpickling runs, if it may."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_file_of_torch_save_runs_no_code(tmp_path, convert):
    path = tmp_path / "model.pt"
    torch.save({"a.weight": Evil(tmp_path / "mark")}, path)
    with pytest.raises(CheckpointError, match="no other objects"):
        convert(path, tmp_path / "target")
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "target").exists()


def test_tensors_of_a_torch_save_are_what_they_were_however_they_lie(tmp_path):
    base = normal(40, 50)
    saved = {
        "turned": base.t(),
        "part": base[3:9, 5:31:2],
        "one": base[7, 7],
        "none": base[:0],
        "channels": normal(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(normal(4)),
        "flag": torch.tensor([True, False]),
    }
    torch.save(saved, tmp_path / "model.pt")
    written = convert_to_packed(tmp_path / "model.pt", tmp_path / "target")
    found, _ = decoded(written.path)
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert same_bits(found[name], tensor.detach())


def rewritten(path, change=lambda name, content: content, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in held.items():
            archive.writestr(name, change(name, content))


def compressed(path):
    torch.save(tensors(), path)
    rewritten(path, how=zipfile.ZIP_DEFLATED)


def in_another_archive(path):
    """Where torch would have put a record says nothing then."""
    torch.save(tensors(), path)
    rewritten(path)


def from_another_machine(path):
    torch.save(tensors(), path)
    rewritten(path, lambda name, it: b"big" if name.endswith("order") else it)


def short_of_a_record(path):
    torch.save({"a.weight": normal(200, 128)}, path)
    rewritten(path, lambda name, it: it[:-2] if name.endswith("data/0") else it)


def with_steps_beyond_64_bits(path):
    torch.save({"a.weight": torch.ones(3, 3)[:, :2]}, path)
    steps, huge = b"K\x03K\x01\x86", b"\x8a\x08" + (1 << 62).to_bytes(8, "little")
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in held.items():
            if "/." not in name:  # what says that records are where torch puts them
                archive.writestr(name, content.replace(steps, huge + steps[2:]))


def under_the_name_of_metadata(path):
    torch.save({"__metadata__": torch.ones(3)}, path)


def under_half_a_letter(path):
    torch.save({"\ud800": torch.ones(3)}, path)


def of_a_type_that_no_file_holds(path):
    torch.save({"a.weight": torch.ones(3, dtype=torch.complex128)}, path)


def in_the_old_format(path):
    torch.save(tensors(), path, _use_new_zipfile_serialization=False)


def with_a_sparse_tensor(path):
    torch.save({"a.weight": torch.eye(3).to_sparse()}, path)


def with_a_conjugate(path):
    torch.save({"a.weight": torch.ones(2, dtype=torch.complex64).conj()}, path)


def on_meta(path):
    torch.save({"a.weight": torch.empty(3, device="meta")}, path)


# Where torch wants the values of each sparse tensor that it reads, as 2.15 does, it is
# torch that refuses.
WANTS_VALUES = bool(signature(torch._utils._validate_loaded_sparse_tensors).parameters)
SPARSE = "'a.weight' .* a dense one .* torch.sparse_coo"
REFUSED_BY_TORCH = "expected dense tensors .* its data is not allocated"


# Some versions of torch warn when they read a sparse tensor.
@pytest.mark.filterwarnings("ignore:.*sparse:UserWarning")
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (compressed, "found record .* compressed"),
        (in_another_archive, "expected 514 bytes at .* found a record of 0"),
        (from_another_machine, "numbers in the byte order 'big'"),
        (short_of_a_record, "'a.weight' .* expected 51200 bytes .* record of 51198"),
        (in_the_old_format, "not a zip file"),
        (with_a_sparse_tensor, REFUSED_BY_TORCH if WANTS_VALUES else SPARSE),
        (with_a_conjugate, "'a.weight' .* not marked as conj.*complex64"),
        (on_meta, "'a.weight' .* a dense one with values"),
        (with_steps_beyond_64_bits, "'a.weight' .* a record of 36"),
        (under_the_name_of_metadata, "'__metadata__' .* rename it"),
        (under_half_a_letter, r"'\\ud800' .* rename it"),
        (of_a_type_that_no_file_holds, "'a.weight' .*complex128: convert"),
    ],
)
def test_torch_save_that_would_be_misread_is_refused(tmp_path, spoil, found):
    path = tmp_path / "model.pt"
    spoil(path)
    with pytest.raises(CheckpointError, match=found) as caught:
        convert_to_packed(path, tmp_path / "target")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("value", [[1, 2], {"a": 5}, {5: torch.ones(2)}])
def test_file_of_other_things_is_refused(tmp_path, value):
    path = tmp_path / "model.pt"
    torch.save(value, path)
    with pytest.raises(CheckpointError, match="a dictionary of tensors by name"):
        convert_to_packed(path, tmp_path / "target")


def test_only_and_exclude_choose_what_is_quantized(source, tmp_path):
    written = convert_to_squareq(source, tmp_path / "1", only=r"^a\.")
    assert written.smaller == 1
    written = convert_to_squareq(source, tmp_path / "2", exclude="")
    assert "embed.qweight" in load_file(written.path)
    written = convert_to_squareq(source, tmp_path / "3", exclude=r"^a\.|embed")
    assert "a.weight" in load_file(written.path)
    with pytest.raises(CheckpointError, match="nothing to quantize"):
        convert_to_squareq(source, tmp_path / "4", only="x")
    with pytest.raises(ConfigError, match="--only '\\(' is not a regular"):
        convert_to_squareq(source, tmp_path / "4", only="(")
    assert not (tmp_path / "4").exists()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_what_float32_cannot_hold_stays_beside_a_quantized_weight(tmp_path, dtype):
    """Biases of quantized layers are written as float32, which rounds these values."""
    values = torch.full((8,), (1 << 24) + 1, dtype=dtype)
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": normal(8, 64), "a.bias": values}, path)
    written = convert_to_squareq(path, tmp_path / "target")
    found = load_file(written.path)["a.bias"]
    assert found.dtype == dtype
    assert torch.equal(found, values)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_progress_ends_with_all_bytes(source, tmp_path, convert):
    seen = []
    convert(source, tmp_path / "target", progress=lambda *told: seen.append(told))
    assert all(0 < done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


# ------------------------------------------------------------------------------ shards


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def decoded_folder(folder):
    """All tensors of packed files, under their own names."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(decoded(path)[0])
    return found


def _stream():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    packed = pack(weight.bfloat16())
    assert packed is not None
    return packed.stream


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            lambda: {"64x64": _stream(), "4096": _stream()},
            "expected one tensor 'a', found another one in the checkpoint; remove one",
        ),
        (lambda: {"64x64": _stream().view(torch.int8)}, "uint8 .* found torch.int8"),
        (lambda: {"64x64": _stream()[None]}, r"in one dimension, found .* \[1, "),
        (lambda: {"64x65": _stream()}, r"4160 weights for \[64, 65\], found 4096"),
        (lambda: {"64x64": _stream()[:5]}, "5 bytes"),
        (lambda: {"64x64": _stream()[:-1]}, "bytes"),
    ],
    ids=["twice", "type", "dimensions", "shape", "head", "end"],
)
def test_tensor_that_is_no_packed_weight_is_named(tmp_path, tensors, message):
    path = tmp_path / "model.safetensors"
    save_file({f"a.packed.bfloat16.{s}": t for s, t in tensors().items()}, path)
    checkpoint = Checkpoint.open(path)
    with (
        contextlib.closing(FileSet(checkpoint.files)) as files,
        pytest.raises(CheckpointError, match=message) as caught,
    ):
        packed_weights(checkpoint, files)
    assert "'a.packed.bfloat16" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [1, 20_000, "80KB", "1TB"])
def test_packed_shards_hold_every_bit_and_no_more_than_the_largest_size(
    source, tmp_path, size
):
    target = tmp_path / "target"
    written = convert_to_packed(source, target, max_shard_size=size)
    found = decoded_folder(target)
    assert found.keys() == tensors().keys()
    assert all(same_bits(found[name], tensor) for name, tensor in tensors().items())
    files = sorted(target.glob("*.safetensors"))
    if size == "1TB":
        assert [file.name for file in files] == ["model.safetensors"]
        assert written.path == files[0]
        return
    assert written.path == target / "model.safetensors.index.json"
    expected = [f"model-{i + 1:05}-of-{len(files):05}" for i in range(len(files))]
    assert [file.stem for file in files] == expected
    document = json.loads(written.path.read_text())
    shards = {file.name: load_file(file) for file in files}
    held = {name: file for file, mine in shards.items() for name in mine}
    assert document["weight_map"] == held
    nbytes = sum(t.nbytes for mine in shards.values() for t in mine.values())
    assert document["metadata"]["total_size"] == nbytes
    assert written.nbytes == sum(file.stat().st_size for file in files)
    most = parse_bytes(size, name="size")
    for file in files:
        mine = decoded(file)[0]
        assert len(mine) == 1 or sum(t.nbytes for t in mine.values()) <= most
    if size == 1:
        assert len(files) == len(tensors())


def test_shard_is_as_large_as_it_may_be_to_the_byte(source, tmp_path):
    names = list(Checkpoint.open(source))
    most = sum(tensors()[name].nbytes for name in names[:5])
    for less in (0, 1):
        target = tmp_path / str(less)
        convert_to_packed(source, target, max_shard_size=most - less)
        first = min(target.glob("*.safetensors"))
        assert decoded(first)[0].keys() == set(names[: 5 - less])


@pytest.mark.parametrize("size", ["5 apples", 0, "-1GB"])
def test_shard_size_that_is_none_is_refused(source, tmp_path, size):
    with pytest.raises(ConfigError, match="max_shard_size is"):
        convert_to_packed(source, tmp_path / "target", max_shard_size=size)
    assert not (tmp_path / "target").exists()


SIZES = {"one file": "1GB", "shards": 20_000, "other shards": 1000}


@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", [*SIZES, "quantized"])
def test_what_was_there_before_is_replaced_whole(source, tmp_path, before, after):
    target, alone = tmp_path / "target", tmp_path / "alone"
    if before == "quantized":
        convert_to_squareq(source, target)
    else:
        convert_to_packed(source, target, max_shard_size=SIZES[before])
    convert_to_packed(source, target, max_shard_size=SIZES[after])
    convert_to_packed(source, alone, max_shard_size=SIZES[after])
    assert names_in(target) == names_in(alone)
    for path in alone.glob("*.safetensors*"):
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_quantized_folder_keeps_no_shards_of_what_was_there_before(source, tmp_path):
    convert_to_packed(source, tmp_path / "target", max_shard_size=1000)
    convert_to_squareq(source, tmp_path / "target")
    convert_to_squareq(source, tmp_path / "alone")
    assert names_in(tmp_path / "target") == names_in(tmp_path / "alone")


@pytest.mark.parametrize("there", [None, "1GB", 20_000])
def test_shards_that_are_not_all_there_are_never_taken_for_a_model(
    source, tmp_path, monkeypatch, there
):
    """The process ends after any number of renames; nothing is tidied up."""
    renames = 0
    replace = Path.replace
    whole = refused = 0
    for last in range(12):
        target = tmp_path / str(last)
        if there is not None:
            convert_to_packed(source, target, max_shard_size=there)
        renames = 0

        def rename(self, other):
            nonlocal renames
            renames += 1
            if renames > last:  # noqa: B023
                raise KeyboardInterrupt
            return replace(self, other)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", rename)
            patched.setattr(Path, "unlink", lambda *_, **__: None)
            patched.setattr(shutil, "rmtree", lambda *_, **__: None)
            with contextlib.suppress(KeyboardInterrupt):
                convert_to_packed(source, target, max_shard_size=1000)
        try:
            found = set(Checkpoint.open(target))
        except CheckpointError:
            refused += 1
            continue
        whole += 1
        own = {name.partition(".packed.")[0] for name in found}
        assert own == set(tensors())
    assert whole >= 1
    assert refused >= 3


@pytest.mark.parametrize("how", ["interrupt", "a target that is a folder"])
def test_failure_in_the_middle_of_many_shards_leaves_none(source, tmp_path, how):
    target = tmp_path / "target"
    target.mkdir()

    def stop(done, total):
        if how == "interrupt" and done > 60_000:
            raise KeyboardInterrupt

    if how != "interrupt":
        (target / "tokenizer.json").mkdir()
    before = names_in(target)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        convert_to_packed(source, target, max_shard_size=1000, progress=stop)
    assert names_in(target) - {"1_Pooling"} == before


def test_failure_in_the_middle_of_many_shards_leaves_the_file_of_before(
    source, tmp_path
):
    written = convert_to_packed(source, tmp_path / "target")
    before = written.path.read_bytes()
    (tmp_path / "target" / "model.safetensors.index.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert_to_packed(source, tmp_path / "target", max_shard_size=1000)
    assert written.path.read_bytes() == before
    assert not any("unfinished" in name for name in names_in(tmp_path / "target"))


@pytest.mark.parametrize("given", ["folder", "index", "shard"])
def test_shards_of_the_source_are_never_replaced(tmp_path, given):
    """They have the names that a conversion of them would write."""
    folder = tmp_path / "source"
    convert = {"max_shard_size": 20_000}
    save_file(tensors(), tmp_path / "model.safetensors")
    convert_to_packed(tmp_path / "model.safetensors", folder, **convert)
    weight_map = {}
    for path in sorted(folder.glob("*.safetensors")):
        plain, _ = decoded(path)
        save_file(plain, path)
        weight_map.update(dict.fromkeys(plain, path.name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    source = {"folder": folder, "index": index, "shard": path}[given]
    with pytest.raises(ConfigError, match="cannot be converted to"):
        convert_to_packed(source, folder, **convert)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ------------------------------------------------------------------------ nothing stays


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("there", [False, True])
def test_disk_without_room_is_refused_at_once(
    source, tmp_path, monkeypatch, convert, there
):
    target = tmp_path / "target"
    if there:
        target.mkdir()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"1\.00 KB free: expected") as caught:
        convert(source, target)
    assert str(target) in str(caught.value)
    assert target.exists() == there
    assert not there or list(target.iterdir()) == []


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_disk_that_cannot_be_asked_for_its_room_is_named(
    source, tmp_path, convert, monkeypatch
):
    def gone(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    with pytest.raises(CheckpointError, match=r"written to: .*Stale") as error:
        convert(source, tmp_path / "target")
    assert str(tmp_path / "target") in str(error.value)
    assert not (tmp_path / "target").exists()


@contextlib.contextmanager
def file_limit(nbytes):
    """Let the system refuse to make any file of this process longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, refused)


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("there", [False, True])
def test_disk_that_fills_up_leaves_nothing(source, tmp_path, convert, there):
    """The system refuses to make the file longer, in the middle of a tensor."""
    target = tmp_path / "target"
    if there:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"old")
    with (
        file_limit(20_000),
        pytest.raises(CheckpointError, match="nothing is left of it") as caught,
    ):
        convert(source, target)
    assert str(target / "model.safetensors") in str(caught.value)
    if there:
        assert [path.name for path in target.iterdir()] == ["model.safetensors"]
        assert (target / "model.safetensors").read_bytes() == b"old"
    else:
        assert not target.exists()


def test_manifest_that_cannot_be_written_takes_its_file_along(source, tmp_path):
    """What is there under its name is a folder."""
    target = tmp_path / "target"
    (target / "model.manifest.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be written"):
        convert_to_squareq(source, target)
    assert names_in(target) - {"1_Pooling"} == {"model.manifest.json"}


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_configuration_that_cannot_be_copied_takes_the_weights_along(
    source, tmp_path, convert
):
    """What is there under its name is a folder, so it cannot be written."""
    target = tmp_path / "target"
    (target / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be written"):
        convert(source, target)
    names = {path.name for path in target.iterdir()}
    assert not {n for n in names if "model" in n or "unfinished" in n}


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_configuration_that_cannot_be_read_takes_the_weights_along(
    source, tmp_path, convert
):
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be copied to"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_source_that_shrinks_meanwhile_is_an_error_and_leaves_nothing(
    source, tmp_path, convert, name
):
    """A mapping of it would end the process, and leave an unfinished file."""
    file = source / name
    torch.save(tensors(), source / "model.pt")

    def shrink(done, total):
        os.truncate(file, 5000)

    message = rf"tensor '\S+' in {re.escape(str(file))} is truncated: expected \d+ b"
    with pytest.raises(TruncatedShardError, match=message):
        convert(file, tmp_path / "target", progress=shrink)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_source_is_never_the_target_under_another_name(source, tmp_path, convert):
    before = (source / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(source)
    for target in (tmp_path / "link", source / "1_Pooling" / ".."):
        with pytest.raises(ConfigError, match="the source"):
            convert(source, target)
    assert (source / "model.safetensors").read_bytes() == before


def test_packed_folder_keeps_no_manifest_of_what_was_there_before(source, tmp_path):
    convert_to_squareq(source, tmp_path / "target")
    written = convert_to_packed(source, tmp_path / "target")
    assert not list((tmp_path / "target").glob("*.manifest.json"))
    assert decoded(written.path)[1] == written.smaller


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_file_of_before_that_cannot_be_removed_is_named(
    source, tmp_path, monkeypatch, convert
):
    target = tmp_path / "target"
    target.mkdir()
    stale = target / "model-00001-of-00002.safetensors"
    stale.write_bytes(b"old")
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path == stale:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    message = re.escape(str(stale)) + ".* cannot be removed .*Permission denied"
    with pytest.raises(CheckpointError, match=message):
        convert(source, target)
    assert len(Checkpoint.open(target / "model.safetensors")) >= len(tensors())


@pytest.mark.parametrize("length", [255, 240])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_name_too_long_to_write_under_another_one_is_an_error_of_ours(
    source, tmp_path, convert, length
):
    path = source / f"{'m' * (length - 12)}.safetensors"
    (source / "model.safetensors").rename(path)
    with pytest.raises(CheckpointError, match=r"safetensors cannot be written .*long"):
        convert(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_path_that_no_system_takes_is_named(source, tmp_path, convert, name):
    with pytest.raises(
        CheckpointError, match="cannot be written to: expected a folder"
    ):
        convert(source, name)
    with pytest.raises(ReadError, match="cannot be read"):
        convert(name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_interrupt_leaves_nothing(source, tmp_path, convert):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "target", progress=stop)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_weights_that_are_not_finite_are_packed_but_not_quantized(tmp_path, convert):
    made = {"a.weight": normal(200, 128)}
    made["a.weight"][7, 3] = torch.nan
    save_file(made, tmp_path / "model.safetensors")
    if convert is convert_to_squareq:
        with pytest.raises(CheckpointError, match=r"'a\.weight' .* in row 7"):
            convert(tmp_path / "model.safetensors", tmp_path / "target")
        assert not (tmp_path / "target").exists()
    else:
        written = convert(tmp_path / "model.safetensors", tmp_path / "target")
        assert same_bits(decoded(written.path)[0]["a.weight"], made["a.weight"])


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_what_is_converted_already_is_refused(source, tmp_path, convert):
    for first in CONVERSIONS:
        target = tmp_path / first.__name__
        first(source, target)
        for given in (target, target / "model.safetensors"):
            with pytest.raises(ConfigError, match="packed or quantized already"):
                convert(given, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_file_beside_the_models_own_is_not_converted(source, tmp_path, convert):
    """An adapter's tensors came along, where `stagehand.load()` leaves them alone."""
    convert(source, tmp_path / "alone")
    save_file({"lora.weight": torch.ones(4, 4)}, source / "adapter_model.safetensors")
    written = convert(source, tmp_path / "target")
    assert written.path.name == "model.safetensors"
    alone = tmp_path / "alone" / "model.safetensors"
    assert Checkpoint.open(written.path).keys() == Checkpoint.open(alone).keys()


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_folder_that_holds_another_model_is_refused(source, tmp_path, convert):
    before = sorted(source.iterdir())
    with pytest.raises(ConfigError, match="found the source"):
        convert(source, source)
    target = tmp_path / "target"
    target.mkdir()
    save_file(tensors(), target / "other.safetensors")
    with pytest.raises(ConfigError, match=r"found other\.safetensors"):
        convert(source, target)
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_target_that_is_a_file_is_refused(source, tmp_path, convert):
    (tmp_path / "target").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder"):
        convert(source, tmp_path / "target")


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_source_that_is_not_there_is_an_error(tmp_path, convert):
    for name in ("none", "none.pt", "none.safetensors"):
        with pytest.raises((ReadError, CheckpointError)):
            convert(tmp_path / name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_file_is_seen_only_when_it_is_complete(tmp_path):
    path = tmp_path / "it.safetensors"
    with safetensors_file(replaced(path), ["a"]) as body:
        body.add("a", torch.ones(4))
        assert not path.exists()
    assert torch.equal(load_file(path)["a"], torch.ones(4))


def test_two_who_write_one_file_at_once_write_it_whole(tmp_path):
    """They may be threads, or processes of one number in two containers."""
    path = tmp_path / "it"
    with replaced(path) as first:
        first.write(b"first")
        with replaced(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_memory_is_that_of_one_tensor(tmp_path):
    """40 weights of 2 MiB each, in a process that may have little more memory."""
    made = {f"{i}.weight": normal(1024, 1024) + i for i in range(40)}
    save_file(made, tmp_path / "model.safetensors")
    code = (
        "import sys, torch\n"
        "from stagehand.stores.converting import *\n"
        "torch.set_num_threads(1)\n"
        # Page by page: RssAnon is an estimate, off by megabytes with many cores.
        "used = lambda: int(next(line for line in open('/proc/self/smaps_rollup')"
        " if line.startswith('Anonymous:')).split()[1])\n"
        "for name in sys.argv[3:]:\n"
        "    convert, target = globals()[name], f'{sys.argv[2]}/{name}'\n"
        "    convert(sys.argv[1], target + '-first')\n"
        "    peak = [used()]\n"
        "    convert(sys.argv[1], target, progress=lambda *_: peak.append(used()))\n"
        "    print(max(peak) - peak[0])\n"
    )
    names = [convert.__name__ for convert in CONVERSIONS]
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.safetensors", tmp_path, *names],
        # What is freed goes back to the system, not to a heap in pieces.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = [int(line) for line in done.stdout.splitlines()]
    assert len(grown) == len(CONVERSIONS)
    assert max(grown) < 10_000  # KiB; all weights are 80_000


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced, sync = tmp_path / "model.safetensors", [], os.fsync

    def seen(number):
        sync(number)
        synced.append((os.fstat(number).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", seen)
    with replaced(path) as file:
        file.write(b"all of it")
    assert synced == [(9, False)]
