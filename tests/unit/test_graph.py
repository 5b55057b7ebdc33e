"""Saved tensors: weights become handles, all else is kept as it is."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import stagehand
from equality import all_equal
from scenario.small import LAYER_BYTES, batch, runtime_of, stack
from stagehand import graph
from stagehand.core.device import HostDevice
from stagehand.graph import SavedTensors
from stagehand.residency import handles


def never(block):
    raise AssertionError(f"{block} was fetched")


@pytest.mark.parametrize("kind", ["strided", "sparse", "wrapped"])
def test_tensors_that_lie_in_no_slot_are_kept_whatever_they_are(kind):
    eye = torch.eye(4)
    kinds = {
        "strided": lambda: eye.clone(),
        "sparse": eye.to_sparse,
        "wrapped": lambda: TwoTensor(eye, eye.clone()),
    }
    given = kinds[kind]().requires_grad_()
    nothing = SimpleNamespace(slots_by_memory={}, left_memory=set(), fetched=None)
    saved = SavedTensors(nothing, {}, never, lambda: None, HostDevice())
    saved.begin_pass()
    squares = given * given
    saved.leave_hooks()
    squares.sum().backward()
    found = given.grad.a if kind == "wrapped" else given.grad.to_dense()
    assert torch.equal(found, 2 * eye)


def test_frozen_weights_are_fetched_again_in_backward_and_hold_no_slot(sim):
    model = stack().requires_grad_(False)
    plain = deepcopy(model).to("hpu")
    gradients = []
    for each in (plain, stagehand.layer(model, vram_budget=2 * LAYER_BYTES)):
        x = batch().to("hpu").requires_grad_()
        each(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


def test_weight_changed_between_forward_and_backward_raises_as_autograd_does(sim):
    model = stack().requires_grad_(False)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    output = model(batch().to("hpu").requires_grad_())
    with torch.no_grad():
        model[2][0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    del output
    runtime_of(model).shutdown()


@pytest.mark.parametrize("changed", [0, 1])
def test_change_of_a_weight_is_not_taken_for_its_neighbours(sim, changed):
    """In the block's image one of them begins where the other one ends."""
    pair = [torch.nn.Linear(32, 32, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*deepcopy(pair)) for _ in "1234"))
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=0.03, vram_low_watermark_mb=0.02
    )
    runtime = stagehand.StagehandRuntime(
        model.requires_grad_(False), config, r"^\d$", device="hpu"
    )
    model(batch().to("hpu").requires_grad_()).sum().backward()
    output = model(batch().to("hpu").requires_grad_())
    with torch.no_grad():
        model[2][changed].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    del output
    runtime.shutdown()


class Pieces(torch.nn.Module):
    """A block that reads another piece of its weight in each pass."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return x[:, : self.passes] @ self.weight[: self.passes]


def test_views_that_are_new_in_each_pass_do_not_pile_up(sim, monkeypatch):
    monkeypatch.setattr(handles, "_ALIKE_KEPT", 5)
    monkeypatch.setattr(handles, "_VIEWS_KEPT", 3)
    model = torch.nn.Sequential(Pieces(), Pieces())
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=64 * 64 * 4)
    runtime = runtime_of(model)
    for number in range(12):
        gradients = []
        for each in (plain, model):
            x = torch.ones(2, 64, device="hpu", requires_grad=True)
            each(x).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients), number
        blocks = runtime._parts.scheduler.blocks
        assert all(sum(map(len, block.handles.values())) <= 5 for block in blocks)
        slots = runtime._parts.scheduler._memory.slots
        assert all(len(slot.views) <= 4 for slot in slots)  # the block's own are one
    assert runtime.report().abandoned_slots == 0
    runtime.shutdown()


class Cuts(torch.nn.Module):
    """A block that reads many rows of its weight, other ones in each pass."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 64))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        for row in range(self.passes, self.passes + 12):
            x = x + x * self.weight[row, :8].tanh() * self.weight[row + 1, 3:11]
        return x


def test_places_that_are_new_in_each_pass_do_not_pile_up(sim, monkeypatch):
    monkeypatch.setattr(handles, "_HANDLES_KEPT", 4)
    monkeypatch.setattr(graph, "_PLACES_KEPT", 6)
    model = torch.nn.Sequential(*(Cuts() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=2 * 64 * 64 * 4)
    runtime = runtime_of(model)
    for number in range(5):
        gradients = []
        for each in (plain, model):
            each.zero_grad()
            each(torch.ones(2, 8, device="hpu")).sum().backward()
            gradients.append([p.grad.cpu() for p in each.parameters()])
        assert all_equal(*gradients), number
        saved = runtime._uses.saved
        assert max(len(saved._places), len(saved._seen)) <= 6
        assert all(len(b.handles) <= 4 for b in runtime._parts.scheduler.blocks)
    runtime.shutdown()


class Both(torch.nn.Module):
    """Reads its weight, and the transpose of it, which begins at the same byte."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 32), requires_grad=False)

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.t()


class AsNumbers(torch.nn.Module):
    """Reads its weight, and the same bytes as integers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 32), requires_grad=False)

    def forward(self, x):
        scale = self.weight.view(torch.int32)
        return ((x * self.weight[:4]) * scale[:4]) * 1e-9


def test_views_of_one_place_with_other_element_types_are_told_apart(sim):
    model = torch.nn.Sequential(*(AsNumbers() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=2 * 32 * 32 * 4)
    for _ in range(3):
        gradients = []
        for each in (plain, model):
            x = batch().to("hpu").requires_grad_()
            each(x).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
    runtime_of(model).shutdown()


def test_views_of_a_weight_are_known_again_until_it_changes(sim, monkeypatch):
    made = []
    monkeypatch.setattr(
        graph, "handle_at", lambda *a, note=graph.handle_at: made.append(a) or note(*a)
    )
    model = torch.nn.Sequential(*(Both() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=2 * 32 * 32 * 4)
    for new in (8, 0, 2, 0):
        made.clear()
        gradients = []
        for each in (plain, model):
            if new == 2:
                with torch.no_grad():
                    each[1].weight.add_(1)
            x = batch().to("hpu").requires_grad_()
            each(x).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)
        assert len(made) == new
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


class Keep(torch.autograd.Function):
    """A product that keeps, in backward, the weight that it saved."""

    kept = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        (Keep.kept,) = ctx.saved_tensors
        return grad @ Keep.kept.t(), None


def test_view_that_somebody_keeps_from_backward_keeps_its_memory(sim, monkeypatch):
    """Each is one of its own, though all are made from one that is kept."""
    model = stack().requires_grad_(False)
    last = model[5][0]

    def forward(x):
        return Keep.apply(Keep.apply(x, last.weight), last.weight)

    monkeypatch.setattr(last, "forward", forward)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    expected = last.weight.clone()
    for number in range(3):
        model(batch().to("hpu").requires_grad_()).sum().backward()
        with torch.no_grad():
            model(batch())
        assert torch.equal(Keep.kept.cpu(), expected)
        assert runtime_of(model).report().abandoned_slots == number + 1
    Keep.kept = None
    runtime_of(model).shutdown()


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_view_of_a_trained_weight_that_somebody_keeps_keeps_its_values(sim, slots):
    """When backward has ended its slot is empty: an optimizer may step the weight."""
    model = stack()
    kept = []

    def keep(module, *_):
        view = module.weight.detach()
        kept.append((view, view.clone()))

    for block in model:
        block[0].register_forward_hook(keep)
    stagehand.layer(model, vram_budget=slots * LAYER_BYTES)
    for _ in range(4):
        model(batch().to("hpu")).sum().backward()
    for view, values in kept:
        assert torch.equal(view, values)
    kept.clear()
    runtime_of(model).shutdown()


def test_memory_that_was_a_weights_is_saved_as_what_it_is_then(sim, monkeypatch):
    """It lies where the weight did, and is like it; the weight is in the slot again."""
    model = stack().requires_grad_(False)
    plain = deepcopy(model).to("hpu")
    last = model[5][0]
    monkeypatch.setattr(last, "forward", lambda x: Keep.apply(x, last.weight.t()))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    model(batch().to("hpu").requires_grad_()).sum().backward()
    with torch.no_grad():
        model(batch())
    Keep.kept.mul_(2)
    assert Keep.kept.data_ptr() in runtime_of(model)._uses.saved._seen
    gradients = []
    for each in (plain, model):
        layer = each[5][0]
        monkeypatch.setattr(
            layer, "forward", lambda x, layer=layer: x @ layer.weight @ Keep.kept
        )
        x = batch().to("hpu").requires_grad_()
        each(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    Keep.kept = None
    runtime_of(model).shutdown()


class Turned(torch.nn.Module):
    """Reads the imaginary parts of its weight, and their negatives, alike in form."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(512, 2), requires_grad=False)

    def forward(self, x):
        turned = torch.view_as_complex(self.weight)
        return x * turned.imag * turned.conj().imag * turned.imag


class Column(Turned):
    """The same, as columns: the one step of a row is odd."""

    def forward(self, x):
        turned = torch.view_as_complex(self.weight)
        parts = turned.imag, turned.conj().imag, turned.imag
        for part in parts:
            x = (x.unsqueeze(1) * part.unsqueeze(1)).squeeze(1)
        return x


class Conjugate(Turned):
    """Reads its weight as complex numbers, and their conjugates, alike in form."""

    def forward(self, x):
        turned = torch.view_as_complex(self.weight)
        return (x * turned).real * (x * turned.conj()).imag * (x * turned).imag


@pytest.mark.parametrize("kind", [Turned, Column, Conjugate])
def test_views_that_differ_in_their_sign_only_are_told_apart(sim, kind):
    model = torch.nn.Sequential(kind(), kind(), kind())
    x = torch.ones(512, requires_grad=True)
    model(x).sum().backward()
    stagehand.layer(model, vram_budget=512 * 8)
    for _ in range(3):
        y = torch.ones(512, device="hpu", requires_grad=True)
        model(y).sum().backward()
        assert torch.equal(y.grad.cpu(), x.grad)
    assert runtime_of(model).report().abandoned_slots == 0
    runtime_of(model).shutdown()


def test_graph_can_be_looked_at_outside_of_backward(sim):
    model = stack()
    weight = model[0][0].weight.detach().clone()
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    output = model[0](batch().to("hpu").requires_grad_())
    for _ in range(2):
        model[1](batch().to("hpu"))
    linear = output.grad_fn.next_functions[0][0]
    assert torch.equal(linear._saved_mat2.cpu(), weight.t())
    output.sum().backward()
    del output, linear
    runtime_of(model).shutdown()


@pytest.mark.parametrize("change", ["clamped", "strides"])
def test_casts_that_are_not_autocasts_are_kept_as_they_are(sim, change):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8, 4, 4))

        def forward(self, x):
            if change == "clamped":
                weight = self.weight.to(torch.bfloat16)
                with torch.no_grad():
                    weight.clamp_(-0.1, 0.1)
            else:
                weight = self.weight.to(
                    torch.bfloat16, memory_format=torch.channels_last
                )
            return (x.bfloat16() * weight).float().square().sum()

    model = torch.nn.Sequential(Odd(), stack(1))
    plain = deepcopy(model[0]).to("hpu")
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES + 8 * 8 * 16 * 4)
    found = []
    for each in (plain, model[0]):
        x = torch.linspace(-1, 1, 8 * 8 * 16).reshape(8, 8, 4, 4).to("hpu")
        x.requires_grad_()
        each(x).backward()
        found.append((x.grad.cpu(), each.weight.grad.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    runtime_of(model).shutdown()
