"""An Entra token is renewed in the background, used until it expires, and requested with a deadline."""

import threading
import time

import pytest
from waiting import until

from bridge.clock import REAL_CLOCK
from bridge.errors import CredentialFailed
from bridge.system.access_tokens import AccessToken, RenewedToken
from bridge.testing.simulator.clock import ManualClock

PATIENCE_SECONDS = 15.0


def token_of(fetch, clock=REAL_CLOCK):
    return RenewedToken(fetch, source="Entra ID", advice="Assign an identity.", clock=clock)


@pytest.fixture
def manual():
    return ManualClock()


def counted(manual, lifetime):
    """Return a function that fetches token 1, token 2, and so on, and the list of its calls."""
    fetched = []

    def fetch():
        fetched.append(1)
        return AccessToken(f"token {len(fetched)}", int(manual.now().timestamp()) + lifetime)

    return fetch, fetched


def test_token_is_renewed_in_the_background_after_two_thirds_of_its_life(manual):
    lifetime = 3_600
    go_on = threading.Event()
    fetch, fetched = counted(manual, lifetime)

    def slowly():
        if fetched:
            go_on.wait(PATIENCE_SECONDS)
        return fetch()

    token = token_of(slowly, manual.clock)
    assert token.current(wait_seconds=PATIENCE_SECONDS).token == "token 1"
    manual.advance(lifetime * 2 / 3 - 1)
    assert token.current(wait_seconds=0).token == "token 1"
    manual.advance(2)
    assert token.current(wait_seconds=0).token == "token 1"
    go_on.set()
    until(lambda: token.current(wait_seconds=0).token == "token 2")
    assert len(fetched) == 2


def test_refused_token_is_replaced_at_most_once_in_five_minutes(manual):
    fetch, fetched = counted(manual, 3_600)
    token = token_of(fetch, manual.clock)
    for _ in range(4):
        token.refuse(token.current(wait_seconds=PATIENCE_SECONDS))
    assert len(fetched) == 2
    manual.advance(301)
    token.refuse(token.current(wait_seconds=PATIENCE_SECONDS))
    assert token.current(wait_seconds=PATIENCE_SECONDS).token == "token 3"


def test_refusal_of_a_replaced_token_has_no_effect(manual):
    fetch, fetched = counted(manual, 3_600)
    token = token_of(fetch, manual.clock)
    first = token.current(wait_seconds=PATIENCE_SECONDS)
    token.refuse(first)
    token.current(wait_seconds=PATIENCE_SECONDS)
    manual.advance(301)
    token.refuse(first)
    token.current(wait_seconds=PATIENCE_SECONDS)
    assert len(fetched) == 2


def test_expired_token_is_never_used(manual):
    tokens = iter([AccessToken("old", int(manual.now().timestamp()) + 1_000)])
    token = token_of(lambda: next(tokens), manual.clock)
    assert token.current(wait_seconds=PATIENCE_SECONDS).token == "old"
    manual.advance(1_000)
    with pytest.raises(CredentialFailed, match="Entra ID returned no token"):
        token.current(wait_seconds=PATIENCE_SECONDS)


def test_hung_endpoint_uses_one_thread_and_its_late_token_is_used(manual):
    let_go = threading.Event()
    asked = []

    def fetch():
        asked.append(1)
        let_go.wait(PATIENCE_SECONDS)
        return AccessToken("late", int(manual.now().timestamp()) + 3_600)

    token = token_of(fetch, manual.clock)
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(CredentialFailed, match=r"returned no token within 0\.05 s") as caught:
            token.current(wait_seconds=0.05)
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
        assert not caught.value.needs_attention
    until(lambda: asked)
    assert len(asked) == 1
    let_go.set()
    assert token.current(wait_seconds=PATIENCE_SECONDS).token == "late"


def test_unassigned_identity_needs_attention_with_a_stable_message():
    def fetch():
        raise RuntimeError("No identity has been assigned. Trace ID: 4711\nTimestamp: 12:00")

    with pytest.raises(CredentialFailed) as caught:
        token_of(fetch).current(wait_seconds=PATIENCE_SECONDS)
    assert str(caught.value) == "Entra ID returned no token: No identity has been assigned. Assign an identity."
    assert caught.value.needs_attention
