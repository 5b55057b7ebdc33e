"""How long state machines run: as ever in CI, and as long as one likes to find more."""

import os

from hypothesis import settings

EXPLORED = int(os.environ.get("EXPLORE") or 0)
"""Examples of each machine, all of them new; 0 for the few that are always the same."""


def running(examples: int, steps: int) -> settings:
    """Return a machine's settings: so many programs of so many steps."""
    return settings(max_examples=EXPLORED or examples, stateful_step_count=steps)
