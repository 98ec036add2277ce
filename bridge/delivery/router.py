"""Selects the sinks that receive a record, by the filters in each ``[[sinks]]`` table. Pure.

The filters use the current form of the event, which can change. For example, Azure can change a Reboot to a Freeze or
remove a VM from Resources. A record without an event, such as the refusal of an approval for an unknown event, passes
the filters on event types and event sources.

With ``speak = "first"``, only the first VM in Resources sends the records of an event. The agents need no coordination
for this, because all VMs receive the same list from Azure. If an agent cannot find out which VM is the first, it sends
the records itself.

If a sink received a record of an event, the sink also receives all later records of this event, regardless of the
filters. Otherwise, an alert would never resolve, and a drained VM would never return to service.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge.events.event import is_first_named, names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import SinkConfig


def wants(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    """Return whether the sink with *config* receives *record*. *vm_name* is None if the VM's name is unknown."""
    if record.transition is Transition.HEARTBEAT:
        return config.heartbeat
    return _takes_transition(config, record) and _takes_event(config, record, vm_name)


def _takes_transition(config: SinkConfig, record: TransitionRecord) -> bool:
    return config.transitions is None or record.transition.value in config.transitions


def _takes_event(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    event = record.event
    if event is None:
        return True
    # Only the VM that gave an approval has its record.
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

        A sink in *told* received an earlier record of the event, and therefore receives all later records of the event.
        """
        return [
            config.name
            for config in self._configs
            if wants(config, record, vm_name) or (config.name in told and _takes_transition(config, record))
        ]
