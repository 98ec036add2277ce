"""AMQP through a websocket: the SDK's own, to a front that carries the bytes on to the emulator."""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from eventhubs_emulator.process import running

from bridge.sink import DeliveryFailed

pytestmark = pytest.mark.interop


@pytest.fixture
def front_port(emulator: Any, authority: Any) -> Iterator[int]:
    if importlib.util.find_spec("aiohttp") is None:
        pytest.skip("the websocket transport needs aiohttp")
    with running("websocket_front", str(emulator.ports["amqp"]), authority.cert_file, authority.key_file) as said:
        yield int(said)


@pytest.fixture
def make_websocket_sink(front_port: int, make_sink: Any, authority: Any, emulator: Any) -> Any:
    def make(**keys: Any) -> Any:
        return make_sink(
            string=emulator.connection_string(is_tls=True),
            transport="amqp_websocket",
            endpoint=f"127.0.0.1:{front_port}",
            ca_file=authority.ca_file,
            **keys,
        )

    return make


def test_record_arrives_through_a_websocket(make_websocket_sink, make_record, emulator) -> None:
    sink = make_websocket_sink()
    sink.send([make_record(sequence=1), make_record(sequence=2)])
    sink.send([make_record(sequence=3)])
    state = emulator.state()
    assert (state["transfers"], len(state["events"]), state["connections_ever"]) == (2, 3, 1)


# The SDK's aiohttp session is let go of unclosed when its sockets are reset under it; it holds nothing any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_silence_through_a_websocket_ends_at_the_deadline(make_websocket_sink, make_record, emulator) -> None:
    sink = make_websocket_sink(timeout_seconds=1.5)
    sink.send([make_record(sequence=1)])
    emulator.faults({"kind": "no_ack", "count": 3})
    before = threading.active_count()
    for _ in range(3):
        assert "no answer within 1.5 s; the send was cut" in uncertain_failure(sink, make_record(sequence=2))
    assert threading.active_count() <= before
    emulator.wait_for(lambda state: state["connections"] == 0)
    sink.send([make_record(sequence=3)])
    gc.collect()  # here, where its warning is expected


def uncertain_failure(sink, record) -> str:
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([record])
    assert caught.value.uncertain
    return str(caught.value)
