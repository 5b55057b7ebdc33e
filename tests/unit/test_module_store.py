"""ModuleStore: a block whose truth is in host memory."""

import pytest
import torch

from equality import all_equal
from stagehand.core.layout import layout_of, same_bits
from stagehand.errors import StagehandInternalError
from stagehand.stores.base import Store
from stagehand.stores.module import ModuleStore

KINDS = ["pageable", "image"]


def block_tensors() -> list[torch.Tensor]:
    weight = torch.randn(6, 5)
    return [
        weight,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([float("nan"), -0.0], dtype=torch.bfloat16),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 7),
        weight.t(),
        torch.randn(8, 8)[:, :3],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]


def new_store(kind: str, tensors: list[torch.Tensor]) -> ModuleStore:
    layout = layout_of([(f"t{index}", tensor) for index, tensor in enumerate(tensors)])
    if kind == "pageable":
        return ModuleStore(layout, tensors)
    image = torch.empty(layout.nbytes, dtype=torch.uint8)
    return ModuleStore.pack(layout, tensors, image)


def loaded(store: Store, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    layout = layout_of([(f"t{index}", tensor) for index, tensor in enumerate(tensors)])
    image = torch.full((layout.nbytes + 256,), 0xA5, dtype=torch.uint8)
    assert store.read_into(image) == 0
    assert torch.all(image[layout.nbytes :] == 0xA5)
    return layout.views(image)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_block_is_bit_equal(kind):
    tensors = block_tensors()
    store = new_store(kind, tensors)
    views = loaded(store, tensors)
    assert all_equal(views, tensors, same_bits)
    assert all_equal(store.hosts, tensors, same_bits)


@pytest.mark.parametrize("kind", KINDS)
def test_edit_of_a_host_tensor_is_in_the_next_load(kind):
    tensors = block_tensors()
    store = new_store(kind, tensors)
    store.hosts[0][2, 3] = 42.0
    store.edited(0)
    views = loaded(store, tensors)
    assert views[0][2, 3] == 42.0
    assert views[5][3, 2] == 42.0


@pytest.mark.parametrize("kind", KINDS)
def test_written_back_block_changes_the_host_tensors_in_place(kind):
    tensors = block_tensors()
    store = new_store(kind, tensors)
    hosts = store.hosts
    addresses = [host.data_ptr() for host in hosts]
    image = torch.empty(8192, dtype=torch.uint8)
    store.read_into(image)
    new = layout_of([(f"t{i}", tensor) for i, tensor in enumerate(tensors)]).views(
        image
    )
    for view in new:
        view.mul_(2)
    store.write_back(image)
    assert all_equal(hosts, new, same_bits)
    assert [host.data_ptr() for host in store.hosts] == addresses
    image.zero_()
    assert hosts[3] == 6


def test_without_an_image_the_hosts_are_the_tensors_that_were_given():
    tensors = block_tensors()
    store = new_store("pageable", tensors)
    assert all(
        host is tensor for host, tensor in zip(store.hosts, tensors, strict=True)
    )
    assert store.pinned is None


def test_with_an_image_the_hosts_lie_in_it_and_the_given_tensors_do_not():
    tensors = block_tensors()
    store = new_store("image", tensors)
    start = store.pinned.data_ptr()
    end = start + store.pinned.numel()
    assert all(start <= host.data_ptr() < end for host in store.hosts if host.numel())
    store.pinned.zero_()
    assert store.hosts[3] == 0
    assert tensors[3] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_require_gradients_can_be_stored_in_inference_mode(kind):
    weight = torch.nn.Parameter(torch.randn(3, 3))
    with torch.inference_mode():
        store = new_store(kind, [weight])
        (view,) = loaded(store, [weight])
        assert torch.equal(view, weight)
    image = torch.zeros(256, dtype=torch.uint8)
    store.write_back(image)
    assert torch.equal(store.hosts[0], torch.zeros(3, 3))
    assert store.hosts[0].grad_fn is None


def test_hosts_that_do_not_fit_the_layout_are_refused():
    layout = layout_of([("t", torch.randn(3))])
    with pytest.raises(StagehandInternalError, match="0 host tensors for 1"):
        ModuleStore(layout, [])
    with pytest.raises(StagehandInternalError, match="at least 256"):
        ModuleStore(layout, [torch.randn(3)], torch.empty(8, dtype=torch.uint8))
