"""Every element type that safetensors names: streamed bit for bit, or refused by name.

The names are asked of the installed safetensors, so that a new one is noticed.
"""

import json
import re
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import stagehand
from scenario.small import blocks_of, runtime_of
from stagehand import LayerStreamer
from stagehand.errors import CheckpointError, ConfigError, TensorMismatchError
from stagehand.residency import finding
from stagehand.stores.checkpoint import Checkpoint
from stagehand.stores.converting import convert_to_packed, convert_to_squareq
from stagehand.stores.headers import Span

UNKNOWN_TO_TORCH = {"F6_E2M3", "F6_E3M2"}
TWO_IN_ONE = "F4"
SIZE = 64
NAMES = ["0.w", "1.w", "2.w"]


def write(path: Path, code: str, names: list[str], nbytes: int) -> bytes:
    """Write tensors of many bit patterns; return the bytes of each."""
    raw = bytes(i % (2 if code == "BOOL" else 251) for i in range(nbytes))
    header = {
        name: {
            "dtype": code,
            "shape": [SIZE, SIZE],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw * len(names))
    return raw


def known_codes() -> list[str]:
    """What the library says that it expects instead of a name that there is not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        write(path, "F7", ["a"], 1)
        with pytest.raises(SafetensorError) as caught, safe_open(path, "pt"):
            pass
    return re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2])


CODES = known_codes()
codes = pytest.mark.parametrize("code", CODES)


def dtype_of(code: str) -> torch.dtype | None:
    return Span(name="", code=code, sizes=(2,), start=0, end=0).dtype


def nbytes_of(code: str) -> int:
    if code in UNKNOWN_TO_TORCH:
        return SIZE * SIZE * 6 // 8
    columns = SIZE // 2 if code == TWO_IN_ONE else SIZE
    return SIZE * columns * dtype_of(code).itemsize


class Holder(nn.Module):
    """Says what the bytes of its weight are where it computes."""

    def __init__(self, dtype: torch.dtype, nbytes: int) -> None:
        super().__init__()
        values = torch.zeros(nbytes, dtype=torch.uint8).view(SIZE, -1).view(dtype)
        self.w = nn.Parameter(values, requires_grad=False)

    def forward(self, seen: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*seen, bytes_of(self.w)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def net(code: str) -> nn.Module:
    dtype = dtype_of(code) or torch.uint8
    return nn.Sequential(*(Holder(dtype, nbytes_of(code)) for _ in NAMES))


def load(
    code: str, folder: Path, place: str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    nbytes = 0 if dtype is None else SIZE * SIZE * dtype.itemsize
    return stagehand.load(
        lambda: net(code),
        folder,
        vram_budget=2 * max(nbytes_of(code), nbytes),
        device=place,
        dtype=dtype,
    )


@pytest.fixture(autouse=True)
def _toy_blocks(monkeypatch):
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)
    monkeypatch.setattr(finding, "_COPY_EFFICIENT_BYTES", 0)


def test_all_names_of_the_format_are_here():
    assert {"BF16", "F8_E8M0", "C64", TWO_IN_ONE} <= set(CODES)
    assert {code for code in CODES if dtype_of(code) is None} == UNKNOWN_TO_TORCH


@pytest.mark.parametrize("place", ["hpu", "cpu"])
@codes
def test_weight_of_every_element_type_streams_bit_for_bit(sim, tmp_path, code, place):
    raw = write(tmp_path / "a.safetensors", code, NAMES, nbytes_of(code))
    if code in UNKNOWN_TO_TORCH:
        with pytest.raises(
            TensorMismatchError, match=f"'0.w' in .* is {code}.*convert"
        ):
            load(code, tmp_path, place)
        return
    model = load(code, tmp_path, place)
    assert len(blocks_of(model)) == len(NAMES)
    for _ in range(2):
        assert [bytes(w.tolist()) for w in model([])] == [raw] * len(NAMES)
    assert model[0].w.dtype == dtype_of(code)
    runtime_of(model).shutdown()
    assert bytes(bytes_of(model[0].w).tolist()) == raw


@codes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cast_of_every_element_type_is_torchs_or_refused(sim, tmp_path, code, dtype):
    raw = bytearray(write(tmp_path / "a.safetensors", code, NAMES, nbytes_of(code)))
    if dtype_of(code) is None or code == TWO_IN_ONE:
        with pytest.raises(TensorMismatchError, match=r"'0.w' .* expected .* type"):
            load(code, tmp_path, dtype=dtype)
        return
    model = load(code, tmp_path, dtype=dtype)
    expected = torch.frombuffer(raw, dtype=dtype_of(code))
    if expected.is_floating_point():
        expected = expected.to(dtype)
    assert model[0].w.dtype == expected.dtype
    assert torch.equal(model([])[0], bytes_of(expected))
    runtime_of(model).shutdown()


def test_model_with_weights_that_cannot_be_cast_is_left_alone():
    model = net(TWO_IN_ONE)
    with pytest.raises(ConfigError, match=r"'0\.w' is .*float4.* dtype is torch.bfl"):
        stagehand.layer(model, vram_budget="1MB", device="cpu", dtype=torch.bfloat16)
    assert model[0].w.dtype == dtype_of(TWO_IN_ONE)


@codes
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_layer_of_every_element_type_is_handed_out_or_refused(
    sim, tmp_path, code, dtype
):
    names = [f"layers.{i}.w" for i in range(3)]
    raw = bytearray(write(tmp_path / "a.safetensors", code, names, nbytes_of(code)))
    if dtype_of(code) is None or (code == TWO_IN_ONE and dtype is not None):
        with pytest.raises(TensorMismatchError, match=r"'layers\.0\.w' .* expected"):
            LayerStreamer.from_pretrained(tmp_path, dtype=dtype, device="hpu")
        return
    expected = torch.frombuffer(raw, dtype=dtype_of(code))
    if expected.is_floating_point() and dtype is not None:
        expected = expected.to(dtype)
    with LayerStreamer.from_pretrained(tmp_path, dtype=dtype, device="hpu") as streamer:
        seen = streamer.run_pass(
            [], lambda x, weights, layer: [*x, bytes_of(weights["w"])]
        )
    assert len(seen) == 3
    assert all(torch.equal(found, bytes_of(expected)) for found in seen)


@codes
@pytest.mark.parametrize("convert", [convert_to_packed, convert_to_squareq])
def test_what_is_not_converted_is_kept_bit_for_bit(tmp_path, code, convert):
    path = tmp_path / "a.safetensors"
    raw = write(path, code, ["norm.weight", "w.weight"], nbytes_of(code))
    dtype = dtype_of(code)
    refusal = "nothing to quantize"
    if dtype is None:
        refusal = f"'norm.weight' in .* is {code}"
    elif convert is convert_to_packed:
        refusal = ""
    elif dtype.is_floating_point and dtype.itemsize > 1:
        finite = torch.frombuffer(bytearray(raw), dtype=dtype).float().isfinite().all()
        refusal = "" if finite else "expected finite weights"
    if refusal:
        with pytest.raises(CheckpointError, match=refusal):
            convert(path, tmp_path / "target")
        return
    written = convert(path, tmp_path / "target")
    if code == "BF16" and convert is convert_to_packed:
        return
    extent = Checkpoint.open(written.path)["norm.weight"]
    assert (extent.dtype, extent.shape[0]) == (dtype, SIZE)
    content = written.path.read_bytes()
    assert content[extent.offset : extent.offset + extent.nbytes] == raw
    with safe_open(written.path, "pt") as file:
        assert "norm.weight" in file.keys()  # noqa: SIM118
