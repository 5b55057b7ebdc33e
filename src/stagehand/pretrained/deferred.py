"""Builds a model without its weights: parameters on `meta`, everything computed real.

Note: what has a value. A constructor makes tensors of three kinds: computed ones (a
table of frequencies, a mask), random ones, and uninitialized ones that it or nobody
fills. Only the first have a value that a second construction would have too, and what
is computed from them has one. So a dispatch mode, which sees every operator of this
thread and of no other, lets computed tensors be and makes the others on `meta`, where
they take no memory; what is computed from those is on `meta` in turn. Known values that
are written into uninitialized memory are remembered, and written again if they are
needed. A real tensor that random values are written into keeps its memory, and is
remembered as one without a value. No random number is drawn.
"""

from __future__ import annotations

import re
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stagehand.errors import ConfigError
from stagehand.pretrained.operators import Call
from stagehand.torch_private import DispatchMode, dispatching, give_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

__all__ = ["Built", "build", "empty_tensor"]

_LIFT = "aten::lift_fresh"  # Python numbers have become a tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model without its weights."""

    model: nn.Module
    """Its parameters are on `meta`, but for those that the constructor computes."""
    unknown: tuple[str, ...]
    """Buffers, and tensors that are plain attributes, that have no value."""
    value_of: Callable[[torch.Tensor], torch.Tensor | None]
    """Returns a tensor with the value that the constructor gives it, or None."""
    is_typed: bool = False
    """Whether it was built in the element type that it is loaded as: tensors of another
    type have that on purpose."""


def build(make: Callable[[], Any], dtype: torch.dtype | None = None) -> Built:
    """Call a constructor so that it makes no weights.

    Args:
        make: A module class or another callable that returns a module.
        dtype: The element type of floating-point tensors for which the constructor
            names none; None for torch's default.

    Raises:
        ConfigError: If no module is returned, or the constructor needs the value of a
            tensor that has none.
    """
    mode = _Unvalued(dtype)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(dispatching(mode))
        stack.enter_context(_Assignments())
        if mode.dtype is not None:
            stack.enter_context(_Numbers(mode))
            stack.enter_context(_default_type.of(mode.dtype))
        try:
            model = make()
        except (RuntimeError, TypeError) as error:
            if not re.search("meta|unallocated", str(error)):
                raise
            raise ConfigError(
                f"{_name(make)} cannot be built without its weights, whose values it"
                f" reads ({error}); build the model yourself and pass that"
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{_name(make)} returned a {type(model).__name__}: expected a module"
        )
    unknown = []
    for name, tensor in _tensors(model):
        value = mode.value_of(tensor)
        if value is None:
            unknown.append(name)
        elif value is not tensor:
            give_value(tensor, value)
    return Built(
        model=model,
        unknown=tuple(unknown),
        value_of=mode.value_of,
        is_typed=dtype is not None,
    )


def empty_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Move a tensor to `meta`, in place: the same object, without values."""
    # `empty_like` on `meta` imports a computer algebra system: 0.3 s and 30 MB.
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype, device="meta"
    )
    give_value(tensor, empty)


def _name(make: Callable[[], Any]) -> str:
    return getattr(make, "__name__", None) or repr(make)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors that are plain attributes of modules, by name."""
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}".removeprefix("."), value


class _Unvalued(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps tensors without a value apart from the others. See the note above."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.default = torch.get_default_dtype()
        self.dtype = None if dtype is self.default else dtype
        """For floating-point tensors of no given type, if not torch's default."""
        self.functions = 0
        """How many functions of torch are being called, one inside of the other."""
        self._is_named = False  # whether a class such as FloatTensor says the type
        # By their storages, which are held so that no other one gets their number.
        self._unknown: dict[int, torch.UntypedStorage] = {}
        self._writes: dict[int, _Writes] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports the compiler, to skip it

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with its value, None if it has none."""
        if tensor.layout is not torch.strided:
            return None if tensor.is_meta else tensor
        storage = tensor.untyped_storage()._cdata
        if tensor.is_meta:
            writes = self._writes.get(storage)
            return None if writes is None else writes.replay(tensor)
        return None if storage in self._unknown else tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = Call(func, args, dict(kwargs or {}))
        self._is_named = (
            not self.functions and "FloatTensor" in sys._getframe(1).f_code.co_names
        )
        if call.is_constant:
            return call.run_on_host()
        if call.is_view and not call.written:  # has a value if what it views has one
            return self._typed(call) if call.name == _LIFT else call.run()
        values = {id(tensor): self.value_of(tensor) for tensor in call.read}
        known = {number: v for number, v in values.items() if v is not None}
        is_known = not call.is_undefined() and len(known) == len(values)
        if is_known:
            call = call.with_tensors(lambda t: known.get(id(t), t))
        if call.written:
            return self._write(call, is_known)
        if is_known:
            return self._typed(call)
        if call.is_test:
            return False  # ends the loops that draw until something holds
        result = call.run_on_meta()
        return result.to(self.dtype) if self._is_untyped(call, result) else result

    def _write(self, call: Call, is_known: bool) -> Any:
        if not any(tensor.is_meta for tensor in call.written):
            if is_known:
                return call.run()
            for tensor in call.written:
                storage = tensor.untyped_storage()
                self._unknown[storage._cdata] = storage
            return call.unchanged()
        for tensor in call.written:
            storage = tensor.untyped_storage()
            writes = self._writes.setdefault(storage._cdata, _Writes(storage))
            writes.note(call if is_known else None, tensor)
        return call.run_on_meta()

    def _is_untyped(self, call: Call, result: Any) -> bool:
        """Whether a result has torch's default type because no other was given."""
        default = isinstance(result, torch.Tensor) and result.dtype is self.default
        if self.dtype is None or not default or self._is_named or call.names_dtype:
            return False
        if _fills_in():
            return False
        if call.name == _LIFT:
            return not self.functions
        return not any(t.is_floating_point() or t.is_complex() for t in call.read)

    def _typed(self, call: Call) -> Any:
        """Run an operator under another default type than torch's."""
        result, dtype = call.run(), self.dtype
        if dtype is None or not self._is_untyped(call, result):
            return result
        if call.read:
            return call.with_tensors(lambda tensor: tensor.to(dtype)).run()
        return call.run(dtype=dtype) if call.takes("dtype") else result


def _fills_in() -> bool:
    """Whether a class of transformers gives its tensors the values that no file has.

    `from_pretrained()` lets it when the model is built: in torch's default type.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_weights":
        frame = frame.f_back
    return frame is not None


class _Writes:
    """What was written into memory that is not there, to be written again.

    A constructor that fills uninitialized memory piece by piece is trusted to fill all
    that it uses.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._calls: list[tuple[Call, _Form]] | None = []

    def note(self, call: Call | None, tensor: torch.Tensor) -> None:
        """Note an operator that writes; None for one whose values are unknown."""
        if call is not None and call.covers and self._is_whole(tensor):
            self._calls = []
        if call is None:
            self._calls = None
        elif self._calls is not None:
            # Without the tensor itself, which could not be replaced if it were held.
            self._calls.append((call.with_tensors(_without_memory), _Form.of(tensor)))

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        return tensor.is_contiguous() and nbytes == self._storage.nbytes()

    def replay(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of this memory with its value, None if that is unknown."""
        if not self._calls:
            return None
        memory = torch.empty(self._storage.nbytes(), dtype=torch.uint8, device="cpu")
        for call, form in self._calls:
            call.with_tensors(partial(_unless_meta, form.placed_in(memory))).run()
        return _Form.of(tensor).placed_in(memory)


def _unless_meta(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return place if tensor.is_meta else tensor


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, device="meta") if tensor.is_meta else tensor


@dataclass(frozen=True, slots=True)
class _Form:
    """Where in its memory a tensor lies, and how."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    def placed_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this form in other memory."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        storage = memory.untyped_storage()
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class _Assignments(TorchFunctionMode):
    """Lets `tensor.data` be assigned where just one of both tensors is on `meta`.

    A bias that was filled and is padded then has a value: heads of BERTs do so.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _ASSIGN and args[0].is_meta is not args[1].is_meta:
            return give_value(*args)
        return func(*args, **(kwargs or {}))


_ASSIGN = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Numbers(TorchFunctionMode):
    """Lets `torch.tensor` of Python numbers have another default type.

    It also counts functions that are being called: `torch.Tensor`, a class, is none.
    """

    def __init__(self, mode: _Unvalued) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._mode.functions += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._mode.functions -= 1
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("dtype"):
            return result
        source = args[0] if args else kwargs.get("data")
        # An array has a type of its own.
        if hasattr(source, "dtype") or result.dtype is not self._mode.default:
            return result
        if _fills_in():
            return result
        return func(*args, **{**kwargs, "dtype": self._mode.dtype})


class _DefaultType:
    """Stands for `torch.get_default_dtype` while models are built in another type.

    It says that type in the threads that build them. Torch's own is one for all: if it
    was set, what other threads compute would change.
    """

    def __init__(self) -> None:
        self._real = torch.get_default_dtype
        self._here = threading.local()
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self) -> torch.dtype:
        real = self._real()
        usual, instead = getattr(self._here, "types", (None, None))
        # A constructor may have set it meanwhile, for a part.
        return real if instead is None or real is not usual else instead

    @contextmanager
    def of(self, dtype: torch.dtype) -> Iterator[None]:
        """Say a type in this thread."""
        with self._lock:
            if not self._count:
                self._real, torch.get_default_dtype = torch.get_default_dtype, self
            self._count += 1
        usual = self._real()
        self._here.types = usual, dtype
        try:
            yield
        finally:
            del self._here.types
            with self._lock:
                self._count -= 1
                if not self._count:
                    torch.get_default_dtype = self._real
            if self._real() is dtype:  # somebody read it here, and has put it back
                torch.set_default_dtype(usual)


_default_type = _DefaultType()
