"""A small model whose saved tensors exceed a budget, and gradients with and without."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import stagehand
from equality import all_equal
from stagehand.activations.runtime import ActivationRuntime
from stagehand.activations.spill import Spill

BUDGET = 600_000
WIDTH, ROWS = 64, 128
ROW_BYTES = ROWS * WIDTH * 4

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def stack(depth: int = 6) -> nn.Sequential:
    """Return layers of which each saves four times what it takes, and more."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = (
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(depth)
        )
        return nn.Sequential(*layers)


def inputs(scale: float = 1.0) -> torch.Tensor:
    """Return a batch on the simulated device, the same at every call."""
    line = torch.linspace(-scale, scale, ROWS * WIDTH)
    return line.reshape(ROWS, WIDTH).to("hpu").requires_grad_()


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss of all outputs."""
    loss: torch.Tensor = model(x).square().sum()
    return loss


def gradients(model: nn.Module, loss_of: Loss, context: Any = None) -> list[Any]:
    """Gradients of the parameters and of the input, the graph being gone."""
    model.zero_grad()
    x = inputs()
    with nullcontext() if context is None else context:
        loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [*found, x.grad.cpu()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Fail unless two lists of gradients are bitwise equal."""
    assert len(found) == len(expected)
    assert all_equal(found, expected)


def spill_of(saved: stagehand.activations | ActivationRuntime) -> Spill:
    """Return the books of a context."""
    assert saved._parts is not None
    return saved._parts.spill


def flush() -> None:
    """Let autograd's thread let go of its last graph, as it does at its next one."""
    torch.ones(1, device="hpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    gc.collect()


@contextmanager
def emptied(saved: stagehand.activations) -> Iterator[stagehand.activations]:
    """Check that nothing of a context is left when it is not used any more."""
    yield saved
    flush()
    saved.close()
    assert saved._parts.spill.held_bytes == 0
    assert all(ref() is None for ref in saved._parts.spill._live.values())
    assert saved._parts.pool.out == 0
    assert saved._parts.arena.leased_bytes == 0
