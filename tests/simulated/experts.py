"""A mixture of experts that decodes, scaled down, and what it has to move for a token.

Sizes have the ratios of Qwen3-30B-A3B: in each of 48 layers 38 MB of attention, and 128
experts of 9.4 MB, of which a token goes to 8.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

import stagehand
from simulated.workloads import wait
from stagehand.runtime import Runtime

WIDTH = 96
EXPERTS, TAKEN, DEPTH = 128, 8, 48
ROW_BYTES = 4 * 24 * WIDTH
DENSE_BYTES = 4 * WIDTH * WIDTH
EXPERT_BYTES = EXPERTS * ROW_BYTES
GB = DENSE_BYTES / 0.0377  # toy bytes


class Experts(nn.Module):
    """Gated feed-forwards of one token."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 10)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 10)

    def forward(self, x, chosen):
        gate, up = (self.up[chosen] @ x).chunk(2, -1)
        parts = self.down[chosen] @ (gate.sigmoid() * up).unsqueeze(-1)
        return parts.squeeze(-1).mean(0)


class Layer(nn.Module):
    """What stands for attention, and the experts that a fixed router chooses."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()
        self.register_buffer("router", torch.randn(WIDTH, EXPERTS))

    def forward(self, x):
        x = x + self.attention(x).tanh()
        return x + self.experts(x, (x @ self.router).topk(TAKEN).indices)


def chosen(_, numbers):
    """Say which rows a call of `Experts` reads."""
    return numbers


@dataclass(frozen=True)
class Case:
    """A link, in bytes a second, and how many toy bytes of weights may stay."""

    rate: float
    budget: int
    depth: int = DEPTH

    @property
    def bound(self):
        """The least seconds of a token: what crosses whole is kept first."""
        dense, experts = self.depth * DENSE_BYTES, self.depth * EXPERT_BYTES
        kept = max(0, self.budget - dense)
        crossing = max(0, dense - self.budget)
        return (crossing + (experts - kept) * TAKEN / EXPERTS) / self.rate


@dataclass
class Decoding:
    """A model that makes one token after another."""

    sim: ModuleType
    case: Case
    model: nn.Module
    runtime: Runtime

    @classmethod
    def of(cls, sim: ModuleType, case: Case, *, rows: bool = True) -> "Decoding":
        """Stream a model; with all rows of its experts if not those that are read."""
        sim.configure(
            h2d_gbps=case.rate / 1e9,
            tflops=1.0,
            hbm_gbps=1e12,
            launch_us=1,
            host_launch_us=3,
        )
        torch.manual_seed(1)
        model = nn.Sequential(*(Layer() for _ in range(case.depth)))
        routers = sum(buffer.nbytes for buffer in model.buffers())
        stagehand.layer(
            model,
            vram_budget=case.budget + routers,
            experts={Experts: chosen} if rows else {},
        )
        return cls(sim, case, model, model._stagehand_layer_runtime)

    def run(self, tokens: int) -> None:
        """Make tokens; the host waits for each, as it does to choose it."""
        for _ in range(tokens):
            with torch.no_grad():
                self.model(torch.ones(WIDTH, device="hpu"))
            wait()

    def seconds(self) -> float:
        """The mean time of a token."""
        start, count = self.sim.host_seconds(), 4
        self.run(count)
        return (self.sim.host_seconds() - start) / count
