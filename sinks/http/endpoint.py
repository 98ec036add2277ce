"""Sends HTTP requests to one URL and classifies the responses.

The status of a response determines what the agent does with the record:

- 2xx: The record is delivered.
- 3xx, 401, 403, 404, 407, 408, 421, 423, 425, 429, and 5xx: The agent retries the record. If the agent parked records
  because of an expired token, someone would have to retry them on thousands of VMs.
- 410: The sink pauses until an operator acts.
- Other 4xx: The agent parks the record, unless it finds that the endpoint rejects all records (`may_be_endpoint`).

The `retry_statuses` and `park_statuses` settings override these rules. A `Retry-After` header delays all records of the
sink, except records of Preempt and Terminate events (`bridge.delivery.retry_schedule`).

Error messages contain only the scheme, the host, and the port of the URL, because the path of a webhook is often a
secret.

Connections that have been idle for one minute are not reused, because NAT gateways and load balancers silently drop
idle connections. A request on a dropped connection would fail only at its deadline.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from bridge.sink import (
    AccessToken,
    CredentialFailed,
    DeadlineConnection,
    DeadlineExceeded,
    DeliveryFailed,
    DeliveryRejected,
    HttpResponse,
    RenewedToken,
    RetryReason,
    Secret,
    excerpt,
    masked,
    retry_after_seconds,
    root_cause,
    token_of,
)
from sinks.http.config import HttpConfig, check_header, check_token_stays_private
from sinks.http.target import Proxy, Target, tls_context
from sinks.http.urls import origin, url_secrets

SUCCESS, REDIRECTION = range(200, 300), range(300, 400)
CLIENT_ERROR, SERVER_ERROR = range(400, 500), range(500, 600)
_GONE, _NOT_IMPLEMENTED = 410, 501
#: Client errors about the endpoint (RFC 9110; RFC 4918 and RFC 8470 for 423 and 425).
_RETRIED = frozenset({401, 403, 404, 407, 408, 421, 423, 425, 429})
_NEEDS_A_PERSON = {
    401: "Check the token or the headers.",
    403: "Check the token, the headers, and their permissions.",
    404: "Check the URL.",
    407: "Check the user name and the password in the proxy's URL.",
}
_TOKEN_ADVICE = {
    "entra_scope": "Check entra_scope and the permissions of the VM's identity.",
    "credential": "The portal rejected a token that it issued. Check vm.vm_id and the log of the portal.",
}
#: With these statuses, a new token can help, because the token may have expired early or its role may have changed.
_TOKEN_REFUSED = frozenset({401, 403})
_CHECK_FAILS = frozenset({401, 403, 404, 407, 410})
_MOST_ANSWER_BYTES = 64 * 1024
_MOST_IDLE_SECONDS = 60.0
#: If the deadline passes during the wait for a token, the call gets this much time to report the timeout.
_LEAST_SECONDS = 0.001
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError)
_COMMON_HEADERS = {"User-Agent": "scheduled-events-bridge", "Accept": "*/*"}
_SECRET_HEADER = re.compile(r"(?i)auth|token|key|secret|cookie|passw|signature")


def entra_token(config: HttpConfig) -> RenewedToken | None:
    """Return the token for `entra_scope`, or None without it. The sink closes the token."""
    return None if config.entra_scope is None else token_of(config.entra_scope, key="entra_scope")


class Endpoint:
    """Sends requests to one URL. Call all methods except `close` from the same thread.

    - *secrets* returns further values that messages must not contain.
    - *token* provides the bearer token: the result of `entra_token`, or the token of a portal.
    - *advice* is added to each message about a failed connection.
    """

    def __init__(
        self,
        url: str,
        config: HttpConfig,
        *,
        secrets: Callable[[], Iterable[str | Secret]] = tuple,
        token: RenewedToken | None = None,
        advice: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.shown = origin(url)
        self._config = config
        self._secrets = secrets
        self._advice_if_unreachable = advice
        self._bearer = Secret(key="bearer_token", file=config.bearer_token_file, env=config.bearer_token_env)
        self._headers_file = Secret(key="headers", file=config.headers_file)
        self._proxy = Proxy(config)
        self._shown_proxy = ""
        self._token = token
        self._last_token: AccessToken | None = None
        self._is_token_replaced = False
        self._target = Target(url)
        self._connection: DeadlineConnection | None = None
        self._connected_through: str | None = None
        self._monotonic = monotonic
        self._used_at = monotonic()
        self._is_closed = False

    def post(self, body: bytes, headers: Mapping[str, str], *, deadline_seconds: float | None = None) -> HttpResponse:
        """Send *body*. Raise DeliveryFailed or DeliveryRejected unless the status is 2xx."""
        return self._accepted(self.request("POST", body, headers, deadline_seconds=deadline_seconds))

    def request(
        self, method: str, body: bytes | None, headers: Mapping[str, str], *, deadline_seconds: float | None = None
    ) -> HttpResponse:
        """Return the response with any status. Raise DeliveryFailed if none arrives in time.

        If the response body is compressed or larger than 64 KiB, the returned body is empty.
        """
        limit = self._config.timeout_seconds if deadline_seconds is None else deadline_seconds
        ends_at = self._monotonic() + limit
        sent = _merged(
            _COMMON_HEADERS,
            self._target.headers,
            self._config.headers,
            self._secret_headers(),
            self._token_header(limit),
            headers,
        )
        try:
            connection, target = self._connected()
            if self._is_closed:
                raise DeliveryFailed(f"{self.shown}: the sink was closed.")
            response = connection.request(
                method,
                target,
                body=body or None,
                headers=sent,
                deadline_seconds=max(_LEAST_SECONDS, ends_at - self._monotonic()),
                max_body_bytes=_MOST_ANSWER_BYTES,
            )
        except (DeadlineExceeded, OSError, http.client.HTTPException, ValueError) as error:
            failure = self._unanswered(error, limit)
        else:
            self._is_token_replaced = False
            if self._token is not None and self._last_token is not None and response.status_code in _TOKEN_REFUSED:
                self._is_token_replaced = self._token.refuse(self._last_token)
            return response
        finally:
            self._used_at = self._monotonic()
        # Raise the error outside the handler, because the traceback of its context could contain a secret.
        raise failure

    def _connected(self) -> tuple[DeadlineConnection, str]:
        """Return the connection and the request target, which is the complete URL for a proxy."""
        proxy = self._proxy.url()
        self._shown_proxy = "" if proxy is None else origin(proxy)
        connection = self._connection
        is_stale = self._monotonic() - self._used_at > _MOST_IDLE_SECONDS or proxy != self._connected_through
        if connection is not None and is_stale:
            connection.close()
        if connection is None or proxy != self._connected_through:
            connection = self._connection = self._target.connection(proxy, tls=lambda: tls_context(self._config))
            self._connected_through = proxy
        is_forwarded = proxy is not None and not self._target.is_https
        return connection, self._target.absolute if is_forwarded else self._target.path

    def check(self, method: str = "OPTIONS", *, failing: frozenset[int] = _CHECK_FAILS) -> HttpResponse:
        """Send a request without a body and return the response.

        Raise DeliveryFailed if no response arrives, or if the status is a redirect (3xx), a server error (5xx except
        501), or one of *failing*. Any other status, such as 400 or 405, shows that the server exists.
        """
        response = self.request(method, None, {})
        status = response.status_code
        if status in failing or not (status in SUCCESS or status in CLIENT_ERROR or status == _NOT_IMPLEMENTED):
            hint = " To test a POST request, use `send-test`." if method == "OPTIONS" else ""
            raise DeliveryFailed(self._description(response, to=method) + hint, needs_attention=True)
        return response

    def close(self) -> None:
        """Close the connections, cancel a request in another thread, and reject further requests."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def mask(self, text: str) -> str:
        """Return *text* without the secrets of this endpoint."""
        return masked(text, self._known_secrets())

    def _accepted(self, response: HttpResponse) -> HttpResponse:
        status, config = response.status_code, self._config
        if status in config.park_statuses:
            raise DeliveryRejected(self._description(response))
        if status not in config.retry_statuses:
            if status in SUCCESS:
                return response
            if status == _GONE:
                raise DeliveryFailed(self._description(response), gone=True, reason=f"status_{status}")
            if status in CLIENT_ERROR and status not in _RETRIED:
                raise DeliveryRejected(self._description(response), may_be_endpoint=True, reason=f"status_{status}")
        raise DeliveryFailed(
            self._description(response),
            retry_after_seconds(response.headers),
            needs_attention=(status in REDIRECTION or status in _NEEDS_A_PERSON) and not self._is_token_replaced,
            reason=f"status_{status}",
        )

    def _description(self, response: HttpResponse, *, to: str = "") -> str:
        """Return *response* as text. Mask secrets first, because an excerpt can split a secret."""
        status = response.status_code
        reason = f"to {to}" if to else excerpt(self.mask(response.reason or "").encode())
        head = f"{self.shown} responded with {status} {reason}".rstrip()
        shown = excerpt(self.mask(response.content.decode("utf-8", "replace")).encode()).strip()
        return f"{head}{f': {shown}' if shown else '.'} {self._advice(response)}".rstrip()

    def _advice(self, response: HttpResponse) -> str:
        status = response.status_code
        if status in REDIRECTION:
            target = response.headers.get("Location", "")
            there = origin(target)
            shown = there if there == origin(self.url) else self.mask(there)
            where = f" The redirect points to {shown}." if "://" in target else ""
            return f"The agent does not follow redirects.{where} Correct the URL in the configuration."
        if self._token is not None and status in _TOKEN_REFUSED:
            return _TOKEN_ADVICE[self._config.token_key or ""]
        return _NEEDS_A_PERSON.get(status, "")

    def _unanswered(self, error: BaseException, limit: float) -> DeliveryFailed:
        through = f" through the proxy {self._shown_proxy}" if self._shown_proxy else ""
        if isinstance(error, DeadlineExceeded):
            message = f"{self.shown} did not respond{through} within {limit:g} s."
            return DeliveryFailed(message, reason=RetryReason.TIMEOUT)
        cause = error if isinstance(error, ValueError) else root_cause(error)
        text = excerpt(self.mask(str(cause) or type(cause).__name__).encode())
        advice, reason, needs_attention = self._advice_if_unreachable, RetryReason.CONNECTION, False
        if "Tunnel connection failed: 407" in text:
            advice, reason, needs_attention = _NEEDS_A_PERSON[407], RetryReason.PROXY, True
        elif _is_about_tls(error):
            text, reason, needs_attention = f"TLS failed: {text}", RetryReason.TLS, True
        elif isinstance(error, ValueError):
            reason, needs_attention = RetryReason.SETTINGS, True
        message = f"{self.shown} cannot be reached{through}: {text}{f'. {advice}' if advice else ''}"
        return DeliveryFailed(message, needs_attention=needs_attention, reason=reason)

    def _secret_headers(self) -> dict[str, str]:
        headers = {}
        for number, line in enumerate(self._headers_file.values(), start=1):
            name, colon, value = line.partition(":")
            where = f"headers_file, line {number}"
            if not colon:
                raise DeliveryFailed(f"{where} has no colon. The form is `Name: value`.", needs_attention=True)
            headers[name.strip()] = value.strip()
            _check_sendable(name.strip(), value.strip(), where=where)
        token = self._bearer.value()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
            _check_sendable("Authorization", headers["Authorization"], where="the bearer token")
        return headers

    def _token_header(self, wait_seconds: float) -> dict[str, str]:
        """Return the Authorization header. The wait for the token counts toward the timeout."""
        if self._token is None:
            return {}
        try:
            check_token_stays_private(self._config, self.url)
            self._last_token = self._token.current(wait_seconds=wait_seconds)
        except ValueError as error:
            raise DeliveryFailed(str(error), needs_attention=True, reason=RetryReason.SETTINGS) from None
        except CredentialFailed as error:
            raise DeliveryFailed(
                f"{self.shown}: {error}", error.retry_after_seconds, needs_attention=error.needs_attention
            ) from error
        return {"Authorization": f"Bearer {self._last_token.token}"}

    def _known_secrets(self) -> Iterator[str]:
        yield from url_secrets(self.url)
        for url in _values(self._proxy.secret):
            yield from url_secrets(url)
        if self._last_token is not None:
            yield self._last_token.token
        for secret in (*self._secrets(), self._bearer):
            yield from (secret,) if isinstance(secret, str) else _values(secret)
        for name, value in self._config.headers.items():
            if _SECRET_HEADER.search(name):
                yield from (value, value.partition(" ")[2].strip())
        for line in _values(self._headers_file):
            value = line.partition(":")[2].strip()
            yield from (line, value, value.partition(" ")[2].strip())


def _merged(*groups: Mapping[str, str]) -> dict[str, str]:
    """Return all headers. If two names differ only in case, the last header counts."""
    found = {name.lower(): (name, value) for group in groups for name, value in group.items()}
    return dict(found.values())


def _is_about_tls(error: BaseException) -> bool:
    """Return whether TLS failed because of a certificate or a protocol version."""
    return isinstance(error, ssl.SSLError) and not isinstance(root_cause(error), _BROKEN_OFF)


def _check_sendable(name: str, value: str, *, where: str) -> None:
    try:
        check_header(name, value, where=where)
    except ValueError as error:
        raise DeliveryFailed(str(error), needs_attention=True) from None


def _values(secret: Secret) -> tuple[str, ...]:
    try:
        return secret.values()
    except DeliveryFailed:  # the next attempt reports the error
        return ()
