"""DeadlineSession: a `requests.Session` with a wall-clock deadline for every call.

`bridge.http.watchdog` cuts overdue calls.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import requests
import requests.adapters
import urllib3

from bridge.errors import DeadlineExceeded
from bridge.http.failures import causes
from bridge.http.pools import POOL_CLASSES
from bridge.http.watchdog import Call, cut_calls_of

MAX_BODY_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024

_DISCONNECTS = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class ResponseUnread(requests.RequestException):
    """The body was not read. ``response`` has the status, the headers, and an empty body."""


class ResponseTooLarge(ResponseUnread):
    """The body is larger than the caller allows. The connection is closed."""


class ResponseEncoded(ResponseUnread):
    """The body is compressed although the request did not allow it."""


class DeadlineSession(requests.Session):
    """A session whose calls end by their deadline and read the whole body, up to a limit.

    It differs from `requests.Session` on purpose: *deadline_seconds* is required, redirects are never followed, nothing
    is retried, the environment is not read (``trust_env`` is False), cookies are not kept, response hooks do not run,
    and compressed bodies are refused. Threads can share a session.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.headers["Accept-Encoding"] = "identity"
        adapter = _DeadlineAdapter()
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def request(  # type: ignore[override] # a deadline is required
        self,
        method: str,
        url: str,
        *,
        deadline_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        proxies: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        cert: str | tuple[str, str] | None = None,
        **parts: Any,
    ) -> requests.Response:
        """Build a request of *parts* (the arguments of `requests.Request`) and `send` it."""
        request = requests.Request(method.upper(), url, **parts)
        return self.send(
            self.prepare_request(request),
            deadline_seconds=deadline_seconds,
            max_body_bytes=max_body_bytes,
            proxies=proxies,
            verify=verify,
            cert=cert,
        )

    def send(  # type: ignore[override] # likewise
        self,
        request: requests.PreparedRequest,
        *,
        deadline_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        proxies: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        cert: str | tuple[str, str] | None = None,
    ) -> requests.Response:
        """Return the response to *request* with any status, and with the body in ``content``.

        Raises DeadlineExceeded at the deadline, ResponseTooLarge, ResponseEncoded, and the exceptions of
        `requests.Session.send`.
        """
        if not 0 < deadline_seconds < math.inf:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; a call needs a positive, finite deadline.")
        call = Call(self, deadline_seconds)
        try:
            with call:
                response = self.get_adapter(str(request.url)).send(
                    request,
                    stream=True,
                    timeout=call.remaining_seconds(),
                    verify=cast("bool | str", self.verify if verify is None else verify),
                    cert=cert or self.cert,
                    proxies={**self.proxies, **(proxies or {})},
                )
                _read_body(response, max_body_bytes)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as exc:
            _raise_if_cut(call, request, exc)
            if isinstance(exc, urllib3.exceptions.HTTPError):
                raise requests.ConnectionError(exc, request=request) from exc
            raise
        # A body that ends with its connection looks complete after the watchdog has shut down the socket.
        _raise_if_cut(call, request, None)
        response.elapsed = timedelta(seconds=time.monotonic() - call.started_at)
        return response

    def close(self) -> None:
        """Close the idle connections, and end the calls of other threads."""
        cut_calls_of(self)
        super().close()


def _read_body(response: requests.Response, max_body_bytes: int) -> None:
    """Read the streamed body of *response* into its ``content``."""
    codings = response.headers.get("Content-Encoding", "").split(",")
    if any(coding.strip().lower() not in {"", "identity"} for coding in codings):
        _discard_body(response)
        raise ResponseEncoded(
            f"The answer of {_without_secrets(response.url)} has a Content-Encoding, although the request allows none.",
            response=response,
        )
    chunks: list[bytes] = []
    size = 0
    for chunk in response.iter_content(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_body_bytes:
            _discard_body(response)
            where = _without_secrets(response.url)
            raise ResponseTooLarge(f"The answer of {where} is larger than {max_body_bytes} bytes.", response=response)
        chunks.append(chunk)
    response._content = b"".join(chunks)  # noqa: SLF001 - requests has no other way to set `content`


def _discard_body(response: requests.Response) -> None:
    response.close()
    response._content = b""  # noqa: SLF001 - likewise


class _DeadlineAdapter(requests.adapters.HTTPAdapter):
    """The adapter of requests with watched connections."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = POOL_CLASSES

    def proxy_manager_for(self, proxy: str, **proxy_kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **proxy_kwargs)
        manager.pool_classes_by_scheme = POOL_CLASSES
        return manager


def is_disconnect(exc: BaseException) -> bool:
    """Return whether the peer closed or reset the connection (RemoteDisconnected is a reset)."""
    return any(isinstance(cause, _DISCONNECTS) for cause in causes(exc))


def _raise_if_cut(call: Call, request: requests.PreparedRequest, exc: Exception | None) -> None:
    """Raise the error of *call* if the call was cut. A timeout of one read or connect counts as a cut."""
    if call.cut_by == "close":
        where = _without_secrets(request.url)
        raise requests.ConnectionError(f"{request.method} {where}: its session was closed.", request=request) from exc
    is_timeout = isinstance(exc, requests.Timeout) or (exc is not None and time.monotonic() >= call.expires_at)
    if call.cut_by == "deadline" or is_timeout:
        raise DeadlineExceeded(
            f"{request.method} {_without_secrets(request.url)}: no complete answer within "
            f"{call.deadline_seconds:g} s, so the call was cut."
        ) from exc


def _without_secrets(url: str | None) -> str:
    """Return the scheme, host, and port of *url*. Every other part can contain a secret."""
    parsed = urllib3.util.parse_url(url or "")
    return urllib3.util.Url(scheme=parsed.scheme, host=parsed.host, port=parsed.port).url
