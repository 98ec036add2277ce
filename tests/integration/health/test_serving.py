"""/serving: one row for each sentence on when this VM gets traffic, with the agent's outbox and a manual clock."""

from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from bridge.config.settings import ServingSettings
from bridge.events.event import Document, ScheduledEvent, VmIdentity
from bridge.events.record import Evidence, Transition, new_record
from bridge.health.serving import Serving
from bridge.outbox.outbox import Outbox
from bridge.testing import ManualClock

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
VM = "vm_0"


class Watched:
    document = None
    silent_seconds = 0.0
    gap_seconds = 10.0


class Bench:
    """An outbox and /serving on it, restarted at will."""

    def __init__(self, directory):
        self.directory, self.clock, self.watched = directory, ManualClock(NOW), Watched()
        self.settings, self.vm_name, self.outbox = ServingSettings(), VM, None
        self.start()

    def start(self):
        if self.outbox is not None:
            self.outbox.close()
        self.outbox = Outbox(self.directory)
        assert self.outbox.wait_loaded(30)
        self.outbox.configure(lambda *_: [], [], labels={})
        self.outbox.identify(VmIdentity(name=VM, vm_id="V"))
        self.serving = Serving(
            self.outbox,
            self.watched,
            settings=self.settings,
            vm_name=lambda: self.vm_name,
            clock=self.clock.clock,
        )

    def restart(self, *, after_seconds=1.0):
        """Restart. The agent has the stored document, but no response of IMDS yet."""
        self.watched.silent_seconds = None
        self.clock.advance(after_seconds)
        self.start()

    def show(self, *events):
        self.watched.document, self.watched.silent_seconds = Document(events=events), 0.0

    def silence(self, seconds):
        self.watched.silent_seconds = (self.watched.silent_seconds or 0.0) + seconds
        self.clock.advance(seconds)

    def end(self, event, evidence, *left):
        """Record the ending of *event*, and show *left*."""
        self.show(*left)
        change = new_record(Transition.COMPLETED, self.clock.clock.now(), evidence=evidence, event=event)
        records = self.outbox.append_observation(self.watched.document, [change], active_event_ids=None)
        self.serving.observe(records)

    @property
    def status(self):
        return self.serving.page().status


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.outbox.close()


def event(status="Scheduled", seconds=60.0, **fields):
    not_before = None if status == "Started" or seconds is None else NOW + timedelta(seconds=seconds)
    values = {"event_id": "A", "event_type": "Reboot", "resources": (VM,), "not_before": not_before, **fields}
    return ScheduledEvent(event_status=status, **values)


@pytest.mark.parametrize(
    ("shown", "settings", "status"),
    [
        (event(seconds=901), {}, 200),
        (event(seconds=900), {}, 503),
        (event(seconds=61), {"before_seconds": 60}, 200),
        (event(seconds=None), {"before_seconds": 0}, 503),
        (event("Started"), {"before_seconds": 0}, 503),
        (event(event_type="Redeploy"), {}, 503),
        (event(event_type="Preempt"), {}, 503),
        (event(event_type="Terminate"), {}, 503),
        (event("Started", event_type="Freeze"), {}, 200),
        (event("Started", event_type="SpotRebalanceRecommendation"), {}, 200),
        (event("Started", event_type="Freeze"), {"event_types": ("Freeze",)}, 503),
        (event("Started", duration_seconds=8), {"min_duration_seconds": 9}, 200),
        (event("Started", duration_seconds=9), {"min_duration_seconds": 9}, 503),
        (event("Started", duration_seconds=None), {"min_duration_seconds": 9}, 503),
        (event("Started", resources=("vm_1",)), {}, 200),
        (event("Started", resources=("vm_1", "VM_0")), {}, 503),
        (event("Started", resources=()), {}, 200),
        (event("Completed", resources=(VM,)), {}, 200),
    ],
)
def test_event_takes_the_vm_out_of_service(bench, shown, settings, status):
    bench.settings = ServingSettings(**settings)
    bench.start()
    bench.show(shown)
    assert bench.status == status


def test_scheduled_event_takes_the_vm_out_of_service_at_its_time(bench):
    bench.show(event(seconds=1000))
    assert bench.status == 200
    bench.clock.advance(100)
    page = bench.serving.page()
    assert (page.status, page.body) == (503, b"Reboot A is Scheduled.\n")


@pytest.mark.parametrize(("resources", "status"), [(("vm_1",), 503), ((), 200)])
def test_every_event_with_resources_counts_while_the_vm_name_is_unknown(bench, resources, status):
    bench.vm_name = None
    bench.show(event(resources=resources))
    assert bench.status == status


def test_reboot_that_becomes_a_freeze_keeps_the_vm_out_until_its_end(bench):
    bench.show(event())
    assert bench.status == 503
    freeze = event("Started", event_type="Freeze")
    bench.show(freeze)
    assert bench.status == 503
    bench.end(freeze, Evidence.OBSERVED)
    assert bench.status == 200


def test_vm_returns_only_after_both_overlapping_events_end(bench):
    first, second = event("Started"), event("Started", event_id="B")
    bench.show(first, second)
    assert bench.status == 503
    bench.end(first, Evidence.OBSERVED, second)
    assert bench.status == 503
    bench.end(second, Evidence.BOOT_ID)
    assert bench.status == 200


@pytest.mark.parametrize("evidence", [Evidence.INFERRED, Evidence.UNKNOWN])
def test_vm_stays_out_of_service_for_a_period_after_an_unproven_ending(bench, evidence):
    bench.show(event())
    assert bench.status == 503
    bench.end(event(), evidence)
    bench.clock.advance(59)
    assert bench.status == 503
    assert b"ended without proof" in bench.serving.page().body
    bench.restart()
    bench.show()
    assert bench.status == 200


def test_postponed_event_keeps_the_vm_out_of_service(bench):
    bench.show(event())
    assert bench.status == 503
    bench.show(event(seconds=86_400))
    assert bench.status == 503


def test_agent_restart_does_not_change_the_response(bench):
    bench.show(event())
    assert bench.status == 503
    freeze = event(event_type="Freeze")
    bench.watched.document = Document(events=(freeze,))
    bench.restart()
    assert bench.status == 503
    bench.show(freeze)
    assert bench.status == 503


def test_unrecorded_ending_counts_as_unproven(bench):
    bench.show(event())
    assert bench.status == 503
    bench.restart()
    bench.show()
    assert bench.status == 503
    bench.clock.advance(61)
    assert bench.status == 200


def test_vm_without_stored_state_is_in_service(bench):
    bench.watched.silent_seconds = None
    assert bench.status == 200


def test_response_does_not_change_while_imds_is_silent(bench):
    bench.show(event(seconds=1000))
    assert bench.status == 200
    bench.silence(200)
    assert bench.status == 200
    bench.show(event(seconds=1000))
    assert bench.status == 503
    bench.silence(3000)
    assert bench.status == 503


@pytest.mark.parametrize(("shown", "seconds"), [(event("Started"), 3600), (event(seconds=600), 4200)])
def test_vm_returns_with_an_error_log_after_an_hour_without_imds(bench, caplog, shown, seconds):
    bench.show(shown)
    assert bench.status == 503
    bench.silence(seconds - 1)
    assert bench.status == 503
    bench.silence(1)
    assert [bench.status, bench.status] == [200, 200]
    assert [line.levelname for line in caplog.records if "silent for an hour" in line.message] == ["ERROR"]
    bench.show(msgspec.structs.replace(shown, event_type="Freeze"))
    assert bench.status == 503
