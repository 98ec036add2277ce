"""Sends records to Event Hubs over HTTPS, for networks that block AMQP.

Each request contains one record, because records in a batch request cannot have a content type. The Authorization
header contains the token or the shared access signature, and the BrokerProperties header contains the partition key.

Sources: Microsoft, "Send event" and "Event Hubs service REST - Common parameters and headers".
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from bridge.sink import DeliveryFailed, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.eventhubs.access import Access
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.message import partition_key, properties
from sinks.http.config import HttpConfig
from sinks.http.endpoint import CLIENT_ERROR, SERVER_ERROR, SUCCESS, Endpoint

_API_VERSION = "api-version=2014-01"
_GONE = frozenset({404, 410})


class HttpsSender:
    """Sends records to one event hub over HTTPS."""

    def __init__(self, config: EventHubsConfig, access: Access) -> None:
        self._config = config
        self._access = access
        self._http = msgspec.convert(config, HttpConfig, from_attributes=True)
        self._endpoint: Endpoint | None = None
        self._is_closed = False

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send the record of *batch* in a POST request."""
        (record,) = batch
        endpoint, headers, left = self._prepared("/messages")
        headers |= {
            "Content-Type": CONTENT_TYPE,
            "BrokerProperties": json.dumps({"PartitionKey": partition_key(record)}),
            # A header cannot contain other characters.
            **{name: value for name, value in properties(record).items() if value.isascii() and value.isprintable()},
        }
        try:
            endpoint.post(cloud_event_bytes(record), headers, deadline_seconds=left)
        except DeliveryFailed as error:
            if error.needs_attention:
                self._access.forget()
            raise

    def check(self) -> None:
        """Test the connection without sending a record.

        The test request requires the Manage permission, which the agent does not need for sending records. Status 401
        and 403 therefore count as success.
        """
        endpoint, headers, left = self._prepared("")
        status = endpoint.request("GET", None, headers, deadline_seconds=left).status_code
        if status in _GONE or not (status in SUCCESS or status in CLIENT_ERROR):
            message = f"{self._access.peer} responded with {status}."
            raise DeliveryFailed(message, needs_attention=status not in SERVER_ERROR)

    def close(self) -> None:
        """Close the connections and cancel a request in another thread."""
        self._is_closed = True
        self._access.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _prepared(self, path: str) -> tuple[Endpoint, dict[str, str], float]:
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit
        access = self._access
        access.prepare(wait_seconds=limit)
        host = self._config.endpoint or access.namespace
        url = f"https://{host.partition('//')[2] or host}/{quote(access.eventhub)}{path}?{_API_VERSION}"
        endpoint = self._endpoint
        if endpoint is None or endpoint.url != url:
            if endpoint is not None:
                endpoint.close()
            endpoint = self._endpoint = Endpoint(url, self._http, secrets=lambda: access.secrets)
        if self._is_closed:  # check after the assignment, so that either `close` or this method closes the endpoint
            endpoint.close()
        headers = {"Authorization": access.authorization()}
        if self._config.endpoint:
            headers["Host"] = access.namespace
        return endpoint, headers, max(0.001, deadline - time.monotonic())
