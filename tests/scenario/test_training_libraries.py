"""Training loops of other libraries run on a streamed model with no special code."""

from copy import deepcopy
from functools import partial

import accelerate
import diffusers
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file

from architectures import ARCHITECTURES, assert_bitwise_equal, flatten, to_device
from architectures.language import GPT2, LLAMA
from stagehand.errors import OrphanedParameterError
from streamed import original, smallest_budget, stream, weight_bytes

DIFFUSION = {a.name: a for a in ARCHITECTURES}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim, monkeypatch):
    """A device, which is also the one that `accelerate` chooses."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", request.param)
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    yield request.param
    for state in states:
        state._reset_state()


def model_of(architecture=LLAMA):
    return deepcopy(original(architecture))


def streamed(place, architecture=LLAMA, mode="layers"):
    least = smallest_budget(architecture, mode, place)
    model = model_of(architecture)
    budget = least + (weight_bytes(model) - least) // 4
    return model, stream(model, architecture, mode, place, budget)


def assert_same(model, resident):
    ours, theirs = model.state_dict(), resident.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_bitwise_equal(ours[name], tensor, name)


def assert_in_budget(runtime):
    report = runtime.report()
    budget = runtime._settings.budget_bytes  # watermarks may lower it
    assert report.peak_device_bytes <= budget < report.weight_bytes
    assert report.abandoned_slots == 0


def texts(count=32):
    rows = torch.randint(3, 256, (count, 8), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": row, "labels": row} for row in rows]


# transformers


def fit(model, folder, *, clip, resume=None):
    """Run what a user of `transformers.Trainer` runs; return the losses."""
    options = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=clip,
        learning_rate=1e-2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=1,
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=texts())
    trainer.train(resume_from_checkpoint=resume)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture
def clip(place):
    """Where a part of the gradients is on the device, norms are added in another order,
    which changes the last bit of what is clipped."""
    return 0.5 if place == "cpu" else 1e3


@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_trainer_saves_and_resumes_to_the_bit(place, clip, mode, tmp_path):
    resident = model_of()
    expected = fit(resident, tmp_path / "resident", clip=clip)
    model, runtime = streamed(place, mode=mode)
    assert fit(model, tmp_path / "streamed", clip=clip) == expected
    assert_same(model, resident)
    assert_in_budget(runtime)
    runtime.shutdown()

    model, runtime = streamed(place, mode=mode)
    half = tmp_path / "streamed" / "checkpoint-2"
    assert fit(model, tmp_path / "resumed", clip=clip, resume=str(half)) == expected
    assert_same(model, resident)
    runtime.shutdown()


def test_trainer_trains_adapters(place, clip, tmp_path):
    def adapted(model):
        torch.manual_seed(1)
        chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(model, chosen)

    resident = adapted(model_of())
    expected = fit(resident, tmp_path / "resident", clip=clip)
    model, runtime = streamed(place)
    model = adapted(model)
    assert fit(model, tmp_path / "streamed", clip=clip) == expected
    assert_same(model, resident)
    runtime.shutdown()


def resize(model):
    """Train on four words more than the model knows."""
    torch.manual_seed(1)
    model.resize_token_embeddings(260, mean_resizing=False)


def answer(model, highest, place):
    numbers = torch.arange(highest - 8, highest, device=place)
    with torch.no_grad():
        return model(numbers[None]).logits


@pytest.mark.parametrize("mode", ["layers", "blocks"])
@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["untied", "tied"])
@pytest.mark.parametrize("runs", [False, True])
def test_what_is_advised_where_token_embeddings_were_resized_works_at_once(
    place, mode, architecture, runs
):
    """A head that had joined was refused first, with a budget that was in vain."""
    least = smallest_budget(architecture, mode, place)
    model = model_of(architecture)
    runtime = stream(model, architecture, mode, place, least)
    if runs:
        answer(model, 256, place)
    resize(model)
    with pytest.raises(OrphanedParameterError, match=r"call runtime\.shutdown\(\)"):
        answer(model, 256, place)
    runtime.shutdown()
    resize(model)
    plain = model_of(architecture)
    resize(plain)
    runtime = stream(model, architecture, mode, place, 2 * least)
    expected = answer(plain.to(place), 260, place)
    assert_bitwise_equal(answer(model, 260, place), expected, "answer")
    runtime.shutdown()


# accelerate


def loop(model):
    """Train as the documentation of `accelerate` does; return the losses."""
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(texts(16), batch_size=2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, batches, schedule = accelerator.prepare(
        model, optimizer, batches, schedule
    )
    losses = []
    for rows in batches:
        with accelerator.accumulate(model):
            loss = model(**rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.unwrap_model(model) is model
    return losses


def test_accelerate_loop_trains_exactly(place):
    resident = model_of()
    expected = loop(resident)
    model, runtime = streamed(place)
    assert loop(model) == expected
    assert_same(model, resident)
    assert_in_budget(runtime)
    runtime.shutdown()


# diffusers


def denoise(model, inputs, steps=3):
    """Take some steps towards a target, as the training scripts of `diffusers` do."""
    scheduler = diffusers.DDPMScheduler()
    generator = torch.Generator().manual_seed(2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    name = "sample" if "sample" in inputs else "hidden_states"
    clean, losses = inputs[name], []
    for _ in range(steps):
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        times = torch.randint(0, 1000, (len(clean),), generator=generator)
        times = times.to(clean.device)
        noisy = scheduler.add_noise(clean, noise, times)
        guess = model(**{**inputs, name: noisy, "timestep": times}).sample
        loss = (guess - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["unet_2d_condition", "ltx_video"])
@pytest.mark.parametrize("adapters", ["none", "before", "after"])
def test_diffusion_model_trains_exactly(place, name, adapters):
    architecture = DIFFUSION[name]

    def adapted(model):
        torch.manual_seed(1)
        model.requires_grad_(False)
        chosen = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"])
        model.add_adapter(chosen)

    resident, model = model_of(architecture), model_of(architecture)
    for one in (resident, model) if adapters == "before" else ():
        adapted(one)
    least = smallest_budget(architecture, "layers", place) + 100_000
    runtime = stream(model, architecture, "layers", place, least)
    for one in (resident, model) if adapters == "after" else ():
        adapted(one)
    inputs = to_device(architecture.inputs(), place)
    resident.to(place)
    expected = denoise(resident, inputs)
    assert denoise(model, inputs) == expected
    assert_same(model, resident)
    assert_in_budget(runtime)
    runtime.shutdown()


@pytest.mark.parametrize("name", ["unet_2d_condition", "ltx_video"])
@pytest.mark.parametrize("mode", ["layers", "blocks"])
def test_lora_that_is_loaded_onto_a_streamed_diffusion_model_is_used(place, name, mode):
    """As `load_lora_weights` of a pipeline does, which asks for no memory first."""
    architecture = DIFFUSION[name]
    resident, model = model_of(architecture), model_of(architecture)
    chosen = peft.LoraConfig(
        r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False
    )
    resident.add_adapter(chosen)
    state = peft.get_peft_model_state_dict(resident)
    least = smallest_budget(architecture, mode, place) + 100_000
    runtime = stream(model, architecture, mode, place, least)
    model.load_lora_adapter(state, prefix=None, low_cpu_mem_usage=True)
    inputs = to_device(architecture.inputs(), place)
    resident.to(place)
    with torch.no_grad():
        expected = architecture.call(resident, inputs)
        for number in range(3):
            found = architecture.call(model, inputs)
            assert_bitwise_equal(flatten(found), flatten(expected), f"pass {number}")
    assert_in_budget(runtime)
    runtime.shutdown()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def averaged(model, inputs, foreach):
    """Train, look at the model through its averages, save and load these, and go on."""
    averages = EMAModel(model.parameters(), decay=0.9, foreach=foreach)
    seen = []
    for _ in range(3):
        denoise(model, inputs, steps=1)
        averages.step(model.parameters())
        averages.store(model.parameters())
        averages.copy_to(model.parameters())
        with torch.no_grad():
            seen += flatten(model(**inputs))
        averages.restore(model.parameters())
        loaded = [tensor.to("cpu", copy=True) for tensor in averages.shadow_params]
        pairs = zip(loaded, model.parameters(), strict=True)
        averages.shadow_params = [tensor.to(weight.device) for tensor, weight in pairs]
    return seen + [tensor.cpu() for tensor in averages.shadow_params]


@pytest.mark.parametrize("foreach", [True, False])
def test_averages_beside_the_weights_are_exact(place, foreach):
    architecture = DIFFUSION["unet_2d_condition"]
    resident = model_of(architecture).to(place)
    inputs = to_device(architecture.inputs(), place)
    expected = averaged(resident, inputs, foreach)
    model, runtime = streamed(place, architecture)
    assert_bitwise_equal(averaged(model, inputs, foreach), expected, "averages")
    assert_same(model, resident)
    assert_in_budget(runtime)
    runtime.shutdown()


def distilled(model, target, inputs):
    """Train towards a target whose weights are averages, made in place."""
    seen = []
    for _ in range(3):
        with torch.no_grad():
            seen += flatten(target(**inputs))
        denoise(model, inputs, steps=1)
        torch.accelerator.synchronize()
        with torch.no_grad():
            for average, weight in zip(
                target.parameters(), model.parameters(), strict=True
            ):
                average.lerp_(weight.to(average.device), 0.5)
    return seen


def test_target_that_streams_is_averaged_in_place(place):
    """It is frozen: between passes some of its weights stay on the device."""
    architecture = DIFFUSION["unet_2d_condition"]
    inputs = to_device(architecture.inputs(), place)
    resident, average = (model_of(architecture).to(place) for _ in range(2))
    average.requires_grad_(False)
    expected = distilled(resident, average, inputs)
    model, runtime = streamed(place, architecture)
    target, other = streamed(place, architecture)
    target.requires_grad_(False)
    assert_bitwise_equal(distilled(model, target, inputs), expected, "targets")
    assert_same(model, resident)
    assert_same(target, average)
    for one in (runtime, other):
        assert_in_budget(one)
        one.shutdown()


# torch


def next_tokens(model, place, steps=2, **options):
    """Train a language model; `after` is called between backward and step."""
    after = options.pop("after", lambda step: None)
    inputs = to_device(LLAMA.inputs(), place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        after(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_on_both_sides_are_clipped_together(place, foreach):
    resident = model_of().to(place)
    model, runtime = streamed(place)
    norms = {}
    for one in (resident, model):

        def clip(step, one=one):
            parameters = one.parameters()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
            norms.setdefault(step, []).append(norm.cpu())

        next_tokens(one, place, after=clip)
    for ours, theirs in norms.values():
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        {k: v.cpu() for k, v in model.state_dict().items()},
        {k: v.cpu() for k, v in resident.state_dict().items()},
    )
    runtime.shutdown()


@pytest.mark.parametrize("when", ["between", "after"])
def test_weights_are_saved_in_mid_training(place, when, tmp_path):
    """Also between backward and step, where moving averages are taken, too."""

    def save(model, step):
        save_file(model.state_dict(), tmp_path / f"{step}.safetensors")

    resident = model_of().to(place)
    kept = []
    expected = next_tokens(
        resident,
        place,
        after=lambda step: kept.append(deepcopy(resident.state_dict())),
    )
    model, runtime = streamed(place)
    if when == "between":
        assert next_tokens(model, place, after=partial(save, model)) == expected
        for step, weights in enumerate(kept):
            saved = load_file(tmp_path / f"{step}.safetensors")
            for name, tensor in weights.items():
                assert_bitwise_equal(saved[name], tensor, name)
    else:
        assert next_tokens(model, place) == expected
        save(model, "last")
        saved = load_file(tmp_path / "last.safetensors")
        for name, tensor in resident.state_dict().items():
            assert_bitwise_equal(saved[name], tensor, name)
    assert_same(model, resident)
    runtime.shutdown()
