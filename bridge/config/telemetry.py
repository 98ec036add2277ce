"""Reads the settings of the ``[telemetry]`` table and of the OTEL_* variables.

If the table lacks a setting, the agent uses the matching variable (see the OpenTelemetry page "OTLP Exporter
Configuration"). If there is no table, it ignores all of these variables. They might be meant for another program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from bridge.config.toml import Check, check_url
from bridge.errors import ConfigurationError
from bridge.http.tls_files import tls_file_problems

_PATH = "/v1/metrics"
_ALL, _OWN = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_METRICS_"
_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_ONLY_OWN = frozenset({"TEMPORALITY_PREFERENCE"})
#: The supported values. The agent supports no other transport, and sends only cumulative totals.
_ALLOWED = {
    "PROTOCOL": ("http/protobuf",),
    "TEMPORALITY_PREFERENCE": ("cumulative",),
    "COMPRESSION": ("gzip", "none"),
}
_SUFFIXES = (*_ALLOWED, "ENDPOINT", "HEADERS", "TIMEOUT", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY", _INTERVAL)
_LONGEST_SECONDS = 86_400
_WANTED = 'a URL such as "http://127.0.0.1:4318", without user, query, and fragment'


def _endpoint(value: str) -> None:
    check_url(value, _WANTED)


class TelemetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[telemetry]``: sends metrics over OTLP. Without this table, none are sent."""

    otlp_endpoint: Annotated[str, Check(_endpoint)] | None = None
    """The URL of the OTLP receiver (HTTP with protobuf). The agent adds /v1/metrics unless the URL ends with this path.
    Default: $OTEL_EXPORTER_OTLP_METRICS_ENDPOINT without an added path, else $OTEL_EXPORTER_OTLP_ENDPOINT."""
    interval_seconds: Annotated[float, Meta(ge=1, le=_LONGEST_SECONDS)] | None = None
    """Seconds between two pushes. Default: $OTEL_METRIC_EXPORT_INTERVAL (milliseconds), else 60."""
    headers_file: Annotated[str, Meta(min_length=1)] | None = None
    """A file with headers, one `Name: value` per line, reread when it changes. Default: the headers in
    $OTEL_EXPORTER_OTLP_METRICS_HEADERS or $OTEL_EXPORTER_OTLP_HEADERS."""
    ca_file: Annotated[str, Meta(min_length=1)] | None = None
    """A PEM file with the trusted certificate authorities. Default: $OTEL_EXPORTER_OTLP_METRICS_CERTIFICATE, else
    $OTEL_EXPORTER_OTLP_CERTIFICATE, else those of the Python package certifi."""


class PushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for sending metrics. They come from the file and environment variables."""

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
    """Return the settings with *environ*. Raises ConfigurationError with all mistakes."""
    names = {each: _name(each, environ) for each in _SUFFIXES}
    values = {each: environ.get(name, "").strip() for each, name in names.items()}
    mistakes = [
        f"${names[each]} is {values[each]!r}. The agent supports only {' and '.join(allowed)}. Change or remove it."
        for each, allowed in _ALLOWED.items()
        if values[each] and values[each].lower() not in allowed
    ]
    for each in ("TIMEOUT", _INTERVAL):
        if values[each] and not (values[each].isascii() and values[each].isdigit() and int(values[each])):
            mistakes.append(f"${names[each]} is {values[each]!r}, but must be a whole number of milliseconds above 0.")
            values[each] = ""
    url, is_final = settings.otlp_endpoint or values["ENDPOINT"], False
    if settings.otlp_endpoint is None:
        is_final = names["ENDPOINT"] == f"{_OWN}ENDPOINT"  # the specification requires this URL unchanged
        try:
            _endpoint(url)
        except ValueError:
            mistakes.append(f"Set telemetry.otlp_endpoint or ${names['ENDPOINT']} to {_WANTED}.")
            url = ""
    ca_file = settings.ca_file or values["CERTIFICATE"] or None
    cert_file, key_file = values["CLIENT_CERTIFICATE"] or None, values["CLIENT_KEY"] or None
    problems = tls_file_problems(ca_file=ca_file, client_cert_file=cert_file, client_key_file=key_file)
    mistakes += [f"telemetry: {key}: {problem}" for key, problem in problems]
    if mistakes:
        raise ConfigurationError(*mistakes)
    return PushSettings(
        url=url if is_final or url.rstrip("/").endswith(_PATH) else url.rstrip("/") + _PATH,
        interval_seconds=settings.interval_seconds or int(values[_INTERVAL] or 60_000) / 1000,
        timeout_seconds=int(values["TIMEOUT"] or 10_000) / 1000,
        is_compressed=values["COMPRESSION"].lower() == "gzip",
        headers_file=settings.headers_file,
        headers_env=names["HEADERS"] if values["HEADERS"] and settings.headers_file is None else None,
        ca_file=ca_file,
        certificate=(cert_file, key_file) if cert_file and key_file else cert_file,
    )


def _name(suffix: str, environ: Mapping[str, str]) -> str:
    """Return the name of a variable. A variable for metrics takes precedence."""
    own = f"{_OWN}{suffix}"
    return suffix if suffix == _INTERVAL else own if environ.get(own) or suffix in _ONLY_OWN else f"{_ALL}{suffix}"
