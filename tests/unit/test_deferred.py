"""Models are built without their weights: what has a value, and what has none."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from interrupts import interrupted_at
from stagehand import torch_private
from stagehand.errors import ConfigError
from stagehand.pretrained.deferred import build, empty_tensor


def module_with(make) -> nn.Module:
    """A module with one buffer, called `it`."""
    module = nn.Module()
    module.register_buffer("it", make(), persistent=False)
    return module


KNOWN = {
    "table": lambda: torch.outer(torch.arange(4.0), torch.arange(3) / 3).sin(),
    "mask": lambda: torch.tril(torch.ones(4, 4)).bool(),
    "numbers": lambda: torch.tensor([1.5, 2.5]),
    "array": lambda: torch.from_numpy(torch.arange(3).numpy()),
    "own generator": lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
    "filled": lambda: torch.empty(3, 2).fill_(2.5),
    "read twice": lambda: torch.cat([KNOWN["table"]()] * 2),
    "written in parts": lambda: in_parts(torch.empty(4, 4)),
    "copied": lambda: torch.empty(4).copy_(torch.arange(4)),
    "drawn, then zeroed": lambda: torch.rand(4).zero_(),
    "computed from what was filled": lambda: torch.empty(4).fill_(2.0).sqrt() * 3,
    "random, then overwritten": lambda: nn.init.ones_(torch.empty(3).normal_()),
    "reshaped in place": lambda: torch.empty(4).fill_(3.0).unsqueeze_(0),
    "like": lambda: torch.zeros_like(torch.rand(3)),
    "assigned": lambda: assigned(torch.empty(3), torch.arange(3.0)),
    "assigned what was computed": lambda: padded(torch.empty(2).fill_(1.5)),
    "of a list": lambda: torch.stack([torch.full((2,), 7.0), torch.ones(2)]),
}
UNKNOWN = {
    "random": lambda: torch.rand(3),
    "computed from random": lambda: torch.rand(3).mul(2).cos() + torch.ones(3),
    "random in place": lambda: torch.zeros(3).uniform_(),
    "random in a view": lambda: viewed(torch.zeros(4)),
    "random written into real": lambda: torch.zeros(3).copy_(torch.rand(3)),
    "random, by a function of lists": lambda: multiplied(torch.zeros(3), torch.rand(3)),
    "uninitialized": lambda: torch.empty(3),
    "added to uninitialized": lambda: torch.empty(3).normal_().add_(1),
    "permutation": lambda: torch.randperm(4),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "truncated": lambda: nn.init.trunc_normal_(torch.zeros(3)),
    "assigned": lambda: assigned(torch.zeros(3), torch.rand(3)),
    "dropout": lambda: nn.functional.dropout(torch.ones(9), 0.5),
}


def multiplied(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([tensor], [other])
    return tensor


def in_parts(tensor: torch.Tensor) -> torch.Tensor:
    tensor[:2] = 1.5
    tensor[2:, 0::2] = torch.arange(2) / 2
    tensor[2:, 1::2] = tensor[:2, :2] * 2
    return tensor


def under(dtype: torch.dtype, make):
    """Make something as a library does that sets torch's default type for it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def assigned(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor.data = value
    return tensor


def padded(tensor: torch.Tensor) -> torch.Tensor:
    return assigned(tensor, nn.functional.pad(tensor.data, (0, 2)))


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    tensor[:2].normal_()
    return tensor


@pytest.mark.parametrize("name", KNOWN)
def test_computed_value_is_the_constructors(name):
    built = build(lambda: module_with(KNOWN[name]))
    assert built.unknown == ()
    expected = KNOWN[name]()
    assert built.model.it.dtype is expected.dtype
    assert torch.equal(built.model.it, expected)


@pytest.mark.parametrize("name", UNKNOWN)
def test_value_without_a_definition_is_unknown_and_nothing_is_drawn(name):
    state = torch.get_rng_state()
    assert build(lambda: module_with(UNKNOWN[name])).unknown == ("it",)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.arange(3.0),
        lambda: torch.arange(5) / 3,
        lambda: torch.arange(5).sqrt(),
        lambda: torch.tensor(0.1),
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor(0.1, dtype=torch.float64),
        lambda: torch.linspace(0, 1, 7, dtype=torch.float32),
        lambda: 1 / 10000 ** (torch.arange(4).float() / 4),
        lambda: torch.full((2,), 0.3),
        lambda: torch.full((2,), 3),
        lambda: torch.ones(2).int() * 0.5,
        lambda: in_parts(torch.empty(4, 4)),
        lambda: torch.arange(4).float().to(torch.get_default_dtype()),
        lambda: torch.ones(2, dtype=torch.int64).to(dtype=torch.get_default_dtype()),
        lambda: torch.zeros(2, dtype=torch.get_default_dtype()),
        lambda: torch.ones(2).to(torch.float32),
        lambda: torch.ones(2, dtype=torch.get_default_dtype()).to(torch.float32),
        lambda: torch.arange(4, dtype=[torch.float, torch.get_default_dtype()][0]),
        lambda: torch.stack([torch.ones(2).to(torch.get_default_dtype())] * 2),
        lambda: torch.full((2,), torch.finfo(torch.get_default_dtype()).min),
        lambda: torch.where(torch.arange(3) > 1, 0.3, 0.25),
        lambda: torch.zeros(3, dtype=torch.float32, layout=torch.strided),
        lambda: torch.Tensor([0.3]),
        lambda: torch.FloatTensor([0.3]),
        lambda: torch.tensor([0.3], dtype=torch.float32),
        lambda: under(torch.float64, lambda: torch.ones(2) / 3),
    ],
)
def test_other_default_type_gives_what_torch_gives_under_it(make):
    built = build(lambda: module_with(make), torch.bfloat16)
    expected = under(torch.bfloat16, make)
    assert built.model.it.dtype is expected.dtype
    assert torch.equal(built.model.it, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 4),
        lambda: nn.ParameterList([torch.Tensor(3, 4).uniform_()]),
        lambda: nn.ParameterList([torch.Tensor(3)]),
        lambda: nn.Linear(3, 4, dtype=torch.get_default_dtype()),
        lambda: nn.ParameterList(
            [torch.empty(2, dtype=torch.get_default_dtype()) for _ in range(2)]
        ),
    ],
)
def test_weights_have_the_type_that_is_asked_for(make):
    model = build(make, torch.float16).model
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(torch.float16, True)}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.empty(3, dtype=torch.float32).uniform_(), torch.float32),
        (lambda: torch.empty(3, dtype=torch.float64).log(), torch.float64),
        (
            lambda: torch.empty(3, dtype=torch.float32, layout=torch.strided),
            torch.float32,
        ),
        (lambda: torch.FloatTensor(3), torch.float32),
    ],
)
def test_weights_whose_type_the_constructor_names_keep_it(make, dtype):
    model = build(lambda: nn.ParameterList([make()]), torch.float16).model
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(dtype, True)}


def test_other_threads_have_torchs_default_type_and_it_is_as_it_was_afterwards():
    """A part may be made by a library that sets it, and puts back what it was told."""
    function, usual = torch.get_default_dtype, torch.get_default_dtype()
    seen = []
    with ThreadPoolExecutor(1) as pool:

        def look():
            seen.append(pool.submit(torch.get_default_dtype).result())
            return nn.Linear(2, 2)

        build(look, torch.float16)
    assert seen == [usual]
    build(lambda: (under(torch.bfloat16, nn.ReLU), nn.Linear(2, 2))[1], torch.float16)
    assert torch.get_default_dtype is function
    assert torch.get_default_dtype() is usual


def test_parameter_that_the_constructor_computes_has_its_value_on_request():
    built = build(lambda: nn.LayerNorm(3))
    assert torch.equal(built.value_of(built.model.weight), torch.ones(3))
    built = build(lambda: nn.Linear(3, 4))
    assert built.value_of(built.model.weight) is None


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_constructor_that_reads_a_value_that_is_not_there_is_refused(read):
    with pytest.raises(ConfigError, match="build the model yourself"):
        build(lambda: read(torch.rand(3)))


def test_own_failure_of_the_constructor_is_passed_on():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        build(lambda: torch.ones(2, 3) @ torch.ones(2, 3))


def test_sparse_table_is_real():
    built = build(lambda: module_with(lambda: torch.eye(3).to_sparse()))
    assert torch.equal(built.model.it.to_dense(), torch.eye(3))


def test_tied_and_shared_stay_one():
    def make() -> nn.Module:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model[0].weight = model[1].weight
        return model

    model = build(make).model
    empty_tensor(model[1].weight, torch.float16)
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.float16


def test_taken_values_leave_type_gradient_and_attributes():
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    weight.mark = 1
    empty_tensor(weight, torch.float32)
    assert isinstance(weight, nn.Parameter)
    assert (weight.is_meta, weight.requires_grad, weight.mark) == (True, False, 1)


def test_thread_that_starts_meanwhile_computes_as_ever():
    seen = []

    def look() -> None:
        seen.extend((torch.rand(3), is_in_torch_dispatch_mode()))

    def make() -> nn.Module:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return nn.Linear(1, 1)

    build(make, torch.bfloat16)
    assert not seen[0].is_meta
    assert seen[0].dtype is torch.float32
    assert not seen[1], "compilers look at this flag, which all threads share"


def test_inference_mode_outside_makes_ordinary_parameters():
    with torch.inference_mode():
        model = build(lambda: nn.Linear(2, 2)).model
    assert not model.weight.is_inference()
    assert model.weight.requires_grad


@pytest.mark.parametrize("trains", [False, True])
def test_a_tensor_that_has_views_keeps_its_value(trains):
    tensor = torch.zeros(3, requires_grad=trains)
    view = tensor[1:]
    with pytest.raises(ConfigError, match="has views"):
        empty_tensor(tensor, torch.float32)
    assert {tensor.is_meta, view.is_meta} == {False}
    del view
    empty_tensor(tensor, torch.float32)
    assert tensor.is_meta
    assert tensor.requires_grad is trains


def test_an_interrupt_where_building_begins_or_ends_leaves_no_mode():
    """All that the thread computed from then on would have had no value."""
    parts = torch_private.dispatching.__wrapped__, torch_private._drop_modes
    for number in itertools.count(1):
        try:
            with interrupted_at(number, *parts):
                build(lambda: nn.Linear(2, 2))
            break
        except KeyboardInterrupt:
            assert torch_private.dispatch_modes() == 0, number
    assert number > 5
