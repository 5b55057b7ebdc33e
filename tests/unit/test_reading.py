"""Reading parts of files: exact, past the page cache or through it, by several
threads."""

import contextlib
import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagehand.core.device import host_memory
from stagehand.errors import (
    ClosedError,
    ReadError,
    ShardChangedError,
    TruncatedShardError,
)
from stagehand.stores import files as files_module
from stagehand.stores import reading
from stagehand.stores.base import Skew
from stagehand.stores.files import FileSet
from stagehand.stores.headers import FileStamp
from stagehand.stores.reading import OpenFile, Part, Scratch, Sectors, cut

KIB = 1 << 10
MIB = 1 << 20
SIZE = 7 * MIB + 1001


def new_file(path: Path, nbytes: int = SIZE) -> bytes:
    generator = torch.Generator().manual_seed(nbytes)
    content = torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)
    raw = content.numpy().tobytes()
    path.write_bytes(raw)
    return raw


def opens_direct(folder: Path) -> bool:
    """What the system says: of what is tested here nobody would be told otherwise."""
    path = folder / "probe"
    path.write_bytes(bytes(4096))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def direct(tmp_path):
    if not opens_direct(tmp_path):
        pytest.skip("the file system of the tests has no O_DIRECT")


def writable(tensor: torch.Tensor) -> memoryview:
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def opened(path: Path, *, past_cache: bool = True) -> FileSet:
    return FileSet({path: FileStamp.of(path)}, past_cache=past_cache)


def drop_from_cache(path: Path) -> None:
    """Let the page cache forget a file."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)


def cached_share(path: Path) -> float:
    """How much of a file the page cache holds."""
    size = path.stat().st_size
    number = os.open(path, os.O_RDONLY)
    asked = (ctypes.c_uint64 * 2)(0, size)
    found = (ctypes.c_uint64 * 5)()
    refused = ctypes.CDLL(None).syscall(451, number, asked, found, 0)
    os.close(number)
    if refused:
        pytest.skip("this kernel does not say what the page cache holds")
    return found[0] * os.sysconf("SC_PAGE_SIZE") / size


# Cutting.

PARTS = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 1 << 24)), min_size=1, max_size=8
)


@given(PARTS, st.integers(0, 4096), st.sampled_from([1, 4, 512, 4096]), st.booleans())
def test_chunks_are_exactly_the_parts_and_no_longer_than_a_read_may_be(
    sizes, address, memory, packed
):
    parts, source, target = [], 0, 0
    for gap, nbytes in sizes:
        source += 8 * gap
        target += 0 if packed else gap
        parts.append(Part(source, target, nbytes))
        source += nbytes
        target += nbytes
    sectors = Sectors(memory, 512)
    chunks = cut(parts, address, sectors)
    pieces = sorted(piece for chunk in chunks for piece in chunk.parts)
    at = iter(pieces)
    for part in parts:
        reached = part.source
        while reached < part.end:
            piece = next(at)
            assert piece.source == reached
            assert piece.target - piece.source == part.target - part.source
            reached = piece.end
        assert reached == part.end
    assert next(at, None) is None
    assert [chunk.start for chunk in chunks] == sorted(chunk.start for chunk in chunks)
    for chunk in chunks:
        assert chunk.end - chunk.start <= reading._CHUNK_BYTES
        if chunk.in_place:
            (part,) = chunk.parts
            assert part.source % 512 == part.nbytes % 512 == 0
            assert (address + part.target) % memory == 0


def test_small_neighbours_are_one_read_and_what_is_far_is_another():
    near = [Part(100 * i, 256 * i, 90) for i in range(5)]
    far = Part(MIB, 2000, 90)
    chunks = cut([far, *near], 0, Sectors(512, 512))
    assert [chunk.parts for chunk in chunks] == [tuple(near), (far,)]


def test_little_that_is_left_of_a_large_tensor_is_read_with_what_follows():
    end = reading._CHUNK_BYTES + 2 * 4096
    parts = [Part(0, 0, end), Part(end, end, 100)]
    chunks = cut(parts, 0, Sectors(512, 4096))
    assert [chunk.in_place for chunk in chunks] == [True, False]
    assert (chunks[1].start, chunks[1].end) == (reading._CHUNK_BYTES, end + 100)


def test_large_tensor_in_line_with_its_sectors_is_read_in_place_but_for_its_ends():
    part = Part(1000, 1000, MIB)
    head, body, tail = cut([part], 0, Sectors(512, 512))
    assert (head.in_place, body.in_place, tail.in_place) == (False, True, False)
    assert body.start == 4096
    assert body.end == (MIB + 1000) // 512 * 512
    (whole,) = cut([part], 8, Sectors(512, 512))
    assert not whole.in_place


@pytest.mark.parametrize(
    ("address", "sectors", "starts"),
    [
        (0, Sectors(512, 512), [4096]),
        (1536, Sectors(512, 512), [4096 - 1536]),
        (3072, Sectors(512, 512), [4096 - 3072 + 4096]),
        (4, Sectors(4, 512), [1024]),
        (4096, Sectors(4096, 4096), [4096]),
        (512, Sectors(4096, 4096), []),
        (4, Sectors(512, 512), []),
        (4, Sectors(1, 1), [1000]),
    ],
)
def test_tensor_is_read_in_place_from_a_page_of_memory_on_if_its_sectors_allow(
    address, sectors, starts
):
    """Elsewhere a disk may be a fifth slower."""
    part = Part(1030, 1030, MIB) if address == 3072 else Part(1000, 1000, MIB)
    chunks = cut([part], address, sectors)
    assert [chunk.start for chunk in chunks if chunk.in_place] == starts


@pytest.mark.parametrize(
    ("sectors", "sizes", "expected"),
    [
        # Source less target: 1536, 512, 3584 and 4; bytes decide.
        (Sectors(512, 512), (5, 6, 7, 9), Skew(3584, 4096)),
        (Sectors(512, 512), (5, 6, 7, 90), Skew(4, 4096)),
        (Sectors(4, 512), (5, 6, 7, 9), Skew(4, 4096)),
        (Sectors(4096, 4096), (5, 6, 7, 9), Skew(4, 4096)),
        (Sectors(1, 1), (5, 6, 7, 9), None),
    ],
)
def test_image_begins_where_most_is_in_line_and_of_that_most_in_pages(
    sectors, sizes, expected
):
    class Files(FileSet):
        def sectors(self, path):
            return sectors

    shifts = (4096 + 1536, 2 * 4096 + 512, 3584, 3 * 4096 + 4)
    parts = [
        Part(i * MIB + shift, i * MIB, KIB * size)
        for i, (shift, size) in enumerate(zip(shifts, sizes, strict=True))
    ]
    assert Files({}).skew({Path("w"): parts}, widest=2) == expected


# Reading.


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("skew", [0, 8, 300])
def test_every_byte_is_where_it_belongs_and_no_other_is_touched(
    path, tmp_path, past_cache, cached, skew
):
    content = new_file(path)
    if not cached:
        drop_from_cache(path)
    memory = host_memory(8 * MIB).fill_(0xA5)
    target = writable(memory)
    parts = [Part(13, 64, 700), Part(SIZE - 77, 900, 77), Part(1024, skew + KIB, MIB)]
    parts.append(Part(KIB + MIB, 2 * MIB + 5, 5 * MIB))  # more than a thread's buffer
    files = opened(path, past_cache=past_cache)
    assert files.fill({path: parts}, target) == sum(part.nbytes for part in parts)
    expected = bytearray(b"\xa5" * len(target))
    for part in parts:
        piece = content[part.source : part.end]
        expected[part.target : part.target + part.nbytes] = piece
    assert target == expected
    # A read that is not in line with sectors is refused, and all go the other way.
    assert files._descriptor(path).is_direct is (past_cache and opens_direct(tmp_path))
    files.close()


@pytest.mark.parametrize(
    "again",
    [
        [Part(100, 0, 9000), Part(100, 9000, 50)],  # begin together
        [Part(0, 0, 9000), Part(40, 9000, 50)],  # one is in the other
        [Part(100, 4, MIB), Part(100, MIB + 100, MIB)],  # one is in line with sectors
        [Part(100, 1, 18 * MIB), Part(100, 18 * MIB + 6, 18 * MIB)],  # several reads
        [Part(0, 20 * MIB + 1, 17 * MIB), Part(90, 0, 50), Part(100, 64, 17 * MIB)],
    ],
)
def test_what_several_tensors_have_of_a_file_is_read_for_each(path, direct, again):
    """Of the one that went on longest, what the last one lacked was not read."""
    content = new_file(path, 19 * MIB)
    drop_from_cache(path)
    memory = host_memory(38 * MIB).fill_(0xA5)
    with contextlib.closing(opened(path)) as files:
        files.fill({path: again}, writable(memory))
        assert files._descriptor(path).is_direct
    for part in again:
        found = memory[part.target : part.target + part.nbytes].numpy().tobytes()
        assert found == content[part.source : part.end], part


def test_what_is_not_in_the_page_cache_stays_out_of_it(path, direct):
    content = new_file(path)
    drop_from_cache(path)
    assert cached_share(path) == 0
    files, target = opened(path), bytearray(SIZE)
    files.read(path, 0, memoryview(target))
    assert target == content
    assert cached_share(path) == 0
    files.close()


def test_what_is_in_the_page_cache_is_taken_from_there(path, direct, monkeypatch):
    """A disk is many times slower than a copy of what is there already."""
    content = new_file(path)
    path.read_bytes()
    assert cached_share(path) >= 1
    files, target = opened(path), bytearray(SIZE)
    monkeypatch.setattr(OpenFile, "_read_past", None)
    files.read(path, 0, memoryview(target))
    assert target == content
    assert cached_share(path) >= 1
    files.close()


@pytest.mark.parametrize("when", ["at open", "at read"])
def test_file_system_that_refuses_is_read_through_the_page_cache_and_it_is_left_clean(
    path, monkeypatch, when, recwarn
):
    content = new_file(path)
    drop_from_cache(path)
    real_open, real_read, numbers = os.open, os.preadv, set()

    def open_(name, flags, *rest):
        if flags & reading._O_DIRECT and when == "at open":
            raise OSError(errno.EINVAL, "Invalid argument")
        number = real_open(name, flags, *rest)
        if flags & reading._O_DIRECT:
            numbers.add(number)
        return number

    def preadv(number, *rest):
        if number in numbers:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(number, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    files, target = opened(path), bytearray(SIZE)
    files.read(path, 0, memoryview(target))
    assert not files._descriptor(path).is_direct  # nobody asks it again
    files.close()
    assert target == content
    assert cached_share(path) < 0.1
    assert not recwarn


def test_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(path, monkeypatch):
    """The second opening, for reads past the page cache, finds another file."""
    raw, sectors, opened = new_file(path, 1001), reading._sectors, os.open

    def replace(number):
        path.unlink()
        path.write_bytes(bytes(1001))
        return sectors(number)

    numbers = []
    monkeypatch.setattr(reading, "_sectors", replace)
    monkeypatch.setattr(
        reading.os, "open", lambda *a: numbers.append(opened(*a)) or numbers[-1]
    )
    file = OpenFile(path, past_cache=True)
    assert not file.is_direct
    for number in numbers[1:]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
    target = torch.zeros(1001, dtype=torch.uint8)
    [chunk] = cut([Part(0, 0, 1001)], target.data_ptr(), file.sectors)
    file.read(chunk, writable(target), Scratch())
    assert target.numpy().tobytes() == raw


def test_second_opening_that_fails_is_an_error_and_leaves_no_open_file(
    path, direct, monkeypatch
):
    """The system has no file number left for reads past the page cache."""
    new_file(path)
    real, numbers = os.open, []

    def open_(*args):
        if numbers:
            raise OSError(errno.EMFILE, "Too many open files")
        numbers.append(real(*args))
        return numbers[0]

    monkeypatch.setattr(reading.os, "open", open_)
    files = opened(path)
    with pytest.raises(ReadError, match=r"cannot be opened: .*Too many open files"):
        files.read(path, 0, memoryview(bytearray(KIB)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(numbers.pop())
    monkeypatch.setattr(reading.os, "open", real)
    files.read(path, 0, memoryview(bytearray(KIB)))
    files.close()


def test_another_failure_past_the_page_cache_is_not_taken_for_a_refusal(
    path, direct, monkeypatch
):
    new_file(path)
    drop_from_cache(path)

    def preadv(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    files = opened(path)
    with pytest.raises(ReadError, match=r"weights cannot be read at byte 0.*Input"):
        files.read(path, 0, memoryview(bytearray(KIB)))
    files.close()


@pytest.mark.parametrize("past_cache", [False, True])
def test_file_that_shrank_is_named_with_what_was_expected_and_found(path, past_cache):
    new_file(path)
    files = opened(path, past_cache=past_cache)
    files.read(path, 0, memoryview(bytearray(KIB)))
    os.truncate(path, MIB + 100)
    drop_from_cache(path)
    with pytest.raises(TruncatedShardError, match=r"weights is truncated: expected"):
        files.read(path, KIB, memoryview(bytearray(2 * MIB)))
    with pytest.raises(ShardChangedError, match=f"found FileStamp.size={MIB + 100}"):
        files.read(path, KIB, memoryview(bytearray(KIB)))
    files.close()


@pytest.mark.parametrize("past_cache", [False, True])
def test_file_that_is_written_to_while_it_is_read_is_no_source_of_weights(
    path, past_cache, monkeypatch
):
    """Some of the bytes would be old and some new, and no size would tell."""
    new_file(path)
    files = opened(path, past_cache=past_cache)
    real = os.preadv

    def preadv(*arguments):
        with path.open("r+b") as file:
            file.seek(SIZE - 1)
            file.write(b"x")
        os.utime(path, ns=(5, 5))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ShardChangedError, match="changed since its header was read"):
        files.read(path, 0, memoryview(bytearray(KIB)))
    files.close()


def test_after_a_failure_of_one_thread_no_other_writes_any_more(path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 64 * KIB)
    monkeypatch.setattr(files_module, "_SHARED_BYTES", 0)
    new_file(path)
    files = opened(path, past_cache=False)
    real, late = os.preadv, threading.Event()

    def preadv(number, buffers, offset):
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        late.wait(0.05)
        return real(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    target = bytearray(SIZE)
    parts = [Part(at, at, 64 * KIB) for at in range(0, MIB, 128 * KIB)]
    with pytest.raises(ReadError, match="at byte 0"):
        files.fill({path: parts}, memoryview(target))
    before = bytes(target)
    late.set()
    files.close()
    assert target == before


def test_several_threads_read_one_block(path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 512 * KIB)
    monkeypatch.setattr(files_module, "_READERS", 3)
    content = new_file(path)
    files = opened(path, past_cache=False)
    real, together = os.preadv, threading.Barrier(3)

    def preadv(*arguments):
        together.wait(120)  # breaks unless three are here at once
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    target = bytearray(3 * 512 * KIB)
    files.read(path, 0, memoryview(target))
    assert target == content[: len(target)]
    files.close()


def test_closed_files_refuse_and_end_their_threads(path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 512 * KIB)
    new_file(path)
    files, target = opened(path, past_cache=False), memoryview(bytearray(SIZE))
    files.read(path, 0, target)
    assert any(t.name.startswith("stagehand-file") for t in threading.enumerate())
    files.close()
    files.close()
    assert not any(t.name.startswith("stagehand-file") for t in threading.enumerate())
    with pytest.raises(ClosedError, match="weights"):
        files.read(path, 0, target)


def test_files_closed_under_a_reader_are_an_error_of_closed_files(path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 512 * KIB)
    monkeypatch.setattr(files_module, "_READERS", 1)
    new_file(path)
    files = opened(path, past_cache=False)
    real = os.preadv

    def preadv(*arguments):
        files.close()  # in a reader's thread, as the garbage collector may
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ClosedError, match="weights cannot be read: its files were c"):
        files.read(path, 0, memoryview(bytearray(SIZE)))


def test_checkpoint_that_fits_the_free_memory_is_read_through_the_page_cache(
    path, monkeypatch
):
    new_file(path)
    stamps = {path: FileStamp.of(path)}
    for share, past_cache in ((0.9, True), (10.0, False)):
        monkeypatch.setattr(
            files_module, "free_host_bytes", lambda share=share: int(share * SIZE)
        )
        assert FileSet(stamps)._past_cache is past_cache


def test_buffer_of_a_thread_is_made_once():
    scratch = Scratch()
    assert scratch.get()[1] == scratch.get()[1]
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.append(scratch.get()[1]))
    thread.start()
    thread.join()
    assert other[0] != scratch.get()[1]


def test_a_forked_process_leaves_file_numbers_that_may_be_its_own(path, monkeypatch):
    new_file(path)
    file = OpenFile(path, past_cache=False)
    number = file.number
    with monkeypatch.context() as forked:
        forked.setattr(OpenFile, "_getpid", staticmethod(lambda: -1))
        del file
    os.fstat(number)
    os.close(number)


def test_files_that_are_closed_while_one_is_opened_are_not_read(path, monkeypatch):
    new_file(path)
    files, opens = opened(path), FileSet._open

    def closed_meanwhile(self, which):
        file = opens(self, which)
        self.close()
        return file

    monkeypatch.setattr(FileSet, "_open", closed_meanwhile)
    with pytest.raises(ClosedError, match="its files were closed"):
        files.read(path, 0, memoryview(bytearray(KIB)))
    assert not files._descriptors
