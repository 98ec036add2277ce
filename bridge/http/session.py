"""DeadlineSession: a `requests.Session` with a wall-clock deadline on every call.

`bridge.http.watchdog` cuts overdue calls.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connectionpool import ConnectionPool

from bridge.errors import DeadlineExceeded
from bridge.http.failures import causes
from bridge.http.watchdog import POOL_CLASSES, Call, cut_calls_of

#: What a call may answer with unless it says otherwise.
MAX_BODY_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024

#: A connection that the peer closed while it was idle shows so at once; what breaks later broke an exchange.
_STALE_SECONDS = 5.0

#: Sent again after a keep-alive connection turns out to be closed: RFC 9110 section 9.2.2, without those that write.
_RESENT_METHODS = frozenset({"GET", "HEAD"})

_DISCONNECTS = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class ResponseUnread(requests.RequestException):
    """The peer answered, and its body is not read; ``response`` has the status and the headers, and reads as empty."""


class ResponseTooLarge(ResponseUnread):
    """The body is larger than the caller allows; the connection was closed without reading the rest."""


class ResponseEncoded(ResponseUnread):
    """The body is compressed, though none was asked for: a few bytes may become gigabytes. Nothing of it is read."""


class DeadlineSession(requests.Session):
    """A session whose every call ends by its deadline, with a body that is read whole and bounded.

    It differs from `requests.Session` on purpose: *deadline_seconds* is required, redirects are never followed,
    nothing is tried twice (but see `send`), the environment is not read (``trust_env`` is False; set it to have
    proxies from the environment), cookies are not kept and response hooks are not run. No compressed body is asked for
    or read. ``proxies``, ``verify``, ``cert`` and ``headers`` are set as ever. Threads may share it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trust_env = False
        self.headers["Accept-Encoding"] = "identity"
        adapter = _DeadlineAdapter()
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def request(  # type: ignore[override] # a call without a deadline shall not pass
        self,
        method: str,
        url: str,
        *,
        deadline_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
        params: Mapping[str, str] | None = None,
        data: bytes | str | Mapping[str, str] | None = None,
        json: Any = None,
        headers: Mapping[str, str | bytes] | None = None,
        auth: Any = None,
        proxies: Mapping[str, str] | None = None,
        verify: bool | str | None = None,
        cert: str | tuple[str, str] | None = None,
    ) -> requests.Response:
        """Build a request and `send` it; raises what `send` raises."""
        request = requests.Request(method.upper(), url, params=params, data=data, json=json, headers=headers, auth=auth)
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
        """Return the answer to *request*, whatever its status, with the body in ``content``.

        A request prepared once may be sent again and again: a third of the cost of a call is preparing it. A GET or
        HEAD that finds its kept-alive connection closed by the peer, at once and before any answer, is sent once more
        on a new connection within the same deadline; anything else that failed is the caller's to send again.

        Raises DeadlineExceeded at the deadline (also when a read or connect timed out by itself), ResponseTooLarge,
        ResponseEncoded, and otherwise the requests exception that `requests.Session.send` would.
        """
        if not 0 < deadline_seconds < math.inf:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; a call needs a positive, finite deadline.")
        call = Call(self, deadline_seconds)
        try:
            with call:
                response = self._exchange(request, call, self._settings(request, proxies, verify, cert))
                read_body(response, max_body_bytes)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as exc:
            _raise_if_cut(call, request, exc)
            if isinstance(exc, urllib3.exceptions.HTTPError):
                raise requests.ConnectionError(exc, request=request) from exc
            raise
        # A body that ends with its connection looks complete when the socket was shut down under it.
        _raise_if_cut(call, request, None)
        response.elapsed = timedelta(seconds=time.monotonic() - call.started_at)
        return response

    def close(self) -> None:
        """Close the idle connections, and break off every call in flight in another thread."""
        cut_calls_of(self)
        super().close()

    def _settings(
        self,
        request: requests.PreparedRequest,
        proxies: Mapping[str, str] | None,
        verify: bool | str | None,  # noqa: FBT001 - the shape that requests has for it
        cert: str | tuple[str, str] | None,
    ) -> dict[str, Any]:
        if self.trust_env or proxies:
            merged = self.merge_environment_settings(
                str(request.url), dict(proxies or {}), stream=True, verify=verify, cert=cert
            )
            return dict(merged)
        return {
            "stream": True,
            "proxies": self.proxies,
            "verify": self.verify if verify is None else verify,
            "cert": self.cert if cert is None else cert,
        }

    def _exchange(self, request: requests.PreparedRequest, call: Call, settings: dict[str, Any]) -> requests.Response:
        adapter = self.get_adapter(str(request.url))
        began_at = time.monotonic()
        try:
            return adapter.send(request, timeout=call.remaining_seconds(), **settings)
        except requests.ConnectionError as exc:
            is_stale = call.is_reused and call.cut_by is None and is_disconnect(exc)
            is_stale = is_stale and time.monotonic() - began_at <= _STALE_SECONDS
            if not is_stale or request.method not in _RESENT_METHODS:
                raise
        return adapter.send(request, timeout=call.remaining_seconds(), **settings)


def retry_after_seconds(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Return the wish of a Retry-After header in seconds, None when there is none or it cannot be read.

    RFC 9110 section 10.2.3: whole seconds or an HTTP date; a date that has passed is 0.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:18])
    try:
        moment = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - (now or datetime.now(timezone.utc))).total_seconds())


def read_body(response: requests.Response, max_body_bytes: int) -> None:
    """Read the body of *response*, which was asked for as a stream, into its ``content``.

    Raises ResponseEncoded before the first byte of a body that is compressed, and ResponseTooLarge.
    """
    if not _is_plain(response.headers.get("Content-Encoding", "")):
        _leave_unread(response)
        raise ResponseEncoded(
            f"The answer of {_without_secrets(response.url)} has a Content-Encoding, though none was asked for.",
            response=response,
        )
    chunks: list[bytes] = []
    size = 0
    for chunk in response.iter_content(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_body_bytes:
            _leave_unread(response)
            where = _without_secrets(response.url)
            raise ResponseTooLarge(f"The answer of {where} is larger than {max_body_bytes} bytes.", response=response)
        chunks.append(chunk)
    response._content = b"".join(chunks)  # noqa: SLF001 - where `content` looks; requests has no other way in


class BoundedSession(requests.Session):
    """A session for a library that brings its own time-outs: as little is read as by a DeadlineSession, and no more.

    Redirects are what the library says they are; nothing is tried twice here.
    """

    def __init__(self, *, trust_env: bool) -> None:
        super().__init__()
        self.trust_env = trust_env
        self.headers["Accept-Encoding"] = "identity"

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Return the answer with its body read, bounded and never unpacked; raise what `read_body` does besides."""
        response = super().send(request, **{**options, "stream": True})
        read_body(response, MAX_BODY_BYTES)
        return response


class _DeadlineAdapter(requests.adapters.HTTPAdapter):
    """requests' adapter over watched connections; `send` is left alone, so that ``responses`` can stand in for it.

    The adapter keeps the pool of the last request, because the lookup takes a tenth of a call. Callers that send the
    same request again, such as the poll and each sink, save this time.
    """

    _last: tuple[requests.PreparedRequest, Any, Any, ConnectionPool] | None = None

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = POOL_CLASSES

    def get_connection_with_tls_context(
        self,
        request: requests.PreparedRequest,
        verify: Any,
        proxies: Mapping[str, str] | None = None,
        cert: Any = None,
    ) -> ConnectionPool:
        last = self._last
        if last is not None and last[0] is request and last[1:3] == (verify, cert) and not proxies:
            return last[3]
        found = super().get_connection_with_tls_context(request, verify, proxies, cert)
        self._last = None if proxies else (request, verify, cert, found)
        return found

    def close(self) -> None:
        self._last = None  # a pool closes its connections when nobody has it any more
        super().close()

    def build_response(self, req: requests.PreparedRequest, resp: urllib3.BaseHTTPResponse) -> requests.Response:
        """Return what requests makes of *resp*, without a look for cookies: none are kept."""
        response = requests.Response()
        response.status_code, response.reason = resp.status, resp.reason or ""
        response.headers = requests.structures.CaseInsensitiveDict(resp.headers)
        response.encoding = requests.utils.get_encoding_from_headers(response.headers)
        response.raw, response.url, response.request = resp, str(req.url), req
        response.connection = self
        return response

    def request_url(self, request: requests.PreparedRequest, proxies: Mapping[str, str] | None) -> str:
        return str(super().request_url(request, proxies)) if proxies else request.path_url

    def proxy_manager_for(self, proxy: str, **proxy_kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **proxy_kwargs)
        manager.pool_classes_by_scheme = POOL_CLASSES
        return manager


def _is_plain(content_encoding: str) -> bool:
    return all(coding.strip().lower() in {"", "identity"} for coding in content_encoding.split(","))


def _leave_unread(response: requests.Response) -> None:
    response.close()
    response._content = b""  # noqa: SLF001 - likewise


def is_disconnect(exc: BaseException) -> bool:
    """Return whether the peer hung up: reset, or closed without a byte of answer (RemoteDisconnected is a reset)."""
    return any(isinstance(cause, _DISCONNECTS) for cause in causes(exc))


def _raise_if_cut(call: Call, request: requests.PreparedRequest, exc: Exception | None) -> None:
    """Raise why *call* was cut, if it was; a read or connect that timed out by itself counts as cut."""
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
    """Return scheme, host and port of *url*: secrets travel in all the rest, the path of a webhook included."""
    parsed = urllib3.util.parse_url(url or "")
    return urllib3.util.Url(scheme=parsed.scheme, host=parsed.host, port=parsed.port).url
