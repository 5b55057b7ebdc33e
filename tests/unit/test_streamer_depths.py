"""Depths and batches of a streamer: what can work, and what is the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.errors import ConfigError
from stagehand.streamer.depths import Depths


@pytest.mark.parametrize("stage", ["gpu", "cpu_pinned", "cpu"])
def test_batch_that_its_stage_cannot_hold_is_refused_with_the_numbers_that_work(stage):
    depth, batch = f"n_{stage}", f"batch_{stage}"
    with pytest.raises(
        ConfigError,
        match=f"^{batch} is 5, but {depth}=2 has memory for 3 layers: .* set"
        f" {batch} to at most 3, or {depth} to at least 4$",
    ):
        Depths(**{depth: 2, batch: 5})
    Depths(**{depth: 2, batch: 3})
    Depths(**{depth: 4, batch: 5})


@pytest.mark.parametrize("skipped", [None, 0])
@pytest.mark.parametrize("stage", ["cpu_pinned", "cpu"])
def test_batch_of_a_stage_that_is_skipped_does_not_matter(stage, skipped):
    Depths(**{f"n_{stage}": skipped, f"batch_{stage}": 9})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_gpu": -1}, "n_gpu is -1: expected None, or a whole number .* from 0 on"),
        ({"n_gpu": None}, "n_gpu is None: expected a number of layers, 0 for none"),
        ({"n_cpu": 1.5}, "n_cpu is 1.5: expected None, or a whole number"),
        ({"n_cpu_pinned": True}, "n_cpu_pinned is True"),
        ({"batch_gpu": 0}, "batch_gpu is 0: expected None, or .* from 1 on"),
        ({"n_gpu": 0, "batch_gpu": 2}, "batch_gpu to at most 1, or n_gpu to at least"),
    ],
)
def test_number_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Depths(**settings)


def test_settings_that_do_the_same_are_told():
    many = Depths(n_gpu=9, n_cpu_pinned=9, n_cpu=9, batch_gpu=9, batch_cpu=1)
    few = Depths(n_gpu=3, n_cpu_pinned=3, n_cpu=3, batch_gpu=4)
    assert many.for_layers(4) == few
    skipped = Depths(n_cpu_pinned=0, batch_cpu_pinned=3, n_cpu=0, batch_cpu=3)
    assert skipped.for_layers(4) == Depths(n_cpu_pinned=None, n_cpu=None)
    assert few.for_layers(4) == few
    pinned = Depths(n_cpu_pinned=2)
    assert pinned.for_layers(4, on_host=True) == Depths(n_cpu_pinned=None)


OPTIONAL = st.none() | st.integers(0, 12)


@given(st.integers(0, 12), OPTIONAL, OPTIONAL, *[OPTIONAL] * 3, st.integers(1, 9))
def test_simplest_settings_can_work_if_these_can(
    n_gpu, n_cpu_pinned, n_cpu, batch_gpu, batch_pinned, batch_cpu, layers
):
    try:
        depths = Depths(
            n_gpu=n_gpu,
            n_cpu_pinned=n_cpu_pinned,
            n_cpu=n_cpu,
            batch_gpu=batch_gpu,
            batch_cpu_pinned=batch_pinned,
            batch_cpu=batch_cpu,
        )
    except ConfigError:
        return
    simple = depths.for_layers(layers)
    assert simple.for_layers(layers) == simple
