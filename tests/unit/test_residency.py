"""A block's state: which steps it takes, and which it refuses by name."""

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exploring import running
from stagehand.core.states import ARRIVED, DROPPED, SENT, BlockState, check_transition
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


@pytest.mark.parametrize("path", [SENT, ARRIVED, DROPPED])
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


# --------------------------------------------------------------------------- stateful


class ResidencyMachine(RuleBasedStateMachine):
    """A block's books against a table of who holds its bytes in each state.

    A load takes a stage, then a slot; a slot is given up with a copy or without.
    """

    FOLLOWERS = {  # noqa: RUF012
        "UNLOADED": {"HOST_STAGED"},
        "HOST_STAGED": {"PREFETCHING", "UNLOADED"},
        "PREFETCHING": {"GPU_READY"},
        "GPU_READY": {"EVICTING", "GPU_FREEING"},
        "EVICTING": {"HOST_STAGED", "UNLOADED"},
        "GPU_FREEING": {"UNLOADED"},
    }

    def __init__(self):
        super().__init__()
        self.residency = Residency(3, "blocks.3")
        self.state = "UNLOADED"
        self.counts = [0, 0, False]

    def goes(self, *names):
        """The last state that is reached on the way, and whether that is its end."""
        state = self.state
        for name in names:
            if name not in self.FOLLOWERS[state]:
                return state, False
            state = name
        return state, True

    def expect(self, act, names):
        self.state, whole = self.goes(*names)
        if whole:
            act()
            return
        with pytest.raises(InvalidStateTransitionError, match=f"from {self.state} to"):
            act()

    @rule(state=st.sampled_from(STATES))
    def step(self, state):
        self.expect(lambda: self.residency.to(state), [state.name])

    @rule(path=st.sampled_from([SENT, ARRIVED, DROPPED]))
    def go(self, path):
        """The first state of a path says where it usually begins, no more."""
        names = [state.name for state in path[1:]]
        self.expect(lambda: self.residency.along(path), names)

    @rule(uses=st.integers(0, 3), awaited=st.integers(0, 3), stays=st.booleans())
    def count(self, uses, awaited, stays):
        self.counts = [uses, awaited, stays]
        residency = self.residency
        residency.uses, residency.awaited, residency.stays = self.counts

    @invariant()
    def books_agree_with_the_model(self):
        residency = self.residency
        assert residency.state.name == self.state
        assert [residency.uses, residency.awaited, residency.stays] == self.counts
        assert (residency.index, residency.name) == (3, "blocks.3")


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = running(60, 30)
