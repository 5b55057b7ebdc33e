"""What it costs that autograd keeps handles of weights, and not the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from benchmarks.models import Stack, make_runtime, streamed_blocks
from benchmarks.results import Result, until_met
from benchmarks.timing import Times, take_turns
from stagehand.runtime import Runtime

__all__ = ["measure"]

_LAYERS = 600  # as many tensors as a training step of a transformer saves
_FEWER = 100  # what a pass costs once shows
_TARGET_US = 2.0


def measure(rounds: int = 60) -> Iterator[Result]:
    """Yield the time of one pack and one unpack over hooks that do nothing."""
    model = Stack(2).requires_grad_(False)  # what trains is at home between passes
    runtime = make_runtime(model)
    try:
        with torch.inference_mode():
            model(torch.zeros(1, 16))  # now all blocks are there
        # Frozen, so that it is all that a layer saves.
        weight = streamed_blocks(runtime)[0].tensors[0]
        for layers, rows in (
            (_LAYERS, partial(_rows, _LAYERS, target=_TARGET_US)),
            (_FEWER, partial(_rows, _FEWER, said=f", {_FEWER} in a pass")),
        ):
            identity = partial(saved_tensors_hooks, _same, _same)
            steps = {
                "identity": _step(weight, identity, layers),
                "handle": _step(weight, partial(_handles, runtime), layers),
            }
            yield from rows(take_turns(steps, rounds=rounds, until=until_met(rows)))
    finally:
        runtime.shutdown()


def _rows(
    layers: int,
    times: Mapping[str, Times],
    *,
    said: str = "",
    target: float | None = None,
) -> Iterator[Result]:
    yield Result.of(
        f"pack and unpack a weight, over identity hooks{said}",
        times["handle"].over(times["identity"], layers),
        "us",
        scale=1e6,
        target=target,
    )


@contextmanager
def _handles(runtime: Runtime) -> Iterator[None]:
    saved = runtime._uses.saved
    pushed = saved.push_hooks()
    try:
        yield
    finally:
        saved.put_back(pushed)


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
