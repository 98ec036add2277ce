"""Sends records to Event Hubs over AMQP, with the asynchronous client of the Azure SDK.

The sender connects when it sends its first batch. It closes idle connections, because a Standard namespace accepts at
most 5,000 connections. After an error without a response from the event hub, it opens a new connection, because the SDK
does not always recover from such errors.

The SDK resends a failed batch even if its number of retries is 0. To prevent this, the client in this module overrides
the SDK's `_start_producer` method. If a future version of the SDK does not call this method, consumers might receive
duplicates.

The sender encodes the next batch while the event hub processes the current one. This saves time, because encoding takes
a third as long as a transfer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from bridge.sink import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.eventhubs.access import Access
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.errors import delivery_error, is_about_access, is_answer, link_error
from sinks.eventhubs.event_loop import Ended, LoopThread, Overdue
from sinks.eventhubs.message import partition_key, properties

#: The shares of the deadline that the sender uses to end an overdue call and to wait for its thread.
_MARGIN, _END = 0.08, 0.03
_MOST_MARGIN_SECONDS = 0.5
#: Time to close the connection when the sink is closed.
_CLOSE_SECONDS = 0.5


class AmqpSender:
    """Sends batches to one event hub. Call all methods except `close` from the same thread."""

    def __init__(self, config: EventHubsConfig, access: Access) -> None:
        self._config = config
        self._access = access
        self._end_seconds = min(_MOST_MARGIN_SECONDS, config.timeout_seconds * _END)
        self._is_closed = False
        self._connection: _Connection | None = None
        self._following: Sequence[TransitionRecord] = ()

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch* in one transfer. All records must belong to the same event."""
        following, self._following = self._following, ()
        self._run(lambda connection: connection.send(batch, following))

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Encode *batch* during the next `send`, which sends another batch."""
        self._following = batch

    def check(self) -> None:
        """Open a link to the event hub and read its properties, without sending records."""
        self._run(lambda connection: connection.check())

    def close(self) -> None:
        """Close the connection and cancel a call in another thread."""
        self._is_closed = True
        self._access.close()
        self._drop(grace_seconds=_CLOSE_SECONDS, wait_seconds=2 * _CLOSE_SECONDS)

    def _run(self, work: Callable[[_Connection], Coroutine[Any, Any, None]]) -> None:
        limit = self._config.timeout_seconds
        deadline = time.monotonic() + limit - min(_MOST_MARGIN_SECONDS, limit * _MARGIN)
        self._access.prepare(wait_seconds=deadline - time.monotonic())
        while True:
            connection = self._open()
            seconds = max(0.001, deadline - time.monotonic())
            try:
                connection.loop.call(partial(work, connection), seconds=seconds, end_seconds=self._end_seconds)
            except Ended:
                if self._is_closed or connection.is_sending:
                    raise DeliveryFailed("The sink was closed during the send.") from None
                self._drop(wait_seconds=self._end_seconds)
            except Exception as error:
                raise self._failure(error, connection) from error
            else:
                return

    def _open(self) -> _Connection:
        connection = self._connection
        if connection is None or connection.loop.has_ended:
            connection = self._connection = _Connection(self._config, self._access)
        if self._is_closed:  # check after the assignment, so that either `close` or this method ends the connection
            self._drop(wait_seconds=self._end_seconds)
            raise DeliveryFailed("The sink is closed.")
        return connection

    def _failure(self, error: Exception, connection: _Connection) -> DeliveryError:
        was_sending = connection.is_sending
        if not isinstance(error, DeliveryRejected) and not is_answer(error):
            self._drop(wait_seconds=self._end_seconds)
        if isinstance(error, DeliveryError):
            return error
        access = self._access
        if isinstance(error, Overdue):
            doing = "send" if was_sending else "connection attempt"
            message = f"{access.peer} did not respond within {self._config.timeout_seconds:g} s. The {doing} ended."
            return DeliveryFailed(message, reason=RetryReason.TIMEOUT)
        failure = delivery_error(error, peer=access.peer, secrets=access.secrets)
        if is_about_access(error):
            access.forget()
        return failure

    def _drop(self, *, grace_seconds: float = 0.0, wait_seconds: float) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.loop.end(grace_seconds=grace_seconds, wait_seconds=wait_seconds)


class _Connection:
    def __init__(self, config: EventHubsConfig, access: Access) -> None:
        self._config = config
        self._access = access
        self._client: Any = None
        self._prepared: tuple[Sequence[TransitionRecord], Any] | None = None
        self.is_sending = False
        self.loop = LoopThread(f"eventhubs:{config.name}", idle_seconds=config.idle_close_seconds, close=self._close)

    async def send(self, batch: Sequence[TransitionRecord], following: Sequence[TransitionRecord]) -> None:
        client = self._connected()
        prepared, self._prepared = self._prepared, None
        data = prepared[1] if prepared is not None and prepared[0] == batch else None
        if data is None:
            data = await _encode(client, batch)
        self.is_sending = True
        sending = asyncio.ensure_future(client.send_batch(data))
        try:
            if following:
                await asyncio.sleep(0)  # lets the task of the transfer write it in its first step
                self._prepared = following, await _encode_early(client, following)
            await sending
        except Exception:
            found = link_error(client)
            if found is None:
                raise
            raise found from None
        finally:
            sending.cancel()
        self.is_sending = False

    async def check(self) -> None:
        client = self._connected()
        await client.create_batch()
        await client.get_eventhub_properties()

    def _connected(self) -> Any:
        if self._client is None:
            self._client = _client(self._config, self._access)
        elif not self.loop.is_connected():
            raise Ended
        self.is_sending = False
        return self._client

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()


async def _encode(client: Any, batch: Sequence[TransitionRecord]) -> Any:
    data = await client.create_batch(partition_key=partition_key(batch[0]))
    for record in batch:
        _add(data, record, len(batch))
    return data


async def _encode_early(client: Any, batch: Sequence[TransitionRecord]) -> Any:
    """Return *batch* in the form that the SDK sends, or None after an error."""
    try:
        return await _encode(client, batch)
    except Exception:  # noqa: BLE001  # an error must not affect the current transfer
        return None


def _add(data: Any, record: TransitionRecord, count: int) -> None:
    from azure.eventhub import EventData  # noqa: PLC0415  # only where it is configured: 27 MB

    event = EventData(cloud_event_bytes(record))
    event.content_type = CONTENT_TYPE
    named: Any = properties(record)
    event.properties = named
    try:
        data.add(event)
    except ValueError:
        what = "The record" if count == 1 else f"A batch of {count} records"
        raise DeliveryRejected(f"{what} exceeds the event hub's limit of {data.max_size_in_bytes} bytes.") from None


def _client(config: EventHubsConfig, access: Access) -> Any:
    from azure.eventhub import TransportType  # noqa: PLC0415  # likewise
    from azure.eventhub.aio import EventHubProducerClient  # noqa: PLC0415  # likewise

    class Client(EventHubProducerClient):
        """The client of the SDK without its retries."""

        async def _start_producer(self, partition_id: str, send_timeout: float | None) -> None:
            del partition_id, send_timeout
            raise sys.exc_info()[1] or RuntimeError("The SDK wants to send again.")

    options: dict[str, Any] = {
        "retry_total": 0,
        "retry_backoff_factor": 0,  # the SDK waits once even without a retry
        "transport_type": TransportType.AmqpOverWebsocket
        if config.transport == "amqp_websocket"
        else TransportType.Amqp,
        "http_proxy": _proxy(access.proxy),
        "custom_endpoint_address": config.endpoint,
        "connection_verify": config.ca_file,
        "user_agent": "scheduled-events-bridge",
    }
    string = access.string
    if string is not None:
        return Client.from_connection_string(string.text, eventhub_name=string.eventhub, **options)
    credential: Any = access
    return Client(
        fully_qualified_namespace=access.namespace,
        eventhub_name=access.eventhub,
        credential=credential,
        **options,
    )


def _proxy(url: str | None) -> dict[str, Any] | None:
    """Return *url* for the SDK, which expects scheme, user, and password in the host name."""
    if url is None:
        return None
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return {"proxy_hostname": f"{parts.scheme}://{user}{at}{host}", "proxy_port": parts.port or 80}
