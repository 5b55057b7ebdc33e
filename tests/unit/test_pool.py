"""SlabPool: host memory in size classes, and how much of it there is in the end."""

import pytest
import torch

from stagehand.activations.pool import SlabPool
from stagehand.core.arena import Arena
from stagehand.core.ledger import NO_LIMIT, Account
from stagehand.errors import StagehandWarning

STEP = 65_536  # to which sizes without a class are rounded up


class Held:
    """Who has a slab."""

    def __init__(self, slab):
        self.slab = slab


def new_pool(classes=(), counts=(), limit=NO_LIMIT):
    def make(nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    return SlabPool(Arena("pinned", make, Account("pinned", limit)), classes, counts)


def step(pool, *counts):
    """Take so many slabs at a time, one group after the other; say which were made."""
    before = pool.misses
    for count in counts:
        taken = [Held(pool.take(100) or pool.make(100)) for _ in range(count)]
        for held in taken:
            pool.give(held)
    return pool.misses - before


def growing_pool():
    pool = new_pool([100], [0])
    with pytest.warns(StagehandWarning, match="pageable"):
        pool.give(Held(pool.make(100)))
    return pool


@pytest.mark.parametrize("counts", [(3,), (1, 1, 1), (2, 1), (1, 3, 2)])
def test_next_step_has_as_many_as_were_lacking_at_a_time_and_no_more(counts):
    pool = growing_pool()
    step(pool, *counts)
    pool.grow()
    assert pool._arena.leased_bytes == 100 * max(counts)
    assert step(pool, *counts) == 0
    pool.grow()
    assert pool._arena.leased_bytes == 100 * max(counts)


def test_pageable_memory_that_came_back_is_not_lacking():
    pool = growing_pool()
    step(pool, 1)
    pool.grow()
    step(pool, 2)
    pool.grow()
    assert pool._arena.leased_bytes == 200


def test_as_many_of_other_sizes_go_as_one_that_is_new_needs():
    pool = new_pool(limit=3 * STEP)
    small = [Held(pool.make(STEP)) for _ in range(3)]
    for held in small:
        pool.give(held)
    large = Held(pool.make(2 * STEP + 1))
    assert pool.pageable == 0
    assert large.slab.size == 3 * STEP
    pool.give(large)
    pool.close()
    assert pool._arena.leased_bytes == 0


def test_slabs_of_classes_stay_where_a_larger_one_is_needed():
    pool = new_pool([100], [2], limit=STEP + 100)
    with pytest.warns(StagehandWarning, match="pageable"):
        pool.make(101)
    assert step(pool, 2) == 0
