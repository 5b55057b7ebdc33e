"""Optimizers step streamed weights on the host, after backward or during it."""

import gc
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from small import LAYER_BYTES, batch, runtime_of, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from equality import all_equal
from stagehand.core.arena import live_leases
from stagehand.gradients.gradients import Gradients
from stagehand.optim import OffloadedAdamW

BUDGET = 2 * LAYER_BYTES


def losses(model, optimizer, steps=6, shift=0):
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model((batch() + step + shift).to("hpu")).square().sum()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def weights(model):
    return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.fixture
def trained(sim):
    """What torch's own optimizer makes of the resident model."""
    resident = stack().to("hpu")
    optimizer = torch.optim.AdamW(resident.parameters(), lr=1e-2, fused=True)
    found = losses(resident, optimizer)
    return found, weights(resident)


@pytest.mark.parametrize("overlaps", [False, True], ids=["after", "during"])
def test_offloaded_adamw_trains_as_torchs_own_does(sim, trained, overlaps):
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    source = model if overlaps else None
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, overlap=source)
    found = losses(model, optimizer)
    assert found == trained[0]
    assert all_equal(weights(model), trained[1])
    assert all(
        state["exp_avg"].device.type == "cpu" for state in optimizer.state.values()
    )
    report = runtime_of(model).report()
    assert report.peak_device_bytes <= BUDGET
    assert report.abandoned_slots == 0
    runtime_of(model).shutdown()


@pytest.mark.parametrize("budget", [BUDGET, 4 * BUDGET])
def test_weights_are_stepped_in_backward_before_it_is_over(sim, budget):
    model = stagehand.layer(stack(), vram_budget=budget)
    told = []
    runtime_of(model).when_home(lambda parameters: told.append(len(parameters)))
    x = batch().to("hpu").requires_grad_()
    x.register_hook(lambda grad: told.append("input"))  # the last thing in backward
    model(x).sum().backward()
    end = told.index("input")
    assert sum(told[:end]) >= 6, "of 12, the last ones may be under way"
    assert sum(told[:end] + told[end + 1 :]) == len(list(model.parameters()))
    runtime_of(model).shutdown()


@pytest.mark.parametrize("lasting", [False, True])
def test_after_a_listener_raised_at_any_of_its_calls_training_is_exact(sim, lasting):
    """The backward waited for ever, or left its failures to the next forward."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    expected = weights(model)
    calls, fails = [], set()

    def listen(parameters):
        calls.append(len(parameters))
        if len(calls) in fails:
            raise LookupError(len(calls))

    runtime_of(model).when_home(listen)
    model(batch().to("hpu")).sum().backward()
    gradients = [p.grad.cpu() for p in model.parameters()]
    for first in range(1, len(calls) + 1):
        calls.clear()
        fails |= set(range(first, 100 if lasting else first + 1))
        model.zero_grad()
        with pytest.raises(LookupError, match=f"^{first}$"):
            model(batch().to("hpu")).sum().backward()
        fails.clear()
        model.zero_grad()
        model(batch().to("hpu")).sum().backward()
        assert all_equal(weights(model), expected)
        found = [p.grad.cpu() for p in model.parameters()]
        assert all_equal(found, gradients)
    runtime_of(model).shutdown()


def test_what_a_listener_raised_keeps_no_graph_once_it_is_handled(sim):
    """Its traceback held the frame that raised it, which held it: until a collection,
    activations stayed, and weights of which nodes were left came home in parts.
    """
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    calls, fails = [], set()

    def listen(parameters):
        calls.append(len(parameters))
        if len(calls) in fails:
            raise LookupError

    runtime_of(model).when_home(listen)

    def step():
        x = batch().to("hpu").requires_grad_()
        calls.clear()
        model.zero_grad()
        with suppress(LookupError):
            model(x).sum().backward()
        return weakref.ref(x)

    step()
    gc.collect()
    gc.disable()
    try:
        for number in range(1, len(calls) + 1):
            fails |= {number}
            left = step()
            deadline = time.monotonic() + 30
            while left() is not None:  # autograd's thread may still let go of it
                assert time.monotonic() < deadline, f"call {number} raised"
                time.sleep(0.001)
            fails.clear()
    finally:
        gc.enable()
    runtime_of(model).shutdown()


def test_weights_that_were_used_twice_are_stepped_in_later_backwards(sim):
    """Of several parts of a gradient nobody is told, in that backward alone."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    told = []
    runtime_of(model).when_home(lambda parameters: told.extend(parameters))
    model(model(batch().to("hpu"))).sum().backward()
    told.clear()
    model(batch().to("hpu")).sum().backward()
    assert {id(p) for p in told} == {id(p) for p in model.parameters()}
    runtime_of(model).shutdown()


def test_gradients_are_in_place_where_a_listener_raised_when_backward_was_over(sim):
    """Also those of which nobody is told, for they came in several parts."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    calls, fails = [], []

    def listen(parameters):
        calls.append(len(parameters))
        if fails == calls:
            raise LookupError

    runtime_of(model).when_home(listen)
    model[0](model(batch().to("hpu"))).sum().backward()
    gradients = [p.grad.cpu() for p in model.parameters()]
    fails += calls  # at the last call
    calls.clear()
    model.zero_grad()
    with pytest.raises(LookupError):
        model[0](model(batch().to("hpu"))).sum().backward()
    assert all_equal([p.grad.cpu() for p in model.parameters()], gradients)
    runtime_of(model).shutdown()


class Interrupted(Future):
    """A job; the first who waits for it gets an interrupt."""

    waits = 0

    def exception(self, timeout=None):
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        return super().exception(timeout)


@pytest.mark.parametrize("when", ["in backward", "at its end"])
def test_a_job_of_which_the_wait_was_interrupted_is_waited_for_again(sim, when):
    """It was forgotten: a listener might still have changed weights in a pass."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    runtime, jobs = runtime_of(model), []
    runtime.when_home(lambda _: None)

    def put(_):
        jobs.append(Interrupted())
        jobs[0].set_result(None)
        waiting = runtime._uses.gradients._jobs
        if when == "in backward":
            waiting.appendleft(jobs[0])
            waiting.append(Future())
            waiting[-1].set_result(None)
        else:
            waiting.append(jobs[0])

    number = 3 if when == "in backward" else 0
    hook = model[number][0].weight.register_post_accumulate_grad_hook(put)
    with pytest.raises(KeyboardInterrupt):
        model(batch().to("hpu")).sum().backward()
    hook.remove()
    model.zero_grad()
    model(batch().to("hpu")).sum().backward()
    assert jobs[0].waits > 1
    runtime.shutdown()


def test_gradients_that_were_put_aside_are_added_where_a_listener_had_raised(
    sim, monkeypatch
):
    """Where loads go first, some arrive when backward is over."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    for _ in range(2):
        model(batch().to("hpu")).sum().backward()
    expected = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    model(batch().to("hpu")).sum().backward()
    pass_on, settle = Gradients.pass_on, Gradients.settle

    def put_aside(self, *, waits=True):
        if not waits:
            pass_on(self, waits=False)

    def settle_late(self):
        if self._arrivals:
            failed, done = Future(), Future()
            failed.set_exception(LookupError())
            done.set_result(None)
            self._jobs += failed, done
        settle(self)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "pass_on", put_aside)
        patch.setattr(Gradients, "settle", settle_late)
        with pytest.raises(LookupError):
            model(batch().to("hpu")).sum().backward()
    assert all_equal([p.grad.cpu() for p in model.parameters()], expected)
    runtime_of(model).shutdown()


def test_accumulation_is_refused_where_weights_were_stepped_in_backward(sim):
    model = stagehand.layer(stack(), vram_budget=BUDGET)
    optimizer = OffloadedAdamW(model.parameters(), overlap=model)
    model(batch().to("hpu")).sum().backward()
    with pytest.raises(stagehand.StagehandError, match="overlap"):
        model(batch().to("hpu")).sum().backward()
    with pytest.warns(stagehand.StagehandWarning):
        optimizer.zero_grad()
    losses(model, optimizer, steps=2)
    runtime_of(model).shutdown()


class Rows(nn.Module):
    """Rows of tables of which each pass reads a few."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(Table(number) for number in range(4))

    def forward(self, rows):
        return sum(table(rows) for table in self.tables)


class Table(nn.Module):
    def __init__(self, number):
        super().__init__()
        values = torch.linspace(-1, 1 + number, 4096 * 8)
        self.weight = nn.Parameter(values.reshape(4096, 8))

    def forward(self, rows):
        return self.weight[rows]


@pytest.mark.parametrize("place", ["cpu", "hpu"])
@pytest.mark.parametrize("clears", ["first", "between"])
@pytest.mark.parametrize("budget", ["smallest", "some", "all"])
@pytest.mark.parametrize("validates", [False, True])
def test_a_fused_step_of_a_few_elements_is_noticed(
    sim, place, clears, budget, validates
):
    """torch's fused kernels move no version counter, and no sample has these rows."""

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for step in range(4):
            if clears == "first":
                optimizer.zero_grad()
            rows = torch.tensor([3 + step // 2, 777]).to(place)
            loss = model(rows).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if validates:  # what is brought for it lies there when the step comes
                with torch.no_grad():
                    model(rows)
            optimizer.step()
        return weights(model)

    model = Rows()
    expected = train(deepcopy(model).to(place))
    tables = {"smallest": 1, "some": 3, "all": 5}[budget]
    stagehand.layer(model, vram_budget=tables * 4096 * 8 * 4, device=place)
    assert all_equal(train(model), expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("tables", [1, 3, 5])
def test_a_step_of_a_few_elements_through_data_is_noticed(sim, tables):
    """Of no optimizer: nothing but the gradients tells that weights may be changed."""

    def train(model):
        for step in range(4):
            rows = torch.tensor([3 + step // 2, 777]).to("hpu")
            model(rows).square().sum().backward()
            for weight in model.parameters():
                weight.data[777] -= 0.1 * weight.grad[777]
                weight.grad = None
        return weights(model)

    model = Rows()
    expected = train(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=tables * 4096 * 8 * 4, device="hpu")
    assert all_equal(train(model), expected)
    runtime_of(model).shutdown()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_backward_on_the_streams_of_its_forward_reads_what_is_filled(sim):
    """Two branches of a block on two streams, which autograd does not order."""
    side = torch.Stream(device="hpu")

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            here = torch.accelerator.current_stream()
            side.wait_stream(here)
            x.record_stream(side)
            with side:
                left = self.left(x)
            right = self.right(x)
            here.wait_stream(side)
            left.record_stream(here)
            return left + right

    def run(model):
        for _ in range(3):
            model.zero_grad()
            model(batch().to("hpu")).square().sum().backward()
        return [p.grad.cpu() for p in model.parameters()]

    model = nn.Sequential(*(Branches() for _ in range(6)))
    expected = run(deepcopy(model).to("hpu"))
    sim.clear_races()  # the resident model's own, if there were any
    runtime = stagehand.StagehandRuntime(
        model,
        stagehand.StagehandConfig(
            vram_high_watermark_mb=4 * LAYER_BYTES / 2**20,
            vram_low_watermark_mb=2 * LAYER_BYTES / 2**20,
        ),
        r"^\d+$",
    )
    assert all_equal(run(model), expected)
    runtime.shutdown()


def stays(parameter):
    """See the gradient at each call."""


def leaves_at_once(parameter):
    """See the first one alone."""
    parameter.own.remove()


def uses_it_up(parameter):
    """As an optimizer that steps in backward does."""
    parameter.used = parameter.used + parameter.grad.cpu()
    parameter.grad = None


@pytest.mark.parametrize("hook", [stays, leaves_at_once, uses_it_up])
def test_gradient_of_a_block_used_twice_survives_a_hook_registered_late(sim, hook):
    def backward(model):
        model.zero_grad()
        x = batch().to("hpu").requires_grad_()
        for _ in range(2):
            x = checkpoint(model[0], x, use_reentrant=True)
        x.sum().backward()
        used = [p.used for p in model[0].parameters()]
        return used + [
            p.grad.cpu() for p in model[0].parameters() if p.grad is not None
        ]

    def run(model):
        for p in model.parameters():
            p.used = torch.zeros(())
        backward(model)
        for p in model.parameters():
            p.own = p.register_post_accumulate_grad_hook(hook)
        found = backward(model)
        for p in model.parameters():
            del p.used, p.own
        return found

    model = stack(3)
    expected = run(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=BUDGET)
    found = run(model)
    assert len(found) == len(expected)
    assert all_equal(found, expected)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("plain", [2, 3])
def test_a_block_that_a_region_still_recomputes_is_not_stepped_in_backward(sim, plain):
    """It was used several times before, and a recompute brings another part."""

    def train(model, **options):
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, **options)
        for _ in range(3):
            x = batch().to("hpu").requires_grad_()
            for number in range(1 + plain):
                again = number == 0  # goes back the last
                x = (
                    checkpoint(model[0], x, use_reentrant=True)
                    if again
                    else model[0](x)
                )
                x = model[2](model[1](x))
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    model = stack(3)
    expected = train(deepcopy(model).to("hpu"))
    stagehand.layer(model, vram_budget=BUDGET)
    assert all_equal(train(model, overlap=model), expected)
    runtime_of(model).shutdown()


def test_a_gradient_that_cannot_be_added_to_leaves_no_memory_behind(sim):
    """As the one that `expand()` makes: what had arrived with it was kept for ever."""
    model = stagehand.layer(stack(), vram_budget=BUDGET)

    def backward():
        model(batch().to("hpu")).sum().backward()

    held = []
    for _ in range(4):
        model.zero_grad()
        backward()
        backward()  # arrives beside what is there
        held.append(live_leases())
        for parameter in model.parameters():
            parameter.grad = torch.zeros(()).expand_as(parameter)
        with pytest.raises(RuntimeError, match="single memory location"):
            backward()
    assert held == held[:1] * 4
    runtime_of(model).shutdown()


def chain(depth=8):
    """Blocks that are called one by one: each forward is a pass of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        blocks = [
            nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
            )
            for _ in range(depth)
        ]
        return nn.Sequential(*blocks)


def chain_losses(model, optimizer):
    found = []
    for step in range(4):
        y = torch.full((16, 64), 0.1 + step).to("hpu")
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_block_that_was_loaded_too_early_is_stepped_behind_its_copy(sim):
    """An order that is not known yet loads blocks whose step is about to come."""
    sim.configure(h2d_gbps=1.0, d2h_gbps=1.0)
    resident = chain().to("hpu")
    optimizer = torch.optim.AdamW(resident.parameters(), lr=1e-3, fused=True)
    expected = chain_losses(resident, optimizer)
    model = chain()
    budget = int(0.6 * sum(p.numel() * p.element_size() for p in model.parameters()))
    stagehand.layer(model, vram_budget=budget)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-3, overlap=model)
    assert chain_losses(model, optimizer) == expected
    runtime_of(model).shutdown()
    assert all_equal(weights(model), weights(resident))


@pytest.mark.parametrize("layers", [2, 4])
def test_a_block_that_was_loaded_for_another_order_is_stepped_behind_its_copy(
    sim, layers
):
    """Its copy was queued where the order was one of another kind of step."""
    sim.configure(h2d_gbps=1.0, d2h_gbps=1.0)

    def train(model, **options):
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, **options)
        for one_by_one in (0, 1, 0, 1, 1, 0, 0, 1):
            x = batch().to("hpu")
            if one_by_one:
                for block in model:
                    x = checkpoint(block, x, use_reentrant=False)
            else:
                x = model(x)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    expected = train(stack().to("hpu"))
    model = stagehand.layer(stack(), vram_budget=layers * LAYER_BYTES)
    assert all_equal(train(model, overlap=model), expected)
    runtime_of(model).shutdown()
