"""The contract suite for the eventhubs sink over HTTPS. tests/interop runs the suite over AMQP."""

from typing import ClassVar

import pytest
from private_ca import PrivateCa

from bridge.testing.calls import expect_accepted
from bridge.testing.http_contract import Answer, HttpPeer, HttpSinkContract

KEY = "c2VjcmV0LWtleS1vZi10aGUtY29udHJhY3Q="


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return PrivateCa(tmp_path_factory.mktemp("tls"))


# CPython's ssl does not close a socket that was reset before the handshake until the last reference is gone.
@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
class TestEventHubsSinkContractOverHttps(HttpSinkContract):
    sink_type = "eventhubs"
    secrets = (KEY, "SharedAccessSignature sr=")
    skips: ClassVar = {"test_part_of_a_batch_refused_is_rejected_by_name": "over HTTPS a request carries one record"}

    @pytest.fixture(autouse=True)
    def files(self, ca, monkeypatch):
        self.ca = ca
        string = f"Endpoint=sb://ns.example.net;SharedAccessKeyName=send;SharedAccessKey={KEY};EntityPath=hub"
        monkeypatch.setenv("EVENT_HUBS", string)

    def peer(self):
        return HttpPeer(ids_in=self.ids_in, accepted=Answer(status=201), tls=self.ca.server_context())

    def table(self, address):
        return {
            "transport": "https",
            "credential": "connection_string",
            "connection_string_env": "EVENT_HUBS",
            "endpoint": address.authority,
            "ca_file": str(self.ca.ca_file),
        }

    def test_undecodable_response_body_is_judged_by_its_status(self):
        with self.peer() as peer, self._host(peer.address) as host:
            peer.say(201, headers={"Content-Encoding": "gzip"}, body=b"this is no gzip")
            expect_accepted(host.send(self._batch()))
