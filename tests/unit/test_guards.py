"""What blocks bring and compute is checked where it comes out, without waiting."""

import math

import pytest
import torch
from torch import nn

from stagehand.core.telemetry import Counters
from stagehand.errors import DtypeMismatchError
from stagehand.guards import Checks, FiniteCheck, Guards
from stagehand.residency.finding import Group

WIDE = torch.ones(3)
NARROW = WIDE.bfloat16()


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_is_counted_in_types_of_one_byte(dtype) -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    check.look_at(torch.tensor([1.0, math.nan]).to(dtype))
    check.collect()
    assert (counters.nan_count, counters.inf_count) == (1, 0)


def test_outputs_made_in_inference_mode_are_counted_after_it() -> None:
    counters = Counters()
    check = FiniteCheck(counters)
    with torch.inference_mode():
        check.look_at(torch.tensor([math.inf]))
    check.collect()
    assert counters.inf_count == 1


def promotions(inputs, output, *, fail=False):
    """How many promotions are counted in one look at a module."""
    counters = Counters()
    checks = Checks(dtype_promotion_check=True, fail_on_dtype_promotion=fail)
    look = Guards(checks, counters).look("layers.3")
    assert look is not None
    look(inputs, output)
    return counters.dtype_promotions


@pytest.mark.parametrize(
    ("inputs", "output", "count"),
    [
        (NARROW, WIDE, 1),
        (NARROW, (WIDE, {"aux": [WIDE.double()]}, NARROW), 2),
        (((NARROW,), {"mask": WIDE}), WIDE, 0),
        (((NARROW,), {"scale": WIDE.half()}), WIDE, 1),
        (WIDE, NARROW, 0),
        (NARROW, WIDE.half(), 0),
        (NARROW, WIDE.long(), 0),
        (WIDE.long(), WIDE, 0),
        ((), WIDE, 0),
        (WIDE, WIDE.double(), 1),
    ],
)
def test_output_wider_than_every_floating_point_input_is_a_promotion(
    inputs, output, count
):
    assert promotions(inputs, output) == count


def test_autocast_type_counts_as_an_input():
    tiny = WIDE.to(torch.float8_e5m2)
    assert promotions(tiny, NARROW) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert promotions(tiny, NARROW) == 0
        assert promotions(NARROW, WIDE) == 1
        assert promotions(WIDE, WIDE) == 0


def test_promotion_of_a_device_that_knows_no_autocast_is_counted():
    assert promotions(NARROW.to("meta"), WIDE.to("meta")) == 1


def test_refused_promotion_names_block_tensor_and_both_types():
    message = (
        r"output\['aux'\]\[0\] of block 'layers\.3' is torch\.float32.*torch\.bfloat16"
    )
    with pytest.raises(DtypeMismatchError, match=message):
        promotions(NARROW, {"hidden": NARROW, "aux": [WIDE]}, fail=True)


def test_asking_to_fail_counts_too():
    assert Checks(fail_on_dtype_promotion=True).counts_promotions


def group(**tensors):
    return Group("layers.3", dict(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_strict_bf16_refuses_parameters_of_other_types_by_name(dtype):
    guards = Guards(Checks(strict_bf16=True), Counters())
    fine = group(weight=nn.Parameter(NARROW))
    guards.check_parameters([fine])
    message = f"block 'layers.3' brings parameter 'bias' as {dtype}.*bfloat16"
    with pytest.raises(DtypeMismatchError, match=message):
        guards.check_parameters([fine, group(bias=nn.Parameter(WIDE.to(dtype)))])


def test_strict_bf16_leaves_buffers_and_whole_numbers_alone():
    guards = Guards(Checks(strict_bf16=True), Counters())
    codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    guards.check_parameters([group(frequencies=WIDE, codes=codes)])
    look = guards.look("layers.3")
    assert look is not None
    look(WIDE, (NARROW, torch.ones(2, dtype=torch.int64), None))


def test_strict_bf16_refuses_outputs_of_other_types_by_place():
    look = Guards(Checks(strict_bf16=True), Counters()).look("layers.3")
    assert look is not None
    message = r"output\[1\] of block 'layers\.3' is torch\.float32.*bfloat16"
    with pytest.raises(DtypeMismatchError, match=message):
        look(NARROW, (NARROW, WIDE))


def test_checks_of_parameters_are_asked_for():
    Guards(Checks(nan_inf_check=True), Counters()).check_parameters(
        [group(weight=nn.Parameter(WIDE))]
    )


def test_without_checks_there_is_nothing_to_hook():
    assert Guards(Checks(), Counters()).look("layers.3") is None


@pytest.mark.parametrize("name", Checks.__slots__)
def test_each_check_of_outputs_is_hooked_by_itself(name):
    assert Guards(Checks(**{name: True}), Counters()).look("layers.3") is not None


def test_what_is_computed_inside_backward_is_passed_over():
    counters = Counters()
    checks = Checks(nan_inf_check=True, strict_bf16=True, fail_on_dtype_promotion=True)
    guards = Guards(checks, counters)
    look = guards.look("layers.3")
    assert look is not None
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: look(NARROW, torch.tensor(math.nan)))
    leaf.sum().backward()
    guards.collect()
    assert counters == Counters()
