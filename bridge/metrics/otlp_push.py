"""The thread that pushes the metrics to an OTLP receiver at a fixed interval.

Every push contains the current totals, so a failed push loses no count and needs no retry. The thread holds at most
one request in memory. The OpenTelemetry SDK is imported in this thread, and only if a push is configured.
"""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit

import requests

from bridge.config.telemetry import PushSettings
from bridge.errors import DeadlineExceeded, DeliveryFailed
from bridge.events.event import VmIdentity
from bridge.events.otel_resource import resource_attributes
from bridge.http.failures import root_cause
from bridge.http.retry_after import retry_after_seconds
from bridge.http.session import DeadlineSession
from bridge.logs import ThrottledLog
from bridge.metrics.metrics import Metrics
from bridge.outbox.outbox import Outbox
from bridge.system.secrets import Secret, masked
from bridge.text import excerpt

logger = logging.getLogger(__name__)

_LAST_PUSH_SECONDS = 1.0
_SUCCESS = range(200, 300)
_ADVICE = {401: "Check the headers.", 403: "Check the headers.", 404: "Check telemetry.otlp_endpoint."}
_GRPC_PORT, _GRPC_ADVICE = 4317, " Port 4317 is usually for gRPC. For OTLP over HTTP, the usual port is 4318."


class MetricsPush:
    """Pushes *metrics* now and at each interval. *about* returns the current VM and labels."""

    def __init__(
        self,
        settings: PushSettings,
        metrics: Metrics,
        outbox: Outbox,
        *,
        about: Callable[[], tuple[VmIdentity, Mapping[str, str]]],
    ) -> None:
        self.settings = settings
        self._metrics = metrics
        self._outbox = outbox
        self._about = about
        self._client = OtlpClient(settings)
        self._log = ThrottledLog(logger)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin the last push, which takes at most 1 s."""
        self._stopping.set()

    def close(self, wait_seconds: float = 0.0) -> None:
        """Wait up to *wait_seconds* for the last push, and cancel it if it is still running."""
        self._stopping.set()
        self._thread.join(wait_seconds)
        self._client.close()

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._stopping.wait(wait_seconds):
            wait_seconds = max(self.settings.interval_seconds, self._push(self.settings.timeout_seconds))
        self._push(min(_LAST_PUSH_SECONDS, self.settings.timeout_seconds))

    def _push(self, deadline_seconds: float) -> float:
        """Push once. Return how many seconds the receiver asks the agent to wait, or 0."""
        from bridge.metrics.otlp_encoding import encode  # noqa: PLC0415  # imports the SDK, which takes memory

        try:
            stream_id, created_at = self._outbox.read(lambda state: (state.get("stream_id"), state.get("created_at")))
            resource = resource_attributes(*self._about(), instance_id=stream_id or "")
            warning = self._client.post(encode(self._metrics, resource, created_at), deadline_seconds=deadline_seconds)
        except DeliveryFailed as error:
            message = f"The metrics were not pushed. The next push contains the same totals. {error}"
            self._log.problem("push", logging.WARNING, message, kind=error.reason)
            return error.retry_after or 0.0
        except Exception as error:  # noqa: BLE001  # the top of a thread
            self._log.problem("push", logging.ERROR, f"The metrics were not pushed: {error}", exc_info=error)
            return 0.0
        if warning:
            self._log.problem("warning", logging.WARNING, f"The OTLP receiver responded with a warning: {warning}")
        self._log.recovered("push", "The metrics are pushed again.")
        return 0.0


class OtlpClient:
    """Sends OTLP requests and interprets the responses."""

    def __init__(self, settings: PushSettings) -> None:
        self._settings = settings
        self._session = DeadlineSession()
        self._headers = Secret(key="headers", file=settings.headers_file, env=settings.headers_env)
        parts = urlsplit(settings.url)
        self.shown = f"{parts.scheme}://{parts.netloc}"
        self._advice = _GRPC_ADVICE if parts.port == _GRPC_PORT else ""

    def post(self, body: bytes, *, deadline_seconds: float) -> str:
        """Send *body*. Return the receiver's warning, or "". Raises DeliveryFailed."""
        from bridge.metrics.otlp_encoding import rejection  # noqa: PLC0415  # imports the SDK, which takes memory

        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "scheduled-events-bridge"}
        secret = self._secret_headers()
        if self._settings.is_compressed:
            body, headers["Content-Encoding"] = gzip.compress(body, mtime=0), "gzip"
        try:
            response = self._session.request(
                "POST",
                self._settings.url,
                data=body,
                headers={**headers, **secret},
                deadline_seconds=deadline_seconds,
                verify=self._settings.ca_file,
                cert=self._settings.certificate,
            )
        except DeadlineExceeded:
            message = f"{self.shown} did not respond within {deadline_seconds:g} s."
            raise DeliveryFailed(message, reason="timeout") from None
        except (requests.RequestException, OSError, ValueError) as error:
            cause = excerpt(masked(str(root_cause(error)), secret.values()).encode("utf-8", "replace"))
            message = f"{self.shown} cannot be reached: {cause}.{self._advice}"
            raise DeliveryFailed(message, reason="connection") from None
        status = response.status_code
        if status not in _SUCCESS:
            message = f"{self.shown} responded with {status}. {_ADVICE.get(status, '')}".rstrip()
            raise DeliveryFailed(message, retry_after_seconds(response.headers), reason=f"status_{status}")
        count, text = rejection(response.content)
        shown = excerpt(masked(text, secret.values()).encode())
        return f"It rejected {count} data points. {shown}".rstrip() if count else shown

    def close(self) -> None:
        """Cancel a running request."""
        self._session.close()

    def _secret_headers(self) -> dict[str, str]:
        lines = self._headers.values()
        if self._settings.headers_env is None:
            pairs = [line.partition(":") for line in lines]
        else:  # name=value,name=value in percent encoding (W3C Baggage)
            pairs = [unquote(each).partition("=") for line in lines for each in line.split(",")]
        return {name.strip(): value.strip() for name, _, value in pairs}
