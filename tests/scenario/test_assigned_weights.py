"""Weights that others are put in the place of, by `.data`, and that come back."""

from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    batch,
    run_resident,
    runtime_of,
    stack,
    values,
)
from training import ALL, assert_trains_equally, built, net, over, sgd, train


def averages(model):
    return {n: (0.5 * p.data).clone() for n, p in model.named_parameters()}


def assigned_and_back(passes):
    """The weights are put aside, averages are in their place for a while."""

    def script(run):
        optimizer = sgd(run)
        train(run, steps=2, optimizer=optimizer)
        for number in range(2):
            kept, others = {}, averages(run.model)
            for name, parameter in run.model.named_parameters():
                kept[name] = parameter.data
                parameter.data = others[name]
            for each in range(passes):
                with torch.no_grad():
                    run.note("averaged", run.loss(each))
            if number:
                run.backward(run.loss(5))
                optimizer.zero_grad()
            run.note("kept", list(kept.values()))
            for name, parameter in run.model.named_parameters():
                parameter.data = kept[name]
            del kept, parameter
            train(run, steps=1, optimizer=optimizer)

    return script


def swapped(run):
    """Averages and weights change places, and go on to do so."""
    optimizer = sgd(run)
    others = averages(run.model)
    for number in range(4):
        for name, parameter in run.model.named_parameters():
            parameter.data, others[name] = others[name], parameter.data
        with torch.no_grad():
            run.note("output", run.loss(number))
        run.note("others", list(others.values()))
    del parameter
    train(run, steps=2, optimizer=optimizer)
    run.note("others", list(others.values()))


def swapped_blocks(run):
    """Weights of two blocks change places, and the two vectors of a norm."""
    optimizer = sgd(run)
    for number in range(3):
        train(run, steps=1, optimizer=optimizer)
        one, other = run.model.blocks[number], run.model.blocks[number + 1]
        for a, b in (
            (one.up.weight, other.up.weight),
            (one.norm.weight, one.norm.bias),
            (run.model.entry.weight, run.model.head.weight),
        ):
            a.data, b.data = b.data, a.data


SCRIPTS = {
    "put aside": assigned_and_back(0),
    "over a pass": assigned_and_back(1),
    "over passes": assigned_and_back(2),
    "swapped": swapped,
    "within the model": swapped_blocks,
}


@over(ALL)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_weights_whose_data_was_kept_keep_their_values_while_others_are_assigned(
    setting, script
):
    assert_trains_equally(net, script, setting, abandoned=True)


def streamed_stack(place, kind, folder):
    """Return a stack that is streamed in one of many ways, and a plain one.

    A small rest stays on the device, and two layers have one weight.
    """
    model = nn.Sequential(*stack(), nn.LayerNorm(WIDTH), *stack(2))
    if kind != "files":
        model[7][0].weight = nn.Parameter(model[8][0].weight.data)
    if kind == "frozen":
        model.requires_grad_(False)
    plain = deepcopy(model)
    options = {"vram_budget": (40 if kind in ("roomy", "frozen") else 5) * LAYER_BYTES}
    if kind == "staged" and place == "hpu":
        options["ram_budget"] = 6 * LAYER_BYTES
    stagehand.layer(model, device=place, **options)
    if kind == "files":
        save_file(plain.state_dict(), folder / "model.safetensors")
        runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    return model, plain


def output_of(model, x):
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("kind", ["tight", "roomy", "frozen", "staged", "files"])
def test_wherever_weights_are_those_that_were_put_aside_come_back_and_nothing_is_left(
    sim, place, kind, tmp_path
):
    model, plain = streamed_stack(place, kind, tmp_path)
    runtime, x = runtime_of(model), batch()
    parts = runtime._parts
    expected = run_resident(plain, place, x)
    others = deepcopy(plain)
    for parameter in others.parameters():
        parameter.data.mul_(0.5)
    averaged = run_resident(others, place, x)
    held = []
    for number in range(6):
        assert_bitwise_equal(output_of(model, x), expected, f"pass {number}")
        kept = [p.data for p in model.parameters()]
        for mine, other in zip(model.parameters(), others.parameters(), strict=True):
            mine.data = other.data
        for _ in range(number % 3):
            assert_bitwise_equal(output_of(model, x), averaged, f"averaged {number}")
        raw = [p.detach() for p in plain.parameters()]
        assert_bitwise_equal([k.cpu() for k in kept], raw, f"kept {number}")
        for mine, value in zip(model.parameters(), kept, strict=True):
            mine.data = value
        del kept, value, mine
        assert_bitwise_equal(output_of(model, x), expected, f"again {number}")
        held.append((parts.pinned_arena.leased_bytes, parts.weights.held_bytes))
    assert held[-1] == held[2], "what was left to others is not held any more"
    runtime.shutdown()
    assert runtime.report().peak_device_bytes <= runtime.report().budget_bytes
    assert_bitwise_equal(values(model), values(plain), "after shutdown")


class Counting(nn.Module):
    """Changes its own weight in every pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)

    def forward(self, x):
        self.weight.add_(0.125)
        return x @ self.weight


@pytest.mark.parametrize("budget", [3, 40])
def test_what_was_put_aside_has_the_changes_from_before_others_were_assigned(
    budget,
):
    model = nn.Sequential(*(Counting() for _ in range(6)))
    stagehand.layer(model, vram_budget=budget * LAYER_BYTES, device="cpu")
    kept = [layer.weight.data for layer in model]
    with torch.no_grad():
        model(batch())
        model(batch())
        for layer in model:
            layer.weight.data = torch.zeros(WIDTH, WIDTH)
        model(batch())
    runtime_of(model).shutdown()
    assert_bitwise_equal(kept, [torch.eye(WIDTH) + 0.25 for _ in kept], "kept")
    expected = torch.full((WIDTH, WIDTH), 0.125)
    for layer in model:
        assert_bitwise_equal(layer.weight, expected, "others")


class InParts(nn.Module):
    """Has a buffer that is a part of its weight: an optimizer changes both."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("part", self.layer.weight.detach()[8:])

    def forward(self, x):
        return self.layer(x) + nn.functional.pad(x @ self.part.t(), (0, 8))


class Net(nn.Module):
    """Some of these, and a plain layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(InParts(), nn.Linear(16, 16), InParts())

    def forward(self, x):
        return self.blocks(x)


@over([setting for setting in ALL if setting.place == "cpu"])
def test_on_the_host_a_buffer_that_is_a_part_of_a_weight_stays_so(setting):
    assert_trains_equally(built(Net), train, setting)
