"""All ways by name."""

from benchmarks.gpu.ways.others import OTHERS
from benchmarks.gpu.ways.own import OWN
from benchmarks.gpu.ways.plain import PLAIN

__all__ = ["WAYS", "ways_of"]

WAYS = {**OWN, **PLAIN, **OTHERS}


def ways_of(kind: str) -> list[str]:
    """Return those that can do something, this library's first."""
    return [name for name, way in WAYS.items() if kind in way.kinds]
