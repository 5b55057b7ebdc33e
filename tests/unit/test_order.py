"""Order: routes are learned, followed and relearned."""

import random
from itertools import chain, pairwise, takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from counting import Counted, lines_run
from exploring import running
from stagehand.errors import StagehandInternalError
from stagehand.residency.order import Order


def run(order, *routes):
    """Make a pass of each route; return the uses of the last that were not expected."""
    surprises = []
    for route in routes:
        order.turn()
        surprises = [block for block in route if not order.use(block)]
        order.check()
    return surprises


A, B, C = (0, 1, 2, 3), (3, 2, 1, 0), (0, 2)


# ----------------------------------------------------------------- learned and followed


def test_guess_is_expected_before_anything_is_learned():
    order = Order(A)
    assert order.line == A + A
    assert run(order, A) == []


def test_route_that_was_taken_is_expected_from_then_on():
    order = Order(A)
    assert run(order, B) != []
    assert run(order, B) == []
    assert order.line == B + B
    assert (order.passes, order.learned) == (1, 1)


def test_two_alternating_routes_are_both_expected():
    order = Order(())
    run(order, A, B, A)
    for route in (B, A, B, A):
        assert run(order, route) == []
    assert order.line == A + B


def test_what_repeats_begins_with_a_pass_that_does_not_go_back():
    """Whatever the numbers of blocks are: a step begins there."""
    order = Order(())
    for _ in range(6):
        for route, goes_back in ((B, False), (A, True)):
            order.turn(goes_back=goes_back)
            for block in route:
                order.use(block)
    assert order.repeating() == (B, A)
    assert (order.goes_back(A), order.goes_back(B)) == (True, False)


def test_three_routes_in_turn_are_all_expected():
    """Two inference passes of other inputs between two training passes."""
    order = Order(())
    run(order, A, B, C, A)
    for route in (B, C, A, B, C):
        assert run(order, route) == []


@pytest.mark.parametrize(
    "step", [(A, A, B), (A, A, A, B), (A, A, B, B), (A, B, A, C)], ids=repr
)
@pytest.mark.parametrize("at", range(4))
def test_step_of_a_route_that_comes_twice_is_expected_wherever_it_begins(step, at):
    """Two forwards and one backward: what follows a forward is not always the same."""
    order = Order(A)
    run(order, *step, *step[at:], *step * 3)
    cycles = set()
    for route, following in zip(step * 2, step[1:] + step + step[:1], strict=True):
        assert run(order, route) == []
        assert order.line == route + following
        cycles.add(sum(order.repeating(), ()))
    assert cycles == {sum(min(step[n:] + step[:n] for n in range(len(step))), ())}


@pytest.mark.parametrize("step", [(A,), (A, B), (A, B, C)], ids=repr)
def test_step_of_different_routes_is_expected_after_one_of_them(step):
    """One forward; a forward and a backward, over and over; several models' routes."""
    order = Order(A)
    run(order, *step, *step)
    for route in step * 8:
        assert run(order, route) == []
        assert len(sum(order.repeating(), ())) == sum(map(len, step))


def test_step_that_changes_is_relearned_as_any_route():
    order = Order(A)
    run(order, *(A, A, B) * 4)
    run(order, A, B, A, B)
    assert run(order, A) == run(order, B) == []
    assert sum(order.repeating(), ()) == A + B


def test_other_route_than_the_step_has_ends_its_cycle():
    order = Order(A)
    run(order, *(A, A, B) * 4)
    run(order, A, C)
    order.turn()
    assert sum(order.repeating(), ()) == A + B
    run(order, B, *(A, A, B) * 3)
    assert sum(order.repeating(), ()) == A + A + B


def test_route_that_is_taken_by_exception_costs_one_more_wrong_guess():
    order = Order(A)
    run(order, A, A, C)
    assert run(order, A) == [1]
    assert run(order, A) == [1]
    assert run(order, A) == []


def test_changed_route_is_relearned_after_one_pass():
    order = Order(A)
    run(order, A, A, A, B)
    assert run(order, B) == []
    assert sum(order.repeating(), ()) == B


def test_oldest_route_is_forgotten_when_there_are_many():
    order = Order(())
    routes = [(n, n + 1) for n in range(12)]
    run(order, *routes, routes[0])
    assert run(order, routes[1]) == [1, 2]
    run(order, *routes[2:], routes[10])
    assert run(order, routes[11]) == []


def test_repeated_blocks_keep_their_places():
    route = (0, 1, 0, 2, 0, 1)
    order = Order(())
    run(order, route)
    assert run(order, route) == []
    assert [order.line[i] for i in range(6, 12)] == list(route)


# ---------------------------------------------------------------------------- surprises


def test_skipped_blocks_move_the_cursor_forward():
    order = Order(range(10))
    assert run(order, (0, 1, 5, 6)) == [5]
    assert order.cursor == 6
    assert not order.lost


def test_block_that_comes_again_moves_the_cursor_back():
    order = Order(range(10))
    assert run(order, (0, 1, 2, 3, 1, 2)) == [1]
    assert order.cursor == 2


def test_nearest_later_place_of_a_repeated_block_is_taken():
    order = Order((0, 1, 2, 0, 3, 0, 4))
    run(order, (1, 0))
    assert order.cursor == 3


def test_pass_that_starts_like_another_known_route_follows_it():
    order = Order(())
    run(order, (0, 1, 2), (5, 6, 7), (0, 1, 2), (0, 1, 2))
    order.turn()
    assert not order.use(5)
    assert [order.use(block) for block in (6, 7)] == [True, True]
    assert order.line[:3] == (5, 6, 7)


@pytest.mark.parametrize("depth", range(1, 6))
def test_pass_that_goes_on_after_an_early_exit_is_followed(depth):
    """What followed last time is the short route; one surprise tells that it is not."""
    whole = tuple(range(6))
    order = Order(whole)
    run(order, whole, whole, whole[:depth])
    assert run(order, whole) == [depth]
    assert run(order, whole[:depth]) == []


def test_pass_that_branches_off_follows_the_known_branch():
    left, right = (0, 1, 2, 9), (0, 5, 6, 9)
    order = Order(())
    run(order, left, left, right, left)
    assert run(order, left) == [1]
    assert order.line[:4] == left


@pytest.mark.parametrize("uses", [(9,), (5, 2), (0, 4, 2)])
def test_unknown_block_or_two_surprises_in_a_row_are_lost(uses):
    order = Order(range(6))
    order.turn()
    for block in uses:
        order.use(block)
    assert order.lost


def test_expected_use_or_a_new_pass_ends_being_lost():
    order = Order(range(6))
    order.turn()
    for block in (5, 2):
        order.use(block)
    assert order.lost
    assert order.use(3)
    assert not order.lost
    order.use(9)
    assert order.lost
    order.turn()
    assert not order.lost
    assert order.cursor == -1


def test_random_order_is_served_and_the_next_regular_pass_is_learned():
    order = Order(range(20))
    shuffle = random.Random(0)
    for _ in range(5):
        run(order, tuple(shuffle.sample(range(20), 20)))
    run(order, A)
    assert run(order, A) == []


def test_order_without_blocks_can_be_turned():
    order = Order(())
    assert run(order, (), ()) == []
    assert (order.length, order.line, sum(order.repeating(), ())) == (0, (), ())


# --------------------------------------------------------------------- turns, the cycle


def test_positions_beyond_the_end_of_a_pass_go_on_into_the_next():
    order = Order(())
    run(order, A, B, A, B)
    before, length = order.line, order.length
    assert order.turn()
    assert order.line[: len(before) - length] == before[length:]


def test_turn_says_when_positions_are_no_longer_valid():
    order = Order(A)
    run(order, A, A)
    assert order.turn()
    order.use(0)
    assert not order.turn()


def test_pass_without_uses_changes_nothing():
    """Some parts of a model use no streamed block."""
    order = Order(A)
    run(order, A, A)
    order.turn()
    line, version = order.line, order.version
    assert order.turn()
    assert (order.line, order.version, order.passes) == (line, version, 2)
    assert run(order, A) == []


def test_cycle_holds_the_routes_that_repeat_wherever_the_pass_is():
    order = Order(())
    run(order, A, B, C, A, B)
    cycles = set()
    for route in (C, A, B):
        run(order, route)
        cycles.add(sum(order.repeating(), ()))
    assert cycles == {A + B + C}
    order = Order(A)
    run(order, C, A, A)
    assert sum(order.repeating(), ()) == A


def test_cycle_too_long_to_plan_for_is_the_present_route_alone():
    routes = [(n,) for n in range(5)]
    order = Order(())
    run(order, *routes * 2, routes[0])
    order.turn()
    assert sum(order.repeating(), ()) == routes[1]


# ------------------------------------------------------------------------ what repeats


def repeated_by(order, *routes):
    """Make a pass of each route; return what was said to repeat after each."""
    found = []
    for route in routes:
        for block in route:
            order.use(block)
        order.turn()
        found.append(order.repeating())
    return found


@pytest.mark.parametrize("seed", range(10))
def test_drafts_of_a_few_layers_repeat_beside_the_passes_that_check_them(seed):
    """However many there are, and when all of the latest were drafts, too."""
    pick = random.Random(seed)
    routes = [r for _ in range(40) for r in [C] * pick.randint(1, 12) + [A]]
    order = Order(A)
    repeated_by(order, *[C] * 12, A, *[C] * 12, A)
    for found in repeated_by(order, *routes):
        assert set(found) == {A, C}


def test_route_that_is_left_for_ever_is_planned_for_no_longer():
    order = Order(A)
    assert repeated_by(order, *[A] * 200)[-1] == (A,)
    assert repeated_by(order, B, B, B) == [(B,)] * 3


def test_route_that_is_left_again_and_again_is_planned_for_meanwhile():
    """Epochs of training, with a few forwards of validation after each."""
    order = Order(A)
    repeated_by(order, *((A, B) * 30 + (A,) * 10) * 2)
    for found in repeated_by(order, *((A, B) * 30 + (A,) * 10) * 3):
        assert set(found) == {A, B}
    assert repeated_by(order, *[A] * 70)[-1] == (A,)


def test_decoder_counts_more_than_its_encoder():
    """A sentence is encoded once, and decoded token by token."""
    encoder, decoder = (0, 1, 2), (3, 4, 5)
    order = Order(encoder + decoder)
    tokens = [[encoder] + [decoder] * count for count in (20, 30, 25, 20, 30)]
    repeated_by(order, *tokens[0], *tokens[1])
    for found in repeated_by(order, *chain.from_iterable(tokens[2:])):
        if found != (encoder, decoder):  # as it is between two sentences
            assert sorted(found) == [encoder] + [decoder] * 4


def test_phases_of_other_blocks_are_planned_for_one_by_one():
    """Half of the memory would go to what nobody uses meanwhile."""
    first, second = (0, 1, 2), (3, 4, 5)
    order = Order(first)
    repeated_by(order, *([first] * 20 + [second] * 20) * 2)
    assert repeated_by(order, *[first] * 20)[1:] == [(first,)] * 19
    assert repeated_by(order, *[second] * 20)[1:] == [(second,)] * 19


def test_rare_route_is_not_planned_for():
    order = Order(A)
    found = repeated_by(order, *([A] * 70 + [C]) * 4)
    for first, second in pairwise(found):
        assert (A, C) not in {first, second} or first != second


def test_routes_that_repeat_stay_in_the_order_in_which_they_began():
    order = Order(A)
    step = (A, B) * 5 + (C,)
    for found in repeated_by(order, *step * 4)[25:]:
        assert found == (A, B) * 2 + (A, B, C)


def test_few_routes_that_come_back_among_many_others_are_not_what_repeats():
    """Early exits after any layer: by chance, some come back sooner than others."""
    routes = [tuple(range(depth)) for depth in range(4, 28)]
    order, pick = Order(A), random.Random(0)
    found = repeated_by(order, *pick.choices(routes, k=300))
    twice = sum(first == second for first, second in pairwise(found))
    assert twice <= 20


def test_of_many_routes_in_any_order_only_the_next_one_is_planned_for():
    routes = [(n, 9) for n in range(6)]
    order = Order(A)
    pick = random.Random(0)
    for found in repeated_by(order, *pick.choices(routes, k=60))[30:]:
        assert len(set(found)) <= 4


def test_broken_cursor_is_reported_as_our_bug():
    order = Order(A)
    order.cursor = 4
    with pytest.raises(StagehandInternalError, match="cursor is at 4 of 4 uses"):
        order.check()


# --------------------------------------------------------------------------------- cost


def followed(number):
    return [range(number)] * 3


def every_second(number):
    return [range(number), range(0, number, 2), range(number)]


def shuffled(number):
    blocks = list(range(number))
    return [random.Random(seed).sample(blocks, number) for seed in range(3)]


@pytest.mark.parametrize("routes", [followed, every_second, shuffled])
def test_ten_thousand_uses_cost_ten_times_a_thousand(routes):
    def lines(number):
        order = Order(range(number))
        passes = [tuple(map(Counted, route)) for route in routes(number)]
        return lines_run(run, order, *passes)

    assert lines(10_000) < 12 * lines(1_000)


# ---------------------------------------------------------------------------- stateful


class Expectation:
    """What `Order` promises, worked out from the whole history."""

    KEPT = 8
    RECENT = 8

    def __init__(self, guess):
        self.history = []  # the routes of all passes that used anything
        self.log = []
        self.route = tuple(guess)
        self.next = self.route
        self.cursor = -1
        self.misses = 0

    def known(self):
        """Return the routes after which another came, the latest first, and which."""
        found = {}
        for number in reversed(range(len(self.history) - 1)):
            found.setdefault(self.history[number], self.history[number + 1])
        return dict(list(found.items())[: self.KEPT])

    def repeated(self):
        """Return the next two routes, if the latest are a few that are repeated."""
        latest = self.history[-self.RECENT :]
        for count in range(1, self.RECENT // 2 + 1):
            step = latest[:count] * self.RECENT
            if len(latest) == self.RECENT and latest == step[: self.RECENT]:
                return step[self.RECENT : self.RECENT + 2]
        return None

    def lasting(self):
        """Return the routes that came back, and were not away for twice as long yet."""
        known = {}  # the passes that took each route, those of the latest few routes
        for number, route in enumerate(self.history, 1):
            known.setdefault(route, []).append(number)
            if len(known) > self.KEPT:
                del known[min(known, key=lambda route: known[route][-1])]
        found = []
        for route, taken in known.items():
            others = [after - before - 1 for before, after in pairwise(taken)]
            soon = [number for number in others if number <= 64]
            lasts = soon and len(self.history) - taken[-1] <= 2 * max(soon)
            in_a_row = 1 + len(list(takewhile(lambda n: not n, reversed(others))))
            is_phase = in_a_row >= 8 and taken[-1] < len(self.history)
            if lasts and not (is_phase and not set(route) <= set(self.history[-1])):
                found.append(route)
        latest = self.history[-self.RECENT :]
        taken = [route for route in latest if route in found]
        return found if 4 * len(taken) >= 3 * len(latest) else []

    def expect(self, route):
        self.route = route
        self.next = self.known().get(route, route)

    def use(self, block):
        self.log.append(block)
        if (*self.route, None)[self.cursor + 1] == block:
            self.cursor += 1
            self.misses = 0
            return True
        self.misses += 1
        places = [i for i, other in enumerate(self.route) if other == block]
        later = [i for i in places if i > self.cursor]
        started = [route for route in self.known() if route[0] == block]
        uses = len(self.log)
        alike = [r for r in self.known() if list(r[:uses]) == self.log]
        if alike and self.misses == 1:
            self.expect(alike[0])
            self.cursor = uses - 1
        elif later:
            self.cursor = later[0]
        elif started:
            self.expect(started[0])
            self.cursor = 0
        elif places:
            self.cursor = places[0]
        else:
            self.misses = 2
        return False

    def turn(self):
        if self.log:
            self.history.append(tuple(self.log))
            self.log = []
            self.expect(self.known().get(self.history[-1], self.history[-1]))
            self.route, self.next = self.repeated() or (self.route, self.next)
            self.cursor = -1
            self.misses = 0


class OrderMachine(RuleBasedStateMachine):
    """An order against a plain reading of its promises."""

    def __init__(self):
        super().__init__()
        self.order = Order((0, 1, 2))
        self.model = Expectation((0, 1, 2))
        self.line, self.version = self.order.line, self.order.version

    def use(self, block):
        assert self.order.use(block) == self.model.use(block)

    @rule(block=st.integers(0, 4))
    def use_any(self, block):
        self.use(block)

    @precondition(lambda self: self.model.cursor + 1 < len(self.model.route))
    @rule()
    def use_the_expected(self):
        self.use(self.model.route[self.model.cursor + 1])

    @rule()
    def turn(self):
        line, length, empty = self.order.line, self.order.length, not self.model.log
        kept = self.order.turn()
        self.model.turn()
        if kept:
            beyond = line if empty else line[length:]
            assert self.order.line[: len(beyond)] == beyond

    @rule(route=st.lists(st.integers(0, 3), min_size=1, max_size=4), times=st.just(2))
    def whole_passes(self, route, times):
        for _ in range(times):
            self.turn()
            for block in route:
                self.use(block)

    @rule(data=st.data(), count=st.integers(1, 4))
    def steps(self, data, count):
        route = st.sampled_from([(0, 1), (1, 0), (0, 2, 1)])
        step = data.draw(st.lists(route, min_size=count, max_size=count))
        for route in step * 3:
            self.turn()
            for block in route:
                self.use(block)
            self.order_agrees_with_the_model()

    @precondition(lambda self: self.model.history)
    @rule(data=st.data())
    def pass_of_old(self, data):
        route = data.draw(st.sampled_from(self.model.history))
        self.turn()
        for block in route:
            self.use(block)

    @invariant()
    def order_agrees_with_the_model(self):
        order, model = self.order, self.model
        order.check()
        assert order.line == model.route + model.next
        assert (order.cursor, order.length) == (model.cursor, len(model.route))
        assert order.lost == (model.misses > 1)
        assert order.passes == len(model.history)
        lasting = model.lasting()
        if len(lasting) <= 4:
            assert set(lasting) <= set(order.repeating())

    @invariant()
    def version_tells_every_change_of_the_line(self):
        changed = self.order.line != self.line
        assert not changed or self.order.version > self.version
        self.line, self.version = self.order.line, self.order.version


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = running(100, 30)
