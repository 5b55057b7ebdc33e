"""Under autocast neither its cache nor the graph keeps casts of streamed weights."""

from copy import deepcopy

import pytest
import torch
from small import LAYER_BYTES, batch, runtime_of, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from training import Setting

WEIGHTS = 12 * 32 * 33  # elements of `stack(12)`


def half_step(model):
    """One forward and backward in bf16; return the gradients."""
    model.zero_grad()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss = model(batch(2, 32).to("hpu")).float().sum()
    loss.backward()
    return [p.grad.cpu().clone() for p in model.parameters()]


def gradients(model, steps=3):
    return [half_step(model) for _ in range(steps)]


def assert_equal_gradients(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "read only"])
def test_casts_of_streamed_weights_are_held_by_nobody(sim, trained):
    model = stack(12)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    x = batch(2, 32).to("hpu")
    held = sim.allocated_bytes()
    with torch.set_grad_enabled(trained), torch.autocast("hpu", dtype=torch.bfloat16):
        output = model(x)
        grown = sim.allocated_bytes() - held - 2 * LAYER_BYTES
        assert grown < WEIGHTS * 2 // 3, "of the bytes of all casts"
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
    """A recompute is no second use: the block's casts were cached from then on."""
    model = Recomputed(reentrant=reentrant)
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    assert_equal_gradients(gradients(model), expected)
    held = sim.allocated_bytes()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        output = model(batch(2, 32).to("hpu"))
        grown = sim.allocated_bytes() - held - 2 * LAYER_BYTES
        assert grown < WEIGHTS * 2 // 3, "of the bytes of all casts"
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
    """Reads one weight once for each of its steps, in one use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(x @ self.weight)
        return x.float()


def cells():
    return nn.Sequential(*(Cell() for _ in range(4)))


@pytest.mark.parametrize("make", [Twice, cells], ids=["in uses", "in one use"])
def test_weights_used_twice_keep_their_casts_from_the_second_pass_on(sim, make):
    model = make()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="used again") as seen:
        half_step(model)
    assert len(seen) == 1, "not one for each block"
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


def test_weights_of_two_forwards_in_one_region_are_used_again(sim):
    model = stack(12)
    expected = two_forwards(deepcopy(model).to("hpu"), regions=1)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    half_step(model)
    with pytest.warns(stagehand.StagehandWarning, match="used again"):
        two_forwards(model, regions=1)
    assert_equal_gradients([two_forwards(model, regions=1)], [expected])
    runtime_of(model).shutdown()


@pytest.mark.filterwarnings("error::stagehand.StagehandWarning")
@pytest.mark.parametrize("recomputed", [True, False])
def test_each_region_and_each_backward_begins_anew(sim, recomputed):
    model = Recomputed(reentrant=False) if recomputed else stack(12)
    plain = deepcopy(model).to("hpu")
    expected = [two_forwards(plain, regions=2), half_step(plain), half_step(plain)]
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    found = [two_forwards(model, regions=2)]
    with torch.autocast("hpu", dtype=torch.bfloat16):  # each step is inside of one
        found += [half_step(model), half_step(model)]
        with pytest.warns(stagehand.StagehandWarning, match="used again"):
            two_forwards(model, regions=1)
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


class WithAdapters(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.filterwarnings("error::stagehand.StagehandWarning")
def test_adapters_in_two_forwards_have_the_resident_gradients_at_once(sim, mode):
    """The cache was off for what stays on the device, and for adapters in blocks."""
    model = WithAdapters()
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


@pytest.mark.filterwarnings("ignore::stagehand.StagehandWarning")
def test_a_block_that_others_call_is_used_again(sim):
    model = Lending()
    expected = gradients(deepcopy(model).to("hpu"))
    pattern = r"^shared$|^blocks\.\d$"
    runtime = stagehand.StagehandRuntime(model, block_pattern=pattern, device="hpu")
    half_step(model)
    assert_equal_gradients(gradients(model), expected)
    runtime.shutdown()


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


class UpDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.down(self.up(x))


def test_layers_that_are_one_block_are_not_taken_for_one_that_is_used_again(sim):
    """Its second layer began, and the block was known already."""
    model = nn.Sequential(*(UpDown() for _ in range(20)))
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=34 * LAYER_BYTES)
    assert len(runtime_of(model).block_ids) <= 20
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


class Tied(nn.Module):
    """Two modules of one weight, in one block."""

    def __init__(self):
        super().__init__()
        self.layers = stack(4)
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, x):
        return self.layers(x)


def test_a_weight_that_two_modules_read_is_used_again(sim):
    model = Tied()
    expected = gradients(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="used again"):
        half_step(model)
    assert_equal_gradients(gradients(model), expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("wanted", [True, False])
def test_cache_is_after_a_pass_as_it_was_before(sim, wanted):
    model = Twice()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    with torch.autocast("hpu", dtype=torch.bfloat16, cache_enabled=wanted):
        with torch.no_grad():
            model(batch(2, 32).to("hpu"))
        assert torch.is_autocast_cache_enabled() is wanted
    runtime_of(model).shutdown()
