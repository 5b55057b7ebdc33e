"""LayerImage: a layer's tensors in one image, and the reads that fill it."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stagehand.core.layout import same_bits
from stagehand.errors import (
    StagehandInternalError,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.stores.base import Skew
from stagehand.stores.checkpoint import Checkpoint, Extent
from stagehand.stores.converting import convert_to_packed
from stagehand.stores.files import FileSet
from stagehand.stores.packed_files import packed_weights
from stagehand.stores.reading import Sectors
from stagehand.streamer.images import LayerImage, wanted_dtype

TENSORS = {
    "b": torch.randn(3, 128),
    "a": torch.randn(64),
    "codes": torch.arange(17, dtype=torch.uint8),
    "half": torch.randn(5, 1).half(),
    "none": torch.empty(4, 0),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
}


@pytest.fixture
def opened(tmp_path):
    """The path of a file with these tensors, its extents, and it, open."""
    path = tmp_path / "layer.safetensors"
    save_file(TENSORS, path)
    checkpoint = Checkpoint.open(path)
    files = FileSet(checkpoint.files)
    yield path, {name: checkpoint[name] for name in TENSORS}, files
    files.close()


def filled(image, files):
    memory = torch.full((image.nbytes,), 255, dtype=torch.uint8)
    assert image.read(files, memory) == sum(t.nbytes for t in TENSORS.values())
    return memory


def test_tensors_have_the_bits_of_the_file_in_the_order_asked_for(opened):
    _, extents, files = opened
    image = LayerImage("layers.0", extents, None)
    found = image.tensors(filled(image, files))
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].shape == tensor.shape
        assert same_bits(found[name], tensor)
        assert found[name].numel() == 0 or found[name].data_ptr() % 64 == 0


def test_packed_layer_is_read_as_its_wire_and_all_its_decoders_get_the_same(tmp_path):
    """Triton finds what lies where on the wire itself, torch's operators are told."""
    weights = {name: torch.randn(128, 256).bfloat16() for name in "xyz"}
    save_file({**TENSORS, **weights}, tmp_path / "model.safetensors")
    convert_to_packed(tmp_path / "model.safetensors", tmp_path / "packed")
    checkpoint = Checkpoint.open(tmp_path / "packed")
    files = FileSet(checkpoint.files)
    packed = packed_weights(checkpoint, files)
    assert packed.keys() == weights.keys()
    names = [*TENSORS, *weights]
    extents = {name: packed.get(name) or checkpoint[name] for name in names}
    image = LayerImage("layers.0", extents, None)
    wire, memory = torch.full((2, image.nbytes), 255, dtype=torch.uint8)
    assert image.read(files, wire[: image.link_nbytes]) == image.read_bytes
    assert torch.equal(image.form.directory_in(wire), image.form.directory().flatten())
    image.decode(wire, memory, None)
    for name, found in image.tensors(memory).items():
        assert same_bits(found, {**TENSORS, **weights}[name])
    files.close()


def test_layer_that_lies_together_is_one_read(opened):
    path, extents, _ = opened
    together = {name: extents[name] for name in ("a", "b")}
    assert [
        len(parts) for parts in LayerImage("l", together, None)._parts.values()
    ] == [1]
    assert list(LayerImage("l", together, None)._parts) == [path]


@pytest.mark.parametrize(
    ("past", "dtype", "wanted", "in_place"),
    [
        (8, torch.bfloat16, None, True),
        (8, torch.int32, None, True),
        (8, torch.float32, torch.bfloat16, True),
        (8, torch.float32, None, False),
        (64, torch.float32, None, True),
        (32, torch.complex64, None, False),
        (4, torch.bfloat16, None, False),
    ],
)
def test_memory_in_which_tensors_are_used_begins_where_they_can_be(
    past, dtype, wanted, in_place
):
    extent = Extent(
        name="w",
        path=Path("w"),
        offset=1024 + past,
        nbytes=64 * dtype.itemsize,
        dtype=dtype,
        shape=(64,),
    )

    class Files(FileSet):
        def sectors(self, path):
            return Sectors(512, 512)

    files = Files({})
    image = LayerImage("layers.0", {"w": extent}, wanted)
    skew = Skew(1024 + past, 4096)
    assert image.skew(files) == skew
    assert image.skew_in_use(files) == (skew if in_place else None)


def test_floats_are_cast_and_their_bytes_counted(opened):
    _, extents, files = opened
    image = LayerImage("layers.0", extents, torch.float16)
    found = image.tensors(filled(image, files))
    assert found["codes"].dtype == torch.uint8
    for name in ("a", "b", "half", "scalar", "none"):
        assert same_bits(found[name], TENSORS[name].half())
    assert image.cast_bytes == 2 * (3 * 128 + 64 + 1)
    assert LayerImage("layers.0", extents, None).cast_bytes == 0


def test_type_that_would_lose_values_is_refused():
    with pytest.raises(TensorMismatchError, match=r"'w' is torch.float16.*torch.int64"):
        wanted_dtype("w", torch.float16, torch.int64)
    assert wanted_dtype("w", torch.int32, torch.float16) == torch.int32
    assert wanted_dtype("w", torch.int64, torch.int64) == torch.int64


def test_short_file_names_the_layer_and_the_tensor_that_is_cut(opened):
    path, extents, files = opened
    image = LayerImage("layers.4", extents, None)
    memory = filled(image, files)
    last = max(
        (name for name in TENSORS if extents[name].nbytes),
        key=lambda name: extents[name].offset,
    )
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        TruncatedShardError,
        match=f"^layer 'layers.4', tensor '{last}': {path} is trunc",
    ):
        image.read(files, memory)
    path.unlink()
    with pytest.raises(
        TruncatedShardError, match=f"^layer 'layers.4': {path} is trunc"
    ):
        image.read(files, memory)


def test_layer_without_bytes_needs_no_file(opened):
    _, extents, files = opened
    image = LayerImage("layers.0", {"none": extents["none"]}, None)
    assert image.read(files, torch.empty(0, dtype=torch.uint8)) == 0
    assert image.tensors(torch.empty(0, dtype=torch.uint8))["none"].shape == (4, 0)


def test_files_are_not_read_into_a_device(opened, sim):
    _, extents, files = opened
    image = LayerImage("layers.0", extents, None)
    memory = torch.empty(image.nbytes, dtype=torch.uint8, device="hpu")
    with pytest.raises(StagehandInternalError, match="cannot be read into hpu"):
        image.read(files, memory)
