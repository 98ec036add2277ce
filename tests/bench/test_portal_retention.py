"""The size of the database over 1,200 days with a retention of 400 days. With BENCH=short, 150 and 50 days."""

import os
from datetime import timedelta

import pytest

pytest.importorskip("sqlalchemy", reason="the extra [portal] is not installed")

from fleet_records import NOW, fleet_record
from fold_kit import add
from sqlalchemy import func, select

from bridge.clock import format_time
from bridge.events.record import Transition
from bridge.portal.audit import Entry, first_fault
from bridge.portal.fleet import key_of_event_id
from bridge.portal.schema import audit, verdicts
from bridge.portal.store.audit import add_entries, all_entries, count
from bridge.portal.store.database import Store
from bridge.portal.store.decisions import NewDecision, decision_hashes, insert_decisions
from bridge.portal.store.retention import delete_old

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

RETENTION_DAYS = 50 if os.environ.get("BENCH") == "short" else 400
VMS_OF_A_DAY = 10
_STEPS = (Transition.SCHEDULED, Transition.STARTED, Transition.COMPLETED)


def add_day(store, day):
    """Add one event with its records, a verdict, and a decision for each VM."""
    names = tuple(f"vm_{vm}" for vm in range(VMS_OF_A_DAY))
    at, key = NOW + timedelta(days=day), key_of_event_id(f"E-{day}")
    for step, transition in enumerate(_STEPS):
        numbers = {"sequence": 3 * day + step + 1, "seconds": 86_400 * day + 60 * step}
        fields = {"event_id": f"E-{day}", "transition": transition, "resources": names}
        records = [fleet_record(vm, **numbers, **fields) for vm in range(VMS_OF_A_DAY)]
        add(store, *records, at=format_time(at + timedelta(minutes=step)))
    until = at + timedelta(hours=1)
    verdict = {
        **dict.fromkeys(("choice", "digest", "person_key", "user_name", "reason", "lifts"), "x"),
        "verdict_id": f"V-{day}",
        "event_key": key,
        "made_at": format_time(at),
        "expires_at": format_time(until),
    }
    store.write(lambda connection: connection.execute(verdicts.insert(), verdict))
    decisions = [
        NewDecision(
            decision="x",
            vm_key=f"vm {vm}",
            event_key=key,
            jws=f"{day} {vm} {'x' * 700}",
            verdict_id=f"V-{day}",
            issued_at_seconds=at.timestamp(),
            expires_at_seconds=int(until.timestamp()),
        )
        for vm in range(VMS_OF_A_DAY)
    ]
    store.write(insert_decisions, decisions, at=format_time(at))
    approved = Entry(actor="x", action="approved", subject=key, details={"decisions": decision_hashes(decisions)})
    store.write(add_entries, [approved], at=format_time(at))
    before = format_time(at - timedelta(days=RETENTION_DAYS))
    while store.write(delete_old, before=before):
        pass


def test_database_size_is_stable_with_retention_and_the_audit_is_valid(tmp_path, figure):
    file = tmp_path / "portal.db"
    store = Store.of_file(file)
    store.migrate()
    sizes = []

    def audit_bytes(connection):
        columns = sum(func.length(column) for column in (audit.c.details, audit.c.actor, audit.c.subject))
        return connection.execute(select(func.sum(columns + 200))).scalar_one()

    for day in range(3 * RETENTION_DAYS):
        add_day(store, day)
        if (day + 1) % RETENTION_DAYS == 0:
            pages = store.read(lambda connection: connection.exec_driver_sql("PRAGMA page_count").scalar_one())
            sizes.append((pages * 4096 / 1e6, store.read(audit_bytes) / 1e6))
    total = store.read(count)
    fault = store.read(lambda connection: first_fault(all_entries(connection), count=total))
    store.close()
    shown = ", ".join(f"{size:.1f} MB, of which {of_audit:.1f} MB audit" for size, of_audit in sizes)
    figure(f"database after one, two, and three times {RETENTION_DAYS} days: {shown}")
    first, second, third = (size - of_audit for size, of_audit in sizes)
    assert fault is None
    # SQLite fills pages completely only as long as no rows are deleted.
    assert second < 1.3 * first
    assert third < 1.1 * second
