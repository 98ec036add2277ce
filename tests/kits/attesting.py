"""A stub of the part of a portal that issues tokens for attested documents, without verification.

The stub finds the plain content in the document and parses no PKCS#7. `bridge.portal.attested` verifies documents and
has its own tests.
"""

from __future__ import annotations

import base64
import json
import re
import threading

from bridge.testing.simulator.imds_api import Answer, Request, error

_CONTENT = re.compile(rb'\{"licenseType".*?"vmId":"[^"]*"\}')


class Attesting:
    """Responses below `/api/v1`: challenges, tokens, and records with an issued token."""

    def __init__(self) -> None:
        self.refuses: list[tuple[int, str]] = []
        """The status and reason that reject the next documents."""
        self.challenges: list[str] = []
        self.documents: list[dict[str, str]] = []
        """The contents of all received documents, including rejected ones."""
        self.tokens: dict[str, str] = {}
        """The vmId of each valid token. A removed token is rejected."""
        self.records: list[tuple[str, dict[str, object]]] = []
        """The token and the record of each accepted request."""
        self._lock = threading.Lock()

    def vm_of(self, request: Request) -> str | None:
        """Return the vmId of the token in *request*."""
        return self.tokens.get(request.headers.get("authorization", "").removeprefix("Bearer "))

    def answer(self, request: Request) -> Answer:
        """Return the response to a POST."""
        with self._lock:
            path = request.path.removeprefix("/api/v1")
            if request.method != "POST":
                return error(405, "POST it.")
            if path == "/agents/challenge":
                self.challenges.append(f"challenge{len(self.challenges):04}")
                return _json({"nonce": self.challenges[-1], "expires_in": 360})
            if path == "/agents/token":
                return self._token(request)
            return self._record(request)

    def _token(self, request: Request) -> Answer:
        found = _CONTENT.search(base64.b64decode(json.loads(request.body)["document"]))
        assert found is not None, "the document is not from the simulator"
        content = json.loads(found[0])
        self.documents.append(content)
        if self.refuses:
            status, reason = self.refuses.pop(0)
            return _json({"error": "It is refused.", "reason": reason}, status=status)
        if content["nonce"] not in self.challenges:
            return _json({"error": "Its nonce is old.", "reason": "old_nonce"}, status=409)
        token = f"token-{len(self.documents)}"
        self.tokens[token] = content["vmId"]
        return _json({"token": token, "expires_in": 3600})

    def _record(self, request: Request) -> Answer:
        if self.vm_of(request) is None:
            return error(401, "This token is not known.")
        token = request.headers["authorization"].removeprefix("Bearer ")
        self.records.append((token, json.loads(request.body)["data"]))
        return Answer(status=204)


def _json(value: object, *, status: int = 200) -> Answer:
    return Answer(status=status, body=json.dumps(value).encode())
