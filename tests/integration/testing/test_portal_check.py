"""The conformance kit: a correct portal meets every requirement, and each violation is reported.

All portals are checked concurrently, because most of the time is spent in long polls.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from outside_portal import Signer
from small_portal import Said, SmallPortal, attested
from wrong_portals import (
    LATE_SECONDS,
    WRONG,
    ForgetsWhatItGave,
    HangsUp,
    IndexThatStays,
    NotModified,
    Redirects,
    RefusalWithoutItsWord,
    SameChallenge,
    TakesRecordsOfAnybody,
    TokenForAnything,
    TokenForMuch,
    TokenForTheSameAgain,
    TokenWithoutEnd,
    VerifiesNoSignature,
)

from bridge.config.approval import KeySettings, RemoteSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.events.event import encode
from bridge.testing.portal_check.check import CheckSettings, Decider, check_portal
from bridge.testing.portal_check.report import Result
from bridge.testing.portal_check.requirements import Requirement

OF_DOCUMENTS = {
    *(Requirement.RECORD_OF_OTHERS, Requirement.CHALLENGE, Requirement.TOKEN, Requirement.NO_DOCUMENT),
    *(Requirement.DOCUMENT_SIZE, Requirement.TAMPERED, Requirement.REPLAYED, Requirement.REFUSAL),
}
VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
TOKEN = "the-token-of-this-vm"
WAIT_SECONDS = 2


#: Requirements that need a decision. Other portals are checked without a decision, because decisions are slow.
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
#: Portals that are checked with the token of an attested document.
BY_A_DOCUMENT = {
    *(SameChallenge, TokenWithoutEnd, TokenForAnything, TokenForMuch, VerifiesNoSignature),
    *(TokenForTheSameAgain, RefusalWithoutItsWord, TakesRecordsOfAnybody),
}
#: Requirements that a slow machine can violate.
TIMED = {Requirement.AT_ONCE, Requirement.HELD, Requirement.IN_TIME, Requirement.INDEX_AHEAD, Requirement.NEWS}
#: Further requirements that each violation also breaks.
ALSO = {
    SameChallenge: {Requirement.REPLAYED, Requirement.RECORD_OF_OTHERS},
    **{each: {Requirement.RECORD_OF_OTHERS} for each in BY_A_DOCUMENT - {SameChallenge, TakesRecordsOfAnybody}},
    IndexThatStays: {Requirement.EVERY},
    ForgetsWhatItGave: {Requirement.STAYS},
    Redirects: {Requirement.ONLY_THIS_VM},
    NotModified: {Requirement.ONLY_THIS_VM},
    HangsUp: {Requirement.ONLY_THIS_VM},
}


class WithoutOperator(SmallPortal):
    """Checked without a key, an endpoint for records, and an operator."""


class TakesDocuments(SmallPortal):
    """Checked with the token that the portal returns for an attested document."""

    def posted(self, record):
        return super().posted(record) if record["vm"]["vm_id"] == self.vm_id else 403


class EchoesTheToken(SmallPortal):
    def polled(self, asked):
        return Said(200, asked.token.encode(), {"Content-Type": "text/plain"})


#: Further portals, of which only one is incorrect, with the options of the kit.
FURTHER = {
    WithoutOperator: {"keys": (), "records_url": None, "decider": None},
    TakesDocuments: {"decider": None, "document": partial(attested, VM_ID)},
    EchoesTheToken: {"decider": None},
}


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
    """Return the options of the kit for each portal."""
    options = {each: {} if requirement in BY_A_DECISION else {"decider": None} for each, requirement in WRONG.items()}
    for each in BY_A_DOCUMENT:
        options[each]["document"] = partial(attested, VM_ID)
    return options | {SmallPortal: {}, **FURTHER}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a function that returns the report on a portal, given the class of the portal."""
    folder = tmp_path_factory.mktemp("portals")
    options = options_of_all()
    with ThreadPoolExecutor(len(options)) as pool:
        made = {each: pool.submit(checked, each, folder / each.__name__, **given) for each, given in options.items()}
    return {
        each: future.result for each, future in made.items()
    }  # called in its own test, so that a failure affects only this test


def broken(report):
    return {each.requirement: each for each in report.findings if each.result is Result.NOT_MET}


def test_correct_portal_meets_every_requirement(reports):
    report, portal = reports[SmallPortal]()
    others = {each.requirement: each.detail for each in report.findings if each.result != "met"}
    assert set(others) == OF_DOCUMENTS, others
    assert all("--attested" in detail for detail in others.values())
    assert [record["transition"] for record in portal.records] == ["scheduled", "scheduled", "approved", "canceled"]
    assert portal.records[2]["approval"]["result"] == "dry_run"


@pytest.mark.parametrize("portal", WRONG, ids=lambda portal: portal.__name__)
def test_violated_requirement_is_reported(reports, portal, tmp_path):
    found = broken(reports[portal]()[0])
    for number in range(3):  # again without the other portals, because a slow machine also responds late
        if WRONG[portal] in found and not (set(found) - {WRONG[portal]}) & TIMED:
            break
        found = broken(checked(portal, tmp_path / str(number), **options_of_all()[portal])[0])
    assert WRONG[portal] in found, sorted(each.key for each in found)
    assert set(found) - {WRONG[portal]} <= ALSO.get(portal, set()), [(each.key, found[each].detail) for each in found]
    finding = found[WRONG[portal]]
    assert finding.detail
    assert finding.asked.startswith(("GET http", "POST http"))
    assert TOKEN not in f"{finding.asked}{finding.answered}{finding.detail}"


def test_every_requirement_has_a_portal_that_violates_it():
    assert set(WRONG.values()) == set(Requirement)


def test_requirements_without_an_operator_or_a_key_are_reported_as_not_tried(reports):
    report, _ = reports[WithoutOperator]()
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


def test_token_echoed_by_the_portal_is_not_shown(reports):
    report, _ = reports[EchoesTheToken]()
    shown = str([(each.detail, each.asked, each.answered) for each in report.findings])
    assert "<secret>" in shown
    assert TOKEN not in shown


def test_portal_is_checked_with_a_token_for_an_attested_document(reports):
    report, portal = reports[TakesDocuments]()
    assert len(portal.documents) == 2  # one from the kit, and one for the token that authenticates it
    assert not broken(report)
    results = {each.requirement: each.result for each in report.findings}
    assert {results[each] for each in OF_DOCUMENTS} == {"met"}
