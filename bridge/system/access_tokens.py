"""Gets access tokens for this VM from Entra ID or from an ops portal.

A background thread requests the token and renews it after two thirds of its lifetime. Callers wait only if there is no
valid token. If a caller's deadline passes, the request continues so that later callers can use the token.

An ops portal issues a token in three steps (PROTOCOL.md, section 2). First, the portal returns a challenge. Then,
Azure's metadata service signs a document that contains the challenge. Finally, the portal returns a token in exchange
for this document.

Error messages never contain tokens. From a portal's response, they contain only the status and a refusal reason that
this module defines. A repeated failure therefore has the same message each time, and the agent logs it only once.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from bridge.clock import REAL_CLOCK, Clock
from bridge.errors import BridgeError, CredentialFailed
from bridge.http.retry_after import retry_after_seconds
from bridge.system.threads import run_daemon
from bridge.text import EXCERPT_CHARACTERS, one_line

if TYPE_CHECKING:
    import requests

_RENEWED_AFTER = 2 / 3
_RETRY_SECONDS = 5.0
#: After the agent replaces a refused token, it keeps the new one for this time, even if the service refuses it too.
_REPLACEMENT_SECONDS = 300.0

_ENTRA_READ_SECONDS = 10.0
_ENTRA_CONNECT_SECONDS = 5.0

#: Azure's limit for a nonce.
MAX_NONCE_CHARACTERS = 32
MAX_TOKEN_CHARACTERS = 4_096
#: The size limit for responses of the two routes.
MAX_ANSWER_BYTES = 16 * 1024
CHALLENGE_PATH = "/agents/challenge"
TOKEN_PATH = "/agents/token"  # noqa: S105 - a path

_OK, _CONFLICT = 200, 409
_NEEDS_A_PERSON = frozenset({400, 401, 403, 404, 405, 410, 413})
_MAX_CHALLENGE_SECONDS = 300.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 5.0, 40.0
_ADVICE = "Check that the portal accepts attested documents."
_STALE = (
    "The metadata service still returns documents from earlier requests. The agent tries again. If the problem "
    'persists, set nonce = "preferred" on the portal.'
)


class AccessToken(NamedTuple):
    """A token and its expiry in Unix seconds, as azure-core's AccessToken names them."""

    token: str
    expires_on: int


class RenewedToken:
    """A token that a background thread renews.

    *fetch* requests a token, and may hang or raise any exception. Error messages name *source*, the issuer of the
    token. If *fetch* raises an exception other than CredentialFailed, the message also contains *advice*.
    """

    def __init__(
        self, fetch: Callable[[], AccessToken], *, source: str, advice: str = "", clock: Clock = REAL_CLOCK
    ) -> None:
        self._fetch = fetch
        self._source = source
        self._advice = advice
        self._clock = clock
        self._lock = threading.Lock()
        self._token: AccessToken | None = None
        self._renew_at = 0.0
        self._refused_at = -_REPLACEMENT_SECONDS
        self._fetching: Future[AccessToken] | None = None
        self._closed: Future[Any] = Future()

    def current(self, *, wait_seconds: float) -> AccessToken:
        """Return a valid token. Raise CredentialFailed if there is none within *wait_seconds*."""
        token, now = self._token, self._clock.timestamp()
        if token is None or now >= token.expires_on:
            return self._awaited(wait_seconds)
        if now >= self._renew_at:
            self._begin()
        return token

    def forget(self) -> None:
        """Drop the token, because the service has refused it."""
        self._token = None

    def refuse(self, token: AccessToken) -> bool:
        """Discard the refused *token*, but at most once in five minutes.

        Return whether the next request uses another token.
        """
        now = self._clock.monotonic()
        if token == self._token and now - self._refused_at >= _REPLACEMENT_SECONDS:
            self._refused_at = now
            self.forget()
        return token != self._token

    def close(self) -> None:
        """Wake all waiting threads. A running request is not canceled."""
        with self._lock:
            if not self._closed.done():
                self._closed.set_result(None)

    def _begin(self) -> Future[AccessToken]:
        with self._lock:
            if self._fetching is None or self._fetching.done():
                self._renew_at = self._clock.timestamp() + _RETRY_SECONDS  # if this request fails
                self._fetching = run_daemon("access-token", self._fetched)
            return self._fetching

    def _fetched(self) -> AccessToken:
        token = self._fetch()
        now = self._clock.timestamp()
        self._renew_at = now + max(_RETRY_SECONDS, (token.expires_on - now) * _RENEWED_AFTER)
        self._token = token
        return token

    def _awaited(self, seconds: float) -> AccessToken:
        fetching = self._begin()
        wait([fetching, self._closed], max(0.0, seconds), return_when=FIRST_COMPLETED)
        if not fetching.done():
            raise CredentialFailed(f"{self._source} returned no token within {seconds:.2g} s.", needs_attention=False)
        error = fetching.exception()
        if error is None:
            return fetching.result()
        if isinstance(error, CredentialFailed):
            raise error
        # The other lines contain IDs and times, so each log line would differ.
        reason = str(error).strip().partition("\n")[0].partition(" Trace ID:")[0]
        raise CredentialFailed(
            f"{self._source} returned no token: {one_line(reason, EXCERPT_CHARACTERS)} {self._advice}",
            needs_attention=True,
        ) from error


def token_of(scope: str, *, key: str) -> RenewedToken:
    """Return the token for *scope* of the VM's identity. Error messages name the key *key*."""
    return RenewedToken(
        partial(fetch_token, scope, client_id=os.environ.get("AZURE_CLIENT_ID") or None),
        source=f"Entra ID ({key})",
        advice="Check the scope, and that this VM has a managed identity.",
    )


def fetch_token(scope: str, *, client_id: str | None = None, is_default: bool = False) -> AccessToken:
    """Return a new token from the VM's managed identity or Kubernetes workload identity.

    *client_id* selects a user-assigned identity. If *is_default* is True, azure-identity uses the first credential that
    it finds. Tokens are not cached, because a cache could return a rejected token again.
    """
    import requests  # noqa: PLC0415  # these imports take 11 to 20 MB and a second
    from azure.core.pipeline.transport import RequestsTransport  # noqa: PLC0415  # likewise
    from azure.identity import DefaultAzureCredential, ManagedIdentityCredential  # noqa: PLC0415  # likewise

    # Azure gives each VM its own token, so a request through a proxy would return a token for the proxy's VM. Only
    # workload identity requests the token from a public address.
    uses_proxies = is_default or bool(os.environ.get("AZURE_FEDERATED_TOKEN_FILE"))
    with requests.Session() as session:
        session.trust_env = uses_proxies
        # azure-core waits 300 s for a response by default.
        options: dict[str, Any] = {
            "connection_timeout": _ENTRA_CONNECT_SECONDS,
            "read_timeout": _ENTRA_READ_SECONDS,
            "retry_total": 0,
        }
        # The credentials in a chain share the session, so no credential may close it.
        options["transport"] = RequestsTransport(session=session, session_owner=False, **options)
        if is_default:
            made: Any = DefaultAzureCredential(managed_identity_client_id=client_id, **options)
        else:
            made = ManagedIdentityCredential(client_id=client_id, **options)
        with made as credential:
            found = credential.get_token(scope if scope.endswith("/.default") else f"{scope}/.default")
    return AccessToken(found.token, int(found.expires_on))


class DocumentRefusal(str, Enum):
    """The reasons why a portal refuses a document, in the order of its checks (PROTOCOL.md)."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    NOT_ONE_SIGNER = "not_one_signer"
    UNKNOWN_SIGNER = "unknown_signer"
    TAMPERED = "tampered"
    FORGED = "forged"
    WRONG_NAME = "wrong_name"
    UNTRUSTED = "untrusted"
    OLD_NONCE = "old_nonce"
    NOT_YET_VALID = "not_yet_valid"
    TOO_OLD = "too_old"
    SUBSCRIPTION_NOT_LISTED = "subscription_not_listed"
    NO_VM_ID = "no_vm_id"
    REPLAYED = "replayed"

    @property
    def is_stale(self) -> bool:
        """Return whether the portal would accept a newer document of the same VM."""
        return self in {DocumentRefusal.OLD_NONCE, DocumentRefusal.REPLAYED, DocumentRefusal.TOO_OLD}


_ADVICE_FOR = {
    DocumentRefusal.SUBSCRIPTION_NOT_LISTED: "Add the VM's subscription to the portal's list.",
    DocumentRefusal.UNTRUSTED: "The portal does not trust the signing authority; see its log.",
    DocumentRefusal.NOT_YET_VALID: "The portal's clock is behind; run time synchronization there.",
}


class Challenge(msgspec.Struct, frozen=True):
    """The response to `POST {url}/agents/challenge`."""

    nonce: Annotated[str, Meta(min_length=1, max_length=MAX_NONCE_CHARACTERS, pattern=r"\A[A-Za-z0-9_-]*\Z")]
    expires_in: Annotated[int, Meta(ge=1, le=86_400)] = int(_MAX_CHALLENGE_SECONDS)


class TokenAnswer(msgspec.Struct, frozen=True):
    """The response to `POST {url}/agents/token` with a valid document."""

    token: Annotated[str, Meta(min_length=1, max_length=MAX_TOKEN_CHARACTERS, pattern=r"\A[!-~]*\Z")]
    expires_in: Annotated[int, Meta(ge=60, le=86_400)]


# msgspec crashes if two threads use a class for the first time at once, so a decoder uses it during the import.
_CHALLENGE = msgspec.json.Decoder(Challenge)
_TOKEN_ANSWER = msgspec.json.Decoder(TokenAnswer)


#: Sends a JSON body to a path below the portal's URL. Raises BridgeError if the portal does not respond.
Post = Callable[[str, bytes], "requests.Response"]
#: Returns the attested document with a nonce in base64. Raises BridgeError if IMDS returns no document.
DocumentSource = Callable[[str], str]

_AnswerT = TypeVar("_AnswerT", bound=msgspec.Struct)


class AttestedToken(RenewedToken):
    """A token that *portal* issues after it has verified an attested document of this VM.

    *document* returns an attested document for a nonce. Azure's metadata service can return an outdated document, which
    the portal rejects with status 409. The agent then requests another document for the same challenge, until the
    challenge expires or five minutes have passed.
    """

    def __init__(
        self,
        post: Post,
        document: DocumentSource,
        *,
        portal: str,
        clock: Clock = REAL_CLOCK,
        pause: Callable[[Collection[Future[Any]], float], object] = wait,
    ) -> None:
        super().__init__(self._attest, source=f"The portal at {portal}", clock=clock)
        self._post = post
        self._document = document
        self._pause = pause

    def _attest(self) -> AccessToken:
        try:
            return self._token_for(self._read(self._response(CHALLENGE_PATH, b"{}"), _CHALLENGE))
        except CredentialFailed:
            raise
        except BridgeError as error:
            needs_attention = bool(getattr(error, "needs_attention", False))
            raise CredentialFailed(str(error), needs_attention=needs_attention) from error

    def _token_for(self, challenge: Challenge) -> AccessToken:
        ends_at = self._clock.monotonic() + min(challenge.expires_in, _MAX_CHALLENGE_SECONDS)
        wait_seconds = _FIRST_WAIT_SECONDS
        while True:
            document = self._document(challenge.nonce)
            asked_at = self._clock.timestamp()
            response = self._response(TOKEN_PATH, json.dumps({"document": document}).encode())
            if response.status_code == _OK:
                found = self._read(response, _TOKEN_ANSWER)
                return AccessToken(found.token, int(asked_at + found.expires_in))
            if has_nonce(document, challenge.nonce):
                raise self._refused(response, TOKEN_PATH, "The next attempt uses another challenge.")
            if self._clock.monotonic() + wait_seconds > ends_at:
                raise self._refused(response, TOKEN_PATH, _STALE)
            self._pause([self._closed], wait_seconds)
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)

    def _response(self, path: str, body: bytes) -> requests.Response:
        if self._closed.done():
            raise CredentialFailed(f"{self._source}: the request was canceled.", needs_attention=False)
        response = self._post(path, body)
        if response.status_code == _OK or (response.status_code == _CONFLICT and path == TOKEN_PATH):
            return response
        refusal = refusal_in(response.content)
        raise self._refused(response, path, _ADVICE if refusal is None else _ADVICE_FOR.get(refusal, ""))

    def _refused(self, response: requests.Response, path: str, advice: str) -> CredentialFailed:
        status, refusal = response.status_code, refusal_in(response.content)
        shown = f"{status} {http.client.responses.get(status, '')}".rstrip()
        why = "" if refusal is None else f" ({refusal.value})"
        return CredentialFailed(
            f"{self._source} responded with {shown} to {path}{why}. {advice}".rstrip(),
            needs_attention=status in _NEEDS_A_PERSON or advice is _STALE,
            retry_after_seconds=retry_after_seconds(response.headers),
        )

    def _read(self, response: requests.Response, decoder: msgspec.json.Decoder[_AnswerT]) -> _AnswerT:
        try:
            return decoder.decode(response.content)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CredentialFailed(
                f"{self._source} responded with 200 and a body that is not a valid {decoder.type.__name__} "
                "(PROTOCOL.md, section 2).",
                needs_attention=True,
            ) from error


def has_nonce(document: str, nonce: str) -> bool:
    """Return whether *document*, whose signed content is plain text, contains *nonce*."""
    try:
        return nonce.encode() in base64.b64decode(document)
    except ValueError:
        return False


def refusal_in(body: bytes) -> DocumentRefusal | None:
    """Return the `reason` in *body*, or None if it has no known reason."""
    try:
        value = json.loads(body)
        return DocumentRefusal(value["reason"]) if isinstance(value, dict) else None
    except (ValueError, KeyError, RecursionError):
        return None
