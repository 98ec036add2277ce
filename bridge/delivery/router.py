"""The router: selects the sinks of a record by the settings that every ``[[sinks]]`` table has. Pure.

A filter on event types or sources does not apply to a record without an event, because a refused approval of an unknown
event must reach every sink.

Filters apply to the current form of the event, and an event can change: a Reboot can become a Freeze, and a VM can
leave Resources. With ``speak = "first"``, only the first VM in Resources sends records of an event. The agents of an
event need no coordination for this, because all of them see the same list. If it is not known which VM is the first,
each VM sends the records.

A sink that received a record of an event receives all later records of this event until the event ends. Otherwise, its
alert would never resolve, and its VM would stay drained. The outbox keeps the sinks of each event, and the router
returns the sinks for which this rule matters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridge.events.event import is_first_named, names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import SinkConfig


def wants(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    """Return whether the sink with *config* receives *record* on the VM *vm_name* (None: unknown)."""
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
