"""The edge of a model: where passes begin and end, forward and backward.

Edges are the places where a model is entered from outside: the model itself, its parts,
inner parts with sites, tables on the host, and any site that is called while none of
these runs. Where a model only wraps another one, that one and its parts are edges, too.
The outermost edge holds the runtime's lock, moves inputs to the device and begins and
ends the pass.

Autograd's way back is a pass too. No hook tells where it begins: the first weight that
is unpacked, the first gradient that arrives or the first module that is recomputed does
(`Edges.enter_backward`), in whichever thread autograd runs. It ends with the outermost
call of autograd, whether that succeeds or raises.

An exception inside a forward runs the hooks (`always_call`); an interrupt does not. So
each edge notes its frame, and what a dead frame left open is closed at the next entry.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from stagehand.core.trees import moved_to
from stagehand.core.turn import HERE, Turn, host_while, runs_library
from stagehand.core.workers import raise_kept
from stagehand.errors import DeadlockError, StagehandError, StagehandOOMError
from stagehand.frames import Call
from stagehand.torch_private import (
    at_end_of_backward,
    backward_call,
    call_unseen,
    graph_task,
    in_backward,
    is_autograds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import FrameType

    from torch import nn

__all__ = ["Edges", "PassListener"]


class PassListener:
    """What happens at the edge of a pass; `Passing` fills it in."""

    def check(self) -> None:
        """The model is about to be entered; refuse what cannot work."""

    def check_hooks(self) -> None:
        """Refuse to begin if hooks are gone, where the latest pass hints at that."""

    def begin_pass(
        self, module: nn.Module, kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """The model is entered; return a context for the whole pass, or None."""

    def end_pass(self) -> None:
        """The model is left, normally or by an exception."""

    def abort_pass(self) -> None:
        """A pass was left without a word; close what it left open."""

    def put_back(self, pushed: object) -> None:
        """Take off this thread hooks for saved tensors that it has left open.

        Args:
            pushed: What was given where they were pushed.
        """

    def in_use(self) -> bool:
        """Whether blocks are in use, in a pass or by hand."""
        raise NotImplementedError

    def uses_by_hand(self) -> int:
        """How many uses by hand go on, which hold the lock."""
        raise NotImplementedError

    def end_by_hand(self) -> None:
        """End these with the pass that is aborted next: their thread is gone."""

    def begin_backward(self, *, by_module: bool) -> None:
        """Autograd begins to go back through the model.

        Args:
            by_module: Whether a module was entered: it is recomputed, or a hook of what
                another model has computed runs this one.
        """

    def go_on_here(self, move: Callable[[], bool]) -> None:
        """What ends now began in another thread, which may run other models meanwhile.

        Args:
            move: Moves the turn here, and returns whether it could. That thread must
                not find one moved and not the other.
        """
        move()

    def end_backward(self, *, failed: bool) -> None:
        """It is over."""

    def end_inner_backward(self, *, failed: bool, last: bool) -> None:
        """A backward is over that is part of a forward pass.

        Args:
            failed: Whether it has failed; not told where others go on.
            last: Whether no other one goes on.
        """


class _Frame:
    """One entry through an edge, or autograd's, that has not been left."""

    __slots__ = ("context", "frame", "module")

    def __init__(self, module: nn.Module | None, frame: FrameType | None) -> None:
        self.module = module
        self.frame = frame
        self.context: AbstractContextManager[Any] | None = None


class _Told:
    """What has told that a call of autograd has succeeded: Python runs nothing when it
    goes, for it would drop an interrupt there that came while autograd was at work."""


class _Backward:
    """One call of autograd that goes through the model, and those inside of it.

    Autograd calls it when it has succeeded, and drops it when it has failed.
    """

    over = True
    """Whether there is nothing to tell: it has not begun, or its end was told.

    Whoever was told sets it. So if an interrupt comes before, the end is told again."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self.task = graph_task()

    def __call__(self) -> None:
        if not self.over:
            self._tell(self, failed=False)
            self.__class__ = _Told  # type: ignore[assignment]

    def __del__(self) -> None:
        if not self.over:
            self._tell(self, failed=True)


class Edges:
    """The lock and the stack of entries of one model.

    Args:
        listener: Told of passes.
        device: Where inputs are moved.
        name: The model's, for errors.
    """

    def __init__(self, listener: PassListener, device: torch.device, name: str) -> None:
        self.lock = Turn(name, self._has_left, self._bury, self._has_raised)
        self._listener = listener
        self.device = device
        """Where the model computes."""
        self.device_type = device.type
        """The name under which autocast knows the device."""
        self._stack: list[_Frame] = []
        self.thread: Any = None
        """The thread in which a pass is under way."""
        self._unclosed: dict[Any, list[AbstractContextManager[Any]]] = {}
        """By thread, contexts of interrupted passes that this thread has to leave."""
        self._backward: Callable[[], _Backward | None] | None = None
        """Refers weakly to the backward under way; returns None when it is over and an
        interrupt kept its end from being told."""
        self._call: FrameType | None = None
        """The frame that called autograd for this backward, if it began in the thread
        of that frame."""
        self._unsaid: StagehandError | None = None
        """What the end of a failed backward has raised, where nobody hears it."""
        self._ended = threading.Event()
        """Set when a backward ends, the one that is waited for or another."""
        self._nested: set[int] = set()
        """Calls of autograd inside of the one that has the turn, by their task ids."""
        self.inner_calls = self.lock.inner_calls
        """Calls of autograd that are part of a forward pass, by their task ids."""
        self._readings: list[Call] = []
        """Calls of the thread that has the turn in which it reads all tensors."""
        self._inner_ends: dict[int, Any] = {}
        """By task id, weak references whose callbacks end one of `inner_calls` even if
        an interrupt keeps it from telling that it is over."""
        self.recomputing = 0
        """How many edges are being recomputed now, one inside of the other."""
        self.pushed: list[tuple[nn.Module | type, object]] = []
        """Sites and edges that run with gradients, the innermost last, and the hooks
        for saved tensors that each has pushed and its end has to take off, or None.

        A site is noted by its module. All edges are noted by one class, for they end in
        the order in which they are here."""

    def inside(self) -> bool:
        """Return whether this thread runs inside the model."""
        return self.thread is HERE.thread

    def outside(self) -> bool:
        """Whether this thread runs outside of the model.

        Also where an interrupt has skipped the end of what it was inside of.
        """
        if self.thread is not HERE.thread:
            return True
        stack = self._stack
        return bool(stack) and not _is_running(stack[-1].frame)

    def is_torn(self) -> bool:
        """Whether this thread is in no pass, or in one that an interrupt has ended."""
        return self._is_left() if self.inside() else not in_backward()

    def may_stand_back(self) -> bool:
        """Whether a forward that has not got its room yet may let others go first."""
        return self._backward is None and bool(self.lock.waiting())

    @property
    def is_busy(self) -> bool:
        """Whether a pass is under way, in whichever thread."""
        return bool(self._stack)

    def try_lock(self) -> bool:
        """Take the lock if no other thread has it, and close what was left open.

        Returns:
            Whether it was taken. It is not, either, where a backward of this thread has
            raised: a thread of autograd's own may still be ending it.
        """
        if self._has_raised() or not self.lock.try_acquire():
            return False
        self._sort_out()
        return True

    def take_lock(self) -> None:
        """Take the lock for longer than a call, and close what was left open."""
        self.await_failure()
        self.lock.acquire()
        self._sort_out()

    def _sort_out(self) -> None:
        """Close what was left open; the lock was just taken and goes if that fails."""
        try:
            self._close_dead()
        except BaseException:
            self.lock.release()
            raise
        self.lock.sorted()

    def begin_reading(self, frame: FrameType, bring: Callable[[], None]) -> None:
        """Keep all tensors where `bring` takes them until `end_reading`.

        For one who reads them all, such as `state_dict()`. PyTorch reads a tensor's
        address without the interpreter's lock: if another thread pointed the tensor
        elsewhere meanwhile, it could get half of the old and half of the new one.

        Args:
            frame: Of the call that reads. If that fails, no hook calls `end_reading`:
                that the frame is gone tells.
            bring: Takes the tensors where they shall be.
        """
        self.take_lock()
        self._readings = [call for call in self._readings if not call.is_of(frame)]
        self._recount()
        self._readings.append(Call(frame))
        try:
            bring()
        except BaseException:
            self.end_reading(frame)
            raise

    def end_reading(self, frame: FrameType) -> None:
        """End what began with the same frame, if anything did."""
        if self._readings and self._readings[-1].is_of(frame):
            del self._readings[-1]
            self.lock.release()

    def running(self) -> bool:
        """Do as `inside`, but first close what an interrupt or a failure left open."""
        self.await_failure()
        if self.inside() or HERE.thread in self._unclosed:
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
            self.enter_backward(by_module=True)
            return self.moved_again(args, kwargs)
        self.await_failure()
        if not self.inside():
            self._listener.check()
        while True:
            entry = _Frame(module, frame)
            self.lock.acquire()
            try:
                return self._enter(entry, args, kwargs)
            except StagehandOOMError:
                first = self._take_back(entry)
                if not first or self.lock.owner is HERE.thread:
                    raise
            except BaseException:
                self._take_back(entry)
                raise
            self.lock.stand_back(first)  # what is missing may be theirs

    def _enter(self, entry: _Frame, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Do as `enter` says, with the turn."""
        self._close_dead()
        self.lock.sorted()
        if self.inner_calls:
            self.lock.await_inner_calls()
        self._recount()
        self._raise_unsaid()
        self._listener.check_hooks()
        self._stack.append(entry)
        if len(self._stack) > 1:
            return None
        self.thread = HERE.thread
        entry.context = call_unseen(self._listener.begin_pass, entry.module, kwargs)
        if entry.context is not None:
            entry.context.__enter__()
        moved: tuple[Any, Any] = moved_to((args, kwargs), self.device)
        return moved

    def _take_back(self, entry: _Frame) -> set[Any]:
        """Undo an entry that has failed; return the threads that wait for the turn."""
        first = self.lock.waiting()
        if entry not in self._stack:  # there is nothing to leave
            self.lock.release()
            return set()
        if len(self._stack) == 1:
            call_unseen(self._listener.abort_pass)
        self.leave(entry.module)  # the module's own end hook finds nothing to end
        return first

    def await_failure(self) -> bool:
        """Wait for the end of a backward of this thread that has raised, if one has.

        The exception may reach this thread while a thread of autograd's own still runs
        the last node.

        Returns:
            Whether there was one.
        """
        if self._backward is None:
            return False
        known = self._known_backward()
        if known is not None and known.task == graph_task():
            return False  # mostly: this is inside of it
        del known
        if self.lock.owner is not HERE.thread or self._is_called():
            return False
        host_while(lambda: self._known_backward() is not None, self._ended)
        return True

    def _is_called(self) -> bool:
        """Whether this thread, which has the turn, is in the backward under way."""
        known = self._known_backward()
        if known is None:
            return False  # it is over, and nobody heard of it
        if known.task == graph_task():
            return True
        return in_backward() if self._call is None else _is_running(self._call)

    def _known_backward(self) -> _Backward | None:
        """Return the object with which autograd tells the end of the present backward.

        Its death is a way of telling: so nobody but autograd may hold it for long.
        """
        known = self._backward
        return None if known is None else known()

    def moved_again(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the inputs of what is recomputed, moved as they were in forward."""
        if self.recomputing:
            return None
        if len(args) == 1 and not kwargs and self._is_there(args[0]):  # mostly
            return None
        moved: tuple[Any, Any] = moved_to((args, kwargs), self.device)
        return moved

    def _is_there(self, value: Any) -> bool:
        return type(value) is torch.Tensor and value.device == self.device

    def leave(self, module: nn.Module | None) -> None:
        """End the latest entry, if it is this module's."""
        if not self.inside() or self._stack[-1].module is not module or in_backward():
            return
        if self.inner_calls:
            self.lock.await_inner_calls()
        if len(self._stack) == 1:
            del self.pushed[:]  # by what has lost its end hook: the context ends it
        context = self._stack[-1].context
        if context is not None:  # or an interrupt leaves it to the next entry
            context.__exit__(None, None, None)
        del self._stack[-1]  # no call: no interrupt comes between this and `try`
        try:
            if not self._stack:
                self.thread = None
                call_unseen(self._listener.end_pass)
        finally:
            self.lock.release()

    def enter_backward(self, *, by_module: bool = False) -> None:
        """Begin autograd's pass, unless it or another pass of this thread goes on.

        If a failed one does, this waits for its end; what an interrupt left is closed.

        Args:
            by_module: See `PassListener.begin_backward`.
        """
        task, known = graph_task(), self._known_backward()
        is_known = known is not None and known.task == task
        is_another = self._backward is not None and not is_known
        del known
        if self._backward is None and self.inside() and self._is_left():
            with self.lock:
                self._close_dead()
        if self.thread is HERE.thread and not (is_another and self._comes_after(task)):
            return
        if is_known or task in self.inner_calls:
            return  # known already, from another of autograd's threads
        if self._has_raised() and is_autograds(HERE.thread) and backward_call():
            return  # inside of a node of the failed backward, whose end waits for this
        if not self.lock.acquire(task=task):  # a forward waits for this call
            self._queue_inner_end(task)  # it is a part of that forward's pass
            return
        self._sort_out()
        self._queue_end()
        call_unseen(partial(self._listener.begin_backward, by_module=by_module))

    def _comes_after(self, task: int) -> bool:
        """Return whether this call of autograd is no part of the one that has the turn.

        If the latter has failed, wait for its end and return True. Else this call is
        inside of it. A third case is refused: both are calls of different threads, and
        meet because autograd has one thread for all that runs on a device. One would
        wait for ever for the other, or its gradients would get into the other's pass.

        Raises:
            DeadlockError: In that case.
        """
        if task in self._nested:
            return False
        if self.await_failure():
            return True
        if backward_call() is None:
            raise DeadlockError(
                f"a backward through {self.lock.name} would wait for another thread's,"
                " which autograd runs in the same thread; run them one after another,"
                " under a lock of yours"
            )
        self._nested.add(task)
        return False

    def _queue_inner_end(self, task: int) -> None:
        try:
            if self._inner_ends and backward_call() is not None:  # part of another
                self.lock.dismiss(task)
                return
            inner = _Backward(self._leave_inner)
            self._inner_ends[task] = weakref.ref(
                inner, lambda _: self._end_inner(task, failed=True)
            )
            at_end_of_backward(inner)
            inner.over = False
        except BaseException:
            self.lock.dismiss(task)
            raise

    def _leave_inner(self, inner: _Backward, *, failed: bool) -> None:
        inner.over = True
        self._end_inner(inner.task, failed=failed)

    def _end_inner(self, task: int, *, failed: bool) -> None:
        """Take in the gradients that an inner call has brought; drop them if it failed.

        With others under way, a failed one's cannot be told from theirs: nothing
        is dropped then.
        """
        try:
            last = self.inner_calls == {task}
            if last or not failed:
                self._listener.end_inner_backward(failed=failed, last=last)
        finally:
            self.lock.dismiss(task)
            self._inner_ends.pop(task, None)

    def _queue_end(self) -> None:
        # In a function of its own: only autograd may hold this object, not a local in
        # the traceback of a caller that raises.
        backward = _Backward(self._leave_backward)
        try:
            self._backward, self._call = weakref.ref(backward), backward_call()
            self._recount()
            self._stack.append(_Frame(None, None))
            self.thread = HERE.thread
            at_end_of_backward(backward)
            backward.over = False  # from now on it gives the turn back
        except BaseException:
            self._forget_backward()
            self._end_backward(backward)
            raise

    def _leave_backward(self, backward: _Backward, *, failed: bool) -> None:
        """End autograd's pass. It may be told in any thread.

        If an interrupt comes first, the pass is ended by whoever is told, or enters,
        next.
        """
        try:
            if self.lock.owner is not HERE.thread:
                call_unseen(self._listener.go_on_here, self.lock.move_here)
            self._forget_backward()
            self._listener.end_backward(failed=failed)
        except StagehandError as error:
            if failed:  # told by a death, which raises nothing
                error.__context__ = None
                self._unsaid = error.with_traceback(None)
            self._end_backward(backward)
            if not failed:
                raise
        except BaseException as error:
            if isinstance(error, Exception):  # an interrupt leaves it to be ended
                self._end_backward(backward)
            raise
        else:
            self._end_backward(backward)

    def _raise_unsaid(self) -> None:
        """Raise what the end of a failed backward could not."""
        try:
            raise_kept(self._unsaid)
        finally:
            self._unsaid = None

    def _end_backward(self, backward: _Backward) -> None:
        backward.over = True
        with self.lock.ownership:  # nobody may take the lock for an abandoned one
            self._backward = self._call = None
            self.lock.release()
        self._ended.set()

    def _forget_backward(self) -> None:
        del self._stack[:], self.pushed[:]  # autograd has taken their hooks off
        self._nested.clear()
        self.thread = None
        self.recomputing = 0

    def _is_unheard(self) -> bool:
        """Whether a backward is over and an interrupt kept that from being told."""
        backward = self._backward
        return backward is not None and backward() is None

    def _has_raised(self) -> bool:
        """Whether a backward has raised in its caller and still runs in autograd's
        thread."""
        call = self._call
        if call is None or _is_running(call):
            return False
        return self._known_backward() is not None

    def _end_unheard(self) -> None:
        """End a backward of which an interrupt kept the end from being told."""
        self._forget_backward()
        call_unseen(partial(self._listener.end_backward, failed=True))
        self._backward = self._call = None

    def _close_dead(self) -> None:
        """Close entries whose frame is gone: an interrupt skipped their hooks, or
        somebody took them off."""
        if self._is_unheard():
            self._end_unheard()
            self.lock.release()
        dead = 0
        for entry in reversed(self._stack):
            if _is_running(entry.frame):
                break
            dead += 1
        if dead:
            self._set_aside(dead)
        if dead or not (self._stack or self.thread is None):
            self._abort()
            # Passes remain, uses by hand, readings, and this call.
            count = len(self._stack) + self._listener.uses_by_hand()
            self.lock.recount(count + self._count_readings() + 1)
        if self._unclosed and not in_backward():  # whose end would undo what this does
            left = self._unclosed.get(HERE.thread, [])
            while left:  # what an interrupt leaves of this is left to the next
                left[0].__exit__(None, None, None)
                del left[0]
            self._unclosed.pop(HERE.thread, None)

    def _set_aside(self, dead: int) -> None:
        """Take the latest entries off; note what contexts their thread has to leave.

        That of the outermost one takes off all hooks for saved tensors.
        """
        entries = reversed(self._stack[-dead:])
        left = [e.context for e in entries if e.context is not None]
        if self.thread is not None and self.thread.is_alive():
            left += self._unclosed.get(self.thread, [])
            self._unclosed[self.thread] = left
        del self._stack[-dead:], self.pushed[:]  # no call: no interrupt comes between

    def _recount(self) -> None:
        """If this thread enters from outside, forget holds of the lock that interrupted
        calls have left."""
        if self.lock.count > 1 and not (self._stack or self._listener.in_use()):
            self.lock.recount(self._count_readings() + 1)

    def _count_readings(self) -> int:
        """Return how many readings of this thread go on; forget those that failed."""
        me = HERE.thread.ident or 0
        self._readings = [call for call in self._readings if call.goes_on(me)]
        return len(self._readings)

    def end_pushed(self) -> None:
        """Take off what the latest of `pushed` has pushed, and forget it."""
        pushed = self.pushed[-1][1]
        if pushed is not None:
            self._listener.put_back(pushed)
        del self.pushed[-1]  # an interrupt leaves it to be done again

    def _is_left(self) -> bool:
        """Whether whoever has the lock was interrupted and does not go on.

        Asked in another thread than the owner's: the stack may change meanwhile.
        """
        owner = self.lock.owner
        if any(call.goes_on(owner.ident) for call in self._readings if owner):
            return False
        if self._backward is not None:  # which may end in any thread
            return self._is_unheard()
        for entry in self._stack[:1]:
            return not _is_running(entry.frame)
        # Between passes the lock is held for a single call, which may be over, without
        # having released it, after an interrupt.
        if owner is None or (self.thread is None and self._listener.in_use()):
            return False
        return not runs_library(owner)  # there it is about to release it

    def _has_left(self) -> bool:
        """Whether whoever has the lock has no use for it any more.

        A use by hand goes on behind a pass that was interrupted inside of it.
        """
        return self._is_left() and not self._listener.uses_by_hand()

    def _bury(self) -> None:
        """Close what another thread left open. It has to leave its contexts itself."""
        if self._is_unheard():
            self._end_unheard()
            return
        if self._stack:
            self._set_aside(len(self._stack))
        self._listener.end_by_hand()
        self._abort()

    def _abort(self) -> None:
        call_unseen(self._listener.abort_pass)
        if not self._stack:
            self.thread = None
            call_unseen(self._listener.end_pass)


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
