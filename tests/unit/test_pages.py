"""What is known of a mapping's pages without reading them."""

import mmap
import os
import sys

import pytest
import torch

from stagehand.stores import pages
from stagehand.stores.pages import some_elements, was_written

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")

PAGES = 64
SAMPLES = 8  # of a tensor
APART = PAGES // SAMPLES  # pages


@pytest.fixture
def mapped(tmp_path):
    """A private mapping of a file of ones, as float32, of which nothing was read."""
    path = tmp_path / "ones"
    ones = torch.ones(PAGES * mmap.PAGESIZE // 4)
    path.write_bytes(ones.numpy().tobytes())
    with path.open("rb") as file:
        memory = mmap.mmap(
            file.fileno(),
            0,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    memory.madvise(mmap.MADV_RANDOM)  # else a fault brings the pages around it, too
    return torch.frombuffer(memory, dtype=torch.float32)


def pages_of(tensor):
    """The numbers of a tensor's pages that this process has in memory."""
    first = tensor.data_ptr() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        raw = os.pread(file.fileno(), 8 * PAGES, 8 * first)
    entries = torch.frombuffer(bytearray(raw), dtype=torch.int64)
    return (entries < 0).nonzero().flatten().tolist()  # bit 63


def elements(sample):
    return sample.view(torch.float32).tolist()


def on_page(tensor, number):
    return tensor[number * mmap.PAGESIZE // 4]


def test_sample_of_what_nobody_wrote_reads_no_page(mapped):
    assert elements(some_elements([mapped])) == [0] * SAMPLES
    assert pages_of(mapped) == []


@pytest.mark.parametrize("number", range(SAMPLES))
def test_sample_has_the_elements_on_pages_that_were_written(mapped, number):
    on_page(mapped, number * APART).fill_(5)
    expected = [0.0] * SAMPLES
    expected[number] = 5
    assert elements(some_elements([mapped])) == expected
    assert pages_of(mapped) == [number * APART]


def test_sample_takes_nothing_from_the_page_beside_one_that_was_written(mapped):
    for number in range(SAMPLES):
        on_page(mapped, number * APART + 1).fill_(5)
    assert elements(some_elements([mapped])) == [0] * SAMPLES


def test_page_that_was_only_read_still_is_its_files(mapped):
    assert on_page(mapped, APART) == 1
    assert not was_written(mapped)
    assert elements(some_elements([mapped])) == [0] * SAMPLES


def test_sample_of_memory_has_the_elements_themselves(mapped):
    memory = torch.arange(800.0)
    assert elements(some_elements([memory])) == memory[::100].tolist()
    mapped.fill_(3)
    assert elements(some_elements([mapped, memory[:0]])) == [3] * SAMPLES


@pytest.mark.parametrize("size", [6, 800])
@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_sample_of_a_conjugate_or_a_negative_tells_of_edits(size, view):
    memory = torch.randn(size, dtype=torch.complex64)
    before = some_elements([view(memory)])
    assert torch.equal(some_elements([view(memory)]), before)
    memory[0] = 5
    assert not torch.equal(some_elements([view(memory)]), before)


@pytest.mark.parametrize("number", range(SAMPLES))
def test_sample_of_a_mapped_negative_has_the_elements_that_were_written(mapped, number):
    on_page(mapped, number * APART).fill_(5)
    expected = [0.0] * SAMPLES
    expected[number] = -5
    assert elements(some_elements([torch._neg_view(mapped)])) == expected
    assert pages_of(mapped) == [number * APART]


def test_sample_of_nothing_is_empty():
    assert some_elements([]).numel() == some_elements([torch.empty(0)]).numel() == 0


@pytest.mark.parametrize("number", [0, 1, PAGES - 1])
def test_a_write_is_seen_in_the_tensor_that_has_the_page_alone(mapped, number):
    on_page(mapped, number).fill_(5)
    for other in range(PAGES):
        page = mapped[other * mmap.PAGESIZE // 4 :][: mmap.PAGESIZE // 4]
        assert was_written(page) == (other == number)
    assert was_written(mapped)


def test_without_the_systems_answer_all_is_sampled_and_nothing_was_written(
    mapped, monkeypatch
):
    monkeypatch.setattr(pages, "_PAGEMAP", "/nowhere/pagemap")
    mapped[0] = 5
    assert elements(some_elements([mapped])) == [5.0, *[1.0] * (SAMPLES - 1)]
    assert not was_written(mapped)
