"""The sink `webhook`: one request a record to an HTTP endpoint, in the format that the endpoint understands.

Four formats: CloudEvents for programs, Alertmanager and PagerDuty for people on call, a template for everything else.
`sinks.http.endpoint` says what an answer means, the file of each format what it makes of each transition. A record for
which a format makes no request counts as delivered.

Whatever the format, a request carries `webhook-id`, the record's id and the same on every retry, and is signed as
Standard Webhooks says when there is a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from bridge.sink import (
    AttestedTokens,
    DeliveryFailed,
    DeliveryRejected,
    Secret,
    Sink,
    SinkConfig,
    TransitionRecord,
    utc_now,
)
from sinks.http.endpoint import SUCCESS, Endpoint, entra_token
from sinks.http.signature import Signer
from sinks.http.urls import http_url, origin
from sinks.webhook.config import (
    WebhookConfig,
    check_labels,
    format_of,
    portal_of,
    refresh_seconds_of,
)
from sinks.webhook.format import Message
from sinks.webhook.pagerduty import DEFAULT_URL, check_url
from sinks.webhook.template import check_url_template, is_url_template

_MOST_ENDPOINTS = 4
#: By format, what a check that finds nothing wrong has shown, and what it has not.
_SHOWN = {
    "alertmanager": ("an Alertmanager answers", "Whether it takes alerts from here"),
    "pagerduty": ("a server answers", "Whether it takes events with this routing key"),
}


class WebhookSink(Sink):
    """POSTs each record to the endpoint of its configuration."""

    Config: ClassVar[type[SinkConfig]] = WebhookConfig

    @classmethod
    def current_state_only(cls, config: Any) -> bool:
        """Return True for the formats of alerts."""
        return config.format in {"alertmanager", "pagerduty"}

    @classmethod
    def check_labels(cls, config: Any, labels: Mapping[str, str]) -> None:
        """Raise ValueError when a template names a label that the configuration does not give."""
        check_labels(config, labels)

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return what `check` shows: not that a record would be taken, nor by these credentials."""
        return cls._shown(config, 200)

    @staticmethod
    def _shown(config: Any, status: int) -> str:
        who, untried = _SHOWN.get(config.format, ("a server answers", "Whether it takes records from here"))
        who = who if status in SUCCESS else f"answered {status} to OPTIONS"
        return f"{who}. {untried} was not tried; `send-test {config.name}` sends one."

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        """Return the refresh interval: Alertmanager loses its alerts on a restart."""
        return refresh_seconds_of(config)

    def __init__(self, config: WebhookConfig, *, now: Callable[[], datetime] = utc_now) -> None:
        super().__init__(config)
        self._now = now
        self._format = format_of(config)
        self._url = Secret(key="url", file=config.url_file, env=config.url_env)
        secret = Secret(key="secret", file=config.secret_file, env=config.secret_env)
        self._signer = Signer(secret)
        self._secrets = (self._url, secret, *self._format.secrets)
        self._token = entra_token(config)
        self._attesting: Endpoint | None = None
        """Where a portal's token is asked for just now, on another thread."""
        self._endpoints: dict[str, Endpoint] = {}
        self._last_url = ""
        self._is_closed = False

    def attest_by(self, tokens: AttestedTokens) -> None:
        """Show the token that the portal gives, where the configuration asks for it."""
        if self.config.credential is not None:
            self._token = tokens(self._post_to_portal, portal=origin(self.config.url))

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send the one record of *batch*."""
        (record,) = batch
        now = self._now()
        message = self._format.message(self._base_url(), record, now)
        self.sent_nothing = message is None
        if message is None:
            return
        headers = self._signer.headers(record.id, message.body, timestamp=int(now.timestamp()))
        try:
            self._post(message, headers)
        except DeliveryRejected as error:
            raise self._format.refused(error) from None

    def check(self) -> None:
        """Read every secret, then ask the endpoint with OPTIONS; Alertmanager for its status.

        Raises DeliveryFailed for no answer, a redirect, 401, 403, 404, 407, 410 and 5xx. Any other answer shows that
        there is an endpoint; whether it takes a record, `send-test` shows.
        """
        base = self._base_url()
        self._signer.keys()
        for secret in self._format.secrets:
            secret.value()
        self.shown = self._shown(self.config, self._format.check(base, self._endpoint))

    def close(self) -> None:
        """Close every connection; a send in flight ends with an error."""
        self._is_closed = True
        if self._token is not None:
            self._token.close()
        self._close_endpoints()
        attesting = self._attesting
        if attesting is not None:
            attesting.close()

    def _close_endpoints(self) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.close()
        self._endpoints = {}

    def _post(self, message: Message, headers: dict[str, str]) -> Any:
        if message.body:
            headers = {**headers, "Content-Type": message.content_type}
        return self._endpoint(message.url).send(message.method, message.body, headers)

    def _post_to_portal(self, path: str, body: bytes) -> Any:
        """Return the portal's answer to *body*, whatever its status; on the thread that gets the token."""
        endpoint = self._attesting = Endpoint(portal_of(self.config.url) + path, self.config, secrets=self._secrets)
        try:
            return endpoint.request("POST", body, {"Content-Type": "application/json", "Accept": "application/json"})
        finally:
            self._attesting = None
            endpoint.close()

    def _base_url(self) -> str:
        """Return the URL of the configuration, as of now."""
        if self.config.url is not None or not self._url.is_set:
            return self.config.url or DEFAULT_URL
        url = self._url.value() or ""
        try:
            if self.config.format == "template" and is_url_template(url):
                check_url_template(url)
            else:
                http_url(url, key="url")
            if self.config.format == "pagerduty":
                check_url(url)
        except ValueError as error:
            raise DeliveryFailed(
                f"The URL of url_file or url_env cannot be used: {error}", needs_attention=True
            ) from None
        if url != self._last_url:
            self._close_endpoints()
            self._last_url = url
        return url

    def _endpoint(self, url: str) -> Endpoint:
        """Return the endpoint of *url*, whose connection is kept from send to send."""
        if self.config.credential is not None and self._token is None:
            raise DeliveryFailed("credential is set, and nothing here gets the token for it.", needs_attention=True)
        endpoint = self._endpoints.get(url)
        if endpoint is None:
            if len(self._endpoints) >= _MOST_ENDPOINTS:  # a template may make one of each event
                self._endpoints.pop(next(iter(self._endpoints))).close()
            endpoint = self._endpoints[url] = Endpoint(url, self.config, secrets=self._secrets, token=self._token)
            if self._is_closed:
                endpoint.close()
        return endpoint
