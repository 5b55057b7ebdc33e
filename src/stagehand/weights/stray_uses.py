"""A torch function mode that sees which weights a call reads without a use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from stagehand.core.trees import tensors_in
from stagehand.torch_private import (
    WeakMode,
    call_unseen,
    is_compiled_for,
    is_on_top,
    mode_below,
    remove_hooks,
    schemas_of,
    take_off,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.overrides import TorchFunctionMode
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

    from stagehand.residency.blocks import Block
    from stagehand.residency.scheduler import Scheduler
    from stagehand.weights.edges import Edges
    from stagehand.weights.rows import RowGather

__all__ = ["StrayUses"]


class StrayUses:
    """A torch function mode that brings weights which a call reads without a use.

    Some modules read their children's parameters themselves; no hook of the child tells
    of that.

    Args:
        owners: The streamed block of each parameter, by the parameter's id.
        rows: Reads of tables during its lookups are expected, and left alone.
        edges: The model's. While code is compiled, tensors that are where it computes
            already are not looked up: the compiler would compile anew for each.
        scheduler: Asked for what lies in the slots that a call writes to, and told of
            the end of uses.
        spared: Modules during whose calls the mode must be off, each with what tells
            as one begins whether it must.
        spare: Called with each of these, this object and a list for the handles of
            hooks: installs hooks that call `pause` and `resume` around the module.
        bring: Called with the blocks that a call reads and that are not in use, each
            with the tensor that is read.
        is_at_hand: Whether a block that is not in use can be read even so: one at most.
            The answer must be the same in each pass.
        note_read: Called where a call reads weights, in use or not: in forward and
            recompute alike.
    """

    def __init__(
        self,
        owners: Mapping[int, Block],
        rows: RowGather,
        edges: Edges,
        scheduler: Scheduler,
        *,
        spared: Mapping[nn.Module, Callable[[], bool]],
        spare: Callable[[nn.Module, StrayUses, list[RemovableHandle]], None],
        bring: Callable[[Mapping[Block, torch.Tensor]], None],
        is_at_hand: Callable[[Block], bool],
        note_read: Callable[[], None],
    ) -> None:
        self.spared = spared
        self._owners = owners
        self._rows = rows
        self._edges = edges
        self._scheduler = scheduler
        self._spare = spare
        self._bring = bring
        self._is_at_hand = is_at_hand
        self._note_read = note_read
        self._mode = WeakMode(self, rows.mode.model)
        self._handles: list[RemovableHandle] = []
        self._below: TorchFunctionMode | None = None
        """What mode was there when it began."""
        self._pauses: list[bool] = []  # of each call that runs, whether it is spared
        self._is_off = False

    def __enter__(self) -> Self:
        try:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._below = mode_below(self._mode)
            for module in self.spared:
                self._spare(module, self, self._handles)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        was_there, below = take_off(self._mode), self._below
        self._below = None
        if not (was_there or self._is_off or below is None) and is_on_top(below):
            take_off(below)  # at an interrupt its `with` has ended this one instead
        self._is_off = False  # so that no `resume` puts it back
        remove_hooks(self._handles)
        self.spared = {}  # this may be kept until the next pass, modules must not be

    def pause(self, module: nn.Module) -> None:
        """Watch nothing until `resume`, if a module that begins is to be spared, unless
        somebody else's mode is active, too."""
        is_spared = self.spared.get(module, bool)()
        if is_spared and not any(self._pauses) and is_on_top(self._mode):
            self._is_off = True
            take_off(self._mode)
        self._pauses.append(is_spared)

    def resume(self, _: nn.Module) -> None:
        """End what the latest `pause` began, if one did."""
        del self._pauses[-1:]
        if self._is_off and not any(self._pauses):
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_off = False

    def see(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Let the call have what it reads, and note what it writes."""
        written = [] if is_dynamo_compiling() else _written(func, args, kwargs)

        def call() -> Any:
            if not written:
                return func(*args, **kwargs)
            before = call_unseen(self._scheduler.versions_under, written)
            found = func(*args, **kwargs)
            self._scheduler.note_edits(before)
            return found

        if self._rows.busy or _is_harmless(func):
            return call()
        read: dict[Block, torch.Tensor] = {}
        for value in (*args, *kwargs.values()):
            self._look_at(value, read)
        if read:
            self._note_read()
            read = {block: weight for block, weight in read.items() if not block.uses}
        if all(map(self._is_at_hand, read)) or self._edges.is_torn():
            return call()
        call_unseen(self._bring, read)
        try:
            return call()
        finally:
            for block in read:
                self._scheduler.after(block)

    def _look_at(self, value: Any, read: dict[Block, torch.Tensor]) -> None:
        if isinstance(value, torch.Tensor):
            if is_dynamo_compiling():
                # It would compile anew for each tensor that is looked up.
                if value.device == self._edges.device:
                    return
            elif is_compiled_for():
                return
            block = self._owners.get(id(value))
            if block is not None:
                read.setdefault(block, value)
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    self._look_at(item, read)


def _is_harmless(func: Callable[..., Any]) -> bool:
    """Whether a call only asks what a tensor is like.

    `weight.T` reads the tensor. `weight.device` counts as a read, too: it is asked to
    put something else on the same device.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__  # type: ignore[attr-defined]
        return getattr(attribute, "__name__", "") not in _READING
    return name in _HARMLESS


def _written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that a call changes in place."""
    places = [kwargs.get("out")]
    name = getattr(func, "__name__", "")
    is_named_so = name.endswith("_") and not name.endswith("__")
    if is_named_so or name in _WRITING or kwargs.get("inplace") is True:
        # `torch.nn.init` gives all that it was given by name.
        places += [] if name in _RESHAPING else [*args, *kwargs.values()][:1]
    if name.partition(".")[0] in _BATCH_NORMS:
        places += _statistics(func, args, kwargs)
    for schema in schemas_of(func):
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                places += [*args[number : number + 1], kwargs.get(argument.name)]
    return [each for _, each in tensors_in(places)]


def _statistics(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the running statistics of a batch norm, if it changes them.

    It moves no version counter of theirs, and its schema does not tell, either.
    """
    if not kwargs.get("training", next(iter(args[5:]), False)):
        return []
    first = 1 if func is nn.functional.batch_norm else 3
    named = [kwargs.get(name) for name in ("running_mean", "running_var")]
    return [*args[first : first + 2], *named]


_BATCH_NORMS = frozenset(
    {
        *("batch_norm", "native_batch_norm", "_native_batch_norm_legit"),
        *("_batch_norm_impl_index", "_batch_norm_with_update", "cudnn_batch_norm"),
    }
)
_WRITING = frozenset(
    {
        *("__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__"),
        *("__imod__", "__imul__", "__ior__", "__ipow__", "__irshift__", "__isub__"),
        *("__itruediv__", "__ixor__", "__setitem__"),
    }
)
# What these change of a tensor is not its values.
_RESHAPING = frozenset(
    {
        *("as_strided_", "detach_", "rename_", "requires_grad_", "share_memory_"),
        *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
    }
)

_READING = frozenset({"H", "T", "device", "imag", "mH", "mT", "real"})


_HARMLESS = frozenset(
    {
        "__len__",
        "__set__",
        "data_ptr",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "nelement",
        "numel",
        "requires_grad_",
        "size",
        "stride",
    }
)
