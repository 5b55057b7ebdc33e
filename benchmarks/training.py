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


def measure(
    depths: tuple[int, int] = (1_000, 10_000), *, blocks_timed: int = 50_000
) -> Iterator[Result]:
    """Yield the overhead of forward and backward, with frozen and trained weights.

    A step has no optimizer: gradients are dropped. Frozen weights lie behind an input
    that requires a gradient, as they do behind an adapter.

    Args:
        depths: Blocks of two models that are compared.
        blocks_timed: How many blocks of steps to time for each figure.
    """
    few, many = depths
    found: dict[str, dict[int, Times]] = {name: {} for name in SHARES}
    for depth in depths:
        for name, times in _overheads(depth, blocks_timed, trains=False):
            found[name][depth] = times
            target = _TARGET_US if depth == few else None
            yield _result(f"{depth:,} frozen blocks, {name} resident", times, target)
    yield from growth(
        f"training at {many:,} over {few:,} frozen blocks", found, few, many
    )
    for name, times in _overheads(few, blocks_timed, trains=True):
        yield _result(f"{few:,} trained blocks, {name} resident", times, None)


def _result(what: str, times: Times, target: float | None) -> Result:
    name = f"training overhead a block, {what}"
    return Result.of(name, times, "us", scale=1e6, target=target)


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
