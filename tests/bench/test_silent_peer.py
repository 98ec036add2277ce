"""The longest call of each network sink, of IMDS, and of the portal with a peer that accepts TCP and never responds."""

import socket
import time
from contextlib import closing

import msgspec
import pytest

from bridge.approval.portal_client import PortalClient
from bridge.config.approval import RemoteSettings
from bridge.config.settings import ImdsSettings
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.imds.client import ImdsClient
from bridge.testing.records import sample_record
from sinks.eventhubs.sink import EventHubsSink
from sinks.otlp.sink import OtlpSink
from sinks.webhook.sink import WebhookSink

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

_DEADLINE_SECONDS = 2.0
_MOST = 1.1
_KEY = {"kid": "k", "approver": "portal", "public_key_file": "/nowhere"}
_HUB = "Endpoint=sb://hub.servicebus.windows.net/;SharedAccessKeyName=send;SharedAccessKey=c2VjcmV0;EntityPath=hub"


@pytest.fixture
def port():
    """Return the port of a listener that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("sink_class", "keys"),
    [
        (WebhookSink, {"url": "http://127.0.0.1:{port}/hook"}),
        (WebhookSink, {"url": "https://127.0.0.1:{port}/hook"}),
        (OtlpSink, {"endpoint": "http://127.0.0.1:{port}"}),
        (EventHubsSink, {"endpoint": "127.0.0.1:{port}", "transport": "amqp"}),
        (EventHubsSink, {"endpoint": "127.0.0.1:{port}", "transport": "https"}),
    ],
    ids=["webhook", "webhook over TLS", "otlp", "eventhubs amqp", "eventhubs https"],
)
def test_send_to_a_silent_peer_ends_at_the_deadline(sink_class, keys, *, port, figure, is_short, monkeypatch, request):
    monkeypatch.setenv("BENCH_HUB", _HUB)
    given = {name: value.format(port=port) for name, value in keys.items()}
    if sink_class is EventHubsSink:
        given |= {"credential": "connection_string", "connection_string_env": "BENCH_HUB"}
    config = sink_class.Config(name="s", timeout_seconds=_DEADLINE_SECONDS, **given)
    record = sample_record(1)
    with closing(Sender(lambda: sink_class(config), name="s", timeout_seconds=_DEADLINE_SECONDS)) as sender:
        _judge(request.node.callspec.id, lambda: sender.send([record]), figure, is_short=is_short)


def test_poll_of_a_silent_imds_ends_at_the_deadline(port, figure, is_short):
    imds = ImdsClient(
        ImdsSettings(
            endpoint=f"http://127.0.0.1:{port}",
            api_version="2020-07-01",
            timeout_seconds=_DEADLINE_SECONDS,
            first_timeout_seconds=_DEADLINE_SECONDS,
        )
    )
    with closing(imds):
        _judge("IMDS", imds.scheduled_events, figure, is_short=is_short)


def test_poll_of_a_silent_portal_ends_at_the_deadline(port, figure, is_short):
    remote = {"url": f"http://127.0.0.1:{port}", "keys": [_KEY], "wait_seconds": 1}
    portal = PortalClient(msgspec.convert(remote, RemoteSettings))
    # A long poll may take its wait and the time of a request.
    deadline_seconds = portal._deadline_seconds  # This value is not a setting.
    with closing(portal):
        call = lambda: portal.poll("vm", index=0)  # noqa: E731
        _judge("portal", call, figure, is_short=is_short, deadline_seconds=deadline_seconds)


def _judge(
    name,
    call,
    figure,
    *,
    is_short,
    deadline_seconds=_DEADLINE_SECONDS,
):
    longest = 0.0
    for _ in range(2 if is_short else 10):
        began_at = time.monotonic()
        with pytest.raises(BridgeError):
            call()
        longest = max(longest, time.monotonic() - began_at)
    figure(f"silent peer, {name}: longest call {longest / deadline_seconds:.2f} of its deadline")
    assert longest <= _MOST * deadline_seconds
