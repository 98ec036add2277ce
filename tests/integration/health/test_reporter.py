"""Health of the agent: only its own loops make it unhealthy, and every impairment makes it not ready."""

import json
from datetime import datetime, timezone

import pytest
from outbox_kit import RouteAll, append, refuse_writes

from bridge.health.reporter import HealthReporter
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import DeliveryState
from bridge.system.threads import LoopWatch
from bridge.testing.simulator.clock import ManualClock


class Imds:
    def __init__(self):
        self.silent_seconds = 0.4
        self.gap_seconds = 10.0
        self.good_at = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
        self.refused_answer = None


@pytest.fixture
def time():
    return ManualClock()


@pytest.fixture
def loop_watches(time):
    return {"poll": LoopWatch(time.clock), "delivery:webhook": LoopWatch(time.clock)}


@pytest.fixture
def imds():
    return Imds()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def overview(tmp_path, metrics, loop_watches, time, imds):
    outbox = Outbox(tmp_path, clock=time.clock)
    assert outbox.wait_loaded(10)
    outbox.configure(RouteAll("webhook", "old"), ["webhook", "old"], labels={})
    seen = HealthReporter(
        outbox=outbox,
        metrics=metrics,
        directory=tmp_path,
        loop_watches=lambda: loop_watches,
        sinks=lambda: ["webhook"],
        imds=imds,
        imds_endpoint=lambda: "http://imds",
        vm_name=lambda: "vm1",
        configuration=lambda: "",
    )
    metrics.watch_outbox(outbox, lambda: ["webhook"])
    yield seen
    outbox.close()


def ready(overview):
    answer = overview.readyz()
    report = json.loads(answer.body)
    assert answer.status == (503 if report["reasons"] else 200)
    assert report["status"] == ("not_ready" if report["reasons"] else "ready")
    return report


def test_agent_is_healthy_while_its_loops_run_on_time(overview, loop_watches, time):
    loop_watches["poll"].expect_call_within(150)
    loop_watches["delivery:webhook"].expect_within(300)
    time.advance(190)
    answer = overview.healthz()
    assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok", "late": {}})


def test_stuck_loop_makes_the_agent_unhealthy_until_it_runs_again(overview, loop_watches, time):
    loop_watches["poll"].expect_call_within(5)
    time.advance(100)
    answer = overview.healthz()
    assert (answer.status, json.loads(answer.body)) == (503, {"status": "stuck", "late": {"poll": 64.5}})
    loop_watches["poll"].expect_within(1)
    assert overview.healthz().status == 200


def test_external_failures_do_not_make_the_agent_unhealthy(overview, imds, metrics, time):
    imds.silent_seconds = 1e6
    metrics.sink("webhook").set_needs_attention(needed=True)
    append(overview._outbox, "heartbeat")
    time.advance(1e6)
    assert len(ready(overview)["reasons"]) == 3
    assert overview.healthz().status == 200


def test_agent_is_ready_when_imds_and_every_sink_respond(overview):
    report = ready(overview)
    assert report["reasons"] == []
    assert (report["last_good_poll_at"], report["last_good_poll_seconds_ago"]) == ("2026-11-20T11:00:00.000Z", 0.4)
    assert (report["vm"], report["outbox_behind"], report["outbox_behind_seconds"]) == ("vm1", None, 0)
    assert report["stream_id"] == overview._outbox.read(deliveries.totals).stream_id


@pytest.mark.parametrize(
    ("silent_seconds", "reason"),
    [(None, "IMDS has not responded yet."), (10.5, "The last response from IMDS was 10 s ago."), (9.9, None)],
)
def test_agent_without_imds_responses_is_not_ready(overview, imds, silent_seconds, reason):
    imds.silent_seconds = silent_seconds
    assert ready(overview)["reasons"] == [reason] * bool(reason)


@pytest.mark.parametrize("silent_seconds", [None, 35.0])
def test_invalid_document_is_reported_as_the_reason(overview, imds, silent_seconds):
    imds.silent_seconds = silent_seconds
    imds.refused_answer = "GET http://imds: The answer is larger than 4 MiB."
    [reason] = ready(overview)["reasons"]
    assert "IMDS" in reason
    assert "larger than 4 MiB" in reason
    imds.silent_seconds = 0.4
    assert ready(overview)["reasons"] == []


def test_overdue_record_makes_the_agent_not_ready_until_it_is_removed(overview, time):
    [record] = append(overview._outbox, "heartbeat")
    time.advance(300)
    assert ready(overview)["oldest_pending_seconds"] == 300
    assert ready(overview)["reasons"] == []
    time.advance(1)
    assert ready(overview)["reasons"] == ["Sink webhook is stuck: its oldest record has waited 301 s."]
    overview._outbox.record_results("webhook", [record.sequence], DeliveryState.PARKED)
    report = ready(overview)
    assert report["reasons"] == []
    assert report["sinks"]["webhook"]["parked"] == 1
    # A sink that is not configured is listed, but does not delay a rollout.
    assert report["sinks"]["old"]["oldest_pending_seconds"] == 301


def test_outbox_that_is_behind_is_not_ready(overview, monkeypatch):
    refuse_writes(monkeypatch, OSError(5, "Input/output error"))
    append(overview._outbox, "heartbeat")
    assert not overview._outbox.wait_saved(0.5)
    report = ready(overview)
    assert report["reasons"] == ["The outbox is not saved: [Errno 5] Input/output error."]
    assert report["outbox_behind_seconds"] > 0
    assert "scheduled_events_bridge_outbox_behind_seconds 0.0" not in overview.scrape().body.decode()
    assert overview.healthz().status == 200


def test_sink_that_needs_attention_makes_the_agent_not_ready(overview, metrics):
    metrics.sink("webhook").set_needs_attention(needed=True)
    assert ready(overview)["reasons"] == ["Sink webhook needs attention. `status` shows its last error."]
    assert ready(overview)["sinks"]["webhook"]["needs_attention"] is True
    metrics.sink("webhook").set_needs_attention(needed=False)
    assert ready(overview)["reasons"] == []
