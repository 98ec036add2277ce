"""The reference library of Standard Webhooks (PyPI: standardwebhooks) verifies the requests of the webhook sink."""

import base64
import json

import pytest

from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import sample_event, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

pytestmark = pytest.mark.interop

standardwebhooks = pytest.importorskip("standardwebhooks", reason="standardwebhooks is not installed")

NEW, OLD, STRANGE = (f"whsec_{base64.b64encode(bytes([n]) * size).decode()}" for n, size in ((1, 24), (2, 32), (3, 64)))


@pytest.fixture
def request_of(tmp_path):
    (tmp_path / "secrets").write_text(f"{NEW}\n{OLD}\n")
    with HttpPeer() as peer:
        config = WebhookConfig(url=f"http://{peer.address.authority}/hook", secret_file=str(tmp_path / "secrets"))
        sink = WebhookSink(config)

        def send(**fields):
            sink.send([sample_record(**fields)])
            return peer.requests[-1]

        yield send
        sink.close()


@pytest.mark.parametrize("secret", [NEW, OLD])
def test_receiver_verifies_with_the_new_or_the_old_secret(request_of, secret):
    request = request_of(event=sample_event(description='"\u2603\n'))
    verified = standardwebhooks.Webhook(secret).verify(request.body, dict(request.headers))
    assert verified["data"] == json.loads(request.body)["data"]


def test_receiver_rejects_a_wrong_secret_or_a_changed_body(request_of):
    request = request_of()
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(STRANGE).verify(request.body, dict(request.headers))
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(NEW).verify(request.body + b" ", dict(request.headers))
