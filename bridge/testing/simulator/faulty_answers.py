"""Simulates faulty responses: late, slow, invalid, incomplete, or missing.

A simulated delay ends early if the server stops or if the client closes its connection. If a fault replaces or
suppresses the response, the simulator does not process the request. For example, an approval then has no effect.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import replace

from bridge.testing.simulator.faults import DOCUMENT_KINDS, Fault
from bridge.testing.simulator.http_server import Connection
from bridge.testing.simulator.imds_api import Answer, error

_OVERSIZE_BYTES = 5 << 20
_GARBAGE = b"\x00\xff\xfe<html>this is no JSON"
_LOOK_SECONDS = 0.1

_AnswerMaker = Callable[[], Answer]


def answer_with_fault(connection: Connection, fault: Fault, right_answer: _AnswerMaker) -> None:
    """Respond with *fault*. *right_answer* returns the correct response."""
    special = _SPECIAL.get(fault.kind)
    if special is not None:
        special(connection, fault, right_answer)
    else:
        connection.write(_ANSWERS[fault.kind](fault, right_answer))


def status_of(fault: Fault) -> int:
    """Return the status that a client gets with *fault*, or 0 if the client gets no response."""
    return {"status": fault.status, "redirect": 302, "silence": 0, "disconnect": 0}.get(fault.kind, 200)


def _status(fault: Fault, _right_answer: _AnswerMaker) -> Answer:
    headers = {} if fault.retry_after_seconds is None else {"Retry-After": str(fault.retry_after_seconds)}
    answer = replace(error(fault.status, f"Simulated status {fault.status}."), headers=headers)
    return answer if fault.body is None else replace(answer, body=fault.body.encode())


def _truncated(_fault: Fault, right_answer: _AnswerMaker) -> Answer:
    answer = right_answer()
    return replace(answer, body=answer.body[: len(answer.body) // 2])


def _garbage(fault: Fault, _right_answer: _AnswerMaker) -> Answer:
    return Answer(body=_GARBAGE if fault.body is None else fault.body.encode())


def _oversize(_fault: Fault, right_answer: _AnswerMaker) -> Answer:
    answer = right_answer()
    return replace(answer, body=answer.body + b" " * _OVERSIZE_BYTES)


def _slow(connection: Connection, fault: Fault, right_answer: _AnswerMaker) -> None:
    if connection.stop.wait(fault.delay):
        connection.close_connection = True
    else:
        connection.write(right_answer())


def _cut(connection: Connection, _fault: Fault, right_answer: _AnswerMaker) -> None:
    answer = right_answer()
    connection.close_connection = True
    connection.wfile.write(connection.head(answer, len(answer.body)) + answer.body[: len(answer.body) // 2])
    connection.wfile.flush()


def _disconnect(connection: Connection, _fault: Fault, _right_answer: _AnswerMaker) -> None:
    connection.close_connection = True


def _silence(connection: Connection, _fault: Fault, _right_answer: _AnswerMaker) -> None:
    connection.close_connection = True
    while not connection.stop.is_set() and not _is_gone(connection.connection):
        connection.stop.wait(_LOOK_SECONDS)


def _drip(connection: Connection, fault: Fault, right_answer: _AnswerMaker) -> None:
    answer = right_answer()
    connection.close_connection = True
    for byte in connection.head(answer, len(answer.body)) + answer.body:
        connection.wfile.write(bytes([byte]))
        connection.wfile.flush()
        if connection.stop.wait(fault.delay):
            break


def _is_gone(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""


_ANSWERS: dict[str, Callable[[Fault, _AnswerMaker], Answer]] = {
    "status": _status,
    "empty": lambda _fault, _right: Answer(),
    "truncated": _truncated,
    "garbage": _garbage,
    "oversize": _oversize,
    "redirect": lambda fault, _right: Answer(status=302, headers={"Location": fault.location or "/elsewhere"}),
    **dict.fromkeys(DOCUMENT_KINDS, lambda _fault, right: right()),
}
_SPECIAL: dict[str, Callable[[Connection, Fault, _AnswerMaker], None]] = {
    "slow": _slow,
    "cut": _cut,
    "disconnect": _disconnect,
    "silence": _silence,
    "drip": _drip,
}
