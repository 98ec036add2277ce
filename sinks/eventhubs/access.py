"""The address and the credential of one event hub, as both transports need them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from urllib.parse import unquote_plus

from bridge.sink import AccessToken, CredentialFailed, DeliveryFailed, RenewedToken, Secret, fetch_token
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.connection_string import ConnectionString, parse, shared_access_signature
from sinks.http.urls import http_url, url_secrets

_SCOPE = "https://eventhubs.azure.net/.default"
_SIGNATURE_SECONDS = 3_600
_RENEW_SECONDS = 600


def identity_token(config: EventHubsConfig) -> RenewedToken:
    """Return the token of the managed identity, or of the first credential that azure-identity finds."""
    is_default = config.credential == "default"
    return RenewedToken(
        partial(fetch_token, _SCOPE, client_id=config.client_id, is_default=is_default),
        source="The credential",
        advice="Assign the identity, or set client_id to one that is assigned.",
    )


class Access:
    """The address and the credential of one sink; also the credential object that the SDK asks for tokens."""

    def __init__(self, config: EventHubsConfig) -> None:
        self._config = config
        self._secret = Secret(
            key="connection_string", file=config.connection_string_file, env=config.connection_string_env
        )
        self._proxy = Secret(key="proxy", file=config.proxy_file, env=config.proxy_env)
        self._token: RenewedToken | None = None
        if config.credential != "connection_string":
            self._token = identity_token(config)
        self._at_hand: AccessToken | None = None
        """The token that `prepare` got: it may be about to expire, when no newer one can be had."""
        self._signature: AccessToken | None = None
        self.string: ConnectionString | None = None
        self.proxy: str | None = None
        """The URL of the proxy, after `prepare`; None: there is none."""

    def prepare(self, *, wait_seconds: float) -> None:
        """Read the proxy, and the connection string or a token; raise DeliveryFailed when there is none in time."""
        self.proxy = self._config.proxy or self._proxy.value()
        if self.proxy is not None:
            try:
                http_url(self.proxy, key="proxy")
            except ValueError as error:
                raise DeliveryFailed(f"The proxy's URL cannot be used: {error}", needs_attention=True) from None
        if self._token is not None:
            try:
                self._at_hand = self._token.current(wait_seconds=wait_seconds)
            except CredentialFailed as error:
                raise DeliveryFailed(str(error), needs_attention=error.needs_attention) from error
            return
        text = self._secret.value() or ""
        if self.string is None or self.string.text != text:
            self.string = parse(text, eventhub=self._config.eventhub)
            self._signature = None

    @property
    def namespace(self) -> str:
        """Return the namespace's host name, and port where a connection string names one."""
        return self.string.namespace if self.string is not None else str(self._config.fully_qualified_namespace)

    @property
    def eventhub(self) -> str:
        """Return the event hub's name."""
        return self.string.eventhub if self.string is not None else str(self._config.eventhub)

    @property
    def peer(self) -> str:
        """Return what messages call the destination."""
        return f"Event Hubs {self.namespace}/{self.eventhub}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return what must stand in no message, after `prepare`."""
        proxy = () if self.proxy is None else tuple(filter(None, url_secrets(self.proxy)))
        return (*proxy, *self._credentials)

    @property
    def _credentials(self) -> tuple[str, ...]:
        if self._token is not None:
            token = self._usable()
            return () if token is None else (token.token,)
        signed = self._signed()
        signature = signed.partition("sig=")[2].partition("&")[0]
        return (*(self.string.secrets if self.string is not None else ()), signed, signature, unquote_plus(signature))

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return the token that `prepare` got: what the SDK calls a credential has this method."""
        del scopes, options
        return self._unexpired()

    def authorization(self) -> str:
        """Return the value of an Authorization header, after `prepare`."""
        if self._token is not None:
            return f"Bearer {self._unexpired().token}"
        return self._signed()

    def forget(self) -> None:
        """Drop what the service has refused."""
        if self._token is not None:
            self._token.forget()
        self._at_hand = None
        self._signature = None

    def _unexpired(self) -> AccessToken:
        token = self._usable()
        if token is None:
            raise DeliveryFailed("The token has expired during the send.")
        return token

    def _usable(self) -> AccessToken | None:
        """Return the newest token, or the one of `prepare` until its last second."""
        newest = self._token.good() if self._token is not None else None
        if newest is not None:
            return newest
        at_hand = self._at_hand
        return at_hand if at_hand is not None and at_hand.expires_on > time.time() else None

    def _signed(self) -> str:
        string = self.string
        if string is None:
            raise DeliveryFailed("There is no connection string.", needs_attention=True)
        if string.signature or not (string.key_name and string.key):
            return string.signature or ""
        now = int(time.time())
        if self._signature is None or self._signature.expires_on - now < _RENEW_SECONDS:
            expires_on = now + _SIGNATURE_SECONDS
            uri = f"https://{string.namespace}/{string.eventhub}"
            text = shared_access_signature(uri, key_name=string.key_name, key=string.key, expires_on=expires_on)
            self._signature = AccessToken(text, expires_on)
        return self._signature.token
