"""The simulated accelerator of the tests, for benchmarks in virtual time."""

import sys
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "load_simulated_device", "reach_tests"]

ROOT = Path(__file__).resolve().parents[1]


def reach_tests() -> None:
    """Let modules of `tests/` be imported."""
    tests = str(ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)


def load_simulated_device() -> ModuleType:
    """Make the simulated device this process's accelerator, and return it."""
    reach_tests()
    from simulated import sim_device

    return sim_device
