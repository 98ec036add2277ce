"""The portal token, from a file or from the environment."""

import pytest

from bridge.approval.credentials import secret_token
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.errors import CredentialFailed


def token(**settings):
    keys = (KeySettings(kid="k", approver="ops", public_key_file="k.pub"),)
    return secret_token(RemoteSettings(url="https://portal.invalid", keys=keys, **settings))


def test_token_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("PORTAL_TOKEN", "abc")
    assert token(token_env="PORTAL_TOKEN") == "abc"

    monkeypatch.setenv("PORTAL_TOKEN", "")
    with pytest.raises(CredentialFailed, match="PORTAL_TOKEN"):
        token(token_env="PORTAL_TOKEN")


@pytest.mark.parametrize("text", ["two words", "ümlaut", "bell\a"])
def test_token_invalid_in_a_header_is_rejected_and_not_shown(tmp_path, text):
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(CredentialFailed) as caught:
        token(token_file=str(tmp_path / "token"))

    assert text not in str(caught.value)
