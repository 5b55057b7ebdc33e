"""Several processes, each with a simulated device of its own, in one group."""

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

__all__ = ["in_processes"]

_NAME = "simulated"
_PATIENCE = timedelta(minutes=2)  # with a process that has failed, say


def in_processes(size: int, call: Callable[[Path], None], folder: Path) -> None:
    """Call a function of a module in so many processes, with a folder for all."""
    args = size, call.__module__, call.__name__, folder
    torch.multiprocessing.spawn(_run, args=args, nprocs=size)


def _run(rank: int, size: int, module: str, name: str, folder: Path) -> None:
    import_module("simulated.sim_device")  # before what asks which devices there are
    call = getattr(import_module(module), name)
    torch.set_num_threads(1)
    dist.Backend.register_backend(_NAME, _DeviceGroup, devices=["hpu"])
    dist.init_process_group(
        f"cpu:gloo,hpu:{_NAME}",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
    )
    call(folder)
    dist.destroy_process_group()


class _Done(dist.Work):
    """A collective that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


class _DeviceGroup(dist.ProcessGroup):
    """Takes tensors of the device through the host, by Gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return _NAME

    def allreduce(self, tensors: Any, options: Any = None) -> _Done:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        for tensor in tensors:
            host = tensor.detach().cpu()
            self._gloo.allreduce([host]).wait()
            tensor.detach().copy_(host)
        return _Done(tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> _Done:
        for tensor in tensors:
            host = tensor.detach().cpu()
            self._gloo.broadcast([host], options).wait()
            tensor.detach().copy_(host)
        return _Done(tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> _Done:
        for gathered, tensor in zip(outputs, inputs, strict=True):
            hosts = [torch.empty_like(each, device="cpu") for each in gathered]
            self._gloo.allgather([hosts], [tensor.detach().cpu()]).wait()
            for each, host in zip(gathered, hosts, strict=True):
                each.detach().copy_(host)
        return _Done(outputs)
