"""Asks the agent at a status address for its /readyz."""

from __future__ import annotations

import msgspec
import requests

from bridge.clock import parse_time
from bridge.config.settings import StatusSettings
from bridge.errors import DeadlineExceeded
from bridge.health.readiness import Readiness
from bridge.http.session import DeadlineSession

ANSWER_SECONDS = 1.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not listened on


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The response. *readiness* and *problem* are both None if there is no address to ask."""

    url: str | None = None
    readiness: Readiness | None = None
    problem: str | None = None


def query_readyz(status: StatusSettings) -> AgentAnswer:
    """Return the response from the address in *status*, within a second; with port 0, or without an address, none."""
    address = status.address
    if address is None or address[1] == 0:
        return AgentAnswer()
    host = _ANYWHERE.get(address[0], address[0])
    url = f"http://{f'[{host}]' if ':' in host else host}:{address[1]}/readyz"
    session = DeadlineSession()
    try:
        body = session.request("GET", url, deadline_seconds=ANSWER_SECONDS).content
    except DeadlineExceeded:
        return AgentAnswer(url=url, problem=f"{url} did not respond within {ANSWER_SECONDS:g} s.")
    except (requests.RequestException, OSError, ValueError):
        return AgentAnswer(url=url, problem=f"No agent responds at {url}.")
    finally:
        session.close()
    try:
        return AgentAnswer(url=url, readiness=_readiness(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return AgentAnswer(url=url, problem=f"The program at {url} is not this agent.")


def _readiness(body: bytes) -> Readiness:
    readiness = msgspec.json.decode(body, type=Readiness)
    if readiness.last_good_poll_at is not None and parse_time(readiness.last_good_poll_at).tzinfo is None:
        raise ValueError("The time of the last good poll has no zone.")
    return readiness
