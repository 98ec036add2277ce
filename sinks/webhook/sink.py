"""Implements the `webhook` sink, which sends each record in an HTTP POST request.

The supported formats are CloudEvents, Alertmanager alerts, PagerDuty events, and custom templates. If a format cannot
represent a record, the sink sends no request, and the record counts as delivered.

Every request has a `webhook-id` header with the record's `id`, which is the same on every retry. If a secret is
configured, the request also has a Standard Webhooks signature (`sinks.http.signature`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from bridge.sink import (
    AttestedTokens,
    DeliveryFailed,
    DeliveryRejected,
    RenewedToken,
    Secret,
    Sink,
    SinkConfig,
    TransitionRecord,
    utc_now,
)
from sinks.http.endpoint import Endpoint, entra_token
from sinks.http.signature import Signer
from sinks.http.urls import origin
from sinks.webhook.alertmanager import REFRESH_SECONDS
from sinks.webhook.config import WebhookConfig, format_of, portal_of, template_of
from sinks.webhook.pagerduty import DEFAULT_URL
from sinks.webhook.samples import samples

_MOST_ENDPOINTS = 4


class WebhookSink(Sink):
    """Sends each record to the configured URL in a POST request."""

    Config: ClassVar[type[SinkConfig]] = WebhookConfig

    @classmethod
    def current_state_only(cls, config: Any) -> bool:
        """Return True for the formats that send alerts."""
        return config.format in {"alertmanager", "pagerduty"}

    @classmethod
    def check_labels(cls, config: Any, labels: Mapping[str, str]) -> None:
        """Raise ValueError if the template cannot render a record with *labels*."""
        if config.format == "template":
            template_of(config).try_out(samples(config, labels), config.url)

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return the result of `check`, which sends no record."""
        return f"The server responds. To test whether it accepts records, use `send-test {config.name}`."

    @classmethod
    def refresh_seconds(cls, config: Any) -> float | None:
        """Return the refresh interval, because Alertmanager loses alerts when it restarts."""
        default = REFRESH_SECONDS if config.format == "alertmanager" else None
        return default if config.refresh_seconds is None else config.refresh_seconds

    def __init__(self, config: WebhookConfig, *, now: Callable[[], datetime] = utc_now) -> None:
        super().__init__(config)
        self._now = now
        self._format = format_of(config)
        self._url = Secret(key="url", file=config.url_file, env=config.url_env)
        secret = Secret(key="secret", file=config.secret_file, env=config.secret_env)
        self._signer = Signer(secret)
        self._secrets = (self._url, secret, *self._format.secrets)
        self._token = entra_token(config)
        self._endpoints: dict[str, Endpoint] = {}
        self._is_closed = False

    def attest_by(self, tokens: AttestedTokens) -> None:
        """Authenticate with tokens from the portal if the `credential` setting is set."""
        if self.config.credential is not None:
            self._token = tokens(self._post_to_portal, portal=origin(self.config.url))

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send the record of *batch* in a POST request."""
        (record,) = batch
        now = self._now()
        message = self._format.message(self._base_url(), record, now)
        self.sent_nothing = message is None
        if message is None:
            return
        headers = self._signer.headers(record.id, message.body, timestamp=int(now.timestamp()))
        headers["Content-Type"] = message.content_type
        try:
            self._endpoint(message.url).post(message.body, headers)
        except DeliveryRejected as error:
            raise self._format.refused(error) from None

    def check(self) -> None:
        """Read all secrets and send an OPTIONS request to the endpoint.

        Raise DeliveryFailed if the endpoint does not respond, or responds with a redirect, 401, 403, 404, 407, 410, or
        5xx. Any other response shows that the endpoint exists. For the `alertmanager` format, the check requests
        Alertmanager's status.
        """
        base = self._base_url()
        self._signer.keys()
        for secret in self._format.secrets:
            secret.value()
        self._format.check(base, self._endpoint)

    def close(self) -> None:
        """Close every connection and cancel a send in another thread."""
        self._is_closed = True
        if self._token is not None:
            self._token.close()
        for endpoint in list(self._endpoints.values()):
            endpoint.close()

    def _post_to_portal(self, path: str, body: bytes) -> Any:
        """Return the portal's response to *body*. This method runs in the thread of the token."""
        url = portal_of(self.config.url) + path
        endpoint = self._endpoints[url] = self._new_endpoint(url, token=None)
        try:
            return endpoint.request("POST", body, {"Content-Type": "application/json", "Accept": "application/json"})
        finally:
            endpoint.close()

    def _base_url(self) -> str:
        if self.config.url is not None or not self._url.is_set:
            return self.config.url or DEFAULT_URL
        url = self._url.value() or ""
        try:
            self.config.check_url(url, is_secret=True)
        except ValueError as error:
            raise DeliveryFailed(
                f"The URL of url_file or url_env cannot be used: {error}", needs_attention=True
            ) from None
        return url

    def _endpoint(self, url: str) -> Endpoint:
        if self.config.credential is not None and self._token is None:
            raise DeliveryFailed(
                "credential is set, but the agent cannot provide a token for this credential.", needs_attention=True
            )
        endpoint = self._endpoints.get(url)
        if endpoint is None:
            if len(self._endpoints) >= _MOST_ENDPOINTS:  # a template can create a URL for each event
                self._endpoints.pop(next(iter(self._endpoints))).close()
            endpoint = self._endpoints[url] = self._new_endpoint(url, token=self._token)
        return endpoint

    def _new_endpoint(self, url: str, *, token: RenewedToken | None) -> Endpoint:
        endpoint = Endpoint(url, self.config, secrets=lambda: self._secrets, token=token)
        if self._is_closed:
            endpoint.close()
        return endpoint
