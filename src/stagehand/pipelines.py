"""`pipeline()`: several models that run one after another, under one budget."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from stagehand.attribute import HANDLE
from stagehand.core.device import find_device
from stagehand.errors import (
    ConfigError,
    StagehandError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.modes import check_model, device_budget, host_budget, layer
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.holds import ResidentPriority

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from typing_extensions import Self

    from stagehand.core.device import Device
    from stagehand.report import Report
    from stagehand.runtime import Runtime

__all__ = ["Pipeline", "pipeline"]

_SMALL_PART = 16  # a model of this part of the budget or less stays on the device
_SMALL_ALL_PART = 4  # as long as all of them take no more than this part


class Pipeline:
    """Models that share one budget; `pipeline()` makes it.

    Attributes:
        runtimes: The runtime of each model, by its name in the pipeline.
    """

    def __init__(
        self, runtimes: Mapping[str, Runtime], undo: Sequence[Callable[[], None]]
    ) -> None:
        self.runtimes = dict(runtimes)
        self._undo = undo

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(map(repr, self.runtimes.values()))})"

    def __enter__(self) -> Self:
        """Return itself; leaving the `with` shuts all models down."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """Shut all models down."""
        self.shutdown()

    def reports(self) -> dict[str, Report]:
        """Return the report of each model; each says who holds what, and why."""
        return {name: runtime.report() for name, runtime in self.runtimes.items()}

    @property
    def peak_device_bytes(self) -> int:
        """The most that all weights on the device have taken at once."""
        shared = {r._tenancy.shared for r in self.runtimes.values()}
        return sum(device.ledger.device.peak_bytes for device in shared)

    def shutdown(self) -> None:
        """Give back plain models, but for what streamed already. Idempotent."""
        with ExitStack() as rest:  # in reverse; all of it, whatever fails
            for step in self._undo:
                rest.callback(step)
        self._undo = ()


def pipeline(
    pipe_or_dict: Mapping[str, Any] | Any,
    *,
    vram_budget: int | str | None = None,
    ram_budget: int | str | None = None,
    device: torch.device | str | int | None = None,
    **options: Any,
) -> Pipeline:
    """Stream all models of a pipeline under one budget; use it as before.

    Each model streams as by `layer()`. The one that runs gets the room; which one comes
    next is learned, and it is loaded while the present one ends. Small models stay on
    the device, unless another one could not run otherwise.

    Args:
        pipe_or_dict: A pipeline of `diffusers`, or anything else whose `components` is
            a dict; or a dict. What is in it and no module is left alone. A pipeline of
            `diffusers` says that it is on the device, until `shutdown()`, and so do
            those in it. Some or all of its models may stream already, by `load()` or as
            those of another pipeline; they stay as they are, also at its `shutdown()`.
        vram_budget: Device bytes for the weights of all models together, as in
            `layer()`; those of what streams already, if there is any.
        ram_budget: Page-locked host bytes for all of them; each gets its part.
        device: Where to compute: the accelerator by default, the host without one.
        **options: Others of `layer()`, for each model.

    Returns:
        The runtimes, by name: `pipeline(...).runtimes["transformer"]`. Its `shutdown()`
        gives back plain models; it can be used as a context, too.

    Raises:
        ConfigError: If there is no model; if the pipeline, or a model of a dict, is
            streamed already; if a model streams to another device; if all of them do
            so and there is a budget or another option; or if `shared` or `name` is
            among the options.
        StagehandOOMError: If the budget is too small for one of them; it names the
            smallest that works for all. Nothing is changed then, but models are cast
            that were given a `dtype`.

    Example:
        >>> with stagehand.pipeline(pipe, vram_budget="12GB"):
        ...     image = pipe("a lighthouse in a storm").images[0]
    """
    for key in ("shared", "name"):
        if key in options:
            raise ConfigError(
                f"{key}={options[key]!r} is not for a pipeline: its models share one"
                " budget, under the names they have there"
            )
    place = find_device(device)
    models = _models(pipe_or_dict)
    pipes = _pipes_in(pipe_or_dict, models)
    runtimes = _streamed(models, place) if pipes else {}
    models = {name: m for name, m in models.items() if name not in runtimes}
    if not models and (vram_budget is not None or ram_budget is not None or options):
        raise ConfigError(
            f"all {len(runtimes)} models of the pipeline are streamed already: expected"
            " no budget and no option for them, or their shutdown() first"
        )
    for name, model in models.items():
        with _named(name):
            check_model(model, options.get("dtype"))
    sizes = {name: _weight_bytes(model) for name, model in models.items()}
    if runtimes and vram_budget is None:
        vram_budget = max(r._parts.budget_bytes for r in runtimes.values())
    budget = device_budget(place, vram_budget)
    pinned: dict[str, int] = {}
    if ram_budget is not None and place.is_host:  # there is one memory
        budget = min(budget, host_budget(ram_budget))
    elif ram_budget is not None:
        pinned = _parts_of(ram_budget, sizes)
    undo: list[Callable[[], None]] = []
    refused: list[StagehandOOMError] = []
    try:
        # Those that leave the device make room on it for what the others keep there.
        for name in sorted(models, key=lambda n: not _is_on(models[n], place)):
            try:
                with _named(name):
                    layer(
                        models[name],
                        vram_budget=budget,
                        ram_budget=pinned.get(name),
                        device=device,
                        name=name,
                        **options,
                    )
            except StagehandOOMError as error:
                refused.append(error)  # another one may need more
                continue
            runtimes[name] = getattr(models[name], HANDLE)
            undo.append(runtimes[name].shutdown)
        if refused:
            raise max(refused, key=lambda error: error.needed_bytes)
        _keep_small(runtimes, sizes, budget)
        undo.extend(_place(pipe, place.torch_device) for pipe in pipes)
    except BaseException:
        Pipeline(runtimes, undo).shutdown()
        raise
    return Pipeline(runtimes, undo)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let errors say which model of a pipeline they are for."""
    try:
        yield
    except StagehandError as error:
        error.args = (f"for model {name!r} of the pipeline, {error}",)
        raise


def _models(pipe_or_dict: Any) -> dict[str, nn.Module]:
    parts = pipe_or_dict
    if not isinstance(parts, Mapping):
        parts = getattr(pipe_or_dict, "components", None)
    if not isinstance(parts, Mapping):
        raise ConfigError(
            f"pipe_or_dict is a {type(pipe_or_dict).__name__}: expected a dict of"
            " models, or a pipeline with a dict of `components`"
        )
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found.setdefault(id(part), (name, part))
    if not found:
        raise ConfigError(
            f"the pipeline has {len(parts)} parts, but none is a module: expected at"
            " least one model"
        )
    return dict(found.values())


def _pipes_in(pipe: Any, models: Mapping[str, nn.Module]) -> list[Any]:
    """Return a pipeline of diffusers, and those that it has of the same models.

    All of them make tensors where they are.
    """
    if not hasattr(type(pipe), "_execution_device"):
        return []
    if pipe in _PLACED:
        raise ConfigError(
            f"the {type(pipe).__name__} is streamed already; call shutdown() of what"
            " pipeline() has returned first"
        )
    parts = getattr(pipe, "__dict__", {}).values()
    inner = (part for part in parts if hasattr(type(part), "_execution_device"))
    free = (part for part in inner if part not in _PLACED)
    return [pipe, *(part for part in free if _is_made_of(part, models))]


def _is_made_of(pipe: Any, models: Mapping[str, nn.Module]) -> bool:
    own = {id(model) for model in models.values()}
    parts = (part for part in pipe.components.values() if isinstance(part, nn.Module))
    return own.issuperset(map(id, parts))


def _streamed(models: Mapping[str, nn.Module], place: Device) -> dict[str, Runtime]:
    """Return the runtimes of the models that are streamed already."""
    found: dict[str, Runtime] = {}
    for name, model in models.items():
        runtime = model.__dict__.get(HANDLE)
        if runtime is not None:
            if runtime.torch_device != place.torch_device:
                raise ConfigError(
                    f"model {name!r} is streamed to {runtime.torch_device} already:"
                    f" expected that device, found {place.torch_device}"
                )
            found[name] = runtime
    return found


def _is_on(model: nn.Module, place: Device) -> bool:
    """Whether weights of a model are on a device."""
    return any(p.device == place.torch_device for p in model.parameters())


def _weight_bytes(model: nn.Module) -> int:
    return sum(tensor_bytes(t) for t in (*model.parameters(), *model.buffers()))


def _parts_of(ram_budget: int | str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Divide page-locked bytes by the weights of each model."""
    nbytes, weights = host_budget(ram_budget), max(1, sum(sizes.values()))
    parts = {name: nbytes * size // weights for name, size in sizes.items()}
    if any(size and not parts[name] for name, size in sizes.items()):
        raise ConfigError(
            f"ram_budget is {ram_budget!r} for {len(sizes)} models: expected more, of"
            " which each gets a part"
        )
    return {name: max(1, part) for name, part in parts.items()}  # without weights: 1


def _keep_small(
    runtimes: Mapping[str, Runtime], sizes: Mapping[str, int], budget: int
) -> None:
    """Reserve room for small models, the smallest first."""
    room = budget // _SMALL_ALL_PART
    for name in sorted(sizes, key=lambda name: sizes[name]):
        small = min(room, budget // _SMALL_PART)
        if len(runtimes) == 1 or sizes[name] > small:
            return
        tenancy = runtimes[name]._tenancy
        tenancy.shared.reserve(
            tenancy.number, ResidentPriority.SECONDARY, asked_for=False
        )
        room -= sizes[name]


_PLACED: WeakSet[Any] = WeakSet()
"""Pipelines that say where they are."""


class _Placed:
    """Marks the classes that `_placed` makes; copies of pipelines have them, too."""

    __slots__ = ()


def _place(pipe: Any, place: torch.device) -> Callable[[], None]:
    """Let a pipeline say that it is on a device; return what ends that."""
    own = type(pipe)
    if issubclass(own, _Placed):  # it is a copy of one that says so
        own = own.__bases__[0]

    def undo() -> None:
        pipe.__class__ = own
        _PLACED.discard(pipe)

    pipe.__class__ = _placed(own, place)
    _PLACED.add(pipe)
    return undo


def _placed(own: type, place: torch.device) -> type:
    """Return a class of the same name whose pipelines say that they are on a device.

    Pipelines of diffusers make tensors where they find their weights, which come and
    go. Only a member of the class can tell them otherwise. Copies whose models do not
    stream are asked as before.
    """

    def device(pipe: Any) -> Any:
        return super(placed, pipe).device if _is_plain(pipe) else place

    def execution_device(pipe: Any) -> Any:
        if _is_plain(pipe):
            return super(placed, pipe)._execution_device
        _warn_of_others(pipe, place)
        return place

    members = {
        "device": property(device),
        "_execution_device": property(execution_device),
        "_get_execution_device": execution_device,  # Cosmos3 asks its first model
        **{name: getattr(own, name) for name in ("__doc__", "__module__")},
    }
    placed: type[Any] = type(own.__name__, (own, _Placed), members)
    placed.__qualname__ = own.__qualname__
    return placed


def _is_plain(pipe: Any) -> bool:
    """Whether a pipeline is an unplaced copy without a streamed model.

    A copy shares the models that were not copied, and these may stream.
    """
    return pipe not in _PLACED and not any(_streams(m) for _, m in _modules(pipe))


def _modules(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, part in vars(pipe).items():
        if isinstance(part, nn.Module):
            yield name, part


def _streams(model: nn.Module) -> bool:
    """Whether a model, or what it wraps, is streamed."""
    return any(part.__dict__.get(HANDLE) is not None for part in model.modules())


def _warn_of_others(pipe: Any, place: torch.device) -> None:
    """Name models that are not on the device, and not streamed to it.

    No error: the pipeline may have no use for them, as for a text encoder where it is
    given what that has encoded.
    """
    for name, model in _modules(pipe):
        tensor = next(model.parameters(), None)
        if tensor is None or tensor.device == place or _streams(model):
            continue
        warnings.warn(
            f"{name!r} of the {type(pipe).__name__}, a {type(model).__name__} on"
            f" {tensor.device}, is not streamed, and fails where inputs on {place} meet"
            " it: it was put there since the pipeline streams, or its runtime was shut"
            f" down; call stagehand.layer(pipe.{name}, vram_budget=...), or shutdown()"
            " of what pipeline() has returned, and pipeline() again",
            StagehandWarning,
            stacklevel=3,
        )
