"""A trial: what it tells its parent, and when the parent stops it."""

import os
import re
import signal
from dataclasses import replace

import pytest

from layered import arguments, make_weights, save
from stagehand.streamer import trial
from stagehand.streamer.depths import Depths
from stagehand.streamer.trial import Job, Message, TrialProcess, run_job, watch

DEPTHS = Depths(n_gpu=1)
PATIENCE = 120  # seconds until a test gives up


# What the parent makes of the messages


class Child:
    """Says what a script has for it; a run may never end."""

    def __init__(self, *script):
        self.script = list(script)
        self.limits = []

    def __call__(self, limit):
        self.limits.append(limit)
        return self.script.pop(0) if self.script else None


STARTED = Message("started")


def done(seconds):
    return Message("done", seconds, 2)


def runs(*seconds):
    return [message for s in seconds for message in (STARTED, done(s))]


def watched(*script, best=None, n_runs=3):
    child = Child(*script)
    outcome = watch(
        child, DEPTHS, n_runs=n_runs, best_seconds=best, timeout_seconds=99.0
    )
    return outcome, child.limits


def test_mean_is_of_all_runs_but_the_first():
    outcome, limits = watched(*runs(50, 1, 2))
    assert (outcome.status, outcome.seconds) == ("measured", 1.5)
    assert (outcome.runs, outcome.passes) == ((1, 2), 2)
    assert outcome.config == DEPTHS.as_dict()
    assert limits == [99.0] * 6


def test_run_may_last_as_long_as_the_mean_can_win():
    outcome, limits = watched(*runs(50, 1, 2), best=4.0)
    assert outcome.status == "measured"
    # The first run and the pauses are not counted against the best.
    assert limits == [99.0, 99.0, 99.0, 8.0, 99.0, 7.0]


def test_slow_run_does_not_end_what_can_still_win():
    outcome, _ = watched(*runs(1, 3.5, 0.1), best=2.0)
    assert (outcome.status, outcome.seconds) == ("measured", 1.8)


def test_configuration_is_stopped_as_soon_as_it_cannot_win():
    outcome, limits = watched(*runs(1, 3), STARTED, best=2.0)  # the last run goes on
    assert (outcome.status, outcome.runs) == ("slower", (3,))
    assert outcome.reason == "its mean would be above 2 s"
    assert limits[-1] == 1.0
    outcome, limits = watched(*runs(1, 4), best=2.0)
    assert (outcome.status, outcome.runs) == ("slower", (4,))
    assert len(limits) == 4


@pytest.mark.parametrize(
    "script", [[], [STARTED], runs(1), runs(1, 1), [*runs(1), STARTED]]
)
def test_silence_is_a_failure(script):
    outcome, _ = watched(*script)
    assert outcome.status == "failed"
    assert outcome.reason == "gave no sign of life for 99 s"


@pytest.mark.parametrize("script", [[], [STARTED], runs(1), [*runs(1), STARTED]])
def test_failure_is_told_with_its_reason(script):
    outcome, _ = watched(*script, Message("failed", "it broke"), best=9.0)
    assert (outcome.status, outcome.reason) == ("failed", "it broke")


# What the child tells


@pytest.fixture
def job(tmp_path):
    """Makes jobs for a small model."""
    said = {**arguments(save(tmp_path, make_weights())), "device": "cpu"}

    def job(setup_fn, **options):
        return Job(
            arguments={**said, **DEPTHS.as_dict()},
            setup_fn=setup_fn,
            **{"n_runs": 3, "sleep_seconds": 0.5, **options},
        )

    return job


def twice(streamer):
    """Two passes a run."""

    def run():
        streamer.run_pass(0, lambda x, weights, layer: x)
        streamer.run_pass(0, lambda x, weights, layer: x)

    return run


def broken(streamer):
    raise ValueError("no such tokenizer")


def broken_later(streamer):
    return lambda: streamer.run_pass(0, lambda x, weights, layer: None)


def leaving(streamer):
    raise SystemExit(3)


def no_function(streamer):
    return 5


def killed(streamer):
    os.kill(os.getpid(), signal.SIGKILL)


def gone(streamer):
    os._exit(7)


def ended_by_an_unnamed_signal(streamer):
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def sent_by(job):
    messages = []
    run_job(job, messages.append)
    return messages


def test_each_run_is_told_with_a_pause_before_those_that_count(job, monkeypatch):
    events = []
    monkeypatch.setattr(trial.time, "sleep", events.append)
    messages = sent_by(job(twice))
    assert [message.kind for message in messages] == ["started", "done"] * 3
    assert [message.passes for message in messages] == [0, 2] * 3
    assert all(message.value > 0 for message in messages[1::2])
    assert events == [0.5, 0.5]


def test_time_of_a_run_ends_when_the_stages_are_full_again(job, monkeypatch):
    now = [0.0]

    def settle(streamer):
        now[0] += 5.0

    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trial.LayerStreamer, "settle", settle)
    messages = sent_by(job(twice, sleep_seconds=0.0))
    assert [message.value for message in messages[1::2]] == [5.0] * 3


@pytest.mark.parametrize(
    ("setup_fn", "reason"),
    [
        (broken, "ValueError: no such tokenizer"),
        (broken_later, "ConfigError: layer_fn returned None"),
        (leaving, "SystemExit: 3"),
        (no_function, "ConfigError: setup_fn returned 5: expected a function"),
    ],
)
def test_whatever_goes_wrong_in_a_trial_is_told(job, setup_fn, reason):
    last = sent_by(job(setup_fn))[-1]
    assert last.kind == "failed"
    assert last.value.startswith(reason)


def test_wrong_argument_is_told(job):
    wrong = job(twice)
    wrong = replace(wrong, arguments={**wrong.arguments, "n_gpu": -1})
    assert sent_by(wrong)[-1].value.startswith("ConfigError: n_gpu is -1")


def test_job_without_a_function_measures_the_machine(job):
    [message] = sent_by(job(None))
    assert message.kind == "rates"
    assert message.value.disk > 0
    assert message.value.memory > 0
    assert message.value.link == float("inf")


# The process


@pytest.mark.parametrize(
    ("setup_fn", "reason"),
    [
        (
            killed,
            r"the process was killed by signal 9 \(SIGKILL\), as the system does when"
            r" memory runs out$",
        ),
        (ended_by_an_unnamed_signal, rf"was killed by signal {signal.SIGRTMIN + 3}$"),
        (gone, r"exit status 7 before it was done: .*if __name__ == '__main__':$"),
    ],
)
def test_process_that_is_killed_is_told_at_once(job, setup_fn, reason):
    process = TrialProcess(job(setup_fn))
    try:
        message = process.receive(PATIENCE)
        assert message.kind == "failed"
        assert re.search(reason, message.value)
    finally:
        process.close()
        process.close()


def test_process_tells_of_its_runs_and_ends_when_it_is_closed(job):
    process = TrialProcess(job(twice, sleep_seconds=10_000))
    try:
        kinds = [process.receive(PATIENCE).kind for _ in range(2)]
        assert kinds == ["started", "done"]
        assert process.receive(0) is None
    finally:
        process.close()
    assert process._process.exitcode == -signal.SIGKILL
