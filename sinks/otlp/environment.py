"""OpenTelemetry's own environment variables, for the keys that a table of type otlp leaves out.

Whoever runs exporters has these set for the whole machine. As in the SDKs a variable for logs alone goes before the one
for all signals, and an empty one counts as unset. What cannot be used is left out with a warning: the variables are
others' too, and a mistake in one of them must not keep an agent from starting. Only an endpoint that cannot be used, or
a file that is not there, is an error, because nothing would ever be sent.

Sources: OpenTelemetry, "OTLP Exporter Configuration" and "Environment Variable Specification" (resource attributes and
headers are written as a W3C Baggage: commas, equals signs, percent-encoding).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

from sinks.http.config import check_header

logger = logging.getLogger(__name__)

_PREFIX = "OTEL_EXPORTER_OTLP_"
#: By the specification the place for a key or a token.
HEADER_VARIABLES = (f"{_PREFIX}LOGS_HEADERS", f"{_PREFIX}HEADERS")
_RESOURCE, _SERVICE = "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"
_COMPRESSIONS = ("none", "gzip")
_TOKEN = re.compile(r"[^\s,=]+")
#: Some SDKs read seconds from the variable that is in milliseconds; a send in so little time would never succeed.
_LEAST_MILLISECONDS, _MOST_MILLISECONDS = 100, 3_600_000


class OtlpEnvironment:
    """What *environ* says to an exporter of logs."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def variable(self, name: str) -> str | None:
        """Return the variable that has a value for *name* (ENDPOINT, HEADERS and so on); None: there is none."""
        names = (f"{_PREFIX}LOGS_{name}", f"{_PREFIX}{name}")
        return next((each for each in names if self._environ.get(each, "").strip()), None)

    def value(self, name: str) -> str | None:
        """Return the value for *name*."""
        found = self.variable(name)
        return None if found is None else self._environ[found].strip()

    @property
    def is_url_of_logs(self) -> bool:
        """Return whether the endpoint is that of logs alone, which is used as it is."""
        return self.variable("ENDPOINT") == f"{_PREFIX}LOGS_ENDPOINT"

    def compression(self) -> str:
        """Return how the body is compressed, none unless it is said."""
        found = self.value("COMPRESSION") or "none"
        if found in _COMPRESSIONS:
            return found
        self._unusable("COMPRESSION", f"is {found!r}, and this sink knows none and gzip; none is used")
        return "none"

    def timeout_seconds(self, default: float) -> float:
        """Return the deadline of a request, *default* unless it is said; the variable is in milliseconds."""
        found = self.value("TIMEOUT")
        if found is None:
            return default
        if found.isascii() and found.isdigit() and _LEAST_MILLISECONDS <= int(found) <= _MOST_MILLISECONDS:
            return int(found) / 1000
        self._unusable("TIMEOUT", f"is no number of milliseconds from {_LEAST_MILLISECONDS} to {_MOST_MILLISECONDS}")
        return default

    def headers(self) -> dict[str, str]:
        """Return the headers; none when one of them cannot be sent."""
        try:
            found = _pairs(self.value("HEADERS") or "")
            for name, value in found.items():
                check_header(name, value, where=str(self.variable("HEADERS")))
        except ValueError as error:
            self._unusable("HEADERS", f"cannot be used: {error}")
            return {}
        return found

    def resource_attributes(self) -> dict[str, str]:
        """Return the attributes of the resource, the service's name among them."""
        try:
            found = _pairs(self._environ.get(_RESOURCE, ""))
        except ValueError as error:
            logger.warning("%s cannot be used: %s", _RESOURCE, error)
            found = {}
        service = self._environ.get(_SERVICE, "").strip()
        return {**found, "service.name": service} if service else found

    def _unusable(self, name: str, problem: str) -> None:
        logger.warning("%s %s", self.variable(name), problem)


def _pairs(text: str) -> dict[str, str]:
    """Return ``a=1,b=2`` as a dictionary; raise ValueError, which never shows it, when it is not written so."""
    found = {}
    for number, pair in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        name, equals, value = pair.partition("=")
        if not equals or not _TOKEN.fullmatch(name.strip()):
            raise ValueError(f"entry {number} is not written as name=value.")
        found[unquote(name.strip())] = unquote(value.strip())
    return found
