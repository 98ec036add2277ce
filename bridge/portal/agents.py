"""Issues a token to each agent that proves its VM's identity (PROTOCOL.md, section 2).

One route returns a challenge. The other route accepts an attested document that contains the challenge, and returns a
token. Neither route requires credentials, so the portal limits each body to 64 KiB. It verifies at most four documents
at a time, and at most two from each address block. Addresses from which an agent got a token earlier have a separate
queue with the same limits, so that unknown clients do not delay renewals. If too many documents are waiting, the portal
responds with 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bridge.clock import Clock, format_time
from bridge.errors import SecretUnavailable
from bridge.logs import ThrottledLog
from bridge.portal.addresses import AddressQueue, QueueFull, address_of
from bridge.portal.agent_tokens import (
    CHALLENGE_SECONDS,
    KEPT_SECONDS,
    LEAST_SECRET_CHARACTERS,
    TOKEN_SECONDS,
    AgentTokens,
    Challenges,
)
from bridge.portal.attested import DocumentRefused, DocumentVerifier
from bridge.portal.certificate_chain import IntermediateCertificates, azure_roots, certificates_in
from bridge.portal.requests import error_answer, json_answer, json_of
from bridge.portal.settings import AttestedSettings
from bridge.portal.store.agents import take_document
from bridge.portal.store.database import Store
from bridge.system.access_tokens import CHALLENGE_PATH, TOKEN_PATH, DocumentRefusal

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
_THREADS = 4
_MOST_KNOWN = 50_000
#: All other refusals have the status 403.
_STATUSES = {
    DocumentRefusal.TOO_LARGE: 413,
    DocumentRefusal.MALFORMED: 400,
    **{refusal: 409 for refusal in DocumentRefusal if refusal.is_stale},
}


class _TokenRequest(msgspec.Struct, frozen=True):
    document: str


class AgentRoutes:
    """Serves the challenge and token routes. *documents* counts documents by result."""

    def __init__(self, settings: AttestedSettings, *, documents: Counter, clock: Clock, store: Store) -> None:
        self._clock = clock
        self._store = store
        self._secret = settings.secret()
        self._challenges = Challenges(self._secrets, clock)
        self.tokens = AgentTokens(self._secrets, clock)
        self._verifier = DocumentVerifier(
            roots=azure_roots() if settings.roots_file is None else certificates_in(Path(settings.roots_file)),
            subscriptions=settings.subscriptions,
            challenges=self._challenges,
            take_document=self._take_document,
            intermediates=IntermediateCertificates(
                clock=clock,
                base_urls=settings.intermediates_urls,
                known=() if settings.intermediates_file is None else certificates_in(Path(settings.intermediates_file)),
            ),
            clock=clock,
            nonce=settings.nonce,
        )
        self._documents = documents
        self._log = ThrottledLog(logger, clock=clock)
        # Separate threads, because a slow download of a certificate must not delay records.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="attested")
        queue = partial(AddressQueue, running=_THREADS, running_of_block=2, waiting=2_000, waiting_of_block=250)
        self._renewals, self._others = queue(), queue()
        self._known: OrderedDict[str, None] = OrderedDict()
        """The addresses from which an agent got a token, with the newest at the end."""

    def routes(self, root: str) -> list[Route]:
        """Return the routes below *root*."""
        return [
            Route(f"{root}{CHALLENGE_PATH}", self.challenge, methods=["POST"], name="challenge"),
            Route(f"{root}{TOKEN_PATH}", self.token, methods=["POST"], name="token"),
        ]

    def close(self) -> None:
        """Cancel the waiting verifications. Running verifications end within seconds."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def challenge(self, request: Request) -> Response:
        """Return a new challenge. The portal does not read the body of *request*."""
        del request
        return json_answer({"nonce": self._challenges.new(), "expires_in": CHALLENGE_SECONDS})

    async def token(self, request: Request) -> Response:
        """Return a token for the VM of the document in *request*, or the refusal reason."""
        try:
            wanted = await json_of(request, _TokenRequest, most_bytes=MAX_BODY_BYTES)
            token = await self._token_for(wanted.document, address_of(request))
        except DocumentRefused as refused:
            return self._refused(refused)
        except QueueFull:
            self._documents.labels("busy").inc()
            return error_answer(503, "Too many documents are waiting for verification.")
        self._documents.labels("accepted").inc()
        return json_answer({"token": token, "expires_in": TOKEN_SECONDS})

    async def _token_for(self, document: str, address: str) -> str:
        queue = self._renewals if address in self._known else self._others
        async with queue.turn(address):
            loop = asyncio.get_running_loop()
            vm_id = await loop.run_in_executor(self._threads, self._verifier.vm_of, document)
        self._known[address] = None
        self._known.move_to_end(address)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return self.tokens.new(vm_id)

    def _take_document(self, vm_id: str, nonce: str) -> bool:
        now = self._clock.now()
        until = format_time(now + timedelta(seconds=KEPT_SECONDS))
        return self._store.write(take_document, vm_id, nonce, at=format_time(now), until=until)

    def _refused(self, refused: DocumentRefused) -> Response:
        reason = refused.reason
        self._documents.labels(reason.value).inc()
        message = f"An attested document was refused: {refused}"
        self._log.problem(reason, logging.WARNING, message, reason=reason.value)
        return json_answer({"error": str(refused), "reason": reason.value}, status=_STATUSES.get(reason, 403))

    def _secrets(self) -> Sequence[str]:
        found = self._secret.values()
        if min(map(len, found)) < LEAST_SECRET_CHARACTERS:
            raise SecretUnavailable(
                f"A secret of agents.attested.secret has fewer than {LEAST_SECRET_CHARACTERS} characters. Create one "
                "with: head -c 32 /dev/urandom | base64"
            )
        return found
