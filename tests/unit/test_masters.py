"""Masters: the host side of all blocks, pinned as far as there is room."""

import itertools
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

from equality import all_equal
from stagehand.core.arena import Arena
from stagehand.core.layout import layout_of, same_bits
from stagehand.core.ledger import Account, SubAccount
from stagehand.core.workers import WorkerGroup
from stagehand.errors import StagehandOOMError
from stagehand.residency import masters as module
from stagehand.residency.blocks import Block
from stagehand.residency.masters import Masters
from stagehand.stores.base import Skew
from stagehand.stores.module import ModuleStore

KB = 1024


def new_arena(limit=100 * KB):
    account = Account("pinned memory", limit)
    return Arena("pinned memory", lambda n: torch.empty(n, dtype=torch.uint8), account)


def new_block(index, *tensors):
    named = [(f"t{number}", tensor.detach()) for number, tensor in enumerate(tensors)]
    return Block(index, f"blocks.{index}", layout_of(named), tensors)


def block_of(kilobytes, index=0):
    return new_block(index, nn.Parameter(torch.full((kilobytes * 256,), index + 1.0)))


def adopted(masters, *kilobytes):
    blocks = [block_of(size, index) for index, size in enumerate(kilobytes)]
    for block in blocks:
        masters.adopt(block)
    return blocks


@pytest.fixture
def arena():
    arena = new_arena()
    yield arena
    assert arena.leased_bytes == 0
    arena.close()


# --------------------------------------------------------------------- adopt, give back


def test_adopted_tensors_are_the_truth_where_they_are():
    weight = nn.Parameter(torch.ones(8))
    address = weight.data_ptr()
    block = new_block(0, weight)
    Masters(new_arena()).adopt(block)
    assert block.store.hosts[0].data_ptr() == weight.data_ptr() == address
    assert block.image is None
    assert not block.is_replaced()


def test_adopted_tensors_of_the_device_come_home_and_go_back(sim):
    masters = Masters(new_arena())
    weight = nn.Parameter(torch.arange(8.0, device="hpu"))
    block = new_block(0, weight)
    masters.adopt(block)
    assert weight.device.type == "cpu"
    assert weight.tolist() == list(range(8))
    assert sim.allocated_bytes() == 0
    weight.data.add_(1)
    masters.give_back(block)
    assert weight.device.type == "hpu"
    assert weight.tolist() == list(range(1, 9))


def test_tensors_without_values_are_left_alone():
    masters = Masters(new_arena())
    weight = nn.Parameter(torch.empty(8, device="meta"))
    block = new_block(0, weight)
    masters.adopt(block)
    assert block.store is None
    assert weight.is_meta
    masters.give_back(block)
    assert weight.is_meta


def test_pinned_block_gives_back_plain_memory_of_the_same_strides(arena):
    masters = Masters(arena)
    tensors = [
        nn.Parameter(torch.randn(6, 5).t()),
        nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.tensor([float("nan"), -0.0])),
        torch.randint(9, (3,)),
        torch.empty(0, 4),
    ]
    expected = [tensor.detach().clone() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    block = new_block(0, *tensors)
    masters.adopt(block)
    assert masters.pin(block)
    image = block.image
    within = range(image.data_ptr(), image.data_ptr() + image.numel())
    assert all(t.data_ptr() in within for t in tensors if t.numel())
    masters.give_back(block)
    assert all_equal(tensors, expected, same_bits)
    assert [tensor.stride() for tensor in tensors] == strides
    assert not any(t.data_ptr() in within for t in tensors if t.numel())
    assert block.store is None


def test_tensors_that_share_memory_share_it_after_they_are_given_back(arena):
    masters = Masters(arena)
    whole = torch.arange(12.0)
    part = whole[4:8]
    block = new_block(0, whole, part)
    masters.adopt(block)
    masters.pin(block)
    masters.give_back(block)
    part.zero_()
    assert whole.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 8, 9, 10, 11]


def test_tensors_of_inference_mode_are_pinned_and_given_back(arena):
    masters = Masters(arena)
    with torch.inference_mode():
        weight = torch.arange(8.0)
    block = new_block(0, weight)
    masters.adopt(block)
    assert masters.pin(block)
    assert weight.tolist() == list(range(8))
    masters.give_back(block)
    assert weight.is_inference()
    assert weight.tolist() == list(range(8))


# ------------------------------------------------------------------------------ pinning


def test_pinned_block_lies_in_one_image_of_its_exact_size(arena):
    masters = Masters(arena)
    [block] = adopted(masters, 4)
    assert masters.pin(block)
    assert arena.leased_bytes == block.nbytes == 4 * KB
    assert block.image.data_ptr() == block.tensors[0].data_ptr()
    assert (block.tensors[0] == 1).all()
    assert masters.pin(block)  # again: nothing to do
    assert arena.leased_bytes == 4 * KB
    masters.give_back(block)


def test_block_that_does_not_fit_keeps_its_memory():
    masters = Masters(new_arena(3 * KB))
    [block] = adopted(masters, 4)
    address = block.tensors[0].data_ptr()
    assert not masters.pin(block)
    assert block.image is None
    assert block.tensors[0].data_ptr() == address


@pytest.mark.parametrize(
    ("own", "cap", "advice"),
    [
        (
            3 * KB,
            100 * KB,
            r"raise ram_budget \(or pinned_pool_mb\) to at least 4.10 KB$",
        ),
        (100 * KB, 3 * KB, "raise pinned_cap_mb by at least 1.03 KB$"),
    ],
)
def test_error_names_what_limits_pinned_memory(own, cap, advice):
    """What this model may have, or what all on the device together may."""
    account = SubAccount("a model", own, Account("pinned memory", cap))
    arena = Arena("pinned memory", None, account)
    masters = Masters(arena)
    blocks = adopted(masters, 4)
    with pytest.raises(StagehandOOMError, match=advice):
        masters.pin_all(blocks, lookahead=2)


def test_image_that_somebody_still_reads_is_not_used_again():
    """A state dict that is being saved must not change under the writer."""
    arena = new_arena()
    masters = Masters(arena)
    [block] = adopted(masters, 4)
    masters.pin(block)
    kept = block.tensors[0].detach()[5:]
    masters.give_back(block)
    assert arena.kept_bytes == arena.leased_bytes == 0
    arena.acquire(4 * KB, "another").buffer.zero_()
    assert (kept == 1).all()


def test_image_that_nobody_reads_is_used_again(arena):
    masters = Masters(arena)
    for _ in range(2):
        [block] = adopted(masters, 4)
        masters.pin(block)
        address = block.image.data_ptr()
        masters.give_back(block)
        assert arena.kept_bytes == 4 * KB
    assert arena.acquire(4 * KB, "x").buffer.data_ptr() == address
    arena._leased = 0  # this lease is the test's own


def pinned(blocks):
    return [block.index for block in blocks if block.image is not None]


def hand_over(masters, block):
    """Let the truth of a block be elsewhere than in the module's own memory."""
    masters.hand_over(block, ModuleStore(block.layout, block.store.hosts))


def give_all_back(masters, blocks):
    for block in blocks:
        masters.give_back(block)
    if masters._pinners is not None:
        masters._pinners.close()


def test_all_is_pinned_and_nothing_staged_where_there_is_room(arena):
    masters = Masters(arena)
    blocks = adopted(masters, *[10] * 10)
    assert masters.pin_all(blocks, lookahead=3) == (0, 0)
    assert pinned(blocks) == list(range(10))
    assert arena.leased_bytes == 100 * KB
    give_all_back(masters, blocks)


def test_where_there_is_less_room_pinned_and_staged_blocks_alternate():
    arena = new_arena(60 * KB)
    masters = Masters(arena)
    blocks = adopted(masters, *[10] * 10)
    slabs, nbytes = masters.pin_all(blocks, lookahead=0)
    assert (slabs, nbytes) == (2, 10 * KB)
    indices = pinned(blocks)
    assert len(indices) == 4
    assert {b - a for a, b in itertools.pairwise(indices)} <= {2, 3}
    assert arena.account.free_bytes >= slabs * nbytes
    give_all_back(masters, blocks)


@pytest.mark.parametrize("limit", range(10, 110, 7))
@pytest.mark.parametrize("sizes", [[10] * 10, [1, 10, 2, 9, 3, 8], [3] * 5 + [10]])
@pytest.mark.parametrize("from_files", [(), (0,), (1, 3)])
def test_pinned_images_leave_room_for_the_slabs(limit, sizes, from_files):
    arena = new_arena(limit * KB)
    masters = Masters(arena)
    blocks = adopted(masters, *sizes)
    for index in from_files:
        hand_over(masters, blocks[index])
    slabs, nbytes = masters.pin_all(blocks, lookahead=3)
    for block in blocks:
        assert block.image is not None or (slabs and block.nbytes <= nbytes)
    leases = [arena.acquire_nowait(nbytes, "slab") for _ in range(slabs)]
    assert None not in leases
    for lease in leases:
        lease.release()
    give_all_back(masters, blocks)


def test_pool_smaller_than_the_largest_block_is_refused_with_both_numbers():
    masters = Masters(new_arena(9 * KB))
    blocks = adopted(masters, 10, 4)
    with pytest.raises(StagehandOOMError, match=r"of 9\.22 KB .* of 10\.24 KB;") as e:
        masters.pin_all(blocks, lookahead=3)
    assert (e.value.needed_bytes, e.value.limit_bytes) == (10 * KB, 9 * KB)


@pytest.mark.parametrize("sizes", [[10, 12, 30], [6, 7, 8], [2] * 9])
def test_images_make_room_to_stage_a_block_that_joins(arena, sizes):
    """Gradients had taken the rest, and the pass that needed the block failed."""
    masters = Masters(arena)
    blocks = adopted(masters, *sizes)
    masters.pin_all(blocks, lookahead=1)
    gradients = arena.acquire_nowait(arena.free_bytes, "gradients")
    blocks.append(block_of(11, len(blocks)))
    masters.adopt(blocks[-1])
    slabs, nbytes = masters.pin_all(blocks, lookahead=1)
    assert slabs
    assert nbytes >= 11 * KB
    assert arena.free_bytes >= slabs * nbytes
    for block in blocks:
        expected = torch.full_like(block.tensors[0], block.index + 1.0)
        assert torch.equal(block.tensors[0], expected)
        assert block.image is not None or block.nbytes <= nbytes
    gradients.release()
    give_all_back(masters, blocks)


def test_error_names_the_budget_with_which_a_block_can_be_staged():
    """It named the block's bytes, which were there: others had taken them."""
    arena = new_arena(20 * KB)
    masters = Masters(arena)
    gradients = arena.acquire_nowait(15 * KB, "gradients")
    blocks = adopted(masters, 10)
    with pytest.raises(StagehandOOMError, match=r"at least 25\.6\d KB") as e:
        masters.pin_all(blocks, lookahead=1)
    assert (e.value.needed_bytes, e.value.limit_bytes) == (10 * KB, 5 * KB)
    gradients.release()
    give_all_back(masters, blocks)


def test_blocks_from_files_are_staged_beside_pinned_ones(arena):
    masters = Masters(arena)
    blocks = adopted(masters, 10, 10, 10, 10)
    hand_over(masters, blocks[1])
    assert masters.pin_all(blocks, lookahead=1) == (3, 10 * KB)
    assert pinned(blocks) == [0, 2, 3]
    give_all_back(masters, blocks)


class Skewed(ModuleStore):
    """Is read without a copy where its image begins at the right byte of a page."""

    skew = Skew(512, 4096)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(28, (2, 14)), (27, (2, 10)), (20, (2, 10)), (19, (1, 14)), (13, (1, 10))],
)
def test_slabs_are_a_page_larger_if_that_does_not_cost_the_second_one(limit, expected):
    """With one the disk waits for each copy, which costs more than a buffer does."""
    masters = Masters(new_arena(limit * KB))
    [block] = adopted(masters, 10)
    masters.hand_over(block, Skewed(block.layout, block.store.hosts))
    slabs, nbytes = masters.pin_all([block], lookahead=3)
    assert (slabs, nbytes // KB) == expected
    give_all_back(masters, [block])


def test_blocks_that_are_pinned_already_are_left_as_they_are(arena):
    masters = Masters(arena)
    blocks = adopted(masters, 10, 10)
    masters.pin_all(blocks, lookahead=3)
    images = [block.image.data_ptr() for block in blocks]
    assert masters.pin_all(blocks, lookahead=3) == (0, 0)
    assert [block.image.data_ptr() for block in blocks] == images
    give_all_back(masters, blocks)


def test_memory_that_is_kept_from_before_is_room(arena):
    for lease in [arena.acquire(20 * KB, "before") for _ in range(5)]:
        lease.release()
    masters = Masters(arena)
    blocks = adopted(masters, *[10] * 10)
    assert masters.pin_all(blocks, lookahead=3) == (0, 0)
    give_all_back(masters, blocks)


@pytest.mark.parametrize(("plain", "shrinks"), [(8, True), (512, False)])
def test_block_is_packed_only_where_it_shrinks_as_a_whole(plain, shrinks):
    masters = Masters(new_arena(2048 * KB))
    block = new_block(0, torch.randn(32 * KB).bfloat16(), torch.randn(plain * KB // 4))
    masters.adopt(block)
    stubborn = masters.pack_all([block], "cpu", lookahead=1)
    assert (block.wire is not None, stubborn == []) == (shrinks, shrinks)
    give_all_back(masters, [block])


def test_block_that_is_pinned_is_not_packed_beside_that():
    masters = Masters(new_arena(1024 * KB))
    block = new_block(0, torch.randn(32 * KB).bfloat16())
    masters.adopt(block)
    assert masters.pin(block)
    assert masters.pack_all([block], "cpu", lookahead=1) == []
    assert block.wire is None
    assert block.image is not None
    give_all_back(masters, [block])


def pinning(monkeypatch, limit, *kilobytes):
    """Masters that have all but a few blocks pinned, in memory that a thread made."""
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    arena, pinners = new_arena(limit), WorkerGroup("pinner", 1)
    masters = Masters(arena, pinners)
    blocks = adopted(masters, *kilobytes)
    slabs = masters.pin_all(blocks, lookahead=3)
    ring = [arena.acquire(slabs[1], "slab") for _ in range(slabs[0])]
    while masters.reserved_bytes:
        pinners.wait_idle()
        masters.pin_on()
    for lease in ring:
        lease.release()
    return masters, blocks, arena


@pytest.mark.parametrize("spare", [0, 5 * KB, 10 * KB, 25 * KB])
def test_what_has_no_room_beside_slabs_is_pinned_when_these_are_gone(
    monkeypatch, spare
):
    masters, blocks, _ = pinning(monkeypatch, 80 * KB + spare, *[10] * 8)
    late = 8 - len(pinned(blocks))
    assert masters.pinning_bytes == late * 10 * KB
    assert late == (0 if spare >= 10 * KB else 1)
    assert masters.pin_late() == (0, 0)
    assert pinned(blocks) == list(range(8))
    assert masters.pinning_bytes == 0
    give_all_back(masters, blocks)


def test_late_block_whose_room_is_taken_has_a_slab_for_good(monkeypatch):
    masters, blocks, arena = pinning(monkeypatch, 80 * KB, *[10] * 8)
    arena.trim()
    arena.account.grant(5 * KB, "a gradient")
    assert masters.pin_late() == (1, 10 * KB)
    assert len(pinned(blocks)) == 7
    give_all_back(masters, blocks)


def test_memory_is_made_first_for_the_last_of_the_blocks_that_come_and_go(monkeypatch):
    """The first ones of a pass are staged while it begins."""
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    made, pinners = [], WorkerGroup("pinner", 1)

    def make(nbytes):
        made.append(nbytes // KB)
        return torch.empty(nbytes, dtype=torch.uint8)

    masters = Masters(new_arena(), pinners, make)
    blocks = adopted(masters, 1, 2, 3, 4, 5)
    blocks[0].stays = blocks[3].stays = True
    masters.pin_all(blocks, lookahead=3)
    while masters.reserved_bytes:
        pinners.wait_idle()
        masters.pin_on()
    pinners.close()
    assert made == [5, 3, 2, 4, 1]
    give_all_back(masters, blocks)


def test_block_that_is_stepped_gets_its_image_when_that_is_over(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    pinners = WorkerGroup("pinner", 1)
    masters = Masters(new_arena(), pinners)
    [block] = adopted(masters, 4)
    masters.pin_all([block], lookahead=3)
    pinners.wait_idle()
    block.stepping = True
    masters.pin_on()
    assert block.image is None
    block.stepping = False
    masters.pin_on()
    assert block.image is not None
    give_all_back(masters, [block])


def test_no_memory_is_made_when_pinning_has_stopped(monkeypatch):
    """It would be nobody's: the account has its bytes back."""
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    made, goes_on, pinners = [], threading.Event(), WorkerGroup("pinner", 1)

    def make(nbytes):
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    masters = Masters(new_arena(), pinners, make)
    blocks = adopted(masters, 1, 2)
    pinners.submit(goes_on.wait)
    masters.pin_all(blocks, lookahead=3)
    masters.stop_pinning()
    goes_on.set()
    pinners.wait_idle()
    assert masters.reserved_bytes == 0
    assert made == []
    give_all_back(masters, blocks)


def test_move_whose_end_was_interrupted_is_done_when_pinning_stops(arena, monkeypatch):
    masters = Masters(arena)
    [block] = adopted(masters, 4)
    rehouse = Block.rehouse

    def interrupted(self, store):
        monkeypatch.setattr(Block, "rehouse", rehouse)
        raise KeyboardInterrupt

    monkeypatch.setattr(Block, "rehouse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        masters.pin_all([block], lookahead=3)
    masters.stop_pinning()
    assert block.image is not None
    assert block.tensors[0].tolist() == [1.0] * KB
    give_all_back(masters, [block])


def test_blocks_whose_model_is_gone_leave_no_pinned_memory(monkeypatch):
    """Whether it is in use, packed, or in the making."""
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    arena, pinners = new_arena(1024 * KB), WorkerGroup("pinner", 1)
    masters = Masters(arena, pinners)
    blocks = [new_block(n, torch.randn(32 * KB).bfloat16()) for n in range(3)]
    for block in blocks:
        masters.adopt(block)
    assert masters.pin(blocks[0])
    assert masters.pack_all([blocks[1]], "cpu", lookahead=1) == []
    assert blocks[1].wire is not None
    masters.pin_all([blocks[2]], lookahead=1)
    assert masters.reserved_bytes > 0
    masters.let_go(blocks)
    assert masters.reserved_bytes == arena.leased_bytes == 0
    pinners.close()


def test_pinning_that_begins_anew_has_memory_reserved_once(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 0)
    masters = Masters(new_arena(), WorkerGroup("pinner", 1))
    blocks = adopted(masters, 1, 2, 3)
    for _ in range(2):
        masters.pin_all(blocks, lookahead=3)
        assert masters.reserved_bytes == masters.pinning_bytes == 6 * KB
    masters.stop_pinning()
    give_all_back(masters, blocks)


def test_nothing_to_pin_needs_no_room():
    assert Masters(new_arena(0)).pin_all([], lookahead=3) == (0, 0)


# ---------------------------------------------------------------------------- hand over


class Told(ModuleStore):
    """Writes down what it is told of."""

    told: ClassVar = []

    def edited(self, index):
        self.told.append(index)


def test_handed_over_block_has_the_other_values_and_its_image_is_free(arena):
    masters = Masters(arena)
    [block] = adopted(masters, 4)
    masters.pin(block)
    [weight] = block.tensors
    with torch.no_grad():
        weight.add_(1)
    identity, version = id(weight), weight._version
    other = Told(block.layout, [torch.full((KB,), 7.0)])
    masters.hand_over(block, other)
    assert (weight == 7).all()
    assert (id(block.tensors[0]), weight._version) == (identity, version)
    assert block.image is None
    assert not block.is_replaced()
    block.tell_edits()
    assert other.told == []
    assert arena.leased_bytes == 0
    masters.give_back(block)
    assert weight.data_ptr() == other.hosts[0].data_ptr()
