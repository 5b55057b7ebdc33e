"""Which blocks to checkpoint and which to spill for a budget, from a measured step.

A byte that leaves costs nothing while its copies hide behind compute, and the time of
both when they do not; a block that is computed again costs its forward, whatever it
saved. So blocks are checkpointed in the order of the time that they cost for each byte,
as long as the whole step gets shorter or does not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.activations.prefix import Rates, Save, best_prefix
from stagehand.errors import ConfigError
from stagehand.torch_private import add_hook, remove_hooks
from stagehand.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.activations.saving import Saving
    from stagehand.core.device import Device, Event

__all__ = ["Advice", "BlockCost", "BlockWatch", "advise"]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What one block costs in a step."""

    name: str
    saved_bytes: int
    """Bytes that its forward saves."""
    input_bytes: int
    """Bytes that a checkpoint of it would save."""
    seconds: float
    """How long its forward takes."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do with each block, and what it would cost."""

    checkpoint: tuple[str, ...]
    """Blocks to compute again."""
    spill: tuple[str, ...]
    """Blocks of which saved tensors leave: all by itself, as they come first."""
    keep: tuple[str, ...]
    """Blocks of which all stays."""
    budget_bytes: int
    fits: bool
    """Whether saved tensors stay within the budget."""
    recompute_seconds: float
    """What computing again adds to a step."""
    stall_seconds: float
    """What waiting for copies adds to it."""

    @property
    def seconds(self) -> float:
        """All that it adds to a step."""
        return self.recompute_seconds + self.stall_seconds

    def __str__(self) -> str:
        ends = "" if self.fits else ", and it does not fit even so"
        order = self.spill + self.keep
        return (
            f"for {format_bytes(self.budget_bytes)} of saved tensors: checkpoint"
            f" {_names(self.checkpoint, order)}; {_names(self.spill, order)} leave;"
            f" {_names(self.keep, order)} stay;"
            f" {self.recompute_seconds * 1e3:.3f} ms of computing again and"
            f" {self.stall_seconds * 1e3:.3f} ms of waiting in each step{ends}"
        )


def _names(names: Sequence[str], order: Sequence[str]) -> str:
    """Name blocks, those that follow each other by the first and the last."""
    runs: list[list[str]] = []
    for name, before in zip(order, (None, *order), strict=False):
        if name in names and before in names:
            runs[-1].append(name)
        elif name in names:
            runs.append([name])
    if not runs:
        return "none"
    texts = [
        " and ".join(run) if len(run) <= 2 else f"{run[0]} to {run[-1]}" for run in runs
    ]
    count = f" ({len(names)} blocks)" if len(names) > 2 else ""
    return ", ".join(texts) + count


def advise(blocks: Sequence[BlockCost], budget_bytes: int, rates: Rates) -> Advice:
    """Return what adds least to a step and fits the budget.

    Args:
        blocks: In the order in which they run.
        budget_bytes: Of saved tensors on the device.
        rates: Of the link.
    """
    last = len(blocks) - 1
    order = sorted(
        (n for n in range(len(blocks)) if _gain(blocks[n]) > 0),
        # Of equal ones the last first: it has the least time to come back.
        key=lambda n: (blocks[n].seconds / _gain(blocks[n]), last - n),
    )
    tries = (
        _try(blocks, frozenset(order[:count]), budget_bytes, rates)
        for count in range(len(order) + 1)
    )
    return min(tries, key=lambda advice: (not advice.fits, advice.seconds))


def _gain(block: BlockCost) -> int:
    return block.saved_bytes - block.input_bytes


def _try(
    blocks: Sequence[BlockCost], again: frozenset[int], budget_bytes: int, rates: Rates
) -> Advice:
    saves, working = [], 0
    for number, block in enumerate(blocks):
        if number in again:
            saves.append(Save(block.input_bytes, block.seconds, 3 * block.seconds))
            working = max(working, _gain(block))
        else:
            saves.append(Save(block.saved_bytes, block.seconds, 2 * block.seconds))
    room = max(0, budget_bytes - working)  # for the block that is computed again
    prefix, forecast = best_prefix(saves, room, rates)
    names = [block.name for block in blocks]
    return Advice(
        checkpoint=tuple(names[n] for n in sorted(again)),
        spill=tuple(names[: prefix.count]),
        keep=tuple(names[prefix.count :]),
        budget_bytes=budget_bytes,
        fits=forecast.peak_bytes + working <= budget_bytes,
        recompute_seconds=sum(blocks[n].seconds for n in again),
        stall_seconds=forecast.stall,
    )


class BlockWatch:
    """Measures blocks while one step runs inside of it.

    Args:
        saving: Whose forward the step runs; it is observed anew.
        device: Where it computes.
        blocks: By name, in the order in which they run.
    """

    def __init__(
        self, saving: Saving, device: Device, blocks: Iterable[tuple[str, nn.Module]]
    ) -> None:
        self._saving = saving
        self._device = device
        self._blocks = list(blocks) if isinstance(blocks, Iterable) else [blocks]
        for block in self._blocks:
            if not (isinstance(block, tuple) and isinstance(block[-1], nn.Module)):
                raise ConfigError(
                    f"blocks have a {type(block).__name__}: expected pairs of a name"
                    " and a module, such as model.blocks.named_children()"
                )
        self._begun: dict[str, tuple[int, int, Event]] = {}
        self._found: dict[str, tuple[int, int, Event, Event]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> BlockWatch:  # noqa: PYI034
        """Begin to watch."""
        self._saving.spill.lessons.forget()
        try:
            for name, block in self._blocks:
                before, after = self._before(name), self._after(name)
                add_hook(self._hooks, block.register_forward_pre_hook, before)
                add_hook(self._hooks, block.register_forward_hook, after)
            return self
        except BaseException:
            remove_hooks(self._hooks)
            raise

    def __exit__(self, *_: object) -> None:
        """End it."""
        remove_hooks(self._hooks)

    def advise(self, budget: int | str) -> Advice:
        """Return what to do with the blocks; waits for the device.

        Args:
            budget: Device bytes of saved tensors: an int, or "4GB".

        Raises:
            ConfigError: If none of them ran in a forward whose tensors are saved, or
                the link was not measured because nothing left the device.
        """
        budget_bytes = parse_bytes(budget, name="budget")
        if self._saving.off:
            raise ConfigError(
                "there is no advice: without an accelerator all saved tensors stay"
            )
        self._device.synchronize()
        spill = self._saving.spill
        spill.begin()  # draws conclusions from what is over
        rates = spill.lessons.rates
        if not self._found or rates is None:
            missing = "no block ran" if not self._found else "nothing left the device"
            raise ConfigError(
                f"there is no advice: {missing} while blocks were watched; run a"
                " forward inside of managed_forward() and its backward there, with a"
                " budget below what it saves"
            )
        return advise(self.costs(), budget_bytes, rates)

    def costs(self) -> list[BlockCost]:
        """Return what was measured of the blocks that ran."""
        return [
            BlockCost(name, saved, taken, start.elapsed_time(end) / 1e3)
            for name, (saved, taken, start, end) in self._found.items()
        ]

    def _noted(self) -> list[tuple[Any, int, int]] | None:
        scope = self._saving.scope
        return None if scope is None else scope.noted

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            noted = self._noted()
            if noted is not None or self._saving.scope is not None:
                taken = sum(_nbytes(arg) for arg in args)
                count = 0 if noted is None else len(noted)
                self._begun[name] = count, taken, self._mark()

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            noted, begun = self._noted(), self._begun.pop(name, None)
            if noted is not None and begun is not None:
                count, taken, start = begun
                saved = sum(nbytes for _, nbytes, _ in noted[count:])
                self._found[name] = saved, taken, start, self._mark()

        return after

    def _mark(self) -> Event:
        event = self._device.new_event(timing=True)
        event.record(self._device.current_stream())
        return event


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.numel() * value.element_size()
    return 0
