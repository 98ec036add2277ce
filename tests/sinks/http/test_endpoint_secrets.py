"""TLS, and secrets that no message or log line contains."""

import base64
import logging
import ssl
import traceback
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest
import trustme
from endpoint_outcome import DEADLINE, PATIENCE_SECONDS, outcome
from private_ca import PrivateCa
from slow_peer import responding, silent

from bridge.sink import DeliveryFailed, DeliveryRejected, Secret
from bridge.testing.http_peer import HttpPeer

SECRET_PATH = "/services/T0000/B0000/XXXXXXXXSECRETXXXXXXXX"


@contextmanager
def https(context):
    """Yield the URL of a peer with this TLS context."""
    with HttpPeer(tls=context) as peer:
        yield f"https://{peer.address.authority}"


def test_private_ca_is_trusted_only_with_its_file(endpoint, tmp_path):
    ca = PrivateCa(tmp_path)
    with https(ca.server_context()) as url:
        assert outcome(endpoint(url, ca_file=str(ca.ca_file), timeout_seconds=5.0)) == ("delivered", frozenset())
        assert outcome(endpoint(url, timeout_seconds=5.0)) == ("failed", {"needs_attention"})


@pytest.mark.parametrize(("host", "days"), [("127.0.0.1", -1), ("127.0.0.2", 1)], ids=["expired", "another host"])
def test_invalid_certificate_needs_attention(endpoint, tmp_path, host, days):
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    ends_at = datetime.now(timezone.utc) + timedelta(days=days)
    ca.issue_cert(host, not_before=ends_at - timedelta(days=3), not_after=ends_at).configure_cert(context)
    with https(context) as url:
        wrong = endpoint(url, ca_file=str(tmp_path / "ca.pem"), timeout_seconds=5.0)
        assert outcome(wrong) == ("failed", {"needs_attention"})


def test_client_certificate_is_sent_and_a_missing_one_fails(endpoint, tmp_path):
    ca = PrivateCa(tmp_path)
    cert_file, key_file = map(str, ca.issue("client"))
    keys = {"ca_file": str(ca.ca_file), "timeout_seconds": 5.0}
    with https(ca.server_context(wants_client=True)) as url:
        assert outcome(endpoint(url, client_cert_file=cert_file, client_key_file=key_file, **keys))[0] == "delivered"
        word, said = outcome(endpoint(url, **keys))
        assert word == "failed"
        assert "gone" not in said


def everything_said(error):
    return "".join([*traceback.format_exception(error), repr(error), str(error)])


BEHAVIOURS = {
    "reset": lambda peer, connection, _: peer.read_request(connection),
    "silent": silent,
    "headers": responding(b"HTTP/1.1 500 no\r\nbroken header\r\n\r\n"),
}


@pytest.mark.parametrize("status", [200, 302, 400, 403, 404, 410, 500, "refused", *BEHAVIOURS])
def test_errors_and_log_lines_contain_no_secret(  # noqa: PLR0917  # fixtures
    peer, url, start_peer, endpoint, tmp_path, caplog, status
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
        peer.say(status, body=echo, headers={"Location": f"https://x.invalid{SECRET_PATH}"})
    elif status == "refused":
        url = "http://127.0.0.1:1"
    else:
        url = f"http://127.0.0.1:{start_peer(BEHAVIOURS[status]).port}"
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


@pytest.mark.parametrize("pair", ["me:hunter2", "m%C3%A9:hunter%2F2", "x:y", "only-me"])
def test_url_credentials_are_masked_in_their_encoded_form(peer, url, endpoint, pair):
    each = endpoint(url.replace("://", f"://{pair if ':' in pair else pair + ':'}@"))
    assert each.post(b"{}", {}).status_code == 200
    sent = peer.requests[-1].headers["authorization"]
    assert sent.startswith("Basic ")
    peer.say(400, body=f"Authorization: {sent} ({sent.partition(' ')[2]})".encode())
    with pytest.raises(DeliveryRejected) as refused:
        each.post(b"{}", {})
    assert sent.partition(" ")[2] not in everything_said(refused.value)
    assert "Authorization: Basic <secret> (<secret>)" in str(refused.value)


def test_proxy_credentials_are_masked_in_their_encoded_form(peer, url, endpoint, tmp_path):
    (tmp_path / "proxy").write_text(url.replace("://", "://me:hunter2@"))
    each = endpoint("http://hook.invalid/", proxy_file=str(tmp_path / "proxy"))
    basic = f"Basic {base64.b64encode(b'me:hunter2').decode()}"
    peer.say(400, body=f"Proxy-Authorization: {basic}".encode())
    with pytest.raises(DeliveryRejected, match="Basic <secret>"):
        each.post(b"{}", {})
    assert peer.requests[-1].headers["proxy-authorization"] == basic


@pytest.mark.parametrize("source", ["token", "file", "setting"])
def test_explicit_authorization_takes_precedence_over_url_credentials(peer, url, endpoint, tmp_path, source):
    (tmp_path / "token").write_text("one")
    (tmp_path / "file").write_text("authorization: Bearer one\n")
    keys = {
        "token": {"bearer_token_file": str(tmp_path / "token")},
        "file": {"headers_file": str(tmp_path / "file")},
        "setting": {"headers": {"AUTHORIZATION": "Bearer one"}},
    }
    endpoint(url.replace("://", "://me:hunter2@"), **keys[source]).post(b"{}", {})
    assert peer.requests[-1].headers["authorization"] == "Bearer one"
