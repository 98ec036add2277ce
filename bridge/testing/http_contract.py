"""The contract suite for a sink that POSTs to a URL, with the peer that it needs."""

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
    """The suite for a sink that POSTs; a subclass fills in `table`."""

    accepted: ClassVar[Answer] = Answer(status=200)
    """What the peer answers to what it accepts."""

    def peer(self) -> HttpPeer:
        """Return an HTTP endpoint; a 400 refuses for good, a 503 for now."""
        return HttpPeer(ids_in=self.ids_in, accepted=self.accepted, partial=self.partial)

    def ids_in(self, request: Request) -> Sequence[str]:
        """Return the record ids in *request*: the known ones among all UUIDs of its headers and body."""
        known = {sample_record(number).id for number in range(1, max(self.batch_size, _MOST_RECORDS) + 1)}
        text = b"\n".join([*(value.encode() for value in request.headers.values()), request.body])
        found = dict.fromkeys(match.decode().lower() for match in _UUID.findall(text))
        return [each for each in found if each in known]

    def partial(self, refused_ids: Sequence[str]) -> Answer:
        """Return the answer that accepts a batch but for *refused_ids*; skip the case where there is none."""
        raise NotImplementedError
