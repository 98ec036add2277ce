"""What the kit found: one finding for each requirement, the first breach of it winning."""

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
    """What was found of one requirement."""

    requirement: Requirement
    result: Result
    detail: str | None = None
    """What is wrong, or why it was not tried."""
    asked: str | None = None
    """The request behind a breach."""
    answered: str | None = None
    """What came."""


class Report:
    """Collects findings; what nobody looked at was not tried."""

    def __init__(self) -> None:
        self._found: dict[Requirement, Finding] = {}

    def met(self, requirement: Requirement) -> None:
        """Note that *requirement* was tried and is met, unless a breach was seen."""
        known = self._found.get(requirement)
        if known is None or known.result is Result.NOT_TRIED:
            self._found[requirement] = Finding(requirement=requirement, result=Result.MET)

    def broken(self, requirement: Requirement, exchange: Exchange, detail: str) -> None:
        """Note a breach of *requirement* in *exchange*. The first breach stays."""
        if requirement not in self:
            self._found[requirement] = Finding(
                requirement=requirement,
                result=Result.NOT_MET,
                detail=detail,
                asked=exchange.asked,
                answered=exchange.answered,
            )

    def untried(self, requirement: Requirement, why: str) -> None:
        """Note why *requirement* cannot be tried, unless it was."""
        if requirement not in self._found:
            self._found[requirement] = Finding(requirement=requirement, result=Result.NOT_TRIED, detail=why)

    def untried_without(self, needs: Needs, why: str) -> None:
        """Note why the requirements with *needs* cannot be checked."""
        for requirement in Requirement:
            if requirement.value.needs is needs:
                self.untried(requirement, why)

    def __contains__(self, requirement: Requirement) -> bool:
        """Return whether a breach of *requirement* was seen."""
        known = self._found.get(requirement)
        return known is not None and known.result is Result.NOT_MET

    @property
    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each requirement, in the order of the page."""
        for requirement in Requirement:
            yield self._found.get(requirement) or Finding(
                requirement=requirement, result=Result.NOT_TRIED, detail="What it needs did not come."
            )
