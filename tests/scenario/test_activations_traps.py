"""Known traps of saved tensors, one test each: gradients are those without a budget.

A test that ends with `assert_spilled` saw tensors leave and come back.
"""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial

import pytest
import torch
from keeping import (
    BUDGET,
    ROWS,
    WIDTH,
    assert_same,
    emptied,
    flush,
    gradients,
    inputs,
    plain,
    spill_of,
    stack,
)
from small import runtime_of
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import stagehand
from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.pieces import Piece, Scope
from stagehand.activations.runtime import ActivationRuntime
from stagehand.core.saved import Kept
from training import RESPECTED


@pytest.fixture
def saved(sim):
    """A context with a budget; at the end nothing of it is left."""
    with emptied(stagehand.activations(BUDGET)) as context:
        yield context


@pytest.fixture
def tiny(sim):
    """A context in which next to nothing may stay."""
    with emptied(stagehand.activations(40_000)) as context:
        yield context


def assert_spilled(saved):
    tally = spill_of(saved).tally
    assert tally.spilled_count > 0
    assert tally.restored_count > 0


def check_without_a_model(saved, loss_of):
    """Compare the inputs' gradients of two steps with those without a budget."""
    x, other = inputs(), inputs()
    loss_of(other).backward()
    for _ in range(2):
        x.grad = None
        with saved:
            loss = loss_of(x)
        loss.backward()
        assert torch.equal(x.grad, other.grad)
    assert_spilled(saved)


def check(saved, loss_of, *, spills=True, steps=3):
    """Compare gradients of some steps with those without a budget."""
    model = stack().to("hpu")
    expected = gradients(model, loss_of)
    for _ in range(steps):
        assert_same(gradients(model, loss_of, saved), expected)
    if spills:
        assert_spilled(saved)


def pack_here(saved, tensor):
    """Save a tensor as if the host was the device: the simulated one has not all."""
    spill = spill_of(saved)
    place, spill._place = spill._place, -1
    try:
        return spill.packer(spill.begin(), Kept)(tensor)
    finally:
        spill._place = place


def piece_of(tensor, nbytes):
    """Return what would stand for a tensor."""
    piece = Piece()
    piece.begin(tensor, nbytes, Scope(None), 0)
    return piece


# 1 to 4: weights


def test_views_of_weights_are_kept_and_never_copied(tiny):
    """A linear layer saves `weight.t()`, which is no parameter."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model.requires_grad_(False).to("hpu")
    x = torch.ones(1, 256, device="hpu", requires_grad=True)
    with tiny:
        loss = model(x).sum()
    loss.backward()
    assert spill_of(tiny).tally.spilled_bytes == 0


def test_casts_of_weights_under_autocast_are_tensors_as_others(saved):
    def cast(model, x):
        with torch.autocast("hpu", torch.bfloat16):
            return model(x).float().square().sum()

    check(saved, cast)


def test_streamed_weights_that_are_replaced_give_exact_gradients(saved):
    model = stack()
    expected = gradients(stack().to("hpu"), plain)
    stagehand.layer(model, vram_budget=150_000)
    for _ in range(3):
        assert_same(gradients(model, plain, saved), expected)
    assert_spilled(saved)
    runtime_of(model).shutdown()


def test_evicted_weights_are_freed_though_a_graph_saved_them(saved, sim):
    model = stack()
    stagehand.layer(model, vram_budget=150_000)
    runtime = runtime_of(model)
    for _ in range(2):
        gradients(model, plain, saved)
    with saved:
        loss = plain(model, inputs())
    report = runtime.report()
    assert report.abandoned_slots == 0
    assert report.peak_device_bytes <= 150_000
    del loss
    runtime.shutdown()


# 5, 6, 30: several forwards


def two(saved, first, second):
    model = stack().to("hpu")
    expected = gradients(model, plain)[-1]
    batches = inputs(), inputs()
    losses = []
    for batch in batches:
        with saved:
            losses.append(plain(model, batch))
    losses[first].backward()
    losses[second].backward()
    for batch in batches:
        assert torch.equal(batch.grad.cpu(), expected)
    assert_spilled(saved)


def test_first_of_two_forwards_goes_backward_first(saved):
    two(saved, 0, 1)


def test_second_of_two_forwards_goes_backward_first(saved):
    two(saved, 1, 0)


def test_forwards_of_which_one_never_goes_backward(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    with saved:
        left = plain(model, inputs())
    for _ in range(2):
        assert_same(gradients(model, plain, saved), expected)
    del left


def test_batches_that_accumulate(saved):
    def thrice(model, x):
        return sum(plain(model, x * factor) for factor in (1.0, 0.5, 2.0))

    check(saved, thrice)


# 7, 8: changes in place


def test_tensor_changed_after_it_was_saved_raises(saved):
    x = inputs()
    with saved:
        y = x * 2
        loss = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss, y


def test_tensor_that_is_saved_once_and_changed_raises(saved):
    x = inputs()
    with saved:
        y = x * 2
        loss = y.sin().sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss, y


def test_tensor_that_is_changed_and_dropped_does_not_leave(tiny):
    """On the host nobody could tell any more that it was changed."""
    x = inputs()
    with tiny:
        y = x * 2
        z = y.sin()
        y.detach().add_(1)
        del y
        for _ in range(4):
            z = z.sigmoid()
        loss = z.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert spill_of(tiny).tally.spilled_count > 0
    del loss, z


def test_tensor_changed_while_it_leaves_raises(saved):
    """Somebody keeps it, so it stays on the device, and its change is noticed."""
    model = stack().to("hpu")
    kept = []

    def keeping(model, x):
        for layer in model:
            kept.append(x)
            x = layer(x)
        return x.square().sum()

    for _ in range(3):
        kept.clear()
        x = inputs()
        with saved:
            loss = keeping(model, x)
        kept[2].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, x
    kept.clear()


def test_discriminator_that_steps_between_forward_and_backward_raises(saved):
    generator, critic = stack(3).to("hpu"), stack(3).to("hpu")
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    with saved:
        fake = generator(inputs())
        score = critic(fake).sum()
        own = critic(fake.detach()).square().sum()
    own.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        score.backward()
    del score, own, fake


def test_generator_step_in_the_right_order_is_exact(saved):
    def both(context):
        generator, critic = stack(3).to("hpu"), stack(3).to("hpu")
        optimizer = torch.optim.SGD(critic.parameters(), lr=1e-9)
        for _ in range(3):
            with context():
                own = critic(generator(inputs()).detach()).square().sum()
            own.backward()
            optimizer.step()
            generator.zero_grad()
            with context():
                score = critic(generator(inputs())).sum()
            score.backward()
        return [p.grad.cpu() for p in generator.parameters()]

    @contextmanager
    def nothing():
        yield

    assert_same(both(lambda: saved), both(nothing))
    assert_spilled(saved)


# 9, 39, 40: streams


def test_tensor_that_another_stream_made_is_copied_when_it_is_there(saved, sim):
    """And is changed by nobody before: the fixture looks for races."""
    side = torch.Stream("hpu")

    def aside(model, x):
        for number, layer in enumerate(model):
            if number % 2:
                current = torch.accelerator.current_stream()
                side.wait_stream(current)
                x.record_stream(side)
                with side:
                    x = layer(x)
                current.wait_stream(side)
                x.record_stream(current)
            else:
                x = layer(x)
        return x.square().sum()

    model = stack().to("hpu")
    kept = []
    for context in (None, saved, saved, saved):
        model.zero_grad()
        x = inputs()
        side.wait_stream(torch.accelerator.current_stream())
        with saved if context else saved.paused():
            loss = aside(model, x)
        loss.backward()
        torch.accelerator.synchronize()
        kept.append(x.grad.cpu())
        del loss
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    assert_spilled(saved)


def test_context_entered_on_another_stream(saved, sim):
    side = torch.Stream("hpu")
    model = stack().to("hpu")
    expected = gradients(model, plain)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(3):
            assert_same(gradients(model, plain, saved), expected)
    torch.accelerator.current_stream().wait_stream(side)
    assert_spilled(saved)


def test_room_made_on_one_stream_leaves_what_another_has_saved_whole(saved, sim):
    """Who makes room waits for the copy; the memory goes back to who made it."""
    model = stack().to("hpu").requires_grad_(False)
    expected = gradients(model, plain)[-1]
    side = torch.Stream("hpu")
    for _ in range(3):
        x = inputs()
        with side:
            y = inputs()
        torch.accelerator.synchronize()
        with saved:
            first = plain(model, x)
        with side, saved:
            second = plain(model, y)
        for _ in range(20):  # may lie where the first forward's tensors were
            torch.full((ROWS, WIDTH), 7.0, device="hpu")
        with side:
            second.backward()
        torch.accelerator.synchronize()
        first.backward()
        torch.accelerator.synchronize()
        assert torch.equal(x.grad.cpu(), expected)
        assert torch.equal(y.grad.cpu(), expected)
        del first, second
    assert_spilled(saved)


def test_host_memory_is_not_reused_before_its_copy_is_done(saved, sim):
    """The simulated device compares what is copied with what was when it was queued."""
    sim.configure(h2d_gbps=0.01, d2h_gbps=0.01)
    check(saved, plain, steps=5)


def test_host_memory_that_came_back_for_nobody_is_written_behind_its_copy(saved):
    """The host is ahead: what a forward saves next lies where the last one's did."""
    model = stack().to("hpu").requires_grad_(False)
    for _ in range(3):
        gradients(model, plain, saved)
    for _ in range(3):
        with saved:
            middle = model[:3](inputs())
            loss = plain(model[3:], middle)
        torch.autograd.grad(loss, middle)
        del middle, loss
        flush()
    assert_spilled(saved)


def test_host_memory_of_what_gave_way_is_written_behind_its_copy_back(saved, sim):
    """Another stream's forward made room; then the graph went, and it saved more."""
    model, another, side = stack().to("hpu"), stack().to("hpu"), torch.Stream("hpu")
    another.requires_grad_(False)
    for _ in range(2):
        gradients(model, plain, saved)
    with saved:
        middle = model[:3](inputs())
        loss = plain(model[3:], middle)
    with side:
        x = inputs()
    sim.configure(h2d_gbps=0.001)
    torch.autograd.grad(loss, middle, retain_graph=True)
    with side, saved:
        x = another[:1](x)
        assert spill_of(saved).tally.cancelled_count > 0
        del middle, loss
        flush()
        loss = plain(another, another(x))
    torch.accelerator.synchronize()
    del x, loss


def test_tensor_that_operators_on_two_streams_have_saved_is_there_for_both(tiny):
    side, main = torch.Stream("hpu"), torch.accelerator.current_stream()
    x, one = inputs(), inputs()
    with tiny:
        h = x * 2
        a = h.sin()
        side.wait_stream(main)
        with side:
            b = h.cos()
        h.record_stream(side)
        del h
        main.wait_stream(side)
        z = (x * 3).sigmoid().sum()
    b.record_stream(main)
    ((a + b).sum() + z).backward()
    y = one * 2
    ((y.sin() + y.cos()).sum() + (one * 3).sigmoid().sum()).backward()
    torch.accelerator.synchronize()
    assert torch.equal(x.grad, one.grad)
    assert_spilled(tiny)


def test_what_another_stream_has_kept_without_a_look_is_copied_when_it_is_there(saved):
    """The other forward makes room before anybody waits for that stream."""
    side = torch.Stream("hpu")
    model = stack(1).to("hpu").requires_grad_(False)
    expected = gradients(model, plain)[-1]
    for _ in range(4):
        x, y, others = inputs(), inputs(), [inputs() for _ in range(4)]
        torch.accelerator.synchronize()
        with saved:
            first = plain(model, x)
            with side:
                second = plain(model, y)
        with saved:
            rest = [plain(model, other) for other in others]
        first.backward()
        torch.accelerator.synchronize()
        second.backward()
        torch.accelerator.synchronize()
        assert torch.equal(x.grad.cpu(), expected)
        assert torch.equal(y.grad.cpu(), expected)
        del first, second, rest


def test_what_came_back_for_nobody_is_freed_behind_its_copy_after_the_end(sim):
    """Half of a backward after the shutdown brings more than it uses."""
    runtime = ActivationRuntime(ActivationStagehandConfig(budget=BUDGET))
    model = stack().to("hpu").requires_grad_(False)
    for _ in range(3):
        gradients(model, plain, runtime.managed_forward())
    with runtime.managed_forward():
        middle = model[:3](inputs())
        loss = plain(model[3:], middle)
    runtime.shutdown()
    sim.configure(h2d_gbps=0.001)
    torch.autograd.grad(loss, middle)
    coming = [ref() for ref in spill_of(runtime)._ahead]
    assert any(bundle is not None and bundle.seen is None for bundle in coming)
    del middle, loss, coming
    flush()


@pytest.mark.parametrize("noted", [False, True])
def test_a_context_that_is_dropped_leaves_nothing_that_was_on_its_way(sim, noted):
    """Its last graph had gone before it, with copies that were not over."""
    saved = stagehand.activations(BUDGET)
    model = stack().to("hpu").requires_grad_(False)
    for _ in range(3):
        gradients(model, plain, saved)
    x = inputs()
    sim.configure(d2h_gbps=0.001)
    with saved:
        loss = plain(model, x)
    del loss
    flush()
    if noted:
        with saved:
            assert spill_of(saved)._carrier._dying
    assert spill_of(saved)._carrier.gone or noted
    account = saved._parts.arena.account
    del saved
    flush()
    assert account.held_bytes == 0


def test_a_forward_that_failed_is_observed_no_more(saved):
    model = stack().to("hpu")

    def failing(model, x):
        return plain(model, x) / (0 // 0)

    with pytest.raises(ZeroDivisionError):
        gradients(model, failing, saved)
    flush()
    with saved:
        pass
    assert not spill_of(saved).lessons._open
    assert_same(gradients(model, plain, saved), gradients(model, plain))


# 10 to 16: storages


def test_saved_outputs_are_freed_with_their_graph(saved, sim):
    x = inputs()
    before = sim.allocated_bytes()
    with saved:
        y = x
        for _ in range(4):
            y = y.exp().sigmoid()
    del y
    gc.collect()
    saved.close()
    assert sim.allocated_bytes() == before


def test_storage_that_several_operators_save_is_copied_once(tiny):
    x = inputs()
    with tiny:
        y = x * 2
        loss = (y.sin() + y.cos() + y * y + y.exp()).sum()
        size = y.untyped_storage().nbytes()
        del y
        z = (x * 3).sigmoid().sum()
    sent = spill_of(tiny).tally.spilled_bytes
    assert size <= sent <= 4 * size
    (loss + z).backward()
    one = inputs()
    y = one * 2
    (y.sin() + y.cos() + y * y + y.exp()).sum().backward()
    (one * 3).sigmoid().sum().backward()
    assert torch.equal(x.grad, one.grad)


def test_addresses_that_are_used_again_are_not_mistaken(saved):
    def reusing(model, x):
        total = 0
        for _ in range(20):
            y = model[0](x).sigmoid()
            total = total + y.sum()
            del y
        return total

    check(saved, reusing)


def test_what_others_keep_is_not_copied(saved):
    """Its memory would not be freed."""
    model = stack(12).to("hpu")
    table = torch.ones(ROWS, WIDTH, device="hpu")

    def keeping(model, x):
        for layer in model:
            x = layer(x) * table
        return x.square().sum()

    expected = gradients(model, keeping)
    for _ in range(3):
        assert_same(gradients(model, keeping, saved), expected)
    tally = spill_of(saved).tally
    assert tally.freed_bytes >= 0.95 * tally.spilled_bytes > 0


def test_expanded_tensors_are_copied_by_their_storage(saved):
    def expanded(model, x):
        y = model(x)
        return (y[:1].expand(64, ROWS, WIDTH)[:, 0] * y[:64]).sum()

    check(saved, expanded)


def test_views_with_offsets_come_back_as_they_were(saved):
    def shifted(model, x):
        y = model(x).reshape(-1)[WIDTH:].as_strided((ROWS - 2, WIDTH), (WIDTH, 1), 32)
        return (y * y.sigmoid()).sum()

    check(saved, shifted)


def test_slices_of_one_storage_leave_together(saved):
    def chunked(model, x):
        total = 0
        for layer in model:
            x = layer(x)
            q, k = x.chunk(2, dim=1)
            total = total + (q * k).sum() + (q.t() @ k).sum()
        return total

    check(saved, chunked)


def test_a_square_tensor_and_its_transpose_come_back_as_they_were(tiny):
    def squared(model, x):
        y = x.t() @ model(x) / ROWS
        for _ in range(8):
            y = (y.sin() @ y.t() / WIDTH).triu().cos()
        return y.sum()

    check(tiny, squared)


def test_parts_that_are_filled_after_another_has_left_come_back_as_they_were(saved):
    """As cells of recurrent layers do; the parts have a version each."""

    def filled(model, x):
        for _ in range(8):
            first, second = torch.unsafe_chunk(x.repeat(1, 2), 2, dim=1)
            first = first.sigmoid_()
            torch.accelerator.synchronize()  # what is saved so far has left
            x = first * second.sigmoid_()
        return model(x).square().sum()

    check(saved, filled)


# 17 to 20: forms


def test_permuted_tensors_keep_their_strides(saved):
    def permuted(model, x):
        y = model(x).reshape(2, 64, 8, 8).to(memory_format=torch.channels_last)
        other = y.permute(0, 2, 3, 1)[..., :1].permute(0, 3, 1, 2)
        return (torch.tanh(y) * other).sum()

    check(saved, permuted)


def test_strides_of_dimensions_of_one_are_those_that_were_saved(tiny):
    """Slabs keep tensors of forms that were there before."""
    saved_by, x = [], inputs()

    def squared(y, stride):
        one = (y * 0.5).as_strided((ROWS, 1, WIDTH), (WIDTH, stride, 1))
        saved_by.append((weakref.ref(one), one.square()))
        return saved_by[-1][1].reshape(ROWS, WIDTH)

    for _ in range(3):
        saved_by.clear()
        with tiny:
            y = x
            for stride in range(1, 9):
                y = squared(y, stride)
        torch.accelerator.synchronize()
        found = [square.grad_fn._saved_self.stride() for _, square in saved_by]
        assert found == [(WIDTH, stride, 1) for stride in range(1, 9)]
        y.sum().backward()
    assert_spilled(tiny)
    assert all(one() is None for one, _ in saved_by)
    saved_by.clear()


def test_what_comes_back_has_the_strides_of_what_left(tiny):
    """Autograd accepts others, and kernels are chosen by them."""
    x = inputs()
    with tiny:
        y = x.reshape(2, 64, 8, 8).to(memory_format=torch.channels_last).tanh()
        node, stride = y.grad_fn, y.stride()
        for _ in range(5):
            y = y.sigmoid()
    found = node._saved_result
    assert_spilled(tiny)
    assert found.stride() == stride != found.contiguous().stride()
    y.sum().backward()
    del node, found, y


def test_conjugate_and_negative_views_come_back_as_they_were(saved):
    def complex_valued(model, x):
        z = torch.view_as_complex(model(x).reshape(ROWS, WIDTH // 2, 2).contiguous())
        negative = z.conj().imag
        return (z.conj() * z * z.conj()).abs().sum() + (negative * negative).sum()

    check(saved, complex_valued)


def test_negative_views_come_back_negative(tiny):
    """Their bytes are those of what they negate."""

    def negated(x):
        y = torch.view_as_complex(x.reshape(ROWS, WIDTH // 2, 2) * 1.5)
        negative = y.conj().imag
        assert negative.is_neg()
        z = negative.square()
        del negative, y
        for _ in range(4):
            z = z.sigmoid()
        return z.sum()

    check_without_a_model(tiny, negated)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_other_floating_point_types_come_back(saved, dtype):
    def cast(model, x):
        y = model(x).to(dtype)
        for _ in range(8):
            y = (y * 0.5).sigmoid()
        return y.float().sum()

    check(saved, cast)


class _SavedAs(torch.autograd.Function):
    """Saves its bytes as numbers of another type."""

    @staticmethod
    def forward(ctx, x, dtype):
        y = x.sigmoid()
        ctx.save_for_backward(y.view(torch.uint8).view(dtype))
        return y

    @staticmethod
    def backward(ctx, grad):
        [kept] = ctx.saved_tensors
        return grad * kept.view(torch.uint8).view(torch.float32), None


@pytest.mark.parametrize(
    "dtype",
    [torch.uint64, torch.float8_e4m3fn, torch.int8, torch.complex64],
    ids=str,
)
def test_types_that_few_kernels_know_come_back(tiny, dtype):
    def loss_of(x):
        for _ in range(6):
            x = _SavedAs.apply(x, dtype)
        return x.sum()

    check_without_a_model(tiny, loss_of)


def test_scalars_and_empty_tensors_are_kept(tiny):
    x = inputs()
    with tiny:
        scalar = x.sum().exp()
        loss = (x[:0].exp().sum() + (x * scalar).sigmoid()).sum()
    loss.backward()
    other = inputs()
    (other[:0].exp().sum() + (other * other.sum().exp()).sigmoid()).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_masks_and_indices_come_back(tiny):
    x = inputs()
    index = torch.zeros(ROWS, WIDTH, dtype=torch.int64, device="hpu")
    mask = x.detach() > 0

    def loss_of(x):
        y = x.sigmoid().gather(0, index.clone())
        return torch.where(mask.clone(), y * 2, y.exp()).sum()

    check_without_a_model(tiny, loss_of)


class _Wrapped(torch.Tensor):
    """A subclass that nothing here knows how to rebuild."""


def test_subclasses_are_kept(saved):
    def wrapping(model, x):
        y = model(x).as_subclass(_Wrapped)
        return (y * y.sigmoid()).sum().as_subclass(torch.Tensor)

    check(saved, wrapping)
    assert type(pack_here(saved, torch.ones(40, 40))) is Piece
    assert type(pack_here(saved, torch.ones(40, 40).as_subclass(_Wrapped))) is Kept


def test_sparse_tensors_are_kept(tiny):
    dense = torch.eye(WIDTH)
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    with tiny:
        loss = torch.sparse.mm(dense.to_sparse(), x).square().sum()
    loss.backward()
    other = torch.ones(WIDTH, WIDTH, requires_grad=True)
    (dense @ other).square().sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert type(pack_here(tiny, dense.to_sparse())) is Kept


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_kept(saved):
    rows = [torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)]
    with saved:
        jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        loss = (jagged * jagged).values().sum()
    loss.backward()
    assert torch.equal(rows[0].grad, torch.full((3, 4), 2.0))
    assert type(pack_here(saved, jagged)) is Kept
    strided = torch.nested.nested_tensor([torch.ones(40, 40)] * 2)
    assert not piece_of(strided, 12_800).is_plain()  # so it never leaves
    assert type(pack_here(saved, strided)) is Piece  # also as the first of a forward


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_kept():
    """Bytes and a form do not tell their scale."""
    found = torch.quantize_per_tensor(torch.ones(64, 64), 0.1, 0, torch.quint8)
    assert not piece_of(found, 4096).is_plain()


def test_distributed_tensors_are_kept(tiny, tmp_path):
    """They have no storage of their own that a copy could stand for."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
        one = distribute_tensor(local, mesh, [Shard(0)]).requires_grad_()
        with tiny:
            loss = one.sigmoid().sigmoid().sum().to_local()
        loss.backward()
        found = one.grad.to_local()
    finally:
        torch.distributed.destroy_process_group()
    alone = local.requires_grad_()
    alone.sigmoid().sigmoid().sum().backward()
    assert torch.equal(found, alone.grad)
    assert spill_of(tiny).tally.saved_count == 0


# 21: storages that are taken away


def test_storage_that_its_owner_takes_away_is_not_copied(sim):
    """As sharded training does: it makes a weight's memory empty between its uses."""
    tiny = stagehand.activations(40_000)
    x = inputs()
    with tiny:
        gathered = torch.ones(ROWS, WIDTH, device="hpu")
        y = x * gathered
        known = spill_of(tiny)._live[gathered.untyped_storage()._cdata]()
        known.nbytes += 1  # what a storage that was resized looks like
        del gathered
        z = y.sigmoid().sigmoid().sigmoid().sum()
    assert known.alias is not None
    z.backward()
    assert_spilled(tiny)
    other = inputs()
    loss_of_other = (other * 1.0).sigmoid().sigmoid().sigmoid().sum()
    loss_of_other.backward()
    assert torch.equal(x.grad, other.grad)
    del known, y, z, loss_of_other
    gc.collect()
    tiny.close()


# 22: other hooks


def test_hooks_inside_of_the_context_get_what_they_pack(saved):
    seen = []

    def hooked(model, x):
        x = model[:3](x)
        with saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
            x = model[3:](x)
        return x.square().sum()

    check(saved, hooked)
    assert seen


def test_hooks_outside_of_the_context_get_what_does_not_leave(saved):
    packed = []

    def hooked(model, x):
        with saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t), saved:
            return plain(model, x)

    model = stack().to("hpu")
    expected = gradients(model, plain)
    for _ in range(3):
        assert_same(gradients(model, hooked), expected)
    assert packed
    assert_spilled(saved)


@pytest.mark.parametrize("other", [False, True], ids=["same object", "two objects"])
def test_hooks_outside_of_nested_entries_get_it_too(saved, other):
    def hooked(model, x, depth, packed):
        def pack(tensor):
            packed.append(tuple(tensor.shape))
            return tensor

        with ExitStack() as entered:
            entered.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            for inner in (saved, second if other else saved)[:depth]:
                entered.enter_context(inner)
            return plain(model, x)

    model = stack().to("hpu")
    expected = gradients(model, plain)
    with emptied(stagehand.activations(BUDGET)) as second:
        for _ in range(3):
            once, twice = [], []
            for depth, packed in ((1, once), (2, twice)):
                loss_of = partial(hooked, depth=depth, packed=packed)
                assert_same(gradients(model, loss_of), expected)
            assert once == twice != []
    assert_spilled(saved)


def test_other_offloading_inside_is_left_alone(saved):
    def offloaded(model, x):
        x = model[:4](x)
        with save_on_cpu():
            x = model[4:](x)
        return x.square().sum()

    check(saved, offloaded)


# 23, 24, 37: checkpoints


def checkpointed(model, x):
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x.square().sum()


def test_around_a_checkpoint_only_its_inputs_are_spilled(tiny):
    check(tiny, checkpointed)
    spill = spill_of(tiny)
    assert {save.nbytes for save in spill.lessons.latest.saves} == {ROWS * WIDTH * 4}
    assert spill.tally.saved_count == 3 * 7


def test_inside_of_a_checkpoint_it_refuses_to_defeat_it(saved):
    ran = []

    def inside(model, x):
        def region(layer, x):
            ran.append(1)
            with saved:
                return layer(x)

        for layer in model:
            x = checkpoint(region, layer, x, use_reentrant=False)
        return x.square().sum()

    model = stack().to("hpu")
    expected = gradients(model, plain)
    with pytest.warns(stagehand.StagehandWarning, match="inside of a checkpointed"):
        assert_same(gradients(model, inside), expected)
    assert len(ran) == 12
    assert_same(gradients(model, inside), expected)
    assert spill_of(saved).tally.saved_count == 0


def test_inside_of_a_checkpoint_of_streamed_weights_it_refuses_too(saved):
    model = stack()
    expected = gradients(stack().to("hpu"), plain)
    stagehand.layer(model, vram_budget=200_000)

    def inside(model, x):
        def region(layer, x):
            x = layer[0](x)
            with saved:
                return layer[2](layer[1](x))

        for layer in model:
            x = checkpoint(region, layer, x, use_reentrant=False)
        return x.square().sum()

    with pytest.warns(stagehand.StagehandWarning, match="inside of a checkpointed"):
        assert_same(gradients(model, inside), expected)
    assert spill_of(saved).tally.saved_count == 0
    runtime_of(model).shutdown()


class Regions(nn.Module):
    """Its layers run in checkpoints, each followed by what is entered there."""

    def __init__(self, then):
        super().__init__()
        self.layers = stack()
        self.then = [then]  # no part of the model

    def forward(self, x):
        def region(layer, x):
            return self.then[0](layer(x))

        for layer in self.layers:
            x = checkpoint(region, layer, x, use_reentrant=False)
        return x


class Entering(nn.Module):
    """Saves under a budget between its layers."""

    def __init__(self, saved):
        super().__init__()
        self.layers = stack(2)
        self.saved = [saved]

    def forward(self, x):
        x = self.layers[0](x)
        with self.saved[0]:
            return self.layers[1](x)


@pytest.mark.parametrize("streamed", [False, True])
def test_inside_of_a_checkpoint_of_streamed_models_it_refuses_in_each_pass(
    saved, streamed
):
    """In a first pass their hooks are others, and those of two lie on each other."""
    entering = Entering(saved)
    model = Regions(entering)
    stagehand.layer(model, vram_budget=200_000)
    if streamed:
        stagehand.layer(entering, vram_budget=200_000)
    else:
        entering.to("hpu")
    with pytest.warns(stagehand.StagehandWarning, match="inside of a checkpointed"):
        gradients(model, plain)
    for _ in range(2):
        gradients(model, plain)
    assert spill_of(saved).tally.saved_count == 0
    runtime_of(model).shutdown()
    if streamed:
        runtime_of(entering).shutdown()


def test_nothing_is_saved_in_a_recompute_inside_of_backward(tiny):
    def reentrant(model, x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().sum()

    model = stack().to("hpu")
    expected = gradients(model, plain)
    x = inputs()
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with tiny:
            loss = reentrant(model, x)
            loss.backward()
        found = [p.grad.cpu() for p in model.parameters()] + [x.grad.cpu()]
        assert_same(found, expected)
        del loss
    assert {save.nbytes for save in spill_of(tiny).lessons.latest.saves} == {
        ROWS * WIDTH * 4
    }


@pytest.mark.parametrize("options", [{}, *RESPECTED])
def test_selective_checkpoints_work(saved, options):
    def policy(ctx, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def selective(model, x):
        for layer in model:
            x = checkpoint(
                layer,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
                **options,
            )
        return x.square().sum()

    check(saved, selective, spills=False)


@pytest.mark.parametrize("selective", [False, True], ids=["whole", "selective"])
def test_checkpoints_under_autocast_are_exact(tiny, selective):
    def policy(ctx, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def cast(model, x):
        with torch.autocast("hpu", torch.bfloat16):
            for layer in model:
                options = {"context_fn": contexts} if selective else {}
                x = checkpoint(layer, x, use_reentrant=False, **options)
            return x.float().square().sum()

    check(tiny, cast)


# 25 to 27: graphs that are gone through again


def test_graph_can_be_gone_through_three_times(saved):
    model = stack().to("hpu")
    x = inputs()
    for _ in range(2):
        with saved:
            loss = plain(model, x)
        found = [
            torch.autograd.grad(loss, x, retain_graph=number < 2)[0]
            for number in range(3)
        ]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        del loss
    assert_spilled(saved)


def test_saved_tensors_can_be_looked_at(tiny):
    x = inputs()
    with tiny:
        y = x.exp()
        node = y.grad_fn
        expected = y.detach().clone()
        y = y.sigmoid().sigmoid().sigmoid()
    assert torch.equal(node._saved_result, expected)
    assert torch.equal(node._saved_result, expected)
    y.sum().backward()
    del node, y


def test_backward_can_itself_be_differentiated(saved):
    def twice(model, x):
        [first] = torch.autograd.grad(plain(model, x), x, create_graph=True)
        return first.square().sum()

    check(saved, twice)


def test_backward_outside_of_the_context_can_be_differentiated(saved):
    model = stack().to("hpu")

    def second(context):
        x = inputs()
        with context:
            loss = plain(model, x)
        [first] = torch.autograd.grad(loss, x, create_graph=True)
        [found] = torch.autograd.grad(first.square().sum(), x)
        return found

    expected = second(saved.paused())
    for _ in range(3):
        assert torch.equal(second(saved), expected)
    assert_spilled(saved)


class _Careless(torch.autograd.Function):
    """Its backward changes what forward saved."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        [y] = ctx.saved_tensors
        return y.mul_(2) * grad


def test_copy_that_backward_has_changed_is_not_handed_out_again(tiny):
    x = inputs()
    with tiny:
        y = _Careless.apply(x)
        for _ in range(4):
            y = (y * 0.1).sigmoid()
    [first] = torch.autograd.grad(y.sum(), x, retain_graph=True)
    [second] = torch.autograd.grad(y.sum(), x)
    assert_spilled(tiny)
    assert torch.equal(first, second)
    del y


# 28, 29: ends


def test_forward_that_raises_leaves_nothing(saved):
    model = stack().to("hpu")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
            with saved:
                model(inputs())
                raise ZeroDivisionError
        assert not torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_backward_that_raises_leaves_nothing(saved):
    def failing(model, x):
        middle = model[:3](x)
        middle.register_hook(lambda grad: 1 / 0)
        return plain(model[3:], middle)

    model = stack().to("hpu")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            gradients(model, failing, saved)


def test_branch_that_is_not_used_leaves_nothing(saved):
    def branched(model, x):
        y = model(x)
        model(y)
        return y.square().sum()

    check(saved, branched)


def test_backward_of_the_last_weight_alone_leaves_nothing(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)
    for _ in range(3):
        with saved:
            loss = plain(model, inputs())
        [found] = torch.autograd.grad(loss, [model[-1][2].weight])
        assert torch.equal(found.cpu(), expected[-3])
        del loss


# 31, 32: compiled regions and transforms


def test_compiled_regions_take_all_of_theirs_at_once(saved):
    torch.compiler.reset()  # what others compiled counts against a limit
    model = stack().to("hpu")
    expected = gradients(model, plain)
    layers = [torch.compile(layer, backend="aot_eager") for layer in model]

    def compiled(model, x):
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    for _ in range(3):
        found = gradients(model, compiled, saved)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert_spilled(saved)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_regions_of_streamed_weights_are_those_of_resident_ones(
    saved, sim, backend
):
    def compiled(layers, model, x):
        for layer in layers:
            x = layer(x)
        return x.square().sum()

    def layers_of(model):
        return [torch.compile(layer, backend=backend) for layer in model]

    torch.compiler.reset()
    model = stack()
    resident = deepcopy(model).to("hpu")
    expected = gradients(resident, partial(compiled, layers_of(resident)))
    stagehand.layer(model, vram_budget=150_000)
    layers = layers_of(model)
    for _ in range(3):
        assert_same(gradients(model, partial(compiled, layers), saved), expected)
    assert_spilled(saved)
    runtime = runtime_of(model)
    assert runtime.report().peak_device_bytes <= 150_000
    runtime.shutdown()


def test_transforms_that_allow_no_hooks_run_while_paused(saved):
    def squared(x):
        return (x * x).sum()

    x = torch.ones(4)
    with saved:
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(squared)(x)
        with saved.paused():
            assert torch.equal(torch.func.grad(squared)(x), 2 * x)
        assert torch.equal(torch.vmap(torch.sin)(x), x.sin())
        y = (inputs() * 2).sigmoid()
    y.sum().backward()
    assert spill_of(saved).tally.saved_count > 0


def test_pausing_pauses_all_entries(saved):
    with saved, saved, saved.paused():
        slope = torch.func.grad(lambda x: x.square().sum())
        assert torch.equal(
            slope(torch.ones(3, device="hpu")).cpu(), torch.full((3,), 2.0)
        )


# 33: threads


def run_in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


def test_backward_in_another_thread_is_exact(saved):
    model = stack().to("hpu")
    expected = gradients(model, plain)[-1]
    for _ in range(3):
        x = inputs()
        with saved:
            loss = plain(model, x)
        run_in_thread(loss.backward)
        assert torch.equal(x.grad.cpu(), expected)
        del loss


def test_threads_that_run_forwards_at_once_are_exact(saved):
    """Each has hooks and forwards of its own."""
    expected = gradients(stack().to("hpu"), plain)
    models = [stack().to("hpu") for _ in range(3)]
    found = {}

    def work(number):
        for _ in range(3):
            found[number] = gradients(models[number], plain, saved)

    threads = [threading.Thread(target=work, args=[n]) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(found) == [0, 1, 2]
    for each in found.values():
        assert_same(each, expected)
    assert_spilled(saved)


def test_thread_that_did_not_enter_is_left_alone(saved):
    x = inputs()
    with saved:
        run_in_thread(lambda: plain(stack().to("hpu"), x).backward())
    assert spill_of(saved).tally.saved_count == 0


# 34 to 38: the rest


def test_pack_never_raises_when_there_is_no_host_memory(sim):
    """Pageable memory is slower, and that is said."""
    with emptied(stagehand.activations(BUDGET, ram_budget=100_000)) as saved:
        model = stack().to("hpu")
        expected = gradients(model, plain)
        with pytest.warns(stagehand.StagehandWarning, match="pageable memory"):
            assert_same(gradients(model, plain, saved), expected)
        for _ in range(2):
            assert_same(gradients(model, plain, saved), expected)
        assert saved._parts.pool.pageable > 0
        assert saved._parts.arena.account.peak_bytes <= 100_000


class _Attribute(torch.autograd.Function):
    """Keeps a tensor where no hook sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.detach().sigmoid()
        ctx.save_for_backward(None)
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept


def test_tensors_that_functions_keep_themselves_are_theirs(saved):
    def keeping(model, x):
        for layer in model:
            x = _Attribute.apply(layer(x))
        return x.square().sum()

    check(saved, keeping)


def test_nothing_is_saved_without_gradients(saved):
    model = stack().to("hpu")
    with saved, torch.no_grad():
        model(inputs())
    with saved, torch.inference_mode():
        model(inputs())
    assert spill_of(saved).tally.saved_count == 0


class _Seeded(torch.autograd.Function):
    """Saves a seed on the host beside its tensor, as attention kernels do."""

    @staticmethod
    def forward(ctx, x):
        seed = torch.arange(ROWS * WIDTH)  # no smaller than what leaves
        ctx.save_for_backward(x.sigmoid(), seed)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        kept, seed = ctx.saved_tensors
        assert seed.device.type == "cpu"
        assert seed[-2:].tolist() == [ROWS * WIDTH - 2, ROWS * WIDTH - 1]
        return grad * kept


def test_seeds_on_the_host_stay_there(saved):
    def seeded(model, x):
        for layer in model:
            x = _Seeded.apply(layer(x))
        return x.square().sum()

    check(saved, seeded)


def test_dropout_and_attention_are_exact(saved):
    def attending(model, x):
        torch.manual_seed(3)
        y = nn.functional.dropout(model(x), 0.3)
        heads = y.reshape(1, ROWS, 4, WIDTH // 4).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return out.square().sum()

    check(saved, attending)


def test_kept_tensors_are_checked_as_well(saved):
    x = torch.ones(4, device="hpu", requires_grad=True)
    with saved:
        y = x * 2
        loss = (y * y).sum()
    y.detach().add_(1)
    assert isinstance(Kept(y), Kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
