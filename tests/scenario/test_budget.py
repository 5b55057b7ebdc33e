"""A budget that changes: the device never holds more than the present one allows."""

import re
from copy import deepcopy

import pytest
import torch
from small import (
    WIDTH,
    batch,
    round_up,
    run_resident,
    runtime_of,
    smallest_budget,
)
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from stagehand.core.device import AcceleratorDevice
from stagehand.units import format_at_least, format_bytes
from streamed import weight_bytes


def uneven():
    """Layers of sizes so close that the slots of a ring all have the largest size."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH))
                for width in (64, 60, 56, 52)
            )
        )


def test_budget_that_lacks_one_byte_does_not_read_like_what_is_needed(sim):
    smallest = smallest_budget(uneven(), "hpu")
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        stagehand.layer(uneven(), vram_budget=smallest - 1, device="hpu")
    assert f"is {smallest - 1} B, but {format_at_least(smallest)} " in str(caught.value)


@pytest.mark.parametrize("lowered", ["to what is leased", "to the smallest"])
def test_memory_kept_for_reuse_is_given_back_when_the_budget_is_lowered(sim, lowered):
    """Slots that a larger budget had made needless stayed allocated under a smaller
    one, beside those in use: together they were more than it allowed.
    """
    model, smallest = uneven(), smallest_budget(uneven(), "hpu")
    inputs, expected = batch(), run_resident(model, "hpu", batch())
    stagehand.layer(model, vram_budget=4 * smallest, device="hpu")
    arena = runtime_of(model)._parts.device_arena
    began = []
    model[0][0].register_forward_pre_hook(
        lambda *_: began.append((arena.account.held_bytes, sim.allocated_bytes()))
    )

    def run():
        began.clear()
        with torch.no_grad():
            assert_bitwise_equal(model(inputs), expected, "output")
        [(held, allocated)] = began
        assert held == arena.leased_bytes + arena.kept_bytes
        return held, allocated

    others = sim.allocated_bytes()
    run()
    runtime_of(model).set_budget(100 * smallest)
    run()
    assert arena.kept_bytes > 0  # else there is nothing to give back
    budget = smallest if lowered == "to the smallest" else arena.leased_bytes
    runtime_of(model).set_budget(budget)
    assert arena.kept_bytes == 0
    for _ in range(2):
        held, allocated = run()
        assert held <= budget
        assert allocated <= others + budget + inputs.nbytes
    runtime_of(model).shutdown()


@pytest.mark.parametrize("trains", [False, True])
def test_lowered_budget_of_an_idle_model_frees_memory_at_once(sim, trains):
    """It was free after the next pass: others that wanted it had to wait for one."""
    model, smallest = uneven(), smallest_budget(uneven(), "hpu")
    if not trains:
        model.requires_grad_(False)
    inputs, expected = batch(), run_resident(deepcopy(model), "hpu", batch())
    stagehand.layer(model, vram_budget=4 * smallest, device="hpu")
    runtime, seen = runtime_of(model), []

    def run():
        with torch.set_grad_enabled(trains):
            return model(inputs)

    for _ in range(2):
        runtime.set_budget(100 * smallest)
        assert_bitwise_equal(run().detach(), expected, "output")
    others = sim.allocated_bytes() - runtime._parts.weights.held_bytes
    assert runtime._parts.weights.held_bytes > smallest
    runtime.set_budget(smallest)
    assert runtime._parts.weights.held_bytes <= smallest
    assert sim.allocated_bytes() <= others + smallest
    assert_bitwise_equal(run().detach(), expected, "output")

    # A pass needs what it has: there it takes effect with the end.
    runtime.set_budget(100 * smallest)
    run()

    def lower(*_):
        seen.append(runtime._parts.weights.held_bytes)
        runtime.set_budget(smallest)
        assert runtime._parts.weights.held_bytes == seen[-1]

    hook = model[1].register_forward_pre_hook(lower)
    assert_bitwise_equal(run().detach(), expected, "output")
    hook.remove()
    assert_bitwise_equal(run().detach(), expected, "output")
    assert runtime._parts.weights.held_bytes <= smallest
    assert seen[0] > smallest
    runtime.shutdown()


def test_budget_holds_what_the_allocator_rounds_slots_up_to(sim, monkeypatch):
    """CUDA gives memory in whole segments: slots a little larger than one of them took
    a segment more each, and together they took more of the device than the budget.
    """
    segment = 3_000
    round_up(monkeypatch, segment)
    model, expected = uneven(), run_resident(uneven(), "hpu", batch())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = smallest_budget(uneven(), "hpu") + whole // 3
    stagehand.layer(model, vram_budget=budget, device="hpu")
    runtime = runtime_of(model)
    for _ in range(4):
        with torch.no_grad():
            assert_bitwise_equal(model(batch()), expected, "output")
    parts, moved = runtime._parts, runtime.report().streamed_bytes
    slots = [slot.lease.nbytes for slot in parts.scheduler._memory.slots if slot.lease]
    assert slots
    assert all(nbytes % segment == 0 for nbytes in slots)
    assert runtime.report().peak_device_bytes <= budget
    with torch.no_grad():
        model(batch())
    crossed = runtime.report().streamed_bytes - moved
    assert 0 < crossed <= whole  # what is rounded up does not cross the link
    assert crossed == parts.steering.plan.streamed_bytes
    runtime.shutdown()


@pytest.mark.filterwarnings("ignore:.*would not shrink")  # tensors this small
@pytest.mark.parametrize("case", ["rounded", "packed"])
def test_smallest_budget_of_an_error_leaves_room_for_what_stays(sim, monkeypatch, case):
    """CUDA rounds a block of 2.1 MB up to 2.33, and small packed ones need much to be
    decoded in. The smallest budget counts that: what would not fit beside it stayed on
    the device for comfort.
    """
    round_up(monkeypatch, 20_000 if case == "rounded" else 1)
    dtype = torch.bfloat16 if case == "packed" else torch.float32
    transport = "packed" if case == "packed" else "plain"

    def model():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)]
            return nn.Sequential(*layers).to(dtype)

    x = torch.ones(4, 64, dtype=dtype)
    expected, streamed = run_resident(model(), "hpu", x), model()
    least = smallest_budget(streamed, "hpu", transport=transport)
    stagehand.layer(streamed, vram_budget=least, device="hpu", transport=transport)
    with torch.no_grad():
        assert_bitwise_equal(streamed(x), expected, "output")
    assert runtime_of(streamed).report().peak_device_bytes <= least
    runtime_of(streamed).shutdown()


class Beside(nn.Module):
    """A layer, and a small one that joins it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.added = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.added(x)


@pytest.mark.parametrize("joined", [False, True])
def test_the_smallest_budget_that_an_error_names_works(sim, joined):
    """Also where a part of it is taken, and when the model streams already."""
    model, inputs = uneven(), batch()
    budget = 3 * smallest_budget(uneven(), "hpu")
    stagehand.layer(model, vram_budget=budget, device="hpu")
    runtime = runtime_of(model)
    if joined:
        model[1][0] = Beside(model[1][0])
    with torch.no_grad():
        expected = model(inputs)
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        runtime.set_budget(1)
    smallest = caught.value.needed_bytes
    apart = runtime._parts.odd_bytes
    assert (apart > 0) == joined
    assert f"{format_bytes(apart)} that stay there" in str(caught.value)
    with pytest.raises(stagehand.StagehandOOMError) as again:
        runtime.set_budget(smallest - 1)
    assert again.value.needed_bytes == smallest
    runtime.set_budget(smallest)
    for _ in range(2):
        with torch.no_grad():
            assert_bitwise_equal(model(inputs), expected, "output")
    assert runtime._parts.weights.held_bytes <= smallest
    runtime.shutdown()


@pytest.mark.parametrize("place", ["hpu", "cpu"])
def test_block_mode_names_its_budget_in_its_own_unit_and_that_works(sim, place):
    def stream(mib):
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=mib, vram_low_watermark_mb=0.9 * mib
        )
        return stagehand.StagehandRuntime(model, config, r"^\d$", device=place)

    model, expected = uneven(), run_resident(uneven(), place, batch())
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        stream(0.001)
    [named] = re.findall(
        r"the budget, vram_high_watermark_mb, is 1\.05 KB,.* at least (0\.0\d) MiB$",
        str(caught.value),
    )
    runtime = stream(float(named))
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


@pytest.mark.parametrize("pool", [0.001, 1.5])
def test_what_is_advised_for_a_slab_that_is_too_small_works_at_once(sim, pool):
    """A larger slab alone did not fit the pool."""
    settings = {"pinned_slab_mb": 0.001, "pinned_pool_mb": pool}
    config = stagehand.StagehandConfig(**settings)
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        stagehand.StagehandRuntime(uneven(), config, r"^\d$", device="hpu")
    [(advice, named)] = re.findall(
        r"; set (pinned_slab_mb.*) to at least (\d+), or use", str(caught.value)
    )
    assert advice.split(" and ") == [n for n, mib in settings.items() if mib < 1]
    settings.update(dict.fromkeys(advice.split(" and "), int(named)))
    config = stagehand.StagehandConfig(**settings)
    model = uneven()
    runtime = stagehand.StagehandRuntime(model, config, r"^\d$", device="hpu")
    expected = run_resident(uneven(), "hpu", batch())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


def test_what_stays_is_counted_once_in_the_error(sim):
    class Scaled(nn.Sequential):
        def __init__(self):
            super().__init__(*uneven())
            self.scale = nn.Parameter(torch.ones(WIDTH))

    with pytest.raises(stagehand.StagehandOOMError) as caught:
        stagehand.layer(Scaled(), vram_budget=1, device="hpu")
    stays = 256  # the scale, rounded up
    largest = caught.value.needed_bytes - stays
    assert f"{format_bytes(stays)} that stay there" in str(caught.value)
    assert f"{format_bytes(largest)} for the largest block" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": "a model"}, "the model is 'a model': expected a torch.nn.Module"),
        ({"model": nn.Linear}, "expected a torch.nn.Module"),
        ({"model": {"unet": uneven()}}, "the model is a dict: .* pipeline"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16': expected one of torch's"),
        ({"dtype": torch.int8}, "dtype is torch.int8: expected a floating-point type"),
        ({"device": 10**30}, "device is 10{30}: "),
        ({"prefetch_k": "3"}, "prefetch_k is '3': expected an int"),
        ({"prefetch_k": -1}, "prefetch_k is -1: expected 0 or more"),
        ({"pool": 3}, "pool is 3: expected what shutdown_keep_pool"),
        ({"opaque": 3}, "opaque is 3: expected a list or a tuple, each a class"),
        ({"opaque": nn.Linear}, "opaque is .*Linear.*: expected a list or a tuple"),
        ({"opaque": ["Linear"]}, "opaque is .*Linear.*: expected a list or a tuple"),
        ({"opaque": ""}, "opaque is '': expected a list or a tuple, each a class"),
        ({"opaque": torch.tensor(3)}, r"opaque is tensor\(3\): expected a list or a"),
        ({"telemetry": 3}, "telemetry is 3: expected True or False or a text or a"),
        ({"name": 3}, "name is 3: expected a text or None"),
        ({"shared": "no"}, "shared is 'no': expected True or False"),
        ({"trace": 1}, "trace is 1: expected True or False"),
        ({"inference_mode": 1}, "inference_mode is 1: expected True or False"),
        ({"strict_bf16": None}, "strict_bf16 is None: expected True or False"),
        ({"ram_budget": 1}, "the ram_budget, which counts .* is 1 B, but"),
        ({"vram_budget": 1, "ram_budget": "1MB"}, "the budget is 1 B, but"),
    ],
    ids=[
        *("a name", "a class", "models", "a name of a type", "a type of numbers"),
        *("no such device", "a text", "negative", "pool", "opaque"),
        *("a class that is opaque", "its name", "no name", "a tensor for classes"),
        *("telemetry", "name", "shared"),
        *("trace", "inference", "check", "ram", "vram"),
    ],
)
def test_an_argument_that_cannot_work_is_named(arguments, problem):
    wanted = {"model": uneven(), "vram_budget": "1MB", "device": "cpu", **arguments}
    with pytest.raises(stagehand.StagehandError, match=problem):
        stagehand.layer(wanted.pop("model"), **wanted)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ({"config": {}}, "config is a dict: expected a StagehandConfig"),
        ({"pool": 3}, "pool is 3: expected what shutdown_keep_pool"),
        ({"block_pattern": 3}, "block_pattern is 3: expected a text or None"),
        ({"inference_mode": 1}, "inference_mode is 1: expected True or False"),
        ({"trace": 1}, "trace is 1: expected True or False"),
    ],
)
def test_an_argument_of_block_mode_that_cannot_work_is_named(argument, problem):
    with pytest.raises(stagehand.ConfigError, match=problem):
        stagehand.StagehandRuntime(uneven(), **argument)


@pytest.mark.parametrize("shared", [True, False])
def test_share_of_the_device_is_as_many_bytes_when_the_weights_are_there(
    sim, monkeypatch, shared
):
    """`set_budget("50%")` was half of what the model's own weights had left."""

    def free_bytes(device):
        return 10**9 - sim.allocated_bytes()

    monkeypatch.setattr(AcceleratorDevice, "free_bytes", free_bytes)
    model, inputs = uneven(), batch()
    stagehand.layer(model, vram_budget="50%", device="hpu", shared=shared)
    runtime = runtime_of(model)
    budget = runtime.report().budget_bytes
    with torch.no_grad():
        model(inputs)
    assert runtime.report().resident_bytes > 0
    runtime.set_budget("50%")
    assert runtime.report().budget_bytes == budget
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_budget_of_which_the_device_has_less_warns_where_weights_would_take_it(
    sim, mode
):
    model = uneven()
    weights = sum(p.nbytes for p in model.parameters())
    sim.configure(capacity_bytes=sim.allocated_bytes() + weights - 1)
    mib = (weights + 1000) / 2**20

    def stream(mib):
        if mode == "layers":
            stagehand.layer(model, vram_budget=int(mib * 2**20), device="hpu")
        else:
            config = stagehand.StagehandConfig(
                vram_high_watermark_mb=mib, vram_low_watermark_mb=mib / 2
            )
            stagehand.StagehandRuntime(model, config, r"\d+", device="hpu")
        runtime_of(model).shutdown()

    size = re.escape(format_bytes(weights))
    match = f"lets Sequential have {size} of hpu:0, of which .* are free: .* lower it"
    with pytest.warns(stagehand.StagehandWarning, match=match):
        stream(mib)
    stream((weights - 100) / 2**20)  # as little as is free
    sim.configure(capacity_bytes=sim.allocated_bytes() + weights)
    stream(mib)  # more than weights can take


def test_budget_does_not_warn_of_what_the_model_itself_has_on_the_device(sim):
    """Half of a model was on the device already: it leaves when the model streams."""
    model = uneven()
    for part in model[:2]:
        part.to("hpu")
    rest = weight_bytes(model[2:])
    sim.configure(capacity_bytes=sim.allocated_bytes() + rest // 2)
    budget = weight_bytes(model) - rest // 2
    stagehand.layer(model, vram_budget=budget, device="hpu")  # a warning is an error
    runtime_of(model).shutdown()


def test_budget_does_not_warn_of_tables_that_stay_on_the_host(sim):
    table, layers = nn.Embedding(4096, WIDTH), uneven()
    model = nn.Sequential(table, layers)
    budget = weight_bytes(table)
    sim.configure(capacity_bytes=sim.allocated_bytes() + weight_bytes(layers))
    stagehand.layer(model, vram_budget=budget, device="hpu")  # a warning is an error
    assert runtime_of(model).report().gathered_bytes == budget
    runtime_of(model).shutdown()


def test_a_model_that_does_not_share_has_no_part_of_what_others_hold(sim):
    """Its default budget counted what these hold, and never give to it."""

    def budget_of(**options):
        model = stagehand.layer(uneven(), device="hpu", **options)
        budget = runtime_of(model).report().budget_bytes
        runtime_of(model).shutdown()
        return budget

    other = stagehand.layer(uneven(), device="hpu")
    for _ in range(3):
        other(batch())
    (holding,) = runtime_of(other).report().holdings
    held = holding.held_bytes
    sim.configure(capacity_bytes=sim.allocated_bytes() + held // 2)
    assert budget_of(shared=False) == int(0.8 * (held // 2))
    assert budget_of() == int(0.8 * (held + held // 2))
    assert budget_of(vram_budget=held) == held  # a warning is an error
    with pytest.warns(stagehand.StagehandWarning, match="lower it"):
        budget_of(vram_budget=held, shared=False)
    runtime_of(other).shutdown()
