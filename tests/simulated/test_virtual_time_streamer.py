"""How long passes of a `LayerStreamer` take where disk, link and compute have rates.

The disk is one resource with a clock: who reads from it waits for its turn. Jobs run in
threads of their own, each with its virtual clock, one after the other in real time; a
result that comes later than the clock of who asks for it moves that clock.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from layered import LAYER_BYTES, LAYERS, WIDTH, inputs, make_weights, save
from stagehand import LayerStreamer
from stagehand.streamer import pipeline

FLOP = 2 * 3 * WIDTH * WIDTH  # of one matrix product
PASSES = 4
UNIT = 1e-3  # seconds

# What a layer takes of disk, link and compute.
LOADS = {
    "disk": (4, 1, 1),
    "disk and link": (4, 4, 1),
    "link": (1, 4, 2),
    "compute": (1, 2, 4),
    "all alike": (3, 3, 3),
    "disk, just": (3, 2.5, 2.8),
}
DEPTHS = {
    "straight": {"n_gpu": 2, "n_cpu_pinned": 2},
    "one ahead": {"n_gpu": 1, "n_cpu_pinned": 1},
    "all stages": {"n_gpu": 2, "n_cpu_pinned": 2, "n_cpu": 2},
    "does not divide": {"n_gpu": 3, "n_cpu_pinned": 3},
}


class Later:
    """A result, or a failure, at a virtual moment."""

    def __init__(self, sim, moment, result, error):
        self.sim, self.moment = sim, moment
        self.value, self.error = result, error

    def wait(self):
        late = self.moment - self.sim.host_seconds()
        if late > 0:
            self.sim.advance_host_us(late * 1e6)

    def done(self):
        return self.sim.host_seconds() >= self.moment

    def result(self):
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value

    def exception(self):
        self.wait()
        return self.error

    def cancelled(self):
        return False

    def cancel(self):
        return False


@pytest.fixture
def disk(sim, monkeypatch):
    """Sets the seconds that a layer takes to be read."""
    free_at, seconds = [0.0], [0.0]
    take = pipeline.FileSource.take

    def timed(self, layer, image):
        read = take(self, layer, image)
        end = max(free_at[0], sim.host_seconds()) + seconds[0]
        free_at[0] = end
        sim.advance_host_us((end - sim.host_seconds()) * 1e6)
        return read

    class Workers:
        def __init__(self, name, count, begin=None):
            self.pools = [ThreadPoolExecutor(1) for _ in range(count)]
            self.busy_until = [0.0] * count

        def hand(self, note, job, *args):
            chosen = self.busy_until.index(min(self.busy_until))
            later = self.pools[chosen].submit(self.run, sim.host_seconds(), job, args)
            self.busy_until[chosen] = later.result().moment
            note(later.result())

        def run(self, now, job, args):
            if now > sim.host_seconds():
                sim.advance_host_us((now - sim.host_seconds()) * 1e6)
            result = error = None
            try:
                result = job(*args)
            except Exception as caught:  # noqa: BLE001 - as an executor does
                error = caught
            return Later(sim, sim.host_seconds(), result, error)

        def drop(self, future):
            pass

        def close(self):
            for pool in self.pools:
                pool.shutdown()

    monkeypatch.setattr(pipeline, "WorkerGroup", Workers)
    monkeypatch.setattr(pipeline.FileSource, "take", timed)

    def set_seconds(value):
        seconds[0] = value

    return set_seconds


def product(x, weights, layer):
    return x @ weights["attn.weight"]


@pytest.fixture
def pass_seconds(sim, disk, tmp_path):
    """The mean time of a pass, the host waiting for the result of each."""

    def pass_seconds(load, depths):
        read, copy, compute = (UNIT * part for part in load)
        disk(read)
        sim.configure(
            h2d_gbps=LAYER_BYTES / copy / 1e9,
            tflops=FLOP / compute / 1e12,
            hbm_gbps=1e12,
            launch_us=0,
        )
        x = inputs("hpu")
        folder = save(tmp_path, make_weights())
        with (
            LayerStreamer.from_pretrained(folder, device="hpu", **depths) as streamer,
            torch.no_grad(),
        ):
            for number in range(2 + PASSES):
                if number == 2:
                    start = sim.host_seconds()
                streamer.run_pass(x, product)
                torch.accelerator.current_stream().synchronize()
            return (sim.host_seconds() - start) / PASSES

    return pass_seconds


@pytest.mark.parametrize("depths", DEPTHS.values(), ids=DEPTHS.keys())
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_pass_takes_as_long_as_its_slowest_stage(pass_seconds, load, depths):
    bound = LAYERS * UNIT * max(load)
    assert bound * 0.999 <= pass_seconds(load, depths) <= 1.05 * bound


def test_pass_without_any_stage_takes_as_long_as_all_of_them(pass_seconds):
    found = pass_seconds((3, 3, 3), {"n_gpu": 0, "n_cpu_pinned": None})
    assert found > 1.9 * LAYERS * 3 * UNIT
