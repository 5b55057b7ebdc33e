"""Packed blocks in virtual time: the link is used for what crosses, and nothing waits.

Decoders take no time here but where a test gives them some: what is held to the bound
is the order of copies, decoders and computation.
"""

import pytest
import torch
from torch import nn

import stagehand
from stagehand.residency import finding

WIDTH, BATCH = 64, 8
FLOP = 2 * BATCH * WIDTH * WIDTH
BLOCK = 64 << 10  # bytes
COUNT = 24


class Unit(nn.Module):
    """A block of trained-looking bfloat16 weights, of which one matrix is used."""

    def __init__(self):
        super().__init__()
        rows = BLOCK // 2 // WIDTH
        self.weight = nn.Parameter((torch.randn(rows, WIDTH) * 0.02).bfloat16())

    def forward(self, x):
        return nn.functional.linear(x, self.weight[:WIDTH])


@pytest.fixture
def stream(sim, monkeypatch):
    """Streams a chain whose blocks compute and load for so long; runs it in."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)
    models = []

    def stream(compute, load, budget, transport, hbm_gbps=1e12):
        sim.configure(
            h2d_gbps=BLOCK / load / 1e9,
            tflops=FLOP / compute / 1e12,
            hbm_gbps=hbm_gbps,
            launch_us=0,
            host_launch_us=0,
        )
        torch.manual_seed(0)
        model = nn.Sequential(*(Unit() for _ in range(COUNT))).requires_grad_(False)
        stagehand.layer(model, vram_budget=budget, transport=transport)
        models.append(model)
        run(model, 6)
        return model

    yield stream
    for model in models:
        model._stagehand_layer_runtime.shutdown()


def wait():
    torch.accelerator.current_stream().synchronize()


def run(model, passes, *, waits=True):
    x = torch.ones(BATCH, WIDTH, device="hpu", dtype=torch.bfloat16)
    for _ in range(passes):
        with torch.no_grad():
            model(x)
        if waits:
            wait()


def seconds(sim, model, *, waits):
    wait()
    start = sim.host_seconds()
    run(model, 8, waits=waits)
    wait()
    return (sim.host_seconds() - start) / 8


def plan_of(model):
    return model._stagehand_layer_runtime._parts.steering.plan


def share_of(model):
    block = model._stagehand_layer_runtime._parts.streamed[0]
    return block.wire.pinned.numel() / block.nbytes


waiting = pytest.mark.parametrize("waits", [False, True], ids=["ahead", "waits"])


@waiting
def test_link_bound_pass_is_within_five_percent_of_what_must_cross(stream, sim, waits):
    compute, load, budget = 1e-3, 4e-3, 8 * BLOCK
    model = stream(compute, load, budget, "packed")
    parts = model._stagehand_layer_runtime._parts
    slots = (budget - parts.wire_bytes) // BLOCK
    # Blocks are whole, and two slots take turns: one computes, one is filled.
    bound = (COUNT - (slots - 2)) * load * share_of(model)
    assert share_of(model) < 0.78
    assert seconds(sim, model, waits=waits) <= 1.05 * bound
    assert plan_of(model).limit == "link"


def test_next_block_crosses_while_one_is_decoded(stream, sim):
    """A decoder that takes half as long as the copy costs the link nothing."""
    compute, load, budget = 1e-4, 4e-3, 8 * BLOCK
    rate = BLOCK / load / 1e9
    model = stream(compute, load, budget, "packed", hbm_gbps=60 * rate)
    alone = decoder_seconds(sim, model)
    copy = load * share_of(model)
    assert 0.3 * copy < alone < 0.8 * copy
    slots = (budget - model._stagehand_layer_runtime._parts.wire_bytes) // BLOCK
    bound = (COUNT - (slots - 2)) * copy
    assert seconds(sim, model, waits=False) <= 1.1 * bound


def decoder_seconds(sim, model):
    """The time of one decoder by itself."""
    runtime = model._stagehand_layer_runtime
    wire = runtime._parts.streamed[0].wire
    place, ring = torch.device("hpu"), runtime._parts.engine.wires
    source = wire.pinned.to(place)
    image = torch.empty(BLOCK, dtype=torch.uint8, device=place)
    torch.accelerator.synchronize()
    start = sim.host_seconds()
    wire.decode(source, image, torch.empty_like(ring.scratch))
    wait()
    return sim.host_seconds() - start


@waiting
def test_packed_beats_plain_where_the_link_is_the_limit(stream, sim, waits):
    times = {
        transport: seconds(sim, stream(1e-3, 8e-3, 6 * BLOCK, transport), waits=waits)
        for transport in ("plain", "packed")
    }
    # Two or three slots are given to what is decoded: of 24 blocks.
    assert times["packed"] <= 0.88 * times["plain"]


@waiting
def test_compute_bound_pass_hides_copies_and_decoders(stream, sim, waits):
    compute, load = 4e-3, 3e-3
    model = stream(compute, load, 7 * BLOCK, "packed")
    assert seconds(sim, model, waits=waits) <= 1.02 * COUNT * compute
    assert plan_of(model).limit == "compute"


def test_plan_counts_what_crosses_not_what_it_becomes(stream):
    model = stream(1e-3, 8e-3, 6 * BLOCK, "packed")
    plan, runtime = plan_of(model), model._stagehand_layer_runtime
    streamed = [b for b in runtime._parts.streamed if b.index not in plan.resident]
    assert plan.streamed_bytes == sum(block.link_nbytes for block in streamed)
    assert sum(plan.slots) + runtime._parts.wire_bytes <= 6 * BLOCK
    predicted = plan.streamed_bytes * 8e-3 / BLOCK
    assert plan.step_seconds == pytest.approx(predicted, rel=0.1)


def test_link_rate_is_measured_over_what_crosses(stream):
    model = stream(1e-3, 8e-3, 6 * BLOCK, "packed")
    rate = model._stagehand_layer_runtime.report().link_bytes_per_second
    assert rate == pytest.approx(BLOCK / 8e-3, rel=0.02)


def test_host_never_waits_for_packed_blocks(stream, sim):
    model = stream(1e-3, 4e-3, 8 * BLOCK, "packed")
    before = sim.syncs()
    run(model, 3, waits=False)
    assert sim.syncs() == before
