"""The poller with a real outbox. Responses of IMDS come from a list, and time from a manual clock."""

import logging
import queue
import random
import sys
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from document_kit import STALE_PATTERNS
from outbox_kit import RouteAll
from waiting import until

from bridge.errors import DocumentInvalid, ImdsStatus, ImdsUnreachable, OutboxError
from bridge.events.event import Document, ScheduledEvent, VmIdentity
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.polling.poller import Poller
from bridge.system.threads import run_daemon
from bridge.testing import ManualClock
from sinks.command import CommandConfig, CommandSink

START = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
VM = "spot-node_3"


class ListedImds:
    def __init__(self):
        self.answer = None
        self.deadline_seconds = 5.0

    def scheduled_events(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Identity:
    """The identity of this VM, known from the start."""

    vm = VmIdentity(name=VM)
    is_waiting = False


class Log(logging.Handler):
    """Calls *note* with each line that the poll logs of a record."""

    def __init__(self, note):
        super().__init__()
        self._note = note

    def emit(self, line):
        if hasattr(line, "transition"):
            self._note(line)


class Bench:
    """An agent's poll, restarted at will."""

    def __init__(self, directory):
        self.directory, self.clock, self.imds, self.identity = directory, ManualClock(START), ListedImds(), Identity()
        self.told = []
        self.outbox = self.poller = None
        self._log = Log(self.note)
        logging.getLogger("bridge.polling.poller").addHandler(self._log)
        self.start()

    def note(self, line):
        self.told.append((line.transition, line.evidence))

    def close(self):
        logging.getLogger("bridge.polling.poller").removeHandler(self._log)
        self.outbox.close()

    def start(self, *, boot_id="boot-1", seconds_since_boot=0.0, identify=True):
        self.outbox = opened(self.directory, clock=self.clock.clock, boot_id=boot_id)
        self.outbox.configure(RouteAll("here"), ["here"], labels={})
        if identify:
            self.outbox.identify(VmIdentity(name=VM, vm_id="V"))
        self.poller = Poller(
            self.imds,
            self.outbox,
            self.identity,
            metrics=Metrics(),
            boot_id=boot_id,
            seconds_since_boot=seconds_since_boot,
            poll_interval_seconds=1.0,
            clock=self.clock.clock,
        )

    def restart(self, *, after_seconds=1.0, boot_id="boot-1", seconds_since_boot=0.0, cleanly=True, identify=True):
        if cleanly:
            stop = threading.Event()
            stop.set()
            self.poller.run(stop)
        self.outbox.close()
        self.clock.advance(after_seconds)
        self.start(boot_id=boot_id, seconds_since_boot=seconds_since_boot, identify=identify)

    def poll(self, answer, *, times=1, after_seconds=1.0):
        self.imds.answer = answer
        for _ in range(times):
            self.clock.advance(after_seconds)
            delay = self.poller.poll_once()
        return delay

    @property
    def stored(self):
        assert self.outbox.wait_saved(30)
        return [row.record for row in self.outbox.select("here", list)]


def opened(directory, **options):
    outbox = Outbox(directory, **options)
    assert outbox.wait_loaded(30)
    return outbox


def confirmed(bench, answer):
    """Poll until five responses agree."""
    bench.poll(answer, times=5)


@pytest.fixture
def bench(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    made = Bench(tmp_path)
    yield made
    made.close()


def document(incarnation, *events):
    return Document(incarnation=incarnation, events=events)


def event(status="Scheduled", **fields):
    fields = {"event_type": "Preempt", "resources": (VM,), "not_before": START + timedelta(seconds=30), **fields}
    return ScheduledEvent(event_id="P-1", event_status=status, **fields)


def test_first_document_waits_for_the_identity_except_for_urgent_events(bench):
    freeze = ScheduledEvent(event_id="F-1", event_status="Scheduled", event_type="Freeze", resources=(VM,))
    bench.identity.is_waiting = True
    bench.poll(document(1, freeze, event()), times=4)
    assert [record.event.event_id for record in bench.stored] == ["P-1"]
    bench.identity.is_waiting = False
    bench.poll(document(1, freeze, event()))
    assert "F-1" in [record.event.event_id for record in bench.stored]
    bench.identity.is_waiting = True  # as after a reload
    bench.poll(document(2, event("Started")))
    assert bench.told[-1] == ("started", "observed")


def test_absent_reboot_after_a_boot_within_its_time_is_completed(bench):
    bench.poll(document(1, event(event_type="Reboot")))
    bench.restart(after_seconds=120, boot_id="boot-2")
    confirmed(bench, document(2))
    assert bench.told == [("scheduled", "observed"), ("completed", "boot_id")]


def test_boot_before_not_before_does_not_end_a_reboot_despite_a_late_response(bench):
    """A reboot by the user during the notice period, and a service that responds only after NotBefore."""
    bench.poll(document(1, event(event_type="Reboot", not_before=START + timedelta(minutes=15))))
    bench.restart(after_seconds=60, boot_id="boot-2")
    bench.poll(ImdsUnreachable("silent"), times=1200)
    confirmed(bench, document(2))
    assert bench.told == [("scheduled", "observed"), ("ended", "unknown")]


def test_stale_front_end_ends_no_event_across_agent_restarts(bench):
    for minute in range(4):
        for _ in range(30):
            bench.poll(document(4, event("Started")))
            bench.poll(document(5))
        bench.restart(cleanly=minute % 2 == 0)
    endings = [told for told in bench.told if told[0] in {"completed", "canceled", "ended"}]
    assert len(endings) <= 1
    bench.poll(document(5), times=302)
    assert bench.told[-1] == ("completed", "inferred")


def test_reload_polls_once_and_then_waits_for_the_interval(bench):
    stop, polls = threading.Event(), queue.SimpleQueue()
    bench.imds.scheduled_events = lambda: polls.put(None) or document(4)
    bench.poller.reconfigure(bench.imds, bench.identity, poll_interval_seconds=60.0)
    running = run_daemon("poll", bench.poller.run, stop)
    polls.get(timeout=10)
    time.sleep(0.2)  # the poll ends, and the poller waits
    bench.poller.reconfigure(bench.imds, bench.identity, poll_interval_seconds=60.0)
    polls.get(timeout=10)
    with pytest.raises(queue.Empty):
        polls.get(timeout=0.3)
    stop.set()
    bench.poller.wake()
    running.result(10)


@pytest.mark.skipif(sys.platform == "win32", reason="the drain script is a shell script")
@pytest.mark.parametrize("interval", [1.0, 60.0])
@pytest.mark.parametrize("is_stale", STALE_PATTERNS)
@pytest.mark.parametrize("incarnation", [4, 5, None])
@pytest.mark.parametrize("status", [None, "Scheduled"])
def test_a_drain_script_runs_once_in_ten_minutes_of_stale_responses(bench, status, incarnation, is_stale, interval):
    chance, stale = random.Random(24), document(incarnation, *([event(status)] if status else []))
    true, came_back, position = document(5, event("Started")), False, 0
    bench.poller.reconfigure(bench.imds, bench.identity, poll_interval_seconds=interval)
    delay, until_seconds = bench.poll(true), bench.clock.monotonic() + 600
    while bench.clock.monotonic() < until_seconds:
        position += 1
        is_behind = is_stale(position, chance)
        came_back |= is_behind and not stale.events
        delay = bench.poll(stale if is_behind else true, after_seconds=delay)
    delay = bench.poll(true, after_seconds=delay)
    assert runs_of_a_drain_script(bench) == ["started"]
    delay, gone_at = bench.poll(document(6), after_seconds=delay), bench.clock.monotonic()
    while len(bench.told) == 1 and bench.clock.monotonic() < gone_at + 600:
        delay = bench.poll(document(6), after_seconds=delay)
    assert runs_of_a_drain_script(bench) == ["started", "completed"]
    assert bench.clock.monotonic() - gone_at <= (300 if came_back else 6)


def runs_of_a_drain_script(bench):
    """Run the program of a command sink for each record; return the transitions that the program received."""
    runs = bench.directory / "runs"
    runs.write_text("")
    sink = CommandSink(CommandConfig(command=("/bin/sh", "-c", f'echo $SCHEDULED_EVENT_TRANSITION >>"{runs}"')))
    for record in bench.stored:
        sink.send([record])
    sink.close()
    return runs.read_text().split()


@pytest.mark.parametrize(
    "failure",
    [
        ImdsUnreachable("silent"),
        ImdsStatus("busy", status=503),
        DocumentInvalid("no document"),
        OutboxError("odd"),
        RuntimeError("a bug"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_failed_poll_ends_no_event_and_the_next_poll_follows(bench, failure):
    bench.poll(document(1, event("Started")))
    assert bench.poll(failure, times=3) == 1.0
    bench.poll(document(1, event("Started")))
    assert bench.told == [("started", "observed")]


def test_throttled_poll_backs_off_up_to_a_limit(bench):
    bench.poll(document(1))
    delays = [bench.poll(ImdsStatus("slow down", status=429, retry_after_seconds=600)) for _ in range(20)]
    assert max(delays) <= 5.0
    assert delays[0] > 1.0
    bench.poll(document(1))
    assert bench.poll(document(1)) == 1.0


def test_outbox_of_another_machine_is_not_continued(bench):
    bench.poll(document(1, event("Started")))
    bench.restart()
    assert bench.outbox.identify(VmIdentity(name=VM, vm_id="OTHER"))
    confirmed(bench, document(2))
    assert bench.told == [("started", "observed")]
    assert bench.stored == []


def test_stored_document_is_compared_after_the_identity_is_confirmed(bench):
    bench.poll(document(1, event("Started", event_type="Freeze")))
    bench.restart(after_seconds=60, boot_id="boot-2", identify=False)
    bench.poll(document(2), times=20)
    assert bench.told == [("started", "observed")]
    assert bench.stored == []
    bench.outbox.identify(VmIdentity(name=VM, vm_id="V"))
    confirmed(bench, document(2))
    assert bench.told[1:] == [("completed", "inferred")]
    assert len(bench.stored) == 2


def test_urgent_event_is_recorded_after_two_seconds_without_an_identity(bench):
    bench.restart(boot_id="boot-2", identify=False)
    bench.poll(document(1, event()), times=2)
    assert bench.told == []
    bench.poll(document(1, event()), times=20)
    assert bench.told == [("scheduled", "observed")]
    assert [record.active_event_ids for record in bench.stored] == [None]


def test_records_list_the_announced_events(bench):
    bench.poll(document(0))
    bench.restart()  # with a stored document, the list is known immediately
    bench.poll(document(1, event()))
    confirmed(bench, document(2))
    assert [record.active_event_ids for record in bench.stored] == [("P-1",), ()]


def test_idle_poll_does_not_write(bench):
    shown = document(1, event())
    bench.poll(shown)

    def files():
        assert bench.outbox.wait_saved(30)
        return {
            path.name: (path.stat().st_size, path.stat().st_mtime_ns)
            for path in bench.directory.glob("*.db*")
            if "shm" not in path.name
        }

    before = files()
    bench.poll(shown, times=500)
    assert files() == before
    bench.poll(shown, times=200)  # writes only the time of the last good response, once in ten minutes
    assert files() != before


def test_only_a_poll_stuck_beyond_its_deadline_is_late(bench):
    asked, release, stop = threading.Event(), threading.Event(), threading.Event()
    bench.imds.scheduled_events = lambda: (asked.set(), release.wait(30), document(1))[-1]
    loop_watch, running = bench.poller.loop_watch, run_daemon("poll", bench.poller.run, stop)
    try:
        assert asked.wait(10)
        bench.clock.advance(bench.imds.deadline_seconds * 1.1 + 29)
        assert loop_watch.late_seconds == 0
        bench.clock.advance(2)
        assert 0 < loop_watch.late_seconds < 2
        release.set()
        until(lambda: loop_watch.late_seconds == 0)
    finally:
        release.set()
        stop.set()
        bench.poller.wake()
        running.result(30)
    bench.clock.advance(1e6)
    assert loop_watch.late_seconds == 0
