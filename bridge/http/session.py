"""Provides `DeadlineSession`, a `requests.Session` with a deadline for every request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import requests
import requests.adapters
import urllib3

from bridge.errors import DeadlineExceeded
from bridge.http.pools import POOL_CLASSES
from bridge.http.watchdog import Call, watchdog

MAX_BODY_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024


class ResponseUnread(requests.RequestException):
    """The body of ``response`` was not read, because it is too large or compressed."""


class DeadlineSession(requests.Session):
    """A `requests.Session` with a deadline for each request and a response size limit.

    The session does not follow redirects, retry requests, store cookies, or run response hooks, and it rejects
    compressed bodies. It ignores environment variables (``trust_env`` is False). Threads can share a session.
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
        """Send a request, and return the response regardless of its status.

        *parts* are additional arguments for `requests.Request`, such as headers. Raises ResponseUnread if the body is
        compressed or too large. Also raises DeadlineExceeded and the exceptions of `requests.Session.send`.
        """
        if not 0 < deadline_seconds < math.inf:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; a call needs a positive, finite deadline.")
        request = self.prepare_request(requests.Request(method.upper(), url, **parts))
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
        # If the watchdog shuts down the socket, a body without a length looks complete.
        _raise_if_cut(call, request, None)
        return response

    def send(self, *_arguments: Any, **_parts: Any) -> NoReturn:
        """Raise TypeError, because the method of `requests.Session` has no deadline."""
        raise TypeError("DeadlineSession.send has no deadline. Use DeadlineSession.request.")

    def close(self) -> None:
        """Close the idle connections, and cancel the requests of other threads."""
        watchdog.cut_session(self)
        super().close()


def _read_body(response: requests.Response, max_body_bytes: int) -> None:
    codings = response.headers.get("Content-Encoding", "").split(",")
    if any(coding.strip().lower() not in {"", "identity"} for coding in codings):
        raise _unread(response, "has a Content-Encoding, although the request allows none")
    chunks: list[bytes] = []
    size = 0
    for chunk in response.iter_content(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_body_bytes:
            raise _unread(response, f"is larger than {max_body_bytes} bytes")
        chunks.append(chunk)
    response._content = b"".join(chunks)  # noqa: SLF001 - requests has no other way to set `content`


def _unread(response: requests.Response, reason: str) -> ResponseUnread:
    response.close()
    response._content = b""  # noqa: SLF001 - likewise
    return ResponseUnread(f"The response of {_without_secrets(response.url)} {reason}.", response=response)


class _DeadlineAdapter(requests.adapters.HTTPAdapter):
    """A requests adapter whose connections the watchdog can shut down."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = POOL_CLASSES

    def proxy_manager_for(self, proxy: str, **proxy_kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **proxy_kwargs)
        manager.pool_classes_by_scheme = POOL_CLASSES
        return manager


def _without_secrets(url: str | None) -> str:
    """Return the scheme, host, and port of *url*. Every other part can contain a secret."""
    parsed = urllib3.util.parse_url(url or "")
    return urllib3.util.Url(scheme=parsed.scheme, host=parsed.host, port=parsed.port).url


def _raise_if_cut(call: Call, request: requests.PreparedRequest, error: Exception | None) -> None:
    try:
        call.raise_if_cut(error, is_timeout=isinstance(error, requests.Timeout))
    except DeadlineExceeded as cut:
        raise DeadlineExceeded(f"{request.method} {_without_secrets(request.url)}: {cut}") from error
    except ConnectionAbortedError as closed:
        raise requests.ConnectionError(f"{request.method} {_without_secrets(request.url)}: {closed}") from error
