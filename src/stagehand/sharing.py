"""What a runtime may ask of the others on its device; a part of `Runtime`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from stagehand.attribute import HANDLE
from stagehand.errors import ConfigError
from stagehand.residency.holds import ResidentPriority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stagehand.tenancy import Tenancy
    from stagehand.weak_refs import ModelRef

__all__ = ["Sharing"]

_logger = logging.getLogger("stagehand")


class Sharing:
    """Holds, reservations and guests among runtimes that share a device."""

    _tenancy: Tenancy
    _model: ModelRef

    @property
    def block_ids(self) -> tuple[str, ...]:
        """The names of all streamed blocks."""
        raise NotImplementedError

    @contextmanager
    def keep_resident(
        self, model_or_runtime: nn.Module | Sharing | None = None
    ) -> Iterator[None]:
        """Let no other model take device memory of this one inside the `with`.

        What is on the device of it stays, and so does what its passes bring there, as
        far as every other model can still run. Nests, and ends with an exception, too.

        Args:
            model_or_runtime: Whose blocks stay; this runtime's own by default.

        Raises:
            ConfigError: If it does not share this runtime's device memory.
        """
        kept = self._neighbour(model_or_runtime)
        if not kept.block_ids:
            _logger.warning("%s has no blocks to keep resident", kept._tenancy.name)
        shared = self._tenancy.shared
        yield from _held(kept, shared.keep, shared.end_keep)

    def reserve_for_resident(
        self,
        model_or_runtime: nn.Module | Sharing | None = None,
        priority: ResidentPriority = ResidentPriority.PRIMARY,
    ) -> int:
        """Reserve device memory for one model until `release_reservation()`.

        A model that fits its budget gets room for all of it. One that streams gets what
        the other models do not need to run. The memory is its own from its next pass
        on, whoever runs, through every new plan, and until the model is shut down. A
        second call replaces the first.

        Args:
            model_or_runtime: For which; this runtime's own by default.
            priority: PRIMARY is never evicted, SECONDARY only if another model's load
                could not be met otherwise.

        Returns:
            How many bytes are reserved.

        Raises:
            StagehandOOMError: If they are not there; it names the missing bytes and who
                holds them.
            ConfigError: If it is a guest, or does not share this runtime's device
                memory, or there is no such priority.
        """
        if not isinstance(priority, ResidentPriority):
            raise ConfigError(
                f"priority is {priority!r}: expected ResidentPriority.PRIMARY or"
                " SECONDARY"
            )
        number = self._neighbour(model_or_runtime)._tenancy.number
        return self._tenancy.shared.reserve(number, priority)

    def release_reservation(
        self, model_or_runtime: nn.Module | Sharing | None = None
    ) -> None:
        """End what `reserve_for_resident` began; without it nothing happens.

        Args:
            model_or_runtime: Whose; this runtime's own by default.
        """
        held = self._found(model_or_runtime)
        if held is not None and held._tenancy.shared is self._tenancy.shared:
            self._tenancy.shared.release(held._tenancy.number)

    @contextmanager
    def as_guest(self, model_or_runtime: nn.Module | Sharing) -> Iterator[None]:
        """Let another model use only device memory that nobody has reserved or keeps.

        At the end of the `with` all of it leaves the device; its next pass brings it
        back. One that trains takes its gradients along: step its optimizer inside of
        the `with`, where the optimizer's state lies beside its parameters.

        Args:
            model_or_runtime: The guest.

        Raises:
            StagehandOOMError: If that is less than it needs to run; it names the
                missing bytes and who holds them.
            ConfigError: If it has a reservation, is this runtime itself, or does not
                share its device memory.
        """
        guest = self._neighbour(model_or_runtime)
        if guest is self:
            raise ConfigError(
                f"{self._tenancy.name} cannot be its own guest: name another model"
            )
        shared = self._tenancy.shared
        yield from _held(guest, shared.begin_guest, shared.end_guest)

    def _neighbour(self, target: nn.Module | Sharing | None) -> Sharing:
        """Return a runtime that shares this one's device memory, this one included."""
        self._model.check()
        found = self._found(target)
        if found is None:
            raise ConfigError(
                f"{type(target).__name__} is not streamed: expected a runtime, or a"
                " model after stagehand.layer()"
            )
        found._model.check()
        if found._tenancy.shared is not self._tenancy.shared:
            raise ConfigError(
                f"{found._tenancy.name} and {self._tenancy.name} do not share device"
                " memory: they are on different devices, or one was streamed with"
                " shared=False"
            )
        return found

    def _found(self, target: nn.Module | Sharing | None) -> Sharing | None:
        if target is None:
            return self
        if isinstance(target, Sharing):
            return target
        if not isinstance(target, nn.Module):
            raise ConfigError(
                f"{target!r} is not streamed: expected a runtime, or a model after"
                " stagehand.layer()"
            )
        handle = target.__dict__.get(HANDLE)
        return handle if isinstance(handle, Sharing) else None


def _held(
    who: Sharing,
    begin: Callable[[int, object], None],
    end: Callable[[int, object], None],
) -> Iterator[None]:
    """Begin a hold of a runtime, and end it, whenever an interrupt may come."""
    number, hold = who._tenancy.number, object()
    try:
        begin(number, hold)
        yield
    finally:
        try:
            end(number, hold)
        finally:
            end(number, hold)
