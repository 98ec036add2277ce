"""Implements the `eventhubs` sink, which sends records to Azure Event Hubs as CloudEvents.

Event Hubs keeps the order of messages only within a partition. The sink therefore uses the EventId as the partition
key, and a consumer reads all records of one event in order. A batch contains only records of one event, because all
messages of a batch have the same partition key. The available transports are AMQP, AMQP over WebSockets, and HTTPS.

The sink imports the Azure libraries and requests its first token while the agent is idle. Otherwise, the first record
would have to wait for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from bridge.sink import DeliveryRejected, Sink, SinkConfig, TransitionRecord
from sinks.eventhubs.access import Access
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.https import HttpsSender

if TYPE_CHECKING:
    from sinks.eventhubs.amqp import AmqpSender

__all__ = ["EventHubsConfig", "EventHubsSink"]


class EventHubsSink(Sink):
    """Sends records to one event hub. The sink connects when it sends the first record."""

    Config: ClassVar[type[SinkConfig]] = EventHubsConfig
    batch_by_event: ClassVar[bool] = True

    def __init__(self, config: EventHubsConfig) -> None:
        super().__init__(config)
        self._amqp: AmqpSender | None = None
        self._access = Access(config)
        if config.transport == "https":
            self._sender: HttpsSender | AmqpSender = HttpsSender(config, self._access)
        else:
            from sinks.eventhubs.amqp import AmqpSender  # noqa: PLC0415  # imports asyncio

            self._sender = self._amqp = AmqpSender(config, self._access)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch*. Raise DeliveryRejected if it contains records of more than one event."""
        if len({record.event_key for record in batch}) > 1:
            raise DeliveryRejected("A batch must contain records of only one event.")
        self._sender.send(batch)

    def warm_up(self) -> None:
        """Import the Azure libraries, and request the first token in the background."""
        if self._amqp is not None:
            importlib.import_module("azure.eventhub.aio")
        self._access.prepare(wait_seconds=0.0)

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Encode *batch* while the event hub processes the current batch."""
        if self._amqp is not None:
            self._amqp.prepare_next(batch)

    @classmethod
    def shown_by_check(cls, config: EventHubsConfig) -> str:
        """Return the result of `check`. Over HTTPS, the permission to send cannot be tested."""
        if config.transport != "https":
            return "The event hub exists, and this identity can send to it."
        return f"The event hub responds. To test the permission to send, use `send-test {config.name}`."

    def check(self) -> None:
        """Test the connection, the credential, and the event hub, without sending records."""
        self._sender.check()

    def close(self) -> None:
        """Close the connections and cancel a send in another thread."""
        self._sender.close()
