"""The exchange of an attested document for a token: three steps, each refusal, and deadlines."""

import base64
import json
from datetime import datetime, timezone

import pytest
import requests
from closing import closing_each

from bridge.errors import CredentialFailed, ImdsUnreachable
from bridge.system.access_tokens import CHALLENGE_PATH, TOKEN_PATH, AttestedToken, DocumentRefusal
from bridge.testing import ManualClock

PATIENCE_SECONDS = 20.0
CHALLENGE = {"nonce": "abc", "expires_in": 360}
TOKEN = {"token": "t1", "expires_in": 3600}


def answer(status, value, **headers):
    made = requests.Response()
    made.status_code = status
    made._content = value if isinstance(value, bytes) else json.dumps(value).encode()
    made.headers.update(headers)
    return made


def refused(status, reason, **headers):
    return answer(status, {"error": "words of the portal", "reason": reason}, **headers)


class Portal:
    """Returns *challenge*, and the n-th of *answers* for the n-th document. The last answer repeats."""

    def __init__(self, *answers, challenge=None):
        self.answers = list(answers) or [answer(200, TOKEN)]
        self.challenge = answer(200, CHALLENGE) if challenge is None else challenge
        self.asked = []

    def __call__(self, path, body):
        self.asked.append((path, json.loads(body)))
        if path == CHALLENGE_PATH:
            found = self.challenge
        else:
            assert path == TOKEN_PATH
            found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def clock():
    return ManualClock(datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc))


@pytest.fixture
def token(clock):
    """Return a factory of tokens with a manual clock, which lists the waits in `waits`."""

    def token_of(portal, document=lambda nonce: f"document of {nonce}", **options):
        waits = []

        def pause(_, seconds):
            waits.append(seconds)
            clock.advance(seconds)

        found = AttestedToken(portal, document, portal="https://p", **{"clock": clock.clock, "pause": pause, **options})
        found.waits = waits
        return found

    with closing_each(token_of) as make:
        yield make


def current(token):
    return token.current(wait_seconds=PATIENCE_SECONDS).token


def test_portal_exchanges_the_document_for_its_challenge_for_a_token(token):
    portal = Portal()

    assert current(token(portal)) == "t1"
    assert portal.asked == [(CHALLENGE_PATH, {}), (TOKEN_PATH, {"document": "document of abc"})]


def test_stale_document_is_requested_again_with_the_same_challenge(token):
    portal = Portal(refused(409, "old_nonce"), refused(409, "replayed"), refused(409, "too_old"), answer(200, TOKEN))
    documents = []
    made = token(portal, lambda nonce: documents.append(nonce) or f"document {len(documents)}")

    assert current(made) == "t1"
    assert documents == ["abc"] * 4
    assert [path for path, _ in portal.asked].count(CHALLENGE_PATH) == 1
    assert made.waits == [5.0, 10.0, 20.0]


@pytest.mark.parametrize("reason", ["old_nonce", "replayed"])
def test_expired_challenge_is_replaced_at_the_next_attempt(token, reason):
    portal = Portal(refused(409, reason), answer(200, TOKEN))
    made = token(portal, lambda nonce: base64.b64encode(b"signed: " + nonce.encode()).decode())

    with pytest.raises(CredentialFailed, match="uses another challenge") as caught:
        current(made)
    assert not caught.value.needs_attention
    assert not made.waits
    assert current(made) == "t1"
    assert [path for path, _ in portal.asked].count(CHALLENGE_PATH) == 2


@pytest.mark.parametrize(("expires_in", "most_seconds"), [(360, 300), (30, 30)])
def test_stale_document_is_retried_until_the_challenge_expires_or_five_minutes(token, clock, expires_in, most_seconds):
    portal = Portal(refused(409, "old_nonce"), challenge=answer(200, {"nonce": "abc", "expires_in": expires_in}))
    made = token(portal)
    began = clock.monotonic()

    with pytest.raises(CredentialFailed, match=r"409 Conflict .*\(old_nonce\).*preferred") as caught:
        current(made)
    assert caught.value.needs_attention
    assert most_seconds - 40 < clock.monotonic() - began <= most_seconds


@pytest.mark.parametrize("reason", [DocumentRefusal.FORGED, DocumentRefusal.SUBSCRIPTION_NOT_LISTED])
def test_refusal_is_reported_with_its_reason_and_without_a_retry(token, reason):
    made = token(Portal(refused(403, reason.value)))

    with pytest.raises(CredentialFailed, match=rf"403 Forbidden to /agents/token \({reason.value}\)") as caught:
        current(made)
    assert caught.value.needs_attention
    assert "words of the portal" not in str(caught.value)
    assert not made.waits


@pytest.mark.parametrize("body", [b"{", b'{"reason": "<script>"}', b"[" * 9000])
def test_unknown_reason_of_the_portal_is_not_shown(token, body):
    with pytest.raises(CredentialFailed) as caught:
        current(token(Portal(answer(403, body))))
    assert str(caught.value) == (
        "The portal at https://p responded with 403 Forbidden to /agents/token. "
        "Check that the portal accepts attested documents."
    )


@pytest.mark.parametrize(("status", "needs_attention"), [(404, True), (500, False)])
def test_missing_challenge_is_reported_with_portal_and_status(token, status, needs_attention):
    with pytest.raises(CredentialFailed, match=f"responded with {status} .* to /agents/challenge") as caught:
        current(token(Portal(challenge=answer(status, b""))))
    assert caught.value.needs_attention is needs_attention


def test_retry_after_of_the_portal_is_used(token):
    with pytest.raises(CredentialFailed) as caught:
        current(token(Portal(answer(503, b"", **{"Retry-After": "7"}))))
    assert caught.value.retry_after_seconds == 7
    assert not caught.value.needs_attention


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"[]",
        {"nonce": "abc", "expires_in": "360"},
        {"nonce": "a" * 33},
        {"nonce": "abc\n"},
    ],
)
def test_malformed_challenge_is_not_used(token, wrong):
    asked = []
    with pytest.raises(CredentialFailed, match="not a valid Challenge"):
        current(token(Portal(challenge=answer(200, wrong)), asked.append))
    assert not asked


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        {"token": "t"},
        {"token": "t\n", "expires_in": 3600},
        {"token": "t" * 4097, "expires_in": 3600},
        {"token": "t", "expires_in": 10**9},
    ],
)
def test_token_invalid_in_a_header_or_without_expiry_is_not_used(token, wrong):
    with pytest.raises(CredentialFailed, match="not a valid TokenAnswer"):
        current(token(Portal(answer(200, wrong))))


def test_missing_attested_document_is_a_transient_failure(token):
    def document(_):
        raise ImdsUnreachable("The metadata service gave no answer.")

    with pytest.raises(CredentialFailed, match="gave no answer") as caught:
        current(token(Portal(), document))
    assert not caught.value.needs_attention
