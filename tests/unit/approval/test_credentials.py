"""The token for the portal that stands in a file or in the environment."""

from __future__ import annotations

import pytest

from bridge.approval.credentials import SecretCredential
from bridge.errors import CredentialFailed


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
