"""A conductor over streamed models: phases, limits that bite, budgets, records."""

import gc
import itertools
import json
import threading
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stagehand
from architectures import assert_bitwise_equal
from equality import all_equal
from interrupts import interrupted_at
from scenario.small import (
    LAYER_BYTES,
    assert_passes_equal,
    batch,
    run_resident,
    runtime_of,
    stack,
)
from stagehand import ActivationRuntime, ActivationStagehandConfig
from stagehand.conductor import link
from stagehand.conductor import parts as conductor_parts
from stagehand.conductor.adapters import Conducted, LinkNeed, RuntimeAdapter
from stagehand.conductor.slots import Token
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.device import HostDevice, find_device
from stagehand.core.ledger import NO_LIMIT, Mode
from stagehand.core.limits import Bounds, Limits, Priority
from stagehand.core.steps import _heard
from stagehand.core.telemetry import Counters
from stagehand.core.traffic import Denied
from stagehand.core.transfer import TransferEngine
from stagehand.errors import ClosedError, ConfigError, StagehandOOMError
from stagehand.residency.shared import shared_device
from stagehand.units import MIB

DEPTH = 8
BUDGET = 5 * LAYER_BYTES


def listening():
    """How many conductors are told of optimizers' steps."""
    methods = filter(None, (known() for known in list(_heard.values())))
    return sum(isinstance(m.__self__, conductor_parts.Parts) for m in methods)


@pytest.fixture
def conduct(sim):
    """Makes conductors, and ends them after the test."""
    made = []

    def conduct(*models, policy=None, **options):
        options = {"link_arbitration": "never", "telemetry_interval_steps": 1} | options
        rest = {} if policy is None else {"policy": policy}
        conductor = stagehand.ConductorRuntime(
            stagehand.ConductorConfig(**options), **rest
        )
        made.append(conductor)
        for model in models:
            conductor.attach(model)
        return conductor

    yield conduct
    for conductor in made:
        conductor.shutdown()


@pytest.fixture
def stream(sim):
    """Streams models, and shuts them down after the test."""
    models = []

    def stream(budget=BUDGET, *, passes=0, depth=DEPTH, **options):
        model = stagehand.layer(stack(depth), vram_budget=budget, **options)
        models.append(model)
        for _ in range(passes):
            run(model)
        return model

    yield stream
    for model in models:
        if model.__dict__.get("_stagehand_layer_runtime") is not None:
            runtime_of(model).shutdown()
        model.zero_grad()  # gradients are in pinned memory


def run(model):
    with torch.no_grad():
        return model(batch().to("hpu"))


def train(model, optimizer=None):
    model(batch().to("hpu")).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def loads(monkeypatch):
    """The urgency of each load that was queued."""
    found = []

    def watch(model):
        engine = runtime_of(model).engine
        load = engine.load

        def watched(slot, target, source, priority):
            answer = load(slot, target, source, priority)
            if not isinstance(answer, Denied):
                found.append(priority)
            return answer

        monkeypatch.setattr(engine, "load", watched)
        return found

    return watch


def early(found):
    return sum(priority >= Priority.SPECULATIVE for priority in found)


# Disabled


def test_a_disabled_conductor_has_no_parts_and_its_methods_do_nothing(sim):
    conductor = stagehand.ConductorRuntime(stagehand.ConductorConfig(enabled=False))
    assert vars(conductor) == {"_enabled": False}
    assert not conductor.enabled
    conductor.attach("nothing that could be attached")
    conductor.attach_store("store", dict)
    conductor.enter_optimizer()  # without a step
    conductor.begin_step(-1)
    conductor.enter_forward()
    conductor.enter_backward()
    conductor.end_step()
    conductor.detach("anything")
    conductor.shutdown()
    assert vars(conductor) == {"_enabled": False}
    assert repr(conductor) == "ConductorRuntime(disabled)"
    with pytest.raises(ConfigError, match="has no parts"):
        _ = conductor.budget


# Phases


def test_phases_are_checked_in_order(conduct):
    conductor = conduct()
    with pytest.raises(ConfigError, match="cannot go from STEP_END to FORWARD"):
        conductor.enter_forward()
    conductor.begin_step(7)
    conductor.enter_optimizer()
    with pytest.raises(ConfigError, match="step 7 cannot go from OPTIMIZER to BACK"):
        conductor.enter_backward()
    conductor.end_step()
    conductor.end_step()
    assert (conductor.clock.step, conductor.clock.phase) == (7, Phase.STEP_END)


def phases(conductor):
    events = [e for e in conductor.telemetry.events if e["event"] == "phase"]
    return [(e["step"], e["phase"]) for e in events]


STEP = ("STEP_BEGIN", "FORWARD", "BACKWARD", "OPTIMIZER", "STEP_END")


def test_phases_are_detected_where_nobody_tells_them(stream, conduct):
    model = stream()
    conductor = conduct(model, debug_event_trace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer)
    expected = [(step, phase) for step in (1, 2, 3) for phase in STEP][:-1]
    assert phases(conductor) == expected


def test_the_backward_of_several_micro_batches_is_followed(stream, conduct):
    model = stream()
    conductor = conduct(model, debug_event_trace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime_of(model).begin_step(5)
    for _ in range(2):
        with runtime_of(model).managed_forward():
            loss = model(batch().to("hpu")).sum()
        with runtime_of(model).managed_backward():
            loss.backward()
    optimizer.step()
    run(model)
    names = [phase for step, phase in phases(conductor) if step == 5]
    assert names == [*STEP[:3], *STEP[1:3], "OPTIMIZER"]


def test_two_optimizers_in_turn_make_two_steps(stream, conduct):
    """After an optimizer no forward can follow: it is a step of its own."""
    model = stream()
    conductor = conduct(model, debug_event_trace=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    runtime_of(model).begin_step(5)
    for optimizer in optimizers:
        with runtime_of(model).managed_forward():
            loss = model(batch().to("hpu")).sum()
        with runtime_of(model).managed_backward():
            loss.backward()
        optimizer.step()
    runtime_of(model).end_step()
    assert [phase for _, phase in phases(conductor)] == [*STEP, *STEP]


def test_phases_that_are_told_end_the_detection(stream, conduct):
    model = stream()
    conductor = conduct(model)
    run(model)
    assert conductor.clock.phase is Phase.FORWARD
    conductor.begin_step(40)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (conductor.clock.step, conductor.clock.phase) == (40, Phase.STEP_BEGIN)


def test_a_phase_that_is_refused_does_not_end_the_detection(stream, conduct):
    """It moves nothing: what came after it was neither told nor detected."""
    model = stream()
    conductor = conduct(model)
    with pytest.raises(ConfigError, match="cannot go from STEP_END to OPTIMIZER"):
        conductor.enter_optimizer()
    run(model)
    assert conductor.clock.phase is Phase.FORWARD


def test_detection_can_be_left_out(stream, conduct):
    model = stream()
    conductor = conduct(model, detect_phases=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert conductor.clock.phase is Phase.STEP_END


def test_when_the_followed_runtime_is_detached_the_next_one_is_followed(
    stream, conduct
):
    first, second = stream(BUDGET), stream(BUDGET)
    conductor = conduct(first, second)
    run(second)
    assert conductor.clock.phase is Phase.STEP_END
    conductor.detach(first)
    run(first)
    assert conductor.clock.phase is Phase.STEP_END
    run(second)
    assert conductor.clock.phase is Phase.FORWARD


class Steps:
    """A runtime that has nothing but a clock."""

    kind, is_open, device_account = "steps", True, None

    def __init__(self, window=2):
        self.clock, self.bounds, self.window = PhaseClock(), Bounds(), window
        self.engine = TransferEngine(HostDevice(), Counters())

    def snapshot(self):
        return {}

    def link_need(self):
        return None


MOVES = ["begin", "end", "optimizer", Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


@given(moves=st.lists(st.sampled_from(MOVES), max_size=12))
def test_detection_follows_any_order_of_steps_phases_and_optimizers(moves):
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(vram_hard_cap_mb=1), device="cpu"
    )
    steps, twin = Steps(), PhaseClock()
    conductor.attach(steps)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for move in moves:
        if isinstance(move, Phase):
            try:
                twin.enter(move)
            except ConfigError:
                continue  # the runtime itself would refuse
            steps.clock.enter(move)
            assert conductor.clock.phase is move
        elif move == "optimizer":
            optimizer.step()
            open_step = conductor.clock.phase is not Phase.STEP_END
            assert (conductor.clock.phase is Phase.OPTIMIZER) is open_step
        else:
            for clock in (steps.clock, twin):
                getattr(clock, f"{move}_step")()
            assert conductor.clock.phase is steps.clock.phase
        assert steps.bounds.current == conductor.limits
    conductor.shutdown()
    assert steps.bounds.current == Limits()


# Limits that bite


def test_in_the_optimizers_phase_nothing_is_loaded_ahead(stream, conduct, loads):
    model = stream(passes=6)
    found = loads(model)
    run(model)
    usual, demand = early(found), len(found) - early(found)
    assert usual > 0
    conductor = conduct(model)
    conductor.begin_step()
    conductor.enter_forward()
    conductor.enter_optimizer()
    found.clear()
    run(model)
    run(model)
    found.clear()
    run(model)
    assert early(found) == 0
    assert len(found) >= usual + demand  # what was early is demand now
    assert conductor.transfer.denied_count == 0  # nobody even asked
    conductor.begin_step()
    run(model)
    found.clear()
    run(model)
    assert early(found) == usual


def test_under_pressure_backward_loads_nothing_ahead(sim, stream, conduct, loads):
    model = stream()
    found = loads(model)

    def early_in_backward():
        loss = model(batch().to("hpu")).sum()
        found.clear()
        loss.backward()
        return early(found)

    for _ in range(3):
        usual = early_in_backward()
    assert usual > 0
    ballast = torch.empty(MIB, dtype=torch.uint8, device="hpu")
    conductor = conduct(model, vram_hard_cap_mb=1.2)
    assert early_in_backward() == 0
    assert conductor.limits == Limits(lookahead_blocks=1, suppress_speculative=True)
    del ballast
    assert early_in_backward() == usual
    assert conductor.limits == Limits()


def test_full_slots_shrink_the_window_block_by_block_until_they_are_free(
    stream, conduct
):
    model = stream(passes=8)
    scheduler = runtime_of(model)._parts.scheduler
    planned = scheduler.lookahead
    assert planned >= 2
    conductor = conduct(model, h2d_slots=1, detect_phases=False)
    token = conductor.transfer.acquire("h2d")
    conductor.begin_step()
    windows = []
    for _ in range(6):
        run(model)  # what it would load early is denied
        conductor.enter_forward()
        windows.append(scheduler.lookahead)
    window = runtime_of(model).window
    expected = [planned] * 3 + [max(1, window - beyond) for beyond in (1, 2, 3)]
    assert windows == [min(planned, allowed) for allowed in expected]
    assert windows[-1] == 1
    token.release()
    conductor.begin_step()
    assert scheduler.lookahead == planned


def test_slots_that_are_free_at_the_check_shrink_nothing(stream, conduct):
    model = stream(passes=8)
    scheduler = runtime_of(model)._parts.scheduler
    planned = scheduler.lookahead
    conductor = conduct(model, h2d_slots=1, detect_phases=False)
    conductor.begin_step()
    for _ in range(6):
        token = conductor.transfer.acquire("h2d")
        run(model)
        assert conductor.transfer.denied_count > 0
        token.release()
        torch.accelerator.synchronize()
        conductor.enter_forward()
    assert scheduler.lookahead == planned


def test_slots_that_are_full_without_anybody_waiting_shrink_nothing(stream, conduct):
    """As of a host that is ahead of the device: it finds its own copies under way."""
    model = stream(passes=8)
    scheduler = runtime_of(model)._parts.scheduler
    planned = scheduler.lookahead
    conductor = conduct(model, h2d_slots=1, detect_phases=False)
    conductor.transfer.acquire("h2d")
    conductor.begin_step()
    for _ in range(6):
        conductor.enter_forward()
    assert scheduler.lookahead == planned


def test_limits_only_tighten_within_a_step_whatever_a_policy_says(stream, conduct):
    model = stream()
    said = {
        Phase.FORWARD: Limits(lookahead_blocks=2, inflight_h2d=1),
        Phase.BACKWARD: Limits(lookahead_blocks=1, suppress_speculative=True),
        Phase.OPTIMIZER: Limits(lookahead_blocks=5, inflight_h2d=4),
    }
    conductor = conduct(model, policy=lambda r: said.get(r.phase, Limits()))
    conductor.begin_step()
    assert conductor.limits == Limits()
    conductor.enter_forward()
    assert conductor.limits == said[Phase.FORWARD]
    conductor.enter_backward()
    tight = Limits(lookahead_blocks=1, inflight_h2d=1, suppress_speculative=True)
    assert conductor.limits == tight
    conductor.enter_optimizer()
    assert conductor.limits == tight == runtime_of(model).bounds.current
    conductor.end_step()
    conductor.begin_step()
    assert conductor.limits == Limits() == runtime_of(model).bounds.current


any_limits = st.builds(
    Limits,
    lookahead_blocks=st.none() | st.integers(0, 3),
    inflight_h2d=st.none() | st.integers(1, 3),
    suppress_speculative=st.booleans(),
)


@given(says=st.lists(any_limits, min_size=4, max_size=12))
def test_no_policy_loosens_anything_within_a_step(says):
    answers = iter(says)
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration="never", vram_hard_cap_mb=1),
        policy=lambda readings: next(answers),
    )
    window, suppressed = None, False
    for number in range(len(says)):
        if number % 4 == 0:
            conductor.begin_step()
            assert conductor.limits == says[number]
        else:
            conductor.clock.enter(Phase(number % 4))
            now = conductor.limits
            assert now.suppress_speculative >= suppressed
            if window is not None:
                assert now.lookahead_blocks <= window
        window = conductor.limits.lookahead_blocks
        suppressed = conductor.limits.suppress_speculative
    conductor.shutdown()


@pytest.mark.parametrize("says", [None, "nothing"])
def test_a_policy_that_returns_no_limits_is_named_and_changes_nothing(
    stream, conduct, says
):
    model = stream(passes=4)
    conductor = conduct(model, policy=lambda readings: says)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"returned a {type(says).__name__}: exp"):
            run(model)
        assert conductor.limits == runtime_of(model).bounds.current == Limits()
    conductor.detach(model)
    run(model)


def test_what_is_no_configuration_or_no_policy_is_refused(sim):
    with pytest.raises(ConfigError, match="config is a dict: expected a ConductorConf"):
        stagehand.ConductorRuntime({"enabled": False})
    with pytest.raises(ConfigError, match="policy is a str: expected a function"):
        stagehand.ConductorRuntime(policy="heuristic")
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration="never")
    )
    with pytest.raises(ConfigError, match="read is a dict: expected a function"):
        conductor.attach_store("store", {})
    conductor.shutdown()


# Attaching


def state_of(model):
    runtime = runtime_of(model)
    engine, scheduler = runtime.engine, runtime._parts.scheduler
    return (
        *(scheduler.lookahead, engine.h2d.capacity, engine.d2h.capacity),
        *(engine.traffic, engine._limited, runtime.bounds.current),
    )


@pytest.mark.parametrize("when", ["between", "in a pass", "in backward", "at the end"])
def test_a_detach_at_any_time_restores_what_was(stream, conduct, when):
    model = stream(passes=4)
    before = state_of(model)
    conductor = conduct(
        model, policy=lambda r: Limits(lookahead_blocks=0, inflight_h2d=1)
    )
    run(model)
    assert state_of(model) != before
    detach = conductor.shutdown if when == "at the end" else lambda: None
    if when == "between":
        conductor.detach(model)
        conductor.detach(model)
    elif when == "in a pass":
        hook = model[3].register_forward_hook(lambda *_: conductor.detach("stagehand"))
        run(model)
        hook.remove()
    elif when == "in backward":
        x = batch().to("hpu").requires_grad_()
        x.register_hook(lambda grad: conductor.detach(model))
        model(x).sum().backward()
    detach()
    run(model)
    assert state_of(model) == before
    assert_passes_equal(
        model, run_resident(stack(DEPTH), "hpu", batch()), batch().to("hpu")
    )


def test_a_model_cannot_be_attached_twice_nor_under_a_name_that_is_taken(
    stream, conduct
):
    model, other = stream(), stream(shared=False)
    conductor = conduct(model)
    with pytest.raises(ConfigError, match="attached already"):
        conductor.attach(runtime_of(model))
    booked = conductor.budget.ledger.device.held_bytes
    with pytest.raises(ConfigError, match="'stagehand' is taken"):
        conductor.attach(other, name="stagehand")
    with pytest.raises(ConfigError, match="'stagehand' is taken"):
        conductor.attach_store("stagehand", dict)
    assert conductor.budget.ledger.device.held_bytes == booked
    conductor.attach(other)
    assert "stagehand, stagehand 2" in repr(conductor)


def test_copies_home_yield_again_to_a_model_that_comes_back(
    stream, conduct, monkeypatch
):
    """Where it had the same time for each load as before, nobody said so again."""
    model = stream()
    here = find_device(None).torch_device
    rates = link.LinkRates(h2d=1e9, d2h=1e9, h2d_busy=5e8, d2h_busy=5e8)
    monkeypatch.setattr(link, "_known", {here: rates})
    need = LinkNeed(compute_seconds=1.0, loads=4)
    monkeypatch.setattr(type(runtime_of(model)), "link_need", lambda _: need)
    conductor = conduct(link_arbitration="measure", detect_phases=False)
    for there in (True, False, True):
        conductor.detach(model)
        if there:
            conductor.attach(model)
        conductor.begin_step()
        assert (conductor._parts.traffic._home_share is not None) is there
        conductor.end_step()


def test_a_store_that_was_attached_first_is_in_no_models_way(stream, conduct):
    models, conductor = [stream(), stream()], conduct()
    conductor.attach_store("store", dict)
    for model in models:
        conductor.attach(model)
    conductor.detach(models[0])
    runtime_of(models[1]).shutdown()
    run(models[0])
    conductor.attach(models[0])  # what was shut down is forgotten now
    conductor.begin_step()
    conductor.end_step()
    [record] = conductor.telemetry.records
    assert set(record.runtime_snapshots) == {"store", "stagehand"}


def test_what_cannot_be_attached_is_refused_by_name(stream, conduct):
    model, elsewhere = stream(), stream(device="cpu")
    conductor = conduct()
    with pytest.raises(ConfigError, match=r"on 'cpu', and .* of 'hpu:0'"):
        conductor.attach(elsewhere)
    assert conductor.budget.ledger.device.held_bytes == 0
    with pytest.raises(ConfigError, match="to be attached is of type Linear: expected"):
        conductor.attach(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="name is 3: expected a text or None"):
        conductor.attach(model, name=3)
    with pytest.raises(ConfigError, match="name is 3: expected a text"):
        conductor.attach_store(3, dict)
    with pytest.raises(ConfigError, match="to be detached is of type int: expected"):
        conductor.detach(3)


def test_a_model_has_one_conductor_at_a_time(stream, conduct):
    model = stream()
    first, second = conduct(model), conduct()
    with pytest.raises(ConfigError, match="attached to another conductor"):
        second.attach(model)
    assert second.budget.ledger.device.held_bytes == 0
    first.detach(model)
    second.attach(model)
    second.detach(model)
    runtime = runtime_of(model)
    runtime.shutdown()
    with pytest.raises(ClosedError, match="was shut down: it cannot be attached"):
        second.attach(runtime)


def test_a_streamed_models_runtime_is_what_the_protocol_asks_for(stream):
    assert isinstance(runtime_of(stream()), Conducted)


def test_weights_lead_whoever_was_attached_first(stream, conduct):
    """A runtime for saved tensors knows no backward and no optimizer."""
    model = stream()
    activations = stagehand.ActivationRuntime()
    conductor = conduct()
    conductor.attach(activations)
    conductor.attach(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert conductor.clock.phase is Phase.OPTIMIZER
    assert activations.bounds.current.suppress_speculative
    conductor.detach(activations)
    assert activations.bounds.current == Limits()
    assert activations.engine.traffic is None
    activations.shutdown()


def test_the_first_leads_until_one_comes_that_loads_ahead():
    """And nobody listens to it any more then."""
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(vram_hard_cap_mb=1), device="cpu"
    )
    first, second, ahead = Steps(window=0), Steps(window=0), Steps()

    def lead():
        """Which of them the conductor follows."""
        found = []
        for each in (first, second, ahead):
            each.clock.begin_step()
            found.append(conductor.clock.phase is not Phase.STEP_END)
            each.clock.end_step()
        return found

    conductor.attach(first)
    conductor.attach(second)
    assert lead() == [True, False, False]
    conductor.attach(ahead)
    assert lead() == [False, False, True]
    conductor.shutdown()


def test_outputs_and_gradients_are_those_without_a_conductor(stream, conduct):
    """With a slot for each direction, limits that change, and early loads denied."""
    results = []
    for conducted in (False, True):
        model = stream()
        if conducted:
            conduct(model, h2d_slots=1, d2h_slots=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            train(model, optimizer)
        runtime_of(model).shutdown()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all_equal(*results)


def test_a_failed_step_leaves_the_conductor_usable(stream, conduct):
    model = stream()
    conductor = conduct(model)

    def fail(*_):
        raise RuntimeError("on purpose")

    hook = model[4].register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            train(model)
    hook.remove()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert conductor.clock.phase is Phase.OPTIMIZER


def test_a_runtime_that_is_shut_down_is_forgotten_and_its_budget_free(stream, conduct):
    model, other = stream(), stream()
    conductor = conduct(other, model)
    runtime_of(model).shutdown()
    run(other)
    assert "stagehand 2" not in repr(conductor)
    conductor.detach(other)
    assert conductor.budget.ledger.device.held_bytes == 0


def test_the_next_one_is_attached_in_place_of_one_that_was_shut_down(stream, conduct):
    """Before any step has seen that it was."""
    first, second = stream(shared=False), stream(shared=False)
    conductor = conduct(first, vram_hard_cap_mb=1.5 * BUDGET / MIB)
    runtime_of(first).shutdown()
    conductor.attach(second)
    train(second)


def test_one_that_could_not_be_attached_leaves_no_trace(stream, conduct, monkeypatch):
    model, conductor = stream(), conduct()
    with monkeypatch.context() as patch:
        patch.setattr(runtime_of(model).bounds, "post", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            conductor.attach(model)
    assert runtime_of(model).engine.traffic is None
    assert conductor.budget.ledger.device.holders() == {}
    conductor.attach(model)
    train(model)


def test_models_in_two_threads_are_conducted_together(stream, conduct):
    models = [stream(), stream()]
    conduct(*models, h2d_slots=1)
    expected = run_resident(stack(DEPTH), "hpu", batch())
    wrong = []

    def work(model):
        wrong.extend(_ for _ in range(5) if not torch.equal(run(model), expected))
        torch.accelerator.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_models_that_train_in_two_threads_send_each_others_gradients_home(
    stream, conduct
):
    """What yields is put aside for all, and whoever loads next lets it go."""

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            train(model, optimizer)
        torch.accelerator.current_stream().synchronize()

    def values(model):
        return [p.detach().clone() for p in model.parameters()]

    alone = stream()
    trained(alone)
    models = [stream(), stream()]
    conduct(*models, link_arbitration="always")
    threads = [threading.Thread(target=trained, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        assert all_equal(values(model), values(alone))


# Budget


def test_a_budget_that_does_not_fit_is_refused_with_who_holds_what(stream, conduct):
    model = stream()
    conductor = conduct(vram_hard_cap_mb=0.05)
    grant = conductor.budget.reserve(40_000, "optimizer state", mode=Mode.BURST)
    with pytest.raises(
        StagehandOOMError, match=r"'stagehand' needs .*held by 'optimizer state'"
    ):
        conductor.attach(model)
    assert state_of(model)[3] is None
    grant.release()
    conductor.attach(model)
    assert conductor.budget.ledger.device.holders() == {"stagehand": BUDGET}
    conductor.detach(model)
    assert conductor.budget.ledger.device.held_bytes == 0


def test_a_budget_that_does_not_fit_by_itself_is_refused(stream, conduct):
    conductor = conduct(vram_hard_cap_mb=0.001)
    with pytest.raises(StagehandOOMError, match="held by nobody;"):
        conductor.attach(stream())
    assert conductor.budget.reserve(0, "nothing") is not None


def test_models_that_share_a_device_are_booked_once(stream, conduct):
    models = [stream(), stream()]
    shared = len({id(runtime_of(m).device_account) for m in models}) == 1
    conductor = conduct(*models)
    booked = conductor.budget.ledger.device.held_bytes
    assert booked == (1 if shared else 2) * BUDGET
    conductor.detach(models[0])
    assert conductor.budget.ledger.device.held_bytes == BUDGET
    conductor.detach(models[1])
    assert conductor.budget.ledger.device.held_bytes == 0


def test_a_budget_that_changes_is_booked_anew_as_far_as_there_is_room(stream, conduct):
    model = stream()
    conductor = conduct(vram_hard_cap_mb=1)
    conductor.attach(model)
    account = conductor.budget.ledger.device
    held = []
    for vram_budget in ("0.5MiB", "2MiB", "0.25MiB"):
        runtime_of(model).set_budget(vram_budget)
        conductor.begin_step()
        conductor.end_step()
        held.append(account.held_bytes)
    assert held == [MIB // 2, MIB, MIB // 4]
    conductor.detach(model)
    assert account.held_bytes == 0


def test_reservations_for_a_phase_end_with_it(conduct):
    conductor = conduct(vram_hard_cap_mb=1)
    held = conductor.budget.ledger.device
    conductor.begin_step()
    conductor.enter_forward()
    conductor.budget.reserve(100, "a", until=Phase.FORWARD)
    conductor.budget.reserve(10, "b", until=Phase.OPTIMIZER)
    conductor.budget.reserve(1, "c")
    conductor.enter_forward()  # the next micro batch
    assert held.held_bytes == 111
    conductor.enter_backward()
    assert held.held_bytes == 11
    conductor.end_step()  # without the optimizer
    assert held.held_bytes == 1


def test_a_reservation_that_is_made_between_steps_lasts_until_its_phase_ends(conduct):
    """Memory for the next forward is booked before its step begins."""
    conductor = conduct(vram_hard_cap_mb=1)
    held = conductor.budget.ledger.device
    for _ in range(2):
        conductor.budget.reserve(100, "a", until=Phase.FORWARD)
        conductor.budget.reserve(10, "b", until=Phase.STEP_END)
        conductor.begin_step()
        conductor.enter_forward()
        assert held.held_bytes == 110
        conductor.enter_backward()
        assert held.held_bytes == 10
        conductor.end_step()
        assert held.held_bytes == 0


def test_without_a_cap_all_of_the_device_may_be_granted(sim):
    """What is allocated there already counts in; the host does not tell of it."""
    for device in ("cpu", "hpu"):
        ballast = torch.empty(MIB, device=device)
        conductor = stagehand.ConductorRuntime(device=device)
        cap = conductor.budget.ledger.device.limit_bytes
        free = find_device(device).free_bytes()
        if device == "hpu":
            assert cap == free + ballast.nbytes
        assert cap > 0
        conductor.shutdown()


def test_caps_are_those_of_the_configuration(conduct):
    conductor = conduct(vram_soft_cap_mb=2, vram_hard_cap_mb=3, pinned_cap_mb=1)
    reserve = conductor.budget.reserve
    assert reserve(2 * MIB + 1, "a") is None
    assert reserve(2 * MIB + 1, "a", mode=Mode.BURST) is not None
    assert reserve(MIB + 1, "a", kind="pinned") is None
    assert conductor.budget.counts == (1, 0, 2)
    assert reserve(MIB, "a", kind="pinned") is not None


def test_the_pinned_cap_is_of_weights_saved_tensors_and_grants_together(
    sim, stream, conduct
):
    model = stream(passes=1)
    pinned = shared_device(find_device(None)).ledger.pinned
    weights, most = pinned.held_bytes, pinned.held_bytes + 2 * MIB
    assert weights > 0
    before = sim.pinned_bytes()
    conductor = conduct(model, pinned_cap_mb=most / MIB)
    assert conductor.budget.reserve(2 * MIB + 1, "a", kind="pinned") is None
    grant = conductor.budget.reserve(MIB, "a", kind="pinned")
    saved = ActivationRuntime(ActivationStagehandConfig(budget=MIB))
    conductor.attach(saved)
    x = torch.ones(MIB // 4, device="hpu", requires_grad=True)
    warned = pytest.warns(stagehand.StagehandWarning, match="pageable memory")
    with saved.managed_forward(), warned:
        y = x.sigmoid().sigmoid().sigmoid().sigmoid()
    assert sim.pinned_bytes() == before + MIB
    assert pinned.held_bytes == most
    y.sum().backward()
    del y
    saved.shutdown()
    conductor.shutdown()
    assert pinned.held_bytes == weights
    grant.release()
    assert pinned.held_bytes == weights
    assert pinned.free_bytes > most


@pytest.mark.parametrize("cap", [3, 4, 7])
def test_who_comes_while_another_has_planned_its_staging_leaves_it_that_room(
    stream, conduct, monkeypatch, cap
):
    """It was planned and not taken: the first one waited for it for ever."""
    expected = run_resident(stack(DEPTH), "hpu", batch())
    conductor = conduct(pinned_cap_mb=cap * LAYER_BYTES / MIB)
    first, second = stream(), stream()
    loader = runtime_of(first)._parts.loader
    set_slabs, came = loader.set_slabs, []

    def planned(count, nbytes):
        set_slabs(count, nbytes)
        if count and not came:
            came.append(second)
            with pytest.raises(StagehandOOMError, match="raise pinned_cap_mb"):
                run(second)

    monkeypatch.setattr(loader, "set_slabs", planned)
    for _ in range(3):
        assert_bitwise_equal(run(first), expected, "the first")
    assert came
    conductor.shutdown()
    assert_bitwise_equal(run(second), expected, "the second, without a cap")


class Interruption(BaseException):
    """Not an error: what Ctrl-C raises is none."""


@pytest.mark.parametrize("fails", ["telemetry_file", "measure_link", "cap_pinned"])
def test_a_conductor_that_could_not_be_made_leaves_no_cap_and_no_hook(
    sim, tmp_path, monkeypatch, fails
):
    shared, options = shared_device(find_device(None)), {}

    def stop(*_):
        raise Interruption

    if fails == "telemetry_file":
        options["telemetry_file"] = tmp_path / "nowhere" / "steps.jsonl"
    elif fails == "measure_link":
        monkeypatch.setattr(conductor_parts, "measure_link", stop)
    else:
        cap = shared.cap_pinned

        def capped(who, nbytes):
            cap(who, nbytes)
            if nbytes is not None:
                stop()

        monkeypatch.setattr(shared, "cap_pinned", capped)
    hooks = listening()
    with pytest.raises((ConfigError, Interruption)):
        stagehand.ConductorRuntime(
            stagehand.ConductorConfig(pinned_cap_mb=0.001, **options)
        )
    assert shared.ledger.pinned.limit_bytes == NO_LIMIT
    assert listening() == hooks


@pytest.mark.parametrize("ends", ["shutdown", "dropped"])
def test_what_is_pinned_beyond_the_cap_is_not_attached(stream, conduct, ends):
    model = stream(passes=1)
    pinned = shared_device(find_device(None)).ledger.pinned
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(pinned_cap_mb=0.01, link_arbitration="never")
    )
    with pytest.raises(StagehandOOMError, match=r"'stagehand' cannot .*; held by '"):
        conductor.attach(model)
    assert state_of(model)[3] is None
    if ends == "shutdown":
        conductor.shutdown()
    del conductor
    gc.collect()
    assert pinned.free_bytes > 1 << 60
    conduct(model)


@pytest.mark.parametrize(
    ("nbytes", "options", "message"),
    [
        (-1, {}, "nbytes is -1: expected a whole number, 0 or more"),
        (1.5, {}, "nbytes is 1.5: expected an int"),
        (True, {}, "nbytes is True: expected an int"),
        (1, {"holder": ["me"]}, r"holder is \['me'\]: expected a text"),
        (1, {"kind": "host"}, "kind is 'host': expected 'device' or 'pinned'"),
        (1, {"mode": "HARD"}, "mode is 'HARD': expected one of Mode.HARD, Mode.SOFT"),
        (1, {"priority": 5}, "priority is 5: expected one of Priority"),
        (1, {"until": "BACKWARD"}, "until is 'BACKWARD': expected one of Phase"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(
    conduct, nbytes, options, message
):
    conductor = conduct(vram_hard_cap_mb=1)
    with pytest.raises(ConfigError, match=message):
        conductor.budget.reserve(nbytes, **{"holder": "me", **options})
    assert conductor.budget.counts == (0, 0, 0)


# Slots


def test_slots_are_shared_with_whoever_asks_and_denials_are_typed(conduct):
    conductor = conduct(h2d_slots=1, d2h_slots=1)
    transfer = conductor.transfer
    for way, reason in (
        ("h2d", Denied.H2D_SLOTS_EXHAUSTED),
        ("d2h", Denied.D2H_SLOTS_EXHAUSTED),
    ):
        token = transfer.acquire(way)
        assert transfer.acquire(way) is reason
        demand = transfer.acquire(way, Priority.REQUIRED)
        assert transfer.in_flight(way) == 2
        token.release()
        token.release()  # idempotent
        assert transfer.in_flight(way) == 1
        demand.release()
        assert transfer.in_flight(way) == 0
    conductor.begin_step()
    conductor.enter_optimizer()
    reason = Denied.PHASE_RULE_SUPPRESSED_SPECULATIVE
    assert transfer.acquire("h2d") is reason
    assert transfer.denied_count == 3
    with pytest.raises(ConfigError, match="way is 'up': expected 'h2d' or 'd2h'"):
        transfer.acquire("up")
    with pytest.raises(ConfigError, match="way is 'up': expected 'h2d' or 'd2h'"):
        transfer.in_flight("up")
    with pytest.raises(ConfigError, match="priority is 'x': expected one of Priority"):
        transfer.acquire("h2d", "x")


def test_a_models_early_loads_wait_for_slots_that_others_hold(stream, conduct, loads):
    model = stream(passes=3)
    found = loads(model)
    conductor = conduct(model, h2d_slots=1)
    token = conductor.transfer.acquire("h2d")
    run(model)
    found.clear()
    run(model)
    assert found == [Priority.CRITICAL] * len(found) != []
    token.release()
    run(model)
    assert early(found) > 0


# Records

KEYS = (
    *("step_id", "vram_allocated_mb", "vram_headroom_mb", "pinned_granted_mb"),
    *("h2d_inflight", "d2h_inflight", "grant_count", "deny_count", "partial_count"),
    *("phase_durations", "runtime_snapshots"),
)


def test_records_have_the_documented_keys_and_come_at_their_interval(
    stream, conduct, tmp_path
):
    path = tmp_path / "conductor.jsonl"
    model = stream()
    conductor = conduct(
        model,
        telemetry_interval_steps=2,
        telemetry_file=path,
        vram_hard_cap_mb=1,
        vram_soft_cap_mb=0.9,
    )
    conductor.attach_store("squareq", lambda: {"pinned_bytes": MIB})
    conductor.budget.reserve(MIB, "too much")
    conductor.budget.reserve(MIB, "some", mode=Mode.SOFT)
    conductor.budget.reserve(MIB // 2, "pinned", kind="pinned")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        train(model, optimizer)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step_id"] for line in lines] == [2, 4]
    line = lines[0]
    assert tuple(line) == KEYS
    assert set(line["phase_durations"]) == {"forward", "backward", "optimizer"}
    assert all(seconds > 0 for seconds in line["phase_durations"].values())
    assert line["vram_allocated_mb"] + line["vram_headroom_mb"] == pytest.approx(1)
    assert (line["grant_count"], line["partial_count"]) == (2, 1)
    assert line["deny_count"] >= 1
    assert lines[1]["grant_count"] == lines[1]["partial_count"] == 0
    own = line["runtime_snapshots"]["stagehand"]
    assert set(own) >= {"max_inflight", "prefetch_window", "pinned_bytes"}
    assert line["runtime_snapshots"]["squareq"] == {"pinned_bytes": MIB}
    pinned = own["pinned_bytes"] / MIB
    assert line["pinned_granted_mb"] == pytest.approx(1.5 + pinned)
    assert len(conductor.telemetry.records) == 2


def test_the_times_of_a_step_are_its_own(conduct):
    conductor = conduct(telemetry_interval_steps=1)
    conductor.begin_step()
    conductor.enter_forward()
    conductor.begin_step()
    conductor.end_step()
    first, second = conductor.telemetry.records
    assert first.phase_durations["forward"] > 0
    assert second.phase_durations["forward"] == 0


def test_events_are_traced_on_request_only(conduct):
    for traced in (False, True):
        conductor = conduct(debug_event_trace=traced)
        conductor.begin_step(3)
        conductor.budget.reserve(1, "me")
        conductor.transfer.acquire("d2h")
        conductor.attach_store("store", dict)
        conductor.detach("store")
        conductor.shutdown()
        events = [event["event"] for event in conductor.telemetry.events]
        expected = ["phase", "reservation", "slot", "attached", "detached", "phase"]
        assert events == (expected if traced else [])


# The end


def test_shutdown_is_idempotent_and_final(stream, conduct):
    model = stream()
    before = listening()
    conductor = conduct(model)
    assert listening() == before + 1
    conductor.shutdown()
    conductor.shutdown()
    assert listening() == before
    conductor.begin_step()
    assert conductor.clock.phase is Phase.STEP_END
    with pytest.raises(ClosedError, match="make a new one"):
        conductor.attach(model)
    with pytest.raises(ClosedError, match="make a new one"):
        conductor.attach_store("store", dict)
    for kind in ("device", "pinned"):
        with pytest.raises(ClosedError):
            conductor.budget.reserve(1, "too late", kind=kind)


def test_the_limits_of_a_phase_end_with_the_conductor(conduct):
    conductor = conduct()
    conductor.begin_step()
    conductor.enter_forward()
    conductor.enter_backward()
    conductor.enter_optimizer()
    slots = conductor.transfer
    assert isinstance(slots.acquire("h2d"), Denied)
    conductor.shutdown()
    assert isinstance(slots.acquire("h2d"), Token)


def test_a_conductor_that_is_dropped_is_not_kept_by_torchs_optimizers(sim):
    before = listening()
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration="never")
    )
    gone = weakref.ref(conductor._parts)
    del conductor
    gc.collect()
    assert gone() is None
    assert listening() == before


@contextmanager
def held_by_a_thread(lock):
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            over.wait(timeout=120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(timeout=120)
    yield
    over.set()
    thread.join(timeout=120)


@pytest.mark.parametrize("told", [True, False], ids=["told", "detected"])
@pytest.mark.parametrize("how", ["dropped", "in a cycle", "in another's hands"])
def test_a_conductor_that_is_dropped_leaves_everything_as_it_was(stream, how, told):
    """Its models do not keep it: else limits of its last phase would hold for ever."""
    model = stream(passes=4)
    before, hooks = state_of(model), listening()
    subscribed = len(runtime_of(model).clock._subscribers)
    conductor = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration="always")
    )
    conductor.attach(model)
    if told:
        conductor.begin_step()
        conductor.enter_optimizer()
    else:
        train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert runtime_of(model).bounds.current.suppress_speculative
    gone = weakref.ref(conductor._parts)
    if how == "in a cycle":
        conductor.me = conductor
    with ExitStack() as withs:
        if how == "in another's hands":
            withs.enter_context(held_by_a_thread(conductor._parts._lock))
        del conductor
        if how == "in a cycle":
            gc.collect()
    train(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert state_of(model) == before
    gc.collect()
    assert gone() is None
    assert listening() == hooks
    assert len(runtime_of(model).clock._subscribers) == subscribed
    another = stagehand.ConductorRuntime(
        stagehand.ConductorConfig(link_arbitration="never")
    )
    another.attach(model)
    another.shutdown()


@pytest.mark.parametrize("where", [1, 4, DEPTH - 1])
def test_gradients_that_a_dropped_conductor_had_put_aside_come_home(stream, where):
    """It is dropped in the middle of a backward pass, by whoever."""
    results = []
    for drops in (False, True):
        model = stream(passes=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        conductors = []
        if drops:
            config = stagehand.ConductorConfig(link_arbitration="always")
            conductors.append(stagehand.ConductorRuntime(config))
            conductors[0].attach(model)
        for _ in range(3):
            model[where].register_full_backward_hook(
                lambda *_, made=conductors: made.clear()
            )
            model(batch().to("hpu")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime_of(model).shutdown()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all_equal(*results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram_hard_cap_mb": 0}, "vram_hard_cap_mb is 0: expected more than 0"),
        ({"vram_soft_cap_mb": -1}, "vram_soft_cap_mb is -1"),
        ({"vram_soft_cap_mb": 3, "vram_hard_cap_mb": 2}, "soft cap that is not above"),
        ({"pinned_cap_mb": float("inf")}, "pinned_cap_mb is inf: expected more than 0"),
        ({"h2d_slots": 0}, "h2d_slots is 0: expected 1 or more"),
        ({"d2h_slots": 0}, "d2h_slots is 0: expected 1 or more"),
        ({"d2h_slots": 1.5}, "d2h_slots is 1.5: expected an int"),
        ({"vram_hard_cap_mb": "8GB"}, "vram_hard_cap_mb is '8GB': expected a number"),
        ({"telemetry_interval_steps": 0}, "telemetry_interval_steps is 0"),
        ({"yield_backlog_mb": -1}, "yield_backlog_mb is -1"),
        ({"yield_backlog_mb": float("inf")}, "yield_backlog_mb is inf"),
        (
            {"link_arbitration": "maybe"},
            "link_arbitration is 'maybe': expected 'measure'",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        stagehand.ConductorConfig(**options)


@pytest.mark.parametrize("asks", ["attach", "detach"])
def test_an_interrupt_while_a_model_is_attached_or_detached_does_not_keep_it(
    conduct, stream, asks
):
    """It belonged to that conductor for good, which did not know of it."""
    model = stream()
    parts = conductor_parts.Parts
    doing = parts.attach, parts.add, parts._take_off, *vars(RuntimeAdapter).values()
    doing = [call for call in doing if hasattr(call, "__code__")]
    for number in itertools.count(1):
        first = conduct(*([model] if asks == "detach" else []))
        interrupted = False
        try:
            with interrupted_at(number, *doing):
                getattr(first, asks)(model)
        except KeyboardInterrupt:
            interrupted = True
        first.shutdown()
        conduct(model).shutdown()
        if not interrupted:
            break
    assert number > 5
