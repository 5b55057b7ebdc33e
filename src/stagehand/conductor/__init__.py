"""Arbitrates memory and the link between all who use one device.

What a policy or a reservation needs is here under one name.
"""

from stagehand.conductor.config import ConductorConfig
from stagehand.conductor.rules import Policy, Readings, heuristic
from stagehand.conductor.runtime import ConductorRuntime
from stagehand.core.clock import Phase
from stagehand.core.ledger import Mode
from stagehand.core.limits import Limits, Priority
from stagehand.core.traffic import Denied

__all__ = [
    "ConductorConfig",
    "ConductorRuntime",
    "Denied",
    "Limits",
    "Mode",
    "Phase",
    "Policy",
    "Priority",
    "Readings",
    "heuristic",
]
