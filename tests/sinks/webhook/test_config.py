"""The configuration keys of a webhook: errors describe the problem without the value."""

import pytest

from bridge.config.loader import read
from bridge.errors import ConfigurationError


def mistakes(**keys):
    try:
        read({"sinks": [{"type": "webhook", **keys}]})
    except ConfigurationError as error:
        return str(error)
    return ""


URL = {"url": "https://example.net/hook"}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "url is missing"),
        ({"url": ""}, "url must be a URL"),
        ({"url": "example.net/SECRET"}, "url must be a URL"),
        ({"url": "https://example.net:SECRET/"}, "url must be a URL"),
        ({"url": "https://example.net/a SECRET"}, "url must be a URL"),
        ({"url": "https://me:SECRET@example.net/"}, "Put the whole URL into url_file or url_env"),
        ({**URL, "url_env": "HOOK"}, "url and url_env are both set"),
        ({**URL, "secret_env": "A", "secret_file": "b"}, "secret_file and secret_env are both set"),
        ({**URL, "secret": "whsec_SECRET"}, "secret_file or secret_env"),
        ({**URL, "max_batch": 2}, "max_batch is 2, but a webhook sends one record"),
        ({**URL, "format": "pagerdutty"}, "pagerduty"),
        ({**URL, "routing_key_env": "KEY"}, "routing_key_env is for format = 'pagerduty'"),
        ({**URL, "template": "{}"}, "template is for format = 'template'"),
        ({"format": "pagerduty"}, "routing_key_file or routing_key_env is missing"),
        ({**URL, "format": "pagerduty", "routing_key_env": "KEY"}, "url must end in /v2/enqueue"),
        ({**URL, "headers": {"Host ": "x"}}, "invalid character"),
    ],
)
def test_invalid_setting_is_reported_without_secrets(keys, sentence):
    said = mistakes(**keys)
    assert sentence in said
    assert "SECRET" not in said
