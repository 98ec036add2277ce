"""OtlpEndpoint: the URL of an OTLP receiver, whose errors are protobuf, and which may be mistaken for its gRPC port."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import requests

from bridge.sink import causes
from sinks.http.endpoint import Endpoint, Hint
from sinks.otlp.status import status_text

_PROTOBUF = "application/x-protobuf"
_GRPC_PORT = 4317
#: The settings frame that a server of HTTP/2 begins with (RFC 9113 sections 3.4 and 6.5), as http.client shows it.
_SETTINGS_FRAME = "\x04\x00\x00\x00\x00\x00"
_NO_PROTOCOL = "NO_APPLICATION_PROTOCOL"
_PORTS = "This sink speaks OTLP over HTTP, which listens on 4318 unless told otherwise, and gRPC on 4317."


class OtlpEndpoint(Endpoint):
    """An Endpoint whose messages say what the receiver meant."""

    def body_text(self, response: requests.Response) -> str:
        """Return the message of a Status, or the body as text."""
        is_protobuf = response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == _PROTOBUF
        found = status_text(response.content) if is_protobuf else None
        return super().body_text(response) if found is None else found

    def hint(self, error: BaseException) -> Hint:
        """Return what to look at when the request was broken off as a gRPC port does."""
        found = list(causes(error))
        if any(_SETTINGS_FRAME in str(each) or _NO_PROTOCOL in str(each) for each in found):
            return Hint(f"It speaks HTTP/2 alone, as a gRPC port does. {_PORTS}", is_certain=True)
        was_broken_off = any(isinstance(each, (ConnectionResetError, http.client.BadStatusLine)) for each in found)
        if self.has_answered or not was_broken_off:
            return Hint()
        return Hint(f"Is that a gRPC port? {_PORTS}", is_certain=urlsplit(self.url).port == _GRPC_PORT)
