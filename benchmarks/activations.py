"""What keeping saved tensors under a budget costs the host, for each tensor saved."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmarks.results import Result
from benchmarks.timing import take_turns
from stagehand.activations.carrier import Carrier
from stagehand.activations.pool import SlabPool
from stagehand.activations.saving import Saving
from stagehand.activations.spill import Spill
from stagehand.core.arena import Arena
from stagehand.core.device import find_device
from stagehand.core.ledger import Account
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import TransferEngine

__all__ = ["measure"]

_LAYERS = 600  # as many as a training step of a transformer saves
_TARGET_US = 2.5
_ROWS = 16  # 4 KiB a tensor: what is measured is the library, not the memory


def measure(rounds: int = 100) -> Iterator[Result]:
    """Yield the time of forward and backward for each saved tensor, over no hooks.

    On the host, where a copy is a copy in memory. The second figure is the library's
    own work where everything stays, over hooks that do nothing.
    """
    one = _ROWS * 64 * 4
    spills = [_spill(budget) for budget in (1 << 30, one * _LAYERS // 2)]
    roomy, tight = map(Saving, spills)
    functions = {
        "no hooks": _step(_nothing),
        "identity": _step(lambda: saved_tensors_hooks(_same, _same)),
        "everything stays": _step(lambda: _entered(roomy)),
        "half of it leaves": _step(lambda: _entered(tight)),
        "save_on_cpu": _step(save_on_cpu),
    }
    times = take_turns(functions, rounds=rounds)
    for spill in spills:
        spill.close()
    for name in functions:
        if name != "no hooks":
            yield Result.of(
                f"a saved tensor over no hooks, {name}",
                times[name].over(times["no hooks"], _LAYERS),
                "us",
                scale=1e6,
            )
    yield Result.of(
        "a saved tensor over identity hooks, everything stays",
        times["everything stays"].over(times["identity"], _LAYERS),
        "us",
        scale=1e6,
        target=_TARGET_US,
    )


def _spill(budget_bytes: int) -> Spill:
    device = find_device("cpu")
    account = Account("pinned memory", 1 << 40)
    pool = SlabPool(Arena("pinned memory", device.pinned, account))
    carrier = Carrier(device, TransferEngine(device, Counters()), pool)
    return Spill(device, carrier, budget_bytes=budget_bytes, smallest_bytes=4096)


@contextmanager
def _entered(saving: Saving) -> Iterator[None]:
    saving.enter()
    yield
    saving.leave(failed=False)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _step(hooks: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    x = torch.zeros(_ROWS, 64, requires_grad=True)

    def run() -> None:
        y = x
        with hooks():
            for _ in range(_LAYERS):
                y = y.sigmoid()  # saves what it returns
        y.backward(y)  # type: ignore[no-untyped-call]

    return run
