"""Weights that somebody changes while they are streamed: used at once, never lost."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at, interrupted_at_call
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    blocks_of,
    run_resident,
    runtime_of,
    smallest_budget,
    stack,
    values,
)
from stagehand.core.transfer import TransferEngine
from stagehand.errors import OrphanedParameterError
from stagehand.residency.blocks import Block
from stagehand.residency.mover import Mover
from stagehand.torch_private import top_saved_hooks


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    """Where to run. Edits under a prefetch in flight are on the record, and no harm.

    A copy that was queued before its source was edited is thrown away: that is what
    these tests are about.
    """
    yield request.param
    assert {r for r in sim.races() if "host buffer rewritten" not in r} == set()
    sim.clear_races()


@torch.no_grad()
def add_in_place(parameter):
    parameter.add_(0.125)


@torch.no_grad()
def write_one_row(parameter):
    parameter[0] = 0.25


def add_through_data(parameter):
    parameter.data += 0.125


def copy_through_data(parameter):
    parameter.data.copy_(torch.full(parameter.shape, 0.125))


def assign_data(parameter):
    parameter.data = torch.full(parameter.shape, 0.25)


def assign_data_of_old_data(parameter):
    parameter.data = parameter.data.cpu() * 0.5


def assign_other_strides(parameter):
    whole = torch.linspace(0, 1, parameter.numel())
    parameter.data = whole.reshape(*reversed(parameter.shape)).t()


def optimizer_step(parameter):
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.125).step()
    parameter.grad = None


EDITS = [
    add_in_place,
    write_one_row,
    add_through_data,
    copy_through_data,
    assign_data,
    assign_data_of_old_data,
    assign_other_strides,
    optimizer_step,
]


def weights(model):
    return [layer[0].weight for layer in model]


def streamed_stack(place, **options):
    model = stack()
    plain = deepcopy(model)
    options.setdefault("vram_budget", 4 * LAYER_BYTES)
    stagehand.layer(model, device=place, **options)
    return model, plain


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    ("layers", "pinned_layers"),
    [(4, None), (3, 3), (2, 5)],
    ids=["pinned", "staged", "staged_far_ahead"],
)
def test_an_edit_between_passes_is_used_in_the_next_and_there_after_shutdown(
    place, edit, layers, pinned_layers
):
    options = {"vram_budget": layers * LAYER_BYTES}
    if pinned_layers and place == "cpu":
        pytest.skip("the host has one memory: ram_budget is the budget there")
    if pinned_layers:
        options["ram_budget"] = pinned_layers * LAYER_BYTES
    model, plain = streamed_stack(place, **options)
    x = batch()
    states = set()
    for number in range(5):
        with torch.no_grad():
            output = model(x)
        assert_bitwise_equal(output, run_resident(plain, place, x), f"pass {number}")
        # All of them: some are away, some resident, some loaded ahead already, or at
        # least staged: that depends on when a thread has read them.
        staged = runtime_of(model)._parts.loader.staged()
        states |= {(b.stays, bool(b.slot) or b in staged) for b in blocks_of(model)}
        for mine, theirs in zip(weights(model), weights(plain), strict=True):
            edit(mine)
            edit(theirs)
    assert states >= {(False, False), (False, True)}
    assert (True, True) in states or layers == 2
    with torch.no_grad():
        model(x)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("number", range(6))
def test_an_edit_of_one_layer_survives_shutdown_without_another_pass(
    place, edit, number
):
    model, plain = streamed_stack(place)
    with torch.no_grad():
        model(batch())
        model(batch())
    edit(weights(model)[number])
    edit(weights(plain)[number])
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


def assert_edits_are_used(model, plain, place, x):
    """Of the next pass and after shutdown, for which this is the end."""
    with torch.no_grad():
        output = model(x)
    assert_bitwise_equal(output, run_resident(plain, place, x), "the next pass")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("passes", [0, 2])
def test_edits_between_uses_by_hand_are_used(place, edit, passes):
    """What streams is on the host again, whatever was loaded ahead of the next use."""
    model, plain = streamed_stack(place)
    x, runtime = batch(), runtime_of(model)
    with torch.no_grad():
        for _ in range(passes):
            model(x)
    for name in runtime.block_ids:
        runtime.before_block(name)
        runtime.after_block(name)
        for mine, theirs in zip(weights(model), weights(plain), strict=True):
            edit(mine)
            edit(theirs)
    assert_edits_are_used(model, plain, place, x)


@pytest.mark.parametrize(
    "edit",
    [e for e in EDITS if e not in (add_through_data, copy_through_data)],
    ids=lambda e: e.__name__,
)
@pytest.mark.parametrize("passes", [0, 2])
def test_edits_in_a_use_by_hand_are_used_and_at_home_after_it(place, edit, passes):
    """Where weights stay on the device as well. Only what leaves no trace is lost."""
    model, plain = streamed_stack(place)
    x, runtime = batch(), runtime_of(model)
    with torch.no_grad():
        for _ in range(passes):
            model(x)
    for name in runtime.block_ids:
        runtime.before_block(name)
        here = {id(tensor) for tensor in runtime._block(name).tensors}
        for mine, theirs in zip(weights(model), weights(plain), strict=True):
            if id(mine) in here:
                edit(mine)
                edit(theirs)
        runtime.after_block(name)
        for mine, theirs in zip(weights(model), weights(plain), strict=True):
            if id(mine) in here:
                assert_bitwise_equal(mine.data.cpu(), theirs.data, f"after {name}")
                assert mine.is_cpu or runtime._block(name).stays
    assert_edits_are_used(model, plain, place, x)


def test_an_edit_before_the_first_pass_is_used(place):
    model, plain = streamed_stack(place)
    for edited in (model, plain):
        for parameter in weights(edited):
            assign_data(parameter)
            add_in_place(parameter)
    with torch.no_grad():
        output = model(batch())
    assert_bitwise_equal(output, run_resident(plain, place, batch()), "first pass")
    runtime_of(model).shutdown()


def test_edits_of_biases_and_of_the_small_rest_are_used(place):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)), nn.LayerNorm(4))
    model[5] = nn.LayerNorm(WIDTH)
    plain = deepcopy(model)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    for edit in (add_in_place, add_through_data, assign_data, copy_through_data):
        for mine, theirs in zip(model, plain, strict=True):
            edit(mine.bias)
            edit(theirs.bias)
        with torch.no_grad():
            output = model(batch())
        assert_bitwise_equal(output, run_resident(plain, place, batch()), edit.__name__)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


class Counting(nn.Module):
    """Changes its own weight in every pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(0.125)
        return x @ self.weight


def changing(kind=Counting, count=8):
    """A model that changes itself, one that is resident, and how it is streamed."""
    model = nn.Sequential(*(kind() for _ in range(count)))
    return model, deepcopy(model)


def under_way(model):
    return [block.sent is not None for block in blocks_of(model)]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_weights_that_change_in_every_pass_come_home_exactly_and_within_the_budget(
    place, slots
):
    model, plain = changing()
    plain = plain.to(place)
    stagehand.layer(model, vram_budget=slots * LAYER_BYTES, device=place)
    runtime, saved = runtime_of(model), 0
    for number in range(6):
        with torch.no_grad():
            assert_bitwise_equal(
                model(batch()), plain(batch().to(place)), f"pass {number}"
            )
        assert not any(under_way(model))
        away = [b for b in blocks_of(model) if not b.bound]
        saved += sum(block.nbytes for block in away)
        if number < 2:  # later, what stays is saved when the plan changes, too
            assert runtime.report().saved_bytes == saved
    account = runtime._parts.device_arena.account
    assert account.peak_bytes <= slots * LAYER_BYTES
    runtime.shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


def test_a_changed_weight_is_read_as_it_is_while_its_bytes_come_home_and_after(place):
    """By a hook of another module, on the device and on the host."""
    model, plain = changing()
    plain = plain.to(place)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    found, later = {}, []

    def look(number):
        def hook(module, args, output):
            for other in range(number - 3, number):
                weight = model[other].weight
                state = under_way(model)[other], weight.device.type
                found[state] = found.get(state, 0) + 1
                expected = plain[other].weight.detach().clone()
                if number % 2:  # the host goes on
                    later.append((weight.detach().clone(), expected))
                else:
                    assert torch.equal(weight.cpu(), expected.cpu()), (number, other)

        return hook

    for passes in range(8):
        if passes == 2:  # else what they read would stay on the device
            for number in range(3, 8):
                model[number].register_forward_hook(look(number))
        with torch.no_grad():
            plain(batch().to(place))
            model(batch())
    for read, expected in later:
        assert torch.equal(read.cpu(), expected.cpu())
    if place != "cpu":
        assert found[True, "hpu"] >= 6
        assert found[False, "cpu"] >= 6
    runtime_of(model).shutdown()


class Detour(nn.Sequential):
    """Goes back to one of its modules where nobody expects it."""

    back = None

    def forward(self, x):
        for number, module in enumerate(self):
            x = module(x)
            if self.back is not None and number == self.back + 1:
                x = self[self.back](x)
        return x


def test_a_module_that_changes_itself_again_while_its_bytes_come_home_loses_nothing(
    place,
):
    model, _ = changing()
    model = Detour(*model)
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    met = []
    for number, module in enumerate(model):
        module.register_forward_pre_hook(
            lambda module, args, number=number: met.append(under_way(model)[number])
        )
    for back in (None, None, 0, 3, None, 6, 2):
        model.back = plain.back = back
        with torch.no_grad():
            assert_bitwise_equal(
                model(batch()), plain(batch().to(place)), f"back to {back}"
            )
        assert_bitwise_equal(values(model), values(plain), f"after {back}")
    assert any(met) is (place != "cpu")
    runtime_of(model).shutdown()


def halve_through_data(parameter):
    parameter.data = parameter.data * 0.5


@pytest.mark.parametrize("edit", [add_in_place, halve_through_data])
def test_a_change_from_elsewhere_while_the_bytes_come_home_is_not_lost(sim, edit):
    """A copy that an edit in place overtakes is on the record, and thrown away."""
    model, plain = changing()
    plain = plain.to("hpu")
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    met = []

    def change(number):
        def hook(module, args, output):
            met.append(under_way(model)[number])
            for each in (model, plain) if met[-1] else ():
                edit(each[number].weight)

        return hook

    overtakes = edit is add_in_place
    with sim.expect_races("a copy") if overtakes else contextlib.nullcontext():
        for passes in range(6):
            if passes == 2:  # else what it reads would stay on the device
                for number in range(3, 8):
                    model[number].register_forward_hook(change(number - 2))
            with torch.no_grad():
                expected = plain(batch().to("hpu"))
                assert_bitwise_equal(model(batch()), expected, f"pass {passes}")
            assert_bitwise_equal(values(model), values(plain), f"after pass {passes}")
    assert any(met)
    runtime_of(model).shutdown()


def test_two_models_that_change_and_make_room_for_each_other_lose_nothing(place):
    pairs = [changing() for _ in range(2)]
    for model, plain in pairs:
        plain.to(place)
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    for number in range(4):
        for model, plain in pairs:
            with torch.no_grad():
                assert_bitwise_equal(
                    model(batch()), plain(batch().to(place)), f"pass {number}"
                )
    for model, plain in pairs:
        runtime_of(model).shutdown()
        assert_bitwise_equal(values(model), values(plain), "after shutdown")


class Failing(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise RuntimeError("half of the model has run")
        return x


@pytest.mark.parametrize("at", [1, 4, 7])
def test_what_has_changed_before_a_pass_fails_is_home_when_it_has_failed(place, at):
    model, _ = changing()
    model.insert(at, Failing())
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    for number in range(6):
        model[at].fails = plain[at].fails = number % 2 == 1
        outputs = []
        for each, x in ((model, batch()), (plain, batch().to(place))):
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                outputs.append(each(x))
        assert len(outputs) == (0 if number % 2 else 2)
        assert_bitwise_equal(outputs[1:], outputs[:1], f"pass {number}")
        assert_bitwise_equal(values(model), values(plain), f"after pass {number}")
        assert not any(under_way(model))
    runtime_of(model).shutdown()


class Counted(Counting):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        x = super().forward(x)
        self.count += 1
        return x


_MOVING = {f"stagehand.residency.{name}" for name in ("mover", "lookahead")}


def test_an_interrupt_between_any_two_lines_of_a_move_loses_nothing(place):
    model = nn.Sequential(*(Counted() for _ in range(8)))
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    interrupts = 0
    for line in range(1, 800, 7):
        with torch.no_grad():
            try:
                with interrupted_at(line, *_MOVING):
                    model(batch())
            except KeyboardInterrupt:
                interrupts += 1
            if line % 2:  # else the next pass finds what was left
                changed = [torch.eye(WIDTH) + 0.125 * each.count for each in model]
                assert_bitwise_equal(values(model), changed, f"line {line}")
            x = batch()
            for each in model:
                x = x @ (torch.eye(WIDTH) + 0.125 * (each.count + 1))
            torch.testing.assert_close(model(batch()).cpu(), x)
    assert interrupts >= 60
    runtime_of(model).shutdown()


def test_an_interrupt_while_tensors_are_pointed_elsewhere_loses_no_weight(sim):
    """Those that still pointed into the slot were taken for assigned when others had
    it, and what lay there then became the weight."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), stack(5))
    weights, expected = values(model), run_resident(model, "hpu", batch())
    other = stack()
    budget = smallest_budget(model, "hpu")
    stagehand.layer(model, vram_budget=budget, device="hpu")
    stagehand.layer(other, vram_budget=budget, device="hpu")
    moves = Block.arrive, Block.leave, Block._turn_to, Block.point_to_host
    interrupts = 0
    with torch.no_grad():
        model(batch()), other(batch())
        for line in range(1, 200):
            try:
                with interrupted_at(line, *moves):
                    model(batch())
                    other(batch())
            except KeyboardInterrupt:
                interrupts += 1
            assert_passes_equal(model, expected, batch(), passes=2)
            other(batch())
            assert_passes_equal(model, expected, batch(), passes=1)
    assert interrupts > 100
    runtime_of(model).shutdown()
    runtime_of(other).shutdown()
    assert_bitwise_equal(values(model), weights, "the weights")


def test_a_load_that_was_dropped_before_an_interrupt_came_is_made_again(sim):
    """Its block was taken for loaded, with what its slot had held many passes ago."""
    model, plain = changing()
    for number in range(8):  # each slot holds several in turn
        for each in (model, plain):
            each[number].weight.data.mul_(number + 1)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device="cpu")
    readers = runtime_of(model)._parts.loader._workers
    interrupts = 0
    for line in range(1, 40):
        free = threading.Event()

        def hold(*_, free=free):
            for _ in range(2):
                readers.submit(free.wait, 10)  # the rest comes behind

        with torch.no_grad():
            assert_bitwise_equal(model(batch()), plain(batch()), f"before {line}")
            handle = model[-2].register_forward_hook(hold)
            assert_bitwise_equal(model(batch()), plain(batch()), f"line {line}")
            handle.remove()
            try:
                with interrupted_at(line, Mover._leave, Mover.vacate):
                    runtime_of(model).park()
            except KeyboardInterrupt:
                interrupts += 1
            free.set()
            assert_bitwise_equal(model(batch()), plain(batch()), f"after {line}")
    assert interrupts >= 20
    runtime_of(model).shutdown()


def test_an_interrupt_before_a_pass_has_begun_gives_its_turn_back(place, monkeypatch):
    """It was taken for a pass that goes on: no gradient came home from then on."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runtime_of(model)._edges, "_close_dead", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
    assert runtime_of(model)._edges.lock.owner is None
    model(batch()).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    runtime_of(model).shutdown()


def test_an_interrupt_where_a_pass_begins_leaves_no_hooks_on_the_thread(
    place, monkeypatch
):
    """All that the thread saved later went through hooks that nobody took off."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stagehand.weights.strays.StrayUses", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(batch())
    assert top_saved_hooks() is None
    assert torch.is_autocast_cache_enabled()
    runtime_of(model).shutdown()


class Normalizing(nn.Module):
    """Changes its buffers: running statistics, and the vectors of a spectral norm."""

    def __init__(self):
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(linear)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.linear(x))


def test_buffers_that_change_in_training_mode_come_home(place):
    model, _ = changing(Normalizing)
    plain = deepcopy(model).to(place)
    budget = smallest_budget(deepcopy(model), place) + 3 * LAYER_BYTES
    stagehand.layer(model, vram_budget=budget, device=place)
    for number in range(5):
        with torch.no_grad():
            assert_bitwise_equal(
                model(batch()), plain(batch().to(place)), f"pass {number}"
            )
        assert_bitwise_equal(values(model), values(plain), f"after pass {number}")
    runtime_of(model).shutdown()


class Growing(nn.Module):
    """Notes what it is given, as observers of quantization do: from the first size."""

    def __init__(self, first, *sizes):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(first))
        self.register_buffer("behind", torch.ones(WIDTH))
        self.sizes = sizes or (4 * WIDTH,)

    def forward(self, x):
        x = self.linear(x)
        for size in self.sizes:
            self.seen.resize_(size).fill_(x.sum())
        return x * self.behind


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_empty_buffers_may_grow_in_a_forward(place, mode):
    """They grew over the tensors behind them in their image."""
    model = nn.Sequential(*(Growing(0) for _ in range(4)))
    plain = deepcopy(model).to(place)
    if mode == "layers":
        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
        runtime = runtime_of(model)
    else:
        runtime = stagehand.StagehandRuntime(model, None, r"^\d+$", device=place)
    for number in range(3):
        with torch.no_grad():
            expected = plain(batch().to(place))
            assert_bitwise_equal(model(batch()), expected, f"pass {number}")
        assert_bitwise_equal(values(model), values(plain), f"after pass {number}")
    runtime.shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


@pytest.mark.parametrize(
    "sizes", [(4 * WIDTH,), (400 * WIDTH,), (400 * WIDTH, 1)], ids=str
)
def test_another_buffer_that_grows_in_a_forward_is_refused(place, sizes):
    """What it had grown to was lost, in silence, and so was what it had grown over.
    Where it outgrew the memory of its block, bringing that home did not end.
    """
    model = nn.Sequential(*(Growing(1, *sizes) for _ in range(4)))
    plain = deepcopy(model)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    for _ in range(2):
        with torch.no_grad():
            model(batch())
        with pytest.raises(OrphanedParameterError, match="has its old values again"):
            model.state_dict()
        assert_bitwise_equal(values(model), values(plain), "old values")
    runtime_of(model).shutdown()


class Assigning(nn.Module):
    """Gives its own weight new values in every pass, behind the version counter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        self.weight.data = self.weight.data * 0.5
        return x @ self.weight


@pytest.mark.parametrize("changing", [Counting, Assigning])
def test_a_weight_changed_in_the_middle_of_a_pass_is_saved_before_its_slot_is_reused(
    place, changing
):
    model = nn.Sequential(*(changing() for _ in range(6)))
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)
    with torch.no_grad():
        for number in range(4):
            assert_bitwise_equal(
                model(batch()), plain(batch().to(place)), f"pass {number}"
            )
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


def test_loading_a_state_dict_into_a_running_model_replaces_every_weight(place):
    model, _ = streamed_stack(place)
    other = stack()
    for parameter in other.parameters():
        add_in_place(parameter)
    for passes in range(3):
        for _ in range(passes):
            with torch.no_grad():
                model(batch())
        for parameter in other.parameters():
            add_in_place(parameter)
        assert model.load_state_dict(other.state_dict()).missing_keys == []
        with torch.no_grad():
            output = model(batch())
        expected = run_resident(other, place, batch())
        assert_bitwise_equal(output, expected, f"after {passes} passes")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(other), "after shutdown")


def test_a_state_dict_loaded_by_assignment_replaces_every_weight(place):
    model, _ = streamed_stack(place)
    other = stack()
    for parameter in other.parameters():
        add_in_place(parameter)
    with torch.no_grad():
        model(batch())
    state = {k: nn.Parameter(v.clone()) for k, v in other.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        output = model(batch())
    assert_bitwise_equal(output, run_resident(other, place, batch()), "assigned")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(other), "after shutdown")


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("assign", [True, False])
def test_after_a_state_dict_is_loaded_a_recurrent_network_trains_as_a_plain_one(
    place, assign, with_gradients
):
    """It knows its weights by a list of its own, and kept what was assigned there."""

    def build():
        return nn.GRU(WIDTH, WIDTH, num_layers=2)

    first, other = build(), build()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), first)
    plain, own = deepcopy(model).to(place), list(model.parameters())
    stagehand.layer(model, vram_budget="1GB", device=place)
    found = []
    for one, device in ((model, "cpu"), (plain, place)):
        x = batch().to(device)
        one(x)[0].square().sum().backward()
        donor = deepcopy(other)
        if with_gradients:
            donor(batch())[0].sum().backward()
        state = donor.to(device).state_dict(keep_vars=True)
        state = one.state_dict() | {f"1.{k}": v for k, v in state.items()}
        one.load_state_dict(state, assign=assign)
        found.append(steps(one, x))
    assert_bitwise_equal(*found, "gradients, and what was computed")
    assert list(map(id, model.parameters())) == list(map(id, own))
    assert list(map(id, first._flat_weights)) == list(map(id, own[2:]))
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


def steps(model, x):
    """Gradients before each of two steps of training, and what the model returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for _ in range(2):
        found += [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
        output = model(x)[0]
        output.square().sum().backward()
        found.append(output.detach().cpu())
        optimizer.step()
    return found


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_is_loaded_into_layers_that_others_were_replaced_by(place, assign):
    """What was there before has left the model, or has another name, or no place."""
    model, plain = streamed_stack(place)
    for one in (model, plain):
        one[0] = nn.Sequential(one[0], nn.Linear(WIDTH, WIDTH))
        one[1], one[2] = one[2], one[1]
        one[4] = nn.Linear(WIDTH, 7)
        del one[5]
    state = {k: 0.5 * torch.ones_like(v) for k, v in plain.state_dict().items()}
    for one in (model, plain):
        loaded = {k: v.clone() for k, v in state.items()}
        one.load_state_dict(loaded, assign=assign)
    expected = run_resident(plain, place, batch())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "loaded")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), state, "after shutdown")


def test_a_swap_with_averaged_weights_and_back_leaves_no_trace(place):
    model, plain = streamed_stack(place)
    expected = run_resident(plain, place, batch())
    with torch.no_grad():
        model(batch())
    saved = [p.data.clone() for p in model.parameters()]
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(0.5)
    with torch.no_grad():
        output = model(batch())
    assert_bitwise_equal(output, run_resident(plain, place, batch()), "averaged")
    for parameter, old in zip(model.parameters(), saved, strict=True):
        parameter.data.copy_(old)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "swapped back")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("layers", [2, 4, 5])
def test_of_what_trains_one_element_swapped_after_a_validation_is_used(
    place, layers, frozen
):
    """As averages of bfloat16 weights: they differ in too few for a sample to tell."""
    model, plain = streamed_stack(place, vram_budget=layers * LAYER_BYTES)
    model(batch()).sum().backward()
    for number in range(4):
        with torch.no_grad():
            model(batch())
        for weight in (*weights(model), *weights(plain)):
            weight.data[number, 7 * number] += 0.5
        model.requires_grad_(not frozen)
        with torch.set_grad_enabled(number % 2 == 0 and not frozen):
            output = model(batch())
        assert_bitwise_equal(output, run_resident(plain, place, batch()), f"{number}")
        model.requires_grad_(True)
    del output
    runtime_of(model).shutdown()


class Quiet(torch.optim.Optimizer):
    """Steps what has a gradient, as torch's do, and moves no counter, as fused ones."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.data[..., 7] += 0.5


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_what_is_frozen_and_stepped_with_a_gradient_it_has_left_is_used(place, layers):
    model, plain = streamed_stack(place, vram_budget=layers * LAYER_BYTES)
    optimizers = []
    for each in (model, plain):
        each(batch()).sum().backward()
        each.requires_grad_(False)
        optimizers.append(Quiet(weights(each)))
    for number in range(3):
        with torch.no_grad():
            model(batch())
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            output = model(batch())
        assert_bitwise_equal(output, run_resident(plain, place, batch()), f"{number}")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("kind", ["trained", "frozen again", "never trained"])
def test_layers_that_stay_are_loaded_again_only_where_they_train(sim, kind):
    model, _ = streamed_stack("hpu", vram_budget=4 * LAYER_BYTES)
    if kind != "never trained":
        model(batch()).sum().backward()
    model.requires_grad_(kind != "frozen again")
    others = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    moved = []
    for _ in range(6):
        others.step()
        with torch.no_grad():
            model(batch())
        moved.append(runtime_of(model).report().streamed_bytes)
    a_pass = moved[-1] - moved[-2]
    assert (a_pass >= len(model) * LAYER_BYTES) == (kind == "trained")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("at", ["pass", "shutdown"])
def test_a_part_that_was_cast_is_refused_once_and_has_its_values_again(place, mode, at):
    model = nn.Sequential(stack())
    expected = run_resident(model, place, batch())
    if mode == "layers":
        stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device=place)
        runtime = runtime_of(model)
    else:
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=0.014, vram_low_watermark_mb=0.01
        )
        runtime = stagehand.StagehandRuntime(model, config, r"^0\.\d$", device=place)
    with torch.no_grad():
        model(batch())
    model[0].half()  # nobody is told of it
    refused = pytest.raises(stagehand.StagehandError, match=r"float16.* more were")
    with refused, torch.no_grad():
        runtime.shutdown() if at == "shutdown" else model(batch())
    if at == "pass":
        assert_passes_equal(model, expected, batch(), passes=1)
        runtime.shutdown()
    assert not hasattr(model, "_stagehand_layer_runtime")
    assert_bitwise_equal(run_resident(model, place, batch()), expected, "after")


class Reads:
    """Copies to the device, and which of them its own clock has not come to yet."""

    def __init__(self, monkeypatch):
        self.done = []
        plain = TransferEngine.load

        def load(engine, *args):
            ticket = plain(engine, *args)
            event = engine.device.new_event()
            event.record(engine.h2d.stream)
            self.done.append(event)
            return ticket

        monkeypatch.setattr(TransferEngine, "load", load)

    def left(self):
        assert self.done
        return sum(not event.query() for event in self.done)


class Looking(torch.optim.SGD):
    """An optimizer that has a look before it changes anything."""

    def __init__(self, model, look):
        super().__init__(model.parameters(), lr=0.5)
        self.look, self.seen = look, None

    def step(self, closure=None):
        self.seen = self.look()
        return super().step(closure)


@pytest.fixture
def reads(sim, monkeypatch):
    """With a link that takes long, and nothing loaded ahead."""
    sim.configure(h2d_gbps=0.01)
    return Reads(monkeypatch)


def test_a_pass_without_gradients_has_read_what_trains_when_it_returns(reads):
    model, plain = streamed_stack("hpu", prefetch_k=0)
    model(batch()).sum().backward()
    with torch.no_grad():
        output = model(batch())
        assert reads.left() == 0
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert_bitwise_equal(output, run_resident(plain, "hpu", batch()), "before")
    runtime_of(model).shutdown()


def test_a_backward_has_read_what_it_loaded_ahead_in_vain_when_it_returns(reads):
    model, _ = streamed_stack("hpu")
    for _ in range(4):
        model(batch()).sum().backward()
    model[2].register_forward_hook(lambda *given: given[-1].detach())
    loss = model(batch()).sum()
    model.zero_grad()
    reads.done.clear()
    loss.backward()
    assert reads.left() == 0
    runtime_of(model).shutdown()


def test_an_optimizer_steps_when_copies_have_read_what_it_changes(reads):
    model, _ = streamed_stack("hpu", prefetch_k=0)
    model(batch()).sum().backward()
    optimizer = Looking(model, reads.left)
    model(batch())  # its graph is dropped
    assert reads.left()  # the host is ahead
    optimizer.step()
    assert optimizer.seen == 0
    runtime_of(model).shutdown()


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_state_dict_is_loaded_when_copies_have_read_what_was_there(reads, ahead):
    """It did not wait for those that the next pass needs first."""
    model, plain = streamed_stack("hpu", prefetch_k=ahead, inference_mode=True)
    for _ in range(3):
        model(batch())
    torch.accelerator.synchronize()
    seen = []
    model.register_load_state_dict_pre_hook(lambda *_: seen.append(reads.left()))
    output = model(batch())
    assert reads.left()
    model.load_state_dict(values(plain))
    assert seen == [0]
    assert_bitwise_equal(output, run_resident(plain, "hpu", batch()), "before")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_state_of_a_part_is_loaded_when_copies_have_read_what_was_there(reads, ahead):
    """So adapters merge that replace their layer's forward; only a model's waited."""
    model, plain = streamed_stack("hpu", prefetch_k=ahead, inference_mode=True)
    for _ in range(3):
        model(batch())
    torch.accelerator.synchronize()
    seen = []
    inner = model[4][0]
    inner.register_load_state_dict_pre_hook(lambda *_: seen.append(reads.left()))
    output = model(batch())
    assert reads.left()
    merged = {name: 2 * value for name, value in plain[4].state_dict().items()}
    model[4].load_state_dict(merged)
    assert seen == [0]
    assert_bitwise_equal(output, run_resident(plain, "hpu", batch()), "before")
    plain[4].load_state_dict(merged)
    assert_bitwise_equal(
        model(batch()), run_resident(plain, "hpu", batch()), "with what was loaded"
    )
    runtime_of(model).shutdown()


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("wrong", [torch.zeros(2, 2), torch.zeros(WIDTH, WIDTH).half()])
def test_a_weight_assigned_in_another_form_is_refused_and_keeps_its_values(
    place, number, wrong
):
    model, plain = streamed_stack(place)
    with torch.no_grad():
        expected = model(batch())
        model(batch())
        weights(model)[number].data = wrong
        with pytest.raises(stagehand.StagehandError, match=r"shutdown\(\)"):
            model(batch())
        assert_bitwise_equal(model(batch()), expected, "after the refusal")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


class Reading(nn.Module):
    """A table whose rows are looked up on the host, and layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200, WIDTH)
        self.layers = stack()

    def forward(self, numbers):
        return self.layers(self.table(numbers))


def test_a_table_of_another_shape_is_refused_by_the_next_pass_not_by_the_shutdown(
    place,
):
    """Its rows were looked up, and the shutdown took back what they had learned."""
    model, numbers = Reading(), torch.arange(10)
    expected = run_resident(model, place, numbers)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    assert_passes_equal(model, expected, numbers)
    model.table.weight.data = torch.zeros(208, WIDTH)
    with torch.no_grad(), pytest.raises(OrphanedParameterError, match="'table'"):
        model(numbers)
    assert_passes_equal(model, expected, numbers)
    runtime_of(model).shutdown()
    assert model.table.weight.shape == (200, WIDTH)


class Routed(nn.Module):
    """Casts its router in its forward, as switch transformers do."""

    def __init__(self):
        super().__init__()
        self.router, self.layers = nn.Linear(WIDTH, WIDTH), stack()

    def forward(self, x):
        self.router = self.router.to(torch.float64)
        return self.layers(x * self.router(x.double()).to(x.dtype))


def test_what_a_forward_casts_itself_is_to_be_cast_before_the_model_streams(place):
    """The error said to stream the model again, whose next pass cast it again."""
    model, x = Routed(), batch()
    expected = run_resident(deepcopy(model), place, x)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    with pytest.raises(OrphanedParameterError, match="own forward casts has to be"):
        assert_passes_equal(model, expected, x)
    runtime_of(model).shutdown()
    model.router.to(torch.float64)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)
    assert_passes_equal(model, expected, x)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("leaves", [False, True], ids=["used again", "given up"])
def test_what_is_assigned_is_written_when_other_streams_have_read_what_was_there(
    sim, leaves
):
    """Where all is resident nothing is written, so no stream has to wait for it."""
    model, plain = streamed_stack("hpu")
    runtime = runtime_of(model)
    runtime.set_budget(20 * LAYER_BYTES)
    new, x = torch.full((WIDTH, WIDTH), 0.25), batch().to("hpu")
    with torch.no_grad():
        for _ in range(2):
            expected = model(x)
        torch.accelerator.synchronize()
        with torch.Stream("hpu"):
            output = model(x)
        weights(model)[2].data = new
        with torch.Stream("hpu"):
            if leaves:
                runtime._tenancy.give_up(0)
            changed = model(x)
        torch.accelerator.synchronize()
    assert_bitwise_equal(output, expected, "before the edit")
    weights(plain)[2].data = new
    assert_bitwise_equal(changed, run_resident(plain, "hpu", batch()), "after it")
    runtime.shutdown()


@pytest.mark.parametrize("part", ["layer", "norm"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_was_assigned_is_there_for_passes_on_any_stream(sim, at, part):
    """A later pass on another stream did not wait for the one that had taken it in."""
    layers = ((nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
    model = nn.Sequential(*itertools.chain(*layers))
    plain = deepcopy(model)
    stagehand.layer(model, device="hpu", vram_budget=20 * LAYER_BYTES)
    number = {"layer": 2, "norm": 3}[part]
    new = torch.rand_like(plain[number].weight)
    x, given = batch().to("hpu"), [new.to("hpu")]
    streams = [torch.Stream("hpu"), torch.Stream("hpu"), torch.Stream("hpu")]
    outputs = []
    with torch.no_grad():
        model(x)
        model(x)
        torch.accelerator.synchronize()
        for count, stream in enumerate(streams):
            if count == at:
                model[number].weight.data = given.pop()
            with stream:
                outputs.append(model(x))
        torch.accelerator.synchronize()
    for count, output in enumerate(outputs):
        if count == at:
            plain[number].weight.data = new
        expected = run_resident(plain, "hpu", batch())
        assert_bitwise_equal(output, expected, f"pass {count}")
    runtime_of(model).shutdown()


def test_what_a_pass_has_taken_in_without_a_use_is_there_for_the_next_one(sim):
    model, plain = streamed_stack("hpu", vram_budget=20 * LAYER_BYTES)
    x, new = batch().to("hpu"), torch.rand(WIDTH, WIDTH)
    given = new.to("hpu")
    with torch.no_grad():
        model(x)
        model(x)
        torch.accelerator.synchronize()
        weights(model)[2].data = given
        with torch.Stream("hpu"):
            model[0](x)
        output = model(x)
    weights(plain)[2].data = new
    assert_bitwise_equal(output, run_resident(plain, "hpu", batch()), "output")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("edit", ["whole", "one element"])
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("device", ["hpu", "cpu"])
def test_data_edit_of_a_weight_that_is_backed_by_a_file_counts_from_the_next_pass(
    device: str, block: int, edit: str, tmp_path: Path, sim: ModuleType
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(3, 64)
    expected = deepcopy(model)
    stagehand.layer(model, vram_budget=40_000, device=device)
    runtime = model._stagehand_layer_runtime
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    with torch.no_grad():
        model(x)
        for one in (model, expected):
            data = one[block].weight.data
            if edit == "whole":
                data.mul_(2)
            else:
                data[5, 7] = 100.0
        runtime.park()  # nothing of it is on its way any more
        reference = expected.to(device)(x.to(device)).cpu()
        assert torch.equal(model(x).cpu(), reference)
        assert torch.equal(model(x).cpu(), reference)
    runtime.shutdown()
    assert torch.equal(model[block].weight, expected[block].weight.cpu())


_TURNING = {
    "stagehand.core.turn",
    *(f"stagehand.weights.{name}" for name in ("edges", "hooks", "sites")),
}


class Halves(nn.Sequential):
    """Every other layer is recomputed."""

    def forward(self, x):
        for number, layer in enumerate(self):
            if number % 2 and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def _trained(model, place):
    model.zero_grad()
    model(batch().to(place).requires_grad_()).square().mean().backward()
    return [p.grad.cpu().clone() for p in model.parameters()]


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch leaves the hooks of an interrupted checkpoint to the collector",
)
def test_an_interrupt_where_a_pass_begins_or_ends_stops_nobody_for_ever(place):
    """A turn that nobody had was waited for, and other models' tensors were saved by
    the hooks of a checkpoint that was over."""
    model = Halves(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain = deepcopy(model).to(place)
    expected = _trained(plain, place)
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device=place)
    assert_bitwise_equal(_trained(model, place), expected, "before")
    number = interrupts = 0
    while interrupts >= number // 3:
        number += 3
        try:
            with interrupted_at_call(number, *_TURNING):
                _trained(model, place)
        except KeyboardInterrupt:
            interrupts += 1
        assert_bitwise_equal(_trained(plain, place), expected, f"plain {number}")
        with ThreadPoolExecutor(1) as other:
            found = other.submit(_trained, model, place).result(timeout=60)
        assert_bitwise_equal(found, expected, f"another thread {number}")
        assert_bitwise_equal(_trained(model, place), expected, f"this one {number}")
        assert top_saved_hooks() is None
        assert runtime_of(model)._edges.lock.owner is None
    assert interrupts > 40
    runtime_of(model).shutdown()


def test_an_interrupt_while_a_block_is_pinned_gives_its_memory_to_no_other(sim):
    """Its image was given back, and became another block's."""
    for line in itertools.count(1, 2):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        expected = run_resident(model, "hpu", batch())
        stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu")
        interrupted = False
        with torch.no_grad():
            try:
                with interrupted_at(line, *_PINNING):
                    model(batch())
            except KeyboardInterrupt:
                interrupted = True
            assert_passes_equal(model, expected, batch())
        runtime_of(model).shutdown()
        if not interrupted:
            break
    assert line > 100


_PINNING = {"stagehand.residency.masters", "stagehand.residency.blocks"}


def test_an_interrupt_between_two_marks_of_the_stopwatch_stops_no_later_pass(sim):
    """Marks that were never made, or made twice, were read: as an error, or as times
    that were negative."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    expected = run_resident(model, "hpu", batch())
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES, device="hpu", telemetry=True)
    interrupts = 0
    for line in range(1, 200):
        with torch.no_grad():
            try:
                with interrupted_at(line, "stagehand.core.stopwatch"):
                    model(batch())
            except KeyboardInterrupt:
                interrupts += 1
            assert_passes_equal(model, expected, batch())
    assert interrupts > 60
    runtime_of(model).shutdown()
