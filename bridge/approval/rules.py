"""Which rule speaks for an event, and how long this VM waits before it follows it.

Rules decide without a person, so they read an event strictly: what is unknown matches nothing that asks for it. An
approval is consent for every VM in Resources, so an ``approve`` rule matches only where it is known who that is and who
this VM is; whatever the rule says, nobody consents for machines that are not named. A ``hold`` does no harm, and may
match there.

Everything here is pure: no clock, no I/O. Whether the event is still Scheduled is for the approver to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge.config.approval import RuleSettings
from bridge.events.event import ScheduledEvent, names_vm, normal_name


def first_match(rules: Iterable[RuleSettings], event: ScheduledEvent, *, vm_name: str | None) -> RuleSettings | None:
    """Return the first of *rules* that matches *event* on the VM *vm_name*, null when none does.

    *vm_name* is null while it is unknown. Names are compared whole, without case, as everywhere.
    """
    return next((rule for rule in rules if _matches(rule, event, vm_name)), None)


def may_run_command(rule: RuleSettings, event: ScheduledEvent, vm_name: str | None) -> bool:
    """Return whether the command of *rule* can speak for every VM of *event*.

    A drain of this VM says nothing of another, so Resources must be exactly this VM, unless ``command_covers_all``.
    """
    if rule.command is None or not _is_clear_who(event, vm_name):
        return False
    return rule.command_covers_all or _names_only(event, vm_name)


def act_delay_seconds(
    rule: RuleSettings, event: ScheduledEvent, *, vm_name: str | None, fallback_seconds: float
) -> float | None:
    """Return how long this VM waits before it follows *rule*; null: it never does.

    ``each``: no wait. ``leader``: the first VM in Resources does not wait, the k-th after it waits k times
    *fallback_seconds*, and a VM that Resources do not name never acts.
    """
    if not _is_clear_who(event, vm_name):
        return None
    if rule.act == "each":
        return 0.0
    order = list(dict.fromkeys(normal_name(name) for name in event.resources or ()))
    me = normal_name(vm_name or "")
    return order.index(me) * fallback_seconds if me in order else None


def _matches(rule: RuleSettings, event: ScheduledEvent, vm_name: str | None) -> bool:
    return (
        (rule.event_types is None or event.event_type in rule.event_types)
        and (rule.event_sources is None or event.event_source in rule.event_sources)
        and _lasts(rule, event.duration_seconds)
        and _is_about(rule, event, vm_name)
        and (rule.action == "hold" or _is_clear_who(event, vm_name))
        and (rule.command is None or may_run_command(rule, event, vm_name))
    )


def _lasts(rule: RuleSettings, duration_seconds: int | None) -> bool:
    low, high = rule.min_duration_seconds, rule.max_duration_seconds
    if low is None and high is None:
        return True
    if duration_seconds is None:  # Azure's -1: it does not know, so nobody here does
        return False
    return (low is None or duration_seconds >= low) and (high is None or duration_seconds <= high)


def _is_about(rule: RuleSettings, event: ScheduledEvent, vm_name: str | None) -> bool:
    if rule.resources == "any":
        return True
    if rule.resources == "only_me":
        return _names_only(event, vm_name)
    return names_vm(event, vm_name) is True


def _names_only(event: ScheduledEvent, vm_name: str | None) -> bool:
    if not vm_name or not event.resources:
        return False
    return {normal_name(name) for name in event.resources} == {normal_name(vm_name)}


def _is_clear_who(event: ScheduledEvent, vm_name: str | None) -> bool:
    """Return whether it is known which VMs *event* names, and which one this is."""
    return bool(vm_name) and bool(event.resources)
