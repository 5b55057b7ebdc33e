"""How a model is divided into blocks: by a pattern, or layer by layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.jit import ScriptModule

from stagehand.core.belongings import places_of_belongings
from stagehand.core.layout import ALIGNMENT, overlapping, spanned_bytes
from stagehand.errors import ConfigError
from stagehand.residency.blocks import can_stream, tensor_bytes
from stagehand.units import MIB, format_at_least, rounded_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "Finding",
    "Group",
    "find_blocks",
    "find_layers",
    "how_to_raise",
    "is_called",
    "named_tensors",
]

_COPY_EFFICIENT_BYTES = 32 * MIB  # a larger copy is no faster on any link we know
_SMALL_BYTES = MIB  # smaller ones stay on the device as long as they are few
_ADAPTER_SHARE = 8  # adapters are at most this part of what they adapt
_SHARE = 16  # small parameters, adapters, one coalesced block: 1/16 of the budget each
_COMFORTS = 3  # these
_LISTS = (nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True)
class Group:
    """What will become one block.

    `sites` are the modules during whose forward the tensors must be there.
    """

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sites: list[nn.Module] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor_bytes(t) for t in self.tensors.values())


@dataclass(slots=True)
class Finding:
    """How a model is divided.

    `streamed` come and go, `rest` stays on the device, `gathered` tables stay on the
    host and only the rows that are looked up cross the link.
    """

    streamed: list[Group]
    rest: Group
    gathered: list[tuple[nn.Module, Group]]


def find_blocks(
    model: nn.Module, pattern: str | None, *, on_host: bool = False
) -> Finding:
    """Divide a model for block mode: one block for each module that matches.

    Of nested matches the outermost counts. A block that is a container, such as a list
    or a dict of layers, is in use while its parts are. A parameter that belongs to
    several blocks, or to a block and the rest, stays on the device, and so do the
    trained parameters of a block that is frozen but for these few.

    Args:
        model: Any module.
        pattern: A regular expression that is searched in the modules' names; None takes
            the classes that the model itself says must not be split
            (`_no_split_modules`, `_repeated_blocks`).
        on_host: Whether the device is the host: see `_keep_overlapping`.

    Raises:
        ConfigError: If nothing matches; it names what could. Or if what does is a
            module of TorchScript.
    """
    matched = _match(model, pattern)
    owners = _owners(model, matched)
    finding = Finding([], Group("rest"), [])
    for name, module in matched.items():
        group = Group(name)
        for key, tensor in module.named_parameters():
            if len(owners[_memory_key(tensor)]) == 1 and can_stream(tensor):
                group.tensors[key] = tensor
        _spare_adapters(group)
        if group.tensors:
            _refuse_scripted(name, module)
            group.sites = _sites_of(module, {id(t) for t in group.tensors.values()})
            if not group.sites or any(isinstance(s, ScriptModule) for s in group.sites):
                group.sites = [module]  # its parts take no hooks
            finding.streamed.append(group)
    _collect_rest(model, finding)
    if on_host:
        _keep_overlapping(model, finding)
    return finding


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: containers have none."""
    if isinstance(module, ScriptModule):
        return True
    own = "forward" in vars(module)  # some wrappers have that of what they wrap
    return own or type(module).forward is not nn.ModuleList.forward


def _sites_of(module: nn.Module, tensors: set[int]) -> list[nn.Module]:
    """The module, or of a container the outermost parts that are called.

    Only those with tensors of the block: a part may be in several containers.
    """
    if not is_called(module):
        return [s for part in module.children() for s in _sites_of(part, tensors)]
    has_any = any(id(tensor) in tensors for tensor in module.parameters())
    return [module] if has_any else []


def _spare_adapters(group: Group) -> None:
    """Leave the few trained tensors of a frozen block to the rest.

    They change in each step: with them the block's copy on the device would, too.
    """
    trained = {key: t for key, t in group.tensors.items() if t.requires_grad}
    nbytes = sum(map(tensor_bytes, trained.values()))
    if nbytes * _ADAPTER_SHARE <= sum(map(tensor_bytes, group.tensors.values())):
        for key in trained:
            del group.tensors[key]


def _owners(model: nn.Module, matched: dict[str, nn.Module]) -> dict[int, set[str]]:
    """By memory: the blocks that a parameter is in, the rest being ''.

    A module may stand in several places: each place counts, but for those of a whole
    block, which is one wherever it stands.
    """
    blocks = {id(module): name for name, module in matched.items()}
    block_of = {"": ""}  # by each module's name; parents come first
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            parent = block_of[name.rpartition(".")[0]]
            block_of[name] = parent or blocks.get(id(module), "")
        for tensor in module._parameters.values():
            if tensor is not None:
                owners.setdefault(_memory_key(tensor), set()).add(block_of[name])
    return owners


def _match(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    classes = _declared_classes(model) if pattern is None else set()
    expression = None if pattern is None else _compile(pattern)
    for name, module in model.named_modules():
        if not name or next(_parents(name, found), None) is not None:
            continue
        if expression is None:
            if type(module).__name__ in classes:
                found[name] = module
        elif expression.search(name):
            found[name] = module
    if not found:
        raise ConfigError(_no_match(model, pattern))
    return found


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"block_pattern {pattern!r} is not a regular expression: {error}"
        ) from None


def _parents(name: str, found: Mapping[str, object]) -> Iterator[str]:
    parts = name.split(".")
    for end in range(len(parts)):
        parent = ".".join(parts[:end])
        if parent in found:
            yield parent


def _declared_classes(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        for attribute in ("_no_split_modules", "_repeated_blocks"):
            names.update(getattr(module, attribute, None) or ())
    return names


def _no_match(model: nn.Module, pattern: str | None) -> str:
    lists = [
        f"^{re.escape(name + '.') if name else ''}{_numbers(module)}$"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    ]
    what = (
        f"block_pattern {pattern!r} matches no module of {type(model).__name__}"
        if pattern is not None
        else f"{type(model).__name__} does not say which of its modules are blocks"
    )
    hint = " or ".join(repr(p) for p in lists[:3])
    return (
        f"{what}; pass block_pattern={hint}"
        if hint
        else f"{what}; use stagehand.layer()"
    )


def _numbers(module: nn.Module) -> str:
    """What matches the names of a list's parts; those of a sequence may be words."""
    names = [name for name, _ in module.named_children()]
    return r"\d+" if all(map(str.isdigit, names)) else r"[^.]+"


def _none(_: nn.Module) -> bool:
    return False


def _always(_: Finding) -> bool:
    return True


def find_layers(
    model: nn.Module,
    *,
    budget_bytes: int,
    opaque: Sequence[type[nn.Module]] = (),
    stands_alone: Callable[[nn.Module], bool] = _none,
    fits: Callable[[Finding], bool] = _always,
    on_host: bool = False,
) -> Finding:
    """Divide a model for layer mode: each module that owns large parameters streams.

    Modules that share memory become one block. Small parameters stay on the device as
    long as they are together at most 1/16 of the budget; other small neighbours are
    coalesced. Adapters stay up to that limit, too, all or none. If the weights exceed
    the budget, large embedding tables stay on the host. Where the budget is too small
    for such comforts the division is the finest that there is, so the smallest budget
    that can work does not depend on the one that was asked for.

    Args:
        model: Any module.
        budget_bytes: What the weights may take on the device.
        opaque: Module classes that read their children's parameters themselves: such a
            module and all below it are one block.
        stands_alone: Whether a module that streams is in no block with others.
        fits: Whether there is room for what stays in a division, and for one block of
            it at a time.
        on_host: Whether the device is the host: see `_keep_overlapping`.

    Raises:
        ConfigError: If a module of TorchScript would stream by itself.
    """
    divide = partial(_divide, model, opaque, stands_alone, on_host=on_host)
    finding = divide(budget_bytes)
    return finding if fits(finding) else divide(0)


def how_to_raise(needed_bytes: int) -> str:
    """Return what to do where a model that streams turns out to need more.

    Layer mode may keep more on the device for comfort, of a larger budget: a model that
    is divided anew has less of it left for what turned out.

    Args:
        needed_bytes: The smallest budget that works for the present division.
    """
    anew = -(-needed_bytes * _SHARE // (_SHARE - _COMFORTS))
    return (
        f"raise it to at least {format_at_least(needed_bytes)} with"
        f" runtime.set_budget(), or to {format_at_least(anew)} as vram_budget= of a new"
        " stagehand.layer()"
    )


def _divide(
    model: nn.Module,
    opaque: Sequence[type[nn.Module]],
    stands_alone: Callable[[nn.Module], bool],
    budget_bytes: int,
    *,
    on_host: bool,
) -> Finding:
    cells = _cells(model, (nn.MultiheadAttention, *opaque))
    total = sum(c.nbytes for c in cells) + sum(tensor_bytes(b) for b in model.buffers())
    finding = Finding([], Group("rest"), [])
    _leave_to_parts(cells)
    if total > budget_bytes:
        _take_tables(cells, finding, budget_bytes)
    stay = _small(cells, budget_bytes // _SHARE) | _enclosing(cells)
    stay |= _adapters(cells, min(total // _ADAPTER_SHARE, budget_bytes // _SHARE))
    away = [cell for i, cell in enumerate(cells) if i not in stay and cell.tensors]
    target = min(_COPY_EFFICIENT_BYTES, budget_bytes // _SHARE)
    finding.streamed = list(_coalesce(away, target, stands_alone))
    _collect_rest(model, finding)
    if on_host:
        _keep_overlapping(model, finding)
    return finding


def _padded_bytes(group: Group) -> int:
    """Bytes of a group's image, or a little more if its tensors overlap."""
    return sum(
        rounded_up(tensor_bytes(tensor), ALIGNMENT) for tensor in group.tensors.values()
    )


def _cells(model: nn.Module, opaque: tuple[type[nn.Module], ...]) -> list[Group]:
    """One group for each module that reads own parameters; sharing ones merged."""
    cells: list[Group] = []
    owner: dict[int, Group] = {}
    inside: dict[str, Group] = {}  # an opaque module's name -> its group
    modules = dict(model.named_modules())
    read_by = _read_by(modules)
    for name, module in modules.items():
        cover = next((inside[p] for p in _parents(name, inside)), None)
        own = read_by.get(name, {})
        closed = isinstance(module, opaque) or hasattr(module, "parametrizations")
        if cover is None and not own and not closed:
            continue
        group = cover or Group(name, sites=[module])
        if cover is None:
            _refuse_scripted(name, module)
            cells.append(group)
            if closed:
                inside[name] = group
        for full, tensor in own.items():
            other = owner.setdefault(_memory_key(tensor), group)
            if other is not group:
                group = _merge(cells, owner, inside, into=other, gone=group)
            if can_stream(tensor) and all(
                t is not tensor for t in group.tensors.values()
            ):
                group.tensors[full] = tensor
    return [cell for cell in cells if cell.tensors]


def _read_by(modules: Mapping[str, nn.Module]) -> dict[str, dict[str, torch.Tensor]]:
    """Return parameters by their names, for the name of each module that reads some.

    Its own, and those of its lists of parameters: nobody calls these. Not where other
    modules inside have some, too: in use around them, the lists would have to stay.
    """
    read: dict[str, dict[str, torch.Tensor]] = {}
    takes: dict[str, bool] = {}
    for name, module in modules.items():
        start = f"{name}." if name else ""
        own = {f"{start}{k}": p for k, p in module._parameters.items() if p is not None}
        reader = name
        if isinstance(module, _LISTS):
            around = reversed([*_parents(name, modules)])
            reader = next((n for n in around if is_called(modules[n])), name)
            if reader not in takes:
                takes[reader] = not _has_others(modules[reader])
            reader = reader if takes[reader] else name
        if own:
            read.setdefault(reader, {}).update(own)
    return read


def _has_others(module: nn.Module) -> bool:
    """Whether parts of a module that are no lists of parameters have parameters."""
    parts = (m for m in module.modules() if m is not module)
    return any(_own(part) for part in parts if not isinstance(part, _LISTS))


def _memory_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common which start at the same memory."""
    if not can_stream(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr()


def _merge(
    cells: list[Group],
    owner: dict[int, Group],
    inside: dict[str, Group],
    *,
    into: Group,
    gone: Group,
) -> Group:
    into.tensors.update(gone.tensors)
    into.sites.extend(gone.sites)
    cells[:] = [cell for cell in cells if cell is not gone]
    tables: tuple[dict[Any, Group], ...] = (owner, inside)
    for table in tables:
        for key, group in list(table.items()):
            if group is gone:
                table[key] = into
    return into


def _leave_to_parts(cells: list[Group]) -> None:
    """Let modules that enclose other cells be no sites for what their parts hold, too.

    The parts read it: heads of BERTs name the bias of their decoder a second time. If
    they read it as well, a watched pass tells, as it does of any such read.
    """
    cell_of = _by_site(cells)
    for cell in cells:
        cell.sites = [
            site
            for site in cell.sites
            if not (_encloses(site, cell_of) and _is_held_below(site, cell_of))
        ]


def _is_held_below(site: nn.Module, cell_of: Mapping[int, Group]) -> bool:
    """Whether parts of a site, that are sites as well, hold all it has of its cell.

    An opaque module holds none by itself, and reads what its parts hold.
    """
    parts = [m for m in site.modules() if m is not site and id(m) in cell_of]
    held = {_memory_key(tensor) for part in parts for tensor in _own(part)}
    cell = {_memory_key(tensor) for tensor in cell_of[id(site)].tensors.values()}
    return cell.intersection(map(_memory_key, site.parameters())) <= held


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for tensor in module._parameters.values() if tensor is not None]


def _take_tables(cells: list[Group], finding: Finding, budget_bytes: int) -> None:
    """Let large embedding tables stay on the host; tied users still stream them.

    Those that must stay on the device are read there.
    """
    cell_of = _by_site(cells)
    for cell in cells:
        tables = [s for s in cell.sites if _is_table(s)]
        users = [s for s in cell.sites if s not in tables]
        if not tables or cell.nbytes <= budget_bytes // _SHARE:
            continue
        if any(_encloses(site, cell_of) for site in users):
            continue
        finding.gathered.extend((table, cell) for table in tables)
        cell.sites = users
    cells[:] = [cell for cell in cells if cell.sites]


def _is_table(module: nn.Module) -> bool:
    """Whether a module looks rows up in its only parameter, as far as one can tell."""
    return (
        isinstance(module, nn.Embedding)
        and len(_own(module)) == 1
        and module.max_norm is None
        and not module.sparse
        and not hasattr(module, "parametrizations")
    )


def _small(cells: list[Group], limit: int) -> set[int]:
    chosen: set[int] = set()
    taken = 0
    for i in sorted(range(len(cells)), key=lambda i: cells[i].nbytes):
        taken += _padded_bytes(cells[i])
        if taken > limit or cells[i].nbytes > _SMALL_BYTES:
            break
        chosen.add(i)
    return chosen


def _adapters(cells: list[Group], limit: int) -> set[int]:
    """The few cells that train in a frozen model: all, or none if they exceed a limit.

    What is added to a model that streams stays, too, however large its tensors are.
    """
    trained = {
        i
        for i, cell in enumerate(cells)
        if all(tensor.requires_grad for tensor in cell.tensors.values())
    }
    return trained if sum(cells[i].nbytes for i in trained) <= limit else set()


def _enclosing(cells: list[Group]) -> set[int]:
    """Cells in use while others are: the one block in use must fit beside them."""
    cell_of = _by_site(cells)
    return {
        i
        for i, cell in enumerate(cells)
        if any(_encloses(site, cell_of) for site in cell.sites)
    }


def _by_site(cells: list[Group]) -> dict[int, Group]:
    return {id(site): cell for cell in cells for site in cell.sites}


def _encloses(site: nn.Module, cell_of: Mapping[int, Group]) -> bool:
    """Whether parts of a site are sites of another cell."""
    own = cell_of[id(site)]
    return not isinstance(site, nn.MultiheadAttention) and any(
        cell_of.get(id(part), own) is not own for part in site.modules()
    )


def _coalesce(
    cells: Iterable[Group], target: int, stands_alone: Callable[[nn.Module], bool]
) -> Iterator[Group]:
    """Join small neighbours of one repeated part of the model up to a target size."""
    current: Group | None = None
    part: str | None = None
    for cell in cells:
        own_part = None if any(map(stands_alone, cell.sites)) else _part(cell.name)
        if current is not None and (
            own_part is None
            or own_part != part
            or current.nbytes + cell.nbytes > max(target, current.nbytes)
        ):
            yield current
            current = None
        if current is None:
            current = Group(cell.name, dict(cell.tensors), list(cell.sites))
        else:
            current.tensors.update(cell.tensors)
            current.sites.extend(cell.sites)
        part = own_part
    if current is not None:
        yield current


def _part(name: str) -> str:
    """The name up to its last number: `layers.3` of `layers.3.mlp.up`."""
    match = re.match(r"(.*\.\d+|\d+)(?:\.|$)", name)
    return match[1] if match else ""


def _refuse_scripted(name: str, module: nn.Module) -> None:
    """A module of TorchScript takes no hooks: nothing would tell when it is used."""
    if isinstance(module, ScriptModule):
        raise ConfigError(
            f"module {name!r} with weights is one of TorchScript, which takes no hooks:"
            " expected a plain one; stream what it was made from, or let a module"
            " around it be a block, with its class in opaque= of stagehand.layer() or"
            " with block_pattern= of StagehandRuntime"
        )


def _keep_overlapping(model: nn.Module, finding: Finding) -> None:
    """Let tensors stay that have bytes in common with others of another group.

    For a device that is the host: a model that moves there keeps them in common.
    """
    away = [*finding.streamed, *(group for _, group in finding.gathered)]
    owners: dict[int, tuple[Group, torch.Tensor]] = {}
    for group in (finding.rest, *away):
        for tensor in group.tensors.values():
            if can_stream(tensor) and tensor.is_cpu and tensor.numel():
                owners.setdefault(id(tensor), (group, tensor))
    owned = [*owners.values()]
    ranges = [(t.data_ptr(), t.data_ptr() + spanned_bytes(t)) for _, t in owned]
    stay: set[int] = set()
    for numbers in overlapping(ranges):
        if len({id(owned[number][0]) for number in numbers}) > 1:
            stay.update(id(owned[number][1]) for number in numbers)
    for group in away:
        group.tensors = {k: t for k, t in group.tensors.items() if id(t) not in stay}
    finding.streamed = [group for group in finding.streamed if group.tensors]
    finding.gathered = [pair for pair in finding.gathered if pair[1].tensors]
    _collect_rest(model, finding)


def _collect_rest(model: nn.Module, finding: Finding) -> None:
    """Put every tensor that is in no group into the rest, each once."""
    taken = {
        id(tensor)
        for group in (*finding.streamed, *(group for _, group in finding.gathered))
        for tensor in group.tensors.values()
    }
    for name, tensor in named_tensors(model):
        if id(tensor) not in taken:
            taken.add(id(tensor))
            finding.rest.tensors[name] = tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of a model, and what belongs to them."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    yield from ((place.name, place.tensor) for place in places_of_belongings(model))
