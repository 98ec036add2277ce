"""The shared endpoint of the HTTP sinks with real servers: status codes, redirects, headers, and proxies."""

import socket
import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from endpoint_outcome import outcome
from slow_peer import answer, responding

from bridge.sink import DeliveryFailed
from bridge.testing.http_peer import HttpPeer
from sinks.http.config import HttpConfig
from sinks.http.endpoint import Endpoint

MATRIX = {
    **dict.fromkeys((200, 201, 202, 204), ("delivered", set())),
    **dict.fromkeys((301, 302, 303, 307, 308, 401, 403, 404, 407), ("failed", {"needs_attention"})),
    410: ("failed", {"needs_attention", "gone"}),
    **dict.fromkeys((400, 402, 405, 409, 413, 415, 422, 431), ("parked", set())),
    **dict.fromkeys((408, 421, 423, 425, 429, 500, 501, 502, 503, 504, 520), ("failed", set())),
}


@pytest.mark.parametrize("status", MATRIX)
def test_status_code_determines_the_outcome(peer, url, endpoint, status):
    peer.say(status, headers={"Location": f"{url}/elsewhere"}, body=b"")
    assert outcome(endpoint(f"{url}/here")) == (MATRIX[status][0], frozenset(MATRIX[status][1]))
    # No redirect, no repeated request. Requests to a previous owner of the port do not count.
    assert [each.path for each in peer.requests if each.path in ("/here", "/elsewhere")] == ["/here"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("17", 17.0),
        ("a date in an hour", 3600.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_retry_after_is_passed_to_the_host(peer, url, endpoint, status, text, seconds):  # noqa: PLR0917  # fixtures
    if text == "a date in an hour":
        text = format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    peer.say(status, headers={"Retry-After": text})
    with pytest.raises(DeliveryFailed) as failed:
        endpoint(url).post(b"{}", {})
    assert failed.value.retry_after == (seconds if seconds is None else pytest.approx(seconds, abs=120))


def test_configured_statuses_override_the_table(peer, url, endpoint):
    overridden = endpoint(url, retry_statuses=(400, 410, 202), park_statuses=(503, 401))
    wanted = {400: "failed", 410: "failed", 202: "failed", 503: "parked", 401: "parked"}
    for status, word in wanted.items():
        peer.say(status)
        assert outcome(overridden)[0] == word


def test_redirect_is_not_followed_to_another_host(peer, url, endpoint, tmp_path):
    (tmp_path / "token").write_text("tok-abcdef")
    with HttpPeer() as other:
        other_url = f"http://{other.address.authority}"
        for status in (301, 302, 303, 307, 308):
            peer.say(status, headers={"Location": f"{other_url}/hook"}, body=b"")
            with pytest.raises(DeliveryFailed, match=f"points to {other_url}"):
                endpoint(url, bearer_token_file=str(tmp_path / "token")).post(b"{}", {})
        assert not other.requests


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_connection_closed_by_the_peer_causes_no_failure(start_peer, endpoint, how):
    def answer_and_hang_up(peer, connection, _):
        peer.read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        if how == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
        gone.set()

    gone = threading.Event()
    each = endpoint(start_peer(answer_and_hang_up).url)
    for _ in range(5):
        gone.clear()
        assert outcome(each) == ("delivered", frozenset())
        assert gone.wait(5)


def test_headers_are_merged_from_configuration_file_and_token(peer, url, endpoint, tmp_path):
    token, headers = tmp_path / "token", tmp_path / "headers"
    token.write_text("one\n")
    headers.write_text("X-Api-Key: abc:def\n# a comment\nX-Two:  two \n")
    each = endpoint(url, headers={"X-Team": "payments"}, headers_file=str(headers), bearer_token_file=str(token))
    each.post(b"{}", {})
    got = peer.requests[-1].headers
    assert (got["x-team"], got["x-api-key"], got["x-two"]) == ("payments", "abc:def", "two")
    assert got["authorization"] == "Bearer one"
    token.write_text("rotated\n")
    each.post(b"{}", {})
    assert peer.requests[-1].headers["authorization"] == "Bearer rotated"


@pytest.mark.parametrize("line", ["just-a-secret-word", "X-Key: caf\u00e9-secret", "Content-Length: 3", "X Y: secret"])
def test_invalid_header_needs_attention_and_is_not_in_the_error(url, endpoint, tmp_path, line):
    (tmp_path / "headers").write_text(f"{line}\n")
    with pytest.raises(DeliveryFailed, match="headers_file, line 1") as failed:
        endpoint(url, headers_file=str(tmp_path / "headers")).post(b"{}", {})
    assert failed.value.needs_attention
    assert "secret" not in str(failed.value)


def test_configured_proxy_is_used_and_the_environment_is_ignored(peer, url, endpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert outcome(endpoint(url))[0] == "delivered"
    (tmp_path / "proxy").write_text(f"http://me:pass-word@{peer.address.authority}\n")
    through = endpoint("http://example.invalid/hook", proxy_file=str(tmp_path / "proxy"))
    assert outcome(through)[0] == "delivered"
    assert "proxy-authorization" in peer.requests[-1].headers


def test_proxy_authentication_failure_needs_attention(start_peer, endpoint):
    refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    proxy = start_peer(responding(refusal))
    for scheme in ("http", "https"):
        through = endpoint(f"{scheme}://example.invalid/hook", proxy=f"http://127.0.0.1:{proxy.port}")
        assert outcome(through) == ("failed", {"needs_attention"}), scheme


def test_long_idle_connection_is_not_reused(start_peer):
    peer, clock = start_peer(answer), [0.0]
    each = Endpoint(peer.url, HttpConfig(), monotonic=lambda: clock[0])
    for seconds, connections in ((0.0, 1), (59.0, 1), (61.0, 2), (1.0, 2)):
        clock[0] += seconds
        each.post(b"{}", {})
        assert peer.accepted == connections
    each.close()
