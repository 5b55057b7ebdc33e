"""NaN and infinite values are counted where they come out, without waiting."""

import math

import torch

from stagehand.core.telemetry import Counters
from stagehand.guards import FiniteCheck


def test_counts_every_nan_and_infinity_in_nested_outputs() -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan])
    check.look_at({"a": bad, "b": (bad[:2], [torch.zeros(3)])})
    check.collect()
    assert (counters.nan_count, counters.inf_count) == (3, 2)


def test_nothing_is_counted_before_it_is_collected_nor_twice() -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    check.look_at(torch.tensor(math.nan))
    assert counters.nan_count == 0
    check.collect()
    check.collect()
    assert counters.nan_count == 1


def test_outputs_that_cannot_be_infinite_are_passed_over() -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    check.look_at((torch.tensor([1, 2]), None, "text", torch.tensor([True])))
    check.collect()
    assert (counters.nan_count, counters.inf_count) == (0, 0)


def test_outputs_made_in_inference_mode_are_counted_after_it() -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    with torch.inference_mode():
        check.look_at(torch.tensor([math.inf]))
    check.collect()
    assert counters.inf_count == 1
