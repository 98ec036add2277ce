"""Classifies errors of the Event Hubs SDK.

If the event hub rejects a record, for example because it is too large, the error becomes DeliveryRejected and the agent
parks the record. All other errors become DeliveryFailed and the agent retries. If a retry causes a duplicate, consumers
can detect it by the record's `id`.

Microsoft describes the error conditions in "AMQP errors in Azure Service Bus and Event Hubs" and "Event Hubs messaging
exceptions". This module compares exceptions by name, because importing the SDK takes a lot of memory.
"""

from __future__ import annotations

import re
from typing import Any

from bridge.sink import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason, causes, excerpt, masked

#: The SDK removes the part of a condition before the first colon.
_ABOUT_THE_RECORD = frozenset({"link:message-size-exceeded", "argument-error", "argument-out-of-range"})
_NEEDS_A_PERSON = frozenset(
    {"unauthorized-access", "auth-failed", "not-found", "entity-disabled", "resource-deleted", "not-allowed"}
)
_BUSY = "server-busy"
#: If a quota is exceeded, the service responds with "Please wait 4 seconds and try again."
_BUSY_SECONDS = 4.0
_WAIT = re.compile(r"wait (\d{1,4}) seconds")
#: The SDK uses these conditions if the service sent no condition.
_MADE_UP = frozenset({"", "unknown-error", "client-error", "socket-error", "connection:forced"})
_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
#: aiohttp's exceptions for a refused connection, and for an HTTP error of the proxy.
_NO_CONNECTION, _PROXY_REFUSES = "ClientConnectorError", "ClientHttpProxyError"
#: This part of an aiohttp message differs at each attempt. Without its removal, each log line would differ.
_ADDRESS = re.compile(r" ssl:<[^<>]*>")


def delivery_error(error: BaseException, *, peer: str, secrets: tuple[str, ...]) -> DeliveryError:
    """Return the DeliveryFailed or DeliveryRejected for the exception *error* of the SDK."""
    condition, text = _condition(error), _ADDRESS.sub("", _description(error))
    shown = masked(excerpt(" ".join(text.split()).encode()), secrets)
    message = f"{peer}: {shown or type(error).__name__}" + (f" ({condition})" if condition else "")
    if condition in _ABOUT_THE_RECORD:
        return DeliveryRejected(message)
    if condition == _BUSY:
        found = _WAIT.search(text)
        return DeliveryFailed(message, float(found[1]) if found else _BUSY_SECONDS, reason=RetryReason.BUSY)
    if _has_cause(error, _PROXY_REFUSES):
        return DeliveryFailed(
            f"{message}. Check the proxy, and the user name and the password in its URL.",
            needs_attention=True,
            reason=RetryReason.PROXY,
        )
    if condition in _NEEDS_A_PERSON or is_about_access(error) or _CERTIFICATE in text:
        return DeliveryFailed(message, needs_attention=True, reason=RetryReason.REFUSED)
    return DeliveryFailed(message, reason=RetryReason.CONNECTION)


def link_error(client: Any) -> BaseException | None:
    """Return why the event hub closed the link of *client*, or None if it is open.

    When the event hub closes a link, the SDK raises an "unknown error" and keeps the reason in a private attribute. If
    a future version of the SDK stores the reason elsewhere, error messages will not contain it.
    """
    for producer in getattr(client, "_producers", {}).values():
        found = getattr(getattr(getattr(producer, "_handler", None), "_link", None), "_error", None)
        if isinstance(found, BaseException):
            return found
    return None


def is_about_access(error: BaseException) -> bool:
    """Return whether the event hub rejected the token.

    If `endpoint` is set, the SDK also raises AuthenticationError when the connection is refused. The result is then
    False.
    """
    return _is_a(error, "AuthenticationError") and not _has_cause(error, _NO_CONNECTION)


def is_answer(error: BaseException) -> bool:
    """Return whether *error* is a response to a transfer. The connection is then usable."""
    return _is_a(error, "EventDataSendError") and _condition(error) not in _MADE_UP


def _is_a(error: BaseException, name: str) -> bool:
    return name in {each.__name__ for each in type(error).__mro__}


def _has_cause(error: BaseException, name: str) -> bool:
    return any(_is_a(each, name) for each in causes(error))


def _condition(error: Any) -> str:
    found = getattr(error, "error", None)
    if not isinstance(found, str):
        raw = getattr(error, "condition", b"")
        found = (raw if isinstance(raw, bytes) else b"").decode(errors="replace").partition(":")[2]
    return found


def _description(error: Any) -> str:
    """Return the text that the service sent, which the SDK's message repeats three times."""
    for each in (error, getattr(error, "details", None)):
        description = getattr(each, "description", None)
        if description:
            return description.decode(errors="replace") if isinstance(description, bytes) else str(description)
    return str(error)
