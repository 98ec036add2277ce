"""The keys of the Event Hubs sink, and their valid combinations."""

from __future__ import annotations

import importlib.util
import re
from typing import Annotated, Literal

import msgspec

from bridge.sink import SinkConfig, how_to_install, tls_file_problems
from sinks.http.config import one_of
from sinks.http.urls import plain_url

_LONGEST_IDLE_SECONDS = 3_600
_HOST = re.compile(r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+)(:[0-9]{1,5})?")


class EventHubsConfig(SinkConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type eventhubs."""

    fully_qualified_namespace: str | None = None
    """For example `ns.servicebus.windows.net`. With a connection string it comes from there."""
    eventhub: str | None = None
    """The event hub's name. A connection string may name it instead (EntityPath)."""
    credential: Literal["managed_identity", "default", "connection_string"] = "managed_identity"
    """default: the first that azure-identity's DefaultAzureCredential finds."""
    client_id: str | None = None
    """The client id of a user-assigned managed identity. Default: the system-assigned one."""
    connection_string_file: str | None = None
    """A file with the connection string; read again when it changes."""
    connection_string_env: str | None = None
    """An environment variable with the connection string."""
    transport: Literal["amqp", "amqp_websocket", "https"] = "amqp"
    """amqp: port 5671. amqp_websocket: port 443, needs the extra `websocket`. https: port 443, a request a record."""
    endpoint: str | None = None
    """The address to connect to instead of the namespace's own, `host` or `host:port`, as for a private endpoint."""
    ca_file: str | None = None
    """A PEM file of the authorities to trust instead of the usual ones."""
    proxy: str | None = None
    """URL of an HTTP proxy, for amqp_websocket and https. Proxies of the environment are not used."""
    proxy_file: str | None = None
    """A file with the proxy's URL, for one that has a password in it; read again when it changes."""
    proxy_env: str | None = None
    """An environment variable with the proxy's URL, likewise."""
    idle_close_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_IDLE_SECONDS)] = 30.0
    """Close the connection after so many seconds without a send: a Standard namespace takes 5,000 of them."""
    max_batch: int = 100
    """The most records in one send, all of one event. Over HTTPS always 1."""

    def __post_init__(self) -> None:
        self._check_credential()
        for key, problem in tls_file_problems(ca_file=self.ca_file):
            raise ValueError(f"{key}: {problem}")
        if self.transport == "amqp_websocket" and importlib.util.find_spec("aiohttp") is None:
            raise ValueError(
                f"transport amqp_websocket needs aiohttp, which is not installed. {how_to_install('websocket')}"
            )
        self._check_proxy()
        if self.transport == "https":
            msgspec.structs.force_setattr(self, "max_batch", 1)

    def _check_proxy(self) -> None:
        keys = {"proxy": self.proxy, "proxy_file": self.proxy_file, "proxy_env": self.proxy_env}
        one_of(**keys)
        if self.proxy is not None:
            plain_url(self.proxy, key="proxy")
        given = next((key for key, value in keys.items() if value is not None), None)
        if given is not None and self.transport == "amqp":
            raise ValueError(
                f'{given} needs transport = "amqp_websocket" or "https": AMQP itself goes through no HTTP proxy'
            )

    def _check_credential(self) -> None:
        has_string = self.connection_string_file is not None or self.connection_string_env is not None
        one_of(connection_string_file=self.connection_string_file, connection_string_env=self.connection_string_env)
        if self.credential == "connection_string":
            if not has_string:
                raise ValueError("credential connection_string needs connection_string_file or connection_string_env")
            if self.client_id is not None:
                raise ValueError("client_id belongs to a managed identity; a connection string has none")
            return
        if has_string:
            raise ValueError('connection_string_file and _env need credential = "connection_string"')
        for key in ("fully_qualified_namespace", "eventhub"):
            if not getattr(self, key):
                raise ValueError(f"{key} is missing; credential {self.credential} needs it")
        # With an endpoint of one's own the namespace may be called anything, as an emulator's is.
        if self.endpoint is None and not _HOST.fullmatch(self.fully_qualified_namespace or ""):
            # Not shown: it may be a whole connection string, with its key.
            raise ValueError(
                "fully_qualified_namespace is no whole host name. It has the form NAME.servicebus.windows.net, "
                "without a scheme and a path"
            )
