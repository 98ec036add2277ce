"""Formats notifications for Standard Webhooks, Slack, Microsoft Teams, and PagerDuty.

The names and types in a notification come from VMs, and a compromised VM could send text with markup. Slack and Teams
therefore receive these values as plain text.
"""

from __future__ import annotations

from html import escape
from typing import Any

from bridge.clock import parse_time
from bridge.portal.fleet import EventSummary
from bridge.portal.notify_settings import Kind
from bridge.portal.store.notifications import Notification
from bridge.text import one_line

_MOST_CHARACTERS = 64
_TITLES = {
    Kind.UNDECIDED: "Undecided event",
    Kind.SECOND_APPROVER: "Another approver is needed",
    Kind.REFUSED: "An agent refused the decision",
    Kind.AGENT_DISCONNECTED: "An agent is disconnected",
}
_CARD = "application/vnd.microsoft.card.adaptive"
_CLIENT = "scheduled-events-portal"


def body_of(form: str, notification: Notification, event: EventSummary, *, link: str, at: str) -> dict[str, Any]:
    """Return the body in the format *form*. *link* is the address of the event page."""
    names = [_shown(each) for each in event.names]
    more = f" +{event.names_count - len(names)}" if event.names_count > len(names) else ""
    kind = _shown(event.event_type or "event")
    title = f"{_TITLES[notification.kind]}: {kind} of {', '.join(names) or 'a VM'}{more}"
    text = _text(notification, event)
    if form == "slack":
        block = {"type": "plain_text", "text": f"{title}\n{text}", "emoji": False}
        link_block = {"type": "mrkdwn", "text": f"<{link}|Open the event>"}
        blocks = [{"type": "section", "text": each} for each in (block, link_block)]
        return {"text": escape(title, quote=False), "blocks": blocks}
    if form == "teams":
        # Teams interprets the text of a TextBlock as Markdown, but not the text of a TextRun.
        runs = [{"type": "TextRun", "text": title, "weight": "Bolder"}, {"type": "TextRun", "text": f" {text}"}]
        card = {
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": [{"type": "RichTextBlock", "inlines": runs}],
            "actions": [{"type": "Action.OpenUrl", "title": "Open the event", "url": link}],
        }
        return {"type": "message", "attachments": [{"contentType": _CARD, "content": card}]}
    if form == "pagerduty":
        source = names[0] if names else _CLIENT
        payload = {"summary": title, "source": source, "severity": "warning", "custom_details": {"text": text}}
        incident = {"event_action": "trigger", "dedup_key": notification.notification_id, "payload": payload}
        return {**incident, "client": _CLIENT, "client_url": link}
    shown = {"event_id": one_line(event.event_id or "", 256), "event_type": kind, "not_before": event.not_before}
    details = {"title": title, "text": text, "link": link, **shown, "vms": names, "vm_count": event.names_count}
    return {"type": f"event.{notification.kind.value}", "timestamp": at, "data": details}


def _text(notification: Notification, event: EventSummary) -> str:
    at = None if event.not_before is None else parse_time(event.not_before)
    start = "" if at is None else f" on {at:%Y-%m-%d} at {at:%H:%M:%S} UTC"
    text = f"If no one acts, Azure starts the event{start}."
    if notification.vm_name:
        text += f" Disconnected: the agent of {_shown(notification.vm_name)}."
    if notification.alone:
        text += f" Only one VM reports this event and {notification.alone - 1} other open events."
    return text


def _shown(text: str) -> str:
    return one_line(text, _MOST_CHARACTERS).strip()
