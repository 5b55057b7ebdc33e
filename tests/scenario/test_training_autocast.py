"""Under autocast neither its cache nor the graph keeps memory of casts."""

import contextlib
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from small import LAYER_BYTES, batch, runtime_of, stack
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import stagehand
from architectures import assert_bitwise_equal
from equality import all_equal
from stagehand.autocast import _have_graphs
from training import OnTwoStreams, Setting

WEIGHTS = 12 * 32 * 33  # elements of `stack(12)`
of_graphs = pytest.mark.skipif(
    not _have_graphs(),
    reason="this version of torch makes casts without gradients that are in no graph",
)


def half_step(model):
    """One forward and backward in bf16; return the gradients."""
    model.zero_grad()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss = model(batch(2, 32).to("hpu")).float().sum()
    loss.backward()
    return [p.grad.cpu().clone() for p in model.parameters()]


def gradients(model, steps=3):
    return [half_step(model) for _ in range(steps)]


@contextlib.contextmanager
def no_casts_kept(sim, but=0):
    """Fail if what is allocated grows by more than a third of the bytes of all casts.

    Args:
        but: Bytes that it may grow by besides.
    """
    held = sim.allocated_bytes()
    yield
    grown = sim.allocated_bytes() - held - but
    assert grown < WEIGHTS * 2 // 3, "of the bytes of all casts"


def assert_equal_gradients(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert all_equal(mine, other)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "read only"])
def test_casts_of_streamed_weights_are_held_by_nobody(sim, trained):
    model = stack(12)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")
    with (
        torch.set_grad_enabled(trained),
        torch.autocast("hpu", dtype=torch.bfloat16),
        no_casts_kept(sim, 2 * LAYER_BYTES),
    ):
        output = model(x)
    del output
    runtime_of(model).shutdown()


class Recomputed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.layers = stack(12)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_casts_of_weights_that_are_recomputed_are_held_by_nobody_either(sim, reentrant):
    model = Recomputed(reentrant=reentrant)
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    with (
        torch.autocast("hpu", dtype=torch.bfloat16),
        no_casts_kept(sim, 2 * LAYER_BYTES),
    ):
        output = model(batch(2, 32).to("hpu"))
    del output
    runtime_of(model).shutdown()


def test_gradients_under_autocast_are_those_of_the_resident_model(sim):
    model = stack(12)
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


def test_weight_changed_after_it_was_cast_raises_in_backward(sim):
    model = stack(4)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss = model(batch(2, 32).to("hpu").requires_grad_()).float().sum()
    with torch.no_grad():
        model[2][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    runtime_of(model).shutdown()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = stack(4)

    def forward(self, x):
        return self.layers(self.layers(x))


class Cell(nn.Module):
    """Reads one weight several times in one use, and more often in each pass."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x):
        self.steps += 1
        for _ in range(self.steps):
            x = torch.tanh(x @ self.weight)
        return x.float()


def cells():
    return nn.Sequential(*(Cell() for _ in range(4)))


@pytest.mark.parametrize("make", [Twice, cells], ids=["in uses", "in one use"])
def test_weights_used_twice_have_the_resident_gradients(sim, make):
    """Autograd adds what comes to a cast before it is cast back."""
    model = make()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


def two_forwards(model, *, regions):
    """Gradients of one loss of two forwards, in one region of autocast or in two."""
    model.zero_grad()
    x = batch(2, 32).to("hpu")
    losses = []
    if regions == 1:
        with torch.autocast("hpu", dtype=torch.bfloat16):
            losses += [model(x).float().sum(), model(x * 2).float().sum()]
    else:
        for scale in (1, 2):
            with torch.autocast("hpu", dtype=torch.bfloat16):
                losses.append(model(x * scale).float().sum())
    sum(losses).backward()
    return [p.grad.cpu().clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("recomputed", [True, False])
def test_each_region_casts_anew_and_each_forward_in_it_does_not(sim, recomputed):
    model = Recomputed(reentrant=False) if recomputed else stack(12)

    def steps(model):
        found = [two_forwards(model, regions=1), two_forwards(model, regions=2)]
        with torch.autocast("hpu", dtype=torch.bfloat16):  # each step is inside of one
            found += [half_step(model), two_forwards(model, regions=1)]
        return [*found, half_step(model)]

    expected = steps(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(steps(model), expected)
    runtime_of(model).shutdown()


def test_casts_are_held_by_nobody_between_two_forwards(sim):
    model = stack(12)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")
    with torch.autocast("hpu", dtype=torch.bfloat16):
        kept = [model(x)]
        with no_casts_kept(sim):
            kept += [model(x), model(x), model(x)]
    runtime_of(model).shutdown()


def test_casts_that_backward_needs_in_the_region_are_held_by_nobody_behind_it(sim):
    model = stack(12)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    half_step(model)
    with torch.autocast("hpu", dtype=torch.bfloat16):
        output = model(batch(2, 32).to("hpu"))
        with no_casts_kept(sim):
            output.float().sum().backward()
    runtime_of(model).shutdown()


class Reading(nn.Module):
    """Layers that read an input which needs no gradient: nothing saves their casts."""

    def __init__(self):
        super().__init__()
        self.layers = stack(12)

    def forward(self, x):
        return sum(layer(x).float() for layer in self.layers)


def test_casts_that_nothing_saves_are_held_by_nobody_either(sim):
    model = Reading()
    expected = two_forwards(deepcopy(model).to("hpu"), regions=1)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients([two_forwards(model, regions=1)], [expected])
    x = batch(2, 32).to("hpu")
    with torch.autocast("hpu", dtype=torch.bfloat16), no_casts_kept(sim):
        output = model(x)
    del output
    runtime_of(model).shutdown()


class Turned(nn.Module):
    """A layer whose input is not contiguous: how it is multiplied depends on whether
    the layer's cast requires a gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).float()


class InBlocks(nn.Module):
    def __init__(self, make, depth):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@of_graphs
@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_without_gradients_inputs_that_are_not_contiguous_are_multiplied_as_resident(
    sim, mode
):
    """Before, behind and between passes with gradients, in one region or several."""

    def steps(model):
        x = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1))
        x, found = x.to("hpu"), []
        for looks in ("before", "between", "behind"):
            model.zero_grad()
            with torch.autocast("hpu", dtype=torch.float16):
                with torch.set_grad_enabled(looks != "before"):
                    output = model(x)
                with torch.set_grad_enabled(looks == "before"):
                    found.append(model(x))
                if looks == "between":
                    output = output + model(x * 2)
            (found[-1] if looks == "before" else output).square().mean().backward()
            found += [output, *(p.grad for p in model.parameters())]
        return [tensor.detach().cpu().clone() for tensor in found]

    model = InBlocks(Turned, 12)
    expected = steps(deepcopy(model).to("hpu"))
    runtime = Setting("hpu", mode, "").stream(model, 3 * LAYER_BYTES)
    assert_bitwise_equal(steps(model), expected, "outputs and gradients")
    runtime.shutdown()


@pytest.mark.parametrize("make", [partial(InBlocks, Turned, 12), Reading])
def test_casts_of_passes_with_and_without_gradients_are_held_by_nobody(sim, make):
    model = make()
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    x = torch.randn(4, 32, 32, device="hpu")
    with (
        torch.autocast("hpu", dtype=torch.bfloat16),
        no_casts_kept(sim, 3 * LAYER_BYTES),
    ):
        for trained in (False, True, False, True):
            with torch.set_grad_enabled(trained):
                model(x)
    runtime_of(model).shutdown()


class Stacked(nn.Module):
    """Several matrices in one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 16) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.weight).float()


class Convolved(nn.Module):
    def __init__(self, axes):
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.layer = kind(8, 8, 3, padding=1)
        if axes == 2:  # no view of its cast in another shape is a matrix
            self.layer.to(memory_format=torch.channels_last)

    def forward(self, x):
        return torch.tanh(self.layer(x)).float()


@pytest.mark.parametrize("axes", [0, 1, 2, 3])
def test_casts_of_any_shape_are_held_by_nobody_without_gradients(sim, axes):
    def outputs(model):
        x = torch.randn(8, 8, *[16] * max(1, axes), generator=torch.manual_seed(1))
        with torch.no_grad(), torch.autocast("hpu", dtype=torch.bfloat16):
            first = model(x.to("hpu"))
            return [first, model(first)]

    model = nn.Sequential(*(Convolved(axes) if axes else Stacked() for _ in range(12)))
    nbytes = [t.numel() * 4 for t in model.parameters()]
    expected = outputs(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=4 * (sum(nbytes) // 12 + 512))
    assert_bitwise_equal(outputs(model), expected, "outputs")  # and makes slots
    x = torch.ones(8, 8, *[16] * max(1, axes), device="hpu")
    held = sim.allocated_bytes()
    with torch.no_grad(), torch.autocast("hpu", dtype=torch.bfloat16):
        model(x)
        assert sim.allocated_bytes() - held < sum(nbytes) // 2 // 3, "of all casts"
    runtime_of(model).shutdown()


class Either(nn.Module):
    """Reads one of its weights, by its input's sign."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 4 for _ in range(2))

    def forward(self, x):
        weight = self.weights[int(x.sum() > 0)]
        return (x.abs() @ weight).float().abs() * x.sum().sign()


def test_casts_of_weights_that_the_first_call_has_not_read_are_held_by_nobody(sim):
    model = nn.Sequential(*(Either() for _ in range(12)))
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    x = torch.ones(4, 32, device="hpu")
    with torch.no_grad(), torch.autocast("hpu", dtype=torch.bfloat16):
        model(x)
        with no_casts_kept(sim):
            model(-x)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_convolutions_without_gradients_have_casts_that_are_emptied(form):
    """Nothing of the kind of `matmul` can save these casts as they are."""

    def steps(model, blocks=()):
        found = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for trained in (False, True, False):
                with torch.set_grad_enabled(trained):
                    found.append(model(x))
            found[1].float().square().mean().backward()
            known = [known for block in blocks for known in block.casts.values()]
            assert [one.cast().numel() for one in known] == [0] * len(blocks[1:])
        found += [p.grad for p in model.parameters()]
        return [tensor.detach().clone() for tensor in found]

    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)))
    model.to(memory_format=form)
    x = torch.randn(2, 8, 6, 6).to(memory_format=form)
    expected = steps(deepcopy(model))
    stagehand.layer(model, vram_budget="6 KB", device="cpu")
    runtime = runtime_of(model)
    ours = steps(model, runtime._parts.blocks)
    assert_bitwise_equal(ours, expected, "outputs and gradients")
    runtime.shutdown()


class InnerRecomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.layer(x).float()
        return checkpoint(self.layer, x, use_reentrant=True).float()


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_backward_in_a_region_recomputes_with_casts_of_passes_without_gradients(
    sim, place
):
    """Blocks whose layers are called again without them, on the host as elsewhere."""

    def steps(model):
        x = batch(2, 32).to(place).requires_grad_()
        with torch.autocast(place, dtype=torch.bfloat16):
            with torch.no_grad():
                found = [model(x)]
            model(x).square().mean().backward()
        return [t.detach().cpu() for t in found + [p.grad for p in model.parameters()]]

    model = nn.Module()
    model.blocks = nn.Sequential(*(InnerRecomputed() for _ in range(4)))
    expected = steps(deepcopy(model.blocks).to(place))
    runtime = Setting(place, "blocks", "").stream(model, 2 * LAYER_BYTES)
    assert_bitwise_equal(steps(model.blocks), expected, "outputs and gradients")
    runtime.shutdown()


class Speaking(nn.Module):
    """Looks rows up in the table that its head reads."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.layers = stack(12)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        return self.head(x + self.layers(x)).float()


def speak(model, plan):
    """Return outputs, and the gradients, which are added up, of passes in regions.

    Args:
        plan: Of each region the passes: with gradients, without, or of all back; and
            whether it is none of autocast.
    """
    words, found, losses = torch.arange(48, device="hpu").view(4, 12), [], []
    for region in plan.split("|"):
        casts, steps = "plain" not in region, region.replace("plain", "").split()
        with torch.autocast("hpu", dtype=torch.float16, enabled=casts):
            for step in steps:
                if step == "back":
                    sum(losses).backward()
                    losses.clear()
                    found += [p.grad.cpu().clone() for p in model.parameters()]
                    continue
                with torch.set_grad_enabled(step == "with"):
                    output = model((words * 3 + len(found)) % 64)
                found.append(output.detach().cpu())
                losses += [output.square().mean() * 3] if step == "with" else []
    return found


PLANS = [
    "with back | without with back | without with with back",
    "without with back | with with without back | with back",
    "with back with back | with with back without with back",
    "plain with back | without with back",
    "with back | with | without with | back with with back",
]


@of_graphs
@pytest.mark.parametrize("budget", [4, 5, 9, 13, 16])
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_add_up_terms_of_casts_that_they_find_as_resident_ones(
    sim, plan, budget
):
    model = Speaking()
    expected = speak(deepcopy(model).to("hpu"), plan)
    stagehand.layer(model, vram_budget=budget * LAYER_BYTES)
    assert_bitwise_equal(speak(model, plan), expected, "outputs and gradients")
    runtime_of(model).shutdown()


class StackedAcross(Stacked):
    """Its weight is not contiguous, and its gradient is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.weight.detach().transpose(1, 2))

    def forward(self, x):
        return torch.tanh(torch.bmm(x, self.weight)).float()


@of_graphs
@pytest.mark.parametrize("budget", [2, 4])
def test_gradients_that_lie_otherwise_than_their_weights_are_added_in_order(
    sim, budget
):
    """Those of casts from a pass without gradients come when their blocks have left."""

    def steps(model):
        x, found = torch.randn(8, 16, 16).to("hpu"), []
        model(x).square().mean().backward()
        for _ in range(2):
            loss = model(x).square().mean()
            with torch.autocast("hpu", dtype=torch.bfloat16):
                with torch.no_grad():
                    model(x)
                loss = loss + model(x + 1).square().mean()
            loss.backward()
            found += [p.grad.cpu().clone() for p in model.parameters()]
        return found

    model = nn.Sequential(*(StackedAcross() for _ in range(6)))
    torch.manual_seed(1)
    expected = steps(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=budget * 8 * 16 * 16 * 4)
    torch.manual_seed(1)
    assert_bitwise_equal(steps(model), expected, "gradients")
    runtime_of(model).shutdown()


class ReadsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x):
        y = torch.tanh(x.transpose(1, 2) @ self.weight)
        return torch.tanh(x @ self.weight).float() + y.float()


def test_two_reads_are_two_terms_where_autocast_is_off_and_one_where_it_is_on(sim):
    """Both calls add as many nodes to the graph: a cast, or a second addition."""

    def steps(model):
        x = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1))
        x, found = x.to("hpu"), []
        with torch.autocast("hpu", dtype=torch.bfloat16):
            output = sum(layer(x) for layer in model)
        for _ in range(2):
            output.square().mean().backward()
            found += [p.grad.cpu().clone() for p in model.parameters()]
            model.zero_grad()
            output = model(model(x.requires_grad_()))
        return found

    model = nn.Sequential(*(ReadsTwice() for _ in range(4)))
    expected = steps(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_bitwise_equal(steps(model), expected, "gradients")
    runtime_of(model).shutdown()


@of_graphs
def test_what_a_call_without_gradients_does_not_cast_is_not_cast_for_it(sim):
    """A table that is looked up by rows, say."""
    model = nn.Sequential(nn.Embedding(64, 32), *stack(4))
    stagehand.layer(model, vram_budget=16 * LAYER_BYTES)
    with torch.no_grad(), torch.autocast("hpu", dtype=torch.bfloat16):
        model(torch.arange(4, device="hpu"))
    known = [key for block in runtime_of(model)._parts.blocks for key in block.casts]
    assert known == [id(layer[0].weight) for layer in model[2:]], "but of the rest's"
    runtime_of(model).shutdown()


class Own(nn.Module):
    """Casts its weight itself, and keeps the cast or a view of it."""

    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 4)
        self.view = view

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x
        cast = self.weight.to(torch.bfloat16)
        self.kept = cast.t() if self.view else cast
        return (x.to(torch.bfloat16) @ cast).float()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("view", [True, False])
def test_casts_that_the_model_keeps_are_left_to_it(sim, view, cached):
    model = nn.Sequential(*(Own(view) for _ in range(4)))
    expected = [own.weight.detach().to(torch.bfloat16) for own in model]
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu").requires_grad_()
    with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=cached):
        model(x).sum().backward()
        model(x).sum().backward()
    for own, cast in zip(model, expected, strict=True):
        assert torch.equal(own.kept.cpu(), cast.t() if view else cast)
        assert not view or own.kept._base.shape == cast.shape
        own.kept = None
    runtime_of(model).shutdown()


class Tying(nn.Module):
    """Reads a layer's weight once more itself, in the middle of the others."""

    which = 0

    def __init__(self):
        super().__init__()
        self.layers = stack(6)

    def forward(self, x):
        x = self.layers(x)
        return self.layers[1:](torch.tanh(nn.functional.linear(x, self.tied)).float())

    @property
    def tied(self):
        return self.layers[self.which][0].weight


@pytest.mark.parametrize("which", [0, 5], ids=["first", "latest"])
def test_a_weight_that_is_read_elsewhere_has_its_cast_there(sim, which):
    model = Tying()
    model.which = which
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


def test_a_weight_that_is_read_right_behind_its_module_has_its_cast_there(sim):
    """Without gradients, of which the region has a cast from before."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))

    def outputs(model):
        x, handles = batch(2, 32).to("hpu"), []
        with torch.autocast("hpu", dtype=torch.bfloat16):
            first = model(x).detach().cpu()
            for layer in model:
                hook = layer.register_forward_hook
                handles.append(hook(lambda m, _, y: nn.functional.linear(y, m.weight)))
            with torch.no_grad():
                second = model(x).cpu()
        for handle in handles:
            handle.remove()
        return [first, second]

    expected = outputs(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=5 * LAYER_BYTES)
    assert_bitwise_equal(outputs(model), expected, "with gradients, and without")
    runtime_of(model).shutdown()


def test_after_an_optimizer_has_stepped_in_a_region_the_weights_are_the_new_ones(sim):
    """In backward as in the forward: what autocast keeps is of the old ones."""

    def steps(model, *, cached):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=cached):
            for _ in range(3):
                optimizer.zero_grad()
                output = model(batch(2, 32).to("hpu"))
                output.float().square().mean().backward()
                found.append([p.grad.cpu().clone() for p in model.parameters()])
                optimizer.step()
        return found

    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    expected = steps(deepcopy(model).to("hpu"), cached=False)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="has changed since") as seen:
        found = steps(model, cached=True)
    assert len(seen) == 1
    assert_equal_gradients(found, expected)
    runtime_of(model).shutdown()


class Adapted(nn.Module):
    """Two frozen layers, and beside the first a small trained one."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(32, 1, bias=False), nn.Linear(1, 32, bias=False)

    def forward(self, x):
        return self.last(self.layer(x) + self.up(self.down(x)))


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_adapters_in_two_forwards_have_the_resident_gradients_at_once(sim, mode):
    model = InBlocks(Adapted, 4)
    expected = two_forwards(deepcopy(model).to("hpu"), regions=1)
    budget = 5 * LAYER_BYTES
    runtime = Setting("hpu", mode, "").stream(model, budget)
    assert len(runtime.block_ids) == (8 if mode == "layers" else 4)
    assert_equal_gradients([two_forwards(model, regions=1)], [expected])
    runtime.shutdown()


class Borrowing(nn.Module):
    """A block that calls another one, which is no part of it."""

    def __init__(self, shared):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.shared = [shared]

    def forward(self, x):
        return self.layer(self.shared[0](self.layer(x))).float()


class Lending(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Borrowing(self.shared) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_others_call_is_used_again(sim):
    model = Lending()
    expected = gradients(deepcopy(model).to("hpu"))
    pattern = r"^shared$|^blocks\.\d$"
    runtime = stagehand.StagehandRuntime(model, block_pattern=pattern, device="hpu")
    assert_equal_gradients(gradients(model), expected)
    runtime.shutdown()


class Recursive(nn.Module):
    """Calls itself between two reads of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x, depth=2):
        x = torch.tanh(x @ self.weight)
        if depth:
            x = self(x, depth - 1)
        return torch.tanh(x @ self.weight).float()


def test_a_block_that_calls_itself_is_used_until_the_last_has_ended(sim):
    model = nn.Sequential(*(Recursive() for _ in range(4)))
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


class Attention(nn.Module):
    """Three layers that read one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return (x + torch.tanh(self.q(x) * self.k(x) + self.v(x))).float()


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_inputs_that_are_leaves_have_the_resident_gradients(sim, reentrant):
    """A reentrant region is given leaves, whatever the model is given."""

    def step(model):
        x = batch(2, 32).to("hpu").requires_grad_()
        y = x
        with torch.autocast("hpu", dtype=torch.bfloat16):
            for layer in model:
                if reentrant is None:
                    y = layer(y)
                else:
                    y = checkpoint(layer, y, use_reentrant=reentrant)
            loss = y.square().mean()
        loss.backward()
        return [x.grad.cpu(), *(p.grad.cpu().clone() for p in model.parameters())]

    model = nn.Sequential(*(Attention() for _ in range(3)))
    expected = step(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    assert_equal_gradients([step(model)], [expected])
    runtime_of(model).shutdown()


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "read only"])
def test_casts_are_held_by_nobody_where_the_model_itself_enters_autocast(sim, trained):
    """As `accelerate` has it do: its context was made where the cache was on."""
    model = stack(12)
    casting = torch.autocast("hpu", dtype=torch.bfloat16)
    grown = []

    def forward(x):
        with casting:
            output = type(model).forward(model, x)
            grown.append(sim.allocated_bytes() - held - 2 * LAYER_BYTES)
            return output

    model.forward = forward
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")
    held = sim.allocated_bytes()
    with torch.set_grad_enabled(trained):
        model(x)
    assert grown[0] < WEIGHTS * 2 // 3, "of the bytes of all casts"
    runtime_of(model).shutdown()


class CastsItself(nn.Linear):
    """Its cast is gone when its call ends."""

    def forward(self, x):
        with torch.autocast("hpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_layers_that_enter_autocast_themselves_have_the_resident_gradients(sim):
    def step(model):
        model.zero_grad()
        model(batch(2, 32).to("hpu")).sum().backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    model = nn.Sequential(*(CastsItself(32, 32) for _ in range(4)))
    resident = deepcopy(model).to("hpu")
    expected = [step(resident), step(resident)]
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients([step(model), step(model)], expected)
    runtime_of(model).shutdown()


class UpDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.down(self.up(x))


def assert_equal_in_blocks_of_two(build, steps):
    """Two layers are one block each, and give the gradients of resident ones."""
    model = nn.Sequential(*(build() for _ in range(20)))
    expected = steps(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=34 * LAYER_BYTES)
    assert len(runtime_of(model).block_ids) <= 20
    assert_equal_gradients(steps(model), expected)
    runtime_of(model).shutdown()


def test_layers_that_are_one_block_are_not_taken_for_one_that_is_used_again(sim):
    """Its second layer began, and the block was known already."""
    assert_equal_in_blocks_of_two(UpDown, gradients)


class UpWithout(UpDown):
    """In later steps its second layer is called where autocast is off."""

    casts = True

    def forward(self, x):
        x = self.up(x)
        with torch.autocast("hpu", dtype=torch.bfloat16, enabled=self.casts):
            return self.down(x.float()).float()


def test_a_layer_where_autocast_is_off_has_no_cast_beside_one_that_has(sim):
    def steps(model):
        made = []
        for casts in (True, False, True):
            for part in model:
                part.casts = casts
            made.append(half_step(model))
        return made

    assert_equal_in_blocks_of_two(UpWithout, steps)


class OfTwoTypes(nn.Module):
    """Its second layer is multiplied in a type of its own."""

    inner: torch.dtype | None = torch.float16

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        up, casts = self.up(x).float(), self.inner is not None
        with torch.autocast("hpu", dtype=self.inner, enabled=casts):
            return torch.tanh(up + self.down(x).float())


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("order", ["without with", "with without"])
def test_blocks_that_change_the_type_of_autocast_inside_are_as_resident(
    sim, mode, order
):
    """The type at a block's end was taken for that of all of its casts."""
    half, brain = torch.float16, torch.bfloat16
    model = InBlocks(OfTwoTypes, 4)

    def steps(model, blocks=()):
        found, losses, x = [], [], batch(2, 32).to("hpu")
        for outer, *inner in (
            *((brain, half), (brain, None, half), (half, half), (half, brain)),
            *((half, None, brain), (brain, brain)),
        ):
            with torch.autocast("hpu", dtype=outer):
                for part, way in product(inner, order.split() * 2):
                    for block in model.blocks:
                        block.inner = part
                    with torch.set_grad_enabled(way == "with"):
                        found.append(model(x))
                    if way == "with":  # nothing saves casts where inputs are only read
                        losses += [found[-1].sum(), *(b(x).sum() for b in model.blocks)]
                known = [one for block in blocks for one in block.casts.values()]
                assert not any(one.cast().numel() for one in known)
            model.zero_grad()
            sum(losses).backward()
            losses.clear()
            found += [p.grad.clone() for p in model.parameters()]
        return [tensor.detach().cpu() for tensor in found]

    expected = steps(deepcopy(model).to("hpu"))
    runtime = Setting("hpu", mode, "").stream(model, 5 * LAYER_BYTES)
    ours = steps(model, runtime._parts.blocks)
    assert_bitwise_equal(ours, expected, "outputs and gradients")
    runtime.shutdown()


class CastsWide(nn.Module):
    """Reads its weight in another type than it is stored in, without autocast."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.float64) / 4)

    def forward(self, x):
        return x @ self.weight.float()


def test_weights_that_blocks_cast_themselves_are_not_taken_for_autocasts(sim):
    model = InBlocks(lambda: nn.Sequential(CastsWide(), nn.Linear(32, 32)), 4)

    def step(model):
        model.zero_grad()
        x = batch(2, 32).to("hpu")
        with torch.autocast("hpu", dtype=torch.bfloat16):
            loss = sum(block(x).sum() for block in model.blocks) + model(x).sum()
        loss.backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    expected = step(deepcopy(model).to("hpu"))
    runtime = Setting("hpu", "blocks", "").stream(model, 9 * LAYER_BYTES)
    assert_equal_gradients([step(model), step(model)], [expected] * 2)
    runtime.shutdown()


class Tied(nn.Module):
    """Two modules of one weight, in one block."""

    def __init__(self):
        super().__init__()
        self.layers = stack(4)
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, x):
        return self.layers(x)


def test_a_weight_that_two_modules_read_has_the_resident_gradients(sim):
    model = Tied()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


class Within(nn.Module):
    """A block that recomputes a part of itself, which is given a leaf."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Attention()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_block_that_recomputes_a_part_of_itself_casts_as_resident(
    sim, inside, reentrant
):
    def step(model):
        model.zero_grad()
        x = batch(2, 32).to("hpu").requires_grad_()
        with torch.autocast("hpu", dtype=torch.bfloat16):
            loss = model(model(x)).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [x.grad.cpu(), *(p.grad.cpu().clone() for p in model.parameters())]

    model = nn.Sequential(*(Within(reentrant) for _ in range(3)))
    resident = deepcopy(model).to("hpu")
    expected = [step(resident), step(resident)]
    runtime = stagehand.StagehandRuntime(model, block_pattern=r"^\d$", device="hpu")
    runtime.set_budget(7 * LAYER_BYTES)
    assert_equal_gradients([step(model), step(model)], expected)
    runtime.shutdown()


def keep_products(context, operator, *args, **kwargs):
    kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class KeepsProducts(nn.Module):
    """Each layer runs in a region that keeps some results, and again behind it."""

    def __init__(self):
        super().__init__()
        self.layers = stack(4)

    def forward(self, x):
        keeping = partial(create_selective_checkpoint_contexts, keep_products)
        for layer in self.layers:
            x = layer(checkpoint(layer, x, use_reentrant=False, context_fn=keeping))
        return x


class KeepsReads(nn.Module):
    """Layers in one region read an input that needs no gradient: nothing saves their
    casts, which are asked for by another product."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x):
        return checkpoint(
            lambda x: sum(layer(x).float() for layer in self.layers),
            x.detach(),
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, keep_products),
        )


@pytest.mark.parametrize("make", [KeepsProducts, KeepsReads])
def test_regions_that_keep_some_results_hear_of_no_casts(sim, make):
    """They found an operator in the recompute that the forward had not run."""
    model = make()

    def step(model):
        model.zero_grad()
        with torch.autocast("hpu", dtype=torch.bfloat16):
            x = batch(2, 32).to("hpu").requires_grad_()
            model(x).float().sum().backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    resident = deepcopy(model).to("hpu")
    expected = [step(resident), step(resident)]
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients([step(model), step(model)], expected)
    runtime_of(model).shutdown()


def test_recomputes_that_end_inside_of_a_layer_hear_of_no_casts(sim):
    """What they had not come to save was looked for in sight of the region."""

    class Linears(KeepsProducts):
        def forward(self, x):
            keeping = partial(create_selective_checkpoint_contexts, keep_products)
            for linear, tanh in self.layers:
                x = tanh(checkpoint(linear, x, use_reentrant=False, context_fn=keeping))
            return x

    model = Linears()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


def test_regions_that_keep_what_is_large_do_not_count_what_casts_become(sim):
    """The first cast that is emptied was one more operator of the region's forward."""
    model = stack(4)

    def step(model, **options):
        model.zero_grad()
        with torch.autocast("hpu", dtype=torch.bfloat16):
            x = batch(2, 32).to("hpu").requires_grad_()
            checkpoint(
                model, x, use_reentrant=False, **options
            ).float().sum().backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    config = stagehand.ActivationStagehandConfig(
        budget="1GB", recompute_threshold_bytes=128
    )
    saved = stagehand.ActivationRuntime(config)
    resident = deepcopy(model).to("hpu")
    expected = [step(resident), step(resident)]
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    options = {"context_fn": saved.checkpoint_contexts}
    found = [step(model, **options), step(model, **options)]
    assert_equal_gradients(found, expected)
    runtime_of(model).shutdown()
    saved.shutdown()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_casts_of_what_blocks_share_are_not_emptied_with_a_block(sim, checkpointed):
    """The next block found a cast without memory, which belongs to none of the two."""
    model = stack(4)
    model[0].append(nn.Linear(32, 32))
    model[3].insert(0, model[0][0])

    def step(model):
        model.zero_grad()
        x = batch(2, 32).to("hpu").requires_grad_()
        with torch.autocast("hpu", dtype=torch.bfloat16):
            for block in model:
                x = (
                    checkpoint(block, x, use_reentrant=False)
                    if checkpointed
                    else block(x)
                )
        x.float().sum().backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    resident = deepcopy(model).to("hpu")
    expected = [step(resident), step(resident)]
    runtime = stagehand.StagehandRuntime(model, block_pattern=r"^\d$", device="hpu")
    runtime.set_budget(7 * LAYER_BYTES)
    assert_equal_gradients([step(model), step(model)], expected)
    runtime.shutdown()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_cache_is_after_a_pass_as_it_was_before(sim, wanted, fails):
    model = Twice()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    if fails:
        model.layers[2][0].register_forward_hook(lambda *_: 1 // 0)
    with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=wanted):
        with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
            model(batch(2, 32).to("hpu"))
        assert torch.is_autocast_cache_enabled() is wanted
    assert torch.is_autocast_cache_enabled()
    runtime_of(model).shutdown()


def test_a_site_that_an_interrupt_has_left_is_forgotten_by_the_next_pass(
    sim, monkeypatch
):
    model = stack(4)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with torch.autocast("hpu", dtype=torch.bfloat16), torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(runtime_of(model)._uses.casts, "end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(x)
        model(x)
        assert torch.is_autocast_cache_enabled()
        with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=False):
            model(x)
            assert not torch.is_autocast_cache_enabled()
    runtime_of(model).shutdown()


def test_a_cast_that_is_made_again_on_one_stream_is_there_for_others(sim):
    """Backward inside of the region made it again for a saved weight, and a recompute
    on the other stream did not wait for it."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model = OnTwoStreams(stack(4))
    plain, side = deepcopy(model).to("hpu"), torch.Stream("hpu")
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)

    def step(model):
        model.zero_grad()
        x = batch(2, 32).to("hpu").requires_grad_()
        with torch.autocast("hpu", dtype=torch.bfloat16):
            _casts = [layer(x) for layer in model.layers]  # before streams part
            y, _kept = model(x, side, True)
            y.float().sum().backward()
            torch.accelerator.synchronize()
        return [p.grad.cpu().clone() for p in model.parameters()]

    steps, freed = range(3), "freed while a kernel"  # by autograd, of its own gradients
    with sim.expect_races(freed) as without:
        expected = [step(plain) for _ in steps]
    with sim.expect_races(freed) as found:
        ours = [step(model) for _ in steps]
    assert set(found) <= set(without)
    assert len(found) <= len(without)
    assert_equal_gradients(ours, expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_a_cast_of_a_block_that_stays_in_use_is_used_again(sim, place):
    """On the host there are no streams that a tensor could be kept for."""
    model = stack(4)
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device=place)
    runtime, x = runtime_of(model), batch(2, 32).to(place)

    def step(model):
        with torch.autocast(place, dtype=torch.bfloat16):
            model(model(x)).float().sum().backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    expected = step(plain)
    runtime.before_block(runtime.block_ids[1])
    ours = step(model)
    runtime.after_block(runtime.block_ids[1])
    assert_equal_gradients([ours], [expected])
    runtime.shutdown()
