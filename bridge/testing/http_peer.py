"""An HTTP endpoint that does as it is told, and keeps every request.

Its refusals repeat what they refuse, credentials and path first: a sink that puts an answer into an error shows there
whether it masks its secrets.
"""

from __future__ import annotations

import gzip
import json
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from bridge.testing.peers import Address, Peer
from bridge.testing.simulator.http_server import Connection, HttpServer
from bridge.testing.simulator.imds_api import Answer, Request

_WRITES = frozenset({"POST", "PUT", "PATCH"})
_DULL_HEADERS = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent"}
)
_OK, _BAD, _BUSY = 200, 400, 503

Reply = Callable[[Request], "Answer | None"]
"""What a request is answered with; None: nothing, for as long as the peer lives."""


class HttpPeer(Peer):
    """Listens on a free port of 127.0.0.1, or on *port*.

    *ids_in* finds the ids of the records that a request carries. *accepted* is the answer to what is accepted, and
    *partial* makes the one that refuses the records of the ids it is given. With *tls* it speaks HTTPS.
    """

    def __init__(
        self,
        *,
        ids_in: Callable[[Request], Sequence[str]] = lambda _request: (),
        accepted: Answer | None = None,
        partial: Callable[[Sequence[str]], Answer] | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
    ) -> None:
        self._ids_in = ids_in
        self._accepted = accepted or Answer(status=_OK)
        self._partial = partial
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._reply: Reply = self._accept_it
        self._stop = threading.Event()
        self._server = HttpServer(("127.0.0.1", port), self._respond, self._stop)
        if tls is not None:
            # Not while accepting: a client that stays silent there would keep all others out.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        self._server.start()
        parts = urlsplit(self._server.endpoint)
        self.address = Address(host=str(parts.hostname), port=parts.port or 0)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return every request so far, with its body decompressed."""
        with self._lock:
            return tuple(self._requests)

    @property
    def received(self) -> Sequence[Sequence[str]]:
        """Return the ids in each request that writes: POST, PUT or PATCH, with a body."""
        return [self._ids_in(request) for request in self.requests if request.method in _WRITES and request.body]

    def reply(self, reply: Reply) -> None:
        """Answer every request with what *reply* returns for it."""
        self._reply = reply

    def say(self, status: int, *, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> None:
        """Answer every request with *status*; without a *body* the answer repeats the request."""
        self._reply = lambda request: Answer(
            status=status, headers=dict(headers or {}), body=_echo(request) if body is None else body
        )

    def accept(self) -> None:
        """Answer 200."""
        self._reply = self._accept_it

    def refuse_for_good(self) -> None:
        """Answer 400."""
        self.say(_BAD)

    def refuse_for_now(self, retry_after_seconds: int | None = None) -> None:
        """Answer 503, with Retry-After if there is something to say there."""
        self.say(_BUSY, headers={} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)})

    def refuse_part(self, refused_ids: Sequence[str]) -> None:
        """Answer as *partial* says."""
        if self._partial is None:
            raise NotImplementedError("This peer was not told how part of a batch is refused.")
        answer = self._partial(refused_ids)
        self._reply = lambda _request: answer

    def stay_silent(self) -> None:
        """Read requests and answer none."""
        self._reply = lambda _request: None

    def close(self) -> None:
        """End the server and every connection."""
        self._server.close()

    def __enter__(self) -> HttpPeer:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def _accept_it(self, _request: Request) -> Answer:
        return self._accepted

    def _respond(self, connection: Connection, request: Request) -> None:
        if request.headers.get("content-encoding") == "gzip":
            request = replace(request, body=gzip.decompress(request.body))
        with self._lock:
            self._requests.append(request)
        answer = self._reply(request)
        if answer is None:
            self._stop.wait()
            connection.close_connection = True
        else:
            connection.write(answer)


def _echo(request: Request) -> bytes:
    """Return what a sink may have kept secret first: a message takes only the beginning of an answer."""
    headers = {name: value for name, value in request.headers.items() if name not in _DULL_HEADERS}
    authorization = headers.pop("authorization", None)
    seen = {"authorization": authorization, "path": request.path, "query": dict(request.query), "headers": headers}
    return json.dumps({**seen, "body": request.body.decode("utf-8", "replace")}).encode()
