"""What streaming costs the host for each block, over the same modules left alone."""

from collections.abc import Callable, Iterator, Mapping

import torch

from benchmarks.models import (
    LOOKAHEAD,
    Stack,
    make_runtime,
    make_stacks,
    streamed_blocks,
)
from benchmarks.results import Result
from benchmarks.timing import Times, take_turns
from stagehand.runtime import Runtime

__all__ = ["SHARES", "growth", "measure", "over_bare"]

_SETTLING = 6  # passes until the order is learned, timed once and planned for good
_MICRO = 1e6
_TARGET_US = 10.0
_TARGET_GROWTH = 1.2
_COMPARED = 10_000  # blocks of each time that is compared with that of other depths

# Parts of all blocks' bytes; with none, only the ring of slots is left.
SHARES = {"all": 2.0, "a third": 1 / 3, "none": 0.0}


def measure(
    depths: tuple[int, int, int] = (100, 1_000, 10_000),
    *,
    blocks_timed: int = 100_000,
) -> Iterator[Result]:
    """Yield the overhead at each depth with all, a third and none of the blocks kept.

    In inference mode, one thread, no telemetry: how a settled loop runs.

    Args:
        depths: Blocks of the three models; the last is compared with the others.
        blocks_timed: How many uses of blocks to time for each figure.
    """
    few, thousand, many = depths
    found: dict[str, dict[int, Times]] = {name: {} for name in SHARES}
    for depth in depths:
        for name, times in _overheads(depth, 1, blocks_timed):
            found[name][depth] = times
            target = _TARGET_US if depth == thousand else None
            yield _result(f"{depth:,} blocks, {name} resident", times, target)
    for name, times in _overheads(thousand, 2, blocks_timed):
        what = f"{thousand:,} blocks of 4 parameters, {name} resident"
        yield _result(what, times, None)
    for fewer in (few, thousand):
        yield from growth(
            f"overhead at {many:,} over {fewer:,} blocks", found, fewer, many
        )


def growth(
    what: str,
    found: Mapping[str, Mapping[int, Times]],
    few: int,
    many: int,
    *,
    why: str = "",
) -> Iterator[Result]:
    """Yield what a block of many costs over one of few, for each share that is kept.

    The smallest of times of as many blocks is judged: a pass of few blocks fits into
    the moments in which the machine is fast, and a pass of many does not.
    """
    for name, by_depth in found.items():
        ratio = by_depth[many].part_of(by_depth[few])
        yield Result(
            name=f"{what}, {name} resident",
            value=ratio.lasting,
            median=ratio.median,
            unit="x",
            target=_TARGET_GROWTH,
            why=why,
        )


def _result(what: str, times: Times, target: float | None) -> Result:
    name = f"host overhead a block, {what}"
    return Result.of(name, times, "us", scale=_MICRO, target=target)


def _overheads(
    depth: int, layers: int, blocks_timed: int
) -> Iterator[tuple[str, Times]]:
    bare, model = make_stacks(depth, layers)
    runtime = make_runtime(model)
    return over_bare(runtime, bare, model, _pass, blocks_timed=blocks_timed)


def over_bare(
    runtime: Runtime,
    bare: Stack,
    model: Stack,
    run_of: Callable[[Stack], Callable[[], object]],
    *,
    blocks_timed: int,
) -> Iterator[tuple[str, Times]]:
    """Yield what a block costs over the bare model's, for each share that is kept.

    Args:
        runtime: Of `model`; it is shut down at the end.
        bare: The same model, left alone.
        model: It streams.
        run_of: Returns what is timed, for a model.
        blocks_timed: How many uses of blocks to time for each figure.
    """
    depth = len(model.blocks)
    sizes = [block.nbytes for block in streamed_blocks(runtime)]
    ring = (LOOKAHEAD + 1) * max(sizes)
    functions = {"bare": run_of(bare), "streamed": run_of(model)}
    try:
        for name, share in SHARES.items():
            runtime.set_budget(max(ring, int(share * sum(sizes))))
            for _ in range(_SETTLING):
                functions["streamed"]()
            times = take_turns(
                functions,
                rounds=max(1, blocks_timed // depth),
                group=max(1, min(blocks_timed, _COMPARED) // depth),
            )
            yield name, times["streamed"].over(times["bare"], depth)
    finally:
        runtime.shutdown()


def _pass(model: Stack) -> Callable[[], torch.Tensor]:
    x = torch.zeros(1, 16)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out

    return run
