"""Settings are of the types that their fields name, or refused by name."""

import math
from dataclasses import fields
from typing import get_type_hints

import numpy
import pytest
from torch import nn

import stagehand
from stagehand import (
    ActivationStagehandConfig,
    ConductorConfig,
    ConfigError,
    StagehandConfig,
)
from stagehand.activations.pool import slab_counts


class Array:
    """As numpy's: it compares element by element, and is neither true nor false."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("ambiguous")


WRONG = {
    "bool": (1, "yes", None),
    "int": (True, "3", 2.5, math.nan, None),
    "float": (True, "3", None),
    "str": (b"x", 3, None),
}
CONFIGS = (ActivationStagehandConfig, ConductorConfig, StagehandConfig)


def cases():
    """Every field of every config with values of types that it does not name."""
    for config in CONFIGS:
        hints = get_type_hints(config)
        for field in fields(config):
            text = str(hints[field.name])
            for value in (
                [],
                {"a": 1},
                object(),
                Array(),
                (None,),
                *WRONG.get(text, ()),
            ):
                yield pytest.param(config, field.name, value, id=f"{field.name}")
            if hints[field.name] is int or "int |" in text:
                yield pytest.param(config, field.name, True, id=f"{field.name}-True")


@pytest.mark.parametrize(("config", "name", "value"), list(cases()))
def test_value_of_another_type_is_refused_by_name(config, name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*: expected "):
        config(**{name: value})


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_of_their_types(config):
    config()


def test_message_says_field_found_and_expected():
    with pytest.raises(
        ConfigError, match=r"^max_inflight_d2h is '2': expected an int or None$"
    ):
        ActivationStagehandConfig(max_inflight_d2h="2")
    with pytest.raises(
        ConfigError,
        match=r"^slabs_per_class is \[1\]: expected an int or a tuple, each",
    ):
        ActivationStagehandConfig(slabs_per_class=[1])


def test_message_about_a_model_is_no_page():
    with pytest.raises(ConfigError) as refused:
        stagehand.layer(nn.Linear(2, 2), opaque=nn.Sequential(nn.Tanh()))
    assert str(refused.value) == (
        "opaque is of type Sequential: expected a list or a tuple, each a class"
    )


def test_whole_numbers_are_numbers():
    assert ConductorConfig(vram_hard_cap_mb=2).bytes_of("vram_hard_cap_mb") == 2 << 20


def test_numbers_of_numpy_are_numbers():
    config = ActivationStagehandConfig(
        pinned_pool_classes_mb=(1, 2),
        slabs_per_class=numpy.int64(3),
    )
    assert slab_counts(config.pinned_pool_classes_mb, config.slabs_per_class) == [3, 3]
