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

_LAYERS = 600  # as many tensors as a training step of a transformer saves
_FEWER = 100  # what a pass costs once shows
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
        each, fewer = (
            take_turns(
                {
                    "identity": _step(
                        weight, lambda: saved_tensors_hooks(_same, _same), layers
                    ),
                    "handle": _step(weight, runtime._saved.hooks, layers),
                },
                rounds=rounds,
            )
            for layers in (_LAYERS, _FEWER)
        )
    finally:
        runtime.shutdown()
    name = "pack and unpack a weight, over identity hooks"
    yield Result.of(
        name,
        each["handle"].over(each["identity"], _LAYERS),
        "us",
        scale=1e6,
        target=_TARGET_US,
    )
    yield Result.of(
        f"{name}, {_FEWER} in a pass",
        fewer["handle"].over(fewer["identity"], _FEWER),
        "us",
        scale=1e6,
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _step(
    weight: torch.Tensor,
    hooks: Callable[[], AbstractContextManager[Any]],
    layers: int,
) -> Callable[[], None]:
    x = torch.zeros(1, 16, requires_grad=True)

    def run() -> None:
        y = x
        with hooks():
            for _ in range(layers):
                y = functional.linear(y, weight)
        y.backward(y)

    return run
