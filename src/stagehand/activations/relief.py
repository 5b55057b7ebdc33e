"""Whether spilling lowers the peak of device memory, or the peak is elsewhere."""

from __future__ import annotations

__all__ = ["Relief"]

_LEVELS = 8


class Relief:
    """Readings of one step: how high memory was while how much was away.

    A peak that comes while nothing is away (in a recompute near the end of backward,
    say) is not lowered by spilling. Readings are slow on some devices, so they are made
    at a few levels only.

    Args:
        away_bytes: What is on the host when backward begins.
        allocated_bytes: What all tensors take on the device then.
        peak_bytes: The most that they have taken so far.
    """

    def __init__(self, away_bytes: int, allocated_bytes: int, peak_bytes: int) -> None:
        self.most_bytes = away_bytes
        self._without = allocated_bytes + away_bytes
        self._first_peak = self._peak = peak_bytes
        self._level = _LEVELS
        self._away = away_bytes  # at the latest reading

    def is_due(self, away_bytes: int) -> bool:
        """Whether enough has come back since the last reading."""
        return self._level_of(away_bytes) < self._level

    def _level_of(self, away_bytes: int) -> int:
        return -(-away_bytes * _LEVELS // self.most_bytes) if self.most_bytes else 0

    def read(self, away_bytes: int, allocated_bytes: int, peak_bytes: int) -> None:
        """Note the peak so far, and what is away and allocated now.

        If the peak has grown, as much may have been away as at the reading before.
        """
        self._without = max(self._without, allocated_bytes + away_bytes)
        self._level = self._level_of(away_bytes)
        if peak_bytes > self._peak:
            self._peak = peak_bytes
            if self._away:
                self._without = max(self._without, peak_bytes + self._away)
        self._away = away_bytes

    def is_useless(self) -> bool:
        """Whether the step's peak would be the same without spilling.

        Only a peak that was seen to come counts: an older one says nothing. It must be
        clearly higher, for what is short-lived was not seen.
        """
        grew = self._peak > self._first_peak
        return grew and self._without + self.most_bytes <= self._peak
