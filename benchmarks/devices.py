"""What was measured on devices, for the page: a table a cell, and every cell lost.

A cell is lost where this library failed, missed what the device allows, or another way
is better: faster in the same memory, or smaller while nothing of ours, in whatever
memory, is as small and as fast.
"""

from __future__ import annotations

import json
import math
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Line = dict[str, Any]
    Group = list[Line]

__all__ = ["device_section", "lost"]

# By patterns of names, of which the first counts; `notes.md` says which headline.
_OVER_BOUND = {
    "lora/*/stagehand-spilling": 1.02,
    "lora/ltx-2/4%/*": 1.022,
    "lora/flux.1-large/*": 1.03,
    "inference/*": 1.03,
    "pair/*/stagehand-alone": math.inf,  # it is what another one is held against
    "pair/*": 1.03,
    "*": 1.05,
}
# Where compute is the bound.
_OVER_RESIDENT = {"activations/*": 1.01, "*": 1.02}
_DRIFT = 0.03
_HOST_DRIFT = 0.1
_FREED = 0.95
_OVER_OTHER = {  # the same phases of two ways of ours: all, or those after the first
    ("stagehand-spilling", "stagehand"): (0, 1.01),
    ("stagehand-reserved", "stagehand-alone"): (1, 1.05),
}
_NO_PEERS = ("none",)
_NAIVE = "naive-pinned"  # nothing of what it copies overlaps


def device_section(name: str, lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of a device's section."""
    yield f"### {name}\n"
    for line in [line for line in lines if line.get("kind") == "link"][-1:]:
        yield _link(line)
    groups = _groups(lines)
    yield "#### Cells lost\n"
    found = list(lost(groups))
    yield from (f"- {sentence}" for sentence in found or ["None."])
    yield ""
    for group in groups:
        yield from _table(group)


def _link(line: Line) -> str:
    up, down, up_both, down_both, host, disk = (
        max(line[name].values()) / 1e9
        for name in ("h2d", "d2h", "h2d_both", "d2h_both", "host", "disk")
    )
    return (
        f"The link: {up:.1f} GB/s to the device, {down:.1f} from it; both at once"
        f" {up_both:.1f} and {down_both:.1f};\n{line['h2d_pageable'] / 1e9:.1f} from"
        f" ordinary memory. Page-locking takes {line['pin_seconds_per_gb']:.2f} s a GB"
        f" ({line['torch_pin_seconds_per_gb']:.2f} as\ntorch does). A copy in host"
        f" memory: {host:.1f} GB/s; the disk: {disk:.1f} GB/s.\n"
    )


def _groups(lines: Sequence[Line]) -> list[Group]:
    """Put lines together that differ in the way only; of each, the newest.

    By however many steps: a line of ten takes the place of one of five.
    """
    groups: dict[str, dict[str, Line]] = {}
    for line in lines:
        if line.get("kind") != "cell":
            continue
        cell = dict(line["cell"])
        way = cell.pop("way")
        for steps in ("steps", "settling"):
            cell.pop(steps, None)
        groups.setdefault(json.dumps(cell, sort_keys=True), {})[way] = line
    return [list(group.values()) for group in groups.values()]


def lost(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a sentence for everything that is not as it should be."""
    for group in groups:
        ours = [line for line in group if _ours(line)]
        for line in ours:
            yield from (f"{_name(line)}: {why}" for why in _misses(line))
        yield from _over_others({line["cell"]["way"]: line for line in ours})
        pool = [
            line
            for other in groups
            for line in other
            if _ours(line) and _same_work(line, group[0]) and "step" in line
        ]
        for line in group:
            if not _ours(line) and "step" in line:
                yield from (
                    f"{_name(line)}: {why}" for why in _advantages(line, ours, pool)
                )


def _ours(line: Line) -> bool:
    return bool(line["cell"]["way"].startswith("stagehand"))


def _same_work(one: Line, other: Line) -> bool:
    names = ("kind", "shape", "blocks", "divide")
    return all(one["cell"][name] == other["cell"][name] for name in names)


def _name(line: Line) -> str:
    cell = line["cell"]
    sizes = [cell[size] for size in ("cap", "budget", "ram") if cell[size]]
    return "/".join(
        (cell["kind"], cell["shape"], "+".join(sizes) or "all", cell["way"])
    )


def _misses(line: Line) -> Iterator[str]:
    if "failed" in line:
        yield f"failed ({line['failed']})"
        return
    if line["resident_difference"]:
        yield "resident run differs from itself: gradients were not compared"
    elif not line["equal"]:
        yield "not the resident outcome"
    computes = line["bound"] <= sum(line["resident_phases"])
    limits, name = _OVER_RESIDENT if computes else _OVER_BOUND, _name(line)
    limit = next(limits[pattern] for pattern in limits if fnmatch(name, pattern))
    if line["over_bound"] > limit:
        yield f"{line['over_bound']:.3f} of the bound, {limit:g} allowed"
    share = line["freed_share"]
    if share is not None and share < _FREED:
        yield f"{share:.3f} of what left was let go, {_FREED:g} wanted"
    before, after = line["rates"]["h2d"], line["h2d_rate_after"]
    if abs(after / before - 1) > _DRIFT:
        yield (
            f"not valid: the link's rate went from {before / 1e9:.1f} to"
            f" {after / 1e9:.1f} GB/s"
        )
    if computes and "operator_seconds" in line:
        first = 1e6 * max(line["resident_operator_seconds"])
        then = 1e6 * min(line["operator_seconds"])
        if then / first - 1 > _HOST_DRIFT:
            yield (
                f"not valid: the host queued an operator in {first:.1f} us at most"
                f" beside the resident steps, in {then:.1f} at least beside these"
            )


def _over_others(ours: dict[str, Line]) -> Iterator[str]:
    """Where one way of ours takes too long beside another one."""
    for (way, other), (first, limit) in _OVER_OTHER.items():
        pair = ours.get(way, {}), ours.get(other, {})
        if all("step" in line for line in pair):
            over = sum(pair[0]["phases"][first:]) / sum(pair[1]["phases"][first:])
            if over > limit:
                yield (
                    f"{_name(pair[0])}: {over:.3f} of what {other} takes,"
                    f" {limit:g} allowed"
                )


def _advantages(
    line: Line, ours: Sequence[Line], pool: Sequence[Line]
) -> Iterator[str]:
    """What another way does better than all of ours, be its outcome another or not."""
    if line["cell"]["way"] in _NO_PEERS:
        return
    bits = "" if line["equal"] else f"; other bits, off by {line['difference']:.3g}"
    step, size = line["step"]["median"], line["device_bytes"]
    here = [own["step"]["median"] for own in ours if "step" in own]
    best = min(here, default=None)
    if best is None or step < best:
        than = "nothing of ours" if best is None else f"{best * 1e3:.2f} ms of ours"
        yield f"faster: {step * 1e3:.2f} ms against {than}{bits}"
    elif not any(
        own["step"]["median"] <= step and own["device_bytes"] <= size for own in pool
    ):
        yield f"smaller: {format_bytes(size)}, in which ours is not as fast{bits}"


def _table(group: Group) -> Iterator[str]:
    first = group[0]
    name = _name(first).rsplit("/", 1)[0]
    blocks = first["cell"]["blocks"]
    yield f"#### {name}{f', about {blocks} blocks' if blocks else ''}\n"
    yield (
        "| way | step, ms (10 % to 90 %; how many) | over bound | over resident |"
        " overlap | allocated | reserved | device | pinned | host | copies |"
        " stall, ms | first output, s | all pinned, s |"
    )
    yield "|" + "---|" * 14
    steps = {line["cell"]["way"]: line["step"] for line in group if "step" in line}
    naive = steps.get(_NAIVE, {}).get("median")
    for line in group:
        yield f"| {line['cell']['way']} | {' | '.join(_cells(line, naive))} |"
    yield ""


def _overlap(line: Line, naive: float | None) -> str:
    """Of what can be saved of naive moves' time, the part that is."""
    if naive is None or naive <= line["bound"]:
        return ""
    saved = (naive - line["step"]["median"]) / (naive - line["bound"])
    return f"{saved:.1%}"


def _first_output(line: Line) -> str:
    """Older lines have the whole first outcome: with backward, if there is one."""
    seconds = line.get("first_output")
    if seconds is None and line["cell"]["kind"] == "inference":
        seconds = line["startup"]
    return "" if seconds is None else f"{seconds:.1f}"


def _cells(line: Line, naive: float | None) -> list[str]:
    for name, word in (("left_out", "left out"), ("failed", "failed")):
        if name in line:
            return [f"{word}: {line[name].replace('|', '/')}", *[""] * 12]
    step = {name: value * 1e3 for name, value in line["step"].items()}
    memory = ("allocated", "reserved", "device", "pinned", "host")
    stall, copies = line["stall_ms"], line["h2d_copies"]
    return [
        f"{step['median']:.2f} ({step['p10']:.2f} to {step['p90']:.2f};"
        f" {line['timed_steps']} steps)" + ("" if line["equal"] else ", other bits"),
        f"{line['over_bound']:.3f}",
        f"{line['over_resident']:.3f}",
        _overlap(line, naive),
        *(format_bytes(line[f"{name}_bytes"]) for name in memory),
        "" if copies is None else f"{copies} + {line['d2h_copies']}",
        "" if stall is None else f"{stall:.2f}",
        _first_output(line),
        f"{line['pinned']:.1f}" if line.get("pinned") else "",
    ]
