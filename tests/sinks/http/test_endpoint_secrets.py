"""TLS, and secrets that no message or log line contains."""

import base64
import logging
import ssl
import traceback
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from endpoint_peers import DEADLINE, PATIENCE_SECONDS, Peer, outcome

from bridge.sink import DeliveryFailed, DeliveryRejected, Secret
from bridge.testing.simulator.imds_api import Answer

SECRET_PATH = "/services/T0000/B0000/XXXXXXXXSECRETXXXXXXXX"


def certificate(directory, *, host="127.0.0.1", days=(-1, 1)):
    """Return a file with a self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(timezone.utc)
    first, last = (now + timedelta(days=each) for each in days)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), first, last)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    file = directory / f"{host}{days[1]}.pem"
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    file.write_bytes(signed.public_bytes(pem) + private)
    return file


def tls_peer(file, *, client_ca=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return Peer(tls=context)


def test_private_ca_is_trusted_only_with_its_file(endpoint, tmp_path):
    file = certificate(tmp_path)
    peer = tls_peer(file)
    try:
        assert outcome(endpoint(peer.url, ca_file=str(file), timeout_seconds=5.0)) == ("delivered", frozenset())
        assert outcome(endpoint(peer.url, timeout_seconds=5.0)) == ("failed", {"needs_attention"})
    finally:
        peer.close()


@pytest.mark.parametrize("fault", [{"days": (-3, -1)}, {"host": "127.0.0.2"}], ids=["expired", "another host"])
def test_invalid_certificate_needs_attention(endpoint, tmp_path, fault):
    file = certificate(tmp_path, **fault)
    peer = tls_peer(file)
    try:
        wrong = endpoint(peer.url, ca_file=str(file), timeout_seconds=5.0)
        assert outcome(wrong) == ("failed", {"needs_attention"})
    finally:
        peer.close()


def test_client_certificate_is_sent_and_a_missing_one_fails(endpoint, tmp_path):
    file = certificate(tmp_path)
    peer = tls_peer(file, client_ca=file)
    keys = {"ca_file": str(file), "timeout_seconds": 5.0}
    try:
        assert outcome(endpoint(peer.url, client_cert_file=str(file), **keys))[0] == "delivered"
        word, said = outcome(endpoint(peer.url, **keys))
        assert word == "failed"
        assert "gone" not in said
    finally:
        peer.close()


def everything_said(error):
    return "".join([*traceback.format_exception(error), repr(error), str(error)])


@pytest.mark.parametrize("status", [200, 302, 400, 403, 404, 410, 500, "refused", "reset", "silent", "headers"])
def test_errors_and_log_lines_contain_no_secret(  # noqa: PLR0917  # fixtures
    peer, raw_peer, endpoint, tmp_path, caplog, status
):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text("tok-SECRET-token")
    (tmp_path / "headers").write_text("X-Api-Key: key-SECRET-key\nAuthorization-Two: Basic bWU6U0VDUkVU\n")
    (tmp_path / "more").write_text("more-SECRET-1\nmore-SECRET-2\n")
    secrets = ["XXXXXXXXSECRETXXXXXXXX", "sig-SECRET-sig", "tok-SECRET-token", "key-SECRET-key", "bWU6U0VDUkVU"]
    secrets += ["more-SECRET-1", "more-SECRET-2"]
    # The truncation limit is inside a secret, because half a secret is also a secret.
    echo = ("x" * 230 + f" Cannot POST {SECRET_PATH} " + " ".join(secrets)).encode()
    if isinstance(status, int):
        peer.answer = Answer(status=status, body=echo, headers={"Location": f"https://x.invalid{SECRET_PATH}"})
    behaviours = {
        "reset": lambda *_: None,
        "silent": lambda each, _: each.stop.wait(30),
        "headers": lambda _, connection: connection.sendall(b"HTTP/1.1 500 no\r\nbroken header\r\n\r\n"),
        "refused": None,
    }
    url = peer.url if isinstance(status, int) else "http://127.0.0.1:1"
    if behaviours.get(status) is not None:
        url = raw_peer(behaviours[status]).url
    each = endpoint(
        f"{url}{SECRET_PATH}?sig=sig-SECRET-sig",
        bearer_token_file=str(tmp_path / "token"),
        headers_file=str(tmp_path / "headers"),
        secrets=(Secret(key="more", file=str(tmp_path / "more")),),
        timeout_seconds=DEADLINE if status == "silent" else PATIENCE_SECONDS,
    )
    said = ""
    try:
        each.post(b"{}", {})
    except (DeliveryFailed, DeliveryRejected) as error:
        said = everything_said(error)
        assert url in said
    said += caplog.text + repr(each)
    assert not [secret for secret in (*secrets, "SECRET") if secret in said], said


def basic(user_and_password):
    return base64.b64encode(user_and_password.encode("latin-1")).decode()


@pytest.mark.parametrize("pair", ["me:hunter2", "m%C3%A9:hunter%2F2", "x:y", "only-me"])
def test_url_credentials_are_masked_in_their_encoded_form(peer, endpoint, pair):
    each = endpoint(peer.url.replace("://", f"://{pair if ':' in pair else pair + ':'}@"))
    assert each.post(b"{}", {}).status_code == 200
    sent = peer.requests.get().headers["authorization"]
    assert sent.startswith("Basic ")
    peer.answer = Answer(status=400, body=f"Authorization: {sent} ({sent.partition(' ')[2]})".encode())
    with pytest.raises(DeliveryRejected) as refused:
        each.post(b"{}", {})
    assert sent.partition(" ")[2] not in everything_said(refused.value)
    assert "Authorization: Basic <secret> (<secret>)" in str(refused.value)


def test_proxy_credentials_are_masked_in_their_encoded_form(peer, endpoint, tmp_path):
    (tmp_path / "proxy").write_text(peer.url.replace("://", "://me:hunter2@"))
    each = endpoint("http://hook.invalid/", proxy_file=str(tmp_path / "proxy"))
    peer.answer = Answer(status=400, body=f"Proxy-Authorization: Basic {basic('me:hunter2')}".encode())
    with pytest.raises(DeliveryRejected, match="Basic <secret>"):
        each.post(b"{}", {})
    assert peer.requests.get().headers["proxy-authorization"] == f"Basic {basic('me:hunter2')}"


@pytest.mark.parametrize("source", ["token", "file", "setting"])
def test_explicit_authorization_takes_precedence_over_url_credentials(peer, endpoint, tmp_path, source):
    (tmp_path / "token").write_text("one")
    (tmp_path / "file").write_text("authorization: Bearer one\n")
    keys = {
        "token": {"bearer_token_file": str(tmp_path / "token")},
        "file": {"headers_file": str(tmp_path / "file")},
        "setting": {"headers": {"AUTHORIZATION": "Bearer one"}},
    }
    endpoint(peer.url.replace("://", "://me:hunter2@"), **keys[source]).post(b"{}", {})
    assert peer.requests.get().headers["authorization"] == "Bearer one"
