"""Stochastic rounding to bfloat16 is right on average and harmless at the edges."""

import math

import pytest
import torch

from stagehand.optim.rounding import (
    draw_noise,
    noise_seed,
    renew_noise,
    round_stochastically,
)


def noise_of(count, seed=1, renewals=0):
    generator = torch.Generator().manual_seed(seed)
    noise = draw_noise(count, generator)
    for _ in range(renewals):
        renew_noise(noise, torch.empty_like(noise))
    return noise


def rounded(value, noise, high=False):
    target = torch.empty(value.numel(), dtype=torch.bfloat16)
    spare = torch.empty(value.numel(), dtype=torch.int32)
    round_stochastically(target, value.clone(), noise, spare, high=high)
    return target


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("renewals", [0, 3])
@pytest.mark.parametrize("exact", [1 + 1 / 1024, -(1 + 3 / 512), 3e-39])
def test_mean_of_many_roundings_is_the_exact_value(exact, renewals, high):
    count = 200_000
    noise = noise_of(count, renewals=renewals)
    found = rounded(torch.full((count,), exact), noise, high).double()
    low, up = found.min().item(), found.max().item()
    assert low < exact < up  # both neighbours are met,
    assert found.unique().numel() == 2  # and nothing else
    deviation = (up - low) / 2 / math.sqrt(count)
    exact = torch.tensor(exact).double().item()
    assert abs(found.mean().item() - exact) < 4 * deviation


def stepped(state):
    """Marsaglia's xorshift with 13, 17 and 5, of 32 bits, in whole numbers."""
    state ^= state << 13 & 0xFFFFFFFF
    state ^= state >> 17
    return state ^ (state << 5 & 0xFFFFFFFF)


@pytest.mark.parametrize("high", [False, True])
def test_bits_are_those_of_the_named_generator_so_that_resumed_runs_draw_them(high):
    """Any other shift is random enough for the tests of means and correlations."""
    count, words = 1001, 0xFFFFFFFF
    drawn = [word & words for word in noise_of(count).tolist()]
    noise = noise_of(count, renewals=2)
    wanted = [stepped(stepped(word)) for word in drawn]
    assert [word & words for word in noise.tolist()] == wanted
    value = torch.linspace(-3, 5, count)
    found = rounded(value, noise, high).view(torch.int16).tolist()
    exact = [bits & words for bits in value.view(torch.int32).tolist()]
    halves = [word >> 16 if high else word & 0xFFFF for word in wanted]
    sums = [bits + half for bits, half in zip(exact, halves, strict=True)]
    assert [bits & 0xFFFF for bits in found] == [total >> 16 for total in sums]


def test_halves_of_the_noise_and_renewed_noise_are_independent():
    count = 100_000
    first = noise_of(count)
    parts = [
        part.double() - part.double().mean()
        for noise in (first, noise_of(count, renewals=1), noise_of(count, renewals=2))
        for part in (noise & 0xFFFF, noise >> 16 & 0xFFFF)
    ]
    for i, one in enumerate(parts):
        for other in parts[:i]:
            correlation = (one * other).mean() / one.std() / other.std()
            assert abs(correlation.item()) < 5 / math.sqrt(count)


def test_numbers_of_bfloat16_stay_as_they_are():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[~every.isnan()]
    found = rounded(every.float(), noise_of(every.numel()))
    assert torch.equal(found.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF])
def test_every_nan_stays_a_nan_and_leaves_its_neighbours_alone(bits):
    value = torch.ones(1000)
    value[::2].view(torch.int32).fill_(bits)
    found = rounded(value, noise_of(1000))
    assert found[::2].isnan().all()
    assert (found[1::2] == 1).all()


def test_seed_of_the_noise_differs_by_seed_parameter_and_step():
    keys = [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 3, 2), (0, 1, 3), (0, 12, 0)]
    assert len({noise_seed(*key) for key in keys}) == len(keys)
    assert noise_seed(0, 1, 2) == noise_seed(0, 1, 2)
