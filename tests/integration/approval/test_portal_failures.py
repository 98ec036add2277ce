"""After each portal failure, the poller continues, discards the response, and logs the failure once."""

import itertools
import logging
from datetime import datetime, timezone

import pytest
from poller_kit import VM, Rest, all_log_text, log_lines
from waiting import until

from bridge.approval.decision_token import RefusedDecision, verify
from bridge.approval.refusal_reasons import RefusalReason
from bridge.clock import Clock
from bridge.metrics.metrics import Metrics
from bridge.testing import ManualClock
from bridge.testing.http_peer import HttpPeer

# Failures.

TROUBLES = {
    "401": ({"kind": "status", "status": 401}, logging.ERROR),
    "404": ({"kind": "status", "status": 404}, logging.ERROR),
    "429": ({"kind": "status", "status": 429}, logging.WARNING),
    "500": ({"kind": "status", "status": 500}, logging.WARNING),
    "304": ({"kind": "status", "status": 304, "body": ""}, logging.WARNING),
    "redirect": ({"kind": "redirect"}, logging.ERROR),
    "disconnect": ({"kind": "disconnect"}, logging.WARNING),
    "garbage": ({"kind": "garbage"}, logging.WARNING),
    "truncated": ({"kind": "truncated"}, logging.WARNING),
    "cut": ({"kind": "cut"}, logging.WARNING),
    "huge": ({"kind": "oversize"}, logging.WARNING),
    "list": ({"kind": "garbage", "body": "[]"}, logging.WARNING),
    "no index": ({"kind": "garbage", "body": '{"decisions": []}'}, logging.WARNING),
    "negative index": ({"kind": "garbage", "body": '{"index": -1, "decisions": ["x"]}'}, logging.WARNING),
    "great index": ({"kind": "garbage", "body": '{"index": 9007199254740992, "decisions": []}'}, logging.WARNING),
    "text index": ({"kind": "garbage", "body": '{"index": "5", "decisions": ["x"]}'}, logging.WARNING),
    "decisions are a text": ({"kind": "garbage", "body": '{"index": 5, "decisions": "x"}'}, logging.WARNING),
    "nested": ({"kind": "garbage", "body": '{"a": ' + "[" * 50_000}, logging.WARNING),
    "too many": (
        {"kind": "garbage", "body": '{"index": 5, "decisions": [' + '"x",' * 1_000 + '"x"]}'},
        logging.WARNING,
    ),
}


ODD_DECISIONS = {
    "lone surrogate": rb'"\ud800"',
    "surrogates the wrong way round": rb'"\udc00\ud800"',
    "no UTF-8": b'"\xff"',
    "number": b"5",
    "null": b"null",
    "true": b"true",
    "list": b'["x"]',
    "object": rb'{"a": "\ud800"}',
    "empty": b'""',
    "too long": b'"' + b"x" * 9_000 + b'"',
}


@pytest.mark.parametrize("odd", ODD_DECISIONS.values(), ids=ODD_DECISIONS)
def test_non_text_decision_does_not_affect_other_decisions(odd, desk, start):
    with HttpPeer() as peer:
        peer.say(200, body=b'{"index": 5, "decisions": ["before", ' + odd + b', "after"]}')
        start(f"http://{peer.address.authority}/api/v1")
        assert desk.has("before", "after")

    before, told, after = desk.tokens[:3]
    assert (before, after) == ("before", "after")
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with pytest.raises(RefusedDecision) as refused:
        verify(told, keys=(), audience=VM, now=now, created_at=now)
    assert refused.value.reason is RefusalReason.MALFORMED


@pytest.mark.parametrize("trouble", TROUBLES)
def test_invalid_response_is_discarded_and_the_decision_arrives_later(trouble, portal, desk, start, caplog):
    caplog.set_level(logging.INFO)
    fault, level = TROUBLES[trouble]
    metrics = Metrics()
    portal.put(VM, "a")
    start(portal, wait=lambda stop, _: stop.wait(0.01), metrics=metrics.approval_channel())
    assert desk.has("a")
    assert portal.wait_for_requests(2)
    asked = len(portal.requests)
    portal.strike(**fault, count=5)
    portal.put(VM, "pending")
    assert desk.has("pending")

    assert {request.index for request in portal.requests[asked:][:5]} == {2}
    assert desk.tokens == ["a", "pending"]
    until(lambda: len(log_lines(caplog)) == 2)
    assert [record.levelno for record in log_lines(caplog)] == [level, logging.INFO]
    assert b"scheduled_events_bridge_approval_channel_up 1.0" in metrics.exposition()


def test_silent_request_ends_at_its_deadline_and_the_decision_arrives_later(portal, desk, start):
    portal.strike("silence", count=5)
    portal.put(VM, "pending")
    start(portal, remote={"wait_seconds": 0.2}, grace_seconds=0.2, wait=lambda stop, _: stop.wait(0.01))
    assert desk.has("pending")
    gaps = [later.at_seconds - earlier.at_seconds for earlier, later in itertools.pairwise(portal.requests[:6])]

    assert min(gaps) < 0.4 * 1.1 + 0.3  # later gaps may grow on a busy machine


@pytest.mark.parametrize(("header", "delay"), [("9", 9.0), ("100000", 3_600.0)])
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_respected(portal, desk, start, status, header, delay):  # noqa: PLR0917  # fixtures
    rest = Rest(ManualClock())
    portal.strike("status", status=status, retry_after_seconds=int(header), count=2)
    portal.put(VM, "pending")
    start(portal, wait=rest)
    assert desk.has("pending")

    assert rest.delays[:2] == [delay, delay]


def test_exception_in_the_receiver_loses_no_decision(portal, desk, start, caplog):
    desk.fails = 3
    portal.put(VM, "tok-1", "tok-2")
    start(portal, wait=lambda stop, _: stop.wait(0.01))
    assert desk.has("tok-1", "tok-2")
    portal.put(VM, "tok-3")
    assert desk.has("tok-3")

    assert desk.tokens == ["tok-1", "tok-2", "tok-3"]
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "RuntimeError" in logging.Formatter().format(line)
    assert "tok-" not in all_log_text(caplog)


# Logs and metrics.


def test_tokens_and_decisions_are_never_logged(portal, desk, start, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text("s3cret-token")
    echo = "HTTP s3cret-token tok-1"
    for status in (401, 404, 429, 500):
        portal.strike("status", status=status, body=echo, count=1)
    portal.strike("garbage", body=echo, count=1)
    portal.strike("garbage", body='{"index": 5, "decisions": "tok-1 s3cret-token"}', count=1)
    portal.strike("redirect", location="https://s3cret-token/tok-1", count=1)
    portal.put(VM, "tok-1")
    start(portal, remote={"token_file": str(tmp_path / "token")}, wait=lambda stop, _: stop.wait(0.01))
    assert desk.has("tok-1")

    assert "responded with 401" in all_log_text(caplog)
    assert "s3cret" not in all_log_text(caplog)
    assert "tok-1" not in all_log_text(caplog)


def test_metrics_report_portal_status_and_last_response_time(portal, start):
    metrics = Metrics()
    assert b"approval_channel" not in metrics.exposition()
    start(
        portal,
        metrics=metrics.approval_channel(),
        clock=Clock(now=lambda: datetime.fromtimestamp(1_234_567, tz=timezone.utc)),
        wait=lambda stop, seconds: stop.wait(min(seconds, 0.01)),
    )
    until(lambda: b"\nscheduled_events_bridge_approval_channel_up 1.0" in metrics.exposition())
    portal.down()
    until(lambda: b"\nscheduled_events_bridge_approval_channel_up 0.0" in metrics.exposition())
    last = b"\nscheduled_events_bridge_approval_channel_last_answer_timestamp_seconds 1.234567e+06"
    assert last in metrics.exposition()
    assert metrics.approval_channel() is metrics.approval_channel()
