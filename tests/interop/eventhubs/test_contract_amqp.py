"""The contract suite for the eventhubs sink over AMQP, with the emulator as the peer."""

from typing import ClassVar

import pytest

from bridge.testing.contract import SinkContract
from bridge.testing.peers import Address, Peer

pytestmark = pytest.mark.interop

KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdHM="


class EmulatedHub(Peer):
    """The emulator as a peer of the contract suite."""

    def __init__(self, emulator):
        self._emulator = emulator
        self._before = emulator.state()["transfers"]
        self.address = Address(host="127.0.0.1", port=emulator.ports["amqp"])

    @property
    def received(self):
        return self._emulator.state()["writes"][self._before :]

    def accept(self):
        self._emulator.set(standing_fault={})

    def refuse_for_good(self):
        self._emulator.set(standing_fault={"kind": "reject", "condition": "com.microsoft:argument-error"})

    def refuse_for_now(self, retry_after_seconds=None):
        busy = {"condition": "com.microsoft:server-busy", "description": f"Please wait {retry_after_seconds} seconds."}
        self._emulator.set(standing_fault={"kind": "reject", **(busy if retry_after_seconds else {})})

    def stay_silent(self):
        self._emulator.set(standing_fault={"kind": "no_ack"})

    def close(self):
        self.accept()


class TestEventHubsSinkContractOverAmqp(SinkContract):
    sink_type = "eventhubs"
    secrets = (KEY, "SharedAccessSignature sr=")
    batch_size = 3
    deadline_seconds = 1.5  # The SDK needs half a second to open a link.
    skips: ClassVar = {
        "test_part_of_a_batch_refused_is_rejected_by_name": "Event Hubs accepts or rejects a complete transfer"
    }

    @pytest.fixture(autouse=True)
    def peers(self, emulator, monkeypatch):
        self.emulator = emulator
        self.monkeypatch = monkeypatch

    def peer(self):
        return EmulatedHub(self.emulator)

    def table(self, address):
        variable = f"EVENT_HUBS_{address.port}"
        string = f"Endpoint=sb://{address.authority};SharedAccessKeyName=send;SharedAccessKey={KEY}"
        self.monkeypatch.setenv(variable, f"{string};EntityPath=scheduled-events;UseDevelopmentEmulator=true")
        return {"credential": "connection_string", "connection_string_env": variable}
