"""`stagehand.pipeline()`: several models in one line, under one budget."""

import runpy
from copy import copy, deepcopy
from pathlib import Path

import diffusers
import pytest
import torch
from small import LAYER_BYTES, WIDTH, batch, stack
from torch import nn

import stagehand
from architectures.trees import assert_bitwise_equal
from stagehand.units import format_bytes
from streamed import Shape, aligned, weight_bytes

places = pytest.mark.parametrize("place", ["cpu", "hpu"])


def parts():
    """Three models, one of them small, and what is no model."""
    torch.manual_seed(4)
    return {
        "encoder": stack(4),
        "transformer": stack(12),
        "decoder": nn.Linear(WIDTH, 4),
        "scheduler": object(),
        "missing": None,
    }


def run(models, x, steps=4):
    with torch.no_grad():
        x = models["encoder"](x)
        for _ in range(steps):
            x = models["transformer"](x)
        return models["decoder"](x)


@places
@pytest.mark.parametrize("budget", [2, 5, 9, 40])
def test_a_dict_of_models_gives_the_same_under_one_budget(sim, place, budget):
    models = parts()
    resident = {
        k: deepcopy(m).to(place) for k, m in models.items() if isinstance(m, nn.Module)
    }
    expected = run(resident, batch().to(place))
    budget = (budget * LAYER_BYTES) + 1024
    with stagehand.pipeline(models, vram_budget=budget, device=place) as streamed:
        assert list(streamed.runtimes) == ["encoder", "transformer", "decoder"]
        for _ in range(4):
            assert_bitwise_equal(run(models, batch()), expected, "output")
        assert 0 < streamed.peak_device_bytes <= budget
        assert set(streamed.reports()) == set(streamed.runtimes)
    assert "_stagehand_layer_runtime" not in models["encoder"].__dict__


def test_small_models_stay_and_say_why(sim):
    models = parts()
    budget = 8 * LAYER_BYTES
    with stagehand.pipeline(models, vram_budget=budget, device="hpu") as streamed:
        for _ in range(3):
            run(models, batch())
        decoder = streamed.runtimes["decoder"]
        before = decoder.report().streamed_bytes
        run(models, batch())
        assert decoder.report().streamed_bytes == before
        assert "small" in repr(decoder)
        assert "decoder holds 768 B, keeps 768 B (small)" in str(
            streamed.reports()["transformer"]
        )
        with streamed.runtimes["transformer"].as_guest(models["decoder"]):
            run(models, batch())  # the user wants otherwise
        assert decoder._parts.weights.held_bytes == 0


def test_the_next_model_is_loaded_while_the_present_one_ends(sim):
    """It begins with its first blocks on the device, or on their way."""
    models = parts()
    with stagehand.pipeline(
        models, vram_budget=6 * LAYER_BYTES + 1024, device="hpu"
    ) as streamed:
        encoder, ahead = streamed.runtimes["encoder"], []
        for _ in range(6):
            loaded = encoder.report().streamed_bytes
            with torch.no_grad():
                x = models["transformer"](batch())
                ahead.append(encoder.report().streamed_bytes - loaded)
                models["encoder"](x)
        assert ahead[0] == 0
        assert ahead[-1] >= LAYER_BYTES


def test_a_budget_that_is_too_small_for_one_changes_nothing(sim):
    models = parts()
    shapes = {k: Shape.of(m) for k, m in models.items() if isinstance(m, nn.Module)}
    models["decoder"] = nn.Linear(8 * WIDTH, 8 * WIDTH)
    shapes["decoder"] = Shape.of(models["decoder"])
    with pytest.raises(stagehand.StagehandOOMError):
        stagehand.pipeline(models, vram_budget=2 * LAYER_BYTES, device="hpu")
    for name, shape in shapes.items():
        assert Shape.of(models[name]) == shape


def test_the_budget_that_an_error_names_works_for_all_models(sim):
    """It was that of the first that was refused; the next one needed more."""
    widths = (WIDTH, 8 * WIDTH, 2 * WIDTH)
    models = {
        f"of {n}": nn.Sequential(*(nn.Linear(n, n) for _ in range(3))) for n in widths
    }
    shapes = {name: Shape.of(model) for name, model in models.items()}
    with pytest.raises(stagehand.StagehandOOMError, match="model 'of 256' of") as error:
        stagehand.pipeline(models, vram_budget="1KB", device="hpu")
    assert {name: Shape.of(model) for name, model in models.items()} == shapes
    budget = error.value.needed_bytes
    with stagehand.pipeline(models, vram_budget=budget, device="hpu"), torch.no_grad():
        for n in widths:
            models[f"of {n}"](batch(4, n))


def test_the_model_of_a_pipeline_that_cannot_be_streamed_is_named(sim):
    models = {"first": nn.Linear(WIDTH, WIDTH), "lazy": nn.LazyLinear(WIDTH)}
    with pytest.raises(stagehand.ConfigError, match="for model 'lazy' of the pipeline"):
        stagehand.pipeline(models, device="hpu")
    assert not hasattr(models["first"], "_stagehand_layer_runtime")


@pytest.mark.parametrize("vram_budget", ["1MB", "much"])
def test_nothing_is_cast_where_a_later_model_cannot_be(sim, vram_budget):
    """Those before it were cast, and so was one whose budget could not be read."""
    models = {"first": nn.Linear(WIDTH, WIDTH), "whole": nn.Linear(WIDTH, WIDTH)}
    if vram_budget == "1MB":
        pairs = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        models["whole"].register_buffer("pairs", pairs)
    with pytest.raises(stagehand.ConfigError, match=r"pairs|much"):
        stagehand.pipeline(models, vram_budget=vram_budget, dtype=torch.bfloat16)
    with pytest.raises(stagehand.ConfigError, match=r"pairs|much"):
        stagehand.layer(models["whole"], vram_budget=vram_budget, dtype=torch.bfloat16)
    with pytest.raises(stagehand.ConfigError, match="nan_inf_check is 'much'"):
        stagehand.layer(models["first"], dtype=torch.bfloat16, nan_inf_check="much")
    for model in models.values():
        assert model.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "pipe", [{}, {"scheduler": object()}, object(), nn.Linear(1, 1)]
)
def test_what_is_no_pipeline_is_refused(pipe):
    with pytest.raises(stagehand.ConfigError, match="expected"):
        stagehand.pipeline(pipe)


@pytest.mark.parametrize("option", [{"shared": False}, {"name": "mine"}], ids=str)
def test_what_models_of_a_pipeline_have_together_is_no_option(option):
    with pytest.raises(stagehand.ConfigError, match="not for a pipeline"):
        stagehand.pipeline(parts(), vram_budget=4 * LAYER_BYTES, **option)


class Slotted:
    """A pipeline whose class cannot be changed."""

    __slots__ = ("components",)
    _execution_device = torch.device("cpu")


def test_a_pipeline_that_cannot_say_where_it_is_changes_nothing(sim):
    pipe = Slotted()
    pipe.components = parts()
    for _ in range(2):
        with pytest.raises(TypeError, match="__class__"):
            stagehand.pipeline(pipe, vram_budget=8 * LAYER_BYTES, device="hpu")


def test_what_is_raised_inside_of_a_pipeline_is_what_comes_out(sim):
    """Its models may be gone by then."""
    models = {"a": stack()}

    def fail():
        with stagehand.pipeline(models, vram_budget=4 * LAYER_BYTES, device="hpu"):
            models.clear()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()


def test_a_report_says_of_what_a_models_budget_is_a_part(sim):
    """It read as if the peak, of passes before, had been above the budget."""
    models = {"large": stack(8), "small": stack(2)}
    budget = weight_bytes(models["large"]) + LAYER_BYTES
    with stagehand.pipeline(models, vram_budget=budget, device="hpu") as streamed:
        for _ in range(3):
            for model in models.values():
                model(batch())
        reports = streamed.reports().values()
        parts = [report for report in reports if report.budget_bytes < budget]
        assert parts
        for report in reports:
            assert report.peak_device_bytes <= report.given_bytes == budget
            part = f"{format_bytes(report.budget_bytes)} of {format_bytes(budget)}, "
            assert (part in str(report)) == (report in parts)


def test_a_model_that_leaves_the_device_makes_room_for_one_before_it(sim):
    """A budget warned of what the second model had there, which it gives up."""
    first, second = stack(), stack().to("hpu")
    sim.configure(capacity_bytes=sim.allocated_bytes() + LAYER_BYTES)
    budget = weight_bytes(first)
    with stagehand.pipeline(
        {"first": first, "second": second}, vram_budget=budget, device="hpu"
    ):  # a warning is an error
        for model in (first, second):
            model(batch())
        sim.configure()


def test_what_has_joined_without_room_is_named_with_its_model(sim):
    """The one whose budget is to be raised was any of the pipeline's."""
    models = parts()
    with stagehand.pipeline(models, vram_budget=4 * LAYER_BYTES, device="hpu"):
        models["encoder"].extra = nn.Parameter(torch.zeros(4 * LAYER_BYTES))
        named = "1 tensors, .* have joined encoder since it streams"
        with pytest.raises(stagehand.StagehandOOMError, match=named):
            run(models, batch())


def test_a_host_budget_of_which_nothing_is_left_for_a_model_is_named(sim):
    models = {"encoder": stack(2), "model": stack(4)}
    with pytest.raises(stagehand.ConfigError, match="ram_budget is 1 for 2 models"):
        stagehand.pipeline(models, vram_budget="1MB", ram_budget=1, device="hpu")
    models["switch"] = nn.Identity()  # has no weights, and needs none of it
    with stagehand.pipeline(models, vram_budget="1MB", ram_budget="1MB", device="hpu"):
        models["switch"](models["model"](batch().to("hpu")))


def test_a_host_budget_is_for_all_models_together(sim):
    models = parts()
    weights = sum(weight_bytes(m) for m in models.values() if isinstance(m, nn.Module))
    with stagehand.pipeline(
        models,
        vram_budget=6 * LAYER_BYTES,
        ram_budget=weights + 8 * LAYER_BYTES,
        device="hpu",
    ):
        for _ in range(2):
            run(models, batch())
        assert sim.peak_pinned_bytes() <= weights + 8 * LAYER_BYTES


@pytest.mark.parametrize(("device", "host"), [(6, 40), (40, 6)])
def test_the_smaller_budget_counts_where_there_is_one_memory(device, host):
    models = parts()
    expected = run({k: deepcopy(m) for k, m in models.items()}, batch())
    budgets = [n * LAYER_BYTES + 1024 for n in (device, host)]
    options = {"vram_budget": budgets[0], "ram_budget": budgets[1], "device": "cpu"}
    with stagehand.pipeline(models, **options) as streamed:
        for _ in range(3):
            assert_bitwise_equal(run(models, batch()), expected, "output")
        assert 0 < streamed.peak_device_bytes <= min(budgets)
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.pipeline(parts(), **options | {"ram_budget": 4096})
    enough = options | {"ram_budget": error.value.needed_bytes}
    with stagehand.pipeline(models, **enough):
        assert_bitwise_equal(run(models, batch()), expected, "output")


# A pipeline of diffusers


def diffusion_pipeline():
    torch.manual_seed(5)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler(10))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_image(pipe):
    generator = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipe(num_inference_steps=3, generator=generator, output_type="np").images
    )


@places
def test_a_diffusers_pipeline_makes_the_same_image_in_one_line(sim, place):
    pipe = diffusion_pipeline()
    expected = make_image(deepcopy(pipe).to(place))
    own, shape = type(pipe), Shape.of(pipe.unet)
    budget = weight_bytes(pipe.unet) // 3
    streamed = stagehand.pipeline(pipe, vram_budget=budget, device=place)
    assert isinstance(pipe, diffusers.DDPMPipeline)
    assert pipe.device.type == pipe._execution_device.type == place
    for _ in range(2):
        assert_bitwise_equal(make_image(pipe), expected, "image")
    assert streamed.peak_device_bytes <= budget
    streamed.shutdown()
    streamed.shutdown()
    assert type(pipe) is own
    assert Shape.of(pipe.unet) == shape


class Asking(diffusers.DDPMPipeline):
    """Asks its model where it computes."""

    def _get_execution_device(self):
        return self.unet.up_blocks[0].resnets[0].conv1.weight.device

    def __call__(self, **options):
        assert self._get_execution_device() == self.device
        return super().__call__(**options)


def test_a_pipeline_that_asks_its_model_where_it_is_is_told_the_device(sim):
    pipe = Asking(**diffusion_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    expected = make_image(deepcopy(pipe).to("hpu"))
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu"):
        assert_bitwise_equal(make_image(pipe), expected, "image")
        assert Asking._get_execution_device(pipe).type == "cpu"


def compiled(model):
    return torch.compile(model, backend="eager")


def test_a_model_that_came_since_the_pipeline_streams_is_named(sim):
    """It was torch's error, of tensors on two devices."""
    pipe = Asking(**diffusion_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    expected = make_image(deepcopy(pipe).to("hpu"))
    streamed = pipe.unet
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu"):
        for put in (streamed, deepcopy(streamed).to("hpu"), compiled(streamed)):
            pipe.unet = put
            assert pipe._execution_device.type == "hpu"
        pipe.unet = diffusion_pipeline().unet
        named = pytest.warns(stagehand.StagehandWarning, match="'unet' of the Asking")
        with named, pytest.raises(RuntimeError, match="device"):
            make_image(pipe)
        stagehand.layer(pipe.unet, vram_budget="400KB", device="hpu")
        assert_bitwise_equal(make_image(pipe), expected, "image of the other")
        pipe.unet._stagehand_layer_runtime.shutdown()
        named = pytest.warns(stagehand.StagehandWarning, match="runtime was shut down")
        with named, pytest.raises(RuntimeError, match="device"):
            make_image(pipe)
        pipe.unet = streamed
        assert_bitwise_equal(make_image(pipe), expected, "image")


class Encoding(Asking):
    """Has a model that it does without where it is given what that has made."""

    def __init__(self, unet, scheduler, encoder):
        super().__init__(unet, scheduler)
        self.register_modules(encoder=encoder)


def test_a_model_that_is_done_may_be_shut_down_before_the_pipeline_runs(sim):
    """That was refused, though nobody ran it any more."""
    encoder = diffusion_pipeline().unet
    pipe = Encoding(**diffusion_pipeline().components, encoder=encoder)
    pipe.set_progress_bar_config(disable=True)
    expected = make_image(deepcopy(pipe).to("hpu"))
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu") as streamed:
        streamed.runtimes["encoder"].shutdown()
        with pytest.warns(stagehand.StagehandWarning, match="'encoder' of the Encod"):
            image = make_image(pipe)
    assert_bitwise_equal(image, expected, "image")


class Upcasting(diffusers.DDPMPipeline):
    """Casts its model while it runs, as pipelines of SDXL do with their decoder."""

    def __call__(self, **options):
        self.unet.to(dtype=torch.float32)
        found = super().__call__(**options)
        self.unet.to(dtype=torch.float16)
        return found


def test_a_model_that_its_pipeline_casts_may_be_whole_on_the_device(sim):
    """The error said to cast it by hand, which is not what the pipeline expects."""
    pipe = Upcasting(**diffusion_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.half()
    expected = make_image(deepcopy(pipe).to("hpu"))
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu") as streamed:
        way_out = r"casts while it runs.*shutdown\(\), and model\.to\(device\)"
        with pytest.raises(stagehand.ConfigError, match=way_out):
            make_image(pipe)
        streamed.runtimes["unet"].shutdown()
        pipe.unet.to("hpu")
        for _ in range(2):
            assert_bitwise_equal(make_image(pipe), expected, "image")


class Combined(diffusers.DiffusionPipeline):
    """Has a pipeline that it runs, as those have that take a prior along."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.decoder_pipe = diffusers.DDPMPipeline(unet, scheduler)
        self.decoder_pipe.set_progress_bar_config(disable=True)

    def __call__(self, **options):
        return self.decoder_pipe(**options)


@places
def test_a_pipeline_inside_of_a_pipeline_is_on_the_device_as_well(sim, place):
    pipe = Combined(**diffusion_pipeline().components)
    expected = make_image(deepcopy(pipe).to(place))
    inner = type(pipe.decoder_pipe)
    with stagehand.pipeline(pipe, vram_budget="1MB", device=place):
        assert pipe.decoder_pipe.device.type == place
        assert_bitwise_equal(make_image(pipe), expected, "image")
    assert type(pipe.decoder_pipe) is inner


def of_the_same_parts(pipe):
    """What `from_pipe()` makes of them."""
    other = diffusers.DDIMPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    return other


@places
def test_two_pipelines_may_have_the_same_models(sim, place):
    pipe = diffusion_pipeline()
    plain = deepcopy(pipe).to(place)
    expected = make_image(plain), make_image(of_the_same_parts(plain))
    with stagehand.pipeline(pipe, vram_budget="400KB", device=place) as streamed:
        other = of_the_same_parts(pipe)
        with stagehand.pipeline(other, device=place) as again:
            assert again.runtimes == streamed.runtimes
            found = make_image(pipe), make_image(other)
            assert_bitwise_equal(found, expected, "images")
        assert type(other) is diffusers.DDIMPipeline
        assert_bitwise_equal(make_image(pipe), expected[0], "image")
        assert streamed.peak_device_bytes <= 400_000


class Upscaled(diffusers.DiffusionPipeline):
    """Has a model more."""

    def __init__(self, unet, scheduler, upscaler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, upscaler=upscaler)


def test_what_streams_already_is_taken_into_a_pipeline_as_it_is(sim):
    """By `load()`, say. What does not keeps to the same budget if none is given."""
    parts = diffusion_pipeline().components
    stagehand.layer(parts["unet"], vram_budget="400KB", device="hpu")
    runtime = parts["unet"]._stagehand_layer_runtime
    pipe = Upscaled(**parts, upscaler=diffusion_pipeline().unet)
    with stagehand.pipeline(pipe, device="hpu") as streamed:
        assert streamed.runtimes["unet"] is runtime
        assert streamed.runtimes["upscaler"]._settings.budget_bytes == 400_000
    assert not hasattr(pipe.upscaler, "_stagehand_layer_runtime")
    assert parts["unet"]._stagehand_layer_runtime is runtime
    runtime.shutdown()


def test_what_streams_already_is_refused_where_that_would_change_it(sim):
    pipe = diffusion_pipeline()
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu"):
        other = of_the_same_parts(pipe)
        for option in ({"vram_budget": "1MB"}, {"ram_budget": "1MB"}, {"trace": True}):
            with pytest.raises(stagehand.ConfigError, match="streamed already"):
                stagehand.pipeline(other, device="hpu", **option)
        with pytest.raises(stagehand.ConfigError, match="is streamed to hpu:0 already"):
            stagehand.pipeline(other, device="cpu")
        with pytest.raises(stagehand.ConfigError, match="Pipeline is streamed already"):
            stagehand.pipeline(pipe, device="hpu")
        with pytest.raises(stagehand.ConfigError, match="is streamed already"):
            stagehand.pipeline(pipe.components, device="hpu")
        assert type(other) is diffusers.DDIMPipeline


def test_a_pipeline_inside_with_models_of_its_own_is_left_alone(sim):
    pipe, other = diffusion_pipeline(), diffusion_pipeline()
    expected = make_image(other)
    pipe.fallback = other
    with stagehand.pipeline(pipe, vram_budget="400KB"):
        assert other.device.type == "cpu"
        assert_bitwise_equal(make_image(other), expected, "on the host")


def test_a_copy_of_a_streamed_pipeline_is_one_like_others(sim):
    pipe = diffusion_pipeline()
    with stagehand.pipeline(pipe, vram_budget="400KB"):
        expected, other = make_image(pipe), deepcopy(pipe)
    with stagehand.pipeline(other, vram_budget="400KB"):
        assert_bitwise_equal(make_image(other), expected, "image")
    assert type(other) is type(pipe)
    assert other.device.type == "cpu"


def test_a_copy_of_a_streamed_pipeline_is_where_its_models_are(sim):
    """One with models of its own said that it was on the device, and failed."""
    pipe = Asking(**diffusion_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    on_host = make_image(pipe)
    with stagehand.pipeline(pipe, vram_budget="400KB", device="hpu"):
        expected = make_image(pipe)
        alone, sharing = deepcopy(pipe), copy(pipe)
        assert alone.device == alone._execution_device == torch.device("cpu")
        assert_bitwise_equal(make_image(alone), on_host, "on the host")
        alone.to("hpu")
        assert_bitwise_equal(make_image(alone), expected, "resident")
        assert alone.device.type == alone._execution_device.type == "hpu"
        assert sharing.device.type == sharing._execution_device.type == "hpu"
        assert_bitwise_equal(make_image(sharing), expected, "with the same models")
    assert sharing.device == torch.device("cpu")


def test_a_shutdown_that_failed_can_be_repeated(sim):
    models = {"a": stack(4), "b": stack(6)}
    streamed = stagehand.pipeline(models, vram_budget=5 * LAYER_BYTES)
    block = streamed.runtimes["b"].block_ids[0]
    streamed.runtimes["b"].before_block(block)
    with pytest.raises(stagehand.ConfigError, match="in use"):
        streamed.shutdown()
    streamed.runtimes["b"].after_block(block)
    streamed.shutdown()
    assert not any(hasattr(m, "_stagehand_layer_runtime") for m in models.values())


def test_a_streamed_diffusers_pipeline_can_be_saved(sim, tmp_path):
    pipe = diffusion_pipeline()
    expected = make_image(pipe)
    with stagehand.pipeline(pipe, vram_budget="1MB", device="cpu"):
        pipe.save_pretrained(tmp_path)
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    aligned(again.unet)
    assert_bitwise_equal(make_image(again), expected, "image")


# The example


@places
@pytest.mark.parametrize("budget", ["1MB", "3MB", "20MB"])
def test_the_four_pass_example_keeps_its_budget(
    sim, monkeypatch, capsys, place, budget
):
    file = Path(__file__).parents[2] / "examples" / "four_pass_pipeline.py"
    monkeypatch.setattr("sys.argv", [str(file), "--device", place, "--budget", budget])
    runpy.run_path(str(file), run_name="__main__")  # it exits if it cannot
    assert "reserved, PRIMARY" in capsys.readouterr().out
