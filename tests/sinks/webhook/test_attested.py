"""The sink `webhook` with `credential = "attested"`: each request carries the portal's token for this VM."""

import contextlib

import pytest
from attesting import Attesting

from bridge.config.loader import read
from bridge.config.settings import ImdsSettings
from bridge.errors import ConfigurationError
from bridge.imds.client import ImdsClient, attested_tokens
from bridge.sink import DeliveryFailed
from bridge.testing import Simulator
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import sample_record

PATIENCE_SECONDS = 20.0


@pytest.fixture
def azure():
    with Simulator(rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def attesting():
    return Attesting()


@pytest.fixture
def portal(attesting):
    """Return a peer that responds like a portal."""

    with HttpPeer() as peer:
        peer.reply(attesting.answer)
        yield peer


@pytest.fixture
def make_sink(portal, azure):
    with contextlib.ExitStack() as stack:
        imds = stack.enter_context(contextlib.closing(ImdsClient(ImdsSettings(endpoint=azure.endpoint))))

        def make(document=imds.attested_document, **keys):
            [settings] = read({"sinks": [table(portal, **{"timeout_seconds": PATIENCE_SECONDS, **keys})]}).sinks
            sink = settings.build()
            sink.attest_by(attested_tokens(document))
            stack.callback(sink.close)
            return sink

        yield make


def table(portal, **keys):
    url = f"http://{portal.address.authority}/api/v1/records"
    return {"type": "webhook", "url": url, "credential": "attested", **keys}


def test_records_carry_a_cached_token_for_this_vm(make_sink, attesting, azure):
    sink = make_sink()
    sink.send([sample_record(1)])
    sink.send([sample_record(2)])
    assert [token for token, _ in attesting.records] == ["token-1", "token-1"]
    assert [record["sequence"] for _, record in attesting.records] == [1, 2]
    assert attesting.tokens == {"token-1": azure.machines[0].vm_id}


def test_rejected_token_is_renewed_for_the_retry_and_is_not_in_the_error(make_sink, attesting):
    sink = make_sink()
    sink.send([sample_record(1)])
    attesting.tokens.clear()
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([sample_record(2)])
    assert not caught.value.needs_attention
    assert "token-1" not in str(caught.value)
    sink.send([sample_record(2)])
    assert [token for token, _ in attesting.records] == ["token-1", "token-2"]
    attesting.tokens.clear()  # too soon for another token
    with pytest.raises(DeliveryFailed, match="rejected a token that it issued") as caught:
        sink.send([sample_record(3)])
    assert caught.value.needs_attention


def test_rejection_of_the_document_is_reported_with_the_reason_of_the_portal(make_sink, attesting):
    attesting.refuses = [(403, "subscription_not_listed")]
    with pytest.raises(DeliveryFailed, match="subscription_not_listed") as caught:
        make_sink().send([sample_record()])
    assert caught.value.needs_attention


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"url": "https://portal.example.net/api/v1"}, "ends in /records"),
        ({"url": "https://portal.example.net/?x=/records"}, "ends in /records"),
        ({"url": None, "url_env": "PORTAL_URL"}, "ends in /records"),
        ({"url": "http://portal.example.net/api/v1/records"}, "credential needs an https URL"),
        ({"bearer_token_file": "/token"}, "bearer_token_file and credential are both set"),
        ({"entra_scope": "api://x"}, "entra_scope and credential are both set"),
        ({"headers": {"authorization": "Bearer x"}}, "Authorization"),
        ({"format": "alertmanager"}, "the format is 'alertmanager'"),
        ({"credential": "entra"}, "but must be 'attested'"),
    ],
)
def test_contradictory_credential_settings_are_rejected(keys, words):
    wanted = {
        "type": "webhook",
        "url": "https://portal.example.net/api/v1/records",
        "credential": "attested",
        **keys,
    }
    with pytest.raises(ConfigurationError, match=words):
        read({"sinks": [{key: value for key, value in wanted.items() if value is not None}]})
