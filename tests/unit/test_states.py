"""The table of residency states."""

import itertools

import pytest

from stagehand.core.states import BlockState, check_transition
from stagehand.errors import InvalidStateTransitionError

ALLOWED = {
    ("UNLOADED", "HOST_STAGED"),
    ("HOST_STAGED", "PREFETCHING"),
    ("HOST_STAGED", "UNLOADED"),
    ("PREFETCHING", "GPU_READY"),
    ("GPU_READY", "EVICTING"),
    ("GPU_READY", "GPU_FREEING"),
    ("EVICTING", "HOST_STAGED"),
    ("EVICTING", "UNLOADED"),
    ("GPU_FREEING", "UNLOADED"),
}
PAIRS = list(itertools.product(BlockState, repeat=2))


@pytest.mark.parametrize(
    ("before", "after"), [p for p in PAIRS if (p[0].name, p[1].name) in ALLOWED]
)
def test_transition_in_the_table_is_allowed(before, after):
    check_transition("blocks.0", before, after)


@pytest.mark.parametrize(
    ("before", "after"), [p for p in PAIRS if (p[0].name, p[1].name) not in ALLOWED]
)
def test_any_other_transition_is_refused_with_block_and_states(before, after):
    with pytest.raises(InvalidStateTransitionError) as caught:
        check_transition("blocks.0", before, after)
    message, _, may_follow = str(caught.value).partition("; from there it can go to ")
    assert message == f"block 'blocks.0' cannot go from {before.name} to {after.name}"
    assert {(before.name, name) for name in may_follow.split(", ")} == {
        pair for pair in ALLOWED if pair[0] == before.name
    }
