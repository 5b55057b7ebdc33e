"""Checkpoint: headers, indexes and names, with safetensors' own reader as the judge."""

import errno
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stagehand.errors import (
    CheckpointError,
    HeaderError,
    IndexMismatchError,
    MissingTensorError,
    OffsetError,
    ReadError,
    SizeMismatchError,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.stores.checkpoint import Checkpoint, Extent
from stagehand.stores.headers import FileStamp


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def span(dtype: str, shape: object, start: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def judge_accepts(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


# Every way in which a file can be wrong: header, data, our error, what it must say.
F32 = span("F32", [2], 0, 8)
MALFORMED = {
    "not JSON": (b"{nonsense", 0, HeaderError, "not valid"),
    "not UTF-8": (b'{"\xff": 1}', 0, HeaderError, "not valid"),
    "empty header": (b"", 0, HeaderError, "not valid"),
    "list": ([], 0, HeaderError, "expected a JSON object, found list"),
    "deep": (b'{"a":' + b"[" * 100_000, 0, HeaderError, "not valid"),
    "half a surrogate pair": (b'{"\\ud800": 1}', 0, HeaderError, "not valid"),
    "no object": ({"a": 3}, 0, HeaderError, "'a'.*dtype None"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, 4, HeaderError, "'a'"),
    "dtype of no format": (
        {"a": span("F31", [2], 0, 8)},
        8,
        HeaderError,
        "'a'.*'F31'.*BF16",
    ),
    "dtype no text": ({"a": span(7, [2], 0, 8)}, 8, HeaderError, "dtype 7"),
    "no shape": (
        {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
        8,
        HeaderError,
        "shape None",
    ),
    "negative size": ({"a": span("F32", [-2], 0, 8)}, 8, HeaderError, r"\[-2\]"),
    "fraction": ({"a": span("F32", [2.0], 0, 8)}, 8, HeaderError, r"\[2.0\]"),
    "true as size": ({"a": span("F32", [True], 0, 4)}, 4, HeaderError, r"\[True\]"),
    "overflow": ({"a": span("F32", [1 << 40, 1 << 40], 0, 8)}, 8, HeaderError, "2.*64"),
    "overflow and zero": (
        {"a": span("F32", [1 << 63, 2, 0], 0, 0)},
        0,
        HeaderError,
        "2.*64",
    ),
    "size beyond 64 bits": (
        {"a": span("F32", [0, 1 << 64], 0, 0)},
        0,
        HeaderError,
        "2.*64",
    ),
    "no offsets": (
        {"a": {"dtype": "F32", "shape": [2]}},
        8,
        HeaderError,
        "data_offsets None",
    ),
    "one offset": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        8,
        HeaderError,
        r"data_offsets \[0\]",
    ),
    "duplicate name": (
        b'{"a":%s,"a":%s}' % (2 * (json.dumps(F32).encode(),)),
        8,
        HeaderError,
        "'a' occurs twice",
    ),
    "metadata no text": ({"__metadata__": {"a": 1}}, 0, HeaderError, "__metadata__"),
    "metadata no object": ({"__metadata__": "a"}, 0, HeaderError, "__metadata__"),
    "NaN": (b'{"__metadata__": NaN}', 0, HeaderError, "NaN"),
    "first offset": (
        {"a": span("F32", [2], 4, 12)},
        12,
        OffsetError,
        "'a'.*start at 0",
    ),
    "negative offset": ({"a": span("F32", [2], -8, 0)}, 0, OffsetError, "start at 0"),
    "gap": (
        {"a": F32, "b": span("F32", [2], 12, 20)},
        20,
        OffsetError,
        r"'b'.*\[12, 20\).*start at 8",
    ),
    "overlap": (
        {"a": F32, "b": span("F32", [2], 4, 12)},
        12,
        OffsetError,
        "'b'.*start at 8",
    ),
    "backwards": ({"a": span("F32", [2], 0, -8)}, 0, OffsetError, "'a'"),
    "too few bytes": (
        {"a": span("F32", [3], 0, 8)},
        8,
        SizeMismatchError,
        r"'a'.*F32 \[3\].*expected 12 bytes, found 8",
    ),
    "half a byte": (
        {"a": span("F4", [3], 0, 2)},
        2,
        SizeMismatchError,
        "expected 1.5 bytes, found 2",
    ),
    "one byte short": (
        {"a": F32},
        7,
        TruncatedShardError,
        "expected 8 bytes of data, found 7, 1 are missing from tensor 'a' on",
    ),
    "half the data": (
        {"a": F32, "b": span("F32", [2], 8, 16)},
        8,
        TruncatedShardError,
        "8 are missing from tensor 'b' on",
    ),
    "trailing bytes": (
        {"a": F32},
        16,
        OffsetError,
        "no tensor: expected 8 bytes of data, found 16",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_as_the_format_says(tmp_path, case):
    header, size, error, words = MALFORMED[case]
    path = raw_file(tmp_path / "a.safetensors", header, bytes(size))
    if case != "duplicate name":  # The format forbids it, its reader lets it through.
        assert not judge_accepts(path)
    with pytest.raises(error, match=f"(?s){words}") as caught:
        Checkpoint.open(path)
    assert type(caught.value) is error
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 1 << 63)],
    ids=["empty", "7 bytes", "longer than the file", "2**63"],
)
def test_file_without_a_whole_header_is_refused(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    assert not judge_accepts(path)
    with pytest.raises(HeaderError, match="safetensors file"):
        Checkpoint.open(path)


def test_header_of_more_than_100_million_bytes_is_refused_unread(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)
    with pytest.raises(HeaderError, match="expected at most 100000000"):
        Checkpoint.open(path)


VALID = {
    "no tensors": ({}, 0),
    "padded with spaces": (b'{"a":%s}    ' % json.dumps(F32).encode(), 8),
    "odd header": (b' {"a":%s} ' % json.dumps(F32).encode(), 8),
    "metadata": ({"__metadata__": {"format": "pt"}, "a": F32}, 8),
    "metadata null": ({"__metadata__": None, "a": F32}, 8),
    "unknown field": ({"a": {**F32, "crc": 3}}, 8),
    "not in order": ({"b": span("U8", [3], 8, 11), "a": F32}, 11),
    "empty tensors": ({"a": span("F32", [0, 3], 0, 0), "b": F32}, 8),
    "empty listed last": ({"b": F32, "a": span("F32", [0, 3], 0, 0)}, 8),
    "empty at the end": ({"b": span("F64", [5, 0], 8, 8), "a": F32}, 8),
    "scalar": ({"a": span("F64", [], 0, 8)}, 8),
    "zero before large": ({"a": span("F32", [0, 1 << 63, 1 << 63], 0, 0)}, 0),
    "name of other letters": ({"gewicht.ü.\U0001f600": F32}, 8),
    "six bits": ({"a": span("F6_E2M3", [4], 0, 3), "b": span("U8", [1], 3, 4)}, 4),
}


@pytest.mark.parametrize("case", VALID)
def test_valid_file_is_accepted(tmp_path, case):
    header, size = VALID[case]
    path = raw_file(tmp_path / "a.safetensors", header, bytes(size))
    assert judge_accepts(path)
    with safe_open(path, "pt") as file:
        assert set(Checkpoint.open(path)) == set(file.keys())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_we_accept_what_the_judge_accepts(tmp_path, data):
    """Headers with one to three tensors, then one value of one of them replaced."""
    header: dict[str, object] = {}
    end = 0
    for name in data.draw(st.sampled_from(["a", "ab", "abc"])):
        code, bits = data.draw(st.sampled_from([("F32", 32), ("U8", 8), ("F4", 4)]))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
        nbytes = torch.Size(shape).numel() * bits // 8
        header[name] = span(code, shape, end, end + nbytes)
        end += nbytes
    victim = header[data.draw(st.sampled_from(sorted(header)))]
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "other"]))
    numbers = st.integers(-1, 20) | st.sampled_from([1.5, None, True, 1 << 64])
    values = st.lists(numbers, max_size=3) | st.sampled_from(["F32", "F64", "Q", {}])
    victim[field] = data.draw(values)
    size = max(0, end + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    path = raw_file(tmp_path / "a.safetensors", header, bytes(size))
    try:
        Checkpoint.open(path)
        accepted = True
    except CheckpointError:
        accepted = False
    assert accepted == judge_accepts(path)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32),
    *(torch.uint32, torch.int64, torch.uint64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extent_of_every_dtype_is_what_was_saved(tmp_path, dtype):
    path = tmp_path / "a.safetensors"
    raw = torch.arange(3 * 4 * dtype.itemsize, dtype=torch.uint8) % 2
    save_file({"pad": torch.zeros(1), "a": raw.view(dtype).view(3, 4)}, path)
    extent = Checkpoint.open(path)["a"]
    assert (extent.dtype, extent.shape) == (dtype, (3, 4))
    content = path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
    assert content == bytes(raw.tolist())


def test_element_type_that_torch_lacks_raises_only_when_asked_for(tmp_path):
    header, size = VALID["six bits"]
    checkpoint = Checkpoint.open(raw_file(tmp_path / "a", header, bytes(size)))
    assert "a" in checkpoint
    assert checkpoint["b"].nbytes == 1
    with pytest.raises(TensorMismatchError, match=r"'a'.*F6_E2M3 \[4\]"):
        checkpoint["a"]
    with pytest.raises(TensorMismatchError, match=r"'a'.*parameter 'w'.*F6_E2M3"):
        checkpoint.match({"w": (torch.float32, (4,))}, {"w": "a"})


@pytest.mark.parametrize("sizes", [[0, 1 << 63], [0, 1 << 62, 4], [1 << 62, 0, 4]])
def test_sizes_that_torch_cannot_count_raise_only_when_asked_for(tmp_path, sizes):
    """Of a tensor without elements a file may say any."""
    header = {"a": span("F32", sizes, 0, 0), "b": F32}
    checkpoint = Checkpoint.open(raw_file(tmp_path / "a", header, bytes(8)))
    assert checkpoint["b"].nbytes == 8
    with pytest.raises(
        TensorMismatchError, match=r"'a' in .* F32 \[.*sizes that torch"
    ):
        checkpoint["a"]


def test_odd_row_of_4_bit_elements_has_no_torch_form(tmp_path):
    path = raw_file(tmp_path / "a", {"a": span("F4", [2, 3], 0, 3)}, bytes(3))
    with pytest.raises(TensorMismatchError, match="F4"):
        Checkpoint.open(path)["a"]


def test_name_that_no_file_has_is_a_key_error(tmp_path):
    checkpoint = Checkpoint.open(raw_file(tmp_path / "a", {"a": F32}, bytes(8)))
    with pytest.raises(KeyError):
        checkpoint["b"]
    assert "b" not in checkpoint
    assert checkpoint.get("b") is None


def test_missing_file_names_itself_and_the_systems_reason(tmp_path):
    with pytest.raises(ReadError, match=r"none.safetensors.*No such file"):
        Checkpoint.open(tmp_path / "none.safetensors")


def test_relative_path_stays_valid_when_the_directory_changes(tmp_path, monkeypatch):
    raw_file(tmp_path / "a.safetensors", {"a": F32}, bytes(8))
    monkeypatch.chdir(tmp_path)
    extent = Checkpoint.open("a.safetensors")["a"]
    assert extent.path == tmp_path / "a.safetensors"


# Directories.


def shard(directory: Path, name: str, *names: str) -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    save_file({key: torch.full((2,), float(len(key))) for key in names}, path)
    return path


def index(directory: Path, name: str, weight_map: object) -> Path:
    path = directory / name
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_directory_without_an_index_holds_the_tensors_of_all_its_shards(tmp_path):
    shard(tmp_path, "one.safetensors", "a", "b")
    two = shard(tmp_path, "two.safetensors", "c")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint) == ["a", "b", "c"]
    assert checkpoint["c"].path == two
    assert sorted(path.name for path in checkpoint.files) == [
        "one.safetensors",
        "two.safetensors",
    ]
    assert checkpoint.files[two].size == two.stat().st_size
    assert "3 tensors (one.safetensors, two.safetensors)" in repr(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "other.fp16.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("given", ["directory", "index"])
def test_index_is_followed(tmp_path, name, given):
    shard(tmp_path, "one.safetensors", "a")
    shard(tmp_path, "sub/two.safetensors", "b")
    shard(tmp_path, "stray.safetensors", "a")
    path = index(tmp_path, name, {"a": "one.safetensors", "b": "sub/two.safetensors"})
    checkpoint = Checkpoint.open(tmp_path if given == "directory" else path)
    assert {key: checkpoint[key].path.name for key in checkpoint} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }


def test_index_says_which_of_two_shards_counts_and_does_not_hide_the_unlisted(
    tmp_path,
):
    shard(tmp_path, "one.safetensors", "a", "b")
    shard(tmp_path, "two.safetensors", "b", "c")
    listed = {"a": "one.safetensors", "b": "two.safetensors"}
    index(tmp_path, "model.safetensors.index.json", listed)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint["b"].path.name == "two.safetensors"
    assert "c" in checkpoint


def test_tensor_in_two_shards_without_an_index_is_refused(tmp_path):
    shard(tmp_path, "one.safetensors", "a", "b")
    shard(tmp_path, "two.safetensors", "b", "c")
    with pytest.raises(
        IndexMismatchError, match=r"1 tensors .* 'b' in one.safetensors and two"
    ):
        Checkpoint.open(tmp_path)


def test_index_that_names_an_absent_shard_is_refused(tmp_path):
    shard(tmp_path, "one.safetensors", "a")
    listed = {"a": "one.safetensors", "b": "two.safetensors"}
    index(tmp_path, "model.safetensors.index.json", listed)
    with pytest.raises(
        IndexMismatchError, match=r"2 files, of which 1 are not there: two.safetensors"
    ):
        Checkpoint.open(tmp_path)


def test_index_that_names_an_absent_tensor_is_refused(tmp_path):
    shard(tmp_path, "one.safetensors", "a")
    listed = {f"t{number}": "one.safetensors" for number in range(9)}
    index(tmp_path, "model.safetensors.index.json", listed)
    with pytest.raises(
        IndexMismatchError,
        match=r"index .*9 are not in their files: 't0' in one.safetensors.* and 4 more",
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_index_that_is_none_is_refused(tmp_path, content):
    shard(tmp_path, "one.safetensors", "a")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(IndexMismatchError, match=r"model.safetensors.index.json"):
        Checkpoint.open(tmp_path)


def test_index_that_cannot_be_read_names_itself_and_the_systems_reason(
    tmp_path, monkeypatch
):
    shard(tmp_path, "one.safetensors", "a")
    index(tmp_path, "model.safetensors.index.json", {"a": "one.safetensors"})

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ReadError, match=r"index\.json cannot be read: .*Permission"):
        Checkpoint.open(tmp_path)


def test_two_indexes_of_unknown_names_are_refused(tmp_path):
    index(tmp_path, "x.safetensors.index.json", {})
    index(tmp_path, "y.safetensors.index.json", {})
    with pytest.raises(IndexMismatchError, match=r"2 indexes.*x\.safe.*y\.safe"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("main", "other"),
    [
        ("model.safetensors", "model.safetensors.index.json"),
        (
            "diffusion_pytorch_model.safetensors.index.json",
            "diffusion_pytorch_model.safetensors",
        ),
        ("model.safetensors", "adapter_model.safetensors"),
        (
            "diffusion_pytorch_model.safetensors",
            "diffusion_pytorch_model.fp16.safetensors",
        ),
        ("model.safetensors.index.json", "consolidated.safetensors"),
    ],
)
def test_file_of_a_librarys_name_is_the_model_whatever_is_beside(tmp_path, main, other):
    """In the order in which the library itself looks for them."""
    wanted = {}
    for name, keys in ((main, ("a", "b")), (other, ("a", "c"))):
        file = name.replace(".index.json", "-1")
        wanted[name] = shard(tmp_path, file, *keys)
        if file != name:
            index(tmp_path, name, dict.fromkeys(keys, file))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.root == tmp_path / main
    assert list(checkpoint.files) == [wanted[main]]
    assert sorted(checkpoint) == ["a", "b"]


def test_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no weights.*pytorch_model.bin.*stagehand convert"
    ):
        Checkpoint.open(tmp_path)


def test_truncated_shard_is_refused_before_anything_streams(tmp_path):
    """A checkpoint cut off by a full disk was accepted and failed at the first load."""
    shard(tmp_path, "one.safetensors", "a")
    path = shard(tmp_path, "two.safetensors", "b")
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(TruncatedShardError, match=r"two.safetensors.*3 are missing"):
        Checkpoint.open(tmp_path)


# Names.


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    tensors = {
        f"layers.{layer}.{name}.weight": torch.zeros(4, 2)
        for layer in range(3)
        for name in ("norm1", "norm3", "fc")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path / "model.safetensors")


WANTED = (torch.float32, (4, 2))


def test_matched_parameters_have_the_extents_of_their_names(checkpoint):
    names = {"layers.0.fc.weight": WANTED, "layers.2.norm1.weight": WANTED}
    assert checkpoint.match(names) == {name: checkpoint[name] for name in names}
    assert isinstance(checkpoint["layers.0.fc.weight"], Extent)


@pytest.mark.parametrize(
    "key_map",
    [
        lambda name: name.replace("blocks", "layers"),
        {"blocks.1.fc.weight": "layers.1.fc.weight"},
    ],
    ids=["function", "mapping"],
)
def test_key_map_translates_names(checkpoint, key_map):
    names = {"blocks.1.fc.weight": WANTED, "layers.1.fc.weight": WANTED}
    extent = checkpoint["layers.1.fc.weight"]
    assert checkpoint.match(names, key_map) == dict.fromkeys(names, extent)


def test_missing_tensor_is_named_with_what_was_expected_and_is_near(checkpoint):
    """A guessed alias once loaded norm3 into norm2: equal shapes, another layer."""
    with pytest.raises(MissingTensorError) as caught:
        checkpoint.match(
            {"layers.0.fc.weight": WANTED, "layers.0.norm2.weight": WANTED}
        )
    text = str(caught.value)
    assert text.startswith("1 of 2 parameters have no tensor in ")
    assert "model.safetensors" in text
    assert (
        "'layers.0.norm2.weight' expected torch.float32 [4, 2], found none, nearest "
        "'layers.0.norm3.weight' and 'layers.0.norm1.weight'" in text
    )


def test_missing_prefix_is_an_error_that_lists_five_and_counts_all(checkpoint):
    """A checkpoint with a prefix once matched nothing, silently."""
    names = {f"transformer.{name}": WANTED for name in checkpoint}
    with pytest.raises(MissingTensorError, match="9 of 9 parameters") as caught:
        checkpoint.match(names)
    assert str(caught.value).count("found none") == 5
    assert "key_map" in str(caught.value)


def test_missing_mapped_name_shows_both_names(checkpoint):
    with pytest.raises(MissingTensorError, match=r"'w' \(as 'layers.9.fc'\)"):
        checkpoint.match({"w": WANTED}, lambda name: "layers.9.fc")


@pytest.mark.parametrize("wanted", [(torch.bfloat16, (4, 2)), (torch.float32, (2, 4))])
def test_mismatch_names_tensor_file_parameter_expected_and_found(checkpoint, wanted):
    with pytest.raises(TensorMismatchError) as caught:
        checkpoint.match({"w": wanted}, {"w": "layers.0.fc.weight"})
    text = str(caught.value)
    assert "'layers.0.fc.weight'" in text
    assert "model.safetensors" in text
    assert "parameter 'w'" in text
    assert f"expected {wanted[0]} {list(wanted[1])}" in text
    assert "found torch.float32 [4, 2]" in text


def test_near_names_among_very_many_are_those_of_the_same_layer(tmp_path):
    header = {
        f"layers.{layer}.fc.weight": span("U8", [0], 0, 0) for layer in range(6000)
    }
    checkpoint = Checkpoint.open(raw_file(tmp_path / "a", header))
    with pytest.raises(MissingTensorError, match=r"nearest 'layers.77.fc.weight';"):
        checkpoint.match({"model.layers.77.fc.weight": (torch.uint8, (0,))})


def test_file_that_shrinks_while_its_header_is_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 50) + b"{}")
    whole = FileStamp(size=58, mtime_ns=0, inode=0)
    monkeypatch.setattr(FileStamp, "of", lambda _: whole)
    with pytest.raises(TruncatedShardError, match="expected 50 bytes, found 2"):
        Checkpoint.open(path)


def test_a_part_of_a_tensor_ends_where_the_tensor_does():
    whole = Extent(
        name="a",
        path=Path("model.safetensors"),
        offset=100,
        nbytes=10,
        dtype=torch.float16,
        shape=(5,),
    )
    for start, end, offset, nbytes in (
        (2, 6, 102, 4),
        (6, 50, 106, 4),
        (20, 50, 110, 0),
    ):
        part = whole.between(start, end)
        assert (part.offset, part.nbytes, part.shape) == (offset, nbytes, (nbytes,))
