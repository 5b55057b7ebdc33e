"""Whatever is asked of models that share a device, in any order, the accounts hold."""

from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small import LAYER_BYTES, batch, run_resident, runtime_of
from test_sharing import varied

import stagehand
from architectures.trees import assert_bitwise_equal
from exploring import running
from simulated import sim_device
from stagehand.residency.holds import ResidentPriority

DEPTHS = (2, 3, 5, 8)
numbers = st.integers(0, len(DEPTHS) - 1)
budgets = st.integers(1, 9).map(lambda layers: layers * LAYER_BYTES)


class Interrupted(Exception):
    """A pass ends in the middle."""


class AnyOrder(RuleBasedStateMachine):
    """Models come and go, run, fail, are edited, kept, reserved and guests."""

    def __init__(self):
        super().__init__()
        sim_device.reset()
        self.plain = [varied(depth, seed) for seed, depth in enumerate(DEPTHS)]
        self.expected = [run_resident(m, "hpu", batch()) for m in self.plain]
        self.models = [deepcopy(model) for model in self.plain]
        self.withs = ExitStack()
        self.shared = None
        self.lowered = False  # the cap, with no pass since
        self.warm = {}  # bytes that whole models with a PRIMARY reservation have loaded
        for number in range(len(DEPTHS)):
            self.begin(number, 6 * LAYER_BYTES)

    def teardown(self):
        self.withs.close()
        for number in range(len(DEPTHS)):
            self.end(number)
        if self.shared is not None:
            assert self.shared.ledger.device.held_bytes == 0
            assert self.shared.ledger.device.holders() == {}
        torch.accelerator.synchronize()
        assert sim_device.races() == []
        for model, plain in zip(self.models, self.plain, strict=True):
            assert_bitwise_equal(model.state_dict(), plain.state_dict(), "weights")

    def runtime(self, number):
        model = self.models[number]
        return runtime_of(model) if self.is_streamed(number) else None

    def is_streamed(self, number):
        return "_stagehand_layer_runtime" in self.models[number].__dict__

    @property
    def runtimes(self):
        return [self.runtime(n) for n in range(len(DEPTHS)) if self.is_streamed(n)]

    def refused(self, error, number):
        """It must be true that it does not fit."""
        assert error.needed_bytes > error.limit_bytes, f"model {number}"

    def refused_room(self, error, number):
        """Others have given up first what they need not keep."""
        self.refused(error, number)
        name = self.runtime(number)._tenancy.name
        for holding in self.shared.holdings():
            assert holding.held_bytes <= holding.kept_bytes or holding.name == name

    # What users do

    @rule(number=numbers, budget=budgets)
    def begin(self, number, budget):
        if self.is_streamed(number):
            return
        try:
            stagehand.layer(self.models[number], vram_budget=budget, device="hpu")
        except stagehand.StagehandOOMError as error:
            self.refused(error, number)
            return
        self.shared = self.runtime(number)._tenancy.shared

    @rule(number=numbers, budget=budgets)
    def replace(self, number, budget):
        self.end(number)
        self.begin(number, budget)

    @precondition(lambda self: len(self.runtimes) > 2)
    @rule(number=numbers)
    def end(self, number):
        if self.is_streamed(number):
            self.runtime(number).shutdown()
            self.lowered = True
            self.warm.pop(number, None)

    @rule(number=numbers, passes=st.integers(1, 4))
    def run(self, number, passes):
        for _ in range(passes if self.is_streamed(number) else 0):
            with torch.no_grad():
                try:
                    output = self.models[number](batch())
                except stagehand.StagehandOOMError as error:
                    self.refused_room(error, number)
                    return
            assert_bitwise_equal(output, self.expected[number], f"model {number}")
            self.lowered = False
        if self.is_streamed(number) and self.is_whole(number):
            self.warm.setdefault(number, self.runtime(number).report().streamed_bytes)

    @rule(number=numbers, at=st.integers(0, 7))
    def run_a_part(self, number, at):
        model, plain = self.models[number], self.plain[number]
        layer = at % len(model)
        if not self.is_streamed(number):
            return
        with torch.no_grad():
            try:
                output = model[layer](batch().to("hpu"))
            except stagehand.StagehandOOMError as error:
                self.refused_room(error, number)
                return
        expected = run_resident(plain[layer], "hpu", batch())
        assert_bitwise_equal(output, expected, f"layer {layer} of model {number}")

    @rule(number=numbers, at=st.integers(0, 7))
    def use_by_hand(self, number, at):
        if not self.is_streamed(number):
            return
        runtime = self.runtime(number)
        block = runtime.block_ids[at % len(runtime.block_ids)]
        try:
            runtime.before_block(block)
        except stagehand.StagehandOOMError as error:
            self.refused_room(error, number)
            return
        runtime.after_block(block)

    @rule(number=numbers, at=st.integers(0, 7))
    def edit(self, number, at):
        torch.accelerator.synchronize()  # as docs/limits.md asks for
        for model in (self.models[number], self.plain[number]):
            model[at % len(model)][0].weight.data.mul_(0.75)
        self.expected[number] = run_resident(self.plain[number], "hpu", batch())
        self.warm.pop(number, None)

    @rule(number=numbers, at=st.integers(0, 1))
    def fail(self, number, at):
        def stop(*_):
            raise Interrupted

        if self.is_streamed(number):
            hook = self.models[number][at].register_forward_hook(stop)
            with torch.no_grad(), suppress(Interrupted, stagehand.StagehandOOMError):
                self.models[number](batch())
            hook.remove()

    @rule(number=numbers, budget=budgets)
    def set_budget(self, number, budget):
        if self.is_streamed(number) and not self.is_whole(number):
            self.runtime(number).set_budget(budget)
            self.lowered = True

    @rule(host=numbers, number=numbers)
    def keep(self, host, number):
        if self.is_streamed(host) and self.is_streamed(number):
            keep = self.runtime(host).keep_resident
            self.withs.enter_context(keep(self.models[number]))

    @rule(host=numbers, number=numbers)
    def guest(self, host, number):
        if not (self.is_streamed(host) and self.is_streamed(number)):
            return
        try:
            as_guest = self.runtime(host).as_guest
            self.withs.enter_context(as_guest(self.runtime(number)))
        except stagehand.StagehandOOMError as error:
            self.refused(error, number)
        except stagehand.ConfigError:
            assert host == number or "reserved" in self.runtime(number)._tenancy.why

    @rule()
    def leave_withs(self):
        guests = [r for r in self.runtimes if "guest" in r._tenancy.why]
        self.withs.close()
        for runtime in guests:
            assert runtime._parts.weights.held_bytes == 0

    @rule(number=numbers, priority=st.sampled_from(ResidentPriority))
    def reserve(self, number, priority):
        if not self.is_streamed(number):
            return
        try:
            self.runtime(number).reserve_for_resident(priority=priority)
        except stagehand.StagehandOOMError as error:
            self.refused(error, number)
        except stagehand.ConfigError:
            assert "guest" in self.runtime(number)._tenancy.why
        self.warm.pop(number, None)

    @precondition(lambda self: self.runtimes)
    @rule(host=numbers, number=numbers)
    def release(self, host, number):
        if self.is_streamed(host):
            self.runtime(host).release_reservation(self.models[number])
            self.warm.pop(number, None)

    def is_whole(self, number):
        """Whether all of a model has a PRIMARY reservation."""
        runtime = self.runtime(number)
        if runtime is None or "PRIMARY" not in runtime._tenancy.why:
            return False
        return runtime._tenancy.claim().weights <= runtime._tenancy.claim().budget

    # What must hold

    @invariant()
    def accounts_hold(self):
        if self.shared is None:
            return
        whole = self.shared.ledger.device
        claims = [runtime._tenancy.claim().budget for runtime in self.runtimes]
        assert whole.limit_bytes == max(claims, default=0)
        held = {r._tenancy.name: r._parts.weights.held_bytes for r in self.runtimes}
        assert whole.held_bytes == sum(held.values())
        assert self.lowered or whole.held_bytes <= whole.limit_bytes
        found = {name: nbytes for name, nbytes in whole.holders().items() if nbytes}
        assert found == {name: nbytes for name, nbytes in held.items() if nbytes}
        with self.shared._changed if self.runtimes else nullcontext():
            self.shared._seats.holds.check()

    @invariant()
    def reservations_fit_together(self):
        if self.shared is not None and self.runtimes:
            holds = self.shared._seats.holds.reserved.values()
            cap = max(r._tenancy.claim().budget for r in self.runtimes)
            biggest = max((held.nbytes for held in holds), default=0)
            assert biggest <= 9 * LAYER_BYTES
            assert sum(held.nbytes for held in holds) <= max(cap, 9 * LAYER_BYTES)

    @invariant()
    def primary_blocks_are_loaded_once(self):
        for number, loaded in self.warm.items():
            assert self.runtime(number).report().streamed_bytes == loaded


AnyOrder.TestCase.settings = running(30, 30)
TestAnyOrder = AnyOrder.TestCase
