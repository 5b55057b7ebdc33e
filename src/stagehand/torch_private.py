"""Every private PyTorch name that the library uses, and what happens without it.

Without one of these, importing the library is refused:

- `torch._C._storage_Use_Count`: does anyone else hold a slot's memory?
- `torch.Tensor._use_count`: how many nodes of graphs wait for a weight's gradient?
- `torch.UntypedStorage._{weak_ref,new_with_weak_ptr,free_weak_ref}`: use memory that
  others keep, as long as they do.
- `torch._C._current_graph_task_id`: is this thread inside a backward pass?
- `torch._C._current_autograd_node`: which node of a graph does autograd run here?
- `torch._C._will_engine_execute_node`: does this call of autograd come to a node, too?
- `torch._C._autograd._get_current_graph_task_keep_graph`: may the graph that goes back
  do so again?
- `torch._C._autograd._get_sequence_nr`: in which order backward will need what a
  forward saves.
- `torch._C._autograd._{push,pop,top}_saved_tensors_default_hooks`: save weights as
  handles inside of regions whose own hooks save all else, as checkpointing does.
- `torch._neg_view`: bring back what is saved as the negative of its memory, as the
  imaginary part of a conjugate is.
- `torch._C._swap_tensor_impl`: give a tensor another value, type and device in place.
  `torch.utils.swap_tensors` refuses tensors with weak references, as recurrent layers
  have to theirs.
- `torch._C.DisableTorchFunctionSubclass`: what a tensor is whose class makes all that
  comes of it one of its own.

These are as old as all versions that are supported:

- `torch.autograd.Variable._execution_engine.queue_callback`: learn that a backward pass
  is over.
- `torch.ops.aten._to_copy`: the operator of all casts, autocast's included.
- `torch._ops.{OpOverload,OpOverloadPacket}`, and the `_schema` of the former: which
  arguments does an operator write to?
- `torch.utils._python_dispatch.TorchDispatchMode`: see every operator of a thread. It
  is put on this thread's stack directly: entering it also sets flags that are seen by
  all threads.
- `torch._C._SetExcludeDispatchKeyGuard`: what a dispatch mode keeps of a tensor tells
  whether the tensor was changed since.
- `torch._C._{len,pop,push_on}_torch_function_stack`, `_get_function_stack_at`: is the
  mode that finds weights on top of others? And take those off that an interrupt has
  left.
- `Tensor._cdata`, and the setters of `_backward_hooks` and of its post-accumulate ones:
  was a weight swapped for another one? Its hooks went with that, and are put back.
- `torch._dynamo.callback_handler`: learn when the compiler looks at a frame.
- `torch._guards.CompileContext`: is the compiler at work in this thread? Before 2.13
  modes saw how it looks at the weights that its code will read.
- `torch.cuda._sanitizer`: its dispatch mode sees the library's copies, others do not.
  It is known by this name alone.

Without one of these, something is missing:

- `torch.autograd.graph._engine_run_backward`: the function in which a thread waits for
  a backward pass. Without it, a forward that itself runs a backward pass may hang.
- `Tensor._post_accumulate_grad_hooks`: gradients are taken home after the user's hooks
  have seen them. Without it, before those that were registered later.
- `torch._C._{len,pop,push_on}_torch_dispatch_stack`: copies of weights are no part of
  what a dispatch mode watches. Without them, selective checkpointing may refuse.
- `_checkpoint_internal` and `_user_hooks` of a pack hook: selective checkpointing looks
  for the user's hooks below the library's. Versions before 2.15 look for none.
- `torch._C._get_dispatch_stack_at` and the `policy_fn` of the modes of selective
  checkpointing: a view of a weight that it keeps would keep the weight's slot, and not
  be known as a weight. Without them, policies that keep such views are refused by it.
- `DistributedDataParallel._get_active_ddp_module`: does it average gradients of this
  forward? Without it, nobody is told of those that it misses.
- `torch._C._InferenceMode`: switch inference mode, and gradients, without a moment at
  which an interrupt would leave them so. Without it, one may.
- `torch._C._dynamo.eval_frame.set_code_exec_strategy`, and what it takes: let the
  compiler skip functions that autograd and modules call. Without it, they and compiled
  blocks are compiled, and more often.
- `torch._disable_dynamo`: leave a function out of compiled graphs without importing the
  compiler. Without it, compiled blocks warn of what they cannot trace. Two attributes
  of what it returns, `_torchdynamo_disable` and `..._msg`, say why; where the compiler
  does not read them, it says so in its own words.
- `Module._compiled_call_impl`, `_orig_mod` and `_torchdynamo_orig_callable`: is a
  module compiled by itself? Without them, its first passes are compiled together with
  the mode that watches them, and again without it.
- `torch._C._accelerator_{getDeviceStats,isAllocatorInitialized,getStream}`: how many
  bytes are allocated, without turning all statistics into a flat table, and the current
  stream. Without them, asking takes several times as long.
- `torch._subclasses.fake_tensor.FakeTensorMode` and a storage's `_checkpoint_offset`:
  where in a file of `torch.save` a tensor lies, as torch's documentation says. Without
  them, such files are refused.
- `torch._C._functorch.get_interpreter_stack`: which transforms of `torch.func` are
  active? Without it, those that cannot go through a streamed model are not refused, and
  others fail where the numbers of experts are read.
- `torch._C._functorch.is_batchedtensor` and `torch._C._get_dispatch_mode`: is a weight
  one of a batch, and does `make_fx` record? Without them, neither is refused with a
  reason.
- `Module._forward_hooks` and the like: take a hook off whose registration was
  interrupted before its handle was there. Of those that are missing nothing is taken.
- `torch.nn.modules.module._global_forward_hooks`: does somebody see what every module
  has computed, and its weights with that? Without it, rows of experts that a call does
  not read are not there for such hooks.

Tried with torch 2.10 (on Python 3.10), 2.11 (3.12), 2.13 (3.11), 2.14 (3.12) and 2.15
(3.13).
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.hooks import RemovableHandle

from stagehand.errors import ConfigError, StagehandError
from stagehand.frames import frames_of

__all__ = [
    "CAST",
    "WRAPPERS",
    "DispatchMode",
    "WeakMode",
    "WeakStorage",
    "add_hook",
    "allocated_on",
    "around_compiling",
    "as_it_is",
    "at_end_of_backward",
    "backward_call",
    "call_unseen",
    "dispatch_modes",
    "dispatching",
    "func_transform",
    "func_transforms",
    "function_modes",
    "give_value",
    "global_forward_hooks",
    "graph_task",
    "has_more_hooks",
    "hide_hooks",
    "in_backward",
    "in_function",
    "inference_mode",
    "is_autograds",
    "is_batched",
    "is_checkpoints",
    "is_compiled",
    "is_compiled_for",
    "is_fx_tracing",
    "is_on_top",
    "keeps_graph",
    "load_places",
    "looked_through",
    "mode_below",
    "more_hooks",
    "negated",
    "node_that_runs",
    "place_of",
    "pop_saved_hooks",
    "push_saved_hooks",
    "remove_hooks",
    "renew_hooks",
    "replace_saved_hooks",
    "reserved_on",
    "running_data_parallel",
    "schemas_of",
    "sequence_number",
    "sharing_versions",
    "show_hooks",
    "skipped",
    "sparing",
    "storage_key",
    "storage_use_count",
    "stream_on",
    "take_off",
    "take_off_dead",
    "take_off_hooks",
    "tensor_key",
    "tensor_use_count",
    "top_saved_hooks",
    "untraced",
    "unwatched",
    "use_count_of",
    "waits_for_backward",
    "will_run",
    "without_modes",
]

_CHECKPOINTS = "torch.utils.checkpoint"
_SANITIZER = "torch.cuda._sanitizer"

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
SavedHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def _required(name: str, owner: Any = torch._C) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(owner, name, None)
    if found is None:
        raise StagehandError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which weight"
            " streaming needs to keep memory safe; use torch 2.10 to 2.15"
        )
    return found


inference_mode: Callable[[bool], AbstractContextManager[Any]] = getattr(
    torch._C, "_InferenceMode", torch.inference_mode
)
"""Does what `torch.inference_mode` does, and entering and leaving it is no Python code.

It brings back how gradients were, too, whoever has switched them inside of it."""

_device_stats: Callable[[int], dict[str, Any]] | None = getattr(
    torch._C, "_accelerator_getDeviceStats", None
)


def allocated_on(index: int) -> int:
    """Return the bytes that this process's tensors hold on an accelerator."""
    return _counted("allocated_bytes", index, torch.accelerator.memory_allocated)


def reserved_on(index: int) -> int:
    """Return the bytes that PyTorch's allocator took from an accelerator."""
    return _counted("reserved_bytes", index, torch.accelerator.memory_reserved)


def _counted(name: str, index: int, otherwise: Callable[[int], int]) -> int:
    """Return one of the allocator's counts; `otherwise` walks through all of them."""
    if _device_stats is None or not torch._C._accelerator_isAllocatorInitialized():
        return otherwise(index)
    found: int = _device_stats(index)[name]["all"]["current"]
    return found


stream_on: Callable[[int], Any] = getattr(
    torch._C, "_accelerator_getStream", torch.accelerator.current_stream
)
"""Return the stream on which this thread's operators run on an accelerator."""


use_count_of: Callable[[int], int] = _required("_storage_Use_Count")
"""`storage_use_count` of a storage's `_cdata`, where a call more is too slow."""
graph_task: Callable[[], int] = _required("_current_graph_task_id")
"""The number of the backward pass in which this thread runs, or -1."""
node_that_runs: Callable[[], Any] = _required("_current_autograd_node")
"""The node of a graph that autograd runs in this thread, or None."""
_will_run: Callable[[Any], bool] = _required("_will_engine_execute_node")
negated: Callable[[torch.Tensor], torch.Tensor] = _required("_neg_view", torch)
"""Return the negative of a tensor, over the same memory."""
as_it_is: Callable[[], AbstractContextManager[None]] = _required(
    "DisableTorchFunctionSubclass"
)
"""Makes a context in which classes of tensors do not see what is done with them."""

_swap_values: Callable[..., None] = _required("_swap_tensor_impl")
"""Exchange what two tensors are; whoever has one has the same object as before."""
sequence_number: Callable[[], int] = _required("_get_sequence_nr", torch._C._autograd)
"""The number that this thread's next operator will have in the graph. Backward goes
through the graph from the highest number down."""
keeps_graph: Callable[[], bool] = _required(
    "_get_current_graph_task_keep_graph", torch._C._autograd
)
"""Whether the graph through which this thread goes back can be gone through again."""
tensor_use_count: Callable[[torch.Tensor], int] = _required("_use_count", torch.Tensor)
"""Return how often a tensor is held: once by Python, and by nodes of graphs."""
push_saved_hooks: Callable[[Any, Any], None] = _required(
    "_push_saved_tensors_default_hooks", torch._C._autograd
)
"""Let this thread's operators save tensors through a pair of hooks from now on."""
pop_saved_hooks: Callable[[], None] = _required(
    "_pop_saved_tensors_default_hooks", torch._C._autograd
)
"""End what the latest push began."""
top_saved_hooks: Callable[[], SavedHooks | None] = partial(
    _required("_top_saved_tensors_default_hooks", torch._C._autograd), False
)
"""Return the pair of hooks through which this thread saves tensors now."""
dispatch_modes: Callable[[], int] = getattr(
    torch._C, "_len_torch_dispatch_stack", lambda: 0
)
"""Return how many dispatch modes are active in this thread."""
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Return how many function modes are active in this thread."""
_func_levels: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "get_interpreter_stack", lambda: None
)
is_batched: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_batchedtensor", lambda _: False
)
"""Return whether a tensor is one of a batch that `vmap` computes with."""
_fx_key = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "PROXY", None)
_dispatch_mode = getattr(torch._C, "_get_dispatch_mode", None)
global_forward_hooks: Mapping[int, Callable[..., Any]] = getattr(
    torch.nn.modules.module, "_global_forward_hooks", {}
)
"""What is called with the outputs of every module, before the module's own hooks."""
_run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)


def _wrapper_count() -> int:
    tensor = torch.empty(1, device="cpu")
    return use_count_of(tensor.untyped_storage()._cdata) - 1


CAST = torch.ops.aten._to_copy.default
"""What a dispatch mode sees of a cast."""
WRAPPERS = _wrapper_count()
"""How often Python's own object for a storage counts, once it was asked for."""


def give_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another value, type and device.

    It stays the same object, with its attributes, and requires a gradient as before.

    Raises:
        ConfigError: If others hold what it is, beside what takes its gradient.
    """
    if tensor_use_count(tensor) > 1 + tensor.requires_grad:
        raise ConfigError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} has views, or is in"
            " a graph, which would not see the value that it is given: drop these first"
        )
    _swap_values(tensor, value.data.requires_grad_(tensor.requires_grad))


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and handles hold a storage, the argument included."""
    return use_count_of(storage._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others, for `use_count_of`."""
    key: int = tensor.untyped_storage()._cdata
    return key


_storage_at = _required("_new_with_weak_ptr", torch.UntypedStorage)
_forget_storage = _required("_free_weak_ref", torch.UntypedStorage)


class WeakStorage:
    """A weak reference to a storage. Nothing else can be at its address meanwhile.

    As torch's `StorageWeakRef`, which takes twice as long to make.
    """

    __slots__ = ("_address",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address: int = storage._weak_ref()  # type: ignore[assignment]

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage if somebody still holds it."""
        found: torch.UntypedStorage | None = _storage_at(self._address)
        return found

    # A default: a module's names may be gone when the interpreter ends.
    def __del__(self, forget: Callable[[int], None] = _forget_storage) -> None:
        forget(self._address)


def in_backward() -> bool:
    """Return whether this thread runs inside autograd's backward pass."""
    return graph_task() != -1


def in_function() -> bool:
    """Return whether this thread runs a `torch.autograd.Function`'s backward.

    That is code in Python, which may run a part of a model again.
    """
    return isinstance(node_that_runs(), BackwardCFunction)


def will_run(node: Any) -> bool:
    """Return whether the call of autograd that runs here runs a node, or has run it.

    No node is said to run of which `torch.autograd.grad` takes the gradient away.
    """
    try:
        return _will_run(node)
    except RuntimeError:
        return False


def is_checkpoints(hook: Callable[..., Any]) -> bool:
    """Return whether a hook for saved tensors is that of a checkpointed region."""
    return getattr(hook, "__module__", None) == _CHECKPOINTS


def looked_through(pack: _Function, below: SavedHooks | None = None) -> _Function:
    """Mark a pack hook as the library's, not the user's.

    Selective checkpointing may let a user's hooks save what it keeps. It looks for them
    below ours, as it does below a checkpoint's own.

    Args:
        pack: The hook.
        below: The pair on top of which it will be.
    """
    marked: Any = pack
    marked._checkpoint_internal = True
    # Those of a checkpoint know theirs only while it is entered.
    while below is not None and getattr(below[0], "_checkpoint_internal", False):
        below = getattr(below[0], "_user_hooks", None)
    marked._user_hooks = below
    return pack


_HOOK_TABLES = tuple(name for name in vars(torch.nn.Module()) if "hooks" in name)


def add_hook(
    handles: list[RemovableHandle],
    register: Callable[..., RemovableHandle],
    hook: Callable[..., Any],
    **how: Any,
) -> None:
    """Register a hook of a module and note its handle: both, or neither.

    Args:
        handles: Where to note it.
        register: One of the module's methods for that.
        hook: The hook.
        **how: For the method.
    """
    first = RemovableHandle.next_id
    try:
        handles.append(register(hook, **how))
    except BaseException:  # also an interrupt, which may come in the middle
        module: Any = register.__self__  # type: ignore[attr-defined]
        for name in _HOOK_TABLES:
            table = getattr(module, name, None) or {}
            for number in [number for number in table if number >= first]:
                del table[number]
        raise


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Take hooks off, all of them: what an interrupt leaves is done after it."""
    try:
        _remove_hooks(handles)
    finally:
        _remove_hooks(handles)


def _remove_hooks(handles: list[RemovableHandle]) -> None:
    while handles:
        handles[-1].remove()  # which may be done twice
        handles.pop()


def func_transforms() -> list[str]:
    """Return what `torch.func` does in this thread, from the outside in."""
    return [level.key().name for level in _func_levels() or ()]


def func_transform() -> str | None:
    """Return the outermost transform of `torch.func` here that wraps every tensor.

    `vmap` does not: a tensor that is made in it and has no batch is an ordinary one.
    """
    return next((name for name in func_transforms() if name != "Vmap"), None)


def is_fx_tracing() -> bool:
    """Return whether `make_fx` records what is computed in this thread."""
    if _fx_key is None or _dispatch_mode is None:
        return False
    return _dispatch_mode(_fx_key) is not None


class _Sparing:
    """A policy of selective checkpointing that never keeps certain views."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self.spared: set[Callable[[Any], bool]] = set()
        self._policy = policy

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        is_view = getattr(operator, "is_view", False)
        if is_view and any(is_spared(args[0]) for is_spared in self.spared):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return self._policy(context, operator, *args, **kwargs)


def sparing(is_spared: Callable[[Any], bool]) -> None:
    """Let selective checkpoints that this thread is in recompute some views.

    Args:
        is_spared: Whether a tensor's views are not to be kept, whatever their policy.
    """
    for mode in _dispatch_stack():
        policy = getattr(mode, "policy_fn", None)
        if policy is None:
            continue
        if type(policy) is not _Sparing:
            policy = mode.policy_fn = _Sparing(policy)
        policy.spared.add(is_spared)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something when the backward pass in which this thread runs has succeeded.

    If it fails, the reference to `call` is dropped.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def waits_for_backward(thread: int) -> bool:
    """Return whether a thread, by its number, is inside a call of autograd.

    Not where that runs a function of Python in this thread: it waits for no other then.
    """
    return _backward_among(frames_of(thread)[:1]) is not None


def backward_call() -> FrameType | None:
    """Return the frame of the latest call of autograd that this thread is in, if any.

    A thread of autograd's own is in none, but for one within another.
    """
    return _backward_among(frames_of(threading.get_ident()))


def _backward_among(frames: list[FrameType]) -> FrameType | None:
    if _run_backward is None:
        return None
    code = _run_backward.__code__
    return next((frame for frame in frames if frame.f_code is code), None)


def is_autograds(thread: Any) -> bool:
    """Return whether it is a thread of autograd's own.

    Python calls threads that it has not started by this name.
    """
    name: str = thread.name
    return name.startswith("Dummy-")


def has_more_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has several post-accumulate hooks."""
    hooks: Any = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return hooks is not None and len(hooks) > 1


def more_hooks(tensor: torch.Tensor, *, but: RemovableHandle) -> dict[int, Any]:
    """Return all post-accumulate hooks of a tensor but one."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return {key: hook for key, hook in hooks.items() if key != but.id}


def hide_hooks(tensor: torch.Tensor, some: dict[int, Any]) -> None:
    """Let post-accumulate hooks of a tensor do nothing until `show_hooks`."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    hooks.update(dict.fromkeys(some, _do_nothing))


def _do_nothing(_: torch.Tensor) -> None:
    """Stand where a hook was, so that its handle can remove it."""


def show_hooks(tensor: torch.Tensor, hidden: dict[int, Any]) -> None:
    """Put hooks back that `hide_hooks` has hidden and nobody has removed."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    hooks.update((key, hook) for key, hook in hidden.items() if key in hooks)


def running_data_parallel() -> DistributedDataParallel | None:
    """Return the wrapper whose forward runs, if one's does."""
    running: DistributedDataParallel | None = _running_data_parallel()
    return running


_running_data_parallel: Callable[[], Any] = getattr(
    DistributedDataParallel, "_get_active_ddp_module", lambda: None
)


def tensor_key(tensor: torch.Tensor) -> int:
    """Return what `torch.utils.swap_tensors` swaps, as a number, hooks included."""
    return tensor._cdata


def renew_hooks(tensor: torch.Tensor, *, swapped: bool) -> None:
    """Let hooks be registered that are called for a tensor: a swap leaves the tables,
    in which Python keeps them, with the other one.

    Args:
        tensor: Which may have been swapped for another one.
        swapped: Whether it was. Else only tables with nothing in them are given up.
    """
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if swapped or not getattr(tensor, name):
            setattr(tensor, name, None)


@contextmanager
def dispatching(mode: DispatchMode) -> Iterator[None]:
    """Let a mode see the operators that this thread calls."""
    below = dispatch_modes()
    with ExitStack() as rest:
        for _ in range(2):  # again what an interrupt has left of it
            rest.callback(_drop_modes, below)
        torch._C._push_on_torch_dispatch_stack(mode)
        yield


def _drop_modes(below: int) -> None:
    while dispatch_modes() > below:
        torch._C._pop_torch_dispatch_stack(None)


def sharing_versions() -> AbstractContextManager[Any]:
    """Return a context in which what a mode detaches has its tensor's version."""
    key = torch._C.DispatchKey.ADInplaceOrView
    guard: AbstractContextManager[Any] = torch._C._SetExcludeDispatchKeyGuard(
        key, False
    )
    return guard


@contextmanager
def without_modes(*, but_sanitizer: bool = False) -> Iterator[None]:
    """Keep what happens inside from the dispatch modes that are active.

    Args:
        but_sanitizer: Let it look for races with the library's copies.
    """
    modes = _dispatch_stack()
    looking: list[Any] = []
    if but_sanitizer:
        looking = [mode for mode in modes if type(mode).__module__ == _SANITIZER]
    with ExitStack() as rest:
        for _ in range(2):  # again what an interrupt has left out
            rest.callback(_put_modes, modes)
        _put_modes(looking)
        yield


def _put_modes(modes: list[Any]) -> None:
    """Let these be the dispatch modes of this thread, the first one lowest."""
    if _dispatch_stack() == modes:
        return
    _drop_modes(below=0)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _dispatch_stack() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(n) for n in range(dispatch_modes())]


def call_unseen(call: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function without the dispatch modes of this thread.

    Selective checkpointing is one: it counts the operators that a region runs, and
    expects the same ones when the region is recomputed. The library's copies are not
    part of that. Only the sanitizer's mode, which looks for races, stays.
    """
    if not dispatch_modes():
        return call(*args)
    with without_modes(but_sanitizer=True):
        return call(*args)


def schemas_of(function: Callable[..., Any]) -> list[Any]:
    """Return what an operator of `torch.ops` says of its arguments, or, for each of
    several of one name, what these say; a function of `torch` says nothing."""
    overloads = [function]
    if isinstance(function, OpOverloadPacket):
        names = function.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(function, name) for name in names]
    return [each._schema for each in overloads if isinstance(each, OpOverload)]


def is_on_top(mode: TorchFunctionMode) -> bool:
    """Return whether a mode is the first in this thread to see a call."""
    return _modes()[-1:] == [mode]


def mode_below(mode: TorchFunctionMode) -> TorchFunctionMode | None:
    """Return what mode of this thread sees calls next to one that sees them first."""
    below = _modes()[-2:]
    return below[0] if below[1:] == [mode] else None


def take_off(mode: TorchFunctionMode) -> bool:
    """Take a mode off this thread's stack, if it is there; return whether it was.

    Modes of the user's may lie above one that an interrupt has left: they stay.
    """
    modes = _modes()
    if mode not in modes:
        return False
    above = [*takewhile(lambda other: other is not mode, reversed(modes))]
    pops = [torch._C._pop_torch_function_stack] * (len(above) + 1)
    push = torch._C._push_on_torch_function_stack
    _at_once(*pops, *(partial(push, other) for other in reversed(above)))
    return True


def replace_saved_hooks(*instead: SavedHooks) -> None:
    """Let other pairs, or none, be where the latest pair of hooks for saved tensors is.

    Whoever pushed that one pops what is in its place, at an interrupt, too.
    """
    if not instead:
        pop_saved_hooks()
        return
    _at_once(pop_saved_hooks, *(partial(push_saved_hooks, *pair) for pair in instead))


def take_off_hooks(
    before: Callable[[SavedHooks], Sequence[SavedHooks] | None],
) -> bool:
    """Take off this thread the latest pair of hooks for saved tensors of some kind.

    Pairs of the user's may lie above it: they stay, at an interrupt, too.

    Args:
        before: Returns of a pair what was in its place before: another one, or nothing.
            None if it is of another kind.

    Returns:
        Whether there was one.
    """
    above: list[SavedHooks] = []
    try:
        while (top := top_saved_hooks()) is not None:
            instead = before(top)
            if instead is not None:
                replace_saved_hooks(*instead)
                break
            _at_once(pop_saved_hooks, partial(above.append, top))
        if above:
            _put_on(above)
    finally:
        if above:
            _put_on(above)  # what an interrupt has left of it
    return top is not None


def _put_on(above: list[SavedHooks]) -> None:
    """Push pairs of hooks that lay on each other, the last one lowest; forget them."""
    pushes = (partial(push_saved_hooks, *pair) for pair in reversed(above))
    _at_once(*pushes, above.clear)


def _at_once(*calls: Callable[[], Any]) -> None:
    """Call functions that are not Python's own, with no interrupt between them.

    Python looks for signals between its instructions; here there is only one.
    """
    deque(map(methodcaller("__call__"), calls), maxlen=0)


def take_off_dead() -> None:
    """Take off this thread's stack what an interrupt has left of models that are gone.

    Nobody enters these again, and attention is not fused under a mode.
    """
    for mode in _modes():
        if isinstance(mode, WeakMode) and mode.model() is None:
            take_off(mode)


@contextmanager
def unwatched() -> Iterator[None]:
    """Let no weak mode see what is called inside, unless other modes are active, too.

    After an interrupt only those come back that somebody still has a use for.
    """
    modes = [mode for mode in _modes() if isinstance(mode, WeakMode)]
    if len(modes) < function_modes():
        modes = []
    for mode in modes:
        take_off(mode)
    try:
        yield
    finally:
        for mode in modes:
            if mode.is_seen():
                torch._C._push_on_torch_function_stack(mode)


def _modes() -> list[TorchFunctionMode]:
    return [torch._C._get_function_stack_at(n) for n in range(function_modes())]


def load_places(path: Path) -> Any:
    """Return what a file of `torch.save` holds: plain values, and tensors without any.

    Raises:
        OSError: If it cannot be read.
        RuntimeError: If it is none, or damaged.
        pickle.UnpicklingError: If there are other objects in it.
    """
    # Not at import: it takes a second.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.load(path, weights_only=True)


def place_of(tensor: torch.Tensor) -> int | None:
    """Return the byte of its file where the storage of such a tensor begins."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def around_compiling(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call `begin` before the compiler looks at a frame, and `end` after it has.

    If it is loaded, and until `torch.compiler.reset()`: so this is to be asked for
    again and again. What is compiled meanwhile, in whichever thread, has no calls of
    its own.
    """
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    if handler is not None and begin not in handler.start_callbacks:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is compiled by itself: its call, or its forward."""
    own = vars(module)
    return (
        own.get("_compiled_call_impl") is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def is_compiled_for() -> bool:
    """Return whether this thread waits for the compiler: it only looks at tensors."""
    return torch._guards.CompileContext.try_get() is not None


def skipped(function: _Function) -> _Function:
    """Mark a function that autograd, a mode or a module calls while compiled code runs.

    The compiler looks at every Python frame then, but not at this one and those that it
    calls. Unlike `untraced` this adds nothing to the cost of a call.
    """
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def untraced(
    why: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let compiled code call a function as it is.

    Args:
        why: For who wants one graph, with `fullgraph=True` or an export: it is refused.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        disable = getattr(torch, "_disable_dynamo", None)
        if disable is None:
            return function
        wrapped: Callable[..., Any] = disable(function)
        wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]
        wrapped._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return wrapped

    return mark


class Seer(Protocol):
    """Sees the calls of torch functions, and makes them."""

    def see(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make a call and return its result."""


class WeakMode(TorchFunctionMode):
    """Lets an object see the calls of a thread for as long as others keep the object.

    An interrupt may leave the mode on the thread's stack, which keeps no model alive.

    Args:
        seer: Sees the calls.
        model: Whose pass that is for.
    """

    def __init__(self, seer: Seer, model: weakref.ref[torch.nn.Module]) -> None:
        super().__init__()
        self._seer = weakref.ref(seer)
        self.model = model

    def is_seen(self) -> bool:
        """Whether the object is still there."""
        return self._seer() is not None

    @skipped
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pass a call on."""
        kwargs = kwargs or {}
        seer = self._seer()
        return func(*args, **kwargs) if seer is None else seer.see(func, args, kwargs)
