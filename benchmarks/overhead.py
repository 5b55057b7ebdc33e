"""What streaming costs the host for each block, over the same modules left alone."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmarks.depths import Cost, Pair, alone, growth, over_bare
from benchmarks.models import Stack, make_runtime, make_stack
from benchmarks.results import Result

__all__ = ["measure"]

_TARGET_US = 10.0


def measure(
    depths: tuple[int, int, int] = (100, 1_000, 10_000), *, rounds: int = 6
) -> Iterator[Result]:
    """Yield the overhead at each depth with all, a third and none of the blocks kept.

    In inference mode, one thread, no telemetry: how a settled loop runs.

    Args:
        depths: Blocks of the three models; the last is compared with the others.
        rounds: How often each is timed, at least.
    """
    few, thousand, many = depths

    def row(share: str, depth: int, cost: Cost, kind: str = "blocks") -> Result:
        return Result.of(
            f"host overhead a block, {depth:,} {kind}, {share} resident",
            cost.own,
            "us",
            scale=1e6,
            target=_TARGET_US if (depth, kind) == (thousand, "blocks") else None,
        )

    def grown(share: str, costs: Mapping[int, Cost]) -> Iterator[Result]:
        for fewer in (few, thousand):
            what = f"overhead at {many:,} over {fewer:,} blocks, {share} resident"
            yield growth(what, costs, fewer, many)

    pairs = [_pair(depth, 1) for depth in depths]
    yield from over_bare(pairs, row, grown, part=thousand, rounds=rounds)
    del pairs
    larger = partial(row, kind="blocks of 4 parameters")
    yield from alone(_pair(thousand, 2), larger, rounds=rounds)


def _pair(depth: int, layers: int) -> Pair:
    bare, model = make_stack(depth, layers), make_stack(depth, layers)
    return Pair(bare, model, make_runtime(model), _pass)


def _pass(model: Stack) -> Callable[[], torch.Tensor]:
    x = torch.zeros(1, 16)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out

    return run
