"""Implements the `otlp` sink, which sends records as OpenTelemetry logs or traces.

An OTLP receiver can accept a request but reject some of its records (`partial_success`). The response does not say
which ones, and OTLP does not allow clients to resend the request. The agent therefore parks all records of the request.
To avoid parking accepted records, `max_batch` is 1 by default.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from bridge.sink import DeliveryFailed, DeliveryRejected, Sink, SinkConfig, Transition, TransitionRecord, excerpt
from sinks.http.config import HttpConfig, check_token_stays_private
from sinks.http.endpoint import Endpoint, entra_token
from sinks.http.urls import http_url

logger = logging.getLogger(__name__)

_ENDINGS = tuple(each.value for each in Transition if each.is_ending)
_UNITS = {"logs": "log records", "traces": "spans"}
_GRPC_PORT = 4317
_GRPC_PORT_ADVICE = "Port 4317 is usually for gRPC. This sink uses OTLP over HTTP, and the usual port is 4318."


class OtlpConfig(HttpConfig, frozen=True, kw_only=True):
    """The settings of the sink type `otlp`."""

    endpoint: str = "http://127.0.0.1:4318"
    """The URL of the OTLP receiver. The agent adds /v1/logs or /v1/traces unless the URL ends with this path."""
    signal: Literal["logs", "traces"] = "logs"
    """logs: send each record as a log record. traces: send one span per event, when the event ends. Such a sink
    receives only records that end an event. To send both signals, configure two sinks."""
    compression: Literal["none", "gzip"] = "none"
    """The compression of the request body."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token_stays_private(self, signal_url(self.endpoint, self.signal))
        if self.signal == "traces":
            endings = tuple(each for each in _ENDINGS if self.transitions is None or each in self.transitions)
            if not endings:
                raise ValueError(f'signal = "traces" needs a transition that ends an event: {", ".join(_ENDINGS)}.')
            msgspec.structs.force_setattr(self, "transitions", endings)


class OtlpSink(Sink):
    """Sends each batch in one OTLP request."""

    Config: ClassVar[type[SinkConfig]] = OtlpConfig

    def __init__(self, config: OtlpConfig) -> None:
        super().__init__(config)
        self._token = entra_token(config)
        url = signal_url(config.endpoint, config.signal)
        advice = _GRPC_PORT_ADVICE if urlsplit(url).port == _GRPC_PORT else ""
        self._endpoint = Endpoint(url, config, token=self._token, advice=advice)
        self._headers = {"Content-Type": "application/x-protobuf"}
        self._logged_warning = ""

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Send *batch* in a POST request. Raise DeliveryRejected if the receiver rejects a record."""
        # Import protobuf at the first send, because it takes 3 MB.
        from sinks.otlp.encoding import encode_request, rejection  # noqa: PLC0415

        if self.config.signal == "traces":  # the encoder of the SDK takes 6 MB
            from sinks.otlp.traces import encode_request  # noqa: PLC0415

        body = encode_request(batch)
        self.sent_nothing = not body
        if self.sent_nothing:
            return
        headers = self._headers
        if self.config.compression == "gzip":
            body = gzip.compress(body, mtime=0)
            headers = {**headers, "Content-Encoding": "gzip"}
        count, reason = rejection(self._endpoint.post(body, headers).content)
        # Mask secrets before the text is shortened, because a part of a secret is also a secret.
        shown = excerpt(self._endpoint.mask(reason).encode())
        if shown and count <= 0 and shown != self._logged_warning:  # a warning, for example about a deprecated format
            self._logged_warning = shown
            logger.warning("The OTLP receiver accepted the records with a warning: %s", shown)
        if count > 0:
            raise DeliveryRejected(
                f"The OTLP receiver accepted the request and rejected {count} of the {_UNITS[self.config.signal]}: "
                f"{shown or 'The receiver gave no reason.'}",
                records=list(batch),
            )

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return the result of `check`, which sends no record."""
        return f"The receiver accepted an empty request. To test a record, use `send-test {config.name}`."

    def check(self) -> None:
        """Send an OTLP request without records, so that the destination stores nothing."""
        try:
            response = self._endpoint.post(b"", self._headers)
        except DeliveryRejected as error:
            raise DeliveryFailed(str(error), needs_attention=True) from error
        if response.headers.get("Content-Type", "").startswith("text/html"):
            raise DeliveryFailed("The endpoint responded with a web page instead of an OTLP response.")

    def close(self) -> None:
        """Close the connection and cancel a send in another thread."""
        self._endpoint.close()
        if self._token is not None:
            self._token.close()


def signal_url(endpoint: str, signal: str) -> str:
    """Return the URL for logs or traces. Raise ValueError unless *endpoint* is an HTTP URL."""
    parts = http_url(endpoint, key="endpoint")
    if parts.username is not None or parts.password is not None:
        raise ValueError("endpoint contains a user name or a password. Put an Authorization header into headers_file.")
    path, end = parts.path.rstrip("/"), f"/v1/{signal}"
    return urlunsplit(parts._replace(path=path if path.endswith(end) else path + end, fragment=""))
