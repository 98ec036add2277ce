"""The channel asks as PROTOCOL.md promises, hands on what comes, and outlives whatever the portal does."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from least_time import least
from portal_stub import PortalStub
from private_ca import PrivateCa

from bridge.approval.credentials import EntraCredential, fetch_portal_token
from bridge.approval.decision_token import verify
from bridge.approval.portal_client import GRACE_SECONDS, MAX_ANSWER_BYTES, MAX_DECISIONS, PortalClient
from bridge.approval.portal_poller import PortalPoller
from bridge.clock import Clock
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.errors import ConfigurationError, PortalFailed, RefusalReason, RefusedDecision
from bridge.events.event import ScheduledEvent
from bridge.metrics.metrics import Metrics
from bridge.testing import Fault, ManualClock, Simulator
from bridge.testing.http_peer import HttpPeer
from bridge.testing.peers import nobody, resetting_listener, silent_listener

VM = "7EF1D8A4-0C2B-4C7E-9A35-1F5F6D1F2B90"
EVENT = ScheduledEvent(event_id="E1", event_type="Freeze", event_status="Scheduled", resources=("WestNO_0",))
KEYS = (KeySettings(kid="k", approver="portal", public_key_file="/nowhere"),)
HELD_SECONDS = 20
PATIENCE_SECONDS = 15.0
STOP_SECONDS = 1.1
PAGE = (resources.files("bridge.approval") / "PROTOCOL.md").read_text(encoding="utf-8")
SILENT_PEERS = 20
_DESCRIPTORS = Path("/proc/self/fd")


class Desk:
    """Takes what the channel offers."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.times: list[float] = []
        self.fails = 0
        self.changed = threading.Condition()

    def __call__(self, tokens) -> None:
        with self.changed:
            if self.fails:
                self.fails -= 1
                self.changed.notify_all()
                raise RuntimeError(f"no room for {tokens[0]}")
            self.tokens.extend(tokens)
            self.times.extend([time.monotonic()] * len(tokens))
            self.changed.notify_all()

    def has(self, *tokens: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: set(tokens) <= set(self.tokens), PATIENCE_SECONDS)


class Rest:
    """Stands in for waiting: hours pass at once on *clock*, and each delay is kept."""

    def __init__(self, clock: ManualClock) -> None:
        self.delays: list[float] = []
        self._clock = clock

    def __call__(self, stop: threading.Event, seconds: float) -> bool:
        self.delays.append(seconds)
        self._clock.advance(seconds)
        return stop.is_set()


@pytest.fixture
def portal(tmp_path):
    with PortalStub(tmp_path / "portal", tls=False) as portal:
        yield portal


@pytest.fixture
def secure(tmp_path):
    """Return what makes a portal that speaks TLS; before `start` among a test's fixtures, it outlives the channels."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(PortalStub(tmp_path / "portal", **options))


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def start(desk):
    """Return what starts a channel to a portal or a URL; each is stopped, long before the portal would answer."""
    with contextlib.ExitStack() as stack:

        def started(portal, *, remote=None, **options):
            url = portal if isinstance(portal, str) else portal.url
            ca_file = None if isinstance(portal, str) or portal.ca_file is None else str(portal.ca_file)
            given = {"url": url, "ca_file": ca_file, "keys": KEYS, "wait_seconds": HELD_SECONDS, **(remote or {})}
            for_client = {name: options.pop(name) for name in ("credential", "grace_seconds") if name in options}
            client = PortalClient(RemoteSettings(**given), **for_client)
            channel = PortalPoller(client, **{"vm_id": lambda: VM, "receive": desk, **options})
            stack.callback(stop_in_time, channel)
            channel.start()
            return channel

        yield started


def stop_in_time(channel):
    channel.stop()
    if channel._thread.ident is not None:
        channel._thread.join(HELD_SECONDS / 2)  # a busy machine lets it end a moment later
    assert not channel._thread.is_alive()


def until(condition, *, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert condition()


def client_of(portal, **remote):
    return PortalClient(RemoteSettings(**{"url": portal.url, "keys": KEYS, "wait_seconds": 1, **remote}))


# The request.


def test_a_request_is_what_the_page_promises(portal, start, tmp_path):
    (tmp_path / "token").write_text("s3cret-token\n")
    start(portal, remote={"token_file": str(tmp_path / "token"), "url": portal.url + "/"})
    assert portal.wait_for_requests(2)
    first, second = (request for request in portal.requests[:2])

    assert first.asked.path == f"/api/v1/vms/{VM.lower()}/decisions"
    assert dict(first.asked.query) == {"index": "0", "wait": str(HELD_SECONDS)}
    assert first.authorization == "Bearer s3cret-token"
    assert first.asked.headers["accept"] == "application/json"
    assert "cookie" not in first.asked.headers
    assert second.index == 1


def test_the_limits_are_those_of_the_page():
    assert f"`wait` plus {GRACE_SECONDS:g} seconds at most" in PAGE
    assert MAX_ANSWER_BYTES == 1024 * 1024
    assert "| body of an answer | 1 MiB |" in PAGE
    assert f"| decisions in an answer | {MAX_DECISIONS:,} |" in PAGE


def test_without_a_token_there_is_no_authorization(portal, start):
    start(portal)
    assert portal.wait_for_requests(1)

    assert portal.requests[0].authorization is None


def test_it_waits_while_nobody_knows_the_vm_id(portal, desk, start):
    known: list[str] = []
    asked = threading.Semaphore(0)
    portal.put(VM, "a")

    def vm_id():
        asked.release()
        return known[0] if known else None

    start(portal, vm_id=vm_id, wait=lambda stop, _: stop.wait(0.01))
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_SECONDS)
    assert not portal.requests
    known.append(VM)
    assert desk.has("a")


def test_another_vm_id_begins_at_index_zero(portal, desk, start):
    names = ["first"]
    portal.put("first", "a")
    portal.put("second", "b")
    start(portal, vm_id=lambda: names[0])
    assert desk.has("a")
    assert portal.wait_for_requests(2)
    names[0] = "second"
    portal.put("first", "c")
    assert desk.has("b")

    assert next(request for request in portal.requests if request.vm_id == "second").index == 0


@pytest.mark.parametrize("url", ["http://192.0.2.1/api", "http://portal.example/api"])
def test_plain_http_to_another_machine_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"approval\.remote\.url"):
        PortalClient(RemoteSettings(url=url, keys=KEYS))


# The index.


def test_what_comes_is_offered_and_asked_for_only_once(portal, desk, start):
    start(portal)
    portal.put(VM, "a", "b")
    assert desk.has("a", "b")
    portal.put("another vm", "x")
    portal.put(VM, "c")
    assert desk.has("c")

    assert desk.tokens == ["a", "b", "c"]
    indexes = [request.index for request in portal.requests]
    assert indexes == sorted(indexes)


def test_a_lower_index_starts_over(portal, desk, start):
    start(portal)
    portal.put(VM, "a", "b", "c")
    assert desk.has("c")
    asked = len(portal.requests)
    portal.lose_state()
    portal.put(VM, "after the loss")
    assert desk.has("after the loss")

    assert 0 in [request.index for request in portal.requests[asked:]]


def test_a_restored_portal_whose_counter_passed_the_index_is_asked_from_the_beginning(portal, desk, start):
    portal.epoch = "before"
    portal.put(VM, *"abc")
    start(portal)
    assert desk.has(*"abc")
    portal.down()
    portal.lose_state(epoch="restored")
    portal.put(VM, *"defghi")  # while nobody asks; "d" and "e" have indexes that the agent has passed
    portal.up()
    assert desk.has(*"defghi")


def test_a_database_that_was_rebuilt_is_filled_from_the_beginning(portal, desk, start):
    databases = ["first"]
    portal.put(VM, "a")
    start(portal, database=lambda: databases[-1])
    assert desk.has("a")
    desk.tokens.clear()
    databases.append("rebuilt")
    portal.put(VM, "b")
    assert desk.has("a", "b")


def test_a_clock_that_was_set_asks_again_for_what_it_may_have_refused(portal, desk, start):
    wall = ManualClock()
    portal.put(VM, "a")
    start(portal, clock=Clock(now=wall.now))
    assert desk.has("a")
    desk.tokens.clear()
    wall.advance(-86_400)
    portal.put(VM, "b")
    assert desk.has("a", "b")


def test_an_epoch_that_stays_or_is_not_said_starts_nothing_over(portal, desk, start):
    portal.epoch = "one"
    portal.put(VM, "a")
    start(portal)
    assert desk.has("a")
    portal.epoch = None
    portal.put(VM, "b")
    assert desk.has("b")
    portal.epoch = "one"
    portal.put(VM, "c")
    assert desk.has("c")
    assert [request.index for request in portal.requests].count(0) == 1


def test_returning_is_no_proof_of_change(portal, desk, start):
    answers = itertools.count()
    start(portal, remote={"wait_seconds": 0}, wait=lambda stop, _: next(answers) > 20 and stop.wait(PATIENCE_SECONDS))
    assert portal.wait_for_requests(10)

    assert {request.index for request in portal.requests[1:]} == {1}
    assert desk.tokens == []


def test_a_204_means_nothing_new(portal, desk, start):
    portal.put(VM, "a")
    start(portal)
    assert desk.has("a")
    assert portal.wait_for_requests(2)
    asked = len(portal.requests)
    portal.strike("status", status=204, body="", count=1)
    assert portal.wait_for_requests(asked + 1)
    portal.put(VM, "b")
    assert desk.has("b")

    assert portal.requests[asked].index == 2
    assert desk.tokens == ["a", "b"]


def test_a_204_to_the_first_request_says_that_there_is_no_decision(portal, start):
    portal.strike("status", status=204, body="")
    channel = start(portal, database=lambda: "new")
    until(lambda: channel.read_whole == "new")
    assert portal.wait_for_requests(2)

    assert channel.taken is not None
    assert {request.index for request in portal.requests} == {0}


def test_more_than_an_answer_holds_comes_at_once_in_pages(portal, desk, start):
    tokens = [f"t{number}" for number in range(3_500)]
    portal.put(VM, *tokens)
    start(portal)
    assert desk.has(*tokens)

    assert desk.tokens == tokens
    assert [request.index for request in portal.requests[:4]] == [0, 1_001, 2_001, 3_001]


def test_the_portal_counts_as_heard_once_the_last_page_is_taken(portal, start):
    started = threading.Event()
    heard = []

    def receive(tokens):
        assert started.wait(PATIENCE_SECONDS)
        heard.append((len(tokens), channel.taken))

    portal.put(VM, *(f"t{number}" for number in range(1_500)))
    channel = start(portal, receive=receive)
    started.set()
    until(lambda: channel.taken is not None)
    assert heard[:2] == [(1_000, None), (500, None)]


def test_an_answer_of_a_portal_that_started_over_does_not_count_as_heard(portal, desk, start):
    started = threading.Event()
    taken = {}

    def receive(tokens):
        assert started.wait(PATIENCE_SECONDS)
        taken.update(dict.fromkeys(set(tokens) - taken.keys(), channel.taken))
        desk(tokens)

    portal.epoch = "before"
    portal.put(VM, *"abc")
    channel = start(portal, receive=receive)
    started.set()
    assert portal.wait_for_requests(2)  # so what came is taken
    before = channel.taken
    portal.down()
    portal.lose_state(epoch="restored")
    portal.put(VM, *"defghi")
    portal.up()
    assert desk.has(*"defghi")
    assert taken["d"] == before  # it was left out of the first answer, which had "i" only


def test_duplicates_are_handed_on_for_others_to_know(portal, desk, start):
    portal.repeats = True
    portal.put(VM, "a")
    start(portal)
    assert desk.has("a")
    portal.put(VM, "b")
    assert desk.has("b")

    assert desk.tokens == ["a", "a", "a", "b", "a", "b"]


def test_a_decision_that_is_too_long_does_not_keep_the_others_back(portal, desk, start):
    portal.put(VM, "x" * 9_000, "a")
    start(portal)

    assert desk.has("a", "x" * 9_000)


# Failures.

TROUBLES = {
    "401": ({"kind": "status", "status": 401}, logging.ERROR),
    "403": ({"kind": "status", "status": 403}, logging.ERROR),
    "404": ({"kind": "status", "status": 404}, logging.ERROR),
    "410": ({"kind": "status", "status": 410}, logging.ERROR),
    "400": ({"kind": "status", "status": 400}, logging.WARNING),
    "429": ({"kind": "status", "status": 429}, logging.WARNING),
    "500": ({"kind": "status", "status": 500}, logging.WARNING),
    "304": ({"kind": "status", "status": 304, "body": ""}, logging.WARNING),
    "redirect": ({"kind": "redirect"}, logging.ERROR),
    "disconnect": ({"kind": "disconnect"}, logging.WARNING),
    "empty": ({"kind": "empty"}, logging.WARNING),
    "garbage": ({"kind": "garbage"}, logging.WARNING),
    "truncated": ({"kind": "truncated"}, logging.WARNING),
    "cut": ({"kind": "cut"}, logging.WARNING),
    "huge": ({"kind": "oversize"}, logging.WARNING),
    "list": ({"kind": "garbage", "body": "[]"}, logging.WARNING),
    "no index": ({"kind": "garbage", "body": '{"decisions": []}'}, logging.WARNING),
    "negative index": ({"kind": "garbage", "body": '{"index": -1, "decisions": ["x"]}'}, logging.WARNING),
    "index zero": ({"kind": "garbage", "body": '{"index": 0, "decisions": ["x"]}'}, logging.WARNING),
    "great index": ({"kind": "garbage", "body": '{"index": 9007199254740992, "decisions": []}'}, logging.WARNING),
    "true index": ({"kind": "garbage", "body": '{"index": true, "decisions": ["x"]}'}, logging.WARNING),
    "text index": ({"kind": "garbage", "body": '{"index": "5", "decisions": ["x"]}'}, logging.WARNING),
    "no decisions": ({"kind": "garbage", "body": '{"index": 5}'}, logging.WARNING),
    "float index": ({"kind": "garbage", "body": '{"index": 5.0, "decisions": ["x"]}'}, logging.WARNING),
    "great float index": (
        {"kind": "garbage", "body": '{"index": 9007199254740992.0, "decisions": ["x"]}'},
        logging.WARNING,
    ),
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
def test_a_decision_that_is_no_text_takes_none_of_the_others_with_it(odd, desk, start):
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


def test_a_surrogate_in_a_member_that_the_agent_passes_over_spoils_nothing(portal, desk, start):
    portal.strike("garbage", body=r'{"index": 5, "note": "\ud800", "decisions": ["x"]}', count=1)
    start(portal)

    assert desk.has("x")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_nothing_of_a_bad_answer_is_used_and_the_pending_decision_comes_after(trouble, portal, desk, start, caplog):
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
    until(lambda: len(_lines(caplog)) == 3)
    assert [record.levelno for record in _lines(caplog)] == [logging.INFO, level, logging.INFO]
    assert b"scheduled_events_bridge_approval_channel_up 1.0" in metrics.exposition()


def test_silence_ends_at_the_deadline_and_the_pending_decision_comes_after(portal, desk, start):
    portal.strike("silence", count=5)
    portal.put(VM, "pending")
    start(portal, remote={"wait_seconds": 0.2}, grace_seconds=0.2, wait=lambda stop, _: stop.wait(0.01))
    assert desk.has("pending")
    gaps = [later.at_seconds - earlier.at_seconds for earlier, later in itertools.pairwise(portal.requests[:6])]

    assert min(gaps) < 0.4 * 1.1 + 0.3  # the others may be later on a busy machine, but none is left out


def test_a_body_that_never_ends_is_cut_at_the_deadline(portal, desk, start):
    portal.strike("drip", delay_seconds=0.05, count=1)
    portal.put(VM, "pending")
    start(portal, remote={"wait_seconds": 0.2}, grace_seconds=0.2, wait=lambda stop, _: stop.wait(0.01))

    assert desk.has("pending")


@pytest.mark.parametrize(("header", "delay"), [("9", 9.0), ("100000", 3_600.0)])
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_waited_for(portal, desk, start, status, header, delay):  # noqa: PLR0917  # fixtures
    rest = Rest(ManualClock())
    portal.strike("status", status=status, retry_after_seconds=int(header), count=2)
    portal.put(VM, "pending")
    start(portal, wait=rest)
    assert desk.has("pending")

    assert rest.delays[:2] == [delay, delay]


def test_no_other_status_may_say_when(portal, desk, start):
    rest = Rest(ManualClock())
    portal.strike("status", status=500, retry_after_seconds=999, count=1)
    portal.put(VM, "pending")
    start(portal, wait=rest)
    assert desk.has("pending")

    assert rest.delays[0] <= 1.0


def test_a_portal_that_is_down_for_an_hour_delivers_the_pending_decision_on_its_return(portal, desk, start, caplog):
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    is_over = threading.Event()

    def wait(stop, seconds):
        rest(stop, seconds)
        if clock.monotonic() > 3_600 and not is_over.is_set():
            portal.up()
            is_over.set()
        return stop.is_set()

    rest = Rest(clock)
    metrics = Metrics()
    token = portal.decide(EVENT, vm_id=VM)
    portal.down()
    start(
        portal,
        wait=wait,
        clock=Clock(now=clock.now, monotonic=clock.monotonic),
        metrics=metrics.approval_channel(),
    )
    assert desk.has(token)

    assert is_over.is_set()
    assert max(rest.delays) <= 60
    assert len(rest.delays) > 60
    first, *_, last = _lines(caplog)
    assert len(_lines(caplog)) <= 3  # down, after an hour a reminder, up
    assert (first.levelno, last.levelno) == (logging.WARNING, logging.INFO)
    assert last.failures >= 60
    assert last.lasted_seconds > 3_000


def test_a_decision_that_was_there_before_the_outage_is_not_asked_for_again(portal, desk, start):
    start(portal, wait=lambda stop, _: stop.wait(0.01))
    portal.put(VM, "before")
    assert desk.has("before")
    portal.down()
    portal.put(VM, "meanwhile")
    portal.up()
    assert desk.has("meanwhile")

    assert desk.tokens == ["before", "meanwhile"]


def test_an_offer_that_raises_ends_nothing_and_loses_nothing(portal, desk, start, caplog):
    desk.fails = 3
    portal.put(VM, "tok-1", "tok-2")
    start(portal, wait=lambda stop, _: stop.wait(0.01))
    assert desk.has("tok-1", "tok-2")
    portal.put(VM, "tok-3")
    assert desk.has("tok-3")

    assert desk.tokens == ["tok-1", "tok-2", "tok-3"]
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "RuntimeError" in logging.Formatter().format(line)
    assert "tok-" not in _all(caplog)


def test_a_vm_id_that_raises_ends_nothing(portal, desk, start):
    answers = iter([ValueError("once"), VM])
    last = []

    def vm_id():
        answer = next(answers, None) or last[0]
        if isinstance(answer, Exception):
            raise answer
        last.append(answer)
        return answer

    portal.put(VM, "a")
    start(portal, vm_id=vm_id, wait=lambda stop, _: stop.wait(0.01))

    assert desk.has("a")


# What is said.


def test_neither_token_nor_decision_is_ever_in_a_log_line(portal, desk, start, caplog, tmp_path):
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

    assert "answered 401" in _all(caplog)
    assert "s3cret" not in _all(caplog)
    assert "tok-1" not in _all(caplog)


def test_one_trouble_is_one_line_however_long_it_lasts(start, caplog):
    rests = []
    with nobody() as address:
        start(f"https://{address.authority}", wait=lambda stop, _: rests.append(1) or stop.wait(0.002))
        until(lambda: len(rests) > 30)

    (line,) = _lines(caplog)
    assert line.levelno == logging.WARNING
    assert "Connection refused" in line.getMessage()


def test_the_metrics_say_whether_the_portal_answers_and_when_it_last_did(portal, start):
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


# Who asks, and of whom.


def test_a_private_ca_is_trusted_and_another_is_not(secure, desk, start, caplog):
    portal = secure()
    portal.put(VM, "a")
    start(portal)
    assert desk.has("a")
    start(portal, remote={"ca_file": None})
    until(lambda: "CERTIFICATE_VERIFY_FAILED" in _all(caplog))
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_client_certificate_opens_the_door(secure, desk, start):
    portal = secure(client_certificates=True)
    certificate, key = portal.client_certificate()
    portal.put(VM, "a")
    start(portal, remote={"client_cert_file": str(certificate), "client_key_file": str(key)})
    assert desk.has("a")
    assert portal.requests[0].authorization is None


def test_certificate_and_key_may_stand_in_one_file(secure, tmp_path, desk, start):
    portal = secure(client_certificates=True)
    certificate, key = portal.client_certificate()
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    portal.put(VM, "a")
    start(portal, remote={"client_cert_file": str(both)})
    assert desk.has("a")


@pytest.mark.parametrize("missing", ["ca_file", "client_cert_file", "token_file"])
def test_a_file_that_is_missing_needs_a_person_and_is_looked_for_again(  # noqa: PLR0917  # fixtures
    secure, tmp_path, desk, start, caplog, missing
):
    portal = secure(client_certificates=missing == "client_cert_file")
    certificate, key = portal.client_certificate()
    contents = {
        "ca_file": portal.ca_file.read_bytes(),
        "client_cert_file": certificate.read_bytes() + key.read_bytes(),
        "token_file": b"right",
    }
    portal.bearer = "right" if missing == "token_file" else None
    file = tmp_path / "comes later"
    portal.put(VM, "a")
    start(portal, remote={missing: str(file)}, wait=lambda stop, _: stop.wait(0.02))
    until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert str(file) in _all(caplog)
    assert not portal.requests
    file.write_bytes(contents[missing])
    assert desk.has("a")


def test_a_rotated_token_needs_no_restart(portal, desk, start, tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")
    portal.bearer = "old"
    start(portal, remote={"token_file": str(token)}, wait=lambda stop, _: stop.wait(0.02))
    portal.put(VM, "a")
    assert desk.has("a")
    portal.bearer = "the new one"
    portal.put(VM, "b")
    until(lambda: portal.requests[-1].authorization == "Bearer old" and len(portal.requests) > 4)
    token.write_text("the-new-one\n")
    portal.bearer = "the-new-one"
    assert desk.has("b")


def test_a_proxy_of_the_environment_is_used_but_never_to_loopback(portal, monkeypatch):
    with nobody() as address:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://{address.authority}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        client = client_of(portal)
        assert client.poll(VM, index=0).index == 1
        client.close()
        outside = PortalClient(RemoteSettings(url="https://portal.invalid/", keys=KEYS))
        # Refused by the proxy's address, not by the look-up of a name that does not exist.
        with pytest.raises(PortalFailed, match="refused"):
            outside.poll(VM, index=0)
        outside.close()


# Entra ID.


def test_the_channel_stops_at_once_while_entra_hangs(portal, start):
    let_go = threading.Event()
    asked = threading.Event()

    def fetch():
        asked.set()
        let_go.wait(PATIENCE_SECONDS)
        raise RuntimeError("too late")

    channel = start(portal, credential=EntraCredential("api://x", fetch=fetch))
    assert asked.wait(PATIENCE_SECONDS)
    stop_in_time(channel)
    let_go.set()
    assert not portal.requests


@pytest.fixture
def imds(monkeypatch):
    """Return a simulator whose token endpoint azure-identity finds; a proxy that is nowhere must not be asked."""
    for name in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Simulator("live-migration", listen="127.0.0.1:0") as simulator:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        yield simulator


@pytest.mark.usefixtures("imds")
@pytest.mark.parametrize("scope", ["api://portal", "api://portal/.default"])
def test_a_token_of_the_managed_identity_is_shown_to_the_portal(portal, desk, start, scope):
    portal.put(VM, "a")
    start(portal, remote={"entra_scope": scope})
    assert desk.has("a")
    assert re.fullmatch(r"Bearer [\w-]+\.[\w-]+\.[\w-]+", portal.requests[0].authorization)
    token = fetch_portal_token(scope)
    assert 0 < token.expires_on - time.time() <= 86_400


@pytest.mark.usefixtures("imds")
def test_a_refused_token_is_asked_for_anew(portal, desk, start):
    portal.bearer = "none that there is"
    asked = []

    def fetch():
        asked.append(1)
        return fetch_portal_token("api://portal")

    start(portal, credential=EntraCredential("api://portal", fetch=fetch), wait=lambda stop, _: stop.wait(0.3))
    until(lambda: len(asked) >= 3)
    portal.bearer = None
    portal.put(VM, "a")
    assert desk.has("a")


def test_a_vm_without_an_identity_says_so_once_and_needs_a_person(portal, start, imds, caplog):
    imds.world.set_fault(Fault(kind="status", status=400, target="token"))
    rests = []
    start(
        portal,
        remote={"entra_scope": "api://portal"},
        wait=lambda stop, _: rests.append(1) or stop.wait(0.3),
    )
    until(lambda: len(rests) >= 3)

    (line,) = _lines(caplog)
    assert line.levelno == logging.ERROR
    assert "entra_scope" in line.getMessage()
    assert not portal.requests


# Deadlines, threads and stopping.


def test_stopping_breaks_off_a_request_that_the_portal_holds(portal, desk, start):
    channels = []

    def seconds_to_stop():
        asked = len(portal.requests)
        channels.append(start(portal))
        assert portal.wait_for_requests(asked + 2)
        began = time.monotonic()
        stop_in_time(channels[-1])
        return time.monotonic() - began

    assert least(seconds_to_stop, below=STOP_SECONDS) < STOP_SECONDS
    portal.put(VM, "after the end")
    for channel in channels:
        channel.stop()

    assert desk.tokens == []


def test_stopping_before_the_start_and_while_resting_is_fine(portal, desk, start):
    PortalPoller(PortalClient(RemoteSettings(url=portal.url, keys=KEYS)), vm_id=lambda: VM, receive=desk).stop()
    portal.strike("status", status=429, retry_after_seconds=3_000)
    channel = start(portal)
    assert portal.wait_for_requests(1)
    stop_in_time(channel)


def test_stopping_breaks_off_a_silent_handshake(start):
    with silent_listener() as (address, _):
        channel = start(f"https://{address.authority}")
        threading.Event().wait(0.1)
        stop_in_time(channel)


def test_connections_that_are_reset_are_made_again(start, caplog):
    rests = []
    with resetting_listener(after_reading=True) as address:
        start(f"http://{address.authority}", wait=lambda stop, _: rests.append(1) or stop.wait(0.01))
        until(lambda: len(rests) > 5)

    assert {record.levelno for record in _lines(caplog)} == {logging.WARNING}


@pytest.mark.skipif(not _DESCRIPTORS.is_dir(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_twenty_silent_portals_hold_no_call_beyond_its_deadline_and_leave_nothing(
    tmp_path, desk, scheme, record_property
):
    # One certificate: a hundred and fifty to read at each handshake, twenty times at once, would be what is measured.
    ca_file = str(PrivateCa(tmp_path).ca_file)
    wait_seconds, grace_seconds = 0.6, 0.4
    deadline = wait_seconds + grace_seconds
    with contextlib.ExitStack() as stack:
        calls: list[tuple[float, float]] = []
        channels = []
        for _ in range(SILENT_PEERS):
            address, _listener = stack.enter_context(silent_listener())
            moments = _Moments(calls)
            remote = RemoteSettings(
                url=f"{scheme}://{address.authority}", ca_file=ca_file, keys=KEYS, wait_seconds=wait_seconds
            )
            client = PortalClient(remote, grace_seconds=grace_seconds)
            channels.append(PortalPoller(client, vm_id=moments.begin, receive=desk, wait=moments.end))
        lag = stack.enter_context(_lag_of_this_machine())
        for channel in channels:
            stack.callback(stop_in_time, channel)
            channel.start()
        until(lambda: len(calls) >= SILENT_PEERS)
        threads, sockets = threading.active_count(), len(list(_DESCRIPTORS.iterdir()))
        until(lambda: len(calls) >= SILENT_PEERS * 4)
        assert threading.active_count() <= threads + SILENT_PEERS, "one that each call left would be three times that"
        assert len(list(_DESCRIPTORS.iterdir())) <= sockets + SILENT_PEERS * 2
        seconds = [end - begin for begin, end in calls]
        record_property("longest_seconds", max(seconds))
        assert statistics.median(seconds) <= deadline * 1.1 + 0.2 + max(lag)
        assert max(seconds) <= deadline * 5


@contextlib.contextmanager
def _lag_of_this_machine() -> Iterator[list[float]]:
    """Note by how much a thread that only waits comes late, beside all the others: nobody's deadline is better."""
    lags, done = [0.0], threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not done.wait(0.05):
            lags.append(time.monotonic() - began - 0.05)
            began = time.monotonic()

    thread = threading.Thread(target=watch, name="lag")
    thread.start()
    try:
        yield lags
    finally:
        done.set()
        thread.join()


class _Moments:
    """Notes when a call of a channel began and ended."""

    def __init__(self, calls) -> None:
        self._calls = calls
        self._began = 0.0

    def begin(self) -> str:
        self._began = time.monotonic()
        return VM

    def end(self, stop, _seconds):
        self._calls.append((self._began, time.monotonic()))
        return stop.wait(0.01)


def test_a_decision_is_offered_within_milliseconds(secure, desk, start):
    portal = secure()
    start(portal)
    delays = []
    for number in range(200):
        assert portal.wait_for_requests(number + 2)
        began = time.monotonic()
        portal.put(VM, f"t{number}")
        assert desk.has(f"t{number}")
        delays.append(desk.times[-1] - began)
    p50, p99 = statistics.median(delays), statistics.quantiles(delays, n=100)[98]
    print(f"decision at the portal to offer: p50 {p50 * 1_000:.1f} ms, p99 {p99 * 1_000:.1f} ms")  # noqa: T201

    assert p50 < 0.5  # ten times what is meant, and more for one in a hundred, for a machine that does other things too
    assert p99 < HELD_SECONDS / 4


def test_the_settings_of_the_stub_lead_to_it(portal, desk):
    remote = msgspec.convert({"url": portal.url, "keys": portal.key_tables()}, RemoteSettings)
    channel = PortalPoller(PortalClient(remote), vm_id=lambda: VM, receive=desk)
    channel.start()
    token = portal.decide(EVENT, vm_id=VM)
    assert desk.has(token)
    stop_in_time(channel)


def _lines(caplog):
    return [record for record in caplog.records if record.name == "bridge.approval.portal_poller"]


def _all(caplog):
    return "\n".join(logging.Formatter().format(record) for record in caplog.records)
