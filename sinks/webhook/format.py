"""The interface of a webhook's format: the request for a record, and the meaning of the response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from bridge.sink import DeliveryError, DeliveryRejected, Secret, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.http.endpoint import Endpoint


class Message(NamedTuple):
    """One request."""

    url: str
    body: bytes
    content_type: str


class Format(ABC):
    """The format of one sink."""

    secrets: tuple[Secret, ...] = ()
    """Secrets that messages mask, in addition to those of the URL and the headers."""

    @abstractmethod
    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the request for *record* at the configured *url*, None if this format needs no request.

        Raise DeliveryRejected for a record that does not fit this format, and DeliveryFailed for a wrong setting.
        """

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Test the endpoint at *url* without writing to it; raise DeliveryFailed if it does not fit this format."""
        endpoint_of(url).check()

    def refused(self, error: DeliveryRejected) -> DeliveryError:
        """Return the meaning of *error* in this format; *error* depends only on the status."""
        return error


class CloudEventsFormat(Format):
    """The record as a CloudEvent."""

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the CloudEvent in structured mode."""
        del now
        return Message(url, cloud_event_bytes(record), CONTENT_TYPE)
