"""The sink `eventhubs`: records to Azure Event Hubs, with the EventId as their partition key.

Each record is a CloudEvent (content type application/cloudevents+json). Event Hubs keeps order within a partition only,
so a reader of one event gets its whole life in order, from every VM that saw it. A batch has one key, and one send is
one transfer. Three ways there: AMQP, AMQP through a websocket (port 443), or plain HTTPS.

Nothing of Azure is imported before the first send: azure-eventhub and azure-identity cost some 40 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from bridge.sink import DeliveryRejected, Sink, SinkConfig, TransitionRecord
from sinks.eventhubs.access import Access
from sinks.eventhubs.amqp import AmqpSender
from sinks.eventhubs.config import EventHubsConfig
from sinks.eventhubs.https import HttpsSender

__all__ = ["EventHubsConfig", "EventHubsSink"]


class EventHubsSink(Sink):
    """Sends to one event hub; connects when there is something to send."""

    Config: ClassVar[type[SinkConfig]] = EventHubsConfig
    batch_by_event: ClassVar[bool] = True

    def __init__(self, config: EventHubsConfig) -> None:
        super().__init__(config)
        access = Access(config)
        self._sender: HttpsSender | AmqpSender
        self._sender = HttpsSender(config, access) if config.transport == "https" else AmqpSender(config, access)

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch* as one transfer; DeliveryRejected without records asks for them one by one."""
        if len({record.event_key for record in batch}) > 1:
            raise DeliveryRejected("A batch has one partition key, and these records are of several events.")
        self._sender.send(batch)

    def prepare_next(self, batch: Sequence[TransitionRecord]) -> None:
        """Encode *batch* while the hub answers to the one before: a third of what a transfer costs here."""
        if isinstance(self._sender, AmqpSender):
            self._sender.prepare_next(batch)

    @classmethod
    def shown_by_check(cls, config: EventHubsConfig) -> str:
        """Return what `check` shows: over HTTPS a request that sends nothing shows nothing of the right to send."""
        if config.transport != "https":
            return "the event hub is there, and lets this identity send."
        return f"it answers. Whether this identity may send was not tried; `send-test {config.name}` sends a record."

    def check(self) -> None:
        """Connect, show the credential, and find the event hub; nothing is sent."""
        self._sender.check()

    def close(self) -> None:
        """Close the connection; a send that hangs in another thread ends."""
        self._sender.close()
