"""The thread that pushes the metrics to an OTLP receiver at a fixed interval.

Every push contains the current totals, so a failed push loses no count and needs no retry. The thread holds at most
one request in memory. The OpenTelemetry SDK is imported in this thread, and only if a push is configured.
"""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

import requests

from bridge.config.telemetry import PushSettings
from bridge.errors import BridgeError, DeadlineExceeded, TelemetryFailed
from bridge.http.failures import root_cause
from bridge.http.retry_after import retry_after_seconds
from bridge.http.session import DeadlineSession
from bridge.logs import ThrottledLog
from bridge.metrics.collectors import OutboxCollector
from bridge.metrics.metrics import Metrics
from bridge.system.secrets import Secret, masked
from bridge.text import excerpt

logger = logging.getLogger(__name__)

LAST_PUSH_SECONDS = 1.0
_GRPC_PORT = 4317
_SUCCESS = range(200, 300)
_NANOSECONDS = 1_000_000_000


class MetricsPush:
    """Pushes *metrics* until `stop`. *resource* and *created_at* are called before each push.

    *resource* returns the resource attributes, and *created_at* the creation time of the outbox in Unix seconds.
    """

    def __init__(
        self,
        settings: PushSettings,
        metrics: Metrics,
        *,
        resource: Callable[[], Mapping[str, str]],
        created_at: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._resource = resource
        self._created_at = created_at
        self._client = OtlpClient(settings)
        self._log = ThrottledLog(logger)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Start the thread. The first push follows immediately."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a last push, which takes at most 1 s."""
        self._stopping.set()

    def close(self, wait_seconds: float) -> None:
        """Wait up to *wait_seconds* for the last push, and then cancel it."""
        self._thread.join(wait_seconds)
        self._client.close()

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._stopping.wait(wait_seconds):
            wait_seconds = max(self._settings.interval_seconds, self._push(self._settings.timeout_seconds))
        self._push(min(LAST_PUSH_SECONDS, self._settings.timeout_seconds))

    def _push(self, deadline_seconds: float) -> float:
        """Push once. Return the seconds for which the receiver requests no further push."""
        try:
            warning = self._client.post(self._encoded(), deadline_seconds=deadline_seconds)
        except TelemetryFailed as error:
            message = f"The metrics were not pushed. The next push contains the same totals. {error}"
            self._log.problem("push", logging.WARNING, message, kind=error.kind)
            return error.retry_after_seconds or 0.0
        except Exception as error:  # noqa: BLE001  # the top of a thread
            self._log.problem("push", logging.ERROR, f"The metrics were not pushed: {error}", exc_info=error)
            return 0.0
        if warning:
            self._log.problem("warning", logging.WARNING, f"The OTLP receiver responded with a warning: {warning}")
        self._log.recovered("push", "The metrics are pushed again.")
        return 0.0

    def _encoded(self) -> bytes:
        from bridge.metrics.otlp_encoding import encode  # noqa: PLC0415  # imports the SDK, which takes memory

        created_at = int(self._created_at() * _NANOSECONDS)
        return encode(
            self._metrics.registry.collect(),
            self._resource(),
            now=time.time_ns(),
            since=dict.fromkeys(OutboxCollector.FROM_DISK, created_at),
            started_at=int(self._metrics.created_at * _NANOSECONDS),
        )


class OtlpClient:
    """Sends OTLP requests and interprets the responses."""

    def __init__(self, settings: PushSettings) -> None:
        self._settings = settings
        self._session = DeadlineSession()
        self._headers = Secret(key="headers", file=settings.headers_file, env=settings.headers_env)
        parts = urlsplit(settings.url)
        self.shown = f"{parts.scheme}://{parts.netloc}"
        is_grpc = parts.port == _GRPC_PORT
        self._advice = " Port 4317 is usually for gRPC. For OTLP over HTTP, the usual port is 4318." if is_grpc else ""

    def post(self, body: bytes, *, deadline_seconds: float) -> str:
        """Send *body*. Return the receiver's warning, or "". Raises TelemetryFailed."""
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "scheduled-events-bridge"}
        if self._settings.is_compressed:
            body, headers["Content-Encoding"] = gzip.compress(body, mtime=0), "gzip"
        try:
            response = self._session.request(
                "POST",
                self._settings.url,
                data=body,
                headers={**headers, **self._secret_headers()},
                deadline_seconds=deadline_seconds,
                verify=self._settings.ca_file,
                cert=self._settings.certificate,
            )
        except DeadlineExceeded:
            message = f"{self.shown} did not respond within {deadline_seconds:g} s."
            raise TelemetryFailed(message, kind="timeout") from None
        except (requests.RequestException, OSError, ValueError) as error:
            cause = self._shown(str(root_cause(error)).encode())
            message = f"{self.shown} cannot be reached: {cause}.{self._advice}"
            raise TelemetryFailed(message, kind="connection") from None
        if response.status_code not in _SUCCESS:
            advice = {401: " Check the headers.", 403: " Check the headers.", 404: " Check telemetry.otlp_endpoint."}
            raise TelemetryFailed(
                f"{self.shown} responded with {response.status_code}.{advice.get(response.status_code, '')}",
                kind=f"status_{response.status_code}",
                retry_after_seconds=retry_after_seconds(response.headers),
            )
        return self._warning(response.content)

    def close(self) -> None:
        """Cancel a running request."""
        self._session.close()

    def _secret_headers(self) -> dict[str, str]:
        try:
            lines = self._headers.values()
        except BridgeError as error:
            raise TelemetryFailed(str(error), kind="headers") from error
        if self._settings.headers_env is not None:  # name=value,name=value in percent encoding (W3C Baggage)
            pairs = [pair.partition("=") for line in lines for pair in line.split(",")]
            return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip()}
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def _warning(self, content: bytes) -> str:
        from bridge.metrics.otlp_encoding import rejection  # noqa: PLC0415  # imports the SDK, which takes memory

        count, reason = rejection(content)
        shown = self._shown(reason.encode())
        return f"It rejected {count} data points. {shown}".strip() if count else shown

    def _shown(self, text: bytes) -> str:
        return excerpt(masked(text.decode("utf-8", "replace"), self._secret_headers().values()).encode())
