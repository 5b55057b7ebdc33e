"""Which configurations a search measures: none twice, none that cannot win."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.streamer.depths import Depths, Footprint
from stagehand.streamer.grid import Sizes, candidates, floors, too_large, worth_it
from stagehand.streamer.rates import Rates

SIZES = Sizes(layers=10, read_bytes=9000)
PLAIN = Footprint(slot=1000, waiting=1000)
PACKED = Footprint(slot=1000, waiting=750, cast=40, wire=750, scratch=200)
DECODED = Footprint(slot=1000, waiting=750, unpacked_from=750)
RATES = Rates(
    disk=1e3,
    memory=1e4,
    link=3e3,
    pageable_link=1.5e3,
    device_free_bytes=10**9,
    host_free_bytes=10**9,
    footprint=PLAIN,
)
HOST = replace(RATES, link=math.inf, pageable_link=math.inf)
README = {
    "n_gpu": [1, 2, 4],
    "n_cpu_pinned": [None, 2, 4],
    "n_cpu": [None, 2, 4],
    "batch_gpu": [None, 1, 2],
    "batch_cpu_pinned": [None, 1, 2],
    "batch_cpu": [None, 1, 2],
}


def test_grid_is_cut_to_what_differs():
    found, impossible = candidates(README, 28)
    # Depths of the device 3, twice a batch of it; the other stages None, or two depths
    # with two batches each.
    assert len(found) == 3 * 2 * 5 * 5
    assert impossible == []
    assert len({depths.for_layers(28) for depths in found}) == len(found)
    assert found[0] == Depths(n_gpu=1, n_cpu_pinned=None, n_cpu=None)
    on_host, _ = candidates(README, 28, on_host=True)
    assert len(on_host) == 3 * 2 * 5


def test_impossible_pairs_are_left_out_with_their_reason():
    values = {**README, "batch_gpu": [3], "n_gpu": [1, 2]}
    found, impossible = candidates(values, 28)
    assert {depths.n_gpu for depths in found} == {2}
    settings, reason = impossible[0]
    assert settings["n_gpu"] == 1
    assert "set batch_gpu to at most 2" in reason


def test_depths_beyond_the_layers_are_one():
    values = {**README, "n_gpu": [3, 4, 99], "n_cpu_pinned": [4], "n_cpu": [None]}
    assert len(candidates(values, 4)[0]) == len({None, 2}) * len({None, 2})


@pytest.mark.parametrize(
    ("settings", "rates", "expected"),
    [
        ({}, RATES, (9, 0, 3)),
        ({"n_cpu": 3}, RATES, (9, 0.9, 3)),
        ({"n_cpu": 3, "n_cpu_pinned": None}, RATES, (9, 0, 6)),
        ({"n_cpu": 9}, RATES, (0, 0.9, 3)),
        ({"n_cpu_pinned": 9}, RATES, (0, 0, 3)),
        ({"n_gpu": 9}, RATES, (0, 0, 0)),
        ({}, HOST, (9, 0, 0)),
        ({"n_cpu": 3}, HOST, (9, 0.9, 0)),
    ],
)
def test_floors_are_bytes_over_rates_of_what_is_used(settings, rates, expected):
    found = floors(Depths(**settings), SIZES, rates)
    assert list(found) == ["disk", "memory", "link"]
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "free", "expected"),
    [
        ({"n_gpu": 4}, {"device_free_bytes": 4999}, "needs 5.00 KB of device memory"),
        ({"n_gpu": 4}, {"device_free_bytes": 5000}, None),
        ({"n_gpu": 99}, {"device_free_bytes": 10_000}, None),
        (
            {"n_cpu_pinned": 2, "n_cpu": 3},
            {"host_free_bytes": 6999},
            "needs 7.00 KB of host memory, of which 7.00 KB are free",
        ),
        ({"n_cpu_pinned": 2, "n_cpu": 3}, {"host_free_bytes": 7000}, None),
        (
            {"n_gpu": 2, "n_cpu_pinned": 9, "n_cpu": 1, "link": True},
            {"host_free_bytes": 4999},
            "needs 5.00 KB of host memory",
        ),
    ],
)
def test_what_does_not_fit_is_told(settings, free, expected):
    settings = dict(settings)
    rates = replace(HOST if settings.pop("link", False) else RATES, **free)
    found = too_large(Depths(**settings), SIZES, rates)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(expected)


@pytest.mark.parametrize(
    ("settings", "rates", "device", "host"),
    [
        ({"n_gpu": 2}, replace(RATES, footprint=PACKED), 3000 + 1500 + 240, 3750),
        ({"n_gpu": 0}, replace(RATES, footprint=PACKED), 1000 + 750 + 240, 3750),
        ({"n_cpu_pinned": None}, replace(RATES, footprint=PACKED), 4740, 750),
        ({"n_gpu": 2, "n_cpu": 1}, replace(HOST, footprint=DECODED), 0, 3000 + 3000),
    ],
)
def test_packed_layers_count_with_all_that_they_take(settings, rates, device, host):
    """A wire or two and the decoder's on the device, fewer bytes while they wait."""
    depths = Depths(**settings)
    for name, needed in (("device", device), ("host", host)):
        free = f"{name}_free_bytes"
        assert too_large(depths, SIZES, replace(rates, **{free: needed})) is None
        if needed:
            less = replace(rates, **{free: needed - 1})
            assert f"of {name} memory" in too_large(depths, SIZES, less)


def test_gain_that_is_noise_is_not_worth_a_measurement():
    assert worth_it(0.97, 1.0)
    assert not worth_it(0.99, 1.0)
    assert not worth_it(1.2, 1.0)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_more_memory_never_has_a_higher_floor_for_the_disk(n_gpu, pinned, cpu):
    depths = Depths(n_gpu=n_gpu, n_cpu_pinned=pinned or None, n_cpu=cpu or None)
    more = replace(depths, n_gpu=n_gpu + 1)
    assert floors(more, SIZES, RATES)["disk"] <= floors(depths, SIZES, RATES)["disk"]


def test_rates_survive_a_pipe():
    assert pickle.loads(pickle.dumps(RATES)) == RATES
    assert not RATES.on_host
    assert HOST.on_host
