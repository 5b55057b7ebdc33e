"""Finding: how a model is divided into blocks, and what stays."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing._internal.two_tensor import TwoTensor

from architectures import ARCHITECTURES
from counting import lines_run
from stagehand.core.layout import ALIGNMENT
from stagehand.errors import ConfigError
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.finding import find_blocks, find_layers
from stagehand.units import MIB, rounded_up

KB = 1024
LARGE = 10 * MIB


def linear(kilobytes=4):
    """A layer of one square weight."""
    width = int((kilobytes * KB / 4) ** 0.5)
    return nn.Linear(width, width, bias=False)


def names(finding):
    return [group.name for group in finding.streamed]


def of_group(group):
    return sorted(group.tensors)


def assert_each_tensor_is_once(model, finding):
    groups = [*finding.streamed, finding.rest]
    groups += {id(g): g for _, g in finding.gathered if not g.sites}.values()
    placed = [id(tensor) for group in groups for tensor in group.tensors.values()]
    assert len(set(placed)) == len(placed)
    assert set(placed) == {id(t) for t in (*model.parameters(), *model.buffers())}


class Scaled(nn.Module):
    """Owns a parameter, and modules that own others."""

    def __init__(self, kilobytes=4):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(kilobytes * KB // 4))
        self.first = linear(kilobytes)
        self.second = linear(kilobytes)

    def forward(self, x):
        return self.second(self.first(x))


def two() -> torch.Tensor:
    """Return what is made of several tensors, and no plain memory."""
    return TwoTensor(torch.ones(64, 64), torch.ones(64, 64))


# -------------------------------------------------------------------------- block mode


def test_each_module_that_matches_is_a_block_and_the_rest_stays():
    model = nn.Sequential(linear(), nn.ModuleList([Scaled(), Scaled()]), linear())
    finding = find_blocks(model, r"^1\.\d+$")
    assert names(finding) == ["1.0", "1.1"]
    assert of_group(finding.streamed[0]) == ["first.weight", "scale", "second.weight"]
    assert [g.sites for g in finding.streamed] == [[model[1][0]], [model[1][1]]]
    assert of_group(finding.rest) == ["0.weight", "2.weight"]
    assert finding.gathered == []
    assert_each_tensor_is_once(model, finding)


@pytest.mark.parametrize("pattern", ["layer", r"layers\.\d+", "layers|inner"])
def test_of_nested_matches_the_outermost_counts(pattern):
    block = nn.ModuleDict({"inner": linear(), "layers": nn.ModuleList([linear()])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block, linear()])})
    finding = find_blocks(model, pattern)
    outermost = ["layers"] if "d" not in pattern else ["layers.0", "layers.1"]
    assert names(finding) == outermost
    assert_each_tensor_is_once(model, finding)


def test_names_that_only_begin_alike_are_not_nested():
    model = nn.ModuleDict({"layer1": Scaled(), "layer10": Scaled()})
    assert names(find_blocks(model, "^layer")) == ["layer1", "layer10"]


@pytest.mark.parametrize("attribute", ["_no_split_modules", "_repeated_blocks"])
@pytest.mark.parametrize("where", ["root", "below"])
def test_without_a_pattern_the_models_own_metadata_tells_the_blocks(attribute, where):
    inner = nn.Sequential(linear(), Scaled(), Scaled())
    model = nn.Sequential(inner, linear())
    setattr(model if where == "root" else inner, attribute, ["Scaled"])
    assert names(find_blocks(model, None)) == ["0.1", "0.2"]


def test_metadata_that_is_none_is_no_metadata():
    model = nn.Sequential(Scaled())
    model._no_split_modules = None
    model._repeated_blocks = ["Scaled"]
    assert names(find_blocks(model, None)) == ["0"]


@pytest.mark.parametrize(
    ("pattern", "start"),
    [
        ("decoder", "block_pattern 'decoder' matches no module of ModuleDict; pass"),
        (None, "ModuleDict does not say which of its modules are blocks; pass"),
    ],
)
def test_without_a_match_the_error_lists_patterns_that_would_match(pattern, start):
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList([linear(), linear()]),
            "a.b".replace(".", "_"): nn.Sequential(linear(), linear()),
            "single": nn.ModuleList([linear()]),
        }
    )
    with pytest.raises(ConfigError) as caught:
        find_blocks(model, pattern)
    text = str(caught.value)
    assert text.startswith(start)
    candidates = text.partition("block_pattern=")[2].split(" or ")
    assert candidates == [repr(r"^layers\.\d+$"), repr(r"^a_b\.\d+$")]
    for candidate in candidates:
        assert len(find_blocks(model, eval(candidate)).streamed) == 2


def test_without_a_match_patterns_fit_the_names_of_a_sequences_parts():
    named = OrderedDict(first=linear(), layer_2=linear())
    model = nn.ModuleDict({"layers": nn.Sequential(named)})
    with pytest.raises(ConfigError) as caught:
        find_blocks(model, "decoder")
    candidate = eval(str(caught.value).partition("block_pattern=")[2])
    assert names(find_blocks(model, candidate)) == ["layers.first", "layers.layer_2"]


def test_without_a_match_a_bare_list_is_a_candidate_too():
    with pytest.raises(ConfigError, match=r"pass block_pattern='\^\\\\d\+\$'$"):
        find_blocks(nn.Sequential(linear(), linear()), "x")


def test_without_a_match_or_a_candidate_layer_mode_is_named():
    with pytest.raises(ConfigError, match=r"; use stagehand\.layer\(\)$"):
        find_blocks(Scaled(), "x")


def test_pattern_that_is_no_regular_expression_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression: missing"):
        find_blocks(nn.Sequential(linear()), "(")


def test_parameter_of_two_blocks_or_of_a_block_and_the_rest_stays():
    model = nn.Sequential(Scaled(), Scaled(), Scaled(), linear())
    model[1].first.weight = model[0].first.weight
    model[3].weight = model[2].second.weight
    finding = find_blocks(model, "^[012]$")
    assert of_group(finding.rest) == ["0.first.weight", "2.second.weight"]
    assert [of_group(g) for g in finding.streamed] == [
        ["scale", "second.weight"],
        ["scale", "second.weight"],
        ["first.weight", "scale"],
    ]
    assert_each_tensor_is_once(model, finding)


def test_parameters_of_two_blocks_that_share_memory_stay():
    """Streamed apart, a change of one would no longer be seen in the other."""
    model = nn.Sequential(Scaled(), Scaled())
    model[1].first.weight.data = model[0].first.weight.data
    finding = find_blocks(model, r"^\d$")
    assert of_group(finding.rest) == ["0.first.weight", "1.first.weight"]
    assert_each_tensor_is_once(model, finding)


def test_block_that_stands_in_two_places_is_one_block_that_streams():
    block = Scaled()
    model = nn.Sequential(block, linear(), block)
    finding = find_blocks(model, "^[02]$")
    assert names(finding) == ["0"]
    assert of_group(finding.streamed[0]) == ["first.weight", "scale", "second.weight"]
    assert_each_tensor_is_once(model, finding)


def test_module_inside_two_blocks_stays():
    model = nn.Sequential(Scaled(), Scaled())
    model[1].first = model[0].first
    finding = find_blocks(model, r"^\d$")
    assert of_group(finding.rest) == ["0.first.weight"]


def test_block_inside_another_block_stays():
    inner = Scaled()
    model = nn.ModuleDict({"b": inner, "a": nn.Sequential(inner, linear())})
    finding = find_blocks(model, "^[ab]$")
    assert of_group(finding.rest) == ["b.first.weight", "b.scale", "b.second.weight"]
    assert names(finding) == ["a"]


def test_buffers_and_what_is_not_plain_memory_stay():
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(4))
    model[0].scale = nn.Parameter(two())
    finding = find_blocks(model, r"^\d$")
    assert of_group(finding.rest) == [
        *("0.scale", "1.num_batches_tracked", "1.running_mean", "1.running_var"),
    ]
    assert [of_group(g) for g in finding.streamed] == [
        ["first.weight", "second.weight"],
        ["bias", "weight"],
    ]


def test_the_parts_of_a_block_that_is_never_called_are_its_sites():
    """Lists and dicts of layers have no forward: a hook on them would not be called."""
    shared = linear()
    blocks = [
        nn.ModuleList(
            [nn.ModuleDict({"a": Scaled(), "b": linear()}), nn.ReLU(), shared]
        )
        for _ in range(2)
    ]
    finding = find_blocks(nn.ModuleList(blocks), r"^\d$")
    assert names(finding) == ["0", "1"]
    assert [g.sites for g in finding.streamed] == [[b[0].a, b[0].b] for b in blocks]
    assert of_group(finding.rest) == ["0.2.weight"]


def test_block_with_a_part_that_takes_no_hooks_is_its_own_site():
    block = nn.ModuleList([linear(), torch.jit.script(linear())])
    [group] = find_blocks(nn.ModuleList([block]), r"^\d$").streamed
    assert group.sites == [block]


def test_block_of_bare_parameters_is_its_own_site():
    blocks = [nn.ParameterList([torch.ones(4)]) for _ in range(2)]
    finding = find_blocks(nn.ModuleList(blocks), r"^\d$")
    assert [g.sites for g in finding.streamed] == [[block] for block in blocks]


def test_match_without_parameters_is_no_block():
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    assert names(find_blocks(model, r"^\d$")) == ["0", "2"]


def test_finding_ten_times_the_blocks_takes_about_ten_times_as_long():
    def lines(number):
        model = nn.Sequential(*(nn.Sequential(nn.ReLU()) for _ in range(number)))
        model[0][0].weight = nn.Parameter(torch.zeros(1))
        return lines_run(find_blocks, model, r"^\d+$")

    assert lines(2_000) < 12 * lines(200)


# -------------------------------------------------------------------------- layer mode

KINDS = {
    "Linear": lambda: nn.Linear(32, 32),
    "Bilinear": lambda: nn.Bilinear(8, 8, 16),
    "Conv1d": lambda: nn.Conv1d(16, 16, 4),
    "Conv2d": lambda: nn.Conv2d(8, 8, 4),
    "Conv3d": lambda: nn.Conv3d(4, 4, 4),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(16, 16, 4),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(8, 8, 4),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(4, 4, 4),
    "Embedding": lambda: nn.Embedding(64, 16),
    "EmbeddingBag": lambda: nn.EmbeddingBag(64, 16),
    "LSTM": lambda: nn.LSTM(8, 8, num_layers=2),
    "GRUCell": lambda: nn.GRUCell(16, 16),
    "LayerNorm": lambda: nn.LayerNorm(1024),
    "MultiheadAttention": lambda: nn.MultiheadAttention(16, 2),
    "experts": lambda: with_parameters(up=(4, 16, 16), down=(4, 16, 16)),
    "custom": lambda: with_parameters(anything=(1024,)),
}


def with_parameters(**shapes):
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def bytes_of(model):
    return sum(map(tensor_bytes, (*model.parameters(), *model.buffers())))


def assert_both_children_are_blocks(model):
    """Each with all of its parameters, and as the only site."""
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert names(finding) == ["0", "1"]
    for number, group in enumerate(finding.streamed):
        assert group.sites == [model[number]]
        own = {f"{number}.{name}" for name, _ in model[number].named_parameters()}
        assert set(group.tensors) == own
    assert_each_tensor_is_once(model, finding)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_streams(kind):
    model = nn.Sequential(KINDS[kind](), KINDS[kind]())
    assert_both_children_are_blocks(model)


class Listing(nn.Module):
    """Reads a list of parameters, or a dictionary of lists, and maybe calls a layer."""

    def __init__(self, weights, layer=None):
        super().__init__()
        self.weights = weights
        self.layer = layer

    def forward(self, x):
        return x


LISTS = {
    "list": lambda: nn.ParameterList(torch.zeros(32, 32) for _ in range(3)),
    "dict": lambda: nn.ParameterDict({"a": torch.zeros(32, 32)}),
    "lists in a dict": lambda: nn.ModuleDict(
        {"a": LISTS["list"](), "b": LISTS["dict"]()}
    ),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_parameters_are_blocks_of_the_module_that_reads_them(kind):
    model = nn.Sequential(Listing(LISTS[kind]()), Listing(LISTS[kind]()))
    assert_both_children_are_blocks(model)


def test_lists_of_parameters_beside_layers_need_not_stay():
    """In use around a layer they would; their reads are found as others' are."""
    model = nn.Sequential(*(Listing(LISTS["list"](), linear()) for _ in range(2)))
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert names(finding) == ["0.weights", "0.layer", "1.weights", "1.layer"]
    assert_each_tensor_is_once(model, finding)


def test_list_of_parameters_that_nobody_is_around_is_a_block():
    model = nn.ModuleList([LISTS["list"](), LISTS["dict"]()])
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert [group.sites for group in finding.streamed] == [[part] for part in model]


def test_modules_that_share_a_weight_are_one_block_in_use_with_each_of_them():
    model = nn.Sequential(linear(), linear(), linear())
    model[2].weight = model[0].weight
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert names(finding) == ["0", "1"]
    assert finding.streamed[0].sites == [model[0], model[2]]
    assert_each_tensor_is_once(model, finding)


def test_modules_that_share_memory_are_one_block():
    model = nn.Sequential(nn.Linear(32, 32), linear(), nn.Linear(32, 16))
    model[2].weight.data = model[0].weight.data[:16]
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert finding.streamed[0].sites == [model[0], model[2]]
    assert of_group(finding.streamed[0]) == [
        *("0.bias", "0.weight", "2.bias", "2.weight"),
    ]
    assert_each_tensor_is_once(model, finding)


def test_chain_of_shared_weights_is_one_block():
    """The third module connects the first two, and the fourth comes after that."""
    links = [with_parameters(a=(1024,), b=(1024,)) for _ in range(4)]
    first, second, third, fourth = links
    third.a, third.b, fourth.a = first.a, second.b, first.a
    model = nn.ModuleList([*links, linear()])
    finding = find_layers(model, budget_bytes=bytes_of(model))
    shared, _ = finding.streamed
    assert set(shared.sites) == set(links)
    assert_each_tensor_is_once(model, finding)


def test_empty_parameters_are_not_taken_for_shared_memory():
    model = nn.Sequential(*(with_parameters(a=(1024,), none=(0, 4)) for _ in range(3)))
    assert names(find_layers(model, budget_bytes=bytes_of(model))) == ["0", "1", "2"]


def test_parameters_without_values_are_not_taken_for_shared_memory():
    with torch.device("meta"):
        model = nn.Sequential(linear(), linear())
    assert names(find_layers(model, budget_bytes=bytes_of(model))) == ["0", "1"]


def test_module_that_reads_its_childrens_parameters_is_one_block_with_them():
    attention = nn.MultiheadAttention(16, 2)
    normed = weight_norm(nn.Linear(32, 32))
    model = nn.Sequential(attention, normed, Scaled())
    finding = find_layers(model, budget_bytes=bytes_of(model), opaque=[Scaled])
    assert [group.sites for group in finding.streamed] == [[module] for module in model]
    assert "0.out_proj.weight" in finding.streamed[0].tensors
    assert "1.parametrizations.weight.original1" in finding.streamed[1].tensors
    assert of_group(finding.streamed[2]) == [
        *("2.first.weight", "2.scale", "2.second.weight"),
    ]


@pytest.mark.parametrize(
    "model",
    [nn.MultiheadAttention(16, 2), weight_norm(nn.Linear(32, 32)), Scaled()],
    ids=lambda model: type(model).__name__,
)
def test_model_that_reads_its_childrens_parameters_is_one_block(model):
    budget = bytes_of(model)
    finding = find_layers(model, budget_bytes=budget, opaque=[Scaled])
    assert [group.sites for group in finding.streamed] == [[model]]
    assert_each_tensor_is_once(model, finding)


def test_what_is_in_use_around_other_blocks_stays():
    model = nn.Sequential(Scaled(), linear())
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert names(finding) == ["0.first", "0.second", "1"]
    assert of_group(finding.rest) == ["0.scale"]


@pytest.mark.parametrize("tensor", [two(), torch.ones(64, 64).to_sparse()])
def test_what_is_not_plain_memory_stays(tensor):
    model = nn.Sequential(linear(), linear())
    model[0].weight = nn.Parameter(tensor)
    finding = find_layers(model, budget_bytes=bytes_of(model))
    assert names(finding) == ["1"]
    assert of_group(finding.rest) == ["0.weight"]


def test_smallest_parameters_stay_up_to_a_sixteenth_of_the_budget():
    model = nn.Sequential(linear(4), linear(1), linear(1), linear(4), linear(1))
    finding = find_layers(model, budget_bytes=48 * KB)
    assert of_group(finding.rest) == ["1.weight", "2.weight", "4.weight"]
    finding = find_layers(model, budget_bytes=47 * KB)  # a little less than 3 of 1 KB
    assert of_group(finding.rest) == ["1.weight", "2.weight"]


def test_parameters_of_more_than_a_mebibyte_do_not_stay_however_large_the_budget():
    with torch.device("meta"):
        model = nn.Sequential(linear(1024), linear(2048))
    finding = find_layers(model, budget_bytes=1000 * MIB)
    assert of_group(finding.rest) == ["0.weight"]


@pytest.mark.parametrize("trained", [1, 2, 3])
def test_adapters_stay_where_they_are_few_however_large_they_are(trained):
    with torch.device("meta"):
        layers = [linear(8192) for _ in range(4)]
        adapters = [linear(2048) for _ in range(trained)]
        model = nn.Sequential(*layers, *adapters).requires_grad_(False)
    model[4:].requires_grad_(True)
    finding = find_layers(model, budget_bytes=64 * MIB)  # a sixteenth are two
    stay = [f"{4 + number}.weight" for number in range(trained)]
    assert of_group(finding.rest) == (stay if trained <= 2 else [])
    model[0].requires_grad_(True)  # more than an eighth of all
    finding = find_layers(model, budget_bytes=640 * MIB)
    assert of_group(finding.rest) == []


def test_small_parameters_count_with_what_they_take_in_their_image():
    """Each begins at a multiple of 256 bytes: norms of 32 take eight times as many."""
    norms = [nn.LayerNorm(8, bias=False) for _ in range(16)]
    model = nn.Sequential(*norms, linear())
    finding = find_layers(model, budget_bytes=16 * 8 * ALIGNMENT)
    assert of_group(finding.rest) == sorted(f"{i}.weight" for i in range(8))
    assert_each_tensor_is_once(model, finding)


def test_small_neighbours_are_joined_inside_one_repeated_part_only():
    layers = [nn.ModuleDict({name: linear() for name in "abc"}) for _ in range(2)]
    experts = nn.ModuleList([linear(), linear()])
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "experts": experts})
    finding = find_layers(model, budget_bytes=16 * 8 * KB + 1)
    # Two small ones stay: 1/16 of the budget.
    assert of_group(finding.rest) == ["layers.0.a.weight", "layers.0.b.weight"]
    assert names(finding) == [
        *("layers.0.c", "layers.1.a", "layers.1.c", "experts.0", "experts.1"),
    ]
    joined = finding.streamed[1]
    assert joined.sites == [layers[1]["a"], layers[1]["b"]]
    assert of_group(joined) == ["layers.1.a.weight", "layers.1.b.weight"]
    assert_each_tensor_is_once(model, finding)


def test_neighbours_are_joined_up_to_32_mib_at_most():
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*(linear(12 * KB) for _ in range(4))))
    finding = find_layers(model, budget_bytes=10_000 * MIB)
    sizes = [group.nbytes / MIB for group in finding.streamed]
    assert [round(size) for size in sizes] == [12] * 4  # each a part of its own
    with torch.device("meta"):
        model = nn.ModuleDict({name: linear(12 * KB) for name in "abcd"})
    finding = find_layers(model, budget_bytes=10_000 * MIB)
    sizes = [group.nbytes / MIB for group in finding.streamed]
    assert [round(size) for size in sizes] == [24, 24]


def test_tables_stay_on_the_host_only_when_the_weights_exceed_the_budget():
    model = nn.Sequential(nn.Embedding(64, 16), linear(), linear())
    assert find_layers(model, budget_bytes=bytes_of(model)).gathered == []
    finding = find_layers(model, budget_bytes=bytes_of(model) - 1)
    [(table, group)] = finding.gathered
    assert table is model[0]
    assert (of_group(group), group.sites) == (["0.weight"], [])
    assert names(finding) == ["1", "2"]
    assert_each_tensor_is_once(model, finding)


def test_table_whose_weight_others_use_is_gathered_and_streams_to_them():
    model = nn.Sequential(nn.Embedding(64, 16), linear(), nn.Linear(16, 64))
    model[2].weight = model[0].weight
    finding = find_layers(model, budget_bytes=8 * KB)
    [(table, group)] = finding.gathered
    assert table is model[0]
    assert group.sites == [model[2]]
    assert names(finding) == ["0", "1"]
    assert finding.streamed[0].sites == [model[2]]
    assert_each_tensor_is_once(model, finding)


@pytest.mark.parametrize("fits", [False, True])
def test_module_that_names_a_parameter_of_a_part_once_more_is_no_site_of_it(fits):
    """As heads of BERTs do: the bias is their decoder's, whose weight is the table."""
    head = nn.ModuleDict({"dense": linear(1), "decoder": nn.Linear(16, 64)})
    head.bias = head["decoder"].bias
    model = nn.Sequential(nn.Embedding(64, 16), head, linear())
    head["decoder"].weight = model[0].weight
    finding = find_layers(model, budget_bytes=bytes_of(model) - (not fits))
    assert [table for table, _ in finding.gathered] == ([] if fits else [model[0]])
    assert names(finding) == ["1", "1.dense", "2"]
    assert of_group(finding.streamed[0]) == ["0.weight", "1.bias"]
    sites = [model[0], head["decoder"]] if fits else [head["decoder"]]
    assert finding.streamed[0].sites == sites
    assert_each_tensor_is_once(model, finding)


def test_opaque_module_with_a_part_that_others_call_reads_its_own_part_itself():
    shared = linear()
    opaque = nn.ModuleDict({"own": linear(), "shared": shared})
    model = nn.Sequential(shared, opaque, linear())
    budget = bytes_of(model)
    finding = find_layers(model, budget_bytes=budget, opaque=[nn.ModuleDict])
    assert names(finding) == ["0", "2"]
    assert of_group(finding.rest) == ["1.own.weight"]
    assert_each_tensor_is_once(model, finding)


def test_table_that_is_in_use_around_other_blocks_stays_and_is_read_there():
    model = nn.Sequential(nn.Embedding(64, 16), Scaled(), linear())
    model[1].table = model[0].weight
    finding = find_layers(model, budget_bytes=bytes_of(model) - 1)
    assert finding.gathered == []
    assert of_group(finding.rest) == ["0.weight", "1.scale"]
    assert_each_tensor_is_once(model, finding)


def test_small_table_is_not_worth_looking_up_on_the_host():
    model = nn.Sequential(nn.Embedding(16, 16), linear(16), linear(16))
    assert find_layers(model, budget_bytes=17 * KB).gathered == []


@pytest.mark.parametrize(
    "special", ["max_norm", "sparse", "parametrized", "second parameter"]
)
def test_table_whose_lookup_does_more_than_look_up_streams(special):
    options = {"max_norm": {"max_norm": 1.0}, "sparse": {"sparse": True}}
    table = nn.Embedding(64, 16, **options.get(special, {}))
    if special == "parametrized":
        weight_norm(table)
    elif special == "second parameter":
        table.scale = nn.Parameter(torch.ones(16))
    model = nn.Sequential(table, linear(), linear())
    finding = find_layers(model, budget_bytes=9 * KB)
    assert finding.gathered == []
    assert names(finding)[0] == "0"


def divided_within(model, budget):
    """The division for a budget that has to have room for it."""

    def fits(finding):
        stays, *away = (
            sum(rounded_up(tensor_bytes(t), ALIGNMENT) for t in group.tensors.values())
            for group in (finding.rest, *finding.streamed)
        )
        return stays + max(away, default=0) <= budget

    return find_layers(model, budget_bytes=budget, fits=fits)


def test_budget_too_small_for_comforts_gives_the_finest_division():
    """So the smallest budget that can work is the same whatever was asked for."""
    layers = [nn.Sequential(*(linear(1) for _ in range(4))) for _ in range(3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(512))
    needed = 2048 + 2048 + 256 + 2 * KB + 2 * KB  # buffers, and the largest block
    finest = [names(divided_within(model, n)) for n in (1, KB, needed - 1)]
    assert finest == [finest[0]] * 3
    assert len(finest[0]) == 13
    assert len(names(divided_within(model, 100 * KB))) < 13


def test_comforts_that_would_not_leave_room_for_the_largest_block_are_left_out():
    model = nn.Sequential(linear(62), *(linear(1) for _ in range(4)))
    sizes = [group.nbytes for group in divided_within(model, 64 * KB).streamed]
    assert sizes == [tensor_bytes(parameter) for parameter in model.parameters()]
    assert len(names(divided_within(model, 68 * KB))) == 1


REAL = {
    *("llama", "mixtral", "gpt2", "t5", "whisper", "unet_2d", "vit", "mamba"),
    "bert_head",
}


@pytest.mark.parametrize(
    "architecture",
    [a for a in ARCHITECTURES if a.name in REAL],
    ids=lambda a: a.name,
)
def test_every_tensor_of_a_real_model_has_one_place(architecture):
    model = architecture.build()
    total = bytes_of(model)
    for budget in (0, total // 8, total // 2, total, 10 * total):
        finding = find_layers(model, budget_bytes=budget)
        assert_each_tensor_is_once(model, finding)
        assert len({id(g) for g in finding.streamed}) == len(finding.streamed)
    finding = find_blocks(model, architecture.block_pattern)
    assert_each_tensor_is_once(model, finding)
    if any(getattr(m, "_no_split_modules", None) for m in model.modules()):
        assert set(names(find_blocks(model, None))) >= set(names(finding))


@pytest.mark.parametrize(("width", "streams"), [(4, False), (64, True)])
def test_adapters_in_a_frozen_block_stay_on_the_device(width, streams):
    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(width, 64, bias=False))
    block[0].requires_grad_(False)
    model = nn.Sequential(block)
    finding = find_blocks(model, r"^0$")
    found = {id(t) for t in finding.streamed[0].tensors.values()}
    assert (id(block[1].weight) in found) is streams
    assert id(block[0].weight) in found
    rest = {id(t) for t in finding.rest.tensors.values()}
    assert (id(block[1].weight) in rest) is not streams


def test_tensors_of_several_groups_that_have_bytes_in_common_stay():
    model = nn.Sequential(*(linear() for _ in range(5)))
    model[1].register_buffer("part", model[1].weight.detach()[8:])
    whole = torch.zeros(40, 32)
    model[2].weight.data, model[3].weight.data = whole[:32], whole[8:]
    for finding in (
        find_blocks(model, r"^\d$", on_host=True),
        find_layers(model, budget_bytes=0, on_host=True),
    ):
        assert names(finding) == ["0", "4"]
        kept = ["1.part", "1.weight", "2.weight", "3.weight"]
        assert of_group(finding.rest) == kept
        assert_each_tensor_is_once(model, finding)
