"""`pipeline()`: several models that run one after another, under one budget."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from stagehand.core.device import find_device
from stagehand.errors import ConfigError
from stagehand.modes import device_budget, host_budget, layer
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.holds import ResidentPriority
from stagehand.sharing import HANDLE

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

    import torch
    from typing_extensions import Self

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
        self, runtimes: Mapping[str, Runtime], undo: Callable[[], None] | None = None
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
        """Give back plain models. Idempotent."""
        undo, self._undo = self._undo, None
        with ExitStack() as rest:  # in reverse; all of it, whatever fails
            if undo is not None:
                rest.callback(undo)
            for runtime in reversed(self.runtimes.values()):
                rest.callback(runtime.shutdown)


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
            `diffusers` says that it is on the device, until `shutdown()`.
        vram_budget: Device bytes for the weights of all models together, as in
            `layer()`.
        ram_budget: Page-locked host bytes for all of them; each gets its part.
        device: Where to compute: the accelerator by default, the host without one.
        **options: Others of `layer()`, for each model.

    Returns:
        The runtimes, by name: `pipeline(...).runtimes["transformer"]`. Its `shutdown()`
        gives back plain models; it can be used as a context, too.

    Raises:
        ConfigError: If there is no model, or one is streamed already; or if `shared` or
            `name` is among the options.
        StagehandOOMError: If the budget is too small for one of them. Nothing is
            changed then.

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
    sizes = {name: _weight_bytes(model) for name, model in models.items()}
    budget = device_budget(place, vram_budget)
    pinned: dict[str, int] = {}
    if ram_budget is not None and place.is_host:  # there is one memory
        budget = min(budget, host_budget(ram_budget))
    elif ram_budget is not None:
        pinned = _parts_of(ram_budget, sizes)
    runtimes: dict[str, Runtime] = {}
    try:
        for name, model in models.items():
            layer(
                model,
                vram_budget=budget,
                ram_budget=pinned.get(name),
                device=device,
                name=name,
                **options,
            )
            runtimes[name] = getattr(model, HANDLE)
        _keep_small(runtimes, sizes, budget)
        own = type(pipe_or_dict)
        if not hasattr(own, "_execution_device"):
            return Pipeline(runtimes)
        pipe_or_dict.__class__ = _placed(own, place.torch_device)
    except BaseException:
        Pipeline(runtimes).shutdown()
        raise
    return Pipeline(runtimes, lambda: setattr(pipe_or_dict, "__class__", own))


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
    for name in sorted(runtimes, key=lambda name: sizes[name]):
        small = min(room, budget // _SMALL_PART)
        if len(runtimes) == 1 or sizes[name] > small:
            return
        tenancy = runtimes[name]._tenancy
        tenancy.shared.reserve(
            tenancy.number, ResidentPriority.SECONDARY, asked_for=False
        )
        room -= sizes[name]


def _placed(own: type, place: torch.device) -> type:
    """Return a class of the same name whose pipelines say that they are on a device.

    Pipelines of diffusers make tensors where they find their weights, which come and
    go. Only a property of the class can tell them otherwise.
    """
    there = property(lambda _: place)
    members = {"device": there, "_execution_device": there, "__doc__": own.__doc__}
    placed = type(own.__name__, (own,), {**members, "__module__": own.__module__})
    placed.__qualname__ = own.__qualname__
    return placed
