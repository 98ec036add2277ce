"""Standard Webhooks signatures, compared with the test vector of the reference libraries."""

from bridge.sink import Secret
from sinks.http.signature import Signer


def test_signature_matches_the_standard_webhooks_test_vector():
    # github.com/standard-webhooks, the test of its reference libraries.
    secret = Secret(key="secret", env="S", environ={"S": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"})
    body = b'{"test": 2432232314}'
    headers = Signer(secret).headers("msg_p5jXN8AQM9LWM0D4loKWxJek", body, timestamp=1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
