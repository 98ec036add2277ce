"""Handling of status 400: a bad record is parked, but a wrong endpoint never parks a record."""

import json
from contextlib import contextmanager

import pytest
from waiting import until

from bridge.testing.http_peer import HttpPeer
from bridge.testing.simulator.imds_api import Answer
from sinks.webhook.sink import WebhookSink

NOT_ACCEPTED = "status_400"


def webhook(bench, peer, **keys):
    bench.sink("s", WebhookSink, url=f"http://{peer.address.authority}/hook", **keys)


def events_received(peer):
    return [json.loads(request.body)["subject"] for request in peer.requests]


def refuse_only(peer, *event_ids):
    """Reject these events, and accept all others."""

    def reply(request):
        return Answer(status=400 if json.loads(request.body)["subject"] in event_ids else 200)

    peer.reply(reply)


def accept_one(bench, peer, name="fine"):
    peer.accept()
    bench.add(name)
    bench.until_totals(delivered=1)


def turn_until(bench, **totals):
    """Advance the time until the totals match."""

    def are_there():
        bench.advance(5)
        return bench.totals() == totals

    until(are_there)


def test_endpoint_that_never_accepted_a_record_parks_none(bench, peer):
    peer.refuse_for_good()
    webhook(bench, peer)
    bench.add("E-1", "E-2", "E-3")
    bench.start()
    until(lambda: len(set(events_received(peer))) >= 2)
    for _ in range(5):
        bench.advance(300)
    until(lambda: bench.sample("sink_needs_attention") == 1)
    assert bench.totals() == {"pending": 3}
    assert bench.sample("sink_retries_total", reason=NOT_ACCEPTED) > 0
    peer.accept()
    turn_until(bench, delivered=3)
    until(lambda: bench.sample("sink_needs_attention") == 0)


def test_rejections_of_consecutive_different_events_park_none(bench, peer, caplog):
    webhook(bench, peer)
    bench.start()
    accept_one(bench, peer)
    peer.refuse_for_good()
    bench.add("E-1", "E-2", "E-3", "E-4")
    until(lambda: bench.sample("sink_needs_attention") == 1)
    turn_until(bench, delivered=1, pending=4)
    for _ in range(5):
        bench.advance(300)
    assert bench.totals() == {"delivered": 1, "pending": 4}
    assert "nothing is parked" in caplog.text
    peer.accept()
    turn_until(bench, delivered=5)


def test_records_of_an_unparked_event_are_sent_in_order(bench, peer):
    webhook(bench, peer)
    bench.start()
    accept_one(bench, peer)
    peer.refuse_for_good()
    bench.add("E-1")
    bench.until_totals(delivered=1, parked=1)
    bench.add("E-1", description="later")
    bench.until_totals(delivered=1, parked=2)  # the same event again is no evidence about others
    bench.add("E-2")
    turn_until(bench, delivered=1, pending=3)
    refused = len(peer.requests)
    peer.accept()
    turn_until(bench, delivered=4)
    taken = [json.loads(request.body)["data"]["sequence"] for request in peer.requests[refused:]]
    assert [sequence for sequence in taken if sequence != 4] == [2, 3]


def test_bad_record_is_parked_immediately_if_the_endpoint_accepts_others(bench, peer):
    webhook(bench, peer)
    bench.start()
    accept_one(bench, peer)
    refuse_only(peer, "bad")
    bench.add("bad")
    bench.until_totals(delivered=1, parked=1)
    assert not bench.sample("sink_needs_attention")
    bench.add("good")
    bench.until_totals(delivered=2, parked=1)


def test_bad_first_record_is_parked_after_another_is_accepted(bench, peer):
    refuse_only(peer, "bad")
    webhook(bench, peer)
    bench.add("bad")
    bench.start()
    until(lambda: bench.sample("sink_needs_attention") == 1)
    assert bench.totals() == {"pending": 1}
    bench.add("good")
    turn_until(bench, delivered=1, parked=1)
    until(lambda: bench.sample("sink_needs_attention") == 0)


@pytest.mark.parametrize("is_changed", [False, True], ids=["unchanged", "changed"])
def test_accepted_record_counts_after_a_restart_with_the_same_settings(bench, peer, is_changed):
    webhook(bench, peer)
    bench.start()
    accept_one(bench, peer)
    bench.stop()
    peer.refuse_for_good()
    bench.add("E-1")
    if is_changed:
        webhook(bench, peer, headers={"X-Team": "sre"})
    bench.start()
    bench.until_totals(delivered=1, **({"pending": 1} if is_changed else {"parked": 1}))
    until(lambda: bool(bench.sample("sink_needs_attention")) == is_changed)
    bench.advance(300)
    assert bench.totals() == {"delivered": 1, **({"pending": 1} if is_changed else {"parked": 1})}


@contextmanager
def two_peers():
    """Yield a peer that accepts every record, and a peer that rejects every record."""
    with HttpPeer() as old, HttpPeer() as new:
        new.refuse_for_good()
        yield old, new


@pytest.mark.parametrize("given_by", ["file", "variable"])
def test_new_url_from_a_file_or_variable_parks_nothing(bench, tmp_path, monkeypatch, given_by):
    file = tmp_path / "url"

    def point_to(peer):
        url = f"http://{peer.address.authority}/hook"
        file.write_text(url)
        monkeypatch.setenv("HOOK_URL", url)

    with two_peers() as (old, new):
        point_to(old)
        keys = {"file": {"url_file": str(file)}, "variable": {"url_env": "HOOK_URL"}}[given_by]
        bench.sink("s", WebhookSink, **keys)
        bench.start()
        accept_one(bench, old)
        bench.stop()
        point_to(new)
        bench.start()
        bench.add("P", urgent=True)
        until(lambda: bench.sample("sink_needs_attention") == 1)
        bench.advance(5)
        until(lambda: len(new.requests) >= 2)
        assert bench.totals() == {"delivered": 1, "pending": 1}
        point_to(old)
        bench.stop()
        bench.start()
        turn_until(bench, delivered=2)


def test_secrets_from_files_and_variables_are_not_stored(bench, peer, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("a-very-secret-token")
    monkeypatch.setenv("HOOK_URL", f"http://{peer.address.authority}/a-very-secret-path")
    bench.sink("s", WebhookSink, url_env="HOOK_URL", bearer_token_file=str(file))
    bench.start()
    accept_one(bench, peer)
    bench.stop()
    kept = b"".join(each.read_bytes() for each in bench.directory.iterdir() if each.is_file())
    assert b"accepted_under" in kept
    assert b"a-very-secret" not in kept


def test_park_statuses_park_even_if_the_endpoint_accepted_nothing(bench, peer):
    peer.refuse_for_good()
    webhook(bench, peer, park_statuses=(400,))
    bench.add("E-1", "E-2", "E-3")
    bench.start()
    bench.until_totals(parked=3)


def test_record_without_a_request_counts_neither_as_accepted_nor_rejected(bench, peer):
    """Alertmanager gets no request for the outcome of an approval, so the endpoint neither accepts nor rejects it."""
    peer.refuse_for_good()
    webhook(bench, peer, format="alertmanager")
    bench.add("E-1")
    bench.start()
    until(lambda: bench.sample("sink_needs_attention") == 1)
    bench.outbox_kit.commit(bench.outbox, bench.event("E-2"), transition="approved")
    turn_until(bench, delivered=1, pending=1)
    for _ in range(3):
        bench.advance(300)
    assert bench.totals() == {"delivered": 1, "pending": 1}
    assert bench.sample("sink_needs_attention") == 1
