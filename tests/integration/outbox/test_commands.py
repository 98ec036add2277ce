"""What `events`, `outbox retry` and `outbox discard` do with an outbox: they list and touch what was asked for."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import click
import pytest

from bridge.cli.events import Wanted, list_events, since
from bridge.cli.outbox import discard, list_deliveries, retry
from bridge.errors import BridgeError
from bridge.outbox.reader import OutboxFile

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.utc)


def listed(capsys, directory, *, limit=50, **wanted):
    """Return the EventId and the status of each record that `events --json` prints."""
    list_events(directory, limit=limit, follow=False, as_json=True, wanted=Wanted(**wanted))
    lines = capsys.readouterr().out.splitlines()
    return [(event["event_id"], event["event_status"]) for event in (json.loads(line)["event"] for line in lines)]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOW - timedelta(seconds=90)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("2d", NOW - timedelta(days=2)),
        ("2026-11-20T11:00Z", NOW - timedelta(hours=1)),
        ("2026-11-20T11:00", NOW - timedelta(hours=1)),
        ("2026-11-20T13:00+02:00", NOW - timedelta(hours=1)),
        ("2026-11-20", NOW - timedelta(hours=12)),
    ],
)
def test_since_takes_a_span_or_a_time(text, moment):
    assert since(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "1", "h", "-1h", "yesterday", "9999999999d", "1h30m"])
def test_since_refuses_what_is_neither(text):
    with pytest.raises(ValueError, match="such as 90s"):
        since(text, NOW)


def test_events_are_listed_by_time_id_and_type_and_the_limit_counts_those(kit, capsys):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1", event_type="Freeze"), kit.event("E-2"))
    later = kit.time + timedelta(seconds=60)
    kit.wait(60)
    kit.commit(outbox, kit.event("E-1", "Started", event_type="Freeze"), kit.event("E-3"))
    one, two, started, three = ("E-1", "Scheduled"), ("E-2", "Scheduled"), ("E-1", "Started"), ("E-3", "Scheduled")
    assert listed(capsys, kit.directory) == [one, two, started, three]
    assert listed(capsys, kit.directory, since=later) == [started, three]
    assert listed(capsys, kit.directory, event_id="e-1") == [one, started]
    assert listed(capsys, kit.directory, event_types=frozenset({"Reboot"})) == [two, three]
    assert listed(capsys, kit.directory, event_types=frozenset({"Reboot", "Freeze"}), limit=3) == [two, started, three]
    assert listed(capsys, kit.directory, event_id="E-2", limit=1) == [two]
    assert listed(capsys, kit.directory, event_id="E-9") == []
    assert listed(capsys, kit.directory, event_id="E-1", event_types=frozenset({"Reboot"})) == []
    assert listed(capsys, kit.directory, event_id="E-1", since=later) == [started]


def test_retry_of_a_record_that_nobody_is_owed_touches_nothing_and_fails(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    kit.settle(outbox, "a", 1, state="parked")
    kit.settle(outbox, "b", 1)
    nudge = kit.directory / "nudge"
    before = nudge.stat().st_mtime_ns
    delivered = OutboxFile(kit.directory).records()[0].id
    for sink, record_id in ((None, "unknown"), ("a", "unknown"), ("b", delivered)):
        with pytest.raises(BridgeError, match="outbox list"):
            retry(kit.directory, sink=sink, record_id=record_id)
    assert nudge.stat().st_mtime_ns == before
    assert [row.state for row in OutboxFile(kit.directory).deliveries("a")] == ["parked"]
    retry(kit.directory, sink="a", record_id=delivered)
    assert [row.state for row in OutboxFile(kit.directory).deliveries("a")] == ["pending"]


def test_discard_says_how_many_and_of_when_before_it_asks(kit, capsys, monkeypatch):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    kit.wait(60)
    kit.commit(outbox, kit.event("E-2"))
    asked = []
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text))
    discard(kit.directory, sink="a", record_id=None, state=None, yes=False)
    assert asked == [
        "Discard 2 records of a, observed 2026-11-20 11:00:00Z to 2026-11-20 11:01:00Z? They are never sent."
    ]
    assert "2 records discarded." in capsys.readouterr().err
    discard(kit.directory, sink="a", record_id=None, state=None, yes=False)
    assert len(asked) == 1, "there is nothing left to ask about"


def test_discard_of_a_record_that_is_not_owed_fails(kit):
    outbox = kit.open()
    kit.commit(outbox, kit.event("E-1"))
    with pytest.raises(BridgeError, match="Sink a is not owed the record unknown"):
        discard(kit.directory, sink="a", record_id="unknown", state=None, yes=True)
    assert [row.state for row in OutboxFile(kit.directory).deliveries("a")] == ["pending"]


@pytest.mark.parametrize("columns", [80, 120])
def test_lists_fit_a_terminal_and_lose_nothing(kit, capsys, monkeypatch, columns):
    outbox = kit.open()
    kit.commit(outbox, kit.event("C7061BAC-AFDC-4513-B24B-AA5F13A16123", resources=("WestNO_0", "WestNO_1")))
    kit.settle(outbox, "a", 1, state="parked")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    list_events(kit.directory, limit=50, follow=False, as_json=False)
    list_deliveries(kit.directory, sink=None, state="owed", limit=50, as_json=False)
    out = click.unstyle(capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= columns
    record = OutboxFile(kit.directory).records()[0]
    for word in (record.event.event_id, record.id, "WestNO_0, WestNO_1", "parked", "pending"):
        assert word in out
