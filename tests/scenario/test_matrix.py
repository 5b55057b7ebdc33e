"""Real models stream exactly and within their budget, and are given back whole."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    GENERATORS,
    Architecture,
    assert_bitwise_equal,
    flatten,
    to_device,
)
from safetensors.torch import save_file
from streamed import GRAD_MODES, Shape, original, smallest_budget, stream, weight_bytes
from torch import nn

import stagehand

PASSES = 3  # the first, the learned one, the one planned with measured times
MODES = ("layers", "blocks")


@functools.cache
def budgets(architecture: Architecture, mode: str, device: str) -> list[int]:
    """The smallest that works, and what lies a third and two thirds above it.

    Weights that a module reads from its children are found in the first pass: they
    need room beside it, and the refusal says how much.
    """
    smallest = smallest_budget(architecture, mode, device)
    while (needed := refused(architecture, mode, device, smallest)) is not None:
        assert needed > smallest
        smallest = needed
    room = max(weight_bytes(original(architecture)) - smallest, 0)
    return [smallest, smallest + room // 3, smallest + 2 * room // 3]


def refused(
    architecture: Architecture, mode: str, device: str, budget: int
) -> int | None:
    """What a first pass says it needs, if the budget is too small for it."""
    model = deepcopy(original(architecture))
    runtime = stream(model, architecture, mode, device, budget)
    try:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always", stagehand.StagehandWarning)
            run(architecture, model, device)
    except stagehand.StagehandOOMError as error:
        return error.needed_bytes
    finally:
        runtime.shutdown()
    # Without room to let such weights stay it works, slowly, and warns.
    return budget + budget // 8 if caught else None


def run(architecture: Architecture, model: nn.Module, where: str) -> list[torch.Tensor]:
    output = architecture.call(model, to_device(architecture.inputs(), where))
    return [tensor.detach().cpu() for tensor in flatten(output)]


def resident(
    architecture: Architecture,
    device: str,
    grad: AbstractContextManager[Any],
    sim: ModuleType,
) -> tuple[list[torch.Tensor], int]:
    """The outputs of the model held on the device, and the peak of its activations."""
    model = deepcopy(original(architecture)).to(device)
    held = sim.allocated_bytes()
    sim.reset_peak()
    with grad:
        outputs = run(architecture, model, device)
    return outputs, sim.peak_bytes() - held


def save_shards(model: nn.Module, folder: Path) -> Path:
    """Write the state dict in three files without an index."""
    folder.mkdir()
    state = {name: t.clone().contiguous() for name, t in model.state_dict().items()}
    names = sorted(state)
    for number in range(3):
        part = {name: state[name] for name in names[number::3]}
        save_file(part, folder / f"part-{number}.safetensors")
    return folder


def check(
    architecture: Architecture,
    mode: str,
    device: str,
    budget: int,
    *,
    expected: list[torch.Tensor],
    grad: str,
    files: Path | None,
) -> None:
    model = deepcopy(original(architecture))
    with torch.no_grad():
        run(architecture, model, "cpu")  # some set attributes of their own
    before = Shape.of(model)
    runtime = stream(model, architecture, mode, device, budget)
    if files is not None:
        assert runtime.convert_registry_to_file_backed_sharded(files) > 0
    for number in range(PASSES):
        with GRAD_MODES[grad]():
            outputs = run(architecture, model, "cpu" if number else device)
        assert_bitwise_equal(
            outputs, expected, f"{architecture} {mode} {budget} {grad} pass {number}"
        )
    report = runtime.report()
    assert report.peak_device_bytes <= budget
    # The first pass of SAM passes a view of a weight on to other modules.
    assert report.abandoned_slots <= (architecture.name == "sam")
    if files is not None and report.slots < report.blocks:
        assert report.disk_bytes > 0
    runtime.shutdown()
    assert Shape.of(model) == before
    for name, tensor in original(architecture).state_dict().items():
        assert_bitwise_equal(model.state_dict()[name], tensor, f"{name} afterwards")


@pytest.fixture
def shards(architecture: Architecture, tmp_path: Path) -> Iterator[Path]:
    yield save_shards(original(architecture), tmp_path / "shards")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_streamed_outputs_are_bitwise_those_of_the_resident_model(
    architecture: Architecture, mode: str, sim: ModuleType
) -> None:
    expected, _ = resident(architecture, "hpu", torch.no_grad(), sim)
    for budget in budgets(architecture, mode, "hpu"):
        check(
            architecture,
            mode,
            "hpu",
            budget,
            expected=expected,
            grad="no_grad",
            files=None,
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_weights_from_files_give_the_same_bits(
    architecture: Architecture, mode: str, shards: Path, sim: ModuleType
) -> None:
    expected, _ = resident(architecture, "hpu", torch.inference_mode(), sim)
    for budget in budgets(architecture, mode, "hpu"):
        check(
            architecture,
            mode,
            "hpu",
            budget,
            expected=expected,
            grad="inference_mode",
            files=shards,
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_passes_that_record_gradients_free_their_slots_and_give_the_same_bits(
    architecture: Architecture, sim: ModuleType
) -> None:
    expected, _ = resident(architecture, "hpu", torch.enable_grad(), sim)
    budget = budgets(architecture, "layers", "hpu")[1]
    check(
        architecture,
        "layers",
        "hpu",
        budget,
        expected=expected,
        grad="grad",
        files=None,
    )


@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_without_an_accelerator_the_host_streams_the_same_bits(
    architecture: Architecture, files: bool, shards: Path, sim: ModuleType
) -> None:
    expected, _ = resident(architecture, "cpu", torch.no_grad(), sim)
    for mode in MODES:
        check(
            architecture,
            mode,
            "cpu",
            budgets(architecture, mode, "cpu")[1],
            expected=expected,
            grad="no_grad",
            files=shards if files else None,
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_device_never_holds_more_than_the_budget_and_the_activations(
    architecture: Architecture, sim: ModuleType
) -> None:
    _, activations = resident(architecture, "hpu", torch.no_grad(), sim)
    budget = budgets(architecture, "layers", "hpu")[1]
    model = deepcopy(original(architecture))
    held = sim.allocated_bytes()
    runtime = stream(model, architecture, "layers", "hpu", budget)
    sim.reset_peak()
    for _ in range(PASSES):
        with torch.no_grad():
            run(architecture, model, "cpu")
    inputs = sum(t.numel() * t.element_size() for t in flatten(architecture.inputs()))
    # Inputs are moved by the runtime, so both copies can be there for a moment.
    assert sim.peak_bytes() - held <= budget + activations + 2 * inputs + 4096
    runtime.shutdown()


# `model.device` is that of the first parameter, which is on the host between passes.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("generator", GENERATORS, ids=str)
def test_generation_with_a_cache_gives_the_same_tokens_and_logits(
    generator: Architecture, mode: str, sim: ModuleType
) -> None:
    expected, _ = resident(generator, "hpu", torch.no_grad(), sim)
    for budget in budgets(generator, mode, "hpu")[:2]:
        check(
            generator,
            mode,
            "hpu",
            budget,
            expected=expected,
            grad="no_grad",
            files=None,
        )
