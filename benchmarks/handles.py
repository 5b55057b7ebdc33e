"""What it costs that autograd keeps handles of weights, and not the weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from benchmarks.models import Stack, make_runtime, streamed_blocks
from benchmarks.results import Result
from benchmarks.timing import take_turns

__all__ = ["measure"]

_LAYERS = 100
_TARGET_US = 2.0


def measure(rounds: int = 200) -> Iterator[Result]:
    """Yield the time of one pack and one unpack over hooks that do nothing."""
    model = Stack(2).requires_grad_(False)  # what trains is at home between passes
    runtime = make_runtime(model)
    try:
        with torch.inference_mode():
            model(torch.zeros(1, 16))  # now all blocks are there
        # Frozen, so that it is all that a layer saves.
        weight = streamed_blocks(runtime)[0].tensors[0]
        functions = {
            "identity": _step(weight, lambda: saved_tensors_hooks(_same, _same)),
            "handle": _step(weight, runtime._saved.hooks),
        }
        times = take_turns(functions, rounds=rounds)
    finally:
        runtime.shutdown()
    yield Result.of(
        "pack and unpack a weight, over identity hooks",
        times["handle"].over(times["identity"], _LAYERS),
        "us",
        scale=1e6,
        target=_TARGET_US,
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _step(
    weight: torch.Tensor, hooks: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], None]:
    x = torch.zeros(1, 16, requires_grad=True)

    def run() -> None:
        y = x
        with hooks():
            for _ in range(_LAYERS):
                y = functional.linear(y, weight)
        y.backward(y)

    return run
