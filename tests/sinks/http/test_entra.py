"""Entra ID tokens of the HTTP sinks, with the simulator's token endpoint and a receiver that validates tokens."""

import base64
import json
import time

import pytest
from closing import closing_each
from managed_identity import managed_identity

from bridge.config.loader import read
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryFailed
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_record
from bridge.testing.simulator.faults import Fault
from bridge.testing.watching import in_time

SCOPE = "https://monitor.azure.com//.default"
AUDIENCE = "https://monitor.azure.com/"
TABLES = {
    "webhook": lambda url: {"type": "webhook", "url": f"{url}/hook"},
    "otlp": lambda url: {"type": "otlp", "endpoint": url},
}


@pytest.fixture
def imds(monkeypatch):
    with managed_identity(monkeypatch) as simulator:
        yield simulator


class Receiver:
    """Accepts requests with a valid token for *AUDIENCE*, except for tokens in `refused`."""

    def __init__(self, peer):
        self._peer = peer
        self.url = f"http://{peer.address.authority}"
        self.refused = set()
        self.refuses_all = False
        peer.reply(self._answer)

    @property
    def tokens(self):
        return [request.headers["authorization"].removeprefix("Bearer ") for request in self._peer.requests]

    def _answer(self, request):
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or self.refuses_all or token in self.refused or claims(token)["aud"] != AUDIENCE:
            return Answer(status=401, body=f"refused: {token}".encode())
        return Answer(status=204)


def claims(token):
    payload = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


@pytest.fixture
def receiver():
    with HttpPeer() as peer:
        yield Receiver(peer)


@pytest.fixture
def make_sink(receiver):
    def sink_of(kind="webhook", **keys):
        table = {**TABLES[kind](receiver.url), "entra_scope": SCOPE, "timeout_seconds": 30.0, **keys}
        [settings] = read({"sinks": [table]}).sinks
        return settings.build()

    with closing_each(sink_of) as make:
        yield make


@pytest.mark.usefixtures("imds")
@pytest.mark.parametrize("kind", TABLES)
def test_each_request_carries_the_token_of_the_managed_identity(make_sink, receiver, kind):
    sink = make_sink(kind)
    sink.send([sample_record(1)])
    sink.send([sample_record(2)])
    sink.check()
    assert [claims(token)["aud"] for token in receiver.tokens] == [AUDIENCE] * 3
    assert len(set(receiver.tokens)) == 1


@pytest.mark.usefixtures("imds")
@pytest.mark.parametrize("kind", TABLES)
def test_rejected_token_is_replaced_and_is_not_in_the_error(make_sink, receiver, kind):
    sink = make_sink(kind)
    sink.send([sample_record(1)])
    receiver.refused.add(receiver.tokens[0])
    time.sleep(1.01 - time.time() % 1)  # the simulator creates one token per second
    with pytest.raises(DeliveryFailed, match="401") as caught:
        sink.send([sample_record(2)])
    assert not caught.value.needs_attention
    assert "Check entra_scope" in str(caught.value)
    assert receiver.tokens[0] not in str(caught.value) + repr(caught.value)
    sink.send([sample_record(2)])
    assert len(set(receiver.tokens)) == 2


def test_replaced_token_is_not_replaced_again_on_each_retry(make_sink, receiver, imds):
    receiver.refuses_all = True
    sink = make_sink()
    for _ in range(5):
        with pytest.raises(DeliveryFailed, match="401") as caught:
            sink.send([sample_record()])
    assert caught.value.needs_attention
    assert len([each for each in imds.requests if "oauth2/token" in each.path]) == 2


def test_hung_token_endpoint_fails_within_the_deadline(make_sink, receiver, imds):
    make_sink().send([sample_record(1)])  # imports azure-identity
    imds.world.set_fault(Fault(kind="silence", target="token"))
    sink = make_sink(timeout_seconds=0.4)

    def send_in_vain():
        with pytest.raises(DeliveryFailed, match=r"returned no token within 0\.4 s"):
            sink.send([sample_record(2)])

    for _ in range(2):
        in_time(send_in_vain, deadline_seconds=0.4)
    assert len(receiver.tokens) == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"entra_scope": ""}, "entra_scope"),
        ({"entra_scope": "two scopes"}, "one scope"),
        ({"entra_scope": SCOPE, "bearer_token_file": "/token"}, "bearer_token_file and entra_scope are both set"),
        ({"entra_scope": SCOPE, "headers": {"authorization": "Bearer x"}}, "Authorization"),
    ],
)
@pytest.mark.parametrize("kind", TABLES)
def test_invalid_scope_is_rejected(kind, keys, words):
    with pytest.raises(ConfigurationError, match=words):
        read({"sinks": [{**TABLES[kind]("https://example.net"), **keys}]})


@pytest.mark.parametrize("kind", TABLES)
def test_token_requires_https_except_on_loopback(kind):
    with pytest.raises(ConfigurationError, match="https"):
        read({"sinks": [{**TABLES[kind]("http://example.net"), "entra_scope": SCOPE}]})


@pytest.mark.parametrize("key", ["proxy", "proxy_file", "proxy_env"])
@pytest.mark.parametrize("kind", TABLES)
def test_token_requires_https_through_a_proxy(kind, key):
    keys = {"entra_scope": SCOPE, key: "http://proxy.example.net:3128"}
    read({"sinks": [{**TABLES[kind]("https://localhost"), **keys}]})
    with pytest.raises(ConfigurationError, match="https URL, because the proxy can read a token"):
        read({"sinks": [{**TABLES[kind]("http://localhost:8080"), **keys}]})


def test_token_is_not_sent_to_a_plain_http_url_from_a_file(tmp_path):
    (tmp_path / "url").write_text("http://example.net/hook\n")
    table = {"type": "webhook", "url_file": str(tmp_path / "url"), "entra_scope": SCOPE}
    sink = read({"sinks": [table]}).sinks[0].build()
    with pytest.raises(DeliveryFailed, match="https") as caught:
        sink.send([sample_record()])
    sink.close()
    assert caught.value.needs_attention
