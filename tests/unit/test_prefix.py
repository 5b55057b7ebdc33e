"""What leaves is the smallest prefix, and what it costs is what was foretold."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.activations.advice import Advice, BlockCost, advise
from stagehand.activations.prefix import Rates, Save, best_prefix, foresee, plan_prefix
from stagehand.activations.relief import Relief
from stagehand.activations.timing import spans

saves_of = st.lists(
    st.builds(
        Save,
        st.integers(1, 50),
        st.floats(0, 2),
        st.floats(0, 4),
        free=st.booleans(),
    ),
    max_size=30,
)
RATES = Rates(10.0, 10.0)


@given(saves_of, st.integers(1, 500))
def test_prefix_is_the_smallest_that_fits(saves, budget):
    prefix = plan_prefix(saves, budget)
    sizes = [save.nbytes for save in saves]
    assert prefix.kept_bytes == sum(sizes[prefix.count :]) <= budget
    assert prefix.nbytes == sum(s.nbytes for s in saves[: prefix.count] if s.free)
    if prefix.count:
        assert sum(sizes[prefix.count - 1 :]) > budget
    assert prefix.skipped == {n for n in range(prefix.count) if not saves[n].free}


@given(saves_of, st.integers(1, 500))
def test_forecast_keeps_the_budget_where_one_tensor_does(saves, budget):
    largest = max((save.nbytes for save in saves), default=0)
    budget = max(budget, largest)
    forecast = foresee(saves, plan_prefix(saves, budget), budget, RATES)
    assert forecast.peak_bytes <= max(budget, 2 * largest)
    assert forecast.stall >= -1e-9


@given(saves_of)
def test_what_fits_costs_nothing(saves):
    budget = max(1, sum(save.nbytes for save in saves))
    prefix, forecast = best_prefix(saves, budget, RATES)
    assert prefix.count == 0
    assert forecast.stall == pytest.approx(0)


@given(saves_of, st.integers(50, 500))
def test_longer_prefix_is_taken_only_where_it_is_faster(saves, budget):
    prefix, forecast = best_prefix(saves, budget, RATES)
    smallest = plan_prefix(saves, budget)
    alone = foresee(saves, smallest, budget, RATES)
    assert forecast.stall <= alone.stall + 1e-9
    assert prefix.count >= smallest.count
    if prefix.count > smallest.count:
        assert forecast.stall < alone.stall


def test_no_other_set_of_as_many_equal_tensors_costs_less():
    saves = [Save(10, 1.0, 2.0) for _ in range(8)]
    budget, rates = 50, Rates(5.0, 5.0)
    prefix = plan_prefix(saves, budget)
    best = foresee(saves, prefix, budget, rates)
    for chosen in combinations(range(8), prefix.count):
        skipped = frozenset(range(8)) - frozenset(chosen)
        other = type(prefix)(8, 10 * prefix.count, budget, skipped)
        found = foresee(saves, other, budget, rates)
        assert found.stall >= best.stall - 1e-9 or found.peak_bytes > best.peak_bytes


# Times


def test_times_between_marks_are_spread_evenly():
    marks = [(0, 0.0), (10, 1.0), (20, 3.0)]
    assert spans(marks, [0, 5, 10, 15]) == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert spans(marks, [30]) == [0.0]


# The peak


def test_peak_that_comes_after_all_is_back_makes_spilling_useless():
    relief = Relief(100, 1000, 1000)
    relief.read(0, 900, 1000)
    relief.read(0, 900, 1300)
    assert relief.is_useless()


@pytest.mark.parametrize(
    "readings",
    [
        [(0, 900, 1000), (0, 900, 1150)],  # not clearly higher
        [(50, 1000, 1300), (0, 900, 1300)],  # while something was away
        [(0, 900, 1000)],  # an old one
    ],
)
def test_other_peaks_do_not(readings):
    relief = Relief(100, 1000, 1000)
    for away, allocated, peak in readings:
        relief.read(away, allocated, peak)
    assert not relief.is_useless()


def test_memory_is_read_at_a_few_levels_only():
    relief = Relief(800, 1000, 1000)
    reads = 0
    for away in range(800, -1, -1):
        if relief.is_due(away):
            relief.read(away, 1000, 1000)
            reads += 1
    assert 1 <= reads <= 9


# Advice


def equal_blocks(count=12, *, seconds=1.0):
    return [BlockCost(f"b{n}", 36, 2, seconds) for n in range(count)]


def test_advice_is_to_spill_where_the_link_is_fast():
    advice = advise(equal_blocks(), 6 * 36, Rates(1000.0, 1000.0))
    assert advice.checkpoint == ()
    assert advice.spill == tuple(f"b{n}" for n in range(6))
    assert advice.fits
    assert advice.seconds == pytest.approx(0)


def test_advice_is_to_checkpoint_where_the_link_is_slow():
    advice = advise(equal_blocks(), 6 * 36, Rates(0.5, 0.5))
    assert len(advice.checkpoint) >= 6
    assert advice.fits
    assert advice.recompute_seconds == len(advice.checkpoint)


def test_blocks_that_are_cheap_to_compute_again_come_first():
    blocks = [
        BlockCost("dear", 36, 2, 10.0),
        BlockCost("cheap", 36, 2, 0.1),
        *equal_blocks(2, seconds=10.0),
    ]
    advice = advise(blocks, 3 * 36 + 4, Rates(0.1, 0.1))
    assert advice.checkpoint[0] == "cheap"


def test_advice_says_when_nothing_fits():
    advice = advise(equal_blocks(), 10, Rates(10.0, 10.0))
    assert not advice.fits
    assert "does not fit" in str(advice)


def test_advice_names_blocks_that_follow_each_other_by_their_ends():
    advice = Advice(
        checkpoint=("a", "c", "d", "e"),
        spill=("a", "b"),
        keep=("c", "d", "e"),
        budget_bytes=10,
        fits=True,
        recompute_seconds=0.0,
        stall_seconds=0.0,
    )
    what = "checkpoint a, c to e (4 blocks); a and b leave; c to e (3 blocks) stay;"
    assert what in str(advice)


@given(
    st.lists(st.tuples(st.integers(2, 60), st.floats(0.1, 5)), min_size=1, max_size=8),
    st.integers(10, 400),
    st.floats(0.5, 200),
)
def test_no_other_choice_that_was_tried_is_better(sizes, budget, rate):
    blocks = [BlockCost(str(n), s, 1, t) for n, (s, t) in enumerate(sizes)]
    advice = advise(blocks, budget, Rates(rate, rate))
    named = set(advice.spill) | set(advice.keep)
    assert named == {block.name for block in blocks}
    saves = [Save(b.saved_bytes, b.seconds, 2 * b.seconds) for b in blocks]
    _, without = best_prefix(saves, budget, Rates(rate, rate))
    if without.peak_bytes <= budget:
        assert advice.fits
        assert advice.seconds <= without.stall + 1e-9
