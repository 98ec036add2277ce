"""The interface of a webhook's format: the request for a record, and what an answer means beyond its status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from bridge.sink import DeliveryError, DeliveryRejected, Secret, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.http.endpoint import Endpoint


class Message(NamedTuple):
    """One request to make."""

    url: str
    body: bytes
    content_type: str
    method: str = "POST"


class Format(ABC):
    """One format, for one sink; may remember what it learned of its peer."""

    secrets: tuple[Secret, ...] = ()
    """What to mask in messages, beside what the URL and the headers hold."""

    @abstractmethod
    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the request for *record* at the configured *url*; None when it makes none.

        Raises DeliveryRejected for a record that cannot be put into this format, DeliveryFailed for a setting that a
        person must mend.
        """

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> int:
        """Try the endpoint at *url* without writing to it, and return the status of its answer.

        Raises DeliveryFailed when it is none of this format's.
        """
        return endpoint_of(url).check().status_code

    def refused(self, error: DeliveryRejected) -> DeliveryError:
        """Return what *error*, made from the status alone, means in this format."""
        return error


class CloudEventsFormat(Format):
    """The record in an envelope that any CloudEvents SDK reads."""

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the CloudEvent in structured mode."""
        del now
        return Message(url, cloud_event_bytes(record), CONTENT_TYPE)
