"""Reads the responses of a portal.

If an agent would reject a response, the response violates PROTOCOL.md.
"""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from bridge import strict_json
from bridge.approval.decision_token import MAX_TOKEN_CHARACTERS
from bridge.approval.portal_client import MAX_DECISIONS, MAX_EPOCH_CHARACTERS, MAX_INDEX
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import Exchange
from bridge.testing.portal_check.requirements import Requirement

_OK, _NO_CONTENT = 200, 204
_REDIRECTS = {301, 302, 303, 307, 308}
_UNKNOWN_VM = {404, 410}
_REFUSED = {401, 403}
_NOT_READ = object()


class PollAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a response that an agent uses."""

    index: int | None
    """The index, or None for a 204 response, which has no index."""
    decisions: tuple[str, ...] = ()
    exchange: Exchange


class AnswerReader:
    """Reads the responses of one portal, and adds violations to *report*."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._epoch: object = _NOT_READ

    def read(self, exchange: Exchange) -> PollAnswer | None:
        """Return the content of the response, or None if an agent cannot use it."""
        if exchange.status is None:
            self._report.broken(Requirement.ANSWERED, exchange, exchange.problem or "The portal sent no response.")
            return None
        self._report.met(Requirement.ANSWERED)
        if not self._is_good_status(exchange):
            return None
        if exchange.status == _NO_CONTENT:
            return PollAnswer(index=None, exchange=exchange)
        if not self._is_readable(exchange):
            return None
        value = self._object(exchange)
        return None if value is None else self._answer(value, exchange)

    def _is_good_status(self, exchange: Exchange) -> bool:
        status = exchange.status
        if status in _REDIRECTS:
            where = exchange.headers.get("Location", "nowhere")
            self._report.broken(
                Requirement.NO_REDIRECT, exchange, f"The response is {status} with a redirect to {where}."
            )
        elif status in _UNKNOWN_VM:
            self._report.broken(
                Requirement.KNOWN_VM, exchange, f"The response is {status}, so the portal does not know this VM."
            )
        elif status in _REFUSED:
            self._report.broken(Requirement.STATUS, exchange, f"The response to this VM's credential is {status}.")
        elif status not in (_OK, _NO_CONTENT):
            self._report.broken(Requirement.STATUS, exchange, f"The response is {status}, and the agent tries again.")
        else:
            for requirement in (Requirement.NO_REDIRECT, Requirement.KNOWN_VM, Requirement.STATUS):
                self._report.met(requirement)
            return True
        return False

    def _is_readable(self, exchange: Exchange) -> bool:
        if exchange.is_unread and "Content-Encoding" in exchange.headers:
            self._report.broken(
                Requirement.PLAIN, exchange, "The body is compressed, but the request allows only identity."
            )
            return False
        self._report.met(Requirement.PLAIN)
        if exchange.is_unread:
            self._report.broken(Requirement.BODY_SIZE, exchange, "The body is larger than 1 MiB.")
            return False
        self._report.met(Requirement.BODY_SIZE)
        kind = exchange.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() == "application/json":
            self._report.met(Requirement.CONTENT_TYPE)
        else:
            self._report.broken(Requirement.CONTENT_TYPE, exchange, f"The Content-Type is {kind or 'missing'}.")
        return True

    def _object(self, exchange: Exchange) -> dict[str, Any] | None:
        value, why = _json(exchange.body)
        if not isinstance(value, dict):
            self._report.broken(
                Requirement.JSON, exchange, f"The body is not a JSON object in UTF-8: {why or 'it is not an object'}."
            )
            return None
        self._report.met(Requirement.JSON)
        return value

    def _answer(self, value: dict[str, Any], exchange: Exchange) -> PollAnswer | None:
        index, decisions = value.get("index"), value.get("decisions")
        is_index = type(index) is int and 1 <= index <= MAX_INDEX
        if not is_index:
            said = "There is no index." if "index" not in value else f"The index is {index!r}."
            self._report.broken(Requirement.INDEX, exchange, said)
        else:
            self._report.met(Requirement.INDEX)
        is_list = isinstance(decisions, list) and all(isinstance(each, str) for each in decisions)
        if not is_list:
            self._report.broken(Requirement.DECISIONS, exchange, "`decisions` is not a list of strings.")
        else:
            self._report.met(Requirement.DECISIONS)
        self._read_epoch(value, exchange)
        if not isinstance(decisions, list) or not is_list or not isinstance(index, int) or not is_index:
            return None
        if len(decisions) > MAX_DECISIONS:
            self._report.broken(Requirement.COUNT, exchange, f"The response has {len(decisions)} decisions.")
            return None
        self._report.met(Requirement.COUNT)
        self._read_sizes(decisions, exchange)
        return PollAnswer(index=index, decisions=tuple(decisions), exchange=exchange)

    def _read_sizes(self, decisions: list[str], exchange: Exchange) -> None:
        longest = max(map(len, decisions), default=0)
        if longest > MAX_TOKEN_CHARACTERS:
            self._report.broken(Requirement.TOKEN_SIZE, exchange, f"A decision has {longest} characters.")
        elif decisions:
            self._report.met(Requirement.TOKEN_SIZE)

    def _read_epoch(self, value: dict[str, Any], exchange: Exchange) -> None:
        epoch = value.get("epoch")
        last, self._epoch = self._epoch, epoch
        if epoch is not None and not (isinstance(epoch, str) and 1 <= len(epoch) <= MAX_EPOCH_CHARACTERS):
            detail = f"The epoch is not a string of 1 to {MAX_EPOCH_CHARACTERS} characters."
            self._report.broken(Requirement.EPOCH, exchange, detail)
        elif last not in (_NOT_READ, epoch):
            detail = "The epoch differs from the last response, although no data was lost or restored."
            self._report.broken(Requirement.EPOCH, exchange, detail)
        else:
            self._report.met(Requirement.EPOCH)


def _json(body: bytes) -> tuple[Any, str | None]:
    """Return the JSON value in *body* and None.

    If *body* is not valid JSON, return None and the reason.
    """
    if not body:
        return None, "it is empty"
    if body.startswith(codecs.BOM_UTF8):
        return None, "it begins with a byte order mark"
    try:
        return strict_json.loads(body.decode("utf-8")), None
    except ValueError as error:  # also a UnicodeDecodeError
        return None, str(error)
