"""Lists the requirements in PROTOCOL.md that the conformance kit checks."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Needs(Enum):
    """The setting that the kit needs to check a requirement."""

    NOTHING = "nothing"
    RECORDS_URL = "records_url"
    DOCUMENT = "document"
    DECISION = "decision"


class Sentence(NamedTuple):
    """A requirement in one sentence, and its section of PROTOCOL.md."""

    section: int
    text: str
    needs: Needs = Needs.NOTHING


class Requirement(Enum):
    """All requirements that the kit checks, in the order of PROTOCOL.md."""

    RECORD_TAKEN = Sentence(1, "The portal accepts a record.", Needs.RECORDS_URL)
    RECORD_TWICE = Sentence(1, "The portal accepts the same record again.", Needs.RECORDS_URL)
    RECORD_OF_OTHERS = Sentence(1, "A token cannot send the records of another VM.", Needs.RECORDS_URL)
    ANSWERED = Sentence(2, "The portal responds to the agent's request.")
    NO_REDIRECT = Sentence(2, "The response is not a redirect.")
    PLAIN = Sentence(2, "The body is not compressed.")
    LONGEST_WAIT = Sentence(2, "The portal accepts every wait from 1 to 600 seconds.")
    ONLY_THIS_VM = Sentence(2, "The portal refuses a request without the VM's credential.")
    OTHER_VM = Sentence(2, "A VM cannot read the decisions of another VM.")
    CHALLENGE = Sentence(2, "Each challenge has a new nonce.", Needs.DOCUMENT)
    TOKEN = Sentence(2, "A document with a challenge gets a token.", Needs.DOCUMENT)
    NO_DOCUMENT = Sentence(2, "A malformed document gets no token.", Needs.DOCUMENT)
    DOCUMENT_SIZE = Sentence(2, "A document of more than 32 KiB gets no token.", Needs.DOCUMENT)
    TAMPERED = Sentence(2, "A document that was changed gets no token.", Needs.DOCUMENT)
    REPLAYED = Sentence(2, "A document gets only one token.", Needs.DOCUMENT)
    REFUSAL = Sentence(2, "A refusal has a listed reason and the status of this reason.", Needs.DOCUMENT)
    JSON = Sentence(3, "The response is a JSON object in UTF-8.")
    CONTENT_TYPE = Sentence(3, "The Content-Type is application/json.")
    INDEX = Sentence(3, "The response has an index.")
    DECISIONS = Sentence(3, "The response has a list of decisions, and each decision is a string.")
    EPOCH = Sentence(3, "The epoch is a string, and it is the same in every response.")
    AT_ONCE = Sentence(3, "The portal responds to the first request at once, with an index.")
    HELD = Sentence(3, "The portal holds a request while there is no new decision.")
    IN_TIME = Sentence(3, "The portal responds when the wait of a request ends.")
    INDEX_STAYS = Sentence(3, "The index never decreases.")
    INDEX_AHEAD = Sentence(3, "For an index above its own, the portal responds at once with its own index.")
    NEWS = Sentence(3, "A new decision ends a held request.", Needs.DECISION)
    GROWS = Sentence(3, "The index increases with each decision.", Needs.DECISION)
    EVERY = Sentence(3, "A response contains all decisions after the index of the request.", Needs.DECISION)
    STAYS = Sentence(3, "A decision stays available until it expires.", Needs.DECISION)
    BODY_SIZE = Sentence(3, "The response has at most 1 MiB.")
    COUNT = Sentence(3, "The response has at most 1,000 decisions.")
    TOKEN_SIZE = Sentence(3, "A decision has at most 8,192 characters.", Needs.DECISION)
    KNOWN_VM = Sentence(4, "The portal responds with 200 for a VM without decisions.")
    STATUS = Sentence(4, "The status is 200, or 204 if there is no new decision.")
    FORM = Sentence(5, "A decision is a JWS with a valid signature and valid times.", Needs.DECISION)
    AUDIENCE = Sentence(5, "A decision names the VM of the request.", Needs.DECISION)
    EVENT = Sentence(5, "A decision has the EventId of the record.", Needs.DECISION)
    DIGEST = Sentence(6, "A decision has the digest of the event.", Needs.DECISION)
    HOLD = Sentence(8, "A hold is newer than the approval before it.", Needs.DECISION)
    OUTCOME = Sentence(9, "The portal accepts the record of an outcome.", Needs.DECISION)

    @property
    def key(self) -> str:
        """Return the name of the requirement in JSON output."""
        return self.name.lower().replace("_", "-")
