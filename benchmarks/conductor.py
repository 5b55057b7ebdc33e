"""What a conductor costs the host: for each copy that is queued, and for each step."""

from collections.abc import Callable, Iterator, Mapping

from benchmarks.models import FreeDevice, Stack, make_runtime
from benchmarks.results import Result, until_met
from benchmarks.timing import Times, take_turns
from stagehand.conductor.config import ConductorConfig
from stagehand.conductor.runtime import ConductorRuntime
from stagehand.core.telemetry import Counters
from stagehand.core.traffic import Traffic
from stagehand.core.transfer import Priority, Slot, TransferEngine

__all__ = ["measure"]

_COPIES = 1000
_STEPS = 100
_SLOTS = 2
_TARGET_COPY_US = 2.0
_TARGET_STEP_US = 50.0
_TARGET_DISABLED_US = 1.0


def measure(rounds: int = 100) -> Iterator[Result]:
    """Yield the cost of a copy, and of a step's five calls, enabled and disabled."""
    yield from _copies(rounds)
    yield from _steps(rounds)


def _copies(rounds: int) -> Iterator[Result]:
    """A prefetch and the use that waits for it, in shared slots and in none."""
    functions = {}
    for name in ("alone", "conducted"):
        engine = TransferEngine(FreeDevice(), Counters())
        if name == "conducted":
            engine.join(Traffic(h2d_slots=_SLOTS, d2h_slots=_SLOTS))
        functions[name] = _load_all(engine)

    def rows(times: Mapping[str, Times]) -> Iterator[Result]:
        yield Result.of(
            "a conductor's cost for a queued copy",
            times["conducted"].over(times["alone"], _COPIES),
            "us",
            scale=1e6,
            target=_TARGET_COPY_US,
        )

    yield from rows(take_turns(functions, rounds=rounds, until=until_met(rows)))


def _load_all(engine: TransferEngine) -> Callable[[], None]:
    device = FreeDevice()
    slot, stream = Slot(0, 256), device.current_stream()
    engine.adopt(slot)
    target, source = engine.allocate(256), device.pinned(256)

    def run() -> None:
        for _ in range(_COPIES):
            engine.load(slot, target, source, Priority.SPECULATIVE)
            engine.await_filled(slot, stream)
            engine.release(slot, stream)

    return run


def _steps(rounds: int) -> Iterator[Result]:
    """A step's five calls with one runtime attached."""
    model = Stack(100)
    runtime = make_runtime(model)
    disabled = ConductorRuntime(ConductorConfig(enabled=False))
    enabled = ConductorRuntime(ConductorConfig(link_arbitration="never"), device="cpu")
    enabled.attach(runtime)
    functions = {"nothing": _call_nothing, "disabled": _step_all(disabled)}
    functions["enabled"] = _step_all(enabled)

    def rows(times: Mapping[str, Times]) -> Iterator[Result]:
        for name, target in (
            ("enabled", _TARGET_STEP_US),
            ("disabled", _TARGET_DISABLED_US),
        ):
            yield Result.of(
                f"a step's five phases with the conductor {name}",
                times[name].over(times["nothing"], _STEPS),
                "us",
                scale=1e6,
                target=target,
            )

    try:
        times = take_turns(functions, rounds=rounds, until=until_met(rows))
    finally:
        enabled.shutdown()
        runtime.shutdown()
    yield from rows(times)


def _call_nothing() -> None:
    for _ in range(_STEPS):
        pass


def _step_all(conductor: ConductorRuntime) -> Callable[[], None]:
    def run() -> None:
        for step in range(_STEPS):
            conductor.begin_step(step)
            conductor.enter_forward()
            conductor.enter_backward()
            conductor.enter_optimizer()
            conductor.end_step()

    return run
