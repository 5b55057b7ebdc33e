"""How long training steps take in virtual time, against the least that they can."""

from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import stagehand
from simulated.steps import (
    SETTLING,
    SMALL,
    Adapted,
    Case,
    Unit,
    full_bound,
    lora_bound,
    resident_phases,
    train,
)
from simulated.workloads import wait
from stagehand.core.layout import same_bits
from stagehand.core.transfer import Priority, TransferEngine
from stagehand.residency import finding


@pytest.fixture
def start(sim, monkeypatch):
    """Trains a case resident, or streamed until its plan is made for measured times."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", SMALL)
    loops = []

    def start(kind, case, *, streams=True):
        loop = train(sim, kind, case, streams=streams)
        if streams:
            loops.append(loop)
            loop.steps(SETTLING)
            assert loop.plan.limit != "unknown"
        return loop

    yield start
    for loop in loops:
        loop.runtime.shutdown()


@pytest.fixture
def resident(start, sim):
    """The phases of a case whose weights are all on the device."""
    return partial(resident_phases, sim)


# LTX-2 by its video tokens and the device, and ratios around one.
CASES = {
    "LTX-2 768 H100": Case(1.05e-3, 14.04e-3, 16),
    "LTX-2 768 H100, 24 of 48": Case(1.05e-3, 14.04e-3, 24),
    "LTX-2 6144 H100": Case(8.28e-3, 14.04e-3, 16),
    "LTX-2 768 3090": Case(10.48e-3, 30.89e-3, 16),
    "t = 3 c, 4 of 48": Case(1e-3, 3e-3, 4),
    "t = 2.25 c": Case(1e-3, 2.25e-3, 18),
    "t = 1.5 c": Case(1e-3, 1.5e-3, 18),
    "t = c, 8 of 48": Case(1e-3, 1e-3, 8),
    "t = 0.9 c, 3 of 48": Case(1e-3, 0.9e-3, 3),
}
every_case = pytest.mark.parametrize("name", CASES)
most_cases = pytest.mark.parametrize("name", [*CASES][::2])
some_cases = pytest.mark.parametrize("name", ["LTX-2 768 H100", "t = 1.5 c"])
both_kinds = pytest.mark.parametrize("checkpoints", ["inside", "reentrant"])


def without_checkpoints(case):
    return replace(case, checkpoints=None)


# A frozen base


@every_case
def test_lora_with_checkpoints_is_within_five_percent_of_two_phases(
    start, resident, name
):
    case = CASES[name]
    alone = resident(Adapted, case)
    assert alone.backward == pytest.approx(2 * alone.forward, rel=0.05)
    loop = start(Adapted, case)
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.05 * lora_bound(case, alone)


@most_cases
def test_lora_without_checkpoints_is_within_five_percent_of_two_phases(
    start, resident, name
):
    case = without_checkpoints(CASES[name])
    alone = resident(Adapted, case)
    loop = start(Adapted, case)
    for waits in (False, True):
        assert loop.seconds(waits=waits) <= 1.05 * lora_bound(case, alone)
    # Adapters stay on the device: reading them is no use of its own.
    assert len(loop.runtime._parts.steering.workload().order) == 2 * case.depth


@both_kinds
@some_cases
def test_recompute_and_backward_of_a_block_share_one_load(start, name, checkpoints):
    """And the turn uses what is there: no phase loads what the budget can hold."""
    case = replace(CASES[name], checkpoints=checkpoints)
    loop = start(Adapted, case)
    loaded = loop.sim.h2d_bytes()
    loop.steps(3)
    assert loop.sim.h2d_bytes() - loaded == 3 * 2 * case.passing * case.block
    assert loop.plan.streamed_bytes == 2 * case.passing * case.block


# Regions of several blocks, and what a step may take over its bound. While the last one
# turns, nothing of it can leave, so the link rests: the fewer the regions, the longer.
REGIONS = {
    "t = 2.25 c, by 8": (replace(CASES["t = 2.25 c"], region=8), 1.02),
    "LTX-2 768 H100, by 8": (
        Case(1.05e-3 / 8, 14.04e-3 / 8, 24, depth=96, region=8),
        1.02,
    ),
    "t = 3 c, by 6": (Case(1e-3, 3e-3, 14, region=6), 1.11),
    "t = 1.5 c, by 4": (replace(CASES["t = 1.5 c"], region=4), 1.01),
}


@both_kinds
@pytest.mark.parametrize("name", REGIONS)
def test_blocks_stay_for_the_backward_of_their_region(
    start, resident, name, checkpoints
):
    """Regions are computed again, and their blocks still cross once in each phase."""
    case, allowed = REGIONS[name]
    case = replace(case, checkpoints=checkpoints)
    alone = resident(Adapted, case)
    loop = start(Adapted, case)
    loaded = loop.sim.h2d_bytes()
    loop.steps(3)
    assert loop.sim.h2d_bytes() - loaded == 3 * 2 * case.passing * case.block
    for waits in (False, True):
        seconds = loop.seconds(waits=waits)
        assert seconds <= allowed * lora_bound(case, alone)
        assert seconds == pytest.approx(loop.plan.step_seconds, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_layers_of_a_real_model_cross_once_in_each_phase(sim, monkeypatch):
    """Of a Llama with adapters and checkpoints: half of its bytes, twice."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 1024)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 1)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    model = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=2, target_modules="all-linear")
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    adapters = sum(512 * ceil(p.nbytes / 512) for p in trained)
    rate = weights / 0.5 / 1e9
    sim.configure(h2d_gbps=rate, d2h_gbps=rate, tflops=2e-4, hbm_gbps=1e12)
    stagehand.layer(model, vram_budget=weights // 2 + adapters)
    runtime = model._stagehand_layer_runtime
    optimizer = torch.optim.AdamW(trained)
    tokens = torch.randint(0, 128, (1, 8), device="hpu")

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()

    for _ in range(SETTLING + 2):
        step()
    before = sim.h2d_bytes()
    for _ in range(3):
        step()
    assert (sim.h2d_bytes() - before) / 3 <= 1.04 * weights
    assert sim.races() == []
    runtime.shutdown()


@pytest.mark.parametrize("checkpoints", [None, "inside", "reentrant"])
def test_frozen_weights_never_cross_the_link_to_the_host(start, checkpoints):
    """Only where a new plan lets a resident leave is it compared with its master."""
    loop = start(Adapted, Case(1e-3, 1.5e-3, 18, checkpoints))
    sent = loop.sim.d2h_copies()
    loop.steps(3)
    assert loop.sim.d2h_copies() == sent


# A trained base


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_tied_table_that_trains_is_used_alike_in_all_steps(sim, monkeypatch):
    """After each plan it was there already, without a use: another route, and a plan
    for it again, in twenty steps and more."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 1024)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 1)
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=64, n_layer=12, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    weights = sum(p.nbytes for p in model.parameters())
    rate = 2 * weights / 0.4 / 1e9
    sim.configure(h2d_gbps=rate, d2h_gbps=rate, tflops=2e-4, hbm_gbps=1e12)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    stagehand.layer(model.train(), vram_budget=weights // 4)
    runtime = model._stagehand_layer_runtime
    steering, order = runtime._parts.steering, runtime._parts.scheduler.order
    tokens = torch.randint(0, 256, (1, 16), device="hpu")
    plans = []
    for _ in range(12):
        model(input_ids=tokens, labels=tokens).loss.backward()
        wait()
        if steering.plan not in plans:
            plans.append(steering.plan)
    assert order.learned == 2  # there and back
    assert len(plans) <= 3
    assert steering.compute_seconds is not None
    assert sim.races() == []
    runtime.shutdown()


def stepped(start, name, *, checkpoints="inside"):
    case = replace(CASES[name], checkpoints=checkpoints)
    return case, start(Unit, case)


@pytest.mark.parametrize("checkpoints", [None, "inside"])
@most_cases
def test_full_training_is_within_two_percent_of_its_bound(
    start, resident, name, checkpoints
):
    """Gradients go home beside backward; what the optimizer takes comes on top."""
    case, loop = stepped(start, name, checkpoints=checkpoints)
    alone = resident(Unit, case)
    bound = full_bound(case, alone)
    found = loop.phases()
    assert found.whole <= 1.02 * bound
    assert loop.phases().whole == pytest.approx(found.whole)
    assert loop.plan.step_seconds == pytest.approx(found.whole, rel=1e-3)
    assert loop.plan.bound_seconds == pytest.approx(bound, rel=0.05)
    assert loop.plan.limit != "budget"
    # Waits until gradients have left are no compute.
    computes = loop.runtime._parts.steering.compute_seconds
    assert computes == pytest.approx(alone.whole, rel=0.01)
    if loop.plan.limit == "link":
        assert "its gradients do" in loop.runtime.report().advice


@some_cases
def test_every_gradient_crosses_once_while_backward_goes_on(start, resident, name):
    case, loop = stepped(start, name)
    sent = loop.sim.d2h_bytes()
    found = loop.phases()
    assert loop.sim.d2h_bytes() - sent == case.depth * case.block
    alone = resident(Unit, case)
    # The gradient of the block that comes last has nothing left to hide behind.
    longest = max(alone.backward, case.depth * case.load)
    assert found.backward <= 1.03 * (longest + case.load)


def test_records_say_what_backward_waits_for_gradients(sim, monkeypatch):
    """That is time without compute: a step's stalls are what it takes beyond that."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", SMALL)
    case = CASES["LTX-2 768 H100"]
    alone = resident_phases(sim, Unit, case)
    loop = train(sim, Unit, case, telemetry=True)
    loop.steps(SETTLING)
    wait()
    began = sim.host_seconds()
    loop.steps(1)
    taken = sim.host_seconds() - began
    loop.steps(1)  # the record of the step before is closed
    record = loop.runtime.telemetry.records[-2]
    waited = taken - alone.whole - case.load  # the last gradient comes home at the end
    assert record.stall_time_ms / 1e3 == pytest.approx(waited, rel=0.03)
    loop.runtime.shutdown()


@some_cases
def test_a_step_loads_all_that_changed_and_what_the_turn_has_not_left(start, name):
    case, loop = stepped(start, name)
    for _ in range(2):
        loaded = loop.sim.h2d_bytes()
        loop.model(loop.batch()).sum().backward()
        assert loop.sim.h2d_bytes() - loaded == (case.depth + case.passing) * case.block
        loop.update()
    assert loop.plan.streamed_bytes == (case.depth + case.passing) * case.block


@some_cases
def test_nothing_of_trained_blocks_is_loaded_before_the_optimizer_steps(start, name):
    """Blocks that a backward pass does not come to are not there when it ends."""
    _, loop = stepped(start, name)
    loop.model.cut = 8
    loop.steps(4)
    loop.model(loop.batch()).sum().backward()
    first = [b for b in loop.runtime._parts.streamed[:8] if not b.stays]
    assert first
    assert [block.name for block in first if block.slot] == []
    loop.update()
    loop.steps(1)


PARTS = {
    "each second": lambda number: number % 2 == 0,
    "the first half": lambda number: number < 24,
    "the last half": lambda number: number >= 24,
}


@pytest.mark.parametrize("checkpoints", [None, "inside"])
@pytest.mark.parametrize("part", PARTS)
def test_blocks_that_train_do_not_stay_in_the_place_of_frozen_ones(
    start, part, checkpoints
):
    """They cross in each step whether they stay or not: up to 78 loads, not 66."""
    case = replace(CASES["LTX-2 768 H100"], checkpoints=checkpoints)
    numbers = count()

    def kind(nbytes):
        return Unit(nbytes).requires_grad_(PARTS[part](next(numbers)))

    loop = start(kind, case)
    loaded = loop.sim.h2d_bytes()
    found = loop.phases()
    loaded = loop.sim.h2d_bytes() - loaded
    assert loaded == loop.plan.streamed_bytes
    assert loaded <= (2 * case.passing + 2) * case.block
    assert loop.plan.step_seconds == pytest.approx(found.whole, rel=0.02)


@some_cases
def test_a_validation_pass_between_steps_loads_what_trains_again(start, name):
    case, loop = stepped(start, name)
    for _ in range(8):
        loop.steps(1)
        with torch.no_grad():
            loop.forward()
    wait()
    began = loop.sim.host_seconds()
    loop.steps(1)
    with torch.no_grad():
        loop.forward()
    wait()
    taken = loop.sim.host_seconds() - began
    assert loop.plan.step_seconds == pytest.approx(taken, rel=1e-3)
    assert loop.plan.streamed_bytes == (2 * case.depth + case.passing) * case.block


def two_forwards(loop):
    """The second one finds what the first one has loaded: nothing changed between."""
    (loop.forward().sum() + loop.forward().sum()).backward()


def two_backwards(loop):
    """The second one loads all again: gradients of the first one went home."""
    output = loop.forward()
    output.sum().backward(retain_graph=True)
    output.sum().backward()


@pytest.mark.parametrize("step", [two_forwards, two_backwards])
@some_cases
def test_plans_know_what_other_steps_load(start, name, step):
    case = replace(CASES[name], checkpoints=None, depth=16, kept=6)
    loop = start(Unit, case)
    for _ in range(20):
        loaded = loop.sim.h2d_bytes()
        step(loop)
        loop.update()
        wait()
        loaded = loop.sim.h2d_bytes() - loaded
    assert loop.plan.streamed_bytes == pytest.approx(loaded, rel=0.01)


@some_cases
def test_a_plan_is_made_once_others_are_trained(start, name):
    numbers = count()
    case = replace(CASES[name], depth=16, kept=6)
    loop = start(lambda n: Unit(n).requires_grad_(next(numbers) % 2 == 0), case)
    loop.optimizer.add_param_group(
        {"params": [p for p in loop.model.parameters() if not p.requires_grad]}
    )
    loop.steps(SETTLING)
    before = loop.phases().whole
    for number, block in enumerate(loop.model.blocks):
        block.requires_grad_(number % 2 == 1)
    loop.steps(16)
    found = loop.phases().whole
    assert found <= 1.02 * before
    assert loop.plan.step_seconds == pytest.approx(found, rel=0.02)


@some_cases
def test_changed_residents_are_loaded_in_order_ahead_of_their_use(
    start, monkeypatch, name
):
    """Only the first load of a step is one that its use demands."""
    _, loop = stepped(start, name)
    assert loop.plan.resident
    demanded = []
    load = TransferEngine.load

    def counted(engine, slot, target, source, priority):
        if priority is Priority.CRITICAL:
            demanded.append(slot.occupant.index)
        return load(engine, slot, target, source, priority)

    monkeypatch.setattr(TransferEngine, "load", counted)
    loop.steps(2)
    assert demanded == [loop.runtime._parts.streamed[0].index] * 2


@some_cases
def test_batches_that_accumulate_are_within_ten_percent_of_as_many_steps(
    start, resident, name
):
    """An optimizer may step without a word, so each forward loads all again."""
    case, loop = stepped(start, name)
    bound = 2 * full_bound(case, resident(Unit, case))
    for _ in range(3):
        wait()
        began, sent = loop.sim.host_seconds(), loop.sim.d2h_bytes()
        for _ in range(2):
            loop.model(loop.batch()).sum().backward()
        wait()
        assert loop.sim.host_seconds() - began <= 1.1 * bound
        assert loop.sim.d2h_bytes() - sent == 2 * case.depth * case.block
        loop.update()


@some_cases
def test_streamed_training_in_virtual_time_has_the_resident_result(start, name):
    case = CASES[name]
    for kind in (Adapted, Unit):
        loop = start(kind, case)
        loop.runtime.shutdown()
        other = start(kind, case, streams=False)
        other.steps(SETTLING)
        for one, two in zip(
            loop.model.parameters(), other.model.parameters(), strict=True
        ):
            assert same_bits(one.detach(), two.detach().cpu())
