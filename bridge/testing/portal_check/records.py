"""Sends the records of an invented event to a portal (sections 1 and 9 of PROTOCOL.md).

The event names only the checked VM, and does not exist in Azure. If an agent runs on this VM, it refuses each decision
on the event with the reason `event_unknown`, so the check never starts maintenance.
"""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

from bridge.approval.decision_token import Claims
from bridge.clock import format_time
from bridge.events.event import VmIdentity, encode
from bridge.events.record import Approval, Transition, TransitionRecord
from bridge.events.stream import new_stream_id
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import CheckClient
from bridge.testing.portal_check.requirements import Requirement
from bridge.testing.records import sample_event, sample_record

_NOTICE = timedelta(hours=2)
_SUCCESS = range(200, 300)
_SUBSCRIPTION = "00000000-0000-4000-8000-000000000000"
_NAME = "portal-check"  # of the VM and its resource group


class MadeUpEvent:
    """An invented event of the VM *vm_id*, and its records."""

    def __init__(self, vm_id: str) -> None:
        self._now = datetime.now(timezone.utc)
        self._stream_id = new_stream_id(self._now, None)
        group = f"/subscriptions/{_SUBSCRIPTION}/resourceGroups/{_NAME}"
        self._vm = VmIdentity(
            name=_NAME,
            vm_id=vm_id,
            resource_id=f"{group}/providers/Microsoft.Compute/virtualMachines/{_NAME}",
            subscription_id=_SUBSCRIPTION,
            resource_group=_NAME,
        )
        not_before = (self._now + _NOTICE).replace(microsecond=0)
        self.event = sample_event(
            event_id=str(uuid.uuid4()).upper(),
            resources=(_NAME,),
            not_before=not_before,
            not_before_raw=format_datetime(not_before, usegmt=True),
            description="A test of the portal. This event does not exist.",
        )
        self.record = self._record(1, Transition.SCHEDULED)

    def outcome(self, claims: Claims) -> TransitionRecord:
        """Return the record that reports a dry run of the decision in *claims*."""
        approval = Approval(
            source="portal",
            decision_id=claims.decision_id,
            approvers=(claims.approver,),
            reason="portal-check: nothing was sent to Azure.",
            result="dry_run",
        )
        return self._record(2, Transition.APPROVED, approval)

    def end(self) -> TransitionRecord:
        """Return the record that ends the event, so that the portal no longer shows the event."""
        return self._record(3, Transition.CANCELED)

    def _record(self, sequence: int, transition: Transition, approval: Approval | None = None) -> TransitionRecord:
        return sample_record(
            sequence,
            id=str(uuid.uuid4()),
            transition_key=f"{uuid.uuid4().int:064x}",
            stream_id=self._stream_id,
            active_event_ids=None,  # a list would end the other open events of the VM
            transition=transition,
            observed_at=format_time(self._now),
            incarnation=sequence,
            previous_incarnation=sequence - 1,
            event=self.event,
            notice_seconds=_NOTICE.total_seconds(),
            vm=self._vm,
            labels={},
            approval=approval,
        )


def cloudevent(record: TransitionRecord) -> bytes:
    """Return *record* in the format of the `webhook` sink."""
    event = {
        "specversion": "1.0",
        "id": record.id,
        "source": record.vm.resource_id,
        "type": f"io.scheduled-events-bridge.transition.{record.transition.value}.v1",
        "subject": None if record.event is None else record.event.event_id,
        "time": record.observed_at,
        "datacontenttype": "application/json",
        "sequence": f"{record.sequence:020d}",
        "data": json.loads(encode(record)),
    }
    return json.dumps(event).encode()


def send(asker: CheckClient, report: Report, url: str, requirement: Requirement, record: TransitionRecord) -> bool:
    """Send *record*, and report the result for *requirement*.

    Return whether the portal accepted the record.
    """
    exchange = asker.post(url, cloudevent(record))
    detail = f"{exchange.result}. Expected: 2xx."
    return report.check(requirement, exchange, is_met=exchange.status in _SUCCESS, otherwise=detail)
