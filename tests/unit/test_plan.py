"""The planner against brute force, known policies and an executor of its own."""

import random
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import lines_run
from schedules import evenly_spaced, execute, follow
from stagehand.errors import StagehandInternalError, StagehandOOMError
from stagehand.residency.plan import Plan, Workload, plan, smallest_budget
from stagehand.residency.stays import soon

MIB = 1 << 20
BLOCK = 1000  # bytes of a unit block, which takes a unit of time at rate 1000
LTX2 = 772_149_248  # bytes of one LTX-2 block in bf16
LTX2_FLOP = {768: 0.5239e12, 6144: 4.1389e12}  # of one block, by video tokens
FLUX_BLOCKS = [679_660_000] * 19 + [283_180_000] * 38


def ring(compute, nbytes, rate):
    """Every block once a period."""
    count = len(nbytes)
    return Workload(
        order=tuple(range(count)),
        nbytes=tuple(nbytes),
        seconds=tuple(compute),
        link_bytes_per_second=rate,
    )


def ping_pong(forward, backward, nbytes, rate):
    """Every block forward, then all of them backward."""
    once = ring(forward, nbytes, rate)
    return replace(
        once,
        order=once.order + once.order[::-1],
        seconds=tuple(forward) + tuple(backward)[::-1],
    )


def again(compute, nbytes, rate, region):
    """Every block forward, then region by region from behind, each there and back."""
    once = ring(compute, nbytes, rate)
    order = once.order
    for first in reversed(range(0, len(nbytes), region)):
        there = once.order[first : first + region]
        order += there + there[::-1]
    return replace(once, order=order, seconds=tuple(compute[block] for block in order))


def equal(kind, count, *, c, b, t, nbytes=BLOCK):
    """`count` equal blocks: c seconds forward, b backward, t to load."""
    if kind == "ring":
        return ring([c] * count, [nbytes] * count, nbytes / t)
    return ping_pong([c] * count, [b] * count, [nbytes] * count, nbytes / t)


def ltx2(kind, tokens, *, rate, flops):
    c = LTX2_FLOP[tokens] / flops
    return equal(kind, 48, c=c, b=2 * c, t=LTX2 / rate, nbytes=LTX2)


H100, RTX3090 = {"rate": 55e9, "flops": 500e12}, {"rate": 25e9, "flops": 50e12}
CASES = {
    "ring 768 H100": (ltx2("ring", 768, **H100), 16),
    "ring 6144 H100": (ltx2("ring", 6144, **H100), 16),
    "ring 768 3090": (ltx2("ring", 768, **RTX3090), 16),
    "ping-pong 768 H100": (ltx2("ping-pong", 768, **H100), 16),
    "ping-pong 768 3090": (ltx2("ping-pong", 768, **RTX3090), 16),
    "ring t=1.5c": (equal("ring", 48, c=1e-3, b=0, t=1.5e-3), 18),
    "ping-pong c<t<b": (equal("ping-pong", 48, c=1e-3, b=2e-3, t=2.25e-3), 18),
}
cases = pytest.mark.parametrize(("workload", "blocks"), CASES.values(), ids=CASES)


def flux(kind="ring"):
    compute = [1.3048e12 / 500e12] * len(FLUX_BLOCKS)
    if kind == "ring":
        return ring(compute, FLUX_BLOCKS, 55e9)
    return ping_pong(compute, [2 * c for c in compute], FLUX_BLOCKS, 55e9)


def layers(*, seconds_per_byte):
    """Transformer layers as large parameters, then a head nine times as large."""
    nbytes = [32 * MIB, 32 * MIB, 117 * MIB, 117 * MIB, 117 * MIB] * 24 + [1024 * MIB]
    return ring([n * seconds_per_byte for n in nbytes], nbytes, 55e9)


def pieces(workload, parts):
    """The same work with every block cut into equal parts."""
    count = len(workload.nbytes)
    per_use = zip(workload.order, workload.seconds, strict=True)
    order, seconds = [], []
    for use, (block, second) in enumerate(per_use):
        cut = range(block * parts, (block + 1) * parts)
        order += cut if use < count else reversed(cut)
        seconds += [second / parts] * parts
    nbytes = tuple(n // parts for n in workload.nbytes for _ in range(parts))
    return replace(workload, order=tuple(order), seconds=tuple(seconds), nbytes=nbytes)


def best_policy(workload, budget_bytes, residents=()):
    """The shortest step that any policy of the model achieves."""
    policies = [
        follow(workload, "belady", capacity_bytes=budget_bytes),
        follow(workload, "lru", capacity_bytes=budget_bytes),
        follow(workload, "sync", capacity_bytes=budget_bytes),
    ]
    for pinned in residents:
        step = follow(workload, "belady", capacity_bytes=budget_bytes, pinned=pinned)
        policies.append(step)
    return min(policies)


def shared_slots(made):
    return {made.home[b] for b in range(len(made.home)) if b not in made.resident}


def conflicts(workload, made):
    """How often a streamed use needs the slot that another block has just used."""
    uses = [b for b in workload.order if b not in made.resident]
    pairs = list(zip(uses, uses[1:] + uses[:1], strict=True))
    return sum(a != b and made.home[a] == made.home[b] for a, b in pairs)


# The model that judges


@cases
def test_following_a_policy_gives_the_published_makespans(workload, blocks):
    published = {  # seconds: on demand, LRU, evenly spaced and two slots, Belady
        "ring 768 H100": (0.7242, 0.6739, 0.4773, 0.4643),
        "ring 6144 H100": (1.0712, 0.6739, 0.4773, 0.4773),
        "ring 768 3090": (1.9855, 1.4825, 1.0501, 1.0363),
        "ping-pong 768 H100": (1.4706, 0.9687, 0.9048, 0.9048),
        "ping-pong 768 3090": (4.4121, 2.3473, 2.0748, 2.0396),
        "ring t=1.5c": (0.120, 0.072, 0.048, 0.048),
        "ping-pong c<t<b": (0.3555, 0.1778, 0.1655, 0.1655),
    }
    name = next(name for name, case in CASES.items() if case[0] is workload)
    size = workload.nbytes[0]
    capacity = blocks * size
    pinned = evenly_spaced(48, blocks - 2)
    steps = (
        follow(workload, "sync", capacity_bytes=size),
        follow(workload, "lru", capacity_bytes=capacity),
        follow(workload, "belady", capacity_bytes=capacity, pinned=pinned),
        follow(workload, "belady", capacity_bytes=capacity),
    )
    assert steps == pytest.approx(published[name], rel=1e-3)


# Against known policies and bounds


@cases
def test_whole_blocks_are_within_three_percent_of_the_best_policy(workload, blocks):
    budget = blocks * workload.nbytes[0]
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    residents = [evenly_spaced(48, blocks - 2), evenly_spaced(48, blocks - 4)]
    assert execute(workload, made) <= 1.03 * best_policy(workload, budget, residents)


@cases
def test_pieces_of_blocks_are_within_three_percent_of_the_bound(workload, blocks):
    fine = pieces(workload, 8)
    made = plan(fine, budget_bytes=8 * blocks * fine.nbytes[0], max_lookahead=3)
    assert made.step_seconds <= 1.03 * made.bound_seconds
    assert execute(fine, made, steps=6) == pytest.approx(made.step_seconds, rel=0.01)


@pytest.mark.parametrize("kept", [22, 30, 47])
def test_a_compute_bound_ring_is_as_fast_as_resident(kept):
    workload = ltx2("ring", 6144, **H100)
    made = plan(workload, budget_bytes=kept * LTX2, max_lookahead=3)
    assert execute(workload, made) <= 1.02 * sum(workload.seconds)
    assert made.limit == "compute"


@pytest.mark.parametrize("kind", ["ring", "ping-pong"])
@pytest.mark.parametrize("gigabytes", [1.4, 2, 4, 8, 12])
def test_unequal_blocks_are_within_three_percent_of_the_best_policy(kind, gigabytes):
    workload, budget = flux(kind), int(gigabytes * 1e9)
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    assert execute(workload, made) <= 1.03 * best_policy(workload, budget)


def test_two_sizes_in_fixed_slots_cost_little_where_bytes_flow_freely():
    """At 16 GB bytes without places would just hide behind FLUX.1's compute."""
    workload = flux()
    made = plan(workload, budget_bytes=16_000_000_000, max_lookahead=3)
    free = follow(workload, "belady", capacity_bytes=16_000_000_000)
    assert execute(workload, made) <= 1.06 * free


def test_flux_in_pieces_hides_all_loads_behind_compute():
    parts = [(679_660_000 // 21, 21)] * 19 + [(283_180_000 // 9, 9)] * 38
    nbytes = [n for n, count in parts for _ in range(count)]
    compute = [1.3048e12 / 500e12 / count for _, count in parts for _ in range(count)]
    workload = ring(compute, nbytes, 55e9)
    made = plan(workload, budget_bytes=16_000_000_000, max_lookahead=3)
    assert made.step_seconds <= 1.02 * sum(compute)


def test_large_layers_with_others_between_share_one_slot():
    """Layers of LTX-2, few tokens: a second large slot would cost half a percent."""
    streams = [32] * 4 + [24, 8] + [32] * 4 + [24, 8]
    layers = 48 * [*streams, 24, 24, 24, 24, 128, 128]
    sizes = [size * MIB for size in layers]
    work = ring([0.075 * size / 50e9 for size in sizes], sizes, 50e9)
    budget = sum(sizes) // 3
    made = plan(work, budget_bytes=budget, max_lookahead=32)
    assert execute(work, made) < 1.01 * (sum(sizes) - budget) / 50e9


def test_a_large_head_does_not_make_every_slot_large():
    workload = layers(seconds_per_byte=5e-12)
    made = plan(workload, budget_bytes=1500 * MIB, max_lookahead=3)
    assert len(workload.nbytes) - 1 in made.resident
    assert max(made.slots[slot] for slot in shared_slots(made)) == 117 * MIB
    assert made.step_seconds <= 1.05 * made.bound_seconds


def test_a_head_and_one_layer_still_overlap():
    """The head's slot serves other blocks too, beside small slots of their own."""
    workload = layers(seconds_per_byte=5e-12)
    made = plan(workload, budget_bytes=1200 * MIB, max_lookahead=3)
    free = follow(workload, "belady", capacity_bytes=1200 * MIB)
    assert execute(workload, made) <= 1.03 * free


@pytest.mark.parametrize("kind", ["ring", "ping-pong"])
@pytest.mark.parametrize("count", [6, 8])
@pytest.mark.parametrize("lookahead", [1, 2])
def test_no_set_of_residents_is_better_by_three_percent(kind, count, lookahead):
    """By brute force over all sets and starts, blocks dealt to the slots in turn."""
    workload = equal(kind, count, c=1, b=2, t=1.5 if kind == "ring" else 2.25)
    for blocks in range(1, count):
        best = min(
            execute(workload, static, steps=8)
            for slots in range(1, min(lookahead + 1, blocks) + 1)
            for static in static_plans(count, blocks - slots, slots)
        )
        made = plan(workload, budget_bytes=blocks * BLOCK, max_lookahead=lookahead)
        assert execute(workload, made, steps=8) <= 1.03 * best


def static_plans(count, kept, slots):
    for residents in combinations(range(count), kept):
        streamed = [block for block in range(count) if block not in residents]
        for start in range(len(streamed)):
            home = [-1] * count
            for place, block in enumerate(streamed[start:] + streamed[:start]):
                home[block] = place % slots
            for place, block in enumerate(residents):
                home[block] = slots + place
            yield Plan(
                slots=(BLOCK,) * (slots + kept),
                home=tuple(home),
                resident=frozenset(residents),
                lookahead=slots,
                step_seconds=0.0,
                bound_seconds=0.0,
                streamed_bytes=0,
                loads=0,
                limit="",
            )


# What a plan looks like


def test_everything_is_resident_when_it_fits():
    workload = equal("ring", 5, c=1, b=0, t=1)
    made = plan(workload, budget_bytes=5 * BLOCK, max_lookahead=3)
    assert made.resident == frozenset(range(5))
    assert sorted(made.home) == [0, 1, 2, 3, 4]
    assert made.step_seconds == made.bound_seconds == 5
    assert (made.streamed_bytes, made.lookahead, made.limit) == (0, 0, "compute")


def test_residents_are_evenly_spaced_on_a_busy_link():
    workload = equal("ring", 48, c=1, b=0, t=3)
    made = plan(workload, budget_bytes=14 * BLOCK, max_lookahead=1)
    assert made.resident == evenly_spaced(48, 12)
    assert made.streamed_bytes == 36 * BLOCK
    assert made.limit == "link"


def test_more_slots_are_used_where_compute_varies():
    """Pairs of long and short uses need a deeper ring than two to stay hidden."""
    nbytes = [BLOCK] * 40
    workload = ring([3.6, 3.6, 0.2, 0.2] * 10, nbytes, BLOCK / 1.5)
    two = plan(workload, budget_bytes=4 * BLOCK, max_lookahead=1)
    four = plan(workload, budget_bytes=4 * BLOCK, max_lookahead=3)
    assert len(shared_slots(four)) == 4
    assert four.step_seconds == pytest.approx(sum(workload.seconds))
    assert two.step_seconds > 1.1 * four.step_seconds


def test_the_turn_of_a_ping_pong_reuses_what_the_ring_still_holds():
    workload = equal("ping-pong", 12, c=1, b=1, t=2)
    made = plan(workload, budget_bytes=4 * BLOCK, max_lookahead=1)
    assert len(made.resident) == len(shared_slots(made)) == 2
    assert made.streamed_bytes == 2 * (12 - 2 - 2) * BLOCK


def test_blocks_that_are_used_often_stay():
    """Shared blocks between all others cross the link each time if they go."""
    order = tuple(b for block in range(4, 44) for b in (block % 4, block))
    workload = Workload(
        order=order,
        nbytes=(BLOCK,) * 44,
        seconds=(1.0,) * 80,
        link_bytes_per_second=BLOCK / 2,
    )
    made = plan(workload, budget_bytes=8 * BLOCK, max_lookahead=3)
    assert {0, 1, 2, 3} <= made.resident
    assert made.step_seconds == pytest.approx(80)


@pytest.mark.parametrize("room", [12, 16, 24])
def test_of_blocks_that_are_used_often_as_many_stay_as_fit(room):
    """What a decoder uses for each token, beside what its encoder uses once."""
    encoder, decoder = tuple(range(24)), tuple(range(24, 48))
    workload = Workload(
        order=encoder + 4 * decoder,
        nbytes=(BLOCK,) * 48,
        seconds=(0.1,) * 120,
        link_bytes_per_second=BLOCK,
    )
    made = plan(workload, budget_bytes=room * BLOCK, max_lookahead=3)
    assert made.resident <= {*decoder}
    assert made.loads <= 24 + 4 * (24 - room + 2)


# Regions that are computed again

REGIONS = {
    "t=2c, by 8": (2.0, 192, 8, 40),
    "t=2c, by 4": (2.0, 96, 4, 20),
    "t=3c, by 6": (3.0, 48, 6, 14),
    "t=13c, by 8": (13.0, 96, 8, 24),
    "t=1.2c, by 5": (1.2, 60, 5, 10),
}


@pytest.mark.parametrize("name", REGIONS)
def test_blocks_stay_until_backward_of_their_region_is_over(name):
    load, count, region, blocks = REGIONS[name]
    workload = again([1.0] * count, [BLOCK] * count, BLOCK / load, region)
    made = plan(workload, budget_bytes=blocks * BLOCK, max_lookahead=3)
    assert made.streamed_bytes == 2 * (count - blocks) * BLOCK  # once in each phase
    best = best_policy(workload, blocks * BLOCK)
    assert execute(workload, made) <= 1.03 * best
    phase = (count - blocks) * load
    assert made.bound_seconds >= max(count, phase) + max(1.9 * count, phase) - region


# Layers of a transformer block in 16ths of the largest one, as in LTX-2 and Llama.
LAYERS = {
    "many": [4, 4, 4, 4, 3, 1, 1, 4, 4, 16, 16, 1, 3, 4, 1, 1, 4, 1, 4, 4],
    "few": [8, 3, 8, 16, 16, 16],
    "wide": [96, 36, 36, 12, 48, 48],
}


@pytest.mark.parametrize("load", [1.3, 2.0, 5.0])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("name", ["many", "few"])
def test_layers_of_regions_are_near_the_bound_of_two_phases(name, share, load):
    """Up to 1.35 with a ring that is as deep as loads run ahead."""
    nbytes = LAYERS[name] * 40
    workload = again([n / load for n in nbytes], nbytes, 1.0, len(LAYERS[name]))
    budget = int(share * sum(nbytes))
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    forward, crossing = sum(nbytes) / load, sum(nbytes) - budget
    bound = max(forward, crossing) + max(2 * forward, crossing)
    assert 0.999 * bound <= made.bound_seconds <= 1.02 * bound
    assert execute(workload, made) <= 1.06 * bound


@pytest.mark.parametrize("load", [2.0, 5.0])
@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("name", ["many", "few"])
def test_forwards_of_their_own_cost_the_regions_nothing(name, before, load):
    """As of a reference that the trained model is held against: was 1.1 to 1.2."""
    nbytes = LAYERS[name] * 40
    workload = again([n / load for n in nbytes], nbytes, 1.0, len(LAYERS[name]))
    count = len(nbytes)
    workload = replace(
        workload,
        order=workload.order[:count] * before + workload.order,
        seconds=workload.seconds[:count] * before + workload.seconds,
    )
    budget = sum(nbytes) // 5
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    forward, crossing = sum(nbytes) / load, sum(nbytes) - budget
    bound = (before + 1) * max(forward, crossing) + max(2 * forward, crossing)
    assert execute(workload, made) <= 1.05 * bound


@pytest.mark.parametrize("pace", [0.5, 0.9, 1.0, 1.2])
@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.6])
@pytest.mark.parametrize("name", LAYERS)
def test_small_layers_are_loaded_as_far_ahead_as_large_ones(name, share, pace):
    """Up to 1.25 with four slots of any size: they are too little time for large ones.

    Args:
        pace: Compute over what has to cross.
    """
    nbytes = LAYERS[name] * 40
    budget = int(share * sum(nbytes))
    crossing = sum(nbytes) - budget
    workload = ring([pace * crossing * n / sum(nbytes) for n in nbytes], nbytes, 1.0)
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    assert sum(made.slots[slot] for slot in shared_slots(made)) <= 4 * max(nbytes)
    assert execute(workload, made) <= 1.08 * max(sum(workload.seconds), crossing)


@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize("name", LAYERS)
def test_a_ring_that_could_be_deeper_moves_no_more_bytes(name, share):
    """Where compute hides them: up to 1.26 if a deeper ring were always better."""
    nbytes = LAYERS[name] * 24
    workload = again([2 * n for n in nbytes], nbytes, 1.0, len(LAYERS[name]))
    budget = int(share * sum(nbytes))
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    assert made.step_seconds == pytest.approx(sum(workload.seconds))
    assert made.streamed_bytes <= 1.1 * 2 * (sum(nbytes) - budget)


def test_few_loads_are_best_where_compute_hides_them():
    """Where the host takes as long for all, small blocks seem to stream for nothing."""
    nbytes = [32 * MIB, 32 * MIB, 32 * MIB, 32 * MIB, 128 * MIB] * 40
    workload = ring([3e-3] * 200, nbytes, 55e9)
    budget = sum(nbytes) // 2
    made = plan(workload, budget_bytes=budget, max_lookahead=3)
    assert made.step_seconds == pytest.approx(sum(workload.seconds))
    crossing = sum(nbytes) - budget
    mean = sum(nbytes) / len(nbytes)
    assert len(nbytes) - len(made.resident) <= 1.1 * crossing / mean
    assert made.streamed_bytes <= 1.1 * crossing


def test_no_lookahead_means_one_slot_for_regions_too():
    workload = again([1.0] * 96, [BLOCK] * 96, BLOCK / 2, 8)
    made = plan(workload, budget_bytes=24 * BLOCK, max_lookahead=0)
    assert len(shared_slots(made)) == 1
    assert made.lookahead == 0


def test_smallest_budget_is_what_must_stay_and_the_largest_other_block():
    workload = ring([1.0] * 4, [50, 700, 300, 900], 1.0)
    workload = replace(workload, must_stay=frozenset({0, 3}))
    assert smallest_budget(workload) == 50 + 900 + 700
    made = plan(workload, budget_bytes=1650, max_lookahead=3)
    assert made.resident == {0, 3}
    assert sum(made.slots) == 1650
    with pytest.raises(StagehandOOMError, match="1650 bytes") as refused:
        plan(workload, budget_bytes=1649, max_lookahead=3)
    assert refused.value.needed_bytes == 1650
    assert refused.value.limit_bytes == 1649


def test_one_slot_is_limited_by_the_budget():
    workload = equal("ring", 6, c=1, b=0, t=1)
    made = plan(workload, budget_bytes=BLOCK, max_lookahead=3)
    assert made.slots == (BLOCK,)
    assert made.step_seconds == pytest.approx(12)
    assert made.limit == "budget"


def test_bytes_that_cross_count_for_the_link_and_those_of_the_block_for_slots():
    plain = equal("ring", 8, c=0.1, b=0, t=1)
    half = replace(plain, link_nbytes=(BLOCK // 2,) * 8)
    one, other = (
        plan(w, budget_bytes=4 * BLOCK, max_lookahead=3) for w in (plain, half)
    )
    assert sum(other.slots) == sum(one.slots) == 4 * BLOCK
    assert other.streamed_bytes % (BLOCK // 2) == 0
    assert other.streamed_bytes <= 0.6 * one.streamed_bytes
    assert other.step_seconds == pytest.approx(one.step_seconds / 2, rel=0.1)
    assert other.bound_seconds == pytest.approx(one.bound_seconds / 2)
    assert smallest_budget(half) == smallest_budget(plain)


def test_bound_keeps_what_costs_the_link_most():
    """Of a plain block and one of half its bytes on the link, the plain one."""
    workload = replace(
        ring([0.0] * 2, [BLOCK] * 2, 1.0), link_nbytes=(BLOCK // 2, BLOCK)
    )
    made = plan(workload, budget_bytes=BLOCK, max_lookahead=0)
    assert made.bound_seconds == BLOCK // 2


def test_a_byte_short_of_two_slots_is_one_slot():
    workload = equal("ring", 6, c=1, b=0, t=1)
    made = plan(workload, budget_bytes=2 * BLOCK - 1, max_lookahead=3)
    assert made.slots == (BLOCK,)


def test_residents_that_only_nearly_fit_do_not_stay():
    workload = ring([0.0, 10.0], [23, 40], 10.0)
    made = plan(workload, budget_bytes=61, max_lookahead=1)
    assert sum(made.slots) <= 61


def test_neighbours_that_must_share_a_slot_have_residents_between():
    """Two slots and 13 streamed blocks: one pair shares, where that costs nothing."""
    workload = equal("ring", 20, c=1, b=0, t=1.5)
    made = plan(workload, budget_bytes=9 * BLOCK, max_lookahead=1)
    assert conflicts(workload, made) == 1
    assert execute(workload, made) == pytest.approx(20.5)


def test_no_lookahead_means_one_slot():
    workload = equal("ring", 6, c=1, b=0, t=1)
    made = plan(workload, budget_bytes=4 * BLOCK, max_lookahead=0)
    assert len(shared_slots(made)) == 1
    assert made.lookahead == 0


def test_blocks_out_of_the_order_have_a_home_that_fits():
    workload = ring([1.0] * 4, [100] * 4, 100.0)
    workload = replace(workload, nbytes=(100, 100, 100, 100, 350, 20))
    for budget in range(350, 700, 25):
        made = plan(workload, budget_bytes=budget, max_lookahead=3)
        assert made.slots[made.home[4]] >= 350
    made = plan(workload, budget_bytes=700, max_lookahead=3)
    assert made.streamed_bytes == 0, "what is used comes before what is not"


def test_unknown_compute_times_still_give_an_overlapping_plan():
    workload = replace(equal("ring", 48, c=1, b=0, t=1), seconds=None)
    made = plan(workload, budget_bytes=16 * BLOCK, max_lookahead=1)
    assert made.limit == "unknown"
    kept = sorted(made.resident)
    gaps = {(b - a) % 48 for a, b in zip(kept, kept[1:] + kept[:1], strict=True)}
    assert len(kept) == 14
    assert gaps <= {3, 4}
    assert conflicts(workload, made) == 0


def test_a_model_that_uses_no_block_is_planned_for():
    workload = Workload(
        order=(), nbytes=(3, 5, 0), seconds=(), link_bytes_per_second=1.0
    )
    made = plan(workload, budget_bytes=5, max_lookahead=3)
    assert made.slots[made.home[1]] == 5
    assert made.step_seconds == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": (0, 1, 2)}, "order names blocks 0 to 2, but the blocks are 0 to 1"),
        ({"must_stay": frozenset({-1})}, "must_stay names blocks -1 to -1"),
        ({"nbytes": (1, -1)}, "-1 bytes"),
        ({"seconds": (1.0,)}, "1 compute times for 2 uses"),
        ({"seconds": (1.0, float("nan"))}, "negative or not finite"),
        ({"link_bytes_per_second": 0.0}, "link rate is 0.0"),
        ({"link_nbytes": (1,)}, "crosses the link for 1 blocks: expected 2"),
        ({"gradient_nbytes": (1,)}, "bytes of gradients for 1 blocks: expected 2"),
        ({"steps": (1, 2)}, "3 uses in its steps: expected 2"),
    ],
)
def test_a_workload_that_describes_no_model_is_refused(change, message):
    good = Workload(
        order=(0, 1), nbytes=(1, 1), seconds=(1.0, 1.0), link_bytes_per_second=1.0
    )
    with pytest.raises(StagehandInternalError, match=message):
        replace(good, **change)


@pytest.mark.parametrize("kind", ["ring", "ping-pong"])
def test_ten_thousand_blocks_are_planned_in_fifteen_million_lines(kind):
    """Well below a second; `benchmarks/planning.py` times it."""
    rng = random.Random(0)
    nbytes = [rng.randint(1, 60 * MIB) for _ in range(10_000)]
    compute = [rng.uniform(0, 1e-3) for _ in nbytes]
    workload = (
        ring(compute, nbytes, 55e9)
        if kind == "ring"
        else ping_pong(compute, compute, nbytes, 55e9)
    )
    for part in (0.002, 0.3):
        budget = int(part * sum(nbytes))
        count = lines_run(plan, workload, budget_bytes=budget, max_lookahead=3)
        assert count < 15_000_000


def test_long_regions_of_ten_thousand_blocks_cost_little_more():
    """A ring may hold most of one: 150 million lines if all drafts were dealt so."""
    nbytes = [(1 + block % 5) * MIB for block in range(10_000)]
    workload = again([1e-3] * len(nbytes), nbytes, 55e9, 1000)
    budget = int(0.3 * sum(nbytes))
    count = lines_run(plan, workload, budget_bytes=budget, max_lookahead=3)
    assert count < 20_000_000


# Properties

RATES = st.sampled_from([3.0, 8.0, 10.0, 15.0, 30.0, 60.0])
SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])
more_examples = settings(max_examples=150)


@st.composite
def workloads(draw):
    nbytes = draw(st.lists(st.sampled_from([0, 10, 10, 23, 40, 100]), min_size=1))
    count = len(nbytes)
    block = st.integers(0, count - 1)
    order = draw(
        st.sampled_from([[*range(count)], [*range(count), *reversed(range(count))]])
        | st.lists(block, max_size=20)
    )
    uses = len(order)
    return Workload(
        order=tuple(order),
        nbytes=tuple(nbytes),
        seconds=tuple(draw(st.lists(SECONDS, min_size=uses, max_size=uses))),
        link_bytes_per_second=draw(RATES),
        must_stay=draw(st.frozensets(block, max_size=2)),
        changing=draw(st.frozensets(block)),
    )


@st.composite
def equal_workloads(draw):
    workload = equal(
        draw(st.sampled_from(["ring", "ping-pong"])),
        draw(st.integers(2, 24)),
        c=1.0,
        b=draw(st.sampled_from([0.5, 1.0, 2.0])),
        t=1.0,
    )
    return replace(workload, link_bytes_per_second=BLOCK * draw(RATES) / 10)


def budgets_for(workload):
    smallest = smallest_budget(workload)
    return st.integers(smallest, smallest + sum(workload.nbytes))


def check_plan(workload, budget, lookahead):
    """Plan, and look at all that has to hold of any plan."""
    made = plan(workload, budget_bytes=budget, max_lookahead=lookahead)
    assert sum(made.slots) <= budget
    assert set(made.home) == set(range(len(made.slots)))
    for block, slot in enumerate(made.home):
        assert made.slots[slot] >= workload.nbytes[block]
        if block in made.resident:
            assert made.home.count(slot) == 1
            assert made.slots[slot] == workload.nbytes[block]
    for slot in shared_slots(made):
        assert made.home.count(slot) > 1
    assert workload.must_stay <= made.resident
    assert made.lookahead == (len(shared_slots(made)) if lookahead else 0)
    if not lookahead:
        assert len(shared_slots(made)) <= 1
    elif soon(workload, range(len(workload.nbytes))) is None:
        ring = sum(made.slots[slot] for slot in shared_slots(made))
        assert ring <= (lookahead + 1) * max(workload.nbytes)
    assert made.bound_seconds <= made.step_seconds * (1 + 1e-9)
    if workload.order:
        run = execute(workload, made, steps=40)
        assert run == pytest.approx(made.step_seconds, rel=0.01)


@more_examples
@given(st.data(), workloads(), st.integers(0, 5))
def test_any_plan_is_sound_and_runs_as_predicted(data, workload, lookahead):
    check_plan(workload, data.draw(budgets_for(workload)), lookahead)


@st.composite
def regions(draw):
    """Blocks of a few sizes, in regions that are computed again."""
    pattern = draw(st.lists(st.sampled_from([10, 23, 40, 100]), min_size=2, max_size=6))
    nbytes = pattern * draw(st.integers(5, 12))
    compute = [draw(SECONDS) + 0.1 for _ in pattern] * (len(nbytes) // len(pattern))
    return again(compute, nbytes, draw(RATES), len(pattern))


@more_examples
@given(st.data(), regions(), st.integers(1, 5))
def test_plans_for_regions_are_sound_and_run_as_predicted(data, workload, lookahead):
    check_plan(workload, data.draw(budgets_for(workload)), lookahead)


@st.composite
def trainings(draw):
    """Blocks of which some train: steps that go back, or not, or use what they like."""
    nbytes = draw(
        st.lists(st.sampled_from([10, 10, 23, 40, 100]), min_size=2, max_size=12)
    )
    there = range(len(nbytes))
    step = st.sampled_from([[*there], [*there, *reversed(there)]])
    any_uses = st.lists(st.integers(0, len(nbytes) - 1), min_size=1, max_size=12)
    steps = draw(st.lists(step | any_uses, min_size=1, max_size=3))
    sent = [draw(st.sampled_from([0, n // 2, n])) for n in nbytes]
    uses = sum(map(len, steps))
    return Workload(
        order=tuple(chain.from_iterable(steps)),
        nbytes=tuple(nbytes),
        seconds=tuple(draw(st.lists(SECONDS, min_size=uses, max_size=uses))),
        link_bytes_per_second=draw(RATES),
        steps=tuple(map(len, steps)),
        gradient_nbytes=tuple(sent),
    )


@more_examples
@given(st.data(), trainings(), st.integers(0, 5))
def test_plans_for_training_are_sound_and_run_as_predicted(data, workload, lookahead):
    check_plan(workload, data.draw(budgets_for(workload)), lookahead)


@pytest.mark.parametrize(
    ("order", "seconds", "gradients", "least"),
    [
        # Block 1 may come while block 0 computes for the first time, and be sent home
        # while it computes for the last one.
        ((0, 0, 1), (1.0, 1.0, 0.0), (0, 1), 2.1),
        ((1, 0, 1, 0, 0), (0.0, 0.0, 0.0, 0.0, 9.0), (0, 20), 11.0),
        # It may not come before the step begins, and is home when it ends.
        ((1, 0), (1.0, 1.0), (0, 20), 4.0),
        ((0, 1, 1), (1.0, 1.0, 1.0), (0, 20), 6.0),
    ],
)
def test_bound_of_a_step_that_trains_is_what_no_policy_can_do_without(
    order, seconds, gradients, least
):
    workload = Workload(
        order=order,
        nbytes=(1, 20),
        seconds=seconds,
        link_bytes_per_second=10.0,
        gradient_nbytes=gradients,
    )
    made = plan(workload, budget_bytes=21, max_lookahead=3)
    assert made.step_seconds == pytest.approx(least)
    assert made.bound_seconds <= least * (1 + 1e-9)
    assert made.resident == {0, 1}


@more_examples
@given(st.data(), equal_workloads(), st.integers(1, 5))
def test_neighbours_use_different_slots(data, workload, lookahead):
    """But for one pair: a ring of two slots and an odd number of streamed blocks."""
    budget = data.draw(budgets_for(workload))
    made = plan(workload, budget_bytes=budget, max_lookahead=lookahead)
    slots = len(shared_slots(made))
    streamed = len(workload.nbytes) - len(made.resident)
    odd = len(workload.order) == len(workload.nbytes) and streamed % 2
    if slots >= 2:
        assert conflicts(workload, made) <= (1 if slots == 2 and odd else 0)


@more_examples
@given(st.data(), equal_workloads(), st.integers(0, 4))
def test_more_budget_never_makes_equal_blocks_slower(data, workload, lookahead):
    small, large = sorted(data.draw(st.tuples(*[budgets_for(workload)] * 2)))
    before = plan(workload, budget_bytes=small, max_lookahead=lookahead)
    after = plan(workload, budget_bytes=large, max_lookahead=lookahead)
    assert after.step_seconds <= 1.01 * before.step_seconds


@pytest.mark.parametrize(
    ("kind", "count", "b", "load", "lookahead", "blocks", "spare"),
    [
        ("ping-pong", 15, 1.0, 1.0, 0, 8, 932),
        ("ping-pong", 23, 0.5, 1.0, 0, 12, 963),
        ("ring", 16, 1.0, 1 / 0.3, 3, 13, 684),
        ("ring", 24, 1.0, 1.25, 4, 8, 223),
    ],
)
def test_bytes_to_spare_change_nothing(kind, count, b, load, lookahead, blocks, spare):
    """Residents were spread for bytes that no whole block came to: up to 7 % longer."""
    workload = equal(kind, count, c=1.0, b=b, t=load)
    less, more = (
        plan(workload, budget_bytes=budget, max_lookahead=lookahead)
        for budget in (blocks * BLOCK, blocks * BLOCK + spare)
    )
    assert more.resident == less.resident
    assert more.step_seconds == less.step_seconds


@more_examples
@given(
    pattern=st.lists(st.sampled_from([10, 23, 40, 100]), min_size=1, max_size=4),
    count=st.integers(2, 24),
    per_byte=st.booleans(),
    backward=st.sampled_from([None, 0.5, 1.0, 2.0]),
    rate=RATES,
    data=st.data(),
)
def test_budget_for_one_more_block_never_makes_the_step_longer(
    pattern, count, per_byte, backward, rate, data
):
    nbytes = (pattern * count)[:count]
    compute = [n / 10 if per_byte else 1.0 for n in nbytes]
    workload = (
        ring(compute, nbytes, rate)
        if backward is None
        else ping_pong(compute, [backward * c for c in compute], nbytes, rate)
    )
    budget = data.draw(budgets_for(workload))
    before = plan(workload, budget_bytes=budget, max_lookahead=3)
    after = plan(workload, budget_bytes=budget + max(nbytes), max_lookahead=3)
    assert after.step_seconds <= 1.01 * before.step_seconds
