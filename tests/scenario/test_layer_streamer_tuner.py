"""`LayerStreamerTuner` finds the fastest configuration, whatever the others do."""

import json
import math
from dataclasses import replace

import pytest
import torch

from layered import LAYERS, arguments, inputs, layer_fn, make_weights, resident, save
from stagehand import LayerStreamer, LayerStreamerTuner
from stagehand.errors import ConfigError, MissingTensorError, StagehandWarning
from stagehand.streamer import tuner as tuner_module
from stagehand.streamer.depths import Depths, Footprint
from stagehand.streamer.rates import Rates
from stagehand.streamer.trial import Message

GRID = {
    "n_gpu_values": [1, 2, 3],
    "n_cpu_pinned_values": [2],
    "n_cpu_values": [None],
    "batch_gpu_values": [None],
    "batch_cpu_pinned_values": [None],
    "batch_cpu_values": [None],
    "n_runs": 3,
    "sleep_seconds": 0.0,
}
FAST = Rates(
    disk=1e12,
    memory=1e12,
    link=1e12,
    pageable_link=1e12,
    device_free_bytes=10**9,
    host_free_bytes=10**9,
    footprint=Footprint(slot=8448, waiting=8448),
)
WEIGHTS = make_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), WEIGHTS)


def setup(streamer):
    """What a user writes."""
    x = inputs("cpu")

    def run():
        with torch.no_grad():
            streamer.run_pass(x, layer_fn)

    return run


def crash_with_two(streamer):
    """Fails for one of the configurations."""
    if streamer.depths.n_gpu == 2:
        raise MemoryError("too much")
    return setup(streamer)


class Trials:
    """Stands for processes: the seconds of a run by `n_gpu`, or what goes wrong."""

    def __init__(self, seconds, rates=FAST):
        self.seconds = seconds
        self.rates = rates
        self.passes = 1
        self.tried = []
        self.open = 0

    def __call__(self, job):
        trials, depth = self, job.arguments["n_gpu"]

        class Process:
            def __init__(self):
                trials.open += 1
                if job.setup_fn is None:
                    self.script = [trials.rates]
                    return
                trials.tried.append(depth)
                found = trials.seconds[depth]
                if isinstance(found, (int, float)):
                    run = [Message("started"), Message("done", found, trials.passes)]
                    self.script = run * job.n_runs
                else:
                    self.script = [found]

            def receive(self, limit):
                if not self.script:
                    return None
                message = self.script.pop(0)
                if isinstance(message, Rates):
                    return Message("rates", message)
                if isinstance(message, BaseException):
                    raise message
                if message.kind == "done" and message.value > limit:
                    return None
                return message

            def close(self):
                trials.open -= 1

        return Process()


@pytest.fixture
def search(folder, monkeypatch):
    """Makes a search over `GRID` with processes that are told what to say."""

    def search(seconds, rates=FAST, **options):
        trials = Trials(seconds, rates)
        monkeypatch.setattr(tuner_module, "TrialProcess", trials)
        found = LayerStreamerTuner.from_pretrained(setup, folder, **{**GRID, **options})
        return found, trials

    return search


def statuses(tuner):
    return [outcome.status for outcome in tuner.outcomes]


def test_fastest_configuration_is_returned_and_written(
    search, folder, tmp_path, monkeypatch
):
    file = tmp_path / "best.json"
    tuner, trials = search({1: 3.0, 2: 1.0, 3: 2.0}, config_file=file)
    best = tuner.tune()
    assert best == Depths(n_gpu=2, n_cpu_pinned=2).as_dict()
    assert statuses(tuner) == ["measured", "measured", "slower"]
    assert json.loads(file.read_text()) == best
    assert trials.open == 0
    monkeypatch.undo()
    with LayerStreamer.from_pretrained(
        folder, device="cpu", **json.loads(file.read_text())
    ) as streamer:
        found = streamer.run_pass(inputs("cpu"), layer_fn)
        assert torch.equal(found, resident(WEIGHTS, inputs("cpu")))


def test_crash_of_one_configuration_is_a_result_among_others(search):
    seconds = {1: Message("failed", "the process was killed"), 2: 1.0, 3: 0.5}
    tuner, _ = search(seconds)
    outcomes = []
    assert tuner.tune(on_outcome=outcomes.append)["n_gpu"] == 3
    assert statuses(tuner) == ["failed", "measured", "measured"]
    assert outcomes == tuner.outcomes
    assert "failed    {'n_gpu': 1" in tuner.summary()
    assert "the process was killed" in tuner.summary()


def test_interrupted_search_goes_on_where_it_was(search, tmp_path):
    file = tmp_path / "results.jsonl"
    tuner, trials = search({1: 3.0, 2: KeyboardInterrupt(), 3: 9.0}, results_file=file)
    with pytest.raises(KeyboardInterrupt):
        tuner.tune()
    assert trials.open == 0
    tuner, trials = search({2: 2.0, 3: 1.0}, results_file=file)
    assert tuner.tune()["n_gpu"] == 3
    assert trials.tried == [2, 3]
    tuner, trials = search({}, results_file=file)
    assert tuner.tune()["n_gpu"] == 3
    assert trials.tried == []
    assert "3 measured, 0 slower" in tuner.summary()
    with pytest.raises(ConfigError, match="results of another search"):
        search({}, results_file=file, n_runs=5)[0].tune()


def test_what_cannot_win_at_the_measured_rates_is_not_run(search):
    read = sum(t.nbytes for n, t in WEIGHTS.items() if "layers" in n)
    rates = replace(FAST, disk=read / 1.0)  # a pass takes a second at least
    tuner, trials = search({1: 1.5, 2: 1.01, 3: 1.0}, rates)
    assert tuner.tune()["n_gpu"] == 2
    assert trials.tried == [1, 2]
    assert statuses(tuner) == ["measured", "measured", "pruned"]
    assert tuner.outcomes[2].reason == (
        "the disk alone needs 1 s for a pass, the best takes 1.01 s"
    )
    summary = tuner.summary()
    assert "disk      1 s at its measured rate: 99% of the pass" in summary
    assert "2 measured, 0 slower, 1 pruned, 0 failed" in summary


def test_runs_without_a_pass_are_compared_with_each_other_alone(search):
    tuner, trials = search({1: 3.0, 2: 2.0, 3: 1.0}, replace(FAST, disk=1.0))
    trials.passes = 0
    assert tuner.tune()["n_gpu"] == 3
    assert statuses(tuner) == ["measured"] * 3
    assert "the runs made no pass" in tuner.summary()


def test_what_did_not_fit_is_looked_at_again_when_the_search_goes_on(search, tmp_path):
    file = tmp_path / "results.jsonl"
    full = replace(FAST, device_free_bytes=0)
    tuner, _ = search({}, full, results_file=file)
    with pytest.raises(ConfigError, match=r"none of 3 configurations ran.*device mem"):
        tuner.tune()
    tuner, trials = search({1: 1.0, 2: 2.0, 3: 3.0}, results_file=file)
    assert tuner.tune()["n_gpu"] == 1
    assert trials.tried == [1, 2, 3]
    tuner, trials = search({}, results_file=file)
    assert tuner.tune()["n_gpu"] == 1
    assert trials.tried == []


def test_what_does_not_fit_is_not_run(search):
    tuner, trials = search(
        {1: 1.0, 2: 1.0, 3: 1.0}, replace(FAST, device_free_bytes=2 * 8448)
    )
    tuner.tune()
    assert trials.tried == [1]
    assert "needs 25.34 KB of device memory" in tuner.outcomes[1].reason


def test_configurations_that_may_be_fast_come_first(search):
    tuner, trials = search(
        {1: 1.0, 2: 2.0, 99: 0.5},
        replace(FAST, disk=1e5, link=1e5),
        n_gpu_values=[1, 2, 99],
    )
    tuner.tune()
    assert trials.tried[0] == 99  # all layers stay on the device


def test_host_as_device_tries_no_pinned_depths(search):
    rates = replace(FAST, link=math.inf, pageable_link=math.inf)
    tuner, trials = search(
        {1: 1.0, 2: 2.0, 3: 3.0}, rates, n_cpu_pinned_values=[None, 1, 2]
    )
    tuner.tune()
    assert trials.tried == [1, 2, 3]


def test_machine_that_cannot_be_measured_is_no_obstacle(search):
    tuner, trials = search({1: 1.0, 2: 2.0, 3: 3.0}, Message("failed", "no disk"))
    with pytest.warns(StagehandWarning, match="could not be measured.*no disk"):
        assert tuner.tune()["n_gpu"] == 1
    assert trials.tried == [1, 2, 3]
    assert tuner.rates is None
    assert "rate" not in tuner.summary()


def test_search_without_a_result_tells_why(search):
    failed = Message("failed", "out of memory")
    tuner, _ = search({1: failed, 3: failed}, n_gpu_values=[1, 3], batch_gpu_values=[3])
    with pytest.raises(
        ConfigError,
        match=r"none of 2 configurations ran.*out of memory.*batch_gpu is 3",
    ):
        tuner.tune()
    assert tuner.summary().startswith("nothing was measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup_fn": lambda streamer: None}, "setup_fn is .* top level of a module"),
        ({"n_runs": 1}, "n_runs is 1: expected at least 2"),
        ({"sleep_seconds": -1}, "sleep_seconds is -1"),
        ({"timeout_seconds": 0}, "and timeout_seconds 0: expected"),
        ({"config_file": "/nowhere/best.json"}, "config_file is '/nowhere/best.json'"),
        ({"config_file": "/"}, "config_file is '/': expected a file"),
        ({"config_file": 3}, "config_file is 3: expected a text or a path or None"),
        ({"results_file": 3}, "results_file is 3: expected a text or a path or None"),
        ({"n_runs": "3"}, "n_runs is '3': expected an int"),
        ({"timeout_seconds": float("nan")}, "and timeout_seconds nan: expected"),
        ({"sleep_seconds": None}, "sleep_seconds is None: expected a number"),
        ({"model_dir": None}, "model_dir is None: expected a text or a path"),
    ],
)
def test_argument_that_cannot_work_is_refused_at_once(folder, options, message):
    chosen = {"setup_fn": setup, **options}
    with pytest.raises(ConfigError, match=message):
        LayerStreamerTuner.from_pretrained(
            chosen.pop("setup_fn"),
            chosen.pop("model_dir", folder),
            **{**GRID, **chosen},
        )


def test_wrong_files_are_told_at_once(folder):
    said = arguments(folder)
    with pytest.raises(MissingTensorError):
        LayerStreamerTuner(setup, **{**said, "num_layers": LAYERS + 1})


def test_seed_constructor_searches_in_processes_of_their_own(folder):
    tuner = LayerStreamerTuner(
        setup_fn=crash_with_two,
        **arguments(folder),
        **{**GRID, "n_gpu_values": [2, 1], "n_runs": 2},
        device="cpu",
    )
    assert tuner.tune()["n_gpu"] == 1
    failed, measured = tuner.outcomes
    assert (failed.status, failed.reason) == ("failed", "MemoryError: too much")
    assert (measured.status, measured.passes) == ("measured", 1)
    assert measured.seconds > 0
    assert tuner.rates.on_host
