"""The device of this folder's tests: each runs on a GPU, and as a rehearsal without."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from gpu.places import ON_GPU, Gpu, Place, Rehearsal


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v, say at once what was measured, and why a test failed.

    The rest is said when all are done: a machine may be gone before.
    """
    if report.when != "call" or report.skipped:
        return None
    said = [f"{name}: {value}" for name, value in report.user_properties]
    if (crash := getattr(report.longrepr, "reprcrash", None)) is not None:
        said.append(crash.message.partition("\n")[0])
    if not said:
        return None
    letter = "." if report.passed else "F"
    return report.outcome, letter, f"{report.outcome.upper()} ({'; '.join(said)})"


@pytest.fixture(autouse=True)
def _regions_run_to_their_end() -> Iterator[None]:
    """Under TORCH_CUDA_SANITIZER no exception may pass by a tensor of the device.

    One that ends a checkpointed region early does: the sanitizer's own code, which
    runs when the tensor is freed, loses it.
    """
    sanitized = "TORCH_CUDA_SANITIZER" in os.environ
    with set_checkpoint_early_stop(False) if sanitized else nullcontext():
        yield


@pytest.fixture(params=["rehearsal", ON_GPU])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The device under test, empty before and after."""
    if request.param == "gpu":
        at: Place = Gpu()
        # Only operators on single elements run on the host, and there are many.
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    else:
        at = Rehearsal(request.getfixturevalue("sim"))
    at.synchronize()
    before = at.allocated_bytes()
    yield at
    at.ends.close()
    torch.set_num_threads(1)
    if request.param == "gpu" and (left := at.left_bytes(before)) > 0:
        pytest.fail(f"{left} device bytes left")
