"""Settings for all tests, and the fixture of those that run on the simulated device.

The simulated device is loaded before anything is collected, so that whether torch has
an accelerator does not depend on which tests run, or in which order. It cannot live
beside a real one: GPUs are hidden, except from `pytest -m gpu`, which runs only the
tests that need one and leaves the simulated device out.
"""

import gc
import os
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

from exploring import EXPLORED
from stagehand.torch_private import dispatch_modes, pop_saved_hooks, top_saved_hooks

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# One order of summation on every machine.
torch.set_num_threads(1)

_at_any_pace = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("stagehand", _at_any_pace, derandomize=True)
hypothesis.settings.register_profile("explore", _at_any_pace)
hypothesis.settings.load_profile("explore" if EXPLORED else "stagehand")

_PASSED = pytest.StashKey[bool]()
_GPU_TESTS = Path(__file__).with_name("gpu")
_PATIENCE = 120  # seconds until a test gives up


def _on_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_configure(config: pytest.Config) -> None:
    if _on_gpu(config):
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    try:
        from simulated import sim_device  # noqa: F401
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m gpu` import no other tests: some load the simulated device."""
    there = (collection_path, *collection_path.parents)
    around = _GPU_TESTS in there or collection_path in _GPU_TESTS.parents
    return True if _on_gpu(config) and not around else None


def _place(item: pytest.Item) -> int:
    """Which files come first. A worker takes a file at a time: short ones fill up."""
    if item.path.stem.endswith("any_order"):
        return 0
    # They collect garbage thousands of times: before others have imported much.
    return 1 if item.path.stem.endswith("failures") else 2


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if _on_gpu(config) and torch.cuda.is_available():
        return
    items.sort(key=_place)
    missing = "no CUDA device" if _on_gpu(config) else "needs `pytest -m gpu`"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections: with it each takes 0.3 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let libraries end as they do, without a word about what is left."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test passed, and show its races if it failed."""
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
        if report.failed and "sim" in getattr(item, "fixturenames", ()):
            from simulated import sim_device

            report.sections.append(("races", "\n".join(sim_device.races())))
    return report


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("stagehand")}


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread of the library running.

    Who failed by itself is not waited for: its traceback keeps what would end them.
    """
    before = _threads()
    yield
    if not request.node.stash.get(_PASSED, False):
        return
    if _threads() - before:
        gc.collect()  # what was dropped without being closed has its chance to close
    until = time.monotonic() + _PATIENCE
    for thread in _threads() - before:  # who was told to end may not be there yet
        thread.join(max(0.0, until - time.monotonic()))
    if left := _threads() - before:
        pytest.fail(f"threads left running: {sorted(t.name for t in left)}")


@pytest.fixture(autouse=True)
def no_mode_left() -> Iterator[None]:
    """Fail a test that leaves a mode of torch's or hooks for saved tensors active.

    Under a function mode attention is not fused, in tests to come either. What was
    there before any test stays: torch's sanitizer is, from the import of torch on.
    """
    before = dispatch_modes()
    yield
    left: list[object] = []
    while torch._C._len_torch_function_stack():
        left.append(torch._C._pop_torch_function_stack())
    while dispatch_modes() > before:
        left.append(torch._C._pop_torch_dispatch_stack(None))
    while (hooks := top_saved_hooks()) is not None:
        left.append(hooks)
        pop_saved_hooks()
    if left:
        pytest.fail(f"left active: {left}")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whatever tests ran before in this process."""
    torch.manual_seed(0)


def _held(sim: ModuleType) -> dict[str, int]:
    from stagehand.core.arena import live_leases

    return {
        "device bytes": sim.allocated_bytes(),
        "pinned bytes": sim.pinned_bytes(),
        "leases": live_leases(),
    }


def _left(sim: ModuleType, before: dict[str, int]) -> list[str]:
    after = _held(sim)
    return [
        f"{after[what] - before[what]} {what} left"
        for what in before
        if after[what] > before[what]
    ]


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module `simulated.sim_device`, reset.

    Fails a test that leaves behind a race, device or pinned bytes, or a lease. A test
    that provokes races takes them off the record with `sim.expect_races()`. A test that
    failed by itself is not examined: its traceback keeps its tensors alive.
    """
    if _on_gpu(request.config):
        pytest.fail("the simulated device is not loaded under `-m gpu`")
    from simulated import sim_device

    sim_device.reset()
    before = _held(sim_device)
    yield sim_device
    if not request.node.stash.get(_PASSED, False):
        return
    torch.accelerator.synchronize()  # queued copies keep their host memory
    if _left(sim_device, before):
        # Autograd's thread lets go of its last graph when it takes up the next one.
        torch.ones(1, device="hpu", requires_grad=True).sum().backward()
        gc.collect()
    if found := _left(sim_device, before) + sim_device.races():
        pytest.fail("\n".join(found))
