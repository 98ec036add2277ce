"""The sentences of PROTOCOL.md that a portal is held to, each with its section and the words of the page.

A test looks each quote up in the page, so that neither can change alone.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Sentence(NamedTuple):
    """One sentence: where it stands, what it asks for in our words, and in the page's."""

    section: int
    text: str
    quote: str


class Requirement(Enum):
    """Everything that the kit looks at, in the order of the page."""

    RECORD_TAKEN = Sentence(1, "A record is taken.", "Answer `2xx` with any body once the record")
    RECORD_TWICE = Sentence(1, "A record that comes again is taken too.", "A record may come twice, with the same `id`")
    RECORD_OF_OTHERS = Sentence(
        1, "A record of another VM than the token's is refused.", "answer `403` to a record with another `vm.vm_id`"
    )
    ANSWERED = Sentence(2, "The agent's request is answered.", "GET {url}/vms/{vmId}/decisions?index=17&wait=30")
    NO_REDIRECT = Sentence(2, "It is answered by the URL itself.", "follows no redirect")
    PLAIN = Sentence(
        2,
        "The body comes as it is, not compressed.",
        "It does not use a `200` response with another `Content-Encoding`",
    )
    LONGEST_WAIT = Sentence(2, "Every wait is understood.", "a whole number from 1 to 600")
    ONLY_THIS_VM = Sentence(
        2, "Who shows no token, or another, is refused.", "SHOULD answer only a caller that is this VM"
    )
    OTHER_VM = Sentence(
        2, "Nobody gets the decisions of a VM that is not theirs.", "SHOULD answer only a caller that is this VM"
    )
    CHALLENGE = Sentence(2, "Each challenge is a nonce of its own.", "1 to 32 of the characters `A` to `Z`")
    TOKEN = Sentence(2, "A document with a challenge in it gets a token.", "1 to 4,096 visible ASCII characters")
    NO_DOCUMENT = Sentence(
        2, "What is no document gets no token.", "It is not base64, contains no `SignedData` with a content"
    )
    DOCUMENT_SIZE = Sentence(2, "A document of more than 32 KiB gets no token.", "It has more than 32 KiB.")
    TAMPERED = Sentence(
        2, "A document that was changed gets no token.", "The signature is not valid for the key of that certificate"
    )
    REPLAYED = Sentence(2, "A document gets a token once.", "A document of this VM with this nonce was taken before")
    REFUSAL = Sentence(
        2, "A refusal has its word, and the status that goes with it.", "A refusal of a document has the body `{"
    )
    JSON = Sentence(
        3,
        "The answer is a JSON object in UTF-8.",
        "a JSON object in UTF-8, without a byte order mark and without duplicate members",
    )
    CONTENT_TYPE = Sentence(3, "Its Content-Type is application/json.", "Send the `Content-Type` `application/json`")
    INDEX = Sentence(3, "It has an index.", "An integer from 1 to 2^53 - 1")
    DECISIONS = Sentence(3, "It has a list of decisions, each a text.", "Each text is one [decision](#5-the-decision).")
    EPOCH = Sentence(3, "Its epoch is a text, and the same in every answer.", "SHOULD send it in every answer")
    AT_ONCE = Sentence(3, "The first request is answered at once, with the index.", "`index=0`: answer at once")
    HELD = Sentence(
        3,
        "While there is nothing new, a request is held.",
        "There is no decision after `index`: keep the request open.",
    )
    IN_TIME = Sentence(3, "It is answered when its wait is over.", "or after `wait` seconds with the same index")
    INDEX_STAYS = Sentence(3, "The index never falls.", "with the same index and an empty list")
    INDEX_AHEAD = Sentence(
        3,
        "An index ahead of the portal's own is answered at once, with the lower one.",
        "answer at once with the lower index",
    )
    NEWS = Sentence(
        3, "A new decision ends the request that is held.", "There is a decision after `index`: answer at once."
    )
    GROWS = Sentence(3, "The index grows with each decision.", "It MUST grow whenever a decision for this VM is added")
    EVERY = Sentence(
        3,
        "A decision comes to everybody who has not seen its index.",
        "MUST have every decision for this VM that has not expired",
    )
    STAYS = Sentence(3, "A decision stays until it expires.", "a decision stays available until it")
    BODY_SIZE = Sentence(3, "The answer has at most 1 MiB.", "| body of an answer | 1 MiB |")
    COUNT = Sentence(3, "The answer has at most 1,000 decisions.", "| decisions in an answer | 1,000 |")
    TOKEN_SIZE = Sentence(3, "A decision has at most 8,192 characters.", "| one decision | 8,192 characters |")
    KNOWN_VM = Sentence(4, "The VM is known, decisions or not.", "For a VM without decisions, answer `200`.")
    STATUS = Sentence(4, "The status is 200, or 204 for nothing new.", "any other status")
    FORM = Sentence(
        5, "A decision is signed, in the one form there is, for the time it says.", "a JWS in compact form (RFC 7515)"
    )
    AUDIENCE = Sentence(5, "A decision is for the VM that asks.", "The value is one text, not a list.")
    EVENT = Sentence(5, "A decision names the event as it came.", "The event's `EventId`, exactly as in the record.")
    DIGEST = Sentence(
        6, "Its digest is that of the event.", "The digest connects the decision with the event that a person saw."
    )
    HOLD = Sentence(
        8, "A hold comes like an approval, and is newer.", "Between a `hold` and an `approve` the newer `iat` wins"
    )
    OUTCOME = Sentence(
        9, "The outcome is taken as a record.", "The agent writes a record for each attempt to approve an event"
    )

    @property
    def key(self) -> str:
        """Return how a program calls it."""
        return self.name.lower().replace("_", "-")
