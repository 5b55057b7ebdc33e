"""Which of several models runs next: learned from what happened. No torch.

A *turn* is a stretch of passes of one model without a pass of another. What a turn was
like last time is expected again.
"""

from collections import deque

__all__ = ["Turns"]

_LENGTHS_KEPT = 2
_MOST_PASSES = 4  # more make no difference to who should have the room


class Turns:
    """Counts passes, by the number of the model. Not thread-safe."""

    def __init__(self) -> None:
        self._present: int | None = None
        self._passes = 0  # of the present turn
        self._lengths: dict[int, deque[int]] = {}
        self._follower: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"Turns({self._present}, pass {self._passes} of its turn)"

    def begin(self, who: int) -> bool:
        """Note that a pass begins; return whether `passes` may answer otherwise."""
        known = self.passes(who)
        if who == self._present:
            self._passes += 1
            return self.passes(who) != known
        before = self._present
        changed = False
        if before is not None:
            known = self.passes(before)
            kept = self._lengths.setdefault(before, deque(maxlen=_LENGTHS_KEPT))
            kept.append(self._passes)
            self._follower[before] = who
        self._present, self._passes = who, 1
        if before is not None:
            changed = self.passes(before) != known
        return changed

    def passes(self, who: int) -> int:
        """Return how many passes a turn has; 4 for more."""
        lengths = [*self._lengths.get(who, ())]
        if who == self._present:
            lengths.append(self._passes)
        return min(max(lengths, default=1), _MOST_PASSES)

    def coming(self) -> int | None:
        """Return whose pass is expected after the present one."""
        if self._present is None:
            return None
        lengths = self._lengths.get(self._present)
        if not lengths or min(lengths) != max(lengths) or self._passes < lengths[-1]:
            return self._present
        return self._follower.get(self._present, self._present)

    def forget(self, who: int) -> None:
        """A model has left."""
        self._lengths.pop(who, None)
        self._follower = {
            one: next_
            for one, next_ in self._follower.items()
            if who not in (one, next_)
        }
        if self._present == who:
            self._present = None
