"""Which cells there are: models, in the memory of cards that people have."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from benchmarks.gpu.cells import LEAST, Cell
from benchmarks.gpu.ways.every import WAYS, ways_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["SHORT", "all_cells", "dry", "pick"]

_INFERENCE = {
    "ltx-2": ("24GiB", "8GiB", "6GiB", "4GiB"),
    "ltx-2-long": ("24GiB", "8GiB"),
    "flux.1": ("24GiB", "8GiB", "6GiB"),
    "flux.1-large": ("8GiB",),
    "flux.2": ("24GiB", "8GiB", "6GiB"),
    "qwen2.5-7b": ("6GiB", "4GiB", "2GiB"),
    "qwen2.5-7b-prefill": ("6GiB", "4GiB", "2GiB"),
    "qwen2.5-7b-whole": ("6GiB", "4GiB"),
    "qwen2.5-7b-whole-prefill": ("6GiB", "4GiB"),
    "llama-3-8b": ("8GiB", "6GiB"),
    "qwen3-30b-a3b": ("24GiB", "8GiB", "6GiB"),
    "qwen3-30b-a3b-prefill": ("24GiB", "8GiB"),
    "gemma-3-12b": ("24GiB", "8GiB"),
    "sdxl": ("6GiB", "4GiB"),
}
_LORA = {
    "ltx-2": ("24GiB", "8GiB", "6GiB"),
    "flux.1-large": ("24GiB", "16GiB"),
    "flux.2": ("24GiB",),
    "llama-3-8b": ("8GiB", "6GiB"),
}
# 9 GiB are needed beside weights, 6 of them for checkpoints.
_LORA_SPILLING = {"flux.1-large": "8GiB"}
# Their files are read again in forward and in backward.
_LORA_DISK = {"ltx-2": ("24GiB", "30%")}
# A head of 1 GiB comes at once, or in parts; other ways need more than the card has.
_LEAST_CARD = {"qwen2.5-7b-whole": "2GiB", "qwen2.5-7b-parted": "1GiB"}
_FULL = {"llama-3-8b": ("24GiB", "8GiB")}
_PAIRS = {"gemma-3-12b+ltx-2": ("24GiB",), "llama-3-8b+qwen2.5-7b": ("8GiB",)}
_ALONE = {"gemma-3-12b+ltx-2": "24GiB"}  # whose first model fits
_SAVED = {"llama-3-8b": ("50%", "20%"), "flux.1": ("20%",), "ltx-2": ("20%",)}
_DISK = {
    "qwen2.5-7b": ("100%", "30%"),
    "qwen2.5-7b-prefill": ("30%",),
    "qwen2.5-7b-whole": ("30%",),
    "llama-3-8b": ("30%",),
    "ltx-2": ("30%",),
}
_BUDGETS = {
    # A twenty-fifth of LTX-2 is two blocks: nothing of it is kept.
    ("inference", "qwen2.5-7b"): LEAST,
    ("lora", "llama-3-8b"): LEAST,
    ("lora", "ltx-2"): "4%",
}
_DRY_BUDGETS = {"4%": "60%", "12%": "50%"}  # of four blocks
_INT8 = {"flux.2": 14, "llama-3-8b": None}
"""By the number of blocks whose files, plain and quantized, a small disk holds."""

SHORT = (
    "lora/ltx-2/24GiB/stagehand*",
    "lora/ltx-2/24GiB/[nf]*",
    "lora/ltx-2/4%/stagehand",
    "inference/ltx-2/24GiB/[sa]*",
    "inference/qwen2.5-7b/4GiB/[sa]*",
    "inference/qwen2.5-7b-parted/*",
    "lora/flux.1-large/16GiB/stagehand*",
    "pair/gemma*/stagehand*",
    "int8/flux.2/*",
    "full/llama-3-8b/24GiB/stagehand-overlap",
    "activations/ltx-2/20%/*",
    "activations/llama-3-8b/20%/*",
    "disk/qwen2.5-7b/*",
)
"""The headlines, the most telling first: as many as the time is enough for."""


def all_cells() -> Iterator[Cell]:
    """Yield every cell, those that are compared one after another."""
    for kind, table in (
        ("inference", _INFERENCE),
        ("lora", _LORA),
        ("full", _FULL),
        ("pair", _PAIRS),
    ):
        for shape, caps in table.items():
            for cap in caps:
                yield from _every_way(Cell(kind=kind, shape=shape, cap=cap))
    for shape, cap in _LORA_SPILLING.items():
        yield Cell(kind="lora", shape=shape, cap=cap, way="stagehand-spilling")
    for shape, cap in _ALONE.items():
        yield Cell(kind="pair", shape=shape, cap=cap, way="stagehand-alone")
    for shape, (cap, ram) in _LORA_DISK.items():
        yield Cell(kind="lora", shape=shape, cap=cap, ram=ram, way="stagehand-load")
    for shape, cap in _LEAST_CARD.items():
        yield Cell(kind="inference", shape=shape, cap=cap)
    for (kind, shape), budget in _BUDGETS.items():
        yield Cell(kind=kind, shape=shape, budget=budget)
    for shape, blocks in _INT8.items():
        yield from _every_way(
            Cell(kind="int8", shape=shape, budget="12%", blocks=blocks)
        )
    for shape, budgets in _SAVED.items():
        for budget in budgets:
            yield from _every_way(Cell(kind="activations", shape=shape, budget=budget))
    for shape, rams in _DISK.items():
        for ram in rams:
            yield from _every_way(Cell(kind="disk", shape=shape, cap="6GiB", ram=ram))


def _every_way(cell: Cell) -> Iterator[Cell]:
    for way in ways_of(cell.kind):
        yield replace(cell, way=way)


def dry(cells: Iterable[Cell], *, blocks: int, divide: int) -> list[Cell]:
    """Return the same for a simulated device: small, few, and each once.

    A cap becomes a part of what the resident run takes. Other libraries rehearse with
    the first shape of each kind that is small.
    """
    found: dict[Cell, None] = {}
    for cell in cells:
        if not cell.ours and not cell.shape.startswith("llama"):
            continue
        small = replace(
            cell,
            cap=cell.cap and "75%",
            budget=_DRY_BUDGETS.get(cell.budget, cell.budget),
            blocks=blocks,
            # Small tensors are never spilled.
            divide=divide // 4 if _spills(cell) else divide,
            steps=2,
            settling=3,
        )
        found[small] = None
    return list(found)


def _spills(cell: Cell) -> bool:
    return cell.kind == "activations" or WAYS[cell.way].spills


def pick(
    cells: Iterable[Cell],
    *,
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
    ways: Sequence[str] = (),
) -> list[Cell]:
    """Return those that are asked for; all, where nothing is.

    Args:
        cells: Of these.
        names: Patterns as in a shell, "lora/*" or "*/sdxl/*"; they give the order.
        kinds: What is done.
        ways: Who keeps weights elsewhere.

    Raises:
        ValueError: If there is no cell of a name.
    """
    cells = list(cells)
    named = []
    for name in names or "*":
        found = [cell for cell in cells if fnmatch(cell.name, name)]
        if not found:
            raise ValueError(f"no cell is named {name!r}: --list prints the names")
        named += found
    return [
        cell
        for cell in dict.fromkeys(named)
        if (not kinds or cell.kind in kinds) and (not ways or cell.way in ways)
    ]
