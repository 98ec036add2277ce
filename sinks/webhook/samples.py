"""The records that a template is tried out with: of every transition that its sink gets, with every null they may have.

A template that passes with a record that has everything may still fail with a real one: an event that has started has
no NotBefore, one of an older api-version no description, and a VM whose identity is unknown no name. So each transition
is tried with everything there, as Azure shows it, with each of these nulls alone, and with all of them at once. What
every document has (EventId, EventType, Resources) is always there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, NamedTuple

import msgspec

from bridge.sink import Evidence, ScheduledEvent, SinkConfig, Transition, TransitionRecord, VmIdentity

_AWKWARD = 'He said "soon",\\ then\n<nothing> \u2014 {{ & }}'
_APPROVALS = frozenset({Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED})
_WITHOUT_EVENT = _APPROVALS | {Transition.HEARTBEAT}
_CHANGED = frozenset({Transition.UPDATED, Transition.STARTED})

_EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Freeze",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_0", "WestNO_1"),
    not_before=datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc),
    not_before_raw="Fri, 20 Nov 2026 11:15:00 GMT",
    description=_AWKWARD,
    event_source="Platform",
    duration_seconds=5,
)
_VM = VmIdentity(
    name="WestNO_0",
    vm_id="a3d7b4a0-0000-4000-8000-000000000000",
    resource_id="/subscriptions/0/resourceGroups/west/providers/Microsoft.Compute/virtualMachines/WestNO_0",
    subscription_id="0",
    resource_group="west",
    location="westeurope",
    scale_set="west",
    zone="1",
    placement_group_id="b4d7b4a0-0000-4000-8000-000000000000",
    tags={"note": _AWKWARD},
)
#: What is null together, by the names that a message gives it.
_NULLS: tuple[tuple[str, ...], ...] = (
    ("event.not_before", "event.not_before_raw", "notice_seconds"),
    ("event.description",),
    ("event.event_source",),
    ("event.duration_seconds",),
    ("affects_this_vm",),
    ("previous",),
    ("previous.not_before",),
    *((f"vm.{name}",) for name in VmIdentity.__struct_fields__ if name != "tags"),
    ("approval.decision_id",),
    ("approval.reason",),
    ("approval.http_status",),
)


class AnyLabel(dict[str, str]):
    """Labels of whatever name, while those of the configuration are not known."""

    def __missing__(self, _name: str) -> str:
        return _AWKWARD


class Sample(NamedTuple):
    """A record to try, and what of it is null for the trial."""

    record: TransitionRecord
    nulls: tuple[str, ...] = ()


def samples(config: SinkConfig) -> Iterator[Sample]:
    """Yield what a sink with *config* may get, the usual before the rare."""
    wanted = list(_transitions(config))
    for transition in wanted:
        if transition is not Transition.HEARTBEAT:
            yield Sample(_record(_full(transition)))
        if transition in _WITHOUT_EVENT:
            yield Sample(_record(_without_event(transition)), ("event",))
    for transition in wanted:
        if transition is not Transition.HEARTBEAT:
            yield from _with_nulls(_full(transition))


def sample_to_check() -> TransitionRecord:
    """Return a record of transition `test`."""
    return _record(_full(Transition.TEST))


def _transitions(config: SinkConfig) -> Iterator[Transition]:
    for transition in Transition:
        is_wanted = config.transitions is None or transition.value in config.transitions
        if config.heartbeat if transition is Transition.HEARTBEAT else is_wanted or transition is Transition.TEST:
            yield transition


def _with_nulls(full: dict[str, Any]) -> Iterator[Sample]:
    possible = [names for names in _NULLS if all(_may_be_null(full, name) for name in names)]
    for names in possible:
        yield Sample(_record(_without(full, *names)), names)
    everything = [name for names in possible for name in names]
    bare = _without(full, *everything) | {"vm": dict.fromkeys(full["vm"]) | {"tags": {}}}
    yield Sample(_record(bare), ("everything that may be",))


def _may_be_null(full: dict[str, Any], name: str) -> bool:
    if name == "previous":  # an event may be seen first when it has started; nothing else that has a past
        return bool(full["transition"] == Transition.STARTED)
    outer, _, inner = name.partition(".")
    return full[outer] is not None and (not inner or inner in full[outer])


def _without(full: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return *full* with null for *names*."""
    made = dict(full)
    for name in names:
        outer, _, inner = name.partition(".")
        made[outer] = None if not inner or made[outer] is None else {**made[outer], inner: None}
    return made


def _without_event(transition: Transition) -> dict[str, Any]:
    return _without(_full(transition), "event", "notice_seconds", "affects_this_vm", "previous")


def _full(transition: Transition) -> dict[str, Any]:
    """Return a record of *transition* as plain values, with everything that one may have."""
    approval = {"source": "portal", "decision_id": "d-1", "reason": _AWKWARD, "result": "sent", "http_status": 200}
    has_changed = transition in _CHANGED
    before = {"event_status": "Scheduled", "not_before": "2026-11-20T11:15:00Z"}
    return {
        "id": "7d6b5d5e-3f2f-5d7a-9a0a-5f1f2c7f9b11",
        "transition_key": "0" * 64,
        "stream_id": "01a1f89c-fb80-7000-8000-00000000a5a5",
        "sequence": 17,
        "active_event_ids": ["C7061BAC-AFDC-4513-B24B-AA5F13A16123"],
        "transition": transition.value,
        "evidence": Evidence.OBSERVED.value,
        "observed_at": "2026-11-20T11:00:01.123Z",
        "incarnation": 3,
        "previous_incarnation": 2,
        "event": msgspec.to_builtins(_EVENT),
        "previous": before if has_changed or transition.is_ending else None,
        "changed": ["event_status"] if has_changed else [],
        "notice_seconds": 898.877,
        "affects_this_vm": True,
        "vm": msgspec.to_builtins(_VM),
        "labels": {"note": _AWKWARD},
        "approval": approval if transition in _APPROVALS else None,
    }


def _record(values: dict[str, Any]) -> TransitionRecord:
    return msgspec.convert(values, TransitionRecord)
