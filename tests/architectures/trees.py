"""Walk nested values: find the tensors, move them, compare them bit by bit."""

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def flatten(output: Any) -> list[torch.Tensor]:
    """List every tensor inside an output, in a stable order.

    Walks mappings, sequences and the attributes of other objects, such as key-value
    caches; a tensor met twice is listed once.

    Args:
        output: What a model returned.

    Raises:
        TypeError: A value is of a kind that this walk does not know, so a tensor in it
            would be missed.
    """
    return list(_walk(output, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if _holds_no_tensor(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in _parts(value):
        yield from _walk(part, seen)


def _holds_no_tensor(value: Any) -> bool:
    plain = (str, bytes, numbers.Number, type, torch.dtype, torch.device)
    return value is None or isinstance(value, plain)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if hasattr(value, "__dict__"):
        return list(vars(value).values())
    raise TypeError(f"cannot look for tensors in a {type(value).__name__}: {value!r}")


def to_device(tree: Any, device: torch.device | str) -> Any:
    """Copy a tree of dicts, lists and tuples with every tensor moved to `device`."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(to_device(value, device) for value in tree)
    return tree


def assert_bitwise_equal(a: Any, b: Any, what: str) -> None:
    """Fail unless both trees hold the same tensors: dtype, shape and every byte.

    A NaN equals a NaN of the same bits; 0.0 does not equal -0.0.

    Args:
        a: A tensor, or anything `flatten` accepts, on any device.
        b: The other.
        what: Names the case in the failure.
    """
    left, right = flatten(a), flatten(b)
    assert len(left) == len(right), f"{what}: {len(left)} tensors against {len(right)}"
    for index, (x, y) in enumerate(zip(left, right, strict=True)):
        where = f"{what}, tensor {index} of {len(left)}"
        assert x.dtype == y.dtype, f"{where}: {x.dtype} against {y.dtype}"
        assert x.shape == y.shape, f"{where}: {x.shape} against {y.shape}"
        if not torch.equal(_bytes(x), _bytes(y)):
            raise AssertionError(f"{where}: {_difference(x, y)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8)


def _difference(x: torch.Tensor, y: torch.Tensor) -> str:
    size = x.element_size()
    pairs = (_bytes(x).view(-1, size), _bytes(y).view(-1, size))
    differing = (pairs[0] != pairs[1]).any(dim=1).nonzero().flatten()
    first = int(differing[0])
    values = (x.detach().cpu().reshape(-1)[first], y.detach().cpu().reshape(-1)[first])
    return (
        f"{len(differing)} of {x.numel()} elements differ, the first at flat index "
        f"{first}: {values[0].item()!r} against {values[1].item()!r}"
    )
