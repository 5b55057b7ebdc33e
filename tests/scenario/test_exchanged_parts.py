"""Parts of a streamed model are exchanged between passes: what is left stays whole."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import stagehand
from architectures import assert_bitwise_equal
from training import (
    FEW,
    SOME,
    WIDTH,
    Net,
    Setting,
    assert_trains_equally,
    built,
    end,
    over,
    start,
)
from training import net as small_net

PLACES = [Setting("hpu", "layers", "third"), Setting("cpu", "layers", "third")]


@pytest.mark.parametrize("way", ["state dict", "deep copy", "pickle"])
def test_a_model_is_saved_whole_where_what_has_joined_it_has_no_room(sim, way):
    """The next pass says so; a checkpoint that is written before it was lost."""
    run = start(small_net, FEW[0])
    run.loss()
    wide = nn.Linear(64 * WIDTH, WIDTH)
    run.model.extra = wide
    if way == "state dict":
        state = run.model.state_dict()
    elif way == "deep copy":
        state = deepcopy(run.model).state_dict()
    else:
        state = pickle.loads(pickle.dumps(run.model)).state_dict()
    plain = small_net()
    plain.extra = wide
    assert_bitwise_equal(state, plain.state_dict(), way)
    with pytest.raises(stagehand.StagehandOOMError, match="have joined"):
        run.loss()
    run.runtime.shutdown()


@over(PLACES)
def test_a_pass_with_what_joined_while_a_block_is_in_use_by_hand_is_refused(
    sim, setting
):
    """PyTorch told of two devices, and not of why."""
    run = start(small_net, setting)
    run.loss()
    run.runtime.set_budget(4 * run.budget)
    (block,) = (b for b in run.runtime.block_ids if b.startswith("head"))
    run.runtime.before_block(block)
    run.model.blocks.append(Net(depth=1).blocks[0])
    if setting.place == "cpu":
        run.loss()
    else:
        named = f"6 tensors have joined Net since it streams, while block '{block}' is"
        with pytest.raises(stagehand.ConfigError, match=named):
            run.loss()
    run.runtime.after_block(block)
    output, plain = run.model(run.batch()), deepcopy(run.model).to(run.place)
    assert_bitwise_equal(output, plain(run.batch()), "output")
    run.runtime.shutdown()


@over(PLACES)
def test_a_weight_that_joined_and_leaves_takes_its_gradient_along(sim, setting):
    """It was home on the host, and an optimizer found its gradient on the device."""

    def script(run):
        run.loss().backward()
        with torch.no_grad():
            added = Net(depth=1).blocks[0]
            for number, parameter in enumerate(added.parameters()):
                parameter.copy_(torch.full(parameter.shape, 0.1 * number))
        if run.runtime is None:
            added.to(run.place)
        else:
            run.runtime.set_budget(4 * run.budget)
            run.budget *= 4
        run.model.blocks.append(added)
        run.backward(run.loss())
        del run.model.blocks[-1]
        run.backward(run.loss())
        assert all(p.grad.device == p.device for p in added.parameters())
        torch.optim.SGD(added.parameters(), lr=0.5).step()
        run.note("what has left", list(added.parameters()))

    assert_trains_equally(small_net, script, setting)


@over(PLACES)
@pytest.mark.parametrize("end", ["parked", "shut down"])
def test_weights_that_were_computed_from_others_come_home_before_any_pass(
    sim, setting, end
):
    """Nobody had seen them, and a model that was exported then lay on two devices."""
    run = start(small_net, setting)
    run.runtime.set_budget(4 * run.budget)
    linears = [run.model.entry, run.model.blocks[1].up]
    for linear in linears:
        parametrizations.weight_norm(linear)
    run.loss().backward()
    for linear in linears:
        parametrize.remove_parametrizations(linear, "weight")
    if end == "parked":
        run.model.to("cpu")
    else:
        run.runtime.shutdown()
    assert {p.device.type for p in run.model.parameters()} == {"cpu"}
    place = "cpu" if end == "shut down" else setting.place
    run.model(run.batch().to(place)).sum().backward()
    run.runtime.shutdown()


@over(SOME)
@pytest.mark.parametrize("how", ["each other", "new ones", "streamed anew", "joined"])
def test_swapped_weights_get_their_gradients(sim, setting, how):
    """`swap_tensors` leaves hooks with what is swapped: gradients were lost."""

    def script(run):
        if how == "joined":
            run.model.head.weight = nn.Parameter(torch.eye(WIDTH, device=run.place))
            if run.runtime is not None:
                run.budget *= 4
                run.runtime.set_budget(run.budget)
        run.backward(run.loss())
        if how == "joined" and run.runtime is not None:
            run.model.to("cpu")  # to have both on one side
        first, second = run.model.entry.weight, run.model.head.weight
        if how == "new ones":
            value = torch.eye(WIDTH, device=first.device)
            second = nn.Parameter(value)
        torch.utils.swap_tensors(first, second)
        if how == "streamed anew" and run.runtime is not None:
            run.runtime.shutdown()
            run.runtime = setting.stream(run.model, run.budget)
        for _ in range(2):
            run.model.zero_grad()
            for number in range(2):
                run.backward(run.loss(number))

    assert_trains_equally(small_net, script, setting, abandoned=True)


@over(PLACES)
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_a_block_joins_a_list_from_which_another_one_has_just_gone(sim, setting, kind):
    """`del` gives a list other books, and what joined later was left on the host."""

    def make():
        model = Net()
        if kind is nn.Sequential:
            model.blocks = nn.Sequential(*model.blocks)
        return model

    def script(run):
        if run.runtime is not None:
            run.budget *= 4
            run.runtime.set_budget(run.budget)
        run.backward(run.loss())
        for scale in (0.1, 0.2):
            added = Net(depth=1).blocks[0].to("cpu" if run.runtime else run.place)
            with torch.no_grad():
                for number, parameter in enumerate(added.parameters()):
                    parameter.fill_(scale * number)
            run.model.blocks.append(added)
            if scale == 0.1:
                del run.model.blocks[-1]
        run.backward(run.loss())

    assert_trains_equally(built(make), script, setting)


@built
def tied_net():
    model = Net()
    model.head.weight = model.entry.weight
    return model


@over(PLACES)
@pytest.mark.parametrize("loaded", ["both", "the first", "the second", "alike"])
def test_tied_weights_that_are_assigned_different_values_have_these(
    sim, setting, loaded
):
    """The later of two values was in both places, in silence."""
    run, plain = start(tied_net, setting), tied_net()
    run.runtime.set_budget(4 * run.budget)
    run.loss()
    first = torch.eye(WIDTH)
    second = first if loaded == "alike" else 2 * first
    state = {"entry.weight": first, "head.weight": second}
    for name, missing in (("the first", "head.weight"), ("the second", "entry.weight")):
        if loaded == name:
            del state[missing]
    for model in (run.model, plain):
        given = {name: value.clone() for name, value in state.items()}
        model.load_state_dict(given, strict=False, assign=True)
    assert_bitwise_equal(run.model.state_dict(), plain.state_dict(), loaded)
    expected = plain.to(setting.place)(run.batch())
    for _ in range(2):
        assert_bitwise_equal(run.model(run.batch()), expected, loaded)
    tied = run.model.head.weight is run.model.entry.weight
    assert tied == (loaded == "alike")
    run.runtime.shutdown()


@built
def deep_net():
    return Net(depth=8)


@over(PLACES)
def test_under_autocast_a_weight_that_was_tied_meanwhile_has_its_cast(sim, setting):
    """On the host nobody looked for reads elsewhere: the cast there had no memory."""

    def script(run):
        for number in range(3):
            run.model.zero_grad()
            with torch.autocast(run.place, dtype=torch.bfloat16):
                output = run.model.entry(run.batch(number))
                for block in run.model.blocks[:3]:
                    output = block.down(block.up(output))
                loss = run.model.head(output).float().square().mean()
            loss.backward()
            run.note("loss", loss)
            run.look()
            if number == 0:
                run.model.head.weight = run.model.entry.weight

    assert_trains_equally(deep_net, script, setting)


@over(SOME)
def test_a_buffer_that_joined_may_be_assigned_by_a_state_dict(sim, setting):
    """Nobody looked at buffers where their number was the same: it stayed away."""

    def script(run):
        if run.runtime is not None:
            run.runtime.set_budget(4 * run.budget)
            run.budget *= 4
        part = run.model.blocks[1].up
        prune.l1_unstructured(part, "weight", 0.3)
        part.to(run.place)
        run.note("loss", run.loss())
        state = {
            name: values if run.runtime is None else values.cpu().clone()
            for name, values in run.model.state_dict().items()
        }
        mask = state["blocks.1.up.weight_mask"]
        state["blocks.1.up.weight_mask"] = 1 - mask
        run.model.load_state_dict(state, assign=True)
        run.backward(run.loss())

    assert_trains_equally(small_net, script, setting)


@pytest.mark.filterwarnings("ignore:.*are read by modules")
def test_what_is_read_elsewhere_has_room_in_the_budget_beyond_the_watermarks(sim):
    """They lowered what weights have, in each pass, below what the refusal named."""
    run = start(small_net, FEW[1])
    blocks = run.model.blocks
    blocks[0].up = blocks[1].up
    with pytest.raises(stagehand.StagehandOOMError, match="while 'blocks") as caught:
        run.loss()
    needed = run.budget = caught.value.needed_bytes
    run.runtime.set_budget(needed)
    plain = small_net()
    plain.blocks[0].up = plain.blocks[1].up
    for number in range(3):
        with torch.no_grad():
            output = run.model(run.batch(number))
            expected = plain.to("hpu")(run.batch(number).to("hpu"))
        assert_bitwise_equal(output, expected, "output")
    end(run)
