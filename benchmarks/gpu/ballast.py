"""A process that holds device memory, so that a large card is a small one.

A limit of torch's allocator would be seen by nobody else: libraries size themselves by
the free memory that the driver names. What another process holds is gone for all.
`python -m benchmarks.gpu.ballast LEAVE` leaves so many bytes free, says what it holds,
and ends when its input does: with its parent, however that ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from benchmarks.simulated import ROOT, load_simulated_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ballast", "main"]


@contextmanager
def ballast(leave_bytes: int, *, dry: bool = False) -> Iterator[int]:
    """Let another process hold all but some of the free device memory.

    Args:
        leave_bytes: What stays free.
        dry: Hold memory of a simulated device: its own, for there is one a process.

    Yields:
        The bytes that it holds.

    Raises:
        RuntimeError: If it could not.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.ballast", str(leave_bytes)]
    command += ["--dry"] * dry
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"the ballast could not leave {leave_bytes} bytes free")
        try:
            yield int(said)
        finally:
            process.stdin.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold memory until the input ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ballast")
    parser.add_argument("leave", type=int, help="bytes that stay free")
    parser.add_argument("--dry", action="store_true", help="of a simulated device")
    options = parser.parse_args(arguments)
    if options.dry:
        load_simulated_device().configure(capacity_bytes=2 * options.leave)
    place = torch.accelerator.current_accelerator(check_available=True)
    torch.empty(1, device=place)  # the context takes memory, too
    free = torch.accelerator.get_memory_info()[0]
    held = torch.empty(max(0, free - options.leave), dtype=torch.uint8, device=place)
    print(held.numel(), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
