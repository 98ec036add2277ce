"""One URL that records are sent to over HTTP, and what each answer means for the record.

An answer about the endpoint (moved, unauthorized, throttled, broken) is tried again, because a token that expired on
Saturday must not park five thousand VMs' records. An answer about the record (malformed, too large) parks it, because
it would be refused for ever; but a wrong endpoint may answer so too, which the host finds out (`may_be_endpoint`). A
410 holds the sink. `retry_statuses` and `park_statuses` override the table.

Only the status line of a 2xx counts: a peer that answers with a megabyte of text has accepted the record all the same.

Messages show scheme and host only: the path of a webhook is often a secret, and a peer may echo what it was sent. The
exceptions of requests and urllib3 hold the whole URL, so what is raised here names the reason and has no cause.

A connection that was idle for a minute is not used again. Events are rare, and a NAT or a load balancer drops an idle
connection silently (Azure's outbound SNAT after four minutes); the next record, perhaps a Preempt, would wait for its
whole deadline.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import requests

from bridge.sink import (
    AccessToken,
    CredentialFailed,
    DeadlineExceeded,
    DeadlineSession,
    DeliveryFailed,
    DeliveryRejected,
    RenewedToken,
    ResponseUnread,
    RetryReason,
    Secret,
    excerpt,
    masked,
    retry_after_seconds,
    root_cause,
    token_of,
)
from sinks.http.config import HttpConfig, check_header, check_token_stays_private
from sinks.http.errors import is_about_settings, is_about_tls
from sinks.http.urls import http_url, origin, public_path, url_secrets

SUCCESS, REDIRECTION = range(200, 300), range(300, 400)
CLIENT_ERROR, SERVER_ERROR = range(400, 500), range(500, 600)
_GONE = 410
_NOT_IMPLEMENTED = 501
#: About the endpoint, not the record (RFC 9110; 421, 423, 425 likewise ask for another try).
_RETRIED = frozenset({401, 403, 404, 407, 408, 421, 423, 425, 429})
#: Nothing gets better before a person has changed something; and what.
_NEEDS_A_PERSON = {
    401: "Check the token or the headers.",
    403: "Check the token, the headers, and what they are allowed to do.",
    404: "Check the URL.",
    407: "Check the user name and the password in the proxy's URL.",
}
#: Likewise, where the token is got by the key of that name.
_TOKEN_ADVICE = {
    "entra_scope": "Check entra_scope, and what the VM's identity is allowed to do there.",
    "credential": "The portal refuses tokens that it gave itself: is vm.vm_id this VM's? See the portal's log.",
}
_GIVEN_BY_THE_PEER = "credential"
#: Statuses that may be about the token alone: it has expired early, or lacks a role that a new one has.
_TOKEN_REFUSED = frozenset({401, 403})
#: What `check` takes for a wrong URL or credential.
_BAD_NEWS = frozenset({401, 403, 404, 407, 410})
_MOST_ANSWER_BYTES = 64 * 1024
_MOST_IDLE_SECONDS = 60.0
#: What is left of a deadline that passed while the token was waited for: the call then fails by itself.
_LEAST_SECONDS = 0.001
_NOISY_LOGGERS = ("urllib3.connection", "urllib3.connectionpool", "urllib3.util.retry")
_SECRET_HEADER = re.compile(r"(?i)auth|token|key|secret|cookie|passw|signature")


def entra_token(config: HttpConfig) -> RenewedToken | None:
    """Return the token that every request of a sink shows, None without `entra_scope`; the sink closes it."""
    return None if config.entra_scope is None else token_of(config.entra_scope, key="entra_scope")


class Endpoint:
    """One URL that records are POSTed to; *secrets*, beside those of *config*, are masked in every message.

    *token* is the result of `entra_token` for *config*, or a portal's token. All other headers override
    *default_headers*. *advice* ends each message about a connection that fails. For one thread, except `close`.
    """

    def __init__(
        self,
        url: str,
        config: HttpConfig,
        *,
        secrets: Iterable[str | Secret] = (),
        default_headers: Mapping[str, str] | None = None,
        token: RenewedToken | None = None,
        advice: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._advice_if_unreachable = advice
        self.shown = origin(url) + public_path(url)
        self._config = config
        self._default_headers = dict(default_headers or {})
        self._secrets = tuple(secrets)
        self._bearer = Secret(key="bearer_token", file=config.bearer_token_file, env=config.bearer_token_env)
        self._token = token
        self._shown_token: AccessToken | None = None
        self._is_mended = False
        """Whether the last answer refused a token that the peer itself gave, and another is shown next."""
        self._headers_file = Secret(key="headers", file=config.headers_file)
        self._proxy = Secret(key="proxy", file=config.proxy_file, env=config.proxy_env)
        self._shown_proxy = ""
        """What a message may show of the proxy of the last request; empty: there was none."""
        self._session = DeadlineSession()
        self._session.headers["User-Agent"] = "scheduled-events-bridge"
        self._request = requests.PreparedRequest()
        self._last_common: tuple[str, dict[str, str]] | None = None
        """The method and the headers for which the request was prepared."""
        self._monotonic = monotonic
        self._used_at = monotonic()
        self._is_closed = False
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).addFilter(_is_an_error)

    def post(
        self, body: bytes, headers: Mapping[str, str], *, deadline_seconds: float | None = None
    ) -> requests.Response:
        """POST *body* and return the answer when it is a 2xx; raise what any other means for the record."""
        return self.send("POST", body, headers, deadline_seconds=deadline_seconds)

    def send(
        self, method: str, body: bytes, headers: Mapping[str, str], *, deadline_seconds: float | None = None
    ) -> requests.Response:
        """Send *body* with *method* and return the answer when it is a 2xx, as `post` does."""
        return self._accepted(self.request(method, body, headers, deadline_seconds=deadline_seconds))

    def request(
        self, method: str, body: bytes | None, headers: Mapping[str, str], *, deadline_seconds: float | None = None
    ) -> requests.Response:
        """Return the answer, whatever its status; raise DeliveryFailed when none comes within the deadline.

        A body of more than 64 KiB, or one that is compressed, is left unread, and reads as empty.
        """
        limit = self._config.timeout_seconds if deadline_seconds is None else deadline_seconds
        ends_at = self._monotonic() + limit
        common = {
            **self._default_headers,
            **self._config.headers,
            **self._secret_headers(),
            **self._token_header(limit),
        }
        proxies = self._proxies()
        self._drop_idle()
        if self._is_closed:  # cut while a file was read; the record may have gone out through another instance since
            raise DeliveryFailed(f"{self.shown}: the sink was closed.")
        try:
            answer = self._session.send(
                self._prepared(method, common, body, headers),
                deadline_seconds=max(_LEAST_SECONDS, ends_at - self._monotonic()),
                max_body_bytes=_MOST_ANSWER_BYTES,
                proxies=proxies,
                verify=self._config.ca_file or True,
                cert=self._client_certificate,
            )
        except ResponseUnread as error:
            return self._heard(_answered(error))
        except (DeadlineExceeded, requests.RequestException, OSError, ValueError) as error:
            failure = self._unanswered(error, limit)
        else:
            return self._heard(answer)
        finally:
            self._used_at = self._monotonic()
        # Out here, so that it has neither a cause nor a context: a traceback would show the whole URL.
        raise failure

    def _prepared(
        self, method: str, common: dict[str, str], body: bytes | None, headers: Mapping[str, str]
    ) -> requests.PreparedRequest:
        """Return the request with *body* and *headers*; preparing it is half the cost of a call, so it is reused."""
        if self._last_common != (method, common):
            auth = _as_given if any(name.lower() == "authorization" for name in common) else None
            self._request = self._session.prepare_request(requests.Request(method, self.url, headers=common, auth=auth))
            self._last_common, self._common_headers = (method, common), self._request.headers
        self._request.headers = self._common_headers.copy()
        self._request.headers.update(headers)
        self._request.body = body or None
        if body:
            self._request.headers["Content-Length"] = str(len(body))
        return self._request

    def _heard(self, answer: requests.Response) -> requests.Response:
        """Return *answer*; a token that it refuses is not shown again."""
        self._is_mended = False
        if self._token is not None and self._shown_token is not None and answer.status_code in _TOKEN_REFUSED:
            is_another_next = self._token.refuse(self._shown_token)
            self._is_mended = is_another_next and self._config.token_key == _GIVEN_BY_THE_PEER
        return answer

    def check(self, method: str = "OPTIONS", *, bad_news: frozenset[int] = _BAD_NEWS) -> requests.Response:
        """Ask with *method*, which writes nothing, and return the answer.

        Raises DeliveryFailed without an answer, and for a 3xx, a 5xx (but 501: the method is unknown there) and the
        statuses of *bad_news*. Any other answer, a 400 or a 405 too, shows that a server is there.
        """
        response = self.request(method, None, {})
        status = response.status_code
        if status in bad_news or not (status in SUCCESS or status in CLIENT_ERROR or status == _NOT_IMPLEMENTED):
            hint = " `send-test` shows what a POST gets." if method == "OPTIONS" else ""
            raise DeliveryFailed(self._description(response, to=method) + hint, needs_attention=True)
        return response

    def close(self) -> None:
        """Close the connections; a request in flight ends with an error, and none follows."""
        self._is_closed = True
        self._session.close()

    def mask(self, text: str) -> str:
        """Return *text* without this endpoint's secrets."""
        return masked(text, self._known_secrets())

    def _drop_idle(self) -> None:
        if self._monotonic() - self._used_at > _MOST_IDLE_SECONDS:
            self._session.close()

    def _accepted(self, response: requests.Response) -> requests.Response:
        """Return *response* when it accepts the record; raise what it means otherwise."""
        status, config = response.status_code, self._config
        if status in config.park_statuses:
            raise DeliveryRejected(self._description(response))
        is_accepted = status in SUCCESS
        if is_accepted and status not in config.retry_statuses:
            return response
        if status == _GONE and status not in config.retry_statuses:
            raise DeliveryFailed(self._description(response), held=True, reason=f"status_{status}")
        is_about_record = status in CLIENT_ERROR and status not in _RETRIED
        if is_about_record and status not in config.retry_statuses:
            raise DeliveryRejected(self._description(response), may_be_endpoint=True, reason=f"status_{status}")
        raise DeliveryFailed(
            self._description(response),
            retry_after_seconds(response.headers),
            needs_attention=(status in REDIRECTION or status in _NEEDS_A_PERSON) and not self._is_mended,
            reason=f"status_{status}",
        )

    def _description(self, response: requests.Response, *, to: str = "") -> str:
        """Return the answer in words, masked before it is cut: half a secret is one too. *to*: to which method."""
        status = response.status_code
        reason = f"to {to}" if to else excerpt(self.mask(response.reason or "").encode())
        head = f"{self.shown} answered {status} {reason}".rstrip()
        shown = excerpt(self.mask(response.content.decode("utf-8", "replace")).encode()).strip()
        return f"{head}{f': {shown}' if shown else '.'} {self._advice(response)}".rstrip()

    def _advice(self, response: requests.Response) -> str:
        status = response.status_code
        if status in REDIRECTION:
            target = response.headers.get("Location", "")
            there = origin(target)
            shown = there if there == origin(self.url) else self.mask(there)
            where = f" It points to {shown}." if "://" in target else ""
            return f"Redirects are not followed.{where} Put the right URL into the configuration."
        if self._token is not None and status in _TOKEN_REFUSED:
            return "" if self._is_mended else _TOKEN_ADVICE[self._config.token_key or ""]
        return _NEEDS_A_PERSON.get(status, "")

    def _unanswered(self, error: BaseException, limit: float) -> DeliveryFailed:
        """Return the DeliveryFailed for a request that got no answer."""
        if isinstance(error, DeadlineExceeded):
            through = f" through the proxy {self._shown_proxy}" if self._shown_proxy else ""
            message = f"{self.shown} gave no answer{through} within {limit:g} s."
            return DeliveryFailed(message, reason=RetryReason.TIMEOUT)
        cause = root_cause(error)
        text = excerpt(self.mask(str(cause) or type(cause).__name__).encode())
        if "Tunnel connection failed: 407" in text:
            message = f"{self.shown}: the proxy {self._shown_proxy} refused. {_NEEDS_A_PERSON[407]}"
            return DeliveryFailed(message, needs_attention=True, reason=RetryReason.PROXY)
        if isinstance(error, requests.exceptions.ProxyError) and self._shown_proxy:
            what = "does not let this through" if text.startswith("Tunnel connection failed") else "does not answer"
            message = f"{self.shown} was not tried: the proxy {self._shown_proxy} {what}: {text}"
            return DeliveryFailed(message, reason=RetryReason.CONNECTION)
        if is_about_tls(error):
            message = f"{self.shown}: TLS failed: {text} {self._advice_if_unreachable}".rstrip()
            return DeliveryFailed(message, needs_attention=True, reason=RetryReason.TLS)
        is_ours = is_about_settings(error)
        advice = f". {self._advice_if_unreachable}" if self._advice_if_unreachable else ""
        return DeliveryFailed(
            f"{self.shown} cannot be reached: {text}{advice}",
            needs_attention=is_ours,
            reason=RetryReason.SETTINGS if is_ours else RetryReason.CONNECTION,
        )

    def _secret_headers(self) -> dict[str, str]:
        headers = {}
        for number, line in enumerate(self._headers_file.values(), start=1):
            name, colon, value = line.partition(":")
            where = f"headers_file, line {number}"
            if not colon:
                raise DeliveryFailed(f"{where} has no colon. Write it as `Name: value`.", needs_attention=True)
            headers[name.strip()] = value.strip()
            _sendable(name.strip(), value.strip(), where=where)
        token = self._bearer.value()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
            _sendable("Authorization", headers["Authorization"], where="the bearer token")
        return headers

    def _token_header(self, wait_seconds: float) -> dict[str, str]:
        """Return Authorization with the token that is got, if there is to be one; waiting for it counts as sending."""
        if self._token is None:
            return {}
        try:
            check_token_stays_private(self._config, self.url)
            self._shown_token = self._token.current(wait_seconds=wait_seconds)
        except ValueError as error:
            raise DeliveryFailed(str(error), needs_attention=True, reason=RetryReason.SETTINGS) from None
        except CredentialFailed as error:
            raise DeliveryFailed(
                f"{self.shown}: {error}", error.retry_after_seconds, needs_attention=error.needs_attention
            ) from error
        return {"Authorization": f"Bearer {self._shown_token.token}"}

    def _known_secrets(self) -> Iterator[str]:
        yield from url_secrets(self.url)
        for url in _values(self._proxy):
            yield from url_secrets(url)
        if self._shown_token is not None:
            yield self._shown_token.token
        for secret in (*self._secrets, self._bearer):
            yield from (secret,) if isinstance(secret, str) else _values(secret)
        yield from self._default_headers.values()  # they come from where secrets are kept too: the environment
        for name, value in (*self._default_headers.items(), *self._config.headers.items()):
            if _SECRET_HEADER.search(name):
                yield from (value, value.partition(" ")[2].strip())
        for line in _values(self._headers_file):
            value = line.partition(":")[2].strip()
            yield from (line, value, value.partition(" ")[2].strip())

    def _proxies(self) -> dict[str, str]:
        url = self._config.proxy or self._proxy.value()
        self._shown_proxy = "" if url is None else origin(url)
        if url is None:
            return {}
        try:
            http_url(url, key="proxy")
        except ValueError as error:
            raise DeliveryFailed(f"The proxy's URL cannot be used: {error}", needs_attention=True) from None
        return {"http": url, "https": url}

    @property
    def _client_certificate(self) -> Any:
        if self._config.client_cert_file is None or self._config.client_key_file is None:
            return self._config.client_cert_file
        return (self._config.client_cert_file, self._config.client_key_file)


def _as_given(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Return *request*: its Authorization is explicit, and requests would replace it by the URL's user and password."""
    return request


def _is_an_error(record: logging.LogRecord) -> bool:
    """Return whether the line is an error: urllib3's debug lines and its warnings about headers show the path."""
    return record.levelno >= logging.ERROR


def _sendable(name: str, value: str, *, where: str) -> None:
    try:
        check_header(name, value, where=where)
    except ValueError as error:
        raise DeliveryFailed(str(error), needs_attention=True) from None


def _values(secret: Secret) -> tuple[str, ...]:
    try:
        return secret.values()
    except DeliveryFailed:  # gone meanwhile; the next try says so
        return ()


def _answered(error: ResponseUnread) -> requests.Response:
    if error.response is None:
        raise DeliveryFailed("The answer could not be read.") from None
    return error.response


def parse_json(content: bytes) -> Any:
    """Return *content* as JSON, None when it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
