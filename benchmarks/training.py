"""What streaming costs the host for each block in training, over the modules alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.depths import Cost, Pair, alone, growth, over_bare
from benchmarks.models import AdaptedStack, Stack, make_runtime, make_stack
from benchmarks.results import Result
from stagehand.runtime import Runtime

__all__ = ["make_training_runtime", "measure", "step_of"]

_TARGET_US = 25.0
_WHY = "two gradients a block, for which hooks that do nothing take 13 us"
_EXPLAINED = 2.0  # times what the bare block takes; it is 1.4 to 1.7


def measure(
    depths: tuple[int, int, int] = (100, 1_000, 10_000), *, rounds: int = 2
) -> Iterator[Result]:
    """Yield the overhead of forward and backward, with frozen and trained weights.

    A step has no optimizer: gradients are dropped. Frozen weights lie behind an input
    that requires a gradient, as they do behind an adapter; at the end, beside adapters,
    in regions that are computed again for backward.

    Args:
        depths: Blocks of three models; the last is compared with the others.
        rounds: How often each is timed, at least.
    """
    few, thousand, many = depths

    def row(kind: str, share: str, depth: int, cost: Cost) -> Result:
        return Result.of(
            f"training overhead a block, {depth:,} {kind} blocks, {share} resident",
            cost.own,
            "us",
            scale=1e6,
            target=_TARGET_US if depth == thousand else None,
            why=_why(cost) if kind == "trained" else "",
        )

    def grown(kind: str, share: str, costs: Mapping[int, Cost]) -> Iterator[Result]:
        for fewer in (few, thousand):
            what = f"{many:,} over {fewer:,} {kind} blocks, {share} resident"
            yield growth(f"training at {what}", costs, fewer, many)

    for kind in ("frozen", "trained"):
        pairs = [_pair(depth, trains=kind == "trained") for depth in depths]
        yield from over_bare(
            pairs,
            partial(row, kind),
            partial(grown, kind),
            part=thousand,
            rounds=rounds,
        )
        del pairs

    def adapted(share: str, depth: int, cost: Cost) -> Result:
        what = f"training overhead a layer, {depth:,} with adapters in checkpoints"
        return Result.of(f"{what}, {share} resident", cost.own, "us", scale=1e6)

    yield from alone(_adapted(thousand), adapted, rounds=rounds)


def _why(cost: Cost) -> str:
    """Gradients explain what they were seen to take, not whatever a block takes."""
    explained = cost.own.smallest <= _EXPLAINED * cost.bare.smallest
    return _WHY if explained else ""


def _adapted(depth: int) -> Pair:
    bare, model = (make_stack(depth, kind=AdaptedStack) for _ in range(2))
    runtime = make_training_runtime(model, pattern=r"^blocks\.\d+\.base$")
    return Pair(bare, model, runtime, step_of, uses=3)


def _pair(depth: int, *, trains: bool) -> Pair:
    bare, model = (make_stack(depth).requires_grad_(trains) for _ in range(2))
    return Pair(bare, model, make_training_runtime(model), step_of, uses=2)


def make_training_runtime(model: Stack, **options: Any) -> Runtime:
    """Stream a stack, as `make_runtime` does, without its gradients' copies home.

    Memory on the host cannot be marked as read by a stream.
    """
    runtime = make_runtime(model, **options)
    runtime._parts.engine.carry_home = _carry_nothing  # type: ignore[method-assign]
    return runtime


def _carry_nothing(*_: Any, **__: Any) -> None:
    """Copy no gradient."""


def step_of(model: Stack) -> Callable[[], None]:
    """Return what runs a stack forward and backward, and drops its gradients."""
    x, ones = torch.zeros(1, 16, requires_grad=True), torch.ones(1, 16)
    parameters = list(model.parameters())

    def run() -> None:
        model(x).backward(ones)
        for parameter in parameters:
            parameter.grad = None

    return run
