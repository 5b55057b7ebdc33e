"""SquareQ: what is quantized how, which files are believed, and exact decoders."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from equality import all_equal
from stagehand.core.layout import layout_of, same_bits
from stagehand.errors import (
    CheckpointError,
    ManifestError,
    ReadError,
    StagehandInternalError,
    TruncatedShardError,
)
from stagehand.stores import dequantizing
from stagehand.stores.converting import convert_to_squareq, quantize
from stagehand.stores.dequantizing import dequantize_image
from stagehand.stores.squareq import SquareQ
from stagehand.stores.squareq_layout import Rows, dequantized, quantized_layout_of
from stagehand.stores.squareq_manifest import signature_of

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensors():
    """Two linear layers, one with a bias, a norm and an embedding."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator(sum(shape))).bfloat16()

    return {
        "embed.weight": normal(20, 48),
        "norm.weight": normal(48),
        "layers.0.up.weight": normal(70, 48),
        "layers.0.up.bias": normal(70),
        "layers.0.down.weight": normal(48, 70),
    }


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source" / "model.safetensors"
    path.parent.mkdir()
    save_file(tensors(), path)
    return path


@pytest.fixture
def target(source, tmp_path):
    convert_to_squareq(source, tmp_path / "target")
    return tmp_path / "target" / "model.safetensors"


# ---------------------------------------------------------------------------- quantizer


def reference_quantizer(weight):
    """Row by row, as the format is described."""
    codes, scales = [], []
    for row in weight.float():
        scale = max((row.abs().max() / 127).item(), 1e-8)
        scale = torch.tensor(scale, dtype=torch.float32)
        codes.append((row / scale).round().clamp(-127, 127).to(torch.int8))
        scales.append(scale)
    return torch.stack(codes), torch.stack(scales)


def test_rows_are_quantized_as_the_format_says():
    weight = tensors()["layers.0.up.weight"]
    codes, scales = quantize(weight, "it", Path("file"))
    expected, expected_scales = reference_quantizer(weight)
    assert codes.shape == (70, 64)
    assert torch.equal(codes[:, :48], expected)
    assert not codes[:, 48:].any()
    assert torch.equal(scales, expected_scales)


def test_quantized_weight_is_within_half_a_step():
    weight = tensors()["layers.0.up.weight"]
    codes, scales = quantize(weight, "it", Path("file"))
    zeros = torch.zeros_like(scales)
    found = dequantized(codes, scales, zeros, columns=48, dtype=torch.float32)
    assert ((found - weight.float()).abs() <= 0.5001 * scales[:, None]).all()


def test_row_of_zeros_stays_zeros():
    codes, scales = quantize(torch.zeros(3, 64), "it", Path("file"))
    assert not codes.any()
    assert (scales == 1e-8).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weight = torch.ones(4, 64)
    weight[2, 5] = value
    with pytest.raises(CheckpointError, match=r"'it' in file .* finite .* in row 2"):
        quantize(weight, "it", Path("file"))


def test_rows_of_a_weight_of_many_pieces_are_quantized_alike():
    weight = torch.randn(5000, 64, generator=generator())
    before = weight.clone()
    codes, scales = quantize(weight, "it", Path("file"))
    assert torch.equal(weight, before)  # float32 is not worked on in place
    for at in (0, 2047, 2048, 4999):
        mine, scale = quantize(weight[at : at + 1], "it", Path("file"))
        assert torch.equal(codes[at : at + 1], mine)
        assert torch.equal(scales[at : at + 1], scale)
    weight[4321, 5] = torch.nan
    with pytest.raises(CheckpointError, match="found nan in row 4321"):
        quantize(weight, "it", Path("file"))


# ----------------------------------------------------------------------------- decoders


def block(dtypes, sizes, seed=0):
    """A block's layout with weights of these types, a norm between, and its wire."""
    made = []
    for dtype, (count, columns) in zip(dtypes, sizes, strict=True):
        made.append(torch.zeros(count, columns, dtype=dtype))
        made.append(torch.randn(5, generator=generator(seed)))
    layout = layout_of([(str(i), t) for i, t in enumerate(made)])
    rows = [
        Rows(count=t.shape[0], columns=t.shape[1], padded=-(-t.shape[1] // 64) * 64)
        if t.dim() == 2
        else None
        for t in made
    ]
    form = quantized_layout_of(layout, rows)
    wire = torch.zeros(form.nbytes, dtype=torch.uint8)
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(expected)
    for place in form.quantized:
        scales, zeros, codes = place.parts(wire)
        scales.copy_(torch.rand(scales.shape, generator=generator(seed + 1)) + 1e-3)
        zeros.copy_(torch.randint(-3, 4, zeros.shape, generator=generator(seed + 2)))
        bits = torch.randint(-128, 128, codes.shape, generator=generator(seed + 3))
        codes.copy_(bits)
        index = [entry.offset for entry in layout.entries].index(place.offset)
        columns = place.rows.columns
        exact = dequantized(codes, scales, zeros, columns=columns, dtype=place.dtype)
        views[index].copy_(exact)
    for view, tensor in zip(views, made, strict=True):
        if tensor.dim() == 1:
            view.copy_(tensor)
    for run in form.raw:
        wire[run.source :][: run.nbytes] = expected[run.offset :][: run.nbytes]
    return form, wire, expected


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 150)), max_size=3),
    seed=st.integers(0, 1000),
    share=st.integers(1, 50),
)
def test_operators_give_the_reference_bits(sizes, seed, share):
    dtypes = [TYPES[(seed + i) % len(TYPES)] for i in range(len(sizes))]
    form, wire, expected = block(dtypes, sizes, seed)
    row = 4 * max((columns for _, columns in sizes), default=1)
    scratch = torch.empty(row * share, dtype=torch.uint8)
    image = torch.zeros_like(expected)
    dequantize_image(wire, form, image, scratch=scratch)
    assert same_bits(image, expected)


_INTERPRETED = """
import torch
from stagehand.core.layout import same_bits
from stagehand.stores import dequantizing, squareq_triton
from unit.test_squareq import TYPES, block
dequantizing.decoder_of = lambda device_type: squareq_triton.decode
for seed, sizes in enumerate(
    ([(1, 1), (3, 2)], [(5, 63), (4, 64), (3, 65)], [(2, 1500)], [(7, 1024)])
):
    for shift in range(4):
        dtypes = [TYPES[(shift + i) % 4] for i in range(len(sizes))]
        form, wire, expected = block(dtypes, sizes, seed)
        image = torch.zeros_like(expected)
        dequantizing.dequantize_image(wire, form, image, scratch=None)
        assert same_bits(image, expected), (sizes, dtypes)
"""


def test_kernel_gives_the_reference_bits():
    """In a process of its own: it is decided at import how kernels run."""
    pytest.importorskip("triton", reason="no Triton")
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PATH": "",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", [75, 90])
def test_kernel_compiles_for_a_gpu_and_rounds_after_each_step(
    arch, monkeypatch, tmp_path
):
    # What the interpreter accepts, the compiler may not: no GPU is needed to ask it.
    triton = pytest.importorskip("triton", reason="no Triton")
    from triton.backends.compiler import GPUTarget

    from stagehand.stores import squareq_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for element in kernels._TYPES.values():
        signature = {
            **dict.fromkeys(["scales", "zeros"], "*fp32"),
            **dict.fromkeys(["columns", "padded"], "i32"),
            **dict.fromkeys(["dtype", "tile"], "constexpr"),
            "codes": "*i8",
            "target": f"*{element.name.replace('int', 'i')}",
        }
        source = triton.compiler.ASTSource(
            fn=kernels._decode_rows,
            signature=signature,
            constexprs={"dtype": element, "tile": kernels._TILE},
        )
        target = GPUTarget("cuda", arch, 32)
        compiled = triton.compile(source, target=target, options=kernels.EXACT)
        assembly = compiled.asm["ptx"]
        assert "mul.f32" in assembly or "mul.rn.f32" in assembly
        assert not any(found in assembly for found in ("fma.", ".ftz", "approx"))


def test_scratch_memory_without_room_for_a_row_is_a_bug_that_is_named():
    form, wire, expected = block([torch.bfloat16], [(4, 100)])
    for scratch in (None, torch.empty(399, dtype=torch.uint8)):
        with pytest.raises(StagehandInternalError, match="a row of 100 weights of '0'"):
            dequantize_image(wire, form, torch.zeros_like(expected), scratch=scratch)


def test_scratch_memory_is_an_eighth_but_a_row_at_least():
    form, *_ = block([torch.bfloat16, torch.float32], [(64, 128), (1, 5000)])
    assert dequantizing.scratch_nbytes(form, "hpu") == 4 * 5000
    form, *_ = block([torch.bfloat16], [(64, 128)])
    assert dequantizing.scratch_nbytes(form, "hpu") == 4 * 64 * 128 // 8


# --------------------------------------------------------------------------- version 2


def test_converted_file_and_manifest_are_what_the_format_says(target):
    held = load_file(target)
    document = json.loads(target.with_name("model.manifest.json").read_text())
    codes, scales = reference_quantizer(tensors()["layers.0.down.weight"])
    assert torch.equal(held["layers.0.down.qweight"][:, :70], codes)
    assert held["layers.0.down.qweight"].shape == (48, 128)
    assert torch.equal(held["layers.0.down.scale"], scales)
    assert torch.equal(held["layers.0.down.zero_point"], torch.zeros(48))
    assert held["layers.0.up.bias"].dtype == torch.float32
    assert torch.equal(held["layers.0.up.bias"], tensors()["layers.0.up.bias"].float())
    for name in ("embed.weight", "norm.weight"):
        assert same_bits(held[name], tensors()[name])
    assert document["quant_version"] == "squareq_bp8_v2"
    assert document["layer_count"] == 2
    assert document["total_qweight_bytes"] == 70 * 64 + 48 * 128
    assert document["model_signature"] == signature_of(
        [("layers.0.up", 48, 70, True), ("layers.0.down", 70, 48, False)]
    )
    first = document["layers"][0]
    assert first["canonical_name"] == "layers.0.down"
    assert first["orig_shape"] == [48, 70]
    assert first["packed_shape"] == [48, 128]
    assert first["bias_key"] is None


def test_converted_file_is_read_back(target):
    slab = SquareQ.open(target.parent)
    assert set(slab.layers) == {"layers.0.up", "layers.0.down"}
    layer = slab.layers["layers.0.up"]
    codes = layer.codes_of(slab.files)
    expected = quantize(tensors()["layers.0.up.weight"], "it", target)
    assert torch.equal(codes, expected[0])
    assert torch.equal(layer.scales, expected[1])
    assert layer.dtype == torch.bfloat16
    slab.files.close()


def opened(target):
    """Open weights as for a model of which nothing is known."""
    slab = SquareQ.open(target)
    slab.files.close()
    slab.manifest.check_signature()


DELETE = object()
# A path in the manifest, a bad value, and what the error must say besides the file.
BAD = {
    "no version": (("quant_version",), DELETE, "quant_version .* found none"),
    "version": (
        ("quant_version",),
        "squareq_v3",
        "'squareq_bp8_v2', found 'squareq_v3'",
    ),
    "abi": (("kernel_abi_version",), 2, "kernel_abi_version .* 1 to 1, found 2"),
    "abi as text": (("kernel_abi_version",), "1", "of type int, found '1'"),
    "runtime": (("min_runtime_version",), "9.0", "at most 0.1.0, found '9.0'"),
    "runtime text": (("min_runtime_version",), "new", "min_runtime_version"),
    "no layers": (("layers",), [], "at least one, found none"),
    "layers no list": (("layers",), {}, "layers .* of type list"),
    "count": (("layer_count",), 3, "layer_count .* expected 2, found 3"),
    "bytes": (("total_qweight_bytes",), 5, "total_qweight_bytes .* found 5"),
    "signature": (("model_signature",), "0" * 16, "model_signature .* '0000"),
    "bits": (("layers", 0, "quant_bits"), 4, "quant_bits of layer .* 8, found 4"),
    "scheme": (("layers", 0, "quant_scheme"), "x", "quant_scheme .* found 'x'"),
    "axis": (("layers", 0, "quant_axis"), 1, "quant_axis .* expected 0, found 1"),
    "type": (("layers", 0, "dtype_scale"), "float16", "dtype_scale .* 'float16'"),
    "no key": (
        ("layers", 0, "scale_key"),
        DELETE,
        "scale_key of layer 'layers.0.down'",
    ),
    "wrong key": (
        ("layers", 0, "scale_key"),
        "layers.0.down.scales",
        "'layers.0.down.scales' .* found none, nearest 'layers.0.down.scale'",
    ),
    "other key": (
        ("layers", 0, "scale_key"),
        "layers.0.up.scale",
        r"float32 \[48\], found torch.float32 \[70\]",
    ),
    "codes of floats": (
        ("layers", 0, "qweight_key"),
        "layers.0.up.scale",
        r"int8 \[48, 128\], found torch.float32",
    ),
    "shape": (("layers", 0, "orig_shape"), [48, 200], "packed_shape .* 200"),
    "shape of one": (("layers", 0, "orig_shape"), [48], "orig_shape"),
    "no shape": (("layers", 0, "orig_shape"), [0, 70], "orig_shape .* above 0"),
    "shape of fractions": (("layers", 0, "orig_shape"), [48.0, 70], r"found \[48\.0"),
    "pad": (("layers", 0, "pad_k"), 0, "packed_shape"),
    "bias": (("layers", 0, "bias_key"), "no.bias", "'no.bias'"),
    "bias no name": (("layers", 0, "bias_key"), 7, "bias_key .* found 7"),
    "type before": (("layers", 0, "dtype_original"), "int8", "dtype_original"),
    "no type before": (("layers", 0, "dtype_original"), "Linear", "found 'Linear'"),
    "a type of numbers": (("layers", 0, "dtype_original"), 16, "dtype_original .*16"),
    "layer no object": (("layers", 0), 5, "layer 0 .* found 5"),
    "no name": (("layers", 0, "canonical_name"), DELETE, "canonical_name"),
}


@pytest.mark.parametrize("name", BAD)
def test_manifest_that_does_not_fit_is_refused(target, name):
    path, value, match = BAD[name]
    file = target.with_name("model.manifest.json")
    document = json.loads(file.read_text())
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is DELETE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=match) as caught:
        opened(target)
    assert str(file) in str(caught.value)
    assert "; " in str(caught.value)  # what to do


def test_layer_that_is_listed_twice_is_refused(target):
    file = target.with_name("model.manifest.json")
    document = json.loads(file.read_text())
    document["layers"].append(document["layers"][0])
    document["layer_count"] = 3
    file.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"'layers.0.down' .* one of it, found 2"):
        SquareQ.open(target)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"layers": NaN}', '{"a":1,"a":2}']
)
def test_manifest_that_is_none_is_refused(target, text):
    target.with_name("model.manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=r"model\.manifest\.json"):
        SquareQ.open(target)


def test_missing_manifest_is_an_error_that_names_it(target):
    target.with_name("model.manifest.json").unlink()
    with pytest.raises(ReadError, match=r"model\.manifest\.json cannot be read"):
        SquareQ.open(target)
    with pytest.raises(ManifestError, match=r"expected one \*\.manifest\.json"):
        SquareQ.open(target.parent)


def test_two_manifests_in_a_folder_are_refused(target):
    first = target.with_name("model.manifest.json")
    target.with_name("other.manifest.json").write_text(first.read_text())
    with pytest.raises(ManifestError, match="found 2"):
        SquareQ.open(target.parent)


def test_manifest_may_lie_elsewhere(target, tmp_path):
    elsewhere = tmp_path / "other.json"
    target.with_name("model.manifest.json").rename(elsewhere)
    slab = SquareQ.open(target, elsewhere)
    assert len(slab.layers) == 2
    slab.files.close()


def test_signature_with_numbers_for_words_is_known(target):
    """Whether there is a bias may have been written as 0 and 1."""
    file = target.with_name("model.manifest.json")
    document = json.loads(file.read_text())
    document["model_signature"] = signature_of(
        [("layers.0.up", 48, 70, 1), ("layers.0.down", 70, 48, 0)]
    )
    file.write_text(json.dumps(document))
    slab = SquareQ.open(target)
    slab.manifest.check_signature()
    slab.files.close()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("scale", value) for value in (torch.nan, torch.inf, 0.0, -1.0)),
        *(("zero_point", value) for value in (torch.nan, torch.inf)),
    ],
)
def test_scales_and_zero_points_that_make_no_weights_are_refused(target, part, value):
    held = load_file(target)
    held[f"layers.0.up.{part}"][3] = value
    save_file(held, target)
    with pytest.raises(ManifestError, match=r"of layer 'layers.0.up'.*in row 3") as it:
        SquareQ.open(target)
    assert str(target) in str(it.value)


def test_scales_that_go_with_every_load_are_not_read_from_the_file_again(target):
    """A thread that reads a mapping of a file that shrinks ends the process."""
    layer = SquareQ.open(target).layers["layers.0.up"]
    held = layer.scales, layer.zeros, layer.bias
    before = [tensor.clone() for tensor in held]
    with target.open("r+b") as file:
        file.write(bytes(target.stat().st_size))
    assert all_equal(held, before)


def test_truncated_file_is_refused(target):
    target.write_bytes(target.read_bytes()[:-1])
    with pytest.raises(TruncatedShardError):
        SquareQ.open(target)


# --------------------------------------------------------------------------- version 1


def payload(zero="zero_point"):
    layers, listed = {}, []
    for name, like in tensors().items():
        if like.dim() != 2 or name == "embed.weight":
            continue
        layer = name.removesuffix(".weight")
        codes, scales = quantize(like, name, Path("file"))
        bias = tensors().get(f"{layer}.bias")
        layers[layer] = {
            "qweight": codes,
            "scale": scales,
            zero: torch.ones_like(scales),
        }
        if bias is not None:
            layers[layer]["bias"] = bias.float()
        listed.append(
            {
                "name": layer,
                "out": like.shape[0],
                "inp": like.shape[1],
                "padded_in": codes.shape[1],
                "has_bias": bias is not None,
            }
        )
    manifest = {
        "model_name": "it",
        "quant_version": "squareq_bp8_v1",
        "layout": "rowwise_sym_int8",
        "pack_k": 64,
        "layers": listed,
    }
    return {"manifest": manifest, "layers": layers}


@pytest.mark.parametrize("suffix", [".fpk", ".slab"])
@pytest.mark.parametrize("zero", ["zero_point", "zero"])
def test_first_version_is_read_under_both_names_of_zero_points(tmp_path, suffix, zero):
    path = tmp_path / f"it{suffix}"
    torch.save(payload(zero), path)
    slab = SquareQ.open(path)
    layer = slab.layers["layers.0.up"]
    assert (layer.rows.count, layer.rows.columns, layer.rows.padded) == (70, 48, 64)
    assert (layer.zeros == 1).all()
    assert layer.bias is not None
    assert slab.manifest is None
    slab.files.close()


def _drop(key):
    def change(made):
        del made["layers"]["layers.0.up"][key]

    return change


def _put(key, value):
    def change(made):
        made["layers"]["layers.0.up"][key] = value

    return change


def _say(key, value):
    def change(made):
        made["manifest"][key] = value

    return change


def _layer_says(key, value):
    def change(made):
        made["manifest"]["layers"][0][key] = value

    return change


BAD_V1 = {
    "version": (_say("quant_version", "bp4"), "quant_version .* found 'bp4'"),
    "layout": (_say("layout", "columns"), "layout .* found 'columns'"),
    "no layers": (_say("layers", None), "'layers' of the manifest"),
    "no codes": (_drop("qweight"), "'qweight' of layer 'layers.0.up'.* found none"),
    "no scale": (_drop("scale"), "'scale' of layer 'layers.0.up'.* found none"),
    "no zeros": (_drop("zero_point"), "'zero' of layer 'layers.0.up'.* found none"),
    "no bias": (_drop("bias"), "'bias' of layer 'layers.0.up'.* found none"),
    "codes": (_put("qweight", torch.zeros(70, 63, dtype=torch.int8)), r"\[70, 64\]"),
    "codes of 16 bits": (
        _put("qweight", torch.zeros(70, 64, dtype=torch.int16)),
        r"expected torch.int8 \[70, 64\], found torch.int16",
    ),
    "scales": (_put("scale", torch.full((70,), torch.nan)), "above 0, found nan"),
    "size": (_layer_says("out", 0), "above 0"),
    "a fraction": (_layer_says("inp", 48.0), r"numbers above 0, found .*48\.0"),
    "a truth": (_layer_says("inp", True), "numbers above 0, found .*True"),
    "no layer": (lambda made: made["manifest"]["layers"].append(5), "with a name"),
    "twice": (
        lambda made: made["manifest"]["layers"].append(made["manifest"]["layers"][0]),
        "expected the 2 that the file holds, found 3, one of them twice",
    ),
    "padding": (_layer_says("padded_in", 10), "padded_in .* 48 or more, found 10"),
    "name": (_layer_says("name", "layers.9.up"), "'layers.9.up' .* found none"),
    "no name": (_layer_says("name", 5), "a dictionary with a name"),
    "extra": (lambda made: made["layers"].update(more={}), "layers of the manifest"),
}


@pytest.mark.parametrize("name", BAD_V1)
def test_first_version_that_does_not_fit_is_refused(tmp_path, name):
    change, match = BAD_V1[name]
    made = payload()
    change(made)
    path = tmp_path / "it.fpk"
    torch.save(made, path)
    with pytest.raises(ManifestError, match=match) as caught:
        SquareQ.open(path)
    assert str(path) in str(caught.value)


def test_first_version_whose_codes_lie_in_columns_is_refused(tmp_path):
    made, path = payload(), tmp_path / "it.fpk"
    held = made["layers"]["layers.0.up"]
    held["qweight"] = held["qweight"].t().contiguous().t()
    torch.save(made, path)
    with pytest.raises(
        CheckpointError, match=r"'layers\.0\.up\.qweight' .*rows that follow each other"
    ) as caught:
        SquareQ.open(path)
    assert str(path) in str(caught.value)


class Evil:
    """What unpickling runs, if it may."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_first_version_runs_no_code(tmp_path):
    path = tmp_path / "it.fpk"
    torch.save({"manifest": Evil(tmp_path / "mark")}, path)
    with pytest.raises(CheckpointError, match=r"no other objects.* Unsupported global"):
        SquareQ.open(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("version", [1, 2])
def test_codes_of_a_file_that_shrank_are_an_error_that_names_them(
    target, tmp_path, version
):
    """Read from a mapping they would end the process."""
    path = target
    if version == 1:
        path = tmp_path / "it.slab"
        torch.save(payload(), path)
    slab = SquareQ.open(path)
    layer = slab.layers["layers.0.up"]
    assert torch.equal(layer.codes_of(slab.files), payload_codes("layers.0.up"))
    os.truncate(path, layer.codes.offset + 100)
    message = f"'layers.0.up.qweight' in {path} is truncated: expected 4480 bytes, "
    with pytest.raises(TruncatedShardError, match=f"{re.escape(message)}found 100;"):
        layer.codes_of(slab.files)
    slab.files.close()


def payload_codes(layer):
    return payload()["layers"][layer]["qweight"]


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_first_version_that_is_cut_off_is_refused(tmp_path, keep):
    path = tmp_path / "it.slab"
    torch.save(payload(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=str(path)):
        SquareQ.open(path)


def test_first_version_of_another_content_is_refused(tmp_path):
    path = tmp_path / "it.slab"
    torch.save([1, 2], path)
    with pytest.raises(ManifestError, match="a dictionary, found list"):
        SquareQ.open(path)
    with pytest.raises(ReadError, match="cannot be read"):
        SquareQ.open(tmp_path / "none.fpk")
