"""The two ways of making a runtime: `layer()` and `StagehandRuntime`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.jit import ScriptModule

from stagehand.assembly import Settings, needed_bytes
from stagehand.attribute import HANDLE
from stagehand.config import StagehandConfig, Transport
from stagehand.core.arena import Arena
from stagehand.core.belongings import own_belongings
from stagehand.core.device import Device, find_device
from stagehand.core.layout import can_cast
from stagehand.core.machine import free_host_bytes, host_bytes
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.foreign import refuse_offloaded, refuse_sharded, refuse_unmovable
from stagehand.guards import Checks
from stagehand.residency.blocks import tensor_bytes
from stagehand.residency.finding import Finding, find_blocks, find_layers
from stagehand.residency.shared import shared_bytes
from stagehand.runtime import Runtime
from stagehand.settings import check_value
from stagehand.units import MIB, format_bytes, parse_bytes
from stagehand.weights.experts import is_experts
from stagehand.weights.hooks import is_hooked

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "StagehandRuntime",
    "check_dtype",
    "check_model",
    "check_module",
    "device_budget",
    "host_budget",
    "layer",
]

_Model = TypeVar("_Model", bound=nn.Module)
_NONE: Mapping[type[nn.Module], Callable[..., Any]] = MappingProxyType({})
_DEFAULT_SHARE = 0.8  # of the free device memory


class StagehandRuntime(Runtime):
    """Block mode: the repeated blocks of a model stream, one by one.

    What is in no block is placed on the device at once and counts against the budget,
    which is the high watermark.

    Args:
        model: Is changed in place and used as before.
        config: Budgets and the like.
        block_pattern: A regular expression that is searched in module names; the
            outermost matches are the blocks. None takes the classes that the model
            itself names (`_no_split_modules`, `_repeated_blocks`).
        dtype: Cast the model to it first; None leaves every tensor as it is.
        inference_mode: Passes run without gradients.
        device: Where to compute: the accelerator by default, the host without one.
        pool: Pinned memory from another runtime's `shutdown_keep_pool()`.
        trace: Keep spans for `export_trace`.

    Raises:
        ConfigError: If nothing matches, or the model is streamed already.
        StagehandOOMError: If the budget or a slab is too small; it names what works.
        DtypeMismatchError: If `strict_bf16` finds a parameter of another type.

    Example:
        >>> runtime = StagehandRuntime(model, block_pattern=r"^layers\\.\\d+$")
        >>> with runtime.managed_forward():
        ...     output = model(batch)
        >>> runtime.end_step()
    """

    def __init__(
        self,
        model: nn.Module,
        config: StagehandConfig | None = None,
        block_pattern: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        inference_mode: bool = False,
        device: torch.device | str | int | None = None,
        pool: Arena | None = None,
        trace: bool = False,
    ) -> None:
        config = StagehandConfig() if config is None else config
        if not isinstance(config, StagehandConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}: expected a StagehandConfig"
            )
        check_value("block_pattern", block_pattern, str | None)
        check_value("inference_mode", inference_mode, bool)
        check_value("trace", trace, bool)
        _check_pool(pool)
        place = find_device(device)
        check_model(model, dtype)
        settings = Settings(
            device=place,
            budget_bytes=int(config.vram_high_watermark_mb * MIB),
            pinned_bytes=int(config.pinned_pool_mb * MIB),
            slab_bytes=int(config.pinned_slab_mb * MIB),
            lookahead=config.prefetch_window_blocks,
            inflight=config.max_inflight,
            stream_priority=config.copy_stream_priority,
            watermarks=config.watermarks(),
            inference_mode=inference_mode,
            checks=config.checks(),
            timed=config.telemetry_enabled,
            traced=trace,
            log_interval=config.telemetry_interval_steps,
            telemetry_file=config.telemetry_file,
            pool=pool,
            shared=config.shared,
            name=type(model).__name__,
            transport=config.transport,
        )
        _make_ready(model, dtype)
        finding = find_blocks(model, block_pattern, on_host=settings.device.is_host)
        _warn_of_room(model, finding, settings, "vram_high_watermark_mb")
        super().__init__(model, finding, settings)


def layer(
    model: _Model,
    *,
    vram_budget: int | str | None = None,
    ram_budget: int | str | None = None,
    prefetch_k: int = 3,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    inference_mode: bool = False,
    telemetry: bool | str | Path = False,
    trace: bool = False,
    pool: Arena | None = None,
    shared: bool = True,
    name: str | None = None,
    transport: Transport = "plain",
    opaque: Sequence[type[nn.Module]] = (),
    experts: Mapping[type[nn.Module], Callable[..., torch.Tensor | None]] = _NONE,
    nan_inf_check: bool = False,
    strict_bf16: bool = False,
    dtype_promotion_check: bool = False,
    fail_on_dtype_promotion: bool = False,
) -> _Model:
    """Stream a model's weights, layer by layer; use the model as before.

    Each module that owns large parameters streams; small neighbours are coalesced, the
    small rest stays on the device. If the weights exceed the budget, large embedding
    tables stay on the host and only the rows that are looked up cross.

    Args:
        model: Is changed in place and returned. Its weights may be anywhere.
        vram_budget: Device bytes for all weights, the small resident ones included:
            an int, "8GB", "7.5GiB", or "80%" of what is free. 80 % by default.
        ram_budget: Page-locked host bytes at most; what does not fit is staged through
            it. By default as much as the weights need, up to 80 % of the free memory.
        prefetch_k: How far to load ahead at most: so many of the largest layers, or
            more that are smaller, or all of a region that checkpoints compute again. 0
            loads nothing ahead.
        dtype: Cast the model to it first; None leaves every tensor as it is.
        device: Where to compute: the accelerator by default, the host without one.
        inference_mode: Passes run without gradients.
        telemetry: True times uses and copies; a path also writes a line a step.
        trace: Keep spans for `export_trace`.
        pool: Pinned memory from another runtime's `shutdown_keep_pool()`.
        shared: Whether models that are streamed to one device share the largest of
            their budgets and its lanes, each up to its own budget: the one that runs
            gets the room. False gives this one a budget and lanes apart from others'.
        name: For those who share a device, to tell who holds what; its class by
            default.
        transport: "packed" sends bfloat16 weights losslessly in three quarters of their
            bytes, decoded on the device: where the link is the limit. They are packed
            before the first pass, into pinned memory beside the tensors; trained
            weights cross as they are. It takes device memory for one block more.
        opaque: Module classes that read their children's parameters themselves.
        experts: Module classes whose calls read some rows of their weights, each with a
            function that takes a call's arguments and returns the rows' numbers, a
            tensor of integers, or None for all. Without gradients no others cross where
            these are half of all or less. Classes of `transformers` need no mention.
        nan_inf_check: Count NaN and infinite values in outputs of blocks.
        strict_bf16: Refuse a floating-point parameter or output of a block that is not
            bfloat16.
        dtype_promotion_check: Count outputs of blocks that are wider than every
            floating-point input.
        fail_on_dtype_promotion: Raise at the first of these.

    Raises:
        ConfigError: If an argument cannot work, or the model is streamed already.
        StagehandOOMError: If the budget is too small; it names the smallest that works.
        DtypeMismatchError: If `strict_bf16` finds a parameter of another type.

    Example:
        >>> model = stagehand.layer(model, vram_budget="8GB")
        >>> output = model(batch)
        >>> model._stagehand_layer_runtime.shutdown()
    """
    check_value("prefetch_k", prefetch_k, int)
    if prefetch_k < 0:
        raise ConfigError(f"prefetch_k is {prefetch_k}: expected 0 or more")
    check_value("transport", transport, Transport)
    check_value("telemetry", telemetry, bool | str | Path | None)
    check_value("opaque", opaque, Collection[type])
    _check_experts(experts)
    check_value("inference_mode", inference_mode, bool)
    check_value("trace", trace, bool)
    check_value("shared", shared, bool)
    check_value("name", name, str | None)
    _check_pool(pool)
    place = find_device(device)
    check_model(model, dtype)
    budget, pinned = _budgets(model, place, vram_budget, ram_budget, shared=shared)
    settings = Settings(
        device=place,
        budget_bytes=budget,
        pinned_bytes=pinned,
        lookahead=prefetch_k,
        inference_mode=inference_mode,
        checks=Checks(
            nan_inf_check=nan_inf_check,
            strict_bf16=strict_bf16,
            dtype_promotion_check=dtype_promotion_check,
            fail_on_dtype_promotion=fail_on_dtype_promotion,
        ),
        timed=bool(telemetry),
        traced=trace,
        telemetry_file=None if isinstance(telemetry, bool) else telemetry,
        pool=pool,
        shared=shared,
        name=name or type(model).__name__,
        experts=experts,
        transport=transport,
    )
    _make_ready(model, dtype)
    # A block that is decoded takes the room of two, and a quarter to work in.
    room = budget if transport == "plain" else int(budget / 2.25)
    finding = find_layers(
        model,
        budget_bytes=room,
        opaque=opaque,
        stands_alone=partial(is_experts, kinds=tuple(experts)),
        fits=lambda finding: needed_bytes(finding, settings) <= budget,
        on_host=place.is_host,
    )
    _warn_of_room(model, finding, settings, "vram_budget")
    Runtime(model, finding, settings)
    return model


def _budgets(
    model: nn.Module,
    place: Device,
    vram_budget: int | str | None,
    ram_budget: int | str | None,
    *,
    shared: bool,
) -> tuple[int, int]:
    budget = device_budget(place, vram_budget, shared=shared)
    own = sum(tensor_bytes(p) for p in model.parameters() if p.is_cpu)
    pinned = int(_DEFAULT_SHARE * (free_host_bytes() + own))
    if ram_budget is not None:
        pinned = host_budget(ram_budget)
        if place.is_host:  # there is one memory: the smaller budget counts
            budget = min(budget, pinned)
    return budget, pinned


def device_budget(
    place: Device, vram_budget: int | str | None, *, shared: bool = True
) -> int:
    """Return the bytes that a user's `vram_budget` stands for.

    A share is one of what is free, and of what weights that share it hold already: so
    it is the same for each model. What is not `shared` gets nothing of those.

    Raises:
        ConfigError: If it is no size.
    """
    free = _bytes_for(place, shared=shared)
    if vram_budget is None:
        return int(_DEFAULT_SHARE * free)
    return parse_bytes(vram_budget, name="vram_budget", of=free)


def _bytes_for(place: Device, *, shared: bool) -> int:
    """Return the device bytes that a model may have: others make room if they share."""
    return place.free_bytes() + (shared_bytes(place) if shared else 0)


def host_budget(ram_budget: int | str) -> int:
    """Return the bytes that a user's `ram_budget` stands for.

    Raises:
        ConfigError: If it is no size.
    """
    return parse_bytes(ram_budget, name="ram_budget", of=host_bytes())


def _warn_of_room(
    model: nn.Module, finding: Finding, settings: Settings, named: str
) -> None:
    """Warn of a budget that is not free, though others may leave before a pass.

    What the model has there leaves, or is a part of what it will have there.
    """
    device = settings.device
    if device.is_host:
        return
    weights = sum(group.nbytes for group in (finding.rest, *finding.streamed))
    wanted = min(settings.budget_bytes, weights)
    tensors = chain(model.parameters(), model.buffers())
    there = sum(tensor_bytes(t) for t in tensors if t.device == device.torch_device)
    free = _bytes_for(device, shared=settings.shared) + there
    if wanted <= free:
        return
    warnings.warn(
        f"{named} lets {type(model).__name__} have {format_bytes(wanted)} of"
        f" {device.torch_device}, of which {format_bytes(free)} are free: it runs out"
        " of memory unless others free some; lower it, and leave room for what is"
        " computed",
        StagehandWarning,
        stacklevel=3,
    )


def _check_experts(experts: Mapping[type[nn.Module], Callable[..., Any]]) -> None:
    if not isinstance(experts, Mapping) or not all(
        isinstance(kind, type) and callable(choice) for kind, choice in experts.items()
    ):
        raise ConfigError(
            f"experts is {experts!r}: expected module classes, each with a function"
            " that takes a call's arguments and returns the rows that it reads, such as"
            " {Experts: lambda x, chosen: chosen}"
        )


def _check_pool(pool: Arena | None) -> None:
    if not isinstance(pool, Arena | None):
        raise ConfigError(
            f"pool is {pool!r}: expected what shutdown_keep_pool() of another runtime"
            " returned, or None"
        )


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what is no element type of weights.

    Raises:
        ConfigError: If it is none, or one of integers.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise ConfigError(
            f"dtype is {dtype!r}: expected one of torch's, such as torch.bfloat16, or"
            " None"
        )
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(
            f"dtype is {dtype}: expected a floating-point type, such as torch.bfloat16,"
            " or None; runtime.convert_registry_to_squareq_backed() streams INT8"
        )


def check_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        ConfigError: Then.
    """
    if not isinstance(model, nn.Module):
        named = isinstance(model, str | type | None)
        raise ConfigError(
            f"the model is {repr(model) if named else f'a {type(model).__name__}'}:"
            " expected a torch.nn.Module, such as a class returns when it is called;"
            " load() opens a directory, and pipeline() takes several models"
        )


def check_model(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse what cannot be streamed, or not be cast to an element type.

    Raises:
        ConfigError: Then; it names the module or the tensor, and what to do.
    """
    check_module(model)
    if isinstance(model, ScriptModule):
        raise ConfigError(
            f"the model is a {type(model).__name__} of TorchScript, which takes no"
            " hooks: expected the plain module that it was made from"
        )
    check_dtype(dtype)
    for name, module in model.named_modules():
        if (has := module.__dict__.get(HANDLE) is not None) or is_hooked(module):
            where = f"its module {name!r}" if name else "it"
            how, whose = "is streamed", "its"
            if not has:
                how, whose = "is a part of a model that is streamed", "that model's"
            raise ConfigError(
                f"{type(model).__name__} cannot be streamed: {where} {how} already;"
                f" call {whose} {HANDLE}.shutdown() first"
            )
    refuse_offloaded(model)
    refuse_sharded(model)
    refuse_unmovable(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet; run the model once before"
                " streaming it"
            )
    if dtype is None:
        return
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not can_cast(tensor.dtype, dtype):
            raise ConfigError(
                f"tensor {name!r} is {tensor.dtype}, dtype is {dtype}: expected a type"
                " that torch casts it to; dtype=None leaves every tensor as it is"
            )


def _make_ready(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast a model that was checked: last, for nothing takes that back.

    What belongs to its weights is theirs alone from then on.
    """
    if dtype is not None:
        nn.Module.to(model, dtype)
    own_belongings(chain(model.parameters(), model.modules()))
