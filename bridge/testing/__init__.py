"""What we test with, shipped so that users test with it too: an Azure metadata service that never was, and sinks.

It is the other side of the wire and shares no parser with the agent, so that neither hides the other's mistakes.
"""

from __future__ import annotations

from bridge.testing.changes import ApprovalReceived, Change, UnknownEvent, WrongState
from bridge.testing.clock import ManualClock, RealClock
from bridge.testing.events import API_VERSIONS, EventSpec
from bridge.testing.faults import Fault
from bridge.testing.machines import Machine
from bridge.testing.scenario import Scenario, load_scenario, parse_scenario, scenario_names
from bridge.testing.serving import ServeOptions, describe_change, serve
from bridge.testing.simulator import Simulator
from bridge.testing.table import SimulatorError, WrongRequest
from bridge.testing.world import World

__all__ = [
    "API_VERSIONS",
    "ApprovalReceived",
    "Change",
    "EventSpec",
    "Fault",
    "Machine",
    "ManualClock",
    "RealClock",
    "Scenario",
    "ServeOptions",
    "Simulator",
    "SimulatorError",
    "UnknownEvent",
    "World",
    "WrongRequest",
    "WrongState",
    "describe_change",
    "load_scenario",
    "parse_scenario",
    "scenario_names",
    "serve",
]
