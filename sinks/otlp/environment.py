"""OpenTelemetry's environment variables for the endpoint, the headers, and the resource.

Machines with other exporters often set these variables. A variable for logs takes precedence over the variable for all
signals, and an empty variable counts as unset. An unusable endpoint is an error, because nothing would ever be sent.
Other unusable values are ignored with a warning, because other programs use the variables too.

Sources: OpenTelemetry, "OTLP Exporter Configuration" and "Environment Variable Specification" (resource attributes and
headers use the syntax of W3C Baggage: commas, equals signs, percent-encoding).
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
#: By the specification, these contain keys or tokens.
HEADER_VARIABLES = (f"{_PREFIX}LOGS_HEADERS", f"{_PREFIX}HEADERS")
_RESOURCE, _SERVICE = "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"
_TOKEN = re.compile(r"[^\s,=]+")


class OtlpEnvironment:
    """The settings for an exporter of logs in *environ*."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ

    def variable(self, name: str) -> str | None:
        """Return the variable that sets *name* (ENDPOINT, HEADERS, or PROTOCOL), None without one."""
        names = (f"{_PREFIX}LOGS_{name}", f"{_PREFIX}{name}")
        return next((each for each in names if self._environ.get(each, "").strip()), None)

    def value(self, name: str) -> str | None:
        """Return the value of *name*."""
        found = self.variable(name)
        return None if found is None else self._environ[found].strip()

    @property
    def is_url_of_logs(self) -> bool:
        """Return whether the endpoint is for logs only, and is therefore used unchanged."""
        return self.variable("ENDPOINT") == f"{_PREFIX}LOGS_ENDPOINT"

    def headers(self) -> dict[str, str]:
        """Return the headers; none if one of them cannot be sent."""
        variable = self.variable("HEADERS")
        found = {} if variable is None else _pairs(self._environ[variable], variable)
        try:
            for name, value in found.items():
                check_header(name, value, where=str(variable))
        except ValueError as error:
            logger.warning("%s is ignored: %s", variable, error)
            return {}
        return found

    def resource_attributes(self) -> dict[str, str]:
        """Return the attributes of the resource, with the service name."""
        found = _pairs(self._environ.get(_RESOURCE, ""), _RESOURCE)
        service = self._environ.get(_SERVICE, "").strip()
        return {**found, "service.name": service} if service else found


def _pairs(text: str, variable: str) -> dict[str, str]:
    """Return ``a=1,b=2`` as a dictionary; empty, with a warning that does not show *text*, for any other syntax."""
    found = {}
    for number, pair in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        name, equals, value = pair.partition("=")
        if not equals or not _TOKEN.fullmatch(name.strip()):
            logger.warning("%s is ignored: entry %d is not name=value.", variable, number)
            return {}
        found[unquote(name.strip())] = unquote(value.strip())
    return found
