"""The model's side: hooks that tell the scheduler what is used, and the model's edge.

Two kinds of places are hooked, with PyTorch's own forward hooks:

- *sites*, the modules whose forward reads a streamed block;
- *edges*, the places where a model is entered from outside: the model itself, its
  direct children, and any site that is called while none of these runs. The outermost
  one holds the runtime's lock, moves inputs to the device and begins and ends the pass.

Autograd's way back is a pass too. No hook tells where it begins: the first weight that
is unpacked, the first gradient that arrives or the first module that is recomputed does
(`Edges.enter_backward`), in whichever thread autograd runs. It ends with the outermost
call of autograd, whether that succeeds or raises.

An exception inside a forward runs the hooks (`always_call`); an interrupt does not. So
each edge notes its frame, and what a dead frame left open is closed at the next entry.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from stagehand.torch_private import (
    at_end_of_backward,
    dispatch_modes,
    graph_task,
    in_backward,
    pop_saved_hooks,
    skipped,
    untraced,
    waits_for_backward,
    without_modes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block

__all__ = [
    "Edges",
    "PassListener",
    "RowGather",
    "SiteHooks",
    "StrayUses",
    "is_hooked",
    "move_inputs",
]


class PassListener:
    """What happens at the edge of a pass; the runtime fills it in."""

    def begin_pass(self, module: nn.Module) -> AbstractContextManager[Any] | None:
        """The model is entered; return a context for the whole pass, or None."""

    def end_pass(self) -> None:
        """The model is left, normally or by an exception."""

    def abort_pass(self) -> None:
        """A pass was left without a word; close what it left open."""

    def begin_backward(self) -> None:
        """Autograd begins to go back through the model."""

    def end_backward(self, *, failed: bool) -> None:
        """It is over."""


class _Here(threading.local):
    """This thread, by its object: the numbers of threads that ended are used again."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


_HERE = _Here()


class _Turn:
    """A reentrant lock that can be taken over from a thread that forgot it.

    An interrupt skips the hooks that would have released it, and its thread may be gone
    or never come back. Whoever waits looks now and then whether that has happened.

    Args:
        left: Whether what the owner entered is no longer running.
        take_over: Called by the new owner, before anything else.
    """

    def __init__(self, left: Callable[[], bool], take_over: Callable[[], None]) -> None:
        self._left = left
        self._take_over = take_over
        self._lock = threading.Lock()
        self._ownership = threading.Lock()
        self._owner: Any = None  # a thread
        self._waiting: set[Any] = set()  # threads
        self._count = 0
        self._sorting = False  # the owner is back, and may be closing what it left

    def acquire(self, *, in_backward: bool = False) -> bool:
        """Wait for one's turn; return whether it was granted.

        Args:
            in_backward: Do not wait for an owner that itself waits for autograd: that
                needs the thread that asks.
        """
        me = _HERE.thread
        with self._ownership:
            if self._owner is me:
                self._count += 1
                self._sorting = True
                return True
        if self._lock.acquire(blocking=False):
            self._owner, self._count = me, 1
            return True
        self._waiting.add(me)
        try:
            return self._wait(me, in_backward=in_backward)
        finally:
            self._waiting.discard(me)

    def _wait(self, me: Any, *, in_backward: bool) -> bool:
        while not self._lock.acquire(blocking=False):
            if in_backward and self._is_waited_for(me):
                return False
            if self._lock.acquire(timeout=_LOOK_SECONDS):
                break
            with self._ownership:
                if not self._is_forgotten():
                    continue
                self._owner, self._count = me, 1
            self._take_over()
            return True
        self._owner, self._count = me, 1
        return True

    def try_acquire(self) -> bool:
        """Take the turn if that needs no waiting; return whether it was taken."""
        me = _HERE.thread
        with self._ownership:
            if self._owner is me:
                self._count += 1
                self._sorting = True
                return True
            free = self._lock.acquire(blocking=False)
            if not free and not self._is_forgotten():
                return False
            self._owner, self._count = me, 1
        if not free:
            self._take_over()
        return True

    def is_awaited_by(self, thread: Any) -> bool:
        """Whether a thread waits for its turn."""
        return thread in self._waiting

    def _is_waited_for(self, me: Any) -> bool:
        """Whether the owner waits for autograd, and this is a thread of autograd's own.

        Python calls threads that it has not started by this name.
        """
        owner = self._owner
        return (
            owner is not None
            and me.name.startswith("Dummy-")
            and waits_for_backward(owner.ident)
        )

    def _is_forgotten(self) -> bool:
        if self._owner is None or self._sorting:
            return False
        return not self._owner.is_alive() or self._left()

    def sorted(self) -> None:
        """Say that all that the owner has entered is running."""
        self._sorting = False

    def release(self) -> None:
        """End what the latest `acquire` began."""
        self._sorting = False
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_LOOK_SECONDS = 0.05


class _Frame:
    """One entry through an edge, or autograd's, that has not been left."""

    __slots__ = ("context", "frame", "module")

    def __init__(self, module: nn.Module | None, frame: FrameType | None) -> None:
        self.module = module
        self.frame = frame
        self.context: AbstractContextManager[Any] | None = None


class _Backward:
    """One call of autograd that goes through the model, and those inside of it.

    Autograd calls it when it has succeeded, and drops it when it has failed.
    """

    __slots__ = ("__weakref__", "_edges", "over", "task")

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self.task = graph_task()
        self.over = False

    def __call__(self) -> None:
        self._edges.leave_backward(self, failed=False)

    def __del__(self) -> None:
        if not self.over:
            self._edges.leave_backward(self, failed=True)


class Edges:
    """The lock and the stack of entries of one model.

    Args:
        listener: Told of passes.
        device: Where inputs are moved.
    """

    def __init__(self, listener: PassListener, device: torch.device) -> None:
        self.lock = _Turn(self._is_left, self._bury)
        self._listener = listener
        self._device = device
        self._stack: list[_Frame] = []
        self._thread: Any = None
        self._unclosed: dict[Any, list[AbstractContextManager[Any]]] = {}  # by thread
        self._backward: Callable[[], _Backward | None] | None = None
        self.recomputing = 0
        """Edges that are recomputed now, one inside of the other."""
        self.risen: list[tuple[nn.Module | type, bool]] = []
        """Sites and edges that run with gradients, and whether they put hooks on top.

        Edges all by the same name: they end in turn."""

    def inside(self) -> bool:
        """Return whether this thread runs inside the model."""
        return self._thread is _HERE.thread

    @property
    def is_busy(self) -> bool:
        """Whether a pass is under way, in whichever thread."""
        return bool(self._stack)

    def try_lock(self) -> bool:
        """Take the lock if no other thread has it, and close what was left open."""
        if not self.lock.try_acquire():
            return False
        try:
            self._close_dead()
        except BaseException:
            self.lock.release()
            raise
        self.lock.sorted()
        return True

    def running(self) -> bool:
        """Like `inside`, but first close what an interrupt left open."""
        if self.inside():
            with self.lock:
                self._close_dead()
        return self.inside()

    def enter(
        self, module: nn.Module, args: Any, kwargs: Any, frame: FrameType
    ) -> tuple[Any, Any] | None:
        """Begin a pass, or nest in the present one; return the moved inputs if
        outermost.

        Args:
            module: The edge.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            frame: The caller's frame, which lives as long as the module runs.
        """
        if in_backward():
            self.enter_backward()
            return self.moved_again(args, kwargs)
        self.lock.acquire()
        try:
            self._close_dead()
            self.lock.sorted()
            entry = _Frame(module, frame)
            self._stack.append(entry)
            if len(self._stack) > 1:
                return None
            self._thread = _HERE.thread
            entry.context = _apart(self._listener.begin_pass, module)
            if entry.context is not None:
                entry.context.__enter__()
            moved: tuple[Any, Any] = move_inputs((args, kwargs), self._device)
            return moved
        except BaseException:
            self.leave(module)  # the module's own end hook finds nothing to end
            raise

    def moved_again(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the inputs of what is recomputed, moved as they were in forward."""
        if self.recomputing:
            return None
        moved: tuple[Any, Any] = move_inputs((args, kwargs), self._device)
        return moved

    def leave(self, module: nn.Module) -> None:
        """End the latest entry, if it is this module's."""
        if not self.inside() or self._stack[-1].module is not module or in_backward():
            return
        entry = self._stack.pop()
        try:
            if not self._stack:
                self._thread = None
                try:
                    if entry.context is not None:
                        entry.context.__exit__(None, None, None)
                finally:
                    _apart(self._listener.end_pass)
        finally:
            self.lock.release()

    def enter_backward(self) -> None:
        """Begin autograd's pass, unless it or another pass of this thread goes on."""
        if self._thread is _HERE.thread:
            return
        known = None if self._backward is None else self._backward()
        if known is not None and known.task == graph_task():
            return  # autograd uses a thread for each device
        if not self.lock.acquire(in_backward=True):
            return  # a forward waits for this: it is part of its pass
        try:
            self._close_dead()
        except BaseException:
            self.lock.release()
            raise
        self.lock.sorted()
        self._stack.append(_Frame(None, None))
        self._thread = _HERE.thread
        self._queue_end()
        _apart(self._listener.begin_backward)

    def _queue_end(self) -> None:
        # Only autograd may hold it, not even the frame of a failure's traceback.
        backward = _Backward(self)
        self._backward = weakref.ref(backward)
        at_end_of_backward(backward)

    def leave_backward(self, backward: _Backward, *, failed: bool) -> None:
        """End autograd's pass, in any thread."""
        backward.over = True
        self._forget_backward()
        try:
            self._listener.end_backward(failed=failed)
        finally:
            self.lock.release()

    def _forget_backward(self) -> None:
        self._stack.clear()
        self._thread = None
        self._backward = None
        self.recomputing = 0

    def _close_dead(self) -> None:
        """Close entries whose frame is gone: an interrupt skipped their hooks."""
        if self._unclosed:
            for context in self._unclosed.pop(_HERE.thread, ()):
                context.__exit__(None, None, None)
        if not self._stack or _is_running(self._stack[-1].frame):
            return
        self._sink()
        while self._stack and not _is_running(self._stack[-1].frame):
            entry = self._stack.pop()
            if entry.context is not None:
                entry.context.__exit__(None, None, None)
            self.lock.release()
        self._abort()

    def _sink(self) -> None:
        """Take off the hooks of sites that an interrupt left."""
        while self.risen:
            if self.risen.pop()[1]:
                pop_saved_hooks()

    def _is_left(self) -> bool:
        return bool(self._stack) and not _is_running(self._stack[0].frame)

    def _bury(self) -> None:
        """Close what another thread left open; its contexts are its own to leave."""
        contexts = [e.context for e in reversed(self._stack) if e.context is not None]
        if self._thread is not None and self._thread.is_alive():
            self._unclosed[self._thread] = contexts
        self._stack.clear()
        self._abort()

    def _abort(self) -> None:
        self._listener.abort_pass()
        if not self._stack:
            self._thread = None
            self._listener.end_pass()


def _is_running(frame: FrameType | None) -> bool:
    """Whether a frame has not returned, in whichever thread; else it is cleared.

    Without a frame, it is autograd that tells when it is over.
    """
    if frame is None:
        return True
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def move_inputs(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on the device.

    A container in which nothing has to move is returned itself: models pass lists and
    dicts that they change, such as caches.
    """
    if isinstance(tree, torch.Tensor):
        return tree if tree.device == device else tree.to(device)
    if type(tree) in (tuple, list) or hasattr(tree, "_fields"):
        items = [move_inputs(item, device) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        moved = {key: move_inputs(value, device) for key, value in tree.items()}
        if all(moved[key] is value for key, value in tree.items()):
            return tree
        return moved if type(tree) is dict else type(tree)(moved)
    return tree


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _put_back(model: nn.Module, known: Mapping[str, torch.Tensor]) -> None:
    """Let a model have the tensors it had, with the values of those put in their place.

    `load_state_dict(assign=True)` replaces the tensors themselves.
    """
    for name, tensor in known.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        for place in (module._parameters, module._buffers):
            given = place.get(leaf)
            if given is not None and given is not tensor:
                tensor.data = given.data
                place[leaf] = tensor  # type: ignore[assignment]


def _nothing(*_: Any) -> None:
    """Stand where a hook was in a copy of the model: the copy is a plain model."""


@untraced
def _call_untraced(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook of a compiled module: it belongs to no graph."""
    return hook(*args)


def _apart(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that no dispatch mode shall see.

    Selective checkpointing counts the operators that a region runs, and expects the
    recomputation to run the same.
    """
    with without_modes():
        return call(*args)


def _module_frame() -> FrameType:
    """The frame in which a module runs, together with the hooks that it calls."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:
        frame = frame.f_back
    return frame


_MODULE_FILE = nn.modules.module.__file__


class _Hook:
    """A hook that does not follow its module into copies and pickles."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


class _StateAsked(_Hook):
    """Brings everything home first: whoever saves wants one device, and whole storages.

    In the middle of a pass, a state dict is of tensors wherever they are. One of the
    parameters themselves leaves them where they were brought.
    """

    __slots__ = ("_edges", "_settle", "keeps")

    def __init__(self, edges: Edges, settle: Callable[[], None]) -> None:
        self._edges = edges
        self._settle = settle
        self.keeps = False

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.keeps = keep_vars
        if not self._edges.running():
            self._settle()


class _StateGiven(_Hook):
    __slots__ = ("_asked", "_from_public_api", "_resume")

    def __init__(self, asked: _StateAsked, resume: Callable[[], None]) -> None:
        self._asked = asked
        self._resume = resume

    def __call__(self, *_: Any) -> None:
        if not self._asked.keeps:
            self._resume()


class _StateLoaded(_Hook):
    __slots__ = ("_known",)

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        self._known = known

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        _put_back(module, self._known)


def _get_nothing() -> Callable[..., None]:
    return _nothing


class _EdgeBegin(_Hook):
    __slots__ = ("_edges", "_rise", "_settle")

    def __init__(
        self, edges: Edges, rise: Callable[[], bool], settle: Callable[[], None]
    ) -> None:
        self._edges = edges
        self._rise = rise
        self._settle = settle

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return _call_untraced(self, module, args, kwargs)
        moved = self._edges.enter(module, args, kwargs, _module_frame())
        if in_backward():
            self._edges.recomputing += 1
        if torch.is_grad_enabled():
            # What is no site has weights too, and a recompute must save the same.
            self._edges.risen.append((_EdgeEnd, self._rise()))
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self._settle()  # a module's hooks are copied before its children's parameters
        return _nothing

    def __reduce__(self) -> Any:
        self._settle()
        return _get_nothing, ()


class _EdgeEnd(_Hook):
    __slots__ = ("_edges",)

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling():
            _call_untraced(self, module, args, output)
            return
        risen = self._edges.risen
        if risen and risen[-1][0] is _EdgeEnd and risen.pop()[1]:
            pop_saved_hooks()
        if in_backward() and self._edges.recomputing:
            self._edges.recomputing -= 1
        self._edges.leave(module)


class _SiteBegin(_Hook):
    __slots__ = ("_before", "_block", "_edges", "_track")

    def __init__(
        self,
        block: Block,
        before: Callable[[Block], None],
        edges: Edges,
        track: Callable[[Block], bool],
    ) -> None:
        self._block = block
        self._before = before
        self._edges = edges
        self._track = track

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return _call_untraced(self, module, args, kwargs)
        moved = None
        if self._edges._thread is not _HERE.thread:
            moved = self._edges.enter(module, args, kwargs, _module_frame())
        elif self._edges._backward is not None:
            moved = self._edges.moved_again(args, kwargs)
        if dispatch_modes():
            _apart(self._before, self._block)
        else:
            self._before(self._block)
        if torch.is_grad_enabled():
            self._edges.risen.append((module, self._track(self._block)))
        return moved


class _SiteEnd(_Hook):
    __slots__ = ("_block", "_edges", "_untrack")

    def __init__(
        self, block: Block, edges: Edges, untrack: Callable[[Block], None]
    ) -> None:
        self._block = block
        self._edges = edges
        self._untrack = untrack

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling():
            _call_untraced(self, module, args, output)
            return
        block, risen = self._block, self._edges.risen
        if risen and risen[-1][0] is module:
            if risen.pop()[1]:
                pop_saved_hooks()
            self._untrack(block)
        if block.uses:
            block.uses -= 1  # as `Scheduler.after` does
        stack = self._edges._stack
        if len(stack) == 1 and stack[0].module is module:
            self._edges.leave(module)


class _Look(_Hook):
    __slots__ = ("_look",)

    def __init__(self, look: Callable[[Any, Any], None]) -> None:
        self._look = look

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_dynamo_compiling():
            _call_untraced(self, module, args, kwargs, output)
            return
        self._look((args, kwargs), output)


class _RowsBegin(_Hook):
    __slots__ = ("_mode",)

    def __init__(self, mode: RowGather) -> None:
        self._mode = mode

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]


class _RowsEnd(_Hook):
    __slots__ = ("_mode",)

    def __init__(self, mode: RowGather) -> None:
        self._mode = mode

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class RowGather(TorchFunctionMode):
    """Looks rows up on the host, so that they cross the link and not their table.

    Active inside the forward of embeddings whose table stays on the host. Waits for the
    indices: they decide which rows cross.

    Args:
        device: Where the rows go.
        counters: Where lookups are counted.
        tables: The block of each table, by the table's id.
        join: Called with the block before a lookup in a table that is on the device.
        bring: Called with the block before a lookup that needs the table there.
        leave: Called with the block after either.
    """

    def __init__(
        self,
        device: torch.device,
        counters: Counters,
        tables: Mapping[int, Block],
        *,
        join: Callable[[Block], None],
        bring: Callable[[Block], None],
        leave: Callable[[Block], None],
    ) -> None:
        super().__init__()
        self.busy = False
        """Whether rows are looked up at this moment."""
        self._device = device
        self._counters = counters
        self._tables = tables
        self._join = join
        self._bring = bring
        self._leave = leave

    @skipped
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace a lookup in a table on the host; pass everything else on."""
        kwargs = kwargs or {}
        if func is not nn.functional.embedding:
            return func(*args, **kwargs)
        self.busy = True
        try:
            return self._lookup(*args, **kwargs)
        finally:
            self.busy = False

    def _lookup(
        self,
        input: torch.Tensor,  # noqa: A002 - the name in torch's own signature
        weight: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        block = self._tables.get(id(weight))
        if block is not None and (block.bound or _is_tied_and_trains(block, weight)):
            (self._join if block.bound else self._bring)(block)
            try:
                return nn.functional.embedding(input, weight, *args, **kwargs)
            finally:
                self._leave(block)
        if weight.device == input.device == self._device:
            return nn.functional.embedding(input, weight, *args, **kwargs)
        self._counters.gathers += 1
        rows = nn.functional.embedding(input.to(weight.device), weight, *args, **kwargs)
        self._counters.h2d_bytes += rows.numel() * rows.element_size()
        return rows.to(self._device)


def _is_tied_and_trains(block: Block, table: torch.Tensor) -> bool:
    """Whether a table's gradient has parts that are made on the device.

    Then all are, so that they are added in the order in which autograd meets them.
    """
    return not block.hosted and table.requires_grad and torch.is_grad_enabled()


class StrayUses(TorchFunctionMode):
    """Finds weights that are read outside of their own module's forward.

    Active in first passes only, because it sees every call. Some modules read their
    children's parameters themselves; no hook of the child tells of that.

    Args:
        owners: The streamed block of each parameter, by the parameter's id.
        rows: Reads of tables where it looks rows up are no strays.
        bring: Called with a block that a call reads while it is not in use.
        let_go: Called with the block after that call.
    """

    def __init__(
        self,
        owners: Mapping[int, Block],
        rows: RowGather,
        *,
        bring: Callable[[Block], None],
        let_go: Callable[[Block], None],
    ) -> None:
        super().__init__()
        self._owners = owners
        self._rows = rows
        self._bring = bring
        self._let_go = let_go

    @skipped
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring what the call reads, pass it on, and let go of what was brought."""
        kwargs = kwargs or {}
        if self._rows.busy or _is_harmless(func):
            return func(*args, **kwargs)
        brought: list[Block] = []
        try:
            for value in (*args, *kwargs.values()):
                self._look_at(value, brought)
            return func(*args, **kwargs)
        finally:
            for block in brought:
                self._let_go(block)

    def _look_at(self, value: Any, brought: list[Block]) -> None:
        if isinstance(value, torch.Tensor):
            block = self._owners.get(id(value))
            if block is not None and not block.uses:
                self._bring(block)
                brought.append(block)
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    self._look_at(item, brought)


def _is_harmless(func: Callable[..., Any]) -> bool:
    """Whether a call only asks what a tensor is like.

    `weight.T` reads the tensor, and `weight.device` is asked where to put what shall
    meet it.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__  # type: ignore[attr-defined]
        return getattr(attribute, "__name__", "") not in _READING
    return name in _HARMLESS


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


def is_hooked(module: nn.Module) -> bool:
    """Whether some runtime has hooks on a module."""
    return any(isinstance(hook, _Hook) for hook in module._forward_pre_hooks.values())


class SiteHooks:
    """All hooks of one runtime on its model, installed and removed together.

    Args:
        model: The module that users call.
        edges: Its edge.
        before: Called with a block when a site begins.
        rise: Called when an edge begins with gradients; returns whether it put hooks
            on top of those through which this thread saves tensors.
        track: Called with a block when a site begins with gradients; returns the same.
        untrack: Called with it when the site ends.
        settle: Brings every tensor home before the model is copied.
        resume: Called when it was.
    """

    def __init__(
        self,
        model: nn.Module,
        edges: Edges,
        *,
        before: Callable[[Block], None],
        rise: Callable[[], bool],
        track: Callable[[Block], bool],
        untrack: Callable[[Block], None],
        settle: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._edges = edges
        self._before = before
        self._rise = rise
        self._track = track
        self._untrack = untrack
        self._handles: list[RemovableHandle] = []
        for edge in (model, *model.children()):
            if type(edge).forward is not nn.ModuleList.forward:
                self._hook_edge(edge, settle)
        loaded: RemovableHandle = model.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _StateLoaded(_own_tensors(model))
        )
        asking = _StateAsked(edges, settle)
        asked: RemovableHandle = model.register_state_dict_pre_hook(asking)  # type: ignore[no-untyped-call]
        given: RemovableHandle = model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _StateGiven(asking, resume)
        )
        self._handles += (loaded, asked, given)

    def _hook_edge(self, module: nn.Module, settle: Callable[[], None]) -> None:
        begin = module.register_forward_pre_hook(
            _EdgeBegin(self._edges, self._rise, settle), prepend=True, with_kwargs=True
        )
        end = module.register_forward_hook(_EdgeEnd(self._edges), always_call=True)
        self._handles += (begin, end)

    def add_site(self, module: nn.Module, block: Block) -> None:
        """Tell the scheduler when a module uses a block."""
        begin = module.register_forward_pre_hook(
            _SiteBegin(block, self._before, self._edges, self._track),
            prepend=True,
            with_kwargs=True,
        )
        end = module.register_forward_hook(
            _SiteEnd(block, self._edges, self._untrack), always_call=True
        )
        self._handles += (begin, end)

    def add_look(self, module: nn.Module, look: Callable[[Any, Any], None]) -> None:
        """Show a module's inputs and every output to `look`."""
        self._handles.append(
            module.register_forward_hook(_Look(look), with_kwargs=True)
        )

    def add_gather(self, module: nn.Module, mode: RowGather) -> None:
        """Let a module look its rows up on the host."""
        begin = module.register_forward_pre_hook(_RowsBegin(mode))
        end = module.register_forward_hook(_RowsEnd(mode), always_call=True)
        self._handles += (begin, end)

    def remove(self) -> None:
        """Take all hooks off. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
