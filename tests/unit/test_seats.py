"""Who may take what from whom: the books of a shared device."""

import pytest
import torch

from stagehand.core.device import HostDevice
from stagehand.core.ledger import Account, SubAccount
from stagehand.errors import StagehandOOMError
from stagehand.residency.holds import ResidentPriority
from stagehand.residency.seats import Seats
from stagehand.residency.shared import SharedDevice
from stagehand.residency.shares import Claim


class Tenant:
    """One with a budget, that holds some bytes."""

    def __init__(self, name, whole, *, budget, held):
        self.name = name
        self.account = SubAccount(name, budget, whole)
        self._claim = Claim(
            budget=budget,
            weights=40,
            floor=10,
            ring=10,
            seconds=lambda kept: 50.0 - kept,
        )
        self._grant = self.account.grant(held, "slots")

    def claim(self):
        return self._claim

    def owner(self):
        return None

    def ends_alone(self):
        return False


@pytest.mark.parametrize("is_guest", [True, False])
def test_a_guest_is_given_nothing_of_what_is_reserved_for_others(is_guest):
    """Nor where who has more than it keeps is busy: then a guest waits for that."""
    whole = Account("device", 100)
    seats = Seats(whole, torch.device("cpu"))
    reserved, plain, asks = (
        seats.add(seats.new_number(), Tenant(name, whole, budget=100, held=held))
        for name, held in (("reserved", 45), ("plain", 35), ("asks", 10))
    )
    seats.reserve(reserved, ResidentPriority.SECONDARY, asked_for=True)
    if is_guest:
        seats.begin_guest(asks)
    givers = list(seats.givers(asks))
    assert givers == ([plain] if is_guest else [plain, reserved])


def test_what_who_has_left_held_does_not_count_for_those_who_stay():
    """A grant that is released late, say behind the last copy, changes nothing then."""
    whole = Account("device", 100)
    seats = Seats(whole, torch.device("cpu"))
    numbers = seats.new_number(), seats.new_number()
    leaves, stays = (
        Tenant(name, whole, budget=100, held=45) for name in ("leaves", "stays")
    )
    seats.add(numbers[0], leaves)
    seats.add(numbers[1], stays)
    assert seats.forget(numbers[0])
    assert not seats.forget(numbers[0])
    assert whole.held_bytes == 45
    leaves._grant.release()
    assert whole.held_bytes == 45


def test_who_is_refused_has_no_place():
    shared = SharedDevice(HostDevice())
    whole = shared.ledger.device
    there = Tenant("there", whole, budget=45, held=0)
    number = shared.new_number()
    shared.join(number, there)
    shared.reserve(number, ResidentPriority.PRIMARY)
    with pytest.raises(StagehandOOMError, match="reserved for there"):
        shared.join(shared.new_number(), Tenant("late", whole, budget=20, held=0))
    assert [holding.name for holding in shared.holdings()] == ["there"]
