"""What went wrong in the system that this one follows: each a scenario, none again.

The numbers are those of the list that the tests were made from: A memory, B hangs and
crashes, C silently wrong results, D speed and telemetry.
"""

import gc
import json
import sys
from copy import deepcopy

import pytest
import safetensors.torch
import torch
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    blocks_of,
    run_resident,
    runtime_of,
    smallest_budget,
    stack,
    values,
)
from stagehand.core.arena import Arena, live_leases
from stagehand.core.ledger import Account

BUDGET = 4 * LAYER_BYTES


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


def layered(place, model=None, **options):
    options.setdefault("vram_budget", BUDGET)
    return stagehand.layer(model or stack(), device=place, **options)


def blocked(place, model, pattern=r"^\d+$", blocks=4, **options):
    mib = blocks * LAYER_BYTES / 2**20
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=mib, vram_low_watermark_mb=mib * 0.75, **options
    )
    return stagehand.StagehandRuntime(model, config, pattern, device=place)


def exact(model, place, plain=None, passes=3):
    expected = run_resident(plain or stack(), place, batch())
    assert_passes_equal(model, expected, batch(), passes=passes)


def save(model, folder, prefix=""):
    state = {prefix + name: t.clone() for name, t in model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors")


def held(model):
    return runtime_of(model).report().peak_device_bytes


# A: bounded memory


def test_a3_exceptions_in_forward_leave_no_block_in_use(sim):
    """A user catches an error of one block, ten times, and goes on."""
    model = layered("hpu")
    for number in range(10):
        model[number % 6][0].forward = None
        with torch.no_grad(), pytest.raises(TypeError):
            model(batch())
        del model[number % 6][0].forward
        assert [block.uses for block in blocks_of(model)] == [0] * 6
    exact(model, "hpu")
    assert held(model) <= BUDGET
    runtime_of(model).shutdown()


def test_a4_a_budget_that_cannot_work_is_refused_before_anything_moves(sim):
    """A 2 kB budget for 4 kB layers was accepted and exceeded."""
    model = stack()
    with pytest.raises(stagehand.StagehandOOMError) as error:
        layered("hpu", model, vram_budget=LAYER_BYTES // 2)
    assert error.value.needed_bytes == LAYER_BYTES
    assert (sim.peak_bytes(), sim.h2d_bytes()) == (0, 0)
    layered("hpu", model, vram_budget=LAYER_BYTES)
    expected = run_resident(stack(), "hpu", batch())
    torch.accelerator.synchronize()
    sim.reset_peak()
    before = sim.allocated_bytes()
    assert_passes_equal(model, expected, batch())
    activations = 4 * 4 * WIDTH * 4  # a few of the small tensors at once, rounded
    assert sim.peak_bytes() - before <= LAYER_BYTES + activations + 4096
    runtime_of(model).shutdown()


def test_a5_after_the_first_pass_every_resident_byte_is_still_accounted_for(sim):
    """The learned order replaced the books: what was resident was never freed again."""
    model = layered("hpu")
    for _ in range(4):
        with torch.no_grad():
            model(batch())
        parts = runtime_of(model)._parts
        occupied = [s for s in parts.scheduler._memory.slots if s.lease is not None]
        assert parts.weights.held_bytes == sum(s.lease.nbytes for s in occupied)
        assert {s.occupant for s in occupied} == {
            b for b in parts.blocks if b.slot is not None
        } | ({None} & {s.occupant for s in occupied})
    assert held(model) <= BUDGET
    runtime_of(model).shutdown()


class Owning(nn.Module):
    """Large parameters of its own, like fused experts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("bi,eij->bj", x, self.experts)


KINDS = {
    "conv1d": (lambda: nn.Conv1d(16, 16, 3, padding=1), (2, 16, 8)),
    "conv3d": (lambda: nn.Conv3d(16, 16, 3, padding=1), (1, 16, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 16, 3, padding=1), (1, 16, 5, 5)),
    "fused": (Owning, (4, WIDTH)),
    "norm": (lambda: nn.LayerNorm((64, WIDTH)), (64, WIDTH)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a6_large_parameters_stream_in_whichever_module_they_are(sim, kind):
    """Only three classes streamed; all else went to the device, outside any budget."""
    build, shape = KINDS[kind]
    model = nn.Sequential(*(build() for _ in range(8)))
    size = sum(p.nbytes for p in model.parameters())
    expected = run_resident(model, "hpu", batch(*shape))
    layered("hpu", model, vram_budget=size // 2)
    assert_passes_equal(model, expected, batch(*shape))
    assert held(model) <= size // 2
    streamed = sum(b.nbytes for b in blocks_of(model))
    assert streamed >= 0.9 * size
    runtime_of(model).shutdown()


def test_a7_autocast_gives_what_it_gives_the_resident_model(place):
    """Autocast keeps cast copies of weights; streaming must not let them go stale."""
    model, plain = layered(place), stack().to(place)
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for number in range(3):
            expected = plain(batch().to(place))
            assert_bitwise_equal(model(batch()), expected, f"pass {number}")
    runtime_of(model).shutdown()


class Rotary(nn.Module):
    """A block with a buffer that its forward reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.randn(WIDTH), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.angles.cos()


def test_a8_buffers_and_modules_outside_of_blocks_are_placed_and_counted(sim):
    """Users had to move all that was not in a block, and nobody counted it."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Rotary() for _ in range(6)), nn.LayerNorm(WIDTH)
    )
    plain = deepcopy(model)
    expected = run_resident(plain, "hpu", batch())
    runtime = blocked("hpu", model, r"^[1-6]$", blocks=5)
    assert_passes_equal(model, expected, batch())
    report = runtime.report()
    everything = (*plain.parameters(), *plain.buffers())
    assert report.weight_bytes >= sum(tensor.nbytes for tensor in everything)
    assert report.resident_bytes >= sum(
        p.nbytes for p in (*plain[0].parameters(), *plain[7].parameters())
    )
    assert report.peak_device_bytes <= 5 * LAYER_BYTES
    runtime.shutdown()


def test_a10_pinned_memory_is_no_more_than_the_weights_or_the_ram_budget(sim):
    """294 MB of weights took a pool of 3584 MB, and half a GB under a 256 MB budget."""
    model = nn.Sequential(nn.Linear(WIDTH, 1000), nn.Linear(1000, 8), nn.Linear(8, 3))
    size = sum(p.nbytes for p in model.parameters())
    expected = run_resident(model, "hpu", batch())
    layered("hpu", model, vram_budget=int(size * 0.9))
    assert_passes_equal(model, expected, batch())
    assert 0 < sim.peak_pinned_bytes() <= size + 6 * 256
    runtime_of(model).shutdown()
    sim.reset_peak()
    layered("hpu", model, vram_budget=int(size * 0.9), ram_budget=int(size * 0.85))
    assert_passes_equal(model, expected, batch())
    assert 0 < sim.peak_pinned_bytes() <= size * 0.85
    runtime_of(model).shutdown()


# B: hangs and crashes


def test_b1_shutdown_of_a_file_backed_runtime_in_an_open_step_returns(place, tmp_path):
    """Without an accelerator it waited for ever for copies that nobody reaped."""
    model = stack()
    save(model, tmp_path)
    runtime = blocked(place, model)
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    runtime.begin_step()
    with torch.no_grad(), runtime.managed_forward():
        model(batch())
    runtime.shutdown()
    assert_bitwise_equal(values(model), values(stack()), "weights")


@pytest.mark.parametrize("pool", [1, 2, 3])
def test_b2_a_window_larger_than_the_pinned_pool_does_not_deadlock(sim, tmp_path, pool):
    """Prefetched blocks held all slabs, and only the waiting thread could free them."""
    model = stack()
    save(model, tmp_path)
    mib = LAYER_BYTES / 2**20
    runtime = blocked(
        "hpu",
        model,
        prefetch_window_blocks=8,
        pinned_slab_mb=mib * 1.01,
        pinned_pool_mb=mib * 1.01 * pool,
    )
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    exact(model, "hpu")
    assert sim.peak_pinned_bytes() <= LAYER_BYTES * 1.01 * pool
    runtime.shutdown()


def test_b3_a_closed_pool_refuses_and_a_lease_ends_once(sim):
    """Waiting on a closed pool never ended; two owners got one slab."""
    pool = Arena("pinned memory", lambda n: torch.empty(n), Account("pinned", 1000))
    lease = pool.acquire(600, "first")
    lease.release()
    with pytest.raises(stagehand.StagehandInternalError, match="twice"):
        lease.release()
    pool.close()
    with pytest.raises(stagehand.ClosedError):
        pool.acquire(600, "late")
    model = layered("hpu")
    pool = runtime_of(model).shutdown_keep_pool()
    pool.close()
    with pytest.raises(stagehand.ClosedError, match="shutdown_keep_pool"):
        layered("hpu", pool=pool)


def test_b4_a_block_larger_than_a_slab_is_refused_when_the_runtime_is_made(place):
    """It passed, and the first load failed on an attribute of a list."""
    small = LAYER_BYTES / 2 / 2**20
    with pytest.raises(stagehand.StagehandOOMError, match="pinned_slab_mb"):
        blocked(place, stack(), pinned_slab_mb=small, pinned_pool_mb=1)


def test_b8_a_model_that_has_run_can_be_given_files(place, tmp_path):
    """Conversion emptied the parameters while their blocks counted as loaded."""
    model = layered(place)
    save(stack(), tmp_path)
    exact(model, place)
    assert runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path) == 6
    exact(model, place)
    runtime_of(model).shutdown()


def test_b9_shutdown_of_a_file_backed_runtime_gives_back_all_values(place, tmp_path):
    """The model was left with empty tensors, and a kept pool with lost slabs."""
    model = layered(place)
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    with torch.no_grad():
        model(batch())
        model[0](batch())
    pool = runtime_of(model).shutdown_keep_pool()
    (tmp_path / "model.safetensors").unlink()
    assert pool.leased_bytes == 0
    assert_bitwise_equal(values(model), values(stack()), "weights")
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), stack()(batch()), "plain")
    pool.close()


def test_b10_a_file_backed_model_can_be_copied_saved_and_loaded(place, tmp_path):
    """Copying failed on a lock, loading on a size."""
    model = layered(place)
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    with torch.no_grad():
        model(batch())
    assert_bitwise_equal(values(deepcopy(model)), values(stack()), "copy")
    torch.save(model, tmp_path / "model.pt")
    safetensors.torch.save_model(model, str(tmp_path / "again.safetensors"))
    other = stack()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(other.state_dict())
    exact(model, place, other)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(other), "loaded")


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_b11_a_model_without_values_gets_all_of_them_from_files(place, tmp_path, mode):
    """Blocks loaded from files; the norms beside them had no source and failed."""

    def build():
        return nn.Sequential(*stack(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    plain = build()
    save(plain, tmp_path)
    with torch.device("meta"):
        model = build()
    if mode == "layer":
        layered(place, model, vram_budget=6 * LAYER_BYTES)
    else:
        blocked(place, model, r"^[0-5]$", blocks=6)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    exact(model, place, plain)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "weights")


def test_b11_a_model_without_values_says_so_when_it_runs(place):
    """Its forward failed with "cannot copy out of meta tensor"."""
    with torch.device("meta"):
        model = stack()
    layered(place, model)
    with torch.no_grad(), pytest.raises(stagehand.StagehandError, match="convert"):
        model(batch())
    runtime_of(model).shutdown()


# C: silently wrong


def test_c1_the_state_dict_of_a_file_backed_model_is_whole(place, tmp_path):
    """Its tensors had shape [0]: saving a checkpoint destroyed the model."""
    model = layered(place)
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    for _ in range(2):
        count = sum(p.numel() for p in model.parameters())
        assert count == sum(p.numel() for p in stack().parameters())
        assert_bitwise_equal(values(model), values(stack()), "state dict")
        with torch.no_grad():
            model(batch())
    runtime_of(model).shutdown()


@pytest.mark.parametrize("backing", ["module", "files"])
def test_c2_an_edit_of_a_block_that_is_loaded_ahead_is_not_overwritten(
    sim, tmp_path, backing
):
    """Early exit: layers that were prefetched and not used are trained meanwhile."""
    model = layered("hpu", stack(8))
    if backing == "files":
        save(stack(8), tmp_path)
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    plain = stack(8)
    for number in range(8):
        with torch.no_grad():
            model(batch())
            model[0](batch())
        optimizers = [
            torch.optim.SGD(m[number].parameters(), lr=0.5) for m in (model, plain)
        ]
        for optimizer, m in zip(optimizers, (model, plain), strict=True):
            for parameter in m[number].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        exact(model, "hpu", plain, passes=2)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "weights")
    assert {r for r in sim.races() if "host buffer rewritten" not in r} == set()
    sim.clear_races()  # a copy under the edit is thrown away


def test_c3_edits_of_file_backed_weights_outlive_eviction(place, tmp_path):
    """Fused adapters and averaged weights were dropped and read from the file again."""
    model, plain = layered(place), stack()
    save(stack(), tmp_path)
    runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    for number, edit in enumerate(
        (
            lambda p: p.requires_grad_(True).detach().mul_(0.5),
            lambda p: p.data.copy_(p.data * 0.25),
            lambda p: setattr(p, "data", p.data.cpu() + 0.125),
        )
    ):
        for m in (model, plain):
            for parameter in m.parameters():
                edit(parameter)
        exact(model, place, plain)
        assert_bitwise_equal(values(model), values(plain), f"edit {number}")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "weights")


def test_c5_a_missing_tensor_is_never_replaced_by_one_of_another_name(place, tmp_path):
    """The file had no norm2: norm3, of the same shape, was loaded in its place."""
    state = stack().state_dict()
    state["6.0.weight"] = state.pop("5.0.weight")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = layered(place)
    with pytest.raises(stagehand.CheckpointError, match=r"5\.0\.weight"):
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
    runtime_of(model).shutdown()


def test_c6_names_that_do_not_match_are_refused_and_mapped_on_request(place, tmp_path):
    """With a prefix in the file nothing matched, and the runtime did nothing."""
    save(stack(), tmp_path, prefix="transformer.")
    model = layered(place)
    runtime = runtime_of(model)
    with pytest.raises(stagehand.CheckpointError, match=r"0\.0\.weight"):
        runtime.convert_registry_to_file_backed_sharded(tmp_path)
    found = runtime.convert_registry_to_file_backed_sharded(
        tmp_path, key_map=lambda name: f"transformer.{name}"
    )
    assert found == 6
    exact(model, place)
    runtime.shutdown()


def test_c6_a_pattern_that_matches_nothing_is_refused_with_one_that_does(place):
    """The default pattern matched no block, silently."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))
    with pytest.raises(stagehand.ConfigError, match=r"block_pattern='\^0\\\\"):
        blocked(place, model, r"^nothing$")
    with pytest.raises(stagehand.ConfigError, match="block_pattern="):
        blocked(place, model, None)


def test_c6_a_pattern_that_matches_inside_its_matches_takes_the_outermost(place):
    """Nested matches were registered twice."""
    model = nn.Sequential(*(nn.Sequential(*stack(2)) for _ in range(4)))
    plain = deepcopy(model)
    runtime = blocked(place, model, r"\d+$", blocks=6)
    assert runtime.block_ids == ("0", "1", "2", "3")
    exact(model, place, plain)
    runtime.shutdown()


def test_c7_nothing_is_cast_unless_asked(place):
    """Everything became bfloat16; integers too, and complex lost its imaginary part."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    extra = [torch.int8, torch.complex64, torch.float64, torch.bool, torch.float16]
    for layer, dtype in zip(model, extra, strict=False):
        layer.extra = nn.Parameter(torch.ones(5, 3).to(dtype), requires_grad=False)
    model[5].weight.data = model[5].weight.data.t().contiguous().t()
    before, plain = values(model), deepcopy(model)
    strides = [p.stride() for p in model.parameters()]
    layered(place, model)
    exact(model, place, plain)
    assert_bitwise_equal(values(model), before, "while active")
    assert [p.stride() for p in model.parameters()] == strides
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), before, "after shutdown")


def test_c8_tied_weights_are_held_and_counted_once(sim):
    """Two blocks owned one parameter; evicting one broke the other."""
    model = nn.Sequential(*stack(6))
    for number in (2, 4):
        model[number][0].weight = model[0][0].weight
    plain = deepcopy(model)
    layered("hpu", model)
    for _ in range(3):
        exact(model, "hpu", plain, passes=1)
        runtime_of(model).set_budget(smallest_budget(deepcopy(plain), "hpu"))
    unique = sum(p.nbytes for p in plain.parameters())
    assert unique <= runtime_of(model).report().weight_bytes <= unique + 12 * 256
    runtime_of(model).shutdown()
    assert model[4][0].weight is model[0][0].weight


class TwoEntries(nn.Module):
    """Encodes, and decodes; either part can be called alone."""

    def __init__(self):
        super().__init__()
        self.encoder = stack(4)
        self.decoder = stack(5)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encoder[0](self.encode(x)))


def test_c9_a_first_pass_that_uses_few_layers_takes_none_of_them_away(place):
    """What the first pass did not use stayed on the host for ever."""
    model = TwoEntries()
    plain = deepcopy(model).to(place)
    layered(place, model)
    with torch.no_grad():
        for run in (
            lambda m, x: m.encode(x),
            lambda m, x: m(x),
            lambda m, x: m.decoder[3](x),
            lambda m, x: m.spare(x),
            lambda m, x: m(x),
            lambda m, x: m.encode(m.spare(x)),
        ):
            assert_bitwise_equal(
                run(model, batch()), run(plain, batch().to(place)), "output"
            )
    runtime_of(model).shutdown()


def test_c10_loops_that_skip_the_first_layer_learn_their_order_all_the_same(sim):
    """Steps began when the first layer ran: without it there was one endless step."""
    model = layered("hpu", telemetry=True)
    with torch.no_grad():
        model(batch())
        for _ in range(12):
            for number in (1, 2, 3, 4, 5):
                model[number](batch())
    runtime = runtime_of(model)
    assert runtime._parts.scheduler.order.passes >= 60
    totals = [b.slot is not None for b in blocks_of(model)]
    assert any(totals)
    assert_passes_equal(model, run_resident(stack(), "hpu", batch()), batch(), passes=1)
    runtime.shutdown()


def test_c15_two_runtimes_on_one_model_are_refused(place):
    """Both hooked the model, and each moved what the other had placed."""
    model = stack()
    runtime = blocked(place, model)
    with pytest.raises(stagehand.ConfigError, match="already"):
        blocked(place, model)
    with pytest.raises(stagehand.ConfigError, match="already"):
        layered(place, model)
    with pytest.raises(stagehand.ConfigError, match="cast"):
        model.to(torch.float16)
    exact(model, place)
    runtime.shutdown()


# D: speed and telemetry


def test_d1_a_use_does_not_look_at_all_blocks(sim):
    """Every hook rebuilt a table of all blocks: 400 us a layer at 1600 layers."""

    def work(depth):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(depth)))
        layered("hpu", model, vram_budget=depth * 256 // 2)
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        with torch.no_grad():
            for _ in range(8):
                model(batch(2, 4))
                torch.accelerator.synchronize()
            sys.setprofile(count)
            model(batch(2, 4))
            sys.setprofile(None)
        runtime_of(model).shutdown()
        return calls / depth

    assert work(160) < 1.3 * work(40)


def test_d2_weights_in_host_memory_are_copied_from_pinned_memory_without_a_wait(sim):
    """Pageable copies on the compute stream were called asynchronous."""
    model = layered("hpu")
    exact(model, "hpu", passes=6)
    x = batch().to("hpu")
    torch.accelerator.synchronize()
    syncs, moved = sim.syncs(), sim.h2d_bytes()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert sim.h2d_bytes() > moved
    assert sim.syncs() == syncs
    runtime_of(model).shutdown()


def test_d3_file_backed_blocks_that_arrive_in_time_are_hits(sim, tmp_path):
    """A block still marked as being prefetched was a miss: the rate was 0 %."""
    sim.configure(tflops=0.00001)  # compute takes long: every copy is in time
    model = stack(8)
    save(model, tmp_path)
    runtime = blocked("hpu", model, blocks=5, max_inflight=2)
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    exact(model, "hpu", stack(8), passes=8)
    runtime.begin_step()
    gc.collect()
    with torch.no_grad():
        model(batch())
        torch.accelerator.synchronize()
    runtime.end_step()
    record = runtime.telemetry.records[-1]
    assert record.prefetch_hits + record.prefetch_misses > 0
    assert record.prefetch_misses <= 1
    runtime.shutdown()


def test_d5_clean_weights_are_never_copied_back(sim):
    """Frozen weights crossed the link at every eviction, and nobody counted it."""
    model = layered("hpu", telemetry=True)
    with torch.no_grad():
        for _ in range(5):
            model(batch())
    assert runtime_of(model).report().streamed_bytes > 0
    assert (sim.d2h_bytes(), runtime_of(model).report().saved_bytes) == (0, 0)
    with torch.no_grad():
        model[0][0].weight.mul_(0.5)
        model(batch())
    runtime_of(model).shutdown()


def test_d6_a_changed_order_is_learned_again(sim):
    """After the order changed, loads stayed half as many again, one in ten a hit."""

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack(8)

        def forward(self, x, order):
            for number in order:
                x = self.layers[number](x)
            return x

    def loads(order, passes):
        before = sim.h2d_copies()
        with torch.no_grad():
            for _ in range(passes):
                model(x, order)
        return (sim.h2d_copies() - before) / passes

    model = layered("hpu", Ordered())
    x = batch().to("hpu")
    loads(range(8), 6)
    steady = loads(range(8), 4)
    other = [3, 1, 7, 0, 5, 2, 6, 4]
    loads(other, 6)
    assert loads(other, 4) <= steady
    runtime_of(model).shutdown()


class Odd(nn.Module):
    """A parameter of seven bytes before the one that is used."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.ones(7, dtype=torch.uint8), False)
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return x @ self.weight + self.odd.sum()


def test_d7_every_tensor_lies_at_an_aligned_address(place):
    """After a parameter of odd size all others were misaligned, and slow."""
    model = nn.Sequential(*(Odd() for _ in range(5)))
    addresses = []
    plain = deepcopy(model)
    layered(place, model)
    for layer in model:
        layer.register_forward_pre_hook(
            lambda m, _: addresses.extend(p.data_ptr() % 64 for p in m.parameters())
        )
    exact(model, place, plain)
    assert set(addresses) == {0}
    runtime_of(model).shutdown()


def test_d8_looking_for_nan_costs_nothing_unless_asked(sim):
    """It was on by default and made the host wait after every block."""
    assert stagehand.StagehandConfig().nan_inf_check is False
    model = stack()
    runtime = blocked("hpu", model)
    exact(model, "hpu")
    runtime.end_step()
    assert runtime.telemetry.records[-1].nan_count is None
    runtime.shutdown()


def test_d8_options_without_an_effect_do_not_exist():
    """Cooldown, policy and debug_trace were accepted and ignored."""
    for name in ("eviction_cooldown_steps", "policy", "debug_trace", "strict"):
        with pytest.raises(TypeError, match=name):
            stagehand.StagehandConfig(**{name: 1})


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_d10_steps_begin_by_themselves_and_the_last_one_is_recorded(
    sim, tmp_path, mode
):
    """Without begin_step nothing was recorded; the last step was lost at shutdown."""
    path = tmp_path / "steps.jsonl"
    model = stack()
    if mode == "layer":
        layered("hpu", model, telemetry=path)
    else:
        blocked("hpu", model, telemetry_file=path)
    exact(model, "hpu", passes=4)
    runtime_of(model).shutdown()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize("budget", ["8GiB", "4G", "1.5GB", "80%", 8 * 10**9])
def test_d11_budgets_are_read_as_people_write_them(sim, budget):
    """ "8GiB" and "4G" were errors."""
    model = layered("hpu", vram_budget=budget)
    assert runtime_of(model).report().budget_bytes >= 10**9
    runtime_of(model).shutdown()


@pytest.mark.parametrize("budget", ["-1GB", "0", 0, "8", -5, "much", 1.5, True, "101%"])
def test_d11_budgets_that_mean_nothing_are_refused(sim, budget):
    """ "-1GB" and "0" were accepted, and "8" was eight bytes."""
    before = live_leases()
    with pytest.raises(stagehand.ConfigError, match="vram_budget"):
        layered("hpu", vram_budget=budget)
    assert live_leases() == before
