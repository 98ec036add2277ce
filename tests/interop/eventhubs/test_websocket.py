"""AMQP over the websocket of the SDK, with a front end that forwards the bytes to the emulator."""

import gc
import importlib.util
import threading

import pytest
from connect_proxy import ConnectProxy
from eventhubs_emulator.process import running

from bridge.sink import DeliveryFailed

pytestmark = pytest.mark.interop


@pytest.fixture
def front_port(emulator, authority):
    if importlib.util.find_spec("aiohttp") is None:
        pytest.skip("the websocket transport needs aiohttp")
    with running("websocket_front", str(emulator.ports["amqp"]), authority.cert_file, authority.key_file) as port:
        yield int(port)


@pytest.fixture
def make_websocket_sink(front_port, make_sink, authority, emulator):
    def make(**keys):
        return make_sink(
            string=emulator.connection_string(is_tls=True),
            transport="amqp_websocket",
            endpoint=f"127.0.0.1:{front_port}",
            ca_file=authority.ca_file,
            **keys,
        )

    return make


def test_record_arrives_through_a_websocket(make_websocket_sink, make_record, emulator):
    sink = make_websocket_sink()
    sink.send([make_record(sequence=1), make_record(sequence=2)])
    sink.send([make_record(sequence=3)])
    state = emulator.state()
    assert (state["transfers"], len(state["events"]), state["connections_ever"]) == (2, 3, 1)


# The SDK does not close its aiohttp session after a reset of the sockets. The session leaks no resources.
unclosed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unclosed
def test_send_to_a_silent_hub_over_a_websocket_ends_at_the_deadline(make_websocket_sink, make_record, emulator):
    sink = make_websocket_sink(timeout_seconds=1.5)
    sink.send([make_record(sequence=1)])
    emulator.faults({"kind": "no_ack", "count": 3})
    before = threading.active_count()
    for _ in range(3):
        assert "did not respond within 1.5 s. The send ended" in failure(sink, make_record(sequence=2))
    assert threading.active_count() <= before
    emulator.wait_for(lambda state: state["connections"] == 0)
    sink.send([make_record(sequence=3)])
    gc.collect()  # The warning is expected in this test.


def test_record_arrives_through_a_proxy_with_a_password(
    make_websocket_sink, make_record, emulator, front_port, tmp_path
):
    with ConnectProxy(password="agent:pass/word") as proxy:
        (tmp_path / "proxy").write_text(f"http://agent:pass%2Fword@127.0.0.1:{proxy.port}\n")
        sink = make_websocket_sink(proxy_file=str(tmp_path / "proxy"))
        sink.send([make_record(sequence=1)])
        sink.send([make_record(sequence=2)])
        sink.check()
        sink.close()
        assert set(proxy.targets) == {f"127.0.0.1:{front_port}"}
    assert len(emulator.state()["events"]) == 2


@unclosed
def test_proxy_rejection_needs_attention_and_hides_the_password(make_websocket_sink, make_record, monkeypatch):
    with ConnectProxy(password="agent:right") as proxy:
        monkeypatch.setenv("PROXY", f"http://agent:hunter2-4711@127.0.0.1:{proxy.port}")
        sink = make_websocket_sink(proxy_env="PROXY")
        with pytest.raises(DeliveryFailed, match="proxy") as caught:
            sink.send([make_record()])
        monkeypatch.setenv("PROXY", f"http://agent:right@127.0.0.1:{proxy.port}")
        sink.send([make_record()])
    assert (caught.value.needs_attention, caught.value.reason) == (True, "proxy")
    assert "hunter2" not in str(caught.value)
    caught = None  # The exception references the session.
    gc.collect()


def failure(sink, record):
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([record])
    return str(caught.value)
