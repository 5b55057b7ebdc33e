"""Steps that are taken during backward, and what must not come between.

A parameter whose gradient is complete can be stepped while backward goes on with
others. That is only the same as a step afterwards if nobody changes the gradient, the
parameter or the options of its group later: each early step notes what it used and
what it left, and the optimizer's `step()` compares.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from stagehand.attribute import HANDLE
from stagehand.errors import ConfigError, OptimizerError

__all__ = ["EarlySteps", "GradientSource", "find_source"]

_REMEDY = (
    "make the optimizer with overlap=None to clip, scale, accumulate or skip"
    " gradients; zero_grad() gives this step up"
)

_LATER = (
    "do that before backward() or after step(), or make the optimizer with overlap=None"
)


class GradientSource(Protocol):
    """Who knows, during backward, which gradients have come home.

    As narrow as this because an optimizer needs no more: a streamed model's runtime is
    one, and a test's list of tensors can be one too.
    """

    def when_home(
        self, listener: Callable[[Sequence[nn.Parameter]], None]
    ) -> Callable[[], None]:
        """Call `listener(parameters)` for parameters whose gradient is complete.

        Such parameters lie on the host, and so does their `grad`; nobody else touches
        either of them during the call. Calls come one at a time, from one thread that
        is not inside autograd, and all of them have returned before `backward()`
        returns or raises. What the listener raises, `backward()` raises.

        Returns:
            A function that ends this; idempotent.
        """


def find_source(overlap: "GradientSource | nn.Module") -> GradientSource:
    """Return the source that a user means: it itself, or a streamed model's runtime.

    Raises:
        ConfigError: If it is neither.
    """
    source: Any = overlap
    if isinstance(overlap, nn.Module) and not hasattr(overlap, "when_home"):
        source = getattr(overlap, HANDLE, None)
        if source is None:
            raise ConfigError(
                f"overlap is a {type(overlap).__name__} that is not streamed; pass the"
                " model that stagehand.layer() returned, or overlap=None"
            )
    if not callable(getattr(source, "when_home", None)):
        raise ConfigError(
            f"overlap is a {type(source).__name__}, which has no when_home(); pass a"
            " streamed model, a GradientSource, or None"
        )
    found: GradientSource = source
    return found


_Options = Callable[[torch.Tensor], Mapping[str, float]]


class _Step(NamedTuple):
    """What a step used, and the version that it left its parameter in."""

    gradient: torch.Tensor  # held, so that no other can take its place unseen
    seen: int  # the gradient's version
    options: Mapping[str, float]
    left: int  # the parameter's version after the step


class EarlySteps:
    """The parameters that were stepped since the last `step()`, and with what."""

    def __init__(self) -> None:
        self._used: dict[torch.Tensor, _Step] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._used

    def note(self, parameters: Iterable[torch.Tensor], options: _Options) -> None:
        """Remember that these were stepped with what they have now.

        Args:
            parameters: What was stepped.
            options: Returns the options of a parameter's group.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                self._used[parameter] = _Step(
                    gradient,
                    gradient._version,
                    options(parameter),
                    parameter._version,
                )

    def check_new(
        self, parameters: Iterable[torch.Tensor], name: Callable[[torch.Tensor], str]
    ) -> None:
        """Do nothing if none of these was stepped before.

        Args:
            parameters: What is to be stepped.
            name: Says which parameter it is, for the error.

        Raises:
            OptimizerError: Otherwise.
        """
        again = [parameter for parameter in parameters if parameter in self._used]
        if again:
            raise OptimizerError(
                f"{_name_some(again, name)} got a gradient again, but had been stepped"
                " with the one of an earlier backward pass already, without a step()"
                f" since (overlap takes one backward pass for each); {_REMEDY}"
            )

    def check(self, name: Callable[[torch.Tensor], str], options: _Options) -> None:
        """Do nothing if all that was used is what it was.

        Args:
            name: Says which parameter it is, for the error.
            options: As for `note`.

        Raises:
            OptimizerError: Otherwise.
        """
        other = [p for p, step in self._used.items() if p.grad is not step.gradient]
        if other:
            raise OptimizerError(
                f"the grad of {_name_some(other, name)} was replaced or removed after"
                f" backward had stepped the parameter with it (overlap); {_REMEDY}"
            )
        changed = [p for p, s in self._used.items() if s.gradient._version != s.seen]
        if changed:
            raise OptimizerError(
                f"the grad of {_name_some(changed, name)} was changed in place (by"
                " clipping or a second backward pass) after backward had stepped the"
                f" parameter with it (overlap); {_REMEDY}"
            )
        edited = [p for p, step in self._used.items() if p._version != step.left]
        if edited:
            raise OptimizerError(
                f"{_name_some(edited, name)} was changed after backward had stepped it"
                f" (overlap), and before step(); {_LATER}"
            )
        for parameter, step in self._used.items():
            now = options(parameter)
            if now != step.options:
                changes = [
                    f"{key}={before} to {now.get(key)}"
                    for key, before in step.options.items()
                    if now.get(key) != before
                ]
                raise OptimizerError(
                    f"{', '.join(changes)}: changed after backward had stepped"
                    f" {name(parameter)} (overlap), and before step(); {_LATER}"
                )

    def clear(self) -> None:
        """Forget all."""
        self._used.clear()


def _name_some(
    parameters: Sequence[torch.Tensor], name: Callable[[torch.Tensor], str]
) -> str:
    first = name(parameters[0])
    more = len(parameters) - 1
    return f"{first} and {more} more" if more else first
