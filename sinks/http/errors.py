"""What a request without an answer means: whether it was sent, and whether a setting or TLS is to blame.

requests and urllib3 wrap the reason in texts that hold the whole URL, several layers deep; what counts is which
exceptions are among the causes.
"""

from __future__ import annotations

import ssl

import requests

from bridge.sink import causes, root_cause

#: The peer hung up under TLS: a broken connection, no quarrel about certificates.
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)
#: urllib3's names for what happens before a request can be sent.
_UNCONNECTED = frozenset({"NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError"})


def never_sent(error: BaseException) -> bool:
    """Return whether no byte of the request can have reached the peer: no name, no connection, no trust."""
    names = {type(each).__name__ for each in causes(error)}
    return bool(names & _UNCONNECTED) or isinstance(root_cause(error), ssl.SSLCertVerificationError)


def is_about_settings(error: BaseException) -> bool:
    """Return whether the request could not even be made: a file that is gone, a host name that is none."""
    is_unmade = isinstance(error, ValueError) or not isinstance(error, requests.RequestException)
    return is_unmade or any(type(each).__name__ == "LocationParseError" for each in causes(error))


def is_about_tls(error: BaseException) -> bool:
    """Return whether the two could not agree on a certificate or a version, which a person must mend."""
    return isinstance(error, requests.exceptions.SSLError) and not isinstance(root_cause(error), _BROKEN_OFF)
