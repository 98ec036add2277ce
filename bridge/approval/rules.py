"""Applies local rules, which approve or hold events automatically.

Rules match strictly, because no one reviews what they approve. A rule never matches a recommendation, and a condition
never matches an unknown value. An ``approve`` rule also requires that Resources and the name of this VM are known,
because an approval affects every VM in Resources. A ``hold`` rule does not require this.

A rule acts at most once on each version of an event. If ``act`` is ``leader``, the first VM in Resources acts
immediately, and each later VM waits longer. The wait starts when the agent first sees the version of the event, so an
agent that starts late never acts too early. A signed hold stops all rules for its event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from bridge.approval.changes import Changes, approval_record
from bridge.approval.document_index import DocumentIndex
from bridge.approval.holds import newest_holds
from bridge.approval.refusal_reasons import RefusalReason
from bridge.clock import REAL_CLOCK, Clock
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.events.event import ScheduledEvent, VmIdentity, names_vm, normal_name
from bridge.events.record import Transition
from bridge.outbox.rows import OPEN_STAGES, ApprovalStage, ApprovalState, EventVersion, PendingApproval

_PREFIX = "rule:"


class RuleEngine:
    """Applies the rules to events that are Scheduled. *vm* returns this VM's identity."""

    def __init__(self, settings: ApprovalSettings, *, vm: Callable[[], VmIdentity], clock: Clock = REAL_CLOCK) -> None:
        self._settings = settings
        self._vm = vm
        self._clock = clock
        self._first_seen: dict[EventVersion, float] = {}

    def rule_behind(self, approval: PendingApproval, index: DocumentIndex) -> RuleSettings | None:
        """Return the rule that started *approval*, if it is still the first to match the event."""
        event = index.events.get(approval.event_id)
        if event is None:
            return None
        rule = first_match(self._settings.rules, event, vm_name=self._vm().name)
        return rule if rule is not None and _PREFIX + rule.name == approval.source else None

    def apply(self, state: ApprovalState, index: DocumentIndex, *, may_begin: Callable[[], bool]) -> Changes:
        """Return the changes that the rules make. If *may_begin* returns False, start no approval."""
        result = Changes()
        now = self._clock.monotonic()
        doubted = {key: seen_at for key, seen_at in self._first_seen.items() if key[0] in index.unsettled}
        self._first_seen = doubted | {key: self._first_seen.get(key, now) for key in index.digests.items()}
        may_match = bool(self._settings.rules and index.events)
        has_begun = any(each.source.startswith(_PREFIX) for each in state.approvals.values())
        if not (may_match or has_begun) or self._vm().name is None:
            return result
        self._withdraw_stale(state, index, result)
        if not (may_match and may_begin()):
            return result
        holds = newest_holds(state.decisions)
        for key in index.digests.items():
            if key[0] not in holds and index.is_confirmed(*key) and self._is_free(state, key):
                result.approvals += self._approvals_of(index.events[key[0]], key)
        return result

    def _is_free(self, state: ApprovalState, key: EventVersion) -> bool:
        approval = state.approvals.get(key)
        # After a change of the configuration, a rule can start a withdrawn approval or a dry run again.
        return (
            approval is None
            or approval.state is ApprovalStage.WITHDRAWN
            or (approval.state is ApprovalStage.DRY_RUN and not self._settings.dry_run)
        )

    def _approvals_of(self, event: ScheduledEvent, key: EventVersion) -> list[PendingApproval]:
        vm_name = self._vm().name
        rule = first_match(self._settings.rules, event, vm_name=vm_name)
        if rule is None or rule.action != "approve":
            return []
        fallback_seconds = self._settings.leader_fallback_seconds
        delay = act_delay_seconds(rule, event, vm_name=vm_name, fallback_seconds=fallback_seconds)
        if delay is None or self._clock.monotonic() < self._first_seen[key] + delay:
            return []
        stage = ApprovalStage.WANTED if rule.command is None else ApprovalStage.DRAINING
        source = _PREFIX + rule.name
        return [PendingApproval(event_id=key[0], event_digest=key[1], state=stage, source=source, event=event)]

    def _withdraw_stale(self, state: ApprovalState, index: DocumentIndex, result: Changes) -> None:
        for approval in state.approvals.values():
            is_of_rule = approval.state in OPEN_STAGES and approval.source.startswith(_PREFIX)
            if not is_of_rule or approval.event_id in index.unsettled or self.rule_behind(approval, index) is not None:
                continue
            result.approvals.append(msgspec.structs.replace(approval, state=ApprovalStage.WITHDRAWN))
            why, message = RefusalReason.SUPERSEDED, "The rule of this approval was removed, or no longer matches."
            result.refusals.append(approval_record(approval, Transition.APPROVAL_REFUSED, why, message=message))


def first_match(rules: Iterable[RuleSettings], event: ScheduledEvent, *, vm_name: str | None) -> RuleSettings | None:
    """Return the first of *rules* that matches *event* on the VM *vm_name*, or None.

    Conditions compare whole names and ignore case. If the VM name is unknown, *vm_name* is None.
    """
    return next((rule for rule in rules if _matches(rule, event, vm_name)), None)


def act_delay_seconds(
    rule: RuleSettings, event: ScheduledEvent, *, vm_name: str | None, fallback_seconds: float
) -> float | None:
    """Return how many seconds this VM waits before it acts, or None if it never acts.

    If ``act`` is ``each``, the delay is always 0. If it is ``leader``, the first VM in Resources does not wait, each
    later VM waits *fallback_seconds* longer than the one before it, and a VM that is not in Resources never acts.
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
        not event.is_advisory
        and (rule.event_types is None or event.event_type in rule.event_types)
        and (rule.event_sources is None or event.event_source in rule.event_sources)
        and _lasts(rule, event.duration_seconds)
        and _is_about(rule, event, vm_name)
        and (rule.action == "hold" or _is_clear_who(event, vm_name))
        # A drain command prepares only this VM, unless the rule says otherwise.
        and (rule.command is None or rule.command_covers_all or _names_only(event, vm_name))
    )


def _lasts(rule: RuleSettings, duration_seconds: int | None) -> bool:
    low, high = rule.min_duration_seconds, rule.max_duration_seconds
    if duration_seconds is None:  # Azure sent -1, which means unknown
        return low is None and high is None
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
    return bool(vm_name) and bool(event.resources)
