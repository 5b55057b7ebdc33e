"""Steps and phases."""

import itertools

import pytest

from stagehand.core.clock import Phase, PhaseClock
from stagehand.errors import ConfigError

INNER = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def clock_in(phase):
    clock = PhaseClock()
    if phase is not Phase.STEP_END:
        clock.begin_step()
    if phase in INNER:
        clock.enter(phase)
    assert clock.phase is phase
    return clock


def heard_by(clock):
    heard = []
    clock.subscribe(lambda step, phase: heard.append((step, phase.name)))
    return heard


def test_no_step_is_open_before_the_first():
    clock = PhaseClock()
    assert (clock.step, clock.phase) == (0, Phase.STEP_END)


def test_steps_count_from_one_and_take_a_given_number():
    clock = PhaseClock()
    steps = []
    for given in (None, None, 500, None, 0):
        clock.begin_step(given)
        steps.append(clock.step)
    assert steps == [1, 2, 500, 501, 0]


@pytest.mark.parametrize("step", ["1", 1.5, True])
def test_step_that_is_no_number_of_a_step_is_refused(step):
    clock = PhaseClock()
    with pytest.raises(ConfigError, match=f"step is {step!r}: expected an int"):
        clock.begin_step(step)
    assert clock.phase is Phase.STEP_END


def test_negative_step_is_refused_and_the_open_step_stays():
    clock = clock_in(Phase.FORWARD)
    with pytest.raises(ConfigError, match="step is -1: expected zero or more"):
        clock.begin_step(-1)
    assert (clock.step, clock.phase) == (1, Phase.FORWARD)


def may_follow(before, after):
    if before is Phase.STEP_END or after is Phase.STEP_BEGIN:
        return False
    return after >= before or (before, after) == (Phase.BACKWARD, Phase.FORWARD)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, repeat=2)))
def test_phases_follow_in_order_and_only_backward_returns_to_forward(before, after):
    clock = clock_in(before)
    if may_follow(before, after):
        clock.enter(after)
        assert clock.phase is after
        return
    with pytest.raises(ConfigError, match=f"from {before.name} to {after.name}"):
        clock.enter(after)
    assert clock.phase is before


def test_subscribers_hear_every_phase_of_micro_batches():
    clock = PhaseClock()
    heard = heard_by(clock)
    clock.begin_step()
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD):
        clock.enter(phase)
    clock.enter(Phase.OPTIMIZER)
    clock.end_step()
    names = "STEP_BEGIN FORWARD BACKWARD FORWARD BACKWARD OPTIMIZER STEP_END"
    assert heard == [(1, name) for name in names.split()]


def test_begin_ends_an_open_step_first_under_its_own_number():
    clock = clock_in(Phase.FORWARD)
    heard = heard_by(clock)
    clock.begin_step(7)
    assert heard == [(1, "STEP_END"), (7, "STEP_BEGIN")]


def test_end_without_an_open_step_tells_nobody():
    clock = clock_in(Phase.FORWARD)
    clock.end_step()
    heard = heard_by(clock)
    clock.end_step()
    assert heard == []


def test_one_of_two_equal_subscriptions_ends_alone():
    clock = PhaseClock()
    heard = []

    def callback(step, phase):
        heard.append(phase)

    unsubscribe = clock.subscribe(callback)
    clock.subscribe(callback)
    unsubscribe()
    unsubscribe()
    clock.begin_step()
    assert heard == [Phase.STEP_BEGIN]


def test_callback_may_end_its_own_subscription():
    clock = PhaseClock()
    heard = []

    def callback(step, phase):
        heard.append(phase)
        unsubscribe()

    unsubscribe = clock.subscribe(callback)
    after = heard_by(clock)
    clock.begin_step()
    clock.end_step()
    assert heard == [Phase.STEP_BEGIN]
    assert after == [(1, "STEP_BEGIN"), (1, "STEP_END")]


def test_failing_callback_reaches_the_caller_with_the_clock_moved():
    clock = PhaseClock()

    def fail(step, phase):
        raise KeyError(phase.name)

    clock.subscribe(fail)
    with pytest.raises(KeyError, match="STEP_BEGIN"):
        clock.begin_step()
    assert (clock.step, clock.phase) == (1, Phase.STEP_BEGIN)
