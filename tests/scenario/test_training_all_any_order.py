"""All that a script of training does in any order, in one script."""

from dataclasses import dataclass
from typing import ClassVar

from test_training_autocast_any_order import AnyOrderCasting, CastingRun
from test_training_graphs_any_order import AnyOrderGraphs, HookedRun
from test_training_graphs_any_order import pytestmark as of_graphs
from test_training_kinds_any_order import AnyOrderKinds
from test_training_kinds_any_order import pytestmark as of_kinds
from test_training_steps_any_order import AnyOrderSteps

from exploring import running

pytestmark = [*of_graphs, of_kinds]


@dataclass(kw_only=True)
class RunOfAll(CastingRun, HookedRun):
    """A run that is cast and has hooks."""


class AnyOrderOfAll(AnyOrderCasting, AnyOrderGraphs, AnyOrderKinds, AnyOrderSteps):
    """A script that does whatever the others do, with all of their models."""

    kind_of_run = RunOfAll
    makers: ClassVar = {
        **AnyOrderCasting.makers,
        **AnyOrderGraphs.makers,
        **AnyOrderKinds.makers,
    }
    del makers["complex"]  # some of PyTorch's optimizers and clips refuse them
    several = (*AnyOrderCasting.several, *AnyOrderKinds.several)
    recomputing = (*AnyOrderCasting.recomputing, *AnyOrderGraphs.recomputing)
    reading = (*AnyOrderGraphs.reading, *AnyOrderKinds.reading)

    def can_be_pickled(self):
        ways = (AnyOrderGraphs.can_be_pickled, AnyOrderKinds.can_be_pickled)
        return all(way(self) for way in ways)


AnyOrderOfAll.TestCase.settings = running(9, 25)
TestAnyOrderOfAll = AnyOrderOfAll.TestCase
