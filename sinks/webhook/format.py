"""Defines the interface of webhook formats, which convert records to requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from bridge.sink import DeliveryError, DeliveryRejected, Secret, TransitionRecord
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.http.endpoint import Endpoint


class Message(NamedTuple):
    """The URL, the body, and the content type of one request."""

    url: str
    body: bytes
    content_type: str


class Format(ABC):
    """Converts records to requests in one format."""

    secrets: tuple[Secret, ...] = ()
    """Secrets that messages mask, in addition to those of the URL and the headers."""

    @abstractmethod
    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the request for *record*, or None if the format does not cover the record.

        Raise DeliveryRejected if the record cannot be converted, and DeliveryFailed if a setting is invalid.
        """

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Test *url* without writing to it. Raise DeliveryFailed if the test fails."""
        endpoint_of(url).check()

    def refused(self, error: DeliveryRejected) -> DeliveryError:
        """Return the exception to raise after the endpoint rejected a record with *error*."""
        return error


class CloudEventsFormat(Format):
    """Sends records as CloudEvents."""

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the record as a CloudEvent in structured mode."""
        del now
        return Message(url, cloud_event_bytes(record), CONTENT_TYPE)
