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

"Others" are users and the forward's own code: they may keep a tensor that autograd has
saved, too, and let go of it at any time, which nothing tells. Then only the graph keeps
it, and holds more than the budget. Two simple ways out are wrong. If such tensors
counted from the start, others would be spilled for memory that cannot be had; if they
were always copied, nothing would be freed as long as they are kept. So it counts who
keeps a tensor when backward comes, as observed forwards have shown:

- What others have let go of by then is planned like all else. It leaves in its turn,
  and the graph lets go of it even if others have not yet: its memory is free when they
  do. If they keep it on this time, backward uses their memory, not the copy.
- What others still keep then neither counts nor leaves.

Others may change their habits. What they newly keep leaves in its turn, in vain; the
next forward knows. What they kept until backward before, and now let go of sooner, is
looked for whenever the library runs anyway: all such tensors when a forward begins or
ends and when backward begins; the next eight when a tensor is unpacked, or saved while
they might leave no room for it. What is free by then leaves at once. So the graph holds
more than the budget only between the last reference of others and the library's next
call, or its next few calls where others keep more than eight.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from stagehand.activations.books import Tally
from stagehand.activations.pieces import Allowance, Bundle, Extra, Handle, Piece, Scope
from stagehand.activations.room import Room
from stagehand.errors import StagehandInternalError
from stagehand.torch_private import call_unseen, graph_task, sequence_number, skipped

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Spill", "Tally"]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_STALE = 1000  # dead entries of `_live` that are tolerated, beside as many as live
_ref = weakref.ref


class Spill(Room):
    """Decides what leaves and what comes back, and keeps the books.

    Thread-safe: autograd unpacks in threads of its own. Dispatch modes see none of its
    copies: one may be that of a checkpointed region, which would count them.

    Args:
        device: Where the tensors are.
        carrier: Moves them.
        budget_bytes: Of saved tensors on the device.
        smallest_bytes: Storages below this stay.
        marks: Let the memory of the whole device set the budget.
        inflight_d2h: Bundles on their way to the host before planned ones wait.
        inflight_h2d: Bundles on their way back before those not yet needed wait.
    """

    # Saving

    def begin(self) -> Scope:
        """Begin a forward; return what stands for it."""
        self._device.refuse_capture("a forward whose saved tensors may leave")
        return call_unseen(self._begin)

    def _begin(self) -> Scope:
        with self._lock:
            self._begin_change()
            self._tidy()
            if self._kept:
                self._prune()
            if self._stuck:
                self._watch(len(self._stuck))
            if len(self._live) > 2 * len(self._kept) + _STALE:
                for key in [k for k, ref in self._live.items() if ref() is None]:
                    del self._live[key]
            self.lessons.settle(self.budget_bytes)
            scope = Scope(self._device.current_stream())
            self._is_torn = False
            return scope

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
        home = scope.streams[0] if self._has_streams else None
        current = self._device.current_stream

        def pack(saved: torch.Tensor) -> Any:
            if type(saved) is not _Tensor or saved.get_device() != place:
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
            allowance = scope.allowance
            room = allowance.room - nbytes
            if room >= 0 and (home is None or current() == home):
                allowance.room = room
                piece = Piece()
                piece.alias = alias = saved.detach()
                piece.version = alias._version
                piece.nbytes = nbytes
                piece.scope = scope
                piece.sequence = sequence_number()
                piece.cdata = 0
                piece.piece = piece.bundle = piece.extras = None
                allowance.pieces.append(_ref(piece))
                return piece
            if scope.off:
                return otherwise(saved)
            with lock:
                return call_unseen(self._save, saved, storage, nbytes, scope)

        if not self._is_skipped:  # once for all: they share their code
            self._is_skipped = True
            skipped(pack)
        return pack

    def _save(
        self,
        saved: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        scope: Scope,
    ) -> Piece | Extra:
        """Save a tensor, and count it or let older ones leave at once."""
        self._begin_change()
        if self._given:
            self._look()  # first, for what it finds is older
        scope.tensors += 1
        cdata, sequence = storage._cdata, sequence_number()
        if self._stuck and self._held + self._stuck_bytes + nbytes > self.budget_bytes:
            self._watch()
        known = self._known(cdata, saved)
        if known is not None:
            extra = Extra(saved.detach(), known, sequence)
            extra.number = next(self._numbers)
            self._is_torn = False
            return extra
        if self._marks is not None:
            self._read(self._marks, nbytes)
        if self._held + nbytes > self.budget_bytes:
            self._make_room(nbytes)
        piece = Piece()
        piece.begin(saved.detach(), nbytes, scope, sequence)
        piece.number = next(self._numbers)
        self._book(piece, _ref(piece), cdata)
        self._note(piece, saved)
        self._is_torn = False
        return piece

    def _note(self, piece: Piece, saved: torch.Tensor) -> None:
        """Note a piece for its forward: to recognize, observe or plan that."""
        scope = piece.scope
        if not scope.count:
            size = saved.numel() if saved.is_nested else saved.shape
            self.lessons.recognize(scope, (size, saved.dtype))
            scope.leads = scope.prefix is not None and scope.prefix.count > 0
            if scope.off:
                return
        scope.count += 1
        if self._has_streams:
            self._note_stream(scope)
        if scope.noted is not None:
            scope.noted.append((_ref(piece), piece.nbytes, piece.sequence))
            self.lessons.saved(scope, piece.sequence)
        if scope.leads:
            self._lead(piece, scope)
        if not (scope.leads or self._marks or scope.noted is not None):
            self._give(scope)

    def _give(self, scope: Scope) -> None:
        """Give a known forward all that is free, to keep tensors in without asking."""
        room = self.budget_bytes - self._held - self._stuck_bytes
        if room > 0:
            allowance = Allowance(scope, room)
            self._given.append(allowance)
            self._held += room
            scope.allowance = allowance  # last: what is used is counted

    def _note_stream(self, scope: Scope) -> None:
        """Note on which stream the forward runs: copies out wait for all of these."""
        stream = self._device.current_stream()
        if stream not in scope.streams:
            scope.streams.append(stream)

    def _lead(self, piece: Piece, scope: Scope) -> None:
        """Let a piece leave if it belongs to the planned prefix."""
        prefix = scope.prefix
        if prefix is None or piece.position >= prefix.count:
            scope.leads = False
            self._flush(scope)
        elif piece.position in prefix.skipped:
            self._kept.pop()
            self._held -= piece.nbytes
            self._set_aside(piece)
        else:
            self._gather(piece, scope)
        self._release()

    def _gather(self, piece: Piece, scope: Scope) -> None:
        """Put a piece into the open bundle; large ones travel alone."""
        is_large = piece.nbytes >= self._bundle_bytes
        if is_large and scope.open is not None:
            self._flush(scope)
        self._kept.pop()
        if is_large:
            bundle = Bundle(self._carrier.gone)
            bundle.add(piece)
            self._send_in_turn(bundle, scope)
            return
        if scope.open is None:
            self._open.append(scope)  # first: who is in there is found
            scope.open = Bundle(self._carrier.gone)
        scope.open.add(piece)
        if scope.open.nbytes >= self._bundle_bytes:
            self._flush(scope)

    # Coming back

    def restore(self, handle: Piece | Extra) -> torch.Tensor:
        """Return the tensor that a handle stands for, on the device."""
        alias = handle.alias
        piece: Piece = handle.piece or handle  # type: ignore[assignment]
        if alias is not None and alias._version != handle.version:
            handle.check()
        if alias is not None and not piece.scope.is_stirred:
            return alias
        return call_unseen(self._restore, handle, piece)

    def _restore(self, handle: Handle, piece: Piece) -> torch.Tensor:
        with self._lock:
            self._begin_change()
            found = handle.alias
            if found is None:
                found = self._bring(handle, piece)
            self._look_ahead(handle, piece)
            self._is_torn = False
            return found

    def _bring(self, handle: Handle, piece: Piece) -> torch.Tensor:
        bundle = piece.bundle
        if bundle is None:
            raise StagehandInternalError(f"{handle} is nowhere")
        handle.check()
        if self._used:
            self._drop_used(wanted=False)
        if bundle.back is None:
            storage = piece.kept_elsewhere()
            if storage is not None:
                self.lessons.correct(piece, free=False)
                return handle.view_elsewhere(storage)
            self.tally.demanded_count += 1
            if self._held + bundle.nbytes > self.budget_bytes:
                self._make_room(bundle.nbytes)
            self._fetch(bundle)
        if bundle.seen is None:
            self._used.append(weakref.ref(bundle))
        found = handle.view_back(self._carrier.receive(bundle), piece.start)
        bundle.due -= 1
        return found

    def _look_ahead(self, handle: Handle, piece: Piece) -> None:
        """Bring bundles that backward needs after a tensor, as far as there is room."""
        scope, task = piece.scope, graph_task()
        if task == -1:  # somebody looks at the graph
            return
        if task != scope.task:
            self._turn(piece, task)
            scope.turn(task)
        if self._carrier.gone:
            self._held -= self._carrier.reap()
        if self._kept:
            self._prune_newest()
        if self._stuck:
            self._watch()
        if scope.noted is not None:
            self.lessons.needed(scope, handle.sequence)
        coming = scope.coming
        while coming:
            bundle = coming[-1]()
            if bundle is None or bundle.back is not None or not bundle.is_away:
                coming.pop()
            elif not self._has_room(bundle.nbytes) or not self._may_fetch():
                return
            else:
                try:
                    self._fetch(bundle)
                except torch.OutOfMemoryError:  # others need the device's memory
                    return
                coming.pop()

    def _turn(self, first: Piece, task: int) -> None:
        """Note that a backward pass comes to a forward, and who keeps what by now.

        What others have let go of counts from now on, and may have to leave; the next
        forward of this kind plans with that.

        Args:
            first: The piece that is needed now. It leaves last.
            task: The backward pass.
        """
        scope = first.scope
        self._look()
        for ref, nbytes in scope.shared:
            piece = ref()
            if piece is None or piece.is_away:
                self.tally.freed_bytes += nbytes
            else:
                self.tally.stuck_count += 1
                self.lessons.correct(piece, free=False)
        scope.shared.clear()
        if task != self._turned:  # it may come to many forwards
            self._turned = task
            self._look_at_stuck(len(self._stuck))
        self.lessons.turn(scope, self.budget_bytes)
        if self._held > self.budget_bytes:
            item = weakref.ref(first), first.nbytes
            if item in self._kept:  # it leaves last
                self._kept.remove(item)
                self._kept.append(item)
            self._make_room(0)

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes fit, looking for dead pieces now and then."""
        if self._held + nbytes <= self.budget_bytes:
            return True
        self._unpruned += 1
        if self._unpruned * 8 < len(self._kept):
            return False
        self._tidy()
        if self._given:
            self._look()
        if self._kept:
            self._prune()
        return self._held + nbytes <= self.budget_bytes

    # Steps

    def end(self, scope: Scope, *, failed: bool) -> None:
        """End a forward.

        Args:
            scope: The forward.
            failed: Whether it has raised, so that nothing is learned from it.
        """
        call_unseen(self._end, scope, failed)

    def _end(self, scope: Scope, failed: bool) -> None:
        with self._lock:
            self._begin_change()
            unseen = len(scope.allowance.pieces)
            if unseen and (scope.bundles or scope.twins):
                self._look()
            else:
                self._take_back(scope.allowance)
                scope.tensors += unseen
                scope.count += unseen
            scope.ended = True
            if self._held > self.peak_bytes:
                self._note_peak()
            self.tally.saved_count += scope.count
            learned = False
            try:
                if scope.open is not None:
                    self._flush(scope)
                if self._leaving or self._waiting:
                    self._release()
                if self._stuck:
                    self._watch(len(self._stuck))
                learned = not failed
            finally:
                self.lessons.learn(scope, self.budget_bytes, failed=not learned)
            self._is_torn = False

    def abandon(self) -> None:
        """Give back all host memory; graphs that are alive can go backward still."""
        with self._lock:
            self._carrier.abandon()

    def close(self) -> None:
        """Wait for all copies and give back what dead pieces held."""
        self._carrier.engine.drain()
        with self._lock:
            self._begin_change()
            self._tidy()
            self._look()
            self._prune()
            self._is_torn = False
            self._carrier.pool.close()
