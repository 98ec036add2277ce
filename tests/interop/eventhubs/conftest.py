"""The Event Hubs emulator as a process, the sink under test, and the consumer of the SDK."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from azure.eventhub.aio import EventHubConsumerClient
from eventhubs_emulator.process import NEEDS, Emulator, started
from private_ca import PrivateCa

from bridge.sink import ScheduledEvent, TransitionRecord, VmIdentity
from bridge.testing import Simulator
from bridge.testing.records import sample_record
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.sink import EventHubsSink

_READ_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A private certificate authority and its certificate for 127.0.0.1."""

    ca_file: str
    cert_file: str
    key_file: str


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return an authority that is not in the trust store of the system."""
    ca = PrivateCa(tmp_path_factory.mktemp("authority"))
    issued = ca.issue("localhost")
    return Authority(ca_file=str(ca.ca_file), cert_file=str(issued.cert_file), key_file=str(issued.key_file))


@pytest.fixture
def emulator(authority: Authority) -> Iterator[Emulator]:
    """Return a new, empty emulator."""
    if importlib.util.find_spec("proton") is None:
        pytest.skip(NEEDS)
    with started(cert_file=authority.cert_file, key_file=authority.key_file) as emulator:
        yield emulator


@pytest.fixture
def make_bare_sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EventHubsSink]]:
    """Return a function that builds a sink. *string* is the connection string, unless the sink uses an identity."""
    made: list[EventHubsSink] = []

    def make(*, string: str, **keys: Any) -> EventHubsSink:
        if keys.get("credential", "connection_string") == "connection_string":
            variable = f"EVENT_HUBS_{len(made)}"
            monkeypatch.setenv(variable, string)
            keys = {"credential": "connection_string", "connection_string_env": variable, **keys}
        sink = EventHubsSink(EventHubsConfig(**{"name": "hub", "timeout_seconds": 5.0, **keys}))
        made.append(sink)
        return sink

    yield make
    for sink in made:
        sink.close()


@pytest.fixture
def make_sink(emulator: Emulator, make_bare_sink: Callable[..., EventHubsSink]) -> Callable[..., EventHubsSink]:
    """Return a function that builds a sink for the emulator, by default over plain TCP."""
    return lambda **keys: make_bare_sink(**{"string": emulator.connection_string(), **keys})


@pytest.fixture
def identity_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Use the simulator for managed identities. Return a function that returns the claims of a token."""

    def claims(token: str) -> dict[str, Any]:
        payload = token.split(".")[1]
        found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return found

    with Simulator() as simulator:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        yield claims


@pytest.fixture
def make_record() -> Callable[..., TransitionRecord]:
    """Return a function that creates a record with an EventId and a sequence."""

    def make(event_id: str = "A-1", sequence: int = 1, **fields: Any) -> TransitionRecord:
        event = ScheduledEvent(event_id=event_id, event_type="Freeze", event_status="Scheduled", resources=("vm-1",))
        own = {"id": f"{event_id}/{sequence}", "sequence": sequence, "event": event, "vm": VmIdentity(name="vm-1")}
        return sample_record(**{**own, **fields})

    return make


@pytest.fixture
def consume(emulator: Emulator) -> Callable[[int], list[Any]]:
    """Return a function that reads the first events with the consumer of the SDK."""

    async def read(count: int) -> list[Any]:
        found: list[Any] = []
        done = asyncio.Event()

        async def on_event(context: Any, event: Any) -> None:
            del context
            found.append(event)
            if len(found) >= count:
                done.set()

        client = EventHubConsumerClient.from_connection_string(emulator.connection_string(), "$Default")
        # The SDK needs half a minute to claim all partitions, so read each partition directly.
        receiving = [
            asyncio.create_task(client.receive(on_event, partition_id=each, starting_position="-1"))
            for each in await client.get_partition_ids()
        ]
        await asyncio.wait_for(done.wait(), _READ_SECONDS)
        await client.close()
        for task in receiving:  # Without a cancel, the task ends up to half a minute later.
            task.cancel()
        await asyncio.gather(*receiving, return_exceptions=True)
        return found

    return lambda count: asyncio.run(read(count))
