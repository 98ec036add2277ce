"""The configuration keys of HTTP sinks: errors describe the problem without the value."""

import traceback

import pytest

from sinks.http.config import HttpConfig


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"headers": {"Content-Length": "3"}}, "the sink sets the header"),
        ({"headers": {"X-Key": "SECRET\nX-Other: 1"}}, "value of X-Key"),
        ({"headers": {"X Key": "SECRET"}}, "invalid character"),
        ({"client_key_file": __file__}, "client_key_file needs client_cert_file"),
        ({"ca_file": "/no/such/file"}, "/no/such/file does not exist"),
        ({"bearer_token_file": "a", "bearer_token_env": "B"}, "bearer_token_file and bearer_token_env are both set"),
        ({"proxy": "http://me:SECRET@proxy"}, "proxy contains a user name or a password"),
        ({"proxy": "socks5://proxy"}, "proxy must be a URL"),
        ({"proxy": "http://proxy:SECRET"}, "proxy must be a URL"),
    ],
)
def test_invalid_setting_is_reported_without_its_value(keys, sentence):
    with pytest.raises(ValueError, match=sentence) as wrong:
        HttpConfig(**keys)
    assert "SECRET" not in "".join([*traceback.format_exception(wrong.value), repr(wrong.value)])


def test_encrypted_client_key_is_rejected(tmp_path):
    (tmp_path / "key.pem").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="is encrypted"):
        HttpConfig(client_cert_file=str(tmp_path / "key.pem"))
