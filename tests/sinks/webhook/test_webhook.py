"""The webhook sink: CloudEvents, signatures, the URL, and the check."""

import base64
import hashlib
import hmac
import json
from datetime import datetime, timezone

import msgspec
import pytest
from closing import closing_each

from bridge.sink import DeliveryFailed, encode
from bridge.testing.records import VM, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

KEY = base64.b64encode(b"0123456789abcdefghijklmn").decode()
OTHER_KEY = base64.b64encode(b"x" * 64).decode()
NOW = datetime(2026, 11, 20, 11, 0, 2, tzinfo=timezone.utc)


@pytest.fixture
def sink(peer):
    def sink_of(path="/hook", **keys):
        if not {"url", "url_file", "url_env"} & set(keys):
            keys["url"] = f"http://{peer.address.authority}{path}"
        return WebhookSink(WebhookConfig(**keys), now=lambda: NOW)

    with closing_each(sink_of) as make:
        yield make


# The CloudEvent.


def test_record_is_sent_as_a_cloudevent(peer, sink):
    record = sample_record(17)
    sink().send([record])
    (request,) = peer.requests
    assert request.method == "POST"
    assert request.path == "/hook"
    assert request.headers["content-type"] == "application/cloudevents+json"
    assert json.loads(request.body) == {
        "specversion": "1.0",
        "id": record.id,
        "source": VM.resource_id,
        "type": "io.scheduled-events-bridge.transition.scheduled.v1",
        "subject": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "time": "2026-11-20T11:00:01.123Z",
        "datacontenttype": "application/json",
        "sequence": "00000000000000000017",
        "data": msgspec.json.decode(encode(record)),
    }


# Signatures.


def signature(key, request):
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    return "v1," + base64.b64encode(hmac.new(base64.b64decode(key), signed, hashlib.sha256).digest()).decode()


def test_every_secret_in_the_file_signs_and_changes_apply_immediately(peer, sink, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.write_text(f"# new\nwhsec_{KEY}\n# old\nwhsec_{OTHER_KEY}\n")
    each = sink(secret_file=str(secrets))
    each.send([sample_record()])
    request = peer.requests[-1]
    assert request.headers["webhook-id"] == sample_record().id
    assert request.headers["webhook-timestamp"] == str(int(NOW.timestamp()))
    assert request.headers["webhook-signature"] == f"{signature(KEY, request)} {signature(OTHER_KEY, request)}"
    secrets.write_text(f"whsec_{OTHER_KEY}\n")
    each.send([sample_record()])
    assert peer.requests[-1].headers["webhook-signature"] == signature(OTHER_KEY, peer.requests[-1])


@pytest.mark.parametrize(
    "text", [KEY, "whsec_", "whsec_c2hvcnQ=", f"whsec_{KEY}!", "whsec_" + base64.b64encode(b"x" * 65).decode()]
)
def test_invalid_secret_needs_attention_and_is_not_in_the_error(sink, monkeypatch, text):
    monkeypatch.setenv("HOOK_SECRET", text)
    each = sink(secret_env="HOOK_SECRET")
    for call in (lambda: each.send([sample_record()]), each.check):
        with pytest.raises(DeliveryFailed, match="base64 of 24 to 64 bytes") as failed:
            call()
        assert failed.value.needs_attention
        assert text == "whsec_" or text not in str(failed.value)


# The URL.


def test_url_file_is_read_for_every_request(peer, sink, tmp_path):
    url = tmp_path / "url"
    url.write_text(f"http://{peer.address.authority}/one\n")
    each = sink(url_file=str(url))
    each.send([sample_record()])
    url.write_text(f"http://{peer.address.authority}/another?x=1\n")
    each.send([sample_record()])
    assert [request.path for request in peer.requests] == ["/one", "/another"]
    url.write_text("not-a-url-but-SECRET\n")
    with pytest.raises(DeliveryFailed, match="url_file or url_env cannot be used") as failed:
        each.send([sample_record()])
    assert failed.value.needs_attention
    assert "SECRET" not in str(failed.value)


# The check.


@pytest.mark.parametrize("status", [200, 204, 400, 405, 415, 429, 501])
def test_check_accepts_any_response_of_a_working_endpoint(peer, sink, status):
    peer.say(status)
    sink().check()
    (request,) = peer.requests
    assert request.method == "OPTIONS"
    assert request.body == b""


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 407, 410, 500, 502, 503])
def test_check_reports_the_status_of_a_wrong_endpoint(peer, sink, status):
    peer.say(status)
    with pytest.raises(DeliveryFailed, match=f"responded with {status} .*`send-test`") as failed:
        sink().check()
    assert failed.value.needs_attention


def test_check_of_pagerduty_tests_only_the_connection(peer, sink, monkeypatch):
    pagerduty = sink("/v2/enqueue", format="pagerduty", routing_key_env="KEY")
    with pytest.raises(DeliveryFailed, match="variable KEY of routing_key_env is empty"):
        pagerduty.check()
    monkeypatch.setenv("KEY", "R" * 32)
    peer.say(404)
    pagerduty.check()
    peer.say(503)
    with pytest.raises(DeliveryFailed):
        pagerduty.check()
