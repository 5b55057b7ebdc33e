"""Which model runs next."""

import pytest

from stagehand.residency.turns import Turns


def ran(*passes):
    turns = Turns()
    for who in passes:
        turns.begin(who)
    return turns


def test_before_anything_is_known_the_same_model_is_expected_again():
    assert ran().coming() is None
    assert ran(1).coming() == 1
    assert ran(1, 2).coming() == 2


@pytest.mark.parametrize(
    ("passes", "coming"),
    [
        ((1, 2, 1), 2),
        ((1, 2, 1, 2), 1),
        ((1, 1, 1, 2, 1), 1),
        ((1, 1, 1, 2, 1, 1), 1),
        ((1, 1, 1, 2, 1, 1, 1), 2),
        ((1, 2, 3, 1, 2), 3),
        ((1, 2, 1, 1, 2, 1), 1),  # once and twice: nobody knows
        ((1, 1, 2, 1, 2, 1), 1),  # nor here
    ],
)
def test_the_next_model_is_who_came_next_last_time(passes, coming):
    assert ran(*passes).coming() == coming


def test_a_turn_is_as_long_as_the_longest_of_the_last_two_and_the_present():
    turns = ran(1, 1, 1, 2)
    assert turns.passes(1) == 3
    assert turns.passes(2) == turns.passes(7) == 1
    for who in (1, 2, 1, 2):
        turns.begin(who)
    assert turns.passes(1) == 1
    assert ran(*[1] * 50).passes(1) == 4  # more makes no difference


def test_a_settled_order_changes_nothing():
    """Else memory would be divided anew at each pass."""
    turns = ran(*[1, 1, 2, 3] * 3)
    assert not any(turns.begin(who) for who in [1, 1, 2, 3] * 3)
    assert turns.begin(3)


def test_who_runs_less_often_than_before_is_told_of_when_another_one_runs():
    """What others keep for long turns of it may be divided anew then."""
    turns = ran(1, 1, 1, 2, 1)
    assert not turns.begin(2)
    turns.begin(1)
    assert turns.passes(1) == 3
    assert turns.begin(2)
    assert turns.passes(1) == 1


def test_a_model_that_left_is_not_expected():
    turns = ran(1, 2, 1, 2, 1)
    turns.forget(2)
    assert turns.coming() == 1
    turns.forget(1)
    assert turns.coming() is None
    assert turns.passes(1) == 1
    turns = ran(1, 1, 2)
    turns.forget(1)
    assert turns.passes(1) == 1
