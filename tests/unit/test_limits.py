"""The published limits."""

import dataclasses

import pytest

from stagehand.core.limits import Limits, effective
from stagehand.errors import ConfigError


def test_limits_limit_nothing_unless_told():
    limits = Limits()
    assert effective(7, limits.lookahead_blocks) == 7
    assert effective(7, limits.inflight_h2d) == 7
    assert effective(7, limits.inflight_d2h) == 7
    assert not limits.suppress_speculative


@pytest.mark.parametrize(
    ("config", "limit", "allowed"), [(4, 2, 2), (2, 4, 2), (3, 3, 3), (4, 0, 0)]
)
def test_smaller_of_configuration_and_limit_counts(config, limit, allowed):
    assert effective(config, limit) == allowed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lookahead_blocks", -1),
        ("inflight_h2d", 0),
        ("inflight_d2h", 0),
    ],
)
def test_limit_that_would_stop_demand_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"limit {name} is {value}: expected at leas"):
        Limits(**{name: value})


def test_published_limits_cannot_be_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().inflight_h2d = 1
