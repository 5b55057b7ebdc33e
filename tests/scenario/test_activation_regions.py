"""Checkpointed regions that keep what is large give the gradients of plain ones."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from keeping import BUDGET, ROW_BYTES, ROWS, WIDTH, assert_same, emptied, inputs
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import stagehand
from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.learning import Lesson
from stagehand.activations.prefix import Prefix
from stagehand.activations.recompute import _Region
from stagehand.activations.runtime import ActivationRuntime
from stagehand.core.saved import Kept
from stagehand.errors import StagehandError

HALF_ROW = ROW_BYTES // 2


@pytest.fixture(params=[BUDGET, 40_000], ids=["roomy", "tight"])
def runtime(sim, request):
    """One that keeps, or spills, half a row and more; nothing is left of it."""
    config = ActivationStagehandConfig(
        budget=request.param, recompute_threshold_bytes=HALF_ROW
    )
    runtime = ActivationRuntime(config)
    yield runtime
    # Autograd's thread lets go of its last graph when it takes up the next one.
    torch.ones(1, device="hpu", requires_grad=True).sum().backward()
    gc.collect()
    runtime.shutdown()
    assert runtime._parts.pool.out == 0


def gradients(regions, parameters=(), **settings):
    """Gradients of regions that are checkpointed one by one."""
    torch.manual_seed(0)
    x = y = inputs()
    for region in regions:
        y = checkpoint(region, y, use_reentrant=False, **settings)
    loss = y.square().sum()
    return [g.cpu() for g in torch.autograd.grad(loss, [x, *parameters])]


def check(runtime, regions, parameters=()):
    expected = gradients(regions, parameters)
    records = []
    for _ in range(3):
        runtime.step_begin()
        with runtime.managed_forward():
            found = gradients(
                regions, parameters, context_fn=runtime.checkpoint_contexts
            )
        assert_same(found, expected)
        records.append(runtime.step_end())
    return records


def test_random_numbers_are_those_of_forward(runtime):
    """A large draw that was taken back, not made again, would shift later ones."""

    def region(x):
        large = x * torch.rand_like(x)
        return (large * torch.rand_like(x[:1])).sigmoid()

    check(runtime, [region] * 3)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.heads(self.norm(x)).reshape(1, ROWS, 3, 4, -1).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        mixed = self.out(mixed.transpose(1, 2).reshape(ROWS, WIDTH))
        return x + nn.functional.dropout(mixed, 0.3)


def test_attention_and_dropout_are_exact(runtime):
    """Dropout fills an empty tensor in place while copies may read it."""
    blocks = nn.Sequential(*(_Attention() for _ in range(4))).to("hpu")
    check(runtime, list(blocks), list(blocks.parameters()))


def test_weights_that_several_regions_share_are_exact_under_autocast(runtime):
    """Of these autocast makes a copy in the first region, for all of them."""
    layer = nn.Linear(WIDTH, WIDTH).to("hpu")

    def region(x):
        with torch.autocast("hpu", torch.bfloat16):
            return layer(layer(x).sigmoid()).float()

    with torch.autocast("hpu", torch.bfloat16):
        check(runtime, [region] * 4, [layer.weight, layer.bias])


def test_operators_with_several_results_are_not_computed_again(runtime, sim):
    norm = nn.LayerNorm(WIDTH).to("hpu")

    def region(x):
        return norm(norm(norm(x))).sigmoid()

    def launches(**settings):
        before = sim.kernel_launches()
        gradients([region], **settings)
        return sim.kernel_launches() - before

    plain = launches()
    assert launches(context_fn=runtime.checkpoint_contexts) <= plain - 3


def test_regions_inside_of_regions_are_exact(runtime):
    """Copies of the inner one's results were counted as operators of the outer one."""
    within = {}

    def inner(x):
        return (x * 2).sigmoid().cos()

    def outer(x):
        for _ in range(3):
            x = checkpoint(inner, x.sin(), use_reentrant=False, **within)
        return x.sigmoid()

    expected = gradients([outer] * 3)
    within["context_fn"] = runtime.checkpoint_contexts
    for _ in range(3):
        with runtime.managed_forward():
            assert_same(gradients([outer] * 3, **within), expected)


def test_result_that_its_region_changes_in_place_is_computed_again(runtime):
    def region(x):
        early = x * 3
        early.add_(1)
        late = early.sigmoid().cos().sigmoid()
        early.add_(1)
        return early * early * late

    check(runtime, [region] * 3)


def test_numbers_that_a_region_reads_are_those_of_forward(runtime):
    def region(x):
        y = x.sigmoid().cos()
        return y * y.sum().item() + y

    check(runtime, [region] * 3)


def test_region_that_calls_other_operators_again_is_told_so(runtime):
    calls = []

    def region(x):
        calls.append(x)
        return x.sin().cos() if len(calls) % 2 else x.cos().sin()

    for _ in range(2):
        with (
            runtime.managed_forward(),
            pytest.raises(StagehandError, match=r"called aten\.cos.*same operators"),
        ):
            gradients([region], context_fn=runtime.checkpoint_contexts)
    calls.clear()
    check(runtime, [lambda x: x.sin().cos()] * 3)


@pytest.mark.filterwarnings("ignore:.*peak of its memory:stagehand.StagehandWarning")
@pytest.mark.parametrize("threshold", [0, HALF_ROW])
def test_regions_that_do_not_stop_early_are_exact(runtime, threshold):
    runtime.config = replace(runtime.config, recompute_threshold_bytes=threshold)
    with set_checkpoint_early_stop(False):
        check(runtime, [lambda x: x.sin().cos().sigmoid()] * 3)


def test_change_waits_for_the_copy_of_what_it_changes(runtime):
    """The fixture looks for races."""
    spill = runtime._parts.spill
    early = torch.zeros(4 * ROWS, WIDTH, device="hpu")
    leaves = Prefix(1, 4 * ROW_BYTES, 0, frozenset())
    lesson = Lesson(prefix=leaves, observed=2)
    spill.lessons._known[early.shape, early.dtype] = lesson
    scope = spill.begin()
    kept = spill.packer(scope, Kept)(early)
    assert kept.bundle.left is not None
    region = _Region(spill, HALF_ROW)
    region.let_write((early, 1))
    early.add_(1)
    spill.end(scope, failed=False)


def test_result_that_is_changed_after_its_region_is_computed_again(runtime):
    def region(x):
        early = x.sigmoid() * 3
        return early, early * early.cos()

    def gradient(**settings):
        x = inputs()
        early, late = checkpoint(region, x, use_reentrant=False, **settings)
        early.add_(1)
        return torch.autograd.grad((early.square() * late).sum(), x)[0].cpu()

    expected = gradient()
    for _ in range(3):
        with runtime.managed_forward():
            found = gradient(context_fn=runtime.checkpoint_contexts)
        assert torch.equal(found, expected)


def with_a_backward_inside(runtime, *, early, late):
    """Gradients of a forward in which a region of another graph is computed again.

    The region makes room, by what the forward has saved and its user holds.

    Args:
        early: What to add to that before it is saved.
        late: What to add to it when it has left.
    """

    def region(y):
        return y.sin().cos().sigmoid().sin()

    kw, forward = {}, nullcontext
    if runtime is not None:
        kw["context_fn"], forward = runtime.checkpoint_contexts, runtime.managed_forward
    x, held = inputs(), []
    with forward():
        other = x
        for _ in range(2):
            other = checkpoint(region, other, use_reentrant=False, **kw)
    with forward():
        loss = torch.zeros((), device="hpu")
        for factor in (1.5, 2.5):
            held.append((x * factor).add_(early) if early else x * factor)
            loss = loss + held[-1].cos().sum()
        found = torch.autograd.grad(other.sum(), x)
    if late:
        held[-1].add_(late)
    return [g.cpu() for g in (*found, *torch.autograd.grad(loss, x))]


@pytest.fixture
def few_rows(sim):
    config = ActivationStagehandConfig(
        budget=3 * ROW_BYTES, recompute_threshold_bytes=ROW_BYTES
    )
    runtime = ActivationRuntime(config)
    yield runtime
    runtime.shutdown()


def test_changes_before_the_save_are_none_of_what_leaves_while_a_region_runs(few_rows):
    expected = with_a_backward_inside(None, early=1.0, late=0)
    for _ in range(4):
        few_rows.step_begin()
        assert_same(with_a_backward_inside(few_rows, early=1.0, late=0), expected)
        few_rows.step_end()


def test_changes_of_what_has_left_while_a_region_ran_raise(few_rows):
    for _ in range(4):
        few_rows.step_begin()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            with_a_backward_inside(few_rows, early=0, late=1.0)
        few_rows.step_end()


def test_what_leaves_inside_of_a_region_is_no_operator_of_it(runtime):
    """Hooks of the user's hide the region, which counted copies that only forward has.

    What these hooks get is not computed again, so it may leave.
    """

    def region(inside, x):
        with saved_tensors_hooks(torch.Tensor.detach, lambda packed: packed), inside:
            x = x.sin().cos().sigmoid().sin()
        return x.cos().sin()

    expected = gradients([partial(region, nullcontext())] * 3)
    with emptied(stagehand.activations(2 * ROW_BYTES)) as saved:
        for _ in range(3):
            found = gradients(
                [partial(region, saved)] * 3, context_fn=runtime.checkpoint_contexts
            )
            assert_same(found, expected)
        assert saved._parts.spill.tally.restored_count > 0
