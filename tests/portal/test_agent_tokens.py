"""Challenges and tokens of the portal: validity, secret rotation, and forgeries."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone

import jwt
import pytest

from bridge.portal.agent_tokens import (
    CHALLENGE_SECONDS,
    TOKEN_SECONDS,
    AgentTokens,
    Challenges,
    TokenRefused,
)
from bridge.testing import ManualClock

SECRET = "one secret of forty characters, or so, or more"
VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"


@pytest.fixture
def clock():
    return ManualClock(datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc))


def challenges(clock, *secrets):
    return Challenges(lambda: secrets or (SECRET,), clock=clock.clock)


def tokens(clock, *secrets):
    return AgentTokens(lambda: secrets or (SECRET,), clock=clock.clock)


def new_token(clock, *secrets):
    return tokens(clock, *secrets).new(VM, subscription_id=SUBSCRIPTION)


def test_challenge_is_valid_for_six_minutes_in_each_process_with_the_secret(clock):
    other = challenges(clock)
    nonce = challenges(clock).new()
    assert other.is_fresh(nonce)
    clock.advance(CHALLENGE_SECONDS)
    assert other.is_fresh(nonce)
    clock.advance(1)
    assert not other.is_fresh(nonce)


def test_challenge_stays_valid_during_a_secret_rotation(clock):
    nonce = challenges(clock, "old" * 20).new()
    assert challenges(clock, SECRET, "old" * 20).is_fresh(nonce)
    assert not challenges(clock, SECRET).is_fresh(nonce)


def test_challenge_with_one_changed_character_is_rejected(clock):
    nonce = challenges(clock).new()
    for position in range(len(nonce)):
        other = "a" if nonce[position] != "a" else "b"
        assert not challenges(clock).is_fresh(nonce[:position] + other + nonce[position + 1 :])


@pytest.mark.parametrize("nonce", ["", "a", "20260506-070809", "ä" * 32, "a" * 32, "=" * 32, "\0", "a" * 10_000])
def test_invalid_challenge_is_rejected(clock, nonce):
    assert not challenges(clock).is_fresh(nonce)


def test_challenge_from_a_clock_one_minute_ahead_is_valid(clock):
    ahead = ManualClock(clock.now())
    ahead.advance(60)
    assert challenges(clock).is_fresh(challenges(ahead).new())
    ahead.advance(1)
    assert not challenges(clock).is_fresh(challenges(ahead).new())


def test_token_is_valid_for_its_vm_for_one_hour(clock):
    token = new_token(clock)
    assert tokens(clock).vm_id_of(token) == VM
    clock.advance(TOKEN_SECONDS - 1)
    assert tokens(clock).vm_id_of(token) == VM
    clock.advance(1)
    with pytest.raises(TokenRefused, match="expired"):
        tokens(clock).vm_id_of(token)


def test_token_stays_valid_during_a_secret_rotation(clock):
    token = new_token(clock, "old" * 20)
    assert tokens(clock, SECRET, "old" * 20).vm_id_of(token) == VM
    with pytest.raises(TokenRefused):
        tokens(clock, SECRET).vm_id_of(token)


def test_cached_token_expires_with_its_lifetime_or_its_secret(clock):
    secrets = [SECRET]
    reader = AgentTokens(lambda: secrets, clock=clock.clock)
    token = new_token(clock)
    assert [reader.vm_id_of(token) for _ in range(2)] == [VM, VM]
    secrets[:] = ["new" * 20]
    with pytest.raises(TokenRefused):
        reader.vm_id_of(token)
    secrets[:] = ["new" * 20, SECRET]
    assert reader.vm_id_of(token) == VM
    clock.advance(TOKEN_SECONDS)
    with pytest.raises(TokenRefused, match="expired"):
        reader.vm_id_of(token)


def test_challenge_cannot_sign_a_token_and_a_token_needs_the_right_audience(clock):
    claims = {"sub": VM, "aud": "scheduled-events-portal", "iat": 1_900_000_000, "exp": 1_999_999_999}
    for key, changes in [(SECRET, {}), (challenges(clock).new(), {}), (SECRET + " ", {"aud": "x"})]:
        forged = jwt.encode({**claims, **changes}, key, algorithm="HS256")
        with pytest.raises(TokenRefused):
            tokens(clock).vm_id_of(forged)


def test_token_without_a_signature_or_with_another_algorithm_is_rejected(clock):
    _, payload, signature = new_token(clock).split(".")

    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    for header in ({"alg": "none"}, {"alg": "HS384"}, {"alg": "RS256"}, {"alg": ["HS256"]}, {}, [], "x"):
        for given in (signature, ""):
            with pytest.raises(TokenRefused):
                tokens(clock).vm_id_of(f"{part(header)}.{payload}.{given}")


@pytest.mark.parametrize(
    "bogus", ["", ".", "..", "a.b.c", "ä.b.c", "\ud800", "a" * 10_000, "W" * 1500 + ".b.c", "a.b.c.d", "\0"]
)
def test_invalid_token_is_rejected_and_is_not_in_the_error(clock, bogus):
    with pytest.raises(TokenRefused) as caught:
        tokens(clock).vm_id_of(bogus)
    assert len(bogus) < 3 or bogus not in str(caught.value)
