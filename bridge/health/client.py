"""What a running agent says of itself at its /readyz, asked for by a command.

An answer is believed only if it speaks of the very same outbox: another agent may listen at that address. One that is
still loading its outbox knows it by its directory alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import requests

from bridge.clock import parse_time
from bridge.config.settings import StatusSettings
from bridge.errors import DeadlineExceeded
from bridge.health.readiness import Readiness
from bridge.http.session import DeadlineSession

ANSWER_SECONDS = 1.0
#: Shown instead of "there is none" while the agent works from memory, and knows more than the file.
EVENTS_UNKNOWN = (
    "Events are not known here: the agent works from memory because its disk refuses; its /metrics has active_events."
)
#: The same while it loads its outbox.
EVENTS_UNKNOWN_YET = "Events are not known here: the agent is still loading its outbox; its /metrics has active_events."
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, not listened on


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What /readyz answered; *readiness* and *problem* are both None when nothing was asked."""

    url: str | None = None
    readiness: Readiness | None = None
    problem: str | None = None
    is_silent: bool = False
    """True: nobody listens there at all."""

    def of_outbox(self, stream_id: str | None, directory: Path) -> AgentAnswer:
        """Return this, without an answer that speaks of another outbox than the one of *stream_id* in *directory*."""
        live = self.readiness
        if live is None or (stream_id is not None and live.stream_id == stream_id):
            return self
        if live.state_loading and live.is_about(directory):
            return self
        return AgentAnswer(
            url=self.url,
            problem=f"{self.url} is answered by another agent, or for another outbox: that of {live.state_directory}.",
        )


def query_readyz(status: StatusSettings) -> AgentAnswer:
    """Ask what listens where *status* says, within a second; ask nothing when that is off or port 0."""
    address = status.address
    if address is None or address[1] == 0:
        return AgentAnswer()
    host = _ANYWHERE.get(address[0], address[0])
    url = f"http://{f'[{host}]' if ':' in host else host}:{address[1]}/readyz"
    session = DeadlineSession()
    try:
        body = session.request("GET", url, deadline_seconds=ANSWER_SECONDS).content
    except DeadlineExceeded:
        return AgentAnswer(url=url, problem=f"{url} did not answer within {ANSWER_SECONDS:g} s.")
    except (requests.RequestException, OSError, ValueError):
        return AgentAnswer(url=url, problem=f"Nobody answers at {url}.", is_silent=True)
    finally:
        session.close()
    try:
        return AgentAnswer(url=url, readiness=_readiness(body))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return AgentAnswer(url=url, problem=f"What answers at {url} is no agent of this kind.")


def _readiness(body: bytes) -> Readiness:
    readiness = msgspec.json.decode(body, type=Readiness)
    if readiness.last_good_poll_at is not None and parse_time(readiness.last_good_poll_at).tzinfo is None:
        raise ValueError("The time of the last good poll has no zone.")
    return readiness
