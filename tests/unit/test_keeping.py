"""The pure choice of blocks from disk that stay in host memory."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.residency.keeping import _disk_uses, choose_kept
from stagehand.residency.plan import Workload


def workload(order, nbytes, seconds=None, **more):
    return Workload(
        order=tuple(order),
        nbytes=tuple(nbytes),
        seconds=None if seconds is None else tuple(seconds),
        link_bytes_per_second=1e9,
        **more,
    )


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(SIZES, st.data())
def test_what_is_kept_fits_and_nothing_more_would(sizes, data):
    blocks = range(len(sizes))
    candidates = data.draw(st.sets(st.sampled_from(list(blocks))))
    room = data.draw(st.integers(-5, sum(sizes) + 5))
    seconds = data.draw(
        st.none() | st.lists(st.floats(0, 9), min_size=len(sizes), max_size=len(sizes))
    )
    kept = choose_kept(workload(blocks, sizes, seconds), candidates, room)
    assert kept <= candidates
    left = max(0, room) - sum(sizes[block] for block in kept)
    assert left >= 0
    assert all(sizes[block] > left for block in candidates - kept)


@pytest.mark.parametrize("kept", range(1, 48))
def test_equal_blocks_are_read_evenly(kept):
    chosen = choose_kept(workload(range(48), [10] * 48), range(48), 10 * kept)
    assert len(chosen) == kept
    read = [block for block in range(96) if block % 48 not in chosen]
    gaps = [after - before for before, after in itertools.pairwise(read)]
    assert max(gaps) - min(gaps) <= 2
    assert max(gaps) <= 48 / (48 - kept) + 2


def test_the_disk_has_the_time_of_blocks_that_are_on_the_device():
    """Blocks 4 to 7 stay there: around them more can be read."""
    candidates = [0, 1, 2, 3, 8, 9, 10, 11]
    seconds = [1.0] * 4 + [5.0] * 4 + [1.0] * 4
    chosen = choose_kept(workload(range(12), [10] * 12, seconds), candidates, 60)
    assert len(chosen) == 6
    assert 3 not in chosen


def test_bytes_that_cross_the_link_are_what_is_kept():
    packed = workload(range(4), [100] * 4, link_nbytes=(25,) * 4)
    assert len(choose_kept(packed, range(4), 75)) == 3


def test_blocks_that_are_used_often_come_first():
    uses = [0, 1, 2, 1, 3, 1]
    assert choose_kept(workload(uses, [10] * 4), range(4), 10) == {1}


def test_blocks_that_nobody_uses_are_not_kept():
    assert choose_kept(workload([0, 1], [10] * 3), range(3), 100) == {0, 1}
    assert choose_kept(workload([0, 1], [10] * 3), [], 100) == frozenset()


def test_the_disk_has_the_time_of_all_uses_in_a_loop():
    found = _disk_uses(workload([0, 1, 0, 2, 0], [1, 1, 1], [5, 1, 2, 1, 3]), {1, 2})
    assert found == ([1, 2], [3, 9])
