"""What users do with a module, done with one whose weights are streamed."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    stack,
    values,
)
from stagehand.core.arena import live_leases
from stagehand.core.turn import awaited_by
from stagehand.weights.sites import SiteHooks

BUDGET = 4 * LAYER_BYTES
TESTS = Path(__file__).parents[1]


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


@pytest.fixture(params=["fresh", "evicted", "midway"])
def streamed(request, place):
    """A streamed model before its first pass, after one, and after half of one."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    with torch.no_grad():
        if request.param == "evicted":
            model(batch())
        elif request.param == "midway":
            model(batch())
            model[0](batch())
            model[1](batch())
    yield model
    runtime_of(model).shutdown()


def expect(model, place):
    assert_passes_equal(model, run_resident(stack(), place, batch()), batch())


# Moving and casting


@pytest.mark.parametrize(
    "move",
    [
        lambda m, p: m.to(p),
        lambda m, p: m.to(torch.device(p)),
        lambda m, p: m.cpu(),
        lambda m, p: m.to("cpu", torch.float32),
        lambda m, p: m.float(),
        lambda m, p: m.to(torch.float32),
        lambda m, p: m.to(device=p, non_blocking=True),
    ],
    ids=["to", "to_device", "cpu", "cpu_same_dtype", "float", "same_dtype", "async"],
)
def test_moving_a_streamed_model_leaves_it_streamed_and_exact(place, streamed, move):
    assert move(streamed, place) is streamed
    expect(streamed, place)


def test_moving_to_the_cpu_brings_every_byte_home_until_the_next_pass(sim):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    with torch.no_grad():
        model(batch())
    assert sim.allocated_bytes() > 0
    model.cpu()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert_bitwise_equal(values(model), values(stack()), "at home")
    torch.accelerator.synchronize()
    assert sim.allocated_bytes() == 0
    expect(model, "hpu")
    runtime_of(model).shutdown()


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to("meta"),
    ],
    ids=["half", "bfloat16", "double", "to_dtype", "to_cpu_dtype", "to_meta"],
)
def test_casting_a_streamed_model_is_refused_with_what_to_do(place, streamed, cast):
    with pytest.raises(stagehand.ConfigError, match=r"shutdown\(\)"):
        cast(streamed)
    assert {p.dtype for p in streamed.parameters()} == {torch.float32}
    expect(streamed, place)


def test_cast_that_is_refused_for_some_weights_moves_none(sim):
    """Those that had the type already were brought home before others were asked."""
    plain = stack()
    plain[:4].bfloat16()
    model = stagehand.layer(plain, vram_budget="1MB", device="hpu")
    with torch.no_grad():
        model[4](batch())
    before = sim.allocated_bytes()
    assert before > 0
    for cast in (model.bfloat16, model.float):  # in whatever order they are asked
        with pytest.raises(stagehand.ConfigError, match=r"cannot be cast"):
            cast()
        assert sim.allocated_bytes() == before
    runtime_of(model).shutdown()


def test_refused_cast_of_a_part_names_the_gradient_that_it_leaves(place):
    """It said that all was as before."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    model(batch()).sum().backward()
    model[1].half()
    with pytest.raises(stagehand.StagehandError, match=r"gradient stays torch.float16"):
        model(batch())
    model[1].zero_grad()
    model(batch()).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    runtime_of(model).shutdown()


def test_casting_a_part_of_a_streamed_model_never_goes_unnoticed(place):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    with torch.no_grad():
        model(batch())
        model[1].half()
        with pytest.raises(stagehand.StagehandError, match=r"shutdown\(\)"):
            model(batch())
        expect(model, place)
    runtime_of(model).shutdown()


def test_moving_a_part_of_a_streamed_model_does_no_harm(place):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    with torch.no_grad():
        for number, target in enumerate(["cpu", place, "cpu", place, "cpu", place]):
            model(batch())
            model[number].to(target)
    expect(model, place)
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(stack()), "after shutdown")


def test_cast_at_the_start_streams_the_cast_model(place):
    plain = stack().bfloat16()
    model = stagehand.layer(
        stack(), vram_budget=BUDGET, device=place, dtype=torch.bfloat16
    )
    x = batch().bfloat16()
    assert_passes_equal(model, run_resident(plain, place, x), x)
    runtime_of(model).shutdown()


def test_requires_grad_and_train_and_zero_grad_work_as_ever(place, streamed):
    streamed.requires_grad_(False)
    assert not any(p.requires_grad for p in streamed.parameters())
    streamed.train().zero_grad()
    assert all(m.training for m in streamed.modules())
    expect(streamed.eval(), place)


def test_device_of_a_transformers_model_is_where_inputs_can_be_sent(place):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    expected = run_resident(plain, place, ids).logits
    model = stagehand.layer(deepcopy(plain), vram_budget=40_000, device=place)
    with torch.no_grad():
        for _ in range(3):
            assert model.device.type in {place, "cpu"}
            assert model.dtype == torch.float32
            output = model(ids.to(model.device)).logits
            assert_bitwise_equal(output, expected, "logits")
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    runtime_of(model).shutdown()
    again = model.to(place).generate(ids.to(place), max_new_tokens=5, do_sample=False)
    assert_bitwise_equal(generated, again, "generated")


# Inputs


class Willing(dict):
    """Has every attribute that it is asked for, as some classes of settings do."""

    def __getattr__(self, name):
        return self.get(name, "nothing")


class Proxy:
    """As well, and cannot be iterated."""

    def __getattr__(self, name):
        return self


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_inputs_are_moved_whatever_attributes_their_containers_have(place):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()

        def forward(self, named, proxy, pair):
            assert type(named) is Willing
            assert type(proxy) is Proxy
            return self.layers(named.x + pair.x) * pair.y

    model = Sum()
    expected = run_resident(model.layers, place, batch() + batch()) * batch().to(place)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    with torch.no_grad():
        found = model(Willing(x=batch()), Proxy(), Pair(batch(), batch()))
    assert_bitwise_equal(found, expected, "output")
    runtime_of(model).shutdown()


def test_what_tokenizers_make_is_moved_as_a_whole(place):
    """Sentence encoders give it to their parts, which read it beside what they add."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()

        def forward(self, features):
            features["hidden"] = self.layers(features["x"])
            return features

    class Masked(nn.Module):
        def forward(self, features):
            assert type(features) is transformers.BatchEncoding
            assert features.n_sequences == 1
            assert features["words"] == ["a", "cat"]
            return features["hidden"] * features["mask"]

    model = nn.Sequential(Encoder(), Masked())
    named = {"x": batch(), "mask": batch(), "words": ["a", "cat"]}
    given = transformers.BatchEncoding(named, n_sequences=1)
    expected = run_resident(model[0].layers, place, batch()) * batch().to(place)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    with torch.no_grad():
        found = model(given)
    assert_bitwise_equal(found, expected, "output")
    assert given["x"].device.type == "cpu"
    runtime_of(model).shutdown()


def test_dicts_with_defaults_are_moved(place):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack()

        def forward(self, named):
            assert named["others"] == []
            return self.layers(named["x"])

    model = Named()
    expected = run_resident(model.layers, place, batch())
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    with torch.no_grad():
        found = model(defaultdict(list, x=batch()))
    assert_bitwise_equal(found, expected, "output")
    runtime_of(model).shutdown()


@pytest.mark.parametrize("source", ["cpu", "place"])
def test_packed_sequences_are_moved(place, source):
    """Their batch sizes are on the host wherever the sequences are."""

    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.GRU(WIDTH, WIDTH, 2)
            self.layers = stack()

        def forward(self, packed):
            return self.layers(self.read(packed)[0].data)

    packed = nn.utils.rnn.pack_sequence([batch(), batch()[:1]])
    model = Read()
    resident = deepcopy(model).to(place)
    with torch.no_grad():
        expected = resident(packed.to(place))
    stagehand.layer(model, vram_budget="1MB", device=place)
    with torch.no_grad():
        found = model(packed.to(place if source == "place" else source))
    assert_bitwise_equal(found, expected, "output")
    runtime_of(model).shutdown()


# Copies and files


def test_a_deep_copy_is_a_plain_model_with_the_same_values(place, streamed):
    plain = deepcopy(streamed)
    assert plain._stagehand_layer_runtime is None
    assert {p.device.type for p in plain.parameters()} == {"cpu"}
    assert_bitwise_equal(values(plain), values(stack()), "the copy")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    expect(streamed, place)
    with torch.no_grad():
        assert float(plain(batch()).abs().sum()) == 0.0
    assert plain.half()[0][0].weight.dtype == torch.float16
    del plain
    expect(streamed, place)


def test_a_copy_can_be_streamed_beside_its_original(place, streamed):
    other = stagehand.layer(deepcopy(streamed), vram_budget=BUDGET, device=place)
    expect(other, place)
    expect(streamed, place)
    runtime_of(other).shutdown()
    expect(streamed, place)


def test_a_deep_copy_of_a_part_is_a_plain_module(place, streamed):
    part = deepcopy(streamed[2])
    assert_bitwise_equal(values(part), values(stack()[2]), "the part")
    with torch.no_grad():
        assert_bitwise_equal(
            part(batch()), stack()[2](batch()), "the part's output on the host"
        )
    expect(streamed, place)


def test_a_model_that_contains_a_streamed_one_can_be_copied_and_moved(place, streamed):
    outer = nn.Sequential(streamed, nn.Linear(WIDTH, WIDTH))
    plain = deepcopy(outer)
    assert plain[0]._stagehand_layer_runtime is None
    assert_bitwise_equal(values(plain[0]), values(stack()), "the copy")
    outer.to(place)
    with torch.no_grad():
        assert_bitwise_equal(
            outer(batch().to(place)), run_resident(plain, place, batch()), "outer"
        )


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickled_model_comes_back_plain_with_the_same_values(place, streamed, way):
    if way == "pickle":
        plain = pickle.loads(pickle.dumps(streamed))
    else:
        file = io.BytesIO()
        torch.save(streamed, file)
        file.seek(0)
        plain = torch.load(file, weights_only=False)
    assert plain._stagehand_layer_runtime is None
    assert_bitwise_equal(values(plain), values(stack()), "unpickled")
    with torch.no_grad():
        assert_bitwise_equal(plain(batch()), stack()(batch()), "runs on the host")
    assert plain.double()[0][0].weight.dtype == torch.float64
    expect(streamed, place)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_tensors_of_the_model_itself_are_on_the_host_in_a_copy(place, way):
    """A module's own tensors are copied before its hooks could bring them home."""
    model = stack()
    model.register_buffer("scale", torch.ones(3))
    model.token = nn.Parameter(torch.ones(4))
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    plain = deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    named = (*plain.parameters(), *plain.buffers())
    assert {tensor.device.type for tensor in named} == {"cpu"}
    runtime = runtime_of(model)
    runtime.shutdown()
    assert deepcopy({"runtime": runtime}) == {"runtime": None}


def test_a_state_dict_is_whole_whenever_it_is_taken(place, streamed):
    assert_bitwise_equal(
        {k: v.cpu() for k, v in streamed.state_dict().items()}, values(stack()), "state"
    )
    file = io.BytesIO()
    torch.save(streamed.state_dict(), file)
    file.seek(0)
    assert_bitwise_equal(torch.load(file), values(stack()), "saved state")
    expect(streamed, place)


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("way", [nn.Module.state_dict, deepcopy, pickle.dumps])
def test_what_stays_is_there_again_after_a_copy(sim, way, passes):
    model = stack()
    model[1].norm = nn.LayerNorm(WIDTH)
    expected = run_resident(model[1], "hpu", batch())
    stagehand.layer(model, vram_budget="1MB", device="hpu")
    with torch.no_grad():
        for _ in range(passes):
            model(batch())
        way(model)
        assert model[1].norm.weight.device.type == "hpu"
        assert_bitwise_equal(model[1](batch().to("hpu")), expected, "a part alone")
    runtime_of(model).shutdown()


def test_a_state_dict_taken_between_layers_of_a_pass_is_whole(place):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device=place)
    expect(model, place)  # in its first pass the runtime learns who reads which weight
    states = []
    for number in range(6):
        model[number].register_forward_hook(lambda *_: states.append(values(model)))
    expect(model, place)
    runtime_of(model).shutdown()
    assert len(states) == 18
    for state in states:
        assert_bitwise_equal(state, values(stack()), "between layers")


def test_safetensors_files_of_a_streamed_model_are_whole(place, streamed, tmp_path):
    safetensors.torch.save_model(streamed, str(tmp_path / "model.safetensors"))
    safetensors.torch.save_file(
        {k: v.cpu() for k, v in streamed.state_dict().items()},
        tmp_path / "state.safetensors",
    )
    for name in ("model", "state"):
        loaded = safetensors.torch.load_file(tmp_path / f"{name}.safetensors")
        whole = values(stack())
        assert_bitwise_equal({k: loaded[k] for k in whole}, whole, name)
    safetensors.torch.load_model(streamed, str(tmp_path / "model.safetensors"))
    expect(streamed, place)


def test_the_file_of_one_layer_has_the_size_of_one_layer(place, streamed):
    file = io.BytesIO()
    torch.save(streamed.state_dict()["1.0.weight"], file)
    assert file.tell() < 2 * LAYER_BYTES


def test_a_state_dict_survives_the_reuse_of_the_pinned_memory_it_was_in(sim):
    first = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    expect(first, "hpu")
    state = first.state_dict()
    pool = runtime_of(first).shutdown_keep_pool()
    second = stack()
    for parameter in second.parameters():
        parameter.data.zero_()
    stagehand.layer(second, vram_budget=BUDGET, device="hpu", pool=pool)
    with torch.no_grad():
        second(batch())
    assert_bitwise_equal(state, values(stack()), "the first model's state")
    runtime_of(second).shutdown()


def test_save_pretrained_writes_what_a_plain_model_writes(place, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=16
    )
    model = transformers.GPT2LMHeadModel(config).eval()  # its head is tied
    model.save_pretrained(tmp_path / "plain")
    stagehand.layer(model, vram_budget=60_000, device=place)
    with torch.no_grad():
        model(torch.arange(8)[None])
    model.save_pretrained(tmp_path / "streamed")
    runtime_of(model).shutdown()
    files = [
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("plain", "streamed")
    ]
    assert_bitwise_equal(*files, "files")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "streamed")
    assert_bitwise_equal(values(again), values(model), "loaded again")


# Several models, and the ends of one


def test_two_models_stream_on_one_device_in_turns(place):
    first = stagehand.layer(stack(4), vram_budget=BUDGET, device=place)
    second = stagehand.layer(stack(8), vram_budget=BUDGET, device=place)
    for _ in range(3):
        expect_first = run_resident(stack(4), place, batch())
        assert_passes_equal(first, expect_first, batch(), passes=1)
        expect_second = run_resident(stack(8), place, batch())
        assert_passes_equal(second, expect_second, batch(), passes=1)
    runtime_of(first).shutdown()
    assert_passes_equal(second, run_resident(stack(8), place, batch()), batch())
    runtime_of(second).shutdown()


def test_one_streamed_model_runs_inside_another(place):
    class Guided(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = stack(4)
            self.guide = [stack(6)]  # hidden in a list: not a submodule

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + self.guide[0].to(x.device)(x)
            return x

    expected = run_resident(Guided(), place, batch())
    model = Guided()
    stagehand.layer(model.guide[0], vram_budget=BUDGET, device=place)
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    assert_passes_equal(model, expected, batch())
    runtime_of(model.guide[0]).shutdown()
    runtime_of(model).shutdown()


def test_streaming_a_model_twice_is_refused_and_changes_nothing(place, streamed):
    with pytest.raises(stagehand.ConfigError, match="streamed already"):
        stagehand.layer(streamed, vram_budget=BUDGET, device=place)
    with pytest.raises(stagehand.ConfigError, match="streamed already"):
        stagehand.StagehandRuntime(streamed, block_pattern=r"^\d$", device=place)
    with pytest.raises(stagehand.ConfigError, match="module '0' is streamed already"):
        stagehand.layer(nn.Sequential(streamed), vram_budget=BUDGET, device=place)
    expect(streamed, place)


def test_streaming_a_part_of_a_streamed_model_is_refused(place, streamed):
    """It has no handle of its own, whose shutdown could be called."""
    whole = r"is a part of a model that is streamed already; call that model's .*shut"
    with pytest.raises(stagehand.ConfigError, match=whole):
        stagehand.layer(streamed[1], vram_budget=BUDGET, device=place)
    with pytest.raises(stagehand.ConfigError, match=f"its module '0' {whole}"):
        stagehand.layer(nn.Sequential(streamed[1]), vram_budget=BUDGET, device=place)
    expect(streamed, place)


def test_shutdown_gives_back_the_plain_module(place, streamed):
    before = [set(m.__dict__) for m in stack().modules()]
    runtime = runtime_of(streamed)
    runtime.shutdown()
    runtime.shutdown()
    assert [set(m.__dict__) for m in streamed.modules()] == before
    for module in streamed.modules():
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._load_state_dict_post_hooks,
            module._state_dict_pre_hooks,
        )
        assert not any(hooks)
        assert not module._forward_hooks_always_called
        assert not module._forward_hooks_with_kwargs
    assert_bitwise_equal(values(streamed), values(stack()), "values")
    with torch.no_grad():
        assert_bitwise_equal(streamed(batch()), stack()(batch()), "on the host")
    assert not any(p.is_pinned() for p in streamed.parameters())
    streamed.to(torch.float64)
    assert "shut down" in repr(runtime)
    with pytest.raises(stagehand.ClosedError, match=r"stagehand\.layer"):
        runtime.set_budget("1GB")
    streamed.to(torch.float32)
    stagehand.layer(streamed, vram_budget=BUDGET, device=place)
    expect(streamed, place)


def test_shutdown_puts_a_model_back_where_it_was(sim):
    model = stack().to("hpu")
    stagehand.layer(model, vram_budget=BUDGET)
    expect(model, "hpu")
    runtime_of(model).shutdown()
    assert {p.device.type for p in model.parameters()} == {"hpu"}
    assert_bitwise_equal(values(model), values(stack()), "values")


def test_the_order_of_parameters_and_their_identity_survive(place, streamed):
    model = stack()
    names, ids = list(model.state_dict()), [id(p) for p in model.parameters()]
    stagehand.layer(model, vram_budget=BUDGET, device=place)
    expect(model, place)
    assert list(model.state_dict()) == names
    runtime_of(model).shutdown()
    assert [id(p) for p in model.parameters()] == ids


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_a_kept_pool_serves_the_next_model_without_pinning_anew(sim, passes):
    first = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    with torch.no_grad():
        for _ in range(passes):
            first(batch())  # the last copies are under way when it ends
    pool = runtime_of(first).shutdown_keep_pool()
    assert pool.leased_bytes == 0
    kept = sim.pinned_bytes()
    assert kept == pool.kept_bytes == 6 * LAYER_BYTES
    sim.reset_peak()
    second = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu", pool=pool)
    expect(second, "hpu")
    assert sim.peak_pinned_bytes() == kept
    runtime_of(second).shutdown()
    assert sim.pinned_bytes() == 0


def test_a_dropped_model_takes_its_memory_and_threads_with_it(sim, tmp_path):
    model = stack()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    with torch.no_grad():
        model(batch())
        runtime_of(model).convert_registry_to_file_backed_sharded(tmp_path)
        model(batch())
    leases = live_leases()
    assert leases > 0
    assert any(t.name.startswith("stagehand") for t in threading.enumerate())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    torch.accelerator.synchronize()
    assert (live_leases(), sim.allocated_bytes(), sim.pinned_bytes()) == (0, 0, 0)
    assert not any(t.name.startswith("stagehand") for t in threading.enumerate())


class Knowing(nn.Module):
    """A model of which a part knows the whole, or keeps a graph."""

    def __init__(self, how):
        super().__init__()
        self.layers = stack()
        norm = nn.LayerNorm(WIDTH)  # it stays
        self.tail = nn.Sequential(nn.Sequential(norm, nn.ReLU()))
        for part in (self.layers[3], norm):
            if how == "hook":
                part.register_forward_hook(self.look)
            elif how == "parent":
                part.parent = [self]
        self.keeps = how == "graph"

    def look(self, *_):
        pass

    def forward(self, x):
        x = self.tail(self.layers(x))
        if self.keeps:
            self.layers[3].kept = x
        return x


@pytest.mark.parametrize("how", ["hook", "parent", "graph"])
@pytest.mark.parametrize("end", ["dropped", "parked", "shut down"])
@pytest.mark.parametrize("grads", [True, False])
def test_a_model_of_which_a_part_knows_the_whole_is_dropped_too(sim, how, end, grads):
    model = stagehand.layer(Knowing(how), vram_budget=BUDGET, device="hpu")
    with torch.set_grad_enabled(grads):
        for _ in range(2):
            model(batch())
    if end == "parked":
        runtime_of(model).park()
    elif end == "shut down":
        runtime_of(model).shutdown()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    gc.collect()  # what its weights lay in
    torch.accelerator.synchronize()
    assert (live_leases(), sim.allocated_bytes(), sim.pinned_bytes()) == (0, 0, 0)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_runtime_whose_model_is_gone_can_be_shut_down(sim, tmp_path, keeps):
    model = stack()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    telemetry = tmp_path / "steps.jsonl"
    stagehand.layer(model, vram_budget=BUDGET, device="hpu", telemetry=telemetry)
    runtime = runtime_of(model)
    runtime.convert_registry_to_file_backed_sharded(tmp_path)
    with torch.no_grad():
        model(batch())
    del model
    gc.collect()
    for _ in range(2):
        runtime.shutdown_keep_pool() if keeps else runtime.shutdown()
    assert repr(runtime) == "Runtime(shut down)"
    assert live_leases() == 0


@pytest.mark.parametrize("grads", [True, False])
def test_a_dropped_model_takes_its_memory_along_though_its_runtime_is_kept(sim, grads):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    runtime = runtime_of(model)
    with torch.set_grad_enabled(grads):
        for _ in range(3):
            output = model(batch())
            if grads:
                output.sum().backward()
    del model, output
    gc.collect()
    torch.accelerator.synchronize()
    assert (live_leases(), sim.allocated_bytes(), sim.pinned_bytes()) == (0, 0, 0)
    assert runtime.report().pinned_bytes == 0
    runtime.shutdown()
    assert runtime.report().passes


@pytest.mark.parametrize("ended", [True, False])
def test_a_kept_runtime_keeps_no_tensor_of_a_model_that_is_gone(sim, ended):
    """Neither what it has streamed, nor what has joined and lies on the device."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    model[0].register_parameter("added", nn.Parameter(torch.zeros(8)))
    runtime = runtime_of(model)
    model(batch()).sum().backward()
    assert model[0].added.device.type == "hpu"
    if ended:
        runtime.shutdown()
    tensors = [weakref.ref(tensor) for tensor in model.parameters()]
    del model
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    torch.accelerator.synchronize()
    assert sim.allocated_bytes() == 0
    assert runtime.report().passes == 1


def test_a_dropped_model_gives_its_leases_back_though_its_runtime_went_before(sim):
    """Its gradients stayed leased: what lets go of them was a method of the runtime,
    and not of what the hooks of a part that is kept keep."""
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    model(batch()).sum().backward()
    part = model[2]
    runtime = weakref.ref(runtime_of(model))
    del model._stagehand_layer_runtime
    assert runtime() is None
    del model
    gc.collect()
    assert live_leases() == 0
    with pytest.raises(stagehand.ClosedError):
        part(batch())


def test_a_weight_of_a_dropped_model_stays_readable(sim):
    model = stagehand.layer(stack(), vram_budget=BUDGET, device="hpu")
    with torch.no_grad():
        model(batch())
    kept = list(model.parameters())
    runtime = runtime_of(model)
    del model
    gc.collect()
    assert live_leases() == 0
    for mine, theirs in zip(kept, stack().parameters(), strict=True):
        assert_bitwise_equal(mine.data, theirs.data, "kept")
    runtime.shutdown()


def test_an_interpreter_exits_cleanly_with_a_runtime_in_every_state(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.path[:0] = sys.argv[1:3]\n"
        "import torch\n"
        "from simulated import sim_device\n"
        "from scenario.small import stack, batch, LAYER_BYTES, runtime_of\n"
        "import stagehand, safetensors.torch\n"
        "models = []\n"
        "for place in ('hpu', 'cpu'):\n"
        "    for passes in range(3):\n"
        "        model = stack()\n"
        "        stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)\n"
        "        with torch.no_grad():\n"
        "            for _ in range(passes):\n"
        "                model(batch())\n"
        "        models.append(model)\n"
        "path = sys.argv[3]\n"
        "safetensors.torch.save_model(stack(), path + '/model.safetensors')\n"
        "runtime_of(model).convert_registry_to_file_backed_sharded(path)\n"
        "model(batch())\n"
        "print('done')\n"
    )
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_what_is_called_first_and_last_at_exit_reads_what_was_trained(tmp_path):
    """A handler from before torch runs last; a user's finalizer runs before it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys, weakref\n"
        "def look(when):\n"
        "    for model, plain in pairs:\n"
        "        found, expected = model.state_dict(), plain.state_dict()\n"
        "        for name, value in expected.items():\n"
        "            assert torch.equal(found[name].cpu(), value.cpu()), (when, name)\n"
        "    print(when)\n"
        "atexit.register(look, 'last')\n"
        "sys.path[:0] = sys.argv[1:3]\n"
        "import torch\n"
        "from copy import deepcopy\n"
        "from torch import nn\n"
        "from simulated import sim_device\n"
        "from scenario.small import stack, batch, LAYER_BYTES, WIDTH\n"
        "import stagehand\n"
        "class Trainer: pass\n"
        "trainer, pairs = Trainer(), []\n"
        "weakref.finalize(trainer, look, 'a finalizer')\n"
        "for place in ('hpu', 'cpu'):\n"
        "    model = nn.Sequential(stack(), nn.LayerNorm(WIDTH))\n"
        "    plain = deepcopy(model).to(place)\n"
        "    stagehand.layer(model, vram_budget=4 * LAYER_BYTES, device=place)\n"
        "    for each in (model, plain):\n"
        "        each(batch().to(place)).square().sum().backward()\n"
        "        torch.optim.SGD(each.parameters(), lr=0.1).step()\n"
        "    pairs.append((model, plain))\n"
    )
    done = run(script, tmp_path)
    printed = "a finalizer\nlast\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def run(script, folder):
    """Run a script in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "error", script, TESTS.parent / "src", TESTS, folder],
        capture_output=True,
        text=True,
        timeout=300,
    )


# The budget


def test_a_budget_changed_between_passes_is_kept_from_the_next_on(sim):
    model = stagehand.layer(stack(10), vram_budget=8 * LAYER_BYTES, device="hpu")
    expected = run_resident(stack(10), "hpu", batch())
    sim.reset()
    for blocks in (8, 3, 1, 2, 20, 1, 6):
        runtime_of(model).set_budget(blocks * LAYER_BYTES)
        assert_passes_equal(model, expected, batch(), passes=1)
        held = sum(b.nbytes for b in blocks_of(model) if b.slot is not None)
        assert held <= blocks * LAYER_BYTES
        assert runtime_of(model)._parts.weights.held_bytes <= blocks * LAYER_BYTES
        assert_passes_equal(model, expected, batch())
        assert runtime_of(model)._parts.weights.held_bytes <= blocks * LAYER_BYTES
    with pytest.raises(stagehand.StagehandOOMError, match="at least"):
        runtime_of(model).set_budget(LAYER_BYTES - 1)
    assert_passes_equal(model, expected, batch())
    runtime_of(model).shutdown()


def test_a_shallow_copy_shares_the_weights_and_leaves_the_original_exact(
    place, streamed
):
    twin = copy.copy(streamed)
    assert twin[0] is streamed[0]
    with torch.no_grad():
        assert_bitwise_equal(
            twin(batch()), run_resident(stack(), place, batch()), "the twin"
        )
    expect(streamed, place)


class Counting(nn.Module):
    """Makes its buffer anew in each forward, as caches of rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(64))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) + self.calls


class Buffered(nn.Module):
    """A layer beside a buffer that may be another one, or none, from pass to pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("shift", None)

    def forward(self, x):
        x = self.layer(x) * (1 if self.scale is None else self.scale)
        x = x if self.shift is None else x + self.shift
        return x + self.more if hasattr(self, "more") else x


def test_a_buffer_beside_another_joins_where_the_model_streams(sim):
    model = nn.Sequential(*(Buffered() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    for number in range(3):
        if number == 1:
            for each, place in ((model, "cpu"), (plain, "hpu")):
                more = torch.arange(float(WIDTH), device=place)
                each[1].register_buffer("more", more)
        with torch.no_grad():
            assert_bitwise_equal(model(batch()), plain(batch().to("hpu")), f"{number}")
    assert model[1].more.device.type == "hpu"
    runtime_of(model).shutdown()
    assert model[1].more.device.type == "cpu"


def test_buffers_without_values_are_no_matter_where_the_model_is_moved(sim):
    """Nor are those that are None, or are made so while the model is away."""
    model = nn.Sequential(*(Buffered() for _ in range(4)))
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES)
    for number in range(3):
        with torch.no_grad():
            assert_bitwise_equal(model(batch()), plain(batch().to("hpu")), f"{number}")
        if number == 0:
            model[2].register_buffer("later", torch.empty(3, device="meta"))
            model[3].scale = model[3].scale.clone()  # on the device
            model.cpu()
            assert model[3].scale.device.type == "cpu"
            model[3].scale = plain[3].scale = None
    runtime_of(model).shutdown()
    assert model[2].later.is_meta


class Moving(nn.Module):
    """Moves all of itself to where its input is, in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            self.to(x.device)
        return x


@pytest.mark.parametrize("grads", [False, True])
def test_a_model_may_move_itself_to_its_input_in_the_middle_of_a_pass(place, grads):
    model = Moving()
    plain = deepcopy(model).to(place)
    stagehand.layer(model, vram_budget=3 * LAYER_BYTES, device=place)
    for number in range(4):
        found = []
        for each in (model, plain):
            with torch.set_grad_enabled(grads):
                output = each(batch().to(place))
            if grads:
                output.sum().backward()
            found.append([output, *(p.grad.cpu() for p in each.parameters() if grads)])
        assert_bitwise_equal(*found, f"pass {number}")
    runtime_of(model).shutdown()


def test_buffer_made_anew_in_forward_comes_home_with_the_model(sim):
    model = nn.Sequential(*(Counting() for _ in range(4)))
    stagehand.layer(model, vram_budget=45_000, device="hpu")
    with torch.no_grad():
        model(torch.randn(2, 64))
        model(torch.randn(2, 64))
    model._stagehand_layer_runtime.shutdown()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert all(bool((part.calls == 2).all()) for part in model)
    model(torch.randn(2, 64))


@pytest.mark.parametrize("home", ["cpu", "hpu"])
def test_buffers_made_anew_in_forward_go_where_the_model_is_moved(sim, home):
    model = nn.Sequential(*(Counting() for _ in range(4))).to(home)
    stagehand.layer(model, vram_budget=45_000, device="hpu")
    with torch.no_grad():
        model(torch.randn(2, 64))
        copied = deepcopy(model)
        for one in (copied, model.to("cpu")):
            tensors = (*one.parameters(), *one.buffers())
            assert {tensor.device.type for tensor in tensors} == {"cpu"}
        copied(torch.randn(2, 64))
        model(torch.randn(2, 64))
        model.to("cpu")
    model._stagehand_layer_runtime.shutdown()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {home}
    assert all(bool((part.calls == 2).all()) for part in model)


def test_block_must_be_taken_before_it_is_given_back(sim):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    stagehand.layer(model, vram_budget=40_000, device="hpu")
    runtime = model._stagehand_layer_runtime
    name = runtime.block_ids[0]
    with pytest.raises(stagehand.ConfigError, match="not in use"):
        runtime.after_block(name)
    with pytest.raises(stagehand.ConfigError, match=r"no block '4'.* are '0', '1'"):
        runtime.before_block("4")
    runtime.before_block(name)
    with pytest.raises(stagehand.ConfigError, match="is in use"):
        runtime.park()
    with torch.no_grad():
        model(torch.randn(2, 64))
    runtime.after_block(name)
    runtime.shutdown()
    with pytest.raises(stagehand.ClosedError):
        runtime.before_block(name)


def test_no_other_thread_gets_the_turn_while_blocks_are_used_by_hand(sim):
    """The second one, or one inside of a forward, looked like an interrupted pass."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    stagehand.layer(model, vram_budget=80_000, device="hpu")
    runtime = model._stagehand_layer_runtime
    first, second = runtime.block_ids[:2]
    taken = []

    def look(*_):
        def take():
            taken.append(runtime._edges.try_lock())

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    def use(*_):
        runtime.before_block(first)
        look()
        runtime.after_block(first)
        look()

    runtime.before_block(first)
    runtime.before_block(second)
    look()
    runtime.after_block(second)
    look()
    runtime.after_block(first)
    model[2].register_forward_hook(use)
    model(torch.randn(2, 64))
    assert taken == [False] * 4
    runtime.shutdown()


def test_weight_that_is_read_after_its_module_ended_is_not_overwritten_meanwhile(sim):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    reference = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=40_000, device="hpu")
    x = torch.randn(2, 64)
    for _ in range(3):
        model(x)
    for one in (model, reference):
        for layer in one:
            layer.register_forward_hook(
                lambda module, args, output: nn.functional.linear(output, module.weight)
            )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x).cpu(), reference(x.to("hpu")).cpu())
    model._stagehand_layer_runtime.shutdown()


def test_memory_of_what_stays_waits_for_its_last_reader(sim):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return self.linear(x) * self.scale

    model = Scaled()
    stagehand.layer(model, vram_budget=40_000, device="hpu")
    with torch.no_grad():
        model(torch.randn(2, 64))
    del model
    gc.collect()


# Parts that are called by themselves


class Scaled(nn.Module):
    """A block whose norm is too small to be streamed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)  # four of them are small together
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x))


class Stacked(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.body = nn.ModuleDict({"blocks": nn.ModuleList()})
        self.body["blocks"].extend(Scaled() for _ in range(depth))
        self.recomputes = {}

    def forward(self, x):
        recomputes = self.recomputes and torch.is_grad_enabled()
        for block in self.body["blocks"]:
            x = checkpoint(block, x, **self.recomputes) if recomputes else block(x)
        return x


def send_home(model):
    runtime_of(model).park()


def ask_for_all(model):
    """As another model does that needs the room."""
    runtime_of(model)._tenancy.give_up(0)


def keep_references(model):
    model.state_dict(keep_vars=True)


@pytest.fixture(params=[send_home, ask_for_all, keep_references])
def left(request, sim):
    """A streamed model of which nothing is on the device, and a resident copy."""
    torch.default_generator.manual_seed(0)
    model = Stacked()
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    norms = [block.norm.weight for block in model.body["blocks"][:4]]
    assert {norm.device.type for norm in norms} == {"hpu"}
    with torch.no_grad():
        model(batch())
    hooks = hooks_of(model)
    request.param(model)
    assert {norm.device.type for norm in norms} == {"cpu"}
    yield model, plain
    model(batch()).sum().backward()
    assert hooks_of(model).items() >= hooks.items()  # those of the parts are gone
    assert sim.races() == []
    runtime_of(model).shutdown()
    assert set(hooks_of(model).values()) == {(0, 0)}
    model.zero_grad()  # pytest holds both for longer than it checks memory
    plain.cpu().zero_grad()


def hooks_of(model):
    return {
        name: (len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    }


def test_a_part_is_exact_where_what_stays_is_away(left):
    """What is called first may read that alone, and no streamed block."""
    models = [model.body["blocks"] for model in left]
    for part in (
        lambda blocks, x: blocks[2](x),
        lambda blocks, x: blocks[3].norm(x),
        lambda blocks, x: blocks[2](blocks[3](x)),
    ):
        given = []
        for blocks in models:
            for block in blocks:
                block.zero_grad()
            output = part(blocks, batch().to("hpu"))
            output.square().sum().backward()
            given.append([output, *(p.grad for p in blocks.parameters())])
        assert_bitwise_equal(*given, "output and gradients")
        assert not runtime_of(left[0])._edges.is_busy


def test_a_part_may_fail_where_what_stays_is_away(left):
    model, plain = left
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model.body["blocks"][2](batch(4, WIDTH + 1))
    assert not runtime_of(model)._edges.is_busy
    outputs = [m.body["blocks"][2](batch().to("hpu")) for m in (model, plain)]
    assert_bitwise_equal(*outputs, "output")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("away", ["forward", "backward", "both"])
@pytest.mark.parametrize("through", ["the model", "its parts"])
def test_a_region_is_recomputed_where_what_stays_is_away(sim, through, away, reentrant):
    """It saves the same as in forward, whether what stays was away then or is now."""
    torch.default_generator.manual_seed(0)
    model = Stacked()
    plain = deepcopy(model).to("hpu")
    stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    runtime, given = runtime_of(model), []

    for each in (model, plain):
        each.recomputes = {"use_reentrant": reentrant}
        x = batch().to("hpu").requires_grad_()
        if each is model and away != "backward":
            runtime.park()
        y = each(x) if through == "the model" else each.forward(x)
        if each is model and away == "forward":
            with torch.no_grad():
                model(batch())
        elif each is model:
            runtime.park()
        y.square().sum().backward()
        given.append([y, x.grad, *(p.grad for p in each.parameters())])
    assert_bitwise_equal(*given, "output and gradients")
    runtime.shutdown()


def test_a_part_that_waits_until_what_stays_is_back_leaves_no_pass_open(left):
    """Another thread runs the model meanwhile: the part is no edge any more."""
    model, plain = left
    edges, given = runtime_of(model)._edges, []
    part = model.body["blocks"][2]
    x = batch().to("hpu")
    thread = threading.Thread(target=lambda: given.append(part(x)), daemon=True)
    with edges.lock:
        thread.start()
        while awaited_by(thread) is not edges.lock:
            threading.Event().wait(0.001)
        with torch.no_grad():
            model(batch())
    thread.join(timeout=120)
    assert not edges.is_busy
    assert edges.lock.owner is None
    assert edges.pushed == []
    assert_bitwise_equal(given, [plain.body["blocks"][2](x)], "output")
    given.clear()


def test_parts_that_join_between_two_absences_are_exact_in_the_second(left):
    """Only parts are called, so that those of the first are edges until then."""
    models = [*left]
    for each in models:
        torch.default_generator.manual_seed(3)
        each.body["blocks"][1](batch().to("hpu"))
        each.body["blocks"].append(Scaled().to("cpu" if each is left[0] else "hpu"))
    runtime = runtime_of(left[0])
    runtime.set_budget(2 * BUDGET)
    runtime.park()
    given = [each.body["blocks"][6](batch().to("hpu")) for each in models]
    assert_bitwise_equal(*given, "output")


class Normed(nn.Module):
    """Blocks with one norm for all."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(6))
        for block in self.blocks:
            block.norm = self.blocks[0].norm

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_part_of_several_modules_is_an_edge_once(sim):
    torch.default_generator.manual_seed(0)
    model = Normed()
    expected = run_resident(model, "hpu", batch())
    hooks = hooks_of(model)
    stagehand.layer(model, vram_budget=BUDGET, device="hpu")
    for number in range(3):
        runtime_of(model).park()
        assert hooks_of(model)["blocks.0.norm"] == (1, 1)
        if number == 1:
            with torch.no_grad():
                model.blocks[3](batch())
        assert_passes_equal(model, expected, batch(), passes=1)
    runtime_of(model).park()
    runtime_of(model).shutdown()
    assert hooks_of(model) == hooks


def test_hooks_whose_making_failed_are_taken_off_with_the_others(left, monkeypatch):
    model, _ = left
    hook, made = SiteHooks._hook_edge, []

    def fail(hooks, *args):
        made.append(args)
        if len(made) == 4:
            raise MemoryError
        hook(hooks, *args)

    with torch.no_grad():
        model(batch())
    with monkeypatch.context() as patch:
        patch.setattr(SiteHooks, "_hook_edge", fail)
        with pytest.raises(MemoryError):
            runtime_of(model).park()
    send_home(model)
    expected = model.body["blocks"][5](batch()).cpu()
    send_home(model)
    assert torch.equal(model.body["blocks"][5](batch()).cpu(), expected)


def test_a_copy_that_streams_in_another_mode_has_parts_of_its_own(sim):
    torch.default_generator.manual_seed(0)
    model = Stacked()
    plain = deepcopy(model).to("hpu")
    marks = {"vram_high_watermark_mb": 1, "vram_low_watermark_mb": 0.5}
    config = stagehand.StagehandConfig(**marks, telemetry_enabled=False)
    first = stagehand.StagehandRuntime(model, config, r"^body\.blocks\.\d+$")
    twin = deepcopy(model)
    stagehand.layer(twin, vram_budget=BUDGET, device="hpu")
    runtime_of(twin).park()
    outputs = [m.body["blocks"][2](batch().to("hpu")) for m in (twin, plain)]
    assert_bitwise_equal(*outputs, "output")
    runtime_of(twin).shutdown()
    first.shutdown()


@pytest.mark.parametrize("copied", [deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_parked_model_is_a_plain_one(left, copied):
    model, plain = left
    twin = copied(model)
    assert twin._stagehand_layer_runtime is None
    with torch.no_grad():
        assert_bitwise_equal(
            twin.to("hpu")(batch().to("hpu")), plain(batch().to("hpu")), "a copy"
        )


class Encoder(nn.Module):
    """Looks positions up in a buffer, where its input is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(4, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, ids):
        x = self.positions.index_select(0, ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Headed(nn.Module):
    """A model that computes on with what another one gives."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.head(self.inner(ids))


def test_a_model_inside_of_a_models_part_is_entered_by_itself(place):
    """As `generate()` of `transformers` calls encoders, with its input on the host."""
    torch.default_generator.manual_seed(0)
    model = Headed(Headed(Encoder()))
    encoder, ids = model.inner.inner, torch.tensor([2, 0, 3])
    expected = run_resident(encoder, place, ids)
    runtime = runtime_of(stagehand.layer(model, vram_budget=BUDGET, device=place))
    assert_passes_equal(encoder, expected, ids)
    assert runtime.report().passes == 3
    assert hooks_of(encoder)["layers.1"] == (1, 1)
    runtime.shutdown()


class Turning(nn.Module):
    """Has no weights, and a part."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Tanh()

    def forward(self, x):
        return self.turn(x)


class Turned(nn.Module):
    """A model with a part that another one has, too."""

    def __init__(self, turning):
        super().__init__()
        self.layers, self.turning = stack(), turning

    def forward(self, x):
        return self.turning(self.layers(x))


def test_models_may_share_an_inner_part_without_weights(place):
    turning = Turning()
    models = [Headed(Turned(turning)), Headed(Turned(turning))]
    expected = [run_resident(model, place, batch()) for model in models]
    for model in models:
        stagehand.layer(model, vram_budget=BUDGET, device=place)
    for model, output in zip(models, expected, strict=True):
        assert_passes_equal(model, output, batch())
        assert turning(batch()).device.type == "cpu"
    for model in models:
        runtime_of(model).shutdown()


def test_loading_a_state_waits_for_copies_that_still_read_the_weights(sim):
    """The simulated device compares what is copied with what was when it was queued."""
    model = stack().requires_grad_(False)
    expected = run_resident(model, "hpu", batch())
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    stagehand.layer(model, vram_budget=2 * LAYER_BYTES)
    sim.configure(h2d_gbps=0.001)
    output = model(batch().to("hpu"))
    model.load_state_dict(state)
    torch.accelerator.synchronize()
    assert torch.equal(output.cpu(), expected.cpu())
    runtime_of(model).shutdown()
    assert_bitwise_equal(model.state_dict(), state, "weights")
