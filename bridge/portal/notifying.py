"""Sends notifications to one webhook about events that need a person.

Each webhook has its own thread, so a slow webhook delays only its own notifications. The thread looks for events that
need a notification, stores the notification, and sends it when it is due. A notification can arrive twice: the portal
claims it before sending it, and sends it again if the claim expires.

The names and types in a notification come from VMs, and a compromised VM could send text with markup. Slack and Teams
therefore receive these values as plain text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import escape
from typing import Any
from urllib.parse import urlsplit

import msgspec
import requests

from bridge.backoff import delivery_gap
from bridge.clock import format_time
from bridge.errors import DeadlineExceeded, SecretUnavailable
from bridge.http.failures import root_cause
from bridge.http.retry_after import retry_after_seconds
from bridge.http.session import DeadlineSession, ResponseUnread
from bridge.logs import ThrottledLog
from bridge.portal.connected_agents import Connection
from bridge.portal.fleet import EventSummary
from bridge.portal.notify_settings import Kind, NotifySettings
from bridge.portal.site import Site
from bridge.portal.store.database import StoreUnavailable
from bridge.portal.store.notifications import Finding, Notification, claim, find, settle, store_new
from bridge.portal.webhook_signatures import signature_headers, usable_keys
from bridge.system.secrets import masked
from bridge.text import excerpt, one_line

logger = logging.getLogger(__name__)

_DISCONNECTED_SECONDS = 60.0
_ROUND_SECONDS = 2.0
_DEADLINE_SECONDS = 10.0
#: A claim must last longer than a request, including the lookup of the host name.
_CLAIM_SECONDS = 30.0
_LIMIT_SECONDS = 3_600.0
_MOST_BODY_BYTES = 65_536
_SUCCESS = range(200, 300)
_PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_MOST_CHARACTERS = 64
_TITLES = {
    Kind.UNDECIDED: "Undecided event",
    Kind.SECOND_APPROVER: "Another approver is needed",
    Kind.REFUSED: "An agent refused the decision",
    Kind.AGENT_DISCONNECTED: "An agent is disconnected",
}
_CARD = "application/vnd.microsoft.card.adaptive"
_CLIENT = "scheduled-events-portal"


class NotificationSender:
    """Sends the notifications of one ``[[notify]]`` table."""

    def __init__(self, settings: NotifySettings, site: Site) -> None:
        self._settings = settings
        self._origin = site.origin
        self._store = site.store.store
        self._connected_agents = site.connected_agents
        self._sent = site.metrics.notifications
        self._clock = site.clock
        self._log = ThrottledLog(logger, clock=site.clock)
        self._url, self._secret = settings.url_secret(), settings.secret()
        self._session = DeadlineSession()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"notify-{settings.name}")
        self._stopping = threading.Event()
        self._missing: dict[str, float] = {}
        """For each VM with an announced event, the time when its agent was first found disconnected."""

    async def follow(self) -> None:
        """Find and send notifications until the task is canceled."""
        name = self._settings.name
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self.run_once)
            except Exception as error:  # noqa: BLE001  # a notification must not stop the portal
                trace = None if isinstance(error, StoreUnavailable) else error
                message = f"Notifications to {name!r} are late. {error}"
                self._log.problem("round", logging.ERROR, message, exc_info=trace)
            else:
                self._log.recovered("round", f"Notifications to {name!r} are on time again.")
            await asyncio.sleep(_ROUND_SECONDS)

    def close(self) -> None:
        """Cancel the running request, and wait until the thread no longer uses the database."""
        self._stopping.set()
        self._session.close()
        self._thread.shutdown(cancel_futures=True)

    def run_once(self) -> None:
        """Store new notifications, and then send the due ones. Stop if a request fails."""
        found = [each for kind in self._settings.kinds for each in self._find(kind)]
        name = self._settings.name
        if found:
            self._store.write(store_new, name, found, now=self._time(), since=self._time(-_LIMIT_SECONDS))
        is_done = True
        while is_done and not self._stopping.is_set():
            claimed = self._store.write(claim, name, now=self._time(), until=self._time(_CLAIM_SECONDS))
            is_done = claimed is not None and self._settle(claimed)

    def _find(self, kind: Kind) -> list[Finding]:
        until = self._time(60.0 * self._settings.minutes)
        found = self._store.read(find, kind, now=self._time(), until=until)
        if kind is not Kind.AGENT_DISCONNECTED:
            return found
        agents = self._connected_agents.of({each.occurrence for each in found})
        now = self._clock.monotonic()
        gone = [key for key, seen in agents.items() if seen.connection is Connection.DISCONNECTED]
        self._missing = {key: self._missing.get(key, now) for key in gone}
        # After a restart of the portal, agents need a few seconds to reconnect.
        return [each for each in found if now - self._missing.get(each.occurrence, now) >= _DISCONNECTED_SECONDS]

    def _settle(self, notification: Notification) -> bool:
        """Send *notification* unless it is obsolete. Return False if the request failed."""
        event, wait_seconds = notification.event, None
        agent = self._connected_agents.of([notification.vm_key]).get(notification.vm_key)
        if event is not None and (agent is None or agent.connection is not Connection.CONNECTED):
            wait_seconds = self._send(notification, event)
            self._sent.labels(self._settings.name, "sent" if wait_seconds is None else "failed").inc()
        is_done, due_at = wait_seconds is None, self._time(wait_seconds or 0.0)
        self._store.write(settle, notification.notification_id, is_done=is_done, due_at=due_at)
        return is_done

    def _send(self, notification: Notification, event: EventSummary) -> float | None:
        """Send one request. Return None if it succeeds, or the seconds until the next attempt."""
        retry_after = None
        try:
            response = self._post(notification, event)
        except (OSError, DeadlineExceeded, SecretUnavailable) as error:  # every exception of requests is an OSError
            cause = root_cause(error) if isinstance(error, OSError) else error
            self._failed(type(cause).__name__, str(cause))
        else:
            status = response.status_code
            if status in _SUCCESS:
                self._log.recovered("send", f"The webhook {self._settings.name!r} accepts notifications again.")
                return None
            self._failed(f"status_{status}", f"The status is {status}. {response.content.decode('utf-8', 'replace')}")
            retry_after = retry_after_seconds(response.headers)
        at = event.event.not_before
        left = None if at is None else at - self._clock.now()
        return delivery_gap(
            notification.attempts,
            seconds_to_not_before=None if left is None else left.total_seconds(),
            retry_after=retry_after,
            random=self._clock.random,
        )

    def _post(self, notification: Notification, event: EventSummary) -> requests.Response:
        settings, now, secrets = self._settings, self._clock.now(), self._secret.values()
        link = f"{self._origin}/events/{event.key}"
        content = body_of(settings.format, notification, event, link=link, at=format_time(now))
        if settings.format == "pagerduty":
            content["routing_key"] = secrets[0]
        body, keys = msgspec.json.encode(content), usable_keys(secrets)
        signed = signature_headers(notification.notification_id, body, keys, timestamp=int(now.timestamp()))
        try:
            return self._session.request(
                "POST",
                self._url.value() or settings.url or _PAGERDUTY_URL,
                data=body,
                headers={"Content-Type": "application/json", "User-Agent": _CLIENT, **signed},
                deadline_seconds=_DEADLINE_SECONDS,
                max_body_bytes=_MOST_BODY_BYTES,
                proxies=None if settings.proxy is None else {"http": settings.proxy, "https": settings.proxy},
                verify=settings.ca_file,
            )
        except ResponseUnread as unread:
            if unread.response is None:
                raise
            return unread.response

    def _failed(self, kind: str, why: str) -> None:
        try:
            url = self._url.value() or ""
            secrets = (url, urlsplit(url).path, urlsplit(url).query, *self._secret.values())
        except (SecretUnavailable, ValueError):
            secrets = ()
        shown = excerpt(masked(why, secrets).encode("utf-8", "replace"))
        message = f"The portal retries a notification to {self._settings.name!r}, because the request failed: {shown}"
        self._log.problem("send", logging.WARNING, message, kind=kind)

    def _time(self, seconds: float = 0.0) -> str:
        return format_time(self._clock.now() + timedelta(seconds=seconds))


def body_of(form: str, notification: Notification, event: EventSummary, *, link: str, at: str) -> dict[str, Any]:
    """Return the body in the format *form*. *link* is the address of the event page."""
    names = [_shown(each) for each in event.event.resources or ()]
    more = f" +{event.names_count - len(names)}" if event.names_count > len(names) else ""
    kind = _shown(event.event.event_type or "event")
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
    not_before = None if event.event.not_before is None else format_time(event.event.not_before)
    shown = {"event_id": one_line(event.event.event_id or "", 256), "event_type": kind, "not_before": not_before}
    details = {"title": title, "text": text, "link": link, **shown, "vms": names, "vm_count": event.names_count}
    return {"type": f"event.{notification.kind.value}", "timestamp": at, "data": details}


def _text(notification: Notification, event: EventSummary) -> str:
    at = event.event.not_before
    start = "" if at is None else f" on {at:%Y-%m-%d} at {at:%H:%M:%S} UTC"
    text = f"If no one acts, Azure starts the event{start}."
    if notification.vm_name:
        text += f" Disconnected: the agent of {_shown(notification.vm_name)}."
    if notification.alone:
        text += f" Only one VM reports this event and {notification.alone - 1} other open events."
    return text


def _shown(text: str) -> str:
    return one_line(text, _MOST_CHARACTERS).strip()
