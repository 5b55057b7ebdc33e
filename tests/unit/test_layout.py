"""BlockLayout: places, views and packing."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagehand.core.copies import copy_values
from stagehand.core.layout import (
    BlockLayout,
    contiguous_stride,
    layout_of,
    same_bits,
)
from stagehand.errors import StagehandInternalError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bits, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    top = 2 if dtype == torch.bool else 256
    size = (count * dtype.itemsize,)
    raw = torch.randint(top, size, generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def new_image(layout: BlockLayout) -> torch.Tensor:
    return torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)


def packed(tensors: list[torch.Tensor]) -> tuple[BlockLayout, list[torch.Tensor]]:
    layout = layout_of([(f"t{index}", tensor) for index, tensor in enumerate(tensors)])
    image = new_image(layout)
    layout.pack(tensors, image)
    return layout, layout.views(image)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_equal(dtype, shape):
    tensor = random_bits(dtype, *shape)
    _, (view,) = packed([tensor])
    assert view.dtype == dtype
    assert view.shape == tensor.shape
    assert same_bits(view, tensor)


def test_each_tensor_begins_at_an_aligned_offset_and_the_image_ends_at_one():
    tensors = [random_bits(torch.int8, size) for size in (1, 0, 256, 257, 3)]
    layout, _ = packed(tensors)
    assert [place.offset for place in layout.entries] == [0, 256, 256, 512, 1024]
    assert layout.nbytes == 1280
    assert [place.nbytes for place in layout.entries] == [1, 0, 256, 257, 3]
    assert layout_of([("t", tensors[0])], alignment=16).nbytes == 16


def test_no_tensors_need_no_bytes():
    assert layout_of([]).nbytes == 0
    assert layout_of([]).views(torch.empty(0, dtype=torch.uint8)) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(10, 4)[3:7],
        torch.randn(1, 4, 1).expand(1, 4, 1),
    ],
    ids=["transposed", "channels_last", "permuted", "slice", "ones"],
)
def test_a_dense_tensor_keeps_its_strides(tensor):
    _, (view,) = packed([tensor])
    assert view.stride() == tensor.stride()
    assert torch.equal(view, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 1).expand(4, 5),
        torch.randn(8, 8)[:, :3],
        torch.randn(10)[::2],
        torch.randn(4, 5, dtype=torch.complex64).t().conj(),
        torch.randn(6, dtype=torch.complex64).conj().imag,
        torch.randn(20).as_strided((4, 5), (2, 1)),
        torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)[:, :3],
        torch.randn(9, 8, 4).permute(2, 0, 1)[:, ::2],
    ],
    ids=[
        *("expanded", "columns", "steps", "conjugate", "negative", "windows"),
        *("channels_last", "permuted"),
    ],
)
def test_a_tensor_that_does_not_fill_its_memory_does_so_as_its_copy_elsewhere(tensor):
    layout, (view,) = packed([tensor])
    assert view.stride() == tensor.to("cpu", copy=True).stride()
    assert layout.entries[0].nbytes == tensor.numel() * tensor.dtype.itemsize
    assert torch.equal(view, tensor)


def test_tied_tensors_stay_one_memory():
    weight = torch.randn(30, 20)
    layout, (view, tied, transposed) = packed([weight, weight.detach(), weight.t()])
    assert layout.nbytes == 30 * 20 * 4 // 256 * 256 + 256
    view[3, 4] = 7.0
    assert tied[3, 4] == 7.0
    assert transposed[4, 3] == 7.0
    assert all(place.offset == 0 for place in layout.entries)


def test_overlapping_slices_stay_one_memory():
    weight = torch.arange(100.0)
    layout, (left, whole, column, repeated) = packed(
        [weight[10:60], weight[20:], weight[20::2], weight[30:31].expand(6)]
    )
    assert [place.offset for place in layout.entries] == [0, 40, 40, 80]
    whole[10] = -1.0
    assert left[20] == -1.0
    assert column[5] == -1.0
    assert torch.equal(repeated, torch.full((6,), -1.0))
    assert torch.equal(whole[11:], weight[31:])


def test_tensor_and_its_lazy_conjugate_both_keep_their_values():
    tensor = torch.randn(6, dtype=torch.complex64)
    _, views = packed([tensor, tensor.conj()])
    assert torch.equal(views[0], tensor)
    assert torch.equal(views[1], tensor.conj())


def test_slices_that_do_not_overlap_are_laid_out_apart():
    weight = torch.randn(100)
    layout, views = packed([weight[:50], weight[50:]])
    assert [place.offset for place in layout.entries] == [0, 256]
    assert torch.equal(torch.cat(views), weight)


def test_overlapping_views_of_other_element_types_are_viewed_where_they_can_be():
    raw = torch.arange(64, dtype=torch.uint8)
    wide = raw[8:40].view(torch.float64)
    _, (bytes_view, wide_view) = packed([raw[3:20], wide])
    assert torch.equal(bytes_view, raw[3:20])
    assert same_bits(wide_view, wide)
    wide_view.zero_()
    assert torch.equal(bytes_view, torch.tensor([3, 4, 5, 6, 7] + 12 * [0]))


def test_meta_tensors_are_laid_out_as_the_tensors_they_stand_for():
    real = torch.randn(30, 20)
    meta = torch.empty(30, 20, device="meta")
    other = torch.empty(30, 20, device="meta")
    shapes = [("a", meta), ("tied", meta.t()), ("b", other)]
    assert layout_of(shapes) == layout_of(
        [("a", real), ("tied", real.t()), ("b", torch.randn(30, 20))]
    )


def test_views_made_in_inference_mode_are_ordinary_tensors():
    tensor = torch.randn(4, 4)
    with torch.inference_mode():
        layout, (view,) = packed([tensor])
        image_of_inference = new_image(layout)
        other = layout.views(image_of_inference)[0]
    assert not view.is_inference()
    assert not other.is_inference()
    weight = torch.nn.Parameter(view)
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 2.0))


def test_views_and_packing_track_no_gradient():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    _, (view,) = packed([weight])
    assert not view.requires_grad
    assert view.grad_fn is None
    assert not view._is_view()


def test_a_write_to_one_view_does_not_move_the_version_of_another():
    _, (first, second) = packed([torch.randn(4), torch.randn(4)])
    before = second._version
    first.add_(1)
    assert second._version == before


def test_views_follow_an_image_that_lies_inside_a_larger_memory():
    tensor = torch.randn(10)
    layout = layout_of([("t", tensor)])
    memory = torch.zeros(1024, dtype=torch.uint8)
    layout.pack([tensor], memory[512:])
    assert torch.equal(memory[512:552].view(torch.float32), tensor)


@pytest.mark.parametrize(
    "image",
    [
        torch.empty(255, dtype=torch.uint8),
        torch.empty(256, dtype=torch.int8),
        torch.empty(1, 256, dtype=torch.uint8),
        torch.empty(512, dtype=torch.uint8)[::2],
        torch.empty(512, dtype=torch.uint8)[1:],
    ],
    ids=["short", "dtype", "dimensions", "gaps", "odd"],
)
def test_memory_that_cannot_hold_the_layout_is_refused(image):
    layout = layout_of([("t", torch.randn(4))])
    with pytest.raises(StagehandInternalError, match="256 contiguous uint8"):
        layout.views(image)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ([], "0 tensors for a layout of 1"),
        ([torch.randn(5)], r"'t' has torch.float32 \[5\].* torch.float32 \[4\]"),
        ([torch.randn(4).half()], "'t' has torch.float16"),
    ],
)
def test_packing_other_tensors_than_promised_is_refused(tensors, match):
    layout = layout_of([("t", torch.randn(4))])
    with pytest.raises(StagehandInternalError, match=match):
        layout.pack(tensors, new_image(layout))


def test_copying_into_an_expanded_tensor_writes_its_one_element():
    target = torch.zeros(3, 1).expand(3, 4)
    copy_values(target, torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4))
    assert target[:, 0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j).conj(), True),
        (torch.tensor([1j]), torch.tensor([2j]), False),
    ],
)
def test_bits_are_compared_and_not_values(one, other, same):
    assert same_bits(one, other) is same


@pytest.mark.parametrize("start", range(5))
@pytest.mark.parametrize("count", [0, 1, 8, 12])
def test_bits_are_compared_at_any_address_and_length(start, count):
    one = torch.arange(20, dtype=torch.bfloat16)[start : start + count]
    other = one.clone()
    assert same_bits(one, other)
    for index in range(count):
        other[index] *= -1
        assert not same_bits(one, other)
        other[index] *= -1


@st.composite
def tensors_of_few_storages(draw):
    """Return tensors that are permuted, sliced, stepped, expanded and shared."""
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]
    storages = [
        random_bits(torch.uint8, 1024, seed=index)
        for index in range(draw(st.integers(1, 3)))
    ]
    result = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(dtypes))
        base = draw(st.sampled_from(storages)).view(dtype)
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        kind = draw(st.sampled_from(["dense", "strided", "expanded"]))
        stride = contiguous_stride(shape)
        if kind == "strided":
            stride = tuple(draw(st.integers(1, 9)) for _ in shape)
        start = draw(st.integers(0, base.numel() // 2))
        last = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
        if start + last >= base.numel():
            start, shape, stride = 0, [1], (1,)
        tensor = base.as_strided(shape, stride, start)
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if kind == "expanded":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
        result.append(tensor)
    return result


def byte_set(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of a tensor's bytes."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    size = tensor.dtype.itemsize
    starts = (tensor.data_ptr() + offsets.flatten() * size).tolist()
    return {start + byte for start in starts for byte in range(size)}


@settings(max_examples=150, deadline=None)
@given(tensors_of_few_storages())
def test_any_tensors_keep_their_bits_and_share_memory_only_as_before(tensors):
    layout, views = packed(tensors)
    assert layout.nbytes % 256 == 0
    for place, view, tensor in zip(layout.entries, views, tensors, strict=True):
        assert same_bits(view, tensor)
        assert place.offset + place.nbytes <= layout.nbytes
        assert place.is_contiguous == view.is_contiguous()
    for (one, view), (other, its_view) in combinations(
        zip(tensors, views, strict=True), 2
    ):
        shared = bool(byte_set(one) & byte_set(other))
        assert bool(byte_set(view) & byte_set(its_view)) == shared
        if shared:
            distance = one.data_ptr() - other.data_ptr()
            assert view.data_ptr() - its_view.data_ptr() == distance
    for place in layout.entries:
        overlapping = [
            other
            for other in layout.entries
            if place.offset < other.offset + other.nbytes
            and other.offset < place.offset + place.nbytes
        ]
        assert len(overlapping) > 1 or place.offset % 256 == 0
