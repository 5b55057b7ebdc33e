"""Adapters of `peft` train on a streamed base, whenever they are added.

What is added after `layer()` is noticed by the next pass, or by `model.to(device)`.
"""

import re
import warnings
from copy import deepcopy
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stagehand
from architectures import assert_bitwise_equal
from architectures.language import LLAMA
from streamed import original, smallest_budget, stream, weight_bytes

pytestmark = [  # of what the two libraries say of each other
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),  # with buffers
    "head": lambda: peft.LoraConfig(  # whole layers, too
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


def base():
    return deepcopy(original(LLAMA))


def budget_of(place, mode="layers"):
    """A budget that holds a third of the weights, and adapters."""
    least = smallest_budget(LLAMA, mode, place)
    return max(least + 100_000, weight_bytes(original(LLAMA)) // 3)


def adapted(model, kind="lora"):
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind]())


def streamed(place, kind="lora", when="after", mode="layers"):
    """Return an adapted model that streams, and its runtime."""
    budget = budget_of(place, mode)
    if when == "before":
        model = adapted(base(), kind)
        inside = replace(LLAMA, block_pattern=r"\.layers\.\d+$")
        return model, stream(model, inside, mode, place, budget)
    model = base()
    runtime = stream(model, LLAMA, mode, place, budget)
    return adapted(model, kind), runtime


def tokens(place):
    return {key: value.to(place) for key, value in LLAMA.inputs().items()}


def train(model, place, steps=3, optimizer=None):
    inputs = tokens(place)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


@torch.no_grad()
def answer(model, place):
    return model(**tokens(place)).logits.cpu()


def assert_same(model, resident):
    ours, theirs = model.state_dict(), resident.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_bitwise_equal(ours[name], tensor, name)


def trained_pair(place, **options):
    """Train a resident and a streamed model alike."""
    resident = adapted(base(), options.get("kind", "lora")).to(place)
    model, runtime = streamed(place, **options)
    expected, _ = train(resident, place)
    assert train(model, place)[0] == expected
    assert expected[-1] < expected[0]
    return model, resident, runtime


# Training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_train_exactly_within_the_budget(place, kind, mode, when):
    model, resident, runtime = trained_pair(place, kind=kind, mode=mode, when=when)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name
    report = runtime.report()
    assert report.peak_device_bytes <= budget_of(place, mode)
    assert report.abandoned_slots == 0
    if place == "hpu":  # the host needs to move nothing, so it does not look
        assert report.weight_bytes == weight_bytes(resident)
    assert_same(model, resident)
    runtime.shutdown()
    assert_same(model, resident)
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_prompts_train_exactly(place, when):
    """Their wrapper looks tokens up in a table of the model, outside of its passes."""

    def prompted(model):
        torch.manual_seed(1)
        chosen = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return peft.get_peft_model(model, chosen)

    def fit(model):
        model.to(place)
        return train(model, place)[0]

    expected = fit(resident := prompted(base()))
    model = base() if when == "after" else prompted(base())
    runtime = stream(model, LLAMA, "layers", place, budget_of(place))
    model = prompted(model) if when == "after" else model
    assert fit(model) == expected
    assert_same(model, resident)
    runtime.shutdown()


def test_frozen_base_crosses_to_the_device_only(sim):
    home = []
    model, runtime = streamed("hpu")
    for one in (model, adapted(base()).to("hpu")):
        _, optimizer = train(one, "hpu", steps=5)  # by then the plan is made
        before = sim.d2h_bytes()
        train(one, "hpu", steps=2, optimizer=optimizer)
        home.append(sim.d2h_bytes() - before)
    looked_up = tokens("cpu")["input_ids"].nbytes  # the table stays on the host
    assert home[0] == home[1] + 2 * looked_up
    runtime.shutdown()


def test_adapters_wait_on_the_host_until_the_model_is_moved_or_used(sim):
    model, runtime = streamed("hpu")
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    places = {model.get_parameter(name).device.type for name in names}
    assert places == {"cpu"}
    assert model.to("hpu") is model
    assert {model.get_parameter(name).device.type for name in names} == {"hpu"}
    joined = sum(model.get_parameter(name).nbytes for name in names)
    assert runtime._parts.weights.holders()["tensors in no block"] == joined
    model.to("cpu")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    torch.accelerator.synchronize()
    assert sim.allocated_bytes() == runtime._parts.weights.held_bytes == 0
    runtime.shutdown()


def test_adapters_that_a_look_brings_to_the_device_train_exactly(place):
    """Whoever looks in inference mode makes no inference tensors of them."""
    resident = adapted(base()).to(place)
    model = base()
    runtime = stream(model, LLAMA, "layers", place, budget_of(place))
    model = adapted(model)
    for one in (model, resident):
        with torch.inference_mode():
            answer(one, place)
    assert train(model, place)[0] == train(resident, place)[0]
    assert_same(model, resident)
    runtime.shutdown()


def test_adapters_without_room_are_refused_until_the_budget_is_raised(sim):
    least = smallest_budget(LLAMA, "layers", "hpu")
    model = base()
    runtime = stream(model, LLAMA, "layers", "hpu", least)
    model = adapted(model)
    for _ in range(2):
        with pytest.raises(stagehand.StagehandOOMError, match="together") as error:
            train(model, "hpu")
    assert error.value.needed_bytes > least
    runtime.set_budget(error.value.needed_bytes)
    expected, _ = train(adapted(base()).to("hpu"), "hpu")
    assert train(model, "hpu")[0] == expected
    assert runtime.report().peak_device_bytes <= error.value.needed_bytes
    runtime.shutdown()


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_budgets_named_for_adapters_without_room_work_at_once_where_they_are_for(
    sim, rank
):
    """That for the present model was short by what a new one keeps for comfort."""

    def widened(model):
        torch.manual_seed(1)
        chosen = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, chosen)

    expected, _ = train(widened(base()).to("hpu"), "hpu")
    model, least = base(), smallest_budget(LLAMA, "layers", "hpu")
    runtime = stream(model, LLAMA, "layers", "hpu", least)
    model = widened(model)
    with pytest.raises(stagehand.StagehandOOMError) as error:
        train(model, "hpu")
    runtime.shutdown()
    named = re.search(
        r"at least (.*) with runtime\.set_budget\(\), or to (.*) as vram_budget= of a"
        r" new stagehand\.layer\(\)$",
        str(error.value),
    )
    for when, budget in (("while it streams", named[1]), ("anew", named[2])):
        model = base()
        first = least if when == "while it streams" else budget
        stagehand.layer(model, vram_budget=first, device="hpu")
        runtime = model._stagehand_layer_runtime
        model = widened(model)
        runtime.set_budget(budget)
        assert train(model, "hpu")[0] == expected, when
        runtime.shutdown()


def test_adapters_have_room_where_other_tensors_have_pushed_the_weights_out(sim):
    """Watermarks lower what weights have to the least, which counts what joins."""
    budget = budget_of("hpu", "blocks")
    others = torch.empty(2 * budget, dtype=torch.uint8, device="hpu")
    model = base()
    runtime = stream(model, LLAMA, "blocks", "hpu", budget)
    answer(model, "hpu")
    least = runtime._placing.marked_bytes
    assert least < budget
    model = adapted(model)
    expected, _ = train(adapted(base()).to("hpu"), "hpu")
    assert train(model, "hpu")[0] == expected
    assert least < runtime._placing.marked_bytes < budget
    runtime.shutdown()
    del others


def test_refused_adapters_may_be_taken_off_again(sim):
    model = base()
    least = smallest_budget(LLAMA, "layers", "hpu")
    runtime = stream(model, LLAMA, "layers", "hpu", least)
    expected = answer(base().to("hpu"), "hpu")
    model = adapted(model)
    with pytest.raises(stagehand.StagehandOOMError):
        answer(model, "hpu")
    model = model.unload()
    assert_bitwise_equal(answer(model, "hpu"), expected, "without adapters")
    runtime.shutdown()


def test_layer_that_replaces_another_is_used(place):
    resident = base().to(place)
    model = base()
    runtime = stream(model, LLAMA, "layers", place, budget_of(place))
    answer(model, place)
    head = nn.Linear(64, 8)
    resident.lm_head = deepcopy(head).to(place)
    model.lm_head = head
    assert_bitwise_equal(answer(model, place), answer(resident, place), "new head")
    runtime.shutdown()
    assert head.weight.device.type == "cpu"


def test_pass_in_which_nothing_joins_looks_at_no_tensor(sim, monkeypatch):
    model, runtime = streamed("hpu")
    answer(model, "hpu")
    additions = runtime._additions()
    monkeypatch.setattr(additions, "_note", None)  # is called when it looks
    answer(model, "hpu")
    runtime.shutdown()


def test_dora_trains_in_a_small_budget_where_its_reader_is_named_as_the_warning_says(
    place,
):
    """Its weights are read beside their layers, and had no room together."""

    def wrapped():
        torch.manual_seed(1)
        kind = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True)
        return peft.get_peft_model(base(), kind)

    resident, model = wrapped().to(place), wrapped()
    budget = weight_bytes(model) // 2
    stagehand.layer(model, vram_budget=budget, device=place)
    reader = r"\(peft\.tuners\.lora\.layer\.Linear\) in opaque="
    with pytest.warns(stagehand.StagehandWarning, match=reader):
        answer(model, place)
    model._stagehand_layer_runtime.shutdown()
    opaque = [peft.tuners.lora.layer.Linear]
    stagehand.layer(model.cpu(), vram_budget=budget, device=place, opaque=opaque)
    expected, _ = train(resident, place)
    assert train(model, place)[0] == expected
    assert_same(model, resident)
    model._stagehand_layer_runtime.shutdown()


# Merging


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_merge_and_unmerge_once_the_model_is_on_the_cpu(place, kind, when):
    model, resident, runtime = trained_pair(place, kind=kind, when=when)
    for change in ("merge_adapter", "unmerge_adapter"):
        for one in (model, resident):
            one.to("cpu")  # streams on with the next pass
            getattr(one, change)()
        resident.to(place)
        assert_bitwise_equal(answer(model, place), answer(resident, place), change)
    assert_same(model, resident)
    runtime.shutdown()


@pytest.mark.parametrize("kind", ["lora", "vera"])
def test_adapters_of_a_model_that_was_on_the_device_come_to_the_cpu_with_it(sim, kind):
    """They stayed where the model had come from, and could not be merged."""
    resident = adapted(base(), kind).to("hpu")
    model = base().to("hpu")
    runtime = stream(model, LLAMA, "layers", "hpu", budget_of("hpu"))
    model = adapted(model, kind)
    for one in (model, resident):
        train(one, "hpu")
        one.to("cpu").merge_adapter()
        assert {t.device.type for t in (*one.parameters(), *one.buffers())} == {"cpu"}
    resident.to("hpu")
    assert_bitwise_equal(answer(model, "hpu"), answer(resident, "hpu"), "merged")
    runtime.shutdown()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"hpu"}


def test_adapters_loaded_beside_weights_that_stay_come_to_the_cpu_with_them(
    sim, tmp_path
):
    """They are loaded to where the weights are, and the buffers among them stayed."""
    model = base()
    stream(model, LLAMA, "layers", "hpu", weight_bytes(model) * 9 // 10)
    kind = peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"])
    model = peft.get_peft_model(model, kind)
    model.save_pretrained(tmp_path)
    for _ in range(3):
        answer(model, "hpu")
    layers = model.base_model.model.model.layers
    assert "hpu" in {layer.self_attn.q_proj.weight.device.type for layer in layers}
    model.load_adapter(tmp_path, "other")
    model.set_adapter("other")
    expected = answer(model, "hpu")
    model.to("cpu")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert_bitwise_equal(answer(model, "hpu"), expected, "moved back")
    model._stagehand_layer_runtime.shutdown()


def test_merging_into_weights_on_the_other_side_fails_and_changes_nothing(sim):
    model, resident, runtime = trained_pair("hpu")
    with pytest.raises(RuntimeError, match="same device"):
        model.merge_adapter()
    assert_same(model, resident)
    assert_bitwise_equal(answer(model, "hpu"), answer(resident, "hpu"), "answer")
    runtime.shutdown()


@pytest.mark.parametrize("safe", [False, True])
def test_merged_model_without_adapters_streams_on(place, safe):
    model, resident, runtime = trained_pair(place)
    for one in (model, resident):
        one.to("cpu")
    model = model.merge_and_unload(safe_merge=safe)
    resident = resident.merge_and_unload(safe_merge=safe).to(place)
    assert_bitwise_equal(answer(model, place), answer(resident, place), "merged")
    assert runtime.report().weight_bytes == weight_bytes(original(LLAMA))
    assert_same(model, resident)
    runtime.shutdown()
    assert_same(model, resident)


# Saving


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_saved_in_mid_training_and_load_onto_a_streamed_base(
    place, when, tmp_path
):
    resident = adapted(base()).to(place)
    expected, _ = train(resident, place, steps=6)
    model, runtime = streamed(place, when=when)
    first, optimizer = train(model, place)
    model.save_pretrained(tmp_path)
    state = deepcopy(optimizer.state_dict())
    after, _ = train(model, place, optimizer=optimizer)
    assert first + after == expected  # saving disturbs nothing
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 16
    runtime.shutdown()

    model = base()
    runtime = stream(model, LLAMA, "layers", place, budget_of(place))
    model = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
    model.to(place)  # the optimizer's state goes where its parameters are
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    optimizer.load_state_dict(state)
    assert train(model, place, optimizer=optimizer)[0] == expected[3:]
    assert_same(model, resident)
    runtime.shutdown()


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_adapters_on_meta_join_when_their_values_are_loaded(place, mode, how):
    """`low_cpu_mem_usage=True` puts them there, and asks for a state dict then."""
    resident = adapted(base()).to(place)
    train(resident, place)
    state = {
        name: tensor.cpu().clone()
        for name, tensor in peft.get_peft_model_state_dict(resident).items()
    }
    model = base()
    runtime = stream(model, LLAMA, mode, place, budget_of(place, mode))
    model = peft.get_peft_model(model, KINDS["lora"](), low_cpu_mem_usage=True)
    model.to(place)
    assert runtime.report().weight_bytes == weight_bytes(original(LLAMA))
    if how == "assigned":
        peft.set_peft_model_state_dict(model, state, low_cpu_mem_usage=True)
    else:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                value = state[name.replace(".default.", ".")]
                torch.utils.swap_tensors(parameter, nn.Parameter(value))
    assert_bitwise_equal(answer(model, place), answer(resident, place), "answer")
    assert train(model, place)[0] == train(resident, place)[0]
    assert runtime.report().peak_device_bytes <= runtime.report().budget_bytes
    assert_same(model, resident)
    runtime.shutdown()


def test_adapters_come_and_go_by_name(place):
    resident = adapted(base()).to(place)
    model, runtime = streamed(place)
    for one in (model, resident):
        one.add_adapter("second", KINDS["lora"]())
        one.set_adapter("second")
        torch.manual_seed(3)
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape).to(parameter.device)
    assert_bitwise_equal(answer(model, place), answer(resident, place), "second")
    held = runtime.report().weight_bytes
    for one in (model, resident):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the other one becomes active
            one.delete_adapter("second")
    assert_bitwise_equal(answer(model, place), answer(resident, place), "first")
    if place == "hpu":
        assert runtime.report().weight_bytes < held
    runtime.shutdown()


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("prompt", ["hpu", "cpu"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["lora", "adaption_prompt"])
def test_adapted_model_generates_in_passes_of_the_whole_model(
    sim, kind, when, prompt, task
):
    """The wrapper calls `generate` of what it wraps, which calls itself.

    That of adaption prompts has its `forward` of its own, and not of its class.
    """
    if kind == "lora":
        chosen = replace(KINDS[kind](), task_type=task, init_lora_weights=False)
    else:
        chosen = peft.AdaptionPromptConfig(
            adapter_len=4, adapter_layers=2, task_type=task
        )

    def wrapped(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, chosen).eval()

    def generate(model, place):
        prompt = tokens(place)["input_ids"]
        return model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)

    expected = generate(wrapped(base()).to("hpu"), "hpu").cpu()
    model = wrapped(base()) if when == "before" else base()
    runtime = stream(model, LLAMA, "layers", "hpu", budget_of("hpu"))
    model = model if when == "before" else wrapped(model)
    for number in range(2):
        assert_bitwise_equal(generate(model, prompt).cpu(), expected, f"{number}")
    assert runtime.report().passes == 10
    runtime.shutdown()
    assert len(runtime.telemetry.records) == 10  # each is a step
