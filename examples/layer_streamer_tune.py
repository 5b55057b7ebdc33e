"""Find the depths with which a Qwen2 model streams fastest on this machine.

    python examples/layer_streamer_tune.py                 # a small random model
    python examples/layer_streamer_tune.py --model DIR --out best.json

Each configuration reads one token with the streamed model, in a process of its own.
The result is for `layer_streamer_generate.py --config best.json`. A search that was
interrupted goes on if `--results` names the same file again.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from layer_streamer_generate import Qwen2, make_model, read_config

from stagehand import LayerStreamer, LayerStreamerTuner


def setup(streamer: LayerStreamer) -> Callable[[], object]:
    """Called in each process: load what stays, return one run."""
    model = Qwen2(streamer, read_config(streamer.model_dir))
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.embed.device)

    def run() -> None:
        model.reset()  # each run is like the others
        model.forward(token)

    return run


def tune(options: argparse.Namespace, folder: Path) -> None:
    """Search, and say what was found."""
    tuner = LayerStreamerTuner.from_pretrained(
        setup,
        folder,
        n_gpu_values=options.n_gpu,
        n_cpu_pinned_values=[None, 2, 4],
        n_cpu_values=[None, 2] if options.more else [None],
        batch_gpu_values=[None, 2] if options.more else [None],
        batch_cpu_pinned_values=[None, 2] if options.more else [None],
        batch_cpu_values=[None],
        n_runs=options.runs,
        sleep_seconds=options.pause,
        device=options.device,
        results_file=options.results,
        config_file=options.out,
    )

    def tell(outcome: object) -> None:
        if outcome is tuner.best:
            print(f"best so far: {tuner.best.seconds:.4f} s with {tuner.best.config}")

    best = tuner.tune(on_outcome=tell)
    print(tuner.summary())
    print(f"The fastest configuration is {best}.")


def main() -> None:
    """Read the options, and make a model if none is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory with a Qwen2 model")
    parser.add_argument("--device", help="default: the accelerator, or the CPU")
    parser.add_argument("--n-gpu", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--more", action="store_true", help="try more depths, batches")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between runs")
    parser.add_argument("--results", type=Path, help="keep the results in this file")
    parser.add_argument("--out", type=Path, help="write the best here, as JSON")
    options = parser.parse_args()
    if options.model:
        tune(options, options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        tune(options, Path(folder))


if __name__ == "__main__":
    main()
