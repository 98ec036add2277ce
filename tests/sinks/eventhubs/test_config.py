"""The keys of the Event Hubs sink, and which of them go together."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.config.sinks import read_sinks
from bridge.config.toml import Problems
from sinks.eventhubs.config import EventHubsConfig

KEY = "c2VjcmV0LWtleQ=="
IDENTITY: dict[str, Any] = {"fully_qualified_namespace": "ns.servicebus.windows.net", "eventhub": "hub"}


def mistakes(**keys: Any) -> str:
    found = Problems()
    read_sinks([{"type": "eventhubs", **keys}], found, {})
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
            "both set; keep one",
        ),
        ({"credential": "connection_string", "connection_string_env": "X", "client_id": "c"}, "client_id belongs"),
        *(
            ({**IDENTITY, "fully_qualified_namespace": name}, "It has the form NAME.servicebus.windows.net")
            for name in ("fleet", "sb://fleet.servicebus.windows.net/", "fleet.", ".net", "a b.net", "a.net:port")
        ),
        ({**IDENTITY, "ca_file": "/nowhere/ca.pem"}, "ca_file: The file /nowhere/ca.pem does not exist."),
        ({**IDENTITY, "transport": "kafka"}, "transport"),
        ({**IDENTITY, "idle_close_seconds": -1}, "idle_close_seconds"),
    ],
)
def test_configuration_that_cannot_work_is_refused(keys, said) -> None:
    assert said in mistakes(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"fully_qualified_namespace": "ns.servicebus.usgovcloudapi.net"},
        {"fully_qualified_namespace": "127.0.0.1:5671"},
        {"fully_qualified_namespace": "localhost"},
        {"fully_qualified_namespace": "emulator", "endpoint": "127.0.0.1:5671"},
    ],
)
def test_namespaces_of_other_clouds_and_of_emulators_are_taken(keys) -> None:
    assert mistakes(**{**IDENTITY, **keys}) == ""


def test_connection_string_in_the_wrong_key_is_not_repeated() -> None:
    said = mistakes(**{**IDENTITY, "fully_qualified_namespace": f"Endpoint=sb://ns.net/;SharedAccessKey={KEY}"})
    assert "fully_qualified_namespace is no whole host name" in said
    assert KEY not in said


def test_identity_with_its_defaults_is_enough() -> None:
    config = EventHubsConfig(**IDENTITY)
    assert (config.credential, config.transport, config.max_batch) == ("managed_identity", "amqp", 100)
    assert EventHubsConfig(transport="https", **IDENTITY).max_batch == 1
