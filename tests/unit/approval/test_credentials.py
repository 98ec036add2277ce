"""The token for the portal: where it comes from, how long it is kept, and that nothing waits for it for ever."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from bridge.approval.credentials import EntraCredential, EntraToken, SecretCredential
from bridge.errors import CredentialFailed

PATIENCE_SECONDS = 15.0


def test_the_token_may_stand_in_the_environment():
    credential = SecretCredential(env="PORTAL_TOKEN", environ={"PORTAL_TOKEN": "abc"})

    assert credential.bearer() == "abc"
    with pytest.raises(CredentialFailed, match="PORTAL_TOKEN"):
        SecretCredential(env="PORTAL_TOKEN", environ={}).bearer()


@pytest.mark.parametrize("token", ["two words", "ümlaut", "bell\a"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(tmp_path, token):
    (tmp_path / "token").write_text(token, encoding="utf-8")
    with pytest.raises(CredentialFailed) as caught:
        SecretCredential(file=str(tmp_path / "token")).bearer()

    assert token not in str(caught.value)


def test_entra_tokens_are_kept_until_five_minutes_before_they_expire():
    clock, count = [1_000.0], itertools.count()
    credential = EntraCredential(
        "api://x", fetch=lambda _: EntraToken(f"t{next(count)}", clock[0] + 3_600), clock=lambda: clock[0]
    )
    assert [credential.bearer(), credential.bearer()] == ["t0", "t0"]
    clock[0] += 3_299
    assert credential.bearer() == "t0"
    clock[0] += 1
    assert credential.bearer() == "t1"
    credential.forget()
    assert credential.bearer() == "t2"


def test_a_short_token_is_renewed_at_half_its_life():
    clock, count = [1_000.0], itertools.count()
    credential = EntraCredential(
        "api://x", fetch=lambda _: EntraToken(f"t{next(count)}", clock[0] + 100), clock=lambda: clock[0]
    )
    assert credential.bearer() == "t0"
    clock[0] += 49
    assert credential.bearer() == "t0"
    clock[0] += 1
    assert credential.bearer() == "t1"


def test_an_old_token_counts_while_no_newer_can_be_had():
    clock, tokens = [0.0], iter([EntraToken("old", 1_000.0)])
    credential = EntraCredential("api://x", fetch=lambda _: next(tokens), clock=lambda: clock[0])
    assert credential.bearer() == "old"
    clock[0] = 999.0
    assert credential.bearer() == "old"
    clock[0] = 1_000.0
    with pytest.raises(CredentialFailed, match="entra_scope"):
        credential.bearer()


def test_an_entra_endpoint_that_hangs_holds_one_thread_and_what_it_brings_late_is_used():
    let_go = threading.Event()
    asked = []

    def fetch(_):
        asked.append(1)
        let_go.wait(PATIENCE_SECONDS)
        return EntraToken("late", time.time() + 3_600)

    credential = EntraCredential("api://x", fetch=fetch, deadline_seconds=0.1)
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(CredentialFailed, match=r"within 0\.1 s"):
            credential.bearer()
        assert time.monotonic() - began < 0.5
    assert len(asked) == 1
    let_go.set()
    credential._running.result(PATIENCE_SECONDS)
    assert credential.bearer() == "late"
