"""Modules and parameters of every kind stream bit for bit, in layer and block mode."""

import io
from copy import deepcopy

import accelerate
import diffusers
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.modular_pipelines.components_manager import custom_offload_with_hook
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import distribute_module
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import stagehand
from architectures.trees import assert_bitwise_equal
from scenario.small import (
    LAYER_BYTES,
    WIDTH,
    assert_passes_equal,
    batch,
    run_resident,
    runtime_of,
    smallest_budget,
    values,
)
from stagehand.errors import ConfigError
from stagehand.units import format_bytes
from streamed import Shape


@pytest.fixture(params=["hpu", "cpu"])
def place(request, sim):
    return request.param


@pytest.fixture(params=["layer", "block"])
def mode(request):
    return request.param


def seeded(build):
    """Build a model with the same weights at every call."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        return build()


def stream(model, place, mode, pattern=r"^\d+$", **options):
    """Stream a model under a budget that cannot hold all of it."""
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if mode == "block":
        mib = max(size * 0.6, _smallest_of_blocks(model, place, pattern)) / 2**20
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=mib, vram_low_watermark_mb=mib / 2
        )
        return stagehand.StagehandRuntime(model, config, pattern, device=place)
    least = smallest_budget(model, place, **options)
    budget = max(least, int(size * 0.6))
    stagehand.layer(model, vram_budget=budget, device=place, **options)
    return runtime_of(model)


def _smallest_of_blocks(model, place, pattern):
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=1e-5, vram_low_watermark_mb=1e-6
    )
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.StagehandRuntime(model, config, pattern, device=place)
    return error.value.needed_bytes


def check(
    build, place, mode, *args, train=False, pattern=r"^\d+$", passes=4, **options
):
    """Run a streamed and a resident model side by side, then compare all they hold."""
    model = seeded(build).train(train)
    plain = deepcopy(model).to(place)
    runtime = stream(model, place, mode, pattern, **options)
    budget = runtime.report().budget_bytes
    inputs = [a.to(place) for a in args]
    with torch.no_grad():
        for number in range(passes):
            expected = plain(*inputs)
            assert_bitwise_equal(model(*args), expected, f"pass {number}")
            assert_bitwise_equal(values(model), values(plain), f"after pass {number}")
    assert runtime.report().peak_device_bytes <= budget
    runtime.shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")
    return model


def repeated(block, count=4):
    return lambda: nn.Sequential(*(block() for _ in range(count)))


def lin():
    return nn.Linear(WIDTH, WIDTH)


# Sharing


class Tied(nn.Module):
    """The embedding's table is the head's weight, and two layers share theirs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList([lin() for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def test_tied_weights_are_one_tensor_before_during_and_after(place, mode):
    ids = torch.arange(12).view(2, 6)
    model = check(Tied, place, mode, ids, pattern=r"^layers\.\d+$")
    assert model.head.weight is model.embed.weight
    assert model.layers[3].weight is model.layers[0].weight


class Repeating(nn.Module):
    """Uses a layer twice in a pass, once inside itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([lin() for _ in range(5)])

    def forward(self, x):
        for number in (0, 1, 0, 2, 2, 3, 1, 4, 0):
            x = self.layers[number](x).tanh()
        return x


def test_modules_used_several_times_in_a_pass_are_exact(place, mode):
    check(Repeating, place, mode, batch(), pattern=r"^layers\.\d+$")


class Recursive(nn.Module):
    """A block that calls itself, with a child of its own at each depth."""

    def __init__(self):
        super().__init__()
        self.own = lin()
        self.children_ = nn.ModuleList([lin() for _ in range(3)])

    def forward(self, x, depth=0):
        x = self.own(x).tanh()
        if depth < 3:
            x = self.children_[depth](x) + self(x, depth + 1)
        return self.own(x)


def test_a_block_that_calls_itself_is_exact(place, mode):
    check(repeated(Recursive, 3), place, mode, batch())


def test_parameters_that_are_slices_of_one_storage_stay_slices_of_one(place, mode):
    def build():
        model = repeated(lin)()
        for layer in model:
            whole = torch.randn(WIDTH + 1, WIDTH)
            layer.weight = nn.Parameter(whole[:WIDTH])
            layer.bias = nn.Parameter(whole[WIDTH])
        return model

    check(build, place, mode, batch())


class Overlapping(nn.Module):
    """Two parameters over the same bytes: an edit of one is an edit of the other."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(WIDTH, WIDTH)
        self.all = nn.Parameter(whole)
        self.first = nn.Parameter(whole.view(-1)[: WIDTH * 4].view(4, WIDTH))

    def forward(self, x):
        self.first.add_(0.125)
        return (x @ self.all).tanh() + self.first.sum(0)


def test_parameters_over_the_same_bytes_stay_so_on_the_device(place):
    model = repeated(Overlapping)()
    plain = deepcopy(model)
    for mine, theirs in zip(plain, model, strict=True):
        mine.all.data = theirs.all.data.clone()  # a deep copy does not keep the sharing
        mine.first.data = mine.all.data.view(-1)[: WIDTH * 4].view(4, WIDTH)
    stream(model, place, "layer")
    with torch.no_grad():
        for number in range(3):
            expected = plain(batch())
            given = model(batch())
            if place == "cpu":
                assert_bitwise_equal(given, expected, f"pass {number}")
            assert_bitwise_equal(values(model), values(plain), f"pass {number}")
    runtime_of(model).shutdown()
    assert_bitwise_equal(values(model), values(plain), "after shutdown")
    assert model[0].first.data_ptr() == model[0].all.data_ptr()


# Forms


def odd_forms(number):
    def reform(parameter):
        data = parameter.data
        return {
            "transposed": lambda: data.t().contiguous().t(),
            "strided": lambda: torch.randn(WIDTH, 2 * WIDTH)[:, ::2],
            "offset": lambda: torch.randn(WIDTH * WIDTH + 3)[3:].view(WIDTH, WIDTH),
            "expanded": lambda: torch.randn(1, WIDTH).expand(WIDTH, WIDTH),
            "part": lambda: torch.randn(2 * WIDTH, 3 * WIDTH)[
                1 : WIDTH + 1, 5 : WIDTH + 5
            ],
        }[number]()

    def build():
        model = repeated(lin, 5)()
        for layer in model:
            layer.weight = nn.Parameter(reform(layer.weight))
        return model

    return build


@pytest.mark.parametrize(
    "form", ["transposed", "strided", "offset", "expanded", "part"]
)
def test_weights_of_odd_strides_are_exact(place, mode, form):
    check(odd_forms(form), place, mode, batch())


def test_channels_last_weights_stay_channels_last(place, mode):
    def build():
        conv = repeated(lambda: nn.Conv2d(8, 8, 3, padding=1), 5)()
        return conv.to(memory_format=torch.channels_last)

    x = batch(2, 8, 6, 6).to(memory_format=torch.channels_last)
    model = check(build, place, mode, x)
    for layer in model:
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)


CONVOLUTIONS = [
    (lambda: nn.Conv2d(8, 8, 3, padding=1), (2, 8, 6, 6), torch.channels_last),
    (lambda: nn.Conv3d(8, 8, 3, padding=1), (1, 8, 4, 4, 4), torch.channels_last_3d),
]


@pytest.mark.parametrize(("conv", "shape", "form"), CONVOLUTIONS, ids=["2d", "3d"])
def test_another_memory_format_is_refused_and_the_same_one_is_not(
    place, mode, conv, shape, form
):
    """The request was passed over in silence, and results had other last bits."""
    x = batch(*shape)
    for before, other in [
        (torch.contiguous_format, form),
        (form, torch.contiguous_format),
    ]:
        model = seeded(repeated(conv)).to(memory_format=before)
        expected = run_resident(model, place, x)
        runtime = stream(model, place, mode)
        model.to(memory_format=before).to(place, memory_format=before)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"memory format.*shutdown\(\)"):
                model.to(memory_format=other)
            assert_passes_equal(model, expected, x)
        runtime.shutdown()
        assert model[0].weight.is_contiguous(memory_format=before)


def test_a_memory_format_that_makes_no_difference_is_not_refused(place, mode):
    """As of convolutions of one element, or of one channel in a group."""
    for conv in (nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), lin()):
        model = nn.Sequential(conv, nn.Identity())
        runtime = stream(model, place, mode, pattern=r"^0$")
        model.to(memory_format=torch.channels_last)
        runtime.shutdown()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Conv1d, (2, 8, 9)),
        (nn.Conv2d, (2, 8, 6, 6)),
        (nn.Conv3d, (1, 8, 4, 4, 4)),
        (nn.ConvTranspose1d, (2, 8, 9)),
        (nn.ConvTranspose2d, (2, 8, 5, 5)),
        (nn.ConvTranspose3d, (1, 8, 3, 3, 3)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_convolutions_of_every_kind_stream(place, mode, kind, shape):
    check(repeated(lambda: kind(8, 8, 3, padding=1)), place, mode, batch(*shape))


class Mixed(nn.Module):
    """One block with parameters of many element types, empty ones and scalars."""

    DTYPES = (
        torch.bool, torch.int8, torch.uint8, torch.int64, torch.float16,
        torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.linear = lin()
        for dtype in self.DTYPES:
            values = (torch.randn(7, 5) * 3).to(dtype)
            name = str(dtype).removeprefix("torch.")
            setattr(self, f"a_{name}", nn.Parameter(values, requires_grad=False))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x):
        x = self.linear(x).tanh() * self.scale + self.count + self.empty.sum()
        for dtype in self.DTYPES:
            value = getattr(self, "a_" + str(dtype).removeprefix("torch."))
            value = value.real if value.is_complex() else value
            x = x + value.to(torch.float32).mean()
        return x


def test_parameters_of_every_element_type_cross_unchanged(place, mode):
    check(repeated(Mixed), place, mode, batch())


def test_a_state_dict_of_every_element_type_can_be_saved(place, mode):
    """What is empty began where its neighbour of another element type does."""
    model = seeded(repeated(Mixed))
    expected = values(model)
    runtime = stream(model, place, mode)
    for _ in range(2):
        with torch.no_grad():
            model(batch())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert_bitwise_equal(torch.load(file), expected, "saved")
    runtime.shutdown()


def test_models_of_empty_and_scalar_parameters_only_run(place):
    class Scalars(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(2.0))
            self.b = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return x * self.a + self.b.sum()

    check(repeated(Scalars), place, "layer", batch())


def test_a_model_without_parameters_runs(place):
    model = stagehand.layer(nn.Sequential(nn.ReLU(), nn.Tanh()), device=place)
    with torch.no_grad():
        assert_bitwise_equal(
            model(batch()),
            run_resident(nn.Sequential(*model), place, batch()),
            "output",
        )
    assert "blocks" in str(runtime_of(model).report())
    runtime_of(model).shutdown()


class ScaledTable(nn.Embedding):
    """Scales the rows that it looks up by a parameter of its own."""

    def __init__(self):
        super().__init__(16 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_table_with_a_second_parameter_streams_in_the_smallest_budget(place, mode):
    def build():
        return nn.Sequential(ScaledTable(), lin(), nn.Tanh(), lin())

    check(build, place, mode, torch.arange(0, 16 * WIDTH, 40))


# Parts of TorchScript


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x * self.scale


def scripted(module, *example):
    return torch.jit.trace(module, example) if example else torch.jit.script(module)


def test_scripted_parts_without_weights_run_between_and_inside_blocks(place, mode):
    def block():
        return nn.Sequential(lin(), scripted(nn.Tanh()), scripted(Scaled()))

    def build():
        return nn.Sequential(
            scripted(Scaled()), *repeated(block)(), scripted(nn.Tanh())
        )

    check(build, place, mode, batch(), pattern=r"^[1-4]$")


def test_scripted_parts_with_weights_stream_inside_of_a_block(place, mode):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            inner = nn.Sequential(lin(), nn.Tanh(), lin())
            self.inner = scripted(inner.requires_grad_(False))

        def forward(self, x):
            return self.inner(x)

    check(repeated(Around), place, mode, batch(), opaque=[Around])


@pytest.mark.parametrize("budget", [4 * LAYER_BYTES, "1GB"])
def test_scripted_parts_with_weights_are_refused_by_name_before_anything_is_done(
    place, budget
):
    """torch's own error came where half of the hooks were installed."""
    inner = scripted(lin(), batch()), scripted(nn.Sequential(lin(), lin()))
    for part, name in zip(inner, ("0.1", "0.1.0"), strict=True):
        model = nn.Sequential(nn.Sequential(lin(), part), lin())
        before = Shape.of(model)
        with pytest.raises(ConfigError, match=f"module '{name}' with weights"):
            stagehand.layer(model, vram_budget=budget, device=place)
        with pytest.raises(ConfigError, match=r"module '0\.1' with weights"):
            stagehand.StagehandRuntime(model, block_pattern=r"\.1$", device=place)
        with pytest.raises(ConfigError, match="of TorchScript"):
            stagehand.layer(part, vram_budget=budget, device=place)
        assert Shape.of(model) == before


# Models whose weights are kept elsewhere


def kept(model, folder, how):
    """Let `accelerate` bring a model's weights when they are used."""
    if how == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if how == "disk":
        return accelerate.disk_offload(model, folder, execution_device="cpu")
    places = {"0": "cpu", "1": "disk", "2": "cpu"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=folder
    )


@pytest.mark.parametrize("how", ["cpu", "disk", "some"])
def test_model_whose_hooks_keep_its_weights_is_refused_with_what_takes_them_off(
    place, mode, how, tmp_path
):
    def build():
        return seeded(lambda: nn.Sequential(*(nn.Sequential(lin()) for _ in range(3))))

    model = kept(build(), tmp_path, how)
    before = Shape.of(model)
    away = {"cpu": r"0\.0", "disk": r"0\.0", "some": r"1\.0"}[how]
    expected = f"accelerate keep '{away}\\.weight' elsewhere.*remove_hook_from_module"
    with pytest.raises(ConfigError, match=expected):
        stream(model, place, mode)
    assert Shape.of(model) == before
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    runtime = stream(model, place, mode)
    expected = run_resident(build(), place, batch())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


@pytest.mark.parametrize("among_others", [False, True])
def test_model_that_hooks_move_as_a_whole_is_refused(place, mode, among_others):
    """They look at all weights for their device: that took room for a large table."""

    def build():
        return seeded(lambda: nn.Sequential(*(nn.Sequential(lin()) for _ in range(3))))

    expected = run_resident(build(), place, batch())
    model, _hook = accelerate.cpu_offload_with_hook(build(), place)
    if among_others:
        hook = accelerate.hooks.AlignDevicesHook(io_same_device=True)
        accelerate.hooks.add_hook_to_module(model, hook, append=True)
    before = Shape.of(model)
    with pytest.raises(ConfigError, match=r"move all of it .*enable_model_cpu_offload"):
        stream(model, place, mode)
    assert Shape.of(model) == before
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    runtime = stream(model, place, mode)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


def test_model_that_a_components_manager_moves_is_refused(place, mode):
    """Each call asked it where it is, so that weights stayed for which was no room."""
    model = seeded(lambda: nn.Sequential(lin(), lin(), lin()))
    expected = run_resident(deepcopy(model), place, batch())
    hook = custom_offload_with_hook("model", model, place)
    before = Shape.of(model)
    with pytest.raises(ConfigError, match=r"move all of it .*disable_auto_cpu_offload"):
        stream(model, place, mode)
    assert Shape.of(model) == before
    hook.remove()
    runtime = stream(model, place, mode)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


@pytest.mark.parametrize("how", ["leaf_level", "block_level"])
def test_model_that_diffusers_offloads_in_groups_is_refused(place, mode, how):
    """It ran: twice the bytes crossed, and groups took memory beside the budget."""

    def build():
        return seeded(lambda: nn.Sequential(*(nn.Sequential(lin()) for _ in range(3))))

    expected, model = run_resident(build(), place, batch()), build()
    device, home = torch.device(place), torch.device("cpu")
    apply_group_offloading(model, device, home, how, num_blocks_per_group=1)
    before = Shape.of(model)
    with pytest.raises(ConfigError, match=r"diffusers move the weights of.*'0\.0'"):
        stream(model, place, mode)
    assert Shape.of(model) == before
    registry = diffusers.HookRegistry.check_if_exists_or_initialize(model)
    registry.remove_hook("group_offloading")
    runtime = stream(model, place, mode)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("how", ["cpu", "disk", "device"])
def test_model_that_hooks_take_over_while_it_streams_says_so_and_loses_nothing(
    place, mode, how, runs, tmp_path
):
    """It ran, from then on without a budget, and was left on the meta device."""
    if (how, place) == ("device", "cpu"):
        pytest.skip("there such hooks move nothing")

    def build():
        return seeded(lambda: nn.Sequential(*(nn.Sequential(lin()) for _ in range(3))))

    expected = run_resident(build(), place, batch())
    model = build()
    runtime = stream(model, place, mode)
    with torch.no_grad():
        if runs:
            model(batch())
        if how == "device":
            accelerate.dispatch_model(model, {"": place}, force_hooks=True)
        else:
            kept(model, tmp_path, how)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"'0\.0\.weight' of .*shutdown\(\)"):
                model(batch())
    runtime.shutdown()
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    runtime = stream(model, place, mode)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()
    assert_bitwise_equal(model.to("cpu").state_dict(), build().state_dict(), "weights")


def test_hooks_that_leave_weights_where_they_are_do_not_matter(sim):
    """Nor is what joins a model with new hooks, or is made anew by old ones."""
    model = seeded(lambda: nn.Sequential(*(nn.Sequential(lin()) for _ in range(3))))
    hook = accelerate.hooks.AlignDevicesHook(io_same_device=True)
    accelerate.hooks.add_hook_to_module(model[1][0], hook)
    runtime = stream(model, "hpu", "layers")
    accelerate.hooks.add_hook_to_module(
        model, accelerate.hooks.AlignDevicesHook(io_same_device=True)
    )
    model[1][0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    model[2].append(nn.Linear(WIDTH, WIDTH))
    runtime.set_budget("1MB")
    expected = run_resident(model, "hpu", batch())
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), expected, "output")
    runtime.shutdown()


# Weights that are no plain memory


class Coded(torch.Tensor):
    """INT8 codes and a scale a row, as quantized weights of other libraries are."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Coded(**parts)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        if func is torch.ops.aten._to_copy.default:
            place = kwargs["device"]
            return cls(args[0].codes.to(place), args[0].scales.to(place))
        plain = (a.codes * a.scales if isinstance(a, cls) else a for a in args)
        return func(*plain, **(kwargs or {}))


def coded():
    """Four layers, of which two have such weights."""
    model = seeded(repeated(lin))
    for layer in model[:2]:
        weight = layer.weight.detach()
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        layer.weight = nn.Parameter(Coded(codes, scales), requires_grad=False)
    return model


def test_weights_that_are_made_of_several_tensors_stay_on_the_device_whole(place, mode):
    """Only what is seen of them went there, and torch complained of the rest."""
    model = coded()
    with torch.no_grad():
        expected = coded().to(place)(batch().to(place))
        runtime = stream(model, place, mode)
        for _ in range(2):
            assert_bitwise_equal(model(batch()), expected, "output")
        assert model[0].weight.codes.device.type == place
    runtime.shutdown()
    assert model[0].weight.codes.device.type == model[0].weight.device.type == "cpu"
    with torch.no_grad():
        model(batch())


def test_error_says_what_stays_because_it_is_no_plain_memory(place):
    there = 2 * (WIDTH * WIDTH + 4 * WIDTH)
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.layer(coded(), vram_budget=there, device=place)
    assert f"{format_bytes(there)} are in 2 tensors that are no pl" in str(error.value)
    assert "('0.weight', a Coded, is the first)" in str(error.value)
    assert error.value.needed_bytes < there + 2 * LAYER_BYTES


class Tagged(nn.Parameter):
    """Plain memory under a tag, which all that comes of it has, too."""

    def __new__(cls, data, tag=None):
        if tag is None:  # as where it comes of several tensors
            raise ValueError("a tensor of this kind has a tag")
        made = torch.Tensor._make_subclass(cls, data, False)
        made.tag = tag
        return made

    def __deepcopy__(self, memo):
        return Tagged(self.data.clone(), self.tag)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        tag = next((a.tag for a in args if isinstance(a, Tagged)), None)
        return cls(result, tag) if isinstance(result, torch.Tensor) else result


class TaggedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Tagged((lin().weight.detach() * 100).char(), tag=100.0)

    def forward(self, x):
        plain = torch.Tensor._make_subclass(torch.Tensor, self.weight, False)
        return x @ (plain / self.weight.tag).t()


def test_weights_that_only_keep_a_tag_stream(place, mode):
    """All of them stayed on the device."""
    model = check(repeated(TaggedLinear), place, mode, batch())
    assert {(type(layer.weight), layer.weight.tag) for layer in model} == {
        (Tagged, 100.0)
    }
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.layer(model, vram_budget=256, device=place)
    assert error.value.needed_bytes <= 2 * WIDTH * WIDTH


# Quantized weights that keep tensors as attributes


class State:
    """What a weight was quantized with; codes are the same for all."""

    codes = torch.linspace(-1, 1, 256)

    def __init__(self, scales):
        self.scales, self.more = scales, {"codes": [State.codes]}


class Quantized(nn.Parameter):
    """Is quantized as it is moved, and keeps the scales beside its elements."""

    state = None

    def __new__(cls, data, state=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    def __deepcopy__(self, memo):
        return Quantized(deepcopy(self.data, memo), deepcopy(self.state, memo))

    def to(self, *args, **kwargs):
        state = self.state
        if state is None:
            scales = self.data.abs().amax(dim=1, keepdim=True)
            near = (self.data / scales)[..., None] - State.codes
            return Quantized(near.abs().argmin(-1).byte(), State(scales)).to(*args)
        there = Quantized(super().to(*args, **kwargs), State(state.scales.to(*args)))
        there.state.more = {"codes": [state.more["codes"][0].to(*args)]}
        return there


class Dequantize(torch.autograd.Function):
    """Has its weight for backward as it is, not as a saved tensor."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ module.whole().t()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return grad @ ctx.module.whole(), None


class QuantizedLinear(nn.Module):
    def __init__(self, quantize=True):
        super().__init__()
        self.weight = Quantized(lin().weight.detach())
        if quantize:
            self.weight = self.weight.to("cpu")

    def whole(self):
        state = self.weight.state
        return state.more["codes"][0][self.weight.int()] * state.scales

    def forward(self, x):
        return Dequantize.apply(x, self)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = QuantizedLinear(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return (self.base(x) + self.adapter(x)).tanh()


def moved_as_their_class_does(model, place):
    """Let nothing be left behind: `model.to()` assigns what it has moved to `.data`."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.weight = module.weight.to(place)
    return model.to(place)


def states(model):
    return [
        tensor.device.type
        for weight in model.parameters()
        if isinstance(weight, Quantized)
        for tensor in (weight.state.scales, weight.state.more["codes"][0])
    ]


def test_what_quantized_weights_keep_as_attributes_is_where_they_are(place, mode):
    """It stayed on the host, and their forward raised of two devices."""
    plain = moved_as_their_class_does(seeded(repeated(QuantizedLinear)), place)
    model = seeded(repeated(QuantizedLinear))
    with torch.no_grad():
        expected = plain(batch().to(place))
        runtime = stream(model, place, mode)
        for _ in range(3):
            assert_bitwise_equal(model(batch()), expected, "output")
            assert set(states(model)) == {place}
        report = runtime.report()
        assert report.peak_device_bytes <= report.budget_bytes
        copied = deepcopy(model)
        runtime.park()
        assert set(states(model)) == {"cpu"}
        assert_bitwise_equal(model(batch()), expected, "output after parking")
    runtime.shutdown()
    assert set(states(model)) == set(states(copied)) == {"cpu"}


def test_adapters_of_quantized_weights_train_as_resident_ones_do(place, mode):
    plain = moved_as_their_class_does(seeded(repeated(Adapted)), place)
    model = seeded(repeated(Adapted))
    runtime = stream(model, place, mode)
    for _ in range(2):
        for each, x in ((plain, batch().to(place)), (model, batch())):
            each(x).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found = [(p.grad.cpu(), q.grad.cpu()) for p, q in pairs if q.grad is not None]
    assert len(found) == 4
    assert_bitwise_equal(*map(list, zip(*found, strict=True)), "gradients")
    runtime.shutdown()


def test_what_several_models_and_their_library_share_stays_where_it_is(place, mode):
    """One model took the table of all to the device, and home in another's pass."""
    table = State.codes
    with torch.no_grad():
        model, other = (seeded(repeated(QuantizedLinear)) for _ in range(2))
        expected = moved_as_their_class_does(deepcopy(model), place)(batch().to(place))
        runtime, second = stream(model, place, mode), stream(other, place, mode)
        for each in (model, other, model):
            assert_bitwise_equal(each(batch()), expected, "output")
            assert State.codes is table
            assert table.device.type == "cpu"
        runtime.shutdown()
        assert_bitwise_equal(other(batch()), expected, "output of the other")
    second.shutdown()


def test_error_says_that_what_stays_is_no_parameter(place):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("packed", torch.ones(WIDTH, WIDTH))

    model = nn.Sequential(lin(), Buffered(), Buffered())
    with pytest.raises(stagehand.StagehandOOMError) as error:
        stagehand.layer(model, vram_budget=1024, device=place)
    there = format_bytes(2 * 4 * WIDTH * WIDTH)
    assert f"{there} are in 2 tensors that are no parameters" in str(error.value)
    assert "('1.packed' is the largest)" in str(error.value)


def test_weights_that_are_quantized_only_as_they_move_are_refused(place, mode):
    """They streamed as they were, and their forward failed."""
    model = seeded(repeated(lambda: QuantizedLinear(quantize=False)))
    before = Shape.of(model)
    with pytest.raises(ConfigError, match=r"'0.weight' is a Quantized of .*float32"):
        stream(model, place, mode)
    assert Shape.of(model) == before


@pytest.mark.parametrize("copied", [False, True])
def test_weights_whose_elements_an_attribute_has_as_well_are_refused(
    place, mode, copied
):
    """As a copy, too: 8-bit layers of bitsandbytes leave one on the device that they
    come back from.
    """
    model = seeded(repeated(QuantizedLinear))
    elements = model[1].weight.data
    model[1].weight.state.whole = elements.to(place, copy=True) if copied else elements
    with pytest.raises(ConfigError, match=r"'1.weight.state.whole' has as\s+well"):
        stream(model, place, mode)
    assert set(states(model)) == {"cpu"}


def test_quantized_layers_join_and_leave_with_what_they_keep(sim, mode):
    model, joins = seeded(repeated(QuantizedLinear)), seeded(QuantizedLinear)
    plain = moved_as_their_class_does(deepcopy(model).append(deepcopy(joins)), "hpu")
    runtime = stream(model, "hpu", mode)
    runtime.set_budget("1MB")
    with torch.no_grad():
        expected = plain(batch().to("hpu"))
        model(batch())
        model.append(joins)
        assert_bitwise_equal(model(batch()), expected, "output")
        del model[-1]
        assert_bitwise_equal(model(batch()), plain[:-1](batch().to("hpu")), "after")
        assert set(states(joins)) == {"cpu"}
        model.append(QuantizedLinear(quantize=False))
        with pytest.raises(ConfigError, match="a Quantized of"):
            model(batch())
        del model[-1]
        model(batch())
    runtime.shutdown()
    assert set(states(model)) == {"cpu"}


class Stating(nn.Module):
    """A module that keeps scales by itself, and loads them as it likes."""

    def __init__(self):
        super().__init__()
        weight = lin().weight.detach()
        self.codes = nn.Parameter((weight * 100).char(), requires_grad=False)
        self.meta = {"scale": weight.abs().amax(dim=1, keepdim=True) / 100}

    def to(self, *_, **__):
        return self  # there is another way, which nobody knows

    def there(self, place):
        self.codes = nn.Parameter(self.codes.to(place), requires_grad=False)
        self.meta = {"scale": self.meta["scale"].to(place)}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.meta["scale"].detach()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.meta = {"scale": state_dict[f"{prefix}scale"]}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x):
        return x @ (self.codes * self.meta["scale"]).t()


def test_what_modules_keep_for_their_weights_is_where_these_are(place, mode):
    model, plain = (seeded(repeated(Stating)) for _ in range(2))
    for module in plain:
        module.there(place)
    with torch.no_grad():
        expected = plain(batch().to(place))
        runtime = stream(model, place, mode)
        assert_bitwise_equal(model(batch()), expected, "output")
        saved = {k: 2 * t.cpu() for k, t in model.state_dict().items()}
        model.load_state_dict(saved, strict=False)
        for module in plain:
            module.codes.mul_(2)
            module.meta["scale"].mul_(2)
        expected = plain(batch().to(place))
        for _ in range(2):
            assert_bitwise_equal(model(batch()), expected, "output of what was loaded")
        assert not runtime.report().budget_bytes < runtime.report().peak_device_bytes
    runtime.shutdown()
    assert {module.meta["scale"].device.type for module in model} == {"cpu"}


def test_model_whose_packed_weights_become_plain_in_a_forward_is_refused(place, mode):
    """All of them were on the device then, whatever the budget."""
    model = repeated(lin)()
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="a hook of compressed-tensors makes plain"):
        stream(model, place, mode)
    model.ct_decompress_hook.remove()
    del model.ct_decompress_hook
    stream(model, place, mode).shutdown()


# Models that are divided between processes


@pytest.fixture
def group(tmp_path):
    """One process, which is all of its group."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(model, how, mesh):
    if how == "FSDP2":
        return fully_shard(model, mesh=mesh)
    if how == "FSDP":
        whole, host = ShardingStrategy.NO_SHARD, torch.device("cpu")
        return FullyShardedDataParallel(model, None, whole, device_id=host)
    return distribute_module(model, mesh)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["FSDP2", "FSDP", "DTensor"])
def test_weights_that_are_divided_between_processes_are_refused(
    place, mode, how, group
):
    """All of them stayed on the device, and torch complained of another one there."""
    model = sharded(repeated(lin)(), how, group)
    before = Shape.of(model)
    with pytest.raises(
        ConfigError, match=f"cannot be streamed: .*{how[:4]}.*processes"
    ):
        stream(model, place, mode)
    assert Shape.of(model) == before


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["FSDP2", "FSDP", "DTensor"])
def test_model_that_is_divided_between_processes_while_it_streams_says_so(
    place, mode, how, group
):
    model = repeated(lin)()
    runtime = stream(model, place, mode)
    other = sharded(model, how, group)
    with torch.no_grad(), pytest.raises(ConfigError, match="between processes"):
        other(batch())
    runtime.shutdown()


# Buffers and modules with a state


def test_running_statistics_learned_while_streaming_are_kept(place, mode):
    def block():
        return nn.Sequential(lin(), nn.BatchNorm1d(WIDTH))

    model = check(repeated(block), place, mode, batch(), train=True)
    assert int(model[0][1].num_batches_tracked) == 4


class Growing(nn.Module):
    """Replaces one buffer and edits another in every pass, and adds a third."""

    def __init__(self):
        super().__init__()
        self.linear = lin()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        x = self.linear(x)
        self.seen += 1
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.hidden.data.mul_(0.5)
        return x + self.mean * self.hidden


def test_buffers_that_are_replaced_or_edited_in_a_pass_keep_their_values(place, mode):
    check(repeated(Growing), place, mode, batch())


def test_an_embedding_that_renormalizes_its_rows_keeps_them(place, mode):
    class Renormalizing(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, WIDTH, max_norm=1.0)
            self.linear = lin()

        def forward(self, x, ids):
            return self.linear(x) + self.table(ids)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Renormalizing() for _ in range(4)])

        def forward(self, x, ids):
            for layer in self.layers:
                x = layer(x, ids)
            return x

    ids = torch.tensor([3, 4, 3, 29])
    check(Model, place, mode, batch(), ids, pattern=r"^layers\.\d+$")


@pytest.mark.parametrize("mode_", ["sum", "mean", "max"])
def test_an_embedding_bag_is_exact(place, mode_):
    def build():
        bag = nn.EmbeddingBag(100, WIDTH, mode=mode_)
        return nn.Sequential(bag, lin(), lin(), lin())

    check(build, place, "layer", torch.arange(12).view(3, 4))


def test_a_large_embedding_sends_rows_and_not_its_table(sim):
    model = nn.Sequential(nn.Embedding(4000, WIDTH), lin(), lin(), lin())
    ids = torch.tensor([[7, 8, 3999]])
    expected = run_resident(model, "hpu", ids)
    stagehand.layer(model, vram_budget=20_000, device="hpu")
    sim.reset()
    with torch.no_grad():
        assert_bitwise_equal(model(ids), expected, "rows")
    assert sim.h2d_bytes() < 40_000
    assert runtime_of(model).report().gathered_bytes == 4000 * WIDTH * 4
    runtime_of(model).shutdown()


@pytest.mark.parametrize("wrap", [spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_spectral_norm_is_exact_and_its_iteration_goes_on(place, mode, wrap, train):
    check(repeated(lambda: wrap(lin())), place, mode, batch(), train=train)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", [weight_norm, parametrizations.weight_norm])
def test_weight_norm_is_exact(place, mode, wrap):
    check(repeated(lambda: wrap(lin())), place, mode, batch())


def test_a_parametrized_weight_is_exact(place, mode):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).t()

    def build():
        layer = lin()
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    check(repeated(build), place, mode, batch())


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x):
        return self.cell(x)[0][..., :WIDTH]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_recurrent_networks_stream(place, mode, kind, options):
    check(repeated(lambda: Recurrent(kind, **options)), place, mode, batch(2, 5, WIDTH))


# Modules that read what is not theirs


@pytest.fixture
def same_kernels():
    """Without the fused kernel that attention takes only while nobody hooks into it."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0] + x


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_multihead_attention_whose_projection_is_never_called_is_exact(
    place, mode, train, same_kernels
):
    check(repeated(Attention), place, mode, batch(2, 5, WIDTH), train=train)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_transformer_encoder_layers_are_exact(place, mode, train, same_kernels):
    def block():
        return nn.TransformerEncoderLayer(
            WIDTH, 4, dim_feedforward=64, batch_first=True, dropout=0.0
        )

    check(repeated(block), place, mode, batch(2, 5, WIDTH), train=train)


class Reading(nn.Module):
    """Reads its children's weights and never calls them."""

    def __init__(self):
        super().__init__()
        self.inner = lin()
        self.deep = nn.Sequential(lin())

    def forward(self, x):
        x = nn.functional.linear(x, self.inner.weight, self.inner.bias)
        return x.tanh() @ torch.cat([self.deep[0].weight.t()], 0)


def test_weights_read_by_another_module_are_found_in_the_first_pass(place, mode):
    def build():
        return nn.Sequential(Reading(), *(lin() for _ in range(9)))

    check(build, place, mode, batch())


@pytest.mark.filterwarnings("ignore:.*opaque=:stagehand.StagehandWarning")
def test_more_weights_read_by_other_modules_than_fit_stream_all_the_same(place):
    model = seeded(repeated(Reading, 3))
    size = sum(p.nbytes for p in model.parameters())
    expected = run_resident(model, place, batch())
    stagehand.layer(model, vram_budget=size // 2, device=place)
    with torch.no_grad():
        for number in range(3):
            assert_bitwise_equal(model(batch()), expected, f"pass {number}")
    runtime_of(model).shutdown()


class Pairs(nn.Module):
    """Its layers are lists and dicts of modules, which are never called themselves."""

    def __init__(self):
        super().__init__()
        self.lists = nn.ModuleList(nn.ModuleList([lin(), lin()]) for _ in range(4))
        self.dicts = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": lin(), "down": lin()})
            for _ in range(4)
        )

    def forward(self, x):
        for first, second in self.lists:
            x = x + second(first(x).tanh())
        for layer in self.dicts:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())
        return x


def test_blocks_that_are_lists_or_dicts_of_layers_stream_in_the_smallest_budget(place):
    model = seeded(Pairs)
    plain, pattern = deepcopy(model).to(place), r"s\.\d+$"
    mib = _smallest_of_blocks(model, place, pattern) / 2**20
    config = stagehand.StagehandConfig(
        vram_high_watermark_mb=mib, vram_low_watermark_mb=mib / 2
    )
    runtime = stagehand.StagehandRuntime(model, config, pattern, device=place)
    with torch.no_grad():
        assert_bitwise_equal(model(batch()), plain(batch().to(place)), "inference")
    for number in range(2):
        model(batch()).square().sum().backward()
        plain(batch().to(place)).square().sum().backward()
        gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
        assert_bitwise_equal(*gradients, f"gradients {number}")
    assert runtime.report().peak_device_bytes <= runtime.report().budget_bytes
    runtime.shutdown()


def test_an_opaque_module_that_reads_its_childrens_weights_streams(place):
    model = seeded(repeated(Reading, 6))
    expected = run_resident(model, place, batch())
    size = sum(p.nbytes for p in model.parameters())
    stagehand.layer(model, vram_budget=size // 2, device=place, opaque=[Reading])
    with torch.no_grad():
        for number in range(3):
            assert_bitwise_equal(model(batch()), expected, f"pass {number}")
    assert len(runtime_of(model).block_ids) == 6
    runtime_of(model).shutdown()


# Data-dependent order


class Experts(nn.Module):
    """Calls its experts in an order, and as many, as the input says."""

    def __init__(self, count=6):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList([lin() for _ in range(count)])

    def forward(self, x):
        chosen = self.router(x.mean(0)).argsort().tolist()
        for number in chosen[: 1 + chosen[0]]:
            x = x + self.experts[number](x).tanh()
        return x


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_random_order_of_experts_in_every_pass_is_exact(place):
    for pattern in (None, r"experts\.\d+$"):
        model = seeded(Mixture)
        plain = deepcopy(model).to(place)
        stream(model, place, "block" if pattern else "layer", pattern)
        with torch.no_grad():
            for number in range(20):
                x = torch.randn(
                    4, WIDTH, generator=torch.Generator().manual_seed(number)
                )
                assert_bitwise_equal(model(x), plain(x.to(place)), f"pass {number}")
        runtime_of(model).shutdown()


class Conditional(nn.Module):
    """Leaves early, skips layers, or takes another branch, as it is told."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([lin() for _ in range(8)])
        self.branch = lin()

    def forward(self, x, way):
        for number, layer in enumerate(self.layers):
            if way == "early" and number == 3:
                return x
            if way == "skip" and number % 2:
                continue
            x = layer(x).tanh()
        return self.branch(x) if way == "branch" else x


def test_early_exits_skipped_layers_and_branches_are_exact(place, mode):
    model = seeded(Conditional)
    plain = deepcopy(model).to(place)
    stream(model, place, mode, r"^layers\.\d+$|^branch$")
    ways = ["all", "early", "skip", "branch", "all", "all", "early", "early", "branch"]
    with torch.no_grad():
        for number, way in enumerate(ways * 2):
            expected = plain(batch().to(place), way)
            assert_bitwise_equal(model(batch(), way), expected, f"{number}: {way}")
    runtime_of(model).shutdown()


def test_a_part_that_no_pass_has_used_yet_can_be_used_later(place, mode):
    model = seeded(Conditional)
    plain = deepcopy(model).to(place)
    stream(model, place, mode, r"^layers\.\d+$|^branch$")
    with torch.no_grad():
        for _ in range(6):
            model(batch(), "early")
        for part in ("branch", "layers.7", "layers.2"):
            expected = plain.get_submodule(part)(batch().to(place))
            output = model.get_submodule(part)(batch())
            assert_bitwise_equal(output, expected, part)
    runtime_of(model).shutdown()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_stream_in_block_mode(place, backend):
    torch._dynamo.reset()
    model = seeded(repeated(lambda: nn.Sequential(lin(), nn.GELU()), 4))
    expected = run_resident(model, place, batch())
    for block in model:
        block.compile(backend=backend)
    runtime = stream(model, place, "block")
    with torch.no_grad():
        for number in range(4):
            assert_bitwise_equal(model(batch()), expected, f"pass {number}")
    runtime.shutdown()
    torch._dynamo.reset()


class Conjugated(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(32, 32, dtype=torch.complex64)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return x @ self.weight.conj()


def test_conjugate_of_a_frozen_weight_is_kept_for_backward_as_it_is(sim):
    torch.manual_seed(0)
    model = nn.Sequential(*(Conjugated() for _ in range(5)))
    inputs = [torch.randn(3, 32, dtype=torch.complex64) for _ in range(2)]
    reference = deepcopy(model).to("hpu")
    gradients = []
    for one in (reference, model):
        if one is model:
            stagehand.layer(one, vram_budget=30_000, device="hpu")
        x = inputs[0].to("hpu").requires_grad_()
        one(x).abs().sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)
    del x, one
    model._stagehand_layer_runtime.shutdown()
