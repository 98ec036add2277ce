"""The settings of the `eventhubs` sink and their valid combinations."""

from __future__ import annotations

import importlib.util
import re
from typing import Annotated, Literal

import msgspec

from bridge.sink import how_to_install
from sinks.http.config import ServerConfig, one_of

_LONGEST_IDLE_SECONDS = 3_600
_HOST = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")


class EventHubsConfig(ServerConfig, frozen=True, kw_only=True):
    """The settings of the sink type `eventhubs`."""

    fully_qualified_namespace: str | None = None
    """The host name of the namespace, for example `ns.servicebus.windows.net`. A connection string already contains the
    host name."""
    eventhub: str | None = None
    """The name of the event hub. A connection string can contain the name instead (EntityPath)."""
    credential: Literal["managed_identity", "default", "connection_string"] = "managed_identity"
    """default: the first credential that DefaultAzureCredential of azure-identity finds."""
    client_id: str | None = None
    """The client ID of a user-assigned managed identity. Default: the system-assigned identity."""
    connection_string_file: str | None = None
    """A file with the connection string. The agent rereads the file when it changes."""
    connection_string_env: str | None = None
    """An environment variable with the connection string."""
    transport: Literal["amqp", "amqp_websocket", "https"] = "amqp"
    """amqp: port 5671, without a proxy. amqp_websocket: port 443, requires the `websocket` extra. https: port 443, one
    request per record."""
    endpoint: str | None = None
    """The address to connect to instead of the namespace, such as a private endpoint, as `host` or `host:port`."""
    idle_close_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_IDLE_SECONDS)] = 30.0
    """Close the connection after this many seconds without a send. A Standard namespace allows 5,000 connections."""
    max_batch: int = 100
    """Maximum number of records in one send, all of one event. Always 1 for https."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_credential()
        if self.transport == "amqp_websocket" and importlib.util.find_spec("aiohttp") is None:
            raise ValueError(
                f"transport amqp_websocket needs aiohttp, which is not installed. {how_to_install('websocket')}"
            )
        if self.has_proxy and self.transport == "amqp":
            raise ValueError(
                'A proxy needs transport = "amqp_websocket" or "https". Plain AMQP cannot use an HTTP proxy.'
            )
        if self.transport == "https":
            msgspec.structs.force_setattr(self, "max_batch", 1)

    def _check_credential(self) -> None:
        has_string = self.connection_string_file is not None or self.connection_string_env is not None
        one_of(connection_string_file=self.connection_string_file, connection_string_env=self.connection_string_env)
        if self.credential == "connection_string":
            if not has_string:
                raise ValueError("credential connection_string needs connection_string_file or connection_string_env.")
            if self.client_id is not None:
                raise ValueError("client_id is for a managed identity. Remove client_id or change credential.")
            return
        if has_string:
            raise ValueError('connection_string_file and connection_string_env need credential = "connection_string".')
        for key in ("fully_qualified_namespace", "eventhub"):
            if not getattr(self, key):
                raise ValueError(f'{key} is missing. With credential = "{self.credential}", set {key}.')
        # With a custom endpoint, such as an emulator, the namespace may have any name.
        if self.endpoint is None and not _HOST.fullmatch(self.fully_qualified_namespace or ""):
            # The message omits the value, because the value may be a connection string with its key.
            raise ValueError(
                "fully_qualified_namespace is not a complete host name. It has the form NAME.servicebus.windows.net, "
                "without a scheme, a port, or a path."
            )
