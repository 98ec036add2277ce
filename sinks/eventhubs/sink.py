"""The sink `eventhubs`: records to Azure Event Hubs, with the EventId as their partition key.

Each record is a CloudEvent (content type application/cloudevents+json). Event Hubs keeps the order only within a
partition, so a consumer reads all records of one event in order, from every VM that observed the event. One send is one
transfer, whose batch has one partition key. The transports are AMQP, AMQP through a websocket (port 443), and HTTPS.

The modules of Azure are imported with the first send, because azure-eventhub and azure-identity take 40 MB. HTTPS also
does without asyncio.
"""

from __future__ import annotations

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
    """Sends to one event hub; connects with the first send."""

    Config: ClassVar[type[SinkConfig]] = EventHubsConfig
    batch_by_event: ClassVar[bool] = True

    def __init__(self, config: EventHubsConfig) -> None:
        super().__init__(config)
        self._amqp: AmqpSender | None = None
        access = Access(config)
        if config.transport == "https":
            self._sender: HttpsSender | AmqpSender = HttpsSender(config, access)
        else:
            from sinks.eventhubs.amqp import AmqpSender  # noqa: PLC0415  # imports asyncio

            self._sender = self._amqp = AmqpSender(config, access)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch* as one transfer; raise DeliveryRejected for records of several events."""
        if len({record.event_key for record in batch}) > 1:
            raise DeliveryRejected("A batch has one partition key, and these records are of several events.")
        self._sender.send(batch)

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Encode *batch* while the hub responds to the next `send`."""
        if self._amqp is not None:
            self._amqp.prepare_next(batch)

    @classmethod
    def shown_by_check(cls, config: EventHubsConfig) -> str:
        """Return the result of `check`: a GET does not test the permission to send."""
        if config.transport != "https":
            return "the event hub exists, and lets this identity send."
        return f"it responds. Whether this identity may send was not tried; `send-test {config.name}` sends a record."

    def check(self) -> None:
        """Connect, authenticate, and find the event hub; nothing is sent."""
        self._sender.check()

    def close(self) -> None:
        """Close the connections, and end a send in another thread."""
        self._sender.close()
