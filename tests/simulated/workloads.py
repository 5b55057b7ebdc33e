"""Published workloads, scaled down, and how to run them streamed in virtual time.

What counts is compute over load time, the number of blocks, and how many of them fit.
Toy blocks of some tens of KB stand for real ones, with the real seconds for compute and
load. A pass ends when the compute stream is done; in a *waiting* loop the host waits
for that before the next pass, as decoding does, else it runs ahead as far as it can.
"""

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import nn

import stagehand
from schedules import follow
from stagehand.residency.plan import Workload
from stagehand.runtime import Runtime
from stagehand.units import MIB

WIDTH, BATCH = 16, 4
FLOP = 2 * BATCH * WIDTH * WIDTH  # of one matrix product
BLOCK = 1 << 16
PASSES = 4


class Unit(nn.Module):
    """A block whose bytes and matrix products are chosen freely."""

    def __init__(self, nbytes, products):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH).uniform_(-0.3, 0.3))
        rest = nbytes // 4 - WIDTH * WIDTH
        self.rest = nn.Parameter(torch.empty(rest).uniform_(-1, 1))
        self.products = products

    def forward(self, x):
        x = x + self.rest[:WIDTH]
        for _ in range(self.products):
            x = nn.functional.linear(x, self.weight)
        return x


class Chain(nn.Module):
    """Two halves of units, one after the other, and then the first `again` of them."""

    def __init__(self, units, again=0):
        super().__init__()
        self.again = again
        self.first = nn.Sequential(*units[: len(units) // 2])
        self.second = nn.Sequential(*units[len(units) // 2 :])

    def forward(self, x):
        x = self.second(self.first(x))
        return self.first[: self.again](x)


@dataclass(frozen=True)
class Case:
    """What runs: the bytes of each block, its matrix products, and what they cost."""

    nbytes: list[int]
    product_seconds: float
    rate: float
    products: list[int] = field(default_factory=list)
    """One for each block if left out."""

    @property
    def seconds(self):
        return [count * self.product_seconds for count in self.counts]

    @property
    def counts(self):
        return self.products or [1] * len(self.nbytes)

    @property
    def compute(self):
        return sum(self.seconds)

    def bound(self, budget):
        return max(self.compute, (sum(self.nbytes) - budget) / self.rate)

    def best_policy(self, budget, residents=()):
        """The shortest pass that any policy of the independent simulator achieves."""
        workload = Workload(
            order=tuple(range(len(self.nbytes))),
            nbytes=tuple(self.nbytes),
            seconds=tuple(self.seconds),
            link_bytes_per_second=self.rate,
        )
        policies = [("belady", ()), ("lru", ()), ("sync", ())]
        policies += [("belady", pinned) for pinned in residents]
        return min(
            follow(workload, policy, capacity_bytes=budget, pinned=pinned)
            for policy, pinned in policies
        )

    def model(self, again=0):
        torch.manual_seed(1)
        units = [Unit(*unit) for unit in zip(self.nbytes, self.counts, strict=True)]
        return Chain(units, again)


def equal(count, compute, load):
    """`count` equal blocks, by the seconds that each computes and loads."""
    return Case([BLOCK] * count, compute, BLOCK / load)


def pieces(case, parts):
    """The same work with every block cut into equal parts."""
    nbytes = [size // parts for size in case.nbytes for _ in range(parts)]
    return Case(nbytes, case.product_seconds / parts, case.rate)


# LTX-2, 48 blocks of 772 MB, by its video tokens and the device.
LTX2 = {
    "768 H100": equal(48, 1.05e-3, 14.04e-3),
    "6144 H100": equal(48, 8.28e-3, 14.04e-3),
    "768 3090": equal(48, 10.48e-3, 30.89e-3),
}
RINGS = {name: (case, 16) for name, case in LTX2.items()}
RINGS["t = 1.5 c"] = (equal(48, 1e-3, 1.5e-3), 18)

# FLUX.1 on an H100: 19 blocks of 680 MB and 38 of 283 MB, all of the same compute.
DOUBLE, SINGLE = 60 << 10, 25 << 10
GB = DOUBLE / 0.680  # toy bytes
FLUX = Case([DOUBLE] * 19 + [SINGLE] * 38, 2.61e-3, 55 * GB)
FLUX_IN_PIECES = Case(
    [DOUBLE // 8] * 19 * 8 + [SINGLE // 4] * 38 * 4,
    2.61e-3 / 8,
    55 * GB,
    [1] * 19 * 8 + [2] * 38 * 4,
)


def wait():
    """Wait for the compute stream, as `item()` does; copies may go on."""
    torch.accelerator.current_stream().synchronize()


@dataclass
class Loop:
    """A model that runs over and over."""

    sim: ModuleType
    model: nn.Module
    runtime: Runtime | None = None
    pause: float = 0.0
    """Seconds that the host spends between passes of a waiting loop."""

    def run(self, passes, *, waits):
        x = torch.ones(BATCH, WIDTH, device="hpu")
        for _ in range(passes):
            with torch.no_grad():
                output = self.model(x)
            if waits:
                wait()
                self.sim.advance_host_us(self.pause * 1e6)
        return output

    def seconds(self, *, waits):
        """The mean time of a pass."""
        wait()
        start = self.sim.host_seconds()
        self.run(PASSES, waits=waits)
        wait()
        return (self.sim.host_seconds() - start) / PASSES

    @property
    def plan(self):
        return self.runtime._parts.steering.plan

    @property
    def streamed(self):
        return [b for b in self.runtime._parts.streamed if not b.stays]


def configure(sim, case, *, host_us=0.0):
    """Let the simulated device compute and copy as fast as the case says."""
    sim.configure(
        h2d_gbps=case.rate / 1e9,
        tflops=FLOP / case.product_seconds / 1e12,
        hbm_gbps=1e12,
        launch_us=0,
        host_launch_us=host_us,
    )


def stream(sim, case, budget, *, mode="layers", again=0, **options):
    """Stream a case's model; the caller shuts the loop's runtime down."""
    model = case.model(again)
    if mode == "blocks":
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=(budget + BLOCK / 8) / MIB,
            vram_low_watermark_mb=budget / MIB,
            telemetry_enabled=False,
        )
        runtime = stagehand.StagehandRuntime(model, config, r"\.\d+$")
    else:
        stagehand.layer(model, vram_budget=budget, **options)
        runtime = model._stagehand_layer_runtime
    return Loop(sim, model, runtime)
