"""The exception tree.

Errors that a user can cause derive from `ValueError` or `RuntimeError` as well, so
that code written for plain PyTorch catches them. `StagehandInternalError` alone means
a bug in this library.
"""

__all__ = [
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DeadlockError",
    "DtypeMismatchError",
    "HeaderError",
    "IndexMismatchError",
    "InvalidStateTransitionError",
    "ManifestError",
    "MissingTensorError",
    "OffsetError",
    "OptimizerError",
    "OrphanedParameterError",
    "ReadError",
    "ShardChangedError",
    "SizeMismatchError",
    "StagehandError",
    "StagehandInternalError",
    "StagehandOOMError",
    "StagehandWarning",
    "TensorMismatchError",
    "TransferError",
    "TruncatedShardError",
]


class StagehandError(Exception):
    """Base of everything this library raises on purpose."""


class StagehandInternalError(StagehandError, RuntimeError):
    """An invariant of this library is broken: please report it."""


class ConfigError(StagehandError, ValueError):
    """An argument or a combination of arguments cannot work."""


class ClosedError(StagehandError, RuntimeError):
    """Something was used after its `close()` or `shutdown()`."""


class DeadlockError(StagehandError, RuntimeError):
    """Threads would wait for each other's models for ever."""


class StagehandOOMError(StagehandError, ValueError):
    """A budget cannot hold what must be there at once.

    The numbers have defaults because pickling, which carries an exception out of a
    worker process, makes it from its message alone and restores them afterwards.

    Attributes:
        needed_bytes: The smallest number of bytes that would work.
        limit_bytes: The number of bytes that was allowed.
    """

    def __init__(
        self, message: str, *, needed_bytes: int = 0, limit_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class InvalidStateTransitionError(StagehandError, ValueError):
    """A residency state was left for one that cannot follow it."""


class DtypeMismatchError(StagehandError, ValueError):
    """A tensor has another element type than the one that was promised."""


class OrphanedParameterError(StagehandError, RuntimeError):
    """A streamed parameter was replaced, cast or moved behind the runtime's back."""


class TransferError(StagehandError, RuntimeError):
    """Bytes could not be moved between two tiers."""


class OptimizerError(StagehandError, RuntimeError):
    """An optimizer cannot take a step as it is asked to."""


class CheckpointError(StagehandError, ValueError):
    """A checkpoint on disk does not hold what the model needs."""


class HeaderError(CheckpointError):
    """A file's header is not a valid safetensors header."""


class OffsetError(CheckpointError):
    """A tensor's byte range overlaps another, leaves a gap or runs backwards."""


class SizeMismatchError(CheckpointError):
    """A tensor's byte range does not fit its shape and element type."""


class TruncatedShardError(CheckpointError):
    """A file is shorter than its header says."""


class IndexMismatchError(CheckpointError):
    """An index names a file or a tensor that is not there, or one tensor twice."""


class ManifestError(CheckpointError):
    """A quantized checkpoint does not fit its manifest, the model or this library."""


class MissingTensorError(CheckpointError):
    """A tensor that the model needs is in none of the files."""


class TensorMismatchError(CheckpointError):
    """A tensor in a file has another shape or element type than the parameter."""


class ShardChangedError(CheckpointError):
    """A file was replaced or rewritten while it was in use."""


class ReadError(CheckpointError):
    """The operating system could not read a file."""


class StagehandWarning(UserWarning):
    """Something works, but slower or otherwise than was asked for."""
