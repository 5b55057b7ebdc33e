"""What a benchmark found, held against its target, as a table or as JSON lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import Times

__all__ = ["Result", "as_lines", "as_table", "ratio", "shown"]


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
        """Return what a line of `as_lines` was made from."""
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


def as_lines(results: Sequence[Result]) -> str:
    """Return one JSON object a line."""
    return "\n".join(json.dumps({**asdict(r), "ok": r.ok}) for r in results)


def as_table(results: Sequence[Result]) -> str:
    """Return a table with one line a result."""
    head = ("", "min", "median", "target", "unit", "")
    rows = [head, *(_cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(row, widths) for row in rows)


def shown(value: float, unit: str) -> str:
    """Return a figure as tables have it; of ratios thousandths count."""
    return f"{value:.4g}" if unit == "x" else f"{value:.3g}"


def _cells(result: Result) -> tuple[str, ...]:
    if not result.unit:
        return result.name, "", "", "", "", ""
    target = "" if result.target is None else f"<= {result.target:g}"
    return (
        result.name,
        shown(result.value, result.unit),
        shown(result.median, result.unit),
        target,
        result.unit,
        result.verdict,
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers, unit, verdict = row
    middle = (
        text.rjust(width) for text, width in zip(numbers, widths[1:], strict=False)
    )
    return "  ".join([name.ljust(widths[0]), *middle, unit.ljust(widths[4]), verdict])
