"""What a failure of Event Hubs means for the records: try again, try again after a while, or park them.

The conditions are those of Microsoft's pages "AMQP errors in Azure Service Bus and Event Hubs" and "Event Hubs
messaging exceptions". About the record (too large, an argument that is refused): rejected. Anything else is tried
again, the unknown included: a record that is sent twice is recognised by its id, one that is parked waits for a
person.
"""

from __future__ import annotations

import re
from typing import Any

from bridge.sink import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason, causes, excerpt, masked
from sinks.http.urls import origin

#: What the SDK leaves of a condition in `error`: all after its first colon.
_ABOUT_THE_RECORD = frozenset({"link:message-size-exceeded", "argument-error", "argument-out-of-range"})
_NEEDS_A_PERSON = frozenset(
    {"unauthorized-access", "auth-failed", "not-found", "entity-disabled", "resource-deleted", "not-allowed"}
)
_BUSY = "server-busy"
#: "Please wait 4 seconds and try again." is what the service says of a quota; the SDK itself waits as long.
_BUSY_SECONDS = 4.0
_WAIT = re.compile(r"wait (\d{1,4}) seconds")
#: Conditions that the SDK makes up if the service named none.
_MADE_UP = frozenset({"", "unknown-error", "client-error", "socket-error", "connection:forced"})
_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
#: aiohttp's names, which may not be imported here: nobody answered at that address, a proxy did not, or it said no.
_NO_CONNECTION, _NO_PROXY, _PROXY_ANSWER = "ClientConnectorError", "ClientProxyConnectionError", "ClientHttpProxyError"
#: What a person must mend at the proxy: its rules, or the user and the password.
_PROXY_REFUSES = frozenset({401, 403, 407})
#: In aiohttp's texts; another at each try, so that the same failure would be a new line in the log each time.
_ADDRESS = re.compile(r" ssl:<[^<>]*>")


class TooLarge(Exception):
    """A batch does not fit the link."""


def delivery_error(
    error: BaseException, *, peer: str, secrets: tuple[str, ...], proxy: str | None = None
) -> DeliveryError:
    """Return *error* of the SDK as the host's error; *proxy* is the URL of the proxy."""
    from_proxy = _proxy_error(error, peer, "the proxy" if proxy is None else f"the proxy {origin(proxy)}")
    if from_proxy is not None:
        return from_proxy
    condition, text = _condition(error), _ADDRESS.sub("", _description(error))
    shown = masked(excerpt(" ".join(text.split()).encode()), secrets)
    message = f"{peer}: {shown or type(error).__name__}" + (f" ({condition})" if condition else "")
    if condition in _ABOUT_THE_RECORD:
        return DeliveryRejected(message)
    if condition == _BUSY:
        found = _WAIT.search(text)
        return DeliveryFailed(message, float(found[1]) if found else _BUSY_SECONDS, reason=RetryReason.BUSY)
    if condition in _NEEDS_A_PERSON or is_about_access(error) or _CERTIFICATE in text:
        return DeliveryFailed(message, needs_attention=True, reason=RetryReason.REFUSED)
    return DeliveryFailed(message, reason=RetryReason.CONNECTION)


def _proxy_error(error: BaseException, peer: str, proxy: str) -> DeliveryFailed | None:
    """Return what *error* means if the proxy is to blame, None if it is not."""
    answer = _found(error, _PROXY_ANSWER)
    if answer is not None:
        status = getattr(answer, "status", None)
        message = f"{peer}: {proxy} answered {status}. Check the user name and the password in its URL, and its rules."
        return DeliveryFailed(message, needs_attention=status in _PROXY_REFUSES, reason=RetryReason.PROXY)
    if _found(error, _NO_PROXY) is not None:
        return DeliveryFailed(f"{peer} was not tried: {proxy} does not answer.", reason=RetryReason.CONNECTION)
    return None


def _found(error: BaseException, name: str) -> BaseException | None:
    """Return the first of the causes of *error* that is called *name*, or derives from what is."""
    return next((each for each in causes(error) if name in {cls.__name__ for cls in type(each).__mro__}), None)


def _condition(error: Any) -> str:
    """Return the AMQP condition without its first word (amqp, com.microsoft); empty when there is none."""
    found = getattr(error, "error", None)
    if not isinstance(found, str):
        raw = getattr(error, "condition", b"")
        found = (raw if isinstance(raw, bytes) else b"").decode(errors="replace").partition(":")[2]
    return found


def _description(error: Any) -> str:
    """Return the words of the service; the SDK repeats them three times in its own text."""
    for each in (error, getattr(error, "details", None)):
        description = getattr(each, "description", None)
        if description:
            return description.decode(errors="replace") if isinstance(description, bytes) else str(description)
    return str(error)


def link_error(client: Any) -> BaseException | None:
    """Return why the service has detached the SDK's link, if it has.

    The SDK settles what is under way as "unknown error" when its link is detached, and keeps the reason in the link,
    to which it gives no access. Should a later SDK keep it elsewhere, the reason stays unknown and the record is tried
    again.
    """
    for producer in getattr(client, "_producers", {}).values():
        found = getattr(getattr(getattr(producer, "_handler", None), "_link", None), "_error", None)
        if isinstance(found, BaseException):
            return found
    return None


def is_about_access(error: Any) -> bool:
    """Return whether the service refused the token; by name, because the SDK may not be imported.

    Through a websocket to an address of one's own the SDK says so, too, where nobody listens.
    """
    is_refusal = any(each.__name__ == "AuthenticationError" for each in type(error).__mro__)
    return is_refusal and _found(error, _NO_CONNECTION) is None


def is_answer(error: Any) -> bool:
    """Return whether *error* is the service's answer to a transfer, so that the connection is good for more."""
    is_outcome = any(each.__name__ == "EventDataSendError" for each in type(error).__mro__)
    return is_outcome and _condition(error) not in _MADE_UP
