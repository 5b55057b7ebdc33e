"""One way to train a model resident and streamed, and to hold one to the other.

A test writes an ordinary training script against a `Run`. It is run twice, with the
model resident on the device and streamed, and all that it notes must be the same to the
bit: every gradient after every backward, and at the end every parameter and the state
of every optimizer.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from architectures.trees import assert_bitwise_equal, flatten
from stagehand.errors import StagehandOOMError
from stagehand.report import Report
from stagehand.runtime import Runtime
from stagehand.torch_private import top_saved_hooks
from stagehand.units import MIB
from streamed import weight_bytes

WIDTH = 16

RESPECTED = [
    {name: value}
    for name in ("respect_saved_tensors_hooks",)
    if name in inspect.signature(checkpoint).parameters
    for value in (True, False)
]
"""Options of selective checkpointing that there are from torch 2.15 on."""

Script = Callable[["Run"], None]


# Models


class OnTwoStreams(nn.Module):
    """Each layer computes on two streams at once, and is recomputed on one of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(
        self, x: torch.Tensor, side: torch.Stream, reentrant: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        here = torch.accelerator.current_stream()
        kept = []  # until nobody computes with them
        for layer in self.layers:
            side.wait_stream(here)
            with side:
                again = checkpoint(layer, x, use_reentrant=reentrant)
            once = layer(x)
            here.wait_stream(side)
            kept += [x, again]
            x = once + again
        return x, kept


class Residual(nn.Module):
    """A block: norm, two linear layers, and the input added."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


class Net(nn.Module):
    """An entry, residual blocks and a head."""

    def __init__(self, depth: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)

    def around(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call a block; subclasses put something around it."""
        return block(x)


class Recomputing(Net):
    """Recomputes its blocks in backward, where there will be one."""

    reentrant = False

    def around(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return block(x)
        recomputed: torch.Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return recomputed


class Reentering(Recomputing):
    """In the other way."""

    reentrant = True


def built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Let a function that makes a model make the same one at every call."""

    @functools.wraps(make)
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return make()

    return build


@built
def net() -> nn.Module:
    return Net()


# Settings


@dataclass(frozen=True)
class Setting:
    """Where and how a model is streamed."""

    place: str
    mode: str
    budget: str

    def __str__(self) -> str:
        return f"{self.place}-{self.mode}-{self.budget}"

    def bytes_for(self, build: Callable[[], nn.Module]) -> int:
        """Return the budget in bytes."""
        smallest = _smallest(build, self.place, self.mode)
        weights = weight_bytes(build())
        shares = {
            "smallest": 0,
            "third": weights // 3,
            "most": 3 * weights // 4,
            "all": 8 * weights,
        }
        return max(smallest, shares[self.budget])

    def stream(self, model: nn.Module, budget: int, **options: Any) -> Runtime:
        """Stream a model in place."""
        if self.mode == "layers":
            stagehand.layer(model, vram_budget=budget, device=self.place, **options)
            runtime: Runtime = model._stagehand_layer_runtime
            return runtime
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=budget / MIB,
            vram_low_watermark_mb=0.9 * budget / MIB,
            telemetry_enabled=False,
        )
        return stagehand.StagehandRuntime(
            model, config, r"^blocks\.\d+$", device=self.place, **options
        )


@functools.cache
def _smallest(build: Callable[[], nn.Module], place: str, mode: str) -> int:
    try:
        Setting(place, mode, "").stream(build(), 64)
    except StagehandOOMError as error:
        return error.needed_bytes
    raise AssertionError("a budget of 64 bytes was accepted")


TIGHT = Setting("hpu", "layers", "smallest")
FEW = [TIGHT, Setting("hpu", "blocks", "third")]
SOME = [*FEW, Setting("hpu", "layers", "third"), Setting("cpu", "layers", "smallest")]
ALL = [
    Setting(place, mode, budget)
    for place in ("hpu", "cpu")
    for mode in ("layers", "blocks")
    for budget in ("smallest", "third", "all")
]


def over(settings: list[Setting]) -> pytest.MarkDecorator:
    """Run a test in each of the settings."""
    return pytest.mark.parametrize("setting", settings, ids=str)


# Runs


@dataclass(kw_only=True)
class Run:
    """A model in training, and what was noted of it."""

    model: nn.Module
    place: str
    runtime: Runtime | None = None
    """None if the model is resident."""
    budget: int = 0
    notes: list[tuple[str, Any]] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    """Hooks to take off at the end: a tensor in a cycle with a hook is never freed."""

    def batch(self, number: int = 0, rows: int = 4) -> torch.Tensor:
        """Return the same inputs for the same number, on the device."""
        generator = torch.Generator().manual_seed(number)
        return torch.randn(rows, WIDTH, generator=generator).to(self.place)

    def loss(self, number: int = 0) -> torch.Tensor:
        """Run the model forward, to a mean of squares."""
        return self.model(self.batch(number)).square().mean()

    def optimizer(
        self, kind: type[torch.optim.Optimizer], *, of: Any = None, **settings: Any
    ) -> torch.optim.Optimizer:
        """Make an optimizer whose state is compared at the end."""
        parameters = self.model.parameters() if of is None else of
        made = kind(parameters, **settings)
        self.optimizers.append(made)
        return made

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward and note every gradient."""
        loss.backward(**options)
        self.look()

    def look(self) -> None:
        """Note every gradient; each lies where its parameter does."""
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            self.note(f"gradient of {name}", grad)
            if grad is not None:
                assert grad.device == parameter.device, name

    def note(self, what: str, tree: Any) -> None:
        """Note tensors under a name."""
        kept = [tensor.detach().cpu().clone() for tensor in flatten(tree)]
        self.notes.append((f"note {len(self.notes)}, {what}", kept))

    def finish(self) -> None:
        """Note parameters, buffers and the states of optimizers."""
        for name, tensor in self.model.state_dict().items():
            self.note(f"{name} at the end", tensor)
        for optimizer in self.optimizers:
            self.note("an optimizer's state", optimizer.state_dict()["state"])
        for handle in self.handles:
            handle.remove()


def sgd(run: Run, lr: float = 0.1) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    return run.optimizer(torch.optim.SGD, lr=lr, momentum=0.9)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, and clear the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def train(
    run: Run,
    steps: int = 3,
    batches: int = 2,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The plainest of scripts, with some micro-batches a step."""
    optimizer = optimizer or sgd(run)
    for number in range(steps):
        for each in range(batches):
            run.backward(run.loss(10 * number + each))
        step(optimizer)


def assert_same_notes(run: Run, expected: Run) -> None:
    """Compare what two runs noted, bit by bit and in order."""
    assert [what for what, _ in run.notes] == [what for what, _ in expected.notes]
    for (what, mine), (_, theirs) in zip(run.notes, expected.notes, strict=True):
        assert_bitwise_equal(mine, theirs, what)


def run_resident(build: Callable[[], nn.Module], script: Script, place: str) -> Run:
    """Run the script with all of the model on the device."""
    run = Run(model=build().to(place), place=place)
    torch.default_generator.manual_seed(7)
    script(run)
    run.finish()
    return run


def assert_trains_equally(
    build: Callable[[], nn.Module],
    script: Script,
    setting: Setting,
    *,
    abandoned: bool = False,
    **options: Any,
) -> Report:
    """Run a script resident and streamed; both must do the same, within the budget.

    Args:
        build: Makes the same model at every call.
        script: What is done with it.
        setting: How it is streamed.
        abandoned: Whether slots may be left to who holds their memory.
        options: For `stagehand.layer`, or for the runtime of block mode.

    Returns:
        The streamed run's report.
    """
    expected = run_resident(build, script, setting.place)
    run = start(build, setting, **options)
    torch.default_generator.manual_seed(7)
    script(run)
    run.finish()
    assert_same_notes(run, expected)
    return end(run, abandoned=abandoned)


def start(build: Callable[[], nn.Module], setting: Setting, **options: Any) -> Run:
    """Stream a new model."""
    model = build()
    budget = setting.bytes_for(build)
    runtime = setting.stream(model, budget, **options)
    return Run(model=model, place=setting.place, runtime=runtime, budget=budget)


def end(run: Run, *, abandoned: bool = False) -> Report:
    """Check that nothing is left open, and shut down."""
    runtime, model = run.runtime, run.model
    assert runtime is not None
    assert_at_rest(run)
    before = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    runtime.shutdown()
    report = runtime.report()
    assert report.peak_device_bytes <= run.budget
    assert abandoned or report.abandoned_slots == 0
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu", name
        assert_bitwise_equal(parameter, before[name], f"{name} after shutdown")
    return report


def assert_at_rest(run: Run, *, interrupted: bool = False) -> None:
    """Nothing is in use, and every streamed tensor and gradient is on the host.

    What an interrupt left open is closed when the model is entered again.
    """
    assert interrupted or top_saved_hooks() is None
    assert run.runtime is not None
    with run.runtime._edges.lock:  # autograd's thread may still be closing a failure
        pass
    assert interrupted or not run.runtime._parts.scheduler.in_use
    gradients = run.runtime._uses.gradients
    assert interrupted or gradients is None or gradients._arriving_bytes == 0
    if gradients is not None:  # where autograd's thread has closed it
        gradients._take_astray()
    for tensor in run.runtime.streamed_tensors:
        block = run.runtime._uses.owners[id(tensor)]
        if not block.stays or block.trains:
            assert tensor.device.type == "cpu", block.name
            assert tensor.grad is None or tensor.grad.device.type == "cpu", block.name


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy, a plain model."""
    return deepcopy(model)
