"""The agent's token for a portal, got for a document in which Azure says which VM this is (PROTOCOL.md, section 2).

Three steps: the portal gives a challenge, the metadata service signs a document with that challenge in it, the portal
gives a token for the document. There is no secret on the VM, and nothing that another VM could show in its place.

The metadata service may answer with a document that it made for somebody else's challenge a while ago. The portal then
answers 409, and the service is asked again with the same challenge for as long as that counts, at most five minutes.
(A 409 to a document with this challenge in it says that the challenge does not count, and the next try has another.)
All of it happens on a thread of its own (`bridge.system.renewed_token`): who needs a token waits within a deadline.

Imported only where a configuration asks for it. No message quotes the portal, but for the word of a refusal that this
module knows; a message stays the same from try to try, so that one fault is one line in the log.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Annotated, TypeVar

import msgspec
import requests
from msgspec import Meta

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import BridgeError, CredentialFailed
from bridge.http.session import retry_after_seconds
from bridge.system.renewed_token import AccessToken, RenewedToken

logger = logging.getLogger(__name__)

#: Azure's limit for a nonce.
MAX_NONCE_CHARACTERS = 32
MAX_TOKEN_CHARACTERS = 4_096
#: No answer of these two routes is longer.
MAX_ANSWER_BYTES = 16 * 1024

CHALLENGE_PATH = "/agents/challenge"
TOKEN_PATH = "/agents/token"  # noqa: S105 - a path

_OK, _CONFLICT = 200, 409
_SAYS_WHEN = frozenset({429, 503})
_NEEDS_A_PERSON = frozenset({400, 401, 403, 404, 405, 410, 413})
_MOST_ASKING_SECONDS = 300.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 5.0, 40.0
_SHORTEST_LIFE_SECONDS, _LONGEST_LIFE_SECONDS = 60, 86_400
_RENEWED_AFTER = 2 / 3
_ADVICE = "Check that the portal takes attested documents."
_ANOTHER = "It is asked for another challenge."
_STALE = (
    "The metadata service goes on giving documents of earlier requests. It is asked again; if that does not end, let "
    'the portal take them (nonce = "preferred").'
)


class DocumentRefusal(str, Enum):
    """Why a portal gives no token for a document, in the order in which the checks run: stable words."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    NOT_ONE_SIGNER = "not_one_signer"
    UNKNOWN_SIGNER = "unknown_signer"
    TAMPERED = "tampered"
    FORGED = "forged"
    WRONG_NAME = "wrong_name"
    UNTRUSTED = "untrusted"
    OLD_NONCE = "old_nonce"
    REPLAYED = "replayed"
    TOO_OLD = "too_old"
    NOT_YET_VALID = "not_yet_valid"
    SUBSCRIPTION_NOT_LISTED = "subscription_not_listed"
    NO_VM_ID = "no_vm_id"

    @property
    def is_stale(self) -> bool:
        """Return whether a newer document of the same VM would be taken: the service is asked for one."""
        return self in {DocumentRefusal.OLD_NONCE, DocumentRefusal.REPLAYED, DocumentRefusal.TOO_OLD}


_ADVICE_FOR = {
    DocumentRefusal.SUBSCRIPTION_NOT_LISTED: "Add the VM's subscription to those that the portal lists.",
    DocumentRefusal.UNTRUSTED: "The portal does not know the authority that signed it; see its log.",
    DocumentRefusal.NOT_YET_VALID: "The portal's clock is behind; run time synchronisation there.",
}


class Challenge(msgspec.Struct, frozen=True):
    """What `POST {url}/agents/challenge` answers."""

    nonce: Annotated[str, Meta(min_length=1, max_length=MAX_NONCE_CHARACTERS, pattern=r"\A[A-Za-z0-9_-]*\Z")]
    expires_in: Annotated[int, Meta(ge=1, le=86_400)] = int(_MOST_ASKING_SECONDS)


class TokenAnswer(msgspec.Struct, frozen=True):
    """What `POST {url}/agents/token` answers to a document that counts."""

    token: Annotated[str, Meta(min_length=1, max_length=MAX_TOKEN_CHARACTERS, pattern=r"\A[!-~]*\Z")]
    expires_in: Annotated[int, Meta(ge=_SHORTEST_LIFE_SECONDS, le=_LONGEST_LIFE_SECONDS)]


#: Posts a body of JSON to a path below the portal's URL; raises a BridgeError when no answer comes.
Post = Callable[[str, bytes], requests.Response]
#: Returns the attested document with a nonce in it, in base64; raises a BridgeError when there is none.
DocumentSource = Callable[[str], str]

_AnswerT = TypeVar("_AnswerT", bound=msgspec.Struct)


class AttestedToken(RenewedToken):
    """The token that *post* gets of a portal for what *document* returns; messages call the portal *portal*.

    It is renewed when two thirds of its life are over, and when it was refused.
    """

    def __init__(
        self,
        post: Post,
        document: DocumentSource,
        *,
        portal: str,
        clock: Clock = REAL_CLOCK,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        super().__init__(
            self._attest,
            source=f"The portal at {portal}",
            advice=_ADVICE,
            clock=clock,
            most_fetches=1,  # a second one would ask the metadata service at the same time
            renewed_after=_RENEWED_AFTER,
            silence="It is asked on.",
            thread_name="attested-token",
        )
        self._post = post
        self._document = document
        self._portal = portal
        self._wait = wait
        self._stop = threading.Event()

    def close(self) -> None:
        """Break off the wait of another thread, and ask for nothing any more."""
        self._stop.set()
        super().close()

    def _attest(self) -> AccessToken:
        try:
            challenge = self._read(self._answered(CHALLENGE_PATH, b"{}"), Challenge)
            return self._token_for(challenge)
        except CredentialFailed:
            raise
        except BridgeError as error:
            needs_attention = bool(getattr(error, "needs_attention", False))
            raise CredentialFailed(str(error), needs_attention=needs_attention) from error

    def _token_for(self, challenge: Challenge) -> AccessToken:
        """Return the token for a document with *challenge* in it; ask for another while the portal calls it stale."""
        ends_at = self._clock.monotonic() + min(challenge.expires_in, _MOST_ASKING_SECONDS)
        wait_seconds = _FIRST_WAIT_SECONDS
        while True:
            document = self._document(challenge.nonce)
            body = json.dumps({"document": document}).encode()
            asked_at = self._clock.timestamp()
            response = self._answered(TOKEN_PATH, body, statuses=(_OK, _CONFLICT))
            if response.status_code == _OK:
                answer = self._read(response, TokenAnswer)
                return AccessToken(answer.token, int(asked_at + answer.expires_in))
            if _has_nonce(document, challenge.nonce):
                raise self._refused(response)  # and not for the service's sake: the challenge counts no more
            if wait_seconds == _FIRST_WAIT_SECONDS:
                logger.info(
                    "The metadata service gave an attested document of an earlier request. It is asked again.",
                    extra={"portal": self._portal},
                )
            if self._clock.monotonic() + wait_seconds > ends_at:
                raise self._refused(response, is_repeated=True)
            if self._wait(self._stop, wait_seconds):
                raise CredentialFailed(f"The portal at {self._portal} is not asked any more.", needs_attention=False)
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)

    def _answered(self, path: str, body: bytes, *, statuses: tuple[int, ...] = (_OK,)) -> requests.Response:
        """Return the answer to *body* when its status is one of *statuses*; raise CredentialFailed otherwise."""
        if self._stop.is_set():
            raise CredentialFailed(f"The portal at {self._portal} is not asked any more.", needs_attention=False)
        response = self._post(path, body)
        if response.status_code in statuses:
            return response
        raise self._refused(response, path)

    def _refused(
        self, response: requests.Response, path: str = TOKEN_PATH, *, is_repeated: bool = False
    ) -> CredentialFailed:
        status, refusal = response.status_code, _refusal_in(response)
        shown = f"{status} {http.client.responses.get(status, '')}".rstrip()
        why = "" if refusal is None else f" ({refusal.value})"
        advice = _ADVICE if refusal is None else _ADVICE_FOR.get(refusal, "")
        if status == _CONFLICT:
            advice = _STALE if is_repeated else _ANOTHER
        return CredentialFailed(
            f"The portal at {self._portal} answered {shown} to {path}{why}. {advice}".rstrip(),
            needs_attention=status in _NEEDS_A_PERSON or is_repeated,
            retry_after_seconds=retry_after_seconds(response.headers) if status in _SAYS_WHEN else None,
        )

    def _read(self, response: requests.Response, kind: type[_AnswerT]) -> _AnswerT:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CredentialFailed(
                f"The portal at {self._portal} answered 200 with a body that is no {kind.__name__} (PROTOCOL.md, "
                "section 2), and not used.",
                needs_attention=True,
            ) from error


def _has_nonce(document: str, nonce: str) -> bool:
    """Return whether *nonce* stands in *document*: what a document says is in it as plain text."""
    try:
        return nonce.encode() in base64.b64decode(document)
    except ValueError:
        return False


def _refusal_in(response: requests.Response) -> DocumentRefusal | None:
    """Return the word of *response*, None when it has none that is known."""
    try:
        value = json.loads(response.content)
        return DocumentRefusal(value["reason"]) if isinstance(value, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
