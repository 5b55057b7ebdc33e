"""Finds a value for every tensor of a model, before anything is changed or read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from stagehand.core.layout import can_cast
from stagehand.errors import (
    MissingTensorError,
    StagehandWarning,
    TensorMismatchError,
)
from stagehand.pretrained.naming import Made, Naming, same_tensors
from stagehand.pretrained.operators import on_meta
from stagehand.pretrained.scratch import PREFIX, shapes_of
from stagehand.stores.files import FileSet
from stagehand.stores.safetensors import read_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stagehand.pretrained.deferred import Built
    from stagehand.stores.checkpoint import Checkpoint, Extent

__all__ = ["Matched", "match", "untie"]

_LISTED = 5
_COMPARED_BYTES = 64 << 20


@dataclass(slots=True)
class Matched:
    """What each tensor of a model gets."""

    keys: dict[str, str]
    """For each tensor's name, that of its value: in the files, or among `made`."""
    tensors: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    """The tensors that get one, and its element type."""
    made: list[Made] = field(default_factory=list)
    """What must be written first."""
    made_bytes: int = 0
    """Bytes that it takes."""


def match(
    built: Built, checkpoint: Checkpoint, naming: Naming, dtype: torch.dtype | None
) -> Matched:
    """Find a value for every parameter and buffer.

    Args:
        built: The model; is not changed.
        checkpoint: Its files.
        naming: How its class finds its tensors in them.
        dtype: What floating-point tensors are cast to; None for nothing.

    Raises:
        MissingTensorError: If a value is nowhere; it lists all such, and what is near.
        TensorMismatchError: If a value has another shape.
    """
    search = _Search(built, checkpoint, naming, dtype)
    unknown = set(built.unknown)
    for tensor, names in same_tensors(built.model):
        unknown.difference_update(names)
        search.look_up(tensor, names)
    checkpoint.match(search.stored, naming.keys)
    _check_known(unknown, built)
    return search.finish()


class _Search:
    """Collects what each tensor of a model gets."""

    def __init__(
        self,
        built: Built,
        checkpoint: Checkpoint,
        naming: Naming,
        dtype: torch.dtype | None,
    ) -> None:
        self._built = built
        self._checkpoint = checkpoint
        self._naming = naming
        self._dtype = dtype
        all_made = [_casting(made, naming, dtype) for made in naming.made]
        self._computed = [(made, shapes_of(made, checkpoint)) for made in all_made]
        self._shapes = {n: t for _, found in self._computed for n, t in found.items()}
        self._targets: dict[str, torch.dtype] = {}
        self._matched = Matched(dict(naming.keys))
        self.stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        """Type and shape of each tensor that the files must have, by its model name."""

    def look_up(self, tensor: torch.Tensor, names: list[str]) -> None:
        """Find the value of one tensor, which may have several names."""
        in_files = [n for n in names if _key(n, self._naming) in self._checkpoint]
        found = [n for n in names if n in self._shapes] or in_files
        name = (found or names)[0]
        if not found and self._naming.optional(name):
            value = self._built.value_of(tensor)
            if value is not None and not isinstance(tensor, nn.Parameter):
                return  # it is there, and will not stream
            if value is not None:
                self._computed.append((_constant(name, value), {name: value}))
                self._shapes[name] = value
        if name in self._shapes:
            _check_shape(name, tensor, self._shapes[name])
            has = self._shapes[name].dtype
        else:
            key = _key(name, self._naming)
            has = self._checkpoint[key].dtype if found else tensor.dtype
            self.stored[name] = has, tuple(tensor.shape)
        self._targets[name] = self._target(name, has)
        self._matched.tensors.append((tensor, self._targets[name]))

    def _target(self, name: str, has: torch.dtype) -> torch.dtype:
        if not has.is_floating_point:
            return has
        target = self._naming.dtypes.get(name, self._dtype or has)
        if not can_cast(has, target):
            raise TensorMismatchError(
                f"tensor {name!r} of the checkpoint is {has}: expected a type that"
                f" torch casts to {target}; load it without dtype="
            )
        return target

    def finish(self) -> Matched:
        """Return all that was found."""
        for made, shapes in self._computed:
            self._write(made, shapes)
        for name, (has, shape) in self.stored.items():
            if self._targets[name] is not has:
                empty = torch.empty(shape, dtype=has, device="meta")
                made = _stored_as(name, _key(name, self._naming))
                self._write(made, {name: empty})
        return self._matched

    def _write(self, made: Made, shapes: Mapping[str, torch.Tensor]) -> None:
        """Note what is to be written, of the types that the model will have."""
        wanted = {n: self._targets[n] for n in shapes if n in self._targets}
        if not wanted:
            return

        def compute(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            values = made.compute(tensors)
            return {name: values[name].to(dtype) for name, dtype in wanted.items()}

        matched = self._matched
        matched.made.append(Made(sources=made.sources, compute=compute))
        matched.keys.update((name, PREFIX + name) for name in wanted)
        matched.made_bytes += sum(
            shapes[name].numel() * dtype.itemsize for name, dtype in wanted.items()
        )


def _key(name: str, naming: Naming) -> str:
    return naming.keys.get(name, name)


def _check_shape(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != tensor.shape:
        raise TensorMismatchError(
            f"tensor {name!r} that is computed from the checkpoint does not fit:"
            f" expected {list(tensor.shape)}, found {list(value.shape)}; build the"
            " model with the checkpoint's sizes"
        )


def _check_known(unknown: Iterable[str], built: Built) -> None:
    names = sorted(unknown)
    if names:
        more = ", ..." if len(names) > _LISTED else ""
        raise MissingTensorError(
            f"{type(built.model).__name__} has {len(names)} tensors without a value:"
            f" {', '.join(map(repr, names[:_LISTED]))}{more}; they are no part of its"
            " state_dict(), so no file has them, and its constructor draws them, leaves"
            " them uninitialized or was called on the meta device"
        )


def _casting(made: Made, naming: Naming, dtype: torch.dtype | None) -> Made:
    """Cast first what is computed from, as its library does: rounding differs."""
    if made.like is None:
        return made
    target = naming.dtypes.get(made.like, dtype)
    if target is None:
        return made

    def compute(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return made.compute({name: t.to(target) for name, t in tensors.items()})

    return replace(made, compute=compute)


def _constant(name: str, value: torch.Tensor) -> Made:
    return Made(sources=(), compute=lambda _: {name: value})


def _stored_as(name: str, key: str) -> Made:
    return Made(sources=(key,), compute=lambda tensors: {name: tensors[key]})


def untie(model: nn.Module, checkpoint: Checkpoint, naming: Naming) -> None:
    """Part tensors that the model ties and the checkpoint has different values for.

    `from_pretrained` of `transformers` does so, too; of other models it is an error.

    Raises:
        TensorMismatchError: If the model's class cannot part them.
    """
    for tensor, names in same_tensors(model):
        extents = {
            n: checkpoint[k] for n in names if (k := _key(n, naming)) in checkpoint
        }
        first = next(iter(extents), "")
        for name in list(extents)[1:]:
            if _are_equal(extents[first], extents[name], checkpoint):
                continue
            if naming.untie is None or not _part(model, name, first, tensor):
                raise TensorMismatchError(
                    f"{first!r} and {name!r} are one tensor of the model: expected one"
                    f" value for both, found two in {extents[name].path}; untie them in"
                    " the model, or map both to one with key_map"
                )
            naming.untie(name)
            naming.untie(first)
            warnings.warn(
                f"the model ties {first!r} and {name!r}, but the checkpoint has two"
                " values: they are not tied",
                StagehandWarning,
                stacklevel=3,
            )


def _are_equal(one: Extent, other: Extent, checkpoint: Checkpoint) -> bool:
    if one == other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    files = FileSet(checkpoint.files)
    try:
        for at in range(0, one.nbytes, _COMPARED_BYTES):
            pair = [e.between(at, at + _COMPARED_BYTES) for e in (one, other)]
            if not torch.equal(*(read_tensor(files, piece) for piece in pair)):
                return False
        return True
    finally:
        files.close()


def _part(model: nn.Module, name: str, other: str, tensor: torch.Tensor) -> bool:
    """Give a name a parameter of its own; False if the modules are one, too."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if module is model.get_submodule(other.rpartition(".")[0]):
        return False
    own = nn.Parameter(on_meta(tensor).detach(), tensor.requires_grad)
    setattr(module, attribute, own)
    return True
