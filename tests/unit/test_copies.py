"""Copies in host memory: bit for bit, by our threads where PyTorch may use few."""

import threading

import pytest
import torch

from stagehand.core import copies
from stagehand.core.copies import clear, copy_all, copy_values
from stagehand.core.layout import same_bits
from threadless import without_threads

PIECE = 4096


@pytest.fixture
def used(monkeypatch):
    """A machine with eight processors, of which PyTorch uses one; who copied."""
    monkeypatch.setattr(copies, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(copies, "_LARGE_BYTES", 2 * PIECE)
    monkeypatch.setattr(copies, "_processors", lambda: 8)
    used = []

    def noting(target, source):
        used.append((threading.current_thread().name, target.nbytes))
        copy_values(target, source)

    monkeypatch.setattr(copies, "copy_values", noting)
    return used


def in_threads(used):
    return {name.startswith("stagehand-copier") for name, _ in used} == {True}


def kinds():
    """Tensors of one dtype in several orders, and places for them."""
    floats = torch.randn(97, 61)
    with torch.inference_mode():
        unfree = torch.randn(4000)
        place = torch.empty(4000)
    return [
        (torch.empty(97, 61), floats),
        (torch.empty(61, 97).t(), floats),
        (torch.empty(97, 61), torch.randn(61, 97).t()),
        (torch.empty(1, 61).expand(97, 61), torch.randn(1, 61).expand(97, 61)),
        (torch.empty(9001, dtype=torch.bfloat16), torch.randn(9001).bfloat16()),
        (
            torch.empty(3000, dtype=torch.complex128),
            torch.randn(3000).to(torch.cdouble),
        ),
        (torch.empty(0), torch.empty(0)),
        (torch.empty(1).expand(0), torch.empty(1).expand(0)),
        (torch.empty(()), torch.tensor(float("nan"))),
        (place, unfree),
        (torch.empty(4000), unfree),
    ]


def test_large_copies_are_made_by_threads_in_pieces_and_bit_for_bit(used):
    targets, sources = zip(*kinds(), strict=True)
    copy_all(targets, sources)
    assert in_threads(used)
    assert max(nbytes for _, nbytes in used) > PIECE  # what has another order is whole
    assert sum(nbytes for _, nbytes in used) == sum(t.nbytes for t in targets)
    for target, source in zip(targets, sources, strict=True):
        assert same_bits(target, source)
    alive = [thread.name for thread in threading.enumerate()]
    assert not [name for name in alive if name.startswith("stagehand-copier")]


def test_nothing_is_copied_where_many_show_nothing():
    empty = torch.empty(1, 3).expand(0, 3)
    copy_values(empty, torch.empty(0, 3))
    assert empty.shape == (0, 3)


def test_copies_are_no_part_of_a_graph():
    source, target = torch.nn.Parameter(torch.randn(8)), torch.zeros(8)
    copy_values(target, source)
    copy_values(source, target)
    assert target.grad_fn is None
    assert torch.equal(target, source)


def test_large_memory_is_cleared_by_threads(used):
    memory = torch.full((5 * PIECE + 3,), 7, dtype=torch.uint8)
    assert clear(memory) is memory
    assert not memory.any()


@pytest.mark.parametrize(
    ("nbytes", "threads", "processors", "shared"),
    [
        (2 * PIECE - 4, 1, 8, False),
        (2 * PIECE, 2, 8, True),
        (3 * PIECE, 3, 8, False),
        (3 * PIECE, 4, 8, False),
        (3 * PIECE, 1, 1, False),
        (3 * PIECE, 1, 2, True),
        (3 * PIECE, 2, 2, False),
    ],
)
def test_small_copies_and_those_of_many_threads_of_pytorch_are_its_own(
    used, monkeypatch, nbytes, threads, processors, shared
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(copies, "_processors", lambda: processors)
    source = torch.randn(nbytes // 4)
    target = torch.empty_like(source)
    copy_all([target], [source])
    assert torch.equal(target, source)
    assert in_threads(used) == shared


def test_copy_that_fails_leaves_none_under_way(used, monkeypatch):
    others, failed = threading.Event(), threading.Event()
    begun, ended = [], []

    def copy(target, source):
        if target.numel() == 7:
            others.wait(60)
            failed.set()
            raise MemoryError
        begun.append(target)
        others.set()
        failed.wait(60)
        copy_values(target, source)
        ended.append(target)

    monkeypatch.setattr(copies, "copy_values", copy)
    source, target = torch.randn(50 * PIECE), torch.zeros(50 * PIECE)
    small = torch.zeros(7)
    with pytest.raises(MemoryError):
        copy_all([small, target], [small, source])
    assert 1 <= len(begun) == len(ended)
    monkeypatch.setattr(copies, "copy_values", copy_values)
    copy_all([target], [source])
    assert same_bits(target, source)


def test_without_another_thread_copies_are_made_in_this_one(used):
    source, target = torch.randn(5 * PIECE), torch.zeros(5 * PIECE)
    with without_threads():
        copy_all([target], [source])
    assert same_bits(target, source)
    assert {name for name, _ in used} == {threading.current_thread().name}
    assert {nbytes for _, nbytes in used} == {PIECE}
