"""Says why a budget cannot work, and which one would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from stagehand.errors import StagehandOOMError
from stagehand.residency.blocks import tensor_bytes
from stagehand.units import MIB, format_at_least, format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from stagehand.residency.blocks import Block

__all__ = ["raise_budget", "raise_marks", "too_small", "why_they_stay"]


def too_small(
    limit_bytes: int,
    slots_bytes: int,
    *,
    stay: Iterable[Block],
    away: Iterable[Block],
    odd_bytes: int,
    wire_bytes: int,
    advice: Callable[[int], str],
    name: str = "budget",
    why: str = "",
) -> StagehandOOMError:
    """Return the error for a budget that cannot work.

    Args:
        limit_bytes: The budget.
        slots_bytes: What slots need at least.
        stay: Blocks that are always on the device.
        away: Those that come and go.
        odd_bytes: What is in no block.
        wire_bytes: What is set aside to decode.
        advice: Returns what to do, for the smallest budget that works.
        name: The budget's, as users know it.
        why: Why some of it stays.
    """
    needed = slots_bytes + odd_bytes + wire_bytes
    kept = sum(block.slot_nbytes for block in stay) + odd_bytes
    largest = max(away, key=lambda b: b.slot_nbytes, default=None)
    most = ""
    if largest is not None:
        most = (
            f" and {format_bytes(largest.slot_nbytes)} for the largest block,"
            f" {largest.name!r}"
        )
    if wire_bytes:
        most += (
            f" and {format_bytes(wire_bytes)} for a block as it crosses the link and"
            " is decoded"
        )
    return StagehandOOMError(
        f"the {name} is {format_limit(limit_bytes, needed)}, but"
        f" {format_at_least(needed)} must be on the device at once:"
        f" {format_bytes(kept)} that stay there{why}{most};"
        f" {advice(needed)}",
        needed_bytes=needed,
        limit_bytes=limit_bytes,
    )


def why_they_stay(
    rest: Mapping[str, torch.Tensor], odd: Mapping[str, torch.Tensor], odd_bytes: int
) -> str:
    """Return what to say of tensors that stay whatever their size; mostly nothing."""
    odd = {name: tensor for name, tensor in odd.items() if tensor_bytes(tensor)}
    if odd:
        name, tensor = next(iter(odd.items()))
        what = "that are no plain memory"
        which = f"{name!r}, a {type(tensor.data).__name__}, is the first"
        return _of_which(odd_bytes, len(odd), what, which)
    others = {n: t for n, t in rest.items() if not isinstance(t, nn.Parameter)}
    size = {name: tensor_bytes(tensor) for name, tensor in others.items()}
    nbytes = sum(size.values())
    if nbytes <= sum(map(tensor_bytes, rest.values())) // 2:
        return ""
    which = f"{max(size, key=lambda name: size[name])!r} is the largest"
    return _of_which(nbytes, len(size), "that are no parameters", which)


def raise_budget(needed_bytes: int) -> str:
    """Return what to do about a budget in bytes."""
    return f"raise it to at least {format_at_least(needed_bytes)}"


def raise_marks(needed_bytes: int) -> str:
    """Return what to do about a watermark in MiB."""
    return f"raise it to at least {-(-needed_bytes * 100 // MIB) / 100} MiB"


def _of_which(nbytes: int, count: int, what: str, which: str) -> str:
    return f", of which {format_bytes(nbytes)} are in {count} tensors {what} ({which}),"
