"""Checks a portal's long poll (PROTOCOL.md, sections 2 to 4).

The `decisions` module checks new decisions.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from bridge.approval.portal_client import MAX_INDEX
from bridge.testing.portal_check.answers import AnswerReader, PollAnswer
from bridge.testing.portal_check.report import Report
from bridge.testing.portal_check.request import CheckClient, Exchange
from bridge.testing.portal_check.requirements import Requirement

_OK = 200
_NO_CONTENT = 204
_REFUSED = frozenset({401, 403})
_LONGEST_WAIT_SECONDS = 600
#: A portal must send an immediate response within this time, or within half of the wait if that is shorter.
_AT_ONCE_SECONDS = 2.0
#: A request counts as a long poll if the response took at least this share of the wait.
_HELD_SHARE = 0.5
_TRIES = 3
_FAR_AHEAD = 1_000_000


class PollChecks:
    """Sends requests with *asker*, and adds the results to *report*.

    The portal must hold a long poll for *wait_seconds*, and then respond within *late_seconds*.
    """

    def __init__(
        self,
        asker: CheckClient,
        report: Report,
        *,
        wait_seconds: int,
        late_seconds: float,
    ) -> None:
        self._asker = asker
        self._report = report
        self.read = AnswerReader(report).read
        self._wait_seconds = wait_seconds
        self._late_seconds = late_seconds
        self.at_once_seconds = min(_AT_ONCE_SECONDS, wait_seconds / 2)
        """The limit for an immediate response, and for the response after a decision."""

    def first(self) -> PollAnswer | None:
        """Request all decisions. Return the response, or None if an agent would reject it."""
        exchange = self._asker.poll(0, self._wait_seconds)
        answer = self.read(exchange)
        if answer is not None:
            detail = "A 204 has no index, so the agent sends index 0 every second."
            if self._report.check(Requirement.AT_ONCE, exchange, is_met=answer.index is not None, otherwise=detail):
                self._expect_at_once(Requirement.AT_ONCE, exchange)
        return answer

    def callers(self) -> None:
        """Send requests that have no token, a wrong token, or the ID of another VM."""
        if Requirement.ANSWERED in self._report:
            for requirement in (Requirement.ONLY_THIS_VM, Requirement.OTHER_VM):
                self._report.untried(requirement, "The portal did not respond to the VM's request.")
            return
        self._strangers()
        exchange = self._asker.poll(0, 1, vm_id=str(uuid.uuid4()))
        brought = AnswerReader(Report()).read(exchange)  # a violation in this response does not count
        if exchange.status == _OK and self._asker.is_attested:
            detail = "The token names a VM, but the response for another VM is 200."
            self._report.broken(Requirement.OTHER_VM, exchange, detail)
        elif brought is not None and brought.decisions:
            self._report.broken(
                Requirement.OTHER_VM,
                exchange,
                "The response for a VM that does not exist contains decisions for this VM.",
            )
        elif exchange.status is None:
            self._report.untried(Requirement.OTHER_VM, exchange.answered)
        else:
            self._report.met(Requirement.OTHER_VM)

    def _strangers(self) -> None:
        if self._asker.has_certificate:
            self._without_certificate()
            return
        if self._asker.bearer() is None:
            self._report.untried(Requirement.ONLY_THIS_VM, "The kit has no token, so it cannot omit the token.")
            return
        for token, who in (("", "no token"), ("not-the-token-of-this-vm", "another token")):
            exchange = self._asker.poll(0, self._wait_seconds, token=token)
            detail = f"The response to {who} is not 401 or 403."
            is_refused = exchange.status in _REFUSED
            self._report.check(Requirement.ONLY_THIS_VM, exchange, is_met=is_refused, otherwise=detail)

    def _without_certificate(self) -> None:
        exchange = self._asker.poll(0, self._wait_seconds, token="")
        breaks_off = exchange.status is None and exchange.seconds < self._wait_seconds  # a TLS failure
        is_refused = breaks_off or exchange.status in _REFUSED
        detail = "The response without a client certificate is not 401 or 403."
        self._report.check(Requirement.ONLY_THIS_VM, exchange, is_met=is_refused, otherwise=detail)

    def longest_wait(self) -> None:
        """Request all decisions with a wait of 600 s. The portal must still respond immediately."""
        if Requirement.AT_ONCE in self._report:
            self._report.untried(
                Requirement.LONGEST_WAIT, "The portal does not respond at once, so this check could take 600 s."
            )
            return
        exchange = self._asker.poll(0, _LONGEST_WAIT_SECONDS)
        is_good = exchange.status in (_OK, _NO_CONTENT)
        detail = "The portal refuses a wait of 600 s."
        self._report.check(Requirement.LONGEST_WAIT, exchange, is_met=is_good, otherwise=detail)

    def hold(self, index: int, take: Callable[[PollAnswer], None]) -> int:
        """Check that the portal holds a long poll until a decision after *index* exists.

        Return the new index. Call *take* with each response, because an operator might make a decision during the poll.
        """
        for _ in range(_TRIES):
            exchange = self._asker.poll(index, self._wait_seconds)
            if exchange.status is None and exchange.seconds >= self._wait_seconds:
                detail = f"After {exchange.seconds:.1f} s, the agent ended the request."
                self._report.broken(Requirement.IN_TIME, exchange, detail)
                return index
            answer = self.read(exchange)
            if answer is None:
                return index
            take(answer)
            self._expect_no_fall(answer, index)
            found = index if answer.index is None else answer.index
            if found < index:
                return index
            if found == index and exchange.seconds >= self._wait_seconds * _HELD_SHARE:
                self._expect_in_time(exchange)
                self._report.met(Requirement.HELD)
                return index
            index = found
        detail = f"The portal responded to {_TRIES} requests before half of their wait was over."
        self._report.broken(Requirement.HELD, exchange, detail)
        return index

    def ahead(self, index: int) -> None:
        """Send an index that the portal has not used yet.

        Agents do this after a portal is restored from a backup.
        """
        asked = min(index + _FAR_AHEAD, MAX_INDEX)
        exchange = self._asker.poll(asked, self._wait_seconds)
        answer = self.read(exchange)
        if answer is None:
            return
        is_own = answer.index is not None and answer.index < asked
        detail = f"The response to index {asked} is {'a 204' if answer.index is None else answer.index}."
        if self._report.check(Requirement.INDEX_AHEAD, exchange, is_met=is_own, otherwise=detail):
            self._expect_at_once(Requirement.INDEX_AHEAD, exchange)

    def kept(self, before: PollAnswer, *, only: frozenset[str]) -> None:
        """Check that the portal keeps all decisions in *only*, and that the index has not fallen."""
        answer = self.read(exchange := self._asker.poll(0, self._wait_seconds))
        if answer is None:
            return
        self._expect_no_fall(answer, before.index or 0)
        if only:
            detail = "A decision of an earlier response is missing."
            self._report.check(Requirement.STAYS, exchange, is_met=only <= set(answer.decisions), otherwise=detail)

    def _expect_no_fall(self, answer: PollAnswer, index: int) -> None:
        is_kept = answer.index is None or answer.index >= index
        detail = f"The index changed from {index} to {answer.index}."
        self._report.check(Requirement.INDEX_STAYS, answer.exchange, is_met=is_kept, otherwise=detail)

    def _expect_at_once(self, requirement: Requirement, exchange: Exchange) -> None:
        is_quick = exchange.seconds <= self.at_once_seconds
        detail = f"The response took {exchange.seconds:.1f} s."
        self._report.check(requirement, exchange, is_met=is_quick, otherwise=detail)

    def _expect_in_time(self, exchange: Exchange) -> None:
        late = exchange.seconds - self._wait_seconds
        detail = f"The response came {late:.1f} s after its wait of {self._wait_seconds} s."
        self._report.check(Requirement.IN_TIME, exchange, is_met=late <= self._late_seconds, otherwise=detail)
