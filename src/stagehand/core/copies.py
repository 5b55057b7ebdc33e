"""Copies in host memory: bit for bit, and by several threads.

PyTorch's own threads do that, as many as it may use. Launchers of training scripts
allow it one (`OMP_NUM_THREADS`), with which a machine that has several processors
copies at a fourth of its rate. There, large copies are made by threads of this module's
own: copying has one result, whoever does it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from stagehand.core.machine import processors
from stagehand.core.workers import WorkerGroup
from stagehand.torch_private import inference_mode
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["clear", "copy_all", "copy_values"]

_THREADS = 4  # more are hardly faster: the memory is the limit
_PIECE_BYTES = 8 * MIB
_LARGE_BYTES = _THREADS * _PIECE_BYTES  # less takes hardly longer than to start threads

_processors = cache(processors)


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bit for bit between tensors of one dtype, whatever their strides.

    An expanded target holds one element where it shows many; torch refuses to copy
    into it, so its repeated dimensions are copied once.
    """
    for dim, (size, stride) in enumerate(
        zip(target.shape, target.stride(), strict=True)
    ):
        if stride == 0 and size > 1:
            target = target.narrow(dim, 0, 1)
            source = source.narrow(dim, 0, 1)
    # Memory that was allocated in inference mode may only be written in it.
    with inference_mode(target.is_inference()):
        torch.set_grad_enabled(False)  # until it is left
        target.copy_(source)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Like `copy_values`, of several tensors on the host. On return, none is written.

    Targets may overlap only where sources do alike.
    """
    pairs = [*zip(targets, sources, strict=True)]
    if _shares_out(sum(target.nbytes for target in targets)):
        pieces = (piece for pair in pairs for piece in _cut(*pair))
        _do_all(partial(copy_values, *piece) for piece in pieces)
    else:
        for pair in pairs:
            copy_values(*pair)


def clear(memory: torch.Tensor) -> torch.Tensor:
    """Write zeros to contiguous host memory, which makes it present; return it."""
    if _shares_out(memory.nbytes):
        _do_all(piece.zero_ for piece, _ in _cut(memory, memory))
        return memory
    return memory.zero_()


def _shares_out(nbytes: int) -> bool:
    """Whether threads of ours do it faster than those that PyTorch may use."""
    if nbytes < _LARGE_BYTES:
        return False
    return 2 * torch.get_num_threads() <= _most()


def _most() -> int:
    """How many threads copy at most."""
    return min(_THREADS, _processors())


def _do_all(jobs: Iterable[Callable[[], object]]) -> None:
    # Started in less time than they save; without them this thread does it.
    copiers = WorkerGroup("copier", _most(), warns=False)
    try:
        copiers.do_all(jobs)
    finally:
        copiers.close()


def _cut(
    target: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if not (target.is_contiguous() and source.is_contiguous()):
        yield target, source
        return
    step = _PIECE_BYTES // target.element_size()
    ends = target.view(-1), source.view(-1)
    for start in range(0, target.numel(), step):
        yield ends[0][start : start + step], ends[1][start : start + step]
