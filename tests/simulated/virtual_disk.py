"""A disk in virtual time, and reader threads that read from it.

Hand-overs between threads are not seen by the simulated device, so the runtime's reader
threads are replaced: `Readers` runs a job at once, on a thread whose host clock starts
when a reader would be free to take it, and the job's future is done when the clock of
whoever asks has come to where that thread's clock ended. A read takes the disk's time,
after the reads before it.
"""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from stagehand import assembly
from stagehand.core.workers import WorkerGroup
from stagehand.errors import CheckpointError
from stagehand.stores.files import FileSet


class Disk:
    """Reads one after the other, at a rate.

    Args:
        sim: The simulated device, for the clocks.
        bytes_per_second: Of every read.
    """

    def __init__(self, sim: ModuleType, bytes_per_second: float) -> None:
        self.sim = sim
        self.rate = bytes_per_second
        self.free_at = 0.0
        self.read_bytes = 0

    def read(self, nbytes: int) -> None:
        """Let the calling thread's clock come to where the read ends."""
        now = self.sim.host_seconds()
        self.free_at = max(now, self.free_at) + nbytes / self.rate
        self.read_bytes += nbytes
        self.sim.advance_host_us((self.free_at - now) * 1e6)


class Job:
    """A `Future` of virtual time."""

    def __init__(self, sim: ModuleType) -> None:
        self._sim = sim
        self._value: Any = None
        self._error: BaseException | None = None
        self.ends = 0.0

    def run(self, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Do the work, on a thread of its own."""
        try:
            self._value = job(*arguments)
        except CheckpointError as error:
            self._error = error
        self.ends = self._sim.host_seconds()

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return bool(self._sim.host_seconds() >= self.ends)

    def _wait(self) -> None:
        late = self.ends - self._sim.host_seconds()
        self._sim.advance_host_us(max(0.0, late) * 1e6)

    def exception(self) -> BaseException | None:
        self._wait()
        return self._error

    def result(self) -> Any:
        if error := self.exception():
            raise error
        return self._value


class Readers:
    """A `WorkerGroup` of virtual time: jobs begin in order, on the first free reader.

    Args:
        sim: The simulated device, for the clocks.
        count: Number of readers.
    """

    def __init__(self, sim: ModuleType, count: int) -> None:
        self._sim = sim
        self._free_at = [0.0] * count

    def hand(
        self, note: Callable[[Job], object], job: Callable[..., Any], *arguments: Any
    ) -> None:
        note(future := Job(self._sim))
        begins = max(min(self._free_at), self._sim.host_seconds())

        def read() -> None:
            late = begins - self._sim.host_seconds()
            self._sim.advance_host_us(max(0.0, late) * 1e6)
            future.run(job, arguments)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        self._free_at.remove(min(self._free_at))
        self._free_at.append(future.ends)

    def drop(self, future: Job) -> None:
        """What was given up takes no time of whoever gives it up."""

    def close(self) -> None:
        """There is nothing to end."""


def install(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """Let runtimes made from now on read their files from a disk in virtual time."""
    fill = FileSet.fill

    def timed(self: FileSet, parts: Any, target: memoryview, **options: Any) -> int:
        nbytes = fill(self, parts, target, **options)
        disk.read(nbytes)
        return nbytes

    def workers(name: str, count: int, begin: Any) -> Readers | WorkerGroup:
        if name == "reader":
            return Readers(disk.sim, count)
        return WorkerGroup(name, count, begin)

    monkeypatch.setattr(FileSet, "fill", timed)
    monkeypatch.setattr(assembly, "WorkerGroup", workers)
