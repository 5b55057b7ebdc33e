"""How models divide the memory of the device on which they take turns."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagehand.residency.shares import Claim, Share, divide


def claim(weights, budget=100, *, passes=1, floor=10, compute=0.0, **more):
    """A model whose pass takes as long as its loads, or its compute if that is more."""
    return Claim(
        budget=budget,
        weights=weights,
        floor=min(floor, weights),
        ring=min(2 * floor, weights),
        seconds=lambda kept: max(compute, float(max(0, weights - kept))),
        passes=passes,
        **more,
    )


def shares(cap, *claims, fixed=(), **more):
    found = divide(cap, dict(enumerate(claims)), fixed=dict(fixed), **more)
    return [found[number] for number in range(len(claims))]


def round_seconds(claims, kept, cap):
    """A round of all turns, by the formula in the head of the file."""
    seconds = 0.0
    for number, one in enumerate(claims):
        later = min(one.budget, cap - sum(kept) + kept[number]) - one.ring
        first = one.seconds(kept[number])
        seconds += first + (one.passes - 1) * one.seconds(max(0, later))
    return seconds


def test_models_that_fit_together_keep_everything():
    one, other = shares(100, claim(60), claim(40))
    assert one == Share(60, 60)
    assert other == Share(40, 40)


def test_models_that_fit_together_keep_everything_however_often_they_run():
    assert shares(100, claim(60, passes=4), claim(40)) == [Share(60, 60), Share(40, 40)]


def test_models_that_almost_fit_together_need_room_for_what_is_missing_alone():
    kept = [share.kept for share in shares(100, claim(50), claim(55))]
    assert sum(kept) > 100 - 20, "a ring"


def test_one_ring_is_enough_for_models_that_take_turns():
    one, other = shares(100, claim(200), claim(200))
    assert one.kept + other.kept == 80
    assert one.limit == other.kept + 20 == 60
    assert abs(one.kept - other.kept) <= 80 // 32 + 1


def test_models_that_run_at_once_have_a_ring_each():
    one, other = shares(100, claim(200), claim(200), apart=True)
    assert one.limit + other.limit <= 100
    assert one.limit == one.kept + 20
    assert one.kept + other.kept == 60


def test_models_that_cannot_run_at_once_have_all_the_room_in_turns():
    one, other = shares(15, claim(200), claim(200), apart=True)
    assert one.limit + other.kept == other.limit + one.kept == 15


def test_a_model_with_many_passes_in_a_row_gets_the_room_of_the_others():
    often, once = shares(100, claim(200, passes=4), claim(200))
    assert once.kept == 0
    assert often == Share(100, 80)
    assert once.limit == 20
    both = shares(100, claim(200, passes=4), claim(200, passes=3))
    assert [share.kept for share in both] == [0, 0]
    assert [share.limit for share in both] == [100, 100]


def test_room_that_many_passes_in_a_row_cannot_use_is_kept_by_the_others():
    often, once = shares(100, claim(200, 50, passes=4), claim(200))
    assert often.limit == 50
    assert once.kept == 40


def test_later_passes_need_a_ring_within_their_limit():
    often, once = shares(100, claim(200, passes=4, compute=110.0), claim(200))
    assert once.kept == 0
    assert often.limit == 100


def test_a_model_keeps_what_it_cannot_give_up_whatever_that_costs_the_others():
    some = claim(200, passes=4, bound=6), claim(200, passes=3, bound=8)
    assert [share.kept for share in shares(100, *some)] == [6, 8]


def test_models_of_unlike_sizes_keep_like_parts_of_themselves():
    large, small = shares(100, claim(400), claim(100))
    assert large.kept + small.kept == 80
    assert abs(large.kept / 400 - small.kept / 100) < 0.05


def test_room_goes_to_who_is_faster_for_it():
    hidden, lacking = shares(100, claim(200, compute=200.0), claim(200))
    assert lacking.kept == 80
    assert hidden.kept == 0


def test_models_of_which_no_time_is_known_keep_equally_much():
    free = [replace(claim(80), seconds=lambda kept: 0.0) for _ in range(2)]
    one, other = shares(100, *free)
    assert one.kept + other.kept + 20 <= 100
    assert abs(one.kept - other.kept) <= 100 // 32
    assert one.kept > 30


def test_what_is_fixed_is_neither_more_nor_less():
    firm, other = shares(100, claim(60), claim(200), fixed={0: 60})
    assert firm == Share(60, 60)
    assert other.limit == 40
    assert other.kept == 20


def test_a_guest_keeps_nothing_and_may_take_what_nobody_keeps():
    host, guest = shares(100, claim(60), claim(30), guests={1})
    assert host.kept == 60
    assert guest == Share(40, 0)


def test_nobody_gets_more_than_its_own_budget():
    small, large = shares(100, claim(200, budget=30), claim(200))
    assert small.kept <= small.limit <= 30
    assert large.limit <= 100


claims = st.builds(
    claim,
    st.integers(1, 300),
    st.integers(10, 120),
    passes=st.integers(1, 4),
    floor=st.integers(1, 30),
    compute=st.floats(0, 300),
    bound=st.integers(0, 2),
)


@given(st.lists(claims, min_size=1, max_size=4), st.integers(40, 150), st.booleans())
def test_a_limit_and_what_the_others_keep_never_exceed_the_cap(some, cap, apart):
    found = shares(cap, *some, apart=apart)
    for number, share in enumerate(found):
        others = sum(s.kept for n, s in enumerate(found) if n != number)
        assert share.limit + others <= cap or share.limit == 0
        assert share.kept <= share.limit <= some[number].budget
        if some[number].budget >= some[number].floor:
            assert share.limit >= min(some[number].floor, some[number].weights)
    if apart and sum(one.floor for one in some) <= cap:
        assert sum(share.limit for share in found) <= cap


@settings(max_examples=40)
@given(st.lists(claims, min_size=2, max_size=3), st.integers(60, 150))
def test_no_other_division_makes_a_round_much_shorter(some, cap):
    kept = [share.kept for share in shares(cap, *some)]
    seconds = round_seconds(some, kept, cap)
    steps = [range(0, min(one.most, cap) + 1, 10) for one in some]
    best = min(
        (
            round_seconds(some, other, cap)
            for other in product(*steps)
            if all(
                sum(other) - own + max(own + one.ring, one.floor) <= cap
                for one, own in zip(some, other, strict=True)
            )
        ),
        default=float("inf"),
    )
    assert seconds <= best + 0.02 * sum(one.weights * one.passes for one in some) + 5


@pytest.mark.parametrize("cap", [0, 5])
def test_a_cap_that_is_too_small_leaves_no_share_that_would_do(cap):
    one, other = shares(cap, claim(200), claim(200))
    assert one.limit <= cap
    assert other.limit <= cap


def test_what_is_fixed_beyond_the_cap_leaves_nothing():
    _, other = shares(50, claim(60), claim(200), fixed={0: 60})
    assert other == Share(0, 0)
