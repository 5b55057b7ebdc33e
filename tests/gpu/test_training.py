"""Training through the stream is the resident training, in bounded memory."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from architectures import assert_bitwise_equal
from gpu.models import batch, block_bytes, passes, resident, stack, streamed

RANK = 4
RATE = 1e-2


class Adapter(nn.Module):
    """A frozen linear layer beside a trained product of low rank."""

    def __init__(self, base):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        down = torch.randn(RANK, base.in_features, generator=generator)
        self.base = base
        self.down = nn.Parameter(down.to(base.weight.dtype) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK).to(self.down.dtype))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Checkpointed(nn.Module):
    """A stack that computes each block again in backward."""

    def __init__(self, model):
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def build(place, kind, dtype=torch.float32):
    """A stack that is trained whole, or by adapters, or with checkpoints."""
    model = stack(place, dtype)
    if kind == "adapters":
        model.requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)
    return model if kind == "whole" else Checkpointed(model)


def loss_of(model, x):
    return (model(x).float() - x.float().roll(1, 0)).square().mean()


def host_step(model):
    """A plain step, computed on the host whatever place parameters are in."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                new = parameter.cpu() - RATE * parameter.grad.cpu()
                parameter.copy_(new)
                parameter.grad = None


def losses(model, x, steps, *, parts=1):
    """Train, with as many batches a step as `parts`; losses are on the host."""
    found = []
    for _ in range(steps):
        for number in range(parts):
            loss = loss_of(model, x.roll(number, 1)) / parts
            loss.backward()
            found.append(loss.detach())
        host_step(model)
    return torch.stack(found).cpu()


KINDS = ["whole", "checkpoints", "adapters"]


def two_blocks(model):
    """The bytes of two blocks, and of all that may be too small to stream."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    others = [p for p in model.parameters() if id(p) not in linear]
    small = sum(-(-p.numel() * p.element_size() // 256) * 256 for p in others)
    return 2 * block_bytes(model) + small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_resident_model(place, kind, mode, dtype):
    model, x = build(place, kind, dtype), batch(place, dtype)
    whole = resident(model, place)
    expected_loss = loss_of(whole, x)
    expected_loss.backward()
    runtime = streamed(model, mode, two_blocks(model), place)
    for _ in range(3):
        loss = loss_of(model, x)
        loss.backward()
        assert_bitwise_equal(loss.detach(), expected_loss.detach(), "loss")
        for (name, mine), theirs in zip(
            model.named_parameters(), whole.parameters(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert_bitwise_equal(mine.grad.cpu(), theirs.grad.cpu(), name)
        model.zero_grad()
    assert runtime.report().abandoned_slots == 0
    runtime.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_training_converges_as_the_resident_model_does(place, kind):
    model, x = build(place, kind), batch(place)
    expected = losses(resident(model, place), x, 20)
    runtime = streamed(model, "blocks", two_blocks(model), place)
    found = losses(model, x, 20)
    assert_bitwise_equal(found, expected, "losses")
    assert found[-1] < found[0]
    runtime.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_accumulate_under_a_budget_of_two_blocks(place, kind):
    model, x = build(place, kind), batch(place)
    whole = resident(model, place)
    expected = losses(whole, x, 3, parts=4)
    budget = two_blocks(model)
    runtime = streamed(model, "blocks", budget, place)
    assert_bitwise_equal(losses(model, x, 3, parts=4), expected, "losses")
    report = runtime.report()
    assert report.peak_device_bytes <= budget
    assert report.abandoned_slots == 0
    runtime.shutdown()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert_bitwise_equal(mine.detach(), theirs.detach().cpu(), "parameter")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("whole", "layers"), ("checkpoints", "blocks"), ("adapters", "layers")],
)
def test_fifty_steps_grow_neither_device_nor_pinned_memory(place, kind, mode):
    model, x = build(place, kind), batch(place)
    runtime = streamed(model, mode, two_blocks(model), place)

    def held():
        place.synchronize()
        pinned = place.pinned_bytes(), runtime.report().pinned_bytes
        return place.allocated_bytes(), *pinned

    losses(model, x, 10)
    before, reserved = held(), place.reserved_bytes()
    losses(model, x, 50)
    assert held() == before
    # When memory that a copy still reads is given back depends on the moment.
    assert place.reserved_bytes() - reserved <= block_bytes(model)
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_weights_may_be_written_before_the_device_has_done_a_validation(place, mode):
    """The rehearsal computes when it launches: there it is the lane's clock that is
    asked, in `tests/scenario/test_module_edits.py`."""
    model, x = stack(place), batch(place)
    expected = passes(resident(model, place), x)()
    runtime = streamed(model, mode, 3 * block_bytes(model), place)
    loss_of(model, x).backward()
    with place.late():
        output = passes(model, x)()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    assert_bitwise_equal(output, expected, "before")
    runtime.shutdown()


def peak_of_a_step(place, model, x):
    """What a step of the resident model takes, weights and gradients included."""
    held = place.allocated_bytes()
    whole = resident(model, place)
    return place.peak_bytes(lambda: losses(whole, x, 1)) - held


def test_peak_of_a_step_is_far_below_that_of_the_resident_step(place):
    model, x = build(place, "checkpoints"), batch(place)
    whole = peak_of_a_step(place, model, x)
    held, budget = place.allocated_bytes(), two_blocks(model)
    runtime = streamed(model, "blocks", budget, place)
    peak = place.peak_bytes(lambda: losses(model, x, 4)) - held
    assert runtime.report().peak_device_bytes <= budget
    # Two blocks of weights and four of gradients instead of all: one that is made, two
    # on their way, and what fills a group runs over.
    spared = len(model.blocks) - 2 + len(model.blocks) - 4
    nbytes = sum(p.nbytes for p in model.blocks[0].parameters())
    assert peak <= whole - spared * nbytes
    runtime.shutdown()
