"""The Event Hubs sink without an event hub: silent peers, imports, and tokens."""

import threading

import pytest
from leaks import nothing_left_behind
from managed_identity import managed_identity

from bridge.sink import DeliveryFailed, DeliveryRejected
from bridge.testing.records import sample_event, sample_record
from bridge.testing.simulator.faults import Fault
from bridge.testing.watching import in_time
from sinks.eventhubs.access import Access
from sinks.eventhubs.sink import EventHubsConfig, EventHubsSink

LIMIT_SECONDS = 0.5
KEY = "c2VjcmV0LWtleQ=="
IDENTITY = {"fully_qualified_namespace": "ns.servicebus.windows.net", "eventhub": "hub"}


@pytest.fixture
def sink_of(monkeypatch):
    """Return a function that builds a sink with a connection string to a local port."""
    made = []

    def build(port, *, is_tls=False, **keys):
        string = f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=send;SharedAccessKey={KEY};EntityPath=hub"
        if is_tls:
            keys["endpoint"] = f"127.0.0.1:{port}"
        else:
            string += ";UseDevelopmentEmulator=true"
        variable = f"EVENT_HUBS_{len(made)}"
        monkeypatch.setenv(variable, string)
        config = EventHubsConfig(
            **{
                "name": "hub",
                "credential": "connection_string",
                "connection_string_env": variable,
                "timeout_seconds": LIMIT_SECONDS,
                **keys,
            }
        )
        made.append(EventHubsSink(config))
        return made[-1]

    yield build
    for sink in made:
        sink.close()


def failure(sink):
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([sample_record()])
    return caught.value


@pytest.mark.parametrize("transport", ["amqp", "https"])
@pytest.mark.parametrize("is_tls", [False, True])
def test_silent_peer_fails_at_the_deadline_and_leaks_nothing(sink_of, silent_port, transport, is_tls):
    sink = sink_of(silent_port, is_tls=is_tls, transport=transport)
    failure(sink)  # imports the libraries and starts the shared threads
    with nothing_left_behind():
        for _ in range(5):
            error = in_time(lambda: failure(sink), deadline_seconds=LIMIT_SECONDS)
            assert "did not respond within" in str(error)
            assert KEY not in str(error)


def test_close_ends_a_hung_send(sink_of, silent_port):
    sink = sink_of(silent_port, timeout_seconds=60)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(failure(sink)))
    thread.start()
    while not any(each.name.startswith("eventhubs:") for each in threading.enumerate()):
        threading.Event().wait(0.01)
    sink.close()
    thread.join(10)
    assert "closed" in str(errors[0])


def test_batch_of_two_events_is_rejected_so_that_records_are_sent_singly(sink_of, silent_port):
    with pytest.raises(DeliveryRejected) as caught:
        sink_of(silent_port).send([sample_record(event=sample_event(event_id=each)) for each in "AB"])
    assert caught.value.records == ()


# Tokens.


def test_managed_identity_requests_bypass_the_proxy(monkeypatch):
    """A proxy would get the token of another machine."""
    with managed_identity(monkeypatch):
        access = Access(EventHubsConfig(credential="managed_identity", **IDENTITY))
        access.prepare(wait_seconds=30)
    assert len(access.authorization()) > len("Bearer ")


def test_identity_without_a_token_needs_attention(monkeypatch):
    with managed_identity(monkeypatch) as simulator:
        simulator.world.set_fault(Fault(kind="status", status=400, target="token"))
        access = Access(EventHubsConfig(credential="managed_identity", **IDENTITY))
        with pytest.raises(DeliveryFailed, match=r"The credential returned no token: .* Assign the identity") as caught:
            access.prepare(wait_seconds=30)
    assert caught.value.needs_attention
