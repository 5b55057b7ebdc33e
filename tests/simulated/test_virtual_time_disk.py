"""How long passes take in virtual time when weights come from disk: three tiers.

What the device holds crosses nothing, what host memory keeps crosses the link only, and
the rest comes from disk in every pass. The bound is the longest of compute, link and
disk, each at work all the time.
"""

from dataclasses import dataclass

import pytest
from safetensors.torch import save_file
from torch import nn

import stagehand
from simulated.virtual_disk import Disk, install
from simulated.workloads import (
    BLOCK,
    PASSES,
    Case,
    Loop,
    configure,
    equal,
    pieces,
    wait,
)
from stagehand.residency import finding
from stagehand.units import MIB

COUNT = 48
OVER = 1.05

waiting = pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waiting"])
modes = pytest.mark.parametrize("mode", ["layers", "blocks"])


@pytest.fixture
def start(sim, monkeypatch, tmp_path):
    """Streams a case's model from a disk, until it is planned with measured times."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)  # toy blocks stand for large ones
    loops: list[Loop] = []

    def start(
        case: Case, *, device: int, ram: int, disk: float, mode: str = "layers"
    ) -> tuple[Loop, Disk]:
        configure(sim, case)
        drive = Disk(sim, disk)
        install(monkeypatch, drive)
        model = case.model()
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        if mode == "blocks":
            config = stagehand.StagehandConfig(
                vram_high_watermark_mb=(device + BLOCK / 8) / MIB,
                vram_low_watermark_mb=device / MIB,
                pinned_pool_mb=ram / MIB,
                pinned_slab_mb=BLOCK / MIB,
                telemetry_enabled=False,
            )
            runtime = stagehand.StagehandRuntime(model, config, r"\.\d+$")
        else:
            stagehand.layer(model, vram_budget=device, ram_budget=ram)
            runtime = model._stagehand_layer_runtime
        runtime.convert_registry_to_file_backed_sharded(tmp_path)
        loop = Loop(sim, model, runtime)
        loops.append(loop)
        loop.run(7, waits=True)
        assert loop.plan.limit != "unknown"
        return loop, drive

    yield start
    for loop in loops:
        loop.runtime.shutdown()


def work(case: Case, loop: Loop, drive: Disk, *, waits: bool) -> tuple[float, float]:
    """The seconds of a pass, and of the longest of the three if it is never idle."""
    read, crossed = drive.read_bytes, loop.sim.h2d_bytes()
    seconds = loop.seconds(waits=waits)
    link = (loop.sim.h2d_bytes() - crossed) / case.rate / PASSES
    disk = (drive.read_bytes - read) / drive.rate / PASSES
    return seconds, max(case.compute, link, disk)


def bound(case: Case, device: int, ram: int, disk: float) -> float:
    """The longest of the three if budgets hold nothing but weights for good."""
    total = sum(case.nbytes)
    link = (total - device) / case.rate
    return max(case.compute, link, (total - device - ram) / disk)


# Compute, load and read of one block, in milliseconds; blocks on the device, in RAM.
CASES = {
    "disk-bound": (1.0, 1.0, 5.0, 4, 8),
    "disk-bound, no room to keep": (1.0, 1.0, 5.0, 4, 2),
    "disk-bound, half in memory": (1.0, 1.0, 5.0, 8, 16),
    "disk far slower": (0.1, 0.5, 20.0, 4, 8),
    "link-bound": (1.0, 4.0, 4.2, 8, 16),
    "link-bound, fast disk": (1.0, 4.0, 1.0, 8, 6),
    "compute-bound": (5.0, 1.0, 4.0, 4, 8),
    "compute-bound, slow disk": (5.0, 1.0, 7.0, 4, 24),
    "all three alike": (4.0, 4.4, 4.8, 6, 6),
}


@waiting
@modes
@pytest.mark.parametrize("name", CASES)
def test_the_longest_of_three_tiers_is_never_idle(start, name, mode, waits):
    compute, load, read, device, ram = CASES[name]
    case = equal(COUNT, compute * 1e-3, load * 1e-3)
    loop, drive = start(
        case,
        device=device * BLOCK,
        ram=ram * BLOCK,
        disk=BLOCK / (read * 1e-3),
        mode=mode,
    )
    seconds, longest = work(case, loop, drive, waits=waits)
    assert seconds <= OVER * longest


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("disk-bound", True),
        ("disk-bound, half in memory", False),
        ("link-bound", False),
        ("compute-bound, slow disk", True),
        ("all three alike", False),
    ],
)
def test_three_tiers_are_within_five_percent_of_the_bound(start, name, waits):
    """In pieces: a ring of whole blocks is a large part of so small budgets."""
    compute, load, read, device, ram = CASES[name]
    case = pieces(equal(COUNT, compute * 1e-3, load * 1e-3), 8)
    device, ram, disk = device * BLOCK, ram * BLOCK, BLOCK / (read * 1e-3)
    loop, _ = start(case, device=device, ram=ram, disk=disk)
    assert loop.seconds(waits=waits) <= OVER * bound(case, device, ram, disk)


class Turn(nn.Module):
    """Units one after the other, and then back: as a forward and its backward."""

    def __init__(self, units):
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x):
        for unit in (*self.units, *reversed(self.units)):
            x = unit(x)
        return x


@dataclass(frozen=True)
class TurningCase(Case):
    """Every block is used twice."""

    def model(self, again=0):
        chain = super().model()
        return Turn([*chain.first, *chain.second])


@pytest.mark.parametrize("device", [3, 4, 12])
@pytest.mark.parametrize("ram", [2, 6, 12])
def test_nothing_is_read_in_vain_where_the_order_turns(start, device, ram):
    """A block that was still here was passed over by the disk, and gone when it was
    needed again: its bytes then took the place of others that had been read."""
    case = TurningCase([BLOCK] * 24, 1e-3, BLOCK / 1e-3)
    loop, drive = start(case, device=device * BLOCK, ram=ram * BLOCK, disk=BLOCK / 5e-3)
    read, crossed = drive.read_bytes, loop.sim.h2d_bytes()
    seconds = loop.seconds(waits=False)
    read = (drive.read_bytes - read) / PASSES
    crossed = (loop.sim.h2d_bytes() - crossed) / PASSES
    kept = loop.runtime._parts.loader.kept_bytes
    assert read <= crossed - kept
    assert seconds <= OVER * read / drive.rate


def test_the_disk_reads_on_into_the_next_pass(start):
    """Else every pass would begin with the wait for a whole read."""
    case = equal(COUNT, 1e-3, 1e-3)
    loop, _ = start(case, device=4 * BLOCK, ram=8 * BLOCK, disk=BLOCK / 5e-3)
    without = loop.seconds(waits=True)
    loop.pause = 15e-3
    loop.run(1, waits=True)
    wait()
    assert loop.seconds(waits=True) <= without + 5e-3


def test_what_host_memory_keeps_is_not_read_again(start):
    case = equal(COUNT, 1e-3, 1e-3)
    loop, drive = start(case, device=4 * BLOCK, ram=60 * BLOCK, disk=BLOCK / 5e-3)
    before = drive.read_bytes
    assert loop.seconds(waits=False) <= OVER * case.compute
    assert drive.read_bytes == before
