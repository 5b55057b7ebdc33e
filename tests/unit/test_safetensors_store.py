"""SafetensorsStore: a block whose truth is in files, and its overlay."""

import ctypes
import gc
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equality import all_equal
from stagehand.core.layout import layout_of, same_bits
from stagehand.errors import (
    ClosedError,
    ReadError,
    ShardChangedError,
    StagehandInternalError,
    StagehandWarning,
    TensorMismatchError,
    TruncatedShardError,
)
from stagehand.stores import reading
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.files import FileSet, naming
from stagehand.stores.module import ModuleStore
from stagehand.stores.safetensors import SafetensorsStore
from stagehand.stores.wired import WiredStore, origin_of

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32),
    *(torch.uint32, torch.int64, torch.uint64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of arbitrary bits, NaN payloads included."""
    top = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(top, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


class Opened:
    """A checkpoint, the block of all its tensors, and its store."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, torch.Tensor],
        key_map: Mapping[str, str] | None = None,
        past_cache: bool | None = None,
    ) -> None:
        checkpoint = Checkpoint.open(path)
        self.tensors = list(tensors.values())
        self.layout = layout_of(list(tensors.items()))
        wanted = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        matched = checkpoint.match(wanted, key_map)
        self.extents = [matched[name] for name in tensors]
        self.files = FileSet(checkpoint.files, past_cache=past_cache)
        self.store = SafetensorsStore(self.layout, self.extents, self.files)
        self.file_bytes = sum(extent.nbytes for extent in set(self.extents))

    def image(self) -> torch.Tensor:
        return torch.full((self.layout.nbytes,), 0xA5, dtype=torch.uint8)

    def load(self) -> list[torch.Tensor]:
        image = self.image()
        self.read = self.store.read_into(image)
        return self.layout.views(image)


TENSORS = {
    "a": random_bits(torch.float32, 16, 16),
    "b": torch.full((256,), float("nan")),
    "c": random_bits(torch.bfloat16, 5),
    "d": random_bits(torch.int64),
    "e": random_bits(torch.float32, 0, 4),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def opened(path) -> Iterator[Opened]:
    opened = Opened(path, TENSORS)
    yield opened
    opened.files.close()


def raw_file(path: Path, name: str, code: str, tensor: torch.Tensor, pad: int) -> Path:
    """Write one tensor behind a header of 8n + pad bytes, as other writers may."""
    span = {"dtype": code, "shape": tensor.shape, "data_offsets": [0, tensor.nbytes]}
    text = json.dumps({name: span}).encode()
    text += b" " * (-len(text) % 8 + pad)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# Reading.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 5)], ids=str)
def test_every_dtype_is_read_bit_equal(tmp_path, dtype, shape):
    if dtype == torch.float4_e2m1fn_x2:
        shape = shape or (1,)  # Half a byte is no tensor of the format.
    tensors = {"pad": random_bits(torch.uint8, 3), "a": random_bits(dtype, *shape)}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = Opened(tmp_path / "model.safetensors", tensors)
    assert all_equal(opened.load(), tensors.values(), same_bits)
    assert all_equal(opened.store.hosts, tensors.values(), same_bits)
    assert opened.read == opened.file_bytes


def test_block_is_read_from_several_shards(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "2.safetensors")
    opened = Opened(tmp_path, {name: TENSORS[name] for name in "ba"})
    assert all_equal(opened.load(), opened.tensors, same_bits)


def test_bytes_after_the_layout_are_not_touched(opened):
    image = torch.full((opened.layout.nbytes + 512,), 0xA5, dtype=torch.uint8)
    opened.store.read_into(image)
    assert torch.all(image[opened.layout.nbytes :] == 0xA5)


def count_reads(monkeypatch, limit: int = 1 << 30) -> list[int]:
    """Return a list that gets the bytes of every read, of which none exceeds limit."""
    real, counted = os.preadv, []

    def preadv(number, buffers, offset):
        counted.append(real(number, [buffers[0][:limit]], offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counted


def test_tensors_that_follow_each_other_are_one_read(opened, monkeypatch):
    counted = count_reads(monkeypatch)
    opened.load()
    # a, b and c lie as in the file; d is before them there and behind padding here.
    assert sorted(counted) == [8, 1024 + 1024 + 10]


def test_short_reads_are_continued(opened, monkeypatch):
    counted = count_reads(monkeypatch, limit=100)
    assert all_equal(opened.load(), opened.tensors, same_bits)
    assert max(counted) == 100


def test_large_tensors_are_read_in_chunks(opened, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1000)
    counted = count_reads(monkeypatch)
    assert all_equal(opened.load(), opened.tensors, same_bits)
    assert max(counted) == 1000


@pytest.mark.parametrize("edit", [False, True])
def test_strided_parameter_is_read_into_its_strides(tmp_path, edit):
    tensor = random_bits(torch.float32, 2, 3, 4, 5)
    save_file({"a": tensor}, tmp_path / "m.safetensors")
    strided = tensor.to(memory_format=torch.channels_last)
    opened = Opened(tmp_path / "m.safetensors", {"a": strided})
    if edit:
        opened.store.hosts[0].zero_()
        opened.store.edited(0)
    (view,) = opened.load()
    assert view.stride() == strided.stride()
    assert (
        torch.equal(view, torch.zeros(2, 3, 4, 5)) if edit else same_bits(view, tensor)
    )
    assert opened.read == (0 if edit else opened.file_bytes)


@pytest.mark.parametrize("pad", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_file_whose_data_begins_at_an_odd_address_is_read(tmp_path, pad, dtype):
    tensor = random_bits(dtype, 7)
    code = {torch.float64: "F64", torch.uint8: "U8"}[dtype]
    path = raw_file(tmp_path / "m.safetensors", "a", code, tensor, pad)
    if dtype == torch.uint8:
        opened = Opened(path, {"a": tensor})
    else:
        with pytest.warns(StagehandWarning, match="copied to host memory"):
            opened = Opened(path, {"a": tensor})
    assert all_equal(opened.load(), [tensor], same_bits)
    assert all_equal(opened.store.hosts, [tensor], same_bits)
    opened.store.hosts[0].zero_()
    opened.store.edited(0)
    assert opened.load()[0].tolist() == [0] * 7


def test_stores_work_in_inference_mode_and_their_hosts_can_be_trained(path):
    with torch.inference_mode():
        opened = Opened(path, TENSORS)
        opened.load()
        image = opened.image()
        opened.store.read_into(image)
        opened.store.write_back(image)
    weight = torch.nn.Parameter(opened.store.hosts[0])
    assert not weight.is_inference()
    (weight * 1).sum().backward()


def test_many_threads_read_the_same_files(path):
    opened = Opened(path, TENSORS)
    results: list[bool] = []
    start = threading.Barrier(8)

    def read() -> None:
        start.wait()
        results.extend(
            all_equal(opened.load(), opened.tensors, same_bits) for _ in range(20)
        )

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 160


# Tied parameters.


def test_tied_parameters_are_one_host_tensor_and_read_once(path):
    weight = TENSORS["a"].clone()
    opened = Opened(path, {"x": weight, "y": weight.detach()}, {"x": "a", "y": "a"})
    opened.load()
    assert opened.read == weight.nbytes
    opened.store.hosts[0].zero_()
    opened.store.edited(0)
    assert torch.equal(opened.store.hosts[1], torch.zeros(16, 16))
    assert torch.equal(opened.load()[1], torch.zeros(16, 16))


def test_tied_strided_parameters_keep_an_edit_of_either(path):
    weight = TENSORS["a"].clone().t()
    opened = Opened(path, {"x": weight, "y": weight.detach()}, {"x": "a", "y": "a"})
    opened.store.hosts[0].zero_()
    opened.store.edited(0)
    assert torch.equal(opened.load()[1], torch.zeros(16, 16))


@pytest.mark.parametrize("stores", [1, 2])
def test_parameters_that_only_begin_equal_do_not_share_host_memory(path, stores):
    """Two parameters loaded from one tensor of the file were edited together."""
    opened = Opened(
        path, {"x": torch.empty(16, 16), "y": torch.empty(16, 16)}, {"x": "a", "y": "a"}
    )
    one, other = opened.store.hosts
    if stores == 2:
        again = SafetensorsStore(opened.layout, opened.extents, opened.files)
        other = again.hosts[0]
    one.zero_()
    assert same_bits(other, TENSORS["a"])


@pytest.mark.parametrize("tied", ["other tensor", "transposed"])
def test_tied_parameters_that_the_file_has_apart_are_refused(path, tied):
    weight = torch.empty(16, 16)
    other = weight.t() if tied == "transposed" else weight.detach()
    names = {"x": "a", "y": "a" if tied == "transposed" else "b2"}
    save_file({**TENSORS, "b2": torch.zeros(16, 16)}, path)
    with pytest.raises(TensorMismatchError, match=r"'x' and 'y' share memory.*key_map"):
        Opened(path, {"x": weight, "y": other}, names)


# The overlay.


def test_edit_of_a_host_tensor_survives_and_does_not_reach_the_file(opened, path):
    """A frozen weight that was merged in place was reloaded from the file."""
    content = path.read_bytes()
    opened.store.hosts[1].fill_(7.0)
    opened.store.edited(1)
    views = opened.load()
    assert torch.equal(views[1], torch.full((256,), 7.0))
    assert all(same_bits(views[i], opened.tensors[i]) for i in (0, 2, 3, 4))
    assert opened.read <= opened.file_bytes - 1024  # its neighbours share its page
    assert path.read_bytes() == content


def test_written_back_block_is_what_is_loaded_again(opened):
    image = opened.image()
    opened.store.read_into(image)
    views = opened.layout.views(image)
    views[3].fill_(5)
    for zero in (0.0, -0.0):
        views[0].fill_(zero)
        opened.store.write_back(image)
    image.zero_()
    again = opened.load()
    assert same_bits(again[0], torch.full((16, 16), -0.0))
    assert again[3] == 5
    assert all(same_bits(again[i], opened.tensors[i]) for i in (1, 2, 4))
    assert all_equal(opened.store.hosts, again, same_bits)
    assert opened.read <= opened.file_bytes - 1024 - 8


def test_written_back_block_leaves_unchanged_tensors_in_their_file(opened):
    image = opened.image()
    opened.store.read_into(image)
    opened.store.write_back(image)
    opened.load()
    assert opened.read == opened.file_bytes


def test_edits_of_a_tensor_are_written_over_by_a_later_write_back(opened):
    opened.store.hosts[3].fill_(1)
    opened.store.edited(3)
    image = opened.image()
    opened.store.read_into(image)
    opened.layout.views(image)[3].fill_(2)
    opened.store.write_back(image)
    assert opened.load()[3] == 2


def test_hosts_outlive_the_files_that_were_closed_and_removed(path):
    """Shutting down left empty parameters behind: the model was destroyed."""
    opened = Opened(path, TENSORS)
    hosts = opened.store.hosts
    opened.files.close()
    del opened
    gc.collect()
    path.unlink()
    assert all_equal(hosts, TENSORS.values(), same_bits)
    hosts[0].zero_()


# Past the page cache.


@pytest.fixture
def large(tmp_path) -> Iterator[Opened]:
    """A block behind a header of an odd length, read past the page cache."""
    tensors = {
        "a": random_bits(torch.float32, 1, 512),
        "b": random_bits(torch.bfloat16, 512, 1024),
        "c": random_bits(torch.bfloat16, 512, 1024),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"note": "x" * 37})
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = Opened(path, tensors, past_cache=True)
    if not opened.files._descriptor(path).is_direct:
        pytest.skip("the file system of the tests has no O_DIRECT")
    yield opened
    opened.files.close()


def test_image_that_begins_where_the_store_wants_it_is_read_without_a_copy(
    large, monkeypatch
):
    skew = large.store.skew
    assert skew is not None
    memory = torch.empty(large.layout.nbytes + skew.of, dtype=torch.uint8)
    start = (skew.past - memory.data_ptr()) % skew.of
    image = memory[start : start + large.layout.nbytes]
    copied, real = [], ctypes.memmove

    def memmove(target: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        real(target, source, nbytes)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    large.store.read_into(image)
    views = large.layout.views(image)
    assert all_equal(views, large.tensors, same_bits)
    assert sum(copied) <= 4096 + 4 * skew.of, "only what is small, and the ends"


@pytest.mark.parametrize("start", [0, 4, 8, 256])
def test_image_that_begins_anywhere_is_read_right(large, start):
    memory = torch.full((large.layout.nbytes + 512,), 0xA5, dtype=torch.uint8)
    image = memory[start : start + large.layout.nbytes]
    large.store.read_into(image)
    assert all_equal(large.layout.views(image), large.tensors, same_bits)
    assert torch.all(memory[:start] == 0xA5)
    assert torch.all(memory[start + large.layout.nbytes :] == 0xA5)


def test_store_that_is_read_through_the_page_cache_lets_an_image_begin_anywhere(opened):
    assert opened.store.skew is None


def test_image_is_compared_without_paging_in_the_mapping(large):
    """It would bring the whole file into memory at a shutdown."""
    image = large.image()
    large.store.read_into(image)
    assert large.store.holds(image)
    large.layout.views(image)[1].view(torch.uint8)[3, 7] ^= 1
    assert not large.store.holds(image)
    assert not any(map(was_touched, large.store.hosts))
    large.store.write_back(image)
    assert large.store.holds(image)
    large.store.hosts[2].zero_()
    assert not large.store.holds(image)


def was_touched(tensor: torch.Tensor) -> bool:
    """Whether any page under a tensor is in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        (bits,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 8 * first))
    return bool(bits >> 63)


# Failures.


def test_file_truncated_after_it_was_opened_is_an_error_not_stale_bytes(opened, path):
    """A short read once left the layer before it in the buffer, silently."""
    opened.load()
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(
        TruncatedShardError, match=r"'\w+' in .*model.safetensors is truncated: exp"
    ):
        opened.load()


def test_file_that_is_whole_again_when_it_is_looked_at_is_still_an_error(opened, path):
    """Its tensor cannot be named any more; the file is."""
    cut = TruncatedShardError("a file was cut off")
    with pytest.raises(TruncatedShardError) as caught, naming(opened.extents):
        raise cut
    assert caught.value is cut


def test_overlay_of_a_truncated_file_is_an_error_not_a_bus_error(opened, path):
    opened.store.hosts[0].zero_()
    for index in range(5):
        opened.store.edited(index)
    image = opened.image()
    opened.store.read_into(image)
    os.truncate(path, 10)
    with pytest.raises(ShardChangedError):
        opened.store.read_into(image)
    with pytest.raises(ShardChangedError):
        opened.store.write_back(image)


def test_store_with_a_wire_reads_what_is_still_the_files(opened, path):
    """Its host tensors are views of the file, which would end the process now."""
    wired = WiredStore(opened.layout, opened.store.hosts, None, opened.store)
    image = opened.image()
    wired.read_into(image)
    assert all_equal(opened.layout.views(image), TENSORS.values(), same_bits)
    assert wired.holds(image)
    os.truncate(path, 10)
    for use in (wired.read_into, wired.holds, wired.write_back):
        with pytest.raises(TruncatedShardError, match=r"'a' in .*expected 1024 bytes"):
            use(image)


def test_store_with_a_wire_reads_rows_of_what_is_still_the_files(path):
    opened = Opened(path, {"a": TENSORS["a"]})
    wired = WiredStore(opened.layout, opened.store.hosts, None, opened.store)
    expected, found = opened.image(), opened.image()
    opened.store.read_rows_into(expected, [(2, 3), (9, 16)])
    wired.read_rows_into(found, [(2, 3), (9, 16)])
    assert torch.equal(found, expected)
    [view] = opened.layout.views(found)
    assert same_bits(view[9:], TENSORS["a"][9:])
    assert not same_bits(view[3:9], TENSORS["a"][3:9])
    opened.files.close()


def test_store_with_a_wire_knows_edits_of_what_files_have(opened, path):
    wired = WiredStore(opened.layout, opened.store.hosts, None, opened.store)
    image = opened.image()
    wired.read_into(image)
    wired.hosts[0].zero_()
    wired.edited(0)
    assert not wired.holds(image)
    wired.write_back(image)
    assert wired.holds(image)
    os.truncate(path, 10)
    for use in (wired.read_into, wired.holds, wired.write_back):
        with pytest.raises(ShardChangedError, match=r"model\.safetensors"):
            use(image)


def test_store_with_a_wire_keeps_only_the_files_of_the_one_before(opened):
    first = WiredStore(opened.layout, opened.store.hosts, None, opened.store)
    assert origin_of(first) is origin_of(opened.store) is opened.store
    assert origin_of(None) is None
    memory = ModuleStore.pack(opened.layout, opened.tensors, opened.image())
    assert origin_of(memory) is None


@pytest.mark.parametrize("change", ["rewritten", "replaced", "touched", "removed"])
@pytest.mark.parametrize("when", ["before it is opened", "in use"])
def test_changed_file_is_noticed(tmp_path, path, change, when):
    files = FileSet(Checkpoint.open(path).files)
    if when == "in use":
        files.check()
        files.read(path, 0, memoryview(bytearray(8)))
    content = path.read_bytes()
    if change == "rewritten":
        path.write_bytes(content + b"1")
    elif change == "replaced":
        stat = path.stat()
        (tmp_path / "new").write_bytes(content)
        os.utime(tmp_path / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (tmp_path / "new").rename(path)
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(ShardChangedError, match=r"model.safetensors"):
        files.check()
    if when == "before it is opened":
        error = ReadError if change == "removed" else ShardChangedError
        with pytest.raises(error, match=r"model.safetensors"):
            files.read(path, 0, memoryview(bytearray(8)))


def test_read_that_the_system_refuses_names_file_offset_and_reason(
    opened, path, monkeypatch
):
    def preadv(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ReadError, match=r"model.safetensors.* at byte \d+: .*Input"):
        opened.load()


def test_mapping_that_the_system_refuses_is_a_read_error(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ReadError, match=r"model.safetensors cannot be mapped"):
        Opened(path, TENSORS)


def test_memory_of_another_device_is_refused(opened):
    image = torch.empty(opened.layout.nbytes, dtype=torch.uint8, device="meta")
    with pytest.raises(StagehandInternalError, match="meta"):
        opened.store.read_into(image)


def test_extents_that_do_not_fit_the_layout_are_refused(opened):
    with pytest.raises(StagehandInternalError, match="4 extents for 5"):
        SafetensorsStore(opened.layout, opened.extents[1:], opened.files)
    with pytest.raises(StagehandInternalError, match=r"'a' is torch.float32"):
        SafetensorsStore(opened.layout, opened.extents[::-1], opened.files)


# The life of files.


def open_numbers(path: Path) -> int:
    """Return how many of this process's descriptors are the file's."""
    numbers = Path("/proc/self/fd")
    return sum(
        os.path.realpath(numbers / name) == str(path) for name in os.listdir(numbers)
    )


linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")


@linux
def test_closed_files_leave_no_descriptor_and_refuse_reads(path):
    opened = Opened(path, TENSORS)
    store, files = opened.store, opened.files
    opened.load()
    assert open_numbers(path) > 0
    files.close()
    files.close()
    with pytest.raises(ClosedError, match=r"model.safetensors"):
        opened.load()
    del opened, store
    gc.collect()
    assert open_numbers(path) == 0


@linux
def test_file_closed_under_a_reader_stays_open_until_the_read_returns(
    opened, path, monkeypatch
):
    """A number freed under a reader may become another file's, read as weights."""
    real = os.preadv

    def preadv(number, buffers, offset):
        opened.files.close()
        assert os.path.samestat(os.fstat(number), path.stat())
        return real(number, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    target = bytearray(64)
    opened.files.read(path, 0, memoryview(target))
    assert target == path.read_bytes()[:64]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_that_closed_what_it_inherited_reads_on(opened):
    opened.load()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.closerange(3, 1 << 12)
            status = not all_equal(opened.load(), opened.tensors, same_bits)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert all_equal(opened.load(), opened.tensors, same_bits)


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").exists()
    and Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
    reason="this system promises no more memory than it has",
)
def test_file_larger_than_the_hosts_memory_can_be_opened(tmp_path):
    """Linux refuses a plain private mapping of more bytes than memory and swap."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = 3 * memory
    path = raw_file(tmp_path / "m", "a", "U8", torch.empty(0, dtype=torch.uint8), 0)
    span = {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}
    text = json.dumps({"a": span}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        os.truncate(path, 8 + len(text) + count)
    except OSError:
        pytest.skip("this file system holds no file of that size")
    checkpoint = Checkpoint.open(path)
    files = FileSet(checkpoint.files)
    host = files.map_tensor(checkpoint["a"])
    assert host.shape == (count,)
    assert host[-1] == 0
    host[-1] = 3
    assert host[-1] == 3
