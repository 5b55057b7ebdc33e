"""What a benchmark found, held against its target, as a row or as a JSON line."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import Times, Until

__all__ = [
    "HEAD",
    "Result",
    "as_line",
    "as_row",
    "met",
    "ratio",
    "shown",
    "until_met",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One figure. The smallest of many repetitions counts, if its name says nothing."""

    name: str
    value: float
    median: float
    unit: str
    """Empty for a line that only says something."""
    target: float | None = None
    """The most that is allowed; None where a figure only explains others."""
    why: str = ""
    """Why the target is missed, where that is known: then it is no failure."""

    @classmethod
    def of(
        cls,
        name: str,
        times: Times,
        unit: str,
        *,
        scale: float = 1.0,
        target: float | None = None,
        why: str = "",
    ) -> "Result":
        """Return a result from times, multiplied by `scale` for its unit."""
        return cls(
            name=name,
            value=times.smallest * scale,
            median=times.median * scale,
            unit=unit,
            target=target,
            why=why,
        )

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "Result":
        """Return what a line of `as_line` was made from."""
        return cls(**{name: value for name, value in line.items() if name != "ok"})

    @property
    def ok(self) -> bool:
        """Whether the target is met, or there is none."""
        return self.target is None or self.value <= self.target

    @property
    def verdict(self) -> str:
        """ "ok" or "miss", or nothing without a target."""
        if self.target is None:
            return ""
        if self.ok:
            return "ok"
        return f"miss: {self.why}" if self.why else "miss"


def ratio(
    name: str, value: float, target: float | None, unit: str = "x", *, why: str = ""
) -> Result:
    """Return a figure that is calculated: one number is the whole truth."""
    return Result(
        name=name, value=value, median=value, unit=unit, target=target, why=why
    )


def met(results: Iterable[Result]) -> bool:
    """Return whether no target is missed without a reason."""
    return all(result.ok or result.why for result in results)


def until_met(rows_of: Callable[[Mapping[str, Times]], Iterable[Result]]) -> Until:
    """Return what asks whether what would be made of times is met."""
    return lambda times: met(rows_of(times))


def as_line(result: Result) -> str:
    """Return a JSON object."""
    return json.dumps({**asdict(result), "ok": result.ok})


def as_row(result: Result) -> str:
    """Return a row of a table that is printed while it grows: names come last."""
    if not result.unit:
        return _row("", "", "", "", "", result.name)
    return _row(
        shown(result.value, result.unit),
        shown(result.median, result.unit),
        "" if result.target is None else f"<= {result.target:g}",
        result.unit,
        "" if result.target is None else "ok" if result.ok else "miss",
        f"{result.name}: {result.why}" if result.why and not result.ok else result.name,
    )


def _row(*cells: str) -> str:
    smallest, median, target, unit, verdict, name = cells
    numbers = f"{smallest:>9}  {median:>9}  {target:>10}"
    return f"{numbers}  {unit:<13}  {verdict:<4}  {name}"


HEAD = _row("min", "median", "target", "unit", "", "what")
"""What stands above rows."""


def shown(value: float, unit: str) -> str:
    """Return a figure as tables have it; of ratios thousandths count."""
    return f"{value:.4g}" if unit == "x" else f"{value:.3g}"
