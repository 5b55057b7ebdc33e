"""What a block costs over the bare model's, in models of several depths in turns.

A step of few blocks fits into a moment in which the machine is fast, and one of many
does not. So what is timed is as many blocks at each depth: a part of a deep model's
step, or several steps of a shallow one. The smallest time of each part counts, and all
depths have their turn in each round.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from benchmarks.models import LOOKAHEAD, Stack, streamed_blocks
from benchmarks.results import Result, until_met
from benchmarks.timing import Times, in_turns, take_turns
from stagehand.runtime import Runtime

__all__ = ["SHARES", "Cost", "Pair", "alone", "by_parts", "growth", "over_bare"]

_SETTLING = 6  # steps until the order is learned, timed once and planned for good
_REPLANNED = 2  # until what another budget keeps has moved
_TURNS = 3  # of a shallow model in each round, after one that is not counted
_ALONE = 8  # times as many turns of a model that is timed alone
_TARGET_GROWTH = 1.2
_NO_TIME = Times(0.0, 0.0)

# Parts of all blocks' bytes; with none, only the ring of slots is left.
SHARES = {"all": 2.0, "a third": 1 / 3, "none": 0.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block takes in a model of some depth."""

    own: Times
    """Over the bare model's."""
    bare: Times


RowOf = Callable[[str, int, Cost], Result]
"""Of the name of a share, a depth, and a block's cost."""
Grown = Callable[[str, Mapping[int, Cost]], Iterable[Result]]
"""Of the name of a share, and a block's cost at all depths."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two equal models of which one streams, and what is timed of both."""

    bare: Stack
    model: Stack
    runtime: Runtime
    """Of `model`."""
    run_of: Callable[[Stack], Callable[[], object]]
    """Returns one step of a model."""
    uses: int = 1
    """How often a step uses each block."""

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.model.blocks)

    def settle(self, share: float) -> None:
        """Keep this part of all bytes, and run until that is so."""
        sizes = [block.nbytes for block in streamed_blocks(self.runtime)]
        ring = (LOOKAHEAD + 1) * max(sizes)
        stays = self.runtime._parts.blocks[0].slot_nbytes  # adapters, if there are any
        self.runtime.set_budget(stays + max(ring, int(share * sum(sizes))))
        run = self.run_of(self.model)
        is_timed = self.runtime._parts.steering.compute_seconds is not None
        for _ in range(_REPLANNED if is_timed else _SETTLING):
            run()

    def timed(self, part: int) -> dict[str, Callable[[], Sequence[float]]]:
        """Return what times steps of both models, by name."""
        return {
            f"bare {self.depth}": _timed(self, self.bare, part),
            f"streamed {self.depth}": _timed(self, self.model, part),
        }

    def cost(self, times: Mapping[str, Times]) -> Cost:
        """Return what a block costs, of times by name."""
        streamed, bare = times[f"streamed {self.depth}"], times[f"bare {self.depth}"]
        return Cost(streamed.over(bare, self.depth), bare.over(_NO_TIME, self.depth))


def over_bare(
    pairs: Sequence[Pair],
    row_of: RowOf,
    grown: Grown,
    *,
    part: int,
    rounds: int,
) -> Iterator[Result]:
    """Yield what is made of a block's cost at each depth, share by share.

    Models that are a part long are timed once more, alone, as in `alone`. All runtimes
    are shut down at the end.

    Args:
        pairs: One for each depth.
        row_of: Makes a result for each depth.
        grown: Makes results of a share's name and the costs at all depths.
        part: How many uses of blocks are timed as one.
        rounds: How often each model has its turn; more often where a target is missed.
    """
    try:
        for share in SHARES:
            for pair in pairs:
                pair.settle(SHARES[share])

            def growths(
                times: Mapping[str, Times], share: str = share
            ) -> Iterable[Result]:
                return grown(share, {pair.depth: pair.cost(times) for pair in pairs})

            timed = {
                name: function
                for pair in pairs
                for name, function in pair.timed(part).items()
            }
            times = in_turns(timed, rounds=rounds, until=until_met(growths))
            for pair in pairs:
                if pair.depth == part:
                    yield _alone(pair, partial(row_of, share, part), rounds=rounds)
                else:
                    yield row_of(share, pair.depth, pair.cost(times))
            yield from growths(times)
    finally:
        for pair in pairs:
            pair.runtime.shutdown()


def alone(pair: Pair, row_of: RowOf, *, rounds: int) -> Iterator[Result]:
    """Yield what is made of a block's cost in a model that is timed with no other.

    It has the processor's caches for itself, and more turns. Otherwise as `over_bare`.
    """
    try:
        for share in SHARES:
            pair.settle(SHARES[share])
            yield _alone(pair, partial(row_of, share, pair.depth), rounds=rounds)
    finally:
        pair.runtime.shutdown()


def _alone(pair: Pair, row_of: Callable[[Cost], Result], *, rounds: int) -> Result:
    def rows(times: Mapping[str, Times]) -> Iterator[Result]:
        yield row_of(pair.cost(times))

    (row,) = rows(
        take_turns(
            {
                f"bare {pair.depth}": pair.run_of(pair.bare),
                f"streamed {pair.depth}": pair.run_of(pair.model),
            },
            rounds=_ALONE * rounds,
            until=until_met(rows),
        )
    )
    return row


def growth(what: str, costs: Mapping[int, Cost], few: int, many: int) -> Result:
    """Return what a block of many costs over one of few.

    Where the modules alone grow as well, and what comes on top of them by no more than
    the target beyond that, it is for the processor's caches: a few blocks fit one that
    many do not.
    """
    own = costs[many].own.part_of(costs[few].own)
    bare = costs[many].bare.part_of(costs[few].bare).smallest
    caches = f"bare blocks take {bare:.2f} times as long as few, which fit a cache"
    return Result.of(
        what,
        own,
        "x",
        target=_TARGET_GROWTH,
        why=caches if own.smallest <= bare * _TARGET_GROWTH else "",
    )


def _timed(pair: Pair, model: Stack, part: int) -> Callable[[], Sequence[float]]:
    """Return what times steps of one model, by parts of as many uses of blocks."""
    run = pair.run_of(model)
    uses = pair.depth * pair.uses
    if uses > part:
        once = partial(by_parts, model, run, part)
    else:
        once = partial(_together, run, part // uses)
    if pair.depth > part:
        return once
    return partial(_again, run, once)


def by_parts(model: Stack, run: Callable[[], object], part: int) -> list[float]:
    """Time one step by its parts, there and back."""
    model.part, model.marks = part, (marks := [time.thread_time()])
    run()
    marks.append(time.thread_time())
    model.marks = None
    return [end - start for start, end in pairwise(marks)]


def _together(run: Callable[[], object], steps: int) -> list[float]:
    """Time several steps as one."""
    start = time.thread_time()
    for _ in range(steps):
        run()
    return [(time.thread_time() - start) / steps]


def _again(
    run: Callable[[], object], once: Callable[[], Sequence[float]]
) -> list[float]:
    """Time a shallow model's step several times, each as a part of their mean.

    So the smallest time of a part is that of as many as in a deep model: one a round.
    What other models have pushed out of the caches comes back first.
    """
    run()
    return [seconds / _TURNS for _ in range(_TURNS) for seconds in once()]
