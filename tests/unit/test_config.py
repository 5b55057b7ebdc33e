"""Settings of block mode: what they mean in bytes, and what cannot work."""

import math

import pytest

from stagehand import ConfigError, StagehandConfig
from stagehand.guards import Checks
from stagehand.units import MIB


def test_sizes_may_be_parts_of_a_mib():
    config = StagehandConfig(vram_high_watermark_mb=1.5, vram_low_watermark_mb=0.25)
    assert config.watermarks().high_bytes == MIB * 3 // 2
    assert config.watermarks().low_bytes == MIB // 4


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    [
        "pinned_pool_mb",
        "pinned_slab_mb",
        "vram_high_watermark_mb",
        "vram_low_watermark_mb",
    ],
)
def test_size_that_is_no_positive_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*more than 0 MiB"):
        StagehandConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("telemetry_interval_steps", 0),
        ("prefetch_window_blocks", -1),
        ("max_inflight", 0),
    ],
)
def test_count_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        StagehandConfig(**{name: value})


def test_slab_that_does_not_fit_the_pool_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"4096 .* 1024"):
        StagehandConfig(pinned_pool_mb=1024, pinned_slab_mb=4096)


def test_watermarks_in_the_wrong_order_are_refused():
    with pytest.raises(ConfigError, match=r"_mb is 2 and .*_mb 1: .* low < high"):
        StagehandConfig(vram_high_watermark_mb=1, vram_low_watermark_mb=2)


@pytest.mark.parametrize(
    "name",
    [
        "nan_inf_check",
        "strict_bf16",
        "dtype_promotion_check",
        "fail_on_dtype_promotion",
    ],
)
def test_checks_are_off_by_default_and_switched_on_one_by_one(name):
    assert StagehandConfig().checks() == Checks()
    assert StagehandConfig(**{name: True}).checks() == Checks(**{name: True})
