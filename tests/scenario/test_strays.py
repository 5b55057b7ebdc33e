"""Weights that are read elsewhere than in their own module's forward."""

import contextlib
import functools
import gc
import itertools
import re
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import stagehand
from architectures import assert_bitwise_equal
from interrupts import interrupted_at
from scenario.small import blocks_of, runtime_of
from stagehand import torch_private
from stagehand.errors import OrphanedParameterError, StagehandOOMError
from stagehand.residency.lookahead import LookAhead
from stagehand.torch_private import take_off
from stagehand.weights import strays
from stagehand.weights.stray_uses import StrayUses

WIDTH = 64
LAYER_BYTES = WIDTH * WIDTH * 4

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*every call is watched:stagehand.StagehandWarning"
)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Chain(nn.Module):
    """Three layers before and three behind the one that is tested."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before = nn.ModuleList(linear() for _ in range(3))
        self.middle = middle
        self.behind = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = layer(x).tanh()
        x = self.middle(x)
        for layer in self.behind:
            x = layer(x).tanh()
        return x


class Transposed(nn.Module):
    """Reads a layer's weight through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight.T


class Asking(nn.Module):
    """Makes a tensor where a layer's weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((1,), 0.5, device=self.inner.weight.device)
        return self.inner(x + scale)


class Fused(nn.Module):
    """Reads the weights of two layers in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.query = linear()
        self.key = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([self.query.weight, self.key.weight])
        query, key = nn.functional.linear(x, weight).chunk(2, dim=-1)
        return query * key


class Table(nn.Module):
    """Reads a table of embeddings as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.table.weight.t()).softmax(-1) @ self.table.weight


class Positions(nn.Embedding):
    """A table that looks its rows up in its own way."""

    def __init__(self) -> None:
        super().__init__(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[torch.arange(x.shape[-2], device=x.device)]


class Returning(nn.Module):
    """Returns a view of its weight, which is read when it is no longer in use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, rows: int) -> torch.Tensor:
        return self.weight[:rows]


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Returning()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.shape[-2])


READERS = [Transposed, Asking, Fused, Table, Positions, Outside]


def make(reader: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its input."""
    generator = torch.random.get_rng_state()
    torch.default_generator.manual_seed(5)
    model = Chain(reader()).requires_grad_(False)
    x = torch.randn(3, WIDTH)
    torch.random.set_rng_state(generator)
    return model, x


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("layers", [2, 3, 5], ids="{}_layers_fit".format)
@pytest.mark.parametrize("reader", READERS)
def test_weights_read_by_another_module_are_exact_in_any_budget(
    reader: Callable[[], nn.Module], layers: int, device: str, sim: ModuleType
) -> None:
    model, x = make(reader)
    x = x.to(device)
    expected = model.to(device)(x)
    stagehand.layer(model.to("cpu"), vram_budget=layers * LAYER_BYTES, device=device)
    for number in range(5):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
        assert sim.races() == []
    report = model._stagehand_layer_runtime.report()
    assert report.peak_device_bytes <= layers * LAYER_BYTES
    model._stagehand_layer_runtime.shutdown()


def test_refused_first_pass_names_a_budget_with_which_the_next_one_works(
    sim: ModuleType,
) -> None:
    """One call reads two layers, and the budget is for one."""
    model, x = make(Fused)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=LAYER_BYTES)
    runtime = model._stagehand_layer_runtime
    with pytest.raises(stagehand.StagehandOOMError) as caught:
        model(x)
    assert caught.value.needed_bytes == 2 * LAYER_BYTES
    runtime.set_budget(caught.value.needed_bytes)
    for number in range(4):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
    runtime.shutdown()


class Pool(nn.Module):
    """Hands the weights of four layers to one call, as attention pools do.

    Args:
        wide: Has another layer, as large as the four together.
    """

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear() for _ in range(4))
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if wide else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide is not None:
            x = self.wide(x)[..., :WIDTH]
        x = x.unsqueeze(1)
        pooled, _ = nn.functional.multi_head_attention_forward(
            *(x, x, x, WIDTH, 4, None, None, None, None, False, 0.0),
            *(self.out.weight, None),
            training=self.training,
            need_weights=False,
            use_separate_proj_weight=True,
            q_proj_weight=self.query.weight,
            k_proj_weight=self.key.weight,
            v_proj_weight=self.value.weight,
        )
        return pooled.squeeze(1)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_call_that_reads_many_weights_needs_room_for_these_and_says_so_once(
    sim: ModuleType, wide: bool, grad: bool
) -> None:
    """It was refused with one more weight's bytes at a time.

    Also where one slot of the plan had room for all of them; and again for what stayed
    since, that the refused pass had found.
    """
    model, x = make(lambda: nn.Sequential(Transposed(), Pool(wide), Pool(wide)))
    model.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        expected = model.to("hpu")(x.to("hpu")).detach()
    stagehand.layer(model.to("cpu"), vram_budget=LAYER_BYTES * (4 if wide else 2))
    runtime, refused, said = model._stagehand_layer_runtime, [], ""
    for number in range(4):
        with torch.set_grad_enabled(grad):
            try:
                output = model(x)
            except stagehand.StagehandOOMError as error:
                refused.append(error.needed_bytes)
                said = str(error)
                runtime.set_budget(error.needed_bytes)
                output = model(x)
        assert_bitwise_equal(output.detach(), expected, f"pass {number}")
        assert sim.races() == []
    assert refused == ([] if wide else [4 * LAYER_BYTES])
    assert wide or "'middle.1.out', " in said
    assert wide or "65.54 KB of device memory at once, beside 0 B that" in said
    assert runtime.report().peak_device_bytes <= 4 * LAYER_BYTES
    runtime.shutdown()


class Padded(nn.Module):
    """Keeps a row of a layer's weight while others run, as Gemma 4 does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.others = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        row = self.inner.weight[0]
        for layer in self.others:
            x = layer(x).tanh()
        return x + row


@torch.no_grad()
def test_a_weight_stays_of_which_a_view_is_kept_that_was_read_behind_its_module(
    sim: ModuleType,
) -> None:
    """Each pass left a slot to the view, beside the budget, which had room for it."""
    model, x = make(Padded)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=4 * LAYER_BYTES)
    runtime = model._stagehand_layer_runtime
    for number in range(5):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
    report = runtime.report()
    assert report.abandoned_slots <= 1  # in the first pass
    assert report.peak_device_bytes <= 4 * LAYER_BYTES
    assert sim.races() == []
    runtime.shutdown()


class Remembering(nn.Module):
    """Keeps a row of a layer's weight until its next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(5))
        self.row = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 2:
                self.row = layer.weight[0]
        return x + self.row


@torch.no_grad()
@pytest.mark.parametrize("layers", [2, 3, 4, 5], ids="{}_layers_fit".format)
def test_a_weight_stays_of_which_a_view_is_kept_when_its_slot_is_wanted_later(
    layers: int, sim: ModuleType
) -> None:
    """It had its slot for itself in the first passes, until there was another plan."""
    model, x = make(Remembering)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=layers * LAYER_BYTES)
    runtime = model._stagehand_layer_runtime
    for number in range(8):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
    assert runtime.report().abandoned_slots <= 2
    for reader in model.modules():
        if isinstance(reader, Remembering):
            reader.row = torch.empty(0)
    runtime.shutdown()


class Recomputed(nn.Module):
    """Calls a layer, and what reads others' weights: both again in backward."""

    def __init__(
        self,
        reader: Callable[[], nn.Module],
        contexts: Callable[[], Any] = noop_context_fn,
    ) -> None:
        super().__init__()
        self.layer = linear()
        self.reader = reader()
        self.contexts = contexts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False, context_fn=self.contexts)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(x) + self.layer(x)


def learn(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of a step."""
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return [output.detach().cpu(), *grads]


def assert_learns_alike(
    model: nn.Module, x: torch.Tensor, device: str, layers: int, sim: ModuleType
) -> None:
    """Compare steps of a streamed model with one of the resident model.

    Args:
        layers: How many layers the budget holds.
    """
    model.requires_grad_(True)
    x = x.to(device)
    model.to(device)
    expected = learn(model, x)
    model.zero_grad()
    budget = layers * LAYER_BYTES
    stagehand.layer(model.to("cpu"), vram_budget=budget, device=device)
    for number in range(3):
        assert_bitwise_equal(learn(model, x), expected, f"step {number}")
        assert sim.races() == []
    runtime = model._stagehand_layer_runtime
    assert runtime.report().peak_device_bytes <= budget
    runtime.shutdown()


class Keeping(nn.Module):
    """Cuts a layer's weight, and reads the cut when another layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up, self.down = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh()
        cut = self.inner.weight[1:]
        hidden = self.down(hidden)[:, 2:]
        return x + (hidden * x.mean()) @ cut[1:]


def saves_all() -> Any:
    """Contexts of a selective checkpoint that recomputes nothing it can save."""
    policy = CheckpointPolicy.PREFER_SAVE
    return create_selective_checkpoint_contexts(lambda *_, **__: policy)


@pytest.mark.parametrize("layers", [2, 3, 4, 7])
@pytest.mark.parametrize("contexts", [noop_context_fn, saves_all])
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("reader", [Transposed, Keeping])
@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
def test_a_region_that_reads_a_weight_saves_the_same_when_it_is_recomputed(
    device: str,
    reader: Callable[[], nn.Module],
    trains: bool,
    contexts: Callable[[], Any],
    layers: int,
    sim: ModuleType,
) -> None:
    """Where others had got the weight's slot meanwhile the forward kept the cut itself,
    and a recompute found the weight in its slot. Selective checkpoints saw its copy."""
    readers = [Recomputed(reader, contexts) for _ in range(3)]
    model = nn.Sequential(linear(), *readers).requires_grad_(trains)
    x = torch.randn(8, WIDTH, device=device).requires_grad_()
    expected = learn(deepcopy(model).to(device), x), x.grad
    stagehand.layer(model, vram_budget=layers * LAYER_BYTES, device=device)
    for number in range(3):
        x.grad = None
        found = learn(model, x), x.grad
        assert_bitwise_equal(found, expected, f"step {number}")
    model._stagehand_layer_runtime.shutdown()


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("reader", [*READERS, functools.partial(Pool, wide=False)])
def test_weights_without_room_to_stay_are_found_where_a_region_is_recomputed(
    reader: Callable[[], nn.Module], device: str, sim: ModuleType
) -> None:
    """There they were on the host, which torch told of."""
    model, x = make(lambda: nn.Sequential(*(Recomputed(reader) for _ in range(4))))
    assert_learns_alike(model, x, device, 4, sim)


@pytest.mark.filterwarnings("ignore:.* do not fit:stagehand.errors.StagehandWarning")
def test_a_region_that_is_recomputed_costs_no_look_through_the_model(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looked for sites that are compiled: time grew with the square of them."""
    model, x = make(lambda: nn.Sequential(*(Recomputed(Transposed) for _ in range(6))))
    model.requires_grad_(True)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES)
    for _ in range(2):
        learn(model, x)
    looked: list[nn.Module] = []
    monkeypatch.setattr(strays, "is_compiled", looked.append)
    learn(model, x)
    assert len(looked) == len(set(looked)) > 0
    model._stagehand_layer_runtime.shutdown()


class RecomputedAlone(Recomputed):
    """Calls no layer in the region."""

    casts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.casts):
            return super().forward(x).float()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(x.sin()).cos()


@pytest.mark.parametrize("casts", [False, True], ids=["as it is", "cast"])
@pytest.mark.parametrize("layers", [2, 4, 7])
@pytest.mark.parametrize("contexts", [noop_context_fn, saves_all])
@pytest.mark.parametrize("reader", [*READERS, Keeping])
@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
def test_weights_are_found_where_a_region_that_calls_no_layer_is_recomputed(
    device: str,
    reader: Callable[[], nn.Module],
    contexts: Callable[[], Any],
    layers: int,
    casts: bool,
    sim: ModuleType,
) -> None:
    """No site had put its hooks into such a region: nobody watched it in backward."""
    readers = (RecomputedAlone(reader, contexts) for _ in range(3))
    model, x = make(lambda: nn.Sequential(*readers))
    for module in model.middle:
        module.casts = casts
    assert_learns_alike(model, x, device, layers, sim)


class Several(nn.Module):
    """Reads a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(linear().weight for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight).tanh()
        return x


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
def test_lists_of_weights_come_and_go_with_the_module_that_reads_them(
    device: str, sim: ModuleType
) -> None:
    """All of them had to stay: nobody calls a list, so its weights were strays."""
    model, x = make(lambda: nn.Sequential(*(Several() for _ in range(4))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", stagehand.StagehandWarning)
        assert_learns_alike(model, x, device, 2, sim)


class Again(Fused):
    """Reads the weight of the layer that it has just called, and another one's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.query(x))


def test_a_weight_that_is_still_there_stays_while_another_comes_for_the_same_call(
    sim: ModuleType,
) -> None:
    model, x = make(Again)
    with torch.no_grad():
        expected = model.to("hpu")(x.to("hpu"))
        stagehand.layer(model.to("cpu"), vram_budget=2 * LAYER_BYTES)
        for number in range(3):
            assert_bitwise_equal(model(x), expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


class Failing(Transposed):
    """Fails before it reads the weight, as long as it has something to raise."""

    failure: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.failure is not None:
            raise self.failure
        return super().forward(x)


@pytest.mark.parametrize("failure", [LookupError, KeyboardInterrupt])
def test_first_pass_that_fails_leaves_the_next_to_find_what_is_read(
    sim: ModuleType, failure: type[BaseException]
) -> None:
    model, x = make(Failing)
    expected = model.to("hpu")(x.to("hpu"))
    model.middle.failure = failure
    stagehand.layer(model.to("cpu"), vram_budget=2 * LAYER_BYTES)
    with pytest.raises(failure):
        model(x)
    model.middle.failure = None
    assert_bitwise_equal(model(x), expected, "after a failure")
    model._stagehand_layer_runtime.shutdown()


def test_an_interrupt_where_a_pass_begins_or_ends_to_be_watched_ends_with_the_next(
    sim: ModuleType,
) -> None:
    """The mode stayed for good: every call was slower, and attention not fused."""
    entering = StrayUses.__enter__, StrayUses.__exit__, take_off, torch_private._modes
    model, x = make(Transposed)
    with torch.no_grad():
        expected = model.to("hpu")(x.to("hpu"))
        for number in itertools.count(1):
            stagehand.layer(model.to("cpu"), vram_budget=5 * LAYER_BYTES)
            interrupted = False
            try:
                with interrupted_at(number, *entering):
                    model(x)
            except KeyboardInterrupt:
                interrupted = True
            for _ in range(2):
                assert_bitwise_equal(model(x), expected, f"line {number}")
            assert torch._C._len_torch_function_stack() == 0, number
            model._stagehand_layer_runtime.shutdown()
            if not interrupted:
                break
    assert number > 10


def test_weight_that_is_read_right_behind_its_module_comes_and_goes_as_others_do(
    sim: ModuleType,
) -> None:
    """All layers had to stay on the device, and did not fit. Without gradients."""
    model, x = make(linear)
    for layer in (*model.before, *model.behind):
        layer.register_forward_hook(lambda layer, _, output: output @ layer.weight)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=2 * LAYER_BYTES)
    for number in range(4):
        with torch.no_grad():
            assert_bitwise_equal(model(x), expected, f"pass {number}")
        assert sim.races() == []
    runtime = model._stagehand_layer_runtime
    assert runtime.report().peak_device_bytes <= 2 * LAYER_BYTES
    assert not any(block.read_elsewhere for block in runtime._parts.blocks)
    runtime.shutdown()


class OnTwoStreams(nn.Module):
    """Calls each layer on one stream, and reads its weight on another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(6))

    def forward(self, x: torch.Tensor, side: torch.Stream) -> Any:
        here, kept = torch.accelerator.current_stream(), []  # until all is computed
        for layer in self.layers:
            side.wait_stream(here)
            with side:
                y = layer(x)
            kept += [x, y, x @ layer.weight]
            here.wait_stream(side)
            x = (y + kept[-1]).tanh()
        return x, kept


@pytest.mark.parametrize("layers", [3, 8])
def test_weight_that_is_read_right_behind_its_module_on_another_stream_is_there(
    sim: ModuleType, layers: int
) -> None:
    """The other stream did not wait for what fills the slot. Without gradients."""
    model, side = OnTwoStreams().requires_grad_(False), torch.Stream("hpu")
    plain, x = deepcopy(model).to("hpu"), torch.ones(2, WIDTH, device="hpu")
    stagehand.layer(model, device="hpu", vram_budget=layers * LAYER_BYTES)
    torch.accelerator.synchronize()
    with torch.no_grad():
        for number in range(3):
            expected, found = plain(x, side), model(x, side)
            assert sim.races() == [], f"pass {number}"
            torch.accelerator.synchronize()
            assert_bitwise_equal(found, expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


class Moody(nn.Module):
    """Reads other weights with gradients than without, and others in training."""

    def __init__(self) -> None:
        super().__init__()
        self.graded, self.training_only, self.inner = (linear() for _ in range(3))
        self.always = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.graded, self.training_only, self.inner):
            x = layer(x).tanh()
        if torch.is_grad_enabled() or self.always:
            x = x @ self.graded.weight
        if self.training:
            x = x @ self.training_only.weight
        return x


MOODS = [(grad, training) for grad in (False, True) for training in (False, True)]


@pytest.mark.parametrize("first", MOODS)
def test_weights_that_only_some_passes_read_are_found_in_the_first_of_these(
    sim: ModuleType, first: tuple[bool, bool]
) -> None:
    """What was found once was all that was looked for."""
    model, x = make(Moody)
    model.behind.requires_grad_(True)

    def run(grad: bool, training: bool) -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            return model.train(training)(x)

    x = x.to("hpu")
    model.to("hpu")
    expected = {mood: run(*mood).detach() for mood in MOODS}
    stagehand.layer(model.to("cpu"), vram_budget=5 * LAYER_BYTES)
    for mood in (first, *MOODS, *MOODS):
        assert_bitwise_equal(run(*mood).detach(), expected[mood], str(mood))
    strays = model._stagehand_layer_runtime._passing._strays
    with torch.no_grad():
        assert strays.begin(model, {}) is None, "it is watched once"
    model._stagehand_layer_runtime.shutdown()


class Scoring(nn.Module):
    """Reads its head's weight where that is, if it is asked for scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.head = linear()

    def forward(self, x: torch.Tensor, scores: bool | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        if not scores:
            return self.head(x)
        weight = self.head.weight
        return x.to(weight.device) @ weight


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.filterwarnings("ignore:.*do not fit the budget:stagehand.StagehandWarning")
def test_weights_that_only_passes_with_an_argument_read_are_found_in_the_first(
    sim: ModuleType, layers: int
) -> None:
    """As TRL's models do in GRPO, behind a generation: it was computed on the host."""
    model, x = Scoring(), torch.randn(3, WIDTH, device="hpu")
    kinds: list[dict[str, Any]] = [{}, {"scores": None}, {"scores": True}]
    with torch.no_grad():
        expected = [model.to("hpu")(x, **kind) for kind in kinds]
        stagehand.layer(model.to("cpu"), vram_budget=layers * LAYER_BYTES)
        strays = model._stagehand_layer_runtime._passing._strays
        for kind, outputs in zip(kinds, expected, strict=True):
            found = model(x, **kind)
            assert found.device == outputs.device
            assert_bitwise_equal(found, outputs, str(kind))
        for kind in kinds if layers == 4 else ():
            assert strays.begin(model, kind) is None, "it is watched once"
    model._stagehand_layer_runtime.shutdown()


def test_pass_is_watched_again_after_one_that_read_a_weight_for_the_first_time(
    sim: ModuleType,
) -> None:
    """Nothing tells of what changes in it: the first one fails."""
    model, x = make(Moody)
    model.middle.always = True
    with torch.no_grad():
        expected = model.to("hpu")(x.to("hpu"))
        model.middle.always = False
        stagehand.layer(model.to("cpu"), vram_budget=3 * LAYER_BYTES)
        model(x)
        model.middle.always = True
        with pytest.raises(RuntimeError, match="two devices"):
            model(x)
        for number in range(3):
            assert_bitwise_equal(model(x), expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


def test_a_weight_that_later_passes_read_is_found_where_they_are_done_again(
    sim: ModuleType,
) -> None:
    """As decoding does: the pass behind the failed one was watched, and all was known.

    The pass that fails is the second of its kind, done again it is so again.
    """
    model, x = make(Moody)

    def generate() -> list[torch.Tensor]:
        answers = []
        for always in (False, False, True, True):
            model.middle.always = always
            answers.append(model(x))
        return answers

    with torch.no_grad():
        x = x.to("hpu")
        model.to("hpu")
        expected = generate()
        stagehand.layer(model.to("cpu"), vram_budget=3 * LAYER_BYTES)
        with pytest.raises(RuntimeError, match="two devices"):
            generate()
        for number in range(3):
            assert_bitwise_equal(generate(), expected, f"generation {number}")
        strays = model._stagehand_layer_runtime._passing._strays
        for _ in range(25):
            generate()
        assert strays.begin(model, {}) is None, "it is not watched for ever"
    model._stagehand_layer_runtime.shutdown()


class Rarely(Fused):
    """Reads the two in one call when told to."""

    reads = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.reads else self.key(x)


@pytest.mark.parametrize("trains", [False, True])
def test_passes_are_watched_as_long_as_there_is_no_room_for_what_was_found(
    sim: ModuleType, trains: bool
) -> None:
    """One that read nothing of it was the last to be watched."""
    model, x = make(Rarely)
    model.requires_grad_(trains)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=2 * LAYER_BYTES)
    with pytest.warns(stagehand.StagehandWarning, match="watched from now on") as said:
        model(x)
    (warning,) = said
    assert ("may differ in their last bits" in str(warning.message)) == trains
    for reads in (True, False, True, False, True):
        model.middle.reads = reads
        output = model(x)
        if reads:
            assert_bitwise_equal(output, expected, "without room")
    runtime = model._stagehand_layer_runtime
    runtime.set_budget(3 * LAYER_BYTES)
    for _ in range(3):
        assert_bitwise_equal(model(x), expected, "with room")
    assert runtime._passing._strays.begin(model, {}) is None, "there is room"
    runtime.shutdown()


def test_budgets_named_where_there_is_no_room_for_what_was_found_work_at_once(
    sim: ModuleType,
) -> None:
    """They were short of what had joined the model, and of what a new one keeps."""

    def build() -> nn.Module:
        model, _ = make(lambda: nn.Sequential(*(Transposed() for _ in range(8))))
        for layer in model.before:
            layer.bias = nn.Parameter(torch.full((WIDTH,), 0.25))
        return model

    def run(model: nn.Module, budget: int | str) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model._stagehand_layer_runtime.set_budget(budget)
            for _ in range(2):
                assert_bitwise_equal(model(x), expected, "output")
        return [str(warning.message) for warning in caught]

    _, x = make(Transposed)
    expected = build().to("hpu")(x.to("hpu"))
    model = build()
    joined = model.before[1].bias
    model.before[1].bias = None
    least = LAYER_BYTES + 2 * joined.nbytes
    stagehand.layer(model, vram_budget=least, device="hpu")
    model.before[1].bias = joined
    [said] = run(model, least + joined.nbytes)
    named = re.search(
        r"at least ([\d.]+ KB) with runtime\.set_budget\(\), or to ([\d.]+ KB) as"
        r" vram_budget= of a new stagehand\.layer\(\)\)",
        said,
    )
    assert run(model, named[1]) == []
    model._stagehand_layer_runtime.shutdown()
    model = stagehand.layer(build(), vram_budget=named[2], device="hpu")
    assert run(model, named[2]) == []
    model._stagehand_layer_runtime.shutdown()


class Feedback(nn.Module):
    """Looks rows up in the table of its head while that is still on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.first = nn.ModuleList(linear() for _ in range(4))
        self.second = nn.ModuleList(linear() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = layer(x).tanh()
        x = self.table(self.head(x).argmax(-1))
        for layer in self.second:
            x = layer(x).tanh()
        return x


def test_lookup_in_a_table_on_the_device_is_over_before_its_slot_is_reused(
    sim: ModuleType,
) -> None:
    model, x = Feedback().requires_grad_(False), torch.randn(3, WIDTH)
    expected = model.to("hpu")(x.to("hpu"))
    stagehand.layer(model.to("cpu"), vram_budget=5 * LAYER_BYTES)
    for number in range(4):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
        assert sim.races() == []
    assert model._stagehand_layer_runtime.report().gathered_bytes
    model._stagehand_layer_runtime.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_fails_by_what_it_raises_not_by_what_is_being_handled(sim, fails):
    """As where a smaller batch is tried after there was no room for a larger one."""
    model, x = Chain(linear()), torch.randn(2, WIDTH)
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device="hpu")
    runtime, told = model._stagehand_layer_runtime, []
    end = runtime._tenancy.end
    runtime._tenancy.end = lambda *, failed: (told.append(failed), end(failed=failed))
    if fails:
        model.behind[1].register_forward_hook(lambda *_: 1 // 0)
    try:
        raise MemoryError
    except MemoryError:
        with torch.no_grad(), contextlib.suppress(ZeroDivisionError):
            model(x)
    assert told == [fails]
    assert bool(runtime._passing._strays._known) != fails  # they are known, or not
    assert runtime._passing._handled is None
    runtime.shutdown()


class Attending(nn.Module):
    """Has an attention module, and reads a layer's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        x = self.attention(x, x, x, need_weights=False)[0].squeeze(0)
        return x @ self.inner.weight.T


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("training", [True, False])
def test_weights_beside_attention_are_found_where_it_cannot_be_fused(
    sim: ModuleType, device: str, training: bool
) -> None:
    """Models with attention modules were not watched at all."""
    model = Chain(Attending()).train(training)
    x = torch.randn(3, WIDTH, device=device)

    model.to(device)
    expected = learn(model, x)
    with torch.no_grad():
        looked = model(x)
    stagehand.layer(model.to("cpu"), vram_budget=6 * LAYER_BYTES, device=device)
    for number in range(3):
        assert_bitwise_equal(learn(model, x), expected, f"step {number}")
    with torch.no_grad():  # what is known by now needs no watching
        assert_bitwise_equal(model(x), looked, "without gradients")
    model._stagehand_layer_runtime.shutdown()


def tie(first: nn.Linear, second: nn.Linear) -> None:
    first.weight = second.weight


def swap(first: nn.Linear, second: nn.Linear) -> None:
    first.weight, second.weight = second.weight, first.weight


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("act", [tie, swap])
def test_a_weight_that_another_module_is_given_later_is_read_there(
    sim: ModuleType, device: str, act: Callable[[nn.Linear, nn.Linear], None]
) -> None:
    """It is known, and has not joined; its new module reads another block."""
    model, x = make(linear)
    x = x.to(device)
    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=device)
    model(x)
    act(model.before[1], model.behind[1])
    outputs = [model(x) for _ in range(3)]
    model._stagehand_layer_runtime.shutdown()
    expected = model.to(device)(x)
    for number, output in enumerate(outputs):
        assert_bitwise_equal(output, expected, f"pass {number}")


def test_weights_beside_attention_are_found_without_gradients_in_training_mode(
    sim: ModuleType,
) -> None:
    model = Chain(Attending())
    x = torch.randn(3, WIDTH, device="hpu")
    with torch.no_grad():
        expected = model.to("hpu")(x)
        stagehand.layer(model.to("cpu"), vram_budget=6 * LAYER_BYTES)
        assert_bitwise_equal(model(x), expected, "the first pass")
    model._stagehand_layer_runtime.shutdown()


def test_weights_beside_fused_attention_are_found_where_their_reader_is_named(
    sim: ModuleType,
) -> None:
    model = Chain(Attending()).eval()
    x = torch.randn(3, WIDTH, device="hpu")
    with torch.no_grad():
        expected = model.to("hpu")(x)
        named = (Attending,)
        stagehand.layer(model.to("cpu"), vram_budget=7 * LAYER_BYTES, opaque=named)
        for number in range(3):
            assert_bitwise_equal(model(x), expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


def count_fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each call of a fused kernel from now on."""
    counted: list[str] = []

    def call(name: str, fused: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counted.append(name)
        return fused(*args, **kwargs)

    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        fused = functools.partial(call, name, getattr(torch, name))
        monkeypatch.setattr(torch, name, fused)
    return counted


class Encoding(nn.Module):
    """Has an encoder layer, which fuses as a whole, and reads a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.unsqueeze(0)).squeeze(0) @ self.inner.weight.T


class Inside(nn.Module):
    """Is a block."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(0)).squeeze(0)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True)


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("layers", [7, 9, 300])
@pytest.mark.parametrize(
    "beside", [linear, Attending, Encoding, functools.partial(Inside, encoder_layer)]
)
def test_weights_beside_fused_attention_are_found_and_it_is_fused_as_ever(
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    beside: Callable[[], nn.Module],
    layers: int,
    device: str,
) -> None:
    """Where attention might fuse, nothing was looked for: torch told of two devices."""
    model = Chain(nn.Sequential(beside(), Attending(), Transposed())).eval()
    x = torch.randn(3, WIDTH, device=device)
    counted = count_fused(monkeypatch)
    if beside is Encoding:  # streamed ones do not fuse as a whole
        model.middle[0].encoder.linear1.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        expected = model.to(device)(x)
        fused = [*counted]
        assert device == "hpu" or "_native_multi_head_attention" in fused
        stagehand.layer(
            model.to("cpu"),
            vram_budget=layers * LAYER_BYTES,
            opaque=(Inside,),
            device=device,
        )
        for number in range(4):
            counted.clear()
            output = model(x)
            assert counted == fused
            assert_bitwise_equal(output, expected, f"pass {number}")
            assert sim.races() == []
    model._stagehand_layer_runtime.shutdown()


class Partly(nn.Module):
    """Computes with attention without gradients, in a forward that takes some."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.inner = Attending()
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return checkpoint(self.inner, x, use_reentrant=True)
        with torch.no_grad():
            return x + self.inner(x)


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_attention_is_fused_in_parts_of_a_watched_pass_without_gradients(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, device: str, checkpoints: bool
) -> None:
    """What begins with gradients was taken to have them everywhere."""
    model = Chain(Partly(checkpoints=checkpoints)).eval()
    x = torch.randn(3, WIDTH, device=device)
    counted = count_fused(monkeypatch)

    model.to(device)
    expected, fused = learn(model, x), [*counted]
    assert device == "hpu" or fused
    stagehand.layer(model.to("cpu"), vram_budget=9 * LAYER_BYTES, device=device)
    for number in range(3):
        counted.clear()
        assert_bitwise_equal(learn(model, x), expected, f"step {number}")
        assert counted == fused
    model._stagehand_layer_runtime.shutdown()


class Calling(nn.Module):
    """Calls another model, which is no part of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner = linear()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](x @ self.inner.weight.T)


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize(
    "kind", [Attending, functools.partial(Inside, encoder_layer)], ids=["part", "whole"]
)
def test_attention_is_fused_in_a_model_that_another_one_calls_while_it_is_watched(
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], nn.Module],
    passes: int,
) -> None:
    """Results of such first passes were not those of resident models."""
    called = Chain(kind()).eval()
    calling, x = Chain(Calling(called)).eval(), torch.randn(3, WIDTH)
    counted = count_fused(monkeypatch)
    with torch.no_grad():
        expected = calling(x)
        fused = [*counted]
        assert len(fused) == 1
        for model in (called, calling):
            budget = 20 * LAYER_BYTES
            stagehand.layer(model, vram_budget=budget, device="cpu", opaque=(Inside,))
        for _ in range(passes):
            called(x)
        for number in range(3):
            counted.clear()
            assert_bitwise_equal(calling(x), expected, f"pass {number}")
            assert counted == fused
        assert torch._C._len_torch_function_stack() == 0
    assert calling.middle.inner.weight.device == x.device
    for model in (called, calling):
        model._stagehand_layer_runtime.shutdown()


def test_attention_that_is_called_by_itself_is_fused(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks are running when the pass begins."""
    model, x = Chain(Attending()).eval(), torch.randn(1, 3, WIDTH)
    stagehand.layer(model, vram_budget=6 * LAYER_BYTES, device="cpu")
    counted = count_fused(monkeypatch)
    for number in range(3):
        with torch.no_grad():
            model.middle.attention(x, x, x, need_weights=False)
        assert len(counted) == number + 1
    model._stagehand_layer_runtime.shutdown()


@pytest.mark.parametrize("failure", [LookupError, KeyboardInterrupt])
def test_attention_that_fails_leaves_the_next_pass_to_find_what_is_read(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    model, x = Chain(Attending()).eval(), torch.randn(3, WIDTH)

    def fail(*_: object, **__: object) -> None:
        raise failure

    with torch.no_grad():
        expected = model.to("hpu")(x.to("hpu"))
        stagehand.layer(model.to("cpu"), vram_budget=7 * LAYER_BYTES)
        hooks = [len(m._forward_hooks) for m in model.modules()]
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "multi_head_attention_forward", fail)
            with pytest.raises(failure):
                model(x)
        for number in range(3):
            assert_bitwise_equal(model(x), expected, f"pass {number}")
            assert torch._C._len_torch_function_stack() == 0
        assert [len(m._forward_hooks) for m in model.modules()] == hooks
    model._stagehand_layer_runtime.shutdown()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(0)


def test_what_has_watched_a_pass_keeps_no_module_of_a_model_that_is_gone() -> None:
    model = Chain(Attention()).eval().requires_grad_(False)
    stagehand.layer(model, vram_budget=9 * LAYER_BYTES, device="cpu")
    model(torch.randn(3, WIDTH))
    attention = weakref.ref(model.middle.attention)
    gc.disable()
    try:
        del model
        assert attention() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("frozen", [True, False])
def test_looking_for_such_weights_leaves_fused_attention_as_it_is(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    model, x = Chain(Attention()).eval(), torch.randn(3, WIDTH)
    model.requires_grad_(not frozen)
    fused, counted = torch._native_multi_head_attention, []
    monkeypatch.setattr(
        torch,
        "_native_multi_head_attention",
        lambda *args, **kwargs: (counted.append(1), fused(*args, **kwargs))[1],
    )
    with torch.set_grad_enabled(frozen):
        model(x)
        assert len(counted) == 1, "the resident model fuses it"
        stagehand.layer(model, vram_budget=6 * LAYER_BYTES, device="cpu")
        model(x)
    assert len(counted) == 2
    model._stagehand_layer_runtime.shutdown()


class Times(torch.autograd.Function):
    """Keeps the weight itself for backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight.t(), x.t() @ grad


class SetUp(torch.autograd.Function):
    """The same, in two steps."""

    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.weight = inputs
        ctx.save_for_backward(x)

    backward = Times.backward


class Cast(Times):
    """The same, behind a decorator that passes on whatever it is given."""

    forward = staticmethod(torch.amp.custom_fwd(Times.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Times.backward, device_type="cpu"))


class Given(nn.Module):
    """Gives a function a layer's weight, right behind the layer or later."""

    def __init__(
        self, later: bool, function: type[torch.autograd.Function] = Times
    ) -> None:
        super().__init__()
        self.inner = linear()
        self.other = linear()
        self.later = later
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.later:
            x = self.other(x)
        return self.function.apply(x, self.inner.weight)


def given(
    later: bool,
    function: type[torch.autograd.Function] = Times,
) -> tuple[nn.Module, Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """Return a streamed model with such a layer, what trains it, and its gradients."""
    model, x = make(lambda: Given(later, function))
    model.requires_grad_(True).to("hpu")

    def learn() -> list[torch.Tensor]:
        model.zero_grad()
        model(x.to("hpu")).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    expected = learn()
    model.zero_grad()
    stagehand.layer(model.to("cpu"), vram_budget=3 * LAYER_BYTES)
    return model, learn, expected


@pytest.mark.parametrize("function", [Times, SetUp, Cast])
def test_functions_that_are_given_weights_from_elsewhere_are_warned_of_once(
    sim: ModuleType,
    function: type[torch.autograd.Function],
) -> None:
    """Autograd expects a gradient where the weight was when the function was called."""
    model, learn, expected = given(later=True, function=function)
    with (
        pytest.warns(stagehand.StagehandWarning, match=r"'middle\.inner'.*Function"),
        pytest.raises(RuntimeError, match="expected device cpu"),
    ):
        learn()
    for number in range(3):
        assert_bitwise_equal(learn(), expected, f"step {number}")
    model._stagehand_layer_runtime.shutdown()


def test_many_weights_that_functions_are_given_make_one_warning_that_names_the_reader(
    sim: ModuleType,
) -> None:
    """LoHa adapters warned once for each of their weights, and at a budget without room
    the advice, to run without gradients once, did not help."""
    torch.manual_seed(2)
    model = nn.Sequential(*(Given(later=True) for _ in range(4)))
    x = torch.randn(3, WIDTH)

    def learn(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(x.to("hpu")).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    expected = learn(deepcopy(model).to("hpu"))
    small = deepcopy(model)
    stagehand.layer(small, vram_budget=3 * LAYER_BYTES)
    with (
        pytest.warns(stagehand.StagehandWarning) as caught,
        pytest.raises(RuntimeError, match="device"),
    ):
        learn(small)
    told = [str(w.message) for w in caught if "autograd.Function" in str(w.message)]
    small._stagehand_layer_runtime.shutdown()
    assert len(told) == 1
    assert f"({Given.__module__}.Given) in opaque=" in told[0]
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, opaque=[Given])
    for number in range(2):
        assert_bitwise_equal(learn(model), expected, f"step {number}")
    model._stagehand_layer_runtime.shutdown()


def test_functions_are_given_weights_that_a_pass_without_gradients_has_found(
    sim: ModuleType,
) -> None:
    model, learn, expected = given(later=True)
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    for number in range(3):
        assert_bitwise_equal(learn(), expected, f"step {number}")
    model._stagehand_layer_runtime.shutdown()


def test_a_pass_of_a_runtime_for_inference_is_not_warned_of_its_backward(
    sim: ModuleType,
) -> None:
    """Where gradients are on around it, it was taken for one that has a backward."""
    model, x = make(lambda: Given(True))
    expected = model.to("hpu")(x.to("hpu"))
    model.requires_grad_(True).to("cpu")
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, inference_mode=True)
    for number in range(3):
        assert_bitwise_equal(model(x), expected, f"pass {number}")
    model._stagehand_layer_runtime.shutdown()


def test_functions_may_read_weights_in_backward_that_were_at_hand_in_the_forward(
    sim: ModuleType,
) -> None:
    model, learn, expected = given(later=False)
    for number in range(3):
        assert_bitwise_equal(learn(), expected, f"step {number}")
    model._stagehand_layer_runtime.shutdown()


class Squeezing(nn.Module):
    """Gives a layer's weight another shape, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH * WIDTH, 1, bias=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner.weight.squeeze_(0)[0]


@pytest.mark.parametrize("device", ["hpu", "cpu"], ids=["simulated", "host"])
def test_a_read_ends_where_what_is_to_leave_for_later_ones_cannot(
    sim: ModuleType, device: str
) -> None:
    """The weight that was read stayed in use, and the model could not be shut down."""
    model = nn.Sequential(*(Squeezing() for _ in range(3)))
    x = torch.ones(1, device=device)
    nbytes = model[0].inner.weight.nbytes
    stagehand.layer(model, vram_budget=2 * nbytes, device=device)
    for _ in range(3):
        with pytest.raises(OrphanedParameterError, match="was replaced"):
            model(x)
        assert not any(block.uses for block in blocks_of(model))
    runtime_of(model).shutdown()


def test_what_a_look_ahead_cannot_have_is_not_said_of_blocks_that_are_there(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of what one call reads has a block that found no room."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    stagehand.layer(model, vram_budget=10 * WIDTH * WIDTH)
    scheduler, blocks = runtime_of(model)._parts.scheduler, blocks_of(model)[:2]
    refusal = StagehandOOMError("no pinned memory", needed_bytes=2, limit_bytes=1)

    def fail(*_: object) -> None:
        if all(block.uses for block in blocks):
            raise refusal

    with monkeypatch.context() as patched:
        patched.setattr(LookAhead, "run", fail)
        with pytest.raises(StagehandOOMError) as caught:
            scheduler.before_all(blocks)
    assert caught.value is refusal
    assert not any(block.uses for block in blocks)
    runtime_of(model).shutdown()
