"""The sink `otlp`: OpenTelemetry logs over HTTP and protobuf, to a Collector or to any backend that takes OTLP.

The answer is read here and not by the SDK's exporter, because a 200 may say that records were rejected. Those are
parked with the whole request: OTLP forbids to send it again, and does not say which of its records were meant. So
`max_batch` is 1 unless the configuration raises it.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import ClassVar, Literal
from urllib.parse import urlsplit, urlunsplit

from bridge.sink import DeliveryFailed, DeliveryRejected, Sink, SinkConfig, TransitionRecord, excerpt
from sinks.http.config import HttpConfig, check_token_stays_private
from sinks.http.endpoint import Endpoint, entra_token

_PATH = "/v1/logs"


class OtlpConfig(HttpConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type otlp."""

    endpoint: str = "http://127.0.0.1:4318"
    """Where the receiver listens for OTLP over HTTP; /v1/logs is added unless it is there."""
    compression: Literal["none", "gzip"] = "none"
    """How the body is compressed. none is what OpenTelemetry's exporters do unless they are told otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_token_stays_private(self, logs_url(self.endpoint))


class OtlpSink(Sink):
    """Sends each batch as one ExportLogsServiceRequest."""

    Config: ClassVar[type[SinkConfig]] = OtlpConfig

    def __init__(self, config: OtlpConfig) -> None:
        super().__init__(config)
        self._token = entra_token(config)
        self._endpoint = Endpoint(logs_url(config.endpoint), config, token=self._token)
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": "scheduled-events-bridge"}

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """POST *batch*; raise DeliveryRejected naming all of it when the receiver rejected any of it."""
        # With the first send: an agent that only checks its configuration does without protobuf's 3 MB.
        from sinks.otlp.encoding import encode_request, rejection  # noqa: PLC0415

        body = encode_request(batch)
        headers = self._headers
        if self.config.compression == "gzip":
            body = gzip.compress(body, mtime=0)
            headers = {**headers, "Content-Encoding": "gzip"}
        count, reason = rejection(self._endpoint.post(body, headers).content)
        if count > 0:
            # In this order: a secret of which only the beginning is left would not be known as one.
            shown = excerpt(self._endpoint.mask(reason).encode())
            raise DeliveryRejected(
                f"The OTLP receiver accepted the request and rejected {count} of {len(batch)} log records: "
                f"{shown or 'it does not say why.'}",
                records=list(batch),
            )

    def check(self) -> None:
        """POST a request without records, which every receiver accepts and which writes nothing."""
        try:
            answer = self._endpoint.post(b"", self._headers)
        except DeliveryRejected as error:
            raise DeliveryFailed(str(error), needs_attention=True) from error
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            raise DeliveryFailed("The endpoint answered with a web page. Is that the OTLP receiver's address?")

    def close(self) -> None:
        """Close the connection; a send in flight ends with an error."""
        self._endpoint.close()
        if self._token is not None:
            self._token.close()


def logs_url(endpoint: str) -> str:
    """Return the URL that logs are POSTed to; raise ValueError when *endpoint* is no HTTP URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("endpoint is no HTTP URL. Write it like http://127.0.0.1:4318")
    if parts.username is not None or parts.password is not None:
        raise ValueError("endpoint holds a user name or a password. Put an Authorization header into headers_file")
    _ = parts.port  # raises ValueError when it is no port
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH, fragment=""))
