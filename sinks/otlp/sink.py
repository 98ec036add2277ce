"""The sink `otlp`: OpenTelemetry logs over HTTP and protobuf, to a Collector or to any backend that takes OTLP.

The answer is read here and not by the SDK's exporter, because a 200 may say that records were rejected. Those are
parked with the whole request: OTLP forbids to send it again, and does not say which of its records were meant. So
`max_batch` is 1 unless the configuration raises it.

Without an endpoint or headers in the table, the sink uses OpenTelemetry's environment variables, as exporters do.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit, urlunsplit

from bridge.sink import DeliveryFailed, DeliveryRejected, Sink, SinkConfig, TransitionRecord, excerpt
from sinks.http.config import HttpConfig, check_token_stays_private
from sinks.http.endpoint import Endpoint, entra_token
from sinks.otlp.environment import HEADER_VARIABLES, OtlpEnvironment

_PATH = "/v1/logs"
_DEFAULT_ENDPOINT = "http://127.0.0.1:4318"
_GRPC_PORT = 4317
_GRPC_PORT_ADVICE = "Port 4317 usually speaks gRPC. This sink uses OTLP over HTTP, whose usual port is 4318."


class OtlpConfig(HttpConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type otlp."""

    endpoint: str | None = None
    """Where the receiver listens for OTLP over HTTP; /v1/logs is added unless it is there. Default: what the
    environment says, else `http://127.0.0.1:4318`."""
    compression: Literal["none", "gzip"] = "none"
    """How the body is compressed."""

    def __post_init__(self) -> None:
        """Raise ValueError for a mistake."""
        super().__post_init__()
        check_token_stays_private(self, self.logs_url())

    def logs_url(self, environment: OtlpEnvironment | None = None) -> str:
        """Return the URL that logs are POSTed to; raise ValueError when it is none."""
        environment = environment or OtlpEnvironment()
        given = environment.value("ENDPOINT")
        if self.endpoint is not None or given is None:
            return logs_url(_DEFAULT_ENDPOINT if self.endpoint is None else self.endpoint)
        variable = str(environment.variable("ENDPOINT"))
        if environment.value("PROTOCOL") == "grpc":
            raise ValueError(
                f"endpoint is missing, and {variable} is that of gRPC, by {environment.variable('PROTOCOL')}. "
                "This sink speaks OTLP over HTTP: set endpoint."
            )
        return logs_url(given, key=variable, is_whole=environment.is_url_of_logs)

    def environment_headers(self) -> dict[str, str]:
        """Return the headers of the environment; none when the table has some of its own."""
        has_own = bool(self.headers) or self.headers_file is not None
        return {} if has_own else OtlpEnvironment().headers()


class OtlpSink(Sink):
    """Sends each batch as one ExportLogsServiceRequest."""

    Config: ClassVar[type[SinkConfig]] = OtlpConfig

    @classmethod
    def secret_variables(cls, config: Any) -> Collection[str]:
        """Return the variables for headers: a collector's key stands there."""
        del config
        return HEADER_VARIABLES

    def __init__(self, config: OtlpConfig) -> None:
        super().__init__(config)
        self._token = entra_token(config)
        url = config.logs_url()
        self._endpoint = Endpoint(
            url,
            config,
            default_headers=config.environment_headers(),
            token=self._token,
            advice=_GRPC_PORT_ADVICE if urlsplit(url).port == _GRPC_PORT else "",
        )
        self._resource = OtlpEnvironment().resource_attributes()
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": "scheduled-events-bridge"}

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """POST *batch*; raise DeliveryRejected naming all of it when the receiver rejected any of it."""
        # With the first send: an agent that only checks its configuration does without protobuf's 3 MB.
        from sinks.otlp.encoding import encode_request, rejection  # noqa: PLC0415

        body = encode_request(batch, self._resource)
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

    @classmethod
    def shown_by_check(cls, config: Any) -> str:
        """Return what `check` shows."""
        return f"it took a request without records; `send-test {config.name}` sends one."

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


def logs_url(endpoint: str, *, key: str = "endpoint", is_whole: bool = False) -> str:
    """Return the URL that logs are POSTed to; raise ValueError when *endpoint* is no HTTP URL.

    /v1/logs is added unless it is there, or the URL *is_whole*: that of OTEL_EXPORTER_OTLP_LOGS_ENDPOINT is.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{key} is no HTTP URL. Write it like http://127.0.0.1:4318")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{key} holds a user name or a password. Put an Authorization header into headers_file")
    _ = parts.port  # raises ValueError when it is no port
    if is_whole:
        return urlunsplit(parts._replace(path=parts.path or "/", fragment=""))
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH, fragment=""))
