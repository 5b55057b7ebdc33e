"""What stands for a saved tensor that is left where it is.

Hooks for saved tensors switch autograd's own version check off, so whoever installs
them has to make it, with the same error.
"""

from functools import cache

import torch

from stagehand.torch_private import dispatch_modes, inference_mode, without_modes

__all__ = ["Kept", "emptied", "ghost_of", "modified", "unchanged", "versioned"]


def modified(what: str, found: int, expected: int) -> RuntimeError:
    """Return the error that autograd raises for a saved tensor that was changed.

    Args:
        what: The tensor, for the message.
        found: Its version.
        expected: Its version when it was saved.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an"
        f" inplace operation: {what} is at version {found}; expected version"
        f" {expected} instead"
    )


def versioned(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the version counter of one and the memory of another.

    Args:
        tensor: Whose version counter: a later change of either is seen in both.
        data: Whose memory.
    """
    if dispatch_modes():
        with without_modes():
            return versioned(tensor, data)
    found = tensor.detach()
    found.data = data
    return found


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Take a tensor's memory from it, but not its version counter; return it."""
    if dispatch_modes():
        with without_modes():
            return emptied(tensor)
    tensor.data = _nothing(tensor.device)
    return tensor


def ghost_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the version counter of another, and without memory."""
    return versioned(tensor, _nothing(tensor.device))


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    """Return a tensor without memory; one serves all, for nobody writes to it."""
    with inference_mode(False), without_modes():
        return torch.empty(0, device=device)


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return a saved tensor, if it still has the version that it was saved with.

    Raises:
        RuntimeError: If it was changed in place since then.
    """
    if tensor._version != version:
        what = f"a {tensor.dtype} tensor of shape {list(tensor.shape)}"
        raise modified(what, tensor._version, version)
    return tensor


class Kept:
    """A saved tensor that is kept as it is.

    Detached, because a node that holds its own output would never be freed.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, saved: torch.Tensor) -> None:
        self.tensor = saved.detach()
        self.version = saved._version

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was changed in place since it was saved.
        """
        return unchanged(self.tensor, self.version)
