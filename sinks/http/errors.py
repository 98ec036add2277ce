"""Classifies requests that received no response: whether the configuration or TLS caused the failure.

`sinks.http.endpoint` classifies responses by their status, and reads Retry-After. `bridge.delivery.retry_schedule`
applies a Retry-After to the whole sink.

requests and urllib3 wrap the cause in several layers of texts with the whole URL, so these functions compare the types
of the causes.
"""

from __future__ import annotations

import ssl

import requests

from bridge.sink import causes, root_cause

#: The peer closed the connection under TLS, which is not a problem of certificates.
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)


def is_about_settings(error: BaseException) -> bool:
    """Return whether the request could not be made, for example because of a missing file or an invalid host name."""
    is_unmade = isinstance(error, ValueError) or not isinstance(error, requests.RequestException)
    return is_unmade or any(type(each).__name__ == "LocationParseError" for each in causes(error))


def is_about_tls(error: BaseException) -> bool:
    """Return whether TLS failed because of a certificate or a version."""
    return isinstance(error, requests.exceptions.SSLError) and not isinstance(root_cause(error), _BROKEN_OFF)
