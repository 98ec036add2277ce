"""Event Hubs over HTTPS: one POST a record, for networks that let nothing but HTTPS out.

Microsoft's pages "Send event" and "Event Hubs service REST - Common parameters and headers": 201 on success, a bearer
token or a shared access signature, the partition key in BrokerProperties, application properties as headers of their
own. What a status means is the table of all HTTP sinks. The batch form of the service is not used: in it an event has
no content type.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from urllib.parse import quote

from bridge.sink import DeliveryFailed, DeliveryRejected, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.eventhubs.access import Access
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.message import partition_key, properties
from sinks.http.config import HttpConfig
from sinks.http.endpoint import CLIENT_ERROR, SERVER_ERROR, SUCCESS, Endpoint

_API_VERSION = "api-version=2014-01"
_GONE = frozenset({404, 410})


class HttpsSender:
    """Sends to one event hub over HTTPS."""

    def __init__(self, config: EventHubsConfig, access: Access) -> None:
        self._config = config
        self._access = access
        self._http = HttpConfig(
            name=config.name,
            timeout_seconds=config.timeout_seconds,
            ca_file=config.ca_file,
            proxy=config.proxy,
            proxy_file=config.proxy_file,
            proxy_env=config.proxy_env,
        )
        self._endpoint: Endpoint | None = None
        self._secrets: tuple[str, ...] = ()
        self._is_closed = False

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """POST the one record of *batch*."""
        if len(batch) > 1:
            raise DeliveryRejected("Over HTTPS a request carries one record.")
        record = batch[0]
        headers = {
            "Content-Type": CONTENT_TYPE,
            "BrokerProperties": json.dumps({"PartitionKey": partition_key(record)}),
            **_headers(properties(record)),
        }
        endpoint, left = self._prepared("/messages")
        try:
            endpoint.post(cloud_event_bytes(record), self._authorized(headers), deadline_seconds=left)
        except DeliveryFailed as error:
            if error.needs_attention:
                self._access.forget()
            raise

    def check(self) -> None:
        """Connect and show the token, without sending.

        Reading the hub needs the right Manage, so a 401 or 403 here says nothing of the right to send.
        """
        endpoint, left = self._prepared("")
        answer = endpoint.request("GET", None, self._authorized({}), deadline_seconds=left)
        status = answer.status_code
        if status in _GONE or not (status in SUCCESS or status in CLIENT_ERROR):
            is_for_a_person = status not in SERVER_ERROR
            raise DeliveryFailed(f"{self._access.peer} answered {status}.", needs_attention=is_for_a_person)

    def close(self) -> None:
        """Close the connections; a request in flight ends."""
        self._is_closed = True
        if self._endpoint is not None:
            self._endpoint.close()

    def _prepared(self, path: str) -> tuple[Endpoint, float]:
        """Return the endpoint for *path* under the hub, and the seconds left of the deadline; the token is at hand."""
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit
        self._access.prepare(wait_seconds=limit)
        host = self._config.endpoint or self._access.namespace
        url = f"https://{host.partition('//')[2] or host}/{quote(self._access.eventhub)}{path}?{_API_VERSION}"
        secrets = self._access.secrets
        endpoint = self._endpoint
        if endpoint is None or (endpoint.url, self._secrets) != (url, secrets):
            if endpoint is not None:
                endpoint.close()
            endpoint = self._endpoint = Endpoint(url, self._http, secrets=secrets)
            self._secrets = secrets
        if self._is_closed:  # after the endpoint can be seen: `close` may have come before that
            endpoint.close()
        return endpoint, max(0.001, deadline - time.monotonic())

    def _authorized(self, headers: dict[str, str]) -> dict[str, str]:
        host = {"Host": self._access.namespace} if self._config.endpoint else {}
        return {**headers, **host, "Authorization": self._access.authorization()}


def _headers(values: dict[str, str]) -> dict[str, str]:
    """Return *values* as headers, without what no header can carry."""
    return {name: value for name, value in values.items() if value.isascii() and value.isprintable()}
