"""`transport="packed"`: fewer bytes on the link, and every bit as before."""

import gc
import warnings
from copy import deepcopy
from itertools import count

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from equality import all_equal
from scenario.small import (
    assert_passes_equal,
    blocks_of,
    round_up,
    runtime_of,
    smallest_budget,
    values,
)
from stagehand.core.arena import live_leases
from stagehand.core.device import AcceleratorDevice
from stagehand.errors import StagehandOOMError, StagehandWarning
from stagehand.residency import finding
from stagehand.stores.packed import PackedWire
from stagehand.units import MIB

WIDTH = 256
WEIGHT = 2 * WIDTH * WIDTH
BLOCK = WEIGHT + 512  # with its bias


def net(depth=6, dtype=torch.bfloat16, width=WIDTH):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)
        ]
        return nn.Sequential(*layers).to(dtype)


def batch(rows=4, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def _toy_blocks(monkeypatch):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)


@pytest.fixture
def streamed(sim):
    """Stream a model packed, and shut it down after the test."""
    found = []

    def stream(model, budget=4 * BLOCK, *, mode="layers", **options):
        options.setdefault("transport", "packed")
        if mode == "layers":
            stagehand.layer(model, vram_budget=budget, **options)
        else:
            config = stagehand.StagehandConfig(
                vram_high_watermark_mb=budget / MIB,
                vram_low_watermark_mb=0.9 * budget / MIB,
                transport=options.pop("transport"),
                copy_stream_priority=options.pop("priority", -1),
            )
            stagehand.StagehandRuntime(model, config, r"^\d+$", **options)
        if model not in found:
            found.append(model)
        return model

    yield stream
    for model in found:
        if hasattr(model, "_stagehand_layer_runtime"):
            runtime_of(model).shutdown()
        model.zero_grad()  # its gradients lie in pinned memory


def resident(model, x):
    with torch.no_grad():
        return deepcopy(model).to("hpu")(x.to("hpu")).cpu()


def run(model, x):
    with torch.no_grad():
        return model(x).cpu()


def smallest(model, transport="packed"):
    return smallest_budget(model, "hpu", transport=transport)


# ----------------------------------------------------------------------- exact, bounded


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("budget", [3 * BLOCK, 4 * BLOCK, 20 * BLOCK])
def test_packed_passes_are_bitwise_those_of_the_resident_model(
    streamed, sim, mode, budget
):
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model, budget, mode=mode)
    sim.reset_peak()
    assert_passes_equal(model, expected.to("hpu"), x, passes=4)
    assert all(block.wire is not None for block in blocks_of(model))
    assert sim.races() == []
    assert runtime_of(model)._parts.weights.peak_bytes <= budget


def test_three_quarters_of_the_bytes_cross(streamed, sim):
    """A large layer; what is packed beside the weights counts, too."""
    model, x = net(4, width=1024), torch.randn(2, 1024).bfloat16()
    streamed(model, 3 * 2 * 1024 * 1024 + 10_000)
    run(model, x)
    run(model, x)
    report = runtime_of(model).report()
    before, streamed_before = sim.h2d_bytes(), report.streamed_bytes
    run(model, x)
    crossed = sim.h2d_bytes() - before - x.nbytes
    assert crossed == runtime_of(model).report().streamed_bytes - streamed_before
    loads = crossed // (0.75 * 2 * 1024 * 1024)
    assert loads >= 2
    assert crossed <= 0.76 * loads * 2 * 1024 * 1025


def test_pinned_memory_is_three_quarters_too(streamed, sim):
    model = net(4, width=1024)
    nbytes = sum(t.nbytes for t in model.parameters())
    streamed(model, 3 * 2 * 1024 * 1024 + 10_000)
    run(model, torch.randn(2, 1024).bfloat16())
    assert runtime_of(model).report().pinned_bytes <= 0.77 * nbytes


def test_smallest_budget_counts_the_bytes_to_decode_and_works(streamed):
    model, x = net(), batch()
    expected = resident(model, x)
    plain, least = smallest(model, "plain"), smallest(model)
    assert plain + 0.75 * BLOCK < least <= plain + 1.5 * BLOCK
    streamed(model, least)
    assert_passes_equal(model, expected.to("hpu"), x)
    assert runtime_of(model)._parts.weights.peak_bytes <= least


def test_budget_holds_what_the_allocator_rounds_up(streamed, sim, monkeypatch):
    """CUDA gives large pieces of memory in whole steps, to wires as to slots."""
    step, empty = 40_000, AcceleratorDevice.empty

    def rounded(device, nbytes):
        return empty(device, device.taken_bytes(nbytes))[:nbytes]

    round_up(monkeypatch, step)
    monkeypatch.setattr(AcceleratorDevice, "empty", rounded)
    model, x = net(), batch()
    expected = resident(model, x)
    least, others = smallest(model), sim.allocated_bytes()
    streamed(model, least)
    for budget in range(least, least + 4 * BLOCK, step // 4):
        runtime_of(model).set_budget(budget)
        sim.reset_peak()
        assert_passes_equal(model, expected.to("hpu"), x, passes=2)
        activations = 8 * x.nbytes
        assert 0 < sim.peak_bytes() - others <= budget + activations


def test_budget_below_the_smallest_names_what_the_decoder_needs(sim):
    model = net()
    least = smallest(model)
    with pytest.raises(StagehandOOMError, match="for a block as it crosses the link"):
        stagehand.layer(model, vram_budget=least - 1, transport="packed")
    assert not hasattr(model, "_stagehand_layer_runtime")


def test_a_dropped_model_takes_its_packed_bytes_along_though_its_runtime_is_kept(sim):
    model = net().requires_grad_(False)
    stagehand.layer(model, vram_budget=4 * BLOCK, transport="packed")
    runtime = runtime_of(model)
    run(model, batch())
    assert runtime.report().compact_blocks > 0
    del model
    gc.collect()
    torch.accelerator.synchronize()
    assert (live_leases(), sim.pinned_bytes()) == (0, 0)
    assert runtime.report().pinned_bytes == 0


def test_budget_can_be_lowered_to_the_smallest(streamed):
    """One piece of memory to decode from is enough then."""
    model, x = net(), batch()
    expected = resident(model, x)
    least = smallest(model)
    streamed(model, 8 * BLOCK)
    run(model, x)
    runtime = runtime_of(model)
    before = runtime.report().decoder_bytes
    runtime.set_budget(least)
    assert_passes_equal(model, expected.to("hpu"), x)
    assert runtime.report().decoder_bytes < 0.7 * before
    assert runtime._parts.weights.held_bytes <= least
    runtime.set_budget(8 * BLOCK)
    assert_passes_equal(model, expected.to("hpu"), x)


def test_report_says_what_crosses(streamed):
    model, x = net(), batch()
    streamed(model, 4 * BLOCK)
    run(model, x)
    report = runtime_of(model).report()
    assert report.compact_blocks == 6
    assert report.compact_bytes == 6 * BLOCK
    assert report.compact_link_bytes <= 0.79 * report.compact_bytes
    assert report.decoder_bytes == runtime_of(model)._parts.wire_bytes > 0
    assert "6 blocks of 789.50 KB cross in" in str(report)


def test_report_is_silent_without_smaller_forms(streamed):
    model, x = net(), batch()
    streamed(model, 4 * BLOCK, transport="plain")
    run(model, x)
    assert "cross in" not in str(runtime_of(model).report())


def test_plain_files_take_the_place_of_what_was_packed(streamed, tmp_path):
    model, x = net(), batch()
    expected = resident(model, x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    streamed(model, 4 * BLOCK)
    run(model, x)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    with pytest.warns(StagehandWarning, match="6 come from files"):
        run(model, x)
    assert_passes_equal(model, expected.to("hpu"), x)
    assert runtime_of(model).report().compact_blocks == 0


def test_set_budget_keeps_room_for_the_decoder(streamed):
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model, 6 * BLOCK)
    run(model, x)
    runtime = runtime_of(model)
    with pytest.raises(StagehandOOMError):
        runtime.set_budget(BLOCK + 512)
    for budget in (3 * BLOCK + 40_000, 10 * BLOCK, 4 * BLOCK):
        runtime.set_budget(budget)
        assert_passes_equal(model, expected.to("hpu"), x)
        assert runtime._parts.weights.held_bytes <= budget


def test_a_refused_budget_leaves_the_decoders_memory_as_it_was(streamed):
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model, 6 * BLOCK)
    run(model, x)
    parts = runtime_of(model)._parts
    before = parts.wire_bytes, parts.weights.held_bytes
    with pytest.raises(StagehandOOMError) as caught:
        runtime_of(model).set_budget(1)
    assert (parts.wire_bytes, parts.weights.held_bytes) == before
    runtime_of(model).set_budget(caught.value.needed_bytes)
    assert parts.wire_bytes < before[0]  # the smallest has one piece
    assert_passes_equal(model, expected.to("hpu"), x)


@pytest.mark.parametrize("rank", [2, 96])
def test_what_joins_a_packed_model_leaves_room_to_decode(streamed, rank):
    """A little, or so much that there is one piece less to decode from."""
    model, x = net(8), batch()
    streamed(model, 6 * BLOCK)
    run(model, x)
    parts = runtime_of(model)._parts
    before = parts.wire_bytes
    for number in range(4):
        model[number][0] = Adapted(model[number][0], rank)
    for _ in range(3):
        expected = resident(model, x)
        assert torch.equal(run(model, x), expected)
        assert not parts.scheduler.strained
        assert sum(parts.steering.plan.slots) + parts.apart_bytes <= 6 * BLOCK
    assert (parts.wire_bytes < before) == (rank == 96)


def test_packed_weights_that_were_put_aside_for_others_come_back(streamed):
    plain, x = net(), batch()
    model = streamed(deepcopy(plain))
    expected = resident(plain, x)
    others = net()
    for parameter in others.parameters():
        parameter.data.mul_(0.5)
    averaged = resident(others, x)
    for number in range(3):
        assert torch.equal(run(model, x), expected), number
        kept = [p.data for p in model.parameters()]
        for mine, other in zip(model.parameters(), others.parameters(), strict=True):
            mine.data = other.data
        assert torch.equal(run(model, x), averaged), number
        assert all_equal(kept, plain.parameters()), number
        for mine, value in zip(model.parameters(), kept, strict=True):
            mine.data = value
    assert torch.equal(run(model, x), expected)
    assert runtime_of(model).report().compact_blocks > 0


# ---------------------------------------------------------------------------- training


def train(model, x, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


class Adapted(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)
        return nn.Sequential(*(Adapted(layer) for layer in net()))


class Recomputed(nn.Sequential):
    """Each of its parts is recomputed in backward."""

    def forward(self, x):
        for part in self:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("whole", [nn.Sequential, Recomputed])
@pytest.mark.parametrize("budget", [4 * BLOCK, 6 * BLOCK])
def test_adapters_train_bitwise_on_a_packed_base(
    streamed, monkeypatch, mode, whole, budget
):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 4096)
    there, here, x = whole(*adapted()).to("hpu"), whole(*adapted()), batch()
    x.requires_grad_(True)
    streamed(here, budget, mode=mode)
    results = []
    for model in (there, here):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses = train(model, x.to("hpu"), optimizer, steps=4)
        results.append((losses, [p.detach().cpu() for p in trained]))
    assert_bitwise_equal(results[1], results[0], "it")
    assert all(block.wire is not None for block in blocks_of(here))


def test_trained_blocks_cross_as_they_are_and_train_bitwise(streamed):
    there, here, x = net().to("hpu"), net(), batch()
    streamed(here, 4 * BLOCK)
    with pytest.warns(StagehandWarning, match="6 are trained"):
        here(x).float().square().mean().backward()
    here.zero_grad()
    results = []
    for model in (there, here):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = train(model, x.to("hpu"), optimizer)
        results.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert_bitwise_equal(results[1], results[0], "it")


def test_packed_block_that_begins_to_train_crosses_as_it_is(streamed):
    """Passes without gradients first: all blocks are packed by then."""
    there, here, x = net().to("hpu"), net(), batch()
    streamed(here, 4 * BLOCK)
    expected = run(there, x.to("hpu"))
    assert torch.equal(run(here, x), expected)
    assert all(block.wire is not None for block in blocks_of(here))
    for model in (there, here):
        model[0].requires_grad_(True)
        model[1:].requires_grad_(False)
    results = []
    for model in (there, here):
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StagehandWarning)
            losses = train(model, x.to("hpu"), optimizer)
        results.append((losses, [p.detach().cpu() for p in model.parameters()]))
    assert_bitwise_equal(results[1], results[0], "it")
    assert [block.wire is None for block in blocks_of(here)] == [True] + [False] * 5


# ---------------------------------------------------------------------------- edits


def edit_in_place(model):
    with torch.no_grad():
        for layer in model:
            layer[0].weight.mul_(1.5)


def edit_one_element(model):
    """No sample shows it; the version counter does."""
    with torch.no_grad():
        model[2][0].weight[100, 5] += 100


def edit_through_data(model):
    for layer in model:
        layer[0].weight.data.mul_(1.5)


def replace_data(model):
    for layer in model:
        layer[0].weight.data = layer[0].weight.detach().cpu() * 1.5


def load_a_state(model):
    model.load_state_dict({k: v * 1.5 for k, v in values(model).items()})


@pytest.mark.parametrize("budget", [3 * BLOCK, 20 * BLOCK])
@pytest.mark.parametrize(
    "edit",
    [edit_in_place, edit_one_element, edit_through_data, replace_data, load_a_state],
)
def test_edits_on_the_host_are_packed_again(streamed, edit, budget):
    model, x = net(), batch()
    other = net()
    edit(other)
    expected = resident(other, x)
    streamed(model, budget)
    for _ in range(3):
        run(model, x)
    edit(model)
    assert_passes_equal(model, expected.to("hpu"), x)
    assert all(block.wire is not None for block in blocks_of(model))


def test_edit_to_what_does_not_shrink_crosses_as_it_is(streamed):
    """Noise cannot be packed: it is said once, and the bits are right."""
    model, x = net(), batch()
    streamed(model, 4 * BLOCK)
    run(model, x)
    noise = torch.randint(1 << 15, (WIDTH, WIDTH), dtype=torch.int16)
    noise[noise >= 0x7F80] = 0
    with torch.no_grad():
        model[2][0].weight.copy_(noise.view(torch.bfloat16))
    other = net()
    other.load_state_dict(values(model))
    expected = resident(other, x)
    with pytest.warns(StagehandWarning, match="block '2.0' was changed on the host"):
        assert_bitwise_equal(run(model, x), expected, "it")
    assert_passes_equal(model, expected.to("hpu"), x)


class Growing(nn.Module):
    """A layer that changes an element of its own weight in forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16) / 4)
        self.weight.requires_grad_(False)

    def forward(self, x):
        self.weight[100, 5] += 4
        return nn.functional.linear(x, self.weight) / WIDTH


ODD = {
    "of 16 bytes": lambda: torch.randn(WIDTH, dtype=torch.complex128),
    "every other one": lambda: torch.randn(2 * WIDTH)[::2],
    "of 8 bytes with gaps": lambda: torch.randn(WIDTH, 2, dtype=torch.complex64)[:, 0],
    "expanded": lambda: torch.randn(1).expand(WIDTH),
    "columns": lambda: torch.randn(3, 2 * WIDTH)[:, :WIDTH],
    "conjugated": lambda: torch.randn(WIDTH, dtype=torch.complex64).conj(),
    "none": lambda: torch.randn(0, WIDTH),
    "one": lambda: torch.randn(()),
}


class Odd(nn.Module):
    """A weight that is packed, and numbers that lie in memory in another way."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(net(1)[0][0].weight.detach().clone(), False)
        self.odd = nn.Parameter(make(), False)

    def forward(self, x):
        odd = self.odd if self.odd.dim() < 2 else self.odd.sum(0)
        made = (x @ self.weight) * odd
        return (made.real if made.is_complex() else made).bfloat16()


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("budget", [3, 20])
def test_edit_of_any_numbers_that_no_counter_shows_is_seen(streamed, budget, make):
    """Those of 16 bytes, or with gaps between them, were not looked at."""
    model, x = nn.Sequential(*(Odd(make) for _ in range(4))), batch()
    other = deepcopy(model)
    streamed(model, budget * BLOCK)
    for _ in range(3):
        expected = resident(other, x)
        assert_passes_equal(model, expected.to("hpu"), x)
        assert all(block.wire is not None for block in blocks_of(model))
        for layer in (*model, *other):
            data = layer.odd.data
            (data[:1] if data.dim() and not data.stride(0) else data).mul_(2)


def test_change_on_the_device_is_kept(streamed):
    there = nn.Sequential(*(Growing() for _ in range(5)))
    here, x = deepcopy(there), batch()
    there.to("hpu")
    streamed(here, 3 * WEIGHT + 40_000)
    for _ in range(4):
        assert_bitwise_equal(run(here, x), run(there, x.to("hpu")), "it")
    runtime_of(here).park()
    assert_bitwise_equal(values(here), values(there), "it")


def test_edit_on_the_device_that_no_counter_shows_comes_home(streamed):
    """Blocks that stay are compared when they leave, and packed again."""
    model, x = net(), batch()
    streamed(model, 20 * BLOCK)
    run(model, x)
    assert model[2][0].weight.device.type == "hpu"
    model[2][0].weight.data[100, 5] += 100
    other = net()
    other[2][0].weight.data[100, 5] += 100
    runtime_of(model).park()
    assert_passes_equal(model, resident(other, x).to("hpu"), x)


def test_decoder_that_fails_leaves_model_and_runtime_usable(streamed, monkeypatch):
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model, 4 * BLOCK)
    run(model, x)
    decode, calls = PackedWire.decode, count(1)

    def fail_once(self, *ends):
        if next(calls) == 2:
            raise RuntimeError("no")
        decode(self, *ends)

    monkeypatch.setattr(PackedWire, "decode", fail_once)
    with pytest.raises(RuntimeError, match="no"):
        run(model, x)
    assert_bitwise_equal(values(model), values(net()), "values")
    assert_passes_equal(model, expected.to("hpu"), x)


# --------------------------------------------------------------- what is said and left


def test_parameters_on_the_host_are_real_and_come_back(streamed):
    model, x = net(), batch()
    before = values(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    streamed(model)
    run(model, x)
    assert_bitwise_equal(values(model), before, "it")
    runtime = runtime_of(model)
    runtime.shutdown()
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert_bitwise_equal(values(model), before, "it")
    streamed(model)  # and again
    assert run(model, x).isfinite().all()


def test_packed_models_take_turns_on_one_device(streamed, sim):
    """What an idle one decodes in is given up, and comes back by itself."""
    models, x = [net(8) for _ in range(3)], batch()
    for number, model in enumerate(models):
        with torch.no_grad():
            model[0][0].weight.mul_(1 + number)
    expected = [resident(model, x).to("hpu") for model in models]
    for model in models:
        streamed(model, int(4.8 * BLOCK))
    for _ in range(4):
        for model, right in zip(models, expected, strict=True):
            assert_passes_equal(model, right, x, passes=1)
            held = sum(runtime_of(m)._parts.weights.held_bytes for m in models)
            assert held <= int(4.8 * BLOCK)
    with runtime_of(models[0]).keep_resident():
        for model, right in zip(models, expected, strict=True):
            assert_passes_equal(model, right, x, passes=2)


def test_budget_can_be_lowered_while_another_model_has_the_decoders_memory(streamed):
    """It comes back as one piece then, where it was two: two would have no room."""
    model, other, x = net(), net(8), batch()
    expected = resident(model, x)
    least = smallest(model)
    streamed(model, 8 * BLOCK)
    run(model, x)
    streamed(other, 8 * BLOCK, transport="plain")
    run(other, x)
    assert runtime_of(model)._parts.engine.wires is None
    runtime_of(model).set_budget(least)
    for _ in range(3):
        assert_passes_equal(model, expected.to("hpu"), x)
        assert runtime_of(model)._parts.weights.held_bytes <= least


def test_a_pass_has_its_decoders_memory_before_slots_take_the_room(streamed):
    """Where a call needed more slots than the plan has, there was none left for it."""
    model, other, x = net(), net(8), batch()
    streamed(model, 8 * BLOCK)
    run(model, x)
    streamed(other, 8 * BLOCK, transport="plain")
    run(other, x)
    engine = runtime_of(model)._parts.engine
    assert engine.wires is None
    has_some = []
    model.register_forward_pre_hook(lambda *_: has_some.append(bool(engine.wires)))
    run(model, x)
    assert has_some == [True]


def test_pool_that_is_kept_holds_nothing_of_the_packed_bytes(streamed, sim):
    model, x = net(), batch()
    streamed(model)
    run(model, x)
    pool = runtime_of(model).shutdown_keep_pool()
    assert pool.leased_bytes == 0
    other = streamed(net(), pool=pool)
    assert_passes_equal(other, resident(net(), x).to("hpu"), x)


def test_park_and_go_on(streamed, sim):
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model)
    for _ in range(3):
        assert_passes_equal(model, expected.to("hpu"), x, passes=2)
        runtime_of(model).park()
        assert runtime_of(model)._parts.weights.held_bytes == 0


def test_model_that_does_not_shrink_is_streamed_with_a_warning(streamed):
    model, x = net(dtype=torch.float32), batch(dtype=torch.float32)
    expected = resident(model, x)
    streamed(model, 8 * BLOCK)
    with pytest.warns(StagehandWarning, match="would not shrink: only bfloat16"):
        run(model, x)
    assert_passes_equal(model, expected.to("hpu"), x)


def test_host_has_no_link_and_says_so(sim):
    model, x = net(), batch()
    expected = run(net(), x)
    with pytest.warns(StagehandWarning, match="nothing crosses a link"):
        stagehand.layer(model, vram_budget=4 * BLOCK, device="cpu", transport="packed")
    assert_passes_equal(model, expected, x)
    runtime_of(model).shutdown()


def test_small_ram_budget_packs_what_it_can(streamed):
    model, x = net(8), batch()
    expected = resident(model, x)
    streamed(model, 4 * BLOCK, ram_budget=4 * BLOCK)
    with pytest.warns(StagehandWarning, match="exceed ram_budget"):
        run(model, x)
    assert_passes_equal(model, expected.to("hpu"), x, passes=4)
    assert runtime_of(model).report().pinned_bytes <= 4 * BLOCK


@pytest.mark.parametrize("transport", ["zip", None, ""])
def test_other_transports_are_refused(transport):
    with pytest.raises(stagehand.ConfigError, match="'plain' or 'packed'"):
        stagehand.layer(net(), transport=transport)
    with pytest.raises(stagehand.ConfigError, match="'plain' or 'packed'"):
        stagehand.StagehandConfig(transport=transport)


def test_tied_weights_are_packed_once(streamed):
    model = net(4)
    model[3][0].weight = model[0][0].weight
    x = batch()
    expected = resident(model, x)
    streamed(model, 4 * BLOCK)
    assert_passes_equal(model, expected.to("hpu"), x)


def test_stream_of_packed_bytes_has_the_priority_that_was_asked_for(
    sim, streamed, monkeypatch
):
    """It had the default one, whatever `copy_stream_priority` said."""
    plain, priorities = AcceleratorDevice.new_stream, []

    def new_stream(device, priority=0):
        priorities.append(priority)
        return plain(device, priority)

    monkeypatch.setattr(AcceleratorDevice, "new_stream", new_stream)
    model, x = net(), batch()
    expected = resident(model, x)
    streamed(model, mode="blocks", priority=-3)
    assert_bitwise_equal(run(model, x), expected, "output")
    assert runtime_of(model).report().compact_blocks > 0
    assert set(priorities) == {-3}
