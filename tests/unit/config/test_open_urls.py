"""Which URLs look as if they carried a secret, and which plain ones must not."""

from __future__ import annotations

import pytest

from bridge.config.open_urls import looks_secret

# In parts, so that no scanner of secrets takes these for real ones.
_MADE_UP = "T0" + "0000000/B0" + "0000000/" + "x" * 24


@pytest.mark.parametrize(
    "url",
    [
        "https://example.net/x?token=abc123",
        "https://example.net/x?a=1&Access_Token=abc",
        "https://example.net/x?apikey=abc",
        "https://example.net/x?api-key=abc",
        "https://example.net/x?client_secret=abc",
        "https://example.net/x?password=abc",
        "https://prod-1.westeurope.logic.azure.com/workflows/1/triggers/manual/paths/invoke?sp=%2Frun&sv=1.0&sig=abc",
        "https://acme.azurewebsites.net/api/hook?code=dGhpcyBpcyBub3QgYSBrZXk1",
        "https://chat.googleapis.com/v1/spaces/A/messages?key=AIzaSyD00000000000000",
        f"https://hooks.slack.com/services/{_MADE_UP}",
        "https://HOOKS.slack.com/triggers/T1/2/3",
        "https://discord.com/api/webhooks/123/abc",
        "https://ptb.discordapp.com/api/v10/webhooks/123/abc",
        "https://acme.webhook.office.com/webhookb2/abc",
        "https://hooks.zapier.com/hooks/catch/1/abc",
        "https://api.telegram.org/bot123:abc/sendMessage",
    ],
)
def test_a_url_with_a_secret_looks_so(url):
    assert looks_secret(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.net/hook",
        "https://example.net/services/token/secret",
        "https://example.net/x?team=payments&key=disk&code=200&token=",
        "https://example.net/x?key=scheduled-events-of-this-fleet",
        "https://example.net/x?code=20261122210910000",
        "https://example.net/x?signal=1&design=2&tokens=3&secretary=4&keyboard=5",
        "https://hooks.slack.com/",
        "https://hooks.slack.com.example.net/services/T/B/x",
        "https://discord.com/channels/1/2",
        "https://outlook.office.com/mail/inbox",
        "https://events.pagerduty.com/v2/enqueue",
        "http://127.0.0.1:9093/api/v2/alerts",
        "https://[::1/x?token=a",
    ],
)
def test_a_plain_url_does_not(url):
    assert not looks_secret(url)
