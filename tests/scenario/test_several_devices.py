"""Several devices: a process each, or a part of a model each."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exc
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal
from process_groups import in_processes
from scenario.small import runtime_of
from stagehand.errors import ConfigError
from training import WIDTH, net

SIZE = 2
IGNORE = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
BUDGET = 40_000
"""The base fits it twice; adapters of rank 4 take more than a sixteenth of it."""


def batch(step: int, place: str) -> torch.Tensor:
    """Return this process's inputs of a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(place)


def average(tensors: list[nn.Parameter]) -> None:
    """As the documentation shows it."""
    for parameter in tensors:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(
    forward: Callable[..., torch.Tensor],
    model: nn.Module,
    place: str,
    averaged: list[nn.Parameter],
    between: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Take some steps, of two micro-batches each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(3):
        for micro in range(2):
            forward(batch(2 * step + micro, place)).square().mean().backward()
        average(averaged)
        optimizer.step()
        optimizer.zero_grad()
        between()
    return [p.detach().cpu().clone() for p in trained]


def adapted(rank: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        config = peft.LoraConfig(target_modules=["up"], r=rank, init_lora_weights=False)
        return peft.get_peft_model(net(), config)


def frozen(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not p.requires_grad]


def wrapped(model: nn.Module, ignored: list[str]) -> nn.Module:
    IGNORE(model, ignored)
    return DistributedDataParallel(model)


def averaged_after_backward(place: str) -> None:
    plain = net().to(place)
    expected = train(plain, plain, place, [*plain.parameters()])
    model = stagehand.layer(net(), vram_budget=BUDGET // 2, device=place)
    trained = train(model, model, place, [*model.parameters()])
    assert_bitwise_equal(trained, expected, "trained")
    runtime_of(model).shutdown()


def averaged_in_hooks(place: str) -> None:
    def hooked(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: average([p]))
        return model

    plain = hooked(net().to(place))
    expected = train(plain, plain, place, [])
    model = hooked(stagehand.layer(net(), vram_budget=BUDGET // 2, device=place))
    assert_bitwise_equal(train(model, model, place, []), expected, "trained")
    runtime_of(model).shutdown()


def plain_adapters(place: str, rank: int) -> list[torch.Tensor]:
    """What wrapped adapters come to in a resident model."""
    model = adapted(rank).to(place)
    return train(wrapped(model, frozen(model)), model, place, [])


def adapters_that_are_wrapped(place: str) -> None:
    """They are averaged as those of a resident model, also after they were saved."""
    model = stagehand.layer(adapted(1), vram_budget=BUDGET, device=place)
    model.to(place)
    parallel = wrapped(model, frozen(model))

    def save() -> None:
        state = model.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        assert all(
            torch.equal(state[name], p.detach().cpu())
            for name, p in model.named_parameters()
        )
        with torch.no_grad():
            parallel(batch(0, place))

    trained = train(parallel, model, place, [], save)
    assert_bitwise_equal(trained, plain_adapters(place, 1), "trained")
    runtime_of(model).shutdown()


def adapters_that_left_the_device(place: str) -> None:
    """Their hooks are gone: that is told, and wrapping them again helps."""
    model = stagehand.layer(adapted(1), vram_budget=BUDGET, device=place)
    model.to(place)
    parallel = wrapped(model, frozen(model))
    parallel(batch(0, place)).sum().backward()
    model.zero_grad()
    model.to("cpu")
    model.to(place)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lora_A.* left the device after"):
            parallel(batch(0, place))
    again = train(wrapped(model, frozen(model)), model, place, [])
    assert_bitwise_equal(again, plain_adapters(place, 1), "trained")
    runtime_of(model).shutdown()


def adapters_that_were_wrapped_before(place: str) -> None:
    """Streaming begins with a way home: also of a wrapper that nobody has seen yet."""
    model = adapted(1).to(place)
    parallel = wrapped(model, frozen(model))
    for _ in range(2):
        stagehand.layer(model, vram_budget=BUDGET, device=place)
        model.to(place)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"lora_A.* left the device after"):
                parallel(batch(0, place))
        again = wrapped(model, frozen(model))
        with torch.no_grad():
            parallel(batch(0, place))
        again(batch(0, place)).sum().backward()
        model.zero_grad()
        with pytest.raises(ConfigError, match=r"lora_A.* left the device after"):
            parallel(batch(0, place))
        runtime_of(model).shutdown()
        parallel = again


def adapters_of_a_wrapper_that_is_gone(place: str) -> None:
    """Nobody waits for their gradients any more: they come home to be saved."""
    model = stagehand.layer(adapted(1), vram_budget=BUDGET, device=place)
    model.to(place)
    parallel = wrapped(model, frozen(model))
    parallel(batch(0, place)).sum().backward()
    assert runtime_of(model)._placing.hand_out()
    runtime_of(model)._placing.resume()
    known = weakref.ref(parallel)
    del parallel
    gc.collect()
    assert known() is None
    assert not runtime_of(model)._placing.hand_out()
    runtime_of(model).shutdown()


def adapters_that_stream(place: str) -> None:
    """Nothing would average them; named and averaged by hand, they train."""
    model = stagehand.layer(adapted(4), vram_budget=BUDGET, device=place)
    model.to(place)
    parallel = wrapped(model, frozen(model))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lora_A.* and 7 more, which stream"):
            parallel(batch(0, place))
    plain = adapted(4).to(place)
    expected = train(plain, plain, place, [*plain.parameters()])
    trained = train(model, model, place, [*model.parameters()])
    assert_bitwise_equal(trained, expected, "trained")
    runtime_of(model).shutdown()


def all_wrapped_on_the_host(place: str) -> None:
    """There is one device, and gradients are made where they are averaged."""
    plain = net()
    expected = train(DistributedDataParallel(plain), plain, place, [])
    model = stagehand.layer(net(), vram_budget=BUDGET // 2, device=place)
    trained = train(DistributedDataParallel(model), model, place, [])
    assert_bitwise_equal(trained, expected, "trained")
    runtime_of(model).shutdown()


SCRIPTS = [
    (averaged_after_backward, "hpu"),
    (averaged_after_backward, "cpu"),
    (averaged_in_hooks, "hpu"),
    (adapters_that_are_wrapped, "hpu"),
    (adapters_that_left_the_device, "hpu"),
    (adapters_that_were_wrapped_before, "hpu"),
    (adapters_of_a_wrapper_that_is_gone, "hpu"),
    (adapters_that_stream, "hpu"),
    (all_wrapped_on_the_host, "cpu"),
]


class Parts(nn.Module):
    """Some layers for each device."""

    def __init__(self, reentrant: bool | None, places: list[str]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)
            self.parts = nn.ModuleList(nn.Sequential(*net().blocks) for _ in places)
        self.reentrant = reentrant
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, place in zip(self.parts, self.places, strict=True):
            x = self.around(part, x.to(place))
        return x

    def around(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("places", [["hpu", "cpu", "hpu"], ["cpu", "hpu", "cpu"]])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_parts_of_a_model_stream_to_a_device_each(sim, places, reentrant):
    plain, model = Parts(reentrant, places), Parts(reentrant, places)
    for place, part, other in zip(places, plain.parts, model.parts, strict=True):
        part.to(place)
        stagehand.layer(other, vram_budget=BUDGET // 2, device=place)
    found = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters())
        outputs = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, WIDTH, generator=generator, requires_grad=True)
            outputs.append(each(x))
            outputs[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([t.detach().cpu() for t in (*outputs, *each.parameters())])
    assert_bitwise_equal(*found, "outputs and weights")
    for part in model.parts:
        runtime_of(part).shutdown()


@contextmanager
def failures_noted(outcomes: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - all of them: the test fails in another process
        outcomes[name] = format_exc()


def run(folder: Path) -> None:
    """Run all scripts, in one of the processes."""
    from simulated import sim_device

    outcomes = {f"{script.__name__} {place}": "" for script, place in SCRIPTS}
    for script, place in SCRIPTS:
        with failures_noted(outcomes, f"{script.__name__} {place}"):
            script(place)
            torch.accelerator.synchronize()
            assert not sim_device.races()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What went wrong, by script, in each process."""
    folder = tmp_path_factory.mktemp("processes")
    in_processes(SIZE, run, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.mark.parametrize(("script", "place"), SCRIPTS)
def test_two_processes_train_as_with_resident_models(outcomes, script, place):
    assert [found[f"{script.__name__} {place}"] for found in outcomes] == [""] * SIZE
