"""One operator as a dispatch mode sees it: what it reads, writes and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Call", "on_meta"]

_META = torch.device("meta")
_EMPTY = ("aten::empty", "aten::new_empty")
_OF_FORM = (
    *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
)
_COVERING = ("aten::fill_", "aten::zero_", "aten::copy_")


class Call:
    """One operator with its arguments."""

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._places = {a.name: i for i, a in enumerate(func._schema.arguments)}
        self.name: str = func._schema.name
        """Such as `aten::copy_`."""
        self.read: list[torch.Tensor] = []
        """Tensors among the arguments that it does not write to."""
        self.written: list[torch.Tensor] = []
        """Tensors among the arguments that it writes to."""
        self.is_view = False
        """Whether the result shares the memory of an argument."""
        for argument in func._schema.arguments:
            alias = argument.alias_info
            self.is_view |= alias is not None
            into = self.written if alias is not None and alias.is_write else self.read
            into.extend(_leaves(self.given(argument.name)))

    @property
    def is_test(self) -> bool:
        """Whether somebody asks if something holds, to go on accordingly."""
        is_read = self.name == "aten::_local_scalar_dense"
        return is_read and self.read[0].dtype is torch.bool

    @property
    def is_constant(self) -> bool:
        """Whether the value is known, though the result would be on `meta`.

        So it is of `zeros_like` of a tensor there, and of a number that torch makes a
        tensor there, to write it into another one.
        """
        if self.name == "aten::scalar_tensor":
            return bool(self.given("device") == _META)
        return self.name in _OF_FORM and self.read[0].is_meta

    @property
    def names_dtype(self) -> bool:
        """Whether whoever called it named an element type.

        Where torch does by itself, as in `torch.Tensor(3)`, it names these three.
        """
        by_itself = self._kwargs.keys() == {"dtype", "layout", "device"}
        return self.given("dtype") is not None and not by_itself

    @property
    def covers(self) -> bool:
        """Whether it overwrites all of the tensor that it writes to."""
        return self.name in _COVERING

    def takes(self, name: str) -> bool:
        """Whether the operator has such an argument."""
        return name in self._places

    def given(self, name: str) -> Any:
        """Return an argument, None if it is not given."""
        place = self._places.get(name)
        if place is not None and place < len(self._args):
            return self._args[place]
        return self._kwargs.get(name)

    def is_undefined(self) -> bool:
        """Whether the result is random or uninitialized."""
        if torch.Tag.nondeterministic_seeded in self._func.tags:
            return self.given("generator") is None
        return self.name.startswith(_EMPTY)

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the operator on other tensors."""
        args = tuple(_mapped(value, change) for value in self._args)
        kwargs = {name: _mapped(v, change) for name, v in self._kwargs.items()}
        return Call(self._func, args, kwargs)

    def run(self, *, dtype: torch.dtype | None = None) -> Any:
        """Run the operator; for another element type than it says."""
        kwargs = self._kwargs if dtype is None else {**self._kwargs, "dtype": dtype}
        return self._func(*self._args, **kwargs)

    def run_on_meta(self) -> Any:
        """Run the operator on shapes alone."""
        call = self.with_tensors(on_meta)
        if call.takes("device"):
            call._kwargs["device"] = _META
        return call.run()

    def run_on_host(self) -> Any:
        """Run the operator on the host instead."""
        kwargs = {**self._kwargs, "device": torch.device("cpu")}
        return self._func(*self._args, **kwargs)

    def unchanged(self) -> Any:
        """Return what the operator would, had it nothing to write."""
        count = len(self._func._schema.returns)
        if count == 0:
            return None
        return self.written[0] if count == 1 else tuple(self.written)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, without memory; itself if it has none."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META
    )


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    return value
