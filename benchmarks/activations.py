"""What keeping saved tensors under a budget costs the host, for each tensor saved."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from benchmarks.results import Result, until_met
from benchmarks.timing import Times, take_turns
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
_FEWER = 100  # of 16 KiB: what a step costs once shows
_LARGE_LAYERS = 32
_LARGE_ROWS = 4096  # 1 MiB a tensor
_STAYING = 2
_TARGET_COPIES = 1.1
_MEMORY_RATE = 10e9  # bytes a second, where that target was set; caches are faster
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of glibc's `mallopt`


def measure(rounds: int = 60) -> Iterator[Result]:
    """Yield the time of forward and backward for each saved tensor, over no hooks.

    On the host, where a copy is a copy in memory. What the library itself takes is the
    time over hooks that do nothing, where everything stays, and over hooks that copy
    the same bytes, where half of them leave and return.
    """
    one = _ROWS * 64 * 4
    spills = [_spill(budget) for budget in (1 << 30, one * _LAYERS // 2)]
    roomy, tight = map(Saving, spills)
    copies = _Copies(_LAYERS // 2, _ROWS)
    functions = {
        "no hooks": _step(_nothing),
        "identity": _step(lambda: saved_tensors_hooks(_same, _same)),
        "everything stays": _step(lambda: _Entered(roomy)),
        "half of it leaves": _step(lambda: _Entered(tight)),
        "half of it copied": _step(copies.hooks),
        "save_on_cpu": _step(save_on_cpu),
    }
    yield from _rows(take_turns(functions, rounds=rounds, until=until_met(_rows)))
    for spill in spills:
        spill.close()
    yield _of_fewer(3 * rounds)
    yield from _over_copies(rounds)


def _rows(times: Mapping[str, Times]) -> Iterator[Result]:
    for name in times:
        if name != "no hooks":
            yield _each(
                f"no hooks, {name}", times[name].over(times["no hooks"], _LAYERS)
            )
    yield _each(
        "identity hooks, everything stays",
        times["everything stays"].over(times["identity"], _LAYERS),
        _TARGET_US,
    )
    yield _each(
        "copies of the same bytes, half of it leaves",
        times["half of it leaves"].over(times["half of it copied"], _LAYERS),
    )


def _each(over: str, times: Times, target: float | None = None) -> Result:
    name = f"a saved tensor over {over}"
    return Result.of(name, times, "us", scale=1e6, target=target)


def _of_fewer(rounds: int) -> Result:
    spill = _spill(1 << 30)
    saving, rows = Saving(spill), 4 * _ROWS
    functions = {
        "identity": _step(lambda: saved_tensors_hooks(_same, _same), _FEWER, rows),
        "stays": _step(lambda: _Entered(saving), _FEWER, rows),
    }
    times = take_turns(functions, rounds=rounds)
    spill.close()
    return _each(
        f"identity hooks, {_FEWER} of 16 KiB that stay",
        times["stays"].over(times["identity"], _FEWER),
    )


def _over_copies(rounds: int) -> Iterator[Result]:
    """Yield what a MiB that leaves costs, over copying it there and back.

    The copies have memory of their own, there and back; what the library brings back
    lies in new memory of torch's allocator, which can be warm in the caches. It comes
    when it is needed: before, it would push out of them what is needed first, which no
    copy of a device does.
    """
    _keep_freed_memory()
    spill = _spill(_STAYING * _LARGE_ROWS * 64 * 4, ahead=0)
    saving, copies = Saving(spill), _Copies(_LARGE_LAYERS, _LARGE_ROWS)
    times = take_turns(
        {
            "no hooks": _step(_nothing, _LARGE_LAYERS, _LARGE_ROWS),
            "copies": _step(copies.hooks, _LARGE_LAYERS, _LARGE_ROWS),
            "leaves": _step(lambda: _Entered(saving), _LARGE_LAYERS, _LARGE_ROWS),
        },
        rounds=rounds,
        until=until_met(_row),
    )
    spill.close()
    yield from _row(times)


def _row(times: Mapping[str, Times]) -> Iterator[Result]:
    leaves, copies = (
        times[name].over(times["no hooks"]) for name in ("leaves", "copies")
    )
    own = leaves.over(copies, _LARGE_LAYERS - _STAYING).smallest
    allowed = (_TARGET_COPIES - 1) * 2 * (_LARGE_ROWS * 64 * 4) / _MEMORY_RATE
    fast = f"{own * 1e6:.0f} us beside copies by caches, faster than memory"
    yield Result.of(
        "a saved MiB that leaves, fetched on demand, over a copy there and back",
        leaves.part_of(copies),
        "x",
        target=_TARGET_COPIES,
        why=fast if own <= allowed else "",
    )


def _keep_freed_memory() -> None:
    """Let the host's allocator keep what is freed, as those of devices do.

    Whether it would give pages back, to fault them anew, depends on what lies behind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


class _Copies:
    """Hooks that only copy the first tensors, to memory that is there and back."""

    def __init__(self, leaving: int, rows: int) -> None:
        self._away = torch.zeros(leaving, rows, 64)
        self._back = torch.zeros(leaving, rows, 64)
        self._leaving = leaving
        self._count = 0

    def hooks(self) -> saved_tensors_hooks:
        self._count = 0
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int | torch.Tensor:
        number = self._count
        if number == self._leaving:
            return tensor
        self._away[number].copy_(tensor.detach())
        self._count += 1
        return number

    def _unpack(self, packed: int | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return self._back[packed].copy_(self._away[packed])


def _spill(budget_bytes: int, *, ahead: int | None = None) -> Spill:
    device = find_device("cpu")
    account = Account("pinned memory", 1 << 40)
    pool = SlabPool(Arena("pinned memory", device.pinned, account))
    carrier = Carrier(device, TransferEngine(device, Counters()), pool)
    return Spill(
        device,
        carrier,
        budget_bytes=budget_bytes,
        smallest_bytes=4096,
        inflight_h2d=ahead,
    )


class _Entered:
    """A plain context, as that of the hooks it is compared with."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving

    def __enter__(self) -> None:
        self._saving.enter()

    def __exit__(self, *_: object) -> None:
        self._saving.leave(failed=False)


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
