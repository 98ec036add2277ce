"""Runs all checks of the conformance kit against one portal.

Some checks need an operator to approve or hold an event in the portal. The kit requests these decisions from a
*decider*, which is a command or a person. Without a decider, these checks are skipped.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from bridge.approval.decision_token import Claims
from bridge.config.approval import RemoteSettings
from bridge.config.trusted_keys import TrustedKey
from bridge.errors import BridgeError, CredentialFailed
from bridge.events.record import TransitionRecord, Verdict
from bridge.system.threads import run_daemon
from bridge.testing.portal_check.answers import PollAnswer
from bridge.testing.portal_check.attested import AttestedChecks
from bridge.testing.portal_check.decisions import DecisionChecks, expires_at
from bridge.testing.portal_check.polls import PollChecks
from bridge.testing.portal_check.records import MadeUpEvent, cloudevent, send
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import CheckClient, Exchange
from bridge.testing.portal_check.requirements import Needs, Requirement

#: The delay between the start of a long poll and the request for a decision.
_HEAD_START_SECONDS = 0.5
#: The minimum interval between requests to a portal that does not support long polls.
_SHORTEST_POLL_SECONDS = 0.2
_REFUSED = frozenset({401, 403})


class NotDecided(BridgeError):
    """The decision command failed, or no decision arrived in time."""


class Decider(msgspec.Struct, frozen=True, kw_only=True):
    """Makes decisions at the portal when the kit requests them."""

    decide: Callable[[Verdict, TransitionRecord], None]
    """Makes a decision at the portal on the event in a record. Raises NotDecided."""
    is_command: bool
    """True if the decision is complete when `decide` returns. The kit can then measure the response's delay."""
    timeout_seconds: float = 300.0


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the kit for one portal."""

    remote: RemoteSettings
    vm_id: str
    keys: Sequence[TrustedKey] = ()
    """The public keys that verify decisions. If no keys are given, the kit does not check signatures."""
    records_url: str | None = None
    """The URL for records. If None, the kit sends no records."""
    decider: Decider | None = None
    document: Callable[[str], str] | None = None
    """Returns an attested document that contains a nonce, for `credential = "attested"`."""
    late_seconds: float = 3.0


def check_portal(settings: CheckSettings) -> Report:
    """Check the portal in *settings*, and return the report.

    Raise CredentialFailed if no token can be obtained.
    """
    report = Report()
    asker = CheckClient(settings.remote, settings.vm_id, document=settings.document)
    try:
        _attest(settings, asker, report)
        try:
            asker.bearer()
        except CredentialFailed:
            if Requirement.CHALLENGE not in report and Requirement.TOKEN not in report:
                raise
        else:
            _Play(settings, asker, report).run()
    finally:
        asker.close()
    return report


def _attest(settings: CheckSettings, asker: CheckClient, report: Report) -> None:
    if asker.is_attested and settings.document is not None:
        AttestedChecks(asker, report, settings.document).run()
        return
    report.untried_without(Needs.DOCUMENT, "The kit uses another credential. To check this, set --attested.")


class _Play:
    def __init__(self, settings: CheckSettings, asker: CheckClient, report: Report) -> None:
        self._settings = settings
        self._asker = asker
        self._report = report
        self._polls = PollChecks(
            asker, report, wait_seconds=settings.remote.wait_seconds, late_seconds=settings.late_seconds
        )
        self._decisions = DecisionChecks(report, vm_id=settings.vm_id, keys=settings.keys)
        self._told = MadeUpEvent(settings.vm_id)
        self._is_told = False
        self._seen: set[str] = set()

    def run(self) -> None:
        """Run all checks that the settings allow."""
        self._tell()
        first = self._polls.first()
        self._polls.callers()
        if first is not None:
            self._take(first)
            self._polls.longest_wait()
            lasting = frozenset(token for token in first.decisions if expires_at(token) > time.time() + 60)
            self._polls.kept(first, only=lasting)
            if first.index is not None:
                self._polls.ahead(first.index)
                self._decide(self._polls.hold(first.index, self._take))
        if self._settings.decider is None:
            self._report.untried_without(Needs.DECISION, "To check this, set --decision-by.")
        if self._is_told:  # ends the event, so that the portal no longer shows it
            self._asker.post(self._settings.records_url or "", cloudevent(self._told.end()))

    def _tell(self) -> None:
        url = self._settings.records_url
        if url is None:
            why = "The kit has no URL for records. To check this, set --records-url."
            self._report.untried_without(Needs.RECORDS_URL, why)
            self._report.untried(Requirement.OUTCOME, why)
            return
        self._is_told = send(self._asker, self._report, url, Requirement.RECORD_TAKEN, self._told.record)
        if self._is_told:
            send(self._asker, self._report, url, Requirement.RECORD_TWICE, self._told.record)
            self._tell_of_another_vm(url)

    def _tell_of_another_vm(self, url: str) -> None:
        if not self._asker.is_attested:
            why = "The credential does not identify a VM. To check this, set --attested."
            self._report.untried(Requirement.RECORD_OF_OTHERS, why)
            return
        foreign = MadeUpEvent(str(uuid.uuid4()))
        exchange = self._asker.post(url, cloudevent(foreign.record))
        is_refused = exchange.status in _REFUSED
        detail = f"{exchange.result}. Expected: 403."
        if not self._report.check(Requirement.RECORD_OF_OTHERS, exchange, is_met=is_refused, otherwise=detail):
            self._asker.post(url, cloudevent(foreign.end()))

    def _take(self, answer: PollAnswer) -> None:
        for token in answer.decisions:
            self._seen.add(token)
            self._decisions.look(token, answer.exchange)

    # Checks with an operator.

    def _decide(self, index: int) -> None:
        decider = self._settings.decider
        if decider is None:
            return
        approved = self._decided(decider, Verdict.APPROVE, index)
        if approved is None:
            return
        claims, answer = approved
        if claims is not None:
            self._compare(claims, answer.exchange)
        if answer.index is None:
            return
        held = self._decided(decider, Verdict.HOLD, self._polls.hold(answer.index, self._take))
        if held is not None and held[0] is not None and claims is not None:
            self._decisions.hold(held[0], claims, held[1].exchange)

    def _compare(self, claims: Claims, exchange: Exchange) -> None:
        url = self._settings.records_url
        if not self._is_told or url is None:
            why = "The portal has no record of the event. To check this, set --records-url."
            for requirement in (Requirement.EVENT, Requirement.DIGEST):
                self._report.untried(requirement, why)
            return
        self._decisions.about(claims, self._told.event, exchange)
        send(self._asker, self._report, url, Requirement.OUTCOME, self._told.outcome(claims))

    def _decided(self, decider: Decider, verdict: Verdict, index: int) -> tuple[Claims | None, PollAnswer] | None:
        """Request a decision during a long poll.

        Return the decision and the response that contains it, or None.
        """
        made = run_daemon("decide", self._have_decided, decider, verdict)
        answer = self._await(made, decider, index)
        if answer is None:
            return None
        is_made = made.done() and made.exception() is None and decider.is_command
        late = time.monotonic() - made.result() if is_made else 0.0
        is_quick = late <= self._polls.at_once_seconds
        detail = f"The response came {late:.1f} s after the decision."
        self._report.check(Requirement.NEWS, answer.exchange, is_met=is_quick, otherwise=detail)
        tokens = [token for token in answer.decisions if token not in self._seen]
        self._seen.update(tokens)
        self._expect_kept(answer, index, frozenset(tokens))
        found = [self._decisions.look(token, answer.exchange, is_new=True) for token in tokens]
        return next((claims for claims in found if claims is not None), None), answer

    def _have_decided(self, decider: Decider, verdict: Verdict) -> float:
        time.sleep(_HEAD_START_SECONDS)
        decider.decide(verdict, self._told.record)
        return time.monotonic()

    def _await(self, made: Future[float], decider: Decider, index: int) -> PollAnswer | None:
        """Return the response with a new decision, or None if none arrives in time."""
        give_up_at = time.monotonic() + decider.timeout_seconds
        while time.monotonic() < give_up_at:
            exchange = self._asker.poll(index, self._settings.remote.wait_seconds)
            answer = self._polls.read(exchange)
            if answer is None:
                return None
            if any(token not in self._seen for token in answer.decisions):
                return answer
            if made.done() and (error := made.exception()) is not None:
                self._report.untried(Requirement.NEWS, str(error))
                return None
            is_over = made.done() and time.monotonic() - made.result() > self._settings.remote.wait_seconds
            if is_over and decider.is_command:
                self._report.broken(
                    Requirement.NEWS, exchange, "The operator decided, but no response contains the decision."
                )
                return None
            index = index if answer.index is None else answer.index
            time.sleep(max(0.0, _SHORTEST_POLL_SECONDS - exchange.seconds))
        self._report.untried(Requirement.NEWS, f"The operator made no decision within {decider.timeout_seconds:g} s.")
        return None

    def _expect_kept(self, answer: PollAnswer, index: int, tokens: frozenset[str]) -> None:
        """Repeat the request, as an agent does after a lost response or a restart."""
        has_grown = answer.index is not None and answer.index > index
        detail = f"The index changed from {index} to {answer.index}."
        self._report.check(Requirement.GROWS, answer.exchange, is_met=has_grown, otherwise=detail)
        exchange = self._asker.poll(index, self._settings.remote.wait_seconds)
        again = self._polls.read(exchange)
        if again is not None:
            detail = f"A second request with index {index} does not return the decision after this index."
            is_kept = tokens <= set(again.decisions)
            self._report.check(Requirement.EVERY, exchange, is_met=is_kept, otherwise=detail)
        self._polls.kept(answer, only=tokens)
