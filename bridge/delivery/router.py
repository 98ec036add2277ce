"""Selects the sinks for a record by applying the filters of each ``[[sinks]]`` table.

The filters check an event's current type, source, and resources, because Azure can change them. For example, a Reboot
can become a Freeze. A record without an event, such as the refusal of a decision on an unknown event, always passes the
filters.

With ``speak = "first"``, only the first VM in an event's Resources sends the records of the event. Azure sends the same
list to all VMs, so their agents do not need to coordinate. If an agent cannot determine whether its VM is the first in
the list, it sends the records anyway.

Once a sink has received a record of an event, only the `transitions` filter applies to later records of the event. The
sink can then resolve an alert or end a drain even if the event no longer matches the other filters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge.events.event import is_first_named, names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import SinkConfig


def wants(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    """Return whether the sink receives *record*. *vm_name* is None if the name is unknown."""
    if record.transition is Transition.HEARTBEAT:
        return config.heartbeat
    return _takes_transition(config, record) and _takes_event(config, record, vm_name)


def _takes_transition(config: SinkConfig, record: TransitionRecord) -> bool:
    return config.transitions is None or record.transition.value in config.transitions


def _takes_event(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    event = record.event
    if event is None:
        return True
    # The approval record exists only on the VM that sent the approval, so `speak` does not apply.
    if config.speak == "first" and record.approval is None and is_first_named(event, vm_name) is False:
        return False
    if config.event_types is not None and event.event_type not in config.event_types:
        return False
    if config.event_sources is not None and event.event_source not in config.event_sources:
        return False
    return config.scope == "all" or names_vm(event, vm_name) is not False


class Router:
    """Selects the sinks of a record from all configured sinks."""

    def __init__(self, configs: Sequence[SinkConfig]) -> None:
        self._configs = tuple(configs)

    def __call__(self, record: TransitionRecord, vm_name: str | None, told: Collection[str]) -> list[str]:
        """Return the names of the sinks in the order of the configuration.

        *told* contains the names of the sinks that received an earlier record of the event.
        """
        return [
            config.name
            for config in self._configs
            if wants(config, record, vm_name) or (config.name in told and _takes_transition(config, record))
        ]
