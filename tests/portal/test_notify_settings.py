"""The settings and formats of notifications: errors with the required action, and hostile text as plain text."""

import json

import doc_pages
import pytest
import tomllib
from msgspec.structs import replace

from bridge.errors import ConfigurationError
from bridge.events.event import ScheduledEvent
from bridge.portal.fleet import EventSummary
from bridge.portal.notify_settings import Kind
from bridge.portal.notifying import body_of
from bridge.portal.settings import check_secrets, read
from bridge.portal.store.notifications import Notification

URL = {"name": "ops", "url": "https://hooks.example.net/ops"}
LINK = "https://portal.example.net/events/0"


def _read(*targets, people=None):
    origin = {"origin": "https://portal.example.net"} if people is None else people
    return read({"agents": {"token_env": "AGENT"}, "people": origin, "notify": list(targets)})


def test_documented_configuration_is_valid():
    text = doc_pages.marked(doc_pages.page("docs/operate/portal-notifications.md"), "notify: configuration")
    settings = read({"agents": {"token_env": "AGENT"}, **tomllib.loads(text)})
    assert [each.format for each in settings.notify] == ["slack", "teams", "pagerduty", "standard"]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([{"name": "ops"}], "Set either url or url_file, but not both."),
        ([{**URL, "url_file": "a"}], "Set either url or url_file, but not both."),
        ([URL, URL], r"Two tables \[\[notify\]\] have the same name. Change one of the names."),
        ([{**URL, "url": "https://example.net/hook?sig=1"}], "use url_file"),
        ([{**URL, "kinds": ["undecidd"]}], "undecided"),
        ([{**URL, "minutes": 0}], "minutes"),
        ([{**URL, "format": "slack", "secret_file": "a"}], "Remove secret_file."),
        ([{"name": "page", "format": "pagerduty"}], "a file with the integration key"),
        ([{**URL, "formats": "slack"}], "Did you mean 'format'?"),
    ],
)
def test_invalid_setting_is_reported_with_the_required_action(targets, message):
    with pytest.raises(ConfigurationError, match=message):
        _read(*targets)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz", 0o644, "Run chmod o-r"),
        ("not a secret", 0o600, "openssl rand -base64 32"),
        ("", 0o600, "is empty. Put the secret there."),
        (None, 0o600, "Create it."),
    ],
)
def test_unusable_secret_file_is_reported_with_the_required_action(tmp_path, monkeypatch, content, mode, message):
    monkeypatch.setenv("AGENT", "token")
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(ConfigurationError, match=message):
        check_secrets(_read({**URL, "secret_file": str(file)}))


def test_missing_certificate_file_is_reported_with_the_required_action(monkeypatch):
    monkeypatch.setenv("AGENT", "token")
    with pytest.raises(ConfigurationError, match=r"notify.ops.ca_file: The file /ca.pem does not exist"):
        check_secrets(_read({**URL, "ca_file": "/ca.pem"}))


def test_url_from_a_file_is_validated(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT", "token")
    file = tmp_path / "url"
    file.write_text("hooks.example.net", encoding="utf-8")
    file.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"must contain a URL such as https://example.net"):
        check_secrets(_read({"name": "ops", "url_file": str(file)}))


HOSTILE = "<!channel> <https://evil.example|Approve> [x](https://evil.example) *b* \u202e\n\x00" + "x" * 10_000
SHOWN = ScheduledEvent(event_id=HOSTILE, event_status="Scheduled", event_type=HOSTILE, resources=(HOSTILE, "vm"))
EVENT = EventSummary(key="0", event=SHOWN, names_count=9)
NOTIFICATION = Notification(notification_id="msg_1", kind=Kind.AGENT_DISCONNECTED, event=EVENT, vm_name=HOSTILE)


def _body(form):
    return body_of(form, NOTIFICATION, EVENT, link=LINK, at="2026-11-20T11:00:00.000Z")


@pytest.mark.parametrize("form", ["standard", "slack", "teams", "pagerduty"])
def test_hostile_text_is_short_and_on_one_line(form):
    text = json.dumps(_body(form), ensure_ascii=False)
    assert len(text) < 1_500
    assert "\u202e" not in text
    assert "\\u0000" not in text
    assert LINK in text
    assert "An agent is disconnected" in text


def test_slack_shows_hostile_text_as_plain_text_only():
    body = _body("slack")
    assert "<" not in body["text"]
    plain, link = (each["text"] for each in body["blocks"])
    assert plain["type"] == "plain_text"
    assert link == {"type": "mrkdwn", "text": f"<{LINK}|Open the event>"}


def test_teams_shows_hostile_text_as_plain_text_only():
    [attachment] = _body("teams")["attachments"]
    [block] = attachment["content"]["body"]
    assert block["type"] == "RichTextBlock"
    assert {each["type"] for each in block["inlines"]} == {"TextRun"}
    assert attachment["content"]["actions"] == [{"type": "Action.OpenUrl", "title": "Open the event", "url": LINK}]


def test_notification_id_is_the_dedup_key_of_the_pagerduty_incident():
    body = body_of("pagerduty", NOTIFICATION, replace(EVENT, event=replace(SHOWN, resources=())), link=LINK, at="")
    assert body["dedup_key"] == "msg_1"
    assert body["payload"]["source"] == "scheduled-events-portal"
