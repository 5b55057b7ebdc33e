"""OffloadedAdamW is torch's fused AdamW bit for bit, wherever parameters lie."""

import copy
import io
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from equality import all_equal
from stagehand.core.arena import Arena, live_leases
from stagehand.core.layout import same_bits
from stagehand.errors import ConfigError, OptimizerError
from stagehand.optim import OffloadedAdamW, update
from stepping import assert_same, give_gradients, parameters, states_of, train

HALF = [torch.bfloat16, torch.float16]
ROUNDED = {"state_dtype": torch.bfloat16}
EXACT = {"state_dtype": torch.float32}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(update, "CHUNK_ELEMENTS", 64)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": torch.tensor(0.02), "betas": (0.5, 0.9), "eps": 1e-3},
        {"amsgrad": True, "weight_decay": 0.0},
        {"maximize": True, "weight_decay": 0.3, "lr": 0.1},
    ],
    ids=["defaults", "tensor", "amsgrad", "maximize"],
)
def test_twenty_steps_are_those_of_torch(dtype, options):
    pairs = []
    for kind, extra in ((OffloadedAdamW, {}), (torch.optim.AdamW, {"fused": True})):
        params = parameters(dtype)
        groups = [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]
        pairs.append((params, kind(groups, **options, **extra)))
    for step in range(20):
        for params, optimizer in pairs:
            give_gradients(params, step)
            if step % 3 == 0:
                params[1].grad = None  # its count falls behind
            optimizer.step()
    assert_same(*pairs)


@pytest.mark.parametrize("calls", range(1, 4))
def test_step_that_found_no_memory_for_its_states_is_repeated(sim, monkeypatch, calls):
    """What it had of a state was taken for a whole one."""
    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer = OffloadedAdamW(params, pin_states=True)
    twin = OffloadedAdamW(twins)
    left = [calls]

    def acquire(*arguments):
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return real(*arguments)

    real = Arena.acquire
    monkeypatch.setattr(Arena, "acquire", acquire)
    give_gradients(params, 0)
    give_gradients(twins, 0)
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.step()
    twin.step()
    assert_same((params, optimizer), (twins, twin))


@pytest.mark.parametrize("options", [{}, EXACT, ROUNDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_moves_the_version_counter(dtype, options):
    params = parameters(dtype, shapes=[(8, 8)])
    optimizer = OffloadedAdamW(params, **options)
    give_gradients(params, 0)
    before = params[0]._version
    optimizer.step()
    assert params[0]._version > before


@pytest.mark.parametrize("options", [{}, ROUNDED, {"pin_states": True}])
def test_layout_in_memory_of_parameter_and_gradient_does_not_matter(options):
    plain = parameters(shapes=[(6, 8), (6, 8), (2, 3, 4, 5)])
    odd = [
        torch.nn.Parameter(plain[0].detach().t().contiguous().t()),
        torch.randn(6, 16)[:, ::2].requires_grad_(),  # with gaps
        torch.nn.Parameter(
            plain[2].detach().to(memory_format=torch.channels_last, copy=True)
        ),
    ]
    with torch.no_grad():
        odd[1].copy_(plain[1])
    # The noise belongs to places in memory: with one order of elements it is the same.
    flat = [plain[0].detach().t(), plain[1].detach(), plain[2].permute(0, 2, 3, 1)]
    flat = [torch.nn.Parameter(t.detach().contiguous()) for t in flat]
    pairs = [(p, OffloadedAdamW(p, **options)) for p in (odd, flat)]
    for step in range(3):
        give_gradients(odd, step)  # contiguous, unlike the parameters
        orders = [lambda t: t.t(), lambda t: t, lambda t: t.permute(0, 2, 3, 1)]
        for mine, theirs, order in zip(flat, odd, orders, strict=True):
            mine.grad = order(theirs.grad).contiguous()
        for _, optimizer in pairs:
            optimizer.step()
    for mine, theirs, order in zip(flat, odd, orders, strict=True):
        assert torch.equal(mine, order(theirs))


def test_host_and_device_parameters_are_stepped_where_they_lie(sim):
    def mixed():
        host, device = parameters(), parameters(device="hpu", seed=1)
        return [p for pair in zip(host, device, strict=True) for p in pair]

    mine, theirs = mixed(), mixed()
    pairs = [
        (mine, OffloadedAdamW(mine)),
        (theirs, torch.optim.AdamW(theirs, fused=True)),
    ]
    for params, optimizer in pairs:
        train(optimizer, params, range(5))
    assert_same(*pairs)
    for parameter in mine:
        for value in pairs[0][1].state[parameter].values():
            assert value.device == parameter.device


@pytest.mark.parametrize("options", [{}, EXACT, ROUNDED, {"pin_states": True}])
def test_states_follow_a_parameter_that_is_moved_between_steps(sim, options):
    pairs = []
    for moves in (True, False):
        params = parameters(torch.bfloat16)
        optimizer = OffloadedAdamW(params, amsgrad=True, **options)
        for step, place in enumerate(["cpu", "hpu", "hpu", "cpu"]):
            give_gradients(params, step)
            if moves:
                for parameter in params:
                    # Between backward and step: the gradient stays behind.
                    parameter.data = parameter.data.to(place)
            optimizer.step()
            for parameter, state in optimizer.state.items():
                assert {t.device for t in state.values()} == {parameter.device}
        pairs.append((params, optimizer))
    assert_same(*pairs)
    assert all(p.device.type == "cpu" for p in pairs[0][0])


@pytest.mark.parametrize("amsgrad", [False, True])
def test_float32_states_of_bfloat16_parameters_are_exact(amsgrad, small_chunks):
    params = parameters(torch.bfloat16)
    optimizer = OffloadedAdamW(params, amsgrad=amsgrad, **EXACT)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = torch.optim.AdamW(wide, amsgrad=amsgrad, fused=True)
    for step in range(10):
        give_gradients(params, step)
        for exact, parameter in zip(wide, params, strict=True):
            exact.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
        with torch.no_grad():
            for exact in wide:
                exact.copy_(exact.bfloat16())
    rounded = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    assert_same((params, optimizer), (rounded, reference))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_a_wider_type_count_whole_and_states_round_to_nearest(
    dtype, small_chunks
):
    params = parameters(dtype)
    optimizer = OffloadedAdamW(params)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = torch.optim.AdamW(wide, fused=True)
    for step in range(10):
        give_gradients(wide, step)
        for exact, parameter in zip(wide, params, strict=True):
            parameter.grad_dtype = torch.float32
            parameter.grad = exact.grad.clone()
        optimizer.step()
        reference.step()
        with torch.no_grad():
            for exact in wide:
                state = reference.state[exact]
                for tensor in (exact, state["exp_avg"], state["exp_avg_sq"]):
                    tensor.copy_(tensor.to(dtype))
    for mine, exact in zip(params, wide, strict=True):
        assert same_bits(mine, exact.to(dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            found = optimizer.state[mine][name]
            assert same_bits(found, reference.state[exact][name].to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_states_are_neighbours_of_the_exact_ones(dtype, small_chunks):
    params = parameters(dtype, shapes=[(500,)])
    optimizer = OffloadedAdamW(params, amsgrad=True, **ROUNDED)
    give_gradients(params, 0)
    gradient = params[0].grad.float()
    optimizer.step()
    state = optimizer.state[params[0]]
    for name, exact in (
        ("exp_avg", gradient * (1 - 0.9)),
        ("exp_avg_sq", gradient.square() * (1 - 0.999)),
    ):
        assert state[name].dtype == torch.bfloat16
        error = (state[name].float() - exact).abs() / exact.abs()
        assert 0.002 < error.max() < 1 / 128
    assert same_bits(state["max_exp_avg_sq"], state["exp_avg_sq"])


def test_steps_with_bfloat16_states_do_not_depend_on_place_or_order(sim, small_chunks):
    pairs = []
    for device in ("cpu", "hpu"):
        params = parameters(device=device)
        pairs.append((params, OffloadedAdamW(params, **ROUNDED)))
        train(pairs[-1][1], params, range(4))
    assert_same(*pairs)


def test_no_two_chunks_are_rounded_with_the_same_noise(small_chunks):
    [weight] = parameters(shapes=[(320,)])
    optimizer = OffloadedAdamW([weight], **ROUNDED)
    weight.grad = torch.full((320,), 0.1)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        chunks = optimizer.state[weight][name].view(5, 64)
        assert chunks.float().unique(dim=0).shape == (5, 64)


def test_seed_changes_the_rounding_and_nothing_is_drawn_from_torch():
    pairs = []
    before = torch.get_rng_state()
    for seed in (1, 2):
        params = parameters()
        pairs.append((params, OffloadedAdamW(params, seed=seed, **ROUNDED)))
        give_gradients(params, 0)
        pairs[-1][1].step()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(AssertionError):
        assert_same(*pairs)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, torch.Tensor) else None
        known = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if made is not None and made.data_ptr() not in known:
            self.numel = max(self.numel, made.numel())
        return result


@pytest.mark.parametrize(
    ("options", "most"), [({}, 1), (EXACT, 64), (ROUNDED, 64)], ids=str
)
def test_step_needs_no_memory_but_for_one_chunk_that_is_converted(
    options, most, small_chunks
):
    params = parameters(torch.bfloat16, shapes=[(1000,)])
    optimizer = OffloadedAdamW(params, **options)
    train(optimizer, params, range(1))
    give_gradients(params, 1)
    with Largest() as largest:
        optimizer.step()
    assert largest.numel <= most


def distance_left(optimizer_of):
    """Minimize a quadratic whose gradient is large once, then small; see how far."""
    weight = torch.nn.Parameter(torch.ones(256))
    optimizer = optimizer_of([weight])
    for step in range(3000):
        weight.grad = weight.detach() * (1000.0 if step == 0 else 1.0)
        optimizer.step()
    return weight.abs().mean().item()


class NearestStates(torch.optim.AdamW):
    """AdamW whose states are rounded to the nearest bfloat16 after each step."""

    def step(self):
        super().step()
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


def test_bfloat16_states_converge_where_rounding_to_nearest_stalls():
    options = {"lr": 2e-2, "betas": (0.9, 0.998), "weight_decay": 0.0}
    exact = distance_left(lambda p: torch.optim.AdamW(p, **options))
    nearest = distance_left(lambda p: NearestStates(p, **options))
    stochastic = distance_left(lambda p: OffloadedAdamW(p, **options, **ROUNDED))
    assert nearest > 0.1  # the one large square never fades
    assert stochastic < nearest / 100
    assert stochastic < 2 * exact


def through_a_file(value):
    file = io.BytesIO()
    # The simulated device's tensors cannot be saved.
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, value), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "options",
    [{}, EXACT, {"seed": 7, **ROUNDED}, {"pin_states": True}, {"amsgrad": True}],
    ids=["own", "exact", "rounded", "pinned", "amsgrad"],
)
def test_saved_and_loaded_run_goes_on_bit_for_bit(sim, options):
    params = parameters(torch.bfloat16) + parameters(device="hpu")
    optimizer = OffloadedAdamW(params, **options)
    train(optimizer, params, range(3))
    saved = through_a_file([optimizer.state_dict(), [p.detach() for p in params]])
    others = [
        torch.nn.Parameter(q.to(p.device))
        for q, p in zip(saved[1], params, strict=True)
    ]
    resumed = OffloadedAdamW(others, lr=0.5, **{**options, "seed": 0})
    train(resumed, others, range(7, 8))  # states to be replaced
    with torch.no_grad():
        for other, parameter in zip(others, params, strict=True):
            other.copy_(parameter)
    resumed.load_state_dict(saved[0])
    for pair in ((optimizer, params), (resumed, others)):
        train(*pair, range(3, 6))
    assert_same((params, optimizer), (others, resumed))


def test_states_of_torch_are_rounded_with_the_seed_of_who_loads_them():
    params = parameters()
    theirs = torch.optim.AdamW(params)
    train(theirs, params, range(2))
    mine = [OffloadedAdamW(copy.deepcopy(params), seed=s, **ROUNDED) for s in (5, 5, 6)]
    for optimizer in mine:
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        train(optimizer, optimizer.param_groups[0]["params"], range(2, 4))
    one, same, other = (states_of(optimizer)[0]["exp_avg"] for optimizer in mine)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("to_torch", [False, True])
def test_checkpoints_are_exchanged_with_torch(to_torch, fused):
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=0.03, fused=fused)
    one: torch.optim.Optimizer = OffloadedAdamW(params, lr=0.03) if to_torch else theirs
    train(one, params, range(3))
    saved = through_a_file(one.state_dict())
    pairs = []
    for kind in (OffloadedAdamW, torch.optim.AdamW):
        mine = copy.deepcopy(params)
        optimizer = kind(mine, lr=0.9)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for group in optimizer.param_groups:
            assert group["lr"] == 0.03
            assert group["fused"] or kind is not OffloadedAdamW
            group["fused"] = True
        train(optimizer, mine, range(3, 6))
        pairs.append((mine, optimizer))
    assert_same(*pairs)


@pytest.mark.parametrize(
    "options", [{}, EXACT, ROUNDED, {"pin_states": True}, {"amsgrad": True}]
)
def test_loaded_states_get_the_place_type_and_layout_that_new_ones_have(sim, options):
    shapes = [(2, 3, 4, 5), (7,), (9,)]
    theirs = parameters(torch.bfloat16, shapes)
    saving = torch.optim.AdamW(theirs, amsgrad="amsgrad" in options)
    train(saving, theirs, range(2))

    params = parameters(torch.bfloat16, shapes)
    params[0].data = params[0].data.to(memory_format=torch.channels_last)
    params[1].data = params[1].data.to("hpu")
    looks = []
    for load in (False, True):
        optimizer = OffloadedAdamW(params, **options)
        if load:
            optimizer.load_state_dict(saving.state_dict())
        else:
            train(optimizer, params, range(1))
        looks.append(
            [
                (name, t.device, t.dtype, t.stride(), t.is_pinned())
                for parameter in params
                for name, t in optimizer.state[parameter].items()
            ]
        )
    assert looks[0] == looks[1]
    for mine, saved in zip(states_of(optimizer), states_of(saving), strict=True):
        assert all(
            torch.equal(mine[name].to(saved[name]), saved[name]) for name in saved
        )


def test_count_of_an_old_checkpoint_is_a_number():
    params = parameters()
    optimizer = OffloadedAdamW(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    optimizer.load_state_dict(saved)
    train(optimizer, params, range(2, 3))
    assert [float(s["step"]) for s in states_of(optimizer)] == [3.0] * len(params)


def test_state_of_another_shape_is_refused_and_nothing_is_loaded():
    params = parameters(shapes=[(4,), (2, 3)])
    optimizer = OffloadedAdamW(params)
    train(optimizer, params, range(2))
    others = parameters(shapes=[(4,), (3, 2)])
    other = OffloadedAdamW(others, lr=0.5)
    train(other, others, range(1))
    before = states_of(optimizer)
    with pytest.raises(ConfigError, match=r"has shape \[3, 2\].*has \[2, 3\]"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for mine, kept in zip(states_of(optimizer), before, strict=True):
        assert all(same_bits(mine[name], kept[name]) for name in kept)


def test_users_load_hooks_see_the_states():
    params = parameters()
    optimizer = OffloadedAdamW(params)
    train(optimizer, params, range(1))
    seen = []
    optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: seen.append(len(saved["state"]))
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [len(params)] * 2


def test_what_a_state_holds_for_no_parameter_is_loaded_as_torch_does():
    for kind in (OffloadedAdamW, torch.optim.AdamW):
        optimizer = kind(parameters())
        saved = optimizer.state_dict()
        saved["state"]["a note"] = 7
        optimizer.load_state_dict(saved)
        assert dict(optimizer.state) == {"a note": 7}


@pytest.mark.parametrize("load", [False, True])
def test_copies_and_pickles_go_on_bit_for_bit(load):
    params = parameters()
    optimizer = OffloadedAdamW(params, seed=3, **ROUNDED)
    train(optimizer, params, range(2))
    twin = copy.deepcopy(optimizer)
    if load:  # before its first step, too
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    theirs = twin.param_groups[0]["params"]
    for pair in ((optimizer, params), (twin, theirs)):
        train(*pair, range(2, 4))
    assert_same((params, optimizer), (theirs, twin))


def test_groups_added_later_and_schedules_are_those_of_torch():
    pairs = []
    for kind, extra in ((OffloadedAdamW, {}), (torch.optim.AdamW, {"fused": True})):
        params = parameters()
        optimizer = kind(params[:2], lr=0.1, **extra)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": params[2:], "lr": 0.01})
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            train(optimizer, params, [step])
            schedule.step()
        pairs.append((params, optimizer))
    assert_same(*pairs)


def test_parameter_put_into_a_group_by_hand_is_stepped():
    params = parameters()
    optimizer = OffloadedAdamW(params[1:])
    optimizer.param_groups[0]["params"].append(params[0])
    train(optimizer, params, range(1))
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("options", [{}, ROUNDED])
def test_grad_scaler_unscales_and_skips_overflows(options):
    pairs = []
    for scaled in (True, False):
        params = parameters()
        optimizer = OffloadedAdamW(params, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for step in range(4):
            scaler.scale(torch.ones(()))
            give_gradients(params, step, scale=scaler.get_scale())
            if step == 2:
                if not scaled:
                    continue
                params[-1].grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (4.0 if scaled else 1.0)
        pairs.append((params, optimizer))
    assert_same(*pairs)


@pytest.mark.parametrize("options", [{}, ROUNDED])
def test_scale_and_rate_on_the_device_are_waited_for_by_host_parameters(sim, options):
    # As a GradScaler leaves them. torch's own step reads its copies of them too early.
    pairs = []
    for scale in (8.0, None):
        params = parameters() + parameters(device="hpu", seed=1)
        lr = torch.tensor(0.01, device="cpu" if scale is None else "hpu")
        optimizer = OffloadedAdamW(params, lr=lr, **options)
        for step in range(3):
            give_gradients(params, step, scale=scale or 1.0)
            if scale is None and step == 1:
                continue
            if scale is not None:
                optimizer.grad_scale = torch.full((), scale, device="hpu")
                optimizer.found_inf = torch.full((), float(step == 1), device="hpu")
            optimizer.step()
        pairs.append((params, optimizer))
    assert_same(*pairs)


def test_closure_is_evaluated_with_gradients():
    [weight] = parameters(shapes=[(4,)])
    optimizer = OffloadedAdamW([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    expected = weight.square().sum().item()
    assert optimizer.step(closure).item() == expected
    assert weight.square().sum() < expected


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_or_clears(set_to_none):
    params = parameters()
    optimizer = OffloadedAdamW(params)
    give_gradients(params, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(p.grad is None for p in params)
    else:
        assert all(not p.grad.any() for p in params)


def test_sparse_gradient_is_refused_before_anything_is_stepped():
    params = parameters(shapes=[(4,), (4,)])
    optimizer = OffloadedAdamW([("first", params[0]), ("second", params[1])])
    give_gradients(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(OptimizerError, match=r"'second' of shape \[4\] is torch\.spar"):
        optimizer.step()
    assert all_equal(params, before)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.complex64, {}, "parameter 0 .* is torch.complex64: .* real floating"),
        (torch.float64, ROUNDED, "parameter 0 .* is torch.float64: .* float32"),
        (torch.float32, {"state_dtype": torch.float16}, "state_dtype is torch.float16"),
    ],
)
def test_element_types_that_cannot_work_are_refused(dtype, options, message):
    weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(ConfigError, match=message):
        OffloadedAdamW([weight], **options)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("lr", "1e-4", "a number"),
        ("eps", None, "a number"),
        ("weight_decay", "0.1", "a number"),
        ("amsgrad", "no", "True or False"),
        ("maximize", 0, "True or False"),
        ("pin_states", "all", "True or False"),
        ("seed", 1.5, "an int"),
    ],
)
def test_options_of_another_type_are_named(option, value, expected):
    """ "no" was taken for True, and a number in a text compared with a float."""
    with pytest.raises(
        ConfigError, match=f"{option} is {value!r}: expected {expected}"
    ):
        OffloadedAdamW(parameters(), **{option: value})


@pytest.mark.parametrize("option", ["foreach", "capturable", "differentiable"])
def test_what_is_not_offered_is_refused(option):
    params = parameters()
    with pytest.raises(TypeError, match=option):
        OffloadedAdamW(params, **{option: True})
    with pytest.raises(ConfigError, match=f"{option}=True"):
        OffloadedAdamW([{"params": params, option: True}])


def test_refused_group_is_not_added():
    optimizer = OffloadedAdamW(parameters())
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.cfloat)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{}, ROUNDED, {"amsgrad": True}])
def test_pinned_states_have_their_exact_size_and_are_given_back(sim, options):
    others = live_leases()
    params = parameters(shapes=[(1000,), (64, 5)])
    optimizer = OffloadedAdamW(params, pin_states=True, **options)
    train(optimizer, params, range(2))
    itemsize = 2 if options == ROUNDED else 4
    count = 3 if "amsgrad" in options else 2
    sizes = [-(-p.numel() * itemsize // 256) * 256 * count for p in params]
    assert sim.pinned_bytes() == sum(sizes)
    for parameter, state in optimizer.state.items():
        moments = [value for name, value in state.items() if name != "step"]
        assert all(m.is_pinned() for m in moments)
        # Each has a storage of its own: saving one does not save the others.
        expected = parameter.numel() * itemsize
        assert {m.untyped_storage().nbytes() for m in moments} == {expected}
    del state, moments
    optimizer.load_state_dict(optimizer.state_dict())
    assert sim.pinned_bytes() == sum(sizes)
    assert live_leases() - others == len(params)
    optimizer.load_state_dict(OffloadedAdamW(params, **options).state_dict())
    assert (sim.pinned_bytes(), live_leases()) == (0, others)
    train(optimizer, params, range(1))
    del optimizer
    assert sim.pinned_bytes() == 0


def test_pinned_states_that_follow_to_the_device_leave_no_pinned_memory(sim):
    [parameter] = parameters(shapes=[(1024,)])
    optimizer = OffloadedAdamW([parameter], pin_states=True)
    for step, (device, pinned) in enumerate([("cpu", 8192), ("hpu", 0)] * 2):
        parameter.data = parameter.data.to(device)
        train(optimizer, [parameter], [step])
        assert sim.pinned_bytes() == pinned


def test_states_are_not_pinned_unless_asked_for(sim):
    params = parameters()
    train(OffloadedAdamW(params), params, range(1))
    assert sim.pinned_bytes() == 0


def test_optimizer_is_freed_with_its_last_reference():
    params = parameters()
    optimizer = OffloadedAdamW(params)
    train(optimizer, params, range(1))
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


def test_step_hooks_of_torch_are_called():
    params = parameters()
    optimizer = OffloadedAdamW(params)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(optimizer, params, range(2))
    assert len(calls) == 4


def test_moments_are_rounded_with_noise_of_their_own():
    """With the same one, the one that is nearer to the number above would go up
    wherever the other one does, and their errors would add up.
    """
    weight = torch.nn.Parameter(torch.zeros(2000))
    weight.grad = torch.full((2000,), 1.001)
    optimizer = OffloadedAdamW([weight], betas=(0.5, 0.5), **ROUNDED)
    optimizer.step()
    (state,) = states_of(optimizer)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    up, up_too = first > 0.5, second > 0.5
    assert 0 < up.sum() < 2000
    assert 0 < up_too.sum() < 2000
    assert (up & ~up_too).any()
    assert (up_too & ~up).any()
