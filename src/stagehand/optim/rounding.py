"""Stochastic rounding to bfloat16: up or down at random, right on average.

A moving average in bfloat16 stalls under rounding to nearest: 0.999 of a number rounds
back to the number, since its neighbours are 1/256 of it apart. Rounded at random, up
with the probability of how far up the exact value lies, it moves in steps that are
right on average.
"""

import hashlib
import math

import torch

__all__ = ["draw_noise", "noise_seed", "renew_noise", "round_stochastically"]

_LOW = 0xFFFF


def noise_seed(seed: int, number: int, count: int) -> int:
    """Return the seed of the noise that rounds one parameter's states in one step.

    A function of these three alone, so that the order in which parameters are stepped
    changes no bit, and a run that is resumed draws what it would have drawn.

    Args:
        seed: The optimizer's.
        number: The parameter's place among all parameters of the optimizer.
        count: How many steps the parameter has had.
    """
    text = f"{seed} {number} {count}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def draw_noise(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return `count` int32 in host memory, all of whose bits are random."""
    pairs = torch.empty((count + 1) // 2, dtype=torch.int64, device="cpu")
    return pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[:count]


def renew_noise(noise: torch.Tensor, spare: torch.Tensor) -> None:
    """Turn noise into other noise, faster than drawing it, which one thread does.

    Each number is the state of a generator of its own, which takes a step: Marsaglia's
    xorshift with 13, 17 and 5 (Journal of Statistical Software 8(14), 2003).
    """
    noise.bitwise_xor_(torch.bitwise_left_shift(noise, 13, out=spare))
    torch.bitwise_right_shift(noise, 17, out=spare)  # with copies of the sign on top
    noise.bitwise_xor_(spare.bitwise_and_((1 << 15) - 1))
    noise.bitwise_xor_(torch.bitwise_left_shift(noise, 5, out=spare))


def round_stochastically(
    target: torch.Tensor,
    value: torch.Tensor,
    noise: torch.Tensor,
    spare: torch.Tensor,
    *,
    high: bool,
) -> None:
    """Write `value` into `target`, rounded up or down at random.

    The probabilities are exact to 16 bits; numbers that bfloat16 has stay what they
    are, and so do infinities and NaNs. All four tensors are flat and of one length.

    Args:
        target: bfloat16.
        value: float32. Destroyed.
        noise: int32, all of whose bits are random.
        spare: int32 memory to work in.
        high: Take the high halves of the noise, not the low ones.
    """
    # The sum below may carry a NaN's bits into the sign. Looking for NaNs in a sum is
    # many times as fast as looking at each number.
    invalid = value.isnan() if value.sum().isnan() else None
    torch.bitwise_right_shift(noise, 16 if high else 0, out=spare)
    bits = value.view(torch.int32).add_(spare.bitwise_and_(_LOW))
    target.view(torch.int16).copy_(bits.bitwise_right_shift_(16))
    if invalid is not None:
        target.masked_fill_(invalid, math.nan)
