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
        """Return the response's content, or None if an agent cannot use it."""
        is_answered = exchange.status is not None
        self._report.check(Requirement.ANSWERED, exchange, is_met=is_answered, otherwise=exchange.result)
        if not is_answered or not self._is_good_status(exchange):
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
        check = self._report.check
        is_unread = exchange.problem is not None
        is_plain = not (is_unread and "Content-Encoding" in exchange.headers)
        detail = "The body is compressed, but the request allows only identity."
        if not check(Requirement.PLAIN, exchange, is_met=is_plain, otherwise=detail):
            return False
        detail = "The body is larger than 1 MiB."
        if not check(Requirement.BODY_SIZE, exchange, is_met=not is_unread, otherwise=detail):
            return False
        kind = exchange.headers.get("Content-Type", "")
        is_json = kind.partition(";")[0].strip().lower() == "application/json"
        detail = f"The Content-Type is {kind or 'missing'}."
        check(Requirement.CONTENT_TYPE, exchange, is_met=is_json, otherwise=detail)
        return True

    def _object(self, exchange: Exchange) -> dict[str, Any] | None:
        value, why = _json(exchange.body)
        detail = f"The body is not a JSON object in UTF-8: {why or 'it is not an object'}."
        self._report.check(Requirement.JSON, exchange, is_met=isinstance(value, dict), otherwise=detail)
        return value if isinstance(value, dict) else None

    def _answer(self, value: dict[str, Any], exchange: Exchange) -> PollAnswer | None:
        check = self._report.check
        index, decisions = value.get("index"), value.get("decisions")
        is_index = type(index) is int and 1 <= index <= MAX_INDEX
        detail = "There is no index." if "index" not in value else f"The index is {index!r}."
        check(Requirement.INDEX, exchange, is_met=is_index, otherwise=detail)
        is_list = isinstance(decisions, list) and all(isinstance(each, str) for each in decisions)
        detail = "`decisions` is not a list of strings."
        check(Requirement.DECISIONS, exchange, is_met=is_list, otherwise=detail)
        self._read_epoch(value, exchange)
        if not isinstance(decisions, list) or not is_list or not isinstance(index, int) or not is_index:
            return None
        detail = f"The response has {len(decisions)} decisions."
        if not check(Requirement.COUNT, exchange, is_met=len(decisions) <= MAX_DECISIONS, otherwise=detail):
            return None
        if decisions:
            longest = max(map(len, decisions))
            detail = f"A decision has {longest} characters."
            check(Requirement.TOKEN_SIZE, exchange, is_met=longest <= MAX_TOKEN_CHARACTERS, otherwise=detail)
        return PollAnswer(index=index, decisions=tuple(decisions), exchange=exchange)

    def _read_epoch(self, value: dict[str, Any], exchange: Exchange) -> None:
        epoch = value.get("epoch")
        last, self._epoch = self._epoch, epoch
        is_valid = epoch is None or (isinstance(epoch, str) and 1 <= len(epoch) <= MAX_EPOCH_CHARACTERS)
        detail = f"The epoch is not a string of 1 to {MAX_EPOCH_CHARACTERS} characters."
        if self._report.check(Requirement.EPOCH, exchange, is_met=is_valid, otherwise=detail):
            detail = "The epoch differs from the last response, although no data was lost or restored."
            self._report.check(Requirement.EPOCH, exchange, is_met=last in (_NOT_READ, epoch), otherwise=detail)


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
