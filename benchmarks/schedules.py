"""Plans, acted out by an independent model of link and compute, over their bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.shapes import SHAPES, skeleton
from benchmarks.planning import and_back
from benchmarks.results import Result, ratio
from benchmarks.simulated import reach_tests
from stagehand.residency.finding import find_blocks, find_layers
from stagehand.residency.plan import Workload, plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from stagehand.residency.finding import Finding

__all__ = ["measure", "predictions"]

_TARGET = 1.02
_PIECE = 1 << 20
_RATE = 50e9
# Seconds of compute over those of loading all, at few tokens, on PCIe 5.
_CUT_MODELS = {
    "ltx-2": 0.075,
    "flux.1": 0.35,
    "flux.2": 0.5,
    "llama-3-8b": 0.24,
    "qwen2.5-7b": 0.024,
}
_FEW = 3
_TARGET_CUT = 1.01
_EXPLAINED = 3  # loads of the largest layer: more is not for its being whole
_LOOKAHEAD = 3  # as `stagehand.layer` has it
_TARGET_CHECKPOINTS = 1.03


def measure(
    *, blocks: int = 48, pieces: int = 8, models: int | None = None
) -> Iterator[Result]:
    """Yield the worst ratio over a grid of budgets and of compute over load.

    Then that of real models, as they are cut.

    Args:
        blocks: Blocks of each workload.
        pieces: How many pieces a block is cut into.
        models: How many of the real models; None for all.
    """
    for name, backward in (("ring", None), ("forward and backward", 2.0)):
        worst = max(
            _over_bound(blocks * pieces, load, share, backward)
            for load in (0.3, 0.6, 0.9, 1.1, 1.5, 3.0)
            for share in (1 / 6, 1 / 3, 1 / 2, 3 / 4)
        )
        what = f"worst plan over its bound, {name}, blocks in {pieces} pieces"
        yield ratio(what, worst, _TARGET)

    for shape in list(_CUT_MODELS)[:models]:
        yield from _as_cut(shape)


def _as_cut(shape: str) -> Iterator[Result]:
    """Yield passes of a model whose blocks are whole, and cut where layer mode does.

    A layer is there as a whole when it computes, so layers are the pieces. With a few
    of them on the device the link is never idle; two blocks are not needed for that.
    """
    with torch.device("meta"):
        model = skeleton(SHAPES[shape]).to(torch.bfloat16)
    compute = _CUT_MODELS[shape]
    whole = sum(p.nbytes for p in model.parameters())
    third = find_layers(model, budget_bytes=whole // 3)
    few = _FEW * max(group.nbytes for group in third.streamed)
    seconds, _ = _pass(find_layers(model, budget_bytes=few), few, compute)
    yield ratio(
        f"pass over all bytes at the link's rate, {shape}, {_FEW} layers on the device",
        seconds / (whole / _RATE),
        _TARGET_CUT,
    )
    what = f"pass over its bound, {shape}, a third on the device"
    blocks = find_blocks(model, r"^blocks\.\d+$")
    seconds, bound = _pass(blocks, whole // 3, compute)
    yield ratio(f"{what}, whole blocks", seconds / bound, None)
    seconds, bound = _pass(third, whole // 3, compute)
    yield ratio(
        f"{what}, layers",
        seconds / bound,
        _TARGET_CUT,
        why=_why(max(_streamed(third, 0)[0]), seconds - bound),
    )
    yield ratio(
        f"step with adapters and checkpoints over its bound, {shape}, a third on the "
        "device, layers",
        _checkpointed(model, third, whole // 3, compute),
        _TARGET_CHECKPOINTS,
    )


def _why(largest_bytes: int, lost_seconds: float) -> str:
    """Say why a pass takes so much more than its bound, where that is known."""
    if lost_seconds > _EXPLAINED * largest_bytes / _RATE:
        return ""
    return (
        "a layer is there as a whole, and the largest has"
        f" {largest_bytes // (1 << 20)} MiB"
    )


def _pass(cut: Finding, budget: int, compute: float) -> tuple[float, float]:
    """Return the seconds of a planned pass, and the least that are possible."""
    reach_tests()
    from schedules import execute

    sizes, budget = _streamed(cut, budget)
    workload = _workload(range(len(sizes)), sizes, compute)
    made = plan(workload, budget_bytes=budget, max_lookahead=_LOOKAHEAD)
    assert workload.seconds is not None
    bound = max(sum(workload.seconds), (sum(sizes) - budget) / _RATE)
    return execute(workload, made), bound


def _checkpointed(model: nn.Module, cut: Finding, budget: int, compute: float) -> float:
    """Return a planned step over `max(C, (W - V) / B) + max(2 C, (W - V) / B)`.

    Weights are frozen, and each block of the model is computed again for backward,
    which takes as long as forward: so does the gradient of what goes in.
    """
    reach_tests()
    from schedules import execute

    sizes, budget = _streamed(cut, budget)
    names = {module: name for name, module in model.named_modules()}
    regions: dict[str, list[int]] = {}
    for number, group in enumerate(g for g in cut.streamed if g.sites):
        block = ".".join(names[group.sites[0]].split(".")[:2])
        regions.setdefault(block, []).append(number)
    order = (*range(len(sizes)), *and_back(list(regions.values())))
    workload = _workload(order, sizes, compute)
    made = plan(workload, budget_bytes=budget, max_lookahead=_LOOKAHEAD)
    assert workload.seconds is not None
    once, crossing = sum(workload.seconds) / 3, (sum(sizes) - budget) / _RATE
    return execute(workload, made) / (max(once, crossing) + max(2 * once, crossing))


def _streamed(cut: Finding, budget: int) -> tuple[list[int], int]:
    """Return the sizes of the blocks that may stream, and what is left for them."""
    sizes = [group.nbytes for group in cut.streamed if group.sites]
    stay = [cut.rest, *(group for group in cut.streamed if not group.sites)]
    return sizes, budget - sum(group.nbytes for group in stay)


def _workload(order: Iterable[int], sizes: Sequence[int], compute: float) -> Workload:
    """Uses that take a part of the time that the block's load takes."""
    uses = tuple(order)
    return Workload(
        order=uses,
        nbytes=tuple(sizes),
        seconds=tuple(compute * sizes[block] / _RATE for block in uses),
        link_bytes_per_second=_RATE,
    )


def _over_bound(
    count: int, load_over_compute: float, share: float, backward: float | None
) -> float:
    """Return the time of a planned step over the least that it can take.

    `max(C, (W - V) / B)` for each phase: only what the budget holds can be there when a
    phase starts.
    """
    reach_tests()
    from schedules import execute

    load = _PIECE / _RATE
    seconds = [load / load_over_compute] * count
    order = list(range(count))
    crossing = (1 - share) * count * load
    bound = max(sum(seconds), crossing)
    if backward is not None:
        seconds += [backward * seconds[0]] * count
        order += order[::-1]
        bound += max(sum(seconds[count:]), crossing)
    workload = Workload(
        order=tuple(order),
        nbytes=(_PIECE,) * count,
        seconds=tuple(seconds),
        link_bytes_per_second=_RATE,
    )
    made = plan(
        workload, budget_bytes=int(share * count) * _PIECE, max_lookahead=_LOOKAHEAD
    )
    return execute(workload, made) / bound


# Seconds of compute, bytes and blocks, and whether these are computed again for a
# backward that takes as long; and the link's rate: published figures.
_MODELS = {
    "LTX-2 LoRA step, 6144 tokens": (8.28e-3, 772e6, 48, True),
    "LTX-2 pass, 6144 tokens": (8.28e-3, 772e6, 48, False),
    "Qwen2.5-7B, one token": (0.2e-3, 466e6, 28, False),
}
_LINK = 55e9
_CUT = 8


def predictions() -> Iterator[dict[str, object]]:
    """Yield what the planner predicts for published shapes, by the budget."""
    for name, (compute, nbytes, blocks, trains) in _MODELS.items():
        count = blocks * _CUT
        order = list(range(count))
        if trains:
            regions = [range(at, at + _CUT) for at in range(0, count, _CUT)]
            order += and_back(regions)
        seconds = [compute / _CUT] * len(order)
        piece = int(nbytes / _CUT)
        workload = Workload(
            order=tuple(order),
            nbytes=(piece,) * count,
            seconds=tuple(seconds),
            link_bytes_per_second=_LINK,
        )
        for share in range(1, 21):
            budget = max(4 * piece, share * count * piece // 20)
            made = plan(workload, budget_bytes=budget, max_lookahead=_LOOKAHEAD)
            yield {
                "kind": "prediction",
                "model": name,
                "budget_bytes": budget,
                "seconds": made.step_seconds,
                "resident_seconds": sum(seconds),
            }


if __name__ == "__main__":
    for line in predictions():
        print(json.dumps(line))
