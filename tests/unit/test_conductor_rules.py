"""The three rules: what they read, and what they allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.conductor.rules import Readings, heuristic
from stagehand.core.clock import Phase
from stagehand.core.limits import Bounds, Limits, tightest

OTHERS = [phase for phase in Phase if phase is not Phase.BACKWARD]


def readings(**given):
    return Readings(**{"phase": Phase.FORWARD, "window": 4, **given})


@pytest.mark.parametrize(
    ("pressure", "tight"), [(None, False), (0.8, False), (0.81, True), (1.2, True)]
)
def test_backward_above_eighty_percent_loads_nothing_ahead(pressure, tight):
    limits = heuristic(readings(phase=Phase.BACKWARD, pressure=pressure))
    expected = Limits(lookahead_blocks=1, suppress_speculative=True)
    assert limits == (expected if tight else Limits())


@pytest.mark.parametrize("phase", [p for p in OTHERS if p is not Phase.OPTIMIZER])
def test_pressure_elsewhere_than_in_backward_changes_nothing(phase):
    assert heuristic(readings(phase=phase, pressure=0.99)) == Limits()


def test_the_optimizer_gets_one_slot_of_the_link_and_no_speculation():
    limits = heuristic(readings(phase=Phase.OPTIMIZER))
    assert limits == Limits(inflight_h2d=1, suppress_speculative=True)


@pytest.mark.parametrize(
    ("checks", "window"), [(0, None), (3, None), (4, 3), (5, 2), (6, 1), (60, 1)]
)
def test_each_full_check_beyond_three_takes_a_block_off_the_window(checks, window):
    assert heuristic(readings(full_checks=checks)) == Limits(lookahead_blocks=window)


def test_contention_says_nothing_where_nothing_is_loaded_ahead():
    assert heuristic(readings(full_checks=9, window=0)) == Limits()


any_limits = st.builds(
    Limits,
    lookahead_blocks=st.none() | st.integers(0, 5),
    inflight_h2d=st.none() | st.integers(1, 5),
    inflight_d2h=st.none() | st.integers(1, 5),
    suppress_speculative=st.booleans(),
)


def allows_no_more(one, other):
    for name in ("lookahead_blocks", "inflight_h2d", "inflight_d2h"):
        mine, limit = getattr(one, name), getattr(other, name)
        if limit is not None and (mine is None or mine > limit):
            return False
    return one.suppress_speculative or not other.suppress_speculative


@given(one=any_limits, other=any_limits)
def test_the_tightest_of_two_allows_no_more_than_either(one, other):
    both = tightest(one, other)
    assert both == tightest(other, one)
    assert allows_no_more(both, one)
    assert allows_no_more(both, other)
    assert tightest(both, one) == both
    assert tightest(one, Limits()) == one


@given(posts=st.lists(st.tuples(st.sampled_from("abc"), st.none() | any_limits)))
def test_a_consumer_is_held_to_all_who_post_and_to_none_who_withdrew(posts):
    told = []
    bounds, posted = Bounds(told.append), {}
    for who, limits in posts:
        if limits is None:
            bounds.withdraw(who)
            posted.pop(who, None)
        else:
            bounds.post(who, limits)
            posted[who] = limits
        assert all(allows_no_more(bounds.current, each) for each in posted.values())
        if not posted:
            assert bounds.current == Limits()
        assert bounds.current == (told[-1] if told else Limits())
