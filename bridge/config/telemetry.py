"""The settings of the ``[telemetry]`` table, and the OTEL_* variables that complete them.

A key in the file takes precedence over a variable. Without the table, the variables have no effect, because a variable
that another program needs must not change the agent (OpenTelemetry: "OTLP Exporter Configuration").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta

from bridge.config.toml import Check, check_url
from bridge.errors import ConfigurationError
from bridge.http.tls_files import tls_file_problems

_PATH = "/v1/metrics"
_PREFIX = "OTEL_EXPORTER_OTLP_"
_TEMPORALITY = "TEMPORALITY_PREFERENCE"
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_LONGEST_SECONDS = 86_400
_WANTED = 'a URL such as "http://127.0.0.1:4318", without user, query, and fragment'


def _endpoint(value: str) -> None:
    check_url(value, _WANTED)


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[telemetry]``: a push of the agent's own metrics over OTLP.

    Without this table, the agent pushes nothing.
    """

    otlp_endpoint: Annotated[str, Check(_endpoint)] | None = None
    """The URL of the OTLP receiver (HTTP with protobuf). The agent adds /v1/metrics unless the URL ends with this path.
    Default: $OTEL_EXPORTER_OTLP_METRICS_ENDPOINT without an added path, else $OTEL_EXPORTER_OTLP_ENDPOINT."""
    interval_seconds: Annotated[float, Meta(ge=1, le=_LONGEST_SECONDS)] | None = None
    """Seconds between two pushes. Default: $OTEL_METRIC_EXPORT_INTERVAL (milliseconds), else 60."""
    headers_file: Annotated[str, Meta(min_length=1)] | None = None
    """A file with headers, one `Name: value` per line, read again when it changes. Default: the headers in
    $OTEL_EXPORTER_OTLP_METRICS_HEADERS or $OTEL_EXPORTER_OTLP_HEADERS."""
    ca_file: Annotated[str, Meta(min_length=1)] | None = None
    """A PEM file of trusted authorities, instead of those of requests (certifi). Default:
    $OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE or $OTEL_EXPORTER_OTLP_CERTIFICATE."""


class PushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The complete settings of the push, from the file and the environment."""

    url: str
    interval_seconds: float
    timeout_seconds: float
    is_compressed: bool
    headers_file: str | None
    headers_env: str | None
    """The variable with the headers. Its value is a secret, so the settings do not contain it."""
    ca_file: str | None
    certificate: str | tuple[str, str] | None


def push_settings(settings: TelemetrySettings, environ: Mapping[str, str]) -> PushSettings:
    """Return *settings*, completed from *environ*.

    Raises ConfigurationError with all mistakes.
    """
    variables = _Variables(environ)
    ca_file = settings.ca_file or variables.text("CERTIFICATE")
    cert_file, key_file = variables.text("CLIENT_CERTIFICATE"), variables.text("CLIENT_KEY")
    problems = tls_file_problems(ca_file=ca_file, client_cert_file=cert_file, client_key_file=key_file)
    variables.mistakes += [f"telemetry: {key}: {problem}" for key, problem in problems]
    variables.check("PROTOCOL", {"http/protobuf"}, "The agent pushes OTLP over HTTP with protobuf.")
    variables.check(_TEMPORALITY, {"cumulative"}, "The agent sends only cumulative totals.")
    made = PushSettings(
        url=_url(settings, variables),
        interval_seconds=settings.interval_seconds or variables.seconds(_INTERVAL, 60.0),
        timeout_seconds=variables.seconds(variables.name("TIMEOUT"), 10.0),
        is_compressed=variables.check("COMPRESSION", {"none", "gzip"}, "The agent supports these values.") == "gzip",
        headers_file=settings.headers_file,
        headers_env=None if settings.headers_file or not variables.text("HEADERS") else variables.name("HEADERS"),
        ca_file=ca_file,
        certificate=(cert_file, key_file) if cert_file and key_file else cert_file,
    )
    if variables.mistakes:
        raise ConfigurationError(*variables.mistakes)
    return made


def _url(settings: TelemetrySettings, variables: _Variables) -> str:
    name = variables.name("ENDPOINT")
    url = settings.otlp_endpoint or variables.text("ENDPOINT") or ""
    try:
        check_url(url, _WANTED)
    except ValueError:
        where = f"${name} is not {_WANTED}" if url else "telemetry.otlp_endpoint is missing"
        variables.mistakes.append(f"{where}. Set telemetry.otlp_endpoint or ${_PREFIX}ENDPOINT.")
    if settings.otlp_endpoint is None and "METRICS" in name:
        return url  # the specification requires this URL unchanged
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


class _Variables:
    """The OTEL_EXPORTER_OTLP_* variables.

    A variable for metrics takes precedence over the variable for all signals.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.mistakes: list[str] = []

    def name(self, suffix: str) -> str:
        own = f"{_PREFIX}METRICS_{suffix}"
        return own if self._environ.get(own) or suffix == _TEMPORALITY else f"{_PREFIX}{suffix}"

    def text(self, suffix: str) -> str | None:
        return self._environ.get(self.name(suffix), "").strip() or None

    def check(self, suffix: str, allowed: set[str], reason: str) -> str:
        value = (self.text(suffix) or "").lower()
        if value and value not in allowed:
            wanted = " or ".join(sorted(allowed))
            self.mistakes.append(
                f"${self.name(suffix)} is {value!r}. {reason} Set the variable to {wanted}, or remove it."
            )
        return value

    def seconds(self, name: str, default: float) -> float:
        """Return the variable *name*, which contains milliseconds, in seconds."""
        text = self._environ.get(name, "").strip()
        if not text:
            return default
        milliseconds = float(text) if text.isascii() and text.isdigit() else 0.0
        if not 1 <= milliseconds <= _LONGEST_SECONDS * 1000:
            self.mistakes.append(f"${name} is {text!r}, but must be a number of milliseconds from 1 to a day.")
        return milliseconds / 1000
