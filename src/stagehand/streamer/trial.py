"""Runs one configuration in a process of its own, and tells the parent how it goes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

from stagehand.errors import ConfigError
from stagehand.streamer.outcomes import Outcome
from stagehand.streamer.streamer import LayerStreamer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from stagehand.streamer.depths import Depths

__all__ = ["Job", "Message", "TrialProcess", "run_job", "watch"]

_HINTS = {signal.SIGKILL: ", as the system does when memory runs out"}


class Message(NamedTuple):
    """What a trial tells its parent."""

    kind: str
    """`"started"` or `"done"`: a run; `"rates"`; `"failed"`: the trial."""
    value: Any = None
    """Seconds of a run, rates, or the reason."""
    passes: int = 0
    """Passes of a run that is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a trial does; it is pickled."""

    arguments: Mapping[str, Any]
    """Arguments of the streamer's constructor."""
    setup_fn: Callable[[LayerStreamer], Callable[[], object]] | None
    """Gets the streamer and returns what to time. None measures the machine."""
    n_runs: int = 1
    """How often to run, the first one included that does not count."""
    sleep_seconds: float = 0.0
    """Pause before each counted run."""


def run_job(job: Job, send: Callable[[Message], None]) -> None:
    """Do a job, in the trial's process; whatever fails is sent, not raised."""
    with (
        _Telling(send),
        LayerStreamer(**job.arguments, track_progress=False) as streamer,
    ):
        if job.setup_fn is None:
            send(Message("rates", streamer.measure_rates()))
            return
        run = job.setup_fn(streamer)
        if not callable(run):
            raise ConfigError(
                f"setup_fn returned {run!r}: expected a function without arguments"
            )
        for number in range(job.n_runs):
            if number:
                time.sleep(job.sleep_seconds)
            send(Message("started"))
            before = streamer.passes
            began = time.perf_counter()
            run()
            streamer.settle()  # else the pause would fill the stages, for nothing
            seconds = time.perf_counter() - began
            send(Message("done", seconds, streamer.passes - before))


class _Telling:
    """Sends whatever is raised inside of it to the parent: it ends there."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if kind is not None:
            self._send(Message("failed", f"{kind.__name__}: {error}"))
        return True


def _main(job: Job, pipe: connection.Connection) -> None:
    run_job(job, lambda message: pipe.send(tuple(message)))


class TrialProcess:
    """A process that does a job; whatever happens there, this one goes on.

    Args:
        job: What it does.
    """

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=_main, args=(job, theirs), daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()

    def receive(self, timeout_seconds: float) -> Message | None:
        """Return the next message; None if none came in time.

        The end of the process is a message, too, with the reason.
        """
        if not self._pipe.poll(max(0.0, timeout_seconds)):
            return None
        try:
            return Message(*self._pipe.recv())
        except (EOFError, ConnectionError):  # it is gone, and told nothing
            self._process.join()
            return Message("failed", _exit_reason(self._process.exitcode))

    def close(self) -> None:
        """Kill the process if it still runs, and wait for its end. Idempotent."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _exit_reason(code: int | None) -> str:
    if code is None or code >= 0:
        return (
            f"the process ended with exit status {code} before it was done: see what it"
            " wrote, and whether the script calls tune() outside of"
            " if __name__ == '__main__':"
        )
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"the process was killed by signal {-code}"
    hint = _HINTS.get(number, "")
    return f"the process was killed by signal {-code} ({number.name}){hint}"


def watch(
    receive: Callable[[float], Message | None],
    depths: Depths,
    *,
    n_runs: int,
    best_seconds: float | None,
    timeout_seconds: float,
) -> Outcome:
    """Follow a trial's messages until it is done, has failed, or cannot win.

    Args:
        receive: Returns the next message, or None after so many seconds without.
        depths: What is tried.
        n_runs: How many runs there will be; the first does not count.
        best_seconds: The mean to beat.
        timeout_seconds: How long to wait for any message.
    """
    config = depths.as_dict()
    runs: list[float] = []
    passes = 0
    counted = n_runs - 1
    room = None if best_seconds is None else best_seconds * counted
    warm = running = False
    while len(runs) < counted:
        limit = timeout_seconds
        if room is not None and warm and running:
            limit = min(limit, room - sum(runs))
        message = receive(limit)
        if message is not None and message.kind == "failed":
            return Outcome(config=config, status="failed", reason=message.value)
        if message is None and limit == timeout_seconds:
            return Outcome(
                config=config,
                status="failed",
                reason=f"gave no sign of life for {timeout_seconds:.4g} s",
            )
        if message is not None and message.kind == "done":
            if warm:
                runs.append(message.value)
            warm, running, passes = True, False, message.passes
        elif message is not None:
            running = True
        if message is None or (room is not None and sum(runs) >= room):
            return Outcome(
                config=config,
                status="slower",
                runs=tuple(runs),
                passes=passes,
                reason=f"its mean would be above {best_seconds:.4g} s",
            )
    return Outcome(
        config=config,
        status="measured",
        seconds=sum(runs) / counted,
        passes=passes,
        runs=tuple(runs),
    )
