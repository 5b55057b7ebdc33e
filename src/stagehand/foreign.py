"""What other libraries have made of a model, and which of that cannot be streamed."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from stagehand.core.belongings import belongings, moves_itself
from stagehand.errors import ConfigError
from stagehand.residency.blocks import can_stream
from stagehand.torch_private import is_batched

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import nn

    from stagehand.core.belongings import Belonging

__all__ = [
    "TAKE_OFF",
    "hook_of",
    "hooked_tensors",
    "refuse_batched",
    "refuse_offloaded",
    "refuse_sharded",
    "refuse_unmovable",
]

TAKE_OFF = (
    "accelerate.hooks.remove_hook_from_module(model, recurse=True) or"
    " pipeline.remove_all_hooks()"
)
"""What takes the hooks of `accelerate` off, for errors."""

_DECOMPRESSES = "ct_decompress_hook"  # the attribute, of compressed-tensors
_GROUPS = "group_offloading"  # the name of the hook, in diffusers
_MOVES = ("CpuOffload", "CustomOffloadHook")  # classes, in accelerate and diffusers


def hook_of(module: nn.Module) -> Any:
    """Return what `accelerate` has hooked to a module, or None."""
    return module.__dict__.get("_hf_hook")


def hooked_tensors(model: nn.Module) -> Iterator[tuple[Any, str, bool, torch.Tensor]]:
    """Yield the tensors in modules that `accelerate` has hooked.

    Each with the hook, its name in the model, and whether it is that module's own.
    """
    for name, module in model.named_modules():
        hook = hook_of(module)
        if hook is None:
            continue
        for key, tensor in chain(module.named_parameters(), module.named_buffers()):
            yield hook, f"{name}.{key}".removeprefix("."), "." not in key, tensor


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse a model whose hooks keep or move its weights.

    They are those of `accelerate`, or of `diffusers`: these would move all that they
    know to the device beside what streams, over the budget. Or those of
    `compressed-tensors`, which make plain weights there.

    Raises:
        ConfigError: If it has such hooks; it names what takes them off.
    """
    for name, module in model.named_modules():
        registry = module.__dict__.get("_diffusers_hook")
        if _GROUPS in getattr(registry, "hooks", ()):
            raise ConfigError(
                f"{type(model).__name__} cannot be streamed: hooks of diffusers move"
                f" the weights of {_called(name)} to the device and back, as"
                " enable_group_offload() sets them; leave it out, or take them off"
                " first, with diffusers.HookRegistry.check_if_exists_or_initialize("
                f'model).remove_hook("{_GROUPS}"), which leaves no weights where these'
                " were offloaded to disk"
            )
        if _DECOMPRESSES in module.__dict__:
            raise ConfigError(
                f"{type(model).__name__} cannot be streamed: a hook of"
                f" compressed-tensors makes plain weights of the packed ones of"
                f" {_called(name)} in the first forward, all on the device; load them"
                " plain, with CompressedTensorsConfig(dequantize=True), say"
            )
        hook = hook_of(module)
        if any(type(h).__name__ in _MOVES for h in getattr(hook, "hooks", [hook])):
            raise ConfigError(
                f"{type(model).__name__} cannot be streamed: hooks of accelerate move"
                f" all of {_called(name)} to the device at each call, as"
                " enable_model_cpu_offload() of a pipeline does, or"
                " enable_auto_cpu_offload() of a ComponentsManager; leave it out, or"
                f" take them off first, with {TAKE_OFF}, or with"
                " manager.disable_auto_cpu_offload()"
            )
    for _, place, _, tensor in hooked_tensors(model):
        if not tensor.is_meta:
            continue
        raise ConfigError(
            f"{type(model).__name__} cannot be streamed: hooks of accelerate keep"
            f" {place!r} elsewhere and leave it on the meta device, as cpu_offload()"
            " and device_map= of from_pretrained() or enable_sequential_cpu_offload()"
            f" of a pipeline set them; take them off first, with {TAKE_OFF}, or load"
            " the model without device_map"
        )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose weights `torch.distributed` divides between processes.

    Raises:
        ConfigError: If it has such weights; it names the first.
    """
    for name, module in model.named_modules():
        if any(_is_distributed(kind, "fsdp") for kind in type(module).__mro__):
            raise ConfigError(_shared_out(model, f"{_called(name)} is one of FSDP"))
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if getattr(parameter, "_is_flat_param", False):
            kind = "FlatParameter of FSDP"
        elif not _is_distributed(type(parameter)):
            continue
        raise ConfigError(_shared_out(model, f"{name!r} is a {kind}"))


def refuse_batched(model: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse weights of several models, of which `vmap` computes with all at once.

    Args:
        model: The name of the one in which they have taken the place of its own.
        tensors: Weights that were not there before.

    Raises:
        ConfigError: If one of them is such a batch.
    """
    for tensor in filter(is_batched, tensors):
        raise ConfigError(
            f"torch.func.vmap has put a batch of weights of shape {list(tensor.shape)}"
            f" in the place of one of {model}, which streams: expected its own; use the"
            " plain model, after the runtime's shutdown()"
        )


def refuse_unmovable(model: nn.Module) -> None:
    """Refuse quantized weights that another library would move in a way of its own.

    With what they keep beside their elements they are on the device together: see
    `belongings`. That fails where it is those elements once more, so that they would
    never leave, and where there is nothing yet: some are quantized as they are moved.

    Raises:
        ConfigError: In these two cases; it names the weight.
    """
    for name, weight in model.named_parameters():
        if not can_stream(weight) or weight.is_meta or not moves_itself(weight):
            continue
        found = [*belongings(name, weight)]
        _refuse_second(model, name, weight, found)
        if not found:
            raise ConfigError(
                f"{_as_kind(model, name, weight)}, which has a to() of its own and"
                " keeps nothing beside its elements: expected one that is quantized;"
                " what is quantized as it is moved has to be moved before, by"
                ' model.to("cpu") or to the device'
            )
    for name, module in model.named_modules():
        own = [(k, p) for k, p in module._parameters.items() if p is not None]
        found = [*belongings(name, module)] if own else []
        for key, weight in own:
            if found and can_stream(weight):
                _refuse_second(model, f"{name}.{key}".removeprefix("."), weight, found)


def _refuse_second(
    model: nn.Module,
    name: str,
    weight: torch.Tensor,
    found: Iterable[Belonging],
) -> None:
    """Refuse a weight whose elements something else has, which does not leave."""
    for place in found:
        if _has_elements_of(weight, place.tensor):
            raise ConfigError(
                f"{_as_kind(model, name, weight)}, whose elements {place.name!r} has as"
                " well, so that they would stay on the device: expected weights that"
                " are in one place; quantize it another way"
            )


def _has_elements_of(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is their memory, or a copy of quantized ones, on whichever device."""
    if not other.numel():
        return False
    if other.data_ptr() == weight.data_ptr():
        return True
    alike = other.dtype == weight.dtype and other.shape == weight.shape
    return alike and not other.is_floating_point()


def _as_kind(model: nn.Module, name: str, weight: torch.Tensor) -> str:
    return (
        f"{type(model).__name__} cannot be streamed: {name!r} is a"
        f" {type(weight).__name__} of {weight.dtype}"
    )


def _called(name: str) -> str:
    """Return what errors call a module of a model: the model itself has no name."""
    return f"module {name!r}" if name else "it"


def _is_distributed(kind: type, part: str = "") -> bool:
    return kind.__module__.startswith(f"torch.distributed.{part}")


def _shared_out(model: nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__} cannot be streamed: {what}, which divides weights"
        " between processes; expected plain tensors: stream the plain model, whole in"
        " each process"
    )
