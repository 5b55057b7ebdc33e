"""Keeps autograd's saved tensors under a budget: the oldest leave, and return in time.

The first tensors that a forward saves are the last that its backward needs, so spilling
a *prefix* leaves the most time for the way out and back. What is saved gets a handle
whose fate is decided later. When the budget is reached, the oldest pieces leave. What
a step has needed is known to the next: its prefix leaves as soon as it is saved.

Copies to the host wait for the stream that made the tensor; its memory is let go behind
the copy, when the copy is known to be done or, if the budget needs it now, with the
compute stream waiting. The host never waits. In backward, pieces come back newest
first, ahead of their use, as far as the budget has room.

Not spilled: what somebody else keeps on the device anyway (weights, inputs, tables of
positions), small tensors, tensors without a storage of their own, and what is saved
inside of backward.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from stagehand.activations.pieces import Left, Piece, Place, SavedHandle
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import TransferEngine
from stagehand.errors import StagehandInternalError
from stagehand.torch_private import in_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagehand.core.arena import Arena
    from stagehand.core.device import Device, Event

__all__ = ["Scope", "Spill"]


class _Copy(NamedTuple):
    """A piece on its way to the host. The source outlives the copy, it may not."""

    piece: weakref.ref[Piece]
    source: torch.Tensor
    done: Event


class Scope:
    """What one forward has saved."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.pieces: list[weakref.ref[Piece]] = []

    def older(self, number: int) -> Iterator[Piece]:
        """Yield the living pieces saved before one, newest first."""
        for ref in reversed(self.pieces):
            piece = ref()
            if piece is not None and piece.number < number:
                yield piece


class Spill:
    """Decides and executes what leaves and what comes back.

    Thread-safe: autograd unpacks in threads of its own.

    Args:
        device: Where the tensors are.
        arena: Pinned memory for what leaves.
        budget_bytes: Of saved tensors on the device.
        smallest_bytes: Storages below this stay.
    """

    def __init__(
        self, device: Device, arena: Arena, *, budget_bytes: int, smallest_bytes: int
    ) -> None:
        self.budget_bytes = budget_bytes
        self.counters = Counters()
        self._smallest = smallest_bytes
        self._device = device
        self._arena = arena
        self._engine = TransferEngine(device, self.counters)
        self._lock = threading.RLock()
        self._dead: deque[Left] = deque()
        self._dying: deque[Left] = deque()  # their copies are under way
        self._live: dict[int, weakref.ref[Piece]] = {}  # on the device, by storage
        self._kept: deque[weakref.ref[Piece]] = deque()  # oldest first
        self._leaving: deque[_Copy] = deque()
        self._leaving_bytes = 0
        self._stuck: deque[weakref.ref[Piece]] = deque()  # copied, kept by others
        self._numbers = 0
        self._prefix_bytes = 0  # what the latest forward had too much
        self.held_bytes = 0
        """Of saved storages on the device, those on their way included."""
        self.peak_bytes = 0
        self.kept_count = 0
        self.spilled_count = 0
        self.restored_count = 0
        self.stuck_count = 0
        """Pieces that were copied while somebody else kept their storage."""
        self.denied_count = 0
        """Pieces that stayed because there was no pinned memory."""

    # Saving

    def save(self, saved: torch.Tensor, scope: Scope) -> SavedHandle | None:
        """Return a handle, or None for what is not to be spilled."""
        if saved.device != self._device.torch_device or not _is_plain(saved):
            return None
        if saved.untyped_storage().nbytes() < self._smallest or in_backward():
            return None
        with self._lock:
            self._reap()
            piece = self._piece(saved, scope)
            handle = SavedHandle(saved, piece)
            if scope.nbytes <= self._prefix_bytes:
                self._send(piece)
            self._make_room()
            return handle

    def _piece(self, saved: torch.Tensor, scope: Scope) -> Piece:
        known = self._live.get(saved.untyped_storage()._cdata)
        piece = None if known is None else known()
        if piece is not None:
            return piece
        self._numbers += 1
        piece = Piece(saved, self._numbers, scope, self._dead)
        ref = weakref.ref(piece)
        self._live[piece.cdata] = ref
        self._kept.append(ref)
        scope.pieces.append(ref)
        scope.nbytes += piece.nbytes
        self.held_bytes += piece.nbytes
        self.kept_count += 1
        return piece

    def _make_room(self) -> None:
        """Let the oldest leave until what is left fits."""
        self._release()
        if self.held_bytes > self.budget_bytes:
            self._free_stuck()
        while self.held_bytes - self._leaving_bytes > self.budget_bytes and self._kept:
            piece = self._kept.popleft()()
            if piece is not None:
                self._send(piece)
        if self.held_bytes > self.budget_bytes:
            self._release(wait=True)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _send(self, piece: Piece) -> None:
        """Queue a piece's copy to the host, if there is pinned memory for it."""
        if piece.place is not Place.DEVICE or piece.lease is not None:
            return
        lease = self._arena.acquire_nowait(piece.nbytes, "a saved tensor")
        if lease is None:
            self.denied_count += 1
            return
        source = piece.flat()
        target = lease.buffer[: piece.nbytes]
        maker = self._device.current_stream()
        piece.lease = lease
        piece.left = self._engine.copy_home(source, target, maker=maker)
        piece.place = Place.LEAVING
        self._leaving.append(_Copy(weakref.ref(piece), source, piece.left))
        self._leaving_bytes += piece.nbytes

    def _release(self, *, wait: bool = False) -> None:
        """Free what has left, in order.

        Args:
            wait: Let compute wait for copies as long as the budget is exceeded.
        """
        while self._leaving:
            ref, source, event = self._leaving[0]
            if not event.query():
                if not wait or self.held_bytes <= self.budget_bytes:
                    return
                self._device.current_stream().wait_event(event)
            self._leaving.popleft()
            self._leaving_bytes -= source.numel()
            piece = ref()
            if piece is None:
                continue
            if piece.can_go(others=1):
                self._free(piece)
            else:
                piece.place = Place.DEVICE
                self._stuck.append(ref)
                self.stuck_count += 1

    def _free_stuck(self) -> None:
        """Free what is copied already and nobody else keeps any more."""
        for _ in range(len(self._stuck)):
            ref = self._stuck.popleft()
            piece = ref()
            if piece is not None and piece.can_go():
                self._free(piece)
            elif piece is not None:
                self._stuck.append(ref)

    def _free(self, piece: Piece) -> None:
        piece.let_go()
        self._live.pop(piece.cdata, None)
        self.held_bytes -= piece.nbytes
        self.spilled_count += 1

    def _reap(self) -> None:
        """Give back what dead pieces held."""
        while self._dead:
            left = self._dead.popleft()
            if left.place is not Place.HOST:
                self.held_bytes -= left.nbytes
            if left.lease is not None:
                self._dying.append(left)
        while self._dying and all(event.query() for event in self._dying[0].busy):
            lease = self._dying.popleft().lease
            if lease is not None:
                lease.release()

    # Coming back

    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """Return the tensor that a handle stands for, on the device."""
        with self._lock:
            self._reap()
            self._release()
            handle.check()
            piece = handle.piece
            if handle.alias is not None:
                found = handle.alias
            else:
                memory, event = piece.back or self._fetch(piece)
                stream = self._device.current_stream()
                stream.wait_event(event)
                memory.record_stream(stream)  # type: ignore[arg-type]
                found = handle.view(memory)
                self._hand_out(piece)
            self._look_ahead(piece)
            return found

    def _fetch(self, piece: Piece) -> tuple[torch.Tensor, Event]:
        lease, left = piece.lease, piece.left
        if lease is None or left is None:
            raise StagehandInternalError("a saved tensor is nowhere")
        piece.back = self._engine.bring_back(lease.buffer[: piece.nbytes], after=left)
        piece.place = Place.RETURNING
        piece.due = len(piece.living())
        self.held_bytes += piece.nbytes
        self.restored_count += 1
        return piece.back

    def _hand_out(self, piece: Piece) -> None:
        """Forget what came back when its last handle has it: the host's copy stays."""
        piece.due -= 1
        if piece.due <= 0 and piece.back is not None:
            piece.left = piece.back[1]
            piece.back = None
            piece.place = Place.HOST
            self.held_bytes -= piece.nbytes

    def _look_ahead(self, piece: Piece) -> None:
        for older in piece.scope.older(piece.number):
            if older.place is not Place.HOST:
                continue
            if self.held_bytes + older.nbytes > self.budget_bytes:
                return
            self._fetch(older)

    # Steps

    def end(self, scope: Scope) -> None:
        """A forward is over: let as much of the next one leave at once as was too
        much."""
        with self._lock:
            self._prefix_bytes = max(0, scope.nbytes - self.budget_bytes)

    def close(self) -> None:
        """Wait for all copies and give back what dead pieces held."""
        self._engine.drain()
        with self._lock:
            self._reap()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bytes with strides and nothing more."""
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
        return False  # weights are kept by their model
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return False
    return tensor.is_floating_point() or tensor.is_complex()
