"""A block's state and what keeps it where it is. No torch, no copies: the books."""

from stagehand.core.states import ALLOWED, BlockState, Path, check_transition

__all__ = ["Residency"]


class Residency:
    """The state of one block.

    Invariants: `uses` counts the modules that run with the block now; `awaited` counts
    the coming uses that the look-ahead has already passed; a block with either is never
    evicted. `stays` means that the plan keeps the block for good.
    """

    __slots__ = ("awaited", "index", "name", "state", "stays", "uses")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.state = BlockState.UNLOADED
        self.uses = 0
        self.awaited = 0
        self.stays = False

    def to(self, state: BlockState) -> None:
        """Go to another state.

        Raises:
            InvalidStateTransitionError: If it cannot follow the present one.
        """
        if not ALLOWED[self.state][state]:
            check_transition(self.name, self.state, state)
        self.state = state

    def along(self, path: Path) -> None:
        """Go to the end of a path, in whose middle nothing has to wait.

        Raises:
            InvalidStateTransitionError: If a step cannot follow; those before it are
                taken.
        """
        if self.state is not path[0]:
            for state in path[1:]:
                self.to(state)
        self.state = path[-1]
