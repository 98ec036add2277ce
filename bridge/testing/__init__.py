"""What we test with, shipped so that users test with it too: a simulated Azure metadata service, and what tests a sink.

For the metadata service: the names below, from the package `simulator`. For the author of a sink: the modules
`contract` and `http_contract` (the suite that a sink passes), `peers` and `http_peer` (its other side), `records`
(samples) and `sinks` (one that keeps what it gets, one that does what a script says); `calls` and `watching` are the
suite's own.

The names stand here because tests import them from here; so this package, other than the agent's, imports something.
"""

from __future__ import annotations

from bridge.testing.simulator.clock import ManualClock
from bridge.testing.simulator.errors import SimulatorError, UnknownEvent, WrongRequest, WrongState
from bridge.testing.simulator.events import API_VERSIONS, EventSpec
from bridge.testing.simulator.faults import Fault
from bridge.testing.simulator.machines import Machine
from bridge.testing.simulator.scenario import Scenario, load_scenario, parse_scenario, scenario_names
from bridge.testing.simulator.server import Simulator
from bridge.testing.simulator.serving import describe_change, serve
from bridge.testing.simulator.world import ApprovalReceived, Change, World

__all__ = [
    "API_VERSIONS",
    "ApprovalReceived",
    "Change",
    "EventSpec",
    "Fault",
    "Machine",
    "ManualClock",
    "Scenario",
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
