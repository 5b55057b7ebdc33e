"""Experts: modules whose calls read some rows of their weights, those that were chosen.

A mixture of experts keeps all of them in a few tensors, an expert a row, and a router
chooses which ones compute a token: a few of a hundred. So where few tokens come, as in
decoding, few rows have to cross, and all other bytes are spared. Which ones is known
when the call begins, and not before: nothing is loaded ahead, and the host waits for
the router. Rows lie where the whole would, so the same kernels compute the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stagehand.errors import ConfigError
from stagehand.torch_private import func_transforms
from stagehand.weights.hooks import has_other_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from stagehand.core.layout import Runs
    from stagehand.residency.blocks import Block
    from stagehand.residency.scheduler import Scheduler

__all__ = ["Experts", "is_experts"]

_LOOKED_AT = 2  # more numbers than so many for each row are those of nearly all rows
_FEW = 2  # rows cross alone where they are at most this part of all
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MADE_IN = "transformers.integrations.moe"
# Ways in which it computes experts that read no others than were chosen.
_GATHERING = ("batched_mm", "grouped_mm")
_OWN = (None, "eager")
_HIT = frozenset(("expert_hit", "hit"))


class Experts:
    """Brings the rows that calls of experts read, where these are few.

    Args:
        scheduler: Brings them.
        device: Where the model computes.
        choices: For classes of modules, what takes the arguments of a call and returns
            the numbers of the rows that it reads. Those of `transformers` are known.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: torch.device,
        choices: Mapping[type[nn.Module], Callable[..., Any]],
    ) -> None:
        self._scheduler = scheduler
        self._kind = device.type
        self._choices = choices

    def begin_of(
        self, site: nn.Module, block: Block
    ) -> Callable[[nn.Module, Any, Any], None] | None:
        """Return what begins uses of a block for calls of a site, if rows can come.

        Args:
            site: Nobody else reads the block.
            block: What it reads.
        """
        if not is_experts(site, self._choices):
            return None
        kinds = (kind for kind in self._choices if isinstance(site, kind))
        choice = self._choices.get(next(kinds, type(site)))
        own = {id(t) for t in site._parameters.values() if t is not None}
        if own != {id(tensor) for tensor in block.tensors}:
            return None
        if block.layout.rows < 2:
            return None
        block.rows = block.layout.rows

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(choice, module, block, args, kwargs)

        return begin

    def _begin(
        self,
        choice: Callable[..., Any] | None,
        module: nn.Module,
        block: Block,
        args: Any,
        kwargs: Any,
    ) -> None:
        scheduler = self._scheduler
        if block.stays and block.slot is not None:
            scheduler.before(block)
            return
        if choice is None and _is_of_transformers(module):
            choice = _chosen_in_transformers
        known = block.wire is None and choice is not None
        block.picks = known and _reads_what_it_is_given(module)
        runs = None
        if block.picks and choice is not None:
            if not self._is_read_again():
                runs = _runs_of(choice(*args, **kwargs), block)
            scheduler.picks = runs is not None
        if runs is None:
            scheduler.before(block)
        else:
            scheduler.before_rows(block, runs)

    def _is_read_again(self) -> bool:
        """Whether more rows may be read than those that the call names.

        With gradients, backward reads what was saved; under autocast, the cast that is
        kept is one of all rows. Under `vmap` the numbers of the rows cannot be read.
        """
        return (
            torch.is_grad_enabled()
            or torch.is_autocast_enabled(self._kind)
            or bool(func_transforms())
        )


def _reads_what_it_is_given(module: nn.Module) -> bool:
    """Whether a call reads only the rows that its arguments name.

    Not so with a parametrization, which computes a weight from all rows; with a forward
    of the module's own; and with hooks of others, which run after ours and may change
    the arguments or read the weights.
    """
    return not (
        hasattr(module, "parametrizations")
        or "forward" in vars(module)
        or has_other_hooks(module)
    )


def is_experts(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> bool:
    """Whether a module is one of these, or experts of a model of `transformers`."""
    return isinstance(module, tuple(kinds)) or _is_of_transformers(module)


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether a module's forward is one of `transformers` that reads chosen experts.

    A decorator of `transformers` gives classes of experts a forward that computes them
    in one of several ways, which the module's configuration names. It is read anew at
    each call, for users may change it.
    """
    forward = type(module).forward
    if getattr(forward, "__globals__", {}).get("__name__") != _MADE_IN:
        return False
    if getattr(module, "_is_expert_parallel", False):
        return False
    config = getattr(module, "config", None)
    way = getattr(config, "_experts_implementation", "")
    return way in _GATHERING or (way in _OWN and _visits_chosen(forward))


def _visits_chosen(forward: Any) -> bool:
    """Whether a class's own forward computes only experts that were hit, one by one.

    The forwards of some versions compute all experts at once and then take those that
    were chosen. The names of their local variables tell them apart.
    """
    code = forward.__wrapped__.__code__
    return bool(_HIT.intersection(code.co_varnames)) and "bmm" not in code.co_names


def _chosen_in_transformers(
    _states: object, chosen: object = None, *_: object, **named: object
) -> object:
    return named.get("top_k_index", named.get("router_indices", chosen))


def _runs_of(chosen: object, block: Block) -> Runs | None:
    """Return the rows to bring, as ranges, or None for the whole block.

    Raises:
        ConfigError: If what was chosen is nothing that can be.
    """
    if chosen is None:
        return None
    if not isinstance(chosen, torch.Tensor) or chosen.dtype not in _INTEGERS:
        what = chosen.dtype if isinstance(chosen, torch.Tensor) else type(chosen)
        raise ConfigError(
            f"experts= says that {block.name!r} reads rows of {what}: expected a tensor"
            " of integers, such as its router returns, or None for all rows"
        )
    if chosen.numel() > _LOOKED_AT * block.rows:
        return None
    rows = sorted(set(chosen.flatten().tolist()))
    while rows and rows[-1] >= block.rows:
        rows.pop()  # that of nobody: some routers send there what no expert computes
    if not rows or rows[0] < 0 or _FEW * len(rows) > block.rows:
        return None
    runs = [[rows[0], rows[0] + 1]]
    for row in rows[1:]:
        if row == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([row, row + 1])
    return [(first, end) for first, end in runs]
