"""A model larger than its memory budget runs on a CPU, straight from its files."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

_BLOCKS = 40
_WIDTH = 1024  # 4 MiB a block, 160 MiB in all

_SCRIPT = """
import json, sys
import torch
from safetensors.torch import save_file
from torch import nn

import stagehand

BLOCKS, WIDTH, path = {blocks}, {width}, sys.argv[1]


def resident():
    # Anonymous memory: what the program holds, not the page cache. Page by page:
    # RssAnon is an estimate, off by megabytes where there are many cores.
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)
        )

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            peaks.append(resident())
        return x


peaks = []
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2, WIDTH)
expected = x
for number in range(BLOCKS):  # a file for each, so that the whole is never in memory
    weight = torch.randn(WIDTH, WIDTH) * 0.05
    named = {{f"blocks.{{number}}.weight": weight}}
    save_file(named, f"{{path}}/{{number:02}}.safetensors")
    with torch.no_grad():
        expected = torch.tanh(nn.functional.linear(expected, weight))
del weight
with torch.device("meta"):
    model = Stack()
stagehand.layer(model, vram_budget="64MB", ram_budget="16MB", device="cpu")
runtime = model._stagehand_layer_runtime
runtime.convert_registry_to_file_backed_sharded(path)
before = resident()
with torch.no_grad():
    same = all(torch.equal(model(x), expected) for _ in range(3))
report = runtime.report()
runtime.shutdown()
print(json.dumps({{
    "same": same,
    "grown": max(peaks) - before,
    "budget": report.budget_bytes,
    "disk": report.disk_bytes,
    "limit": report.limit,
}}))
"""


def test_a_model_ten_times_its_memory_budget_streams_from_disk_on_a_cpu(
    tmp_path: Path,
) -> None:
    script = textwrap.dedent(_SCRIPT).format(blocks=_BLOCKS, width=_WIDTH)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)],
        # Else what is freed in pieces of this size does not go back to the system.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    weights = _BLOCKS * _WIDTH * _WIDTH * 4
    assert found["same"]
    assert found["budget"] == 16_000_000, "on a CPU there is one memory"
    assert found["grown"] < 16_000_000 + 8_000_000, "held more than the budget"
    assert found["disk"] >= 2.5 * weights


# A model of 6 GB in less than 2 GB, all memory of the process counted.

_LARGE = """
import json, sys
import torch
from torch import nn

import stagehand
from stagehand.stores import files

files._CACHE_SHARE = 0.0  # as on a machine that has no memory to cache the file

DEPTH, WIDTH, path = {depth}, {width}, sys.argv[1]


def memory(kind):
    # As the system counts it: mapped pages of files, too, and the most there ever was.
    for line in open("/proc/self/status"):
        if line.startswith(kind):
            return int(line.split()[1]) * 1024


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


torch.set_num_threads(1)
x = torch.arange(1.0, WIDTH + 1).reshape(1, WIDTH) / WIDTH
expected = x.clone()
for number in range(DEPTH):  # each weight has one value, in row and column `number`
    y = torch.zeros(1, WIDTH)
    y[0, number] = 0.5 * expected[0, number + 1]
    expected = expected + y
torch.nn.functional.linear(x, torch.eye(WIDTH))
before = memory("VmRSS")
options = dict(vram_budget="1GB", ram_budget={ram}, device="cpu")
model = stagehand.load(Stack, path, **options)
with torch.no_grad():
    same = torch.equal(model(x), expected)
report = model._stagehand_layer_runtime.report()
model._stagehand_layer_runtime.shutdown()
print(json.dumps({{
    "same": same,
    "grown": memory("VmHWM") - before,
    "peak": memory("VmHWM"),
    "disk": report.disk_bytes,
    "weights": report.weight_bytes,
}}))
"""


def _sparse_checkpoint(path: Path, depth: int, width: int) -> None:
    """Write a file of `depth` square weights that are zero but for one value each."""
    nbytes = 4 * width * width
    header = {
        f"blocks.{number}.weight": {
            "dtype": "F32",
            "shape": [width, width],
            "data_offsets": [number * nbytes, (number + 1) * nbytes],
        }
        for number in range(depth)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number in range(depth):
            file.seek(start + number * nbytes + 4 * (number * width + number + 1))
            file.write(struct.pack("<f", 0.5))
        file.truncate(start + depth * nbytes)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_model_of_6_gb_runs_in_less_than_2_gb_of_memory(tmp_path: Path) -> None:
    depth, width, ram = 96, 4096, 1_000_000_000
    _sparse_checkpoint(tmp_path / "model.safetensors", depth, width)
    script = textwrap.dedent(_LARGE).format(depth=depth, width=width, ram=ram)
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        watched = psutil.Process(child.pid)
        while child.poll() is None:  # were it to fail, it would take all memory
            with contextlib.suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
                if watched.memory_info().rss > 2_000_000_000:
                    child.kill()
                child.wait(0.05)
        output, errors = child.communicate()
    assert child.returncode == 0, errors or "it took more than 2 GB and was ended"
    found = json.loads(output)
    assert found["same"]
    assert found["weights"] > 6_000_000_000
    assert found["disk"] >= found["weights"] - ram
    assert found["peak"] < 2_000_000_000
    assert found["grown"] < ram + 64_000_000, "held more than the budget"
