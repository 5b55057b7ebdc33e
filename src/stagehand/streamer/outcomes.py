"""What came of each configuration, and the file from which a search goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stagehand.errors import ConfigError
from stagehand.settings import check_value
from stagehand.stores.headers import load_json
from stagehand.stores.writing import unfinished_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Outcome", "OutcomeFile", "write_whole"]

_SEARCH = "search"
_TYPES: dict[str, Any] = {
    "config": Mapping,
    "status": str,
    "seconds": float | None,
    "passes": int,
    "runs": tuple[float, ...],
    "reason": str,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One configuration, measured or not."""

    config: dict[str, int | None]
    """The settings, under the names that the constructor takes."""
    status: str
    """`"measured"`; `"slower"`: stopped when it could not win any more; `"pruned"`: it
    could not win from the start; or `"failed"`."""
    seconds: float | None = None
    """Mean of the measured runs."""
    passes: int = 0
    """Passes in a run."""
    runs: tuple[float, ...] = field(default=())
    """Seconds of each measured run."""
    reason: str = ""
    """Why it was not measured to its end."""

    @property
    def seconds_per_pass(self) -> float | None:
        """Mean seconds of a pass."""
        return self.seconds / self.passes if self.seconds and self.passes else None


class OutcomeFile:
    """Lines of JSON: first what was searched for, then an outcome each.

    A line that an interruption cut off is dropped.

    Args:
        path: The file; it need not exist.
        search: What tells this search from others.
    """

    def __init__(self, path: Path, search: Mapping[str, Any]) -> None:
        self._path = path
        # As JSON has it: tuples are lists there.
        self._search = json.loads(json.dumps(dict(search)))

    def read(self) -> list[Outcome]:
        """Return the outcomes so far, and make the file whole.

        Raises:
            ConfigError: If it belongs to another search, or cannot be read or written.
        """
        try:
            text = self._path.read_text() if self._path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"results_file {str(self._path)!r} cannot be read: {error}"
            ) from error
        lines = _whole_lines(text)
        if lines and lines[0].get(_SEARCH) != self._search:
            raise ConfigError(
                f"results_file {str(self._path)!r} has the results of another search:"
                f" expected {self._search}, found {lines[0].get(_SEARCH)}; delete it,"
                " or give another one"
            )
        try:
            outcomes = [
                Outcome(**{**line, "runs": tuple(line["runs"])}) for line in lines[1:]
            ]
            for outcome in outcomes:
                for name, kind in _TYPES.items():
                    check_value(name, getattr(outcome, name), kind)
        except (KeyError, TypeError, ConfigError) as error:
            raise ConfigError(
                f"results_file {str(self._path)!r} is not one of ours ({error}): delete"
                " it, or give another one"
            ) from error
        self._write(outcomes)
        return outcomes

    def _write(self, outcomes: list[Outcome]) -> None:
        lines: list[dict[str, Any]] = [{_SEARCH: self._search}]
        lines += map(asdict, outcomes)
        whole = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_whole(self._path, whole, "results_file")

    def add(self, outcome: Outcome) -> None:
        """Add an outcome at the end.

        Raises:
            ConfigError: If it cannot be written; those before it stay readable.
        """
        try:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(asdict(outcome))}\n")
        except OSError as error:
            raise ConfigError(
                f"results_file {str(self._path)!r} cannot be written: {error}; it has"
                " all results but the last: make room, and search again from there"
            ) from error


def write_whole(path: Path, text: str, what: str) -> None:
    """Write a file, or leave the one that is there.

    Raises:
        ConfigError: If it cannot be written; it calls the file `what`.
    """
    unfinished = unfinished_name(path)
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except (OSError, ValueError) as error:  # such as a NUL in its name
        raise ConfigError(f"{what} {str(path)!r} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            unfinished.unlink(missing_ok=True)


def _whole_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines up to the first that is not whole."""
    lines: list[dict[str, Any]] = []
    for line in text.splitlines(keepends=True):
        try:
            value = load_json(line.encode())
        except ValueError:
            break
        if not isinstance(value, dict) or not line.endswith("\n"):
            break
        lines.append(value)
    return lines
