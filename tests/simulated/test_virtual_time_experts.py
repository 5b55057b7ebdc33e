"""How long a token of a mixture of experts takes in virtual time, over its bound."""

import pytest

from simulated.experts import GB, Case, Decoding
from stagehand.residency import finding

SETTLING = 6
PCIE4, PCIE5 = 25 * GB, 55 * GB


@pytest.fixture
def decode(sim, monkeypatch):
    """Streams a case and runs until its plan is made for one token at a time."""
    monkeypatch.setattr(finding, "_SMALL_BYTES", 0)  # toy layers stand for large ones
    streamed = []

    def decode(case, **options):
        decoding = Decoding.of(sim, case, **options)
        streamed.append(decoding)
        decoding.run(SETTLING)
        return decoding

    yield decode
    for decoding in streamed:
        decoding.runtime.shutdown()


@pytest.mark.parametrize("rate", [PCIE4, PCIE5], ids=["PCIe 4", "PCIe 5"])
@pytest.mark.parametrize("budget", [8, 24], ids="{} GB".format)
def test_a_token_takes_what_its_experts_cross_in(decode, rate, budget):
    case = Case(rate, int(budget * GB))
    assert decode(case).seconds() <= 1.08 * case.bound


def test_that_is_a_small_part_of_what_all_experts_take(decode):
    case = Case(PCIE4, int(4 * GB), depth=12)
    few = decode(case).seconds()
    assert few <= 0.12 * decode(case, rows=False).seconds()
