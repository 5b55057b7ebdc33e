"""Checks of blocks while a model streams: in passes, in training, and not at all."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    run_resident,
    runtime_of,
    stack,
)
from stagehand.errors import DtypeMismatchError

BUDGET = 4 * LAYER_BYTES
OPTIONS = (
    *("nan_inf_check", "strict_bf16"),
    *("dtype_promotion_check", "fail_on_dtype_promotion"),
)


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


def layered(model, place, **options):
    options.setdefault("vram_budget", BUDGET)
    return stagehand.layer(model, device=place, **options)


def blocked(model, place, **options):
    mib = BUDGET / 2**20
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=mib, vram_low_watermark_mb=0.75 * mib, **options
    )
    return stagehand.StagehandRuntime(model, config, r"^\d+$", device=place).model


@pytest.fixture(params=[layered, blocked])
def streamed(request):
    return request.param


def last_record(model):
    runtime_of(model).end_step()
    return runtime_of(model).telemetry.records[-1]


class Widening(nn.Module):
    """Does in float32 what its neighbours do in what they are given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *, hidden):
        return self.inner(hidden).float()


class Blocks(nn.Module):
    """Blocks of which one widens, called by keyword."""

    def __init__(self):
        super().__init__()
        layers = list(stack())
        layers[2] = Widening(layers[2])
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(hidden=x) if isinstance(layer, Widening) else layer(x)
            x = x.bfloat16()
        return x


def test_strict_bf16_refuses_a_model_in_float32_and_leaves_it_plain(place, streamed):
    model = stack()
    with pytest.raises(DtypeMismatchError, match=r"'0.*weight' as torch.float32"):
        streamed(model, place, strict_bf16=True)
    model.bfloat16()
    streamed(model, place, strict_bf16=True)
    runtime_of(model).shutdown()


def test_strict_bf16_lets_a_bf16_model_pass_unchanged(place, streamed):
    expected = run_resident(stack().bfloat16(), place, batch().bfloat16())
    model = streamed(stack().bfloat16(), place, strict_bf16=True)
    assert_passes_equal(model, expected, batch().bfloat16())
    runtime_of(model).shutdown()


def test_strict_bf16_refuses_a_wide_output_and_the_runtime_goes_on(place):
    model = blocked(Blocks().bfloat16(), place, strict_bf16=True)
    for _ in range(2):
        with (
            torch.no_grad(),
            pytest.raises(DtypeMismatchError, match=r"output of block '2' is"),
        ):
            model(batch().bfloat16())
    model.get_submodule("2").forward = lambda *, hidden: hidden
    with torch.no_grad():
        model(batch().bfloat16())
    runtime_of(model).shutdown()


def test_promotions_are_counted_in_each_step(place):
    model = blocked(Blocks().bfloat16(), place, dtype_promotion_check=True)
    for _ in range(2):
        with torch.no_grad():
            model(batch().bfloat16())
        assert last_record(model).dtype_promotions == 1
    runtime_of(model).shutdown()


def test_refused_promotion_names_the_block_and_the_runtime_goes_on(place):
    model = blocked(Blocks().bfloat16(), place, fail_on_dtype_promotion=True)
    with (
        torch.no_grad(),
        pytest.raises(DtypeMismatchError, match=r"output of block '2' is .*float32"),
    ):
        model(batch().bfloat16())
    assert last_record(model).dtype_promotions == 1
    model.get_submodule("2").forward = lambda *, hidden: hidden
    with torch.no_grad():
        model(batch().bfloat16())
    assert last_record(model).dtype_promotions == 0
    runtime_of(model).shutdown()


def test_layers_that_autocast_narrows_are_no_promotions(place):
    model = layered(stack(), place, fail_on_dtype_promotion=True)
    with torch.no_grad(), torch.autocast(place, dtype=torch.bfloat16):
        model(batch())
    assert last_record(model).dtype_promotions == 0
    runtime_of(model).shutdown()


def poison(model):
    with torch.no_grad():
        model[2][0].bias[3] = math.nan
    return model


NANS = 4 + 3 * 4 * WIDTH  # one column of the third layer, then everything


@pytest.mark.parametrize("around", ["nothing", "reentrant", "not reentrant"])
def test_nan_is_counted_once_in_training_with_recompute_or_without(
    place, streamed, around
):
    model = streamed(poison(stack()).requires_grad_(False), place, nan_inf_check=True)
    runtime_of(model).begin_step()
    x = batch().requires_grad_()
    y = x
    for layer in model:
        if around == "nothing":
            y = layer(y)
        else:
            y = checkpoint(layer, y, use_reentrant=around == "reentrant")
    y.sum().backward()
    assert last_record(model).nan_count == NANS
    assert x.grad is not None
    runtime_of(model).shutdown()


def test_outputs_of_a_table_on_the_host_are_checked(place):
    torch.manual_seed(0)
    table = nn.Embedding(1000, WIDTH)
    with torch.no_grad():
        table.weight[7, 0] = math.inf
    model = nn.Sequential(table, *stack(2))
    layered(model, place, nan_inf_check=True)
    assert runtime_of(model).report().gathered_bytes
    with torch.no_grad():
        model(torch.tensor([7, 8, 7]))
    assert last_record(model).inf_count == 2 + 2 * WIDTH  # two rows, then all of both
    runtime_of(model).shutdown()


def test_compiled_blocks_are_checked(place):
    model = blocked(poison(stack()), place, nan_inf_check=True)
    for block in model:
        block.compile(backend="eager")
    with torch.no_grad():
        model(batch())
    assert last_record(model).nan_count == NANS
    runtime_of(model).shutdown()
    torch.compiler.reset()


def hooks_of(model):
    return [len(module._forward_hooks) for module in model.modules()]


def test_nothing_is_hooked_unless_asked(place, streamed):
    plain = streamed(stack().bfloat16(), place)
    expected = hooks_of(plain)
    runtime_of(plain).shutdown()
    for option in OPTIONS:
        model = streamed(stack().bfloat16(), place, **{option: True})
        assert sum(hooks_of(model)) == sum(expected) + 6
        runtime_of(model).shutdown()
        assert not any(hooks_of(model))


def test_checked_passes_are_bitwise_those_that_are_not(place, streamed):
    expected = run_resident(stack().bfloat16(), place, batch().bfloat16())
    model = streamed(stack().bfloat16(), place, **dict.fromkeys(OPTIONS, True))
    with torch.no_grad():
        assert_bitwise_equal(model(batch().bfloat16()), expected, "checked")
    record = last_record(model)
    assert (record.nan_count, record.inf_count, record.dtype_promotions) == (0, 0, 0)
    runtime_of(model).shutdown()
