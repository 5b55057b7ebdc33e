"""Finds weights that are read outside of their own module's forward."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from stagehand.errors import StagehandError, StagehandOOMError, StagehandWarning
from stagehand.frames import arguments_of, frames_of, objects_in
from stagehand.torch_private import is_compiled
from stagehand.weights.stray_uses import StrayUses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from stagehand.residency.blocks import Block
    from stagehand.residency.scheduler import Scheduler
    from stagehand.weights.edges import Edges
    from stagehand.weights.rows import RowGather

__all__ = ["Strays"]

_AGAIN = 100  # passes of a kind that are watched after one that failed unwatched


class _Kind(NamedTuple):
    """What tells passes apart that may read different weights."""

    edge: int
    """The id of the module that is entered."""
    with_gradients: bool
    training: bool
    """Whether that module is in training mode."""
    given: frozenset[str]
    """Which keyword arguments it has that are neither None nor False."""

    @classmethod
    def of(cls, edge: nn.Module, kwargs: Mapping[str, Any]) -> _Kind:
        given = frozenset(
            name
            for name, value in kwargs.items()
            if value is not None and value is not False
        )
        return cls(id(edge), torch.is_grad_enabled(), edge.training, given)


class Strays:
    """Finds weights of one model that other modules read, and lets them stay.

    A torch function mode (`StrayUses`) sees every call and so costs time: only some
    passes are watched. Those are the first of each kind, a kind being the edge that is
    entered, with which keyword arguments, whether gradients are taken, and whether the
    edge is in training mode. If a watched pass fails, the next of its kind is watched
    again. If one fails that is not, many are: what is done again may begin with other
    passes, as a generation does. A pass need not fail by what it reads: who asks where
    a weight is, and finds it on the host, may compute there.

    `nn.MultiheadAttention` may take a fused path in inference, but not under a function
    mode, and its last bits would differ. So the mode is off while such a module runs,
    or a site that has one inside (what it reads itself is one block), where it may: a
    forward with gradients has parts without, as those in reentrant checkpoints are. An
    `nn.TransformerEncoderLayer` without hooks fuses as a whole: where one may, the pass
    is not watched.

    The compiler would take the mode's calls into the graphs of a compiled site, which
    would break there, and compile it again without them. So the mode is off while one
    runs, unless the latest pass failed by what is on another device: then it looks, for
    one pass, or for as long as there is no room for what it has found. If that pass
    fails as well, it is off again: who wants one graph gets none with the mode on.

    Args:
        model: Any module.
        sites: Its sites.
        owners: See `StrayUses`.
        rows: See `StrayUses`.
        edges: See `StrayUses`.
        scheduler: See `StrayUses`.
        spare: See `StrayUses`.
        bring: Called with blocks that are not in use, and that a call reads.
        fill: Called with a block that was brought, to give its casts memory again.
        note_read: See `StrayUses`.
        keep: Lets blocks stay from the next pass on. Raises `StagehandOOMError` if they
            do not fit the budget together.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[nn.Module],
        owners: Mapping[int, Block],
        rows: RowGather,
        edges: Edges,
        scheduler: Scheduler,
        *,
        spare: Callable[[nn.Module, StrayUses, list[RemovableHandle]], None],
        bring: Callable[[Sequence[Block]], None],
        fill: Callable[[Block], None],
        note_read: Callable[[], None],
        keep: Callable[[Sequence[Block]], None],
    ) -> None:
        spared = [(m, _attention_in(m)) for m in _hookable(model, sites)]
        self._spared = [(weakref.ref(m), found) for m, found in spared if found]
        self._sites = [weakref.ref(site) for site in sites]
        self._compiled: list[weakref.ref[nn.Module]] = []  # of these, in this pass
        self._looks_into_compiled = False
        inside = {id(known()) for _, found in self._spared for known in found}
        self._others = [m for m in _attention_in(model) if id(m()) not in inside]
        self._owners = owners
        self._rows = rows
        self._edges = edges
        self._scheduler = scheduler
        self._spare = spare
        self._bring = bring
        self._fill = fill
        self._note_read = note_read
        self._keep = keep
        self._known: dict[_Kind, int] = {}  # passes left to watch
        self._kind = _Kind(0, False, False, frozenset())  # of this pass
        self._watches = False
        self._uses: StrayUses | None = None
        self._found: list[Block] = []
        # What was read at hand in any pass, with `Block.abandoned` before this one.
        self._at_hand: dict[Block, int] = {}
        self._roomless: set[Block] = set()  # found, and there is no room to keep them
        self._has_warned = False
        self._readers: dict[str, None] = {}  # classes that read what was found
        self._has_told_of_function = False

    def __repr__(self) -> str:
        return f"Strays({len(self._known)} kinds of passes known)"

    def begin(self, edge: nn.Module, kwargs: Mapping[str, Any]) -> StrayUses | None:
        """Begin a pass; return the mode that watches it, None if none is needed.

        Args:
            edge: The module that is entered.
            kwargs: Its keyword arguments.
        """
        if self._uses is not None:
            self._uses.__exit__()  # an interrupt may have left its mode active
            self._uses = None
        self._found = []
        self._at_hand = {block: block.abandoned for block in self._at_hand}
        self._kind = kind = _Kind.of(edge, kwargs)
        self._watches = False
        if not self._known.get(kind, 1) or _may_fuse(self._others):
            return None
        self._compiled = [known for known in self._sites if _has_compiled(known())]
        uses = self._looking(self._is_at_hand)
        self._watches = not uses.spared.get(edge, bool)()  # too late for hooks: it runs
        self._uses = uses if self._watches else None
        return self._uses

    def may_fuse(self) -> bool:
        """Whether attention may be fused in a pass that begins, without a mode on."""
        inside = (found for _, found in self._spared)
        return any(map(_may_fuse, (self._others, *inside)))

    def begin_again(self) -> StrayUses:
        """Return a mode for a part of a watched pass that backward recomputes."""
        return self._looking(_is_never_at_hand)

    def _looking(self, is_at_hand: Callable[[Block], bool]) -> StrayUses:
        spared: dict[nn.Module | None, Callable[[], bool]] = {
            known(): partial(_may_fuse, found)
            for known, found in self._spared
            if _evaluated(found)
        }
        if not self._looks_into_compiled:
            spared |= {known(): _always for known in self._compiled}
        return StrayUses(
            self._owners,
            self._rows,
            self._edges,
            self._scheduler,
            spared={m: is_spared for m, is_spared in spared.items() if m is not None},
            spare=self._spare,
            bring=self._bring_strays,
            is_at_hand=is_at_hand,
            note_read=self._note_read,
        )

    def end(self, *, failed: bool) -> None:
        """End a pass, and let what it has found stay. Idempotent.

        If the budget has no room for that, later passes are watched, too. What a failed
        pass has found does not stay. It may be a part of what there is, and the next
        pass finds it again: if it stayed, a budget that an error has named before might
        not be enough any more.

        Args:
            failed: Whether something was raised in it, maybe by a weight that was read
                elsewhere for the first time.
        """
        found, self._found = self._found, []
        if not self._kind.with_gradients:
            left = (b for b, count in self._at_hand.items() if b.abandoned != count)
            found.extend(left)
        watched, self._watches = self._watches, False
        if found and not failed:
            self._keep_found(found)
        if failed:
            looked = self._looks_into_compiled
            self._looks_into_compiled = not looked and _may_be_by_a_read()
        elif not self._roomless:
            self._looks_into_compiled = False
        if self._roomless:
            self._known.pop(self._kind, None)
        elif failed and not self._known.get(self._kind, 1):
            self._known[self._kind] = _AGAIN
        elif watched and not failed:
            self._known[self._kind] = self._known.get(self._kind, 1) - 1

    def _keep_found(self, found: Sequence[Block]) -> None:
        try:
            self._keep(found)
        except StagehandOOMError as error:
            self._roomless.update(found)
            self._known.clear()
            self._warn(found, error)
        else:
            self._roomless.difference_update(found)

    def look_again(self) -> None:
        """Watch the first pass of each kind again, for the model's modules changed."""
        self._known.clear()

    def _is_at_hand(self, block: Block) -> bool:
        """Whether a read needs no use of the block, for its own use was the latest.

        It is read then by a hook of its module, say, or by the module's caller, on the
        same stream. This is not enough with gradients, where the weight may be read in
        backward again and no handle tells, nor where autocast's casts of it were
        emptied. Nor is it where the caller keeps a view: the slot is abandoned to that,
        in each pass, and `end` lets the block stay. That may be in a later pass, when
        another plan wants the slot.
        """
        if (
            self._kind.with_gradients
            or block.casts
            or not self._scheduler.is_latest(block)
        ):
            return False
        self._at_hand.setdefault(block, block.abandoned)
        return True

    def _bring_strays(self, read: Mapping[Block, torch.Tensor]) -> None:
        for block, weight in read.items():
            if self._kind.with_gradients and not (
                torch.is_grad_enabled() or block.bound
            ):
                self._look_for_function(block, weight)
        self._bring([*read])
        for block, weight in read.items():
            block.read_elsewhere = True
            self._fill(block)
            if block not in self._found:
                self._found.append(block)
                if not self._has_warned and (reader := self._reader_of(weight)):
                    self._readers[reader] = None

    def _reader_of(self, weight: torch.Tensor) -> str | None:
        """Return the class of the innermost running module that contains a weight.

        Warnings name it for `opaque=`. One with more than half of all blocks is not
        named: as a single block it would be too large to stream.
        """
        running = (
            m for m in objects_in(threading.get_ident()) if isinstance(m, nn.Module)
        )
        has_it = (m for m in running if any(p is weight for p in m.parameters()))
        if (reader := next(has_it, None)) is not None:
            inside = {self._owners.get(id(p)) for p in reader.parameters()} - {None}
            if 2 * len(inside) <= len({*self._owners.values()}):
                kind = type(reader)
                return f"{kind.__module__}.{kind.__qualname__}"
        return None

    def _look_for_function(self, block: Block, weight: torch.Tensor) -> None:
        """Warn if a `torch.autograd.Function` was given a weight that is on the host.

        Once for the model. Autograd notes the device of the weight's gradient when the
        function is called, before the function reads the weight, which brings it.
        """
        trains = weight.requires_grad and not self._has_told_of_function
        if trains and _is_given_to_function(weight):
            self._has_told_of_function = True
            reader = self._reader_of(weight)
            named = f" ({reader})" if reader else ""
            warnings.warn(
                f"a weight of block {block.name!r} of shape {list(weight.shape)} is"
                " given to a torch.autograd.Function outside of its module's forward,"
                " while it is on the host: this pass's backward fails if the function"
                " has a gradient for it; what was found stays on the device from the"
                " next pass on, if the budget has room for all of it: call the model"
                " once under torch.no_grad() before it trains, or name the class of the"
                f" module that has the weight and calls the function{named} in opaque="
                " of a new stagehand.layer()",
                StagehandWarning,
                stacklevel=2,
            )

    def _warn(self, found: Sequence[Block], error: StagehandOOMError) -> None:
        if not self._has_warned:
            self._has_warned = True
            readers = f" ({', '.join(self._readers)})" if self._readers else ""
            but = ", but where attention may be fused" if self._others else ""
            trains = any(t.requires_grad for block in found for t in block.tensors)
            bits = (
                "; gradients of weights that are used several times may differ in their"
                " last bits"
            )
            warnings.warn(
                f"{len(found)} blocks, {found[0].name!r} first, are read by modules"
                f" that do not own them and do not fit the budget together ({error}):"
                f" every call is watched from now on{but}, which is slow, and"
                " in backward those in non-reentrant checkpoints, while in reentrant"
                f" ones they fail{bits if trains else ''}; give them that budget, or"
                f" name the classes of the modules that read them{readers} in opaque="
                " of a new stagehand.layer(): each such module is one block then",
                StagehandWarning,
                stacklevel=2,
            )


def _hookable(model: nn.Module, sites: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the sites and attention modules on which hooks may be put.

    Hooks inside of an `nn.TransformerEncoderLayer` keep it from fusing. So none are put
    into one that has none yet.
    """
    hooked = set(map(id, sites))
    closed: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            inside = set(map(id, module.modules()))
            if hooked.isdisjoint(inside):
                closed |= inside
    attention = (m() for m in _attention_in(model))
    found = dict.fromkeys((*sites, *attention))
    return [m for m in found if m is not None and id(m) not in closed]


def _attention_in(module: nn.Module) -> list[weakref.ref[nn.MultiheadAttention]]:
    found = (m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
    return [weakref.ref(attention) for attention in found]


def _may_fuse(attention: Sequence[weakref.ref[nn.MultiheadAttention]]) -> bool:
    """Whether some attention module may take its fused path in the present mode."""
    grads = torch.is_grad_enabled()
    return any(
        not (grads and any(p.requires_grad for p in m.parameters(recurse=False)))
        for m in _evaluated(attention)
    )


def _evaluated(
    attention: Sequence[weakref.ref[nn.MultiheadAttention]],
) -> list[nn.MultiheadAttention]:
    return [
        m for m in (known() for known in attention) if m is not None and not m.training
    ]


def _may_be_by_a_read() -> bool:
    """Whether what is raised here may be PyTorch's error of tensors on two devices."""
    error = sys.exc_info()[1]
    is_pytorchs = isinstance(error, RuntimeError) and not isinstance(
        error, StagehandError
    )
    return is_pytorchs and "device" in str(error)


def _has_compiled(site: nn.Module | None) -> bool:
    """Whether a site, or a part of it, is compiled by itself."""
    return site is not None and any(map(is_compiled, site.modules()))


def _is_given_to_function(weight: torch.Tensor) -> bool:
    """Whether a `torch.autograd.Function` that was given a weight runs forward.

    In this thread, called by the user or by a function of the user's. The call of
    `apply()` itself has a frame in some versions of PyTorch only.
    """
    kinds = [torch.autograd.Function]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    forwards = {getattr(kind.forward, "__code__", None) for kind in kinds}
    return any(
        frame.f_code in forwards and any(one is weight for one in arguments_of(frame))
        for frame in frames_of(threading.get_ident())
    )


def _always() -> bool:
    return True


def _is_never_at_hand(_: Block) -> bool:
    return False
