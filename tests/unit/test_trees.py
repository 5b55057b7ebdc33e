"""Tensors are found in whatever modules return."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from stagehand.core.trees import tensors_in

T = torch.ones(1)


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Output:
    sample: object
    above: object = None


@dataclass
class Late(Output):
    unset: object = field(init=False)


@dataclass(slots=True)
class Slotted:
    sample: object


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        (T, "out"),
        ({"a": [1, T]}, "out['a'][1]"),
        (OrderedDict(a=T), "out['a']"),
        (UserDict(a=(T,)), "out['a'][0]"),
        (Pair(None, T), "out[1]"),
        (Output([T]), "out.sample[0]"),
        (Output(Output(T)), "out.sample.sample"),
        (Late(T), "out.sample"),
        (Slotted(T), "out.sample"),
        (SimpleNamespace(a=T), "out.a"),
        (torch.distributions.Exponential(T, validate_args=False), "out.rate"),
    ],
    ids=lambda tree: tree if isinstance(tree, str) else type(tree).__name__,
)
def test_tensors_are_found_in_containers_and_outputs(tree, where):
    assert [(name, found is T) for name, found in tensors_in(tree, "out")] == [
        (where, True)
    ]


def test_what_objects_hold_in_turn_is_passed_over():
    cache = SimpleNamespace(layers=[T], owner=torch.nn.Linear(1, 1))
    assert not list(tensors_in([cache, Output, T.shape, None, "a", 1]))


def test_dataclasses_that_hold_each_other_end():
    inner = Output(T)
    outer = Output([inner, inner])
    inner.above = outer
    found = [name for name, _ in tensors_in(outer, "out")]
    assert found == ["out.sample[0].sample", "out.sample[1].sample"]
