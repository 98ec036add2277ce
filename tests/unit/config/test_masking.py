"""Detection of secrets in URLs, without false positives for plain URLs."""

import pytest

from bridge.config.masking import has_secret


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.slack.com/services/T0/B0/x",
        "https://discord.com/api/webhooks/1/x",
        "https://api.telegram.org/bot1:x/sendMessage",
        "https://prod.logic.azure.com/workflows/x/triggers/manual/paths/invoke?sp=1&sv=1.0&sig=abcdefgh",
        "https://app.azurewebsites.net/api/hook?code=abcdefgh",
        "https://example.net/x?token=c2VjcmV0",
        "https://user:pw@example.net/x",
    ],
)
def test_url_with_a_secret_is_detected(url):
    assert has_secret(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.net/token/hook?team=payments&key=disk&code=200",
        "https://events.pagerduty.com/v2/enqueue",
        "https://hooks.slack.com/",
        "https://[broken",
        "",
    ],
)
def test_url_without_a_secret_is_not_detected(url):
    assert not has_secret(url)
