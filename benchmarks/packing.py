"""What packing bfloat16 costs on the host, beside copying the same bytes, and gives."""

from collections.abc import Iterator

import torch

from benchmarks.results import Result
from benchmarks.timing import take_turns
from stagehand.core.layout import layout_of
from stagehand.stores.packing import pack_image
from stagehand.stores.unpacking import unpack_image

__all__ = ["measure"]

_TARGET_BITS = 12.1


def measure(rounds: int = 15, weights: int = 1 << 24) -> Iterator[Result]:
    """Yield both times over that of a copy, the copy's rate, and the bits a weight."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(weights, generator=generator).mul_(0.02).bfloat16()
    layout = layout_of([("weight", tensor)])
    # Written to once before: fresh pages cost more than the copy.
    image, other, memory = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
    layout.pack([tensor], image)
    packed, wire = pack_image(image, layout, wire=memory)
    functions = {
        "copy": lambda: other.copy_(image),
        "encode": lambda: pack_image(image, layout, wire=memory),
        "decode": lambda: unpack_image(wire, packed, other),
    }
    times = take_turns(functions, rounds=rounds)
    for name in ("encode", "decode"):
        yield Result.of(
            f"{name} packed bfloat16 over a copy of its bytes",
            times[name].part_of(times["copy"]),
            "x",
        )
    yield Result.of(
        "copy of those bytes, a GB", times["copy"], "ms", scale=1e12 / layout.nbytes
    )
    bits = 8 * packed.nbytes / weights
    yield Result(
        name="packed bfloat16 of normal weights",
        value=bits,
        median=bits,
        unit="bits a weight",
        target=_TARGET_BITS,
    )
