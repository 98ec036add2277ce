"""Provides the address and the credential of one event hub."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

from bridge.sink import AccessToken, CredentialFailed, DeliveryFailed, RenewedToken, Secret, fetch_token
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.connection_string import ConnectionString, parse, shared_access_signature
from sinks.http.target import Proxy
from sinks.http.urls import url_secrets

_SCOPE = "https://eventhubs.azure.net/.default"
_SIGNATURE_SECONDS = 3_600
_RENEW_SECONDS = 600


class Access:
    """Provides the address and the credential of an event hub for AMQP and HTTPS.

    Call `prepare` before each request. The Azure SDK can use an instance of this class as a credential.
    """

    def __init__(self, config: EventHubsConfig) -> None:
        self._config = config
        self._secret = Secret(
            key="connection_string", file=config.connection_string_file, env=config.connection_string_env
        )
        self._proxy = Proxy(config)
        self._identity = None if config.credential == "connection_string" else _identity(config)
        self._token = AccessToken("", 0)
        """The identity's token, or a shared access signature that was signed with the key in the connection string."""
        self.namespace, self.eventhub = str(config.fully_qualified_namespace), str(config.eventhub)
        self.string: ConnectionString | None = None
        self.proxy: str | None = None

    def prepare(self, *, wait_seconds: float) -> None:
        """Get the current proxy and credential. Raise DeliveryFailed if a value is missing."""
        self.proxy = self._proxy.url()
        if self._identity is None:
            self._sign(self._secret.value() or "")
            return
        try:
            self._token = self._identity.current(wait_seconds=wait_seconds)
        except CredentialFailed as error:
            raise DeliveryFailed(str(error), needs_attention=error.needs_attention) from error

    @property
    def peer(self) -> str:
        """Return the name of the destination for error messages."""
        return f"Event Hubs {self.namespace}/{self.eventhub}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the values that messages and log lines must not contain."""
        proxy = () if self.proxy is None else tuple(filter(None, url_secrets(self.proxy)))
        string = () if self.string is None else (self.string.text, self.string.key)
        signature = self._token.token.partition("sig=")[2].partition("&")[0]
        token = filter(None, (self._token.token, signature, unquote_plus(signature)))
        return (*proxy, *string, *token)

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return the current token. The Azure SDK calls this method."""
        del scopes, options
        return self._token

    def authorization(self) -> str:
        """Return the value of the Authorization header."""
        return self._token.token if self._identity is None else f"Bearer {self._token.token}"

    def forget(self) -> None:
        """Discard the current token or signature after the service rejected it."""
        if self._identity is not None:
            self._identity.forget()
        self._token = AccessToken("", 0)

    def close(self) -> None:
        """Cancel the wait for a token in another thread."""
        if self._identity is not None:
            self._identity.close()

    def _sign(self, text: str) -> None:
        if self.string is None or self.string.text != text:
            self.string = parse(text, eventhub=self._config.eventhub)
            self.namespace, self.eventhub = self.string.namespace, self.string.eventhub
            self._token = AccessToken("", 0)
        string, now = self.string, int(time.time())
        if self._token.expires_on - now < _RENEW_SECONDS:
            expires_on = now + _SIGNATURE_SECONDS
            uri = f"https://{string.namespace}/{string.eventhub}"
            signature = shared_access_signature(uri, key_name=string.key_name, key=string.key, expires_on=expires_on)
            self._token = AccessToken(signature, expires_on)


def _identity(config: EventHubsConfig) -> RenewedToken:
    return RenewedToken(
        partial(fetch_token, _SCOPE, client_id=config.client_id, is_default=config.credential == "default"),
        source="The credential",
        advice="Assign the identity, or set client_id to an assigned identity.",
    )
