"""Collects the results of the checks. Each finding is the result for one requirement."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from bridge.testing.portal_check.request import Exchange
from bridge.testing.portal_check.requirements import Needs, Requirement


class Result(str, Enum):
    """Whether a requirement is met."""

    MET = "met"
    NOT_MET = "not met"
    NOT_TRIED = "not tried"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one requirement."""

    requirement: Requirement
    result: Result
    detail: str | None = None
    """The violation, or the reason why the requirement was not checked."""
    asked: str | None = None
    """The request that caused the violation."""
    answered: str | None = None
    """The response that contains the violation."""


class Report:
    """Collects the findings. A requirement without a finding was not checked."""

    def __init__(self) -> None:
        self._found: dict[Requirement, Finding] = {}

    def met(self, requirement: Requirement) -> None:
        """Record that *requirement* is met, unless a violation was recorded."""
        known = self._found.get(requirement)
        if known is None or known.result is Result.NOT_TRIED:
            self._found[requirement] = Finding(requirement=requirement, result=Result.MET)

    def broken(self, requirement: Requirement, exchange: Exchange, detail: str) -> None:
        """Record that *exchange* violates *requirement*, unless a violation is already recorded."""
        if requirement not in self:
            self._found[requirement] = Finding(
                requirement=requirement,
                result=Result.NOT_MET,
                detail=detail,
                asked=exchange.asked,
                answered=exchange.answered,
            )

    def check(self, requirement: Requirement, exchange: Exchange, *, is_met: bool, otherwise: str) -> bool:
        """Record whether *exchange* meets *requirement*, and return *is_met*.

        If *is_met* is False, *otherwise* describes the violation.
        """
        if is_met:
            self.met(requirement)
        else:
            self.broken(requirement, exchange, otherwise)
        return is_met

    def untried(self, requirement: Requirement, why: str) -> None:
        """Record why *requirement* was not checked, unless it has a finding."""
        if requirement not in self._found:
            self._found[requirement] = Finding(requirement=requirement, result=Result.NOT_TRIED, detail=why)

    def untried_without(self, needs: Needs, why: str) -> None:
        """Record why the requirements with *needs* were not checked."""
        for requirement in Requirement:
            if requirement.value.needs is needs:
                self.untried(requirement, why)

    def __contains__(self, requirement: Requirement) -> bool:
        """Return whether *requirement* has a violation."""
        known = self._found.get(requirement)
        return known is not None and known.result is Result.NOT_MET

    @property
    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each requirement, in the order of PROTOCOL.md."""
        for requirement in Requirement:
            yield self._found.get(requirement) or Finding(
                requirement=requirement,
                result=Result.NOT_TRIED,
                detail="An earlier check failed, so this requirement was not checked.",
            )
