"""A block's state: which steps it takes, and which it refuses by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagehand.core.states import DROPPED, SENT, BlockState, check_transition
from stagehand.errors import InvalidStateTransitionError
from stagehand.residency.residency import Residency

STATES = list(BlockState)


def in_state(state):
    residency = Residency(3, "blocks.3")
    residency.state = state
    return residency


def follows(before, after):
    try:
        check_transition("any", before, after)
    except InvalidStateTransitionError:
        return False
    return True


def test_new_block_is_nowhere_unused_and_unplanned():
    residency = Residency(3, "blocks.3")
    assert (residency.index, residency.name) == (3, "blocks.3")
    assert residency.state is BlockState.UNLOADED
    assert (residency.uses, residency.awaited, residency.stays) == (0, 0, False)


def test_block_goes_through_a_load_a_save_and_a_drop():
    residency = Residency(3, "blocks.3")
    for name in (
        *("HOST_STAGED", "PREFETCHING", "GPU_READY", "EVICTING", "HOST_STAGED"),
        *("PREFETCHING", "GPU_READY", "GPU_FREEING", "UNLOADED", "HOST_STAGED"),
        "UNLOADED",
    ):
        residency.to(BlockState[name])
        assert residency.state.name == name


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATES, repeat=2)))
def test_step_is_taken_if_the_table_allows_it_and_else_refused(before, after):
    residency = in_state(before)
    if follows(before, after):
        residency.to(after)
        assert residency.state is after
        return
    with pytest.raises(
        InvalidStateTransitionError, match=r"'blocks\.3' cannot go from"
    ):
        residency.to(after)
    assert residency.state is before


@pytest.mark.parametrize("path", [SENT, DROPPED])
@pytest.mark.parametrize("state", STATES)
def test_path_is_gone_whole_from_wherever_its_steps_allow(path, state):
    residency = in_state(state)
    if state is path[0] or follows(state, path[1]):
        residency.along(path)
        assert residency.state is path[-1]
        return
    with pytest.raises(InvalidStateTransitionError, match=f"from {state.name} to"):
        residency.along(path)
    assert residency.state is state


@given(st.lists(st.sampled_from(STATES)))
def test_state_is_always_one_that_allowed_steps_lead_to(wishes):
    residency = Residency(3, "blocks.3")
    for wish in wishes:
        before = residency.state
        try:
            residency.to(wish)
        except InvalidStateTransitionError:
            assert residency.state is before
        else:
            assert residency.state is wish
            assert follows(before, wish)
