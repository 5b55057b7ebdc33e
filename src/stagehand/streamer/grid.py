"""Which configurations are worth a measurement: pure functions of measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from stagehand.errors import ConfigError
from stagehand.streamer.depths import Depths
from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stagehand.streamer.rates import Rates

__all__ = ["Sizes", "candidates", "floors", "too_large", "worth_it"]

_GAIN = 1.02  # less is noise: not worth a measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the layers of a model weigh."""

    layers: int
    """How many there are."""
    read_bytes: int
    """Bytes of all, in their files."""


def candidates(
    values: Mapping[str, Iterable[int | None]], layers: int, *, on_host: bool = False
) -> tuple[list[Depths], list[tuple[dict[str, int | None], str]]]:
    """Return the configurations of a grid that differ in what they do.

    Args:
        values: For each setting of `Depths`, what it may be.
        layers: How many layers there are.
        on_host: Whether the host is the device.

    Returns:
        Those to measure, in the grid's order, and those that cannot work, with reasons.
    """
    found: dict[Depths, Depths] = {}
    impossible: list[tuple[dict[str, int | None], str]] = []
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        try:
            depths = Depths(**settings)  # type: ignore[arg-type]
        except ConfigError as error:
            impossible.append((settings, str(error)))
        else:
            found.setdefault(depths.for_layers(layers, on_host=on_host), depths)
    return list(found.values()), impossible


def floors(depths: Depths, sizes: Sizes, rates: Rates) -> dict[str, float]:
    """Return the least seconds that each resource needs for a pass.

    The stages work at the same time: no pass is shorter than the largest of these.
    """
    on_host = rates.on_host
    simple = depths.for_layers(sizes.layers, on_host=on_host)
    buffered = simple.n_cpu is not None
    pinned = simple.n_cpu_pinned is not None
    if simple.n_gpu + 1 >= sizes.layers:
        return {"disk": 0.0, "memory": 0.0, "link": 0.0}
    kept = buffered and (simple.n_cpu or 0) + 1 >= sizes.layers
    kept_pinned = pinned and (simple.n_cpu_pinned or 0) + 1 >= sizes.layers
    copied = buffered and (pinned or on_host) and not kept_pinned
    nbytes = sizes.read_bytes
    return {
        "disk": 0.0 if kept or kept_pinned else nbytes / rates.disk,
        "memory": nbytes / rates.memory if copied else 0.0,
        "link": nbytes / (rates.link if pinned else rates.pageable_link),
    }


def too_large(depths: Depths, sizes: Sizes, rates: Rates) -> str | None:
    """Return why a configuration does not fit the free memory, or None."""
    pieces = depths.pieces(sizes.layers, on_host=rates.on_host)
    device = rates.footprint.device_bytes(pieces)
    host = rates.footprint.host_bytes(pieces)
    if rates.on_host:
        device, host = 0, host + device
    for name, needed, free in (
        ("device", device, rates.device_free_bytes),
        ("host", host, rates.host_free_bytes),
    ):
        if needed > free:
            return (
                f"needs {format_bytes(needed)} of {name} memory, of which"
                f" {format_bytes(free)} are free"
            )
    return None


def worth_it(floor_seconds: float, best_seconds: float) -> bool:
    """Return whether a configuration could still be better than the best."""
    return floor_seconds * _GAIN < best_seconds
