"""The contract suite for the eventhubs sink over HTTPS. tests/interop runs the suite over AMQP."""

import datetime as dt
import ipaddress
import ssl
from typing import ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bridge.testing.calls import expect_accepted
from bridge.testing.http_contract import Answer, HttpPeer, HttpSinkContract

KEY = "c2VjcmV0LWtleS1vZi10aGUtY29udHJhY3Q="


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a file with a self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.timezone.utc)
    signed = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


# CPython's ssl does not close a socket that was reset before the handshake until the last reference is gone.
@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
class TestEventHubsSinkContractOverHttps(HttpSinkContract):
    sink_type = "eventhubs"
    secrets = (KEY, "SharedAccessSignature sr=")
    skips: ClassVar = {"test_part_of_a_batch_refused_is_rejected_by_name": "over HTTPS a request carries one record"}

    @pytest.fixture(autouse=True)
    def files(self, certificate, monkeypatch):
        self.certificate = certificate
        string = f"Endpoint=sb://ns.example.net;SharedAccessKeyName=send;SharedAccessKey={KEY};EntityPath=hub"
        monkeypatch.setenv("EVENT_HUBS", string)

    def peer(self):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate)
        return HttpPeer(ids_in=self.ids_in, accepted=Answer(status=201), tls=tls)

    def table(self, address):
        return {
            "transport": "https",
            "credential": "connection_string",
            "connection_string_env": "EVENT_HUBS",
            "endpoint": address.authority,
            "ca_file": str(self.certificate),
        }

    def test_undecodable_response_body_is_judged_by_its_status(self):
        with self.peer() as peer, self._host(peer.address) as host:
            peer.say(201, headers={"Content-Encoding": "gzip"}, body=b"this is no gzip")
            expect_accepted(host.send(self._batch()))
