"""Tests may run below torch's sanitizer, a mode that is active since torch's import."""

from collections.abc import Iterator

import pytest

from stagehand.torch_private import DispatchMode, dispatch_modes


class Mode(DispatchMode):
    """Sees every operator, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def active() -> Iterator[None]:
    with Mode():
        yield


@pytest.mark.parametrize("number", range(2))
def test_mode_that_was_active_before_a_test_is_still_there_in_the_next(number):
    assert dispatch_modes() == 1
