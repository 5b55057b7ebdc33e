"""The device of this folder's tests: each runs on a GPU, and as a rehearsal without."""

import os
from collections.abc import Iterator

import pytest
import torch

from gpu.places import ON_GPU, Gpu, Place, Rehearsal


@pytest.fixture(params=["rehearsal", ON_GPU])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The device under test, empty before and after."""
    if request.param == "gpu":
        at: Place = Gpu()
        # Only operators on single elements run on the host, and there are many.
        torch.set_num_threads(os.cpu_count() or 1)
    else:
        at = Rehearsal(request.getfixturevalue("sim"))
    at.synchronize()
    before = at.allocated_bytes()
    yield at
    torch.set_num_threads(1)
    if request.param == "gpu" and (left := at.left_bytes(before)) > 0:
        pytest.fail(f"{left} device bytes left")
