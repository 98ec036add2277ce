"""What is said of an event once Azure took an approval of it: nobody stops it any more. Pure.

The agent's record `approved` says so, with the result `accepted`, or `already_approved` where it came second. A dry run
told Azure nothing, and a refusal neither: there, everything can still be decided.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.approval.digest import digest
from bridge.clock import parse_time
from bridge.events.record import Transition, TransitionRecord
from bridge.portal.fleet import State
from bridge.portal.store.stories import EventStory
from bridge.portal.verdicts import Verdict, Word, people_of

_TAKEN = frozenset({"accepted", "already_approved"})
_RULE = "rule:"


class ToldAzure(msgspec.Struct, frozen=True, kw_only=True):
    """That Azure took an approval."""

    at: str
    """When the agent that told Azure wrote its record."""
    by: str
    """Who approved, as a sentence names them; nothing: nobody knows."""
    verdicts: tuple[Verdict, ...]
    """What people said here that the approval rests on; (): it came from elsewhere, or from a rule."""

    @property
    def clock(self) -> str:
        """Return the time of day."""
        return f"{parse_time(self.at):%H:%M:%S} UTC"

    @property
    def sentence(self) -> str:
        """Return what a page and an answer say of it while Azure shows the event as announced."""
        approved = f"Approved by {self.by}" if self.by else "Approved"
        return f"{approved}; Azure was told at {self.clock}: it may start at any moment and can no longer be stopped."


def told_azure(story: EventStory) -> ToldAzure | None:
    """Return that Azure took an approval of the event; None: no agent said so.

    While the event is announced only an approval of the event as it stands counts: what Azure changed after an approval
    may be held.
    """
    accepted = [each for each in story.outcomes if is_accepted(each)]
    if story.event.state is State.SCHEDULED:
        accepted = [each for each in accepted if each.event is not None and digest(each.event) == story.event.digest]
    if not accepted:
        return None
    first = min(accepted, key=lambda each: (parse_time(each.observed_at), each.id))
    verdicts = _verdicts_behind(first, story)
    return ToldAzure(at=first.observed_at, by=people_of(verdicts) or _approver_of(first), verdicts=verdicts)


def is_accepted(record: TransitionRecord) -> bool:
    """Return whether *record* says that Azure took an approval."""
    approval = record.approval
    return record.transition is Transition.APPROVED and approval is not None and approval.result in _TAKEN


def _verdicts_behind(record: TransitionRecord, story: EventStory) -> tuple[Verdict, ...]:
    """Return the approvals that stood when the portal signed the decisions behind *record*."""
    hashes = set() if record.approval is None else set(record.approval.jws_sha256)
    signed = [each for each in story.decisions if each.jws_sha256 in hashes and each.verdict_id is not None]
    if not signed:
        return ()
    at = max(each.made_at for each in signed)
    named = {each.verdict_id for each in signed}
    digests = {each.digest for each in story.verdicts if each.verdict_id in named}
    return tuple(each for each in _approvals(story.verdicts) if each.digest in digests and _stood(each, at))


def _approvals(verdicts: Iterable[Verdict]) -> Iterable[Verdict]:
    return (each for each in verdicts if each.word is Word.APPROVE)


def _stood(verdict: Verdict, at: str) -> bool:
    return verdict.made_at <= at < verdict.expires_at and (verdict.withdrawn_at is None or verdict.withdrawn_at >= at)


def _approver_of(record: TransitionRecord) -> str:
    approval = record.approval
    if approval is None:
        return ""
    if approval.source.startswith(_RULE):
        return f"the rule {approval.source.removeprefix(_RULE)} of {record.vm.name or record.vm.vm_id or 'a VM'}"
    return ", ".join(dict.fromkeys(approval.approvers))
