"""Models that are on disk: at the rate of disk or link, and within a few GiB."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from benchmarks.disk import Rival, drop_cache
from benchmarks.gpu.shapes import SHAPES, build, inputs, skeleton
from benchmarks.gpu.ways.files import write_checkpoint
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from gpu.models import passes, settle
from gpu.places import MIB, Place
from stagehand import LayerStreamer
from stagehand.core.device import host_memory
from stagehand.residency import finding
from stagehand.stores import files as files_module

GIB = 1024 * MIB
SHAPE = SHAPES["qwen2.5-7b"]  # its blocks, and the inputs of one token
WHOLE_BYTES = 13_051_000_000
SLACK = 1.5  # of the slower of disk and link
NEAR = 1.3  # of the bound of a decoded token


class Checkpoint:
    """The shape in files, smaller for a rehearsal, and what it computes."""

    def __init__(self, place: Place, folder: Path, count: int) -> None:
        self.divide = 32 if place.exact_time else 1
        self.count = min(count, 6) if place.exact_time else count
        self.device = torch.device(place.name)
        sizes = {"blocks": self.count, "divide": self.divide, "dtype": torch.bfloat16}
        whole = build(SHAPE, device=self.device, **sizes)
        (self.x,) = inputs(
            SHAPE, device=self.device, dtype=torch.bfloat16, divide=self.divide
        )
        self.nbytes = sum(p.numel() * p.element_size() for p in whole.parameters())
        self.block_bytes = self.nbytes // self.count
        self.files = write_checkpoint(whole, folder)
        (self.expected,) = passes(whole, self.x)()
        self.seconds = place.seconds(passes(whole, self.x), rounds=3)
        held = place.allocated_bytes()
        self.activation_bytes = place.peak_bytes(passes(whole, self.x)) - held

    def skeleton(self) -> nn.Module:
        """The model without its weights."""
        made = skeleton(SHAPE, blocks=self.count, divide=self.divide)
        return made.to(torch.bfloat16)

    def disk_rate(self) -> float:
        """Bytes a second of reading all files past the page cache, at best."""
        size = min(64 * MIB, self.files[0].stat().st_size)
        slabs = [host_memory(size + 4096).zero_() for _ in range(2)]

        def read() -> None:
            for path in self.files:
                rival = Rival(path, slabs, size)
                rival.read(range(path.stat().st_size // size), direct=True)
                rival.close()

        self.drop()
        seconds = min(on_the_wall(read) for _ in range(2))
        return self.nbytes / seconds

    def drop(self) -> None:
        """Let the page cache forget the files."""
        for path in self.files:
            drop_cache(path)


def on_the_wall(run: Callable[[], object]) -> float:
    """Seconds that something takes, with all that it gave the device to do."""
    began = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


@pytest.fixture(autouse=True)
def _toy_blocks(place, monkeypatch):
    if place.exact_time:  # then layers are small
        monkeypatch.setattr(finding, "_SMALL_BYTES", 4096)
        monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)


@dataclass
class Way:
    """A way to run a checkpoint."""

    run: Callable[[], tuple[torch.Tensor, ...]]
    read_bytes: Callable[[], int]
    """All that was read so far."""
    settle: Callable[[], object]
    """Waits until what is read ahead between passes is there."""
    close: Callable[[], None]


def model_of(found: Checkpoint, folder: Path) -> Way:
    """A model that keeps nothing in memory but what must be there."""
    model = stagehand.load(
        found.skeleton,
        folder,
        vram_budget=2 * found.block_bytes,
        ram_budget=2 * found.block_bytes,
        device=found.device,
    )
    runtime = model._stagehand_layer_runtime
    return Way(
        passes(model, found.x),
        lambda: runtime.report().disk_bytes,
        lambda: None,  # it counts what it reads when it sends it
        runtime.shutdown,
    )


def layers_of(found: Checkpoint, folder: Path) -> Way:
    """A streamer, with the same computation."""
    streamer = LayerStreamer.from_pretrained(
        folder, device=found.device, track_progress=False
    )
    with torch.device("meta"):
        layers = found.skeleton().blocks

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return streamer.run_pass(
                (found.x,),
                lambda x, weights, n: torch.func.functional_call(layers[n], weights, x),
            )

    return Way(
        run,
        lambda: streamer.telemetry.totals()["disk_bytes"],
        streamer.settle,
        streamer.close,
    )


@pytest.mark.parametrize("way", [model_of, layers_of])
def test_weights_come_at_the_rate_of_disk_or_link_whichever_is_slower(
    place, tmp_path, monkeypatch, record_property, way
):
    found = Checkpoint(place, tmp_path, 8)
    rates = {"disk": found.disk_rate(), "link": place.link_rate(found.block_bytes)}
    monkeypatch.setattr(files_module, "free_host_bytes", lambda: 0)  # as if too large
    found.drop()
    streamed = way(found, tmp_path)
    for number in range(4):
        (output,) = streamed.run()
        assert_bitwise_equal(output, found.expected, f"pass {number}")
    streamed.settle()
    before = streamed.read_bytes()
    seconds = on_the_wall(lambda: [streamed.run() for _ in range(3)]) / 3
    streamed.settle()
    read = (streamed.read_bytes() - before) / 3
    streamed.close()
    assert found.nbytes / 2 < read <= found.nbytes
    bound = read / min(rates.values())
    for name, value in {**rates, "over the bound": seconds / bound}.items():
        record_property(name, value)
    if not place.exact_time:
        assert seconds <= SLACK * bound


def test_model_of_7b_decodes_in_a_few_gib_at_its_bound(
    place, tmp_path, record_property
):
    """All weights fit the host's memory, so the link is what they wait for."""
    found = Checkpoint(place, tmp_path, SHAPE.count)
    link, held = place.link_rate(found.block_bytes), place.allocated_bytes()
    scale = found.nbytes / WHOLE_BYTES
    model = stagehand.load(
        found.skeleton, tmp_path, vram_budget=int(4 * GIB * scale), device=found.device
    )
    runtime, run = model._stagehand_layer_runtime, passes(model, found.x)
    for gib in (4, 2, 1):
        cap = int(gib * GIB * scale)
        runtime.set_budget(cap)
        settle(model, found.x, place)
        (output,) = run()
        assert_bitwise_equal(output, found.expected, f"{gib} GiB")
        read = runtime.report().disk_bytes
        weights = place.peak_bytes(run) - held - found.activation_bytes
        slots = runtime.report().slots
        assert weights <= cap + slots * (place.page_bytes - 1)
        seconds = place.seconds(run, rounds=3)
        assert runtime.report().disk_bytes == read
        bound = max(found.seconds, (found.nbytes - cap) / link)
        record_property(f"{gib} GiB, over the bound", seconds / bound)
        if not place.exact_time:
            assert seconds <= NEAR * bound
    runtime.shutdown()
