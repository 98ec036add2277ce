"""The keys of the Event Hubs sink and their valid combinations."""

import pytest
from connect_proxy import ConnectProxy

from bridge.config.mistakes import Problems
from bridge.config.sinks import read_sinks
from bridge.sink import DeliveryFailed
from bridge.testing.records import sample_record
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.sink import EventHubsSink

KEY = "c2VjcmV0LWtleQ=="
IDENTITY = {"fully_qualified_namespace": "ns.servicebus.windows.net", "eventhub": "hub"}


def mistakes(**keys):
    found = Problems()
    read_sinks([{"type": "eventhubs", **keys}], found)
    return "\n".join(found.sentences)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "fully_qualified_namespace is missing"),
        ({"fully_qualified_namespace": "ns"}, "eventhub is missing"),
        ({"credential": "connection_string"}, "needs connection_string_file or connection_string_env"),
        ({**IDENTITY, "connection_string_env": "X"}, 'need credential = "connection_string"'),
        (
            {"credential": "connection_string", "connection_string_env": "X", "connection_string_file": "y"},
            "both set. Remove one",
        ),
        (
            {"credential": "connection_string", "connection_string_env": "X", "client_id": "c"},
            "client_id is for a managed identity",
        ),
        *(
            ({**IDENTITY, "fully_qualified_namespace": name}, "It has the form NAME.servicebus.windows.net")
            for name in ("fleet", "sb://fleet.servicebus.windows.net/", "fleet.", ".net", "a b.net", "a.net:port")
        ),
        ({**IDENTITY, "ca_file": "/nowhere/ca.pem"}, "ca_file: The file /nowhere/ca.pem does not exist."),
        ({**IDENTITY, "transport": "kafka"}, "transport"),
        ({**IDENTITY, "idle_close_seconds": -1}, "idle_close_seconds"),
        ({**IDENTITY, "proxy": "http://proxy:3128"}, 'A proxy needs transport = "amqp_websocket" or "https"'),
        ({**IDENTITY, "proxy_env": "PROXY"}, "A proxy needs transport"),
        ({**IDENTITY, "transport": "https", "proxy": "proxy:3128"}, "proxy must be a URL"),
        ({**IDENTITY, "transport": "https", "proxy": "http://me:hunter2@proxy:3128"}, "proxy_file or proxy_env"),
        ({**IDENTITY, "transport": "https", "proxy": "http://a:1", "proxy_file": "/b"}, "both set. Remove one"),
    ],
)
def test_invalid_configuration_is_rejected(keys, said):
    assert said in mistakes(**keys)


def test_connection_string_in_the_wrong_key_is_not_in_the_error():
    said = mistakes(**{**IDENTITY, "fully_qualified_namespace": f"Endpoint=sb://ns.net/;SharedAccessKey={KEY}"})
    assert "fully_qualified_namespace is not a complete host name" in said
    assert KEY not in said


def test_https_transport_uses_the_proxy(monkeypatch):
    """The namespace does not exist. Only the proxy receives its name."""
    key = "Endpoint=sb://ns.servicebus.windows.net;SharedAccessKeyName=send;SharedAccessKey=a2V5;EntityPath=hub"
    monkeypatch.setenv("EVENT_HUBS", key)
    with ConnectProxy(password="agent:right") as proxy:
        monkeypatch.setenv("PROXY", f"http://agent:hunter2-4711@127.0.0.1:{proxy.port}")
        keys = {"credential": "connection_string", "connection_string_env": "EVENT_HUBS", "proxy_env": "PROXY"}
        sink = EventHubsSink(EventHubsConfig(name="hub", transport="https", timeout_seconds=5.0, **keys))
        with pytest.raises(DeliveryFailed, match="proxy") as caught:
            sink.send([sample_record()])
        sink.close()
        assert proxy.targets == ["ns.servicebus.windows.net:443"]
    assert (caught.value.needs_attention, caught.value.reason) == (True, "proxy")
    assert "hunter2" not in str(caught.value)
