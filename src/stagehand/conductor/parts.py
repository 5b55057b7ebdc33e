"""What an enabled conductor consists of, and what it does at each phase."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from stagehand.conductor.adapters import RuntimeAdapter
from stagehand.conductor.budget import Budget
from stagehand.conductor.link import LinkRates, measure_link
from stagehand.conductor.record import ConductorRecord, Recorder
from stagehand.conductor.rules import Readings
from stagehand.conductor.slots import LinkSlots
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.ledger import NO_LIMIT, Account, Ledger, Mode, SubAccount
from stagehand.core.limits import Limits, tightest
from stagehand.core.steps import hear_steps
from stagehand.core.traffic import Traffic
from stagehand.errors import ClosedError, ConfigError
from stagehand.residency.shared import shared_device
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stagehand.conductor.adapters import Adapter, Conducted
    from stagehand.conductor.config import ConductorConfig
    from stagehand.conductor.rules import Policy
    from stagehand.core.device import Device
    from stagehand.core.ledger import Grant

__all__ = ["Parts"]

_NAME = "a conductor's reservations"
_LINK_GUESS = 25e9  # bytes a second, where the link is not measured
_PIECE_SECONDS = 40e-6  # several times what it takes to start a copy
_TIMED = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
}


class Parts:
    """What an enabled conductor consists of.

    Thread-safe: phases are told by the training thread and by autograd's.

    Args:
        config: See `ConductorConfig`.
        device: Whose memory and link.
        policy: Says at each phase what limits hold.
    """

    def __init__(self, config: ConductorConfig, device: Device, policy: Policy) -> None:
        hard = config.bytes_of("vram_hard_cap_mb")
        if hard is None:
            hard = device.free_bytes() + (device.allocated_bytes() or 0)
        pinned = config.bytes_of("pinned_cap_mb")
        cap = NO_LIMIT if pinned is None else pinned
        # Weights and saved tensors take page-locked memory out of the same account.
        self._shared = shared_device(device)
        self._pinned = SubAccount(_NAME, cap, self._shared.ledger.pinned)
        soft = config.bytes_of("vram_soft_cap_mb")
        self.ledger = Ledger(Account("device", hard, soft), self._pinned)
        self.budget = Budget(device, self.ledger, self._trace)
        self.clock = PhaseClock()
        self.limits = Limits()
        self.recorder = Recorder(config.telemetry_file, traces=config.debug_event_trace)
        self.traffic = Traffic(h2d_slots=config.h2d_slots, d2h_slots=config.d2h_slots)
        self.slots = LinkSlots(self.traffic, self._trace)
        self.rates: LinkRates | None = None
        self._config = config
        self._policy = policy
        self._adapters: list[Adapter] = []
        self._booked: dict[Account, Grant] = {}  # budgets of what is attached
        self._lock = threading.RLock()
        self._told = False  # whether phases are told by hand, and not detected
        self._closed = self._dropped = False
        self._full_checks = self._missed = 0
        self._entered = time.perf_counter()
        self._left = Phase.STEP_END  # entered then, and left with the next move
        self._durations: dict[str, float] = {}  # seconds in each phase of this step
        self._steps = 0
        self._counted = (0, 0, 0, 0)  # requests, as of the record before
        self._leader: tuple[Conducted, Callable[[], None]] | None = None
        self._optimizers: Callable[[], None] | None = None
        try:
            self._set_yielding(device)
            self.clock.subscribe(self._moved)
            if config.detect_phases:
                begins = self._optimizer_begins
                self._optimizers = hear_steps(begins, compiled=True)
            # Last: others on the device must not feel what could not be made.
            self._shared.cap_pinned(self, pinned)
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        names = ", ".join(adapter.name for adapter in self._adapters)
        return f"{self.clock!r}, attached: {names or 'nothing'}, {self.traffic!r}"

    def _set_yielding(self, device: Device) -> None:
        choice = self._config.link_arbitration
        if device.is_host or choice == "never":
            return
        if choice == "measure":
            self.rates = measure_link(device)
        if self.rates is None or not self.rates.is_duplex:
            rate = _LINK_GUESS if self.rates is None else self.rates.d2h
            self.traffic.yield_home(
                self._config.bytes_of("yield_backlog_mb") or 0,
                piece_bytes=int(rate * _PIECE_SECONDS),
            )

    # Attaching

    def attach(self, runtime: Conducted, name: str | None) -> None:
        """See `ConductorRuntime.attach`; None takes the runtime's kind and a number."""
        with self._lock:
            self._check_open()
            self._forget_closed()
            if self._adapter_of(runtime) is not None:
                raise ConfigError(
                    f"{runtime!r} is attached already; detach() it before it is"
                    " attached anew"
                )
            if not runtime.is_open:
                raise ClosedError(f"{runtime!r} was shut down: it cannot be attached")
            if runtime.engine.traffic is not None:
                raise ConfigError(
                    f"{runtime!r} is attached to another conductor; detach() it there"
                    " first"
                )
            here = self._shared.device.torch_device
            there = runtime.engine.device.torch_device
            if there != here:
                raise ConfigError(
                    f"{runtime!r} computes on '{there}', and this conductor is of"
                    f" '{here}': attach it to a conductor of its own device"
                )
            name = name or self._free_name(runtime.kind)
            self._check_name(name)
            self.budget.check_pinned(self._pinned.whole, name)
            self._book(runtime, name)
            self.add(RuntimeAdapter(runtime, name))
            if self._config.detect_phases:
                self._follow(runtime)

    def _book(self, runtime: Conducted, name: str) -> None:
        """Take the runtime's budget out of the device account, a shared one once."""
        account = runtime.device_account
        if account is not None and not self._users_of(account):
            self._booked[account] = self.budget.reserve_or_raise(
                account.limit_bytes, name
            )

    def _rebook(self) -> None:
        """Book what budgets are now, as far as there is room: they may have changed."""
        for account, grant in tuple(self._booked.items()):
            if account.limit_bytes == grant.nbytes:
                continue
            room = self.ledger.device.room_for(grant.holder, Mode.BURST) + grant.nbytes
            nbytes = min(account.limit_bytes, room)
            if nbytes != grant.nbytes:
                grant.release()
                self._booked[account] = self.budget.reserve_or_raise(
                    nbytes, grant.holder
                )

    def _users_of(self, account: Account) -> int:
        return sum(r.device_account is account for r in self._runtimes())

    def add(self, adapter: Adapter) -> None:
        """Let limits reach what an adapter stands for; all of it or nothing."""
        with self._lock:
            self._check_open()
            self._check_name(adapter.name)
            self._adapters.append(adapter)  # first: it can be detached from now on
            try:
                adapter.attach(self.traffic)
                adapter.post(self.limits)
            except BaseException:
                self._take_off(adapter)
                raise
            self._trace("attached", name=adapter.name)

    def _check_name(self, name: str) -> None:
        if any(adapter.name == name for adapter in self._adapters):
            raise ConfigError(f"the name {name!r} is taken: attach with another one")

    def _free_name(self, kind: str) -> str:
        taken = {adapter.name for adapter in self._adapters}
        number, name = 1, kind
        while name in taken:
            number += 1
            name = f"{kind} {number}"
        return name

    def _adapter_of(self, runtime: Conducted | None) -> RuntimeAdapter | None:
        for adapter in self._adapters:
            if isinstance(adapter, RuntimeAdapter) and adapter.runtime is runtime:
                return adapter
        return None

    def detach(self, runtime: Conducted | None, name: str | None) -> None:
        """Take off what was attached, by its runtime or, without one, by its name."""
        with self._lock:
            for adapter in tuple(self._adapters):
                if adapter.name == name or adapter is self._adapter_of(runtime):
                    self._take_off(adapter)

    def _take_off(self, adapter: Adapter) -> None:
        adapter.detach()  # first: an interrupt leaves it to be detached again
        self._adapters.remove(adapter)
        self._trace("detached", name=adapter.name)
        if isinstance(adapter, RuntimeAdapter):
            self._release(adapter.runtime)

    def _release(self, runtime: Conducted) -> None:
        """Give back what was booked for a runtime, and follow another one."""
        account, leader = runtime.device_account, self._leader
        if account in self._booked and not self._users_of(account):
            self._booked.pop(account).release()
        if leader is not None and runtime is leader[0]:
            leader[1]()
            self._leader = None
            for other in self._runtimes():
                self._follow(other)

    def _forget_closed(self) -> None:
        """Take off what was shut down: its budget is free."""
        for adapter in tuple(self._adapters):
            if isinstance(adapter, RuntimeAdapter) and not adapter.runtime.is_open:
                self._take_off(adapter)

    def _runtimes(self) -> list[Conducted]:
        return [a.runtime for a in self._adapters if isinstance(a, RuntimeAdapter)]

    # Phases

    def tell(self, move: Callable[[PhaseClock], None]) -> None:
        """Move the clock by hand: from now on, nothing that is detected moves it."""
        with self._lock:
            if not self._closed:
                move(self.clock)
                self._told = True  # not where the clock refuses: then nothing is told

    def _follow(self, runtime: Conducted) -> None:
        """Follow a runtime's phases, if no better one is followed: one with weights."""
        clock, leader = runtime.clock, self._leader
        if clock is None:
            return
        if leader is not None:
            if leader[0].window or not runtime.window:
                return
            leader[1]()
        self._leader = (runtime, clock.subscribe(self._detected))

    def _detected(self, step: int, phase: Phase) -> None:
        """The leading runtime has moved on."""
        with self._lock:
            if self._dropped:
                self._end()
            if self._told or self._closed:
                return
            if phase is Phase.STEP_END:
                self.clock.end_step()
            elif phase is Phase.STEP_BEGIN:
                self.clock.begin_step(step)
            elif self.clock.phase in (Phase.OPTIMIZER, Phase.STEP_END):
                self.clock.begin_step(step)
                self.clock.enter(phase)
            else:
                self.clock.enter(phase)

    def _optimizer_begins(self, _: torch.optim.Optimizer) -> None:
        with self._lock:
            if self._told or self._closed or self.clock.phase is Phase.STEP_END:
                return
            self.clock.enter(Phase.OPTIMIZER)

    def _moved(self, step: int, phase: Phase) -> None:
        now = time.perf_counter()
        timed = _TIMED.get(self._left)
        if timed is not None:
            spent = self._durations.get(timed, 0.0) + now - self._entered
            self._durations[timed] = spent
        if phase is not self._left and self._left is not Phase.STEP_END:
            self.ledger.end_phase(self._left)  # a step's end has ended all of the step
        self._entered, self._left = now, phase
        if self.recorder.traces:
            self._trace("phase", phase=phase.name)
        self.traffic.flush()
        if phase is Phase.STEP_END:
            self.ledger.end_phase(phase)
            self._end_step()
            return
        if phase is Phase.STEP_BEGIN:
            self._forget_closed()
            self._rebook()
            self._share_link()
        self._publish(phase)

    # Limits

    def _publish(self, phase: Phase) -> None:
        self._full_checks = self._full_checks + 1 if self._is_contended() else 0
        limits = self._policy(
            Readings(
                phase=phase,
                pressure=self.budget.pressure() if phase is Phase.BACKWARD else None,
                full_checks=self._full_checks,
                window=max((r.window for r in self._runtimes()), default=0),
            )
        )
        if not isinstance(limits, Limits):
            raise ConfigError(
                f"the conductor's policy returned a {type(limits).__name__}: expected"
                " Limits"
            )
        if phase is not Phase.STEP_BEGIN:
            limits = tightest(self.limits, limits)
        if limits != self.limits:
            self.limits = limits
            self._post(limits)
            if self.recorder.traces:
                self._trace("limits", limits=repr(limits))

    def _is_contended(self) -> bool:
        """Whether slots are full, and somebody has missed one since the last check.

        A host that is ahead of the device finds all slots full without anybody waiting.
        """
        slots = self.traffic.h2d
        missed, self._missed = slots.denied_count - self._missed, slots.denied_count
        return missed > 0 and slots.is_full()

    def _post(self, limits: Limits) -> None:
        self.traffic.bounds.post(self, limits)
        for adapter in self._adapters:
            adapter.post(limits)

    def _share_link(self) -> None:
        """Say how much may go home behind each load without delaying the next."""
        if not self.traffic.yields or self.rates is None:
            return
        needs = [need for r in self._runtimes() if (need := r.link_need())]
        loads = sum(need.loads for need in needs)
        if not loads:
            self.traffic.share_home(None)
            return
        seconds = sum(need.compute_seconds for need in needs) / loads
        self.traffic.share_home(partial(_time_left, self.rates, seconds))

    # Records

    def _end_step(self) -> None:
        self._steps += 1
        if self._steps % self._config.telemetry_interval_steps == 0:
            self.recorder.add(self._record())
        self._durations = {}

    def _record(self) -> ConductorRecord:
        counts = (*self.budget.counts, self.slots.denied_count)
        granted, partial, denied, refused = (
            now - then for now, then in zip(counts, self._counted, strict=True)
        )
        self._counted = counts
        allocated = self.budget.allocated_bytes()
        cap = self.ledger.device.limit_bytes
        pinned = self.ledger.pinned.held_bytes
        pinned += sum(adapter.pinned_bytes() for adapter in self._adapters)
        return ConductorRecord(
            step_id=self.clock.step,
            vram_allocated_mb=None if allocated is None else allocated / MIB,
            vram_headroom_mb=None if allocated is None else (cap - allocated) / MIB,
            pinned_granted_mb=pinned / MIB,
            h2d_inflight=self.slots.in_flight("h2d"),
            d2h_inflight=self.slots.in_flight("d2h"),
            grant_count=granted,
            deny_count=denied + refused,
            partial_count=partial,
            phase_durations={
                name: self._durations.get(name, 0.0) for name in _TIMED.values()
            },
            runtime_snapshots={a.name: a.snapshot() for a in self._adapters},
        )

    def _trace(self, event: str, **what: Any) -> None:
        self.recorder.trace(event, self.clock.step, **what)

    # The end

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the conductor was shut down; make a new one")

    def close(self) -> None:
        """Detach all and end. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._told = True
            self.clock.end_step()
            for adapter in tuple(self._adapters):
                self._take_off(adapter)
            self.traffic.bounds.withdraw(self)
            self.ledger.close()
            self._end()

    def drop(self) -> None:
        """Nobody holds the conductor any more: leave everything as it was.

        The garbage collector calls this in the middle of anything: it waits for no lock
        and queues no copy. Engines leave the traffic by themselves; if another thread
        is in the middle of something here, the next phase sees to the rest.
        """
        self._dropped = True
        self.traffic.end()
        inside = self._lock._is_owned()  # type: ignore[attr-defined]
        if not inside and self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        self._closed = True
        if self._optimizers is not None:
            self._optimizers()
        self._shared.cap_pinned(self, None)
        self._pinned.detach()
        leader, self._leader = self._leader, None
        if leader is not None:
            leader[1]()
        for adapter in self._adapters:
            adapter.withdraw()
        self.recorder.close()


def _time_left(rates: LinkRates, seconds: float, nbytes: int) -> float:
    """Return the bytes that fit between the end of a load and the next one's start.

    Args:
        rates: The link's rates.
        seconds: Time from one load's start to the next one's, if compute never waits.
        nbytes: The load's bytes.
    """
    return max(0.0, seconds - nbytes / rates.h2d) * rates.d2h
