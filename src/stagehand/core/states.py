"""Residency states of a block, and which may follow which."""

from enum import IntEnum
from itertools import pairwise

from stagehand.errors import InvalidStateTransitionError

__all__ = [
    "ALLOWED",
    "ARRIVED",
    "DROPPED",
    "SENT",
    "BlockState",
    "Path",
    "check_transition",
]


class BlockState(IntEnum):
    """Who holds a block's bytes.

    The store (host RAM or files) holds them in every state; what differs is who else
    does.
    """

    UNLOADED = 0
    """Nobody else."""
    HOST_STAGED = 1
    """Pinned memory too: a staging slab, or the store's own pinned image. Ready to be
    copied to the device."""
    PREFETCHING = 2
    """A device slot is being filled from pinned memory; its `filled` ticket says
    when."""
    GPU_READY = 3
    """A device slot, and the parameters point into it. If they were changed, a copy of
    the bytes may be on its way to the store."""
    EVICTING = 4
    """A device slot whose changed bytes are brought back to the store: the host waits,
    or has waited."""
    GPU_FREEING = 5
    """A device slot that is being given up without a copy: its bytes equal the
    store's."""


_FOLLOWERS: dict[BlockState, frozenset[BlockState]] = {
    BlockState.UNLOADED: frozenset({BlockState.HOST_STAGED}),
    BlockState.HOST_STAGED: frozenset({BlockState.PREFETCHING, BlockState.UNLOADED}),
    BlockState.PREFETCHING: frozenset({BlockState.GPU_READY}),
    BlockState.GPU_READY: frozenset({BlockState.EVICTING, BlockState.GPU_FREEING}),
    BlockState.EVICTING: frozenset({BlockState.HOST_STAGED, BlockState.UNLOADED}),
    BlockState.GPU_FREEING: frozenset({BlockState.UNLOADED}),
}
# Indexed by state: hashing enum members on every transition costs more than the check.
ALLOWED = tuple(
    tuple(after in _FOLLOWERS[before] for after in BlockState) for before in BlockState
)


Path = tuple[BlockState, ...]


def check_transition(name: str, before: BlockState, after: BlockState) -> None:
    """Do nothing if `after` may follow `before`.

    Args:
        name: The block's name, for the error.
        before: The state that the block is in.
        after: The state that it is about to take.

    Raises:
        InvalidStateTransitionError: If `after` may not follow; it names the block, both
            states and those that may follow.
    """
    if not ALLOWED[before][after]:
        allowed = ", ".join(state.name for state in sorted(_FOLLOWERS[before]))
        raise InvalidStateTransitionError(
            f"block {name!r} cannot go from {before.name} to {after.name}; from there "
            f"it can go to {allowed}"
        )


def _path(*states: BlockState) -> Path:
    """States of which each may follow the one before: checked here, once."""
    for before, after in pairwise(states):
        check_transition("any", before, after)
    return states


SENT = _path(BlockState.UNLOADED, BlockState.HOST_STAGED, BlockState.PREFETCHING)
"""A block in a pinned image of its own needs no staging."""

ARRIVED = _path(BlockState.PREFETCHING, BlockState.GPU_READY)
"""The block is about to be used, or given up, behind the copy."""

DROPPED = _path(BlockState.GPU_READY, BlockState.GPU_FREEING, BlockState.UNLOADED)
"""A clean block's slot is given up at once."""
