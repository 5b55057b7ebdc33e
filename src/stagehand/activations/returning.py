"""Brings bundles back, and lets go of what came back: used, or too early."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from stagehand.activations.books import Books

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagehand.activations.pieces import Bundle

__all__ = ["Returning"]


class Returning(Books):
    """The part of `Spill` that knows what came back."""

    def _fetch(self, bundle: Bundle) -> None:
        self._ahead.append(weakref.ref(bundle))  # first: what is there is counted
        self._carrier.fetch(bundle)
        self._held += bundle.nbytes
        due, tally = 0, self.tally
        for ref in bundle.members:
            piece = ref()
            if piece is not None:
                tally.restored_count += 1
                for handle in piece.handles():
                    due += handle.alias is None
        bundle.due = due
        tally.restored_bytes += bundle.nbytes
        if self._held > self.peak_bytes:
            self._note_peak()

    def _may_fetch(self) -> bool:
        limits, most = self.bounds.current, self.most_coming
        if most == 0 or limits.suppress_speculative or not self._carrier.may_fetch:
            return False
        return most is None or sum(1 for _ in self._coming()) < most

    def _coming(self) -> Iterator[Bundle]:
        """Yield what was fetched and not used yet, what is needed first at first."""
        for ref in tuple(self._ahead):
            bundle = ref()
            if bundle is None or bundle.back is None or bundle.seen is not None:
                self._ahead.remove(ref)
            else:
                yield bundle

    def _forget_used(self) -> None:
        """Forget what was fetched and is used, or gone."""
        for _ in self._coming():
            pass

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

    def _drop_used(self, *, wanted: bool = True) -> bool:
        """Let go of what came back and was unpacked; False if there is none.

        If the graph goes on to live, its bundles do, and would keep the memory.

        Args:
            wanted: Also what is wanted again: some backward passes end early.
        """
        dropped = False
        for ref in tuple(self._used):
            bundle = ref()
            if bundle is None or bundle.back is None:
                self._used.remove(ref)
            elif (wanted or bundle.due <= 0) and bundle.is_alone():
                self._drop(bundle)
                self._used.remove(ref)  # last: what is there is counted
                dropped = True
        return dropped

    def _drop(self, bundle: Bundle) -> None:
        self._carrier.drop(bundle)
        self._held -= bundle.nbytes
