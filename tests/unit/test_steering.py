"""Steering: when a plan is made again, and for what."""

import random
from dataclasses import dataclass

import pytest
import torch

from stagehand.core.stopwatch import CopyTime, UseTime
from stagehand.errors import StagehandOOMError
from stagehand.residency.order import Order
from stagehand.residency.steering import Steering

MIB = 1 << 20


@dataclass
class Piece:
    """What steering asks a block for."""

    index: int
    slot_nbytes: int
    hosted: bool = False
    link_nbytes: int = 10
    changes: bool = False
    picks: bool = False
    runs_nbytes: int = 0
    nbytes: int = 10
    trains: bool = False
    tensors: tuple[torch.Tensor, ...] = ()


class Follower:
    """What steering asks a scheduler for; keeps the plans that it shall follow."""

    def __init__(self, guess):
        self.order = Order(guess)
        self.strained = False
        self.picks = False
        self.failure = None
        self.followed = []

    def follow(self, plan, *, fixed):
        if self.failure is not None:
            raise self.failure
        self.followed.append((plan, set(fixed)))
        self.strained = False

    def run(self, *route, goes_back=False, changes_follow=True):
        """One pass; say of which kind the next one is."""
        for block in route:
            self.order.use(block)
        self.order.turn(goes_back=goes_back, changes_follow=changes_follow)

    def turns(self, number, *passes):
        """Take the routes by turns: F builds a graph, V does not, B goes back."""
        _, route = passes[number % len(passes)]
        kind, _ = passes[(number + 1) % len(passes)]
        self.run(*route, goes_back=kind == "B", changes_follow=kind != "F")


class Rig:
    """Blocks of 10 bytes, of which block 0 has to stay; the others are in the order."""

    def __init__(self, count=5, budget=30, hosted=(), lookahead=4):
        self.blocks = [Piece(i, 10, i in hosted) for i in range(count)]
        guess = [i for i in range(1, count) if i not in hosted]
        self.scheduler = Follower(guess)
        self.steering = Steering(
            self.scheduler,
            self.blocks,
            must_stay=[0],
            budget_bytes=budget,
            max_lookahead=lookahead,
        )

    def run(self, *route):
        """One pass; return whether there is a new plan before the next."""
        self.scheduler.run(*route)
        return self.steering.steer()

    def settled(self):
        """Go on until the plan for the guessed route is there."""
        assert self.steering.steer()
        assert not self.run(*sum(self.scheduler.order.repeating(), ()))
        return self

    def note(self, route, seconds, cut=()):
        """Tell of uses that computed so long, of passes that ended with the last or cut
        after so many uses; and of a copy."""
        ends = {len(route), *cut}
        times = [
            UseTime(
                block=block,
                start_ms=0.0,
                stall_ms=5.0,
                compute_ms=1e3 * second,
                last=number in ends,
            )
            for number, (block, second) in enumerate(
                zip(route, seconds, strict=True), 1
            )
        ]
        self.steering.note(times, [copy(2 * MIB, 0.5)])


def copy(nbytes, seconds, lane="H2D"):
    return CopyTime(
        block=1, lane=lane, nbytes=nbytes, start_ms=0.0, duration_ms=1e3 * seconds
    )


def uses(*route):
    return [UseTime(n, 0.0, 0.0, 1e3, last=n == route[-1]) for n in route]


# --------------------------------------------------------------------- when it is due


THERE, BACK = (1, 2, 3, 4), (4, 3, 2, 1)
F, V, B = ("F", THERE), ("V", THERE), ("B", BACK)


@pytest.mark.parametrize(
    ("passes", "order", "steps"),
    [
        ([V, F, B], THERE + THERE + BACK, (4, 8)),
        ([F, F, B], THERE + THERE + BACK, (12,)),
        ([F, F, B, B], THERE + THERE + BACK + BACK, (12, 4)),
        ([F, B, B], THERE + BACK + BACK, (8, 4)),
        ([("F", (2, 3)), ("F", (1, 2)), B], (2, 3, 1, 2, *BACK), (8,)),
        ([("V", (2, 3)), ("V", (1, 2))], (1, 2, 2, 3), (2, 2)),
    ],
)
def test_a_step_ends_behind_each_pass_after_which_weights_may_change(
    passes, order, steps
):
    """Whether a forward builds a graph, no route tells."""
    rig = Rig()
    rig.blocks[2].trains = True
    rig.blocks[2].tensors = (torch.ones(2, requires_grad=True),)
    for number in range(24):
        rig.scheduler.turns(number, *passes)
        rig.steering.steer()
    for number in range(24, 24 + 2 * len(passes)):
        workload = rig.steering.workload()
        assert (workload.order, workload.steps) == (order, steps)
        rig.scheduler.turns(number, *passes)
        assert not rig.steering.steer()


def test_a_plan_is_made_when_other_blocks_train_and_go_on_to():
    """What computes otherwise then is measured again."""
    rig = Rig().settled()
    for _ in range(2):
        rig.note(THERE, [1.0] * 4)
    assert rig.run(*THERE)
    assert rig.steering.compute_seconds == 4.0
    assert not any(rig.run(*THERE) for _ in range(130))
    rig.note(THERE, [0.5] * 4)  # the first of two rounds: it is too old then
    rig.blocks[2].trains, basis = True, rig.steering.basis
    rig.blocks[2].tensors = (torch.ones(2, requires_grad=True),)
    assert [rig.run(*THERE) for _ in range(20)].count(True) == 1
    assert rig.steering.workload().gradient_nbytes == (0, 0, 8, 0, 0)
    assert rig.steering.compute_seconds is None
    for _ in range(2):
        rig.note(THERE, [1.0] * 4)
    assert rig.run(*THERE)
    assert rig.steering.compute_seconds == 4.0
    assert rig.steering.basis != basis


def test_no_plan_is_made_when_blocks_train_by_turns():
    rig = Rig().settled()
    for number in range(40):
        for block in rig.blocks[1:]:
            block.trains = (block.index + number // 2) % 2 == 0
        assert not rig.run(*THERE)


def test_steps_send_home_what_requires_gradients_in_blocks_that_train():
    rig = Rig()
    weights = torch.ones(2, requires_grad=True), torch.ones(3)
    rig.blocks[1].tensors = rig.blocks[2].tensors = weights
    rig.blocks[2].trains = True
    for number in range(24):
        rig.scheduler.turns(number, V, F, B)
        rig.steering.steer()
    assert rig.steering.workload().gradient_nbytes == (0, 0, 8, 0, 0)


def test_first_plan_is_for_the_order_of_definition():
    rig = Rig()
    assert rig.scheduler.followed == []
    assert rig.steering.steer()
    [(plan, fixed)] = rig.scheduler.followed
    assert plan is rig.steering.plan
    assert fixed == {0}
    assert rig.steering.workload().order == (1, 2, 3, 4)
    assert sum(plan.slots) <= 30


def test_nothing_is_planned_while_passes_are_alike():
    rig = Rig().settled()
    for _ in range(3):
        assert not rig.run(1, 2, 3, 4)
    assert len(rig.scheduler.followed) == 1


@pytest.mark.parametrize("failure", [LookupError, KeyboardInterrupt])
def test_plan_that_could_not_be_laid_out_is_due_again(failure):
    """What had to stay from then on never came."""
    rig = Rig().settled()
    rig.steering.keep(rig.blocks[3:4])
    rig.scheduler.failure = failure
    with pytest.raises(failure):
        rig.run(1, 2, 3, 4)
    rig.scheduler.failure = None
    assert rig.steering.steer()
    assert rig.scheduler.followed[-1] == (rig.steering.plan, {0, 3})
    assert not rig.run(1, 2, 3, 4)


def test_first_pass_that_goes_another_way_is_planned_for_at_once():
    rig = Rig()
    rig.steering.steer()
    assert rig.run(4, 3, 2, 1)
    assert rig.steering.workload().order == (4, 3, 2, 1)
    assert not rig.run(4, 3, 2, 1)


def test_one_odd_pass_costs_no_plan():
    rig = Rig().settled()
    assert not rig.run(4, 3)
    assert not rig.run(1, 2, 3, 4)
    assert not rig.run(1, 2, 3, 4)


def test_route_that_changed_twice_alike_is_planned_for():
    rig = Rig().settled()
    assert not rig.run(4, 3, 2, 1)
    assert rig.run(4, 3, 2, 1)
    assert rig.scheduler.followed[-1][0] is rig.steering.plan
    assert not rig.run(4, 3, 2, 1)


def test_routes_that_take_turns_are_planned_for_together_and_once():
    rig = Rig().settled()
    plans = [rig.run(*route) for route in [(4, 3), (1, 2, 3, 4)] * 4]
    assert plans.count(True) == 1
    assert sorted(rig.steering.workload().order) == [1, 2, 3, 3, 4, 4]


def test_plan_that_memory_was_taken_from_is_followed_again_as_it_is():
    rig = Rig().settled()
    rig.scheduler.strained = True
    assert rig.steering.steer()
    first, again = rig.scheduler.followed
    assert first == again
    assert not rig.steering.steer()


# --------------------------------------------------------------------- measured times


def test_times_are_wanted_after_the_first_pass_for_two_rounds():
    rig = Rig()
    rig.steering.steer()
    assert not rig.steering.wants_times(0)  # the first kernels take longer
    rig.run(1, 2, 3, 4)
    assert rig.steering.wants_times(0)
    assert rig.steering.wants_times(7)
    assert not rig.steering.wants_times(8)  # under way


def test_two_rounds_of_times_make_a_plan_with_the_shorter_ones():
    rig = Rig().settled()
    assert rig.steering.plan.limit == "unknown"
    rig.note((1, 2, 3, 4), (9.0, 2.0, 3.0, 4.0))
    assert not rig.steering.steer()
    rig.note((1, 2, 3, 4), (1.0, 9.0, 9.0, 9.0))
    assert rig.steering.steer()
    assert rig.steering.workload().seconds == (1.0, 2.0, 3.0, 4.0)
    assert rig.steering.plan.limit == "compute"
    assert not rig.steering.wants_times(0)
    rig.note((1, 2, 3, 4), (0.5,) * 4)
    assert not rig.steering.steer()


def test_pass_whose_times_come_in_parts_is_measured():
    rig = Rig().settled()
    rig.note((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0))
    times = [
        UseTime(block, 0.0, 0.0, 1e3 * block, last=block == 4) for block in (1, 2, 3, 4)
    ]
    rig.steering.note(times[:2], [])
    assert not rig.steering.steer()
    rig.steering.note(times[2:], [])
    assert rig.steering.steer()
    assert rig.steering.workload().seconds == (1.0, 2.0, 3.0, 4.0)


def test_nothing_is_learned_while_uses_take_longer_than_they_will():
    rig = Rig().settled()
    rig.steering.learns = False
    assert not rig.steering.wants_times(0)
    for _ in range(2):  # timed for other reasons
        rig.note((1, 2, 3, 4), (0.5,) * 4)
    assert rig.steering.compute_seconds is None
    rig.steering.learns = True
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0,) * 4)
    assert rig.steering.workload().seconds == (1.0,) * 4


def test_times_of_another_route_are_no_measurement():
    rig = Rig().settled()
    for _ in range(2):
        rig.note((4, 3, 2, 1), (1.0,) * 4)
        rig.note((1, 2, 3, 4), (1.0,) * 4, cut=[2])
        rig.note((1, 2, 3, 4, 1, 2, 3, 4), (1.0,) * 8)
    assert not rig.steering.steer()
    assert rig.steering.wants_times(0)
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0,) * 4)
    assert rig.steering.steer()


def test_another_route_is_measured_anew():
    rig = Rig().settled()
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0,) * 4)
    rig.steering.steer()
    rig.run(4, 3, 2, 1)
    assert rig.run(4, 3, 2, 1)
    assert rig.steering.workload().seconds is None
    assert rig.steering.wants_times(0)


def test_each_route_of_several_is_measured_by_itself_in_any_order():
    """Drafts of the first layers, and passes that check them."""
    rig = Rig().settled()
    draft, check = (1, 2), (1, 2, 3, 4)
    for _ in range(3):
        for route in (draft, draft, draft, draft, draft, check):
            rig.run(*route)
    assert rig.steering.workload().order == 3 * draft + check
    rig.note(draft, (1.0, 2.0))
    rig.note(draft * 3, (2.0, 1.0) * 3, cut=[2, 4])
    rig.note(check, (3.0, 9.0, 4.0, 5.0))
    assert rig.steering.compute_seconds is None
    rig.note(check, (9.0, 3.0, 9.0, 9.0))
    assert rig.steering.workload().seconds == 3 * (1.0, 1.0) + (3.0, 3.0, 4.0, 5.0)
    assert rig.steering.steer()


def test_what_is_known_of_a_route_is_known_when_others_join_it():
    rig = Rig().settled()
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0))
    rig.steering.steer()
    for route in [(1, 2), (1, 2, 3, 4)] * 4:
        rig.run(*route)
    assert rig.steering.workload().seconds is None
    for _ in range(2):
        rig.note((1, 2), (5.0, 6.0))
    assert rig.steering.workload().seconds == (5.0, 6.0, 1.0, 2.0, 3.0, 4.0)


def test_step_of_a_route_that_comes_twice_is_planned_for_once_it_is_sure():
    """Two forwards and a backward: first of each one, then as many as there are."""
    rig = Rig().settled()
    forward, backward = (1, 2, 3, 4), (4, 3, 2, 1)
    orders = [
        rig.steering.workload().order
        for route in (forward, forward, backward) * 12
        if rig.run(*route)
    ]
    assert orders == [forward + backward, 2 * forward + backward]


def test_times_of_a_route_that_is_planned_for_later_count():
    rig = Rig().settled()
    for _ in range(2):
        rig.note((1, 2), (5.0, 6.0))
    for route in [(1, 2), (1, 2, 3, 4)] * 4:
        rig.run(*route)
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0))
    assert rig.steering.workload().seconds == (5.0, 6.0, 1.0, 2.0, 3.0, 4.0)


def test_routes_that_are_known_when_they_are_planned_for_need_one_plan():
    rig = Rig().settled()
    for route in [(1, 2), (1, 2, 3, 4)] * 2:
        rig.note(route, map(float, route))
    assert rig.steering.steer()
    assert any(rig.run(*route) for route in [(1, 2), (1, 2, 3, 4)] * 4)
    assert rig.steering.workload().seconds == (1.0, 2.0, 1.0, 2.0, 3.0, 4.0)


def test_a_route_that_is_measured_leaves_the_times_of_others():
    """An encoder's second pass is before its decoder's."""
    rig = Rig().settled()
    rig.note((1, 2), (5.0, 6.0))
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0))
    for route in [(1, 2), (1, 2, 3, 4)] * 4:
        rig.run(*route)
    rig.note((1, 2), (6.0, 5.0))
    assert rig.steering.workload().seconds == (5.0, 5.0, 1.0, 2.0, 3.0, 4.0)


def test_times_of_a_few_routes_are_kept_at_once():
    rig = Rig().settled()
    rig.note((1, 2, 3, 4), (1.0,) * 4)
    for number in range(5, 12):
        rig.note((1, number), (1.0,) * 2)
    rig.note((1, 2, 3, 4), (1.0,) * 4)
    assert rig.steering.steer()  # the first of them was there still
    for number in range(12, 100):
        rig.note((1, number), (1.0,) * 2)
    assert len(rig.steering._times) <= 8


@pytest.mark.parametrize(("second", "plans"), [(1.2, 0), (1.3, 1), (0.7, 1)])
def test_times_are_measured_again_now_and_then(second, plans):
    """Of larger inputs, say: it is planned for again where compute takes other time."""
    rig = Rig().settled()
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0,) * 4)
    assert rig.steering.steer()
    basis = rig.steering.basis
    quiet = 0
    while not rig.steering.wants_times(0):
        rig.note((1, 2, 3, 4), (9.0,) * 4)  # nobody asked
        assert not rig.run(1, 2, 3, 4)
        quiet += 1
    assert 100 <= quiet <= 200
    assert not rig.steering.wants_times(8)
    made = 0
    for _ in range(2):
        assert rig.steering.basis == basis
        rig.note((1, 2, 3, 4), (second,) * 4)
        made += rig.run(1, 2, 3, 4)
    assert made == plans
    assert (rig.steering.basis == basis) == (not plans)
    assert rig.steering.workload().seconds == (second if plans else 1.0,) * 4
    assert not rig.steering.wants_times(0)


def test_passes_of_a_few_routes_in_any_order_cost_no_plan():
    rig = Rig().settled()
    pick = random.Random(0)
    routes = [r for _ in range(40) for r in [(1, 2)] * pick.randint(1, 6) + [(1, 2, 3)]]
    plans = [rig.run(*route) for route in routes]
    assert sum(plans) <= 4
    assert not any(plans[40:])


def test_plan_with_new_times_is_for_the_routes_that_were_measured():
    """Five routes in turns are too many: what is planned for stays one of them. Its
    times came while another was next, which took its place and was measured, too."""
    rig = Rig(count=7).settled()
    made, timed = [], 0
    for route in [(1, 2, 3, 4, 5, 6)[: 6 - n] for n in range(5)] * 40:
        if rig.steering.wants_times(0):
            rig.steering.note(uses(*route), [])
            timed += 1
        if rig.run(*route):
            made.append(rig.steering.workload())
    assert len(made) <= 3
    assert made[-1].seconds is not None
    assert timed <= 30


def test_link_rate_comes_from_large_copies_to_the_device():
    steering = Rig().steering
    guess = steering.link_bytes_per_second
    steering.note([], [copy(2 * MIB, 1.0, lane="D2H"), copy(0, 1.0)])
    assert steering.link_bytes_per_second == guess
    steering.note([], [copy(1000, 1.0)])
    assert steering.link_bytes_per_second == pytest.approx(1000)
    steering.note([], [copy(1000, 1.0), copy(2 * MIB, 2.0), copy(4 * MIB, 1.0)])
    assert steering.link_bytes_per_second == pytest.approx(2 * MIB)
    assert steering.workload().link_bytes_per_second == pytest.approx(2 * MIB)


# -------------------------------------------------------------------------- the budget


def test_link_of_a_model_that_fitted_at_first_is_measured_when_it_streams():
    rig = Rig(budget=50).settled()
    for _ in range(2):
        rig.steering.note(uses(1, 2, 3, 4), [])
    assert rig.steering.steer()
    assert not rig.steering.wants_times(0)  # nothing to measure
    basis = rig.steering.basis
    rig.steering.set_budget(30)
    assert rig.run(1, 2, 3, 4)
    assert rig.steering.basis == basis
    assert rig.steering.wants_times(0)
    assert not rig.steering.wants_times(1)  # one pass is enough
    rig.steering.note(uses(1, 2, 3, 4), [copy(2 * MIB, 2.0)])
    assert not rig.steering.wants_times(0)
    assert rig.steering.steer()
    assert rig.steering.workload().link_bytes_per_second == pytest.approx(MIB)
    assert rig.steering.basis != basis  # others ask what room it could use


def test_link_that_is_never_used_is_not_looked_for_without_end():
    rig = Rig().settled()
    for _ in range(2):
        rig.steering.note(uses(1, 2, 3, 4), [])
    assert rig.steering.steer()
    passes = 0
    while rig.steering.wants_times(0):
        rig.steering.note([], [])
        rig.steering.note(uses(1, 2, 3, 4), [])
        passes += 1
    assert 2 <= passes <= 20
    assert not rig.steering.steer()


def test_smallest_budget_is_what_stays_and_the_largest_of_the_others():
    rig = Rig(count=4)
    rig.blocks[2].slot_nbytes = 17
    assert rig.steering.smallest_budget() == 10 + 17
    rig.blocks[2].hosted = True  # only its rows cross
    assert rig.steering.smallest_budget() == 10 + 10


def test_budget_below_the_smallest_is_refused_when_it_is_made():
    with pytest.raises(StagehandOOMError) as caught:
        Rig(budget=19)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (20, 19)


def test_changed_budget_is_planned_for_once_and_from_the_next_pass_on():
    rig = Rig().settled()
    plan = rig.steering.plan
    rig.steering.set_budget(50)
    rig.steering.note([], [copy(2 * MIB, 0.5)])  # of a pass before
    assert rig.steering.plan is plan
    assert rig.steering.steer()
    assert rig.steering.plan.resident == {0, 1, 2, 3, 4}
    rig.steering.set_budget(20)
    assert rig.steering.steer()
    assert sum(rig.steering.plan.slots) == 20
    assert not rig.steering.steer()


def test_budget_that_cannot_work_changes_nothing_and_says_what_could():
    rig = Rig().settled()
    plan = rig.steering.plan
    with pytest.raises(StagehandOOMError) as caught:
        rig.steering.set_budget(19)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (20, 19)
    assert not rig.steering.steer()
    rig.steering.keep([])
    assert rig.steering.steer()
    assert rig.steering.plan == plan


def test_measured_times_outlast_a_change_of_the_budget():
    rig = Rig().settled()
    for _ in range(2):
        rig.note((1, 2, 3, 4), (1.0,) * 4)
    rig.steering.steer()
    rig.steering.set_budget(40)
    assert rig.steering.steer()
    assert rig.steering.workload().seconds == (1.0,) * 4
    assert not rig.steering.wants_times(0)


def test_no_more_is_loaded_ahead_than_allowed():
    for most in range(4):
        rig = Rig(count=9, budget=60, lookahead=most)
        assert rig.steering.plan.lookahead <= most
    assert rig.steering.plan.lookahead > 0


# ---------------------------------------------------------------------------- keeping


def test_kept_blocks_stay_from_the_next_pass_on():
    rig = Rig(budget=40).settled()
    rig.steering.keep([rig.blocks[3]])
    assert rig.steering.must_stay == {0, 3}
    assert len(rig.scheduler.followed) == 1
    assert rig.steering.steer()
    plan, fixed = rig.scheduler.followed[-1]
    assert {0, 3} <= plan.resident
    assert fixed == {0, 3}


def test_kept_table_is_a_block_like_any_other():
    rig = Rig(hosted=[4]).settled()
    assert rig.steering.workload().nbytes == (10, 10, 10, 10, 0)
    rig.steering.keep([rig.blocks[4]])
    assert not rig.blocks[4].hosted
    assert rig.steering.workload().nbytes == (10,) * 5
    assert rig.steering.steer()
    assert 4 in rig.steering.plan.resident


def test_what_does_not_fit_is_not_kept_and_nothing_changes():
    rig = Rig(hosted=[4]).settled()
    with pytest.raises(StagehandOOMError) as caught:
        rig.steering.keep(rig.blocks[2:])
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (50, 30)
    assert rig.steering.must_stay == {0}
    assert rig.blocks[4].hosted
    assert not rig.steering.steer()
