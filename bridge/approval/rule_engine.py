"""What the rules of this VM say about the events in the document, and when this VM acts on it.

A rule is looked at for each Scheduled event as it is now; once it has acted on an event as it is, it never does again.
The delay of a VM that is not the leader counts from when this agent saw the event as it is now, so an agent that starts
late waits too long rather than too short. A hold that somebody signed stops every rule for that event.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bridge.approval.evaluate import DocumentIndex, Evaluation, Refusal, newest_hold
from bridge.approval.rule_commands import RuleCommands
from bridge.approval.rules import act_delay_seconds, first_match
from bridge.config.approval import ApprovalSettings, RuleSettings
from bridge.errors import RefusalReason
from bridge.events.event import ScheduledEvent
from bridge.outbox.approvals import DRAINING, DRY_RUN, WANTED, WITHDRAWN, ApprovalState, PendingApproval

_PREFIX = "rule:"
_NEVER = float("inf")
_RETRY_SECONDS = 1.0


class RuleEngine:
    """Applies the rules of *settings*; *vm_name* returns null while the name is unknown."""

    def __init__(
        self, settings: ApprovalSettings, *, vm_name: Callable[[], str | None], monotonic: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._vm_name = vm_name
        self._monotonic = monotonic
        self._first_seen: dict[tuple[str, str], float] = {}
        self._next_at = _NEVER

    @property
    def is_waiting(self) -> bool:
        """Return whether a rule will act later."""
        return self._next_at < _NEVER

    def wait_seconds(self) -> float:
        """Return the seconds until a rule may act; infinity when none will."""
        return max(self._next_at - self._monotonic(), 0.05)

    def rule_of(self, consent: PendingApproval, seen: DocumentIndex) -> RuleSettings | None:
        """Return the rule behind *consent* while it still is the one that speaks for the event."""
        event = seen.events.get(consent.event_id)
        if event is None:
            return None
        rule = first_match(self._settings.rules, event, vm_name=self._vm_name())
        return rule if rule is not None and _PREFIX + rule.name == consent.source else None

    def rule(self, judgement: Evaluation, state: ApprovalState, seen: DocumentIndex, drains: RuleCommands) -> None:
        """Add to *judgement* what the rules want now."""
        self._next_at = _NEVER
        now = self._monotonic()
        active = {(event_id, seen.digests[event_id]) for event_id in seen.events}
        self._first_seen = {key: self._first_seen.get(key, now) for key in active}
        if self._vm_name() is None:
            if self._settings.rules and active:
                self._next_at = now + _RETRY_SECONDS
            return
        self._withdraw(judgement, state, seen)
        for event_id, event in seen.events.items():
            key = (event_id, seen.digests[event_id])
            if event.event_status == "Scheduled" and event_id not in seen.ambiguous:
                self._consider(judgement, state, key, event, drains)

    def _consider(
        self,
        judgement: Evaluation,
        state: ApprovalState,
        key: tuple[str, str],
        event: ScheduledEvent,
        drains: RuleCommands,
    ) -> None:
        consent = state.consents.get(key)
        # What was withdrawn while another configuration was in force, or only tried, may be wanted again.
        is_free = consent is None or consent.state == WITHDRAWN
        is_free |= consent is not None and consent.state == DRY_RUN and not self._settings.dry_run
        if not is_free or newest_hold(state.decisions, key) is not None:
            return
        rule = first_match(self._settings.rules, event, vm_name=self._vm_name())
        if rule is None or rule.action != "approve":
            return
        delay = act_delay_seconds(
            rule, event, vm_name=self._vm_name(), fallback_seconds=self._settings.leader_fallback_seconds
        )
        if delay is None:
            return
        due_at = self._first_seen[key] + delay
        if due_at > self._monotonic():
            self._next_at = min(self._next_at, due_at)
            return
        if rule.command is not None and drains.is_full:
            self._next_at = min(self._next_at, self._monotonic() + _RETRY_SECONDS)
            return
        judgement.consents.append(
            PendingApproval(
                event_id=key[0],
                event_digest=key[1],
                state=WANTED if rule.command is None else DRAINING,
                source=_PREFIX + rule.name,
                event=event,
            )
        )

    def _withdraw(self, judgement: Evaluation, state: ApprovalState, seen: DocumentIndex) -> None:
        """Take back what a rule wanted that is not there any more, or says something else now."""
        for consent in state.consents.values():
            if consent.state not in (WANTED, DRAINING) or not consent.source.startswith(_PREFIX):
                continue
            if self.rule_of(consent, seen) is None:
                judgement.consents.append(msgspec.structs.replace(consent, state=WITHDRAWN))
                judgement.refusals.append(
                    Refusal(
                        reason=RefusalReason.SUPERSEDED.value,
                        said="The rule that wanted this is not there any more, or does not match.",
                        source=consent.source,
                        event=consent.event,
                    )
                )
