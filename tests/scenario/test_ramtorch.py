"""Scripts for `ramtorch.helpers` train with the import changed, and nothing else."""

import io
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagehand
from scenario.small import LAYER_BYTES, WIDTH, batch, runtime_of, stack
from stagehand.compat.ramtorch import (
    move_model_to_device,
    reattach_is_ramtorch_flags,
    register_ramtorch_grad_hook,
    register_ramtorch_post_accumulate_grad_hook,
    replace_linear_with_ramtorch,
)
from streamed import Shape

BUDGET = 4 * LAYER_BYTES


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


class Tower(nn.Module):
    """Large layers and a small one: a norm, which stays on the device."""

    def __init__(self):
        super().__init__()
        self.layers = stack()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.norm(self.layers(x)) * self.scale


def tower():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return Tower()


def replaced(model, place, **options):
    options.setdefault("vram_budget", BUDGET)
    return replace_linear_with_ramtorch(model, place, **options)


def flagged(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in named if getattr(tensor, "is_ramtorch", False)}


def flagged_modules(model):
    return {
        name for name, m in model.named_modules() if getattr(m, "is_ramtorch", False)
    }


LINEAR = {f"layers.{number}.0" for number in range(6)}
STREAMED = {f"{name}.{leaf}" for name in LINEAR for leaf in ("weight", "bias")}


def train(model, place, steps=4):
    """The script of a user: move, optimize, print the losses."""
    model = move_model_to_device(model, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(batch().to(place) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(model, plain):
    state, expected = model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor.cpu(), expected[name].cpu()), name


@pytest.mark.parametrize(
    ("place", "budget"),
    [("cpu", BUDGET), ("cpu", "1GB"), ("hpu", BUDGET), ("hpu", "1GB")],
)
def test_script_trains_to_the_parameters_of_the_plain_model(sim, place, budget):
    plain = tower()
    expected = train(plain, place)
    model = replaced(tower(), place, vram_budget=budget)
    assert train(model, place) == expected
    assert_same_state(model, plain)
    runtime_of(model).shutdown()
    assert_same_state(model, plain)


def test_script_runs_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    model = replace_linear_with_ramtorch(tower(), vram_budget=BUDGET)
    plain = move_model_to_device(tower())
    assert runtime_of(model).torch_device == torch.device("cpu")
    assert train(model, "cpu") == train(plain, "cpu")
    runtime_of(model).shutdown()


def test_model_computes_on_the_accelerator_unless_told_otherwise(sim):
    model = replace_linear_with_ramtorch(tower(), vram_budget=BUDGET)
    assert runtime_of(model).torch_device.type == "hpu"
    with torch.no_grad():
        assert model(batch()).device.type == "hpu"
    runtime_of(model).shutdown()


def test_options_of_layer_pass_through_and_unknown_ones_do_not(place):
    model = replaced(tower(), place, prefetch_k=1, telemetry=True)
    assert runtime_of(model).report().budget_bytes == BUDGET
    runtime_of(model).shutdown()
    with pytest.raises(TypeError, match="vram_limit"):
        replaced(tower(), place, vram_limit="8GB")


# The attribute that other code asks for


def test_exactly_what_streams_has_the_flag(place):
    model = replaced(tower(), place)
    assert flagged(model) == STREAMED
    assert flagged_modules(model) == LINEAR
    assert model.layers[0][0].weight.is_ramtorch is True
    with torch.no_grad():
        model(batch())
    assert flagged(model) == STREAMED  # also once it has been on the device
    runtime_of(model).shutdown()


def test_shutdown_takes_the_flags_off(place):
    model = tower()
    before = Shape.of(model)
    replaced(model, place)
    runtime_of(model).shutdown()
    assert not flagged(model)
    assert not flagged_modules(model)
    assert Shape.of(model) == before


def test_refused_model_has_no_flags(place):
    model = tower()
    before = Shape.of(model)
    with pytest.raises(stagehand.StagehandOOMError):
        replaced(model, place, vram_budget=1)
    assert Shape.of(model) == before
    assert not flagged(model)


def test_flags_that_replaced_parameters_lost_come_back(place):
    model = replaced(tower(), place)
    for tensor in model.parameters():
        vars(tensor).pop("is_ramtorch", None)
    for module in model.modules():
        vars(module).pop("is_ramtorch", None)
    assert reattach_is_ramtorch_flags(model) is None
    assert flagged(model) == STREAMED
    assert flagged_modules(model) == LINEAR
    runtime_of(model).shutdown()


@pytest.mark.parametrize("way", ["deepcopy", "load"])
def test_flags_come_back_to_copies_and_loaded_models_which_are_plain(place, way):
    model = replaced(tower(), place)
    if way == "deepcopy":
        other = deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for tensor in other.parameters():
        vars(tensor).clear()
    reattach_is_ramtorch_flags(other)
    assert flagged(other) == STREAMED
    assert_same_state(other, model)
    replaced(other, place)  # it streams if it is asked to
    runtime_of(other).shutdown()
    assert not flagged(other)
    runtime_of(model).shutdown()


def test_copy_that_streams_less_keeps_no_flag_of_its_original(place):
    model = replaced(tower(), place)
    other = replaced(deepcopy(model), place, vram_budget="1GB")  # all of it stays
    assert not flagged_modules(other)
    assert not flagged(other)
    for one in (model, other):
        runtime_of(one).shutdown()


def test_flags_survive_the_assignment_of_a_state_dict(place):
    model = replaced(tower(), place)
    model.load_state_dict(tower().state_dict(), assign=True)
    reattach_is_ramtorch_flags(model)
    assert flagged(model) == STREAMED
    runtime_of(model).shutdown()


def test_model_that_never_streamed_gets_no_flags(sim):
    model = tower()
    reattach_is_ramtorch_flags(model)
    assert not flagged(model)


# Moves


def test_streamed_model_is_not_moved(place):
    model = replaced(tower(), place)
    before = Shape.of(model)
    for target in ("cpu", "hpu", None):
        assert move_model_to_device(model, target) is model
    assert Shape.of(model) == before
    runtime_of(model).shutdown()


def test_ordinary_model_is_moved_with_its_buffers_and_gradients(sim):
    model = tower()
    model(batch()).sum().backward()
    assert move_model_to_device(model, "hpu") is model
    named = (*model.parameters(), *model.buffers())
    assert {t.device.type for t in named} == {"hpu"}
    assert {p.grad.device.type for p in model.parameters()} == {"hpu"}
    assert move_model_to_device(tower()).norm.weight.device.type == "hpu"


def test_rest_of_a_model_with_a_streamed_part_is_moved(sim):
    model = nn.ModuleDict({"body": tower(), "head": nn.Linear(WIDTH, 2)})
    replaced(model["body"], "hpu")
    before = Shape.of(model["body"])
    move_model_to_device(model, "hpu")
    assert Shape.of(model["body"]) == before
    assert model["head"].weight.device.type == "hpu"
    runtime_of(model["body"]).shutdown()


@pytest.mark.parametrize(
    "call",
    [
        move_model_to_device,
        reattach_is_ramtorch_flags,
        lambda model: register_ramtorch_grad_hook(model, print),
        lambda model: register_ramtorch_post_accumulate_grad_hook(model, print),
    ],
)
@pytest.mark.parametrize("model", [None, "a model", nn.Linear, [tower()]])
def test_what_is_no_model_is_refused_by_name(call, model):
    with pytest.raises(stagehand.ConfigError, match=r"the model is .*: expected a"):
        call(model)


# Hooks of gradients


@pytest.mark.parametrize(
    "register",
    [register_ramtorch_grad_hook, register_ramtorch_post_accumulate_grad_hook],
)
def test_hook_that_is_no_function_and_names_that_are_no_list_are_refused(register):
    """One name was taken for all names that it has in it."""
    model = tower()
    for names in ("norm.weight", 3, [None]):
        with pytest.raises(stagehand.ConfigError, match=r"param_names is .*: expect"):
            register(model, print, names)
    with pytest.raises(stagehand.ConfigError, match=r"hook_fn is None: expected"):
        register(model, None)
    assert register(model, print, {"norm.weight": 1}.keys())


def test_gradient_hooks_change_what_is_accumulated(sim):
    model = replaced(tower(), "cpu")
    plain = tower()
    names = ["layers.0.0.weight", "norm.weight"]
    handles = register_ramtorch_grad_hook(model, lambda g: g * 2, names)
    assert len(handles) == 2
    for one in (model, plain):
        one(batch()).square().sum().backward()
    for name, parameter in plain.named_parameters():
        expected = parameter.grad * 2 if name in names else parameter.grad
        assert torch.equal(model.get_parameter(name).grad, expected), name
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model(batch()).square().sum().backward()
    for name in names:
        grad = plain.get_parameter(name).grad
        assert torch.equal(model.get_parameter(name).grad, grad)
    runtime_of(model).shutdown()


def test_post_accumulate_hooks_find_the_gradient_under_both_names(sim):
    model = replaced(tower(), "cpu")
    model.norm.bias.requires_grad_(False)
    seen = []

    def add(parameter):
        assert parameter.ramtorch_grad is parameter.grad
        parameter.ramtorch_grad.add_(60)
        seen.append(parameter)

    handles = register_ramtorch_post_accumulate_grad_hook(model, add)
    plain = tower()
    for one in (model, plain):
        one(batch()).square().sum().backward()
    assert {id(p) for p in seen} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    for name, parameter in model.named_parameters():
        assert not hasattr(parameter, "ramtorch_grad")
        if parameter.requires_grad:
            expected = plain.get_parameter(name).grad + 60
            assert torch.equal(parameter.grad, expected), name
    for handle in handles:
        handle.remove()
    assert len(handles) == len(seen)
    runtime_of(model).shutdown()


# Data parallelism


@pytest.fixture
def process_group(tmp_path):
    """One process that talks to itself through a file."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_script_that_ignores_flagged_parameters_trains(
    sim, process_group
):
    plain = tower()
    expected = train(plain, "cpu")
    model = replaced(tower(), "cpu")
    ignored = [n for n, p in model.named_parameters() if getattr(p, "is_ramtorch", 0)]
    assert set(ignored) == STREAMED
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    parallel = DistributedDataParallel(model)
    assert train(parallel, "cpu") == expected
    assert_same_state(model, plain)
    del parallel
    runtime_of(model).shutdown()
