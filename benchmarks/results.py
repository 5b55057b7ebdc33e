"""What a benchmark found, held against its target, as a table or as JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.timing import Times

__all__ = ["Result", "as_lines", "as_table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One figure. The smallest of many repetitions is what counts."""

    name: str
    value: float
    median: float
    unit: str
    """Empty for a line that only says something."""
    target: float | None = None
    """The most that is allowed; None where a figure only explains others."""

    @classmethod
    def of(
        cls,
        name: str,
        times: Times,
        unit: str,
        *,
        scale: float = 1.0,
        target: float | None = None,
    ) -> "Result":
        """Return a result from times, multiplied by `scale` for its unit."""
        return cls(
            name=name,
            value=times.smallest * scale,
            median=times.median * scale,
            unit=unit,
            target=target,
        )

    @property
    def ok(self) -> bool:
        """Whether the target is met, or there is none."""
        return self.target is None or self.value <= self.target

    @property
    def verdict(self) -> str:
        """ "ok" or "miss", or nothing without a target."""
        if self.target is None:
            return ""
        return "ok" if self.ok else "miss"


def as_lines(results: Sequence[Result]) -> str:
    """Return one JSON object a line."""
    return "\n".join(json.dumps({**asdict(r), "ok": r.ok}) for r in results)


def as_table(results: Sequence[Result]) -> str:
    """Return a table with one line a result."""
    head = ("", "min", "median", "target", "unit", "")
    rows = [head, *(_cells(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(result: Result) -> tuple[str, ...]:
    if not result.unit:
        return result.name, "", "", "", "", ""
    target = "" if result.target is None else f"<= {result.target:g}"
    return (
        result.name,
        f"{result.value:.3g}",
        f"{result.median:.3g}",
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
