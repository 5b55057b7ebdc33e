"""Blocks that are compiled one by one train as a resident model of such blocks does.

The compiler looks at parameters, and at what their `.grad` holds, whenever it compiles.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import stagehand
from architectures import assert_bitwise_equal
from scenario.small import LAYER_BYTES, WIDTH, batch, runtime_of
from stagehand.core.hidden_gradients import _hide
from stagehand.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def compiler():
    """A compiler that has compiled nothing, and never gives up silently."""
    torch.compiler.reset()
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits):
        yield
    torch.compiler.reset()


class Layer(nn.Module):
    """What PyTorch's own modules are not: compiled where it is resident, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


class Penalized(nn.Sequential):
    """Blocks that take gradients of themselves in the middle of the forward."""

    def forward(self, x):
        for block in self:
            if torch.is_grad_enabled():
                block(x.detach()).square().mean().backward()
            x = block(x)
        return x


def stack(kind=nn.Sequential):
    torch.manual_seed(0)
    return kind(*(Layer() for _ in range(4)))


class Pair:
    """A model twice, resident and streamed, of compiled blocks; and what both gave."""

    def __init__(self, place, model=None):
        model = model or stack()
        self.place = place
        self.resident, self.model = deepcopy(model).to(place), model
        for theirs, ours in zip(
            self.resident.parameters(), model.parameters(), strict=True
        ):
            theirs.grad = None if ours.grad is None else ours.grad.to(place)
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=3 * LAYER_BYTES / MIB,
            vram_low_watermark_mb=2 * LAYER_BYTES / MIB,
        )
        self.runtime = stagehand.StagehandRuntime(model, config, r"^\d+$", device=place)

    def train(self, steps, *, compiled=True):
        """Let `steps(model, loss, optimizer)` train both."""
        for one in (self.resident, self.model):
            torch.compiler.reset()
            backend = CompileCounterWithBackend("aot_eager")
            for block in one if compiled else ():
                block.compile(backend=backend)
            optimizer = torch.optim.AdamW(
                (p for p in one.parameters() if p.requires_grad), lr=1e-2
            )

            def loss(shift=0.0, one=one):
                return one(batch().to(self.place) + shift).square().mean()

            steps(one, loss, optimizer)
            assert bool(backend.frame_count) is compiled

    def check(self):
        """Weights and gradients are equal to the bit, and where they belong."""
        resident = dict(self.resident.named_parameters())
        for name, ours in self.model.named_parameters():
            theirs = resident[name]
            assert_bitwise_equal(ours.detach().cpu(), theirs.detach().cpu(), name)
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                assert ours.grad.device == ours.device, name
                assert_bitwise_equal(ours.grad.cpu(), theirs.grad.cpu(), name)
        self.runtime.shutdown()


def forget():
    """Let all be compiled anew: what is there now is looked at."""
    torch.compiler.reset()


@pytest.mark.parametrize("anew", [False, True])
def test_micro_batches_are_accumulated_exactly(anew, sim):
    pair = Pair("hpu")

    def steps(model, loss, optimizer):
        for _ in range(2):
            for number in range(2):
                if anew:
                    forget()
                loss(number).backward()
            optimizer.step()
            if not anew:
                optimizer.zero_grad()

    pair.train(steps)
    pair.check()


@pytest.mark.parametrize(
    ("place", "to_none"), [("hpu", True), ("hpu", False), ("cpu", True)]
)
def test_gradients_may_be_there_in_the_forward(place, to_none, sim):
    pair = Pair(place)

    def steps(model, loss, optimizer):
        for _ in range(3):
            value = loss()
            optimizer.zero_grad(set_to_none=to_none)
            value.backward()
            optimizer.step()
            forget()

    pair.train(steps)
    pair.check()


def test_a_graph_that_is_kept_adds_its_gradients_again(sim):
    pair = Pair("hpu")

    def steps(model, loss, optimizer):
        for _ in range(2):
            value = loss()
            value.backward(retain_graph=True)
            forget()
            other = loss(1.0)
            value.backward()
            other.backward()
            optimizer.step()

    pair.train(steps)
    pair.check()


def test_frozen_weights_beside_trained_ones_are_exact(sim):
    model = stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    pair = Pair("hpu", model)

    def steps(model, loss, optimizer):
        for _ in range(3):
            forget()
            value = loss()
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    pair.train(steps)
    pair.check()


def test_a_pass_without_gradients_finds_and_leaves_them(sim):
    """Also those that were there before the model was streamed."""
    model = stack()
    model(batch()).square().mean().backward()
    pair = Pair("hpu", model)

    def steps(model, loss, optimizer):
        before = [p.grad for p in model.parameters()]
        forget()
        with torch.no_grad():
            loss()
        assert [p.grad for p in model.parameters()] == before
        loss().backward()

    pair.train(steps)
    pair.check()


class Refused(Exception):
    pass


@pytest.mark.parametrize("compiling", [False, True])
def test_a_forward_that_fails_loses_no_gradient(compiling, sim):
    """Whether it fails in a block, or while a block is compiled."""
    pair = Pair("hpu")

    @torch.compiler.disable
    def refuse(*_):
        raise Refused

    def steps(model, loss, optimizer):
        loss().backward()
        kept = [p.grad for p in model.parameters()]
        forget()
        if compiling:
            compiled = model[2]._compiled_call_impl
            model[2].compile(backend=refuse)
            with pytest.raises(BackendCompilerFailed):
                loss()
            model[2]._compiled_call_impl = compiled
        else:
            hook = model[2].register_forward_hook(refuse)
            with pytest.raises(Refused):
                loss()
            hook.remove()
        now = [p.grad for p in model.parameters()]
        assert all(new is old for new, old in zip(now, kept, strict=True))
        loss().backward()
        optimizer.step()

    pair.train(steps)
    pair.check()


def test_a_backward_inside_of_a_pass_adds_to_what_was_there(sim):
    pair = Pair("hpu", stack(Penalized))

    def steps(model, loss, optimizer):
        for _ in range(2):
            loss().backward()
            forget()
        optimizer.step()

    pair.train(steps)
    pair.check()


@pytest.mark.parametrize("kind", [nn.Sequential, Penalized])
def test_what_the_compiler_does_not_give_back_is_there_in_time(kind, sim):
    """It says that it is done when all threads are done: that may be any time later."""
    pair = Pair("hpu", stack(kind))

    def steps(model, loss, optimizer):
        loss().backward()
        hooks = [
            block.linear.register_forward_pre_hook(lambda *_: _hide(None))
            for block in model
        ]
        kept = [p.grad for p in model.parameters()]
        with torch.no_grad():
            loss()
        now = [p.grad for p in model.parameters()]
        assert all(new is old for new, old in zip(now, kept, strict=True))
        loss().backward()
        for hook in hooks:
            hook.remove()

    pair.train(steps, compiled=False)
    pair.check()


class Sharing(nn.Module):
    """Reads the weight of a layer in it that it does not call."""

    def __init__(self):
        super().__init__()
        self.called, self.read = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "12")

    def forward(self, x):
        return nn.functional.linear(self.called(x), self.read.weight)


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace:UserWarning")
def test_compiled_blocks_that_read_a_weight_of_others_bring_it(sim):
    model = nn.Sequential(*(Sharing() for _ in range(3)))
    x = batch()
    with torch.no_grad():
        expected = deepcopy(model).to("hpu")(x.to("hpu")).cpu()
        for block in model:
            block.compile(backend="eager")
        stagehand.layer(model, vram_budget=5 * LAYER_BYTES)
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
    runtime_of(model).shutdown()


class Unflattened(Layer):
    """A block with a call in Python that the compiler does not take from a mode."""

    def forward(self, x):
        return super().forward(x).unflatten(-1, (-1, 2)).flatten(-2)


def in_place(block, **options):
    block.compile(**options)
    return block


def by_forward(block, **options):
    block.forward = torch.compile(block.forward, **options)
    return block


def by_class(block, **options):
    """As where a class has `@torch.compile` on its forward."""
    kind = type(block)
    if not hasattr(kind, "of_class"):
        forward = torch.compile(kind.forward, **options)
        kind = type(kind.__name__, (kind,), {"forward": forward, "of_class": True})
    block.__class__ = kind
    return block


def in_blocks(model, place):
    mib = 4 * LAYER_BYTES / MIB
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=mib, vram_low_watermark_mb=mib / 2
    )
    return stagehand.StagehandRuntime(model, config, r"^\d+$", device=place)


@pytest.mark.parametrize("compiled", [in_place, by_forward, by_class, torch.compile])
@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_equal_blocks_are_compiled_once_as_those_of_a_resident_model(
    sim, place, compiled
):
    """First passes, which are watched, were compiled in pieces, and refused as one.

    Before that each block was compiled, and from eight on none.
    """
    model = nn.Sequential(*(Unflattened() for _ in range(12)))
    runs = []
    for one, streams in ((deepcopy(model).to(place), False), (model, True)):
        torch.compiler.reset()
        backend = CompileCounter()
        for number, block in enumerate(one):
            one[number] = compiled(block, backend=backend, fullgraph=True)
        runtime = in_blocks(one, place) if streams else None
        outputs = []
        for _ in range(3):
            for mode in (torch.no_grad, torch.enable_grad):
                with mode():
                    outputs.append(one(batch().to(place)).detach())
        runs.append((outputs, backend.frame_count))
    (expected, frames), (found, streamed) = runs
    assert_bitwise_equal(found, expected, "outputs")
    assert streamed == frames
    runtime.shutdown()


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_a_failure_does_not_make_what_is_compiled_fail(sim, error):
    """It was looked into then, as if it had read a weight that was on the host."""
    model = nn.Sequential(*(Unflattened() for _ in range(12)))
    backend = CompileCounter()
    for block in model[:-1]:
        block.compile(backend=backend, fullgraph=True)
    runtime = in_blocks(model, "hpu")

    def fail(*_):
        raise error

    with torch.no_grad():
        expected = model(batch())
        hook = model[-1].register_forward_hook(fail)
        with pytest.raises(error):
            model(batch())
        hook.remove()
        for _ in range(3):
            assert_bitwise_equal(model(batch()), expected, "output")
    assert backend.frame_count == 1
    runtime.shutdown()


class Borrowing(Layer):
    """A block that reads a weight of another one, if it has one."""

    lender = ()

    def forward(self, x):
        for other in self.lender:
            x = nn.functional.linear(x, other.linear.weight)
        return super().forward(x)


def test_a_compiled_block_that_reads_another_ones_weight_fails_once(sim):
    """What is compiled is not looked into before a pass has failed."""
    model = nn.Sequential(*(Borrowing() for _ in range(12)))
    model[8].lender = (model[3],)
    expected = deepcopy(model).to("hpu")(batch().to("hpu"))
    for block in model:
        block.compile(backend="eager")
    stagehand.layer(model, vram_budget=6 * LAYER_BYTES, opaque=[Borrowing])
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="device"):
            model(batch())
        for _ in range(3):
            assert_bitwise_equal(model(batch()), expected, "output")
    runtime_of(model).shutdown()


def test_the_compiler_leaves_the_hooks_of_a_model_that_is_compiled_as_a_whole(sim):
    """It compiled them for each kind of pass and input, up to its limit, and warned."""
    model = stack()
    resident = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    compiled = torch.compile(model, backend="eager")
    usual = {"recompile_limit": 8, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**usual):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for rows, place in ((4, "cpu"), (2, "cpu"), (4, "hpu")):
                x = batch()[:rows].to(place)
                with mode():
                    found, expected = compiled(x), resident(x.to("hpu"))
                assert_bitwise_equal(found, expected, f"{mode}, {rows} from {place}")
    runtime_of(model).shutdown()
