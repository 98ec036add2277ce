"""Provides test tools for developers of sinks, portals, and other programs.

- `simulator` simulates the Azure Instance Metadata Service (IMDS). `bridge.testing` exports its public names.
- `contract` and `http_contract` contain the tests that every sink must pass.
- `peers` and `http_peer` contain simulated destinations for tests of sinks.
- `records` returns sample records.
- `calls` and `watching` are private modules for the tests in `contract`.
"""

from __future__ import annotations

from bridge.config.settings import API_VERSIONS
from bridge.testing.simulator.clock import ManualClock
from bridge.testing.simulator.errors import SimulatorError, UnknownEvent, WrongRequest, WrongState
from bridge.testing.simulator.events import EventSpec
from bridge.testing.simulator.faults import Fault
from bridge.testing.simulator.machines import Machine
from bridge.testing.simulator.scenario import load_scenario, scenario_names
from bridge.testing.simulator.scenario_file import Scenario, parse_scenario
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
