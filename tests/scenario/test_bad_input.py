"""Checkpoints that are not what they should be: one clear error, nothing changed.

Whatever can be known when a checkpoint is opened is refused there, with the model left
as it was; what happens to a file in use is refused where its bytes are needed.
"""

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import (
    LAYER_BYTES,
    assert_passes_equal,
    batch,
    run_resident,
    runtime_of,
    stack,
    values,
)
from stagehand import LayerStreamer
from stagehand.decoding import scratch_folder
from stagehand.errors import (
    CheckpointError,
    ConfigError,
    HeaderError,
    IndexMismatchError,
    MissingTensorError,
    OffsetError,
    ReadError,
    ShardChangedError,
    SizeMismatchError,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.converting import convert_to_packed, convert_to_squareq
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import packed_weights
from stagehand.stores.squareq import SquareQ

PLACES = ["hpu", "cpu"]
VICTIM = "3.0.weight"


@pytest.fixture(params=PLACES)
def place(request, sim):
    return request.param


@pytest.fixture
def folder(tmp_path) -> Path:
    """`stack()` in two shards with an index."""
    state = stack().state_dict()
    shards = {"1.safetensors": {}, "2.safetensors": {}}
    for name, tensor in state.items():
        shards["1.safetensors" if name < "3" else "2.safetensors"][name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, tmp_path / shard)
    listed = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_index(tmp_path, listed)
    return tmp_path


def write_index(folder: Path, listed: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(text)


def shard_of(folder: Path) -> Path:
    """The file with the victim in it."""
    return folder / "2.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a shard's header, and nothing of its data."""
    content = shard_of(folder).read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + content[8 + length :]
    shard_of(folder).write_bytes(whole)


def change_victim(field: str, value: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        rewrite(folder, lambda header: header[VICTIM].__setitem__(field, value))

    return spoil


def cut(nbytes: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        os.truncate(shard_of(folder), nbytes)

    return spoil


def shift(by: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        def move(header: dict[str, Any]) -> None:
            start, end = header[VICTIM]["data_offsets"]
            header[VICTIM]["data_offsets"] = [start + by, end + by]

        rewrite(folder, move)

    return spoil


def save_other(tensor: torch.Tensor) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        state = {k: v for k, v in stack().state_dict().items() if k >= "3"}
        save_file({**state, VICTIM: tensor}, shard_of(folder))

    return spoil


def without(folder: Path) -> None:
    state = {k: v for k, v in stack().state_dict().items() if k >= "3"}
    del state[VICTIM]
    save_file(state, shard_of(folder))
    write_index(
        folder,
        {
            n: "1.safetensors" if n < "3" else "2.safetensors"
            for n in stack().state_dict()
            if n != VICTIM
        },
    )


def absent(folder: Path) -> None:
    listed = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, {**listed["weight_map"], "9.0.weight": "2.safetensors"})


def twice_without_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file({VICTIM: torch.zeros(1)}, folder / "3.safetensors")


def duplicate(folder: Path) -> None:
    one = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
    text = f'{{"{VICTIM}": {one}, "{VICTIM}": {one}}}'.encode()
    shard_of(folder).write_bytes(struct.pack("<Q", len(text)) + text)


# What is wrong, the error, and what it has to say.
BAD: dict[str, tuple[Callable[[Path], None], type[CheckpointError], str]] = {
    "cut off in its header": (cut(60), HeaderError, r"2\.safetensors.*announce"),
    "empty": (cut(0), HeaderError, r"2\.safetensors.*at least 8 bytes, found 0"),
    "cut off in its data": (
        cut(5000),
        TruncatedShardError,
        r"2\.safetensors is truncated: expected \d+ bytes.*found \d+.*from tensor '",
    ),
    "length beyond the file": (
        lambda f: shard_of(f).write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        HeaderError,
        r"2\.safetensors.*1099511627776 bytes",
    ),
    "tensor beyond the file": (
        shift(1 << 20),
        OffsetError,
        r"2\.safetensors lies at bytes \[.*expected it to start at",
    ),
    "overlap": (shift(-4), OffsetError, r"2\.safetensors lies at bytes"),
    "another dtype in the header": (
        change_victim("dtype", "F64"),
        SizeMismatchError,
        f"'{VICTIM}' in .*2.safetensors is F64.*expected 8192 bytes, found 4096",
    ),
    "unknown dtype": (
        change_victim("dtype", "F7"),
        HeaderError,
        f"'{VICTIM}' in .*2.safetensors has dtype 'F7'",
    ),
    "another shape in the header": (
        change_victim("shape", [32, 31]),
        SizeMismatchError,
        rf"'{VICTIM}'.*\[32, 31\]: expected 3968 bytes, found 4096",
    ),
    "another dtype": (
        save_other(torch.zeros(32, 32, dtype=torch.float64)),
        TensorMismatchError,
        f"'{VICTIM}' in .*2.safetensors.*expected torch.float32.*found torch.float64",
    ),
    "another shape": (
        save_other(torch.zeros(32, 16)),
        TensorMismatchError,
        rf"'{VICTIM}' in .*2.safetensors.*\[32, 32\], found torch.float32 \[32, 16\]",
    ),
    "missing shard": (
        lambda f: shard_of(f).unlink(),
        IndexMismatchError,
        r"index.json names 2 files, of which 1 are not there: 2\.safetensors",
    ),
    "index names an absent tensor": (
        absent,
        IndexMismatchError,
        r"1 are not in their files: '9\.0\.weight' in 2\.safetensors",
    ),
    "one name in two files": (
        twice_without_index,
        IndexMismatchError,
        f"'{VICTIM}' in 2.safetensors and 3.safetensors",
    ),
    "one name twice in a file": (duplicate, HeaderError, f"'{VICTIM}' occurs twice"),
    "missing tensor": (
        without,
        MissingTensorError,
        rf"1 of 12 .*'{VICTIM}' expected torch.float32 \[32, 32\], found none, nearest",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoint_is_refused_when_it_is_opened_and_nothing_changes(
    place, folder, case
):
    spoil, error, words = BAD[case]
    spoil(folder)
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    with pytest.raises(error, match=f"(?s){words}") as caught:
        runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert open_files(folder) == 0
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


@pytest.mark.parametrize("case", [case for case in BAD if case != "another dtype"])
def test_bad_checkpoint_is_refused_by_load_with_the_same_error(sim, folder, case):
    spoil, error, _ = BAD[case]
    spoil(folder)
    with pytest.raises(error, match=r"2\.safetensors|'3\.0\.weight'|index"):
        stagehand.load(stack, folder, device="hpu")
    assert open_files(folder) == 0


def open_files(folder: Path) -> int:
    """How many of this process's descriptors are files of a folder."""
    numbers = Path("/proc/self/fd")
    if not numbers.is_dir():
        return 0
    names = [os.path.realpath(numbers / name) for name in os.listdir(numbers)]
    return sum(name.startswith(f"{folder}/") for name in names)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="root may read every file",
)
def test_file_without_permission_is_named_with_the_systems_reason(place, folder):
    shard_of(folder).chmod(0)
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    with pytest.raises(ReadError, match=r"2\.safetensors cannot be read.*Permission"):
        runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    runtime_of(model).shutdown()


def test_file_that_the_system_refuses_is_named_with_its_reason(
    place, folder, monkeypatch
):
    """As without permission, which a test that runs as root cannot lack."""
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == shard_of(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(ReadError, match=r"2\.safetensors cannot be .*Permission"):
            runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    runtime_of(model).shutdown()


def test_folder_that_the_system_refuses_is_named_with_its_reason(
    place, folder, monkeypatch
):
    """Asking whether a file is there fails without permission for its folder."""

    def refuse(path: Path, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    words = re.escape(str(folder)) + ".* cannot be read: .*Permission denied"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(ReadError, match=words):
            runtime_of(model).convert_registry_to_file_backed_sharded(folder)
        with pytest.raises(ReadError, match=words):
            stagehand.load(stack, folder, device=place)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_path_that_no_system_takes_is_named(name):
    with pytest.raises(ReadError, match="cannot be read"):
        Checkpoint.open(name)
    with pytest.raises(ReadError, match="cannot be read"):
        stagehand.load(stack, name, device="cpu")
    with pytest.raises(ConfigError, match="is no model directory"):
        stagehand.load(name, device="cpu")
    with pytest.raises(ReadError, match="cannot be read"):
        SquareQ.open(name)
    with pytest.raises(ConfigError, match=r"scratch_dir .* can be written to"):
        scratch_folder(1, name)


def test_file_with_the_longest_name_there_is_can_be_opened(place, folder):
    """A manifest beside it would have a longer one, which the system takes for none."""
    long = folder / "a" / f"{'m' * 243}.safetensors"
    long.parent.mkdir()
    save_file(stack().state_dict(), long)
    expected = run_resident(stack(), place, batch())
    for path in (long, long.parent):
        model = stagehand.load(stack, path, vram_budget=4 * LAYER_BYTES, device=place)
        assert_passes_equal(model, expected, batch())
        runtime_of(model).shutdown()
    options = {"layer_prefix": "", "device": place}
    LayerStreamer.from_pretrained(long, **options).close()


def test_name_with_thousands_of_digits_is_that_of_no_packed_tensor(place, folder):
    """Python does not read such a number, nor is it any tensor's size."""
    odd = f"a.packed.bfloat16.{'9' * 5000}"
    save_file({**stack().state_dict(), odd: torch.ones(3)}, folder / "it.safetensors")
    file = folder / "it.safetensors"
    model = stagehand.load(stack, file, vram_budget=4 * LAYER_BYTES, device=place)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime_of(model).shutdown()


def test_file_name_in_an_index_that_no_system_takes_is_an_error(folder):
    write_index(folder, {VICTIM: "x" * 5000})
    with pytest.raises(ReadError, match=r"index .*index\.json cannot be read: .*long"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("method", "arguments", "problem"),
    [
        ("convert_registry_to_file_backed_sharded", {"directory": 3}, "directory is 3"),
        ("convert_registry_to_squareq_backed", {"path": None}, "path is None"),
        ("convert_registry_to_squareq_backed", {"manifest": 3}, "manifest is 3"),
        ("at_shutdown", {"call": 3}, "call is 3: expected a function"),
        ("when_home", {"listener": None}, "listener is None: expected a function"),
        (
            "before_block",
            {"block_id": torch.ones(2)},
            "block_id is .*: expected a text",
        ),
    ],
)
def test_argument_of_a_method_that_cannot_work_is_named(
    place, folder, method, arguments, problem
):
    if "manifest" in arguments:
        arguments["path"] = folder
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    with pytest.raises(ConfigError, match=problem):
        getattr(runtime_of(model), method)(**arguments)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime_of(model).shutdown()


@pytest.mark.parametrize("method", ["file_backed_sharded", "squareq_backed"])
def test_scratch_dir_that_is_no_path_is_named_also_where_it_is_not_needed(
    place, folder, method
):
    with pytest.raises(ConfigError, match="scratch_dir is 3: expected a text or a pa"):
        stagehand.load(stack, folder, device=place, scratch_dir=3)
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    with pytest.raises(ConfigError, match="scratch_dir is 3: expected a text or a pa"):
        getattr(runtime_of(model), f"convert_registry_to_{method}")(
            folder, scratch_dir=3
        )
    runtime_of(model).shutdown()


# Bytes changed at random.


def make_corpus(folder: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """A file of each kind, and what opens it."""
    tensors = {
        "a.weight": torch.randn(70, 64).bfloat16(),
        "a.bias": torch.ones(70).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors")
    torch.save(tensors, folder / "model.pt")
    packed, quantized = folder / "packed", folder / "quantized"
    convert_to_packed(folder / "model.safetensors", packed, max_shard_size=5000)
    convert_to_squareq(folder / "model.safetensors", quantized)
    slab = SquareQ.open(quantized)
    layer = slab.layers["a"]
    parts = {
        "qweight": layer.codes_of(slab.files),
        "scale": layer.scales,
        "zero_point": layer.zeros,
        "bias": layer.bias,
    }
    listed = {"name": "a", "out": 70, "inp": 64, "padded_in": 64, "has_bias": True}
    manifest = {"quant_version": "bp8", "layout": "rowwise", "layers": [listed]}
    torch.save({"manifest": manifest, "layers": {"a": parts}}, folder / "it.fpk")
    slab.files.close()

    def read_slab(path: Path) -> None:
        slab = SquareQ.open(path)
        for layer in slab.layers.values():
            layer.codes_of(slab.files)
        slab.files.close()

    def read_packed() -> None:
        checkpoint = Checkpoint.open(packed)
        files = FileSet(checkpoint.files)
        try:
            for weight in packed_weights(checkpoint, files).values():
                weight.decoded(files)
        finally:
            files.close()

    def convert() -> None:
        shutil.rmtree(folder / "target", ignore_errors=True)
        convert_to_packed(folder / "model.pt", folder / "target")

    return {
        "torch.save": (folder / "model.pt", convert),
        "SquareQ v1": (folder / "it.fpk", lambda: read_slab(folder / "it.fpk")),
        "manifest": (quantized / "model.manifest.json", lambda: read_slab(quantized)),
        "SquareQ v2": (quantized / "model.safetensors", lambda: read_slab(quantized)),
        "index": (packed / "model.safetensors.index.json", read_packed),
        "packed": (min(packed.glob("*-of-*.safetensors")), read_packed),
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict[str, tuple[Path, Callable[[], object]]]:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


KINDS = ["torch.save", "SquareQ v1", "manifest", "SquareQ v2", "index", "packed"]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_bytes_changed_in_any_file_are_read_or_refused_in_one_sentence(
    corpus, kind, data
):
    path, read = corpus[kind]
    content = path.read_bytes()
    changed = bytearray(content)
    # Headers are at the beginning, an archive's contents at the end.
    places = st.integers(0, len(content) - 1)
    places |= st.integers(0, min(1500, len(content)) - 1)
    places |= st.integers(max(0, len(content) - 1500), len(content) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(places)] = data.draw(st.integers(0, 255))
    keep = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    path.write_bytes(changed[:keep])
    message = str(path.parent)
    try:
        read()
    except CheckpointError as error:
        message = str(error)
    finally:
        path.write_bytes(content)
    assert str(path.parent) in message
    assert "\n" not in message
    assert open_files(path.parent) == 0


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_any_bytes_changed_is_refused_or_read_as_others_read_it(
    tmp_path, data
):
    """The judge is the format's own reader; a repeated name is refused by us alone."""
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "bb": torch.ones(5, dtype=torch.int8)}
    save_file(tensors, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    keep = data.draw(st.sampled_from([len(content), len(content) - 1, 40, 8, 7, 0]))
    path.write_bytes(content[:keep])
    found = None
    with contextlib.suppress(CheckpointError):
        found = {name: Checkpoint.open(path)[name] for name in Checkpoint.open(path)}
    try:
        with safe_open(path, "pt") as file:
            expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError, OverflowError):
        return
    if found is None:
        assert len(expected) < 2, "only a name that occurs twice is read by others"
        return
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        extent = found[name]
        assert (extent.dtype, extent.shape) == (tensor.dtype, tuple(tensor.shape))
        raw = bytes(content[extent.offset : extent.offset + extent.nbytes])
        assert raw == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


# Files that change while they are in use.


def streaming(folder: Path, place: str) -> torch.nn.Module:
    """A model that reads its blocks from disk in every pass."""
    memory = {"ram_budget": LAYER_BYTES} if place == "hpu" else {}
    model = stagehand.layer(
        stack(), vram_budget=4 * LAYER_BYTES, device=place, **memory
    )
    runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    return model


CHANGES: dict[str, Callable[[Path], None]] = {
    "shrinks": lambda path: os.truncate(path, path.stat().st_size // 2),
    "is written to": lambda path: overwrite(path),
    "is replaced": lambda path: replace(path),
    "is removed": lambda path: path.unlink(),
}


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.utime(new, ns=(1, 1))
    new.rename(path)


@pytest.mark.parametrize("change", CHANGES)
def test_file_that_changes_between_passes_is_named(place, folder, change):
    model = streaming(folder, place)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    content = shard_of(folder).read_bytes()
    CHANGES[change](shard_of(folder))
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ShardChangedError, match=r"2\.safetensors"):
            model(batch())
    shard_of(folder).write_bytes(content)
    runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


@pytest.mark.parametrize("change", ["shrinks", "is written to"])
def test_file_that_changes_in_the_middle_of_a_pass_is_named(place, folder, change):
    """No pass may go on with some weights from before and some from after."""
    model = streaming(folder, place)
    expected = run_resident(stack(), place, batch())
    assert_passes_equal(model, expected, batch())
    content = shard_of(folder).read_bytes()

    def spoil(*_: Any) -> None:
        handle.remove()
        CHANGES[change](shard_of(folder))

    handle = model[0].register_forward_pre_hook(spoil)
    with pytest.raises(CheckpointError, match=r"2\.safetensors"):
        # What was read ahead is of before, and good.
        assert_passes_equal(model, expected, batch(), passes=2)
    shard_of(folder).write_bytes(content)
    runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    assert_passes_equal(model, expected, batch())
    runtime_of(model).shutdown()


# Names.


def test_key_map_with_names_that_the_model_lacks_is_refused(place, folder):
    """A mistyped name would be ignored, and the tensor taken from somewhere else."""
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    runtime = runtime_of(model)
    with pytest.raises(MissingTensorError, match=r"'3\.0\.wieght'.*nearest '3\.0\.wei"):
        runtime.convert_registry_to_file_backed_sharded(
            folder, key_map={"3.0.wieght": "2.0.weight"}
        )
    with pytest.raises(MissingTensorError, match=r"'3\.0\.wieght'.*nearest '3\.0\.wei"):
        stagehand.load(stack, folder, device=place, key_map={"3.0.wieght": VICTIM})
    runtime.shutdown()


@pytest.mark.parametrize(
    ("key_map", "problem"),
    [
        (3, "key_map is 3: expected a mapping or a function"),
        ({}.get, r"key_map gives None for '\d.0.weight': expected"),
        ({VICTIM: 3}, f"key_map gives 3 for '{VICTIM}': expected"),
    ],
    ids=["no map", "unknown", "no name"],
)
def test_key_map_that_gives_no_names_is_refused(place, folder, key_map, problem):
    with pytest.raises(ConfigError, match=problem):
        stagehand.load(stack, folder, device=place, key_map=key_map)
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    runtime = runtime_of(model)
    with pytest.raises(ConfigError, match=problem):
        runtime.convert_registry_to_file_backed_sharded(folder, key_map=key_map)
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime.shutdown()


def test_no_match_at_all_lists_what_is_missing_and_near(place, tmp_path):
    state = {f"model.{name}": tensor for name, tensor in stack().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    model = stagehand.layer(stack(), vram_budget=4 * LAYER_BYTES, device=place)
    runtime = runtime_of(model)
    with pytest.raises(MissingTensorError, match=r"12 of 12 .*nearest 'model\.0\.0\.w"):
        runtime.convert_registry_to_file_backed_sharded(tmp_path)
    runtime.convert_registry_to_file_backed_sharded(
        tmp_path, key_map=lambda name: f"model.{name}"
    )
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())
    runtime.shutdown()
