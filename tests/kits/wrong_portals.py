"""Portals that each break one requirement of PROTOCOL.md."""

from __future__ import annotations

import gzip
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outside_portal import Signer
from small_portal import Asked, Said, SmallPortal

from bridge.testing.portal_check.requirements import Requirement

LATE_SECONDS = 1.0
"""The tests allow this delay of a response."""


def announced(vm_id: str) -> Mapping[str, Any]:
    """Return a record of an event, with the fields that a decision needs."""
    fields = {"event_type": "Freeze", "event_source": "Platform", "duration_seconds": 5}
    event = {"event_id": "E-1", "resources": ["vm"], "not_before_raw": "", **fields}
    return {"vm": {"vm_id": vm_id}, "event": event}


class NoIndex(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return super().body({name: value[name] for name in ("decisions", "epoch")})


class IndexThatFalls(SmallPortal):
    newest = 1000

    def value(self, asked: Asked) -> dict[str, Any]:
        found = super().value(asked)
        self.fallen = getattr(self, "fallen", 0) + 1
        return {**found, "index": 1000 - self.fallen}

    def is_due(self, asked: Asked) -> bool:
        return not asked.index or asked.index > 1000


class AnswersLate(SmallPortal):
    def value(self, asked: Asked) -> dict[str, Any]:
        found = super().value(asked)
        time.sleep(0 if self.is_due(asked) else LATE_SECONDS + 1)
        return found


class AsksForNoToken(SmallPortal):
    def refused(self, asked: Asked) -> Said | None:
        return None if asked.vm_id == self.vm_id else Said(403)


class GivesAnybodysDecisions(SmallPortal):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.put(self.signer.decide(announced(self.vm_id)))

    def refused(self, asked: Asked) -> Said | None:
        return None if asked.token == f"Bearer {self.token}" else Said(401)


class DecisionsOfAnotherVm(SmallPortal):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.put(self.signer.decide(announced(str(uuid.uuid4()))))


class MemberTwice(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return super().body(value)[:-1] + b', "index": 1}'


class NoContentType(SmallPortal):
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "text/html"}


class DecisionsThatAreNull(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return super().body({**value, "decisions": value["decisions"] or None})


class EpochThatChanges(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return super().body({**value, "epoch": str(uuid.uuid4())})


class HoldsTheFirst(SmallPortal):
    def is_due(self, asked: Asked) -> bool:
        return bool(asked.index) and super().is_due(asked)


class NoLongPoll(SmallPortal):
    def is_due(self, _asked: Asked) -> bool:
        return True


class HoldsAnIndexAhead(SmallPortal):
    def is_due(self, asked: Asked) -> bool:
        return not asked.index or bool(self.after(asked.index))


class TellsWhenTheWaitIsOver(SmallPortal):
    def value(self, asked: Asked) -> dict[str, Any]:
        if not self.is_due(asked):
            time.sleep(asked.wait_seconds)
        return super().value(replace(asked, wait_seconds=0))


class IndexThatStays(SmallPortal):
    def value(self, asked: Asked) -> dict[str, Any]:
        return {**super().value(asked), "index": 1}

    def is_due(self, asked: Asked) -> bool:
        return not asked.index or asked.index > 1 or len(self.decisions) > self.told(asked)

    count = 0

    def told(self, _asked: Asked) -> int:
        told, self.count = self.count, len(self.decisions)
        return told


class ForgetsWhatItGave(SmallPortal):
    def value(self, asked: Asked) -> dict[str, Any]:
        found = super().value(asked)
        self.decisions.clear()
        return found


class LeavesOutWhatWasThere(SmallPortal):
    def after(self, index: int) -> list[str]:
        return super().after(index) if index else []


class BodyTooLarge(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return super().body({**value, "padding": "x" * 1_100_000})


class TooManyDecisions(SmallPortal):
    def after(self, index: int) -> list[str]:
        return super().after(index) if index else ["x"] * 1_001


class DecisionTooLong(SmallPortal):
    def after(self, index: int) -> list[str]:
        return super().after(index) if index else ["x" * 8_193]


class Redirects(SmallPortal):
    def polled(self, _asked: Asked) -> Said | None:
        return Said(302, headers={"Location": "https://login.example.net/"})


class NotModified(SmallPortal):
    def polled(self, _asked: Asked) -> Said | None:
        return Said(304)


class HangsUp(SmallPortal):
    def polled(self, _asked: Asked) -> Said | None:
        return None


class GzipBomb(SmallPortal):
    def body(self, value: dict[str, Any]) -> bytes:
        return gzip.compress(super().body({**value, "padding": " " * 10_000_000}))

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "Content-Encoding": "gzip"}


class RefusesALongWait(SmallPortal):
    def refused(self, asked: Asked) -> Said | None:
        return Said(400) if asked.wait_seconds > 60 else super().refused(asked)


class KnowsNoVmWithoutDecisions(SmallPortal):
    def refused(self, asked: Asked) -> Said | None:
        return super().refused(asked) or (None if self.decisions else Said(404))


class SignsWithAnotherKey(SmallPortal):
    stranger: Signer

    def signed(self, verdict: str, record: Mapping[str, Any]) -> str:
        self.signer, mine = self.stranger, self.signer
        try:
            return super().signed(verdict, record)
        finally:
            self.signer = mine


class NamesAnotherEvent(SmallPortal):
    def signed(self, verdict: str, record: Mapping[str, Any]) -> str:
        return self.signer.decide(record, verdict, sub=record["event"]["event_id"].lower())


class DigestOfSomethingElse(SmallPortal):
    def signed(self, verdict: str, record: Mapping[str, Any]) -> str:
        return self.signer.decide(record, verdict, event_digest="0" * 64)


class ApprovesWhatIsHeld(SmallPortal):
    def signed(self, _verdict: str, record: Mapping[str, Any]) -> str:
        return self.signer.decide(record, "approve")


class TakesNoRecord(SmallPortal):
    def posted(self, _record: Mapping[str, Any]) -> int:
        return 415


class TakesARecordOnce(SmallPortal):
    def posted(self, record: Mapping[str, Any]) -> int:
        return 409 if record in self.records else super().posted(record)


class TakesNoOutcome(SmallPortal):
    def posted(self, record: Mapping[str, Any]) -> int:
        return 422 if record["approval"] is not None else super().posted(record)


class SameChallenge(SmallPortal):
    def nonce(self) -> str:
        return "42"

    def was_taken(self, _document: str) -> bool:
        return False


class TokenWithoutEnd(SmallPortal):
    def given(self) -> bytes:
        return json.dumps({"token": self.token}).encode()


class TokenForAnything(SmallPortal):
    def why_not(self, document: str) -> str | None:
        return None if document == "AAAA" else super().why_not(document)


class TokenForMuch(SmallPortal):
    def why_not(self, document: str) -> str | None:
        return super().why_not(document) if len(document) <= 32 * 1024 else None


class VerifiesNoSignature(SmallPortal):
    def is_signed(self, _content: bytes, _digest: bytes) -> bool:
        return True


class TokenForTheSameAgain(SmallPortal):
    def was_taken(self, _document: str) -> bool:
        return False


class RefusalWithoutItsWord(SmallPortal):
    def refusal(self, reason: str) -> Said:
        return replace(super().refusal(reason), body=b'{"error": "It is refused."}')


class TakesRecordsOfAnybody(SmallPortal):
    """Does not check the VM of a record."""


#: Each portal and the requirement that the portal breaks.
WRONG = {
    NoIndex: Requirement.INDEX,
    IndexThatFalls: Requirement.INDEX_STAYS,
    AnswersLate: Requirement.IN_TIME,
    AsksForNoToken: Requirement.ONLY_THIS_VM,
    GivesAnybodysDecisions: Requirement.OTHER_VM,
    DecisionsOfAnotherVm: Requirement.AUDIENCE,
    MemberTwice: Requirement.JSON,
    NoContentType: Requirement.CONTENT_TYPE,
    DecisionsThatAreNull: Requirement.DECISIONS,
    EpochThatChanges: Requirement.EPOCH,
    HoldsTheFirst: Requirement.AT_ONCE,
    NoLongPoll: Requirement.HELD,
    HoldsAnIndexAhead: Requirement.INDEX_AHEAD,
    TellsWhenTheWaitIsOver: Requirement.NEWS,
    IndexThatStays: Requirement.GROWS,
    ForgetsWhatItGave: Requirement.EVERY,
    LeavesOutWhatWasThere: Requirement.STAYS,
    BodyTooLarge: Requirement.BODY_SIZE,
    TooManyDecisions: Requirement.COUNT,
    DecisionTooLong: Requirement.TOKEN_SIZE,
    Redirects: Requirement.NO_REDIRECT,
    NotModified: Requirement.STATUS,
    HangsUp: Requirement.ANSWERED,
    GzipBomb: Requirement.PLAIN,
    RefusesALongWait: Requirement.LONGEST_WAIT,
    KnowsNoVmWithoutDecisions: Requirement.KNOWN_VM,
    SignsWithAnotherKey: Requirement.FORM,
    NamesAnotherEvent: Requirement.EVENT,
    DigestOfSomethingElse: Requirement.DIGEST,
    ApprovesWhatIsHeld: Requirement.HOLD,
    TakesNoRecord: Requirement.RECORD_TAKEN,
    TakesARecordOnce: Requirement.RECORD_TWICE,
    TakesNoOutcome: Requirement.OUTCOME,
    SameChallenge: Requirement.CHALLENGE,
    TokenWithoutEnd: Requirement.TOKEN,
    TokenForAnything: Requirement.NO_DOCUMENT,
    TokenForMuch: Requirement.DOCUMENT_SIZE,
    VerifiesNoSignature: Requirement.TAMPERED,
    TokenForTheSameAgain: Requirement.REPLAYED,
    RefusalWithoutItsWord: Requirement.REFUSAL,
    TakesRecordsOfAnybody: Requirement.RECORD_OF_OTHERS,
}
