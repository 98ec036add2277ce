"""Challenges and tokens of the portal: validity, secret rotation, and forgeries."""

import base64
import hmac
from datetime import datetime, timezone

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


@pytest.fixture
def clock():
    return ManualClock(datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc))


def challenges(clock, *secrets):
    return Challenges(lambda: secrets or (SECRET,), clock=clock.clock)


def tokens(clock, *secrets):
    return AgentTokens(lambda: secrets or (SECRET,), clock=clock.clock)


def new_token(clock, *secrets):
    return tokens(clock, *secrets).new(VM)


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


def test_token_from_a_clock_one_minute_ahead_is_valid(clock):
    ahead = ManualClock(clock.now())
    ahead.advance(60)
    assert tokens(clock).vm_id_of(new_token(ahead)) == VM
    ahead.advance(1)
    with pytest.raises(TokenRefused):
        tokens(clock).vm_id_of(new_token(ahead))


def test_token_with_one_changed_missing_or_additional_character_is_rejected(clock):
    token = new_token(clock)
    for position in range(len(token)):
        start, end = token[:position], token[position + 1 :]
        for other in ("0", "f", ".", "", f"1{token[position]}"):
            if other != token[position]:
                with pytest.raises(TokenRefused):
                    tokens(clock).vm_id_of(f"{start}{other}{end}")


def test_mac_of_a_challenge_or_of_another_secret_signs_no_token(clock):
    made_at = int(clock.now().timestamp())
    said = f"{VM}.{made_at}"
    challenge_key = hmac.digest(SECRET.encode(), b"challenge", "sha256")
    for key in (challenge_key, SECRET.encode(), b"", b"agent-token"):
        mac = hmac.digest(key, said.encode(), "sha256")
        for written in (mac.hex(), mac.hex().upper(), base64.urlsafe_b64encode(mac).decode(), ""):
            with pytest.raises(TokenRefused):
                tokens(clock).vm_id_of(f"{said}.{written}")


@pytest.mark.parametrize(
    "bogus", ["", ".", "..", "a.b.c", "ä.b.c", "a.b.ä", "a" * 10_000, "W" * 1500 + ".b.c", "a.b.c.d", "\0"]
)
def test_invalid_token_is_rejected_and_is_not_in_the_error(clock, bogus):
    with pytest.raises(TokenRefused) as caught:
        tokens(clock).vm_id_of(bogus)
    assert len(bogus) < 3 or bogus not in str(caught.value)
