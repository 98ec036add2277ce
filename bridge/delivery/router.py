"""The router: which sinks want a record, by the settings that every ``[[sinks]]`` table has. Pure.

A filter that names event types or sources does not apply to a record without an event: a refused approval of an unknown
event must reach every sink.

Filters look at the event as it is now, but an event changes: a Reboot may turn out a Freeze, a VM may leave Resources.
With ``speak = "first"`` only the first VM in Resources tells of an event; the agents of one event need no word with one
another for that, since all see the same list. While it is not clear who is first, each tells of it.

A sink that was told of an event is told of it to its end, or its alert would never resolve and its VM would stay
drained. The outbox knows who was told; the router says for which sinks that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge.events.event import is_first_named, names_vm
from bridge.events.record import Transition, TransitionRecord
from bridge.sink import SinkConfig


def wants(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    """Return whether the sink with *config* gets *record*, on the VM called *vm_name* (None: unknown)."""
    if record.transition is Transition.HEARTBEAT:
        return config.heartbeat
    return _takes_transition(config, record) and _takes_event(config, record, vm_name)


def _takes_transition(config: SinkConfig, record: TransitionRecord) -> bool:
    return config.transitions is None or record.transition.value in config.transitions


def _takes_event(config: SinkConfig, record: TransitionRecord, vm_name: str | None) -> bool:
    event = record.event
    if event is None:
        return True
    # Of an approval only the VM that gave it knows.
    if config.speak == "first" and record.approval is None and is_first_named(event, vm_name) is False:
        return False
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

    def if_told(self, record: TransitionRecord, vm_name: str | None) -> list[str]:
        """Return the names of the sinks that want *record* only if they were told of its event before."""
        if record.event is None:
            return []
        return [
            config.name
            for config in self._configs
            if _takes_transition(config, record) and not _takes_event(config, record, vm_name)
        ]
