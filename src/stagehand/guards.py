"""Checks of what blocks bring and compute, on request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stagehand.core.trees import tensors_in
from stagehand.errors import DtypeMismatchError
from stagehand.settings import check_types
from stagehand.torch_private import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stagehand.core.telemetry import Counters
    from stagehand.residency.finding import Group

__all__ = ["Checks", "FiniteCheck", "Guards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """Which checks are asked for; each is off by default."""

    nan_inf_check: bool = False
    """Count NaN and infinite values in outputs."""
    strict_bf16: bool = False
    """Refuse floating-point parameters and outputs that are not bfloat16."""
    dtype_promotion_check: bool = False
    """Count outputs that are wider than every input."""
    fail_on_dtype_promotion: bool = False
    """Refuse the first of these; they are counted then, too."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def counts_promotions(self) -> bool:
        """Whether outputs are compared with inputs."""
        return self.dtype_promotion_check or self.fail_on_dtype_promotion

    @property
    def any_of_outputs(self) -> bool:
        """Whether outputs have to be seen at all."""
        return self.nan_inf_check or self.strict_bf16 or self.counts_promotions


class Guards:
    """The checks of one runtime.

    What is recomputed in backward was checked in forward and is passed over, so a
    checkpointed block is counted once.

    Args:
        checks: What is asked for.
        counters: Where findings are counted.
    """

    def __init__(self, checks: Checks, counters: Counters) -> None:
        self._checks = checks
        self._counters = counters
        self._finite = FiniteCheck(counters) if checks.nan_inf_check else None

    def check_parameters(self, groups: Iterable[Group]) -> None:
        """Check what blocks bring.

        Raises:
            DtypeMismatchError: If `strict_bf16` was asked for and a floating-point
                parameter is of another type.
        """
        if not self._checks.strict_bf16:
            return
        for group in groups:
            for name, tensor in group.tensors.items():
                if isinstance(tensor, nn.Parameter) and _is_no_bf16(tensor):
                    raise DtypeMismatchError(
                        f"block {group.name!r} brings parameter {name!r} as"
                        f" {tensor.dtype}, but strict_bf16 expects torch.bfloat16; cast"
                        " the model, for instance with dtype=torch.bfloat16, or leave"
                        " strict_bf16 off"
                    )

    def look(self, block: str) -> Callable[[Any, Any], None] | None:
        """Return what is to be called with inputs and output of a block's modules.

        None if no outputs are checked: then nothing has to be hooked.
        """
        return partial(self._look_at, block) if self._checks.any_of_outputs else None

    def _look_at(self, block: str, inputs: Any, output: Any) -> None:
        if in_backward():
            return
        if self._finite is not None:
            self._finite.look_at(output)
        if self._checks.strict_bf16:
            _check_bf16(block, output)
        if self._checks.counts_promotions:
            self._check_promotion(block, inputs, output)

    def _check_promotion(self, block: str, inputs: Any, output: Any) -> None:
        """Compare each output with the widest input.

        Without floating-point inputs there is no stream that could be widened. Where
        autocast is on, blocks may compute in its type whatever they are given.
        """
        given = [t.dtype for _, t in _floats_in(inputs, "input")]
        if not given:
            return
        for name, tensor in _floats_in(output, "output"):
            expected = max((*given, *_autocast(tensor)), key=lambda d: d.itemsize)
            if tensor.dtype.itemsize <= expected.itemsize:
                continue
            self._counters.dtype_promotions += 1
            if self._checks.fail_on_dtype_promotion:
                raise DtypeMismatchError(
                    f"{name} of block {block!r} is {tensor.dtype}, wider than the"
                    f" {expected} of its inputs; cast what widens it inside of the"
                    " block, or leave fail_on_dtype_promotion off to count only"
                )

    def collect(self) -> None:
        """Add what was found since the last call to the counters."""
        if self._finite is not None:
            self._finite.collect()


class FiniteCheck:
    """Counts NaN and infinite values in the outputs of blocks.

    Counting is queued on the device; the host waits for the numbers once a step.

    Cost: one pass over each output and two numbers a block until the step ends.

    Args:
        counters: Where `collect` adds what was found.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._found: list[torch.Tensor] = []

    def look_at(self, output: Any) -> None:
        """Queue the count for every floating-point tensor of a module's output."""
        for _, tensor in tensors_in(output, "output"):
            if tensor.is_floating_point() or tensor.is_complex():
                with torch.no_grad():
                    # Not every type of one byte knows infinity, nor what asks for it.
                    wide = tensor.float() if tensor.itemsize == 1 else tensor
                    counts = (torch.isnan(wide).sum(), torch.isinf(wide).sum())
                    self._found.append(torch.stack(counts))

    def collect(self) -> None:
        """Add what was found since the last call to the counters."""
        found, self._found = self._found, []
        for counts in found:
            nans, infs = counts.tolist()
            self._counters.nan_count += nans
            self._counters.inf_count += infs


def _check_bf16(block: str, output: Any) -> None:
    for name, tensor in _floats_in(output, "output"):
        if _is_no_bf16(tensor):
            raise DtypeMismatchError(
                f"{name} of block {block!r} is {tensor.dtype}, but strict_bf16 expects"
                " torch.bfloat16; give the model bfloat16 inputs and cast what widens"
                " them, or leave strict_bf16 off"
            )


def _is_no_bf16(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.bfloat16


def _autocast(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
    """Return the type that autocast computes in where a tensor is, if it is on."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return (torch.get_autocast_dtype(kind),)
    return ()


def _floats_in(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, tensor in tensors_in(tree, name):
        if tensor.is_floating_point():
            yield path, tensor
