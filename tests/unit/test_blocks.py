"""Block: its tensors point to where it is, and edits are noticed."""

import pytest
import torch
from torch import nn

from stagehand.core.layout import layout_of
from stagehand.core.transfer import Slot
from stagehand.residency.blocks import Block
from stagehand.stores.base import Skew
from stagehand.stores.module import ModuleStore


class Told(ModuleStore):
    """Writes down what it is told of."""

    def __init__(self, *args):
        super().__init__(*args)
        self.told = []

    def edited(self, index):
        self.told.append(index)


def new_block(*tensors):
    layout = layout_of([(f"t{i}", tensor) for i, tensor in enumerate(tensors)])
    block = Block(0, "blocks.0", layout, tensors)
    block.set_store(Told(layout, [tensor.data for tensor in tensors]))
    block.clean_versions = block.all_versions()
    block.versions = block.read_versions()
    block.point_to_host()
    return block


class Lease:
    def __init__(self, nbytes):
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)


def slot_for(block, spare=0):
    slot = Slot(0, block.nbytes + spare)
    slot.lease = Lease(slot.nbytes)
    return slot


def test_tensors_point_to_the_slot_and_back_and_stay_the_same_objects():
    weight, bias = nn.Parameter(torch.ones(4, 4)), torch.zeros(4)
    block = new_block(weight, bias)
    home = weight.data_ptr()
    block.set_views(slot_for(block))
    assert block.arrive()
    assert block.bound
    assert weight.data_ptr() == block.target.data_ptr()
    assert (weight == 0).all()
    assert not block.is_replaced()
    assert block.leave()
    assert not block.bound
    assert weight.data_ptr() == home
    assert (weight == 1).all()
    assert not block.is_changed()
    block.set_views(None)
    assert (block.views, block.target) == ((), None)


@pytest.mark.parametrize("past", [0, 24, 488])
def test_image_begins_in_a_slot_where_files_write_it_and_leaves_room_for_others(past):
    """Slots are used in turn, by blocks of one form that begin elsewhere each."""
    weight = nn.Parameter(torch.ones(4, 4))
    block, other = new_block(weight), new_block(weight.detach())
    block.begin_at(Skew(past, 512))
    slot = slot_for(block, spare=512)
    for placed in (other, block, other, block):
        placed.set_views(slot)
    assert block.target.data_ptr() % 512 == past
    assert other.target.data_ptr() == slot.lease.buffer.data_ptr()
    assert block.target.numel() == other.target.numel() == block.nbytes
    assert [view.data_ptr() % 512 for view in block.views] == [past]
    block.set_views(slot_for(block))  # it may have one that was made for others
    assert block.target.numel() == block.nbytes


def test_assigned_data_is_seen_at_home_and_away():
    weight = nn.Parameter(torch.ones(4, 4))
    block = new_block(weight)
    weight.data = torch.ones(4, 4)
    assert block.is_replaced()
    block.point_to_host()
    block.set_views(slot_for(block))
    assert block.arrive()
    weight.data = weight.data.clone()
    assert block.is_replaced()


@pytest.mark.parametrize("edit", ["replaced", "changed"])
@pytest.mark.parametrize("kind", ["tracked", "of inference mode"])
def test_edited_block_neither_arrives_nor_leaves_with_any_of_its_tensors(edit, kind):
    with torch.inference_mode(kind != "tracked"):
        first = torch.ones(4)
    last = torch.ones(4)
    block = new_block(first, last)
    block.set_views(slot_for(block))
    for move in (block.arrive, block.leave):
        places = [tensor.data_ptr() for tensor in block.tensors]
        if edit == "replaced":
            last.data = last.data.clone()
        else:
            last.add_(1)
        assert not move()
        assert first.data_ptr() == places[0]
        assert block.bound == (move == block.leave)
        last.data = block.pairs()[1][1]
        block.versions = block.read_versions()
        assert move()


def test_store_is_told_once_of_each_changed_tensor():
    tensors = [torch.ones(3) for _ in range(3)]
    block = new_block(*tensors)
    block.tell_edits()
    assert block.store.told == []
    tensors[0].add_(1)
    tensors[2].add_(1)
    assert block.is_changed()
    block.tell_edits()
    block.tell_edits()
    assert block.store.told == [0, 2]
    tensors[1].zero_()
    block.tell_edits()
    assert block.store.told == [0, 2, 1]


def test_marked_block_is_changed_and_all_of_it_is_told():
    block = new_block(torch.ones(3), torch.ones(3))
    block.mark_changed()
    assert block.is_changed()
    block.tell_edits()
    assert block.store.told == [0, 1]


def test_tensors_of_inference_mode_have_no_versions_and_can_be_pointed_anywhere():
    with torch.inference_mode():
        weight = torch.ones(4, 4)
    block = new_block(weight, torch.ones(2))
    assert len(block.read_versions()) == 1
    assert block.all_versions() == [0, 0]
    block.set_views(slot_for(block))
    assert block.arrive()
    assert weight.is_inference()
    assert (weight == 0).all()
    assert block.leave()
    assert (weight == 1).all()


def test_block_knows_whether_its_truth_lies_in_pinned_memory():
    weight = torch.ones(4)
    layout = layout_of([("weight", weight)])
    block = Block(0, "blocks.0", layout, [weight])
    image = torch.zeros(1000, dtype=torch.uint8)
    block.set_store(ModuleStore.pack(layout, [weight], image))
    assert block.image.data_ptr() == image.data_ptr()
    assert block.image.numel() == block.nbytes == 256
    block.set_store(ModuleStore(layout, [weight]))
    assert block.image is None


def test_repr_names_size_and_state():
    assert repr(new_block(torch.ones(4))) == "Block('blocks.0', 256 B, UNLOADED)"
