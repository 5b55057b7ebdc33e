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
_LARGE_LAYERS = 32
_LARGE_ROWS = 4096  # 1 MiB a tensor
_STAYING = 2
_TARGET_COPIES = 1.1


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
    yield _over_copies(max(1, rounds // 5))


def _over_copies(rounds: int) -> Result:
    """Return what a MiB that leaves costs, over copying it there and back."""
    spill = _spill(_STAYING * _LARGE_ROWS * 64 * 4)
    saving, copies = Saving(spill), _Copies(_LARGE_LAYERS)
    times = take_turns(
        {
            "no hooks": _step(_nothing, _LARGE_LAYERS, _LARGE_ROWS),
            "copies": _step(copies.hooks, _LARGE_LAYERS, _LARGE_ROWS),
            "leaves": _step(lambda: _entered(saving), _LARGE_LAYERS, _LARGE_ROWS),
        },
        rounds=rounds,
    )
    spill.close()
    over = {name: times[name].over(times["no hooks"]) for name in ("leaves", "copies")}
    return Result.of(
        "a saved MiB that leaves over a copy there and back",
        over["leaves"].part_of(over["copies"]),
        "x",
        target=_TARGET_COPIES,
    )


class _Copies:
    """Hooks that do nothing but copy, to memory that is there and back."""

    def __init__(self, count: int) -> None:
        self._away = torch.zeros(count, _LARGE_ROWS, 64)
        self._back = torch.zeros(count, _LARGE_ROWS, 64)
        self._count = 0

    def hooks(self) -> saved_tensors_hooks:
        self._count = 0
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._away[self._count].copy_(tensor.detach())
        self._count += 1
        return self._count - 1

    def _unpack(self, number: int) -> torch.Tensor:
        return self._back[number].copy_(self._away[number])


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


def _step(
    hooks: Callable[[], AbstractContextManager[Any]],
    layers: int = _LAYERS,
    rows: int = _ROWS,
) -> Callable[[], None]:
    x = torch.zeros(rows, 64, requires_grad=True)

    def run() -> None:
        y = x
        with hooks():
            for _ in range(layers):
                y = y.sigmoid()  # saves what it returns
        y.backward(y)  # type: ignore[no-untyped-call]

    return run
