"""The results' file: a line a measurement, and which are there already."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import stagehand

if TYPE_CHECKING:
    from benchmarks.gpu.cells import Cell

__all__ = ["Lines", "source_of"]


class Lines:
    """What is written of one device.

    Args:
        device: Its name.
        folder: Where the file lies; None prints.
    """

    def __init__(self, device: str, folder: Path | None) -> None:
        self._about = {
            "device": device,
            "torch": torch.__version__,
            "source": source_of(Path(stagehand.__file__).parent),
        }
        name = f"{device.replace(' ', '-')}.jsonl"
        self._path = None if folder is None else folder / name
        read = self._read()
        self.link = next(filter(self._is_link, read), None)
        """What the link was measured to do; None if it was not."""
        self._there = {_key(line) for line in read if "failed" not in line}
        self._tried = {_key(line) for line in read}

    def __contains__(self, cell: Cell) -> bool:
        """Whether it was measured, or left out; what failed has to be tried again."""
        return self._key_of(cell) in self._there

    def tried(self, cell: Cell) -> bool:
        """Whether it was measured, or failed."""
        return self._key_of(cell) in self._tried

    def _is_link(self, line: dict[str, Any]) -> bool:
        return line.get("kind") == "link" and _key(line) == _key(self._about)

    def _key_of(self, cell: Cell) -> str:
        return _key({**self._about, "cell": cell.line()})

    def _read(self) -> list[dict[str, Any]]:
        if self._path is None or not self._path.exists():
            return []
        text = self._path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # cut off while it was written
            self._path.write_text("".join(lines[:-1]), encoding="utf-8")
            del lines[-1]
        return [json.loads(line) for line in lines if line.strip()]

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        text = json.dumps({**self._about, **line})
        if self._path is None:
            print(text, flush=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def source_of(package: Path) -> str:
    """Return what tells one text of a package from another: of its files, a hash.

    A copied tree has no history of revisions.
    """
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(path.relative_to(package).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _key(line: dict[str, Any]) -> str:
    found = {name: line.get(name) for name in ("device", "torch", "cell")}
    return json.dumps(found, sort_keys=True)
