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
from torch.utils.checkpoint import set_checkpoint_early_stop

from stagehand.core.device import find_device
from stagehand.optim import OffloadedAdamW

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
    "timed_steps",
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
    "planned_h2d_bytes",
    "h2d_copies",
    "d2h_copies",
    "h2d_bytes",
    "d2h_bytes",
    "prepared",
    "first_output",
    "pinned",
    "phases",
    "host_seconds",
    "resident_host_seconds",
    "operator_seconds",
    "resident_operator_seconds",
    "allocator_calls",
    "took",
    "rates",
    "h2d_rate_after",
    "version",
}
ONE = ["--cells", "inference/llama-3-8b/8GiB/stagehand"]


# Of a block that is divided by 64 some layers are too small to shrink.
pytestmark = pytest.mark.filterwarnings("ignore:.*would not shrink")


@pytest.fixture
def rehearse(sim, tmp_path):
    """Run the command on the simulated device, and return the cells' lines."""

    def run(*options):
        from benchmarks.gpu.__main__ import main

        small = ["--dry", "--out", str(tmp_path)]
        assert main([*small, "--scratch", str(tmp_path / "scratch"), *options]) == 0
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


def test_cap_is_that_of_the_steps_and_not_of_what_makes_the_weights(sim):
    """A table is made on the card, its values beside it: 2.2 GB where 1 GiB is left."""
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.worker import attempt

    sizes = {"divide": 32, "steps": 2, "settling": 3}
    cell = Cell(kind="inference", shape="qwen2.5-7b-parted", cap="900KB", **sizes)
    table = 2 * (152064 // 32) * (3584 // 32)
    line = attempt(cell, SimulatedCard())
    assert line["equal"]
    assert line["cap_bytes"] < table
    assert line["device_bytes"] <= line["cap_bytes"]


@pytest.mark.parametrize("kind", ["inference", "lora", "full", "pair"])
def test_every_way_is_measured_or_says_why_not(rehearse, kind):
    from benchmarks.gpu.ways.every import WAYS, ways_of

    found = _ways(rehearse("--kinds", kind, "--cells", f"{kind}/llama*"), kind)
    assert set(found) == set(ways_of(kind))
    for name, line in found.items():
        assert "failed" not in line
        if "left_out" in line:
            assert not line["cell"]["way"].startswith("stagehand")
            assert WAYS[name].missing or "needs CUDA, this is hpu" in line["left_out"]
            continue
        assert line.keys() >= MEASURED
        assert line["equal"], name
        if line["cap_bytes"] is not None:
            assert line["device_bytes"] <= line["cap_bytes"]


def test_all_weights_are_trained_with_the_optimizer_on_the_host(rehearse):
    ways = ["--ways", "stagehand-serial", "fsdp2"]
    found = _ways(rehearse("--kinds", "full", *ways), "full")
    assert found["fsdp2"]["left_out"] == "fsdp2 needs CUDA, this is hpu"
    line = found["stagehand-serial"]
    assert line["equal"]
    assert line["d2h_bytes"] > 0.9 * line["weight_bytes"]  # gradients, all but norms'
    assert line["device_bytes"] <= line["cap_bytes"]


class _Sloppy(OffloadedAdamW):
    """Steps all as it shall, but for one number of one weight by a little."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][3].view(-1)[0].mul_(1.5)


@pytest.mark.parametrize("way", ["stagehand-serial", "stagehand-overlap"])
def test_cell_fails_if_a_step_of_all_weights_is_off_by_one_number(
    sim, monkeypatch, way
):
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.ways import own
    from benchmarks.gpu.worker import attempt

    cell = replace(_small(way, budget="75%"), kind="full")
    assert attempt(cell, SimulatedCard())["equal_stepped"]
    monkeypatch.setattr(own, "OffloadedAdamW", _Sloppy)
    with pytest.raises(AssertionError, match="not those of AdamW"):
        attempt(cell, SimulatedCard())


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("inference", "stagehand"),
        ("lora", "stagehand-blocks"),
        ("full", "stagehand-overlap"),
        ("activations", "stagehand-activations"),
    ],
)
def test_cell_fails_if_its_last_outcome_is_another_than_its_first(
    sim, monkeypatch, kind, way
):
    from benchmarks.gpu import measure
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.worker import attempt

    cell = replace(_small(way, budget="75%"), kind=kind)
    assert attempt(cell, SimulatedCard())["equal_at_end"]
    plain = measure._time

    def timed(*arguments):
        steps = plain(*arguments)
        with torch.no_grad():
            arguments[0].task.states[0][0][0, 0] += 1
        return steps

    monkeypatch.setattr(measure, "_time", timed)
    with pytest.raises(AssertionError, match="off by"):
        attempt(cell, SimulatedCard())


def test_int8_crosses_the_link_and_is_what_its_weights_give(rehearse, monkeypatch):
    from benchmarks.gpu.card import SimulatedCard

    copies = SimulatedCard.copies

    def of_eight(card, step):  # what one loads ahead for the next crosses in either
        return copies(card, lambda: [step() for _ in range(8)])

    monkeypatch.setattr(SimulatedCard, "copies", of_eight)
    (line,) = rehearse("--cells", "int8/llama*")
    assert line["equal"]
    assert line["equal_at_end"]
    assert line["difference"] == 0
    assert line["h2d_bytes"] < 8 * (line["weight_bytes"] - line["budget_bytes"])


def test_reserved_one_of_two_models_waits_for_nothing(rehearse):
    (line,) = rehearse("--cells", "pair/gemma*/stagehand-reserved")
    assert line["equal"]
    first, _ = line["phases"]
    assert first < 1.01 * line["resident_phases"][0]


def test_guest_of_a_reserved_model_takes_what_it_takes_alone(rehearse):
    names = ["reserved", "alone"]
    cells = [f"pair/gemma*/stagehand-{name}" for name in names]
    reserved, alone = rehearse("--cells", *cells)
    assert alone["equal"]
    assert alone["device_bytes"] <= alone["cap_bytes"]
    assert alone["phases"][0] < 1.01 * alone["resident_phases"][0]
    assert alone["h2d_bytes"] > 0
    assert reserved["phases"][1] < 1.05 * alone["phases"][1]


def test_what_checkpoints_keep_leaves_as_well(rehearse):
    (line,) = rehearse("--cells", "lora/llama*/stagehand-spilling")
    assert line["equal"]
    assert line["freed_share"] >= 0.95
    assert line["over_bound"] > 0.999
    assert line["d2h_bytes"] > 0


def test_optimizer_beside_backward_is_measured(rehearse):
    lines = rehearse("--kinds", "full", "--ways", "stagehand-overlap")
    assert all(line["equal"] for line in lines)


def test_adapters_are_trained_and_frozen_weights_never_come_home(rehearse):
    cells = ["--cells", "lora/ltx-2/24GiB/*", "lora/flux.2/*"]
    # Regions would end an operator earlier than resident ones: they save no weights.
    with set_checkpoint_early_stop(False):
        lines = rehearse(*cells, "--ways", "stagehand")
    assert len(lines) == 2
    for line in lines:
        assert line["equal"]
        assert line["over_bound"] > 0.999
        assert line["d2h_bytes"] == 0
        assert line["h2d_bytes"] == line["planned_h2d_bytes"] > 0


def test_saved_tensors_leave_under_a_budget_and_save_memory(rehearse):
    found = _ways(rehearse("--cells", "activations/llama*/20%/*"), "activations")
    assert set(found) == {"stagehand-activations", "save_on_cpu", "none"}
    ours, none = found["stagehand-activations"], found["none"]
    assert ours["equal"]
    assert none["equal"]  # save_on_cpu loses strides, and with them the order of sums
    assert ours["d2h_bytes"] > 0.5 * ours["weight_bytes"]
    assert ours["allocated_bytes"] < none["allocated_bytes"]
    assert none["d2h_bytes"] == 0


def test_stall_is_that_of_settled_steps(rehearse):
    """Warm-up waits for weights here; later steps take what resident ones do."""
    (line,) = rehearse("--cells", "inference/qwen2.5-7b/4GiB/stagehand-blocks")
    assert line["over_resident"] < 1.01
    assert line["stall_ms"] == 0


def test_stall_of_saved_tensors_is_what_a_step_takes_more(rehearse):
    (line,) = rehearse("--cells", "activations/llama*/20%/stagehand*")
    more = line["step"]["median"] - line["resident"]["median"]
    assert more > 0.1 * line["resident"]["median"]
    assert line["stall_ms"] == pytest.approx(1e3 * more, rel=0.1)


def test_line_says_how_many_steps_were_timed(sim, monkeypatch):
    """Of those that take long there are three, whatever was asked for."""
    from benchmarks.gpu import clock
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.worker import attempt

    monkeypatch.setattr(clock, "_ENOUGH_SECONDS", 0.0)
    line = attempt(
        replace(_small("stagehand", budget="75%"), steps=10), SimulatedCard()
    )
    assert line["timed_steps"] == 3
    assert line["cell"]["steps"] == 10


def test_weights_from_disk_are_those_that_the_cell_wrote(rehearse, tmp_path):
    for line in rehearse("--kinds", "disk"):
        assert line["equal"]
        assert line["rates"]["disk"] > 0
        assert line["first_output"] > 0
    assert not list((tmp_path / "scratch").iterdir())


def test_frozen_weights_of_training_come_from_disk(rehearse, tmp_path):
    (line,) = rehearse("--cells", "lora/ltx-2/*/stagehand-load")
    assert line["equal"]
    assert line["equal_at_end"]
    assert line["rates"]["disk"] > 0
    assert line["pinned_bytes"] < 0.6 * line["weight_bytes"]
    assert not list(tmp_path.glob("bench-*"))


def test_first_output_of_training_comes_before_backward(rehearse, monkeypatch):
    """Backward takes its time over adding in a fixed order, as no usual step does."""
    from benchmarks.gpu.tasks.training import Lora

    came, backward = [], Lora.backward

    def note(task):
        came.append(task.came)
        task.came = 0.0
        backward(task)

    monkeypatch.setattr(Lora, "backward", note)
    (line,) = rehearse("--cells", "lora/ltx-2/24GiB/stagehand")
    assert any(came)
    assert line["first_output"] < 0  # nothing has set it since


def test_cell_says_when_output_came(rehearse):
    line = rehearse(*ONE)[-1]
    assert line["first_output"] > line["prepared"] > 0
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


def test_no_step_is_timed_while_weights_are_pinned(sim, monkeypatch):
    from benchmarks.gpu import measure as module
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.ways import every
    from benchmarks.gpu.ways.base import Way

    left, begun = [4096] * 5, []
    plan = SimpleNamespace(streamed_bytes=0)

    def prepare(at):
        model = at.task.models[0].to(at.place)
        # As many steps as it takes, after those in which nothing else is learned.
        model.register_forward_pre_hook(lambda *_: left.__delitem__(slice(1)))
        model._stagehand_layer_runtime = SimpleNamespace(
            report=lambda: SimpleNamespace(pinning_bytes=sum(left)),
            end_step=lambda: None,
            telemetry=SimpleNamespace(totals=lambda: {"stall_time_ms": 0.0}),
            _measure=SimpleNamespace(timed=True),
            _parts=SimpleNamespace(steering=SimpleNamespace(plan=plan)),
        )

    plain = module.time_phases

    def timed(*arguments):
        begun.append(len(left))
        return plain(*arguments)

    monkeypatch.setattr(module, "time_phases", timed)
    way = Way(kinds=frozenset({"inference"}), prepare=prepare)
    monkeypatch.setitem(every.WAYS, "stagehand", way)
    assert module.measure(_small("stagehand"), SimulatedCard())["pinned"] > 0
    assert begun == [0, 0]  # the latter to see where compute waits


ROOM = {"whole_bytes": 900, "budget_bytes": 300}  # 600 cross
RATES = {"h2d": 50.0, "d2h": 40.0, "h2d_both": 30.0, "d2h_both": 20.0, "host": 90.0}
# Kind; seconds of the phases; room; rates; and what the formula gives.
BOUNDS = {
    "inference computes": ("inference", [13.0], {}, {}, 13),
    "inference copies": ("inference", [11.0], {}, {}, 600 / 50),
    "disk copies": ("disk", [1.0], {"ram_bytes": 500}, {"disk": 20.0}, 600 / 50),
    "disk reads": ("disk", [1.0], {"ram_bytes": 200}, {"disk": 20.0}, 400 / 20),
    "pair computes": ("pair", [6.0, 7.0], {}, {}, 6 + 7),
    "pair copies": ("pair", [6.0, 5.0], {}, {}, 600 / 50),
    "lora computes": ("lora", [13.0, 26.0, 2.0], {}, {}, 13 + 26 + 2),
    "lora copies": ("lora", [11.0, 11.5, 2.0], {}, {}, 12 + 12 + 2),
    "lora copies forward": ("lora", [11.0, 26.0, 2.0], {}, {}, 12 + 26 + 2),
    "lora spills": ("lora", [1, 2, 3], {"spilled_bytes": 800}, {}, 20 + 28 + 3),
    "lora spills little": ("lora", [1, 2, 3], {"spilled_bytes": 50}, {}, 12 + 13 + 3),
    "lora reads": (
        "lora",
        [1, 25, 3],
        {"ram_bytes": 200},
        {"disk": 20.0},
        400 / 20 + 25 + 3,
    ),
    "lora reads twice": (
        "lora",
        [1, 2, 3],
        {"ram_bytes": 200},
        {"disk": 20.0},
        2 * 400 / 20 + 3,
    ),
    "full computes": ("full", [99.0, 199.0, 5.0], {}, {}, 99 + 199 + 35),
    "full copies": ("full", [1.0, 2.0, 5.0], {"budget_bytes": 100}, {}, 16 + 45 + 35),
    "full gradients": (
        "full",
        [1.0, 2.0, 5.0],
        {"budget_bytes": 100},
        {"h2d_both": 16.0},
        16 + 50 + 35,
    ),
    "overlap, the host": ("overlap", [1.0, 2.0, 5.0], {}, {"host": 30.0}, 12 + 105),
    "overlap, backward": ("overlap", [1.0, 200.0, 5.0], {}, {}, 12 + 200),
    "activations leave": ("activations", [1.0, 2.0, 3.0], {}, {}, 15 + 12 + 3),
    "activations stay": (
        "activations",
        [1.0, 2.0, 3.0],
        {"budget_bytes": 999},
        {},
        1 + 2 + 3,
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bound_is_that_of_its_formula(name):
    """Of 900 bytes; the host touches each number 7 times, a copy does twice."""
    from benchmarks.gpu.rates import Rates
    from benchmarks.gpu.shapes import Stack
    from benchmarks.gpu.tasks.base import Room
    from benchmarks.gpu.tasks.making import KINDS

    kind, seconds, room, rates, expected = BOUNDS[name]
    task = KINDS["full" if kind == "overlap" else kind]([Stack([])], [()])
    task.overlaps = kind == "overlap"
    found = task.bound(seconds, Room(**ROOM | room), Rates(**RATES | rates))
    assert found == pytest.approx(expected)


def test_bound_counts_what_crosses_the_link_of_a_weight_and_no_table():
    from benchmarks.gpu.rates import Rates
    from benchmarks.gpu.tasks.base import Room
    from benchmarks.gpu.tasks.inference import Inference

    table = nn.Embedding(25, 1)  # 100 bytes
    task = Inference([nn.Sequential(table)], [()])
    assert task.bound([1.0], Room(**ROOM), Rates(**RATES)) == pytest.approx(500 / 50)
    task.link_share = 0.5
    assert task.bound([1.0], Room(**ROOM), Rates(**RATES)) == pytest.approx(250 / 50)


@pytest.mark.parametrize(
    ("tokens", "budget", "crossing"),
    [(1, 120, 28 / 4), (1, 60, 40 + 48 / 4), (2, 60, 40 + 48 / 2), (9, 60, 88)],
)
def test_bound_counts_of_experts_those_that_tokens_go_to(tokens, budget, crossing):
    from benchmarks.gpu.blocks.text import Experts
    from benchmarks.gpu.rates import Rates
    from benchmarks.gpu.tasks.base import Room
    from benchmarks.gpu.tasks.inference import Inference

    experts = Experts(1, 1, 4, taken=1)  # 48 bytes
    room = Room(**ROOM | {"whole_bytes": 100 + 48, "budget_bytes": budget})
    task = Inference([nn.Sequential(experts)], [(torch.zeros(tokens, 1),)])
    found = task.bound([0.0], room, Rates(**RATES))
    assert found == pytest.approx(crossing / 50)


@pytest.mark.parametrize(("way", "status"), [("stagehand", 1), ("naive-pinned", 0)])
def test_run_ends_with_an_error_if_this_library_failed(
    monkeypatch, tmp_path, way, status
):
    from benchmarks.gpu import __main__ as command

    def apart(cell, **_):
        if cell is None:
            return {"kind": "link", "device": "a card"}
        return {"kind": "cell", "cell": cell.line(), "failed": "why"}

    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "apart", apart)
    cell = ["--cells", f"inference/sdxl/6GiB/{way}", "--out", str(tmp_path)]
    assert command.main(cell) == status


def test_run_goes_on_where_one_stopped(rehearse, tmp_path):
    first = rehearse(*ONE)
    assert rehearse(*ONE) == first
    both = ["--cells", *ONE[1:], "inference/llama-3-8b/8GiB/naive-pinned"]
    assert [line["cell"]["way"] for line in rehearse(*both)] == [
        "stagehand",
        "naive-pinned",
    ]
    assert (tmp_path / "simulated.jsonl").read_text().count('"kind": "link"') == 1
    assert len(rehearse(*ONE, "--again")) == 3
    assert len(rehearse(*ONE, "--blocks", "3")) == 4


def test_page_takes_what_the_suite_writes(rehearse):
    from benchmarks.devices import device_section

    lines = rehearse("--cells", "inference/llama-3-8b/8GiB/[sm]*")
    text = "\n".join(device_section("simulated", lines))
    assert "#### inference/llama-3-8b/75%, about 4 blocks" in text
    assert "| mmgp | left out: " in text


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path):
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.lines import Lines

    cell = Cell(kind="inference", shape="sdxl", way="stagehand")
    Lines("card", tmp_path).write({"kind": "cell", "cell": cell.line()})
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(whole + whole[:-9])
    lines = Lines("card", tmp_path)
    assert cell in lines
    lines.write({"kind": "link"})
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in read] == ["cell", "link"]


def test_a_line_says_which_text_of_the_library_was_measured(tmp_path):
    from benchmarks.gpu.lines import Lines, source_of

    Lines("card", tmp_path).write({"kind": "link"})
    line = json.loads((tmp_path / "card.jsonl").read_text(encoding="utf-8"))
    package = tmp_path / "package"
    (package / "part").mkdir(parents=True)
    found = [line["source"]]
    for name, text in (("a.py", "1"), ("part/a.py", "1"), ("a.py", "2")):
        (package / name).write_text(text, encoding="utf-8")
        found.append(source_of(package))
    assert len(set(found)) == 4
    assert found[-1] == source_of(package)
    assert {len(source) for source in found} == {12}


@pytest.mark.parametrize("way", ["stagehand", "mmgp"])
def test_what_failed_is_tried_again_and_what_is_left_out_is_not(tmp_path, way):
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.lines import Lines

    shapes = {"sdxl": "failed", "flux.1": "left_out", "flux.2": None}
    cells = [Cell(kind="inference", shape=shape, way=way) for shape in shapes]
    for cell in cells[:2]:
        line = {"cell": cell.line(), shapes[cell.shape]: "why"}
        Lines("card", tmp_path).write(line)
    lines = Lines("card", tmp_path)
    assert [cell in lines for cell in cells] == [False, True, False]
    assert [lines.tried(cell) for cell in cells] == [True, True, False]
    assert cells[1] not in Lines("other", tmp_path)


@pytest.fixture
def another(sim, monkeypatch):
    """Measure by a way that ends with an error."""
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.ways import every
    from benchmarks.gpu.ways.base import Way
    from benchmarks.gpu.worker import attempt

    def measured(kind=None, text="", package="torch"):
        def prepare(_):
            raise kind(text)

        way = Way(kinds=frozenset({"inference"}), prepare=prepare, package=package)
        monkeypatch.setitem(every.WAYS, "another", way)
        return attempt(_small("another"), SimulatedCard())

    return measured


def test_other_library_is_left_out_for_what_it_says_itself(
    another, monkeypatch, tmp_path
):
    from benchmarks.gpu.ways.base import LeftOutError

    line = another(LeftOutError, "not with this")
    assert line["left_out"] == "not with this"
    line = another(torch.OutOfMemoryError, "too little\nand more")
    assert line["left_out"] == "OutOfMemoryError: too little"
    line = another(package="nosuchpackage")
    assert line["left_out"] == "nosuchpackage is not installed"
    (tmp_path / "brokenpackage.py").write_text("import nosuchpackage")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = another(package="brokenpackage")
    assert line["left_out"] == "brokenpackage: No module named 'nosuchpackage'"


@pytest.mark.parametrize("kind", [TypeError, AttributeError, ImportError, RuntimeError])
def test_slip_in_the_way_of_another_library_is_not_left_out(another, kind):
    with pytest.raises(kind, match="a slip"):
        another(kind, "a slip")


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


_WARNED = "a.py:1: UserWarning: beware\n  warn()\n"
_LAST_WORDS = {
    "nothing": ("", ""),
    "a line": (f"{_WARNED}Killed\n", "Killed"),
    "an error of the driver": (
        f"{_WARNED}Traceback (most recent call last):\n"
        '  File "a.py", line 2, in <module>\n    run()\n'
        "torch.AcceleratorError: CUDA error: invalid argument\n"
        "CUDA kernel errors might be asynchronously reported at some other call\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n",
        "torch.AcceleratorError: CUDA error: invalid argument",
    ),
    "the second error": (
        "Traceback (most recent call last):\nOSError: no\n\nDuring that:\n\n"
        "Traceback (most recent call last):\n  run()\nRuntimeError: also no\n",
        "RuntimeError: also no",
    ),
    "a broken report": ("Traceback (most recent call last):\n  File", ""),
}


@pytest.mark.parametrize("name", _LAST_WORDS)
def test_reason_of_a_failure_is_the_line_that_names_it(name):
    from benchmarks.gpu.worker import why

    said, reason = _LAST_WORDS[name]
    assert why(said) == reason


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


def test_cell_that_is_given_up_says_what_its_time_went_for(tmp_path, monkeypatch):
    from benchmarks.gpu import stages, worker

    clock = iter((10.0, 40.4, 52.0))

    def killed(command, **_):
        monkeypatch.setattr(worker, "Card", lambda: None)
        monkeypatch.setattr(stages.time, "perf_counter", clock.__next__)
        with pytest.raises(KeyboardInterrupt):
            worker.main(command[3:])
        raise subprocess.TimeoutExpired(command, 60)

    def measure(cell, card, folder, stages):
        for stage in ("resident", "building", "first outcome"):
            stages.begin(stage)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "measure", measure)
    monkeypatch.setattr(worker.subprocess, "run", killed)
    line = worker.apart(_small("stagehand"), dry=False, folder=tmp_path, seconds=60)
    assert line["failed"] == (
        "it took more than 60 seconds: resident 30 s, building 12 s, first outcome"
    )


def test_line_says_what_the_time_of_its_cell_went_for(sim):
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.worker import attempt

    took = attempt(_small("stagehand"), SimulatedCard())["took"]
    assert list(took) == [
        "resident",
        "building",
        "first outcome",
        "settling",
        "timing",
        "watching",
        "counting",
        "last outcome",
    ]
    assert min(took.values()) > 0


def test_cell_that_the_end_of_a_run_cuts_short_is_measured_by_the_next(
    monkeypatch, tmp_path, capsys
):
    """Of another library, too; what failed before comes after what was not tried."""
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
    assert seen == [True] * 4  # two resident ones, the first, the last
    assert not torch.are_deterministic_algorithms_enabled()


def test_process_that_runs_one_cell_writes_its_line(sim, tmp_path):
    from benchmarks.gpu.worker import main

    cell, result = _small("stagehand", budget="75%"), tmp_path / "line"
    assert main([json.dumps(cell.line()), str(result), "dry", "", ""]) == 0
    line = json.loads(result.read_text())
    assert line["cell"] == cell.line()
    assert line["equal"]
    assert main(["null", str(result), "dry", "", ""]) == 0
    line = json.loads(result.read_text())
    assert (line["kind"], line["device"]) == ("link", "simulated")


def test_link_is_measured_once_for_a_device_and_a_version_of_torch(sim, tmp_path):
    from benchmarks.gpu.lines import Lines
    from benchmarks.gpu.worker import main

    def measured():
        assert main(["null", str(tmp_path / "line"), "dry", str(tmp_path), ""]) == 0
        return json.loads((tmp_path / "line").read_text())

    known = {"kind": "link", "h2d": {}}
    Lines("another card", tmp_path).write(known)
    older = json.dumps({"device": "simulated", "torch": "1.0", **known})
    (tmp_path / "simulated.jsonl").write_text(older + "\n")
    assert measured()["h2d"]
    Lines("simulated", tmp_path).write({"kind": "link", "h2d": {"7": 7.0}})
    assert measured()["h2d"] == {"7": 7.0}


def test_ballast_leaves_what_it_shall_and_ends_when_it_is_left():
    from benchmarks.gpu.ballast import ballast

    with ballast(1_000_000, dry=True) as held:  # then waits for its end
        assert held == pytest.approx(1e6, rel=0.01)


def test_ballast_that_could_not_is_an_error(monkeypatch):
    from benchmarks.gpu import ballast as module

    monkeypatch.setattr(module.sys, "executable", "false")
    with (
        pytest.raises(RuntimeError, match="could not leave 1000 bytes"),
        module.ballast(1000),
    ):
        pass


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
    from benchmarks.devices import device_section
    from benchmarks.gpu import card as module
    from benchmarks.gpu.__main__ import _sentence
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
    monkeypatch.setattr("benchmarks.gpu.rates._HOST_COPIED", 4096)
    card = module.Card()
    assert measure_link(card)["device"] == "a card"
    line = attempt(_small("stagehand", cap="75%"), card)
    assert line["equal"]
    assert line["pinned_bytes"] == 12345
    # As in a container without rights: the rest of the line counts.
    assert line["h2d_copies"] is line["d2h_bytes"] is None
    assert line["equal_at_end"]
    assert "rights to use CUPTI" in _sentence(line)
    page = "".join(device_section("a card", [line]))
    assert "2 steps" in page
    assert "None +" not in page


def test_rate_of_host_memory_is_the_usual_one_of_more_than_caches_hold(monkeypatch):
    from benchmarks.gpu import link, rates

    asked = []
    monkeypatch.setattr(rates, "both_ways", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(rates, "copy_rate", lambda *_, **__: 1.0)
    monkeypatch.setattr(rates, "host_rate", lambda n: asked.append(n) or 1.0)
    rates.Rates.of(SimpleNamespace(dry=False, device=None))
    assert asked[0] >= 1 << 30
    seconds = iter([8.0, 4.0, 4.0, 4.0, 4.0, 1.0, 9.0])
    monkeypatch.setattr(link, "_timed", lambda run: (next(seconds), run()))
    assert link.host_rate(1000) == 250


def test_what_pinning_costs_does_not_count_the_devices_own_start(
    sim, monkeypatch, tmp_path
):
    """The first piece of all takes seconds, whatever its size."""
    from benchmarks.gpu import link

    now, ready = [0.0], []
    pinned = type(find_device(None)).pinned

    def tick():
        now[0] += 1e-3
        return now[0]

    def slow_at_first(device, nbytes):
        now[0] += 0.0 if ready else 5.0
        ready.append(nbytes)
        return pinned(device, nbytes)

    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(type(find_device(None)), "pinned", slow_at_first)
    found = link.calibrate(find_device(None), (1 << 10, 1 << 13), tmp_path)
    assert found.pin_seconds_per_gb == pytest.approx(1e-3 * 1e9 / (1 << 13))


def test_other_library_is_left_out_where_the_host_has_too_little(sim, monkeypatch):
    from benchmarks.gpu import measure as module
    from benchmarks.gpu.card import SimulatedCard
    from benchmarks.gpu.worker import attempt

    monkeypatch.setattr(module, "free_host_bytes", lambda: 1000)
    line = attempt(_small("naive-pinned"), SimulatedCard())
    assert "page-locks" in line["left_out"]
    assert "step" in attempt(_small("naive-pageable"), SimulatedCard())


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
    kernel = {"name": "gemm", "cat": "kernel"}
    assert count_copies([up, kernel, down, up, *other]) == Copies(2, 1, 200, 7)
    assert count_copies([{}, kernel]) == Copies(0, 0, 0, 0)
    assert count_copies([{}]) is None


def test_names_of_cells_are_printed_and_unique(capsys):
    from benchmarks.gpu.__main__ import main
    from benchmarks.gpu.suite import SHORT, all_cells, pick

    assert main(["--list", "--cells", "lora/*", "--ways", "fsdp2"]) == 0
    assert "lora/ltx-2/24GiB/fsdp2" in capsys.readouterr().out.splitlines()
    cells = list(all_cells())
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(pick(cells, names=[name]) for name in SHORT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cells", *ONE[1:], "inference/llama3/*"], "'inference/llama3/*'"),
        (["--short", *ONE], "--cells: not allowed with argument --short"),
        (["--kinds", "full", "--ways", "mmgp"], "no cell is all that is asked for"),
        (["--dry", "--cells", "*/sdxl/*/mmgp"], "no cell is all that is asked for"),
    ],
)
def test_nothing_is_measured_if_no_cell_is_what_is_asked_for(capsys, options, said):
    """A slip in a name in the minutes with a device: all of them would pass."""
    from benchmarks.gpu.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert said in capsys.readouterr().err


def test_command_says_what_it_takes(capsys):
    from benchmarks.gpu.__main__ import main
    from benchmarks.gpu.suite import SHORT

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = "".join(capsys.readouterr().out.split())
    assert all(name in text for name in SHORT)


def test_command_wants_a_device_unless_it_rehearses(capsys):
    from benchmarks.gpu.__main__ import main

    assert main(ONE) == 2
    assert "--dry" in capsys.readouterr().out


REPORTS = {
    "measured": ("passed", [("overlap", 0.97)], None, "PASSED (overlap: 0.97)"),
    "failed": ("failed", [], "assert 1 < 0\nmore", "FAILED (assert 1 < 0)"),
    "both": ("failed", [("rate", 2)], "too slow", "FAILED (rate: 2; too slow)"),
    "as ever": ("passed", [], None, None),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_was_measured_and_why_a_test_failed_is_said_at_once(name):
    from gpu.conftest import pytest_report_teststatus

    outcome, properties, message, said = REPORTS[name]
    report = pytest.TestReport(
        "a test", ("", 0, ""), {}, outcome, None, "call", user_properties=properties
    )
    if message is not None:
        report.longrepr = SimpleNamespace(reprcrash=SimpleNamespace(message=message))
    found = pytest_report_teststatus(report)
    assert (found and found[2]) == said


def test_gpu_tests_are_collected_without_the_simulated_device():
    """Beside it torch has no other accelerator: it stood before the GPU.

    As by the command `pytest`, which does not put its folder on the path.
    """
    code = (
        "import sys; sys.path.remove('');"
        "import pytest; pytest.main(['-m', 'gpu', '--collect-only', '-q', *{}]);"
        "print('simulated' in [name.split('.')[0] for name in sys.modules])"
    )
    command = [sys.executable, "-c", code.replace("{}", str([str(ROOT / "tests")]))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    *_, collected, loaded = done.stdout.strip().splitlines()
    assert "tests collected" in collected
    assert "error" not in collected, done.stdout
    assert "[rehearsal" not in done.stdout  # it needs that device
    assert loaded == "False"
