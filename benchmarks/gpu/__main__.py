"""Calibrate the link, then stream stacks of real block shapes in given budgets.

Then adapters on a frozen stack are trained: forward, backward and optimizer, in bf16
and with checkpoints, under a cap of the device's memory.

Every cell asserts that streamed outputs are bit for bit the resident ones, and holds
its time against the larger of the resident time and the bytes over the link's rate,
both measured in the same process. Results are JSON lines in `benchmarks/results/`,
in a file with the device's name.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import activations, training
from benchmarks.gpu.cells import Cell, Scale, run
from benchmarks.gpu.link import calibrate
from benchmarks.gpu.shapes import SHAPES
from benchmarks.simulated import ROOT, load_simulated_device
from stagehand.core.device import Device, find_device
from stagehand.units import format_bytes, parse_bytes

_SIZES = tuple(2**power for power in range(16, 31, 2))
_DRY_SIZES = (1 << 12, 1 << 16, 1 << 20)
_DRY_BLOCKS = 16
_DRY_DIVIDE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.dry:
        load_simulated_device().configure(h2d_gbps=1.0)
    device = find_device(None)
    if device.is_host:
        print("there is no accelerator; --dry rehearses on a simulated one")
        return 2
    write = _writer(device, options.out, dry=options.dry)
    write(calibrate(device, _DRY_SIZES if options.dry else _SIZES).line())
    scale = Scale(
        blocks=options.blocks or (_DRY_BLOCKS if options.dry else None),
        divide=_DRY_DIVIDE if options.dry else 1,
        steps=3 if options.dry else options.steps,
    )
    for name in options.cells:
        for cell in run(device, name, SHAPES[name], options.budgets, scale):
            write(cell.line())
            print(_sentence(cell))
    _train(device, options, scale, write)
    for name in options.activations:
        for saving in activations.run(device, name, SHAPES[name], scale):
            write(saving.line())
            print(_saving_sentence(saving))
    return 0


def _train(
    device: Device,
    options: argparse.Namespace,
    scale: Scale,
    write: Callable[[dict[str, Any]], None],
) -> None:
    cap = None if options.dry else parse_bytes(options.cap, name="--cap")
    for name in options.train:
        for cell in training.run(
            device, name, SHAPES[name], options.training_budgets, scale, cap_bytes=cap
        ):
            write(cell.line())
            print("trained: " + _sentence(cell))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry", action="store_true", help="tiny, and simulated")
    parser.add_argument("--cells", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--blocks", type=int, help="fewer blocks of the true shape")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a cell")
    parser.add_argument(
        "--budgets",
        nargs="+",
        default=["15%", "50%"],
        help='device bytes for weights: "12GB", or a part of the stack\'s',
    )
    parser.add_argument(
        "--train", nargs="*", choices=SHAPES, default=["ltx-2"], help="what to train"
    )
    parser.add_argument(
        "--training-budgets",
        nargs="+",
        default=["50%"],
        help="as --budgets, for training; they have to leave room under the cap",
    )
    parser.add_argument(
        "--activations",
        nargs="*",
        choices=SHAPES,
        default=["ltx-2"],
        help="of what to spill saved tensors, for a peak that is 2.5 GB lower",
    )
    parser.add_argument("--cap", default="24GiB", help="device memory in training")
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser


def _writer(
    device: Device, folder: Path | None, *, dry: bool
) -> Callable[[dict[str, Any]], None]:
    """Return what writes a line; a rehearsal writes only where it is told to."""
    name = "simulated" if dry else torch.cuda.get_device_name(device.torch_device)
    about = {"device": name, "torch": torch.__version__}
    if folder is None and not dry:
        folder = ROOT / "benchmarks" / "results"

    def write(line: dict[str, Any]) -> None:
        text = json.dumps({**about, **line})
        print(text)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{name.replace(' ', '-')}.jsonl").open("a") as file:
                file.write(text + "\n")

    return write


def _sentence(cell: Cell | training.TrainingCell) -> str:
    line = cell.line()
    return (
        f"{cell.shape}, {cell.blocks} blocks, {format_bytes(cell.weight_bytes)} in"
        f" {format_bytes(cell.budget_bytes)}: {cell.step.median * 1e3:.3f} ms a step,"
        f" {line['over_bound']:.3f} of the bound, {line['over_resident']:.3f} of"
        f" resident, {format_bytes(cell.peak_device_bytes)} on the device"
    )


def _saving_sentence(cell: activations.ActivationCell) -> str:
    line = cell.line()
    return (
        f"{cell.shape}, {cell.blocks} blocks, {format_bytes(cell.saved_bytes)} saved,"
        f" {format_bytes(cell.spill_bytes)} of it spilled: {line['over_none']:.3f} of"
        f" the step without, peak lower by {format_bytes(line['lower_bytes'])};"
        f" save_on_cpu {line['save_on_cpu_over_none']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
