"""Every kind of module and of parameter trains through the stream."""

import threading
from copy import deepcopy

import pytest
import torch
from torch import nn

import stagehand
from stagehand import kept_views
from stagehand.core.device import AcceleratorDevice
from stagehand.core.terms import nodes_of
from training import (
    FEW,
    TIGHT,
    WIDTH,
    Net,
    Recomputing,
    Reentering,
    Setting,
    assert_trains_equally,
    built,
    end,
    over,
    sgd,
    start,
    step,
    train,
)


class Cube(torch.autograd.Function):
    """Saves a weight, a view of one, an activation, and its own result."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        result = x @ weight.t() + bias
        ctx.save_for_backward(x, weight, bias[1:], result)
        return result * result * result

    @staticmethod
    def backward(ctx, grad):
        x, weight, part, result = ctx.saved_tensors
        inner = grad * 3 * result * result * (1 + part.sum() * 0)
        return inner @ weight, inner.t() @ x, inner.sum(0)


class Cubing(nn.Linear):
    def forward(self, x):
        return Cube.apply(x, self.weight, self.bias) * 0.1


class Times(torch.autograd.Function):
    """Keeps the weight itself, and not for autograd to look after."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x


class Timing(nn.Linear):
    def forward(self, x):
        return Times.apply(x, self.weight) + self.bias


class Keeping(torch.autograd.Function):
    """Keeps views of weights, and not for autograd to look after."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.tensors = None, weight.t()
        ctx.others = {"bias": [bias[1:]], "count": 3}
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        [part] = ctx.others["bias"]
        return grad @ ctx.tensors[1].t() * (1 + part.sum()), None, None


class FrozenKeeping(nn.Linear):
    """As 4-bit layers of bitsandbytes do."""

    def __init__(self, *args):
        super().__init__(*args)
        self.requires_grad_(False)
        self.keeps = True

    def forward(self, x):
        if not self.keeps:
            return super().forward(x)
        return Keeping.apply(x, self.weight, self.bias)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = FrozenKeeping(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.up(self.down(x)) + self.base(x)


class Rolled(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return self.inner(x.unsqueeze(0))[0].squeeze(0)


class Reshaped(nn.Module):
    """Gives a module its input as an image or a sequence, and flattens the result."""

    def __init__(self, inner, *shape):
        super().__init__()
        self.inner = inner
        self.shape = shape

    def forward(self, x):
        return self.inner(x.reshape(-1, *self.shape)).reshape(x.shape)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(0)
        return self.inner(x, x, x, need_weights=False)[0].squeeze(0)


class Looked(nn.Module):
    """Looks rows up by what the inputs are."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(50, WIDTH, padding_idx=0)

    def forward(self, x):
        return x + self.inner((x.detach().abs().sum(1) * 7).long() % 50)


MODULES = {
    "custom function": lambda: Cubing(WIDTH, WIDTH),
    "custom function that keeps its weight": lambda: Timing(WIDTH, WIDTH),
    "custom function that keeps views": Adapted,
    "relu in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    ),
    "convolution": lambda: Reshaped(nn.Conv2d(1, 1, 3, padding=1), 1, 4, 4),
    "convolution, relu in place": lambda: Reshaped(
        nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(inplace=True)), 1, 4, 4
    ),
    "1d convolution": lambda: Reshaped(nn.Conv1d(2, 2, 3, padding=1), 2, 8),
    "transposed": lambda: Reshaped(nn.ConvTranspose1d(2, 2, 3, padding=1), 2, 8),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "group norm": lambda: nn.GroupNorm(4, WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "prelu": lambda: nn.PReLU(WIDTH),
    "embedding": Looked,
    "lstm": lambda: Rolled(nn.LSTM),
    "gru": lambda: Rolled(nn.GRU),
    "rnn": lambda: Rolled(nn.RNN),
    "attention": Attending,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
}


def sites(make, kind=Net):
    @built
    def build():
        model = kind(depth=0)
        model.blocks = nn.ModuleList(make(WIDTH, WIDTH) for _ in range(4))
        return model

    return build


def net_of(kind):
    return sites(lambda *_: MODULES[kind]())


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.parametrize("kind", MODULES)
def test_every_kind_of_module_trains_exactly(sim, setting, kind):
    assert_trains_equally(net_of(kind), train, setting)


def keeping(kind=Net):
    return sites(lambda *_: Adapted(), kind)


@over(FEW)
@pytest.mark.parametrize("kind", [Net, Recomputing, Reentering])
def test_views_that_functions_keep_hold_no_slot(sim, setting, kind):
    """Also where the graph is gone through again, or by hand, or not at all."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            if kind is not Reentering:  # it takes no gradients by hand
                run.note("by hand", torch.autograd.grad(loss, x, retain_graph=True))
            if kind is Net:
                run.backward(loss, retain_graph=True)
            run.backward(loss)
            run.note("input", x.grad)
            run.model(x)
            del loss
            step(optimizer)

    assert_trains_equally(keeping(kind), script, setting)


@over(FEW)
def test_views_that_functions_keep_are_found_when_gradients_are_taken_late(
    sim, setting
):
    """The site was called with gradients and without any to take."""

    def script(run):
        weights = [w for w in run.model.parameters() if w.requires_grad]
        for weight in weights:
            weight.requires_grad_(False)
        run.note("output", run.model(run.batch()))
        for weight in weights:
            weight.requires_grad_()
        train(run)

    assert_trains_equally(keeping(), script, setting)


@over(FEW)
def test_views_that_functions_begin_to_keep_hold_a_slot_once(sim, setting):
    left = []

    def script(run):
        optimizer = sgd(run)
        for number in range(5):
            for block in run.model.blocks:
                block.base.keeps = number > 1
            loss = run.loss(number)
            run.backward(loss)
            del loss
            step(optimizer)
            if run.runtime is not None:
                left.append(run.runtime.report().abandoned_slots)

    assert_trains_equally(keeping(), script, setting, abandoned=True)
    assert left[:2] == [0, 0]
    assert 0 < left[2] == left[3] == left[4]


@over(FEW)
def test_a_view_that_a_function_keeps_of_a_changed_weight_is_refused(sim, setting):
    """As what autograd saved would be: its bytes are others by now."""
    run = start(keeping(), setting)
    x = run.batch().requires_grad_()
    loss = run.model(x).square().mean()
    with torch.no_grad():
        run.model.blocks[2].base.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks.2.*changed|modified"):
        loss.backward()
    del loss
    run.model.zero_grad()
    run.model(x).square().mean().backward()
    end(run, abandoned=True)


class Tracing(torch.autograd.Function):
    """Does with what it keeps what functions may do."""

    @staticmethod
    def forward(ctx, x, view, odd):
        view.scale = 2
        ctx.view, ctx.once, ctx.odd, ctx.shared = view, [view], odd, odd
        ctx.save_for_backward(x)
        return x @ view

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        if ctx.once and ctx.once[0] is ctx.view:
            grad_x = grad @ ctx.view.t() * ctx.view.scale
            ctx.once.clear()
        else:
            grad_x = grad @ ctx.view.t()
        ctx.shared["calls"] += 1
        grad_view = x.t() @ grad if ctx.view.requires_grad else None
        return grad_x * ctx.odd["calls"], grad_view, None


class Traced(nn.Linear):
    """Its functions keep one view, and what they keep with it."""

    def forward(self, x):
        view = self.weight.t()
        for _ in range(2):
            empty = torch.empty(1, device="meta")
            odd = {"calls": 0, "empty": empty, "view": view, "more": []}
            odd["more"].append(odd)
            x = torch.tanh(Tracing.apply(x, view, odd))
        return x + self.bias


class Again(FrozenKeeping):
    """Calls itself between functions of its own."""

    def forward(self, x, depth=1):
        x = Keeping.apply(x, self.weight, self.bias)
        if depth:
            x = self(torch.tanh(x), depth - 1)
        return Keeping.apply(x, self.weight, self.bias)


@over(FEW)
@pytest.mark.parametrize("kind", [Net, Recomputing])
def test_what_functions_keep_with_views_is_theirs(sim, setting, kind):
    """Its class and place in the graph, who has it as well, and what a run changes."""

    def script(run):
        optimizer = sgd(run)
        for number in range(3):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            run.backward(loss, retain_graph=True)
            run.backward(loss)
            [grad] = torch.autograd.grad(
                run.model(x).square().mean(), x, create_graph=True
            )
            run.backward(grad.square().sum())
            run.note("input", x.grad)
            del loss, grad
            step(optimizer)

    # Containers that others hold are left alone, and so keep slots.
    assert_trains_equally(sites(Traced, kind), script, setting, abandoned=True)


@over(FEW)
def test_views_of_sites_inside_of_themselves_hold_no_slot(sim, setting):
    def script(run):
        for number in range(3):
            run.backward(run.model(run.batch(number)).square().mean())

    assert_trains_equally(sites(Again), script, setting)


@over(FEW)
def test_a_view_that_the_module_keeps_as_well_stays_whole(sim, setting):
    class Caching(FrozenKeeping):
        kept = None

        def forward(self, x):
            if self.kept is None:
                self.kept = self.weight.t()
            return Multiplying.apply(x, self.kept)

    assert_trains_equally(sites(Caching), train, setting, abandoned=True)


@over(FEW)
def test_views_hold_no_slot_when_their_function_has_raised(sim, setting):
    """The graph lives on, and is gone through later."""

    def script(run):
        for number in range(3):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            Multiplying.fails = True
            with pytest.raises(ValueError, match="refused"):
                loss.backward(retain_graph=True)
            Multiplying.fails = False
            run.model.zero_grad()
            x.grad = None
            run.note("output", run.model(x))
            run.backward(loss)
            run.note("input", x.grad)

    assert_trains_equally(keeping_by(Multiplying), script, setting)


class Multiplying(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx, x, view):
        ctx.view = view
        return x @ view

    @staticmethod
    def backward(ctx, grad):
        view = ctx.view
        if Multiplying.fails:
            raise ValueError("refused")
        return grad @ view.t(), None


def keeping_by(function):
    """Sites of which each calls a function with a view that nobody else holds."""

    def make(*size):
        site = FrozenKeeping(*size)
        site.forward = lambda x: torch.tanh(function.apply(x, site.weight.t()))
        return site

    return sites(make)


class Handing(torch.autograd.Function):
    """Its backward hands its view to somebody, or all that it keeps."""

    given = None
    what = None

    @staticmethod
    def forward(ctx, x, view):
        ctx.view = view
        return x @ view

    @staticmethod
    def backward(ctx, grad):
        Handing.given.append(ctx.view if Handing.what == "view" else ctx)
        return grad @ ctx.view.t(), None


@over(FEW)
@pytest.mark.parametrize("what", ["view", "context"])
def test_a_view_that_a_function_hands_to_others_in_backward_stays_whole(
    sim, setting, what
):
    def script(run):
        for number in range(2):
            Handing.what, Handing.given = what, []
            run.backward(run.loss(number))
            for given in Handing.given:
                run.note("given", given if what == "view" else given.view)
            Handing.given = None

    assert_trains_equally(keeping_by(Handing), script, setting, abandoned=True)


class Repeating(torch.autograd.Function):
    """Its backward may go back through the same graph once more, and fail there."""

    inner = None
    fails = False
    caught = 0

    @staticmethod
    def forward(ctx, x, view):
        ctx.view, ctx.again = view, [view, (view,)]
        return x @ view

    @staticmethod
    def backward(ctx, grad):
        inner, Repeating.inner = Repeating.inner, None
        if inner is not None:
            try:
                grad = grad * torch.autograd.grad(*inner, retain_graph=True)[0].sum()
            except ValueError:
                Repeating.caught += 1
        elif Repeating.fails:
            Repeating.fails = False
            raise ValueError("refused")
        return grad @ ctx.again[1][0].t(), None


@over(FEW)
@pytest.mark.parametrize("fails", [False, True])
def test_views_are_there_when_their_function_runs_inside_of_itself(sim, setting, fails):
    """The run around has them until it ends, whatever becomes of the one inside."""

    def script(run):
        for number in range(3):
            x = run.batch(number).requires_grad_()
            loss = run.model(x).square().mean()
            Repeating.inner, Repeating.fails, Repeating.caught = (loss, x), fails, 0
            run.backward(loss, retain_graph=True)
            assert Repeating.caught == fails
            if run.runtime is not None:
                assert not run.runtime._uses.kept._shown
            run.backward(loss)
            run.note("input", x.grad)
            del loss

    # What runs twice at once has its slot's memory meanwhile.
    assert_trains_equally(keeping_by(Repeating), script, setting, abandoned=True)


@over(FEW)
def test_views_hold_no_slot_when_a_backward_inside_of_a_forward_has_raised(
    sim, setting
):
    def look(module, args, output):
        if output.requires_grad:
            Multiplying.fails = True
            with pytest.raises(ValueError, match="refused"):
                torch.autograd.grad(output.sum(), args, retain_graph=True)
            Multiplying.fails = False

    def script(run):
        run.handles.append(run.model.blocks[1].register_forward_hook(look))
        for number in range(3):
            run.backward(run.loss(number))

    assert_trains_equally(keeping_by(Multiplying), script, setting)


@over(FEW)
def test_views_hold_no_slot_when_what_has_raised_inside_of_a_forward_was_caught(
    sim, setting
):
    """The backward around it goes on, with the views of those that run."""

    def script(run):
        def look(module, args, output):
            if output.requires_grad:
                Repeating.inner, Repeating.fails = (output.sum(), args[0]), True
                Repeating.caught = 0
                inside = torch.autograd.grad(output.sum(), args, retain_graph=True)
                run.note("inside", inside)
                assert Repeating.caught == 1
                if run.runtime is not None:
                    assert not run.runtime._uses.kept._shown

        run.handles.append(run.model.blocks[1].register_forward_hook(look))
        for number in range(3):
            run.note("output", run.model(run.batch(number).requires_grad_()))

    assert_trains_equally(keeping_by(Repeating), script, setting)


@over(FEW)
def test_views_hold_no_slot_when_a_call_of_their_site_was_interrupted(sim, setting):
    """In another thread, whose operators have higher numbers in the graph."""

    def refuse(module, args):
        raise KeyboardInterrupt

    def script(run):
        for _ in range(100):
            run.batch().requires_grad_() * 2
        handle = run.model.blocks[1].register_forward_pre_hook(refuse)
        with pytest.raises(KeyboardInterrupt):
            run.loss()
        handle.remove()
        thread = threading.Thread(target=lambda: run.backward(run.loss()))
        thread.start()
        thread.join()

    assert_trains_equally(keeping_by(Multiplying), script, setting)


@over(FEW)
def test_a_view_that_a_function_keeps_in_several_places_holds_no_slot(sim, setting):
    def script(run):
        for number in range(3):
            run.backward(run.loss(number))

    assert_trains_equally(keeping_by(Repeating), script, setting)


def test_only_what_a_site_has_added_is_looked_through(sim, monkeypatch):
    """A recompute's graph goes on into that of the forward, of any numbers."""
    seen = []

    def counted(*args):
        nodes = [*nodes_of(*args)]
        seen.append(len(nodes))
        return iter(nodes)

    monkeypatch.setattr(kept_views, "nodes_of", counted)

    class First(Adapted):
        def forward(self, x):
            return self.up(self.down(self.base(x)))

    run = start(sites(lambda *_: First(), Recomputing), TIGHT)
    x = run.batch().requires_grad_()
    for _ in range(2_000):  # numbers of this thread are higher than autograd's there
        x.view(-1)
    train(run, steps=2)
    assert seen
    assert max(seen) <= 3
    end(run)


# Parameters


def empty():
    return nn.Parameter(torch.zeros(0, WIDTH))


def strided():
    return nn.Parameter(torch.randn(WIDTH, WIDTH).t())


def channels_last():
    image = torch.randn(2, 2, 2, 2).to(memory_format=torch.channels_last)
    return nn.Parameter(image)


def bfloat16():
    return nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))


def double():
    return nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))


def complex64():
    return nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))


def scalar():
    return nn.Parameter(torch.tensor(0.5))


class Using(nn.Module):
    """Has a parameter of some kind beside ordinary ones, and uses it."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.odd = kind()

    def forward(self, x):
        odd = self.odd
        if odd.shape != (WIDTH, WIDTH):
            extra = odd.reshape(-1).sum()
        elif odd.is_complex():
            extra = (x.to(odd.dtype) @ odd).abs().to(x.dtype) * 0.1
        else:
            extra = (x.to(odd.dtype) @ odd).to(x.dtype) * 0.1
        return torch.tanh(self.linear(x) + extra)


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.parametrize(
    "kind", [empty, strided, channels_last, bfloat16, double, complex64, scalar]
)
def test_every_kind_of_parameter_trains_exactly(sim, setting, kind):
    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(Using(kind) for _ in range(4))
        return model

    assert_trains_equally(build, train, setting)


def pairs(weight):
    return torch.view_as_complex(weight.view(WIDTH // 2, WIDTH, 2))


def reals(weight):
    return torch.view_as_real(weight)[..., 0]


def conjugates(weight):
    return weight.mH


def negatives(weight):
    return weight.conj().imag


class ReadAs(nn.Module):
    """Computes with another view of a parameter."""

    def __init__(self, stored, read_as):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=stored))
        self.read_as = read_as

    def forward(self, x):
        numbers = self.read_as(self.weight)
        given = x[:, : len(numbers)].to(numbers.dtype)
        return torch.tanh(x + (given @ numbers).abs())


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.parametrize(
    ("stored", "read_as"),
    [
        (torch.float32, pairs),
        (torch.complex64, reals),
        (torch.complex64, conjugates),
        (torch.complex64, negatives),
    ],
)
def test_a_weight_read_as_other_numbers_keeps_no_slot(sim, setting, stored, read_as):
    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(ReadAs(stored, read_as) for _ in range(4))
        return model

    assert_trains_equally(build, train, setting)


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_that_are_conjugates_cross_as_what_they_say(sim, monkeypatch, times):
    """On CUDA the host turned what was not there yet: its copy is queued only."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.randn(WIDTH, WIDTH, dtype=torch.complex64)
            self.weight = nn.Parameter(weight)

        def forward(self):
            return self.weight.conj()

    def learn(model):
        for _ in range(times):
            outputs = [part() for part in model]
            sum(torch.view_as_real(o.resolve_conj()).sum() for o in outputs).backward()
        return [part.weight.grad.cpu().resolve_conj() for part in model]

    model = nn.ModuleList(Reads() for _ in range(3))
    resident = deepcopy(model).to("hpu")
    expected = learn(resident)
    assert times > 1 or all(p.grad.is_conj() for p in resident.parameters())
    stagehand.layer(model, vram_budget=2 * model[0].weight.nbytes)
    turned = []
    copy = AcceleratorDevice.copy

    def noted(device, target, source, stream=None):
        turned.append(source.is_conj())
        copy(device, target, source, stream)

    monkeypatch.setattr(AcceleratorDevice, "copy", noted)
    for part, gradient in zip(learn(model), expected, strict=True):
        assert torch.equal(part, gradient)
    assert turned
    assert not any(turned)
    model._stagehand_layer_runtime.shutdown()


def clamped(weight):
    weight.data.clamp_(-0.2, 0.2)


def with_another_row(weight):
    weight.data[0] = weight.data[1] * 0.5


def scaled(weight):
    weight.data *= 0.9


def scaled_into_itself(weight):
    torch.mul(weight.data, 0.9, out=weight.data)


def scaled_in_a_list(weight):
    torch._foreach_mul_([weight.data], 0.9)


@torch.library.custom_op("stagehand_tests::shrink", mutates_args={"values"})
def shrink(values: torch.Tensor) -> None:
    values.mul_(0.9)


def shrunk_by_an_operator(weight):
    shrink(weight.data)


def shrunk_by_its_name(weight):
    torch.ops.stagehand_tests.shrink(values=weight.data)


def scaled_by_an_overload(weight):
    torch.ops.aten.mul_.Scalar(weight.data, 0.9)


def set_anew(weight):
    torch.nn.init.constant_(weight.data, 0.05)


def rectified(weight):
    torch.nn.functional.leaky_relu(weight.data, 0.9, inplace=True)


def with_other_bits(weight):
    bits = weight.data.view(torch.int32)
    bits &= ~255


class Edited(nn.Module):
    """Changes a layer's weight past its version counter while it trains."""

    def __init__(self, edit, times):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.edit, self.left = edit, times

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if self.training and self.left:
            self.left -= 1
            self.edit(self.linear.weight)
        return x


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize(
    "edit",
    [
        *(clamped, with_another_row, scaled, scaled_into_itself, scaled_in_a_list),
        *(set_anew, rectified, with_other_bits),
        *(shrunk_by_an_operator, shrunk_by_its_name, scaled_by_an_overload),
    ],
)
def test_what_a_forward_writes_through_data_is_kept(sim, setting, edit, times, trains):
    """As codebooks do, which follow averages, and layers that fit to first batches."""

    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(Edited(edit, times) for _ in range(4))
        for block in model.blocks:
            block.linear.weight.requires_grad_(trains)
        return model

    assert_trains_equally(build, train, setting)


class Statistics(nn.Module):
    """Has the running statistics of a batch norm in parameters, not in buffers."""

    def __init__(self):
        super().__init__()
        start = torch.zeros(WIDTH), torch.ones(WIDTH)
        self.mean, self.var = (nn.Parameter(t, requires_grad=False) for t in start)


class Normed(Statistics):
    """Reads its own statistics."""

    def __init__(self, norm):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norm = norm

    def forward(self, x):
        return self.norm(x @ self.weight, self.mean, self.var, self.training)


class NormedByAnother(nn.Module):
    """Reads those of another module."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.statistics = nn.Linear(WIDTH, WIDTH), Statistics()
        self.norm = norm

    def forward(self, x):
        known = self.statistics
        return self.norm(self.linear(x), known.mean, known.var, self.training)


def by_name(x, mean, var, training):
    named = {"running_var": var, "running_mean": mean, "training": training}
    return torch.native_batch_norm(
        x, weight=None, bias=None, momentum=0.1, eps=1e-5, **named
    )[0]


def of_modules(x, mean, var, training):
    return nn.functional.batch_norm(x, mean, var, training=training)


def of_torch(x, mean, var, training):
    return torch.batch_norm(x, None, None, mean, var, training, 0.1, 1e-5, False)


def as_an_operator(x, mean, var, training):
    norm = torch.ops.aten.native_batch_norm
    norm = norm.default if training else norm
    return norm(x, None, None, mean, var, training, 0.1, 1e-5)[0]


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.filterwarnings("ignore:.*every call is watched:stagehand.StagehandWarning")
@pytest.mark.parametrize("kind", [Normed, NormedByAnother])
@pytest.mark.parametrize("norm", [of_modules, of_torch, by_name, as_an_operator])
def test_running_statistics_in_parameters_are_kept(sim, setting, norm, kind):
    """PyTorch's batch norm moves no version counter of theirs."""

    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(kind(norm) for _ in range(4))
        return model

    assert_trains_equally(build, train, setting)


@pytest.mark.parametrize("norm", [of_modules, of_torch, by_name, as_an_operator])
def test_running_statistics_that_are_only_read_do_not_cross_the_link_back(sim, norm):
    model = nn.Sequential(*(Normed(norm) for _ in range(4))).eval()
    budget = 2 * sum(p.nbytes for p in model[0].parameters())
    stagehand.layer(model, vram_budget=budget, device="hpu")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(5, WIDTH))
    runtime = model._stagehand_layer_runtime
    assert runtime.report().saved_bytes == 0
    runtime.shutdown()


class Centred(nn.Linear):
    """Changes its weight in sight once, and past its version counter always."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.is_new = True

    def forward(self, x):
        if self.is_new:
            self.is_new = False
            with torch.no_grad():
                self.weight.sub_(self.weight.mean())
        scaled(self.weight)
        return torch.tanh(super().forward(x))


@over([*FEW, Setting("cpu", "layers", "smallest")])
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_written_in_sight_hides_no_other_writes(sim, setting, trains):
    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(Centred() for _ in range(4))
        for block in model.blocks:
            block.weight.requires_grad_(trains)
        return model

    assert_trains_equally(build, train, setting)


def frozen(weight):
    weight.requires_grad_(False)


def detached(weight):
    weight.data.detach_()


def widened(weight):
    weight.data.unsqueeze_(0)


@over(FEW)
@pytest.mark.parametrize("call", [frozen, detached, widened])
def test_calls_that_leave_values_alone_let_blocks_be_dropped(sim, setting, call):
    @built
    def build():
        model = Net(depth=0)
        model.blocks = nn.ModuleList(Edited(call, 100) for _ in range(4))
        return model.requires_grad_(False)

    def script(run):
        before = sim.d2h_bytes()
        for number in range(6):
            run.loss(number)
        homeward.append(sim.d2h_bytes() - before)

    homeward = []
    assert_trains_equally(build, script, setting)
    assert homeward == [0, 0]


@over(FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_element_type_trains_exactly(sim, setting, dtype):
    @built
    def build():
        return Net().to(dtype)

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        for number in range(4):
            for each in range(2):
                inputs = run.batch(10 * number + each).to(dtype)
                run.backward(run.model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_equally(build, script, setting)


@over(FEW)
def test_gradients_that_lie_unlike_their_weights_are_exact(sim, setting):
    """A hook makes gradients of another layout, and of a broadcast tensor."""

    def script(run):
        for block in run.model.blocks:
            block.up.weight.register_hook(lambda grad: grad.t().contiguous().t())
            block.down.weight.register_hook(lambda grad: grad.sum().expand_as(grad))
        train(run)

    @built
    def build():
        return Net()

    assert_trains_equally(build, script, setting)


@over([Setting("cpu", "layers", "smallest")])  # the simulated device has none
def test_sparse_gradients_of_a_table_are_exact(sim, setting):
    @built
    def build():
        model = Net(depth=2)
        model.entry = nn.Sequential(nn.Linear(WIDTH, WIDTH), Looked())
        model.entry[1].inner.sparse = True
        return model

    def script(run):
        for number in range(3):
            loss = run.loss(number)
            loss.backward()
            grad = run.model.entry[1].inner.weight.grad
            run.note("gradient", grad.to_dense())
        run.model.zero_grad()

    assert_trains_equally(build, script, setting)
