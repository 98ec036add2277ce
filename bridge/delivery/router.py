"""The router: which sinks want a record, by the settings that every ``[[sinks]]`` table has. Pure.

A filter that names event types or sources does not apply to a record without an event: a refused approval of an unknown
event must reach every sink.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.events.event import names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import SinkConfig


def wants(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    """Return whether the sink with *config* gets *record*, on the VM called *vm_name* (None: unknown)."""
    if record.transition is Transition.HEARTBEAT:
        return config.heartbeat
    if config.transitions is not None and record.transition.value not in config.transitions:
        return False
    event = record.event
    if event is None:
        return True
    if config.event_types is not None and event.event_type not in config.event_types:
        return False
    if config.event_sources is not None and event.event_source not in config.event_sources:
        return False
    return config.scope == "all" or names_vm(event, vm_name) is not False


class Router:
    """The names of the sinks that want a record, for all configured sinks."""

    def __init__(self, configs: Sequence[SinkConfig]) -> None:
        self._configs = tuple(configs)

    def __call__(self, record: TransitionRecord, vm_name: str | None) -> list[str]:
        """Return the names in the order of the configuration."""
        return [config.name for config in self._configs if wants(config, record, vm_name)]
