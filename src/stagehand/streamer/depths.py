"""How many layers each stage buffers, and how many it hands on at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from stagehand.errors import ConfigError

__all__ = ["READERS", "Depths", "Footprint", "Pieces"]

READERS = 2
"""Threads of each stage: while one waits for the disk, the other copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """For how many layers each stage has memory."""

    slots: int
    """Slots on the device."""
    slabs: int
    """Slabs from which copies to the device start; 0 where the host is the device."""
    buffers: int
    """Buffers in ordinary memory between the files and slabs, or slots on the host."""
    is_pinned: bool
    """Whether slabs are pinned memory, and not ordinary."""

    @property
    def wires(self) -> int:
        """Layers that are on the device in packed form: while one is decoded there, the
        next one arrives."""
        return min(2, self.slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes that a layer takes on its way: of each kind, those of the largest layer."""

    slot: int
    """Device bytes of the slot in which it is used."""
    waiting: int
    """Host bytes in each stage."""
    cast: int = 0
    """Device bytes of its tensors in another element type, if they are used so."""
    wire: int = 0
    """Device bytes of its packed form, if it crosses the link packed."""
    scratch: int = 0
    """Device bytes in which it is decoded."""
    unpacked_from: int = 0
    """Host bytes in which each thread decodes it, where the host is the device."""

    def device_bytes(self, pieces: Pieces) -> int:
        """Return the most that a streamer takes of the device's memory."""
        slots = pieces.slots * self.slot + self.cast
        return slots + pieces.wires * self.wire + self.scratch

    def host_bytes(self, pieces: Pieces) -> int:
        """Return the most that it takes of the host's, pinned or not."""
        waiting = (pieces.slabs + pieces.buffers) * self.waiting
        return waiting + READERS * self.unpacked_from


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """The settings of a streamer that a search varies.

    A stage of depth n has memory for n + 1 layers: n that wait, and one that moves on.
    Handing on k at a time needs k of them at once.

    Raises:
        ConfigError: If a depth cannot serve its batch, or is no whole number.
    """

    n_gpu: int = 2
    """Layers that wait on the device, ahead of the one that computes."""
    n_cpu_pinned: int | None = 4
    """Layers that wait in pinned memory; None or 0 skips the stage."""
    n_cpu: int | None = None
    """Layers that wait in ordinary memory; None or 0 skips the stage."""
    batch_gpu: int | None = None
    """Layers that compute takes at a time; None takes them one by one."""
    batch_cpu_pinned: int | None = None
    """Layers that are sent to the device at a time."""
    batch_cpu: int | None = None
    """Layers that are read from disk at a time."""

    def __post_init__(self) -> None:
        """Refuse what would wait for ever."""
        if self.n_gpu is None:
            raise ConfigError(
                "n_gpu is None: expected a number of layers, 0 for none ahead of"
                " compute; only n_cpu_pinned and n_cpu can be left out"
            )
        for stage in ("gpu", "cpu_pinned", "cpu"):
            depth = _checked(f"n_{stage}", getattr(self, f"n_{stage}"), smallest=0)
            batch = _checked(
                f"batch_{stage}", getattr(self, f"batch_{stage}"), smallest=1
            )
            if stage != "gpu" and not depth:
                continue  # a stage that is skipped hands nothing on
            if batch > depth + 1:
                raise ConfigError(
                    f"batch_{stage} is {batch}, but n_{stage}={depth} has memory for"
                    f" {depth + 1} layers: it would wait for ever; set"
                    f" batch_{stage} to at most {depth + 1}, or n_{stage} to at least"
                    f" {batch - 1}"
                )

    def for_layers(self, count: int, *, on_host: bool = False) -> Depths:
        """Return the simplest settings that do the same for so many layers.

        Of configurations for which this is the same, one measurement is enough.

        Args:
            count: Number of layers.
            on_host: Whether the host is the device: then nothing is pinned.
        """
        most = max(1, count - 1)  # memory for all layers
        pinned = None if on_host else min(self.n_cpu_pinned or 0, most) or None
        cpu = min(self.n_cpu or 0, most) or None
        return replace(
            self,
            n_gpu=min(self.n_gpu, count - 1),
            n_cpu_pinned=pinned,
            n_cpu=cpu,
            batch_gpu=_simplest(self.batch_gpu, count),
            batch_cpu_pinned=_simplest(self.batch_cpu_pinned, count)
            if pinned
            else None,
            batch_cpu=_simplest(self.batch_cpu, count) if cpu else None,
        )

    def pieces(self, count: int, *, on_host: bool = False) -> Pieces:
        """Return what each stage has memory for.

        Args:
            count: Number of layers.
            on_host: Whether the host is the device.
        """
        waiting = self.n_cpu_pinned or self.n_cpu or 0
        is_pinned = bool(self.n_cpu_pinned) and not on_host
        # Where nothing is pinned, slabs are ordinary memory themselves.
        buffered = self.n_cpu and (on_host or is_pinned)
        return Pieces(
            slots=min(self.n_gpu + 1, count),
            slabs=0 if on_host else min(waiting + 1, count),
            buffers=min((self.n_cpu or 0) + 1, count) if buffered else 0,
            is_pinned=is_pinned,
        )

    def as_dict(self) -> dict[str, int | None]:
        """Return the settings under the names that the constructor takes."""
        return asdict(self)


def _checked(name: str, value: int | None, *, smallest: int) -> int:
    if value is None:
        return smallest
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ConfigError(
            f"{name} is {value!r}: expected None, or a whole number of layers from"
            f" {smallest} on"
        )
    return value


def _simplest(batch: int | None, count: int) -> int | None:
    return None if batch is None or min(batch, count) == 1 else min(batch, count)
