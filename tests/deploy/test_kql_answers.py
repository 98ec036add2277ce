"""Results of the KQL queries for the records of two real agents, in Data Explorer and Log Analytics.

Late, lost, duplicate, and rejected records are real records with one change. The queries run in duckdb-kql, which is
not Kusto: see tests/kits/kql/engine.py.
"""

import copy
import json
import os
import re
from datetime import datetime, timedelta, timezone

import pytest
from kql.engine import Database
from kql.files import Kql, header_columns
from kql.fleet import FIRST, SECOND, run_fleet

pytestmark = pytest.mark.deploy

_NOT_FOR_AGENTS = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "SCHEDULED_EVENTS_BRIDGE_CONFIG", "STATE_DIRECTORY")
_ENDS = {"completed", "canceled", "ended"}
_SECOND_OF_DELAY = timedelta(seconds=1)


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Return the CloudEvents of both agents."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_AGENTS}
    return run_fleet(tmp_path_factory.mktemp("fleet"), env)


@pytest.fixture(params=["data-explorer", "log-analytics"])
def ask(request, deploy, package):
    """Return a function that runs a query on arrivals at a given time and returns the rows."""
    engine = package("duckdb_kql")
    kql = Kql(deploy / "azure" / "kql")

    def answer(name, arrivals, *, now, change=lambda query: query):
        database = Database(engine, kql, request.param, arrivals, now=now)
        rows = database.ask(change(kql.queries[name]))
        assert all(list(row) == header_columns(kql.queries[name]) for row in rows)
        return rows

    answer.platform = request.param
    return answer


def _arrivals(events, delay=_SECOND_OF_DELAY):
    """Return *events* as arrivals, each *delay* after its observation by every clock."""
    return [(event, _seen(event) + delay, _seen(event) + delay) for event in events]


def _seen(event):
    return datetime.fromisoformat(event["data"]["observed_at"].replace("Z", "+00:00"))


def _naive(event):
    return _seen(event).replace(tzinfo=None)


def _after(events, **later):
    return max(map(_seen, events)) + timedelta(**later)


def _of(events, vm=None, transition=None, event_id=None):
    """Return the *events* with this VM, transition, and EventId."""
    return [
        event
        for event in events
        if vm in {None, event["data"]["vm"]["name"]}
        and transition in {None, event["data"]["transition"]}
        and event_id in {None, (event["data"]["event"] or {}).get("event_id")}
    ]


def _only(events, *which):
    [event] = _of(events, *which)
    return event


def _with(event, **fields):
    """Return a copy of *event* with *fields* of its record replaced."""
    changed = copy.deepcopy(event)
    changed["data"].update(fields)
    return changed


def _at(event, moment):
    """Return a copy of *event* observed at *moment*, with a new id and sequence."""
    text = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    data = event["data"]
    return _with(event, observed_at=text, id=f"{data['id']} at {text}", sequence=data["sequence"] + 1000)


def _list(value):
    """Return a dynamic value, which the engine returns as a list or as JSON."""
    return json.loads(value) if isinstance(value, str) else value


def _near(seconds):
    return pytest.approx(seconds, abs=0.002)


def test_fleet_timeline_lists_each_event_of_each_vm_once(ask, sent):
    doubled = [*_arrivals(sent), *_arrivals(sent, timedelta(minutes=1))]
    rows = ask("fleet-timeline", doubled, now=_after(sent, hours=1))
    told = {(row["event_id"], row["vm_name"]): row for row in rows}
    assert len(told) == len(rows)
    assert {
        key: (row["event_type"], row["event_source"], row["state"], row["evidence"]) for key, row in told.items()
    } == {
        ("freeze", FIRST): ("Freeze", "Platform", "completed", "observed"),
        ("freeze", SECOND): ("Freeze", "Platform", "completed", "observed"),
        ("reboot", FIRST): ("Reboot", "User", "completed", "observed"),
        ("redeploy", SECOND): ("Redeploy", "Platform", "canceled", "inferred"),
        ("failure", SECOND): ("Reboot", "Platform", "completed", "observed"),
        ("open", FIRST): ("Freeze", "Platform", "started", "observed"),
        ("evicted", SECOND): ("Preempt", "Platform", "started", "observed"),
    }
    for (event_id, vm), row in told.items():
        times = {each["data"]["transition"]: _naive(each) for each in _of(sent, vm, None, event_id)}
        ended = next((times[end] for end in _ENDS if end in times), None)
        assert (row["scheduled_at"], row["started_at"]) == (times.get("scheduled"), times.get("started"))
        assert row["ended_at"] == ended
        assert row["first_seen"] == min(times.values())
        if row["scheduled_at"] and row["started_at"]:
            assert row["lead_seconds"] == _near((row["started_at"] - row["scheduled_at"]).total_seconds())
        else:
            assert row["lead_seconds"] is None
        is_measured = row["started_at"] and ended
        assert row["impact_seconds"] == (_near((ended - times["started"]).total_seconds()) if is_measured else None)
    freeze = told["freeze", FIRST]
    assert freeze["notice_seconds"] == _only(sent, FIRST, "scheduled", "freeze")["data"]["notice_seconds"]
    assert freeze["expected_seconds"] == 5
    assert told["failure", SECOND]["notice_seconds"] is None
    assert [row["first_seen"] for row in rows] == sorted((row["first_seen"] for row in rows), reverse=True)


def test_open_events_lists_overdue_events(ask, sent):
    now = _after(sent, hours=2)
    rows = ask("open-events", _arrivals(sent), now=now)
    assert {(row["event_id"], row["vm_name"], row["event_status"]) for row in rows} == {
        ("open", FIRST, "Started"),
        ("evicted", SECOND, "Started"),
    }
    row = next(row for row in rows if row["event_id"] == "open")
    started = _naive(_only(sent, FIRST, "started", "open"))
    assert row["started_at"] == started
    assert row["expected_end"] == started + timedelta(minutes=30, seconds=9)
    assert row["overdue_seconds"] == _near((now.replace(tzinfo=None) - row["expected_end"]).total_seconds())
    assert row["agent_last_heard"] == max(map(_naive, _of(sent, FIRST)))


def _listing(events, vm, event_ids):
    """Return *events* with *event_ids* as the list of open events in the newest record of *vm*."""
    return [
        *events,
        _with(_at(_of(events, vm, "heartbeat")[-1], _after(events, minutes=1)), active_event_ids=event_ids),
    ]


def test_event_missing_from_the_newest_active_event_ids_is_not_open(ask, sent):
    now = _after(sent, hours=2)
    for event_ids, expected in ((["open"], ["evicted", "open"]), ([], ["evicted"]), (None, ["evicted", "open"])):
        rows = ask("open-events", _arrivals(_listing(sent, FIRST, event_ids)), now=now)
        assert sorted(row["event_id"] for row in rows) == expected


def test_silent_agents_are_listed_with_their_evictions(ask, sent):
    now = _after(sent, hours=1)
    alive = _at(_of(sent, FIRST, "heartbeat")[-1], now - timedelta(minutes=1))
    [row] = ask("silent-agents", _arrivals([*sent, alive]), now=now)
    assert row["vm_name"] == SECOND
    assert (row["last_event_type"], row["last_transition"], row["may_be_gone"]) == ("Preempt", "started", True)
    beats = [_naive(event) for event in _of(sent, SECOND, "heartbeat")]
    assert row["last_heartbeat"] == max(beats)
    assert row["last_heard"] == max(map(_naive, _of(sent, SECOND)))
    mean = (max(beats) - min(beats)).total_seconds() / (len(beats) - 1)
    assert row["usual_seconds"] == _near(mean)


def test_missing_agents_are_listed_vms_that_sent_no_record(ask, sent):
    known = _of(sent, FIRST)[0]["data"]["vm"]["resource_id"]
    absent = f"{known}0"

    def listed(query):
        changed, count = re.subn(r"\[\n.*?\n\]", f'["{known.upper()}", "{absent}"]', query, flags=re.DOTALL)
        assert count == 1
        return changed

    rows = ask("missing-agents", _arrivals(sent), now=_after(sent, hours=1), change=listed)
    assert rows == [{"vm_resource_id": absent}]


def test_notice_counts_each_event_once(ask, sent):
    rows = ask("notice", _arrivals(sent), now=_after(sent, hours=1))
    figures = {(row["event_type"], row["event_source"]): row for row in rows}
    assert {key: (row["events"], row["unannounced"]) for key, row in figures.items()} == {
        ("Freeze", "Platform"): (2, 0),
        ("Reboot", "User"): (1, 0),
        ("Reboot", "Platform"): (1, 1),
        ("Redeploy", "Platform"): (1, 0),
        ("Preempt", "Platform"): (1, 0),
    }
    freezes = figures["Freeze", "Platform"]
    longest = [
        max(event["data"]["notice_seconds"] for event in _of(sent, None, "scheduled", event_id))
        for event_id in ("freeze", "open")
    ]
    assert (freezes["least_seconds"], freezes["most_seconds"]) == (min(longest), max(longest))
    assert figures["Reboot", "Platform"]["median_seconds"] is None


def test_approvals_list_the_approver_and_the_delay_until_the_start(ask, sent):
    approved = _only(sent, FIRST, "approved", "reboot")
    refusal = {
        "source": "portal",
        "decision_id": "d-1",
        "approvers": ["ops"],
        "reason": "now",
        "result": "expired",
        "http_status": None,
    }
    refused = _at(approved, _after(sent, seconds=1))
    refused["data"].update(transition="approval_refused", approval=refusal)
    rows = ask("approvals", _arrivals([*sent, refused, refused]), now=_after(sent, hours=1))
    assert [(row["transition"], row["source"], row["result"], row["decision_id"]) for row in rows] == [
        ("approval_refused", "portal", "expired", "d-1"),
        ("approved", "rule:own-reboots", approved["data"]["approval"]["result"], ""),
    ]
    assert _list(rows[0]["approvers"]) == ["ops"]
    assert (rows[0]["started_seconds"], rows[0]["http_status"]) == (None, None)
    waited = _seen(_only(sent, FIRST, "started", "reboot")) - _seen(approved)
    assert rows[1]["started_seconds"] == _near(waited.total_seconds())
    assert rows[1]["http_status"] == 200
    assert _list(rows[1]["resources"]) == [FIRST]


def test_late_records_use_the_first_arrival(ask, sent):
    """A late duplicate is not a late record. Without an event hub time, the time of the table counts."""
    late = _only(sent, FIRST, "started", "open")
    arrivals = _arrivals([event for event in sent if event is not late])
    arrivals += _arrivals([late], timedelta(hours=1))
    arrivals += _arrivals(_of(sent, SECOND), timedelta(hours=2))
    [row] = ask("late-records", arrivals, now=_after(sent, hours=3))
    assert (row["vm_name"], row["records"], row["late"]) == (FIRST, len(_of(sent, FIRST)), 1)
    assert (row["worst_seconds"], row["worst_id"]) == (_near(3600), late["data"]["id"])
    assert row["worst_at"] == row["last_late_at"] == _naive(late)
    assert row["median_seconds"] == _near(1)


def test_lost_records_are_the_sequence_gaps_of_a_stream(ask, sent):
    mine = sorted(_of(sent, FIRST), key=lambda event: event["data"]["sequence"])
    lost = [mine[2], mine[3], mine[7]]
    came = [event for event in sent if event not in lost]
    doubled = [*_arrivals(came), *_arrivals(came, timedelta(minutes=5))]
    [row] = ask("lost-records", doubled, now=_after(sent, hours=2))
    assert (row["vm_name"], row["lost"], row["holes"]) == (FIRST, 3, 2)
    assert sorted(_list(row["resumes_at"])) == [mine[4]["data"]["sequence"], mine[8]["data"]["sequence"]]
    assert (row["first_sequence"], row["last_sequence"]) == (1, mine[-1]["data"]["sequence"])


def test_records_in_flight_are_not_reported_as_lost(ask, sent):
    hole = max(_of(sent, FIRST), key=lambda event: event["data"]["sequence"] if event in sent[:-5] else 0)
    came = [event for event in sent if event is not hole]
    assert ask("lost-records", _arrivals(came), now=_after(sent, minutes=30)) == []
    assert len(ask("lost-records", _arrivals(came), now=_after(sent, hours=2))) == 1
