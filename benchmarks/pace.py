"""How fast the machine is while something is timed, beside a machine that is quiet.

Neighbours, seen or not, may halve the pace of a processor for minutes, and all that is
timed with it: minima, too. So a thing that is always the same is timed in each round: a
module of PyTorch's that is called over and over. A target in microseconds is for a
machine on which that takes `QUIET_SECONDS`. What misses it while the machine is slower,
and would meet it if it took less by the same factor, is no failure, and says so.
"""

import time
from functools import cache

import torch
from torch import nn

__all__ = ["PACE", "QUIET_SECONDS", "sample"]

PACE = "pace"
"""The name of these times beside others."""

QUIET_SECONDS = 4.8e-6
"""Of a call, on the machine of `notes.md` with nothing else on it."""

_CALLS = 1_000  # as long as a pass of a thousand blocks, about


@cache
def _module() -> nn.Module:
    """Modules in modules, as a block of the stacks: little, which stays in caches."""
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16)))


@torch.inference_mode()
def sample() -> float:
    """Return the seconds of a call now."""
    module, x = _module(), torch.zeros(1, 16)
    start = time.thread_time()
    for _ in range(_CALLS):
        module(x)
    return (time.thread_time() - start) / _CALLS
