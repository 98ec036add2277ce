"""Runs a test server that records HTTP requests and sends prepared responses.

When the server rejects a request, its response echoes the request, including the path and the credentials. A test can
then check that the sink masks its secrets if it copies the response into an error message.
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
"""A function that returns the response to a request, or None to send no response until the peer is closed."""


class HttpPeer(Peer):
    """An HTTP server on a free port of 127.0.0.1, or on *port*.

    *ids_in* returns the IDs of the records in a request. *accepted* is the response to a request that the server
    accepts, and *partial* creates a response that rejects only the records with the given IDs. If *tls* is set, the
    server uses HTTPS.
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
            # During a handshake in accept, one silent client would block all other clients.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        self._server.start()
        parts = urlsplit(self._server.endpoint)
        self.address = Address(host=str(parts.hostname), port=parts.port or 0)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return all requests with their bodies decompressed."""
        with self._lock:
            return tuple(self._requests)

    @property
    def received(self) -> Sequence[Sequence[str]]:
        """Return the record IDs of each POST, PUT, or PATCH request with a body."""
        return [self._ids_in(request) for request in self.requests if request.method in _WRITES and request.body]

    def reply(self, reply: Reply) -> None:
        """Call *reply* for every request, and send the result as the response."""
        self._reply = reply

    def say(self, status: int, *, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> None:
        """Respond to every request with *status* and *body*. The default body repeats the request."""
        self._reply = lambda request: Answer(
            status=status, headers=dict(headers or {}), body=_echo(request) if body is None else body
        )

    def accept(self) -> None:
        """Respond with 200."""
        self._reply = self._accept_it

    def refuse_for_good(self) -> None:
        """Respond with 400."""
        self.say(_BAD)

    def refuse_for_now(self, retry_after_seconds: int | None = None) -> None:
        """Respond with 503, and with a Retry-After header if *retry_after_seconds* is given."""
        self.say(_BUSY, headers={} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)})

    def refuse_part(self, refused_ids: Sequence[str]) -> None:
        """Respond with the result of *partial*."""
        if self._partial is None:
            raise NotImplementedError("This peer has no `partial` function, so it cannot reject part of a batch.")
        answer = self._partial(refused_ids)
        self._reply = lambda _request: answer

    def stay_silent(self) -> None:
        """Read requests, and send no response."""
        self._reply = lambda _request: None

    def close(self) -> None:
        """Stop the server, and close every connection."""
        self._server.close()

    def __enter__(self) -> HttpPeer:  # noqa: PYI034  # Python 3.10 has no Self
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
    """Return *request* as text, with its secrets first.

    A sink's error message quotes only the start of a response. This start contains the secrets, so that a test can
    check whether the sink masks them.
    """
    headers = {name: value for name, value in request.headers.items() if name not in _DULL_HEADERS}
    authorization = headers.pop("authorization", None)
    seen = {"authorization": authorization, "path": request.path, "query": dict(request.query), "headers": headers}
    return json.dumps({**seen, "body": request.body.decode("utf-8", "replace")}).encode()
