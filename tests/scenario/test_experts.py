"""Experts: without gradients only those cross that a router has chosen."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import stagehand
from architectures.base import transformers_model
from architectures.language import NO_SPECIAL_TOKENS, VOCABULARY
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at
from scenario.small import blocks_of, runtime_of, smallest_budget
from stagehand.core.transfer import Priority, TransferEngine
from stagehand.errors import ReadError
from stagehand.residency import finding
from stagehand.residency.host_loader import HostLoader
from stagehand.stores.safetensors import SafetensorsStore
from streamed import total_bytes, weight_bytes

EXPERTS, TAKEN, DEPTH, WIDTH = 16, 2, 4, 32
ROW_BYTES = 4 * (16 * WIDTH + 8 * WIDTH)
"""Of one expert's weights, in both tensors."""
EXPERT_BYTES = EXPERTS * ROW_BYTES
MIX_BYTES = 4 * WIDTH * WIDTH + 256
"""Of what else streams in a layer: a linear layer, its bias rounded up."""


class Experts(nn.Module):
    """Gated feed-forwards; each token is computed by those that were chosen for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 8)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        made = []
        for token, own in zip(x, numbers, strict=True):
            gate, up = (self.up[own] @ token).chunk(2, -1)
            parts = self.down[own] @ (gate.sigmoid() * up).unsqueeze(-1)
            made.append(parts.squeeze(-1).sum(0))
        return torch.stack(made)


class Layer(nn.Module):
    """What mixes, and the experts that a fixed router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.register_buffer("router", torch.randn(WIDTH, EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).tanh()
        return x + self.experts(x, (x @ self.router).topk(TAKEN, -1).indices)


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(DEPTH)))


def tokens(count: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def chosen(_: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return numbers


@pytest.fixture(autouse=True)
def toys_stand_for_large_layers(monkeypatch):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)


@pytest.fixture
def stream(sim):
    """Streams a model at the smallest budget, or with a part of all more."""
    models = []

    def stream(model, more=0.0, place="hpu", **options):
        options = {"experts": {Experts: chosen}} | options
        budget = smallest_budget(model, place, **options)
        budget += int(more * weight_bytes(model))
        models.append(model)
        return stagehand.layer(model, vram_budget=budget, device=place, **options)

    yield stream
    for model in models:
        if hasattr(model, "_stagehand_layer_runtime"):
            runtime_of(model).shutdown()


class Held:
    """A streamed model and a resident one, run with the same inputs."""

    def __init__(self, sim, stream, model=None, place="hpu", **options):
        model = build() if model is None else model
        self.sim = sim
        self.resident = deepcopy(model).to(place)
        self.place = place
        self.model = stream(model, place=place, **options)

    def run(self, *inputs):
        """Compare the outputs; return the bytes that crossed for it."""
        with torch.no_grad():
            expected = self.resident(*(x.to(self.place) for x in inputs))
            before = self.crossed
            output = self.model(*(x.to(self.place) for x in inputs))
        assert_bitwise_equal(output, expected, "output")
        crossed = self.crossed - before
        assert self.sim.races() == []
        return crossed

    @property
    def crossed(self):
        return self.totals["h2d_bytes"]

    @property
    def totals(self):
        return runtime_of(self.model).telemetry.totals()


@pytest.fixture
def hold(sim, stream):
    return partial(Held, sim, stream)


def rows_of(model):
    return [block.rows for block in blocks_of(model) if "experts" in block.name]


@pytest.fixture(autouse=True)
def rows_that_did_not_come_are_of_nan(monkeypatch):
    """Fill a slot before rows come, or it may have the others from an earlier call."""
    load, read = TransferEngine.load_parts, HostLoader._read

    def load_parts(self, slot, target, source, parts):
        spoilt = torch.full_like(target, 255, device="cpu").pin_memory()
        whole = self.load(slot, target, spoilt, Priority.CRITICAL)
        self._counters.h2d_bytes -= target.numel()
        assert whole is slot._ticket
        return load(self, slot, target, source, parts)

    def read_rows(self, block, marks):
        if block.runs:
            block.target.fill_(255)
        return read(self, block, marks)

    monkeypatch.setattr(TransferEngine, "load_parts", load_parts)
    monkeypatch.setattr(HostLoader, "_read", read_rows)


LONG = 2 * EXPERTS
"""Tokens that nearly all experts are chosen for."""


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("more", [0.0, 0.1, 0.5])
def test_one_token_moves_only_what_was_chosen_for_it(hold, place, more):
    held = hold(place=place, more=more)
    for seed in range(5):
        held.run(tokens(seed=seed))
    stay = sum(block.nbytes for block in blocks_of(held.model) if block.stays)
    moved = [held.run(tokens(seed=seed)) for seed in range(5, 9)]
    most = DEPTH * (MIX_BYTES + TAKEN * ROW_BYTES)
    assert max(moved) <= most
    if not stay:
        assert max(moved) == most
    report = runtime_of(held.model).report()
    assert report.peak_device_bytes <= report.budget_bytes


def test_all_of_them_cross_for_many_tokens_and_ahead_of_their_use(hold):
    held = hold(more=0.3)
    for seed in range(3):
        held.run(tokens(seed=seed))
    held.run(tokens(LONG))
    moved = held.run(tokens(LONG))
    streamed = sum(b.nbytes for b in blocks_of(held.model) if not b.stays)
    assert moved >= streamed - EXPERT_BYTES
    held.run(tokens())
    assert held.run(tokens()) < streamed / 2


def test_budget_keeps_first_what_crosses_whole(hold):
    held = hold(more=DEPTH * MIX_BYTES / weight_bytes(build()))
    for seed in range(6):
        held.run(tokens(seed=seed))
    kept = {block.name for block in blocks_of(held.model) if block.stays}
    assert kept == {f"{number}.mix" for number in range(DEPTH)}
    assert held.run(tokens()) == DEPTH * TAKEN * ROW_BYTES


def test_one_long_prompt_between_costs_no_plan(hold):
    held = hold(more=0.3)
    for seed in range(6):
        held.run(tokens(seed=seed))
    plan = runtime_of(held.model)._parts.steering.plan
    for seed in range(3):
        held.run(tokens(LONG))
        held.run(tokens(seed=seed))
        held.run(tokens(seed=seed))
    assert runtime_of(held.model)._parts.steering.plan is plan


def test_gradients_are_those_of_the_resident_model(sim, stream):
    model = build()
    resident = deepcopy(model).to("hpu")
    stream(model, experts={Experts: chosen})
    with torch.no_grad():
        model(tokens())
    before = runtime_of(model).telemetry.totals()["h2d_bytes"]
    model(tokens())
    crossed = runtime_of(model).telemetry.totals()["h2d_bytes"] - before
    assert crossed >= DEPTH * EXPERT_BYTES
    for network in (model, resident):
        for seed in range(2):
            network(tokens(2, seed).to("hpu")).square().sum().backward()
    with torch.no_grad():
        assert_bitwise_equal(model(tokens()), resident(tokens().to("hpu")), "output")
    for mine, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert_bitwise_equal(mine.grad, theirs.grad.cpu(), "gradient")
        mine.grad = None


def test_with_gradients_all_of_frozen_ones_cross(hold):
    held = hold(build().requires_grad_(False))
    for seed in range(3):
        held.run(tokens(seed=seed))
    before = held.crossed
    held.model(tokens().to("hpu"))
    assert held.crossed - before >= (DEPTH - 1) * EXPERT_BYTES


def test_what_was_trained_is_what_is_read_then(hold):
    """By rows again: all of them crossed as soon as they had trained once."""
    held = hold()
    networks = held.model, held.resident
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in networks]
    for seed in range(3):
        for network, optimizer in zip(networks, optimizers, strict=True):
            network(tokens(2, seed).to("hpu")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        crossed = held.run(tokens(seed=seed))
        assert crossed == DEPTH * (MIX_BYTES + TAKEN * ROW_BYTES)


class Peeking(Layer):
    """Computes its experts for itself first, and once more behind a part of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen = super().forward(x)
        x = super().forward(x + seen / 8)
        with torch.no_grad():
            seen = super().forward(seen)
        return x + seen


def test_calls_without_gradients_in_the_middle_of_a_step_change_no_gradient(hold):
    held = hold(nn.Sequential(*(Peeking() for _ in range(DEPTH))))
    networks = held.model, held.resident
    for seed in range(3):
        for network in networks:
            network(tokens(2, seed).to("hpu")).square().sum().backward()
        pairs = zip(*(network.parameters() for network in networks), strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            assert_bitwise_equal(mine.grad, theirs.grad.cpu(), f"gradient {number}")
    assert held.sim.races() == []
    for parameter in held.model.parameters():
        parameter.grad = None


def _in_place(weight, values):
    with torch.no_grad():
        weight.copy_(values)


def _by_data(weight, values):
    weight.data.copy_(values)


def _assigned(weight, values):
    weight.data = values.clone()


@pytest.mark.parametrize("edit", [_in_place, _by_data, _assigned])
@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_what_was_edited_between_passes_is_what_is_read(hold, edit, place):
    held = hold(place=place)
    held.run(tokens())
    for number in range(DEPTH):
        up = held.model[number].experts.up
        values = up.detach().cpu() * 2
        edit(up, values)
        with torch.no_grad():
            held.resident[number].experts.up.copy_(values)
        held.run(tokens(seed=number))
    assert held.run(tokens()) == DEPTH * (MIX_BYTES + TAKEN * ROW_BYTES)


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("ram", [1 << 30, EXPERT_BYTES + (1 << 14)])
@pytest.mark.filterwarnings("ignore:.*beside their files:UserWarning")
def test_of_files_only_what_was_chosen_is_read(hold, tmp_path, place, ram):
    model = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    held = hold(model, place=place, ram_budget=ram)
    runtime_of(held.model).convert_registry_to_file_backed_sharded(tmp_path)
    for _ in range(5):  # what is kept in host memory is read whole, once
        held.run(tokens())
    before = held.totals["disk_bytes"]
    moved = sum(held.run(tokens()) for _ in range(4))
    ahead = DEPTH * MIX_BYTES  # what of it was read in an earlier pass, or for a later
    assert abs(moved - 4 * DEPTH * (MIX_BYTES + TAKEN * ROW_BYTES)) <= ahead
    assert held.totals["disk_bytes"] - before <= moved + ahead
    with torch.no_grad():
        for network in (held.model, held.resident):
            network[1].experts.down.mul_(2)
    held.run(tokens())
    held.run(tokens(seed=3))
    held.run(tokens(LONG))
    held.run(tokens())
    for number in range(DEPTH):  # several at once
        up = held.model[number].experts.up
        values = up.detach().cpu() * 2
        up.data = values.clone()
        with torch.no_grad():
            held.resident[number].experts.up.copy_(values)
    held.run(tokens())


def test_in_pageable_memory_they_are_staged_by_rows(hold):
    held = hold(ram_budget=2 * EXPERT_BYTES)
    assert any(block.image is None for block in blocks_of(held.model))
    for seed in range(6):
        held.run(tokens(seed=seed))
    assert held.run(tokens()) == DEPTH * (MIX_BYTES + TAKEN * ROW_BYTES)


@pytest.mark.filterwarnings("ignore:.*would not shrink:UserWarning")
def test_packed_ones_cross_whole(hold):
    held = hold(build().bfloat16(), transport="packed")
    for seed in range(4):
        held.run(tokens(seed=seed).bfloat16())
    packed = [block for block in blocks_of(held.model) if block.wire is not None]
    assert [block.name for block in packed] == [f"{i}.experts" for i in range(DEPTH)]
    assert held.run(tokens().bfloat16()) > sum(block.link_nbytes for block in packed)


class Padded(Experts):
    """Computes nothing for numbers past its rows, which some routers send."""

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return super().forward(x, numbers[:, numbers[0] < EXPERTS])


class Chosen(nn.Module):
    """Experts that are told by their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Padded() for _ in range(2))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        for experts in self.experts:
            x = experts(x, numbers)
        return x


@pytest.mark.parametrize(
    ("numbers", "count"),
    {
        "one": ([3], 1),
        "twice": ([3, 3], 1),
        "neighbours": ([4, 3, 5], 3),
        "first and last": ([15, 0], 2),
        "half": ([*range(0, 16, 2)], 8),
        "more than half": ([*range(9)], EXPERTS),
        "from the end": ([-1], EXPERTS),
        "one and nobody": ([3, 16, 17], 1),
        "none": ([], EXPERTS),
    }.values(),
    ids=str,
)
def test_each_choice_is_exact(hold, numbers, count):
    held = hold(Chosen())
    wanted = torch.tensor([numbers], dtype=torch.int64)
    for _ in range(3):
        held.run(tokens(), wanted)
    assert held.run(tokens(), wanted) == 2 * count * ROW_BYTES


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8])
def test_choices_may_be_of_any_integers(hold, kind):
    held = hold(Chosen(), experts={Experts: lambda _, numbers: numbers.to(kind)})
    held.run(tokens(), torch.tensor([[1, 2]]))
    assert held.run(tokens(), torch.tensor([[1, 2]])) == 4 * ROW_BYTES


def test_none_chooses_all(hold):
    held = hold(Chosen(), experts={Experts: lambda _, numbers: None})
    held.run(tokens(), torch.tensor([[1, 2]]))
    assert held.run(tokens(), torch.tensor([[1, 2]])) >= EXPERT_BYTES


def test_what_is_no_choice_is_refused_and_the_model_goes_on(hold):
    made = [torch.tensor([1.0])]
    held = hold(Chosen(), experts={Experts: lambda _, n: made[0] if made else n})
    with torch.no_grad():
        with pytest.raises(
            stagehand.ConfigError, match=r"'experts.0' reads rows of torch.float32"
        ):
            held.model(tokens().to("hpu"), torch.tensor([[1, 2]]).to("hpu"))
        made[0] = [1, 2]
        with pytest.raises(stagehand.ConfigError, match=r"reads rows of .*list"):
            held.model(tokens().to("hpu"), torch.tensor([[1, 2]]).to("hpu"))
    made.clear()
    held.run(tokens(), torch.tensor([[1, 2]]))


@pytest.mark.parametrize("experts", [[Experts], {Experts: 1}, {"Experts": chosen}])
def test_option_of_another_kind_is_refused(sim, experts):
    with pytest.raises(stagehand.ConfigError, match=r"experts is .*\{Experts: lambda"):
        stagehand.layer(build(), vram_budget="1MB", device="hpu", experts=experts)


# Calls that may read more


def _hook(experts):
    return experts.register_forward_pre_hook(lambda _, given: (given[0], given[1] + 1))


def _forward(experts):
    plain = experts.forward
    experts.forward = lambda x, numbers: plain(x, numbers + 1)


class Twice(nn.Module):
    """A parametrization of all rows."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / weight.norm()


def _parametrized(experts):
    parametrize.register_parametrization(experts, "up", Twice())


def _sees(module, given, output):
    if isinstance(module, Experts):
        output += module.up.mean() + module.down.mean()


def _looking_hook(experts):
    experts.register_forward_hook(_sees)


@pytest.mark.parametrize("change", [_hook, _looking_hook, _parametrized])
def test_what_was_there_before_sees_all(hold, change):
    model = Chosen()
    change(model.experts[0])
    held = hold(model)
    for _ in range(3):
        held.run(tokens(), torch.tensor([[1, 2]]))


def test_hooks_of_all_modules_see_all_of_them(hold):
    held = hold(Chosen())
    for _ in range(2):
        held.run(tokens(), torch.tensor([[1, 2]]))
    hook = register_module_forward_hook(_sees)
    try:
        for _ in range(3):
            held.run(tokens(), torch.tensor([[1, 2]]))
    finally:
        hook.remove()


@pytest.mark.parametrize("change", [_hook, _forward, _looking_hook, _parametrized])
def test_calls_whose_inputs_others_change_read_all(hold, change):
    held = hold(Chosen())
    for network in (held.model, held.resident):
        change(network.experts[0])
    for _ in range(3):
        held.run(tokens(), torch.tensor([[1, 2]]))


class Dense(Experts):
    """Computes all experts, and takes what was chosen then."""

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return x + torch.matmul(self.up, x[0])[numbers[0]].sum()


class Casting(Dense):
    """Lets its casts be kept, whatever holds around it."""

    forward = torch.autocast("hpu", torch.bfloat16)(Dense.forward)


class Repeated(nn.ModuleList):
    """Calls each of its experts twice."""

    def forward(self, x: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        for experts in self:
            for each in numbers:
                x = experts(x, each).tanh()
        return x


@pytest.mark.parametrize("kind", [Dense, Casting])
def test_casts_that_autocast_keeps_are_of_all(hold, kind):
    held = hold(Repeated(kind() for _ in range(3)), experts={Dense: chosen})
    assert not any(block.stays for block in blocks_of(held.model))
    for _ in range(3):
        with torch.autocast("hpu", torch.bfloat16):
            held.run(tokens(), torch.tensor([[1, 2]]), torch.tensor([[3, 4]]))


def test_what_computes_experts_in_another_way_may_read_all(hold):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def dense(self, states, chosen, parts):
        gate, up = torch.matmul(states, self.gate_up_proj.mT).chunk(2, -1)
        out = torch.matmul(self.act_fn(gate) * up, self.down_proj.mT)
        weight = torch.zeros(len(states), len(out), device=states.device)
        return (weight.scatter(1, chosen, parts).mT.unsqueeze(-1) * out).sum(0)

    ALL_EXPERTS_FUNCTIONS.register("dense", dense)
    model = MODELS["qwen3"]()
    held = hold(model, experts={})
    for _ in range(2):
        held.run(torch.tensor([[1]]))
    few = held.run(torch.tensor([[1]]))
    for network in (held.model, held.resident):
        network.config._experts_implementation = "dense"
    for _ in range(2):
        assert held.run(torch.tensor([[1]])) > 3 * few
    for network in (held.model, held.resident):
        network.config._experts_implementation = "eager"
    held.run(torch.tensor([[1]]))
    assert held.run(torch.tensor([[1]])) == few
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(held.model.model.layers[0].mlp.experts), "forward", dense)
        for _ in range(2):
            assert held.run(torch.tensor([[1]])) > 3 * few


def test_experts_of_transformers_that_compute_all_at_once_read_all(hold, monkeypatch):
    """As those of some versions did in inference."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    def dense(self, states, top_k_index, top_k_weights):
        expert_hit = len(self.gate_up_proj)
        tokens = states.expand(expert_hit, *states.shape)
        gate, up = torch.bmm(tokens, self.gate_up_proj.mT).chunk(2, -1)
        out = torch.bmm(self.act_fn(gate) * up, self.down_proj.mT)
        weight = torch.zeros(len(states), expert_hit, device=states.device)
        weight = weight.scatter(1, top_k_index, top_k_weights)
        return (weight.mT.unsqueeze(-1) * out).sum(0)

    made = Qwen3MoeExperts.forward
    (own,) = (c for c in made.__closure__ if c.cell_contents is made.__wrapped__)
    monkeypatch.setattr(made, "__wrapped__", dense)
    monkeypatch.setattr(own, "cell_contents", dense)
    model = MODELS["qwen3"]()
    model.set_experts_implementation("eager")
    held = hold(model, experts={})
    assert rows_of(held.model) == [0] * 3
    for _ in range(3):
        held.run(torch.tensor([[1]]))


def test_under_vmap_they_read_all(hold):
    class Batched(Experts):
        def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            gate, up = (self.up[numbers] @ x).chunk(2, -1)
            parts = self.down[numbers] @ (gate.sigmoid() * up).unsqueeze(-1)
            return parts.squeeze(-1).sum(0)

    model = Chosen()
    for experts in model.experts:
        experts.__class__ = Batched
    held = hold(model)
    x, numbers = tokens(3).to("hpu"), torch.tensor([[1, 2], [3, 4], [0, 15]]).to("hpu")
    with torch.no_grad():
        expected = torch.vmap(held.resident)(x, numbers)
        for _ in range(3):
            output = torch.vmap(held.model)(x, numbers)
            assert_bitwise_equal(output, expected, "output")
    held.run(tokens()[0], numbers[0].cpu())  # of a class that only its base names
    assert held.run(tokens()[0], numbers[0].cpu()) == 2 * TAKEN * ROW_BYTES


@pytest.mark.parametrize("names", [["up"], ["up", "down"]])
def test_those_that_several_modules_have_read_all(hold, names):
    model = Chosen()
    for name in names:
        setattr(model.experts[1], name, getattr(model.experts[0], name))
    held = hold(model)
    assert set(rows_of(held.model)) == {0}
    for _ in range(3):
        held.run(tokens(), torch.tensor([[1, 2]]))


class Told(Experts):
    """Calls a part in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.part(super().forward(x, numbers))


def _by_state_dict(held):
    return held.model.state_dict()["experts.0.up"]


def _by_hand(held):
    runtime = runtime_of(held.model)
    runtime.before_block("experts.0")
    up = held.model.experts[0].up.detach().clone()
    runtime.after_block("experts.0")
    return up


@pytest.mark.parametrize("read", [_by_state_dict, _by_hand])
def test_who_reads_all_in_the_middle_of_a_call_gets_all(hold, read):
    model = Chosen()
    model.experts[0] = Told()
    held = hold(model, experts={Experts: chosen})
    numbers = torch.tensor([[1, 2]])
    held.run(tokens(), numbers)
    found = []
    handle = held.model.experts[0].part.register_forward_hook(
        lambda *_: found.append(read(held).detach().cpu().clone())
    )
    for _ in range(2):
        held.run(tokens(), numbers)
        held.run(tokens(), torch.tensor([[5, 9]]))
    handle.remove()
    assert len(found) == 4
    for up in found:
        assert_bitwise_equal(up, held.resident.experts[0].up.cpu(), "weights")


class Wide(nn.Module):
    """Linear layers of many sizes, and experts."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH * size) for size in sizes)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix in self.mixes:
            x = x + mix(x).tanh().view(len(x), -1, WIDTH).sum(1)
        return x + self.experts(x, x[:, :EXPERTS].topk(TAKEN, -1).indices)


@pytest.mark.parametrize(
    "sizes", [[[], [], [8], [12, 4], [12]], [[8], [4, 8, 2], [12, 2, 12], [1], []]]
)
def test_nothing_is_loaded_into_a_slot_that_a_call_fills_first(hold, sizes):
    held = hold(nn.Sequential(*map(Wide, sizes)), more=0.1)
    for seed in range(7):
        held.run(tokens(seed=seed))
    away = [block for block in blocks_of(held.model) if not block.stays]
    least = sum(TAKEN * ROW_BYTES if b.rows else b.nbytes for b in away)
    assert sum(held.run(tokens(seed=seed)) for seed in range(3)) == 3 * least


class Mixed(Experts):
    """Has a part that is computed for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return super().forward(x, numbers) + self.shared(x).sum()


def test_those_that_are_one_block_with_other_weights_read_all(hold):
    model = Chosen()
    model.experts[0] = Mixed()
    held = hold(model, opaque=[Mixed])
    for _ in range(3):
        held.run(tokens(), torch.tensor([[1, 2]]))


class Otherwise(Experts):
    """Experts whose weights are not as many rows, each behind the one before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        whole = torch.randn(16 * EXPERTS * WIDTH) / 8
        if how == "transposed":
            self.up = nn.Parameter(whole.view(16, EXPERTS, WIDTH).transpose(0, 1))
        if how == "overlapping":
            self.up = nn.Parameter(whole.view(EXPERTS, 16, WIDTH))
        shift = {
            "transposed": torch.randn(EXPERTS, WIDTH),
            "overlapping": whole[16 : 16 + EXPERTS * WIDTH].view(EXPERTS, WIDTH),
            "one for all": torch.randn(1, WIDTH),
            "scalar": torch.tensor(0.25),
        }
        self.shift = nn.Parameter(shift[how])

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        shift = self.shift
        if shift.dim() and len(shift) == EXPERTS:
            shift = shift[numbers].sum(1)
        return super().forward(x, numbers) + shift


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("how", ["transposed", "overlapping", "one for all", "scalar"])
def test_those_of_other_rows_read_all(hold, how, place):
    model = Chosen()
    model.experts[0] = Otherwise(how)
    held = hold(model, place=place)
    for _ in range(3):
        held.run(tokens(), torch.tensor([[1, 9]]))
    assert rows_of(held.model) == [0, EXPERTS]


@pytest.mark.parametrize("change", [_looking_hook, _parametrized])
def test_those_that_read_all_leave_others_to_their_calls(hold, change):
    model = nn.Sequential(*(Layer() for _ in range(2 * DEPTH)))
    change(model[1].experts)
    held = hold(model, more=0.3)
    for seed in range(8):
        held.run(tokens(seed=seed))
    away = [block for block in blocks_of(held.model) if not block.stays]
    calls = [block for block in away if block.rows and block.name != "1.experts"]
    whole = sum(block.nbytes for block in away if block not in calls)
    assert held.run(tokens()) <= whole + len(calls) * TAKEN * ROW_BYTES


def test_a_call_that_writes_to_them_is_refused_and_nothing_is_lost(hold):
    held = hold(Chosen())
    numbers = torch.tensor([[1, 2]])
    held.run(tokens(), numbers)
    plain = Experts.forward

    def writes(self, x, given):
        self.up[given] += 1
        return plain(self, x, given)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Experts, "forward", writes)
        with pytest.raises(stagehand.ConfigError, match=r"'experts.0', of which only"):
            held.model(tokens().to("hpu"), numbers.to("hpu"))
    for _ in range(2):
        held.run(tokens(), numbers)


def test_those_that_are_changed_while_they_train_cross_whole(sim):
    """What a call has written through `.data` may come home without a counter."""

    class Clamping(Experts):
        def forward(self, x, numbers):
            if self.training:
                self.up.data.clamp_(-0.1, 0.1)
            return super().forward(x, numbers)

    def run(model):
        for seed in range(2):
            model(tokens(seed=seed).to("hpu")).sum().backward()
        model.eval()
        with torch.no_grad():
            return [model(tokens(seed=seed).to("hpu")).cpu() for seed in range(4)]

    model = build()
    for layer in model:
        layer.experts.__class__ = Clamping
    expected = run(deepcopy(model).to("hpu"))
    experts = {Experts: chosen}
    budget = smallest_budget(deepcopy(model), "hpu", experts=experts)
    stagehand.layer(model, vram_budget=budget, device="hpu", experts=experts)
    assert_bitwise_equal(run(model), expected, "outputs")
    runtime_of(model).shutdown()


def test_what_fails_in_a_call_leaves_no_rows_behind(hold):
    held = hold()
    held.run(tokens())
    with torch.no_grad(), pytest.raises(IndexError):
        held.model[1].experts(tokens().to("hpu"), torch.tensor([[99, 1]]).to("hpu"))
    assert not any(block.runs for block in blocks_of(held.model))
    held.run(tokens(LONG))
    held.run(tokens())


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.filterwarnings("ignore:.*beside their files:UserWarning")
def test_a_read_that_fails_is_an_error_and_the_next_pass_reads_again(
    hold, tmp_path, place, monkeypatch
):
    model = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    held = hold(model, place=place, ram_budget=EXPERT_BYTES + (1 << 14))
    runtime_of(held.model).convert_registry_to_file_backed_sharded(tmp_path)
    for seed in range(3):
        held.run(tokens(seed=seed))
    reads = SafetensorsStore.read_rows_into

    def fails(self, image, runs):
        raise ReadError("no such luck")

    monkeypatch.setattr(SafetensorsStore, "read_rows_into", fails)
    with torch.no_grad(), pytest.raises(ReadError, match="no such luck"):
        held.model(tokens().to(place))
    monkeypatch.setattr(SafetensorsStore, "read_rows_into", reads)
    held.run(tokens(LONG))
    held.run(tokens())


def test_under_a_conductor_with_few_copies_at_a_time_it_is_the_same(hold):
    held = hold(more=0.3)
    conductor = stagehand.ConductorRuntime(stagehand.ConductorConfig(h2d_slots=1))
    conductor.attach(held.model)
    for seed in range(6):
        held.run(tokens(seed=seed))
    conductor.detach(held.model)
    held.run(tokens(LONG))
    held.run(tokens())


INTERRUPTED = (
    *("stagehand.weights.experts", "stagehand.residency.mover"),
    *("stagehand.residency.lane_loader", "stagehand.residency.scheduler"),
)


@pytest.mark.parametrize("first", range(7))
def test_an_interrupt_at_any_line_leaves_no_rows_behind(hold, first):
    held = hold(Chosen())
    numbers = torch.tensor([[1, 2]])
    held.run(tokens(), numbers)
    x, given = tokens().to("hpu"), numbers.to("hpu")
    for number in range(first + 1, 1_000, 7):
        try:
            with interrupted_at(number, *INTERRUPTED), torch.no_grad():
                held.model(x, given)
        except KeyboardInterrupt:
            pass
        else:
            break
        held.run(tokens(), torch.arange(EXPERTS).unsqueeze(0))
        held.run(tokens(), numbers)


# Real models

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TAKEN,
    "intermediate_size": 64,
    **NO_SPECIAL_TOKENS,
}
MODELS = {
    "qwen3": transformers_model(
        "Qwen3MoeForCausalLM", **_SIZES, num_experts=EXPERTS, moe_intermediate_size=64
    ),
    "gpt_oss": transformers_model(
        "GptOssForCausalLM", **_SIZES, num_local_experts=EXPERTS
    ),
    "mixtral": transformers_model(
        "MixtralForCausalLM", **_SIZES, num_local_experts=EXPERTS
    ),
}


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
def test_generation_moves_the_experts_of_each_token(hold, name, how, place):
    model = MODELS[name]()
    model.set_experts_implementation(how)
    held = hold(model, place=place, more=0.1, experts={})
    assert rows_of(held.model) == [EXPERTS] * 3
    ids = torch.arange(6).unsqueeze(0).to(place)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    for _ in range(2):
        expected = held.resident.generate(ids, **options)
        before = held.crossed
        assert torch.equal(held.model.generate(ids, **options), expected)
        crossed = held.crossed - before
    whole = total_bytes([*held.model.parameters()])
    assert crossed < 2.5 * whole  # of four passes, one of which has all
