"""The device's benchmarks rehearsed: a first run on a real one shall find no slip."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stagehand.core.device import find_device

ROOT = Path(__file__).resolve().parents[2]

# Parameters of a block in millions and its tensors, as the models' own classes have.
COUNTED = {
    "ltx-2": [(386.07, 72)],
    "flux.1": [(339.83, 32), (141.59, 14)],
    "flux.2": [(981.47, 16), (490.73, 4)],
    "llama-3-8b": [(218.11, 9)],
    "qwen2.5-7b": [(233.06, 12)],
    "qwen2.5-7b-whole": [(545.00, 1), (233.06, 12), (545.00, 2)],
    "qwen2.5-7b-parted": [(545.00, 1), (233.06, 12), (545.00, 9)],
    "qwen3-30b-a3b": [(623.12, 11)],
    "gemma-3-12b": [(224.15, 13)],
    "sdxl": [
        (5.43, 22),
        (60.11, 116),
        (757.40, 434),
        (413.12, 226),
        (1206.57, 656),
        (106.34, 176),
        (11.17, 36),
    ],
}
# Bytes of all blocks in GB, in bfloat16.
WHOLE = {
    "ltx-2": 37.06,
    "flux.1": 23.67,
    "flux.2": 62.81,
    "llama-3-8b": 13.96,
    "qwen2.5-7b": 13.05,
    "qwen2.5-7b-whole": 15.23,
    "qwen2.5-7b-parted": 15.23,
    "qwen3-30b-a3b": 59.82,
    "gemma-3-12b": 21.52,
    "sdxl": 5.12,
}
MEASURED = {
    "step",
    "resident",
    "bound",
    "over_bound",
    "over_resident",
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "pinned_bytes",
    "host_bytes",
    "stall_ms",
    "h2d_copies",
    "d2h_copies",
    "h2d_bytes",
    "d2h_bytes",
    "prepared",
    "startup",
    "pinned",
    "phases",
    "host_seconds",
    "rates",
    "h2d_rate_after",
    "version",
}
ONE = ["--cells", "inference/llama-3-8b/8GiB/stagehand"]


@pytest.fixture(autouse=True)
def root_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


# Of a block that is divided by 64 some layers are too small to shrink.
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


@pytest.fixture
def rehearse(sim, tmp_path):
    """Run the command on the simulated device, and return the cells' lines."""

    def run(*options):
        from benchmarks.gpu.__main__ import main

        small = ["--dry", "--out", str(tmp_path)]
        assert main([*small, "--scratch", str(tmp_path), *options]) == 0
        text = (tmp_path / "simulated.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [line for line in found if line["kind"] == "cell"]

    return run


def _ways(lines, kind):
    return {line["cell"]["way"]: line for line in lines if line["cell"]["kind"] == kind}


@pytest.mark.parametrize("name", COUNTED)
def test_block_shapes_are_those_of_the_models(name):
    from benchmarks.gpu.shapes import SHAPES

    found, whole = [], 0
    for count, make in SHAPES[name].blocks:
        with torch.device("meta"):
            sizes = [p.numel() for p in make(1).parameters()]
        found.append((round(sum(sizes) / 1e6, 2), len(sizes)))
        whole += count * sum(sizes)
    assert found == COUNTED[name]
    assert 2 * whole / 1e9 == pytest.approx(WHOLE[name], abs=0.006)


@pytest.mark.parametrize("name", COUNTED)
def test_attention_gets_a_batch_or_no_fused_kernel_takes_it(name, monkeypatch):
    """What is left then writes all scores out: no card has room for 16,896 tokens'."""
    from benchmarks.gpu.shapes import SHAPES, build, inputs
    from torch.nn import functional

    plain, dims = functional.scaled_dot_product_attention, []

    def attention(*parts, **options):
        dims.extend(part.dim() for part in parts)
        return plain(*parts, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    small = {"device": torch.device("cpu"), "dtype": torch.float32, "divide": 64}
    build(SHAPES[name], **small, blocks=2)(*inputs(SHAPES[name], **small))
    assert set(dims) == {4}


def test_every_shape_is_measured_and_is_its_resident_self(rehearse):
    from benchmarks.gpu.shapes import SHAPES

    lines = rehearse("--kinds", "inference", "--ways", "stagehand")
    assert {line["cell"]["shape"] for line in lines} == set(SHAPES)
    for line in lines:
        assert line.keys() >= MEASURED
        assert line["equal"]
        assert line["equal_at_end"]
        assert line["difference"] == 0
        assert line["over_bound"] > 0.999
        if line["cell"]["budget"] == "least":
            assert line["budget_bytes"] == 0
            assert line["device_bytes"] < 0.6 * line["resident_peak_bytes"]
        else:
            assert line["device_bytes"] <= line["cap_bytes"]
            assert 0 < line["budget_bytes"] < line["weight_bytes"]
        assert line["h2d_copies"] > 0
        assert 0 < line["pinned_bytes"] < 1.1 * line["weight_bytes"]


def test_a_gibibyte_holds_enough_of_a_model_whose_head_comes_in_parts(sim):
    """Beside what the driver takes, 2.3 % of the weights; no table crosses."""
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.worker import attempt

    sizes = {"divide": 32, "steps": 2, "settling": 3}
    cell = Cell(kind="inference", shape="qwen2.5-7b-parted", budget="2.3%", **sizes)
    line = attempt(cell, SimulatedCard())
    assert line["equal"]
    assert line["allocated_bytes"] < 1.1 * line["budget_bytes"]
    table = 2 * (152064 // 32) * (3584 // 32)
    assert line["h2d_bytes"] < 1.02 * (line["weight_bytes"] - table)


@pytest.mark.parametrize("kind", ["inference", "lora", "full", "pair"])
def test_every_way_is_measured_or_says_why_not(rehearse, kind):
    from benchmarks.gpu.ways.every import WAYS, ways_of

    found = _ways(rehearse("--kinds", kind, "--cells", f"{kind}/llama*"), kind)
    assert set(found) == set(ways_of(kind))
    for name, line in found.items():
        if "failed" in line:
            assert not line["cell"]["way"].startswith("stagehand")
            needs_cuda = name.startswith(("fsdp2", "ramtorch", "mmgp"))
            assert WAYS[name].missing or needs_cuda
            continue
        assert line.keys() >= MEASURED
        assert line["equal"], name
        if line["cap_bytes"] is not None:
            assert line["device_bytes"] <= line["cap_bytes"]


def test_all_weights_are_trained_with_the_optimizer_on_the_host(rehearse):
    ways = ["--ways", "stagehand-serial", "fsdp2"]
    found = _ways(rehearse("--kinds", "full", *ways), "full")
    assert "failed" in found["fsdp2"]  # it has no backend for this device
    line = found["stagehand-serial"]
    assert line["equal"]
    assert line["d2h_bytes"] > 0.9 * line["weight_bytes"]  # gradients, all but norms'
    assert line["device_bytes"] <= line["cap_bytes"]


def test_int8_crosses_the_link_and_is_what_its_weights_give(rehearse):
    (line,) = rehearse("--cells", "int8/llama*")
    assert line["equal"]
    assert line["equal_at_end"]
    assert line["difference"] == 0
    assert line["h2d_bytes"] < line["weight_bytes"] - line["budget_bytes"]


def test_reserved_one_of_two_models_waits_for_nothing(rehearse):
    (line,) = rehearse("--cells", "pair/gemma*/stagehand-reserved")
    assert line["equal"]
    first, _ = line["phases"]
    assert first < 1.01 * line["resident_phases"][0]


def test_what_checkpoints_keep_leaves_as_well(rehearse):
    (line,) = rehearse("--cells", "lora/llama*/stagehand-spilling")
    assert line["equal"]
    assert line["over_bound"] > 0.999
    assert line["d2h_bytes"] > 0


def test_optimizer_beside_backward_is_measured(rehearse):
    lines = rehearse("--kinds", "full", "--ways", "stagehand-overlap")
    assert all(line["equal"] for line in lines)


def test_adapters_are_trained_and_frozen_weights_never_come_home(rehearse):
    cells = ["--cells", "lora/ltx-2/24GiB/*", "lora/flux.2/*"]
    lines = rehearse(*cells, "--ways", "stagehand")
    assert len(lines) == 2
    for line in lines:
        assert line["equal"]
        assert line["over_bound"] > 0.999
        assert line["d2h_bytes"] == 0


def test_saved_tensors_leave_under_a_budget_and_save_memory(rehearse):
    found = _ways(rehearse("--cells", "activations/llama*/20%/*"), "activations")
    assert set(found) == {"stagehand-activations", "save_on_cpu", "none"}
    assert all(line["equal"] for line in found.values())
    ours, none = found["stagehand-activations"], found["none"]
    assert ours["d2h_bytes"] > 0.5 * ours["weight_bytes"]
    assert ours["allocated_bytes"] < none["allocated_bytes"]
    assert none["d2h_bytes"] == 0


def test_weights_from_disk_are_those_that_the_cell_wrote(rehearse, tmp_path):
    for line in rehearse("--kinds", "disk"):
        assert line["equal"]
        assert line["rates"]["disk"] > 0
        assert line["startup"] > 0
    assert not list(tmp_path.glob("bench-*"))


def test_cell_says_when_output_came(rehearse):
    line = rehearse(*ONE)[-1]
    assert line["startup"] > line["prepared"] > 0
    assert line["pinned"] is None


@pytest.mark.parametrize("steps", [0, 3])
def test_steps_are_timed_when_all_is_pinned(sim, steps):
    from benchmarks.gpu.measure import _pinned

    left = [4096] * steps
    report = SimpleNamespace(report=lambda: SimpleNamespace(pinning_bytes=sum(left)))
    model = SimpleNamespace(_stagehand_layer_runtime=report)
    task = SimpleNamespace(models=[model, nn.Linear(1, 1)], step=lambda: left.pop())
    after = _pinned(task, find_device("hpu"), time.perf_counter())
    assert not left
    assert after is None if not steps else after > 0


def test_run_goes_on_where_one_stopped(rehearse):
    first = rehearse(*ONE)
    assert rehearse(*ONE) == first
    both = ["--cells", *ONE[1:], "inference/llama-3-8b/8GiB/naive-pinned"]
    assert [line["cell"]["way"] for line in rehearse(*both)] == [
        "stagehand",
        "naive-pinned",
    ]
    assert len(rehearse(*ONE, "--again")) == 3
    assert len(rehearse(*ONE, "--blocks", "3")) == 4


def test_page_takes_what_the_suite_writes(rehearse):
    from benchmarks.devices import device_section

    lines = rehearse("--cells", "inference/llama-3-8b/8GiB/[sm]*")
    text = "\n".join(device_section("simulated", lines))
    assert "#### inference/llama-3-8b/75%, about 4 blocks" in text
    assert "| mmgp | left out: " in text


def test_failure_of_ours_is_tried_again_and_anothers_is_not(tmp_path):
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.lines import Lines

    cells = [Cell(kind="inference", shape="sdxl", way=w) for w in ("stagehand", "mmgp")]
    for cell in cells:
        Lines("card", tmp_path).write({"cell": cell.line(), "failed": "why"})
    assert [cell in Lines("card", tmp_path) for cell in cells] == [False, True]
    assert cells[1] not in Lines("other", tmp_path)


@pytest.mark.parametrize("missing", [True, False])
def test_other_library_that_fails_or_lacks_is_a_line(sim, monkeypatch, missing):
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.ways import every
    from benchmarks.gpu.ways.base import Way
    from benchmarks.gpu.worker import attempt

    def prepare(_):
        raise ValueError("not with this\nand more")

    package = "nosuchpackage" if missing else "torch"
    way = Way(kinds=frozenset({"inference"}), prepare=prepare, package=package)
    monkeypatch.setitem(every.WAYS, "another", way)
    line = attempt(_small("another"), SimulatedCard())
    reason = "nosuchpackage is not installed"
    assert line["failed"] == (reason if missing else "ValueError: not with this")


def test_cell_of_ours_fails_if_one_bit_is_off(sim, monkeypatch):
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.ways import every
    from benchmarks.gpu.ways.base import Way
    from benchmarks.gpu.worker import attempt

    def prepare(at):
        model = at.task.models[0].to(at.place)
        model.blocks[0].norms[0].weight.data[0] += 0.5

    way = Way(kinds=frozenset({"inference"}), prepare=prepare)
    monkeypatch.setitem(every.WAYS, "stagehand", way)
    with pytest.raises(AssertionError, match="off by"):
        attempt(_small("stagehand"), SimulatedCard())


def _small(way, **options):
    from benchmarks.gpu.cells import Cell

    sizes = {"blocks": 2, "divide": 64, "steps": 2, "settling": 1}
    return Cell(kind="inference", shape="llama-3-8b", way=way, **sizes, **options)


def test_cell_in_a_process_of_its_own_says_why_it_ended():
    from benchmarks.gpu.worker import apart

    cell = _small("stagehand", budget="1KB")
    line = apart(cell, dry=True, folder=None, seconds=300)
    assert line["cell"] == cell.line()
    assert "StagehandOOMError: the budget is 1" in line["failed"]


def test_process_that_is_killed_leaves_no_files(tmp_path, monkeypatch):
    from benchmarks.gpu import worker

    def killed(command, **_):
        folder = Path(command[-1])
        (folder / "weights").write_bytes(b"many")
        assert folder.parent == tmp_path
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(worker.subprocess, "run", killed)
    line = worker.apart(_small("stagehand"), dry=True, folder=tmp_path, seconds=1)
    assert line["failed"] == "it took more than 1 seconds"
    assert not list(tmp_path.iterdir())


def test_cell_that_the_end_of_a_run_cuts_short_is_measured_by_the_next(
    monkeypatch, tmp_path, capsys
):
    """Of another library, too, whose failures are not tried again."""
    from benchmarks.gpu import __main__ as command

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)

    def apart(cell, *, seconds, **_):
        if cell is None:
            return {"kind": "link", "device": "a card"}
        clock.now += min(seconds, 100 if cell.way == "naive-pinned" else 400)
        return {"kind": "cell", "cell": cell.line(), "failed": "it took long"}

    monkeypatch.setattr(command, "apart", apart)
    ways = ["--cells", "inference/sdxl/6GiB/naive*", "--out", str(tmp_path)]
    run = [*ways, "--minutes", "5"]
    assert command.main(run) == 0
    assert "1 cells are left" in capsys.readouterr().out
    assert command.main(run) == 0  # the first of a run had all its time
    lines = (tmp_path / "a-card.jsonl").read_text().splitlines()
    cells = [json.loads(line)["cell"] for line in lines if "cell" in json.loads(line)]
    assert [cell["way"] for cell in cells] == ["naive-pinned", "naive-pageable"]


def test_gradients_are_compared_with_kernels_that_repeat(sim, monkeypatch):
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.tasks.training import Lora
    from benchmarks.gpu.worker import attempt

    plain, seen = Lora.outcome, []

    def outcome(task):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(task)

    monkeypatch.setattr(Lora, "outcome", outcome)
    cell = replace(_small("stagehand", budget="75%"), kind="lora")
    assert attempt(cell, SimulatedCard())["equal"]
    assert seen == [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_process_that_runs_one_cell_writes_its_line(sim, tmp_path):
    from benchmarks.gpu.worker import main

    cell, result = _small("stagehand", budget="75%"), tmp_path / "line"
    assert main([json.dumps(cell.line()), str(result), "dry", ""]) == 0
    line = json.loads(result.read_text())
    assert line["cell"] == cell.line()
    assert line["equal"]
    assert main(["null", str(result), "dry", ""]) == 0
    line = json.loads(result.read_text())
    assert (line["kind"], line["device"]) == ("link", "simulated")


def test_ballast_leaves_what_it_shall_and_ends_with_its_parent():
    command = [sys.executable, "-m", "benchmarks.gpu.ballast", "1000000", "--dry"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert int(process.stdout.readline()) == pytest.approx(1e6, rel=0.01)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 0


def test_cap_holds_while_it_lasts_and_is_told_by_the_driver(sim):
    from benchmarks.gpu.card import SimulatedCard

    card = SimulatedCard()
    held = torch.empty(1000, dtype=torch.uint8, device=card.place)
    before = card.used_bytes()
    assert before >= len(held)
    with card.capped(100_000):
        free, _ = torch.accelerator.get_memory_info()
        assert free == 100_000 - before
        assert card.used_bytes() == before
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free + 1, dtype=torch.uint8, device=card.place)
    assert torch.accelerator.get_memory_info()[0] > 1e9
    assert card.used_bytes() == before


def test_real_card_asks_torch_for_what_torch_has(sim, monkeypatch):
    from benchmarks.gpu import card as module
    from benchmarks.gpu.worker import attempt, measure_link

    peak = {"allocated_bytes.peak": 12345}
    # Each of these fails if torch has no such name.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_host_memory_stats", lambda: None)
    if hasattr(torch.accelerator, "empty_host_cache"):
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None)
    else:  # a build for CPUs has neither
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(module, "ballast", lambda _: module.contextlib.nullcontext())
    activities = (torch.profiler.ProfilerActivity.CPU,)
    monkeypatch.setattr(module.Card, "_profiled", activities)
    monkeypatch.setattr("benchmarks.gpu.worker._SIZES", (4096,))
    monkeypatch.setattr("benchmarks.gpu.rates._COPIED", 4096)
    card = module.Card()
    assert measure_link(card)["device"] == "a card"
    line = attempt(_small("stagehand", cap="75%"), card)
    assert line["equal"]
    assert line["pinned_bytes"] == 12345


def test_other_library_is_left_out_where_the_host_has_too_little(sim, monkeypatch):
    from benchmarks.gpu import measure as module
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.worker import attempt

    monkeypatch.setattr(module, "free_host_bytes", lambda: 1000)
    line = attempt(_small("naive-pinned"), SimulatedCard())
    assert "MemoryError: page-locks" in line["failed"]
    assert "failed" not in attempt(_small("naive-pageable"), SimulatedCard())


def test_fsdp_that_copies_ahead_gives_the_gradients_of_the_one_that_does_not():
    from benchmarks.gpu.ways.plain import copies_ahead
    from benchmarks.models import Stack
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def gradients():
        torch.manual_seed(0)
        model = Stack(4)
        options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
        for module in (*model.blocks, model):
            fully_shard(module, **options)
        for one, following in pairwise(model.blocks):
            one.set_modules_to_forward_prefetch([following])
        model(torch.ones(2, 16)).square().sum().backward()
        return [p.grad.to_local() for p in model.parameters()]

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        expected = gradients()
        with copies_ahead(torch.device("cpu")) as brought:
            found = gradients()
        assert len(brought) == 0  # all that came ahead was used
    finally:
        distributed.destroy_process_group()
    assert len(found) == 8
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_copies_are_counted_in_the_profilers_trace():
    from benchmarks.gpu.card import Copies, count_copies

    up = {"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 100}}
    down = {"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 7}}
    other = [{"name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 5}}, {}]
    assert count_copies([up, down, up, *other]) == Copies(2, 1, 200, 7)


def test_names_of_cells_are_printed_and_unique(capsys):
    from benchmarks.gpu.__main__ import main
    from benchmarks.gpu.suite import SHORT, all_cells, pick

    assert main(["--list", "--cells", "lora/*", "--ways", "fsdp2"]) == 0
    assert "lora/ltx-2/24GiB/fsdp2" in capsys.readouterr().out.splitlines()
    cells = list(all_cells())
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(pick(cells, names=[name]) for name in SHORT)


def test_command_wants_a_device_unless_it_rehearses(capsys):
    from benchmarks.gpu.__main__ import main

    assert main(ONE) == 2
    assert "--dry" in capsys.readouterr().out


def test_gpu_tests_are_collected_without_the_simulated_device():
    """Beside it torch has no other accelerator: it stood before the GPU."""
    code = (
        "import pytest, sys; pytest.main(['-m', 'gpu', '--collect-only', '-q', *{}]);"
        "print('simulated' in [name.split('.')[0] for name in sys.modules])"
    )
    command = [sys.executable, "-c", code.replace("{}", str([str(ROOT / "tests")]))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    *_, collected, loaded = done.stdout.strip().splitlines()
    assert "tests collected" in collected
    assert loaded == "False"
