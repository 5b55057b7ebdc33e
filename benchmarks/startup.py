"""What comes before the first output, where pages are locked before it or meanwhile.

There is nothing to lock memory for without a GPU, so a device stands in that takes its
time over it, as published for CUDA: what is measured is who waits for it. Its copies
cost nothing.

The smallest of each way's times is judged. Memory that a virtual machine gave back to
its host is faulted there once more, which takes a second and more for a GB now and
then: free memory is touched before each, and what still meets that does not count.
"""

import gc
import time
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from benchmarks.models import LOOKAHEAD, FreeDevice
from benchmarks.results import Result, until_met
from benchmarks.timing import Times, in_turns
from stagehand.assembly import Settings
from stagehand.core.device import host_memory
from stagehand.residency import masters
from stagehand.residency.finding import find_blocks
from stagehand.runtime import Runtime

__all__ = ["measure"]

_LOCKED_PER_SECOND = 3e9  # bytes, beside touching them
_TARGET = 0.6
_WIDTH = 2896  # 34 MB a layer
_KEPT = 4  # layers on the device


class _SlowToLock(FreeDevice):
    """A device for which locking memory takes long, without the interpreter's lock."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Device.pinned`."""
        memory = host_memory(nbytes).zero_()
        time.sleep(nbytes / _LOCKED_PER_SECOND)
        return memory

    page_locked = pinned


def measure(layers: int = 24, width: int = _WIDTH, rounds: int = 3) -> Iterator[Result]:
    """Yield what the first output takes both ways, and their ratio."""
    usual = masters._AT_ONCE_BYTES
    all_pinned: list[float] = []

    def before() -> list[float]:
        masters._AT_ONCE_BYTES = 1 << 60
        return [_first_output(layers, width)[0]]

    def meanwhile() -> list[float]:
        masters._AT_ONCE_BYTES = 0
        first, last = _first_output(layers, width)
        all_pinned.append(last)
        return [first]

    size = f"{layers * width * width * 4 / 1e9:.1f} GB"
    name = f"first output, {size} of weights"

    def rows(times: Mapping[str, Times]) -> Iterator[Result]:
        for what, found in (
            (f"{name} pinned before it", times["before"]),
            (f"{name} pinned meanwhile", times["meanwhile"]),
            (f"{size} pinned while passes go on", Times.of(all_pinned)),
        ):
            yield Result.of(what, found, "ms", scale=1e3)
        yield Result.of(
            "first output, pinned meanwhile over before",
            times["meanwhile"].part_of(times["before"]),
            "x",
            target=_TARGET,
        )

    both = {"before": before, "meanwhile": meanwhile}
    try:
        yield from rows(in_turns(both, rounds=rounds, until=until_met(rows)))
    finally:
        masters._AT_ONCE_BYTES = usual


def _first_output(layers: int, width: int) -> tuple[float, float]:
    """Return the seconds to the first output, and until all is pinned."""
    model = nn.Sequential()
    for _ in range(layers):
        with torch.device("meta"):
            layer = nn.Linear(width, width, bias=False)
        layer.weight = nn.Parameter(torch.zeros(width, width))
        model.append(layer)
    x = torch.zeros(1, width)
    host_memory((layers + LOOKAHEAD) * width * width * 4).zero_()
    began = time.perf_counter()
    settings = Settings(
        device=_SlowToLock(),
        budget_bytes=_KEPT * width * width * 4,
        pinned_bytes=1 << 60,
        lookahead=LOOKAHEAD,
    )
    runtime = Runtime(model, find_blocks(model, r"^\d+$"), settings)
    with torch.no_grad():
        model(x)
        first = time.perf_counter() - began
        while runtime.report().pinning_bytes:
            model(x)
    last = time.perf_counter() - began
    runtime.shutdown()
    del model, runtime
    gc.collect()
    return first, last
