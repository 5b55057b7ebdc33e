"""Makes room: the oldest leave, and memory is let go behind their copies."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from stagehand.activations.carrier import Leaving
from stagehand.activations.pieces import NOTHING, Allowance, Bundle, Piece, Scope
from stagehand.activations.returning import Returning

if TYPE_CHECKING:
    import torch

    from stagehand.core.ledger import Watermarks

__all__ = ["Room"]

_STUCK_LOOKS = 8  # at pieces that others keep, at a time
_READINGS = 8  # of the device's memory between the watermarks


class Room(Returning):
    """The part of `Spill` that lets pieces leave."""

    # After an interrupt, or an error

    def _begin_change(self) -> None:
        """Begin a call that changes the books: it ends when nothing is torn again."""
        if self._is_torn:
            self._count_anew()
        self._is_torn = True

    def _count_anew(self) -> None:
        """Count all that is there, where a call was cut short as it changed the books.

        It may have come to any of its lines. So whatever holds memory is noted before
        it does, until it no more does; and what is noted nowhere is kept: what has not
        been sent yet stays, and leaves in its turn.
        """
        self._leaving = deque(sent for sent in self._leaving if hasattr(sent, "done"))
        leaving = {id(ref()) for sent in self._leaving for ref in sent.pieces}
        # What waits in bundles is among those that live: no other has its storage. What
        # was put aside, and kept again, may not be.
        refs = *self._live.values(), *(ref for ref, _ in self._kept)
        aside = {
            id(piece): (ref, nbytes)
            for ref, nbytes in self._stuck
            if (piece := ref()) is not None and id(piece) not in leaving
        }
        pieces = {id(piece): piece for ref in refs if (piece := ref()) is not None}
        kept = [
            piece
            for key, piece in pieces.items()
            if piece.alias is not None and key not in leaving and key not in aside
        ]
        for piece in kept:
            piece.bundle = piece.twin = None
        for scope in self._open:
            scope.open = None
        self._open.clear()
        self._waiting.clear()
        kept.sort(key=lambda piece: piece.number)
        self._kept = deque((weakref.ref(piece), piece.nbytes) for piece in kept)
        self._stuck = deque(aside.values())
        self._stuck_bytes = sum(nbytes for _, nbytes in self._stuck)
        fetched = *self._ahead, *self._used
        back = {bundle for ref in fetched if (bundle := ref()) is not None}
        self._held = (
            sum(piece.nbytes for piece in kept)
            + self._leaving_bytes
            + sum(allowance.given for allowance in self._given)
            + sum(bundle.nbytes for bundle in back if bundle.back is not None)
            + self._carrier.gone_bytes
        )

    # What was kept without asking

    def _known(self, cdata: int, saved: torch.Tensor) -> Piece | None:
        """Return the piece that has a tensor's bytes, here or on the host."""
        ref = self._live.get(cdata)
        piece = None if ref is None else ref()
        if piece is None:
            return None
        if piece.alias is None and (piece.is_away or piece.is_changed()):
            return None
        bundle = piece.bundle
        if bundle is not None and bundle.left is not None and not _is_rooted(saved):
            return None  # its bytes may be younger than the copy
        return piece

    def _book(self, piece: Piece, ref: weakref.ref[Piece], cdata: int) -> None:
        """Count a piece as the newest that is kept."""
        piece.cdata = cdata
        self._live[cdata] = ref
        self._held += piece.nbytes
        self._kept.append((ref, piece.nbytes))

    def _look(self) -> None:
        """Count what forwards have kept in their allowances, and end these.

        Another thread may be about to keep something in one, so an allowance of a
        forward that goes on is looked at once more next time.
        """
        for allowance in tuple(self._given):
            scope = None if allowance.scope is None else allowance.scope()
            if scope is not None:
                if scope.allowance is allowance:
                    scope.allowance = NOTHING
                self._look_at(allowance.pieces, scope)
            if scope is None or scope.ended or not allowance.given:
                self._given.remove(allowance)
            self._held -= allowance.given
            allowance.given = allowance.room = 0

    def _look_at(self, refs: list[weakref.ref[Piece]], scope: Scope) -> None:
        """Count pieces that a forward has kept, in order, without asking."""
        count = len(refs)
        for ref in refs[:count]:
            piece = ref()
            scope.tensors += 1
            scope.count += 1
            if piece is None or piece.alias is None:
                continue
            if piece.cdata or piece.piece is not None:
                continue  # looked at, before an interrupt came
            piece.number = next(self._numbers)
            piece.position = scope.count - 1
            cdata = piece.alias.untyped_storage()._cdata
            known = self._known(cdata, piece.alias)
            if known is None:
                self._book(piece, ref, cdata)
            else:
                scope.count -= 1
                piece.join(known)
        del refs[:count]

    def _take_back(self, allowance: Allowance) -> None:
        """Take back the part of an allowance that is not used."""
        if allowance.given > 0:
            self._held -= allowance.room
            allowance.given -= allowance.room
            allowance.room = 0

    # Sending

    def _flush(self, scope: Scope) -> None:
        """Send the open bundle, or let it wait for its turn."""
        bundle = scope.open
        if bundle is None:
            return
        scope.open = None
        self._open.remove(scope)
        self._send_in_turn(bundle, scope)

    def _send_in_turn(self, bundle: Bundle, scope: Scope) -> None:
        """Send a bundle behind those that wait, or let it wait with them."""
        if self._waiting:
            self._send_waiting()
        if self._waiting or not self._may_send():
            self._waiting.append((scope, bundle))
        else:
            self._send(bundle, scope)

    def _send_waiting(self, *, at_once: bool = False) -> None:
        """Send bundles that wait, as many as may be under way at a time, or all."""
        while self._waiting and (at_once or self._may_send()):
            scope, bundle = self._waiting.popleft()
            self._send(bundle, scope)

    def _may_send(self) -> bool:
        """Whether another bundle may be on its way to the host."""
        most = self.most_leaving
        if most is not None and len(self._leaving) >= most:
            return False
        return self._carrier.may_send()

    def _send(self, bundle: Bundle, scope: Scope) -> None:
        """Queue the copies of a bundle that still has pieces to send."""
        leaving = Leaving(scope.streams)
        pieces = leaving.take(bundle.members)
        if pieces:
            scope.bundles.append(weakref.ref(bundle))
            scope.is_stirred = True
            self._leaving.append(leaving)  # first: the copies read the sources
            self._carrier.send(bundle, pieces, leaving)
            self.tally.spilled_bytes += leaving.nbytes
        self._held -= bundle.counted - leaving.nbytes

    # Room

    def _watch(self, most: int = _STUCK_LOOKS) -> None:
        """Count pieces that others have let go of, and make room if that takes any."""
        if self._look_at_stuck(most) and self._held > self.budget_bytes:
            self._make_room(0)

    def _make_room(self, nbytes: int) -> None:
        """Let the oldest leave until so many bytes more fit."""
        self._look()
        self.peak_bytes = max(self.peak_bytes, self._held)
        self._tidy()
        self._prune()
        limit = self.budget_bytes - nbytes
        self._look_at_stuck()
        while self._held > limit:
            if self._cancel():
                continue
            for scope in tuple(self._open):
                self._flush(scope)
            self._send_waiting(at_once=True)
            while (
                self._kept and (excess := self._held - self._leaving_bytes - limit) > 0
            ):
                self._send_oldest(excess)
            if not self._leaving and self._drop_used():
                continue
            if not self._leaving:
                self.tally.over_count += 1
                return
            stream = self._device.current_stream()
            self._carrier.let_pass(self._leaving[0], stream)
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
                self._held -= nbytes
            elif not self._may_leave(piece):
                self._held -= nbytes
                self._set_aside(piece)
            else:
                first = first or piece
                bundle.add(piece)
        if first is not None:
            self._send(bundle, first.scope)

    def _may_leave(self, piece: Piece) -> bool:
        """Whether a piece may leave to make room.

        One that others keep may, if in earlier forwards of the kind they had let go of
        it when backward came: then its memory is free when they do so again.
        """
        if not piece.is_plain():
            return False
        if piece.can_go():
            return True
        scope, number = piece.scope, piece.position
        was_free = number < len(scope.saves) and scope.saves[number].free
        return was_free and scope.task == -1 and not piece.is_changed()

    def _release(self) -> None:
        """Free what is known to have left, in order."""
        while self._leaving and self._leaving[0].done.query():
            self._let_go()
        if self._waiting:
            self._send_waiting()

    def _let_go(self) -> None:
        """Free the oldest that has left. Compute is behind the copy."""
        leaving = self._leaving[0]
        for ref in leaving.pieces:
            piece = ref()
            if piece is None or piece.alias is None:  # an interrupt came before this
                continue
            if piece.is_changed():
                self._set_aside(piece)
            else:
                self._free(piece, ref)
        self._held -= leaving.nbytes
        self._leaving.popleft()  # last: what is there is counted

    def _free(self, piece: Piece, ref: weakref.ref[Piece]) -> None:
        """Let a piece go. What others keep is free when they let go of it."""
        self.tally.spilled_count += 1
        if piece.can_go(others=1):
            piece.free(shared=False)
            self._live.pop(piece.cdata, None)
            self.tally.freed_bytes += piece.nbytes
        else:
            piece.free(shared=True)
            piece.scope.shared.append((ref, piece.nbytes))

    def _set_aside(self, piece: Piece) -> None:
        """Count a piece no more: others keep its memory, or have changed it."""
        self.tally.stuck_count += 1
        self._stuck.append((weakref.ref(piece), piece.nbytes))
        self._stuck_bytes += piece.nbytes
        piece.scope.is_stirred = True

    def _look_at_stuck(self, most: int = _STUCK_LOOKS) -> bool:
        """Look whether others have let go of some of what they kept."""
        found = []
        for _ in range(min(len(self._stuck), most)):
            item = self._stuck[0]
            piece = item[0]()
            if piece is not None and not (piece.can_go() and piece.is_plain()):
                self._stuck.rotate(-1)
                continue
            self._stuck.popleft()
            self._stuck_bytes -= item[1]
            if piece is not None:
                self._held += item[1]
                found.append(item)
                if piece.scope.task == -1:  # and they have not in forwards before
                    self.lessons.correct(piece, free=True)
        self._kept.extendleft(reversed(found))
        return bool(found)

    def _tidy(self) -> None:
        """Let go of what nobody needs any more, and of what has left."""
        self._held -= self._carrier.reap()
        for allowance in tuple(self._given):
            if allowance.scope is not None and allowance.scope() is None:
                self._given.remove(allowance)
                self._held -= allowance.given
        for scope in tuple(self._open):
            if scope.open is not None and not scope.open.living():
                self._flush(scope)  # an interrupt kept the forward from ending
        if self._leaving or self._waiting:
            self._release()
        for leaving in tuple(self._leaving):
            if all(ref() is None for ref in leaving.pieces):
                # Only the copy needs the memory now.
                self._carrier.let_pass(leaving, self._device.current_stream())
                self._held -= leaving.nbytes
                self._leaving.remove(leaving)
        if self._used:
            self._drop_used(wanted=False)
        if self._ahead:
            self._forget_used()

    def _prune(self) -> None:
        """Count dead pieces no more."""
        kept = self._kept
        for _ in range(len(kept)):
            item = kept.popleft()
            if item[0]() is None:
                self._held -= item[1]
            else:
                kept.append(item)
        self._unpruned = 0

    def _prune_newest(self) -> None:
        """Count the newest pieces no more that are dead: backward frees these first."""
        kept = self._kept
        while kept and kept[-1][0]() is None:
            self._held -= kept.pop()[1]

    # Watermarks

    def _read(self, marks: Watermarks, nbytes: int) -> None:
        """Let the device's memory set the budget, now and then."""
        self._unread += nbytes
        if self._unread * _READINGS < marks.high_bytes - marks.low_bytes:
            return
        self._unread = 0
        allocated = self._device.allocated_bytes()
        if allocated is not None:
            self._tidy()
            self.budget_bytes = marks.target(self.budget_bytes, self._held, allocated)

    def let_write(self, tensor: torch.Tensor) -> None:
        """Let the current stream wait for a copy of what it is about to change."""
        with self._lock:
            ref = self._live.get(tensor.untyped_storage()._cdata)
            piece = None if ref is None else ref()
            bundle = None if piece is None else piece.bundle
            if bundle is not None and bundle.left is not None:
                self._carrier.wait(bundle.left, self._device.current_stream())


def _is_rooted(tensor: torch.Tensor) -> bool:
    """Whether a tensor's version is that of all of its storage.

    Not for parts that were cut unseen, as `torch.unsafe_chunk` does: others may be
    written after one was saved, and its version does not tell.
    """
    base = tensor if tensor._base is None else tensor._base
    return base.numel() * base.element_size() == base.untyped_storage().nbytes()
