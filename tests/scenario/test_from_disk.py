"""Models whose weights are in files: exact in every mode, and within their memory."""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from interrupts import interrupted_at
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    blocks_of,
    run_resident,
    runtime_of,
    stack,
)
from stagehand import storing
from stagehand.core.device import AcceleratorDevice
from stagehand.core.transfer import TransferEngine
from stagehand.core.turn import awaited_by
from stagehand.errors import StagehandWarning
from stagehand.residency import masters
from stagehand.residency.lane_loader import LaneLoader
from stagehand.runtime import Runtime
from training import ALL, SOME, Run, Setting, assert_trains_equally, net, over

DEPTH = 8
_STAGING = (
    LaneLoader._stage,
    LaneLoader._start_staged,
    LaneLoader._free,
    TransferEngine.load,
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """`stack(DEPTH)` in two shards."""
    state = sorted(stack(DEPTH).state_dict().items())
    save_file(dict(state[::2]), tmp_path / "1.safetensors")
    save_file(dict(state[1::2]), tmp_path / "2.safetensors")
    return tmp_path


def from_disk(folder: Path, **options: Any) -> nn.Module:
    options.setdefault("vram_budget", 3 * LAYER_BYTES)
    options.setdefault("device", "hpu")
    model = stagehand.layer(stack(DEPTH), **options)
    runtime_of(model).convert_registry_to_file_backed_sharded(folder)
    return model


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batch())


def count_reads(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each read of a store."""
    real, counted = store.read_into, []

    def read_into(image: torch.Tensor) -> int:
        counted.append(real(image))
        return counted[-1]

    monkeypatch.setattr(store, "read_into", read_into)
    return counted


def test_threads_that_wait_for_the_device_have_made_it_theirs(sim, folder, monkeypatch):
    """Each begins on the first device, where CUDA would claim memory for it."""
    kinds, claimed = set(), set()
    start, claim = threading.Thread.start, AcceleratorDevice.claim_thread

    def starts(thread):
        kinds.add(thread.name.rpartition("_")[0].removeprefix("stagehand-"))
        start(thread)

    def claims(device):
        claim(device)
        name = threading.current_thread().name
        claimed.add(name.rpartition("_")[0].removeprefix("stagehand-"))

    monkeypatch.setattr(masters, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(threading.Thread, "start", starts)
    monkeypatch.setattr(AcceleratorDevice, "claim_thread", claims)
    options = {"vram_budget": 3 * LAYER_BYTES, "device": "hpu"}
    for model in (from_disk(folder), stagehand.layer(stack(), **options)):
        for _ in range(2):
            model(batch()).sum().backward()
        runtime_of(model).shutdown()
    assert {"reader", "adder", "pinner"} == claimed == kinds - {"file"}


def test_a_pass_of_another_thread_waits_until_weights_come_from_files(
    sim, folder, monkeypatch
):
    """It began in the middle, and had some blocks of either kind."""
    model = stagehand.layer(stack(DEPTH), vram_budget=3 * LAYER_BYTES, device="hpu")
    runtime, back = runtime_of(model), storing.back_by_files
    expected, ran, waits = run(model), [], []
    other = threading.Thread(target=lambda: ran.append(run(model)))

    def in_the_middle(*given):
        other.start()
        while awaited_by(other) is None and other.is_alive():
            time.sleep(0.001)
        waits.append(not ran)
        return back(*given)

    monkeypatch.setattr(storing, "back_by_files", in_the_middle)
    runtime.convert_registry_to_file_backed_sharded(folder)
    other.join(timeout=120)
    assert waits == [True]
    assert_bitwise_equal(ran, [expected], "output")


@pytest.mark.parametrize("place", ["cpu", "hpu"])
def test_other_files_leave_what_is_no_block_of_theirs_in_the_first_ones(
    sim, tmp_path, place
):
    """Only blocks that stream are read from others; the first ones were closed."""

    def build():
        norm = nn.LayerNorm(WIDTH)
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(0))
        return nn.Sequential(norm, *stack(DEPTH))

    plain, folders = build(), [tmp_path / name for name in ("first", "other", "last")]
    for folder in folders:
        folder.mkdir()
        save_file(plain.state_dict(), folder / "model.safetensors")
    options = {"vram_budget": 4 * LAYER_BYTES, "device": place}
    model = stagehand.load(build, folders[0], **options)
    runtime, files = runtime_of(model), []
    for folder in folders[1:]:
        files.append(runtime._files.plain)
        runtime.convert_registry_to_file_backed_sharded(folder)
        runtime.park()
        assert_bitwise_equal(run(model), run_resident(plain, place, batch()), "output")
    assert [each._closed for each in files] == [False, True]
    runtime.shutdown()
    assert files[0]._closed


# What is kept in host memory.


@pytest.mark.parametrize(("room", "limit"), [(2, "disk"), (100, "link")])
def test_the_disk_limits_where_passes_read_it_not_where_they_did(
    sim, folder, room, limit
):
    sim.configure(h2d_gbps=0.01)
    model = from_disk(folder, ram_budget=room * LAYER_BYTES)
    for _ in range(8):
        run(model)
    assert runtime_of(model).report().disk_bytes > 0
    assert runtime_of(model).report().limit == limit
    runtime_of(model).shutdown()


@pytest.mark.parametrize("room", [1, 2, 4, 6, 8, 100])
def test_memory_that_is_left_keeps_blocks_from_being_read_again(
    sim, folder, monkeypatch, room
):
    expected = run_resident(stack(DEPTH), "hpu", batch())
    model = from_disk(folder, ram_budget=room * LAYER_BYTES)
    for _ in range(6):
        assert_bitwise_equal(run(model), expected, "the output")
    loader = runtime_of(model)._parts.loader
    streamed = {b.index for b in blocks_of(model) if not b.stays}
    kept = set(loader._keepers)
    assert len(kept) == min(len(streamed), room - len(loader._slabs))
    read = {b.index: count_reads(b.store, monkeypatch) for b in blocks_of(model)}
    for _ in range(3):
        run(model)
    assert all(read[index] for index in streamed - kept)
    assert not any(read[index] for index in kept)
    assert runtime_of(model).report().pinned_bytes <= room * LAYER_BYTES
    assert sim.peak_pinned_bytes() <= room * LAYER_BYTES
    runtime_of(model).shutdown()


def test_kept_blocks_lie_evenly_between_those_that_are_read(sim, folder):
    """Least recently used first would give up each block just before its next use."""
    model = from_disk(folder, ram_budget=6 * LAYER_BYTES, prefetch_k=1)
    for _ in range(6):
        run(model)
    keepers = runtime_of(model)._parts.loader._keepers
    reads = [not (b.stays or b.index in keepers) for b in blocks_of(model)]
    assert sum(reads) == 4
    ahead = [sum(reads[: i + 1]) - 4 / DEPTH * (i + 1) for i in range(DEPTH)]
    assert max(ahead) - min(ahead) <= 1 + 4 / DEPTH, "not an even rate"
    runtime_of(model).shutdown()


@pytest.mark.parametrize(
    "how", ["in place", "one element", "assigned", "on the device"]
)
def test_an_edit_of_a_kept_block_is_used_and_kept(sim, folder, how):
    model = from_disk(folder, ram_budget="1GB")
    for _ in range(4):
        run(model)
    plain = stack(DEPTH)
    for module in (model, plain):
        weight = module[5][0].weight
        with torch.no_grad():
            if how == "in place":
                weight.mul_(2)
            elif how == "one element":
                weight.data[3, 7] = 9.0
            elif how == "assigned":
                weight.data = torch.eye(len(weight))
    if how == "on the device":
        handle = model[5][0].register_forward_pre_hook(double_weight)
        run(model)
        handle.remove()
        with torch.no_grad():
            plain[5][0].weight.mul_(2)
    expected = run_resident(plain, "hpu", batch())
    for _ in range(3):
        assert_bitwise_equal(run(model), expected, how)
    runtime_of(model).park()
    assert_bitwise_equal(run(model), expected, "after it was parked")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), plain.state_dict(), "after shutdown")


def test_memory_to_stage_is_there_again_after_a_first_pass_that_was_interrupted(
    sim, folder, monkeypatch
):
    model = from_disk(folder, ram_budget=LAYER_BYTES)  # one block's
    with monkeypatch.context() as patch:
        interrupt = KeyboardInterrupt()
        patch.setattr(runtime_of(model)._wires, "open", lambda: raise_(interrupt))
        with pytest.raises(KeyboardInterrupt):
            run(model)
    assert_bitwise_equal(run(model), run_resident(stack(DEPTH), "hpu", batch()), "next")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("first", range(4))
def test_an_interrupt_while_blocks_are_staged_and_sent_loses_no_slab(
    sim, folder, first
):
    """A copy without a ticket was under way: its slab was filled again."""
    model = from_disk(folder, ram_budget=2 * LAYER_BYTES)
    expected = run_resident(stack(DEPTH), "hpu", batch())
    run(model)
    loader = runtime_of(model)._parts.loader
    for number in itertools.count(1 + first, 4):
        slabs = set(loader._slabs)
        interrupted = False
        try:
            with interrupted_at(number, *_STAGING):
                run(model)
        except KeyboardInterrupt:
            interrupted = True
        assert_passes_equal(model, expected, batch(), passes=2)
        assert sim.races() == [], number
        assert set(loader._slabs) == slabs, number
        blocks = {slab.block for slab in slabs} - {None}
        assert blocks == set(loader.staged()), number
        if not interrupted:
            break
    assert number > 100
    runtime_of(model).shutdown()


def test_kept_blocks_make_room_for_gradients(sim, folder):
    """Without page-locked memory a gradient takes the slow way, with a warning."""
    # Staging, changed weights, gradients, two of them on their way, kept blocks.
    ram = (5 + 4 + 4 + 2 + 2) * LAYER_BYTES
    model = from_disk(folder, ram_budget=ram)
    model[1::2].requires_grad_(False)
    for _ in range(3):
        run(model)
    loader = runtime_of(model)._parts.loader
    before = loader.kept_bytes
    for _ in range(3):
        model(batch().requires_grad_()).sum().backward()
    assert 0 < loader.kept_bytes < before
    assert sim.peak_pinned_bytes() <= ram
    runtime_of(model).shutdown()


def test_a_failed_read_into_kept_memory_is_read_again(sim, folder, monkeypatch):
    model = from_disk(folder, ram_budget="1GB")
    files = runtime_of(model)._files.plain
    real, count = files.fill, [0]

    def fill(parts, target, **options):
        count[0] += 1
        if count[0] == 5:
            target[:64] = bytes(64)
            raise stagehand.CheckpointError("the disk is away")
        return real(parts, target, **options)

    monkeypatch.setattr(files, "fill", fill)
    expected = run_resident(stack(DEPTH), "hpu", batch())
    with contextlib.suppress(stagehand.CheckpointError):  # if it was not read ahead
        run(model)
    for _ in range(3):
        assert_bitwise_equal(run(model), expected, "the output")
    assert count[0] > 5
    runtime_of(model).shutdown()


@pytest.mark.parametrize("device", ["hpu", "cpu"])
def test_a_change_that_could_not_be_saved_is_still_there_to_be_saved(
    sim, folder, monkeypatch, device
):
    model = from_disk(folder, vram_budget=10 * LAYER_BYTES, device=device)
    run(model)  # all blocks stay on the device
    plain = stack(DEPTH)
    for module in (model, plain):
        with torch.no_grad():
            module[5][0].weight.data.mul_(2)
            module[6][0].weight.mul_(2)
    files, runtime = runtime_of(model)._files.plain, runtime_of(model)
    with monkeypatch.context() as patched:
        gone = stagehand.CheckpointError("the disk is away")
        patched.setattr(files, "fill", lambda *_, **__: raise_(gone))
        with pytest.raises(stagehand.CheckpointError, match="the disk is away"):
            runtime.park()
    assert_bitwise_equal(run(model), run_resident(plain, device, batch()), "output")
    runtime.shutdown()
    assert_bitwise_equal(model.state_dict(), plain.state_dict(), "after shutdown")


@pytest.mark.parametrize("device", ["hpu", "cpu"])
def test_a_change_on_the_device_that_could_not_be_saved_is_saved_later(
    sim, folder, monkeypatch, device
):
    model = from_disk(folder, device=device)
    run(model)
    block = next(b for b in blocks_of(model) if not b.stays)
    place = blocks_of(model).index(block)
    handle = model[place][0].register_forward_pre_hook(double_weight)
    real, failures = block.store.write_back, [stagehand.CheckpointError("disk full")]

    def write_back(image: torch.Tensor) -> None:
        if failures:
            raise failures.pop()
        real(image)

    monkeypatch.setattr(block.store, "write_back", write_back)
    with torch.no_grad(), pytest.raises(stagehand.CheckpointError, match="disk full"):
        model(batch())
    handle.remove()
    plain = stack(DEPTH)
    with torch.no_grad():
        plain[place][0].weight.mul_(2)
    expected = run_resident(plain, device, batch())
    for _ in range(2):
        assert_bitwise_equal(run(model), expected, "the output")
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), plain.state_dict(), "after shutdown")


def double_weight(module: nn.Module, _: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


def raise_(error: BaseException) -> None:
    raise error


# Exact in every mode.


@dataclass(frozen=True)
class OnDisk(Setting):
    """A setting whose model is in files."""

    folder: Path | None = None
    build: Callable[[], nn.Module] | None = None

    def stream(self, model: nn.Module, budget: int, **options: Any) -> Runtime:
        runtime = super().stream(model, budget, **options)
        runtime.convert_registry_to_file_backed_sharded(self.folder)
        return runtime


@functools.cache
def _state(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    return build().state_dict()


@pytest.fixture
def on_disk(tmp_path):
    def on_disk(setting: Setting, build: Callable[[], nn.Module] = net) -> OnDisk:
        for number, (name, tensor) in enumerate(_state(build).items()):
            path = tmp_path / f"{number % 3}.safetensors"
            known = getattr(on_disk, "parts", {})
            known.setdefault(path, {})[name] = tensor
            on_disk.parts = known
        for path, tensors in on_disk.parts.items():
            save_file(tensors, path)
        return OnDisk(
            setting.place, setting.mode, setting.budget, folder=tmp_path, build=build
        )

    return on_disk


@over(ALL)
def test_forward_and_gradients_of_frozen_files_are_exact(sim, on_disk, setting):
    def script(run: Run) -> None:
        for parameter in run.model.parameters():
            parameter.requires_grad_(False)
        x = run.batch(1).requires_grad_()
        for _ in range(3):
            output = run.model(x)
            run.note("output", output)
            (gradient,) = torch.autograd.grad(output.square().mean(), x)
            run.note("gradient of the input", gradient)

    assert_trains_equally(net, script, on_disk(setting))


@over(ALL)
def test_full_fine_tuning_from_files_is_exact(sim, on_disk, setting):
    def script(run: Run) -> None:
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.05)
        for number in range(6):
            run.backward(run.loss(number))
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(net, script, on_disk(setting))


@over(SOME)
def test_changed_blocks_are_kept_and_frozen_ones_dropped(sim, on_disk, setting):
    """Every other block is trained, through gradient accumulation and validation."""

    def script(run: Run) -> None:
        for block in run.model.blocks[::2]:
            block.requires_grad_(False)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        optimizer = run.optimizer(torch.optim.SGD, of=trained, lr=0.1, momentum=0.9)
        for number in range(4):
            for part in range(2):
                run.backward(run.loss(2 * number + part))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                run.note("validation", run.model(run.batch(99)))

    assert_trains_equally(net, script, on_disk(setting))


def test_what_was_trained_is_saved_and_the_files_are_as_they_were(sim, on_disk):
    setting = on_disk(Setting("hpu", "layers", "third"))
    before = {path: path.read_bytes() for path in setting.folder.iterdir()}

    def script(run: Run) -> None:
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(3):
            run.backward(run.loss(number))
            optimizer.step()
            run.note("saved", run.model.state_dict())

    assert_trains_equally(net, script, setting)
    assert {path: path.read_bytes() for path in setting.folder.iterdir()} == before


# Changed weights are counted.


def fine_tune(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(batch().to("cpu")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_changed_weights_are_counted_in_the_memory_for_weights(sim, folder):
    weights = DEPTH * LAYER_BYTES
    model = from_disk(folder, ram_budget=4 * weights)
    fine_tune(model)
    account = runtime_of(model)._parts.pinned_arena.account
    trained = sum(
        p.numel() * 4 for b in blocks_of(model) for p in b.tensors if p.requires_grad
    )
    assert account.holders()["changed weights"] == trained
    assert account.held_bytes <= 4 * weights
    pool = runtime_of(model).shutdown_keep_pool()
    assert pool.account.held_bytes == pool.kept_bytes
    pool.close()


def test_changed_weights_that_exceed_the_memory_are_named(sim, folder):
    weights = DEPTH * LAYER_BYTES
    model = from_disk(folder, ram_budget=weights + 5 * LAYER_BYTES)
    with pytest.warns(StagehandWarning, match=r"8 blocks, '0\.0' first.*raise it to"):
        fine_tune(model, 1)
    fine_tune(model, 3)  # it is told once
    assert sim.peak_pinned_bytes() <= weights + 5 * LAYER_BYTES
    runtime_of(model).shutdown()


def test_edits_of_frozen_weights_are_counted_too(sim, folder):
    weights = DEPTH * LAYER_BYTES
    model = from_disk(folder, ram_budget=2 * weights)
    run(model)
    with torch.no_grad():
        for layer in model:
            layer[0].weight.mul_(2)
    for _ in range(3):
        run(model)
    holders = runtime_of(model)._parts.pinned_arena.account.holders()
    assert holders["changed weights"] > 0
    assert sum(holders.values()) <= 2 * weights
    runtime_of(model).shutdown()


def test_on_the_host_slots_leave_room_for_changed_weights(folder):
    weights = DEPTH * LAYER_BYTES
    model = from_disk(folder, device="cpu", vram_budget="1GB", ram_budget=2 * weights)
    run(model)
    assert runtime_of(model).report().peak_device_bytes > 7 * LAYER_BYTES
    fine_tune(model)
    parts = runtime_of(model)._parts
    trained = runtime_of(model)._host_memory._changed
    assert trained > 0
    assert parts.weights.limit_bytes + trained <= 2 * weights
    runtime_of(model).shutdown()


def test_on_the_host_changed_weights_that_exceed_the_memory_are_named(folder):
    model = from_disk(folder, device="cpu", ram_budget=4 * LAYER_BYTES)
    with pytest.warns(StagehandWarning, match=r"8 blocks, '0\.0' first.*raise it to"):
        fine_tune(model, 2)
    runtime_of(model).shutdown()
