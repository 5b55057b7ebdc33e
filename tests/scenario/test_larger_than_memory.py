"""A model larger than its memory budget runs on a CPU, straight from its files."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

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
    # Anonymous memory: what the program holds, not the page cache.
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
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
