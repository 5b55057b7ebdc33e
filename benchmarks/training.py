"""What streaming costs the host for each block in training, over the modules alone."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.models import Stack, make_runtime, make_stacks
from benchmarks.overhead import SHARES, growth, over_bare
from benchmarks.results import Result
from benchmarks.timing import Times

__all__ = ["measure"]

_TARGET_US = 25.0
_WHY = "two gradients a block, for which hooks that do nothing take 13 us"
_CACHED = "what a step of 100 touches stays in the caches"


def measure(
    depths: tuple[int, int, int] = (100, 1_000, 10_000), *, blocks_timed: int = 30_000
) -> Iterator[Result]:
    """Yield the overhead of forward and backward, with frozen and trained weights.

    A step has no optimizer: gradients are dropped. Frozen weights lie behind an input
    that requires a gradient, as they do behind an adapter.

    Args:
        depths: Blocks of three models; the last is compared with the others.
        blocks_timed: How many blocks of steps to time for each figure.
    """
    few, thousand, many = depths
    for kind, trains in (("frozen", False), ("trained", True)):
        found: dict[str, dict[int, Times]] = {name: {} for name in SHARES}
        for depth in depths:
            what = f"{depth:,} {kind} blocks"
            for name, times in _overheads(depth, blocks_timed, trains=trains):
                found[name][depth] = times
                yield Result.of(
                    f"training overhead a block, {what}, {name} resident",
                    times,
                    "us",
                    scale=1e6,
                    target=_TARGET_US if depth == thousand else None,
                    why=_WHY if trains else "",
                )
        for fewer in (few, thousand):
            what = f"training at {many:,} over {fewer:,} {kind} blocks"
            why = _CACHED if trains and fewer == few else ""
            yield from growth(what, found, fewer, many, why=why)


def _overheads(
    depth: int, blocks_timed: int, *, trains: bool
) -> Iterator[tuple[str, Times]]:
    bare, model = (stack.requires_grad_(trains) for stack in make_stacks(depth))
    runtime = make_runtime(model)
    # Memory on the host cannot be marked as read by a stream: that is left out.
    runtime._parts.engine.carry_home = _carry_nothing  # type: ignore[method-assign]
    return over_bare(runtime, bare, model, _step, blocks_timed=blocks_timed)


def _carry_nothing(*_: Any, **__: Any) -> None:
    """Copy no gradient."""


def _step(model: Stack) -> Callable[[], None]:
    x, ones = torch.zeros(1, 16, requires_grad=True), torch.ones(1, 16)
    parameters = list(model.parameters())

    def run() -> None:
        model(x).backward(ones)
        for parameter in parameters:
            parameter.grad = None

    return run
