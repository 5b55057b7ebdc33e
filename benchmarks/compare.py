"""Run the benchmarks of two revisions in turns: `python -m benchmarks.compare BASE`.

Each round runs the suites once with the working tree and once with the other revision,
in processes of their own and in alternating order, so that both meet the machine's
moods. Each figure is told on stderr as it is found; the smallest of each are compared
at the end. The exit status is 1 where one that has a target became worse by more than
the tolerance, or is not nothing any more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.simulated import ROOT

__all__ = ["main"]

_TOLERANCE = 1.15


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both, print a table, and return the exit status."""
    options = _parser().parse_args(arguments)
    found: dict[str, dict[str, float]] = {"base": {}, "here": {}}
    targets: set[str] = set()
    with _checked_out(options.base) as base:
        trees = {"base": base, "here": ROOT}
        for number in range(options.rounds):
            for name in sorted(trees, reverse=bool(number % 2)):
                turn = f"round {number + 1} of {options.rounds}, {name}"
                for line in _measured(trees[name], options):
                    told = f"{line['value']:9.3g}  {line['name']}"
                    print(f"{turn}: {told}", file=sys.stderr)
                    if line["unit"]:  # else it only says something
                        _keep_smallest(found[name], line)
                    if line["target"] is not None:
                        targets.add(line["name"])
    worse = _print_table(found, targets, options.tolerance)
    return 1 if worse else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="SUITE",
        default=["overhead"],
        help="which suites of python -m benchmarks (default: overhead)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=_TOLERANCE,
        help="by how much a figure may grow (default: %(default)s)",
    )
    return parser


@contextmanager
def _checked_out(revision: str) -> Iterator[Path]:
    """A working tree of a revision, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True
    )


def _measured(tree: Path, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield each figure of a working tree as it is found."""
    command = [sys.executable, "-m", "benchmarks", "--json", "--only", *options.only]
    if options.quick:
        command.append("--quick")
    paths = f"{tree / 'src'}{os.pathsep}{tree}"
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def _keep_smallest(found: dict[str, float], line: dict[str, object]) -> None:
    name, value = str(line["name"]), float(str(line["value"]))
    found[name] = min(value, found.get(name, value))


def _print_table(
    found: dict[str, dict[str, float]], targets: set[str], tolerance: float
) -> bool:
    worse = False
    base, here = found["base"], found["here"]
    width = max(map(len, [*base, *here]), default=0)
    for name, value in here.items():
        before = base.get(name)
        if before is None:
            print(f"{name:{width}}  {value:9.3g}  new")
            continue
        # Below nothing is what costs less than the machine's moods.
        grew = name in targets and value > tolerance * before >= 0
        worse |= grew
        ratio = f"{value / before:6.3f}x" if before > 0 else " " * 7
        note = "  worse" if grew else ""
        print(f"{name:{width}}  {before:9.3g}  {value:9.3g}  {ratio}{note}")
    return worse


if __name__ == "__main__":
    sys.exit(main())
