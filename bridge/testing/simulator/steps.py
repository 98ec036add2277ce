"""The steps of a scenario: frozen values, each of which knows how to do itself to a world.

A step calls an event by the name that the scenario gives it; the EventId exists only once the event was announced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from bridge.testing.simulator.errors import SimulatorError
from bridge.testing.simulator.events import EventSpec
from bridge.testing.simulator.faults import Fault
from bridge.testing.simulator.world import World

#: In resources and descriptions: the simulator's first VM.
ONE_VM = "{vm}"
#: In resources, alone: every VM of the simulator.
EVERY_VM = "{vms}"


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """One thing that happens at one second of scenario time."""

    at_seconds: float
    name: str = ""
    """What the scenario calls the event; empty when the step is about none."""

    @abstractmethod
    def apply(self, world: World, ids: dict[str, str]) -> None:
        """Do this step; *ids* maps the scenario's names to EventIds."""

    def event_id(self, ids: Mapping[str, str]) -> str:
        """Return the EventId of the event that this step names."""
        if self.name not in ids:
            raise SimulatorError(f"the event {self.name!r} was never announced")
        return ids[self.name]


@dataclass(frozen=True, kw_only=True)
class Add(Step):
    """Announce an event."""

    spec: EventSpec

    def apply(self, world: World, ids: dict[str, str]) -> None:
        """Announce the event and remember its EventId."""
        ids[self.name] = world.add_event(placed(self.spec, world.vm_names))


@dataclass(frozen=True, kw_only=True)
class Tell(Step):
    """Start, complete, cancel or approve an event."""

    verb: Literal["start", "complete", "cancel", "approve"]

    def apply(self, world: World, ids: dict[str, str]) -> None:
        """Do what the verb says."""
        event_id = self.event_id(ids)
        if self.verb == "approve":
            world.approve([event_id], vm="scenario")
            return
        {"start": world.start, "complete": world.complete, "cancel": world.cancel}[self.verb](event_id)


@dataclass(frozen=True, kw_only=True)
class Update(Step):
    """Change fields of an event."""

    changes: Mapping[str, Any]

    def apply(self, world: World, ids: dict[str, str]) -> None:
        """Change the fields."""
        world.update(self.event_id(ids), **self.changes)


@dataclass(frozen=True, kw_only=True)
class SetFault(Step):
    """Queue a fault."""

    fault: Fault

    def apply(self, world: World, ids: dict[str, str]) -> None:  # noqa: ARG002 - one signature for every step
        """Queue the fault."""
        world.set_fault(self.fault)


@dataclass(frozen=True, kw_only=True)
class ClearFaults(Step):
    """Forget the faults of a target."""

    target: str

    def apply(self, world: World, ids: dict[str, str]) -> None:  # noqa: ARG002 - one signature for every step
        """Forget them."""
        world.clear_faults(self.target)


@dataclass(frozen=True, kw_only=True)
class ResetIncarnation(Step):
    """Start the incarnation over."""

    to: int

    def apply(self, world: World, ids: dict[str, str]) -> None:  # noqa: ARG002 - one signature for every step
        """Start it over."""
        world.reset_incarnation(self.to)


@dataclass(frozen=True, kw_only=True)
class ReplaceDocument(Step):
    """Serve a text as the document; the empty text goes back to the events."""

    text: str

    def apply(self, world: World, ids: dict[str, str]) -> None:  # noqa: ARG002 - one signature for every step
        """Put the text in place of the events."""
        world.replace_document(self.text.encode() or None)


def placed(spec: EventSpec, vm_names: Sequence[str]) -> EventSpec:
    """Return *spec* with the placeholders filled in."""
    description = spec.description.replace(ONE_VM, vm_names[0])
    if spec.resources is None:
        return msgspec.structs.replace(spec, description=description)
    names: list[str] = []
    for resource in spec.resources:
        names.extend(vm_names if resource == EVERY_VM else [resource.replace(ONE_VM, vm_names[0])])
    return msgspec.structs.replace(spec, resources=tuple(names), description=description)
