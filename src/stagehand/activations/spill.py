"""Keeps autograd's saved tensors under a budget: the oldest leave, and return in time.

What is saved gets a handle whose fate is decided later. When the budget is reached, the
oldest pieces leave. What a forward has needed is known to the next that begins alike:
its prefix leaves as soon as it is saved, in bundles. Memory is let go behind the copy:
when it is known to be done or, if the budget needs it now, with the compute stream
waiting. The host never waits. In backward, bundles come back in the order in which they
are needed, as far as the budget has room.

Not spilled: what somebody else keeps on the device anyway (weights, inputs, tables of
positions), small tensors, tensors without a storage of their own, and what is saved
inside of backward.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from stagehand.activations.carrier import Leaving
from stagehand.activations.learning import Lessons
from stagehand.activations.pieces import Bundle, Extra, Handle, Piece, Scope
from stagehand.core.limits import Bounds, effective
from stagehand.core.traffic import event_of
from stagehand.errors import StagehandInternalError
from stagehand.torch_private import graph_task, sequence_number, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from stagehand.activations.carrier import Carrier
    from stagehand.core.device import Device
    from stagehand.core.ledger import Watermarks

__all__ = ["Spill", "Tally"]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_BUNDLE_BYTES = 4 << 20  # copies of less cost more than they move
_STUCK_LOOKS = 8  # at pieces that others keep, whenever room is made
_STALE = 1000  # dead entries, beside as many as there are living ones
_READINGS = 8  # of the device's memory between the watermarks


@dataclass(slots=True)
class Tally:
    """What has happened, counted where it happens."""

    saved_count: int = 0
    """Pieces that autograd saved."""
    spilled_count: int = 0
    """Pieces that were copied to the host and let go."""
    spilled_bytes: int = 0
    """Bytes that were copied to the host."""
    freed_bytes: int = 0
    """Bytes of these whose device memory was let go."""
    restored_count: int = 0
    """Pieces that came back."""
    restored_bytes: int = 0
    """Bytes that came back."""
    demanded_count: int = 0
    """Bundles that were not on their way when they were needed."""
    cancelled_count: int = 0
    """Bundles that came back too early and were let go again."""
    stuck_count: int = 0
    """Pieces that stayed because somebody else keeps their storage."""
    over_count: int = 0
    """Saves for which there was no room though nothing more could leave."""

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


_ref = weakref.ref
_Kept = tuple[weakref.ref[Piece], int]


class Spill:
    """Decides what leaves and what comes back, and keeps the books.

    Thread-safe: autograd unpacks in threads of its own.

    Args:
        device: Where the tensors are.
        carrier: Moves them.
        budget_bytes: Of saved tensors on the device.
        smallest_bytes: Storages below this stay.
        marks: Let the memory of the whole device set the budget.
        inflight_d2h: Bundles on their way to the host before planned ones wait.
        inflight_h2d: Bundles on their way back before those not yet needed wait.
    """

    def __init__(
        self,
        device: Device,
        carrier: Carrier,
        *,
        budget_bytes: int,
        smallest_bytes: int,
        marks: Watermarks | None = None,
        inflight_d2h: int | None = None,
        inflight_h2d: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.tally = Tally()
        self.bounds = Bounds()
        """Limits on it: post them here."""
        self._lock = threading.RLock()
        self.lessons = Lessons(device, carrier, self._lock)
        self.held_bytes = 0
        """Of saved storages that only the graph keeps on the device."""
        self.peak_bytes = 0
        self._device = device
        index = device.torch_device.index
        self._place = -1 if index is None else index
        self._carrier = carrier
        self._smallest = smallest_bytes
        self._bundle_bytes = min(_BUNDLE_BYTES, max(smallest_bytes, budget_bytes // 16))
        self._has_streams = not device.is_host
        self._marks = marks
        self._unread = 0
        self._inflight_d2h = inflight_d2h
        self._inflight_h2d = inflight_h2d
        self._live: dict[int, weakref.ref[Piece]] = {}  # on the device, by storage
        self._kept: deque[_Kept] = deque()  # oldest first
        self._open: list[Scope] = []
        self._waiting: deque[tuple[Scope, Bundle]] = deque()
        self._leaving: deque[Leaving] = deque()
        self._leaving_bytes = 0
        self._ahead: deque[weakref.ref[Bundle]] = deque()  # fetched before their use
        self._spent: list[weakref.ref[Bundle]] = []
        self._stuck: deque[weakref.ref[Piece]] = deque()  # kept by others
        self._unpruned = 0
        self._is_skipped = False

    # Saving

    def begin(self) -> Scope:
        """Return what stands for a forward."""
        with self._lock:
            self._tidy()
            self._prune()
            if len(self._live) > 2 * len(self._kept) + _STALE:
                for key in [k for k, ref in self._live.items() if ref() is None]:
                    del self._live[key]
            self.lessons.settle(self.budget_bytes)
            return Scope(self._device.current_stream())

    def packer(
        self, scope: Scope, otherwise: Callable[[torch.Tensor], Any]
    ) -> Callable[[torch.Tensor], Any]:
        """Return the hook through which a forward saves its tensors.

        It runs for each of them: what it needs is at hand, and it calls little.

        Args:
            scope: The forward.
            otherwise: Packs what is not to be spilled.
        """
        place, smallest, lock = self._place, self._smallest, self._lock
        live, kept, watches = self._live, self._kept, self._marks is not None

        acquire, release = lock.acquire, lock.release

        def pack(saved: torch.Tensor) -> Any:
            if type(saved) is not _Tensor or saved.get_device() != place or scope.off:
                return otherwise(saved)
            try:
                storage = saved.untyped_storage()
            except NotImplementedError:  # sparse
                return otherwise(saved)
            nbytes = storage.nbytes()
            if (
                nbytes < smallest
                or graph_task() != -1
                or type(saved._base) is _Parameter  # kept by its model
            ):
                return otherwise(saved)
            cdata = storage._cdata
            sequence = sequence_number()
            acquire()  # a `with` takes twice as long
            try:
                known = live.get(cdata)
                piece = None if known is None else known()
                if piece is not None:
                    piece.sequence = sequence
                    return Extra(saved.detach(), piece)
                if watches:
                    self._read(nbytes)
                held = self.held_bytes + nbytes
                if held > self.budget_bytes:
                    self._make_room(nbytes)
                    held = self.held_bytes + nbytes
                self.held_bytes = held
                piece = Piece(saved.detach(), cdata, nbytes, scope, sequence)
                live[cdata] = ref = _ref(piece)
                if scope.plain:
                    kept.append((ref, nbytes))
                else:
                    self._note(piece, ref, saved)
            finally:
                release()
            return piece

        if not self._is_skipped:  # once for all: they share their code
            self._is_skipped = True
            skipped(pack)
        return pack

    def _note(self, piece: Piece, ref: weakref.ref[Piece], saved: torch.Tensor) -> None:
        """Note a piece that is the first, or observed, or may be of the prefix."""
        scope = piece.scope
        if not scope.count:
            self.lessons.recognize(scope, (saved.shape, saved.dtype))
            scope.leads = scope.prefix is not None and scope.prefix.count > 0
            if scope.off:
                self._kept.append((ref, piece.nbytes))
                return
        scope.count += 1
        if self._has_streams:
            self._note_stream(scope)
        if scope.noted is not None:
            scope.noted.append((ref, piece.nbytes, piece.sequence))
            self.lessons.saved(scope, piece.sequence)
        if scope.leads:
            self._lead(piece, ref, scope)
        else:
            self._kept.append((ref, piece.nbytes))
        if not (scope.leads or self._has_streams or scope.noted is not None):
            scope.plain = True
            scope.rest = len(self._kept)

    def _note_stream(self, scope: Scope) -> None:
        """Know all streams on which tensors were made: copies wait for them."""
        stream = self._device.current_stream()
        if stream not in scope.streams:
            scope.streams.append(stream)

    def _lead(self, piece: Piece, ref: weakref.ref[Piece], scope: Scope) -> None:
        """Let a piece leave if the prefix has it."""
        number = scope.count - 1
        prefix = scope.prefix
        if prefix is None or number >= prefix.count:
            scope.leads = False
            self._flush(scope)
            self._kept.append((ref, piece.nbytes))
        elif number in prefix.skipped:
            self.held_bytes -= piece.nbytes
            self._set_aside(piece)
        else:
            self._gather(piece, scope)
        self._release()

    def _gather(self, piece: Piece, scope: Scope) -> None:
        """Put a piece into the open bundle; large ones travel alone."""
        if piece.nbytes >= self._bundle_bytes:
            self._flush(scope)
        if scope.open is None:
            scope.open = Bundle(self._carrier.gone)
            self._open.append(scope)
        scope.open.add(piece)
        if scope.open.nbytes >= self._bundle_bytes:
            self._flush(scope)

    def _flush(self, scope: Scope) -> None:
        """Send the open bundle, or let it wait for its turn."""
        bundle, scope.open = scope.open, None
        if bundle is None:
            return
        self._open.remove(scope)
        self._waiting.append((scope, bundle))
        self._send_waiting()

    def _send_waiting(self, *, at_once: bool = False) -> None:
        """Send what waits, as far as so many copies may be under way."""
        while self._waiting and (at_once or self._may_send()):
            scope, bundle = self._waiting.popleft()
            self._send(bundle, scope)

    def _may_send(self) -> bool:
        most = _smaller(self._inflight_d2h, self.bounds.current.inflight_d2h)
        if most is not None and len(self._leaving) >= most:
            return False
        return self._carrier.may_send

    def _send(self, bundle: Bundle, scope: Scope) -> None:
        pieces, sources = [], []
        for piece in bundle.living():
            source = piece.flat()
            if source is not None:
                pieces.append(piece)
                sources.append(source)
        nbytes = sum(piece.nbytes for piece in pieces)
        self.held_bytes -= bundle.counted - nbytes
        if not pieces:
            return
        done = self._carrier.send(bundle, pieces, sources, scope.streams)
        self.tally.spilled_bytes += nbytes
        ref = weakref.ref(bundle)
        scope.bundles.append(ref)
        refs = [weakref.ref(piece) for piece in pieces]
        self._leaving.append(Leaving(ref, refs, sources, nbytes, done))
        self._leaving_bytes += nbytes

    # Room

    def _make_room(self, nbytes: int) -> None:
        """Let the oldest leave until so many bytes more fit."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._tidy()
        self._prune()
        limit = self.budget_bytes - nbytes
        self._look_at_stuck()
        while self.held_bytes > limit:
            if self._cancel():
                continue
            for scope in tuple(self._open):
                self._flush(scope)
            self._send_waiting(at_once=True)
            while self.held_bytes - self._leaving_bytes > limit and self._kept:
                self._send_oldest(self.held_bytes - self._leaving_bytes - limit)
            if not self._leaving:
                self.tally.over_count += 1
                return
            stream = self._device.current_stream()
            self._carrier.wait(self._leaving[0].done, stream)
            self._let_go()

    def _send_oldest(self, needed: int) -> None:
        """Send some of the oldest pieces, at least a bundle or what is needed."""
        first: Piece | None = None
        bundle = Bundle(self._carrier.gone)
        while self._kept and bundle.nbytes < min(needed, self._bundle_bytes):
            ref, nbytes = self._kept[0]
            piece = ref()
            alone = piece is not None and piece.nbytes >= self._bundle_bytes
            if bundle.nbytes and (
                alone
                or (piece is not None and first and piece.scope is not first.scope)
            ):
                break
            self._kept.popleft()
            if piece is None:
                self.held_bytes -= nbytes
            elif not piece.is_plain() or not piece.can_go():
                self.held_bytes -= nbytes
                self._set_aside(piece)
            else:
                first = first or piece
                bundle.add(piece)
        if first is not None:
            self._send(bundle, first.scope)

    def _release(self) -> None:
        """Free what is known to have left, in order."""
        while self._leaving and self._leaving[0].done.query():
            self._let_go()
        if self._waiting:
            self._send_waiting()

    def _let_go(self) -> None:
        """Free the oldest that has left. Compute is behind the copy."""
        _, refs, sources, nbytes, _ = self._leaving.popleft()
        self._leaving_bytes -= nbytes
        self.held_bytes -= nbytes
        for ref in refs:
            piece = ref()
            if piece is None:
                continue
            if piece.can_go(others=1):
                self._free(piece)
            else:
                self._set_aside(piece)
        sources.clear()

    def _free(self, piece: Piece) -> None:
        piece.free()
        self._live.pop(piece.cdata, None)
        self.tally.spilled_count += 1
        self.tally.freed_bytes += piece.nbytes

    def _set_aside(self, piece: Piece) -> None:
        """Do not count a piece: somebody else keeps its memory, or has changed it."""
        self.tally.stuck_count += 1
        self._stuck.append(weakref.ref(piece))

    def _look_at_stuck(self) -> None:
        """Look whether others have let go of some of what they kept."""
        for _ in range(min(len(self._stuck), _STUCK_LOOKS)):
            ref = self._stuck.popleft()
            piece = ref()
            if piece is None:
                continue
            if not piece.is_plain() or not piece.can_go():
                self._stuck.append(ref)
            elif piece.bundle is not None:
                self._free(piece)
            else:
                self.held_bytes += piece.nbytes
                self._kept.appendleft((ref, piece.nbytes))

    def _tidy(self) -> None:
        """Let go of what nobody needs any more, and of what has left."""
        self.held_bytes -= self._carrier.reap()
        self._release()
        for leaving in tuple(self._leaving):
            if all(ref() is None for ref in leaving.pieces):
                # Only the copy needs the memory now.
                self._device.current_stream().wait_event(event_of(leaving.done))
                self._leaving.remove(leaving)
                self._leaving_bytes -= leaving.nbytes
                self.held_bytes -= leaving.nbytes
        self._drop_spent()

    def _prune(self) -> None:
        """Count dead pieces no more. Backward lets the newest go first."""
        kept = self._kept
        before = sum(nbytes for _, nbytes in kept)
        alive = [item for item in kept if item[0]() is not None]
        kept.clear()  # not another one: hooks hold it
        kept.extend(alive)
        self.held_bytes -= before - sum(nbytes for _, nbytes in alive)
        self._unpruned = 0

    def _prune_newest(self) -> None:
        kept = self._kept
        while kept and kept[-1][0]() is None:
            self.held_bytes -= kept.pop()[1]

    # Watermarks

    def _read(self, nbytes: int) -> None:
        """Let the device's memory set the budget, now and then."""
        marks = self._marks
        self._unread += nbytes
        if marks is None:
            return
        if self._unread * _READINGS < marks.high_bytes - marks.low_bytes:
            return
        self._unread = 0
        allocated = self._device.allocated_bytes()
        if allocated is not None:
            self._tidy()
            self.budget_bytes = marks.target(
                self.budget_bytes, self.held_bytes, allocated
            )

    # Coming back

    def restore(self, handle: Piece | Extra) -> torch.Tensor:
        """Return the tensor that a handle stands for, on the device."""
        alias = handle.alias
        piece = handle if type(handle) is Piece else handle.piece  # type: ignore[union-attr]
        if alias is not None and alias._version != handle.version:
            handle.check()
        if alias is not None and not piece.scope.bundles:
            return alias
        with self._lock:
            found = handle.alias
            if found is None:
                found = self._bring(handle, piece)
            self._look_ahead(piece.scope, piece.sequence)
            return found

    def _bring(self, handle: Handle, piece: Piece) -> torch.Tensor:
        bundle = piece.bundle
        if bundle is None:
            raise StagehandInternalError(f"{handle} is nowhere")
        self._drop_spent()
        if bundle.back is None:
            self.tally.demanded_count += 1
            if self.held_bytes + bundle.nbytes > self.budget_bytes:
                self._make_room(bundle.nbytes)
            self._fetch(bundle)
        found = handle.view(self._carrier.receive(bundle), piece.start)
        bundle.due -= 1
        if bundle.due == 0:
            self._spent.append(weakref.ref(bundle))
        return found

    def _fetch(self, bundle: Bundle) -> None:
        self._carrier.fetch(bundle)
        handles = [h for piece in bundle.living() for h in piece.handles()]
        bundle.due = sum(handle.alias is None for handle in handles)
        self.held_bytes += bundle.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.tally.restored_count += len(bundle.living())
        self.tally.restored_bytes += bundle.nbytes

    def _look_ahead(self, scope: Scope, sequence: int) -> None:
        """Bring what is needed next, as far as there is room."""
        task = graph_task()
        if task == -1:  # somebody looks at the graph
            return
        if task != scope.task:
            scope.turn(task)
        if self._carrier.gone:
            self.held_bytes -= self._carrier.reap()
        self._prune_newest()
        if scope.noted is not None:
            self.lessons.needed(scope, sequence)
        coming = scope.coming
        while coming:
            bundle = coming[-1]()
            if bundle is None or bundle.back is not None or not bundle.is_away:
                coming.pop()
            elif not self._has_room(bundle.nbytes) or not self._may_fetch():
                return
            else:
                self._ahead.append(coming.pop())
                self._fetch(bundle)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit, looking for dead pieces now and then."""
        if self.held_bytes + nbytes <= self.budget_bytes:
            return True
        self._unpruned += 1
        if self._unpruned * 8 < len(self._kept):
            return False
        self._tidy()
        self._prune()
        return self.held_bytes + nbytes <= self.budget_bytes

    def _may_fetch(self) -> bool:
        limits = self.bounds.current
        if limits.suppress_speculative or not self._carrier.may_fetch:
            return False
        most = _smaller(self._inflight_h2d, limits.inflight_h2d)
        return most is None or sum(1 for _ in self._coming()) < most

    def _coming(self) -> Iterator[Bundle]:
        """Yield what was fetched and not used yet, what is needed first at first."""
        for ref in tuple(self._ahead):
            bundle = ref()
            if bundle is None or bundle.back is None or bundle.seen is not None:
                self._ahead.remove(ref)
            else:
                yield bundle

    def _cancel(self) -> bool:
        """Let go of what came back early and is needed last; False if there is none."""
        last = None
        for bundle in self._coming():
            last = bundle
        if last is None:
            return False
        self._drop(last)
        for piece in last.living()[:1]:
            piece.scope.coming.append(weakref.ref(last))
        self.tally.cancelled_count += 1
        return True

    def _drop_spent(self) -> None:
        """Let go of what came back and was unpacked by all who wait for it.

        If the graph goes on to live, its bundles do, and would keep the memory.
        """
        for ref in tuple(self._spent):
            bundle = ref()
            if bundle is None or bundle.back is None:
                self._spent.remove(ref)
            elif bundle.is_alone():
                self._spent.remove(ref)
                self._drop(bundle)

    def _drop(self, bundle: Bundle) -> None:
        self._carrier.drop(bundle)
        self.held_bytes -= bundle.nbytes

    # Steps

    def end(self, scope: Scope, *, failed: bool) -> None:
        """A forward is over."""
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            if scope.plain:  # its pieces were not counted one by one
                scope.count += max(0, len(self._kept) - scope.rest)
            self.tally.saved_count += scope.count
            self._flush(scope)
            self._release()
            self.lessons.learn(scope, self.budget_bytes, failed=failed)

    def abandon(self) -> None:
        """Give back all host memory; graphs that are alive can go backward still."""
        with self._lock:
            self._carrier.abandon()

    def close(self) -> None:
        """Wait for all copies and give back what dead pieces held."""
        self._carrier.engine.drain()
        with self._lock:
            self._tidy()
            self._prune()
            self._carrier.pool.close()


def _smaller(config_value: int | None, limit: int | None) -> int | None:
    return limit if config_value is None else effective(config_value, limit)
