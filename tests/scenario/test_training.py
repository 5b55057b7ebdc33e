"""Training through the stream gives what training the resident model gives."""

import contextlib
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stagehand.errors import StagehandWarning
from stagehand.gradients import gradients
from stagehand.gradients.home import HOMES
from training import (
    ALL,
    FEW,
    SOME,
    TIGHT,
    WIDTH,
    Net,
    Residual,
    Setting,
    assert_trains_equally,
    built,
    end,
    net,
    over,
    sgd,
    start,
    step,
    train,
)

# Steps


@over(ALL)
@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
def test_twenty_steps_of_full_fine_tuning_are_exact(sim, setting, kind):
    def script(run):
        adam = kind == "AdamW"
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01) if adam else sgd(run)
        train(run, 20, 1, optimizer)

    report = assert_trains_equally(net, script, setting)
    assert report.passes >= 20


@over(SOME)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gradients_accumulate_over_micro_batches(sim, setting, count):
    assert_trains_equally(net, partial(train, steps=4, batches=count), setting)


@over(SOME)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_cleared_either_way(sim, setting, to_none):
    def script(run):
        optimizer = sgd(run)
        for number in range(4):
            run.backward(run.loss(number))
            run.backward(run.loss(number + 100))
            optimizer.step()
            if number % 2:
                optimizer.zero_grad(set_to_none=to_none)
            else:
                run.model.zero_grad(set_to_none=to_none)
            run.look()

    assert_trains_equally(net, script, setting)


@over([*ALL, Setting("hpu", "layers", "most"), Setting("hpu", "blocks", "most")])
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "looked at"])
def test_edits_of_what_stays_on_the_device_are_kept_when_training_begins(
    sim, setting, moved
):
    """Until it trains, what stays is edited where it is, which may leave no trace."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            for each in range(2):
                with torch.no_grad():
                    run.note("a look", run.model(run.batch(each)))
            if moved:
                run.model.to(run.place)
            torch.accelerator.synchronize()  # what is loaded ahead is loaded again
            for parameter in run.model.parameters():
                parameter.data.mul_(0.5)
            run.backward(run.loss(number))
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over([Setting("hpu", "layers", "third"), Setting("hpu", "layers", "all")])
@pytest.mark.parametrize("how", ["moved", "converted"])
def test_edits_are_kept_of_what_is_placed_between_steps(sim, setting, how, tmp_path):
    """What trains is on the host then, as after a pass: an edit leaves a sample."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            run.backward(run.loss(number))
            step(optimizer)
            with torch.no_grad():
                run.note("a look", run.model(run.batch(number)))
            if run.runtime is not None and how == "moved":
                run.model.to(run.place)
            elif run.runtime is not None and number == 1:
                file = tmp_path / "model.safetensors"
                save_file(
                    {k: v.clone() for k, v in run.model.state_dict().items()}, file
                )
                run.runtime.convert_registry_to_file_backed_sharded(tmp_path)
            torch.accelerator.synchronize()  # what is loaded ahead is loaded again
            for parameter in run.model.parameters():
                parameter.data.mul_(0.5)

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_gradients_that_a_look_brings_along_are_added_to(sim, setting):
    """Whoever looks in inference mode makes no inference tensors of them."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            run.backward(run.loss(number))
            if run.runtime is not None:
                run.runtime.park()
            with torch.inference_mode():
                run.note("a look", run.model(run.batch(number)))
            run.backward(run.loss(number + 100))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    assert_trains_equally(net, script, setting)


@over([TIGHT, Setting("cpu", "layers", "smallest"), Setting("cpu", "blocks", "third")])
@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_are_clipped_together(sim, setting, foreach):
    def script(run):
        optimizer = sgd(run)
        clip = nn.utils.clip_grad_norm_
        for number in range(4):
            run.backward(run.loss(number))
            norm = clip(run.model.parameters(), 0.01, foreach=foreach)
            run.note("norm", norm)
            run.look()
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over([Setting("hpu", mode, "third") for mode in ("layers", "blocks")])
@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_on_both_sides_are_clipped_to_one_norm(sim, setting, foreach):
    """Their norms are added side by side: the last bits of the sum may differ."""
    norms = []

    def script(run):
        run.backward(run.loss())
        for limit in (0.01, 1.0):
            parameters = run.model.parameters()
            norms.append(nn.utils.clip_grad_norm_(parameters, limit, foreach=foreach))

    assert_trains_equally(net, script, setting)
    resident, clipped = norms[:2], norms[2:]
    torch.testing.assert_close(clipped, resident, check_device=False)
    assert clipped[0] > 0.1
    assert clipped[1].item() == pytest.approx(0.01, rel=1e-4)


class OneRatio(torch.optim.Optimizer):
    """Steps by one ratio of all weights and gradients, as LAMB and Prodigy do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        weights = self.param_groups[0]["params"]
        norms = [
            torch.cat([t.flatten() for t in each]).norm()
            for each in (weights, [w.grad for w in weights])
        ]
        ratio = norms[0] / norms[1]
        for weight in weights:
            weight.sub_(weight.grad * ratio, alpha=0.01)


MIXED = [Setting("hpu", mode, "most") for mode in ("layers", "blocks")]
"""Some of what trains is on the device between passes, and some on the host."""


@over([*SOME, *MIXED])
def test_an_optimizer_that_wants_one_side_has_it_by_a_hook(sim, setting):
    def script(run):
        optimizer = run.optimizer(OneRatio)
        if run.runtime is not None:
            optimizer.register_step_pre_hook(lambda *_: run.runtime.park())
        train(run, optimizer=optimizer)

    assert_trains_equally(net, script, setting)


@over([*SOME, *MIXED])
def test_lbfgs_has_one_side_by_its_closure(sim, setting):
    def script(run):
        optimizer = run.optimizer(torch.optim.LBFGS, lr=0.1, max_iter=4)

        def closure(number):
            optimizer.zero_grad()
            loss = run.loss(number)
            run.backward(loss)
            if run.runtime is not None:
                run.runtime.park()
            return loss

        for number in range(3):
            run.note("loss", optimizer.step(partial(closure, number)))

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_gradients_that_the_user_keeps_keep_their_values(sim, setting):
    def script(run):
        optimizer = sgd(run)
        kept = []
        for number in range(4):
            run.backward(run.loss(number))
            kept.append([p.grad for p in run.model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.note("gradients that were kept", kept)

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_gradients_that_the_user_assigns_are_added_to(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            for parameter in run.model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
            run.backward(run.loss(number))
            optimizer.step()

    assert_trains_equally(net, script, setting)


# What is trained


class Adapted(nn.Module):
    """A frozen linear layer and a small trained side path."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedNet(Net):
    """Frozen but for small adapters inside of the blocks or beside them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.requires_grad_(False)
        if inside:
            self.blocks = nn.ModuleList(Adapted() for _ in range(5))
        else:
            self.sides = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.inside = inside

    def around(self, block, x):
        if self.inside:
            return block(x)
        number = list(self.blocks).index(block)
        return block(x) + self.sides[number](x)


@built
def adapted_net():
    return AdaptedNet(inside=True)


@built
def flanked_net():
    return AdaptedNet(inside=False)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@over(SOME)
@pytest.mark.parametrize("build", [adapted_net, flanked_net])
def test_small_adapters_on_a_frozen_base_train_exactly(sim, setting, build):
    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01, of=trained(run.model))
        train(run, 5, optimizer=optimizer)

    assert_trains_equally(build, script, setting)


@over([Setting("hpu", "blocks", budget) for budget in ("smallest", "third", "all")])
def test_frozen_blocks_cause_no_copy_to_the_host(sim, setting):
    run = start(flanked_net, setting)
    for number in range(5):
        run.loss(number).backward()
        run.model.zero_grad()
    assert run.runtime.report().saved_bytes == sim.d2h_bytes() == 0
    end(run)


@over(SOME)
def test_some_blocks_are_frozen_and_some_trained(sim, setting):
    def script(run):
        for number in (0, 3):
            run.model.blocks[number].requires_grad_(False)
        run.model.blocks[2].down.requires_grad_(False)
        run.model.entry.weight.requires_grad_(False)
        train(run, 5, 1)

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_parameters_are_frozen_and_thawed_between_steps(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for turn in range(9):
            for number, block in enumerate(run.model.blocks):
                block.requires_grad_((number + turn) % 3 != 0)
            run.backward(run.loss(turn))
            step(optimizer)

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_gradients_of_what_is_frozen_later_leave_pinned_memory(sim, setting):
    run = start(net, setting)
    run.loss().backward()
    run.model.zero_grad()
    pool = run.runtime._parts.pinned_arena
    held = pool.leased_bytes
    frozen = run.model.blocks[:4].requires_grad_(False)
    run.loss().backward()
    gradients = sum(p.numel() * p.element_size() for p in frozen.parameters())
    assert pool.leased_bytes <= held - gradients
    end(run)


def test_gradients_lack_their_places_until_they_have_come_and_always_two_to_arrive(sim):
    """What is kept of files leaves so much pinned memory to them."""
    run = start(net, TIGHT)
    loss = run.loss()
    homes = [home.parameter for home in HOMES.values()]
    sizes = [parameter.numel() * parameter.element_size() for parameter in homes]
    gradients = run.runtime._uses.gradients
    assert gradients.missing_bytes == sum(sizes) + 2 * max(sizes)
    loss.backward()
    assert gradients.missing_bytes == 2 * max(sizes)
    run.model.zero_grad()
    del loss, homes
    end(run)


@over(SOME)
def test_gradients_stay_as_they_are_where_graphs_go_on_through_what_was_frozen(
    sim, setting
):
    """Autograd's nodes of a graph from before are there, and add nothing."""

    def script(run):
        run.backward(run.loss(0))
        loss = run.loss(1)
        for block in run.model.blocks[::2]:
            block.requires_grad_(False)
        run.backward(loss)
        for block in run.model.blocks:
            block.requires_grad_(True)
        run.backward(run.loss(2))
        step(sgd(run))

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_gradients_that_the_user_keeps_of_what_is_frozen_keep_their_values(
    sim, setting
):
    """Of what trains instead they lie elsewhere."""

    def script(run):
        first, second = run.model.blocks[:2]
        second.requires_grad_(False)
        run.backward(run.loss(0))
        kept = [p.grad for p in first.parameters()]
        run.model.zero_grad()
        first.requires_grad_(False)
        second.requires_grad_(True)
        run.backward(run.loss(1))
        run.note("gradients that were kept", kept)

    assert_trains_equally(net, script, setting)


class Hollow(Residual):
    """Has a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(WIDTH, 0))

    def forward(self, x):
        return super().forward(x + x @ self.nothing @ self.nothing.t())


@over([Setting("hpu", mode, "smallest") for mode in ("layers", "blocks")])
def test_weights_without_elements_get_gradients_without_any(sim, setting):
    @built
    def build():
        model = Net()
        model.blocks = nn.ModuleList(Hollow() for _ in range(5))
        return model

    assert_trains_equally(build, partial(train, steps=3), setting)


HELD = [
    Setting("hpu", mode, budget)
    for mode in ("layers", "blocks")
    for budget in ("third", "all")
]


@over([*HELD, Setting("cpu", "layers", "third")])
def test_gradients_stay_beside_what_is_frozen_between_micro_batches(sim, setting):
    """A block that stayed on the device lay there without its gradient."""

    def script(run):
        optimizer = sgd(run)
        for turn in range(3):
            run.backward(run.loss(turn))
            frozen = run.model.blocks[turn:].requires_grad_(False)
            run.backward(run.loss(10 + turn))
            with torch.no_grad():
                run.loss(20 + turn)
            run.look()
            frozen.requires_grad_(True)
            run.backward(run.loss(30 + turn))
            step(optimizer)

    assert_trains_equally(net, script, setting)


class Passing(Net):
    """Leaves a block out."""

    def around(self, block, x):
        return x if block is self.blocks[1] else block(x)


@built
def begun_net():
    """Has gradients from before it is streamed, and is frozen."""
    model = Passing()
    sum(p.square().sum() for p in model.parameters()).backward()
    return model.requires_grad_(False)


@over(HELD)
def test_gradients_come_home_with_what_begins_to_train(sim, setting):
    """They lay on the device beside what stays there, and were left there."""

    def script(run):
        run.loss(0)
        run.model.requires_grad_(True)
        loss = run.loss(1)
        run.look()
        run.backward(loss)
        step(sgd(run))

    assert_trains_equally(begun_net, script, setting)


@built
def grown_net():
    """Has gradients from before it is streamed."""
    model = net()
    sum(p.square().sum() for p in model.parameters()).backward()
    return model


@pytest.mark.parametrize("budget", ["smallest", "third", "most", "all"])
@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_gradients_from_before_do_not_go_to_the_device_with_what_stays(
    sim, mode, budget
):
    """In passes without gradients; they were beside the budget, and as large."""

    def script(run):
        with torch.no_grad():
            before = sim.allocated_bytes()
            run.note("a look", run.model(run.batch(1)))
            run.note("another", run.model(run.batch(2)))
            if run.runtime is not None:
                small = [p.grad for p in run.model.parameters() if p.dim() < 2]
                placed = run.runtime.report().peak_device_bytes
                placed += 2 * sum(grad.nbytes for grad in small)
                assert sim.allocated_bytes() - before <= placed
        train(run)

    assert_trains_equally(grown_net, script, Setting("hpu", mode, budget))


# Between steps


VALIDATION = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


@over(SOME)
@pytest.mark.parametrize("mode", VALIDATION)
def test_validation_between_steps_changes_nothing(sim, setting, mode):
    def script(run):
        optimizer = sgd(run)
        for number in range(4):
            run.model.train()
            run.backward(run.loss(number))
            run.model.eval()
            with VALIDATION[mode]():
                run.note("before", run.loss(100))
            step(optimizer)
            with VALIDATION[mode]():
                run.note("after", run.loss(100))
                run.note("after", run.loss(101))

    assert_trains_equally(net, script, setting)


@over(SOME)
def test_validation_between_forward_and_backward_changes_nothing(sim, setting):
    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            loss = run.loss(number)
            with torch.no_grad():
                run.note("validation", run.loss(100))
            run.backward(loss)
            step(optimizer)

    assert_trains_equally(net, script, setting)


class Skipping(Net):
    """Leaves blocks out, as layer drop and early exits do."""

    kept = (0, 1, 2, 3, 4)

    def forward(self, x):
        for number in self.kept:
            x = self.blocks[number](x)
        return x


@built
def skipping_net():
    return Skipping()


@over(SOME)
def test_a_step_on_blocks_that_were_loaded_ahead_is_used(sim, setting):
    """An early exit leaves later blocks on their way; then the optimizer steps."""

    def script(run):
        optimizer = sgd(run)
        for number, last in enumerate([5, 5, 5, 2, 5, 3, 1, 5, 5]):
            run.model.kept = tuple(range(last))
            run.backward(run.loss(number))
            optimizer.step()  # momentum moves weights that have no new gradient, too
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(1.01)
            optimizer.zero_grad(set_to_none=False)

    assert_trains_equally(skipping_net, script, setting)


@over(FEW)
def test_weights_edited_through_data_between_steps_are_used(sim, setting):
    def script(run):
        average = [p.detach().cpu().clone() for p in run.model.parameters()]
        optimizer = sgd(run)
        for number in range(4):
            run.backward(run.loss(number))
            step(optimizer)
            for parameter, mean in zip(run.model.parameters(), average, strict=True):
                mean.lerp_(parameter.detach().cpu(), 0.5)
                parameter.data.copy_(mean)

    assert_trains_equally(net, script, setting)


@over(FEW)
def test_an_optimizer_steps_after_blocks_were_used_by_hand(sim, setting):
    """A block's weights are beside their gradients again."""

    def script(run):
        optimizer = sgd(run)
        for number in range(4):
            run.backward(run.loss(number))
            if run.runtime is not None:
                for block in run.runtime.block_ids:
                    run.runtime.before_block(block)
                    run.runtime.after_block(block)
            run.look()
            step(optimizer)

    assert_trains_equally(net, script, setting)


def test_page_locked_memory_that_holds_no_gradients_warns_once(sim):
    with pytest.warns(StagehandWarning) as caught:
        assert_trains_equally(net, train, TIGHT, ram_budget=30_000)
    found = [w for w in caught if "no page-locked memory is left" in str(w.message)]
    assert len(found) == 1


FEW_THREADS = "PyTorch uses 1 of the 16 processors .* take 16 times .*set_num_threads"


@pytest.mark.filterwarnings("error:PyTorch uses")
def test_training_on_one_of_many_processors_warns_once(sim, monkeypatch):
    """`accelerate launch` allows PyTorch one thread, unless it is told otherwise."""
    monkeypatch.setattr(gradients, "processors", lambda: 16)
    with pytest.warns(StagehandWarning, match=FEW_THREADS) as caught:
        assert_trains_equally(net, train, TIGHT)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error:PyTorch uses")
@pytest.mark.parametrize(
    ("build", "threads", "usable"), [(net, 1, 3), (net, 5, 16), (flanked_net, 1, 16)]
)
def test_training_on_the_device_or_on_enough_processors_does_not_warn(
    sim, monkeypatch, build, threads, usable
):
    monkeypatch.setattr(gradients, "processors", lambda: usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    setting = Setting("hpu", "blocks", "third")
    assert_trains_equally(build, lambda run: run.loss(0).backward(), setting)


@over(SOME)
def test_step_after_forwards_that_do_not_go_back_waits_for_what_was_loaded_ahead(
    sim, setting
):
    """The next forward was expected, and its first copies were not in the mark."""

    def script(run):
        optimizer = sgd(run)
        for _ in range(2):
            run.backward(run.loss())
            for number in range(3):
                run.note("a loss", run.loss(number))
            step(optimizer)

    assert_trains_equally(net, script, setting)
