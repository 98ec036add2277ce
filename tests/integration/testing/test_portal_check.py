"""The conformance kit: a correct portal meets every sentence, and each wrong one is told by its section.

All portals are checked at the same time, since what takes long is waiting for what they hold.
"""

import gzip
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import resources

import pytest
from outside_portal import Signer
from small_portal import Said, SmallPortal, attested

from bridge.approval.portal_client import AGENT_HEADER
from bridge.config.approval import KeySettings, RemoteSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.events.event import encode
from bridge.testing.portal_check.check import CheckSettings, Decider, NotDecided, check_portal
from bridge.testing.portal_check.report import Result
from bridge.testing.portal_check.requirements import Requirement

OF_DOCUMENTS = {
    *(Requirement.RECORD_OF_OTHERS, Requirement.CHALLENGE, Requirement.TOKEN, Requirement.NO_DOCUMENT),
    *(Requirement.DOCUMENT_SIZE, Requirement.TAMPERED, Requirement.REPLAYED, Requirement.REFUSAL),
}
PAGE = (resources.files("bridge.approval") / "PROTOCOL.md").read_text(encoding="utf-8")
VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
TOKEN = "the-token-of-this-vm"
WAIT_SECONDS = 3
LATE_SECONDS = 1.5


class NoIndex(SmallPortal):
    def body(self, value):
        return super().body({name: value[name] for name in ("decisions", "epoch")})


class IndexAsFraction(SmallPortal):
    def body(self, value):
        return super().body({**value, "index": float(value["index"])})


class IndexThatFalls(SmallPortal):
    newest = 1000

    def value(self, asked):
        found = super().value(asked)
        self.fallen = getattr(self, "fallen", 0) + 1
        return {**found, "index": 1000 - self.fallen}

    def is_due(self, asked):
        return not asked.index or asked.index > 1000


class AnswersLate(SmallPortal):
    def value(self, asked):
        found = super().value(asked)
        time.sleep(0 if self.is_due(asked) else LATE_SECONDS + 1)
        return found


class AsksForNoToken(SmallPortal):
    def refused(self, asked):
        return None if asked.vm_id == self.vm_id else Said(403)


class RefusesWith400(SmallPortal):
    def refused(self, asked):
        return Said(400) if super().refused(asked) else None


class GivesAnybodysDecisions(SmallPortal):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.put(self.signer.decide(announced(self.vm_id)))

    def refused(self, asked):
        return None if asked.token == f"Bearer {self.token}" else Said(401)


class DecisionsOfAnotherVm(SmallPortal):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.put(self.signer.decide(announced(str(uuid.uuid4()))))


class EmptyBody(SmallPortal):
    def body(self, _value):
        return b""


class NoJson(SmallPortal):
    def body(self, _value):
        return b"<html>It works!</html>"


class ByteOrderMark(SmallPortal):
    def body(self, value):
        return b"\xef\xbb\xbf" + super().body(value)


class MemberTwice(SmallPortal):
    def body(self, value):
        return super().body(value)[:-1] + b', "index": 1}'


class NoUtf8(SmallPortal):
    def body(self, value):
        return super().body({**value, "by": "x"}).replace(b'"x"', b'"\xff"')


class NoContentType(SmallPortal):
    def headers(self):
        return {"Content-Type": "text/html"}


class DecisionsThatAreNull(SmallPortal):
    def body(self, value):
        return super().body({**value, "decisions": value["decisions"] or None})


class EpochThatChanges(SmallPortal):
    def body(self, value):
        return super().body({**value, "epoch": str(uuid.uuid4())})


class EpochNowAndThen(SmallPortal):
    def value(self, asked):
        found = super().value(asked)
        return found if asked.index else {name: found[name] for name in ("index", "decisions")}


class HoldsTheFirst(SmallPortal):
    def is_due(self, asked):
        return bool(asked.index) and super().is_due(asked)


class NoContentAtFirst(SmallPortal):
    def polled(self, asked):
        said = super().polled(asked)
        return Said(204) if said.status == 200 and not asked.index and not self.decisions else said


class NoLongPoll(SmallPortal):
    def is_due(self, _asked):
        return True


class IndexThatAlwaysGrows(SmallPortal):
    def is_due(self, _asked):
        self.newest += 1
        return True


class HoldsAnIndexAhead(SmallPortal):
    def is_due(self, asked):
        return not asked.index or bool(self.after(asked.index))


class EchoesAnIndexAhead(SmallPortal):
    def value(self, asked):
        found = super().value(asked)
        return {**found, "index": max(asked.index, found["index"])}


class TellsWhenTheWaitIsOver(SmallPortal):
    def value(self, asked):
        if not self.is_due(asked):
            time.sleep(asked.wait_seconds)
        return super().value(replace(asked, wait_seconds=0))


class IndexThatStays(SmallPortal):
    def value(self, asked):
        return {**super().value(asked), "index": 1}

    def is_due(self, asked):
        return not asked.index or asked.index > 1 or len(self.decisions) > self.told(asked)

    def told(self, _asked):
        told, self.count = getattr(self, "count", 0), len(self.decisions)
        return told


class ForgetsWhatItGave(SmallPortal):
    def value(self, asked):
        found = super().value(asked)
        self.decisions.clear()
        return found


class LeavesOutWhatWasThere(SmallPortal):
    def after(self, index):
        return super().after(index) if index else []


class BodyTooLarge(SmallPortal):
    def body(self, value):
        return super().body({**value, "padding": "x" * 1_100_000})


class TooManyDecisions(SmallPortal):
    def after(self, index):
        return super().after(index) if index else ["x"] * 1_001


class DecisionTooLong(SmallPortal):
    def after(self, index):
        return super().after(index) if index else ["x" * 8_193]


class Redirects(SmallPortal):
    def polled(self, _asked):
        return Said(302, headers={"Location": "https://login.example.net/"})


class NotModified(SmallPortal):
    def polled(self, _asked):
        return Said(304)


class Fails(SmallPortal):
    def polled(self, _asked):
        return Said(500)


class HangsUp(SmallPortal):
    def polled(self, _asked):
        return None


class GzipBomb(SmallPortal):
    def body(self, value):
        return gzip.compress(super().body({**value, "padding": " " * 10_000_000}))

    def headers(self):
        return {**super().headers(), "Content-Encoding": "gzip"}


class RefusesALongWait(SmallPortal):
    def refused(self, asked):
        return Said(400) if asked.wait_seconds > 60 else super().refused(asked)


class KnowsNoVmWithoutDecisions(SmallPortal):
    def refused(self, asked):
        return super().refused(asked) or (None if self.decisions else Said(404))


class SignsWithAnotherKey(SmallPortal):
    def signed(self, verdict, record):
        self.signer, mine = self.stranger, self.signer
        try:
            return super().signed(verdict, record)
        finally:
            self.signer = mine


class SignsForTooLong(SmallPortal):
    def signed(self, verdict, record):
        return self.signer.decide(record, verdict, exp=time.time() + 90_000)


class NamesAnotherEvent(SmallPortal):
    def signed(self, verdict, record):
        return self.signer.decide(record, verdict, sub=record["event"]["event_id"].lower())


class DigestOfSomethingElse(SmallPortal):
    def signed(self, verdict, record):
        return self.signer.decide(record, verdict, event_digest="0" * 64)


class ApprovesWhatIsHeld(SmallPortal):
    def signed(self, _verdict, record):
        return self.signer.decide(record, "approve")


class HoldsEarlier(SmallPortal):
    def signed(self, verdict, record):
        changes = {"iat": time.time() - 60} if verdict == "hold" else {}
        return self.signer.decide(record, verdict, **changes)


class TakesNoRecord(SmallPortal):
    def posted(self, _record):
        return 415


class TakesARecordOnce(SmallPortal):
    def posted(self, record):
        return 409 if record in self.records else super().posted(record)


class TakesNoOutcome(SmallPortal):
    def posted(self, record):
        return 422 if record["approval"] is not None else super().posted(record)


class SameChallenge(SmallPortal):
    def nonce(self):
        return "42"

    def was_taken(self, _document):
        return False


class ChallengeThatIsNone(SmallPortal):
    def nonce(self):
        return "it's a nonce"


class TokenWithoutEnd(SmallPortal):
    def given(self):
        return json.dumps({"token": self.token}).encode()


class TokenForAnything(SmallPortal):
    def why_not(self, document):
        return None if document == "AAAA" else super().why_not(document)


class TokenForMuch(SmallPortal):
    def why_not(self, document):
        return super().why_not(document) if len(document) <= 32 * 1024 else None


class VerifiesNoSignature(SmallPortal):
    def is_signed(self, _content, _digest):
        return True


class TokenForTheSameAgain(SmallPortal):
    def was_taken(self, _document):
        return False


class RefusalWithoutItsWord(SmallPortal):
    def refusal(self, reason):
        return replace(super().refusal(reason), body=b'{"error": "It is refused."}')


class RefusalOfAnotherStatus(SmallPortal):
    def refusal(self, reason):
        return replace(super().refusal(reason), status=400)


class TakesRecordsOfAnybody(SmallPortal):
    """Has no word for whose a record is."""


class DecisionsForATokenOfAnother(SmallPortal):
    def refused(self, asked):
        return None if asked.token == f"Bearer {self.token}" else Said(401)

    def posted(self, record):
        return 403 if record["vm"]["vm_id"] != self.vm_id else super().posted(record)


class Hangs(SmallPortal):
    def polled(self, asked):
        time.sleep(asked.wait_seconds + 20)


class StreamsForEver(SmallPortal):
    def polled(self, _asked):
        def dripping():
            while not self.is_closed:
                time.sleep(0.2)
                yield b" "

        return Said(200, dripping(), self.headers())


class FloodsForEver(SmallPortal):
    def polled(self, _asked):
        def flood():
            while not self.is_closed:
                yield b" " * 65_536

        return Said(200, flood(), self.headers())


#: What each of them breaks: the first sentence that a person should read.
WRONG = {
    NoIndex: Requirement.INDEX,
    IndexAsFraction: Requirement.INDEX,
    IndexThatFalls: Requirement.INDEX_STAYS,
    AnswersLate: Requirement.IN_TIME,
    AsksForNoToken: Requirement.ONLY_THIS_VM,
    RefusesWith400: Requirement.ONLY_THIS_VM,
    GivesAnybodysDecisions: Requirement.OTHER_VM,
    DecisionsOfAnotherVm: Requirement.AUDIENCE,
    EmptyBody: Requirement.JSON,
    NoJson: Requirement.JSON,
    ByteOrderMark: Requirement.JSON,
    MemberTwice: Requirement.JSON,
    NoUtf8: Requirement.JSON,
    NoContentType: Requirement.CONTENT_TYPE,
    DecisionsThatAreNull: Requirement.DECISIONS,
    EpochThatChanges: Requirement.EPOCH,
    EpochNowAndThen: Requirement.EPOCH,
    HoldsTheFirst: Requirement.AT_ONCE,
    NoContentAtFirst: Requirement.AT_ONCE,
    NoLongPoll: Requirement.HELD,
    IndexThatAlwaysGrows: Requirement.HELD,
    HoldsAnIndexAhead: Requirement.INDEX_AHEAD,
    EchoesAnIndexAhead: Requirement.INDEX_AHEAD,
    TellsWhenTheWaitIsOver: Requirement.NEWS,
    IndexThatStays: Requirement.GROWS,
    ForgetsWhatItGave: Requirement.EVERY,
    LeavesOutWhatWasThere: Requirement.STAYS,
    BodyTooLarge: Requirement.BODY_SIZE,
    TooManyDecisions: Requirement.COUNT,
    DecisionTooLong: Requirement.TOKEN_SIZE,
    Redirects: Requirement.NO_REDIRECT,
    NotModified: Requirement.STATUS,
    Fails: Requirement.STATUS,
    HangsUp: Requirement.ANSWERED,
    GzipBomb: Requirement.PLAIN,
    RefusesALongWait: Requirement.LONGEST_WAIT,
    KnowsNoVmWithoutDecisions: Requirement.KNOWN_VM,
    SignsWithAnotherKey: Requirement.FORM,
    SignsForTooLong: Requirement.FORM,
    NamesAnotherEvent: Requirement.EVENT,
    DigestOfSomethingElse: Requirement.DIGEST,
    ApprovesWhatIsHeld: Requirement.HOLD,
    HoldsEarlier: Requirement.HOLD,
    TakesNoRecord: Requirement.RECORD_TAKEN,
    TakesARecordOnce: Requirement.RECORD_TWICE,
    TakesNoOutcome: Requirement.OUTCOME,
    SameChallenge: Requirement.CHALLENGE,
    ChallengeThatIsNone: Requirement.CHALLENGE,
    TokenWithoutEnd: Requirement.TOKEN,
    TokenForAnything: Requirement.NO_DOCUMENT,
    TokenForMuch: Requirement.DOCUMENT_SIZE,
    VerifiesNoSignature: Requirement.TAMPERED,
    TokenForTheSameAgain: Requirement.REPLAYED,
    RefusalWithoutItsWord: Requirement.REFUSAL,
    RefusalOfAnotherStatus: Requirement.REFUSAL,
    TakesRecordsOfAnybody: Requirement.RECORD_OF_OTHERS,
    DecisionsForATokenOfAnother: Requirement.OTHER_VM,
    Hangs: Requirement.ANSWERED,
    StreamsForEver: Requirement.ANSWERED,
    FloodsForEver: Requirement.BODY_SIZE,
}
#: What is tried with a decision only; the others are not asked for one, which takes long.
BY_A_DECISION = {
    Requirement.NEWS,
    Requirement.GROWS,
    Requirement.EVERY,
    Requirement.STAYS,
    Requirement.FORM,
    Requirement.EVENT,
    Requirement.DIGEST,
    Requirement.HOLD,
    Requirement.OUTCOME,
}
#: Those that are asked with the token of an attested document.
BY_A_DOCUMENT = {
    *(SameChallenge, ChallengeThatIsNone, TokenWithoutEnd, TokenForAnything, TokenForMuch, VerifiesNoSignature),
    *(TokenForTheSameAgain, RefusalWithoutItsWord, RefusalOfAnotherStatus, TakesRecordsOfAnybody),
    DecisionsForATokenOfAnother,
}
#: What a machine that is slow breaks by itself.
TIMED = {Requirement.AT_ONCE, Requirement.HELD, Requirement.IN_TIME, Requirement.INDEX_AHEAD, Requirement.NEWS}
#: What follows from the one breach, as an operator sees it.
ALSO = {
    SameChallenge: {Requirement.REPLAYED, Requirement.RECORD_OF_OTHERS},
    FloodsForEver: {Requirement.ONLY_THIS_VM},
    **{each: {Requirement.RECORD_OF_OTHERS} for each in BY_A_DOCUMENT - {SameChallenge, TakesRecordsOfAnybody}},
    IndexThatStays: {Requirement.EVERY},
    ForgetsWhatItGave: {Requirement.STAYS},
    Redirects: {Requirement.ONLY_THIS_VM},
    NotModified: {Requirement.ONLY_THIS_VM},
    Fails: {Requirement.ONLY_THIS_VM},
    HangsUp: {Requirement.ONLY_THIS_VM},
}


class NobodyToAsk(SmallPortal):
    """Checked without a key, a way for records and an operator."""


class NobodyDecides(SmallPortal):
    """Checked with an operator whose command fails."""


class TakesDocuments(SmallPortal):
    """Checked with the token that it gives for an attested document."""

    def posted(self, record):
        return super().posted(record) if record["vm"]["vm_id"] == self.vm_id else 403


class PrefersNonces(TakesDocuments):
    """Takes documents of earlier requests too, as its operator wants."""

    def why_not(self, document):
        reason = super().why_not(document)
        return None if reason in {"old_nonce", "replayed"} else reason


class SaysTheTokenBack(SmallPortal):
    def polled(self, asked):
        return Said(200, asked.token.encode(), {"Content-Type": "text/plain"})


class BusyAtFirst(SmallPortal):
    is_busy = True

    def polled(self, asked):
        if self.is_busy:
            self.is_busy = False
            return Said(503, headers={"Retry-After": "1"})
        return super().polled(asked)


class NotesRequests(SmallPortal):
    def refused(self, asked):
        self.seen = [*getattr(self, "seen", []), asked]
        return super().refused(asked)


def fails(_verdict, _record):
    raise NotDecided("The command of --decision-by ended with 3.")


#: Further portals, none of them wrong but one, and how the kit is told of them.
FURTHER = {
    NobodyToAsk: {"keys": (), "records_url": None, "decider": None},
    NobodyDecides: {"decider": Decider(decide=fails, is_command=True)},
    TakesDocuments: {"decider": None, "document": partial(attested, VM_ID)},
    PrefersNonces: {"decider": None, "document": partial(attested, VM_ID)},
    SaysTheTokenBack: {"decider": None},
    BusyAtFirst: {"decider": None},
    NotesRequests: {"decider": None},
}


def announced(vm_id):
    """Return a record of an event, as far as a decision needs one."""
    event = {
        "event_id": "E-1",
        "event_type": "Freeze",
        "event_source": "Platform",
        "duration_seconds": 5,
        "resources": ["vm"],
        "not_before_raw": "",
    }
    return {"vm": {"vm_id": vm_id}, "event": event}


def settings_of(portal, folder, *, token=TOKEN, **options):
    file = folder / "token"
    file.write_text(f"{token}\n")
    keys = (KeySettings(kid="unused", approver="unused", public_key_file="unused"),)
    who = {"credential": "attested"} if "document" in options else {"token_file": str(file)}
    remote = RemoteSettings(url=portal.url, wait_seconds=WAIT_SECONDS, keys=keys, **who)
    key = TrustedKey(
        kid=portal.signer.kid, approver=portal.signer.approver, public_key_file=portal.signer.public_key_file
    )
    decider = Decider(
        decide=lambda verdict, record: portal.decide(verdict.value, json.loads(encode(record))),
        is_command=True,
        timeout_seconds=30,
    )
    given = {"keys": (key,), "records_url": portal.records_url, "decider": decider, **options}
    return CheckSettings(remote=remote, vm_id=VM_ID, late_seconds=LATE_SECONDS, **given)


def checked(made, folder, **options):
    folder.mkdir()
    portal = made(Signer(folder, "ops"), vm_id=VM_ID, token=TOKEN)
    portal.stranger = Signer(folder, "stranger")
    portal.stranger.kid, portal.stranger.approver = portal.signer.kid, portal.signer.approver
    try:
        return check_portal(settings_of(portal, folder, **options)), portal
    finally:
        portal.close()


def options_of_all():
    """Return how the kit is told of each portal."""
    options = {each: {} if requirement in BY_A_DECISION else {"decider": None} for each, requirement in WRONG.items()}
    for each in BY_A_DOCUMENT:
        options[each]["document"] = partial(attested, VM_ID)
    return options | {SmallPortal: {}, **FURTHER}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return what returns the report on a portal, by its class."""
    folder = tmp_path_factory.mktemp("portals")
    options = options_of_all()
    with ThreadPoolExecutor(len(options)) as pool:
        made = {each: pool.submit(checked, each, folder / each.__name__, **given) for each, given in options.items()}
    return {each: future.result for each, future in made.items()}  # called by its own test: one failure is of one


def broken(report):
    return {each.requirement: each for each in report.findings if each.result is Result.NOT_MET}


def test_a_correct_portal_meets_every_sentence(reports):
    report, portal = reports[SmallPortal]()
    others = {each.requirement: each.detail for each in report.findings if each.result != "met"}
    assert set(others) == OF_DOCUMENTS, others
    assert all("--attested" in detail for detail in others.values())
    assert [record["transition"] for record in portal.records] == ["scheduled", "scheduled", "approved", "canceled"]
    assert portal.records[2]["approval"]["result"] == "dry_run"


@pytest.mark.parametrize("portal", WRONG, ids=lambda portal: portal.__name__)
def test_a_portal_that_breaks_one_sentence_is_told_by_it(reports, portal, tmp_path):
    found = broken(reports[portal]()[0])
    for number in range(3):  # alone: beside all others a slow machine answers late, too
        if WRONG[portal] in found and not (set(found) - {WRONG[portal]}) & TIMED:
            break
        found = broken(checked(portal, tmp_path / str(number), **options_of_all()[portal])[0])
    assert WRONG[portal] in found, sorted(each.key for each in found)
    assert set(found) - {WRONG[portal]} <= ALSO.get(portal, set()), [(each.key, found[each].detail) for each in found]
    finding = found[WRONG[portal]]
    assert finding.detail
    assert finding.asked.startswith(("GET http", "POST http"))
    assert TOKEN not in f"{finding.asked}{finding.answered}{finding.detail}"


@pytest.mark.parametrize("requirement", Requirement, ids=lambda requirement: requirement.key)
def test_each_sentence_stands_in_its_section_of_the_page(requirement):
    sentence = requirement.value
    section = PAGE.split(f"\n## {sentence.section} ")[1].split("\n## ")[0]
    assert " ".join(sentence.quote.split()) in " ".join(section.split())


def test_every_sentence_but_those_nobody_can_break_alone_has_a_portal_that_breaks_it():
    assert set(WRONG.values()) == set(Requirement)


def test_without_an_operator_and_a_key_it_says_what_was_not_tried(reports):
    report, _ = reports[NobodyToAsk]()
    results = {each.requirement: each for each in report.findings}
    assert not broken(report)
    for requirement, why in (
        (Requirement.NEWS, "--decision-by"),
        (Requirement.FORM, "--public-key"),
        (Requirement.RECORD_TAKEN, "--records-url"),
        (Requirement.OUTCOME, "--records-url"),
    ):
        assert results[requirement].result is Result.NOT_TRIED
        assert why in results[requirement].detail
    assert {results[each].result for each in (Requirement.HELD, Requirement.AT_ONCE, Requirement.INDEX_AHEAD)} == {
        "met"
    }


def test_an_operator_who_does_not_decide_breaks_nothing(reports):
    report, _ = reports[NobodyDecides]()
    assert not broken(report)
    (news,) = (each for each in report.findings if each.requirement is Requirement.NEWS)
    assert (news.result, news.detail) == (Result.NOT_TRIED, "The command of --decision-by ended with 3.")


def test_a_portal_that_says_the_token_back_does_not_get_it_shown(reports):
    report, _ = reports[SaysTheTokenBack]()
    shown = str([(each.detail, each.asked, each.answered) for each in report.findings])
    assert "<secret>" in shown
    assert TOKEN not in shown


def test_a_portal_that_gives_tokens_for_attested_documents_is_asked_with_one(reports):
    report, portal = reports[TakesDocuments]()
    assert len(portal.documents) == 2  # the kit's own, and the one whose token it asks with
    assert not broken(report)
    results = {each.requirement: each.result for each in report.findings}
    assert {results[each] for each in OF_DOCUMENTS} == {"met"}


def test_a_portal_that_takes_other_nonces_breaks_nothing(reports):
    report, _ = reports[PrefersNonces]()
    assert not broken(report)
    (found,) = (each for each in report.findings if each.requirement is Requirement.REPLAYED)
    assert (found.result, found.detail) == (
        Result.NOT_TRIED,
        "It takes documents with a nonce that is none of its own, as its operator may want.",
    )


def test_a_portal_that_is_busy_is_waited_for(reports):
    report, portal = reports[BusyAtFirst]()
    assert not broken(report)
    assert not portal.is_busy


def test_the_kit_asks_as_an_agent_does(reports):
    _, portal = reports[NotesRequests]()
    own = [each for each in portal.seen if each.token == f"Bearer {TOKEN}" and each.vm_id == VM_ID]
    assert {each.wait_seconds for each in own} == {WAIT_SECONDS, 600}
    for each in own:
        assert each.headers["Accept"] == "application/json"
        assert each.headers["Accept-Encoding"] == "identity"
        assert AGENT_HEADER in each.headers
        assert "Cookie" not in each.headers
