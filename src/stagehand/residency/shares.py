"""How models that take turns on one device divide its memory. Pure, no torch.

Note "What to keep". Model `i` keeps `kept[i]` bytes while others run. In its turn it
may take all but what the others keep, `limit[i]`, so that one ring is enough for all:
it belongs to whoever runs. Of its `n[i]` passes in a row the first finds what was kept,
the later ones what its limit allows. A round of all turns then takes at least

    sum over i of  seconds_i(kept[i]) + (n[i] - 1) * seconds_i(limit[i] - ring[i])

where `seconds_i(b)` is the least time of a pass with `b` bytes on the device. Where the
link is the limit each byte that model `i` keeps saves it one load and costs model `j`
`n[j] - 1`: models that run once each keep what they can, and a model with many passes
in a row gets the room of the others. The sum is convex in `kept`, so it is filled in
small pieces, each to whom it helps most.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

__all__ = ["Claim", "Share", "divide"]

_PIECES = 32
_FINER = 8  # parts of a piece that are tried where a whole one does not fit
_NOTHING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What one model could use."""

    budget: int
    """The most that it may take."""
    weights: int
    """What all of it takes."""
    floor: int
    """The least that it can run with."""
    ring: int
    """What its blocks stream through, beside what stays."""
    seconds: Callable[[int], float]
    """The least time of a pass with so many bytes on the device."""
    fixed: int = 0
    """What is there all the time, unless others need it."""
    bound: int = 0
    """What it cannot give up."""
    passes: int = 1
    """How many it runs in a row."""

    @property
    def most(self) -> int:
        """What it would take if it were alone."""
        return min(self.weights, self.budget)


@dataclass(frozen=True, slots=True)
class Share:
    """What one model gets."""

    limit: int
    """The most bytes it may hold while it runs."""
    kept: int
    """How many of them it need not give up while others run."""


def divide(
    cap: int,
    claims: Mapping[int, Claim],
    *,
    fixed: Mapping[int, int],
    guests: Collection[int] = (),
    apart: bool = False,
) -> dict[int, Share]:
    """Divide a device's memory.

    Args:
        cap: Bytes of all shares together.
        claims: By model.
        fixed: Models that keep exactly so many bytes, running or not.
        guests: Models that keep nothing.
        apart: Whether they run at once, so that each needs a ring of its own.

    Returns:
        For each model its share: `limit[i]` and what all others keep are no more than
        the cap, if what is fixed leaves anything. With `apart`, so are all limits
        together, if each can run then.
    """
    free = {who: claim for who, claim in claims.items() if who not in fixed}
    filling = _Filling(
        cap - sum(fixed.values()), free, free.keys() - set(guests), apart=apart
    )
    shares = {who: Share(nbytes, nbytes) for who, nbytes in fixed.items()}
    return {**shares, **filling.shares()}


class _Filling:
    """Finds what each model keeps of what can be kept.

    Args:
        pot: Bytes for all of them.
        claims: By model.
        keepers: Models that may keep anything.
        apart: Whether each needs its room at the same time as the others.
    """

    def __init__(
        self,
        pot: int,
        claims: Mapping[int, Claim],
        keepers: Collection[int],
        *,
        apart: bool,
    ) -> None:
        self._pot = pot
        self._claims = claims
        self._keepers = sorted(keepers)
        self._known: dict[tuple[int, int], float] = {}
        self._kept = {who: claims[who].bound for who in self._keepers}
        self._with_rings, self._apart = True, apart
        if not self._fits(self._kept):
            self._with_rings = False
        if not self._fits(self._kept):
            self._apart = False

    def shares(self) -> dict[int, Share]:
        """Return each model's share."""
        kept = self._fill()
        whole = sum(kept.values())
        shares = {}
        for who, claim in self._claims.items():
            own = kept.get(who, 0)
            limit = self._pot - whole + own
            if self._apart:
                limit = own + self._room(claim, own)
            shares[who] = Share(max(0, min(claim.budget, limit)), own)
        return shares

    def _fits(self, kept: Mapping[int, int]) -> bool:
        """Whether each model can run beside what the others keep."""
        rooms = [self._room(c, kept.get(who, 0)) for who, c in self._claims.items()]
        needed = sum(rooms) if self._apart else max(rooms, default=0)
        return sum(kept.values()) + needed <= self._pot

    def _room(self, claim: Claim, kept: int) -> int:
        """What a model takes in its turn, beside what it keeps."""
        if kept >= claim.most:
            return 0
        ring = min(claim.ring, claim.most - kept) if self._with_rings else 0
        return max(ring, claim.floor - kept)

    def _fill(self) -> dict[int, int]:
        kept = {who: claim.most for who, claim in self._claims.items()}
        kept = {who: kept[who] for who in self._keepers}
        if self._fits(kept):
            return kept
        kept, total = self._kept, self._seconds(self._kept)
        piece = least = max(1, (self._pot - sum(kept.values())) // _PIECES)
        least = max(1, least // _FINER)
        while piece >= least:
            tries = self._tries(kept, total, piece)
            if not tries:
                piece //= 2
                continue
            # Of what helps alike, the emptiest: so equal models keep equally much.
            slight = _NOTHING * total / max(1, self._pot)
            most = max(gain for gain, *_ in tries)
            near = [t for t in tries if t[0] >= most - slight]
            _, _, who, seconds, nbytes = min(near, key=lambda t: t[1:3])
            if seconds > total * (1 + _NOTHING):
                break  # others would load more than this saves
            kept = {**kept, who: nbytes}
            total = seconds
        return kept

    def _tries(
        self, kept: Mapping[int, int], total: float, piece: int
    ) -> list[tuple[float, float, int, float, int]]:
        """What a piece more would bring: (gain a byte, how full, who, round, kept)."""
        tries = []
        for who in self._keepers:
            claim = self._claims[who]
            more = min(piece, claim.most - kept[who])
            trial = {**kept, who: kept[who] + more}
            if more > 0 and self._fits(trial):
                seconds = self._seconds(trial)
                full = kept[who] / claim.weights
                gain = (total - seconds) / more
                tries.append((gain, full, who, seconds, trial[who]))
        return tries

    def _seconds(self, kept: Mapping[int, int]) -> float:
        """A round of all turns."""
        whole, seconds = sum(kept.values()), 0.0
        for who in self._keepers:
            claim = self._claims[who]
            seconds += self._pass(who, kept[who])
            if claim.passes > 1:
                limit = min(claim.budget, self._pot - whole + kept[who])
                later = self._pass(who, max(0, limit - claim.ring))
                seconds += (claim.passes - 1) * later
        return seconds

    def _pass(self, who: int, nbytes: int) -> float:
        known = self._known.get((who, nbytes))
        if known is None:
            known = self._known[who, nbytes] = self._claims[who].seconds(nbytes)
        return known
