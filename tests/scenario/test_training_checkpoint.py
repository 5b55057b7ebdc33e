"""Recomputed regions and users' own saved-tensor hooks work through the stream."""

import functools
import threading
from copy import deepcopy

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import runtime_of
from training import (
    FEW,
    RESPECTED,
    SOME,
    TIGHT,
    WIDTH,
    Net,
    OnTwoStreams,
    Residual,
    Setting,
    assert_trains_equally,
    built,
    end,
    net,
    over,
    start,
)

REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


class EachBlock(Net):
    """A region around each block."""

    reentrant = False

    def around(self, block, x):
        return checkpoint(
            block, x, use_reentrant=self.reentrant, **vars(self).get("options", {})
        )


class Pairs(EachBlock):
    """A region around every two blocks."""

    def forward(self, x):
        x = self.entry(x)
        for first in range(0, len(self.blocks), 2):
            pair = torch.nn.Sequential(*self.blocks[first : first + 2])
            x = self.around(pair, x)
        return self.head(x)


class Nested(EachBlock):
    """A region around each two blocks, and around each of these."""

    def forward(self, x):
        x = self.entry(x)
        for first in range(0, len(self.blocks), 2):
            x = self.around(functools.partial(self.run, first), x)
        return self.head(x)

    def run(self, first, x):
        for block in self.blocks[first : first + 2]:
            x = self.around(block, x)
        return x


class InsideResidual(Residual):
    """A region inside of a block."""

    reentrant = False

    def forward(self, x):
        hidden = checkpoint(self.inner, self.norm(x), use_reentrant=self.reentrant)
        return x + self.down(hidden)

    def inner(self, x):
        return torch.nn.functional.gelu(self.up(x))


class Inside(EachBlock):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = torch.nn.ModuleList(InsideResidual(dropout) for _ in range(5))

    def around(self, block, x):
        block.reentrant = self.reentrant
        return block(x)


class AllInsideResidual(InsideResidual):
    """Regions inside of a block, with all that reads its weights."""

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return x + checkpoint(self.down, hidden, use_reentrant=self.reentrant)

    def first(self, x):
        return self.inner(self.norm(x))


class AllInside(Inside):
    def __init__(self, dropout=0.0):
        super().__init__()
        blocks = (AllInsideResidual(dropout) for _ in range(5))
        self.blocks = torch.nn.ModuleList(blocks)


class InsideOfRegions(AllInside):
    """Around each block there is a region, too."""

    def around(self, block, x):
        block.reentrant = self.reentrant
        return checkpoint(block, x, use_reentrant=self.reentrant)


class Tabled(Residual):
    """Reads tables of a child that has no forward, before anything else."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.tables = torch.nn.ParameterList(torch.randn(2, WIDTH) for _ in range(8))

    def forward(self, x):
        x = x * self.tables[0][0].sigmoid() + self.tables[1][1]
        return super().forward(x * self.tables[2].sum().sigmoid())


class EachTabled(EachBlock):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks[4] = Tabled(dropout)
        self.head = torch.nn.Identity()  # backward begins with a region


KINDS = {
    "each": EachBlock,
    "pairs": Pairs,
    "nested": Nested,
    "inside": Inside,
    "all inside": AllInside,
    "inside of regions": InsideOfRegions,
}


def built_as(kind, *, reentrant=False, dropout=0.0, **options):
    @built
    def build():
        model = KINDS[kind](dropout=dropout)
        model.reentrant = reentrant
        model.options = options
        return model

    return build


def loss_of(run, number):
    """Reentrant regions need inputs that take gradients."""
    return run.model(run.batch(number).requires_grad_()).square().mean()


def train(run, steps=4, batches=2):
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(steps):
        for number in range(batches):
            run.backward(loss_of(run, 10 * step + number))
        optimizer.step()
        optimizer.zero_grad()


# Reentrant regions inside of each other take no gradients, without streaming either.
WAYS = [(kind, False) for kind in KINDS] + [
    (kind, True) for kind in KINDS if kind not in ("nested", "inside of regions")
]


@over(SOME)
@pytest.mark.parametrize(("kind", "reentrant"), WAYS)
def test_recomputed_regions_are_exact(sim, setting, kind, reentrant):
    assert_trains_equally(built_as(kind, reentrant=reentrant), train, setting)


@over(FEW)
@pytest.mark.parametrize(("kind", "reentrant"), WAYS)
def test_recomputing_draws_the_same_random_numbers(sim, setting, kind, reentrant):
    build = built_as(kind, reentrant=reentrant, dropout=0.25)
    assert_trains_equally(build, train, setting)


@over(FEW)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_may_stop_early_or_not(sim, setting, kind, early):
    def script(run):
        with set_checkpoint_early_stop(early):
            train(run)

    assert_trains_equally(built_as(kind), script, setting)


@over(SOME)
@REENTRANT
@pytest.mark.parametrize("early", [True, False])
def test_a_region_around_the_whole_model_is_exact(sim, setting, reentrant, early):
    def script(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(4):
            inputs = run.batch(step).requires_grad_()
            with set_checkpoint_early_stop(early):
                output = checkpoint(run.model, inputs, use_reentrant=reentrant)
            run.backward(output.square().mean())
            run.backward(loss_of(run, step + 50))
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(net, script, setting)


@over(FEW)
@REENTRANT
def test_frozen_blocks_in_recomputed_regions_are_exact(sim, setting, reentrant):
    def script(run):
        for number in (0, 1, 3):
            run.model.blocks[number].requires_grad_(False)
        train(run)

    assert_trains_equally(built_as("each", reentrant=reentrant), script, setting)


class Summed(torch.nn.Linear):
    def forward(self, pair):
        x, y = pair
        return super().forward(x) + y


class EachSummed(EachBlock):
    """Regions of modules that take one container."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Summed(WIDTH, WIDTH) for _ in range(5))

    def around(self, block, x):
        return super().around(block, (x, x.tanh()))


@over(FEW)
def test_recomputed_modules_may_take_a_container(sim, setting):
    assert_trains_equally(built(EachSummed), train, setting)


@built
def tabled_net():
    return EachTabled()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_region_reads_before_any_site_is_there_from_the_first_step(
    sim, frozen, reentrant
):
    def script(run):
        run.model.reentrant = reentrant
        if frozen:
            run.model.blocks[4].tables.requires_grad_(False)
        train(run)

    assert_trains_equally(tabled_net, script, Setting("hpu", "layers", "most"))


def keep_products(context, operator, *args, **kwargs):
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


keeping = functools.partial(create_selective_checkpoint_contexts, keep_products)


@over(SOME)
@pytest.mark.parametrize("kind", ["each", "pairs"])
@pytest.mark.parametrize("options", [{}, *RESPECTED])
def test_regions_that_keep_some_results_are_exact(sim, setting, kind, options):
    build = built_as(kind, context_fn=keeping, **options)
    assert_trains_equally(build, train, setting)


def keep_all(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


@over(FEW)
@pytest.mark.parametrize("kind", ["each", "pairs"])
def test_regions_that_keep_all_results_keep_no_weights(sim, setting, kind):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_all)
    assert_trains_equally(built_as(kind, context_fn=contexts), train, setting)


@pytest.mark.skipif(not RESPECTED, reason="torch has that option from 2.15 on")
@over(FEW)
@pytest.mark.parametrize("options", RESPECTED)
def test_users_hooks_get_what_regions_keep_if_that_is_asked_for(sim, setting, options):
    def script(run):
        seen = []

        def pack(tensor):
            seen.append(tuple(tensor.shape))
            return tensor.clone()

        with saved_tensors_hooks(pack, torch.clone):
            loss = loss_of(run, 0)
        run.backward(loss)
        kept = 5 if options["respect_saved_tensors_hooks"] else 0
        assert seen.count((4, 2 * WIDTH)) == kept

    build = built_as("each", context_fn=keeping, **options)
    assert_trains_equally(build, script, setting)


@over(FEW)
def test_two_forwards_with_regions_go_back_in_either_order(sim, setting):
    def script(run):
        for step in range(4):
            losses = [loss_of(run, 10 * step + number) for number in range(2)]
            for loss in losses if step % 2 else reversed(losses):
                run.backward(loss)
            run.model.zero_grad()

    assert_trains_equally(built_as("each"), script, setting)


@over(FEW)
def test_a_region_goes_back_twice(sim, setting):
    def script(run):
        loss = loss_of(run, 0)
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        train(run)

    assert_trains_equally(built_as("each"), script, setting)


# Hooks of users


@over(FEW)
@pytest.mark.parametrize("build", [net, built_as("each"), built_as("pairs")])
@pytest.mark.parametrize("pin", [False, True])
def test_activations_that_users_save_on_the_host_are_exact(sim, setting, build, pin):
    def script(run):
        with save_on_cpu(pin_memory=pin and setting.place == "hpu", device_type="hpu"):
            train(run)

    assert_trains_equally(build, script, setting)


class SavedOnAnotherStream(saved_tensors_hooks):
    """Brings tensors back on a stream that waits for the node that has read them.

    As the `OffloadActivations` of torchtune and TRL do.
    """

    def __init__(self):
        super().__init__(torch.Tensor.cpu, self.back)
        self.stream, self.kept = torch.Stream(device="hpu"), []

    def back(self, saved):
        reader = torch.accelerator.current_stream()
        with self.stream:
            there = saved.to("hpu", non_blocking=True)
        reader.wait_stream(self.stream)
        self.kept.append(there)
        torch._C._current_autograd_node().register_hook(self.drop)
        return there

    def drop(self, *_):
        self.stream.wait_stream(torch.accelerator.current_stream())
        self.kept.clear()


class Squared(torch.nn.Linear):
    """Saves an input by a node behind the one that reads the weight."""

    def forward(self, x):
        return super().forward(x.square())


@built
def squaring_net():
    model = Net()
    model.blocks = torch.nn.ModuleList(Squared(WIDTH, WIDTH) for _ in range(5))
    return model


@over(FEW)
def test_what_others_hooks_bring_back_early_is_read_before_its_memory_is_reused(
    sim, setting
):
    """Their stream waited for the node before the one that read it."""

    def script(run):
        with SavedOnAnotherStream():
            train(run)

    assert_trains_equally(squaring_net, script, setting)


class SavingInside(Net):
    """Each block saves what it needs on the host."""

    def around(self, block, x):
        with save_on_cpu():
            return block(x)


@built
def saving_net():
    return SavingInside()


@over(SOME)
def test_blocks_that_save_on_the_host_themselves_are_exact(sim, setting):
    assert_trains_equally(saving_net, train, setting)


class OffloadingResidual(Residual):
    """Regions inside of a block, whose inputs the block saves on the host itself."""

    reentrant = False
    parts = False

    def forward(self, x):
        if not self.parts:
            return self.region(self.whole, x)
        x = x + self.region(self.up, self.norm(x))[..., :WIDTH]
        return x + self.region(self.last, x)

    def region(self, function, x):
        with save_on_cpu():
            return checkpoint(function, x, use_reentrant=self.reentrant)

    def whole(self, x):
        return Residual.forward(self, x)

    def last(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class OffloadingFirst(OffloadingResidual):
    """Ends in a layer that saves where all is seen, behind a region that does not."""

    def forward(self, x):
        x = self.region(self.up, self.norm(x))
        return self.down(torch.nn.functional.gelu(x))


def offloading_net(parts, reentrant, outside=Net, kind=OffloadingResidual):
    @built
    def build():
        model = outside()
        model.blocks = torch.nn.ModuleList(kind() for _ in range(5))
        for block in model.blocks:
            block.parts, block.reentrant = parts, reentrant
        return model

    return build


@over(SOME)
@REENTRANT
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_blocks_are_recomputed_whose_inputs_went_to_hooks_inside(
    sim, setting, parts, reentrant
):
    """As `activation_checkpointing_kwargs={"offload": True}` of transformers does."""

    def script(run):
        train(run, steps=4)

    assert_trains_equally(offloading_net(parts, reentrant), script, setting)


@over(SOME)
@REENTRANT
def test_regions_are_recomputed_in_front_of_a_layer_that_saves_as_usual(
    sim, setting, reentrant
):
    net = offloading_net(False, reentrant, kind=OffloadingFirst)
    assert_trains_equally(net, train, setting)


class Handing(Residual):
    """Adds what it is given, and may hand that on, as the blocks of T5 do."""

    hands = False

    def forward(self, x, more):
        x = Residual.forward(self, x) + more
        return (x, more) if self.hands else (x, None)


class HandingNet(Net):
    """Makes what all blocks add first, so that backward comes to it last."""

    recomputed = False

    def forward(self, x):
        more = torch.tanh(self.entry(x))
        for first in range(0, len(self.blocks), 2):
            call = functools.partial(self.run, first)
            if self.recomputed:
                x, more = checkpoint(call, x, more, use_reentrant=False)
            else:
                x, more = call(x, more)
        return self.head(x)

    def run(self, first, x, more):
        for block in self.blocks[first : first + 2]:
            x, handed = block(x, more)
            more = more if handed is None else handed
        return x, more


def handing_net(hands, recomputed):
    @built
    def build():
        model = HandingNet()
        model.recomputed = recomputed
        model.blocks = torch.nn.ModuleList(Handing() for _ in range(5))
        for block in model.blocks:
            block.hands = hands
        return model

    return build


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_block_comes_for_what_it_has_only_passed_on(sim, recomputed):
    setting = Setting("hpu", "blocks", "smallest")
    for _ in range(1_000):  # autograd numbers nodes by thread: more than its own makes
        torch.ones(1, requires_grad=True).sum()
    handed, kept = (
        assert_trains_equally(handing_net(hands, recomputed), train, setting)
        for hands in (True, False)
    )
    assert handed.streamed_bytes == kept.streamed_bytes


class Altering(Net):
    """Changes what a block has returned in place, which is a view."""

    def around(self, block, x):
        return block(x)[:].add_(0.5)


class Viewing(OffloadingResidual):
    """Returns a view."""

    def forward(self, x):
        return OffloadingResidual.forward(self, x)[:]


@over(SOME)
@REENTRANT
def test_hooks_inside_of_blocks_whose_views_are_changed_in_place_are_exact(
    sim, setting, reentrant
):
    """The view's own node is no part of the graph then."""

    @built
    def build():
        model = Altering()
        model.blocks = torch.nn.ModuleList(Viewing() for _ in range(5))
        for block in model.blocks:
            block.reentrant = reentrant
        return model

    def script(run):
        train(run, steps=4)

    assert_trains_equally(build, script, setting)


@over(SOME)
@REENTRANT
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("outside", [EachBlock, Pairs], ids=["each", "pairs"])
def test_hooks_inside_of_blocks_that_are_recomputed_themselves_are_exact(
    sim, setting, outside, parts, reentrant
):
    """The region around a block or two may have been given nothing that they saved."""

    def script(run):
        train(run, steps=4)

    assert_trains_equally(offloading_net(parts, reentrant, outside), script, setting)


def test_hooks_around_the_model_are_given_no_weight(sim):
    run = start(net, TIGHT)
    seen = []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.loss()
    assert seen
    assert not {shape for shape in seen if 32 in shape} - {(4, 32)}
    loss.backward()
    end(run)


# Memory


@pytest.mark.parametrize("setting", [TIGHT, Setting("hpu", "blocks", "smallest")])
@REENTRANT
def test_regions_cost_no_more_memory_than_resident_beside_the_weights(
    sim, setting, reentrant
):
    """What a block computes is freed before the next one is recomputed."""
    build = built_as("each", reentrant=reentrant)
    peaks = []
    for streams in (False, True):
        run = start(build, setting) if streams else None
        model = run.model if run else build().to("hpu")
        inputs = torch.randn(500, 16).to("hpu").requires_grad_()
        model(inputs).sum().backward()
        model.zero_grad()
        held = sim.allocated_bytes()
        sim.reset_peak()
        model(inputs).sum().backward()
        peaks.append(sim.peak_bytes() - held)
        model.zero_grad()
        if run:
            peaks[-1] -= run.budget
            end(run)
        del model, inputs
    assert peaks[1] <= peaks[0]


class LookingUp(Residual):
    """A block that adds rows of a table, which are all that a region around has."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, WIDTH)
        self.threads = []

    def forward(self, x):
        found = checkpoint(self.look_up, x, use_reentrant=False)
        return super().forward(found)

    def look_up(self, x):
        self.threads.append(threading.current_thread())
        return x + self.table((x.detach().sum(1).abs() * 16).long() % 256)


@built
def looking_up_net():
    model = Net(depth=0)
    model.blocks.extend(LookingUp() for _ in range(3))
    return model


def test_rows_that_are_looked_up_on_the_host_recompute_nothing_beside_the_device(sim):
    """Two threads of one backward would move blocks and recompute at a time."""

    def script(run):
        for number in range(3):
            run.backward(run.loss(number))
        if run.runtime is not None:
            me = threading.current_thread()
            for block in run.model.blocks:
                assert block.threads == [me] * 3

    report = assert_trains_equally(looking_up_net, script, TIGHT)
    assert report.gathered_bytes


class Unbiased(Net):
    """Regions that end with a layer whose weight autograd unpacks before its input."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            )
            for _ in range(4)
        )

    def around(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


def test_a_weight_that_is_unpacked_first_keeps_no_slot_while_its_region_recomputes(sim):
    run = start(built(Unbiased), TIGHT)
    for number in range(3):
        run.loss(number).backward()
        run.model.zero_grad()
    assert run.runtime.report().abandoned_slots == 0
    end(run)


@REENTRANT
@pytest.mark.parametrize("trains", [False, True])
def test_a_block_that_backward_uses_is_there_for_recomputes_on_other_streams(
    sim, trains, reentrant
):
    """A use within a use did not wait for what fills the slot, nor was it marked."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
    model = OnTwoStreams(layers).requires_grad_(trains)
    plain, side = deepcopy(model).to("hpu"), torch.Stream("hpu")
    stagehand.layer(model, device="hpu", vram_budget=2 * 4 * (WIDTH + 1) * WIDTH + 2048)

    def step(model):
        x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
        torch.accelerator.synchronize()
        y, _kept = model(x, side, reentrant)
        y.sum().backward()
        torch.accelerator.synchronize()
        grads = [p.grad for p in model.parameters()]
        return y, x.grad, grads

    for number in range(4):
        expected, found = step(plain), step(model)
        assert_bitwise_equal(found, expected, f"step {number}")
    runtime_of(model).shutdown()


class Shift(torch.nn.Module):
    """Its backward does not need its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x + self.weight


class ShiftedAside(torch.nn.Module):
    """Begins with what is computed, and recomputed, on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.shift = Shift()
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.side = torch.Stream("hpu")

    def forward(self, x):
        here = torch.accelerator.current_stream()
        self.side.wait_stream(here)
        with self.side:
            x = checkpoint(self.shift, x, use_reentrant=True)
        here.wait_stream(self.side)
        return self.head(x), x


@pytest.mark.parametrize("leave", ["park", "give_up", "shutdown"])
def test_memory_goes_when_streams_have_read_what_is_read_without_a_use(sim, leave):
    """Backward begins on one stream, reads a weight on another, and ends on a third."""
    model = ShiftedAside().requires_grad_(False)
    stagehand.layer(model, device="hpu", vram_budget=16_000)
    runtime = runtime_of(model)
    x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
    for _ in range(3):
        torch.accelerator.synchronize()
        with torch.Stream("hpu") as begins:
            y, kept = model(x)
            loss = y.sum()
        with torch.Stream("hpu") as ends:
            ends.wait_stream(begins)
            loss.backward()
    with torch.Stream("hpu"):
        if leave == "give_up":
            runtime._tenancy.give_up(0)
        else:
            getattr(runtime, leave)()
    torch.accelerator.synchronize()
    del y, kept, loss
    runtime.shutdown()


class Reads(torch.nn.Module):
    """Reads its layer's weight itself."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x @ self.layer.weight


class TwoReadAside(torch.nn.Module):
    """Its backward begins with recomputes on two streams, and neither waits."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.parts = torch.nn.ModuleList(Reads() for _ in range(2))

    def forward(self, x, sides):
        here = torch.accelerator.current_stream()
        x, kept = self.head(x), []
        for side, part in zip(sides, self.parts, strict=True):
            side.wait_stream(here)
            with side:
                kept.append(checkpoint(part, x, use_reentrant=True))
        for side in sides:
            here.wait_stream(side)
        return kept[0] + kept[1], [*kept, x]


@pytest.mark.parametrize("leave", ["park", "give_up"])
def test_what_left_before_backward_is_there_for_recomputes_on_all_streams(sim, leave):
    """It is read without a use, and only the first of the streams waited for it."""
    model, sides = TwoReadAside(), [torch.Stream("hpu") for _ in range(2)]
    plain = deepcopy(model.requires_grad_(False)).to("hpu")
    stagehand.layer(model, device="hpu", vram_budget=16 * WIDTH * WIDTH + 2048)
    runtime = runtime_of(model)
    away = {"park": runtime.park, "give_up": lambda: runtime._tenancy.give_up(0)}

    def step(model, between):
        x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
        torch.accelerator.synchronize()
        y, _kept = model(x, sides)
        loss = y.sum()
        between()
        loss.backward()
        torch.accelerator.synchronize()
        return y, x.grad

    for number in range(3):
        expected, found = step(plain, lambda: None), step(model, away[leave])
        assert_bitwise_equal(found, expected, f"step {number}")
    runtime.shutdown()


class Sparse(torch.nn.Module):
    """Its region reads a sparse tensor, too, which has no memory of its own."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def saves_all():
            policy = CheckpointPolicy.PREFER_SAVE
            return create_selective_checkpoint_contexts(lambda *_, **__: policy)

        return checkpoint(self.run, x, use_reentrant=False, context_fn=saves_all)

    def run(self, x):
        hidden = self.layer(x).tanh()
        return hidden * float(torch.sparse.sum(torch.eye(3).to_sparse()))


def test_selective_regions_may_read_sparse_tensors(sim):
    model = torch.nn.Sequential(*(Sparse() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, device="hpu", vram_budget=3 * 4 * WIDTH * (WIDTH + 16))

    def step(model):
        x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
        model.zero_grad()
        model(x).sum().backward()
        return x.grad, [p.grad.cpu() for p in model.parameters()]

    for number in range(3):
        assert_bitwise_equal(step(model), step(plain), f"step {number}")
    runtime_of(model).shutdown()


class Masked(torch.nn.Linear):
    """A part that is called by itself, with a mask beside its input."""

    def forward(self, x, mask):
        return (super().forward(x) * mask).tanh()


@REENTRANT
def test_what_is_given_by_name_is_moved_where_a_part_is_recomputed(sim, reentrant):
    """The mask is on the host, the input is on the device already."""
    model = torch.nn.ModuleList(Masked(WIDTH, WIDTH) for _ in range(4))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, device="hpu", vram_budget=3 * 4 * WIDTH * (WIDTH + 16))
    mask = torch.arange(float(WIDTH)) % 3

    def step(model, mask):
        x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
        y = x
        for part in model:
            if reentrant:
                y = checkpoint(lambda y, p=part: p(y, mask=mask), y, use_reentrant=True)
            else:
                y = checkpoint(part, y, mask=mask, use_reentrant=False)
        model.zero_grad()
        y.sum().backward()
        return x.grad, [p.grad.cpu() for p in model.parameters()]

    for number in range(3):
        expected, found = step(plain, mask.to("hpu")), step(model, mask)
        assert_bitwise_equal(found, expected, f"step {number}")
    runtime_of(model).shutdown()


def test_what_left_before_backward_comes_in_it_where_there_was_no_room_before(
    sim, monkeypatch
):
    """Other models were promised the room when backward began."""
    layers = [torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers, *deepcopy(layers)).requires_grad_(False)
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, device="hpu", vram_budget=16 * WIDTH * WIDTH + 4096)
    runtime = runtime_of(model)
    scheduler = runtime._parts.scheduler

    def step(model, between):
        x = torch.ones(2, WIDTH, device="hpu", requires_grad=True)
        loss = checkpoint(model[3], model[:3](x), use_reentrant=False).sum()
        with monkeypatch.context() as patch:
            between(patch)
            loss.backward()
        return x.grad

    def leave(patch):
        runtime._tenancy.give_up(0)
        patch.setattr(scheduler, "_place", lambda blocks: False)

    for number in range(3):
        expected, found = step(plain, lambda patch: None), step(model, leave)
        assert_bitwise_equal(found, expected, f"step {number}")
    runtime.shutdown()


class Scaled(Residual):
    """Reads a weight of its own after those of its layers."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return super().forward(x) * self.scale


@built
def scaled_net():
    model = Net()
    model.blocks = torch.nn.ModuleList(Scaled() for _ in range(5))
    return model


@over(SOME)
def test_regions_around_parts_of_a_model_are_recomputed(setting):
    """Each layer ended a pass in forward, and what followed in the region saved weights
    that stay as they were; the recompute, which is one pass, saved handles."""

    def script(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(3):
            x = run.batch(number)
            for block in run.model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            run.backward(x.square().mean())
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(scaled_net, script, setting)
