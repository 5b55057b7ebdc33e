"""The device of this folder's tests: each runs on a GPU, and as a rehearsal without."""

from collections.abc import Iterator

import pytest

from gpu.places import Gpu, Place, Rehearsal


@pytest.fixture(params=["rehearsal", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The device under test, empty before and after."""
    if request.param == "gpu":
        at: Place = Gpu()
    else:
        at = Rehearsal(request.getfixturevalue("sim"))
    at.synchronize()
    before = at.allocated_bytes()
    yield at
    at.synchronize()
    if request.param == "gpu" and at.allocated_bytes() > before:
        pytest.fail(f"{at.allocated_bytes() - before} device bytes left")
