"""`events` and `outbox list|retry|discard|move|import`, with a running agent and without."""

import json
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone

import pytest
from click.testing import CliRunner
from outbox_kit import RouteAll, stored_decision

from bridge.agent.control_requests import RecordFilter, Source, read_events, read_undelivered
from bridge.agent.control_socket import ControlServer
from bridge.cli.commands import commands
from bridge.cli.connect import Reader
from bridge.cli.events import moment, print_events
from bridge.cli.outbox import discard, import_file, list_records, move, retry
from bridge.errors import BridgeError, OutboxError
from bridge.outbox import approvals
from bridge.outbox.lock import DirectoryLock
from bridge.outbox.rows import DecisionStage

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=timezone.utc)


class Stage:
    """An outbox, used by an agent or closed."""

    def __init__(self, kit, *, with_agent):
        self.kit, self.with_agent = kit, with_agent
        self.outbox = kit.open()
        self._lock = DirectoryLock(kit.directory)
        self._server = None

    def ready(self):
        """Let the commands run: next to an agent, or after its end."""
        if self.with_agent:
            self._server = ControlServer(self.kit.directory, Source(self.kit.directory, self.outbox).answer)
            self._server.open()
        else:
            assert self.outbox.close()
            self._lock.release()

    def close(self):
        if self._server is not None:
            self._server.close()
        self._lock.release()

    def rows(self, sink="a"):
        page = Reader(self.kit.directory).ask(read_undelivered, sink=sink)
        return [(row.sequence, row.state.value) for row in page.rows]

    def totals(self):
        if self.with_agent:
            return self.kit.totals(self.outbox)
        outbox = self.kit.open(sinks=())
        totals = self.kit.totals(outbox)
        outbox.close()
        return totals


@pytest.fixture(params=["agent", "no agent"])
def stage(kit, request):
    stage = Stage(kit, with_agent=request.param == "agent")
    yield stage
    stage.close()


def listed(capsys, directory, *, limit=50, **wanted):
    """Return the EventId and the status of each record that `events --json` prints."""
    print_events(directory, RecordFilter(**wanted), limit=limit, follow=False, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    return [(event["event_id"], event["event_status"]) for event in (json.loads(line)["event"] for line in lines)]


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_since_accepts_a_duration_or_a_time(text, expected):
    assert moment(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "1", "-1h", "9999999999d"])
def test_since_rejects_other_text(text):
    with pytest.raises(ValueError, match="such as 90s"):
        moment(text, NOW)


@pytest.mark.parametrize(("option", "value"), [("--since", "soon"), ("--type", "reboot")])
def test_a_wrong_filter_of_events_is_reported_with_its_option(tmp_path, option, value):
    result = CliRunner().invoke(commands, ["events", "--state-directory", str(tmp_path), option, value])
    assert result.exit_code == 2
    assert f"Invalid value for {option}: " in result.output


def test_events_filters_by_time_id_and_type_and_the_limit_counts_matches(stage, kit, capsys):
    kit.commit(stage.outbox, kit.event("E-1", event_type="Freeze"), kit.event("E-2"))
    kit.wait(60)
    later = kit.time.timestamp()
    kit.commit(stage.outbox, kit.event("E-1", "Started", event_type="Freeze"), kit.event("E-3"))
    stage.ready()
    one, two, started, three = ("E-1", "Scheduled"), ("E-2", "Scheduled"), ("E-1", "Started"), ("E-3", "Scheduled")
    assert listed(capsys, kit.directory) == [one, two, started, three]
    assert listed(capsys, kit.directory, since=later) == [started, three]
    assert listed(capsys, kit.directory, event_id="e-1") == [one, started]
    assert listed(capsys, kit.directory, event_types=("Reboot",)) == [two, three]
    assert listed(capsys, kit.directory, event_types=("Reboot", "Freeze"), limit=3) == [two, started, three]
    assert listed(capsys, kit.directory, event_id="E-2", limit=1) == [two]
    assert listed(capsys, kit.directory, event_id="E-1", event_types=("Reboot",)) == []


def test_events_includes_delivered_records_and_several_pages(stage, kit, capsys):
    kit.fill(stage.outbox, 1_500, size=1_000)
    kit.settle(stage.outbox, "a", *range(1, 1_001))
    kit.settle(stage.outbox, "b", *range(1, 1_501))
    kit.saved(stage.outbox)
    stage.ready()
    assert [event_id for event_id, _ in listed(capsys, kit.directory, limit=1_400)] == [
        f"F-{number}" for number in range(100, 1_500)
    ]


def test_outbox_list_pages_through_both_states_and_reports_the_limit(stage, kit, capsys):
    kit.fill(stage.outbox, 1_200, size=1_000)
    kit.settle(stage.outbox, "a", 2, state="parked", error="HTTP 422")
    kit.settle(stage.outbox, "b", *range(1, 1_201))
    kit.saved(stage.outbox)
    stage.ready()
    list_records(kit.directory, sink=None, state=None, limit=2_000, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sequence"] for row in rows] == list(range(1, 1_201))
    assert (rows[1]["state"], rows[1]["error"], rows[0]["state"]) == ("parked", "HTTP 422", "pending")
    assert rows[0]["changed_at"].endswith("Z")
    list_records(kit.directory, sink="a", state=None, limit=7, as_json=False)
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 8
    assert err == "Only the first 7 records are listed. Use --limit to list more.\n"
    list_records(kit.directory, sink="a", state="parked", limit=7, as_json=False)
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (2, "")
    list_records(kit.directory, sink="b", state=None, limit=7, as_json=False)
    assert capsys.readouterr() == ("", "No undelivered records.\n")


def test_retry_makes_parked_records_pending(stage, kit, capsys):
    records = kit.commit(stage.outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-3"))
    kit.settle(stage.outbox, "a", 1, 2, state="parked")
    kit.settle(stage.outbox, "b", 1)
    stage.ready()
    for sink, record_id in ((None, "unknown"), ("a", "unknown"), ("b", records[0].id)):
        with pytest.raises(BridgeError, match="Unknown record"):
            retry(kit.directory, sink=sink, record_id=record_id)
    with pytest.raises(BridgeError, match=r"Unknown sink 'c'\. Known sinks: a, b"):
        retry(kit.directory, sink="c", record_id=None)
    assert stage.rows() == [(1, "parked"), (2, "parked"), (3, "pending")]
    retry(kit.directory, sink="a", record_id=records[0].id)
    assert stage.rows() == [(1, "pending"), (2, "parked"), (3, "pending")]
    capsys.readouterr()
    retry(kit.directory, sink=None, record_id=None)
    assert stage.rows() == [(1, "pending"), (2, "pending"), (3, "pending")]
    assert (
        capsys.readouterr().err
        == "All pending records are scheduled for immediate delivery, including 1 parked record. "
        "`status` shows the result.\n"
    )


def test_discard_asks_for_confirmation_with_count_and_age(stage, kit, capsys):
    kit.commit(stage.outbox, kit.event("E-1"))
    kit.wait(60)
    kit.commit(stage.outbox, kit.event("E-2"), kit.event("E-3"))
    kit.settle(stage.outbox, "a", 1, state="parked")
    stage.ready()
    command = ["outbox", "discard", "--state-directory", str(kit.directory), "--sink", "a"]
    answers = [CliRunner().invoke(commands, [*command, *of], input="y\n") for of in (["--state", "pending"], [])]
    never = "Discarded records are never sent. [y/N]: y\n"  # the runner prints the input
    assert [answer.output for answer in answers] == [
        f"Discard 2 records of sink a, the oldest observed at 2026-11-20 11:01:00Z? {never}2 records discarded.\n",
        f"Discard 1 record of sink a, the oldest observed at 2026-11-20 11:00:00Z? {never}1 record discarded.\n",
    ]
    discard(kit.directory, sink="a", record_id=None, state=None, yes=False)  # no record, no question
    assert capsys.readouterr().err == "0 records discarded.\n"
    assert (stage.rows("a"), len(stage.rows("b"))) == ([], 3)
    with pytest.raises(BridgeError, match="Unknown record unknown for sink a"):
        discard(kit.directory, sink="a", record_id="unknown", state=None, yes=True)


def test_move_transfers_records_to_another_sink(stage, kit, capsys):
    kit.commit(stage.outbox, kit.event("E-1"), kit.event("E-2"), kit.event("E-3"))
    kit.settle(stage.outbox, "a", 1, state="parked")
    kit.settle(stage.outbox, "b", 2)
    kit.saved(stage.outbox)
    stage.outbox.change(lambda state: state.count("new"))
    stage.ready()
    with pytest.raises(BridgeError, match="Unknown sink 'newer'"):
        move(kit.directory, "a", "newer")
    with pytest.raises(BridgeError, match="same sink"):
        move(kit.directory, "a", "a")
    move(kit.directory, "a", "new")
    move(kit.directory, "new", "b")
    assert capsys.readouterr().err == (
        "3 records moved from a to new.\n0 records moved from new to b. Already in b: 3 records.\n"
    )
    assert stage.rows("a") == stage.rows("new") == []
    totals = stage.totals()
    assert (totals["a"]["discarded"], totals["new"]["accepted"], totals["new"]["discarded"]) == (3, 3, 3)
    assert (totals["b"]["accepted"], totals["b"]["pending"]) == (3, 2)


def test_move_to_a_current_state_sink_drops_records_older_than_its_own(stage, kit):
    kit.commit(stage.outbox, kit.event("E-1"), kit.event("E-2"))
    kit.commit(stage.outbox, kit.event("E-1", "Started"), transition="started")
    stage.outbox.configure(RouteAll("b", "new"), ("b", "new"), labels={}, current_state_only=("new",))
    kit.settle(stage.outbox, "new", 2, 3)
    kit.saved(stage.outbox)
    stage.ready()
    move(kit.directory, "a", "new")
    if not stage.with_agent:
        stage.outbox = kit.open(sinks=("b", "new"), current_state_only=("new",))
    assert kit.due(stage.outbox, "new") == []
    assert kit.totals(stage.outbox)["new"]["expired"] == 1


def test_later_records_of_a_moved_event_go_to_the_new_sink(stage, kit):
    kit.commit(stage.outbox, kit.event())
    kit.saved(stage.outbox)
    stage.outbox.change(lambda state: state.count("new"))
    stage.ready()
    move(kit.directory, "a", "new")
    outbox = stage.outbox if stage.with_agent else kit.open(sinks=())
    (event,) = outbox.read(lambda state: list(state.events.rows.values()))
    assert event.sinks == {"a": 1, "b": 1, "new": 1}


def recovered(path, to):
    """Copy the outbox at *path* row by row into a file, as ``sqlite3 .recover`` does: without the indexes."""
    with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(to)) as new:
        new.execute("PRAGMA user_version = 1")
        for (sql,) in old.execute("SELECT sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
            new.execute(sql)
        for (name,) in old.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
            for row in old.execute(f"SELECT * FROM {name}"):
                new.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
        new.commit()


def test_import_of_a_recovered_copy_adds_pending_records_and_holds_once(stage, kit, capsys, tmp_path):
    own = kit.commit(stage.outbox, kit.event("E-1"))
    old = type(kit)(tmp_path / "old")
    lost = old.open()
    old.commit(lost, old.event("E-8"), old.event("E-9"), old.event("E-10"))
    old.settle(lost, "a", 1)
    old.settle(lost, "b", 1, 2, 3)
    lost.change(approvals.keep_decisions, [stored_decision("d-1", event_id="E-9", state=DecisionStage.ON_HOLD)])
    assert lost.close()
    recovered(old.directory / "outbox-1.db", tmp_path / "recovered.db")
    stage.ready()
    import_file(kit.directory, tmp_path / "recovered.db")
    assert capsys.readouterr().err == "2 records imported.\n"
    assert [state for _, state in stage.rows()] == ["pending"] * 3
    import_file(kit.directory, tmp_path / "recovered.db")
    assert capsys.readouterr().err == "0 records imported.\n"
    assert len(stage.rows()) == 3
    list_records(kit.directory, sink="a", state=None, limit=10, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["record"]["event"]["event_id"] for row in rows] == ["E-9", "E-10", "E-1"], "imported records are older"
    assert rows[-1]["record"]["id"] == own[0].id
    if not stage.with_agent:
        stage.outbox = kit.open(sinks=())
    assert [each.decision_id for each in stage.outbox.read(approvals.open_decisions)] == ["d-1"]


@pytest.mark.parametrize("content", [None, b"garbage" * 1_000])
def test_import_of_an_invalid_file_changes_nothing(stage, kit, tmp_path, content):
    kit.commit(stage.outbox, kit.event("E-1"))
    stage.ready()
    path = tmp_path / "other.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BridgeError, match=r"other\.db"):
        import_file(kit.directory, path)
    assert stage.rows() == [(1, "pending")]


def test_a_directory_without_an_outbox_is_an_error(tmp_path):
    for directory in (tmp_path / "missing", tmp_path):
        with pytest.raises(OutboxError, match="contains no outbox"):
            Reader(directory).ask(read_events)
        with pytest.raises(OutboxError, match="contains no outbox"):
            import_file(directory, tmp_path / "other.db")
    assert not (tmp_path / "missing").exists()
