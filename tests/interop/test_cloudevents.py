"""The CloudEvents SDK (PyPI: cloudevents) reads the requests of the webhook sink."""

from datetime import datetime, timezone

import msgspec
import pytest

from bridge.events.record import json_schema
from bridge.sink import encode
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import VM, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

pytestmark = pytest.mark.interop

http = pytest.importorskip("cloudevents.core.bindings.http", reason="cloudevents 2 is not installed")


@pytest.fixture
def read():
    with HttpPeer() as peer:
        sink = WebhookSink(WebhookConfig(url=f"http://{peer.address.authority}/hook"))

        def send(**fields):
            sink.send([sample_record(**fields)])
            request = peer.requests[-1]
            return http.from_http_event(http.HTTPMessage(headers=dict(request.headers), body=request.body))

        yield send
        sink.close()


def test_sdk_reads_every_attribute_and_the_record(read):
    record = sample_record()
    event = read()
    assert event.get_specversion() == "1.0"
    assert event.get_id() == record.id
    assert event.get_source() == VM.resource_id
    assert event.get_type() == "io.scheduled-events-bridge.transition.scheduled.v1"
    assert event.get_subject() == "C7061BAC-AFDC-4513-B24B-AA5F13A16123"
    assert event.get_time() == datetime(2026, 11, 20, 11, 0, 1, 123000, tzinfo=timezone.utc)
    assert event.get_datacontenttype() == "application/json"
    assert int(event.get_extension("sequence")) == record.sequence
    assert event.get_data() == msgspec.json.decode(encode(record))


def test_data_matches_the_schema(read):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(read().get_data(), json_schema())
