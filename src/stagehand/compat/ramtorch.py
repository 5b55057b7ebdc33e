"""The functions of `ramtorch.helpers`, answered by `stagehand.layer()`.

A script that was written for them trains with another import:

    from stagehand.compat.ramtorch import replace_linear_with_ramtorch

The model streams as after `stagehand.layer()`: modules keep their classes, everything
large streams, not only `nn.Linear`, and gradients are those of autograd, at
`param.grad`. What streams has `is_ramtorch = True`, modules, parameters and buffers,
because other code asks for it: to leave them out of quantization, of moves and of what
`DistributedDataParallel` looks after. These attributes are the one exception to the
rule that a streamed model has no attribute but its handle; the runtime's `shutdown()`
takes them off.

What is small stays on the device and has no such attribute: it is to be treated like
the parameters of any model.

Not offered, because modules and their gradients are ordinary here:

- `Linear`: no module changes its class; ask for `is_ramtorch` instead of the class.
- `add_custom_hooks`, `register_ramtorch_hook`: they keep hooks for a backward pass of
  RamTorch's own; `torch.Tensor.register_hook` works.
- `transfer_ramtensor_to_device`: `tensor.to(device)`; inside of a forward, a streamed
  parameter is on the device already.
- Its optimizers and its sharding over processes (`AdamW`, `zero1`, `zero2`): any
  optimizer steps streamed parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

import stagehand
from stagehand.attribute import HANDLE
from stagehand.core.device import find_device
from stagehand.errors import ConfigError
from stagehand.modes import check_module
from stagehand.settings import check_value

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.hooks import RemovableHandle

    from stagehand.runtime import Runtime

__all__ = [
    "move_model_to_device",
    "reattach_is_ramtorch_flags",
    "register_ramtorch_grad_hook",
    "register_ramtorch_post_accumulate_grad_hook",
    "replace_linear_with_ramtorch",
]

_Model = TypeVar("_Model", bound=nn.Module)

_FLAG = "is_ramtorch"
_GRADIENT = "ramtorch_grad"


def replace_linear_with_ramtorch(
    module: _Model, device: torch.device | str | int | None = None, **options: Any
) -> _Model:
    """Stream a model's weights; nothing is replaced.

    Args:
        module: Is changed in place and returned.
        device: Where to compute: the accelerator by default, the host without one.
        **options: As for `stagehand.layer`, with its defaults: `vram_budget` is 80 % of
            what is free. Give each of several models its own.

    Raises:
        ConfigError: If an argument cannot work, or the model is streamed already.
        StagehandOOMError: If the budget is too small; it names the smallest that works.

    Example:
        >>> model = replace_linear_with_ramtorch(model, "cuda", vram_budget="8GB")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(batch).sum().backward()
        >>> optimizer.step()
    """
    stagehand.layer(module, device=device, **options)
    runtime = _runtime_of(module)
    if runtime is not None:
        runtime.at_shutdown(_unmark)
        _mark(module, runtime)
    return module


def move_model_to_device(
    model: _Model, device: torch.device | str | int | None = None
) -> _Model:
    """Move a model that does not stream; one that streams is left as it is.

    Of a model with a streamed part, the rest is moved.

    Args:
        model: Is changed in place and returned.
        device: The accelerator by default, the host without one.

    Raises:
        ConfigError: If it is no module, the machine has no such device, or a part
            streams to another.
    """
    check_module(model)
    if _runtime_of(model) is None:
        model.to(find_device(device).torch_device)
    return model


def reattach_is_ramtorch_flags(module: nn.Module) -> None:
    """Set `is_ramtorch` again where it was lost.

    Parameters lose it when the model is copied, or loaded by `torch.load`, or when they
    are replaced. Of a streamed model, all that streams gets it back. Of any other, the
    parameters and buffers of modules that still have it: copies and loaded models are
    plain models, so stream them again where that is wanted.

    Args:
        module: Is looked through with all that is below it.

    Raises:
        ConfigError: If it is no module.
    """
    check_module(module)
    runtime = _runtime_of(module)
    if runtime is not None:
        _mark(module, runtime)
        return
    if getattr(module, _FLAG, False):
        for tensor in _own_tensors(module):
            setattr(tensor, _FLAG, True)
    for child in module.children():
        reattach_is_ramtorch_flags(child)


def register_ramtorch_grad_hook(
    module: nn.Module,
    hook_fn: Callable[[torch.Tensor], torch.Tensor | None],
    param_names: Collection[str] | None = None,
) -> list[RemovableHandle]:
    """Register a hook on the gradient of every trainable parameter.

    Args:
        module: Whose parameters.
        hook_fn: Gets each gradient, and may return another in its place.
        param_names: Only these; all by default.

    Returns:
        What removes the hooks, by `remove()`.

    Raises:
        ConfigError: If an argument is of another type.
    """
    return [
        parameter.register_hook(hook_fn)  # type: ignore[no-untyped-call]
        for parameter in _trainable(module, hook_fn, param_names)
    ]


def register_ramtorch_post_accumulate_grad_hook(
    module: nn.Module,
    hook_fn: Callable[[torch.Tensor], None],
    param_names: Collection[str] | None = None,
) -> list[RemovableHandle]:
    """Register a hook that runs when a parameter's gradient was accumulated.

    Args:
        module: Whose trainable parameters.
        hook_fn: Gets the parameter. Its gradient is at `grad`, and while the hook runs
            also at `ramtorch_grad`, where such hooks look for it.
        param_names: Only these; all by default.

    Returns:
        What removes the hooks, by `remove()`.

    Raises:
        ConfigError: If an argument is of another type.
    """

    def hook(parameter: torch.Tensor) -> None:
        setattr(parameter, _GRADIENT, parameter.grad)
        try:
            hook_fn(parameter)
        finally:
            delattr(parameter, _GRADIENT)

    return [
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for parameter in _trainable(module, hook_fn, param_names)
    ]


def _trainable(
    module: nn.Module, hook_fn: object, names: Collection[str] | None
) -> list[nn.Parameter]:
    """Return the parameters that get a hook; refuse what is none."""
    check_module(module)
    if not callable(hook_fn):
        raise ConfigError(f"hook_fn is {hook_fn!r}: expected a function of a tensor")
    check_value("param_names", names, Collection[str] | None)
    return [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (names is None or name in names)
    ]


def _runtime_of(module: nn.Module) -> Runtime | None:
    runtime: Runtime | None = module.__dict__.get(HANDLE)
    return runtime


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _mark(model: nn.Module, runtime: Runtime) -> None:
    """Let exactly those have the flag that stream, and the modules that own them."""
    _unmark(model)
    streamed = {id(tensor) for tensor in runtime.streamed_tensors}
    for module in model.modules():
        for tensor in _own_tensors(module):
            if id(tensor) in streamed:
                setattr(tensor, _FLAG, True)
                module.__dict__[_FLAG] = True


def _unmark(model: nn.Module) -> None:
    for module in model.modules():
        for holder in (module, *_own_tensors(module)):
            holder.__dict__.pop(_FLAG, None)
