"""The hooks of a streamed model, PyTorch's own, installed and removed together.

Two kinds of places are hooked: *sites*, the modules whose forward reads a streamed
block, and *edges* (see `stagehand.weights.edges`). The hooks around state dicts are in
`stagehand.weights.state_dicts`.

What stays on the device is read without a use, by modules between these: a block calls
its norms. While it is away, for the model was parked or another one needed the room,
such a module may be the first that is called, so each is an edge then.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from stagehand.errors import StagehandError, StagehandOOMError
from stagehand.torch_private import (
    add_hook,
    call_unseen,
    dispatch_modes,
    in_backward,
    remove_hooks,
    skipped,
    take_off,
)
from stagehand.weights.entrances import entrances, has_own, takes_hooks, wrapped
from stagehand.weights.hooks import (
    Hook,
    call_untraced,
    get_nothing,
    module_frame,
    nothing,
)
from stagehand.weights.state_dicts import (
    PartLoading,
    StateAsked,
    StateGiven,
    StateLoaded,
    StateLoading,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Container,
        Iterable,
        MutableMapping,
    )

    from torch.utils.hooks import RemovableHandle

    from stagehand.residency.blocks import Block, Reader
    from stagehand.residency.scheduler import Scheduler
    from stagehand.torch_private import WeakMode
    from stagehand.weights.edges import Edges
    from stagehand.weights.stray_uses import StrayUses

    Pick = Callable[[nn.Module, Any, Any], None]
    """Begins a use, of what a call of a module with these arguments reads."""

__all__ = ["SiteHooks"]


class _EdgeBegin(Hook):
    """Enters the model where an edge is called; moves its inputs if outermost."""

    __slots__ = ("_bring_home", "_edges", "_push_hooks")

    def __init__(
        self,
        edges: Edges,
        push_hooks: Callable[[], object],
        bring_home: Callable[[], None],
    ) -> None:
        self._edges = edges
        self._push_hooks = push_hooks
        self._bring_home = bring_home

    @skipped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return call_untraced(self, module, args, kwargs)
        moved = self._edges.enter(module, args, kwargs, module_frame())
        if in_backward():
            self._edges.recomputing += 1
        if torch.is_grad_enabled():
            # What is no site has weights too, and a recompute must save the same.
            self._edges.pushed.append((_EdgeEnd, self._push_hooks()))
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        # A module's hooks are copied before its children's parameters.
        self._bring_home()
        return nothing

    def __reduce__(self) -> Any:
        self._bring_home()
        return get_nothing, ()


class _EdgeEnd(Hook):
    """Leaves the model where an edge's call ends, also by an exception."""

    __slots__ = ("_edges",)

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    @skipped
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling():
            call_untraced(self, module, args, output)
            return
        pushed = self._edges.pushed
        if pushed and pushed[-1][0] is _EdgeEnd:
            if pushed[-1][1] is None:  # mostly
                del pushed[-1]
            else:
                self._edges.end_pushed()
        if in_backward() and self._edges.recomputing:
            self._edges.recomputing -= 1
        self._edges.leave(module)


class _ExtraBegin(_EdgeBegin):
    """Enters the model where a module is called that is an edge for a time only."""

    __slots__ = ("_is_extra",)

    def __init__(
        self,
        edges: Edges,
        is_extra: Callable[[nn.Module], bool],
        bring_home: Callable[[], None],
    ) -> None:
        super().__init__(edges, _push_none, bring_home)
        self._is_extra = is_extra

    @skipped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return call_untraced(self, module, args, kwargs)
        moved = super().__call__(module, args, kwargs)
        if not self._is_extra(module):  # dropped while this waited for its turn
            _EdgeEnd(self._edges)(module, args, None)
        return moved


def _push_none() -> bool:
    return False


class _SiteHook(Hook):
    """A hook whose method is registered: that is called 0.3 us sooner than an object.

    A copy of a method has a copy of its object, which has no edges then.
    """

    __slots__ = ("_block", "_edges", "_reader")
    _edges: Edges | None

    def __init__(self, block: Block, edges: Edges, reader: Reader) -> None:
        self._block = block
        self._edges = edges
        self._reader = reader

    @property
    def is_gone(self) -> bool:
        return self._edges is None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _gone(type(self))

    def __reduce__(self) -> Any:
        return _gone, (type(self),)


def _gone(kind: type[_SiteHook]) -> _SiteHook:
    hook = object.__new__(kind)
    hook._edges = None
    return hook


class _SiteBegin(_SiteHook):
    """Brings a site's block before the site computes; enters the model if need be."""

    __slots__ = ("_before", "_check", "_pick", "_track")

    def __init__(
        self,
        block: Block,
        before: Callable[[Block], None],
        edges: Edges,
        reader: Reader,
        track: Callable[[Block, Reader], object],
        pick: Pick | None,
        check: Callable[[], None],
    ) -> None:
        super().__init__(block, edges, reader)
        self._before = before
        self._check = check
        self._track = track
        self._pick = pick

    @skipped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return call_untraced(self, module, args, kwargs)
        edges, moved = self._edges, None
        if edges is None:
            return None
        if edges.outside():
            moved = edges.enter(module, args, kwargs, module_frame())
        else:
            if edges.inner_calls:
                edges.lock.await_inner_calls()
            if edges._backward is not None:
                if edges.await_failure():
                    moved = edges.enter(module, args, kwargs, module_frame())
                else:
                    moved = edges.moved_again(args, kwargs)
        try:
            if self._pick is not None:
                call_unseen(self._pick, module, *(moved or (args, kwargs)))
            elif dispatch_modes():
                call_unseen(self._before, self._block)
            else:
                self._before(self._block)
        except StagehandOOMError:
            self._check()  # uses without an end take room, too
            raise
        if torch.is_grad_enabled() or torch.is_autocast_enabled(edges.device_type):
            edges.pushed.append((module, self._track(self._block, self._reader)))
        return moved


class _SiteEnd(_SiteHook):
    """Ends a site's use of its block, also where the site has raised."""

    __slots__ = ("_drop_rows", "_untrack")

    def __init__(
        self,
        block: Block,
        edges: Edges,
        reader: Reader,
        untrack: Callable[[Block, Reader, Any], None],
        drop_rows: Callable[[Block], None],
    ) -> None:
        super().__init__(block, edges, reader)
        self._untrack = untrack
        self._drop_rows = drop_rows

    @skipped
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling():
            call_untraced(self, module, args, output)
            return
        edges = self._edges
        if edges is None:
            return
        if edges.inner_calls and edges.inside():
            edges.lock.await_inner_calls()
        block, pushed = self._block, edges.pushed
        try:
            if pushed and pushed[-1][0] is module:
                if pushed[-1][1] is None:  # mostly
                    del pushed[-1]
                else:
                    edges.end_pushed()
                self._untrack(block, self._reader, output)
        finally:  # PyTorch drops what is raised here where the site has raised
            if block.uses > block.by_hand:  # else a hook before ours has raised
                block.uses -= 1  # as `Scheduler.after` does
            if block.runs:
                self._drop_rows(block)
            stack = edges._stack
            if len(stack) == 1 and stack[0].module is module:
                edges.leave(module)


class _Look(Hook):
    """Shows the inputs and outputs of a module's calls to the guards."""

    __slots__ = ("_look",)

    def __init__(self, look: Callable[[Any, Any], None]) -> None:
        self._look = look

    @skipped
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_dynamo_compiling():
            call_untraced(self, module, args, kwargs, output)
            return
        self._look((args, kwargs), output)


class _Spared(Hook):
    """Pauses a watch where a module begins, or resumes it where the module ends."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self._act = act

    @skipped
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if is_dynamo_compiling():
            call_untraced(self, module)
            return
        self._act(module)


class _RowsBegin(Hook):
    """Turns on the mode that looks rows up on the host, where a table is called."""

    __slots__ = ("_mode",)

    def __init__(self, mode: WeakMode) -> None:
        self._mode = mode

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]


class _RowsEnd(Hook):
    """Turns that mode off."""

    __slots__ = ("_mode",)

    def __init__(self, mode: WeakMode) -> None:
        self._mode = mode

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        take_off(self._mode)  # a hook before ours may have raised: then it is not there


class _Walk:
    """Finds modules between the sites and edges of one runtime, each once."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._reads: dict[nn.Module, bool] = {}
        self.found: list[nn.Module] = []
        """Those that have tensors, or parts that have some, outside of sites."""

    def __call__(self, module: nn.Module) -> bool:
        """Look at a module and its parts; return whether it reads between sites."""
        if module in self._reads:
            return self._reads[module]
        hooks = [getattr(h, "__self__", h) for h in module._forward_pre_hooks.values()]
        kinds = {type(h) for h in hooks if getattr(h, "_edges", None) is self._edges}
        self._reads[module] = False  # where it is a part of itself, too
        if _SiteBegin in kinds:
            return False
        own = (*module._parameters.values(), *module._buffers.values())
        reads = any(tensor is not None for tensor in own)
        for child in module.children():
            reads = self(child) or reads
        self._reads[module] = reads
        if reads and not kinds and takes_hooks(module):
            self.found.append(module)
        return reads


class SiteListener(Protocol):
    """What is done as sites and edges begin and end, beside having blocks there."""

    def push_hooks(self) -> object:
        """An edge begins with gradients: weights are to be saved as handles.

        Returns:
            What of the hooks for that its end has to take off, if any.
        """

    def track(self, block: Block, reader: Reader) -> object:
        """A site begins with gradients or under autocast; see `push_hooks`."""

    def untrack(self, block: Block, reader: Reader, output: Any) -> None:
        """It ends."""


class Copying(Protocol):
    """What is done around copies, pickles and state dicts of the model."""

    def bring_home(self) -> None:
        """Bring every tensor home, before the model is copied or pickled."""

    def hand_out(self) -> bool:
        """Bring tensors home for a state dict; return whether some are left."""

    def resume(self) -> None:
        """It was saved."""

    def await_copies(self) -> None:
        """The model, or a part of it, is about to write weights on the host."""

    def look_again(self) -> None:
        """What had joined the model was replaced."""


class SiteHooks:
    """All hooks of one runtime on its model, installed and removed together.

    Args:
        edges: The model's edge.
        scheduler: Told when a site begins, and of what an interrupted one has left.
        listener: Told of sites and edges.
    """

    def __init__(
        self, edges: Edges, scheduler: Scheduler, listener: SiteListener
    ) -> None:
        self._edges = edges
        self._scheduler = scheduler
        self._listener = listener
        self._handles: list[RemovableHandle] = []
        self._pairs: list[tuple[ref[nn.Module], int, int]] = []
        """Modules that have hooks until `remove`, and the numbers of these two."""
        self._extra: MutableMapping[nn.Module, list[RemovableHandle]]
        self._extra = WeakKeyDictionary()
        """Edges while what stays is away."""
        self._models: WeakSet[nn.Module] = WeakSet()
        self._model: ref[nn.Module] | None = None

    def add_model(
        self,
        model: nn.Module,
        sites: Container[nn.Module],
        tables: Iterable[nn.Module],
        copying: Copying,
    ) -> None:
        """Make edges of the module that users call and of its parts.

        Where it only wraps another module, of that one and its parts, for users may
        call these directly.

        Args:
            model: As it was given.
            sites: What becomes a site.
            tables: What looks its rows up on the host.
            copying: Told of copies, pickles and state dicts of the model.
        """
        models = wrapped(model)
        self._models.update(models)
        self._model = ref(model)
        for edge in entrances(models, sites, tables):
            begin = _EdgeBegin(
                self._edges, self._listener.push_hooks, copying.bring_home
            )
            self._hook_edge(edge, begin, self._handles)
            self._note(edge)
        loading, again = StateLoading(model), copying.look_again
        complete = self._scheduler.complete_rows
        asking = StateAsked(self._edges, copying.hand_out, complete)
        given = StateGiven(asking, self._edges, copying.resume)
        add = partial(add_hook, self._handles)
        waiting = PartLoading(copying.await_copies)
        for part in model.modules():
            if part is model or has_own(part):
                add(part.register_load_state_dict_pre_hook, waiting)
        add(model.register_load_state_dict_pre_hook, loading)
        add(model.register_load_state_dict_post_hook, StateLoaded(loading, again))
        add(model.register_state_dict_pre_hook, asking)
        add(model.register_state_dict_post_hook, given)

    def is_model(self, module: nn.Module) -> bool:
        """Whether a module is the whole model, with or without its wrappers."""
        return module in self._models

    def _hook_edge(
        self, module: nn.Module, begin: _EdgeBegin, handles: list[RemovableHandle]
    ) -> None:
        add, end = partial(add_hook, handles), _EdgeEnd(self._edges)
        add(module.register_forward_pre_hook, begin, prepend=True, with_kwargs=True)
        add(module.register_forward_hook, end, always_call=True)

    def _note(self, module: nn.Module) -> None:
        """Note that a module has got the latest two hooks."""
        begin, end = self._handles[-2:]
        self._pairs.append((ref(module), begin.id, end.id))

    def find_lost(self) -> list[nn.Module]:
        """Return the modules of whose hooks somebody else has taken some off."""
        found: dict[nn.Module, None] = {}
        for known, begin, end in self._pairs:
            module = known()
            if module is not None:
                before, after = module._forward_pre_hooks, module._forward_hooks
                if begin not in before or end not in after:
                    found[module] = None
        return [*found]

    def check(self) -> None:
        """Do nothing if all modules have the hooks by which they stream.

        Raises:
            StagehandError: Otherwise. All uses are ended, for nothing else may do so.
        """
        lost = self.find_lost()
        if not lost:
            return
        self._scheduler.recover()
        model = None if self._model is None else self._model()
        names = {} if model is None else {m: n for n, m in model.named_modules()}
        first = names.get(lost[0]) or type(lost[0]).__name__
        raise StagehandError(
            f"{self._edges.lock.name} has lost hooks by which it streams, on"
            f" {len(lost)} of its modules, {first!r} first: expected other code to"
            " remove only hooks of its own, by their handles; call the runtime's"
            " shutdown() and stream the model again"
        ) from None

    def add_edges(self, model: nn.Module, copying: Copying) -> None:
        """Make edges of all modules that read what stays, which is away. Idempotent.

        They push no hooks for saved tensors: a checkpointed region may run with them
        and be recomputed without, and must save the same both times.

        Args:
            model: The whole model.
            copying: See `add_model`.
        """
        walk = _Walk(self._edges)
        walk(model)
        for module in walk.found:
            handles = self._extra.setdefault(module, [])
            begin = _ExtraBegin(self._edges, self.is_extra, copying.bring_home)
            self._hook_edge(module, begin, handles)

    def is_extra(self, module: nn.Module) -> bool:
        """Whether a module is an edge only as long as what stays is away."""
        return module in self._extra

    def drop_edges(self, entered: nn.Module) -> None:
        """Undo `add_edges`, for what stays is on the device again.

        Args:
            entered: Where the model was entered. If that is such an edge itself, all
                are left until a later pass: its end has to be told.
        """
        if self._extra and not self.is_extra(entered):
            self._drop_extra()

    def _drop_extra(self) -> None:
        for module, handles in [*self._extra.items()]:
            remove_hooks(handles)
            del self._extra[module]

    def add_site(
        self,
        module: nn.Module,
        block: Block,
        reader: Reader,
        pick: Pick | None,
    ) -> None:
        """Tell the scheduler when a module uses a block.

        Args:
            module: The site.
            block: What it reads.
            reader: Notes how often it reads it.
            pick: Begins a use in place of `before`, where it depends on the inputs
                which rows are read; called with the module, `args` and `kwargs`. None
                where all are.
        """
        add, edges = partial(add_hook, self._handles), self._edges
        before, drop_rows = self._scheduler.before, self._scheduler.drop_rows
        track, untrack = self._listener.track, self._listener.untrack
        begin = _SiteBegin(
            block, before, edges, reader, track, pick, self.check
        ).__call__
        end = _SiteEnd(block, edges, reader, untrack, drop_rows).__call__
        add(module.register_forward_pre_hook, begin, prepend=True, with_kwargs=True)
        add(module.register_forward_hook, end, always_call=True)
        self._note(module)

    def add_look(self, module: nn.Module, look: Callable[[Any, Any], None]) -> None:
        """Show a module's inputs and every output to `look`."""
        hook = module.register_forward_hook
        add_hook(self._handles, hook, _Look(look), with_kwargs=True)

    def add_gather(self, module: nn.Module, mode: WeakMode) -> None:
        """Let a module look its rows up on the host."""
        add = partial(add_hook, self._handles)
        add(module.register_forward_pre_hook, _RowsBegin(mode))
        add(module.register_forward_hook, _RowsEnd(mode), always_call=True)

    def spare(
        self, module: nn.Module, uses: StrayUses, handles: list[RemovableHandle]
    ) -> None:
        """Let a watch pause while a module runs, until the hooks are removed."""
        add, begin, end = partial(add_hook, handles), uses.pause, uses.resume
        add(module.register_forward_pre_hook, _Spared(begin))
        add(module.register_forward_hook, _Spared(end), prepend=True, always_call=True)

    def remove(self) -> None:
        """Take all hooks off, whatever interrupts. Idempotent."""
        try:
            self._drop_extra()
        finally:
            self._drop_extra()
            self._pairs.clear()
            remove_hooks(self._handles)
