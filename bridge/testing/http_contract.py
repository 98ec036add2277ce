"""The contract suite for sinks that send HTTP POST requests to a simulated HTTP server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from bridge.testing.contract import SinkContract
from bridge.testing.http_peer import HttpPeer
from bridge.testing.records import sample_record
from bridge.testing.simulator.imds_api import Answer, Request

__all__ = ["Answer", "HttpPeer", "HttpSinkContract", "Request"]

_MOST_RECORDS = 3
_UUID = re.compile(rb"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class HttpSinkContract(SinkContract):
    """The contract for sinks that send HTTP POST requests.

    Write a subclass that implements `table`.
    """

    accepted: ClassVar[Answer] = Answer(status=200)
    """The response to an accepted request."""

    def peer(self) -> HttpPeer:
        """Return an HTTP server that rejects with 400 permanently and with 503 temporarily."""
        return HttpPeer(ids_in=self.ids_in, accepted=self.accepted, partial=self.partial)

    def ids_in(self, request: Request) -> Sequence[str]:
        """Return the IDs of the sample records in the headers or the body of *request*."""
        known = {sample_record(number).id for number in range(1, max(self.batch_size, _MOST_RECORDS) + 1)}
        text = b"\n".join([*(value.encode() for value in request.headers.values()), request.body])
        found = dict.fromkeys(match.decode().lower() for match in _UUID.findall(text))
        return [each for each in found if each in known]

    def partial(self, refused_ids: Sequence[str]) -> Answer:
        """Return the response that accepts a batch except for *refused_ids*.

        Return None if the protocol has no such response.
        """
        raise NotImplementedError
